//! Experts in parts and hedged reads, over the same small pack folders as `tests`: bytes, counts and traces; and what
//! happens when a part fails.

use super::tests::{LAYERS, MODEL, PAYLOAD, all, bad_drive_with, folder, open, options, payload, stage, take_all};
use super::*;
use crate::clock::Clock;
use crate::drive::spec::Emulation;
use crate::ids::ExpertId;
use crate::layout::plan::Plan;
use crate::store::manifest::{drive_folder, pack_name};
use crate::trace::events::{Cause, ReadEvent, ReadResult};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

/// Drives that are known to take 1 us per byte, and nothing before the first, so that every cut is worth its read.
fn splitting(drives: usize) -> ReaderOptions {
    let rate = |d| KnownRate { drive: format!("d{d}"), bytes_per_s: 1_000_000, fixed_ns: 0 };
    ReaderOptions { dispatch: DispatchPolicy::Split, rates: (0..drives).map(rate).collect(), ..options() }
}

/// Good reads by expert: payload bytes and drive of each part.
fn parts(reads: &[ReadEvent]) -> BTreeMap<u16, Vec<(u8, u64, u8)>> {
    let mut out: BTreeMap<u16, Vec<(u8, u64, u8)>> = BTreeMap::new();
    for r in reads.iter().filter(|r| r.result == ReadResult::Ok) {
        let first = u64::from(r.expert.0) * 16_384;
        let bytes = r.bytes.min(PAYLOAD - (r.offset - first));
        out.entry(r.expert.0).or_default().push((r.part, bytes, r.drive.0));
    }
    out.values_mut().for_each(|p| p.sort_unstable());
    out
}

#[test]
fn an_expert_comes_in_parts_from_several_drives_and_the_parts_are_all_of_it() {
    let dir = folder();
    let plan = stage(dir.path(), 3, |_| vec![1, 0, 2]);
    let mut reader = open(&plan, &splitting(3)).unwrap();
    let handle = reader.handle();
    // 8 blocks over 3 drives of one speed: 3, 3 and 2; whole experts would be 4, 2 and 2.
    let order = take_all(&mut reader, LAYERS[0], &all()[..4]).unwrap();
    assert_eq!(order.len(), 4);
    let seen = handle.counters();
    assert_eq!((seen.experts_split, seen.parts, seen.part_bytes), (1, 2, PAYLOAD));
    assert_eq!((seen.part_sum_errors, seen.barriers_split, seen.failovers), (0, 1, 0));
    assert_eq!(seen.decisions_by_policy, [0, 0, 0, 0, 4]);
    assert!(seen.decisions_not_primary > 0);
    assert_eq!(seen.payload_bytes(), 4 * PAYLOAD);
    assert_eq!(seen.drives.iter().map(|d| d.reads).sum::<u64>(), 5);
    assert_eq!(seen.drives.iter().map(|d| d.digests_checked).sum::<u64>(), 4, "of whole experts");
    assert_eq!(handle.free_slots(), seen.slots);
    let trace = handle.take_trace().unwrap();
    assert_eq!(trace.barriers()[0].bytes, 4 * PAYLOAD);
    for (expert, parts) in parts(trace.reads()) {
        assert_eq!(parts.iter().map(|p| p.1).sum::<u64>(), PAYLOAD, "expert {expert}: {parts:?}");
        assert!(parts.iter().enumerate().all(|(i, p)| usize::from(p.0) == i));
        assert!(parts.len() == 1 || parts[0].2 != parts[1].2, "from different drives");
    }
    for read in trace.reads() {
        let align = u64::from(seen.drives[read.drive.index()].direct.unwrap().offset_bytes);
        assert!(read.offset.is_multiple_of(4096) && read.bytes.is_multiple_of(align));
    }
}

#[test]
fn other_policies_never_cut_and_are_counted_under_their_own_names() {
    let dir = folder();
    let plan = stage(dir.path(), 3, |_| vec![1, 0, 2]);
    for (index, dispatch) in DispatchPolicy::ALL.into_iter().enumerate().filter(|(_, p)| *p != DispatchPolicy::Split) {
        let mut reader = open(&plan, &ReaderOptions { dispatch, ..splitting(3) }).unwrap();
        take_all(&mut reader, LAYERS[0], &all()[..4]).unwrap();
        let seen = reader.handle().counters();
        assert_eq!((seen.experts_split, seen.parts, seen.barriers_split), (0, 0, 0));
        assert_eq!((seen.decisions_by_policy[index], seen.decisions), (4, 4));
        assert!(seen.drives.iter().all(|d| d.rate.periods <= 1));
    }
}

#[test]
fn a_cut_set_larger_than_the_buffer_comes_in_waves() {
    let dir = folder();
    let plan = stage(dir.path(), 3, |_| vec![0, 1, 2]);
    let mut reader = open(&plan, &ReaderOptions { buffer_bytes: 3 * 8192, ..splitting(3) }).unwrap();
    let handle = reader.handle();
    for _ in 0..5 {
        take_all(&mut reader, LAYERS[0], &all()).unwrap();
    }
    let seen = handle.counters();
    assert_eq!((seen.slots, handle.free_slots(), seen.part_sum_errors), (3, 3, 0));
    assert!(seen.waves > 5 && seen.experts_split > 0 && seen.max_slots_used <= 3);
}

