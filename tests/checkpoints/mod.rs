//! Checkpoints for tests: the tiny one of the fixtures, and copies of it that may be damaged.
#![allow(dead_code)]

use argodrive::store::import::{ImportOptions, ImportReport, import};
use argodrive::store::manifest::StoreManifest;
use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub fn tiny() -> PathBuf {
    repo("tests/fixtures/oracle/tiny")
}

pub fn argodrive() -> Command {
    Command::new(env!("CARGO_BIN_EXE_argodrive"))
}

pub fn import_ok(checkpoint: &Path, store: &Path) -> ImportReport {
    import(checkpoint, store, &ImportOptions::default(), &mut |_| {}).unwrap()
}

/// Runs the real binary on a bad checkpoint; returns what it says. Nothing may look finished afterwards.
pub fn refusal(checkpoint: &Path) -> String {
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("store");
    let out =
        argodrive().arg("import").arg(checkpoint).arg("--store").arg(&store).assert().code(2).get_output().clone();
    assert!(out.stdout.is_empty());
    assert!(StoreManifest::open(&store).is_err());
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(text.starts_with("argodrive: error: ") && text.trim_end().lines().count() == 1, "{text}");
    text
}

/// A copy of the tiny checkpoint that a test may damage.
pub struct Copy {
    pub dir: TempDir,
    pub header: Value,
    pub data: Vec<u8>,
}

impl Copy {
    pub fn new() -> Self {
        let dir = TempDir::new().unwrap();
        for entry in fs::read_dir(tiny()).unwrap().flatten() {
            if !entry.file_name().to_string_lossy().starts_with("golden") {
                fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
            }
        }
        let bytes = fs::read(tiny().join("model.safetensors")).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        Self { dir, header, data: bytes[8 + n..].to_vec() }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self) -> PathBuf {
        self.dir.path().join("model.safetensors")
    }

    pub fn edit(mut self, change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Self {
        change(self.header.as_object_mut().unwrap());
        fs::write(self.file(), safetensors_file(&self.header, &self.data)).unwrap();
        self
    }

    /// Makes two shards with an index; returns the index for editing.
    pub fn sharded(&self) -> Value {
        let text = self.header.as_object().unwrap();
        let mut map = serde_json::Map::new();
        for shard in 1..=2u64 {
            let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
            for (name, entry) in text.iter().filter(|(n, _)| *n != "__metadata__") {
                let first = name.contains("layers.0.") || name.contains("layers.1.");
                if first != (shard == 1) {
                    continue;
                }
                let span = entry["data_offsets"].as_array().unwrap();
                let (a, b) = (span[0].as_u64().unwrap() as usize, span[1].as_u64().unwrap() as usize);
                let mut entry = entry.clone();
                entry["data_offsets"] = serde_json::json!([data.len(), data.len() + b - a]);
                data.extend_from_slice(&self.data[a..b]);
                header.insert(name.clone(), entry);
                map.insert(name.clone(), shard_name(shard).into());
            }
            fs::write(self.path().join(shard_name(shard)), safetensors_file(&header.into(), &data)).unwrap();
        }
        fs::remove_file(self.file()).unwrap();
        let index = serde_json::json!({"metadata": {}, "weight_map": map});
        self.write_index(&index);
        index
    }

    pub fn write_index(&self, index: &Value) {
        fs::write(self.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}

pub fn shard_name(shard: u64) -> String {
    format!("model-{shard:05}-of-000002.safetensors")
}

pub fn safetensors_file(header: &Value, data: &[u8]) -> Vec<u8> {
    let text = header.to_string();
    [&(text.len() as u64).to_le_bytes(), text.as_bytes(), data].concat()
}

pub const NORM: &str = "language_model.model.norm.weight";
pub const PLANE: &str = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight_scale";

pub fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}
