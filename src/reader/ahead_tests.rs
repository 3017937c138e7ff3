//! Prefetch over small pack folders: what guesses become, how demand overtakes them, and that every slot and byte is
//! accounted for.

use super::engines::{EngineSpec, make_engine};
use super::tests::{LAYERS, PAYLOAD, all, folder, open, options, payload, stage};
use super::*;
use crate::clock::Clock;
use crate::drive::spec::{Emulation, RateSchedule};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::io::EngineKind;
use crate::source::{Barrier, ExpertSource, Guess, Phase, StepInfo};
use crate::trace::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub(super) fn pass(step: u64) -> StepInfo {
    StepInfo { step, phase: Phase::Decode, pos: step, rows: 1 }
}

pub(super) fn ids(experts: &[u16]) -> Vec<ExpertId> {
    experts.iter().copied().map(ExpertId).collect()
}

pub(super) fn guesses(experts: &[u16]) -> Vec<Guess> {
    experts.iter().map(|&e| Guess { expert: ExpertId(e), score: 1.0 }).collect()
}

pub(super) fn told(depth: u32) -> ReaderOptions {
    ReaderOptions { prefetch: PrefetchPolicy::NextRouter, prefetch_depth: depth, demand_reserve: 4, ..options() }
}

/// Takes a whole barrier and checks every byte.
pub(super) fn take(reader: &mut ExpertReader, step: u64, layer: LayerId, experts: &[u16]) {
    take_and_tell(reader, step, layer, experts, (step, layer, &[]));
}

/// The same, and tells guesses once the barrier is open.
fn take_and_tell(
    reader: &mut ExpertReader,
    step: u64,
    layer: LayerId,
    experts: &[u16],
    (next_step, next, told): (u64, LayerId, &[u16]),
) {
    reader.open_barrier(&pass(step), layer, &ids(experts)).unwrap();
    if !told.is_empty() {
        reader.hint(&pass(next_step), next, &guesses(told));
    }
    let mut got = Vec::new();
    while let Some(lease) = reader.next_arrival().unwrap() {
        assert_eq!(lease.bytes(), payload(layer, lease.expert().0));
        got.push(lease.expert().0);
    }
    reader.close_barrier();
    got.sort_unstable();
    assert_eq!(got, experts);
}

/// What every run must end with: all slots free but the cached ones, and each prefetch read accounted for once.
pub(super) fn settle(reader: ExpertReader, cached: u32) -> (ReaderCounters, Vec<ReadEvent>, Vec<BarrierRecord>) {
    let handle = reader.handle();
    let before = handle.counters();
    assert!(before.cache.most_slots >= cached);
    drop(reader);
    let seen = handle.counters();
    assert_eq!(handle.free_slots(), seen.slots, "no slot is lost");
    let trace = handle.take_trace().unwrap();
    trace.check_complete().unwrap();
    for (id, drive) in seen.drives.iter().enumerate() {
        let p = drive.prefetch;
        let sum = |pick: fn(&ReadSum) -> u64| [p.withdrawn, p.useful, p.late, p.wasted].iter().map(pick).sum::<u64>();
        assert_eq!((p.issued.reads, p.issued.bytes), (sum(|s| s.reads), sum(|s| s.bytes)), "{p:?}");
        let traced = |outcome| {
            let of = trace.reads().iter().filter(|r| r.purpose == Purpose::Prefetch && r.drive.index() == id);
            of.filter(|r| r.outcome == outcome).map(|r| r.bytes).sum::<u64>()
        };
        assert_eq!([p.useful.bytes, p.late.bytes], [traced(Outcome::Useful), traced(Outcome::Late)]);
        assert_eq!((p.wasted.bytes, traced(Outcome::Demand)), (traced(Outcome::Wasted), 0));
    }
    for read in trace.reads().iter().filter(|r| r.purpose == Purpose::Prefetch) {
        assert!(read.barrier.is_some() || read.outcome == Outcome::Wasted, "{read:?}");
        assert!(read.queued_ns <= read.submitted_ns && read.submitted_ns <= read.completed_ns, "{read:?}");
    }
    (seen, trace.reads().to_vec(), trace.barriers().to_vec())
}

