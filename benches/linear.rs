//! Does the cost of a token grow linearly? Synthetic models with every expert in memory, one size varied at a time:
//! experts for each token, experts to choose from, layers, and text before the token. For each size the time of a token
//! beside what a straight line through the smallest and the largest says: `cargo bench --bench linear [-- ROUNDS]`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use argodrive::clock::Clock;
use argodrive::decode::{Logits, Session};
use argodrive::open::Model;
use argodrive::reader::PrefetchPolicy;
use argodrive::source::Phase;
use argodrive::stats;
use argodrive::store::import::{ImportOptions, import};
use argodrive::store::synth::{SynthOptions, synth};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Tokens that are timed for each figure.
const TOKENS: usize = 24;

fn base() -> SynthOptions {
    SynthOptions { layers: 8, hidden: 512, heads: 4, head_dim: 128, experts: 64, latent: 256, ..SynthOptions::small() }
}

/// The store of these options, made if it is not there.
fn store(root: &Path, name: &str, options: &SynthOptions) -> PathBuf {
    let (checkpoint, store) = (root.join(format!("{name}-checkpoint")), root.join(name));
    if !store.join("store.json").exists() {
        synth(&checkpoint, options, &mut |_| {}).unwrap();
        import(&checkpoint, &store, &ImportOptions::default(), &mut |_| {}).unwrap();
        std::fs::remove_dir_all(&checkpoint).unwrap();
    }
    store
}

struct Case {
    x: usize,
    model: Model,
    context: usize,
}

/// Microseconds of a token after `context` tokens of text.
fn token_us(case: &Case) -> f64 {
    let model = &case.model;
    let mut memory = model.resident().unwrap();
    let clock = Clock::start();
    let mut session: Session = model.session(case.context + TOKENS, case.context, PrefetchPolicy::None, clock).unwrap();
    let prompt: Vec<u32> = (0..case.context as u32).map(|i| 7 + i * 13 % 200).collect();
    session.forward(&prompt, Phase::Prefill, &mut memory, Logits::Last, None).unwrap();
    let since = Instant::now();
    for i in 0..TOKENS as u32 {
        session.forward(&[9 + i], Phase::Decode, &mut memory, Logits::Last, None).unwrap();
    }
    since.elapsed().as_secs_f64() * 1e6 / TOKENS as f64
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(5);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/linear");
    std::fs::create_dir_all(&root).unwrap();
    let load = |name: &str, options: &SynthOptions| {
        let model = Model::load(&store(&root, name, options), None).unwrap();
        model.decoder.use_threads(1);
        model
    };
    let sized = |x: usize, name: &str, options: SynthOptions| Case {
        x,
        model: load(&format!("{name}-{x}"), &options),
        context: 64,
    };
    let series: [(&str, Vec<Case>); 4] = [
        (
            "experts for each token",
            [2, 4, 8, 16, 32].map(|n| sized(n, "top", SynthOptions { top_k: n as u64, ..base() })).into(),
        ),
        (
            "experts to choose from",
            [64, 128, 256, 512].map(|n| sized(n, "experts", SynthOptions { experts: n as u64, ..base() })).into(),
        ),
        ("layers", [4, 8, 16, 32].map(|n| sized(n, "layers", SynthOptions { layers: n as u64, ..base() })).into()),
        (
            "tokens of text before it",
            [512, 1024, 2048, 4000].map(|n| Case { x: n, model: load("text", &base()), context: n }).into(),
        ),
    ];
    for (name, cases) in &series {
        let mut all = vec![Vec::new(); cases.len()];
        for _ in 0..rounds {
            for (case, times) in cases.iter().zip(&mut all) {
                times.push(token_us(case));
            }
        }
        let times: Vec<f64> = all.iter().map(|t| stats::median(t).unwrap()).collect();
        let (first, last) = (cases[0].x as f64, cases[cases.len() - 1].x as f64);
        let slope = (times[times.len() - 1] - times[0]) / (last - first);
        println!("| {name} | µs a token | a straight line says | off |\n|---|---|---|---|");
        for (case, us) in cases.iter().zip(&times) {
            let line = times[0] + slope * (case.x as f64 - first);
            println!("| {} | {us:.0} | {line:.0} | {:+.1} % |", case.x, (us / line - 1.0) * 100.0);
        }
        println!();
    }
}
