//! Texts that share passes: each is what it would be alone, bit for bit, whoever shares its passes and whatever ends beside
//! it; every (layer, expert) is awaited once per pass; and what is shared is proved, or the run does not count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;
mod prepared;

use argodrive::clock::Clock;
use argodrive::decode::batch::{BatchGeneration, BatchRequest, seed_of};
use argodrive::decode::generate::{Request, StopReason, generate_observed};
use argodrive::decode::observe::Route;
use argodrive::decode::sampler::{Sampler, SamplerOptions};
use argodrive::decode::{Batch, DecodeError, Decoder, GuessSource, Observer, Session, SessionOptions};
use argodrive::source::Phase;
use assert_cmd::Command;
use common::{Checkpoint, TestSource, load};
use prepared::{Drives, argodrive, has, ids, json_of, mini_store, outcome, refused, tiny_store};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

const MAX_CONTEXT: usize = 40;
const MAX_NEW: usize = 6;

fn mini() -> &'static (Checkpoint, Arc<Decoder>) {
    static CELL: OnceLock<(Checkpoint, Arc<Decoder>)> = OnceLock::new();
    CELL.get_or_init(|| {
        let checkpoint = load("models/argo-mini");
        let decoder = Decoder::load(checkpoint.config.clone(), checkpoint.trunk.clone()).unwrap();
        (checkpoint, decoder)
    })
}

fn options(guess: GuessSource) -> SessionOptions {
    SessionOptions { max_context: MAX_CONTEXT, max_rows: 32, clock: Clock::start(), guess }
}

/// Prompts of mixed lengths; the one of 38 tokens fills its context.
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |(at, len): (u32, u32)| (0..len).map(|i| 3 + (at * 977 + i * i * 31) % 4000).collect();
    (0..).zip([3, 38, 1, 17, 2, 9, 1, 5]).map(prompt).collect()
}

/// What routers gave a row: weights as bits, so that a change of any bit before them shows.
#[derive(Default)]
struct Weights(BTreeMap<(usize, u64, u16), Vec<(u16, u32)>>);

impl Observer for Weights {
    fn route(&mut self, r: &Route<'_>) {
        let choice = r.experts.iter().zip(r.weights).map(|(e, w)| (e.0, w.to_bits())).collect();
        assert!(self.0.insert((r.text, r.position, r.layer.0), choice).is_none(), "a row comes once");
    }
}

/// Every prompt in a session of its own: tokens, why it ended, and its rows.
fn alone(sampler: SamplerOptions, stop: &[u32]) -> (Vec<(Vec<u32>, StopReason)>, Weights) {
    let (mut out, mut all) = (Vec::new(), Weights::default());
    for (text, prompt) in prompts().iter().enumerate() {
        let mut session = Session::new(mini().1.clone(), options(GuessSource::None)).unwrap();
        let mut own = Sampler::new(SamplerOptions { seed: seed_of(sampler.seed, text), ..sampler }).unwrap();
        let request = Request { prompt, max_new: MAX_NEW, stop, piece_rows: 16 };
        let mut seen = Weights::default();
        let mut source = TestSource::new(&mini().0.experts);
        let mut go_on = |_| ControlFlow::Continue(());
        let done =
            generate_observed(&mut session, &mut source, &mut own, request, &mut go_on, Some(&mut seen)).unwrap();
        out.push((done.token_ids, done.stopped));
        all.0.extend(seen.0.into_iter().map(|((_, pos, layer), choice)| ((text, pos, layer), choice)));
    }
    (out, all)
}

fn together(lanes: usize, sampler: SamplerOptions, stop: &[u32]) -> (BatchGeneration, Weights, TestSource, Batch) {
    let mut batch = Batch::new(mini().1.clone(), options(GuessSource::None), lanes).unwrap();
    let (mut seen, prompts) = (Weights::default(), prompts());
    let mut source = TestSource::new(&mini().0.experts);
    let request = BatchRequest { prompts: &prompts, max_new: MAX_NEW, stop, piece_rows: 16, sampler };
    let mut go_on = |_, _| ControlFlow::Continue(());
    let done = batch.generate(&mut source, request, &mut go_on, Some(&mut seen)).unwrap();
    (done, seen, source, batch)
}

