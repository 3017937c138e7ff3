//! The barrier that is open, as numbers: what arrived when and from where, and the record that it becomes. Pure.

use crate::ids::{DriveId, LayerId};
use crate::source::StepInfo;
use crate::trace::events::{BarrierRecord, Cause};

/// Two drives that ended within this share of the barrier's whole wait (1/50 = 2 %) ended together.
const TIE_DIVISOR: u64 = 50;

/// A read that has arrived: an expert, or a part of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived {
    pub drive: DriveId,
    pub payload_bytes: u64,
    pub queued_ns: u64,
    pub completed_ns: u64,
    /// A hedge that came before the read it was to help.
    pub hedge: bool,
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
        Self { by_drive: vec![Share::default(); drives], last: None, second_ns: None, first_ns: None, stall_ns: 0 }
    }

    /// Starts over, without allocating.
    pub fn reset(&mut self) {
        self.by_drive.fill(Share::default());
        (self.last, self.second_ns, self.first_ns, self.stall_ns) = (None, None, None, 0);
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
            hits: 0,
            prefetch_hits: 0,
            bytes: self.by_drive.iter().map(|s| s.bytes).sum(),
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

    /// Why the last read was last, by the first rule that holds:
    /// 1. nothing was read: none;
    /// 2. it was a hedge: hedged;
    /// 3. two or more drives served, and the last two ended within 2 % of the whole wait of each other: tie;
    /// 4. the read was queued in the second half of the wait, because it waited for a slot or for another copy to
    ///    fail: queued_late;
    /// 5. its drive delivered more bytes than any other (or alone): big_share;
    /// 6. otherwise the drive was slower than drives that had as much to do: device_slow.
    fn cause(&self, open_ns: u64, gap_drive_ns: Option<u64>) -> Cause {
        let Some(last) = self.last else { return Cause::None };
        if last.hedge {
            return Cause::Hedged;
        }
        let wait_ns = last.completed_ns.saturating_sub(open_ns);
        if gap_drive_ns.is_some_and(|gap| gap <= wait_ns / TIE_DIVISOR) {
            return Cause::Tie;
        }
        if last.queued_ns.saturating_sub(open_ns) > wait_ns / 2 {
            return Cause::QueuedLate;
        }
        let own = self.by_drive[last.drive.index()].bytes;
        let most_of_others =
            self.by_drive.iter().enumerate().filter(|(d, _)| *d != last.drive.index()).map(|(_, s)| s.bytes).max();
        if most_of_others.is_none_or(|most| own > most) { Cause::BigShare } else { Cause::DeviceSlow }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Phase;

    fn record(drives: usize, arrivals: &[(u8, u64, u64, u64)]) -> BarrierRecord {
        let step = StepInfo { step: 1, phase: Phase::Decode, pos: 4, rows: 1 };
        let opened = Opened { barrier: 3, step, layer: LayerId(2), width: arrivals.len() as u32, open_ns: 1000 };
        let mut tally = Tally::new(drives);
        tally.arrived(Arrived { drive: DriveId(0), payload_bytes: 1, queued_ns: 0, completed_ns: 1, hedge: false });
        tally.reset();
        for &(drive, payload_bytes, queued_ns, completed_ns) in arrivals {
            tally.arrived(Arrived { drive: DriveId(drive), payload_bytes, queued_ns, completed_ns, hedge: false });
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
