//! Products with int8 activations for x86-64 with AVX2 and FMA; the bits are those of the portable ones (`int8`).
//!
//! One instruction multiplies unsigned bytes with signed ones and adds pairs as 16-bit numbers. e2m1 weights come from a table
//! that has 12 added to them, so that they are not negative; what this adds to a sum depends on activations alone, and is
//! taken off again. int8 weights are made positive, and activations take their signs. No pair leaves 16 bits: two MXFP4 pairs are
//! at most 4 * 24 * 127 together, an int8 pair 2 * 128 * 127.

use super::avx2::reduce;
use super::avx2_mxfp4::widen_scales;
use super::int8::{self, AHEAD, GROUPS, Products, Quantized, Strip, TOGETHER};
use super::matrix::{Data, row_scale};
use super::mxfp4::{GROUP_BYTES, Weights};
use super::out::Out;
use super::{MX_GROUP, Matrix};
use std::arch::x86_64::*;

/// Groups whose sums fill a register.
const RUN: usize = 8;
/// Bytes of a register.
const WIDTH: usize = 32;
/// Sums of a product: lanes 0 to 7 and 8 to 15.
type Lanes = [__m256; 2];

/// See [`int8::for_mxfp4`]. Only for a `Kernels` with AVX2.
pub(super) fn for_mxfp4(x: &[f32], strips: &mut [Strip]) {
    #[target_feature(enable = "avx2,fma")]
    fn compiled(x: &[f32], strips: &mut [Strip]) {
        int8::for_mxfp4(x, strips);
    }
    // SAFETY: a `Kernels` with `Avx2` or `Avx512` exists only where `is_available` found AVX2 and FMA.
    unsafe { compiled(x, strips) }
}

/// See [`int8::for_int8`]. Only for a `Kernels` with AVX2.
pub(super) fn for_int8(x: &[f32], strips: &mut [Strip]) {
    #[target_feature(enable = "avx2,fma")]
    fn compiled(x: &[f32], strips: &mut [Strip]) {
        int8::for_int8(x, strips);
    }
    // SAFETY: as above.
    unsafe { compiled(x, strips) }
}

/// The products of `m` and `x`, which is in the order of its form.
///
/// # Safety
/// The processor has AVX2 and FMA; rows of `x` are as wide as those of `m`.
pub(super) unsafe fn matmul(m: Matrix<'_>, x: Quantized<'_>, out: &mut Out<'_>) {
    match m.data {
        Data::Mxfp4 { packed, scales } => {
            let w = Mx(Weights::new(packed, scales, m.cols));
            // SAFETY: by contract.
            unsafe { int8::products(w, m.rows, x, out) }
        }
        Data::Int8 { codes, scales } => {
            let w = Int8Rows { codes, scales, cols: m.cols };
            // SAFETY: by contract.
            unsafe { int8::products(w, m.rows, x, out) }
        }
        Data::F32(_) | Data::Bf16(_) => {} // these keep f32 activations
    }
}

#[derive(Clone, Copy)]
struct Mx<'a>(Weights<'a>);

impl Products for Mx<'_> {
    unsafe fn row<const R: usize>(self, row: usize, x: [&[Strip]; R]) -> [f32; R] {
        // SAFETY: by contract.
        unsafe { mx_row(self.0.part(row, 1), x) }
    }
}

/// A row of MXFP4.
#[target_feature(enable = "avx2,fma")]
fn mx_row<const R: usize>(w: Weights<'_>, x: [&[Strip]; R]) -> [f32; R] {
    let (groups, packed, scales) = (w.groups(), w.packed(), w.scales());
    let strips = groups.div_ceil(GROUPS);
    assert!(packed.len() >= groups * GROUP_BYTES && scales.len() >= groups && x.iter().all(|x| x.len() >= strips));
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    // The last groups of a row, without those of the next: there activations are zeros, which a scale that is no number would
    // not leave so.
    let (mut last, mut last_own) = ([0u8; GROUPS * GROUP_BYTES], [0u8; GROUPS]);
    for s in 0..strips {
        let (g, n) = (s * GROUPS, (groups - s * GROUPS).min(GROUPS));
        let (mut bytes, mut own) = (packed[g * GROUP_BYTES..].as_ptr(), scales[g..].as_ptr());
        for line in 0..GROUPS * GROUP_BYTES / TOGETHER {
            _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(AHEAD + line * TOGETHER).cast());
        }
        if n < GROUPS {
            last[..n * GROUP_BYTES].copy_from_slice(&packed[g * GROUP_BYTES..groups * GROUP_BYTES]);
            last_own[..n].copy_from_slice(&scales[g..groups]);
            (bytes, own) = (last.as_ptr(), last_own.as_ptr());
        }
        // SAFETY: sixteen groups are there, in `packed` and `scales` or in `last` and `last_own`.
        unsafe { mx_strip(bytes, &*own.cast(), x.map(|x| &x[s]), &mut acc) };
    }
    sum_lanes(acc)
}

