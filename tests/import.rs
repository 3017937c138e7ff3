//! Checkpoints in, stores out: what a good checkpoint becomes, and what interrupted imports do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod checkpoints;

use argodrive::ids::{ExpertId, ExpertKey, LayerId};
use argodrive::model::checkpoint::Checkpoint;
use argodrive::source::{Barrier, Phase, StepInfo};
use argodrive::store::identity::model_id;
use argodrive::store::import::{ImportOptions, import};
use argodrive::store::manifest::{DriveManifest, StoreManifest, drive_folder};
use argodrive::store::memory::{InMemory, trunk_of_checkpoint};
use argodrive::store::trunk::Trunk;
use argodrive::store::verify::{verify_drive, verify_trunk};
use assert_cmd::Command;
use checkpoints::{Copy, argodrive, has, import_ok, repo, shard_name, tiny};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use tempfile::TempDir;

#[test]
fn experts_are_byte_for_byte_those_of_the_reference() {
    let dir = TempDir::new().unwrap();
    let report = import_ok(&tiny(), dir.path());
    let golden: Value = serde_json::from_slice(&fs::read(tiny().join("golden.json")).unwrap()).unwrap();
    let files = golden["expert_raw_files"].as_object().unwrap();
    assert_eq!(files.len(), 3);
    let folder = drive_folder(dir.path(), &report.manifest.model_id);
    let drive = DriveManifest::open(&folder).unwrap();
    for (name, want) in files {
        let (layer, expert) = name.strip_suffix(".bin").unwrap()[1..].split_once("-E").unwrap();
        let key = ExpertKey::new(layer.parse().unwrap(), expert.parse().unwrap());
        let (pack, extent) = drive.locate(key.layer, drive.find(key.layer, key.expert).unwrap());
        assert_eq!(extent.len, want["bytes"].as_u64().unwrap());
        let mut bytes = vec![0u8; extent.len as usize];
        fs::File::open(folder.join(pack)).unwrap().read_exact_at(&mut bytes, extent.offset).unwrap();
        let seen: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(seen, want["sha256"].as_str().unwrap(), "{name}");
    }
}

#[test]
fn argo_mini_becomes_a_store_that_reads_back() {
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("deep/er/store");
    let out = argodrive()
        .arg("import")
        .arg(repo("models/argo-mini"))
        .arg("--store")
        .arg(&store)
        .arg("--json")
        .output()
        .unwrap();
    assert!(out.status.success());
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (&json["experts"], &json["experts_written"], &json["expert_bytes"]),
        (&1056.into(), &1056.into(), &26_112.into())
    );
    let manifest = StoreManifest::open(&store).unwrap();
    assert_eq!((manifest.moe_layers.len(), manifest.experts, manifest.expert_bytes), (11, 96, 26_112));
    let folder = drive_folder(&store, &manifest.model_id);
    let drive = DriveManifest::open(&folder).unwrap();
    assert_eq!(model_id(&manifest, &drive), manifest.model_id);
    for layer in &manifest.moe_layers {
        let bytes = fs::metadata(folder.join(format!("L{}.experts", layer.0))).unwrap().len();
        assert_eq!(bytes, 96 * 32_768, "slots are multiples of 16 KiB and the last one is whole");
    }
    let (experts, trunk) =
        (verify_drive(&folder, &drive, &mut |_| {}).unwrap(), verify_trunk(&store, &manifest, &mut |_| {}).unwrap());
    assert_eq!((experts.checked, experts.bytes, experts.faults.len()), (1056, 1056 * 26_112, 0));
    assert_eq!((trunk.checked, trunk.faults.len()), (manifest.trunk.len() as u64, 0));
    let source = Checkpoint::open(&repo("models/argo-mini")).unwrap();
    assert_eq!(source.stop_ids(), [2, 5]);
    let (a, b) = (Trunk::open(&store, &manifest).unwrap(), trunk_of_checkpoint(&source).unwrap());
    for tensor in &manifest.trunk {
        let (a, b) = (a.get(&tensor.name).unwrap(), b.get(&tensor.name).unwrap());
        assert!(a.bytes == b.bytes && a.shape == b.shape, "{}", tensor.name);
    }
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(fs::read(store.join(name)).unwrap(), fs::read(repo("models/argo-mini").join(name)).unwrap());
    }
    assert!(!store.join("import.journal").exists() && !store.join("argodrive/importing").exists());
}

