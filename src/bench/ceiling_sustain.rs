//! From a drive's rate over time to its knee, its plateau and a duty cycle. Pure: windows of bytes go in.
//!
//! **Knee.** Single windows are noisy, so each is replaced by the median of its neighbourhood first. Then the series is cut
//! in two where two levels explain it best (least squares). The cut is a knee if the rate behind it is lower by more than
//! [`LEAST_DROP`], if it stays lower (the level behind is that of its median, not of a pause), and if two levels leave
//! less than half of the deviations of one. A series that falls in several steps has its knee at the largest of them.
//!
//! **Duty cycle.** A drive that throttles is taken for a bucket: while it delivers more than the plateau `p`, the bucket
//! drains by what is above; at rest it fills by `p`. A burst of rate `b` that lasts until the knee drains it once. So
//! bursts may last until the knee (less a margin), and a share `p / b` of the time. That rest refills is an assumption:
//! the curve shows one burst only.

use crate::drive::profile::{DutyCycle, Sustained};
use crate::stats;

/// Windows on either side of a cut, at least.
const LEAST_WINDOWS: usize = 4;
/// Smallest share by which the rate falls at a knee.
pub const LEAST_DROP: f64 = 0.08;
/// Share of the squared deviations that a knee explains, at least.
const EXPLAINED: f64 = 0.5;
/// Windows on each side that smooth one.
const NEIGHBOURS: usize = 2;
/// Share of the time to the knee that a burst may use.
const BURST_SHARE: f64 = 0.8;
/// Windows at the beginning that are left out of rates because the drive starts there.
const START_WINDOWS: usize = 1;

/// What a series of windows of `window_s` seconds shows; `None` when it is too short or nothing was read.
pub fn sustained(window_s: f64, window_bytes: &[u64]) -> Option<Sustained> {
    let rates: Vec<f64> = window_bytes.iter().map(|&b| b as f64 / window_s).collect();
    let seconds = window_s * rates.len() as f64;
    let begun = START_WINDOWS.min(rates.len().saturating_sub(1));
    let whole = positive(stats::mean(&rates[begun..]).ok()?)?;
    let level = Sustained { seconds, burst_bytes_per_s: whole, knee_s: None, plateau_bytes_per_s: whole, duty: None };
    let Some(cut) = knee(&rates) else { return Some(level) };
    // means, not medians: a window holds few reads, and behind the knee a drive may swing between two rates
    let burst = positive(stats::mean(&rates[begun..cut]).ok()?)?;
    let plateau = positive(stats::mean(&rates[cut..]).ok()?)?;
    let knee_s = cut as f64 * window_s;
    Some(Sustained {
        burst_bytes_per_s: burst,
        knee_s: Some(knee_s),
        plateau_bytes_per_s: plateau,
        duty: duty_cycle(burst, plateau, knee_s),
        ..level
    })
}

fn positive(rate: f64) -> Option<f64> {
    (rate.is_finite() && rate > 0.0).then_some(rate)
}

/// Bursts and pauses that never reach the knee; see the head of this file.
pub fn duty_cycle(burst: f64, plateau: f64, knee_s: f64) -> Option<DutyCycle> {
    let share = plateau / burst;
    if !(share > 0.0 && share < 1.0 && knee_s > 0.0) {
        return None;
    }
    let on_s = knee_s * BURST_SHARE;
    Some(DutyCycle { on_s, off_s: on_s * (1.0 / share - 1.0), share })
}

