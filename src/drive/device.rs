//! From a folder to the block device that moves its bytes, and that device's own counters. A partition counts as its
//! disk, a device-mapper or RAID device as what it is made of, a loop device as itself. What cannot be mapped (network
//! and overlay file systems, other kernels) is said to be unknown, never guessed.

use super::spec::device_number;
use std::fs;
use std::path::{Path, PathBuf};

/// Levels of device-mapper and RAID that are followed.
const MAX_STACK: usize = 8;
/// Sectors in the kernel's counters have this size whatever the device says (Documentation/block/stat).
const SECTOR_BYTES: u64 = 512;

/// A block device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockDevice {
    /// Kernel name, e.g. `nvme0n1`.
    pub name: String,
    /// Its folder in sysfs.
    pub sysfs: PathBuf,
}

/// The devices under `path`, each once, by name; empty when they cannot be found out.
pub fn devices_of(path: &Path) -> Vec<BlockDevice> {
    let Ok(number) = device_number(path) else { return Vec::new() };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let Ok(folder) = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")) else { return Vec::new() };
    let mut out = Vec::new();
    descend(&folder, &mut out, 0);
    out.sort();
    out.dedup();
    out
}

fn descend(folder: &Path, out: &mut Vec<BlockDevice>, level: usize) {
    let disk = if folder.join("partition").exists() { folder.parent().unwrap_or(folder) } else { folder };
    let below: Vec<PathBuf> = fs::read_dir(disk.join("slaves"))
        .map(|entries| entries.flatten().filter_map(|e| fs::canonicalize(e.path()).ok()).collect())
        .unwrap_or_default();
    if below.is_empty() || level >= MAX_STACK {
        let name = disk.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        out.push(BlockDevice { name, sysfs: disk.to_path_buf() });
        return;
    }
    for folder in below {
        descend(&folder, out, level + 1);
    }
}

impl BlockDevice {
    /// Bytes read from the device since it appeared, as its own counter says.
    pub fn read_bytes(&self) -> Option<u64> {
        let stat = fs::read_to_string(self.sysfs.join("stat")).ok()?;
        parse_sectors_read(&stat)?.checked_mul(SECTOR_BYTES)
    }

    /// Name and size: changes when another disk takes the name.
    pub fn identity(&self) -> String {
        let sectors = fs::read_to_string(self.sysfs.join("size")).unwrap_or_default();
        format!("{}:{}", self.name, sectors.trim())
    }
}

/// What a folder's devices are, as one string for a plan; empty when unknown.
pub fn identity_of(path: &Path) -> String {
    devices_of(path).iter().map(BlockDevice::identity).collect::<Vec<_>>().join("+")
}

/// The third number of a `stat` line.
fn parse_sectors_read(stat: &str) -> Option<u64> {
    stat.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_third_number_is_sectors_read() {
        assert_eq!(parse_sectors_read("  12  3  4096 8 9 10 11 0 5 6 7"), Some(4096));
        assert_eq!(parse_sectors_read("1 2"), None);
        assert_eq!(parse_sectors_read("1 2 x"), None);
    }

    #[test]
    fn a_partition_counts_as_its_disk_and_a_mapping_as_what_is_below() {
        let dir = tempfile::tempdir().unwrap();
        let make = |p: &str| {
            let path = dir.path().join(p);
            fs::create_dir_all(&path).unwrap();
            path
        };
        let disk = make("sda");
        let part = make("sda/sda1");
        fs::write(part.join("partition"), "1\n").unwrap();
        fs::write(disk.join("stat"), "1 2 30 4 5 6 7 8 9 10 11\n").unwrap();
        let mapped = make("dm-0/slaves").parent().unwrap().to_path_buf();
        std::os::unix::fs::symlink(&part, mapped.join("slaves/sda1")).unwrap();
        let mut out = Vec::new();
        descend(&mapped, &mut out, 0);
        assert_eq!(out.len(), 1);
        assert_eq!((out[0].name.as_str(), out[0].read_bytes()), ("sda", Some(30 * 512)));
    }
}
