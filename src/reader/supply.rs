//! A barrier that opens takes what is already there: experts of the cache, prefetches that have landed, and prefetches on
//! their way, which it adopts. The part of [`ExpertReader`] between the question and the reads that it still takes.

use super::ahead::{Ahead, Landed, Now, State};
use super::expert_reader::ExpertReader;
use super::faults::Failure;
use super::jobs::{Ready, Supply, Want};
use super::tally::{Arrived, Opened};
use crate::ids::ExpertId;
use crate::trace::events::{Outcome, ReadResult};

impl ExpertReader {
    /// A barrier opens: what is there or on its way is handed to it, the other guesses for it end. Leaves in `missing` what
    /// must be read.
    pub(super) fn supply(&mut self, opened: &Opened, experts: &[ExpertId]) {
        self.missing.clear();
        let mut ahead = self.ahead.take();
        if let Some(resident) = &mut self.resident {
            resident.begin(opened.step.step);
        }
        let (mut hits, mut overtaken) = (0u64, 0);
        for &expert in experts {
            let bytes = self.plan.expert_bytes as u32;
            if let Some(lease) = self.resident.as_mut().and_then(|r| r.demand(opened.layer, expert, bytes)) {
                let want = self.wants.len() as u32;
                self.wants.push(Want::new(expert));
                self.tally.hit(opened.open_ns);
                self.ready.push_back(Ready { want, bytes: Supply::Resident(lease), completed_ns: 0 });
                hits += 1;
                continue;
            }
            let guessed = ahead.as_mut().and_then(|a| {
                let id = a.find(opened.layer, expert)?;
                a.remove(id).map(|forecast| (a, forecast))
            });
            let supplied = match guessed.map(|(a, forecast)| (a, forecast.state)) {
                None => false,
                Some((_, State::Waiting)) => {
                    overtaken += 1;
                    false
                }
                Some((a, State::Reading { tag })) => self.adopt(a, opened, expert, tag),
                Some((a, State::Landed(landed))) => {
                    a.held_slots -= 1;
                    self.use_landed(opened, expert, landed)
                }
            };
            if !supplied {
                self.missing.push(expert);
            }
        }
        if self.resident.is_some() {
            let mut ledger = self.handle.lock();
            ledger.counters.cache.hits += hits;
            ledger.counters.cache.misses += experts.len() as u64 - hits;
        }
        if let Some(ahead) = &mut ahead {
            let now = Now { step: opened.step.step, layer: opened.layer };
            // A pass before the last one belongs to another text, for which nobody has guessed yet.
            let until =
                if ahead.now.is_some_and(|was| now.step < was.step) { Now { step: u64::MAX, ..now } } else { now };
            ahead.due(until);
            let losers = self.end_batch(ahead);
            ahead.now = Some(now);
            self.seen(|c| {
                c.losers += losers;
                c.overtaken += overtaken;
            });
        }
        self.ahead = ahead;
        self.fresh = self.wants.len();
    }

    /// The barrier waits for a prefetch read that is on its way.
    fn adopt(&mut self, ahead: &mut Ahead, opened: &Opened, expert: ExpertId, tag: u32) -> bool {
        let Some(job) = self.jobs[tag as usize].as_mut().filter(|j| !j.withdrawn && j.gave_up.is_none()) else {
            return false;
        };
        (job.want, job.ahead) = (self.wants.len() as u32, None);
        (job.event.barrier, job.event.step) = (Some(opened.barrier), opened.step.step);
        job.event.outcome = Outcome::Late;
        let lane = &mut self.lanes[job.event.drive.index()];
        lane.demand_out += 1;
        if let Some(ahead) = &mut lane.ahead {
            ahead.out -= 1;
        }
        ahead.held_slots -= 1;
        self.live_jobs += 1;
        self.wants.push(Want::new(expert));
        true
    }

    /// The barrier takes a prefetch that is there, unless its digest is checked and wrong.
    fn use_landed(&mut self, opened: &Opened, expert: ExpertId, landed: Landed) -> bool {
        let Landed { slot, mut event, digest } = landed;
        let whole = self.whole();
        (event.barrier, event.step) = (Some(opened.barrier), opened.step.step);
        if self.digest_is_wrong(event.drive, &slot, digest) {
            event.result = ReadResult::Error;
            self.blame(&event, Failure::Digest);
            self.count(&mut event, whole, Some(Failure::Digest));
            return false;
        }
        let late = event.completed_ns > opened.open_ns;
        event.outcome = if late { Outcome::Late } else { Outcome::Useful };
        self.count(&mut event, whole, None);
        let (drive, completed_ns) = (event.drive, event.completed_ns);
        if late {
            let payload_bytes = u64::from(whole.len);
            let queued_ns = event.queued_ns;
            let had = self.resident.as_ref().is_some_and(|r| r.had(opened.layer, expert));
            let arrived =
                Arrived { drive, payload_bytes, queued_ns, completed_ns, hedge: false, prefetch: true, evicted: had };
            self.tally.arrived(arrived);
            self.tally.complete(completed_ns);
        } else {
            self.tally.prefetched(u64::from(whole.len), opened.open_ns);
        }
        let want = self.wants.len() as u32;
        self.wants.push(Want::new(expert));
        self.ready.push_back(Ready { want, bytes: Supply::Read(slot), completed_ns });
        true
    }
}
