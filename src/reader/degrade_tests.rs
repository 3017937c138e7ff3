//! Drives that misbehave under a reader: what moves, what is left alone, what comes back, and what is said when nothing is left.

use super::tests::{LAYERS, all, folder, options, payload, stage, step, take_all};
use super::*;
use crate::clock::Clock;
use crate::drive::spec::Emulation;
use crate::ids::{DriveId, ExpertId};
use crate::layout::plan::Plan;
use crate::source::{Barrier, SourceError};
use crate::trace::events::ReadResult;

/// A reader over the plan's drives with `faults`.
pub(super) fn with(plan: &Plan, faults: &str, change: impl FnOnce(&mut ReaderOptions)) -> ExpertReader {
    let mut options = options();
    options.faults = crate::drive::fault_rule::DriveFault::parse_all(faults).unwrap();
    options.dispatch = DispatchPolicy::FirstHit;
    (options.trace_reads, options.trace_barriers) = (10_000, 10_000);
    change(&mut options);
    ExpertReader::open(plan, &mounts_of(plan, None).unwrap(), &options, Clock::start()).unwrap()
}

/// Barriers until `over`, at most `most` of them; every byte is checked.
pub(super) fn read_until(reader: &mut ExpertReader, most: usize, over: impl Fn(&ReaderCounters) -> bool) -> usize {
    let handle = reader.handle();
    for n in 0..most {
        if over(&handle.counters()) {
            return n;
        }
        take_all(reader, LAYERS[n % 2], &all()).unwrap();
    }
    panic!("not within {most} barriers: {:?}", handle.counters().drive_events);
}

#[test]
fn a_drive_that_vanishes_in_a_barrier_is_left_alone_and_comes_back_after_good_probes() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    // Gone in the middle of the second barrier; three probes find nothing, the next ones find it again.
    let mut reader = with(&plan, "d0: vanish @12..19", |_| {});
    let handle = reader.handle();
    (0..2).for_each(|n| drop(take_all(&mut reader, LAYERS[n], &all()).unwrap()));
    let seen = handle.counters();
    assert_eq!((seen.drives[0].errors, seen.failovers, seen.drives[0].degraded), (4, 4, 1));
    assert_eq!((seen.drives[0].reads, seen.drives[1].reads), (12, 4));
    let event = seen.drive_events[0];
    assert_eq!((event.drive, event.happened), (DriveId(0), Happened::Degraded(Trouble::Gone)));
    assert_eq!((event.step, event.barrier), (3, 1));
    assert!(event.after_ns <= event.at_ns && seen.failing_wait_ns > 0);

    let took = read_until(&mut reader, 4000, |c| c.drives[0].restored == 1);
    let seen = handle.counters();
    assert_eq!((seen.drives[0].errors, seen.failovers), (4, 4), "demand has not asked it again");
    assert_eq!((seen.drives[0].probes.reads, seen.drives[0].good_probes.reads), (3 + 3, 3));
    // The last answer may come when the next barrier opens, before its reads are decided on.
    let steered = 8 * (took as u64 - 1)..=8 * took as u64;
    assert!(steered.contains(&seen.steered), "{} read elsewhere at the first try in {took} barriers", seen.steered);
    assert_eq!(seen.decisions_not_primary, 0, "which is no choice of the policy");
    assert!((took as u64..=took as u64 + 1).contains(&seen.barriers_degraded));
    // 16 barriers to the first probe, 32, 64 and 128 after bad ones, 4 after each good one; more where an answer takes a while.
    assert!(took >= 16 + 32 + 64 + 128, "{took} barriers");
    let before = seen.drives[0].reads;
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    let seen = handle.counters();
    assert_eq!(seen.drives[0].reads, before + 8, "and now it serves demand");
    assert_eq!(handle.free_slots(), seen.slots);
    let trace = handle.take_trace().unwrap();
    trace.check_complete().unwrap();
    assert_eq!(
        trace.reads().iter().filter(|r| r.result == ReadResult::Error).count(),
        4,
        "probes are no reads of a trace"
    );
}

