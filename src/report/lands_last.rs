//! Who landed last: the share of barriers that waited for each drive, and where in the model it happened.
//!
//! Counts come from the trace; a barrier that waited for nobody is in no count.

use super::plot::Figure;
use super::scene::{Anchor, Scene, Type};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::{ReportError, font, units};

/// Rows that fit in one picture.
pub const MAX_DRIVES: usize = 16;
/// Columns that fit in one picture.
pub const MAX_LAYERS: usize = 256;

/// How often each drive ended one layer's barrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerCounts {
    /// The layer, 0-based.
    pub layer: u16,
    /// One count per drive.
    pub last: Vec<u64>,
}

/// The lands-last figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LandsLastFigure {
    /// What is shown.
    pub title: String,
    /// Model, plan, run.
    pub subtitle: String,
    /// Whether any drive was emulated.
    pub emulated: bool,
    /// Names, in the order of the counts.
    pub drives: Vec<String>,
    /// One entry per layer, in order.
    pub layers: Vec<LayerCounts>,
    /// Written under the picture.
    pub note: String,
}

/// Width of the column of drive names.
const NAMES_PX: f64 = 130.0;
/// The palest and the darkest cell.
const PALE: super::scene::Ink = super::scene::Ink::hex(0xEAF1F6);
const DARK: super::scene::Ink = super::scene::Ink::hex(0x08306B);

impl Figure for LandsLastFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        let totals = self.check()?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let y = self.bars(&mut scene, &totals, y + 4.0)?;
        let y = self.heat_map(&mut scene, y + 20.0)?;
        theme::finish(scene, y, &self.note)
    }
}

impl LandsLastFigure {
    /// Sums per drive.
    fn check(&self) -> Result<Vec<u64>, ReportError> {
        let bad = |why: String| Err(ReportError::data(&self.title, why));
        if self.drives.is_empty() || self.layers.is_empty() {
            return bad("there is no drive or no layer to show".into());
        }
        if self.drives.len() > MAX_DRIVES || self.layers.len() > MAX_LAYERS {
            return bad(format!(
                "{} drives x {} layers do not fit; show at most {MAX_DRIVES} x {MAX_LAYERS}",
                self.drives.len(),
                self.layers.len()
            ));
        }
        let mut totals = vec![0u64; self.drives.len()];
        for layer in &self.layers {
            if layer.last.len() != self.drives.len() {
                let (have, want) = (layer.last.len(), self.drives.len());
                return bad(format!("layer {} has {have} counts for {want} drives", layer.layer));
            }
            for (total, count) in totals.iter_mut().zip(&layer.last) {
                match total.checked_add(*count) {
                    Some(sum) => *total = sum,
                    None => return bad(format!("the counts up to layer {} exceed 64 bits", layer.layer)),
                }
            }
        }
        Ok(totals)
    }

    fn names_at(&self, scene: &mut Scene, index: usize, baseline: f64) -> Result<(), ReportError> {
        let at = (MARGIN_PX + NAMES_PX - 10.0, baseline);
        scene.text_within(at, Anchor::End, &self.drives[index], theme::body(12.0), NAMES_PX - 12.0)?;
        Ok(())
    }

