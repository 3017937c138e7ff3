//! What a run knows of itself once it has ended: what its drives could do, the bounds of its barriers that follow from
//! that, and what bounded it. The same arithmetic as a report of its trace, so that both say the same.

use super::ReplayError;
use super::attribution::Attributor;
use super::rates::{Bounds, Homes, NamedRate};
use super::summary::Summarizer;
use super::verdict::{FixedCost, Verdict, WaitSums};
use crate::bound::DriveRate;
use crate::layout::plan::Plan;
use crate::reader::{KnownRate, ReaderCounters};
use crate::trace::events::{BarrierRecord, ReadEvent};
use crate::trace::log::{RateFrom, TraceBuffer, TraceDrive, TraceRate};
use crate::trace::stream::Skipped;

/// Busy periods of a drive before what they taught the reader is called its rate.
pub const MIN_PERIODS: u64 = 8;
/// Barriers of a drive before a line is fitted to them, and groups of like size that they are put into.
const MIN_FITTED: usize = 32;
const GROUPS: usize = 8;

/// What each drive of a run could do, in id order: as it was given; else fitted to its part of every barrier of `trace`,
/// where the reads were kept; else as the reader believed at the end, which follows the latest barriers only. A drive that
/// taught too little has no row.
pub fn rates(counters: &ReaderCounters, given: &[KnownRate], trace: Option<&TraceBuffer>) -> Vec<TraceRate> {
    let fits = trace.map(|t| fitted(t, counters.drives.len())).unwrap_or_default();
    let rate = |(at, drive): (usize, &crate::reader::DriveCounters)| {
        let row = |bytes_per_s: f64, fixed_ns: f64, from| {
            let (bytes_per_s, fixed_ns) = (bytes_per_s.round() as u64, fixed_ns.max(0.0).round() as u64);
            (bytes_per_s > 0).then(|| TraceRate { drive: drive.name.clone(), bytes_per_s, fixed_ns, from })
        };
        if let Some(known) = given.iter().find(|k| k.drive == drive.name) {
            return row(known.bytes_per_s as f64, known.fixed_ns as f64, RateFrom::Given);
        }
        if let Some((fixed_ns, bytes_per_s)) = fits.get(at).copied().flatten() {
            return row(bytes_per_s, fixed_ns as f64, RateFrom::Learnt);
        }
        let seen = drive.rate;
        row(seen.bytes_per_s, seen.fixed_ns, RateFrom::Learnt).filter(|_| seen.periods >= MIN_PERIODS)
    };
    counters.drives.iter().enumerate().filter_map(rate).collect()
}

/// Fixed cost and rate of each drive: time from its first hand-over to its last arrival over the bytes between. Barriers
/// are grouped by bytes and the median of each group counts, because single slow reads are many times slower.
fn fitted(trace: &TraceBuffer, drives: usize) -> Vec<Option<(u64, f64)>> {
    let mut parts: Vec<Vec<(u64, u64)>> = vec![Vec::new(); drives];
    let mut attributor = Attributor::new(drives);
    each(trace, |record, reads| {
        attributor.attribute(record, reads);
        for (part, share) in parts.iter_mut().zip(attributor.shares()) {
            if share.reads > 0 && share.all_issued_inside {
                part.push((share.bytes, share.last_ns.saturating_sub(share.first_submit_ns)));
            }
        }
    });
    parts.iter_mut().map(|part| line_of(part)).collect()
}

/// The line through `(bytes, nanoseconds)`, if there are enough of them and of different sizes.
fn line_of(part: &mut [(u64, u64)]) -> Option<(u64, f64)> {
    if part.len() < MIN_FITTED {
        return None;
    }
    part.sort_unstable();
    let groups = part.chunks(part.len().div_ceil(GROUPS));
    let points: Vec<(f64, f64, f64)> = groups
        .map(|group| {
            let bytes = group.iter().map(|p| p.0 as f64).sum::<f64>() / group.len() as f64;
            let mut ns: Vec<u64> = group.iter().map(|p| p.1).collect();
            ns.sort_unstable();
            (group.len() as f64, bytes, ns[ns.len() / 2] as f64)
        })
        .collect();
    // sizes that hardly differ show no slope, only noise
    let spread = points.last()?.1 >= 1.5 * points.first()?.1;
    FixedCost::line(&points).filter(|_| spread)
}

/// The fixed costs among `rates`, by drive.
pub fn fixed_ns(rates: &[TraceRate], drives: &[TraceDrive]) -> Vec<Option<u64>> {
    drives.iter().map(|d| rates.iter().find(|r| r.drive == d.name).map(|r| r.fixed_ns)).collect()
}

