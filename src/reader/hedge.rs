//! Hedging: when the one read that a barrier still waits for takes longer than its drive's reads usually do, the same
//! bytes are asked of another home; the first to come wins and the other is cancelled.

use super::expert_reader::ExpertReader;
use super::issue::Order;
use super::jobs::Job;
use super::rates::fill_loads;
use super::tally::Opened;
use crate::ids::DriveId;
use crate::io::Slot;
use crate::knob::{self, Knob};

/// Reads of a drive without which its percentiles say nothing.
const LEAST_READS: u64 = 64;
/// Barriers between two looks at the histograms.
const LOOK_EVERY: u64 = 16;

impl ExpertReader {
    /// Refreshes how long reads may take, between barriers.
    pub(super) fn learn_latencies(&mut self) {
        let Some(permille) = self.options.hedge_after_permille else { return };
        if !self.barriers.is_multiple_of(LOOK_EVERY) {
            return;
        }
        let ledger = self.handle.lock();
        for (after, drive) in self.hedge_after_ns.iter_mut().zip(&ledger.counters.drives) {
            let seen = &drive.lat_ns;
            *after = (seen.len() >= LEAST_READS).then(|| seen.value_at_quantile(f64::from(permille) / 1000.0));
        }
        // A drive that has hardly ever answered is given the patience of the slowest that has.
        let slowest = self.hedge_after_ns.iter().flatten().max().copied();
        self.hedge_after_ns.iter_mut().for_each(|after| *after = after.or(slowest));
    }

    /// Issues a hedge if one is due. Returns when one would be, if the barrier waits for a read that can be hedged.
    pub(super) fn hedge(&mut self, opened: &Opened) -> Option<u64> {
        let forced = knob::forced(Knob::Hedge);
        if (self.options.hedge_after_permille.is_none() && !forced) || knob::skipped(Knob::Hedge) {
            return None;
        }
        // Only the last outstanding read of the barrier.
        if self.live_jobs != 1 || self.fresh < self.wants.len() || !self.retry.is_empty() {
            return None;
        }
        let live = |j: &Option<Job>| j.as_ref().is_some_and(Job::is_live);
        let tag = self.jobs.iter().position(live)?;
        let job = self.jobs[tag].as_ref()?;
        let after = if forced { 0 } else { self.hedge_after_ns[job.event.drive.index()]? };
        let due_ns = job.event.queued_ns.saturating_add(after);
        let (want, part, tried, expert) = (job.want, job.part, job.tried, job.event.expert);
        let homes = self.plan.homes(opened.layer, expert).map_or(0, <[DriveId]>::len);
        if self.plan.stripe(homes).is_some() {
            return None;
        }
        if homes <= tried.count_ones() as usize {
            return None;
        }
        if self.clock.now_ns() < due_ns {
            return Some(due_ns);
        }
        fill_loads(&self.rates, &self.in_flight, &mut self.loads);
        self.dispatcher.avoid(self.left_alone());
        let homes = self.plan.homes(opened.layer, expert)?;
        let home = self.dispatcher.again(self.options.dispatch, homes, tried, &self.loads, part.len)?;
        if self.avoid >> homes[home].0 & 1 == 1 {
            return None; // it may never give the slot back
        }
        let slot = view(self.slab.take()?, part.from as usize, part.len as usize, part.part + 1 == part.parts)?;
        let order = Order { want, part, home, tried, rival: Some(tag as u32) };
        if self.place(opened, order, slot).is_ok() {
            self.handle.lock().counters.hedges_issued += 1;
            self.submit();
        }
        None
    }
}

/// The handle of `len` bytes from byte `from` of a fresh slot, or of all from there on; the rest is nobody's.
fn view(mut slot: Slot, from: usize, len: usize, to_end: bool) -> Option<Slot> {
    if from > 0 {
        slot = slot.split_off(from)?;
    }
    if !to_end {
        drop(slot.split_off(len));
    }
    Some(slot)
}
