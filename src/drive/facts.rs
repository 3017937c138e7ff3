//! Everything that can be known of drives before they are read: the file system of a folder, the devices behind it, what
//! they share. Looks, and writes nothing that has a name.

use super::blockmap::{BlockMap, MapError};
use super::mount::{Mount, holding, table};
use super::spec::{DriveSpec, SpecError};
use super::topology::{DeviceFacts, Station, shared_uplinks};
use crate::sys::direct::probe_alignment;
use crate::sys::space::free_bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Levels of mappings that are described.
const MAX_LAYERS: usize = 16;

/// One drive.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveFacts {
    /// Name in drives.toml, or the folder.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// Its pace is emulated.
    pub emulated: bool,
    /// Where its file system is mounted.
    pub mount_point: Option<PathBuf>,
    /// Folder of the file system that is mounted there, if not its root: a bind mount or subvolume.
    pub mounted_folder: Option<String>,
    /// Type of the file system.
    pub file_system: Option<String>,
    /// Mounted read-only.
    pub read_only: bool,
    /// Bytes that may still be written.
    pub free_bytes: Option<u64>,
    /// Alignment of direct reads, memory and offset.
    pub dio_bytes: Option<(u32, u32)>,
    /// What lies between the file system and its devices, outermost first: `dm-0 (vg-data)`, `md0 (raid0)`, `sda1`.
    pub layers: Vec<String>,
    /// The devices.
    pub devices: Vec<DeviceFacts>,
    /// Disks that hold the files behind loop devices.
    pub backing: Vec<DeviceFacts>,
    /// Why there are no devices.
    pub unknown: Option<String>,
}

/// Drives that are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneDevice {
    /// The device.
    pub device: String,
    /// Indices of the drives.
    pub drives: Vec<usize>,
}

/// The kernel's tables, here or in a tree like them.
#[derive(Clone, Debug)]
pub struct Tables {
    sysfs: PathBuf,
    mountinfo: PathBuf,
}

impl Tables {
    /// Those of this machine.
    pub fn system() -> Self {
        Self::at(Path::new("/sys"), Path::new("/proc/self/mountinfo"))
    }

    /// Those of a tree like `/sys` and a file like `/proc/self/mountinfo`.
    pub fn at(sysfs: &Path, mountinfo: &Path) -> Self {
        Self { sysfs: sysfs.to_path_buf(), mountinfo: mountinfo.to_path_buf() }
    }

    fn map(&self) -> BlockMap {
        BlockMap::at(&self.sysfs, &self.mountinfo)
    }

    /// What is known of the folder `path`, called `name`.
    pub fn facts(&self, name: &str, path: &Path, emulated: bool) -> Result<DriveFacts, SpecError> {
        let io = |source| SpecError::Io { path: path.to_path_buf(), source };
        let real = fs::canonicalize(path).map_err(io)?;
        let mounts = table(&self.mountinfo).unwrap_or_default();
        let mount = holding(&mounts, &real);
        let mut facts = DriveFacts {
            name: name.into(),
            path: path.to_path_buf(),
            emulated,
            mount_point: mount.map(|m| m.point.clone()),
            mounted_folder: mount.map(|m| m.root.clone()).filter(|r| r != "/"),
            file_system: mount.map(|m| m.kind.clone()),
            read_only: mount.is_some_and(|m| m.read_only),
            free_bytes: free_bytes(&real).ok(),
            dio_bytes: probe_alignment(&real).map(|a| (a.memory_bytes, a.offset_bytes)),
            ..DriveFacts::default()
        };
        let map = self.map();
        match map.of_path(&real) {
            Ok(mut found) => {
                facts.layers = self.layers(&real, mount);
                for name in self.btrfs_members(mount, &found.devices.iter().map(|d| d.name.clone()).collect()) {
                    let more = map.of_name(&name).unwrap_or_default();
                    found.devices.extend(more.devices);
                    found.backing.extend(more.backing);
                }
                for list in [&mut found.devices, &mut found.backing] {
                    list.sort();
                    list.dedup();
                }
                facts.devices = found.devices.iter().map(DeviceFacts::of).collect();
                facts.backing = found.backing.iter().map(DeviceFacts::of).collect();
            }
            Err(e @ MapError::NoDevice { .. }) => facts.unknown = Some(e.to_string()),
            Err(e) => facts.unknown = Some(e.to_string()),
        }
        Ok(facts)
    }

