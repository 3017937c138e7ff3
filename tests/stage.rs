//! Staging with the real binary: what is copied, what is left alone, what an interruption leaves behind, and what is
//! refused with which words.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::spec::{self, DriveSpec};
use argodrive::ids::Extent;
use argodrive::store::manifest::{DRIVE_FILE, DriveManifest, STORE_FILE, StoreManifest, drive_folder};
use argodrive::store::synth::{Shards, SynthOptions, synth};
use argodrive::store::verify::verify_drive;
use argodrive::sys::cachestat::{ResidencyMethod, residency};
use assert_cmd::Command;
use prepared::{Drives, argodrive, damage, has, json_of, outcome, refused, snapshot, tiny_store};
use serde_json::Value;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

fn stage(plan: &Path) -> Command {
    let mut command = argodrive(["stage"]);
    command.arg(plan);
    command
}

fn verify(plan: &Path) -> (i32, String, String) {
    outcome(argodrive(["verify"]).arg(plan))
}

/// One figure of every drive.
fn column(report: &Value, key: &str) -> Vec<u64> {
    report["drives"].as_array().unwrap().iter().map(|d| d[key].as_u64().unwrap()).collect()
}

const EXPERTS: u64 = 8 * 24;

#[test]
fn a_second_run_copies_nothing_and_a_grown_plan_adds_the_union() {
    let drives = Drives::new(2, None);
    let dealt = drives.plan(tiny_store(), "round-robin");
    let dry = json_of(stage(&dealt).args(["--dry-run", "--json"]));
    assert_eq!((column(&dry, "copied"), dry["dry_run"].as_bool()), (vec![96, 96], Some(true)));
    assert!(drives.specs.iter().all(|d| fs::read_dir(&d.path).unwrap().next().is_none()), "a dry run writes nothing");

    let first = json_of(stage(&dealt).arg("--json"));
    assert_eq!((column(&first, "copied"), column(&first, "present")), (vec![96, 96], vec![0, 0]));
    assert_eq!(column(&first, "copied_bytes"), [96 * 9792; 2]);
    let before = snapshot(drives.dir.path());
    let again = json_of(stage(&dealt).arg("--json"));
    assert_eq!((column(&again, "copied"), column(&again, "present")), (vec![0, 0], vec![96, 96]));
    assert_eq!(snapshot(drives.dir.path()), before);

    let mirror = drives.plan(tiny_store(), "full-mirror");
    let slots = |index: usize| DriveManifest::open(&drives.model_folder(index)).unwrap();
    let old = slots(0);
    let grown = json_of(stage(&mirror).arg("--json"));
    assert_eq!((column(&grown, "copied"), column(&grown, "present")), (vec![96, 96], vec![96, 96]));
    let new = slots(0);
    for (layer, row) in &old.layers {
        assert!(row.iter().all(|e| new.find(*layer, e.expert) == Some(e)), "what was there keeps its slot");
    }
    for plan in [&dealt, &mirror] {
        let (code, text, _) = verify(plan);
        assert_eq!(code, 0, "{text}");
        has(&text, &["amber: 192 checked", "blue: 192 checked", "0 wrong, 0 missing"]);
    }
}

#[test]
fn a_drive_that_a_plan_leaves_empty_is_staged_and_read_all_the_same() {
    let drives = Drives::new(2, None);
    let plan = drives.staged(tiny_store(), "single");
    assert_eq!(DriveManifest::open(&drives.model_folder(1)).unwrap().layers.len(), 0);
    assert_eq!(verify(&plan).0, 0);
    let mut decode = argodrive(["decode", "--prompt", "a", "--max-new", "2", "--json", "--store"]);
    let out = json_of(decode.arg(tiny_store()).arg("--plan").arg(&plan));
    assert_eq!(column(&out, "reads")[1], 0);
    assert!(column(&out, "reads")[0] > 0);
}

