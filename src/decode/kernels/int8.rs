//! Products with int8 activations, which are not exact: each row of activations becomes signed bytes with one scale for every
//! 32 columns, once for a product, and products of bytes are summed as integers. Knows the layout of such rows, the
//! portable products, which are the reference, and which code computes what; no instruction set.
//!
//! A group of 32 columns: `scale = largest magnitude / 127`, `code = x * (127 / largest magnitude)` rounded to the nearest, halves
//! to the even code. One row's product with one weight row is sixteen sums over ascending groups, each `sum = integers * factor +
//! sum` in one rounding, and then the sum of the sixteen. Integers are exact, so all instruction sets give the same bits, whatever
//! shares the call.
//!
//! MXFP4: group `g` adds to sum `g mod 16`; the integer is over twice the weights, which are whole numbers, and the factor is the
//! weights' scale times half of the activations'. int8 rows: columns `4 j .. 4 j + 4` of group `g` add to sum `8 (g mod 2) + j`, the
//! factor is the activations' scale, and the row's scale is applied to the sum of all.

use super::matrix::{Data, row_scale};
use super::mxfp4::{GROUP_BYTES, Weights};
use super::out::Out;
use super::scalar::{E2M1, e8m0};
use super::{
    Activations, CHUNK_PRODUCTS, CHUNKS_PER_THREAD, KernelIsa, Kernels, MX_GROUP, Matrix, ROW_TILE, Rows, shared,
};
use crate::knob::{self, Knob};
use std::cell::RefCell;
use std::ops::Range;

/// Sums that are kept apart until the end of a row.
const LANES: usize = 16;
/// Groups of a strip.
pub(super) const GROUPS: usize = 16;
/// Columns of a strip.
const COLUMNS: usize = GROUPS * MX_GROUP;
/// Codes that lie together.
pub(super) const TOGETHER: usize = 64;
/// Added to twice an e2m1 value it gives no negative number.
const E2M1_OFFSET: i32 = 12;
/// Added to an int8 weight it gives no negative number.
const INT8_OFFSET: i32 = 128;
/// Largest code.
const MAX_CODE: f32 = 127.0;
/// Activation rows that are turned into int8 together: what they need stays in a second-level cache.
pub(super) const MOST_ROWS: usize = 64;
/// Weight rows that all activation rows meet before the next ones are fetched.
const SWEEP_ROWS: usize = 32;
/// Activation rows that a weight row meets at once.
const TALL: usize = 4;
/// Results that are written together.
const OUT_TOGETHER: usize = 8;
/// Weight rows follow one another without a gap and are read one by one, so that a prefetcher sees one long run of bytes; bytes
/// this far ahead are asked for as well, because on some processors it stops at every page.
#[cfg(target_arch = "x86_64")]
pub(super) const AHEAD: usize = 4096;

/// Sixteen groups of a row of activations. What is behind the last column is zeros.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Strip {
    /// For MXFP4 by four groups, their even columns and their odd ones; for int8 rows in order.
    pub(super) codes: [[i8; TOGETHER]; COLUMNS / TOGETHER],
    /// By group.
    pub(super) scales: [f32; GROUPS],
    /// Minus what the offset of weights adds to integers: for MXFP4 by group, the first of these; for int8 rows by four columns.
    pub(super) corrections: [[i32; LANES]; COLUMNS / TOGETHER],
}

const EMPTY: Strip = Strip {
    codes: [[0; TOGETHER]; COLUMNS / TOGETHER],
    scales: [0.0; GROUPS],
    corrections: [[0; LANES]; COLUMNS / TOGETHER],
};

/// Rows of int8 activations, in the order of one form of weights.
#[derive(Clone, Copy)]
pub(super) struct Quantized<'a> {
    strips: &'a [Strip],
    /// Strips of a row.
    of_row: usize,
    count: usize,
}

impl<'a> Quantized<'a> {
    fn row(&self, row: usize) -> &'a [Strip] {
        &self.strips[row * self.of_row..(row + 1) * self.of_row]
    }
}

thread_local! {
    /// A thread's place for activations of products that it begins; [`make_room`] makes it large enough.
    static ROOM: RefCell<Vec<Strip>> = const { RefCell::new(Vec::new()) };
}

/// Gives the calling thread its place for `rows` rows of up to `cols` activations.
pub(super) fn make_room(cols: usize, rows: usize) {
    ROOM.with_borrow_mut(|room| grow(room, cols.div_ceil(COLUMNS) * rows));
}

