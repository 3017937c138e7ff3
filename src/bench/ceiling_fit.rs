//! From times of reads to what a drive is: pure functions from samples to numbers. Knows no drive, no file and no
//! emulation; what it finds of an emulated drive it finds from times alone.
//!
//! **Method.** A drive that is kept busy finishes a read every `fixed + bytes / rate`, whatever the depth at which it is
//! busy. So the time per read at the depth that delivers most, over at least two sizes, is a straight line: its slope is
//! the rate, its start the fixed cost. One read at a time takes `latency` longer than that line (of
//! the sizes, the least). Times per read are medians over pieces of a series, so that a hiccup spoils one piece; each size
//! counts alike, because the line is fitted to relative errors.

use crate::drive::profile::{BarrierShape, Point, Quantile};
use crate::stats;

/// Fewest reads of a series from which anything is concluded.
pub const MIN_READS: usize = 8;
/// Pieces into which a series is cut.
const PIECES: usize = 20;
/// A depth delivers enough when it delivers this share of the best.
const ENOUGH: f64 = 0.97;
/// A queue keeps a drive busy when its reads take so much longer than one alone.
const BUSY: f64 = 1.2;
/// Places of the distribution that a profile keeps.
const QUANTILES: [f64; 19] =
    [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0];

/// Why nothing can be concluded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FitError {
    /// Too few reads.
    #[error("{reads} reads of {bytes} bytes at depth {depth} are too few (at least {MIN_READS}); raise --duration")]
    TooFew {
        /// Reads that count.
        reads: usize,
        /// Their size.
        bytes: u64,
        /// Reads in flight.
        depth: u32,
    },
    /// A needed series is missing.
    #[error("{0}")]
    Missing(&'static str),
    /// Even the deepest queue only waits for latencies.
    #[error(
        "{depth} reads of {bytes} bytes in flight do not keep the drive busy: add deeper --depths, or raise --bytes"
    )]
    NotBusy {
        /// Size of the reads.
        bytes: u64,
        /// Most in flight.
        depth: u32,
    },
    /// The times do not rise with the size.
    #[error(
        "reads of {large} bytes took {large_ns:.0} ns each and reads of {small} bytes {small_ns:.0} ns: no rate explains that; raise --duration, or let the machine rest"
    )]
    NoRate {
        /// The smaller size.
        small: u64,
        /// Time of each.
        small_ns: f64,
        /// The larger size.
        large: u64,
        /// Time of each.
        large_ns: f64,
    },
}

/// Reads of one size with a constant number in flight: when each was handed over and when it was there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Bytes of a read.
    pub bytes: u64,
    /// Reads in flight.
    pub depth: u32,
    /// Submission and completion, in nanoseconds of one clock, in any order.
    pub reads: Vec<(u64, u64)>,
}

/// What a drive is; see `drive::profile` for the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Bytes per second while transferring.
    pub rate_bytes_per_s: f64,
    /// Occupies the drive for every read.
    pub fixed_ns: f64,
    /// Added to every read, overlapping.
    pub latency_ns: f64,
    /// 99th percentile of one read of the largest size at a time.
    pub p99_ns: u64,
    /// Distribution of the same.
    pub service: Vec<Quantile>,
    /// The smallest depth that delivers enough of the largest size.
    pub depth: u32,
    /// Every series in numbers.
    pub points: Vec<Point>,
}

impl Series {
    /// Median time per read over pieces of the time in which the depth was full.
    pub fn ns_per_read(&self) -> Result<f64, FitError> {
        let mut ends: Vec<u64> = self.reads.iter().map(|r| r.1).collect();
        ends.sort_unstable();
        // the first ends of a deep queue come from an idle drive
        let ramp = (self.depth as usize).min(ends.len() / 4);
        let steady = &ends[ramp..];
        if steady.len() < MIN_READS {
            return Err(FitError::TooFew { reads: steady.len(), bytes: self.bytes, depth: self.depth });
        }
        let gaps = steady.len() - 1;
        // drives that work on several reads at once finish them together: pieces hold whole depths
        let whole = (gaps / PIECES).max(1).next_multiple_of((self.depth as usize).max(1));
        let piece = if whole <= gaps / 2 { whole } else { gaps };
        let rates: Vec<f64> =
            (0..gaps / piece).map(|i| (steady[(i + 1) * piece] - steady[i * piece]) as f64 / piece as f64).collect();
        Ok(stats::median(&rates).unwrap_or(0.0).max(1.0))
    }

    fn latencies(&self) -> Vec<f64> {
        self.reads.iter().map(|r| r.1.saturating_sub(r.0) as f64).collect()
    }

    /// The series in numbers.
    pub fn point(&self) -> Result<Point, FitError> {
        let ns = self.ns_per_read()?;
        let q = stats::quantiles(&self.latencies(), &[0.5, 0.99]).unwrap_or_else(|_| vec![0.0; 2]);
        Ok(Point {
            bytes: self.bytes,
            depth: self.depth,
            reads: self.reads.len() as u64,
            bytes_per_s: self.bytes as f64 * 1e9 / ns,
            p50_ns: q[0].round() as u64,
            p99_ns: q[1].round() as u64,
        })
    }
}

