//! From a mount, a path or a device's name to the block devices that move its bytes.
//!
//! What [`BlockMap`] returns is a [`Mapped`]: `devices` are those whose counters see every byte **once** (a partition is
//! its disk; device-mapper and RAID are what they are made of; a loop device is itself, because it is the drive that
//! somebody made), and `backing` are the disks under loop devices, which see the same bytes a second time and must be
//! left out of sums. Both are sorted and hold nothing twice. What has no block device (memory, overlay and network file
//! systems) is an error that says so; nothing is guessed. Links, models and speeds are not known here.

use super::device::BlockDevice;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Levels of partitions, device-mapper, RAID and loop devices that are followed.
const MAX_STACK: usize = 16;

/// Why something has no devices.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// It is not there.
    #[error("{}: {source}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its file system lies on none.
    #[error("{} lies on {file_system}, which has no block device to watch", path.display())]
    NoDevice {
        /// The path.
        path: PathBuf,
        /// The file system's type.
        file_system: String,
    },
    /// It is neither a device nor a path.
    #[error("`{name}` is neither a block device nor a path; block devices here: {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// Devices that there are.
        known: String,
    },
}

/// The devices behind something; see the head of this file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapped {
    /// Devices that move its bytes, each byte through one of them.
    pub devices: Vec<BlockDevice>,
    /// Disks that hold the files behind loop devices among them.
    pub backing: Vec<BlockDevice>,
}

/// The kernel's tables of devices and mounts.
#[derive(Clone, Debug)]
pub struct BlockMap {
    sysfs: PathBuf,
    mountinfo: PathBuf,
}

impl BlockMap {
    /// Those of this machine.
    pub fn system() -> Self {
        Self::at(Path::new("/sys"), Path::new("/proc/self/mountinfo"))
    }

    /// Those of a tree like `/sys` and a file like `/proc/self/mountinfo`.
    pub fn at(sysfs: &Path, mountinfo: &Path) -> Self {
        Self { sysfs: sysfs.to_path_buf(), mountinfo: mountinfo.to_path_buf() }
    }

    /// The devices of a kernel name (`vda`, `sda1`, `dm-0`), of a device file or of any other path.
    pub fn of(&self, what: &str) -> Result<Mapped, MapError> {
        if let Some(found) = self.of_name(what) {
            return Ok(found);
        }
        let path = Path::new(what);
        // A bare word that is no path either was meant as a device.
        if !what.contains('/') && !path.exists() {
            let known = self.names().join(", ");
            let known = if known.is_empty() { "none".into() } else { known };
            return Err(MapError::Unknown { name: what.into(), known });
        }
        self.of_path(path)
    }

    /// The devices of the device called `name`, if there is one.
    pub fn of_name(&self, name: &str) -> Option<Mapped> {
        if name.is_empty() || name.contains('/') || name.starts_with('.') {
            return None;
        }
        Some(self.below(&fs::canonicalize(self.sysfs.join("class/block").join(name)).ok()?))
    }

    /// The devices that hold `path`, or that a device file stands for.
    pub fn of_path(&self, path: &Path) -> Result<Mapped, MapError> {
        let io = |source| MapError::Path { path: path.to_path_buf(), source };
        let metadata = fs::metadata(path).map_err(io)?;
        let device_file = metadata.file_type().is_block_device();
        let number = if device_file { metadata.rdev() } else { metadata.dev() };
        if let Some(found) = self.of_number(number) {
            return Ok(found);
        }
        // File systems over several devices (btrfs) have numbers of their own; the mount table names a device of theirs.
        let mounted = self.mount_of(&fs::canonicalize(path).map_err(io)?);
        let (kind, source) = mounted.unwrap_or_else(|| ("an unknown file system".into(), String::new()));
        let named = fs::metadata(&source).ok().filter(|m| m.file_type().is_block_device());
        named
            .and_then(|m| self.of_number(m.rdev()))
            .ok_or_else(|| MapError::NoDevice { path: path.to_path_buf(), file_system: kind })
    }

