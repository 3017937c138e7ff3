//! Reading ahead: guesses become reads, in a pool of their own or in demand's, and give way to demand. The part of [`ExpertReader`] that
//! is never entered while there is no prefetch.
//!
//! **Demand overtakes.** When a barrier opens, prefetch reads that no drive has begun are taken back; while a drive has
//! demand outstanding, or experts of the barrier still wait for slots, none is begun there. What was taken back is handed
//! over again later, if it is still wanted.
//!
//! **Whole reads.** A guess is read in one piece even where demand would be cut: it has until its barrier opens, several
//! guesses spread over the drives anyway, and each cut would cost a drive the fixed part of one more read.
//!
//! **Ends.** A guess that is demanded is useful (there when the barrier opened) or late (on its way: the barrier adopts the
//! read). One whose barrier opens without it, that is taken back or that fails is wasted; demand then reads as if nobody had
//! guessed.

use super::ahead::{Ahead, Landed, Now, State};
use super::counters::PrefetchCounters;
use super::dispatch::{DispatchPolicy, Piece, Shape};
use super::expert_reader::ExpertReader;
use super::faults::Failure;
use super::jobs::{AheadLane, Job, Lane, hand_over};
use super::limit::ReadLimit;
use super::options::PrefetchPolicy;
use super::rates::fill_loads;
use super::tally::Opened;
use crate::ids::{ExpertId, LayerId};
use crate::io::{ReadRequest, Slot};
use crate::knob::{self, Knob};
use crate::source::{Guess, Phase};
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};

/// In flight, as far as prefetch is concerned, on a drive that demand is using: no other home is worse.
const BUSY_BYTES: u64 = 1 << 50;

/// Who made a guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Decoder,
    SameAsLast,
    Markov,
}

impl ExpertReader {
    /// Calls `act` with the guesses, if there is prefetch.
    pub(super) fn with_ahead<R>(&mut self, act: impl FnOnce(&mut Self, &mut Ahead) -> R) -> Option<R> {
        let mut ahead = self.ahead.take()?;
        let result = act(self, &mut ahead);
        self.ahead = Some(ahead);
        Some(result)
    }

    pub(super) fn seen(&self, count: impl FnOnce(&mut PrefetchCounters)) {
        count(&mut self.handle.lock().counters.prefetch);
    }

    /// Layers that guesses may look ahead.
    fn reach(&self) -> u32 {
        self.options.prefetch_depth + u32::from(knob::skipped(Knob::PrefetchDepth))
    }

    /// Takes in a list of guesses for `layer` of pass `step`, in place of the last one.
    pub(super) fn take_in(&mut self, ahead: &mut Ahead, by: By, step: u64, layer: LayerId, guesses: &[Guess]) {
        if knob::skipped(Knob::Prefetch) {
            return;
        }
        let count = guesses.len() as u32;
        let Some(distance) = ahead.distance(step, layer).filter(|&d| d <= self.reach()) else {
            return self.seen(|c| c.out_of_reach += u64::from(count));
        };
        let most = match self.options.prefetch_experts {
            0 if knob::forced(Knob::PrefetchExperts) => 1,
            0 => u32::MAX,
            _ if knob::skipped(Knob::PrefetchExperts) => u32::MAX,
            most => most,
        };
        let within = count.min(most);
        let through = self.governor.let_through(within);
        let (mut taken, mut known, mut no_room) = (0u32, 0, 0);
        for (rank, guess) in guesses.iter().take(through as usize).enumerate() {
            if !ahead.knows(layer, guess.expert) {
                continue;
            }
            taken += 1;
            if self.resident.as_ref().is_some_and(|r| r.holds(layer, guess.expert)) {
                known += 1;
                continue;
            }
            match ahead.name(step, layer, guess.expert, rank as u32) {
                Some(true) => {}
                Some(false) => known += 1,
                None => no_room += 1,
            }
        }
        ahead.named(step, layer);
        let retracted = self.end_batch(ahead);
        self.seen(|c| {
            match by {
                By::Decoder => c.told += u64::from(taken),
                By::SameAsLast => c.same_as_last += u64::from(taken),
                By::Markov => c.markov += u64::from(taken),
            }
            c.known += known;
            c.no_room += no_room;
            c.retracted += retracted;
            c.over_experts += u64::from(count - within);
            c.guesses_dropped += u64::from(within - through);
            c.most_experts = c.most_experts.max(taken);
            if taken > 0 {
                c.deepest = c.deepest.max(distance);
            }
        });
    }

