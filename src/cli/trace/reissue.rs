//! `argodrive trace reissue`: the barriers of a trace as real reads under another plan or on other drives.

use super::super::run_args::{ReaderArgs, interrupt_flag, warn_shared};
use super::super::verdict::wrapped;
use super::super::{REJECTED, Reading, Steps, WIDTH, plan as plan_command, print, print_json, remark, status};
use crate::bench::config::Asked;
use crate::bench::reissue::{PhaseRow, ReissueRecord, ReissueSpec, run as run_once};
use crate::drive::spec;
use crate::reader::mounts_of;
use crate::replay::reissue::Gaps as Between;
use crate::replay::schedule::Schedule;
use crate::report::table::{Align, Table};
use crate::report::units::{bytes, duration, rate};
use crate::trace::log::{self, RateFrom};
use anyhow::{Context, Result, bail};
use std::cell::RefCell;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Read the barriers of a trace again, under another plan or on other drives
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trace folder
    trace: PathBuf,
    /// The plan to read under; its drives must be staged
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// Where the plan's drives are now, and which of them are emulated
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// Folder that gets the new trace
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Time between barriers
    #[arg(long, value_enum, default_value_t = Gaps::Recorded)]
    gaps: Gaps,
    /// Leave out rows with faults, and say how many
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reader: ReaderArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Gaps {
    /// As long as recorded, waited for asleep
    Recorded,
    /// As fast as possible
    None,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut asked = Asked::default();
    args.reader.apply(&mut asked);
    asked.config.reader.check()?;
    let header = log::read_header(&args.trace)?;
    let plan = plan_command::read_plan(&args.plan)?;
    let specs = args.drives.as_ref().map(|p| spec::load(p)).transpose()?;
    let mounts = mounts_of(&plan, specs.as_deref())?;
    warn_shared(&mounts)?;
    let reading = Reading::start("reading the trace");
    let schedule = Schedule::load(&args.trace, &header, args.lenient)?;
    drop(reading);
    schedule.check(&plan)?;
    for fault in &schedule.skipped.first {
        remark(&format!("left out: {fault}"));
    }
    if let Some(out) = &args.out {
        if out.join(log::TRACE_FILE).exists() {
            bail!("{}: holds a trace already; give another --out", out.display());
        }
        // The folder is made before anything is measured: a bad path must not cost a run.
        std::fs::create_dir_all(out).with_context(|| format!("--out {}", out.display()))?;
    }
    let interrupted = interrupt_flag()?;
    let spec = ReissueSpec {
        from: &args.trace,
        schedule: &schedule,
        plan: &plan,
        mounts: &mounts,
        asked: &asked,
        gaps: if args.gaps == Gaps::Recorded { Between::Recorded } else { Between::None },
        rates: &[],
        out: args.out.as_deref(),
    };
    let (steps, all) = (RefCell::new((Steps::default(), 0)), schedule.barriers.len());
    // asked between barriers, where nothing is measured
    let keep_going = || {
        let (steps, done) = &mut *steps.borrow_mut();
        steps.show(*done, all, "reading barriers again");
        *done += 1;
        !interrupted.load(Ordering::SeqCst)
    };
    let record = run_once(&spec, &keep_going);
    status("");
    let record = record?;
    if args.json {
        print_json(&serde_json::to_value(&record)?)?;
    } else {
        print(render(&record).trim_end())?;
    }
    for reason in &record.rejected {
        remark(&format!("rejected: {reason}"));
    }
    Ok(if record.rejected.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REJECTED) })
}

