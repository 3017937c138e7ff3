//! The ladder: decode speed with one, two, three … drives, and how much of the time still goes into waiting.
//!
//! Bars start at zero, whiskers are what the caller says they are, and the dashed line is what the first rung promises if every
//! drive added as much. Below, where it was read: the gain of the I/O alone, beside its simulation. Takes medians; computes
//! nothing but shares of the last rung.

use super::plot::Figure;
use super::scene::{Anchor, Scene};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::{ReportError, axis, finite, font, units};

/// Rungs that fit beside each other with their labels.
pub const MAX_RUNGS: usize = 12;

/// How many times as fast as the first rung a rung's I/O alone is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IoPoint {
    /// As it was read.
    pub gain: f64,
    /// As it was simulated, if it was.
    pub simulated: Option<f64>,
}

/// One rung.
#[derive(Clone, Debug, PartialEq)]
pub struct RungPoint {
    /// Name of the rung or of the drive that it adds; may be empty.
    pub label: String,
    /// Drives in use.
    pub drives: u32,
    /// Median decode tokens per second over the runs.
    pub tok_s_median: f64,
    /// Lower end of its whisker.
    pub tok_s_low: f64,
    /// Upper end.
    pub tok_s_high: f64,
    /// Share of decode time in which compute waited for drives, 0 to 1.
    pub io_wait_share: f64,
    /// What linear scaling from the first rung would give; `None` leaves the line out.
    pub ideal_tok_s: Option<f64>,
    /// Its I/O alone; where no rung has any, there is no such panel.
    pub io: Option<IoPoint>,
}

/// The ladder figure.
#[derive(Clone, Debug, PartialEq)]
pub struct LadderFigure {
    /// What was compared.
    pub title: String,
    /// Model, policy, machine.
    pub subtitle: String,
    /// Whether any drive was emulated: the subtitle says so.
    pub emulated: bool,
    /// What whiskers are, e.g. "slowest and fastest run".
    pub whiskers: String,
    /// In ladder order; "of the last rung" refers to the last one.
    pub rungs: Vec<RungPoint>,
    /// How the rate is computed, runs per rung, sources. Written under the picture.
    pub note: String,
}

/// Where things are; all rungs share the columns.
struct Columns {
    left: f64,
    slot: f64,
    bar: f64,
}

impl Columns {
    fn centre(&self, index: usize) -> f64 {
        self.left + self.slot * (index as f64 + 0.5)
    }
}

impl Figure for LadderFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        self.check()?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let left = MARGIN_PX + 42.0;
        let slot = (WIDTH_PX - MARGIN_PX - left) / self.rungs.len() as f64;
        let share = if self.rungs.len() > 8 { 0.74 } else { 0.58 };
        let columns = Columns { left, slot, bar: (slot * share).min(104.0) };
        let y = self.speed_panel(&mut scene, &columns, y + 6.0)?;
        let y = self.wait_panel(&mut scene, &columns, y + 22.0)?;
        let y =
            if self.rungs.iter().any(|r| r.io.is_some()) { self.io_panel(&mut scene, &columns, y + 22.0)? } else { y };
        let y = self.labels(&mut scene, &columns, y)?;
        theme::finish(scene, y, &self.note)
    }
}

impl LadderFigure {
    fn check(&self) -> Result<(), ReportError> {
        let title = &self.title;
        if self.rungs.is_empty() {
            return Err(ReportError::data(title, "there is no rung to show"));
        }
        if self.rungs.len() > MAX_RUNGS {
            let why = format!("{} rungs do not fit; show at most {MAX_RUNGS}", self.rungs.len());
            return Err(ReportError::data(title, why));
        }
        for (index, rung) in self.rungs.iter().enumerate() {
            let name = format!("rung {} ({})", index + 1, rung.label);
            finite(title, &format!("{name}: tok_s_low"), rung.tok_s_low)?;
            finite(title, &format!("{name}: tok_s_median"), rung.tok_s_median)?;
            finite(title, &format!("{name}: tok_s_high"), rung.tok_s_high)?;
            if let Some(ideal) = rung.ideal_tok_s {
                finite(title, &format!("{name}: ideal_tok_s"), ideal)?;
            }
            if let Some(io) = rung.io {
                finite(title, &format!("{name}: io.gain"), io.gain)?;
                finite(title, &format!("{name}: io.simulated"), io.simulated.unwrap_or(0.0))?;
            }
            if !(rung.tok_s_low <= rung.tok_s_median && rung.tok_s_median <= rung.tok_s_high) {
                let why = format!(
                    "{name}: low end {}, median {}, high end {} tok/s are not in this order",
                    rung.tok_s_low, rung.tok_s_median, rung.tok_s_high
                );
                return Err(ReportError::data(title, why));
            }
            if finite(title, &format!("{name}: io_wait_share"), rung.io_wait_share)? > 1.0 {
                let why = format!("{name}: io_wait_share is {}; expected a share of 0 to 1", rung.io_wait_share);
                return Err(ReportError::data(title, why));
            }
        }
        Ok(())
    }

