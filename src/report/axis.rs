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
}
