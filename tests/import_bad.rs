//! What is said about each kind of bad checkpoint: one line that names the file and the tensor, exit code 2, no store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod checkpoints;

use argodrive::model::checkpoint::Checkpoint;
use checkpoints::{Copy, NORM, PLANE, has, import_ok, refusal, shard_name, tiny};
use serde_json::Value;
use std::fs;
use tempfile::TempDir;

#[test]
fn truncated_shard() {
    let copy = Copy::new();
    let bytes = fs::metadata(copy.file()).unwrap().len();
    fs::File::options().write(true).open(copy.file()).unwrap().set_len(bytes - 1000).unwrap();
    let (expected, actual) = (format!("expected {bytes}"), format!("has {}", bytes - 1000));
    has(&refusal(copy.path()), &["model.safetensors: truncated", &expected, &actual]);
    for short in [100, 5, 0] {
        fs::File::options().write(true).open(copy.file()).unwrap().set_len(short).unwrap();
        has(&refusal(copy.path()), &["model.safetensors: truncated", &format!("has {short};")]);
    }
}

#[test]
fn lfs_pointers() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
    for name in ["model.safetensors", "tiktoken.model", "config.json", "model.safetensors.index.json"] {
        let copy = Copy::new();
        fs::write(copy.path().join(name), pointer).unwrap();
        has(&refusal(copy.path()), &[name, "git-LFS pointer", "git lfs pull", "hf download"]);
    }
}

#[test]
fn offsets_that_overlap_leave_holes_run_backwards_or_out_of_the_file() {
    let end_of = |h: &serde_json::Map<String, Value>| h[NORM]["data_offsets"][1].as_u64().unwrap();
    let shift = |by: i64| {
        Copy::new().edit(|h| {
            let end = end_of(h).checked_add_signed(by).unwrap();
            h[NORM]["data_offsets"] = serde_json::json!([end - 256, end]);
        })
    };
    has(&refusal(shift(-2).path()), &["model.safetensors: tensor", "overlap tensor"]);
    has(&refusal(shift(2).path()), &[NORM, "hole"]);
    has(&refusal(shift(1 << 40).path()), &["lie outside the file", NORM]);
    let backwards = Copy::new().edit(|h| h[NORM]["data_offsets"] = serde_json::json!([900, 800]));
    has(&refusal(backwards.path()), &[NORM, "backwards"]);
    let huge = Copy::new().edit(|h| h[NORM]["data_offsets"] = serde_json::json!([u64::MAX - 256, u64::MAX]));
    has(&refusal(huge.path()), &[NORM, "outside the file"]);
    let longer = Copy::new().edit(|h| h[NORM]["data_offsets"][1] = (end_of(h) + 2).into());
    has(&refusal(longer.path()), &[NORM, "258 bytes", "needs 256"]);
}

#[test]
fn trailing_bytes() {
    let mut copy = Copy::new();
    copy.data.extend([0; 12]);
    let copy = copy.edit(|_| {});
    has(&refusal(copy.path()), &["model.safetensors", "12 bytes after the last tensor"]);
}

#[test]
fn wrong_shape_and_wrong_type() {
    let shape = Copy::new().edit(|h| h[NORM]["shape"] = serde_json::json!([2, 64]));
    has(&refusal(shape.path()), &["model.safetensors", NORM, "[2, 64]", "[128]"]);
    let dtype = Copy::new().edit(|h| h[NORM]["dtype"] = "F16".into());
    has(&refusal(dtype.path()), &["model.safetensors", NORM, "F16", "BF16"]);
    let strange = Copy::new().edit(|h| h[PLANE]["dtype"] = "F3_E2".into());
    has(&refusal(strange.path()), &[PLANE, "F3_E2", "U8"]);
    let deep = Copy::new().edit(|h| h[NORM]["shape"] = serde_json::json!(vec![1; 9]));
    has(&refusal(deep.path()), &["model.safetensors", "more than 8 dimensions"]);
    let huge = Copy::new().edit(|h| h[NORM]["shape"] = serde_json::json!([u64::MAX, 2]));
    has(&refusal(huge.path()), &[NORM, "64 bits"]);
}

#[test]
fn missing_unknown_and_double_tensors() {
    let rename = |from: &str, to: &str| {
        Copy::new().edit(|h| {
            let entry = h.remove(from).unwrap();
            h.insert(to.into(), entry);
        })
    };
    has(&refusal(rename(NORM, "vision_tower.x").path()), &[NORM, "missing"]);
    has(&refusal(rename(PLANE, "mm_projector.x").path()), &[PLANE, "missing"]);
    for stranger in ["model.norm.weight", "language_model.model.layers.2.block_sparse_moe.experts.24.w2.weight_scale"] {
        has(&refusal(rename(PLANE, stranger).path()), &["model.safetensors", stranger, "no such tensor"]);
    }
    let leading = "language_model.model.layers.02.block_sparse_moe.experts.5.w2.weight_scale";
    has(&refusal(rename(PLANE, leading).path()), &[leading, "no such tensor"]);
    let copy = Copy::new();
    let text = copy.header.to_string();
    let double = format!("{},\"{NORM}\":{}}}", &text[..text.len() - 1], copy.header[NORM]);
    let file = [&(double.len() as u64).to_le_bytes(), double.as_bytes(), &copy.data].concat();
    fs::write(copy.file(), file).unwrap();
    has(&refusal(copy.path()), &["model.safetensors", NORM, "twice"]);
}

