//! How many reads each drive had at once, over time: one row per drive on one time axis and one scale.
//!
//! Takes the time that reads spent at the drive, window by window; that sum over the window's length is the mean depth.

use super::plot::Figure;
use super::scene::{Anchor, Scene, Shape};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::timeline::time_axis;
use super::{ReportError, axis, finite};

/// Rows that fit in one picture.
pub const MAX_DRIVES: usize = 16;
/// Points per row; longer series are averaged over whole windows.
const MAX_POINTS: usize = 340;

/// One drive's series.
#[derive(Clone, Debug, PartialEq)]
pub struct DepthSeries {
    /// Name of the drive.
    pub name: String,
    /// Nanoseconds that its reads spent at it in window `i`, summed over reads.
    pub busy_ns: Vec<u64>,
}

/// The queue depth figure.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueDepthFigure {
    /// What is shown.
    pub title: String,
    /// Model, plan, run.
    pub subtitle: String,
    /// Whether any drive was emulated.
    pub emulated: bool,
    /// Length of a window.
    pub window_ms: f64,
    /// One row each.
    pub drives: Vec<DepthSeries>,
    /// Written under the picture.
    pub note: String,
}

impl Figure for QueueDepthFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        let windows = self.check()?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let per_point = windows.div_ceil(MAX_POINTS);
        let window_ns = self.window_ms * 1e6;
        let depths: Vec<Vec<f64>> =
            self.drives.iter().map(|d| averaged(&d.busy_ns, windows, per_point, window_ns)).collect();
        let top = depths.iter().flatten().copied().fold(0.0, f64::max);
        let ticks = axis::ticks(top, 2);
        let axis_top = ticks.last().copied().unwrap_or(1.0);
        let shown_ms = self.window_ms * per_point as f64;
        let caption = format!("reads at the drive at once, mean over {shown_ms:.0} ms · same scale in every row");
        scene.text((MARGIN_PX, y + 12.0), Anchor::Start, &caption, theme::muted(11.5))?;
        let (left, right) = (MARGIN_PX + 42.0, WIDTH_PX - MARGIN_PX - 8.0);
        let row_px = if self.drives.len() > 4 { 46.0 } else { 66.0 };
        let span_ms = windows as f64 * self.window_ms;
        let x_of = |ms: f64| left + (ms / span_ms).min(1.0) * (right - left);
        let mut row_top = y + 22.0;
        let mut panels = Vec::new();
        for (index, (drive, depths)) in self.drives.iter().zip(&depths).enumerate() {
            let (baseline, panel_top) = (row_top + 16.0, row_top + 24.0);
            let zero = panel_top + row_px;
            let y_of = |depth: f64| zero - (depth / axis_top).min(1.0) * row_px;
            scene.rect((left, baseline - 9.0), (10.0, 10.0), theme::drive_color(index));
            scene.text_within((left + 16.0, baseline), Anchor::Start, &drive.name, theme::strong(12.0), 330.0)?;
            let busy: f64 = drive.busy_ns.iter().map(|b| *b as f64).sum();
            let most = drive.busy_ns.iter().copied().max().unwrap_or(0) as f64 / window_ns;
            let mean = busy / (windows as f64 * window_ns);
            let text = format!("mean {mean:.2} · most in one window {most:.1}");
            scene.text((right, baseline), Anchor::End, &text, theme::muted(11.5))?;
            for tick in &ticks {
                scene.hline((left, right), y_of(*tick), 1.0, theme::GRID);
            }
            for tick in [ticks.first(), ticks.last()].into_iter().flatten() {
                let label = axis::tick_label(*tick, axis::step(&ticks));
                scene.text((left - 8.0, y_of(*tick) + 4.0), Anchor::End, &label, theme::muted(11.0))?;
            }
            let steps: Vec<(f64, f64)> = depths
                .iter()
                .enumerate()
                .flat_map(|(i, depth)| {
                    let from_ms = i as f64 * shown_ms;
                    [(x_of(from_ms), y_of(*depth)), (x_of((from_ms + shown_ms).min(span_ms)), y_of(*depth))]
                })
                .collect();
            let mut outline = vec![(left, zero)];
            outline.extend(&steps);
            outline.push((right, zero));
            let color = theme::drive_color(index);
            scene.shapes.push(Shape::Area { points: outline, ink: color.faded(0.32) });
            scene.shapes.push(Shape::Line { points: steps, thick: 1.0, ink: color });
            scene.hline((left, right), zero, 1.0, theme::AXIS);
            panels.push((panel_top, zero));
            row_top = zero + 4.0;
        }
        let y = time_axis(&mut scene, (left, right), &panels, span_ms / 1e3)?;
        theme::finish(scene, y, &self.note)
    }
}

impl QueueDepthFigure {
    fn check(&self) -> Result<usize, ReportError> {
        let title = &self.title;
        if self.drives.len() > MAX_DRIVES {
            let why = format!("{} drives do not fit; show at most {MAX_DRIVES}", self.drives.len());
            return Err(ReportError::data(title, why));
        }
        if finite(title, "window_ms", self.window_ms)? <= 0.0 {
            return Err(ReportError::data(title, "window_ms is 0; expected the length of a window"));
        }
        let windows = self.drives.iter().map(|d| d.busy_ns.len()).max().unwrap_or(0);
        if windows == 0 { Err(ReportError::data(title, "no drive has a window to show")) } else { Ok(windows) }
    }
}

fn averaged(busy_ns: &[u64], windows: usize, per_point: usize, window_ns: f64) -> Vec<f64> {
    (0..windows)
        .step_by(per_point)
        .map(|from| {
            let to = (from + per_point).min(windows);
            let group = busy_ns.get(from.min(busy_ns.len())..to.min(busy_ns.len())).unwrap_or(&[]);
            group.iter().map(|b| *b as f64).sum::<f64>() / ((to - from) as f64 * window_ns)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::scene::{assert_legible, texts};
    use super::*;

    fn figure(drives: usize, windows: usize) -> QueueDepthFigure {
        let series = |d: usize| DepthSeries { name: format!("nvme{d}"), busy_ns: vec![25_000_000; windows] };
        QueueDepthFigure {
            title: "Q".into(),
            subtitle: String::new(),
            emulated: true,
            window_ms: 10.0,
            drives: (0..drives).map(series).collect(),
            note: String::new(),
        }
    }

    #[test]
    fn depth_is_busy_time_over_window_length() {
        let scene = figure(2, 100).scene().unwrap();
        assert_legible(&scene);
        assert!(texts(&scene).contains(&"mean 2.50 · most in one window 2.5"), "{:?}", texts(&scene));
        for (drives, windows) in [(1, 1), (16, 5000), (3, 341)] {
            assert_legible(&figure(drives, windows).scene().unwrap());
        }
        let mut idle = figure(2, 5);
        idle.drives.iter_mut().for_each(|d| d.busy_ns.fill(0));
        assert_legible(&idle.scene().unwrap());
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        assert!(figure(0, 0).scene().unwrap_err().to_string().contains("no drive has a window"));
        assert!(figure(17, 3).scene().unwrap_err().to_string().contains("at most 16"));
        assert!(QueueDepthFigure { window_ms: 0.0, ..figure(1, 1) }.scene().is_err());
    }
}
