//! The two lower bounds of a barrier (measuring.md section 2): how fast the drives could deliver the bytes if every
//! drive held everything, and how fast they can with the homes that a plan gives. Pure arithmetic: no clock, no
//! plan type, no reader. Rates must be measured *jointly*; sums of solo ceilings give bounds that are too low.
//!
//! **The model.** Drive `d` delivers nothing during its fixed cost `o_d` and then `r_d` bytes per second, so by time
//! `T` it can have delivered `r_d (T - o_d)+` bytes. A drive that is not used delivers nothing and costs nothing,
//! which is the same formula. Reads may be split at will and over several homes.
//!
//! **Why subsets are exact.** By `T` the bytes can be delivered if and only if a flow from experts to their homes
//! saturates every expert, and by max-flow = min-cut that holds if and only if for every set `A` of drives the bytes
//! whose homes all lie in `A` fit into the capacity of `A`. Capacities only grow with `T`, so the least feasible `T` is
//! the largest, over all `A`, of the water level of those bytes over the drives of `A` alone.

/// Most drives for which [`bound_layout_ns`] visits every subset.
pub const MAX_SUBSET_DRIVES: usize = 8;

/// Why a bound cannot be computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BoundError {
    /// There are bytes to read and no drive to read them from.
    #[error("{bytes} bytes are needed but no drive is given")]
    NoDrives {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A rate is zero, negative or not a number.
    #[error(
        "drive {drive}: rate is {bytes_per_s} bytes/s; a bound needs a finite rate above 0 (measure it with `ceiling`)"
    )]
    Rate {
        /// Index of the drive.
        drive: usize,
        /// The rate given.
        bytes_per_s: f64,
    },
    /// Too many drives for the exact subset form.
    #[error("{drives} drives: the layout bound is exact up to {MAX_SUBSET_DRIVES}; give fewer drives")]
    TooManyDrives {
        /// Drives given.
        drives: usize,
    },
    /// An item names no home, or one that is not among the drives.
    #[error("item {item}: home mask {homes:#b} must name at least one of the {drives} drives and no other")]
    Homes {
        /// Index of the item.
        item: usize,
        /// Its mask.
        homes: u64,
        /// Drives given.
        drives: usize,
    },
    /// The bytes do not fit in 64 bits.
    #[error("the bytes of all items together exceed 64 bits")]
    Overflow,
}

/// What one drive can do while all of them work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveRate {
    /// Bytes per second once delivering, measured jointly with the other drives.
    pub bytes_per_s: f64,
    /// Fixed cost before the first byte, in nanoseconds (emulated drives: latency + per-read cost).
    pub fixed_ns: u64,
}

/// Least time in which `drives` can deliver `bytes` when each of them holds everything: the `T` that solves
/// `sum_d r_d (T - o_d)+ = bytes`, in nanoseconds, rounded to the nearest. No bytes take no time.
pub fn bound_drives_ns(bytes: u64, drives: &[DriveRate]) -> Result<u64, BoundError> {
    check_rates(drives)?;
    if bytes == 0 {
        return Ok(0);
    }
    if drives.is_empty() {
        return Err(BoundError::NoDrives { bytes });
    }
    let mut sorted = drives.to_vec();
    sorted.sort_by_key(|d| d.fixed_ns);
    Ok(round_ns(water_level_ns(bytes, sorted.iter())))
}

