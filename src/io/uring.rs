//! One io_uring for a drive: reads are handed to the kernel in batches by the reading thread itself, into registered
//! buffers from registered files, and the same thread finds their completions in the ring. No thread of ours stands in
//! between: who waits for several drives sleeps on all their rings at once (the [`Signal`] watches them), who waits for
//! this one sleeps in `io_uring_enter`. The price: completions are stamped, and waiting reads handed over, when that
//! thread next looks.
//!
//! A read in flight owns its slot, in `flights`, until the kernel has answered for it, cancelled or not. A ring that
//! serves one thread finishes reads inside that thread's calls only, all that have come at once, which halves the cost
//! of a wide barrier. When another thread takes the engine over, it closes that ring, waits until the kernel has let go
//! of it, and repeats on a ring of its own what was in flight.

use super::psync::piece_of;
use super::signal::Watching;
use super::uring_setup::{Completing, Step, bell, check, explain, facts, make_ring, refuse};
use super::{
    Capabilities, Completion, EngineCounters, EngineKind, IoEngine, IoSetupError, ReadOutcome, ReadRequest, Signal,
    Slab, check_depth,
};
use crate::clock::Clock;
use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, PipeReader, Read};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// The kernel registers at most this much as one buffer.
const MAX_PIECE_BYTES: u64 = 1 << 30;
/// How long dropping an engine sleeps at most before it looks again.
const DRAIN_LOOK: Duration = Duration::from_secs(1);
/// Marks the completion of a cancellation; flights have small numbers.
const CANCELLATION: u64 = u64::MAX;
/// Pause after a call that failed for a reason that should not occur.
const AFTER_ERROR: Duration = Duration::from_millis(1);
/// Answers to a read that is to be repeated as it is. The kernel cancels, unasked, reads of a thread that ends.
const AGAIN: [i32; 3] = [-libc::EINTR, -libc::EAGAIN, -libc::ECANCELED];

/// How a ring is set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UringOptions {
    /// A kernel thread takes reads from the ring, so that handing them over needs no system call.
    pub sqpoll: bool,
    /// One thread submits while another waits. Otherwise the kernel finishes reads when the one thread next enters it.
    pub shared: bool,
}

/// A ring with its registrations.
struct Ring {
    uring: ManuallyDrop<IoUring>,
    /// Only this thread may use it (`None`: not used yet); meaningless unless `bound`.
    owner: Option<ThreadId>,
    bound: bool,
    /// The kernel rings this, not the ring itself, when reads of a bound ring can be finished.
    _bell: Option<OwnedFd>,
    /// Reads its end when the kernel has let go of the ring, which holds the other end.
    gone: PipeReader,
    /// No read is in flight, so that nothing is lost by closing.
    quiet: bool,
}

/// Reads by io_uring.
pub struct UringEngine {
    /// Closed first, while the buffers that it has registered and the slots of reads in flight are still there.
    ring: Ring,
    options: UringOptions,
    slab: Slab,
    files: Vec<File>,
    /// See [`piece_of`].
    piece: u32,
    /// Slots in each registered piece of the slab.
    piece_slots: u32,
    flights: Vec<Option<Flight>>,
    free: Vec<u32>,
    pending: VecDeque<ReadRequest>,
    done: VecDeque<Completion>,
    signal: Arc<Signal>,
    counters: Arc<EngineCounters>,
    clock: Clock,
    capabilities: Capabilities,
}

struct Flight {
    request: ReadRequest,
    submitted_ns: u64,
    got: u32,
    cancelled: bool,
    fixed_buffer: bool,
}

