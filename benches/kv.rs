//! What the KV tier adds to the latency of a token, on one real store: runs with and without it in turn, by the length of the text
//! that stands before the tokens that are timed.
//!
//!     cargo bench --bench kv -- --store DIR/store [--dir DIR] [--ram 64MiB,256MiB] [--prompt 512,4096] [--tokens 32] [--rounds 5]
//!
//! Prints Markdown. `--dir` is the folder that rows go to: give a real drive, and another one than the experts' to see the tier
//! alone. `added` is the median of the differences within a round; `waited` is what passes say that they waited for it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use argodrive::bench::config::Asked;
use argodrive::bench::record::RunRecord;
use argodrive::bench::run::{RunSpec, run};
use argodrive::drive::units::parse_bytes;
use argodrive::open::Model;
use argodrive::stats;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

fn flag(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|a| a != name);
    args.next().and_then(|_| args.next())
}

fn list(name: &str, default: &str) -> Vec<String> {
    flag(name).unwrap_or_else(|| default.into()).split(',').map(String::from).collect()
}

fn numbers(name: &str, default: &str) -> Vec<usize> {
    list(name, default).iter().map(|n| n.parse().expect("numbers")).collect()
}

fn once(model: &Model, (ram, dir): (u64, Option<&Path>), tokens: usize, prompt: &[u32]) -> RunRecord {
    let mut asked = Asked::default();
    let c = &mut asked.config;
    (c.store, c.prompt, c.max_new) = (model.folder.clone(), Some("tokens are given".into()), tokens);
    (c.kv.kv_ram_bytes, c.kv.kv_dir) = (ram, dir.filter(|_| ram > 0).map(Path::to_path_buf));
    let (plan, mounts) = model.store_plan().unwrap();
    let spec = RunSpec {
        arm: "kv",
        asked: &asked,
        under_test: &BTreeSet::new(),
        streamed: model.has_experts().then_some((&plan, mounts.as_slice())),
        prompts: &[prompt.to_vec()],
        control: None,
    };
    run(model, &spec, &mut |_| ControlFlow::Continue(())).unwrap().record
}

fn median(values: &[f64]) -> f64 {
    stats::quantiles(values, &[0.5]).unwrap()[0]
}

fn main() {
    let Some(store) = flag("--store").map(PathBuf::from) else {
        println!("no --store: nothing is measured");
        return;
    };
    let dir = flag("--dir").map(PathBuf::from);
    let (tokens, rounds) = (numbers("--tokens", "32")[0].max(2), numbers("--rounds", "5")[0]);
    let mut model = Model::load(&store, None).unwrap();
    model.stop_ids.clear(); // every run has all its tokens
    let vocab = model.decoder.config().vocab_size as u32;
    println!("{tokens} tokens, median of {rounds} rounds in turn; times are of one token.\n");
    println!(
        "| prompt | kv-ram | resident | rows away | read in all | without | with | added | waited | prompt | prompt without | same |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|");
    for len in numbers("--prompt", "512,4096") {
        let mut mix = stats::SplitMix64::new(7);
        let prompt: Vec<u32> = (0..len).map(|_| (mix.next_u64() % u64::from(vocab)) as u32).collect();
        for size in list("--ram", "64MiB,256MiB") {
            let ram = parse_bytes(&size).expect("a size, such as 64MiB");
            let ms = |record: &RunRecord| 1e3 / record.rates.decode_tok_s;
            let (mut with, mut without, mut added, mut waited) = (vec![], vec![], vec![], vec![]);
            let (mut prompts, mut same, mut last) = ((vec![], vec![]), true, None);
            for round in 0..rounds {
                let arm = |on: bool| once(&model, (if on { ram } else { 0 }, dir.as_deref()), tokens, &prompt);
                // ABBA: what comes second may find a warmer machine
                let (a, b) = if round % 2 == 0 {
                    let off = arm(false);
                    (off, arm(true))
                } else {
                    let on = arm(true);
                    (arm(false), on)
                };
                let kv = b.kv.clone().unwrap();
                without.push(ms(&a));
                with.push(ms(&b));
                added.push(ms(&b) - ms(&a));
                waited.push(kv.wait_per_token_ns as f64 / 1e6);
                prompts.0.push(b.rates.ttft_s);
                prompts.1.push(a.rates.ttft_s);
                same &= a.token_hash == b.token_hash;
                last = Some(kv);
            }
            let kv = last.unwrap();
            println!(
                "| {len} | {size} | {} | {} | {} B{} | {:.2} ms | {:.2} ms | {:+.2} ms | {:.2} ms | {:.2} s | {:.2} s | {} |",
                kv.peak_bytes,
                kv.spilled_rows,
                kv.read_bytes,
                if kv.emulated { " (EMULATED)" } else { "" },
                median(&without),
                median(&with),
                median(&added),
                median(&waited),
                median(&prompts.0),
                median(&prompts.1),
                if same { "yes" } else { "NO" }
            );
        }
    }
}