    /// Takes back what was guessed for `layer` of pass `step`.
    pub(super) fn take_back(&mut self, ahead: &mut Ahead, step: u64, layer: LayerId) {
        ahead.named(step, layer); // an empty list
        let retracted = self.end_batch(ahead);
        self.seen(|c| c.retracted += retracted);
    }

    /// Ends the guesses in `ahead.batch`; returns how many there were.
    pub(super) fn end_batch(&mut self, ahead: &mut Ahead) -> u64 {
        let mut ended = 0;
        while let Some(id) = ahead.batch.pop() {
            ended += 1;
            let Some(forecast) = ahead.remove(id) else { continue };
            match forecast.state {
                State::Waiting => {}
                State::Reading { tag } => self.give_up_ahead(tag),
                State::Landed(Landed { mut event, .. }) => {
                    ahead.held_slots -= 1; // its slot goes back now
                    event.outcome = Outcome::Wasted;
                    self.count(&mut event, self.whole(), None);
                }
            }
        }
        ended
    }

    /// Gives up the read of a guess; it keeps its slot until the engine returns it.
    fn give_up_ahead(&mut self, tag: u32) {
        if self.withdraw(tag) {
            return;
        }
        if let Some(job) = self.jobs[tag as usize].as_mut().filter(|j| j.gave_up.is_none()) {
            job.gave_up = Some(ReadResult::Cancelled);
            self.lanes[job.event.drive.index()].cancel(Purpose::Prefetch, u64::from(tag));
        }
    }

    /// Takes a prefetch read back from its engine, if no drive has begun it.
    fn withdraw(&mut self, tag: u32) -> bool {
        let Some(job) = self.jobs[tag as usize].as_mut().filter(|j| !j.withdrawn) else { return false };
        let drive = job.event.drive.index();
        let lane = &mut self.lanes[drive];
        if lane.ahead.is_none() || !lane.ahead_engine().withdraw(u64::from(tag)) {
            return false;
        }
        lane.ahead.iter_mut().for_each(|a| a.out -= 1);
        job.withdrawn = true;
        self.in_flight.sub(drive, job.event.bytes);
        self.rates[drive].taken_back();
        true
    }

    /// Takes back what has not been begun, on one drive or on all.
    pub(super) fn withdraw_queued(&mut self, drive: Option<usize>) {
        self.with_ahead(|reader, ahead| {
            for &id in ahead.live() {
                let Some(State::Reading { tag }) = ahead.get(id).map(|f| &f.state) else { continue };
                let of = reader.jobs[*tag as usize].as_ref().map(|j| j.event.drive.index());
                if drive.is_none() || drive == of {
                    reader.withdraw(*tag);
                }
            }
        });
    }

    /// A read that was withdrawn has come back.
    pub(super) fn withdrawn(&mut self, job: &Job, slot: Slot) {
        drop(slot);
        let (drive, bytes) = (job.event.drive.index(), job.event.bytes);
        self.handle.lock().counters.drives[drive].prefetch.withdrawn.add(bytes);
        self.with_ahead(|_, ahead| {
            ahead.held_slots -= 1;
            let reading = |s: &State<Landed>| matches!(s, State::Reading { tag } if *tag == job.tag);
            if let Some(forecast) = job.ahead.and_then(|id| ahead.get_mut(id)).filter(|f| reading(&f.state)) {
                (forecast.state, forecast.waiting) = (State::Waiting, job.waiting);
            }
        });
    }

    /// The read of a guess has ended by itself.
    pub(super) fn landed(&mut self, mut job: Job, slot: Slot, failure: Option<Failure>) {
        self.with_ahead(|reader, ahead| {
            let Some(id) = job.ahead else { return };
            let Some(failure) = failure else {
                reader.health[job.event.drive.index()].good();
                if let Some(forecast) = ahead.get_mut(id) {
                    forecast.state = State::Landed(Landed { slot, event: job.event, digest: job.digest });
                }
                return;
            };
            ahead.held_slots -= 1;
            drop(slot);
            ahead.remove(id);
            job.event.result = failure.result();
            reader.blame(&job.event, failure);
            reader.count(&mut job.event, job.part, Some(failure));
        });
    }

    /// Guesses by what the reader itself has seen, and reads ahead.
    pub(super) fn guess(&mut self, opened: &Opened, experts: &[ExpertId]) {
        self.with_ahead(|reader, ahead| {
            // The rows of a prompt ask for nearly everything, which says nothing about the next token.
            if opened.step.phase == Phase::Prefill {
                return;
            }
            let Some(mut own) = ahead.own.take() else { return };
            let by = if reader.options.prefetch == PrefetchPolicy::Markov { By::Markov } else { By::SameAsLast };
            own.observe(&opened.step, opened.layer, experts);
            // The nearer layers were guessed when they were as far away. Another layer asks for about as many.
            let most = experts.len().max(reader.options.prefetch_experts as usize);
            if let Some(p) = own.guess(reader.reach(), most) {
                reader.take_in(ahead, by, p.step, p.layer, p.guesses);
            }
            reader.seen(|c| c.own_by_depth = *own.counts());
            ahead.own = Some(own);
        });
    }

