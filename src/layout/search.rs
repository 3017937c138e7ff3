//! One layer while its homes are searched: barriers, homes as bit masks, and for each barrier how many of its experts live
//! inside each set of drives. A change of one expert's homes touches only the barriers that ask for it, and
//! each of them costs one pass over the sets. Knows no budgets; `barrier` says what may be changed.

use super::level::LevelTable;
use super::training::Rows;
use crate::stats::SplitMix64;

/// What can be asked of a layer under search, whatever its number of drives.
pub(super) trait Layer: Send {
    /// Homes of each expert.
    fn homes(&self) -> &[u8];
    /// Sum of the barrier times, nanoseconds, each weighted.
    #[cfg(test)]
    fn total_ns(&self) -> f64;
    /// What the sum would change by.
    fn change_ns(&self, expert: usize, homes: u8) -> f64;
    /// Changes an expert's homes.
    fn set(&mut self, expert: usize, homes: u8);
    /// Replaces the barriers; homes stay.
    fn train(&mut self, rows: &Rows, mass: f64);
    /// Tries `moves` random changes and keeps those that lower the sum. Copies and the copies on each drive stay within
    /// `room`, which is kept up to date.
    fn improve(&mut self, moves: usize, room: &mut [usize], rng: &mut SplitMix64);
}

/// A layer with homes `homes`, for up to eight drives.
pub(super) fn layer<'a>(table: &'a LevelTable, homes: Vec<u8>) -> Box<dyn Layer + 'a> {
    match table.drives() {
        0..=2 => Box::new(State::<4>::new(table, homes)),
        3 => Box::new(State::<8>::new(table, homes)),
        4 => Box::new(State::<16>::new(table, homes)),
        5 => Box::new(State::<32>::new(table, homes)),
        6 => Box::new(State::<64>::new(table, homes)),
        7 => Box::new(State::<128>::new(table, homes)),
        _ => Box::new(State::<256>::new(table, homes)),
    }
}

/// `S` = sets of drives, at least two to the power of the drives.
struct State<const S: usize> {
    /// Times by number of experts, then set of drives: one barrier's lookups lie near each other.
    levels: Vec<[f32; S]>,
    drives: usize,
    homes: Vec<u8>,
    /// Barriers that ask for an expert: `asked[asked_from[e]..asked_from[e + 1]]`.
    asked: Vec<u32>,
    asked_from: Vec<u32>,
    /// Experts of each barrier whose homes lie inside each set.
    inside: Vec<[u8; S]>,
    ns: Vec<f32>,
    /// The set of drives that makes each barrier as long as it is.
    worst: Vec<u8>,
    weight: f64,
}

impl<const S: usize> State<S> {
    fn new(table: &LevelTable, homes: Vec<u8>) -> Self {
        // Sets beyond the table's (fewer drives than S has room for) never cost anything.
        let level = |n: usize| std::array::from_fn(|a| if a > 0 && a < table.subsets() { table.at(a, n) } else { 0.0 });
        Self {
            levels: (0..=table.widest()).map(level).collect(),
            drives: table.drives(),
            homes,
            asked: Vec::new(),
            asked_from: Vec::new(),
            inside: Vec::new(),
            ns: Vec::new(),
            worst: Vec::new(),
            weight: 0.0,
        }
    }

    fn asking(&self, expert: usize) -> &[u32] {
        &self.asked[self.asked_from[expert] as usize..self.asked_from[expert + 1] as usize]
    }

    /// 1 for each set that holds all of `homes`.
    fn within(homes: u8) -> [u8; S] {
        std::array::from_fn(|a| u8::from(usize::from(homes) & !a == 0))
    }

    fn slowest(&self, inside: &[u8; S]) -> (f32, u8) {
        let mut worst = (0.0f32, 0u8);
        for (a, &n) in inside.iter().enumerate() {
            let ns = self.levels[usize::from(n)][a];
            worst = if ns > worst.0 { (ns, a as u8) } else { worst };
        }
        worst
    }

    fn moved(from: &[u8; S], old: &[u8; S], new: &[u8; S]) -> [u8; S] {
        std::array::from_fn(|a| from[a].wrapping_sub(old[a]).wrapping_add(new[a]))
    }

