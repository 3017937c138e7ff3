//! From a scene to SVG and PNG, and onto disk. The only file, with `font`, that names the drawing library.
//!
//! Both pictures are drawn on the same grid of `SCALE` device pixels per logical pixel: the PNG is sharp on dense
//! screens, and the SVG keeps half pixels although the library writes whole numbers. Equal input gives equal bytes.

use super::ReportError;
use super::font;
use super::scene::{Anchor, Ink, Scene, Shape, Type};
use super::theme;
use crate::sys::durable;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Device pixels per logical pixel.
pub const SCALE: f64 = 2.0;

/// Largest picture, in logical pixels each way: a bound before the bitmap is allocated.
const MAX_SIDE_PX: f64 = 4000.0;

/// A picture made of plain data.
pub trait Figure {
    /// Checks the data and lays it out.
    fn scene(&self) -> Result<Scene, ReportError>;

    /// The picture as an SVG document.
    fn svg(&self) -> Result<String, ReportError> {
        svg(&self.scene()?)
    }

    /// Writes `stem` + `.svg` and `stem` + `.png`, each whole or not at all; returns both paths.
    fn write(&self, stem: &Path) -> Result<[PathBuf; 2], ReportError> {
        let scene = self.scene()?;
        let paths = [with_suffix(stem, ".svg"), with_suffix(stem, ".png")];
        let svg = svg(&scene)?;
        let png = png(&scene, &paths[1])?;
        for (path, bytes) in paths.iter().zip([svg.as_bytes(), &png]) {
            durable::write_atomic(path, bytes).map_err(|source| ReportError::Write { path: path.clone(), source })?;
        }
        Ok(paths)
    }
}

/// Appends, where `with_extension` would cut a stem such as `ladder-1.5x`.
fn with_suffix(stem: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = stem.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Size on the device grid.
fn device_size(scene: &Scene) -> Result<(u32, u32), ReportError> {
    let fits = |side: f64| (1.0..=MAX_SIDE_PX).contains(&side);
    if !fits(scene.width) || !fits(scene.height) {
        return Err(ReportError::data(
            &scene.title,
            format!("the picture would be {} x {} pixels; show fewer rows", scene.width, scene.height),
        ));
    }
    Ok(((scene.width * SCALE).round() as u32, (scene.height * SCALE).round() as u32))
}

fn svg(scene: &Scene) -> Result<String, ReportError> {
    let size = device_size(scene)?;
    let mut document = String::new();
    {
        let area = SVGBackend::with_string(&mut document, size).into_drawing_area();
        paint(&area, scene, Text::Svg)?;
    }
    // The library writes the device size; shown at the logical size, with the title for screen readers.
    let head_end = document.find('>').unwrap_or(0);
    let body = document.get(head_end + 1..).unwrap_or("");
    Ok(format!(
        "<svg width=\"{}\" height=\"{}\" viewBox=\"0 0 {} {}\" role=\"img\" xmlns=\"http://www.w3.org/2000/svg\">\n\
         <title>{}</title>{body}",
        scene.width.round(),
        scene.height.round(),
        size.0,
        size.1,
        escape(&scene.title)
    ))
}

/// The library encodes only into a file, so it draws into one beside the target that is gone before this returns.
fn png(scene: &Scene, target: &Path) -> Result<Vec<u8>, ReportError> {
    let size = device_size(scene)?;
    let scratch = with_suffix(target, &format!(".{}.tmp.png", std::process::id()));
    let write_error = |source| ReportError::Write { path: target.to_owned(), source };
    // Asked first, because the library's own message would not say that the folder is missing.
    fs::File::create(&scratch).map_err(write_error)?;
    let drawn = (|| {
        let area = BitMapBackend::new(&scratch, size).into_drawing_area();
        paint(&area, scene, Text::Bitmap)?;
        drop(area);
        fs::read(&scratch).map_err(write_error)
    })();
    let _ = fs::remove_file(&scratch);
    drawn
}

/// The two backends place and size text differently.
#[derive(Clone, Copy)]
enum Text {
    Svg,
    Bitmap,
}

fn paint<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    scene: &Scene,
    text_as: Text,
) -> Result<(), ReportError> {
    font::ensure_registered()?;
    let failed = |why: String| ReportError::Draw { figure: scene.title.clone(), why };
    let device = |v: f64| (v * SCALE).round() as i32;
    let point = |p: &(f64, f64)| (device(p.0), device(p.1));
    let card = Shape::Rect { x: 0.0, y: 0.0, w: scene.width, h: scene.height, ink: theme::CARD };
    for shape in std::iter::once(&card).chain(&scene.shapes) {
        match shape {
            Shape::Rect { x, y, w, h, ink } => {
                let (left, top) = (device(*x), device(*y));
                // A hairline must not vanish when its two edges round to the same pixel.
                let right = device(x + w).max(left + i32::from(*w > 0.0));
                let bottom = device(y + h).max(top + i32::from(*h > 0.0));
                area.draw(&Rectangle::new([(left, top), (right, bottom)], color(*ink).filled()))
            }
            Shape::Line { points, thick, ink } => {
                let style = color(*ink).stroke_width((thick * SCALE).round().max(1.0) as u32);
                area.draw(&PathElement::new(points.iter().map(point).collect::<Vec<_>>(), style))
            }
            Shape::Area { points, ink } => {
                area.draw(&Polygon::new(points.iter().map(point).collect::<Vec<_>>(), color(*ink)))
            }
            Shape::Dot { x, y, radius, ink } => {
                area.draw(&Circle::new((device(*x), device(*y)), device(*radius), color(*ink).filled()))
            }
            Shape::Text { x, baseline, text, anchor, style, width } => match text_as {
                Text::Svg => {
                    let (text_style, rise) = text_style(*style, *anchor, text_as);
                    area.draw_text(text, &text_style, (device(*x), device(*baseline) - rise))
                }
                // Letter by letter, because the library forgets the side bearings (see `bearing`).
                Text::Bitmap => {
                    let (text_style, rise) = text_style(*style, Anchor::Start, text_as);
                    let left = match anchor {
                        Anchor::Start => *x,
                        Anchor::Middle => x - width / 2.0,
                        Anchor::End => x - width,
                    };
                    font::ink_starts(text, style.em_px, style.bold)?.into_iter().try_for_each(|(letter, start)| {
                        let at = (device(left + start), device(*baseline) - rise);
                        area.draw_text(letter.encode_utf8(&mut [0; 4]), &text_style, at)
                    })
                }
            },
        }
        .map_err(|e| failed(e.to_string()))?;
    }
    area.present().map_err(|e| failed(e.to_string()))
}

