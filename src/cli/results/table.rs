//! The catalogue in characters: the table of rows, what did not help, groups, stale verdicts, Markdown.

use super::super::verdict::wrapped;
use crate::bench::catalogue::group::Group;
use crate::bench::catalogue::query::Picked;
use crate::bench::catalogue::stale::{Judgement, State};
use crate::bench::catalogue::{Kind, Row, Verdict};
use crate::report::table::{Align, Table};
use crate::report::units::{rate, tokens_per_s};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

/// Negative results that are spelt out below a list.
const MAX_NEGATIVE: usize = 8;

/// What the lines below a table are made from.
pub struct Notes<'a> {
    /// What was picked.
    pub picked: &'a Picked<'a>,
    /// Only negative results were asked for.
    pub negative: bool,
    /// Best or worst were asked for.
    pub ranked: bool,
    /// Where.
    pub dir: &'a Path,
}

fn dash(text: String) -> String {
    if text.is_empty() { "-".into() } else { text }
}

/// Text of a record without control characters: it may come from elsewhere.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn speed(row: &Row) -> String {
    let measured = row.tok_s.map(tokens_per_s).or(row.bytes_per_s.map(rate));
    measured.unwrap_or_else(|| "-".into())
}

/// The effect as a factor, with its interval where pairs gave one.
fn effect(row: &Row) -> String {
    row.effect.map_or_else(
        || "-".into(),
        |e| match (e.low, e.high) {
            (None, None) => format!("{:.2}x", e.ratio),
            (low, high) => {
                let end = |v: Option<f64>| v.map_or_else(|| "?".into(), |v| format!("{v:.2}"));
                format!("{:.2}x {}..{}", e.ratio, end(low), end(high))
            }
        },
    )
}

fn drives(row: &Row) -> String {
    let count = if row.drives.is_empty() { String::new() } else { row.drives.len().to_string() };
    match (row.emulated, count.is_empty()) {
        (true, true) => "EMULATED".into(),
        (true, false) => format!("{count} EMULATED"),
        (false, _) => dash(count),
    }
}

fn what(row: &Row) -> String {
    let origin = row.origin.as_ref().map(|o| format!("[{o}] ")).unwrap_or_default();
    let kind = if row.kind == Kind::Comparison { String::new() } else { format!(" ({})", row.kind.name()) };
    plain(&format!("{origin}{}{kind}", row.title()))
}

fn cells(row: &Row) -> [String; 7] {
    let when: String = row.when.chars().skip(2).take(14).map(|c| if c == 'T' { ' ' } else { c }).collect();
    let model: String = row.model.chars().take(4).collect();
    [
        dash(plain(&when)),
        what(row),
        dash(plain(&if row.trunk.is_some() { format!("{model} *") } else { model })),
        drives(row),
        speed(row),
        effect(row),
        row.verdict.name().replace('-', " "),
    ]
}

const TITLES: [&str; 7] = ["when (UTC)", "what", "model", "drives", "tok/s", "effect", "verdict"];

/// One line for each row.
pub fn rows(rows: &[&Row]) -> Table {
    let aligns = [Align::Right, Align::Left, Align::Left, Align::Left, Align::Right, Align::Left, Align::Left];
    let mut table = Table::new(TITLES.into_iter().zip(aligns));
    for row in rows {
        table.row(cells(row));
    }
    table
}

