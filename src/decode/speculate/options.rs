//! Settings of speculative decoding.

use super::adaptive::DepthPolicy;
use super::{DrafterKind, MAX_DEPTH};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Proposals in a pass unless told otherwise.
const DEFAULT_DEPTH: usize = 4;

/// When a proposal is kept. Greedy decoding keeps it when it is the most likely token, by either rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AcceptRule {
    /// The draft model draws its proposals, and one is kept with probability min(1, p / q): the most are kept, and the text
    /// is distributed as without proposals, but is another one.
    #[default]
    Standard,
    /// The draft model proposes what it holds most likely, and a proposal is kept if it is what is drawn: fewer are kept,
    /// and the text is the very one that the same seed gives without proposals.
    ExactMatch,
}

impl AcceptRule {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::ExactMatch => "exact-match",
        }
    }
}

/// How text is drafted and checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpeculateOptions {
    /// Who proposes tokens.
    pub speculate: DrafterKind,
    /// The draft model: a store or a checkpoint.
    pub draft_model: Option<PathBuf>,
    /// Most proposals in a pass.
    pub draft_depth: usize,
    /// Who chooses how many.
    pub draft_policy: DepthPolicy,
    /// When one is kept.
    pub draft_accept: AcceptRule,
    /// Positions that the draft model's attention looks back, its own included; 0 = all.
    pub draft_window: usize,
}

impl Default for SpeculateOptions {
    fn default() -> Self {
        Self {
            speculate: DrafterKind::Off,
            draft_model: None,
            draft_depth: DEFAULT_DEPTH,
            draft_policy: DepthPolicy::Fixed,
            draft_accept: AcceptRule::Standard,
            draft_window: 0,
        }
    }
}

impl SpeculateOptions {
    /// Whether anything is proposed.
    pub fn is_on(&self) -> bool {
        self.speculate != DrafterKind::Off
    }

    /// Rows of the widest pass that checks proposals; 0 = there is none.
    pub fn rows(&self) -> usize {
        if self.is_on() { self.draft_depth.saturating_add(1) } else { 0 }
    }

    /// Settings that cannot go together.
    pub fn check(&self, temperature: f32) -> Result<(), String> {
        if !(1..=MAX_DEPTH).contains(&self.draft_depth) {
            return Err(format!("--draft-depth is {}; expected 1 to {MAX_DEPTH}", self.draft_depth));
        }
        match (self.speculate, &self.draft_model) {
            (DrafterKind::Model, None) => {
                return Err(
                    "--speculate model needs --draft-model, a store or checkpoint of a small dense model".into()
                );
            }
            (DrafterKind::Ngram | DrafterKind::Off, Some(_)) => {
                return Err(format!(
                    "--draft-model does nothing with --speculate {}; give --speculate model, or leave it out",
                    self.speculate.name()
                ));
            }
            _ => {}
        }
        if self.draft_window > 0 && self.speculate != DrafterKind::Model {
            return Err(format!(
                "--draft-window is of the draft model and does nothing with --speculate {}; give --speculate model, or leave it out",
                self.speculate.name()
            ));
        }
        if self.draws(temperature) && self.draft_policy == DepthPolicy::Adaptive {
            return Err("--draft-policy adaptive goes by measured times, and with --draft-accept standard at a temperature above \
                        0 the drawn tokens depend on how many are proposed: the same seed would not repeat a text; give \
                        --draft-accept exact-match, or --draft-policy fixed"
                .into());
        }
        Ok(())
    }

    /// Whether proposals are drawn, so that the text differs from the one without proposals.
    pub fn draws(&self, temperature: f32) -> bool {
        self.speculate == DrafterKind::Model && self.draft_accept == AcceptRule::Standard && temperature > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_go_together_is_said() {
        let on = |change: &dyn Fn(&mut SpeculateOptions)| {
            let mut options = SpeculateOptions { speculate: DrafterKind::Ngram, ..SpeculateOptions::default() };
            change(&mut options);
            options
        };
        assert_eq!(SpeculateOptions::default().check(0.0), Ok(()));
        assert_eq!((SpeculateOptions::default().rows(), on(&|_| {}).rows()), (0, 5));
        for (options, word) in [
            (on(&|o| o.draft_depth = 0), "--draft-depth"),
            (on(&|o| o.draft_depth = MAX_DEPTH + 1), "--draft-depth"),
            (on(&|o| o.speculate = DrafterKind::Model), "--draft-model"),
            (on(&|o| o.draft_model = Some("x".into())), "--speculate ngram"),
            (on(&|o| o.draft_window = 8), "--draft-window"),
        ] {
            let e = options.check(0.0).unwrap_err();
            assert!(e.contains(word), "{e}");
        }
        let both = on(&|o| {
            (o.speculate, o.draft_model, o.draft_policy) =
                (DrafterKind::Model, Some("x".into()), DepthPolicy::Adaptive);
        });
        assert_eq!(both.check(0.0), Ok(()));
        assert!(both.check(0.5).unwrap_err().contains("exact-match"));
        let same = SpeculateOptions { draft_accept: AcceptRule::ExactMatch, ..both };
        assert_eq!(same.check(0.5), Ok(()));
    }
}
