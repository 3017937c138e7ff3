//! The draft model of a run: from a store, or read into memory from a checkpoint. It must be dense and have the very
//! vocabulary of the model that it drafts for.

use super::{Model, OpenError};
use crate::clock::Clock;
use crate::decode::sampler::{Sampler, SamplerOptions};
use crate::decode::speculate::{DrafterKind, MAX_DEPTH, ModelDrafter, NgramDrafter, SpeculateOptions};
use crate::decode::{CacheShape, Decoder, GuessSource, KernelIsa, Session, SessionOptions, Speculator};
use crate::knob::{self, Knob};
use crate::model::checkpoint::{CONFIG_FILE, Checkpoint, parse_config, read_bounded};
use crate::model::config::ModelConfig;
use crate::model::tokenizer::{Tokenizer, TokenizerError};
use crate::store::manifest::{STORE_FILE, StoreManifest};
use crate::store::memory::trunk_of_checkpoint;
use crate::store::trunk::Trunk;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Most bytes of a checkpoint that are read into memory; a larger one is imported, and then mapped.
const MAX_CHECKPOINT_BYTES: u64 = 2 << 30;
/// Bytes of a token that an error shows.
const SHOWN_BYTES: usize = 24;
/// Keeps the draws of proposals apart from those of tokens: the golden ratio in 64 bits.
const DRAFT_SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// A draft model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// It has routed experts.
    #[error("--draft-model {}: it has routed experts, which would have to be read for every proposal; give a dense model", .0.display())]
    Experts(PathBuf),
    /// It is too large to be read into memory.
    #[error("--draft-model {}: a checkpoint of {bytes} bytes; `argodrive import` it and give the store, which is mapped and not read into memory", folder.display())]
    TooLarge {
        /// The checkpoint.
        folder: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Its vocabulary has another size.
    #[error("--draft-model {}: its vocabulary has {draft_tokens} tokens, that of the model {} has {model_tokens}; a draft model must have the same vocabulary", draft.display(), model.display())]
    VocabularySize {
        /// The draft model.
        draft: PathBuf,
        /// Its tokens.
        draft_tokens: usize,
        /// The model.
        model: PathBuf,
        /// Its tokens.
        model_tokens: usize,
    },
    /// A token id means something else.
    #[error("--draft-model {}: token {id} is {of_draft} there, and {of_model} in the model {}; a draft model must have the same vocabulary", draft.display(), model.display())]
    Vocabulary {
        /// The draft model.
        draft: PathBuf,
        /// The model.
        model: PathBuf,
        /// The first such id.
        id: u32,
        /// Its meaning in the draft model.
        of_draft: String,
        /// Its meaning in the model.
        of_model: String,
    },
}

/// A loaded draft model.
pub struct DraftModel {
    /// Its store or checkpoint.
    pub folder: PathBuf,
    /// Who it is: the model id of a store, a hash over configuration and tensors of a checkpoint.
    pub identity: String,
    /// The weights.
    pub decoder: Arc<Decoder>,
    tokenizer: Option<Tokenizer>,
}

/// Geometry and size of the draft model in `folder`, before anything is loaded.
pub fn measure_draft(folder: &Path) -> Result<(ModelConfig, u64), OpenError> {
    if folder.join(STORE_FILE).exists() {
        let path = folder.join(CONFIG_FILE);
        let config = parse_config(&path, &read_bounded(&path, super::MAX_CONFIG_BYTES)?)?;
        return Ok((config, Trunk::open(folder, &StoreManifest::open(folder)?)?.payload_bytes()));
    }
    let checkpoint = Checkpoint::open(folder)?;
    Ok((checkpoint.config().clone(), trunk_bytes(&checkpoint)))
}

/// Who the draft model in `folder` is: the model id of a store, a hash over configuration and tensors of a checkpoint.
pub fn draft_identity(folder: &Path) -> Result<String, OpenError> {
    match folder.join(STORE_FILE).exists() {
        true => Ok(StoreManifest::open(folder)?.model_id),
        false => {
            let checkpoint = Checkpoint::open(folder)?;
            check_size(folder, &checkpoint)?;
            Ok(read_trunk(&checkpoint)?.1)
        }
    }
}

/// Whether a draft checkpoint is small enough to be read into memory.
fn check_size(folder: &Path, checkpoint: &Checkpoint) -> Result<(), DraftError> {
    match trunk_bytes(checkpoint) {
        bytes if bytes > MAX_CHECKPOINT_BYTES => Err(DraftError::TooLarge { folder: folder.to_path_buf(), bytes }),
        _ => Ok(()),
    }
}

fn trunk_bytes(checkpoint: &Checkpoint) -> u64 {
    checkpoint.trunk().iter().fold(0, |sum, t| sum.saturating_add(t.place.extent.len))
}