    /// Hands reads of guesses to the drives that demand leaves alone.
    pub(super) fn issue_ahead(&mut self) {
        let Some(()) = self.with_ahead(Self::issue_guesses) else { return };
        for drive in 0..self.lanes.len() {
            let Lane { ahead, engine, limit, passing, .. } = &mut self.lanes[drive];
            let Some(AheadLane { engine: own, batch, .. }) = ahead.as_mut().filter(|a| !a.batch.is_empty()) else {
                continue;
            };
            let has_own = own.is_some();
            let engine = own.as_mut().unwrap_or(engine).as_mut();
            let went = match limit {
                None => engine.submit(batch),
                Some(limit) => hand_over(limit, batch, passing, engine, &mut self.jobs, &self.clock).0,
            };
            let (own, shared) = if has_own { (went, 0) } else { (0, went) };
            self.seen(|c| {
                c.in_own_pool += own as u64;
                c.in_demands_pool += shared as u64;
            });
            // An engine that could take no more: as if it had not been asked.
            while let Some(request) = self.lanes[drive].ahead.as_mut().and_then(|l| l.batch.pop()) {
                let Some(job) = self.jobs[request.tag as usize].take() else { continue };
                self.free_jobs.push(request.tag as u32);
                self.lanes[drive].ahead.iter_mut().for_each(|l| l.out -= 1);
                self.in_flight.sub(drive, job.event.bytes);
                self.rates[drive].taken_back();
                self.withdrawn(&job, request.slot);
            }
        }
    }

    fn issue_guesses(&mut self, ahead: &mut Ahead) {
        // Slots and drives are demand's until all of the barrier is on its way.
        let stopped = self.open.is_some() && (self.fresh < self.wants.len() || !self.retry.is_empty());
        let room = (ahead.quota - ahead.held_slots.min(ahead.quota)).min(self.slab.free_slots());
        let room = (room as usize).min(self.free_jobs.len()).min(self.widest);
        let now = self.clock.now_ns();
        let limited = |limit: &Option<ReadLimit>| limit.as_ref().is_some_and(|l| l.wait(now).is_some());
        let (mut chosen, mut held) = (std::mem::take(&mut ahead.batch), 0);
        chosen.clear();
        for at in 0..ahead.live().len() {
            let id = ahead.live()[at];
            let Some(forecast) = ahead.get_mut(id).filter(|f| matches!(f.state, State::Waiting)) else { continue };
            let homes = self.plan.homes(forecast.layer, forecast.expert).unwrap_or(&[]);
            if stopped || homes.iter().all(|d| self.lanes[d.index()].demand_out > 0) {
                held += u64::from(!std::mem::replace(&mut forecast.held, true));
            } else if homes
                .iter()
                .all(|d| self.lanes[d.index()].demand_out > 0 || limited(&self.lanes[d.index()].limit))
            {
                // Its time comes, and until then it would only go to and fro.
            } else if chosen.len() < room {
                chosen.push(id);
            }
        }
        if !chosen.is_empty() {
            fill_loads(&self.rates, &self.in_flight, &mut self.loads);
            for (load, lane) in self.loads.iter_mut().zip(&self.lanes) {
                let closed = lane.demand_out > 0 || limited(&lane.limit);
                load.in_flight_bytes += if closed { BUSY_BYTES } else { 0 };
            }
            let shape = Shape { bytes: self.plan.expert_bytes as u32, block_bytes: self.block_bytes };
            // The decision borrows the dispatcher while requests are made, so the dispatcher steps aside.
            let mut dispatcher = std::mem::take(&mut self.dispatcher);
            dispatcher.avoid(self.left_alone());
            let plan = &self.plan;
            let homes = |ask: usize| ahead.get(chosen[ask]).and_then(|f| plan.homes(f.layer, f.expert)).unwrap_or(&[]);
            let policy = self.prefetch_policy();
            let pieces = dispatcher.decide(policy, false, chosen.len(), homes, shape, &self.loads);
            for piece in pieces {
                let id = chosen[piece.ask as usize];
                if self.lanes[piece.drive.index()].demand_out > 0 {
                    // The policy insists on a drive that demand is using.
                    held += ahead.get_mut(id).map_or(0, |f| u64::from(!std::mem::replace(&mut f.held, true)));
                    continue;
                }
                if limited(&self.lanes[piece.drive.index()].limit) {
                    continue;
                }
                let Some(slot) = self.slab.take() else { break };
                self.place_guess(ahead, id, (piece, policy), slot);
            }
            self.dispatcher = dispatcher;
        }
        ahead.batch = chosen;
        self.seen(|c| {
            c.held_back += held;
            c.most_slots = c.most_slots.max(ahead.held_slots);
        });
    }

