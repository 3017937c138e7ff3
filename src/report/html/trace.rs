//! The page of one trace: verdict, attribution tables, figures, and what is known of the machine. Takes a summary and
//! drawn figures.

use super::super::units::{bytes, duration, percent};
use super::super::words::{self, name, sentence};
use super::{Cell, Page, Part, Section};
use crate::ids::DriveId;
use crate::replay::groups::{BarrierRow, DriveRow, share};
use crate::replay::rates::HomesFrom;
use crate::replay::summary::Summary;
use crate::trace::log::TraceHeader;
use crate::trace::stream::{PURPOSES, word_of};
use serde_json::Value;
use std::io::Read;
use std::path::Path;

/// Largest record that is looked at.
const MAX_RECORD_BYTES: u64 = 16 << 20;

/// The page of the trace called `title`.
pub fn page(
    title: &str,
    summary: &Summary,
    header: &TraceHeader,
    figures: Vec<Part>,
    environment: Vec<(String, String)>,
) -> Page {
    let all = &summary.all;
    let emulated = header.drives.iter().any(|d| d.emulated);
    let subtitle = format!(
        "{} barriers, {} waited for a drive, {} ties; {} drives{}; {} of reads",
        all.barriers,
        all.waited,
        all.ties,
        header.drives.len(),
        header.mark(),
        duration(summary.span_ns)
    );
    let section = |title: &str, parts: Vec<Part>| Section { title: title.into(), parts };
    let tables = vec![
        causes(summary),
        barriers("By phase", "phase", &summary.phases, header),
        barriers("By width (distinct experts of a barrier)", "width", &summary.widths, header),
        barriers("By layer", "layer", &summary.layers, header),
    ];
    let sections = vec![
        section("What bounds decoding", verdict(summary, header)),
        section("Drives", drives(summary, header)),
        section("Why the last read was last", if all.barriers > 0 { tables } else { vec![] }),
        section("Largest gaps", gaps(summary)),
        section("Figures", figures),
        section("Where this comes from", origin(summary, header)),
        section("Machine", if environment.is_empty() { vec![] } else { vec![Part::Facts(environment)] }),
    ];
    Page { title: title.into(), subtitle, emulated, sections }
}

/// The environment that a `record.json` in the trace folder or beside it tells of; nothing where there is none.
pub fn environment_beside(trace: &Path) -> Vec<(String, String)> {
    let beside = [Some(trace), trace.parent()];
    let found = beside.into_iter().flatten().find_map(|folder| environment_of(&folder.join("record.json")));
    found.unwrap_or_default()
}

/// The environment of one record, as names and values.
pub fn environment_of(record: &Path) -> Option<Vec<(String, String)>> {
    let mut text = String::new();
    std::fs::File::open(record).ok()?.take(MAX_RECORD_BYTES).read_to_string(&mut text).ok()?;
    let value: Value = serde_json::from_str(&text).ok()?;
    let facts = value.get("environment")?.as_object()?.iter().map(|(name, value)| {
        let value = match (name.strip_suffix("_bytes"), value) {
            (Some(_), Value::Number(n)) => n.as_u64().map_or_else(|| n.to_string(), bytes),
            (_, Value::String(text)) => text.clone(),
            (_, Value::Null) => "unknown".into(),
            (_, value) => value.to_string(),
        };
        (name.trim_end_matches("_bytes").replace('_', " "), value)
    });
    Some(facts.collect())
}

fn verdict(summary: &Summary, header: &TraceHeader) -> Vec<Part> {
    let Some(v) = &summary.verdict else {
        return vec![Part::Verdict("no verdict: the trace has no barriers of decoding".into())];
    };
    let parts = words::parts(v, words::wall(v, header));
    let rows = parts.map(|(what, ns)| vec![Cell::text(what), Cell::duration(ns), Cell::share(v.share(ns))]);
    let table = Part::Table {
        title: "Where the time of decoding went".into(),
        columns: strings(&["part", "time", "share"]),
        rows: rows.into(),
        note: String::new(),
    };
    let names: Vec<&str> = header.drives.iter().map(|d| d.name.as_str()).collect();
    vec![Part::Verdict(sentence(v, &names)), table, Part::Text(words::drive_rates(summary, header))]
}

