//! The arithmetic of a ladder: intervals, what an added drive brought, efficiencies, gains, and whether one more drive pays.
//! Pure: numbers in, numbers and sentences out.

use super::super::campaign::evaluate::Effect;
use super::record::{Added, Advice, Buy};
use crate::bench::what_if;
use crate::replay::verdict::{Bound, Verdict};
use crate::stats::compare::{Outcome, Rule};
use crate::stats::{self, DEFAULT_RESAMPLES, MIN_PAIRS, Statistic, StatsError};

/// Simulated and measured gains that are further apart are pointed out.
pub const MAX_OFF: f64 = 0.10;
const SEED: u64 = 0;

/// Bootstrap interval (95 %) of the median; `None` with fewer than [`MIN_PAIRS`] values.
pub fn interval(values: &[f64]) -> Result<Option<(f64, f64)>, StatsError> {
    if values.len() < MIN_PAIRS {
        return Ok(None);
    }
    let of = stats::bootstrap_interval(values, Statistic::Median, DEFAULT_RESAMPLES, 0.95, SEED)?;
    Ok(Some((of.low, of.high)))
}

/// What `drives` brought: `pairs` are decode rates without and with them, in one row of the order each; `planned` so many
/// pairs, `steps` so many rungs that share the error. `storage_bound` = one of the two rungs waits for its drives.
pub fn added(
    drives: Vec<String>,
    pairs: &[(f64, f64)],
    planned: usize,
    steps: usize,
    storage_bound: bool,
) -> Result<Added, StatsError> {
    let fine = |v: f64| v.is_finite() && v > 0.0; // a text that ended after one token has no decode rate
    let pairs: Vec<(f64, f64)> = pairs.iter().copied().filter(|p| fine(p.0) && fine(p.1)).collect();
    let rule = Rule { pairs: planned, stop: false, candidates: steps, resamples: DEFAULT_RESAMPLES, seed: SEED };
    // There is no floor: what a rung shows against itself in one row is not measured.
    let decision = rule.decide(&pairs, 0.0, storage_bound)?;
    let effect = decision.effect.as_ref().map(Effect::of);
    Ok(Added { drives, pairs: pairs.len(), effect, level: decision.level, outcome: decision.outcome })
}

/// A part of a whole; `None` where either is not known or nothing.
pub fn share(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    let (part, whole) = (part?, whole?);
    (part > 0.0 && whole > 0.0 && part.is_finite() && whole.is_finite()).then(|| part / whole)
}

/// (simulated gain / measured gain) - 1.
pub fn off(simulated: Option<f64>, measured: Option<f64>) -> Option<f64> {
    share(simulated, measured).map(|ratio| ratio - 1.0)
}

/// One more drive like the last one, simulated; or why it was not.
#[derive(Clone, Debug, PartialEq)]
pub enum OneMore {
    /// What it would bring.
    Gain {
        /// The drive that it is like.
        like: String,
        /// Decode speed over that without it.
        effect: Effect,
        /// What that means.
        verdict: what_if::Verdict,
    },
    /// It cannot be said.
    Cannot(String),
}

/// The top rung, as far as advice goes.
pub struct Top<'a> {
    /// Its drives.
    pub drives: usize,
    /// Its runs.
    pub runs: usize,
    /// Where its time went.
    pub verdict: Option<&'a Verdict>,
    /// What its last drives brought.
    pub added: Option<&'a Added>,
    /// Some drive's pace is emulated.
    pub emulated: bool,
}

