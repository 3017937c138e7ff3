//! Where the time of a token went: compute, one drive, latency and queueing, or all drives together. Pure.
//!
//! **The arithmetic.** `W` is the wall time of decoding. Every decode or verify barrier has `stall`, the time in which
//! compute had nothing to do; it is cut into three, in this order, so that the parts sum to it:
//!
//! 1. `one drive` = min(stall, gap behind the next-to-last drive): at the end of the wait only one drive still worked, so
//!    this is what a perfect balance over the drives would save. A barrier with a single drive has no such part.
//! 2. `latency and queueing` = min(rest, delay of the drive that landed last), where the delay is the time from open to
//!    that drive's first hand-over plus its fixed cost before the first byte. No rate, however high, removes it. The
//!    fixed costs are arguments: measured rates if there are any, else [`FixedCost`], fitted to the trace. With no fixed
//!    cost known for a drive only the time to the hand-over counts here, and the verdict says so.
//! 3. `all drives` = what remains: bytes that flowed while the drives worked side by side. More or faster drives
//!    shorten it.
//!
//! `compute` = W - sum of stalls. All shares are of W. With stalls below [`NOT_BOUND_SHARE`] of W the verdict is "not
//! storage-bound": without any wait the text would come at most 1 / (1 - share) as fast, and the ratio is given.
//! Otherwise the largest of the three storage parts names it.

use crate::ids::DriveId;
use crate::source::Phase;
use crate::trace::events::BarrierRecord;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Below this share of waiting, storage is not what bounds decoding.
pub const NOT_BOUND_SHARE: f64 = 0.10;

/// What bounds decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Waiting is a small part of the time.
    NotStorage,
    /// The drives together.
    AllDrives,
    /// Mostly the one drive that lands last.
    OneDrive,
    /// Fixed costs and late hand-overs.
    Latency,
}

/// The verdict and its numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// What bounds decoding.
    pub bound: Bound,
    /// Drive with the largest `one drive` part, if any has one.
    pub drive: Option<DriveId>,
    /// That drive's part of `one_drive_ns`.
    pub drive_ns: u64,
    /// Wall time of decoding.
    pub wall_ns: u64,
    /// Time without a wait.
    pub compute_ns: u64,
    /// Wait for bytes from drives side by side.
    pub all_drives_ns: u64,
    /// Wait for the last drive alone.
    pub one_drive_ns: u64,
    /// Wait for fixed costs and hand-overs.
    pub latency_ns: u64,
    /// Barriers that were counted.
    pub barriers: u64,
    /// Speed without any wait, as a multiple of now.
    pub ceiling: f64,
    /// Whether a fixed cost was known for every drive that landed last.
    pub latency_known: bool,
}

impl Verdict {
    /// Of a run over `wall_ns` that could wait for no drive, because no expert came from one.
    pub fn all_compute(wall_ns: u64) -> Option<Self> {
        (wall_ns > 0).then_some(Self {
            bound: Bound::NotStorage,
            drive: None,
            drive_ns: 0,
            wall_ns,
            compute_ns: wall_ns,
            all_drives_ns: 0,
            one_drive_ns: 0,
            latency_ns: 0,
            barriers: 0,
            ceiling: 1.0,
            latency_known: true,
        })
    }

    /// Of several runs of the same thing, all parts added up. The drive is that of the largest part, with its part alone.
    pub fn of_all<'a>(verdicts: impl Iterator<Item = &'a Self>) -> Option<Self> {
        verdicts
            .cloned()
            .reduce(|a, b| Self {
                wall_ns: a.wall_ns + b.wall_ns,
                compute_ns: a.compute_ns + b.compute_ns,
                all_drives_ns: a.all_drives_ns + b.all_drives_ns,
                one_drive_ns: a.one_drive_ns + b.one_drive_ns,
                latency_ns: a.latency_ns + b.latency_ns,
                barriers: a.barriers + b.barriers,
                latency_known: a.latency_known && b.latency_known,
                drive: if b.drive_ns > a.drive_ns { b.drive } else { a.drive },
                drive_ns: a.drive_ns.max(b.drive_ns),
                ..a
            })
            .map(Self::named)
    }

    /// With `bound` and `ceiling` as the parts say.
    fn named(self) -> Self {
        let (stall_ns, wall_ns) = (self.stall_ns(), self.wall_ns);
        let bound = match self.all_drives_ns.max(self.one_drive_ns).max(self.latency_ns) {
            _ if self.share(stall_ns) < NOT_BOUND_SHARE => Bound::NotStorage,
            most if most == self.all_drives_ns => Bound::AllDrives,
            most if most == self.one_drive_ns => Bound::OneDrive,
            _ => Bound::Latency,
        };
        Self { bound, ceiling: wall_ns as f64 / wall_ns.saturating_sub(stall_ns).max(1) as f64, ..self }
    }

    /// A part as a share of the wall time.
    pub fn share(&self, part_ns: u64) -> f64 {
        if self.wall_ns == 0 { 0.0 } else { part_ns as f64 / self.wall_ns as f64 }
    }

    /// The three storage parts together.
    pub fn stall_ns(&self) -> u64 {
        self.all_drives_ns + self.one_drive_ns + self.latency_ns
    }
}

