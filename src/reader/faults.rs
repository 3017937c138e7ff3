//! When reads go wrong: silence, giving up, and the sentences that say where. The part of [`ExpertReader`] that no
//! good run enters.

use super::expert_reader::ExpertReader;
use super::health::{Failed, Trouble};
use super::jobs::{Job, Part, Retry};
use super::tally::Opened;
use crate::source::SourceError;
use crate::trace::events::{ReadEvent, ReadResult};

/// Why a read brought nothing.
#[derive(Clone, Copy, Debug)]
pub(super) enum Failure {
    Short { bytes: u32 },
    Digest,
    Os { errno: i32 },
}

impl Failure {
    /// As a trace calls it.
    pub fn result(self) -> ReadResult {
        match self {
            Self::Short { .. } => ReadResult::Short,
            Self::Digest | Self::Os { .. } => ReadResult::Error,
        }
    }

    /// No drive causes these: the request itself was wrong, and another copy would hide it.
    pub fn is_our_bug(self) -> bool {
        matches!(self, Self::Os { errno: libc::EINVAL | libc::EFAULT | libc::EBADF })
    }
}

impl ExpertReader {
    /// The expert in one piece.
    pub(super) fn whole(&self) -> Part {
        Part { part: 0, parts: 1, from: 0, len: self.plan.expert_bytes as u32 }
    }

    /// Homes of the event's expert that are not in `tried`.
    pub(super) fn homes_left(&self, event: &ReadEvent, tried: u64) -> u32 {
        let homes = self.plan.homes(event.layer, event.expert).unwrap_or(&[]);
        if self.plan.stripe(homes.len()).is_some() {
            return 0; // each drive has other bytes
        }
        (homes.len() as u32).saturating_sub(tried.count_ones())
    }

    /// A sentence about one read: expert, layer, drive, file, offset, and `reason`.
    pub(super) fn describe(&self, event: &ReadEvent, reason: &str) -> String {
        let lane = &self.lanes[event.drive.index()].opened;
        let located = lane.locate(event.layer, event.expert);
        let name = located.and_then(|l| lane.names.get(l.file as usize));
        let path = lane.folder.join(name.map_or("?", String::as_str));
        let (expert, layer, offset) = (event.expert.0, event.layer.0, event.offset);
        let drive = &lane.name;
        let part = match event.parts {
            1 => String::new(),
            parts => format!(" (part {} of {parts})", event.part + 1),
        };
        let file = path.display();
        format!("expert {expert}{part} of layer {layer} on drive `{drive}`, {file} at offset {offset}: {reason}")
    }

    /// Why a read of `event` ends the barrier: no other copy can replace it.
    pub(super) fn reason(&self, failure: Failure, need: u32, event: &ReadEvent) -> String {
        let what = match failure {
            Failure::Short { bytes } => format!("the file ends after {bytes} of {need} bytes"),
            Failure::Digest => "its bytes do not have the digest of drive.json".to_string(),
            Failure::Os { errno } => std::io::Error::from_raw_os_error(errno).to_string(),
        };
        if failure.is_our_bug() {
            return format!("{what}; a bug in argodrive, please report it");
        }
        let none = match self.is_striped() {
            true => "experts are striped, so no other drive holds these bytes",
            false => "no other copy is left",
        };
        format!("{what}; {none}{}", self.lost_with(event.drive))
    }

