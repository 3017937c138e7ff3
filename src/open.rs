//! The only assembly: a store becomes a loaded model, a plan and drives become a source of experts. `bench` and `cli`
//! build everything through here, so that a run is put together in one way only.

mod draft;
mod kv;
mod snapshots;

pub use draft::{DraftError, DraftModel, draft_identity, measure_draft};
pub use kv::{KvLimit, KvPlace, drive_of};
pub use snapshots::{OtherText, Resumable, SnapshotCounters, SnapshotError, SnapshotWriter};

use crate::clock::Clock;
use crate::decode::kv::KvTooSmall;
use crate::decode::sampler::SamplerError;
use crate::decode::{Batch, DecodeError, Decoder, GuessSource, KernelIsa, Session, SessionOptions, TrunkBlocks};
use crate::drive::spec::DriveSpec;
use crate::io::paced::PacedDrive;
use crate::knob::{self, Knob};
use crate::layout::plan::{Plan, PlanDrive, PlanError};
use crate::layout::planner::{self, Catalog};
use crate::layout::policy::Policy;
use crate::model::chat::ChatTemplate;
use crate::model::checkpoint::{CONFIG_FILE, CheckpointError, parse_config, read_bounded, read_stop_ids};
use crate::model::config::ModelConfig;
use crate::model::tokenizer::{Tokenizer, TokenizerError};
use crate::reader::trunk_stream::{TrunkFile, TrunkStream};
use crate::reader::{ExpertReader, PrefetchPolicy, ReaderError, ReaderOptions};
pub use crate::source::NoExperts;
use crate::store::import::ImportError;
use crate::store::manifest::{DriveManifest, ManifestError, StoreManifest, TRUNK_FILE, drive_folder};
use crate::store::memory::InMemory;
use crate::store::trunk::{Trunk, TrunkResidency};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest `config.json` that is read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Name of the one drive of a run without a plan.
pub const STORE_DRIVE: &str = "store";

