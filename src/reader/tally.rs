//! The barrier that is open, as numbers: what arrived when and from where, and the record that it becomes. Pure.

use crate::ids::{DriveId, LayerId};
use crate::source::StepInfo;
use crate::trace::cause::{LastFacts, cause};
use crate::trace::events::{BarrierRecord, Cause};

/// A read that has arrived: an expert, or a part of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived {
    pub drive: DriveId,
    pub payload_bytes: u64,
    pub queued_ns: u64,
    pub completed_ns: u64,
    /// A hedge that came before the read it was to help.
    pub hedge: bool,
    /// It had been asked for before the barrier opened.
    pub prefetch: bool,
    /// Its expert had been in memory and had to go.
    pub evicted: bool,
}

/// Tally of an open barrier.
#[derive(Debug)]
pub(super) struct Tally {
    by_drive: Vec<Share>,
    last: Option<Arrived>,
    /// End of the next-to-last read.
    second_ns: Option<u64>,
    /// When the first whole expert was there.
    first_ns: Option<u64>,
    /// Experts that were in memory, that a prefetch had brought, and the bytes of the latter.
    hits: u32,
    prefetch_hits: u32,
    early_bytes: u64,
    pub stall_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    bytes: u64,
    last_ns: u64,
    reads: u64,
}

/// What a record needs beyond the arrivals.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opened {
    pub barrier: u64,
    pub step: StepInfo,
    pub layer: LayerId,
    pub width: u32,
    pub open_ns: u64,
}

impl Tally {
    pub fn new(drives: usize) -> Self {
        Self {
            by_drive: vec![Share::default(); drives],
            last: None,
            second_ns: None,
            first_ns: None,
            hits: 0,
            prefetch_hits: 0,
            early_bytes: 0,
            stall_ns: 0,
        }
    }

    /// Starts over, without allocating.
    pub fn reset(&mut self) {
        self.by_drive.fill(Share::default());
        (self.last, self.second_ns, self.first_ns, self.stall_ns) = (None, None, None, 0);
        (self.hits, self.prefetch_hits, self.early_bytes) = (0, 0, 0);
    }

    /// Counts an arrival; they may come in any order.
    pub fn arrived(&mut self, seen: Arrived) {
        let share = &mut self.by_drive[seen.drive.index()];
        share.bytes += seen.payload_bytes;
        share.reads += 1;
        share.last_ns = share.last_ns.max(seen.completed_ns);
        match self.last {
            None => self.last = Some(seen),
            Some(last) => {
                let earlier = if seen.completed_ns > last.completed_ns {
                    self.last = Some(seen);
                    last.completed_ns
                } else {
                    seen.completed_ns
                };
                self.second_ns = Some(self.second_ns.map_or(earlier, |s| s.max(earlier)));
            }
        }
    }

    /// An expert was complete at `at_ns`.
    pub fn complete(&mut self, at_ns: u64) {
        self.first_ns = Some(self.first_ns.map_or(at_ns, |first| first.min(at_ns)));
    }

    /// An expert was in memory when the barrier opened at `open_ns`.
    pub fn hit(&mut self, open_ns: u64) {
        self.hits += 1;
        self.complete(open_ns);
    }

    /// A prefetch had brought an expert of `payload_bytes` before the barrier opened at `open_ns`.
    pub fn prefetched(&mut self, payload_bytes: u64, open_ns: u64) {
        self.prefetch_hits += 1;
        self.early_bytes += payload_bytes;
        self.complete(open_ns);
    }

    /// Drive of the last arrival so far.
    pub fn straggler(&self) -> Option<DriveId> {
        self.last.map(|l| l.drive)
    }

    /// The record of the barrier, closed at `close_ns`.
    pub fn record(&self, opened: &Opened, close_ns: u64) -> BarrierRecord {
        let last_ns = self.last.map_or(opened.open_ns, |l| l.completed_ns);
        let others =
            self.by_drive.iter().enumerate().filter(|(d, s)| s.reads > 0 && Some(*d) != self.straggler_index());
        let second_drive_ns = others.map(|(_, s)| s.last_ns).max();
        let gap_drive_ns = second_drive_ns.map_or(0, |s| last_ns.saturating_sub(s));
        BarrierRecord {
            barrier: opened.barrier,
            step: opened.step.step,
            phase: opened.step.phase,
            pos: opened.step.pos,
            rows: opened.step.rows,
            layer: opened.layer,
            width: opened.width,
            hits: self.hits,
            prefetch_hits: self.prefetch_hits,
            bytes: self.early_bytes + self.by_drive.iter().map(|s| s.bytes).sum::<u64>(),
            open_ns: opened.open_ns,
            first_ns: self.first_ns.unwrap_or(opened.open_ns),
            last_ns,
            close_ns,
            stall_ns: self.stall_ns,
            straggler: self.straggler(),
            gap_drive_ns,
            gap_read_ns: self.second_ns.map_or(0, |s| last_ns.saturating_sub(s)),
            bound_layout_ns: None,
            bound_drives_ns: None,
            cause: self.cause(opened.open_ns, second_drive_ns.map(|_| gap_drive_ns)),
        }
    }