/// Waits until `done`, calling the reader through empty retractions; never longer than a minute.
fn until(reader: &mut ExpertReader, done: impl Fn(&mut ExpertReader) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(reader) {
        assert!(Instant::now() < deadline, "nothing happens");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn completed(reader: &ExpertReader) -> u64 {
    reader.handle().counters().drives.iter().filter_map(|d| d.prefetch_engine).map(|e| e.completed).sum()
}

#[test]
fn guesses_become_hits_losers_are_wasted_and_all_is_traced() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| vec![(e % 2) as u8]);
    let mut reader = open(&plan, &told(2)).unwrap();
    assert_eq!(reader.lookahead(), 2);
    reader.hint(&pass(0), LAYERS[0], &guesses(&[0, 1, 2, 3]));
    reader.hint(&pass(0), LAYERS[1], &guesses(&[5]));
    until(&mut reader, |r| completed(r) == 5);
    take(&mut reader, 0, LAYERS[0], &[0, 1, 6]);
    take(&mut reader, 0, LAYERS[1], &[5]);
    let (seen, reads, barriers) = settle(reader, 0);
    let p = &seen.prefetch;
    assert_eq!((p.told, p.losers, p.deepest, p.most_experts, p.retracted), (5, 2, 2, 4, 0));
    let sum = |pick: fn(&DrivePrefetch) -> ReadSum| seen.drives.iter().map(|d| pick(&d.prefetch).reads).sum::<u64>();
    assert_eq!([sum(|p| p.issued), sum(|p| p.useful), sum(|p| p.late), sum(|p| p.wasted)], [5, 3, 0, 2]);
    assert_eq!(seen.payload_bytes(), 4 * PAYLOAD, "what was for nothing is not payload");
    assert_eq!([(barriers[0].prefetch_hits, barriers[0].hits), (barriers[1].prefetch_hits, 0)], [(2, 0), (1, 0)]);
    assert_eq!((barriers[0].bytes, barriers[1].bytes), (3 * PAYLOAD, PAYLOAD));
    assert_eq!((barriers[1].straggler, barriers[1].cause), (None, Cause::None), "nobody had to be waited for");
    assert_eq!((barriers[1].first_ns, barriers[1].last_ns), (barriers[1].open_ns, barriers[1].open_ns));
    let of = |layer, expert| *reads.iter().find(|r| (r.layer, r.expert.0) == (layer, expert)).unwrap();
    let useful = of(LAYERS[0], 1);
    assert_eq!((useful.purpose, useful.outcome, useful.barrier), (Purpose::Prefetch, Outcome::Useful, Some(0)));
    assert!(useful.completed_ns <= barriers[0].open_ns);
    let wasted = of(LAYERS[0], 2);
    assert_eq!((wasted.outcome, wasted.barrier, wasted.result), (Outcome::Wasted, None, ReadResult::Ok));
    assert_eq!(of(LAYERS[0], 6).purpose, Purpose::Demand);
    assert_eq!((of(LAYERS[1], 5).issued_in, of(LAYERS[1], 5).barrier), (0, Some(1)));
}

#[test]
fn an_adopted_read_that_fails_falls_back_to_another_copy() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let options = ReaderOptions { dispatch: DispatchPolicy::FirstHit, ..told(1) };
    let mounts = mounts_of(&plan, None).unwrap();
    let mut slow = mounts.clone();
    slow[0].emulate = Some(Emulation {
        rate_bytes_per_s: 100_000,
        latency_ns: 0,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 0,
        schedule: RateSchedule::NONE,
        link: None,
    });
    let mut reader = ExpertReader::open(&plan, &slow, &options, Clock::start()).unwrap();
    let pack = crate::store::manifest::drive_folder(&plan.drives[0].path, super::tests::MODEL);
    let pack = pack.join(crate::store::manifest::pack_name(LAYERS[0]));
    std::fs::File::options().write(true).open(pack).unwrap().set_len(16_384).unwrap();
    reader.hint(&pass(0), LAYERS[0], &guesses(&[3]));
    take(&mut reader, 0, LAYERS[0], &[3]);
    let (seen, reads, _) = settle(reader, 0);
    assert_eq!((seen.failovers, seen.drives[0].prefetch.failed, seen.drives[1].reads), (1, 1, 1));
    let failed = reads.iter().find(|r| r.purpose == Purpose::Prefetch).unwrap();
    assert_eq!((failed.result, failed.outcome, failed.barrier), (ReadResult::Short, Outcome::Wasted, Some(0)));
}