impl UringEngine {
    /// An engine over `files` with at most `queue_depth` reads in the kernel, holding at most `max_requests`, into slots
    /// of `slab`. `signal` watches the ring. What the kernel lacks is an error that names it.
    pub fn new(
        files: Vec<File>,
        slab: &Slab,
        queue_depth: u32,
        max_requests: u32,
        options: UringOptions,
        signal: Arc<Signal>,
        clock: Clock,
    ) -> Result<Self, IoSetupError> {
        check_depth(queue_depth, max_requests)?;
        let counters = Arc::new(EngineCounters::default());
        let (ring, piece_slots) = Ring::new(&files, slab, queue_depth, options, &signal, &counters)?;
        let name = EngineKind::Uring.name();
        Ok(Self {
            ring,
            options,
            slab: slab.clone(),
            piece: piece_of(&files),
            files,
            piece_slots,
            flights: (0..queue_depth).map(|_| None).collect(),
            free: (0..queue_depth).rev().collect(),
            pending: VecDeque::with_capacity(max_requests as usize),
            done: VecDeque::with_capacity(max_requests as usize),
            signal,
            counters,
            clock,
            capabilities: Capabilities { name, queue_depth, max_requests, emulated: false, stamps_late: true },
        })
    }

    /// Makes the ring this thread's. `false` if that failed: reads stay as they are, and the next call tries again.
    fn own(&mut self) -> bool {
        if !self.ring.bound || self.ring.owner == Some(thread::current().id()) {
            return true;
        }
        if self.ring.owner.is_some() && !self.move_in() {
            return false;
        }
        self.ring.owner = Some(thread::current().id());
        self.note(self.ring.uring.submitter().register_enable_rings())
    }

    /// Replaces another thread's ring, and repeats the reads that were in flight there.
    fn move_in(&mut self) -> bool {
        self.take();
        let depth = self.capabilities.queue_depth;
        let made = Ring::new(&self.files, &self.slab, depth, self.options, &self.signal, &self.counters);
        let Ok((ring, _)) = made else {
            self.counters.work.enter_failed();
            return false;
        };
        self.ring.quiet = self.in_flight() == 0;
        self.ring = ring; // drops the old one, which waits until the kernel has let go of it
        for index in 0..self.flights.len() {
            let Some(flight) = self.flights[index].as_mut() else { continue };
            if flight.cancelled {
                let now_ns = self.clock.now_ns();
                self.settle(index, -libc::ECANCELED, now_ns);
            } else {
                self.counters.work.repeated();
                self.push_read(index as u32);
            }
        }
        self.tell();
        true
    }

