//! How durations are spread: the latencies of every drive as histograms, and the gap behind the next-to-last drive as
//! a cumulative curve. Both on a logarithmic axis, because one slow read in a thousand is what a barrier waits for.
//!
//! Takes HDR histograms of nanoseconds, never the reads themselves.

use super::plot::Figure;
use super::scene::{Anchor, Ink, Scene, Shape};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::{ReportError, axis, units};
use hdrhistogram::Histogram;

/// Rows that fit in one picture.
pub const MAX_DRIVES: usize = 16;
/// Bars of a histogram.
const BARS: usize = 96;

/// Durations of one drive.
#[derive(Clone, Debug, PartialEq)]
pub struct Durations {
    /// Name of the drive.
    pub name: String,
    /// Nanoseconds.
    pub histogram: Histogram<u64>,
}

/// Latencies, one row for each drive.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyFigure {
    /// What is shown.
    pub title: String,
    /// Model, plan, run.
    pub subtitle: String,
    /// Whether any drive was emulated.
    pub emulated: bool,
    /// One row each; a drive without reads has an empty one.
    pub drives: Vec<Durations>,
    /// Written under the picture.
    pub note: String,
}

/// Gaps, one curve for each drive and one for all.
#[derive(Clone, Debug, PartialEq)]
pub struct GapFigure {
    /// What is shown.
    pub title: String,
    /// Model, plan, run.
    pub subtitle: String,
    /// Whether any drive was emulated.
    pub emulated: bool,
    /// Gaps of the barriers that each drive ended.
    pub drives: Vec<Durations>,
    /// Written under the picture.
    pub note: String,
}

/// Low and high end over all drives; refuses a picture of nothing.
fn range(title: &str, what: &str, drives: &[Durations]) -> Result<Vec<f64>, ReportError> {
    if drives.len() > MAX_DRIVES {
        let why = format!("{} drives do not fit; show at most {MAX_DRIVES}", drives.len());
        return Err(ReportError::data(title, why));
    }
    let filled = || drives.iter().map(|d| &d.histogram).filter(|h| !h.is_empty());
    let (low, high) = (filled().map(|h| h.value_at_quantile(0.005)).min(), filled().map(Histogram::max).max());
    match low.zip(high) {
        Some((low, high)) => Ok(axis::log_ticks_ns(low, high)),
        None => Err(ReportError::data(title, format!("no drive has a {what} to show"))),
    }
}

/// Ticks under the panels, and faint lines through them.
fn duration_axis(
    scene: &mut Scene,
    (left, right): (f64, f64),
    panels: &[(f64, f64)],
    ticks: &[f64],
) -> Result<f64, ReportError> {
    let bottom = panels.last().map_or(0.0, |p| p.1);
    for tick in ticks {
        let x = left + axis::log_share(ticks, *tick) * (right - left);
        panels.iter().for_each(|panel| scene.vline(x, *panel, 1.0, theme::AXIS.faded(0.22)));
        scene.vline(x, (bottom, bottom + 4.0), 1.0, theme::AXIS);
        scene.text((x, bottom + 18.0), Anchor::Middle, &axis::duration_label(*tick), theme::muted(11.0))?;
    }
    Ok(bottom + 20.0)
}

