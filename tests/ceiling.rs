//! `argodrive ceiling` with the real binary on emulated drives: counts, bytes, labels and files; never a speed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::emulated_link::{EmulatedLink, LinkName};
use argodrive::drive::profile::Profile;
use argodrive::drive::spec::{Emulation, render};
use assert_cmd::Command;
use prepared::{Drives, argodrive, has, outcome, refused, tiny_store};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Four reads in flight keep it busy, and a busy machine disturbs it little.
fn pace() -> Emulation {
    Emulation { rate_bytes_per_s: 4_000_000, latency_ns: 1_000_000, ..Emulation::default() }
}

fn ceiling(drives: &Drives, out: &Path) -> Command {
    let mut command = argodrive(["ceiling", "--duration", "200ms", "--depths", "1,4", "--width", "3", "--drives"]);
    command.arg(&drives.toml).arg("--out").arg(out);
    command
}

/// The object, and whether the run counts: on a busy machine a pace may not be kept, and that is said.
fn json_run(command: &mut Command) -> (Value, bool) {
    let (code, text, notes) = outcome(command.arg("--json"));
    assert!(code < 2, "{notes}");
    let value: Value = serde_json::from_str(&text).unwrap();
    let counts = value["rejected"].as_array().unwrap().is_empty();
    assert!(counts || code == 1);
    (value, counts)
}

fn left(drives: &Drives) -> usize {
    drives.specs.iter().map(|s| fs::read_dir(&s.path).unwrap().count()).sum()
}

#[test]
fn two_emulated_drives_give_a_profile_with_counts_bytes_and_labels() {
    let drives = Drives::new(2, Some(pace()));
    let out = drives.dir.path().join("profile.json");
    let (seen, counts) = json_run(ceiling(&drives, &out).args(["--bytes", "64KiB"]));
    let profile = &seen["profile"];
    assert_eq!((&profile["version"], &profile["emulated"]), (&json!(1), &json!(true)));
    let names: Vec<&str> = profile["drives"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["amber", "blue"]);
    for drive in profile["drives"].as_array().unwrap() {
        let points = drive["points"].as_array().unwrap();
        let what: Vec<(u64, u64)> =
            points.iter().map(|p| (p["bytes"].as_u64().unwrap(), p["depth"].as_u64().unwrap())).collect();
        assert_eq!(what, [(65_536, 1), (65_536, 4), (16_384, 1), (16_384, 4)]);
        assert!(points.iter().all(|p| p["reads"].as_u64() >= Some(8)), "{points:?}");
        assert_eq!((&drive["emulated"], &drive["barrier"]["width"]), (&json!(true), &json!(3)));
        assert!(drive["barrier"]["steps"].as_u64() >= Some(8));
    }
    assert_eq!((&profile["together"]["members"], &profile["groups"]), (&json!(["amber", "blue"]), &json!([])));
    assert_eq!(profile["together"]["member_bytes_per_s"].as_array().unwrap().len(), 2);
    let (reads, bytes) = (seen["reads"].as_u64().unwrap(), seen["read_bytes"].as_u64().unwrap());
    assert!(reads > 100 && bytes > reads * 16_384 && bytes < reads * 65_536, "{reads} reads, {bytes} bytes");
    let guards: Vec<&str> = profile["guards"].as_array().unwrap().iter().map(|g| g["name"].as_str().unwrap()).collect();
    for guard in ["cold start", "device bytes", "file age", "engine", "pace of amber", "pace of blue"] {
        assert!(guards.contains(&guard), "{guards:?}");
    }
    let engine = profile["guards"].as_array().unwrap().iter().find(|g| g["name"] == "engine").unwrap();
    assert_eq!(engine["seen"], json!(format!("{reads} of {reads} reads finished by psync")));
    assert_eq!(left(&drives), 0, "test files are gone");
    assert_eq!(out.exists(), counts);
    let rejected = drives.dir.path().join("profile.rejected.json");
    assert_eq!(rejected.exists(), !counts);
    if counts {
        let read = Profile::load(&out).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), *profile);
        assert_eq!(read.models_of(&drives.specs).unwrap().len(), 2);
    } else {
        assert!(Profile::load(&rejected).unwrap_err().to_string().contains("measure again"));
    }
}

