//! `argodrive trace` as a user runs it, on the trace of a real decode and on imported ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn argodrive(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("argodrive").unwrap();
    command.current_dir(folder).args(arguments);
    command
}

fn json(folder: &Path, arguments: &[&str]) -> Value {
    let out = argodrive(folder, arguments).assert().success().get_output().stdout.clone();
    serde_json::from_slice(&out).unwrap()
}

fn text(folder: &Path, arguments: &[&str]) -> String {
    String::from_utf8(argodrive(folder, arguments).assert().success().get_output().stdout.clone()).unwrap()
}

fn toy(folder: &Path) {
    let file = format!("{ROOT}/tests/fixtures/traces/toy-exact.csv");
    argodrive(folder, &["trace", "import", &file, "--format", "per-read", "--out", "toy"]).assert().success();
}

#[test]
fn the_trace_of_a_real_decode_is_explained_and_agrees_with_the_reader() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = dir.path();
    let mut drives = String::new();
    for (name, rate) in [("amber", 40), ("blue", 40), ("coral", 20)] {
        fs::create_dir(at.join(name)).unwrap();
        drives += &format!("[[drive]]\nname = \"{name}\"\npath = \"{name}\"\n");
        drives += &format!("emulate = {{ rate = \"{rate}MB/s\", latency = \"300us\" }}\n");
    }
    fs::write(at.join("drives.toml"), drives).unwrap();
    let (checkpoint, policy) = (format!("{ROOT}/models/argo-mini"), format!("{ROOT}/layouts/round-robin.toml"));
    argodrive(at, &["import", &checkpoint, "--store", "store"]).assert().success();
    let plan = ["plan", "--store", "store", "--drives", "drives.toml", "--policy", &policy, "--out", "p.json"];
    argodrive(at, &plan).assert().success();
    argodrive(at, &["stage", "p.json"]).assert().success();
    let decode = [
        "decode",
        "--store",
        "store",
        "--plan",
        "p.json",
        "--drives",
        "drives.toml",
        "--prompt",
        "Once upon a time",
        "--max-new",
        "6",
        "--trace",
        "tr",
        "--json",
    ];
    // a busy machine may make the pace worthless and the exit code 1; the trace is whole all the same
    let out = argodrive(at, &decode).output().unwrap();
    let record: Value = serde_json::from_slice(&out.stdout).unwrap();

    let report = json(at, &["trace", "report", "tr", "--json"]);
    assert_eq!(report["disagreements"], 0, "the reader and the report see the same last read and cause");
    assert_eq!(report["emulated"], true);
    for drive in record["drives"].as_array().unwrap() {
        let rows = report["drives"].as_array().unwrap();
        let row = rows.iter().find(|r| r["drive"] == drive["name"]).unwrap();
        assert_eq!((&row["reads"], &row["bytes"]), (&drive["reads"], &drive["read_bytes"]));
        let last = row["landed_last"].as_u64().unwrap() + row["tied"].as_u64().unwrap();
        assert!(last >= drive["landed_last"].as_u64().unwrap(), "the reader counts a tie for one drive");
    }
    let verdict = &report["verdict"];
    let parts = ["compute_ns", "all_drives_ns", "one_drive_ns", "latency_ns"].map(|k| verdict[k].as_u64().unwrap());
    assert_eq!(parts.iter().sum::<u64>(), verdict["wall_ns"].as_u64().unwrap());

    // with one home per expert, homes seen in the trace are homes of the plan
    let rates = "amber=40MB/s:300us,blue=40MB/s:300us,coral=20MB/s:300us";
    let bound = |more: &[&str]| {
        let report = json(at, &[&["trace", "report", "tr", "--json", "--rates", rates], more].concat());
        (
            report["all"]["bound_layout_ns"].clone(),
            report["all"]["bound_drives_ns"].clone(),
            report["homes_from"].clone(),
        )
    };
    let (layout, everywhere, from) = bound(&["--plan", "p.json"]);
    assert_eq!((from, &layout), ("plan".into(), &bound(&[]).0));
    assert!(layout.as_u64() > everywhere.as_u64() && everywhere.as_u64() > Some(0));
    fs::write(
        at.join("rates.toml"),
        rates.split(',').fold(String::new(), |text, item| {
            let (name, rest) = item.split_once('=').unwrap();
            let (rate, fixed) = rest.split_once(':').unwrap();
            text + &format!("[[drive]]\nname = \"{name}\"\nrate = \"{rate}\"\nfixed = \"{fixed}\"\n")
        }),
    )
    .unwrap();
    let report = json(at, &["trace", "report", "tr", "--json", "--profile", "rates.toml", "--barriers", "b.csv"]);
    assert_eq!(report["all"]["bound_layout_ns"], layout);
    let rows = fs::read_to_string(at.join("b.csv")).unwrap();
    assert_eq!(rows.lines().count() as u64, report["all"]["barriers"].as_u64().unwrap() + 1);
    let columns = rows.lines().next().unwrap().split(',').count();
    assert!(
        rows.lines().all(|l| l.split(',').count() == columns)
            && rows.starts_with("barrier,step,phase,layer,width,last,")
    );

    for more in [&[][..], &["--rates", rates]] {
        let text = text(at, &[&["trace", "report", "tr"], more].concat());
        assert!(text.contains("EMULATED"), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
        }
    }
    let figures = text(at, &["trace", "replay", "tr", "--plot-dir", "figs"]);
    // six figures, and windows of 1 s where the run is long enough for two
    assert!([12, 14].contains(&figures.lines().count()), "{figures}");
    assert!(figures.lines().all(|f| at.join(f).metadata().unwrap().len() > 1000), "{figures}");
    let svg = fs::read_to_string(at.join("figs/timeline-10ms.svg")).unwrap();
    assert!(svg.contains("emulated drives") && svg.contains("coral"));
    text(at, &["trace", "replay", "tr", "--plot-dir", "figs", "--step", "2"]);
    assert!(at.join("figs/waterfall-step-2.png").exists());
    let refused = argodrive(at, &["trace", "replay", "tr", "--plot-dir", "figs", "--step", "999"]).assert().code(2);
    assert!(String::from_utf8_lossy(&refused.get_output().stderr).contains("no step 999"));
}