    /// Bars, whiskers, values and the line of linear scaling. Returns the y of the zero line.
    fn speed_panel(&self, scene: &mut Scene, columns: &Columns, top: f64) -> Result<f64, ReportError> {
        const PANEL_PX: f64 = 250.0;
        let of_last = if self.rungs.len() > 1 { " · per cent: share of the last rung" } else { "" };
        let caption = format!("decode tokens per second · whiskers: {}{of_last}", self.whiskers);
        let caption = caption.as_str();
        scene.text_within(
            (MARGIN_PX, top + 12.0),
            Anchor::Start,
            caption,
            theme::muted(11.5),
            WIDTH_PX - 2.0 * MARGIN_PX,
        )?;
        let panel_top = top + 38.0;
        let zero = panel_top + PANEL_PX;

        let highest = self.rungs.iter().map(|r| r.tok_s_high).fold(0.0, f64::max);
        let ideal = self.rungs.iter().filter_map(|r| r.ideal_tok_s).fold(0.0, f64::max);
        // The ideal may need more room than the bars, but must not flatten them.
        let wanted = (highest * 1.12).max(if highest > 0.0 { ideal.min(highest * 2.0) } else { ideal });
        let mut ticks = axis::ticks(wanted, 6);
        let axis_top = if wanted > 0.0 { wanted } else { 1.0 };
        ticks.retain(|t| *t <= axis_top * 1.000_001);
        let y_of = |value: f64| zero - (value / axis_top).min(1.0) * PANEL_PX;

        let right = columns.left + columns.slot * self.rungs.len() as f64;
        for tick in &ticks {
            scene.hline((columns.left, right), y_of(*tick), 1.0, theme::GRID);
            let label = axis::tick_label(*tick, axis::step(&ticks));
            scene.text((columns.left - 8.0, y_of(*tick) + 4.0), Anchor::End, &label, theme::muted(11.5))?;
        }
        let last = self.rungs.last().map_or(0.0, |r| r.tok_s_median);
        for (index, rung) in self.rungs.iter().enumerate() {
            let x = columns.centre(index);
            let bar_top = y_of(rung.tok_s_median);
            scene.rect((x - columns.bar / 2.0, bar_top), (columns.bar, zero - bar_top), theme::MEASURED);
        }
        self.ideal_line(scene, columns, axis_top, &y_of)?;
        for (index, rung) in self.rungs.iter().enumerate() {
            let x = columns.centre(index);
            let bar_top = y_of(rung.tok_s_median);
            let (low, high) = (y_of(rung.tok_s_low), y_of(rung.tok_s_high));
            if rung.tok_s_high > rung.tok_s_low {
                scene.vline(x, (high, low), 1.5, theme::INK);
                for end in [high, low] {
                    scene.hline((x - 6.0, x + 6.0), end, 1.5, theme::INK);
                }
            }
            let share = if last > 0.0 { rung.tok_s_median / last } else { 0.0 };
            let share_text = units::percent_short(share);
            let style = theme::strong(if columns.slot < 70.0 { 12.0 } else { 14.0 });
            let mut value = units::tokens_per_s(rung.tok_s_median);
            if self.rungs.len() > 1 && last > 0.0 {
                // At the foot, where the whisker's lower half does not reach in an ordinary run.
                let foot_free = zero - 22.0 > low.max(bar_top);
                if foot_free {
                    let on_bar = super::scene::Type { em_px: 11.5, bold: false, ink: theme::ON_BAR };
                    scene.text((x, zero - 8.0), Anchor::Middle, &share_text, on_bar)?;
                } else if columns.slot > 84.0 {
                    value = format!("{value} ({share_text})");
                }
            }
            let width = font::text_width(&value, style.em_px, style.bold)?;
            // Keeps the dashed line from running through the digits.
            scene.rect((x - width / 2.0 - 3.0, high - 18.5), (width + 6.0, 14.5), theme::CARD.faded(0.9));
            scene.text((x, high - 7.0), Anchor::Middle, &value, style)?;
        }
        scene.hline((columns.left, right), zero, 1.5, theme::AXIS);
        Ok(zero)
    }