/// The lines below a table: how verdicts are spread, what did not help, what is not shown.
pub fn summary(notes: &Notes<'_>) -> String {
    let rows = &notes.picked.rows;
    let mut out = String::new();
    let mut line = |text: String| {
        let _ = writeln!(out, "{}", wrapped(&plain(&text)));
    };
    if rows.is_empty() {
        line(format!("no record of {} fits", notes.dir.display()));
    } else {
        let counts = Verdict::ALL.map(|v| (rows.iter().filter(|r| r.verdict == v).count(), v.name()));
        let counts: Vec<String> = counts.iter().filter(|c| c.0 > 0).map(|(n, name)| format!("{n} {name}")).collect();
        line(String::new());
        line(format!("{} rows: {}", rows.len(), counts.join(", ")));
    }
    let (inside, rejected) = (notes.picked.inside, notes.picked.inside_rejected);
    if inside > 0 && !notes.ranked {
        line(format!("{inside} runs of these are not listed ({rejected} of them rejected): --runs"));
    }
    if notes.ranked {
        line("ranked by effect; rungs are ranked with --kind rung, because their gains are not from pairs".into());
    }
    if rows.iter().any(|r| r.emulated) {
        line("EMULATED drives: these are not speeds of any hardware.".into());
    }
    let labels: BTreeSet<&String> = rows.iter().filter_map(|r| r.trunk.as_ref()).collect();
    labels.into_iter().for_each(|label| line(format!("* {label}")));
    let negative: Vec<&&Row> = rows.iter().filter(|r| r.verdict.is_negative()).collect();
    if !negative.is_empty() {
        line(String::new());
        line(format!("What did not help, or does not count ({}):", negative.len()));
        let most = if notes.negative { negative.len() } else { MAX_NEGATIVE };
        for row in negative.iter().take(most) {
            line(format!("- {}{}: {}", what(row), row.emulated_mark(), verdict_words(row)));
        }
        if negative.len() > most {
            line(format!("- {} more: --negative", negative.len() - most));
        }
    }
    out
}

fn verdict_words(row: &Row) -> String {
    match (row.verdict, row.says.is_empty()) {
        (Verdict::Rejected, false) => format!("REJECTED: {}", row.says),
        (_, false) => row.says.clone(),
        (verdict, true) => verdict.name().into(),
    }
}

fn group_cells(group: &Group) -> Vec<String> {
    let range = |r: Option<(f64, f64)>, show: &dyn Fn(f64) -> String| {
        r.map_or_else(|| "-".into(), |(low, high)| format!("{}..{}", show(low), show(high)))
    };
    let times = |v: f64| format!("{v:.2}x");
    let number = |v: Option<f64>, show: &dyn Fn(f64) -> String| v.map_or_else(|| "-".into(), show);
    let rejected = if group.rejected > 0 { format!(" ({} rejected)", group.rejected) } else { String::new() };
    let mut out: Vec<String> = group.key.iter().map(|k| dash(plain(k))).collect();
    out.extend([
        format!(
            "{}{}",
            if group.emulated { "EMULATED" } else { "real" },
            group.trunk.as_ref().map_or_else(String::new, |label| format!(", {label}"))
        ),
        format!("{}{rejected}", group.rows),
        number(group.median_tok_s, &tokens_per_s),
        range(group.tok_s_range, &tokens_per_s),
        number(group.median_effect, &times),
        range(group.effect_range, &times),
        format!("{}/{}/{}", group.better, group.worse, group.no_difference),
    ]);
    out
}

const GROUP_TITLES: [&str; 7] = ["drives", "rows", "tok/s", "min..max", "effect", "min..max", "+/-/="];

/// One line for each group, with medians; the last column counts better, worse and no difference.
pub fn groups(groups: &[Group], keys: &[&str]) -> Table {
    let left = keys.iter().chain(&GROUP_TITLES[..2]).map(|t| (*t, Align::Left));
    let mut table = Table::new(left.chain(GROUP_TITLES[2..].iter().map(|t| (*t, Align::Right))));
    for group in groups {
        table.row(group_cells(group));
    }
    table
}

/// The same as Markdown.
pub fn groups_markdown(groups: &[Group], keys: &[&str]) -> String {
    let titles: Vec<&str> = keys.iter().chain(&GROUP_TITLES).copied().collect();
    markdown_table(&titles, groups.iter().map(group_cells))
}

