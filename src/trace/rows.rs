//! Rows of comma-separated text, one at a time and with a bound on each: the reader under every trace parser. A fault
//! is named by file, line and column. Knows nothing of what the columns mean.
//!
//! Traces never quote, so a quote is an ordinary character: a stray one cannot swallow the rest of a file.

use super::log::TraceError;
use super::passed::Counted;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Longest line that is read.
pub const MAX_LINE_BYTES: usize = 64 << 10;

/// Lines of a text file, without their ends (LF or CRLF) and without a byte order mark.
pub struct Lines {
    input: BufReader<Box<dyn Read>>,
    path: PathBuf,
    text: Vec<u8>,
    number: u64,
}

impl Lines {
    /// The lines of the file at `path`.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Io { path: path.to_path_buf(), source })?;
        Ok(Self::over(path, Box::new(Counted::new(file))))
    }

    /// The lines of `input`, which errors call `path`.
    pub fn over(path: &Path, input: Box<dyn Read>) -> Self {
        let input = BufReader::with_capacity(256 << 10, input);
        Self { input, path: path.to_path_buf(), text: Vec::with_capacity(512), number: 0 }
    }

    /// The next line, or `None` at the end. A last line without an end is refused: it may be cut off, and a cut
    /// number still looks like one.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>, TraceError> {
        self.text.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        let read = self.input.by_ref().take(limit).read_until(b'\n', &mut self.text);
        let read = read.map_err(|source| TraceError::Io { path: self.path.clone(), source })?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        if self.text.last() != Some(&b'\n') {
            if self.text.len() > MAX_LINE_BYTES {
                self.skip_line()?;
                return Err(self.error(0, "", format!("longer than {MAX_LINE_BYTES} bytes")));
            }
            return Err(self.error(0, "", "has no line end, so it may be cut off".into()));
        }
        self.text.pop();
        if self.text.last() == Some(&b'\r') {
            self.text.pop();
        }
        let mark = self.number == 1 && self.text.starts_with(b"\xEF\xBB\xBF");
        Ok(Some(&self.text[if mark { 3 } else { 0 }..]))
    }

    /// Number of the line that was read last, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A fault in the line that was read last; `column` counts from 1, 0 = the line as a whole.
    pub fn error(&self, column: usize, name: &str, reason: String) -> TraceError {
        TraceError::Row { path: self.path.clone(), line: self.number, column, name: name.to_owned(), reason }
    }

    fn skip_line(&mut self) -> Result<(), TraceError> {
        loop {
            let chunk = self.input.fill_buf();
            let chunk = chunk.map_err(|source| TraceError::Io { path: self.path.clone(), source })?;
            let (used, done) = match chunk.iter().position(|b| *b == b'\n') {
                Some(at) => (at + 1, true),
                None => (chunk.len(), chunk.is_empty()),
            };
            self.input.consume(used);
            if done {
                return Ok(());
            }
        }
    }
}

/// Rows of a comma-separated file with a fixed number of columns.
pub struct Rows {
    lines: Lines,
    columns: Vec<String>,
    /// Where each field of the current row begins and ends in `text`.
    fields: Vec<(u32, u32)>,
    text: Vec<u8>,
}

/// One row.
pub struct Row<'a> {
    rows: &'a Rows,
}

impl Rows {
    /// Opens `path`, whose first line must name `columns` in this order.
    pub fn open(path: &Path, columns: &[&str]) -> Result<Self, TraceError> {
        let mut lines = Lines::open(path)?;
        let header = header_of(&mut lines)?;
        if !header.iter().eq(columns.iter()) {
            let seen = header.join(",");
            let seen: String = seen.chars().take(120).collect();
            let reason = format!("the columns are `{seen}`, not those of a trace");
            return Err(lines.error(0, "", reason));
        }
        Ok(Self::new(lines, header))
    }

    /// Rows after a header that was read already.
    pub fn new(lines: Lines, columns: Vec<String>) -> Self {
        Self { lines, columns, fields: Vec::with_capacity(32), text: Vec::with_capacity(512) }
    }

