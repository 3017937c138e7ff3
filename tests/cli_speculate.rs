//! Speculative decoding with the real binary: the same text, what it says of its proposals, traces that know which rows were
//! kept, and draft models that do not fit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::source::Phase;
use argodrive::trace::log::{read_barriers, read_header};
use assert_cmd::Command;
use prepared::{argodrive, has, ids, json_of, mini_store, outcome, refused, repo};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const PROMPT: &str = "The sun rose. The dog ran. The sun rose. The dog";

fn decode(args: &[&str]) -> Command {
    let mut command = argodrive(["decode", "--json", "--max-new", "32", "--prompt", PROMPT, "--store"]);
    command.arg(mini_store()).args(args);
    command
}

fn draft_checkpoint() -> PathBuf {
    repo("models/argo-mini-draft")
}

fn verdict<'a>(run: &'a Value, setting: &str) -> &'a str {
    let settings = run["settings"].as_array().unwrap();
    settings.iter().find(|s| s["name"] == setting).unwrap()["verdict"].as_str().unwrap()
}

#[test]
fn the_text_is_the_same_and_every_setting_is_proved() {
    let plain = json_of(&mut decode(&[]));
    assert!(plain["speculation"].is_null());
    assert_eq!(verdict(&plain, "speculate"), "proved", "off shows no proposal");
    let checkpoint = draft_checkpoint();
    let model = ["--speculate", "model", "--draft-model"];
    let runs: [(&str, Vec<&str>); 3] = [
        ("ngram", vec!["--speculate", "ngram", "--draft-depth", "3"]),
        ("model", [&model[..], &[checkpoint.to_str().unwrap(), "--draft-depth", "2"]].concat()),
        ("model", [&model[..], &[prepared::dense_store().to_str().unwrap(), "--draft-policy", "adaptive"]].concat()),
    ];
    for (drafter, args) in &runs {
        let run = json_of(&mut decode(args));
        assert_eq!(run["token_ids"], plain["token_ids"], "{args:?}");
        let s = &run["speculation"];
        assert_eq!(s["drafter"], *drafter);
        assert_eq!(s.get("draft_model").is_some(), *drafter == "model");
        let count = |key: &str| s[key].as_u64().unwrap();
        let widths = s["widths"].as_array().unwrap();
        let tokens: u64 = widths.iter().map(|w| w["tokens"].as_u64().unwrap()).sum();
        assert_eq!(tokens + 1, ids(&run["token_ids"]).len() as u64);
        assert!(count("verify_passes") > 0 && count("verify_rows") > count("verify_passes"));
        assert!(s["experts_per_verify_pass"].as_f64().unwrap() > 66.0, "66 are what one row needs");
        for position in s["positions"].as_array().unwrap() {
            assert!(position["accepted"].as_u64() <= position["proposed"].as_u64());
        }
        for setting in ["speculate", "draft_policy"] {
            assert_eq!(verdict(&run, setting), "proved", "{setting} of {args:?}");
        }
        if args.contains(&"--draft-depth") {
            assert_eq!(verdict(&run, "draft_depth"), "proved", "{args:?}");
        }
    }
    let mut people = argodrive(["decode", "--max-new", "24", "--prompt", PROMPT, "--speculate", "ngram", "--store"]);
    let (code, _, notes) = outcome(people.arg(mini_store()));
    assert_eq!(code, 0, "{notes}");
    has(&notes, &["ngram proposed", "accepted", "experts each"]);
}

#[test]
fn a_record_holds_it_and_runs_again() {
    let dir = prepared::folder();
    let out = dir.path().join("results");
    let mut first = decode(&["--resident", "--speculate", "ngram", "--assert", "--out"]);
    let run = json_of(first.arg(&out));
    assert_eq!(run["rejected"], Value::Array(Vec::new()), "{run}");
    let mut at = out;
    while at.is_dir() {
        at = prepared::only_entry(&at);
    }
    let record: Value = serde_json::from_str(&fs::read_to_string(&at).unwrap()).unwrap();
    assert_eq!(record["speculation"], run["speculation"]);
    assert_eq!(record["config"]["draft"]["speculate"], "ngram");
    let again = json_of(argodrive(["decode", "--json", "--config"]).arg(&at));
    assert_eq!(again["token_ids"], run["token_ids"]);
    assert_eq!(again["speculation"]["positions"], run["speculation"]["positions"]);
    let config = dir.path().join("run.toml");
    fs::write(&config, "[draft]\nspeculat = \"ngram\"\n").unwrap();
    refused(decode(&[]).arg("--config").arg(&config), &["speculat", "did you mean `speculate`?"]);
}

