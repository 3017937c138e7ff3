//! How near the decoder's products come to what memory delivers: matrix-vector products at K3's shapes over a set of
//! matrices that is larger than the last-level cache, and argo-mini with every expert in memory, each as a share of the
//! rate at which the same threads read memory in the same round. `cargo bench --bench roofline [-- MIB [THREADS...] [avx2]]`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../tests/common/mod.rs"]
mod common;

use argodrive::clock::Clock;
use argodrive::decode::Activations::{self, F32, Int8};
use argodrive::decode::kernels::pool::Pool;
use argodrive::decode::kernels::{KernelIsa, Kernels, MX_GROUP, Matrix, Rows, SCALE_BYTES};
use argodrive::decode::{Decoder, GuessSource, Logits, Session, SessionOptions};
use argodrive::source::Phase;
use argodrive::stats;
use common::{TestSource, argmax, load};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const ROUNDS: usize = 9;
/// Tokens whose decoding is timed.
const DECODED: usize = 64;
const SHAPES: [(usize, usize); 3] = [(3072, 3584), (3584, 3072), (12288, 7168)];
/// Words that a thread sums before it takes more.
const STREAM_WORDS: usize = 1 << 17;

struct Format {
    name: &'static str,
    activations: Activations,
    bytes: fn(usize, usize) -> usize,
    matrix: fn(&[u8], usize, usize) -> Matrix<'_>,
}

const FORMATS: [Format; 5] = [
    Format { name: "bf16", bytes: |r, c| r * c * 2, matrix: |b, r, c| Matrix::bf16(b, r, c), activations: F32 },
    int8_rows("int8 rows, f32 activations", F32),
    int8_rows("int8 rows, int8 activations (not exact)", Int8),
    mxfp4("MXFP4, f32 activations", F32),
    mxfp4("MXFP4, int8 activations (not exact)", Int8),
];

const fn int8_rows(name: &'static str, activations: Activations) -> Format {
    let bytes = |r, c| r * c + r * SCALE_BYTES;
    Format { name, activations, bytes, matrix: |b, r, c| Matrix::int8_rows(&b[..r * c], &b[r * c..], r, c) }
}

const fn mxfp4(name: &'static str, activations: Activations) -> Format {
    let bytes = |r, c| r * c / 2 + r * c / MX_GROUP;
    Format { name, activations, bytes, matrix: |b, r, c| Matrix::mxfp4(&b[..r * c / 2], &b[r * c / 2..], r, c) }
}

/// Bytes per second of reading all of `memory`.
fn stream(pool: &Pool, memory: &[u64]) -> f64 {
    let sums = AtomicU64::new(0);
    let since = Instant::now();
    pool.run(memory.len().div_ceil(STREAM_WORDS), &|chunk| {
        let part = &memory[chunk * STREAM_WORDS..memory.len().min((chunk + 1) * STREAM_WORDS)];
        let mut lanes = [0u64; 16];
        for words in part.chunks_exact(16) {
            for (lane, word) in lanes.iter_mut().zip(words) {
                *lane ^= *word;
            }
        }
        sums.fetch_xor(lanes.iter().fold(0, |a, b| a ^ b), Ordering::Relaxed);
    });
    let spent = since.elapsed().as_secs_f64();
    black_box(sums.into_inner());
    size_of_val(memory) as f64 / spent
}

/// Bytes per second of weights in products of one row with every matrix that fits into `memory`.
fn products(k: &Kernels, format: &Format, (rows, cols): (usize, usize), memory: &[u8]) -> f64 {
    let bytes = (format.bytes)(rows, cols);
    let (x, mut y) = (vec![0.5f32; cols], vec![0.0f32; rows]);
    k.use_activations(format.activations);
    let since = Instant::now();
    let mut done = 0;
    for weights in memory.chunks_exact(bytes) {
        k.matmul((format.matrix)(weights, rows, cols), Rows::packed(&x, 1), &mut y, rows, &mut []);
        black_box(&mut y);
        done += bytes;
    }
    done as f64 / since.elapsed().as_secs_f64()
}

fn median(values: &[f64]) -> f64 {
    stats::median(values).unwrap()
}

