//! Choosing and building the engine of a drive. Knows options and engines; opens nothing.

use super::options::ReaderOptions;
use crate::clock::Clock;
use crate::io::buffered::BufferedEngine;
use crate::io::mmap::MmapEngine;
use crate::io::paced::{PacedDrive, PacedEngine};
use crate::io::psync::PsyncEngine;
use crate::io::{EngineKind, IoEngine, IoSetupError, Signal, Slab};
use crate::knob::{self, Knob};
use std::fs::File;
use std::sync::Arc;

/// The engine of a drive with `files`, reading into `slab`; it raises `signal`. Paced if the drive is emulated.
pub(super) fn make_engine(
    options: &ReaderOptions,
    clock: Clock,
    files: Vec<File>,
    slab: &Slab,
    requests: u32,
    pace: Option<Arc<PacedDrive>>,
    signal: Arc<Signal>,
) -> Result<Box<dyn IoEngine>, IoSetupError> {
    let Some(pace) = pace else { return plain(options, clock, files, slab, requests, false, signal) };
    // Reads of an emulated drive are submitted by the reader and finished by the drive's timer.
    let paced = PacedEngine::new(pace, signal, clock, |kick| plain(options, clock, files, slab, requests, true, kick))?;
    Ok(Box::new(paced))
}

fn plain(
    options: &ReaderOptions,
    clock: Clock,
    files: Vec<File>,
    slab: &Slab,
    requests: u32,
    shared: bool,
    signal: Arc<Signal>,
) -> Result<Box<dyn IoEngine>, IoSetupError> {
    let depth = options.queue_depth + if knob::skipped(Knob::QueueDepth) { 2 } else { 0 };
    Ok(match kind(options) {
        EngineKind::Psync => Box::new(PsyncEngine::new(files, depth, requests, signal, clock)?),
        EngineKind::Mmap => Box::new(MmapEngine::new(files, depth, requests, signal, clock)?),
        EngineKind::Buffered => Box::new(BufferedEngine::new(files, depth, requests, signal, clock)?),
        #[cfg(target_os = "linux")]
        EngineKind::Uring => {
            let ring = crate::io::uring::UringOptions { sqpoll: options.sqpoll, shared };
            Box::new(crate::io::uring::UringEngine::new(files, slab, depth, requests, ring, signal, clock)?)
        }
        #[cfg(not(target_os = "linux"))]
        EngineKind::Uring => {
            let _ = shared;
            let reason = "io_uring is a Linux system call; use --engine psync".into();
            return Err(IoSetupError::Engine { engine: EngineKind::Uring, reason });
        }
    })
}

/// The engine asked for, unless a test makes the choice lie.
fn kind(options: &ReaderOptions) -> EngineKind {
    match options.engine {
        asked if asked != EngineKind::Psync && knob::skipped(Knob::Engine) => EngineKind::Psync,
        EngineKind::Psync if knob::forced(Knob::Engine) => EngineKind::Uring,
        asked => asked,
    }
}
