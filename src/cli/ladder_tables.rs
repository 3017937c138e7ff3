//! A ladder as tables: speeds; the raw reading of each rung beside its bounds and its simulation; what each drive brought.

use super::ladder::{AGAINST_STEM, PAGE_FILE};
use super::verdict::wrapped;
use super::{WIDTH, print, verdict};
use crate::bench::against::OtherLadder;
use crate::bench::ladder::record::{LadderRecord, Rung, Skipped};
use crate::bench::ladder::value::times;
use crate::report::scaling::{MAX_OTHERS, ScalingFigure, ScalingLine};
use crate::report::table::{Align, Table};
use crate::report::units;
use anyhow::Result;
use std::path::Path;

/// The tables, what they say, and where everything is.
pub(super) fn show(ladder: &LadderRecord, folder: &Path) -> Result<()> {
    print(speeds(ladder).render(WIDTH).trim_end())?;
    let line = |text: &str| print(&wrapped(text));
    if let Some(few) = ladder.rungs.iter().find(|r| r.decode_tok_s_interval.is_none()) {
        line(&format!("min-max: slowest and fastest of the runs ({}); an interval needs 6", few.runs))?;
    }
    let label = if ladder.emulated { " (EMULATED)" } else { "" };
    for r in &ladder.rungs {
        if let Some(v) = &r.verdict {
            let names: Vec<&str> = r.drives.iter().map(String::as_str).collect();
            let waits = units::percent(v.share(v.stall_ns()));
            let rung = match (r.of_ladder(), names.len()) {
                (true, 1) => "1 drive".to_owned(),
                (true, count) => format!("{count} drives"),
                (false, _) => r.label(),
            };
            print(&format!("{rung}: {}, {waits} of the time waiting", verdict::label(v, &names)))?;
        }
    }
    if let Some(raw) = ladder.rungs.iter().find_map(|r| r.raw.as_ref()) {
        print("")?;
        let pass = raw.barriers;
        line(&format!("The same {pass} barriers of decoding read back to back, without compute{label}:"))?;
        print(readings(ladder).render(WIDTH).trim_end())?;
        for text in readings_say(ladder) {
            line(&text)?;
        }
    }
    if ladder.rungs.iter().any(|r| r.added.is_some()) {
        print("")?;
    }
    for r in &ladder.rungs {
        if let Some(a) = &r.added {
            let pairs = if a.pairs == 1 { "1 pair".to_owned() } else { format!("{} pairs", a.pairs) };
            let level = format!("{:.1} % interval, {pairs}", a.level * 100.0);
            let drives = a.drives.join(", ");
            line(&format!("+ {drives}{label}: {}; {} the speed, {level}", a.outcome.words(), times(a.effect)))?;
        }
    }
    for s in &ladder.skipped {
        line(&format!("{}: {}", s.drives.join(" + "), skipped(s)))?;
    }
    for remark in &ladder.remarks {
        line(&format!("note: {remark}"))?;
    }
    if let Some(advice) = &ladder.advice {
        line(&advice.says)?;
    }
    let label = if ladder.emulated { "EMULATED drives: these are not speeds of this machine's hardware. " } else { "" };
    let tokens = if ladder.rejected.is_empty() { "; tokens identical on every rung" } else { "" };
    let plan = if ladder.fixed_plan.is_some() { ", one plan kept" } else { "" };
    let trunk = ladder.trunk.as_ref().map(|t| format!("; {t}")).unwrap_or_default();
    print(&format!("{label}Layout {}{plan}{tokens}{trunk}.", ladder.policy))?;
    for reason in &ladder.rejected {
        print(&format!("REJECTED: {reason}"))?;
    }
    print(&format!("record  {}", folder.join("ladder.json").display()))?;
    if !ladder.rungs.is_empty() {
        let [svg, png] = ["ladder.svg", "ladder.png"].map(|file| folder.join(file).display().to_string());
        print(&format!("figure  {svg}\n        {png}"))?;
    }
    print(&format!("report  {}", folder.join(PAGE_FILE).display()))
}

/// Why a rung was not measured.
fn skipped(s: &Skipped) -> String {
    match (s.needs_bytes, s.has_bytes) {
        (Some(needs), Some(has)) => {
            format!("skipped: needs {}, has {} ({})", units::bytes(needs), units::bytes(has), s.reason)
        }
        _ => format!("skipped: {}", s.reason),
    }
}

fn speeds(ladder: &LadderRecord) -> Table {
    let plain = ladder.rungs.iter().all(Rung::of_ladder);
    let spread = if ladder.rungs.iter().all(|r| r.decode_tok_s_interval.is_some()) { "95 %" } else { "min-max" };
    let mut columns = vec![
        ("drives", if plain { Align::Right } else { Align::Left }),
        ("decode tok/s", Align::Right),
        (spread, Align::Right),
        ("gain", Align::Right),
        ("of top", Align::Right),
        ("I/O wait", Align::Right),
        ("barrier", Align::Right),
    ];
    if plain {
        // Names of drives need the room.
        columns.push(("first token", Align::Right));
    }
    let mut table = Table::new(columns);
    for r in &ladder.rungs {
        let (low, high) = r.spread();
        let mut row = vec![
            r.label(),
            units::tokens_per_s(r.rates.decode_tok_s),
            format!("{}-{}", units::tokens_per_s(low), units::tokens_per_s(high)),
            format!("{:.2}x", r.gain),
            units::percent(r.share_of_top),
            units::percent(r.io_wait_share),
            units::duration(r.barrier_mean_ns),
        ];
        if plain {
            row.push(units::duration((r.rates.ttft_s * 1e9) as u64));
        }
        table.row(row);
    }
    table
}

