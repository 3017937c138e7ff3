//! What bounded a run: said after every decode, the same in a report of its trace; and the arm with every expert in memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::bench::config::Asked;
use argodrive::bench::run::{RunSpec, run};
use argodrive::layout::plan::Plan;
use argodrive::open::Model;
use argodrive::reader::{KnownRate, mounts_of};
use argodrive::trace::log::{RateFrom, read_barriers, read_header};
use assert_cmd::Command;
use prepared::{Drives, argodrive, dense_store, has, ids, json_of, mini_store, outcome, refused};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::OnceLock;

/// argo-mini with one home each on two drives.
fn staged() -> &'static (Drives, PathBuf) {
    static CELL: OnceLock<(Drives, PathBuf)> = OnceLock::new();
    CELL.get_or_init(|| {
        let drives = Drives::new(2, None);
        let plan = drives.staged(mini_store(), "round-robin");
        (drives, plan)
    })
}

fn decode(args: &[&str]) -> Command {
    let mut command = argodrive(["decode", "--prompt", "Once upon a time", "--store"]);
    command.arg(mini_store()).args(args);
    command
}

fn streamed(args: &[&str]) -> Command {
    let mut command = decode(args);
    command.arg("--plan").arg(&staged().1);
    command
}

fn parts(verdict: &Value) -> u64 {
    ["compute_ns", "all_drives_ns", "one_drive_ns", "latency_ns"].iter().map(|k| verdict[k].as_u64().unwrap()).sum()
}

/// Without line breaks.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn setting<'a>(run: &'a Value, name: &str) -> &'a Value {
    run["settings"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap()
}

#[test]
fn every_decode_says_what_bounded_it_without_keeping_a_read() {
    let run = json_of(&mut streamed(&["--json", "--max-new", "6"]));
    let verdict = &run["verdict"];
    assert_eq!(parts(verdict), verdict["wall_ns"].as_u64().unwrap());
    assert_eq!(verdict["barriers"], 5 * 11, "those of decoding");
    let shares: f64 =
        ["compute", "all_drives", "one_drive", "latency"].iter().map(|k| verdict["shares"][k].as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-9);
    let bounds = ["not_storage", "all_drives", "one_drive", "latency"];
    assert!(bounds.contains(&verdict["bound"].as_str().unwrap()));
    assert!(verdict["says"].as_str().unwrap().contains("times as fast"));
    let decode_s = 5.0 / run["rates"]["decode_tok_s"].as_f64().unwrap();
    assert!((verdict["wall_ns"].as_u64().unwrap() as f64 / 1e9 - decode_s).abs() < 1e-6);
    let trace = setting(&run, "trace");
    assert_eq!((&trace["verdict"], &trace["seen"]), (&"proved".into(), &"no read kept, nothing written".into()));
    assert_eq!((&run["reference"], &setting(&run, "reference")["verdict"]), (&Value::Null, &"proved".into()));

    let (code, _, notes) = outcome(&mut streamed(&["--max-new", "6"]));
    assert_eq!(code, 0);
    has(
        &flat(&notes),
        &["where the time of decoding went", "storage: all drives together", "compute", "times as fast"],
    );
    // remarks are not tables
    assert!(notes.lines().all(|l| l.chars().count() <= 80 || l.starts_with("argodrive:")), "{notes}");
    let (_, _, notes) = outcome(&mut streamed(&["--max-new", "1"]));
    has(&notes, &["no verdict: one token"]);
    let memory = json_of(&mut decode(&["--json", "--max-new", "3", "--resident"]));
    let verdict = &memory["verdict"];
    assert_eq!((&verdict["bound"], &verdict["compute_ns"]), (&"not_storage".into(), &verdict["wall_ns"]));
}