    /// The next row that is not blank. After an error about a row, the next call goes on with the row behind it.
    pub fn next_row(&mut self) -> Result<Option<Row<'_>>, TraceError> {
        loop {
            let Some(line) = self.lines.next_line()? else { return Ok(None) };
            if !line.is_empty() {
                self.text.clear();
                self.text.extend_from_slice(line);
                break;
            }
        }
        self.split()?;
        Ok(Some(Row { rows: self }))
    }

    /// Treats `text` as the next row; the caller had read that line already.
    pub fn first_row(&mut self, text: &[u8]) -> Result<Row<'_>, TraceError> {
        self.text.clear();
        self.text.extend_from_slice(text);
        self.split()?;
        Ok(Row { rows: self })
    }

    /// Where it is.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    fn split(&mut self) -> Result<(), TraceError> {
        self.fields.clear();
        let mut from = 0;
        for (at, byte) in self.text.iter().enumerate() {
            if *byte == b',' {
                self.fields.push((from, at as u32));
                from = at as u32 + 1;
            }
        }
        self.fields.push((from, self.text.len() as u32));
        if self.fields.len() == self.columns.len() {
            return Ok(());
        }
        let reason = format!("has {} columns, expected {}", self.fields.len(), self.columns.len());
        Err(self.lines.error(0, "", reason))
    }
}

/// The first line of `lines` as column names.
pub fn header_of(lines: &mut Lines) -> Result<Vec<String>, TraceError> {
    match lines.next_line()? {
        Some(line) => Ok(String::from_utf8_lossy(line).split(',').map(|c| c.trim().to_owned()).collect()),
        None => Err(lines.error(0, "", "the file is empty, not even a header is there".into())),
    }
}

impl Row<'_> {
    /// Bytes of field `index`, blanks around it removed.
    pub fn bytes(&self, index: usize) -> &[u8] {
        let (from, to) = self.rows.fields.get(index).copied().unwrap_or((0, 0));
        self.rows.text[from as usize..to as usize].trim_ascii()
    }

    /// Field `index` as text, with anything that is not UTF-8 replaced.
    pub fn text(&self, index: usize) -> String {
        String::from_utf8_lossy(self.bytes(index)).into_owned()
    }

    /// A fault of field `index`.
    pub fn error(&self, index: usize, reason: String) -> TraceError {
        let name = self.rows.columns.get(index).map_or("", String::as_str);
        self.rows.lines.error(index + 1, name, reason)
    }

    /// A whole number of at most `max`.
    pub fn whole(&self, index: usize, max: u64) -> Result<u64, TraceError> {
        let bytes = self.bytes(index);
        parse_whole(bytes)
            .filter(|v| *v <= max)
            .ok_or_else(|| self.error(index, format!("`{}` is not a whole number from 0 to {max}", shown(bytes))))
    }

    /// A whole number of 64 bits.
    pub fn u64(&self, index: usize) -> Result<u64, TraceError> {
        self.whole(index, u64::MAX)
    }

    /// A whole number of 32 bits.
    pub fn u32(&self, index: usize) -> Result<u32, TraceError> {
        self.whole(index, u64::from(u32::MAX)).map(|v| v as u32)
    }

    /// A whole number of 16 bits.
    pub fn u16(&self, index: usize) -> Result<u16, TraceError> {
        self.whole(index, u64::from(u16::MAX)).map(|v| v as u16)
    }

    /// A whole number of 8 bits.
    pub fn u8(&self, index: usize) -> Result<u8, TraceError> {
        self.whole(index, u64::from(u8::MAX)).map(|v| v as u8)
    }

    /// A whole number, or nothing.
    pub fn optional_u64(&self, index: usize) -> Result<Option<u64>, TraceError> {
        if self.bytes(index).is_empty() { Ok(None) } else { self.u64(index).map(Some) }
    }

    /// A decimal number in units of 10^-`digits`: `118.25` with 9 digits is 118250000000. Digits beyond are cut.
    pub fn scaled(&self, index: usize, digits: u32) -> Result<u64, TraceError> {
        let bytes = self.bytes(index);
        parse_scaled(bytes, digits).ok_or_else(|| {
            let reason = format!("`{}` is not a number of at least 0 that fits 64 bits of 10^-{digits}", shown(bytes));
            self.error(index, reason)
        })
    }

    /// A decimal number that is finite; it may be negative.
    pub fn float(&self, index: usize) -> Result<f32, TraceError> {
        let bytes = self.bytes(index);
        let plain = |b: &u8| b.is_ascii_digit() || b".-+eE".contains(b);
        let text = std::str::from_utf8(bytes).ok().filter(|_| bytes.len() <= 40 && bytes.iter().all(plain));
        text.and_then(|t| t.parse::<f32>().ok())
            .filter(|v| v.is_finite())
            .ok_or_else(|| self.error(index, format!("`{}` is not a finite number", shown(bytes))))
    }

    /// The value that belongs to one of a few words.
    pub fn word<T: Copy>(&self, index: usize, words: &[(&str, T)]) -> Result<T, TraceError> {
        let bytes = self.bytes(index);
        words.iter().find(|(word, _)| word.as_bytes() == bytes).map(|(_, value)| *value).ok_or_else(|| {
            let known: Vec<&str> = words.iter().map(|w| w.0).collect();
            self.error(index, format!("`{}` is none of {}", shown(bytes), known.join(", ")))
        })
    }
}

