//! What can go wrong while a model is loaded or run. Messages name the tensor, layer or limit and what to do.

use super::kernels::KernelIsa;
use crate::ids::{ExpertId, ExpertKey, LayerId};
use crate::source::SourceError;

/// Why a model could not be loaded or a pass not be computed.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The trunk lacks a tensor that the configuration asks for.
    #[error("tensor {0} is not in the trunk; import the checkpoint again")]
    MissingTensor(String),
    /// A tensor's type, shape or size is not what the configuration asks for.
    #[error("tensor {name} is {seen}; the configuration asks for {expected}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What the trunk holds.
        seen: String,
        /// What is needed.
        expected: String,
    },
    /// The configuration cannot be run.
    #[error("{0}")]
    Config(String),
    /// The processor lacks the instructions of the kernels asked for.
    #[error("this processor does not run the {0} kernels; use scalar, or leave the choice to detection")]
    Isa(KernelIsa),
    /// A session option is out of range.
    #[error("{option} is {seen}; expected {expected}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        seen: u64,
        /// What would be accepted.
        expected: String,
    },
    /// More rows than a pass may have, or none.
    #[error("{rows} rows in one pass; feed between 1 and {max} (max_rows)")]
    Rows {
        /// Rows given.
        rows: usize,
        /// Most rows accepted.
        max: usize,
    },
    /// The text would become longer than the session's context.
    #[error("the text would reach {needed} tokens, the session holds {max}; raise max_context")]
    ContextFull {
        /// Tokens after the pass.
        needed: usize,
        /// Most tokens held.
        max: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Entries of the vocabulary.
        vocab: usize,
    },
    /// A value became infinite or NaN.
    #[error("a value of {} for position {position} is not finite; the weights or an expert are damaged", at_layer(*.layer))]
    NonFinite {
        /// The layer; `None` for the logits.
        layer: Option<LayerId>,
        /// Position of the row.
        position: u64,
    },
    /// An earlier pass failed half-way, so the state belongs to no text.
    #[error("an earlier pass of this session failed; reset the session before feeding it again")]
    Unusable,
    /// What an expert gave is not finite.
    #[error(
        "what expert {expert} gave for position {position} is not finite: its weights are damaged (a scale of 255, or flipped bits); \
             `argodrive verify` says on which drives, and restaging it from a good copy mends it"
    )]
    DamagedExpert {
        /// The expert.
        expert: ExpertKey,
        /// Position of the row.
        position: u64,
    },
    /// The source failed.
    #[error("layer {layer}: {source}")]
    Source {
        /// The layer whose experts were wanted.
        layer: LayerId,
        /// Why.
        source: SourceError,
    },
    /// A block of a streamed trunk did not come.
    #[error("{what}: {source}")]
    Stream {
        /// What was wanted.
        what: String,
        /// Why.
        source: SourceError,
    },
    /// The trunk is streamed, and nothing was given to the session that would read it.
    #[error("the trunk is streamed, but this session has no source for it; load the model with its trunk mapped")]
    NoBlocks,
    /// Latent rows have to leave memory, and nothing was given to the session that would keep them.
    #[error("latent rows have to leave memory, but this session has nobody who keeps them; open it without --kv-ram")]
    NoBlockStore,
    /// The source delivered an expert that was not asked for, or one twice.
    #[error("{0} arrived but is not awaited; the expert source is faulty")]
    UnexpectedExpert(ExpertKey),
    /// An expert's planes do not have the size that the configuration gives.
    #[error("{expert} has {seen} bytes; expected {expected}; verify the store")]
    ExpertBytes {
        /// The expert.
        expert: ExpertKey,
        /// Bytes delivered.
        seen: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// The source ended a barrier early.
    #[error("layer {layer}: the source delivered all it had, but not {expert}; verify the plan")]
    ExpertsMissing {
        /// The layer.
        layer: LayerId,
        /// The first one that did not come.
        expert: ExpertId,
    },
}

fn at_layer(layer: Option<LayerId>) -> String {
    layer.map_or("the logits".to_string(), |l| format!("layer {l}"))
}
