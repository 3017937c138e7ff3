//! A picture as a list of shapes in logical pixels, before any drawing library sees it.
//!
//! Figures lay themselves out here, so that a test can ask whether a label is cut off or covers another one. Knows
//! nothing of files or of what the shapes mean.

use super::ReportError;
use super::font;

/// A colour with its opacity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ink {
    /// Red, green, blue.
    pub rgb: (u8, u8, u8),
    /// 0 (invisible) to 1.
    pub alpha: f64,
}

impl Ink {
    /// An opaque colour written as 0xRRGGBB.
    pub const fn hex(rgb: u32) -> Self {
        Self { rgb: ((rgb >> 16) as u8, (rgb >> 8) as u8, rgb as u8), alpha: 1.0 }
    }

    /// The same colour with another opacity.
    pub const fn faded(self, alpha: f64) -> Self {
        Self { rgb: self.rgb, alpha }
    }

    /// The opaque colour `share` (0 to 1) of the way from this one to `other`.
    pub fn mix(self, other: Self, share: f64) -> Self {
        let share = share.clamp(0.0, 1.0);
        let channel = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * share).round() as u8;
        let (a, b) = (self.rgb, other.rgb);
        Self { rgb: (channel(a.0, b.0), channel(a.1, b.1), channel(a.2, b.2)), alpha: 1.0 }
    }
}

/// Which point of a text its position names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// Its left end.
    Start,
    /// Its middle.
    Middle,
    /// Its right end.
    End,
}

/// How a text looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Type {
    /// Pixels per em.
    pub em_px: f64,
    /// Heavy weight.
    pub bold: bool,
    /// Colour.
    pub ink: Ink,
}

/// One shape. Coordinates are logical pixels, y downwards.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// A filled rectangle; axis-parallel lines are thin ones, which stay crisp.
    Rect {
        /// Left edge.
        x: f64,
        /// Upper edge.
        y: f64,
        /// Width.
        w: f64,
        /// Height.
        h: f64,
        /// Fill.
        ink: Ink,
    },
    /// An open line.
    Line {
        /// Its corners.
        points: Vec<(f64, f64)>,
        /// Thickness.
        thick: f64,
        /// Colour.
        ink: Ink,
    },
    /// A filled polygon.
    Area {
        /// Its corners.
        points: Vec<(f64, f64)>,
        /// Fill.
        ink: Ink,
    },
    /// A filled circle.
    Dot {
        /// Centre.
        x: f64,
        /// Centre.
        y: f64,
        /// Radius.
        radius: f64,
        /// Fill.
        ink: Ink,
    },
    /// One line of text.
    Text {
        /// Position of the anchor.
        x: f64,
        /// The line that letters stand on.
        baseline: f64,
        /// Its content, without control characters.
        text: String,
        /// Which end `x` names.
        anchor: Anchor,
        /// Size, weight, colour.
        style: Type,
        /// Measured width.
        width: f64,
    },
}

/// A picture under construction, filled from the top down; its height is known last.
#[derive(Clone, Debug)]
pub struct Scene {
    /// Title, also for readers that cannot see the picture.
    pub title: String,
    /// Logical width.
    pub width: f64,
    /// Logical height.
    pub height: f64,
    /// Painted in this order.
    pub shapes: Vec<Shape>,
}

impl Scene {
    /// An empty picture.
    pub fn new(title: &str, width: f64) -> Self {
        Self { title: clean(title), width, height: 0.0, shapes: Vec::new() }
    }

    /// A filled rectangle; sizes below zero count as zero.
    pub fn rect(&mut self, (x, y): (f64, f64), (w, h): (f64, f64), ink: Ink) {
        self.shapes.push(Shape::Rect { x, y, w: w.max(0.0), h: h.max(0.0), ink });
    }

    /// The outline of a rectangle, drawn inside it.
    pub fn frame(&mut self, (x, y): (f64, f64), (w, h): (f64, f64), thick: f64, ink: Ink) {
        self.rect((x, y), (w, thick), ink);
        self.rect((x, y + h - thick), (w, thick), ink);
        self.rect((x, y + thick), (thick, h - 2.0 * thick), ink);
        self.rect((x + w - thick, y + thick), (thick, h - 2.0 * thick), ink);
    }

    /// A horizontal line, centred on `y`.
    pub fn hline(&mut self, (x0, x1): (f64, f64), y: f64, thick: f64, ink: Ink) {
        self.rect((x0.min(x1), y - thick / 2.0), ((x1 - x0).abs(), thick), ink);
    }

    /// A vertical line, centred on `x`.
    pub fn vline(&mut self, x: f64, (y0, y1): (f64, f64), thick: f64, ink: Ink) {
        self.rect((x - thick / 2.0, y0.min(y1)), (thick, (y1 - y0).abs()), ink);
    }

