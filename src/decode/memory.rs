//! Bytes that a session takes, from a configuration alone: the sizes are those that `scratch` allocates by.

use super::scratch::{Scratch, history_values, kda_values, mla_values};
use crate::model::config::{AttnKind, ModelConfig};

/// What one timeline takes in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct SessionBytes {
    /// Recurrent states of the KDA layers: the same for every context length.
    pub kda_state_bytes: u64,
    /// Last inputs of their convolutions.
    pub conv_history_bytes: u64,
    /// Latent cache of the MLA layers for the whole context; pages are taken as the text grows.
    pub latent_cache_bytes: u64,
    /// Working memory of the widest pass.
    pub working_bytes: u64,
}

impl SessionBytes {
    /// For a text of at most `max_context` tokens, fed in passes of at most `max_rows` rows.
    pub fn of(cfg: &ModelConfig, max_context: usize, max_rows: usize) -> Self {
        let layers = |kind: AttnKind| cfg.layers.iter().filter(|l| l.attn == kind).count() as u64;
        let f32s = |layers: u64, values: usize| layers.saturating_mul(values as u64).saturating_mul(4);
        let (kda, mla) = (layers(AttnKind::Kda), layers(AttnKind::Mla));
        Self {
            kda_state_bytes: f32s(kda, kda_values(cfg)),
            conv_history_bytes: f32s(3 * kda, history_values(cfg)),
            latent_cache_bytes: f32s(mla, mla_values(cfg)).saturating_mul(max_context as u64),
            working_bytes: Scratch::bytes(cfg, max_rows, max_context),
        }
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        [self.kda_state_bytes, self.conv_history_bytes, self.latent_cache_bytes, self.working_bytes]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}
