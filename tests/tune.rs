//! `argodrive tune` with the real binary on small emulated drives: what is ranked in which order, that a kill costs nothing
//! that was finished, that a profile changes only with its evidence, and everything that is refused before a measurement.
//! Asserts identities, counts and simulated time, never a speed of this machine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::profile::{
    BarrierShape, DriveModel, Joint, Method, PROFILE_VERSION, Point, Profile, Proof, Quantile,
};
use argodrive::drive::spec::{self, DriveSpec, Emulation};
use prepared::{argodrive, easy_pace, has, json_of, only_entry, outcome, policy, refused, repo, snapshot, tiny_store};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Two unequal drives, prompts, and what `ceiling` would have measured of them.
struct Place {
    dir: TempDir,
    specs: Vec<DriveSpec>,
}

const RATES: [u64; 2] = [20_000_000, 1_000_000];

impl Place {
    fn new() -> Self {
        let dir = prepared::folder();
        let drive = |(name, rate): (&str, u64)| DriveSpec {
            name: name.into(),
            path: dir.path().join(name),
            emulate: Some(Emulation { rate_bytes_per_s: rate, ..easy_pace() }),
            faults: Vec::new(),
        };
        let specs: Vec<DriveSpec> = ["amber", "blue"].into_iter().zip(RATES).map(drive).collect();
        for spec in &specs {
            fs::create_dir(&spec.path).unwrap();
        }
        for (name, text) in [("eval.txt", "abc"), ("heat.txt", "xyz")] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let place = Self { dir, specs };
        fs::write(place.at("drives.toml"), spec::render(&place.specs)).unwrap();
        place.ceiling().save(&place.at("ceiling.json")).unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A profile of the drives as they are, so that nothing has to be measured of them.
    fn ceiling(&self) -> Profile {
        let barrier = BarrierShape { width: 4, steps: 9, p50_ns: 5, p99_ns: 6, bytes_per_s: 1.0 };
        let drive = |spec: &DriveSpec| {
            let pace = spec.emulate.unwrap();
            let rate = pace.rate_bytes_per_s as f64;
            DriveModel {
                name: spec.name.clone(),
                path: spec.path.clone(),
                device: String::new(),
                serials: vec![],
                emulated: true,
                alignment_bytes: 512,
                rate_bytes_per_s: rate,
                solo_rate_bytes_per_s: rate,
                fixed_ns: 0,
                latency_ns: pace.latency_ns,
                p99_ns: pace.latency_ns * 2,
                service: [0.0, 1.0].map(|q| Quantile { q, ns: pace.latency_ns }).to_vec(),
                depth: 4,
                points: [1, 4]
                    .map(|depth| Point { bytes: 65536, depth, reads: 9, bytes_per_s: rate, p50_ns: 1, p99_ns: 2 })
                    .to_vec(),
                barrier,
                sustained: None,
            }
        };
        let names = self.specs.iter().map(|s| s.name.clone()).collect();
        let rates: Vec<f64> = RATES.iter().map(|r| *r as f64).collect();
        let joint = Joint {
            name: "all drives".into(),
            members: names,
            bytes_per_s: rates.iter().sum(),
            member_bytes_per_s: rates,
            barrier,
        };
        Profile {
            version: PROFILE_VERSION,
            method: Method {
                made: "2026-01-01T00:00:00Z".into(),
                argodrive: "test".into(),
                kernel: "test".into(),
                virtualised: None,
                engine: "psync".into(),
                direct: true,
                block_bytes: 65536,
                width: 4,
                file_age_s: None,
            },
            emulated: true,
            drives: self.specs.iter().map(drive).collect(),
            groups: vec![],
            together: joint,
            guards: vec![Proof { name: "test".into(), seen: "x".into(), verdict: "held".into() }],
        }
    }

    fn arguments(&self) -> Vec<std::ffi::OsString> {
        let mut out: Vec<std::ffi::OsString> = vec!["tune".into(), "--store".into(), tiny_store().into()];
        for (flag, file) in [
            ("--drives", "drives.toml"),
            ("--prompt-file", "eval.txt"),
            ("--heat-prompt-file", "heat.txt"),
            ("--profile", "profile.toml"),
            ("--ceiling", "ceiling.json"),
            ("--out", "results"),
        ] {
            out.extend([flag.into(), self.at(file).into()]);
        }
        out.extend(["--max-new=8", "--repeats=2", "--margin=0", "--json"].map(Into::into));
        out
    }

    /// The same with one argument in place of another.
    fn with(&self, from: &str, to: &str) -> assert_cmd::Command {
        let mut arguments = self.arguments();
        *arguments.iter_mut().find(|a| *a == from).unwrap() = to.into();
        let mut command = argodrive([]);
        command.args(arguments);
        command
    }

    fn tune(&self, more: &[&str]) -> assert_cmd::Command {
        let mut command = argodrive([]);
        command.args(self.arguments()).args(more);
        command
    }

    fn folder(&self) -> PathBuf {
        only_entry(&self.at("results/tune"))
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

fn candidates(object: &Value) -> &Vec<Value> {
    object["ranking"]["candidates"].as_array().unwrap_or_else(|| panic!("no ranking in {object}"))
}

fn named<'a>(object: &'a Value, name: &str) -> &'a Value {
    candidates(object).iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("no {name} in {object}"))
}