#[test]
fn every_text_is_what_it_would_be_alone_and_experts_are_awaited_once() {
    let greedy = SamplerOptions::default();
    let drawn = SamplerOptions { temperature: 0.9, seed: 7, ..greedy };
    for sampler in [greedy, drawn] {
        let (free, _) = alone(sampler, &[]);
        assert_eq!(free[1].1, StopReason::ContextFull, "38 tokens and 2 more fill 40");
        // A token that ends the first text after its second token, and others wherever they give it.
        let stop = [free[0].0[1]];
        let (want, rows) = alone(sampler, &stop);
        assert!(want.iter().any(|(_, why)| *why == StopReason::StopToken));
        for lanes in [1, 2, 5] {
            let (got, seen, source, batch) = together(lanes, sampler, &stop);
            let texts: Vec<_> = got.sequences.iter().map(|s| (s.token_ids.clone(), s.stopped)).collect();
            assert_eq!(texts, want, "{lanes} lanes");
            assert!(seen.0 == rows.0, "{lanes} lanes changed bits");

            // One barrier for each layer and pass, whatever the number of lanes; no expert twice in one.
            let layers = 11;
            let passes: BTreeSet<u64> = source.barriers.iter().map(|(step, ..)| step.step).collect();
            assert_eq!(source.barriers.len(), passes.len() * layers);
            let keys: BTreeSet<_> = source.barriers.iter().map(|(step, layer, _)| (step.step, layer.0)).collect();
            assert_eq!(keys.len(), source.barriers.len());
            let decode = source.barriers.iter().filter(|(step, ..)| step.phase == Phase::Decode);
            let (mut awaited, mut decoded_rows) = (0, 0);
            for (step, _, experts) in decode {
                assert!(step.rows as usize <= lanes && experts.len() <= 6 * step.rows as usize);
                awaited += experts.len() as u64;
                decoded_rows += u64::from(step.rows);
            }
            // Every generated token but each text's last is fed once.
            let fed: usize = want.iter().map(|(ids, _)| ids.len() - 1).sum();
            assert_eq!(decoded_rows, (fed * layers) as u64);
            assert_eq!((got.decode.experts, got.decode.expert_rows), (awaited, (fed * layers * 6) as u64));
            assert_eq!(got.total.token_ids.len(), fed + want.len());
            assert_eq!((got.total.texts, got.total.prompt_tokens), (8, 76));
            assert!(source.barriers.iter().all(|(step, ..)| step.phase == Phase::Decode || step.rows <= 16));
            let counters = batch.counters();
            assert_eq!(counters.widest_lanes, lanes as u64);
            assert_eq!(counters.shared_passes > 0, lanes > 1);
            assert_eq!(counters.total.prompt_distinct, got.total.prefill_distinct);
            assert!(lanes == 1 || got.decode.experts < got.decode.expert_rows, "several rows shared experts");
        }
    }
}

#[test]
fn guesses_change_no_bit_and_those_from_one_text_are_refused() {
    let greedy = SamplerOptions::default();
    let (want, _, _, _) = together(5, greedy, &[]);
    let mut batch = Batch::new(mini().1.clone(), options(GuessSource::Router), 5).unwrap();
    let (prompts, mut source) = (prompts(), TestSource::new(&mini().0.experts));
    let request = BatchRequest { prompts: &prompts, max_new: MAX_NEW, stop: &[], piece_rows: 16, sampler: greedy };
    let got = batch.generate(&mut source, request, &mut |_, _| ControlFlow::Continue(()), None).unwrap();
    assert_eq!(got.total.token_ids, want.total.token_ids);
    let refused = |lanes, guess| Batch::new(mini().1.clone(), options(guess), lanes).err().unwrap().to_string();
    assert!(refused(2, GuessSource::Draft).contains("lanes is 2"));
    assert!(refused(0, GuessSource::None).contains("lanes is 0"));
    assert!(refused(33, GuessSource::None).contains("1 to 32"));
    // A text after another in the one lane begins anew.
    let mut one = Batch::new(mini().1.clone(), options(GuessSource::Draft), 1).unwrap();
    let got = one.generate(&mut source, request, &mut |_, _| ControlFlow::Continue(()), None).unwrap();
    assert_eq!(got.total.token_ids, want.total.token_ids);
}

