//! What a run's record says of speculative decoding: acceptance by position, and passes by width with the experts that they
//! awaited, from which an ideal can be computed. Data only.

use crate::decode::speculate::{MAX_DEPTH, SpeculateCounters};
use serde::{Deserialize, Serialize};

/// Speculation of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpeculationRecord {
    /// Who proposed: `ngram` or `model`.
    pub drafter: String,
    /// Who the draft model is; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub draft_model: String,
    /// Passes that checked proposals.
    pub verify_passes: u64,
    /// Rows of these passes: one for the last token, one for each proposal.
    pub verify_rows: u64,
    /// Tokens that they added to the text.
    pub verify_tokens: u64,
    /// Tokens / passes of them; `None` without such a pass.
    pub tokens_per_verify_pass: Option<f64>,
    /// Distinct experts that they awaited, summed over layers, for each pass.
    pub experts_per_verify_pass: Option<f64>,
    /// The same of passes that extended the text without proposals.
    pub experts_per_plain_pass: Option<f64>,
    /// Time in which proposals were made, in nanoseconds; reading the prompt is in it.
    pub draft_ns: u64,
    /// Most bytes that the draft model's latent cache held.
    #[serde(default)]
    pub draft_cache_bytes: u64,
    /// Rows of it that were dropped, because its attention looks back no further.
    #[serde(default)]
    pub draft_rows_dropped: u64,
    /// By position behind the last token, from 1.
    pub positions: Vec<PositionRecord>,
    /// Passes by the proposals that they checked, from none; widths that did not occur are left out.
    pub widths: Vec<WidthRecord>,
}

/// Proposals at one position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PositionRecord {
    /// From 1.
    pub position: usize,
    /// Proposals that were checked.
    pub proposed: u64,
    /// Those that were accepted: all before them were too.
    pub accepted: u64,
    /// accepted / proposed.
    pub share: f64,
}

/// Passes with one number of proposals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WidthRecord {
    /// Proposals in each of them.
    pub proposals: usize,
    /// How many there were.
    pub passes: u64,
    /// Tokens that they added to the text.
    pub tokens: u64,
    /// Distinct experts awaited, summed over layers and passes.
    pub experts: u64,
    /// Their time, what restored the state included, in nanoseconds.
    pub pass_ns: u64,
    /// Part of it spent waiting for experts.
    pub stall_ns: u64,
}

impl SpeculationRecord {
    /// From what was counted.
    pub fn of(drafter: &str, draft_model: &str, c: &SpeculateCounters) -> Self {
        let share = |a: u64, b: u64| (b > 0).then(|| a as f64 / b as f64);
        let checked = c.proposed.iter().rposition(|n| *n > 0).map_or(0, |last| last + 1);
        let positions = (0..checked).map(|at| PositionRecord {
            position: at + 1,
            proposed: c.proposed[at],
            accepted: c.accepted[at],
            share: share(c.accepted[at], c.proposed[at]).unwrap_or(0.0),
        });
        let used = (0..=MAX_DEPTH).filter(|&at| c.widths[at].passes > 0);
        let widths: Vec<WidthRecord> = used
            .map(|proposals| {
                let w = &c.widths[proposals];
                WidthRecord {
                    proposals,
                    passes: w.passes,
                    tokens: w.tokens,
                    experts: w.experts,
                    pass_ns: w.pass_ns,
                    stall_ns: w.stall_ns,
                }
            })
            .collect();
        let verify = || widths.iter().filter(|w| w.proposals > 0);
        let (passes, tokens) = (verify().map(|w| w.passes).sum(), verify().map(|w| w.tokens).sum());
        Self {
            drafter: drafter.into(),
            draft_model: draft_model.into(),
            verify_passes: passes,
            verify_rows: verify().map(|w| w.passes * (w.proposals as u64 + 1)).sum(),
            verify_tokens: tokens,
            tokens_per_verify_pass: share(tokens, passes),
            experts_per_verify_pass: share(verify().map(|w| w.experts).sum(), passes),
            experts_per_plain_pass: share(c.widths[0].experts, c.widths[0].passes),
            draft_ns: c.draft_ns,
            draft_cache_bytes: c.caches.peak_bytes,
            draft_rows_dropped: c.caches.dropped_rows,
            positions: positions.collect(),
            widths,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::speculate::WidthCounters;

    #[test]
    fn sums_and_shares_follow_from_the_counters() {
        let mut c = SpeculateCounters { draft_ns: 7, ..SpeculateCounters::default() };
        c.widths[0] = WidthCounters { passes: 4, tokens: 4, experts: 40, pass_ns: 400, stall_ns: 300 };
        c.widths[2] = WidthCounters { passes: 10, tokens: 22, experts: 180, pass_ns: 2000, stall_ns: 1500 };
        (c.proposed[0], c.accepted[0], c.proposed[1], c.accepted[1]) = (10, 8, 10, 4);
        let r = SpeculationRecord::of("ngram", "", &c);
        assert_eq!((r.verify_passes, r.verify_rows, r.verify_tokens), (10, 30, 22));
        assert_eq!((r.tokens_per_verify_pass, r.experts_per_verify_pass), (Some(2.2), Some(18.0)));
        assert_eq!((r.experts_per_plain_pass, r.positions.len(), r.widths.len()), (Some(10.0), 2, 2));
        assert_eq!((r.positions[1].position, r.positions[1].share), (2, 0.4));
        let none = SpeculationRecord::of("model", "abc", &SpeculateCounters::default());
        assert_eq!((none.tokens_per_verify_pass, none.positions.len()), (None, 0));
        let back: SpeculationRecord = serde_json::from_str(&serde_json::to_string(&r).unwrap()).unwrap();
        assert_eq!(back, r);
    }
}
