//! Every way of guessing end to end: a table is learnt from a traced run, then each policy decodes the same text from
//! emulated drives; the tokens never differ, and each run says whose guesses it read ahead and how many were right.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::spec::{Emulation, RateSchedule};
use assert_cmd::Command;
use predicates::prelude::*;
use prepared::{Drives, argodrive, json_of, mini_store};
use serde_json::Value;
use std::path::Path;

const PROMPT: &str = "The router names the experts, and the block comes back when the device has time.";

fn decode(drives: &Drives, plan: &Path, args: &[&str]) -> Command {
    let mut command = argodrive(["decode", "--json", "--max-new", "24", "--prompt", PROMPT, "--store"]);
    command.arg(mini_store()).arg("--plan").arg(plan).arg("--drives").arg(&drives.toml).args(args);
    command
}

fn setting<'a>(run: &'a Value, name: &str) -> (&'a str, &'a str) {
    let all = run["settings"].as_array().unwrap();
    let one = all.iter().find(|s| s["name"] == name).unwrap();
    (one["verdict"].as_str().unwrap(), one["seen"].as_str().unwrap())
}

#[test]
fn all_policies_give_the_same_tokens_and_say_how_good_they_were() {
    let pace = Emulation {
        rate_bytes_per_s: 20_000_000,
        latency_ns: 1_000_000,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 0,
        schedule: RateSchedule::NONE,
        link: None,
    };
    let drives = Drives::new(2, Some(pace));
    let plan = drives.staged(mini_store(), "full-mirror");
    let at = |name: &str| drives.dir.path().join(name).to_string_lossy().into_owned();
    let plain = json_of(&mut decode(&drives, &plan, &["--trace", &at("trace")]));
    assert_eq!(setting(&plain, "prefetch").0, "proved");
    let table = at("table");
    let learnt = json_of(argodrive(["trace", "learn", "--json", "--out", &table]).arg(at("trace")));
    assert!(learnt["entries"].as_u64().unwrap() > 1000, "{learnt}");
    let ahead = ["--prefetch-depth", "2", "--prefetch-governor", "off", "--prefetch"];
    for policy in ["same-as-last", "next-router", "markov", "draft"] {
        let mut args = ahead.to_vec();
        args.push(policy);
        if policy == "markov" {
            args.extend(["--prefetch-table", &table]);
        }
        let run = json_of(&mut decode(&drives, &plan, &args));
        assert_eq!(run["token_ids"], plain["token_ids"], "{policy}");
        let (verdict, seen) = setting(&run, "prefetch");
        println!("{policy}: {verdict}: {seen}");
        assert_eq!(verdict, "proved", "{policy}: {seen}");
        assert!(seen.contains("of guessed experts were asked for"), "{policy}: {seen}");
    }
    let refused = |args: &[&str], word: &str| {
        decode(&drives, &plan, args).assert().code(2).stderr(predicate::str::contains(word));
    };
    let markov = ["--prefetch", "markov", "--prefetch-table", &table];
    refused(&[&markov[..], &["--prefetch-depth", "3"]].concat(), "looks 2 layers ahead");
    let text = std::fs::read_to_string(&table).unwrap();
    let id = learnt["model_id"].as_str().unwrap();
    std::fs::write(&table, text.replacen(id, "another", 1)).unwrap();
    refused(&markov, "was learnt from model another");
    std::fs::write(&table, text.replacen("_table\":1", "_table\":2", 1)).unwrap();
    refused(&markov, "newer argodrive");
    std::fs::write(&table, text.replacen("\n1,1,", "\n77,1,", 1)).unwrap();
    refused(&markov, "table:3: column 1");
}