/// What the drive is that these series were measured of: at least two sizes, each at depth 1 and deeper.
pub fn estimate(series: &[Series]) -> Result<Estimate, FitError> {
    let points = series.iter().map(Series::point).collect::<Result<Vec<_>, _>>()?;
    let mut sizes: Vec<u64> = series.iter().map(|s| s.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let [small, .., large] = sizes[..] else {
        return Err(FitError::Missing("a fixed cost needs reads of at least two sizes"));
    };
    let busy = |bytes: u64| {
        let ns = points.iter().filter(|p| p.bytes == bytes).map(|p| p.bytes as f64 * 1e9 / p.bytes_per_s);
        (bytes as f64, ns.fold(f64::INFINITY, f64::min))
    };
    let alone: Vec<&Series> = series.iter().filter(|s| s.depth == 1).collect();
    let one = |bytes: u64| alone.iter().find(|s| s.bytes == bytes);
    let one_large = one(large).ok_or(FitError::Missing("a latency needs reads one at a time"))?;
    let median = |s: &Series| stats::median(&s.latencies()).unwrap_or(0.0);
    // a drive that is not kept busy ends a read every `latency / depth`, which says nothing of its rate
    let kept_busy = |bytes: u64| {
        let deepest = points.iter().filter(|p| p.bytes == bytes).max_by_key(|p| p.depth);
        let in_all = deepest.map_or(0.0, |p| p.bytes as f64 * 1e9 / p.bytes_per_s * f64::from(p.depth));
        one(bytes).is_none_or(|s| in_all > BUSY * median(s))
    };
    if !kept_busy(large) {
        let depth = points.iter().filter(|p| p.bytes == large).map(|p| p.depth).max().unwrap_or(1);
        return Err(FitError::NotBusy { bytes: large, depth });
    }
    let (slope, fixed_ns) = match one(small).filter(|_| !kept_busy(small)) {
        None => line(&sizes.iter().map(|&b| busy(b)).collect::<Vec<_>>()),
        // too small to keep the drive busy: reads one at a time differ by their transfer
        Some(one_small) => {
            let transfer = (median(one_large) - median(one_small)).max(0.0) / (large - small) as f64;
            let at_most = busy(large).1 / large as f64;
            let slope = if transfer > 0.0 { transfer.min(at_most) } else { at_most };
            (slope, busy(large).1 - large as f64 * slope)
        }
    };
    if !(slope.is_finite() && slope > 0.0) {
        let (small_ns, large_ns) = (busy(small).1, busy(large).1);
        return Err(FitError::NoRate { small, small_ns, large, large_ns });
    }
    let over = alone.iter().map(|s| median(s) - fixed_ns - s.bytes as f64 * slope);
    // of the sizes the least: what disturbs a machine only ever adds, and a bound must not be too high
    let least = over.fold(f64::INFINITY, f64::min);
    let latency_ns = if least.is_finite() { least.max(0.0) } else { 0.0 };
    let service = distribution(&one_large.latencies());
    let p99_ns = stats::quantile(&one_large.latencies(), 0.99).map_or(1, |v| v.round() as u64).max(1);
    let most = points.iter().filter(|p| p.bytes == large).map(|p| p.bytes_per_s).fold(0.0, f64::max);
    let enough = points.iter().filter(|p| p.bytes == large && p.bytes_per_s >= ENOUGH * most);
    let depth = enough.map(|p| p.depth).min().unwrap_or(1);
    Ok(Estimate { rate_bytes_per_s: 1e9 / slope, fixed_ns, latency_ns, p99_ns, service, depth, points })
}

/// The line `t = start + slope b` of least squares over relative errors; through the origin where it would start below.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let (mut w, mut b, mut t, mut bb, mut bt) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(x, y) in points {
        let weight = 1.0 / (y * y);
        w += weight;
        b += weight * x;
        t += weight * y;
        bb += weight * x * x;
        bt += weight * x * y;
    }
    let slope = (w * bt - b * t) / (w * bb - b * b);
    let start = (t - slope * b) / w;
    if start >= 0.0 { (slope, start) } else { (bt / bb, 0.0) }
}

/// A distribution to draw from.
fn distribution(latencies: &[f64]) -> Vec<Quantile> {
    let ns = stats::quantiles(latencies, &QUANTILES).unwrap_or_default();
    QUANTILES.iter().zip(ns).map(|(&q, ns)| Quantile { q, ns: ns.round() as u64 }).collect()
}

/// Rate while transferring of a drive that delivered `bytes` every `ns_per_read`, others at work beside it, if a read's
/// fixed cost is what it was alone. Never above `solo`.
pub fn joint_rate(bytes: u64, ns_per_read: f64, fixed_ns: f64, solo_bytes_per_s: f64) -> f64 {
    let transfer = (ns_per_read - fixed_ns).max(ns_per_read * 0.01);
    (bytes as f64 * 1e9 / transfer).min(solo_bytes_per_s)
}

/// Barriers of `width` reads of `bytes` that took `times_ns`.
pub fn barrier(width: u32, bytes: u64, times_ns: &[f64]) -> Result<BarrierShape, FitError> {
    let few = |_| FitError::TooFew { reads: times_ns.len(), bytes, depth: width };
    let q = stats::quantiles(times_ns, &[0.5, 0.99]).map_err(few)?;
    let p50 = q[0].max(1.0);
    Ok(BarrierShape {
        width,
        steps: times_ns.len() as u64,
        p50_ns: p50.round() as u64,
        p99_ns: q[1].max(p50).round() as u64,
        bytes_per_s: f64::from(width) * bytes as f64 * 1e9 / p50,
    })
}

/// How many of `width` equal reads each drive gets so that the last arrives as early as these times per read allow.
pub fn deal(width: u32, ns_per_read: &[f64]) -> Vec<u32> {
    let mut counts = vec![0u32; ns_per_read.len()];
    for _ in 0..width {
        let end = |d: &usize| f64::from(counts[*d] + 1) * ns_per_read[*d];
        if let Some(next) = (0..counts.len()).min_by(|a, b| end(a).total_cmp(&end(b))) {
            counts[next] += 1;
        }
    }
    counts
}

#[cfg(test)]
#[path = "ceiling_fit_tests.rs"]
mod tests;