/// Sums over the barriers of decoding; add them one by one, then ask for the verdict.
#[derive(Clone, Debug, Default)]
pub struct WaitSums {
    barriers: u64,
    stall_ns: u64,
    by_drive: Vec<DriveSums>,
    /// Stalls of barriers that no drive decided.
    unattributed_ns: u64,
    first_open_ns: Option<u64>,
    last_close_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct DriveSums {
    alone_ns: u64,
    /// Time to the first hand-over, capped by what remains of the stall.
    handover_ns: u64,
    rest_ns: u64,
    barriers: u64,
}

impl WaitSums {
    /// Adds a barrier; barriers of prefill are passed over. `last` is the drive that landed last, `gap_drive_ns` how far
    /// behind the next-to-last drive it was, `handover_ns` how long after open that drive got its first read.
    pub fn add(&mut self, record: &BarrierRecord, last: Option<DriveId>, gap_drive_ns: u64, handover_ns: u64) {
        if record.phase == Phase::Prefill {
            return;
        }
        self.barriers += 1;
        self.stall_ns = self.stall_ns.saturating_add(record.stall_ns);
        self.first_open_ns.get_or_insert(record.open_ns);
        self.last_close_ns = self.last_close_ns.max(record.close_ns);
        let Some(drive) = last else {
            self.unattributed_ns = self.unattributed_ns.saturating_add(record.stall_ns);
            return;
        };
        if self.by_drive.len() <= drive.index() {
            self.by_drive.resize(drive.index() + 1, DriveSums::default());
        }
        let sums = &mut self.by_drive[drive.index()];
        let alone_ns = record.stall_ns.min(gap_drive_ns);
        let handover_ns = (record.stall_ns - alone_ns).min(handover_ns);
        sums.alone_ns = sums.alone_ns.saturating_add(alone_ns);
        sums.handover_ns = sums.handover_ns.saturating_add(handover_ns);
        sums.rest_ns = sums.rest_ns.saturating_add(record.stall_ns - alone_ns - handover_ns);
        sums.barriers += 1;
    }

    /// From the first open to the last close of what was added: the wall time that a trace knows of. What a pass does
    /// before its first and after its last barrier is missing at both ends.
    pub fn spanned_ns(&self) -> u64 {
        self.first_open_ns.map_or(0, |open| self.last_close_ns.saturating_sub(open))
    }

    /// The verdict over `wall_ns` of decoding; `fixed_ns[d]` is the fixed cost of drive `d`. `None` without barriers or
    /// wall time.
    pub fn verdict(&self, wall_ns: u64, fixed_ns: &[Option<u64>]) -> Option<Verdict> {
        if self.barriers == 0 || wall_ns == 0 {
            return None;
        }
        let fixed = |d: usize| fixed_ns.get(d).copied().flatten();
        // the cap of part 2 is taken over the barriers of a drive together, which only sums allow
        let latency = |(d, s): (usize, &DriveSums)| {
            s.handover_ns + fixed(d).unwrap_or(0).saturating_mul(s.barriers).min(s.rest_ns)
        };
        // a wall time that is shorter than the stalls (a wrong argument) must not give shares above 1
        let stall_ns = self.stall_ns.min(wall_ns);
        let one_drive_ns = self.by_drive.iter().map(|s| s.alone_ns).sum::<u64>().min(stall_ns);
        let latency_ns = self.by_drive.iter().enumerate().map(latency).sum::<u64>().min(stall_ns - one_drive_ns);
        let all_drives_ns = stall_ns - one_drive_ns - latency_ns;
        let worst = self.by_drive.iter().enumerate().max_by_key(|(d, s)| (s.alone_ns, std::cmp::Reverse(*d)));
        let worst = worst.filter(|(_, s)| s.alone_ns > 0);
        let verdict = Verdict {
            drive: worst.map(|(d, _)| DriveId(d as u8)),
            drive_ns: worst.map_or(0, |(_, s)| s.alone_ns),
            wall_ns,
            compute_ns: wall_ns - stall_ns,
            all_drives_ns,
            one_drive_ns,
            latency_ns,
            barriers: self.barriers,
            latency_known: self.by_drive.iter().enumerate().all(|(d, s)| s.barriers == 0 || fixed(d).is_some()),
            ..Verdict::all_compute(wall_ns)?
        };
        Some(verdict.named())
    }
}

/// The verdict from barrier records alone, as a run has them: the records' own stragglers and gaps, and no time to the
/// hand-over.
pub fn verdict<'a>(
    barriers: impl IntoIterator<Item = &'a BarrierRecord>,
    wall_ns: u64,
    fixed_ns: &[Option<u64>],
) -> Option<Verdict> {
    let mut sums = WaitSums::default();
    for record in barriers {
        sums.add(record, record.straggler, record.gap_drive_ns, 0);
    }
    sums.verdict(wall_ns, fixed_ns)
}