#[test]
fn a_dense_model_has_a_store_without_experts() {
    let dir = TempDir::new().unwrap();
    let manifest = import_ok(&repo("models/argo-mini-draft"), dir.path()).manifest;
    assert_eq!((manifest.expert_bytes, manifest.moe_layers.len()), (0, 0));
    assert_eq!(InMemory::load(dir.path(), &StoreManifest::open(dir.path()).unwrap()).unwrap().resident_bytes(), 0);
}

#[test]
fn memory_hands_over_in_the_order_asked() {
    let dir = TempDir::new().unwrap();
    let manifest = import_ok(&tiny(), dir.path()).manifest;
    let mut memory = InMemory::load(dir.path(), &manifest).unwrap();
    let direct = InMemory::from_checkpoint(&Checkpoint::open(&tiny()).unwrap()).unwrap();
    assert_eq!(memory.resident_bytes(), 192 * 9792);
    let step = StepInfo { step: 0, phase: Phase::Decode, pos: 0, rows: 1 };
    let ask = [ExpertId(23), ExpertId(0), ExpertId(7)];
    for layer in [LayerId(8), LayerId(1)] {
        let mut barrier = Barrier::open(&mut memory, &step, layer, &ask).unwrap();
        for expert in ask {
            let lease = barrier.next_arrival().unwrap().unwrap();
            assert_eq!(lease.expert(), expert);
            assert_eq!(lease.bytes(), direct.expert(ExpertKey { layer, expert }).unwrap());
        }
        assert!(barrier.next_arrival().unwrap().is_none());
    }
    assert!(Barrier::open(&mut memory, &step, LayerId(0), &ask).is_err(), "layer 0 is dense");
    assert!(Barrier::open(&mut memory, &step, LayerId(1), &[ExpertId(24)]).is_err());
}

#[test]
fn a_flipped_bit_is_found_and_placed() {
    let dir = TempDir::new().unwrap();
    let manifest = import_ok(&tiny(), dir.path()).manifest;
    let folder = drive_folder(dir.path(), &manifest.model_id);
    let drive = DriveManifest::open(&folder).unwrap();
    let flip = |path: &Path, at: u64| {
        let file = fs::File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0u8];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    };
    flip(&folder.join("L3.experts"), 5 * drive.slot_bytes + 9791);
    let faults = verify_drive(&folder, &drive, &mut |_| {}).unwrap().faults;
    assert_eq!(faults.len(), 1);
    has(&faults[0].to_string(), &["L3.experts", "expert L3-E5, slot 5, offset 81920", "expected"]);
    has(&InMemory::load(dir.path(), &manifest).err().unwrap().to_string(), &["L3.experts", "slot 5", "offset 81920"]);
    flip(&folder.join("L3.experts"), 5 * drive.slot_bytes + 9792);
    assert_eq!(verify_drive(&folder, &drive, &mut |_| {}).unwrap().faults.len(), 1, "padding does not count");
    fs::remove_file(folder.join("L4.experts")).unwrap();
    assert_eq!(verify_drive(&folder, &drive, &mut |_| {}).unwrap().faults.len(), 1 + 24);
    let tensor = &manifest.trunk[3];
    flip(&dir.path().join("trunk.bin"), tensor.offset + 1);
    let faults = verify_trunk(dir.path(), &manifest, &mut |_| {}).unwrap().faults;
    assert_eq!(faults.len(), 1);
    has(&faults[0].to_string(), &["trunk.bin", &tensor.name, &format!("offset {}", tensor.offset)]);
}

