//! Files that a ceiling is measured on: the drive's own expert packs, or files that it writes for the purpose. A written
//! file loses its name as soon as it is open for writing and reading, so that nothing is left behind however the program
//! ends; with `keep` it has a name and is used again next time.

use super::seen::ResidencySample;
use crate::drive::spec::DriveSpec;
use crate::ids::Extent;
use crate::io::EngineKind;
use crate::stats::SplitMix64;
use crate::store::manifest::{DriveManifest, drive_folder};
use crate::sys::cache::drop_file;
use crate::sys::direct::{is_memory_file_system, open_direct};
use crate::sys::space::free_bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Name of a test file that is kept.
pub const KEPT_NAME: &str = "argodrive-ceiling.bin";
/// Space that stays free beside test files.
pub const MARGIN_BYTES: u64 = 256 << 20;
/// Bytes written at once.
const PIECE_BYTES: usize = 4 << 20;
/// Files of one drive that are opened.
const MAX_FILES: usize = 512;
/// Places of each drive at which residency is sampled.
const SAMPLES: u64 = 64;

/// Why a drive cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A file or folder of a drive.
    #[error("drive `{drive}`: {}: {reason}", path.display())]
    Drive {
        /// The drive.
        drive: String,
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Ctrl-C.
    #[error("interrupted; nothing was left behind")]
    Interrupted,
}

/// Which files are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Files of so many bytes, written for the purpose; `keep` leaves them, and uses them if they are there.
    Written {
        /// Bytes of each drive's file.
        bytes: u64,
        /// Whether they have a name and stay.
        keep: bool,
    },
    /// What is staged of this model.
    Packs {
        /// The model.
        model_id: String,
    },
}

/// The open files of one drive.
#[derive(Debug)]
pub struct TestFiles {
    files: Vec<File>,
    lengths: Vec<u64>,
    /// Direct reads are aligned to this; `None` = through the page cache.
    pub alignment: Option<u32>,
    /// Where they have names: what a kept file or a pack is called.
    pub named: Option<PathBuf>,
}

impl TestFiles {
    /// The same files once more, for another engine.
    pub fn again(&self) -> io::Result<Vec<File>> {
        self.files.iter().map(File::try_clone).collect()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.lengths.iter().sum()
    }

    /// All places at which a read of `bytes` may start, none overlapping, in an order drawn from `seed`: file and offset.
    pub fn places(&self, bytes: u64, seed: u64) -> Vec<(u32, u64)> {
        let step = bytes.next_multiple_of(u64::from(self.alignment.unwrap_or(1)).max(1)).max(1);
        let in_file = |(file, len): (usize, &u64)| (0..len / step).map(move |i| (file as u32, i * step));
        let mut places: Vec<(u32, u64)> = self.lengths.iter().enumerate().flat_map(in_file).collect();
        let mut rng = SplitMix64::new(seed);
        for last in (1..places.len()).rev() {
            places.swap(last, rng.below(last + 1));
        }
        places
    }
}

