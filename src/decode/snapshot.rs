//! A text between two passes as bytes, and back: tokens, states of all layers, where the sampler stands, and what a run must have
//! in common with the one that it goes on with. No weights. What follows from the tokens alone (proposals, guesses) is not kept
//! but made again. Opens no file: bytes go to a `Keeper` and come from a reader.
//!
//! Payload: prompt ids, generated ids (u32), then by layer a KDA state and its three histories, or the latent rows of the text
//! (f32); all little-endian.

use super::error::DecodeError;
use super::generate::GenerateError;
use super::kernels::Activations;
use super::memory::SessionBytes;
use super::sampler::{Sampler, SamplerCounters, SamplerOptions, SamplerState};
use super::session::Session;
use crate::model::config::ModelConfig;
use crate::store::snapshot_file::begin;
use serde::{Deserialize, Serialize};
use std::io::Read;
use xxhash_rust::xxh3::Xxh3;

/// Most draws that the choice of one token takes.
const DRAWS_A_TOKEN: u64 = 2;
/// Room for a header without stop ids.
const HEADER_BYTES: u64 = 4096;

/// What a run that goes on with a text has in common with the run that wrote it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRun {
    /// The model.
    pub model_id: String,
    /// Format of its trunk.
    pub trunk: String,
    /// Instruction set of the kernels: another one gives other bits.
    pub kernels: String,
    /// What activations are in products: others give other tokens.
    #[serde(default, skip_serializing_if = "is_exact")]
    pub activations: Activations,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Tokens that end the text.
    pub stop: Vec<u32>,
    /// Most tokens to generate; a run that goes on may have more.
    pub max_new: usize,
    /// Most tokens of text; 0 = what the model was made for.
    pub max_context: usize,
    /// Whether special tokens are recognised and shown.
    pub special: bool,
    /// Tokens between snapshots; no token depends on it.
    pub snapshot_every: usize,
}

fn is_exact(activations: &Activations) -> bool {
    *activations == Activations::F32
}

impl SnapshotRun {
    /// A short name for the text that `prompt` becomes in this run; a larger `max_new` makes it no other.
    pub fn text_name(&self, prompt: &[u32]) -> String {
        let mut hash = Xxh3::new();
        let s = &self.sampler;
        hash.update(self.model_id.as_bytes());
        hash.update(self.kernels.as_bytes());
        hash.update(self.activations.label().unwrap_or_default().as_bytes());
        hash.update(format!("{} {} {} {} {}", s.temperature, s.top_p, s.top_k, s.seed, self.max_context).as_bytes());
        prompt.iter().for_each(|id| hash.update(&id.to_le_bytes()));
        format!("{:08x}", hash.digest() as u32)
    }
}

/// The header of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotHeader {
    /// The run.
    pub run: SnapshotRun,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated so far. All but the last have been fed.
    pub generated_tokens: usize,
    /// Tokens that the states have seen.
    pub position: usize,
    /// Where the generator of draws stands.
    pub sampler_state: SamplerState,
    /// What the sampler did so far.
    pub sampler_counters: SamplerCounters,
}

/// A snapshot contradicts itself or the model.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFault {
    /// Its content.
    #[error("damaged: {0}")]
    Content(String),
    /// Its bytes could not be read.
    #[error("{0}")]
    Read(#[from] std::io::Error),
    /// The session cannot take it.
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

/// A text between two passes.
#[derive(Clone, Copy)]
pub struct TextState<'a> {
    /// Its states; all tokens but the last generated one are in them.
    pub session: &'a Session,
    /// How its tokens are chosen.
    pub sampler: &'a Sampler,
    /// The prompt.
    pub prompt: &'a [u32],
    /// What was generated.
    pub generated: &'a [u32],
}

/// Keeps a text's state where it outlives the program.
pub trait Keeper {
    /// Takes the text as it is. May come back before it is safe.
    fn take(&mut self, text: &TextState<'_>) -> Result<(), GenerateError>;

    /// Comes back when what was taken is safe.
    fn settle(&mut self) -> Result<(), GenerateError>;
}

/// When a text is handed to whom.
pub struct Snapshots<'a> {
    /// Most tokens that are lost if the program is killed.
    pub every: usize,
    /// Who keeps it.
    pub keeper: &'a mut dyn Keeper,
}

