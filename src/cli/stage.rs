//! `argodrive stage`: make a plan true on its drives.

use super::{ByteBar, WIDTH, plan as plan_command, print, print_json};
use crate::drive::spec;
use crate::layout::plan::Plan;
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::stage::{self, DEFAULT_MARGIN_BYTES, StageOptions};
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Copy to each drive what a plan places there and it does not hold yet
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plan
    plan: PathBuf,
    /// Where the drives are now, if not where the plan says
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// Where the store is now, if not where the plan says
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Say what would be copied, copy nothing
    #[arg(long)]
    dry_run: bool,
    /// Bytes to leave free on every drive, e.g. 20GB
    #[arg(long, value_parser = crate::drive::units::parse_bytes)]
    margin: Option<u64>,
    /// Read back what is there already, and copy again what is wrong
    #[arg(long)]
    repair: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// The folders of a plan's drives: its own, or those of a drives file by name.
pub(super) fn mounts(plan: &Plan, drives: Option<&Path>) -> Result<Vec<PathBuf>> {
    let Some(path) = drives else {
        return Ok(plan.drives.iter().map(|d| d.path.clone()).collect());
    };
    let specs = spec::load(path)?;
    plan.drives
        .iter()
        .map(|d| match specs.iter().find(|s| s.name == d.name) {
            Some(s) => Ok(s.path.clone()),
            None => {
                bail!("--drives {}: the plan uses drive `{}`, which the file does not have", path.display(), d.name)
            }
        })
        .collect()
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let plan = plan_command::read_plan(&args.plan)?;
    let mounts = mounts(&plan, args.drives.as_deref())?;
    let store = args.store.unwrap_or_else(|| plan.store.clone());
    let options = StageOptions {
        dry_run: args.dry_run,
        margin_bytes: args.margin.unwrap_or(DEFAULT_MARGIN_BYTES),
        repair: args.repair,
    };
    let bar = ByteBar::new("staging");
    let reports = stage::stage(&plan, &store, &mounts, options, &mut |at| bar.show(at))?;
    bar.finish();
    if args.json {
        print_json(&serde_json::json!({"dry_run": args.dry_run, "plan_hash": plan.hash()?, "drives": reports}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let did = if args.dry_run { "to copy" } else { "copied" };
    let mut table = Table::new([
        ("drive", Align::Left),
        ("planned", Align::Right),
        ("there", Align::Right),
        ("spoiled", Align::Right),
        (did, Align::Right),
        ("bytes", Align::Right),
    ]);
    for r in reports {
        table.row([
            r.name,
            r.planned.to_string(),
            r.present.to_string(),
            r.spoiled.to_string(),
            r.copied.to_string(),
            units::bytes(r.copied_bytes),
        ]);
    }
    print(table.render(WIDTH).trim_end())?;
    Ok(ExitCode::SUCCESS)
}
