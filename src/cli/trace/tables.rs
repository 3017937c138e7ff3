//! The tables of `trace report`, 80 columns wide.

use super::super::WIDTH;
use super::super::verdict::{sentence, wrapped};
use crate::ids::DriveId;
use crate::replay::groups::{BarrierRow, DriveRow, share};
use crate::replay::rates::HomesFrom;
use crate::replay::summary::{GapRow, Summary};
use crate::replay::windows::{Scope, WindowRow};
use crate::report::monitor_view::sampler_line;
use crate::report::table::{Align, Table};
use crate::report::units::{bytes, duration, percent, rate};
use crate::report::words;
pub use crate::report::words::name;
use crate::trace::log::TraceHeader;
use crate::trace::stream::{PURPOSES, word_of};
use std::fmt::Write;

/// Layers listed in full; with more of them, those that waited longest.
const MAX_LAYERS: usize = 24;

/// The whole report.
pub fn render(summary: &Summary, header: &TraceHeader, top: usize) -> String {
    let mut out = String::new();
    let all = &summary.all;
    let mut line = |text: &str| {
        let _ = writeln!(out, "{text}");
    };
    line(&wrapped(&format!(
        "{} barriers, {} waited for a drive, {} ties; {} drives{}; {} of reads",
        all.barriers,
        all.waited,
        all.ties,
        header.drives.len(),
        header.mark(),
        duration(summary.span_ns),
    )));
    if let Some(imported) = &header.imported {
        line(&format!("imported from {}; assumed:", imported.format));
        imported.assumptions.iter().for_each(|a| line(&wrapped(&format!("- {a}"))));
    }
    if let Some(again) = &header.reissued {
        line(&wrapped(&format!("the barriers of {} read again, gaps {}", again.from.display(), again.gaps)));
        again.assumptions.iter().for_each(|a| line(&wrapped(&format!("- {a}"))));
        again.rejected.iter().for_each(|r| line(&wrapped(&format!("- REJECTED: {r}"))));
    }
    if summary.skipped_rows > 0 {
        line(&format!("left out: {} rows with faults", summary.skipped_rows));
    }
    if summary.disagreements > 0 {
        line(&wrapped(&format!(
            "{} barriers whose record names another drive or cause than their reads show",
            summary.disagreements
        )));
    }
    let _ = writeln!(out);
    verdict(&mut out, summary, header);
    drives(&mut out, &summary.drives);
    if all.barriers > 0 {
        causes(&mut out, summary);
        barriers(&mut out, "phase", &summary.phases, header);
        barriers(&mut out, "width", &summary.widths, header);
        layers(&mut out, summary, header);
        gaps(&mut out, &summary.top_gaps, top);
    }
    out
}

fn verdict(out: &mut String, summary: &Summary, header: &TraceHeader) {
    let Some(v) = &summary.verdict else {
        let _ = writeln!(out, "no verdict: the trace has no barriers of decoding\n");
        return;
    };
    let names: Vec<&str> = header.drives.iter().map(|d| d.name.as_str()).collect();
    let _ =
        writeln!(out, "{}{}\n", super::super::verdict::table(v, words::wall(v, header)), wrapped(&sentence(v, &names)));
    for text in words::drive_rates(summary, header) {
        let _ = writeln!(out, "{}", wrapped(&text));
    }
    let bounded = summary.all.bounded > 0;
    let text = match summary.homes_from {
        Some(HomesFrom::Plan) => Some("* lower bounds of the mean wait; the layout's takes the homes of the plan"),
        Some(HomesFrom::Trace) => Some(
            "* lower bounds of the mean wait; the layout's takes as homes the drives that served an expert in this \
             trace; the plan may have more (--plan), and then the true bound is lower",
        ),
        None if bounded => Some(
            "* lower bounds of the mean wait, as the run wrote them: its plan's homes and the rates above. Rates are \
             averages, so a lucky barrier may come in below its bound",
        ),
        None => None,
    };
    if let Some(text) = text {
        let _ = writeln!(out, "{}", wrapped(text));
    }
    if !summary.fitted.is_empty() || !header.rates.is_empty() || text.is_some() {
        out.push('\n');
    }
}