impl Snapshots<'_> {
    /// Whether a text of `generated` tokens must be taken now, `last` of which are safe: a pass may add `rows` to them.
    pub(super) fn is_due(&self, generated: usize, last: usize, rows: usize) -> bool {
        generated > last && generated - last + rows > self.every.max(1)
    }
}

/// Bytes of the states after `position` tokens.
fn state_bytes(cfg: &ModelConfig, position: usize) -> u64 {
    let s = SessionBytes::of(cfg, position, 1);
    s.kda_state_bytes.saturating_add(s.conv_history_bytes).saturating_add(s.latent_cache_bytes)
}

/// Bytes of a snapshot of a text of `tokens` tokens, prompt included, at most.
pub fn snapshot_bytes(cfg: &ModelConfig, tokens: usize) -> u64 {
    state_bytes(cfg, tokens).saturating_add((tokens as u64).saturating_mul(4)).saturating_add(HEADER_BYTES)
}

/// Writes the file of a snapshot to `out`, whose memory is used again; only the digest at its end is not there yet.
pub fn encode(run: &SnapshotRun, text: &TextState<'_>, out: &mut Vec<u8>) -> Result<(), DecodeError> {
    let TextState { session, sampler, prompt, generated } = *text;
    let header = SnapshotHeader {
        run: run.clone(),
        prompt_tokens: prompt.len(),
        generated_tokens: generated.len(),
        position: session.position(),
        sampler_state: sampler.state(),
        sampler_counters: sampler.counters(),
    };
    let header = serde_json::to_vec(&header).map_err(|e| DecodeError::Config(format!("snapshot: {e}")))?;
    let tokens = (prompt.len() + generated.len()) as u64 * 4;
    begin(out, &header, tokens + state_bytes(session.decoder().config(), session.position()));
    prompt.iter().chain(generated).for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
    session.write_state(out)
}

/// The header of a snapshot, checked against itself and against the bytes of tokens and states that follow it.
pub fn parse_header(bytes: &[u8], payload_bytes: u64) -> Result<SnapshotHeader, SnapshotFault> {
    let fault = |reason: String| SnapshotFault::Content(reason);
    let header: SnapshotHeader = serde_json::from_slice(bytes).map_err(|e| fault(format!("its header: {e}")))?;
    let h = &header;
    if h.prompt_tokens == 0
        || h.generated_tokens == 0
        || h.prompt_tokens.checked_add(h.generated_tokens - 1) != Some(h.position)
    {
        return Err(fault(format!(
            "{} tokens of prompt and {} generated do not make position {}",
            h.prompt_tokens, h.generated_tokens, h.position
        )));
    }
    // every count below is bounded by tokens that the file really holds
    if (h.position as u64).saturating_add(1).saturating_mul(4) > payload_bytes {
        return Err(fault(format!("{} tokens do not fit into {payload_bytes} bytes", h.position as u64 + 1)));
    }
    h.run.sampler.validate().map_err(|e| fault(e.to_string()))?;
    let (state, counters) = (&h.sampler_state, &h.sampler_counters);
    let most = (h.generated_tokens as u64).saturating_mul(DRAWS_A_TOKEN);
    if state.draws > most || counters.tokens != h.generated_tokens as u64 {
        return Err(fault(format!("{} draws for {} tokens", state.draws, h.generated_tokens)));
    }
    if SamplerState::seeded(h.run.sampler.seed).after(state.draws) != *state {
        return Err(fault(format!("its generator does not stand where seed {} leads", h.run.sampler.seed)));
    }
    Ok(header)
}

/// Tokens of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotTokens {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// What was generated.
    pub generated: Vec<u32>,
}

/// Reads the tokens of a snapshot of a model of this geometry; the states follow in `payload`. `payload_bytes` is what the file
/// really has, so nothing is allocated that it does not hold.
pub fn read_tokens(
    header: &SnapshotHeader,
    cfg: &ModelConfig,
    payload_bytes: u64,
    payload: &mut dyn Read,
) -> Result<SnapshotTokens, SnapshotFault> {
    let longest = cfg.max_position_embeddings;
    if header.position >= longest {
        let why = format!("position {} in a text, the model was made for {longest} tokens", header.position);
        return Err(SnapshotFault::Content(why));
    }
    let tokens = header.prompt_tokens + header.generated_tokens;
    let wanted = (tokens as u64 * 4).saturating_add(state_bytes(cfg, header.position));
    if wanted != payload_bytes {
        let why = format!("{payload_bytes} bytes of tokens and states, {wanted} are what this model has");
        return Err(SnapshotFault::Content(why));
    }
    let mut bytes = vec![0; tokens * 4];
    payload.read_exact(&mut bytes)?;
    let mut ids: Vec<u32> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    if let Some(id) = ids.iter().find(|id| **id as usize >= cfg.vocab_size) {
        return Err(SnapshotFault::Content(format!("token {id}, of a vocabulary of {}", cfg.vocab_size)));
    }
    let generated = ids.split_off(header.prompt_tokens);
    Ok(SnapshotTokens { prompt: ids, generated })
}