#[test]
fn a_store_that_is_drive_1_needs_no_copy() {
    let drives = Drives::new(2, None);
    let store = drives.dir.path().join("store");
    argodrive(["import"])
        .arg(prepared::repo("tests/fixtures/oracle/tiny"))
        .arg("--store")
        .arg(&store)
        .assert()
        .success();
    let mut specs = drives.specs.clone();
    specs[0].path = store.clone();
    fs::write(&drives.toml, spec::render(&specs)).unwrap();
    let before = snapshot(&store);
    let plan = drives.staged(&store, "full-mirror");
    let report = json_of(stage(&plan).arg("--json"));
    assert_eq!(column(&report, "present"), [EXPERTS, EXPERTS]);
    assert_eq!(snapshot(&store), before, "nothing is written to the store");
    let run = json_of(
        argodrive(["decode", "--json", "--prompt", "abc", "--max-new", "4", "--dispatch", "round-robin", "--store"])
            .arg(&store)
            .arg("--plan")
            .arg(&plan),
    );
    assert!(column(&run, "reads").iter().all(|&n| n > 0), "{run}");
}

#[test]
fn nothing_staged_stays_in_the_page_cache() {
    let drives = Drives::new(1, None);
    drives.staged(tiny_store(), "round-robin");
    let packs = snapshot(&drives.model_folder(0));
    assert_eq!(packs.len(), 1 + 8 + 1, "drive.json, the packs, and what staging added");
    // reading the snapshot filled the cache again, so that staging once more has something to drop
    let plan = drives.dir.path().join("round-robin.plan.json");
    fs::remove_file(drives.model_folder(0).join("L3.experts")).unwrap();
    let report = json_of(stage(&plan).arg("--json"));
    assert_eq!((column(&report, "copied"), column(&report, "spoiled")), (vec![24], vec![24]), "a lost pack comes back");
    let file = fs::File::open(drives.model_folder(0).join("L3.experts")).unwrap();
    let seen = residency(&file, Extent { offset: 0, len: file.metadata().unwrap().len() }).unwrap();
    if seen.method != ResidencyMethod::Cachestat {
        assert!(std::env::var_os("CI").is_none(), "this kernel cannot tell residency");
        eprintln!("SKIPPED: this kernel has no cachestat");
        return;
    }
    assert_eq!(seen.resident_bytes, 0, "of {} bytes: the read-back came from memory", seen.asked_bytes);
}

#[test]
fn a_wrong_or_lost_expert_is_named_by_verify_and_mended_by_repair() {
    let drives = Drives::new(2, None);
    let plan = drives.staged(tiny_store(), "round-robin");
    let folder = drives.model_folder(1);
    let manifest = DriveManifest::open(&folder).unwrap();
    let (&layer, row) = manifest.layers.iter().nth(2).unwrap();
    let entry = row[5];
    let (name, extent) = manifest.locate(layer, &entry);
    let whole = snapshot(drives.dir.path());
    damage(&folder.join(&name), extent.offset + extent.len - 1);
    let cut = folder.join("L7.experts");
    fs::File::options().write(true).open(&cut).unwrap().set_len(3 * 16384).unwrap();

    let (code, text, _) = verify(&plan);
    assert_eq!(code, 1, "{text}");
    let expert = format!("expert {layer}-{}, slot {}, offset {}", entry.expert, entry.slot, extent.offset);
    has(&text, &["amber: 96 checked", "0 wrong", &format!("blue: {}", folder.join(&name).display()), &expert]);
    has(&text, &["L7.experts", "cannot be read", "10 wrong", "--repair"]);
    let (code, text, _) = outcome(argodrive(["verify", "--json"]).arg(&plan));
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, report["sound"].as_bool()), (1, Some(false)));
    assert_eq!(report["drives"][1]["faults"].as_array().unwrap().len(), 10);

    // without --repair only what is visibly gone comes back; with it the flipped byte too
    let report = json_of(stage(&plan).arg("--json"));
    assert_eq!(column(&report, "copied"), [0, 9]);
    assert_eq!(verify(&plan).0, 1);
    let dry = json_of(stage(&plan).args(["--repair", "--dry-run", "--json"]));
    assert_eq!(column(&dry, "spoiled"), [0, 1]);
    assert_eq!(verify(&plan).0, 1);
    let report = json_of(stage(&plan).args(["--repair", "--json"]));
    assert_eq!((column(&report, "copied"), column(&report, "spoiled")), (vec![0, 1], vec![0, 1]));
    assert_eq!(verify(&plan).0, 0);
    assert_eq!(snapshot(drives.dir.path()), whole, "into the slots where they had been");
}

