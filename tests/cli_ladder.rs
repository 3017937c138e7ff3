//! The ladder with the real binary on emulated drives, and the label that everything emulated carries (measuring.md,
//! section 7): no table, record or figure of such a run may pass for a speed of the hardware.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::trace::log::read_header;
use assert_cmd::Command;
use prepared::{Drives, argodrive, easy_pace, has, ids, json_of, only_entry, outcome, policy, tiny_store};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const PROMPT: &str = "abc";
const TOKENS: usize = 3;

fn ladder(drives: &Drives, policy_name: &str, out: &Path) -> Command {
    let mut command = argodrive(["ladder", "--prompt", PROMPT, "--max-new", "3", "--repetitions", "2", "--store"]);
    command.arg(tiny_store()).arg("--drives").arg(&drives.toml).arg("--policy").arg(policy(policy_name));
    command.arg("--out").arg(out);
    command
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

/// Every record.json below `arms/`.
fn records(folder: &Path) -> Vec<Value> {
    let mut arms: Vec<PathBuf> = fs::read_dir(folder.join("arms")).unwrap().map(|e| e.unwrap().path()).collect();
    arms.sort();
    arms.iter().map(|arm| read(&arm.join("record.json"))).collect()
}

#[test]
fn two_emulated_drives_make_a_ladder_of_two_rungs() {
    let drives = Drives::new(2, Some(easy_pace()));
    let out = drives.dir.path().join("results");
    let ladder_json = json_of(ladder(&drives, "round-robin", &out).arg("--json"));
    let folder = PathBuf::from(ladder_json["folder"].as_str().unwrap());
    assert_eq!(only_entry(&out.join("ladder")), folder);

    let rungs = ladder_json["rungs"].as_array().unwrap();
    assert_eq!(rungs.len(), 2);
    assert_eq!(rungs[0]["drives"], serde_json::json!(["amber"]));
    assert_eq!(rungs[1]["drives"], serde_json::json!(["amber", "blue"]));
    assert_ne!(rungs[0]["plan"], rungs[1]["plan"], "each rung is planned for its drives");
    assert_eq!((rungs[0]["gain"].as_f64(), rungs[1]["share_of_top"].as_f64()), (Some(1.0), Some(1.0)));
    for rung in rungs {
        let (rate, range) = (rung["rates"]["decode_tok_s"].as_f64().unwrap(), &rung["decode_tok_s_range"]);
        assert!(range[0].as_f64().unwrap() <= rate && rate <= range[1].as_f64().unwrap(), "{rung}");
        assert_eq!(rung["runs"].as_u64(), Some(2));
    }

    // What the runs were: the same tokens as from memory, every drive of a rung at work, the label on each record.
    let runs = records(&folder);
    let counted: Vec<&Value> = runs.iter().filter(|r| !r["arm"].as_str().unwrap().ends_with("-warmup")).collect();
    assert_eq!(counted.len(), 4, "a warm-up may be rejected, a counted run is repeated");
    let mut resident = argodrive(["decode", "--resident", "--json", "--prompt", PROMPT, "--max-new", "3", "--store"]);
    let resident = json_of(resident.arg(tiny_store()));
    let hash = argodrive::bench::record::token_hash(&ids(&resident["token_ids"]));
    assert_eq!(ladder_json["token_hash"].as_str(), Some(hash.as_str()));
    for run in &counted {
        assert_eq!(run["token_hash"].as_str(), Some(hash.as_str()));
        assert_eq!(run["generated_tokens"].as_u64(), Some(TOKENS as u64));
        let rung = usize::from(run["arm"] == "rung2");
        assert_eq!(run["plan_hash"], rungs[rung]["plan"]);
        let used = run["drives"].as_array().unwrap();
        assert_eq!(used.len(), rung + 1);
        assert!(used.iter().all(|d| d["reads"].as_u64() > Some(0) && d["emulated"] == true), "{run}");
    }
    assert!(runs.iter().all(|r| r["emulated"] == true));

    // The record on disk is what was printed, and the figure is there.
    let mut on_disk = read(&folder.join("ladder.json"));
    on_disk["folder"] = ladder_json["folder"].clone();
    assert_eq!(on_disk, ladder_json);
    assert_eq!(on_disk["emulated"], true);
    let svg = fs::read_to_string(folder.join("ladder.svg")).unwrap();
    assert!(svg.to_lowercase().contains("emulated"), "the figure carries no label");
    assert!(fs::read(folder.join("ladder.png")).unwrap().starts_with(b"\x89PNG"));
}

#[test]
fn the_table_of_a_ladder_is_labelled_and_rungs_follow_the_order() {
    let drives = Drives::new(3, Some(easy_pace()));
    let out = drives.dir.path().join("results");
    let mut command = ladder(&drives, "full-mirror", &out);
    let (code, text, notes) = outcome(command.args(["--order", "coral,amber", "--max-context", "64", "--against"]));
    assert_eq!(code, 0, "{text}{notes}");
    has(&text, &["this ladder (EMULATED)", "Kimi K3, 17-token public prompt, 2026-09-08", "1.75x", "only the shape"]);
    let table = text.split_once("gain over its first rung").unwrap().1;
    assert!(table.lines().all(|l| l.chars().count() <= 80 || l.starts_with("figure")), "{text}");
    let svg = fs::read_to_string(only_entry(&out.join("ladder")).join("ladder-against.svg")).unwrap();
    has(&svg, &["this ladder (", "Kimi K3", "1 to 4 drives: 1.75x", "mulated drives"]);
    has(&text, &["decode tok/s", "EMULATED drives", "not speeds of this machine", "tokens identical on every rung"]);
    has(&text, &["ladder.json", "ladder.svg", "report.html"]);
    let page = fs::read_to_string(only_entry(&out.join("ladder")).join("report.html")).unwrap();
    has(&page, &["EMULATED", "<caption>Rungs", "<figure><svg", "Machine"]);
    assert!(!page.contains("http://") && !page.contains("https://"));
    let ladder_json = read(&only_entry(&out.join("ladder")).join("ladder.json"));
    let named: Vec<&Value> = ladder_json["rungs"].as_array().unwrap().iter().map(|r| &r["drives"]).collect();
    assert_eq!(named, [&serde_json::json!(["coral"]), &serde_json::json!(["coral", "amber"])]);
    assert!(fs::read_dir(&drives.specs[1].path).unwrap().next().is_none(), "a drive outside the order is left alone");
}

#[test]
fn what_a_ladder_is_laid_against_is_read_before_anything_is_measured() {
    let drives = Drives::new(1, Some(easy_pace()));
    let out = drives.dir.path().join("results");
    let file = drives.dir.path().join("others.csv");
    fs::write(&file, "model,workload,drives,steady_or_headline_tok_s,source_date\nm,w,1,2.0,d\n").unwrap();
    let (code, _, notes) = outcome(ladder(&drives, "round-robin", &out).arg("--against").arg(&file));
    assert_eq!(code, 2);
    has(&notes, &["--against", "others.csv", "two rungs"]);
    assert!(!out.exists(), "nothing was begun");
}

#[test]
fn whatever_decode_says_about_emulated_drives_is_labelled() {
    let drives = Drives::new(2, Some(easy_pace()));
    let plan = drives.staged(tiny_store(), "full-mirror");
    let trace = drives.dir.path().join("trace");
    let run = |args: &[&str]| {
        let mut command = argodrive(["decode", "--prompt", PROMPT, "--max-new", "3", "--store"]);
        command.arg(tiny_store()).arg("--plan").arg(&plan).arg("--drives").arg(&drives.toml).args(args);
        let (code, text, notes) = outcome(&mut command);
        // one run is not repeated: on a very busy machine it is rejected, and labelled all the same
        assert!(code == 0 || (code == 1 && notes.contains("rejected")), "{notes}");
        (text, notes)
    };
    let (_, notes) = run(&[]);
    for line in notes.lines().filter(|l| l.contains("tok/s") || l.contains("barrier")) {
        assert!(line.to_lowercase().contains("emulated drives"), "no label: {line}");
    }
    has(&notes, &["amber (emulated)", "blue (emulated)", "tok/s"]);
    let (text, _) = run(&["--json", "--trace", trace.to_str().unwrap()]);
    let object: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(object["emulated"], true);
    assert!(object["drives"].as_array().unwrap().iter().all(|d| d["emulated"] == true));
    assert!(read_header(&trace).unwrap().drives.iter().all(|d| d.emulated));
    // and the other way round: the same plan on the folders themselves is not emulated
    let mut real = argodrive(["decode", "--json", "--prompt", PROMPT, "--max-new", "3", "--store"]);
    let real = json_of(real.arg(tiny_store()).arg("--plan").arg(&plan));
    assert_eq!((&real["emulated"], &real["token_ids"]), (&Value::Bool(false), &object["token_ids"]));
}
