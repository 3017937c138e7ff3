//! Staging taken back, space freed, copies held to a rate, and who may do it when: with the real binary, on real files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::ids::DriveId;
use argodrive::layout::plan::Plan;
use argodrive::store::manifest::{DRIVE_FILE, DriveManifest, StoreManifest, drive_folder};
use argodrive::store::synth::{Shards, SynthOptions, synth};
use argodrive::store::verify::verify_drive;
use argodrive::sys::hole::allocated_bytes;
use argodrive::sys::lock::try_lock;
use assert_cmd::Command;
use prepared::{Drives, argodrive, has, json_of, outcome, refused, snapshot, tiny_store};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

const EXPERT_BYTES: u64 = 9792;
const SLOT_BYTES: u64 = 16384;

fn stage(plan: &Path) -> Command {
    let mut command = argodrive(["stage"]);
    command.arg(plan);
    command
}

fn prune(keep: &[&Path]) -> Command {
    let mut command = argodrive(["prune", "--json", "--keep"]);
    command.args(keep);
    command
}

fn column(report: &Value, key: &str) -> Vec<u64> {
    report["drives"].as_array().unwrap().iter().map(|d| d[key].as_u64().unwrap()).collect()
}

/// Every file but the journals of stagings, which say who added what.
fn without_journals(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = snapshot(folder);
    all.retain(|path, _| path.extension().is_none_or(|e| e != "journal"));
    all
}

/// Bytes that the file system gives to the files of a folder.
fn on_disk(folder: &Path) -> u64 {
    snapshot(folder).keys().map(|p| allocated_bytes(&fs::metadata(folder.join(p)).unwrap())).sum()
}

fn slots(folder: &Path) -> u64 {
    DriveManifest::open(folder).unwrap().pieces().count() as u64
}

fn sound(plan: &Path) {
    let (code, text, _) = outcome(argodrive(["verify"]).arg(plan));
    assert_eq!(code, 0, "{text}");
}

#[test]
fn a_rollback_takes_back_what_its_staging_added_and_nothing_else() {
    let drives = Drives::new(2, None);
    let dealt = drives.staged(tiny_store(), "round-robin");
    let foreign = drives.model_folder(0).join("notes.txt");
    fs::write(&foreign, "mine").unwrap();
    let before = without_journals(drives.dir.path());
    let mirror = drives.staged(tiny_store(), "full-mirror");
    assert_eq!(slots(&drives.model_folder(0)), 192);
    let grown = on_disk(&drives.model_folder(0));

    let dry = json_of(stage(&mirror).args(["--rollback", "--dry-run", "--json"]));
    assert_eq!((column(&dry, "removed"), column(&dry, "needed")), (vec![96, 96], vec![0, 0]));
    assert_eq!(slots(&drives.model_folder(0)), 192, "a dry run changes nothing");
    let done = json_of(stage(&mirror).args(["--rollback", "--json"]));
    assert_eq!(column(&done, "removed"), [96, 96]);
    assert_eq!(column(&done, "freed_bytes"), column(&dry, "freed_bytes"));
    // a slot of 16 KiB holds 9792 bytes, and a file system gives 4 KiB at a time
    assert!(column(&done, "freed_bytes").iter().all(|&b| b >= 96 * EXPERT_BYTES), "{done}");
    assert!(on_disk(&drives.model_folder(0)) + 96 * EXPERT_BYTES <= grown);
    // packs end where their last expert ends again, and holes read zeros as free slots did
    assert_eq!(slots(&drives.model_folder(0)), 96);
    sound(&dealt);
    for (path, bytes) in &before {
        let now = fs::read(drives.dir.path().join(path)).unwrap();
        assert!(path.ends_with("mirror.plan.json") || now == *bytes, "{} is as it was", path.display());
    }
    let again = json_of(stage(&mirror).args(["--rollback", "--json"]));
    assert_eq!((column(&again, "added"), column(&again, "removed")), (vec![0, 0], vec![0, 0]));

    // what came first goes, too; what is left is what is not argodrive's
    json_of(stage(&dealt).args(["--rollback", "--json"]));
    let left: Vec<PathBuf> = snapshot(&drives.specs[0].path).into_keys().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(fs::read_to_string(&foreign).unwrap(), "mine");
    assert!(fs::read_dir(&drives.specs[1].path).unwrap().next().is_none(), "as before the first staging");
}