impl DraftModel {
    /// Loads the store or checkpoint in `folder`; `isa` overrides the kernels that the CPU would get.
    pub fn load(folder: &Path, isa: Option<KernelIsa>) -> Result<Self, OpenError> {
        if folder.join(STORE_FILE).exists() {
            let model = Model::load(folder, isa)?;
            if model.has_experts() {
                return Err(DraftError::Experts(folder.to_path_buf()).into());
            }
            let Model { folder, manifest, decoder, tokenizer, .. } = model;
            return Ok(Self { folder, identity: manifest.model_id, decoder, tokenizer: Some(tokenizer) });
        }
        let checkpoint = Checkpoint::open(folder)?;
        if !checkpoint.moe_layers().is_empty() {
            return Err(DraftError::Experts(folder.to_path_buf()).into());
        }
        check_size(folder, &checkpoint)?;
        let (trunk, identity) = read_trunk(&checkpoint)?;
        let (config, trunk) = (checkpoint.config().clone(), Arc::new(trunk));
        let decoder = match isa {
            Some(isa) => Decoder::load_with(config, trunk, isa)?,
            None => Decoder::load(config, trunk)?,
        };
        let tokenizer = match Tokenizer::open(folder) {
            Ok(tokenizer) => Some(tokenizer),
            Err(TokenizerError::NoFile { .. }) => None,
            Err(e) => return Err(e.into()),
        };
        Ok(Self { folder: folder.to_path_buf(), identity, decoder, tokenizer })
    }

    /// Whether the ids of `model` mean the same here. Without a tokenizer beside a draft checkpoint only the size of the
    /// vocabulary can be compared.
    fn check_vocabulary(&self, model: &Model) -> Result<(), DraftError> {
        let (draft, of) = (self.folder.clone(), model.folder.clone());
        let (draft_tokens, model_tokens) = (self.decoder.config().vocab_size, model.decoder.config().vocab_size);
        if draft_tokens != model_tokens {
            return Err(DraftError::VocabularySize { draft, draft_tokens, model: of, model_tokens });
        }
        let Some(own) = &self.tokenizer else { return Ok(()) };
        match own.first_difference(&model.tokenizer) {
            None => Ok(()),
            Some(id) => {
                let (of_draft, of_model) = (shown(own, id), shown(&model.tokenizer, id));
                Err(DraftError::Vocabulary { draft, model: of, id, of_draft, of_model })
            }
        }
    }

    /// A timeline that drafts for texts of at most `max_context` tokens, of which attention looks at the last `window`; 0 = at all.
    fn session(&self, max_context: usize, max_rows: usize, clock: Clock, window: usize) -> Result<Session, OpenError> {
        let shape = match window {
            0 if !knob::forced(Knob::DraftWindow) => CacheShape::Whole,
            _ if knob::skipped(Knob::DraftWindow) => CacheShape::Whole,
            rows => CacheShape::Window { rows: rows.max(1), ahead: MAX_DEPTH },
        };
        let longest = self.decoder.config().max_position_embeddings;
        let (max_context, max_rows) = (max_context.min(longest), max_rows.clamp(1, longest));
        let options = SessionOptions { max_context, max_rows, clock, guess: GuessSource::None };
        Ok(Session::shaped(Arc::clone(&self.decoder), options, shape)?)
    }
}

/// All tensors of a dense checkpoint in memory, and a hash over them.
fn read_trunk(checkpoint: &Checkpoint) -> Result<(Trunk, String), OpenError> {
    let trunk = trunk_of_checkpoint(checkpoint)?;
    let mut hash = Xxh3::new();
    hash.update(checkpoint.config_bytes());
    for tensor in checkpoint.trunk() {
        hash.update(tensor.spec.name.as_bytes());
        hash.update(trunk.get(&tensor.spec.name).map_or(&[], |t| t.bytes));
    }
    Ok((trunk, format!("{:032x}", hash.digest128())))
}

/// A token for an error.
fn shown(tokenizer: &Tokenizer, id: u32) -> String {
    let kind = if tokenizer.is_control(id) { "the control token " } else { "" };
    match tokenizer.token_bytes(id) {
        None => "no token".into(),
        Some(bytes) => {
            let bytes = &bytes[..bytes.len().min(SHOWN_BYTES)];
            format!("{kind}{:?}", String::from_utf8_lossy(bytes))
        }
    }
}

impl Model {
    /// The draft model of `options`, if they name one; its vocabulary is this model's.
    pub fn draft(&self, options: &SpeculateOptions, isa: Option<KernelIsa>) -> Result<Option<DraftModel>, OpenError> {
        let Some(folder) = options.draft_model.as_deref().filter(|_| options.speculate == DrafterKind::Model) else {
            return Ok(None);
        };
        let draft = DraftModel::load(folder, isa)?;
        draft.check_vocabulary(self)?;
        Ok(Some(draft))
    }

    /// What proposes tokens for `session`, if `options` ask for it; `draft` is the model that they name.
    pub fn speculator(
        &self,
        options: &SpeculateOptions,
        draft: Option<&DraftModel>,
        sampler: &SamplerOptions,
        piece_rows: usize,
        session: &Session,
    ) -> Result<Option<Speculator>, OpenError> {
        let kind = match options.speculate {
            _ if knob::skipped(Knob::Speculate) => DrafterKind::Off,
            DrafterKind::Off if knob::forced(Knob::Speculate) => DrafterKind::Ngram,
            kind => kind,
        };
        match (kind, draft) {
            (DrafterKind::Off, _) | (DrafterKind::Model, None) => Ok(None),
            (DrafterKind::Ngram, _) => Ok(Some(Speculator::new(options, Box::new(NgramDrafter::new())))),
            (DrafterKind::Model, Some(draft)) => {
                let window = options.draft_window;
                let timeline = draft.session(session.max_context(), piece_rows, session.clock(), window)?;
                let draws = options.draws(sampler.temperature);
                let own = SamplerOptions { seed: sampler.seed ^ DRAFT_SEED, ..*sampler };
                let sampler = draws.then(|| Sampler::new(own)).transpose()?;
                Ok(Some(Speculator::new(options, Box::new(ModelDrafter::new(timeline, sampler, piece_rows)))))
            }
        }
    }
}
