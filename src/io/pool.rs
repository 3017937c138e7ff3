//! A fixed pool of threads, each carrying out one read at a time: the frame of every engine whose reads wait in a
//! system call or a page fault. Queue depth = threads. Knows nothing of how a read is carried out.

use super::{
    Capabilities, Completion, EngineCounters, EngineKind, IoEngine, IoSetupError, ReadOutcome, ReadRequest, Signal,
    Work, check_depth, wait_for_start,
};
use crate::clock::Clock;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Stack of a reading thread: one system call deep.
const STACK_BYTES: usize = 64 * 1024;

/// One way of carrying out a read by a thread that waits for it. The implementation counts what it did in `work`.
pub trait ReadOne: Send + Sync + 'static {
    /// Whose code this is.
    const KIND: EngineKind;

    /// Reads at least `need` bytes into the request's slot, or says why not.
    fn read(&self, request: &mut ReadRequest, work: &Work) -> ReadOutcome;
}

/// A pool of threads, each carrying out one read at a time.
pub struct PoolEngine<R: ReadOne> {
    shared: Arc<Shared<R>>,
    threads: Vec<JoinHandle<()>>,
    capabilities: Capabilities,
}

struct Shared<R> {
    reads: R,
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

impl<R: ReadOne> PoolEngine<R> {
    /// A pool of `queue_depth` threads that read by `reads`, holding at most `max_requests` reads. `signal` is raised
    /// after each completion.
    pub fn start(
        reads: R,
        queue_depth: u32,
        max_requests: u32,
        signal: Arc<Signal>,
        clock: Clock,
    ) -> Result<Self, IoSetupError> {
        check_depth(queue_depth, max_requests)?;
        let queue = Queue {
            pending: VecDeque::with_capacity(max_requests as usize),
            running: Vec::with_capacity(queue_depth as usize),
            done: VecDeque::with_capacity(max_requests as usize),
            stop: false,
        };
        let counters = Arc::new(EngineCounters::default());
        let shared = Shared { reads, queue: Mutex::new(queue), work: Condvar::new(), signal, counters, clock };
        let name = R::KIND.name();
        let capabilities = Capabilities { name, queue_depth, max_requests, emulated: false, stamps_late: false };
        let mut engine = Self { shared: Arc::new(shared), threads: Vec::new(), capabilities };
        let up = Arc::new(Signal::default());
        for index in 0..queue_depth {
            let up = Arc::clone(&up);
            let shared = Arc::clone(&engine.shared);
            let name = format!("read-{index}");
            let thread = std::thread::Builder::new().name(name.clone()).stack_size(STACK_BYTES);
            let thread = thread
                .spawn(move || {
                    shared.counters.work.thread_began();
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

impl<R: ReadOne> IoEngine for PoolEngine<R> {
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
        self.shared.withdraw(queue, tag)
    }

    fn withdraw(&mut self, tag: u64) -> bool {
        let queue = self.shared.lock();
        self.shared.withdraw(queue, tag)
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn counters(&self) -> Arc<EngineCounters> {
        Arc::clone(&self.shared.counters)
    }
}

impl<R: ReadOne> Drop for PoolEngine<R> {
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

impl<R: ReadOne> Shared<R> {
    /// A panic while the lock is held is not possible (no user code runs under it), so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a read that no thread has taken yet.
    fn withdraw(&self, mut queue: MutexGuard<'_, Queue>, tag: u64) -> bool {
        let at = queue.pending.iter().position(|r| r.tag == tag);
        let Some(request) = at.and_then(|at| queue.pending.remove(at)) else { return false };
        let now = self.clock.now_ns();
        let (tag, slot) = (request.tag, request.slot);
        let outcome = ReadOutcome::Cancelled;
        self.counters.finish(outcome);
        queue.done.push_back(Completion { tag, slot, submitted_ns: now, completed_ns: now, outcome });
        drop(queue);
        self.signal.raise();
        true
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
            let outcome = self.reads.read(&mut request, &self.counters.work);
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