impl Figure for LatencyFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        let ticks = range(&self.title, "read", &self.drives)?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let caption = "reads by latency, as a share of the drive's fullest bar · lines: median and 99th percentile";
        scene.text((MARGIN_PX, y + 12.0), Anchor::Start, caption, theme::muted(11.5))?;
        let (left, right) = (MARGIN_PX + 14.0, WIDTH_PX - MARGIN_PX - 14.0);
        let x_of = |ns: f64| left + axis::log_share(&ticks, ns) * (right - left);
        let row_px = if self.drives.len() > 4 { 40.0 } else { 60.0 };
        let mut row_top = y + 22.0;
        let mut panels = Vec::new();
        for (index, drive) in self.drives.iter().enumerate() {
            let h = &drive.histogram;
            let (baseline, panel_top) = (row_top + 16.0, row_top + 26.0);
            let zero = panel_top + row_px;
            scene.rect((left, baseline - 9.0), (10.0, 10.0), theme::drive_color(index));
            scene.text_within((left + 16.0, baseline), Anchor::Start, &drive.name, theme::strong(12.0), 180.0)?;
            let text = if h.is_empty() {
                "no reads".to_owned()
            } else {
                let at = |q: f64| units::duration(h.value_at_quantile(q));
                let tail = format!("p99.9 {} · max {}", at(0.999), units::duration(h.max()));
                format!("{} reads · p50 {} · p99 {} · {tail}", h.len(), at(0.5), at(0.99))
            };
            scene.text_within((right, baseline), Anchor::End, &text, theme::muted(11.5), 500.0)?;
            let mut bars = [0u64; BARS];
            for value in h.iter_recorded() {
                let share = axis::log_share(&ticks, value.value_iterated_to() as f64);
                bars[((share * BARS as f64) as usize).min(BARS - 1)] += value.count_at_value();
            }
            let most = bars.iter().copied().max().unwrap_or(0).max(1) as f64;
            let width = (right - left) / BARS as f64;
            for (bar, count) in bars.iter().enumerate().filter(|(_, count)| **count > 0) {
                // a bar of one read in a million must not vanish
                let height = (*count as f64 / most * (row_px - 2.0)).max(1.5);
                let at = (left + bar as f64 * width, zero - height);
                scene.rect(at, (width - 1.0, height), theme::drive_color(index));
            }
            for quantile in [0.5, 0.99].iter().filter(|_| !h.is_empty()) {
                let x = x_of(h.value_at_quantile(*quantile) as f64);
                scene.dashed((x, panel_top), (x, zero), 0.0, 1.5, theme::INK);
            }
            scene.hline((left, right), zero, 1.0, theme::AXIS);
            panels.push((panel_top, zero));
            row_top = zero + 4.0;
        }
        let y = duration_axis(&mut scene, (left, right), &panels, &ticks)?;
        theme::finish(scene, y, &self.note)
    }
}

impl Figure for GapFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        const PANEL_PX: f64 = 250.0;
        let ticks = range(&self.title, "gap", &self.drives)?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let caption = "share of barriers whose gap is at most this long, by the drive that landed last";
        scene.text((MARGIN_PX, y + 12.0), Anchor::Start, caption, theme::muted(11.5))?;
        let (left, right) = (MARGIN_PX + 44.0, WIDTH_PX - MARGIN_PX - 14.0);
        let (panel_top, zero) = (y + 28.0, y + 28.0 + PANEL_PX);
        for percent in [0, 25, 50, 75, 100] {
            let at = zero - f64::from(percent) / 100.0 * PANEL_PX;
            scene.hline((left, right), at, 1.0, theme::GRID);
            scene.text((left - 8.0, at + 4.0), Anchor::End, &format!("{percent} %"), theme::muted(11.0))?;
        }
        let mut all: Option<Histogram<u64>> = None;
        for (index, drive) in self.drives.iter().enumerate().filter(|(_, d)| !d.histogram.is_empty()) {
            match &mut all {
                Some(sum) => sum.add(&drive.histogram).map_err(|e| ReportError::data(&self.title, format!("{e:?}")))?,
                None => all = Some(drive.histogram.clone()),
            }
            curve(&mut scene, &drive.histogram, &ticks, (left, right), (panel_top, zero), theme::drive_color(index));
        }
        let Some(all) = all else { return Err(ReportError::data(&self.title, "no drive has a gap to show")) };
        curve(&mut scene, &all, &ticks, (left, right), (panel_top, zero), theme::INK);
        scene.hline((left, right), zero, 1.0, theme::AXIS);
        let y = duration_axis(&mut scene, (left, right), &[(panel_top, zero)], &ticks)?;
        let mut row = y + 22.0;
        let line = |name: &str, h: &Histogram<u64>| {
            let at = |q: f64| units::duration(h.value_at_quantile(q));
            let numbers = format!("p50 {} · p90 {} · p99 {}", at(0.5), at(0.9), at(0.99));
            (name.to_owned(), format!("{} barriers · {numbers} · max {}", h.len(), units::duration(h.max())))
        };
        let mut rows = vec![(theme::INK, line("all", &all))];
        for (index, drive) in self.drives.iter().enumerate() {
            let text = match drive.histogram.is_empty() {
                true => (drive.name.clone(), "never landed last behind another drive".to_owned()),
                false => line(&drive.name, &drive.histogram),
            };
            rows.push((theme::drive_color(index), text));
        }
        for (ink, (name, numbers)) in rows {
            scene.rect((left, row - 5.0), (14.0, 3.0), ink);
            scene.text_within((left + 22.0, row), Anchor::Start, &name, theme::strong(12.0), 180.0)?;
            scene.text_within((right, row), Anchor::End, &numbers, theme::muted(11.5), 470.0)?;
            row += 19.0;
        }
        theme::finish(scene, row - 12.0, &self.note)
    }
}

