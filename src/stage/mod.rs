//! Makes a plan true: copies the experts that a plan places on a drive and the drive does not yet hold. Knows
//! manifests and plans; knows nothing of readers or decoding.
//!
//! Order of writes, so that a stop at any moment loses nothing: experts go into slots that no manifest names, the
//! pack is fsynced, the new bytes are read back past the page cache and their digests compared, and only then the new
//! `drive.json` replaces the old one. That happens layer by layer, so a later run continues where this one ended.

//!
//! One stage at a time writes to a drive: two would give the same free slot to different experts.

mod compare;
mod copy;

use crate::ids::{ExpertId, LayerId};
use crate::layout::plan::{Plan, PlanError, Shape};
use crate::store::import::Progress;
use crate::store::manifest::{Digest, DriveManifest, ManifestError, StoreManifest, drive_folder};
use compare::plan_work;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

/// Space that staging leaves free on a drive unless told otherwise.
pub const DEFAULT_MARGIN_BYTES: u64 = 256 << 20;

/// What can go wrong while staging.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// A manifest is unreadable or does not fit.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The plan is no good.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A file could not be read or written.
    #[error("drive {drive}: {}: {source}", path.display())]
    Io {
        /// Drive name.
        drive: String,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What was read is not what the manifest says.
    #[error("{0}")]
    Digest(Box<DigestFault>),
    /// Not enough room.
    #[error("drive {drive} ({}): needs {need_bytes} bytes and {margin_bytes} spare, has {free_bytes} free; free some space, lower --margin, or plan with fewer copies", path.display())]
    Space {
        /// Drive name.
        drive: String,
        /// Its folder.
        path: PathBuf,
        /// Bytes to write.
        need_bytes: u64,
        /// Bytes to leave free.
        margin_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// Another process stages to the drive.
    #[error("drive {drive} ({}): another `argodrive stage` is writing to it; wait for it to end", path.display())]
    Busy {
        /// Drive name.
        drive: String,
        /// Its folder.
        path: PathBuf,
    },
    /// The plan and the store or drive do not belong together.
    #[error("{0}")]
    Mismatch(String),
}

/// An expert whose bytes are not those of its digest.
#[derive(Debug)]
pub struct DigestFault {
    /// Drive name.
    pub drive: String,
    /// The file.
    pub path: PathBuf,
    /// First byte of the expert.
    pub offset: u64,
    /// Layer.
    pub layer: LayerId,
    /// Expert.
    pub expert: ExpertId,
    /// Digest of the bytes.
    pub seen: Digest,
    /// Digest in the manifest.
    pub expected: Digest,
    /// What to do.
    pub advice: &'static str,
}

impl std::fmt::Display for DigestFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { drive, path, offset, layer, expert, seen, expected, advice } = self;
        write!(
            f,
            "drive {drive}: {} at offset {offset}: {layer}-{expert} has digest {seen}, its manifest says {expected}; {advice}",
            path.display()
        )
    }
}

/// How to stage.
#[derive(Clone, Copy, Debug)]
pub struct StageOptions {
    /// Only say what would be copied.
    pub dry_run: bool,
    /// Bytes that stay free on every drive.
    pub margin_bytes: u64,
    /// Read back what is there already, and copy again what is wrong.
    pub repair: bool,
}

impl Default for StageOptions {
    fn default() -> Self {
        Self { dry_run: false, margin_bytes: DEFAULT_MARGIN_BYTES, repair: false }
    }
}

/// What staging did, or would do, on one drive.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DriveReport {
    /// Drive name.
    pub name: String,
    /// The drive's folder of this model.
    pub folder: PathBuf,
    /// Experts the plan wants there.
    pub planned: usize,
    /// Experts that were there already, whole as far as was looked.
    pub present: usize,
    /// Planned experts that `drive.json` names, but whose bytes are gone, or wrong (told only by a repair).
    pub spoiled: usize,
    /// Experts copied (or to be copied in a dry run).
    pub copied: usize,
    /// Payload bytes of those.
    pub copied_bytes: u64,
}

/// One drive's missing experts.
struct Work {
    name: String,
    folder: PathBuf,
    manifest: DriveManifest,
    planned: usize,
    spoiled: usize,
    missing: BTreeMap<LayerId, Vec<ExpertId>>,
}

impl Work {
    fn missing_count(&self) -> usize {
        self.missing.values().map(Vec::len).sum()
    }
}

