//! The page of a campaign, from `experiment.json`: verdicts, the figure, figures of arms, every pair, what differed.

use super::super::paired::{PairMark, PairedFigure, PairedPanel};
use super::super::units::tokens_per_s;
use super::{Cell, Page, Part, Section};
use crate::bench::campaign::evaluate::{Comparison, Effect, Pair, Results, change};
use crate::bench::campaign::file::CampaignFile;

fn marks(pairs: &[Pair]) -> Vec<PairMark> {
    pairs.iter().map(|p| PairMark { log_ratio: p.log_ratio, control_first: p.control_first }).collect()
}

/// The settings that differ, in a line.
pub fn differs(file: &CampaignFile) -> String {
    let names: Vec<&str> = file.differences.iter().map(|d| d.setting.as_str()).collect();
    if names.is_empty() { "identical arms (A/A)".into() } else { format!("arms differ in {}", names.join(", ")) }
}

/// The pairs as a figure; `None` while there is no pair.
pub fn figure(file: &CampaignFile, results: &Results) -> Option<PairedFigure> {
    let panel = |c: &Comparison| PairedPanel {
        name: c.arm.clone(),
        verdict: match c.effect {
            Some(Effect { low: Some(low), high: Some(high), .. }) => {
                format!("{} · interval {low:.3}x to {high:.3}x", c.outcome.words())
            }
            _ => c.outcome.words().into(),
        },
        pairs: marks(&c.pairs),
        mean: c.effect.map(|e| {
            let (low, high) = (e.low.map_or(f64::NEG_INFINITY, f64::ln), e.high.map_or(f64::INFINITY, f64::ln));
            let mean = e.ratio.ln();
            (mean, low.min(mean), high.max(mean))
        }),
    };
    let floor_pairs = marks(&results.floor.pairs);
    let panels: Vec<PairedPanel> = results.comparisons.iter().map(panel).collect();
    if floor_pairs.is_empty() && panels.iter().all(|p| p.pairs.is_empty()) {
        return None;
    }
    Some(PairedFigure {
        title: file.hypothesis.clone().unwrap_or_else(|| "Speed of decoding, in pairs".into()),
        subtitle: format!("{} · {}{}", file.experiment, differs(file), super::trunk_after(results.trunk.as_deref())),
        emulated: results.emulated,
        control: file.arms.first().map(|a| a.name.clone()).unwrap_or_default(),
        floor_pairs,
        floor: results.floor.log_ratio,
        panels,
        note:
            "Decode speed of the candidate by that of the control run beside it, in the order of measurement; whisker: \
               studentised bootstrap interval of the mean. decode tok/s = (generated - 1) / (last - first token time)."
                .into(),
    })
}

/// The page. `figure` is an SVG document.
pub fn page(
    file: &CampaignFile,
    results: &Results,
    figure: Option<String>,
    environment: Vec<(String, String)>,
) -> Page {
    let section = |title: &str, parts: Vec<Part>| Section { title: title.into(), parts };
    let mut says: Vec<Part> = Vec::new();
    for (name, why) in &file.rejected {
        let expected = file.expect.refused.contains_key(name);
        let word = if expected { "refused, as expected" } else { "REJECTED" };
        says.push(Part::Verdict(format!("{word}: arm {name}")));
        says.push(Part::Text(vec![why.clone()]));
    }
    says.extend(results.comparisons.iter().map(|c| Part::Verdict(format!("{}: {}", c.arm, c.says))));
    says.push(Part::Text(
        file.hypothesis.iter().cloned().chain(results.missed.iter().map(|m| format!("MISSED: {m}"))).collect(),
    ));
    says.extend(figure.map(Part::Figure));
    let sections = vec![
        section("What it says", says),
        section("Arms", vec![arms(results)]),
        section("Pairs", vec![pairs(results)]),
        section("Settings that differ", differences(file)),
        section("Where this comes from", vec![Part::Facts(facts(file, results))]),
        section("Machine", if environment.is_empty() { vec![] } else { vec![Part::Facts(environment)] }),
    ];
    Page {
        title: file.experiment.clone(),
        subtitle: format!(
            "{}{}{}",
            differs(file),
            if results.emulated { ", EMULATED drives" } else { "" },
            super::trunk_after(results.trunk.as_deref())
        ),
        emulated: results.emulated,
        sections,
    }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|t| (*t).to_owned()).collect()
}

