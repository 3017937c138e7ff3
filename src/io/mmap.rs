//! Copies from mapped files, by a pool of threads: how many model runners read weights. It exists to be measured.
//!
//! A mapping of a file that shrinks kills the process with SIGBUS when a lost page is touched. So a read is bounded by
//! the file's length at opening and by its length now, asked for before each copy; only a file cut off *during* a copy
//! can still kill the process. No advice is given to the kernel: pages come as faults and read-ahead bring them.

use super::buffered::refuse_direct;
use super::pool::{PoolEngine, ReadOne};
use super::{EngineKind, IoSetupError, ReadOutcome, ReadRequest, Signal, Work};
use crate::clock::Clock;
use crate::sys::map::map_readonly;
use memmap2::Mmap;
use std::fs::File;
use std::sync::Arc;

/// Copies from mapped files in a pool of threads.
pub type MmapEngine = PoolEngine<Mapped>;

/// Copies from mapped files.
pub struct Mapped {
    files: Vec<MappedFile>,
}

struct MappedFile {
    file: File,
    /// `None`: the file was empty.
    map: Option<Mmap>,
}

impl PoolEngine<Mapped> {
    /// As [`super::psync::PsyncEngine::new`]; maps every file whole. Files that are open for direct reads are refused.
    pub fn new(
        files: Vec<File>,
        queue_depth: u32,
        max_requests: u32,
        signal: Arc<Signal>,
        clock: Clock,
    ) -> Result<Self, IoSetupError> {
        refuse_direct(EngineKind::Mmap, &files)?;
        let fail = |index: usize, source: std::io::Error| IoSetupError::Engine {
            engine: EngineKind::Mmap,
            reason: format!(
                "file {index} cannot be mapped: {source}; check `ulimit -v` and vm.max_map_count, or use --engine psync"
            ),
        };
        let mapped = files.into_iter().enumerate().map(|(index, file)| {
            let len = file.metadata().map_err(|e| fail(index, e))?.len();
            let map = if len == 0 { None } else { Some(map_readonly(&file).map_err(|e| fail(index, e))?) };
            Ok(MappedFile { file, map })
        });
        let files = mapped.collect::<Result<_, IoSetupError>>()?;
        Self::start(Mapped { files }, queue_depth, max_requests, signal, clock)
    }
}

impl ReadOne for Mapped {
    const KIND: EngineKind = EngineKind::Mmap;

    fn read(&self, request: &mut ReadRequest, work: &Work) -> ReadOutcome {
        let Some(mapped) = self.files.get(request.file as usize) else {
            return ReadOutcome::Failed { errno: libc::EBADF };
        };
        let outcome = mapped.copy(request);
        work.read_by(Self::KIND);
        outcome
    }
}

impl MappedFile {
    fn copy(&self, request: &mut ReadRequest) -> ReadOutcome {
        let ReadRequest { offset, len, need, .. } = *request;
        let Some(target) = request.slot.bytes_mut().get_mut(..len as usize).filter(|_| need <= len) else {
            return ReadOutcome::Failed { errno: libc::EFAULT };
        };
        if offset > i64::MAX as u64 {
            return ReadOutcome::Failed { errno: libc::EINVAL }; // as the kernel answers a positional read
        }
        let now = match self.file.metadata() {
            Ok(metadata) => metadata.len(),
            Err(e) => return ReadOutcome::Failed { errno: e.raw_os_error().unwrap_or(libc::EIO) },
        };
        let source = self.map.as_deref().unwrap_or(&[]);
        let end = usize::try_from(now).unwrap_or(usize::MAX).min(source.len());
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(end);
        let source = &source[start..end.min(start.saturating_add(len as usize))];
        target[..source.len()].copy_from_slice(source);
        let bytes = source.len() as u32; // at most `len`
        if bytes >= need { ReadOutcome::Done { bytes } } else { ReadOutcome::Short { bytes } }
    }
}