fn drives(out: &mut String, rows: &[DriveRow]) {
    let right = |title| (title, Align::Right);
    let mut table = Table::new([
        ("drive", Align::Left),
        ("for", Align::Left),
        right("reads"),
        right("bytes"),
        right("queue"),
        right("service"),
        right("p99"),
        right("failed"),
        right("wasted"),
    ]);
    for r in rows.iter().filter(|r| r.reads + r.failed > 0) {
        table.row([
            r.drive.clone(),
            word_of(&PURPOSES, r.purpose).to_owned(),
            r.reads.to_string(),
            bytes(r.bytes),
            duration(r.queue.mean_ns),
            duration(r.service.mean_ns),
            duration(r.service.p99_ns),
            r.failed.to_string(),
            r.wasted.to_string(),
        ]);
    }
    let _ = writeln!(
        out,
        "{}means; queue = queued to submitted; service, p99 = submitted to completed\n",
        table.render(WIDTH)
    );
    if rows.iter().all(|r| r.landed_last + r.tied == 0) {
        return;
    }
    let mut table = Table::new([
        ("landed last", Align::Left),
        ("for", Align::Left),
        right("barriers"),
        right("share"),
        right("ties"),
        right("alone"),
        right("gap p50"),
        right("p90"),
        right("total"),
    ]);
    for r in rows.iter().filter(|r| r.reads > 0) {
        table.row([
            r.drive.clone(),
            word_of(&PURPOSES, r.purpose).to_owned(),
            r.landed_last.to_string(),
            percent(r.landed_last_share),
            r.tied.to_string(),
            r.alone.to_string(),
            duration(r.gap.p50_ns),
            duration(r.gap.p90_ns),
            duration(r.gap.total_ns),
        ]);
    }
    let text = "share = of the barriers that waited; a tie is nobody's; alone = no other drive delivered after open; \
                gap = behind the next-to-last drive";
    let _ = writeln!(out, "{}{}\n", table.render(WIDTH), wrapped(text));
}

fn causes(out: &mut String, summary: &Summary) {
    let mut table = Table::new([
        ("why the last read was last", Align::Left),
        ("barriers", Align::Right),
        ("share", Align::Right),
        ("wait", Align::Right),
        ("gap to next drive", Align::Right),
    ]);
    for c in &summary.causes {
        table.row([
            c.cause.to_owned(),
            c.barriers.to_string(),
            percent(share(c.barriers, summary.all.barriers)),
            duration(c.wait_ns),
            duration(c.gap_drive_ns),
        ]);
    }
    let _ = writeln!(out, "{}", table.render(WIDTH));
    let text = words::wait(&summary.all);
    let _ = writeln!(out, "{}\n", wrapped(&text));
}

fn barriers(out: &mut String, title: &str, rows: &[BarrierRow], header: &TraceHeader) {
    let bounded = rows.iter().any(|r| r.bounded > 0);
    let mut columns = vec![
        (title, Align::Left),
        ("barriers", Align::Right),
        ("mean wait", Align::Right),
        ("gap p50", Align::Right),
        ("p99", Align::Right),
    ];
    if bounded {
        columns.extend([("layout*", Align::Right), ("drives*", Align::Right)]);
    } else {
        columns.push(("ties", Align::Right));
    }
    columns.push(("last mostly", Align::Left));
    let mut table = Table::new(columns);
    for r in rows {
        let mut cells = vec![
            r.group.clone(),
            r.barriers.to_string(),
            duration(r.wait_ns.checked_div(r.waited).unwrap_or(0)),
            duration(r.gap_drive.p50_ns),
            duration(r.gap_drive.p99_ns),
        ];
        if bounded {
            let mean = |sum: Option<u64>| {
                let mean = sum.and_then(|sum| sum.checked_div(r.bounded));
                mean.map_or_else(|| "–".to_owned(), duration)
            };
            cells.extend([mean(r.bound_layout_ns), mean(r.bound_drives_ns)]);
        } else {
            cells.push(r.ties.to_string());
        }
        cells.push(most_often(r, header));
        table.row(cells);
    }
    let _ = writeln!(out, "{}", table.render(WIDTH));
}

fn most_often(row: &BarrierRow, header: &TraceHeader) -> String {
    let most = row.landed_last.iter().enumerate().max_by_key(|(d, n)| (**n, std::cmp::Reverse(*d)));
    match most {
        Some((drive, n)) if *n > 0 => {
            format!("{} {}", name(&header.drives, DriveId(drive as u8)), percent(share(*n, row.waited)))
        }
        _ => "nobody".to_owned(),
    }
}

