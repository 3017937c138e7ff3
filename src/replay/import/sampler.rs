//! The public sampler's CSV: `t_s,dev,v1,v2,v3`, cumulative counters of every disk, several rows per tick. Only rows of
//! disks become windows. Which disk is which drive says a map file; without one every disk stays unattributed.

use super::{DriveCodes, ImportReport, begin};
use crate::replay::ReplayError;
use crate::replay::windows::{WINDOW_COLUMNS, WINDOWS_FILE};
use crate::trace::log::{Imported, TraceError, TraceHeader, write_header};
use crate::trace::rows::{Rows, parse_whole};
use crate::trace::stream::{Growing, Skipped};
use crate::trace::windows::Ms;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Columns of the file.
const COLUMNS: [&str; 5] = ["t_s", "dev", "v1", "v2", "v3"];
/// Largest map file that is read.
const MAX_MAP_BYTES: u64 = 1 << 20;
/// Most devices of one file.
const MAX_DEVICES: usize = 1024;

/// Which role each disk has, from the text of a map: `role=diskN` items anywhere in it.
pub fn parse_map(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut roles = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for item in text.trim_start_matches('\u{feff}').split_whitespace() {
        let Some((role, disk)) = item.split_once('=') else { continue };
        if role.is_empty() || !is_disk(disk.as_bytes()) {
            return Err(format!("`{item}` is not role=diskN"));
        }
        if !taken.insert(role.to_owned()) {
            return Err(format!("role `{role}` stands twice"));
        }
        if let Some(other) = roles.insert(disk.to_owned(), role.to_owned()) {
            return Err(format!("{disk} is both `{other}` and `{role}`"));
        }
    }
    if roles.is_empty() {
        return Err("no role=diskN in it".into());
    }
    Ok(roles)
}

fn is_disk(name: &[u8]) -> bool {
    name.strip_prefix(b"disk").is_some_and(|n| parse_whole(n).is_some())
}

/// Counters of a disk at a tick.
#[derive(Clone, Copy, Default)]
struct Counters {
    t_ns: u64,
    bytes: u64,
    reads: u64,
    io_ns: u64,
}

/// Turns the file at `path` into a trace folder `out` with `windows.csv`.
pub fn import(path: &Path, map: Option<&Path>, out: &Path, lenient: bool) -> Result<ImportReport, ReplayError> {
    let roles = map.map(read_map).transpose()?;
    begin(out)?;
    let mut rows = Rows::open(path, &COLUMNS)?;
    let mut file = Growing::create(&out.join(WINDOWS_FILE))?;
    write_line(&mut file, &WINDOW_COLUMNS.map(|c| c.0).join(","))?;
    let mut last: BTreeMap<String, Counters> = BTreeMap::new();
    let (mut skipped, mut windows, mut others) = (Skipped::default(), 0u64, BTreeMap::<String, u64>::new());
    let mut line = String::new();
    let mut clock_ns = 0;
    loop {
        line.clear();
        let row = match rows.next_row() {
            Ok(None) => break,
            Ok(Some(row)) => {
                let device = row.text(1);
                if is_disk(device.as_bytes()) {
                    row.scaled(0, 9).and_then(|t_ns| {
                        if t_ns < clock_ns {
                            return Err(row.error(0, format!("time goes back, it was {clock_ns} ns")));
                        }
                        clock_ns = t_ns;
                        let now = Counters { t_ns, bytes: row.u64(2)?, reads: row.u64(3)?, io_ns: row.u64(4)? };
                        if last.len() >= MAX_DEVICES && !last.contains_key(&device) {
                            return Err(row.error(1, format!("more than {MAX_DEVICES} devices")));
                        }
                        match last.get(&device).copied() {
                            None => {
                                let _ = writeln!(line, "{},device,{device},,,,0,0,0,1", Ms(t_ns));
                            }
                            Some(before) => {
                                if t_ns == before.t_ns {
                                    return Err(row.error(1, format!("`{device}` stands twice in one tick")));
                                }
                                let less = |column: usize, a: u64, b: u64| {
                                    a.checked_sub(b).ok_or_else(|| {
                                        row.error(column, format!("the counter of `{device}` goes back, it was {b}"))
                                    })
                                };
                                let bytes = less(2, now.bytes, before.bytes)?;
                                let reads = less(3, now.reads, before.reads)?;
                                let io_ns = less(4, now.io_ns, before.io_ns)?;
                                let _ =
                                    writeln!(line, "{},device,{device},,,,{bytes},{reads},{},0", Ms(t_ns), Ms(io_ns));
                                windows += 1;
                            }
                        }
                        last.insert(device, now);
                        Ok(())
                    })
                } else if device.is_empty() {
                    Err(row.error(1, "no device".into()))
                } else {
                    if others.len() < MAX_DEVICES {
                        *others.entry(device).or_default() += 1;
                    }
                    Ok(())
                }
            }
            Err(e) => Err(e),
        };
        skipped.pass(row, lenient)?;
        if !line.is_empty() {
            file.write_all(line.as_bytes()).map_err(|e| file.io(e))?;
        }
    }
    file.finish()?;
    let (codes, said) = attribution(&last, &others, roles.as_ref());
    let mut drives = codes.trace_drives();
    for drive in &mut drives {
        let disk = roles.iter().flatten().find(|(_, role)| **role == drive.name);
        drive.path = disk.map_or_else(PathBuf::new, |(disk, _)| PathBuf::from(disk));
    }
    let files = [Some(path), map].into_iter().flatten().map(Path::to_path_buf).collect();
    let imported = Imported { format: "sampler".into(), files, assumptions: said.clone() };
    write_header(out, &TraceHeader { imported: Some(imported), ..TraceHeader::new(drives) })?;
    Ok(ImportReport {
        format: "sampler".into(),
        reads: 0,
        barriers: 0,
        windows,
        drives: codes.names,
        assumptions: said,
        skipped_rows: skipped.rows,
        skipped_first: skipped.first,
    })
}

