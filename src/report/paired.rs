//! Arms in pairs: every pair as a mark, the mean with its interval beside them, and what the control shows against itself
//! as a band. The height is the logarithm of the speed ratio, so that twice and half are equally far from "the same".
//!
//! Takes numbers; judges nothing.

use super::plot::Figure;
use super::scene::{Anchor, Ink, Scene, Shape};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::{ReportError, axis};

/// Panels that fit in one picture.
pub const MAX_PANELS: usize = 11;
/// Marks that can still be told apart in a panel.
pub const MAX_MARKS: usize = 400;
/// Height of a panel.
const PANEL_PX: f64 = 170.0;
/// Space for the mean.
const MEAN_PX: f64 = 96.0;

/// One pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairMark {
    /// `ln(candidate / control)`.
    pub log_ratio: f64,
    /// The control ran first.
    pub control_first: bool,
}

/// One candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct PairedPanel {
    /// Its name.
    pub name: String,
    /// The verdict in a word or two.
    pub verdict: String,
    /// Its pairs, in the order in which they were measured.
    pub pairs: Vec<PairMark>,
    /// Mean log-ratio and the ends of its interval; an end that is not bounded is infinite. `None` without a pair.
    pub mean: Option<(f64, f64, f64)>,
}

/// The figure.
#[derive(Clone, Debug, PartialEq)]
pub struct PairedFigure {
    /// What is compared.
    pub title: String,
    /// Model, drives, what differs.
    pub subtitle: String,
    /// Whether any drive was emulated.
    pub emulated: bool,
    /// Name of the control.
    pub control: String,
    /// The control against itself.
    pub floor_pairs: Vec<PairMark>,
    /// Log-ratios up to this, either way, are within noise; `None` when the floor is not known.
    pub floor: Option<f64>,
    /// One for each candidate.
    pub panels: Vec<PairedPanel>,
    /// Written under the picture.
    pub note: String,
}

impl PairedFigure {
    fn check(&self) -> Result<(), ReportError> {
        let no = |why: String| Err(ReportError::data(&self.title, why));
        if !(1..=MAX_PANELS).contains(&self.panels.len()) {
            return no(format!("{} candidates; a picture shows 1 to {MAX_PANELS}", self.panels.len()));
        }
        for panel in &self.panels {
            let marks = self.floor_pairs.len() + panel.pairs.len();
            if marks == 0 || marks > MAX_MARKS {
                return no(format!("{}: {marks} pairs; a panel shows 1 to {MAX_MARKS}", panel.name));
            }
            if let Some(pair) = panel.pairs.iter().chain(&self.floor_pairs).find(|p| !p.log_ratio.is_finite()) {
                return no(format!("{}: a pair has the log-ratio {}; expected a number", panel.name, pair.log_ratio));
            }
            if let Some((mean, low, high)) = panel.mean
                && !(mean.is_finite() && low <= mean && mean <= high)
            {
                return no(format!("{}: mean {mean} is not within its interval {low} to {high}", panel.name));
            }
        }
        match self.floor {
            Some(floor) if !(floor >= 0.0 && floor.is_finite()) => no(format!("floor is {floor}; expected at least 0")),
            _ => Ok(()),
        }
    }

    /// The lowest and the highest log-ratio that must be shown, with some room; "the same" is always among them.
    fn reach(&self) -> (f64, f64) {
        let marks = self.panels.iter().flat_map(|p| &p.pairs).chain(&self.floor_pairs).map(|p| p.log_ratio);
        let ends = self.panels.iter().filter_map(|p| p.mean).flat_map(|(m, l, h)| [m, l, h]);
        let floor = self.floor.iter().flat_map(|f| [*f, -*f]);
        let all = marks.chain(ends).chain(floor).filter(|v| v.is_finite());
        let (low, high) = all.fold((-0.004f64, 0.004f64), |(low, high), v| (low.min(v), high.max(v)));
        let room = (high - low) * 0.08;
        (low - room, high + room)
    }
}

