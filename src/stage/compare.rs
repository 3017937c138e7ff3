//! Compares a plan with what is on its drives: which experts are missing where. What `drive.json` names but the drive
//! does not hold counts as missing; reads experts only for a repair, and writes nothing.

use super::{StageError, Work};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::layout::plan::{Plan, PlanDrive};
use crate::store::manifest::{Container, DRIVE_FILE, Digest, DriveExpert, DriveManifest, drive_folder};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// What is missing on each drive. With `repair`, experts whose bytes are wrong are missing too.
pub(super) fn plan_work(
    plan: &Plan,
    mounts: &[PathBuf],
    source: &DriveManifest,
    repair: bool,
) -> Result<Vec<Work>, StageError> {
    let drives = plan.drives.iter().zip(mounts).enumerate();
    drives.map(|(index, (drive, mount))| drive_work(plan, DriveId(index as u8), drive, mount, source, repair)).collect()
}

fn drive_work(
    plan: &Plan,
    id: DriveId,
    drive: &PlanDrive,
    mount: &Path,
    source: &DriveManifest,
    repair: bool,
) -> Result<Work, StageError> {
    let folder = drive_folder(mount, &plan.model_id);
    let on_disk = if folder.join(DRIVE_FILE).exists() {
        DriveManifest::open(&folder)?
    } else {
        DriveManifest::empty(&plan.model_id, plan.expert_bytes)
    };
    if on_disk.model_id != plan.model_id || on_disk.expert_bytes != plan.expert_bytes {
        return Err(StageError::Mismatch(format!(
            "drive {} ({}) holds experts of another model under this model's name; move that folder away",
            drive.name,
            folder.display()
        )));
    }
    let mut manifest = on_disk.clone();
    forget_lost(&mut manifest, &folder).map_err(|(path, source)| fault(drive, path, source))?;
    let mut look = Look { folder: &folder, buffer: vec![0; plan.expert_bytes as usize], open: None };
    let mut missing: BTreeMap<LayerId, Vec<ExpertId>> = BTreeMap::new();
    let (mut planned, mut spoiled) = (0, 0);
    for (layer, expert) in plan.on_drive(id) {
        planned += 1;
        let Some(original) = source.find(layer, expert) else {
            return Err(StageError::Mismatch(format!(
                "the plan places L{}-E{}, which the store does not hold; plan again with this store",
                layer.0, expert.0
            )));
        };
        let sound = match manifest.find(layer, expert) {
            None => false,
            Some(entry) if repair => {
                entry.digest == original.digest
                    && look.digest(&manifest, layer, entry).map_err(|(path, source)| fault(drive, path, source))?
                        == Some(original.digest)
            }
            Some(entry) if entry.digest != original.digest => {
                return Err(StageError::Mismatch(format!(
                    "drive {}: {} gives L{}-E{} another digest than the store; stage again with --repair",
                    drive.name,
                    folder.join(DRIVE_FILE).display(),
                    layer.0,
                    expert.0
                )));
            }
            Some(_) => true,
        };
        if !sound {
            spoiled += usize::from(on_disk.find(layer, expert).is_some());
            forget(&mut manifest, layer, expert);
            missing.entry(layer).or_default().push(expert);
        }
    }
    if manifest.container == Container::Files && !missing.is_empty() {
        return Err(StageError::Mismatch(format!(
            "drive {} ({}) is an adopted file-per-expert folder, which lacks experts of the plan; argodrive does not add to it",
            drive.name,
            folder.display()
        )));
    }
    Ok(Work { name: drive.name.clone(), folder, manifest, planned, spoiled, missing })
}

fn fault(drive: &PlanDrive, path: PathBuf, source: std::io::Error) -> StageError {
    StageError::Io { drive: drive.name.clone(), path, source }
}

/// Takes experts out of `manifest` whose file is gone or ends before them.
fn forget_lost(manifest: &mut DriveManifest, folder: &Path) -> Result<(), (PathBuf, std::io::Error)> {
    let mut lengths: HashMap<String, u64> = HashMap::new();
    let mut lost: Vec<(LayerId, ExpertId)> = Vec::new();
    for (&layer, row) in &manifest.layers {
        for entry in row {
            let (name, extent) = manifest.locate(layer, entry);
            let len = match lengths.get(&name) {
                Some(&len) => len,
                None => {
                    let path = folder.join(&name);
                    let len = match std::fs::metadata(&path) {
                        Ok(metadata) => metadata.len(),
                        Err(e) if e.kind() == ErrorKind::NotFound => 0,
                        Err(e) => return Err((path, e)),
                    };
                    *lengths.entry(name).or_insert(len)
                }
            };
            if extent.offset.checked_add(extent.len).is_none_or(|end| end > len) {
                lost.push((layer, entry.expert));
            }
        }
    }
    for (layer, expert) in lost {
        forget(manifest, layer, expert);
    }
    Ok(())
}

/// Takes one expert out of `manifest`, and its layer if it was the last.
fn forget(manifest: &mut DriveManifest, layer: LayerId, expert: ExpertId) {
    if let Some(row) = manifest.layers.get_mut(&layer) {
        row.retain(|e| e.expert != expert);
        if row.is_empty() {
            manifest.layers.remove(&layer);
        }
    }
}

/// Reads experts back, past the page cache where the system allows it.
struct Look<'a> {
    folder: &'a Path,
    buffer: Vec<u8>,
    open: Option<(String, File)>,
}

impl Look<'_> {
    /// Digest of what lies there; `None` where it cannot be read, which is as good as wrong.
    fn digest(
        &mut self,
        manifest: &DriveManifest,
        layer: LayerId,
        entry: &DriveExpert,
    ) -> Result<Option<Digest>, (PathBuf, std::io::Error)> {
        let (name, extent) = manifest.locate(layer, entry);
        let (_, file) = match self.open.take() {
            Some(same) if same.0 == name => self.open.insert(same),
            _ => {
                let path = self.folder.join(&name);
                let file = File::open(&path).map_err(|e| (path, e))?;
                let _ = crate::sys::cache::drop_file(&file);
                self.open.insert((name, file))
            }
        };
        let read = file.read_exact_at(&mut self.buffer, extent.offset);
        Ok(read.is_ok().then(|| Digest::of(&self.buffer)))
    }
}