fn readings(ladder: &LadderRecord) -> Table {
    let plain = ladder.rungs.iter().all(Rung::of_ladder);
    let mut table = Table::new([
        ("drives", if plain { Align::Right } else { Align::Left }),
        ("raw", Align::Right),
        ("b_layout", Align::Right),
        ("b_drives", Align::Right),
        ("reader", Align::Right),
        ("plan", Align::Right),
        ("I/O gain", Align::Right),
        ("simulated", Align::Right),
    ]);
    let some = |text: Option<String>| text.unwrap_or_else(|| "–".into());
    for r in &ladder.rungs {
        let raw = r.raw.as_ref();
        let simulated = r.simulated.as_ref().and_then(|s| s.io_gain);
        let flag = if r.far_off().is_some() { " !" } else { "" };
        table.row([
            r.label(),
            some(raw.map(|raw| units::duration(raw.barrier_mean_ns))),
            some(raw.and_then(|raw| raw.bound_layout_ns).map(units::duration)),
            some(raw.and_then(|raw| raw.bound_drives_ns).map(units::duration)),
            some(raw.and_then(|raw| raw.reader_efficiency).map(units::percent)),
            some(raw.and_then(|raw| raw.plan_efficiency).map(units::percent)),
            some(raw.and_then(|raw| raw.io_gain).map(|g| format!("{g:.2}x"))),
            some(simulated.map(|g| format!("{g:.2}x{flag}"))),
        ]);
    }
    table
}

/// What the columns of the readings mean, and which of them disagree.
fn readings_say(ladder: &LadderRecord) -> Vec<String> {
    let from = |from: &Option<String>| from.clone().unwrap_or_else(|| "not known".into());
    let mut out = vec![format!(
        "raw = mean barrier; b_layout = bound with the homes of the plan, b_drives = as if every expert were on every drive \
         (rates: {}); reader = b_layout / raw, plan = b_drives / b_layout; simulated from: {}",
        from(&ladder.bounds_from),
        from(&ladder.simulated_from)
    )];
    let off = |r: &Rung| Some(format!("{} {:+.1} %", r.label(), r.far_off()? * 100.0));
    let far: Vec<String> = ladder.rungs.iter().filter_map(off).collect();
    if !far.is_empty() {
        out.push(format!("! simulated and read I/O gain are more than 10 % apart: {}", far.join(", ")));
    }
    out
}

/// The shape of this ladder beside others'.
pub(super) fn scaling(ladder: &LadderRecord, others: &[OtherLadder], name: &str) -> ScalingFigure {
    let line = |other: &OtherLadder| ScalingLine {
        name: other.name.clone(),
        points: other.rungs.iter().filter_map(|r| Some((r.0, other.gain(r.0)?))).collect(),
    };
    let own = ladder.ladder().map(|r| (r.drives.len() as u32, r.gain)).collect();
    let left_out = others.len().saturating_sub(MAX_OTHERS);
    let more = if left_out > 0 { format!(" {left_out} more ladders are in the table only.") } else { String::new() };
    ScalingFigure {
        title: "The shape of this ladder beside others".into(),
        subtitle: format!("{name}, {} layout", ladder.policy),
        emulated: ladder.emulated,
        own: ScalingLine { name: format!("this ladder ({name})"), points: own },
        others: others.iter().take(MAX_OTHERS).map(line).collect(),
        note: format!("Other machines, models and drives: only shapes can be compared. Dashed: linear.{more}"),
    }
}

pub(super) fn show_against(ladder: &LadderRecord, others: &[OtherLadder], folder: &Path) -> Result<()> {
    let most = ladder.ladder().map(|r| r.drives.len() as u32).max().unwrap_or(1);
    let widest = others.iter().flat_map(|o| &o.rungs).map(|r| r.0).max().unwrap_or(1).max(most).min(4);
    let heads: Vec<String> = (1..=widest).map(|n| n.to_string()).collect();
    let mut columns = vec![("gain over its first rung, by number of drives", Align::Left)];
    columns.extend(heads.iter().map(|h| (h.as_str(), Align::Right)));
    let mut table = Table::new(columns);
    let cells = |gain: &dyn Fn(u32) -> Option<f64>| {
        (1..=widest).map(|n| gain(n).map_or("-".to_owned(), |g| format!("{g:.2}x"))).collect::<Vec<_>>()
    };
    let own = |n: u32| ladder.ladder().find(|r| r.drives.len() as u32 == n).map(|r| r.gain);
    let label = if ladder.emulated { "this ladder (EMULATED)" } else { "this ladder" };
    table.row(std::iter::once(label.to_owned()).chain(cells(&own)));
    for other in others {
        let name = if other.emulated { format!("{} (EMULATED)", other.name) } else { other.name.clone() };
        table.row(std::iter::once(name).chain(cells(&|n| other.gain(n))));
    }
    print(table.render(WIDTH).trim_end())?;
    print("Other machines, models and drives: only the shape can be compared.")?;
    print(&format!("figure  {}", folder.join(AGAINST_STEM).with_extension("svg").display()))
}
