//! Plain-text tables that fit a terminal of 80 columns.
//!
//! Text columns give way when space is short, numbers never lose a digit: a column that is aligned right is never cut.
//! A table that cannot fit even so is printed as one block per row. Knows nothing of what the cells mean. Width is
//! counted in characters, so wide (East Asian) characters may stand out.

use std::io::IsTerminal;

/// Width for output that is not asked to be another one.
pub const DEFAULT_WIDTH: usize = 80;

/// Narrowest a text column is made before the table turns into blocks.
const MIN_TEXT_WIDTH: usize = 10;

const GAP: &str = "  ";

/// Which side a column's cells lean to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Text: may be wrapped.
    Left,
    /// Numbers: never wrapped.
    Right,
}

/// Whether headings are set in bold with escape sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    /// Characters only.
    Plain,
    /// ANSI bold headings.
    Ansi,
}

impl Paint {
    /// ANSI only for a terminal whose user did not set `NO_COLOR` (to anything but the empty string).
    pub fn detect(stream: &impl IsTerminal) -> Self {
        Self::choose(stream.is_terminal(), std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty()))
    }

    fn choose(terminal: bool, no_color: bool) -> Self {
        if terminal && !no_color { Self::Ansi } else { Self::Plain }
    }

    fn bold(self, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Ansi => format!("\u{1b}[1m{text}\u{1b}[0m"),
        }
    }
}