    /// Gives `expert` other homes that need no more room than there is.
    fn try_other_homes(&mut self, expert: usize, room: &mut [usize], rng: &mut SplitMix64) {
        let old = self.homes[expert];
        let new = (1 + rng.below((1 << self.drives) - 1)) as u8;
        if new == old || new.count_ones() != old.count_ones() || !fits(room, old, new) {
            return;
        }
        if self.change_ns(expert, new) < 0.0 {
            take_room(room, old, new);
            self.set(expert, new);
        }
    }

    /// Lets two experts change places.
    fn try_swap(&mut self, expert: usize, rng: &mut SplitMix64) {
        let other = rng.below(self.homes.len());
        let (a, b) = (self.homes[expert], self.homes[other]);
        if a == b {
            return;
        }
        let first = self.change_ns(expert, b);
        self.set(expert, b);
        if first + self.change_ns(other, a) < 0.0 {
            self.set(other, a);
        } else {
            self.set(expert, a);
        }
    }

    /// Takes a copy from one expert and gives one to another.
    fn try_copy(&mut self, expert: usize, room: &mut [usize], rng: &mut SplitMix64) {
        let old = self.homes[expert];
        let other = rng.below(self.homes.len());
        let poor = self.homes[other];
        if old.count_ones() < 2 || other == expert || poor.count_ones() as usize == self.drives {
            return;
        }
        let less = old & !nth_bit(old, rng.below(old.count_ones() as usize));
        let free = !poor & ((1u16 << self.drives) - 1) as u8;
        let more = poor | nth_bit(free, rng.below(free.count_ones() as usize));
        take_room(room, old, less);
        if !fits(room, poor, more) {
            take_room(room, less, old);
            return;
        }
        let first = self.change_ns(expert, less);
        self.set(expert, less);
        if first + self.change_ns(other, more) < 0.0 {
            take_room(room, poor, more);
            self.set(other, more);
        } else {
            take_room(room, less, old);
            self.set(expert, old);
        }
    }
}

fn nth_bit(mask: u8, n: usize) -> u8 {
    let mut rest = mask;
    for _ in 0..n {
        rest &= rest - 1;
    }
    rest & rest.wrapping_neg()
}

fn fits(room: &[usize], old: u8, new: u8) -> bool {
    (new & !old == 0) || room.iter().enumerate().all(|(d, &r)| (new & !old) >> d & 1 == 0 || r > 0)
}

fn take_room(room: &mut [usize], old: u8, new: u8) {
    for (d, r) in room.iter_mut().enumerate() {
        match (old >> d & 1, new >> d & 1) {
            (0, 1) => *r = r.saturating_sub(1),
            (1, 0) => *r = r.saturating_add(1),
            _ => {}
        }
    }
}

impl<const S: usize> Layer for State<S> {
    fn homes(&self) -> &[u8] {
        &self.homes
    }

    #[cfg(test)]
    fn total_ns(&self) -> f64 {
        self.ns.iter().map(|&n| f64::from(n)).sum::<f64>() * self.weight
    }

    fn change_ns(&self, expert: usize, homes: u8) -> f64 {
        let (old, new) = (Self::within(self.homes[expert]), Self::within(homes));
        let mut more = [0u8; S];
        let mut mores = 0;
        for a in (0..S).filter(|&a| new[a] > old[a]) {
            more[mores] = a as u8;
            mores += 1;
        }
        let mut change = 0.0;
        for &b in self.asking(expert) {
            let b = b as usize;
            let (inside, worst) = (&self.inside[b], usize::from(self.worst[b]));
            let ns = if old[worst] == new[worst] {
                // The worst set is as it was, so only sets that hold more can be worse.
                let mut ns = self.ns[b];
                for &a in &more[..mores] {
                    let a = usize::from(a);
                    let now = self.levels[usize::from(inside[a]) + 1][a];
                    ns = if now > ns { now } else { ns };
                }
                ns
            } else {
                self.slowest(&Self::moved(inside, &old, &new)).0
            };
            change += f64::from(ns - self.ns[b]);
        }
        change * self.weight
    }

    fn set(&mut self, expert: usize, homes: u8) {
        let (old, new) = (Self::within(self.homes[expert]), Self::within(homes));
        let (from, to) = (self.asked_from[expert] as usize, self.asked_from[expert + 1] as usize);
        for at in from..to {
            let b = self.asked[at] as usize;
            self.inside[b] = Self::moved(&self.inside[b], &old, &new);
            (self.ns[b], self.worst[b]) = self.slowest(&self.inside[b]);
        }
        self.homes[expert] = homes;
    }

