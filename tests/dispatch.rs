//! Decisions in simulated time: how close the predicted barrier comes to what drives could do, with known rates and with
//! rates learnt on the way; and that parts cover every byte once. No real clock, no disk.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::bound::{DriveRate, bound_drives_ns, bound_layout_ns};
use argodrive::ids::DriveId;
use argodrive::reader::DispatchPolicy::{self, ExpectedCompletion, Split};
use argodrive::reader::dispatch::{Dispatcher, DriveLoad, Piece, Shape};
use argodrive::reader::rates::{InFlight, RateEstimator, fill_loads};
use proptest::prelude::*;

const MIB: u32 = 1 << 20;
const FOUR: [f64; 4] = [136.0, 71.0, 71.0, 57.0];

/// A drive of `mb_per_s` whose first byte comes after `fixed_us`.
fn drive(mb_per_s: f64, fixed_us: f64) -> DriveLoad {
    DriveLoad { ns_per_byte: 1e3 / mb_per_s, fixed_ns: fixed_us * 1e3, read_ns: fixed_us * 1e3, in_flight_bytes: 0 }
}

fn four() -> Vec<DriveLoad> {
    FOUR.map(|mb| drive(mb, 200.0)).to_vec()
}

fn rates(drives: &[DriveLoad]) -> Vec<DriveRate> {
    drives.iter().map(|d| DriveRate { bytes_per_s: 1e9 / d.ns_per_byte, fixed_ns: d.fixed_ns as u64 }).collect()
}

fn homes_of(mask: u64) -> Vec<DriveId> {
    (0..64).filter(|d| mask >> d & 1 == 1).map(DriveId).collect()
}

fn decide(policy: DispatchPolicy, masks: &[u64], bytes: u32, believed: &[DriveLoad]) -> Vec<Piece> {
    let homes: Vec<_> = masks.iter().map(|&m| homes_of(m)).collect();
    let mut dispatcher = Dispatcher::new(masks.len(), believed.len());
    let shape = Shape { bytes, block_bytes: 4096 };
    let pieces = dispatcher.decide(policy, true, masks.len(), |i| &homes[i], shape, believed).to_vec();
    check_cover(&pieces, masks, bytes);
    pieces
}

/// Every byte of every expert once, from a home, on block borders, parts in order.
fn check_cover(pieces: &[Piece], masks: &[u64], bytes: u32) {
    let mut next = vec![(0u32, 0u8); masks.len()];
    for p in pieces {
        let (from, part) = &mut next[p.ask as usize];
        assert_eq!((p.from, p.part), (*from, *part), "{p:?}");
        assert!(p.len > 0 && p.from.is_multiple_of(4096) && masks[p.ask as usize] >> p.drive.0 & 1 == 1, "{p:?}");
        assert_eq!(homes_of(masks[p.ask as usize])[usize::from(p.home)], p.drive);
        (*from, *part) = (*from + p.len, *part + 1);
        assert!(p.part + 1 == p.parts || p.len.is_multiple_of(4096), "{p:?}");
        assert_eq!(p.part + 1 == p.parts, *from == bytes, "the last part ends the expert: {p:?}");
    }
    assert!(next.iter().all(|n| n.0 == bytes), "every expert is read to its end");
}

/// When the last byte is there: each drive serves its pieces in turn after its fixed cost.
fn simulate(pieces: &[Piece], drives: &[DriveLoad]) -> f64 {
    let ends = drives.iter().enumerate().map(|(d, drive)| {
        let bytes: f64 = pieces.iter().filter(|p| p.drive.index() == d).map(|p| f64::from(p.len)).sum();
        if bytes == 0.0 { 0.0 } else { drive.start_ns() + bytes * drive.ns_per_byte }
    });
    ends.fold(0.0, f64::max)
}

fn split_experts(pieces: &[Piece]) -> usize {
    pieces.iter().filter(|p| p.parts > 1 && p.part == 0).count()
}

/// The best whole-read assignment, by trying all.
fn best_whole(masks: &[u64], bytes: u32, drives: &[DriveLoad]) -> f64 {
    fn go(masks: &[u64], bytes: f64, drives: &[DriveLoad], counts: &mut [u32], best: &mut f64) {
        let Some((mask, rest)) = masks.split_first() else {
            let used = drives.iter().zip(counts.iter()).filter(|(_, n)| **n > 0);
            let end = used.map(|(d, &n)| d.start_ns() + f64::from(n) * bytes * d.ns_per_byte).fold(0.0, f64::max);
            *best = best.min(end);
            return;
        };
        for d in (0..drives.len()).filter(|d| mask >> d & 1 == 1) {
            counts[d] += 1;
            go(rest, bytes, drives, counts, best);
            counts[d] -= 1;
        }
    }
    let mut best = f64::INFINITY;
    go(masks, f64::from(bytes), drives, &mut vec![0; drives.len()], &mut best);
    best
}