/// Drives that the map names, and what is to be said about the rest.
fn attribution(
    disks: &BTreeMap<String, Counters>,
    others: &BTreeMap<String, u64>,
    roles: Option<&BTreeMap<String, String>>,
) -> (DriveCodes, Vec<String>) {
    let mut codes = DriveCodes::default();
    let mut said = vec!["the counters grow since boot; a window is the difference of two ticks of one disk".to_owned()];
    let mut unattributed = Vec::new();
    for disk in disks.keys() {
        match roles.and_then(|r| r.get(disk)) {
            Some(role) if codes.id(role.as_bytes()).is_some() => {}
            _ => unattributed.push(disk.as_str()),
        }
    }
    if roles.is_none() {
        said.push("no map file: which disk is which drive is unknown".into());
    }
    if !unattributed.is_empty() {
        said.push(format!("unattributed disks: {}", unattributed.join(", ")));
    }
    for (disk, role) in roles.into_iter().flatten().filter(|(disk, _)| !disks.contains_key(*disk)) {
        said.push(format!("the map names {disk} as `{role}`, but the file has no such disk"));
    }
    if !others.is_empty() {
        let names: Vec<&str> = others.keys().map(String::as_str).collect();
        said.push(format!("rows that are no disk reads were left out: {}", names.join(", ")));
    }
    (codes, said)
}

fn read_map(path: &Path) -> Result<BTreeMap<String, String>, ReplayError> {
    let io = |source| TraceError::Io { path: path.to_path_buf(), source };
    if std::fs::metadata(path).map_err(io)?.len() > MAX_MAP_BYTES {
        return Err(ReplayError::Input(format!("--map {}: larger than {MAX_MAP_BYTES} bytes", path.display())));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    parse_map(&String::from_utf8_lossy(&bytes))
        .map_err(|reason| ReplayError::Input(format!("--map {}: {reason}", path.display())))
}

fn write_line(file: &mut Growing, line: &str) -> Result<(), TraceError> {
    writeln!(file, "{line}").map_err(|e| file.io(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_role_equals_disk_and_nothing_is_guessed() {
        let roles = parse_map("[k3-measure] G1_ON  device map: internal=disk0 Yellow=disk4\n").unwrap();
        assert_eq!(roles["disk0"], "internal");
        assert_eq!(roles.len(), 2);
        for bad in ["", "nothing here", "a=sda", "a=disk", "=disk1", "a=disk1 b=disk1", "a=disk1 a=disk2", "a=disk-1"] {
            assert!(parse_map(bad).is_err(), "{bad}");
        }
    }
}
