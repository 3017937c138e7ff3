//! `argodrive ab` with the real binary on emulated drives: what is measured in which order, what is kept, what is rejected
//! and refused, and that figures come again from the files alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::spec::Emulation;
use prepared::{Drives, argodrive, easy_pace, has, json_of, only_entry, outcome, refused, tiny_store};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Drives, two plans, and configurations on top of them.
struct Bench {
    drives: Drives,
    mirror: PathBuf,
    single: PathBuf,
}

impl Bench {
    /// On plain folders: what is asserted are counts, and no pace can be missed on a busy machine.
    fn new() -> Self {
        Self::on(None)
    }

    fn on(emulate: Option<Emulation>) -> Self {
        let drives = Drives::new(2, emulate);
        let mirror = drives.staged(tiny_store(), "full-mirror");
        let single = drives.staged(tiny_store(), "round-robin");
        Self { drives, mirror, single }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.drives.dir.path().join(name)
    }

    /// A run configuration; `more` comes last.
    fn config(&self, name: &str, plan: &Path, more: &str) -> PathBuf {
        let path = self.file(&format!("{name}.toml"));
        let text = format!(
            "store = {:?}\nplan = {plan:?}\ndrives = {:?}\nprompt = \"abc\"\nmax_new = 3\n{more}\n",
            tiny_store(),
            self.drives.toml
        );
        fs::write(&path, text).unwrap();
        path
    }

    fn ab(&self, a: &Path, b: &Path, pairs: &str) -> assert_cmd::Command {
        let mut command = argodrive(["ab"]);
        command.args([a, b]).args(["--pairs", pairs, "--out"]).arg(self.file("results"));
        command
    }

