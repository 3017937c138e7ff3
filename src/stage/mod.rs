//! Makes a plan true: copies the experts that a plan places on a drive and the drive does not yet hold. Knows
//! manifests and plans; knows nothing of readers or decoding.
//!
//! Order of writes, so that a stop at any moment loses nothing: experts go into slots that no manifest names, the
//! pack is fsynced, the new bytes are read back past the page cache and their digests compared, and only then the new
//! `drive.json` replaces the old one. That happens layer by layer, so a later run continues where this one ended.

mod copy;

use crate::ids::{DriveId, ExpertId, LayerId};
use crate::layout::plan::{Plan, PlanError, Shape};
use crate::store::import::Progress;
use crate::store::manifest::{Container, DRIVE_FILE, DriveManifest, ManifestError, StoreManifest, drive_folder};
use std::collections::BTreeMap;
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
    #[error("drive {drive}: {} at offset {offset}: the digest of L{layer}-E{expert} is {seen}, {file_says} in its manifest; {advice}", path.display())]
    Digest {
        /// Drive name.
        drive: String,
        /// The file.
        path: PathBuf,
        /// First byte of the expert.
        offset: u64,
        /// Layer.
        layer: u16,
        /// Expert.
        expert: u16,
        /// Digest of the bytes.
        seen: String,
        /// Digest expected.
        file_says: String,
        /// What to do.
        advice: &'static str,
    },
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
    /// The plan and the store or drive do not belong together.
    #[error("{0}")]
    Mismatch(String),
}

/// How to stage.
#[derive(Clone, Copy, Debug)]
pub struct StageOptions {
    /// Only say what would be copied.
    pub dry_run: bool,
    /// Bytes that stay free on every drive.
    pub margin_bytes: u64,
}

impl Default for StageOptions {
    fn default() -> Self {
        Self { dry_run: false, margin_bytes: DEFAULT_MARGIN_BYTES }
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
    /// Experts that were there already.
    pub present: usize,
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
    let work = plan_work(plan, mounts, &source)?;
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

/// Compares plan and drives: what is missing where.
fn plan_work(plan: &Plan, mounts: &[PathBuf], source: &DriveManifest) -> Result<Vec<Work>, StageError> {
    let mut out = Vec::with_capacity(mounts.len());
    for (index, (drive, mount)) in plan.drives.iter().zip(mounts).enumerate() {
        let id = DriveId(index as u8);
        if !mount.is_dir() {
            return Err(StageError::Mismatch(format!(
                "drive {} ({}) is not a folder; mount it, or correct its path in drives.toml",
                drive.name,
                mount.display()
            )));
        }
        let folder = drive_folder(mount, &plan.model_id);
        let manifest = if folder.join(DRIVE_FILE).exists() {
            DriveManifest::open(&folder)?
        } else {
            DriveManifest::empty(&plan.model_id, plan.expert_bytes)
        };
        if manifest.model_id != plan.model_id || manifest.expert_bytes != plan.expert_bytes {
            return Err(StageError::Mismatch(format!(
                "drive {} ({}) holds experts of another model under this model's name; move that folder away",
                drive.name,
                folder.display()
            )));
        }
        let mut missing: BTreeMap<LayerId, Vec<ExpertId>> = BTreeMap::new();
        let mut planned = 0;
        for (layer, expert) in plan.on_drive(id) {
            planned += 1;
            let Some(original) = source.find(layer, expert) else {
                return Err(StageError::Mismatch(format!(
                    "the plan places L{}-E{}, which the store does not hold; plan again with this store",
                    layer.0, expert.0
                )));
            };
            match manifest.find(layer, expert) {
                Some(entry) if entry.digest == original.digest => {}
                Some(_) => {
                    return Err(StageError::Mismatch(format!(
                        "drive {}: L{}-E{} has another digest than the store's; run `argodrive verify`, then move the bad folder {} away",
                        drive.name,
                        layer.0,
                        expert.0,
                        folder.display()
                    )));
                }
                None => missing.entry(layer).or_default().push(expert),
            }
        }
        if manifest.container == Container::Files && !missing.is_empty() {
            return Err(StageError::Mismatch(format!(
                "drive {} ({}) is an adopted file-per-expert folder; argodrive does not add to it",
                drive.name,
                folder.display()
            )));
        }
        out.push(Work { name: drive.name.clone(), folder, manifest, planned, missing });
    }
    Ok(out)
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
