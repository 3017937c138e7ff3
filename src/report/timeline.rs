//! Throughput of every drive over time, one row per drive on one time axis and one scale.
//!
//! Takes bytes per window of equal length (10 ms in a run's `windows.csv`), never the reads themselves. A partial last
//! window must be left out by the caller: its rate would be wrong by construction.

use super::plot::Figure;
use super::scene::{Anchor, Scene, Shape};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::{ReportError, axis, finite, units};

/// Rows that fit in one picture.
pub const MAX_DRIVES: usize = 16;

/// Longest series, a bound on the work: eleven hours of 10 ms windows.
const MAX_WINDOWS: usize = 4_000_000;

/// Points per row; longer series are averaged over whole windows.
const MAX_POINTS: usize = 340;

/// One drive's series.
#[derive(Clone, Debug, PartialEq)]
pub struct DriveSeries {
    /// Name of the drive.
    pub name: String,
    /// Bytes that arrived in window `i`, that is from `i * window_ms` on.
    pub window_bytes: Vec<u64>,
    /// What the drive can do (emulated rate, or its ceiling), drawn as a dashed line.
    pub rated_bytes_per_s: Option<f64>,
}

/// The timeline figure.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineFigure {
    /// What is shown.
    pub title: String,
    /// Model, plan, machine.
    pub subtitle: String,
    /// Whether any drive was emulated.
    pub emulated: bool,
    /// Length of a window.
    pub window_ms: f64,
    /// One row each.
    pub drives: Vec<DriveSeries>,
    /// Written under the picture.
    pub note: String,
}

impl Figure for TimelineFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        let windows = self.check()?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;

        let per_point = windows.div_ceil(MAX_POINTS);
        let points = windows.div_ceil(per_point);
        let window_s = self.window_ms / 1000.0;
        let rates: Vec<Vec<f64>> =
            self.drives.iter().map(|d| averaged(&d.window_bytes, windows, per_point, window_s)).collect();

        let drawn = rates.iter().flatten().copied();
        let rated = self.drives.iter().filter_map(|d| d.rated_bytes_per_s);
        let measured_top = drawn.fold(0.0, f64::max);
        let top = rated.fold(measured_top, f64::max);
        let (unit_bytes, unit) = rate_unit(top);
        let ticks = axis::ticks(top / unit_bytes, 2);
        let axis_top = ticks.last().copied().unwrap_or(1.0) * unit_bytes;

        let shown_ms = self.window_ms * per_point as f64;
        let caption = format!("{unit} per drive, mean over {} · same scale in every row", milliseconds(shown_ms));
        scene.text((MARGIN_PX, y + 12.0), Anchor::Start, &caption, theme::muted(11.5))?;

        let (left, right) = (MARGIN_PX + 42.0, WIDTH_PX - MARGIN_PX - 8.0);
        let row_px = if self.drives.len() > 4 { 46.0 } else { 66.0 };
        let span_ms = windows as f64 * self.window_ms;
        let x_of = |ms: f64| left + (ms / span_ms).min(1.0) * (right - left);
        let mut row_top = y + 22.0;
        let mut panels = Vec::new();
        for (index, (drive, rates)) in self.drives.iter().zip(&rates).enumerate() {
            let color = theme::drive_color(index);
            let panel_top = row_top + 24.0;
            let zero = panel_top + row_px;
            let y_of = |rate: f64| zero - (rate / axis_top).min(1.0) * row_px;
            self.row_title(&mut scene, index, drive, (left, right), row_top + 16.0)?;
            for tick in &ticks {
                scene.hline((left, right), y_of(tick * unit_bytes), 1.0, theme::GRID);
            }
            for tick in [ticks.first(), ticks.last()].into_iter().flatten() {
                let label = axis::tick_label(*tick, axis::step(&ticks));
                let at = (left - 8.0, y_of(tick * unit_bytes) + 4.0);
                scene.text(at, Anchor::End, &label, theme::muted(11.0))?;
            }
            let steps: Vec<(f64, f64)> = (0..points)
                .flat_map(|i| {
                    let from_ms = i as f64 * shown_ms;
                    let rate = y_of(rates[i]);
                    [(x_of(from_ms), rate), (x_of((from_ms + shown_ms).min(span_ms)), rate)]
                })
                .collect();
            let mut outline = vec![(left, zero)];
            outline.extend(&steps);
            outline.push((right, zero));
            scene.shapes.push(Shape::Area { points: outline, ink: color.faded(0.32) });
            scene.shapes.push(Shape::Line { points: steps, thick: 1.0, ink: color });
            if let Some(rate) = drive.rated_bytes_per_s {
                scene.dashed((left, y_of(rate)), (right, y_of(rate)), 0.0, 1.0, theme::INK);
            }
            scene.hline((left, right), zero, 1.0, theme::AXIS);
            panels.push((panel_top, zero));
            row_top = zero + 4.0;
        }
        let y = time_axis(&mut scene, (left, right), &panels, span_ms / 1e3)?;
        theme::finish(scene, y, &self.note)
    }
}