    fn straggler_index(&self) -> Option<usize> {
        self.straggler().map(DriveId::index)
    }

    /// Why the last read was last, by the rules of [`crate::trace::cause`].
    fn cause(&self, open_ns: u64, gap_drive_ns: Option<u64>) -> Cause {
        let Some(last) = self.last else { return Cause::None };
        let others = self.by_drive.iter().enumerate().filter(|(d, s)| s.reads > 0 && *d != last.drive.index());
        cause(&LastFacts {
            wait_ns: last.completed_ns.saturating_sub(open_ns),
            gap_drive_ns,
            hedged: last.hedge,
            evicted: last.evicted,
            prefetch: last.prefetch,
            queued_after_ns: last.queued_ns.saturating_sub(open_ns),
            own_bytes: self.by_drive[last.drive.index()].bytes,
            most_of_others: others.map(|(_, s)| s.bytes).max(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Phase;

    const BLANK: Arrived = Arrived {
        drive: DriveId(0),
        payload_bytes: 0,
        queued_ns: 0,
        completed_ns: 0,
        hedge: false,
        prefetch: false,
        evicted: false,
    };

    fn record(drives: usize, arrivals: &[(u8, u64, u64, u64)]) -> BarrierRecord {
        let step = StepInfo { step: 1, phase: Phase::Decode, pos: 4, rows: 1 };
        let opened = Opened { barrier: 3, step, layer: LayerId(2), width: arrivals.len() as u32, open_ns: 1000 };
        let mut tally = Tally::new(drives);
        tally.arrived(Arrived {
            drive: DriveId(0),
            payload_bytes: 1,
            queued_ns: 0,
            completed_ns: 1,
            hedge: false,
            ..BLANK
        });
        tally.reset();
        for &(drive, payload_bytes, queued_ns, completed_ns) in arrivals {
            tally.arrived(Arrived {
                drive: DriveId(drive),
                payload_bytes,
                queued_ns,
                completed_ns,
                hedge: false,
                ..BLANK
            });
            tally.complete(completed_ns);
        }
        tally.record(&opened, 9999)
    }

    #[test]
    fn gaps_first_and_last_do_not_depend_on_the_order_of_arrivals() {
        let mut arrivals = [(0, 10, 1000, 2000), (1, 10, 1000, 2600), (1, 10, 1000, 3000), (0, 10, 1000, 2500)];
        for _ in 0..4 {
            arrivals.rotate_left(1);
            let r = record(3, &arrivals);
            assert_eq!((r.first_ns, r.last_ns, r.straggler), (2000, 3000, Some(DriveId(1))));
            assert_eq!((r.gap_drive_ns, r.gap_read_ns, r.bytes), (500, 400, 40));
        }
    }

    #[test]
    fn causes_follow_the_documented_rules() {
        let cause = |arrivals: &[_]| record(2, arrivals).cause;
        assert_eq!(cause(&[]), Cause::None);
        assert_eq!(cause(&[(0, 10, 1000, 2000), (1, 10, 1000, 2015)]), Cause::Tie);
        assert_eq!(cause(&[(0, 10, 1000, 2000), (1, 10, 2100, 3000)]), Cause::QueuedLate);
        assert_eq!(cause(&[(0, 10, 1000, 2000), (1, 20, 1000, 3000)]), Cause::BigShare);
        assert_eq!(cause(&[(0, 10, 1000, 2000), (1, 10, 1000, 3000)]), Cause::DeviceSlow);
        assert_eq!(cause(&[(1, 10, 1000, 3000)]), Cause::BigShare, "one drive had it all");
    }

    #[test]
    fn one_read_has_no_gaps() {
        let r = record(2, &[(1, 10, 1000, 3000)]);
        assert_eq!((r.gap_drive_ns, r.gap_read_ns, r.first_ns, r.last_ns), (0, 0, 3000, 3000));
        let none = record(2, &[]);
        assert_eq!((none.first_ns, none.last_ns, none.straggler), (1000, 1000, None));
    }

    #[test]
    fn a_part_is_a_read_but_the_first_expert_is_a_whole_one_and_a_hedge_that_decides_is_the_cause() {
        let mut tally = Tally::new(2);
        let part = |drive, completed_ns, hedge| Arrived {
            drive: DriveId(drive),
            payload_bytes: 5,
            queued_ns: 1000,
            completed_ns,
            hedge,
            ..BLANK
        };
        tally.arrived(part(0, 1500, false));
        tally.arrived(part(1, 2000, true));
        tally.complete(2000);
        let step = StepInfo { step: 1, phase: Phase::Decode, pos: 4, rows: 1 };
        let opened = Opened { barrier: 3, step, layer: LayerId(2), width: 1, open_ns: 1000 };
        let r = tally.record(&opened, 9999);
        assert_eq!((r.first_ns, r.last_ns, r.bytes, r.gap_read_ns), (2000, 2000, 10, 500));
        assert_eq!(r.cause, Cause::Hedged);
    }
}
