//! What a comparison of two arms says: an effect measured in pairs, judged against what an arm shows against itself (the
//! A/A floor), with an optional stop rule. Pure; knows neither runs nor drives.
//!
//! **The rule.** A candidate is better or worse when two things hold at once: the interval of its mean log-ratio leaves out
//! zero, and the mean lies outside the floor, i.e. is larger than any difference that the control cannot be told from
//! having against itself (the far end of its own interval, on both sides). Everything else is within noise.
//!
//! **The interval** is the symmetric studentised bootstrap of [`super::paired_log_ratio_at`]: plain percentile intervals
//! of 6 to 12 pairs are far too narrow, and an interval by sign flips of six pairs has no 95 % level at all (its finest is
//! 1 - 2 / 2^6). `tests/ab.rs` prints how often 10,000 null campaigns with drift and heavy tails are called an effect.
//!
//! **Looks.** Without a stop rule the pairs are looked at once, when all are there. With one they are looked at after 6, 8,
//! 10, ... pairs, and the error of 5 % is spent in proportion to the pairs that came since the last look (the union bound
//! then holds whatever the looks have in common, which a rule for normal noise would have to assume). Several candidates
//! share the 5 % in equal parts.

use super::{Interval, MIN_PAIRS, PairedRatio, StatsError, paired_log_ratio_at};
use serde::{Deserialize, Serialize};

/// Probability of any false verdict in a campaign whose arms do not differ.
pub const FALSE_VERDICTS: f64 = 0.05;

/// What a comparison says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The candidate's figure is higher.
    Better,
    /// It is lower.
    Worse,
    /// No difference that could not be chance.
    WithinNoise,
    /// No difference, and neither arm waits for storage: a setting of storage could not show.
    NotStorageBound,
    /// Fewer pairs than were planned, or than say anything.
    TooFew,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Better, Self::Worse, Self::WithinNoise, Self::NotStorageBound, Self::TooFew];

    /// As in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::WithinNoise => "within-noise",
            Self::NotStorageBound => "not-storage-bound",
            Self::TooFew => "too-few",
        }
    }

    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::WithinNoise => "within noise",
            Self::NotStorageBound => "not storage-bound",
            Self::TooFew => "too few to say",
        }
    }
}

/// How pairs are judged; fixed before the first is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Pairs when all are there.
    pub pairs: usize,
    /// Look earlier too, and stop at an effect.
    pub stop: bool,
    /// Candidates that share the error.
    pub candidates: usize,
    /// Bootstrap resamples.
    pub resamples: usize,
    /// Seed of the bootstrap.
    pub seed: u64,
}

/// What pairs say under a rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The verdict.
    pub outcome: Outcome,
    /// The effect, at the look that decided, or the last one; `None` without a pair.
    pub effect: Option<PairedRatio>,
    /// Level of its interval.
    pub level: f64,
    /// Looks that were taken.
    pub looks: usize,
}

impl Rule {
    /// Numbers of pairs at which to look.
    pub fn looks(&self) -> Vec<usize> {
        let mut looks: Vec<usize> = if self.stop { (MIN_PAIRS..self.pairs).step_by(2).collect() } else { Vec::new() };
        looks.push(self.pairs);
        looks
    }

    /// Level of the interval at the look after `pairs` pairs, the look before having come after `before`.
    fn level(&self, before: usize, pairs: usize) -> f64 {
        let share = (pairs - before) as f64 / self.pairs.max(1) as f64;
        1.0 - FALSE_VERDICTS / self.candidates.max(1) as f64 * share
    }

    /// Judges pairs of `(control, candidate)` in the order in which they were measured; more figures is better. `floor` is
    /// [`floor_of`] the control against itself, `storage_bound` whether an arm waits for storage.
    pub fn decide(&self, pairs: &[(f64, f64)], floor: f64, storage_bound: bool) -> Result<Decision, StatsError> {
        let (mut before, mut taken) = (0, 0);
        let mut last = None;
        for look in self.looks().into_iter().take_while(|look| *look <= pairs.len()) {
            let level = self.level(before, look);
            let effect = paired_log_ratio_at(&pairs[..look], level, self.resamples, self.seed)?;
            (before, taken, last) = (look, taken + 1, Some((effect, level)));
            let Interval { estimate, .. } = effect.log_ratio;
            if effect.excludes_zero() && estimate.abs() > floor {
                let outcome = if estimate > 0.0 { Outcome::Better } else { Outcome::Worse };
                return Ok(Decision { outcome, effect: Some(effect), level, looks: taken });
            }
        }
        if pairs.len() < self.pairs || pairs.len() < MIN_PAIRS {
            // Not a look: nothing is decided by it.
            let level = self.level(0, self.pairs);
            let effect = if pairs.is_empty() {
                None
            } else {
                Some(paired_log_ratio_at(pairs, level, self.resamples, self.seed)?)
            };
            return Ok(Decision { outcome: Outcome::TooFew, effect, level, looks: taken });
        }
        let outcome = if storage_bound { Outcome::WithinNoise } else { Outcome::NotStorageBound };
        let (effect, level) = last.map_or((None, self.level(0, self.pairs)), |(e, l)| (Some(e), l));
        Ok(Decision { outcome, effect, level, looks: taken })
    }

