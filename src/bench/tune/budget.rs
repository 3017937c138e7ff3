//! How many candidates and pairs a budget of time holds. Pure arithmetic.

use crate::bench::campaign::order::{DEFAULT_PAIRS, rows_for};
use crate::stats::MIN_PAIRS;

/// Time of runs that are repeated, and of what lies between runs, as a share of the runs.
const OVERHEAD: f64 = 1.15;
/// A warm-up takes this part of a run.
const WARM_UP: f64 = 0.5;

/// What fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Candidates, the first ones.
    pub candidates: usize,
    /// Pairs of each of them, and of the current profile against itself.
    pub pairs: usize,
    /// Seconds that all runs take, if none has to be repeated often.
    pub seconds: f64,
}

/// Seconds of a campaign with a run of the current profile taking `run_s`, candidates being `gains` times as fast.
fn seconds(run_s: f64, gains: &[f64], pairs: usize) -> f64 {
    let others: f64 = gains.iter().map(|g| run_s / g.max(0.1)).sum();
    let rows = pairs as f64;
    OVERHEAD * (rows * 2.0 * run_s + (rows + WARM_UP) * (run_s + others))
}

/// Pairs that may be measured, the most wanted first.
fn pairs_to_try(prompts: usize, asked: Option<usize>) -> Vec<usize> {
    if let Some(pairs) = asked {
        return vec![pairs];
    }
    let (most, least) = (rows_for(prompts, DEFAULT_PAIRS), rows_for(prompts, MIN_PAIRS));
    let mut out = vec![most];
    while let Some(next) = out.last().map(|p| p - 2 * prompts.max(1)).filter(|p| *p >= least) {
        out.push(next);
    }
    out
}

/// The most candidates, then the most pairs, that `left_s` seconds hold; `None` = not even one with enough pairs.
pub fn fit(left_s: f64, run_s: f64, gains: &[f64], prompts: usize, asked: Option<usize>) -> Option<Fit> {
    for candidates in (1..=gains.len()).rev() {
        for pairs in pairs_to_try(prompts, asked) {
            let seconds = seconds(run_s, &gains[..candidates], pairs);
            if seconds <= left_s {
                return Some(Fit { candidates, pairs, seconds });
            }
        }
    }
    None
}

/// Seconds of the smallest campaign that says anything: one candidate, `gain` times as fast.
pub fn least_s(run_s: f64, gain: f64, prompts: usize, asked: Option<usize>) -> f64 {
    pairs_to_try(prompts, asked).last().map_or(f64::INFINITY, |&pairs| seconds(run_s, &[gain], pairs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_go_before_pairs_and_six_pairs_are_the_least() {
        let gains = [4.0, 0.5];
        let all = fit(1e6, 1.0, &gains, 1, None).unwrap();
        assert_eq!((all.candidates, all.pairs), (2, 8));
        // 8 pairs of two candidates: 1.15 * (16 + 8.5 * 3.25)
        assert!((all.seconds - 1.15 * 43.625).abs() < 1e-9, "{}", all.seconds);
        let tight = fit(all.seconds - 0.1, 1.0, &gains, 1, None).unwrap();
        assert_eq!((tight.candidates, tight.pairs), (2, 6));
        let one = fit(tight.seconds - 0.1, 1.0, &gains, 1, None).unwrap();
        assert_eq!((one.candidates, one.pairs), (1, 8), "one candidate, and then all pairs again");
        let least = least_s(1.0, 4.0, 1, None);
        assert_eq!(fit(least, 1.0, &gains, 1, None).unwrap().pairs, 6);
        assert_eq!(fit(least - 0.1, 1.0, &gains, 1, None), None);
    }

    #[test]
    fn every_prompt_gets_its_rows() {
        assert_eq!(pairs_to_try(1, None), [8, 6]);
        assert_eq!(pairs_to_try(2, None), [8]);
        assert_eq!(pairs_to_try(3, None), [12, 6]);
        assert_eq!(pairs_to_try(5, None), [10]);
        assert_eq!(pairs_to_try(1, Some(20)), [20]);
    }
}
