//! MXFP4 products for x86-64 with AVX2 and FMA.
//!
//! A group's 16 bytes become 32 numbers in four registers: two byte shuffles look up the high and the low byte of each
//! code's bfloat16, and interleaving these gives pairs of columns whose upper and lower halves are numbers of their own. The
//! registers hold the columns in another order than the row does; activations are brought into that order once for many
//! weight rows.
//!
//! One product of a row is, group after group, `sum = scale * (w0 x0 + w1 x1 + w2 x2 + w3 x3) + sum` over eight lanes, the
//! inner sum from the left, and then the sum of the lanes. Tiles only decide how many such products are in flight.

use super::avx2::reduce;
use super::mxfp4::{GROUP_BYTES, Meeting, Weights, meet};
use super::out::Out;
use super::{MX_GROUP, Rows};
use std::arch::x86_64::*;

/// Groups whose scales are widened together.
pub(super) const SCALES: usize = 8;
/// Weight rows against one activation row.
const TALL: usize = 4;
/// Activation rows that share a weight row's unpacking.
const MOST: usize = 8;

/// See [`super::Kernels::matmul`]; `room` has space for at least one row of activations.
#[target_feature(enable = "avx2,fma")]
pub(super) fn matmul(w: Weights<'_>, x: Rows<'_>, out: &mut Out<'_>, room: &mut [f32]) {
    meet(w, x, out, room, MOST, order, &|m: Meeting<'_>, out: &mut Out<'_>| match m.count {
        1 => one_row(&m, out),
        2 => rows_of::<2>(&m, out),
        3 => rows_of::<3>(&m, out),
        4 => rows_of::<4>(&m, out),
        5 => rows_of::<5>(&m, out),
        6 => rows_of::<6>(&m, out),
        7 => rows_of::<7>(&m, out),
        _ => rows_of::<MOST>(&m, out),
    });
}

/// All weight rows against one row of activations.
#[target_feature(enable = "avx2,fma")]
fn one_row(m: &Meeting<'_>, out: &mut Out<'_>) {
    let (mut o, n) = (0, m.weights.rows());
    while o + TALL <= n {
        let acc = tile::<TALL, 1>(m.weights, o, m.x);
        out.put(m.row, m.column + o, &reduce([acc[0][0], acc[1][0], acc[2][0], acc[3][0]]));
        o += TALL;
    }
    while o < n {
        out.put(m.row, m.column + o, &reduce(tile::<1, 1>(m.weights, o, m.x)[0]));
        o += 1;
    }
}

/// All weight rows against `R` rows of activations.
#[target_feature(enable = "avx2,fma")]
fn rows_of<const R: usize>(m: &Meeting<'_>, out: &mut Out<'_>) {
    let (mut o, n) = (0, m.weights.rows());
    while o < n {
        let some = TALL.min(n - o);
        let mut acc = [[_mm256_setzero_ps(); R]; TALL];
        for (i, acc) in acc.iter_mut().take(some).enumerate() {
            [*acc] = tile::<1, R>(m.weights, o + i, m.x);
        }
        #[allow(clippy::needless_range_loop)] // the index is one of activation rows, a column of `acc`
        for r in 0..R {
            let sums = reduce([acc[0][r], acc[1][r], acc[2][r], acc[3][r]]);
            if some == TALL {
                out.put(m.row + r, m.column + o, &sums); // of a known length: no call
            } else {
                out.put(m.row + r, m.column + o, &sums[..some]);
            }
        }
        o += some;
    }
}

