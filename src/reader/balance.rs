//! Whole experts over drives, so that the last of them is predicted to be there as early as possible. Pure.
//!
//! Every expert of a set has the same size, so this is the scheduling of equal jobs on machines of different speed, each
//! job allowed on some of them. A greedy assignment (the most confined experts first, each to the drive that would
//! have it earliest) is improved along paths: as long as moving experts from the latest drive over other drives to one
//! that ends earlier shortens the whole, that is done.
//!
//! **Guarantee.** The result is the best whole-read assignment under the given rates. If a better one existed, the
//! latest drive would have fewer experts in it; the difference of the two assignments, read as a flow, leads from that
//! drive to one with room below the present end, which is a path that would have been found.

use super::dispatch::DriveLoad;

/// Most drives: homes are bits of a `u64`.
const MAX_DRIVES: usize = 64;

/// Assigns whole experts; keeps its memory.
#[derive(Debug, Default)]
pub(super) struct Balance {
    drive_of: Vec<u8>,
    /// When each drive has delivered what it was assigned.
    end_ns: Vec<f64>,
    /// Time that one more expert takes on each drive.
    step_ns: Vec<f64>,
    used: Vec<u32>,
}

impl Balance {
    pub fn new(asks: usize, drives: usize) -> Self {
        Self {
            drive_of: Vec::with_capacity(asks),
            end_ns: Vec::with_capacity(drives),
            step_ns: Vec::with_capacity(drives),
            used: Vec::with_capacity(drives),
        }
    }

    /// By expert: its drive.
    pub fn drive_of(&self) -> &[u8] {
        &self.drive_of
    }

    /// When the last expert is predicted to be there.
    pub fn makespan_ns(&self) -> f64 {
        let ends = self.end_ns.iter().zip(&self.used).filter(|(_, n)| **n > 0);
        ends.map(|(end, _)| *end).fold(0.0, f64::max)
    }

    /// Assigns experts of `bytes` bytes each; bit d of `masks[i]` allows drive d for expert i, at least one is set.
    pub fn assign(&mut self, masks: &[u64], bytes: f64, loads: &[DriveLoad]) {
        self.end_ns.clear();
        self.end_ns.extend(loads.iter().map(DriveLoad::start_ns));
        self.step_ns.clear();
        self.step_ns.extend(loads.iter().map(|l| bytes * l.ns_per_byte));
        self.used.clear();
        self.used.resize(loads.len(), 0);
        self.drive_of.clear();
        self.drive_of.resize(masks.len(), 0);
        let alike = masks.windows(2).all(|w| w[0] == w[1]);
        if alike {
            (0..masks.len()).for_each(|ask| self.place(ask, masks[ask]));
            return; // greedy is exact for equal jobs that may go anywhere
        }
        for width in 1..=loads.len() as u32 {
            for (ask, &mask) in masks.iter().enumerate().filter(|(_, m)| m.count_ones() == width) {
                self.place(ask, mask);
            }
        }
        // Each round shortens the latest drive, so there are at most as many as experts times drives.
        for _ in 0..masks.len() * loads.len() {
            if !self.improve(masks) {
                return;
            }
        }
    }

    fn place(&mut self, ask: usize, mask: u64) {
        let mut best = (f64::INFINITY, 0);
        for drive in (0..self.end_ns.len()).filter(|d| mask >> d & 1 == 1) {
            let end = self.end_ns[drive] + self.step_ns[drive];
            if end < best.0 {
                best = (end, drive);
            }
        }
        let drive = best.1;
        self.end_ns[drive] += self.step_ns[drive];
        self.used[drive] += 1;
        self.drive_of[ask] = drive as u8;
    }

    /// Takes an expert off the latest drive, if a path of moves ends on a drive that is then still earlier.
    fn improve(&mut self, masks: &[u64]) -> bool {
        let drives = self.end_ns.len();
        let loaded = (0..drives).filter(|&d| self.used[d] > 0);
        let Some(latest) = loaded.max_by(|&a, &b| self.end_ns[a].total_cmp(&self.end_ns[b])) else { return false };
        // reach[d]: drives to which an expert of drive d could move.
        let mut reach = [0u64; MAX_DRIVES];
        for (&drive, &mask) in self.drive_of.iter().zip(masks) {
            reach[usize::from(drive)] |= mask;
        }
        let mut from = [0u8; MAX_DRIVES];
        let mut queue = [0u8; MAX_DRIVES];
        (queue[0], from[latest]) = (latest as u8, latest as u8);
        let (mut head, mut tail, mut seen) = (0, 1, 1u64 << latest);
        let mut goal = (self.end_ns[latest], latest);
        while head < tail {
            let at = usize::from(queue[head]);
            head += 1;
            let fresh = reach[at] & !seen;
            seen |= fresh;
            for next in (0..drives).filter(|d| fresh >> d & 1 == 1) {
                from[next] = at as u8;
                queue[tail] = next as u8;
                tail += 1;
                let end = self.end_ns[next] + self.step_ns[next];
                if end < goal.0 {
                    goal = (end, next);
                }
            }
        }
        if goal.1 == latest {
            return false;
        }
        let mut to = goal.1;
        while to != latest {
            let at = usize::from(from[to]);
            let mut movable = self.drive_of.iter().zip(masks);
            let Some(ask) = movable.position(|(&d, &m)| usize::from(d) == at && m >> to & 1 == 1) else { return false };
            self.drive_of[ask] = to as u8;
            to = at;
        }
        self.end_ns[goal.1] += self.step_ns[goal.1];
        self.used[goal.1] += 1;
        self.end_ns[latest] -= self.step_ns[latest];
        self.used[latest] -= 1;
        true
    }
}