#[test]
fn limits_hold_and_say_why() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let limited = ReaderOptions { prefetch_experts: 2, ..told(1) };
    let mut reader = open(&plan, &limited).unwrap();
    reader.hint(&pass(0), LAYERS[0], &guesses(&[0, 1, 2, 3]));
    reader.hint(&pass(0), LAYERS[1], &guesses(&[0])); // two layers ahead
    reader.hint(&pass(0), LayerId(2), &guesses(&[0])); // no such layer
    reader.hint(&pass(0), LAYERS[0], &guesses(&[0, 200])); // no such expert: not counted as let through
    take(&mut reader, 0, LAYERS[0], &[0]);
    reader.hint(&pass(0), LAYERS[0], &guesses(&[0])); // has passed
    reader.hint(&pass(1), LAYERS[0], &guesses(&[0])); // two layers ahead: over the end of the pass
    reader.hint(&pass(0), LAYERS[1], &guesses(&[4]));
    let (seen, ..) = settle(reader, 0);
    let p = seen.prefetch;
    assert_eq!((p.told, p.over_experts, p.out_of_reach, p.known), (4, 2, 4, 1));
    assert_eq!((p.most_experts, p.deepest), (2, 1));
    // 6 slots of which 4 are kept for demand: two guesses at most hold one.
    let small = ReaderOptions { buffer_bytes: 6 * 8192, ..told(2) };
    let mut reader = open(&plan, &small).unwrap();
    reader.hint(&pass(0), LAYERS[0], &guesses(&[0, 1, 2, 3]));
    until(&mut reader, |r| completed(r) == 2);
    take(&mut reader, 0, LAYERS[0], &[0, 1, 2, 3, 4, 5, 6, 7]);
    let (seen, ..) = settle(reader, 0);
    assert_eq!((seen.prefetch.quota, seen.prefetch.most_slots, seen.slots), (2, 2, 6));
    assert!(seen.slot_waits > 0);
    let message = open(&plan, &ReaderOptions { buffer_bytes: 4 * 8192, ..told(1) }).err().unwrap().to_string();
    assert!(message.contains("--prefetch") && message.contains("40960"), "{message}");
}

fn paced(rate_bytes_per_s: u64) -> Option<Emulation> {
    Some(Emulation {
        rate_bytes_per_s,
        latency_ns: 100_000,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 1,
        schedule: RateSchedule::NONE,
        link: None,
    })
}

/// Twelve passes over both layers, four experts a barrier that drift slowly, leases held over a barrier now and then.
fn walk(reader: &mut ExpertReader, own: bool) {
    for step in 0..12u64 {
        for (at, layer) in LAYERS.into_iter().enumerate() {
            let mut experts: Vec<u16> = (0..4).map(|k| ((step / 3 + k * 2 + at as u64) % 8) as u16).collect();
            experts.sort_unstable();
            let (next_step, next) = if at == 0 { (step, LAYERS[1]) } else { (step + 1, LAYERS[0]) };
            let told: &[u16] = if own { &[] } else { &[0, 2, 5, 7] };
            take_and_tell(reader, step, layer, &experts, (next_step, next, told));
        }
        if step == 7 {
            // Given up half-way: adopted reads and landed ones alike.
            let mut barrier = Barrier::open(reader, &pass(7), LAYERS[1], &all()).unwrap();
            drop(barrier.next_arrival().unwrap());
        }
    }
}

