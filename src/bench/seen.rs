//! What a run really did, gathered from the counters of the code that did it: the facts that `evidence` judges. Nothing
//! here is taken from the configuration.

use super::affinity::AffinitySeen;
use super::kv::KvSeen;
use super::reference::ReferenceRecord;
use super::sampled::SampledCounts;
use super::snapshots::ResumeRecord;
use crate::decode::generate::{Generation, StopReason};
use crate::decode::guess::GuessesMade;
use crate::decode::sampler::SamplerCounters;
use crate::decode::{ActivationCounts, Decoder, KernelIsa, SessionCounters, SpeculateCounters, TrunkBlocks};
use crate::drive::spec::DriveSpec;
use crate::ids::{DriveId, Extent};
use crate::layout::plan::Plan;
use crate::open::SnapshotCounters;
use crate::reader::{Delivered, ReaderCounters};
use crate::source::BlockCounters;
use crate::source::guess::GuessCountsByDepth;
use crate::store::manifest::{DriveManifest, drive_folder};
use crate::store::trunk::TrunkFacts;
use crate::sys::cache::drop_file;
use crate::sys::cachestat::residency;
use crate::sys::limits::locked_bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::time::SystemTime;

/// Experts sampled on each drive for residency.
const SAMPLES_PER_DRIVE: usize = 64;

/// Facts of one run.
#[derive(Debug, Default)]
pub struct Seen {
    /// The reader's counters; `None` when nothing streamed.
    pub reader: Option<ReaderCounters>,
    /// Experts that a memory source handed out.
    pub resident_leases: u64,
    /// Residency of the sampled extents before and after, where it could be measured.
    pub residency: Option<(Residency, Residency)>,
    /// Matrix products by the instruction set whose code computed them.
    pub kernel_calls: Vec<(KernelIsa, u64)>,
    /// Matrix products by the form of their weights and by what activations were.
    pub activations: ActivationCounts,
    /// Parts of products that each compute thread did, the calling thread's first.
    pub thread_chunks: Vec<u64>,
    /// What was done with the trunk; `None` when no model was run.
    pub trunk: Option<TrunkSeen>,
    /// Where threads were; `None` where the system does not tell.
    pub affinity: Option<AffinitySeen>,
    /// How good the decoder's guesses were, by layers ahead.
    pub guesses: GuessCountsByDepth,
    /// Who in the decoder made them.
    pub guesses_made: GuessesMade,
    /// What was proposed and what came of it; `None` when nobody proposed.
    pub speculation: Option<SpeculateCounters>,
    /// Snapshots written; `None` when nobody wrote any.
    pub snapshots: Option<SnapshotCounters>,
    /// What latent caches took, and what left memory.
    pub kv: KvSeen,
    /// The snapshot that the text went on from.
    pub resumed: Option<ResumeRecord>,
    /// Passes over prompts.
    pub prefill_passes: u64,
    /// Rows of the widest pass over prompts.
    pub widest_rows: u64,
    /// Texts of the widest decode pass.
    pub widest_lanes: u64,
    /// Decode passes of more than one text.
    pub shared_passes: u64,
    /// By prompt.
    pub texts: Vec<TextSeen>,
    /// Control tokens in the prompt, a leading beginning-of-text not counted.
    pub prompt_control_tokens: u64,
    /// What the samplers of all texts did.
    pub sampler: SamplerCounters,
    /// Tokens and times.
    pub generation: Option<Generation>,
    /// What drives had delivered when the prompt had been read.
    pub prefill_delivered: Option<Delivered>,
    /// What was written as a trace; `None` when no read was kept.
    pub traced: Option<Traced>,
    /// What the sampler of devices counted; `None` when it did not run.
    pub sampled: Option<SampledCounts>,
    /// The run from memory, if there was one.
    pub reference: Option<ReferenceRecord>,
    /// It was begun and ended early.
    pub reference_interrupted: bool,
}

/// What became of one text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSeen {
    /// Tokens generated.
    pub generated: usize,
    /// Of these, before the text went on from a snapshot.
    pub resumed: usize,
    /// Why it ended.
    pub stopped: StopReason,
    /// Tokens of text that its session or lane held at the end.
    pub context_used: u64,
    /// What its sampler did.
    pub sampler: SamplerCounters,
}

/// What was done with a trunk in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrunkSeen {
    /// With its bytes, when the model was loaded.
    pub facts: TrunkFacts,
    /// Bytes that the process has locked, as the kernel says; `None` where it does not.
    pub kernel_locked_bytes: Option<u64>,
    /// Blocks that were read; `None` where it was not streamed.
    pub blocks: Option<BlockCounters>,
    /// Blocks that passes asked for.
    pub asked_blocks: u64,
    /// Their bytes.
    pub asked_bytes: u64,
    /// Bytes of a pass that wants logits.
    pub pass_bytes: u64,
    /// Time in which passes waited for blocks.
    pub stall_ns: u64,
    /// Large matrices of bfloat16.
    pub bf16_matrices: u64,
    /// Large matrices of int8 rows.
    pub int8_matrices: u64,
}