    fn train(&mut self, rows: &Rows, mass: f64) {
        let mut from = vec![0u32; self.homes.len() + 1];
        for row in rows.iter() {
            row.iter().for_each(|&e| from[usize::from(e) + 1] += 1);
        }
        for e in 1..from.len() {
            from[e] += from[e - 1];
        }
        let mut next = from.clone();
        self.asked = vec![0; from.last().copied().unwrap_or(0) as usize];
        self.inside = Vec::with_capacity(rows.len());
        for (b, row) in rows.iter().enumerate() {
            let mut inside = [0u8; S];
            for &e in row {
                let slot = &mut next[usize::from(e)];
                self.asked[*slot as usize] = b as u32;
                *slot += 1;
                let within = Self::within(self.homes[usize::from(e)]);
                inside.iter_mut().zip(within).for_each(|(n, w)| *n += w);
            }
            self.inside.push(inside);
        }
        self.asked_from = from;
        (self.ns, self.worst) = self.inside.iter().map(|i| self.slowest(i)).unzip();
        self.weight = if rows.is_empty() { 0.0 } else { mass / rows.len() as f64 };
    }

    fn improve(&mut self, moves: usize, room: &mut [usize], rng: &mut SplitMix64) {
        if self.inside.is_empty() || self.drives < 2 {
            return;
        }
        for _ in 0..moves {
            let expert = rng.below(self.homes.len());
            match rng.below(4) {
                0 => self.try_other_homes(expert, room, rng),
                1 => self.try_swap(expert, rng),
                _ => self.try_copy(expert, room, rng),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::drives::DriveSet;
    use super::super::level::Reads;
    use super::super::training::rows_of;
    use super::*;
    use proptest::prelude::*;

    fn by_hand(table: &LevelTable, rows: &Rows, homes: &[u8]) -> f64 {
        let sum: f64 = rows.iter().map(|r| f64::from(table.barrier_ns(r.iter().map(|&e| homes[usize::from(e)])))).sum();
        sum / rows.len() as f64
    }

    #[test]
    fn bits_are_counted_from_below() {
        assert_eq!((nth_bit(0b1011, 0), nth_bit(0b1011, 1), nth_bit(0b1011, 2)), (1, 2, 8));
    }

    proptest! {
        #[test]
        fn changes_are_what_a_full_sum_says(
            drives in 1usize..6, whole: bool, seed: u64,
            sets in prop::collection::vec(prop::collection::btree_set(0u16..12, 1..5), 1..20),
        ) {
            let rates: Vec<f64> = (0..drives).map(|d| 1e9 * (d + 1) as f64).collect();
            let reads = if whole { Reads::Whole } else { Reads::Split };
            let table = LevelTable::new(&DriveSet::of_rates(&rates), reads, 1_000_000, 5).unwrap();
            let rows = rows_of(&sets.iter().map(|s| s.iter().copied().collect()).collect::<Vec<_>>());
            let mut rng = SplitMix64::new(seed);
            let homes: Vec<u8> = (0..12).map(|_| (1 + rng.below((1 << drives) - 1)) as u8).collect();
            let mut state = layer(&table, homes);
            state.train(&rows, 1.0);
            for _ in 0..20 {
                let (e, new) = (rng.below(12), (1 + rng.below((1 << drives) - 1)) as u8);
                let (before, change) = (state.total_ns(), state.change_ns(e, new));
                state.set(e, new);
                prop_assert!((before + change - state.total_ns()).abs() < 1.0);
                prop_assert!((by_hand(&table, &rows, state.homes()) - state.total_ns()).abs() < 1.0);
            }
            let before = (state.total_ns(), state.homes().iter().map(|h| h.count_ones()).sum::<u32>());
            let mut room = vec![1; drives];
            let used = |homes: &[u8], d: usize| homes.iter().filter(|h| **h >> d & 1 == 1).count();
            let start: Vec<usize> = (0..drives).map(|d| used(state.homes(), d) + 1).collect();
            state.improve(200, &mut room, &mut rng);
            prop_assert!(state.total_ns() <= before.0 + 1.0);
            prop_assert_eq!(state.homes().iter().map(|h| h.count_ones()).sum::<u32>(), before.1);
            for d in 0..drives {
                prop_assert_eq!(used(state.homes(), d) + room[d], start[d], "room is kept");
            }
        }
    }
}