fn render(record: &ReissueRecord) -> String {
    let mut out = String::new();
    let mut line = |text: &str| {
        let _ = writeln!(out, "{}", wrapped(text));
    };
    line(&format!(
        "{} barriers, {} experts of {} read again under plan {}{}",
        record.barriers,
        record.experts,
        record.from.display(),
        record.plan_hash,
        match (record.emulated, record.trouble.as_ref().is_some_and(|t| t.is_injected())) {
            (true, true) => " (EMULATED drives, INJECTED FAULTS)",
            (true, false) => " (EMULATED drives)",
            (false, true) => " (INJECTED FAULTS)",
            (false, false) => "",
        },
    ));
    let late = record.gaps_late_ns.map_or_else(String::new, |(p50, p99)| {
        format!("; each ended late by {} at the median, {} at p99", duration(p50 as u64), duration(p99 as u64))
    });
    line(&format!("gaps: {}, {} in all{late}", record.gaps.name(), duration(record.gaps_ns)));
    line("assumed:");
    record.assumptions.iter().for_each(|a| line(&format!("- {a}")));
    let _ = writeln!(out, "\n{}", times(&record.phases));
    let _ =
        writeln!(out, "{}\n", wrapped("time = from open to the last arrival; ratio = mean read again / mean recorded"));
    let _ = writeln!(out, "{}", bounds(&record.phases));
    let _ = writeln!(
        out,
        "{}\n",
        wrapped(
            "means, from the rates below (learnt in this run or given); reader = time / layout bound, plan = layout bound / drives bound"
        )
    );
    let _ = writeln!(out, "{}", drives(record));
    let (then, now) = (bytes(record.recorded_bytes), bytes(record.reissued_bytes));
    let _ = writeln!(out, "expert bytes: {then} recorded, {now} read again");
    if let Some(folder) = &record.out {
        let _ = writeln!(out, "trace   {}", folder.display());
    }
    out
}

fn times(rows: &[PhaseRow]) -> String {
    let right = |title| (title, Align::Right);
    let mut table = Table::new([
        ("barriers of", Align::Left),
        right("count"),
        right("recorded"),
        right("p50"),
        right("p95"),
        right("again"),
        right("p50"),
        right("p95"),
        right("ratio"),
    ]);
    let ns = |ns: f64| duration(ns.round() as u64);
    for r in rows {
        table.row([
            r.phase.to_owned(),
            r.barriers.to_string(),
            ns(r.recorded.mean_ns),
            ns(r.recorded.p50_ns),
            ns(r.recorded.p95_ns),
            ns(r.reissued.mean_ns),
            ns(r.reissued.p50_ns),
            ns(r.reissued.p95_ns),
            times_over(r.ratio),
        ]);
    }
    table.render(WIDTH)
}

fn bounds(rows: &[PhaseRow]) -> String {
    let right = |title| (title, Align::Right);
    let mut table = Table::new([
        ("barriers of", Align::Left),
        right("again"),
        right("layout bound"),
        right("drives bound"),
        right("reader"),
        right("plan"),
    ]);
    let some = |ns: Option<f64>| ns.map_or_else(|| "–".to_owned(), |ns| duration(ns.round() as u64));
    for r in rows {
        table.row([
            r.phase.to_owned(),
            duration(r.reissued.mean_ns.round() as u64),
            some(r.bound_layout_ns),
            some(r.bound_drives_ns),
            times_over(r.over_layout),
            times_over(r.layout_over_drives),
        ]);
    }
    table.render(WIDTH)
}

fn times_over(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "–".to_owned(), |r| format!("{r:.2}x"))
}

fn drives(record: &ReissueRecord) -> String {
    let right = |title| (title, Align::Right);
    let mut table = Table::new([
        ("drive", Align::Left),
        right("reads"),
        right("bytes"),
        right("landed last"),
        right("rate"),
        right("fixed"),
        ("from", Align::Left),
    ]);
    for d in &record.drives {
        let known = record.rates.iter().find(|r| r.drive == d.name);
        let from = known.map_or("unknown", |r| match r.from {
            RateFrom::Learnt => "learnt",
            RateFrom::Given => "given",
        });
        table.row([
            if d.emulated { format!("{} (emulated)", d.name) } else { d.name.clone() },
            d.reads.to_string(),
            bytes(d.payload_bytes),
            d.landed_last.to_string(),
            known.map_or_else(|| "–".to_owned(), |r| rate(r.bytes_per_s as f64)),
            known.map_or_else(|| "–".to_owned(), |r| duration(r.fixed_ns)),
            from.to_owned(),
        ]);
    }
    table.render(WIDTH)
}
