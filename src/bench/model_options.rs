//! How a model is run: the settings of compute, apart from where experts come from; and which settings of drafting can
//! do nothing.

use super::affinity::Affinity;
use super::config::{ConfigError, RunConfig};
use crate::decode::generate::DEFAULT_PIECE_ROWS;
use crate::decode::kernels::pool::MAX_THREADS;
use crate::decode::speculate::DrafterKind;
use crate::decode::{Activations, KernelIsa};
use crate::knob::Knob;
use crate::store::trunk::TrunkResidency;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// How the model is run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelOptions {
    /// `auto`, `scalar` or `avx2`.
    pub kernels: String,
    /// What activations are in products of MXFP4 and int8 weights.
    pub activations: Activations,
    /// Threads that compute; 0 is one for each processor that `affinity` gives them.
    pub threads: usize,
    /// Where the trunk is.
    pub trunk: TrunkResidency,
    /// CPUs of threads that compute and of those that read.
    pub affinity: Affinity,
    /// Texts of a prompt set that share passes.
    pub parallel: usize,
    /// Prompt rows fed in one pass.
    pub prefill_rows: usize,
    /// Most tokens of text; 0 is what the model was made for.
    pub max_context: usize,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            kernels: "auto".into(),
            activations: Activations::F32,
            threads: 0,
            trunk: TrunkResidency::Mapped,
            affinity: Affinity::default(),
            parallel: 1,
            prefill_rows: DEFAULT_PIECE_ROWS,
            max_context: 0,
        }
    }
}

impl ModelOptions {
    /// Threads that compute.
    pub fn compute_threads(&self) -> usize {
        match (self.threads, &self.affinity.compute) {
            (0, Some(cpus)) => cpus.cpus().len().clamp(1, MAX_THREADS),
            (0, None) => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS),
            (threads, _) => threads,
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

/// Knobs of drafting that do nothing without a drafter.
pub const OF_DRAFTS: [Knob; 4] = [Knob::DraftDepth, Knob::DraftPolicy, Knob::DraftAccept, Knob::DraftWindow];

/// Settings of drafting that cannot go together, or with the rest.
pub(super) fn check_draft(config: &RunConfig) -> Result<(), ConfigError> {
    let temperature = config.sampler.temperature;
    config.draft.check(temperature).map_err(ConfigError::Contradiction)?;
    if config.draft.is_on() && config.prompts.is_some() {
        return Err(ConfigError::Contradiction(
            "--speculate proposes tokens of one text, and --prompts gives several, which already share passes; leave one of \
             them out"
                .into(),
        ));
    }
    if config.reference && config.draft.draws(temperature) {
        return Err(ConfigError::Contradiction(
            "--reference decodes without proposals, and --draft-accept standard draws other tokens; give --draft-accept \
             exact-match"
                .into(),
        ));
    }
    Ok(())
}

/// A knob of drafting that somebody gave although it does nothing, and why.
pub(super) fn idle_draft(config: &RunConfig, given: &BTreeSet<Knob>) -> Option<(Knob, &'static str)> {
    if !config.draft.is_on() {
        return OF_DRAFTS.into_iter().find(|k| given.contains(k)).map(|k| (k, "without proposals; give --speculate"));
    }
    if config.draft.speculate == DrafterKind::Ngram && given.contains(&Knob::DraftAccept) {
        let why = "with ngram, whose proposals are certain: both rules keep the same; give --speculate model";
        return Some((Knob::DraftAccept, why));
    }
    let greedy = config.sampler.temperature == 0.0 && given.contains(&Knob::DraftAccept);
    greedy
        .then_some((Knob::DraftAccept, "at temperature 0, where both rules keep the same; give a temperature above 0"))
}
