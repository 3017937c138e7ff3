//! The embedded font: registered once, measured for layout.
//!
//! No system font is ever asked for, so a figure is the same on every machine. One of the two files that name the
//! drawing library. The files lie in `assets/`, with their licence.

use super::{ReportError, bearing};
use plotters::style::{FontDesc, FontFamily, FontStyle, register_font};
use std::sync::OnceLock;

/// The family that texts are drawn with. An SVG names it too, and there it means the viewer's own sans-serif, which is
/// never much wider than the embedded one.
pub(super) const FAMILY: &str = "sans-serif";

/// Height that the drawing library's bitmap text calls its size, per em: ascent 1901 + descent 483 of 2048 units.
pub(super) const BITMAP_SIZE_PER_EM: f64 = 2384.0 / 2048.0;

/// The drawing library divides the size by this before it writes an SVG font size.
pub(super) const SVG_SIZE_PER_EM: f64 = 1.24;

static REGULAR: &[u8] = include_bytes!("../../assets/DejaVuSans-subset.ttf");
static BOLD: &[u8] = include_bytes!("../../assets/DejaVuSans-Bold-subset.ttf");

/// Registers both weights; later calls only repeat the first answer.
pub(super) fn ensure_registered() -> Result<(), ReportError> {
    static DONE: OnceLock<Result<(), &'static str>> = OnceLock::new();
    DONE.get_or_init(|| {
        register_font(FAMILY, FontStyle::Normal, REGULAR).map_err(|_| "DejaVuSans-subset.ttf")?;
        register_font(FAMILY, FontStyle::Bold, BOLD).map_err(|_| "DejaVuSans-Bold-subset.ttf")
    })
    .map_err(ReportError::Font)
}

/// The weight as the drawing library calls it.
pub(super) fn style(bold: bool) -> FontStyle {
    if bold { FontStyle::Bold } else { FontStyle::Normal }
}

/// Width of one line of text in pixels, `em_px` being the font size in pixels per em.
pub fn text_width(text: &str, em_px: f64, bold: bool) -> Result<f64, ReportError> {
    ensure_registered()?;
    // Measured large and scaled down, because the library rounds to whole pixels.
    const MEASURE_EM_PX: f64 = 512.0;
    let font = FontDesc::new(FontFamily::Name(FAMILY), MEASURE_EM_PX * BITMAP_SIZE_PER_EM, style(bold));
    let (width, _) = font
        .box_size(text)
        .map_err(|e| ReportError::Draw { figure: format!("text \"{text}\""), why: e.to_string() })?;
    Ok(f64::from(width) * em_px / MEASURE_EM_PX)
}

/// Where the ink of each letter begins, in pixels from the start of the text: pen, kerning and side bearing.
pub(super) fn ink_starts(text: &str, em_px: f64, bold: bool) -> Result<Vec<(char, f64)>, ReportError> {
    let font = if bold { BOLD } else { REGULAR };
    let width = |letters: &[char]| text_width(&letters.iter().collect::<String>(), em_px, bold);
    let mut starts = Vec::new();
    let mut pen = 0.0;
    let mut before: Option<char> = None;
    for letter in text.chars() {
        let advance = width(&[letter])?;
        if let Some(before) = before {
            pen += width(&[before, letter])? - width(&[before])? - advance;
        }
        let bearing = bearing::left_bearing_em(font, letter).unwrap_or(0.0) * em_px;
        starts.push((letter, pen + bearing));
        pen += advance;
        before = Some(letter);
    }
    Ok(starts)
}

/// `text`, or as much of its head as fits into `max_px` with an ellipsis.
pub fn elide(text: &str, max_px: f64, em_px: f64, bold: bool) -> Result<String, ReportError> {
    shorten(text, max_px, em_px, bold, |kept| (kept, 0))
}

/// `name`, or as much of both its ends as fits: drives of one model differ in their last letters.
pub fn elide_middle(name: &str, max_px: f64, em_px: f64, bold: bool) -> Result<String, ReportError> {
    shorten(name, max_px, em_px, bold, |kept| (kept.div_ceil(2), kept / 2))
}

