//! What engines count about *how* reads were carried out, at the calls that carry them out: the evidence for the choice
//! of engine and for the options of io_uring. Nothing here is told what was asked for.

use super::EngineKind;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Counted by an engine; a paced engine shares the one behind it.
#[derive(Debug, Default)]
pub struct Work {
    reads_by: [AtomicU64; EngineKind::ALL.len()],
    continued: AtomicU64,
    repeated: AtomicU64,
    fixed_buffer_reads: AtomicU64,
    fixed_file_reads: AtomicU64,
    queued: AtomicU64,
    enters: AtomicU64,
    submit_enters: AtomicU64,
    enter_errors: AtomicU64,
    kernel_cancels: AtomicU64,
    setup_flags: AtomicU32,
    features: AtomicU32,
    registered_buffers: AtomicU32,
    registered_files: AtomicU32,
    sq_thread: AtomicU32,
    threads: Mutex<Vec<u32>>,
}

/// A copy of [`Work`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkSnapshot {
    /// Reads that each engine's own code saw to their end (cancelled ones that the kernel had begun included), by
    /// [`EngineKind::index`].
    pub reads_by: [u64; EngineKind::ALL.len()],
    /// Partial reads that were continued.
    pub continued: u64,
    /// Calls that were interrupted, or refused for the moment, and repeated.
    pub repeated: u64,
    /// io_uring: reads whose completion came from an operation on a registered buffer.
    pub fixed_buffer_reads: u64,
    /// io_uring: the same for a registered file.
    pub fixed_file_reads: u64,
    /// io_uring: operations put into the submission ring (reads, continuations, cancellations).
    pub queued: u64,
    /// io_uring: calls of `io_uring_enter`, for whatever reason.
    pub enters: u64,
    /// io_uring: of these, calls that handed operations over. `queued / submit_enters` is the batch; with a submission
    /// thread awake it hands them over without any.
    pub submit_enters: u64,
    /// io_uring: calls of `io_uring_enter` that failed with an error that should not occur.
    pub enter_errors: u64,
    /// io_uring: cancellations of reads in flight asked of the kernel.
    pub kernel_cancels: u64,
    /// io_uring: set-up flags of the ring as it exists.
    pub setup_flags: u32,
    /// io_uring: features that the kernel reported for the ring, a bit mask as in `io_uring_setup(2)`, read back.
    pub features: u32,
    /// io_uring: pieces of the buffer that are registered.
    pub registered_buffers: u32,
    /// io_uring: files that are registered.
    pub registered_files: u32,
    /// io_uring: thread id of the kernel's submission thread, as the kernel shows it for this ring; 0 = there is none.
    pub sq_thread: u32,
}

impl WorkSnapshot {
    /// Reads carried out by `kind`'s code.
    pub fn reads_of(&self, kind: EngineKind) -> u64 {
        self.reads_by[kind.index()]
    }
}

/// What a ring turned out to be once it stood.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingFacts {
    pub setup_flags: u32,
    pub features: u32,
    pub registered_buffers: u32,
    pub registered_files: u32,
    pub sq_thread: u32,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl Work {
    /// The calling thread reads from now on. To be called before the engine is used: it allocates.
    pub(super) fn thread_began(&self) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(crate::sys::affinity::own_id());
    }

    /// The kernel's numbers of the engine's threads. A submission thread of io_uring is the kernel's own, which runs it on any
    /// CPU that is online, whatever the process may use.
    pub fn threads(&self) -> Vec<u32> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn read_by(&self, kind: EngineKind) {
        add(&self.reads_by[kind.index()], 1);
    }

    pub(super) fn continued(&self) {
        add(&self.continued, 1);
    }

    pub(super) fn repeated(&self) {
        add(&self.repeated, 1);
    }

    pub(super) fn fixed(&self, buffer: bool, file: bool) {
        add(&self.fixed_buffer_reads, u64::from(buffer));
        add(&self.fixed_file_reads, u64::from(file));
    }

    pub(super) fn queued(&self) {
        add(&self.queued, 1);
    }

    pub(super) fn entered(&self, handed_over: bool) {
        add(&self.enters, 1);
        add(&self.submit_enters, u64::from(handed_over));
    }

    pub(super) fn enter_failed(&self) {
        add(&self.enter_errors, 1);
    }

    pub(super) fn kernel_cancel(&self) {
        add(&self.kernel_cancels, 1);
    }

    pub(super) fn ring(&self, facts: RingFacts) {
        self.setup_flags.store(facts.setup_flags, Ordering::Relaxed);
        self.features.store(facts.features, Ordering::Relaxed);
        self.registered_buffers.store(facts.registered_buffers, Ordering::Relaxed);
        self.registered_files.store(facts.registered_files, Ordering::Relaxed);
        self.sq_thread.store(facts.sq_thread, Ordering::Relaxed);
    }

    /// The numbers now.
    pub fn snapshot(&self) -> WorkSnapshot {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let flag = |counter: &AtomicU32| counter.load(Ordering::Relaxed);
        WorkSnapshot {
            reads_by: std::array::from_fn(|kind| of(&self.reads_by[kind])),
            continued: of(&self.continued),
            repeated: of(&self.repeated),
            fixed_buffer_reads: of(&self.fixed_buffer_reads),
            fixed_file_reads: of(&self.fixed_file_reads),
            queued: of(&self.queued),
            enters: of(&self.enters),
            submit_enters: of(&self.submit_enters),
            enter_errors: of(&self.enter_errors),
            kernel_cancels: of(&self.kernel_cancels),
            setup_flags: flag(&self.setup_flags),
            features: flag(&self.features),
            registered_buffers: flag(&self.registered_buffers),
            registered_files: flag(&self.registered_files),
            sq_thread: flag(&self.sq_thread),
        }
    }
}
