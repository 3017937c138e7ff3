//! What each drive can do, learnt from this run's own reads. Pure: times and bytes go in, a rate and a fixed cost come
//! out.
//!
//! A *busy period* begins when a read is asked of an idle drive and ends when nothing is in flight on it. Within it the
//! drive has delivered `b` bytes by `t = fixed + b / rate`; each period adds points `(b, t)` to a weighted
//! least-squares line with exponential forgetting, relative to the bytes of the period, so that a long prefill does not
//! outweigh many short decode barriers.
//!
//! Only some completions inside a period are points on that line. A drive that works on several reads at once
//! finishes them together, and at the first of these completions most of the others' bytes have arrived too. So a
//! completion counts only if the next one follows at a distance that its own bytes explain; the last one always does.
//!
//! Periods with a failed or cancelled read teach nothing. One that took much longer than expected counts less, so that a
//! single hiccup does not move the estimate; after several in a row the drive has changed, and what was before is
//! forgotten.

use super::dispatch::DriveLoad;
use crate::drive::profile::{DriveModel, Profile};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// A drive nobody has measured.
const PRIOR: Line = Line { ns_per_byte: 5.0, fixed_ns: 100_000.0 };
/// What one period keeps of the weight of those before it.
const KEEP: f64 = 0.95;
/// Weight of the assumed fixed cost in each period: next to nothing where sizes vary, decisive where they do not.
const FIXED_WEIGHT: f64 = 0.001;
/// Completions of a period that are kept; later ones are added to the last.
const MAX_POINTS: usize = 64;
/// Periods before surprises are mistrusted, and how far one may exceed its prediction.
const SETTLED: u64 = 8;
const SURPRISE: f64 = 3.0;
/// Surprises in a row that mean a change.
const CHANGED_AFTER: u32 = 4;
/// How fast the least cost of a read follows higher ones.
const LEAST_RISES: f64 = 0.02;
/// Barriers without a read after which a drive is believed to be twice as fast as it was last seen, so that a drive that
/// was slow once is tried again.
const DOUBLES_AFTER: f64 = 128.0;

/// A drive's rate where it is known before the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownRate {
    /// Name of the drive in the plan.
    pub drive: String,
    /// Bytes per second while all drives deliver.
    pub bytes_per_s: u64,
    /// Fixed cost of a read, in nanoseconds.
    pub fixed_ns: u64,
}

impl KnownRate {
    /// What `ceiling` measured of the drives in `profile`: the joint rate, and what a read costs before its first byte.
    pub fn of_profile(profile: &Profile) -> Vec<Self> {
        let known = |model: &DriveModel| Self {
            drive: model.name.clone(),
            bytes_per_s: model.bound_rate().bytes_per_s.max(1.0) as u64,
            fixed_ns: model.bound_rate().fixed_ns,
        };
        profile.drives.iter().map(known).collect()
    }
}

/// What a drive was found to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SeenRate {
    /// Bytes per second while delivering.
    pub bytes_per_s: f64,
    /// Fixed cost of a busy period, in nanoseconds.
    pub fixed_ns: f64,
    /// Busy periods that taught it; 0 = the numbers above are a guess or were given.
    pub periods: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    ns_per_byte: f64,
    fixed_ns: f64,
}

/// Weighted sums of a straight-line fit of t over b.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    w: f64,
    b: f64,
    t: f64,
    bb: f64,
    bt: f64,
}

/// Learns one drive.
#[derive(Debug)]
pub struct RateEstimator {
    /// What was believed before the first read.
    began: Line,
    line: Line,
    assumed_fixed_ns: f64,
    /// The least that a period's first read has cost beyond its bytes: what a read costs when nothing disturbs it.
    least_ns: f64,
    /// Bytes and least time of a read that was alone in its period, and of the first to end of several: of the largest.
    lone: Option<(u64, f64)>,
    first: Option<(u64, f64)>,
    /// Bit 0 = the last period, 1 = it was of one read.
    recent_lone: u32,
    overlap: f64,
    given: bool,
    sums: Sums,
    periods: u64,
    surprises: u32,
    barriers_idle: u64,
    // The period that is open.
    in_flight: u32,
    start_ns: u64,
    clean: bool,
    points: Vec<(u64, u64)>,
}

impl RateEstimator {
    /// Knows nothing, or what `known` says, about a drive that carries out `overlap` reads at once.
    pub fn new(known: Option<&KnownRate>, overlap: u32) -> Self {
        let line = known
            .map_or(PRIOR, |k| Line { ns_per_byte: 1e9 / k.bytes_per_s.max(1) as f64, fixed_ns: k.fixed_ns as f64 });
        Self {
            began: line,
            line,
            assumed_fixed_ns: line.fixed_ns,
            least_ns: line.fixed_ns,
            lone: None,
            first: None,
            recent_lone: 0,
            overlap: f64::from(overlap.max(1)),
            given: known.is_some(),
            sums: Sums::default(),
            periods: 0,
            surprises: 0,
            barriers_idle: 0,
            in_flight: 0,
            start_ns: 0,
            clean: true,
            points: Vec::with_capacity(MAX_POINTS),
        }
    }

