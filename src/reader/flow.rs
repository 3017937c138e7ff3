//! Reads that come back: settling each, joining the parts of an expert, and counting. The part of [`ExpertReader`] that
//! runs inside a barrier once reads are on their way.

use super::counters::Ledger;
use super::expert_reader::ExpertReader;
use super::faults::Failure;
use super::jobs::{Job, Part, Ready, Retry, Supply};
use super::tally::Arrived;
use crate::ids::DriveId;
use crate::io::{Completion, ReadOutcome, Slot};
use crate::knob::{self, Knob};
use crate::source::SourceError;
use crate::store::manifest::Digest;
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};
use std::time::Instant;

impl ExpertReader {
    /// Takes what the engines have finished.
    pub(super) fn collect(&mut self) -> Result<(), SourceError> {
        let mut finished = std::mem::take(&mut self.finished);
        let now = Instant::now();
        let mut result = Ok(());
        for drive in 0..self.lanes.len() {
            let lane = &mut self.lanes[drive];
            lane.engine.reap(0, now, &mut finished);
            if let Some(own) = lane.ahead.as_mut().and_then(|a| a.engine.as_mut()) {
                own.reap(0, now, &mut finished);
            }
            for completion in finished.drain(..) {
                let settled = self.settle(drive, completion);
                result = result.and(settled);
            }
        }
        self.finished = finished;
        self.ready.make_contiguous().sort_unstable_by_key(|r| r.completed_ns);
        result
    }

    /// One finished read: an arrival, a repeat on another home, or the end.
    fn settle(&mut self, drive: usize, completion: Completion) -> Result<(), SourceError> {
        let Completion { tag, slot, submitted_ns, completed_ns, outcome } = completion;
        let Some(mut job) = self.jobs.get_mut(tag as usize).and_then(Option::take) else { return Ok(()) };
        self.free_jobs.push(tag as u32);
        if job.withdrawn {
            self.withdrawn(&job, slot);
            return Ok(());
        }
        if job.probe {
            (job.event.submitted_ns, job.event.completed_ns) = (submitted_ns, completed_ns);
            self.probed(&job, &slot, outcome);
            return Ok(()); // its slot goes back now
        }
        match (&mut self.lanes[drive], job.ahead) {
            (lane, None) => lane.demand_out -= 1,
            (lane, Some(_)) => lane.ahead.iter_mut().for_each(|a| a.out -= 1),
        }
        (job.event.submitted_ns, job.event.completed_ns) = (submitted_ns, completed_ns);
        let failure = match outcome {
            ReadOutcome::Done { .. } => None,
            ReadOutcome::Short { bytes } => Some(Failure::Short { bytes }),
            ReadOutcome::Failed { errno } => Some(Failure::Os { errno }),
            ReadOutcome::Cancelled => Some(Failure::Os { errno: libc::ECANCELED }),
        };
        let good = failure.is_none() && job.gave_up.is_none();
        if job.gave_up != Some(ReadResult::Timeout) {
            self.in_flight.sub(drive, job.event.bytes);
            self.rates[drive].ended(completed_ns, job.event.bytes, good);
        }
        if let Some(why) = job.gave_up {
            job.event.result = why;
            self.count(&mut job.event, job.part, None);
            if let (Some(ahead), Some(_)) = (&mut self.ahead, job.ahead) {
                ahead.held_slots -= 1;
            }
            return Ok(()); // its slot goes back now
        }
        if job.ahead.is_some() {
            self.landed(job, slot, failure);
            return Ok(());
        }
        self.live_jobs -= 1;
        self.moves += 1;
        match failure {
            None => self.arrive(job, slot),
            Some(failure) => {
                job.event.result = failure.result();
                self.blame(&job.event, failure);
                self.count(&mut job.event, job.part, Some(failure));
                let rival = job.rival.and_then(|r| self.jobs[r as usize].as_mut());
                if let Some(rival) = rival.filter(|r| r.gave_up.is_none()) {
                    // The other of the two goes on alone, and fails over from both homes if it must.
                    rival.rival = None;
                    rival.tried |= job.tried;
                    return Ok(());
                }
                self.fail(job, slot, failure)
            }
        }
    }