#[test]
fn shards_and_links_make_no_difference() {
    let dir = TempDir::new().unwrap();
    let whole = import_ok(&tiny(), &dir.path().join("a")).manifest.model_id;
    let copy = Copy::new();
    copy.sharded();
    let blobs = TempDir::new().unwrap();
    let link = copy.path().join(shard_name(2));
    fs::rename(&link, blobs.path().join("blob")).unwrap();
    std::os::unix::fs::symlink(blobs.path().join("blob"), &link).unwrap();
    assert_eq!(import_ok(copy.path(), &dir.path().join("b")).manifest.model_id, whole);
}

#[test]
fn one_changed_byte_is_another_model_and_does_not_overwrite() {
    let dir = TempDir::new().unwrap();
    let first = import_ok(&tiny(), dir.path()).manifest;
    let again = import_ok(&tiny(), dir.path());
    assert!(again.was_complete && again.bytes_written == 0 && again.experts_reused == 192);
    let mut copy = Copy::new();
    let end = copy.data.len();
    copy.data[end - 1] ^= 1;
    let copy = copy.edit(|_| {});
    let error = import(copy.path(), dir.path(), &ImportOptions::default(), &mut |_| {}).unwrap_err().to_string();
    has(&error, &["already holds another model", "not overwritten"]);
    assert_eq!(StoreManifest::open(dir.path()).unwrap(), first);
    let other = TempDir::new().unwrap();
    assert_ne!(import_ok(copy.path(), other.path()).manifest.model_id, first.model_id);
}

#[test]
fn the_header_reader_agrees_with_the_formats_own_library() {
    for folder in [tiny(), repo("models/argo-mini"), repo("models/argo-mini-draft")] {
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let path = folder.join("model.safetensors");
        let ours = argodrive::model::safetensors::read_header(&fs::File::open(&path).unwrap(), &path).unwrap();
        assert_eq!(ours.len(), theirs.len());
        for tensor in ours {
            let view = theirs.tensor(&tensor.name).unwrap();
            let shape: Vec<u64> = view.shape().iter().map(|d| *d as u64).collect();
            assert_eq!((shape, format!("{:?}", view.dtype())), (tensor.shape, tensor.dtype));
            let (a, n) = (tensor.extent.offset as usize, tensor.extent.len as usize);
            assert!(view.data() == &bytes[a..a + n], "{}", tensor.name);
        }
    }
}

#[test]
fn targets_that_cannot_be_used() {
    let copy = Copy::new();
    let run = |store: &Path| {
        let out =
            argodrive().arg("import").arg(copy.path()).arg("--store").arg(store).assert().code(2).get_output().clone();
        String::from_utf8(out.stderr).unwrap()
    };
    has(&run(copy.path()), &["the checkpoint's own folder"]);
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("config.json"), "mine").unwrap();
    has(&run(dir.path()), &["config.json", "in the way"]);
    assert_eq!(fs::read(dir.path().join("config.json")).unwrap(), b"mine");
    argodrive().args(["import", "x"]).assert().code(2);
    has(&run(&dir.path().join("config.json/x")), &["config.json"]);
}