#[test]
fn bad_blocks_and_wrong_bytes_move_one_by_one_and_too_many_degrade() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let mut reader = with(&plan, "d0: eio @2; d0: short @5; d0: flip @11", |_| {});
    for n in 0..4 {
        take_all(&mut reader, LAYERS[n % 2], &all()).unwrap();
    }
    let seen = reader.handle().counters();
    assert_eq!((seen.drives[0].errors, seen.drives[0].digest_errors, seen.failovers), (3, 1, 3));
    assert_eq!((seen.drives[0].degraded, seen.steered), (0, 0), "a bad block must not cost a drive");
    let injected: Vec<u64> = seen.drives[0].faults.as_ref().unwrap().injected.iter().map(|r| r.1).collect();
    assert_eq!(injected, [1, 1, 1]);

    let mut reader = with(&plan, "d0: eio", |_| {});
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    take_all(&mut reader, LAYERS[1], &all()).unwrap();
    let seen = reader.handle().counters();
    assert_eq!((seen.drives[0].errors, seen.failovers, seen.drives[0].degraded), (8, 8, 1));
    assert_eq!(seen.drive_events[0].happened, Happened::Degraded(Trouble::Failing));
    assert_eq!((seen.steered, seen.drives[1].reads), (8, 16));
}

#[test]
fn a_drive_that_hangs_costs_one_timeout_and_its_slots_and_no_more() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    for dispatch in DispatchPolicy::ALL {
        let mut reader = with(&plan, "d0: stall @0..", |o| (o.read_timeout_ms, o.dispatch) = (700, dispatch));
        for n in 0..12 {
            take_all(&mut reader, LAYERS[n % 2], &all()).unwrap();
        }
        let handle = reader.handle();
        let seen = handle.counters();
        let (hung, name) = (seen.drives[0].timeouts, dispatch.name());
        assert!((1..=8).contains(&hung), "{name}: {hung} reads hung, all in the first barrier");
        assert_eq!(seen.drive_events.len(), 1, "{name}: {:?}", seen.drive_events);
        assert_eq!(
            (seen.drive_events[0].happened, seen.drive_events[0].barrier),
            (Happened::Degraded(Trouble::Silent), 0)
        );
        assert!(seen.drive_events[0].after_ns >= 700_000_000 && seen.failing_wait_ns >= 700_000_000, "{name}");
        assert_eq!(seen.steered, 8 * 11, "{name}");
        assert!(handle.free_slots() >= seen.slots - 8, "{name}");
    }
}

#[test]
fn what_is_asked_again_has_the_whole_timeout_before_it() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    // The first home fails late, and the second takes longer than what was left then.
    let faults = "d0: stall 1600ms; d0: short; d1: stall 700ms";
    let mut reader = with(&plan, faults, |o| (o.read_timeout_ms, o.queue_depth) = (2000, 8));
    let handle = reader.handle();
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    let seen = handle.counters();
    assert_eq!((seen.failovers, seen.drives[0].timeouts, seen.drives[1].timeouts), (8, 0, 0));
    assert_eq!(seen.drives[1].degraded, 0, "it was never silent");
}

#[test]
fn a_barrier_in_waves_finds_a_drive_again_too() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let mut reader = with(&plan, "d0: vanish @1..9", |o| o.buffer_bytes = 3 * 16_384);
    let handle = reader.handle();
    read_until(&mut reader, 4000, |c| c.drives[0].restored == 1);
    let seen = handle.counters();
    assert!(seen.waves > seen.barriers && seen.drives[0].good_probes.reads == 3, "{} waves", seen.waves);
    assert_eq!(handle.free_slots(), seen.slots);
}

