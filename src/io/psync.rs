//! The baseline engine: a fixed pool of threads, each carrying out one positional read at a time. Works on every
//! kernel and file system; queue depth = threads.

use super::{
    Capabilities, Completion, EngineCounters, IoEngine, IoSetupError, ReadOutcome, ReadRequest, Signal, Slot,
    wait_for_start,
};
use crate::clock::Clock;
use std::collections::VecDeque;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Stack of a reading thread: one system call deep.
const STACK_BYTES: usize = 64 * 1024;
/// Partial reads inside a file end on multiples of this (the largest sector of any drive).
const PIECE: usize = 4096;
/// Most threads of one engine; more only measures the scheduler.
pub const MAX_QUEUE_DEPTH: u32 = 256;

/// A pool of reading threads.
pub struct PsyncEngine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    capabilities: Capabilities,
}

struct Shared {
    files: Vec<File>,
    queue: Mutex<Queue>,
    work: Condvar,
    signal: Arc<Signal>,
    counters: Arc<EngineCounters>,
    clock: Clock,
}

struct Queue {
    pending: VecDeque<ReadRequest>,
    running: Vec<Running>,
    done: VecDeque<Completion>,
    stop: bool,
}

struct Running {
    tag: u64,
    cancelled: bool,
}

impl PsyncEngine {
    /// An engine over `files` with `queue_depth` threads, holding at most `max_requests` reads. `signal` is raised
    /// after each completion.
    pub fn new(
        files: Vec<File>,
        queue_depth: u32,
        max_requests: u32,
        signal: Arc<Signal>,
        clock: Clock,
    ) -> Result<Self, IoSetupError> {
        if queue_depth == 0 || queue_depth > MAX_QUEUE_DEPTH || max_requests == 0 {
            return Err(IoSetupError::Option(format!(
                "queue depth {queue_depth} is not within 1 to {MAX_QUEUE_DEPTH}, or no request fits"
            )));
        }
        let queue = Queue {
            pending: VecDeque::with_capacity(max_requests as usize),
            running: Vec::with_capacity(queue_depth as usize),
            done: VecDeque::with_capacity(max_requests as usize),
            stop: false,
        };
        let counters = Arc::new(EngineCounters::default());
        let shared = Shared { files, queue: Mutex::new(queue), work: Condvar::new(), signal, counters, clock };
        let capabilities = Capabilities { name: "psync", queue_depth, max_requests, emulated: false };
        let mut engine = Self { shared: Arc::new(shared), threads: Vec::new(), capabilities };
        let up = Arc::new(Signal::default());
        for index in 0..queue_depth {
            let up = Arc::clone(&up);
            let shared = Arc::clone(&engine.shared);
            let name = format!("read-{index}");
            let thread = std::thread::Builder::new().name(name.clone()).stack_size(STACK_BYTES);
            let thread = thread
                .spawn(move || {
                    up.raise();
                    shared.work();
                })
                .map_err(|source| IoSetupError::Thread { name, source })?;
            engine.threads.push(thread);
        }
        wait_for_start(&up, u64::from(queue_depth), "read-*")?;
        Ok(engine)
    }
}

impl IoEngine for PsyncEngine {
    fn submit(&mut self, batch: &mut Vec<ReadRequest>) -> usize {
        let depth = self.capabilities.queue_depth as usize;
        let mut queue = self.shared.lock();
        let held = queue.pending.len() + queue.running.len() + queue.done.len();
        let taken = batch.len().min((self.capabilities.max_requests as usize).saturating_sub(held));
        let at_once = depth.saturating_sub(queue.running.len() + queue.pending.len());
        queue.pending.extend(batch.drain(..taken));
        drop(queue);
        self.shared.counters.accept(taken as u64, taken.saturating_sub(at_once) as u64);
        (0..taken.min(depth)).for_each(|_| self.shared.work.notify_one());
        taken
    }

    fn reap(&mut self, min: usize, deadline: Instant, out: &mut Vec<Completion>) -> usize {
        reap_from(&self.shared.signal, min, deadline, || {
            let mut queue = self.shared.lock();
            let count = queue.done.len();
            out.extend(queue.done.drain(..));
            count
        })
    }