#[test]
fn a_failed_write_keeps_what_was_done() {
    let dir = TempDir::new().unwrap();
    let (checkpoint, store) = (dir.path().join("checkpoint"), dir.path().join("store"));
    argodrive().args(["synth", "--experts", "64", "--as-checkpoint"]).arg(&checkpoint).assert().success();
    // a file size limit below one pack but above the trunk (in units of 512 or 1024 bytes) stands in for a full disk
    let binary = env!("CARGO_BIN_EXE_argodrive");
    let script = r#"trap '' XFSZ; ulimit -f 12000; exec "$0" import "$1" --store "$2""#;
    let out = Command::new("sh").args(["-c", script, binary]).args([&checkpoint, &store]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    has(&String::from_utf8(out.stderr).unwrap(), &["L1.experts", "what is done is kept", "run the same command again"]);
    has(&StoreManifest::open(&store).unwrap_err().to_string(), &["import was not finished"]);
    let report = import_ok(&checkpoint, &store);
    assert_eq!((report.trunk_reused, report.trunk_written), (report.manifest.trunk.len() as u64, 0));
    assert_eq!((report.experts_reused, report.experts_written), (0, 192));
}

#[test]
fn an_unfinished_import_of_another_checkpoint_is_not_continued() {
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("store");
    let copy = Copy::new();
    let stop = |done: u64| {
        let mut bytes = 0;
        let options = ImportOptions { batch_bytes: 1, ..ImportOptions::default() };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = import(copy.path(), &store, &options, &mut |at| {
                bytes = at.done_bytes;
                assert!(bytes < done, "stop here");
            });
        }))
        .unwrap_err();
    };
    stop(4_000_000);
    let before = fs::read(store.join("import.journal")).unwrap();
    let shard = fs::File::options().write(true).open(copy.file()).unwrap();
    let age = shard.metadata().unwrap().modified().unwrap();
    shard.set_modified(age + std::time::Duration::from_secs(5)).unwrap();
    let error = import(copy.path(), &store, &ImportOptions::default(), &mut |_| {}).unwrap_err().to_string();
    has(&error, &["another checkpoint", "model.safetensors", "modification time"]);
    assert_eq!(fs::read(store.join("import.journal")).unwrap(), before);
    shard.set_modified(age).unwrap();
    let report = import_ok(copy.path(), &store);
    assert!(report.experts_reused > 50 && report.experts_reused + report.experts_written == 192);
    assert_eq!(report.trunk_written, 0);
    assert_eq!(report.manifest.model_id, import_ok(&tiny(), &dir.path().join("b")).manifest.model_id);
}

#[test]
fn killed_at_any_progress_an_import_ends_with_the_same_model() {
    let dir = TempDir::new().unwrap();
    let whole = import_ok(&tiny(), &dir.path().join("whole")).manifest;
    let store = dir.path().join("store");
    let copy = Copy::new();
    let mut random = fastrand::Rng::with_seed(11);
    let mut last = 0;
    loop {
        // a panic in the callback leaves everything as a kill at that moment would
        let limit = random.u64(1..60);
        let mut calls = 0;
        let options = ImportOptions { batch_bytes: random.u64(1..100_000), ..ImportOptions::default() };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            import(copy.path(), &store, &options, &mut |_| {
                calls += 1;
                assert!(calls < limit, "killed");
            })
        }));
        if let Ok(report) = result {
            let report = report.unwrap();
            assert!(report.experts_reused > 0);
            break assert_eq!(StoreManifest::open(&store).unwrap().model_id, whole.model_id);
        }
        has(&StoreManifest::open(&store).unwrap_err().to_string(), &["import was not finished"]);
        let journal = fs::read(store.join("import.journal")).unwrap().len();
        assert!(journal >= last, "nothing that was done is forgotten");
        last = journal;
    }
}

