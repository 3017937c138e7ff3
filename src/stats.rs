//! Statistics of measurements, and the order in which arms are measured. Pure: seeds are arguments, nothing is
//! timed, and the meaning of the numbers (seconds, ratios, bytes) is the caller's.
//!
//! Definitions, so that figures can be recomputed elsewhere: quantiles interpolate linearly between order statistics
//! at `h = (n - 1) p` (Hyndman and Fan's type 7, the default of R and NumPy); MAD is the median of absolute deviations
//! from the median, not scaled; bootstrap intervals are percentile intervals unless the function says otherwise.

pub mod compare;

/// Pairs below which a comparison is "too few to say" (measuring.md section 5).
pub const MIN_PAIRS: usize = 6;
/// Resamples that make the ends of a 95 % interval steady to about a tenth of its width.
pub const DEFAULT_RESAMPLES: usize = 2000;
/// Most resamples accepted; beyond it the ends move by less than any measurement resolves.
const MAX_RESAMPLES: usize = 1_000_000;

/// Why a statistic does not exist.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StatsError {
    /// Nothing to summarise.
    #[error("no values")]
    Empty,
    /// A value is NaN or infinite.
    #[error("value {index} is {value}; every value must be finite")]
    NotFinite {
        /// Its index.
        index: usize,
        /// What it is.
        value: f64,
    },
    /// A logarithm needs values above zero.
    #[error("pair {index} holds {value}; a ratio needs values above 0")]
    NotPositive {
        /// Its index.
        index: usize,
        /// What it is.
        value: f64,
    },
    /// A parameter is out of range.
    #[error("{name} is {value}; expected {expected}")]
    Parameter {
        /// Name of the parameter.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What would be accepted.
        expected: &'static str,
    },
}

/// SplitMix64: the state advances by the golden-ratio constant and is mixed twice (public formula by Vigna). Small,
/// and the same on every platform and for ever, which a crate's generator does not promise.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator started from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n` (0 when `n` is 0), by multiply-shift: its bias of at most n / 2^64 is far below any use here.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }
}

/// Arithmetic mean.
pub fn mean(values: &[f64]) -> Result<f64, StatsError> {
    check(values)?;
    Ok(mean_of(values))
}

/// Median: the middle value, or the mean of the two middle ones.
pub fn median(values: &[f64]) -> Result<f64, StatsError> {
    quantile(values, 0.5)
}

/// Median of absolute deviations from the median, not scaled (times 1.4826 it estimates a normal sigma).
pub fn mad(values: &[f64]) -> Result<f64, StatsError> {
    let centre = median(values)?;
    let deviations: Vec<f64> = values.iter().map(|v| (v - centre).abs()).collect();
    median(&deviations)
}

/// The `p`-quantile, type 7 (see the top of this file).
pub fn quantile(values: &[f64], p: f64) -> Result<f64, StatsError> {
    Ok(quantiles(values, &[p])?[0])
}

/// Several quantiles for one sort.
pub fn quantiles(values: &[f64], ps: &[f64]) -> Result<Vec<f64>, StatsError> {
    check(values)?;
    if let Some(&p) = ps.iter().find(|p| !(0.0..=1.0).contains(*p)) {
        return Err(StatsError::Parameter { name: "quantile", value: p, expected: "0 to 1" });
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    Ok(ps.iter().map(|&p| quantile_sorted(&sorted, p)).collect())
}

/// What a bootstrap resamples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistic {
    /// The arithmetic mean.
    Mean,
    /// The median.
    Median,
}

/// An estimate with its interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The statistic of the values themselves.
    pub estimate: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Percentile bootstrap interval of a mean or median. `level` is the coverage asked for, e.g. 0.95. Below about 20
