//! `argodrive testbed`: drives to break, on loop devices.

use super::{WIDTH, print, print_json};
use crate::drive::testbed::{DRIVES_FILE, Testbed};
use crate::drive::units::parse_bytes;
use crate::report::table::{Align, Table};
use crate::report::units;
use anyhow::Result;
use clap::Subcommand;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Make drives that can be broken, on loop devices (needs root)
///
/// Each is a file system of its own with direct I/O. They share the speed of the disk below, so they are for trying what happens when
/// a drive is full, fails or comes back, and not for measuring what several drives bring.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sudo argodrive testbed up --drives 4 --size 512MB
  argodrive plan --store store --drives argodrive-testbed/drives.toml --policy layouts/full-mirror.toml --out plan.json
  sudo argodrive testbed unplug bed2      # while a decode runs: its reads go to the other copies
  sudo argodrive testbed plug bed2
  sudo argodrive testbed down")]
pub struct Args {
    #[command(subcommand)]
    command: BedCommand,
    /// The folder of the bed
    #[arg(long, value_name = "DIR", default_value = "argodrive-testbed", global = true)]
    dir: PathBuf,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum BedCommand {
    /// Make the drives and write their drives.toml
    Up {
        /// How many
        #[arg(long, value_name = "N", default_value_t = 4)]
        drives: usize,
        /// Size of each
        #[arg(long, value_name = "BYTES", default_value = "512MB", value_parser = parse_bytes)]
        size: u64,
    },
    /// Cut a drive off while it is mounted: reads fail with EIO, nothing is lost
    Unplug {
        /// Its name
        drive: String,
    },
    /// Bring a drive back
    Plug {
        /// Its name
        drive: String,
    },
    /// Say what there is
    Show,
    /// Take everything down and remove it, contents included
    Down,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let dir = &args.dir;
    let bed = match &args.command {
        BedCommand::Up { drives, size } => Testbed::up(dir, *drives, *size)?,
        BedCommand::Unplug { drive } => switched(dir, drive, true)?,
        BedCommand::Plug { drive } => switched(dir, drive, false)?,
        BedCommand::Show => Testbed::open(dir)?,
        BedCommand::Down => {
            Testbed::open(dir)?.down(dir)?;
            if args.json {
                print_json(&json!({"drives": []}))?;
            } else {
                print("the test bed is gone")?;
            }
            return Ok(ExitCode::SUCCESS);
        }
    };
    let file = dir.join(DRIVES_FILE);
    if args.json {
        print_json(&json!({"drives_file": file, "drive_bytes": bed.drive_bytes, "drives": bed.drives}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table =
        Table::new([("drive", Align::Left), ("device", Align::Left), ("size", Align::Right), ("state", Align::Left)]);
    for drive in &bed.drives {
        let device = drive.device.as_ref().map_or_else(|| "-".into(), |d| d.display().to_string());
        let state = if drive.unplugged { "unplugged" } else { "plugged" };
        table.row([drive.name.clone(), device, units::bytes(bed.drive_bytes), state.into()]);
    }
    print(table.render(WIDTH).trim_end())?;
    print("Loop devices on one disk: they fail like drives and are not as fast as several.")?;
    print(&format!("drives  {}", file.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn switched(dir: &Path, drive: &str, unplugged: bool) -> Result<Testbed> {
    let mut bed = Testbed::open(dir)?;
    bed.set_unplugged(dir, drive, unplugged)?;
    Ok(bed)
}
