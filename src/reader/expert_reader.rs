//! The reader itself: one barrier at a time, reads issued as far as slots allow, experts handed over in the order in
//! which they arrived.
//!
//! Everything is allocated when the reader is built; between opening and closing a barrier nothing allocates, logs or
//! formats unless a read failed. Every read in flight owns a slot or a part of one, and a job, whose number is its tag. A
//! read given up keeps both until the engine returns it.

use super::ahead::Ahead;
use super::counters::{Ledger, ReaderHandle};
use super::dispatch::{Dispatcher, DriveLoad};
use super::governor::Governor;
use super::health::Health;
use super::jobs::{Job, Lane, Ready, Retry, Supply, Want};
use super::limit::ReadLimit;
use super::options::ReaderOptions;
use super::pace_watch::PaceWatch;
use super::prefetch::By;
use super::rates::{InFlight, RateEstimator};
use super::resident::Resident;
use super::tally::{Opened, Tally};
use crate::clock::Clock;
use crate::ids::{ExpertId, LayerId};
use crate::io::{Completion, Signal, Slab, Slot};
use crate::knob::{self, Knob};
use crate::layout::plan::Plan;
use crate::source::{ExpertSource, Guess, Lease, SourceError, StepInfo};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads experts from the drives of a plan.
pub struct ExpertReader {
    pub(super) lanes: Vec<Lane>,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) rates: Vec<RateEstimator>,
    /// Parts of experts begin on multiples of this.
    pub(super) block_bytes: u32,
    pub(super) plan: Plan,
    pub(super) slab: Slab,
    pub(super) signal: Arc<Signal>,
    pub(super) clock: Clock,
    pub(super) options: ReaderOptions,
    pub(super) dispatcher: Dispatcher,
    pub(super) loads: Vec<DriveLoad>,
    pub(super) handle: ReaderHandle,
    /// Reads in flight, by tag.
    pub(super) jobs: Vec<Option<Job>>,
    pub(super) free_jobs: Vec<u32>,
    /// Jobs that have not been given up.
    pub(super) live_jobs: usize,
    /// Reads of open barriers that were placed or ended: while it moves, nobody is silent.
    pub(super) moves: u64,
    /// Parts that wait for the rest of their expert: `places` for each want.
    pub(super) parked: Vec<Option<Slot>>,
    /// Most parts that an expert is read in.
    pub(super) places: usize,
    /// Slots of the reads that are about to be issued.
    pub(super) taken: Vec<Slot>,
    pub(super) wants: Vec<Want>,
    /// The first want that has never been issued.
    pub(super) fresh: usize,
    /// Reads to be repeated on another home.
    pub(super) retry: Vec<Retry>,
    pub(super) ready: VecDeque<Ready>,
    /// Wants handed over.
    pub(super) delivered: usize,
    pub(super) finished: Vec<Completion>,
    pub(super) tally: Tally,
    pub(super) open: Option<Opened>,
    pub(super) barriers: u64,
    /// The open barrier has had an expert from two drives.
    pub(super) split_seen: bool,
    /// By drive: how long its reads may take before one is hedged; `None` = too few to tell.
    pub(super) hedge_after_ns: Vec<Option<u64>>,
    /// By drive: whether demand can rely on it, whether it does what it did, and whether a probe is out.
    pub(super) health: Vec<Health>,
    pub(super) pace: Vec<PaceWatch>,
    pub(super) probing: Vec<bool>,
    /// By drive: there has been reason to shed it since it was last well.
    pub(super) shed_asked: Vec<bool>,
    /// By drive: some expert on it is elsewhere too, so that leaving it alone changes something.
    pub(super) can_shed: Vec<bool>,
    /// Bit d: demand leaves drive d alone where another holds the bytes.
    pub(super) avoid: u64,
    /// Those of them that do not deliver, and those of these that are not there at all.
    pub(super) worse: [u64; 2],
    /// Longest time that a read of the open barrier took to fail.
    pub(super) failing_ns: u64,
    /// When the next read that waits for the limit of its drive may go.
    pub(super) limit_wake_ns: Option<u64>,
    /// Pass of the last barrier.
    pub(super) last_step: u64,
    /// By expert: the last of `asks` that named it.
    pub(super) asked_in: Vec<u64>,
    pub(super) asks: u64,
    /// By layer, then expert: delivered from a copy that is not the primary.
    pub(super) seen_non_primary: Vec<Vec<bool>>,
    /// Guesses, where there is prefetch; how many are let through.
    pub(super) ahead: Option<Box<Ahead>>,
    pub(super) governor: Governor,
    /// Experts that stay, where there is a cache.
    pub(super) resident: Option<Resident>,
    /// Experts of the widest layer.
    pub(super) widest: usize,
    /// Experts of the barrier that is being opened that must be read.
    pub(super) missing: Vec<ExpertId>,
}