/// Writes both bounds into the barriers of `trace`, with the homes of `plan`. Bounds need a rate for every drive;
/// whether there was one.
pub fn fill_bounds(
    trace: &mut TraceBuffer,
    plan: &Plan,
    drives: &[TraceDrive],
    rates: &[TraceRate],
) -> Result<bool, ReplayError> {
    if drives.is_empty() || drives.iter().any(|d| rates.iter().all(|r| r.drive != d.name)) {
        return Ok(false);
    }
    let named: Vec<NamedRate> = rates
        .iter()
        .map(|r| NamedRate {
            name: r.drive.clone(),
            rate: DriveRate { bytes_per_s: r.bytes_per_s as f64, fixed_ns: r.fixed_ns },
        })
        .collect();
    let mut bounds = Bounds::new(drives, &named, Homes::of_plan(plan, drives)?)?;
    let mut of_barrier = ByBarrier::new(trace.reads());
    for at in 0..trace.barriers().len() {
        let record = trace.barriers()[at];
        let bound = bounds.of(&record, of_barrier.reads(trace.reads(), record.barrier))?;
        let record = &mut trace.barriers_mut()[at];
        (record.bound_layout_ns, record.bound_drives_ns) = (bound.layout_ns, Some(bound.drives_ns));
    }
    Ok(true)
}

/// What bounded a run that decoded for `wall_ns`. With the reads at hand this is what a report of the trace says;
/// with barriers alone, the time before a drive got its first read counts as waiting for bytes. Of a run with more
/// barriers than were kept, the part that was.
pub fn verdict(trace: &TraceBuffer, drives: &[TraceDrive], wall_ns: u64, rates: &[TraceRate]) -> Option<Verdict> {
    let fixed = fixed_ns(rates, drives);
    if trace.lost_barriers() > 0 {
        let mut sums = WaitSums::default();
        trace.barriers().iter().for_each(|b| sums.add(b, b.straggler, b.gap_drive_ns, 0));
        return sums.verdict(sums.spanned_ns(), &fixed);
    }
    if trace.reads().is_empty() {
        return super::verdict::verdict(trace.barriers(), wall_ns, &fixed);
    }
    let mut summarizer = Summarizer::new(drives, None, 0).with_fixed(fixed);
    each(trace, |record, reads| {
        // without bounds to compute nothing can fail
        let _ = summarizer.barrier(record, reads);
    });
    summarizer.finish(Some(wall_ns), &Skipped::default()).verdict
}

/// Calls `f` with every barrier of a trace in memory and its reads.
pub fn each(trace: &TraceBuffer, mut f: impl FnMut(&BarrierRecord, &[ReadEvent])) {
    let mut of_barrier = ByBarrier::new(trace.reads());
    for record in trace.barriers() {
        f(record, of_barrier.reads(trace.reads(), record.barrier));
    }
}

/// Places of reads, sorted by the barrier that needed them.
struct ByBarrier {
    places: Vec<(u64, usize)>,
    reads: Vec<ReadEvent>,
}

impl ByBarrier {
    fn new(reads: &[ReadEvent]) -> Self {
        let mut places: Vec<(u64, usize)> =
            reads.iter().enumerate().filter_map(|(at, r)| r.barrier.map(|b| (b, at))).collect();
        places.sort_unstable();
        Self { places, reads: Vec::new() }
    }

    /// The reads that `barrier` needed, in the order in which they ended.
    fn reads(&mut self, all: &[ReadEvent], barrier: u64) -> &[ReadEvent] {
        let from = self.places.partition_point(|p| p.0 < barrier);
        let own = self.places[from..].iter().take_while(|p| p.0 == barrier);
        self.reads.clear();
        self.reads.extend(own.filter_map(|p| all.get(p.1)));
        &self.reads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_behind_noise_whatever_the_sizes_and_only_where_they_differ() {
        // 20 MB/s after 700 us, no two barriers alike; one in ten takes 30 ms more
        let slow = |i: u64| if i % 10 == 3 { 30_000_000 } else { 0 };
        let mut parts: Vec<_> =
            (0..200u64).map(|i| (26_000 + i * 517, 700_000 + (26_000 + i * 517) * 50 + slow(i))).collect();
        let (fixed_ns, bytes_per_s) = line_of(&mut parts).unwrap();
        assert!(fixed_ns.abs_diff(700_000) < 200_000, "{fixed_ns}");
        assert!((bytes_per_s / 20e6 - 1.0).abs() < 0.1, "{bytes_per_s}");
        let mut alike: Vec<_> = (0..200u64).map(|i| (26_000 + i, 2_000_000 + slow(i))).collect();
        assert_eq!(line_of(&mut alike), None);
        assert_eq!(line_of(&mut parts[..31]), None, "too few");
    }
}
