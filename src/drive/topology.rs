//! What sysfs says of a block device and of its way to memory: model, hashed serial number, sectors, link, and the bridges,
//! hubs and controllers that it shares with others. Reads folders of sysfs only, wherever they lie; what is not there is
//! unknown, never guessed.
//!
//! **Uplinks.** In the path of a device every PCI function and every USB device is a station. Two drives that have a
//! station in common share what comes after it. What the mainboard shares behind its root ports is not in sysfs.

use super::device::BlockDevice;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Sectors in sysfs have this size whatever the device says.
const SECTOR_BYTES: u64 = 512;

/// A link and its speed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// As it runs now, e.g. `PCIe 16.0 GT/s x4`, `USB 10 Gb/s`, `SATA 6.0 Gbps`.
    pub now: String,
    /// What it could be, where that is known and more.
    pub most: Option<String>,
    /// Bytes per second after encoding, before any protocol.
    pub bytes_per_s: f64,
}

/// A bridge, hub or controller on the way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Station {
    /// What it is called: kind and address.
    pub name: String,
    /// Its own link, if it has one.
    pub bytes_per_s: Option<f64>,
}

/// A block device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFacts {
    /// Kernel name.
    pub name: String,
    /// `nvme`, `sata`, `usb`, `virtio`, `loop`, `scsi`, `mmc` or `other`.
    pub bus: String,
    /// Model, as the device says.
    pub model: Option<String>,
    /// Hash of the serial number; the number itself is nowhere kept.
    pub serial_hash: Option<String>,
    /// Capacity.
    pub bytes: u64,
    /// Logical and physical sector.
    pub sector_bytes: Option<(u32, u32)>,
    /// Has platters.
    pub rotational: Option<bool>,
    /// Its own link.
    pub link: Option<Link>,
    /// What lies between it and memory, nearest first.
    pub stations: Vec<Station>,
    /// For a loop device: the file behind it.
    pub backing_file: Option<String>,
}

impl DeviceFacts {
    /// Reads everything about `device`.
    pub fn of(device: &BlockDevice) -> Self {
        let at = &device.sysfs;
        let real = controller(at);
        let chain = stations(&real);
        let bus = bus(device, &real, &chain);
        let usb = usb_device(&real);
        let number = |name: &str| text(&at.join("queue").join(name)).and_then(|t| t.parse::<u32>().ok());
        Self {
            name: device.name.clone(),
            bus: bus.into(),
            model: model(at, usb.as_deref()),
            serial_hash: serial(at, usb.as_deref()).map(|s| hash_serial(&s)),
            bytes: text(&at.join("size")).and_then(|t| t.parse::<u64>().ok()).unwrap_or(0).saturating_mul(SECTOR_BYTES),
            sector_bytes: number("logical_block_size").zip(number("physical_block_size")),
            rotational: number("rotational").map(|r| r != 0),
            link: link(bus, &real, usb.as_deref()),
            stations: chain,
            backing_file: text(&at.join("loop/backing_file")),
        }
    }

    /// What tells it from others: hashed serial number, else name and size.
    pub fn identity(&self) -> String {
        match &self.serial_hash {
            Some(hash) => format!("#{hash}"),
            None => format!("{}:{}", self.name, self.bytes / SECTOR_BYTES),
        }
    }
}

/// A hash that tells serial numbers apart and does not give them away: 48 bits, so that many numbers have the same.
pub fn hash_serial(serial: &str) -> String {
    let keyed = format!("argodrive drive serial\0{}", serial.trim());
    format!("{:012x}", xxhash_rust::xxh3::xxh3_128(keyed.as_bytes()) >> 80)
}

