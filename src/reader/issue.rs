//! Issuing reads: the fresh wants of a barrier are decided on together, repeats one by one. The part of
//! [`ExpertReader`] that turns a decision into requests.

use super::dispatch::{DispatchPolicy, Piece, Shape};
use super::expert_reader::ExpertReader;
use super::jobs::{Job, Lane, Part, Retry, hand_over};
use super::limit::Waiting;
use super::rates::fill_loads;
use super::tally::Opened;
use crate::ids::DriveId;
use crate::io::{ReadRequest, Slot};
use crate::knob::{self, Knob};
use crate::source::{Phase, SourceError};
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};

/// One read about to be issued.
pub(super) struct Order {
    pub want: u32,
    pub part: Part,
    pub home: usize,
    /// Homes tried before.
    pub tried: u64,
    /// The job whose bytes this one reads again.
    pub rival: Option<u32>,
}

impl ExpertReader {
    /// Issues what can be issued: repeats first, then fresh wants in the order asked for.
    pub(super) fn issue(&mut self) -> Result<(), SourceError> {
        let Some(opened) = self.open else { return Ok(()) };
        while let Some(mut retry) = self.retry.pop() {
            match retry.slot.take().or_else(|| self.slab.take()) {
                Some(slot) => self.repeat(&opened, retry, slot)?,
                None => {
                    self.retry.push(retry);
                    break;
                }
            }
        }
        if self.retry.is_empty() {
            while self.taken.len() < self.wants.len() - self.fresh {
                let Some(slot) = self.slab.take() else { break };
                self.taken.push(slot);
            }
            if !self.taken.is_empty() {
                let placed = self.place_fresh(&opened);
                self.taken.clear();
                placed?;
            }
        }
        self.submit();
        Ok(())
    }

    /// Hands what is ready to the engines. A prompt asks for a good part of a layer's file: its reads go out in the order in
    /// which they lie there. Of the few reads of a decoding barrier, dispatch has chosen the order.
    pub(super) fn submit(&mut self) {
        let by_offset = self.open.is_some_and(|o| o.step.phase == Phase::Prefill);
        self.limit_wake_ns = None;
        for lane in &mut self.lanes {
            if lane.batch.is_empty() {
                continue;
            }
            if by_offset {
                lane.batch.sort_unstable_by_key(|r| (r.offset, r.tag));
            }
            let Lane { batch, passing, engine, .. } = lane;
            let Some(limit) = &mut lane.limit else {
                engine.submit(batch);
                continue;
            };
            let (_, next_ns) = hand_over(limit, batch, passing, engine.as_mut(), &mut self.jobs, &self.clock);
            self.limit_wake_ns = [self.limit_wake_ns, next_ns].into_iter().flatten().min();
        }
    }

    /// The policy that this reader carries out.
    pub(super) fn policy(&self) -> DispatchPolicy {
        match self.options.dispatch {
            _ if [Knob::Dispatch, Knob::Layout, Knob::Replicas].into_iter().any(knob::skipped) => {
                DispatchPolicy::FirstHit
            }
            _ if knob::forced(Knob::Dispatch) => DispatchPolicy::RoundRobin,
            asked => asked,
        }
    }

    /// Decides for as many fresh wants as there are slots in `taken`, and issues their reads.
    fn place_fresh(&mut self, opened: &Opened) -> Result<(), SourceError> {
        let count = self.taken.len();
        if self.is_striped() {
            return self.place_striped(opened);
        }
        let policy = self.policy();
        let shape = Shape { bytes: self.plan.expert_bytes as u32, block_bytes: self.block_bytes };
        fill_loads(&self.rates, &self.in_flight, &mut self.loads);
        // The decision borrows the dispatcher while requests are made, so the dispatcher steps aside.
        let mut dispatcher = std::mem::take(&mut self.dispatcher);
        dispatcher.avoid(self.left_alone());
        let steered = self.steered(opened, self.fresh, count);
        let avoid = self.avoid;
        let (plan, wants) = (&self.plan, &self.wants[self.fresh..]);
        let homes = |ask: usize| plan.homes(opened.layer, wants[ask].expert).unwrap_or(&[]);
        let with_choice = (0..count).filter(|&ask| homes(ask).len() > 1).count();
        let by_rate = matches!(policy, DispatchPolicy::ExpectedCompletion | DispatchPolicy::Split);
        let given = |ask: usize| homes(ask).iter().any(|d| self.rates[d.index()].trusts_given());
        let by_given = if by_rate { (0..count).filter(|&ask| homes(ask).len() > 1 && given(ask)).count() } else { 0 };
        let (asked, cut) = match policy {
            _ if knob::forced(Knob::Split) => (DispatchPolicy::Split, true),
            policy => (policy, !knob::skipped(Knob::Split)),
        };
        let pieces = dispatcher.decide(asked, cut, count, homes, shape, &self.loads);
        // What a degraded drive's copies are passed over for is no choice of the policy.
        let open = |p: &&Piece| homes(p.ask as usize).first().is_none_or(|d| avoid >> d.0 & 1 == 0);
        let other = |p: &&Piece| if p.parts == 1 { p.home != 0 } else { p.part == 0 };
        let not_primary = pieces.iter().filter(open).filter(other).count();
        let placed = self.place_pieces(opened, pieces);
        self.dispatcher = dispatcher;
        self.fresh += count;
        let used = self.slab.slots() - self.slab.free_slots();
        let mut ledger = self.handle.lock();
        let counters = &mut ledger.counters;
        counters.decisions += count as u64;
        counters.decisions_by_policy[policy as usize] += count as u64;
        counters.decisions_with_choice += with_choice as u64;
        counters.decisions_not_primary += not_primary as u64;
        counters.decisions_by_given_rate += by_given as u64;
        counters.steered += steered;
        counters.waves += 1;
        counters.max_slots_used = counters.max_slots_used.max(used);
        placed
    }