impl TimelineFigure {
    /// Number of windows of the longest series.
    fn check(&self) -> Result<usize, ReportError> {
        let title = &self.title;
        if self.drives.is_empty() {
            return Err(ReportError::data(title, "there is no drive to show"));
        }
        if self.drives.len() > MAX_DRIVES {
            let why = format!("{} drives do not fit; show at most {MAX_DRIVES}", self.drives.len());
            return Err(ReportError::data(title, why));
        }
        if finite(title, "window_ms", self.window_ms)? <= 0.0 {
            return Err(ReportError::data(title, "window_ms is 0; expected the length of a window"));
        }
        for drive in &self.drives {
            if let Some(rate) = drive.rated_bytes_per_s {
                finite(title, &format!("drive {}: rated_bytes_per_s", drive.name), rate)?;
            }
        }
        match self.drives.iter().map(|d| d.window_bytes.len()).max() {
            Some(0) | None => Err(ReportError::data(title, "no drive has a window; was the run shorter than one?")),
            Some(n) if n > MAX_WINDOWS => {
                Err(ReportError::data(title, format!("{n} windows are too many; cut the series to {MAX_WINDOWS}")))
            }
            Some(n) => Ok(n),
        }
    }

    /// Name on the left, what the series says in numbers on the right.
    fn row_title(
        &self,
        scene: &mut Scene,
        index: usize,
        drive: &DriveSeries,
        (left, right): (f64, f64),
        baseline: f64,
    ) -> Result<(), ReportError> {
        scene.rect((left, baseline - 9.0), (10.0, 10.0), theme::drive_color(index));
        scene.text_within((left + 16.0, baseline), Anchor::Start, &drive.name, theme::strong(12.0), 330.0)?;
        let total: u128 = drive.window_bytes.iter().map(|b| u128::from(*b)).sum();
        let windows = drive.window_bytes.len().max(1) as f64;
        let mean = total as f64 / (windows * self.window_ms / 1000.0);
        let idle = drive.window_bytes.iter().filter(|b| **b == 0).count() as f64 / windows;
        let mut text = format!("mean {} · {} of windows idle", units::rate(mean), units::percent_short(idle));
        if let Some(rate) = drive.rated_bytes_per_s {
            text = format!("{text} · rated {}", units::rate(rate));
        }
        scene.text((right, baseline), Anchor::End, &text, theme::muted(11.5))?;
        Ok(())
    }
}

/// Mean rate over groups of `per_point` windows; a shorter series counts as idle at its end.
fn averaged(bytes: &[u64], windows: usize, per_point: usize, window_s: f64) -> Vec<f64> {
    (0..windows)
        .step_by(per_point)
        .map(|from| {
            let to = (from + per_point).min(windows);
            let group = bytes.get(from.min(bytes.len())..to.min(bytes.len())).unwrap_or(&[]);
            let sum: u128 = group.iter().map(|b| u128::from(*b)).sum();
            sum as f64 / ((to - from) as f64 * window_s)
        })
        .collect()
}

pub(super) fn rate_unit(top: f64) -> (f64, &'static str) {
    match top {
        t if t >= 2e9 => (1e9, "GB/s"),
        t if t >= 2e6 => (1e6, "MB/s"),
        t if t >= 2e3 => (1e3, "kB/s"),
        _ => (1.0, "B/s"),
    }
}

fn milliseconds(ms: f64) -> String {
    if ms >= 1000.0 && (ms / 1000.0).fract().abs() < 1e-9 {
        format!("{:.0} s", ms / 1000.0)
    } else if ms >= 0.01 && ms.fract().abs() < 1e-9 {
        format!("{ms:.0} ms")
    } else {
        format!("{ms:.3} ms")
    }
}

