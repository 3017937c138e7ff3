//! `argodrive trace reissue`: the same barriers as real reads under another plan. Asserts identities, never speeds: a busy
//! machine may trip a guard and make the exit code 1, and what was read is the same all the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::spec::{Emulation, RateSchedule};
use argodrive::trace::events::{BarrierRecord, ReadEvent, ReadResult};
use argodrive::trace::log::{read_barriers, read_header, read_reads};
use assert_cmd::Command;
use prepared::{Drives, argodrive, has, mini_store, outcome, refused, tiny_store};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// argo-mini with one home each on two drives, and the trace of a decode from there.
fn recorded() -> &'static (Drives, PathBuf) {
    static CELL: OnceLock<(Drives, PathBuf)> = OnceLock::new();
    CELL.get_or_init(|| {
        let drives = Drives::new(2, None);
        let plan = drives.staged(mini_store(), "round-robin");
        let trace = drives.dir.path().join("trace");
        let mut decode = argodrive(["decode", "--max-new", "5", "--prompt", "The sea was calm", "--store"]);
        decode.arg(mini_store()).arg("--plan").arg(plan).arg("--trace").arg(&trace).assert().success();
        (drives, trace)
    })
}

/// argo-mini on three other drives, every expert on each.
fn mirrored() -> &'static (Drives, PathBuf) {
    static CELL: OnceLock<(Drives, PathBuf)> = OnceLock::new();
    CELL.get_or_init(|| {
        let drives = Drives::new(3, None);
        let plan = drives.staged(mini_store(), "full-mirror");
        (drives, plan)
    })
}

fn reissue(trace: &Path, plan: &Path, more: &[&str]) -> Command {
    let mut command = argodrive(["trace", "reissue"]);
    command.arg(trace).arg("--plan").arg(plan).args(more);
    command
}

/// Runs it; a machine that is busy elsewhere may trip a guard.
fn json(command: &mut Command) -> Value {
    let (code, stdout, stderr) = outcome(command);
    assert!(code == 0 || code == 1, "{stderr}");
    let value: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(value["rejected"].as_array().unwrap().is_empty(), code == 0, "{stderr}");
    value
}

/// The experts that each barrier got.
fn delivered(reads: &[ReadEvent]) -> BTreeMap<u64, BTreeSet<u16>> {
    let mut out: BTreeMap<u64, BTreeSet<u16>> = BTreeMap::new();
    for read in reads.iter().filter(|r| r.result == ReadResult::Ok) {
        out.entry(read.barrier.unwrap()).or_default().insert(read.expert.0);
    }
    out
}

fn identity(b: &BarrierRecord) -> impl PartialEq + std::fmt::Debug {
    ((b.barrier, b.step, b.phase, b.pos), (b.rows, b.layer, b.width, b.bytes))
}

/// A copy of a trace folder that a test may change.
fn copy_of(trace: &Path, to: &Path) -> PathBuf {
    fs::create_dir(to).unwrap();
    for name in ["trace.json", "reads.csv", "barriers.csv"] {
        fs::copy(trace.join(name), to.join(name)).unwrap();
    }
    to.to_path_buf()
}

