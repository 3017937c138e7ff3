//! `argodrive adopt`: a folder with one file per expert becomes a drive where it lies, byte for byte as it was.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::store::adopt::adopt;
use argodrive::store::manifest::{Container, DriveManifest, StoreManifest, drive_folder};
use argodrive::store::trunk_format::TrunkFormat;
use assert_cmd::Command;
use prepared::{argodrive, damage, has, ids, json_of, mini_store, policy, refused, repo, snapshot};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A folder `experts` with a file for every expert of argo-mini.
fn files(dir: &TempDir) -> PathBuf {
    let folder = dir.path().join("experts");
    fs::create_dir(&folder).unwrap();
    let manifest = StoreManifest::open(mini_store()).unwrap();
    let from = drive_folder(mini_store(), &manifest.model_id);
    let drive = DriveManifest::open(&from).unwrap();
    for (&layer, row) in &drive.layers {
        for entry in row {
            let (pack, extent) = drive.locate(layer, entry);
            let mut bytes = vec![0; extent.len as usize];
            fs::File::open(from.join(pack)).unwrap().read_exact_at(&mut bytes, extent.offset).unwrap();
            fs::write(folder.join(format!("L{}-E{}.bin", layer.0, entry.expert.0)), bytes).unwrap();
        }
    }
    folder
}

/// Copies of the files that a checkpoint has beside its experts: the trunk in a shard of its own, the experts in one that
/// is not there.
fn trunk_only(dir: &TempDir) -> PathBuf {
    let to = dir.path().join("checkpoint");
    fs::create_dir(&to).unwrap();
    let from = repo("models/argo-mini");
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let all: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let (mut header, mut data, mut map) = (serde_json::Map::new(), Vec::new(), serde_json::Map::new());
    for (name, entry) in all.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let expert = name.contains(".experts.");
        map.insert(name.clone(), if expert { "experts.safetensors" } else { "trunk.safetensors" }.into());
        if !expert {
            let span: Vec<usize> = serde_json::from_value(entry["data_offsets"].clone()).unwrap();
            let mut entry = entry.clone();
            entry["data_offsets"] = serde_json::json!([data.len(), data.len() + span[1] - span[0]]);
            data.extend_from_slice(&bytes[8 + n + span[0]..8 + n + span[1]]);
            header.insert(name.clone(), entry);
        }
    }
    let text = Value::Object(header).to_string();
    let shard = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &data].concat();
    fs::write(to.join("trunk.safetensors"), shard).unwrap();
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    fs::write(to.join("model.safetensors.index.json"), index.to_string()).unwrap();
    to
}

fn golden(index: usize) -> Value {
    let text = fs::read(repo("tests/fixtures/oracle/argo-mini.golden.json")).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["prompts"][index].clone()
}

fn decode(store: &Path) -> Command {
    let prompt = golden(0)["prompt"].as_str().unwrap().to_string();
    let count = ids(&golden(0)["greedy"]).len().to_string();
    let mut command = argodrive(["decode", "--json", "--store"]);
    command.arg(store).args(["--prompt", &prompt, "--max-new", &count]);
    command
}

fn adopting(experts: &Path, checkpoint: &Path) -> Command {
    let mut command = argodrive(["adopt"]);
    command.arg(experts).arg("--checkpoint").arg(checkpoint);
    command
}

#[test]
fn an_adopted_folder_decodes_in_place_and_can_be_staged_from() {
    let dir = prepared::folder();
    let (experts, checkpoint) = (files(&dir), trunk_only(&dir));
    fs::write(experts.join("L1-E96.bin"), "of another model").unwrap();
    let before = snapshot(&experts);
    let report = json_of(adopting(&experts, &checkpoint).arg("--json"));
    let store = dir.path().join("argodrive-store");
    let id = StoreManifest::open(mini_store()).unwrap().model_id;
    assert_eq!(report["model_id"], id.as_str(), "the same model, whatever its experts lie in");
    assert_eq!((&report["digested"], &report["reused"], &report["strangers"]), (&1056.into(), &0.into(), &1.into()));
    let mut after = snapshot(&experts);
    assert!(after.remove(Path::new("drive.json")).is_some());
    assert!(after == before, "no file is changed, moved or added but drive.json");
    assert_eq!(DriveManifest::open(&experts).unwrap().container, Container::Files);

    // files of 26,112 bytes end before the 4096 that direct reads are rounded up to
    let want = ids(&golden(0)["greedy"]);
    let direct = json_of(decode(&store).arg("--buffer-bytes").arg("4MiB"));
    assert_eq!(ids(&direct["token_ids"]), want);
    argodrive(["verify"]).arg(&store).assert().success();

    // the folder's parent is a drive, too; a second drive is staged from the files as packs
    fs::create_dir(dir.path().join("other")).unwrap();
    let toml = dir.path().join("drives.toml");
    fs::write(&toml, "[[drive]]\nname = \"files\"\npath = \".\"\n[[drive]]\nname = \"packs\"\npath = \"other\"\n")
        .unwrap();
    let plan = dir.path().join("plan.json");
    let mut command = argodrive(["plan", "--store"]);
    command.arg(&store).arg("--drives").arg(&toml).arg("--policy").arg(policy("full-mirror")).arg("--out").arg(&plan);
    // one folder inside the other is refused, so the second drive lies beside it
    let (code, _, stderr) = prepared::outcome(&mut command);
    assert_eq!(code, 2);
    has(&stderr, &["lies inside"]);
    let beside = prepared::folder();
    let text = format!(
        "[[drive]]\nname = \"files\"\npath = {:?}\n[[drive]]\nname = \"packs\"\npath = {:?}\n",
        dir.path(),
        beside.path()
    );
    fs::write(&toml, text).unwrap();
    command.assert().success();
    argodrive(["stage"]).arg(&plan).assert().success();
    let both = json_of(decode(&store).arg("--plan").arg(&plan));
    assert_eq!(ids(&both["token_ids"]), want);
    for drive in both["drives"].as_array().unwrap() {
        assert!(drive["reads"].as_u64().unwrap() > 0, "{drive}");
    }

    // adopting again changes nothing and takes the digests anew, because nothing else proves the files
    let again = json_of(adopting(&experts, &checkpoint).arg("--json"));
    assert_eq!((&again["model_id"], &again["digested"]), (&report["model_id"], &1056.into()));

    // a trunk of another format would be written over this one
    let mut other = adopting(&experts, &checkpoint);
    refused(other.args(["--trunk", "int8"]), &["its trunk is bf16", "--trunk bf16"]);
    argodrive(["verify"]).arg(&store).assert().success();
}

