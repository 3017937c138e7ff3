//! `drives.toml`: the drives of a run, by name and path, and what the emulated ones pretend to be. Parsing and checks
//! only; nothing here opens a file of a drive.

use super::emulated_link::{EmulatedLink, RawLink};
use super::fault_rule::{FaultRule, MAX_RULES};
use super::units::{parse_duration_ns, parse_rate};
use crate::files::{self, Kind};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Most drives in one file (ids are bytes, plans hold 64).
pub const MAX_DRIVES: usize = 64;
/// Longest emulated latency or cost per read: a pause beyond it is a typing mistake.
pub const MAX_EMULATED_NS: u64 = 60_000_000_000;

/// What is wrong with a drives file.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The text is not a list of drives.
    #[error("not a valid drives file: {0}")]
    Syntax(String),
    /// A value does not mean what its key needs.
    #[error("drive `{drive}`: {key}: {reason}")]
    Value {
        /// The drive's name.
        drive: String,
        /// The key.
        key: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Two drives cannot be told apart, or there are too few or too many.
    #[error("{0}")]
    Inconsistent(String),
}

/// Most changes of rate that an emulated drive can go through.
pub const MAX_RATE_STEPS: usize = 6;

/// From a time on, another rate: how throttling is emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateStep {
    /// Time since the drive's first read.
    pub at_ns: u64,
    /// Rate of reads that begin from then on.
    pub rate_bytes_per_s: u64,
}

/// Changes of rate in the order of time; empty = none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateSchedule([Option<RateStep>; MAX_RATE_STEPS]);

impl RateSchedule {
    /// The rate never changes.
    pub const NONE: Self = Self([None; MAX_RATE_STEPS]);

    /// A schedule of `steps`: at most [`MAX_RATE_STEPS`], times rising, rates above 0.
    pub fn new(steps: &[RateStep]) -> Result<Self, String> {
        if steps.len() > MAX_RATE_STEPS {
            return Err(format!("{} steps, at most {MAX_RATE_STEPS}", steps.len()));
        }
        if steps.iter().any(|s| s.rate_bytes_per_s == 0) {
            return Err("every rate must be above 0".into());
        }
        if !steps.windows(2).all(|w| w[0].at_ns < w[1].at_ns) {
            return Err("the times must rise from step to step".into());
        }
        let mut out = Self::default();
        out.0.iter_mut().zip(steps).for_each(|(place, step)| *place = Some(*step));
        Ok(out)
    }

    /// Its steps.
    pub fn steps(&self) -> impl Iterator<Item = RateStep> + '_ {
        self.0.iter().flatten().copied()
    }

    /// The rate `since_first_ns` after the drive's first read; `None` before the first step.
    pub fn rate_at(&self, since_first_ns: u64) -> Option<u64> {
        self.steps().take_while(|s| s.at_ns <= since_first_ns).last().map(|s| s.rate_bytes_per_s)
    }
}

/// An emulated drive (the model is `io::paced`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Emulation {
    /// Bytes per second that the drive delivers, one read after the other.
    pub rate_bytes_per_s: u64,
    /// Added to every read; overlaps other reads.
    pub latency_ns: u64,
    /// Occupies the drive for every read.
    pub per_read_ns: u64,
    /// Largest relative slow-down of a read, 0 to 1.
    pub jitter: f64,
    /// Seed of the jitter.
    pub seed: u64,
    /// Later rates; empty = `rate_bytes_per_s` throughout.
    #[serde(default)]
    pub schedule: RateSchedule,
    /// The link that it shares with other emulated drives; `None` = its own way to memory.
    #[serde(default)]
    pub link: Option<EmulatedLink>,
}

/// One drive of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveSpec {
    /// Its name in plans, tables and figures.
    pub name: String,
    /// Its mount point or folder.
    pub path: PathBuf,
    /// What it pretends to be, if it is emulated.
    pub emulate: Option<Emulation>,
    /// Faults that its reads meet on purpose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<FaultRule>,
}