#[test]
fn another_plan_reads_the_same_experts_for_the_same_barriers_after_the_same_gaps() {
    let (trace, plan) = (&recorded().1, &mirrored().1);
    let dir = prepared::folder();
    let out = dir.path().join("deep/again");
    let seen = json(reissue(trace, plan, &["--json", "--verify-reads", "--out"]).arg(&out));
    let (then, now) = (read_barriers(trace).unwrap(), read_barriers(&out).unwrap());
    assert_eq!(then.len(), 5 * 11);
    assert!(then.iter().map(identity).eq(now.iter().map(identity)));
    let (before, after) = (read_reads(trace).unwrap(), read_reads(&out).unwrap());
    assert_eq!(delivered(&before), delivered(&after));
    assert!(after.iter().any(|r| r.parts > 1), "three drives serve an expert together");
    assert_eq!(seen["recorded_bytes"], seen["reissued_bytes"]);
    assert_eq!(seen["recorded_bytes"].as_u64().unwrap(), then.iter().map(|b| b.bytes).sum::<u64>());
    let bytes: u64 = seen["drives"].as_array().unwrap().iter().map(|d| d["payload_bytes"].as_u64().unwrap()).sum();
    assert_eq!(seen["reissued_bytes"].as_u64(), Some(bytes));
    for (then, now) in then.windows(2).zip(now.windows(2)) {
        let gap = |pair: &[BarrierRecord]| pair[1].open_ns.saturating_sub(pair[0].close_ns);
        assert!(gap(now) >= gap(then), "barrier {}: {} < {}", now[0].barrier, gap(now), gap(then));
    }
    let phases: Vec<_> = seen["phases"].as_array().unwrap().iter().map(|p| (&p["phase"], &p["barriers"])).collect();
    let count = |n: u64| Value::from(n);
    assert_eq!(phases, [(&"prefill".into(), &count(11)), (&"decode".into(), &count(44)), (&"all".into(), &count(55))]);
    let names: Vec<&str> = seen["settings"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"direct") && names.contains(&"dispatch") && !names.contains(&"seed"), "{names:?}");
    let checked = seen["settings"].as_array().unwrap().iter().find(|s| s["name"] == "verify_digests").unwrap();
    assert_eq!((&checked["verdict"], &checked["under_test"]), (&"proved".into(), &true.into()));

    // the new trace says what it is, and can be reported and read again
    let header = read_header(&out).unwrap();
    let reissued = header.reissued.as_ref().unwrap();
    assert_eq!((&reissued.from, reissued.gaps.as_str()), (trace, "recorded"));
    assert!(reissued.assumptions.iter().any(|a| a.contains("routes.csv names")), "{reissued:?}");
    let (code, text, _) = outcome(argodrive(["trace", "report"]).arg(&out));
    assert_eq!(code, 0);
    has(&text.split_whitespace().collect::<Vec<_>>().join(" "), &["read again, gaps recorded", "barriers read again"]);
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    let again = json(&mut reissue(&out, plan, &["--json", "--gaps", "none"]));
    assert_eq!(
        (&again["reissued_bytes"], &again["gaps_ns"], &again["gaps"]),
        (&seen["reissued_bytes"], &0.into(), &"none".into())
    );
    assert_eq!(again["out"], Value::Null);
    let (_, text, _) = outcome(&mut reissue(trace, plan, &["--gaps", "none"]));
    has(&text, &["55 barriers", "layout bound", "prefill", "amber", "expert bytes"]);
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
}

