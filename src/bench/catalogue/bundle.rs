//! Records, figures and hashed serial numbers in one file to share: a `.tar.gz` with a manifest that has a digest of every
//! file. Paths, users and the host's name are taken out (`scrub`); what remains must still be read as a record.

use super::rows::{RECORD_FILES, rows_of};
use super::scrub::Scrub;
use super::tar::{self, Entry, MAX_FILES, MAX_TOTAL_BYTES, check_path};
use super::today::Today;
use super::walk::{Fault, Found, find};
use crate::bench::campaign::file::read_text;
use crate::bench::environment;
use crate::bench::inputs::digest;
use crate::bench::record::{RecordError, RunRecord, utc_now};
use crate::drive::facts::Tables;
use crate::drive::profile::Profile;
use crate::trace::log::TRACE_FILE;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The manifest, first file of every bundle.
pub const MANIFEST_FILE: &str = "bundle.json";
/// What a manifest says it is.
pub const FORMAT: &str = "argodrive results bundle";
/// Version of bundles that this program writes.
pub const BUNDLE_VERSION: u32 = 1;
/// Longest label.
const MAX_LABEL: usize = 40;

/// A file of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BundleFile {
    /// Its path in the bundle.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Its digest (XXH3, 128 bits): finds damage, proves nothing about who made it.
    pub digest: String,
}

/// A device under the drives of the records, as it is when the bundle is made.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BundleDevice {
    /// Kernel name.
    pub name: String,
    /// How it is attached.
    pub bus: String,
    /// Model, as the device says.
    pub model: Option<String>,
    /// Capacity.
    pub bytes: u64,
    /// Hash of the serial number; the number itself is nowhere kept.
    pub serial_hash: Option<String>,
}

/// What a bundle says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: String,
    /// Format version.
    pub version: u32,
    /// What the sender calls the machine.
    pub label: String,
    /// When it was made, UTC.
    pub made: String,
    /// The program that made it.
    pub argodrive: String,
    /// Devices under drives of the records that are still the same.
    pub devices: Vec<BundleDevice>,
    /// Every other file, by path.
    pub files: Vec<BundleFile>,
}

/// A bundle before it is written.
pub struct Packed {
    /// The file.
    pub bytes: Vec<u8>,
    /// Its manifest.
    pub manifest: Manifest,
    /// Records that are in it.
    pub records: usize,
    /// Figures that are in it.
    pub figures: usize,
    /// Files that could not be read, and were left out.
    pub faults: Vec<Fault>,
    /// Records that came from other machines, and were left out.
    pub foreign: usize,
}

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// A record of another version, or a file that cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Anything else.
    #[error("bundle: {0}")]
    Other(String),
}

/// Whether a label can be a folder's name.
pub fn check_label(label: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if label.is_empty() || label.len() > MAX_LABEL || label.starts_with('.') || !label.chars().all(plain) {
        let shown: String = label.chars().take(MAX_LABEL).flat_map(char::escape_default).collect();
        return Err(format!(
            "`{shown}` is no label: use 1 to {MAX_LABEL} letters, digits, `-`, `_` or `.`, no leading `.`"
        ));
    }
    Ok(())
}

/// Path inside the bundle of a file that was found below `root`. A root that is itself a measured folder or a record keeps the
/// folder above, which names the experiment.
fn inner_path(root: &Path, path: &Path) -> PathBuf {
    let whole = root.canonicalize().unwrap_or_else(|_| root.to_path_buf());
    let inside = path.strip_prefix(root).unwrap_or(Path::new(""));
    let folder = if whole.is_file() { whole.parent().unwrap_or(&whole) } else { &whole };
    let is_one = whole.is_file() || RECORD_FILES.iter().any(|f| whole.join(f).is_file());
    let keep = if is_one { 2 } else { 0 };
    let names: Vec<_> = folder.components().filter(|c| matches!(c, Component::Normal(_))).collect();
    let mut out: PathBuf = names[names.len().saturating_sub(keep)..].iter().collect();
    if whole.is_file() {
        out.push(whole.file_name().unwrap_or_default());
    } else {
        out.push(inside);
    }
    out
}