/// A drive's fixed cost and rate, fitted to its part of each barrier: time from its first hand-over to its last arrival
/// = fixed + bytes / rate. Weighted least squares over the **median** time of each number of bytes, because single slow
/// reads are many times slower. The figures describe one drive under its real load, so the rate is a joint one.
#[derive(Clone, Debug, Default)]
pub struct FixedCost {
    /// Times by bytes.
    times: BTreeMap<u64, Histogram<u64>>,
}

/// Numbers of bytes that are told apart; with equal experts there are as many as experts of one barrier on one drive.
const MAX_SIZES: usize = 16;
/// Barriers of one size that make a median worth using.
const MIN_PER_SIZE: u64 = 4;

impl FixedCost {
    /// Adds one barrier of the drive.
    pub fn add(&mut self, bytes: u64, span_ns: u64) {
        if !self.times.contains_key(&bytes) {
            if self.times.len() >= MAX_SIZES {
                return;
            }
            let Ok(histogram) = Histogram::new(2) else { return };
            self.times.insert(bytes, histogram);
        }
        if let Some(histogram) = self.times.get_mut(&bytes) {
            // times beyond what a histogram can index (centuries) say nothing about a drive
            let _ = histogram.record(span_ns);
        }
    }

    /// Fixed cost in nanoseconds and rate in bytes per second, once there are 4 barriers each of two or more sizes, and
    /// if more bytes took longer. The fixed cost is at most the smallest median.
    pub fn fitted(&self) -> Option<(u64, f64)> {
        let usable = self.times.iter().filter(|(_, h)| h.len() >= MIN_PER_SIZE);
        let points: Vec<(f64, f64, f64)> =
            usable.map(|(bytes, h)| (h.len() as f64, *bytes as f64, h.value_at_quantile(0.5) as f64)).collect();
        Self::line(&points)
    }