/// values such intervals are too narrow; for comparing arms use [`paired_log_ratio`].
pub fn bootstrap_interval(
    values: &[f64],
    statistic: Statistic,
    resamples: usize,
    level: f64,
    seed: u64,
) -> Result<Interval, StatsError> {
    check(values)?;
    check_bootstrap(resamples, level)?;
    let of = |v: &mut [f64]| match statistic {
        Statistic::Mean => mean_of(v),
        Statistic::Median => {
            v.sort_by(f64::total_cmp);
            quantile_sorted(v, 0.5)
        }
    };
    let mut rng = SplitMix64::new(seed);
    let mut draw = values.to_vec();
    let estimate = of(&mut draw);
    let mut seen: Vec<f64> = Vec::with_capacity(resamples);
    for _ in 0..resamples {
        draw.fill_with(|| values[rng.below(values.len())]);
        seen.push(of(&mut draw));
    }
    seen.sort_by(f64::total_cmp);
    let tail = (1.0 - level) / 2.0;
    Ok(Interval { estimate, low: quantile_sorted(&seen, tail), high: quantile_sorted(&seen, 1.0 - tail) })
}

/// The effect of a candidate against a control, measured in pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairedRatio {
    /// Pairs used.
    pub pairs: usize,
    /// Mean of `ln(candidate / control)` with its interval.
    pub log_ratio: Interval,
}

impl PairedRatio {
    /// The same as a factor: 1.10 means the candidate's figure is 10 % higher.
    pub fn ratio(&self) -> Interval {
        let Interval { estimate, low, high } = self.log_ratio;
        Interval { estimate: estimate.exp(), low: low.exp(), high: high.exp() }
    }

    /// Enough pairs to say anything (at least [`MIN_PAIRS`]).
    pub fn enough_pairs(&self) -> bool {
        self.pairs >= MIN_PAIRS
    }

    /// Whether the interval leaves out "no difference". False while there are too few pairs.
    pub fn excludes_zero(&self) -> bool {
        self.enough_pairs() && (self.log_ratio.low > 0.0 || self.log_ratio.high < 0.0)
    }
}

/// Mean log-ratio of `(control, candidate)` pairs with a symmetric studentised bootstrap 95 % interval; see
/// [`paired_log_ratio_at`].
pub fn paired_log_ratio(pairs: &[(f64, f64)], resamples: usize, seed: u64) -> Result<PairedRatio, StatsError> {
    paired_log_ratio_at(pairs, 0.95, resamples, seed)
}

/// Mean log-ratio of `(control, candidate)` pairs with a symmetric studentised bootstrap interval that covers `level`: the
/// width is that quantile of `|mean* - mean| / se*` over resamples, times the standard error of the pairs. On 10,000
/// simulated null campaigns of 6 to 24 pairs it called at 95 % 3.0 to 5.0 % an effect under normal noise and 1.3 to 1.6 %
/// under heavy tails, where a plain percentile interval of six pairs calls about 15 % one. One pair gives an unbounded
/// interval.
pub fn paired_log_ratio_at(
    pairs: &[(f64, f64)],
    level: f64,
    resamples: usize,
    seed: u64,
) -> Result<PairedRatio, StatsError> {
    check_bootstrap(resamples, level)?;
    let mut logs = Vec::with_capacity(pairs.len());
    for (index, &(control, candidate)) in pairs.iter().enumerate() {
        for value in [control, candidate] {
            if !value.is_finite() {
                return Err(StatsError::NotFinite { index, value });
            }
            if value <= 0.0 {
                return Err(StatsError::NotPositive { index, value });
            }
        }
        logs.push(candidate.ln() - control.ln());
    }
    check(&logs)?;
    let (centre, error) = mean_and_error(&logs);
    if logs.len() < 2 {
        let log_ratio = Interval { estimate: centre, low: f64::NEG_INFINITY, high: f64::INFINITY };
        return Ok(PairedRatio { pairs: logs.len(), log_ratio });
    }
    let mut rng = SplitMix64::new(seed);
    let mut draw = logs.clone();
    let mut distances: Vec<f64> = Vec::with_capacity(resamples);
    for _ in 0..resamples {
        draw.fill_with(|| logs[rng.below(logs.len())]);
        let (m, e) = mean_and_error(&draw);
        let off = (m - centre).abs();
        // A resample of one value repeated has no error; it is as far out as can be unless it hits the centre.
        distances.push(if off == 0.0 { 0.0 } else { off / e });
    }
    // No interpolation here: an infinite neighbour must not turn into NaN.
    let rank = ((resamples as f64 * level).ceil() as usize).clamp(1, resamples) - 1;
    let (_, &mut distance, _) = distances.select_nth_unstable_by(rank, f64::total_cmp);
    let half = if error == 0.0 { 0.0 } else { distance * error };
    let log_ratio = Interval { estimate: centre, low: centre - half, high: centre + half };
    Ok(PairedRatio { pairs: logs.len(), log_ratio })
}