#[test]
fn vision_tensors_are_counted_and_left_out() {
    let mut copy = Copy::new();
    let at = copy.data.len();
    copy.data.extend([1; 40]);
    let copy = copy.edit(|h| {
        let entry = |a, b| serde_json::json!({"dtype": "F16", "shape": [10], "data_offsets": [a, b]});
        h.insert("vision_tower.blocks.0.x".into(), entry(at, at + 20));
        h.insert("mm_projector.y".into(), entry(at + 20, at + 40));
    });
    let dir = TempDir::new().unwrap();
    let report = import_ok(copy.path(), &dir.path().join("a"));
    assert_eq!(report.vision_skipped, 2);
    assert_eq!(report.manifest.model_id, import_ok(&tiny(), &dir.path().join("b")).manifest.model_id);
}

#[test]
fn what_an_index_can_get_wrong() {
    let copy = Copy::new();
    let good = copy.sharded();
    let index = "model.safetensors.index.json";
    let edit = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut index = good.clone();
        change(index["weight_map"].as_object_mut().unwrap());
        copy.write_index(&index);
        refusal(copy.path())
    };
    has(
        &edit(&|m| m[NORM] = "model-00009-of-000002.safetensors".into()),
        &[index, "model-00009-of-000002", "not in the folder"],
    );
    for outside in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        has(&edit(&|m| m[NORM] = outside.into()), &[index, NORM, "leads out of the folder"]);
    }
    has(&edit(&|m| m[NORM] = shard_name(1).into()), &[&shard_name(2), NORM, &format!("is in {}", shard_name(1))]);
    has(&edit(&|m| drop(m.remove(NORM))), &[&shard_name(2), NORM, "is in no shard"]);
    has(
        &edit(&|m| drop(m.insert("language_model.extra".into(), shard_name(1).into()))),
        &[index, "language_model.extra"],
    );
    // a shard of vision tensors only need not be there
    let mut with_vision = good.clone();
    with_vision["weight_map"]["vision_tower.a"] = "model-00003.safetensors".into();
    copy.write_index(&with_vision);
    assert_eq!(Checkpoint::open(copy.path()).unwrap().skipped_vision(), 1);
    // the index names a tensor in a shard that does not hold it
    copy.write_index(&good);
    let path = copy.path().join(shard_name(2));
    let bytes = fs::read(&path).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(bytes[8..8 + n].to_vec()).unwrap().replace(NORM, "mm_projector.norm");
    fs::write(&path, [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &bytes[8 + n..]].concat()).unwrap();
    has(&refusal(copy.path()), &[&shard_name(2), NORM, "does not hold it"]);
    fs::write(copy.path().join(index), "{\"weight_map\": [").unwrap();
    has(&refusal(copy.path()), &[index, "not a valid index"]);
}

#[test]
fn headers_that_are_none() {
    let copy = Copy::new();
    let with = |length: u64, text: &str| {
        fs::write(copy.file(), [&length.to_le_bytes(), text.as_bytes(), &[0; 64]].concat()).unwrap();
        refusal(copy.path())
    };
    has(&with(u64::MAX, "{}"), &["model.safetensors", "claims 18446744073709551615 bytes"]);
    has(&with(100_000_001, "{}"), &["model.safetensors", "at most 100000000"]);
    has(&with(50_000, "{}"), &["model.safetensors: truncated", "expected 50008"]);
    has(&with(5, "hello"), &["model.safetensors", "does not begin with `{`"]);
    has(&with(7, "{\"a\": 5"), &["model.safetensors", "not a valid safetensors file"]);
    has(&with(9, "{\"a\": 5}\n"), &["model.safetensors", "not a valid safetensors file"]);
    fs::remove_file(copy.file()).unwrap();
    has(&refusal(copy.path()), &["neither model.safetensors nor model.safetensors.index.json"]);
    fs::remove_file(copy.path().join("config.json")).unwrap();
    has(&refusal(copy.path()), &["no config.json here"]);
}

#[test]
fn a_scale_that_is_not_a_number() {
    let mut copy = Copy::new();
    let begin = copy.header[PLANE]["data_offsets"][0].as_u64().unwrap() as usize;
    copy.data[begin + 3 * 3 + 2] = 255; // w2 has 96 / 32 = 3 groups per row
    let copy = copy.edit(|_| {});
    has(&refusal(copy.path()), &["model.safetensors", PLANE, "row 3, group 2", "NaN"]);
}
