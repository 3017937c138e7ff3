//! `argodrive trace import`: another program's log becomes a trace folder.

use super::super::{Reading, print, print_json, remark};
use crate::drive::units::parse_bytes;
use crate::replay::import::per_read::{PerReadOptions, PrefetchBarrier, TimeIs};
use crate::replay::import::{blkparse, fio, per_read, sampler};
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Turn another program's log into a trace folder
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The log; several for fio, one per drive
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// What it is
    #[arg(long, value_enum)]
    format: Format,
    /// Where to write the trace folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// per-read: what `t_us` is (default: completion)
    #[arg(long, value_enum)]
    time: Option<Time>,
    /// per-read: the barrier that a prefetch belongs to (default: target)
    #[arg(long, value_enum)]
    prefetch_barrier: Option<Prefetch>,
    /// per-read: bytes of a read whose row has no length
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    expert_bytes: Option<u64>,
    /// sampler: the file that says which disk is which drive (`role=diskN`)
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// fio: what the second column is, if the file's name does not say
    #[arg(long, value_enum)]
    fio_value: Option<Value>,
    /// Leave out rows with faults, and say how many
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// One row per read: `t_us,barrier,layer,expert,src,dur_ns,...` or `t_us,dur_ns,barrier,source,...`
    PerRead,
    /// Device counters: `t_s,dev,v1,v2,v3`
    Sampler,
    /// fio's per-I/O logs (clat, lat or bw, `--log_avg_msec=0 --log_offset=1`)
    Fio,
    /// The text that blkparse prints
    Blkparse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Time {
    /// When the read was issued
    Issue,
    /// When it was complete
    Completion,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Prefetch {
    /// The barrier that needs it
    Target,
    /// The barrier it was issued in
    Issued,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Value {
    /// Hand-over to completion, ns
    Clat,
    /// Issue to completion, ns
    Lat,
    /// KiB/s
    Bw,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    check(&args)?;
    let one = &args.files[0];
    let reading = Reading::start("reading the log");
    let report = match args.format {
        Format::PerRead => {
            let defaults = PerReadOptions::default();
            let options = PerReadOptions {
                time: args.time.map_or(defaults.time, |t| match t {
                    Time::Issue => TimeIs::Issue,
                    Time::Completion => TimeIs::Completion,
                }),
                prefetch: args.prefetch_barrier.map_or(defaults.prefetch, |p| match p {
                    Prefetch::Target => PrefetchBarrier::Target,
                    Prefetch::Issued => PrefetchBarrier::Issued,
                }),
                default_bytes: args.expert_bytes,
                lenient: args.lenient,
            };
            per_read::import(one, &args.out, options)?
        }
        Format::Sampler => sampler::import(one, args.map.as_deref(), &args.out, args.lenient)?,
        Format::Fio => {
            let value = args.fio_value.map(|v| match v {
                Value::Clat => fio::FioValue::Clat,
                Value::Lat => fio::FioValue::Lat,
                Value::Bw => fio::FioValue::Bw,
            });
            fio::import(&args.files, &args.out, value, args.lenient)?
        }
        Format::Blkparse => blkparse::import(one, &args.out, args.lenient)?,
    };
    drop(reading);
    for fault in &report.skipped_first {
        remark(&format!("left out: {fault}"));
    }
    if args.json {
        print_json(&serde_json::to_value(&report)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!(
        "{}: {} reads, {} barriers, {} windows; drives: {}",
        args.out.display(),
        report.reads,
        report.barriers,
        report.windows,
        if report.drives.is_empty() { "none known".to_owned() } else { report.drives.join(", ") }
    ))?;
    for assumption in &report.assumptions {
        print(&format!("  - {assumption}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A flag that the format does not know is refused, and so is a second file.
fn check(args: &Args) -> Result<()> {
    let used = [
        ("--time", args.time.is_some(), Format::PerRead),
        ("--prefetch-barrier", args.prefetch_barrier.is_some(), Format::PerRead),
        ("--expert-bytes", args.expert_bytes.is_some(), Format::PerRead),
        ("--map", args.map.is_some(), Format::Sampler),
        ("--fio-value", args.fio_value.is_some(), Format::Fio),
    ];
    for (flag, given, format) in used {
        if given && args.format != format {
            bail!("{flag} does nothing for this --format");
        }
    }
    if args.files.len() > 1 && args.format != Format::Fio {
        bail!("this --format takes one file, {} are given", args.files.len());
    }
    Ok(())
}
