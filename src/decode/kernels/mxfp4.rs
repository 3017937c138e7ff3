//! What the MXFP4 products of all instruction sets have in common: where the codes and scales of a run of rows lie, and in
//! which order weight rows and activation rows meet. Computes nothing.

use super::out::Out;
use super::{MX_GROUP, Rows};

/// Bytes of a group's codes.
pub(super) const GROUP_BYTES: usize = MX_GROUP / 2;
/// Weight rows that all activation rows meet before the next ones are fetched.
const SWEEP_ROWS: usize = 32;

/// Whole rows of weights.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    packed: &'a [u8],
    scales: &'a [u8],
    groups: usize,
}

impl<'a> Weights<'a> {
    /// All rows of a matrix of `cols` columns.
    pub(super) fn new(packed: &'a [u8], scales: &'a [u8], cols: usize) -> Self {
        Self { packed, scales, groups: cols / MX_GROUP }
    }

    /// Rows `first..first + count`.
    pub(super) fn part(&self, first: usize, count: usize) -> Self {
        let (from, to) = (first * self.groups, (first + count) * self.groups);
        let packed = &self.packed[from * GROUP_BYTES..to * GROUP_BYTES];
        Self { packed, scales: &self.scales[from..to], groups: self.groups }
    }

    /// `[rows, groups]` times [`GROUP_BYTES`].
    pub(super) fn packed(&self) -> &'a [u8] {
        self.packed
    }

    /// `[rows, groups]`
    pub(super) fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// Groups of a row.
    pub(super) fn groups(&self) -> usize {
        self.groups
    }

    /// How many rows.
    pub(super) fn rows(&self) -> usize {
        self.scales.len() / self.groups.max(1)
    }
}

/// Some weight rows and the activation rows that they meet.
pub(super) struct Meeting<'a> {
    /// The weight rows; the first of them is column `column` of the results.
    pub(super) weights: Weights<'a>,
    pub(super) column: usize,
    /// Activation rows in the kernels' order, one after another; the first of them is row `row` of the results.
    pub(super) x: &'a [f32],
    pub(super) row: usize,
    /// Activation rows, 1 to the most that the kernels take.
    pub(super) count: usize,
}

/// Lets every row of `w` meet every row of `x`, at most `most` of them at a time. `order` brings activations into the
/// kernels' order, as many rows together as `room` has space for, which is one at least: with space for all, each row is
/// ordered once and each weight row fetched once.
pub(super) fn meet(
    w: Weights<'_>,
    x: Rows<'_>,
    out: &mut Out<'_>,
    room: &mut [f32],
    most: usize,
    order: fn(&[f32], &mut [f32]),
    products: &dyn Fn(Meeting<'_>, &mut Out<'_>),
) {
    let cols = w.groups * MX_GROUP;
    if cols == 0 {
        (0..x.count).for_each(|r| (0..out.width()).for_each(|o| out.put(r, o, &[0.0])));
        return;
    }
    let together = (room.len() / cols).min(x.count);
    assert!(together > 0 || x.count == 0, "no room for a row of activations");
    let mut first = 0;
    while first < x.count {
        let some = together.min(x.count - first);
        for (i, to) in room.chunks_exact_mut(cols).take(some).enumerate() {
            order(&x.data[(first + i) * x.stride..][..cols], to);
        }
        let sweep = if some <= most { w.rows() } else { SWEEP_ROWS };
        let mut column = 0;
        while column < w.rows() {
            let weights = w.part(column, sweep.min(w.rows() - column));
            let mut row = 0;
            while row < some {
                let count = most.min(some - row);
                let x = &room[row * cols..(row + count) * cols];
                products(Meeting { weights, column, x, row: first + row, count }, out);
                row += count;
            }
            column += weights.rows();
        }
        first += some;
    }
}

/// Even columns of a group before odd ones.
pub(super) fn evens_first(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.chunks_exact_mut(MX_GROUP).zip(x.chunks_exact(MX_GROUP)) {
        let (evens, odds) = out.split_at_mut(MX_GROUP / 2);
        for ((even, odd), pair) in evens.iter_mut().zip(odds).zip(x.chunks_exact(2)) {
            (*even, *odd) = (pair[0], pair[1]);
        }
    }
}