impl DriveSpec {
    /// A drive as it is.
    pub fn new(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self { name: name.into(), path: path.into(), emulate: None, faults: Vec::new() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    #[serde(default)]
    drive: Vec<RawDrive>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDrive {
    name: String,
    path: PathBuf,
    emulate: Option<RawEmulation>,
    #[serde(default)]
    faults: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEmulation {
    rate: String,
    latency: Option<String>,
    per_read: Option<String>,
    jitter: Option<f64>,
    seed: Option<u64>,
    #[serde(default)]
    schedule: Vec<RawStep>,
    link: Option<RawLink>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStep {
    at: String,
    rate: String,
}

/// Parses the text of a drives file. Relative paths stay relative; [`load`] resolves them.
pub fn parse(text: &str) -> Result<Vec<DriveSpec>, SpecError> {
    let raw: RawFile = toml::from_str(text).map_err(|e| SpecError::Syntax(e.to_string()))?;
    if raw.drive.is_empty() {
        return Err(SpecError::Inconsistent("no [[drive]] table; each drive needs a `name` and a `path`".into()));
    }
    if raw.drive.len() > MAX_DRIVES {
        return Err(SpecError::Inconsistent(format!("{} drives, at most {MAX_DRIVES}", raw.drive.len())));
    }
    let drives = raw.drive.into_iter().map(resolve).collect::<Result<Vec<_>, _>>()?;
    check_distinct(&drives)?;
    check_links(&drives)?;
    Ok(drives)
}

/// Reads a drives file. Relative paths in it are relative to its folder.
pub fn load(path: &Path) -> Result<Vec<DriveSpec>, SpecError> {
    let text = files::read_text(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => {
            let wanted = Kind::Drives.name();
            SpecError::Inconsistent(format!("drives file {}: {source}; give {wanted}", path.display()))
        }
        _ => SpecError::Io { path: path.into(), source },
    })?;
    let mut drives = parse(&text).map_err(|e| match (files::instead(&text, Kind::Drives), e) {
        (Some(other), _) => SpecError::Inconsistent(format!("drives file {}: {other}", path.display())),
        (None, SpecError::Syntax(reason)) => SpecError::Syntax(format!("{}: {reason}", path.display())),
        (None, SpecError::Inconsistent(what)) => SpecError::Inconsistent(format!("{}: {what}", path.display())),
        (None, other) => other,
    })?;
    let base = path.parent().unwrap_or(Path::new(""));
    for drive in &mut drives {
        drive.path = base.join(&drive.path);
    }
    Ok(drives)
}

/// The text of a drives file that [`parse`] reads back as `drives`.
pub fn render(drives: &[DriveSpec]) -> String {
    let mut text = String::new();
    for drive in drives {
        let quoted = |s: &str| toml::Value::String(s.to_string()).to_string();
        let (name, path) = (quoted(&drive.name), quoted(&drive.path.to_string_lossy()));
        let _ = writeln!(text, "[[drive]]\nname = {name}\npath = {path}");
        if let Some(e) = &drive.emulate {
            let _ = writeln!(
                text,
                "emulate = {{ rate = \"{}B/s\", latency = \"{}ns\", per_read = \"{}ns\", jitter = {:?}, seed = {}{}{} }}",
                e.rate_bytes_per_s,
                e.latency_ns,
                e.per_read_ns,
                e.jitter,
                e.seed,
                render_schedule(&e.schedule),
                e.link.map_or_else(String::new, render_link)
            );
        }
        if !drive.faults.is_empty() {
            let faults: Vec<String> = drive.faults.iter().map(|f| quoted(&f.to_string())).collect();
            let _ = writeln!(text, "faults = [{}]", faults.join(", "));
        }
        text.push('\n');
    }
    text
}

fn render_schedule(schedule: &RateSchedule) -> String {
    let step = |s: RateStep| format!("{{ at = \"{}ns\", rate = \"{}B/s\" }}", s.at_ns, s.rate_bytes_per_s);
    let steps: Vec<String> = schedule.steps().map(step).collect();
    if steps.is_empty() { String::new() } else { format!(", schedule = [{}]", steps.join(", ")) }
}

fn render_link(link: EmulatedLink) -> String {
    format!(", link = {{ name = \"{}\", rate = \"{}B/s\" }}", link.name.as_str(), link.rate_bytes_per_s)
}

fn resolve(raw: RawDrive) -> Result<DriveSpec, SpecError> {
    let RawDrive { name, path, emulate, faults } = raw;
    let bad = |key, reason: &str| SpecError::Value { drive: name.clone(), key, reason: reason.into() };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(bad("name", "use 1 to 64 letters, digits, `-`, `_` or `.`"));
    }
    if path.as_os_str().is_empty() {
        return Err(bad("path", "is empty"));
    }
    let emulate = emulate.map(|raw| resolve_emulation(&name, raw)).transpose()?;
    if faults.len() > MAX_RULES {
        return Err(bad("faults", &format!("{} rules, at most {MAX_RULES}", faults.len())));
    }
    let faults = faults.iter().map(|f| f.parse()).collect::<Result<_, String>>();
    let faults = faults.map_err(|e| bad("faults", &e))?;
    Ok(DriveSpec { name, path, emulate, faults })
}

fn resolve_emulation(drive: &str, raw: RawEmulation) -> Result<Emulation, SpecError> {
    let bad = |key, reason| SpecError::Value { drive: drive.to_string(), key, reason };
    let rate_bytes_per_s = parse_rate(&raw.rate).map_err(|e| bad("emulate.rate", e))?;
    if rate_bytes_per_s == 0 {
        return Err(bad("emulate.rate", "must be above 0".into()));
    }
    let time = |key, text: Option<String>| match text {
        None => Ok(0),
        Some(text) => match parse_duration_ns(&text) {
            Ok(ns) if ns <= MAX_EMULATED_NS => Ok(ns),
            Ok(_) => Err(bad(key, format!("`{text}` is more than 60s"))),
            Err(e) => Err(bad(key, e)),
        },
    };
    let latency_ns = time("emulate.latency", raw.latency)?;
    let per_read_ns = time("emulate.per_read", raw.per_read)?;
    let jitter = raw.jitter.unwrap_or(0.0);
    if !(0.0..=1.0).contains(&jitter) {
        return Err(bad("emulate.jitter", format!("{jitter} is not within 0 to 1")));
    }
    let step = |raw: &RawStep| -> Result<RateStep, String> {
        Ok(RateStep { at_ns: parse_duration_ns(&raw.at)?, rate_bytes_per_s: parse_rate(&raw.rate)? })
    };
    let steps = raw.schedule.iter().map(step).collect::<Result<Vec<_>, _>>();
    let schedule = steps.and_then(|s| RateSchedule::new(&s)).map_err(|e| bad("emulate.schedule", e))?;
    let link = raw.link.map(RawLink::resolve).transpose().map_err(|e| bad("emulate.link", e))?;
    Ok(Emulation { rate_bytes_per_s, latency_ns, per_read_ns, jitter, seed: raw.seed.unwrap_or(0), schedule, link })
}

fn check_distinct(drives: &[DriveSpec]) -> Result<(), SpecError> {
    let mut names = HashMap::new();
    let mut paths = HashMap::new();
    for drive in drives {
        if names.insert(drive.name.as_str(), ()).is_some() {
            return Err(SpecError::Inconsistent(format!("two drives are named `{}`", drive.name)));
        }
        // Compared by components, so `a/` and `a/./` are `a`; links are resolved by `shared_devices`.
        if let Some(other) = paths.insert(drive.path.components().collect::<PathBuf>(), drive.name.as_str()) {
            let path = drive.path.display();
            return Err(SpecError::Inconsistent(format!(
                "drives `{other}` and `{}` share the path {path}",
                drive.name
            )));
        }
    }
    Ok(())
}

/// A link has one rate, whichever of its drives says so.
fn check_links(drives: &[DriveSpec]) -> Result<(), SpecError> {
    let on = |d: &DriveSpec| d.emulate.and_then(|e| e.link);
    for (at, drive) in drives.iter().enumerate() {
        let Some(link) = on(drive) else { continue };
        let other = drives[..at].iter().find_map(|d| on(d).filter(|l| l.name == link.name).map(|l| (d, l)));
        if let Some((first, said)) = other.filter(|(_, l)| l.rate_bytes_per_s != link.rate_bytes_per_s) {
            return Err(SpecError::Inconsistent(format!(
                "link `{}` has {} B/s on drive `{}` and {} B/s on drive `{}`: give it one rate",
                link.name.as_str(),
                said.rate_bytes_per_s,
                first.name,
                link.rate_bytes_per_s,
                drive.name
            )));
        }
    }
    Ok(())
}

/// The device number of the file system that holds a drive's path (`st_dev`).
pub fn device_number(path: &Path) -> Result<u64, SpecError> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path).map_err(|source| SpecError::Io { path: path.into(), source })?;
    Ok(metadata.dev())
}

/// Pairs of drives (indices) that are one device although neither is emulated: two folders on one device are one
/// drive. Two emulated drives may share a device: each has its own pace; an emulated one beside a real one may not
/// be told apart from it by the kernel's counters, but its pace is its own, so that pair is not listed either.
pub fn shared_devices(drives: &[DriveSpec]) -> Result<Vec<(usize, usize)>, SpecError> {
    let mut first_on = HashMap::new();
    let mut pairs = Vec::new();
    for (index, drive) in drives.iter().enumerate().filter(|(_, d)| d.emulate.is_none()) {
        match first_on.entry(device_number(&drive.path)?) {
            std::collections::hash_map::Entry::Occupied(seen) => pairs.push((*seen.get(), index)),
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(index);
            }
        }
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = r#"
[[drive]]
name = "a"
path = "/mnt/a"
emulate = { rate = "50MB/s", latency = "500us", per_read = "0us", jitter = 0.1, seed = 7 }

[[drive]]
name = "b"
path = "b"
"#;

    #[test]
    fn the_documented_example_parses_and_survives_a_round_trip() {
        let drives = parse(TWO).unwrap();
        let pace = drives[0].emulate.unwrap();
        assert_eq!((pace.rate_bytes_per_s, pace.latency_ns, pace.per_read_ns), (50_000_000, 500_000, 0));
        assert_eq!((pace.jitter, pace.seed), (0.1, 7));
        assert_eq!(drives[1].emulate, None);
        assert_eq!(parse(&render(&drives)).unwrap(), drives);
    }

    #[test]
    fn errors_name_the_drive_and_the_key() {
        let cases = [
            (TWO.replace("50MB/s", "50MB"), "emulate.rate"),
            (TWO.replace("50MB/s", "0MB/s"), "emulate.rate"),
            (TWO.replace("500us", "500"), "emulate.latency"),
            (TWO.replace("\"0us\"", "\"2m\""), "emulate.per_read"),
            (TWO.replace("0.1", "1.5"), "emulate.jitter"),
            (TWO.replace("\"/mnt/a\"", "\"\""), "path"),
            (TWO.replace("\"a\"", "\"a b\""), "name"),
        ];
        for (text, key) in cases {
            let message = parse(&text).unwrap_err().to_string();
            assert!(message.contains(key) && message.contains("drive `a"), "{message}");
        }
        for (text, word) in [(TWO.replace("seed", "sed"), "sed"), (TWO.replace("name = \"b\"", ""), "name")] {
            let message = parse(&text).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn names_and_paths_are_distinct() {
        assert!(parse(&TWO.replace("\"b\"\n", "\"a\"\n")).is_err());
        assert!(parse(&TWO.replace("path = \"b\"", "path = \"/mnt/./a/\"")).is_err());
        assert!(parse("").is_err());
    }

    #[test]
    fn two_folders_on_one_device_are_reported_unless_emulated() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("b")).unwrap();
        let spec =
            |name: &str, path: PathBuf, emulate| DriveSpec { name: name.into(), path, emulate, faults: Vec::new() };
        let pace = parse(TWO).unwrap()[0].emulate;
        let mut drives = vec![spec("a", dir.path().into(), None), spec("b", dir.path().join("b"), None)];
        assert_eq!(shared_devices(&drives).unwrap(), [(0, 1)]);
        drives[1].emulate = pace;
        assert!(shared_devices(&drives).unwrap().is_empty());
        drives[0].path = dir.path().join("gone");
        assert!(shared_devices(&drives).unwrap_err().to_string().contains("gone"));
    }

    #[test]
    fn a_schedule_changes_the_rate_with_time() {
        let steps = "seed = 7, schedule = [{ at = \"2s\", rate = \"20MB/s\" }, { at = \"5s\", rate = \"40MB/s\" }]";
        let drives = parse(&TWO.replace("seed = 7", steps)).unwrap();
        let schedule = drives[0].emulate.unwrap().schedule;
        let at = |s: u64| schedule.rate_at(s * 1_000_000_000);
        assert_eq!([at(0), at(2), at(4), at(9)], [None, Some(20_000_000), Some(20_000_000), Some(40_000_000)]);
        assert_eq!(parse(&render(&drives)).unwrap(), drives);
        let swapped = steps.replace("2s", "6s");
        for (text, says) in [(swapped.as_str(), "must rise"), (&steps.replace("20MB/s", "0B/s"), "above 0")] {
            let message = parse(&TWO.replace("seed = 7", text)).unwrap_err().to_string();
            assert!(message.contains("emulate.schedule") && message.contains(says), "{message}");
        }
        let seven = "seed = 7, schedule = [".to_string() + &"{ at = \"1s\", rate = \"1MB/s\" },".repeat(7) + "]";
        assert!(parse(&TWO.replace("seed = 7", &seven)).unwrap_err().to_string().contains("at most 6"));
    }

    #[test]
    fn drives_share_a_link_that_has_one_rate() {
        let on = |rate: &str| format!("link = {{ name = \"hub\", rate = \"{rate}\" }}");
        let text = TWO.replace("seed = 7", &on("8MB/s"));
        let drives = parse(&text).unwrap();
        let link = drives[0].emulate.unwrap().link.unwrap();
        assert_eq!((link.name.as_str(), link.rate_bytes_per_s), ("hub", 8_000_000));
        assert_eq!(parse(&render(&drives)).unwrap(), drives);
        let second = |rate: &str| format!("{text}emulate = {{ rate = \"1MB/s\", {} }}\n", on(rate));
        assert_eq!(parse(&second("8000kB/s")).unwrap()[1].emulate.unwrap().link, Some(link));
        let message = parse(&second("9MB/s")).unwrap_err().to_string();
        assert!(message.contains("`hub`") && message.contains("`a`") && message.contains("`b`"), "{message}");
        for (wrong, key) in
            [(on("0B/s"), "above 0"), (on("8"), "emulate.link"), (on("8MB/s").replace("hub", "a b"), "a b")]
        {
            let message = parse(&TWO.replace("seed = 7", &wrong)).unwrap_err().to_string();
            assert!(message.contains(key) && message.contains("drive `a`"), "{message}");
        }
    }

    #[test]
    fn relative_paths_are_relative_to_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("drives.toml");
        std::fs::write(&path, TWO).unwrap();
        let drives = load(&path).unwrap();
        assert_eq!(drives[0].path, Path::new("/mnt/a"));
        assert_eq!(drives[1].path, dir.path().join("b"));
    }
}
