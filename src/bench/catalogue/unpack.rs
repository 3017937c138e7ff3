//! Taking another machine's bundle in. Everything is checked before anything is written: the archive, the digests, what every
//! record says, that figures are figures. Then the folder appears whole or not at all.

use super::bundle::{BUNDLE_VERSION, FORMAT, MANIFEST_FILE, Manifest, check_label};
use super::rows::{RECORD_FILES, rows_of};
use super::tar::{self, Entry};
use super::{Kind, Row};
use crate::bench::inputs::digest;
use crate::sys::durable::{sync_folder, write_atomic};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Folder of a results folder that imported ones come into.
pub const IMPORTED: &str = "imported";
/// Largest bundle, compressed.
const MAX_BUNDLE_BYTES: u64 = 256 << 20;
const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";

/// Why a bundle was not taken in.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct ImportError {
    /// The bundle, or the folder that it was to go to.
    pub path: PathBuf,
    /// What is wrong.
    pub reason: String,
}

/// A bundle that holds what it says.
pub struct Bundle {
    /// Its manifest.
    pub manifest: Manifest,
    /// Its rows; paths are those inside.
    pub rows: Vec<Row>,
    entries: Vec<Entry>,
}

/// Reads a manifest.
pub fn read_manifest(text: &str) -> Result<Manifest, String> {
    #[derive(serde::Deserialize)]
    struct Head {
        format: String,
        version: u32,
    }
    let head: Head = serde_json::from_str(text).map_err(|e| format!("no manifest of a bundle: {e}"))?;
    if head.format != FORMAT {
        return Err("no manifest of a bundle of results".into());
    }
    if head.version != BUNDLE_VERSION {
        return Err(format!(
            "the bundle has version {}, this argodrive reads {BUNDLE_VERSION}; use the one that wrote it",
            head.version
        ));
    }
    serde_json::from_str(text).map_err(|e| format!("its manifest: {e}"))
}

/// Opens and checks a bundle; writes nothing.
pub fn open(path: &Path) -> Result<Bundle, ImportError> {
    let fail = |reason: String| ImportError { path: path.to_path_buf(), reason };
    let bytes = fs::metadata(path).map_err(|e| fail(e.to_string()))?;
    if !bytes.is_file() || bytes.len() > MAX_BUNDLE_BYTES {
        return Err(fail(format!("no bundle: it must be a file of at most {MAX_BUNDLE_BYTES} bytes")));
    }
    let file = File::open(path).map_err(|e| fail(e.to_string()))?;
    check(tar::read(file).map_err(fail)?).map_err(fail)
}

fn check(mut entries: Vec<Entry>) -> Result<Bundle, String> {
    if entries.first().is_none_or(|e| e.path != MANIFEST_FILE) {
        return Err(format!("its first file is not {MANIFEST_FILE}: no bundle of results"));
    }
    let first = entries.remove(0);
    let manifest = read_manifest(std::str::from_utf8(&first.bytes).map_err(|_| "its manifest is not text")?)?;
    check_label(&manifest.label)?;
    let listed: BTreeMap<&str, _> = manifest.files.iter().map(|f| (f.path.as_str(), f)).collect();
    let there: BTreeSet<&str> = entries.iter().map(|e| e.path.as_str()).collect();
    if let Some(missing) = listed.keys().find(|p| !there.contains(*p)) {
        return Err(format!("`{missing}` is in the manifest and not in the bundle"));
    }
    let mut rows = Vec::new();
    for entry in &entries {
        let Some(said) = listed.get(entry.path.as_str()) else {
            return Err(format!("`{}` is in the bundle and not in its manifest", entry.path));
        };
        if said.bytes != entry.bytes.len() as u64 || said.digest != digest(&entry.bytes) {
            return Err(format!("`{}` has another digest than the manifest says: damaged or changed", entry.path));
        }
        rows.extend(contents(entry)?);
    }
    for row in &mut rows {
        row.origin = Some(manifest.label.clone());
    }
    entries.insert(0, first);
    Ok(Bundle { manifest, rows, entries })
}

/// The rows of a file, if it is a record; a figure has none.
fn contents(entry: &Entry) -> Result<Vec<Row>, String> {
    let path = Path::new(&entry.path);
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let text = || std::str::from_utf8(&entry.bytes).map_err(|_| format!("`{}` is not text", entry.path));
    match path.extension().and_then(|e| e.to_str()) {
        Some("json") if RECORD_FILES.contains(&name) => rows_of(path, text()?).map_err(|e| e.to_string()),
        Some("svg") => svg(text()?).map(|()| Vec::new()).map_err(|why| format!("`{}`: {why}", entry.path)),
        Some("png") if entry.bytes.starts_with(PNG) => Ok(Vec::new()),
        _ => Err(format!("`{}` is neither a record nor a figure", entry.path)),
    }
}