/// Whether one more drive pays. `one_more` is only asked for where everything before it leaves that open.
pub fn advise(top: &Top<'_>, one_more: impl FnOnce() -> OneMore) -> Advice {
    let of = if top.emulated { " (EMULATED)" } else { "" };
    let advice = |buy, says: String, one_more| Advice { buy, says, one_more };
    let pairs = top.added.map_or(top.runs, |a| a.pairs.min(top.runs));
    if pairs < MIN_PAIRS || top.added.is_some_and(|a| a.outcome == Outcome::TooFew) {
        let says = format!(
            "Too few runs to say whether one more drive would pay: {pairs} of each rung, {MIN_PAIRS} are needed \
             (--repetitions {MIN_PAIRS})."
        );
        return advice(Buy::TooFew, says, None);
    }
    if let Some(verdict) = top.verdict.filter(|v| v.bound == Bound::NotStorage) {
        let waits = verdict.share(verdict.stall_ns()) * 100.0;
        let says = format!(
            "Do not buy another drive: with {} drives{of} compute waits {waits:.1} % of the time of decoding, and \
             without any wait the text would come {:.2} times as fast.",
            top.drives, verdict.ceiling
        );
        return advice(Buy::DoNotBuy, says, None);
    }
    let last = top.added.map(|a| (a, a.drives.join(", ")));
    if let Some((added, names)) = &last {
        let what = match added.outcome {
            Outcome::Worse => Some("made decoding slower"),
            Outcome::WithinNoise | Outcome::NotStorageBound => Some("brought nothing beyond noise"),
            Outcome::Better | Outcome::TooFew => None,
        };
        if let Some(what) = what {
            let says = format!(
                "Do not buy another drive: the last one{of}, {names}, {what}: {} the speed.",
                times(added.effect)
            );
            return advice(Buy::DoNotBuy, says, None);
        }
    }
    match one_more() {
        OneMore::Gain { like, effect, verdict: what_if::Verdict::Better } => {
            let says =
                format!("One more drive like {like}{of} would bring {} the speed (simulated).", times(Some(effect)));
            advice(Buy::OneMore, says, Some(effect))
        }
        OneMore::Gain { like, effect, .. } => {
            let says = format!(
                "Do not buy another drive: one more like {like}{of} would bring nothing (simulated: {} the speed).",
                times(Some(effect))
            );
            advice(Buy::DoNotBuy, says, Some(effect))
        }
        OneMore::Cannot(why) => {
            let last = last.map_or_else(String::new, |(added, names)| {
                format!("The last drive{of}, {names}, brought {} the speed. ", times(added.effect))
            });
            let says = format!("{last}What one more would bring cannot be simulated: {why}.");
            advice(Buy::Unknown, says, None)
        }
    }
}

