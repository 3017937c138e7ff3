//! Run records: what was asked, what was seen, on which machine; written atomically, one folder per experiment
//! (DESIGN.md section 5). Data and paths only; `run` and `ladder` fill them.

use super::activations::{self, ActivationsRecord};
use super::config::RunConfig;
use super::environment::Environment;
use super::evidence::Evidence;
use super::guards::Guard;
use super::kv::KvRecord;
use super::reference::ReferenceRecord;
use super::seen::TrunkSeen;
use super::snapshots::{ResumeRecord, SnapshotRecord};
use super::speculation::SpeculationRecord;
use super::texts::SetRecord;
use super::trouble::{FAULTS_LABEL, TroubleRecord};
use crate::decode::generate::Rates;
use crate::replay::verdict::Verdict;
use crate::store::manifest::StoreManifest;
use crate::store::trunk_format::{TrunkError, TrunkFormat};
use crate::sys::durable::write_atomic;
use crate::trace::windows::SamplerFigures;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Version of record files that this program writes.
pub const RECORD_VERSION: u32 = 1;

/// A record could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The results folder or a file in it.
    #[error("results: {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It was written in another format.
    #[error("results: {}: has version {version}, this argodrive reads up to {newest}; use the one that wrote it, or another results folder", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
        /// The newest that is read.
        newest: u32,
    },
    /// The record itself.
    #[error("results: {}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// One drive's part in a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveRecord {
    /// Name from drives.toml.
    pub name: String,
    /// Reads it served.
    pub reads: u64,
    /// Expert bytes it delivered.
    pub payload_bytes: u64,
    /// Bytes asked of it, rounded up to its alignment.
    pub read_bytes: u64,
    /// Barriers whose last read it served.
    pub landed_last: u64,
    /// Reads of copies that are not the primary.
    pub replica_reads: u64,
    /// Bytes of prefetch reads that were there when they were demanded.
    #[serde(default)]
    pub prefetch_useful_bytes: u64,
    /// Bytes of prefetch reads that were demanded while they were on their way.
    #[serde(default)]
    pub prefetch_late_bytes: u64,
    /// Bytes of prefetch reads for nothing.
    #[serde(default)]
    pub prefetch_wasted_bytes: u64,
    /// Median completion latency (clat) in nanoseconds.
    pub clat_p50_ns: u64,
    /// 99th percentile of clat in nanoseconds.
    pub clat_p99_ns: u64,
    /// Whether its pace is emulated.
    pub emulated: bool,
    /// Its completion latencies as an HDR histogram (V2, base64).
    pub clat_hdr: String,
}

/// Where a drive was during a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountRecord {
    /// Drive name.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// Block devices under it, by name and sectors; empty when unknown.
    pub device: String,
    /// Its file system; `None` when unknown.
    pub file_system: Option<String>,
    /// Emulated pace, if any, as in drives.toml.
    pub emulate: Option<String>,
    /// Faults of drives.toml, if any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<String>,
}

/// What reading the prompt asked of drives. A prompt of at most `prefill_rows` tokens is one pass, in which every layer asks
/// for each expert once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillRecord {
    /// Experts asked for, summed over layers and passes.
    pub experts: u64,
    /// Distinct ones.
    pub distinct: u64,
    /// Expert bytes that drives delivered.
    pub payload_bytes: u64,
    /// Bytes of prefetch reads for nothing.
    pub wasted_bytes: u64,
    /// `(payload_bytes + wasted_bytes) / (distinct * expert bytes)`; below 1 with a cache. `None` = nothing was asked for.
    pub amplification: Option<f64>,
}

/// The trunk of a run's model: in which format, where it was, and what was read of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrunkRecord {
    /// Its format.
    pub format: TrunkFormat,
    /// What must be said beside every figure of the run; `None` for the released weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// What the format does to the logits, as it was measured at import.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<TrunkError>,
    /// Bytes of its tensors.
    pub payload_bytes: u64,
    /// Large matrices of bfloat16 that were loaded.
    pub bf16_matrices: u64,
    /// Large matrices of int8 rows that were loaded.
    pub int8_matrices: u64,
    /// Bytes in a mapping of its file.
    pub mapped_bytes: u64,
    /// Bytes read into memory of the program's own.
    pub loaded_bytes: u64,
    /// Of these, locked there.
    pub locked_bytes: u64,
    /// Bytes read in passes, apart from those of experts.
    pub streamed_bytes: u64,
    /// Reads of them.
    pub streamed_reads: u64,
    /// Bytes that one pass reads.
    pub pass_bytes: u64,
    /// Time in which passes waited for them.
    pub trunk_stall_ns: u64,
}

impl TrunkRecord {
    /// Of a store and what was seen of its trunk.
    pub fn of(store: &StoreManifest, seen: &TrunkSeen) -> Self {
        let blocks = seen.blocks.unwrap_or_default();
        Self {
            format: store.trunk_format,
            label: store.trunk_format.label().map(str::to_string),
            error: store.trunk_error,
            payload_bytes: seen.facts.payload_bytes,
            bf16_matrices: seen.bf16_matrices,
            int8_matrices: seen.int8_matrices,
            mapped_bytes: seen.facts.mapped_bytes,
            loaded_bytes: seen.facts.loaded_bytes,
            locked_bytes: seen.facts.locked_bytes,
            streamed_bytes: blocks.bytes,
            streamed_reads: blocks.reads,
            pass_bytes: seen.pass_bytes,
            trunk_stall_ns: seen.stall_ns,
        }
    }
}