    /// The devices of a device number, if it is one of a block device.
    pub fn of_number(&self, number: u64) -> Option<Mapped> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let folder = fs::canonicalize(self.sysfs.join(format!("dev/block/{major}:{minor}"))).ok()?;
        Some(self.below(&folder))
    }

    /// Devices that are hardware: no loop, memory, device-mapper or RAID device, and none without a medium.
    pub fn physical(&self) -> Vec<BlockDevice> {
        let real = |d: &BlockDevice| {
            let hidden = fs::read_to_string(d.sysfs.join("hidden")).is_ok_and(|text| text.trim() == "1");
            d.sysfs.join("device").exists() && !hidden && has_medium(d)
        };
        self.all().into_iter().filter(real).collect()
    }

    /// Names of all devices that hold anything, sorted.
    pub fn names(&self) -> Vec<String> {
        self.all().into_iter().filter(has_medium).map(|d| d.name).collect()
    }

    fn all(&self) -> Vec<BlockDevice> {
        let entries = fs::read_dir(self.sysfs.join("block")).into_iter().flatten().flatten();
        let folders = entries.filter_map(|e| fs::canonicalize(e.path()).ok());
        folders.map(|f| device(&f)).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn below(&self, folder: &Path) -> Mapped {
        let (mut devices, mut backing) = (BTreeSet::new(), BTreeSet::new());
        self.descend(folder, &mut devices, &mut backing, 0);
        backing.retain(|d| !devices.contains(d));
        Mapped { devices: devices.into_iter().collect(), backing: backing.into_iter().collect() }
    }

    fn descend(
        &self,
        folder: &Path,
        devices: &mut BTreeSet<BlockDevice>,
        backing: &mut BTreeSet<BlockDevice>,
        level: usize,
    ) {
        let disk = if folder.join("partition").exists() { folder.parent().unwrap_or(folder) } else { folder };
        let below: Vec<PathBuf> = fs::read_dir(disk.join("slaves"))
            .map(|entries| entries.flatten().filter_map(|e| fs::canonicalize(e.path()).ok()).collect())
            .unwrap_or_default();
        if !below.is_empty() && level < MAX_STACK {
            return below.iter().for_each(|folder| self.descend(folder, devices, backing, level + 1));
        }
        devices.insert(device(disk));
        let file = fs::read_to_string(disk.join("loop/backing_file"));
        let held = file.ok().and_then(|f| fs::metadata(f.trim_end_matches('\n')).ok());
        let held = held.filter(|_| level < MAX_STACK).and_then(|m| {
            let number = if m.file_type().is_block_device() { m.rdev() } else { m.dev() };
            let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
            fs::canonicalize(self.sysfs.join(format!("dev/block/{major}:{minor}"))).ok()
        });
        if let Some(folder) = held {
            let mut under = BTreeSet::new();
            self.descend(&folder, &mut under, backing, level + 1);
            backing.extend(under);
        }
    }

    /// Type and source of the mount that holds `path`; the longest mount point wins, and of equal ones the later.
    fn mount_of(&self, path: &Path) -> Option<(String, String)> {
        let table = fs::read_to_string(&self.mountinfo).ok()?;
        let mount = |line: &str| {
            let (front, back) = line.split_once(" - ")?;
            let point = unescaped(front.split(' ').nth(4)?);
            let mut back = back.split(' ');
            let (kind, source) = (back.next()?.to_string(), unescaped(back.next()?));
            path.starts_with(&point).then_some((point.len(), kind, source))
        };
        table.lines().filter_map(mount).max_by_key(|m| m.0).map(|(_, kind, source)| (kind, source))
    }
}

fn device(folder: &Path) -> BlockDevice {
    let name = folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    BlockDevice { name, sysfs: folder.to_path_buf() }
}

fn has_medium(device: &BlockDevice) -> bool {
    fs::read_to_string(device.sysfs.join("size")).is_ok_and(|sectors| sectors.trim() != "0")
}