#[test]
fn a_dry_run_ranks_by_simulated_time_and_gives_the_same_again() {
    let place = Place::new();
    let (code, stdout, notes) = outcome(&mut place.tune(&["--dry-run"]));
    let object: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{notes}"));
    if object["ranking"].is_null() {
        // the machine was too busy for the pace, and the run was rejected for it
        assert!(code == 1 && object["result"]["rejected"] == true, "{object}");
        return;
    }
    assert_eq!(code, 0, "{notes}");
    assert_eq!((&object["emulated"], &object["current"]["from_defaults"]), (&true.into(), &true.into()));
    let gain = |c: &Value| c["gain"][0].as_f64().unwrap();
    let current = named(&object, "current");
    assert_eq!((gain(current), current["changes"].as_array().unwrap().len()), (1.0, 0));
    assert!(gain(named(&object, "full-mirror")) > 1.03, "copies on a drive twenty times as fast: {object}");
    assert!(candidates(&object).iter().all(|c| c["tok_s"].is_array()));
    // in steps of 1 %
    let steps: Vec<i64> = candidates(&object).iter().map(|c| (gain(c).ln() / 0.01).floor() as i64).collect();
    assert!(steps.is_sorted_by(|a, b| a >= b), "{steps:?}");
    has(object["ranking"]["skipped"].to_string().as_str(), &["stripes cannot be simulated"]);
    let finalists = object["ranking"]["finalists"].as_array().unwrap();
    assert!((1..=2).contains(&finalists.len()), "{finalists:?}");
    assert!(!place.at("profile.toml").exists() && object["campaign"].is_null(), "a dry run promotes nothing");
    assert_eq!(object["state"], "interrupted", "there is more to do");

    // Without the ranking it is made again, from the same trace: the same to the last digit.
    let path = place.folder().join("tune.json");
    let mut file = read(&path);
    file["ranking"] = Value::Null;
    fs::write(&path, file.to_string()).unwrap();
    let traced = fs::read(place.folder().join("trace.record.json")).unwrap();
    let again = json_of(&mut place.tune(&["--dry-run"]));
    assert_eq!(again["ranking"], object["ranking"]);
    assert!(fs::read(place.folder().join("trace.record.json")).unwrap() == traced, "the trace was made again");
    // What may not be changed stays.
    let only = json_of(&mut place.tune(&["--dry-run", "--only", "layout"]));
    assert!(candidates(&only).iter().all(|c| c["changes"].as_array().unwrap().len() <= 1), "{only}");
    assert!(candidates(&only).len() < candidates(&object).len());
    // No time for six pairs is no verdict, and said before anything is copied.
    let held = || snapshot(&place.specs[0].path).len();
    let before = held();
    let object = json_of(&mut place.tune(&["--minutes", "0.02"]));
    assert_eq!((&object["result"]["promoted"], &object["result"]["unfinished"]), (&Value::Null, &true.into()));
    has(object["result"]["says"].as_str().unwrap(), &["too few", "kept"]);
    assert!(held() == before && !place.at("profile.toml").exists());
}