    fn cancel(&mut self, tag: u64) -> bool {
        let mut queue = self.shared.lock();
        if let Some(running) = queue.running.iter_mut().find(|r| r.tag == tag) {
            running.cancelled = true;
            return true;
        }
        let Some(at) = queue.pending.iter().position(|r| r.tag == tag) else { return false };
        if let Some(request) = queue.pending.remove(at) {
            let now = self.shared.clock.now_ns();
            let (tag, slot) = (request.tag, request.slot);
            let outcome = ReadOutcome::Cancelled;
            self.shared.counters.finish(outcome);
            queue.done.push_back(Completion { tag, slot, submitted_ns: now, completed_ns: now, outcome });
        }
        drop(queue);
        self.shared.signal.raise();
        true
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn counters(&self) -> Arc<EngineCounters> {
        Arc::clone(&self.shared.counters)
    }
}

impl Drop for PsyncEngine {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Calls `drain` until it has yielded `min` in all or `deadline` has passed; sleeps on `signal` in between.
pub(super) fn reap_from(signal: &Signal, min: usize, deadline: Instant, mut drain: impl FnMut() -> usize) -> usize {
    let mut count = 0;
    loop {
        let seen = signal.epoch();
        count += drain();
        if count >= min || Instant::now() >= deadline {
            return count;
        }
        signal.wait(seen, deadline);
    }
}

impl Shared {
    /// A panic while the lock is held is not possible (no user code runs under it), so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if queue.stop {
                return;
            }
            let Some(mut request) = queue.pending.pop_front() else {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.running.push(Running { tag: request.tag, cancelled: false });
            self.counters.started(queue.running.len() as u64);
            drop(queue);

            let submitted_ns = self.clock.now_ns();
            let outcome = match self.files.get(request.file as usize) {
                Some(file) => read_into(file, request.offset, request.len, request.need, &mut request.slot),
                None => ReadOutcome::Failed { errno: libc::EBADF },
            };
            let completed_ns = self.clock.now_ns();

            queue = self.lock();
            let at = queue.running.iter().position(|r| r.tag == request.tag);
            let cancelled = at.is_some_and(|at| queue.running.swap_remove(at).cancelled);
            let outcome = if cancelled { ReadOutcome::Cancelled } else { outcome };
            self.counters.finish(outcome);
            let (tag, slot) = (request.tag, request.slot);
            queue.done.push_back(Completion { tag, slot, submitted_ns, completed_ns, outcome });
            drop(queue);
            self.signal.raise();
            queue = self.lock();
        }
    }
}