    /// One bar per drive, with the share an even split would have.
    fn bars(&self, scene: &mut Scene, totals: &[u64], top: f64) -> Result<f64, ReportError> {
        const ROW_PX: f64 = 26.0;
        const VALUES_PX: f64 = 170.0;
        let all: u128 = totals.iter().map(|t| u128::from(*t)).sum();
        let share = |count: u64| if all == 0 { 0.0 } else { count as f64 / all as f64 };
        let caption = match all {
            0 => "share of barriers that waited for this drive · no barrier waited for any drive".to_owned(),
            n => format!("share of the {n} barriers that waited for a drive, by the drive they waited for"),
        };
        scene.text((MARGIN_PX, top + 12.0), Anchor::Start, &caption, theme::muted(11.5))?;
        let (left, right) = (MARGIN_PX + NAMES_PX, WIDTH_PX - MARGIN_PX - VALUES_PX);
        // The longest bar fills the row, but one drive alone must not look like a record.
        let longest = totals.iter().map(|t| share(*t)).fold(0.0, f64::max);
        let even = 1.0 / self.drives.len() as f64;
        let full = longest.max(even * 1.25).min(1.0);
        let x_of = |s: f64| left + s / full * (right - left);

        let first_row = top + 40.0;
        let bottom = first_row + ROW_PX * self.drives.len() as f64;
        for (index, count) in totals.iter().enumerate() {
            let y = first_row + ROW_PX * index as f64;
            self.names_at(scene, index, y + 16.0)?;
            let end = x_of(share(*count));
            scene.rect((left, y + 3.0), (right - left, ROW_PX - 6.0), theme::TRACK.faded(0.6));
            scene.rect((left, y + 3.0), (end - left, ROW_PX - 6.0), theme::drive_color(index));
            let text = units::percent(share(*count));
            let width = scene.text((right + 10.0, y + 16.0), Anchor::Start, &text, theme::strong(12.5))?;
            let text = if *count == 1 { "1 barrier".to_owned() } else { format!("{count} barriers") };
            let room = VALUES_PX - 28.0 - width;
            scene.text_within((right + 18.0 + width, y + 16.0), Anchor::Start, &text, theme::muted(11.5), room)?;
        }
        scene.vline(left, (first_row, bottom), 1.0, theme::AXIS);
        if self.drives.len() > 1 {
            let x = x_of(even);
            scene.dashed((x, first_row - 4.0), (x, bottom + 2.0), 0.0, 1.5, theme::INK);
            let label = format!("even share {}", units::percent(even).replace(".0 %", " %"));
            scene.text((x, first_row - 8.0), Anchor::Middle, &label, theme::muted(11.0))?;
        }
        Ok(bottom)
    }

    /// Layers across, drives down; the shade is the drive's share of that layer's barriers.
    fn heat_map(&self, scene: &mut Scene, top: f64) -> Result<f64, ReportError> {
        let caption = "the same by layer: share of the layer's barriers";
        scene.text((MARGIN_PX, top + 12.0), Anchor::Start, caption, theme::muted(11.5))?;
        self.scale(scene, top + 12.0)?;
        let (left, right) = (MARGIN_PX + NAMES_PX, WIDTH_PX - MARGIN_PX);
        let cell_w = ((right - left) / self.layers.len() as f64).min(96.0);
        let cell_h = 26.0;
        let gap = if cell_w >= 6.0 { 1.0 } else { 0.0 };
        let first_row = top + 24.0;
        let bottom = first_row + cell_h * self.drives.len() as f64;
        for index in 0..self.drives.len() {
            self.names_at(scene, index, first_row + cell_h * index as f64 + 17.0)?;
        }
        // Where the word "layer" ends.
        let mut label_end = left - 10.0;
        for (column, layer) in self.layers.iter().enumerate() {
            let x = left + cell_w * column as f64;
            let all: u128 = layer.last.iter().map(|c| u128::from(*c)).sum();
            for (index, count) in layer.last.iter().enumerate() {
                let y = first_row + cell_h * index as f64;
                let share = if all == 0 { 0.0 } else { *count as f64 / all as f64 };
                let ink = if all == 0 { theme::TRACK } else { shade(share) };
                scene.rect((x, y), (cell_w - gap, cell_h - 1.0), ink);
                if all > 0 && cell_w >= 34.0 {
                    let ink = if share > 0.55 { theme::ON_BAR } else { theme::ON_PALE };
                    let text = format!("{:.0}", share * 100.0);
                    let style = Type { em_px: 10.5, bold: false, ink };
                    scene.text((x + (cell_w - gap) / 2.0, y + 16.5), Anchor::Middle, &text, style)?;
                }
            }
            // As many layer numbers as fit beside each other, always the first.
            let text = layer.layer.to_string();
            let half = font::text_width(&text, 11.0, false)? / 2.0;
            let centre = x + (cell_w - gap) / 2.0;
            if centre - half >= label_end + 8.0 {
                scene.text((centre, bottom + 15.0), Anchor::Middle, &text, theme::muted(11.0))?;
                label_end = centre + half;
            }
        }
        scene.text((left - 10.0, bottom + 15.0), Anchor::End, "layer", theme::muted(11.0))?;
        Ok(bottom + 18.0)
    }

