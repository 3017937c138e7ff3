//! `argodrive stage`: make a plan true on its drives, say what that would take, or take it back.

use super::{ByteBar, WIDTH, plan as plan_command, print, print_json, remark};
use crate::drive::profile::Profile;
use crate::drive::spec;
use crate::drive::units::{parse_bytes, parse_rate};
use crate::layout::plan::Plan;
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::stage::rollback::{RollbackReport, rollback};
use crate::stage::{self, DEFAULT_MARGIN_BYTES, DriveReport, StageOptions};
use anyhow::{Context, Result, bail};
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
    /// Say what would be copied (or taken back), and how long that takes at least; change nothing
    #[arg(long)]
    dry_run: bool,
    /// Bytes to leave free on every file system, e.g. 20GB [default: 256MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    margin: Option<u64>,
    /// Copy at most this many payload bytes per second, all drives together, e.g. 200MB/s
    #[arg(long, value_name = "RATE", value_parser = rate)]
    rate: Option<u64>,
    /// Read back what is there already, and copy again what is wrong
    #[arg(long)]
    repair: bool,
    /// What the drives do (`argodrive ceiling`), for the times of a dry run
    #[arg(long, value_name = "FILE", requires = "dry_run")]
    profile: Option<PathBuf>,
    /// Take back what staging this plan has added; what was there before, or other plans need, stays
    #[arg(long, conflicts_with_all = ["margin", "rate", "repair", "profile", "rollback_on_failure"])]
    rollback: bool,
    /// With a rollback: plans whose experts stay, besides those that were staged here too
    #[arg(long, value_name = "PLAN", num_args = 1.., requires = "rollback")]
    keep: Vec<PathBuf>,
    /// Take back what staging this plan has added if it fails (otherwise the next run goes on from there)
    #[arg(long)]
    rollback_on_failure: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

fn rate(text: &str) -> Result<u64, String> {
    parse_rate(text).and_then(|r| if r == 0 { Err("a rate of 0 would never end".into()) } else { Ok(r) })
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
    if crate::store::identity::is_provisional(&plan.model_id) {
        bail!(
            "{}: made before the model was there; bring it onto the drives with `argodrive import <checkpoint> --store <dir> \
             --plan {0}`",
            args.plan.display()
        );
    }
    let store = args.store.clone().unwrap_or_else(|| plan.store.clone());
    if args.rollback {
        let keep = args.keep.iter().map(|p| plan_command::read_plan(p)).collect::<Result<Vec<_>>>()?;
        let keep: Vec<&Plan> = keep.iter().collect();
        let reports = rollback(&plan, &store, &mounts, &keep, args.dry_run)?;
        return show_rollback(&args, &plan, reports);
    }
    let profile = args.profile.as_deref().map(|p| Profile::load(p).context("--profile")).transpose()?;
    let options = StageOptions {
        dry_run: args.dry_run,
        margin_bytes: args.margin.unwrap_or(DEFAULT_MARGIN_BYTES),
        repair: args.repair,
        rate_bytes_per_s: args.rate,
    };
    let bar = ByteBar::new("staging");
    let staged = stage::stage(&plan, &store, &mounts, options, &mut |at| bar.show(at));
    bar.finish();
    let reports = match staged {
        Err(error) if args.rollback_on_failure && !args.dry_run => {
            let reports = rollback(&plan, &store, &mounts, &[], false)
                .with_context(|| format!("staging failed ({error}), and taking it back too"))?;
            let removed: usize = reports.iter().map(|r| r.removed).sum();
            remark(&format!("staging failed; {removed} copies that it had added were taken back"));
            return Err(error.into());
        }
        other => other?,
    };
    show(&args, &plan, reports, profile.as_ref())
}

/// Seconds that copying takes at least: every byte is written and read back, and a drive hardly writes faster than it
/// reads; or what the limit allows. `None` = nothing is known.
fn least_s(report: &DriveReport, profile: Option<&Profile>, limit: Option<u64>) -> Option<f64> {
    let bytes = report.copied_bytes as f64;
    let drive = profile.and_then(|p| p.drive(&report.name)).map(|d| 2.0 * bytes / d.rate_bytes_per_s);
    let limit = limit.map(|rate| bytes / rate as f64);
    match (drive, limit) {
        (Some(a), Some(b)) => Some(a.max(b)),
        (a, b) => a.or(b),
    }
}

fn show(args: &Args, plan: &Plan, reports: Vec<DriveReport>, profile: Option<&Profile>) -> Result<ExitCode> {
    let times: Vec<Option<f64>> = reports.iter().map(|r| least_s(r, profile, args.rate)).collect();
    if args.json {
        let drives = reports.iter().zip(&times).map(|(r, least)| {
            let mut row = serde_json::to_value(r)?;
            if args.dry_run {
                row["least_s"] = serde_json::json!(least);
            }
            Ok(row)
        });
        let drives = drives.collect::<Result<Vec<_>>>()?;
        let waited: u64 = reports.iter().map(|r| r.waited_ns).sum();
        print_json(&serde_json::json!({"dry_run": args.dry_run, "plan_hash": plan.hash()?, "drives": drives,
            "rate_limit_bytes_per_s": args.rate, "waited_ns": waited}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let did = if args.dry_run { "to copy" } else { "copied" };
    let last = if args.dry_run { "takes at least" } else { "waited" };
    let mut table = Table::new([
        ("drive", Align::Left),
        ("planned", Align::Right),
        ("there", Align::Right),
        ("spoiled", Align::Right),
        (did, Align::Right),
        ("bytes", Align::Right),
        (last, Align::Right),
    ]);
    let duration = |s: f64| units::duration((s * 1e9) as u64);
    let waited: u64 = reports.iter().map(|r| r.waited_ns).sum();
    for (r, least) in reports.into_iter().zip(times) {
        let time = match (args.dry_run, args.rate) {
            (true, _) if r.copied == 0 => "-".to_string(),
            (true, _) => least.map_or("unknown rate".into(), duration),
            (false, None) => "-".into(),
            (false, Some(_)) => units::duration(r.waited_ns),
        };
        table.row([
            r.name,
            r.planned.to_string(),
            r.present.to_string(),
            r.spoiled.to_string(),
            r.copied.to_string(),
            units::bytes(r.copied_bytes),
            time,
        ]);
    }
    print(table.render(WIDTH).trim_end())?;
    if let (false, Some(limit)) = (args.dry_run, args.rate) {
        let waited = units::duration(waited);
        print(&format!("waited {waited} in all for the limit of {}/s", units::bytes(limit)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn show_rollback(args: &Args, plan: &Plan, reports: Vec<RollbackReport>) -> Result<ExitCode> {
    if args.json {
        print_json(&serde_json::json!({"dry_run": args.dry_run, "plan_hash": plan.hash()?, "drives": reports}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new([
        ("drive", Align::Left),
        ("staged", Align::Right),
        (if args.dry_run { "to take back" } else { "taken back" }, Align::Right),
        ("needed by others", Align::Right),
        ("freed", Align::Right),
    ]);
    for r in reports {
        let freed = units::bytes(r.freed_bytes);
        table.row([r.name, r.added.to_string(), r.removed.to_string(), r.needed.to_string(), freed]);
    }
    print(table.render(WIDTH).trim_end())?;
    Ok(ExitCode::SUCCESS)
}