#[test]
fn what_is_missing_or_of_the_wrong_size_is_named_before_anything_is_written() {
    let dir = prepared::folder();
    let (experts, checkpoint) = (files(&dir), repo("models/argo-mini"));
    let name = |layer: u16, expert: u16| experts.join(format!("L{layer}-E{expert}.bin"));
    let kept = fs::read(name(3, 7)).unwrap();
    fs::remove_file(name(3, 7)).unwrap();
    fs::remove_file(name(11, 95)).unwrap();
    refused(&mut adopting(&experts, &checkpoint), &["2 of 1056 expert files are missing", "L3-E7.bin", "L11-E95.bin"]);
    fs::write(name(3, 7), &kept[..kept.len() - 1]).unwrap();
    fs::write(name(11, 95), &kept).unwrap();
    refused(&mut adopting(&experts, &checkpoint), &["26112 bytes of an expert", "L3-E7.bin (26111 bytes)"]);
    fs::write(name(3, 7), &kept).unwrap();
    assert!(!experts.join("drive.json").exists() && !dir.path().join("argodrive-store").exists());

    refused(&mut adopting(&experts, &repo("models/argo-mini-draft")), &["dense"]);
    let tiny = repo("tests/fixtures/oracle/tiny");
    refused(&mut adopting(&experts, &tiny), &["9792 bytes of an expert"]);
    refused(&mut adopting(&dir.path().join("no"), &checkpoint), &["no"]);
    let lost = trunk_only(&dir);
    fs::remove_file(lost.join("trunk.safetensors")).unwrap();
    refused(&mut adopting(&experts, &lost), &["embed_tokens", "the trunk comes from the checkpoint"]);

    // a scale that is no number: plane w1.weight_scale follows the codes of w1
    let mut bad = kept.clone();
    bad[128 * 128 / 2] = 255;
    fs::write(name(3, 7), &bad).unwrap();
    refused(&mut adopting(&experts, &checkpoint), &["L3-E7.bin", "layers.3.", "experts.7.", "255 (NaN)"]);
    // another byte is another model, and the store that is there is not overwritten
    fs::write(name(3, 7), &kept).unwrap();
    adopting(&experts, &checkpoint).assert().success();
    damage(&name(3, 7), 5);
    refused(&mut adopting(&experts, &checkpoint), &["another model", "not overwritten"]);
}

#[test]
fn an_interrupted_adoption_goes_on_and_forgets_files_that_changed() {
    let dir = prepared::folder();
    let (experts, checkpoint) = (files(&dir), repo("models/argo-mini"));
    let store = dir.path().join("store");
    let total = std::cell::Cell::new(0);
    let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = adopt(&experts, &checkpoint, &store, TrunkFormat::Bf16, 1, &mut |at| {
            total.set(at.total_bytes);
            assert!(at.done_bytes < at.total_bytes - 100 * 26_112, "stop here");
        });
    }));
    assert!(stopped.is_err());
    assert!(!experts.join("drive.json").exists(), "nothing half-made looks whole");
    has(&StoreManifest::open(&store).unwrap_err().to_string(), &["not finished"]);
    refused(
        &mut argodrive(["import", "--store", store.to_str().unwrap(), checkpoint.to_str().unwrap()]),
        &["another command"],
    );
    let touched = fs::File::options().write(true).open(experts.join("L1-E0.bin")).unwrap();
    touched.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(9)).unwrap();
    let report = adopt(&experts, &checkpoint, &store, TrunkFormat::Bf16, 1 << 20, &mut |_| {}).unwrap();
    assert!(report.reused > 800 && report.digested > 100, "{} {}", report.reused, report.digested);
    assert_eq!(report.reused + report.digested, 1056);
    assert_eq!(report.manifest.model_id, StoreManifest::open(mini_store()).unwrap().model_id);
    assert_eq!(ids(&json_of(&mut decode(&store))["token_ids"]), ids(&golden(0)["greedy"]));
}
