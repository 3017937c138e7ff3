//! `argodrive trace replay`: a recorded run as figures.

use super::super::{Reading, print, print_json};
use crate::report::trace_figures::draw;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::ExitCode;

/// Draw what a trace recorded: drives over time, one step's waterfall, who landed last
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trace folder
    trace: PathBuf,
    /// Where to write the figures (SVG and PNG)
    #[arg(long, value_name = "DIR")]
    plot_dir: PathBuf,
    /// The step of the waterfall (default: the decode step that waited longest)
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// Leave out rows with faults
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let folder = &args.plot_dir;
    std::fs::create_dir_all(folder).with_context(|| format!("--plot-dir {}", folder.display()))?;
    let reading = Reading::start("reading the trace");
    let files = draw(&args.trace, folder, args.step, args.lenient)?;
    drop(reading);
    if args.json {
        print_json(&serde_json::json!({"figures": files}))?;
    } else {
        for file in files {
            print(&file.display().to_string())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
