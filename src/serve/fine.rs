//! Bytes of each drive in windows of 10 ms over the last seconds, from the reads that ended. A read's bytes are spread evenly over the
//! time from its submission to its completion, so that a window shows what a drive was busy with and not only what ended in it; no
//! byte is lost or doubled by that. Memory of a fixed size; knows no clock.

use crate::trace::events::{ReadEvent, ReadResult};
use crate::trace::windows::interpolate;
use serde::Serialize;

/// Length of a window.
pub const WINDOW_NS: u64 = 10_000_000;
/// Windows that are kept: 6 s, a little more than the page shows.
const WINDOWS: usize = 600;

/// The windows of all drives.
pub struct Fine {
    /// By drive a ring: window number `n` lies at `n % WINDOWS`.
    rings: Vec<Vec<u64>>,
    /// Number of the newest window.
    newest: u64,
}

/// Windows as they are shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FineShown {
    /// Where the first one begins, in milliseconds of the clock that windows of 100 ms have too.
    pub from_ms: u64,
    /// Length of each, in milliseconds.
    pub step_ms: u64,
    /// By drive and window, bytes. The newest windows grow while reads are under way.
    pub bytes: Vec<Vec<u64>>,
    /// Reads that are in no window, because more ended between two looks than are kept.
    pub lost: u64,
}

impl Fine {
    /// Of so many drives, from time 0 on.
    pub fn new(drives: usize) -> Self {
        Self { rings: vec![vec![0; WINDOWS]; drives], newest: 0 }
    }

    /// It is `now_ns`: windows up to there begin, empty.
    pub fn advance(&mut self, now_ns: u64) {
        let newest = now_ns / WINDOW_NS;
        let begun = newest.saturating_sub(self.newest).min(WINDOWS as u64);
        for window in (newest + 1 - begun)..=newest {
            self.rings.iter_mut().for_each(|ring| ring[window as usize % WINDOWS] = 0);
        }
        self.newest = self.newest.max(newest);
    }

    /// A read has ended. What lies before the oldest window is left out.
    pub fn add(&mut self, read: &ReadEvent) {
        if read.result != ReadResult::Ok {
            return;
        }
        self.advance(read.completed_ns);
        let Some(ring) = self.rings.get_mut(read.drive.index()) else { return };
        // an end at an edge belongs to the window before it
        let to_ns = read.completed_ns.max(1);
        let from_ns = read.submitted_ns.min(to_ns - 1);
        let oldest = (self.newest + 1).saturating_sub(WINDOWS as u64);
        for window in oldest.max(from_ns / WINDOW_NS)..=(to_ns - 1) / WINDOW_NS {
            let (begin, end) = (window * WINDOW_NS, (window + 1) * WINDOW_NS);
            let by = |at: u64| interpolate((from_ns, 0), (to_ns, read.bytes), at.clamp(from_ns, to_ns));
            ring[window as usize % WINDOWS] += by(end) - by(begin);
        }
    }

    /// The windows, the oldest first; `lost` reads are in none.
    pub fn shown(&self, lost: u64) -> FineShown {
        let oldest = (self.newest + 1).saturating_sub(WINDOWS as u64);
        let of = |ring: &Vec<u64>| (oldest..=self.newest).map(|window| ring[window as usize % WINDOWS]).collect();
        FineShown {
            from_ms: oldest * (WINDOW_NS / 1_000_000),
            step_ms: WINDOW_NS / 1_000_000,
            bytes: self.rings.iter().map(of).collect(),
            lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{DriveId, ExpertId, LayerId};
    use crate::trace::events::{Outcome, Purpose};

    const MS: u64 = 1_000_000;

    fn read(drive: u8, bytes: u64, submitted_ns: u64, completed_ns: u64) -> ReadEvent {
        ReadEvent {
            step: 0,
            layer: LayerId(0),
            expert: ExpertId(0),
            drive: DriveId(drive),
            replica: 0,
            part: 0,
            parts: 1,
            offset: 0,
            bytes,
            purpose: Purpose::Demand,
            issued_in: 0,
            barrier: None,
            queued_ns: submitted_ns,
            submitted_ns,
            completed_ns,
            result: ReadResult::Ok,
            outcome: Outcome::Demand,
        }
    }

    #[test]
    fn bytes_lie_where_their_read_was_under_way_and_none_is_lost() {
        let mut fine = Fine::new(2);
        fine.add(&read(0, 100, 5 * MS, 25 * MS));
        fine.add(&read(1, 7, 30 * MS, 30 * MS)); // no time at all
        fine.add(&ReadEvent { result: ReadResult::Timeout, ..read(1, 50, 0, 20 * MS) });
        fine.add(&read(9, 50, 0, 20 * MS)); // no such drive
        fine.advance(45 * MS);
        let shown = fine.shown(3);
        assert_eq!((shown.from_ms, shown.step_ms, shown.lost), (0, 10, 3));
        assert_eq!(shown.bytes, [[25, 50, 25, 0, 0], [0, 0, 7, 0, 0]]);
        // three windows share what does not divide
        fine.add(&read(0, 1000, 1, 30 * MS - 1));
        assert_eq!(fine.shown(0).bytes[0].iter().sum::<u64>(), 1100);
    }

    #[test]
    fn the_oldest_windows_go_and_late_reads_count_where_there_is_still_room() {
        let mut fine = Fine::new(1);
        fine.add(&read(0, 10, 0, 10 * MS));
        fine.advance(6_000 * MS);
        assert_eq!((fine.shown(0).from_ms, fine.shown(0).bytes[0].len()), (10, WINDOWS));
        assert_eq!(fine.shown(0).bytes[0].iter().sum::<u64>(), 0, "its window has gone");
        fine.add(&read(0, 20, 0, 20 * MS));
        assert_eq!(fine.shown(0).bytes[0][0], 10, "half of it lies before the oldest window");
        fine.advance(1 << 50);
        assert_eq!(fine.shown(0).bytes[0], [0; WINDOWS]);
        fine.advance(5 * MS);
        assert_eq!(fine.shown(0).bytes[0].len(), WINDOWS, "time does not go back");
    }
}