/// Bytes of such a place.
pub(super) fn room_bytes(cols: usize, rows: usize) -> u64 {
    (cols.div_ceil(COLUMNS) as u64).saturating_mul(rows as u64).saturating_mul(size_of::<Strip>() as u64)
}

fn grow(room: &mut Vec<Strip>, strips: usize) {
    if room.len() < strips {
        room.resize(strips, EMPTY);
    }
}

/// Turns a row of activations into strips.
type Order = fn(&[f32], &mut [Strip]);

fn quantize<'a>(order: Order, x: Rows<'_>, cols: usize, room: &'a mut Vec<Strip>) -> Quantized<'a> {
    let of_row = cols.div_ceil(COLUMNS);
    grow(room, of_row * x.count);
    let strips = &mut room[..of_row * x.count];
    if of_row > 0 {
        for (row, strips) in strips.chunks_exact_mut(of_row).enumerate() {
            order(&x.data[row * x.stride..][..cols], strips);
        }
    }
    Quantized { strips, of_row, count: x.count }
}

/// Codes of at most 32 activations, and their scale. A group with a value that is no finite number has codes of zero and a
/// scale that is no number, so that it is seen in every result; one whose scale would be no normal number has zeros.
#[inline(always)]
fn group(x: &[f32], codes: &mut [i8; MX_GROUP]) -> f32 {
    // as whole numbers, magnitudes compare as such, and what is not finite is above them
    let most = f32::from_bits(x.iter().fold(0, |most: u32, v| most.max(v.to_bits() & 0x7fff_ffff)));
    let scale = most / MAX_CODE;
    *codes = [0; MX_GROUP];
    if !most.is_finite() {
        return f32::NAN;
    }
    if scale < f32::MIN_POSITIVE {
        return 0.0;
    }
    let per_step = MAX_CODE / most;
    for (code, v) in codes.iter_mut().zip(x) {
        *code = (v * per_step).round_ties_even() as i8;
    }
    scale
}

/// A row in the order of MXFP4 weights; scales are halved, because weights are doubled.
#[inline(always)]
pub(super) fn for_mxfp4(x: &[f32], strips: &mut [Strip]) {
    for (x, strip) in x.chunks(COLUMNS).zip(strips) {
        *strip = EMPTY;
        for (g, x) in x.chunks(MX_GROUP).enumerate() {
            let mut codes = [0; MX_GROUP];
            strip.scales[g] = 0.5 * group(x, &mut codes);
            strip.corrections[0][g] = -E2M1_OFFSET * sum(&codes);
            let at = g % 4 * GROUP_BYTES;
            for (i, [even, odd]) in codes.as_chunks().0.iter().enumerate() {
                strip.codes[g / 4 * 2][at + i] = *even;
                strip.codes[g / 4 * 2 + 1][at + i] = *odd;
            }
        }
    }
}

/// A row in the order of int8 weights.
#[inline(always)]
pub(super) fn for_int8(x: &[f32], strips: &mut [Strip]) {
    for (x, strip) in x.chunks(COLUMNS).zip(strips) {
        *strip = EMPTY;
        for (g, x) in x.chunks(MX_GROUP).enumerate() {
            let mut codes = [0; MX_GROUP];
            strip.scales[g] = group(x, &mut codes);
            strip.codes[g / 2][g % 2 * MX_GROUP..][..MX_GROUP].copy_from_slice(&codes);
            for (lane, codes) in strip.corrections[g / 2][g % 2 * 8..].iter_mut().zip(codes.as_chunks::<4>().0) {
                *lane = -INT8_OFFSET * sum(codes);
            }
        }
    }
}

#[inline(always)]
fn sum(codes: &[i8]) -> i32 {
    codes.iter().map(|&c| i32::from(c)).sum()
}

/// Weights of one form, and the code that multiplies them.
pub(super) trait Products: Copy {
    /// Row `row` times each of `x`.
    ///
    /// # Safety
    /// The processor has the instructions of the implementation; the row exists, and those of `x` are as wide.
    unsafe fn row<const R: usize>(self, row: usize, x: [&[Strip]; R]) -> [f32; R];
}

