//! Cases that can be worked by hand, identities, and what is refused.

use super::devices::{Device, Noise, Uplink};
use super::summary::predict;
use super::{Run, Setup, run};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::layout::plan::{LayerHomes, PLAN_VERSION, Plan, PlanDrive, Shape};
use crate::reader::cache::Heat;
use crate::reader::{CachePolicy, DispatchPolicy, KnownRate, PrefetchPolicy, ReaderOptions};
use crate::replay::verdict::Bound;
use crate::replay::workload::{Demand, Workload};
use crate::source::{Phase, StepInfo};
use crate::stats::SplitMix64;
use crate::trace::log::{TraceDrive, TraceHeader};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const L: LayerId = LayerId(1);
const EXPERT: u64 = 8192;

fn plan(drives: usize, homes: &[&[u8]]) -> Plan {
    let list = |h: &&[u8]| h.iter().map(|&d| DriveId(d)).collect();
    let names = ["a", "b", "c", "d"];
    Plan {
        version: PLAN_VERSION,
        model_id: "m".into(),
        store: "/s".into(),
        planner: "hand".into(),
        seed: 0,
        inputs: BTreeMap::new(),
        expert_bytes: EXPERT,
        drives: names[..drives].iter().map(|n| PlanDrive { name: (*n).into(), path: "/x".into() }).collect(),
        shape: Shape::Whole,
        predicted: None,
        layers: [(L, LayerHomes(homes.iter().map(list).collect()))].into(),
    }
}

/// Barriers of one layer, one a pass, that demand `sets`; compute 10 before, 5 for each expert, 100 between.
fn work(sets: &[&[u16]]) -> Workload {
    let mut out = Workload { tokens: sets.len() as u64, model_id: Some("m".into()), ..Workload::default() };
    for (at, set) in sets.iter().enumerate() {
        let from = out.experts.len();
        out.experts.extend(set.iter().map(|&e| ExpertId(e)));
        out.barriers.push(Demand {
            barrier: at as u64,
            step: StepInfo { step: at as u64, phase: Phase::Decode, pos: at as u64, rows: 1 },
            layer: L,
            experts: from..out.experts.len(),
            handover_ns: 0,
            before_ns: 10,
            each_ns: 5.0,
            wake_ns: 0,
            gap_ns: if at + 1 < sets.len() { 100 } else { 0 },
            wait_ns: 0,
            span_ns: 0,
        });
    }
    out
}

fn options(dispatch: DispatchPolicy) -> ReaderOptions {
    ReaderOptions { dispatch, buffer_bytes: 1 << 20, ..ReaderOptions::default() }
}

fn setup<'a>(plan: &'a Plan, devices: &[Device], options: ReaderOptions) -> Setup<'a> {
    let (devices, uplinks) = (devices.to_vec(), Vec::new());
    let episodes = Arc::default();
    Setup { plan, devices, uplinks, episodes, options, alignment_bytes: 512, table: None, heat: Vec::new() }
}

fn go(work: &Workload, setup: &Setup<'_>) -> Run {
    run(work, setup, 7, true).unwrap()
}

#[test]
fn two_drives_worked_by_hand() {
    // a: 1 byte a ns, 50 for each read, 200 latency; b: half as fast, no costs
    let devices = [Device::exact("a", 1e9, 50, 200), Device::exact("b", 0.5e9, 0, 0)];
    let plan = plan(2, &[&[0], &[0], &[1]]);
    let seen = go(&work(&[&[0, 1, 2], &[2]]), &setup(&plan, &devices, options(DispatchPolicy::FirstHit)));
    let first = seen.barriers[0];
    // a ends at 8242 + 200 and 2 x 8242 + 200 = 16684, b at 16384
    assert_eq!((first.open_ns, first.last_ns), (0, 16_684));
    // expert 0 is there at 8442 and computed by 8447, expert 2 at 16384 by 16389, expert 1 at 16684 by 16689
    assert_eq!((first.close_ns, first.stall_ns), (16_689, 16_689 - 10 - 3 * 5));
    assert_eq!((first.straggler, first.gap_drive_ns, first.bytes), (Some(DriveId(0)), 300, 3 * EXPERT));
    // bounds: a alone must deliver two by 250 + 16384; over both, (24576 + 250) / 1.5
    assert_eq!((first.bound_layout_ns, first.bound_drives_ns), (Some(16_634), Some(16_551)));
    let second = seen.barriers[1];
    assert_eq!((second.open_ns, second.wait_ns(), second.close_ns), (16_789, 16_384, 16_789 + 16_384 + 5));
    assert_eq!((seen.drives[0].bytes, seen.drives[1].bytes), (2 * EXPERT, 2 * EXPERT));
    assert_eq!((seen.drives[0].busy_ns, seen.drives[1].landed_last), (2 * 8242, 1));
}