/// Ticks in milliseconds or seconds under the last row, with faint lines through all panels (top, bottom).
pub(super) fn time_axis(
    scene: &mut Scene,
    (left, right): (f64, f64),
    panels: &[(f64, f64)],
    span_s: f64,
) -> Result<f64, ReportError> {
    let bottom = panels.last().map_or(0.0, |p| p.1);
    let (unit_s, unit) = match span_s {
        s if s >= 2.0 => (1.0, "s"),
        s if s >= 2e-3 => (1e-3, "ms"),
        _ => (1e-6, "µs"),
    };
    let span = span_s / unit_s;
    let ticks = axis::ticks(span, 6);
    for tick in ticks.iter().filter(|t| **t <= span * 1.0001) {
        let x = left + tick / span * (right - left);
        for panel in panels {
            scene.vline(x, *panel, 1.0, theme::AXIS.faded(0.22));
        }
        scene.vline(x, (bottom, bottom + 4.0), 1.0, theme::AXIS);
        let label = format!("{} {unit}", axis::tick_label(*tick, axis::step(&ticks)));
        scene.text((x, bottom + 18.0), Anchor::Middle, &label, theme::muted(11.0))?;
    }
    Ok(bottom + 20.0)
}

#[cfg(test)]
mod tests {
    use super::super::scene::{assert_legible, texts};
    use super::*;

    fn figure(drives: usize, windows: usize) -> TimelineFigure {
        let series = |d: usize| DriveSeries {
            name: format!("nvme{d}"),
            window_bytes: (0..windows).map(|w| if (w + d).is_multiple_of(3) { 0 } else { 500_000 }).collect(),
            rated_bytes_per_s: Some(50e6),
        };
        TimelineFigure {
            title: "What each drive delivered".into(),
            subtitle: "argo-mini".into(),
            emulated: true,
            window_ms: 10.0,
            drives: (0..drives).map(series).collect(),
            note: String::new(),
        }
    }

    #[test]
    fn rows_carry_name_mean_and_idle_share() {
        let scene = figure(2, 300).scene().unwrap();
        assert_legible(&scene);
        let texts = texts(&scene);
        assert!(texts.contains(&"nvme1"));
        assert!(texts.contains(&"mean 33.3 MB/s · 33 % of windows idle · rated 50.0 MB/s"), "{texts:?}");
        assert!(texts.contains(&"MB/s per drive, mean over 10 ms · same scale in every row"));
        assert!(texts.contains(&"emulated drives · argo-mini"));
    }

    #[test]
    fn windows_are_named_in_the_largest_unit_that_fits() {
        assert_eq!(
            [10.0, 30.0, 1000.0, 3000.0, 1500.0, 0.5].map(milliseconds),
            ["10 ms", "30 ms", "1 s", "3 s", "1500 ms", "0.500 ms"]
        );
    }

    #[test]
    fn averaging_keeps_the_bytes() {
        let bytes: Vec<u64> = (0..1003).collect();
        let rates = averaged(&bytes, 1003, 3, 0.01);
        assert_eq!(rates.len(), 335);
        let sum: f64 = rates.iter().enumerate().map(|(i, r)| r * 0.01 * if i == 334 { 1.0 } else { 3.0 }).sum();
        assert!((sum - 1002.0 * 1003.0 / 2.0).abs() < 1e-3);
        assert_eq!(averaged(&[10], 4, 1, 1.0), [10.0, 0.0, 0.0, 0.0], "a short series is idle at its end");
    }

    #[test]
    fn odd_but_legal_data_stays_legible() {
        for (drives, windows) in [(1, 1), (1, 2), (8, 100), (16, 5000), (3, 341)] {
            let mut figure = figure(drives, windows);
            assert_legible(&figure.scene().unwrap());
            for drive in &mut figure.drives {
                drive.name = "Samsung SSD 990 PRO with Heatsink 4TB behind a very long adapter name".into();
                drive.window_bytes.fill(0);
                drive.rated_bytes_per_s = None;
            }
            assert_legible(&figure.scene().unwrap());
            figure.drives[0].window_bytes.fill(u64::MAX);
            assert_legible(&figure.scene().unwrap());
        }
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        let refuse = |change: &dyn Fn(&mut TimelineFigure), says: &str| {
            let mut bad = figure(2, 10);
            change(&mut bad);
            let message = bad.scene().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        };
        refuse(&|f| f.drives.clear(), "no drive");
        refuse(&|f| f.drives = vec![f.drives[0].clone(); 17], "at most 16");
        refuse(&|f| f.drives.iter_mut().for_each(|d| d.window_bytes.clear()), "no drive has a window");
        refuse(&|f| f.window_ms = 0.0, "window_ms is 0");
        refuse(&|f| f.window_ms = f64::NAN, "window_ms is NaN");
        refuse(&|f| f.drives[1].rated_bytes_per_s = Some(-1.0), "rated_bytes_per_s is -1");
    }
}
