//! The ladder with the real binary on emulated drives, and the label that everything emulated carries (measuring.md,
//! section 7): no table, record or figure of such a run may pass for a speed of the hardware.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::layout::plan::Plan;
use argodrive::trace::log::read_header;
use assert_cmd::Command;
use prepared::{Drives, argodrive, easy_pace, has, ids, json_of, only_entry, outcome, policy, refused, tiny_store};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const PROMPT: &str = "abc";
const TOKENS: usize = 3;

/// A ladder without a word on where experts lie.
fn bare(drives: &Drives, repetitions: &str, out: &Path) -> Command {
    let mut command = argodrive(["ladder", "--prompt", PROMPT, "--max-new", "3", "--repetitions", repetitions]);
    command.arg("--store").arg(tiny_store()).arg("--drives").arg(&drives.toml).arg("--out").arg(out);
    command
}

fn ladder(drives: &Drives, policy_name: &str, out: &Path) -> Command {
    let mut command = bare(drives, "2", out);
    command.arg("--policy").arg(policy(policy_name));
    command
}

/// Bytes of all experts once.
fn bank_bytes(plan: &Plan) -> u64 {
    plan.layers.values().map(|l| l.0.len() as u64).sum::<u64>() * plan.expert_bytes
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

    // Beside each decode the barriers of one traced run were read, and simulated on the rung's plan.
    let header = read_header(&folder.join("trace")).unwrap();
    assert_eq!(header.drives.len(), 2, "traced on the rung with the most drives");
    assert_eq!(fs::read_dir(folder.join("raw")).unwrap().count(), 4, "one reading for each run");
    let mut barriers = Vec::new();
    for rung in rungs {
        assert_eq!((rung["kind"].as_str(), rung["decode_tok_s_interval"].is_null()), (Some("ladder"), true));
        let raw = &rung["raw"];
        assert_eq!(raw["readings"].as_u64(), Some(2));
        barriers.push(raw["barriers"].as_u64().unwrap());
        let mean = raw["barrier_mean_ns"].as_f64().unwrap();
        assert!(
            raw["barrier_range_ns"][0].as_f64().unwrap() <= mean
                && mean <= raw["barrier_range_ns"][1].as_f64().unwrap()
        );
        if let (Some(layout), Some(drives)) = (raw["bound_layout_ns"].as_f64(), raw["bound_drives_ns"].as_f64()) {
            assert!(drives <= layout + 1.0, "{raw}");
            assert!((raw["reader_efficiency"].as_f64().unwrap() / (layout / mean) - 1.0).abs() < 1e-3, "{raw}");
        }
        let simulated = &rung["simulated"];
        let off = simulated["io_gain"].as_f64().unwrap() / raw["io_gain"].as_f64().unwrap() - 1.0;
        assert!((simulated["off"].as_f64().unwrap() - off).abs() < 1e-9, "{rung}");
    }
    assert_eq!(barriers[0], barriers[1]);
    assert_eq!(barriers[0] % (TOKENS as u64 - 1), 0, "every layer of each pass that extended the text");
    assert_eq!((&rungs[0]["raw"]["io_gain"], &rungs[0]["simulated"]["io_gain"]), (&1.0.into(), &1.0.into()));
    assert_eq!(ladder_json["simulated_from"], "fit to the trace");

    // Two runs are too few for a verdict, and nobody is told to buy or not to.
    assert!(rungs[0]["added"].is_null());
    let added = &rungs[1]["added"];
    assert_eq!(
        (&added["drives"], &added["pairs"], &added["outcome"]),
        (&serde_json::json!(["blue"]), &2.into(), &"too-few".into())
    );
    assert_eq!(ladder_json["advice"]["buy"], "too-few");
    assert_eq!((&ladder_json["version"], &ladder_json["skipped"]), (&2.into(), &serde_json::json!([])));

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
    has(&text, &["raw", "b_layout", "I/O gain", "simulated", "+ amber (EMULATED): too few to say", "Too few runs"]);
    has(&notes, &["2 rungs (coral; coral + amber)", "4 runs, 4 raw readings"]);
    has(&text, &["decode tok/s", "EMULATED drives", "not speeds of this machine", "tokens identical on every rung"]);
    has(&text, &["ladder.json", "ladder.svg", "report.html"]);
    let page = fs::read_to_string(only_entry(&out.join("ladder")).join("report.html")).unwrap();
    has(
        &page,
        &[
            "EMULATED",
            "<caption>Rungs",
            "<caption>I/O alone",
            "<caption>What each drive brought",
            "<figure><svg",
            "Machine",
        ],
    );
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
fn drives_alone_and_all_of_them_are_rungs_too_and_each_set_is_measured_once() {
    let drives = Drives::new(2, Some(easy_pace()));
    let out = drives.dir.path().join("results");
    let mut command = bare(&drives, "1", &out);
    let command = command.arg("--policy").arg(policy("full-mirror")).args(["--rungs", "ladder,solo,all,uplinks"]);
    let (code, text, notes) = outcome(command);
    assert_eq!(code, 0, "{text}{notes}");
    has(&notes, &["no two of these drives share an uplink", "3 rungs (amber; amber + blue; blue)"]);
    has(&text, &["blue alone", "blue alone: "]);
    let tables = text.split_once("EMULATED drives: ").unwrap().0;
    assert!(tables.lines().all(|l| l.chars().count() <= 80), "{text}");
    let folder = only_entry(&out.join("ladder"));
    let record = read(&folder.join("ladder.json"));
    let kinds: Vec<_> = record["rungs"].as_array().unwrap().iter().map(|r| (&r["kind"], &r["drives"])).collect();
    let json = |v: &str| Value::from(v);
    assert_eq!(kinds[0], (&json("ladder"), &serde_json::json!(["amber"])));
    assert_eq!(kinds[2], (&json("solo"), &serde_json::json!(["blue"])));
    assert_eq!((kinds.len(), record["rungs"][2]["added"].is_null()), (3, true));
    assert_eq!(record["rungs"][1]["share_of_top"], 1.0);

    // The same numbers are drawn again from the record.
    let again = drives.dir.path().join("again");
    let mut plot = argodrive(["results", "plot", "--out"]);
    let (code, text, notes) = outcome(plot.arg(&again).arg(&folder));
    assert_eq!(code, 0, "{notes}");
    has(&text, &["ladder.svg", "ladder.png", "report.html"]);
    let svg = |folder: &Path| fs::read_to_string(folder.join("ladder.svg")).unwrap();
    assert_eq!(svg(&again), svg(&folder));

    let mut none = bare(&drives, "1", &out);
    refused(
        none.arg("--policy").arg(policy("full-mirror")).args(["--rungs", "uplinks"]),
        &["--rungs", "share an uplink"],
    );
    let mut typo = bare(&drives, "1", &out);
    typo.arg("--policy").arg(policy("full-mirror")).args(["--rungs", "uplink"]).assert().code(2);
}

#[test]
fn a_rung_without_room_is_skipped_with_what_it_needs_and_no_rung_is_an_error() {
    let drives = Drives::new(2, Some(easy_pace()));
    let out = drives.dir.path().join("results");
    let plan = Plan::parse(&fs::read_to_string(drives.plan(tiny_store(), "round-robin")).unwrap()).unwrap();
    let has_bytes = bank_bytes(&plan) * 6 / 10;
    let small = drives.dir.path().join("small.toml");
    let limit =
        |bytes: u64| format!("policy = \"round-robin\"\n[[drive]]\nname = \"amber\"\ncapacity = \"{bytes}B\"\n");
    fs::write(&small, limit(has_bytes)).unwrap();
    let (code, text, notes) = outcome(bare(&drives, "1", &out).arg("--policy").arg(&small));
    assert_eq!(code, 0, "{text}{notes}");
    has(&text, &["amber: skipped: needs ", ", has "]);
    let record = read(&only_entry(&out.join("ladder")).join("ladder.json"));
    let skipped = &record["skipped"][0];
    assert_eq!((&skipped["drives"], &skipped["kind"]), (&serde_json::json!(["amber"]), &"ladder".into()));
    assert_eq!(
        (skipped["needs_bytes"].as_u64(), skipped["has_bytes"].as_u64()),
        (Some(bank_bytes(&plan)), Some(has_bytes))
    );
    assert_eq!(record["rungs"].as_array().unwrap().len(), 1);
    assert_eq!(record["rungs"][0]["gain"], 1.0, "counted from the first rung that there is");

    fs::write(&small, limit(10)).unwrap();
    refused(bare(&drives, "1", &out).arg("--policy").arg(&small), &["no rung can be measured", "amber, blue: "]);
    fs::write(&small, limit(10).replace("amber", "red")).unwrap();
    refused(bare(&drives, "1", &out).arg("--policy").arg(&small), &["`red`", "amber, blue"]);
}

#[test]
fn a_plan_that_is_kept_must_leave_every_expert_a_home() {
    let drives = Drives::new(2, Some(easy_pace()));
    let out = |name: &str| drives.dir.path().join(name);
    let climb = |plan: &Path, to: &str| {
        let (code, text, notes) = outcome(bare(&drives, "1", &out(to)).arg("--fixed-plan").arg(plan));
        assert_eq!(code, 0, "{text}{notes}");
        (text, read(&only_entry(&out(to).join("ladder")).join("ladder.json")))
    };
    let hash = |plan: &Path| Plan::parse(&fs::read_to_string(plan).unwrap()).unwrap().hash().unwrap();
    let dealt = drives.plan(tiny_store(), "round-robin");
    let (text, record) = climb(&dealt, "dealt");
    has(&text, &["amber: skipped: expert L", " has no home on amber", "one plan kept"]);
    assert_eq!(record["rungs"].as_array().unwrap().len(), 1);
    assert_eq!(
        (record["rungs"][0]["plan"].as_str(), record["fixed_plan"].as_str()),
        (Some(&*hash(&dealt)), Some(&*hash(&dealt)))
    );
    assert!(record["skipped"][0]["needs_bytes"].is_null());

    let mirror = drives.plan(tiny_store(), "full-mirror");
    let (_, record) = climb(&mirror, "mirror");
    let rungs = record["rungs"].as_array().unwrap();
    assert_eq!((rungs.len(), rungs[1]["plan"].as_str()), (2, Some(&*hash(&mirror))));
    assert_ne!(rungs[0]["plan"], rungs[1]["plan"]);
    assert_eq!(record["policy"], "full-mirror");

    // Bad input leaves nothing.
    let mut both = bare(&drives, "1", &out("none"));
    both.arg("--fixed-plan").arg(&mirror).arg("--policy").arg(policy("full-mirror")).assert().code(2);
    bare(&drives, "1", &out("none")).assert().code(2);
    let other = drives.dir.path().join("other.plan.json");
    let changed = prepared::unchecked(&fs::read_to_string(&mirror).unwrap()).replace("\"amber\"", "\"red\"");
    fs::write(&other, changed).unwrap();
    refused(
        bare(&drives, "1", &out("none")).arg("--fixed-plan").arg(&other),
        &["--fixed-plan", "`amber`", "red, blue"],
    );
    refused(bare(&drives, "1", &out("none")).arg("--fixed-plan").arg(&drives.toml), &["--fixed-plan", "drives.toml"]);
}

#[test]
fn ladders_of_version_1_are_laid_beside_and_drawn_again() {
    let sample = prepared::repo("results/samples/demo-ladder");
    let drives = Drives::new(1, Some(easy_pace()));
    let mut plot = argodrive(["results", "plot", "--out"]);
    let (code, _, notes) = outcome(plot.arg(drives.dir.path()).arg(&sample));
    assert_eq!(code, 0, "{notes}");
    let svg = fs::read_to_string(drives.dir.path().join("ladder.svg")).unwrap();
    has(&svg, &["whiskers: slowest and fastest run", "4 drives"]);
    assert!(!svg.contains("gain of the I/O alone"), "nothing was read alone then");
    let (code, text, notes) = outcome(
        ladder(&drives, "round-robin", &drives.dir.path().join("out")).arg("--against").arg(sample.join("ladder.json")),
    );
    assert_eq!(code, 0, "{notes}");
    has(&text, &["demo-ladder/ladder", "(EMULATED)", "1.78x", "2.88x"]);
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
