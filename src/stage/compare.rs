//! Compares a plan with what is on its drives: which experts are missing where. What `drive.json` names but the drive
//! does not hold counts as missing; reads experts only for a repair, and writes nothing.

use super::{StageError, Work};
use crate::ids::DriveId;
use crate::layout::plan::{Plan, PlanDrive};
use crate::store::manifest::{Container, DRIVE_FILE, Digest, DriveManifest, drive_folder};
use crate::store::piece::{PackId, Piece, PieceKey};
use std::collections::{BTreeMap, HashMap, HashSet};
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
    let mut look = Look { folder: &folder, buffer: Vec::new(), open: None };
    let mut missing: BTreeMap<PackId, Vec<(PieceKey, bool)>> = BTreeMap::new();
    let (mut present, mut planned, mut spoiled) = (Vec::new(), 0, 0);
    for key in plan.pieces_on(id) {
        planned += 1;
        let Some(original) = source.find(key.layer, key.expert) else {
            return Err(StageError::Mismatch(format!(
                "the plan places {}-{}, which the store does not hold; plan again with this store, or, \
                 if its experts went onto drives, import again with this plan",
                key.layer, key.expert
            )));
        };
        let sound = match manifest.find_piece(&key) {
            None => false,
            Some(piece) if repair => {
                piece.expert_digest == original.digest
                    && look.digest(&manifest, &piece).map_err(|(path, source)| fault(drive, path, source))?
                        == Some(piece.digest)
            }
            Some(piece) if piece.expert_digest != original.digest => {
                return Err(StageError::Mismatch(format!(
                    "drive {}: {} gives {key} another digest than the store; stage again with --repair",
                    drive.name,
                    folder.join(DRIVE_FILE).display(),
                )));
            }
            Some(_) => true,
        };
        if sound {
            present.push(key);
        } else {
            let named = on_disk.find_piece(&key).is_some();
            spoiled += usize::from(named);
            manifest.remove(&key);
            missing.entry(key.pack()).or_default().push((key, !named));
        }
    }
    if manifest.container == Container::Files && !missing.is_empty() {
        return Err(StageError::Mismatch(format!(
            "drive {} ({}) is an adopted file-per-expert folder, which lacks experts of the plan; argodrive does not add to it",
            drive.name,
            folder.display()
        )));
    }
    Ok(Work { name: drive.name.clone(), folder, manifest, planned, spoiled, present, missing })
}

fn fault(drive: &PlanDrive, path: PathBuf, source: std::io::Error) -> StageError {
    StageError::Io { drive: drive.name.clone(), path, source }
}

/// Takes pieces out of `manifest` whose file is gone or ends before them.
pub(super) fn forget_lost(manifest: &mut DriveManifest, folder: &Path) -> Result<(), (PathBuf, std::io::Error)> {
    let mut lengths: HashMap<String, u64> = HashMap::new();
    let mut lost: HashSet<PieceKey> = HashSet::new();
    for piece in manifest.pieces() {
        let (name, extent) = manifest.locate_piece(&piece);
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
            lost.insert(piece.key);
        }
    }
    if !lost.is_empty() {
        manifest.retain(|key| !lost.contains(key));
    }
    Ok(())
}

/// Reads pieces back, past the page cache where the system allows it.
struct Look<'a> {
    folder: &'a Path,
    buffer: Vec<u8>,
    open: Option<(String, File)>,
}

impl Look<'_> {
    /// Digest of what lies there; `None` where it cannot be read, which is as good as wrong.
    fn digest(&mut self, manifest: &DriveManifest, piece: &Piece) -> Result<Option<Digest>, (PathBuf, std::io::Error)> {
        let (name, extent) = manifest.locate_piece(piece);
        let (_, file) = match self.open.take() {
            Some(same) if same.0 == name => self.open.insert(same),
            _ => {
                let path = self.folder.join(&name);
                let file = File::open(&path).map_err(|e| (path, e))?;
                let _ = crate::sys::cache::drop_file(&file);
                self.open.insert((name, file))
            }
        };
        self.buffer.resize(extent.len as usize, 0);
        let read = file.read_exact_at(&mut self.buffer, extent.offset);
        Ok(read.is_ok().then(|| Digest::of(&self.buffer)))
    }
}