    /// A read is asked of the drive.
    pub fn queued(&mut self, now_ns: u64) {
        if self.in_flight == 0 {
            self.start_ns = now_ns;
            self.clean = true;
            self.points.clear();
        }
        self.in_flight += 1;
    }

    /// A read has ended; `good` if all its bytes arrived and it was not given up.
    pub fn ended(&mut self, completed_ns: u64, bytes: u64, good: bool) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.clean &= good;
        let full = self.points.len() == MAX_POINTS;
        match self.points.last_mut() {
            _ if !good => {}
            Some(last) if full => *last = (last.0.max(completed_ns), last.1 + bytes),
            _ => self.points.push((completed_ns, bytes)),
        }
        if self.in_flight == 0 && self.clean {
            self.learn();
        }
    }

    /// A read that never reached the drive was taken back.
    pub fn taken_back(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0 && self.clean {
            self.learn();
        }
    }

    /// A barrier has closed.
    pub fn barrier_closed(&mut self) {
        self.barriers_idle += u64::from(self.in_flight == 0);
    }

    fn learn(&mut self) {
        self.points.sort_unstable();
        let Some(&last) = self.points.last() else { return };
        let length = last.0.saturating_sub(self.start_ns) as f64;
        let bytes: u64 = self.points.iter().map(|p| p.1).sum();
        if length <= 0.0 || bytes == 0 {
            return;
        }
        let expected = self.line.fixed_ns + bytes as f64 * self.line.ns_per_byte;
        let settled = self.periods >= SETTLED;
        let surprise = settled && (length > SURPRISE * expected || expected > SURPRISE * length);
        self.surprises = if surprise { self.surprises + 1 } else { 0 };
        let mut trust = if settled { (SURPRISE * expected / length).clamp(0.1, 1.0) } else { 1.0 };
        if self.surprises >= CHANGED_AFTER {
            (self.sums, self.surprises, trust) = (Sums::default(), 0, 1.0);
        }
        self.sums.fade();
        let scale = trust / (bytes as f64 * bytes as f64);
        self.sums.add(scale * FIXED_WEIGHT, 0.0, self.assumed_fixed_ns);
        self.sums.add(scale, bytes as f64, length);
        // Time per byte of the whole period: what a byte explains of a distance.
        let pace = length / bytes as f64;
        let followed = |w: &[(u64, u64)]| (w[1].0 - w[0].0) as f64 >= 0.5 * pace * w[1].1 as f64;
        let inner = self.points.windows(2).filter(|w| followed(w)).count();
        let mut sum = 0;
        for pair in self.points.windows(2) {
            sum += pair[0].1;
            if followed(pair) {
                let t = pair[0].0.saturating_sub(self.start_ns) as f64;
                self.sums.add(scale / inner as f64, sum as f64, t);
            }
        }
        self.line = self.sums.line();
        let first = self.points[0];
        let cost = (first.0.saturating_sub(self.start_ns) as f64 - first.1 as f64 * self.line.ns_per_byte).max(0.0);
        self.least_ns = if cost < self.least_ns { cost } else { self.least_ns + LEAST_RISES * (cost - self.least_ns) };
        let (alone, took) = (self.points.len() == 1, first.0.saturating_sub(self.start_ns) as f64);
        let least = if alone { &mut self.lone } else { &mut self.first };
        if least.is_none_or(|(bytes, ns)| first.1 > bytes || (first.1 == bytes && took < ns)) {
            *least = Some((first.1, took));
        }
        self.recent_lone = self.recent_lone << 1 | u32::from(alone);
        self.periods += 1;
        self.barriers_idle = 0;
    }

    /// Least time, in nanoseconds, that a read of `bytes` has taken alone; where none ever was, the first of several to end.
    pub fn lone_ns(&self, bytes: u64) -> Option<f64> {
        let (of, ns) = self.lone.or(self.first)?;
        Some(ns + bytes.saturating_sub(of) as f64 * self.line.ns_per_byte)
    }

    /// Most of the latest periods were of one read.
    pub fn reads_alone(&self) -> bool {
        u64::from(self.recent_lone.count_ones()) * 2 > self.periods.min(32)
    }

    /// Forgets what it was taught, not what is in flight.
    pub fn restart(&mut self) {
        (self.line, self.least_ns) = (self.began, self.began.fixed_ns);
        (self.sums, self.periods, self.surprises, self.barriers_idle) = (Sums::default(), 0, 0, 0);
        self.recent_lone = 0;
        self.clean = false; // the period that is open belongs to before
    }

    /// What is known now.
    pub fn seen(&self) -> SeenRate {
        let Line { ns_per_byte, fixed_ns } = self.line;
        SeenRate { bytes_per_s: 1e9 / ns_per_byte, fixed_ns, periods: self.periods }
    }

    /// Whether it began with a rate that was given, and has learnt nothing since.
    pub fn trusts_given(&self) -> bool {
        self.given && self.periods == 0
    }

    fn is_known(&self) -> bool {
        self.given || self.periods > 0
    }
}

