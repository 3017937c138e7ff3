//! What `argodrive simulate` prints for people: tables of at most 80 columns.

use super::WIDTH;
use super::verdict::{sentence, wrapped};
use crate::bench::simulate::{Comparison, SimulationRecord};
use crate::bench::what_if::{Added, Verdict, WhatIf};
use crate::replay::simulate::summary::{DriveFigures, PhaseFigures, Sure};
use crate::report::table::{Align, Table};
use crate::report::units::{bytes, duration, percent, percent_short, rate, tokens_per_s};
use std::fmt::Write;

fn right(title: &'static str) -> (&'static str, Align) {
    (title, Align::Right)
}

fn ns(ns: f64) -> String {
    duration(ns.max(0.0).round() as u64)
}

/// `18.6 – 18.9 ms`: the unit once, where both have it.
fn between(low: f64, high: f64) -> String {
    let (low, high) = (ns(low), ns(high));
    match (low.split_once(' '), high.split_once(' ')) {
        (Some((number, a)), Some((_, b))) if a == b => format!("{number} – {high}"),
        _ => format!("{low} – {high}"),
    }
}

fn off(error: f64) -> String {
    format!("{:+.1} %", error * 100.0)
}

/// The tables.
pub(super) fn render(record: &SimulationRecord, more: Option<&WhatIf>) -> String {
    let mut out = String::new();
    let mut line = |text: &str| {
        let _ = writeln!(out, "{}", wrapped(text));
    };
    let label = if record.emulated { " (EMULATED drives)" } else { "" };
    line(&format!(
        "{} barriers of {} simulated under plan {} ({}){label}",
        record.barriers,
        record.trace.display(),
        &record.plan_hash[..12.min(record.plan_hash.len())],
        record.planner
    ));
    let profile = record.profile.as_ref().map_or_else(String::new, |p| format!(" {}", p.display()));
    line(&format!(
        "rates from: {}{profile}; {} simulations from seed {}; intervals hold 95 %",
        record.rates_from, record.repeats, record.seed
    ));
    line("assumed:");
    record.assumptions.iter().for_each(|a| line(&format!("- {a}")));
    for (members, joint) in &record.uplinks {
        line(&format!("shared uplink: {} together {}", members.join(", "), rate(*joint)));
    }
    let _ = writeln!(out, "\n{}", drives(record));
    let _ = writeln!(out, "{}", phases(record));
    let s = &record.simulated;
    let mut facts =
        Table::new([("decoding", Align::Left), right("recorded"), right("simulated"), right("95 % within")]);
    if let Some(Sure(i)) = s.tok_s {
        let recorded = record.recorded.tok_s.map_or_else(|| "–".into(), |r| tokens_per_s(r.0.estimate));
        let within = format!("{} – {}", tokens_per_s(i.low), tokens_per_s(i.high));
        facts.row(["tok/s".into(), recorded, tokens_per_s(i.estimate), within]);
        let _ = writeln!(out, "{}", facts.render(WIDTH));
    }
    let mut line = |text: &str| {
        let _ = writeln!(out, "{}", wrapped(text));
    };
    let [useful, late, wasted] = s.prefetch;
    line(&format!("{} read in all", bytes(s.read_bytes.round() as u64)));
    if s.hit_share > 0.0 {
        line(&format!("cache: {} of the experts demanded were in memory", percent(s.hit_share)));
    }
    if useful + late + wasted > 0.0 {
        line(&format!("prefetch: {useful:.0} reads useful, {late:.0} late, {wasted:.0} for nothing"));
    }
    let names: Vec<&str> = s.drives.iter().map(|d| d.name.as_str()).collect();
    if let Some(verdict) = &s.verdict {
        line(&sentence(verdict, &names));
    }
    if let Some(compare) = &record.compare {
        let _ = writeln!(out, "\n{}", comparison(compare, &s.drives).trim_end());
    }
    if let Some(more) = more {
        let _ = writeln!(out, "\n{}", what_if(more));
    }
    out
}

fn drives(record: &SimulationRecord) -> String {
    let mut table = Table::new([
        ("drive", Align::Left),
        right("rate"),
        right("fixed"),
        right("latency"),
        ("noise", Align::Left),
        right("bytes"),
        right("busy"),
        right("last"),
    ]);
    for (row, d) in record.drives.iter().zip(&record.simulated.drives) {
        table.row([
            if row.emulated { format!("{} (emulated)", row.name) } else { row.name.clone() },
            rate(row.bytes_per_s),
            duration(row.fixed_ns),
            duration(row.latency_ns),
            row.noise.to_owned(),
            bytes(d.bytes.round() as u64),
            percent_short(d.busy_share),
            percent_short(d.lands_last_share),
        ]);
    }
    table.render(WIDTH)
}

