//! How a model is run: the settings of compute, apart from where experts come from.

use super::config::ConfigError;
use crate::decode::KernelIsa;
use crate::decode::generate::DEFAULT_PIECE_ROWS;
use crate::decode::kernels::pool::MAX_THREADS;
use serde::{Deserialize, Serialize};

/// How the model is run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelOptions {
    /// `auto`, `scalar` or `avx2`.
    pub kernels: String,
    /// Threads that compute; 0 is one for each processor.
    pub threads: usize,
    /// Prompt rows fed in one pass.
    pub prefill_rows: usize,
    /// Most tokens of text; 0 is what the model was made for.
    pub max_context: usize,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self { kernels: "auto".into(), threads: 0, prefill_rows: DEFAULT_PIECE_ROWS, max_context: 0 }
    }
}

impl ModelOptions {
    /// Threads that compute.
    pub fn compute_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS),
            threads => threads,
        }
    }

    /// The kernels asked for; `None` is the best that the CPU has.
    pub fn isa(&self) -> Result<Option<KernelIsa>, ConfigError> {
        match self.kernels.as_str() {
            "auto" => Ok(None),
            name => name.parse().map(Some).map_err(|e| ConfigError::Contradiction(format!("kernels: {e}, or auto"))),
        }
    }
}