/// A run could not be put together.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// `store.json` or `trunk.bin`.
    #[error(transparent)]
    Store(#[from] ManifestError),
    /// `config.json` of the store.
    #[error(transparent)]
    Config(#[from] CheckpointError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The weights.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The drives.
    #[error(transparent)]
    Reader(#[from] ReaderError),
    /// Experts that are asked of the store, but went onto drives when it was imported.
    #[error("the store {} holds {have} of the model's {want} experts: the others went onto the drives of a plan when it was \
             imported; give that plan with --plan, or import again without one", folder.display())]
    Elsewhere {
        /// The store.
        folder: PathBuf,
        /// Experts that it holds.
        have: usize,
        /// Experts of the model.
        want: usize,
    },
    /// A draft checkpoint's tensors.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The draft model.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// What draws its proposals.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A snapshot.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The memory for latent caches.
    #[error(transparent)]
    Kv(#[from] KvTooSmall),
    /// Plan and store do not belong together.
    #[error("the plan is for model {plan}, the store {} holds {store}; plan again with this store", folder.display())]
    OtherModel {
        /// Model of the plan.
        plan: String,
        /// Model of the store.
        store: String,
        /// The store.
        folder: PathBuf,
    },
}

/// A loaded model: weights, tokenizer and the tokens that end its text.
pub struct Model {
    /// The store's folder.
    pub folder: PathBuf,
    /// `store.json`.
    pub manifest: StoreManifest,
    /// The weights, shared by sessions.
    pub decoder: Arc<Decoder>,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Tokens that end a text.
    pub stop_ids: Vec<u32>,
}

impl Model {
    /// Loads the store in `folder`, its trunk mapped; `isa` overrides the kernels that the CPU would get.
    pub fn load(folder: &Path, isa: Option<KernelIsa>) -> Result<Self, OpenError> {
        Self::load_as(folder, isa, TrunkResidency::Mapped)
    }

    /// As [`Model::load`], with the trunk where `residency` says. A streamed one needs [`Model::stream_trunk`] for each session.
    pub fn load_as(folder: &Path, isa: Option<KernelIsa>, residency: TrunkResidency) -> Result<Self, OpenError> {
        let manifest = StoreManifest::open(folder)?;
        let path = folder.join(CONFIG_FILE);
        let config: ModelConfig = parse_config(&path, &read_bounded(&path, MAX_CONFIG_BYTES)?)?;
        let stop_ids = read_stop_ids(folder, &config)?;
        let trunk = Arc::new(Trunk::open_as(folder, &manifest, residency)?);
        let decoder = match isa {
            Some(isa) => Decoder::load_with(config, trunk, isa)?,
            None => Decoder::load(config, trunk)?,
        };
        let tokenizer = Tokenizer::open(folder)?;
        Ok(Self { folder: folder.to_path_buf(), manifest, decoder, tokenizer, stop_ids })
    }

    /// A prompt's tokens. Special tokens in `text` are recognised only when `special` is asked for.
    pub fn encode_prompt(&self, text: &str, special: bool) -> Result<Vec<u32>, OpenError> {
        let recognise = (special || knob::forced(Knob::Special)) && !knob::skipped(Knob::Special);
        Ok(self.tokenizer.encode(text, recognise)?)
    }

    /// What a planner places.
    pub fn catalog(&self) -> Catalog {
        Catalog {
            model_id: self.manifest.model_id.clone(),
            store: self.folder.canonicalize().unwrap_or_else(|_| self.folder.clone()),
            layers: self.manifest.moe_layers.clone(),
            experts: self.manifest.experts,
            expert_bytes: self.manifest.expert_bytes,
        }
    }

    /// The model's chat form.
    pub fn chat(&self) -> Result<ChatTemplate, crate::model::chat::ChatError> {
        ChatTemplate::open(&self.folder)
    }

    /// A new timeline for at most `max_context` tokens (0 = what the model was made for).
    /// `prefetch` says whether the source will want the decoder's guesses.
    pub fn session(
        &self,
        max_context: usize,
        max_rows: usize,
        prefetch: PrefetchPolicy,
        clock: Clock,
    ) -> Result<Session, OpenError> {
        self.bounded_session(max_context, max_rows, prefetch, clock, KvLimit::default())
    }

    /// Lanes for `lanes` texts at once, each of at most `max_context` tokens (0 = what the model was made for), of which no
    /// text can become longer than `longest`, so that no lane holds more. The rest is as for a [session](Model::session).
    pub fn batch(
        &self,
        contexts: (usize, usize),
        max_rows: usize,
        lanes: usize,
        prefetch: PrefetchPolicy,
        clock: Clock,
    ) -> Result<Batch, OpenError> {
        self.bounded_batch(contexts, max_rows, lanes, (prefetch, clock), KvLimit::default())
    }

    fn session_options(
        &self,
        max_context: usize,
        max_rows: usize,
        prefetch: PrefetchPolicy,
        clock: Clock,
    ) -> SessionOptions {
        let guess = match prefetch {
            PrefetchPolicy::NextRouter => GuessSource::Router,
            PrefetchPolicy::Draft => GuessSource::Draft,
            PrefetchPolicy::None | PrefetchPolicy::SameAsLast | PrefetchPolicy::Markov => GuessSource::None,
        };
        let longest = self.decoder.config().max_position_embeddings;
        let mut max_context = if max_context == 0 { longest } else { max_context };
        if knob::skipped(Knob::MaxContext) {
            max_context = longest;
        }
        SessionOptions { max_context, max_rows: max_rows.min(longest), clock, guess }
    }

    /// Gives `to` a source for the blocks of a streamed trunk; nothing where the trunk is not streamed. Reads are carried
    /// out as `options` say, on a drive with the pace `pace` if it is emulated.
    pub fn stream_trunk(
        &self,
        to: &mut TrunkBlocks,
        options: &ReaderOptions,
        clock: Clock,
        pace: Option<Arc<PacedDrive>>,
    ) -> Result<(), OpenError> {
        if let Some(blocks) = self.decoder.blocks() {
            let path = self.folder.join(TRUNK_FILE);
            let trunk = TrunkFile { path: &path, parts: blocks.parts(), pace };
            to.take_from(Box::new(TrunkStream::open(&trunk, options, clock)?));
        }
        Ok(())
    }

    /// Which of `mounts` is the store's own drive: the one whose folder is the store's.
    pub fn own_drive(&self, mounts: &[DriveSpec]) -> Option<usize> {
        let own = self.folder.canonicalize().ok()?;
        mounts.iter().position(|m| m.path.canonicalize().is_ok_and(|p| p == own))
    }

    /// The plan of a run without one: the store itself is the one drive.
    pub fn store_plan(&self) -> Result<(Plan, Vec<DriveSpec>), OpenError> {
        self.check_own_experts()?;
        let drive =
            DriveSpec { name: STORE_DRIVE.into(), path: self.catalog().store, emulate: None, faults: Vec::new() };
        let drives = [PlanDrive { name: drive.name.clone(), path: drive.path.clone() }];
        let plan = planner::plan(&self.catalog(), &drives, &Policy::RoundRobin {}, 0, BTreeMap::new())?;
        Ok((plan, vec![drive]))
    }

    /// The store holds every expert itself.
    fn check_own_experts(&self) -> Result<(), OpenError> {
        let want = self.catalog().layers.len() * self.catalog().experts as usize;
        let have: usize = match want {
            0 => 0,
            _ => DriveManifest::open(&drive_folder(&self.folder, &self.manifest.model_id))?
                .layers
                .values()
                .map(Vec::len)
                .sum(),
        };
        if have >= want { Ok(()) } else { Err(OpenError::Elsewhere { folder: self.folder.clone(), have, want }) }
    }

    /// Whether the model has routed experts at all.
    pub fn has_experts(&self) -> bool {
        !self.manifest.moe_layers.is_empty()
    }

    /// Every expert in memory.
    pub fn resident(&self) -> Result<InMemory, OpenError> {
        self.check_own_experts()?;
        Ok(InMemory::load(&self.folder, &self.manifest)?)
    }

    /// Experts streaming from the drives of `plan` at `mounts`.
    pub fn reader(
        &self,
        plan: &Plan,
        mounts: &[DriveSpec],
        options: &ReaderOptions,
        clock: Clock,
    ) -> Result<ExpertReader, OpenError> {
        if plan.model_id != self.manifest.model_id {
            return Err(OpenError::OtherModel {
                plan: plan.model_id.clone(),
                store: self.manifest.model_id.clone(),
                folder: self.folder.clone(),
            });
        }
        let mut options = options.clone();
        if options.demand_reserve == 0 {
            // A pass that extends the text asks each layer for this many; a prompt, or rows checked together, for more, in
            // waves if need be.
            let top_k = self.decoder.config().moe.as_ref().map_or(0, |m| m.top_k);
            options.demand_reserve = u32::try_from(top_k).unwrap_or(u32::MAX);
        }
        Ok(ExpertReader::open(plan, mounts, &options, clock)?)
    }
}
