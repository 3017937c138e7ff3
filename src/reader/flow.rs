//! Reads on their way: issuing them, settling what comes back, repeating a failed read on another home. The part of
//! [`ExpertReader`] that runs inside a barrier.

use super::counters::Ledger;
use super::expert_reader::{ExpertReader, Job, Ready, Want};
use super::tally::{Arrived, Opened};
use crate::ids::DriveId;
use crate::io::{Completion, ReadOutcome, ReadRequest, Slot};
use crate::source::SourceError;
use crate::store::manifest::Digest;
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};
use std::time::Instant;

/// Why a read brought nothing.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Short { bytes: u32 },
    Digest,
    Os { errno: i32 },
}

impl Failure {
    /// No drive causes these: the request itself was wrong, and another copy would hide it.
    fn is_our_bug(self) -> bool {
        matches!(self, Self::Os { errno: libc::EINVAL | libc::EFAULT | libc::EBADF })
    }
}

impl ExpertReader {
    /// Issues what can be issued: repeats first, then fresh wants in the order asked for.
    pub(super) fn issue(&mut self) -> Result<(), SourceError> {
        let Some(opened) = self.open else { return Ok(()) };
        let mut issued_fresh = false;
        while !self.retry.is_empty() || self.fresh < self.wants.len() {
            let Some(slot) = self.slab.take() else { break };
            let want = match self.retry.pop() {
                Some(want) => want,
                None => {
                    issued_fresh = true;
                    self.fresh += 1;
                    (self.fresh - 1) as u32
                }
            };
            self.place(&opened, want, slot)?;
        }
        if issued_fresh {
            let used = self.slab.slots() - self.slab.free_slots();
            let mut ledger = self.handle.lock();
            ledger.counters.waves += 1;
            ledger.counters.max_slots_used = ledger.counters.max_slots_used.max(used);
        }
        for lane in &mut self.lanes {
            if !lane.batch.is_empty() {
                lane.engine.submit(&mut lane.batch);
            }
        }
        Ok(())
    }

    /// Chooses a home for a want and puts its read into that drive's batch.
    fn place(&mut self, opened: &Opened, want: u32, mut slot: Slot) -> Result<(), SourceError> {
        let Want { expert, tried } = self.wants[want as usize];
        let homes = self.plan.homes(opened.layer, expert).unwrap_or(&[]);
        let Some(home) = self.chooser.choose(homes, tried, &self.in_flight_bytes) else {
            return Err(SourceError::Read(format!("{}-{expert}: no copy is left to read", opened.layer)));
        };
        let drive = homes[home];
        let choices = homes.len();
        let lane = &mut self.lanes[drive.index()];
        let Some(located) = lane.opened.locate(opened.layer, expert) else {
            return Err(SourceError::Unknown(format!(
                "{}-{expert} is not on drive `{}`",
                opened.layer, lane.opened.name
            )));
        };
        {
            let mut ledger = self.handle.lock();
            let counters = &mut ledger.counters;
            counters.decisions += 1;
            counters.decisions_with_choice += u64::from(choices > 1);
            if tried == 0 {
                counters.decisions_not_primary += u64::from(home != 0);
            } else {
                counters.failovers += 1;
            }
        }
        self.wants[want as usize].tried |= 1 << home;
        self.in_flight_bytes[drive.index()] += u64::from(lane.read_bytes);
        let index = slot.index();
        let event = ReadEvent {
            step: opened.step.step,
            layer: opened.layer,
            expert,
            drive,
            replica: home as u8,
            part: 0,
            parts: 1,
            offset: located.offset,
            bytes: u64::from(lane.read_bytes),
            purpose: Purpose::Demand,
            issued_in: opened.barrier,
            barrier: Some(opened.barrier),
            queued_ns: self.clock.now_ns(),
            submitted_ns: 0,
            completed_ns: 0,
            result: ReadResult::Ok,
            outcome: Outcome::Demand,
        };
        self.jobs[index as usize] = Some(Job { want, event, digest: located.digest, gave_up: None });
        debug_assert!(slot.bytes_mut().len() >= lane.read_bytes as usize);
        lane.batch.push(ReadRequest {
            tag: u64::from(index),
            file: located.file,
            offset: located.offset,
            len: lane.read_bytes,
            need: self.plan.expert_bytes as u32, // checked in `read_bytes`
            slot,
        });
        Ok(())
    }

