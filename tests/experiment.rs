//! `argodrive experiment` with the real binary: a file that sets up its own store and drives, a kill in the middle, changed
//! inputs, repeats, and everything that can be wrong with a file found before anything is made.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::bench::experiment::Experiment;
use argodrive::knob::Knob;
use prepared::{argodrive, has, json_of, only_entry, outcome, refused, repo, snapshot};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// An experiment on the tiny checkpoint with two plain folders as drives: what is asserted are counts, and no pace can be
/// missed on a busy machine.
fn text() -> String {
    emulated().replace(", emulate = { rate = \"50MB/s\", latency = \"16ms\" }", "")
}

/// The same on emulated drives.
fn emulated() -> String {
    let (checkpoint, policies) = (repo("tests/fixtures/oracle/tiny"), repo("layouts"));
    format!(
        r#"
[experiment]
name = "tiny"
hypothesis = "digests cost nothing"
pairs = 2
prompts = ["eval"]
heat_prompts = ["heat"]

[setup]
folder = "work"
checkpoint = {checkpoint:?}
drive = [
    {{ name = "amber", emulate = {{ rate = "50MB/s", latency = "16ms" }} }},
    {{ name = "blue", emulate = {{ rate = "50MB/s", latency = "16ms" }} }},
]
plan = [{{ name = "mirror", policy = {:?} }}]

[base]
max_new = 3
plan = "mirror"
reader = {{ dispatch = "round-robin" }}

[[arm]]
name = "plain"

[[arm]]
name = "checked"
[arm.reader]
verify_digests = true

[assert]
fired = {{ all = ["dispatch", "replicas"] }}
"#,
        policies.join("full-mirror.toml")
    )
}

struct Place {
    dir: TempDir,
}

impl Place {
    fn new(text: &str) -> Self {
        let dir = prepared::folder();
        for (name, content) in [("eval/a.txt", "abc"), ("heat/h.txt", "xyz")] {
            fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
            fs::write(dir.path().join(name), content).unwrap();
        }
        let place = Self { dir };
        place.write(text);
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, text: &str) {
        fs::write(self.at("x.toml"), text).unwrap();
    }

    fn run(&self) -> assert_cmd::Command {
        let mut command = argodrive(["experiment", "run"]);
        command.arg(self.at("x.toml")).arg("--out").arg(self.at("results"));
        command
    }

