//! Choosing and building the engines of a drive. Knows options and engines; opens nothing.

use super::options::ReaderOptions;
use crate::clock::Clock;
use crate::io::buffered::BufferedEngine;
use crate::io::faults::{FaultyDrive, FaultyEngine};
use crate::io::mmap::MmapEngine;
use crate::io::paced::{PacedDrive, PacedEngine};
use crate::io::psync::PsyncEngine;
use crate::io::{EngineKind, IoEngine, IoSetupError, Signal, Slab};
use crate::knob::{self, Knob};
use std::fs::File;
use std::sync::Arc;

/// One engine to be made: a drive has one for demand and, where there is prefetch, another of its own.
pub(super) struct EngineSpec<'a> {
    pub files: Vec<File>,
    /// What it reads into.
    pub slab: &'a Slab,
    /// Reads at once.
    pub depth: u32,
    /// Reads that it must hold at most.
    pub requests: u32,
    /// The drive's, if it is emulated; both engines share it.
    pub pace: Option<Arc<PacedDrive>>,
    /// The faults that the drive's reads meet; both engines share it.
    pub faults: Option<Arc<FaultyDrive>>,
    /// What it raises.
    pub signal: Arc<Signal>,
}

/// An engine as `options` ask for. Paced if the drive is emulated; whatever it is, faults are met outside of it.
pub(super) fn make_engine(
    options: &ReaderOptions,
    clock: Clock,
    mut spec: EngineSpec<'_>,
) -> Result<Box<dyn IoEngine>, IoSetupError> {
    let Some(faults) = spec.faults.take() else { return sound(options, clock, spec) };
    let signal = Arc::clone(&spec.signal);
    let inner = sound(options, clock, spec)?;
    Ok(Box::new(FaultyEngine::new(faults, signal, clock, inner)?))
}

fn sound(options: &ReaderOptions, clock: Clock, mut spec: EngineSpec<'_>) -> Result<Box<dyn IoEngine>, IoSetupError> {
    let Some(pace) = spec.pace.take() else { return plain(options, clock, spec, false) };
    let signal = Arc::clone(&spec.signal);
    // Reads of an emulated drive are submitted by the reader and finished by the drive's timer.
    let behind = |kick| plain(options, clock, EngineSpec { signal: kick, ..spec }, true);
    Ok(Box::new(PacedEngine::new(pace, signal, clock, behind)?))
}

fn plain(
    options: &ReaderOptions,
    clock: Clock,
    spec: EngineSpec<'_>,
    shared: bool,
) -> Result<Box<dyn IoEngine>, IoSetupError> {
    let EngineSpec { files, slab, depth, requests, signal, .. } = spec;
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
            let _ = (slab, shared);
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
