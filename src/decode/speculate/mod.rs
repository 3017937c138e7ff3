//! Speculative decoding: somebody cheap proposes the next tokens, and one pass of the model checks all of them. Each layer then
//! waits once for the union of their experts, instead of once for each token. What is kept is what the model would have said
//! anyway: greedily, and with exact-match acceptance, the tokens are those of plain decoding, bit for bit.

pub mod adaptive;
pub mod counters;
pub mod model;
pub mod ngram;
pub mod options;
mod step;

use super::error::DecodeError;
use super::kv::KvCounters;
use super::sampler::{Probable, SamplerError};
pub use adaptive::DepthPolicy;
pub use counters::{SpeculateCounters, WidthCounters};
pub use model::ModelDrafter;
pub use ngram::NgramDrafter;
pub use options::{AcceptRule, SpeculateOptions};
use serde::{Deserialize, Serialize};
pub use step::Speculator;

/// Most proposals that a pass checks.
pub const MAX_DEPTH: usize = 16;

/// Proposals could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SpeculateError {
    /// A pass of the draft model failed.
    #[error("draft model: {0}")]
    Decode(#[from] DecodeError),
    /// Its logits could not be drawn from.
    #[error("draft model: {0}")]
    Sampler(#[from] SamplerError),
}

/// Who proposes tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DrafterKind {
    /// Nobody.
    #[default]
    Off,
    /// What followed in the text when its end stood there before.
    Ngram,
    /// A small model.
    Model,
}

impl DrafterKind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Ngram => "ngram",
            Self::Model => "model",
        }
    }
}

/// The tokens that may come next, in order.
#[derive(Clone, Debug, Default)]
pub struct Proposals {
    tokens: Vec<u32>,
    /// By proposal: what it was drawn from. Not filled where proposals are certain.
    drawn_from: Vec<Vec<Probable>>,
    drawn: usize,
}

impl Proposals {
    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// One more token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// The place for what the next token is drawn from.
    pub fn next_distribution(&mut self) -> &mut Vec<Probable> {
        if self.drawn == self.drawn_from.len() {
            self.drawn_from.push(Vec::new());
        }
        self.drawn += 1;
        &mut self.drawn_from[self.drawn - 1]
    }

    /// What a proposal was drawn from; `None` if it is certain.
    pub fn distribution(&self, at: usize) -> Option<&[Probable]> {
        self.drawn_from[..self.drawn].get(at).map(Vec::as_slice)
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.drawn = 0;
    }
}

/// Makes proposals for one text.
pub trait Drafter: Send {
    /// Which one it is.
    fn kind(&self) -> DrafterKind;

    /// A text begins with `prompt`; with what is generated it has at most `longest` tokens.
    fn begin(&mut self, prompt: &[u32], longest: usize) -> Result<(), SpeculateError>;

    /// The text is one token longer.
    fn extend(&mut self, token: u32);

    /// What its latent caches took; nothing without a model.
    fn caches(&self) -> KvCounters;

    /// Adds at most `depth` tokens that may come next to `out`, which is empty.
    fn propose(&mut self, depth: usize, out: &mut Proposals) -> Result<(), SpeculateError>;
}
