//! The KV tier of a run: the settings, who owns the drive that blocks go to, its reads in a trace, and what a record says of it.

use super::config::{ConfigError, RunConfig};
use super::run::RunSpec;
use crate::clock::Clock;
use crate::decode::generate::Generation;
use crate::decode::{KvCounters, KvPlan, KvTier};
use crate::drive::spec::{DriveSpec, device_number};
use crate::ids::DriveId;
use crate::open::{KvLimit, KvPlace, Model, OpenError, drive_of};
use crate::reader::ReaderHandle;
use crate::reader::kv_file::{KvFileCounters, KvHandle};
use crate::trace::header::KV_DRIVE;
use crate::trace::log::{TraceBuffer, TraceDrive, TraceError};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Reads of blocks that a trace keeps at most; it takes memory as they come.
const MAX_TRACED: u64 = 1 << 24;

/// How much memory latent caches may take, and where rows go beyond that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvOptions {
    /// Bytes of latent caches that are resident at most, all texts together; 0 = as much as they need.
    pub kv_ram_bytes: u64,
    /// Folder of the file for the others; without one, the store.
    pub kv_dir: Option<PathBuf>,
}

impl KvOptions {
    /// Where the file goes.
    pub fn folder(&self, store: &Path) -> PathBuf {
        self.kv_dir.clone().unwrap_or_else(|| store.to_path_buf())
    }
}

/// Settings that cannot go together.
pub(super) fn check(config: &RunConfig) -> Result<(), ConfigError> {
    if config.kv.kv_dir.is_some() && config.kv.kv_ram_bytes == 0 {
        let why = "--kv-dir does nothing without --kv-ram; give it, or leave both out";
        return Err(ConfigError::Contradiction(why.into()));
    }
    Ok(())
}

/// What a run's caches are held to.
pub fn limit_of(config: &RunConfig) -> KvLimit {
    KvLimit { ram_bytes: config.kv.kv_ram_bytes, trial_rows: config.draft.rows() }
}

/// Tokens that the texts of a run have at most.
pub(super) fn longest(config: &RunConfig, prompts: impl Iterator<Item = usize>) -> usize {
    prompts.max().unwrap_or(0).saturating_add(config.max_new)
}

/// Gives `kv` its file, where rows have to leave memory. With `traced`, its reads are kept for a trace.
pub fn open(
    model: &Model,
    config: &RunConfig,
    kv: &mut KvTier,
    (longest, clock, traced): (usize, Clock, bool),
    reader: Option<(&ReaderHandle, &[DriveSpec])>,
) -> Result<Option<KvHandle>, OpenError> {
    let Some(plan) = kv.plan().copied() else { return Ok(None) };
    let folder = config.kv.folder(&model.folder);
    let on = reader.and_then(|(handle, mounts)| Some((handle, drive_of(&folder, mounts)?)));
    let drives = reader.map_or(0, |(_, mounts)| mounts.len());
    let drive = DriveId(u8::try_from(on.map_or(drives, |(_, drive)| drive)).unwrap_or(u8::MAX));
    // rows of proposals look at blocks once more each time
    let rows = config.draft.rows().max(1) as u64;
    let asked = plan.asked_blocks(0, longest.min(plan.text_blocks.saturating_mul(plan.block_rows)));
    let parts = plan.stored_bytes.div_ceil(256 * 1024);
    let room = asked.saturating_mul(rows).saturating_mul(parts).saturating_add(1024).min(MAX_TRACED);
    let place = KvPlace {
        folder: &folder,
        longest,
        pace: on.and_then(|(handle, drive)| handle.pace(drive)),
        traced: (drive, if traced { usize::try_from(room).unwrap_or(0) } else { 0 }),
    };
    model.open_kv(kv, &place, &config.reader, clock)
}

/// What became of the tier in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvSeen {
    /// What passes counted.
    pub passes: KvCounters,
    /// What the file counted; `None` where there was none.
    pub file: Option<KvFileCounters>,
}

