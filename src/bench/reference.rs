//! The all-resident reference arm: the same prompt, settings and seed once more with every expert in memory. Its tokens
//! must be those of the run, and its time is what decoding costs without any drive.

use super::config::{ConfigError, RunConfig};
use super::guards::available_bytes;
use super::kv::KvOptions;
use super::run::{RunError, RunSpec};
use super::texts::Texts;
use crate::clock::Clock;
use crate::decode::generate::StopReason;
use crate::open::Model;
use crate::reader::PrefetchPolicy;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;

/// Share of the available memory that experts may take.
const MAX_MEMORY_SHARE: f64 = 0.9;

/// The reference arm of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceRecord {
    /// Wall time of decoding, first to last generated token.
    pub decode_ns: u64,
    /// (generated - 1) / decode wall time.
    pub decode_tok_s: f64,
    /// Hash of its tokens.
    pub token_hash: String,
    /// Whether they are those of the run.
    pub same_tokens: bool,
    /// Experts that memory handed out.
    pub leases: u64,
    /// Bytes of all experts.
    pub resident_bytes: u64,
}

/// Whether a reference arm can be had at all; asked before anything is measured.
pub(super) fn check(model: &Model) -> Result<(), ConfigError> {
    if !model.has_experts() {
        return Err(ConfigError::Contradiction(
            "--reference: this model is dense, there is no run from drives to compare with; leave the flag out".into(),
        ));
    }
    let manifest = &model.manifest;
    let experts = manifest.moe_layers.len() as u64 * u64::from(manifest.experts);
    fits(experts.saturating_mul(manifest.expert_bytes), available_bytes())
}

fn fits(bytes: u64, available: Option<u64>) -> Result<(), ConfigError> {
    match available {
        Some(free) if bytes as f64 > free as f64 * MAX_MEMORY_SHARE => Err(ConfigError::Contradiction(format!(
            "--reference holds every expert in memory: they take {bytes} bytes, {free} are available; leave the flag out"
        ))),
        _ => Ok(()),
    }
}

/// Runs the reference arm of `spec`, which gave tokens with the hash `tokens`. `None` when `keep_going` ended it.
pub(super) fn run(
    model: &Model,
    spec: &RunSpec<'_>,
    tokens: &str,
    keep_going: &dyn Fn() -> bool,
) -> Result<Option<ReferenceRecord>, RunError> {
    // latent caches too are in memory
    let config = &RunConfig { kv: KvOptions::default(), ..spec.asked.config.clone() };
    let mut memory = model.resident()?;
    let resident_bytes = memory.resident_bytes();
    let mut texts = Texts::new(model, config, spec.prompts, PrefetchPolicy::None, Clock::start())?;
    texts.stream_trunk(model, config, None)?;
    let mut go_on = |_, _| if keep_going() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
    let generated = texts.generate((model, config, spec.prompts), &mut memory, &mut go_on, None)?;
    let done = &generated.generation;
    if done.stopped == StopReason::Interrupted {
        return Ok(None);
    }
    let token_hash = generated.token_hash();
    Ok(Some(ReferenceRecord {
        decode_ns: done.decode_ns(),
        decode_tok_s: done.rates().decode_tok_s,
        same_tokens: token_hash == tokens,
        token_hash,
        leases: memory.leases(),
        resident_bytes,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bank_that_does_not_fit_is_refused_with_both_numbers() {
        assert!(fits(90, Some(100)).is_ok() && fits(91, None).is_ok());
        let e = fits(91, Some(100)).unwrap_err().to_string();
        assert!(e.contains("91") && e.contains("100") && e.contains("--reference"), "{e}");
    }
}