    /// Lines a failed read up for another home, if there is one.
    fn fail(&mut self, job: Job, slot: Slot, failure: Failure) -> Result<(), SourceError> {
        if failure.is_our_bug() || self.homes_left(&job.event, job.tried) == 0 {
            return Err(SourceError::Read(self.describe(&job.event, &self.reason(failure, job.part.len, &job.event))));
        }
        let from = job.event.drive;
        self.retry.push(Retry { want: job.want, part: job.part, tried: job.tried, from, slot: Some(slot) });
        Ok(())
    }

    /// The bytes of a read are there. With the last part the expert is ready.
    fn arrive(&mut self, mut job: Job, slot: Slot) -> Result<(), SourceError> {
        if let Some(other) = job.rival {
            self.give_up(other as usize, ReadResult::Cancelled);
            let mut ledger = self.handle.lock();
            if job.hedge {
                ledger.counters.hedges_won += 1;
            } else {
                ledger.counters.hedges_cancelled += 1;
            }
        }
        let at = job.want as usize;
        let places = self.places;
        let mut want = self.wants[at];
        want.arrived += 1;
        want.bytes += u64::from(job.part.len);
        want.drives |= 1 << job.event.drive.0;
        want.completed_ns = want.completed_ns.max(job.event.completed_ns);
        self.wants[at] = want;
        if want.arrived < want.parts {
            self.parked[at * places + usize::from(job.part.part)] = Some(slot);
            self.health[job.event.drive.index()].good();
            self.count(&mut job.event, job.part, None);
            self.note(&job);
            return Ok(());
        }
        let slot = self.join(&job, slot)?;
        if self.digest_is_wrong(job.event.drive, &slot, job.digest) {
            job.event.result = ReadResult::Error;
            let failure = if want.parts == 1 { Some(Failure::Digest) } else { None };
            if failure.is_some() {
                self.blame(&job.event, Failure::Digest);
            }
            self.count(&mut job.event, job.part, failure);
            if let Some(stripe) = self.stripe_of(job.event.layer, job.event.expert) {
                return Err(self.wrong_parts(&job.event, stripe, &slot));
            }
            self.wants[at].restart();
            if want.parts == 1 {
                return self.fail(job, slot, Failure::Digest);
            }
            // Nobody knows whose part was bad: every home may be tried, one at a time.
            self.handle.lock().counters.split_digest_errors += 1;
            let from = job.event.drive;
            self.retry.push(Retry { want: job.want, part: self.whole(), tried: 0, from, slot: Some(slot) });
            return Ok(());
        }
        self.health[job.event.drive.index()].good();
        self.count(&mut job.event, job.part, None);
        self.note(&job);
        self.tally.complete(want.completed_ns);
        if self.is_striped() {
            self.count_striped(job.event.layer, job.event.expert, u64::from(want.parts));
        } else if want.parts > 1 {
            self.split_seen |= want.drives.count_ones() > 1;
            let mut ledger = self.handle.lock();
            let counters = &mut ledger.counters;
            counters.experts_split += 1;
            counters.parts += u64::from(want.parts);
            counters.part_bytes += want.bytes;
            counters.part_sum_errors += u64::from(want.bytes != self.plan.expert_bytes);
        }
        self.ready.push_back(Ready { want: job.want, bytes: Supply::Read(slot), completed_ns: want.completed_ns });
        Ok(())
    }

    /// Whether a whole expert has another digest than it should, where digests are checked.
    pub(super) fn digest_is_wrong(&mut self, drive: DriveId, slot: &Slot, digest: Digest) -> bool {
        let wrong = self.check_digest(slot, digest);
        if wrong.is_some() {
            self.handle.lock().counters.drives[drive.index()].digests_checked += 1;
        }
        wrong == Some(true)
    }

    /// The same, uncounted; `None` = digests are not checked.
    pub(super) fn check_digest(&self, slot: &Slot, digest: Digest) -> Option<bool> {
        let verify =
            (self.options.verify_digests || knob::forced(Knob::VerifyDigests)) && !knob::skipped(Knob::VerifyDigests);
        verify.then(|| Digest::of(&slot.bytes()[..self.plan.expert_bytes as usize]) != digest)
    }