/// Opens or writes the files of `drives`. `progress` sees bytes written and bytes to write in all; `stop` ends it.
pub fn prepare(
    drives: &[DriveSpec],
    source: &Source,
    engine: EngineKind,
    direct: bool,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<TestFiles>, FilesError> {
    let how = How { direct: direct && engine.can_be_direct() };
    for drive in drives {
        let memory = is_memory_file_system(&drive.path).map_err(|e| fail(drive, &drive.path, e))?;
        if memory {
            let reason = "lies on a memory file system; a drive needs a folder on a disk";
            return Err(fail(drive, &drive.path, reason));
        }
    }
    match source {
        Source::Packs { model_id } => drives.iter().map(|d| how.open_packs(d, model_id)).collect(),
        Source::Written { bytes, keep } => {
            check_space(drives, *bytes, *keep)?;
            let all = bytes.saturating_mul(drives.len() as u64);
            let mut done = 0;
            let mut out = Vec::with_capacity(drives.len());
            for (seed, drive) in drives.iter().enumerate() {
                let mut wrote = |n| {
                    done += n;
                    progress(done, all);
                };
                out.push(how.write(drive, *bytes, *keep, seed as u64, stop, &mut wrote)?);
            }
            Ok(out)
        }
    }
}

fn fail(drive: &DriveSpec, path: &Path, reason: impl ToString) -> FilesError {
    FilesError::Drive { drive: drive.name.clone(), path: path.to_path_buf(), reason: reason.to_string() }
}

/// Drives on one file system share its free space.
fn check_space(drives: &[DriveSpec], bytes: u64, keep: bool) -> Result<(), FilesError> {
    let mut need: BTreeMap<u64, u64> = BTreeMap::new();
    for drive in drives {
        if keep && drive.path.join(KEPT_NAME).exists() {
            continue;
        }
        let number = crate::drive::spec::device_number(&drive.path).map_err(|e| fail(drive, &drive.path, e))?;
        let need = need.entry(number).or_insert(MARGIN_BYTES);
        *need = need.saturating_add(bytes);
        let free = free_bytes(&drive.path).map_err(|e| fail(drive, &drive.path, e))?;
        if free < *need {
            let reason = format!(
                "test files need {need} bytes, {MARGIN_BYTES} to spare among them, and {free} are free; free some space, \
                 lower --file-size, or measure on staged packs with --plan"
            );
            return Err(fail(drive, &drive.path, reason));
        }
    }
    Ok(())
}

struct How {
    direct: bool,
}

impl How {
    fn open(&self, path: &Path) -> io::Result<(File, Option<u32>)> {
        if self.direct {
            let opened = open_direct(path).map_err(|e| match e.kind() {
                io::ErrorKind::Unsupported => io::Error::other(format!(
                    "{e}; use another file system, or --buffered to measure the page cache too"
                )),
                _ => e,
            })?;
            return Ok((opened.file, Some(opened.alignment.offset_bytes)));
        }
        Ok((File::open(path)?, None))
    }

    fn open_packs(&self, drive: &DriveSpec, model_id: &str) -> Result<TestFiles, FilesError> {
        let folder = drive_folder(&drive.path, model_id);
        let manifest = DriveManifest::open(&folder).map_err(|e| {
            fail(drive, &folder, format!("{e}; nothing of this model is staged here, run `argodrive stage`"))
        })?;
        let names: BTreeSet<String> = manifest.pieces().map(|piece| manifest.locate_piece(&piece).0).collect();
        let mut out = TestFiles { files: vec![], lengths: vec![], alignment: None, named: Some(folder.clone()) };
        for name in names.into_iter().take(MAX_FILES) {
            let path = folder.join(name);
            let (file, alignment) = self.open(&path).map_err(|e| fail(drive, &path, e))?;
            drop_file(&file).map_err(|e| fail(drive, &path, e))?;
            out.lengths.push(file.metadata().map_err(|e| fail(drive, &path, e))?.len());
            out.alignment = out.alignment.max(alignment);
            out.files.push(file);
        }
        match out.files.is_empty() {
            true => Err(fail(drive, &folder, "no expert of this model is staged here; run `argodrive stage`")),
            false => Ok(out),
        }
    }

    fn write(
        &self,
        drive: &DriveSpec,
        bytes: u64,
        keep: bool,
        seed: u64,
        stop: &dyn Fn() -> bool,
        wrote: &mut dyn FnMut(u64),
    ) -> Result<TestFiles, FilesError> {
        let kept = drive.path.join(KEPT_NAME);
        if keep && kept.exists() {
            return self.reuse(drive, &kept, bytes);
        }
        // unfinished files never have the name of finished ones
        let path = drive.path.join(format!(".{KEPT_NAME}.{}.tmp", std::process::id()));
        let create = |e: io::Error| match e.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => fail(
                drive,
                &drive.path,
                format!(
                    "cannot write a test file: {e}; make the folder writable, or measure on staged packs with --plan"
                ),
            ),
            _ => fail(drive, &drive.path, format!("cannot write a test file: {e}")),
        };
        let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(create)?;
        let temporary = Temporary(Some(path.clone()));
        let opened = self.open(&path).map_err(|e| fail(drive, &path, e));
        let temporary = if keep {
            temporary
        } else {
            drop(temporary);
            Temporary(None)
        };
        let (reader, alignment) = opened?;
        fill(&file, bytes, seed, stop, wrote).map_err(|e| match e {
            Fill::Stopped => FilesError::Interrupted,
            Fill::Io(e) if e.kind() == io::ErrorKind::StorageFull || e.raw_os_error() == Some(libc::EDQUOT) => fail(
                drive,
                &drive.path,
                format!("the drive became full while a test file was written: {e}; lower --file-size"),
            ),
            Fill::Io(e) => fail(drive, &drive.path, format!("writing a test file: {e}")),
        })?;
        drop_file(&file).map_err(|e| fail(drive, &path, e))?;
        let named = match temporary.keep_as(&kept) {
            Ok(named) => named,
            Err(e) => return Err(fail(drive, &kept, e)),
        };
        Ok(TestFiles { files: vec![reader], lengths: vec![bytes], alignment, named })
    }

    fn reuse(&self, drive: &DriveSpec, path: &Path, bytes: u64) -> Result<TestFiles, FilesError> {
        let (file, alignment) = self.open(path).map_err(|e| fail(drive, path, e))?;
        let len = file.metadata().map_err(|e| fail(drive, path, e))?.len();
        if len < bytes {
            let reason = format!("has {len} bytes, {bytes} are needed; remove it, or lower --file-size");
            return Err(fail(drive, path, reason));
        }
        drop_file(&file).map_err(|e| fail(drive, path, e))?;
        Ok(TestFiles { files: vec![file], lengths: vec![len], alignment, named: Some(path.to_path_buf()) })
    }
}