/// `1.12 times (1.10 to 1.14)`.
pub fn times(effect: Option<Effect>) -> String {
    let Some(effect) = effect else { return "not known".into() };
    match (effect.low, effect.high) {
        (Some(low), Some(high)) => format!("{:.2} times ({low:.2} to {high:.2})", effect.ratio),
        _ => format!("{:.2} times", effect.ratio),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(ratio: f64, count: usize) -> Vec<(f64, f64)> {
        (0..count)
            .map(|i| (10.0 + i as f64 * 0.01, (10.0 + i as f64 * 0.01) * (ratio + (i % 3) as f64 * 1e-3)))
            .collect()
    }

    fn brought(ratio: f64, count: usize, bound: bool) -> Added {
        added(vec!["denim".into()], &pairs(ratio, count), count, 3, bound).unwrap()
    }

    fn verdict(stall_ns: u64) -> Verdict {
        let all = Verdict::all_compute(100).unwrap();
        let bound = if stall_ns < 10 { Bound::NotStorage } else { Bound::AllDrives };
        let ceiling = 100.0 / (100 - stall_ns) as f64;
        Verdict { bound, all_drives_ns: stall_ns, compute_ns: 100 - stall_ns, ceiling, ..all }
    }

    fn gain(ratio: f64, verdict: what_if::Verdict) -> OneMore {
        let effect = Effect { ratio, low: Some(ratio - 0.01), high: Some(ratio + 0.01) };
        OneMore::Gain { like: "denim".into(), effect, verdict }
    }

    #[test]
    fn intervals_need_six_runs_and_hold_the_median() {
        assert_eq!(interval(&[5.0; 5]).unwrap(), None);
        let (low, high) = interval(&[5.0, 5.1, 4.9, 5.2, 4.8, 5.05]).unwrap().unwrap();
        assert!((4.8..5.025).contains(&low) && (5.025..=5.2).contains(&high), "{low} {high}");
        assert_eq!(interval(&[3.0; 6]).unwrap(), Some((3.0, 3.0)));
    }

    #[test]
    fn an_added_drive_is_judged_in_pairs() {
        let better = brought(1.2, 6, true);
        let effect = better.effect.unwrap();
        assert_eq!((better.outcome, better.pairs), (Outcome::Better, 6));
        assert!((effect.ratio - 1.201).abs() < 1e-3 && effect.low.unwrap() > 1.19, "{effect:?}");
        assert!((better.level - (1.0 - 0.05 / 3.0)).abs() < 1e-12, "three steps share the error");
        assert_eq!(brought(0.8, 6, true).outcome, Outcome::Worse);
        let none: Vec<(f64, f64)> = [1.0, -1.0, 2.0, -2.0, 0.5, -0.5].iter().map(|p| (10.0, 10.0 + p / 10.0)).collect();
        assert_eq!(added(vec![], &none, 6, 3, true).unwrap().outcome, Outcome::WithinNoise);
        assert_eq!(added(vec![], &none, 6, 3, false).unwrap().outcome, Outcome::NotStorageBound);
        assert_eq!(brought(1.5, 4, true).outcome, Outcome::TooFew);
        assert_eq!(added(vec![], &[], 6, 3, true).unwrap().effect, None);
        let without = added(vec![], &[(0.0, 1.0); 6], 6, 3, true).unwrap();
        assert_eq!((without.pairs, without.outcome), (0, Outcome::TooFew), "no decode rate, no pair");
    }

    #[test]
    fn efficiencies_and_gains_by_hand() {
        assert_eq!(share(Some(8.0), Some(10.0)), Some(0.8));
        assert_eq!(
            (share(None, Some(1.0)), share(Some(1.0), Some(0.0)), share(Some(0.0), Some(1.0))),
            (None, None, None)
        );
        assert_eq!(off(Some(3.3), Some(3.0)).map(|o| (o * 1000.0).round()), Some(100.0));
        assert_eq!(off(Some(2.0), Some(2.0)), Some(0.0));
        assert_eq!(off(Some(2.0), None), None);
    }

    #[test]
    fn advice_follows_the_numbers_and_never_too_few_of_them() {
        let (waiting, computing) = (verdict(80), verdict(4));
        let ask = |verdict, added: &Added, more| {
            let top = Top { drives: 4, runs: added.pairs, verdict: Some(verdict), added: Some(added), emulated: true };
            advise(&top, || more)
        };
        let better = brought(1.2, 6, true);
        let few = ask(&computing, &brought(1.0, 4, false), gain(2.0, what_if::Verdict::Better));
        assert_eq!(few.buy, Buy::TooFew);
        assert!(few.says.contains("4 of each rung") && !few.says.contains("Do not"), "{}", few.says);
        let free = ask(&computing, &better, gain(2.0, what_if::Verdict::Better));
        assert_eq!(free.buy, Buy::DoNotBuy);
        assert!(free.says.contains("4.0 % of the time") && free.says.contains("EMULATED"), "{}", free.says);
        let slower = ask(&waiting, &brought(0.9, 6, true), gain(2.0, what_if::Verdict::Better));
        assert!(slower.buy == Buy::DoNotBuy && slower.says.contains("slower: 0.90 times ("), "{}", slower.says);
        let more = ask(&waiting, &better, gain(1.12, what_if::Verdict::Better));
        assert_eq!((more.buy, more.one_more.map(|e| e.ratio)), (Buy::OneMore, Some(1.12)));
        assert!(more.says.contains("1.12 times (1.11 to 1.13) the speed (simulated)"), "{}", more.says);
        let idle = ask(&waiting, &better, gain(1.0, what_if::Verdict::WithinNoise));
        assert!(idle.buy == Buy::DoNotBuy && idle.says.contains("simulated: 1.00 times"), "{}", idle.says);
        let unknown = ask(&waiting, &better, OneMore::Cannot("stripes".into()));
        assert!(unknown.buy == Buy::Unknown && unknown.says.contains("denim, brought 1.20 times"), "{}", unknown.says);
        let one = Top { drives: 1, runs: 6, verdict: Some(&waiting), added: None, emulated: false };
        assert_eq!(advise(&one, || OneMore::Cannot("x".into())).buy, Buy::Unknown);
        let one = Top { runs: 5, ..one };
        assert_eq!(advise(&one, || OneMore::Cannot("x".into())).buy, Buy::TooFew);
    }
}