/// Adds the reads of blocks to a trace: they stand in the order in which they ended, and belong to no barrier. Returns the drive to
/// be named beside the others, if they came from one that holds no experts, and how many there were.
pub(super) fn add_to_trace(
    trace: &mut TraceBuffer,
    kv: Option<&KvHandle>,
    drives: &[TraceDrive],
) -> Result<(Option<TraceDrive>, u64), TraceError> {
    let Some(kv) = kv else { return Ok((None, 0)) };
    let (counters, reads) = (kv.counters(), kv.take_reads());
    if counters.lost_reads > 0 {
        return Err(TraceError::Overflow {
            reads: counters.lost_reads,
            barriers: 0,
            read_capacity: reads.len(),
            barrier_capacity: trace.capacity().barriers,
        });
    }
    let count = reads.len() as u64;
    let id = reads.first().map(|r| r.drive).filter(|id| id.index() >= drives.len());
    trace.add_reads(reads);
    let device_number = device_number(kv.folder()).unwrap_or(0);
    let own = |id| TraceDrive {
        id,
        name: KV_DRIVE.into(),
        path: kv.folder().to_path_buf(),
        emulated: counters.emulated,
        device_number,
    };
    Ok((id.map(own), count))
}

/// Bytes of blocks that came from a device under one of the run's drives.
pub(super) fn bytes_of(spec: &RunSpec<'_>, kv: Option<&KvHandle>) -> u64 {
    let Some(kv) = kv else { return 0 };
    let device = |path: &Path| device_number(path).ok();
    let own = device(kv.folder());
    let mut mounts = spec.streamed.iter().flat_map(|(_, mounts)| *mounts);
    let counters = kv.counters();
    match mounts.any(|m| own.is_some() && device(&m.path) == own) {
        true => counters.read_bytes + counters.copied_bytes,
        false => 0,
    }
}

/// The KV tier of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvRecord {
    /// Where rows went that were not resident; `None` where all were.
    pub folder: Option<PathBuf>,
    /// Bytes that might be resident.
    pub ram_bytes: u64,
    /// Most bytes that were, buffers for blocks that come back included.
    pub peak_bytes: u64,
    /// Rows of a block.
    pub block_rows: usize,
    /// Rows that left memory.
    pub spilled_rows: u64,
    /// Blocks and bytes that they were written in.
    pub written_blocks: u64,
    /// See `written_blocks`.
    pub written_bytes: u64,
    /// Blocks that attention asked for.
    pub asked_blocks: u64,
    /// Reads for them, and their bytes.
    pub reads: u64,
    /// See `reads`.
    pub read_bytes: u64,
    /// Bytes of them that were read for nothing.
    pub unused_bytes: u64,
    /// Blocks whose reads began before the turn of the layer that asks for them, and those of them that it then asked for. Records of
    /// before there were any have none.
    #[serde(default)]
    pub ahead_blocks: u64,
    /// See `ahead_blocks`.
    #[serde(default)]
    pub ahead_used: u64,
    /// Bytes read for snapshots, apart from the others.
    pub copied_bytes: u64,
    /// Time in which passes waited for blocks to come back.
    pub wait_ns: u64,
    /// Time in which they waited for blocks to be written.
    pub write_ns: u64,
    /// Both while decoding, for each token after the first: what the tier added to its latency.
    pub wait_per_token_ns: u64,
    /// Reads and writes went past the page cache.
    pub direct: bool,
    /// The drive's pace is emulated.
    pub emulated: bool,
}

impl KvRecord {
    /// From what was counted in a run; `None` where nothing was asked for and nothing done.
    pub(super) fn of_run(
        config: &RunConfig,
        seen: &KvSeen,
        (plan, file): (Option<KvPlan>, Option<&KvHandle>),
        generation: &Generation,
    ) -> Option<Self> {
        let ram_bytes = config.kv.kv_ram_bytes;
        if ram_bytes == 0 && seen.passes.spilled_rows == 0 {
            return None;
        }
        let passes = (generation.token_ids.len().saturating_sub(generation.resumed) as u64).saturating_sub(1);
        let wait_per_token_ns = generation.decode_kv_stall_ns / passes.max(1);
        let (folder, block_rows) = (file.map(|f| f.folder().to_path_buf()), plan.map_or(0, |p| p.block_rows));
        let (c, f) = (&seen.passes, seen.file.unwrap_or_default());
        Some(Self {
            folder,
            ram_bytes,
            peak_bytes: c.peak_bytes,
            block_rows,
            spilled_rows: c.spilled_rows,
            written_blocks: f.written_blocks,
            written_bytes: f.written_bytes,
            asked_blocks: c.asked_blocks,
            reads: f.reads,
            read_bytes: f.read_bytes,
            unused_bytes: f.unused_bytes,
            ahead_blocks: f.ahead_blocks,
            ahead_used: f.ahead_used,
            copied_bytes: f.copied_bytes,
            wait_ns: c.wait_ns,
            write_ns: c.write_ns,
            wait_per_token_ns,
            direct: f.direct,
            emulated: f.emulated,
        })
    }
}