fn layers(out: &mut String, summary: &Summary, header: &TraceHeader) {
    let mut rows = summary.layers.clone();
    let all = rows.len();
    if all > MAX_LAYERS {
        rows.sort_by_key(|r| std::cmp::Reverse(r.wait_ns));
        rows.truncate(MAX_LAYERS);
    }
    barriers(out, "layer", &rows, header);
    if all > MAX_LAYERS {
        let _ = writeln!(out, "the {MAX_LAYERS} of {all} layers that waited longest; --json has all\n");
    }
}

fn gaps(out: &mut String, rows: &[GapRow], top: usize) {
    if rows.is_empty() || top == 0 {
        return;
    }
    let bounded = rows.iter().any(|r| r.bound_drives_ns.is_some());
    let mut columns = vec![("largest gaps", Align::Left), ("gap", Align::Right), ("wait", Align::Right)];
    if !bounded {
        columns.insert(2, ("to read", Align::Right));
    } else {
        columns.extend([("layout*", Align::Right), ("drives*", Align::Right)]);
    }
    columns.extend([("last", Align::Left), ("why", Align::Left)]);
    let mut table = Table::new(columns);
    let some = |ns: Option<u64>| ns.map_or_else(|| "–".to_owned(), duration);
    for r in rows {
        let at = format!("{} step {} L{}", r.barrier, r.step, r.layer);
        let mut cells = vec![at, some(r.gap_drive_ns), duration(r.wait_ns)];
        if !bounded {
            cells.insert(2, some(r.gap_read_ns));
        } else {
            cells.extend([some(r.bound_layout_ns), some(r.bound_drives_ns)]);
        }
        cells.extend([r.last.clone().unwrap_or_default(), r.cause.to_owned()]);
        table.row(cells);
    }
    let _ = writeln!(out, "{}", table.render(WIDTH));
}

/// The report of a trace that has only windows.
pub fn render_windows(rows: &[WindowRow], header: &TraceHeader, left_out: u64) -> String {
    let mut out = String::new();
    if let Some(imported) = &header.imported {
        let _ = writeln!(out, "imported from {}; assumed:", imported.format);
        for assumption in &imported.assumptions {
            let _ = writeln!(out, "{}", wrapped(&format!("- {assumption}")));
        }
        out.push('\n');
    }
    if left_out > 0 {
        let _ = writeln!(out, "left out: {left_out} rows with faults\n");
    }
    out.push_str(&windows_table(rows, ["device", "drive"]));
    out
}

/// What a run sampled: drives by the reader's counts, devices by the kernel's, and what sampling cost.
pub fn render_sampled(rows: &[WindowRow], header: &TraceHeader) -> String {
    let mut out = "windows: drives as the reader counts, devices as the kernel does\n".to_owned();
    let emulated = |name: &str| header.drives.iter().any(|d| d.emulated && d.name == name);
    let mut rows = rows.to_vec();
    for row in &mut rows {
        row.drive = match (row.scope, row.drive.take()) {
            (Scope::Drive, _) if emulated(&row.name) => Some("emulated drive".into()),
            (Scope::Drive, _) => Some("drive".into()),
            (Scope::Device, drives) => Some(format!("device of {}", drives.as_deref().unwrap_or("no drive"))),
        };
    }
    out.push_str(&windows_table(&rows, ["name", "what"]));
    if let Some(windows) = &header.windows {
        let _ = writeln!(out, "{}", wrapped(&sampler_line(&windows.sampler)));
    }
    out
}

fn windows_table(rows: &[WindowRow], [first, second]: [&str; 2]) -> String {
    let right = |title| (title, Align::Right);
    let mut table = Table::new([
        (first, Align::Left),
        (second, Align::Left),
        right("windows"),
        right("bytes"),
        right("mean"),
        right("peak"),
        right("idle"),
        right("read time"),
    ]);
    for r in rows {
        table.row([
            r.name.clone(),
            r.drive.clone().unwrap_or_else(|| "unattributed".to_owned()),
            r.windows.to_string(),
            bytes(r.bytes),
            rate(r.mean_bytes_per_s),
            rate(r.peak_bytes_per_s),
            r.idle_windows.to_string(),
            r.mean_read_ms.map_or_else(|| "–".to_owned(), |ms| duration((ms * 1e6).round() as u64)),
        ]);
    }
    table.render(WIDTH)
}