fn color(ink: Ink) -> RGBAColor {
    RGBAColor(ink.rgb.0, ink.rgb.1, ink.rgb.2, ink.alpha)
}

/// The library's style, and how many device pixels above the baseline it wants its position. Found by reading how it
/// sets text: an SVG line hangs 0.76 em below its position, a bitmap baseline lies half the "size" below.
fn text_style(style: Type, anchor: Anchor, text_as: Text) -> (TextStyle<'static>, i32) {
    let em_device_px = style.em_px * SCALE;
    let (size, rise) = match text_as {
        Text::Svg => (em_device_px * font::SVG_SIZE_PER_EM, (0.76 * em_device_px).round() as i32),
        Text::Bitmap => {
            // An even size keeps all glyphs of a line on one baseline: the library truncates towards zero.
            let half = (em_device_px * font::BITMAP_SIZE_PER_EM / 2.0).round();
            (2.0 * half, half as i32)
        }
    };
    let h_pos = match anchor {
        Anchor::Start => HPos::Left,
        Anchor::Middle => HPos::Center,
        Anchor::End => HPos::Right,
    };
    let desc = FontDesc::new(FontFamily::Name(font::FAMILY), size, font::style(style.bold));
    let color = color(style.ink).to_backend_color();
    (TextStyle { font: desc, color, pos: Pos::new(h_pos, VPos::Top) }, rise)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture with every kind of shape.
    struct Sample;

    impl Figure for Sample {
        fn scene(&self) -> Result<Scene, ReportError> {
            let (mut scene, y) = theme::begin("Reads < writes & \"more\"", "sub", true)?;
            scene.text((30.0, y + 20.0), Anchor::Start, "5 µs ≈ 2σ", theme::strong(13.0))?;
            scene.rect((30.0, y + 30.0), (100.0, 0.2), theme::INK);
            scene.dashed((30.0, y + 40.0), (200.0, y + 60.0), 0.0, 1.5, theme::INK);
            let points = vec![(30.0, y + 60.0), (60.0, y + 40.0), (90.0, y + 60.0)];
            scene.shapes.push(Shape::Area { points, ink: theme::WAITING.faded(0.4) });
            scene.shapes.push(Shape::Dot { x: 300.0, y: y + 40.0, radius: 4.0, ink: theme::MEASURED });
            theme::finish(scene, y + 80.0, "a note")
        }
    }

    fn png_size(bytes: &[u8]) -> (u32, u32) {
        assert_eq!(&bytes[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(&bytes[12..16], b"IHDR");
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        (word(16), word(20))
    }

    #[test]
    fn writes_both_files_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let [svg, png] = Sample.write(&dir.path().join("run-1.5x")).unwrap();
        assert_eq!(svg, dir.path().join("run-1.5x.svg"));
        assert_eq!(png, dir.path().join("run-1.5x.png"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);

        let height = Sample.scene().unwrap().height;
        assert_eq!(png_size(&fs::read(&png).unwrap()), (1600, (height * SCALE) as u32));
        let text = fs::read_to_string(&svg).unwrap();
        assert!(text.starts_with(&format!("<svg width=\"800\" height=\"{height}\" viewBox=\"0 0 1600 ")));
        assert!(text.contains("<title>Reads &lt; writes &amp; \"more\"</title>"));
        assert!(text.contains("5 µs ≈ 2σ") && text.contains("emulated drives · sub") && text.contains("a note"));
        assert!(text.trim_end().ends_with("</svg>"));
        assert_eq!(text.matches("<svg").count(), 1);
    }

    #[test]
    fn equal_input_gives_equal_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let first = Sample.write(&dir.path().join("a")).unwrap();
        let second = Sample.write(&dir.path().join("b")).unwrap();
        for (a, b) in first.iter().zip(&second) {
            assert_eq!(fs::read(a).unwrap(), fs::read(b).unwrap());
        }
    }

    #[test]
    fn letters_are_painted_from_the_embedded_font() {
        // The same scene without its texts must be another bitmap: no text was silently skipped.
        let dir = tempfile::tempdir().unwrap();
        let scene = Sample.scene().unwrap();
        let mut mute = scene.clone();
        mute.shapes.retain(|s| !matches!(s, Shape::Text { .. }));
        let target = dir.path().join("x.png");
        assert!(png(&scene, &target).unwrap().len() > png(&mute, &target).unwrap().len() + 1000);
    }

    #[test]
    fn a_missing_folder_and_an_impossible_size_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let message = Sample.write(&dir.path().join("no/such")).unwrap_err().to_string();
        assert!(message.contains("such.png") && message.contains("folder"), "{message}");
        for height in [0.0, 1e6, f64::NAN] {
            let mut scene = Sample.scene().unwrap();
            scene.height = height;
            assert!(svg(&scene).unwrap_err().to_string().contains("pixels"));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