#[test]
fn every_policy_engine_and_setting_delivers_the_same_bytes() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| if e < 3 { vec![0] } else { vec![1, 0] });
    let mut engines = vec![(EngineKind::Psync, true), (EngineKind::Mmap, false), (EngineKind::Buffered, false)];
    if cfg!(target_os = "linux") {
        engines.push((EngineKind::Uring, true));
    }
    for (engine, direct) in engines {
        for dispatch in DispatchPolicy::ALL {
            for (prefetch, cache_slots, emulate) in [
                (PrefetchPolicy::None, 0, None),
                (PrefetchPolicy::SameAsLast, 0, None),
                (PrefetchPolicy::NextRouter, 3, None),
                (PrefetchPolicy::SameAsLast, 3, paced(20_000_000)),
                (PrefetchPolicy::NextRouter, 0, paced(5_000_000)),
            ] {
                let options = ReaderOptions {
                    engine,
                    direct,
                    dispatch,
                    prefetch,
                    prefetch_depth: 1,
                    prefetch_queue_depth: 2,
                    cache_bytes: cache_slots * 8192,
                    buffer_bytes: 10 * 8192,
                    demand_reserve: 4,
                    ..options()
                };
                let mut mounts = mounts_of(&plan, None).unwrap();
                mounts.iter_mut().for_each(|m| m.emulate = emulate);
                let mut reader = ExpertReader::open(&plan, &mounts, &options, Clock::start()).unwrap();
                walk(&mut reader, prefetch == PrefetchPolicy::SameAsLast);
                let (seen, _, barriers) = settle(reader, 0);
                assert_eq!(seen.barriers, 25);
                let hits: u64 = barriers.iter().map(|b| u64::from(b.hits)).sum();
                assert_eq!((hits, seen.cache.hits > 0), (seen.cache.hits, cache_slots > 0), "{engine} {dispatch:?}");
                let guessed = seen.prefetch.told + seen.prefetch.same_as_last;
                assert_eq!(guessed > 0, prefetch != PrefetchPolicy::None);
                let issued: u64 = seen.drives.iter().map(|d| d.prefetch.issued.reads).sum();
                assert_eq!(issued > 0, prefetch != PrefetchPolicy::None);
                assert!(seen.drives.iter().all(|d| d.prefetch_engine.is_some() == (prefetch != PrefetchPolicy::None)));
            }
        }
    }
}

#[test]
fn same_as_last_guesses_what_the_pass_before_asked_for_and_hits() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let options = ReaderOptions { prefetch: PrefetchPolicy::SameAsLast, ..told(1) };
    let mut reader = open(&plan, &options).unwrap();
    assert_eq!(reader.lookahead(), 0, "it makes its own guesses");
    for step in 0..5 {
        for layer in LAYERS {
            take(&mut reader, step, layer, &[1, 4]);
            let done = completed(&reader);
            let issued = |r: &ExpertReader| r.handle().counters().drives[0].prefetch.issued.reads;
            let withdrawn = |r: &ExpertReader| r.handle().counters().drives[0].prefetch.withdrawn.reads;
            until(&mut reader, |r| completed(r) >= done.max(issued(r)).max(withdrawn(r)));
        }
    }
    let (seen, _, barriers) = settle(reader, 0);
    // Every barrier but the first, behind which nothing is known yet of the second layer.
    assert_eq!(seen.prefetch.same_as_last, 2 * 9);
    let hits: u32 = barriers.iter().map(|b| b.prefetch_hits).sum();
    assert!(hits >= 12, "{hits} of 16: {:?}", seen.prefetch);
    assert_eq!(seen.prefetch.losers + seen.prefetch.out_of_reach, 0);
}

#[test]
fn the_governor_cuts_useless_guesses_where_demand_waits_behind_them() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    for (governed, cuts) in [(true, true), (false, false)] {
        let options = ReaderOptions { prefetch_governor: governed, ..told(1) };
        let mut mounts = mounts_of(&plan, None).unwrap();
        mounts[0].emulate = paced(20_000_000);
        let mut reader = ExpertReader::open(&plan, &mounts, &options, Clock::start()).unwrap();
        for step in 0..40 {
            for (layer, next) in [(LAYERS[0], (step, LAYERS[1])), (LAYERS[1], (step + 1, LAYERS[0]))] {
                // Never asked for.
                take_and_tell(&mut reader, step, layer, &[0, 1], (next.0, next.1, &[6, 7]));
            }
        }
        let (seen, ..) = settle(reader, 0);
        assert_eq!((seen.prefetch.governor_cuts > 0, seen.prefetch.guesses_dropped > 0), (cuts, cuts));
        assert!(seen.prefetch.demand_behind > 0);
    }
}