    /// Whether more pairs could still change the verdict.
    pub fn is_open(&self, pairs: &[(f64, f64)], floor: f64) -> Result<bool, StatsError> {
        Ok(pairs.len() < self.pairs && self.decide(pairs, floor, true)?.outcome == Outcome::TooFew)
    }

    /// The control against itself, always at 95 %.
    pub fn floor(&self, pairs: &[(f64, f64)]) -> Result<PairedRatio, StatsError> {
        paired_log_ratio_at(pairs, 1.0 - FALSE_VERDICTS, self.resamples, self.seed)
    }
}

/// The largest log-ratio, either way, that an arm cannot be told from having against itself.
pub fn floor_of(itself: &PairedRatio) -> f64 {
    itself.log_ratio.low.abs().max(itself.log_ratio.high.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(pairs: usize, stop: bool) -> Rule {
        Rule { pairs, stop, candidates: 1, resamples: 500, seed: 1 }
    }

    /// Pairs with these effects in per cent.
    fn pairs(percent: &[f64]) -> Vec<(f64, f64)> {
        percent.iter().map(|p| (10.0, 10.0 * (1.0 + p / 100.0))).collect()
    }

    #[test]
    fn verdicts_by_hand() {
        let clear = pairs(&[9.0, 10.0, 11.0, 10.5, 9.5, 10.0, 9.8, 10.2]);
        let decide = |p: &[(f64, f64)], floor, bound| rule(8, false).decide(p, floor, bound).unwrap().outcome;
        assert_eq!(decide(&clear, 0.01, true), Outcome::Better);
        let worse: Vec<_> = clear.iter().map(|&(a, b)| (b, a)).collect();
        assert_eq!(decide(&worse, 0.01, true), Outcome::Worse);
        // An effect inside what the arm shows against itself is none.
        assert_eq!(decide(&clear, 0.2, true), Outcome::WithinNoise);
        assert_eq!(decide(&clear, f64::INFINITY, true), Outcome::WithinNoise);
        let none = pairs(&[1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1.0, -1.0]);
        assert_eq!(decide(&none, 0.01, true), Outcome::WithinNoise);
        assert_eq!(decide(&none, 0.01, false), Outcome::NotStorageBound);
        assert_eq!(decide(&clear[..7], 0.01, true), Outcome::TooFew, "not all that were planned");
        assert_eq!(decide(&[], 0.01, true), Outcome::TooFew);
        assert_eq!(rule(5, false).decide(&clear[..5], 0.01, true).unwrap().outcome, Outcome::TooFew);
    }

    #[test]
    fn looks_spend_the_error_and_no_more() {
        let r = rule(12, true);
        assert_eq!(r.looks(), [6, 8, 10, 12]);
        assert_eq!(rule(12, false).looks(), [12]);
        let mut before = 0;
        let mut spent = 0.0;
        for look in r.looks() {
            spent += 1.0 - r.level(before, look);
            before = look;
        }
        assert!((spent - FALSE_VERDICTS).abs() < 1e-12);
        let shared = Rule { candidates: 5, ..rule(8, false) };
        assert!((shared.level(0, 8) - 0.99).abs() < 1e-12);
    }

    #[test]
    fn a_clear_effect_stops_at_the_first_look() {
        let clear = pairs(&[9.0, 10.0, 11.0, 10.5, 9.5, 10.0]);
        let r = rule(12, true);
        assert!(!r.is_open(&clear, 0.01).unwrap());
        assert!(r.is_open(&clear[..5], 0.01).unwrap());
        let d = r.decide(&clear, 0.01, true).unwrap();
        assert_eq!((d.outcome, d.looks), (Outcome::Better, 1));
        assert!(d.level > 0.97, "the first look has half of the error");
        assert!(r.is_open(&clear, 0.5).unwrap(), "within the floor nothing is decided");
    }
}
