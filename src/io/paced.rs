//! Emulated drives, for machines with one disk: an engine's reads are held back until the time at which the pretended
//! drive would have delivered them.
//!
//! [`PaceModel`] is the drive as arithmetic (no clock). [`PacedDrive`] is one drive of a run: its server is shared by
//! every engine that reads from it, so two pools do not get two drives. [`PacedEngine`] wraps any engine and
//! releases each completion at its deadline. Deadlines are absolute: a late wake-up delays one read, never the next.

use super::paced_link::PacedLink;
use super::pool::reap_from;
use super::{
    Capabilities, Completion, EngineCounters, IoEngine, IoSetupError, ReadOutcome, ReadRequest, Signal, wait_for_start,
};
use crate::clock::Clock;
use crate::drive::emulated_link::LinkName;
use crate::drive::spec::Emulation;
use crate::sys::timer;
use hdrhistogram::Histogram;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The timer thread sleeps until this long before a deadline and spins from there: a timed wake-up on an idle
/// machine comes some tens of microseconds late.
const SPIN: Duration = Duration::from_micros(60);
/// How long the timer thread sleeps at most when nothing is in flight.
const IDLE: Duration = Duration::from_secs(1);
/// Counters of reads by offset; two offsets that share one only see each other's reads in their jitter.
const NTH_COUNTERS: usize = 1 << 14;
/// Errors are kept as parts per million of the model's duration, up to 1000 times that duration.
const MAX_ERROR_PPM: u64 = 1_000_000_000;

/// The arithmetic of an emulated drive: one server, first come first served.
///
/// `start = max(submit, free); free = start + per_read + bytes / rate; done = free + latency`. Jitter makes the
/// service and the latency of a read up to `1 + jitter` times longer, never shorter, so the drive is never faster
/// than its rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaceModel {
    emulation: Emulation,
    drive_key: u64,
}

/// When the model starts and ends a read, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// The server turns to it.
    pub start_ns: u64,
    /// The server is free again.
    pub free_ns: u64,
    /// Its bytes are delivered.
    pub done_ns: u64,
}

impl PaceModel {
    /// The model of the drive called `name`.
    pub fn new(name: &str, emulation: Emulation) -> Self {
        Self { emulation, drive_key: xxhash_rust::xxh3::xxh3_64(name.as_bytes()) }
    }

    /// What it pretends to be.
    pub fn emulation(&self) -> &Emulation {
        &self.emulation
    }

    /// The slow-down of the `nth` read at (`file`, `offset`): within 1 to 1 + jitter, the same for the same arguments.
    pub fn factor(&self, file: u32, offset: u64, nth: u32) -> f64 {
        if self.emulation.jitter == 0.0 {
            return 1.0;
        }
        let mut key = [0u8; 24];
        key[..8].copy_from_slice(&self.drive_key.to_le_bytes());
        key[8..16].copy_from_slice(&offset.to_le_bytes());
        key[16..20].copy_from_slice(&file.to_le_bytes());
        key[20..].copy_from_slice(&nth.to_le_bytes());
        let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&key, self.emulation.seed);
        let unit = (hash >> 11) as f64 / (1u64 << 53) as f64;
        1.0 + self.emulation.jitter * unit
    }

    /// Serves a read of `bytes` submitted at `submit_ns` by a server that is free from `free_ns` on.
    pub fn serve(&self, free_ns: u64, submit_ns: u64, bytes: u64, factor: f64) -> Service {
        self.serve_since(submit_ns.max(free_ns), free_ns, submit_ns, bytes, factor)
    }

    /// The same for a drive whose first read came at `first_ns`: a read keeps the rate that the schedule has when the
    /// server turns to it.
    pub fn serve_since(&self, first_ns: u64, free_ns: u64, submit_ns: u64, bytes: u64, factor: f64) -> Service {
        let e = &self.emulation;
        let since = submit_ns.max(free_ns).saturating_sub(first_ns);
        let rate = e.schedule.rate_at(since).unwrap_or(e.rate_bytes_per_s);
        let transfer = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate.max(1)));
        let transfer = u64::try_from(transfer).unwrap_or(u64::MAX);
        let scale = |ns: u64| if factor == 1.0 { ns } else { (ns as f64 * factor).ceil() as u64 };
        let start_ns = submit_ns.max(free_ns);
        let free_ns = start_ns.saturating_add(scale(e.per_read_ns.saturating_add(transfer)));
        Service { start_ns, free_ns, done_ns: free_ns.saturating_add(scale(e.latency_ns)) }
    }
}

