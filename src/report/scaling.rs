//! One ladder's shape beside others': speed as a multiple of each one's first rung, by number of drives. The dashed line
//! is what every drive would bring if it brought as much as the first. Takes numbers; reads no file.

use super::plot::Figure;
use super::scene::{Anchor, Scene, Shape};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::{ReportError, axis, finite};

/// Other ladders that can be told apart.
pub const MAX_OTHERS: usize = 8;

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingLine {
    /// Whose it is.
    pub name: String,
    /// Drives, and speed as a multiple of the first rung's.
    pub points: Vec<(u32, f64)>,
}

/// The figure.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingFigure {
    /// What is compared.
    pub title: String,
    /// Model, layout.
    pub subtitle: String,
    /// Whether any drive of the own ladder was emulated.
    pub emulated: bool,
    /// The own ladder.
    pub own: ScalingLine,
    /// The others.
    pub others: Vec<ScalingLine>,
    /// Where the others come from.
    pub note: String,
}

impl Figure for ScalingFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        const PANEL_PX: f64 = 280.0;
        let lines = || std::iter::once(&self.own).chain(&self.others);
        if self.others.len() > MAX_OTHERS {
            let why = format!("{} other ladders cannot be told apart; show at most {MAX_OTHERS}", self.others.len());
            return Err(ReportError::data(&self.title, why));
        }
        for line in lines() {
            if line.points.is_empty() {
                return Err(ReportError::data(&self.title, format!("{} has no rung", line.name)));
            }
            for point in &line.points {
                finite(&self.title, &format!("{}: {} drives", line.name, point.0), point.1)?;
            }
        }
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let caption = "decode speed as a multiple of the first rung's, by number of drives";
        scene.text((MARGIN_PX, y + 12.0), Anchor::Start, caption, theme::muted(11.5))?;
        let (left, right) = (MARGIN_PX + 44.0, WIDTH_PX - MARGIN_PX - 30.0);
        let zero = y + 30.0 + PANEL_PX;
        let most = lines().flat_map(|l| &l.points).map(|p| p.0).max().unwrap_or(1).max(2);
        let highest = lines().flat_map(|l| &l.points).map(|p| p.1).fold(1.0, f64::max);
        let axis_top = (highest * 1.15).max(1.5);
        let x_of = |drives: u32| left + f64::from(drives - 1) / f64::from(most - 1) * (right - left);
        let y_of = |gain: f64| zero - (gain / axis_top).min(1.0) * PANEL_PX;
        let mut ticks = axis::ticks(axis_top, 6);
        ticks.retain(|t| *t <= axis_top);
        for tick in &ticks {
            scene.hline((left, right), y_of(*tick), 1.0, theme::GRID);
            let label = format!("{}x", axis::tick_label(*tick, axis::step(&ticks)));
            scene.text((left - 8.0, y_of(*tick) + 4.0), Anchor::End, &label, theme::muted(11.0))?;
        }
        scene.hline((left, right), zero, 1.0, theme::AXIS);
        for drives in 1..=most {
            scene.text((x_of(drives), zero + 18.0), Anchor::Middle, &drives.to_string(), theme::muted(11.5))?;
        }
        let end = f64::from(most).min(axis_top);
        let end_x = left + (end - 1.0) / f64::from(most - 1) * (right - left);
        scene.dashed((left, y_of(1.0)), (end_x, y_of(end)), 0.0, 1.5, theme::MUTED);
        // the own line is drawn last and lies on top
        for (index, line) in self.others.iter().enumerate().rev() {
            draw(&mut scene, line, &x_of, &y_of, theme::drive_color(index + 1), (1.5, 3.0));
        }
        draw(&mut scene, &self.own, &x_of, &y_of, theme::MEASURED, (3.0, 5.0));
        let mut row = zero + 44.0;
        let inks = std::iter::once(theme::MEASURED).chain((0..).map(|i| theme::drive_color(i + 1)));
        for (index, (line, ink)) in lines().zip(inks).enumerate() {
            let (first, last) = (line.points[0], line.points[line.points.len() - 1]);
            scene.rect((left, row - 5.0), (14.0, 3.0), ink);
            let style = if index == 0 { theme::strong(12.0) } else { theme::body(12.0) };
            scene.text_within((left + 22.0, row), Anchor::Start, &line.name, style, 430.0)?;
            let text = format!("{} to {} drives: {:.2}x", first.0, last.0, last.1 / first.1);
            scene.text_within((right, row), Anchor::End, &text, theme::muted(11.5), 200.0)?;
            row += 19.0;
        }
        theme::finish(scene, row - 12.0, &self.note)
    }
}

fn draw(
    scene: &mut Scene,
    line: &ScalingLine,
    x_of: &dyn Fn(u32) -> f64,
    y_of: &dyn Fn(f64) -> f64,
    ink: super::scene::Ink,
    (thick, radius): (f64, f64),
) {
    let points: Vec<(f64, f64)> = line.points.iter().map(|p| (x_of(p.0), y_of(p.1))).collect();
    scene.shapes.extend(points.iter().map(|&(x, y)| Shape::Dot { x, y, radius, ink }));
    if points.len() > 1 {
        scene.shapes.push(Shape::Line { points, thick, ink });
    }
}

#[cfg(test)]
mod tests {
    use super::super::scene::{assert_legible, texts};
    use super::*;

    fn line(name: &str, gains: &[f64]) -> ScalingLine {
        ScalingLine { name: name.into(), points: gains.iter().enumerate().map(|(i, g)| (i as u32 + 1, *g)).collect() }
    }

    fn figure(own: &[f64], others: Vec<ScalingLine>) -> ScalingFigure {
        ScalingFigure {
            title: "The shape of the ladder".into(),
            subtitle: "argo-mini".into(),
            emulated: true,
            own: line("this ladder", own),
            others,
            note: "Published figures of others.".into(),
        }
    }

    #[test]
    fn every_ladder_is_named_with_its_whole_gain() {
        let figure =
            figure(&[1.0, 1.9, 2.7, 3.4], vec![line("K3", &[1.0, 1.36, 1.62, 1.75]), line("GLM", &[1.0, 1.2])]);
        let scene = figure.scene().unwrap();
        assert_legible(&scene);
        let texts = texts(&scene);
        for wanted in ["this ladder", "K3", "1 to 4 drives: 3.40x", "1 to 4 drives: 1.75x", "1 to 2 drives: 1.20x"] {
            assert!(texts.contains(&wanted), "{wanted} is missing from {texts:?}");
        }
        let dots = scene.shapes.iter().filter(|s| matches!(s, Shape::Dot { .. })).count();
        assert_eq!(dots, 10, "one for every rung");
    }

    #[test]
    fn odd_data_stays_legible_and_too_much_is_refused() {
        for own in [&[1.0][..], &[1.0, 0.2], &[1.0, 40.0], &[1.0; 12]] {
            assert_legible(&figure(own, vec![line(&"a long name ".repeat(20), &[1.0, 1.1])]).scene().unwrap());
        }
        assert!(figure(&[], vec![]).scene().is_err());
        assert!(figure(&[f64::NAN], vec![]).scene().is_err());
        assert!(figure(&[1.0], vec![line("x", &[1.0]); MAX_OTHERS + 1]).scene().is_err());
    }
}