#[test]
fn both_bounds_stand_beside_each_barrier_where_the_drives_taught_their_rates() {
    let (trace, plan) = (&recorded().1, &mirrored().1);
    let dir = prepared::folder();
    let out = dir.path().join("again");
    let seen = json(reissue(trace, plan, &["--json", "--gaps", "none", "--out"]).arg(&out));
    let header = read_header(&out).unwrap();
    assert_eq!(serde_json::to_value(&header.rates).unwrap(), seen["rates"]);
    let barriers = read_barriers(&out).unwrap();
    let known = header.rates.len() == 3;
    for b in &barriers {
        assert_eq!((b.bound_layout_ns.is_some(), b.bound_drives_ns.is_some()), (known, known));
        // a full mirror is every expert on every drive: the two are one
        assert!(b.bound_layout_ns.unwrap_or(0).abs_diff(b.bound_drives_ns.unwrap_or(0)) <= 1);
    }
    let all = seen["phases"].as_array().unwrap().last().unwrap();
    if known {
        assert!((all["layout_over_drives"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{all}");
    }
}

#[test]
fn experts_from_memory_are_left_out_unless_routes_name_them() {
    let (trace, plan) = (&recorded().1, &mirrored().1);
    let dir = prepared::folder();
    let copy = copy_of(trace, &dir.path().join("hits"));
    let sets = delivered(&read_reads(trace).unwrap());
    let barriers = read_barriers(trace).unwrap();
    // as if the first expert of every barrier had been in memory: nobody read it, and the width still counts it
    let text = fs::read_to_string(trace.join("reads.csv")).unwrap();
    let first = |barrier: &str| sets[&barrier.parse().unwrap()].iter().next().unwrap().to_string();
    let kept = |line: &&str| {
        let cells: Vec<&str> = line.split(',').collect();
        cells[0] == "step" || cells[2] != first(cells[11])
    };
    let lines: Vec<&str> = text.lines().filter(kept).collect();
    fs::write(copy.join("reads.csv"), lines.join("\n") + "\n").unwrap();
    let experts: usize = sets.values().map(BTreeSet::len).sum();
    let seen = json(&mut reissue(&copy, plan, &["--json", "--gaps", "none"]));
    assert_eq!(seen["experts"].as_u64().unwrap() as usize, experts - barriers.len());
    has(&seen["assumptions"].to_string(), &["55 demanded experts of 55 barriers were in memory", "left out"]);

    let mut routes = String::from("step,phase,pos,layer,expert,weight,kept\n");
    for b in &barriers {
        let phase = serde_json::to_value(b.phase).unwrap();
        for (at, expert) in sets[&b.barrier].iter().enumerate() {
            let (step, phase, layer) = (b.step, phase.as_str().unwrap(), b.layer.0);
            routes += &format!("{step},{phase},{},{layer},{expert},0.125,{}\n", b.pos, at % 2);
        }
    }
    fs::write(copy.join("routes.csv"), &routes).unwrap();
    let seen = json(&mut reissue(&copy, plan, &["--json", "--gaps", "none"]));
    assert_eq!(seen["experts"].as_u64().unwrap() as usize, experts);
    has(&seen["assumptions"].to_string(), &["routes.csv names", "here they are read"]);
    // routes of another run
    let other: Vec<&str> = routes.lines().filter(|l| !l.contains(",0.125,1")).collect();
    fs::write(copy.join("routes.csv"), other.join("\n") + "\n").unwrap();
    refused(&mut reissue(&copy, plan, &[]), &["barrier 0", "was read for it", "routes.csv"]);
    fs::write(copy.join("routes.csv"), "step,phase\n").unwrap();
    refused(&mut reissue(&copy, plan, &[]), &["routes.csv", "columns"]);
}

#[test]
fn a_pace_that_is_not_kept_rejects_the_run_and_its_trace_says_so() {
    // no disk answers in half a microsecond
    let pace = Emulation {
        rate_bytes_per_s: 50_000_000_000,
        latency_ns: 0,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 0,
        schedule: RateSchedule::NONE,
        link: None,
    };
    let drives = Drives::new(2, Some(pace));
    let plan = drives.staged(mini_store(), "round-robin");
    let out = drives.dir.path().join("again");
    let mut command = reissue(&recorded().1, &plan, &["--json", "--gaps", "none", "--drives"]);
    let (code, stdout, stderr) = outcome(command.arg(&drives.toml).arg("--out").arg(&out));
    assert_eq!(code, 1, "{stderr}");
    has(&stderr, &["rejected: pace: contradicted"]);
    let seen: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(seen["emulated"], true);
    let rejected = read_header(&out).unwrap().reissued.unwrap().rejected;
    assert!(rejected.iter().any(|r| r.starts_with("pace:")), "{rejected:?}");
}

#[test]
fn imported_traces_are_read_again_where_they_know_layers_and_experts() {
    let dir = prepared::folder();
    let drives = Drives::new(2, None);
    let plan = drives.staged(tiny_store(), "round-robin");
    let layers: Vec<u16> = {
        let text: Value = serde_json::from_slice(&fs::read(&plan).unwrap()).unwrap();
        text["layers"].as_object().unwrap().keys().map(|k| k.parse().unwrap()).collect()
    };
    let mut csv = String::from("t_us,barrier,layer,expert,src,dur_ns\n");
    for barrier in 0..12u64 {
        let layer = layers[barrier as usize % layers.len()];
        for expert in 0..3u64 {
            csv += &format!("{},{barrier},{layer},{},A,500000\n", 10_000 + barrier * 2000, expert + barrier % 2);
        }
    }
    let (log, trace) = (dir.path().join("log.csv"), dir.path().join("imported"));
    fs::write(&log, csv).unwrap();
    let mut import = argodrive(["trace", "import", "--format", "per-read", "--out"]);
    import.arg(&trace).arg(&log).assert().success();
    let out = dir.path().join("again");
    let seen = json(reissue(&trace, &plan, &["--json", "--out"]).arg(&out));
    assert_eq!((&seen["barriers"], &seen["experts"]), (&12.into(), &36.into()));
    assert_eq!(delivered(&read_reads(&trace).unwrap()), delivered(&read_reads(&out).unwrap()));
    has(&seen["assumptions"].to_string(), &["imported from per-read"]);
    assert_eq!(seen["gaps_ns"].as_u64(), Some(11 * 1_500_000), "2 ms from barrier to barrier, 0.5 ms of it reading");

    // a log without layers and experts
    let (log, trace) = (dir.path().join("x_clat.1.log"), dir.path().join("fio"));
    fs::write(&log, "1, 200000, 0, 4096, 0, 0\n2, 300000, 0, 4096, 4096, 0\n").unwrap();
    argodrive(["trace", "import", "--format", "fio", "--out"]).arg(&trace).arg(&log).assert().success();
    let (code, _, message) = outcome(&mut reissue(&trace, &plan, &[]));
    assert_eq!(code, 2, "{message}");
    has(&message, &["nothing to read again"]);
}

#[test]
fn what_cannot_be_read_again_is_refused_before_anything_is_read() {
    let (trace, plan) = (&recorded().1, &mirrored().1);
    let dir = prepared::folder();
    let tiny = Drives::new(2, None);
    let small = tiny.plan(tiny_store(), "round-robin");
    let at = |name: &str| dir.path().join(name);
    // barrier, layer and expert of the first one that the plan lacks
    let message = refused(&mut reissue(trace, &small, &[]), &["barrier ", "demands expert ", " of layer ", "the plan"]);
    assert!(!message.contains("stage"), "{message}");
    refused(&mut reissue(&at("nowhere"), plan, &[]), &["nowhere/trace.json"]);
    refused(&mut reissue(trace, &at("no.json"), &[]), &["no.json"]);
    refused(reissue(trace, plan, &["--out"]).arg(trace), &["holds a trace already"]);
    fs::write(at("plain"), "x").unwrap();
    refused(reissue(trace, plan, &["--out"]).arg(at("plain")), &["--out", "plain"]);
    fs::write(at("drives.toml"), "[[drive]]\nname = \"x\"\npath = \".\"\n").unwrap();
    refused(reissue(trace, plan, &["--drives"]).arg(at("drives.toml")), &["drive `amber`"]);
    refused(&mut reissue(trace, plan, &["--queue-depth", "0"]), &["queue depth 0"]);
    // planned, but not staged
    let unstaged = Drives::new(2, None);
    let own = unstaged.plan(mini_store(), "round-robin");
    refused(&mut reissue(trace, &own, &[]), &["amber", "argodrive stage"]);
    // a fault in a row: line and column, or left out and said
    let broken = copy_of(trace, &at("broken"));
    let text = fs::read_to_string(broken.join("reads.csv")).unwrap().replacen(",ok,", ",maybe,", 1);
    fs::write(broken.join("reads.csv"), text).unwrap();
    refused(&mut reissue(&broken, plan, &[]), &["reads.csv:2: column 16 `result`"]);
    let seen = json(&mut reissue(&broken, plan, &["--lenient", "--json", "--gaps", "none"]));
    has(&seen["assumptions"].to_string(), &["1 rows with faults were left out"]);
    let empty = copy_of(trace, &at("empty"));
    for name in ["reads.csv", "barriers.csv"] {
        let head = fs::read_to_string(empty.join(name)).unwrap().lines().next().unwrap().to_string();
        fs::write(empty.join(name), head + "\n").unwrap();
    }
    refused(&mut reissue(&empty, plan, &[]), &["empty", "nothing to read again"]);
}
