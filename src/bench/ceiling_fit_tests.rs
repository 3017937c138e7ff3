//! The estimator on simulated times: emulated drives are found as what they pretend to be, hiccups are survived, and what
//! cannot be concluded is said.

use super::*;
use crate::drive::spec::Emulation;
use crate::io::paced::PaceModel;
use crate::stats::SplitMix64;

const MIB: u64 = 1 << 20;

/// Reads of a drive with this arithmetic, `depth` in flight, each followed by the next as soon as it has ended.
fn simulated(model: &PaceModel, bytes: u64, depth: u32, reads: usize) -> Series {
    let mut free = 0;
    let mut flying: Vec<(u64, u64)> = Vec::new();
    let mut out = Vec::new();
    let mut start = |now: u64, nth: usize| {
        let service = model.serve(free, now, bytes, model.factor(0, nth as u64 * bytes, 0));
        free = service.free_ns;
        (now, service.done_ns)
    };
    (0..depth as usize).for_each(|nth| flying.push(start(1000, nth)));
    for nth in depth as usize..reads {
        let first = (0..flying.len()).min_by_key(|&i| flying[i].1).unwrap();
        let done = flying.swap_remove(first);
        out.push(done);
        flying.push(start(done.1, nth));
    }
    Series { bytes, depth, reads: out }
}

fn sweep(model: &PaceModel, reads: usize) -> Vec<Series> {
    let of = |bytes, depths: &[u32]| depths.iter().map(|&d| simulated(model, bytes, d, reads)).collect::<Vec<_>>();
    [of(MIB, &[1, 2, 4, 8, 16]), of(MIB / 4, &[1, 16])].concat()
}

fn pace(rate: u64, latency_ns: u64, per_read_ns: u64, jitter: f64) -> PaceModel {
    let e = Emulation { rate_bytes_per_s: rate, latency_ns, per_read_ns, jitter, seed: 3, ..Emulation::default() };
    PaceModel::new("a", e)
}

fn close(seen: f64, want: f64, share: f64) -> bool {
    (seen - want).abs() <= want * share
}

#[test]
fn emulated_drives_are_found_from_times_alone() {
    for (rate, latency, per_read) in [
        (50_000_000, 500_000, 0),
        (10_000_000, 1_500_000, 300_000),
        (7_100_000_000, 80_000, 12_000),
        (300_000_000, 0, 900_000),
    ] {
        let found = estimate(&sweep(&pace(rate, latency, per_read, 0.0), 200)).unwrap();
        assert!(close(found.rate_bytes_per_s, rate as f64, 0.01), "{found:?}");
        let service = MIB as f64 * 1e9 / rate as f64;
        let slack = 0.002 * service;
        assert!((found.fixed_ns - per_read as f64).abs() <= slack, "{per_read}: {found:?}");
        assert!((found.latency_ns - latency as f64).abs() <= slack, "{latency}: {found:?}");
        let alone = (latency + per_read) as f64 + service;
        assert!(close(found.p99_ns as f64, alone, 0.01) && found.points.len() == 7);
        assert!(close(found.service[8].ns as f64, alone, 0.01));
    }
}

#[test]
fn jitter_is_found_as_its_mean_and_its_tail() {
    let found = estimate(&sweep(&pace(100_000_000, 400_000, 100_000, 0.5), 2000)).unwrap();
    // services are 1.25 times as long at the mean, and up to 1.5 times
    assert!(close(found.rate_bytes_per_s, 80e6, 0.02), "{found:?}");
    let one = 10_485_760.0 + 500_000.0;
    assert!(close(found.service[0].ns as f64, one, 0.01) && close(found.service[18].ns as f64, 1.5 * one, 0.01));
    assert!(close(found.p99_ns as f64, 1.495 * one, 0.01), "{found:?}");
}

#[test]
fn hiccups_do_not_move_the_estimate() {
    let model = pace(200_000_000, 300_000, 50_000, 0.0);
    let mut series = sweep(&model, 300);
    let mut rng = SplitMix64::new(11);
    for s in &mut series {
        // three stalls of 0.2 s, each delaying all that follows, and a few late stamps
        for _ in 0..3 {
            let from = s.reads[rng.below(s.reads.len())].1;
            for r in &mut s.reads {
                r.0 += if r.0 >= from { 200_000_000 } else { 0 };
                r.1 += if r.1 >= from { 200_000_000 } else { 0 };
            }
        }
        for _ in 0..6 {
            let at = rng.below(s.reads.len());
            s.reads[at].1 += 3_000_000;
        }
    }
    let found = estimate(&series).unwrap();
    assert!(close(found.rate_bytes_per_s, 200e6, 0.02), "{found:?}");
    assert!(
        (found.fixed_ns - 50_000.0).abs() < 60_000.0 && (found.latency_ns - 300_000.0).abs() < 60_000.0,
        "{found:?}"
    );
}

