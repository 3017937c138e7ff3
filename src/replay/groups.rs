//! The sums behind the tables of a trace report, and the rows that they become. Pure arithmetic on what an attribution
//! says; nothing here reads a file.

use super::attribution::Attribution;
use super::rates::BarrierBounds;
use crate::ids::DriveId;
use crate::trace::events::{BarrierRecord, Cause, Purpose, ReadEvent};
use hdrhistogram::Histogram;
use serde::Serialize;

/// Durations: count, sum, and quantiles of three significant digits.
#[derive(Clone, Debug, Default)]
pub struct Durations {
    histogram: Option<Histogram<u64>>,
    sum_ns: u128,
}

/// Durations as numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DurationRow {
    /// Sum.
    pub total_ns: u64,
    /// Arithmetic mean.
    pub mean_ns: u64,
    /// Median.
    pub p50_ns: u64,
    /// 90th percentile.
    pub p90_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// Largest.
    pub max_ns: u64,
}

impl Durations {
    /// Adds one.
    pub fn add(&mut self, ns: u64) {
        if self.histogram.is_none() {
            self.histogram = Histogram::new(3).ok();
        }
        if let Some(histogram) = &mut self.histogram {
            // it grows as needed; what 64 bits cannot index counts at the top
            if histogram.record(ns).is_err() {
                histogram.saturating_record(ns);
            }
        }
        self.sum_ns += u128::from(ns);
    }

    /// The numbers; zeros when nothing was added.
    pub fn row(&self) -> DurationRow {
        let Some(h) = self.histogram.as_ref().filter(|h| !h.is_empty()) else { return DurationRow::default() };
        DurationRow {
            total_ns: u64::try_from(self.sum_ns).unwrap_or(u64::MAX),
            mean_ns: u64::try_from(self.sum_ns / u128::from(h.len())).unwrap_or(u64::MAX),
            p50_ns: h.value_at_quantile(0.5),
            p90_ns: h.value_at_quantile(0.9),
            p99_ns: h.value_at_quantile(0.99),
            max_ns: h.max(),
        }
    }
}

/// Reads of one drive and one purpose.
#[derive(Clone, Debug, Default)]
pub struct ReadSums {
    reads: u64,
    failed: u64,
    wasted: u64,
    bytes: u64,
    landed_last: u64,
    tied: u64,
    alone: u64,
    queue: Durations,
    service: Durations,
    gap: Durations,
}

/// A row of the table by drive and purpose.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DriveRow {
    /// The drive's name.
    pub drive: String,
    /// Whether its pace was emulated.
    pub emulated: bool,
    /// What the reads were for.
    pub purpose: Purpose,
    /// Reads that succeeded.
    pub reads: u64,
    /// Reads that did not.
    pub failed: u64,
    /// Successful reads that nobody used.
    pub wasted: u64,
    /// Bytes of successful reads.
    pub bytes: u64,
    /// Barriers that ended with such a read, ties left out.
    pub landed_last: u64,
    /// Its share of all barriers that waited.
    pub landed_last_share: f64,
    /// Barriers in which it tied with another drive for the last place.
    pub tied: u64,
    /// Of `landed_last`: barriers in which no other drive delivered anything after open, so that there is no gap.
    pub alone: u64,
    /// Queued to submitted, of successful reads.
    pub queue: DurationRow,
    /// Submitted to completed, of successful reads.
    pub service: DurationRow,
    /// How far behind the next-to-last drive it was when it landed last.
    pub gap: DurationRow,
}

impl ReadSums {
    /// Counts a read.
    pub fn read(&mut self, read: &ReadEvent) {
        use crate::trace::events::{Outcome, ReadResult};
        if read.result != ReadResult::Ok {
            self.failed += 1;
            return;
        }
        self.reads += 1;
        self.wasted += u64::from(read.outcome == Outcome::Wasted);
        self.bytes = self.bytes.saturating_add(read.bytes);
        self.queue.add(read.submitted_ns.saturating_sub(read.queued_ns));
        self.service.add(read.completed_ns.saturating_sub(read.submitted_ns));
    }

    /// Counts a barrier that it ended.
    pub fn last(&mut self, gap_drive_ns: Option<u64>) {
        self.landed_last += 1;
        match gap_drive_ns {
            Some(gap) => self.gap.add(gap),
            None => self.alone += 1,
        }
    }

    /// Counts a barrier that it ended together with another drive.
    pub fn tied(&mut self) {
        self.tied += 1;
    }

    /// The row; `waited` is the number of barriers that waited for any drive.
    pub fn row(&self, drive: &str, emulated: bool, purpose: Purpose, waited: u64) -> DriveRow {
        DriveRow {
            drive: drive.to_owned(),
            emulated,
            purpose,
            reads: self.reads,
            failed: self.failed,
            wasted: self.wasted,
            bytes: self.bytes,
            landed_last: self.landed_last,
            landed_last_share: share(self.landed_last, waited),
            tied: self.tied,
            alone: self.alone,
            queue: self.queue.row(),
            service: self.service.row(),
            gap: self.gap.row(),
        }
    }
}

