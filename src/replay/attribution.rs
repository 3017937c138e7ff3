//! One barrier: which read it waited for last, how far behind the others that read was, and why. Pure: a record and
//! its reads in, an answer out; the record's own answer is not looked at, except where only the reader can know
//! (`evicted`, `hedged`).
//!
//! **What counts.** An expert arrives when the last of its parts has arrived, and a part when the first successful read
//! of it has (a hedge may have sent two). A read whose bytes were never used (`wasted`) delivers nothing. Only arrivals
//! **after** the barrier opened can have made it wait: a prefetch that was there before is neither last nor
//! next-to-last.

use crate::ids::DriveId;
use crate::trace::cause::{LastFacts, cause};
use crate::trace::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};

/// The read that decided a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRead {
    /// Its drive.
    pub drive: DriveId,
    /// What it was for.
    pub purpose: Purpose,
    /// Its place among the reads given.
    pub index: usize,
}

/// The wait of a barrier, seen from the read that decided it; the three parts sum to `total_ns`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitSplit {
    /// From open to the last arrival.
    pub total_ns: u64,
    /// Until the reader decided to read.
    pub before_ns: u64,
    /// Between that and the hand-over to the drive.
    pub queue_ns: u64,
    /// At the drive.
    pub service_ns: u64,
}

/// What one barrier waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribution {
    /// The last arrival after open; `None` when everything was there.
    pub last: Option<LastRead>,
    /// Behind the next-to-last **drive**; `None` when only one drive delivered after open.
    pub gap_drive_ns: Option<u64>,
    /// Behind the next-to-last **read**; `None` with one read.
    pub gap_read_ns: Option<u64>,
    /// Drives that delivered after open.
    pub drives: u32,
    /// When the first arrival after open came, or the open itself.
    pub first_ns: u64,
    /// The wait.
    pub wait: WaitSplit,
    /// Why the last read was last.
    pub cause: Cause,
}

/// One drive's part in one barrier, arrivals after open only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriveShare {
    /// Arrivals.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The first hand-over.
    pub first_submit_ns: u64,
    /// The last arrival.
    pub last_ns: u64,
    /// Whether every one of them was handed over after the barrier opened.
    pub all_issued_inside: bool,
}

/// Attributes barriers, one after the other, without allocating for each.
#[derive(Debug)]
pub struct Attributor {
    shares: Vec<DriveShare>,
    /// (expert, part, completed, index) of successful reads.
    arrivals: Vec<(u16, u8, u64, usize)>,
}

impl Attributor {
    /// For a trace over `drives` drives.
    pub fn new(drives: usize) -> Self {
        Self { shares: vec![DriveShare::default(); drives], arrivals: Vec::new() }
    }

    /// What each drive delivered to the barrier that was attributed last.
    pub fn shares(&self) -> &[DriveShare] {
        &self.shares
    }