#[test]
fn hedges_leave_a_hung_drive_its_slots_and_probes_ask_only_for_what_is_elsewhere_too() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| if e < 6 { vec![0, 1] } else { vec![0] });
    let both: Vec<ExpertId> = (0..6).map(ExpertId).collect();
    let mut reader = with(&plan, "d0: stall @0..", |o| (o.read_timeout_ms, o.hedge_after_permille) = (700, Some(1)));
    (0..40).for_each(|n| drop(take_all(&mut reader, LAYERS[n % 2], &both).unwrap()));
    let handle = reader.handle();
    let seen = handle.counters();
    assert_eq!((seen.drives[0].timeouts, seen.hedges_issued), (6, 0), "every second home is on the hung drive");
    assert!(handle.free_slots() >= seen.slots - 6 - 1, "and no more than a probe hangs too");

    let mut reader = with(&plan, "d0: eio @0..6", |_| {});
    take_all(&mut reader, LAYERS[0], &both).unwrap();
    (0..40).for_each(|n| drop(take_all(&mut reader, LAYERS[n % 2], &[ExpertId(6)]).unwrap()));
    let seen = reader.handle().counters();
    assert_eq!((seen.drives[0].degraded, seen.drives[0].reads, seen.drives[0].probes.reads), (1, 40, 0));
    for n in 0..200 {
        if reader.handle().counters().drives[0].restored == 1 {
            break;
        }
        take_all(&mut reader, LAYERS[n % 2], &both).unwrap();
    }
    let seen = reader.handle().counters();
    assert_eq!((seen.drives[0].restored, seen.drives[0].good_probes.reads), (1, 3));
    let checked: u64 = seen.drives.iter().map(|d| d.digests_checked).sum();
    assert_eq!(checked, seen.drives.iter().map(|d| d.reads).sum::<u64>(), "probes are checked apart");
}

#[test]
fn a_rate_at_which_an_expert_takes_longer_than_silence_may_last_is_refused() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let open = |rate: u64| {
        let options = ReaderOptions { max_read_bytes_per_s: rate, read_timeout_ms: 500, ..options() };
        ExpertReader::open(&plan, &mounts_of(&plan, None).unwrap(), &options, Clock::start())
    };
    let error = open(9_999).err().unwrap().to_string();
    assert!(error.contains("--max-read-rate 9999") && error.contains("at least 10000 B/s"), "{error}");
    open(10_000).unwrap();
}

#[test]
fn when_nothing_is_left_the_message_names_what_is_lost_where_and_how_to_mend_it() {
    let dir = folder();
    // Experts 0 to 5 are on both drives, 6 and 7 on d0 alone.
    let plan = stage(dir.path(), 2, |e| if e < 6 { vec![0, 1] } else { vec![0] });
    let mut reader = with(&plan, "d0: vanish @0..", |o| o.stage_arguments = Some("p.json --drives d.toml".into()));
    let both: Vec<ExpertId> = (0..6).map(ExpertId).collect();
    take_all(&mut reader, LAYERS[0], &both).unwrap();
    let error = take_all(&mut reader, LAYERS[1], &all()).unwrap_err().to_string();
    let parts = [
        "expert 6 of layer 4",
        "drive `d0`",
        "no other copy is left",
        "4 experts of the plan are on no other drive than `d0`",
        "L1-E6, L1-E7, L4-E6, L4-E7",
        "argodrive stage --repair p.json --drives d.toml",
    ];
    for part in parts {
        assert!(error.contains(part), "no `{part}` in: {error}");
    }
    take_all(&mut reader, LAYERS[1], &both).unwrap();
    // A silent drive, and both drives in the end.
    let mut reader = with(&plan, "d0: stall @0..; d1: vanish @6..", |o| o.read_timeout_ms = 700);
    take_all(&mut reader, LAYERS[0], &both).unwrap();
    let error = take_all(&mut reader, LAYERS[0], &both).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("`d0`") && text.contains("(and `d1`)") && text.contains("16 experts"), "{text}");
    let mut reader = with(&plan, "d0: stall @0..", |o| o.read_timeout_ms = 300);
    let error = take_all(&mut reader, LAYERS[0], &[ExpertId(7)]).unwrap_err();
    assert!(matches!(&error, SourceError::Timeout(m) if m.contains("4 experts") && m.contains("L1-E6")), "{error}");
    let error = ExpertReader::open(&plan, &mounts_of(&plan, None).unwrap(), &faulty("d7: eio"), Clock::start());
    assert!(error.err().unwrap().to_string().contains("no drive `d7`; it has d0, d1"));
}

