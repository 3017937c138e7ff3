//! Who may write to a drive, and who keeps others from freeing what it reads.

use super::StageError;
use crate::layout::plan::Plan;
use crate::sys::lock::try_lock;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Keeps other writers away from the drives for as long as the files are open.
pub(super) fn lock_mounts(plan: &Plan, mounts: &[PathBuf]) -> Result<Vec<File>, StageError> {
    plan.drives.iter().zip(mounts).map(|(drive, mount)| lock_mount(&drive.name, mount)).collect()
}

/// Keeps other writers away from one drive.
pub(super) fn lock_mount(drive: &str, mount: &Path) -> Result<File, StageError> {
    let (drive, path) = (drive.to_string(), mount.to_path_buf());
    match try_lock(mount, false) {
        Err(source) => Err(StageError::Io { drive, path, source }),
        Ok(Err(held)) => Err(StageError::Busy { drive, path, held }),
        Ok(Ok(file)) => Ok(file),
    }
}

/// Makes sure that no run reads the folder of a model, and that none begins to, while the file is open. Runs share a lock
/// on it (`reader::open_drive`).
pub(super) fn lock_readers_out(drive: &str, folder: &Path) -> Result<File, StageError> {
    let (drive, path) = (drive.to_string(), folder.to_path_buf());
    match try_lock(folder, false) {
        Err(source) => Err(StageError::Io { drive, path, source }),
        Ok(Err(held)) => Err(StageError::InUse { drive, path, held }),
        Ok(Ok(file)) => Ok(file),
    }
}