#[test]
fn a_trace_knows_the_rows_that_were_kept() {
    let dir = prepared::folder();
    let folder = dir.path().join("trace");
    let run = json_of(decode(&["--speculate", "ngram", "--draft-depth", "4", "--trace"]).arg(&folder));
    let header = read_header(&folder).unwrap();
    let barriers = read_barriers(&folder).unwrap();
    let mut routes = argodrive::trace::routes::routes(&folder, &header, false).unwrap().unwrap();
    let (mut kept, mut dropped) = (BTreeSet::new(), BTreeSet::new());
    let mut before = None;
    while let Some(r) = routes.next_value().unwrap() {
        if r.phase == Phase::Verify {
            let to = if r.kept == 1 { &mut kept } else { &mut dropped };
            to.insert((r.step, r.pos));
            before = Some(r.pos);
        } else {
            assert_eq!(r.kept, 1);
        }
    }
    assert!(before.is_some());
    let s = &run["speculation"];
    assert_eq!(kept.len() as u64, s["verify_tokens"].as_u64().unwrap());
    assert_eq!((kept.len() + dropped.len()) as u64, s["verify_rows"].as_u64().unwrap());
    assert!(kept.is_disjoint(&dropped) && !dropped.is_empty());
    let positions: BTreeSet<u64> = kept.iter().map(|k| k.1).collect();
    assert_eq!(positions.len(), kept.len(), "a position is kept once");
    let verify: Vec<_> = barriers.iter().filter(|b| b.phase == Phase::Verify).collect();
    assert_eq!(verify.len() as u64, 11 * s["verify_passes"].as_u64().unwrap());
    assert!(verify.iter().all(|b| b.rows > 1 && b.width > 0));

    // Heat counts what the text needed, and a simulation the tokens that it got.
    let heat = |more: &[&str], name: &str| {
        let out = dir.path().join(name);
        let mut command = argodrive(["heat", "--json", "--routes"]);
        command.arg(folder.join("routes.csv")).arg("--store").arg(mini_store()).arg("--out").arg(&out).args(more);
        command.assert().success();
        fs::read_to_string(out).unwrap()
    };
    assert_ne!(heat(&[], "kept.json"), heat(&["--with-rejected"], "all.json"));
    let plan = dir.path().join("plan.json");
    let drives = dir.path().join("drives.toml");
    fs::create_dir(dir.path().join("a")).unwrap();
    fs::write(&drives, "[[drive]]\nname = \"store\"\npath = \"a\"\n").unwrap();
    let mut command = argodrive(["plan", "--policy"]);
    command.arg(prepared::policy("round-robin")).arg("--store").arg(mini_store());
    command.arg("--drives").arg(&drives).arg("--out").arg(&plan).assert().success();
    let simulate = |more: &[&str]| {
        let mut command = argodrive(["simulate", "--repeats", "1"]);
        command.arg(&folder).arg("--plan").arg(&plan).args(more);
        command
    };
    let simulated = json_of(simulate(&["--json"]).args::<[&str; 0], &str>([]));
    assert!(simulated.to_string().contains("verify"), "{simulated}");
    let config = dir.path().join("sim.toml");
    fs::write(&config, "[draft]\nspeculate = \"ngram\"\n").unwrap();
    refused(simulate(&["--config"]).arg(&config), &["speculate", "repeats the passes of the trace"]);
}

#[test]
fn chat_says_the_same() {
    let chat = |more: &[&str]| {
        let mut command = argodrive(["chat", "--resident", "--max-new", "24", "--store"]);
        outcome(command.arg(mini_store()).args(more).write_stdin("Tell me a story.\nAnother one.\n"))
    };
    let (code, plain, _) = chat(&[]);
    assert_eq!(code, 0);
    for args in [
        vec!["--speculate", "ngram"],
        vec![
            "--speculate",
            "model",
            "--draft-model",
            draft_checkpoint().to_str().unwrap(),
            "--draft-policy",
            "adaptive",
        ],
    ] {
        assert_eq!(chat(&args).1, plain, "{args:?}");
    }
}

/// The draft model with another word for one control token.
fn renamed(folder: &Path) -> PathBuf {
    let out = folder.join("renamed");
    fs::create_dir(&out).unwrap();
    for entry in fs::read_dir(draft_checkpoint()).unwrap().map(Result::unwrap) {
        let to = out.join(entry.file_name());
        match fs::read_to_string(entry.path()) {
            Ok(text) => fs::write(&to, text.replace("<|user|>", "<|usr|>")).unwrap(),
            Err(_) => drop(fs::copy(entry.path(), &to).unwrap()),
        }
    }
    out
}

#[test]
fn draft_models_that_do_not_fit_are_named() {
    let dir = prepared::folder();
    let draft = draft_checkpoint();
    let with = |folder: &Path| {
        let mut command = decode(&["--speculate", "model", "--draft-model"]);
        command.arg(folder);
        command
    };
    let mut tiny = argodrive(["decode", "--prompt", "abc", "--speculate", "model", "--draft-model"]);
    tiny.arg(&draft).arg("--store").arg(prepared::tiny_store());
    let of_tiny = prepared::tiny_store().display().to_string();
    refused(&mut tiny, &["argo-mini-draft", "4096 tokens", "768", &of_tiny, "the same vocabulary"]);
    let other = renamed(dir.path());
    refused(&mut with(&other), &["token 3 is", "<|usr|>", "<|user|>", "renamed", "the same vocabulary"]);
    refused(&mut with(&repo("models/argo-mini")), &["routed experts", "dense model"]);
    refused(&mut with(mini_store()), &["routed experts", "dense model"]);
    refused(&mut with(dir.path()), &["config.json"]);
    for (args, words) in [
        (&["--speculate", "model"][..], &["--draft-model"][..]),
        (&["--draft-depth", "2"], &["draft_depth", "--speculate"]),
        (&["--speculate", "ngram", "--draft-depth", "0"], &["--draft-depth", "1 to 16"]),
        (&["--speculate", "ngram", "--draft-depth", "17"], &["--draft-depth", "1 to 16"]),
        (&["--speculate", "ngram", "--draft-model", "x"], &["--draft-model", "--speculate ngram"]),
        (&["--speculate", "ngram", "--draft-accept", "standard"], &["draft_accept", "certain", "--speculate model"]),
        (
            &["--speculate", "model", "--draft-model", "x", "--draft-accept", "standard"],
            &["draft_accept", "temperature"],
        ),
        (
            &["--speculate", "model", "--draft-model", "x", "--draft-policy", "adaptive", "--temperature", "1"],
            &["--draft-accept exact-match", "--draft-policy fixed"],
        ),
    ] {
        refused(&mut decode(args), words);
    }
}