#[test]
fn known_rates_shape_the_first_choices() {
    // b is a quarter as fast, which nobody knows before the first barrier unless it is said
    let devices = [Device::exact("a", 1e9, 0, 0), Device::exact("b", 0.25e9, 0, 0)];
    let plan = plan(2, &[&[0, 1], &[0, 1]]);
    let first = |rates: Vec<KnownRate>| {
        let options = ReaderOptions { rates, ..options(DispatchPolicy::Split) };
        go(&work(&[&[0, 1]]), &setup(&plan, &devices, options)).barriers[0].last_ns
    };
    let known = |drive: &str, bytes_per_s| KnownRate { drive: drive.into(), bytes_per_s, fixed_ns: 0 };
    let (blind, told) = (first(vec![]), first(vec![known("b", 250_000_000), known("a", 1_000_000_000)]));
    assert_eq!(blind, 8192 * 4, "half of the bytes came from the slow drive");
    // 16384 bytes at 1.25 GB/s are 13107 ns; cuts lie on blocks
    assert!((13_107..=13_107 + 4 * 4096).contains(&told) && told < blind, "{told}");
}

#[test]
fn more_drives_than_bits_are_refused() {
    let drive = |id: u8| TraceDrive {
        id: DriveId(id),
        name: format!("d{id}"),
        path: "/x".into(),
        emulated: false,
        device_number: 0,
    };
    let load =
        |drives: u8| Workload::load(Path::new("/nowhere"), &TraceHeader::new((0..drives).map(drive).collect()), false);
    assert!(load(65).unwrap_err().to_string().contains("65 drives"));
    assert!(!load(64).unwrap_err().to_string().contains("drives;"), "there is no such folder");
}

#[test]
fn slots_that_are_too_few_make_waves() {
    // two slots: the third read goes out when the first expert has been computed
    let plan = plan(1, &[&[0], &[0], &[0]]);
    let narrow = ReaderOptions { buffer_bytes: 2 * EXPERT, ..options(DispatchPolicy::Split) };
    let device = Device::exact("a", 1e9, 0, 1000);
    let seen = go(&work(&[&[0, 1, 2]]), &setup(&plan, std::slice::from_ref(&device), narrow));
    // 0 is there at 9192 and computed by 9197; the drive has been busy with 1 until 16384
    assert_eq!(seen.barriers[0].last_ns, 2 * 8192 + 8192 + 1000);
    let device = Device::exact("a", 1e9, 0, 20_000);
    let narrow = ReaderOptions { buffer_bytes: 2 * EXPERT, ..options(DispatchPolicy::Split) };
    let seen = go(&work(&[&[0, 1, 2]]), &setup(&plan, &[device], narrow));
    assert_eq!(seen.barriers[0].last_ns, 8192 + 20_000 + 5 + 8192 + 20_000, "the drive was idle by then");
}