#[test]
fn killed_between_the_last_steps() {
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("store");
    let copy = Copy::new();
    let mut saved = Vec::new();
    let journal = store.join("import.journal");
    let id = import(copy.path(), &store, &ImportOptions { batch_bytes: 1, ..ImportOptions::default() }, &mut |_| {})
        .unwrap()
        .manifest
        .model_id;
    // begin again to get a journal that names everything: it is kept aside at the last progress report
    fs::remove_dir_all(&store).unwrap();
    import(copy.path(), &store, &ImportOptions { batch_bytes: 1, ..ImportOptions::default() }, &mut |at| {
        if at.done_bytes == at.total_bytes {
            saved = fs::read(&journal).unwrap();
        }
    })
    .unwrap();
    // everything copied, the last expert not yet in the journal: nothing else is copied again
    fs::write(&journal, &saved).unwrap();
    fs::rename(drive_folder(&store, &id), drive_folder(&store, "importing")).unwrap();
    fs::remove_file(store.join("store.json")).unwrap();
    fs::remove_file(store.join("config.json")).unwrap();
    fs::write(store.join("store.json.77.tmp"), "half").unwrap();
    let report = import_ok(copy.path(), &store);
    assert_eq!((report.experts_written, report.trunk_written, report.manifest.model_id.as_str()), (1, 0, id.as_str()));
    assert!(!store.join("store.json.77.tmp").exists());
    // store.json written, journal not yet removed
    fs::write(&journal, &saved).unwrap();
    assert!(import_ok(copy.path(), &store).was_complete);
    assert!(!journal.exists());
}

#[test]
fn killed_after_the_packs_got_their_name() {
    let dir = TempDir::new().unwrap();
    let id = import_ok(&tiny(), &dir.path().join("whole")).manifest.model_id;
    let store = dir.path().join("store");
    let (unnamed, named) = (drive_folder(&store, "importing"), drive_folder(&store, &id));
    // a folder in the way stops the import between its last copy and the naming
    fs::create_dir_all(named.join("x")).unwrap();
    let error = import(&tiny(), &store, &ImportOptions::default(), &mut |_| {}).unwrap_err().to_string();
    has(&error, &[&id, "already here", "move it away"]);
    fs::remove_dir_all(&named).unwrap();
    fs::rename(&unnamed, &named).unwrap();
    has(&StoreManifest::open(&store).unwrap_err().to_string(), &["import was not finished"]);
    let report = import_ok(&tiny(), &store);
    assert_eq!((report.bytes_written, report.experts_reused, report.manifest.model_id), (0, 192, id));
    assert!(!unnamed.exists());
}

#[test]
fn synthetic_checkpoints_are_reproducible_and_import() {
    let dir = TempDir::new().unwrap();
    let make = |name: &str, more: &[&str]| {
        let to = dir.path().join(name);
        argodrive().args([
            "synth",
            "--layers",
            "3",
            "--experts",
            "5",
            "--top-k",
            "2",
            "--latent",
            "96",
            "--width",
            "64",
        ]);
        let base = [
            "synth",
            "--layers",
            "3",
            "--experts",
            "5",
            "--top-k",
            "2",
            "--latent",
            "96",
            "--width",
            "64",
            "--hidden",
            "48",
        ];
        argodrive().args(base).args(["--vocab", "600"]).args(more).arg("--as-checkpoint").arg(&to).assert().success();
        to
    };
    let id = |checkpoint: &Path| import_ok(checkpoint, &checkpoint.join("store")).manifest.model_id;
    let per_layer = make("a", &[]);
    assert!(per_layer.join("model-00004-of-000004.safetensors").exists());
    let first = id(&per_layer);
    assert_eq!(id(&make("b", &["--shards", "1"])), first, "cutting into files changes no value");
    assert_eq!(id(&make("c", &["--shards", "7"])), first);
    assert_ne!(id(&make("d", &["--seed", "2"])), first);
    let source = Checkpoint::open(&per_layer).unwrap();
    assert_eq!((source.experts(), source.expert_bytes(), source.config().vocab_size), (5, 9792, 600));
    let out =
        argodrive().args(["synth", "--width", "33", "--as-checkpoint"]).arg(dir.path().join("x")).assert().code(2);
    has(&String::from_utf8(out.get_output().stderr.clone()).unwrap(), &["moe_intermediate_size", "multiple of 32"]);
    let out = argodrive().args(["synth", "--as-checkpoint"]).arg(&per_layer).assert().code(2);
    has(&String::from_utf8(out.get_output().stderr.clone()).unwrap(), &["not empty"]);
}