    fn in_flight(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Puts waiting reads into the ring for as long as the queue depth allows.
    fn start(&mut self) {
        if self.pending.is_empty() || self.free.is_empty() {
            return;
        }
        let submitted_ns = self.clock.now_ns();
        while let Some(&index) = self.free.last() {
            let Some(mut request) = self.pending.pop_front() else { break };
            let room = request.slot.bytes_mut().len() as u64;
            let end = request.offset.saturating_add(u64::from(request.len));
            let errno = match () {
                () if request.file as usize >= self.files.len() => libc::EBADF,
                () if request.need > request.len || u64::from(request.len) > room => libc::EFAULT,
                // Beyond this the kernel would take the offset for "wherever the file stands".
                () if end > i64::MAX as u64 => libc::EINVAL,
                () => 0,
            };
            if errno != 0 {
                self.finish(request, submitted_ns, submitted_ns, ReadOutcome::Failed { errno });
                continue;
            }
            self.free.pop();
            let fixed_buffer = self.slab.owns(&request.slot);
            self.flights[index as usize] =
                Some(Flight { request, submitted_ns, got: 0, cancelled: false, fixed_buffer });
            self.push_read(index);
        }
        self.counters.started(self.in_flight() as u64);
    }

    /// Puts the read of flight `index`, or what is left of it, into the ring.
    fn push_read(&mut self, index: u32) {
        let Some(flight) = self.flights[index as usize].as_mut() else { return };
        let Flight { request, got, fixed_buffer, .. } = flight;
        let (file, len) = (Fixed(request.file), request.len - *got);
        let offset = request.offset + u64::from(*got);
        let piece = (request.slot.index() / self.piece_slots) as u16; // at most 16384 pieces can be registered
        let target = request.slot.bytes_mut()[*got as usize..].as_mut_ptr();
        let read = if *fixed_buffer {
            opcode::ReadFixed::new(file, target, len, piece).offset(offset).build()
        } else {
            opcode::Read::new(file, target, len).offset(offset).build()
        };
        self.push(&read.user_data(u64::from(index)));
    }

    fn push(&mut self, operation: &squeue::Entry) {
        // SAFETY: a read's target is `len` bytes of the slot that its flight owns until the completion has been taken
        // (`start` checked the length against the slot); a cancellation points nowhere. Files are named by their
        // registered number, which the kernel checks.
        while unsafe { self.ring.uring.submission().push(operation) }.is_err() {
            self.hand_over();
            if self.ring.uring.params().is_setup_sqpoll() {
                let _ = self.ring.uring.submitter().squeue_wait();
            }
        }
        self.counters.work.queued();
    }

    /// Hands everything in the ring to the kernel, and lets the kernel finish what waits for this thread to come by.
    fn hand_over(&mut self) {
        let polled = self.ring.uring.params().is_setup_sqpoll();
        let queue = self.ring.uring.submission();
        let waiting = !queue.is_empty();
        // A submission thread that is awake looks by itself.
        let calls = if polled { waiting && queue.need_wakeup() } else { waiting };
        let calls = calls || queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if calls {
            self.counters.work.entered(waiting);
            let entered = self.ring.uring.submit().map(drop);
            self.note(entered);
        }
    }

    /// As `hand_over`, and sleeps until `want` completions are there, at most `longest`. Returns whether the ring works.
    fn wait(&mut self, want: usize, longest: Duration) -> bool {
        let waiting = !self.ring.uring.submission().is_empty();
        self.counters.work.entered(waiting);
        let longest = Timespec::from(longest);
        let entered =
            self.ring.uring.submitter().submit_with_args(want, &SubmitArgs::new().timespec(&longest)).map(drop);
        self.note(entered)
    }

    /// What became of a call. Returns whether the ring works.
    fn note(&self, entered: io::Result<()>) -> bool {
        let Err(error) = entered else { return true };
        match error.raw_os_error() {
            Some(libc::ETIME) => true,
            Some(libc::EINTR) => {
                self.counters.work.repeated();
                self.signal.raise();
                true
            }
            // No memory for the moment, or completions wait for room: whoever waits must come back at once.
            Some(libc::EAGAIN | libc::EBUSY) => {
                self.counters.work.repeated();
                self.signal.raise();
                thread::yield_now();
                true
            }
            _ => {
                self.counters.work.enter_failed();
                thread::sleep(AFTER_ERROR);
                false
            }
        }
    }

    /// Takes the completions that are in the ring.
    fn take(&mut self) {
        let mut now_ns = None;
        loop {
            let Some(entry) = self.ring.uring.completion().next() else { break };
            if entry.user_data() != CANCELLATION {
                let now_ns = *now_ns.get_or_insert_with(|| self.clock.now_ns());
                self.settle(entry.user_data() as usize, entry.result(), now_ns);
            }
        }
    }

    /// One answer of the kernel: the read is over, or goes on.
    fn settle(&mut self, index: usize, result: i32, now_ns: u64) {
        let Some(flight) = self.flights.get_mut(index).and_then(Option::as_mut) else { return };
        if !flight.cancelled {
            if AGAIN.contains(&result) {
                self.counters.work.repeated();
                return self.push_read(index as u32);
            }
            flight.got += u32::try_from(result).unwrap_or(0); // at most what is left of `len`
            if result > 0 && flight.got < flight.request.need && (result as u32).is_multiple_of(self.piece) {
                self.counters.work.continued();
                return self.push_read(index as u32);
            }
        }
        let Some(flight) = self.flights[index].take() else { return };
        self.free.push(index as u32);
        let outcome = match flight.got {
            _ if flight.cancelled => ReadOutcome::Cancelled,
            _ if result < 0 => ReadOutcome::Failed { errno: -result },
            bytes if bytes >= flight.request.need => ReadOutcome::Done { bytes },
            bytes => ReadOutcome::Short { bytes },
        };
        self.counters.work.read_by(EngineKind::Uring);
        self.counters.work.fixed(flight.fixed_buffer, true);
        self.finish(flight.request, flight.submitted_ns, now_ns, outcome);
    }

    fn finish(&mut self, request: ReadRequest, submitted_ns: u64, completed_ns: u64, outcome: ReadOutcome) {
        self.counters.finish(outcome);
        let (tag, slot) = (request.tag, request.slot);
        self.done.push_back(Completion { tag, slot, submitted_ns, completed_ns, outcome });
    }

    /// Completions that were taken from the ring, but not by `reap`, no longer make it readable.
    fn tell(&self) {
        if !self.done.is_empty() {
            self.signal.raise();
        }
    }

    fn cancel_flight(&mut self, index: usize) {
        let Some(flight) = self.flights[index].as_mut().filter(|f| !f.cancelled) else { return };
        flight.cancelled = true;
        self.push(&opcode::AsyncCancel::new(index as u64).build().user_data(CANCELLATION));
        self.counters.work.kernel_cancel();
    }
}

impl IoEngine for UringEngine {
    fn submit(&mut self, batch: &mut Vec<ReadRequest>) -> usize {
        if !self.own() {
            return 0;
        }
        let held = self.pending.len() + self.in_flight() + self.done.len();
        let taken = batch.len().min((self.capabilities.max_requests as usize).saturating_sub(held));
        let at_once = self.free.len().saturating_sub(self.pending.len());
        self.pending.extend(batch.drain(..taken));
        self.counters.accept(taken as u64, taken.saturating_sub(at_once) as u64);
        self.start();
        self.hand_over();
        self.tell();
        taken
    }

