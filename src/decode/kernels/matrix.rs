//! What products are made of: weight matrices in the forms that occur, and rows of activations. Shapes and bytes only;
//! what a code is worth is known to the instruction sets' own files.

use super::{HOT_BYTES, MX_GROUP, PANEL_BYTES, WIDE_ROWS};

/// Bytes of an int8 row's scale.
pub const SCALE_BYTES: usize = 4;

/// A weight matrix `[rows, cols]`, row after row, in one of the forms that occur.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Data<'a>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Data<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u8]),
    /// Signed bytes, and four bytes of scale a row.
    Int8 {
        codes: &'a [u8],
        scales: &'a [u8],
    },
    Mxfp4 {
        packed: &'a [u8],
        scales: &'a [u8],
    },
}

/// The scale of row `row` of an int8 matrix.
pub(super) fn row_scale(scales: &[u8], row: usize) -> f32 {
    let s = &scales[row * SCALE_BYTES..(row + 1) * SCALE_BYTES];
    f32::from_le_bytes([s[0], s[1], s[2], s[3]])
}

/// Rows of activations of `cols` values that one pass over a matrix keeps hot.
pub(super) fn hot_rows(cols: usize) -> usize {
    (HOT_BYTES / (size_of::<f32>() * cols.max(1))).max(1)
}

/// Weight rows of `cols` numbers that stay in the nearest cache while rows of activations pass by.
pub(super) fn panel_rows(cols: usize) -> usize {
    (PANEL_BYTES / (size_of::<f32>() * cols.max(1)) / WIDE_ROWS * WIDE_ROWS).max(WIDE_ROWS)
}

/// A product of sizes, on which kernels rely.
fn product(a: usize, b: usize) -> usize {
    let product = a.checked_mul(b);
    assert!(product.is_some(), "a matrix larger than any memory");
    product.unwrap_or(0)
}

impl<'a> Matrix<'a> {
    /// Single precision; `data` holds at least `rows * cols` values.
    pub fn f32(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: Data::F32(&data[..product(rows, cols)]) }
    }

    /// bfloat16, little endian, any alignment; `bytes` holds at least `rows * cols * 2`.
    pub fn bf16(bytes: &'a [u8], rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: Data::Bf16(&bytes[..product(product(rows, cols), 2)]) }
    }

    /// int8 by rows: weight `[r][c]` is `scale[r] * code[r][c]` with signed codes, one byte each. `scales` holds one
    /// single-precision number a row, four bytes little endian, any alignment. `codes` holds at least `rows * cols` bytes,
    /// `scales` at least `rows * SCALE_BYTES`.
    pub fn int8_rows(codes: &'a [u8], scales: &'a [u8], rows: usize, cols: usize) -> Self {
        let (codes, scales) = (&codes[..product(rows, cols)], &scales[..product(rows, SCALE_BYTES)]);
        Self { rows, cols, data: Data::Int8 { codes, scales } }
    }

    /// MXFP4: two e2m1 codes a byte, low nibble first, and one e8m0 scale per 32 columns. `cols` is a multiple of 32.
    pub fn mxfp4(packed: &'a [u8], scales: &'a [u8], rows: usize, cols: usize) -> Self {
        assert!(cols.is_multiple_of(MX_GROUP), "MXFP4 rows are whole groups of {MX_GROUP}");
        let (packed, scales) = (&packed[..product(rows, cols) / 2], &scales[..product(rows, cols) / MX_GROUP]);
        Self { rows, cols, data: Data::Mxfp4 { packed, scales } }
    }

    /// Rows `first..first + count`.
    pub fn part(&self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.rows, "rows beyond the last");
        let (from, to) = (first * self.cols, (first + count) * self.cols);
        let data = match self.data {
            Data::F32(data) => Data::F32(&data[from..to]),
            Data::Bf16(bytes) => Data::Bf16(&bytes[from * 2..to * 2]),
            Data::Int8 { codes, scales } => Data::Int8 {
                codes: &codes[from..to],
                scales: &scales[first * SCALE_BYTES..(first + count) * SCALE_BYTES],
            },
            Data::Mxfp4 { packed, scales } => {
                Data::Mxfp4 { packed: &packed[from / 2..to / 2], scales: &scales[from / MX_GROUP..to / MX_GROUP] }
            }
        };
        Self { rows: count, cols: self.cols, data }
    }

    /// Whether its products need activations in another order.
    pub(super) fn is_ordered(&self) -> bool {
        matches!(self.data, Data::Mxfp4 { .. })
    }

    /// Values of working space for a product with `rows` rows of activations.
    pub(super) fn room(&self, rows: usize) -> usize {
        match self.data {
            Data::Mxfp4 { .. } => rows.min(hot_rows(self.cols)) * self.cols,
            Data::Bf16(_) | Data::Int8 { .. } if rows > 1 => {
                panel_rows(self.cols).min(self.rows.next_multiple_of(WIDE_ROWS)) * self.cols
            }
            _ => 0,
        }
    }

    /// Output width.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input width.
    pub fn cols(&self) -> usize {
        self.cols
    }
}

/// Rows of activations: row `i` starts at `data[i * stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The values.
    pub data: &'a [f32],
    /// Distance of two rows.
    pub stride: usize,
    /// How many rows.
    pub count: usize,
}

impl<'a> Rows<'a> {
    /// `count` rows of width `data.len() / count`, one after another.
    pub fn packed(data: &'a [f32], count: usize) -> Self {
        Self { data, stride: data.len() / count.max(1), count }
    }

    /// Rows `first..first + count` of these.
    pub fn part(&self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.count, "rows beyond the last");
        Self { data: &self.data[(first * self.stride).min(self.data.len())..], stride: self.stride, count }
    }

    pub(super) fn fits(&self, width: usize) -> bool {
        fits(self.data.len(), self.stride, self.count, width)
    }
}

/// Whether `count` rows of `width` values, `stride` apart, lie within `len` values.
pub(super) fn fits(len: usize, stride: usize, count: usize, width: usize) -> bool {
    count == 0 || (count - 1).checked_mul(stride).and_then(|n| n.checked_add(width)).is_some_and(|n| n <= len)
}