/// A path of this machine as one of a bundle: scrubbed, plain characters only.
fn bundled_name(path: &Path, scrub: &Scrub) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.+".contains(c) { c } else { '_' };
    let part = |c: Component<'_>| match c {
        Component::Normal(name) => Some(scrub.text(&name.to_string_lossy()).chars().map(plain).collect::<String>()),
        _ => None,
    };
    path.components().filter_map(part).collect::<Vec<_>>().join("/")
}

/// Packs what lies below `roots`. `label` is what the machine is called; `None` = a name made from the contents.
pub fn pack(roots: &[PathBuf], label: Option<&str>, mut scrub: Scrub) -> Result<Packed, BundleError> {
    let other = |text: String| BundleError::Other(text);
    if let Some(label) = label {
        check_label(label).map_err(other)?;
    }
    let mut faults = Vec::new();
    let mut found: Vec<(PathBuf, Found)> = Vec::new();
    for root in roots {
        if !root.exists() {
            return Err(other(format!("{}: no such file or folder", root.display())));
        }
        found.extend(find(root, &mut faults).into_iter().map(|f| (inner_path(root, &f.path), f)));
    }
    let foreign = found.iter().filter(|(_, f)| f.origin.is_some()).count();
    found.retain(|(_, f)| f.origin.is_none() && f.path.file_name().is_some_and(|n| n != TRACE_FILE));
    let mut texts: Vec<(PathBuf, PathBuf, String)> = Vec::new();
    for (inner, Found { path, .. }) in found {
        match read_text(&path).and_then(|text| rows_of(&path, &text).map(|_| text)) {
            Ok(text) => {
                scrub.learn(&text);
                texts.push((inner, path, text));
            }
            Err(e @ RecordError::Version { .. }) => return Err(e.into()),
            Err(e) => faults.push(Fault { path, reason: e.to_string(), other_version: false }),
        }
    }
    if texts.is_empty() {
        let roots: Vec<String> = roots.iter().map(|r| r.display().to_string()).collect();
        return Err(other(format!("{}: no record of this machine can be read there", roots.join(", "))));
    }
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut total = 0u64;
    let mut add = |path: String, bytes: Vec<u8>| {
        check_path(&path).map_err(other)?;
        total += bytes.len() as u64;
        if total > MAX_TOTAL_BYTES || files.len() >= MAX_FILES {
            return Err(other(format!("more than {MAX_TOTAL_BYTES} bytes or {MAX_FILES} files; name fewer records")));
        }
        match files.insert(path.clone(), bytes) {
            None => Ok(()),
            Some(_) => Err(other(format!("two records would be called `{path}`; name the folder that holds both"))),
        }
    };
    let mut devices = BTreeSet::new();
    let (mut figures, mut today, mut folders) = (0, Today::default(), BTreeSet::new());
    for (inner, path, text) in &texts {
        devices.extend(devices_of(path, text, &mut today));
        let value: Value = serde_json::from_str(text).map_err(|e| other(format!("{}: {e}", path.display())))?;
        let kept = serde_json::to_string_pretty(&scrub.value(value)).map_err(|e| other(e.to_string()))? + "\n";
        let name = bundled_name(inner, &scrub);
        rows_of(Path::new(&name), &kept).map_err(|e| {
            other(format!("{}: what is left without names and paths is no record ({e})", path.display()))
        })?;
        add(name, kept.into_bytes())?;
        let Some(folder) = path.parent().filter(|f| folders.insert(f.to_path_buf())) else { continue };
        for figure in figures_of(folder) {
            let bytes = fs::read(&figure).map_err(|e| other(format!("{}: {e}", figure.display())))?;
            let bytes = match String::from_utf8(bytes) {
                Ok(svg) => scrub.text(&svg).into_bytes(),
                Err(png) => png.into_bytes(),
            };
            let name = inner.with_file_name(figure.file_name().unwrap_or_default());
            add(bundled_name(&name, &scrub), bytes)?;
            figures += 1;
        }
    }
    let listed = |(path, bytes): (&String, &Vec<u8>)| BundleFile {
        path: path.clone(),
        bytes: bytes.len() as u64,
        digest: digest(bytes),
    };
    let files_listed: Vec<BundleFile> = files.iter().map(listed).collect();
    let all: String = files_listed.iter().map(|f| f.digest.as_str()).collect();
    let manifest = Manifest {
        format: FORMAT.into(),
        version: BUNDLE_VERSION,
        label: label.map_or_else(|| format!("bundle-{}", &digest(all.as_bytes())[..8]), str::to_string),
        made: utc_now(),
        argodrive: environment::version(),
        devices: devices.into_iter().collect(),
        files: files_listed,
    };
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| other(e.to_string()))? + "\n";
    let mut entries = vec![Entry { path: MANIFEST_FILE.into(), bytes: text.into_bytes() }];
    entries.extend(files.into_iter().map(|(path, bytes)| Entry { path, bytes }));
    let bytes = tar::write(&entries).map_err(|e| other(e.to_string()))?;
    Ok(Packed { bytes, manifest, records: texts.len(), figures, faults, foreign })
}