    fn ideal_line(
        &self,
        scene: &mut Scene,
        columns: &Columns,
        axis_top: f64,
        y_of: &dyn Fn(f64) -> f64,
    ) -> Result<(), ReportError> {
        let mut end: Option<(f64, f64)> = None;
        let mut phase = 0.0;
        let points = self.rungs.iter().enumerate();
        let points: Vec<_> = points.filter_map(|(i, r)| r.ideal_tok_s.map(|v| (columns.centre(i), v))).collect();
        for pair in points.windows(2) {
            let (from, mut to) = (pair[0], pair[1]);
            if from.1 >= axis_top {
                break;
            }
            if to.1 > axis_top {
                let share = (axis_top - from.1) / (to.1 - from.1);
                to = (from.0 + (to.0 - from.0) * share, axis_top);
            }
            phase = scene.dashed((from.0, y_of(from.1)), (to.0, y_of(to.1)), phase, 1.5, theme::MUTED);
            end = Some((to.0, y_of(to.1)));
        }
        if let Some((x, y)) = end {
            // To the left and above: the line comes from below, and the last value stands in the middle of its bar.
            let style = theme::muted(11.5);
            let label = "linear from rung 1";
            let width = font::text_width(label, style.em_px, false)?;
            let at = (x - 30.0, y - 5.0);
            if at.0 - width >= columns.left {
                scene.text(at, Anchor::End, label, style)?;
            } else {
                scene.text((x + 10.0, y - 5.0), Anchor::Start, label, style)?;
            }
        }
        Ok(())
    }

    /// Share of time waiting, on a scale that is always 0 to 100 %.
    fn wait_panel(&self, scene: &mut Scene, columns: &Columns, top: f64) -> Result<f64, ReportError> {
        const TRACK_PX: f64 = 44.0;
        let caption = "waiting for drives, share of decode time";
        scene.text((MARGIN_PX, top + 10.0), Anchor::Start, caption, theme::muted(11.5))?;
        let track_top = top + 40.0;
        let zero = track_top + TRACK_PX;
        scene.text((columns.left - 8.0, track_top + 4.0), Anchor::End, "100 %", theme::muted(11.0))?;
        scene.text((columns.left - 8.0, zero + 4.0), Anchor::End, "0", theme::muted(11.0))?;
        for (index, rung) in self.rungs.iter().enumerate() {
            let left = columns.centre(index) - columns.bar / 2.0;
            let filled = TRACK_PX * rung.io_wait_share;
            scene.rect((left, track_top), (columns.bar, TRACK_PX), theme::TRACK);
            scene.rect((left, zero - filled), (columns.bar, filled), theme::WAITING);
            let label = units::percent_short(rung.io_wait_share);
            scene.text((columns.centre(index), track_top - 6.0), Anchor::Middle, &label, theme::strong(12.0))?;
        }
        let right = columns.left + columns.slot * self.rungs.len() as f64;
        scene.hline((columns.left, right), zero, 1.5, theme::AXIS);
        Ok(zero)
    }

