//! What drives were at one time, and how they differ from it later. Free space, and names that the kernel gives anew at
//! every start, are no difference.

use super::facts::DriveFacts;
use super::topology::DeviceFacts;
use crate::sys::durable::write_atomic;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::path::{Path, PathBuf};

/// Version of snapshots that this program writes.
pub const SNAPSHOT_VERSION: u32 = 1;
/// Largest snapshot that is read.
const MAX_BYTES: u64 = 16 << 20;

/// What is wrong with a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file.
    #[error("snapshot {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Its content.
    #[error("snapshot {}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
}

/// Drives at one time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// Format version.
    pub version: u32,
    /// When, UTC.
    pub made: String,
    /// The drives.
    pub drives: Vec<DriveFacts>,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The drive.
    pub drive: String,
    /// What of it.
    pub what: String,
    /// What it was.
    pub then: String,
    /// What it is.
    pub now: String,
}

impl Snapshot {
    /// Reads and checks a snapshot.
    pub fn load(path: &Path) -> Result<Self, SnapshotError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let io = |source| SnapshotError::Io { path: path.into(), source };
        let format = |reason| SnapshotError::Format { path: path.into(), reason };
        if std::fs::metadata(path).map_err(io)?.len() > MAX_BYTES {
            return Err(format("it is too large to be one".into()));
        }
        let text = std::fs::read_to_string(path).map_err(io)?;
        let not = |e: serde_json::Error| format(format!("not a snapshot of `argodrive drives`: {e}"));
        let Versioned { version } = serde_json::from_str(&text).map_err(not)?;
        if version != SNAPSHOT_VERSION {
            return Err(format(format!(
                "version {version}, this program reads {SNAPSHOT_VERSION}; use a newer argodrive, or snapshot again"
            )));
        }
        serde_json::from_str(&text).map_err(not)
    }

    /// Writes a snapshot, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), SnapshotError> {
        let format = |e: serde_json::Error| SnapshotError::Format { path: path.into(), reason: e.to_string() };
        let text = serde_json::to_string_pretty(self).map_err(format)?;
        write_atomic(path, (text + "\n").as_bytes()).map_err(|source| SnapshotError::Io { path: path.into(), source })
    }
}

/// What is other than it was, drives by name.
pub fn drift(then: &[DriveFacts], now: &[DriveFacts]) -> Vec<Change> {
    let mut out = Vec::new();
    let mut add = |drive: &str, what: &str, then: String, now: String| {
        if then != now {
            out.push(Change { drive: drive.into(), what: what.into(), then, now });
        }
    };
    for old in then {
        let Some(new) = now.iter().find(|d| d.name == old.name) else {
            add(&old.name, "drive", "there".into(), "gone".into());
            continue;
        };
        let name = &old.name;
        let path = |d: &DriveFacts| d.path.display().to_string();
        add(name, "path", path(old), path(new));
        add(name, "emulated", old.emulated.to_string(), new.emulated.to_string());
        add(name, "mounted at", shown(&old.mount_point), shown(&new.mount_point));
        add(name, "file system", shown(&old.file_system), shown(&new.file_system));
        add(name, "read-only", old.read_only.to_string(), new.read_only.to_string());
        add(name, "direct alignment", shown(&old.dio_bytes), shown(&new.dio_bytes));
        let identities = |d: &DriveFacts| {
            let mut ids: Vec<String> = d.devices.iter().map(DeviceFacts::identity).collect();
            ids.sort();
            ids
        };
        let (a, b) = (identities(old), identities(new));
        if a != b {
            add(name, "devices", listed(&old.devices), listed(&new.devices));
            continue;
        }
        for device in &old.devices {
            let Some(seen) = new.devices.iter().find(|d| d.identity() == device.identity()) else { continue };
            let link = |d: &DeviceFacts| d.link.as_ref().map_or("unknown".into(), |l| l.now.clone());
            let way = |d: &DeviceFacts| d.stations.iter().map(|s| s.name.as_str()).collect::<Vec<_>>().join(" < ");
            add(name, "link", link(device), link(seen));
            add(name, "uplink", way(device), way(seen));
            add(name, "model", shown(&device.model), shown(&seen.model));
            add(name, "capacity", device.bytes.to_string(), seen.bytes.to_string());
            add(name, "sectors", shown(&device.sector_bytes), shown(&seen.sector_bytes));
            add(name, "rotational", shown(&device.rotational), shown(&seen.rotational));
        }
    }
    for new in now.iter().filter(|d| then.iter().all(|o| o.name != d.name)) {
        add(&new.name, "drive", "absent".into(), "new".into());
    }
    out
}

