//! How sure a simulated figure is: passes drawn again with replacement, from simulations with other seeds. Pure.

use crate::stats::{Interval, SplitMix64};

/// Draws for an interval of 95 %.
pub const DRAWS: usize = 400;
/// Fewer passes than this are no sample of passes: then single barriers are drawn.
const MIN_GROUPS: usize = 8;

/// Barriers of one simulated run.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    /// (nanoseconds, pass), ascending.
    sorted: Vec<(u64, u32)>,
    groups: usize,
}

/// What is asked of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Arithmetic mean.
    pub mean_ns: Interval,
    /// Median.
    pub p50_ns: Interval,
    /// 95th percentile.
    pub p95_ns: Interval,
}

impl Waits {
    /// Of `(nanoseconds, pass)`; passes count from 0 and none is missing.
    pub fn new(waits: impl Iterator<Item = (u64, u32)>) -> Self {
        let mut sorted: Vec<(u64, u32)> = waits.collect();
        let groups = sorted.iter().map(|w| w.1 as usize + 1).max().unwrap_or(0);
        let alone = groups < MIN_GROUPS;
        if alone {
            sorted.iter_mut().enumerate().for_each(|(at, w)| w.1 = at as u32);
        }
        sorted.sort_unstable();
        let groups = if alone { sorted.len() } else { groups };
        Self { sorted, groups }
    }

    /// Mean, median and 95th percentile with each pass counted so many times. Quantiles are the smallest values that at
    /// least the share lies at or below.
    fn figures(&self, times: &[u32]) -> [f64; 3] {
        let count: u64 = self.sorted.iter().map(|w| u64::from(times[w.1 as usize])).sum();
        let (mut seen, mut sum, mut quantiles) = (0u64, 0.0, [0.0; 2]);
        let ranks = [0.5, 0.95].map(|q| ((count as f64 * q).ceil() as u64).max(1));
        for &(ns, group) in &self.sorted {
            let n = u64::from(times[group as usize]);
            for (q, rank) in quantiles.iter_mut().zip(ranks) {
                if seen < rank && seen + n >= rank {
                    *q = ns as f64;
                }
            }
            seen += n;
            sum += ns as f64 * n as f64;
        }
        [sum / count.max(1) as f64, quantiles[0], quantiles[1]]
    }
}

/// The figures of `runs`, each a simulation of the same barriers: the mean over runs, and where they lie in 95 % of draws.
/// `None` without barriers.
pub fn figures(runs: &[Waits], seed: u64) -> Option<Figures> {
    let first = runs.first().filter(|r| !r.sorted.is_empty())?;
    let once = vec![1; first.groups];
    let mean = |of: usize| runs.iter().map(|r| r.figures(&once)[of]).sum::<f64>() / runs.len() as f64;
    let mut rng = SplitMix64::new(seed ^ 0x7369_6d75_6c61_7465);
    let mut drawn: [Vec<f64>; 3] = std::array::from_fn(|_| Vec::with_capacity(DRAWS));
    let mut times = vec![0u32; first.groups];
    for _ in 0..DRAWS {
        let run = &runs[rng.below(runs.len())];
        times.fill(0);
        (0..first.groups).for_each(|_| times[rng.below(first.groups)] += 1);
        for (list, value) in drawn.iter_mut().zip(run.figures(&times)) {
            list.push(value);
        }
    }
    let [means, medians, tails] = drawn;
    Some(Figures { mean_ns: within(mean(0), means), p50_ns: within(mean(1), medians), p95_ns: within(mean(2), tails) })
}

/// The mean of values by pass, over runs (`by_run[run][pass]`), with its interval. `None` without passes.
pub fn mean_of_passes(by_run: &[Vec<f64>], seed: u64) -> Option<Interval> {
    let passes = by_run.first().map(Vec::len).filter(|n| *n > 0)?;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let estimate = by_run.iter().map(|r| mean(r)).sum::<f64>() / by_run.len() as f64;
    let mut rng = SplitMix64::new(seed ^ 0x7061_7373_6573);
    let draw = |rng: &mut SplitMix64| {
        let run = &by_run[rng.below(by_run.len())];
        (0..passes).map(|_| run[rng.below(passes)]).sum::<f64>() / passes as f64
    };
    let drawn = (0..DRAWS).map(|_| draw(&mut rng)).collect();
    Some(within(estimate, drawn))
}

fn within(estimate: f64, mut drawn: Vec<f64>) -> Interval {
    drawn.sort_by(f64::total_cmp);
    let at = |q: f64| drawn.get(((drawn.len() - 1) as f64 * q).round() as usize).copied().unwrap_or(estimate);
    Interval { estimate, low: at(0.025).min(estimate), high: at(0.975).max(estimate) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_barriers_leave_no_doubt_and_unequal_passes_do() {
        let same = Waits::new((0..40).map(|i| (7, i / 2)));
        let seen = figures(&[same.clone(), same], 1).unwrap();
        let sure = Interval { estimate: 7.0, low: 7.0, high: 7.0 };
        assert_eq!((seen.mean_ns, seen.p50_ns, seen.p95_ns), (sure, sure, sure));
        let mixed = Waits::new((0..40).map(|i| (u64::from(i) / 2, i / 2)));
        let seen = figures(&[mixed], 1).unwrap();
        assert_eq!((seen.mean_ns.estimate, seen.p50_ns.estimate, seen.p95_ns.estimate), (9.5, 9.0, 18.0));
        assert!(seen.mean_ns.low < 9.0 && seen.mean_ns.high > 10.0, "{seen:?}");
        assert_eq!(figures(&[Waits::new(std::iter::empty())], 1), None);
        assert_eq!(figures(&[], 1), None);
    }

    #[test]
    fn seeds_that_disagree_widen_the_interval() {
        let runs = [vec![1.0; 9], vec![3.0; 9]];
        assert_eq!(mean_of_passes(&runs, 4), Some(Interval { estimate: 2.0, low: 1.0, high: 3.0 }));
        assert_eq!(mean_of_passes(&[vec![]], 4), None);
    }
}