/// A part as a share of a whole; 0 of 0 is 0.
pub fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Barriers of one layer, width class, phase, or all of them.
#[derive(Clone, Debug, Default)]
pub struct BarrierSums {
    barriers: u64,
    waited: u64,
    ties: u64,
    alone: u64,
    bytes: u64,
    stall_ns: u64,
    wait_ns: u64,
    before_ns: u64,
    queue_ns: u64,
    service_ns: u64,
    gap_drive: Durations,
    gap_read: Durations,
    last: Vec<u64>,
    bounded_wait_ns: u64,
    bound_layout_ns: Option<u64>,
    bound_drives_ns: u64,
    bounded: u64,
}

/// A row of a table of barriers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BarrierRow {
    /// What is in it: a layer, a width class, a phase, or `all`.
    pub group: String,
    /// Barriers.
    pub barriers: u64,
    /// Barriers that waited for a read.
    pub waited: u64,
    /// Barriers in which two drives ended together.
    pub ties: u64,
    /// Barriers in which one drive alone delivered after open.
    pub alone: u64,
    /// Bytes read, as the records say.
    pub bytes: u64,
    /// Time in which compute had nothing to do, as the records say.
    pub stall_ns: u64,
    /// From open to the last arrival.
    pub wait_ns: u64,
    /// Part of the wait before the deciding read was queued.
    pub before_ns: u64,
    /// Part between its queueing and its hand-over.
    pub queue_ns: u64,
    /// Part at the drive.
    pub service_ns: u64,
    /// Behind the next-to-last drive.
    pub gap_drive: DurationRow,
    /// Behind the next-to-last read.
    pub gap_read: DurationRow,
    /// Barriers by the drive that landed last alone, in the order of the drives.
    pub landed_last: Vec<u64>,
    /// Barriers for which the bounds are known.
    pub bounded: u64,
    /// Their waits.
    pub bounded_wait_ns: u64,
    /// Their bounds with the homes given.
    pub bound_layout_ns: Option<u64>,
    /// Their bounds as if everything were everywhere.
    pub bound_drives_ns: Option<u64>,
}

impl BarrierSums {
    /// Counts a barrier.
    pub fn add(&mut self, record: &BarrierRecord, seen: &Attribution, bounds: Option<BarrierBounds>) {
        self.barriers += 1;
        self.bytes = self.bytes.saturating_add(record.bytes);
        self.stall_ns = self.stall_ns.saturating_add(record.stall_ns);
        let Some(last) = seen.last else { return };
        self.waited += 1;
        self.wait_ns = self.wait_ns.saturating_add(seen.wait.total_ns);
        self.before_ns = self.before_ns.saturating_add(seen.wait.before_ns);
        self.queue_ns = self.queue_ns.saturating_add(seen.wait.queue_ns);
        self.service_ns = self.service_ns.saturating_add(seen.wait.service_ns);
        match seen.gap_drive_ns {
            Some(gap) => self.gap_drive.add(gap),
            None => self.alone += 1,
        }
        if let Some(gap) = seen.gap_read_ns {
            self.gap_read.add(gap);
        }
        if seen.cause == Cause::Tie {
            self.ties += 1
        } else {
            self.landed(last.drive)
        }
        if let Some(bounds) = bounds {
            self.bounded_wait_ns = self.bounded_wait_ns.saturating_add(seen.wait.total_ns);
            self.bound_drives_ns = self.bound_drives_ns.saturating_add(bounds.drives_ns);
            let so_far = if self.bounded == 0 { Some(0) } else { self.bound_layout_ns };
            self.bound_layout_ns = so_far.zip(bounds.layout_ns).map(|(a, b)| a.saturating_add(b));
            self.bounded += 1;
        }
    }

    fn landed(&mut self, drive: DriveId) {
        if self.last.len() <= drive.index() {
            self.last.resize(drive.index() + 1, 0);
        }
        self.last[drive.index()] += 1;
    }

    /// Barriers that waited.
    pub fn waited(&self) -> u64 {
        self.waited
    }

    /// The row called `group`, for a trace over `drives` drives.
    pub fn row(&self, group: impl Into<String>, drives: usize) -> BarrierRow {
        let mut landed_last = self.last.clone();
        landed_last.resize(drives.max(landed_last.len()), 0);
        BarrierRow {
            group: group.into(),
            barriers: self.barriers,
            waited: self.waited,
            ties: self.ties,
            alone: self.alone,
            bytes: self.bytes,
            stall_ns: self.stall_ns,
            wait_ns: self.wait_ns,
            before_ns: self.before_ns,
            queue_ns: self.queue_ns,
            service_ns: self.service_ns,
            gap_drive: self.gap_drive.row(),
            gap_read: self.gap_read.row(),
            landed_last,
            bounded: self.bounded,
            bounded_wait_ns: self.bounded_wait_ns,
            bound_layout_ns: self.bound_layout_ns,
            bound_drives_ns: (self.bounded > 0).then_some(self.bound_drives_ns),
        }
    }
}