#[test]
fn a_failed_part_fails_over_alone() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let mut reader = bad_drive_with(&plan, libc::EIO, splitting(2));
    take_all(&mut reader, LAYERS[0], &all()[..3]).unwrap();
    let seen = reader.handle().counters();
    assert!(seen.experts_split > 0 && seen.drives[0].errors > 0);
    assert_eq!((seen.failovers, seen.part_sum_errors), (seen.drives[0].errors, 0));
    let trace = reader.handle().take_trace().unwrap();
    let failed = trace.reads().iter().filter(|r| r.result == ReadResult::Error && r.parts > 1).count();
    assert!(failed > 0, "a part was asked of the bad drive");
    for parts in parts(trace.reads()).values() {
        assert_eq!(parts.iter().map(|p| p.1).sum::<u64>(), PAYLOAD, "nothing else was read again");
    }
    assert_eq!(reader.handle().free_slots(), seen.slots);
}

#[test]
fn an_expert_with_a_silent_part_is_read_again_whole() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let mut reader = bad_drive_with(&plan, 0, ReaderOptions { read_timeout_ms: 100, ..splitting(2) });
    take_all(&mut reader, LAYERS[0], &all()[..3]).unwrap();
    let seen = reader.handle().counters();
    assert!(seen.drives[0].timeouts > 0 && seen.failovers > 0);
    assert_eq!(reader.handle().free_slots(), seen.slots);
    let trace = reader.handle().take_trace().unwrap();
    assert!(trace.reads().iter().any(|r| r.result == ReadResult::Timeout && r.parts > 1), "a part was silent");
}

#[test]
fn a_cut_expert_with_a_wrong_digest_is_read_whole_until_it_is_right() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let pack = drive_folder(&plan.drives[1].path, MODEL).join(pack_name(LAYERS[0]));
    let file = std::fs::File::options().write(true).open(pack).unwrap();
    for at in [9, PAYLOAD - 1] {
        let wrong = payload(LAYERS[0], 2)[at as usize] ^ 1;
        file.write_all_at(&[wrong], 2 * 16_384 + at).unwrap();
    }
    file.sync_all().unwrap();
    let mut reader = open(&plan, &splitting(2)).unwrap();
    take_all(&mut reader, LAYERS[0], &[ExpertId(2)]).unwrap();
    let seen = reader.handle().counters();
    assert_eq!(seen.split_digest_errors, 1, "whichever part came from drive 1, it was wrong");
    assert_eq!(seen.experts_split, 0, "what was delivered in the end came whole");
    assert_eq!(reader.handle().free_slots(), seen.slots);
}

/// A reader whose drive 0 delivers 2 MB/s and whose other drives are as fast as they are.
fn with_slow_drive(plan: &Plan, options: &ReaderOptions) -> ExpertReader {
    let mut mounts = mounts_of(plan, None).unwrap();
    let pace = Emulation {
        rate_bytes_per_s: 2_000_000,
        latency_ns: 1_000_000,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 0,
        ..Emulation::default()
    };
    mounts[0].emulate = Some(pace);
    ExpertReader::open(plan, &mounts, options, Clock::start()).unwrap()
}

#[test]
fn the_last_read_is_hedged_the_first_of_the_two_wins_and_the_other_is_cancelled() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let hedging = ReaderOptions {
        dispatch: DispatchPolicy::FirstHit,
        hedge_after_permille: Some(1),
        trace_reads: 10_000,
        ..options()
    };
    let mut reader = with_slow_drive(&plan, &hedging);
    for _ in 0..64 {
        take_all(&mut reader, LAYERS[0], &all()[..2]).unwrap();
    }
    let seen = reader.handle().counters();
    assert!(seen.hedges_issued > 0 && seen.hedges_won > 0, "{} of {}", seen.hedges_won, seen.hedges_issued);
    assert_eq!(seen.hedges_issued, seen.hedges_won + seen.hedges_cancelled);
    assert_eq!(seen.drives[1].reads, seen.hedges_won, "first-hit reads drive 1 only to hedge");
    assert_eq!(seen.failovers, 0);
    let trace = reader.handle().take_trace().unwrap();
    let hedged = trace.barriers().iter().filter(|b| b.cause == Cause::Hedged).count();
    assert!(hedged as u64 <= seen.hedges_won && hedged > 0);
    drop(reader);

    let mut reader = with_slow_drive(&plan, &ReaderOptions { hedge_after_permille: None, ..hedging });
    (0..40).for_each(|_| drop(take_all(&mut reader, LAYERS[0], &all()[..2]).unwrap()));
    let seen = reader.handle().counters();
    assert_eq!((seen.hedges_issued, seen.hedges_won, seen.hedges_cancelled), (0, 0, 0), "off");
}

#[test]
fn a_hedged_part_joins_the_parts_that_came_before_it() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    let mut reader = bad_drive_with(&plan, 0, ReaderOptions { hedge_after_permille: Some(990), ..splitting(2) });
    reader.hedge_after_ns = vec![Some(1_000_000); 2]; // as after many barriers
    // Drive 0 never answers: its part is the last, and drive 1, which has brought the other part, is asked for it.
    take_all(&mut reader, LAYERS[0], &[ExpertId(7)]).unwrap(); // checks every byte
    let seen = reader.handle().counters();
    assert_eq!((seen.experts_split, seen.hedges_issued, seen.hedges_won, seen.hedges_cancelled), (1, 1, 1, 0));
    assert_eq!((seen.drives[0].timeouts, seen.drives[0].cancelled, seen.drives[1].reads), (0, 1, 2));
    assert_eq!((seen.part_sum_errors, seen.failovers), (0, 0));
    assert_eq!(reader.handle().free_slots(), seen.slots);
}