/// Ticks of an axis from `low` to `high`: log-ratio and label.
fn ticks((low, high): (f64, f64)) -> Vec<(f64, String)> {
    let mut out = vec![(0.0, "same".to_owned())];
    let (reach, span) = (high.max(-low), high - low);
    if reach < 0.45 {
        let percent = axis::ticks((span.exp() - 1.0) * 100.0, 5);
        let step = axis::step(&percent);
        for p in percent.into_iter().skip(1) {
            for sign in [1.0, -1.0] {
                let at = (1.0 + sign * p / 100.0).ln();
                let label = axis::tick_label(p, step);
                out.push((at, format!("{}{label} %", if sign > 0.0 { "+" } else { "-" })));
            }
        }
    } else {
        let mut last = 0.0;
        for factor in [1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0, 10_000.0f64] {
            // labels need a distance of their own
            if factor.ln() - last < span / 8.0 {
                continue;
            }
            last = factor.ln();
            out.push((last, format!("{factor}x")));
            out.push((-last, format!("1/{factor}x")));
        }
    }
    out.retain(|(at, _)| at.is_finite() && (low..=high).contains(at));
    out
}

/// A mark; hollow when the candidate ran first.
fn mark(scene: &mut Scene, (x, y): (f64, f64), filled: bool, ink: Ink, radius: f64) {
    scene.shapes.push(Shape::Dot { x, y, radius, ink });
    if !filled {
        scene.shapes.push(Shape::Dot { x, y, radius: radius - 1.6, ink: theme::CARD });
    }
}

impl Figure for PairedFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        self.check()?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let reach = self.reach();
        let mut y = self.legend(&mut scene, y + 12.0)?;
        for panel in &self.panels {
            y = self.panel(&mut scene, panel, reach, y + 10.0)?;
        }
        theme::finish(scene, y, &self.note)
    }
}

impl PairedFigure {
    /// What the marks mean.
    fn legend(&self, scene: &mut Scene, baseline: f64) -> Result<f64, ReportError> {
        let style = theme::muted(11.5);
        let mut x = MARGIN_PX;
        let mut says = |scene: &mut Scene, text: &str, key: f64| -> Result<f64, ReportError> {
            let at = x + key;
            scene.text((at, baseline), Anchor::Start, text, style)?;
            let start = x;
            x = at + super::font::text_width(text, style.em_px, false)? + 18.0;
            Ok(start)
        };
        let at = says(scene, "control first", 14.0)?;
        mark(scene, (at + 5.0, baseline - 4.0), true, theme::MEASURED, 4.0);
        let at = says(scene, "candidate first", 14.0)?;
        mark(scene, (at + 5.0, baseline - 4.0), false, theme::MEASURED, 4.0);
        let at = says(scene, "control against itself", 14.0)?;
        mark(scene, (at + 5.0, baseline - 4.0), true, theme::AXIS, 4.0);
        if self.floor.is_some() {
            let at = says(scene, "within what it shows against itself", 22.0)?;
            scene.rect((at, baseline - 9.0), (16.0, 10.0), theme::TRACK);
        }
        Ok(baseline + 6.0)
    }