impl ExpertReader {
    /// Counters and trace, for whoever needs them while the reader is in use.
    pub fn handle(&self) -> ReaderHandle {
        self.handle.clone()
    }
}

impl ExpertSource for ExpertReader {
    fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        if self.open.is_some() {
            return Err(SourceError::Unknown(format!("{layer}: the barrier before it is still open")));
        }
        self.check_asked(layer, experts)?;
        let (barrier, width) = (self.barriers, experts.len() as u32);
        self.barriers += 1;
        self.open = Some(Opened { barrier, step: *step, layer, width, open_ns: self.clock.now_ns() });
        let extra = self.ahead.is_some() || self.resident.is_some();
        if self.ahead.is_some() {
            self.withdraw_queued(None);
        }
        let collected = self.collect();
        if let (Some(opened), true) = (self.open, extra) {
            self.supply(&opened, experts);
            self.wants.extend(self.missing.iter().map(|&expert| Want::new(expert)));
        } else {
            self.wants.extend(experts.iter().map(|&expert| Want::new(expert)));
        }
        let issued = collected.and_then(|()| self.issue());
        self.handle.lock().counters.slot_waits += (self.wants.len() - self.fresh) as u64;
        if issued.is_err() {
            self.close_barrier();
        } else if let Some(opened) = self.open {
            self.probe(&opened);
            if self.ahead.is_some() {
                self.guess(&opened, experts);
                self.issue_ahead();
            }
        }
        issued
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        let Some(opened) = self.open else {
            return Err(SourceError::Unknown("no barrier is open".into()));
        };
        if self.delivered == self.wants.len() {
            return Ok(None);
        }
        let mut blocked_since = None;
        let arrival = self.wait_for_arrival(&opened, &mut blocked_since);
        if let Some(since) = blocked_since {
            let blocked_ns = self.clock.now_ns().saturating_sub(since);
            self.tally.stall_ns += blocked_ns;
            self.handle.lock().counters.stall_ns += blocked_ns;
        }
        let Ready { want, bytes, .. } = arrival?;
        self.delivered += 1;
        let expert = self.wants[want as usize].expert;
        let (owner, index) = match (bytes, &mut self.resident) {
            (Supply::Resident(lease), _) => return Ok(Some(lease)),
            (Supply::Read(slot), None) => slot.lend(),
            (Supply::Read(slot), Some(resident)) => {
                resident.admit(opened.layer, expert, slot, &mut self.handle.lock().counters.cache)
            }
        };
        Ok(Some(Lease::new(expert, owner, index, 0, self.plan.expert_bytes as u32)))
    }

    fn at_hand(&self) -> usize {
        // While reads wait for slots, every lease that is held keeps one of them waiting.
        let waiting = self.fresh < self.wants.len() || !self.retry.is_empty();
        if waiting { 0 } else { self.ready.len() }
    }

    fn close_barrier(&mut self) {
        let Some(opened) = self.open.take() else { return };
        self.abandon();
        // Everything in flight was given up above, so nothing that comes back now can fail.
        let _ = self.collect();
        let close_ns = self.clock.now_ns();
        let record = self.tally.record(&opened, close_ns);
        self.governor.barrier_closed();
        self.last_step = opened.step.step;
        {
            let mut ledger = self.handle.lock();
            let Ledger { counters, trace } = &mut *ledger;
            counters.barriers += 1;
            counters.failing_wait_ns += std::mem::take(&mut self.failing_ns);
            counters.barriers_degraded += u64::from(self.avoid != 0);
            counters.barriers_split += u64::from(self.split_seen);
            counters.prefetch.governor_cuts = self.governor.cuts();
            counters.prefetch.governor_probes = self.governor.probes();
            for (drive, lane) in counters.drives.iter_mut().zip(&self.lanes) {
                drive.limit = lane.limit.as_ref().map(ReadLimit::counters).unwrap_or_default();
            }
            for (drive, rate) in counters.drives.iter_mut().zip(&mut self.rates) {
                rate.barrier_closed();
                drive.rate = rate.seen();
            }
            if let Some(drive) = record.straggler {
                counters.drives[drive.index()].landed_last += 1;
            }
            if let Some(trace) = trace {
                trace.push_barrier(record);
            }
        }
        self.learn_latencies();
        self.watch_pace();
        self.ready.clear();
        self.parked.iter_mut().take(self.wants.len() * self.places).for_each(|p| *p = None);
        self.wants.clear();
        self.retry.clear();
        self.tally.reset();
        (self.fresh, self.delivered, self.split_seen) = (0, 0, false);
        self.issue_ahead();
    }

    fn lookahead(&self) -> u32 {
        if self.options.prefetch.is_told() { self.options.prefetch_depth } else { 0 }
    }

    fn hint(&mut self, step: &StepInfo, layer: LayerId, guesses: &[Guess]) {
        self.with_ahead(|reader, ahead| reader.take_in(ahead, By::Decoder, step.step, layer, guesses));
        self.issue_ahead();
    }

    fn retract(&mut self, step: &StepInfo, layer: LayerId) {
        self.with_ahead(|reader, ahead| reader.take_back(ahead, step.step, layer));
        self.issue_ahead();
    }
}

