//! `argodrive trace learn`: what traces say about which experts follow which, as a table for `--prefetch markov`.

use super::super::{Reading, print, print_json, remark};
use crate::reader::predict::table_file;
use crate::replay::learn::{LearnOptions, learn};
use crate::store::manifest::StoreManifest;
use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;

/// Learn which experts follow which, for prefetching by table
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Trace folders of one model
    #[arg(required = true)]
    traces: Vec<PathBuf>,
    /// The table to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The store that was run; needed for traces that do not name their model
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Layers ahead to learn about
    #[arg(long, value_name = "N", default_value_t = 2)]
    depth: usize,
    /// Followers to keep for each expert
    #[arg(long, value_name = "N", default_value_t = 32)]
    successors: usize,
    /// Leave out rows with faults, and say how many
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let model_id = args.store.as_ref().map(|s| StoreManifest::open(s)).transpose()?.map(|m| m.model_id);
    let options = LearnOptions { depth: args.depth, successors: args.successors, lenient: args.lenient, model_id };
    let reading = Reading::start("reading traces");
    let learnt = learn(&args.traces, &options)?;
    drop(reading);
    table_file::write(&args.out, &learnt.table)?;
    for folder in &learnt.from_reads {
        remark(&format!("{} has no routes.csv: learnt from its reads, passes of one row only", folder.display()));
    }
    for fault in &learnt.skipped.first {
        remark(&format!("left out: {fault}"));
    }
    let table = &learnt.table;
    if args.json {
        print_json(&serde_json::json!({
            "file": args.out, "model_id": table.model_id(), "layers": table.layers().len(), "depth": table.depth(),
            "experts": table.experts(), "entries": table.entries(), "tokens": learnt.tokens,
            "incomplete_tokens": learnt.incomplete, "skipped_rows": learnt.skipped.rows,
        }))?;
    } else {
        print(&format!(
            "{}: {} tokens, {} layers, {} experts with followers up to {} layers ahead",
            args.out.display(),
            learnt.tokens,
            table.layers().len(),
            table.entries(),
            table.depth()
        ))?;
        if learnt.incomplete > 0 || learnt.skipped.rows > 0 {
            print(&format!("left out: {} tokens without all layers, {} rows", learnt.incomplete, learnt.skipped.rows))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