#[test]
fn a_rollback_spares_what_another_plan_was_staged_with_or_is_named_to_need() {
    let drives = Drives::new(2, None);
    let mirror = drives.staged(tiny_store(), "full-mirror");
    // its experts were all there: it adds nothing, but it counts on them
    let dealt = drives.staged(tiny_store(), "round-robin");
    let done = json_of(stage(&mirror).args(["--rollback", "--json"]));
    assert_eq!((column(&done, "removed"), column(&done, "needed")), (vec![96, 96], vec![96, 96]));
    sound(&dealt);

    let mirror = drives.staged(tiny_store(), "full-mirror");
    let single = drives.plan(tiny_store(), "single");
    let done = json_of(stage(&mirror).args(["--rollback", "--json", "--keep"]).arg(&single));
    assert_eq!((column(&done, "removed"), column(&done, "needed")), (vec![0, 96], vec![96, 0]));
    json_of(stage(&single).args(["--dry-run", "--json"]));
    sound(&single);
}

#[test]
fn a_failed_staging_can_take_itself_back_and_a_lost_store_stops_a_rollback() {
    let drives = Drives::new(2, None);
    let store = drives.dir.path().join("store");
    let imported = || {
        let tiny = prepared::repo("tests/fixtures/oracle/tiny");
        argodrive(["import"]).arg(tiny).arg("--store").arg(&store).assert().success();
    };
    imported();
    let plan = drives.plan(&store, "full-mirror");
    let id = StoreManifest::open(&store).unwrap().model_id;
    let spoiled = drive_folder(&store, &id).join("L2.experts");
    prepared::damage(&spoiled, 3 * SLOT_BYTES + 100);
    let text = refused(stage(&plan).arg("--rollback-on-failure"), &["L2-E3", "24 copies that it had added", "import"]);
    assert!(text.contains("taken back"), "{text}");
    assert!(drives.specs.iter().all(|d| fs::read_dir(&d.path).unwrap().next().is_none()));
    prepared::damage(&spoiled, 3 * SLOT_BYTES + 100);
    json_of(stage(&plan).arg("--json"));
    fs::File::options().write(true).open(&spoiled).unwrap().set_len(SLOT_BYTES).unwrap();
    refused(stage(&plan).arg("--rollback"), &["drive amber", "does not hold L2-E1", "may be the last", "nothing was"]);
    assert_eq!(slots(&drives.model_folder(0)), 192);
}

#[test]
fn prune_keeps_what_plans_need_and_gives_the_rest_back_to_the_file_system() {
    let drives = Drives::new(2, None);
    let mirror = drives.staged(tiny_store(), "full-mirror");
    let dealt = drives.staged(tiny_store(), "round-robin");
    let single = drives.plan(tiny_store(), "single");
    let folder = drives.model_folder(1);
    let foreign = ["notes.txt", "L99.experts", "L1.experts.bak", "L1-E1.bin"];
    for name in foreign {
        fs::write(folder.join(name), vec![7; 5000]).unwrap();
    }
    let before = on_disk(&folder);
    let all = json_of(prune(&[&dealt, &mirror]).arg("--dry-run"));
    assert_eq!((column(&all, "removed"), all["freed_bytes"].as_u64()), (vec![0, 0], Some(0)), "both plans need it all");

    let dry = json_of(prune(&[&dealt, &single]).arg("--dry-run"));
    assert_eq!((column(&dry, "removed"), column(&dry, "kept")), (vec![0, 96], vec![192, 96]));
    assert_eq!(slots(&folder), 192);
    let done = json_of(&mut prune(&[&dealt, &single]));
    assert_eq!(column(&done, "freed_bytes"), column(&dry, "freed_bytes"));
    let freed = column(&done, "freed_bytes")[1];
    assert!(freed >= 96 * EXPERT_BYTES, "{freed}");
    assert!(on_disk(&folder) + freed <= before, "the bytes really came back");
    sound(&dealt);
    sound(&single);
    assert!(
        foreign.iter().all(|name| fs::read(folder.join(name)).unwrap() == vec![7; 5000]),
        "none of argodrive's business"
    );
    // the slots are taken again by a later staging
    json_of(stage(&mirror).arg("--json"));
    sound(&mirror);

    // one drive of two is enough for `single`: packs with nothing in them go
    let done = json_of(&mut prune(&[&single]));
    assert_eq!(column(&done, "removed"), [0, 192], "the plan names blue and wants nothing there");
    assert_eq!((slots(&folder), folder.join("L1.experts").exists()), (0, false), "empty packs go as a whole");
    assert!(foreign.iter().all(|name| folder.join(name).exists()));
    sound(&single);
}