    /// Gain of the I/O alone, from zero, with a line where the simulation sees it.
    fn io_panel(&self, scene: &mut Scene, columns: &Columns, top: f64) -> Result<f64, ReportError> {
        const PANEL_PX: f64 = 56.0;
        let simulated = self.rungs.iter().any(|r| r.io.is_some_and(|io| io.simulated.is_some()));
        let line = if simulated { " · line and number in brackets: simulated" } else { "" };
        let caption = format!("gain of the I/O alone: the same barriers, read without compute{line}");
        scene.text((MARGIN_PX, top + 10.0), Anchor::Start, &caption, theme::muted(11.5))?;
        let (panel_top, all) = (top + 40.0, || self.rungs.iter().filter_map(|r| r.io));
        let zero = panel_top + PANEL_PX;
        let most = all().map(|io| io.gain.max(io.simulated.unwrap_or(0.0))).fold(0.0, f64::max);
        let y_of = |gain: f64| zero - if most > 0.0 { gain / most * PANEL_PX } else { 0.0 };
        for (index, io) in self.rungs.iter().enumerate().filter_map(|(i, r)| Some((i, r.io?))) {
            let (x, half) = (columns.centre(index), columns.bar / 2.0);
            scene.rect((x - half, y_of(io.gain)), (columns.bar, zero - y_of(io.gain)), theme::AXIS);
            let mut label = format!("{:.2}x", io.gain);
            if let Some(simulated) = io.simulated {
                scene.hline((x - half - 7.0, x + half + 7.0), y_of(simulated), 2.0, theme::INK);
                label = format!("{label} ({simulated:.2}x)");
            }
            let above = y_of(io.gain.max(io.simulated.unwrap_or(0.0))) - 6.0;
            scene.text_within((x, above), Anchor::Middle, &label, theme::strong(11.5), columns.slot - 4.0)?;
        }
        let right = columns.left + columns.slot * self.rungs.len() as f64;
        scene.hline((columns.left, right), zero, 1.5, theme::AXIS);
        Ok(zero)
    }

