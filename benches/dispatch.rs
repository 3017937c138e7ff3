//! What a decision costs: 16 experts over 4 drives, by policy, on a full mirror and with mixed homes; and a wide prefill
//! barrier. A decode barrier should be decided in less than 5 microseconds.
#![allow(missing_docs)]

use argodrive::ids::DriveId;
use argodrive::reader::DispatchPolicy;
use argodrive::reader::dispatch::{Dispatcher, DriveLoad, Shape};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use std::hint::black_box;

fn drives() -> [DriveLoad; 4] {
    let drive = |mb| DriveLoad { ns_per_byte: 1e3 / mb, fixed_ns: 200_000.0, read_ns: 50_000.0, in_flight_bytes: 0 };
    [136.0, 71.0, 71.0, 57.0].map(drive)
}

fn decide(c: &mut Criterion) {
    let loads = drives();
    let shape = Shape { bytes: 1 << 20, block_bytes: 4096 };
    let mirror: Vec<DriveId> = (0..4).map(DriveId).collect();
    let mixed: Vec<Vec<DriveId>> =
        (0..896u32).map(|i| (0..4).filter(|d| ((i * 7 + 5) % 15 + 1) >> d & 1 == 1).map(DriveId).collect()).collect();
    for (name, asks) in [("barrier_of_16", 16), ("prefill_of_896", 896)] {
        let mut group = c.benchmark_group(name);
        for policy in DispatchPolicy::ALL {
            let mut dispatcher = Dispatcher::new(asks, 4);
            group.bench_function(BenchmarkId::new("mirror", policy.name()), |b| {
                b.iter(|| dispatcher.decide(policy, true, asks, |_| &mirror, shape, black_box(&loads)).len());
            });
            group.bench_function(BenchmarkId::new("mixed", policy.name()), |b| {
                b.iter(|| dispatcher.decide(policy, true, asks, |i| &mixed[i], shape, black_box(&loads)).len());
            });
        }
        group.finish();
    }
}

criterion_group!(benches, decide);
criterion_main!(benches);