    /// A straight dashed line; `phase` says how far into the pattern it begins. Returns the phase at its end, so that
    /// a bent line keeps its rhythm.
    pub fn dashed(&mut self, from: (f64, f64), to: (f64, f64), phase: f64, thick: f64, ink: Ink) -> f64 {
        const DASH_PX: f64 = 5.0;
        const GAP_PX: f64 = 4.0;
        let length = (to.0 - from.0).hypot(to.1 - from.1);
        if !length.is_finite() || length <= 0.0 {
            return phase;
        }
        let at = |d: f64| (from.0 + (to.0 - from.0) * d / length, from.1 + (to.1 - from.1) * d / length);
        let mut start = -phase;
        while start < length {
            let (from, to) = (start.max(0.0), (start + DASH_PX).min(length));
            // What is shorter than a pixel would be drawn as a speck.
            if to - from >= 1.0 {
                self.shapes.push(Shape::Line { points: vec![at(from), at(to)], thick, ink });
            }
            start += DASH_PX + GAP_PX;
        }
        length + DASH_PX + GAP_PX - start
    }

    /// One line of text; returns its width. Empty text draws nothing.
    pub fn text(
        &mut self,
        (x, baseline): (f64, f64),
        anchor: Anchor,
        text: &str,
        style: Type,
    ) -> Result<f64, ReportError> {
        let text = clean(text);
        let width = font::text_width(&text, style.em_px, style.bold)?;
        if !text.is_empty() {
            self.shapes.push(Shape::Text { x, baseline, text, anchor, style, width });
        }
        Ok(width)
    }

    /// A name of at most `max_px`, with an ellipsis in its middle where it is longer; returns its width.
    pub fn text_within(
        &mut self,
        at: (f64, f64),
        anchor: Anchor,
        text: &str,
        style: Type,
        max_px: f64,
    ) -> Result<f64, ReportError> {
        let text = font::elide_middle(&clean(text), max_px, style.em_px, style.bold)?;
        self.text(at, anchor, &text, style)
    }
}

/// Left, top, right, bottom of a text as drawn.
pub fn text_box(shape: &Shape) -> Option<(f64, f64, f64, f64)> {
    let Shape::Text { x, baseline, anchor, style, width, .. } = shape else { return None };
    let left = match anchor {
        Anchor::Start => *x,
        Anchor::Middle => x - width / 2.0,
        Anchor::End => x - width,
    };
    Some((left, baseline - 0.76 * style.em_px, left + width, baseline + 0.24 * style.em_px))
}

/// Control characters are not legal in SVG and have no glyph.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') { ' ' } else { c }).collect()
}

/// Fails when a text leaves the picture or covers another text.
#[cfg(test)]
pub fn assert_legible(scene: &Scene) {
    let texts: Vec<_> = scene.shapes.iter().filter_map(|s| text_box(s).map(|b| (s, b))).collect();
    for (index, (shape, b)) in texts.iter().enumerate() {
        assert!(
            b.0 >= 4.0 && b.1 >= 4.0 && b.2 <= scene.width - 4.0 && b.3 <= scene.height - 4.0,
            "cut off in {}x{}: {shape:?}",
            scene.width,
            scene.height
        );
        for (other, o) in &texts[index + 1..] {
            let apart = b.2 <= o.0 || o.2 <= b.0 || b.3 <= o.1 || o.3 <= b.1;
            assert!(apart, "texts overlap: {shape:?} and {other:?}");
        }
    }
    for shape in &scene.shapes {
        let all_finite = match shape {
            Shape::Rect { x, y, w, h, .. } => [x, y, w, h].iter().all(|v| v.is_finite()),
            Shape::Line { points, .. } | Shape::Area { points, .. } => {
                points.iter().all(|p| p.0.is_finite() && p.1.is_finite())
            }
            Shape::Dot { x, y, radius, .. } => [x, y, radius].iter().all(|v| v.is_finite()),
            Shape::Text { x, baseline, .. } => x.is_finite() && baseline.is_finite(),
        };
        assert!(all_finite, "{shape:?}");
    }
}

/// All texts of a scene, for tests that look for one.
#[cfg(test)]
pub fn texts(scene: &Scene) -> Vec<&str> {
    scene
        .shapes
        .iter()
        .filter_map(|s| match s {
            Shape::Text { text, .. } => Some(text.as_str()),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_never_reach_the_picture() {
        let mut scene = Scene::new("a\u{0}b", 100.0);
        let style = Type { em_px: 10.0, bold: false, ink: Ink::hex(0) };
        scene.text((10.0, 10.0), Anchor::Start, "x\u{1b}[0my", style).unwrap();
        assert_eq!(scene.title, "a b");
        assert_eq!(texts(&scene), ["x [0my"]);
    }

    #[test]
    fn mixing_meets_both_ends() {
        let (a, b) = (Ink::hex(0xff0000), Ink::hex(0x0000ff));
        assert_eq!(a.mix(b, 0.0), a);
        assert_eq!(a.mix(b, 1.0), b);
        assert_eq!(a.mix(b, f64::NAN).rgb.1, 0);
    }

    #[test]
    #[should_panic(expected = "texts overlap")]
    fn the_check_for_overlap_can_fail() {
        let mut scene = Scene::new("t", 100.0);
        scene.height = 100.0;
        let style = Type { em_px: 10.0, bold: false, ink: Ink::hex(0) };
        scene.text((20.0, 50.0), Anchor::Start, "one", style).unwrap();
        scene.text((25.0, 52.0), Anchor::Start, "two", style).unwrap();
        assert_legible(&scene);
    }
}
