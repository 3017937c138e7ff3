//! The latent rows that an MLA layer keeps of one text, in a ring: all of them, the newest with older blocks elsewhere, or the
//! newest alone. Knows positions and blocks; who keeps the blocks that left is `kv`'s business.

use super::kv::CacheShape;
use std::ops::Range;

/// Latent rows of one layer and text.
pub(super) struct Latent {
    /// `[ring, cached]`; the row of position `p` lies at `p % ring`.
    rows: Vec<f32>,
    cached: usize,
    ring: usize,
    /// Rows before this position are not in memory.
    first: usize,
    kind: Kind,
    /// Most rows that were in memory at once.
    most: usize,
}

/// What becomes of rows that there is no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// There is room for all.
    Whole,
    /// They go away in blocks of `block_rows`, the first of which has the number `base`.
    Spilled { base: usize, block_rows: usize },
    /// Nothing looks back further than so many rows, its own included: they are dropped.
    Window(usize),
}

/// A block of rows that must leave before others can come.
pub(super) struct Leaving<'a> {
    /// Its number.
    pub(super) block: usize,
    /// Its rows.
    pub(super) rows: &'a [f32],
}

impl Latent {
    /// Empty, for a text of at most `max_context` rows of `cached` values. `index` counts layers with such a cache, over all lanes.
    pub(super) fn new(cached: usize, max_context: usize, shape: CacheShape, index: usize) -> Self {
        let (ring, kind) = match shape {
            CacheShape::Whole => (max_context, Kind::Whole),
            CacheShape::Spilled(plan) => {
                let (base, block_rows) = (index * plan.text_blocks, plan.block_rows);
                (plan.ring_rows, Kind::Spilled { base, block_rows })
            }
            CacheShape::Window { rows, ahead } if rows + ahead < max_context => (rows + ahead, Kind::Window(rows)),
            CacheShape::Window { rows, .. } => (max_context, Kind::Window(rows)),
        };
        // zeroed pages, which take memory only when they are written
        Self { rows: vec![0.0; ring * cached], cached, ring, first: 0, kind, most: 0 }
    }

    /// Forgets the text. Rows are read only up to the position, so old ones may stay.
    pub(super) fn reset(&mut self) {
        self.first = 0;
    }

    /// Whether a text that is cut to `position` rows finds all that its next row looks at.
    pub(super) fn reaches_back_to(&self, position: usize) -> bool {
        match self.kind {
            Kind::Whole => true,
            Kind::Spilled { .. } => self.first <= position,
            Kind::Window(_) => self.first <= self.seen(position).start,
        }
    }

    /// Positions that the row at `position` looks at.
    pub(super) fn seen(&self, position: usize) -> Range<usize> {
        let from = match self.kind {
            Kind::Window(rows) => (position + 1).saturating_sub(rows),
            Kind::Whole | Kind::Spilled { .. } => 0,
        };
        from..position + 1
    }

    /// Blocks that have left, and the number of the first.
    pub(super) fn spilled(&self) -> (usize, usize) {
        match self.kind {
            Kind::Spilled { base, block_rows } => (self.first / block_rows, base),
            Kind::Whole | Kind::Window(_) => (0, 0),
        }
    }

    /// Rows of a block that has left.
    pub(super) fn block_rows(&self) -> usize {
        if let Kind::Spilled { block_rows, .. } = self.kind { block_rows } else { 0 }
    }

    /// Most rows that were in memory at once.
    pub(super) fn most_rows(&self) -> usize {
        self.most
    }