impl Sums {
    fn fade(&mut self) {
        for sum in [&mut self.w, &mut self.b, &mut self.t, &mut self.bb, &mut self.bt] {
            *sum *= KEEP;
        }
    }

    fn add(&mut self, w: f64, b: f64, t: f64) {
        self.w += w;
        self.b += w * b;
        self.t += w * t;
        self.bb += w * b * b;
        self.bt += w * b * t;
    }

    /// The line of least squares; through the origin where its fixed cost would be negative.
    fn line(&self) -> Line {
        let spread = self.w * self.bb - self.b * self.b;
        let slope = (self.w * self.bt - self.b * self.t) / spread;
        let fixed_ns = (self.t - slope * self.b) / self.w;
        if spread > 0.0 && slope > 0.0 && fixed_ns >= 0.0 {
            return Line { ns_per_byte: slope, fixed_ns };
        }
        let through_origin = if fixed_ns < 0.0 { self.bt / self.bb } else { self.t / self.b };
        Line { ns_per_byte: through_origin, fixed_ns: 0.0 }
    }
}

/// Fills `loads` with what `drives` are believed to do, and have in flight. A drive nobody has measured is believed to be
/// as fast as the fastest that was, so that it gets measured.
pub fn fill_loads(drives: &[RateEstimator], in_flight: &InFlight, loads: &mut Vec<DriveLoad>) {
    let known = drives.iter().filter(|d| d.is_known()).map(|d| d.line.ns_per_byte);
    let fastest = known.reduce(f64::min);
    loads.clear();
    loads.extend(drives.iter().enumerate().map(|(index, drive)| {
        let Line { mut ns_per_byte, fixed_ns } = drive.line;
        let fastest = fastest.unwrap_or(ns_per_byte);
        if !drive.is_known() {
            ns_per_byte = fastest;
        } else if drive.barriers_idle > 0 {
            ns_per_byte = (ns_per_byte * (-(drive.barriers_idle as f64) / DOUBLES_AFTER).exp2()).max(fastest);
        }
        // Reads that go on at once hide each other's latency, all but one share of it.
        let read_ns = drive.least_ns.min(fixed_ns) / drive.overlap;
        DriveLoad { ns_per_byte, fixed_ns, read_ns, in_flight_bytes: in_flight.bytes(index) }
    }));
}

/// Bytes asked of each drive that have not arrived; shared by every pool that reads from these drives.
#[derive(Debug)]
pub struct InFlight(Box<[AtomicU64]>);

impl InFlight {
    /// Nothing in flight on `drives` drives.
    pub fn new(drives: usize) -> Self {
        Self((0..drives).map(|_| AtomicU64::new(0)).collect())
    }

    /// Of one drive.
    pub fn bytes(&self, drive: usize) -> u64 {
        self.0.get(drive).map_or(0, |b| b.load(Ordering::Relaxed))
    }

    /// A read is asked for.
    pub fn add(&self, drive: usize, bytes: u64) {
        self.0[drive].fetch_add(bytes, Ordering::Relaxed);
    }

