//! A report as one HTML file that needs nothing else: sortable tables, figures as inline SVG, light and dark. Takes
//! plain data; every text is escaped here and nowhere else. A page fetches nothing, and says so to the browser
//! (Content-Security-Policy).

pub mod campaign;
pub mod ladder;
mod style;
pub mod trace;

use std::fmt::Write;

/// A cell of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// What is shown.
    pub text: String,
    /// What it sorts by; without a number it sorts as text.
    pub sort: Option<f64>,
}

impl Cell {
    /// Text.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), sort: None }
    }

    /// A number, and how it is written.
    pub fn number(value: f64, text: impl Into<String>) -> Self {
        Self { text: text.into(), sort: Some(value) }
    }

    /// A whole number.
    pub fn count(value: u64) -> Self {
        Self::number(value as f64, value.to_string())
    }

    /// Nanoseconds.
    pub fn duration(ns: u64) -> Self {
        Self::number(ns as f64, super::units::duration(ns))
    }

    /// Nanoseconds, or a dash that sorts below all of them.
    pub fn some_duration(ns: Option<u64>) -> Self {
        ns.map_or_else(|| Self::number(-1.0, "–"), Self::duration)
    }

    /// Bytes.
    pub fn bytes(count: u64) -> Self {
        Self::number(count as f64, super::units::bytes(count))
    }

    /// A share of 0 to 1.
    pub fn share(share: f64) -> Self {
        Self::number(share, super::units::percent(share))
    }
}

/// A part of a page.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// The one thing to know, in large letters.
    Verdict(String),
    /// Paragraphs.
    Text(Vec<String>),
    /// Names and values.
    Facts(Vec<(String, String)>),
    /// A table that sorts by any column.
    Table {
        /// Its caption.
        title: String,
        /// Its headings.
        columns: Vec<String>,
        /// Its rows.
        rows: Vec<Vec<Cell>>,
        /// Written under it.
        note: String,
    },
    /// A figure: an SVG document as `Figure::svg` gives it.
    Figure(String),
}

/// A heading and what stands under it.
#[derive(Clone, Debug, PartialEq)]
pub struct Section {
    /// The heading.
    pub title: String,
    /// Its parts, in order. A section without any is left out.
    pub parts: Vec<Part>,
}

/// What follows a subtitle where a trunk is not the released one.
pub fn trunk_after(label: Option<&str>) -> String {
    label.map(|label| format!(", {label}")).unwrap_or_default()
}

/// A whole page.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// Its title.
    pub title: String,
    /// A line under the title.
    pub subtitle: String,
    /// Whether any drive was emulated: the page says so at its top and beside every table.
    pub emulated: bool,
    /// Its sections, in order.
    pub sections: Vec<Section>,
}