#[test]
fn a_corrupted_source_is_refused_and_never_published() {
    let drives = Drives::new(1, None);
    let store = drives.dir.path().join("store");
    argodrive(["import"])
        .arg(prepared::repo("tests/fixtures/oracle/tiny"))
        .arg("--store")
        .arg(&store)
        .assert()
        .success();
    let plan = drives.plan(&store, "round-robin");
    let id = StoreManifest::open(&store).unwrap().model_id;
    damage(&drive_folder(&store, &id).join("L2.experts"), 3 * 16384 + 100);
    refused(&mut stage(&plan), &["drive amber", "L2.experts", "offset 49152", "L2-E3", "import the checkpoint again"]);
    let manifest = DriveManifest::open(&drives.model_folder(0)).unwrap();
    assert_eq!(manifest.layers.keys().map(|l| l.0).collect::<Vec<_>>(), [1], "the layer before it is whole, no other");
    let report = verify_drive(&drives.model_folder(0), &manifest, &mut |_| {}).unwrap();
    assert!(report.faults.is_empty() && report.checked == 24);
    let (code, text, _) = outcome(argodrive(["verify"]).arg(&store));
    assert_eq!(code, 1);
    has(&text, &["experts: ", "L2-E3, slot 3, offset 49152"]);
}

#[test]
fn impossible_requests_are_refused_with_advice() {
    let drives = Drives::new(2, None);
    let plan = drives.plan(tiny_store(), "full-mirror");
    refused(stage(&plan).args(["--margin", "900000GB"]), &["drive amber", "needs", "free", "--margin"]);
    assert!(fs::read_dir(&drives.specs[0].path).unwrap().next().is_none(), "checked before anything is written");

    let other = drives.dir.path().join("other");
    let checkpoint = drives.dir.path().join("checkpoint");
    synth(&checkpoint, &SynthOptions::small(), &mut |_| {}).unwrap();
    argodrive(["import"]).arg(&checkpoint).arg("--store").arg(&other).assert().success();
    refused(stage(&plan).arg("--store").arg(&other), &["the plan is for model", "plan again", "--store"]);

    let write = |specs: &[DriveSpec]| {
        let path = drives.dir.path().join("other.toml");
        fs::write(&path, spec::render(specs)).unwrap();
        path
    };
    let only_first = write(&drives.specs[..1]);
    refused(stage(&plan).arg("--drives").arg(&only_first), &["other.toml", "drive `blue`", "does not have"]);
    let mut specs = drives.specs.clone();
    specs[1].path = drives.dir.path().join("unplugged");
    let unplugged = write(&specs);
    refused(stage(&plan).arg("--drives").arg(&unplugged), &["drive blue", "unplugged", "mount it"]);
    assert!(!specs[1].path.exists(), "a missing mount is not made up");
    refused(argodrive(["verify", "--drives"]).arg(&unplugged).arg(&plan), &["drive amber", "argodrive stage"]);

    std::os::unix::fs::symlink(&drives.specs[0].path, drives.dir.path().join("link")).unwrap();
    specs[1].path = drives.dir.path().join("link");
    refused(stage(&plan).arg("--drives").arg(write(&specs)), &["drives amber and blue are the same folder"]);

    let lock = fs::File::open(&drives.specs[1].path).unwrap();
    lock.try_lock().unwrap();
    let own = format!("(pid {}, `", std::process::id());
    refused(&mut stage(&plan), &["drive blue", "another `argodrive stage`", &own]);
    drop(lock);
    stage(&plan).assert().success();
    let text = fs::read_to_string(drives.model_folder(0).join(DRIVE_FILE)).unwrap();
    fs::write(drives.model_folder(0).join(DRIVE_FILE), text.replacen("\"version\":1", "\"version\":9", 1)).unwrap();
    refused(&mut stage(&plan), &["amber", DRIVE_FILE, "format version 9", "use a newer argodrive"]);
    refused(stage(&plan).arg("--store").arg(drives.dir.path()), &[STORE_FILE, "not a store"]);
}