#[test]
fn every_policy_conserves_bytes_and_no_exact_run_beats_its_bound() {
    let homes: Vec<Vec<u8>> = (0..24u8).map(|e| (0..3).filter(|d| (e % 7 + 1) >> d & 1 == 1).collect()).collect();
    let homes: Vec<&[u8]> = homes.iter().map(Vec::as_slice).collect();
    let plan = plan(3, &homes);
    let mut rng = SplitMix64::new(5);
    let sets: Vec<Vec<u16>> = (0..200)
        .map(|_| {
            let mut all: Vec<u16> = (0..24).collect();
            (0..6).for_each(|i| all.swap(i, i + rng.below(24 - i)));
            all.truncate(6);
            all.sort_unstable();
            all
        })
        .collect();
    let sets: Vec<&[u16]> = sets.iter().map(Vec::as_slice).collect();
    let work = work(&sets);
    let devices =
        [Device::exact("a", 1e9, 20, 300), Device::exact("b", 0.6e9, 0, 100), Device::exact("c", 0.3e9, 60, 0)];
    let mut means = Vec::new();
    for policy in DispatchPolicy::ALL {
        let setup = setup(&plan, &devices, options(policy));
        let seen = go(&work, &setup);
        assert_eq!(seen, go(&work, &setup), "the same seed, the same run");
        let bytes: u64 = seen.drives.iter().map(|d| d.bytes).sum();
        assert_eq!((bytes, seen.barriers.iter().map(|b| b.bytes).sum::<u64>()), (200 * 6 * EXPERT, bytes));
        assert_eq!(seen.drives.iter().map(|d| d.landed_last).sum::<u64>(), 200);
        for b in &seen.barriers {
            assert!(b.wait_ns() + 1 >= b.bound_layout_ns.unwrap(), "{policy:?} {b:?}");
            assert!(b.bound_layout_ns >= b.bound_drives_ns && b.close_ns >= b.last_ns);
        }
        means.push(seen.barriers.iter().map(|b| b.wait_ns()).sum::<u64>());
    }
    // split reads may cut and never lose by it, first-hit does not look
    assert!(means[4] <= means[3] && means[3] < means[0], "{means:?}");
}

#[test]
fn noise_needs_its_seed_and_moves_no_mean() {
    let plan = plan(1, &[&[0]]);
    let sets: Vec<&[u16]> = vec![&[0]; 400];
    let work = work(&sets);
    let mut device = Device::exact("a", 1e9, 0, 0);
    device.noise = Noise::Late(vec![(-100..=100).collect()]);
    let setup = setup(&plan, &[device], options(DispatchPolicy::Split));
    let (one, same, other) = (go(&work, &setup), go(&work, &setup), run(&work, &setup, 8, true).unwrap());
    assert!(one == same && one != other);
    let mean = one.barriers.iter().map(|b| b.wait_ns()).sum::<u64>() / 400;
    assert!(mean.abs_diff(EXPERT) < 15, "{mean}");
    let all = [one, other];
    let prediction = predict(&work, &setup, &all, 7).unwrap();
    let median = prediction.phases[0].p50_ns.0;
    assert!(median.low < median.estimate && median.estimate < median.high, "{median:?}");
    assert_eq!(predict(&work, &setup, &all, 7), Some(prediction));
}

#[test]
fn a_cache_keeps_what_its_policy_says() {
    let plan = plan(1, &[&[0], &[0], &[0]]);
    let device = [Device::exact("a", 1e9, 0, 0)];
    let cached =
        |cache_policy, bytes| ReaderOptions { cache_policy, cache_bytes: bytes, ..options(DispatchPolicy::Split) };
    let hits = |setup: &Setup<'_>, sets: &[&[u16]]| -> Vec<u32> {
        let seen = go(&work(sets), setup);
        assert!(seen.barriers.iter().zip(sets).all(|(b, s)| b.bytes == (s.len() as u64 - u64::from(b.hits)) * EXPERT));
        seen.barriers.iter().map(|b| b.hits).collect()
    };
    let lru = setup(&plan, &device, cached(CachePolicy::Lru, 2 * EXPERT));
    assert_eq!(hits(&lru, &[&[0], &[1], &[0, 1], &[2], &[1], &[0]]), [0, 0, 2, 0, 1, 0]);
    let mut pinned = setup(&plan, &device, cached(CachePolicy::Pinned, EXPERT));
    pinned.options.cache_heat = Some("heat.csv".into());
    pinned.heat = vec![Heat { layer: L, expert: ExpertId(2), count: 9 }];
    assert_eq!(hits(&pinned, &[&[2], &[1], &[1, 2]]), [0, 0, 1]);
    let seen = go(&work(&[&[0], &[0]]), &setup(&plan, &device, cached(CachePolicy::LfuDecay, EXPERT)));
    let second = seen.barriers[1];
    assert_eq!((second.wait_ns(), second.stall_ns, second.bound_layout_ns), (0, 0, Some(0)), "nothing is read");
    assert_eq!(second.close_ns - second.open_ns, 10 + 5);
}