impl Drop for ExpertReader {
    fn drop(&mut self) {
        self.close_barrier();
        self.end_ahead();
    }
}

impl ExpertReader {
    /// Every expert is in the plan, and asked for once.
    fn check_asked(&mut self, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        self.asks += 1;
        for &expert in experts {
            if self.plan.homes(layer, expert).is_none() {
                return Err(SourceError::Unknown(format!("{layer}-{expert} is not in the plan")));
            }
            if self.asked_in[expert.index()] == self.asks {
                return Err(SourceError::Unknown(format!("{layer}-{expert} is asked for twice in one barrier")));
            }
            self.asked_in[expert.index()] = self.asks;
        }
        Ok(())
    }

    /// Waits for the next arrival; notes in `blocked_since` when it first had to.
    fn wait_for_arrival(&mut self, opened: &Opened, blocked_since: &mut Option<u64>) -> Result<Ready, SourceError> {
        let timeout = match knob::skipped(Knob::ReadTimeout) {
            true => Duration::from_secs(3600),
            false => self.options.read_timeout(),
        };
        let mut deadline = None;
        loop {
            let (seen, moves) = (self.signal.epoch(), self.moves);
            self.collect()?;
            self.issue()?;
            // a barrier in waves has all its demand on its way only now
            self.probe(opened);
            self.issue_ahead();
            if let Some(ready) = self.ready.pop_front() {
                return Ok(ready);
            }
            blocked_since.get_or_insert_with(|| self.clock.now_ns());
            let hedge_at = self.hedge(opened);
            if self.limit_wake_ns.is_some() || self.moves != moves {
                deadline = None; // neither what may not go yet nor what has just been asked elsewhere is silent
            }
            let until = *deadline.get_or_insert_with(|| Instant::now() + timeout);
            let earlier = [hedge_at, self.limit_wake_ns].into_iter().flatten().map(|ns| self.clock.instant_at(ns));
            let wake = earlier.fold(until, Instant::min);
            if !self.signal.wait(seen, wake) && Instant::now() >= until {
                self.time_out(opened)?;
                deadline = None;
            }
        }
    }
}