/// The order in which `arms` are measured, each `repetitions` times: rows of all arms, in pairs of a row and its
/// mirror image, so that a linear drift cancels inside each pair. Pair `k` starts from a cyclic rotation; after `arms`
/// pairs every arm has stood exactly twice at every place of a row (a cyclic Latin square and its mirror). The first
/// pair is always unrotated; `seed` shuffles the order of the others. Two arms give ABBA BAAB; four arms twice give
/// 0 1 2 3 3 2 1 0. An odd `repetitions` leaves the last row without its mirror image.
pub fn balanced_order(arms: usize, repetitions: usize, seed: u64) -> Vec<usize> {
    let mut order = Vec::new();
    if arms == 0 {
        return order;
    }
    let mut rng = SplitMix64::new(seed);
    let mut rotations: Vec<usize> = (0..arms).collect();
    for row in 0..repetitions {
        let pair = (row / 2) % arms;
        if row % 2 == 0 && pair == 0 {
            let fixed = usize::from(row == 0);
            shuffle(&mut rotations[fixed..], &mut rng);
        }
        let rotated = (0..arms).map(|place| (place + rotations[pair]) % arms);
        if row % 2 == 0 {
            order.extend(rotated);
        } else {
            order.extend(rotated.rev());
        }
    }
    order
}

/// Fisher-Yates.
fn shuffle(values: &mut [usize], rng: &mut SplitMix64) {
    for last in (1..values.len()).rev() {
        values.swap(last, rng.below(last + 1));
    }
}

fn check(values: &[f64]) -> Result<(), StatsError> {
    if values.is_empty() {
        return Err(StatsError::Empty);
    }
    match values.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(StatsError::NotFinite { index, value: values[index] }),
        None => Ok(()),
    }
}

fn check_bootstrap(resamples: usize, level: f64) -> Result<(), StatsError> {
    if resamples == 0 || resamples > MAX_RESAMPLES {
        let expected = "1 to 1000000";
        return Err(StatsError::Parameter { name: "resamples", value: resamples as f64, expected });
    }
    if !(level > 0.0 && level < 1.0) {
        return Err(StatsError::Parameter { name: "level", value: level, expected: "between 0 and 1" });
    }
    Ok(())
}

fn mean_of(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Mean and its standard error (0 for a single value).
fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let m = mean_of(values);
    let squares: f64 = values.iter().map(|v| (v - m) * (v - m)).sum();
    (m, if n < 2.0 { 0.0 } else { (squares / (n - 1.0) / n).sqrt() })
}