#[test]
fn drives_on_one_emulated_link_are_measured_together() {
    let drives = Drives::new(3, Some(pace()));
    let mut specs = drives.specs.clone();
    for spec in &mut specs[1..] {
        let name = LinkName::new("hub").unwrap();
        spec.emulate.as_mut().unwrap().link = Some(EmulatedLink { name, rate_bytes_per_s: 5_000_000 });
    }
    fs::write(&drives.toml, render(&specs)).unwrap();
    let (seen, _) = json_run(ceiling(&drives, &drives.dir.path().join("p.json")).args(["--bytes", "64KiB"]));
    let groups = seen["profile"]["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 1);
    assert_eq!((&groups[0]["name"], &groups[0]["members"]), (&json!("hub"), &json!([specs[1].name, specs[2].name])));
    assert_eq!(groups[0]["member_bytes_per_s"].as_array().unwrap().len(), 2);
}

#[test]
fn sustained_reading_is_drawn_labelled_and_held_against_the_target() {
    let drives = Drives::new(1, Some(pace()));
    let out = drives.dir.path().join("p.json");
    let mut command = ceiling(&drives, &out);
    let (code, text, notes) =
        outcome(command.args(["--bytes", "64KiB", "--sustain", "2s", "--target", "90GB/s", "--engine", "io-uring"]));
    if notes.contains("io_uring") {
        assert_eq!(code, 2, "refused where the kernel has none");
        return;
    }
    assert_eq!(code, 1, "{text}{notes}");
    has(
        &text,
        &["EMULATED drives", "amber (emulated)", "sustained: amber", "sustained: all drives", "MISSED", "by io-uring"],
    );
    let svg = fs::read_to_string(drives.dir.path().join("p-sustain.svg")).unwrap();
    assert!(svg.contains("emulated drives"), "the figure carries no label");
    assert!(fs::read(drives.dir.path().join("p-sustain.png")).unwrap().starts_with(b"\x89PNG"));
    assert_eq!(left(&drives), 0);
}

#[test]
fn staged_packs_are_read_in_place() {
    let drives = Drives::new(1, Some(pace()));
    let plan = drives.staged(tiny_store(), "full-mirror");
    let before = prepared::snapshot(&drives.specs[0].path);
    let out = drives.dir.path().join("p.json");
    let (seen, _) = json_run(ceiling(&drives, &out).args(["--bytes", "16KiB", "--plan"]).arg(&plan));
    assert!(seen["reads"].as_u64() > Some(50));
    assert_eq!(prepared::snapshot(&drives.specs[0].path), before);
    let bare = Drives::new(1, Some(pace()));
    refused(ceiling(&bare, &out).arg("--plan").arg(&plan), &["drive `amber`", "argodrive stage"]);
    refused(ceiling(&bare, &out).arg("--store").arg(tiny_store()), &["drive `amber`", "argodrive stage"]);
    refused(ceiling(&bare, &out).arg("--store").arg(bare.dir.path()), &["not a store"]);
}

#[test]
fn kept_files_stay_and_are_used_again() {
    let drives = Drives::new(1, Some(pace()));
    let out = drives.dir.path().join("p.json");
    let run = || json_run(ceiling(&drives, &out).args(["--bytes", "64KiB", "--file-size", "1MiB", "--keep"]));
    run();
    let kept = prepared::snapshot(&drives.specs[0].path);
    assert_eq!(kept.values().map(Vec::len).collect::<Vec<_>>(), [1 << 20]);
    run();
    assert_eq!(prepared::snapshot(&drives.specs[0].path), kept);
}

#[test]
fn an_interrupted_measurement_leaves_nothing() {
    let drives = Drives::new(2, Some(pace()));
    let out = drives.dir.path().join("p.json");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_argodrive"));
    command.args(["ceiling", "--duration", "30s", "--drives"]).arg(&drives.toml).arg("--out").arg(&out);
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    // SIGINT is the second bit of the signals that the process catches
    let listens = || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:")).unwrap().trim().to_string();
        u64::from_str_radix(&caught, 16).unwrap() & 2 != 0
    };
    let begun = Instant::now();
    while !listens() {
        assert!(begun.elapsed() < Duration::from_secs(60), "does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(500));
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "does not end");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status.code(), Some(2));
    assert_eq!(left(&drives), 0);
    assert!(!out.exists());
}

#[test]
fn what_cannot_be_measured_is_refused_with_a_reason() {
    let drives = Drives::new(1, None);
    let out = drives.dir.path().join("p.json");
    let refuse = |args: &[&str], words: &[&str]| {
        refused(ceiling(&drives, &out).args(args), words);
    };
    refuse(&["--file-size", "100KiB"], &["--file-size", "are needed"]);
    refuse(&["--file-size", "900TB"], &["drive `amber`", "--file-size", "free"]);
    refuse(&["--engine", "mmap"], &["--buffered"]);
    refused(&mut ceiling(&drives, Path::new("/proc/none/p.json")), &["--out /proc/none/p.json"]);
    assert_eq!(left(&drives), 0);
    // a folder that nothing can be written to
    let mut permissions = fs::metadata(&drives.specs[0].path).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o555);
    fs::set_permissions(&drives.specs[0].path, permissions).unwrap();
    if fs::File::create(drives.specs[0].path.join("x")).is_err() {
        refuse(&[], &["drive `amber`", "cannot write a test file"]);
    } else {
        // the superuser may write everywhere; a kernel's own folder refuses even that
        let toml = drives.dir.path().join("proc.toml");
        fs::write(&toml, "[[drive]]\nname = \"p\"\npath = \"/proc/self\"\n").unwrap();
        let mut command = argodrive(["ceiling", "--drives"]);
        refused(command.arg(&toml).arg("--out").arg(&out), &["drive `p`", "/proc/self"]);
    }
    if Path::new("/dev/shm").is_dir() {
        let toml = drives.dir.path().join("shm.toml");
        fs::write(&toml, "[[drive]]\nname = \"m\"\npath = \"/dev/shm\"\n").unwrap();
        let mut command = argodrive(["ceiling", "--drives"]);
        refused(command.arg(&toml).arg("--out").arg(&out), &["drive `m`", "memory file system"]);
    }
}