fn shown<T: Debug>(value: &Option<T>) -> String {
    value.as_ref().map_or("unknown".into(), |v| format!("{v:?}").trim_matches('"').to_string())
}

fn listed(devices: &[DeviceFacts]) -> String {
    let one = |d: &DeviceFacts| {
        let serial = d.serial_hash.as_ref().map(|h| format!(" #{h}")).unwrap_or_default();
        format!("{}{}{serial}", d.name, d.model.as_ref().map(|m| format!(" {m}")).unwrap_or_default())
    };
    if devices.is_empty() { "unknown".into() } else { devices.iter().map(one).collect::<Vec<_>>().join(" + ") }
}

#[cfg(test)]
mod tests {
    use super::super::topology::{Link, Station};
    use super::*;

    fn drive(name: &str, device: &str, serial: &str) -> DriveFacts {
        let link = Some(Link { now: "PCIe 16.0 GT/s x4".into(), most: None, bytes_per_s: 7.9e9 });
        let station = Station { name: "storage controller 0000:03:00.0".into(), bytes_per_s: None };
        let device = DeviceFacts {
            name: device.into(),
            model: Some("Fast".into()),
            serial_hash: (!serial.is_empty()).then(|| serial.into()),
            bytes: 1 << 40,
            link,
            stations: vec![station],
            ..DeviceFacts::default()
        };
        let file_system = Some("xfs".into());
        DriveFacts {
            name: name.into(),
            devices: vec![device],
            file_system,
            free_bytes: Some(5),
            ..DriveFacts::default()
        }
    }

    #[test]
    fn space_and_new_kernel_names_are_no_drift() {
        let then = [drive("a", "nvme0n1", "s1"), drive("b", "nvme1n1", "s2")];
        let mut now = [drive("a", "nvme1n1", "s1"), drive("b", "nvme0n1", "s2")];
        now[0].free_bytes = Some(1);
        assert_eq!(drift(&then, &now), []);
        // without a serial number a name is all there is
        assert_eq!(drift(&[drive("a", "vda", "")], &[drive("a", "vdb", "")]).len(), 1);
    }

    #[test]
    fn every_change_is_named_with_both_sides() {
        let then = [drive("a", "nvme0n1", "s1"), drive("b", "nvme1n1", "s2"), drive("gone", "sda", "s3")];
        let mut now = vec![drive("a", "nvme0n1", "s1"), drive("b", "nvme1n1", "other"), drive("new", "sdb", "s4")];
        now[0].devices[0].link.as_mut().unwrap().now = "PCIe 8.0 GT/s x4".into();
        now[0].devices[0].stations[0].name = "storage controller 0000:05:00.0".into();
        now[0].file_system = Some("ext4".into());
        now[0].read_only = true;
        let seen = drift(&then, &now);
        let what: Vec<(&str, &str)> = seen.iter().map(|c| (c.drive.as_str(), c.what.as_str())).collect();
        let want = [
            ("a", "file system"),
            ("a", "read-only"),
            ("a", "link"),
            ("a", "uplink"),
            ("b", "devices"),
            ("gone", "drive"),
            ("new", "drive"),
        ];
        assert_eq!(what, want);
        assert_eq!((seen[0].then.as_str(), seen[0].now.as_str()), ("xfs", "ext4"));
        assert!(seen[4].then.contains("nvme1n1 Fast #s2") && seen[4].now.contains("#other"), "{seen:?}");
    }

    #[test]
    fn a_snapshot_survives_its_file_and_strange_ones_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.json");
        let made = Snapshot { version: SNAPSHOT_VERSION, made: "now".into(), drives: vec![drive("a", "sda", "x")] };
        made.save(&path).unwrap();
        assert_eq!(Snapshot::load(&path).unwrap(), made);
        let text = std::fs::read_to_string(&path).unwrap();
        for (bad, says) in [
            (text.replacen("\"version\": 1", "\"version\": 2", 1), "newer argodrive"),
            (text.replacen("\"made\"", "\"maid\"", 1), "maid"),
            (text[..40].to_string(), "not a snapshot"),
            (String::new(), "not a snapshot"),
        ] {
            std::fs::write(&path, bad).unwrap();
            let message = Snapshot::load(&path).unwrap_err().to_string();
            assert!(message.contains(says) && message.contains("s.json"), "{message}");
        }
        assert!(Snapshot::load(&dir.path().join("none")).unwrap_err().to_string().contains("none"));
    }
}