    /// Nothing arrived for the whole read timeout: gives up what is in flight and lines up other homes. A cut expert is
    /// read whole this time, because the engine still holds a part of its slot. An error when an expert has no home
    /// left, or when nothing is in flight and only a dropped lease could help.
    pub(super) fn time_out(&mut self, opened: &Opened) -> Result<(), SourceError> {
        let waited_ms = self.options.read_timeout_ms;
        let (whole, mut gave_up, mut lost) = (self.whole(), false, None);
        let now_ns = self.clock.now_ns();
        for tag in 0..self.jobs.len() {
            let Some(job) = self.jobs[tag].as_mut().filter(|j| j.is_live()) else { continue };
            gave_up = true;
            job.gave_up = Some(ReadResult::Timeout);
            self.live_jobs -= 1;
            let (want, tried, event) = (job.want, job.tried, job.event);
            self.lanes[event.drive.index()].cancel(event.purpose, tag as u64);
            // It may never end, and must neither count as load nor keep the drive's rate from being learnt.
            self.in_flight.sub(event.drive.index(), event.bytes);
            self.rates[event.drive.index()].ended(now_ns, event.bytes, false);
            self.handle.lock().counters.drives[event.drive.index()].timeouts += 1;
            self.blame_for(&event, Failed::Silent);
            let state = &mut self.wants[want as usize];
            state.silent |= tried;
            state.restart();
            let silent = state.silent;
            self.unpark(want);
            match self.retry.iter_mut().find(|r| r.want == want) {
                Some(retry) => retry.tried |= silent,
                None => {
                    let from = event.drive;
                    self.retry.push(Retry { want, part: whole, tried: silent, from, slot: None });
                }
            }
            if self.homes_left(&event, silent) == 0 {
                lost = Some(event);
            }
        }
        if let Some(event) = lost {
            let lost = self.lost_with(event.drive);
            let reason = format!("nothing came for {waited_ms} ms and no other copy is left{lost}");
            return Err(SourceError::Timeout(self.describe(&event, &reason)));
        }
        if gave_up {
            return Ok(());
        }
        let (slots, free) = (self.slab.slots(), self.slab.free_slots());
        let left = self.wants.len() - self.fresh + self.retry.len();
        let gone = |j: &&Option<Job>| j.as_ref().is_some_and(|j| j.gave_up == Some(ReadResult::Timeout));
        let advice = match self.jobs.iter().filter(gone).count() {
            0 => "drop leases while taking more, or raise --buffer-bytes".to_string(),
            held => {
                let names = |d: &usize| self.health[*d].trouble() == Some(Trouble::Silent);
                let silent = (0..self.lanes.len()).filter(names).map(|d| self.lanes[d].opened.name.as_str());
                let silent = silent.collect::<Vec<_>>().join("`, `");
                format!(
                    "{held} reads keep theirs that drive `{silent}` does not answer: raise --buffer-bytes, or run without that \
                     drive"
                )
            }
        };
        Err(SourceError::Timeout(format!(
            "{}: {left} experts wait for a slot, but for {waited_ms} ms none of the {slots} slots came back ({free} are \
             free): {advice}",
            opened.layer
        )))
    }

    /// Lets go of the parts of a want that have arrived.
    pub(super) fn unpark(&mut self, want: u32) {
        let places = self.places;
        self.parked[want as usize * places..][..places].iter_mut().for_each(|p| *p = None);
    }

    /// Gives up one read of the open barrier; it keeps its job and its part of a slot until the engine returns it.
    pub(super) fn give_up(&mut self, tag: usize, why: ReadResult) {
        if let Some(job) = self.jobs[tag].as_mut().filter(|j| j.is_live()) {
            job.gave_up = Some(why);
            self.live_jobs -= 1;
            self.lanes[job.event.drive.index()].cancel(job.event.purpose, tag as u64);
        }
    }

    /// Gives up everything that a barrier still waits for; slots come back as the engines return them.
    pub(super) fn abandon(&mut self) {
        (0..self.jobs.len()).for_each(|tag| self.give_up(tag, ReadResult::Cancelled));
        let now_ns = self.clock.now_ns();
        for (drive, lane) in self.lanes.iter_mut().enumerate() {
            // Never handed to the engine, so no completion will come.
            for request in lane.batch.drain(..) {
                let job = self.jobs[request.tag as usize].take();
                let silent = job.as_ref().is_some_and(|job| job.gave_up == Some(ReadResult::Timeout));
                if job.is_some_and(|job| job.probe) {
                    self.probing[drive] = false;
                    let probes = &mut self.handle.lock().counters.drives[drive].probes;
                    (probes.reads, probes.bytes) = (probes.reads - 1, probes.bytes - u64::from(request.len));
                } else {
                    lane.demand_out -= 1;
                }
                self.free_jobs.push(request.tag as u32);
                // what was silent was taken out of the account when its time was over
                if !silent {
                    self.in_flight.sub(drive, u64::from(request.len));
                    self.rates[drive].ended(now_ns, u64::from(request.len), false);
                }
            }
        }
    }
}
