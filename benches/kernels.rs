//! Speed of the decoder's kernels per instruction set, at K3's dimensions where they fit a cache, and of whole
//! argo-mini passes with all experts in memory. `cargo bench --bench kernels [filter]`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use argodrive::clock::Clock;
use argodrive::decode::kernels::{KdaInputs, KernelIsa, Kernels, Matrix, Rows, WIDE_ROWS};
use argodrive::decode::{Decoder, GuessSource, Logits, Session, SessionOptions};
use argodrive::source::Phase;
use common::{TestSource, argmax, load};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

fn sets() -> Vec<Kernels> {
    KernelIsa::ALL.into_iter().filter_map(Kernels::new).collect()
}

fn matmul(c: &mut Criterion) {
    let (rows, cols) = (256, 3584);
    let bf16 = vec![0x3cu8; rows * cols * 2];
    let (packed, scales) = (vec![0x5au8; rows * cols / 2], vec![120u8; rows * cols / 32]);
    let mut wide = vec![0.0; WIDE_ROWS * cols];
    for (name, m) in [("bf16", Matrix::bf16(&bf16, rows, cols)), ("mxfp4", Matrix::mxfp4(&packed, &scales, rows, cols))]
    {
        let mut group = c.benchmark_group(format!("matmul_{name}_{rows}x{cols}"));
        for n in [1usize, 4, 64] {
            let x = vec![0.5f32; n * cols];
            let mut y = vec![0.0f32; n * rows];
            group.throughput(Throughput::Elements((n * rows * cols) as u64));
            for k in sets() {
                group.bench_function(BenchmarkId::new(k.isa().name(), n), |b| {
                    b.iter(|| k.matmul(black_box(m), Rows::packed(&x, n), &mut y, rows, &mut wide));
                });
            }
        }
    }
}

fn state(c: &mut Criterion) {
    for d in [64usize, 128] {
        let mut group = c.benchmark_group(format!("kda_step_{d}"));
        let (decay, unit) = (vec![0.9f32; d], vec![0.1f32; d]);
        let (mut s, mut o) = (vec![0.01f32; d * d], vec![0.0f32; d]);
        group.throughput(Throughput::Elements((d * d) as u64));
        for k in sets() {
            let inputs = KdaInputs { decay: &decay, q: &unit, k: &unit, v: &unit, beta: 0.5 };
            group.bench_function(k.isa().name(), |b| b.iter(|| k.kda_step(&mut s, black_box(&inputs), &mut o)));
        }
    }
}

fn functions(c: &mut Criterion) {
    let mut group = c.benchmark_group("situ_3072");
    let up = vec![0.3f32; 3072];
    let mut gate = vec![0.7f32; 3072];
    group.throughput(Throughput::Elements(3072));
    for k in sets() {
        group.bench_function(k.isa().name(), |b| b.iter(|| k.situ(&mut gate, black_box(&up), 4.0, Some(25.0))));
    }
}

fn passes(c: &mut Criterion) {
    let checkpoint = load("models/argo-mini");
    let mut group = c.benchmark_group("argo_mini");
    for isa in sets().iter().map(Kernels::isa) {
        let decoder = Decoder::load_with(checkpoint.config.clone(), checkpoint.trunk.clone(), isa).unwrap();
        let options =
            SessionOptions { max_context: 4096, max_rows: 512, clock: Clock::start(), guess: GuessSource::None };
        let mut session = Session::new(decoder, options).unwrap();
        let mut source = TestSource::new(&checkpoint.experts);
        let mut token = 1;
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("decode", isa.name()), |b| {
            b.iter(|| {
                if session.position() == 1024 {
                    session.reset();
                }
                let logits = session.forward(&[token], Phase::Decode, &mut source, Logits::Last, None).unwrap();
                token = argmax(logits);
                source.barriers.clear();
            });
        });
        let prompt: Vec<u32> = (0..256).map(|i| 7 + i * 13 % 4000).collect();
        group.throughput(Throughput::Elements(256));
        group.bench_function(BenchmarkId::new("prefill_256", isa.name()), |b| {
            b.iter(|| {
                session.reset();
                session.forward(&prompt, Phase::Prefill, &mut source, Logits::Last, None).unwrap();
                source.barriers.clear();
            });
        });
    }
}

criterion_group!(benches, matmul, state, functions, passes);
criterion_main!(benches);