    /// The facts of drives.toml, after its paths have been checked.
    pub fn drives(&self, specs: &[DriveSpec]) -> Result<Vec<DriveFacts>, SpecError> {
        check_paths(specs)?;
        specs.iter().map(|s| self.facts(&s.name, &s.path, s.emulate.is_some())).collect()
    }

    /// Every mount that lies on a block device, each file system once, named by its first mount point.
    pub fn mounts(&self) -> Result<Vec<DriveFacts>, SpecError> {
        let io = |source| SpecError::Io { path: self.mountinfo.clone(), source };
        let mounts = table(&self.mountinfo).map_err(io)?;
        let (mut seen, mut out) = (BTreeSet::new(), Vec::new());
        for mount in &mounts {
            let on_device = mount.major != 0 || mount.source.starts_with("/dev/");
            if !on_device || !mount.point.is_dir() || !seen.insert((mount.major, mount.minor)) {
                continue;
            }
            let facts = self.facts(&mount.point.to_string_lossy(), &mount.point, false)?;
            if !facts.devices.is_empty() {
                out.push(facts);
            }
        }
        Ok(out)
    }

    /// Names of the mappings and partitions from the file system down.
    fn layers(&self, real: &Path, mount: Option<&Mount>) -> Vec<String> {
        let number = fs::metadata(real).map(|m| m.dev()).unwrap_or(0);
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let named = mount.and_then(|m| m.source.strip_prefix("/dev/"));
        let mut at = fs::canonicalize(self.sysfs.join(format!("dev/block/{major}:{minor}")))
            .ok()
            .or_else(|| fs::canonicalize(self.sysfs.join("class/block").join(named?)).ok());
        let mut out = Vec::new();
        while let Some(folder) = at.take().filter(|_| out.len() < MAX_LAYERS) {
            let name = folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let read = |file: &str| fs::read_to_string(folder.join(file)).ok().map(|t| t.trim().to_string());
            let partition = folder.join("partition").exists();
            let mut below: Vec<PathBuf> = fs::read_dir(folder.join("slaves"))
                .map(|entries| entries.flatten().filter_map(|e| fs::canonicalize(e.path()).ok()).collect())
                .unwrap_or_default();
            below.sort();
            let what = read("dm/name").or_else(|| read("md/level"));
            match (what, partition) {
                (Some(what), _) => out.push(format!("{name} ({what})")),
                (None, true) => out.push(name),
                (None, false) => break,
            }
            // several below are listed as devices
            at = match &below[..] {
                [one] => Some(one.clone()),
                _ => None,
            };
        }
        out
    }

    /// Devices of a btrfs beside the one that the mount table names.
    fn btrfs_members(&self, mount: Option<&Mount>, found: &BTreeSet<String>) -> Vec<String> {
        if mount.is_none_or(|m| m.kind != "btrfs") {
            return Vec::new();
        }
        let map = self.map();
        let systems = fs::read_dir(self.sysfs.join("fs/btrfs")).into_iter().flatten().flatten();
        let members = systems.map(|s| {
            let entries = fs::read_dir(s.path().join("devices")).into_iter().flatten().flatten();
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect::<Vec<String>>()
        });
        let ours = |names: &Vec<String>| {
            let disks = names.iter().filter_map(|n| map.of_name(n)).flat_map(|m| m.devices);
            disks.into_iter().any(|d| found.contains(&d.name))
        };
        members.filter(ours).flatten().collect()
    }
}

/// Every path of drives.toml is a folder, and none lies in another.
pub fn check_paths(specs: &[DriveSpec]) -> Result<(), SpecError> {
    let value = |drive: &DriveSpec, reason: String| SpecError::Value { drive: drive.name.clone(), key: "path", reason };
    let mut real = Vec::with_capacity(specs.len());
    for drive in specs {
        let path = drive.path.display();
        let there = fs::canonicalize(&drive.path)
            .map_err(|e| value(drive, format!("{path}: {e}; mount it, or correct the path")))?;
        if !there.is_dir() {
            return Err(value(drive, format!("{path} is no folder")));
        }
        real.push(there);
    }
    for (inner, a) in specs.iter().zip(&real) {
        for (outer, b) in specs.iter().zip(&real) {
            if inner.name == outer.name || !a.starts_with(b) {
                continue;
            }
            let (path, other) = (inner.path.display(), &outer.name);
            let reason = match a == b {
                true => format!("{path} is the folder of drive `{other}`; each drive needs its own"),
                false => format!("{path} lies in the folder of drive `{other}`; drives must not contain each other"),
            };
            return Err(value(inner, reason));
        }
    }
    Ok(())
}

