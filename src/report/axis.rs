//! Round tick values and their labels. Pure.

/// Ticks from 0 to at least `top` (finite), about `wanted` steps of 1, 2 or 5 times a power of ten. A `top` of zero
/// gives the axis 0 to 1: an empty bar still needs a scale.
pub fn ticks(top: f64, wanted: usize) -> Vec<f64> {
    let top = if top.is_finite() && top > f64::MIN_POSITIVE { top } else { 1.0 };
    let raw = top / wanted.max(1) as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].iter().map(|m| m * power).find(|s| *s >= raw * 0.999).unwrap_or(10.0 * power);
    let count = (top / step - 1e-9).ceil().clamp(1.0, 100.0) as u32;
    (0..=count).map(|i| f64::from(i) * step).collect()
}

/// A tick's label with just the decimals that tell it from its neighbour; from a million on as `2e6`.
pub fn tick_label(value: f64, step: f64) -> String {
    if value >= 1e6 {
        return format!("{value:.3e}").replace(".000e", "e");
    }
    let decimals = if step > 0.0 && step < 1.0 { (-step.log10()).ceil().clamp(0.0, 6.0) as usize } else { 0 };
    format!("{value:.decimals$}")
}

/// The distance between ticks.
pub fn step(ticks: &[f64]) -> f64 {
    match ticks {
        [first, second, ..] => second - first,
        _ => 1.0,
    }
}

/// A logarithmic axis of durations: ticks in nanoseconds, of which the first and the last are its ends. Reaches at most
/// six powers of ten down from its top; what is below stands at its left end.
pub fn log_ticks_ns(low_ns: u64, high_ns: u64) -> Vec<f64> {
    let high = (high_ns.max(10) as f64).log10();
    let low = (low_ns.max(1) as f64).log10().min(high).max(high - 6.0);
    let steps: &[f64] = if high - low <= 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let powers = low.floor() as i32..=high.ceil() as i32;
    let all: Vec<f64> = powers.flat_map(|p| steps.iter().map(move |s| s * 10f64.powi(p))).collect();
    let from = all.iter().rposition(|t| t.log10() <= low + 1e-9).unwrap_or(0);
    let to = all.iter().position(|t| t.log10() >= high - 1e-9).unwrap_or(all.len() - 1);
    all[from..=to.max(from + 1).min(all.len() - 1)].to_vec()
}

/// Where a duration stands on a logarithmic axis, 0 to 1.
pub fn log_share(ticks: &[f64], ns: f64) -> f64 {
    let (first, last) = (ticks.first().copied().unwrap_or(1.0), ticks.last().copied().unwrap_or(10.0));
    let share = (ns.max(first) / first).log10() / (last / first).log10();
    if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 }
}

/// A tick of durations: `200 ns`, `50 µs`, `1 ms`, `10 s`.
pub fn duration_label(ns: f64) -> String {
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "µs")];
    let (unit, name) = units.into_iter().find(|(unit, _)| ns >= unit * 0.999).unwrap_or((1.0, "ns"));
    let value = ns / unit;
    if value >= 1e5 { format!("{value:.0e} {name}") } else { format!("{value:.0} {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover() {
        assert_eq!(ticks(29.7, 5), [0.0, 10.0, 20.0, 30.0]);
        assert_eq!(ticks(50.0, 5), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!(ticks(0.0, 2), [0.0, 0.5, 1.0]);
        for top in [1e-12, 0.03, 0.96, 7.0, 123_456.0, 9e300] {
            let t = ticks(top, 4);
            assert!(t.len() >= 2 && t.len() < 12, "{top}: {t:?}");
            assert!(t.last().unwrap() * 1.000001 >= top, "{top}: {t:?}");
        }
        assert_eq!(ticks(f64::NAN, 4).last(), Some(&1.0));
    }

    #[test]
    fn labels_have_the_needed_decimals() {
        assert_eq!(tick_label(20.0, 10.0), "20");
        assert_eq!(tick_label(0.5, 0.5), "0.5");
        assert_eq!(tick_label(0.02, 0.02), "0.02");
        assert_eq!(tick_label(0.25, 0.05), "0.25");
        assert_eq!(tick_label(2e12, 2e12), "2e12");
        assert_eq!(tick_label(1.5e6, 5e5), "1.500e6");
    }

    #[test]
    fn logarithmic_axes_cover_their_data() {
        for (low, high) in [(0, 0), (1, 1), (5, 7), (900_000, 4_100_000), (1, u64::MAX), (3_000, 3_000), (0, 12)] {
            let t = log_ticks_ns(low, high);
            assert!(t.len() >= 2 && t.len() <= 12, "{low} {high}: {t:?}");
            assert!(
                t.windows(2).all(|w| w[0] < w[1]) && t.last().unwrap() * 1.001 >= high as f64,
                "{low} {high}: {t:?}"
            );
            assert_eq!(log_share(&t, t[0]), 0.0);
            assert!((log_share(&t, *t.last().unwrap()) - 1.0).abs() < 1e-9);
        }
        assert_eq!(log_ticks_ns(900_000, 4_100_000), [5e5, 1e6, 2e6, 5e6]);
        assert_eq!([5e5, 1e6, 2e10, 7.0, 1e19].map(duration_label), ["500 µs", "1 ms", "20 s", "7 ns", "1e10 s"]);
    }
}
