//! Faults on purpose: an engine whose reads meet what rules say, so that what a program does about bad drives can be seen
//! without one. Wraps any engine, the emulated pace included.
//!
//! [`FaultyDrive`] is one drive of a run: it numbers the reads of every engine on it, decides which rule falls on which (from the
//! seed and the number, so the same in every run), and counts what was really done. [`FaultyEngine`] does it: a read that is to
//! fail never reaches the engine behind; others are carried out and then held back, cut or changed. A read held back keeps its
//! slot until its time, also when it has been given up, as with a drive that hangs; one that never answers keeps it for good.

use super::pool::reap_from;
use super::{
    Capabilities, Completion, EngineCounters, IoEngine, IoSetupError, ReadOutcome, ReadRequest, Signal, wait_for_start,
};
use crate::clock::Clock;
use crate::drive::fault_rule::{FaultKind, FaultRule, drive_key};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the timer sleeps at most when nothing is held back.
const IDLE: Duration = Duration::from_secs(1);
/// No read was asked for yet; no time to wake up at.
const NEVER: u64 = u64::MAX;

/// A drive that meets faults, and what came of each rule.
#[derive(Debug)]
pub struct FaultyDrive {
    key: u64,
    rules: Vec<FaultRule>,
    reads: AtomicU64,
    first_ns: AtomicU64,
    /// When a slowed drive is free again.
    free_ns: Mutex<u64>,
    injected: Vec<AtomicU64>,
    missed: Vec<AtomicU64>,
}

/// What was done to one drive's reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultSnapshot {
    /// Reads that were numbered.
    pub reads: u64,
    /// By rule: reads that it was carried out on.
    pub injected: Vec<(FaultRule, u64)>,
    /// By rule: reads that it fell on and that were taken back or given up first.
    pub missed: Vec<u64>,
}

/// What is to happen to one read; numbers are those of rules.
#[derive(Clone, Copy, Debug, Default)]
struct Fate {
    fails: Option<(usize, i32)>,
    /// Held back until a time that is known at once.
    until: Option<(usize, u64)>,
    /// It keeps its slot until then, given up or not.
    stalled: bool,
    slower: Option<(usize, u32)>,
    short: Option<usize>,
    flip: Option<(usize, u64)>,
}

impl FaultyDrive {
    /// The drive called `name`, before its first read.
    pub fn new(name: &str, rules: Vec<FaultRule>) -> Arc<Self> {
        let zeros = || rules.iter().map(|_| AtomicU64::new(0)).collect();
        let (injected, missed) = (zeros(), zeros());
        let (reads, first_ns) = (AtomicU64::new(0), AtomicU64::new(NEVER));
        Arc::new(Self { key: drive_key(name), rules, reads, first_ns, free_ns: Mutex::new(0), injected, missed })
    }

    /// What was done until now.
    pub fn snapshot(&self) -> FaultSnapshot {
        let injected = self.rules.iter().copied().zip(self.injected.iter().map(|n| n.load(Ordering::Relaxed)));
        let missed = self.missed.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        FaultSnapshot { reads: self.reads.load(Ordering::Relaxed), injected: injected.collect(), missed }
    }

    fn did(&self, rule: usize) {
        self.injected[rule].fetch_add(1, Ordering::Relaxed);
    }

