//! What a reader can be told, and why it could not be built.

use super::dispatch::DispatchPolicy;
use super::rates::KnownRate;
use crate::drive::units;
use crate::io::{EngineKind, IoSetupError, MAX_QUEUE_DEPTH};
use crate::trace::log::TraceCapacity;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Options of an [`super::ExpertReader`]. Every field has an effect that [`super::ReaderCounters`] shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReaderOptions {
    /// How reads are carried out.
    pub engine: EngineKind,
    /// A kernel thread hands reads over (io_uring only); it keeps a core busy while reads keep coming.
    pub sqpoll: bool,
    /// Reads at once for each drive (threads of the engines other than io_uring).
    pub queue_depth: u32,
    /// Bytes of all slots together; a slot holds one expert.
    pub buffer_bytes: u64,
    /// Which copies of an expert are read.
    pub dispatch: DispatchPolicy,
    /// When the last read of a barrier has taken longer than this percentile of its drive's own latencies, it is also
    /// asked of another home: 990 = the 99th. `None` = never.
    pub hedge_after_permille: Option<u16>,
    /// Rates known before the run, for dispatch to begin with; by drive, in any order, none needed.
    /// For callers of the library: no file or flag sets them, for nothing in a record proves them yet.
    #[serde(skip)]
    pub rates: Vec<KnownRate>,
    /// Read past the page cache.
    pub direct: bool,
    /// Where direct reads are impossible, read through the page cache instead of refusing; counters show it.
    pub allow_buffered: bool,
    /// Check each expert's digest as it arrives; a wrong one counts as a failed read.
    pub verify_digests: bool,
    /// Longest wait without any arrival. Then outstanding reads are given up and other copies tried.
    pub read_timeout_ms: u64,
    /// Reads and barriers that the trace can hold; zeros switch tracing off. Sized by whoever starts a run.
    #[serde(skip)]
    pub trace_reads: usize,
    /// See `trace_reads`.
    #[serde(skip)]
    pub trace_barriers: usize,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            engine: EngineKind::Psync,
            sqpoll: false,
            queue_depth: 4,
            buffer_bytes: 256 << 20,
            dispatch: DispatchPolicy::Split,
            hedge_after_permille: None,
            rates: Vec::new(),
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
        let engine = self.engine;
        if self.sqpoll && engine != EngineKind::Uring {
            return Err(ReaderError::Option(format!(
                "a submission thread belongs to io_uring, not to {engine}: leave --sqpoll away, or add --engine io-uring"
            )));
        }
        if self.direct && !engine.can_be_direct() {
            return Err(ReaderError::Option(format!(
                "engine {engine} reads through the page cache, and direct reads go past it: add --buffered, or use \
                 --engine psync or io-uring"
            )));
        }
        if !(1..=3_600_000).contains(&self.read_timeout_ms) {
            let seen = self.read_timeout_ms;
            return Err(ReaderError::Option(format!("read timeout {seen} ms is not within 1 ms to 1 hour")));
        }
        if self.hedge_after_permille.is_some_and(|p| !(1..1000).contains(&p)) {
            return Err(ReaderError::Option("hedging needs a percentile above 0 and below 100".into()));
        }
        for (index, rate) in self.rates.iter().enumerate() {
            let name = &rate.drive;
            if rate.bytes_per_s == 0 {
                return Err(ReaderError::Option(format!("the known rate of drive `{name}` is 0 bytes/s")));
            }
            if self.rates[..index].iter().any(|r| r.drive == *name) {
                return Err(ReaderError::Option(format!("the rate of drive `{name}` is given twice")));
            }
        }
        Ok(())
    }

    /// `--hedge-after`: a percentile, or `off`.
    pub fn parse_hedge_after(text: &str) -> Result<Option<u16>, String> {
        if text == "off" {
            return Ok(None);
        }
        let number = text.trim_start_matches('p').parse::<f64>().ok().map(|p| p * 10.0);
        match number.filter(|p| (1.0..1000.0).contains(p) && p.fract() == 0.0) {
            Some(permille) => Ok(Some(permille as u16)),
            None => Err("must be `off` or a percentile from 0.1 to 99.9 with one decimal at most, e.g. 99".into()),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_name_both_sides() {
        let refused = |options: ReaderOptions| options.check().unwrap_err().to_string();
        for engine in [EngineKind::Mmap, EngineKind::Buffered] {
            let message = refused(ReaderOptions { engine, ..ReaderOptions::default() });
            assert!(message.contains(engine.name()) && message.contains("direct"), "{message}");
            ReaderOptions { engine, direct: false, ..ReaderOptions::default() }.check().unwrap();
        }
        let message = refused(ReaderOptions { sqpoll: true, ..ReaderOptions::default() });
        assert!(message.contains("--sqpoll") && message.contains("psync"), "{message}");
        ReaderOptions { engine: EngineKind::Uring, sqpoll: true, ..ReaderOptions::default() }.check().unwrap();
    }
}