    /// Takes what the engines have finished.
    pub(super) fn collect(&mut self) -> Result<(), SourceError> {
        let mut finished = std::mem::take(&mut self.finished);
        let now = Instant::now();
        let mut result = Ok(());
        for drive in 0..self.lanes.len() {
            self.lanes[drive].engine.reap(0, now, &mut finished);
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
        let Some(job) = self.jobs.get_mut(tag as usize).and_then(Option::take) else { return Ok(()) };
        let Job { want, mut event, digest, gave_up } = job;
        (event.submitted_ns, event.completed_ns) = (submitted_ns, completed_ns);
        self.in_flight_bytes[drive] -= event.bytes;
        let payload = self.plan.expert_bytes as usize;
        let check = gave_up.is_none() && self.options.verify_digests;
        let failure = match outcome {
            _ if gave_up.is_some() => None,
            ReadOutcome::Done { .. } if check && Digest::of(&slot.bytes()[..payload]) != digest => {
                Some(Failure::Digest)
            }
            ReadOutcome::Done { .. } => None,
            ReadOutcome::Short { bytes } => Some(Failure::Short { bytes }),
            ReadOutcome::Failed { errno } => Some(Failure::Os { errno }),
            ReadOutcome::Cancelled => Some(Failure::Os { errno: libc::ECANCELED }),
        };
        event.result = match (gave_up, failure) {
            (Some(why), _) => why,
            (None, None) => ReadResult::Ok,
            (None, Some(Failure::Short { .. })) => ReadResult::Short,
            (None, Some(_)) => ReadResult::Error,
        };
        if event.result != ReadResult::Ok {
            event.outcome = Outcome::Wasted;
        }
        self.count(&event, check && matches!(outcome, ReadOutcome::Done { .. }), failure);
        match (gave_up, failure) {
            (Some(_), _) => Ok(()), // its slot goes back now
            (None, None) => {
                let arrived = Arrived {
                    drive: event.drive,
                    payload_bytes: self.plan.expert_bytes,
                    queued_ns: event.queued_ns,
                    completed_ns,
                };
                self.tally.arrived(arrived);
                self.ready.push_back(Ready { want, slot, completed_ns });
                Ok(())
            }
            (None, Some(failure)) => {
                let homes = self.plan.homes(event.layer, event.expert).map_or(0, <[DriveId]>::len);
                let left = homes as u32 > self.wants[want as usize].tried.count_ones();
                if failure.is_our_bug() || !left {
                    return Err(SourceError::Read(self.describe(&event, &self.reason(failure))));
                }
                self.retry.push(want);
                Ok(())
            }
        }
    }

    fn count(&mut self, event: &ReadEvent, digest_checked: bool, failure: Option<Failure>) {
        let mut ledger = self.handle.lock();
        let Ledger { counters, trace } = &mut *ledger;
        if let Some(trace) = trace {
            trace.push_read(*event);
        }
        let drive = &mut counters.drives[event.drive.index()];
        drive.digests_checked += u64::from(digest_checked);
        match event.result {
            ReadResult::Ok => {
                drive.reads += 1;
                drive.payload_bytes += self.plan.expert_bytes;
                drive.read_bytes += event.bytes;
                drive.clat_ns.saturating_record(event.completed_ns.saturating_sub(event.submitted_ns).max(1));
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
            ReadResult::Timeout => drive.timeouts += 1,
        }
    }

    /// A sentence about one read: expert, layer, drive, file, offset, and `reason`.
    fn describe(&self, event: &ReadEvent, reason: &str) -> String {
        let lane = &self.lanes[event.drive.index()].opened;
        let located = lane.locate(event.layer, event.expert);
        let name = located.and_then(|l| lane.names.get(l.file as usize));
        let path = lane.folder.join(name.map_or("?", String::as_str));
        let (expert, layer, offset) = (event.expert.0, event.layer.0, event.offset);
        let drive = &lane.name;
        format!("expert {expert} of layer {layer} on drive `{drive}`, {} at offset {offset}: {reason}", path.display())
    }

    fn reason(&self, failure: Failure) -> String {
        let what = match failure {
            Failure::Short { bytes } => format!("the file ends after {bytes} of {} bytes", self.plan.expert_bytes),
            Failure::Digest => "its bytes do not have the digest of drive.json".to_string(),
            Failure::Os { errno } => std::io::Error::from_raw_os_error(errno).to_string(),
        };
        let advice = if failure.is_our_bug() {
            "a bug in argodrive, please report it"
        } else {
            "no other copy is left; run `argodrive verify`, then `argodrive stage`"
        };
        format!("{what}; {advice}")
    }

    /// Nothing arrived for the whole read timeout: gives up what is in flight and lines up other homes. An error when
    /// an expert has none left, or when nothing is in flight and only a dropped lease could help.
    pub(super) fn time_out(&mut self, opened: &Opened) -> Result<(), SourceError> {
        let waited_ms = self.options.read_timeout_ms;
        let (mut gave_up, mut lost) = (false, None);
        for (index, job) in self.jobs.iter_mut().enumerate() {
            let Some(job) = job.as_mut().filter(|j| j.gave_up.is_none()) else { continue };
            gave_up = true;
            job.gave_up = Some(ReadResult::Timeout);
            self.lanes[job.event.drive.index()].engine.cancel(index as u64);
            let homes = self.plan.homes(opened.layer, job.event.expert).map_or(0, <[DriveId]>::len);
            if homes as u32 > self.wants[job.want as usize].tried.count_ones() {
                self.retry.push(job.want);
            } else {
                lost = Some(job.event);
            }
        }
        if let Some(event) = lost {
            let reason = format!("nothing came for {waited_ms} ms and no other copy is left");
            return Err(SourceError::Timeout(self.describe(&event, &reason)));
        }
        if gave_up {
            return Ok(());
        }
        let (slots, free) = (self.slab.slots(), self.slab.free_slots());
        let left = self.wants.len() - self.fresh + self.retry.len();
        Err(SourceError::Timeout(format!(
            "{}: {left} experts wait for a slot, but for {waited_ms} ms none of the {slots} slots came back ({free} are \
             free): drop leases while taking more, or raise --buffer-bytes",
            opened.layer
        )))
    }

    /// Gives up everything that is still in flight; slots come back as the engines return them.
    pub(super) fn abandon(&mut self) {
        for (index, job) in self.jobs.iter_mut().enumerate() {
            if let Some(job) = job.as_mut().filter(|j| j.gave_up.is_none()) {
                job.gave_up = Some(ReadResult::Cancelled);
                self.lanes[job.event.drive.index()].engine.cancel(index as u64);
            }
        }
        for (drive, lane) in self.lanes.iter_mut().enumerate() {
            // Never handed to the engine, so no completion will come.
            for request in lane.batch.drain(..) {
                self.jobs[request.tag as usize] = None;
                self.in_flight_bytes[drive] -= u64::from(request.len);
            }
        }
    }
}