    /// A read is given up or taken back before what `fate` says could be seen.
    fn missed(&self, fate: &Fate) {
        let Fate { until, slower, short, flip, .. } = fate;
        let due = [until.map(|u| u.0), slower.map(|s| s.0), *short, flip.map(|f| f.0)];
        for rule in due.into_iter().flatten() {
            self.missed[rule].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Numbers a read of `bytes` asked for at `now_ns`, and decides.
    fn admit(&self, bytes: u64, now_ns: u64) -> Fate {
        let ordinal = self.reads.fetch_add(1, Ordering::Relaxed);
        let first = self.first_ns.fetch_min(now_ns, Ordering::Relaxed).min(now_ns);
        let mut fate = Fate::default();
        for (at, rule) in self.rules.iter().enumerate() {
            if !rule.hits(self.key, ordinal, now_ns.saturating_sub(first)) {
                continue;
            }
            let later = |until: Option<(usize, u64)>, ns: u64| until.filter(|u| u.1 >= ns).or(Some((at, ns)));
            match rule.kind {
                FaultKind::Vanish => fate.fails = fate.fails.or(Some((at, libc::ENODEV))),
                FaultKind::Eio => fate.fails = fate.fails.or(Some((at, libc::EIO))),
                FaultKind::Stall { for_ns } => {
                    fate.until = later(fate.until, for_ns.map_or(NEVER, |ns| now_ns.saturating_add(ns)));
                    fate.stalled = true;
                }
                FaultKind::Slow { hundredths } => fate.slower = fate.slower.or(Some((at, hundredths))),
                FaultKind::SlowTo { bytes_per_s } => {
                    let takes = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
                    let mut free = self.free_ns.lock().unwrap_or_else(PoisonError::into_inner);
                    *free = (*free).max(now_ns).saturating_add(u64::try_from(takes).unwrap_or(NEVER));
                    fate.until = later(fate.until, *free);
                }
                FaultKind::Short => fate.short = fate.short.or(Some(at)),
                FaultKind::Flip => fate.flip = fate.flip.or(Some((at, rule.draw(!self.key, ordinal)))),
            }
        }
        fate
    }

    /// Some rule makes reads late by a time that ends.
    fn holds(&self) -> bool {
        let ends = |kind| !matches!(kind, FaultKind::Eio | FaultKind::Vanish | FaultKind::Short | FaultKind::Flip);
        self.rules.iter().any(|r| ends(r.kind))
    }
}

/// An engine whose reads meet the faults of a [`FaultyDrive`]; several may share one.
pub struct FaultyEngine {
    inner: Box<dyn IoEngine>,
    drive: Arc<FaultyDrive>,
    signal: Arc<Signal>,
    clock: Clock,
    flights: Vec<Flight>,
    /// Flights that the engine behind has.
    behind: usize,
    passing: Vec<ReadRequest>,
    arrived: Vec<Completion>,
    /// Reads that fail without having been carried out.
    failed: Vec<Completion>,
    alarm: Option<Alarm>,
}

struct Flight {
    tag: u64,
    need: u32,
    asked_ns: u64,
    fate: Fate,
    cancelled: bool,
    /// What the engine behind gave back, and when it may go on.
    back: Option<(Completion, u64)>,
}

/// The thread that tells the reader when a read held back is due.
struct Alarm {
    shared: Arc<AlarmState>,
    thread: Option<JoinHandle<()>>,
}

struct AlarmState {
    at_ns: AtomicU64,
    stop: AtomicBool,
    kick: Signal,
    signal: Arc<Signal>,
    clock: Clock,
}

impl FaultyEngine {
    /// Wraps `inner`, which raises `signal` too.
    pub fn new(
        drive: Arc<FaultyDrive>,
        signal: Arc<Signal>,
        clock: Clock,
        inner: Box<dyn IoEngine>,
    ) -> Result<Self, IoSetupError> {
        let room = inner.capabilities().max_requests as usize;
        let alarm = if drive.holds() { Some(Alarm::start(Arc::clone(&signal), clock)?) } else { None };
        Ok(Self {
            inner,
            drive,
            signal,
            clock,
            flights: Vec::with_capacity(room),
            behind: 0,
            passing: Vec::with_capacity(room),
            arrived: Vec::with_capacity(room),
            failed: Vec::with_capacity(room),
            alarm,
        })
    }

    /// Moves everything that is over to `out`.
    fn collect(&mut self, out: &mut Vec<Completion>) -> usize {
        let before = out.len();
        out.append(&mut self.failed);
        self.inner.reap(0, Instant::now(), &mut self.arrived);
        while let Some(completion) = self.arrived.pop() {
            let Some(at) = self.flights.iter().position(|f| f.tag == completion.tag && f.back.is_none()) else {
                continue;
            };
            self.behind -= 1;
            let flight = &mut self.flights[at];
            let due = flight.due(&completion);
            flight.back = Some((completion, due));
        }
        let now = self.clock.now_ns();
        let mut at = 0;
        while at < self.flights.len() {
            let flight = &self.flights[at];
            let over =
                flight.back.as_ref().is_some_and(|(_, due)| *due <= now || (flight.cancelled && !flight.fate.stalled));
            if !over {
                at += 1;
                continue;
            }
            let flight = self.flights.swap_remove(at);
            if let Some(completion) = self.finish(flight, now) {
                out.push(completion);
            }
        }
        let next = self.flights.iter().filter_map(|f| f.back.as_ref().map(|b| b.1)).min().unwrap_or(NEVER);
        if let Some(alarm) = &self.alarm {
            alarm.set(next);
        }
        out[before..].sort_unstable_by_key(|c| c.completed_ns);
        out.len() - before
    }

    /// The completion of a read that was carried out, with what is to be wrong about it.
    fn finish(&self, flight: Flight, now: u64) -> Option<Completion> {
        let (mut completion, due) = flight.back?;
        if flight.cancelled {
            completion.completed_ns = completion.completed_ns.max(due.min(now));
            completion.outcome = ReadOutcome::Cancelled;
            return Some(completion);
        }
        if due > completion.completed_ns {
            completion.completed_ns = due;
            let held = flight.fate.until.filter(|u| u.1 >= due).map(|u| u.0).or(flight.fate.slower.map(|s| s.0));
            held.into_iter().for_each(|rule| self.drive.did(rule));
        }
        let ReadOutcome::Done { .. } = completion.outcome else { return Some(completion) };
        if let Some(rule) = flight.fate.short {
            self.drive.did(rule);
            completion.outcome = ReadOutcome::Short { bytes: flight.need / 2 };
        } else if let Some((rule, draw)) = flight.fate.flip.filter(|_| flight.need > 0) {
            self.drive.did(rule);
            let byte = (draw >> 3) % u64::from(flight.need);
            completion.slot.bytes_mut()[byte as usize] ^= 1 << (draw & 7);
        }
        Some(completion)
    }
}

impl Flight {
    /// When a read that the engine behind has given back may go on.
    fn due(&self, completion: &Completion) -> u64 {
        if completion.outcome == ReadOutcome::Cancelled && !self.fate.stalled {
            return completion.completed_ns;
        }
        let took = completion.completed_ns.saturating_sub(completion.submitted_ns);
        let slower = self.fate.slower.map_or(0, |(_, hundredths)| {
            let takes = u128::from(took) * u128::from(hundredths) / 100;
            completion.submitted_ns.saturating_add(u64::try_from(takes).unwrap_or(NEVER))
        });
        completion.completed_ns.max(self.fate.until.map_or(0, |u| u.1)).max(slower).max(self.asked_ns)
    }
}

impl IoEngine for FaultyEngine {
    fn submit(&mut self, batch: &mut Vec<ReadRequest>) -> usize {
        let room = (self.inner.capabilities().max_requests as usize).saturating_sub(self.behind);
        let taken = batch.len().min(room);
        for request in batch.drain(..taken) {
            let now = self.clock.now_ns();
            let fate = self.drive.admit(u64::from(request.len), now);
            if let Some((rule, errno)) = fate.fails {
                self.drive.did(rule);
                let (tag, slot, outcome) = (request.tag, request.slot, ReadOutcome::Failed { errno });
                self.failed.push(Completion { tag, slot, submitted_ns: now, completed_ns: now, outcome });
                continue;
            }
            let (tag, need) = (request.tag, request.need);
            self.flights.push(Flight { tag, need, asked_ns: now, fate, cancelled: false, back: None });
            self.behind += 1;
            if let Some((rule, NEVER)) = fate.until {
                self.drive.did(rule); // nobody will be there when it ends
            }
            self.passing.push(request);
        }
        // The engine behind has room for all of them.
        self.inner.submit(&mut self.passing);
        if !self.failed.is_empty() {
            self.signal.raise();
        }
        taken
    }

    fn reap(&mut self, min: usize, deadline: Instant, out: &mut Vec<Completion>) -> usize {
        let signal = Arc::clone(&self.signal);
        reap_from(&signal, min, deadline, || self.collect(out))
    }

    fn cancel(&mut self, tag: u64) -> bool {
        let Some(flight) = self.flights.iter_mut().find(|f| f.tag == tag) else { return false };
        if !std::mem::replace(&mut flight.cancelled, true) {
            self.drive.missed(&flight.fate);
        }
        if flight.back.is_none() {
            self.inner.cancel(tag);
        } else {
            self.signal.raise();
        }
        true
    }

    fn withdraw(&mut self, tag: u64) -> bool {
        let behind = |f: &&Flight| f.tag == tag && f.back.is_none() && !f.fate.stalled;
        let Some(flight) = self.flights.iter().find(behind) else { return false };
        let withdrawn = self.inner.withdraw(tag);
        if withdrawn && !flight.cancelled {
            self.drive.missed(&flight.fate);
        }
        withdrawn
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn counters(&self) -> Arc<EngineCounters> {
        self.inner.counters()
    }
}

impl Alarm {
    fn start(signal: Arc<Signal>, clock: Clock) -> Result<Self, IoSetupError> {
        let (at_ns, stop) = (AtomicU64::new(NEVER), AtomicBool::new(false));
        let shared = Arc::new(AlarmState { at_ns, stop, kick: Signal::default(), signal, clock });
        let (of_thread, up) = (Arc::clone(&shared), Arc::new(Signal::default()));
        let (started, name) = (Arc::clone(&up), "fault-timer".to_string());
        let thread = std::thread::Builder::new().name(name.clone()).stack_size(64 * 1024).spawn(move || {
            started.raise();
            of_thread.keep_time();
        });
        let thread = Some(thread.map_err(|source| IoSetupError::Thread { name, source })?);
        let alarm = Self { shared, thread };
        wait_for_start(&up, 1, "fault-timer")?;
        Ok(alarm)
    }

    fn set(&self, at_ns: u64) {
        if self.shared.at_ns.swap(at_ns, Ordering::SeqCst) > at_ns {
            self.shared.kick.raise();
        }
    }
}

impl AlarmState {
    fn keep_time(&self) {
        loop {
            let seen = self.kick.epoch();
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let at = self.at_ns.load(Ordering::SeqCst);
            if at == NEVER {
                self.kick.wait(seen, Instant::now() + IDLE);
            } else if at > self.clock.now_ns() {
                self.kick.wait(seen, self.clock.instant_at(at).min(Instant::now() + IDLE));
            } else if self.at_ns.compare_exchange(at, NEVER, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                self.signal.raise();
            }
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.kick.raise();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[path = "faults_tests.rs"]
mod tests;
