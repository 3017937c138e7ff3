//! Experts in parts, so that drives end together. Pure: homes, rates and bytes in flight go in, parts come out.
//!
//! **Level.** Over a set of drives the *water level* is the time `T` at which they have delivered the set's bytes if
//! none of them idles: `sum_d (T - start_d)+ / ns_per_byte_d = bytes`, where `start_d` is the fixed cost and what is in
//! flight already (bound.rs). Each drive's share is what it delivers by `T`.
//!
//! **Same homes** (a full mirror, and any barrier whose experts share their homes): whole experts fill each drive's
//! share as far as they go; the rests of the shares, laid end to end, are cut from the remaining experts. Every border
//! between two rests, moved to the nearest block, cuts at most one expert, so at most D - 1 are cut.
//!
//! **Mixed homes**: the level is the highest over all subsets of drives of what is confined to them (exact up to 8
//! drives, as in bound.rs; beyond, the pooled level, a lower bound). Starting from the best whole assignment, whole blocks
//! move along shortest paths from drives above their share to drives below it.
//!
//! **What is guaranteed.** Never later than the best whole assignment. With the same homes: within a block per drive,
//! and the cost of a read, of the water level, with at most D - 1 experts cut. With mixed homes and at most 8
//! drives within two, except that more experts may be cut.
//!
//! **A cut must be worth its read**: it stays only if the barrier without it would end later by more than what the read
//! that it adds may cost.

use super::balance::Balance;
use super::dispatch::{DriveLoad, Shape};
use crate::bound::MAX_SUBSET_DRIVES;

const MAX_DRIVES: usize = 64;

/// Bytes of an expert that come from one drive: whole blocks, but for the part that has the expert's end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cell {
    pub ask: u32,
    pub drive: u8,
    pub part: u8,
    pub parts: u8,
    pub from: u32,
    pub bytes: u32,
}

/// Cuts experts; keeps its memory.
#[derive(Debug, Default)]
pub(super) struct Splitter {
    cells: Vec<Cell>,
    parts_of: Vec<u8>,
    start_ns: Vec<f64>,
    byte_ns: Vec<f64>,
    read_ns: Vec<f64>,
    /// Bytes that each drive should get, and has.
    share: Vec<f64>,
    has: Vec<u64>,
    /// Drives by start.
    order: Vec<u8>,
}

impl Splitter {
    pub fn new(asks: usize, drives: usize) -> Self {
        Self {
            cells: Vec::with_capacity(asks * drives),
            parts_of: Vec::with_capacity(asks),
            start_ns: Vec::with_capacity(drives),
            byte_ns: Vec::with_capacity(drives),
            read_ns: Vec::with_capacity(drives),
            share: Vec::with_capacity(drives),
            has: Vec::with_capacity(drives),
            order: Vec::with_capacity(drives),
        }
    }

    /// Whole experts first, then the parts of each cut one in ascending order.
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// Cuts the set if that is worth it; `whole` is its best assignment without cuts. `false`: better left whole.
    pub fn split(&mut self, masks: &[u64], shape: Shape, loads: &[DriveLoad], whole: &Balance) -> bool {
        if masks.is_empty() || shape.bytes <= shape.block_bytes {
            return false;
        }
        self.set_drives(loads);
        self.cells.clear();
        if masks.iter().all(|&m| m == masks[0]) {
            self.same_homes(masks.len(), shape, masks[0]);
        } else {
            self.mixed_homes(masks, shape, whole);
        }
        self.count_parts(masks.len());
        let level = self.makespan_ns();
        self.merge(level);
        let cut = self.cells.iter().filter(|c| self.parts_of[c.ask as usize] > 1);
        let price = cut.map(|c| self.read_ns[usize::from(c.drive)]).reduce(f64::max);
        match price {
            Some(price) if self.makespan_ns() + price < whole.makespan_ns() => {
                self.number(shape.block_bytes);
                true
            }
            _ => false,
        }
    }