/// Drives that share a station: its name, its link, and their indices. Sets of the same drives are listed once, by the
/// narrowest of their stations, else by the nearest.
pub fn shared_uplinks(drives: &[&[DeviceFacts]]) -> Vec<(Station, Vec<usize>)> {
    let mut by_name: BTreeMap<&str, (usize, &Station, Vec<usize>)> = BTreeMap::new();
    for (index, devices) in drives.iter().enumerate() {
        for device in devices.iter() {
            for (distance, station) in device.stations.iter().enumerate() {
                let entry = by_name.entry(&station.name).or_insert((distance, station, Vec::new()));
                if !entry.2.contains(&index) {
                    entry.2.push(index);
                }
            }
        }
    }
    let mut by_set: BTreeMap<Vec<usize>, (usize, &Station)> = BTreeMap::new();
    for (distance, station, members) in by_name.into_values().filter(|(_, _, m)| m.len() > 1) {
        let width = |s: &Station| s.bytes_per_s.unwrap_or(f64::INFINITY);
        let entry = by_set.entry(members).or_insert((distance, station));
        if (width(station), distance) < (width(entry.1), entry.0) {
            *entry = (distance, station);
        }
    }
    by_set.into_iter().map(|(members, (_, station))| (station.clone(), members)).collect()
}

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_string())
}

/// The folder in which the device hangs on its bus. A namespace that several controllers may serve lies under
/// `virtual`, with links to them; its first controller stands for all.
fn controller(folder: &Path) -> PathBuf {
    let parent = folder.parent().unwrap_or(folder);
    let shared = parent.file_name().is_some_and(|n| n.to_string_lossy().starts_with("nvme-subsys"));
    if !shared {
        return folder.to_path_buf();
    }
    let numbered = |name: &str| name.strip_prefix("nvme").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .filter(|e| numbered(&e.file_name().to_string_lossy()))
        .filter_map(|e| fs::canonicalize(e.path()).ok())
        .collect();
    paths.sort();
    paths.into_iter().next().unwrap_or_else(|| folder.to_path_buf())
}

fn is_pci(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let hex = |p: &&str| !p.is_empty() && p.bytes().all(|b| b.is_ascii_hexdigit());
    parts.len() == 4 && name.contains('.') && parts.iter().all(hex) && parts[0].len() >= 4
}

fn is_usb(folder: &Path) -> bool {
    folder.join("speed").exists() && folder.join("devnum").exists()
}

fn name_of(folder: &Path) -> String {
    folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

/// PCI functions and USB devices above a folder, nearest first.
fn stations(folder: &Path) -> Vec<Station> {
    let mut out = Vec::new();
    for at in folder.ancestors() {
        let name = name_of(at);
        if is_usb(at) {
            let kind = if text(&at.join("bDeviceClass")).as_deref() == Some("09") { "USB hub" } else { "USB device" };
            let bytes_per_s = text(&at.join("speed")).and_then(|s| usb_rate(&s));
            out.push(Station { name: format!("{kind} {name}"), bytes_per_s });
        } else if is_pci(&name) {
            let class = text(&at.join("class")).unwrap_or_default();
            let kind = match class.get(2..4) {
                Some("06") => "PCI bridge",
                Some("01") => "storage controller",
                Some("0c") => "USB controller",
                _ => "PCI device",
            };
            let bytes_per_s = pci_link(at, "current").map(|l| l.1);
            out.push(Station { name: format!("{kind} {name}"), bytes_per_s });
        }
    }
    out
}

fn usb_device(folder: &Path) -> Option<PathBuf> {
    folder.ancestors().find(|a| is_usb(a)).map(Path::to_path_buf)
}

fn bus(device: &BlockDevice, real: &Path, chain: &[Station]) -> &'static str {
    let any = |what: &dyn Fn(&str) -> bool| real.ancestors().any(|a| what(&name_of(a)));
    match device.name.as_str() {
        n if n.starts_with("loop") => "loop",
        n if n.starts_with("nvme") => "nvme",
        n if n.starts_with("mmcblk") => "mmc",
        _ if chain.iter().any(|s| s.name.starts_with("USB ") && !s.name.starts_with("USB controller")) => "usb",
        _ if any(&|n| numbered(n, "ata")) => "sata",
        _ if any(&|n| numbered(n, "virtio")) => "virtio",
        n if n.starts_with("sd") => "scsi",
        _ => "other",
    }
}

fn numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

