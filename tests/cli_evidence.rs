//! Evidence from outside: a run whose setting never fired is rejected, kept, and says why; a record runs again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use assert_cmd::Command;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

fn argodrive() -> Command {
    Command::new(env!("CARGO_BIN_EXE_argodrive"))
}

fn ok(args: &[&str]) {
    argodrive().args(args).assert().success();
}

/// A store, two drive folders, a mirrored and a single-home plan.
fn bench() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cli_evidence");
        let _ = std::fs::remove_dir_all(&root);
        let repo = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = |p: &str| root.join(p).display().to_string();
        for drive in ["a", "b"] {
            std::fs::create_dir_all(root.join(drive)).unwrap();
        }
        std::fs::write(
            root.join("drives.toml"),
            "[[drive]]\nname = \"a\"\npath = \"a\"\n[[drive]]\nname = \"b\"\npath = \"b\"\n",
        )
        .unwrap();
        ok(&["import", &repo.join("tests/fixtures/oracle/tiny").display().to_string(), "--store", &path("store")]);
        for policy in ["full-mirror", "round-robin"] {
            let file = repo.join(format!("layouts/{policy}.toml")).display().to_string();
            let plan = path(&format!("{policy}.json"));
            let (store, drives) = (path("store"), path("drives.toml"));
            ok(&["plan", "--store", &store, "--drives", &drives, "--policy", &file, "--out", &plan]);
            ok(&["stage", &plan]);
        }
        root
    })
}

fn decode(plan: &str, out: &str, more: &[&str]) -> std::process::Output {
    let root = bench();
    let (store, plan, out) = (root.join("store"), root.join(plan), root.join(out));
    argodrive()
        .args(["decode", "--prompt", "The block comes back", "--max-new", "3", "--json", "--assert"])
        .arg("--store")
        .arg(store)
        .arg("--plan")
        .arg(plan)
        .arg("--out")
        .arg(out)
        .args(more)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The only record.json below a folder, and the path that leads to it.
fn record_below(folder: &Path) -> PathBuf {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            match entry.path() {
                path if path.is_dir() => open.push(path),
                path if path.ends_with("record.json") => found.push(path),
                _ => {}
            }
        }
    }
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn setting<'a>(json: &'a Value, name: &str) -> &'a Value {
    json["settings"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap()
}

