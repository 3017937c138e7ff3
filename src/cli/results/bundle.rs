//! `argodrive results bundle`: records, figures and hashed serial numbers in one file to share.

use super::super::verdict::wrapped;
use super::super::{REJECTED, print, print_json, remark};
use crate::bench::catalogue::bundle::pack;
use crate::bench::catalogue::scrub::Scrub;
use crate::report::units::bytes;
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Pack records, figures and hashed serial numbers into one file to share
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Records, or folders with records; default: results
    #[arg(value_name = "RECORD", default_value = "results")]
    records: Vec<PathBuf>,
    /// The file, a .tar.gz that any tar unpacks
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// What to call this machine; default: a name made from the contents
    #[arg(long, value_name = "NAME")]
    label: Option<String>,
    /// Leave out the text of prompts
    #[arg(long)]
    no_prompts: bool,
    /// Replace the file if it is there
    #[arg(long)]
    force: bool,
    /// Exit 1 if a record had to be left out
    #[arg(long)]
    strict: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    if args.out.exists() && !args.force {
        bail!("--out {}: is there already; --force replaces it", args.out.display());
    }
    if !args.records.iter().any(|r| r.exists()) {
        let all: Vec<String> = args.records.iter().map(|r| r.display().to_string()).collect();
        bail!("{}: no such record or folder", all.join(", "));
    }
    let mut scrub = Scrub::here();
    scrub.without_prompts = args.no_prompts;
    let packed = pack(&args.records, args.label.as_deref(), scrub)?;
    for fault in &packed.faults {
        remark(&format!("left out: {}", fault.reason));
    }
    write_atomic(&args.out, &packed.bytes).with_context(|| format!("--out {}", args.out.display()))?;
    let (manifest, size) = (&packed.manifest, packed.bytes.len() as u64);
    if args.json {
        print_json(&serde_json::json!({
            "out": args.out, "bytes": size, "label": manifest.label, "records": packed.records,
            "figures": packed.figures, "devices": manifest.devices, "foreign": packed.foreign,
            "left_out": packed.faults.iter().map(|f| &f.path).collect::<Vec<_>>(),
        }))?;
    } else {
        let (records, figures) = (packed.records, packed.figures);
        print(&format!("bundle  {}, {records} records, {figures} figures", bytes(size)))?;
        print(&format!("label   {}", manifest.label))?;
        let hashed = manifest.devices.iter().filter(|d| d.serial_hash.is_some()).count();
        print(&format!("devices {}, {hashed} with a hashed serial number", manifest.devices.len()))?;
        let prompts =
            if args.no_prompts { "prompts are left out" } else { "prompts are in it (--no-prompts leaves them out)" };
        print(&wrapped(&format!(
            "paths are cut to their last part, names of users and of this host replaced; {prompts}; look into it before you \
             share it: tar xzf {}",
            args.out.display()
        )))?;
        if packed.foreign > 0 {
            print(&wrapped(&format!("{} imported records are not passed on: share their own bundle", packed.foreign)))?;
        }
        print(&args.out.display().to_string())?;
    }
    Ok(if args.strict && !packed.faults.is_empty() { ExitCode::from(REJECTED) } else { ExitCode::SUCCESS })
}