fn quantile_sorted(sorted: &[f64], p: f64) -> f64 {
    let place = (sorted.len() - 1) as f64 * p;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (place - low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn summaries_by_hand() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Ok(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Ok(2.5));
        assert_eq!(mad(&[1.0, 1.0, 2.0, 2.0, 4.0, 6.0, 9.0]), Ok(1.0));
        // Type 7: h = 3 * 0.9 = 2.7 -> between 30 and 40.
        assert!((quantile(&[10.0, 20.0, 30.0, 40.0], 0.9).unwrap() - 37.0).abs() < 1e-12);
        assert_eq!(quantiles(&[5.0], &[0.0, 0.3, 1.0]), Ok(vec![5.0; 3]));
        assert_eq!(median(&[]), Err(StatsError::Empty));
        assert!(matches!(mean(&[1.0, f64::NAN]), Err(StatsError::NotFinite { index: 1, .. })));
        assert!(quantile(&[1.0], 1.5).unwrap_err().to_string().contains("quantile is 1.5"));
    }

    #[test]
    fn generator_matches_the_published_sequence() {
        // First outputs of the reference implementation for seed 1234567.
        let mut rng = SplitMix64::new(1_234_567);
        let got: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
        assert_eq!(got, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn two_arms_run_abba_then_baab() {
        assert_eq!(balanced_order(2, 4, 99), [0, 1, 1, 0, 1, 0, 0, 1]);
    }

    #[test]
    fn rungs_climb_and_descend() {
        for seed in 0..20 {
            assert_eq!(balanced_order(4, 2, seed), [0, 1, 2, 3, 3, 2, 1, 0]);
        }
        assert_eq!(balanced_order(3, 1, 0), [0, 1, 2]);
        assert!(balanced_order(0, 5, 0).is_empty() && balanced_order(5, 0, 0).is_empty());
    }

    #[test]
    fn seeds_change_later_rows_only() {
        let orders: std::collections::BTreeSet<_> = (0..50).map(|s| balanced_order(5, 10, s)).collect();
        assert!(orders.len() > 10, "{} distinct orders", orders.len());
        assert!(orders.iter().all(|o| o[..5] == [0, 1, 2, 3, 4]));
    }

    #[test]
    fn bad_pairs_are_named() {
        assert!(matches!(paired_log_ratio(&[], 10, 1), Err(StatsError::Empty)));
        let e = paired_log_ratio(&[(1.0, 1.0), (1.0, 0.0)], 10, 1).unwrap_err();
        assert_eq!(e, StatsError::NotPositive { index: 1, value: 0.0 });
        assert!(paired_log_ratio(&[(1.0, 1.0)], 0, 1).unwrap_err().to_string().contains("resamples"));
        let one = paired_log_ratio(&[(1.0, 2.0)], 10, 1).unwrap();
        assert!(one.log_ratio.low.is_infinite() && !one.excludes_zero());
    }

    #[test]
    fn a_real_effect_is_found_and_five_pairs_say_nothing() {
        let pairs: Vec<_> =
            (0..8).map(|i| (10.0 + f64::from(i), (10.0 + f64::from(i)) * (1.2 + 0.01 * f64::from(i % 3)))).collect();
        let effect = paired_log_ratio(&pairs, DEFAULT_RESAMPLES, 3).unwrap();
        assert!(effect.excludes_zero() && effect.ratio().low > 1.15 && effect.ratio().high < 1.27, "{effect:?}");
        assert!(!paired_log_ratio(&pairs[..5], DEFAULT_RESAMPLES, 3).unwrap().excludes_zero());
        let same: Vec<_> = (1..9).map(|i| (f64::from(i), f64::from(i))).collect();
        assert!(!paired_log_ratio(&same, 100, 3).unwrap().excludes_zero());
    }

    /// Nearly normal, variance 1.
    fn bell(rng: &mut SplitMix64) -> f64 {
        (0..12).map(|_| rng.next_u64() as f64 / 2f64.powi(64) - 0.5).sum()
    }

    /// Symmetric with heavy tails: ten times wider once in ten.
    fn heavy(rng: &mut SplitMix64) -> f64 {
        bell(rng) * if rng.below(10) == 0 { 10.0 } else { 1.0 }
    }

    /// How many of 2,000 comparisons of an arm with itself exclude zero.
    fn false_verdicts(pairs: usize, seed: u64, drift: f64, noise: fn(&mut SplitMix64) -> f64) -> usize {
        let mut rng = SplitMix64::new(seed);
        let campaign = |c: &u64| {
            let mut arms = [Vec::new(), Vec::new()];
            for (place, arm) in balanced_order(2, pairs, *c).into_iter().enumerate() {
                arms[arm].push((drift * place as f64 + 0.02 * noise(&mut rng)).exp());
            }
            let rows: Vec<_> = arms[0].iter().copied().zip(arms[1].iter().copied()).collect();
            paired_log_ratio(&rows, 400, *c).unwrap().excludes_zero()
        };
        (0..2000).filter(campaign).count()
    }

    #[test]
    fn null_campaigns_stay_below_one_in_twenty() {
        // 100 expected at exactly 5 %; three standard deviations of the count are 29.
        for (pairs, seed) in [(6, 11), (8, 12), (12, 13)] {
            let quiet = false_verdicts(pairs, seed, 0.0, bell);
            let rough = false_verdicts(pairs, seed, 0.004, heavy);
            assert!(quiet <= 129 && rough <= 129, "{pairs} pairs: {quiet} quiet, {rough} rough of 2000");
            assert!(quiet > 10, "an interval that never speaks is no interval: {quiet} of 2000");
        }
    }

    proptest! {
        #[test]
        fn every_arm_stands_everywhere_equally_often(arms in 1usize..8, cycles in 1usize..4, seed: u64) {
            let order = balanced_order(arms, 2 * arms * cycles, seed);
            let mut seen = vec![vec![0usize; arms]; arms];
            for (i, &arm) in order.iter().enumerate() {
                seen[arm][i % arms] += 1;
            }
            prop_assert!(seen.iter().flatten().all(|&n| n == 2 * cycles), "{seen:?}");
        }

        #[test]
        fn arms_are_even_and_linear_drift_cancels(arms in 1usize..8, pairs in 1usize..9, seed: u64) {
            let order = balanced_order(arms, 2 * pairs, seed);
            let mut places = vec![(0usize, 0usize); arms];
            for (i, &arm) in order.iter().enumerate() {
                places[arm].0 += 1;
                places[arm].1 += i;
            }
            prop_assert!(places.iter().all(|&p| p == places[0]), "{places:?}");
        }

        #[test]
        fn intervals_hold_their_estimate_and_repeat(
            values in prop::collection::vec(-1e6f64..1e6, 1..40), seed: u64, median in any::<bool>(),
        ) {
            let statistic = if median { Statistic::Median } else { Statistic::Mean };
            let a = bootstrap_interval(&values, statistic, 300, 0.95, seed).unwrap();
            prop_assert_eq!(a, bootstrap_interval(&values, statistic, 300, 0.95, seed).unwrap());
            let (min, max) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), &v| (l.min(v), h.max(v)));
            prop_assert!(a.low <= a.high && a.low >= min - 1e-6 && a.high <= max + 1e-6);
        }

        #[test]
        fn quantiles_are_ordered_and_shift_with_the_data(
            values in prop::collection::vec(-1e3f64..1e3, 1..40), p in 0.0f64..=1.0, q in 0.0f64..=1.0, by in -1e3f64..1e3,
        ) {
            let (low, high) = (p.min(q), p.max(q));
            prop_assert!(quantile(&values, low).unwrap() <= quantile(&values, high).unwrap());
            let moved: Vec<f64> = values.iter().map(|v| v + by).collect();
            prop_assert!((quantile(&moved, p).unwrap() - quantile(&values, p).unwrap() - by).abs() < 1e-9);
            prop_assert!((mad(&moved).unwrap() - mad(&values).unwrap()).abs() < 1e-9);
        }

        #[test]
        fn swapping_arms_mirrors_the_effect(pairs in prop::collection::vec((0.1f64..9.0, 0.1f64..9.0), 2..20), seed: u64) {
            let swapped: Vec<_> = pairs.iter().map(|&(a, b)| (b, a)).collect();
            let (x, y) = (paired_log_ratio(&pairs, 200, seed).unwrap(), paired_log_ratio(&swapped, 200, seed).unwrap());
            prop_assert!((x.log_ratio.estimate + y.log_ratio.estimate).abs() < 1e-9);
            prop_assert!((x.log_ratio.low + y.log_ratio.high).abs() < 1e-6 || x.log_ratio.low.is_infinite());
        }
    }
}