fn arms(results: &Results) -> Part {
    let number = |v: Option<f64>| v.map_or_else(|| Cell::number(-1.0, "–"), |v| Cell::number(v, tokens_per_s(v)));
    let rows = results.arms.iter().map(|a| {
        vec![
            Cell::text(a.name.clone()),
            Cell::count(a.runs as u64),
            number(a.decode_tok_s),
            number(a.range.map(|r| r.0)),
            number(a.range.map(|r| r.1)),
            a.io_wait_share.map_or_else(|| Cell::number(-1.0, "–"), Cell::share),
            a.ttft_s.map_or_else(|| Cell::number(-1.0, "–"), |s| Cell::duration((s * 1e9) as u64)),
            Cell::text(a.plan.clone()),
            Cell::text(a.rejected.clone().unwrap_or_default()),
        ]
    });
    Part::Table {
        title: "Arms".into(),
        columns: strings(&[
            "arm",
            "runs",
            "decode tok/s",
            "slowest",
            "fastest",
            "I/O wait",
            "first token",
            "plan",
            "rejected",
        ]),
        rows: rows.collect(),
        note: "Medians over all runs that count, the floor's included; the first arm is the control.".into(),
    }
}

fn pairs(results: &Results) -> Part {
    let row = |arm: &str, p: &Pair| {
        vec![
            Cell::text(arm),
            Cell::count(p.row as u64 + 1),
            Cell::text(p.prompt.clone()),
            Cell::text(if p.control_first { "control first" } else { "candidate first" }),
            Cell::number(p.control_tok_s, tokens_per_s(p.control_tok_s)),
            Cell::number(p.candidate_tok_s, tokens_per_s(p.candidate_tok_s)),
            Cell::number(p.log_ratio, change(p.log_ratio)),
            p.apart_s.map_or_else(|| Cell::number(-1.0, "–"), |s| Cell::number(s, format!("{s:.0} s"))),
        ]
    };
    let floor = results.floor.pairs.iter().map(|p| row("(control against itself)", p));
    let all = results.comparisons.iter().flat_map(|c| c.pairs.iter().map(|p| row(&c.arm, p)));
    Part::Table {
        title: "Pairs".into(),
        columns: strings(&["arm", "pair", "prompt", "order", "control tok/s", "arm tok/s", "change", "apart"]),
        rows: floor.chain(all).collect(),
        note: "apart = time between the starts of the two runs; far more than a run takes when the campaign was \
               interrupted between them."
            .into(),
    }
}

fn differences(file: &CampaignFile) -> Vec<Part> {
    if file.differences.is_empty() {
        return vec![Part::Text(vec![
            "None: the arms are the same configuration, so any effect would be chance.".into(),
        ])];
    }
    let mut columns = vec!["setting".to_owned()];
    columns.extend(file.arms.iter().map(|a| a.name.clone()));
    let row = |d: &crate::bench::campaign::arms::Difference| {
        std::iter::once(&d.setting).chain(&d.values).map(Cell::text).collect()
    };
    let rows = file.differences.iter().map(row).collect();
    vec![Part::Table { title: "Settings".into(), columns, rows, note: String::new() }]
}

fn facts(file: &CampaignFile, results: &Results) -> Vec<(String, String)> {
    let p = &file.protocol;
    let mut facts = vec![
        ("begun".to_owned(), file.started.clone()),
        (
            "protocol".into(),
            format!(
                "{} pairs of the control against itself, then {} of each candidate; {}; seed {}, {} resamples",
                p.floor_pairs,
                p.pairs,
                if p.stop { "stop rule with error spent by looks" } else { "one look at the end" },
                p.seed,
                p.resamples
            ),
        ),
        (
            "floor".into(),
            results.floor.log_ratio.map_or_else(
                || "not known: fewer than six pairs".into(),
                |f| format!("differences up to {} are within what the control shows against itself", change(f)),
            ),
        ),
    ];
    facts.extend(
        results.comparisons.iter().map(|c| (format!("looks, {}", c.arm), format!("{} of {}", c.looks.0, c.looks.1))),
    );
    facts.extend(results.tokens.iter().map(|(prompt, hash)| (format!("tokens, {prompt}"), hash.clone())));
    facts.extend(file.arms.iter().map(|a| (format!("proved in each run, {}", a.name), a.under_test.join(", "))));
    facts
}
