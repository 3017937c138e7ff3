//! What snapshots cost and what they save, on one real store: bytes and time for each, how long decoding stands still for them, and
//! the time until a text goes on: from its snapshot, and by reading its prompt and decoding again what was lost.
//!
//!     cargo bench --bench snapshot -- --store DIR/store [--dir DIR/snapshots] [--tokens 64] [--every 1,8,32] [--prompt 16,256]
//!         [--rounds 5]
//!
//! Prints Markdown. Files are as durable as the file system of `--dir` makes them, so give a real drive.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use argodrive::bench::config::Asked;
use argodrive::bench::record::RunRecord;
use argodrive::bench::run::{RunSpec, run};
use argodrive::bench::snapshots;
use argodrive::open::Model;
use argodrive::stats;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

fn flag(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|a| a != name);
    args.next().and_then(|_| args.next())
}

fn numbers(name: &str, default: &str) -> Vec<usize> {
    flag(name).unwrap_or_else(|| default.into()).split(',').map(|n| n.parse().expect("numbers")).collect()
}

fn asked(store: &Path, dir: &Path, tokens: usize, every: usize) -> Asked {
    let mut asked = Asked::default();
    let c = &mut asked.config;
    (c.store, c.prompt, c.max_new) = (store.into(), Some("tokens are given".into()), tokens);
    c.snapshot.snapshot_every = every;
    c.snapshot.snapshot_dir = (every > 0).then(|| dir.to_path_buf());
    asked
}

/// One run; its record, and seconds until it gave its first token.
fn once(model: &Model, asked: &Asked, prompt: &[u32]) -> (RunRecord, f64) {
    let (plan, mounts) = model.store_plan().unwrap();
    let spec = RunSpec {
        arm: "snapshot",
        asked,
        under_test: &BTreeSet::new(),
        streamed: model.has_experts().then_some((&plan, mounts.as_slice())),
        prompts: &[prompt.to_vec()],
        control: None,
    };
    let (start, mut first) = (Instant::now(), None);
    let mut on_token = |_| {
        first.get_or_insert_with(|| start.elapsed().as_secs_f64());
        ControlFlow::Continue(())
    };
    let record = run(model, &spec, &mut on_token).unwrap().record;
    (record, first.unwrap())
}

fn median(values: &[f64]) -> f64 {
    stats::quantiles(values, &[0.5]).unwrap()[0]
}

fn main() {
    let Some(store) = flag("--store").map(PathBuf::from) else {
        println!("no --store: nothing is measured");
        return;
    };
    let dir = flag("--dir").map_or_else(|| store.join("bench-snapshots"), PathBuf::from);
    let (tokens, rounds) = (numbers("--tokens", "64")[0], numbers("--rounds", "5")[0]);
    let model = Model::load(&store, None).unwrap();
    let vocab = model.decoder.config().vocab_size as u32;
    let mut mix = stats::SplitMix64::new(7);
    let mut prompt_of =
        |len: usize| -> Vec<u32> { (0..len).map(|_| (mix.next_u64() % u64::from(vocab)) as u32).collect() };

    println!("Writing: {tokens} tokens after a prompt of 16, median of {rounds} rounds in turn.\n");
    println!("| every | snapshots | bytes each | tok/s | tok/s without | still | of decoding | write, each |");
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|");
    let prompt = prompt_of(16);
    for every in numbers("--every", "1,8,32") {
        let (mut with, mut without, mut still, mut share, mut write) = (vec![], vec![], vec![], vec![], vec![]);
        let (mut written, mut bytes) = (0, 0);
        for _ in 0..rounds {
            without.push(once(&model, &asked(&store, &dir, tokens, 0), &prompt).0.rates.decode_tok_s);
            let (record, _) = once(&model, &asked(&store, &dir, tokens, every), &prompt);
            let s = record.snapshots.unwrap();
            (written, bytes) = (s.written, s.bytes / s.written.max(1));
            with.push(record.rates.decode_tok_s);
            still.push((s.copy_ns + s.wait_ns) as f64 / 1e6);
            share.push(s.blocked_share * 100.0);
            write.push(s.write_ns as f64 / 1e6 / s.written.max(1) as f64);
        }
        println!(
            "| {every} | {written} | {bytes} | {:.2} | {:.2} | {:.2} ms | {:.2} % | {:.2} ms |",
            median(&with),
            median(&without),
            median(&still),
            median(&share),
            median(&write)
        );
    }

    println!("\nGoing on with {tokens} tokens: seconds to the next token, median of {rounds} rounds in turn.\n");
    println!("| prompt | snapshot bytes | from the snapshot | from the prompt | of it the prompt | same tokens |");
    println!("|---:|---:|---:|---:|---:|---|");
    for len in numbers("--prompt", "16,256") {
        let prompt = prompt_of(len);
        std::fs::remove_dir_all(&dir).ok();
        let (whole, _) = once(&model, &asked(&store, &dir, tokens + 2, tokens), &prompt);
        let (mut resumed, mut again, mut reading, mut same, mut bytes) = (vec![], vec![], vec![], true, 0);
        for _ in 0..rounds {
            let mut go_on = asked(&store, &dir, tokens + 2, 0);
            go_on.config.snapshot.resume = Some(dir.clone());
            snapshots::find(&mut go_on).unwrap().unwrap();
            go_on.config.snapshot.snapshot_every = 0;
            let (record, first_s) = once(&model, &go_on, &prompt);
            same &= record.token_hash == whole.token_hash && record.prefill_passes == Some(0);
            bytes = record.resumed.unwrap().bytes;
            resumed.push(first_s);
            let (record, prompt_s) = once(&model, &asked(&store, &dir, tokens + 1, 0), &prompt);
            reading.push(prompt_s);
            again.push(record.rates.ttft_s + tokens as f64 / record.rates.decode_tok_s);
        }
        println!(
            "| {len} | {bytes} | {:.3} | {:.3} | {:.3} | {} |",
            median(&resumed),
            median(&again),
            median(&reading),
            if same { "yes" } else { "NO" }
        );
    }
    std::fs::remove_dir_all(&dir).ok();
}
