//! The emulated drive: its arithmetic in simulated time, and real reads held to it.

use super::super::psync::PsyncEngine;
use super::super::{Slab, Slot};
use super::*;
use proptest::prelude::*;
use std::fs::File;
use std::io::Write;

const BYTES: u32 = 26 * 1024;

fn pace(rate: u64, latency_ns: u64, per_read_ns: u64, jitter: f64) -> Emulation {
    Emulation { rate_bytes_per_s: rate, latency_ns, per_read_ns, jitter, seed: 7, ..Emulation::default() }
}

#[test]
fn the_model_is_one_server_with_overlapping_latency() {
    let model = PaceModel::new("a", pace(50_000_000, 500_000, 10_000, 0.0));
    // 26 KiB at 50 MB/s = 532,480 ns.
    let first = model.serve(0, 1_000, u64::from(BYTES), 1.0);
    assert_eq!(first, Service { start_ns: 1_000, free_ns: 543_480, done_ns: 1_043_480 });
    let second = model.serve(first.free_ns, 1_000, u64::from(BYTES), 1.0);
    assert_eq!(second.start_ns, first.free_ns, "served after the first");
    assert_eq!(second.done_ns - first.done_ns, 542_480, "latency overlaps, service does not");
    let idle = model.serve(first.free_ns, 9_000_000, u64::from(BYTES), 1.0);
    assert_eq!(idle.start_ns, 9_000_000, "an idle drive starts at once");
}

#[test]
fn a_schedule_counts_from_the_first_read() {
    let steps = [crate::drive::spec::RateStep { at_ns: 1_000_000, rate_bytes_per_s: 1_000_000 }];
    let schedule = crate::drive::spec::RateSchedule::new(&steps).unwrap();
    let model = PaceModel::new("a", Emulation { schedule, ..pace(1_000_000_000, 0, 0, 0.0) });
    let busy = |first, at| model.serve_since(first, 0, at, 1000, 1.0).free_ns - at;
    assert_eq!((busy(5_000_000, 5_000_000), busy(5_000_000, 5_999_999)), (1000, 1000));
    assert_eq!(busy(5_000_000, 6_000_000), 1_000_000, "a thousandth of the rate from 1 ms after the first read on");
    assert_eq!(model.serve_since(0, 2_000_000, 0, 1000, 1.0).free_ns, 3_000_000, "by when the server turns to it");
}

#[test]
fn jitter_is_repeatable_and_depends_on_every_key() {
    let model = PaceModel::new("a", pace(1, 0, 0, 0.5));
    let base = model.factor(0, 4096, 0);
    assert_eq!(base, model.factor(0, 4096, 0));
    let other_seed = PaceModel::new("a", Emulation { seed: 8, ..*model.emulation() });
    let other_drive = PaceModel::new("b", *model.emulation());
    let others = [model.factor(0, 4096, 1), model.factor(0, 8192, 0), model.factor(1, 4096, 0)];
    for other in others.into_iter().chain([other_seed.factor(0, 4096, 0), other_drive.factor(0, 4096, 0)]) {
        assert_ne!(base, other);
        assert!((1.0..=1.5).contains(&other));
    }
    let mean = (0..4000).map(|i| model.factor(0, i * 512, 0)).sum::<f64>() / 4000.0;
    assert!((mean - 1.25).abs() < 0.02, "uniform over 1 to 1.5, mean {mean}");
}

proptest! {
    #[test]
    fn no_sequence_of_reads_beats_the_rate(
        rate in 1_000u64..20_000_000_000,
        latency in 0u64..1_000_000,
        per_read in 0u64..100_000,
        jitter in 0.0f64..1.0,
        reads in prop::collection::vec((0u64..1 << 24, 0u64..1_000_000), 1..40),
    ) {
        let model = PaceModel::new("a", pace(rate, latency, per_read, jitter));
        let (mut free, mut bytes, mut clock, mut last) = (0, 0u128, 0, 0);
        for (nth, &(len, gap)) in reads.iter().enumerate() {
            clock += gap;
            let s = model.serve(free, clock, len, model.factor(0, len, nth as u32));
            prop_assert!(s.start_ns >= clock && s.start_ns >= free);
            prop_assert!(s.free_ns >= s.start_ns + per_read && s.done_ns >= s.free_ns + latency);
            free = s.free_ns;
            bytes += u128::from(len);
            last = last.max(s.done_ns);
        }
        prop_assert!(u128::from(last) * u128::from(rate) >= bytes * 1_000_000_000);
    }
}

