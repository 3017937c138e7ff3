//! The products for aarch64 with NEON, which every such processor has; everything else is done by the portable code, which
//! the compiler makes NEON code of.
//!
//! Every dot product but those of MXFP4 is two four-lane accumulators over ascending groups of eight columns, added and
//! summed over their lanes, then the last columns one by one. An MXFP4 product is, group after group,
//! `sum = scale * (even columns + odd columns) + sum` over four lanes. Tiles only decide how many products are in flight.

use super::mxfp4::{GROUP_BYTES, Meeting, Weights, evens_first, meet};
use super::out::Out;
use super::{Data, MX_GROUP, Matrix, Rows, scalar};
use std::arch::aarch64::*;

/// Columns of a step.
const STEP: usize = 8;

/// See [`super::Kernels::matmul`].
///
/// # Safety
/// `x` and `out` have the product's shape (checked by the caller). For MXFP4, `wide` has room for a row of activations.
#[target_feature(enable = "neon")]
pub unsafe fn matmul(m: Matrix<'_>, x: Rows<'_>, out: &mut Out<'_>, wide: &mut [f32]) {
    match m.data {
        Data::F32(data) => all_rows(m, F32(data.as_ptr()), x, out),
        Data::Bf16(bytes) => all_rows(m, Bf16(bytes.as_ptr()), x, out),
        Data::Int8 { codes, .. } => all_rows(m, Int8(codes.as_ptr()), x, out),
        Data::Mxfp4 { packed, scales } => {
            let products = |m: Meeting<'_>, out: &mut Out<'_>| match m.count {
                1 => mx_rows::<4, 1>(&m, out),
                2 => mx_rows::<2, 2>(&m, out),
                3 => mx_rows::<1, 3>(&m, out),
                _ => mx_rows::<1, 4>(&m, out),
            };
            meet(Weights::new(packed, scales, m.cols), x, out, wide, 4, evens_first, &products);
        }
    }
}

/// Stored weights that become numbers on the way to registers. Methods are inlined into functions that have the
/// instructions.
trait Stored: Copy {
    /// Weights `at..at + 8`.
    ///
    /// # Safety
    /// They exist.
    unsafe fn load(self, at: usize) -> [float32x4_t; 2];
}

#[derive(Clone, Copy)]
struct F32(*const f32);
#[derive(Clone, Copy)]
struct Bf16(*const u8);
#[derive(Clone, Copy)]
struct Int8(*const u8);

impl Stored for F32 {
    #[inline(always)]
    unsafe fn load(self, at: usize) -> [float32x4_t; 2] {
        // SAFETY: eight values are readable by contract.
        unsafe { [vld1q_f32(self.0.add(at)), vld1q_f32(self.0.add(at + 4))] }
    }
}

impl Stored for Bf16 {
    #[inline(always)]
    unsafe fn load(self, at: usize) -> [float32x4_t; 2] {
        // SAFETY: 16 bytes are readable by contract; a load of bytes needs no alignment.
        unsafe { bf16(vreinterpretq_u16_u8(vld1q_u8(self.0.add(2 * at)))) }
    }
}

impl Stored for Int8 {
    #[inline(always)]
    unsafe fn load(self, at: usize) -> [float32x4_t; 2] {
        // SAFETY: eight bytes are readable by contract.
        unsafe {
            let codes = vmovl_s8(vld1_s8(self.0.add(at).cast()));
            [vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes))), vcvtq_f32_s32(vmovl_high_s16(codes))]
        }
    }
}

/// Eight bfloat16 values as numbers.
#[inline]
#[target_feature(enable = "neon")]
fn bf16(v: uint16x8_t) -> [float32x4_t; 2] {
    let low = vshlq_n_u32::<16>(vmovl_u16(vget_low_u16(v)));
    [vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_high_u16(v)))]
}

#[target_feature(enable = "neon")]
fn all_rows<W: Stored>(m: Matrix<'_>, w: W, x: Rows<'_>, out: &mut Out<'_>) {
    let mut o = 0;
    while o < m.rows {
        let n = 4.min(m.rows - o);
        let mut r = 0;
        while r < x.count {
            match (n, x.count - r) {
                (4, 2..) => put::<4, 2>(m, o, r, tile(m, w, o, x, r), out),
                (4, _) => put::<4, 1>(m, o, r, tile(m, w, o, x, r), out),
                (_, 2..) => (o..o + n).for_each(|o| put::<1, 2>(m, o, r, tile(m, w, o, x, r), out)),
                _ => (o..o + n).for_each(|o| put::<1, 1>(m, o, r, tile(m, w, o, x, r), out)),
            }
            r += 2;
        }
        o += n;
    }
}

/// Writes the results of a tile, times their rows' scales.
fn put<const O: usize, const R: usize>(m: Matrix<'_>, o: usize, r: usize, mut sums: [[f32; O]; R], out: &mut Out<'_>) {
    for (i, sums) in sums.iter_mut().enumerate() {
        for (o, sum) in (o..).zip(sums.iter_mut()) {
            if let Some(scale) = scalar::scale_of(m, o) {
                *sum *= scale;
            }
        }
        out.put(r + i, o, sums);
    }
}

