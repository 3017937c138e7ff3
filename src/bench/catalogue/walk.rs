//! Finding records below a folder. Follows no link, reads one record at a time, and keeps what is wrong with a file beside the
//! rows of the others.

use super::rows::{RECORD_FILES, levels_to_measured, rows_of};
use super::unpack::read_manifest;
use super::{Kind, Row};
use crate::bench::campaign::file::{CAMPAIGN_FILE, read_text};
use crate::bench::catalogue::bundle::MANIFEST_FILE;
use crate::bench::catalogue::rows::LADDER_FILE;
use crate::bench::record::RecordError;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Deepest folder that is looked into, from where the search begins.
const MAX_DEPTH: usize = 16;

/// A file that gave no rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong; names the file.
    pub reason: String,
    /// It was written in a format that this program does not read.
    pub other_version: bool,
}

/// Everything below a folder.
#[derive(Clone, Debug, Default)]
pub struct Catalogue {
    /// The rows, by path.
    pub rows: Vec<Row>,
    /// Files that gave none.
    pub faults: Vec<Fault>,
}

/// A file below a results folder, and the label of the bundle that it came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The file.
    pub path: PathBuf,
    /// The bundle's label.
    pub origin: Option<String>,
}

/// Files of records below `root` (or `root` itself, if it is one) in order of path. Hidden folders and links are left out.
pub fn find(root: &Path, faults: &mut Vec<Fault>) -> Vec<Found> {
    let mut out = Vec::new();
    if root.is_file() {
        out.push(Found { path: root.to_path_buf(), origin: origin_above(root) });
        return out;
    }
    let mut left: Vec<(PathBuf, usize, Option<String>)> = vec![(root.to_path_buf(), 0, origin_above(root))];
    while let Some((folder, depth, origin)) = left.pop() {
        let mut fault = |reason: String| faults.push(Fault { path: folder.clone(), reason, other_version: false });
        if depth > MAX_DEPTH {
            fault(format!("{}: folders are nested more than {MAX_DEPTH} deep", folder.display()));
            continue;
        }
        let entries = match fs::read_dir(&folder).and_then(|e| e.collect::<Result<Vec<_>, _>>()) {
            Ok(entries) => entries,
            Err(e) => {
                fault(format!("{}: {e}", folder.display()));
                continue;
            }
        };
        let origin = if folder.join(MANIFEST_FILE).is_file() { Some(label_of(&folder, faults)) } else { origin };
        for entry in entries {
            // of the entry itself: a link is neither a folder nor a file here
            let Ok(kind) = entry.file_type() else { continue };
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if kind.is_dir() && !name.starts_with('.') {
                left.push((entry.path(), depth + 1, origin.clone()));
            } else if kind.is_file() && RECORD_FILES.contains(&&*name) {
                out.push(Found { path: entry.path(), origin: origin.clone() });
            }
        }
    }
    out.sort_by(|a, b| a.path.cmp(&b.path));
    out
}

/// The label of an imported folder: what its manifest says, as long as it can be read.
fn label_of(folder: &Path, faults: &mut Vec<Fault>) -> String {
    let path = folder.join(MANIFEST_FILE);
    let name = || folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    if let Err(reason) = read_text(&path).map_err(|e| e.to_string()).and_then(|t| read_manifest(&t)) {
        faults.push(Fault { reason: format!("{}: {reason}", path.display()), path, other_version: false });
    }
    // whoever imported it may have called it otherwise than whoever sent it
    name()
}

/// The label, if `path` itself lies in an imported folder.
fn origin_above(path: &Path) -> Option<String> {
    let folder = path.ancestors().skip(1).find(|f| f.join(MANIFEST_FILE).is_file())?;
    folder.file_name().map(|n| n.to_string_lossy().into_owned())
}

impl Catalogue {
    /// Reads every record below `root`.
    pub fn read(root: &Path) -> Self {
        let mut out = Self::default();
        for found in find(root, &mut out.faults) {
            let rows = read_text(&found.path).and_then(|text| rows_of(&found.path, &text));
            match rows {
                Ok(rows) => out.rows.extend(rows.into_iter().map(|r| Row { origin: found.origin.clone(), ..r })),
                Err(e) => out.faults.push(Fault {
                    other_version: matches!(e, RecordError::Version { .. }),
                    reason: e.to_string(),
                    path: found.path,
                }),
            }
        }
        out.join();
        out
    }

    /// Files of another version.
    pub fn other_versions(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter().filter(|f| f.other_version)
    }