fn main() {
    let args: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let mib = args.first().copied().unwrap_or(1024);
    let threads = if args.len() > 1 { &args[1..] } else { &[1, 2][..] };
    let named = std::env::args().find_map(|a| a.parse::<KernelIsa>().ok());
    let k = Kernels::new(named.unwrap_or_else(KernelIsa::detect)).expect("kernels that this processor runs");
    // Scale bytes near 127 and bf16 values that are no subnormals. Sums may overflow, which slows nothing down.
    let memory = vec![0x7b7b_3c3d_7b7b_3c3du64; mib << 17];
    let bytes: Vec<u8> = memory.iter().flat_map(|w| w.to_le_bytes()).collect();
    println!("{} kernels, {mib} MiB of weights, medians of {ROUNDS} rounds\n", k.isa());
    println!("| weights | shape | threads | GB/s | reading memory, GB/s | share |\n|---|---|---|---|---|---|");
    for &n in threads {
        k.use_threads(n);
        let pool = k.pool();
        let mut rows = vec![Vec::new(); FORMATS.len() * SHAPES.len()];
        for _ in 0..ROUNDS {
            for (at, row) in rows.iter_mut().enumerate() {
                let (format, shape) = (&FORMATS[at / SHAPES.len()], SHAPES[at % SHAPES.len()]);
                let before = stream(&pool, &memory);
                let rate = products(&k, format, shape, &bytes);
                let reads = (before + stream(&pool, &memory)) / 2.0;
                row.push((rate, reads, rate / reads));
            }
        }
        for (at, row) in rows.iter().enumerate() {
            let (format, (r, c)) = (&FORMATS[at / SHAPES.len()], SHAPES[at % SHAPES.len()]);
            let of = |f: fn(&(f64, f64, f64)) -> f64| median(&row.iter().map(f).collect::<Vec<_>>());
            let (rate, reads, share) = (of(|r| r.0) / 1e9, of(|r| r.1) / 1e9, of(|r| r.2));
            println!("| {} | {r} x {c} | {n} | {rate:.1} | {reads:.1} | {share:.2} |", format.name);
        }
    }
    println!("\nFrom an empty context, as llama-bench does; behind 512 tokens decoding, and then another prefill.\n");
    println!(
        "| argo-mini, all in memory | threads | decode tok/s | x trunk bytes / reading memory | prefill of 512 / decode | \
         the same behind 512 |"
    );
    println!("|---|---|---|---|---|---|");
    let checkpoint = load("models/argo-mini");
    let decoder = Decoder::load_with(checkpoint.config.clone(), checkpoint.trunk.clone(), k.isa()).unwrap();
    let trunk_bytes = checkpoint.trunk.payload_bytes() as f64;
    let prompt: Vec<u32> = (0..512).map(|i| 7 + i * 13 % 4000).collect();
    for &n in threads {
        decoder.use_threads(n);
        k.use_threads(n);
        let mut rows = Vec::new();
        for _ in 0..ROUNDS {
            let options =
                SessionOptions { max_context: 2048, max_rows: 512, clock: Clock::start(), guess: GuessSource::None };
            let mut session = Session::new(decoder.clone(), options).unwrap();
            let mut source = TestSource::new(&checkpoint.experts);
            let mut pass = |session: &mut Session, tokens: &[u32], phase| {
                let next = argmax(session.forward(tokens, phase, &mut source, Logits::Last, None).unwrap());
                source.barriers.clear();
                next
            };
            // once without a clock: working memory grows to the widest pass
            let first = pass(&mut session, &prompt, Phase::Prefill);
            session.reset();
            let mut timed = |session: &mut Session, tokens: &[u32]| {
                let since = Instant::now();
                if tokens.len() > 1 {
                    pass(session, tokens, Phase::Prefill);
                    return tokens.len() as f64 / since.elapsed().as_secs_f64();
                }
                (0..DECODED).fold(tokens[0], |token, _| pass(session, &[token], Phase::Decode));
                DECODED as f64 / since.elapsed().as_secs_f64()
            };
            let prefill = timed(&mut session, &prompt);
            let behind = [timed(&mut session, &[first]), timed(&mut session, &prompt)];
            session.reset();
            let decode = timed(&mut session, &[first]);
            let share = decode * trunk_bytes / stream(&k.pool(), &memory);
            rows.push([decode, share, prefill / decode, behind[1] / behind[0]]);
        }
        let of = |i: usize| median(&rows.iter().map(|r| r[i]).collect::<Vec<_>>());
        println!("| {} | {n} | {:.1} | {:.2} | {:.2} | {:.2} |", k.isa(), of(0), of(1), of(2), of(3));
    }
}