    /// The line of least squares through points of (weight, bytes, nanoseconds): fixed cost and bytes per second.
    pub(super) fn line(points: &[(f64, f64, f64)]) -> Option<(u64, f64)> {
        let weight: f64 = points.iter().map(|p| p.0).sum();
        let bytes = points.iter().map(|p| p.0 * p.1).sum::<f64>() / weight;
        let ns = points.iter().map(|p| p.0 * p.2).sum::<f64>() / weight;
        let bytes_bytes: f64 = points.iter().map(|p| p.0 * (p.1 - bytes).powi(2)).sum();
        let bytes_ns: f64 = points.iter().map(|p| p.0 * (p.1 - bytes) * (p.2 - ns)).sum();
        if points.len() < 2 || bytes_bytes <= 0.0 || bytes_ns <= 0.0 {
            return None;
        }
        let ns_per_byte = bytes_ns / bytes_bytes;
        let smallest = points.iter().map(|p| p.2).fold(f64::INFINITY, f64::min);
        let fixed = (ns - ns_per_byte * bytes).clamp(0.0, smallest);
        Some((fixed.round() as u64, 1e9 / ns_per_byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::LayerId;
    use crate::trace::events::Cause;

    fn record(phase: Phase, open_ns: u64, wait_ns: u64, gap_drive_ns: u64) -> BarrierRecord {
        BarrierRecord {
            barrier: open_ns,
            step: 0,
            phase,
            pos: 0,
            rows: 1,
            layer: LayerId(0),
            width: 4,
            hits: 0,
            prefetch_hits: 0,
            bytes: 4,
            open_ns,
            first_ns: open_ns,
            last_ns: open_ns + wait_ns,
            close_ns: open_ns + wait_ns,
            stall_ns: wait_ns,
            straggler: Some(DriveId(1)),
            gap_drive_ns,
            gap_read_ns: 0,
            bound_layout_ns: None,
            bound_drives_ns: None,
            cause: Cause::DeviceSlow,
        }
    }

    #[test]
    fn the_parts_are_those_of_the_arithmetic_and_sum_to_the_wall_time() {
        // two barriers of 40 and 20 ns; the last drive alone 10 and 25 -> min(25, stall 20) = 20
        let barriers = [
            record(Phase::Prefill, 0, 999, 999),
            record(Phase::Decode, 1000, 40, 10),
            record(Phase::Verify, 2000, 20, 25),
        ];
        let v = verdict(&barriers, 100, &[None, Some(5)]).unwrap();
        // what is left: 30 of the first, 0 of the second; the fixed cost is 5 for each of two barriers, capped by 30
        assert_eq!((v.one_drive_ns, v.latency_ns, v.all_drives_ns, v.compute_ns), (30, 10, 20, 40));
        assert_eq!(v.one_drive_ns + v.latency_ns + v.all_drives_ns + v.compute_ns, v.wall_ns);
        assert_eq!((v.bound, v.drive, v.drive_ns, v.barriers), (Bound::OneDrive, Some(DriveId(1)), 30, 2));
        assert!((v.ceiling - 2.5).abs() < 1e-12 && v.latency_known);
        let v = verdict(&barriers, 100, &[]).unwrap();
        assert_eq!((v.latency_ns, v.all_drives_ns, v.latency_known), (0, 30, false));
    }

    #[test]
    fn each_verdict_has_its_numbers() {
        let all =
            |wait, gap, wall, fixed| verdict(&[record(Phase::Decode, 0, wait, gap)], wall, &[None, fixed]).unwrap();
        assert_eq!(all(9, 9, 100, None).bound, Bound::NotStorage);
        assert_eq!(all(10, 0, 100, None).bound, Bound::AllDrives);
        assert_eq!(all(50, 30, 100, Some(1)).bound, Bound::OneDrive);
        assert_eq!(all(50, 10, 100, Some(30)).bound, Bound::Latency);
        assert_eq!(verdict(&[], 100, &[]), None);
        assert_eq!(verdict(&[record(Phase::Decode, 0, 5, 0)], 0, &[]), None);
        let short = all(50, 40, 30, Some(30));
        assert_eq!((short.compute_ns, short.one_drive_ns, short.latency_ns, short.all_drives_ns), (0, 30, 0, 0));
    }

    #[test]
    fn time_to_the_hand_over_is_latency() {
        let mut sums = WaitSums::default();
        sums.add(&record(Phase::Decode, 100, 50, 10), Some(DriveId(0)), 10, 15);
        sums.add(&record(Phase::Decode, 200, 50, 10), Some(DriveId(0)), 10, 60);
        assert_eq!(sums.spanned_ns(), 150);
        let v = sums.verdict(150, &[None]).unwrap();
        assert_eq!((v.one_drive_ns, v.latency_ns, v.all_drives_ns, v.compute_ns), (20, 15 + 40, 25, 50));
    }

    #[test]
    fn a_fit_finds_the_drive_behind_its_noise() {
        let mut fit = FixedCost::default();
        for i in 0..200u64 {
            let experts = 1 + i % 4;
            // 20 MB/s after 700 us; one time in ten it takes 30 ms more
            fit.add(experts * 26_000, 700_000 + experts * 1_300_000 + if i % 10 == 3 { 30_000_000 } else { 0 });
        }
        let (fixed_ns, bytes_per_s) = fit.fitted().unwrap();
        assert!(fixed_ns.abs_diff(700_000) < 40_000, "{fixed_ns}");
        assert!((bytes_per_s / 20e6 - 1.0).abs() < 0.02, "{bytes_per_s}");
        let mut one_size = FixedCost::default();
        (0..50).for_each(|i| one_size.add(26_000, 1_000_000 + i));
        assert_eq!(one_size.fitted(), None, "one size shows no rate");
    }
}