/// The mount table writes blanks and backslashes as three octal digits.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                out.extend_from_slice(&part.as_bytes()[3..]);
            }
            None => {
                out.push(b'\\');
                out.extend_from_slice(part.as_bytes());
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A tree like `/sys`, with device numbers that no real device has: two disks, one with partitions; a RAID over a partition and a disk, an encrypted volume over
    /// the RAID; a loop device over a file; a card reader without a card.
    struct Fake {
        dir: tempfile::TempDir,
        map: BlockMap,
    }

    impl Fake {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for folder in ["block", "class/block", "dev/block"] {
                fs::create_dir_all(dir.path().join(folder)).unwrap();
            }
            fs::write(dir.path().join("mountinfo"), "").unwrap();
            let map = BlockMap::at(dir.path(), &dir.path().join("mountinfo"));
            let fake = Self { dir, map };
            for (at, number) in [("sda", "1008:0"), ("sda/sda1", "1008:1"), ("sda/sda2", "1008:2"), ("sdb", "1008:16")]
            {
                fake.add(at, number, "4096");
            }
            fake.add("sdc", "1008:32", "0");
            for (at, number) in [("md0", "1009:0"), ("dm-0", "1253:0"), ("loop0", "1007:0"), ("zram0", "1254:0")] {
                fake.add(at, number, "4096");
            }
            for disk in ["sda", "sdb", "sdc"] {
                fake.put(&format!("devices/{disk}/device/model"), "x");
            }
            for (part, number) in [("sda/sda1", "1"), ("sda/sda2", "2")] {
                fake.put(&format!("devices/{part}/partition"), number);
            }
            for (whole, part) in [("md0", "sda/sda1"), ("md0", "sdb"), ("dm-0", "md0")] {
                fake.link(part, &format!("devices/{whole}/slaves/{}", part.replace('/', "-")));
            }
            fs::create_dir_all(fake.dir.path().join("devices/sda/slaves")).unwrap();
            fake
        }

        fn put(&self, at: &str, text: &str) {
            let path = self.dir.path().join(at);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn link(&self, device: &str, at: &str) {
            let path = self.dir.path().join(at);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(self.dir.path().join("devices").join(device), path).unwrap();
        }

        fn add(&self, at: &str, number: &str, sectors: &str) {
            self.put(&format!("devices/{at}/size"), &format!("{sectors}\n"));
            let name = at.rsplit('/').next().unwrap();
            self.link(at, &format!("class/block/{name}"));
            self.link(at, &format!("dev/block/{number}"));
            if !at.contains('/') {
                self.link(at, &format!("block/{name}"));
            }
        }

        /// The number that files of this folder have belongs to `device`.
        fn holds_files(&self, device: &str) {
            let number = fs::metadata(self.dir.path()).unwrap().dev();
            let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
            let link = self.dir.path().join(format!("dev/block/{major}:{minor}"));
            let _ = fs::remove_file(&link);
            symlink(self.dir.path().join("devices").join(device), link).unwrap();
        }
    }

    fn names(devices: &[BlockDevice]) -> Vec<&str> {
        devices.iter().map(|d| d.name.as_str()).collect()
    }

    #[test]
    fn every_stack_ends_at_devices_that_see_each_byte_once() {
        let fake = Fake::new();
        for (name, wanted) in [
            ("sda", vec!["sda"]),
            ("sda1", vec!["sda"]),
            ("md0", vec!["sda", "sdb"]),
            ("dm-0", vec!["sda", "sdb"]),
            ("zram0", vec!["zram0"]),
        ] {
            let found = fake.map.of_name(name).unwrap();
            assert_eq!((names(&found.devices), found.backing.len()), (wanted, 0), "{name}");
        }
        // two partitions of one disk under one volume are that disk, once
        fake.link("sda/sda2", "devices/md0/slaves/sda2");
        assert_eq!(names(&fake.map.of_name("dm-0").unwrap().devices), ["sda", "sdb"]);
        let number = rustix::fs::makedev(1253, 0);
        assert_eq!(names(&fake.map.of_number(number).unwrap().devices), ["sda", "sdb"]);
        assert_eq!(fake.map.of_number(rustix::fs::makedev(1099, 9)), None);
    }

    #[test]
    fn a_loop_device_is_the_drive_and_the_disk_under_its_file_is_named_apart() {
        let fake = Fake::new();
        fake.put("image", "x");
        fake.holds_files("sda/sda2");
        fake.put("devices/loop0/loop/backing_file", &format!("{}\n", fake.dir.path().join("image").display()));
        let found = fake.map.of_name("loop0").unwrap();
        assert_eq!((names(&found.devices), names(&found.backing)), (vec!["loop0"], vec!["sda"]));
        // the disk beside a loop device on it: its bytes are seen by itself already
        fake.link("loop0", "devices/md0/slaves/loop0");
        let found = fake.map.of_name("md0").unwrap();
        assert_eq!((names(&found.devices), found.backing.len()), (vec!["loop0", "sda", "sdb"], 0));
        // a loop device whose file lies on itself ends as well
        fake.holds_files("loop0");
        assert_eq!(names(&fake.map.of_name("loop0").unwrap().devices), ["loop0"]);
    }

    #[test]
    fn paths_are_mapped_and_what_has_no_device_says_so() {
        let fake = Fake::new();
        fake.put("mnt/file", "x");
        let path = fake.dir.path().join("mnt/file");
        // the machine's own device numbers mean nothing in this tree
        let at = fake.dir.path().canonicalize().unwrap();
        fake.put(
            "mountinfo",
            &format!("1 0 0:5 / / rw - ext4 /nowhere rw\n2 1 0:9 / {} rw - tmpfs none rw\n", at.display()),
        );
        let message = fake.map.of_path(&path).unwrap_err().to_string();
        assert!(message.contains("mnt/file lies on tmpfs, which has no block device"), "{message}");
        fake.holds_files("sda/sda1");
        assert_eq!(names(&fake.map.of_path(&path).unwrap().devices), ["sda"]);
        assert_eq!(names(&fake.map.of(path.to_str().unwrap()).unwrap().devices), ["sda"]);
        let message = fake.map.of("sdz").unwrap_err().to_string();
        assert!(message.contains("`sdz`") && message.contains("dm-0, loop0, md0, sda, sdb, zram0"), "{message}");
        assert!(fake.map.of("/no/such/place").unwrap_err().to_string().contains("/no/such/place"));
        for odd in ["", "..", "../block", "."] {
            assert_eq!(fake.map.of_name(odd), None, "{odd}");
        }
    }

    #[test]
    fn hardware_with_a_medium_is_what_is_watched_by_default() {
        let fake = Fake::new();
        assert_eq!(names(&fake.map.physical()), ["sda", "sdb"]);
        fake.put("devices/sdb/hidden", "1\n");
        assert_eq!(names(&fake.map.physical()), ["sda"]);
    }

    #[test]
    fn mount_points_may_hold_blanks() {
        assert_eq!(unescaped("/mnt/my\\040disk\\134x"), "/mnt/my disk\\x");
        assert_eq!(unescaped("\\9"), "\\9");
    }
}
