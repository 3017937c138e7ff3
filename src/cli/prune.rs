//! `argodrive prune`: free what no plan to keep needs.

use super::{WIDTH, plan as plan_command, print, print_json, remark, stage};
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::stage::prune::{Keep, prune};
use crate::store::manifest::STORE_FILE;
use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;

/// Free on the drives of some plans whatever none of the plans needs
///
/// Only experts that drive.json names are freed, and never the last copy of one. Other files are left alone.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plans whose experts stay
    #[arg(long, value_name = "PLAN", num_args = 1.., required = true)]
    keep: Vec<PathBuf>,
    /// Where the drives are now, if not where the plans say
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// Where the store is now, if not where the plans say
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Say what would be freed, change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let plans = args.keep.iter().map(|p| plan_command::read_plan(p)).collect::<Result<Vec<_>>>()?;
    let mounts = plans.iter().map(|p| stage::mounts(p, args.drives.as_deref())).collect::<Result<Vec<_>>>()?;
    let stores: Vec<PathBuf> = plans.iter().map(|p| args.store.clone().unwrap_or_else(|| p.store.clone())).collect();
    for store in stores.iter().filter(|s| !s.join(STORE_FILE).exists()) {
        remark(&format!(
            "the store {} is not there, so its copies do not count; name it with --store if it has moved",
            store.display()
        ));
    }
    let keep: Vec<Keep<'_>> =
        (plans.iter().zip(&mounts).zip(&stores)).map(|((plan, mounts), store)| Keep { plan, mounts, store }).collect();
    let reports = prune(&keep, args.dry_run)?;
    let freed: u64 = reports.iter().map(|r| r.freed_bytes).sum();
    if args.json {
        print_json(&serde_json::json!({"dry_run": args.dry_run, "freed_bytes": freed, "drives": reports}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new([
        ("drive", Align::Left),
        ("kept", Align::Right),
        ("last copies", Align::Right),
        (if args.dry_run { "to remove" } else { "removed" }, Align::Right),
        (if args.dry_run { "to free" } else { "freed" }, Align::Right),
    ]);
    for r in &reports {
        let cells = [r.kept, r.last_copies, r.removed].map(|n| n.to_string());
        let [kept, last, removed] = cells;
        table.row([r.name.clone(), kept, last, removed, units::bytes(r.freed_bytes)]);
    }
    print(table.render(WIDTH).trim_end())?;
    for r in &reports {
        if let Some(why) = &r.untouched {
            print(&format!("{} ({}) was left alone: {why}", r.name, r.folder.display()))?;
        }
    }
    if reports.is_empty() {
        print("nothing of this model is staged on these drives")?;
    }
    Ok(ExitCode::SUCCESS)
}