/// Figures that this program puts beside records, in order: other pictures are somebody's own.
fn figures_of(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let plain = entries.filter(|e| e.metadata().is_ok_and(|m| m.is_file() && m.len() <= tar::MAX_FILE_BYTES));
    let drawn = |p: &PathBuf| {
        let stem = p.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let ours = ["ladder", "ladder-against", "paired"].contains(&stem) || stem.ends_with("-sustain");
        ours && p.extension().is_some_and(|e| e == "svg" || e == "png")
    };
    let mut out: Vec<PathBuf> = plain.map(|e| e.path()).filter(drawn).collect();
    out.sort();
    out
}

/// Devices under the drives of a record, as far as they are the ones that it was measured on.
fn devices_of(path: &Path, text: &str, today: &mut Today) -> Vec<BundleDevice> {
    let drives: Vec<(PathBuf, String)> = match path.file_name().and_then(|n| n.to_str()) {
        Some(super::rows::RUN_FILE) => {
            let Ok(run) = serde_json::from_str::<RunRecord>(text) else { return Vec::new() };
            run.mounts.into_iter().map(|m| (m.path, m.device)).collect()
        }
        Some(super::rows::PROFILE_FILE) => {
            let Ok(profile) = serde_json::from_str::<Profile>(text) else { return Vec::new() };
            profile.drives.into_iter().map(|d| (d.path, d.device)).collect()
        }
        _ => return Vec::new(),
    };
    let same = |(path, device): (PathBuf, String)| {
        let known = !device.is_empty() && today.device(&path) == Ok(device);
        known.then(|| Tables::system().facts("", &path, false).ok()).flatten()
    };
    let facts: Vec<_> = drives.into_iter().filter_map(same).collect();
    let device = |d: crate::drive::topology::DeviceFacts| BundleDevice {
        name: d.name,
        bus: d.bus,
        model: d.model,
        bytes: d.bytes,
        serial_hash: d.serial_hash,
    };
    facts.into_iter().flat_map(|f| f.devices).map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_inside_keep_what_tells_records_apart() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("results/ladder/2026-x/arms/00-a");
        fs::create_dir_all(&run).unwrap();
        for file in [run.join("record.json"), dir.path().join("results/ladder/2026-x/ladder.json")] {
            fs::write(file, "{}").unwrap();
        }
        let root = dir.path().join("results");
        let ladder = root.join("ladder/2026-x");
        let inner = |root: &Path, path: &Path| bundled_name(&inner_path(root, path), &Scrub::default());
        assert_eq!(inner(&root, &ladder.join("ladder.json")), "ladder/2026-x/ladder.json");
        assert_eq!(inner(&ladder, &ladder.join("ladder.json")), "ladder/2026-x/ladder.json");
        let record = run.join("record.json");
        assert_eq!(inner(&ladder, &record), "ladder/2026-x/arms/00-a/record.json");
        assert_eq!(inner(&record, &record), "arms/00-a/record.json");
        assert_eq!(bundled_name(Path::new("a b/ü.svg"), &Scrub::default()), "a_b/_.svg");
    }

    #[test]
    fn labels_are_names_of_folders() {
        assert!(check_label("tower-2").is_ok());
        for bad in ["", "..", ".x", "a/b", "a b", &"x".repeat(41)] {
            assert!(check_label(bad).is_err(), "{bad}");
        }
    }
}
