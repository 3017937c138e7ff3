//! `argodrive results parquet`: the tables of a trace folder as Parquet files.

use super::super::{Reading, WIDTH, print, print_json, remark};
use crate::report::table::{Align, Table};
use crate::report::units::bytes;
use crate::trace::log::{self, TRACE_FILE};
use crate::trace::parquet::write::{Written, convert};
use crate::trace::parquet::{csv_of, schema};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Turn the CSV files of a trace into Parquet, which `trace` reads as well
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trace folder
    trace: PathBuf,
    /// Where to write (made if it is missing; gets a copy of trace.json, so that it is a trace too); default: beside the
    /// CSV files
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Leave out rows with faults, and say how many
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let header = log::read_header(&args.trace)?;
    let out = args.out.as_ref().unwrap_or(&args.trace);
    let there = |table: &schema::TableSpec| csv_of(&args.trace, table).exists();
    let tables: Vec<schema::TableSpec> = schema::tables().into_iter().filter(there).collect();
    if tables.is_empty() {
        let names = schema::tables().map(|t| format!("{}.csv", t.name)).join(", ");
        bail!("{}: has none of {names}", args.trace.display());
    }
    std::fs::create_dir_all(out).with_context(|| format!("--out {}", out.display()))?;
    let reading = Reading::start("reading the trace");
    let mut written = Vec::with_capacity(tables.len());
    for table in &tables {
        written.push(convert(&args.trace, out, &header, table, args.lenient)?);
    }
    drop(reading);
    // last, because a folder with a trace.json is a whole trace
    if !out.join(TRACE_FILE).exists() {
        log::write_header(out, &header)?;
    }
    for fault in written.iter().flat_map(|w| &w.skipped.first) {
        remark(&format!("left out: {fault}"));
    }
    if args.json {
        let file = |w: &Written| {
            serde_json::json!({
                "file": w.path, "rows": w.rows, "csv_bytes": w.csv_bytes, "parquet_bytes": w.parquet_bytes,
                "skipped_rows": w.skipped.rows,
            })
        };
        print_json(&serde_json::json!({"files": written.iter().map(file).collect::<Vec<_>>()}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let right = |title| (title, Align::Right);
    let mut table = Table::new([("written", Align::Left), right("rows"), right("from CSV of"), right("bytes")]);
    for w in &written {
        table.row([w.path.display().to_string(), w.rows.to_string(), bytes(w.csv_bytes), bytes(w.parquet_bytes)]);
    }
    print(table.render(WIDTH).trim_end())?;
    let left_out: u64 = written.iter().map(|w| w.skipped.rows).sum();
    if left_out > 0 {
        print(&format!("left out: {left_out} rows with faults"))?;
    }
    Ok(ExitCode::SUCCESS)
}
