//! `argodrive verify`: read back everything that a plan or a store says is there, and compare digests.

use super::{ByteBar, plan as plan_command, print, print_json, stage};
use crate::report::units;
use crate::store::manifest::{DriveManifest, ManifestError, STORE_FILE, StoreManifest, drive_folder};
use crate::store::verify::{Sample, VerifyReport, verify_pieces, verify_trunk};
use crate::sys::lock::try_lock;
use anyhow::{Result, anyhow, bail};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Read back every expert (and trunk tensor) and compare digests
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A plan, or a store folder
    target: PathBuf,
    /// Where the drives are now, if not where the plan says
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// Look only at a sample of each drive: a share (`5%`) or a number of experts (`100`)
    #[arg(long, value_name = "SHARE|N", value_parser = Sample::parse)]
    sample: Option<Sample>,
    /// Seed of the sample
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What is looked at.
#[derive(Clone, Copy)]
struct Look {
    sample: Sample,
    seed: u64,
}

struct Checked {
    name: String,
    folder: PathBuf,
    report: VerifyReport,
    /// What there is to check.
    there: u64,
    /// Planned experts that the drive does not hold.
    missing: Vec<String>,
}

/// Runs the command: exit code 1 when something is wrong.
pub fn run(args: Args) -> Result<ExitCode> {
    let look = Look { sample: args.sample.unwrap_or(Sample::All), seed: args.seed };
    let checked = if args.target.is_dir() {
        if args.drives.is_some() {
            bail!("--drives goes with a plan; {} is a folder", args.target.display());
        }
        verify_store(&args.target, look)?
    } else {
        verify_plan(&args.target, args.drives.as_deref(), look)?
    };
    let sound = checked.iter().all(|c| c.report.faults.is_empty() && c.missing.is_empty());
    if args.json {
        let rows: Vec<_> = checked
            .iter()
            .map(|c| {
                let faults: Vec<String> = c.report.faults.iter().map(ToString::to_string).collect();
                serde_json::json!({"name": c.name, "folder": c.folder, "checked": c.report.checked,
                    "there": c.there,
                    "bytes": c.report.bytes, "faults": faults, "missing": c.missing})
            })
            .collect();
        print_json(&serde_json::json!({"sound": sound, "seed": args.sample.map(|_| args.seed), "drives": rows}))?;
    } else {
        for c in &checked {
            for fault in &c.report.faults {
                print(&format!("{}: {fault}", c.name))?;
            }
            for missing in &c.missing {
                print(&format!("{}: {missing} is planned but not there; run `argodrive stage`", c.name))?;
            }
            let of = match args.sample {
                None => String::new(),
                Some(_) => {
                    let share = units::percent(c.report.checked as f64 / c.there.max(1) as f64);
                    format!(" of {} ({share}, seed {})", c.there, args.seed)
                }
            };
            print(&format!(
                "{}: {} checked{of}, {}, {} wrong, {} missing",
                c.name,
                c.report.checked,
                units::bytes(c.report.bytes),
                c.report.faults.len(),
                c.missing.len()
            ))?;
        }
        if !sound && !args.target.is_dir() {
            print(&format!("next: argodrive stage {} --repair", args.target.display()))?;
        }
    }
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn verify_store(folder: &Path, look: Look) -> Result<Vec<Checked>> {
    if !folder.join(STORE_FILE).exists() {
        bail!("{} is neither a plan nor a store (it has no {STORE_FILE})", folder.display());
    }
    let mut manifest = StoreManifest::open(folder)?;
    let there = manifest.trunk.len() as u64;
    let trunk_name = manifest.trunk_format.label().unwrap_or("trunk").to_string();
    manifest.trunk = look.sample.of(manifest.trunk, look.seed);
    let bar = ByteBar::new("verifying");
    let trunk = verify_trunk(folder, &manifest, &mut |at| bar.show(at))?;
    bar.finish();
    let mut out =
        vec![Checked { name: trunk_name, folder: folder.to_path_buf(), report: trunk, there, missing: Vec::new() }];
    if !manifest.moe_layers.is_empty() {
        out.push(verify_folder("experts", drive_folder(folder, &manifest.model_id), look, |_| Vec::new())?);
    }
    Ok(out)
}

fn verify_plan(path: &Path, drives: Option<&Path>, look: Look) -> Result<Vec<Checked>> {
    let plan = plan_command::read_plan(path)?;
    let mounts = stage::mounts(&plan, drives)?;
    (0u8..)
        .zip(plan.drives.iter().zip(mounts))
        .map(|(index, (drive, mount))| {
            verify_folder(&drive.name, drive_folder(&mount, &plan.model_id), look, |manifest| {
                plan.pieces_on(crate::ids::DriveId(index))
                    .filter(|key| manifest.find_piece(key).is_none())
                    .map(|key| key.to_string())
                    .collect()
            })
        })
        .collect()
}

fn verify_folder(
    name: &str,
    folder: PathBuf,
    look: Look,
    missing: impl Fn(&DriveManifest) -> Vec<String>,
) -> Result<Checked> {
    // What is looked at must not be freed meanwhile. A folder that is not there is said better below.
    let _reading = match try_lock(&folder, true) {
        Ok(Err(held)) => bail!(
            "drive {name}: `argodrive prune` or a rollback ({held}) is freeing space in {}; wait for it to end",
            folder.display()
        ),
        Ok(Ok(file)) => Some(file),
        Err(_) => None,
    };
    let manifest = DriveManifest::open(&folder).map_err(|e| match e {
        ManifestError::Io { path, source } if source.kind() == ErrorKind::NotFound => anyhow!(
            "drive {name}: {} is not there: the drive is not mounted, or nothing was staged; run `argodrive stage`",
            path.display()
        ),
        other => other.into(),
    })?;
    let bar = ByteBar::new("verifying");
    let pieces: Vec<_> = manifest.pieces().collect();
    let there = pieces.len() as u64;
    let pieces = look.sample.of(pieces, look.seed);
    let report = verify_pieces(&folder, &manifest, pieces, &mut |at| bar.show(at))?;
    bar.finish();
    Ok(Checked { name: name.into(), missing: missing(&manifest), folder, report, there })
}
