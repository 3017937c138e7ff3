//! What an int8 trunk does to the logits: one short text is decoded twice, with the checkpoint's own trunk and with the store's,
//! through the experts that were just imported. Bounded: both trunks are mapped, experts stream through a small buffer, and the
//! text is the shorter the more expert bytes a token needs.

use crate::clock::Clock;
use crate::decode::{DecodeError, Decoder, GuessSource, LogitError, Logits, Observer, Point, Session, SessionOptions};
use crate::drive::spec::DriveSpec;
use crate::ids::LayerId;
use crate::layout::plan::{Plan, PlanDrive, PlanError};
use crate::layout::planner::{self, Catalog};
use crate::layout::policy::Policy;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::ModelConfig;
use crate::model::safetensors::CheckpointError;
use crate::model::tokenizer::Tokenizer;
use crate::open::{NoExperts, STORE_DRIVE};
use crate::reader::{ExpertReader, ReaderError, ReaderOptions};
use crate::source::{ExpertSource, Phase};
use crate::stats::SplitMix64;
use crate::store::manifest::{ManifestError, StoreManifest};
use crate::store::trunk::Trunk;
use crate::store::trunk_format::TrunkError;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Most tokens of the text.
const MAX_TOKENS: u64 = 16;
/// Most expert bytes that one reading of it may ask of drives.
const MAX_EXPERT_BYTES: u64 = 32 << 30;
/// What is decoded, where the store has a tokenizer.
const TEXT: &str = "The quick brown fox jumps over the lazy dog, and every layer waits for its slowest drive.";
/// Seed of the tokens where it has none.
const SEED: u64 = 0x7472_756e_6b00;

/// The comparison could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The checkpoint, whose trunk is the exact one.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The store.
    #[error(transparent)]
    Store(#[from] ManifestError),
    /// One of the two decoders.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The plan by which experts are read.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The drives that they are read from.
    #[error(transparent)]
    Reader(#[from] ReaderError),
}

/// How far the logits of the store's trunk are from those of the trunk of `checkpoint`. Experts come from the drives of `streamed`,
/// or from the store itself. `passed` hears how many layers have been passed, of how many.
pub fn measure(
    checkpoint: &Path,
    store: &Path,
    streamed: Option<(&Plan, &[DriveSpec])>,
    passed: &mut dyn FnMut(usize, usize),
) -> Result<TrunkError, MeasureError> {
    let source = Checkpoint::open(checkpoint)?;
    let manifest = StoreManifest::open(store)?;
    let config = source.config().clone();
    let tokens = text(store, &config);
    let own = own_plan(store, &manifest)?;
    let experts = streamed.or_else(|| own.as_ref().map(|(plan, mounts)| (plan, mounts.as_slice())));
    let mut layers = Layers { done: 0, all: 2 * config.layers.len(), passed };
    let mut logits = |trunk: Trunk| -> Result<Vec<f32>, MeasureError> {
        let decoder = Decoder::load(config.clone(), Arc::new(trunk))?;
        let clock = Clock::start();
        let rows = tokens.len();
        let options = SessionOptions { max_context: rows, max_rows: rows, clock, guess: GuessSource::None };
        let mut session = Session::new(decoder, options)?;
        let mut source: Box<dyn ExpertSource> = match experts {
            Some((plan, mounts)) => {
                Box::new(ExpertReader::open(plan, mounts, &reader_options(&config, mounts), clock)?)
            }
            None => Box::new(NoExperts),
        };
        Ok(session.forward(&tokens, Phase::Prefill, source.as_mut(), Logits::All, Some(&mut layers))?.to_vec())
    };
    let exact = logits(Trunk::of_checkpoint(&source)?)?;
    let stored = logits(Trunk::open(store, &manifest)?)?;
    Ok(LogitError::between(&exact, &stored, config.vocab_size).into())
}

/// Counts the layers that passes have gone through.
struct Layers<'a> {
    done: usize,
    all: usize,
    passed: &'a mut dyn FnMut(usize, usize),
}

impl Observer for Layers<'_> {
    fn values(&mut self, _layer: LayerId, point: Point, _values: &[f32]) {
        if point == Point::Out {
            self.done += 1;
            (self.passed)(self.done, self.all);
        }
    }
}

/// Most tokens that one reading may have, so that its expert bytes stay bounded; at least one.
pub(super) fn most_tokens(config: &ModelConfig) -> usize {
    let moe = config.moe.as_ref();
    let token_bytes = moe.map_or(0, |m| m.expert_bytes().saturating_mul(m.top_k as u64));
    let token_bytes = token_bytes.saturating_mul(config.moe_layers().count() as u64);
    let most = MAX_EXPERT_BYTES.checked_div(token_bytes).unwrap_or(MAX_TOKENS).clamp(1, MAX_TOKENS);
    (most as usize).min(config.max_position_embeddings)
}

/// Tokens of the text: as many as the bounds allow, at least one.
fn text(store: &Path, config: &ModelConfig) -> Vec<u32> {
    let most = most_tokens(config);
    let vocab = config.vocab_size;
    let encoded = Tokenizer::open(store).ok().and_then(|t| t.encode(TEXT, false).ok()).unwrap_or_default();
    let mut tokens: Vec<u32> = encoded.into_iter().filter(|&t| (t as usize) < vocab).collect();
    let mut rng = SplitMix64::new(SEED);
    while tokens.len() < most {
        tokens.push(rng.below(vocab) as u32);
    }
    tokens.truncate(most);
    tokens
}

/// The store as the one drive of a plan; `None` for a dense model.
fn own_plan(store: &Path, manifest: &StoreManifest) -> Result<Option<(Plan, Vec<DriveSpec>)>, PlanError> {
    if manifest.moe_layers.is_empty() {
        return Ok(None);
    }
    let catalog = Catalog {
        model_id: manifest.model_id.clone(),
        store: store.to_path_buf(),
        layers: manifest.moe_layers.clone(),
        experts: manifest.experts,
        expert_bytes: manifest.expert_bytes,
    };
    let drive = DriveSpec { name: STORE_DRIVE.into(), path: store.to_path_buf(), emulate: None, faults: Vec::new() };
    let drives = [PlanDrive { name: drive.name.clone(), path: drive.path.clone() }];
    let plan = planner::plan(&catalog, &drives, &Policy::RoundRobin {}, 0, BTreeMap::new())?;
    Ok(Some((plan, vec![drive])))
}

/// Room for the experts of one token, past the page cache where that can be.
pub(super) fn reader_options(config: &ModelConfig, mounts: &[DriveSpec]) -> ReaderOptions {
    let (top_k, bytes) = config.moe.as_ref().map_or((1, 0), |m| (m.top_k.max(1), m.expert_bytes()));
    let slots = (top_k.max(mounts.len()) as u64).saturating_add(1);
    // whole pages, and what direct reads ask for beyond the payload
    let slot_bytes = bytes.saturating_add(64 << 10);
    let own = ReaderOptions::default();
    ReaderOptions {
        allow_buffered: true,
        buffer_bytes: own.buffer_bytes.max(slots.saturating_mul(slot_bytes)),
        demand_reserve: u32::try_from(top_k).unwrap_or(u32::MAX),
        ..own
    }
}