fn drives(summary: &Summary, header: &TraceHeader) -> Vec<Part> {
    let rows: Vec<&DriveRow> = summary.drives.iter().collect();
    let label = |r: &DriveRow| Cell::text(if r.emulated { format!("{} (emulated)", r.drive) } else { r.drive.clone() });
    let purpose = |r: &DriveRow| Cell::text(word_of(&PURPOSES, r.purpose));
    let served = rows.iter().filter(|r| r.reads + r.failed > 0).map(|r| {
        vec![
            label(r),
            purpose(r),
            Cell::count(r.reads),
            Cell::bytes(r.bytes),
            Cell::duration(r.queue.mean_ns),
            Cell::duration(r.queue.p99_ns),
            Cell::duration(r.service.mean_ns),
            Cell::duration(r.service.p50_ns),
            Cell::duration(r.service.p90_ns),
            Cell::duration(r.service.p99_ns),
            Cell::duration(r.service.max_ns),
            Cell::count(r.failed),
            Cell::count(r.wasted),
        ]
    });
    let served = Part::Table {
        title: "Reads by drive and purpose".into(),
        columns: strings(&[
            "drive",
            "for",
            "reads",
            "bytes",
            "queue",
            "queue p99",
            "service",
            "p50",
            "p90",
            "p99",
            "max",
            "failed",
            "wasted",
        ]),
        rows: served.collect(),
        note: "queue = queued to submitted; service = submitted to completed (means, and percentiles)".into(),
    };
    let last = rows.iter().filter(|r| r.reads > 0).map(|r| {
        vec![
            label(r),
            purpose(r),
            Cell::count(r.landed_last),
            Cell::share(r.landed_last_share),
            Cell::count(r.tied),
            Cell::count(r.alone),
            Cell::duration(r.gap.p50_ns),
            Cell::duration(r.gap.p90_ns),
            Cell::duration(r.gap.p99_ns),
            Cell::duration(r.gap.total_ns),
        ]
    });
    let last = Part::Table {
        title: "Who landed last".into(),
        columns: strings(&["drive", "for", "barriers", "share", "ties", "alone", "gap p50", "p90", "p99", "total"]),
        rows: last.collect(),
        note: "share = of the barriers that waited; a tie is nobody's; alone = no other drive delivered after open; gap = \
               behind the next-to-last drive"
            .into(),
    };
    let mapped = header.drives.iter().map(|d| {
        let path = d.path.display().to_string();
        vec![Cell::text(&d.name), Cell::text(path), Cell::text(if d.emulated { "emulated" } else { "as it is" })]
    });
    let mapped = Part::Table {
        title: "Drive map of the run".into(),
        columns: strings(&["drive", "path", "pace"]),
        rows: mapped.collect(),
        note: String::new(),
    };
    vec![served, last, mapped]
}

fn causes(summary: &Summary) -> Part {
    let rows = summary.causes.iter().map(|c| {
        vec![
            Cell::text(c.cause),
            Cell::count(c.barriers),
            Cell::share(share(c.barriers, summary.all.barriers)),
            Cell::duration(c.wait_ns),
            Cell::duration(c.gap_drive_ns),
        ]
    });
    let note = words::wait(&summary.all);
    Part::Table {
        title: "By cause".into(),
        columns: strings(&["cause", "barriers", "share", "wait", "gap to next drive"]),
        rows: rows.collect(),
        note,
    }
}

