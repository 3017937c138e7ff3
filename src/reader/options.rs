//! What a reader can be told, and why it could not be built.

use super::dispatch::DispatchPolicy;
use crate::drive::units;
use crate::io::IoSetupError;
use crate::io::psync::MAX_QUEUE_DEPTH;
use crate::trace::log::TraceCapacity;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Options of an [`super::ExpertReader`]. Every field has an effect that [`super::ReaderCounters`] shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReaderOptions {
    /// Reads at once for each drive (threads of the psync engine).
    pub queue_depth: u32,
    /// Bytes of all slots together; a slot holds one expert.
    pub buffer_bytes: u64,
    /// Which copy of an expert is read.
    pub dispatch: DispatchPolicy,
    /// Read past the page cache.
    pub direct: bool,
    /// Where direct reads are impossible, read through the page cache instead of refusing; counters show it.
    pub allow_buffered: bool,
    /// Check each expert's digest as it arrives; a wrong one counts as a failed read.
    pub verify_digests: bool,
    /// Longest wait without any arrival. Then outstanding reads are given up and other copies tried.
    pub read_timeout_ms: u64,
    /// Reads and barriers that the trace can hold; zeros switch tracing off.
    pub trace_reads: usize,
    /// See `trace_reads`.
    pub trace_barriers: usize,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            queue_depth: 4,
            buffer_bytes: 256 << 20,
            dispatch: DispatchPolicy::LeastInflight,
            direct: true,
            allow_buffered: false,
            verify_digests: false,
            read_timeout_ms: 30_000,
            trace_reads: 0,
            trace_barriers: 0,
        }
    }
}

impl ReaderOptions {
    /// Longest wait without any arrival.
    pub fn read_timeout(&self) -> Duration {
        Duration::from_millis(self.read_timeout_ms)
    }

    /// Capacity of the trace; `None` = off.
    pub fn trace_capacity(&self) -> Option<TraceCapacity> {
        let capacity = TraceCapacity { reads: self.trace_reads, barriers: self.trace_barriers };
        (capacity != TraceCapacity::default()).then_some(capacity)
    }

    /// Errors that need no drive.
    pub fn check(&self) -> Result<(), ReaderError> {
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth) {
            let seen = self.queue_depth;
            return Err(ReaderError::Option(format!("queue depth {seen} is not within 1 to {MAX_QUEUE_DEPTH}")));
        }
        if !(1..=3_600_000).contains(&self.read_timeout_ms) {
            let seen = self.read_timeout_ms;
            return Err(ReaderError::Option(format!("read timeout {seen} ms is not within 1 ms to 1 hour")));
        }
        Ok(())
    }

    /// `--buffer-bytes` and such, as people write them.
    pub fn parse_buffer_bytes(text: &str) -> Result<u64, String> {
        units::parse_bytes(text)
    }
}

/// Why a reader could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    /// An option is out of range or does not fit the others.
    #[error("{0}")]
    Option(String),
    /// A file or folder of a drive could not be opened.
    #[error("drive `{drive}`: {}: {reason}", path.display())]
    Drive {
        /// The drive's name.
        drive: String,
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The plan names what this reader cannot do.
    #[error("{0}")]
    Plan(String),
    /// Buffers or threads could not be had.
    #[error(transparent)]
    Io(#[from] IoSetupError),
}