/// Weight rows `first..first + O` times `R` rows of activations in the registers' order, one after another in `x`; lanes
/// not yet summed.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tile<const O: usize, const R: usize>(w: Weights<'_>, first: usize, x: &[f32]) -> [[__m256; R]; O] {
    let (w, groups) = (w.part(first, O), w.groups());
    let (packed, scales) = (w.packed(), w.scales());
    assert!(x.len() >= R * groups * MX_GROUP);
    let mut acc = [[_mm256_setzero_ps(); R]; O];
    let mut g = 0;
    while g < groups {
        let n = SCALES.min(groups - g);
        let mut factors = [[0.0f32; SCALES]; O];
        for (o, factors) in factors.iter_mut().enumerate() {
            *factors = widen_scales(&scales[o * groups + g..], n);
            if R == 1 {
                // The tile behind this one is on its way while this one is computed: rows are short for a prefetcher.
                let ahead = packed.as_ptr().wrapping_add(((O + o) * groups + g) * GROUP_BYTES);
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64).cast());
            }
        }
        #[allow(clippy::needless_range_loop)] // the index is one of groups, of which `factors` has some
        for i in 0..n {
            for o in 0..O {
                // SAFETY: `packed` has O rows of `groups` groups of 16 bytes, and g + i < groups.
                let w = unsafe { codes(packed.as_ptr().add((o * groups + g + i) * GROUP_BYTES)) };
                let factor = _mm256_set1_ps(factors[o][i]);
                for (r, acc) in acc[o].iter_mut().enumerate() {
                    // SAFETY: `x` has R rows of `groups` groups of 32 values (asserted above), and g + i < groups.
                    let x = unsafe { x.as_ptr().add((r * groups + g + i) * MX_GROUP) };
                    // SAFETY: as above; a group is four times eight values.
                    let sum = unsafe {
                        let sum = _mm256_mul_ps(w[0], _mm256_loadu_ps(x));
                        let sum = _mm256_fmadd_ps(w[1], _mm256_loadu_ps(x.add(8)), sum);
                        let sum = _mm256_fmadd_ps(w[2], _mm256_loadu_ps(x.add(16)), sum);
                        _mm256_fmadd_ps(w[3], _mm256_loadu_ps(x.add(24)), sum)
                    };
                    *acc = _mm256_fmadd_ps(sum, factor, *acc);
                }
            }
        }
        g += n;
    }
    acc
}

/// Brings a row of activations into the order of [`codes`]: every 16 columns as a square, transposed.
fn order(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.chunks_exact_mut(16).zip(x.chunks_exact(16)) {
        for (i, out) in out.chunks_exact_mut(4).enumerate() {
            for (j, out) in out.iter_mut().enumerate() {
                *out = x[4 * j + i];
            }
        }
    }
}

/// The values of the 32 codes of one group, unscaled: columns (0 4 8 12 1 5 9 13), (2 6 10 14 3 7 11 15), and the same
/// from column 16 on.
///
/// # Safety
/// `p` points to 16 readable bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn codes(p: *const u8) -> [__m256; 4] {
    // The bfloat16 of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and of their negatives, by byte.
    let high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40,
    ));
    let low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40, 0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40,
    ));
    // SAFETY: 16 bytes are readable by contract; the load needs no alignment.
    let both = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(p.cast()) });
    // Low nibbles (even columns) in the lower half, high ones in the upper.
    let nibbles = _mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    let nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(0x0f));
    let (high, low) = (_mm256_shuffle_epi8(high, nibbles), _mm256_shuffle_epi8(low, nibbles));
    let (first, last) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
    let upper = _mm256_set1_epi32(0xffff_0000u32.cast_signed());
    [
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(first)),
        _mm256_castsi256_ps(_mm256_and_si256(first, upper)),
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(last)),
        _mm256_castsi256_ps(_mm256_and_si256(last, upper)),
    ]
}

/// The numbers that the first `n` scale bytes stand for, at most eight, as [`super::scalar::e8m0`] has them.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn widen_scales(scales: &[u8], n: usize) -> [f32; SCALES] {
    let bytes = match scales.first_chunk::<SCALES>() {
        Some(bytes) => u64::from_le_bytes(*bytes),
        None => scales[..n].iter().rev().fold(0, |all, &s| all << 8 | u64::from(s)),
    };
    let codes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes.cast_signed()));
    // 2^-127 is a subnormal, and code 255 is no number: both have this bit more than the exponent.
    let special = _mm256_or_si256(
        _mm256_cmpeq_epi32(codes, _mm256_setzero_si256()),
        _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255)),
    );
    let bit = _mm256_and_si256(special, _mm256_set1_epi32(0x0040_0000));
    let mut out = [0.0; SCALES];
    let values = _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32::<23>(codes), bit));
    // SAFETY: `out` holds eight values.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), values) };
    out
}