/// An emulated drive of a run: the one server behind all engines that read from it, and what it measured of itself.
pub struct PacedDrive {
    model: PaceModel,
    link: Option<Arc<PacedLink>>,
    server: Mutex<Server>,
    stats: Mutex<Stats>,
}

struct Server {
    free_ns: u64,
    /// When the first read was submitted: the schedule's zero.
    first_ns: Option<u64>,
    nth: Box<[u32]>,
    /// Reads whose bytes crossed the link, and those that others' bytes delayed there.
    crossed: u64,
    behind_others: u64,
}

struct Stats {
    reads: u64,
    overruns: u64,
    error_ppm: Histogram<u64>,
}

/// How well the pace was kept (measuring.md: error p50 <= 3 %, overruns <= 1 %).
#[derive(Clone, Debug)]
pub struct PaceSnapshot {
    /// Reads released.
    pub reads: u64,
    /// Reads whose backing read ended after the deadline: the disk behind is too slow for this pace.
    pub overruns: u64,
    /// |actual - model| / model duration, in parts per million.
    pub error_ppm: Histogram<u64>,
    /// What happened on the link that it shares; `None` = it shares none.
    pub link: Option<LinkUse>,
}

/// What one drive's reads met on a shared link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkUse {
    /// The link.
    pub name: LinkName,
    /// Reads that crossed it.
    pub crossed: u64,
    /// Of these, reads that bytes of other drives delayed.
    pub behind_others: u64,
}

impl PaceSnapshot {
    /// Median error as a fraction; 0 when nothing was read.
    pub fn error_p50(&self) -> f64 {
        self.error_ppm.value_at_quantile(0.5) as f64 / 1e6
    }

    /// Overruns as a fraction of reads; 0 when nothing was read.
    pub fn overrun_share(&self) -> f64 {
        if self.reads == 0 { 0.0 } else { self.overruns as f64 / self.reads as f64 }
    }
}

impl PacedDrive {
    /// The drive called `name`, idle, with its own way to memory.
    pub fn new(name: &str, emulation: Emulation) -> Result<Arc<Self>, IoSetupError> {
        Self::on(name, emulation, None)
    }

    /// The same on a link that other drives may share (`paced_link::paced_drives` makes both).
    pub fn on(name: &str, emulation: Emulation, link: Option<Arc<PacedLink>>) -> Result<Arc<Self>, IoSetupError> {
        let error_ppm = Histogram::new_with_bounds(1, MAX_ERROR_PPM, 3)
            .map_err(|e| IoSetupError::Option(format!("pacing histogram: {e}")))?;
        let nth = vec![0; NTH_COUNTERS].into_boxed_slice();
        let server = Server { free_ns: 0, first_ns: None, nth, crossed: 0, behind_others: 0 };
        Ok(Arc::new(Self {
            model: PaceModel::new(name, emulation),
            link,
            server: Mutex::new(server),
            stats: Mutex::new(Stats { reads: 0, overruns: 0, error_ppm }),
        }))
    }

    /// The link that it shares.
    pub fn link(&self) -> Option<&Arc<PacedLink>> {
        self.link.as_ref()
    }

    /// Its arithmetic.
    pub fn model(&self) -> &PaceModel {
        &self.model
    }

    /// How well the pace was kept so far.
    pub fn snapshot(&self) -> PaceSnapshot {
        let link = self.link.as_ref().map(|link| {
            let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
            LinkUse { name: link.name(), crossed: server.crossed, behind_others: server.behind_others }
        });
        let stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        PaceSnapshot { reads: stats.reads, overruns: stats.overruns, error_ppm: stats.error_ppm.clone(), link }
    }

    /// Puts a read into the server's queue. Submissions are served in the order of this call.
    fn admit(&self, file: u32, offset: u64, bytes: u64, submit_ns: u64) -> Service {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let mut key = [0u8; 12];
        key[..8].copy_from_slice(&offset.to_le_bytes());
        key[8..].copy_from_slice(&file.to_le_bytes());
        let at = xxhash_rust::xxh3::xxh3_64(&key) as usize % NTH_COUNTERS;
        let nth = server.nth[at];
        server.nth[at] = nth.wrapping_add(1);
        let first = *server.first_ns.get_or_insert(submit_ns);
        let factor = self.model.factor(file, offset, nth);
        let mut service = self.model.serve_since(first, server.free_ns, submit_ns, bytes, factor);
        if let Some(link) = &self.link {
            let from_ns = service.start_ns.saturating_add(self.model.emulation.per_read_ns);
            let crossing = link.carry(submit_ns, from_ns, bytes);
            let late = crossing.done_ns.saturating_sub(service.free_ns);
            service.free_ns = service.free_ns.saturating_add(late);
            service.done_ns = service.done_ns.saturating_add(late);
            server.crossed += 1;
            server.behind_others += u64::from(crossing.behind_others);
        }
        server.free_ns = service.free_ns;
        service
    }

