//! Barrier time as a table: for every set of drives, how long it takes to deliver n experts that live on that set alone.
//! With equal experts, both kinds of reads obey the same law: a barrier ends at the largest entry over all sets, because a
//! flow from experts to drives exists if and only if no set of drives is asked for more than it can deliver (max-flow
//! = min-cut; where reads are whole, capacities are whole numbers and so is some maximum flow). Shared uplinks only
//! lower what a set can deliver. Pure arithmetic.

use super::drives::DriveSet;
use super::plan::PlanError;
use crate::bound::MAX_SUBSET_DRIVES;
use serde::{Deserialize, Serialize};

/// Whether the reader may cut an expert and read its parts from several homes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reads {
    /// It may.
    #[default]
    Split,
    /// Every expert comes whole from one home.
    Whole,
}

/// Nanoseconds by set of drives and number of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct LevelTable {
    drives: usize,
    stride: usize,
    ns: Vec<f32>,
}

impl LevelTable {
    /// The table for barriers of at most `widest` experts of `expert_bytes`.
    pub fn new(set: &DriveSet, reads: Reads, expert_bytes: u64, widest: usize) -> Result<Self, PlanError> {
        let drives = set.drives.len();
        if drives > MAX_SUBSET_DRIVES {
            return Err(PlanError::Inconsistent(format!(
                "{drives} drives: barrier times are exact up to {MAX_SUBSET_DRIVES}; use fewer drives, or a policy that \
                 does not predict (round-robin, weighted-hash, lpt)"
            )));
        }
        let stride = widest + 1;
        let mut ns = vec![0.0f32; stride << drives];
        for subset in 1..1usize << drives {
            let row = &mut ns[subset * stride..][..stride];
            match reads {
                Reads::Split => {
                    for (n, slot) in row.iter_mut().enumerate().skip(1) {
                        *slot = split_ns(set, subset, n as f64 * expert_bytes as f64) as f32;
                    }
                }
                Reads::Whole => whole_row(set, subset, expert_bytes as f64, row),
            }
        }
        // Experts that live nowhere: never asked for, but an index must not be a bargain.
        ns[1..stride].fill(f32::INFINITY);
        Ok(Self { drives, stride, ns })
    }

    /// Drives.
    pub fn drives(&self) -> usize {
        self.drives
    }

    /// Most experts that a barrier may have.
    pub fn widest(&self) -> usize {
        self.stride - 1
    }

    /// Sets of drives, the empty one included.
    pub fn subsets(&self) -> usize {
        1 << self.drives
    }

    /// Time to deliver `n` experts whose homes all lie in `subset`.
    #[inline]
    pub fn at(&self, subset: usize, n: usize) -> f32 {
        self.ns[subset * self.stride + n]
    }

    /// Time of a barrier whose experts have these homes (bit masks).
    pub fn barrier_ns(&self, homes: impl Iterator<Item = u8> + Clone) -> f32 {
        let inside = |a: usize| homes.clone().filter(|&m| usize::from(m) & !a == 0).count();
        (1..self.subsets()).map(|a| self.at(a, inside(a))).fold(0.0, f32::max)
    }

    /// Time of `n` experts if every drive held each of them.
    pub fn everywhere_ns(&self, n: usize) -> f32 {
        self.at(self.subsets() - 1, n)
    }
}

/// Bytes that the drives of `subset` can have delivered by `ns`.
fn delivered(set: &DriveSet, subset: usize, ns: f64) -> f64 {
    let mut total = 0.0;
    let mut shared = [0.0f64; MAX_SUBSET_DRIVES];
    for (d, drive) in set.drives.iter().enumerate().filter(|(d, _)| subset >> d & 1 == 1) {
        let bytes = drive.rate_bytes_per_s * 1e-9 * (ns - drive.fixed_ns as f64).max(0.0);
        match drive.uplink {
            Some(uplink) => {
                // At most as many uplinks in use as drives: the slot is the first drive on it.
                let first = set.drives[..d].iter().position(|o| o.uplink == Some(uplink)).unwrap_or(d);
                shared[first] += bytes;
            }
            None => total += bytes,
        }
    }
    for (first, &bytes) in shared.iter().enumerate().filter(|(_, b)| **b > 0.0) {
        let joint = set.drives[first].uplink.and_then(|u| set.uplinks.get(u)).copied().unwrap_or(f64::INFINITY);
        total += bytes.min(joint * 1e-9 * ns);
    }
    total.min(set.together_bytes_per_s.map_or(f64::INFINITY, |r| r * 1e-9 * ns))
}