/// All `rows` rows of `w` times all rows of `x`.
///
/// # Safety
/// As for [`Products::row`].
pub(super) unsafe fn products<W: Products>(w: W, rows: usize, x: Quantized<'_>, out: &mut Out<'_>) {
    let sweep = if x.count <= TALL { rows.max(1) } else { SWEEP_ROWS };
    for first in (0..rows).step_by(sweep) {
        let some = first..rows.min(first + sweep);
        for row in (0..x.count).step_by(TALL) {
            // SAFETY: by contract.
            unsafe {
                match x.count - row {
                    1 => rows_of::<W, 1>(w, some.clone(), x, row, out),
                    2 => rows_of::<W, 2>(w, some.clone(), x, row, out),
                    3 => rows_of::<W, 3>(w, some.clone(), x, row, out),
                    _ => rows_of::<W, TALL>(w, some.clone(), x, row, out),
                }
            }
        }
    }
}

/// Some weight rows against `R` rows of activations.
unsafe fn rows_of<W: Products, const R: usize>(
    w: W,
    weights: Range<usize>,
    x: Quantized<'_>,
    row: usize,
    out: &mut Out<'_>,
) {
    let x = std::array::from_fn(|r| x.row(row + r));
    for first in weights.clone().step_by(OUT_TOGETHER) {
        let n = OUT_TOGETHER.min(weights.end - first);
        let mut sums = [[0.0; OUT_TOGETHER]; R];
        for o in 0..n {
            // SAFETY: by contract.
            let row: [f32; R] = unsafe { w.row(first + o, x) };
            sums.iter_mut().zip(row).for_each(|(sums, sum)| sums[o] = sum);
        }
        sums.iter().enumerate().for_each(|(r, sums)| out.put(row + r, first, &sums[..n]));
    }
}

/// The sum of the sums of an int8 product.
fn reduce(l: [f32; LANES]) -> f32 {
    let h: [f32; 8] = std::array::from_fn(|i| l[i] + l[i + 8]);
    ((h[0] + h[1]) + (h[2] + h[3])) + ((h[4] + h[5]) + (h[6] + h[7]))
}

/// The sum of the sums of an MXFP4 product: even groups, then odd ones.
fn reduce_apart(l: [f32; LANES]) -> f32 {
    let h: [f32; 8] = std::array::from_fn(|i| l[i] + l[i + 8]);
    ((h[0] + h[2]) + (h[4] + h[6])) + ((h[1] + h[3]) + (h[5] + h[7]))
}

/// Weights that portable Rust multiplies.
#[derive(Clone, Copy)]
struct Portable<'a>(Matrix<'a>);

impl Products for Portable<'_> {
    unsafe fn row<const R: usize>(self, row: usize, x: [&[Strip]; R]) -> [f32; R] {
        let Matrix { cols, data, .. } = self.0;
        x.map(|x| match data {
            Data::Mxfp4 { packed, scales } => mxfp4(Weights::new(packed, scales, cols).part(row, 1), x),
            Data::Int8 { codes, scales } => row_scale(scales, row) * int8(&codes[row * cols..(row + 1) * cols], x),
            // these keep f32 activations: `Kernels::quantizes`
            Data::F32(_) | Data::Bf16(_) => f32::NAN,
        })
    }
}

fn mxfp4(w: Weights<'_>, x: &[Strip]) -> f32 {
    /// Twice the value of an e2m1 code.
    const DOUBLED: [i32; 16] = {
        let mut all = [0; 16];
        let mut i = 0;
        while i < 8 {
            (all[i], all[i + 8]) = ((2.0 * E2M1[i]) as i32, -(2.0 * E2M1[i]) as i32);
            i += 1;
        }
        all
    };
    let mut lanes = [0.0f32; LANES];
    let groups = w.packed().as_chunks::<GROUP_BYTES>().0.iter().zip(w.scales());
    for (g, (bytes, &own)) in groups.enumerate() {
        let (strip, at) = (&x[g / GROUPS], g % GROUPS);
        let [evens, odds] = [0, 1].map(|odd| &strip.codes[at / 4 * 2 + odd][at % 4 * GROUP_BYTES..][..GROUP_BYTES]);
        let mut sum = 0;
        for ((byte, even), odd) in bytes.iter().zip(evens).zip(odds) {
            sum += DOUBLED[usize::from(byte & 15)] * i32::from(*even);
            sum += DOUBLED[usize::from(byte >> 4)] * i32::from(*odd);
        }
        lanes[at] = (sum as f32).mul_add(e8m0(own) * strip.scales[at], lanes[at]);
    }
    reduce_apart(lanes)
}

