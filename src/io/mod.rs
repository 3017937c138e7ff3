//! Bytes from drives: engines that carry out positional reads into slots of one aligned slab. Knows files by number,
//! offsets and buffers; what the bytes mean is somebody else's.
//!
//! A slot's ownership travels: the slab lends a [`Slot`], a [`ReadRequest`] takes it to the engine, the
//! [`Completion`] brings it back, also when the read failed or was cancelled. So no buffer is ever written after it
//! was given up, whatever the engine.

pub mod buffer;
pub mod buffered;
pub mod faults;
pub mod kind;
pub mod mmap;
pub mod paced;
pub mod paced_link;
pub mod pool;
pub mod psync;
pub mod signal;
#[cfg(target_os = "linux")]
pub mod uring;
#[cfg(target_os = "linux")]
mod uring_setup;
#[cfg(target_os = "linux")]
mod watch;
pub mod work;

pub use buffer::{Kept, Slab, Slot};
pub use kind::EngineKind;
pub use signal::Signal;
pub use work::{Work, WorkSnapshot};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Why an engine or its buffers could not be made.
#[derive(Debug, thiserror::Error)]
pub enum IoSetupError {
    /// The buffer memory could not be had.
    #[error("a buffer of {bytes} bytes could not be mapped: {source}; lower --buffer-bytes")]
    Buffer {
        /// Bytes asked for.
        bytes: u64,
        /// Why.
        source: std::io::Error,
    },
    /// A thread could not be started.
    #[error("thread {name} could not be started: {source}; lower the queue depth")]
    Thread {
        /// Its name.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// An engine cannot work here, or not with these options.
    #[error("engine {engine}: {reason}")]
    Engine {
        /// The engine.
        engine: EngineKind,
        /// What is missing, and what to do.
        reason: String,
    },
    /// An option is out of range.
    #[error("{0}")]
    Option(String),
}

/// Most reads at once of one engine; more only measures the scheduler.
pub const MAX_QUEUE_DEPTH: u32 = 256;

/// Refuses a queue depth that no engine takes.
fn check_depth(queue_depth: u32, max_requests: u32) -> Result<(), IoSetupError> {
    if (1..=MAX_QUEUE_DEPTH).contains(&queue_depth) && max_requests > 0 {
        return Ok(());
    }
    let range = format!("queue depth {queue_depth} is not within 1 to {MAX_QUEUE_DEPTH}, or no request fits");
    Err(IoSetupError::Option(range))
}

/// One positional read.
#[derive(Debug)]
pub struct ReadRequest {
    /// Comes back in the completion; unique among the engine's outstanding reads.
    pub tag: u64,
    /// Which of the engine's files.
    pub file: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes to ask for, at most the slot's.
    pub len: u32,
    /// Bytes without which the read is short (at most `len`; the rest is alignment).
    pub need: u32,
    /// Where the bytes go.
    pub slot: Slot,
}

/// How a read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// At least `need` bytes are in the slot.
    Done {
        /// Bytes that arrived.
        bytes: u32,
    },
    /// The file ended before `need` bytes.
    Short {
        /// Bytes that arrived.
        bytes: u32,
    },
    /// The kernel refused.
    Failed {
        /// Its error number.
        errno: i32,
    },
    /// Cancelled before its completion was taken; the slot's content is undefined.
    Cancelled,
}

/// A finished read. Times are nanoseconds of the run's clock.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: u64,
    /// The request's slot.
    pub slot: Slot,
    /// When the engine handed the read to the kernel (or, cancelled before that, when it was given up).
    pub submitted_ns: u64,
    /// When the engine saw that the last byte was there: a pool's thread at once, io_uring when its ring was next looked
    /// at (see [`Capabilities::stamps_late`]).
    pub completed_ns: u64,
    /// How it ended.
    pub outcome: ReadOutcome,
}

/// What an engine is and can do; constant over its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Engine name, as in options and records.
    pub name: &'static str,
    /// Reads that it carries out at once.
    pub queue_depth: u32,
    /// Reads that it holds at most, waiting ones included.
    pub max_requests: u32,
    /// Its pace is emulated.
    pub emulated: bool,
    /// Completions are stamped when the reading thread next looks, which is late while it is busy with something else;
    /// engines with threads of their own stamp them at once.
    pub stamps_late: bool,
}