    /// Position of the first row in memory.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// The block that must leave so that `rows` rows can be put at `position`, if one must and can: rows from `kept` on stay.
    pub(super) fn leaving(&self, position: usize, rows: usize, kept: usize) -> Option<Leaving<'_>> {
        let Kind::Spilled { base, block_rows } = self.kind else { return None };
        let end = self.first + block_rows;
        if position - self.first + rows <= self.ring || end > kept.min(position) {
            return None;
        }
        let at = self.first % self.ring * self.cached;
        let rows = &self.rows[at..at + block_rows * self.cached];
        Some(Leaving { block: base + self.first / block_rows, rows })
    }

    /// The oldest block in memory has left.
    pub(super) fn left(&mut self) {
        self.first += self.block_rows();
    }

    /// Rows that can be put at `position` together, of `rows`.
    pub(super) fn room(&self, position: usize, rows: usize) -> usize {
        let held = match self.kind {
            Kind::Whole | Kind::Spilled { .. } => position - self.first,
            Kind::Window(_) => position - self.seen(position).start,
        };
        rows.min(self.ring.saturating_sub(held))
    }

    /// Takes `rows`, the first at `position`, for which there is [room](Latent::room). Returns by how much the most rows that were
    /// ever held has grown, and how many rows were dropped for them.
    pub(super) fn put(&mut self, position: usize, rows: &[f32]) -> (usize, usize) {
        let count = rows.len() / self.cached;
        for (row, at) in rows.chunks_exact(self.cached).zip(position..) {
            let at = at % self.ring * self.cached;
            self.rows[at..at + self.cached].copy_from_slice(row);
        }
        self.held_to(position + count)
    }

    fn held_to(&mut self, end: usize) -> (usize, usize) {
        let first = self.first.max(end.saturating_sub(self.ring));
        let dropped = first - self.first;
        self.first = first;
        let grown = (end - self.first).saturating_sub(self.most);
        self.most += grown;
        (grown, dropped)
    }

    /// The place of rows from `position` on, to be filled: at most `rows`, fewer where the ring ends. Counts as [`Latent::put`].
    pub(super) fn place(&mut self, position: usize, rows: usize) -> (&mut [f32], usize) {
        let at = position % self.ring;
        let count = rows.min(self.ring - at);
        let (grown, _) = self.held_to(position + count);
        (&mut self.rows[at * self.cached..(at + count) * self.cached], grown)
    }

    /// Rows of positions that are in memory, in at most two pieces.
    pub(super) fn pieces(&self, positions: Range<usize>) -> [&[f32]; 2] {
        let (from, count) = (positions.start % self.ring, positions.len());
        let before = count.min(self.ring - from);
        let piece = |from: usize, count: usize| &self.rows[from * self.cached..(from + count) * self.cached];
        [piece(from, before), piece(0, count - before)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::kv::KvPlan;
    use super::*;

    fn rows(positions: Range<usize>) -> Vec<f32> {
        positions.flat_map(|p| [p as f32, 0.5]).collect()
    }

    fn held(cache: &Latent, positions: Range<usize>) -> Vec<f32> {
        cache.pieces(positions).concat()
    }

    #[test]
    fn the_oldest_whole_block_leaves_and_rows_on_trial_never_do() {
        let mut plan = KvPlan::default();
        (plan.block_rows, plan.ring_rows, plan.text_blocks) = (4, 8, 10);
        let mut cache = Latent::new(2, 40, CacheShape::Spilled(plan), 3);
        assert!(cache.leaving(0, 8, 40).is_none());
        assert_eq!(cache.put(0, &rows(0..7)), (7, 0));
        assert_eq!((cache.room(7, 5), cache.put(7, &rows(7..8))), (1, (1, 0)));
        assert!(cache.leaving(8, 1, 3).is_none(), "its last row is on trial");
        assert_eq!(cache.room(8, 1), 0);
        let leaving = cache.leaving(8, 1, 8).unwrap();
        assert_eq!((leaving.block, leaving.rows), (30, &rows(0..4)[..]));
        cache.left();
        assert_eq!((cache.spilled(), cache.first()), ((1, 30), 4));
        assert!(cache.leaving(8, 4, 8).is_none());
        assert_eq!(cache.put(8, &rows(8..12)), (0, 0), "never more than before");
        assert_eq!(held(&cache, 4..12), rows(4..12));
        assert_eq!(held(&cache, 6..9), rows(6..9));
        assert_eq!(cache.leaving(12, 1, 12).unwrap().rows, &rows(4..8)[..]);
        assert!(cache.reaches_back_to(4) && !cache.reaches_back_to(3));
        cache.reset();
        assert_eq!((cache.first(), cache.seen(5)), (0, 0..6));
    }

    #[test]
    fn a_window_keeps_what_is_looked_at_after_going_back() {
        let mut cache = Latent::new(2, 40, CacheShape::Window { rows: 4, ahead: 3 }, 0);
        let (mut position, mut dropped) = (0, 0);
        while position < 20 {
            let count = cache.room(position, 9);
            assert!(count >= 3);
            dropped += cache.put(position, &rows(position..position + count)).1;
            for p in position..position + count {
                assert_eq!(held(&cache, cache.seen(p)), rows(p.saturating_sub(3)..p + 1));
            }
            position += count;
        }
        assert_eq!((cache.most, dropped), (7, position - 7));
        assert!(cache.reaches_back_to(position - 3), "proposals are taken back");
        assert!(!cache.reaches_back_to(position - 5));
    }
}