/// Index of the first window behind the knee.
fn knee(rates: &[f64]) -> Option<usize> {
    let smooth: Vec<f64> = (0..rates.len())
        .map(|i| {
            let near = &rates[i.saturating_sub(NEIGHBOURS)..(i + NEIGHBOURS + 1).min(rates.len())];
            stats::median(near).unwrap_or(0.0)
        })
        .collect();
    let n = smooth.len();
    if n < 2 * LEAST_WINDOWS {
        return None;
    }
    let (mut sums, mut squares) = (vec![0.0], vec![0.0]);
    let (mut sum, mut square) = (0.0, 0.0);
    for v in &smooth {
        (sum, square) = (sum + v, square + v * v);
        sums.push(sum);
        squares.push(square);
    }
    let deviation = |from: usize, to: usize| {
        let total = sums[to] - sums[from];
        (squares[to] - squares[from] - total * total / (to - from) as f64).max(0.0)
    };
    let split = |cut: &usize| deviation(0, *cut) + deviation(*cut, n);
    let cut = (LEAST_WINDOWS..=n - LEAST_WINDOWS).min_by(|a, b| split(a).total_cmp(&split(b)))?;
    let (before, after) = (stats::median(&smooth[..cut]).ok()?, stats::median(&smooth[cut..]).ok()?);
    let fell = after < before * (1.0 - LEAST_DROP);
    let explained = split(&cut) <= (1.0 - EXPLAINED) * deviation(0, n);
    (fell && explained).then_some(cut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::SplitMix64;

    /// Windows of 0.1 s at these rates in MB/s, each with up to `noise` of it less.
    fn windows(rates: impl IntoIterator<Item = f64>, noise: f64) -> Vec<u64> {
        let mut rng = SplitMix64::new(5);
        let mut less = || 1.0 - noise * rng.below(1000) as f64 / 1000.0;
        rates.into_iter().map(|r| (r * 1e5 * less()) as u64).collect()
    }

    fn levels(parts: &[(usize, f64)]) -> Vec<f64> {
        parts.iter().flat_map(|&(n, r)| std::iter::repeat_n(r, n)).collect()
    }

    #[test]
    fn a_knee_is_found_where_it_is() {
        for noise in [0.0, 0.1, 0.3] {
            let seen = sustained(0.1, &windows(levels(&[(60, 100.0), (140, 40.0)]), noise)).unwrap();
            let knee = seen.knee_s.unwrap();
            assert!((knee - 6.0).abs() <= 0.3, "{noise}: {seen:?}");
            let share = seen.plateau_bytes_per_s / seen.burst_bytes_per_s;
            assert!((share - 0.4).abs() < 0.03, "{noise}: {seen:?}");
            let duty = seen.duty.unwrap();
            assert!(duty.on_s < knee && (duty.on_s / (duty.on_s + duty.off_s) - share).abs() < 1e-9);
        }
    }

    #[test]
    fn steady_noisy_and_rising_curves_have_none() {
        let wave = (0..200).map(|i| 100.0 + 20.0 * f64::from(i).sin());
        let rising = (0..200).map(|i| 50.0 + f64::from(i) / 4.0);
        for (name, rates) in [
            ("steady", levels(&[(200, 100.0)])),
            ("wave", wave.collect()),
            ("rising", rising.collect()),
            ("small", levels(&[(100, 100.0), (100, 95.0)])),
            ("pause", levels(&[(80, 100.0), (2, 0.0), (118, 100.0)])),
            ("short", levels(&[(3, 100.0), (2, 10.0)])),
        ] {
            let seen = sustained(0.1, &windows(rates, 0.2)).unwrap();
            assert_eq!((seen.knee_s, seen.duty), (None, None), "{name}");
            assert!((seen.seconds - seen.seconds.round()).abs() < 0.51);
        }
        assert_eq!(sustained(0.1, &[]), None);
        assert_eq!(sustained(0.1, &[0; 50]), None, "nothing was read");
    }

    #[test]
    fn an_unsteady_plateau_is_its_mean_and_steps_have_the_largest_as_knee() {
        let swing: Vec<f64> =
            levels(&[(50, 100.0)]).into_iter().chain((0..100).map(|i| if i % 20 < 10 { 20.0 } else { 60.0 })).collect();
        let seen = sustained(0.1, &windows(swing, 0.0)).unwrap();
        assert!((seen.knee_s.unwrap() - 5.0).abs() < 0.25 && (seen.plateau_bytes_per_s - 40e6).abs() < 1e6, "{seen:?}");
        let steps = sustained(0.1, &windows(levels(&[(40, 100.0), (40, 90.0), (60, 30.0)]), 0.0)).unwrap();
        assert!((steps.knee_s.unwrap() - 8.0).abs() < 0.25, "{steps:?}");
    }

    #[test]
    fn a_duty_cycle_delivers_the_plateau_on_average() {
        let duty = duty_cycle(7e9, 2e9, 60.0).unwrap();
        let mean = 7e9 * duty.on_s / (duty.on_s + duty.off_s);
        assert!((mean - 2e9).abs() < 1.0 && duty.on_s < 60.0);
        assert_eq!(duty_cycle(1e9, 1e9, 60.0), None);
        assert_eq!(duty_cycle(1e9, 0.0, 60.0), None);
    }
}
