//! The page of a ladder, from its record: one row per rung, the figure, and what is known of the machine.

use super::super::units::{rate, tokens_per_s};
use super::{Cell, Page, Part, Section};
use crate::bench::ladder::record::{LadderRecord, Rung, Skipped};

/// The page of a ladder of the model called `model`; `figure` is an SVG document.
pub fn page(model: &str, ladder: &LadderRecord, figure: Option<String>, environment: Vec<(String, String)>) -> Page {
    let section = |title: &str, parts: Vec<Part>| Section { title: title.into(), parts };
    let mut says = Vec::new();
    if !ladder.rejected.is_empty() {
        says.push(Part::Verdict("REJECTED: this ladder does not count".into()));
        says.push(Part::Text(ladder.rejected.clone()));
    } else if let [first, .., last] = ladder.ladder().collect::<Vec<_>>().as_slice() {
        says.push(Part::Verdict(format!(
            "{} drives decode {:.2} times as fast as {}, with the same tokens on every rung",
            last.drives.len(),
            last.gain,
            first.drives.len()
        )));
    }
    says.extend(ladder.advice.as_ref().map(|a| Part::Text(vec![a.says.clone()])));
    says.extend(figure.map(Part::Figure));
    let mut numbers = Vec::new();
    if !ladder.rungs.is_empty() {
        numbers.push(speeds(ladder));
    }
    if ladder.rungs.iter().any(|r| r.raw.is_some()) {
        numbers.push(readings(ladder));
    }
    if ladder.rungs.iter().any(|r| r.added.is_some()) {
        numbers.push(steps(ladder));
    }
    if !ladder.skipped.is_empty() {
        numbers.push(skipped(ladder));
    }
    let mut facts = vec![
        ("model".to_owned(), format!("{model} ({})", ladder.model_id)),
        ("layout".into(), ladder.policy.clone()),
        ("tokens".into(), format!("hash {}", ladder.token_hash)),
    ];
    let named = |what: &str, of: &Option<String>| of.clone().map(|of| (what.to_owned(), of));
    facts.extend(named("kept of one plan", &ladder.fixed_plan));
    facts.extend(ladder.rungs.iter().map(|r| (format!("plan, {}", r.drives.join(", ")), r.plan.clone())));
    facts.extend(named("rates of the bounds", &ladder.bounds_from));
    facts.extend(named("drives of the simulation", &ladder.simulated_from));
    facts.extend(ladder.remarks.iter().map(|r| ("note".to_owned(), r.clone())));
    let order: Vec<String> = ladder.order.iter().map(|rung| (rung + 1).to_string()).collect();
    facts.push(("order of measurement (rungs)".into(), order.join(" ")));
    let sections = vec![
        section("What it says", says),
        section("Numbers", numbers),
        section("Where this comes from", vec![Part::Facts(facts)]),
        section("Machine", if environment.is_empty() { vec![] } else { vec![Part::Facts(environment)] }),
    ];
    Page {
        title: format!("{model}: decode speed by number of drives"),
        subtitle: format!(
            "{} layout{}{}",
            ladder.policy,
            if ladder.emulated { ", EMULATED drives" } else { "" },
            super::trunk_after(ladder.trunk.as_deref())
        ),
        emulated: ladder.emulated,
        sections,
    }
}

fn number(v: f64) -> Cell {
    Cell::number(v, tokens_per_s(v))
}

fn gain(v: Option<f64>) -> Cell {
    v.map_or_else(|| Cell::number(-1.0, "–"), |v| Cell::number(v, format!("{v:.2}x")))
}

fn share(v: Option<f64>) -> Cell {
    v.map_or_else(|| Cell::number(-1.0, "–"), Cell::share)
}

fn table(title: &str, columns: &[&str], rows: Vec<Vec<Cell>>, note: String) -> Part {
    let columns = columns.iter().map(|c| (*c).to_owned()).collect();
    Part::Table { title: title.into(), columns, rows, note }
}