/// Rows `o..o + O` of the weights times rows `r..r + R` of `x`, without scales.
#[inline]
#[target_feature(enable = "neon")]
fn tile<W: Stored, const O: usize, const R: usize>(
    m: Matrix<'_>,
    w: W,
    o: usize,
    x: Rows<'_>,
    r: usize,
) -> [[f32; O]; R] {
    let (cols, x) = (m.cols, x.part(r, R));
    assert!(o + O <= m.rows && x.fits(cols));
    let zero = vdupq_n_f32(0.0);
    let mut acc = [[[zero; 2]; R]; O];
    let whole = cols / STEP * STEP;
    let mut c = 0;
    while c < whole {
        let mut xs = [[zero; 2]; R];
        for (r, v) in xs.iter_mut().enumerate() {
            // SAFETY: c + 8 <= cols, and x has R rows of cols values (asserted above).
            *v = unsafe { F32(x.data.as_ptr()).load(r * x.stride + c) };
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: c + 8 <= cols, and the matrix has rows o..o + O (asserted above; its constructor checked its bytes).
            let wv = unsafe { w.load((o + i) * cols + c) };
            for (acc, xv) in acc.iter_mut().zip(&xs) {
                acc[0] = vfmaq_f32(acc[0], wv[0], xv[0]);
                acc[1] = vfmaq_f32(acc[1], wv[1], xv[1]);
            }
        }
        c += STEP;
    }
    let mut all = [[0.0; O]; R];
    for (r, all) in all.iter_mut().enumerate() {
        for (i, sum) in all.iter_mut().enumerate() {
            *sum = vaddvq_f32(vaddq_f32(acc[i][r][0], acc[i][r][1]));
            for c in whole..cols {
                *sum = scalar::weight(m, o + i, c).mul_add(x.data[r * x.stride + c], *sum);
            }
        }
    }
    all
}

/// All weight rows against `R` rows of activations, `O` at a time.
#[target_feature(enable = "neon")]
fn mx_rows<const O: usize, const R: usize>(m: &Meeting<'_>, out: &mut Out<'_>) {
    let (mut o, n) = (0, m.weights.rows());
    while o + O <= n {
        let sums = mx_tile::<O, R>(m.weights, o, m.x);
        sums.iter().enumerate().for_each(|(i, sums)| out.put(m.row + i, m.column + o, sums));
        o += O;
    }
    while o < n {
        let sums = mx_tile::<1, R>(m.weights, o, m.x);
        sums.iter().enumerate().for_each(|(i, sums)| out.put(m.row + i, m.column + o, sums));
        o += 1;
    }
}

/// Weight rows `first..first + O` times `R` rows of activations, even columns of a group first.
#[inline]
#[target_feature(enable = "neon")]
fn mx_tile<const O: usize, const R: usize>(w: Weights<'_>, first: usize, x: &[f32]) -> [[f32; O]; R] {
    let (w, groups) = (w.part(first, O), w.groups());
    let (packed, scales) = (w.packed(), w.scales());
    assert!(packed.len() >= O * groups * GROUP_BYTES && x.len() >= R * groups * MX_GROUP);
    let mut acc = [[vdupq_n_f32(0.0); R]; O];
    for g in 0..groups {
        for o in 0..O {
            // SAFETY: `packed` has O rows of `groups` groups of 16 bytes (asserted above), and g < groups.
            let w = unsafe { codes(packed.as_ptr().add((o * groups + g) * GROUP_BYTES)) };
            let factor = vdupq_n_f32(scalar::e8m0(scales[o * groups + g]));
            for (r, acc) in acc[o].iter_mut().enumerate() {
                // SAFETY: `x` has R rows of `groups` groups of 32 values (asserted above), and g < groups.
                let x = unsafe { x.as_ptr().add((r * groups + g) * MX_GROUP) };
                // SAFETY: as above.
                let mut sum = vmulq_f32(w[0], unsafe { vld1q_f32(x) });
                for (q, w) in w.iter().enumerate().skip(1) {
                    // SAFETY: as above; a group is eight times four values.
                    sum = vfmaq_f32(sum, *w, unsafe { vld1q_f32(x.add(4 * q)) });
                }
                *acc = vfmaq_f32(*acc, sum, factor);
            }
        }
    }
    let mut all = [[0.0; O]; R];
    for (r, all) in all.iter_mut().enumerate() {
        for (o, sum) in all.iter_mut().enumerate() {
            *sum = vaddvq_f32(acc[o][r]);
        }
    }
    all
}

/// The values of the 32 codes of one group, unscaled: the sixteen even columns, then the odd ones.
///
/// # Safety
/// `p` points to 16 readable bytes.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn codes(p: *const u8) -> [float32x4_t; 8] {
    // The bfloat16 of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and of their negatives, by byte.
    const HIGH: [u8; 16] =
        [0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0];
    const LOW: [u8; 16] =
        [0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0];
    // SAFETY: the tables have 16 bytes, and 16 are readable at `p` by contract.
    let (high, low, bytes) = unsafe { (vld1q_u8(HIGH.as_ptr()), vld1q_u8(LOW.as_ptr()), vld1q_u8(p)) };
    let (even, odd) = (vandq_u8(bytes, vdupq_n_u8(0x0f)), vshrq_n_u8::<4>(bytes));
    let numbers = |nibbles: uint8x16_t| {
        let (high, low) = (vqtbl1q_u8(high, nibbles), vqtbl1q_u8(low, nibbles));
        let [a, b] = bf16(vreinterpretq_u16_u8(vzip1q_u8(low, high)));
        let [c, d] = bf16(vreinterpretq_u16_u8(vzip2q_u8(low, high)));
        [a, b, c, d]
    };
    let ([a, b, c, d], [e, f, g, h]) = (numbers(even), numbers(odd));
    [a, b, c, d, e, f, g, h]
}
