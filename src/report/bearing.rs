//! How far to the right of the pen a glyph's ink begins, read from the font file itself.
//!
//! The drawing library's bitmap text puts the ink of every glyph right at the pen, which makes word spacing ragged
//! ("n vme"), and it does not tell this measure. Reads only the tables `cmap` (format 4), `hhea`, `hmtx` and `head`;
//! anything unexpected is `None`.

/// Left side bearing of `letter` in ems.
pub(super) fn left_bearing_em(font: &[u8], letter: char) -> Option<f64> {
    let glyph = glyph_of(table(font, b"cmap")?, letter).unwrap_or(0);
    let long_metrics = usize::from(u16_at(table(font, b"hhea")?, 34)?);
    let hmtx = table(font, b"hmtx")?;
    // The last glyphs may share one advance, and then only their bearings are stored.
    let at = match glyph.checked_sub(long_metrics) {
        None => 4 * glyph + 2,
        Some(rest) => 4 * long_metrics + 2 * rest,
    };
    let bearing = u16_at(hmtx, at)? as i16;
    let units_per_em = u16_at(table(font, b"head")?, 18)?;
    (units_per_em > 0).then(|| f64::from(bearing) / f64::from(units_per_em))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes(pair.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    usize::try_from(u32::from_be_bytes(four.try_into().ok()?)).ok()
}

fn table<'a>(font: &'a [u8], tag: &[u8; 4]) -> Option<&'a [u8]> {
    let tables = usize::from(u16_at(font, 4)?);
    let entry = (0..tables).map(|i| 12 + 16 * i).find(|at| font.get(*at..at + 4) == Some(tag.as_slice()))?;
    let (offset, len) = (u32_at(font, entry + 8)?, u32_at(font, entry + 12)?);
    font.get(offset..offset.checked_add(len)?)
}

/// Looks `letter` up in the first subtable of format 4.
fn glyph_of(cmap: &[u8], letter: char) -> Option<usize> {
    let code = u16::try_from(u32::from(letter)).ok()?;
    let subtables = usize::from(u16_at(cmap, 2)?);
    let map = (0..subtables)
        .filter_map(|i| cmap.get(u32_at(cmap, 4 + 8 * i + 4)?..))
        .find(|map| u16_at(map, 0) == Some(4))?;
    let segments = usize::from(u16_at(map, 6)?) / 2;
    let (ends, starts) = (14, 16 + 2 * segments);
    let (deltas, ranges) = (starts + 2 * segments, starts + 4 * segments);
    let segment = (0..segments).find(|s| u16_at(map, ends + 2 * s).is_some_and(|end| end >= code))?;
    let start = u16_at(map, starts + 2 * segment)?;
    let from_start = usize::from(code.checked_sub(start)?);
    let delta = u16_at(map, deltas + 2 * segment)?;
    let range_at = ranges + 2 * segment;
    let glyph = match u16_at(map, range_at)? {
        0 => code.wrapping_add(delta),
        // The offset counts from its own place in the file.
        range => match u16_at(map, range_at + usize::from(range) + 2 * from_start)? {
            0 => 0,
            glyph => glyph.wrapping_add(delta),
        },
    };
    Some(usize::from(glyph))
}

#[cfg(test)]
mod tests {
    use super::*;

    static FONT: &[u8] = include_bytes!("../../assets/DejaVuSans-subset.ttf");

    #[test]
    fn a_stem_begins_further_right_than_a_diagonal() {
        let em = |c| left_bearing_em(FONT, c).unwrap();
        assert!(em('n') > 0.05 && em('n') < 0.15, "{}", em('n'));
        assert!(em('v') > 0.0 && em('v') < em('n') / 2.0, "{}", em('v'));
        assert!(em('j') < 0.0, "j reaches to the left of the pen");
        assert_eq!(em(' '), 0.0);
        assert_eq!(em('\u{1f600}'), em('\u{4e2d}'), "both are the empty box");
    }

    #[test]
    fn a_cut_file_is_none_not_a_panic() {
        for len in (0..FONT.len()).step_by(97) {
            let _ = left_bearing_em(&FONT[..len], 'n');
        }
        assert_eq!(left_bearing_em(&FONT[..100], 'n'), None);
        assert_eq!(left_bearing_em(&[0xff; 4096], 'n'), None);
    }
}
