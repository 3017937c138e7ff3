//! The page of a ladder, from its record: one row per rung, the figure, and what is known of the machine.

use super::super::units::tokens_per_s;
use super::{Cell, Page, Part, Section};
use crate::bench::ladder::LadderRecord;

/// The page of a ladder of the model called `model`; `figure` is an SVG document.
pub fn page(model: &str, ladder: &LadderRecord, figure: Option<String>, environment: Vec<(String, String)>) -> Page {
    let section = |title: &str, parts: Vec<Part>| Section { title: title.into(), parts };
    let mut says = Vec::new();
    if !ladder.rejected.is_empty() {
        says.push(Part::Verdict("REJECTED: this ladder does not count".into()));
        says.push(Part::Text(ladder.rejected.clone()));
    } else if let [first, .., last] = ladder.rungs.as_slice() {
        says.push(Part::Verdict(format!(
            "{} drives decode {:.2} times as fast as {}, with the same tokens on every rung",
            last.drives.len(),
            last.gain,
            first.drives.len()
        )));
    }
    says.extend(figure.map(Part::Figure));
    let number = |v: f64| Cell::number(v, tokens_per_s(v));
    let rows = ladder.rungs.iter().map(|r| {
        vec![
            Cell::count(r.drives.len() as u64),
            Cell::text(r.drives.join(", ")),
            number(r.rates.decode_tok_s),
            number(r.decode_tok_s_range.0),
            number(r.decode_tok_s_range.1),
            Cell::number(r.gain, format!("{:.2}x", r.gain)),
            Cell::share(r.share_of_top),
            Cell::share(r.io_wait_share),
            Cell::duration(r.barrier_mean_ns),
            Cell::duration((r.rates.ttft_s * 1e9) as u64),
            number(r.rates.prefill_tok_s),
            number(r.rates.inclusive_tok_s),
            Cell::count(r.runs as u64),
        ]
    });
    let columns = [
        "drives",
        "which",
        "decode tok/s",
        "slowest",
        "fastest",
        "gain",
        "of top",
        "I/O wait",
        "barrier",
        "first token",
        "prefill tok/s",
        "inclusive tok/s",
        "runs",
    ];
    let table = Part::Table {
        title: "Rungs".into(),
        columns: columns.map(str::to_owned).into(),
        rows: rows.collect(),
        note: "Medians over interleaved runs. decode tok/s = (generated - 1) / (last - first token time); inclusive = \
               generated / whole wall time; barrier = mean wait for the experts of one layer."
            .into(),
    };
    let mut facts = vec![
        ("model".to_owned(), format!("{model} ({})", ladder.model_id)),
        ("layout".into(), ladder.policy.clone()),
        ("tokens".into(), format!("hash {}", ladder.token_hash)),
    ];
    facts.extend(ladder.rungs.iter().map(|r| (format!("plan, {} drives", r.drives.len()), r.plan.clone())));
    let order: Vec<String> = ladder.order.iter().map(|rung| (rung + 1).to_string()).collect();
    facts.push(("order of measurement (rungs)".into(), order.join(" ")));
    let sections = vec![
        section("What it says", says),
        section("Numbers", if ladder.rungs.is_empty() { vec![] } else { vec![table] }),
        section("Where this comes from", vec![Part::Facts(facts)]),
        section("Machine", if environment.is_empty() { vec![] } else { vec![Part::Facts(environment)] }),
    ];
    Page {
        title: format!("{model}: decode speed by number of drives"),
        subtitle: format!("{} layout{}", ladder.policy, if ladder.emulated { ", EMULATED drives" } else { "" }),
        emulated: ladder.emulated,
        sections,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ladder_that_does_not_count_says_why() {
        let ladder = LadderRecord {
            version: 1,
            model_id: "id".into(),
            policy: "full-mirror".into(),
            emulated: true,
            rungs: vec![],
            token_hash: "ab".into(),
            order: vec![0],
            rejected: vec!["pace: contradicted & <late>".into()],
        };
        let text = page("mini", &ladder, None, vec![("cpu".into(), "x".into())]).render();
        assert!(
            text.contains("REJECTED: this ladder does not count") && text.contains("contradicted &amp; &lt;late&gt;")
        );
        assert!(text.contains("EMULATED") && text.contains("<dt>cpu</dt>") && !text.contains("<table>"));
    }
}
