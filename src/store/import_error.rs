//! Why an import stopped, in words that say what to do. Shared by everything that makes a store.

use super::manifest::ManifestError;
use crate::model::safetensors::CheckpointError;
use crate::sys::lock::Held;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Why an import stopped.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The checkpoint is not as it should be.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A manifest could not be read or written.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A file of the store could not be written.
    #[error("{}: {source}; what is done is kept, run the same command again to go on", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The disk is full.
    #[error("{}: the disk is full ({source}); what is done is kept: free some space and run the same command again", path.display())]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// There is not enough room to begin.
    #[error("{}: not enough free space: needs {needs} bytes, has {has}; free some or choose another folder", store.display())]
    NoSpace {
        /// The store.
        store: PathBuf,
        /// Bytes still to be written.
        needs: u64,
        /// Bytes free.
        has: u64,
    },
    /// Another process is importing into this store.
    #[error("{}: another import into this store ({held}) is running; wait for it to end, or stop it: what it has done is kept, and the same command goes on from there", store.display())]
    Busy {
        /// The store.
        store: PathBuf,
        /// Who it is.
        held: Held,
    },
    /// The store holds, or is becoming, something else.
    #[error("{}: begun with another checkpoint: {reason}; remove the folder to start over, or choose another --store", store.display())]
    OtherCheckpoint {
        /// The store.
        store: PathBuf,
        /// What differs.
        reason: String,
    },
    /// The store is complete and holds another model.
    #[error("{}: already holds another model ({reason}); it is not overwritten, choose another --store", store.display())]
    OtherModel {
        /// The store.
        store: PathBuf,
        /// What differs.
        reason: String,
    },
    /// The target folder cannot be used.
    #[error("{}: {reason}", path.display())]
    Target {
        /// The folder or file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A weight that is no number cannot be turned into a code.
    #[error("{}: tensor {tensor}: row {row} holds a value that is not finite, which int8 cannot keep; import with --trunk bf16", path.display())]
    NotFinite {
        /// The shard.
        path: PathBuf,
        /// Full tensor name.
        tensor: String,
        /// The row.
        row: u64,
    },
    /// An expert's scale is not a number.
    #[error("{}: tensor {tensor}: the scale of row {row}, group {group} is 255 (NaN); the checkpoint is damaged", path.display())]
    NanScale {
        /// The shard.
        path: PathBuf,
        /// Full tensor name.
        tensor: String,
        /// Row of the scale plane.
        row: u64,
        /// Group of 32 columns inside the row.
        group: u64,
    },
}

impl ImportError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ImportError::DiskFull { path, source },
            _ => ImportError::Io { path, source },
        }
    }
}