impl TrunkSeen {
    /// What passes over a model have done with its trunk until now.
    pub fn of(decoder: &Decoder, blocks: &TrunkBlocks, counters: &SessionCounters) -> Self {
        let (bf16_matrices, int8_matrices) = decoder.matrix_counts();
        Self {
            facts: decoder.trunk_facts(),
            kernel_locked_bytes: locked_bytes(),
            blocks: blocks.counters(),
            asked_blocks: counters.trunk_blocks,
            asked_bytes: counters.trunk_bytes,
            pass_bytes: decoder.blocks().map_or(0, |b| b.pass_bytes(true)),
            stall_ns: counters.total.trunk_stall_ns,
            bf16_matrices,
            int8_matrices,
        }
    }
}

/// Rows of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traced {
    /// Reads.
    pub reads: u64,
    /// Barriers.
    pub barriers: u64,
    /// Choices of routers.
    pub routes: u64,
    /// Reads of blocks of latent caches, beside `reads`.
    pub kv_reads: u64,
}

/// Page-cache residency of a sample of the extents that a run reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residency {
    /// Bytes that were in the page cache.
    pub resident_bytes: u64,
    /// Bytes that were asked about.
    pub asked_bytes: u64,
}

impl Residency {
    /// Share of the sample that was in the page cache.
    pub fn share(&self) -> f64 {
        if self.asked_bytes == 0 { 0.0 } else { self.resident_bytes as f64 / self.asked_bytes as f64 }
    }
}

/// The sampled extents of a run's drives.
pub struct ResidencySample {
    files: Vec<(File, Vec<Extent>)>,
    /// The youngest file's age in seconds, where file times could be read.
    pub youngest_file_s: Option<u64>,
}

impl ResidencySample {
    /// Opens the files that `plan` reads and picks extents evenly over each drive. Drops their pages first, so that a
    /// run starts as cold as this kernel allows; what [`ResidencySample::measure`] then says is the proof.
    pub fn open(plan: &Plan, mounts: &[DriveSpec]) -> Option<Self> {
        let mut files: BTreeMap<PathBuf, (File, Vec<Extent>)> = BTreeMap::new();
        for (index, mount) in (0u8..).zip(mounts) {
            let folder = drive_folder(&mount.path, &plan.model_id);
            let manifest = DriveManifest::open(&folder).ok()?;
            let planned: Vec<_> = plan.pieces_on(DriveId(index)).collect();
            let step = planned.len().div_ceil(SAMPLES_PER_DRIVE).max(1);
            for (at, key) in planned.into_iter().enumerate() {
                let (name, extent) = manifest.locate_piece(&manifest.find_piece(&key)?);
                let path = folder.join(name);
                let entry = match files.entry(path) {
                    std::collections::btree_map::Entry::Occupied(e) => e.into_mut(),
                    std::collections::btree_map::Entry::Vacant(e) => {
                        let file = File::open(e.key()).ok()?;
                        drop_file(&file).ok()?;
                        e.insert((file, Vec::new()))
                    }
                };
                if at % step == 0 {
                    entry.1.push(extent);
                }
            }
        }
        let age = |file: &File| {
            let written = file.metadata().and_then(|m| m.modified()).ok()?;
            SystemTime::now().duration_since(written).ok().map(|d| d.as_secs())
        };
        let youngest_file_s = files.values().filter_map(|(file, _)| age(file)).min();
        Some(Self { files: files.into_values().collect(), youngest_file_s })
    }

    /// A sample of these extents of open files.
    pub fn over(files: Vec<(File, Vec<Extent>)>, youngest_file_s: Option<u64>) -> Self {
        Self { files, youngest_file_s }
    }

    /// Residency now; `None` where the kernel does not tell.
    pub fn measure(&self) -> Option<Residency> {
        let mut sum = Residency::default();
        for (file, extents) in &self.files {
            for &extent in extents {
                let r = residency(file, extent).ok()?;
                sum.resident_bytes += r.resident_bytes;
                sum.asked_bytes += r.asked_bytes;
            }
        }
        Some(sum)
    }
}

/// How many products each instruction set's code has computed.
pub fn kernel_calls(decoder: &Decoder) -> Vec<(KernelIsa, u64)> {
    KernelIsa::ALL.iter().map(|&isa| (isa, decoder.kernel_calls(isa))).collect()
}
