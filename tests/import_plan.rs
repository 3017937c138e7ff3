//! `argodrive import --plan`: from a checkpoint straight onto drives, while it arrives and while it is being deleted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::store::import::{ImportOptions, import};
use argodrive::store::manifest::{DriveManifest, StoreManifest, drive_folder};
use assert_cmd::Command;
use prepared::{Drives, argodrive, has, ids, json_of, outcome, policy, refused, repo};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tempfile::TempDir;

/// argo-mini cut into shards of a layer each, as the release is; the golden texts hold for it.
fn sharded(to: &Path) {
    fs::create_dir_all(to).unwrap();
    let from = repo("models/argo-mini");
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let all: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let mut shards: std::collections::BTreeMap<String, (serde_json::Map<String, Value>, Vec<u8>)> = Default::default();
    let mut map = serde_json::Map::new();
    for (name, entry) in all.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let layer = name.split("layers.").nth(1).map(|r| r.split('.').next().unwrap());
        // one expert of layer 3 is cut apart over two shards
        let layer =
            if name.ends_with("layers.3.block_sparse_moe.experts.9.w3.weight_packed") { Some("4") } else { layer };
        let shard = format!("model-{}.safetensors", layer.unwrap_or("rest"));
        let (header, data) = shards.entry(shard.clone()).or_default();
        let span: Vec<usize> = serde_json::from_value(entry["data_offsets"].clone()).unwrap();
        let mut entry = entry.clone();
        entry["data_offsets"] = serde_json::json!([data.len(), data.len() + span[1] - span[0]]);
        data.extend_from_slice(&bytes[8 + n + span[0]..8 + n + span[1]]);
        header.insert(name.clone(), entry);
        map.insert(name.clone(), shard.into());
    }
    for (name, (header, data)) in shards {
        let text = Value::Object(header).to_string();
        fs::write(to.join(name), [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &data].concat()).unwrap();
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    fs::write(to.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

fn shards(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let mut shards: Vec<PathBuf> = files.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    shards.sort();
    shards
}

struct Setup {
    dir: TempDir,
    drives: Drives,
    plan: PathBuf,
    store: PathBuf,
    checkpoint: PathBuf,
}

/// A sharded checkpoint, drives, and a plan that was made from its config.json alone.
fn setup(drives: usize, policy_name: &str) -> Setup {
    let dir = prepared::folder();
    let drives = Drives::new(drives, None);
    let checkpoint = dir.path().join("checkpoint");
    sharded(&checkpoint);
    let plan = dir.path().join("plan.json");
    let alone = dir.path().join("alone");
    fs::create_dir(&alone).unwrap();
    fs::copy(checkpoint.join("config.json"), alone.join("config.json")).unwrap();
    let mut command = argodrive(["plan", "--checkpoint"]);
    command.arg(&alone).arg("--drives").arg(&drives.toml).arg("--policy").arg(policy(policy_name));
    command.arg("--out").arg(&plan).assert().success();
    let store = dir.path().join("store");
    Setup { dir, drives, plan, store, checkpoint }
}

impl Setup {
    fn import(&self, more: &[&str]) -> Command {
        let mut command = argodrive(["import"]);
        command.arg(&self.checkpoint).arg("--store").arg(&self.store).arg("--plan").arg(&self.plan).args(more);
        command
    }

    /// The golden text, decoded from the plan's drives.
    fn decodes(&self) {
        let golden = fs::read(repo("tests/fixtures/oracle/argo-mini.golden.json")).unwrap();
        let golden = serde_json::from_slice::<Value>(&golden).unwrap()["prompts"][0].clone();
        let want = ids(&golden["greedy"]);
        let mut command = argodrive(["decode", "--json", "--store"]);
        command.arg(&self.store).arg("--plan").arg(&self.plan);
        command.args(["--prompt", golden["prompt"].as_str().unwrap(), "--max-new", &want.len().to_string()]);
        let text = json_of(&mut command);
        assert_eq!(ids(&text["token_ids"]), want);
        for drive in text["drives"].as_array().unwrap() {
            assert!(drive["reads"].as_u64().unwrap() > 0, "{drive}");
        }
    }
}

/// The id that a plain import gives the same checkpoint.
fn plain_id(dir: &Path) -> String {
    let store = dir.join("plain");
    import(&repo("models/argo-mini"), &store, &ImportOptions::default(), &mut |_| {}).unwrap().manifest.model_id
}

#[test]
fn experts_go_straight_to_the_drives_and_the_plan_learns_the_model() {
    let s = setup(2, "round-robin");
    let text = fs::read_to_string(&s.plan).unwrap();
    has(&text, &["\"model_id\":\"geometry"]);
    refused(&mut argodrive(["stage", s.plan.to_str().unwrap()]), &["argodrive import", "--plan"]);
    let id = plain_id(s.dir.path());
    let report = json_of(&mut s.import(&["--json"]));
    assert_eq!((report["model_id"].as_str(), &report["experts_written"]), (Some(id.as_str()), &1056.into()));
    assert_eq!(report["dropped"], serde_json::json!([]));
    assert_eq!(shards(&s.checkpoint).len(), 13, "nothing is deleted unless that is asked for");
    has(&fs::read_to_string(&s.plan).unwrap(), &[&id]);
    // no second copy: the store has no expert, each drive its half
    let own = DriveManifest::open(&drive_folder(&s.store, &id)).unwrap();
    assert_eq!((own.layers.len(), fs::read_dir(drive_folder(&s.store, &id)).unwrap().count()), (0, 1));
    for spec in &s.drives.specs {
        let drive = DriveManifest::open(&drive_folder(&spec.path, &id)).unwrap();
        assert_eq!(drive.layers.values().map(Vec::len).sum::<usize>(), 528);
        assert_eq!(fs::metadata(drive_folder(&spec.path, &id).join("L1.experts")).unwrap().len(), 48 * 32_768);
    }
    let plain = StoreManifest::open(&s.dir.path().join("plain")).unwrap();
    let mut placed = StoreManifest::open(&s.store).unwrap();
    placed.name.clone_from(&plain.name);
    assert_eq!(placed, plain, "the trunk lies as in any other store");
    argodrive(["verify"]).arg(&s.plan).assert().success();
    argodrive(["verify"]).arg(&s.store).assert().success();
    s.decodes();
    for flag in ["--json", "--resident"] {
        let mut command = argodrive(["decode", "--prompt", "a", "--max-new", "1", flag, "--store"]);
        let (code, _, notes) = outcome(command.arg(&s.store));
        assert_eq!(code, 2);
        has(&notes, &["holds 0 of the model's 1056 experts", "--plan"]);
    }
    has(&outcome(&mut s.import(&[])).1, &["already complete"]);
}

#[test]
fn an_int8_trunk_goes_with_a_plan_but_not_with_deleted_shards() {
    let s = setup(2, "round-robin");
    refused(&mut s.import(&["--trunk", "int8", "--drop-shards"]), &["--trunk int8", "--drop-shards deletes"]);
    let report = json_of(&mut s.import(&["--trunk", "int8", "--json"]));
    assert_eq!(report["trunk_label"], "trunk int8 (not weight-exact)");
    assert_eq!(report["trunk_error"]["rows"], 16);
    assert_ne!(report["model_id"], plain_id(s.dir.path()));
    let verified = json_of(argodrive(["verify", "--json"]).arg(&s.store));
    assert_eq!(verified["drives"][0]["name"], "trunk int8 (not weight-exact)");
    let mut command = argodrive(["decode", "--json", "--prompt", "a", "--max-new", "2", "--store"]);
    let text = json_of(command.arg(&s.store).arg("--plan").arg(&s.plan));
    assert_eq!(
        (text["trunk_label"].as_str(), &text["trunk"]["error"]),
        (Some("trunk int8 (not weight-exact)"), &report["trunk_error"])
    );
    refused(&mut s.import(&[]), &["its trunk is int8, not bf16"]);
}

#[test]
fn a_store_that_is_a_drive_of_the_plan_keeps_its_part_and_copies_go_to_every_home() {
    let mut s = setup(1, "full-mirror");
    let toml = s.dir.path().join("drives.toml");
    s.store = s.dir.path().join("store");
    fs::create_dir(&s.store).unwrap();
    let names = [("store", &s.store), ("amber", &s.drives.specs[0].path)];
    let text: String = names.iter().map(|(n, p)| format!("[[drive]]\nname = \"{n}\"\npath = {p:?}\n")).collect();
    fs::write(&toml, text).unwrap();
    let mut command = argodrive(["plan", "--checkpoint"]);
    command.arg(&s.checkpoint).arg("--drives").arg(&toml).arg("--policy").arg(policy("full-mirror"));
    command.arg("--out").arg(&s.plan).assert().success();
    let report = json_of(&mut s.import(&["--json"]));
    let bytes = report["bytes_written"].as_u64().unwrap();
    assert!(bytes >= 2 * 1056 * 26_112, "{bytes}: two copies of every expert, and the trunk");
    let id = report["model_id"].as_str().unwrap();
    assert_eq!(DriveManifest::open(&drive_folder(&s.store, id)).unwrap().layers.len(), 11);
    s.decodes();
}

#[test]
fn a_download_is_followed_and_its_shards_are_deleted_behind_it() {
    let s = setup(2, "round-robin");
    let away = s.dir.path().join("away");
    fs::create_dir(&away).unwrap();
    let all = shards(&s.checkpoint);
    for shard in &all {
        fs::rename(shard, away.join(shard.file_name().unwrap())).unwrap();
    }
    let index = s.checkpoint.join("model.safetensors.index.json");
    fs::rename(&index, away.join("index")).unwrap();
    let (code, _, stderr) = outcome(&mut s.import(&["--follow", "--follow-timeout", "1ms"]));
    assert_eq!(code, 2, "{stderr}");
    fs::rename(away.join("index"), &index).unwrap();
    refused(&mut s.import(&[]), &["13 shards are not whole", "model-0.safetensors (not there)", "--follow"]);
    refused(&mut s.import(&["--follow", "--follow-timeout", "1ms"]), &["nothing arrived for 1ms"]);

    let child = std::process::Command::new(env!("CARGO_BIN_EXE_argodrive"))
        .arg("import")
        .arg(&s.checkpoint)
        .arg("--store")
        .arg(&s.store)
        .arg("--plan")
        .arg(&s.plan)
        .args(["--follow", "--drop-shards", "--follow-timeout", "2m", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    for shard in &all {
        // half of it first, as a download that is under way
        let bytes = fs::read(away.join(shard.file_name().unwrap())).unwrap();
        fs::write(shard, &bytes[..bytes.len() / 2]).unwrap();
        // the last one comes when the first have been taken and deleted
        while shard == all.last().unwrap() && s.checkpoint.join("model-3.safetensors").exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut file = fs::File::options().append(true).open(shard).unwrap();
        std::io::Write::write_all(&mut file, &bytes[bytes.len() / 2..]).unwrap();
    }
    let out = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success(), "{stderr}");
    has(&stderr, &["waiting for model-", "model-3.safetensors: safe on the drives and read back; deleted"]);
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((report["experts_written"].as_u64(), report["dropped"].as_array().unwrap().len()), (Some(1056), 13));
    assert_eq!(report["model_id"], plain_id(s.dir.path()).as_str());
    assert!(shards(&s.checkpoint).is_empty());
    s.decodes();
}

#[test]
fn killed_anywhere_nothing_is_lost_although_shards_go() {
    let s = setup(2, "full-mirror");
    let id = plain_id(s.dir.path());
    let copy = s.dir.path().join("copy");
    sharded(&copy);
    let mut random = fastrand::Rng::with_seed(5);
    let (mut kills, mut killed_with_shards_gone) = (0, 0);
    loop {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_argodrive"))
            .arg("import")
            .arg(&s.checkpoint)
            .arg("--store")
            .arg(&s.store)
            .arg("--plan")
            .arg(&s.plan)
            .args(["--drop-shards", "--batch", "300K"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let before = shards(&s.checkpoint).len();
        // most kills by progress, so that a slow machine sees as many as a fast one: after one more shard has gone
        let wait = Duration::from_millis(random.u64(0..40));
        let ended = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if shards(&s.checkpoint).len() < before {
                std::thread::sleep(wait);
                child.kill().unwrap();
                break child.wait().unwrap().code().map(|_| child.wait().unwrap());
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let left = shards(&s.checkpoint);
        if let Some(status) = ended {
            let out = child.wait_with_output().unwrap();
            assert!(status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            break;
        }
        kills += 1;
        killed_with_shards_gone += usize::from(left.len() < 13 && !left.is_empty());
        // whatever is still there is as it was
        for shard in left {
            assert!(fs::read(&shard).unwrap() == fs::read(copy.join(shard.file_name().unwrap())).unwrap());
        }
        if !s.store.join("store.json").exists() {
            has(&StoreManifest::open(&s.store).unwrap_err().to_string(), &["not finished"]);
        }
        assert!(kills < 100);
    }
    assert!(
        killed_with_shards_gone >= 3,
        "{kills} kills, {killed_with_shards_gone} between the first and last deletion"
    );
    assert!(shards(&s.checkpoint).is_empty());
    assert_eq!(StoreManifest::open(&s.store).unwrap().model_id, id);
    argodrive(["verify"]).arg(&s.plan).assert().success();
    argodrive(["verify"]).arg(&s.store).assert().success();
    s.decodes();
}

#[test]
fn what_may_not_be_deleted_or_does_not_fit_is_refused_before_a_byte_is_written() {
    let s = setup(2, "round-robin");
    let there = shards(&s.checkpoint);
    let blob = s.dir.path().join("blob");
    fs::rename(&there[2], &blob).unwrap();
    std::os::unix::fs::symlink(&blob, &there[2]).unwrap();
    refused(&mut s.import(&["--drop-shards"]), &["--drop-shards", there[2].to_str().unwrap(), "is a link"]);
    assert!(blob.exists() && shards(&s.checkpoint).len() == 13);
    json_of(&mut s.import(&["--json"]));

    let other = setup(2, "round-robin");
    let (code, _, stderr) = outcome(&mut argodrive(["import", "x", "--store", "y", "--drop-shards"]));
    assert_eq!(code, 2);
    has(&stderr, &["--plan"]);
    // a plan of another geometry, and one that is bound already
    let mut wrong = argodrive(["import"]);
    wrong.arg(repo("tests/fixtures/oracle/tiny")).arg("--store").arg(&other.store).arg("--plan").arg(&other.plan);
    refused(&mut wrong, &["another model", "plan --checkpoint"]);
    let mut bound = argodrive(["import"]);
    bound.arg(&other.checkpoint).arg("--store").arg(&other.store).arg("--plan").arg(&s.plan);
    refused(&mut bound, &["is for model", "plan --checkpoint"]);
    assert!(StoreManifest::open(&other.store).is_err());
    // begun with one plan, gone on with another
    fs::remove_file(shards(&other.checkpoint).last().unwrap()).unwrap();
    refused(&mut other.import(&[]), &["model-rest.safetensors (not there)"]);
    let mirror = other.drives.toml.with_file_name("mirror.json");
    let mut command = argodrive(["plan", "--checkpoint"]);
    command.arg(&other.checkpoint).arg("--drives").arg(&other.drives.toml).arg("--policy").arg(policy("full-mirror"));
    command.arg("--out").arg(&mirror).assert().success();
    let mut again = argodrive(["import"]);
    again.arg(&other.checkpoint).arg("--store").arg(&other.store).arg("--plan").arg(&mirror);
    refused(&mut again, &["the plan is another"]);
    refused(
        &mut argodrive([
            "import",
            "--store",
            other.store.to_str().unwrap(),
            repo("models/argo-mini").to_str().unwrap(),
        ]),
        &["another command"],
    );
    // a drive that was damaged meanwhile keeps its shard
    let third = setup(1, "single");
    fs::rename(third.checkpoint.join("model-7.safetensors"), third.dir.path().join("seven")).unwrap();
    refused(&mut third.import(&[]), &["model-7.safetensors (not there)"]);
    let packs = prepared::only_entry(&third.drives.specs[0].path.join("argodrive"));
    prepared::damage(&packs.join("L2.experts"), 5 * 32_768 + 77);
    let said = refused(&mut third.import(&["--drop-shards"]), &["L2.experts", "did not keep", "Its shard is kept"]);
    assert!(third.checkpoint.join("model-2.safetensors").exists(), "{said}");
}
