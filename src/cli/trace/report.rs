//! `argodrive trace report`: the aggregate of a trace as tables or JSON, and each barrier as a row of a CSV file.

use super::super::{Reading, print, print_json, remark, verdict};
use super::tables;
use crate::layout::plan::Plan;
use crate::replay::ReplayError;
use crate::replay::join::Joiner;
use crate::replay::measured;
use crate::replay::rates::{Bounds, Homes, NamedRate, parse_profile, parse_rates};
use crate::replay::summary::{GapRow, Summarizer, Summary, summarize};
use crate::replay::windows::{self, WindowRow};
use crate::report::html::{self, Part};
use crate::report::trace_figures::{self, TraceFigureError};
use crate::sys::durable::write_atomic;
use crate::trace::log::{self, TraceHeader};
use crate::trace::stream::{self, RowWriter, Wanted};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Largest gaps listed unless told otherwise.
const DEFAULT_TOP: usize = 10;

/// Who landed last in each barrier, why, and what bounds decoding
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trace folder
    trace: PathBuf,
    /// What the drives can do together, e.g. `nvme0=13.6GB/s:200us,nvme1=6GB/s:90us`: adds both bounds
    #[arg(long, value_name = "NAME=RATE[:FIXED],...")]
    rates: Option<String>,
    /// The same from a file of `[[drive]]` tables with `name`, `rate` and `fixed`
    #[arg(long, value_name = "FILE", conflicts_with = "rates")]
    profile: Option<PathBuf>,
    /// The plan of the run, for the homes of the layout bound; without it, homes are the drives that served an expert
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Wall time of decoding, e.g. 12.5s; otherwise what the run wrote down, or from the first open to the last close
    #[arg(long, value_name = "TIME", value_parser = crate::drive::units::parse_duration_ns)]
    wall: Option<u64>,
    /// How many of the largest gaps to list
    #[arg(long, value_name = "N", default_value_t = DEFAULT_TOP)]
    top: usize,
    /// Write one row per barrier to this CSV file
    #[arg(long, value_name = "FILE")]
    barriers: Option<PathBuf>,
    /// Write the report as one HTML file, with all figures, that needs no network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Leave out rows with faults, and say how many
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const BARRIER_COLUMNS: [&str; 16] = [
    "barrier",
    "step",
    "phase",
    "layer",
    "width",
    "last",
    "purpose",
    "cause",
    "wait_ns",
    "before_ns",
    "queue_ns",
    "service_ns",
    "gap_drive_ns",
    "gap_read_ns",
    "bound_layout_ns",
    "bound_drives_ns",
];

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let header = log::read_header(&args.trace)?;
    if !stream::has_reads(&args.trace) && stream::has_windows(&args.trace) {
        return report_windows(&args, &header);
    }
    let reading = Reading::start("reading the trace");
    let summary = summary(&args, &header)?;
    let sampled = sampled_windows(&args, &header)?;
    for fault in &summary.skipped_first {
        remark(&format!("left out: {fault}"));
    }
    if let Some(path) = &args.html {
        write_page(path, &args.trace, &summary, &header, args.lenient)?;
    }
    drop(reading);
    if args.json {
        let mut value = serde_json::to_value(&summary)?;
        value["emulated"] = header.drives.iter().any(|d| d.emulated).into();
        value["injected_faults"] = serde_json::to_value(&header.faults)?;
        value["drive_names"] = header.drives.iter().map(|d| d.name.as_str()).collect();
        value["imported"] = serde_json::to_value(&header.imported)?;
        value["reissued"] = serde_json::to_value(&header.reissued)?;
        value["rates"] = serde_json::to_value(&header.rates)?;
        if let Some(known) = &summary.verdict {
            let names: Vec<&str> = header.drives.iter().map(|d| d.name.as_str()).collect();
            value["verdict"] = verdict::json(known, &names);
        }
        if let Some(rows) = &sampled {
            value["windows"] = serde_json::to_value(rows)?;
            value["sampler"] = serde_json::to_value(header.windows.as_ref().map(|w| &w.sampler))?;
        }
        print_json(&value)?;
    } else {
        print(tables::render(&summary, &header, args.top).trim_end())?;
        if let Some(rows) = &sampled {
            print(format!("\n{}", tables::render_sampled(rows, &header)).trim_end())?;
        }
        if let Some(path) = &args.html {
            print(&format!("\nreport  {}", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The report of the trace in `trace`, without bounds, as a page at `path`.
pub fn write_page_of(trace: &Path, path: &Path) -> Result<()> {
    let header = log::read_header(trace)?;
    let reads = stream::wanted_reads(trace, header.drives.len(), false, Wanted::Report)?;
    let joiner = Joiner::new(reads, stream::barriers(trace, header.drives.len(), false)?, false);
    let known = measured::fixed_ns(&header.rates, &header.drives);
    let summarizer = Summarizer::new(&header.drives, None, DEFAULT_TOP).with_fixed(known);
    let summary = summarize(joiner, summarizer, header.decode_wall_ns, &mut |_| Ok(()))?;
    write_page(path, trace, &summary, &header, false)
}

/// The report of `trace` as a page, with its figures.
fn write_page(path: &Path, trace: &Path, summary: &Summary, header: &TraceHeader, lenient: bool) -> Result<()> {
    // what a figure cannot show must not cost the tables
    let left_out = |reason: String| Part::Text(vec![format!("left out: {reason}")]);
    let figures = match trace_figures::figures(trace, None, lenient) {
        Ok(figures) => {
            let drawn = figures.iter().map(|named| named.figure.svg());
            drawn.map(|svg| svg.map_or_else(|e| left_out(e.to_string()), Part::Figure)).collect()
        }
        Err(TraceFigureError::Nothing(reason)) => vec![left_out(reason)],
        Err(e) => return Err(e.into()),
    };
    let name = trace.canonicalize().ok().and_then(|p| p.file_name().map(|n| n.to_string_lossy().into_owned()));
    let title = format!("Trace {}", name.unwrap_or_else(|| trace.display().to_string()));
    let page = html::trace::page(&title, summary, header, figures, html::trace::environment_beside(trace));
    write_atomic(path, page.render().as_bytes()).with_context(|| format!("--html {}", path.display()))
}

fn summary(args: &Args, header: &TraceHeader) -> Result<Summary> {
    let (folder, drives) = (&args.trace, header.drives.len());
    let bounds = match rates(args)? {
        Some(rates) => Some(Bounds::new(&header.drives, &rates, homes(args, header)?)?),
        None if args.plan.is_some() => bail!("--plan is used for the layout bound; give --rates or --profile as well"),
        None => None,
    };
    let reads = stream::wanted_reads(folder, drives, args.lenient, Wanted::Report)?;
    let barriers = stream::barriers(folder, drives, args.lenient)?;
    let joiner = Joiner::new(reads, barriers, args.lenient);
    let known = measured::fixed_ns(&header.rates, &header.drives);
    let summarizer = Summarizer::new(&header.drives, bounds, args.top).with_fixed(known);
    let mut csv = args.barriers.as_ref().map(|path| barrier_file(path)).transpose()?;
    let mut each = |row: &GapRow| -> Result<(), ReplayError> { Ok(csv.as_mut().map_or(Ok(()), |csv| csv.push(row))?) };
    let summary = summarize(joiner, summarizer, args.wall.or(header.decode_wall_ns), &mut each)?;
    if let Some(csv) = csv {
        csv.finish()?;
    }
    Ok(summary)
}

fn barrier_file(path: &Path) -> Result<RowWriter<GapRow>> {
    Ok(RowWriter::create(path, &BARRIER_COLUMNS.map(|c| (c, "")))?)
}

fn rates(args: &Args) -> Result<Option<Vec<NamedRate>>> {
    if let Some(text) = &args.rates {
        return parse_rates(text).map(Some).map_err(|e| anyhow::anyhow!("--rates: {e}"));
    }
    let Some(path) = &args.profile else { return Ok(None) };
    let text = std::fs::read_to_string(path).with_context(|| format!("--profile {}", path.display()))?;
    parse_profile(&text).map(Some).map_err(|e| anyhow::anyhow!("--profile {}: {e}", path.display()))
}

fn homes(args: &Args, header: &TraceHeader) -> Result<Homes> {
    match &args.plan {
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("--plan {}", path.display()))?;
            let plan = Plan::parse(&text).with_context(|| format!("--plan {}", path.display()))?;
            Ok(Homes::of_plan(&plan, &header.drives)?)
        }
        None => Ok(Homes::of_reads(&mut stream::wanted_reads(
            &args.trace,
            header.drives.len(),
            args.lenient,
            Wanted::Report,
        )?)?),
    }
}

/// What the kernel counted beside the reads, where a run sampled it.
fn sampled_windows(args: &Args, header: &TraceHeader) -> Result<Option<Vec<WindowRow>>> {
    if header.windows.is_none() || !stream::has_windows(&args.trace) {
        return Ok(None);
    }
    let (mut rows, skipped) = windows::summarize(&args.trace, &header.drives, args.lenient)?;
    windows::attribute(&mut rows, header);
    for fault in &skipped.first {
        remark(&format!("left out: {fault}"));
    }
    Ok(Some(rows))
}

fn report_windows(args: &Args, header: &TraceHeader) -> Result<ExitCode> {
    if args.html.is_some() {
        bail!("--html: {} holds windows of device counters and no reads to report", args.trace.display());
    }
    if args.rates.is_some() || args.profile.is_some() || args.plan.is_some() || args.barriers.is_some() {
        bail!("{}: holds windows of device counters and no reads; it has no barriers", args.trace.display());
    }
    let (mut rows, skipped) = windows::summarize(&args.trace, &header.drives, args.lenient)?;
    windows::attribute(&mut rows, header);
    for fault in &skipped.first {
        remark(&format!("left out: {fault}"));
    }
    if args.json {
        let left_out = skipped.rows;
        print_json(&serde_json::json!({"windows": rows, "imported": header.imported, "skipped_rows": left_out}))?;
    } else {
        print(tables::render_windows(&rows, header, skipped.rows).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}