    fn released(&self, flight: &Flight, backing_ns: u64, released_ns: u64) {
        let model_ns = u128::from(flight.deadline_ns.saturating_sub(flight.submitted_ns).max(1));
        let off = u128::from(released_ns.abs_diff(flight.deadline_ns));
        let ppm = u64::try_from(off * 1_000_000 / model_ns).unwrap_or(u64::MAX);
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        stats.reads += 1;
        stats.overruns += u64::from(backing_ns > flight.deadline_ns);
        stats.error_ppm.saturating_record(ppm.max(1));
    }
}

/// An engine whose reads come no earlier than an emulated drive would have delivered them. Queue depth is enforced
/// here: the backing disk is faster, so the engine behind would never fill up.
pub struct PacedEngine {
    shared: Arc<Shared>,
    timer: Option<JoinHandle<()>>,
    capabilities: Capabilities,
}

struct Shared {
    state: Mutex<State>,
    /// Raised by the engine behind; wakes the timer thread.
    kick: Arc<Signal>,
    /// The run's signal.
    signal: Arc<Signal>,
    drive: Arc<PacedDrive>,
    counters: Arc<EngineCounters>,
    clock: Clock,
    depth: usize,
}

struct State {
    inner: Box<dyn IoEngine>,
    pending: VecDeque<ReadRequest>,
    flights: Vec<Flight>,
    starting: Vec<ReadRequest>,
    arrived: Vec<Completion>,
    done: VecDeque<Completion>,
    stop: bool,
}

struct Flight {
    tag: u64,
    submitted_ns: u64,
    deadline_ns: u64,
    cancelled: bool,
    backing: Option<Completion>,
}

impl PacedEngine {
    /// Paces the engine that `make` returns. `make` gets the signal which that engine must raise; `signal` is the one
    /// that this engine raises. Several engines may share `drive`.
    pub fn new(
        drive: Arc<PacedDrive>,
        signal: Arc<Signal>,
        clock: Clock,
        make: impl FnOnce(Arc<Signal>) -> Result<Box<dyn IoEngine>, IoSetupError>,
    ) -> Result<Self, IoSetupError> {
        let kick = Arc::new(Signal::default());
        let inner = make(Arc::clone(&kick))?;
        let capabilities = Capabilities { emulated: true, stamps_late: false, ..inner.capabilities() };
        let counters = Arc::new(EngineCounters::over(Arc::clone(&inner.counters().work)));
        let (depth, max) = (capabilities.queue_depth as usize, capabilities.max_requests as usize);
        let state = State {
            inner,
            pending: VecDeque::with_capacity(max),
            flights: Vec::with_capacity(depth),
            starting: Vec::with_capacity(depth),
            arrived: Vec::with_capacity(max),
            done: VecDeque::with_capacity(max),
            stop: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), kick, signal, drive, counters, clock, depth });
        let up = Arc::new(Signal::default());
        let started = Arc::clone(&up);
        let for_timer = Arc::clone(&shared);
        let name = "pace-timer".to_string();
        let timer = std::thread::Builder::new().name(name.clone()).stack_size(64 * 1024);
        let timer = timer.spawn(move || {
            for_timer.counters.work.thread_began();
            started.raise();
            for_timer.keep_time();
        });
        let timer = Some(timer.map_err(|source| IoSetupError::Thread { name, source })?);
        let engine = Self { shared, timer, capabilities };
        wait_for_start(&up, 1, "pace-timer")?;
        Ok(engine)
    }
}

impl IoEngine for PacedEngine {
    fn submit(&mut self, batch: &mut Vec<ReadRequest>) -> usize {
        let mut state = self.shared.lock();
        let held = state.pending.len() + state.flights.len() + state.done.len();
        let taken = batch.len().min((self.capabilities.max_requests as usize).saturating_sub(held));
        state.pending.extend(batch.drain(..taken));
        self.shared.start(&mut state);
        let waiting = state.pending.len().min(taken);
        drop(state);
        self.shared.counters.accept(taken as u64, waiting as u64);
        taken
    }

    fn reap(&mut self, min: usize, deadline: Instant, out: &mut Vec<Completion>) -> usize {
        reap_from(&self.shared.signal, min, deadline, || {
            let mut state = self.shared.lock();
            let count = state.done.len();
            out.extend(state.done.drain(..));
            count
        })
    }

