//! Takes back what staging a plan added: the pieces that its journal on each drive names as new. What was there before stays,
//! and so does what another plan was staged with (its own journal says so) or a plan to keep needs. Nothing is taken
//! out that the store does not hold.

use super::compare::forget_lost;
use super::free::{free_unused, unused_bytes};
use super::journal::{self, Staged};
use super::lock::{lock_mount, lock_readers_out};
use super::{StageError, check_mounts, check_store};
use crate::ids::DriveId;
use crate::layout::plan::{Plan, PlanDrive};
use crate::store::manifest::{DRIVE_FILE, DriveManifest, drive_folder};
use crate::store::piece::{PackId, PieceKey};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What was taken back, or would be, on one drive.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RollbackReport {
    /// Drive name.
    pub name: String,
    /// The drive's folder of this model.
    pub folder: PathBuf,
    /// Pieces that staging the plan had added.
    pub added: usize,
    /// Pieces taken out.
    pub removed: usize,
    /// Pieces that stay because other plans need them.
    pub needed: usize,
    /// Bytes that the file system gets back.
    pub freed_bytes: u64,
}

/// Takes back what staging `plan` added at `mounts`, except what `keep` needs there.
pub fn rollback(
    plan: &Plan,
    store: &Path,
    mounts: &[PathBuf],
    keep: &[&Plan],
    dry_run: bool,
) -> Result<Vec<RollbackReport>, StageError> {
    check_store(plan, store)?;
    check_mounts(plan, mounts)?;
    if let Some(other) = keep.iter().find(|k| k.model_id != plan.model_id) {
        return Err(StageError::Mismatch(format!(
            "--keep: a plan for model {} says nothing about drives of model {}; name plans of the same model",
            other.model_id, plan.model_id
        )));
    }
    let hash = plan.hash()?;
    let mut held = DriveManifest::open(&drive_folder(store, &plan.model_id))?;
    let store_folder = drive_folder(store, &plan.model_id);
    forget_lost(&mut held, &store_folder).map_err(|(path, source)| {
        let drive = "of the store".to_string();
        StageError::Io { drive, path, source }
    })?;
    let mut one = |(drive, mount): (&PlanDrive, &PathBuf)| {
        let needed = needed_by(keep, &drive.name);
        let of = OneDrive { drive, mount, folder: drive_folder(mount, &plan.model_id), hash: &hash };
        of.take_back(&held, &needed, dry_run)
    };
    plan.drives.iter().zip(mounts).map(&mut one).collect()
}

/// What plans need on the drive of this name.
fn needed_by(plans: &[&Plan], name: &str) -> BTreeSet<PieceKey> {
    let on = |plan: &&Plan| plan.drive_named(name).map(|id: DriveId| plan.pieces_on(id).collect::<Vec<_>>());
    plans.iter().filter_map(on).flatten().collect()
}

struct OneDrive<'a> {
    drive: &'a PlanDrive,
    mount: &'a Path,
    folder: PathBuf,
    hash: &'a str,
}

impl OneDrive<'_> {
    fn io(&self, path: &Path) -> impl FnOnce(std::io::Error) -> StageError + use<> {
        let (drive, path) = (self.drive.name.clone(), path.to_path_buf());
        move |source| StageError::Io { drive, path, source }
    }

    fn take_back(
        &self,
        store: &DriveManifest,
        keep: &BTreeSet<PieceKey>,
        dry_run: bool,
    ) -> Result<RollbackReport, StageError> {
        let name = self.drive.name.clone();
        let mut report =
            RollbackReport { name, folder: self.folder.clone(), added: 0, removed: 0, needed: 0, freed_bytes: 0 };
        let _lock = if dry_run { None } else { Some(lock_mount(&self.drive.name, self.mount)?) };
        let mut journals = journal::all(&self.folder).map_err(self.io(&self.folder))?;
        let own = journals.iter().position(|(_, staged)| staged.plan_hash == self.hash);
        let Some((path, Staged { added, .. })) = own.map(|at| journals.remove(at)) else { return Ok(report) };
        let _readers = if dry_run { None } else { Some(lock_readers_out(&self.drive.name, &self.folder)?) };
        report.added = added.len();
        let elsewhere = |key: &PieceKey| {
            keep.contains(key) || journals.iter().any(|(_, s)| s.added.contains(key) || s.used.contains(key))
        };
        let mut manifest = if self.folder.join(DRIVE_FILE).exists() {
            DriveManifest::open(&self.folder)?
        } else {
            DriveManifest::empty(&store.model_id, store.expert_bytes)
        };
        let (mut removed, mut lost) = (BTreeSet::new(), None);
        for key in &added {
            let Some(piece) = manifest.find_piece(key) else { continue };
            if elsewhere(key) {
                report.needed += 1;
            } else {
                let safe = store.find(key.layer, key.expert).is_some_and(|e| e.digest == piece.expert_digest);
                lost = lost.or_else(|| (!safe).then_some(*key));
                removed.insert(*key);
            }
        }
        if let Some(key) = lost {
            return Err(StageError::Mismatch(format!(
                "drive {}: the store does not hold {key} any more, so that the copy here may be the last; nothing was \
                 taken out. Import the checkpoint again, then roll back",
                self.drive.name
            )));
        }
        report.removed = removed.len();
        manifest.retain(|key| !removed.contains(key));
        let packs: BTreeSet<PackId> = added.iter().map(PieceKey::pack).collect();
        if dry_run {
            report.freed_bytes = unused_bytes(&self.folder, &manifest, &packs).map_err(|(p, e)| self.io(&p)(e))?;
            return Ok(report);
        }
        if !removed.is_empty() {
            manifest.save(&self.folder)?;
        }
        report.freed_bytes = free_unused(&self.folder, &manifest, &packs).map_err(|(p, e)| self.io(&p)(e))?;
        std::fs::remove_file(&path).map_err(self.io(&path))?;
        if manifest.pieces().next().is_none() {
            self.leave()?;
        }
        Ok(report)
    }

    /// Nothing of the model is left: removes the manifest, and folders that are empty then.
    fn leave(&self) -> Result<(), StageError> {
        let manifest = self.folder.join(DRIVE_FILE);
        if manifest.exists() {
            std::fs::remove_file(&manifest).map_err(self.io(&manifest))?;
        }
        // a folder in which something else lies is not empty and stays
        if std::fs::remove_dir(&self.folder).is_ok()
            && let Some(parent) = self.folder.parent()
        {
            let _ = std::fs::remove_dir(parent);
        }
        Ok(())
    }
}