    fn folder(&self) -> PathBuf {
        only_entry(&self.at("results").join("tiny"))
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = read(path);
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

#[test]
fn a_killed_experiment_goes_on_without_measuring_finished_runs_again() {
    // many short runs, so that there are some left to be killed
    let text = || text().replace("pairs = 2", "pairs = 20");
    let place = Place::new(&text());
    let mut command = Command::new(env!("CARGO_BIN_EXE_argodrive"));
    command.args(["experiment", "run"]).arg(place.at("x.toml")).arg("--out").arg(place.at("results"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let arms = loop {
        let folders = fs::read_dir(place.at("results/tiny")).into_iter().flatten().flatten();
        let arms = folders.map(|e| e.path().join("arms")).next();
        if let Some(arms) = arms.filter(|a| a.join("02-plain-floor1b/record.json").exists()) {
            break arms;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "no run ended");
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(2));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let folder = arms.parent().unwrap().to_path_buf();
    assert_eq!(read(&folder.join("experiment.json"))["state"], "running", "nobody could say that it ended");
    let finished = snapshot(&arms);
    let finished: Vec<_> = finished.into_iter().filter(|(p, _)| p.ends_with("record.json")).collect();
    assert!((3..80).contains(&finished.len()), "{} runs", finished.len());

    let object = json_of(place.run().arg("--json"));
    assert_eq!(place.folder(), folder, "the same folder, not a second one");
    assert_eq!(object["runs_reused"].as_u64().unwrap() as usize, finished.len());
    assert_eq!(object["runs_measured"].as_u64().unwrap() as usize, 80 - finished.len());
    assert_eq!(object["state"], "complete");
    let now = snapshot(&arms);
    for (path, bytes) in &finished {
        assert!(now[path] == *bytes, "{} was measured again", path.display());
    }
    let file = read(&folder.join("experiment.json"));
    assert_eq!(file["hypothesis"], "digests cost nothing");
    has(file["arms"][1]["under_test"].to_string().as_str(), &["verify_digests", "dispatch", "replicas", "layout"]);

    // A crash after which one arm's file was changed: that arm is measured again, the other is not.
    edit(&folder.join("experiment.json"), |f| f["state"] = "running".into());
    place.write(&text().replace("verify_digests = true", "verify_digests = false"));
    let object = json_of(place.run().arg("--json"));
    let counts = ["runs_measured", "runs_reused", "runs_stale"].map(|k| object[k].as_u64().unwrap());
    assert_eq!(counts, [20, 60, 20], "the runs of the changed arm");
    assert_eq!(fs::read_dir(folder.join("stale")).unwrap().count(), 20, "the old ones are kept");
    for run in ["41-checked-0", "42-checked-1"] {
        assert_eq!(read(&arms.join(run).join("record.json"))["config"]["reader"]["verify_digests"], false);
    }
    // So is a changed prompt: with the only one, everything.
    edit(&folder.join("experiment.json"), |f| f["state"] = "interrupted".into());
    fs::write(place.at("eval/a.txt"), "abcd").unwrap();
    let object = json_of(place.run().arg("--json"));
    assert_eq!((object["runs_measured"].as_u64(), object["runs_stale"].as_u64()), (Some(80), Some(80)));

    // One run again by its record, and the tokens are the same.
    let mut rerun = argodrive(["experiment", "rerun", "--json"]);
    let record = arms.join("40-plain-0/record.json");
    let (code, stdout, notes) = outcome(rerun.arg(&record).arg("--out").arg(place.at("results")));
    let object: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{notes}"));
    assert_eq!((&object["same_tokens"], &object["same_plan"]), (&true.into(), &true.into()), "{notes}");
    assert!(code == 0 || object["rejected"].to_string().contains("pace"), "{object}");

    // A finished experiment is not unfinished: running it again is a new measurement; a newer program's results stop it.
    edit(&folder.join("experiment.json"), |f| f["version"] = 7.into());
    refused(&mut place.run(), &["version 7", "use the one that wrote it"]);
}

#[test]
fn an_expectation_that_is_missed_is_exit_code_1_and_a_folder_can_be_repeated() {
    let more = "verdict = { checked = \"better\" }\nratio_at_least = { checked = 50.0 }\n";
    let place = Place::new(&format!("{}{more}", text()));
    let (code, stdout, notes) = outcome(&mut place.run());
    assert_eq!(code, 1, "{stdout}{notes}");
    has(&stdout, &["MISSED: checked: expected better, it is too few to say", "MISSED: checked: expected at least 50"]);
    let folder = place.folder();
    has(&fs::read_to_string(folder.join("report.html")).unwrap(), &["MISSED", "digests cost nothing"]);
    let mut rerun = argodrive(["experiment", "rerun"]);
    let (code, stdout, notes) = outcome(rerun.arg(&folder).arg("--out").arg(place.at("again")));
    assert_eq!(code, 1, "{notes}");
    has(&stdout, &["then    checked: too few to say", "now     too few to say"]);
    assert_eq!(fs::read_dir(only_entry(&place.at("again/tiny")).join("arms")).unwrap().count(), 8);
}

#[test]
fn whatever_is_wrong_with_a_file_is_found_before_anything_is_made() {
    let place = Place::new(&emulated());
    let good = emulated();
    let wrong = |from: &str, to: &str, words: &[&str]| {
        assert!(good.contains(from), "{from}");
        place.write(&good.replace(from, to));
        refused(&mut place.run(), &[&["x.toml"], words].concat());
    };
    wrong("hypothesis = ", "hypotesis = ", &["did you mean `hypothesis`?"]);
    wrong("verify_digests = true", "verify_digest = true", &["arm `checked`", "did you mean `verify_digests`?"]);
    wrong("max_new = 3", "max_nwe = 3", &["did you mean `max_new`?"]);
    wrong("max_new = 3", "max_new = 1", &["max_new must be at least 2"]);
    wrong("plan = \"mirror\"\n", "plan = \"miror\"\n", &["`miror`", "did you mean `mirror`?"]);
    wrong("prompts = [\"eval\"]\nheat_prompts", "heat_prompts", &["has no prompt"]);
    wrong("prompts = [\"eval\"]", "prompts = [\"nowhere.txt\"]", &["nowhere.txt"]);
    wrong("heat_prompts = [\"heat\"]", "heat_prompts = [\"eval\"]", &["`a` overlaps", "disjoint sets"]);
    wrong("\"replicas\"]", "\"replica\"]", &["no setting", "did you mean `replicas`?"]);
    wrong("\"replicas\"]", "\"cache_bytes\"]", &["`cache_bytes` fire", "no such arm sets it"]);
    wrong("{ all = [", "{ check = [", &["no arm `check`", "did you mean `checked`?"]);
    wrong("name = \"checked\"", "name = \"plain\"", &["two arms are called `plain`"]);
    wrong("name = \"blue\"", "name = \"amber\"", &["amber"]);
    wrong("rate = \"50MB/s\"", "rate = \"50 parsecs\"", &["emulate.rate"]);
    wrong("full-mirror.toml", "no-such.toml", &["no-such.toml"]);
    wrong("fixtures/oracle/tiny", "fixtures/oracle", &["checkpoint", "no folder with a config.json"]);
    wrong("pairs = 2", "pairs = 5", &["pairs is 5", "multiple of 2"]);
    wrong("[assert]", "[assert]\nverdict = { checked = \"beter\" }", &["did you mean `better`?"]);
    wrong("[assert]", "[assert]\nverdict = { plain = \"better\" }", &["`plain` is the control"]);
    wrong("[assert]", "[rungs]\npolicy = \"p.toml\"\n[assert]", &["[rungs] and [[arm]]"]);
    for made in ["results", "work"] {
        assert!(!place.at(made).exists(), "{made} was made");
    }
    place.write(&good);
    let object = json_of(place.run().args(["--dry-run", "--json"]));
    assert_eq!((&object["runs"], &object["arms"]), (&8.into(), &serde_json::json!(["plain", "checked"])));
    assert!(!place.at("work").exists());
    // rows of latent caches go to a drive of the setup, by its name, or to a folder beside the file
    for (dir, path) in [("blue", "work/blue"), ("rows", "rows")] {
        let kv = format!("[arm.kv]\nkv_ram_bytes = 20000\nkv_dir = {dir:?}\n[assert]");
        place.write(&good.replace("[assert]", &kv));
        let arms = Experiment::load(&place.at("x.toml")).unwrap().design.arms;
        assert_eq!(arms[1].asked.config.kv.kv_dir, Some(place.at(path)));
        assert!(arms[0].asked.config.kv.kv_dir.is_none() && arms[1].asked.given.contains(&Knob::KvRam));
    }
}

#[test]
fn rungs_are_arms_on_more_and_more_drives() {
    let start = text();
    let start = &start[..start.find("[[arm]]").unwrap()];
    let rungs = format!("[rungs]\npolicy = {:?}\n", repo("layouts/full-mirror.toml"));
    let text = start.replace("plan = \"mirror\"\n", "") + &rungs + "[assert]\nfired = { rung2 = [\"replicas\"] }\n";
    let place = Place::new(&text);
    let object = json_of(place.run().arg("--json"));
    let names: Vec<&Value> = object["arms"].as_array().unwrap().iter().map(|a| &a["name"]).collect();
    assert_eq!(names, ["rung1", "rung2"]);
    let record = read(&place.folder().join("arms/05-rung2-0/record.json"));
    assert_eq!(record["drives"].as_array().unwrap().len(), 2);
}

#[test]
fn an_arm_that_must_be_refused_is_no_failure_and_one_that_is_not_is() {
    // One home each leaves nothing to choose or to cut, whatever the arm asks for; the policies stand in the file itself.
    let arms = r#"
[[arm]]
name = "turns"

[[arm]]
name = "one-home"
plan = "dealt"

[assert]
refused = { one-home = ["dispatch"] }
"#;
    let text = text();
    let start = text[..text.find("[[arm]]").unwrap()].to_string();
    let at = start.find("plan = [").unwrap();
    let plans = "plan = [{ name = \"mirror\", policy = { policy = \"full-mirror\" } }, \
                 { name = \"dealt\", policy = { policy = \"round-robin\" } }]\n";
    let start = format!("{}{plans}{}", &start[..at], &start[at + start[at..].find('\n').unwrap() + 1..]);
    let place = Place::new(&format!("{start}{arms}"));
    let object = json_of(place.run().arg("--json"));
    assert_eq!((&object["state"], &object["missed"]), (&"complete".into(), &serde_json::json!([])));
    has(object["rejected"]["one-home"].as_str().unwrap(), &["dispatch: unverified", "one home"]);
    assert_eq!(read(&place.folder().join("experiment.json"))["expect"]["refused"]["one-home"][0], "dispatch");

    // Expected of an arm whose setting does fire.
    let other = arms.replace("plan = \"dealt\"", "reader = { verify_digests = true }");
    let place = Place::new(&format!("{start}{}", other.replace("[\"dispatch\"]", "[\"verify_digests\"]")));
    let (code, stdout, notes) = outcome(&mut place.run());
    assert_eq!(code, 1, "{stdout}{notes}");
    has(&stdout, &["MISSED: one-home: expected to be refused", "`verify_digests`"]);
    // What an arm does not ask for cannot be refused, nor can an arm that is not there; policies are checked at once.
    for (from, to, words) in [
        ("[\"dispatch\"]", "[\"cache_bytes\"]", "no such arm sets it"),
        ("{ one-home", "{ onehome", "did you mean `one-home`?"),
        ("name = \"turns\"", "name = \"turns\"\nmax_nwe = 3", "did you mean `max_new`?"),
    ] {
        place.write(&format!("{start}{}", arms.replace(from, to)));
        refused(&mut place.run(), &[words]);
    }
    place.write(&format!("{}{arms}", start.replace("\"round-robin\" }", "\"round-robbin\" }")));
    refused(&mut place.run(), &["[setup] plan `dealt`", "round-robbin"]);
}

#[test]
fn the_experiments_that_ship_are_sound() {
    let folder = repo("experiments");
    let files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    let files: Vec<&PathBuf> = files.iter().filter(|p| p.extension().is_some_and(|e| e == "toml")).collect();
    assert!(files.len() >= 14, "{files:?}");
    for file in files {
        json_of(argodrive(["experiment", "run", "--dry-run", "--json"]).arg(file));
    }
}