#[test]
fn the_four_drives_of_the_design_at_known_rates() {
    let drives = four();
    let bound = bound_drives_ns(16 << 20, &rates(&drives)).unwrap() as f64;
    let pieces = decide(Split, &[0b1111; 16], MIB, &drives);
    let split = simulate(&pieces, &drives);
    assert!(split <= 1.05 * bound, "{split} against {bound}");
    assert!((1..=3).contains(&split_experts(&pieces)), "{} of at most D - 1", split_experts(&pieces));
    let whole = simulate(&decide(ExpectedCompletion, &[0b1111; 16], MIB, &drives), &drives);
    // All ways to share 16 equal experts among 4 drives.
    let mut best = f64::INFINITY;
    for a in 0..=16u32 {
        for b in 0..=16 - a {
            for c in 0..=16 - a - b {
                let counts = [a, b, c, 16 - a - b - c];
                let ends = counts.iter().zip(&drives).filter(|(n, _)| **n > 0);
                let end = ends.map(|(n, d)| d.fixed_ns + f64::from(n * MIB) * d.ns_per_byte).fold(0.0, f64::max);
                best = best.min(end);
            }
        }
    }
    assert!(whole <= best * 1.000_001, "{whole} against {best}");
    assert!(split < whole);
}

/// Decides `barriers` barriers with what it has learnt, serves them in simulated time, and returns measured / bound of
/// the second half, on average.
fn learn(policy: DispatchPolicy, drives: &[DriveLoad], barriers: usize) -> (f64, Vec<RateEstimator>) {
    let mut learnt: Vec<_> = drives.iter().map(|_| RateEstimator::new(None, 4)).collect();
    let (in_flight, mut loads) = (InFlight::new(drives.len()), Vec::new());
    let homes = homes_of((1 << drives.len()) - 1);
    let mut dispatcher = Dispatcher::new(16, drives.len());
    let bound = bound_drives_ns(16 << 20, &rates(drives)).unwrap() as f64;
    let (mut now, mut ratios) = (0u64, Vec::new());
    for _ in 0..barriers {
        fill_loads(&learnt, &in_flight, &mut loads);
        let shape = Shape { bytes: MIB, block_bytes: 4096 };
        let pieces = dispatcher.decide(policy, true, 16, |_| &homes, shape, &loads);
        pieces.iter().for_each(|p| learnt[p.drive.index()].queued(now));
        let mut served = vec![0u64; drives.len()];
        for p in pieces {
            let d = p.drive.index();
            served[d] += u64::from(p.len);
            let done = now + (drives[d].fixed_ns + served[d] as f64 * drives[d].ns_per_byte) as u64;
            learnt[d].ended(done, u64::from(p.len), true);
        }
        ratios.push(simulate(pieces, drives) / bound);
        now += 100_000_000;
        learnt.iter_mut().for_each(RateEstimator::barrier_closed);
    }
    let half = &ratios[barriers / 2..];
    (half.iter().sum::<f64>() / half.len() as f64, learnt)
}

#[test]
fn a_few_dozen_barriers_teach_the_rates_and_then_decisions_are_as_good_as_with_known_ones() {
    let drives = four();
    for (policy, limit) in [(Split, 1.05), (ExpectedCompletion, 1.13)] {
        let (ratio, learnt) = learn(policy, &drives, 48);
        println!("{}: mean barrier / bound_drives {ratio:.4}", policy.name());
        assert!(ratio <= limit, "{policy:?}: {ratio}");
        for (estimator, mb) in learnt.iter().zip(FOUR) {
            let seen = estimator.seen();
            assert!((seen.bytes_per_s / (mb * 1e6) - 1.0).abs() < 0.03, "{mb} MB/s seen as {seen:?}");
            assert!((seen.fixed_ns / 200_000.0 - 1.0).abs() < 0.1, "200 us seen as {seen:?}");
        }
    }
}

fn arb_drives(most: usize) -> impl Strategy<Value = Vec<DriveLoad>> {
    let one = (20.0..4000.0f64, 0.0..1500.0f64, 0u64..3 << 20)
        .prop_map(|(rate, fixed, queued)| DriveLoad { in_flight_bytes: queued, ..drive(rate, fixed) });
    prop::collection::vec(one, 1..=most)
}