/// Least time in which `drives` can deliver `items` of `(bytes, home mask)`, bit `d` of a mask standing for
/// `drives[d]`, when every item may be split over its homes only: the largest water level over all subsets of drives
/// (see the top of this file), in nanoseconds, rounded to the nearest. Items without bytes are allowed and ignored.
///
/// # Errors
/// More than [`MAX_SUBSET_DRIVES`] drives, a bad rate, a mask without a home or with an unknown one, more than 2^64 bytes.
pub fn bound_layout_ns(items: &[(u64, u64)], drives: &[DriveRate]) -> Result<u64, BoundError> {
    if drives.len() > MAX_SUBSET_DRIVES {
        return Err(BoundError::TooManyDrives { drives: drives.len() });
    }
    check_rates(drives)?;
    let subsets = 1usize << drives.len();
    // inside[A] becomes the bytes whose homes all lie in A.
    let mut inside = [0u64; 1 << MAX_SUBSET_DRIVES];
    for (item, &(bytes, homes)) in items.iter().enumerate() {
        if bytes == 0 {
            continue;
        }
        let index = usize::try_from(homes).ok().filter(|&h| h > 0 && h < subsets);
        let Some(index) = index else {
            return Err(BoundError::Homes { item, homes, drives: drives.len() });
        };
        inside[index] = inside[index].checked_add(bytes).ok_or(BoundError::Overflow)?;
    }
    for d in 0..drives.len() {
        for a in (0..subsets).filter(|a| a & (1 << d) != 0) {
            inside[a] = inside[a].checked_add(inside[a ^ (1 << d)]).ok_or(BoundError::Overflow)?;
        }
    }
    let mut order: Vec<usize> = (0..drives.len()).collect();
    order.sort_by_key(|&d| drives[d].fixed_ns);
    let worst = (1..subsets).filter(|&a| inside[a] > 0).map(|a| {
        let members = order.iter().filter(|&&d| a & (1 << d) != 0).map(|&d| &drives[d]);
        water_level_ns(inside[a], members)
    });
    Ok(round_ns(worst.fold(0.0, f64::max)))
}

fn check_rates(drives: &[DriveRate]) -> Result<(), BoundError> {
    match drives.iter().position(|d| !(d.bytes_per_s.is_finite() && d.bytes_per_s > 0.0)) {
        Some(drive) => Err(BoundError::Rate { drive, bytes_per_s: drives[drive].bytes_per_s }),
        None => Ok(()),
    }
}

/// The water level over drives that come in ascending order of fixed cost. With the first k drives in use,
/// `T = (bytes + sum r o) / sum r`; it is the answer once the next drive would only start after `T`.
fn water_level_ns<'a>(bytes: u64, sorted: impl Iterator<Item = &'a DriveRate>) -> f64 {
    let (mut rate, mut head_start, mut level) = (0.0, 0.0, f64::INFINITY);
    for drive in sorted {
        let fixed = drive.fixed_ns as f64;
        if level <= fixed {
            break;
        }
        let bytes_per_ns = drive.bytes_per_s * 1e-9;
        rate += bytes_per_ns;
        head_start += bytes_per_ns * fixed;
        level = (bytes as f64 + head_start) / rate;
    }
    level
}

