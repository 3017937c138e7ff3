//! `argodrive drives`: what lies behind each mount, what drives share, and whether anything changed since last time.

use super::{REJECTED, WIDTH, print, print_json};
use crate::bench::record::utc_now;
use crate::drive::facts::{DriveFacts, OneDevice, Tables, one_device, shared};
use crate::drive::snapshot::{Change, SNAPSHOT_VERSION, Snapshot, drift};
use crate::drive::spec;
use crate::drive::topology::{DeviceFacts, Station};
use crate::report::table::{Align, Table};
use crate::report::units;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show the devices behind drives, their links, what they share, and what changed
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folders or mount points; without any, every mount that lies on a block device
    #[arg(value_name = "PATH", conflicts_with = "drives")]
    paths: Vec<PathBuf>,
    /// The drives, as `[[drive]]` tables
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// Write what is seen to this file; if it is there, first say what changed (exit code 1)
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    /// Say what changed since this snapshot (exit code 1), and leave it as it is
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let drives = look(&args)?;
    if drives.is_empty() {
        bail!("no mount lies on a block device; name the folders");
    }
    let last = args.snapshot.as_ref().filter(|p| p.exists());
    let mut compared = false;
    let mut changes: Vec<Change> = Vec::new();
    for then in [args.check.as_ref(), last].into_iter().flatten() {
        compared = true;
        for change in drift(&Snapshot::load(then)?.drives, &drives) {
            if !changes.contains(&change) {
                changes.push(change);
            }
        }
    }
    if let Some(path) = &args.snapshot {
        let snapshot = Snapshot { version: SNAPSHOT_VERSION, made: utc_now(), drives: drives.clone() };
        snapshot.save(path).with_context(|| format!("--snapshot {}", path.display()))?;
    }
    let (one, links) = (one_device(&drives), shared(&drives));
    if args.json {
        let names = |members: &[usize]| members.iter().map(|&i| drives[i].name.clone()).collect::<Vec<_>>();
        let link = |(station, members): &(Station, Vec<usize>)| json!({"name": station.name, "bytes_per_s": station.bytes_per_s, "drives": names(members)});
        let same = |o: &OneDevice| json!({"device": o.device, "drives": names(&o.drives)});
        print_json(&json!({
            "drives": drives,
            "one_device": one.iter().map(same).collect::<Vec<_>>(),
            "shared": links.iter().map(link).collect::<Vec<_>>(),
            "drift": compared.then_some(&changes),
        }))?;
    } else {
        show(&drives, &one, &links)?;
        if compared {
            show_drift(&changes)?;
        }
        if let Some(path) = &args.snapshot {
            print(&format!("snapshot  {}", path.display()))?;
        }
    }
    Ok(if changes.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REJECTED) })
}

fn look(args: &Args) -> Result<Vec<DriveFacts>> {
    let tables = Tables::system();
    if let Some(file) = &args.drives {
        return tables.drives(&spec::load(file)?).with_context(|| file.display().to_string());
    }
    if args.paths.is_empty() {
        return Ok(tables.mounts()?);
    }
    args.paths.iter().map(|p| Ok(tables.facts(&p.to_string_lossy(), p, false)?)).collect()
}

fn show(drives: &[DriveFacts], one: &[OneDevice], links: &[(Station, Vec<usize>)]) -> Result<()> {
    let mut table = Table::new([
        ("drive", Align::Left),
        ("device", Align::Left),
        ("model", Align::Left),
        ("link", Align::Left),
        ("sector", Align::Right),
        ("direct", Align::Right),
        ("fs", Align::Left),
        ("free", Align::Right),
    ]);
    for drive in drives {
        let first = [
            if drive.emulated { format!("{} (emulated)", drive.name) } else { drive.name.clone() },
            drive.dio_bytes.map_or("–".into(), |(_, offset)| offset.to_string()),
            drive.file_system.clone().unwrap_or("?".into()) + if drive.read_only { " ro" } else { "" },
            drive.free_bytes.map_or("–".into(), units::bytes),
        ];
        let rows = drive.devices.iter().map(Some).chain(drive.devices.is_empty().then_some(None));
        for (at, device) in rows.enumerate() {
            let [name, direct, fs, free] = if at == 0 { first.clone() } else { Default::default() };
            let [kernel, model, link, sector] =
                device.map_or(["unknown".into(), "".into(), "".into(), "".into()], cells);
            table.row([name, kernel, model, link, sector, direct, fs, free]);
        }
    }
    print(table.render(WIDTH).trim_end())?;
    let mut said = BTreeSet::new();
    for device in drives.iter().flat_map(|d| &d.devices).filter(|d| said.insert(d.name.clone())) {
        print(&device_line(device))?;
    }
    for drive in drives {
        remarks(drive)?;
    }
    let names = |members: &[usize]| members.iter().map(|&i| drives[i].name.as_str()).collect::<Vec<_>>().join(", ");
    for o in one {
        print(&format!(
            "ONE DRIVE: {} are folders on one device ({}); its speed counts once",
            names(&o.drives),
            o.device
        ))?;
    }
    for (station, members) in links.iter().filter(|(s, _)| !s.name.starts_with("one device")) {
        let rate = station.bytes_per_s.map_or(String::new(), |r| format!(", {} at most", units::rate(r)));
        print(&format!("shared: {} behind {}{rate}", names(members), station.name))?;
    }
    if drives.iter().any(|d| d.emulated) {
        print("Emulated drives have a pace of their own: devices and links are those of the disk behind them.")?;
    }
    Ok(())
}

fn cells(device: &DeviceFacts) -> [String; 4] {
    let kind = match device.rotational {
        Some(true) => format!("{} rot.", device.name),
        _ => device.name.clone(),
    };
    let model = device.model.clone().unwrap_or(device.bus.clone());
    let link = device.link.as_ref().map_or("–".into(), |l| match &l.most {
        Some(most) => format!("{} (could be {most})", l.now),
        None => l.now.clone(),
    });
    let sector = device.sector_bytes.map_or("–".into(), |(logical, physical)| format!("{logical}/{physical}"));
    [kind, model, link, sector]
}

/// What the table has no room for.
fn device_line(device: &DeviceFacts) -> String {
    let kind = match device.rotational {
        Some(true) => ", rotational",
        Some(false) => ", not rotational",
        None => "",
    };
    let serial = match &device.serial_hash {
        Some(hash) => format!("serial number #{hash} (hashed)"),
        None => "no serial number".into(),
    };
    format!("{}: {} on {}{kind}, {serial}", device.name, units::bytes(device.bytes), device.bus)
}

fn remarks(drive: &DriveFacts) -> Result<()> {
    if let Some(unknown) = &drive.unknown {
        print(&format!("{}: {unknown}", drive.name))?;
    }
    if !drive.layers.is_empty() {
        print(&format!("{}: through {}", drive.name, drive.layers.join(" on ")))?;
    }
    if let Some(folder) = &drive.mounted_folder {
        print(&format!("{}: mounted from folder {folder} of its file system", drive.name))?;
    }
    for device in &drive.devices {
        if let Some(file) = &device.backing_file {
            let disks = drive.backing.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
            let on = if disks.is_empty() { String::new() } else { format!(" on {disks}") };
            print(&format!("{}: {} is the file {file}{on}", drive.name, device.name))?;
        }
    }
    Ok(())
}

fn show_drift(changes: &[Change]) -> Result<()> {
    if changes.is_empty() {
        return print("no drift: the drives are as they were");
    }
    for c in changes {
        print(&format!("DRIFT: {}: {} was {}, is {}", c.drive, c.what, c.then, c.now))?;
    }
    Ok(())
}