#[test]
fn guesses_are_read_between_barriers_and_used_late_or_for_nothing() {
    let plan = plan(1, &[&[0], &[0], &[0]]);
    let ahead = ReaderOptions { prefetch: PrefetchPolicy::SameAsLast, ..options(DispatchPolicy::Split) };
    let device = [Device::exact("a", 1e9, 0, 0)];
    let mut work = work(&[&[0], &[0], &[1], &[1]]);
    work.barriers.iter_mut().take(3).for_each(|b| b.gap_ns = 20_000);
    let seen = go(&work, &setup(&plan, &device, ahead.clone()));
    // 0 is guessed and there; 0 again, for nothing; 1 is guessed and there; the last guess is for nobody
    assert_eq!(seen.barriers.iter().map(|b| b.prefetch_hits).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert_eq!((seen.ahead.useful, seen.ahead.late, seen.ahead.wasted), (2, 0, 2));
    assert_eq!((seen.barriers[1].wait_ns(), seen.barriers[2].wait_ns()), (0, EXPERT));
    assert_eq!(seen.drives[0].reads, 6);
    // with 100 ns between barriers a guess is on its way when it is asked for
    work.barriers.iter_mut().for_each(|b| b.gap_ns = 100);
    let seen = go(&work, &setup(&plan, &device, ahead));
    assert_eq!(seen.ahead.late, 2);
    let (first, second) = (seen.barriers[0], seen.barriers[1]);
    assert_eq!(second.last_ns, first.last_ns + EXPERT, "begun when the drive was free");
}

#[test]
fn a_run_that_hardly_waits_is_not_storage_bound() {
    let plan = plan(1, &[&[0]]);
    let sets: Vec<&[u16]> = vec![&[0]; 20];
    let mut work = work(&sets);
    work.barriers.iter_mut().for_each(|b| b.gap_ns = 1_000_000);
    let setup = setup(&plan, &[Device::exact("a", 1e9, 0, 0)], options(DispatchPolicy::Split));
    let prediction = predict(&work, &setup, &[go(&work, &setup)], 0).unwrap();
    assert_eq!(prediction.verdict.unwrap().bound, Bound::NotStorage);
    // 19 gaps and 20 barriers, the last gap is not decoding
    let wall = 19.0 * 1e6 + 20.0 * (EXPERT + 5) as f64;
    assert!((prediction.tok_s.unwrap().0.estimate - 20.0 * 1e9 / wall).abs() < 1e-6);
}

#[test]
fn what_cannot_be_simulated_is_refused_by_name() {
    let plan = plan(1, &[&[0]]);
    let good = setup(&plan, &[Device::exact("a", 1e9, 0, 0)], options(DispatchPolicy::Split));
    let work = work(&[&[0]]);
    let says = |change: &dyn Fn(&mut Setup<'_>)| {
        let mut setup = good.clone();
        change(&mut setup);
        run(&work, &setup, 0, false).unwrap_err().to_string()
    };
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let message = says(&|s| s.devices[0].bytes_per_s = rate);
        assert!(message.contains("drive `a`") && message.contains("rate"), "{message}");
        assert!(says(&|s| s.devices[0].bound.bytes_per_s = rate).contains("drive `a`"));
        assert!(says(&|s| s.uplinks = vec![Uplink { members: vec![0], bytes_per_s: rate }]).contains("uplink"));
    }
    assert!(says(&|s| s.uplinks = vec![Uplink { members: vec![1], bytes_per_s: 1.0 }]).contains("uplink"));
    assert!(says(&|s| s.devices.clear()).contains("0 drives"));
    assert!(says(&|s| s.options.prefetch = PrefetchPolicy::NextRouter).contains("next-router"));
    assert!(says(&|s| s.options.prefetch = PrefetchPolicy::Draft).contains("draft"));
    assert!(says(&|s| s.options.hedge_after_permille = Some(990)).contains("hedging"));
    assert!(says(&|s| s.options.buffer_bytes = 1).contains("--buffer-bytes"));
    let mut other = work.clone();
    other.model_id = Some("n".into());
    assert!(run(&other, &good, 0, false).unwrap_err().to_string().contains("model n"));
    let mut beyond = work.clone();
    beyond.experts[0] = ExpertId(4);
    assert!(run(&beyond, &good, 0, false).unwrap_err().to_string().contains("demands expert 4 of layer 1"));
}