/// Reads the states that follow the tokens: `session` then holds the text, and `sampler` stands where it stood. After an error
/// the session must be reset.
pub fn restore(
    header: &SnapshotHeader,
    payload: &mut dyn Read,
    session: &mut Session,
    sampler: &mut Sampler,
) -> Result<(), SnapshotFault> {
    session.read_state(header.position, &mut |values: &mut [f32]| {
        payload.read_exact(bytemuck::cast_slice_mut(values))?;
        if cfg!(target_endian = "big") {
            values.iter_mut().for_each(|v| *v = f32::from_bits(v.to_bits().swap_bytes()));
        }
        Ok::<(), SnapshotFault>(())
    })?;
    sampler.resume(header.sampler_state, header.sampler_counters).map_err(|e| SnapshotFault::Content(e.to_string()))?;
    session.resume_at(header.position);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pass_may_take_a_text_further_than_what_may_be_lost() {
        struct Nobody;
        impl Keeper for Nobody {
            fn take(&mut self, _: &TextState<'_>) -> Result<(), GenerateError> {
                Ok(())
            }
            fn settle(&mut self) -> Result<(), GenerateError> {
                Ok(())
            }
        }
        let snapshots = Snapshots { every: 8, keeper: &mut Nobody };
        let due = |rows| (0..40).find(|n| snapshots.is_due(*n, 0, rows));
        assert_eq!((due(1), due(5), due(8)), (Some(8), Some(4), Some(1)));
        assert!(!snapshots.is_due(16, 16, 1), "nothing new");
    }

    #[test]
    fn a_header_that_contradicts_itself_is_refused() {
        let sampler = SamplerOptions { temperature: 0.5, seed: 7, ..SamplerOptions::default() };
        let run = SnapshotRun {
            model_id: "m".into(),
            trunk: "bf16".into(),
            kernels: "scalar".into(),
            activations: Activations::F32,
            sampler,
            stop: vec![1],
            max_new: 9,
            max_context: 0,
            special: false,
            snapshot_every: 2,
        };
        let good = SnapshotHeader {
            run,
            prompt_tokens: 3,
            generated_tokens: 4,
            position: 6,
            sampler_state: SamplerState::seeded(7).after(4),
            sampler_counters: SamplerCounters { tokens: 4, ..SamplerCounters::default() },
        };
        let parse =
            |h: &SnapshotHeader| parse_header(&serde_json::to_vec(h).unwrap(), 1 << 20).map_err(|e| e.to_string());
        assert_eq!(parse(&good), Ok(good.clone()));
        let says = |change: &dyn Fn(&mut SnapshotHeader)| {
            let mut bad = good.clone();
            change(&mut bad);
            parse(&bad).unwrap_err()
        };
        assert!(says(&|h| h.position = 7).contains("position 7"));
        assert!(says(&|h| h.generated_tokens = 0).contains("0 generated"));
        assert!(says(&|h| h.prompt_tokens = usize::MAX).contains("do not make"));
        assert!(says(&|h| h.sampler_state.draws = u64::MAX).contains("draws"), "not walked");
        assert!(says(&|h| h.sampler_state = SamplerState::seeded(8).after(4)).contains("seed 7"));
        assert!(says(&|h| h.sampler_counters.tokens = 5).contains("draws for 4 tokens"));
        assert!(says(&|h| h.run.sampler.top_p = 2.0).contains("top-p"));
        assert!(parse_header(b"{}", 1 << 20).is_err());
        let longer = SnapshotRun { max_new: 99, ..good.run.clone() };
        assert_eq!(longer.text_name(&[1, 2]), good.run.text_name(&[1, 2]));
        assert_ne!(good.run.text_name(&[1]), good.run.text_name(&[1, 2]));
    }
}
