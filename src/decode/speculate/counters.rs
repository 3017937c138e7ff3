//! What was proposed and what came of it, counted by the code that checks: the evidence for the settings of drafting, and
//! what a bench needs to compute an ideal from.

use super::MAX_DEPTH;
use super::adaptive::PassSeen;
use crate::decode::kv::KvCounters;
use crate::decode::session::PassStats;

/// Passes of one width.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WidthCounters {
    /// Passes.
    pub passes: u64,
    /// Tokens that they added to the text.
    pub tokens: u64,
    /// Distinct experts that they awaited, summed over layers.
    pub experts: u64,
    /// Their time, what restored the state included.
    pub pass_ns: u64,
    /// Part of it in which nothing could be done but wait for experts.
    pub stall_ns: u64,
}

/// The account of a speculator since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculateCounters {
    /// Proposals made by looking into the text.
    pub by_ngram: u64,
    /// Proposals made by a draft model.
    pub by_model: u64,
    /// By position: proposals that were checked.
    pub proposed: [u64; MAX_DEPTH],
    /// By position: those that were accepted.
    pub accepted: [u64; MAX_DEPTH],
    /// By proposals in a pass, from none.
    pub widths: [WidthCounters; MAX_DEPTH + 1],
    /// By depth: how often it was chosen, by the fixed policy and by the adaptive one.
    pub chosen_fixed: [u64; MAX_DEPTH + 1],
    /// The same of the adaptive policy.
    pub chosen_adaptive: [u64; MAX_DEPTH + 1],
    /// Passes that had as many proposals as were asked for, of which there might have been more.
    pub cut: u64,
    /// Rows whose state was brought up to date after their pass.
    pub replayed_rows: u64,
    /// Proposals judged by the rule that keeps one with probability min(1, p / q).
    pub judged_standard: u64,
    /// Proposals judged by comparing with the token drawn.
    pub judged_exact: u64,
    /// Time in which proposals were made, reading the prompt included.
    pub draft_ns: u64,
    /// What the draft model's latent caches took, and rows of them that were dropped.
    pub caches: KvCounters,
}

impl SpeculateCounters {
    /// Proposals made.
    pub fn made(&self) -> u64 {
        self.by_ngram + self.by_model
    }

    /// Passes that checked proposals.
    pub fn verify_passes(&self) -> u64 {
        self.widths[1..].iter().map(|w| w.passes).sum()
    }

    /// Most proposals in a pass.
    pub fn deepest(&self) -> usize {
        self.widths.iter().rposition(|w| w.passes > 0).unwrap_or(0)
    }

    /// Notes a pass that added `tokens` to the text.
    pub(super) fn note(&mut self, seen: &PassSeen, tokens: u64, stats: &PassStats) {
        let width = &mut self.widths[seen.proposed];
        width.passes += 1;
        width.tokens += tokens;
        width.experts += stats.experts;
        width.pass_ns += seen.pass_ns;
        width.stall_ns += stats.stall_ns;
        self.draft_ns += seen.draft_ns;
        self.proposed[..seen.proposed].iter_mut().for_each(|n| *n += 1);
        self.accepted[..seen.accepted].iter_mut().for_each(|n| *n += 1);
    }
}
