//! What drives have in common, before anything is measured: serial numbers behind them, and the links that several share, real
//! ones from sysfs and emulated ones from drives.toml. What a link can do is measured, never taken from there.

use super::ceiling::SharedLink;
use crate::drive::facts::{DriveFacts, shared};
use crate::drive::spec::DriveSpec;

/// Hashed serial numbers of the devices behind a drive.
pub fn serials(drive: &DriveFacts) -> Vec<String> {
    drive.devices.iter().filter_map(|d| d.serial_hash.clone()).collect()
}

/// What drives share; what all of them share is measured with all of them anyway.
pub fn links(facts: &[DriveFacts], specs: &[DriveSpec]) -> Vec<SharedLink> {
    let real = shared(facts).into_iter().map(|(station, members)| SharedLink { name: station.name, members });
    real.chain(emulated_links(specs)).filter(|link| link.members.len() < facts.len()).collect()
}

/// Who shares an emulated link, as sysfs says it of real ones; what the link can do is measured.
pub fn emulated_links(specs: &[DriveSpec]) -> Vec<SharedLink> {
    let mut out: Vec<SharedLink> = Vec::new();
    for (at, spec) in specs.iter().enumerate() {
        let Some(link) = spec.emulate.and_then(|e| e.link) else { continue };
        let name = link.name.as_str();
        match out.iter_mut().find(|l| l.name == name) {
            Some(known) => known.members.push(at),
            None => out.push(SharedLink { name: name.to_string(), members: vec![at] }),
        }
    }
    out.retain(|link| link.members.len() > 1);
    out
}