fn phases(record: &SimulationRecord) -> String {
    let mut table = Table::new([
        ("barriers", Align::Left),
        right("count"),
        right("median"),
        right("95 % within"),
        right("mean"),
        right("p95"),
        right("layout"),
        right("drives"),
    ]);
    let some = |bound: Option<f64>| bound.map_or_else(|| "–".to_owned(), ns);
    let recorded = |p: &PhaseFigures| record.recorded.phases.iter().find(|r| r.phase == p.phase);
    for p in &record.simulated.phases {
        let Sure(median) = p.p50_ns;
        table.row([
            p.phase.to_owned(),
            p.barriers.to_string(),
            ns(median.estimate),
            between(median.low, median.high),
            ns(p.mean_ns.0.estimate),
            ns(p.p95_ns.0.estimate),
            some(p.bound_layout_ns),
            some(p.bound_drives_ns),
        ]);
        if let Some(r) = recorded(p) {
            table.row([
                "recorded".to_owned(),
                String::new(),
                ns(r.p50_ns.0.estimate),
                String::new(),
                ns(r.mean_ns.0.estimate),
                ns(r.p95_ns.0.estimate),
                String::new(),
                String::new(),
            ]);
        }
    }
    table.render(WIDTH)
}

fn comparison(c: &Comparison, drives: &[DriveFigures]) -> String {
    let label = if c.emulated { " (EMULATED drives)" } else { "" };
    let mut out = wrapped(&format!("against the measured trace {}{label}:", c.trace.display()));
    out.push_str("\n\n");
    let mut table = Table::new([
        ("barriers of", Align::Left),
        right("measured median"),
        right("off"),
        right("mean"),
        right("off"),
        right("p95"),
        right("off"),
    ]);
    for (m, e) in c.measured.phases.iter().zip(&c.errors) {
        table.row([
            m.phase.to_owned(),
            ns(m.p50_ns.0.estimate),
            off(e.p50),
            ns(m.mean_ns.0.estimate),
            off(e.mean),
            ns(m.p95_ns.0.estimate),
            off(e.p95),
        ]);
    }
    let _ = writeln!(out, "{}", table.render(WIDTH));
    let mut table = Table::new([("measured", Align::Left), right("measured"), right("simulated"), right("off")]);
    if let Some((m, e)) = c.measured.tok_s.zip(c.tok_s_error) {
        let simulated = m.0.estimate * (1.0 + e);
        table.row(["tok/s".to_owned(), tokens_per_s(m.0.estimate), tokens_per_s(simulated), off(e)]);
    }
    for (d, (name, error)) in drives.iter().zip(&c.drive_bytes_errors) {
        let seen = c.measured.drive_bytes.iter().find(|m| m.0 == *name).map_or(0, |m| m.1);
        let error = error.map_or_else(|| "–".to_owned(), off);
        table.row([format!("bytes of {name}"), bytes(seen), bytes(d.bytes.round() as u64), error]);
    }
    let _ = write!(out, "{}", table.render(WIDTH));
    out
}

fn what_if(w: &WhatIf) -> String {
    let mut out = wrapped(&format!("one more drive, planned again by {}:", w.policy));
    w.assumptions.iter().for_each(|a| {
        let _ = write!(out, "\n{}", wrapped(&format!("- {a}")));
    });
    out.push_str("\n\n");
    let mut table = Table::new([
        ("added", Align::Left),
        right("replicas"),
        right("barrier"),
        right("tok/s"),
        right("gain"),
        right("95 % within"),
        ("verdict", Align::Left),
    ]);
    for step in &w.steps {
        let decode = step.simulated.phases.iter().find(|p| p.phase == "decode").or(step.simulated.phases.last());
        let gain = step.gain.filter(|_| !step.added.is_empty());
        table.row([
            if step.added.is_empty() { "nothing".to_owned() } else { step.added.join(" + ") },
            step.replicas.to_string(),
            decode.map_or_else(|| "–".to_owned(), |p| ns(p.mean_ns.0.estimate)),
            step.simulated.tok_s.map_or_else(|| "–".to_owned(), |t| tokens_per_s(t.0.estimate)),
            gain.map_or_else(|| "–".to_owned(), |Sure(g)| format!("{:.3}x", g.estimate)),
            gain.map_or_else(|| "–".to_owned(), |Sure(g)| format!("{:.3} – {:.3}", g.low, g.high)),
            if step.added.is_empty() { String::new() } else { verdict(step).to_owned() },
        ]);
    }
    let _ = write!(out, "{}", table.render(WIDTH));
    let Some((first, last)) = w.steps.first().zip(w.steps.last()) else { return out };
    let _ = write!(out, "\n{}", wrapped(&says(first, last)));
    out
}

fn verdict(step: &Added) -> &'static str {
    match step.verdict {
        Verdict::Better => "better",
        Verdict::Worse => "worse",
        Verdict::WithinNoise => "within noise",
        Verdict::NotStorageBound => "nothing",
        Verdict::TooFew => "too few passes",
    }
}

/// What the last step comes to.
fn says(first: &Added, last: &Added) -> String {
    let added = last.added.join(" and ");
    let gain = last.gain.map_or_else(|| "–".into(), |Sure(g)| format!("{:.3} times as fast", g.estimate));
    match (last.verdict, &first.simulated.verdict) {
        (Verdict::NotStorageBound, Some(v)) => format!(
            "{added} would bring nothing: decoding is not storage-bound. It waits for drives in {} of the time, and \
             without any wait it would be {:.2} times as fast at most.",
            percent(v.share(v.stall_ns())),
            v.ceiling
        ),
        (Verdict::Better, _) => format!("{added} would make decoding {gain}."),
        (Verdict::Worse, _) => format!("{added} would make decoding slower: {gain}."),
        (Verdict::WithinNoise, _) => format!("{added} would bring nothing that can be told from noise ({gain})."),
        _ => format!("{added}: too few passes extend the text to say what it would bring."),
    }
}