    fn set_drives(&mut self, loads: &[DriveLoad]) {
        self.start_ns.clear();
        self.start_ns.extend(loads.iter().map(DriveLoad::start_ns));
        self.byte_ns.clear();
        self.byte_ns.extend(loads.iter().map(|l| l.ns_per_byte));
        self.read_ns.clear();
        self.read_ns.extend(loads.iter().map(|l| l.read_ns));
        self.has.clear();
        self.has.resize(loads.len(), 0);
        self.order.clear();
        self.order.extend(0..loads.len() as u8);
        let start_ns = &self.start_ns;
        self.order.sort_unstable_by(|&a, &b| start_ns[usize::from(a)].total_cmp(&start_ns[usize::from(b)]));
    }

    /// The water level of `bytes` over the drives of `mask`.
    fn level_ns(&self, bytes: f64, mask: u64) -> f64 {
        let (mut rate, mut head_start, mut level) = (0.0, 0.0, f64::INFINITY);
        for drive in self.order.iter().map(|&d| usize::from(d)).filter(|d| mask >> d & 1 == 1) {
            if level <= self.start_ns[drive] {
                break;
            }
            let bytes_per_ns = 1.0 / self.byte_ns[drive];
            rate += bytes_per_ns;
            head_start += bytes_per_ns * self.start_ns[drive];
            level = (bytes + head_start) / rate;
        }
        level
    }

    /// Sets `share` to what each drive of `mask` delivers by `level`.
    fn set_share(&mut self, level: f64, mask: u64) {
        self.share.clear();
        for drive in 0..self.start_ns.len() {
            let room = ((level - self.start_ns[drive]) / self.byte_ns[drive]).max(0.0);
            self.share.push(if mask >> drive & 1 == 1 { room } else { 0.0 });
        }
    }

    fn end_ns(&self, drive: usize, bytes: u64) -> f64 {
        if bytes == 0 { 0.0 } else { self.start_ns[drive] + bytes as f64 * self.byte_ns[drive] }
    }

    fn makespan_ns(&self) -> f64 {
        (0..self.has.len()).map(|d| self.end_ns(d, self.has[d])).fold(0.0, f64::max)
    }

    fn same_homes(&mut self, asks: usize, shape: Shape, mask: u64) {
        let bytes = f64::from(shape.bytes);
        self.set_share(self.level_ns(asks as f64 * bytes, mask), mask);
        let members = || (0..MAX_DRIVES).filter(move |d| mask >> d & 1 == 1);
        let (mut ask, asks) = (0u32, asks as u32);
        for drive in members() {
            // A share that rounding left a millionth below a whole number of experts is that number.
            let whole = ((self.share[drive] / bytes + 1e-6) as u32).min(asks - ask);
            for _ in 0..whole {
                self.push(ask, drive, shape.bytes);
                ask += 1;
            }
            self.share[drive] -= f64::from(whole) * bytes;
        }
        let (mut border, mut at) = (0.0, 0);
        let first = ask;
        let last = members().rfind(|&d| self.share[d] > 0.0);
        for drive in members() {
            border += self.share[drive].max(0.0);
            let to = if Some(drive) == last { asks } else { asks.min(first + (border / bytes) as u32) };
            // The border lies in expert `to`, `inside` bytes from its start, on the nearest block or the expert's end.
            let inside = if to == asks { 0.0 } else { border - f64::from(to - first) * bytes };
            let blocks = (inside / f64::from(shape.block_bytes)).round() as u32;
            let inside = blocks.saturating_mul(shape.block_bytes).min(shape.bytes);
            while ask < to {
                self.push(ask, drive, shape.bytes - at);
                (ask, at) = (ask + 1, 0);
            }
            if ask == to && inside > at {
                self.push(ask, drive, inside - at);
                at = inside;
                if at == shape.bytes {
                    (ask, at) = (ask + 1, 0);
                }
            }
        }
    }

