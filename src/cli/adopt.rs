//! `argodrive adopt`: a folder with one file per expert, used where it lies.

use super::import::{measure_trunk, trunk_lines};
use super::{ByteBar, print, print_json, remark};
use crate::report::units::bytes;
use crate::store::adopt::adopt;
use crate::store::trunk_format::TrunkFormat;
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Bytes read between two entries of the journal.
const BATCH_BYTES: u64 = 256 << 20;

/// Use an existing folder with one file per expert, in place
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with a file L<layer>-E<expert>.bin for every expert
    experts: PathBuf,
    /// Checkpoint that the trunk and the tokenizer come from; its experts need not be there
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Folder of the store [default: argodrive-store beside the experts' folder]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Format that the trunk is kept in: bf16, or int8 (half the memory, not weight-exact)
    #[arg(long, value_name = "FORMAT", default_value_t = TrunkFormat::Bf16)]
    trunk: TrunkFormat,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Adopts and prints what is there now.
pub fn run(args: Args) -> Result<ExitCode> {
    if !args.experts.is_dir() {
        bail!(
            "{}: no such folder; give the one that holds a file L<layer>-E<expert>.bin for each expert",
            args.experts.display()
        );
    }
    let store = match (&args.store, args.experts.canonicalize()) {
        (Some(store), _) => store.clone(),
        (None, Ok(folder)) => match folder.parent() {
            Some(parent) => parent.join("argodrive-store"),
            None => bail!("{}: has no folder beside it; give --store", args.experts.display()),
        },
        (None, Err(e)) => bail!("{}: {e}", args.experts.display()),
    };
    let bar = ByteBar::new("adopt");
    let report = adopt(&args.experts, &args.checkpoint, &store, args.trunk, BATCH_BYTES, &mut |at| bar.show(at));
    bar.finish();
    let mut report = report?;
    measure_trunk(&args.checkpoint, &store, &mut report.manifest, None)?;
    let m = &report.manifest;
    if args.json {
        print_json(&serde_json::json!({"store": store, "folder": report.folder, "model_id": m.model_id,
            "experts": report.digested + report.reused, "digested": report.digested, "reused": report.reused,
            "strangers": report.strangers, "expert_bytes": m.expert_bytes, "trunk_tensors": m.trunk.len(),
            "drive": report.drive.as_ref().ok(), "side_files": report.side_files,
            "trunk_format": m.trunk_format, "trunk_label": m.trunk_format.label(), "trunk_error": m.trunk_error}))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!(
        "{}: {} experts of {} in place, {} digests taken",
        report.folder.display(),
        report.digested + report.reused,
        bytes(m.expert_bytes),
        report.digested
    ))?;
    print(&format!("{}: trunk of {} tensors, model {} ({})", store.display(), m.trunk.len(), m.model_id, m.name))?;
    trunk_lines(m).iter().try_for_each(|line| print(line))?;
    if report.strangers > 0 {
        remark(&format!("{} more files are named like experts, but of none that this model has", report.strangers));
    }
    match (&report.drive, report.folder.parent()) {
        (Ok(_), Some(mount)) => {
            print(&format!("as a drive of a plan its path is {}", mount.display()))?;
        }
        (Err(reason), _) => remark(&format!("it is no drive of its own, only the store's: {reason}")),
        _ => {}
    }
    print(&format!("next: argodrive decode --store {} --prompt ...", store.display()))?;
    Ok(ExitCode::SUCCESS)
}
