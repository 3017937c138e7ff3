//! `profile.toml`: a run configuration that `--profile` starts from, and, in its `[tuned]` table, how `tune` came to it.
//! Reading, writing with the former versions kept beside it, and going back to them. Measures nothing.
//!
//! A profile without `[tuned]` was written by hand, or is what `tune` began with. Former versions are `profile.toml.1`,
//! `profile.toml.2`, ..., the highest the latest; what a rollback took away is `profile.toml.undone`.

use crate::sys::durable::{sync_folder, write_atomic};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Version of the `[tuned]` table that this program writes.
pub const TUNED_VERSION: u32 = 1;
/// The table's name.
pub const TUNED_TABLE: &str = "tuned";

/// A profile could not be written, or there is none to go back to.
#[derive(Debug, thiserror::Error)]
pub enum ProfileFileError {
    /// A file.
    #[error("--profile: {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Nothing was kept.
    #[error("--profile {}: no former version is kept beside it (`{}.1`, ...); there is nothing to roll back to", .0.display(), .0.display())]
    NoHistory(PathBuf),
    /// A former version is no run configuration.
    #[error("--profile {}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
}

/// Why the settings of a profile are what they are: the comparison that promoted them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// Format version of this table.
    pub version: u32,
    /// When it was written, UTC.
    pub made: String,
    /// Program and revision.
    pub argodrive: String,
    /// The campaign's record (`experiment.json`).
    pub record: PathBuf,
    /// The arm of it whose settings these are.
    pub arm: String,
    /// Times the decode rate of the profile before, measured in pairs.
    pub ratio: f64,
    /// Ends of its interval at `level`.
    pub ratio_low: f64,
    /// See `ratio_low`.
    pub ratio_high: f64,
    /// Level of the interval.
    pub level: f64,
    /// Pairs of runs.
    pub pairs: usize,
    /// The profile before against itself: ratios up to this, or down to its inverse, were noise.
    pub noise_ratio: f64,
    /// What the simulator had predicted.
    pub predicted_ratio: f64,
    /// A drive's pace was emulated: the ratio says nothing of hardware.
    pub emulated: bool,
    /// The model.
    pub model_id: String,
    /// Hash of the plan.
    pub plan_hash: String,
    /// Settings that differ from the profile before.
    pub changed: Vec<String>,
    /// Settings that every counted run proved.
    pub proved: Vec<String>,
}

/// Takes the `[tuned]` table out of a profile, so that a run configuration is left.
pub fn take_tuned(table: &mut toml::Table) -> Result<Option<Tuned>, String> {
    let Some(value) = table.remove(TUNED_TABLE) else { return Ok(None) };
    let version = value.get("version").and_then(toml::Value::as_integer);
    if version.is_some_and(|v| v > i64::from(TUNED_VERSION)) {
        let version = version.unwrap_or_default();
        return Err(format!(
            "[tuned] has version {version}, this argodrive reads up to {TUNED_VERSION}; use the one that wrote it, or \
             delete the table: the settings work without it"
        ));
    }
    value.try_into().map(Some).map_err(|e: toml::de::Error| format!("[tuned]: {}", e.message()))
}

/// The text of a profile.
pub fn render(settings: &toml::Table, tuned: Option<&Tuned>) -> Result<String, String> {
    let mut table = settings.clone();
    let mut text =
        String::from("# A run profile: `argodrive decode --profile <this file>` starts from these settings.\n");
    match tuned {
        None => text.push_str("# Not tuned: what `argodrive tune` began with.\n"),
        Some(t) => {
            let emulated = if t.emulated { ", on EMULATED drives" } else { "" };
            text.push_str(&format!(
                "# Promoted by `argodrive tune`: {:.3} times the decode rate of the profile before ({:.3} to {:.3}){emulated}.\n\
                 # `argodrive tune --rollback --profile <this file>` goes back to that one.\n",
                t.ratio, t.ratio_low, t.ratio_high
            ));
            let value = toml::Value::try_from(t).map_err(|e| e.to_string())?;
            table.insert(TUNED_TABLE.into(), value);
        }
    }
    text.push('\n');
    text.push_str(&toml::to_string(&table).map_err(|e| e.to_string())?);
    Ok(text)
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(path.as_os_str());
    name.push(".");
    name.push(ending);
    PathBuf::from(name)
}

/// The folder of a file.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Highest number of a former version.
const MAX_VERSIONS: u32 = 9999;

/// Former versions of the profile at `path`, the oldest first.
pub fn history(path: &Path) -> Vec<(u32, PathBuf)> {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let entries = std::fs::read_dir(folder_of(path)).into_iter().flatten().flatten();
    let number = |entry: std::fs::DirEntry| {
        let file = entry.file_name().to_string_lossy().into_owned();
        let text = file.strip_prefix(&name)?.strip_prefix('.')?;
        // only names that are given here: not a date, and not `01`
        let number = text.parse().ok().filter(|n: &u32| n.to_string() == text && *n <= MAX_VERSIONS)?;
        Some((number, with_ending(path, &number.to_string())))
    };
    let mut out: Vec<(u32, PathBuf)> = entries.filter_map(number).collect();
    out.sort();
    out
}