    fn push(&mut self, ask: u32, drive: usize, bytes: u32) {
        self.cells.push(Cell { ask, drive: drive as u8, bytes, ..Cell::default() });
        self.has[drive] += u64::from(bytes);
    }

    fn mixed_homes(&mut self, masks: &[u64], shape: Shape, whole: &Balance) {
        let level = self.mixed_level_ns(masks, u64::from(shape.bytes));
        self.set_share(level, u64::MAX);
        for (ask, &drive) in whole.drive_of().iter().enumerate() {
            self.push(ask as u32, usize::from(drive), shape.bytes);
        }
        // Only whole blocks move, so every drive may take one more.
        let block = u64::from(shape.block_bytes);
        self.share.iter_mut().for_each(|s| *s += block as f64);
        let mut stuck = 0u64;
        // Every path empties a cell, fills a drive or frees one from its excess.
        for _ in 0..masks.len() + 4 * self.has.len() * self.has.len() {
            let over = |d: &usize| stuck >> d & 1 == 0 && self.excess(*d) >= block as f64;
            let drives = (0..self.has.len()).filter(over);
            let Some(drive) = drives.max_by(|&a, &b| self.excess(a).total_cmp(&self.excess(b))) else { return };
            if !self.push_from(drive, masks, block) {
                stuck |= 1 << drive;
            }
        }
    }

    /// How much more a drive has than its share.
    fn excess(&self, drive: usize) -> f64 {
        self.has[drive] as f64 - self.share[drive]
    }

    /// The highest level over subsets of drives; the pooled one when there are too many subsets.
    fn mixed_level_ns(&self, masks: &[u64], bytes: u64) -> f64 {
        let drives = self.start_ns.len();
        let everything = masks.iter().fold(0, |all, m| all | m);
        let pooled = self.level_ns((masks.len() as u64 * bytes) as f64, everything);
        if drives > MAX_SUBSET_DRIVES {
            return pooled;
        }
        let subsets = 1usize << drives;
        let mut inside = [0u64; 1 << MAX_SUBSET_DRIVES];
        for &mask in masks {
            inside[mask as usize] += bytes;
        }
        for d in 0..drives {
            for a in (0..subsets).filter(|a| a >> d & 1 == 1) {
                inside[a] += inside[a ^ (1 << d)];
            }
        }
        let confined = (1..subsets).filter(|&a| inside[a] > 0);
        confined.map(|a| self.level_ns(inside[a] as f64, a as u64)).fold(pooled, f64::max)
    }

    /// Moves whole blocks from `over` along a shortest path to a drive with room. `false` when there is none.
    fn push_from(&mut self, over: usize, masks: &[u64], block: u64) -> bool {
        let drives = self.has.len();
        let mut from = [(0u8, 0u32); MAX_DRIVES];
        let mut queue = [0u8; MAX_DRIVES];
        queue[0] = over as u8;
        let (mut head, mut tail, mut seen) = (0, 1, 1u64 << over);
        let mut goal = None;
        while head < tail && goal.is_none() {
            let at = usize::from(queue[head]);
            head += 1;
            // For each new drive the largest cell that could move there.
            let mut best = [0u32; MAX_DRIVES];
            let movable = |c: &Cell| usize::from(c.drive) == at && u64::from(c.bytes) >= block;
            for (index, cell) in self.cells.iter().enumerate().filter(|(_, c)| movable(c)) {
                for next in (0..drives).filter(|d| masks[cell.ask as usize] & !seen & 1 << d != 0) {
                    if cell.bytes > best[next] {
                        best[next] = cell.bytes;
                        from[next] = (at as u8, index as u32);
                    }
                }
            }
            for next in (0..drives).filter(|&d| best[d] > 0) {
                seen |= 1 << next;
                queue[tail] = next as u8;
                tail += 1;
                if self.excess(next) <= -(block as f64) && goal.is_none() {
                    goal = Some(next);
                }
            }
        }
        let Some(goal) = goal else { return false };
        let mut amount = self.excess(over).min(-self.excess(goal)) as u64;
        let mut at = goal;
        while at != over {
            let (before, cell) = from[at];
            amount = amount.min(u64::from(self.cells[cell as usize].bytes));
            at = usize::from(before);
        }
        amount -= amount % block;
        at = goal;
        while at != over {
            let (before, cell) = from[at];
            self.move_bytes(cell as usize, at as u8, amount as u32);
            at = usize::from(before);
        }
        self.cells.retain(|c| c.bytes > 0);
        self.has[over] -= amount;
        self.has[goal] += amount;
        true
    }

