//! Positional reads through the page cache, by a pool of threads: what a program does that never heard of direct I/O.
//! It exists to be measured; a run's second look at an expert may come from memory.

use super::pool::{PoolEngine, ReadOne};
use super::psync::Positional;
use super::{EngineKind, IoSetupError, ReadOutcome, ReadRequest, Signal, Work};
use crate::clock::Clock;
use crate::sys::direct::is_direct;
use std::fs::File;
use std::sync::Arc;

/// Reads through the page cache in a pool of threads.
pub type BufferedEngine = PoolEngine<Cached>;

/// `pread` of files that are open through the page cache.
pub struct Cached(Positional);

impl PoolEngine<Cached> {
    /// As [`super::psync::PsyncEngine::new`]; files that are open for direct reads are refused.
    pub fn new(
        files: Vec<File>,
        queue_depth: u32,
        max_requests: u32,
        signal: Arc<Signal>,
        clock: Clock,
    ) -> Result<Self, IoSetupError> {
        refuse_direct(EngineKind::Buffered, &files)?;
        Self::start(Cached(Positional::over(files)), queue_depth, max_requests, signal, clock)
    }
}

impl ReadOne for Cached {
    const KIND: EngineKind = EngineKind::Buffered;

    fn read(&self, request: &mut ReadRequest, work: &Work) -> ReadOutcome {
        self.0.read_as(Self::KIND, request, work)
    }
}

/// An engine that is the page cache cannot be given files that go past it.
pub(super) fn refuse_direct(engine: EngineKind, files: &[File]) -> Result<(), IoSetupError> {
    if files.iter().any(is_direct) {
        let reason = "it reads through the page cache, but the files are open for direct reads; add --buffered".into();
        return Err(IoSetupError::Engine { engine, reason });
    }
    Ok(())
}
