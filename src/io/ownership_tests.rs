//! Who owns a slot, for every engine: until a read's completion has been reaped the engine does, also when the read was
//! cancelled, the engine moved to another thread, or was dropped.

use super::engine_tests::{BLOCK, Rig, Variant, content, rig, variants};
use super::*;

#[test]
fn a_cancelled_read_keeps_its_slot_until_reaped() {
    for v in variants() {
        // Depth 1: the first is in flight or done, the others wait.
        let mut rig = rig(v, 1, 8);
        let batch = (0..8).map(|i| rig.request(i, i * 4096, BLOCK, BLOCK)).collect();
        rig.submit(batch);
        let cancelled: Vec<u64> = (0..8).rev().filter(|&tag| rig.engine.cancel(tag)).collect();
        assert!(!rig.engine.cancel(99), "never submitted: {v:?}");
        assert_eq!(rig.slab.free_slots(), 0, "all slots are still owned: {v:?}");
        let out = rig.reap(8);
        for c in &out {
            match c.outcome {
                ReadOutcome::Cancelled => assert!(cancelled.contains(&c.tag), "{v:?}"),
                ReadOutcome::Done { .. } => {
                    assert!(!cancelled.contains(&c.tag), "{v:?}");
                    assert!(c.slot.bytes()[..4096] == content(c.tag * 4096, 4096)[..], "{v:?}");
                }
                other => panic!("{v:?}: {other:?}"),
            }
        }
        assert!((0..8).all(|tag| !rig.engine.cancel(tag)), "nothing is outstanding: {v:?}");
        drop(out);
        assert_eq!(rig.slab.free_slots(), 8, "{v:?}");
        let seen = rig.engine.counters().snapshot();
        assert_eq!((seen.cancelled, seen.completed), (cancelled.len() as u64, 8), "{v:?}");
        // The engine goes on working.
        assert_eq!(rig.read(0, BLOCK, BLOCK).outcome, ReadOutcome::Done { bytes: BLOCK }, "{v:?}");
    }
}

#[test]
fn a_withdrawn_read_was_never_started_and_all_others_are_read() {
    for v in variants() {
        let mut rig = rig(v, 1, 8);
        rig.submit((0..8).map(|tag| rig.request(tag, tag * u64::from(BLOCK), BLOCK, BLOCK)).collect());
        // The last one first, so that the engine cannot get there before.
        let withdrawn: Vec<u64> = (0..8).rev().filter(|&tag| rig.engine.withdraw(tag)).collect();
        assert!(!rig.engine.withdraw(99), "never submitted: {v:?}");
        for c in rig.reap(8) {
            if withdrawn.contains(&c.tag) {
                assert_eq!(c.outcome, ReadOutcome::Cancelled, "{v:?}");
            } else {
                assert_eq!(c.outcome, ReadOutcome::Done { bytes: BLOCK }, "{v:?}: what had begun goes on");
                let want = content(c.tag * u64::from(BLOCK), u64::from(BLOCK));
                assert_eq!(c.slot.bytes()[..BLOCK as usize], want, "{v:?}");
            }
        }
        let seen = rig.engine.counters().snapshot();
        assert_eq!((seen.cancelled, seen.completed), (withdrawn.len() as u64, 8), "{v:?}");
        assert!((0..8).all(|tag| !rig.engine.withdraw(tag)), "nothing is outstanding: {v:?}");
    }
}

#[test]
fn reads_cancelled_in_flight_end_once_each_and_nothing_is_written_afterwards() {
    for v in variants() {
        let mut rig = rig(v, 8, 8);
        for round in 0..20u64 {
            let batch = (0..8).map(|i| rig.request(round * 8 + i, i * 16_384, 4 * BLOCK, BLOCK)).collect();
            rig.submit(batch);
            let asked = (0..8).filter(|i| rig.engine.cancel(round * 8 + i)).count();
            let mut out = rig.reap(8);
            let cancelled = out.iter().filter(|c| c.outcome == ReadOutcome::Cancelled).count();
            assert_eq!(cancelled, asked, "{v:?}");
            for c in &mut out {
                c.slot.bytes_mut().fill(0xee);
            }
            assert!(out.iter().all(|c| c.slot.bytes().iter().all(|&b| b == 0xee)), "{v:?}");
        }
        assert_eq!(rig.slab.free_slots(), 8, "{v:?}");
    }
}

#[test]
fn dropping_an_engine_waits_for_its_reads_and_gives_every_slot_back() {
    for v in variants() {
        let mut rig = rig(v, 4, 16);
        let batch = (0..16).map(|i| rig.request(i, i * 4 * 4096 % (60 * 4096), 4 * BLOCK, BLOCK)).collect();
        rig.submit(batch);
        let counters = rig.engine.counters();
        drop(rig.engine);
        assert_eq!(rig.slab.free_slots(), 16, "{v:?}");
        assert_eq!(counters.snapshot().submitted, 16, "counters outlive the engine: {v:?}");
        let mut slots: Vec<Slot> = std::iter::from_fn(|| rig.slab.take()).collect();
        slots.iter_mut().for_each(|s| s.bytes_mut().fill(0x55));
        assert!(slots.iter().all(|s| s.bytes().iter().all(|&b| b == 0x55)), "{v:?}");
    }
}

/// Submits on another thread, which then ends, or stays alive (without calling the kernel) until the engine has moved.
fn moved_with_reads_in_flight(v: Variant, first_lives_on: bool) -> Rig {
    let mut rig = rig(v, 4, 8);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (give, take) = std::sync::mpsc::channel();
    let first = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let batch = (0..8).map(|i| rig.request(i, i * 16_384, 4 * BLOCK, BLOCK)).collect();
            rig.submit(batch);
            rig.engine.cancel(0);
            give.send(rig).unwrap();
            while first_lives_on && !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        }
    });
    let mut moved = take.recv().unwrap();
    if !first_lives_on {
        first.join().unwrap();
        return moved;
    }
    let out = moved.reap(8);
    stop.store(true, Ordering::Relaxed);
    first.join().unwrap();
    for c in out {
        if c.outcome != ReadOutcome::Cancelled {
            assert_eq!(c.outcome, ReadOutcome::Done { bytes: 4 * BLOCK }, "{v:?}");
            assert!(c.slot.bytes() == &content(c.tag * 16_384, 16_384)[..], "{v:?}");
        }
    }
    moved
}

#[test]
fn an_engine_may_move_to_another_thread_with_reads_in_flight() {
    for v in variants() {
        for first_lives_on in [true, false] {
            for _ in 0..3 {
                let mut rig = moved_with_reads_in_flight(v, first_lives_on);
                if !first_lives_on {
                    drop(rig.reap(8));
                }
                assert_eq!(rig.slab.free_slots(), 8, "{v:?}");
                let done = rig.read(4096, BLOCK, BLOCK);
                assert!(done.slot.bytes()[..4096] == content(4096, 4096)[..], "it goes on working: {v:?}");
            }
        }
    }
}

#[test]
fn an_engine_may_be_dropped_on_another_thread_with_reads_in_flight() {
    for v in variants() {
        let rig = moved_with_reads_in_flight(v, false);
        drop(rig.engine);
        let mut slots: Vec<Slot> = std::iter::from_fn(|| rig.slab.take()).collect();
        assert_eq!(slots.len(), 8, "{v:?}");
        slots.iter_mut().for_each(|s| s.bytes_mut().fill(0x55));
        assert!(slots.iter().all(|s| s.bytes().iter().all(|&b| b == 0x55)), "{v:?}");
    }
}