#[test]
fn two_pools_are_two_engines_of_their_own_depth_over_one_emulated_drive() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let options = ReaderOptions { queue_depth: 3, prefetch_queue_depth: 2, ..told(2) };
    let mut mounts = mounts_of(&plan, None).unwrap();
    mounts[0].emulate = paced(2_000_000);
    let mut reader = ExpertReader::open(&plan, &mounts, &options, Clock::start()).unwrap();
    reader.hint(&pass(0), LAYERS[1], &guesses(&[0, 1, 2, 3, 4]));
    take(&mut reader, 0, LAYERS[0], &[0, 1, 2, 3]);
    take(&mut reader, 0, LAYERS[1], &[0, 1, 2, 3, 4, 5, 6, 7]);
    let (seen, ..) = settle(reader, 0);
    let drive = &seen.drives[0];
    assert_eq!((drive.engine.max_in_flight, drive.prefetch_engine.unwrap().max_in_flight), (3, 2));
    assert!(drive.prefetch_engine.unwrap().waited > 0);
    let pace = drive.pace.as_ref().unwrap();
    let prefetched = drive.prefetch.useful.reads + drive.prefetch.late.reads + drive.prefetch.wasted.reads;
    assert!(pace.reads >= drive.engine.completed.max(prefetched), "both pools are served by the one drive");
}

#[test]
fn in_demands_pool_guesses_are_some_of_its_reads() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let options = ReaderOptions { queue_depth: 3, prefetch_pool: PrefetchPool::Shared, ..told(2) };
    let mut mounts = mounts_of(&plan, None).unwrap();
    mounts[0].emulate = paced(2_000_000);
    let mut reader = ExpertReader::open(&plan, &mounts, &options, Clock::start()).unwrap();
    reader.hint(&pass(0), LAYERS[1], &guesses(&[0, 1, 2, 3, 4]));
    take(&mut reader, 0, LAYERS[0], &[0, 1, 2, 3]);
    take(&mut reader, 0, LAYERS[1], &[0, 1, 2, 3, 4, 5, 6, 7]);
    let (seen, ..) = settle(reader, 0);
    let (drive, p) = (&seen.drives[0], &seen.prefetch);
    assert_eq!((drive.engine.max_in_flight, drive.prefetch_engine), (3, None));
    assert!(p.in_demands_pool >= 5 && p.in_own_pool == 0, "{p:?}");
    assert_eq!(drive.prefetch.issued.reads, p.in_demands_pool);
    assert!(p.demand_behind > 0 && drive.prefetch.withdrawn.reads > 0, "{p:?}");
}

#[test]
fn guesses_can_have_a_dispatch_of_their_own() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![1, 0]);
    for (own, drives) in [(Some(DispatchPolicy::FirstHit), [0, 4]), (Some(DispatchPolicy::RoundRobin), [2, 2])] {
        let mut reader = open(&plan, &ReaderOptions { prefetch_dispatch: own, ..told(1) }).unwrap();
        reader.hint(&pass(0), LAYERS[0], &guesses(&[0, 1, 2, 3]));
        until(&mut reader, |r| completed(r) == 4);
        take(&mut reader, 0, LAYERS[0], &[0, 1, 2, 3]);
        let (seen, ..) = settle(reader, 0);
        assert_eq!([0, 1].map(|d: usize| seen.drives[d].prefetch.issued.reads), drives, "{own:?}");
        let p = &seen.prefetch;
        assert_eq!((p.decisions_by_policy[own.unwrap() as usize], p.decisions_with_choice), (4, 4));
        assert_eq!(p.decisions_not_primary, drives[0]);
    }
}

#[test]
fn a_real_engine_is_made_for_each_pool() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let options = told(1);
    let mounts = mounts_of(&plan, None).unwrap();
    let drives = vec![open_drive(&plan, DriveId(0), &mounts[0], &options).unwrap()];
    let depths = Mutex::new(Vec::new());
    let clock = Clock::start();
    let make = |spec: EngineSpec<'_>| {
        depths.lock().unwrap().push(spec.depth);
        make_engine(&options, clock, spec)
    };
    drop(ExpertReader::assemble(&plan, drives, vec![None], &options, clock, make).unwrap());
    assert_eq!(*depths.lock().unwrap(), [options.queue_depth, options.prefetch_queue_depth]);
}