/// A name that goes away with this value.
struct Temporary(Option<PathBuf>);

impl Temporary {
    /// Gives the file its name for good, if it still has one.
    fn keep_as(mut self, name: &Path) -> io::Result<Option<PathBuf>> {
        let Some(path) = &self.0 else { return Ok(None) };
        std::fs::rename(path, name)?;
        self.0 = None;
        Ok(Some(name.to_path_buf()))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

enum Fill {
    Stopped,
    Io(io::Error),
}

/// Random bytes, which no drive and no file system can compress, made durable.
fn fill(
    mut file: &File,
    bytes: u64,
    seed: u64,
    stop: &dyn Fn() -> bool,
    wrote: &mut dyn FnMut(u64),
) -> Result<(), Fill> {
    let mut rng = SplitMix64::new(seed ^ 0x61_72_67_6f);
    let mut piece = vec![0u8; PIECE_BYTES];
    let mut left = bytes;
    while left > 0 {
        if stop() {
            return Err(Fill::Stopped);
        }
        let now = usize::try_from(left).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
        piece[..now].chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next_u64().to_le_bytes()[..c.len()]));
        file.write_all(&piece[..now]).map_err(Fill::Io)?;
        left -= now as u64;
        wrote(now as u64);
    }
    file.sync_all().map_err(Fill::Io)
}