    /// A read has ended.
    pub fn sub(&self, drive: usize, bytes: u64) {
        self.0[drive].fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// One busy period of a first-come-first-served drive.
    fn period(e: &mut RateEstimator, start_ns: u64, reads: &[u64], ns_per_byte: f64, fixed_ns: f64) {
        reads.iter().for_each(|_| e.queued(start_ns));
        let mut sum = 0;
        for &bytes in reads {
            sum += bytes;
            e.ended(start_ns + (fixed_ns + sum as f64 * ns_per_byte) as u64, bytes, true);
        }
    }

    fn close(seen: f64, want: f64, share: f64) -> bool {
        (seen - want).abs() <= want * share
    }

    #[test]
    fn a_drive_that_serves_in_order_is_found_even_if_its_share_never_varies() {
        let mut e = RateEstimator::new(None, 4);
        (0..30).for_each(|i| period(&mut e, i * 1_000_000_000, &[MIB; 6], 1e3 / 136.0, 200_000.0));
        let seen = e.seen();
        assert!(close(seen.bytes_per_s, 136e6, 0.01) && close(seen.fixed_ns, 200_000.0, 0.05), "{seen:?}");
        assert_eq!(seen.periods, 30);
    }

    #[test]
    fn a_drive_that_shares_its_rate_among_reads_is_found_by_the_ends_of_its_periods() {
        let mut e = RateEstimator::new(None, 4);
        for i in 0..40u64 {
            let (reads, start) = (3 + i % 4, i * 1_000_000_000);
            (0..reads).for_each(|_| e.queued(start));
            let end = start + (150_000.0 + (reads * MIB) as f64 * 10.0) as u64;
            (0..reads).for_each(|_| e.ended(end, MIB, true));
        }
        let seen = e.seen();
        assert!(close(seen.bytes_per_s, 100e6, 0.02) && close(seen.fixed_ns, 150_000.0, 0.25), "{seen:?}");
    }

    #[test]
    fn one_read_at_a_time_gives_the_rate_with_the_assumed_fixed_cost() {
        let known = KnownRate { drive: "a".into(), bytes_per_s: 50_000_000, fixed_ns: 300_000 };
        let mut e = RateEstimator::new(Some(&known), 4);
        assert_eq!(e.seen(), SeenRate { bytes_per_s: 50e6, fixed_ns: 300_000.0, periods: 0 });
        (0..20).for_each(|i| period(&mut e, i * 1_000_000_000, &[MIB], 10.0, 300_000.0));
        assert!(close(e.seen().bytes_per_s, 100e6, 0.01), "{:?}", e.seen());
        let alone = 300_000.0 + MIB as f64 * 10.0;
        assert!(e.reads_alone() && close(e.lone_ns(MIB).unwrap(), alone, 1e-6));
        (20..40).for_each(|i| period(&mut e, i * 1_000_000_000, &[MIB; 3], 30.0, 300_000.0));
        assert!(!e.reads_alone() && close(e.lone_ns(MIB).unwrap(), alone, 1e-6), "the others were not alone");
    }

    #[test]
    fn a_hiccup_is_doubted_a_lasting_change_is_followed_and_failures_teach_nothing() {
        let mut e = RateEstimator::new(None, 4);
        (0..40).for_each(|i| period(&mut e, i * 1_000_000_000, &[MIB; 4], 10.0, 100_000.0));
        period(&mut e, 50_000_000_000, &[MIB; 4], 200.0, 100_000.0);
        assert!(close(e.seen().bytes_per_s, 100e6, 0.15), "one period at a twentieth: {:?}", e.seen());
        (60..120).for_each(|i| period(&mut e, i * 1_000_000_000, &[MIB; 4], 100.0, 100_000.0));
        assert!(close(e.seen().bytes_per_s, 10e6, 0.05), "throttled: {:?}", e.seen());
        let before = e.seen();
        e.queued(200_000_000_000);
        e.queued(200_000_000_000);
        e.ended(200_000_000_010, MIB, true);
        e.ended(200_000_000_020, MIB, false);
        assert_eq!(e.seen(), before);
    }

    #[test]
    fn unmeasured_drives_look_like_the_fastest_and_idle_ones_recover() {
        let mut drives = [RateEstimator::new(None, 4), RateEstimator::new(None, 4), RateEstimator::new(None, 4)];
        let in_flight = InFlight::new(3);
        in_flight.add(1, 77);
        let mut loads = Vec::new();
        fill_loads(&drives, &in_flight, &mut loads);
        assert!(loads.iter().all(|l| l.ns_per_byte == loads[0].ns_per_byte), "equal before anything is known");
        period(&mut drives[0], 0, &[MIB; 4], 10.0, 100_000.0);
        period(&mut drives[1], 0, &[MIB; 4], 100.0, 100_000.0);
        fill_loads(&drives, &in_flight, &mut loads);
        assert!((loads[2].ns_per_byte - loads[0].ns_per_byte).abs() < 1e-9);
        assert!(close(loads[1].ns_per_byte, 100.0, 0.01));
        assert_eq!(loads.iter().map(|l| l.in_flight_bytes).collect::<Vec<_>>(), [0, 77, 0]);
        (0..128).for_each(|_| drives[1].barrier_closed());
        fill_loads(&drives, &in_flight, &mut loads);
        assert!(close(loads[1].ns_per_byte, 50.0, 0.01), "believed twice as fast after 128 idle barriers");
        (0..9000).for_each(|_| drives[1].barrier_closed());
        fill_loads(&drives, &in_flight, &mut loads);
        assert!(close(loads[1].ns_per_byte, loads[0].ns_per_byte, 1e-9), "never faster than the fastest");
    }
}
