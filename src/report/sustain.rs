//! Rate over a long time, one row per drive, with the knee at which it fell and the rates before and behind it.
//!
//! Takes bytes per window and what was concluded from them; concludes nothing itself.

use super::plot::Figure;
use super::scene::{Anchor, Scene, Shape};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::timeline::{rate_unit, time_axis};
use super::{ReportError, axis, finite, units};

/// Rows that fit in one picture.
pub const MAX_ROWS: usize = 12;
/// Points of a row; longer series are averaged over whole windows.
const MAX_POINTS: usize = 360;
/// Height of a row's panel.
const PANEL_PX: f64 = 84.0;

/// One drive's curve.
#[derive(Clone, Debug, PartialEq)]
pub struct SustainRow {
    /// Name of the drive.
    pub name: String,
    /// Bytes by window.
    pub window_bytes: Vec<u64>,
    /// Bytes per second before the knee, or throughout.
    pub burst_bytes_per_s: f64,
    /// When the rate fell, and to what.
    pub knee: Option<(f64, f64)>,
}

/// The figure.
#[derive(Clone, Debug, PartialEq)]
pub struct SustainFigure {
    /// What is shown.
    pub title: String,
    /// How it was measured.
    pub subtitle: String,
    /// Whether any drive was emulated.
    pub emulated: bool,
    /// Length of a window.
    pub window_s: f64,
    /// One for each drive.
    pub rows: Vec<SustainRow>,
    /// Written under the picture.
    pub note: String,
}

impl Figure for SustainFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        let windows = self.check()?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let per_point = windows.div_ceil(MAX_POINTS);
        let shown_s = self.window_s * per_point as f64;
        let rates: Vec<Vec<f64>> =
            self.rows.iter().map(|r| averaged(&r.window_bytes, per_point, self.window_s)).collect();
        let top = rates.iter().flatten().copied().fold(0.0, f64::max);
        let (unit_bytes, unit) = rate_unit(top);
        let ticks = axis::ticks(top / unit_bytes, 3);
        let axis_top = ticks.last().copied().unwrap_or(1.0) * unit_bytes;
        let mean = units::duration((shown_s * 1e9) as u64);
        let caption = format!("{unit}, mean over {mean} · dashed: rate before and behind the knee");
        scene.text((MARGIN_PX, y + 12.0), Anchor::Start, &caption, theme::muted(11.5))?;
        let (left, right) = (MARGIN_PX + 42.0, WIDTH_PX - MARGIN_PX - 8.0);
        let span_s = windows as f64 * self.window_s;
        let x_of = |s: f64| left + (s / span_s).clamp(0.0, 1.0) * (right - left);
        let mut row_top = y + 22.0;
        let mut panels = Vec::new();
        for (index, (row, rates)) in self.rows.iter().zip(&rates).enumerate() {
            let color = theme::drive_color(index);
            let panel_top = row_top + 24.0;
            let zero = panel_top + PANEL_PX;
            let y_of = |rate: f64| zero - (rate / axis_top).clamp(0.0, 1.0) * PANEL_PX;
            scene.rect((left, row_top + 7.0), (10.0, 10.0), color);
            scene.text_within((left + 16.0, row_top + 16.0), Anchor::Start, &row.name, theme::strong(12.0), 300.0)?;
            scene.text((right, row_top + 16.0), Anchor::End, &row.says(), theme::muted(11.5))?;
            for tick in &ticks {
                let y = y_of(tick * unit_bytes);
                scene.hline((left, right), y, 1.0, theme::GRID);
                let label = axis::tick_label(*tick, axis::step(&ticks));
                scene.text((left - 8.0, y + 4.0), Anchor::End, &label, theme::muted(11.0))?;
            }
            let steps: Vec<(f64, f64)> = rates
                .iter()
                .enumerate()
                .flat_map(|(i, &rate)| {
                    let from = i as f64 * shown_s;
                    [(x_of(from), y_of(rate)), (x_of(from + shown_s), y_of(rate))]
                })
                .collect();
            scene.shapes.push(Shape::Line { points: steps, thick: 1.5, ink: color });
            let knee_x = x_of(row.knee.map_or(span_s, |k| k.0));
            let burst = y_of(row.burst_bytes_per_s);
            scene.dashed((left, burst), (knee_x, burst), 0.0, 1.0, theme::INK);
            if let Some((_, plateau)) = row.knee {
                scene.dashed((knee_x, y_of(plateau)), (right, y_of(plateau)), 0.0, 1.0, theme::INK);
                scene.vline(knee_x, (panel_top, zero), 1.5, theme::WAITING);
            }
            scene.hline((left, right), zero, 1.0, theme::AXIS);
            panels.push((panel_top, zero));
            row_top = zero + 4.0;
        }
        let y = time_axis(&mut scene, (left, right), &panels, span_s)?;
        theme::finish(scene, y, &self.note)
    }
}