/// One measured run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRecord {
    /// Format version.
    pub version: u32,
    /// What this run was called.
    pub arm: String,
    /// The model.
    pub model_id: String,
    /// The model's trunk; those of older programs are mapped and bfloat16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trunk: Option<TrunkRecord>,
    /// What activations were in products; those of older programs are f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activations: Option<ActivationsRecord>,
    /// Digest of the model's config.json.
    pub config_digest: String,
    /// Hash of the plan, paths left out.
    pub plan_hash: String,
    /// When it started, UTC.
    pub started: String,
    /// Its speed.
    pub rates: Rates,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Passes over the prompt, 0 for a text that went on from a snapshot; records of older programs do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_passes: Option<u64>,
    /// The snapshot that the text went on from; `None` for one that began with its prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed: Option<ResumeRecord>,
    /// What snapshots took; `None` when none were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<SnapshotRecord>,
    /// The KV tier; `None` when latent caches might take what they needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvRecord>,
    /// Tokens generated, those before it went on included.
    pub generated_tokens: usize,
    /// Hash of the generated ids.
    pub token_hash: String,
    /// Share of decode wall time in which compute waited for experts.
    pub io_wait_share: f64,
    /// Mean wait per barrier while decoding, in nanoseconds.
    pub barrier_mean_ns: u64,
    /// What reading the prompt asked of drives; `None` when experts did not stream.
    #[serde(default)]
    pub prefill: Option<PrefillRecord>,
    /// What was proposed and what came of it; `None` when nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationRecord>,
    /// What the texts of a prompt set shared, and each of them; `None` for one prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<SetRecord>,
    /// Where the time of decoding went; its `drive` counts `drives` from 0. `None` when no token was decoded.
    #[serde(default)]
    pub verdict: Option<Verdict>,
    /// The same run with every expert in memory, if it was asked for.
    #[serde(default)]
    pub reference: Option<ReferenceRecord>,
    /// Per drive.
    pub drives: Vec<DriveRecord>,
    /// Whether any drive's pace was emulated: then no figure here is a speed of the hardware.
    pub emulated: bool,
    /// What went wrong with drives, on purpose or not; `None` if nothing did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<TroubleRecord>,
    /// Every setting: asked, seen, verdict.
    pub settings: Vec<Evidence>,
    /// Every guard: what it saw, and whether it held.
    pub guards: Vec<Guard>,
    /// Why the run does not count, if it does not.
    pub rejected: Vec<String>,
    /// Settings that a file or a flag gave, as opposed to defaults.
    pub given: Vec<String>,
    /// The resolved configuration; `--config <this file>` runs it again.
    pub config: RunConfig,
    /// Digests of files that decided what it did, by what they are; those of older programs have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub inputs: BTreeMap<String, String>,
    /// Where the drives were.
    pub mounts: Vec<MountRecord>,
    /// What sampling the drives' devices did and cost, if the run did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampler: Option<SamplerFigures>,
    /// The machine.
    pub environment: Environment,
}

impl RunRecord {
    /// What must be said of its trunk; `None` for the released weights.
    pub fn trunk_label(&self) -> Option<&'static str> {
        self.trunk.as_ref().and_then(|t| t.format.label())
    }

    /// Reads failed on purpose, or were to.
    pub fn has_faults(&self) -> bool {
        self.trouble.as_ref().is_some_and(TroubleRecord::is_injected)
    }

    /// What must be said beside every figure of it: of faults on purpose, of its trunk and of its activations.
    pub fn label(&self) -> Option<String> {
        let faults = self.has_faults().then(|| FAULTS_LABEL.to_string());
        let trunk = self.trunk.as_ref().map(|t| t.format).unwrap_or_default();
        let inexact = activations::label(trunk, self.config.model.activations);
        let all: Vec<String> = faults.into_iter().chain(inexact).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

/// Hash of a token sequence, for comparing runs.
pub fn token_hash(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&bytes))
}

/// Now in UTC, to the second.
pub fn utc_now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// Makes `<root>/<experiment>/<utc>-<rev>` (with a counter when it exists), so that a bad path fails before anything
/// is measured.
pub fn new_folder(root: &Path, experiment: &str) -> Result<PathBuf, RecordError> {
    let stamp = utc_now().replace([':', '-'], "");
    let base = root.join(experiment);
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |source| RecordError::Io { path, source }
    };
    std::fs::create_dir_all(&base).map_err(io(&base))?;
    for attempt in 0..1000 {
        let suffix = if attempt == 0 { String::new() } else { format!("-{attempt}") };
        let folder = base.join(format!("{stamp}-{}{suffix}", super::environment::revision()));
        match std::fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
            Err(source) => return Err(RecordError::Io { path: folder, source }),
        }
    }
    Err(RecordError::Format { path: base, reason: "a thousand runs in one second; clean the folder up".into() })
}

/// Writes any record as indented JSON.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), RecordError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| RecordError::Format { path: path.to_path_buf(), reason: e.to_string() })?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|source| RecordError::Io { path: folder.to_path_buf(), source })?;
    }
    write_atomic(path, (text + "\n").as_bytes()).map_err(|source| RecordError::Io { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_never_collide_and_bad_paths_fail_early() {
        let dir = tempfile::tempdir().unwrap();
        let a = new_folder(dir.path(), "ladder").unwrap();
        let b = new_folder(dir.path(), "ladder").unwrap();
        assert_ne!(a, b);
        let file = dir.path().join("plain");
        std::fs::write(&file, "x").unwrap();
        let e = new_folder(&file, "ladder").unwrap_err().to_string();
        assert!(e.contains("plain"), "{e}");
    }

    #[test]
    fn token_hash_depends_on_order() {
        assert_ne!(token_hash(&[1, 2]), token_hash(&[2, 1]));
    }
}