/// Reads until `need` bytes are there: interrupted calls are repeated, partial ones continued. The end of the file
/// may cut the alignment padding off, not the `need`ed bytes.
fn read_into(file: &File, offset: u64, len: u32, need: u32, slot: &mut Slot) -> ReadOutcome {
    let Some(target) = slot.bytes_mut().get_mut(..len as usize).filter(|_| need <= len) else {
        return ReadOutcome::Failed { errno: libc::EFAULT };
    };
    let mut got = 0u32;
    loop {
        let Some(position) = offset.checked_add(u64::from(got)) else {
            return ReadOutcome::Failed { errno: libc::EINVAL };
        };
        match file.read_at(&mut target[got as usize..], position) {
            Ok(0) => break,
            Ok(bytes) => {
                got += bytes as u32; // at most what is left of `len`
                // A piece that ends off every sector size can only be the file's end, and could not be continued
                // directly.
                if got >= need || bytes % PIECE != 0 {
                    break;
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return ReadOutcome::Failed { errno: e.raw_os_error().unwrap_or(libc::EIO) },
        }
    }
    if got >= need { ReadOutcome::Done { bytes: got } } else { ReadOutcome::Short { bytes: got } }
}

#[cfg(test)]
mod tests {
    use super::super::Slab;
    use super::*;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn file_with(bytes: &[u8]) -> File {
        use std::io::Write;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn engine(file: File, depth: u32, max: u32) -> (PsyncEngine, Slab) {
        let signal = Arc::new(Signal::default());
        let slab = Slab::new(max, 4096, Arc::clone(&signal)).unwrap();
        (PsyncEngine::new(vec![file], depth, max, signal, Clock::start()).unwrap(), slab)
    }

    fn request(slab: &Slab, tag: u64, offset: u64, len: u32, need: u32) -> ReadRequest {
        ReadRequest { tag, file: 0, offset, len, need, slot: slab.take().unwrap() }
    }

    #[test]
    fn reads_arrive_with_their_bytes_and_ordered_times() {
        let bytes: Vec<u8> = (0..65_536u32).map(|i| (i / 4096) as u8).collect();
        let (mut engine, slab) = engine(file_with(&bytes), 3, 16);
        let mut batch: Vec<_> = (0..16).map(|i| request(&slab, i, i * 4096, 4096, 4096)).collect();
        assert_eq!(engine.submit(&mut batch), 16);
        let mut out = Vec::new();
        assert_eq!(engine.reap(16, soon(), &mut out), 16);
        for c in &out {
            assert_eq!(c.outcome, ReadOutcome::Done { bytes: 4096 });
            assert!(c.slot.bytes().iter().all(|&b| u64::from(b) == c.tag));
            assert!(c.submitted_ns <= c.completed_ns);
        }
        let seen = engine.counters().snapshot();
        assert_eq!((seen.submitted, seen.completed, seen.cancelled), (16, 16, 0));
        assert!(seen.waited >= 13, "3 threads, 16 reads: {seen:?}");
        assert!((1..=3).contains(&seen.max_in_flight));
    }

    #[test]
    fn the_end_of_the_file_may_cut_padding_but_not_payload() {
        let (mut engine, slab) = engine(file_with(&[5u8; 5000]), 1, 4);
        let mut batch = vec![request(&slab, 1, 4096, 1024, 904), request(&slab, 2, 4096, 1024, 905)];
        batch.push(request(&slab, 3, 1 << 40, 512, 512));
        batch.push(request(&slab, 4, 0, 512, 512));
        batch[3].file = 7;
        engine.submit(&mut batch);
        let mut out = Vec::new();
        engine.reap(4, soon(), &mut out);
        let outcome = |tag| out.iter().find(|c| c.tag == tag).unwrap().outcome;
        assert_eq!(outcome(1), ReadOutcome::Done { bytes: 904 });
        assert_eq!(outcome(2), ReadOutcome::Short { bytes: 904 });
        assert_eq!(outcome(3), ReadOutcome::Short { bytes: 0 });
        assert_eq!(outcome(4), ReadOutcome::Failed { errno: libc::EBADF });
    }

    #[test]
    fn what_does_not_fit_stays_with_the_caller() {
        let (mut engine, slab) = engine(file_with(&[1; 4096]), 1, 2);
        let spare = Slab::new(1, 4096, Arc::default()).unwrap();
        let mut batch: Vec<_> = (0..2).map(|i| request(&slab, i, 0, 512, 512)).collect();
        batch.push(request(&spare, 2, 0, 512, 512));
        assert_eq!(engine.submit(&mut batch), 2);
        assert_eq!(batch.len(), 1);
        assert_eq!(batch[0].tag, 2);
        let mut out = Vec::new();
        engine.reap(2, soon(), &mut out);
        assert_eq!(engine.submit(&mut batch), 1, "room again");
    }

    #[test]
    fn a_cancelled_read_keeps_its_slot_until_reaped() {
        let (mut engine, slab) = engine(file_with(&[1; 4096]), 1, 8);
        let mut batch: Vec<_> = (0..8).map(|i| request(&slab, i, 0, 4096, 4096)).collect();
        engine.submit(&mut batch);
        let cancelled: Vec<u64> = (0..8).rev().filter(|&tag| engine.cancel(tag)).collect();
        assert_eq!(slab.free_slots(), 0, "all slots are still owned");
        let mut out = Vec::new();
        assert_eq!(engine.reap(8, soon(), &mut out), 8);
        for c in &out {
            assert_eq!(c.outcome == ReadOutcome::Cancelled, cancelled.contains(&c.tag));
        }
        assert!(!engine.cancel(0), "nothing outstanding");
        drop(out);
        assert_eq!(slab.free_slots(), 8);
        assert_eq!(engine.counters().snapshot().cancelled, cancelled.len() as u64);
    }

    #[test]
    fn reap_returns_at_its_deadline() {
        let (mut engine, _slab) = engine(file_with(&[]), 1, 1);
        assert_eq!(engine.reap(1, Instant::now() + Duration::from_millis(2), &mut Vec::new()), 0);
        assert!(PsyncEngine::new(vec![], 0, 1, Arc::default(), Clock::start()).is_err());
    }
}
