//! Threads that share a product. The calling thread and the workers take chunks of the work one after another; whoever is
//! late takes fewer, so that a thread which the system has put aside holds up nobody. Which thread computes a chunk changes
//! no bit. Workers look out for work for a moment after the last and then sleep, because a token is some hundred products in
//! a row and then a wait for drives. Knows nothing of matrices.

use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use crate::sync::{Arc, Condvar, Instant, JoinHandle, Mutex, MutexGuard, PoisonError, ThreadBuilder, TryLockError};
use crate::sync::{LOOKS, spin_loop, yield_now};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

/// Most threads, the caller's own included.
pub const MAX_THREADS: usize = 64;
/// How long a worker looks out for more work before it sleeps.
pub(super) const AWAKE: Duration = Duration::from_micros(100);
/// How long the caller of [`Pool::muster`] waits for whoever has the workers, and threads then wait for each other.
const LONGEST_MUSTER: Duration = Duration::from_secs(1);

/// Called with the number of a chunk.
type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// What is on offer.
struct Offer {
    work: &'static Work<'static>,
    chunks: usize,
    /// Whether its chunks are among those that threads have computed.
    counted: bool,
}

struct Shared {
    /// Written by the caller alone, while the offer is closed and no worker is inside.
    offer: UnsafeCell<Offer>,
    /// Odd while the offer is open; each offer has a number of its own.
    number: AtomicU64,
    /// Workers that look at the offer or work on it.
    inside: AtomicUsize,
    /// The next chunk that nobody has taken.
    next: AtomicUsize,
    /// Workers that sleep or are about to.
    asleep: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    /// What a worker's chunk panicked with, until the caller has it.
    panicked: Mutex<Option<Box<dyn Any + Send>>>,
    /// The pool goes away.
    ended: AtomicBool,
    /// Chunks by thread; the caller is the first.
    taken: Vec<AtomicU64>,
}

// SAFETY: `offer` is written only by the holder of `Pool::caller`, while `number` is even and `inside` is 0. A worker reads it
// only after it has added itself to `inside` and then seen `number` odd; the caller makes `number` even and then waits for
// `inside` to be 0. All four are sequentially consistent: either the caller sees the worker inside and waits, or the
// worker sees the offer closed and leaves.
unsafe impl Sync for Shared {}

impl Shared {
    /// Takes chunks until none is left.
    fn work(&self, thread: usize, work: &Work<'_>, chunks: usize, counted: bool) {
        let mut taken = 0;
        loop {
            let chunk = self.next.fetch_add(1, Relaxed);
            if chunk >= chunks {
                break;
            }
            work(chunk);
            taken += 1;
        }
        self.taken[thread].fetch_add(if counted { taken } else { 0 }, Relaxed);
    }

    /// Waits for an offer other than number `last`; `None` when the pool goes away.
    fn await_offer(&self, last: u64) -> Option<u64> {
        let open = || Some(self.number.load(SeqCst)).filter(|n| n % 2 == 1 && *n != last);
        let since = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if let Some(number) = open() {
                    return Some(number);
                }
                spin_loop();
            }
            if self.ended.load(SeqCst) {
                return None;
            }
            if since.elapsed() < AWAKE {
                continue;
            }
            let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
            self.asleep.fetch_add(1, SeqCst);
            // Looked at again after `asleep` was raised: the caller opens, then asks whether anybody sleeps.
            while open().is_none() && !self.ended.load(SeqCst) {
                guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.asleep.fetch_sub(1, SeqCst);
        }
    }

    fn wake_all(&self) {
        if self.asleep.load(SeqCst) > 0 {
            drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }
}

/// A worker is inside; leaves when it goes out of scope.
struct Inside<'a>(&'a Shared);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, SeqCst);
    }
}

/// An open offer; closing it waits until no worker is inside, also when the caller's own chunk panics.
struct Open<'a>(&'a Shared);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.number.fetch_add(1, SeqCst);
        let mut looks = 0u32;
        while self.0.inside.load(SeqCst) > 0 {
            looks += 1;
            if looks.is_multiple_of(4 * LOOKS) {
                yield_now(); // whoever is inside may have been put aside
            }
            spin_loop();
        }
    }
}

