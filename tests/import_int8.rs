//! Stores whose trunk is int8: what becomes of the matrices, that everything says so, and that nothing is lost on the way.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod checkpoints;

use argodrive::store::identity::model_id;
use argodrive::store::import::{ImportOptions, import};
use argodrive::store::manifest::{DriveManifest, StoreManifest, drive_folder};
use argodrive::store::trunk::Trunk;
use argodrive::store::trunk_format::TrunkFormat;
use argodrive::store::verify::verify_trunk;
use checkpoints::{argodrive, has, import_ok, repo, tiny};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use tempfile::TempDir;

/// argo-mini with an int8 trunk, by the command; its JSON.
fn import_int8(store: &Path) -> Value {
    let out = argodrive()
        .arg("import")
        .arg(repo("models/argo-mini"))
        .arg("--store")
        .arg(store)
        .args(["--trunk", "int8", "--json"])
        .output();
    let out = out.unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

const LABEL: &str = "trunk int8 (not weight-exact)";

#[test]
fn an_int8_trunk_is_another_model_that_says_so_everywhere() {
    let dir = TempDir::new().unwrap();
    let (exact, store) = (dir.path().join("exact"), dir.path().join("int8"));
    let bf16 = import_ok(&repo("models/argo-mini"), &exact).manifest;
    let said = import_int8(&store);
    assert_eq!((said["trunk_format"].as_str(), said["trunk_label"].as_str()), (Some("int8"), Some(LABEL)));
    let manifest = StoreManifest::open(&store).unwrap();
    assert_eq!((manifest.version, bf16.version), (2, 1));
    assert_ne!(manifest.model_id, bf16.model_id);
    let drive = DriveManifest::open(&drive_folder(&store, &manifest.model_id)).unwrap();
    assert_eq!(model_id(&manifest, &drive), manifest.model_id);
    let error = manifest.trunk_error.unwrap();
    assert!(error.rows == 16 && error.same_argmax > 12, "{error:?}");
    assert!(error.largest_difference > 0.0 && error.relative() < 0.2, "not exact, but near: {error:?}");
    // every matrix is codes and scales, everything else as it was
    let (a, b) = (Trunk::open(&exact, &bf16).unwrap(), Trunk::open(&store, &manifest).unwrap());
    let mut turned = 0;
    for tensor in &manifest.trunk {
        let (a, b) = (a.get(&tensor.name).unwrap(), b.get(&tensor.name).unwrap());
        if a.dtype == b.dtype {
            assert!(a.bytes == b.bytes && !tensor.name.ends_with("_proj.weight") || a.shape[0] == 1, "{}", tensor.name);
            continue;
        }
        turned += 1;
        let (rows, cols) = (b.shape[0] as usize, b.shape[1] as usize);
        assert_eq!(b.bytes.len(), rows * (cols + 4));
        let scale = |r: usize| f32::from_le_bytes(b.bytes[rows * cols + 4 * r..][..4].try_into().unwrap());
        for (at, w) in a.bytes.chunks_exact(2).enumerate() {
            let exact = f32::from_bits(u32::from(u16::from_le_bytes([w[0], w[1]])) << 16);
            let kept = scale(at / cols) * f32::from(b.bytes[at].cast_signed());
            assert!((exact - kept).abs() <= scale(at / cols) * 0.500_01, "{} {at}", tensor.name);
        }
    }
    assert!(turned > 20, "{turned}");
    let routers = manifest.trunk.iter().filter(|t| t.name.ends_with(".block_sparse_moe.gate.weight"));
    assert!(routers.clone().count() > 0 && routers.clone().all(|t| t.dtype == bf16.trunk[0].dtype));
    // the same again: complete; with the other format: refused
    let again = import_int8(&store);
    assert_eq!((again["was_complete"].as_bool(), &again["trunk_error"]), (Some(true), &said["trunk_error"]));
    let other =
        import(&repo("models/argo-mini"), &store, &ImportOptions::default(), &mut |_| {}).unwrap_err().to_string();
    has(&other, &["its trunk is int8, not bf16", "--trunk int8"]);
    let run = argodrive()
        .args(["decode", "--prompt", "hello", "--max-new", "3", "--allow-fallback", "--json", "--store"])
        .arg(&store)
        .output()
        .unwrap();
    let record: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(record["trunk_label"].as_str(), Some(LABEL), "{}", String::from_utf8_lossy(&run.stderr));
    let trunk = &record["trunk"];
    assert_eq!((trunk["format"].as_str(), trunk["int8_matrices"].as_u64()), (Some("int8"), Some(turned)));
    let text = argodrive()
        .args(["decode", "--prompt", "hello", "--max-new", "3", "--allow-fallback", "--resident", "--store"])
        .arg(&store)
        .output()
        .unwrap();
    has(&String::from_utf8_lossy(&text.stderr).replace('\n', " "), &[LABEL, "logits of 16 tokens"]);
    let sound = argodrive().arg("verify").arg(&store).output().unwrap();
    has(&String::from_utf8_lossy(&sound.stdout), &[LABEL]);
}

#[test]
fn a_flipped_bit_of_an_int8_trunk_is_found_and_an_interrupted_import_goes_on() {
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("store");
    let options = ImportOptions { batch_bytes: 1, trunk: TrunkFormat::Int8 };
    let mut left = 30;
    let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        import(&tiny(), &store, &options, &mut |_| {
            left -= 1;
            assert!(left > 0, "stop here");
        })
    }));
    assert!(stopped.is_err());
    let other = import(&tiny(), &store, &ImportOptions::default(), &mut |_| {}).unwrap_err().to_string();
    has(&other, &["its trunk becomes int8, not bf16"]);
    let report = import(&tiny(), &store, &options, &mut |_| {}).unwrap();
    assert!(report.trunk_reused > 0 && report.trunk_written > 0);
    let whole = dir.path().join("whole");
    assert_eq!(import(&tiny(), &whole, &options, &mut |_| {}).unwrap().manifest.trunk, report.manifest.trunk);
    assert!(verify_trunk(&store, &report.manifest, &mut |_| {}).unwrap().faults.is_empty());
    let tensor = report.manifest.trunk.iter().find(|t| t.name.ends_with("o_proj.weight")).unwrap();
    let file = fs::File::options().read(true).write(true).open(store.join("trunk.bin")).unwrap();
    let mut byte = [0u8];
    // its last byte is of a scale
    let at = tensor.offset + tensor.shape[0] * (tensor.shape[1] + 4) - 1;
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    let faults = verify_trunk(&store, &report.manifest, &mut |_| {}).unwrap().faults;
    assert_eq!(faults.len(), 1);
    has(&faults[0].to_string(), &["trunk.bin", &format!("tensor {}", tensor.name), "expected"]);
}
