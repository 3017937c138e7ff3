//! The verdict in words, as a table and as JSON: the same after a run and in a report of its trace.

use super::WIDTH;
use crate::bench::reference::ReferenceRecord;
use crate::replay::verdict::Verdict;
use crate::report::table::{Align, Table};
use crate::report::units::{duration, percent, tokens_per_s};
pub use crate::report::words::{label, sentence};
use crate::report::words::{named, parts};

/// The parts of the wall time; `wall` says what that time is.
pub fn table(verdict: &Verdict, wall: &str) -> String {
    let mut table =
        Table::new([("where the time of decoding went", Align::Left), ("", Align::Right), ("share", Align::Right)]);
    for (what, ns) in parts(verdict, wall) {
        table.row([what.to_owned(), duration(ns), percent(verdict.share(ns))]);
    }
    table.render(WIDTH)
}

/// As JSON: the numbers, the shares, the drive by name, and the sentence.
pub fn json(verdict: &Verdict, names: &[&str]) -> serde_json::Value {
    let mut value = serde_json::to_value(verdict).unwrap_or_default();
    value["drive"] = verdict.drive.map(|d| named(names, d)).into();
    value["says"] = sentence(verdict, names).into();
    value["shares"] = serde_json::json!({
        "compute": verdict.share(verdict.compute_ns), "all_drives": verdict.share(verdict.all_drives_ns),
        "one_drive": verdict.share(verdict.one_drive_ns), "latency": verdict.share(verdict.latency_ns),
    });
    value
}

/// What the reference arm adds, in a sentence.
pub fn reference(reference: &ReferenceRecord, verdict: Option<&Verdict>) -> String {
    if !reference.same_tokens {
        return "reference arm: with every expert in memory the TOKENS DIFFER; this run is wrong".into();
    }
    let times = verdict
        .filter(|_| reference.decode_ns > 0)
        .map_or_else(String::new, |v| format!(", {:.2} times as fast", v.wall_ns as f64 / reference.decode_ns as f64));
    format!(
        "reference arm: with every expert in memory, decoding took {} ({} tok/s{times}); same tokens",
        duration(reference.decode_ns),
        tokens_per_s(reference.decode_tok_s),
    )
}

/// Lines of at most 80 columns; an item (`- ...`) is indented.
pub fn wrapped(text: &str) -> String {
    let indent = if text.starts_with("- ") { 2 } else { 0 };
    let mut out = " ".repeat(indent);
    let (mut used, mut left) = (indent, indent);
    for word in text.split(' ') {
        let length = word.chars().count();
        if used > left && used + 1 + length > WIDTH {
            left = 2 * indent;
            out.push('\n');
            out.push_str(&" ".repeat(left));
            used = left;
        }
        if used > left {
            out.push(' ');
            used += 1;
        }
        out.push_str(word);
        used += length;
    }
    out
}