fn speeds(ladder: &LadderRecord) -> Part {
    let intervals = ladder.rungs.iter().all(|r| r.decode_tok_s_interval.is_some());
    let (low, high) = if intervals { ("95 % from", "to") } else { ("slowest", "fastest") };
    let row = |r: &Rung| {
        vec![
            Cell::count(r.drives.len() as u64),
            Cell::text(match &r.uplink {
                Some(uplink) => format!("{} (share {uplink})", r.drives.join(", ")),
                None => r.drives.join(", "),
            }),
            number(r.rates.decode_tok_s),
            number(r.spread().0),
            number(r.spread().1),
            gain(Some(r.gain)),
            Cell::share(r.share_of_top),
            Cell::share(r.io_wait_share),
            Cell::duration(r.barrier_mean_ns),
            Cell::duration((r.rates.ttft_s * 1e9) as u64),
            number(r.rates.prefill_tok_s),
            number(r.rates.inclusive_tok_s),
            Cell::count(r.runs as u64),
        ]
    };
    let columns = [
        "drives",
        "which",
        "decode tok/s",
        low,
        high,
        "gain",
        "of top",
        "I/O wait",
        "barrier",
        "first token",
        "prefill tok/s",
        "inclusive tok/s",
        "runs",
    ];
    let note = "Medians over interleaved runs. decode tok/s = (generated - 1) / (last - first token time); inclusive = \
                generated / whole wall time; barrier = mean wait for the experts of one layer.";
    table("Rungs", &columns, ladder.rungs.iter().map(row).collect(), note.into())
}

fn readings(ladder: &LadderRecord) -> Part {
    let row = |r: &Rung| {
        let raw = r.raw.as_ref()?;
        let simulated = r.simulated.as_ref();
        Some(vec![
            Cell::text(r.drives.join(", ")),
            Cell::duration(raw.barrier_mean_ns),
            Cell::number(raw.bytes_per_s, rate(raw.bytes_per_s)),
            Cell::some_duration(raw.bound_layout_ns),
            Cell::some_duration(raw.bound_drives_ns),
            share(raw.reader_efficiency),
            share(raw.plan_efficiency),
            gain(raw.io_gain),
            gain(simulated.and_then(|s| s.io_gain)),
            match simulated.and_then(|s| s.off) {
                Some(off) => Cell::number(off, format!("{:+.1} %", off * 100.0)),
                None => Cell::number(-1.0, "–"),
            },
            Cell::count(raw.readings as u64),
        ])
    };
    let columns = [
        "drives",
        "raw barrier",
        "bytes/s",
        "bound_layout",
        "bound_drives",
        "reader",
        "plan",
        "I/O gain",
        "simulated",
        "off",
        "readings",
    ];
    let note = "The same barriers of decoding, read back to back without compute. reader = bound_layout / raw barrier, plan = \
                bound_drives / bound_layout; off = simulated gain / gain as read - 1.";
    table("I/O alone", &columns, ladder.rungs.iter().filter_map(row).collect(), note.into())
}

fn steps(ladder: &LadderRecord) -> Part {
    let row = |r: &Rung| {
        let a = r.added.as_ref()?;
        let effect = a.effect;
        Some(vec![
            Cell::text(format!("+ {}", a.drives.join(", "))),
            gain(effect.map(|e| e.ratio)),
            gain(effect.and_then(|e| e.low)),
            gain(effect.and_then(|e| e.high)),
            Cell::number(a.level, format!("{:.1} %", a.level * 100.0)),
            Cell::count(a.pairs as u64),
            Cell::text(a.outcome.words()),
        ])
    };
    let columns = ["drive", "speed over the rung below", "from", "to", "interval", "pairs", "verdict"];
    let note = "Mean of paired ratios of decode tok/s, run by run of the same row; the steps share an error of 5 %.";
    table("What each drive brought", &columns, ladder.rungs.iter().filter_map(row).collect(), note.into())
}

fn skipped(ladder: &LadderRecord) -> Part {
    let size = |v: Option<u64>| v.map_or_else(|| Cell::number(-1.0, "–"), Cell::bytes);
    let row = |s: &Skipped| {
        vec![Cell::text(s.drives.join(", ")), size(s.needs_bytes), size(s.has_bytes), Cell::text(s.reason.clone())]
    };
    let rows = ladder.skipped.iter().map(row).collect();
    table("Skipped rungs", &["drives", "needs", "has", "why"], rows, String::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ladder_that_does_not_count_says_why() {
        let text = r#"{"version": 1, "model_id": "id", "policy": "full-mirror", "emulated": true, "rungs": [],
            "token_hash": "ab", "order": [0], "rejected": ["pace: contradicted & <late>"]}"#;
        let ladder = LadderRecord::parse(text).unwrap();
        let text = page("mini", &ladder, None, vec![("cpu".into(), "x".into())]).render();
        assert!(
            text.contains("REJECTED: this ladder does not count") && text.contains("contradicted &amp; &lt;late&gt;")
        );
        assert!(text.contains("EMULATED") && text.contains("<dt>cpu</dt>") && !text.contains("<table>"));
    }
}