/// Counted where the reads happen; read from other threads at any time.
#[derive(Debug, Default)]
pub struct EngineCounters {
    submitted: AtomicU64,
    completed: AtomicU64,
    cancelled: AtomicU64,
    waited: AtomicU64,
    max_in_flight: AtomicU64,
    work: Arc<Work>,
}

/// A copy of [`EngineCounters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineSnapshot {
    /// Reads accepted.
    pub submitted: u64,
    /// Reads finished, in whatever way.
    pub completed: u64,
    /// Of these, cancelled.
    pub cancelled: u64,
    /// Reads that found the queue depth used up and had to wait.
    pub waited: u64,
    /// Most reads at the kernel (or on the emulated drive) at once.
    pub max_in_flight: u64,
    /// How they were carried out; for an emulated drive, by the engine behind it.
    pub work: WorkSnapshot,
}

impl EngineCounters {
    /// Counters of an engine that has its reads carried out by another one, whose `work` it shows.
    fn over(work: Arc<Work>) -> Self {
        Self { work, ..Self::default() }
    }

    /// The numbers now.
    pub fn snapshot(&self) -> EngineSnapshot {
        EngineSnapshot {
            submitted: self.submitted.load(Ordering::Relaxed),
            completed: self.completed.load(Ordering::Relaxed),
            cancelled: self.cancelled.load(Ordering::Relaxed),
            waited: self.waited.load(Ordering::Relaxed),
            max_in_flight: self.max_in_flight.load(Ordering::Relaxed),
            work: self.work.snapshot(),
        }
    }

    /// The kernel's numbers of the threads that read.
    pub fn threads(&self) -> Vec<u32> {
        self.work.threads()
    }

    fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    fn accept(&self, reads: u64, waiting: u64) {
        Self::add(&self.submitted, reads);
        Self::add(&self.waited, waiting);
    }

    fn started(&self, in_flight: u64) {
        self.max_in_flight.fetch_max(in_flight, Ordering::Relaxed);
    }

    fn finish(&self, outcome: ReadOutcome) {
        Self::add(&self.completed, 1);
        if outcome == ReadOutcome::Cancelled {
            Self::add(&self.cancelled, 1);
        }
    }
}

/// Waits until `threads` threads have raised `up`: a thread that starts allocates, which no barrier should meet.
fn wait_for_start(up: &Signal, threads: u64, name: &str) -> Result<(), IoSetupError> {
    const LONGEST: std::time::Duration = std::time::Duration::from_secs(30);
    if up.wait_for(threads, Instant::now() + LONGEST) {
        return Ok(());
    }
    let source = std::io::Error::new(std::io::ErrorKind::TimedOut, format!("not running after {LONGEST:?}"));
    Err(IoSetupError::Thread { name: name.to_string(), source })
}

/// Carries out reads of one drive for one pool. Everything it needs is allocated when it is made.
///
/// Engines of several drives share one [`Signal`], which tells of completions, so that one thread can wait for any of
/// them: take [`Signal::epoch`], `reap` each engine, and [`Signal::wait`] if nothing came.
pub trait IoEngine: Send {
    /// Takes reads from the front of `batch` for as long as there is room ([`Capabilities::max_requests`]); the rest
    /// stays in `batch`. Returns how many were taken.
    fn submit(&mut self, batch: &mut Vec<ReadRequest>) -> usize;

    /// Moves finished reads to the end of `out`, in the order in which they finished, waiting until there are at
    /// least `min` or `deadline` has passed. Returns how many there were.
    fn reap(&mut self, min: usize, deadline: Instant, out: &mut Vec<Completion>) -> usize;

    /// Gives up a read: it will complete as [`ReadOutcome::Cancelled`], at once if it has not been started. `false`
    /// if no read of that tag is outstanding or its completion only waits to be reaped.
    fn cancel(&mut self, tag: u64) -> bool;

    /// Takes back a read that has not been started: it completes as [`ReadOutcome::Cancelled`] at once. `false`, and
    /// nothing changes, if it has been started or no read of that tag is outstanding.
    fn withdraw(&mut self, tag: u64) -> bool;

    /// What the engine is.
    fn capabilities(&self) -> Capabilities;

    /// What it has done; the handle stays valid after the engine has gone.
    fn counters(&self) -> Arc<EngineCounters>;
}

#[cfg(test)]
mod buffer_tests;
#[cfg(test)]
mod engine_tests;
#[cfg(test)]
mod ownership_tests;
#[cfg(test)]
mod signal_tests;