/// Adds sixteen groups of weights, with the scales `own`, times as many of `R` rows of activations.
///
/// # Safety
/// `bytes` points to the codes of sixteen groups.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn mx_strip<const R: usize>(bytes: *const u8, own: &[u8; GROUPS], x: [&Strip; R], acc: &mut [Lanes; R]) {
    // Even groups, then odd ones: the order of `group_sums`.
    let apart = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for run in 0..2 {
        let own = widen_scales(&own[run * RUN..(run + 1) * RUN], RUN);
        let mut pairs = [[_mm256_setzero_si256(); 4]; R];
        #[allow(clippy::needless_range_loop)] // also the place of codes and bytes
        for pair in 0..4 {
            // SAFETY: two of eight groups, which are there by contract.
            let [evens, odds] = unsafe { doubled(bytes.add((4 * run + pair) * WIDTH)) };
            for r in 0..R {
                let four = 2 * run + pair / 2;
                let even = _mm256_maddubs_epi16(evens, codes_at(&x[r].codes[2 * four], pair % 2));
                let odd = _mm256_maddubs_epi16(odds, codes_at(&x[r].codes[2 * four + 1], pair % 2));
                pairs[r][pair] = _mm256_add_epi16(even, odd);
            }
        }
        for r in 0..R {
            // SAFETY: each is eight values, of sixteen or of eight.
            let (start, scales, own) = unsafe {
                let start = _mm256_load_si256(x[r].corrections[0].as_ptr().add(run * RUN).cast());
                let scales = _mm256_load_ps(x[r].scales.as_ptr().add(run * RUN));
                (start, scales, _mm256_loadu_ps(own.as_ptr()))
            };
            let factor = _mm256_permutevar8x32_ps(_mm256_mul_ps(own, scales), apart);
            let start = _mm256_permutevar8x32_epi32(start, apart);
            let sums = _mm256_cvtepi32_ps(_mm256_add_epi32(group_sums(pairs[r]), start));
            acc[r][run] = _mm256_fmadd_ps(sums, factor, acc[r][run]);
        }
    }
}

/// Twice the values of two groups plus 12: even columns, and odd ones.
///
/// # Safety
/// `p` points to 32 readable bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn doubled(p: *const u8) -> [__m256i; 2] {
    let table = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    let low = _mm256_set1_epi8(15);
    // SAFETY: 32 bytes are readable by contract; the load needs no alignment.
    let bytes = unsafe { _mm256_loadu_si256(p.cast()) };
    let (evens, odds) = (_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low));
    [_mm256_shuffle_epi8(table, evens), _mm256_shuffle_epi8(table, odds)]
}

/// The sums of eight groups, of which each of `pairs` has two, one in each half: the even ones, then the odd ones.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn group_sums(pairs: [__m256i; 4]) -> __m256i {
    // The sum of two is at most 4 * 24 * 127 * 2, which is no 16-bit number too large.
    let low = fold(pairs[0], pairs[1]);
    let high = fold(pairs[2], pairs[3]);
    _mm256_add_epi32(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn fold(a: __m256i, b: __m256i) -> __m256i {
    let both = _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    _mm256_madd_epi16(both, _mm256_set1_epi16(1))
}

/// Half of 64 codes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn codes_at(codes: &[i8; 64], half: usize) -> __m256i {
    // SAFETY: 64 bytes are there, and half of them is read; the load needs no alignment.
    unsafe { _mm256_loadu_si256(codes.as_ptr().add((half & 1) * WIDTH).cast()) }
}

#[derive(Clone, Copy)]
struct Int8Rows<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    cols: usize,
}

impl Products for Int8Rows<'_> {
    unsafe fn row<const R: usize>(self, row: usize, x: [&[Strip]; R]) -> [f32; R] {
        let codes = &self.codes[row * self.cols..(row + 1) * self.cols];
        // SAFETY: by contract.
        unsafe { int8_row(codes, x) }.map(|sum| row_scale(self.scales, row) * sum)
    }
}

/// A row of int8, without its scale.
#[target_feature(enable = "avx2,fma")]
fn int8_row<const R: usize>(w: &[u8], x: [&[Strip]; R]) -> [f32; R] {
    assert!(x.iter().all(|x| x.len() * GROUPS * MX_GROUP >= w.len()));
    let mut last = [0u8; TOGETHER];
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    for c in (0..w.len()).step_by(TOGETHER) {
        let mut bytes = w[c..].as_ptr();
        _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(AHEAD).cast());
        if w.len() - c < TOGETHER {
            last[..w.len() - c].copy_from_slice(&w[c..]);
            bytes = last.as_ptr();
        }
        let (strip, at) = (c / TOGETHER / 8, c / TOGETHER % 8);
        #[allow(clippy::needless_range_loop)] // also the place of codes and scales
        for group in 0..2 {
            // SAFETY: half of 64 bytes, which are there in `w` or in `last`.
            let w = unsafe { _mm256_loadu_si256(bytes.add(group * WIDTH).cast()) };
            let positive = _mm256_abs_epi8(w);
            for r in 0..R {
                let strip = &x[r][strip];
                let pairs = _mm256_maddubs_epi16(positive, _mm256_sign_epi8(codes_at(&strip.codes[at], group), w));
                let sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                let scale = _mm256_set1_ps(strip.scales[2 * at + group]);
                acc[r][group] = _mm256_fmadd_ps(sums, scale, acc[r][group]);
            }
        }
    }
    sum_lanes(acc)
}

/// Sums the lanes of products.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn sum_lanes<const R: usize>(acc: [Lanes; R]) -> [f32; R] {
    let mut sums = [_mm256_setzero_ps(); R];
    for (sum, [low, high]) in sums.iter_mut().zip(acc) {
        *sum = _mm256_add_ps(low, high);
    }
    reduce(sums)
}
