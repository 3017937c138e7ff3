//! Where a product's results go: a grid of cells in a slice, of which several threads may hold columns of their own. Every
//! write is checked against the grid.

use std::marker::PhantomData;

/// `rows` rows of `width` cells, `stride` apart.
pub struct Out<'a> {
    start: *mut f32,
    stride: usize,
    rows: usize,
    width: usize,
    cells: PhantomData<&'a mut [f32]>,
}

// SAFETY: an `Out` is a mutable borrow of its cells, which are plain numbers; `columns` is what may give cells to other
// threads, and its contract keeps them apart.
unsafe impl Sync for Out<'_> {}
// SAFETY: as above.
unsafe impl Send for Out<'_> {}

impl<'a> Out<'a> {
    /// Row `r` begins at `cells[r * stride]`.
    pub fn new(cells: &'a mut [f32], stride: usize, rows: usize, width: usize) -> Self {
        assert!(super::fits(cells.len(), stride, rows, width) && (rows < 2 || width <= stride), "results do not fit");
        Self { start: cells.as_mut_ptr(), stride, rows, width, cells: PhantomData }
    }

    /// Cells of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows `first..first + count`, while this one is not used.
    pub fn rows(&mut self, first: usize, count: usize) -> Out<'_> {
        assert!(first + count <= self.rows, "rows beyond the last");
        // SAFETY: row `first` begins within the cells, or directly behind them when `count` is 0 and nothing is written.
        let start = if count == 0 { self.start } else { unsafe { self.start.add(first * self.stride) } };
        Out { start, rows: count, cells: PhantomData, ..*self }
    }

    /// Columns `first..first + count` of all rows.
    ///
    /// # Safety
    /// While the result lives, nobody else uses these columns.
    pub unsafe fn columns(&self, first: usize, count: usize) -> Out<'_> {
        assert!(first + count <= self.width, "columns beyond the last");
        // SAFETY: column `first` lies within every row, or directly behind when `count` is 0; without a row there is no cell
        // to point at, and nothing is written.
        let start = if self.rows == 0 { self.start } else { unsafe { self.start.add(first) } };
        Out { start, width: count, cells: PhantomData, ..*self }
    }

    /// Writes `values` to columns `at..` of row `row`.
    pub fn put(&mut self, row: usize, at: usize, values: &[f32]) {
        assert!(row < self.rows && at + values.len() <= self.width, "results do not fit");
        // SAFETY: by the check these are cells of the grid, which is borrowed for this `Out` alone.
        unsafe { self.start.add(row * self.stride + at).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_write_their_own_cells() {
        let mut cells = [0.0; 11];
        let mut out = Out::new(&mut cells, 4, 3, 3);
        out.put(0, 1, &[1.0, 2.0]);
        out.rows(1, 2).put(1, 0, &[3.0]);
        // SAFETY: one at a time.
        unsafe { out.columns(2, 1) }.put(1, 0, &[4.0]);
        assert_eq!(cells, [0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 4.0, 0.0, 3.0, 0.0, 0.0]);
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn a_write_beyond_the_columns_is_refused() {
        let mut cells = [0.0; 8];
        let out = Out::new(&mut cells, 4, 2, 4);
        // SAFETY: one at a time.
        unsafe { out.columns(0, 2) }.put(0, 1, &[1.0, 2.0]);
    }
}