fn int8(w: &[u8], x: &[Strip]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (at, w) in w.chunks(TOGETHER).enumerate() {
        let (strip, at) = (&x[at / 8], at % 8);
        let quads = w.chunks(4).zip(strip.codes[at].as_chunks::<4>().0);
        for ((lane, sum), (w, codes)) in lanes.iter_mut().enumerate().zip(quads) {
            let products: i32 = w.iter().zip(codes).map(|(w, x)| i32::from(w.cast_signed()) * i32::from(*x)).sum();
            *sum = (products as f32).mul_add(strip.scales[2 * at + lane / 8], *sum);
        }
    }
    reduce(lanes)
}

impl Kernels {
    /// Whether products turn activations into int8 now where the weights take them.
    pub(super) fn quantizing(&self) -> bool {
        let asked = self.activations() == Activations::Int8;
        (asked && !knob::skipped(Knob::Activations)) || knob::forced(Knob::Activations)
    }

    /// Whether products with `m` do.
    pub(super) fn quantizes(&self, m: &Matrix<'_>) -> bool {
        m.form().takes_int8() && self.quantizing()
    }

    /// [`Kernels::matmul`] with int8 activations, for weights that take them.
    pub(super) fn matmul_int8(&self, m: Matrix<'_>, x: Rows<'_>, mut out: Out<'_>) {
        ROOM.with_borrow_mut(|room| {
            for first in (0..x.count).step_by(MOST_ROWS) {
                let count = MOST_ROWS.min(x.count - first);
                let x = quantize(self.order(&m), x.part(first, count), m.cols, room);
                self.share_int8(m, x, out.rows(first, count));
            }
        });
    }

    /// A product that threads share.
    fn share_int8(&self, m: Matrix<'_>, x: Quantized<'_>, mut out: Out<'_>) {
        let pool = self.pool();
        let products = (m.cols * x.count).max(1);
        let rows = CHUNK_PRODUCTS.div_ceil(products).max(m.rows.div_ceil(CHUNKS_PER_THREAD * pool.threads()));
        let rows = rows.next_multiple_of(ROW_TILE);
        if pool.threads() == 1 || m.rows <= rows || shared::within() {
            if !shared::within() {
                pool.count_alone();
            }
            return self.product_int8(m, x, &mut out);
        }
        pool.run(m.rows.div_ceil(rows), &|chunk| {
            let first = chunk * rows;
            let count = rows.min(m.rows - first);
            // SAFETY: chunks have columns of their own, and `pool.run` gives each chunk to one thread.
            let mut out = unsafe { out.columns(first, count) };
            self.product_int8(m.part(first, count), x, &mut out);
        });
    }

    /// What turns a row of activations into the order of `m`.
    fn order(&self, m: &Matrix<'_>) -> Order {
        let mx = matches!(m.data, Data::Mxfp4 { .. });
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            KernelIsa::Avx2 | KernelIsa::Avx512 => {
                if mx {
                    super::avx2_int8::for_mxfp4
                } else {
                    super::avx2_int8::for_int8
                }
            }
            _ if mx => for_mxfp4,
            _ => for_int8,
        }
    }

    /// A product on the calling thread.
    fn product_int8(&self, m: Matrix<'_>, x: Quantized<'_>, out: &mut Out<'_>) {
        self.forms.count(m.form(), Activations::Int8);
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            KernelIsa::Avx2 if !knob::skipped(Knob::Kernels) => {
                self.calls.count(KernelIsa::Avx2);
                // SAFETY: a `Kernels` with `Avx2` exists only where `is_available` found AVX2 and FMA.
                unsafe { super::avx2_int8::matmul(m, x, out) };
            }
            #[cfg(target_arch = "x86_64")]
            KernelIsa::Avx512 if !knob::skipped(Knob::Kernels) => {
                self.calls.count(KernelIsa::Avx512);
                // SAFETY: a `Kernels` with `Avx512` exists only where `is_available` found all that it needs.
                unsafe { super::avx512_int8::matmul(m, x, out) };
            }
            #[cfg(target_arch = "aarch64")]
            KernelIsa::Neon if !knob::skipped(Knob::Kernels) => {
                // portable Rust, which the compiler turns into NEON as it does all of this program
                self.calls.count(KernelIsa::Neon);
                // SAFETY: needs no instructions of its own; `x` was made for `m`.
                unsafe { products(Portable(m), m.rows, x, out) };
            }
            _ => {
                self.calls.count(KernelIsa::Scalar);
                // SAFETY: needs no instructions of its own; `x` was made for `m`.
                unsafe { products(Portable(m), m.rows, x, out) };
            }
        }
    }
}
