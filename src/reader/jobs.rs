//! What the reader keeps about experts, reads and drives while they are on their way: plain data.

use super::limit::{ReadLimit, Waiting};
use super::open::OpenedDrive;
use crate::clock::Clock;
use crate::ids::{DriveId, ExpertId};
use crate::io::{IoEngine, ReadRequest, Slot};
use crate::source::Lease;
use crate::store::manifest::Digest;
use crate::trace::events::{Purpose, ReadEvent, ReadResult};

/// A drive, its engines, and the reads about to be handed to them.
pub(super) struct Lane {
    pub(super) opened: OpenedDrive,
    /// Carries out demand.
    pub(super) engine: Box<dyn IoEngine>,
    pub(super) batch: Vec<ReadRequest>,
    /// How much the drive may be asked for, where that is limited; and the read that is on its way through.
    pub(super) limit: Option<ReadLimit>,
    pub(super) passing: Vec<ReadRequest>,
    /// Payload rounded up to the alignment.
    pub(super) read_bytes: u32,
    /// Demanded reads that have not ended, adopted ones included.
    pub(super) demand_out: u32,
    /// What prefetch has here.
    pub(super) ahead: Option<AheadLane>,
}

/// Prefetch on a drive.
pub(super) struct AheadLane {
    /// Its own pool; `None` = demand's.
    pub(super) engine: Option<Box<dyn IoEngine>>,
    pub(super) batch: Vec<ReadRequest>,
    /// Its reads that have not ended and that no barrier has demanded.
    pub(super) out: u32,
}

impl Lane {
    /// Gives up a read in the pool that it was issued to.
    pub(super) fn cancel(&mut self, purpose: Purpose, tag: u64) {
        match purpose {
            Purpose::Prefetch => self.ahead_engine().cancel(tag),
            _ => self.engine.cancel(tag),
        };
    }

    /// Whatever carries out prefetch.
    pub(super) fn ahead_engine(&mut self) -> &mut dyn IoEngine {
        let own = self.ahead.as_mut().and_then(|a| a.engine.as_mut());
        own.unwrap_or(&mut self.engine).as_mut()
    }
}

/// Hands over as much of `batch` as `limit` lets through at the moment, from its front, by way of the empty `passing`. Returns how many
/// reads went, and when the next may.
pub(super) fn hand_over(
    limit: &mut ReadLimit,
    batch: &mut Vec<ReadRequest>,
    passing: &mut Vec<ReadRequest>,
    engine: &mut dyn IoEngine,
    jobs: &mut [Option<Job>],
    clock: &Clock,
) -> (usize, Option<u64>) {
    let mut went = 0;
    while let Some(first) = batch.first() {
        let (tag, bytes, now) = (first.tag as usize, u64::from(first.len), clock.now_ns());
        let mut nobodys = Waiting::default();
        let waiting = jobs.get_mut(tag).and_then(Option::as_mut).map_or(&mut nobodys, |job| &mut job.waiting);
        if let Some((at_ns, why)) = limit.wait(now) {
            limit.refused(waiting, now, why);
            return (went, Some(at_ns));
        }
        passing.push(batch.remove(0));
        if engine.submit(passing) == 0 {
            // It is full, and takes more when a read has ended.
            passing.pop().into_iter().for_each(|back| batch.insert(0, back));
            break;
        }
        limit.goes(waiting, bytes, now);
        went += 1;
    }
    (went, None)
}

/// An expert that the open barrier waits for.
#[derive(Clone, Copy)]
pub(super) struct Want {
    pub(super) expert: ExpertId,
    /// Bit i: home i was silent for the whole read timeout.
    pub(super) silent: u64,
    /// Parts that it is read in, and those that have arrived.
    pub(super) parts: u8,
    pub(super) arrived: u8,
    /// Payload bytes of the parts that have arrived.
    pub(super) bytes: u64,
    /// Bit d: drive d has delivered a part.
    pub(super) drives: u64,
    /// When the latest part that has arrived was there.
    pub(super) completed_ns: u64,
}

impl Want {
    pub(super) fn new(expert: ExpertId) -> Self {
        Self { expert, silent: 0, parts: 1, arrived: 0, bytes: 0, drives: 0, completed_ns: 0 }
    }

    /// Nothing of it has arrived, and it will come in one piece.
    pub(super) fn restart(&mut self) {
        *self = Self { silent: self.silent, ..Self::new(self.expert) };
    }
}

/// Which bytes of an expert a read is for.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) part: u8,
    pub(super) parts: u8,
    pub(super) from: u32,
    /// Payload bytes.
    pub(super) len: u32,
}

/// A read in flight.
pub(super) struct Job {
    /// Its number among the jobs.
    pub(super) tag: u32,
    /// The want that it is for; meaningless while `ahead` is there.
    pub(super) want: u32,
    /// The guess that it is for, until a barrier demands it. A given-up read of a guess keeps the number, which then means
    /// nothing.
    pub(super) ahead: Option<u32>,
    /// The engine gave it back unread, and its completion only says so.
    pub(super) withdrawn: bool,
    pub(super) part: Part,
    /// Bit i: home i of the part has been tried, this one included.
    pub(super) tried: u64,
    /// The read as it will be traced.
    pub(super) event: ReadEvent,
    pub(super) digest: Digest,
    /// Why it was given up, if it was.
    pub(super) gave_up: Option<ReadResult>,
    /// The job that reads the same bytes from another home.
    pub(super) rival: Option<u32>,
    /// It is the second of the two.
    pub(super) hedge: bool,
    /// Nobody waits for it: it asks a degraded drive whether it is back.
    pub(super) probe: bool,
    /// What it has waited for the drive's limit.
    pub(super) waiting: Waiting,
}

impl Job {
    /// The open barrier waits for it.
    pub(super) fn is_live(&self) -> bool {
        self.gave_up.is_none() && self.ahead.is_none() && !self.probe
    }
}

/// A read that must be repeated on a home not yet tried.
pub(super) struct Retry {
    pub(super) want: u32,
    pub(super) part: Part,
    pub(super) tried: u64,
    /// The drive that did not deliver it.
    pub(super) from: DriveId,
    /// Where its bytes go; `None` = a new slot.
    pub(super) slot: Option<Slot>,
}

/// An expert that can be handed over.
pub(super) struct Ready {
    pub(super) want: u32,
    pub(super) bytes: Supply,
    pub(super) completed_ns: u64,
}

/// Where the bytes of an expert are.
pub(super) enum Supply {
    /// In a slot that was read into.
    Read(Slot),
    /// In the cache.
    Resident(Lease),
}