#[test]
fn two_drives_on_one_link_are_as_fast_as_the_link() {
    let hub = |rate_bytes_per_s| {
        let name = crate::drive::emulated_link::LinkName::new("hub").unwrap();
        Some(crate::drive::emulated_link::EmulatedLink { name, rate_bytes_per_s })
    };
    // Eight reads of a megabyte each from two drives of 1 MB a microsecond (1e12 B/s), asked for at once.
    let last = |link| {
        let pace = Emulation { link, ..pace(1_000_000_000_000, 5_000, 0, 0.0) };
        let drives = crate::io::paced_link::paced_drives(&[("a", Some(pace)), ("b", Some(pace))]).unwrap();
        let done = (0..8).map(|i: u64| drives[i as usize % 2].as_ref().unwrap().admit(0, i, 1_000_000, 100).done_ns);
        let last = done.max().unwrap() - 100 - 5_000;
        (last, drives[1].as_ref().unwrap().snapshot().link.map(|l| (l.crossed, l.behind_others)))
    };
    assert_eq!(last(None), (4_000, None), "each delivers four");
    assert_eq!(last(hub(2_000_000_000_000)).0, 4_000, "a link as fast as both delays nobody");
    assert_eq!(last(hub(1_000_000_000_000)), (8_000, Some((4, 4))), "eight reads after each other");
    assert_eq!(last(hub(500_000_000_000)).0, 16_000);
    let late = PacedDrive::new("c", pace(1_000_000_000_000, 0, 0, 0.0)).unwrap();
    assert_eq!(late.snapshot().link, None);
}

struct Rig {
    engine: PacedEngine,
    slab: Slab,
    drive: Arc<PacedDrive>,
    clock: Clock,
}

fn rig(emulation: Emulation, depth: u32, slots: u32) -> Rig {
    let drive = PacedDrive::new("a", emulation).unwrap();
    let clock = Clock::start();
    let (engine, slab) = engine_on(&drive, clock, depth, slots);
    Rig { engine, slab, drive, clock }
}

fn engine_on(drive: &Arc<PacedDrive>, clock: Clock, depth: u32, slots: u32) -> (PacedEngine, Slab) {
    let mut file: File = tempfile::tempfile().unwrap();
    file.write_all(&vec![3u8; BYTES as usize * 8]).unwrap();
    let signal = Arc::new(Signal::default());
    let slab = Slab::new(slots, u64::from(BYTES), Arc::clone(&signal)).unwrap();
    let engine = PacedEngine::new(Arc::clone(drive), signal, clock, |kick| {
        Ok(Box::new(PsyncEngine::new(vec![file], depth, slots, kick, clock)?))
    });
    (engine.unwrap(), slab)
}

