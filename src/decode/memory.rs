//! Bytes that a session and the threads of its decoder take, from a configuration alone: the sizes are those that `scratch` and
//! `kernels` allocate by.

use super::held::Held;
use super::kernels::{Activations, room_bytes};
use super::kv::KvPlan;
use super::scratch::{Scratch, history_values, kda_values, mla_values, widest};
use super::speculate::MAX_DEPTH;
use crate::model::config::{AttnKind, ModelConfig};

/// What a session, or lanes, take in memory.
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
    /// What a pass that checks proposals holds of its rows, so that rows can be taken back.
    pub held_bytes: u64,
}

/// Bytes of the working space of `threads` threads that compute for a decoder, whatever sessions it has.
pub fn thread_bytes(cfg: &ModelConfig, threads: usize, activations: Activations) -> u64 {
    room_bytes(widest(cfg), threads, activations)
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
            held_bytes: 0,
        }
    }

    /// With passes that check proposals, of at most `rows` rows; 0 = none.
    pub fn with_verify(self, cfg: &ModelConfig, rows: usize) -> Self {
        // every row has logits
        let logits = (rows as u64).saturating_mul(4).saturating_mul(cfg.vocab_size as u64);
        Self { held_bytes: Held::bytes(cfg, rows).saturating_add(logits), ..self }
    }

    /// With latent caches that are cut by `plan`, those of all lanes together.
    pub fn with_kv(self, plan: Option<&KvPlan>) -> Self {
        let Some(plan) = plan else { return self };
        let working_bytes = self.working_bytes.saturating_add(plan.working_bytes());
        Self { latent_cache_bytes: plan.resident_bytes().min(self.latent_cache_bytes), working_bytes, ..self }
    }

    /// With latent caches of the last `rows` rows that attention looks at, and those that may be taken back; 0 = all.
    pub fn with_window(self, cfg: &ModelConfig, rows: usize) -> Self {
        if rows == 0 {
            return self;
        }
        let kept = Self::of(cfg, rows.saturating_add(MAX_DEPTH), 1).latent_cache_bytes;
        Self { latent_cache_bytes: kept.min(self.latent_cache_bytes), ..self }
    }

    /// For so many texts that share passes: working memory is theirs together; with more than one, every text has logits of
    /// its own.
    pub fn of_lanes(cfg: &ModelConfig, max_context: usize, max_rows: usize, lanes: usize) -> Self {
        let (one, n) = (Self::of(cfg, max_context, max_rows), lanes as u64);
        let logits = if lanes > 1 { (cfg.vocab_size as u64).saturating_mul(4).saturating_mul(n) } else { 0 };
        Self {
            kda_state_bytes: one.kda_state_bytes.saturating_mul(n),
            conv_history_bytes: one.conv_history_bytes.saturating_mul(n),
            latent_cache_bytes: one.latent_cache_bytes.saturating_mul(n),
            working_bytes: one.working_bytes.saturating_add(logits),
            ..one
        }
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        let parts = [
            self.kda_state_bytes,
            self.conv_history_bytes,
            self.latent_cache_bytes,
            self.working_bytes,
            self.held_bytes,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}
