//! `argodrive trace export`: a trace for other programs.

use super::super::{Reading, print, print_json, remark};
use crate::drive::units::parse_duration_ns;
use crate::replay::export::{hdr, perfetto};
use crate::replay::join::Joiner;
use crate::trace::log;
use crate::trace::stream::{self, Growing};
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Write a trace for another program: Perfetto, or HDR interval logs
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trace folder
    trace: PathBuf,
    /// For whom
    #[arg(long, value_enum)]
    format: Format,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// hdr: length of an interval (default: 1s)
    #[arg(long, value_name = "TIME", value_parser = parse_duration_ns)]
    interval: Option<u64>,
    /// Leave out rows with faults, and say how many
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Trace-event JSON for ui.perfetto.dev or chrome://tracing
    Perfetto,
    /// HDR interval log of clat, one histogram per drive and interval
    Hdr,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let header = log::read_header(&args.trace)?;
    let drives = header.drives.len();
    let reading = Reading::start("reading the trace");
    let mut reads = stream::reads(&args.trace, drives, args.lenient)?;
    let mut out = Growing::create(&args.out)?;
    let (text, value, skipped) = match args.format {
        Format::Perfetto => {
            if args.interval.is_some() {
                bail!("--interval does nothing for --format perfetto");
            }
            let barriers = stream::barriers(&args.trace, drives, args.lenient)?;
            let mut joiner = Joiner::new(reads, barriers, args.lenient);
            let done = perfetto::export(&mut joiner, &header.drives, &mut out)?;
            let text = format!("{} reads, {} barriers, {} arrows", done.reads, done.barriers, done.arrows);
            (text, serde_json::to_value(done)?, joiner.skipped())
        }
        Format::Hdr => {
            let done = hdr::export(&mut reads, &header.drives, args.interval.unwrap_or(1_000_000_000), &mut out)?;
            let text = format!("{} reads in {} histograms", done.reads, done.intervals);
            (text, serde_json::to_value(done)?, reads.skipped().clone())
        }
    };
    out.finish()?;
    drop(reading);
    for fault in &skipped.first {
        remark(&format!("left out: {fault}"));
    }
    if args.json {
        print_json(&serde_json::json!({"file": args.out, "written": value, "skipped_rows": skipped.rows}))?;
    } else {
        let left_out = if skipped.rows > 0 { format!("; {} rows left out", skipped.rows) } else { String::new() };
        print(&format!("{}: {text}{left_out}", args.out.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