/// Real drives with a device in common: two folders on one device are one drive. Emulated ones have a pace of their own.
pub fn one_device(drives: &[DriveFacts]) -> Vec<OneDevice> {
    let mut out: Vec<OneDevice> = Vec::new();
    for (index, drive) in drives.iter().enumerate().filter(|(_, d)| !d.emulated) {
        for device in &drive.devices {
            match out.iter_mut().find(|o| o.device == device.name) {
                Some(one) => one.drives.push(index),
                None => out.push(OneDevice { device: device.name.clone(), drives: vec![index] }),
            }
        }
    }
    out.retain(|o| o.drives.len() > 1);
    out
}

/// What real drives share on the way to memory: a device, or a station before it.
pub fn shared(drives: &[DriveFacts]) -> Vec<(Station, Vec<usize>)> {
    let one = one_device(drives);
    let mut out: Vec<(Station, Vec<usize>)> = Vec::new();
    for o in &one {
        if !out.iter().any(|(_, members)| *members == o.drives) {
            let link =
                drives.iter().flat_map(|d| &d.devices).find(|d| d.name == o.device).and_then(|d| d.link.as_ref());
            let bytes_per_s = link.map(|l| l.bytes_per_s);
            out.push((Station { name: format!("one device: {}", o.device), bytes_per_s }, o.drives.clone()));
        }
    }
    let none: &[DeviceFacts] = &[];
    let real: Vec<&[DeviceFacts]> = drives.iter().map(|d| if d.emulated { none } else { &d.devices[..] }).collect();
    for (station, members) in shared_uplinks(&real) {
        if !out.iter().any(|(_, m)| *m == members) {
            out.push((station, members));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::fake_sysfs::{FakeSys, NVME_A, NVME_B, SATA, SATA_2, USB, VIRTIO};
    use super::*;

    fn on(sys: &FakeSys, device: &str, name: &str) -> DriveFacts {
        sys.holds_files(device);
        Tables::at(sys.dir.path(), &sys.mountinfo()).facts(name, &sys.folder(name), false).unwrap()
    }

    fn names(devices: &[DeviceFacts]) -> Vec<&str> {
        devices.iter().map(|d| d.name.as_str()).collect()
    }

    #[test]
    fn partitions_mappings_and_raids_end_at_their_disks_and_say_what_lies_between() {
        let sys = FakeSys::full();
        sys.partition(NVME_A, "nvme0n1p2", "259:2");
        let plain = on(&sys, &format!("{NVME_A}/nvme0n1p2"), "plain");
        assert_eq!((names(&plain.devices), plain.layers.join(" ")), (vec!["nvme0n1"], "nvme0n1p2".into()));
        assert_eq!((plain.file_system.as_deref(), plain.read_only), (Some("ext4"), false));
        assert!(plain.free_bytes.is_some() && plain.unknown.is_none());

        sys.over("md0", "9:0", &[SATA, SATA_2]);
        sys.put("devices/virtual/block/md0/md/level", "raid0\n");
        sys.over("dm-0", "253:0", &["virtual/block/md0"]);
        sys.put("devices/virtual/block/dm-0/dm/name", "vg-data\n");
        let stacked = on(&sys, "virtual/block/dm-0", "stacked");
        assert_eq!(names(&stacked.devices), ["sda", "sdb"]);
        assert_eq!(stacked.layers, ["dm-0 (vg-data)", "md0 (raid0)"]);

        let virtio = on(&sys, VIRTIO, "virtio");
        assert_eq!((names(&virtio.devices), virtio.layers.len()), (vec!["vda"], 0));
    }

    #[test]
    fn a_loop_device_is_a_drive_and_its_disk_is_named_once() {
        let sys = FakeSys::full();
        sys.put("image", "x");
        sys.disk("virtual/block/loop0", "7:0");
        let image = sys.dir.path().canonicalize().unwrap().join("image");
        sys.put("devices/virtual/block/loop0/loop/backing_file", &image.display().to_string());
        // what a folder lies on is found by its number, and so is the image: here they have one, so the loop ends at itself
        let facts = on(&sys, "virtual/block/loop0", "looped");
        assert_eq!((names(&facts.devices), facts.backing.len()), (vec!["loop0"], 0));
        assert_eq!(facts.devices[0].backing_file.as_deref(), image.to_str());
    }

    #[test]
    fn a_btrfs_has_all_its_devices() {
        let sys = FakeSys::full();
        sys.holds_files(USB);
        let table = fs::read_to_string(sys.mountinfo()).unwrap().replace("ext4 /dev/x", "btrfs /dev/sdc");
        fs::write(sys.mountinfo(), table).unwrap();
        for (system, name) in [("u-1", "sdc"), ("u-1", "sdd"), ("u-2", "sda")] {
            sys.put(&format!("fs/btrfs/{system}/devices/{name}/x"), "");
        }
        let facts = Tables::at(sys.dir.path(), &sys.mountinfo()).facts("b", &sys.folder("b"), false).unwrap();
        assert_eq!(names(&facts.devices), ["sdc", "sdd"]);
    }

    #[test]
    fn what_has_no_device_says_so() {
        let sys = FakeSys::empty();
        let point = sys.dir.path().canonicalize().unwrap();
        fs::write(sys.mountinfo(), format!("9 1 0:77 /sub {} ro - overlay overlay rw\n", point.display())).unwrap();
        let facts = Tables::at(sys.dir.path(), &sys.mountinfo()).facts("o", &sys.folder("o"), false).unwrap();
        assert!(facts.devices.is_empty() && facts.unknown.unwrap().contains("overlay"));
        assert_eq!((facts.read_only, facts.mounted_folder.as_deref()), (true, Some("/sub")));
        assert!(Tables::at(sys.dir.path(), &sys.mountinfo()).mounts().unwrap().is_empty());
    }

    #[test]
    fn two_folders_on_one_device_are_one_drive_unless_emulated() {
        let sys = FakeSys::full();
        let mut drives =
            vec![on(&sys, NVME_A, "a"), on(&sys, NVME_B, "b"), on(&sys, NVME_A, "c"), on(&sys, VIRTIO, "d")];
        assert_eq!(one_device(&drives), [OneDevice { device: "nvme0n1".into(), drives: vec![0, 2] }]);
        let found = shared(&drives);
        let named: Vec<(&str, &[usize])> = found.iter().map(|(s, m)| (s.name.as_str(), m.as_slice())).collect();
        assert_eq!(named, [("one device: nvme0n1", &[0, 2][..]), ("PCI bridge 0000:01:00.0", &[0, 1, 2])]);
        drives[0].emulated = true;
        assert!(one_device(&drives).is_empty());
        assert_eq!(shared(&drives)[0].1, [1, 2], "an emulated drive shares nothing");
    }

    #[test]
    fn unknown_paths_and_drives_within_drives_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink(dir.path().join("a"), dir.path().join("link")).unwrap();
        let check = |paths: &[&str]| {
            let spec = |p: &&str| DriveSpec {
                name: format!("d-{}", p.replace('/', "-")),
                path: dir.path().join(p),
                emulate: None,
                faults: Vec::new(),
            };
            check_paths(&paths.iter().map(spec).collect::<Vec<_>>()).map_err(|e| e.to_string())
        };
        assert_eq!(check(&["a"]), Ok(()));
        for (paths, says) in [
            (vec!["a", "a/b"], "lies in the folder of drive `d-a`"),
            (vec!["a/b", "link"], "lies in the folder of drive `d-link`"),
            (vec!["a", "link"], "is the folder of drive"),
            (vec!["a", "gone"], "mount it, or correct the path"),
            (vec!["file"], "is no folder"),
        ] {
            let message = check(&paths).unwrap_err();
            assert!(message.contains(says) && message.contains("drive `d-"), "{message}");
        }
    }
}