/// Writes `text` to `path`; what was there is kept, and its new place returned. A stop in between leaves the former profile
/// where it is, at worst with a second copy of it.
pub fn replace(path: &Path, text: &str) -> Result<Option<PathBuf>, ProfileFileError> {
    let io = |path: &Path, source| ProfileFileError::Io { path: path.to_path_buf(), source };
    let mut kept = None;
    if path.exists() {
        let former = std::fs::read(path).map_err(|e| io(path, e))?;
        let next = history(path).last().map_or(1, |(n, _)| n.saturating_add(1));
        let to = with_ending(path, &next.to_string());
        write_atomic(&to, &former).map_err(|e| io(&to, e))?;
        kept = Some(to);
    }
    write_atomic(path, text.as_bytes()).map_err(|e| io(path, e))?;
    Ok(kept)
}

/// What a rollback did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RolledBack {
    /// The version that is the profile again; it has its old name no more.
    pub from: PathBuf,
    /// Where the profile that was taken away is; `None` if there was none.
    pub undone: Option<PathBuf>,
}

/// Makes the latest former version the profile again. `check` refuses a version that could not be run.
pub fn roll_back(path: &Path, check: &dyn Fn(&Path) -> Result<(), String>) -> Result<RolledBack, ProfileFileError> {
    let io = |path: &Path, source| ProfileFileError::Io { path: path.to_path_buf(), source };
    let Some((_, from)) = history(path).pop() else { return Err(ProfileFileError::NoHistory(path.to_path_buf())) };
    check(&from).map_err(|reason| ProfileFileError::Format { path: from.clone(), reason })?;
    let text = std::fs::read(&from).map_err(|e| io(&from, e))?;
    let mut undone = None;
    if path.exists() {
        let now = std::fs::read(path).map_err(|e| io(path, e))?;
        let endings = (1u32..).map(|n| if n == 1 { "undone".to_string() } else { format!("undone.{n}") });
        let free = endings.map(|e| with_ending(path, &e)).find(|p| !p.exists());
        let to = free.unwrap_or_else(|| with_ending(path, "undone"));
        write_atomic(&to, &now).map_err(|e| io(&to, e))?;
        undone = Some(to);
    }
    write_atomic(path, &text).map_err(|e| io(path, e))?;
    std::fs::remove_file(&from).map_err(|e| io(&from, e))?;
    sync_folder(folder_of(path)).map_err(|e| io(path, e))?;
    Ok(RolledBack { from, undone })
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn tuned() -> Tuned {
        Tuned {
            version: TUNED_VERSION,
            made: "2026-01-01T00:00:00Z".into(),
            argodrive: "0".into(),
            record: "results/tune/x/campaign/experiment.json".into(),
            arm: "full-mirror".into(),
            ratio: 1.25,
            ratio_low: 1.2,
            ratio_high: 1.3,
            level: 0.95,
            pairs: 8,
            noise_ratio: 1.01,
            predicted_ratio: 1.24,
            emulated: true,
            model_id: "m".into(),
            plan_hash: "p".into(),
            changed: vec!["plan".into()],
            proved: vec!["layout".into()],
        }
    }

    #[test]
    fn versions_are_kept_and_come_back_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("profile.toml");
        let read = |p: &Path| std::fs::read_to_string(p).unwrap();
        let fine = |_: &Path| Ok(());
        assert!(roll_back(&path, &fine).unwrap_err().to_string().contains("nothing to roll back"));
        assert_eq!(replace(&path, "one").unwrap(), None);
        assert_eq!(replace(&path, "two").unwrap(), Some(dir.path().join("profile.toml.1")));
        assert_eq!(replace(&path, "three").unwrap(), Some(dir.path().join("profile.toml.2")));
        for other in ["bak", "20250101", "07"] {
            std::fs::write(dir.path().join(format!("profile.toml.{other}")), "not ours").unwrap();
        }
        let back = roll_back(&path, &fine).unwrap();
        assert_eq!((read(&path).as_str(), read(&back.undone.unwrap()).as_str()), ("two", "three"));
        assert!(
            roll_back(&path, &|_| Err("no configuration".into())).unwrap_err().to_string().contains("profile.toml.1")
        );
        assert_eq!(read(&path), "two", "a version that cannot be run changes nothing");
        let undone = roll_back(&path, &fine).unwrap().undone.unwrap();
        assert_eq!(
            (read(&path), read(&undone), read(&dir.path().join("profile.toml.undone"))),
            ("one".into(), "two".into(), "three".into())
        );
        assert!(history(&path).is_empty());
    }

    #[test]
    fn provenance_comes_back_and_a_newer_one_is_refused() {
        let settings: toml::Table = toml::from_str("plan = \"p\"\n[reader]\ndispatch = \"split\"\n").unwrap();
        let text = render(&settings, Some(&tuned())).unwrap();
        assert!(text.contains("EMULATED") && text.contains("--rollback"), "{text}");
        let mut back: toml::Table = toml::from_str(&text).unwrap();
        assert_eq!(take_tuned(&mut back).unwrap(), Some(tuned()));
        assert_eq!(back, settings);
        assert_eq!(take_tuned(&mut back).unwrap(), None);
        let mut newer: toml::Table = toml::from_str("[tuned]\nversion = 9\n").unwrap();
        assert!(take_tuned(&mut newer).unwrap_err().contains("use the one that wrote it"));
        let mut wrong: toml::Table = toml::from_str("[tuned]\nversion = 1\nratoi = 2\n").unwrap();
        assert!(take_tuned(&mut wrong).unwrap_err().contains("ratoi"));
    }
}