/// A table under construction.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new<S: Into<String>>(columns: impl IntoIterator<Item = (S, Align)>) -> Self {
        Self {
            columns: columns.into_iter().map(|(title, align)| (clean(title.into()), align)).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row. Missing cells are empty; cells without a column get one without a title, so that nothing is lost.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) -> &mut Self {
        let cells: Vec<String> = cells.into_iter().map(|c| clean(c.into())).collect();
        while self.columns.len() < cells.len() {
            self.columns.push((String::new(), Align::Left));
        }
        self.rows.push(cells);
        self
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table in plain characters, every line ending in a newline and at most `width` wide as long as no single
    /// number or heading is wider than that.
    pub fn render(&self, width: usize) -> String {
        self.render_with(width, Paint::Plain)
    }

    /// The table with bold headings where `paint` says so.
    pub fn render_with(&self, width: usize, paint: Paint) -> String {
        if self.columns.is_empty() {
            return String::new();
        }
        match self.widths(width) {
            Some(widths) => self.grid(&widths, paint),
            None => self.blocks(width, paint),
        }
    }

    fn cell<'a>(&self, row: &'a [String], column: usize) -> &'a str {
        row.get(column).map_or("", String::as_str)
    }

    /// Column widths that fit, or `None`.
    fn widths(&self, width: usize) -> Option<Vec<usize>> {
        let natural = |column: usize| {
            let cells = self.rows.iter().map(|row| chars(self.cell(row, column)));
            cells.chain([chars(&self.columns[column].0)]).max().unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..self.columns.len()).map(natural).collect();
        let room = width.checked_sub(GAP.len() * (self.columns.len() - 1))?;
        let mut excess = widths.iter().sum::<usize>().saturating_sub(room);
        // The widest text column gives first, so that short ones stay whole.
        while excess > 0 {
            let text = |c: &usize| self.columns[*c].1 == Align::Left && widths[*c] > MIN_TEXT_WIDTH;
            let widest = (0..widths.len()).filter(text).max_by_key(|c| widths[*c])?;
            widths[widest] -= 1;
            excess -= 1;
        }
        Some(widths)
    }

    fn grid(&self, widths: &[usize], paint: Paint) -> String {
        let mut out = String::new();
        let headings: Vec<String> = self.columns.iter().map(|(title, _)| title.clone()).collect();
        if headings.iter().any(|h| !h.is_empty()) {
            self.line(&mut out, &headings, widths, paint);
            let rules: Vec<String> = widths.iter().map(|w| "─".repeat(*w)).collect();
            out.push_str(&rules.join(GAP));
            out.push('\n');
        }
        for row in &self.rows {
            self.line(&mut out, row, widths, Paint::Plain);
        }
        out
    }

    /// One row, in as many lines as its longest cell needs.
    fn line(&self, out: &mut String, row: &[String], widths: &[usize], paint: Paint) {
        let cells: Vec<Vec<String>> =
            widths.iter().enumerate().map(|(c, width)| wrap(self.cell(row, c), *width)).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(0).max(1);
        for index in 0..height {
            let mut line = String::new();
            for (column, width) in widths.iter().enumerate() {
                let text = cells[column].get(index).map_or("", String::as_str);
                let padding = " ".repeat(width.saturating_sub(chars(text)));
                let text = if text.is_empty() { String::new() } else { paint.bold(text) };
                let gap = if column == 0 { "" } else { GAP };
                line.push_str(gap);
                match self.columns[column].1 {
                    Align::Left => line.extend([text, padding]),
                    Align::Right => line.extend([padding, text]),
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }

    /// One block of `title  value` lines per row, for terminals that are too narrow.
    fn blocks(&self, width: usize, paint: Paint) -> String {
        let titles = self.columns.iter().map(|(t, _)| chars(t)).max().unwrap_or(0);
        let room = width.saturating_sub(titles + GAP.len()).max(MIN_TEXT_WIDTH);
        let block = |row: &Vec<String>| {
            let mut out = String::new();
            for (column, (title, align)) in self.columns.iter().enumerate() {
                let cell = self.cell(row, column);
                let lines = if *align == Align::Right { vec![cell.to_owned()] } else { wrap(cell, room) };
                for (index, text) in lines.iter().enumerate() {
                    let title = if index == 0 { title.as_str() } else { "" };
                    let padding = " ".repeat(titles - chars(title));
                    let title = if title.is_empty() { String::new() } else { paint.bold(title) };
                    out.push_str(format!("{title}{padding}{GAP}{text}").trim_end());
                    out.push('\n');
                }
            }
            out
        };
        self.rows.iter().map(block).collect::<Vec<_>>().join("\n")
    }
}

fn chars(text: &str) -> usize {
    text.chars().count()
}

/// A control character in a name must not move the cursor.
fn clean(text: String) -> String {
    if text.chars().any(char::is_control) {
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
    } else {
        text
    }
}

/// Lines of at most `width` characters, broken at spaces where there are any. At least one line.
fn wrap(text: &str, width: usize) -> Vec<String> {
    if chars(text) <= width || width == 0 {
        return vec![text.to_owned()];
    }
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        if !line.is_empty() && chars(&line) + 1 + word.len() > width {
            lines.push(std::mem::take(&mut line));
        }
        while word.len() > width {
            let rest = word.split_off(width);
            lines.push(word.into_iter().collect());
            word = rest;
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.extend(word);
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use Align::{Left, Right};

    #[test]
    fn numbers_lean_right_and_lines_end_clean() {
        let mut table = Table::new([("drive", Left), ("reads", Right), ("rate", Right)]);
        table.row(["nvme0", "12", "50.0 MB/s"]).row(["nvme10", "1234", "7.50 GB/s"]);
        let want = "\
drive   reads       rate
──────  ─────  ─────────
nvme0      12  50.0 MB/s
nvme10   1234  7.50 GB/s
";
        assert_eq!(table.render(80), want);
    }

    #[test]
    fn text_wraps_and_numbers_stay_whole() {
        let mut table = Table::new([("setting", Left), ("seen", Left), ("reads", Right)]);
        table.row(["--io-engine uring --queue-depth 32", "the engine answered with io_uring", "123456789012"]);
        let text = table.render(44);
        assert!(text.lines().all(|l| chars(l) <= 44), "{text}");
        assert!(text.contains("123456789012"));
        assert!(text.lines().count() > 3);
        let words = |s: &str| s.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for word in words("--io-engine uring --queue-depth 32 the engine answered with io_uring") {
            assert!(text.contains(&word), "{word} is lost in {text}");
        }
    }

    #[test]
    fn a_table_that_cannot_fit_becomes_blocks() {
        let columns = (0..12).map(|c| (format!("column{c}"), Right));
        let mut table = Table::new(columns);
        table.row((0..12).map(|c| format!("{c}23456789")));
        table.row((0..12).map(|c| format!("{c}23456789")));
        let text = table.render(80);
        assert!(text.lines().all(|l| chars(l) <= 80));
        assert!(text.contains("column11  1123456789"));
        assert_eq!(text.lines().filter(|l| l.is_empty()).count(), 1, "one empty line between two blocks");
    }

    #[test]
    fn missing_and_extra_cells_lose_nothing() {
        let mut table = Table::new([("a", Left), ("b", Right)]);
        table.row(["1"]).row(["1", "2", "extra"]);
        assert!(table.render(80).contains("extra"));
        assert_eq!(Table::new(Vec::<(String, Align)>::new()).render(80), "");
        assert!(Table::new([("a", Left)]).is_empty());
        let mut narrow = Table::new([("a", Left)]);
        narrow.row(["1"]);
        assert_eq!(narrow.render(0), "a  1\n", "too narrow for anything: a block");
    }

    #[test]
    fn long_words_are_broken_and_controls_removed() {
        assert_eq!(wrap("abcdefghij kl", 4), ["abcd", "efgh", "ij", "kl"]);
        assert_eq!(wrap("", 4), [""]);
        let mut table = Table::new([("name", Left)]);
        table.row(["a\u{1b}[2Jb\nc"]);
        assert!(table.render(80).ends_with("a [2Jb c\n"));
    }

    #[test]
    fn colour_only_where_it_is_wanted() {
        assert_eq!(Paint::choose(true, false), Paint::Ansi);
        assert_eq!(Paint::choose(true, true), Paint::Plain);
        assert_eq!(Paint::choose(false, false), Paint::Plain);
        let mut table = Table::new([("name", Left), ("n", Right)]);
        table.row(["x", "1"]);
        let painted = table.render_with(80, Paint::Ansi);
        assert!(painted.contains("\u{1b}[1mname\u{1b}[0m"));
        let stripped = painted.replace("\u{1b}[1m", "").replace("\u{1b}[0m", "");
        assert_eq!(stripped, table.render(80), "escape sequences do not count as width");
    }
}