/// A rising staircase of the values of `histogram`.
fn curve(
    scene: &mut Scene,
    histogram: &Histogram<u64>,
    ticks: &[f64],
    (left, right): (f64, f64),
    (top, zero): (f64, f64),
    ink: Ink,
) {
    let mut points: Vec<(f64, f64)> = vec![(left, zero)];
    let mut counted = 0u64;
    for value in histogram.iter_recorded() {
        let x = left + axis::log_share(ticks, value.value_iterated_to() as f64) * (right - left);
        let before = points[points.len() - 1];
        counted += value.count_at_value();
        let y = zero - counted as f64 / histogram.len() as f64 * (zero - top);
        // steps closer than half a pixel cannot be seen
        if x - before.0 >= 0.5 || counted == histogram.len() {
            points.extend([(x, before.1), (x, y)]);
        } else if let Some(last) = points.last_mut() {
            last.1 = y;
        }
    }
    let end = points[points.len() - 1].1;
    points.push((right, end));
    scene.shapes.push(Shape::Line { points, thick: 1.5, ink });
}

#[cfg(test)]
mod tests {
    use super::super::scene::{assert_legible, texts};
    use super::*;

    fn durations(name: &str, values: impl IntoIterator<Item = u64>) -> Durations {
        let mut histogram = Histogram::new(3).unwrap();
        values.into_iter().for_each(|v| histogram.record(v).unwrap());
        Durations { name: name.into(), histogram }
    }

    fn latency(drives: Vec<Durations>) -> LatencyFigure {
        LatencyFigure { title: "L".into(), subtitle: "s".into(), emulated: true, drives, note: "n".into() }
    }

    fn gaps(drives: Vec<Durations>) -> GapFigure {
        GapFigure { title: "G".into(), subtitle: "s".into(), emulated: true, drives, note: "n".into() }
    }

    #[test]
    fn the_numbers_stand_beside_the_drives() {
        let drives = vec![durations("a", [1_000_000; 99]), durations("b", [2_000_000, 40_000_000])];
        let scene = latency(drives.clone()).scene().unwrap();
        assert_legible(&scene);
        let all = texts(&scene);
        assert!(all.contains(&"99 reads · p50 1.00 ms · p99 1.00 ms · p99.9 1.00 ms · max 1.00 ms"), "{all:?}");
        assert!(all.contains(&"emulated drives · s") && all.contains(&"10 ms"));
        let scene = gaps(drives).scene().unwrap();
        assert_legible(&scene);
        assert!(texts(&scene).iter().any(|t| t.starts_with("101 barriers · p50 1.00 ms")), "{:?}", texts(&scene));
    }

    #[test]
    fn odd_but_legal_data_stays_legible() {
        let long = "Samsung SSD 990 PRO with Heatsink 4TB behind a very long adapter name";
        for count in [1, 4, 16] {
            for values in [vec![0], vec![1, u64::MAX / 4], vec![7; 1000], (0..2000).map(|v| v * v).collect()] {
                let drives: Vec<_> = (0..count).map(|_| durations(long, values.clone())).collect();
                assert_legible(&latency(drives.clone()).scene().unwrap());
                assert_legible(&gaps(drives).scene().unwrap());
            }
        }
        let some = vec![durations("a", []), durations("b", [5_000])];
        assert!(texts(&latency(some.clone()).scene().unwrap()).contains(&"no reads"));
        assert_legible(&gaps(some).scene().unwrap());
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        assert!(latency(vec![]).scene().unwrap_err().to_string().contains("no drive has a read"));
        assert!(gaps(vec![durations("a", [])]).scene().unwrap_err().to_string().contains("no drive has a gap"));
        assert!(latency(vec![durations("a", [1]); 17]).scene().unwrap_err().to_string().contains("at most 16"));
    }

    #[test]
    fn a_curve_ends_at_all_barriers() {
        let mut scene = Scene::new("t", 800.0);
        let d = durations("a", (0..5000).map(|v| 1000 + v));
        curve(&mut scene, &d.histogram, &[1e3, 1e4], (0.0, 100.0), (0.0, 50.0), theme::INK);
        let Some(Shape::Line { points, .. }) = scene.shapes.first() else { panic!() };
        assert_eq!(points.last().unwrap(), &(100.0, 0.0));
        assert!(points.windows(2).all(|w| w[0].0 <= w[1].0 && w[0].1 >= w[1].1));
    }
}