    fn labels(&self, scene: &mut Scene, columns: &Columns, top: f64) -> Result<f64, ReportError> {
        let mut bottom = top + 20.0;
        for (index, rung) in self.rungs.iter().enumerate() {
            let x = columns.centre(index);
            let long = if rung.drives == 1 { "1 drive".to_owned() } else { format!("{} drives", rung.drives) };
            let room = columns.slot - 6.0;
            let style = theme::strong(12.5);
            let short = font::text_width(&long, style.em_px, style.bold)? > room;
            let drives = if short { rung.drives.to_string() } else { long.clone() };
            scene.text((x, top + 20.0), Anchor::Middle, &drives, style)?;
            if !rung.label.trim().is_empty() && rung.label.trim() != long {
                let label = rung.label.trim();
                scene.text_within((x, top + 37.0), Anchor::Middle, label, theme::muted(11.5), room)?;
                bottom = top + 37.0;
            }
        }
        Ok(bottom)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scene::{Shape, assert_legible, texts};
    use super::*;

    fn figure(medians: &[f64]) -> LadderFigure {
        let rung = |(i, m): (usize, &f64)| RungPoint {
            label: format!("+ nvme{i}"),
            drives: i as u32 + 1,
            tok_s_median: *m,
            tok_s_low: m * 0.97,
            tok_s_high: m * 1.02,
            io_wait_share: 0.88 - 0.07 * i as f64,
            ideal_tok_s: Some(medians[0] * (i + 1) as f64),
            io: None,
        };
        LadderFigure {
            title: "Decode speed with one to four drives".into(),
            subtitle: "argo-mini, barrier layout".into(),
            emulated: true,
            whiskers: "slowest and fastest run".into(),
            rungs: medians.iter().enumerate().map(rung).collect(),
            note: "Median of 5 runs.".into(),
        }
    }

    #[test]
    fn shows_values_shares_and_the_word_emulated() {
        let scene = figure(&[12.5, 19.8, 24.1, 29.7]).scene().unwrap();
        assert_legible(&scene);
        let texts = texts(&scene);
        for wanted in ["12.5", "29.7", "42 %", "88 %", "67 %", "linear from rung 1", "1 drive", "4 drives", "+ nvme3"] {
            assert!(texts.contains(&wanted), "{wanted} is missing from {texts:?}");
        }
        assert!(texts.contains(&"emulated drives · argo-mini, barrier layout"));
    }

    #[test]
    fn the_gain_of_the_io_alone_stands_beside_its_simulation() {
        let mut figure = figure(&[10.0, 20.0]);
        let lines = |f: &LadderFigure| f.scene().unwrap().shapes.len();
        let without = lines(&figure);
        figure.rungs[0].io = Some(IoPoint { gain: 1.0, simulated: Some(1.0) });
        figure.rungs[1].io = Some(IoPoint { gain: 1.9, simulated: Some(2.03) });
        figure.whiskers = "95 % interval of the median".into();
        let scene = figure.scene().unwrap();
        assert_legible(&scene);
        assert!(texts(&scene).contains(&"1.90x (2.03x)"), "{:?}", texts(&scene));
        assert!(texts(&scene).iter().any(|t| t.contains("whiskers: 95 % interval")));
        assert!(lines(&figure) > without);
    }

    #[test]
    fn bars_are_proportional_from_zero() {
        let scene = figure(&[10.0, 20.0]).scene().unwrap();
        let bars: Vec<f64> = scene
            .shapes
            .iter()
            .filter_map(|s| match s {
                Shape::Rect { h, ink, .. } if *ink == theme::MEASURED => Some(*h),
                _ => None,
            })
            .collect();
        assert_eq!(bars.len(), 2);
        assert!((bars[1] / bars[0] - 2.0).abs() < 1e-9);
    }

    #[test]
    fn odd_but_legal_data_stays_legible() {
        let eight: Vec<f64> = (1..=8).map(|i| f64::from(i) * 11.1).collect();
        for medians in [&[29.7][..], &[0.0, 0.0], &[0.96, 1.02, 0.9], &[1e9, 3e9], &[1e-3, 50.0], &eight, &[5.0; 12]] {
            let mut figure = figure(medians);
            for rung in &mut figure.rungs {
                rung.io_wait_share = rung.io_wait_share.max(0.0);
            }
            assert_legible(&figure.scene().unwrap());
            for rung in &mut figure.rungs {
                rung.label = "Samsung SSD 990 PRO with Heatsink 4TB behind a very long adapter name".into();
                rung.ideal_tok_s = None;
                rung.tok_s_low = 0.0;
                rung.io_wait_share = 1.0;
            }
            figure.title = "A title that goes on and on about everything that was measured here ".repeat(6);
            figure.subtitle = "and a subtitle of the same kind, full of settings and their values ".repeat(8);
            figure.note = "note ".repeat(300);
            for (i, rung) in figure.rungs.iter_mut().enumerate().skip(1) {
                rung.io = Some(IoPoint { gain: i as f64 * 1e4, simulated: (i % 2 == 0).then_some(1e7) });
            }
            let scene = figure.scene().unwrap();
            assert_legible(&scene);
            assert!(texts(&scene).iter().any(|t| t.starts_with("emulated drives")));
        }
    }

    #[test]
    fn a_flat_ladder_does_not_shrink_under_its_ideal() {
        let scene = figure(&[10.0; 8]).scene().unwrap();
        assert_legible(&scene);
        let tallest = scene.shapes.iter().filter_map(|s| match s {
            Shape::Rect { h, ink, .. } if *ink == theme::MEASURED => Some(*h),
            _ => None,
        });
        assert!(tallest.fold(0.0, f64::max) >= 100.0, "bars keep at least two fifths of the panel");
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        let good = figure(&[12.5, 19.8]);
        let refuse = |change: &dyn Fn(&mut LadderFigure), says: &str| {
            let mut bad = good.clone();
            change(&mut bad);
            let message = bad.scene().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        };
        refuse(&|f| f.rungs.clear(), "no rung");
        refuse(&|f| f.rungs = vec![f.rungs[0].clone(); 13], "at most 12");
        refuse(&|f| f.rungs[1].tok_s_median = f64::NAN, "tok_s_median is NaN");
        refuse(&|f| f.rungs[1].tok_s_high = f64::INFINITY, "tok_s_high is inf");
        refuse(&|f| f.rungs[0].tok_s_low = -1.0, "tok_s_low is -1");
        refuse(&|f| f.rungs[0].tok_s_low = 13.0, "not in this order");
        refuse(&|f| f.rungs[0].io_wait_share = 1.2, "expected a share");
        refuse(&|f| f.rungs[0].ideal_tok_s = Some(f64::NAN), "ideal_tok_s");
        let io = |gain, simulated| Some(IoPoint { gain, simulated });
        refuse(&|f| f.rungs[0].io = io(f64::INFINITY, None), "io.gain");
        refuse(&|f| f.rungs[1].io = io(1.0, Some(-1.0)), "io.simulated");
    }
}