/// Least time in which `subset` delivers `bytes`, reads split at will. What is delivered grows with time, so halving an
/// interval that holds the answer finds it.
fn split_ns(set: &DriveSet, subset: usize, bytes: f64) -> f64 {
    let (mut low, mut high) = (0.0f64, 1e3);
    while delivered(set, subset, high) < bytes {
        (low, high) = (high, high * 2.0);
        if !high.is_finite() {
            return f64::INFINITY;
        }
    }
    for _ in 0..48 {
        let middle = 0.5 * (low + high);
        if delivered(set, subset, middle) < bytes { low = middle } else { high = middle }
    }
    high
}

/// Whole experts that `subset` can have delivered by `ns`.
fn delivered_whole(set: &DriveSet, subset: usize, expert_bytes: f64, ns: f64) -> usize {
    // A hair above, so that the moment at which an expert completes counts it.
    let whole = |bytes: f64| (bytes / expert_bytes * (1.0 + 1e-9) + 1e-9) as usize;
    let mut total = 0;
    let mut shared = [0usize; MAX_SUBSET_DRIVES];
    for (d, drive) in set.drives.iter().enumerate().filter(|(d, _)| subset >> d & 1 == 1) {
        let count = whole(drive.rate_bytes_per_s * 1e-9 * (ns - drive.fixed_ns as f64).max(0.0));
        match drive.uplink {
            Some(uplink) => {
                let first = set.drives[..d].iter().position(|o| o.uplink == Some(uplink)).unwrap_or(d);
                shared[first] += count;
            }
            None => total += count,
        }
    }
    for (first, &count) in shared.iter().enumerate().filter(|(_, c)| **c > 0) {
        let joint = set.drives[first].uplink.and_then(|u| set.uplinks.get(u)).copied().unwrap_or(f64::INFINITY);
        total += if joint.is_finite() { count.min(whole(joint * 1e-9 * ns)) } else { count };
    }
    set.together_bytes_per_s.map_or(total, |r| total.min(whole(r * 1e-9 * ns)))
}