#[test]
fn reports_of_imported_traces_fit_and_say_what_was_assumed() {
    let dir = tempfile::tempdir().unwrap();
    toy(dir.path());
    let text = text(dir.path(), &["trace", "report", "toy"]);
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    for wanted in
        ["imported from per-read", "--time completion", "5 barriers, 5 waited for a drive, 1 ties", "device_slow"]
    {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    let report = json(dir.path(), &["trace", "report", "toy", "--json", "--top", "1", "--wall", "42ms"]);
    assert_eq!(report["top_gaps"].as_array().unwrap().len(), 1);
    assert_eq!((&report["verdict"]["wall_ns"], &report["verdict"]["drive"]), (&42_000_000.into(), &"K3A".into()));
    assert_eq!(report["verdict"]["compute_ns"], 42_000_000 - 13_100_000);
}

#[test]
fn faults_are_errors_and_leniency_counts_them() {
    let dir = tempfile::tempdir().unwrap();
    toy(dir.path());
    let path = dir.path().join("toy/reads.csv");
    let broken = fs::read_to_string(&path).unwrap().replacen(",ok,", ",maybe,", 1);
    fs::write(&path, broken).unwrap();
    let refused = argodrive(dir.path(), &["trace", "report", "toy"]).assert().code(2);
    let message = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(message.contains("reads.csv:2: column 16 `result`: `maybe`"), "{message}");
    let report = json(dir.path(), &["trace", "report", "toy", "--lenient", "--json"]);
    assert_eq!(report["skipped_rows"], 1);
    for format in ["perfetto", "hdr"] {
        let out = ["trace", "export", "toy", "--format", format, "--out", "x"];
        argodrive(dir.path(), &out).assert().code(2);
        assert!(!dir.path().join("x").exists(), "nothing half-made stays behind");
        let done = json(dir.path(), &[&out[..], &["--lenient", "--json"]].concat());
        assert_eq!((&done["skipped_rows"], &done["written"]["reads"]), (&1.into(), &12.into()));
        fs::remove_file(dir.path().join("x")).unwrap();
    }
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    toy(dir.path());
    let file = format!("{ROOT}/tests/fixtures/traces/toy-exact.csv");
    let refuse = |arguments: &[&str], says: &str| {
        let refused = argodrive(dir.path(), arguments).assert().code(2);
        let message = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
        assert!(message.contains(says), "{message}");
    };
    let import = ["trace", "import", &file, "--out", "x", "--format"];
    refuse(&[&import[..], &["sampler", "--time", "issue"]].concat(), "--time does nothing");
    refuse(&[&import[..], &["per-read", "--map", "m"]].concat(), "--map does nothing");
    refuse(&[&import[..], &["blkparse", &file]].concat(), "takes one file");
    refuse(&[&import[..4], &["toy", "--format", "per-read"]].concat(), "holds a trace already");
    refuse(&["trace", "report", "toy", "--plan", "p.json"], "--rates or --profile");
    refuse(&["trace", "report", "toy", "--rates", "internal=2GB/s"], "`K3C` has none");
    refuse(&["trace", "report", "nowhere"], "nowhere/trace.json");
    refuse(
        &["trace", "export", "toy", "--format", "perfetto", "--out", "x", "--interval", "1s"],
        "--interval does nothing",
    );
    refuse(&["trace", "export", "toy", "--format", "hdr", "--out", "x", "--interval", "0"], "--interval");
}
