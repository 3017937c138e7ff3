//! One file of a store while it is being written: bytes go in at offsets, a commit makes them durable, then the journal,
//! and only then lets go of their pages.

use super::import::ImportError;
use super::journal::Journal;
use crate::sys::cache;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A file being filled, and which of its bytes are not yet known to be on the disk.
pub struct Target {
    file: File,
    path: PathBuf,
    dirty: Vec<(u64, u64)>,
    dirty_bytes: u64,
}

impl Target {
    /// Opens or creates `path` with exactly `len` bytes. What is in it already stays.
    pub fn open(path: &Path, len: u64) -> Result<Self, ImportError> {
        let io = |e| ImportError::io(path, e);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() != len {
            file.set_len(len).map_err(io)?;
        }
        if let Some(folder) = path.parent() {
            crate::sys::durable::sync_folder(folder).map_err(|e| ImportError::io(folder, e))?;
        }
        Ok(Self { file, path: path.to_path_buf(), dirty: Vec::new(), dirty_bytes: 0 })
    }

    /// Writes `bytes` at `offset`.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ImportError> {
        self.file.write_all_at(bytes, offset).map_err(|e| ImportError::io(&self.path, e))?;
        let len = bytes.len() as u64;
        // advice only: a file system without it costs speed, nothing else
        let _ = cache::start_writeback(&self.file, offset, len);
        self.dirty.push((offset, len));
        self.dirty_bytes += len;
        Ok(())
    }

    /// Bytes written since the last commit.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes
    }

    /// Makes everything written durable, then what `journal` noted about it.
    pub fn commit(&mut self, journal: &mut Journal) -> Result<(), ImportError> {
        self.sync()?;
        journal.commit()?;
        self.let_go();
        Ok(())
    }

    /// Makes everything written durable.
    pub fn sync(&mut self) -> Result<(), ImportError> {
        if self.dirty.is_empty() {
            return Ok(());
        }
        self.file.sync_data().map_err(|e| ImportError::io(&self.path, e))
    }

    /// Lets go of the pages of what was synced.
    pub fn let_go(&mut self) {
        for (offset, len) in self.dirty.drain(..) {
            let _ = cache::drop_pages(&self.file, offset, len);
        }
        self.dirty_bytes = 0;
    }
}