fn barriers(title: &str, group: &str, rows: &[BarrierRow], header: &TraceHeader) -> Part {
    let bounded = rows.iter().any(|r| r.bounded > 0);
    let mut columns = strings(&[
        group,
        "barriers",
        "waited",
        "ties",
        "mean wait",
        "queue",
        "service",
        "gap p50",
        "p99",
        "gap to read p50",
    ]);
    if bounded {
        columns.extend(strings(&["bound: layout", "bound: drives"]));
    }
    columns.push("last mostly".into());
    let lines = rows.iter().map(|r| {
        let mean = |sum: u64, of: u64| Cell::some_duration(sum.checked_div(of));
        // layers sort by their number
        let label = match r.group.strip_prefix('L').and_then(|n| n.parse::<f64>().ok()) {
            Some(layer) => Cell::number(layer, &r.group),
            None => Cell::text(&r.group),
        };
        let mut cells = vec![
            label,
            Cell::count(r.barriers),
            Cell::count(r.waited),
            Cell::count(r.ties),
            mean(r.wait_ns, r.waited),
            mean(r.queue_ns, r.waited),
            mean(r.service_ns, r.waited),
            Cell::duration(r.gap_drive.p50_ns),
            Cell::duration(r.gap_drive.p99_ns),
            Cell::duration(r.gap_read.p50_ns),
        ];
        if bounded {
            let bound = |sum: Option<u64>| Cell::some_duration(sum.and_then(|sum| sum.checked_div(r.bounded)));
            cells.extend([bound(r.bound_layout_ns), bound(r.bound_drives_ns)]);
        }
        let most = r.landed_last.iter().enumerate().max_by_key(|(d, n)| (**n, std::cmp::Reverse(*d)));
        let most = most.filter(|(_, n)| **n > 0);
        cells.push(Cell::text(most.map_or("nobody".into(), |(drive, n)| {
            format!("{} {}", name(&header.drives, DriveId(drive as u8)), percent(share(*n, r.waited)))
        })));
        cells
    });
    let note = if bounded { "bounds are lower bounds of the mean wait" } else { "" };
    Part::Table { title: title.into(), columns, rows: lines.collect(), note: note.into() }
}

fn gaps(summary: &Summary) -> Vec<Part> {
    if summary.top_gaps.is_empty() {
        return vec![];
    }
    let rows = summary.top_gaps.iter().map(|r| {
        vec![
            Cell::count(r.barrier),
            Cell::count(r.step),
            Cell::text(r.phase),
            Cell::count(u64::from(r.layer)),
            Cell::count(u64::from(r.width)),
            Cell::text(r.last.clone().unwrap_or_default()),
            Cell::text(r.purpose.unwrap_or_default()),
            Cell::text(r.cause),
            Cell::some_duration(r.gap_drive_ns),
            Cell::some_duration(r.gap_read_ns),
            Cell::duration(r.wait_ns),
            Cell::duration(r.queue_ns),
            Cell::duration(r.service_ns),
            Cell::some_duration(r.bound_layout_ns),
            Cell::some_duration(r.bound_drives_ns),
        ]
    });
    vec![Part::Table {
        title: "Barriers with the largest gap behind the next-to-last drive".into(),
        columns: strings(&[
            "barrier", "step", "phase", "layer", "width", "last", "for", "why", "gap", "to read", "wait", "queue", "service",
            "bound: layout", "bound: drives",
        ]),
        rows: rows.collect(),
        note: "bounds: what the barrier could not have waited less than, with the homes known and as if every expert were \
               on every drive; – = the rates of the drives are not known (--rates, --profile)"
            .into(),
    }]
}

fn origin(summary: &Summary, header: &TraceHeader) -> Vec<Part> {
    let mut facts = vec![("clock".to_owned(), header.clock.clone())];
    if let Some(imported) = &header.imported {
        facts.push(("imported from".into(), imported.format.clone()));
        facts.extend(imported.assumptions.iter().map(|a| ("assumed".to_owned(), a.clone())));
    }
    if let Some(from) = summary.homes_from {
        let text = match from {
            HomesFrom::Plan => "those of the plan",
            HomesFrom::Trace => "the drives that served an expert in this trace; the plan may have more",
        };
        facts.push(("homes of the layout bound".into(), text.into()));
    }
    if summary.skipped_rows > 0 {
        facts.push(("left out".into(), format!("{} rows with faults", summary.skipped_rows)));
        facts.extend(summary.skipped_first.iter().map(|f| ("fault".to_owned(), f.clone())));
    }
    if summary.disagreements > 0 {
        let text = format!("{} barriers whose record names another drive or cause", summary.disagreements);
        facts.push(("disagreements".into(), text));
    }
    vec![Part::Facts(facts)]
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| (*w).to_owned()).collect()
}