    fn place_pieces(&mut self, opened: &Opened, pieces: &[Piece]) -> Result<(), SourceError> {
        let mut rest: Option<Slot> = None;
        for piece in pieces {
            let want = self.fresh as u32 + piece.ask;
            let Some(mut slot) = rest.take().or_else(|| self.taken.pop()) else { return Ok(()) };
            if piece.part + 1 < piece.parts {
                rest = slot.split_off(piece.len as usize);
            }
            self.wants[want as usize].parts = piece.parts;
            let part = Part { part: piece.part, parts: piece.parts, from: piece.from, len: piece.len };
            let mut home = usize::from(piece.home);
            if knob::skipped(Knob::Layout) {
                let homes = self.plan.homes(opened.layer, self.wants[want as usize].expert).unwrap_or(&[]);
                home = homes.iter().position(|d| d.0 == 0).unwrap_or(home);
            }
            let order = Order { want, part, home, tried: 0, rival: None };
            self.place(opened, order, slot)?;
        }
        Ok(())
    }

    /// Issues a read again, on a home that has not been tried.
    fn repeat(&mut self, opened: &Opened, retry: Retry, slot: Slot) -> Result<(), SourceError> {
        let Retry { want, part, tried, from, .. } = retry;
        fill_loads(&self.rates, &self.in_flight, &mut self.loads);
        let policy = self.policy();
        self.dispatcher.avoid(self.left_alone());
        let expert = self.wants[want as usize].expert;
        let homes = self.plan.homes(opened.layer, expert).unwrap_or(&[]);
        let Some(home) = self.dispatcher.again(policy, homes, tried, &self.loads, part.len) else {
            return Err(SourceError::Read(format!("{}-{expert}: no copy is left to read", opened.layer)));
        };
        {
            let counters = &mut self.handle.lock().counters;
            counters.failovers += 1;
            counters.drives[from.index()].moved += 1;
        }
        self.place(opened, Order { want, part, home, tried, rival: None }, slot)
    }

    /// Demand comes to a drive that had none: prefetch that the drive has not begun gives way.
    fn overtake(&mut self, drive: usize) {
        if self.lanes[drive].ahead.as_ref().is_some_and(|a| a.out > 0) {
            self.withdraw_queued(Some(drive));
        }
    }

    /// Puts one read into its drive's batch.
    pub(super) fn place(&mut self, opened: &Opened, order: Order, slot: Slot) -> Result<(), SourceError> {
        let Order { want, part, home, tried, rival } = order;
        let expert = self.wants[want as usize].expert;
        let drive = self.plan.homes(opened.layer, expert).and_then(|h| h.get(home)).copied().unwrap_or(DriveId(0));
        if self.lanes[drive.index()].demand_out == 0 {
            self.overtake(drive.index());
        }
        let lane = &mut self.lanes[drive.index()];
        let Some(located) = lane.opened.locate(opened.layer, expert) else {
            return Err(SourceError::Unknown(format!(
                "{}-{expert} is not on drive `{}`",
                opened.layer, lane.opened.name
            )));
        };
        let Some(tag) = self.free_jobs.pop() else {
            return Err(SourceError::Unknown(format!("{}-{expert}: more reads than slots allow", opened.layer)));
        };
        // The last part asks for the padding too, which ends a whole read on the drive's alignment.
        let ends = part.part + 1 == part.parts;
        let bytes = if ends { lane.read_bytes - part.from } else { part.len };
        let stripe = self.plan.homes(opened.layer, expert).and_then(|h| self.plan.stripe(h.len()));
        let within = stripe.map_or(u64::from(part.from), |s| s.unit(u64::from(part.part)).at);
        let offset = located.offset + within;
        self.in_flight.add(drive.index(), u64::from(bytes));
        let queued_ns = self.clock.now_ns();
        self.rates[drive.index()].queued(queued_ns);
        self.live_jobs += 1;
        self.moves += 1;
        lane.demand_out += 1;
        if lane.ahead.as_ref().is_some_and(|a| a.out > 0) {
            self.governor.behind();
            self.handle.lock().counters.prefetch.demand_behind += 1;
        }
        let event = ReadEvent {
            step: opened.step.step,
            layer: opened.layer,
            expert,
            drive,
            replica: if stripe.is_some() { 0 } else { home as u8 }, // a striped expert is there once
            part: part.part,
            parts: part.parts,
            offset,
            bytes: u64::from(bytes),
            purpose: Purpose::Demand,
            issued_in: opened.barrier,
            barrier: Some(opened.barrier),
            queued_ns,
            submitted_ns: 0,
            completed_ns: 0,
            result: ReadResult::Ok,
            outcome: Outcome::Demand,
        };
        if let Some(first) = rival.and_then(|r| self.jobs[r as usize].as_mut()) {
            first.rival = Some(tag);
        }
        let (digest, tried) = (located.digest, tried | 1 << home);
        let hedge = rival.is_some();
        let (ahead, withdrawn, gave_up, probe, waiting) = (None, false, None, false, Waiting::default());
        self.jobs[tag as usize] = Some(Job {
            tag,
            want,
            ahead,
            withdrawn,
            part,
            tried,
            event,
            digest,
            gave_up,
            rival,
            hedge,
            probe,
            waiting,
        });
        let request = ReadRequest { tag: u64::from(tag), file: located.file, offset, len: bytes, need: part.len, slot };
        debug_assert!(request.slot.bytes().len() >= bytes as usize);
        lane.batch.push(request);
        Ok(())
    }
}
