//! `argodrive trace report`: the aggregate of a trace as tables or JSON, and each barrier as a row of a CSV file.

use super::super::{print, print_json, remark};
use super::tables;
use crate::layout::plan::Plan;
use crate::replay::ReplayError;
use crate::replay::join::Joiner;
use crate::replay::rates::{Bounds, Homes, NamedRate, parse_profile, parse_rates};
use crate::replay::summary::{GapRow, Summarizer, Summary, summarize};
use crate::replay::windows;
use crate::trace::log::{self, TraceHeader};
use crate::trace::stream::{self, RowWriter};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

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
    /// Wall time of decoding, if known; otherwise from the first open to the last close, e.g. 12.5s
    #[arg(long, value_name = "TIME", value_parser = crate::drive::units::parse_duration_ns)]
    wall: Option<u64>,
    /// How many of the largest gaps to list
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Write one row per barrier to this CSV file
    #[arg(long, value_name = "FILE")]
    barriers: Option<PathBuf>,
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
    if !args.trace.join(log::READS_FILE).exists() && args.trace.join(windows::WINDOWS_FILE).exists() {
        return report_windows(&args, &header);
    }
    let summary = summary(&args, &header)?;
    for fault in &summary.skipped_first {
        remark(&format!("left out: {fault}"));
    }
    if args.json {
        let mut value = serde_json::to_value(&summary)?;
        value["emulated"] = header.drives.iter().any(|d| d.emulated).into();
        value["drive_names"] = header.drives.iter().map(|d| d.name.as_str()).collect();
        value["imported"] = serde_json::to_value(&header.imported)?;
        if let Some(verdict) = &summary.verdict {
            value["verdict"]["drive"] = verdict.drive.map(|d| tables::name(&header.drives, d)).into();
            value["verdict"]["says"] = tables::verdict_sentence(verdict, &header.drives).into();
        }
        print_json(&value)?;
    } else {
        print(tables::render(&summary, &header, args.top).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(args: &Args, header: &TraceHeader) -> Result<Summary> {
    let (folder, drives) = (&args.trace, header.drives.len());
    let bounds = match rates(args)? {
        Some(rates) => Some(Bounds::new(&header.drives, &rates, homes(args, header)?)?),
        None if args.plan.is_some() => bail!("--plan is used for the layout bound; give --rates or --profile as well"),
        None => None,
    };
    let reads = stream::reads(folder, drives, args.lenient)?;
    let barriers = stream::barriers(folder, drives, args.lenient)?;
    let joiner = Joiner::new(reads, barriers, args.lenient);
    let summarizer = Summarizer::new(&header.drives, bounds, args.top);
    let mut csv = args.barriers.as_ref().map(|path| barrier_file(path)).transpose()?;
    let mut each = |row: &GapRow| -> Result<(), ReplayError> { Ok(csv.as_mut().map_or(Ok(()), |csv| csv.push(row))?) };
    let summary = summarize(joiner, summarizer, args.wall, &mut each)?;
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
        None => Ok(Homes::of_reads(&mut stream::reads(&args.trace, header.drives.len(), args.lenient)?)?),
    }
}

fn report_windows(args: &Args, header: &TraceHeader) -> Result<ExitCode> {
    if args.rates.is_some() || args.profile.is_some() || args.plan.is_some() || args.barriers.is_some() {
        bail!("{}: holds windows of device counters and no reads; it has no barriers", args.trace.display());
    }
    let (rows, skipped) = windows::summarize(&args.trace, &header.drives, args.lenient)?;
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