/// Digits only: no sign, no blank, no exponent.
pub fn parse_whole(bytes: &[u8]) -> Option<u64> {
    if bytes.is_empty() || bytes.len() > 20 {
        return None;
    }
    bytes.iter().try_fold(0u64, |value, b| {
        let digit = b.is_ascii_digit().then(|| u64::from(b - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// Digits with at most one point, in units of 10^-`digits` (at most 18).
pub fn parse_scaled(bytes: &[u8], digits: u32) -> Option<u64> {
    let (whole, fraction) = match bytes.iter().position(|b| *b == b'.') {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, &[][..]),
    };
    if fraction.len() > 40 || !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let kept = &fraction[..fraction.len().min(digits as usize)];
    let mut value = parse_whole(whole)?.checked_mul(10u64.checked_pow(digits)?)?;
    if !kept.is_empty() {
        value = value.checked_add(parse_whole(kept)?.checked_mul(10u64.pow(digits - kept.len() as u32))?)?;
    }
    Some(value)
}

/// A field as an error shows it: short, and without control characters.
pub fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]);
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &'static [u8], columns: usize) -> Rows {
        let lines = Lines::over(Path::new("x.csv"), Box::new(text));
        Rows::new(lines, (0..columns).map(|c| format!("c{c}")).collect())
    }

    #[test]
    fn numbers_are_whole_or_exact_decimals() {
        assert_eq!(parse_whole(b"18446744073709551615"), Some(u64::MAX));
        for bad in ["", "18446744073709551616", "-1", "+1", "1e3", "NaN", " 1", "1_000", "000000000000000000001"] {
            assert_eq!(parse_whole(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(parse_scaled(b"118.2106", 9), Some(118_210_600_000));
        assert_eq!(parse_scaled(b"7", 3), Some(7000));
        assert_eq!(parse_scaled(b"0.0000000019", 9), Some(1), "cut, not rounded");
        for bad in [".5", "1.2.3", "-0.1", "inf", "NaN", "1e9", "99999999999999999999"] {
            assert_eq!(parse_scaled(bad.as_bytes(), 9), None, "{bad}");
        }
        assert_eq!(parse_scaled(b"18446744073.8", 9), None, "overflow");
    }

    #[test]
    fn line_ends_marks_and_blank_lines_are_not_data() {
        let mut rows = rows(b"\xEF\xBB\xBF1,2\r\n\r\n\n3,4\n", 2);
        assert_eq!(rows.next_row().unwrap().unwrap().u64(0).unwrap(), 1);
        let row = rows.next_row().unwrap().unwrap();
        assert_eq!((row.u64(0).unwrap(), row.u64(1).unwrap()), (3, 4));
        assert_eq!(rows.lines().number(), 4);
        assert!(rows.next_row().unwrap().is_none());
    }

    #[test]
    fn faults_name_file_line_and_column() {
        let mut rows = rows(b"1,2\n3\n4,-5\n6,7", 2);
        assert!(rows.next_row().unwrap().is_some());
        let message = rows.next_row().err().unwrap().to_string();
        assert_eq!(message, "x.csv:2: has 1 columns, expected 2");
        let message = rows.next_row().unwrap().unwrap().u64(1).unwrap_err().to_string();
        assert_eq!(message, "x.csv:3: column 2 `c1`: `-5` is not a whole number from 0 to 18446744073709551615");
        let message = rows.next_row().err().unwrap().to_string();
        assert!(message.starts_with("x.csv:4: has no line end"), "{message}");
        assert!(rows.next_row().unwrap().is_none());
    }

    #[test]
    fn a_line_without_end_does_not_fill_the_memory() {
        let text: Vec<u8> = vec![b'7'; MAX_LINE_BYTES * 40].into_iter().chain(*b"\n5\n").collect();
        let lines = Lines::over(Path::new("x.csv"), Box::new(std::io::Cursor::new(text)));
        let mut rows = Rows::new(lines, vec!["a".into()]);
        assert!(rows.next_row().err().unwrap().to_string().contains("longer than"));
        assert!(rows.lines.text.capacity() <= 4 * MAX_LINE_BYTES);
        assert_eq!(rows.next_row().unwrap().unwrap().u64(0).unwrap(), 5, "it goes on behind the long line");
    }
}