/// One row of whole reads: the moments at which one more expert can be complete, in order.
fn whole_row(set: &DriveSet, subset: usize, expert_bytes: f64, row: &mut [f32]) {
    let widest = row.len() - 1;
    let mut moments = Vec::new();
    let mut every = |rate: f64, fixed: f64| {
        moments.extend((1..=widest).map(|k| fixed + k as f64 * expert_bytes / rate * 1e9));
    };
    for (_, drive) in set.drives.iter().enumerate().filter(|(d, _)| subset >> d & 1 == 1) {
        every(drive.rate_bytes_per_s, drive.fixed_ns as f64);
    }
    set.uplinks.iter().chain(&set.together_bytes_per_s).for_each(|&rate| every(rate, 0.0));
    moments.sort_by(f64::total_cmp);
    moments.dedup();
    let mut at = 0;
    for (n, slot) in row.iter_mut().enumerate().skip(1) {
        while at < moments.len() && delivered_whole(set, subset, expert_bytes, moments[at]) < n {
            at += 1;
        }
        *slot = moments.get(at).map_or(f32::INFINITY, |&m| m as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bound::{DriveRate, bound_drives_ns, bound_layout_ns};
    use proptest::prelude::*;

    const MB: u64 = 1_000_000;

    fn four() -> DriveSet {
        DriveSet::of_rates(&[13.6e9, 7.1e9, 7.1e9, 5.7e9])
    }

    #[test]
    fn eight_whole_experts_on_four_unequal_drives_cannot_reach_the_water_level() {
        // 3, 2, 2, 1: the two middle drives end last, at 2 / 7.1.
        let table = LevelTable::new(&four(), Reads::Whole, MB, 8).unwrap();
        let whole = f64::from(table.everywhere_ns(8));
        let split = f64::from(LevelTable::new(&four(), Reads::Split, MB, 8).unwrap().everywhere_ns(8));
        assert!((whole - 2.0 / 7.1 * 1e6).abs() < 1.0, "{whole}");
        assert!((whole / split - 1.1796).abs() < 1e-3);
    }

    #[test]
    fn a_shared_uplink_binds_when_both_drives_work() {
        let mut set = DriveSet::of_rates(&[100e6, 100e6, 100e6]);
        set.uplinks = vec![120e6];
        set.drives[0].uplink = Some(0);
        set.drives[1].uplink = Some(0);
        let table = LevelTable::new(&set, Reads::Split, MB, 12).unwrap();
        let ms = |a, n| f64::from(table.at(a, n)) / 1e6;
        assert!((ms(0b001, 12) - 120.0).abs() < 0.01, "alone a drive is not held up");
        assert!((ms(0b011, 12) - 100.0).abs() < 0.01, "12 MB over 120 MB/s");
        assert!((ms(0b111, 11) - 50.0).abs() < 0.01, "11 MB over 220 MB/s");
        let whole = LevelTable::new(&set, Reads::Whole, MB, 12).unwrap();
        assert!((f64::from(whole.at(0b011, 12)) / 1e6 - 100.0).abs() < 0.01);
        set.together_bytes_per_s = Some(110e6);
        let table = LevelTable::new(&set, Reads::Split, MB, 12).unwrap();
        assert!((f64::from(table.at(0b111, 11)) / 1e6 - 100.0).abs() < 0.01);
    }

    #[test]
    fn nine_drives_are_too_many_to_be_exact() {
        let message = LevelTable::new(&DriveSet::equal(9), Reads::Split, 1, 1).unwrap_err().to_string();
        assert!(message.contains("9 drives") && message.contains("lpt"), "{message}");
    }

    /// The best assignment of whole experts, found by trying every one.
    fn try_all(set: &DriveSet, bytes: u64, homes: &[u8], counts: &mut Vec<u64>) -> f64 {
        match homes.split_first() {
            None => {
                let times = set.drives.iter().zip(counts.iter());
                times.map(|(d, &n)| if n == 0 { 0.0 } else { d.alone_ns(n * bytes) }).fold(0.0, f64::max)
            }
            Some((&home, rest)) => {
                let mut best = f64::INFINITY;
                for d in (0..set.drives.len()).filter(|d| home >> d & 1 == 1) {
                    counts[d] += 1;
                    best = best.min(try_all(set, bytes, rest, counts));
                    counts[d] -= 1;
                }
                best
            }
        }
    }

    fn arb() -> impl Strategy<Value = (DriveSet, Vec<u8>)> {
        prop::collection::vec((20u32..8000, 0u32..3000), 1..=4).prop_flat_map(|drives| {
            let full = ((1u16 << drives.len()) - 1) as u8;
            let mut set = DriveSet::equal(drives.len());
            for (model, (mb, fixed_us)) in set.drives.iter_mut().zip(&drives) {
                model.rate_bytes_per_s = f64::from(*mb) * 1e6;
                model.fixed_ns = u64::from(*fixed_us) * 1000;
            }
            (Just(set), prop::collection::vec(1..=full, 1..7))
        })
    }

    proptest! {
        #[test]
        fn split_reads_agree_with_the_bounds((set, homes) in arb()) {
            let rates: Vec<_> =
                set.drives.iter().map(|d| DriveRate { bytes_per_s: d.rate_bytes_per_s, fixed_ns: d.fixed_ns }).collect();
            let table = LevelTable::new(&set, Reads::Split, MB, homes.len()).unwrap();
            let items: Vec<_> = homes.iter().map(|&h| (MB, u64::from(h))).collect();
            let layout = bound_layout_ns(&items, &rates).unwrap() as f64;
            let drives = bound_drives_ns(MB * homes.len() as u64, &rates).unwrap() as f64;
            prop_assert!((f64::from(table.barrier_ns(homes.iter().copied())) / layout - 1.0).abs() < 1e-5);
            prop_assert!((f64::from(table.everywhere_ns(homes.len())) / drives - 1.0).abs() < 1e-5);
        }

        #[test]
        fn whole_reads_are_the_best_assignment((set, homes) in arb()) {
            let table = LevelTable::new(&set, Reads::Whole, MB, homes.len()).unwrap();
            let best = try_all(&set, MB, &homes, &mut vec![0; set.drives.len()]);
            prop_assert!((f64::from(table.barrier_ns(homes.iter().copied())) / best - 1.0).abs() < 1e-5);
        }
    }
}