#[test]
fn a_drive_that_shares_its_rate_among_reads_has_the_same_rate() {
    // eight reads at once, each at an eighth of 1 GB/s, ending together
    let batches = |bytes: u64| {
        let took = 8 * bytes + 100_000;
        let reads = (0..50).flat_map(|i| (0..8).map(move |_| (i * took, (i + 1) * took))).collect();
        Series { bytes, depth: 8, reads }
    };
    let alone = |bytes: u64| Series {
        bytes,
        depth: 1,
        reads: (0..50).map(|i| (i * 9 * MIB, i * 9 * MIB + bytes + 200_000)).collect(),
    };
    let found = estimate(&[batches(MIB), batches(MIB / 4), alone(MIB), alone(MIB / 4)]).unwrap();
    assert!(close(found.rate_bytes_per_s, 1e9, 0.01), "{found:?}");
    assert!(close(found.fixed_ns, 12_500.0, 0.05) && close(found.latency_ns, 187_500.0, 0.05), "{found:?}");
    assert_eq!(found.depth, 8);
}

#[test]
fn what_cannot_be_concluded_is_said() {
    let model = pace(50_000_000, 0, 0, 0.0);
    let few = Series { bytes: MIB, depth: 4, reads: vec![(0, 5); 6] };
    assert!(estimate(&[few]).unwrap_err().to_string().contains("--duration"));
    let one_size = [simulated(&model, MIB, 1, 50), simulated(&model, MIB, 4, 50)];
    assert!(estimate(&one_size).unwrap_err().to_string().contains("two sizes"));
    let deep = [simulated(&model, MIB, 4, 50), simulated(&model, MIB / 2, 4, 50)];
    assert!(estimate(&deep).unwrap_err().to_string().contains("one at a time"));
    // four reads in flight of a drive with a latency of forty services
    let lazy = pace(50_000_000, 800_000_000, 0, 0.0);
    let series = [(MIB, 1), (MIB, 4), (MIB / 4, 1), (MIB / 4, 4)].map(|(b, d)| simulated(&lazy, b, d, 60));
    assert!(estimate(&series).unwrap_err().to_string().contains("deeper --depths"));
    // larger reads that end faster than smaller ones
    let odd = |bytes, gap: u64, depth: u32| {
        let reads = (0..50).map(|i| (i * gap, (i + u64::from(depth)) * gap)).collect();
        Series { bytes, depth, reads }
    };
    let series = [odd(MIB, 1000, 1), odd(MIB, 1000, 4), odd(MIB / 4, 9000, 1), odd(MIB / 4, 9000, 4)];
    let e = estimate(&series).unwrap_err();
    assert!(e.to_string().contains("no rate explains"), "{e}");
}

#[test]
fn a_size_too_small_to_keep_the_drive_busy_does_not_pass_latency_for_cost() {
    // 16 in flight keep it busy with 1 MiB (21 ms each beside 100 ms), not with 256 KiB (5 ms each)
    let found = estimate(&sweep(&pace(50_000_000, 100_000_000, 500_000, 0.0), 300)).unwrap();
    assert!(close(found.rate_bytes_per_s, 50e6, 0.01) && close(found.fixed_ns, 5e5, 0.1), "{found:?}");
    assert!(close(found.latency_ns, 1e8, 0.01), "{found:?}");
}

#[test]
fn the_smallest_depth_that_delivers_enough_is_named() {
    // the latency of one read is ten services long: depth 16 hides it, depth 8 does not
    let found = estimate(&sweep(&pace(100_000_000, 104_857_600, 0, 0.0), 300)).unwrap();
    assert_eq!(found.depth, 16);
    assert_eq!(estimate(&sweep(&pace(100_000_000, 0, 0, 0.0), 300)).unwrap().depth, 1);
}

#[test]
fn joint_rates_and_barriers() {
    assert!(close(joint_rate(MIB, 1_148_576.0, 100_000.0, 5e9), 1e9, 1e-6));
    assert_eq!(joint_rate(MIB, 1_148_576.0, 100_000.0, 5e8), 5e8, "company never makes a drive faster");
    let shape = barrier(8, MIB, &[2e6, 1e6, 3e6]).unwrap();
    assert_eq!((shape.steps, shape.p50_ns), (3, 2_000_000));
    assert!(close(shape.bytes_per_s, 8.0 * MIB as f64 * 500.0, 1e-9));
    assert!(barrier(8, MIB, &[]).is_err());
    assert_eq!(deal(9, &[1.0, 2.0, 100.0]), [6, 3, 0], "a slow drive may stay empty");
    assert_eq!(deal(4, &[1.0, 1.0]), [2, 2]);
}