    fn reap(&mut self, min: usize, deadline: Instant, out: &mut Vec<Completion>) -> usize {
        while self.own() {
            if self.ring.uring.submission().taskrun() {
                self.hand_over();
            }
            self.take();
            self.start();
            let missing = min.saturating_sub(self.done.len());
            let left = deadline.checked_duration_since(Instant::now()).filter(|d| missing > 0 && !d.is_zero());
            if let Some(left) = left {
                // Reads that wait for room want the first completion; else one sleep serves them all.
                let want = if self.pending.is_empty() { missing.min(self.in_flight()).max(1) } else { 1 };
                self.wait(want, left);
            } else {
                // Not again while the flag for unfinished reads stands: the kernel can leave it set when nothing is left
                // to finish (it sets it after having queued the work, which may be done by then), and only the next
                // completion clears it. What comes from now on rings the bell.
                self.hand_over();
                break;
            }
        }
        let count = self.done.len();
        out.extend(self.done.drain(..));
        count
    }

    fn cancel(&mut self, tag: u64) -> bool {
        if !self.own() {
            return false;
        }
        self.take();
        let flight = self.flights.iter().position(|f| f.as_ref().is_some_and(|f| f.request.tag == tag));
        if let Some(index) = flight {
            self.cancel_flight(index);
        }
        let waiting = flight.is_none() && self.withdraw(tag);
        self.start();
        self.hand_over();
        self.tell();
        flight.is_some() || waiting
    }