    /// Indices of the reads that delivered in the barrier that was attributed last, one for each part of an expert.
    pub fn arrivals(&self) -> impl Iterator<Item = usize> + '_ {
        self.arrivals.iter().map(|a| a.3)
    }

    /// Attributes `record`, whose reads (of any result) are `reads`. A read of a drive beyond those of the trace
    /// counts as if it were not there.
    pub fn attribute(&mut self, record: &BarrierRecord, reads: &[ReadEvent]) -> Attribution {
        self.arrivals.clear();
        let delivered = |r: &ReadEvent| r.result == ReadResult::Ok && r.outcome != Outcome::Wasted;
        let known = |r: &ReadEvent| r.drive.index() < self.shares.len();
        let found = reads.iter().enumerate().filter(|(_, r)| delivered(r) && known(r));
        self.arrivals.extend(found.map(|(i, r)| (r.expert.0, r.part, r.completed_ns, i)));
        self.arrivals.sort_unstable();
        self.arrivals.dedup_by_key(|a| (a.0, a.1));

        self.shares.fill(DriveShare::default());
        let open_ns = record.open_ns;
        // the last two arrivals, as (completed, index)
        let (mut last, mut second): (Option<(u64, usize)>, Option<u64>) = (None, None);
        let mut first_ns = u64::MAX;
        for &(_, _, completed_ns, index) in self.arrivals.iter().filter(|a| a.2 > open_ns) {
            let read = &reads[index];
            let share = &mut self.shares[read.drive.index()];
            let inside = read.submitted_ns >= open_ns;
            if share.reads == 0 {
                (share.first_submit_ns, share.all_issued_inside) = (read.submitted_ns, inside);
            }
            share.first_submit_ns = share.first_submit_ns.min(read.submitted_ns);
            share.all_issued_inside &= inside;
            share.reads += 1;
            share.bytes = share.bytes.saturating_add(read.bytes);
            share.last_ns = share.last_ns.max(completed_ns);
            first_ns = first_ns.min(completed_ns);
            match last {
                // of equal ends, the first row is the last read, so that the answer does not depend on sorting
                Some((end, at)) if completed_ns < end || (completed_ns == end && index > at) => {
                    second = Some(second.map_or(completed_ns, |s| s.max(completed_ns)));
                }
                _ => {
                    second = last.map(|l| l.0).or(second);
                    last = Some((completed_ns, index));
                }
            }
        }
        let Some((last_ns, index)) = last else { return nothing(open_ns) };
        let read = &reads[index];
        let others = self.shares.iter().enumerate().filter(|(d, s)| s.reads > 0 && *d != read.drive.index());
        let gap_drive_ns = others.map(|(_, s)| s.last_ns).max().map(|s| last_ns - s);
        let wait = split(open_ns, read);
        Attribution {
            last: Some(LastRead { drive: read.drive, purpose: read.purpose, index }),
            gap_drive_ns,
            gap_read_ns: second.map(|s| last_ns - s),
            drives: self.shares.iter().filter(|s| s.reads > 0).count() as u32,
            first_ns,
            wait,
            cause: self.cause(record, reads, read, gap_drive_ns, wait.total_ns),
        }
    }

    /// Why the last read was last, by the rules of [`crate::trace::cause`]. A prefetch that had brought the expert before
    /// the barrier opened, and whose bytes were given up, means that it was evicted; a read of the same part that was asked
    /// for earlier, and was cancelled or came for nothing, means that the last one was a hedge. The record's own word on
    /// both is taken as well: a cache leaves no reads, and so no trace of what it evicted.
    fn cause(
        &self,
        record: &BarrierRecord,
        reads: &[ReadEvent],
        last: &ReadEvent,
        gap_drive_ns: Option<u64>,
        wait_ns: u64,
    ) -> Cause {
        let given_up = |r: &&ReadEvent| {
            r.result == ReadResult::Cancelled || (r.result == ReadResult::Ok && r.outcome == Outcome::Wasted)
        };
        let mut twins = reads.iter().filter(given_up).filter(|r| r.expert == last.expert && r.part == last.part);
        let mut evicted = record.cause == Cause::Evicted;
        let hedged = twins.any(|twin| {
            let was_there = twin.purpose == Purpose::Prefetch && twin.completed_ns <= record.open_ns;
            evicted |= was_there;
            !was_there && twin.queued_ns < last.queued_ns
        });
        let others = self.shares.iter().enumerate().filter(|(d, s)| s.reads > 0 && *d != last.drive.index());
        cause(&LastFacts {
            wait_ns,
            gap_drive_ns,
            hedged: hedged || record.cause == Cause::Hedged,
            evicted,
            prefetch: last.purpose == Purpose::Prefetch,
            queued_after_ns: last.queued_ns.saturating_sub(record.open_ns),
            own_bytes: self.shares[last.drive.index()].bytes,
            most_of_others: others.map(|(_, s)| s.bytes).max(),
        })
    }
}

fn nothing(open_ns: u64) -> Attribution {
    Attribution {
        last: None,
        gap_drive_ns: None,
        gap_read_ns: None,
        drives: 0,
        first_ns: open_ns,
        wait: WaitSplit::default(),
        cause: Cause::None,
    }
}

fn split(open_ns: u64, last: &ReadEvent) -> WaitSplit {
    let inside = |ns: u64| ns.clamp(open_ns, last.completed_ns);
    let (queued, submitted) = (inside(last.queued_ns), inside(last.submitted_ns));
    let submitted = submitted.max(queued);
    WaitSplit {
        total_ns: last.completed_ns - open_ns,
        before_ns: queued - open_ns,
        queue_ns: submitted - queued,
        service_ns: last.completed_ns - submitted,
    }
}
