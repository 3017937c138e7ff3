//! What a reader is doing now, for whoever looks often: numbers of each drive without its histograms, and the barriers that
//! closed since the last look. Neither allocates inside the lock, so looking disturbs no barrier.

use super::counters::{DriveCounters, ReaderHandle};
use crate::trace::events::{BarrierRecord, ReadEvent};

/// Numbers of one drive since its reader was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriveNow {
    /// Reads that ended: those that delivered, and prefetch reads for nothing.
    pub reads: u64,
    /// Bytes of these reads.
    pub bytes: u64,
    /// Reads that failed or were given up because nothing came.
    pub failed: u64,
    /// Demand leaves it alone.
    pub degraded: bool,
}

impl DriveNow {
    fn of(drive: &DriveCounters) -> Self {
        Self {
            reads: drive.reads + drive.prefetch.wasted.reads + drive.good_probes.reads,
            bytes: drive.read_bytes + drive.prefetch.wasted.bytes + drive.good_probes.bytes,
            failed: drive.errors + drive.timeouts,
            degraded: drive.left_alone,
        }
    }
}

impl ReaderHandle {
    /// Puts numbers of each drive into `out`, by drive id.
    pub fn drives_now(&self, out: &mut Vec<DriveNow>) {
        out.clear();
        out.reserve(self.drives.len());
        let ledger = self.lock();
        out.extend(ledger.counters.drives.iter().map(DriveNow::of));
    }

    /// Shows the barriers that were kept since the last call and forgets them; returns how many have not fitted so far. Shows
    /// none where none are kept (`trace_barriers`).
    pub fn drain_barriers(&self, see: &mut dyn FnMut(&BarrierRecord)) -> u64 {
        let mut ledger = self.lock();
        let Some(trace) = &mut ledger.trace else { return 0 };
        trace.drain_barriers(see);
        trace.lost_barriers()
    }

    /// Puts the reads that were kept since the last call into `out`, in the order in which they ended; returns how many have not
    /// fitted so far. None where none are kept (`trace_reads`); `out` should have room for as many.
    pub fn take_reads(&self, out: &mut Vec<ReadEvent>) -> u64 {
        let mut ledger = self.lock();
        let Some(trace) = &mut ledger.trace else {
            out.clear();
            return 0;
        };
        trace.exchange_reads(out);
        trace.lost_reads()
    }
}
