//! Colours, type sizes and the frame that all figures share.
//!
//! Every figure sits on an opaque light card, so that it reads the same on a dark page. The drive colours are the
//! Okabe-Ito set, which stays apart for colour-blind readers, with its pale yellow replaced.

use super::ReportError;
use super::font;
use super::scene::{Anchor, Ink, Scene, Type};

/// Width of every figure: what a README column shows without shrinking.
pub const WIDTH_PX: f64 = 800.0;
/// Space between the card's edge and its content.
pub const MARGIN_PX: f64 = 26.0;

/// Background.
pub const CARD: Ink = Ink::hex(0xFBFAF7);
/// Edge of the background.
pub const EDGE: Ink = Ink::hex(0xD8D5CD);
/// Main text.
pub const INK: Ink = Ink::hex(0x22262C);
/// Secondary text.
pub const MUTED: Ink = Ink::hex(0x5B626C);
/// Grid lines.
pub const GRID: Ink = Ink::hex(0xE5E2DB);
/// The zero line and the frame of a panel.
pub const AXIS: Ink = Ink::hex(0x8D939B);
/// The unfilled part of a share.
pub const TRACK: Ink = Ink::hex(0xE9E6DF);
/// Main colour of measured values.
pub const MEASURED: Ink = Ink::hex(0x0072B2);
/// Colour of waiting.
pub const WAITING: Ink = Ink::hex(0xD55E00);
/// Text on a pale cell: the main colour, but one that stays dark where a page swaps light and dark.
pub const ON_PALE: Ink = Ink::hex(0x22262D);
/// Text on a dark bar.
pub const ON_BAR: Ink = Ink::hex(0xFFFFFF);

const DRIVES: [Ink; 8] = [
    Ink::hex(0x0072B2),
    Ink::hex(0xE08A00),
    Ink::hex(0x009E73),
    Ink::hex(0xCC5F9B),
    Ink::hex(0x56B4E9),
    Ink::hex(0xA6400C),
    Ink::hex(0x8F9A1E),
    Ink::hex(0x5A5A66),
];

/// Colour of a drive; from the ninth on they repeat, so a figure must also name its drives.
pub fn drive_color(index: usize) -> Ink {
    DRIVES[index % DRIVES.len()]
}

/// Text in the main colour.
pub const fn body(em_px: f64) -> Type {
    Type { em_px, bold: false, ink: INK }
}

/// Heavy text in the main colour.
pub const fn strong(em_px: f64) -> Type {
    Type { em_px, bold: true, ink: INK }
}

/// Text in the secondary colour.
pub const fn muted(em_px: f64) -> Type {
    Type { em_px, bold: false, ink: MUTED }
}

/// A scene with title and subtitle; also returns the y below them. `emulated` puts that word into the subtitle: a
/// picture travels without the page around it, and must not pass for a picture of real drives.
pub fn begin(title: &str, subtitle: &str, emulated: bool) -> Result<(Scene, f64), ReportError> {
    let mut scene = Scene::new(title, WIDTH_PX);
    let inner = WIDTH_PX - 2.0 * MARGIN_PX;
    let mut y = MARGIN_PX - 4.0;
    for line in font::wrap(&scene.title.clone(), inner, 19.0, true, 2)? {
        y += 22.0;
        scene.text((MARGIN_PX, y), Anchor::Start, &line, strong(19.0))?;
    }
    let lines = match (emulated, subtitle.to_lowercase().contains("emulated drives")) {
        (true, false) if subtitle.trim().is_empty() => "emulated drives".to_owned(),
        // In front, so that a long subtitle cannot push it out.
        (true, false) => format!("emulated drives · {subtitle}"),
        _ => subtitle.to_owned(),
    };
    for line in font::wrap(&lines, inner, 13.0, false, 2)? {
        y += 20.0;
        scene.text((MARGIN_PX, y), Anchor::Start, &line, muted(13.0))?;
    }
    Ok((scene, y + 12.0))
}

/// Writes `note` under the content that ends at `y`, and closes the card.
pub fn finish(mut scene: Scene, mut y: f64, note: &str) -> Result<Scene, ReportError> {
    let lines = font::wrap(note, WIDTH_PX - 2.0 * MARGIN_PX, 11.0, false, 4)?;
    if !lines.is_empty() {
        y += 13.0;
    }
    for line in lines {
        y += 15.0;
        scene.text((MARGIN_PX, y), Anchor::Start, &line, muted(11.0))?;
    }
    scene.height = (y + MARGIN_PX - 6.0).ceil();
    let size = (scene.width, scene.height);
    scene.frame((0.0, 0.0), size, 1.0, EDGE);
    Ok(scene)
}

/// Names of all drives with their colours, in as many lines as they need; returns the y below.
pub fn drive_legend(scene: &mut Scene, drives: &[String], top: f64) -> Result<f64, ReportError> {
    let right = WIDTH_PX - MARGIN_PX;
    let (mut x, mut baseline) = (MARGIN_PX, top + 12.0);
    for (index, name) in drives.iter().enumerate() {
        let name = font::elide_middle(name, 220.0, 12.0, false)?;
        let width = font::text_width(&name, 12.0, false)? + 16.0;
        if x + width > right && x > MARGIN_PX {
            (x, baseline) = (MARGIN_PX, baseline + 18.0);
        }
        scene.rect((x, baseline - 9.0), (10.0, 10.0), drive_color(index));
        scene.text((x + 16.0, baseline), Anchor::Start, &name, body(12.0))?;
        x += width + 20.0;
    }
    Ok(baseline + 8.0)
}