#[test]
fn what_cannot_be_run_is_refused_before_anything_is_read_and_an_end_keeps_what_there_is() {
    let mut batch = Batch::new(mini().1.clone(), options(GuessSource::None), 2).unwrap();
    let mut source = TestSource::new(&mini().0.experts);
    let sampler = SamplerOptions::default();
    let mut run = |batch: &mut Batch, prompts: &[Vec<u32>], most: usize| {
        let request = BatchRequest { prompts, max_new: MAX_NEW, stop: &[], piece_rows: 16, sampler };
        let mut count = 0;
        let mut go_on = |_, _| {
            count += 1;
            if count < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        batch.generate(&mut source, request, &mut go_on, None)
    };
    for (prompts, why) in [
        (vec![], "the prompt is empty"),
        (vec![vec![5], vec![]], "the prompt is empty"),
        (vec![vec![5], vec![6; 41]], "the text would reach 41 tokens, the session holds 40"),
    ] {
        let e = run(&mut batch, &prompts, 99).unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    }
    assert_eq!(batch.counters().passes, 0);
    let cut = run(&mut batch, &[vec![5], vec![6], vec![7]], 4).unwrap();
    let lens: Vec<usize> = cut.sequences.iter().map(|s| s.token_ids.len()).collect();
    assert_eq!(lens, [2, 2, 0]);
    assert!(cut.sequences.iter().all(|s| s.stopped == StopReason::Interrupted));
    // The lanes are as good as new.
    let full = run(&mut batch, &[vec![5], vec![6], vec![7]], 99).unwrap();
    assert_eq!(full.sequences[0].token_ids[..2], cut.sequences[0].token_ids[..]);
    assert!(matches!(full.total.stopped, StopReason::MaxNew));
    let error: DecodeError =
        Session::new(mini().1.clone(), SessionOptions { max_rows: 0, ..options(GuessSource::None) }).err().unwrap();
    assert!(error.to_string().contains("max_rows is 0"));
}

/// argo-mini on two plain drives, and a set of prompts.
struct Rig {
    drives: Drives,
    plan: PathBuf,
}

fn rig() -> &'static Rig {
    static CELL: OnceLock<Rig> = OnceLock::new();
    CELL.get_or_init(|| {
        let drives = Drives::new(2, None);
        let plan = drives.staged(mini_store(), "round-robin");
        Rig { drives, plan }
    })
}

const TEXTS: [&str; 3] = ["Once upon a time", "One drive", "The harbour was still dark when"];

fn set(name: &str, text: &str) -> PathBuf {
    let path = rig().drives.dir.path().join(name);
    fs::write(&path, text).unwrap();
    path
}

fn three() -> PathBuf {
    let [a, b, c] = TEXTS;
    set("three.jsonl", &format!("{{\"prompt\": {a:?}}}\n\n{b:?}\n{{\"name\": \"third\", \"prompt\": {c:?}}}\n"))
}

fn decode(args: &[&str]) -> Command {
    let mut command = argodrive(["decode", "--store"]);
    command.arg(mini_store()).arg("--plan").arg(&rig().plan).args(args);
    command
}

fn with_set(file: &Path, args: &[&str]) -> Command {
    let mut command = decode(args);
    command.arg("--prompts").arg(file);
    command
}

#[test]
fn the_command_gives_each_prompt_what_a_run_alone_gives_it() {
    let args = ["--max-new", "5", "--temperature", "0.8", "--json"];
    let both = json_of(&mut with_set(&three(), &[&args[..], &["--seed", "9", "--parallel", "2"]].concat()));
    let texts = both["texts"].as_array().unwrap();
    for (at, (prompt, text)) in TEXTS.iter().zip(texts).enumerate() {
        let seed = (9 + at).to_string();
        let alone = json_of(&mut decode(&[&args[..], &["--seed", &seed, "--prompt", prompt]].concat()));
        assert_eq!(ids(&text["token_ids"]), ids(&alone["token_ids"]));
        assert_eq!((&text["text"], &text["stopped"]), (&alone["text"], &alone["stopped"]));
        assert_eq!(text["prompt_tokens"].as_u64().unwrap() as usize, ids(&alone["prompt_token_ids"]).len());
    }
    assert_eq!(texts.iter().map(|t| t["name"].as_str().unwrap()).collect::<Vec<_>>(), ["line 1", "line 3", "third"]);
    let shared = &both["set"];
    assert_eq!(shared["widest_pass"].as_u64(), Some(2));
    let of = |key: &str| shared[key].as_f64().unwrap();
    // two texts together for four passes, then the third alone
    assert_eq!((of("shared_passes"), of("text_experts")), (4.0, f64::from(3 * 4 * 11 * 6)));
    assert!(of("experts") < of("text_experts") && of("served_per_expert") > 1.0);
    assert!((of("experts_per_token") - of("experts") / 12.0).abs() < 1e-9 && of("total_tok_s") > 0.0);

    let (code, text, notes) = outcome(&mut with_set(&three(), &["--max-new", "3", "--parallel", "3"]));
    assert_eq!(code, 0, "{notes}");
    let at = |name: &str| text.find(&format!("==> {name} <==\n")).unwrap();
    assert!(at("line 1") < at("line 3") && at("line 3") < at("third"));
    has(&notes, &["3 texts, up to 3 in a pass: 9 tokens at", "texts", "--max-new"]);
}