/// A fixed number of threads, the caller's own included.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by whoever has the workers; another caller computes alone.
    caller: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller's own included: 1 to [`MAX_THREADS`]. Fewer if the system gives no more.
    pub fn new(threads: usize) -> Self {
        let threads = threads.clamp(1, MAX_THREADS);
        let shared = Arc::new(Shared {
            offer: UnsafeCell::new(Offer { work: &|_| {}, chunks: 0, counted: false }),
            number: AtomicU64::new(0),
            inside: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            asleep: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            panicked: Mutex::new(None),
            ended: AtomicBool::new(false),
            taken: (0..threads).map(|_| AtomicU64::new(0)).collect(),
        });
        let spawn = |thread: usize| {
            let shared = Arc::clone(&shared);
            ThreadBuilder::new().name(format!("compute-{thread}")).spawn(move || serve(&shared, thread)).ok()
        };
        Self { workers: (1..threads).map_while(spawn).collect(), shared, caller: Mutex::new(()) }
    }

    /// Threads, the caller's own included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Chunks that each thread has computed so far, the caller first.
    pub fn taken(&self) -> Vec<u64> {
        self.shared.taken.iter().map(|n| n.load(Relaxed)).collect()
    }

    /// The caller has computed something that was not divided.
    pub fn count_alone(&self) {
        self.shared.taken[0].fetch_add(1, Relaxed);
    }

    /// Calls `work` once with each of `0..chunks`, on any thread and in any order, and returns when all are done. Allocates
    /// nothing. A caller that finds the workers busy does everything itself. Panics if a chunk does, with the same words, and
    /// is as good as before then; which of the other chunks were computed is unknown.
    pub fn run(&self, chunks: usize, work: &Work<'_>) {
        let own = if chunks < 2 || self.workers.is_empty() { None } else { self.try_own() };
        match own {
            Some(own) => self.share(own, chunks, true, work),
            None => {
                (0..chunks).for_each(work);
                self.shared.taken[0].fetch_add(chunks as u64, Relaxed);
            }
        }
    }

    /// Calls `work` once on each thread, with a number of its own; not counted among what threads compute. `false` if some were
    /// left out, because somebody else had the workers for a second or a thread did not come by within one.
    pub fn muster(&self, work: &Work<'_>) -> bool {
        let (threads, arrived, since) = (self.threads(), AtomicUsize::new(0), Instant::now());
        let own = loop {
            match self.try_own() {
                None if since.elapsed() < LONGEST_MUSTER => yield_now(),
                own => break own,
            }
        };
        let Some(own) = own else {
            work(0);
            return threads == 1;
        };
        // A thread that has done its part stays until all have: none can take two.
        let (since, alone) = (Instant::now(), AtomicBool::new(false));
        self.share(own, threads, false, &|thread| {
            if alone.load(SeqCst) {
                return;
            }
            work(thread);
            arrived.fetch_add(1, SeqCst);
            while arrived.load(SeqCst) < threads {
                if since.elapsed() >= LONGEST_MUSTER {
                    alone.store(true, SeqCst);
                    return;
                }
                yield_now();
            }
        });
        !alone.load(SeqCst)
    }

    /// The right to the workers, if nobody has it.
    fn try_own(&self) -> Option<MutexGuard<'_, ()>> {
        match self.caller.try_lock() {
            Ok(own) => Some(own),
            // A chunk of somebody's has panicked; nothing of that is left here.
            Err(TryLockError::Poisoned(own)) => Some(own.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn share(&self, _own: MutexGuard<'_, ()>, chunks: usize, counted: bool, work: &Work<'_>) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers call `work` only while the offer is open, and `Open` closes it and waits
        // for them before this function returns or unwinds.
        let work: &'static Work<'static> = unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        // SAFETY: `_own` is held and the offer is closed: whoever opened it before has waited for all workers inside, and one that
        // comes inside meanwhile sees it closed and leaves without reading it.
        unsafe { *shared.offer.get() = Offer { work, chunks, counted } };
        shared.next.store(0, SeqCst);
        shared.number.fetch_add(1, SeqCst);
        let open = Open(shared);
        shared.wake_all();
        let done = catch_unwind(AssertUnwindSafe(|| shared.work(0, work, chunks, counted)));
        drop(open);
        let theirs = shared.panicked.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = done.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.ended.store(true, SeqCst);
        // Under the lock: a worker that has looked at `ended` is asleep before it is woken.
        drop(self.shared.sleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join(); // panics were handed to whoever shared the work
        }
    }
}

/// A worker's life.
fn serve(shared: &Shared, thread: usize) {
    let mut last = 0;
    while let Some(number) = shared.await_offer(last) {
        last = number;
        shared.inside.fetch_add(1, SeqCst);
        let _inside = Inside(shared);
        if shared.number.load(SeqCst) == number {
            // SAFETY: this worker is inside and has seen the offer open since.
            let offer = unsafe { &*shared.offer.get() };
            // The worker lives on; whoever opened the offer is told.
            if let Err(panic) =
                catch_unwind(AssertUnwindSafe(|| shared.work(thread, offer.work, offer.chunks, offer.counted)))
            {
                shared.panicked.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
        }
    }
}