    fn folder(&self) -> PathBuf {
        only_entry(&self.file("results").join("ab"))
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

/// Names of the folders below `arms/` or `rejected/`, in order.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut out: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    out.sort();
    out
}

#[test]
fn the_same_configuration_twice_is_said_to_be_an_a_a_run_and_is_drawn_from_its_files() {
    let bench = Bench::on(Some(Emulation { latency_ns: 40_000_000, ..easy_pace() }));
    let a = bench.config("one", &bench.mirror, "");
    let b = bench.config("two", &bench.mirror, "");
    let (code, text, notes) = outcome(&mut bench.ab(&a, &b, "2"));
    assert_eq!(code, 0, "{text}{notes}");
    has(&text, &["identical configurations: this is an A/A run", "too few to say", "EMULATED drives", "report.html"]);
    // Paths may be longer; nothing else is.
    let long = text.lines().filter(|l| !l.contains('/')).find(|l| l.chars().count() > 80);
    assert_eq!(long, None, "wider than 80 columns");

    let folder = bench.folder();
    let expected = [
        "00-one-floor0a",
        "01-one-floor0b",
        "02-one-floor1b",
        "03-one-floor1a",
        "04-one-0",
        "05-two-0",
        "06-two-1",
        "07-one-1",
    ];
    assert_eq!(names(&folder.join("arms")), expected, "the floor first, then ABBA");
    let file = read(&folder.join("experiment.json"));
    assert_eq!((&file["version"], &file["state"]), (&1.into(), &"complete".into()));
    assert_eq!(file["differences"], serde_json::json!([]));
    let results = &file["results"];
    assert_eq!(results["comparisons"][0]["outcome"], "too-few", "two pairs say nothing");
    assert_eq!(results["comparisons"][0]["pairs"].as_array().unwrap().len(), 2);
    let first: Vec<&Value> =
        results["comparisons"][0]["pairs"].as_array().unwrap().iter().map(|p| &p["control_first"]).collect();
    assert_eq!(first, [true, false]);
    for name in &expected {
        let record = read(&folder.join("arms").join(name).join("record.json"));
        assert_eq!(record["token_hash"], results["tokens"]["prompt"], "{name}");
        assert_eq!(record["emulated"], true);
    }
    // Figure and page come again, byte for byte, without a run.
    let again = bench.file("again");
    let mut plot = argodrive(["results", "plot"]);
    let plotted = json_of(plot.arg(&folder).arg("--out").arg(&again).arg("--json"));
    assert_eq!(plotted["results"], *results);
    for drawn in ["paired.svg", "paired.png"] {
        assert!(fs::read(again.join(drawn)).unwrap() == fs::read(folder.join(drawn)).unwrap(), "{drawn}");
    }
    let page = fs::read_to_string(again.join("report.html")).unwrap();
    has(&page, &["EMULATED", "<figure><svg", "too few to say", "identical arms (A/A)", "Machine"]);
    assert!(!page.contains("http://") && !page.contains("https://"));

    // An arm whose tokens are not the control's says nothing, however fast it is.
    let path = folder.join("arms/05-two-0/record.json");
    let mut forged = read(&path);
    forged["token_hash"] = "00".into();
    fs::write(&path, forged.to_string()).unwrap();
    let mut plot = argodrive(["results", "plot"]);
    let plotted = json_of(plot.arg(&folder).arg("--out").arg(&again).arg("--json"));
    has(plotted["results"]["arms"][1]["rejected"].as_str().unwrap(), &["tokens differ", "00"]);
    // A newer program's results are refused, not guessed at.
    let mut file = file.clone();
    file["version"] = 2.into();
    fs::write(folder.join("experiment.json"), file.to_string()).unwrap();
    refused(argodrive(["results", "plot"]).arg(&folder), &["version 2", "experiment.json"]);
}

#[test]
fn what_differs_must_fire_or_its_arm_is_rejected_and_kept_aside() {
    let bench = Bench::new();
    let control = bench.config("plain", &bench.single, "[reader]\ndispatch = \"first-hit\"\nqueue_depth = 4");
    // One home each leaves a policy nothing to choose: it cannot fire.
    let idle = bench.config("idle", &bench.single, "[reader]\ndispatch = \"least-inflight\"\nqueue_depth = 4");
    let (code, text, notes) = outcome(&mut bench.ab(&control, &idle, "2"));
    assert_eq!(code, 1, "{text}{notes}");
    has(&text, &["reader.dispatch", "least-inflight", "REJECTED"]);
    let folder = bench.folder();
    let file = read(&folder.join("experiment.json"));
    assert_eq!(file["state"], "rejected");
    has(file["rejected"].to_string().as_str(), &["dispatch: unverified"]);
    let under_test = |arm: usize| file["arms"][arm]["under_test"].to_string();
    has(&under_test(1), &["dispatch", "split", "layout"]);
    assert!(!under_test(1).contains("queue_depth"), "it does not differ");
    assert!(!names(&folder.join("rejected")).is_empty(), "rejected runs are kept");
    // Against an arm that has copies it owes no proof of a choice between them; that one does.
    let mirror = bench.config("copies", &bench.mirror, "[reader]\ndispatch = \"split\"\nqueue_depth = 4");
    let mut command = bench.ab(&control, &mirror, "2");
    let object: Value = serde_json::from_str(&outcome(command.arg("--json")).1).unwrap();
    assert_eq!(object["arms"][0]["rejected"], Value::Null, "{object}");
    let file = read(&PathBuf::from(object["folder"].as_str().unwrap()).join("experiment.json"));
    assert!(!file["arms"][0]["under_test"].to_string().contains("dispatch"));
    has(file["arms"][1]["under_test"].to_string().as_str(), &["dispatch", "split"]);
    for name in names(&folder.join("arms")) {
        assert!(read(&folder.join("arms").join(&name).join("record.json"))["rejected"].as_array().unwrap().is_empty());
    }
}

#[test]
fn another_layout_is_a_difference_and_six_pairs_say_something() {
    let bench = Bench::new();
    let control = bench.config("single", &bench.single, "");
    let candidate = bench.config("mirror", &bench.mirror, "");
    let mut command = bench.ab(&control, &candidate, "6");
    let (code, text, notes) = outcome(command.args(["--stop", "--json"]));
    assert_eq!(code, 0, "{notes}");
    let object: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(object["identical"], false);
    assert_eq!(object["differences"][0]["setting"], "plan");
    has(object["differences"][0]["values"].to_string().as_str(), &["round-robin over 2 drives", "full-mirror over 2"]);
    let comparison = &object["comparisons"][0];
    // Which of them is the machine's business today; that it is one of these is ours.
    let outcome = comparison["outcome"].as_str().unwrap();
    assert!(["better", "worse", "within-noise", "not-storage-bound"].contains(&outcome), "{comparison}");
    assert_eq!(comparison["pairs"].as_array().unwrap().len(), 6);
    assert_eq!(comparison["looks"], serde_json::json!([1, 1]));
    assert!(object["floor"]["log_ratio"].as_f64().unwrap() > 0.0);
    assert_eq!(object["arms"][1]["runs"], 6);
    assert_eq!(object["arms"][0]["runs"], 18, "the floor's runs are the control's");
    assert_ne!(object["arms"][0]["plan"], object["arms"][1]["plan"]);
}

#[test]
fn what_cannot_be_compared_is_refused_before_anything_is_measured() {
    let bench = Bench::new();
    let a = bench.config("a", &bench.mirror, "");
    let text = |name: &str, text: &str| {
        let path = bench.file(name);
        fs::write(&path, text).unwrap();
        path
    };
    let b = bench.config("b", &bench.mirror, "[sampler]\ntemperature = 0.5");
    refused(&mut bench.ab(&a, &b, "2"), &["sampler.temperature", "would not generate the same text"]);
    let b = bench.config("b", &bench.mirror, "[reader]\nqueue_dpth = 2");
    refused(&mut bench.ab(&a, &b, "2"), &["b.toml", "did you mean `queue_depth`?"]);
    let b = bench.config("b", &bench.mirror, "reference = true");
    refused(&mut bench.ab(&a, &b, "2"), &["arm `b`", "resident = true"]);
    let same = bench.config("b", &bench.mirror, "");
    refused(&mut bench.ab(&a, &same, "3"), &["pairs is 3", "multiple of 2"]);
    let other = fs::read_to_string(&same).unwrap().replace("abc", "abd");
    refused(&mut bench.ab(&a, &text("c.toml", &other), "2"), &["different prompts"]);
    let prompt = text("p.txt", "abc  de");
    let heat = text("h.txt", "xyz abc\nde xyz");
    let mut overlapping = bench.ab(&a, &same, "2");
    refused(overlapping.arg("--prompts").arg(&prompt).arg("--heat-prompts").arg(&heat), &["`p` overlaps", "`h`"]);
    let missing = fs::read_to_string(&same).unwrap().replace("full-mirror.plan", "no.plan");
    refused(&mut bench.ab(&a, &text("d.toml", &missing), "2"), &["no.plan.json"]);
    let alone = fs::read_to_string(&same).unwrap().replace("prompt = \"abc\"\n", "");
    refused(&mut bench.ab(&text("e.toml", &alone), &same, "2"), &["arm `e` has no prompt"]);
    assert!(!bench.file("results").exists(), "nothing was begun");
}

#[test]
fn ctrl_c_and_a_full_disk_keep_what_is_finished_and_resuming_goes_on() {
    let bench = Bench::new();
    let a = bench.config("a", &bench.mirror, "");
    let b = bench.config("b", &bench.mirror, "[reader]\nverify_digests = true");
    let mut command = Command::new(env!("CARGO_BIN_EXE_argodrive"));
    command.arg("ab").args([&a, &b]).args(["--pairs", "40", "--out"]).arg(bench.file("results"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    let arms = loop {
        let folders = fs::read_dir(bench.file("results").join("ab")).into_iter().flatten().flatten();
        let arms: Vec<PathBuf> = folders.map(|e| e.path().join("arms")).collect();
        if let Some(arms) = arms.first().filter(|a| a.join("01-a-floor0b/record.json").exists()) {
            break arms.clone();
        }
        assert!(start.elapsed() < Duration::from_secs(120), "no run ended");
        std::thread::sleep(Duration::from_millis(2));
    };
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let status = child.wait().unwrap();
    let mut notes = String::new();
    std::io::Read::read_to_string(child.stderr.as_mut().unwrap(), &mut notes).unwrap();
    assert_eq!(status.code(), Some(2), "{notes}");
    has(&notes, &["interrupted", "finished runs are in", "experiment resume"]);
    let folder = arms.parent().unwrap();
    assert_eq!(read(&folder.join("experiment.json"))["state"], "interrupted");
    let kept = names(&arms);
    assert!(kept.len() >= 2 && kept.len() < 159, "{kept:?}");

    // A record that cannot be written ends the campaign, and says what is kept.
    let last = ["159-a-39", "159-b-39"].map(|name| arms.join(name)); // whichever the order ends with
    last.iter().for_each(|blocked| fs::write(blocked, "in the way").unwrap());
    let (code, _, notes) = outcome(argodrive(["experiment", "resume"]).arg(folder));
    assert_eq!(code, 2, "{notes}");
    has(&notes, &["/159-", "159 finished runs are in", "experiment resume"]);
    last.iter().for_each(|blocked| fs::remove_file(blocked).unwrap());
    let object = json_of(argodrive(["experiment", "resume", "--json"]).arg(folder));
    assert_eq!(object["state"], "complete");
    let counts = ["runs_measured", "runs_reused", "runs_stale"].map(|k| object[k].as_u64().unwrap());
    assert_eq!(counts, [1, 159, 0]);
}