#[test]
fn a_replica_policy_on_a_single_home_plan_is_rejected_in_plain_words() {
    let output = decode("round-robin.json", "single", &["--dispatch", "least-inflight"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let err = text(&output.stderr);
    assert!(err.contains("rejected: dispatch: unverified"), "{err}");
    assert!(err.contains("one home") && err.contains("nothing to choose between"), "{err}");
    let record = record_below(&bench().join("single"));
    assert!(record.components().any(|c| c.as_os_str() == "rejected"), "{}", record.display());
    let kept: Value = serde_json::from_str(&std::fs::read_to_string(record).unwrap()).unwrap();
    assert!(kept["rejected"][0].as_str().unwrap().starts_with("dispatch:"));
}

#[test]
fn a_proved_run_is_recorded_and_runs_again_with_the_same_tokens_and_plan() {
    let output = decode("full-mirror.json", "proved", &["--dispatch", "least-inflight"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Other tests read and write beside this one, so only what the settings say is asked here.
    for name in ["layout", "dispatch", "max_new", "direct"] {
        assert_eq!(setting(&json, name)["verdict"], "proved", "{name}: {}", setting(&json, name));
    }
    assert_eq!(setting(&json, "dispatch")["under_test"], true);
    assert_eq!(setting(&json, "direct")["under_test"], false, "nobody asked for the default");
    let record = record_below(&bench().join("proved"));
    let again = argodrive().args(["decode", "--json", "--config"]).arg(&record).output().unwrap();
    assert!(again.status.success(), "{}", text(&again.stderr));
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(again["token_ids"], json["token_ids"]);
    assert_eq!(again["plan_hash"], json["plan_hash"]);
    let guard = again["guards"].as_array().unwrap().iter().find(|g| g["name"] == "token identity").unwrap();
    assert_eq!(guard["verdict"], "held");
}

#[test]
fn a_limit_that_never_bound_is_unverified() {
    let output = decode("full-mirror.json", "limit", &["--queue-depth", "32"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("queue_depth: unverified: asked 32"), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("not binding"));
}

#[test]
fn a_cache_that_was_never_full_is_unverified_and_one_that_was_is_proved() {
    let output = decode("full-mirror.json", "roomy", &["--cache-bytes", "40MB"]);
    assert_eq!(output.status.code(), Some(1));
    let err = text(&output.stderr);
    assert!(err.contains("cache_bytes: unverified: asked 40000000") && err.contains("not binding"), "{err}");
    let output = decode("full-mirror.json", "kept", &["--cache-bytes", "1200KB", "--prefetch", "same-as-last"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    for name in ["cache_bytes", "cache_policy"] {
        assert_eq!(setting(&json, name)["verdict"], "proved", "{name}: {}", setting(&json, name));
    }
    assert_eq!(setting(&json, "prefetch")["asked"], "same-as-last");
    assert_ne!(setting(&json, "prefetch")["verdict"], "contradicted", "{}", setting(&json, "prefetch"));
}

#[test]
fn a_memory_file_system_is_refused_and_the_fallback_contradicts() {
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() {
        assert!(std::env::var_os("CI").is_none(), "no /dev/shm: this test cannot run here");
        eprintln!("SKIPPED: no /dev/shm");
        return;
    }
    let root = bench();
    let mount = tempfile::tempdir_in(shm).unwrap();
    let drives = mount.path().join("drives.toml");
    std::fs::write(&drives, format!("[[drive]]\nname = \"ram\"\npath = \"{}\"\n", mount.path().display())).unwrap();
    let plan = mount.path().join("plan.json");
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("layouts/full-mirror.toml");
    argodrive()
        .arg("plan")
        .arg("--store")
        .arg(root.join("store"))
        .arg("--drives")
        .arg(&drives)
        .arg("--policy")
        .arg(policy)
        .arg("--out")
        .arg(&plan)
        .assert()
        .success();
    argodrive().arg("stage").arg(&plan).args(["--margin", "1MB"]).assert().success();
    let plan = plan.display().to_string();
    let refused = decode(&plan, "shm", &[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("memory file system"), "{}", text(&refused.stderr));
    let fallen = decode(&plan, "shm2", &["--allow-fallback"]);
    assert_eq!(fallen.status.code(), Some(1));
    assert!(text(&fallen.stderr).contains("direct: contradicted"), "{}", text(&fallen.stderr));
}

#[test]
fn mistakes_are_found_before_anything_is_measured() {
    let root = bench();
    let file = root.join("typo.toml");
    std::fs::write(&file, "[reader]\nqueue_dept = 2\n").unwrap();
    let output = argodrive().args(["decode", "--prompt", "x", "--config"]).arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("did you mean `queue_depth`?"), "{}", text(&output.stderr));
    let plain = root.join("plain-file");
    std::fs::write(&plain, "x").unwrap();
    let output = decode("full-mirror.json", "plain-file", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("plain-file"), "{}", text(&output.stderr));
    let output = decode("full-mirror.json", "x", &["--resident"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("resident"), "{}", text(&output.stderr));
}

/// A profile of the bench's two drives, as `ceiling` would write it.
fn profile() -> PathBuf {
    use argodrive::drive::profile::{
        BarrierShape, DriveModel, Joint, Method, PROFILE_VERSION, Point, Profile, Proof, Quantile,
    };
    let barrier = BarrierShape { width: 8, steps: 10, p50_ns: 900, p99_ns: 1000, bytes_per_s: 1e9 };
    let model = |name: &str, rate: f64| DriveModel {
        name: name.into(),
        path: bench().join(name),
        device: String::new(),
        serials: vec![],
        emulated: false,
        alignment_bytes: 512,
        rate_bytes_per_s: rate,
        solo_rate_bytes_per_s: rate,
        fixed_ns: 10_000,
        latency_ns: 90_000,
        p99_ns: 400_000,
        service: vec![Quantile { q: 0.0, ns: 100 }, Quantile { q: 1.0, ns: 600 }],
        depth: 8,
        points: vec![Point { bytes: 1 << 20, depth: 1, reads: 40, bytes_per_s: 2e9, p50_ns: 5, p99_ns: 6 }],
        barrier,
        sustained: None,
    };
    let together = Joint {
        name: "all drives".into(),
        members: vec!["a".into(), "b".into()],
        bytes_per_s: 4e9,
        member_bytes_per_s: vec![2.6e9, 1.4e9],
        barrier,
    };
    let method = Method {
        made: "2026-01-01T00:00:00Z".into(),
        argodrive: "0.1.0".into(),
        kernel: "Linux 6".into(),
        virtualised: Some(true),
        engine: "psync".into(),
        direct: true,
        block_bytes: 1 << 20,
        width: 8,
        file_age_s: Some(4),
    };
    let guards = vec![Proof { name: "cold start".into(), seen: "0 bytes".into(), verdict: "held".into() }];
    let drives = vec![model("a", 3e9), model("b", 1.5e9)];
    let profile =
        Profile { version: PROFILE_VERSION, method, emulated: false, drives, groups: vec![], together, guards };
    let path = bench().join("profile.json");
    profile.save(&path).unwrap();
    path
}

#[test]
fn rates_from_a_profile_are_proved_by_the_choices_that_they_made() {
    let path = profile().display().to_string();
    let output = decode("full-mirror.json", "rates", &["--rates-from", &path]);
    let json: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)));
    let rates = setting(&json, "rates");
    assert_eq!((&rates["verdict"], &rates["under_test"]), (&"proved".into(), &true.into()), "{rates}");
    assert!(rates["seen"].as_str().unwrap().starts_with("2 drives began with a given rate, "), "{rates}");
    let record = record_below(&bench().join("rates"));
    let kept: Value = serde_json::from_str(&std::fs::read_to_string(record).unwrap()).unwrap();
    let given = &kept["config"]["reader"]["rates"][1];
    let known = serde_json::json!({"drive": "b", "bytes_per_s": 1_500_000_000u64, "fixed_ns": 100_000});
    assert_eq!(*given, known, "a record repeats itself without the profile");

    let output = decode("round-robin.json", "rates-idle", &["--rates-from", &path]);
    assert_eq!(output.status.code(), Some(1));
    let err = text(&output.stderr);
    assert!(err.contains("rejected: rates: unverified") && err.contains("nothing to choose between"), "{err}");
    let output = decode("full-mirror.json", "rates-none", &["--rates-from", "nowhere.json"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("nowhere.json"), "{}", text(&output.stderr));
}
