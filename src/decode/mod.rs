//! The decoder: a loaded model ([`weights::Decoder`]), the state of a text ([`timeline::Timeline`]), one text over the
//! model ([`session::Session`]) and several that share its passes ([`batch::Batch`]). Opens no file and knows no drive: weights
//! come from a `Trunk`, experts through an `ExpertSource`.

mod attend;
mod attn_res;
pub mod batch;
pub mod blocks;
mod draft;
pub mod error;
pub mod generate;
pub mod guess;
mod held;
mod kda;
pub mod kernels;
pub mod kv;
mod latent;
pub mod logit_error;
pub mod memory;
mod mla;
mod moe;
pub mod observe;
mod runner;
pub mod sampler;
mod scratch;
pub mod session;
pub mod snapshot;
pub mod speculate;
pub mod streamed;
pub mod timeline;
mod waste;
pub mod weights;

pub use batch::Batch;
pub use error::DecodeError;
pub use guess::GuessSource;
pub use kernels::{ActivationCounts, Activations, KernelIsa, Kernels, WeightForm};
pub use kv::{CacheShape, KvCounters, KvPlan, KvTier};
pub use logit_error::LogitError;
pub use observe::{Observer, Point};
pub use session::{Logits, Session, SessionCounters, SessionOptions};
pub use speculate::{SpeculateCounters, SpeculateOptions, Speculator};
pub use streamed::TrunkBlocks;
pub use timeline::Timeline;
pub use weights::Decoder;