fn arb_mixed(drives: usize, experts: usize) -> impl Strategy<Value = (Vec<DriveLoad>, Vec<u64>)> {
    arb_drives(drives).prop_flat_map(move |d| {
        let full = (1u64 << d.len()) - 1;
        (Just(d), prop::collection::vec(1..=full, 1..=experts))
    })
}

proptest! {
    #[test]
    fn whole_reads_are_the_best_assignment((drives, masks) in arb_mixed(3, 7), bytes in 4096u32..2 << 20) {
        let pieces = decide(ExpectedCompletion, &masks, bytes, &drives);
        let (got, best) = (simulate(&pieces, &drives), best_whole(&masks, bytes, &drives));
        prop_assert!(got <= best * 1.04, "{got} against {best}");
        prop_assert!(got <= best * (1.0 + 1e-9), "exact, in fact: {got} against {best}");
    }

    #[test]
    fn a_full_mirror_is_read_at_the_water_level(
        drives in arb_drives(8), experts in 1usize..40, bytes in 4096u32..4 << 20,
    ) {
        let idle: Vec<_> = drives.iter().map(|d| DriveLoad { in_flight_bytes: 0, ..*d }).collect();
        let masks = vec![(1u64 << drives.len()) - 1; experts];
        let pieces = decide(Split, &masks, bytes, &idle);
        prop_assert!(split_experts(&pieces) < drives.len().max(1), "at most D - 1 are cut");
        let whole = simulate(&decide(ExpectedCompletion, &masks, bytes, &idle), &idle);
        let got = simulate(&pieces, &idle);
        prop_assert!(got <= whole * (1.0 + 1e-9), "never later than whole reads");
        let bound = bound_drives_ns(experts as u64 * u64::from(bytes), &rates(&idle)).unwrap() as f64;
        // Borders on blocks, and cuts that were not worth a read.
        let block = idle.iter().map(|d| 4096.0 * d.ns_per_byte).fold(0.0, f64::max);
        let fixed = idle.iter().map(|d| d.fixed_ns).fold(0.0, f64::max);
        prop_assert!(got <= bound + 2.0 * block + 2.0 * fixed, "{got} against {bound}");
    }

    #[test]
    fn mixed_homes_are_read_at_the_level_of_their_worst_subset((drives, masks) in arb_mixed(6, 24), bytes in 4096u32..2 << 20) {
        let pieces = decide(Split, &masks, bytes, &drives);
        let got = simulate(&pieces, &drives);
        let whole = simulate(&decide(ExpectedCompletion, &masks, bytes, &drives), &drives);
        prop_assert!(got <= whole * (1.0 + 1e-9));
        let starts: Vec<_> = drives
            .iter()
            .map(|d| DriveRate { bytes_per_s: 1e9 / d.ns_per_byte, fixed_ns: d.start_ns() as u64 })
            .collect();
        let items: Vec<_> = masks.iter().map(|&m| (u64::from(bytes), m)).collect();
        let bound = bound_layout_ns(&items, &starts).unwrap() as f64;
        let block = drives.iter().map(|d| 4096.0 * d.ns_per_byte).fold(0.0, f64::max);
        let fixed = drives.iter().map(|d| d.fixed_ns).fold(0.0, f64::max);
        prop_assert!(got <= bound + 3.0 * block + 2.0 * fixed, "{got} against {bound}");
    }

    #[test]
    fn a_drive_ten_times_slower_never_makes_it_later(drives in arb_drives(5), experts in 1usize..20) {
        let fastest = drives.iter().map(|d| d.ns_per_byte).fold(f64::INFINITY, f64::min);
        let slow = DriveLoad { ns_per_byte: fastest * 10.0, fixed_ns: 500_000.0, read_ns: 500_000.0, in_flight_bytes: 0 };
        let more: Vec<_> = drives.iter().copied().chain([slow]).collect();
        let without = vec![(1u64 << drives.len()) - 1; experts];
        let with = vec![(1u64 << more.len()) - 1; experts];
        for policy in [ExpectedCompletion, Split] {
            let before = simulate(&decide(policy, &without, MIB, &drives), &drives);
            let after = simulate(&decide(policy, &with, MIB, &more), &more);
            // Splitting may leave out cuts that are worth less than a read.
            let slack = if policy == Split { 2.0 * more.iter().map(|d| d.fixed_ns).fold(0.0, f64::max) } else { 0.0 };
            prop_assert!(after <= before * (1.0 + 1e-9) + slack, "{policy:?}: {after} with, {before} without");
        }
    }
}