/// `ends` says how many letters of head and tail to keep, of so many in all.
fn shorten(
    text: &str,
    max_px: f64,
    em_px: f64,
    bold: bool,
    ends: fn(usize) -> (usize, usize),
) -> Result<String, ReportError> {
    if text_width(text, em_px, bold)? <= max_px {
        return Ok(text.to_owned());
    }
    let chars: Vec<char> = text.chars().collect();
    let with = |kept: usize| -> String {
        let (head, tail) = ends(kept);
        let tail: String = chars.iter().skip(chars.len() - tail).collect();
        let head: String = chars.iter().take(head).collect();
        format!("{}…{}", head.trim_end(), tail.trim_start())
    };
    // The most that fits, by bisection: a name from outside may be very long.
    let (mut fits, mut too_long) = (0, chars.len());
    while fits + 1 < too_long {
        let middle = fits.midpoint(too_long);
        if text_width(&with(middle), em_px, bold)? <= max_px { fits = middle } else { too_long = middle }
    }
    Ok(with(fits))
}

/// Breaks `text` at spaces into at most `max_lines` lines of `max_px`; what is left over ends in an ellipsis.
pub fn wrap(text: &str, max_px: f64, em_px: f64, bold: bool, max_lines: usize) -> Result<Vec<String>, ReportError> {
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    let mut words = text.split_whitespace().peekable();
    while let Some(word) = words.peek() {
        let longer = if line.is_empty() { (*word).to_owned() } else { format!("{line} {word}") };
        let last_line = lines.len() + 1 >= max_lines;
        if text_width(&longer, em_px, bold)? <= max_px {
            line = longer;
        } else if last_line {
            let rest: Vec<&str> = words.by_ref().collect();
            line = format!("{line} {}", rest.join(" "));
            break;
        } else if line.is_empty() {
            lines.push(elide(word, max_px, em_px, bold)?);
        } else {
            lines.push(std::mem::take(&mut line));
            continue;
        }
        words.next();
    }
    if !line.is_empty() {
        lines.push(elide(line.trim(), max_px, em_px, bold)?);
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_with_the_embedded_font() {
        let narrow = text_width("iiii", 12.0, false).unwrap();
        let wide = text_width("MMMM", 12.0, false).unwrap();
        assert!(narrow > 0.0 && wide > 2.0 * narrow);
        assert!(text_width("MMMM", 12.0, true).unwrap() > wide, "bold is wider: the second file is in use");
        assert_eq!(text_width("", 12.0, false).unwrap(), 0.0);
    }

    #[test]
    fn every_sign_of_the_figures_is_in_both_files() {
        // A missing glyph has the width of the empty box; these signs do not all share one width.
        for bold in [false, true] {
            let missing = text_width("\u{4e2d}", 512.0, bold).unwrap();
            for sign in "µ≈σ×·–—%→…−≤≥●◀αΩé".chars() {
                let text = sign.to_string();
                assert_ne!(text_width(&text, 512.0, bold).unwrap(), missing, "{sign} is not in the subset");
            }
        }
    }

    #[test]
    fn elides_and_wraps_within_the_width() {
        let name = "Samsung SSD 990 PRO with Heatsink 4TB S7KGNU0X123456";
        let short = elide(name, 100.0, 12.0, false).unwrap();
        assert!(short.ends_with('…') && short.starts_with("Samsung"));
        assert!(text_width(&short, 12.0, false).unwrap() <= 100.0);
        assert_eq!(elide("nvme0", 100.0, 12.0, false).unwrap(), "nvme0");
        let ends = elide_middle(name, 120.0, 12.0, false).unwrap();
        assert!(ends.starts_with("Samsung") && ends.ends_with("123456") && ends.contains('…'), "{ends}");
        assert!(text_width(&ends, 12.0, false).unwrap() <= 120.0);

        let lines = wrap(name, 120.0, 12.0, false, 8).unwrap();
        assert_eq!(lines.join(" "), name);
        let two = wrap(name, 120.0, 12.0, false, 2).unwrap();
        assert_eq!(two.len(), 2);
        assert!(two.iter().all(|l| text_width(l, 12.0, false).unwrap() <= 120.0) && two[1].ends_with('…'));
        assert!(wrap("  ", 120.0, 12.0, false, 2).unwrap().is_empty());
        let long_word = "x".repeat(5000);
        assert_eq!(wrap(&format!("{long_word} end"), 120.0, 12.0, false, 3).unwrap().len(), 2);
    }
}