    /// Tells runs and their ladders and campaigns of each other: the runs are inside, the others get what only runs know.
    fn join(&mut self) {
        let measured = |path: &Path, up: usize| path.ancestors().nth(up).map(Path::to_path_buf).unwrap_or_default();
        let whole = |row: &&Row| matches!(row.kind, Kind::Rung | Kind::Comparison);
        let folders: BTreeSet<PathBuf> = self.rows.iter().filter(whole).map(|r| measured(&r.path, 1)).collect();
        let mut first: BTreeMap<(PathBuf, String), usize> = BTreeMap::new();
        for (index, row) in self.rows.iter_mut().enumerate() {
            let at = match row.kind {
                Kind::Run => measured(&row.path, levels_to_measured(&row.path)),
                // <measured>/traces/<run>/trace.json, and <measured>/trace/trace.json of a ladder
                Kind::Trace => [2, 3]
                    .map(|up| measured(&row.path, up))
                    .into_iter()
                    .find(|at| folders.contains(at))
                    .unwrap_or_default(),
                _ => continue,
            };
            if !folders.contains(&at) {
                continue;
            }
            row.inside = true;
            if row.kind == Kind::Run && row.verdict.counts() {
                first.entry((at.clone(), row.name.clone())).or_insert(index);
                first.entry((at, String::new())).or_insert(index);
            }
        }
        for index in 0..self.rows.len() {
            let row = &self.rows[index];
            if !whole(&row) {
                continue;
            }
            let at = measured(&row.path, 1);
            let any = first.get(&(at.clone(), String::new())).copied();
            let own = first.get(&(at, row.name.clone())).copied();
            let Some(run) = own.or(any).map(|i| self.rows[i].clone()) else { continue };
            let row = &mut self.rows[index];
            let program = std::mem::take(&mut row.machine.argodrive);
            row.machine = run.machine;
            if !program.is_empty() {
                row.machine.argodrive = program;
            }
            if row.when.is_empty() {
                row.when = run.when;
            }
            if own.is_some() {
                if row.settings.is_empty() {
                    row.settings = run.settings;
                }
                if row.drives.is_empty() {
                    row.drives = run.drives;
                }
            }
        }
    }
}

/// Whether a folder holds a ladder or campaign of its own.
pub(super) fn is_measured(folder: &Path) -> bool {
    [LADDER_FILE, CAMPAIGN_FILE].iter().any(|f| folder.join(f).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples")
    }

    #[test]
    fn the_samples_are_found_in_order_without_a_fault() {
        let all = Catalogue::read(&samples());
        assert_eq!(all.faults, []);
        let kinds = |kind| all.rows.iter().filter(|r| r.kind == kind).count();
        assert_eq!(kinds(Kind::Rung), 4);
        assert!(kinds(Kind::Comparison) >= 30, "{}", kinds(Kind::Comparison));
        assert!(all.rows.windows(2).all(|w| w[0].path <= w[1].path));
        assert!(is_measured(&samples().join("aa")) && !is_measured(&samples()));
    }

    #[test]
    fn links_and_deep_folders_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("a/experiment.json");
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::copy(samples().join("aa/experiment.json"), &record).unwrap();
        std::os::unix::fs::symlink(dir.path(), dir.path().join("a/loop")).unwrap();
        std::os::unix::fs::symlink(&record, dir.path().join("record.json")).unwrap();
        let mut deep = dir.path().join("d");
        (0..=MAX_DEPTH).for_each(|_| deep.push("d"));
        fs::create_dir_all(&deep).unwrap();
        let all = Catalogue::read(dir.path());
        assert_eq!(all.rows.len(), 1, "{:?}", all.rows);
        assert_eq!(all.faults.len(), 1);
        assert!(all.faults[0].reason.contains("nested"), "{:?}", all.faults);
        // one file alone
        assert_eq!(Catalogue::read(&record).rows.len(), 1);
    }

    #[test]
    fn a_damaged_file_is_named_and_another_version_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [("a", "{\"version\": 1, "), ("b", "{\"version\": 3}"), ("c", "\u{0}")] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("ladder.json"), text).unwrap();
        }
        let all = Catalogue::read(dir.path());
        assert!(all.rows.is_empty());
        let versions: Vec<bool> = all.faults.iter().map(|f| f.other_version).collect();
        assert_eq!(versions, [false, true, false]);
        assert!(all.faults.iter().zip(["a/", "b/", "c/"]).all(|(f, n)| f.reason.contains(&format!("{n}ladder.json"))));
        assert_eq!(all.other_versions().count(), 1);
    }
}