fn request(tag: u64, slot: Slot) -> ReadRequest {
    ReadRequest { tag, file: 0, offset: tag % 8 * u64::from(BYTES), len: BYTES, need: BYTES, slot }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn two_concurrent_reads_take_at_least_twice_one_even_from_two_engines() {
    let drive = PacedDrive::new("a", pace(5_000_000, 100_000, 0, 0.0)).unwrap();
    let clock = Clock::start();
    let mut rigs = [engine_on(&drive, clock, 4, 4), engine_on(&drive, clock, 4, 4)];
    let start = clock.now_ns();
    for (engine, slab) in &mut rigs {
        engine.submit(&mut vec![request(1, slab.take().unwrap())]);
    }
    let mut out = Vec::new();
    for (engine, _) in &mut rigs {
        assert_eq!(engine.reap(1, soon(), &mut out), 1);
    }
    let last = out.iter().map(|c| c.completed_ns).max().unwrap();
    let one = u64::from(BYTES) * 1_000_000_000 / 5_000_000;
    assert!(last - start >= 2 * one, "{} < 2 x {one}", last - start);
    assert!(out.iter().all(|c| c.completed_ns - c.submitted_ns >= one + 100_000));
    assert_eq!(drive.snapshot().reads, 2);
}

#[test]
fn no_completion_is_released_before_its_deadline_and_the_median_error_is_small() {
    let mut rig = rig(pace(50_000_000, 500_000, 0, 0.1), 4, 8);
    let (mut out, mut left, mut tag) = (Vec::with_capacity(8), 300u64, 0u64);
    let mut last = 0;
    while left > 0 {
        let mut batch = Vec::new();
        while let Some(slot) = rig.slab.take() {
            batch.push(request(tag, slot));
            tag += 1;
        }
        rig.engine.submit(&mut batch);
        left = left.saturating_sub(rig.engine.reap(1, soon(), &mut out) as u64);
        for c in out.drain(..) {
            assert_eq!(c.outcome, ReadOutcome::Done { bytes: BYTES });
            assert_eq!(c.slot.bytes()[BYTES as usize - 1], 3);
            assert!(c.completed_ns - c.submitted_ns >= 532_480 + 500_000, "one read alone takes this long");
            assert!(c.completed_ns >= last);
            last = c.completed_ns;
        }
    }
    assert!(u128::from(last) * 50_000_000 >= 300 * u128::from(BYTES) * 1_000_000_000, "the rate holds overall");
    let seen = rig.drive.snapshot();
    println!(
        "error p50 {:.4} p99 {} ppm, overruns {}",
        seen.error_p50(),
        seen.error_ppm.value_at_quantile(0.99),
        seen.overruns
    );
    assert!(seen.reads >= 300);
    assert!(seen.error_p50() <= 0.03, "median pacing error {}", seen.error_p50());
    let counters = rig.engine.counters().snapshot();
    assert_eq!(counters.max_in_flight, 4, "the queue depth is the emulated drive's");
    assert!(counters.waited > 0);
}

#[test]
fn a_cancelled_read_occupies_the_drive_once_started_and_its_slot_until_reaped() {
    let mut rig = rig(pace(5_000_000, 0, 0, 0.0), 1, 3);
    let start = rig.clock.now_ns();
    let mut batch: Vec<_> = (0..3).map(|tag| request(tag, rig.slab.take().unwrap())).collect();
    rig.engine.submit(&mut batch);
    assert!(rig.engine.cancel(0), "started");
    assert!(rig.engine.cancel(1), "waiting");
    assert_eq!(rig.slab.free_slots(), 0);
    let mut out = Vec::new();
    assert_eq!(rig.engine.reap(3, soon(), &mut out), 3);
    let of = |tag| out.iter().find(|c| c.tag == tag).unwrap();
    assert_eq!((of(0).outcome, of(1).outcome), (ReadOutcome::Cancelled, ReadOutcome::Cancelled));
    assert_eq!(of(2).outcome, ReadOutcome::Done { bytes: BYTES });
    let one = u64::from(BYTES) * 1_000_000_000 / 5_000_000;
    assert!(of(2).completed_ns - start >= 2 * one, "the cancelled read was served first");
    assert!(!rig.engine.cancel(2), "no longer outstanding");
    assert_eq!(rig.drive.snapshot().reads, 2, "the one that never started cost nothing");
    drop(out);
    assert_eq!(rig.slab.free_slots(), 3);
}

#[test]
fn a_backing_read_slower_than_the_pace_is_an_overrun() {
    // A pace that no disk keeps: every read takes longer than its 1 ns deadline.
    let mut rig = rig(pace(u64::MAX, 0, 0, 0.0), 1, 4);
    let mut batch: Vec<_> = (0..4).map(|tag| request(tag, rig.slab.take().unwrap())).collect();
    rig.engine.submit(&mut batch);
    rig.engine.reap(4, soon(), &mut Vec::new());
    let seen = rig.drive.snapshot();
    assert_eq!((seen.reads, seen.overruns), (4, 4));
    assert!(seen.overrun_share() == 1.0 && seen.error_p50() > 0.03);
}