    fn withdraw(&mut self, tag: u64) -> bool {
        let waiting = self.pending.iter().position(|r| r.tag == tag);
        let Some(request) = waiting.and_then(|at| self.pending.remove(at)) else { return false };
        let now_ns = self.clock.now_ns();
        self.finish(request, now_ns, now_ns, ReadOutcome::Cancelled);
        self.tell();
        true
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn counters(&self) -> Arc<EngineCounters> {
        Arc::clone(&self.counters)
    }
}

impl Drop for UringEngine {
    /// Waits for every read in flight: the kernel may write into its slot until it has answered.
    fn drop(&mut self) {
        self.pending.clear();
        let ours = !self.ring.bound || self.ring.owner == Some(thread::current().id());
        if ours {
            (0..self.flights.len()).for_each(|index| self.cancel_flight(index));
            self.take();
            while self.in_flight() > 0 && self.wait(1, DRAIN_LOOK) {
                self.take();
            }
        }
        // What is still in flight on a ring that is broken, or another thread's, ends with the ring.
        self.ring.quiet = self.in_flight() == 0;
    }
}

impl Ring {
    /// A ring over `files` and `slab`, which `signal` watches; and how many slots each registered piece holds.
    fn new(
        files: &[File],
        slab: &Slab,
        queue_depth: u32,
        options: UringOptions,
        signal: &Signal,
        counters: &EngineCounters,
    ) -> Result<(Self, u32), IoSetupError> {
        let pieces = slab.pieces(MAX_PIECE_BYTES).ok_or_else(|| {
            let (slot, most) = (slab.slot_bytes(), MAX_PIECE_BYTES);
            refuse(format!("slots of {slot} bytes cannot be registered, {most} are the most; use --engine psync"))
        })?;
        // Room for every read in flight and its cancellation.
        let (uring, completing) = make_ring(queue_depth * 2, options)?;
        check(&uring)?;
        let watched = |e: io::Error| explain(Step::Watch, &e);
        let (gone, held) = std::io::pipe().map_err(watched)?;
        let bound = completing == Completing::Deferred;
        let bell = bound.then(bell).transpose().map_err(watched)?;
        let step = Step::Files { files: files.len() as u64 };
        let fds: Vec<i32> = files.iter().map(AsRawFd::as_raw_fd).chain([held.as_raw_fd()]).collect();
        uring.submitter().register_files(&fds).map_err(|e| explain(step, &e))?;
        let part = |&(start, len): &(*mut u8, usize)| libc::iovec { iov_base: start.cast(), iov_len: len };
        let parts: Vec<libc::iovec> = pieces.parts.iter().map(part).collect();
        let step = Step::Buffers { bytes: u64::from(slab.slots()) * slab.slot_bytes() };
        // SAFETY: the pieces are the slab's mapping, which stays until after the ring: the engine holds a clone of the
        // slab and closes the ring first. The kernel writes only where a read in flight says, into a slot it owns.
        unsafe { uring.submitter().register_buffers(&parts) }.map_err(|e| explain(step, &e))?;
        match &bell {
            Some(bell) => {
                uring.submitter().register_eventfd(bell.as_raw_fd()).map_err(watched)?;
                signal.watch(bell, Watching::Rings).map_err(watched)?;
            }
            None => {
                // SAFETY: the ring is open for the whole statement.
                let ring_fd = unsafe { BorrowedFd::borrow_raw(uring.as_raw_fd()) };
                signal.watch(ring_fd, Watching::UntilRead).map_err(watched)?;
            }
        }
        let (buffers, registered) = (parts.len() as u32, files.len() as u32);
        counters.work.ring(facts(uring.params(), uring.as_raw_fd(), completing, buffers, registered));
        let (uring, owner) = (ManuallyDrop::new(uring), None);
        Ok((Self { uring, owner, bound, _bell: bell, gone, quiet: true }, pieces.slots_each))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: nothing uses the ring after this; it is dropped nowhere else.
        unsafe { ManuallyDrop::drop(&mut self.uring) };
        if !self.quiet {
            // The kernel goes on with reads in flight, and lets go of the registered pipe after the last of them.
            while self.gone.read(&mut [0]).is_err_and(|e| e.kind() == ErrorKind::Interrupted) {}
        }
    }
}
