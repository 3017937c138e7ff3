//! Several things that go wrong at once: two drives lost together, drives lost while a barrier comes in waves, and while hedges are out.

use super::degrade_tests::{read_until, with};
use super::tests::{LAYERS, all, folder, stage, take_all};
use super::*;
use crate::ids::DriveId;
use crate::layout::plan::Plan;
use crate::trace::events::ReadResult;

#[test]
fn two_drives_lost_at_once_leave_the_third_to_serve() {
    let dir = folder();
    let plan = stage(dir.path(), 3, |e| if e % 2 == 0 { vec![0, 1, 2] } else { vec![1, 0, 2] });
    for dispatch in DispatchPolicy::ALL {
        let mut reader = with(&plan, "d0: vanish @2..; d1: vanish @2..", |o| o.dispatch = dispatch);
        let name = dispatch.name();
        (0..6).for_each(|n| drop(take_all(&mut reader, LAYERS[n % 2], &all()).unwrap())); // checks every byte
        let handle = reader.handle();
        let seen = handle.counters();
        assert_eq!((seen.drives[0].degraded, seen.drives[1].degraded, seen.drives[2].degraded), (1, 1, 0), "{name}");
        assert_eq!(seen.drive_events.len(), 2, "{name}: {:?}", seen.drive_events);
        let errors: u64 = seen.drives.iter().map(|d| d.errors).sum();
        assert_eq!(seen.failovers, errors, "{name}: what failed was asked for again, each time once");
        let served: Vec<u64> = seen.drives.iter().map(|d| d.reads).collect();
        if dispatch != DispatchPolicy::Split {
            assert_eq!(served.iter().sum::<u64>(), 6 * 8, "{name}: {served:?}");
        }
        assert_eq!((served[0], served[1]), (2, 2), "{name}");
        assert!(seen.steered >= 8 * 3, "{name}: {} steered", seen.steered);
        assert_eq!(handle.free_slots(), seen.slots, "{name}");
        let trace = handle.take_trace().unwrap();
        assert_eq!(trace.reads().iter().filter(|r| r.result == ReadResult::Error).count() as u64, errors, "{name}");
    }
}

#[test]
fn of_two_drives_in_trouble_the_one_that_delivers_is_asked() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    for dispatch in DispatchPolicy::ALL {
        for (worst, other) in
            [(Trouble::Silent, Trouble::Slow), (Trouble::Gone, Trouble::Failing), (Trouble::Failing, Trouble::Slow)]
        {
            let mut reader = with(&plan, "d0: stall @0..", |o| (o.read_timeout_ms, o.dispatch) = (20_000, dispatch));
            (0..2).zip([worst, other]).for_each(|(drive, why)| degrade(&mut reader, drive, why));
            (0..8).for_each(|n| drop(take_all(&mut reader, LAYERS[n % 2], &all()).unwrap()));
            let seen = reader.handle().counters();
            let asked = seen.drives[0].faults.as_ref().unwrap().injected[0].1;
            assert_eq!((asked, seen.drives[1].reads), (0, 64), "{}: {worst:?}, {other:?}", dispatch.name());
        }
    }
}

#[test]
fn a_drive_that_hangs_while_a_barrier_comes_in_waves_costs_its_slots_and_then_says_so() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let in_waves = |o: &mut ReaderOptions| (o.buffer_bytes, o.read_timeout_ms, o.queue_depth) = (3 * 8192, 500, 4);
    // One read of the first wave and one of a later one hang; the third slot carries the rest.
    let mut reader = with(&plan, "d0: stall @1; d0: stall @4", in_waves);
    let handle = reader.handle();
    (0..4).for_each(|n| drop(take_all(&mut reader, LAYERS[n % 2], &all()).unwrap()));
    let seen = handle.counters();
    assert!(seen.waves > seen.barriers && seen.slots == 3, "{} waves", seen.waves);
    assert_eq!((seen.drives[0].timeouts, seen.drives[0].degraded, seen.failovers), (2, 1, 2), "it is left alone then");
    assert_eq!(handle.free_slots(), 1, "two hang for ever");
    // All slots are with a drive that does not answer: nothing can go on, and the words are about that.
    let mut reader = with(&plan, "d0: stall @0..", in_waves);
    let error = take_all(&mut reader, LAYERS[0], &all()).unwrap_err().to_string();
    for part in ["none of the 3 slots", "3 reads keep theirs", "`d0` does not answer", "--buffer-bytes"] {
        assert!(error.contains(part), "no `{part}` in: {error}");
    }
}