    /// The policy by which copies of guessed experts are chosen.
    fn prefetch_policy(&self) -> DispatchPolicy {
        match self.options.prefetch_dispatch {
            None if knob::forced(Knob::PrefetchDispatch) => DispatchPolicy::RoundRobin,
            Some(own) if !knob::skipped(Knob::PrefetchDispatch) => own,
            _ => self.policy(),
        }
    }

    /// Puts the read of a guess, and where `policy` has it read, into the batch of its drive's prefetch.
    fn place_guess(&mut self, ahead: &mut Ahead, id: u32, (piece, policy): (&Piece, DispatchPolicy), slot: Slot) {
        let (home, drive) = (usize::from(piece.home), piece.drive);
        let part = self.whole();
        let Some(forecast) = ahead.get_mut(id) else { return };
        let (step, layer, expert, waiting) = (forecast.step, forecast.layer, forecast.expert, forecast.waiting);
        let homes = self.plan.homes(layer, expert).unwrap_or(&[]);
        // What a degraded drive's copies are passed over for is no choice of the policy.
        let steered = homes.first().is_some_and(|d| self.avoid >> d.0 & 1 == 1);
        let homes = homes.len();
        let lane = &mut self.lanes[drive.index()];
        let (Some(located), Some(pool)) = (lane.opened.locate(layer, expert), &mut lane.ahead) else { return };
        let Some(tag) = self.free_jobs.pop() else { return };
        forecast.state = State::Reading { tag };
        ahead.held_slots += 1;
        let bytes = u64::from(lane.read_bytes);
        self.in_flight.add(drive.index(), bytes);
        let queued_ns = self.clock.now_ns();
        self.rates[drive.index()].queued(queued_ns);
        let event = ReadEvent {
            step,
            layer,
            expert,
            drive,
            replica: home as u8,
            part: 0,
            parts: 1,
            offset: located.offset,
            bytes,
            purpose: Purpose::Prefetch,
            issued_in: self.barriers.saturating_sub(1),
            barrier: None,
            queued_ns,
            submitted_ns: 0,
            completed_ns: 0,
            result: ReadResult::Ok,
            outcome: Outcome::Wasted,
        };
        let request = ReadRequest {
            tag: u64::from(tag),
            file: located.file,
            offset: located.offset,
            len: lane.read_bytes,
            need: part.len,
            slot,
        };
        self.jobs[tag as usize] = Some(Job {
            tag,
            want: u32::MAX,
            ahead: Some(id),
            withdrawn: false,
            part,
            tried: 1 << home,
            event,
            digest: located.digest,
            gave_up: None,
            rival: None,
            hedge: false,
            probe: false,
            waiting,
        });
        pool.batch.push(request);
        pool.out += 1;
        let counters = &mut self.handle.lock().counters;
        counters.drives[drive.index()].prefetch.issued.add(bytes);
        counters.prefetch.decisions_by_policy[policy as usize] += 1;
        counters.prefetch.decisions_with_choice += u64::from(homes > 1);
        counters.prefetch.decisions_not_primary += u64::from(home != 0 && !steered);
    }

    /// The run is over: what nobody has demanded was for nothing.
    pub(super) fn end_ahead(&mut self) {
        if self.ahead.is_none() {
            return;
        }
        self.withdraw_queued(None);
        let _ = self.collect(); // no barrier is open, so that nothing can fail
        self.with_ahead(|reader, ahead| {
            ahead.due(Now { step: u64::MAX, layer: LayerId(u16::MAX) });
            reader.end_batch(ahead);
        });
        let _ = self.collect();
        let now_ns = self.clock.now_ns();
        for tag in 0..self.jobs.len() {
            let of_guess =
                self.jobs[tag].as_ref().is_some_and(|j| j.event.purpose == Purpose::Prefetch && !j.withdrawn);
            if let Some(mut job) = self.jobs[tag].take_if(|_| of_guess) {
                (job.event.submitted_ns, job.event.completed_ns) = (job.event.queued_ns, now_ns);
                job.event.result = ReadResult::Cancelled;
                self.count(&mut job.event, job.part, None);
            }
        }
    }
}