/// Elements that figures of results are made of.
const DRAWN: [&str; 12] =
    ["svg", "title", "desc", "g", "text", "tspan", "rect", "line", "path", "circle", "polyline", "polygon"];

/// Names behind each `<`, without the slash of an end.
fn element_names(text: &str) -> impl Iterator<Item = &str> {
    text.split('<').skip(1).map(|rest| {
        let rest = rest.strip_prefix('/').unwrap_or(rest);
        rest.split(|c: char| c.is_whitespace() || c == '>' || c == '/').next().unwrap_or_default()
    })
}

/// Refuses a drawing that would do or fetch something when it is opened.
fn svg(text: &str) -> Result<(), String> {
    let lower = text.to_ascii_lowercase();
    if !lower.contains("<svg") {
        return Err("no SVG figure".into());
    }
    if let Some(name) = element_names(&lower).find(|name| !DRAWN.contains(name)) {
        return Err(format!("a figure of results draws and does nothing else; this one has an element `{name}`"));
    }
    if lower.match_indices("url(").any(|(at, _)| !lower[at + 4..].starts_with('#')) {
        return Err("a figure of results draws and does nothing else; this one refers to something outside".into());
    }
    let active = ["href", "javascript:", "@import"];
    if let Some(word) = active.iter().find(|w| lower.contains(**w)) {
        return Err(format!("a figure of results draws and does nothing else; this one has `{word}`"));
    }
    // attributes like onload=
    let handler = lower.match_indices("on").any(|(at, _)| {
        let before = lower[..at].chars().next_back().is_some_and(|c| c.is_whitespace() || "\"'/".contains(c));
        let rest = lower[at + 2..].trim_start_matches(|c: char| c.is_ascii_alphabetic());
        before && rest.len() < lower.len() - at - 2 && rest.trim_start().starts_with('=')
    });
    if handler {
        Err("a figure of results draws and does nothing else; this one has an event handler".into())
    } else {
        Ok(())
    }
}

impl Bundle {
    /// Whether it holds a row of this kind.
    pub fn has(&self, kind: Kind) -> bool {
        self.rows.iter().any(|r| r.kind == kind)
    }