/// A checkpoint large enough that a kill finds staging at work: 8 layers of 16 experts of 0.8 MB.
fn large_store(dir: &Path) -> PathBuf {
    let options = SynthOptions {
        layers: 9,
        experts: 16,
        latent: 1024,
        width: 512,
        shards: Shards::Count(1),
        ..SynthOptions::small()
    };
    synth(&dir.join("checkpoint"), &options, &mut |_| {}).unwrap();
    let store = dir.join("store");
    argodrive(["import"]).arg(dir.join("checkpoint")).arg("--store").arg(&store).assert().success();
    store
}

/// Whether staging has got somewhere.
type Moment<'a> = Box<dyn Fn() -> bool + 'a>;

#[test]
fn a_kill_at_any_moment_leaves_only_valid_manifests_and_the_next_run_completes() {
    let drives = Drives::new(2, None);
    let store = large_store(drives.dir.path());
    let plan = drives.plan(&store, "full-mirror");
    let id = StoreManifest::open(&store).unwrap().model_id;
    let folder = |index: usize| drive_folder(&drives.specs[index].path, &id);
    let layers = |index: usize| DriveManifest::open(&folder(index)).map_or(0, |m| m.layers.len());
    let moments: [(&str, Moment<'_>); 4] = [
        ("the first pack is begun", Box::new(|| fs::metadata(folder(0).join("L1.experts")).is_ok_and(|m| m.len() > 0))),
        ("the first manifest is there", Box::new(|| layers(0) >= 1)),
        ("half of the first drive is there", Box::new(|| layers(0) >= 4)),
        ("the second drive is begun", Box::new(|| layers(1) >= 1)),
    ];
    let mut published = 0;
    for (what, reached) in &moments {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_argodrive"))
            .arg("stage")
            .arg(&plan)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        while !reached() && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}: never");
            std::thread::sleep(Duration::from_micros(200));
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "{what}: it was over before the kill");
        let mut found = 0;
        for index in 0..2 {
            if !folder(index).join(DRIVE_FILE).exists() {
                continue;
            }
            let manifest = DriveManifest::open(&folder(index)).unwrap();
            let report = verify_drive(&folder(index), &manifest, &mut |_| {}).unwrap();
            assert!(report.faults.is_empty(), "{what}: {:?}", report.faults.first());
            assert!(manifest.layers.values().all(|row| row.len() == 16), "{what}: layers are published whole");
            found += report.checked;
        }
        assert!(found >= published, "{what}: nothing published is lost");
        published = found;
        if found < 256 {
            let (code, text, _) = verify(&plan);
            assert!(code != 0 && !text.contains(" 1 wrong"), "{what}: half a plan is not called sound: {text}");
        }
    }
    assert!(published >= 8 * 16 + 16, "the second drive was begun");
    let last = json_of(stage(&plan).arg("--json"));
    assert_eq!(column(&last, "present").iter().sum::<u64>(), published, "it goes on where it stopped");
    assert_eq!(column(&last, "copied").iter().sum::<u64>(), 256 - published);
    let (code, text, _) = verify(&plan);
    assert_eq!(code, 0, "{text}");
}

/// Bytes that this thread has had fetched from storage.
fn fetched_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/thread-self/io").ok()?;
    text.lines().find_map(|l| l.strip_prefix("read_bytes: "))?.parse().ok()
}

#[test]
fn verify_reads_the_drive_and_not_the_page_cache() {
    let drives = Drives::new(1, None);
    drives.staged(tiny_store(), "round-robin");
    let folder = drives.model_folder(0);
    let manifest = DriveManifest::open(&folder).unwrap();
    let _warm = snapshot(&folder);
    let before = fetched_bytes();
    let report = verify_drive(&folder, &manifest, &mut |_| {}).unwrap();
    let (Some(before), Some(after)) = (before, fetched_bytes()) else {
        assert!(std::env::var_os("CI").is_none(), "this kernel does not count a thread's reads");
        eprintln!("SKIPPED: this kernel does not count a thread's reads");
        return;
    };
    assert_eq!(report.checked, EXPERTS);
    assert!(after - before >= report.bytes, "{} of {} bytes came from the drive", after - before, report.bytes);
}