    /// The whole slot of an expert whose last part is in `slot`. The other parts lie in the same slot, unless a hedge,
    /// which reads into a slot of its own, brought this one.
    fn join(&mut self, job: &Job, slot: Slot) -> Result<Slot, SourceError> {
        let places = self.places;
        let parked = &mut self.parked[job.want as usize * places..][..places];
        if parked.iter().flatten().all(|p| p.index() == slot.index()) {
            parked.iter_mut().for_each(|p| *p = None);
            return slot.widen().map_err(|_| self.torn(job));
        }
        let mut slot = slot.widen().map_err(|_| self.torn(job))?;
        let parked = &mut self.parked[job.want as usize * places..][..places];
        for part in parked.iter_mut().filter_map(Option::take) {
            slot.bytes_mut()[part.start()..][..part.bytes().len()].copy_from_slice(part.bytes());
        }
        Ok(slot)
    }

    /// Cannot happen: some other read still holds a part of an expert that is complete.
    fn torn(&self, job: &Job) -> SourceError {
        SourceError::Read(
            self.describe(&job.event, "a part of its slot is still out: a bug in argodrive, please report it"),
        )
    }

    fn note(&mut self, job: &Job) {
        self.tally.arrived(Arrived {
            drive: job.event.drive,
            payload_bytes: u64::from(job.part.len),
            queued_ns: job.event.queued_ns,
            completed_ns: job.event.completed_ns,
            hedge: job.hedge && job.rival.is_some(),
            prefetch: job.event.purpose == Purpose::Prefetch,
            evicted: self.resident.as_ref().is_some_and(|r| r.had(job.event.layer, job.event.expert)),
        });
    }

    /// Counts and traces a read that has ended as `event.result` says.
    pub(super) fn count(&mut self, event: &mut ReadEvent, part: Part, failure: Option<Failure>) {
        if event.result != ReadResult::Ok {
            event.outcome = Outcome::Wasted;
        }
        let mut ledger = self.handle.lock();
        let Ledger { counters, trace } = &mut *ledger;
        if let Some(trace) = trace {
            trace.push_read(*event);
        }
        let drive = &mut counters.drives[event.drive.index()];
        if event.purpose == Purpose::Prefetch {
            let sum = match event.outcome {
                Outcome::Useful => &mut drive.prefetch.useful,
                Outcome::Late => &mut drive.prefetch.late,
                Outcome::Wasted | Outcome::Demand => &mut drive.prefetch.wasted,
            };
            sum.add(event.bytes);
            match event.outcome {
                Outcome::Useful => self.governor.useful(event.bytes),
                _ => self.governor.lost(event.bytes),
            }
            let failed = !matches!(event.result, ReadResult::Ok | ReadResult::Cancelled);
            drive.prefetch.failed += u64::from(failed);
        }
        match event.result {
            ReadResult::Ok if event.outcome == Outcome::Wasted => {}
            ReadResult::Ok => {
                drive.reads += 1;
                drive.payload_bytes += u64::from(part.len);
                drive.read_bytes += event.bytes;
                drive.clat_ns.saturating_record(event.completed_ns.saturating_sub(event.submitted_ns).max(1));
                drive.lat_ns.saturating_record(event.completed_ns.saturating_sub(event.queued_ns).max(1));
                if event.replica != 0 {
                    drive.non_primary_reads += 1;
                    let seen = &mut self.seen_non_primary[event.layer.index()][event.expert.index()];
                    counters.experts_from_non_primary += u64::from(!*seen);
                    *seen = true;
                }
            }
            ReadResult::Short | ReadResult::Error => {
                drive.errors += 1;
                drive.digest_errors += u64::from(matches!(failure, Some(Failure::Digest)));
            }
            ReadResult::Cancelled => drive.cancelled += 1,
            ReadResult::Timeout => {} // counted when it was given up: it may never come back
        }
    }
}