impl SustainRow {
    /// What the curve shows, in words.
    fn says(&self) -> String {
        let burst = units::rate(self.burst_bytes_per_s);
        match self.knee {
            None => format!("{burst} throughout"),
            Some((at, plateau)) => {
                format!("{burst}, from {} on {}", units::duration((at * 1e9) as u64), units::rate(plateau))
            }
        }
    }
}

impl SustainFigure {
    fn check(&self) -> Result<usize, ReportError> {
        let title = &self.title;
        if !(1..=MAX_ROWS).contains(&self.rows.len()) {
            let why = format!("{} drives; a picture shows 1 to {MAX_ROWS}", self.rows.len());
            return Err(ReportError::data(title, why));
        }
        if finite(title, "window_s", self.window_s)? <= 0.0 {
            return Err(ReportError::data(title, "window_s is 0; expected the length of a window"));
        }
        for row in &self.rows {
            finite(title, &format!("drive {}: burst_bytes_per_s", row.name), row.burst_bytes_per_s)?;
            if let Some((at, plateau)) = row.knee {
                finite(title, &format!("drive {}: knee", row.name), at)?;
                finite(title, &format!("drive {}: plateau", row.name), plateau)?;
            }
        }
        match self.rows.iter().map(|r| r.window_bytes.len()).max() {
            Some(n) if n > 0 => Ok(n),
            _ => Err(ReportError::data(title, "no drive has a window")),
        }
    }
}

/// Mean rate over groups of windows.
fn averaged(bytes: &[u64], per_point: usize, window_s: f64) -> Vec<f64> {
    let rate = |group: &[u64]| group.iter().map(|&b| b as f64).sum::<f64>() / (group.len() as f64 * window_s);
    bytes.chunks(per_point.max(1)).map(rate).collect()
}

#[cfg(test)]
mod tests {
    use super::super::scene::{assert_legible, texts};
    use super::*;

    fn figure(rows: usize, windows: usize) -> SustainFigure {
        let row = |i: usize| SustainRow {
            name: format!("nvme{i}"),
            window_bytes: (0..windows).map(|w| if w < windows / 3 { 700_000_000 } else { 200_000_000 }).collect(),
            burst_bytes_per_s: 7e9,
            knee: (i == 0).then_some((windows as f64 / 30.0, 2e9)),
        };
        SustainFigure {
            title: "Rate over 40 minutes".into(),
            subtitle: "all drives at once".into(),
            emulated: true,
            window_s: 0.1,
            rows: (0..rows).map(row).collect(),
            note: "a note".into(),
        }
    }

    #[test]
    fn a_row_says_where_its_knee_is_and_the_label_is_there() {
        let scene = figure(2, 900).scene().unwrap();
        assert_legible(&scene);
        let texts = texts(&scene);
        assert!(texts.contains(&"7.00 GB/s, from 30.0 s on 2.00 GB/s"), "{texts:?}");
        assert!(texts.contains(&"7.00 GB/s throughout"));
        assert!(texts.contains(&"emulated drives · all drives at once"));
        for (rows, windows) in [(1, 1), (12, 24_000), (3, 361)] {
            assert_legible(&figure(rows, windows).scene().unwrap());
        }
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        let refuse = |change: &dyn Fn(&mut SustainFigure), says: &str| {
            let mut bad = figure(2, 10);
            change(&mut bad);
            let message = bad.scene().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        };
        refuse(&|f| f.rows.clear(), "0 drives");
        refuse(&|f| f.window_s = f64::NAN, "window_s is NaN");
        refuse(&|f| f.rows[0].knee = Some((1.0, f64::INFINITY)), "plateau");
        refuse(&|f| f.rows.iter_mut().for_each(|r| r.window_bytes.clear()), "no drive has a window");
    }
}