    fn panel(
        &self,
        scene: &mut Scene,
        panel: &PairedPanel,
        (least, most): (f64, f64),
        top: f64,
    ) -> Result<f64, ReportError> {
        let right = WIDTH_PX - MARGIN_PX;
        let ink = theme::MEASURED;
        let head = format!("{} against {}", panel.name, self.control);
        scene.text_within((MARGIN_PX, top + 12.0), Anchor::Start, &head, theme::strong(12.5), 360.0)?;
        scene.text_within((right, top + 12.0), Anchor::End, &panel.verdict, theme::strong(12.5), 370.0)?;
        let (panel_top, left) = (top + 24.0, MARGIN_PX + 48.0);
        let bottom = panel_top + PANEL_PX;
        let y_of = |log: f64| bottom - ((log - least) / (most - least)).clamp(0.0, 1.0) * PANEL_PX;
        let middle = y_of(0.0);
        if let Some(floor) = self.floor {
            scene.rect((left, y_of(floor)), (right - left, y_of(-floor) - y_of(floor)), theme::TRACK);
        }
        for (at, label) in ticks((least, most)) {
            scene.hline((left, right), y_of(at), 1.0, if at == 0.0 { theme::AXIS } else { theme::GRID });
            scene.text((left - 8.0, y_of(at) + 4.0), Anchor::End, &label, theme::muted(11.0))?;
        }
        let marks = self.floor_pairs.len() + panel.pairs.len();
        let gap = if self.floor_pairs.is_empty() { 0.0 } else { 18.0 };
        let slot = ((right - MEAN_PX - left - gap) / marks as f64).min(46.0);
        let radius = (slot * 0.3).clamp(1.8, 5.0);
        let mut x = left;
        for (pairs, ink, name) in [(&self.floor_pairs, theme::AXIS, "A/A"), (&panel.pairs, ink, "pairs, as measured")] {
            let start = x;
            for (index, pair) in pairs.iter().enumerate() {
                let centre = x + slot / 2.0;
                let y = y_of(pair.log_ratio);
                scene.vline(centre, (y.min(middle), y.max(middle)), 1.0, ink.faded(0.35));
                mark(scene, (centre, y), pair.control_first, ink, radius);
                if slot >= 20.0 {
                    let number = (index + 1).to_string();
                    scene.text((centre, bottom + 14.0), Anchor::Middle, &number, theme::muted(10.5))?;
                }
                x += slot;
            }
            if x - start > 24.0 {
                let room = x - start + if ink == theme::AXIS { gap } else { MEAN_PX - 40.0 };
                scene.text_within((start + 4.0, bottom + 29.0), Anchor::Start, name, theme::muted(10.5), room)?;
            }
            x += if ink == theme::AXIS { gap } else { 0.0 };
        }
        if !self.floor_pairs.is_empty() && !panel.pairs.is_empty() {
            let between = left + slot * self.floor_pairs.len() as f64 + gap / 2.0;
            scene.dashed((between, panel_top), (between, bottom), 0.0, 1.0, theme::AXIS);
        }
        if let Some((mean, low, high)) = panel.mean {
            let centre = x + 30.0;
            let (low_y, high_y) = (y_of(low), y_of(high));
            scene.vline(centre, (high_y, low_y), 2.0, theme::INK);
            for (end, y) in [(low, low_y), (high, high_y)] {
                if end.is_finite() {
                    scene.hline((centre - 12.0, centre + 12.0), y, 1.5, theme::INK);
                }
            }
            mark(scene, (centre, y_of(mean)), true, theme::INK, 3.5);
            let text = format!("{:.3}x", mean.exp());
            scene.text((centre + 16.0, y_of(mean) + 4.0), Anchor::Start, &text, theme::strong(12.0))?;
            scene.text((centre, bottom + 14.0), Anchor::Middle, "mean", theme::muted(10.5))?;
        }
        Ok(bottom + 32.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scene::{assert_legible, texts};
    use super::*;

    fn figure(panels: usize, pairs: usize, size: f64) -> PairedFigure {
        let marks = |count: usize, size: f64| {
            let mark = |i: usize| PairMark {
                log_ratio: size * (1.0 + 0.2 * ((i * 7 % 5) as f64 - 2.0)),
                control_first: [0, 3].contains(&(i % 4)),
            };
            (0..count).map(mark).collect::<Vec<_>>()
        };
        let panel = |i: usize| PairedPanel {
            name: format!("candidate-{i}"),
            verdict: "better".into(),
            pairs: marks(pairs, size),
            mean: Some((size, (size * 0.8).min(size * 1.2), (size * 0.8).max(size * 1.2))),
        };
        PairedFigure {
            title: "Mirror against round-robin".into(),
            subtitle: "argo-mini".into(),
            emulated: true,
            control: "round-robin".into(),
            floor_pairs: marks(8, 0.01),
            floor: Some(0.015),
            panels: (0..panels).map(panel).collect(),
            note: "a note".into(),
        }
    }

    #[test]
    fn every_pair_is_a_mark_and_labels_stay_apart() {
        for (panels, pairs, size) in [(1, 8, 0.05), (2, 6, 0.6), (1, 1, -0.3), (11, 12, 0.001), (1, 300, 2.0)] {
            let scene = figure(panels, pairs, size).scene().unwrap();
            assert_legible(&scene);
            let dots = scene.shapes.iter().filter(|s| matches!(s, Shape::Dot { .. })).count();
            assert!(dots >= panels * (pairs + 8), "{dots}");
            assert!(texts(&scene).contains(&"emulated drives · argo-mini"));
        }
        let scene = figure(1, 8, 0.05).scene().unwrap();
        let texts = texts(&scene);
        assert!(texts.contains(&"1.051x") && texts.contains(&"same") && texts.contains(&"better"), "{texts:?}");
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        let refuse = |change: &dyn Fn(&mut PairedFigure), says: &str| {
            let mut bad = figure(1, 8, 0.05);
            change(&mut bad);
            let message = bad.scene().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        };
        refuse(&|f| f.panels.clear(), "0 candidates");
        refuse(&|f| f.panels[0].pairs[0].log_ratio = f64::NAN, "log-ratio NaN");
        refuse(&|f| f.panels[0].mean = Some((0.1, 0.2, 0.3)), "not within its interval");
        refuse(&|f| f.floor = Some(f64::INFINITY), "floor");
    }
}
