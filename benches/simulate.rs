//! What a simulation costs: 100,000 barriers of 16 experts over 4 drives, on a full mirror with split reads, on one copy
//! each, and behind a shared uplink. A whole run should take less than 5 s.
#![allow(missing_docs)]

use argodrive::ids::{DriveId, ExpertId, LayerId};
use argodrive::layout::plan::{LayerHomes, PLAN_VERSION, Plan, PlanDrive, Shape};
use argodrive::reader::{DispatchPolicy, ReaderOptions};
use argodrive::replay::simulate::devices::{Device, Noise, Uplink};
use argodrive::replay::simulate::{Setup, run};
use argodrive::replay::workload::{Demand, Workload};
use argodrive::source::{Phase, StepInfo};
use argodrive::stats::SplitMix64;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::collections::BTreeMap;
use std::hint::black_box;

const BARRIERS: u64 = 100_000;
const LAYERS: u64 = 60;
const EXPERTS: u16 = 256;
const WIDTH: usize = 16;
const EXPERT_BYTES: u64 = 17_547_264;

fn plan(homes: impl Fn(u16) -> Vec<DriveId>) -> Plan {
    let layer = |l: u64| (LayerId(l as u16), LayerHomes((0..EXPERTS).map(&homes).collect()));
    Plan {
        version: PLAN_VERSION,
        model_id: "m".into(),
        store: "/s".into(),
        planner: "bench".into(),
        seed: 0,
        inputs: BTreeMap::new(),
        expert_bytes: EXPERT_BYTES,
        drives: ["a", "b", "c", "d"].map(|n| PlanDrive { name: n.into(), path: "/x".into() }).to_vec(),
        shape: Shape::Whole,
        predicted: None,
        layers: (0..LAYERS).map(layer).collect(),
    }
}

fn work() -> Workload {
    let mut out = Workload { tokens: BARRIERS / LAYERS, ..Workload::default() };
    let mut rng = SplitMix64::new(1);
    for barrier in 0..BARRIERS {
        let from = out.experts.len();
        while out.experts.len() < from + WIDTH {
            let expert = ExpertId(rng.below(usize::from(EXPERTS)) as u16);
            if !out.experts[from..].contains(&expert) {
                out.experts.push(expert);
            }
        }
        out.experts[from..].sort_unstable();
        out.barriers.push(Demand {
            barrier,
            step: StepInfo { step: barrier / LAYERS, phase: Phase::Decode, pos: barrier / LAYERS, rows: 1 },
            layer: LayerId((barrier % LAYERS) as u16),
            experts: from..from + WIDTH,
            handover_ns: 20_000,
            before_ns: 300_000,
            each_ns: 100_000.0,
            wake_ns: 10_000,
            gap_ns: 400_000,
            wait_ns: 0,
            span_ns: 0,
        });
    }
    out
}

fn simulate(c: &mut Criterion) {
    let work = work();
    let device = |(name, rate): (&str, f64)| Device {
        noise: Noise::Late(vec![(0..100).map(|i| i * 500).collect()]),
        ..Device::exact(name, rate, 20_000, 80_000)
    };
    let devices: Vec<Device> =
        [("a", 13.6e9), ("b", 7.1e9), ("c", 7.1e9), ("d", 5.7e9)].into_iter().map(device).collect();
    let options = |dispatch| ReaderOptions { dispatch, buffer_bytes: 2 << 30, ..ReaderOptions::default() };
    let hub = Uplink { members: vec![2, 3], bytes_per_s: 7.5e9 };
    let (mirror, one) = (plan(|_| (0..4).map(DriveId).collect()), plan(|e| vec![DriveId((e % 4) as u8)]));
    let mut group = c.benchmark_group("100000_barriers");
    group.sample_size(10).throughput(Throughput::Elements(BARRIERS));
    for (name, plan, dispatch, uplinks) in [
        ("mirror_split", &mirror, DispatchPolicy::Split, vec![]),
        ("one_copy", &one, DispatchPolicy::FirstHit, vec![]),
        ("mirror_split_uplink", &mirror, DispatchPolicy::Split, vec![hub]),
    ] {
        let devices = devices.clone();
        let (options, heat, episodes) = (options(dispatch), Vec::new(), Default::default());
        let setup = Setup { plan, devices, uplinks, episodes, options, alignment_bytes: 4096, table: None, heat };
        group.bench_function(name, |b| b.iter(|| run(black_box(&work), &setup, 1, true).map(|r| r.barriers.len())));
    }
    group.finish();
}

criterion_group!(benches, simulate);
criterion_main!(benches);