#[test]
fn a_drive_that_vanishes_while_a_prompt_comes_in_waves_changes_no_byte() {
    let dir = folder();
    let plan = stage(dir.path(), 3, |e| vec![(e % 3) as u8, ((e + 1) % 3) as u8]);
    for dispatch in DispatchPolicy::ALL {
        let faults = "d1: vanish @1..";
        let mut reader = with(&plan, faults, |o| (o.buffer_bytes, o.dispatch) = (3 * 8192, dispatch));
        let handle = reader.handle();
        (0..4).for_each(|n| drop(take_all(&mut reader, LAYERS[n % 2], &all()).unwrap()));
        let (seen, name) = (handle.counters(), dispatch.name());
        assert!(seen.waves > seen.barriers, "{name}");
        // who goes by rates may ask it nothing more, if its one read was slow
        let failed = seen.drives[1].errors;
        let by_rates = [DispatchPolicy::ExpectedCompletion, DispatchPolicy::Split].contains(&dispatch);
        assert!(failed > 0 || by_rates, "{name}");
        assert_eq!(
            (seen.drives[1].degraded, seen.drives[1].reads, seen.failovers),
            (u64::from(failed > 0), 1, failed),
            "{name}"
        );
        assert_eq!(handle.free_slots(), seen.slots, "{name}");
    }
}

#[test]
fn when_a_hedge_fails_the_first_goes_on_and_when_the_first_fails_its_hedge_does() {
    let dirs = [folder(), folder()];
    let plans = [stage(dirs[0].path(), 2, |_| vec![0, 1]), stage(dirs[1].path(), 3, |_| vec![0, 1, 2])];
    // One read of the first barrier hangs for a while, and is hedged when the others are there.
    let read = |plan: &Plan, faults: &str| {
        let mut reader = with(plan, faults, |o| (o.hedge_after_permille, o.read_timeout_ms) = (Some(990), 20_000));
        reader.hedge_after_ns = vec![Some(100_000_000); plan.drives.len()]; // as after many barriers
        take_all(&mut reader, LAYERS[0], &all()).map(|_| reader.handle().counters()) // checks every byte
    };
    let hedges = |c: &ReaderCounters| (c.hedges_issued, c.hedges_won, c.hedges_cancelled, c.failovers);
    let drives = |c: &ReaderCounters| c.drives.iter().map(|d| (d.reads, d.errors)).collect::<Vec<_>>();
    let seen = read(&plans[0], "d0: stall 1200ms @3; d1: vanish @0..").unwrap();
    assert_eq!(hedges(&seen), (1, 0, 0, 0), "nobody asked again: the first was on its way");
    assert_eq!((drives(&seen), seen.drives[1].degraded), (vec![(8, 0), (0, 1)], 1));

    let late = "d0: stall 1200ms @3; d0: short @3; d1: stall 2s @0";
    let seen = read(&plans[0], late).unwrap();
    assert_eq!(hedges(&seen), (1, 0, 0, 0), "the hedge goes on in its place");
    assert_eq!(drives(&seen), [(7, 1), (1, 0)]);
    let both = format!("{late}; d1: short @0");
    let error = read(&plans[0], &both).unwrap_err().to_string();
    assert!(error.contains("no other copy is left") && error.contains("drive `d1`"), "{error}");
    let seen = read(&plans[1], &both).unwrap();
    assert_eq!(hedges(&seen), (2, 1, 0, 0), "what is left of the two is hedged on a third drive");
    assert_eq!((drives(&seen)[0], drives(&seen)[2]), ((7, 1), (1, 0)));
}

fn degrade(reader: &mut ExpertReader, drive: usize, why: Trouble) {
    let now = reader.now();
    assert!(reader.health[drive].degrade(why, now));
    reader.happened(DriveId(drive as u8), Happened::Degraded(why), 0, now);
}

#[test]
fn a_drive_that_is_back_is_found_also_while_the_only_other_one_is_in_trouble() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let mut reader = with(&plan, "", |_| {});
    degrade(&mut reader, 0, Trouble::Gone);
    degrade(&mut reader, 1, Trouble::Failing);
    let handle = reader.handle();
    let barriers = read_until(&mut reader, 400, |c| c.drives[0].restored == 1) as u64;
    let seen = handle.counters();
    assert_eq!(seen.drives[0].good_probes.reads, 3, "it was asked while the other served");
    // The last answer may come when a barrier opens, which then asks it for all and the other for a probe.
    let served = (seen.drives[0].reads, seen.drives[1].reads);
    assert!([(0, 8 * barriers), (8, 8 * (barriers - 1))].contains(&served), "{served:?} in {barriers} barriers");
    assert!(seen.drives[1].probes.reads <= 1);
    read_until(&mut reader, 400, |c| c.drives[1].restored == 1);
    assert_eq!(handle.counters().drives[1].good_probes.reads, 3, "and then the other");
}