#[test]
fn a_shared_run_is_recorded_traced_and_proved_or_does_not_count() {
    let dir = prepared::folder();
    let out = dir.path().to_str().unwrap();
    let trace = dir.path().join("trace");
    let args = ["--parallel", "2", "--max-new", "4", "--assert", "--out", out, "--trace", trace.to_str().unwrap()];
    let (code, text, notes) = outcome(&mut with_set(&three(), &args));
    // a busy machine may trip a guard; what is judged here are the settings
    let line =
        notes.lines().find(|l| l.trim_start().starts_with("parallel")).unwrap_or_else(|| panic!("{text}{notes}"));
    assert!(line.contains("proved"), "{line}");
    assert!(code == 0 || code == 1, "{notes}");
    let routes = fs::read_to_string(trace.join("routes.csv")).unwrap();
    let rows: BTreeMap<(u64, u64, u64), usize> = routes.lines().skip(1).fold(BTreeMap::new(), |mut rows, line| {
        let f: Vec<&str> = line.split(',').collect();
        let key = [f[0], f[2], f[3]].map(|n| n.parse::<u64>().unwrap());
        *rows.entry((key[0], key[1], key[2])).or_default() += 1;
        rows
    });
    assert!(rows.values().all(|n| *n == 6), "a pass, a position and a layer are one row of one text");
    let heat = dir.path().join("heat.json");
    let mut import = argodrive(["heat", "--routes"]);
    import.arg(trace.join("routes.csv")).arg("--out").arg(&heat).arg("--store").arg(mini_store());
    let (code, _, notes) = outcome(&mut import);
    assert_eq!(code, 0, "{notes}");

    // One token each: no decode pass, so nothing was shared, and the run does not count.
    let once = ["--parallel", "3", "--max-new", "1", "--assert", "--out", out];
    let (code, _, notes) = outcome(&mut with_set(&three(), &once));
    assert_eq!(code, 1, "{notes}");
    has(&notes, &["parallel: unverified", "never so many at once"]);
    // Two at once and then one: off is proved too.
    let off = json_of(&mut with_set(&three(), &["--parallel", "1", "--max-new", "2", "--json"]));
    let of = |name: &str| off["settings"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap().clone();
    assert_eq!((of("parallel")["verdict"].as_str(), off["set"]["shared_passes"].as_u64()), (Some("proved"), Some(0)));
}

#[test]
fn sets_that_cannot_be_run_are_refused_by_line_before_anything_is_read() {
    let bad = |text: &str, args: &[&str], words: &[&str]| refused(&mut with_set(&set("bad.jsonl", text), args), words);
    bad("\"a\"\n{\"prompt\": \"\"}\n", &[], &["--prompts", "bad.jsonl", "line 2", "the prompt is empty"]);
    bad("\"a\"\nb\n", &[], &["line 2", "expected {\"prompt\""]);
    bad("", &[], &["holds no prompt"]);
    let long = format!("\"a\"\n\"{}\"\n", "word and ".repeat(40));
    bad(&long, &["--max-context", "16"], &["line 2", "the prompt has", "--max-context is 16"]);
    bad("\"a\"\n\"b\"\n", &["--parallel", "3"], &["--parallel 3", "there are 2 prompts", "--parallel 2"]);
    bad("\"a\"\n", &["--parallel", "0"], &["--parallel must be at least 1"]);
    bad("\"a\"\n\"b\"\n", &["--parallel", "2", "--prefetch", "draft"], &["draft", "--parallel"]);
    let path = set("bytes.jsonl", "");
    fs::write(&path, b"\"a\"\n\"\xff\"\n").unwrap();
    refused(&mut with_set(&path, &[]), &["line 2", "not UTF-8"]);
    refused(&mut with_set(&set("one.txt", "a text"), &[]), &["one.txt", "--prompt-file"]);
    refused(&mut decode(&["--prompt", "a", "--parallel", "2"]), &["--parallel", "--prompts"]);
    let mut dense = argodrive(["chat", "--store"]);
    dense.arg(tiny_store()).args(["--message", "x", "--parallel", "2"]);
    let (code, _, notes) = outcome(&mut dense);
    assert_eq!(code, 2, "{notes}");
    // A text that fills its context ends alone.
    let full =
        json_of(&mut with_set(&three(), &["--max-context", "12", "--parallel", "3", "--max-new", "20", "--json"]));
    let stopped: Vec<&str> = full["texts"].as_array().unwrap().iter().map(|t| t["stopped"].as_str().unwrap()).collect();
    assert!(stopped.contains(&"context_full"), "{stopped:?}");
}