#[test]
fn prune_never_takes_the_last_copy_and_never_from_the_store() {
    let drives = Drives::new(3, None);
    let store = drives.dir.path().join("store");
    let tiny = prepared::repo("tests/fixtures/oracle/tiny");
    argodrive(["import"]).arg(tiny).arg("--store").arg(&store).assert().success();
    let mut specs = drives.specs.clone();
    specs[2].path = store.clone();
    fs::write(&drives.toml, argodrive::drive::spec::render(&specs)).unwrap();
    let mirror = drives.staged(&store, "full-mirror");
    let dealt = drives.plan(&store, "round-robin");
    let before = snapshot(&store);
    let done = json_of(&mut prune(&[&dealt]));
    assert_eq!(column(&done, "removed"), [128, 128, 0]);
    assert!(done["drives"][2]["untouched"].as_str().unwrap().contains("store"));
    assert_eq!(snapshot(&store), before);

    json_of(stage(&mirror).arg("--json"));
    // now the store is gone: a plan for two drives that wants half of the bank on each
    let two = Drives { specs: specs[..2].to_vec(), ..drives };
    fs::write(&two.toml, argodrive::drive::spec::render(&two.specs)).unwrap();
    let single = two.plan(&store, "single");
    let text = fs::read_to_string(&single).unwrap();
    let mut plan = Plan::parse(&text).unwrap();
    plan.drives = two
        .specs
        .iter()
        .map(|s| argodrive::layout::plan::PlanDrive { name: s.name.clone(), path: s.path.clone() })
        .collect();
    // ten experts of the first layer are to be on nobody's drive but are nowhere else either
    plan.layers.retain(|layer, _| layer.0 > 1);
    fs::write(&single, plan.to_json().unwrap()).unwrap();
    fs::rename(&store, two.dir.path().join("elsewhere")).unwrap();
    let (code, text, remark) = outcome(&mut prune(&[&single]));
    assert_eq!(code, 0, "{remark}");
    has(&remark, &["store", "is not there", "--store"]);
    let done: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(column(&done, "last_copies"), [24, 0], "one copy of layer 1 stays");
    assert_eq!(column(&done, "removed"), [0, 192]);
    assert_eq!(slots(&two.model_folder(0)), 192);
    // and with the store found again, that copy may go
    let done = json_of(prune(&[&single]).arg("--store").arg(two.dir.path().join("elsewhere")));
    assert_eq!(column(&done, "removed"), [24, 0]);
}

/// A store large enough that a kill finds freeing at work: 8 layers of 16 experts of 0.8 MB.
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

#[test]
fn a_kill_while_space_is_freed_loses_nothing_and_the_next_run_ends_it() {
    let drives = Drives::new(2, None);
    let store = large_store(drives.dir.path());
    let mirror = drives.plan(&store, "full-mirror");
    let dealt = drives.plan(&store, "round-robin");
    let id = StoreManifest::open(&store).unwrap().model_id;
    let folder = |index: usize| drive_folder(&drives.specs[index].path, &id);
    let plan = Plan::parse(&fs::read_to_string(&dealt).unwrap()).unwrap();
    let wanted = |index: u8| plan.pieces_on(DriveId(index)).count() as u64;
    let mut inside = 0;
    for round in 0..3u32 {
        json_of(stage(&mirror).arg("--json"));
        let full: u64 = (0..2).map(|i| on_disk(&folder(i))).sum();
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_argodrive"))
            .args(["prune", "--keep"])
            .arg(&dealt)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // the first manifest without the slots is there; then a little later in every round
        let begun = Instant::now();
        while slots(&folder(0)) == 128 && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
        std::thread::sleep(Duration::from_micros(u64::from(round) * 1500));
        let _ = child.kill();
        let killed = child.wait().unwrap().code().is_none();
        let now: u64 = (0..2).map(|i| on_disk(&folder(i))).sum();
        let half_done = killed && (now > full / 2 + (64 << 10) || slots(&folder(1)) == 128);
        inside += u32::from(half_done);
        for index in 0..2 {
            let manifest = DriveManifest::open(&folder(index)).unwrap();
            let report = verify_drive(&folder(index), &manifest, &mut |_| {}).unwrap();
            assert!(report.faults.is_empty(), "{:?}", report.faults.first());
            let have = plan.pieces_on(DriveId(index as u8)).filter(|k| manifest.find_piece(k).is_some()).count() as u64;
            assert_eq!(have, wanted(index as u8), "what the plan needs is there");
        }
        json_of(&mut prune(&[&dealt]));
        for index in 0..2 {
            assert_eq!(slots(&folder(index)), wanted(index as u8));
            let bytes = wanted(index as u8) * DriveManifest::open(&folder(index)).unwrap().slot_bytes;
            assert!(on_disk(&folder(index)) < bytes + (256 << 10), "no space is left behind");
        }
    }
    assert!(inside > 0, "no kill came in time to mean anything");
    sound(&dealt);
}