    /// A read that the server has begun goes on occupying it, and completes at its deadline.
    fn cancel(&mut self, tag: u64) -> bool {
        let mut state = self.shared.lock();
        if let Some(flight) = state.flights.iter_mut().find(|f| f.tag == tag) {
            flight.cancelled = true;
            return true;
        }
        self.shared.withdraw(state, tag)
    }

    fn withdraw(&mut self, tag: u64) -> bool {
        let state = self.shared.lock();
        self.shared.withdraw(state, tag)
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn counters(&self) -> Arc<EngineCounters> {
        Arc::clone(&self.shared.counters)
    }
}

impl Drop for PacedEngine {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.kick.raise();
        if let Some(timer) = self.timer.take() {
            let _ = timer.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands waiting reads to the drive for as long as the queue depth allows.
    fn start(&self, state: &mut State) {
        while state.flights.len() < self.depth {
            let Some(request) = state.pending.pop_front() else { break };
            let submitted_ns = self.clock.now_ns();
            let (tag, bytes) = (request.tag, u64::from(request.len));
            let service = self.drive.admit(request.file, request.offset, bytes, submitted_ns);
            let deadline_ns = service.done_ns;
            state.flights.push(Flight { tag, submitted_ns, deadline_ns, cancelled: false, backing: None });
            state.starting.push(request);
        }
        self.counters.started(state.flights.len() as u64);
        // The engine behind has room for `depth` reads, and never more are in flight.
        state.inner.submit(&mut state.starting);
    }

    /// Ends a read that the drive has not begun.
    fn withdraw(&self, mut state: MutexGuard<'_, State>, tag: u64) -> bool {
        let at = state.pending.iter().position(|r| r.tag == tag);
        let Some(request) = at.and_then(|at| state.pending.remove(at)) else { return false };
        let now = self.clock.now_ns();
        let (tag, slot) = (request.tag, request.slot);
        let outcome = ReadOutcome::Cancelled;
        self.counters.finish(outcome);
        state.done.push_back(Completion { tag, slot, submitted_ns: now, completed_ns: now, outcome });
        drop(state);
        self.signal.raise();
        true
    }

    /// The timer thread.
    fn keep_time(&self) {
        // Without it deadlines are met less exactly, which the error histogram then shows.
        let _ = timer::use_smallest_timer_slack();
        loop {
            let seen = self.kick.epoch();
            let (released, next) = {
                let mut state = self.lock();
                if state.stop {
                    return;
                }
                self.collect(&mut state);
                let released = self.release(&mut state);
                self.start(&mut state);
                let arrived = state.flights.iter().filter(|f| f.backing.is_some());
                (released, arrived.map(|f| f.deadline_ns).min())
            };
            if released {
                self.signal.raise();
            }
            let Some(next) = next else {
                self.kick.wait(seen, Instant::now() + IDLE);
                continue;
            };
            let next = self.clock.instant_at(next);
            if next.checked_duration_since(Instant::now()).is_some_and(|left| left > SPIN) {
                // An earlier deadline can only come with a completion of the engine behind, which raises `kick`.
                self.kick.wait(seen, next - SPIN);
            } else {
                while Instant::now() < next {
                    std::hint::spin_loop();
                }
            }
        }
    }

    /// Takes what the engine behind has finished.
    fn collect(&self, state: &mut State) {
        let State { inner, arrived, flights, .. } = state;
        inner.reap(0, Instant::now(), arrived);
        for completion in arrived.drain(..) {
            if let Some(flight) = flights.iter_mut().find(|f| f.tag == completion.tag) {
                flight.backing = Some(completion);
            }
        }
    }

    /// Releases every read whose bytes are there and whose deadline has passed, earliest deadline first.
    fn release(&self, state: &mut State) -> bool {
        let mut any = false;
        loop {
            let now = self.clock.now_ns();
            let due = state.flights.iter().enumerate().filter(|(_, f)| f.backing.is_some() && f.deadline_ns <= now);
            let Some((at, _)) = due.min_by_key(|(_, f)| f.deadline_ns) else { return any };
            let mut flight = state.flights.swap_remove(at);
            let Some(mut completion) = flight.backing.take() else { return any };
            self.drive.released(&flight, completion.completed_ns, now);
            completion.submitted_ns = flight.submitted_ns;
            completion.completed_ns = now;
            if flight.cancelled {
                completion.outcome = ReadOutcome::Cancelled;
            }
            self.counters.finish(completion.outcome);
            state.done.push_back(completion);
            any = true;
        }
    }
}

#[cfg(test)]
#[path = "paced_tests.rs"]
mod tests;