/// Nearest nanosecond; times beyond 584 years saturate.
fn round_ns(ns: f64) -> u64 {
    ns.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drive(mb_per_s: u32, fixed_us: u32) -> DriveRate {
        DriveRate { bytes_per_s: f64::from(mb_per_s) * 1e6, fixed_ns: u64::from(fixed_us) * 1000 }
    }

    #[test]
    fn water_level_by_hand() {
        // 100 MB/s and 50 MB/s: 15 MB in 100 ms.
        assert_eq!(bound_drives_ns(15_000_000, &[drive(100, 0), drive(50, 0)]), Ok(100_000_000));
        // The second drive only starts after 1 s, when the first has long finished: it must not count.
        assert_eq!(bound_drives_ns(10_000_000, &[drive(100, 0), drive(50, 1_000_000)]), Ok(100_000_000));
        // Both fixed costs matter: 100 (T - 0.1) + 50 (T - 0.2) = 40 -> T = 0.4 s.
        let two = [drive(50, 200_000), drive(100, 100_000)];
        assert_eq!(bound_drives_ns(40_000_000, &two), Ok(400_000_000));
        assert_eq!(bound_drives_ns(0, &two), Ok(0), "an unused drive's fixed cost is not paid");
    }

    #[test]
    fn the_worst_subset_decides() {
        let drives = [drive(100, 0), drive(100, 0), drive(100, 0)];
        // Two experts share drives 0 and 1, one lies on drive 2 alone: {0, 1} holds 2 x 10 MB over 200 MB/s.
        let items = [(10_000_000, 0b011), (10_000_000, 0b011), (4_000_000, 0b100)];
        assert_eq!(bound_layout_ns(&items, &drives), Ok(100_000_000));
        // Everything whose homes lie in {0, 1} together, though no single mask says 0b011 for all of it.
        let items = [(10_000_000, 0b001), (10_000_000, 0b010), (10_000_000, 0b011)];
        assert_eq!(bound_layout_ns(&items, &drives), Ok(150_000_000));
    }

    #[test]
    fn bad_input_is_named() {
        let bad = [drive(1, 0), DriveRate { bytes_per_s: f64::NAN, fixed_ns: 0 }];
        assert!(matches!(bound_drives_ns(1, &bad), Err(BoundError::Rate { drive: 1, .. })));
        assert!(matches!(bound_layout_ns(&[], &bad), Err(BoundError::Rate { drive: 1, .. })));
        assert_eq!(bound_drives_ns(7, &[]), Err(BoundError::NoDrives { bytes: 7 }));
        let nine = [drive(1, 0); 9];
        assert_eq!(bound_layout_ns(&[(1, 1)], &nine), Err(BoundError::TooManyDrives { drives: 9 }));
        let two = [drive(1, 0); 2];
        assert!(matches!(bound_layout_ns(&[(0, 0), (1, 0)], &two), Err(BoundError::Homes { item: 1, .. })));
        assert!(matches!(bound_layout_ns(&[(1, 0b100)], &two), Err(BoundError::Homes { .. })));
        assert!(matches!(bound_layout_ns(&[(1, 1 << 40)], &two), Err(BoundError::Homes { .. })));
        assert_eq!(bound_layout_ns(&[(u64::MAX, 1), (1, 2)], &two), Err(BoundError::Overflow));
        assert_eq!(bound_layout_ns(&[], &[]), Ok(0));
    }

    /// Bytes that a maximum flow delivers by `t_ns`: augmenting paths over drives, with no subset in sight.
    fn flow_by(items: &[(u64, u64)], drives: &[DriveRate], t_ns: f64) -> f64 {
        let mut room: Vec<f64> =
            drives.iter().map(|d| d.bytes_per_s * 1e-9 * (t_ns - d.fixed_ns as f64).max(0.0)).collect();
        let mut placed = vec![vec![0.0f64; drives.len()]; items.len()];
        let mut total = 0.0;
        for (i, &(bytes, homes)) in items.iter().enumerate() {
            let mut left = bytes as f64;
            while left > 1e-3 {
                // Breadth-first over drives; an edge d -> e exists when some item has bytes on d and may live on e.
                let mut from: Vec<Option<(usize, usize)>> = vec![None; drives.len()];
                let mut seen: Vec<bool> = (0..drives.len()).map(|d| homes >> d & 1 == 1).collect();
                let mut queue: Vec<usize> = (0..drives.len()).filter(|&d| seen[d]).collect();
                let mut head = 0;
                let mut goal = None;
                while head < queue.len() {
                    let d = queue[head];
                    head += 1;
                    if room[d] > 1e-3 {
                        goal = Some(d);
                        break;
                    }
                    for j in (0..items.len()).filter(|&j| placed[j][d] > 1e-3) {
                        for e in (0..drives.len()).filter(|e| items[j].1 >> e & 1 == 1) {
                            if !seen[e] {
                                seen[e] = true;
                                from[e] = Some((d, j));
                                queue.push(e);
                            }
                        }
                    }
                }
                let Some(goal) = goal else { break };
                let mut amount = left.min(room[goal]);
                let mut at = goal;
                while let Some((d, j)) = from[at] {
                    amount = amount.min(placed[j][d]);
                    at = d;
                }
                room[goal] -= amount;
                let mut at = goal;
                while let Some((d, j)) = from[at] {
                    placed[j][at] += amount;
                    placed[j][d] -= amount;
                    at = d;
                }
                placed[i][at] += amount;
                left -= amount;
                total += amount;
            }
        }
        total
    }

    fn arb_drives() -> impl Strategy<Value = Vec<DriveRate>> {
        prop::collection::vec((20u32..8000, 0u32..3000).prop_map(|(r, o)| drive(r, o)), 1..=5)
    }

    fn arb_case() -> impl Strategy<Value = (Vec<DriveRate>, Vec<(u64, u64)>)> {
        arb_drives().prop_flat_map(|drives| {
            let full = (1u64 << drives.len()) - 1;
            let items = prop::collection::vec((1_000u64..20_000_000, 1..=full), 1..12);
            (Just(drives), items)
        })
    }

    proptest! {
        #[test]
        fn a_flow_fits_at_the_bound_and_not_below_it((drives, items) in arb_case()) {
            let bound = bound_layout_ns(&items, &drives).unwrap() as f64;
            let total: u64 = items.iter().map(|i| i.0).sum();
            let slack = 1.0; // the flow's own tolerance, in bytes
            prop_assert!(flow_by(&items, &drives, bound + 1.0) >= total as f64 - slack);
            prop_assert!(flow_by(&items, &drives, bound * (1.0 - 1e-3) - 1.0) < total as f64 - slack);
        }

        #[test]
        fn the_layout_bound_is_never_below_the_drive_bound((drives, items) in arb_case()) {
            let total = items.iter().map(|i| i.0).sum();
            prop_assert!(bound_layout_ns(&items, &drives).unwrap() >= bound_drives_ns(total, &drives).unwrap());
        }

        #[test]
        fn a_full_mirror_makes_them_equal((drives, items) in arb_case()) {
            let full = (1u64 << drives.len()) - 1;
            let mirrored: Vec<_> = items.iter().map(|i| (i.0, full)).collect();
            let total = items.iter().map(|i| i.0).sum();
            prop_assert_eq!(bound_layout_ns(&mirrored, &drives).unwrap(), bound_drives_ns(total, &drives).unwrap());
        }

        #[test]
        fn single_homes_cost_their_fullest_drive((drives, items) in arb_case()) {
            let single: Vec<_> = items.iter().map(|i| (i.0, 1u64 << i.1.trailing_zeros())).collect();
            let alone = (0..drives.len()).map(|d| {
                let bytes: u64 = single.iter().filter(|i| i.1 == 1 << d).map(|i| i.0).sum();
                bound_drives_ns(bytes, &drives[d..=d]).unwrap()
            });
            let got = bound_layout_ns(&single, &drives).unwrap();
            prop_assert!(got.abs_diff(alone.max().unwrap()) <= 1);
        }

        #[test]
        fn more_bytes_never_take_less_and_more_homes_never_take_more(
            (drives, items) in arb_case(), pick in any::<prop::sample::Index>(), extra in 1u64..5_000_000,
        ) {
            let before = bound_layout_ns(&items, &drives).unwrap();
            let mut bigger = items.clone();
            bigger[pick.index(items.len())].0 += extra;
            prop_assert!(bound_layout_ns(&bigger, &drives).unwrap() >= before);
            let mut freer = items.clone();
            freer[pick.index(items.len())].1 = (1 << drives.len()) - 1;
            prop_assert!(bound_layout_ns(&freer, &drives).unwrap() <= before);
        }

        #[test]
        fn another_drive_never_hurts(drives in arb_drives(), bytes in 0u64..1 << 32, new in (1u32..8000, 0u32..9000)) {
            let before = bound_drives_ns(bytes, &drives).unwrap();
            let mut more = drives;
            more.push(drive(new.0, new.1));
            // One nanosecond for rounding: another order of summation may differ in the last bit.
            prop_assert!(bound_drives_ns(bytes, &more).unwrap() <= before + 1);
        }
    }
}