    /// Writes it below `into`, under `label`; gives the folder.
    pub fn place(&self, into: &Path, label: &str) -> Result<PathBuf, ImportError> {
        let folder = into.join(IMPORTED).join(label);
        let fail = |path: &Path, reason: String| ImportError { path: path.to_path_buf(), reason };
        check_label(label).map_err(|e| fail(&folder, e))?;
        if let Ok(there) = fs::read_to_string(folder.join(MANIFEST_FILE)) {
            let same = there.as_bytes() == self.entries[0].bytes;
            let why = if same { "this bundle is there already" } else { "another bundle is there under this label" };
            return Err(fail(&folder, format!("{why}; give --label another name, or remove the folder")));
        }
        if folder.exists() {
            return Err(fail(&folder, "something else is there; give --label another name".into()));
        }
        let growing = into.join(IMPORTED).join(format!(".{label}.{}.tmp", std::process::id()));
        // what a killed import left under this name was never checked
        match fs::remove_dir_all(&growing) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(fail(&growing, e.to_string())),
            _ => {}
        }
        let written =
            self.write(&growing).and_then(|()| fs::rename(&growing, &folder).map_err(|e| (folder.clone(), e)));
        if let Err((path, e)) = written {
            let _ = fs::remove_dir_all(&growing); // the error is the one to report
            return Err(fail(&path, e.to_string()));
        }
        sync_folder(&into.join(IMPORTED)).map_err(|e| fail(&folder, e.to_string()))?;
        Ok(folder)
    }

    fn write(&self, folder: &Path) -> Result<(), (PathBuf, std::io::Error)> {
        for entry in &self.entries {
            let path = folder.join(&entry.path);
            let parent = path.parent().unwrap_or(folder);
            fs::create_dir_all(parent).map_err(|e| (parent.to_path_buf(), e))?;
            write_atomic(&path, &entry.bytes).map_err(|e| (path, e))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::bundle::{BundleFile, pack};
    use super::super::scrub::Scrub;
    use super::*;

    fn samples() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples")
    }

    fn repacked(change: &dyn Fn(&mut Vec<Entry>)) -> Result<Bundle, String> {
        let packed = pack(&[samples().join("aa")], Some("there"), Scrub::default()).unwrap();
        let mut entries = tar::read(&packed.bytes[..]).unwrap();
        change(&mut entries);
        check(tar::read(&tar::write(&entries).unwrap()[..]).unwrap())
    }

    /// Adds a file and its line in the manifest.
    fn with(path: &'static str, bytes: &'static [u8]) -> Result<Bundle, String> {
        repacked(&move |entries| {
            let mut manifest: Manifest = serde_json::from_slice(&entries[0].bytes).unwrap();
            manifest.files.push(BundleFile { path: path.into(), bytes: bytes.len() as u64, digest: digest(bytes) });
            entries[0].bytes = serde_json::to_vec(&manifest).unwrap();
            entries.push(Entry { path: path.into(), bytes: bytes.to_vec() });
        })
    }

    #[test]
    fn a_bundle_of_the_samples_comes_out_as_it_went_in() {
        let packed = pack(&[samples()], Some("there"), Scrub::default()).unwrap();
        assert!(packed.faults.is_empty() && packed.records >= 4 && packed.figures >= 4);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("b.tar.gz");
        fs::write(&file, &packed.bytes).unwrap();
        let bundle = open(&file).unwrap();
        assert!(bundle.has(Kind::Rung) && bundle.has(Kind::Comparison) && !bundle.has(Kind::Ceiling));
        let folder = bundle.place(dir.path(), "there").unwrap();
        let all = super::super::walk::Catalogue::read(dir.path());
        assert_eq!(all.faults, []);
        assert_eq!(all.rows.len(), bundle.rows.len());
        assert!(all.rows.iter().all(|r| r.origin.as_deref() == Some("there")));
        let e = bundle.place(dir.path(), "there").unwrap_err().to_string();
        assert!(e.contains("there already") && e.contains("--label"), "{e}");
        assert!(bundle.place(dir.path(), "../x").is_err());
        assert_eq!(fs::read_dir(folder.parent().unwrap()).unwrap().count(), 1, "nothing half-made is left");
        // what came from elsewhere is not passed on as one's own
        assert!(pack(&[dir.path().join(IMPORTED)], None, Scrub::default()).is_err());
    }

    #[test]
    fn a_bundle_that_does_not_hold_what_it_says_is_refused_by_name() {
        assert!(repacked(&|_| ()).is_ok());
        let says = |result: Result<Bundle, String>, word: &str| {
            let e = result.err().unwrap_or_else(|| panic!("taken in: {word}"));
            assert!(e.contains(word), "{word}: {e}");
        };
        says(repacked(&|e| e[1].bytes[20] ^= 1), "another digest");
        says(repacked(&|e| drop(e.pop())), "not in the bundle");
        says(repacked(&|e| e.push(Entry { path: "x/record.json".into(), bytes: vec![] })), "not in its manifest");
        says(repacked(&|e| drop(e.remove(0))), "no bundle of results");
        let manifest = |from: &'static str, to: &'static str| {
            repacked(&move |e| {
                let text = String::from_utf8(e[0].bytes.clone()).unwrap();
                assert!(text.contains(from));
                e[0].bytes = text.replacen(from, to, 1).into_bytes();
            })
        };
        says(manifest("\"version\": 1", "\"version\": 2"), "use the one that wrote it");
        says(manifest("argodrive results bundle", "something"), "no manifest");
        says(manifest("\"there\"", "\"../../x\""), "no label");
        says(with("x/run.sh", b"rm"), "neither a record nor a figure");
        says(with("x/record.json", b"{\"version\": 99}"), "x/record.json");
        says(with("x/f.png", b"<svg/>"), "neither a record");
        for bad in [
            &b"<svg><script>1</script></svg>"[..],
            b"<svg onload = 'x()'></svg>",
            b"<svg><a xlink:href='http://x'/></svg>",
            b"<svg style='fill:url(http://x)'/>",
            b"<svg style='fill:url( \"//x/p\")'/>",
            b"<svg xmlns:s='http://www.w3.org/2000/svg'><s:script>1</s:script></svg>",
            b"<!DOCTYPE svg [<!ENTITY a 'b'>]><svg/>",
        ] {
            says(with("x/f.svg", bad), "does nothing else");
        }
        assert!(with("x/g.svg", b"<svg><text>only mine, on 4 drives</text></svg>").is_ok());
    }
}