impl Page {
    /// The document.
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(256 << 10);
        let title = escape(&self.title);
        out.push_str(style::HEAD);
        let _ =
            write!(out, "<title>{title}</title>\n<style>\n{}{}</style>\n", style::CSS, style::figures_in_the_dark());
        let _ = write!(out, "</head>\n<body>\n<header>\n<h1>{title}</h1>\n<p>{}</p>\n", escape(&self.subtitle));
        if self.emulated {
            out.push_str(
                "<p class=\"emulated\"><strong>EMULATED drives.</strong> No figure on this page is a speed of this \
                 machine's hardware.</p>\n",
            );
        }
        out.push_str("</header>\n<main>\n");
        for (number, section) in self.sections.iter().enumerate().filter(|(_, s)| !s.parts.is_empty()) {
            let _ = write!(out, "<section id=\"s{number}\">\n<h2>{}</h2>\n", escape(&section.title));
            section.parts.iter().for_each(|part| self.part(&mut out, part));
            out.push_str("</section>\n");
        }
        let made = format!("argodrive {}", env!("CARGO_PKG_VERSION"));
        let _ = write!(out, "</main>\n<footer>Written by {made}.</footer>\n<script>\n{}</script>\n", style::SCRIPT);
        out.push_str("</body>\n</html>\n");
        out
    }

    fn part(&self, out: &mut String, part: &Part) {
        match part {
            Part::Verdict(text) => {
                let _ = writeln!(out, "<p class=\"verdict\">{}</p>", escape(text));
            }
            Part::Text(paragraphs) => paragraphs.iter().for_each(|text| {
                let _ = writeln!(out, "<p>{}</p>", escape(text));
            }),
            Part::Facts(pairs) => {
                out.push_str("<dl>\n");
                for (name, value) in pairs {
                    let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
                }
                out.push_str("</dl>\n");
            }
            Part::Figure(svg) => {
                let _ = writeln!(out, "<figure>{}</figure>", inline(svg));
            }
            Part::Table { title, columns, rows, note } => self.table(out, title, columns, rows, note),
        }
    }

    fn table(&self, out: &mut String, title: &str, columns: &[String], rows: &[Vec<Cell>], note: &str) {
        let label = if self.emulated { " <span class=\"emulated\">emulated</span>" } else { "" };
        let _ = write!(out, "<div class=\"table\"><table>\n<caption>{}{label}</caption>\n<thead><tr>", escape(title));
        let number = |column: usize| rows.iter().any(|row| row.get(column).is_some_and(|c| c.sort.is_some()));
        for (index, column) in columns.iter().enumerate() {
            let class = if number(index) { " class=\"n\"" } else { "" };
            let _ = write!(out, "<th scope=\"col\"{class}><button type=\"button\">{}</button></th>", escape(column));
        }
        out.push_str("</tr></thead>\n<tbody>\n");
        for row in rows {
            out.push_str("<tr>");
            for cell in row {
                let text = escape(&cell.text);
                let _ = match cell.sort.filter(|v| v.is_finite()) {
                    Some(value) => write!(out, "<td class=\"n\" data-v=\"{value}\">{text}</td>"),
                    None => write!(out, "<td>{text}</td>"),
                };
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody>\n</table></div>\n");
        if !note.is_empty() {
            let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(note));
        }
    }
}

/// Text as content or as the value of an attribute.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && c != '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// An SVG document as an element of a page: there it needs no name space, and a page without one has no address in it.
fn inline(svg: &str) -> String {
    svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(name: &str) -> Page {
        let table = Part::Table {
            title: name.into(),
            columns: vec!["drive".into(), name.into()],
            rows: vec![vec![Cell::text(name), Cell::duration(1500)], vec![Cell::text("b"), Cell::some_duration(None)]],
            note: name.into(),
        };
        let parts = vec![
            Part::Verdict(name.into()),
            Part::Text(vec![name.into()]),
            Part::Facts(vec![(name.into(), name.into())]),
            table,
        ];
        let sections = vec![Section { title: name.into(), parts }, Section { title: "left out".into(), parts: vec![] }];
        Page { title: name.into(), subtitle: name.into(), emulated: true, sections }
    }

    #[test]
    fn names_cannot_become_markup() {
        let text = page("<script>alert(\"1\")</script>' onload='x").render();
        assert_eq!(text.matches("<script").count(), 1, "only the page's own");
        assert!(text.contains("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&#39; onload=&#39;x"));
        assert!(!text.contains("onload='"));
        assert_eq!(escape("a\u{0}b\u{1b}[0m"), "a b [0m");
    }

    #[test]
    fn cells_sort_by_what_they_mean() {
        let text = page("x").render();
        assert!(text.contains("<td class=\"n\" data-v=\"1500\">1.50 µs</td>"), "{text}");
        assert!(text.contains("data-v=\"-1\">–"));
        assert!(!text.contains("left out") && text.contains("EMULATED"));
        assert!(text.contains("<span class=\"emulated\">emulated</span></caption>"));
    }

    #[test]
    fn a_page_has_no_address_and_no_name_space() {
        let mut page = page("x");
        page.sections[0]
            .parts
            .push(Part::Figure("<svg a=\"1\" xmlns=\"http://www.w3.org/2000/svg\"><g/></svg>".into()));
        let text = page.render();
        assert!(text.contains("<figure><svg a=\"1\"><g/></svg></figure>"));
        assert!(!text.contains("http://") && !text.contains("https://"));
    }
}
