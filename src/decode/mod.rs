//! The decoder: a loaded model ([`weights::Decoder`]) and one timeline over it ([`session::Session`]). Opens no file
//! and knows no drive: weights come from a `Trunk`, experts through an `ExpertSource`.

mod attn_res;
mod draft;
pub mod error;
pub mod generate;
pub mod guess;
mod kda;
pub mod kernels;
pub mod memory;
mod mla;
mod moe;
pub mod observe;
pub mod sampler;
mod scratch;
pub mod session;
pub mod weights;

pub use error::DecodeError;
pub use guess::GuessSource;
pub use kernels::{KernelIsa, Kernels};
pub use observe::{Observer, Point};
pub use session::{Logits, Session, SessionCounters, SessionOptions};
pub use weights::Decoder;