/// Rows as Markdown.
pub fn markdown(rows: &[&Row], stale: Option<&[Judgement]>) -> String {
    let mut titles = TITLES.to_vec();
    if stale.is_some() {
        titles.extend(["inputs", "changed", "again"]);
    }
    let line = |(index, row): (usize, &&Row)| {
        let mut all = cells(row).to_vec();
        if let Some(j) = stale.and_then(|s| s.get(index)) {
            all.extend([j.state.name().into(), dash(j.changed_names().join(", ")), format!("`{}`", j.again)]);
        }
        all
    };
    let mut out = markdown_table(&titles, rows.iter().enumerate().map(line));
    let labels: BTreeSet<&String> = rows.iter().filter_map(|r| r.trunk.as_ref()).collect();
    labels.into_iter().for_each(|label| out.push_str(&format!("\n\\* {label}\n")));
    let negative = rows.iter().filter(|r| r.verdict.is_negative());
    let negative: Vec<String> =
        negative.map(|r| format!("- {}{}: {}\n", what(r), r.emulated_mark(), plain(&verdict_words(r)))).collect();
    if stale.is_none() && !negative.is_empty() {
        let _ = write!(out, "\nWhat did not help, or does not count:\n\n{}", negative.concat());
    }
    out
}

fn markdown_table(titles: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: Vec<String>| {
        let cells: Vec<String> = cells.iter().map(|c| plain(c).replace('\\', "\\\\").replace('|', "\\|")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let mut out = line(titles.iter().map(|t| t.to_string()).collect());
    out.push_str(&format!("|{}\n", "---|".repeat(titles.len())));
    rows.for_each(|row| out.push_str(&line(row)));
    out
}

/// Stale verdicts with what has changed and the command, then what cannot be told.
pub fn stale(rows: &[&Row], judged: &[Judgement]) -> String {
    let mut out = String::new();
    let line = |out: &mut String, text: String| {
        let _ = writeln!(out, "{}", wrapped(&plain(&text)));
    };
    for (row, j) in rows.iter().zip(judged).filter(|(_, j)| j.state != State::Fresh) {
        let state = j.state.name().to_uppercase();
        line(&mut out, format!("{state}  {}{}: {}", what(row), row.emulated_mark(), row.verdict.name()));
        for c in &j.changed {
            let who = if c.who.is_empty() { String::new() } else { format!(" of {}", c.who) };
            line(&mut out, format!("- {}{who}: {} then, {} now", c.input, c.then, c.now));
        }
        if j.state == State::Stale && !j.unknown.is_empty() {
            line(&mut out, format!("- cannot be told: {}", j.unknown_names().join(", ")));
        }
        for u in j.unknown.iter().filter(|_| j.state == State::Unknown) {
            line(&mut out, format!("- cannot be told: {}: {}", u.input, u.why));
        }
        again(j, &mut out);
    }
    let count = |state| judged.iter().filter(|j| j.state == state).count();
    let (stale, unknown, fresh) = (count(State::Stale), count(State::Unknown), count(State::Fresh));
    line(&mut out, format!("{stale} stale, {unknown} cannot be told, {fresh} with the inputs of today"));
    out
}

/// The command stays in one line, so that it can be copied.
fn again(j: &Judgement, out: &mut String) {
    if !j.again.is_empty() {
        let _ = writeln!(out, "  again: {}", plain(&j.again));
    }
    if !j.note.is_empty() {
        let _ = writeln!(out, "{}", wrapped(&plain(&format!("- note: {}", j.note))));
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::WIDTH;
    use super::*;
    use crate::bench::catalogue::walk::Catalogue;

    fn sample() -> Vec<Row> {
        Catalogue::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples")).rows
    }

    #[test]
    fn tables_fit_and_mark_emulated_drives() {
        let all = sample();
        let rows: Vec<&Row> = all.iter().collect();
        let text = super::rows(&rows).render(WIDTH);
        assert!(text.lines().all(|l| l.chars().count() <= WIDTH), "{text}");
        assert!(
            text.contains("what") && text.lines().next().unwrap().contains("verdict"),
            "a grid, not blocks: {text}"
        );
        assert!(text.matches("EMULATED").count() >= rows.len(), "{text}");
    }

    #[test]
    fn markdown_cells_cannot_end_their_column_and_control_characters_go() {
        let mut all = sample();
        all[0].name = "a|b\u{1b}[31m".into();
        let text = markdown(&[&all[0]], None);
        assert!(text.contains("a\\|b [31m"), "{text}");
    }
}
