//! The expert cache over small pack folders: hits, eviction, loans that outlast it, and a budget that does not fit.

use super::tests::{LAYERS, PAYLOAD, folder, open, options, payload, stage};
use super::*;
use crate::ids::ExpertId;
use crate::source::{Barrier, Lease, Phase, StepInfo};
use crate::trace::events::Cause;

const SLOT: u64 = 8192;

fn cached(slots: u64, policy: CachePolicy) -> ReaderOptions {
    ReaderOptions { cache_bytes: slots * SLOT, cache_policy: policy, demand_reserve: 2, ..options() }
}

fn take(reader: &mut ExpertReader, step: u64, experts: &[u16]) -> Vec<Lease> {
    let info = StepInfo { step, phase: Phase::Decode, pos: step, rows: 1 };
    let asked: Vec<ExpertId> = experts.iter().copied().map(ExpertId).collect();
    let mut barrier = Barrier::open(reader, &info, LAYERS[0], &asked).unwrap();
    let mut leases = Vec::new();
    while let Some(lease) = barrier.next_arrival().unwrap() {
        assert_eq!(lease.bytes(), payload(LAYERS[0], lease.expert().0));
        leases.push(lease);
    }
    assert_eq!(leases.len(), experts.len());
    leases
}

#[test]
fn experts_stay_are_hit_and_go_in_the_order_of_the_policy() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| vec![(e % 2) as u8]);
    let mut reader = open(&plan, &cached(3, CachePolicy::Lru)).unwrap();
    let handle = reader.handle();
    // The hand-worked example of the policy: 4 replaces 2, 2 replaces 3, 5 replaces 1.
    for (step, expert) in (0..).zip([1, 2, 3, 1, 4, 2, 5]) {
        take(&mut reader, step, &[expert]);
    }
    let seen = handle.counters();
    let c = &seen.cache;
    assert_eq!((c.hits, c.misses, c.insertions, c.evictions, c.refused), (1, 6, 6, 3, 0));
    assert_eq!((c.slots, c.most_slots, c.choices_not_lru), (3, 3, 0));
    assert_eq!(c.choices_by_policy, [3, 0, 0]);
    assert_eq!(seen.payload_bytes(), 6 * PAYLOAD, "a hit reads nothing");
    assert_eq!(handle.free_slots(), seen.slots - 3);
    let trace = handle.take_trace().unwrap();
    let hits: Vec<u32> = trace.barriers().iter().map(|b| b.hits).collect();
    assert_eq!(hits, [0, 0, 0, 1, 0, 0, 0]);
    let hit = trace.barriers()[3];
    assert_eq!((hit.bytes, hit.straggler, hit.cause, hit.last_ns), (0, None, Cause::None, hit.open_ns));
    assert_eq!(trace.barriers()[5].cause, Cause::Evicted, "2 had been there and is read again");
    assert_ne!(trace.barriers()[4].cause, Cause::Evicted);
    drop(reader);
    assert_eq!(handle.free_slots(), seen.slots, "and all come back in the end");
}

#[test]
fn a_cache_of_nothing_has_no_hits() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let mut reader = open(&plan, &options()).unwrap();
    (0..4).for_each(|step| drop(take(&mut reader, step, &[1, 2])));
    let seen = reader.handle().counters();
    assert_eq!(seen.cache, CacheCounters::default());
    assert_eq!(reader.handle().free_slots(), seen.slots);
}

#[test]
fn what_is_on_loan_does_not_go_and_loans_may_overlap() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let mut reader = open(&plan, &cached(2, CachePolicy::Lru)).unwrap();
    let handle = reader.handle();
    let held = take(&mut reader, 0, &[1, 2]);
    let again = take(&mut reader, 1, &[1]);
    assert_eq!(handle.counters().cache.hits, 1, "the same slot, lent twice");
    drop(take(&mut reader, 2, &[3]));
    assert_eq!((handle.counters().cache.busy, handle.counters().cache.evictions), (1, 0));
    drop(held);
    drop(take(&mut reader, 3, &[3]));
    drop(take(&mut reader, 4, &[1]));
    assert_eq!(again[0].bytes(), payload(LAYERS[0], 1), "1 is still on loan, so 2 went");
    let seen = handle.counters();
    assert_eq!((seen.cache.evictions, seen.cache.hits), (1, 2));
    drop(reader);
    assert_eq!(again[0].bytes(), payload(LAYERS[0], 1), "a loan outlasts the reader");
}

#[test]
fn pinned_keeps_what_the_heat_file_names() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let heat = dir.path().join("heat.csv");
    std::fs::write(&heat, "layer,expert,count\n1,6,10\n1,2,30\n4,2,20\n").unwrap();
    let options = ReaderOptions { cache_heat: Some(heat.clone()), ..cached(2, CachePolicy::Pinned) };
    let mut reader = open(&plan, &options).unwrap();
    (0..3).for_each(|step| drop(take(&mut reader, step, &[2, 6])));
    let c = reader.handle().counters().cache;
    assert_eq!((c.hits, c.insertions, c.refused, c.evictions), (2, 1, 3, 0), "6 is third");
    std::fs::write(&heat, "layer,expert,count\n1,9,10\n").unwrap();
    let message = open(&plan, &options).err().unwrap().to_string();
    assert!(message.contains("heat.csv: line 2") && message.contains("expert 9 of layer 1"), "{message}");
    std::fs::remove_file(&heat).unwrap();
    assert!(open(&plan, &options).err().unwrap().to_string().contains("--cache-heat"));
}

#[test]
fn waves_go_on_beside_a_cache_and_a_budget_that_does_not_fit_is_refused() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let tiny = ReaderOptions { buffer_bytes: 4 * SLOT, ..cached(2, CachePolicy::LfuDecay) };
    let mut reader = open(&plan, &tiny).unwrap();
    for step in 0..3 {
        let info = StepInfo { step, phase: Phase::Decode, pos: 0, rows: 1 };
        let asked: Vec<ExpertId> = (0..8).map(ExpertId).collect();
        let mut barrier = Barrier::open(&mut reader, &info, LAYERS[0], &asked).unwrap();
        let mut count = 0;
        while let Some(lease) = barrier.next_arrival().unwrap() {
            assert_eq!(lease.bytes(), payload(LAYERS[0], lease.expert().0));
            count += 1;
        }
        assert_eq!(count, 8);
    }
    let seen = reader.handle().counters();
    assert!(seen.slots == 4 && seen.slot_waits > 0 && seen.cache.hits >= 2, "{:?}", seen.cache);
    let refused = |options: &ReaderOptions| open(&plan, options).err().unwrap().to_string();
    let message = refused(&ReaderOptions { buffer_bytes: 4 * SLOT, ..cached(3, CachePolicy::Lru) });
    for part in ["--cache-bytes 24576", "--buffer-bytes 32768", "16384 or less", "40960 or more"] {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
    let message = refused(&ReaderOptions { cache_bytes: 100, ..options() });
    assert!(message.contains("holds no expert"), "{message}");
}