    fn move_bytes(&mut self, cell: usize, to: u8, bytes: u32) {
        let Cell { ask, .. } = self.cells[cell];
        self.cells[cell].bytes -= bytes;
        match self.cells.iter_mut().find(|c| c.ask == ask && c.drive == to) {
            Some(there) => there.bytes += bytes,
            None => self.cells.push(Cell { ask, drive: to, bytes, ..Cell::default() }),
        }
    }

    fn count_parts(&mut self, asks: usize) {
        self.parts_of.clear();
        self.parts_of.resize(asks, 0);
        for cell in &self.cells {
            self.parts_of[cell.ask as usize] += 1;
        }
    }

    /// Undoes cuts that are not worth a read, the smallest parts first: those without which the set still ends within
    /// `level` and the cost of the read.
    fn merge(&mut self, level: f64) {
        let mut tried = 0u32;
        loop {
            // Parts in ascending order of size; `tried` is the size up to which all others have been looked at.
            let candidates = self.cells.iter().filter(|c| self.parts_of[c.ask as usize] > 1 && c.bytes > tried);
            let Some(size) = candidates.map(|c| c.bytes).min() else { return };
            let mut merged = false;
            for index in 0..self.cells.len() {
                let cell = self.cells[index];
                if cell.bytes == size && self.parts_of[cell.ask as usize] > 1 && self.merge_one(index, level) {
                    merged = true;
                    break;
                }
            }
            if !merged {
                tried = size;
            }
        }
    }

    fn merge_one(&mut self, index: usize, level: f64) -> bool {
        let part = self.cells[index];
        let drive = usize::from(part.drive);
        let limit = level + self.read_ns[drive];
        let mut best: Option<(f64, usize)> = None;
        for (other, cell) in self.cells.iter().enumerate() {
            if other != index && cell.ask == part.ask {
                let to = usize::from(cell.drive);
                let end = self.end_ns(to, self.has[to] + u64::from(part.bytes));
                if end <= limit && best.is_none_or(|b| end < b.0) {
                    best = Some((end, other));
                }
            }
        }
        let Some((_, other)) = best else { return false };
        let to = usize::from(self.cells[other].drive);
        self.cells[other].bytes += part.bytes;
        self.has[to] += u64::from(part.bytes);
        self.has[drive] -= u64::from(part.bytes);
        self.parts_of[part.ask as usize] -= 1;
        self.cells.swap_remove(index);
        true
    }

    /// Orders the cells and numbers the parts of each expert; the part with the expert's odd end comes last.
    fn number(&mut self, block: u32) {
        let parts_of = &self.parts_of;
        let key = |c: &Cell| (parts_of[c.ask as usize] > 1, c.ask, !c.bytes.is_multiple_of(block), c.drive);
        self.cells.sort_unstable_by_key(key);
        let (mut ask, mut part, mut from) = (u32::MAX, 0, 0);
        for cell in &mut self.cells {
            if cell.ask != ask {
                (ask, part, from) = (cell.ask, 0, 0);
            }
            (cell.part, cell.parts, cell.from) = (part, parts_of[cell.ask as usize], from);
            part += 1;
            from += cell.bytes;
        }
    }
}