fn faulty(faults: &str) -> ReaderOptions {
    let faults = crate::drive::fault_rule::DriveFault::parse_all(faults).unwrap();
    ReaderOptions { faults, ..options() }
}

/// A pace that a busy machine keeps.
fn pace(rate_bytes_per_s: u64) -> Emulation {
    Emulation { rate_bytes_per_s, latency_ns: 200_000, ..Emulation::default() }
}

#[test]
fn a_drive_that_sinks_far_below_itself_is_shed_and_one_that_was_never_faster_is_not() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| if e % 2 == 0 { vec![0, 1] } else { vec![1, 0] });
    let read_of = |plan: &Plan, faults: &str, rates: [u64; 2], shed: bool, barriers: usize| {
        let mut mounts = mounts_of(plan, None).unwrap();
        for (mount, rate) in mounts.iter_mut().zip(rates) {
            mount.emulate = Some(pace(rate));
        }
        let mut options = faulty(faults);
        (options.shed, options.dispatch, options.trace_barriers) =
            (if shed { Shedding::On } else { Shedding::Off }, DispatchPolicy::FirstHit, 1000);
        options.trace_reads = 20_000;
        let mut reader = ExpertReader::open(plan, &mounts, &options, Clock::start()).unwrap();
        for n in 0..barriers {
            let mut barrier = Barrier::open(&mut reader, &step(), LAYERS[n % 2], &all()[..4]).unwrap();
            while let Some(lease) = barrier.next_arrival().unwrap() {
                assert_eq!(lease.bytes(), payload(LAYERS[n % 2], lease.expert().0));
            }
        }
        reader.handle().counters()
    };
    let read = |faults: &str, rates, shed, barriers| read_of(&plan, faults, rates, shed, barriers);
    // A read takes some 3 ms; from its 80th on, sixteen times as long.
    let slow = "d1: slow 125KB/s @80..";
    let seen = read(slow, [2_000_000; 2], true, 90);
    let of = |happened: fn(&Happened) -> bool| seen.drive_events.iter().filter(|e| happened(&e.happened)).count();
    assert_eq!(of(|h| matches!(h, Happened::Throttled { .. })), 1, "{:?}", seen.drive_events);
    assert_eq!((seen.drives[1].shed, seen.drives[1].shed_due, seen.drives[0].shed), (1, 1, 0));
    let shed = seen.drive_events.iter().find(|e| e.happened == Happened::Degraded(Trouble::Slow)).unwrap();
    // sixteen times its best is far enough for the fewest busy periods
    assert!((40 + 4..40 + 28).contains(&shed.barrier), "shed in barrier {}", shed.barrier);
    assert_eq!(seen.steered, 4 * (90 - shed.barrier - 1), "from then on nothing waits for it");
    let seen = read(slow, [2_000_000; 2], false, 70);
    assert_eq!((seen.drives[1].shed_due, seen.drives[1].shed, seen.steered), (1, 0, 0), "it is told, and not done");
    let alone = folder();
    let single = stage(alone.path(), 2, |e| vec![(e % 2) as u8]);
    let seen = read_of(&single, slow, [2_000_000; 2], true, 70);
    let told = (seen.drives[1].throttled, seen.drives[1].shed_due, seen.drives[1].shed);
    assert_eq!(told, (1, 0, 0), "nothing on it is elsewhere too");
    let seen = read("", [2_000_000, 250_000], true, 45);
    assert!(seen.drive_events.is_empty() && seen.drives[1].shed_due == 0, "{:?}", seen.drive_events);
}