/// Stages `plan` from the store in `store`. `mounts` overrides the plan's drive paths, in plan order.
pub fn stage(
    plan: &Plan,
    store: &Path,
    mounts: &[PathBuf],
    options: StageOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<DriveReport>, StageError> {
    let manifest = StoreManifest::open(store)?;
    if manifest.model_id != plan.model_id {
        return Err(StageError::Mismatch(format!(
            "the plan is for model {}, the store {} holds {}; plan again with this store, or name the right one with --store",
            plan.model_id,
            store.display(),
            manifest.model_id
        )));
    }
    if mounts.len() != plan.drives.len() {
        return Err(StageError::Mismatch(format!(
            "the plan has {} drives, {} paths were given",
            plan.drives.len(),
            mounts.len()
        )));
    }
    if plan.shape != Shape::Whole {
        return Err(StageError::Mismatch("this version stages whole experts only; the plan stripes them".into()));
    }
    let source_folder = drive_folder(store, &plan.model_id);
    let source = DriveManifest::open(&source_folder)?;
    check_mounts(plan, mounts)?;
    // Held until everything is published.
    let _locks = if options.dry_run { Vec::new() } else { lock(plan, mounts)? };
    let work = plan_work(plan, mounts, &source, options.repair)?;
    for item in &work {
        check_space(item, options.margin_bytes)?;
    }
    let total_bytes = work.iter().map(|w| w.missing_count() as u64 * plan.expert_bytes).sum();
    let mut done_bytes = 0;
    let mut reports = Vec::with_capacity(work.len());
    for mut item in work {
        let copied = item.missing_count();
        let report = DriveReport {
            name: item.name.clone(),
            folder: item.folder.clone(),
            planned: item.planned,
            present: item.planned - copied,
            spoiled: item.spoiled,
            copied,
            copied_bytes: copied as u64 * plan.expert_bytes,
        };
        if !options.dry_run && copied > 0 {
            let tick = &mut |bytes| {
                done_bytes += bytes;
                progress(Progress { done_bytes, total_bytes });
            };
            copy::fill_drive(&mut item, &source_folder, &source, tick)?;
        }
        reports.push(report);
    }
    Ok(reports)
}

/// Every mount is a folder of its own.
fn check_mounts(plan: &Plan, mounts: &[PathBuf]) -> Result<(), StageError> {
    let mut seen: BTreeMap<PathBuf, &str> = BTreeMap::new();
    for (drive, mount) in plan.drives.iter().zip(mounts) {
        let folder = mount.canonicalize().ok().filter(|m| m.is_dir()).ok_or_else(|| {
            StageError::Mismatch(format!(
                "drive {} ({}) is not a folder; mount it, or correct its path in drives.toml",
                drive.name,
                mount.display()
            ))
        })?;
        if let Some(other) = seen.insert(folder, &drive.name) {
            return Err(StageError::Mismatch(format!(
                "drives {other} and {} are the same folder ({}); correct one of the paths in drives.toml",
                drive.name,
                mount.display()
            )));
        }
    }
    Ok(())
}

/// Keeps other stages away from the drives for as long as the files are open.
fn lock(plan: &Plan, mounts: &[PathBuf]) -> Result<Vec<File>, StageError> {
    let mut locks = Vec::with_capacity(mounts.len());
    for (drive, mount) in plan.drives.iter().zip(mounts) {
        let (drive, path) = (drive.name.clone(), mount.clone());
        let file = match File::open(mount) {
            Ok(file) => file,
            Err(source) => return Err(StageError::Io { drive, path, source }),
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(StageError::Busy { drive, path }),
            // Some network file systems cannot lock a folder; staging alone there works as before.
            Ok(()) | Err(TryLockError::Error(_)) => locks.push(file),
        }
    }
    Ok(locks)
}

fn check_space(work: &Work, margin_bytes: u64) -> Result<(), StageError> {
    let need_bytes = work.missing_count() as u64 * work.manifest.slot_bytes;
    if need_bytes == 0 {
        return Ok(());
    }
    let mount = work.folder.ancestors().find(|p| p.is_dir()).unwrap_or(&work.folder);
    let free_bytes = crate::sys::space::free_bytes(mount).map_err(|source| StageError::Io {
        drive: work.name.clone(),
        path: mount.to_path_buf(),
        source,
    })?;
    if free_bytes < need_bytes.saturating_add(margin_bytes) {
        return Err(StageError::Space {
            drive: work.name.clone(),
            path: mount.to_path_buf(),
            need_bytes,
            margin_bytes,
            free_bytes,
        });
    }
    Ok(())
}