fn model(at: &Path, usb: Option<&Path>) -> Option<String> {
    let words = |a: Option<String>, b: Option<String>| match (a, b) {
        (Some(a), Some(b)) => Some(format!("{a} {b}")),
        (a, b) => a.or(b),
    };
    let device = at.join("device");
    let own =
        words(text(&device.join("vendor")).filter(|v| v != "ATA" && !v.starts_with("0x")), text(&device.join("model")));
    let bridge = usb.and_then(|u| words(text(&u.join("manufacturer")), text(&u.join("product"))));
    own.or(bridge).or_else(|| text(&device.join("name")))
}

fn serial(at: &Path, usb: Option<&Path>) -> Option<String> {
    let device = at.join("device");
    // page 0x80 of SCSI's vital product data: four bytes of head, then the number
    let page = || {
        let bytes = fs::read(device.join("vpd_pg80")).ok()?;
        let number =
            String::from_utf8_lossy(bytes.get(4..)?).trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_string();
        (!number.is_empty()).then_some(number)
    };
    text(&device.join("serial"))
        .or_else(|| text(&at.join("serial")))
        .or_else(page)
        .or_else(|| usb.and_then(|u| text(&u.join("serial"))))
        .or_else(|| text(&at.join("wwid")))
        .or_else(|| text(&device.join("wwid")))
}

fn link(bus: &str, real: &Path, usb: Option<&Path>) -> Option<Link> {
    match bus {
        "usb" => {
            let speed = text(&usb?.join("speed"))?;
            let gigabits = speed.parse::<f64>().ok()? / 1000.0;
            Some(Link { now: format!("USB {gigabits} Gb/s"), most: None, bytes_per_s: usb_rate(&speed)? })
        }
        "sata" => {
            let port = real.ancestors().find(|a| numbered(&name_of(a), "ata"))?;
            let speed = sata_speed(port)?;
            let gigabits = speed.split(' ').next()?.parse::<f64>().ok()?;
            // 8 bits in 10
            Some(Link { now: format!("SATA {speed}"), most: None, bytes_per_s: gigabits * 1e8 })
        }
        "nvme" => {
            let function = real.ancestors().find(|a| is_pci(&name_of(a)))?;
            let (now, bytes_per_s) = pci_link(function, "current")?;
            let most = pci_link(function, "max").filter(|m| m.1 > bytes_per_s * 1.001).map(|m| m.0);
            Some(Link { now, most, bytes_per_s })
        }
        _ => None,
    }
}

/// `ata1/link1/ata_link/link1/sata_spd`.
fn sata_speed(port: &Path) -> Option<String> {
    let links = fs::read_dir(port).ok()?.flatten().filter(|e| numbered(&e.file_name().to_string_lossy(), "link"));
    links
        .filter_map(|e| {
            let name = e.file_name();
            text(&e.path().join("ata_link").join(&name).join("sata_spd"))
        })
        .find(|s| s != "<unknown>")
}

/// A PCI function's link as text and in bytes per second; `which` is `current` or `max`.
fn pci_link(function: &Path, which: &str) -> Option<(String, f64)> {
    let speed = text(&function.join(format!("{which}_link_speed")))?;
    let width = text(&function.join(format!("{which}_link_width")))?.parse::<u32>().ok().filter(|w| *w > 0)?;
    let transfers = speed.split(' ').next()?.parse::<f64>().ok().filter(|t| *t > 0.0)?;
    let encoding = match transfers {
        t if t < 8.0 => 0.8,
        t if t < 64.0 => 128.0 / 130.0,
        _ => 242.0 / 256.0,
    };
    Some((format!("PCIe {transfers:.1} GT/s x{width}"), transfers * 1e9 * encoding / 8.0 * f64::from(width)))
}

/// Bytes per second of a USB speed in megabits.
fn usb_rate(megabits: &str) -> Option<f64> {
    let megabits = megabits.parse::<f64>().ok().filter(|m| *m > 0.0)?;
    let encoding = match megabits {
        m if m < 5000.0 => 1.0,
        m if m < 10_000.0 => 0.8,
        _ => 128.0 / 132.0,
    };
    Some(megabits * 1e6 / 8.0 * encoding)
}

#[cfg(test)]
#[path = "topology_tests.rs"]
mod tests;