    /// The key to the shades, at the right end of the caption's line.
    fn scale(&self, scene: &mut Scene, baseline: f64) -> Result<(), ReportError> {
        const STEPS: usize = 20;
        const STEP_PX: f64 = 5.0;
        let right = WIDTH_PX - MARGIN_PX;
        let width = scene.text((right, baseline), Anchor::End, "100 %", theme::muted(11.0))?;
        let left = right - width - 8.0 - STEPS as f64 * STEP_PX;
        for step in 0..STEPS {
            let ink = shade(step as f64 / (STEPS - 1) as f64);
            scene.rect((left + step as f64 * STEP_PX, baseline - 9.0), (STEP_PX, 10.0), ink);
        }
        scene.text((left - 8.0, baseline), Anchor::End, "0", theme::muted(11.0))?;
        let any_idle = self.layers.iter().any(|l| l.last.iter().all(|c| *c == 0));
        if any_idle {
            scene.text((left - 34.0, baseline), Anchor::End, "no wait", theme::muted(11.0))?;
            let width = font::text_width("no wait", 11.0, false)?;
            scene.rect((left - 34.0 - width - 16.0, baseline - 9.0), (10.0, 10.0), theme::TRACK);
        }
        Ok(())
    }
}

/// Pale to dark through the figure's blue.
fn shade(share: f64) -> super::scene::Ink {
    if share < 0.5 {
        PALE.mix(theme::MEASURED, share * 1.6)
    } else {
        PALE.mix(theme::MEASURED, 0.8).mix(DARK, share * 2.0 - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scene::{Shape, assert_legible, texts};
    use super::*;

    fn figure(drives: usize, layers: u16) -> LandsLastFigure {
        let counts = |layer: u16| LayerCounts {
            layer,
            last: (0..drives).map(|d| (u64::from(layer) * 7 + d as u64 * 13) % 40 + 1).collect(),
        };
        LandsLastFigure {
            title: "Which drive landed last".into(),
            subtitle: "argo-mini".into(),
            emulated: true,
            drives: (0..drives).map(|d| format!("nvme{d}")).collect(),
            layers: (0..layers).map(counts).collect(),
            note: String::new(),
        }
    }

    #[test]
    fn shows_shares_counts_and_the_even_split() {
        let mut figure = figure(2, 2);
        figure.layers[0].last = vec![30, 10];
        figure.layers[1].last = vec![0, 60];
        let scene = figure.scene().unwrap();
        assert_legible(&scene);
        let texts = texts(&scene);
        for wanted in ["30.0 %", "70.0 %", "70 barriers", "even share 50 %", "75", "25", "100", "layer"] {
            assert!(texts.contains(&wanted), "{wanted} is missing from {texts:?}");
        }
        assert!(texts.iter().any(|t| t.contains("the 100 barriers")));
    }

    #[test]
    fn one_cell_per_layer_and_drive() {
        let scene = figure(4, 92).scene().unwrap();
        let cells = scene.shapes.iter().filter(|s| matches!(s, Shape::Rect { h, .. } if *h == 25.0)).count();
        assert_eq!(cells, 4 * 92);
    }

    #[test]
    fn odd_but_legal_data_stays_legible() {
        for (drives, layers) in [(1, 1), (2, 8), (4, 92), (8, 256), (16, 12)] {
            let mut figure = figure(drives, layers);
            assert_legible(&figure.scene().unwrap());
            figure.drives.fill("Samsung SSD 990 PRO with Heatsink 4TB behind a long adapter".into());
            for layer in &mut figure.layers {
                layer.layer += 60_000;
                layer.last.fill(0);
            }
            let scene = figure.scene().unwrap();
            assert_legible(&scene);
            assert!(texts(&scene).iter().any(|t| t.contains("no barrier waited")));
            figure.layers[0].last.fill(u64::MAX / 2);
            assert_legible(&figure.scene().unwrap());
        }
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        let refuse = |change: &dyn Fn(&mut LandsLastFigure), says: &str| {
            let mut bad = figure(2, 4);
            change(&mut bad);
            let message = bad.scene().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        };
        refuse(&|f| f.layers.clear(), "no layer");
        refuse(&|f| f.drives.clear(), "no drive");
        refuse(&|f| f.drives.push("third".into()), "2 counts for 3 drives");
        refuse(&|f| f.layers = vec![f.layers[0].clone(); 257], "do not fit");
        refuse(&|f| f.layers.iter_mut().for_each(|l| l.last[0] = u64::MAX), "exceed 64 bits");
    }
}