#[test]
fn a_report_of_the_trace_says_the_same_and_has_both_bounds_without_being_told_rates() {
    let dir = prepared::folder();
    let trace = dir.path().join("trace");
    let run = json_of(streamed(&["--json", "--max-new", "12"]).arg("--trace").arg(&trace));
    let report = json_of(argodrive(["trace", "report", "--json"]).arg(&trace));
    assert_eq!(report["verdict"], run["verdict"]);
    assert_eq!(parts(&run["verdict"]), run["verdict"]["wall_ns"].as_u64().unwrap());

    let header = read_header(&trace).unwrap();
    assert_eq!(header.decode_wall_ns, run["verdict"]["wall_ns"].as_u64());
    let names: Vec<&str> = header.rates.iter().map(|r| r.drive.as_str()).collect();
    assert_eq!(names, ["amber", "blue"], "twelve passes over eleven layers teach both");
    assert!(header.rates.iter().all(|r| r.from == RateFrom::Learnt && r.bytes_per_s > 0));
    assert_eq!(report["rates"][0]["from"], "learnt in this run");
    for b in read_barriers(&trace).unwrap() {
        let (layout, drives) = (b.bound_layout_ns.unwrap(), b.bound_drives_ns.unwrap());
        assert!(layout >= drives && drives > 0, "barrier {}: {layout} < {drives}", b.barrier);
    }
    assert_eq!(report["all"]["bounded"], 12 * 11);
    let (_, text, _) = outcome(argodrive(["trace", "report"]).arg(&trace));
    has(&flat(&text), &["layout*", "drives*", "learnt in the run", "wall time of decoding, as the run took it"]);
    has(&flat(&text), &[run["verdict"]["says"].as_str().unwrap().split(';').next().unwrap()]);
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");

    // the page tells the same of the same run
    let page = dir.path().join("report.html");
    assert_eq!(outcome(argodrive(["trace", "report"]).arg(&trace).arg("--html").arg(&page)).0, 0);
    let page = std::fs::read_to_string(page).unwrap();
    has(&page, &["wall time of decoding, as the run took it", "(learnt in the run)"]);
    assert!(!page.contains("first open to last close"));
}

#[test]
fn rates_that_were_given_are_the_ones_that_bounds_come_from() {
    let (drives, plan) = staged();
    let model = Model::load(mini_store(), None).unwrap();
    let plan = Plan::parse(&fs::read_to_string(plan).unwrap()).unwrap();
    let mounts = mounts_of(&plan, None).unwrap();
    let folder = drives.dir.path().join("given");
    let mut asked = Asked::default();
    (asked.config.max_new, asked.config.trace) = (3, Some(folder.clone()));
    let known = |drive: &str| KnownRate { drive: drive.into(), bytes_per_s: 26_112_000, fixed_ns: 1000 };
    asked.config.reader.rates = vec![known("blue"), known("amber")];
    let prompt = model.encode_prompt("abc", false).unwrap();
    let spec = RunSpec {
        arm: "given",
        asked: &asked,
        under_test: &BTreeSet::new(),
        streamed: Some((&plan, &mounts)),
        prompts: std::slice::from_ref(&prompt),
        control: None,
    };
    run(&model, &spec, &mut |_| ControlFlow::Continue(())).unwrap();
    let header = read_header(&folder).unwrap();
    assert!(header.rates.iter().all(|r| r.from == RateFrom::Given && r.fixed_ns == 1000));
    for b in read_barriers(&folder).unwrap() {
        // two drives of one expert per millisecond each; reads are padded to the alignment
        let least = 1000 + u64::from(b.width) * 500_000;
        let seen = b.bound_drives_ns.unwrap();
        assert!(seen >= least && seen < least * 11 / 10, "{} experts: {seen}", b.width);
    }
}

#[test]
fn the_reference_arm_gives_the_same_tokens_and_the_time_of_compute_alone() {
    let dir = prepared::folder();
    let out = dir.path().join("results");
    let mut command = streamed(&["--json", "--max-new", "5", "--temperature", "0.8", "--seed", "3", "--reference"]);
    let (code, stdout, notes) = outcome(command.arg("--assert").arg("--out").arg(&out));
    assert!(code == 0 || code == 1, "{notes}"); // a guard may trip on a busy machine
    let run: Value = serde_json::from_str(&stdout).unwrap();
    let reference = &run["reference"];
    assert_eq!(reference["same_tokens"], true);
    assert!(reference["decode_ns"].as_u64() > Some(0) && reference["leases"].as_u64() > Some(0));
    assert_eq!(reference["resident_bytes"], 11 * 96 * 26_112);
    let line = setting(&run, "reference");
    assert_eq!((&line["verdict"], &line["under_test"]), (&"proved".into(), &true.into()));
    assert_eq!(ids(&run["token_ids"]).len(), 5);
    // the record has both, and runs again
    let kind = if code == 0 { "arms" } else { "rejected" };
    let record = prepared::only_entry(&out.join("decode")).join(kind).join("00-decode/record.json");
    let kept: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    assert_eq!(kept["reference"], *reference);
    assert_eq!(kept["verdict"]["wall_ns"], run["verdict"]["wall_ns"]);
    let again = json_of(argodrive(["decode", "--json", "--config"]).arg(&record));
    assert_eq!((&again["reference"]["same_tokens"], &again["token_ids"]), (&true.into(), &run["token_ids"]));

    let (_, _, notes) = outcome(&mut streamed(&["--max-new", "4", "--reference"]));
    has(&flat(&notes), &["reference arm: with every expert in memory", "same tokens"]);
    refused(&mut decode(&["--reference", "--resident"]), &["--reference", "--resident"]);
    let mut dense = argodrive(["decode", "--prompt", "a", "--max-new", "2", "--reference", "--store"]);
    refused(dense.arg(dense_store()), &["--reference", "dense"]);
}