/// Extents all over the files, to see what of them lies in the page cache, and the age of the youngest file.
pub fn residency_sample(drives: &[TestFiles]) -> io::Result<ResidencySample> {
    let mut files = Vec::new();
    let mut youngest = None;
    for (file, &len) in drives.iter().flat_map(|d| d.files.iter().zip(&d.lengths)) {
        let each = (len / SAMPLES).max(1);
        let extents = (0..SAMPLES).map(|i| Extent { offset: i * each, len: each.min(64 << 10) });
        files.push((file.try_clone()?, extents.filter(|e| e.offset + e.len <= len).collect()));
        let written = file.metadata()?.modified()?;
        let age = SystemTime::now().duration_since(written).map_or(0, |d| d.as_secs());
        youngest = Some(youngest.map_or(age, |y: u64| y.min(age)));
    }
    Ok(ResidencySample::over(files, youngest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(path: &Path) -> DriveSpec {
        DriveSpec { name: "amber".into(), path: path.into(), emulate: None, faults: Vec::new() }
    }

    fn folder() -> tempfile::TempDir {
        // Not the system's folder for temporary files, which may lie in memory; the build may be elsewhere.
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
        std::fs::create_dir_all(&target).unwrap();
        tempfile::tempdir_in(target).unwrap()
    }

    fn make(drive: &DriveSpec, bytes: u64, keep: bool, stop: bool) -> Result<Vec<TestFiles>, FilesError> {
        let source = Source::Written { bytes, keep };
        prepare(std::slice::from_ref(drive), &source, EngineKind::Psync, true, &|| stop, &mut |_, _| {})
    }

    #[test]
    fn files_have_no_name_unless_they_are_kept_and_kept_ones_are_used_again() {
        let dir = folder();
        let drive = drive(dir.path());
        let count = || std::fs::read_dir(dir.path()).unwrap().count();
        let files = make(&drive, 1 << 20, false, false).unwrap();
        assert_eq!((count(), files[0].bytes(), &files[0].named), (0, 1 << 20, &None));
        let sample = residency_sample(&files).unwrap();
        assert!(sample.youngest_file_s.unwrap() < 60);
        let places = files[0].places(256 << 10, 1);
        let distinct: BTreeSet<_> = places.iter().collect();
        assert_eq!((places.len(), distinct.len()), (4, 4));
        assert!(places.iter().all(|p| p.1 % (256 << 10) == 0));
        drop(files);
        make(&drive, 1 << 20, true, false).unwrap();
        let path = dir.path().join(KEPT_NAME);
        let first = std::fs::read(&path).unwrap();
        assert!(first.windows(64).step_by(4096).all(|w| w != [0; 64]), "random bytes");
        make(&drive, 1 << 19, true, false).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), first, "used, not written again");
        let e = make(&drive, 1 << 21, true, false).unwrap_err().to_string();
        assert!(e.contains("remove it") && e.contains(KEPT_NAME), "{e}");
        assert_eq!(count(), 1);
    }

    #[test]
    fn a_full_drive_is_noticed_while_writing() {
        let Ok(full) = File::options().write(true).open("/dev/full") else { return };
        match fill(&full, 1 << 20, 0, &|| false, &mut |_| {}) {
            Err(Fill::Io(e)) => assert_eq!(e.kind(), io::ErrorKind::StorageFull),
            _ => panic!("written to a full device"),
        }
    }

    #[test]
    fn interruption_leaves_nothing_and_obstacles_are_named() {
        let dir = folder();
        let drive = drive(dir.path());
        for keep in [false, true] {
            assert!(matches!(make(&drive, 1 << 20, keep, true), Err(FilesError::Interrupted)));
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
        let e = make(&drive, 1 << 60, false, false).unwrap_err().to_string();
        assert!(e.contains("drive `amber`") && e.contains("--file-size") && e.contains("free"), "{e}");
        let gone = super::tests::drive(&dir.path().join("gone"));
        assert!(make(&gone, 1 << 20, false, false).unwrap_err().to_string().contains("gone"));
        let shm = Path::new("/dev/shm");
        if shm.is_dir() && is_memory_file_system(shm).unwrap() {
            assert!(
                make(&super::tests::drive(shm), 1, false, false)
                    .unwrap_err()
                    .to_string()
                    .contains("memory file system")
            );
        }
        let packs = Source::Packs { model_id: "none".into() };
        let e = prepare(&[drive], &packs, EngineKind::Psync, true, &|| false, &mut |_, _| {}).unwrap_err().to_string();
        assert!(e.contains("argodrive stage"), "{e}");
    }
}