#[test]
fn a_rate_limit_holds_copies_back_and_says_for_how_long() {
    let drives = Drives::new(2, None);
    let plan = drives.plan(tiny_store(), "round-robin");
    let begun = Instant::now();
    let report = json_of(stage(&plan).args(["--rate", "4MB/s", "--json"]));
    let took = begun.elapsed();
    let bytes = 192 * EXPERT_BYTES;
    assert!(took >= Duration::from_nanos(bytes * 250), "{took:?} for {bytes} bytes");
    let waited = report["waited_ns"].as_u64().unwrap();
    assert!(waited > 0 && u128::from(waited) <= took.as_nanos(), "{waited}");
    assert_eq!(column(&report, "waited_ns").iter().sum::<u64>(), waited);
    sound(&plan);
    let free = json_of(stage(&plan).arg("--json"));
    assert_eq!(free["waited_ns"].as_u64(), Some(0));
    for bad in ["fast", "0MB/s", "200MB"] {
        let (code, _, text) = outcome(stage(&plan).args(["--rate", bad]));
        assert!(code == 2 && text.contains("--rate"), "{text}");
    }
}

#[test]
fn a_dry_run_says_bytes_and_times_where_rates_are_known() {
    let drives = Drives::new(2, None);
    let plan = drives.plan(tiny_store(), "round-robin");
    let (code, text, _) = outcome(stage(&plan).arg("--dry-run"));
    assert_eq!(code, 0);
    assert_eq!(text.matches("unknown rate").count(), 2, "{text}");
    let limited = json_of(stage(&plan).args(["--dry-run", "--json", "--rate", "1MB/s"]));
    let least = limited["drives"][0]["least_s"].as_f64().unwrap();
    assert!((least - 96.0 * EXPERT_BYTES as f64 / 1e6).abs() < 1e-9, "{least}");
    assert!(json_of(stage(&plan).args(["--dry-run", "--json"]))["drives"][0]["least_s"].is_null());
    assert!(drives.specs.iter().all(|d| fs::read_dir(&d.path).unwrap().next().is_none()));
}

#[test]
fn drives_on_one_file_system_share_its_space() {
    let drives = Drives::new(2, None);
    let plan = drives.plan(tiny_store(), "full-mirror");
    let free = argodrive::sys::space::free_bytes(&drives.specs[0].path).unwrap();
    // room for one and a half banks beyond the margin, two are needed
    let margin = free - 192 * SLOT_BYTES * 3 / 2;
    let words = ["drive amber, blue", "needs 6291456 bytes", "has", "--margin"];
    refused(stage(&plan).args(["--margin", &margin.to_string()]), &words);
}

#[test]
fn freeing_waits_for_runs_that_read_and_writers_keep_each_other_out() {
    let drives = Drives::new(2, None);
    let mirror = drives.staged(tiny_store(), "full-mirror");
    let dealt = drives.plan(tiny_store(), "round-robin");
    let own = format!("(pid {}, `", std::process::id());
    let plan = Plan::parse(&fs::read_to_string(&dealt).unwrap()).unwrap();
    let mounts = argodrive::reader::mounts_of(&plan, Some(&drives.specs)).unwrap();
    let reading =
        argodrive::reader::open_drive(&plan, DriveId(1), &mounts[1], &argodrive::reader::ReaderOptions::default())
            .unwrap();
    refused(argodrive(["prune", "--keep"]).arg(&dealt), &["drive blue", "is reading from it", &own]);
    refused(stage(&mirror).arg("--rollback"), &["drive blue", "is reading from it", &own]);
    assert_eq!(slots(&drives.model_folder(1)), 192, "nothing was taken");
    // adding is welcome meanwhile
    fs::remove_file(drives.model_folder(1).join("L3.experts")).unwrap();
    json_of(stage(&mirror).arg("--json"));
    drop(reading);
    let freeing = try_lock(&drives.model_folder(1), false).unwrap().unwrap();
    refused(
        argodrive(["decode", "--prompt", "abc", "--max-new", "2", "--store"])
            .arg(tiny_store())
            .arg("--plan")
            .arg(&dealt),
        &["blue", "freeing space", &own],
    );
    drop(freeing);
    let writing = try_lock(&drives.specs[0].path, false).unwrap().unwrap();
    for command in [&mut stage(&dealt), &mut prune(&[&dealt]), stage(&mirror).arg("--rollback")] {
        refused(command, &["drive amber", "another `argodrive stage`", &own]);
    }
    drop(writing);
    json_of(&mut prune(&[&dealt]));
    assert!(drives.model_folder(0).join(DRIVE_FILE).exists());
}
