//! From a folder to the block device that moves its bytes, and that device's own counters. A partition counts as its
//! disk, a device-mapper or RAID device as what it is made of, a loop device as itself (`blockmap`). What cannot be mapped
//! (network and overlay file systems, other kernels) is said to be unknown, never guessed.

use super::blockmap::BlockMap;
use crate::sys::blockstat::CounterFile;
use std::fs;
use std::path::{Path, PathBuf};

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
    BlockMap::system().of_path(path).map(|mapped| mapped.devices).unwrap_or_default()
}

impl BlockDevice {
    /// Bytes read from the device since it appeared, as its own counter says.
    pub fn read_bytes(&self) -> Option<u64> {
        let file = CounterFile::device(&self.sysfs).ok()?;
        file.read().ok()?.units.checked_mul(file.unit_bytes())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_counts_sectors_of_512_bytes_and_is_known_by_name_and_size() {
        let dir = tempfile::tempdir().unwrap();
        let device = BlockDevice { name: "sda".into(), sysfs: dir.path().to_path_buf() };
        assert_eq!((device.read_bytes(), device.identity()), (None, "sda:".to_owned()));
        fs::write(dir.path().join("stat"), "1 2 30 4 5 6 7 8 9 10 11\n").unwrap();
        fs::write(dir.path().join("size"), "99\n").unwrap();
        assert_eq!((device.read_bytes(), device.identity()), (Some(30 * 512), "sda:99".to_owned()));
    }
}