#[test]
fn a_killed_tune_goes_on_and_a_profile_changes_only_with_its_evidence() {
    let place = Place::new();
    let more = ["--pairs", "6", "--finalists", "1", "--only", "layout,dispatch"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_argodrive"));
    command.args(place.arguments()).args(more).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    let arms = place.at("results/tune");
    let arms = || Some(only_file(&arms)?.join("campaign-1/arms"));
    let ended = loop {
        let runs = arms().and_then(|a| fs::read_dir(a).ok()).map_or(0, Iterator::count);
        if runs >= 3 {
            break false;
        }
        if child.try_wait().unwrap().is_some() {
            break true;
        }
        assert!(start.elapsed() < Duration::from_secs(300), "no run ended");
        std::thread::sleep(Duration::from_millis(5));
    };
    if ended {
        // only a machine that is too busy for the pace ends it before
        assert_eq!(read(&place.folder().join("tune.json"))["result"]["rejected"], true);
        return;
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let folder = place.folder();
    assert_eq!(read(&folder.join("tune.json"))["state"], "running", "nobody could say that it ended");
    let records = |folder: &Path| {
        let mut all = snapshot(folder);
        all.retain(|p, _| p.ends_with("record.json"));
        all
    };
    let finished = records(&folder.join("campaign-1/arms"));
    let trace = fs::read(folder.join("trace.record.json")).unwrap();

    let (code, stdout, notes) = outcome(&mut place.tune(&more));
    let object: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{notes}"));
    has(&notes, &["going on with", "trace: there already", "heat: there already", "ranking: there already"]);
    assert_eq!(place.folder(), folder, "the same folder");
    assert!(fs::read(folder.join("trace.record.json")).unwrap() == trace);
    let now = records(&folder.join("campaign-1/arms"));
    for (path, bytes) in &finished {
        assert!(now[path] == *bytes, "{} was measured again", path.display());
    }
    let result = &object["result"];
    assert_eq!(code == 1, result["rejected"] == true, "{object}");
    let profile = fs::read_to_string(place.at("profile.toml")).unwrap();
    let former = place.at("profile.toml.1");
    match result["promoted"].as_str() {
        None => {
            has(result["says"].as_str().unwrap(), &["no candidate is better", "kept"]);
            assert!(profile.contains("Not tuned") && !former.exists(), "{profile}");
        }
        Some(arm) => {
            assert_eq!(object["results"]["comparisons"][0]["outcome"], "better");
            has(&profile, &["[tuned]", "emulated = true", "EMULATED", arm, "replicas"]);
            assert!(fs::read_to_string(&former).unwrap().contains("Not tuned"));
            let mut back = argodrive(["tune", "--rollback", "--json", "--profile"]);
            let done = json_of(back.arg(place.at("profile.toml")));
            assert!(done["undone"].as_str().unwrap().ends_with("profile.toml.undone"));
            assert!(fs::read_to_string(place.at("profile.toml")).unwrap().contains("Not tuned"));
        }
    }
    // Either way it can be used, and it says which plan it is.
    let mut decode = argodrive(["decode", "--prompt", "abc", "--max-new", "2", "--json", "--profile"]);
    let ran = json_of(decode.arg(place.at("profile.toml")));
    assert_eq!(ran["plan_hash"], object["current"]["plan_hash"]);
    assert_eq!(ran["emulated"], true);
}

/// The one entry of a folder, once there is one.
fn only_file(folder: &Path) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.next()?.ok().map(|e| e.path())
}

#[test]
fn whatever_is_wrong_is_found_before_anything_is_measured() {
    let place = Place::new();
    let profile = |text: &str| fs::write(place.at("profile.toml"), text).unwrap();
    let no_profile = || drop(fs::remove_file(place.at("profile.toml")));
    let wrong = |more: &[&str], words: &[&str]| drop(refused(&mut place.tune(more), words));
    let path = |name: &str| place.at(name).to_string_lossy().into_owned();

    wrong(&["--minutes", "0"], &["--minutes"]);
    wrong(&["--finalists", "0"], &["--finalists is 0"]);
    wrong(&["--pairs", "4"], &["--pairs 4", "fewer than 6"]);
    wrong(&["--pairs", "7"], &["pairs is 7", "multiple of 2"]);
    wrong(&["--only", "cache,cache"], &["cache twice"]);
    refused(&mut place.with("--max-new=8", "--max-new=3"), &["max_new is 3", "--max-new 8"]);
    wrong(&["--heat", &path("heat.txt")], &["--heat and --heat-prompt-file"]);
    wrong(&["--policy", &path("nowhere.toml")], &["--policy", "nowhere.toml"]);
    fs::write(place.at("p.toml"), "policy = \"round-robin\"\n[[drive]]\nname = \"ambre\"\nrate = \"1MB/s\"\n").unwrap();
    wrong(&["--policy", &path("p.toml")], &["p.toml", "ambre"]);
    wrong(&["--only", "cache", "--policy", &path("p.toml")], &["--policy gives layouts"]);

    fs::write(place.at("heat.txt"), " abc\n").unwrap();
    wrong(&[], &["`eval` overlaps", "disjoint sets"]);
    fs::write(place.at("heat.txt"), "xyz").unwrap();
    fs::write(place.at("eval.txt"), " ").unwrap();
    wrong(&[], &["eval.txt", "is empty"]);
    fs::write(place.at("eval.txt"), "abc").unwrap();

    let mut other = place.ceiling();
    other.drives[0].emulated = false;
    other.save(&place.at("ceiling.json")).unwrap();
    wrong(&[], &["--ceiling", "was real when it was measured"]);
    place.ceiling().save(&place.at("ceiling.json")).unwrap();

    profile("[reader]\ndispach = \"split\"\n");
    wrong(&[], &["profile.toml", "did you mean `dispatch`?"]);
    profile("max_new = 8\n");
    wrong(&[], &["it has no `plan`"]);
    profile("resident = true\n");
    wrong(&[], &["`resident` belongs to a run"]);
    profile("plan = \"p.json\"\n[reader]\nprefetch = \"next-router\"\n");
    wrong(&[], &["`next-router` cannot be simulated"]);
    let plan = place.at("plan.json");
    let mut made = argodrive(["plan", "--store"]);
    made.arg(tiny_store()).arg("--drives").arg(place.at("drives.toml")).arg("--policy").arg(policy("round-robin"));
    made.arg("--out").arg(&plan).assert().success();
    profile(&format!("plan = {plan:?}\ndrives = {:?}\n", place.at("drives.toml")));
    wrong(&[], &["are not on the drives", "argodrive stage"]);
    profile(&format!("plan = {plan:?}\n"));
    wrong(&[], &["drive `amber`", "--drives says otherwise"]);
    no_profile();

    let mut dense = argodrive(["tune", "--drives"]);
    dense.arg(place.at("drives.toml")).arg("--prompt-file").arg(place.at("eval.txt"));
    dense.arg("--store").arg(prepared::dense_store()).arg("--profile").arg(place.at("profile.toml"));
    refused(dense.arg("--out").arg(place.at("results")), &["this model is dense"]);
    fs::remove_dir(&place.specs[1].path).unwrap();
    wrong(&[], &["drive `blue`", "is no folder"]);
    assert!(!place.at("results").exists(), "nothing was begun");
    let mut back = argodrive(["tune", "--rollback", "--profile"]);
    refused(back.arg(place.at("profile.toml")), &["nothing to roll back to"]);
}

#[test]
fn a_profile_is_where_decode_begins_and_configuration_and_flags_go_before_it() {
    let drives = prepared::Drives::new(2, None);
    let mirror = drives.staged(tiny_store(), "full-mirror");
    let at = |name: &str| drives.dir.path().join(name);
    let text = format!("store = {:?}\nplan = {mirror:?}\n[reader]\ndispatch = \"first-hit\"\n", tiny_store());
    fs::write(at("profile.toml"), text).unwrap();
    fs::write(at("run.toml"), "[reader]\ndispatch = \"round-robin\"\n").unwrap();
    let dispatch = |more: &[&str]| {
        let mut command = argodrive(["decode", "--prompt", "abc", "--max-new", "2", "--json", "--profile"]);
        let object = json_of(command.arg(at("profile.toml")).args(more));
        let settings = object["settings"].as_array().unwrap();
        settings.iter().find(|s| s["name"] == "dispatch").unwrap()["asked"].as_str().unwrap().to_string()
    };
    let run = at("run.toml").to_string_lossy().into_owned();
    assert_eq!(dispatch(&[]), "first-hit");
    assert_eq!(dispatch(&["--config", &run]), "round-robin");
    assert_eq!(dispatch(&["--config", &run, "--dispatch", "split"]), "split");
    let mut chat = argodrive(["chat", "--message", "hello", "--max-new", "1", "--profile"]);
    fs::write(at("wrong.toml"), "trace = \"t\"\n").unwrap();
    refused(chat.arg(at("wrong.toml")), &["wrong.toml", "`trace` belongs to a run"]);
    assert!(repo("docs/tuning.md").exists());
}
