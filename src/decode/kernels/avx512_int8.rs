//! Products with int8 activations for x86-64 with AVX-512; the bits are those of the portable ones (`int8`).
//!
//! Where the processor has VNNI, one instruction adds four products of an unsigned and a signed byte to a 32-bit sum: weights have
//! an offset added, so that they are not negative, and sums begin with what this takes off again, which depends on activations
//! alone. Without VNNI pairs are added as 16-bit numbers, as AVX2 does.

use super::avx2::reduce;
use super::avx512::halves;
use super::int8::{self, AHEAD, GROUPS, Products, Quantized, Strip, TOGETHER};
use super::matrix::{Data, row_scale};
use super::mxfp4::{GROUP_BYTES, Weights};
use super::out::Out;
use super::{MX_GROUP, Matrix};
use std::arch::x86_64::*;

/// The products of `m` and `x`, which is in the order of its form.
///
/// # Safety
/// The processor has AVX-512 F, BW and VL, AVX2 and FMA; rows of `x` are as wide as those of `m`.
pub(super) unsafe fn matmul(m: Matrix<'_>, x: Quantized<'_>, out: &mut Out<'_>) {
    // SAFETY: by contract, and VNNI is asked for.
    unsafe {
        match is_x86_feature_detected!("avx512vnni") {
            true => all_rows::<true>(m, x, out),
            false => all_rows::<false>(m, x, out),
        }
    }
}

/// The same, with VNNI or without it.
///
/// # Safety
/// As for [`matmul`]; with `VNNI` the processor has that too.
unsafe fn all_rows<const VNNI: bool>(m: Matrix<'_>, x: Quantized<'_>, out: &mut Out<'_>) {
    match m.data {
        Data::Mxfp4 { packed, scales } => {
            let w = Mx::<VNNI>(Weights::new(packed, scales, m.cols));
            // SAFETY: by contract.
            unsafe { int8::products(w, m.rows, x, out) }
        }
        Data::Int8 { codes, scales } => {
            let w = Int8Rows::<VNNI> { codes, scales, cols: m.cols };
            // SAFETY: by contract.
            unsafe { int8::products(w, m.rows, x, out) }
        }
        Data::F32(_) | Data::Bf16(_) => {} // these keep f32 activations
    }
}

/// Compiles the product of a row twice: with VNNI and without.
macro_rules! twice {
    ($row:ident, $with:ident, $without:ident, $weights:ty) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
        fn $with<const R: usize>(w: $weights, x: [&[Strip]; R]) -> [f32; R] {
            // SAFETY: this function has the instructions.
            unsafe { $row::<true, R>(w, x) }
        }

        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
        fn $without<const R: usize>(w: $weights, x: [&[Strip]; R]) -> [f32; R] {
            // SAFETY: this function has the instructions, of which VNNI is none.
            unsafe { $row::<false, R>(w, x) }
        }
    };
}

twice!(mx_row, mx_vnni, mx_plain, Weights<'_>);
twice!(int8_row, int8_vnni, int8_plain, &[u8]);

#[derive(Clone, Copy)]
struct Mx<'a, const VNNI: bool>(Weights<'a>);

impl<const VNNI: bool> Products for Mx<'_, VNNI> {
    unsafe fn row<const R: usize>(self, row: usize, x: [&[Strip]; R]) -> [f32; R] {
        let w = self.0.part(row, 1);
        // SAFETY: by contract.
        unsafe { if VNNI { mx_vnni(w, x) } else { mx_plain(w, x) } }
    }
}

#[derive(Clone, Copy)]
struct Int8Rows<'a, const VNNI: bool> {
    codes: &'a [u8],
    scales: &'a [u8],
    cols: usize,
}

impl<const VNNI: bool> Products for Int8Rows<'_, VNNI> {
    unsafe fn row<const R: usize>(self, row: usize, x: [&[Strip]; R]) -> [f32; R] {
        let w = &self.codes[row * self.cols..(row + 1) * self.cols];
        // SAFETY: by contract.
        let sums = unsafe { if VNNI { int8_vnni(w, x) } else { int8_plain(w, x) } };
        sums.map(|sum| row_scale(self.scales, row) * sum)
    }
}

/// A row of MXFP4.
///
/// # Safety
/// Inlined into a function that has AVX-512 F, BW and VL, AVX2 and FMA; with `VNNI` that too.
#[inline(always)]
unsafe fn mx_row<const VNNI: bool, const R: usize>(w: Weights<'_>, x: [&[Strip]; R]) -> [f32; R] {
    let (groups, packed, scales) = (w.groups(), w.packed(), w.scales());
    let strips = groups.div_ceil(GROUPS);
    assert!(packed.len() >= groups * GROUP_BYTES && scales.len() >= groups && x.iter().all(|x| x.len() >= strips));
    // SAFETY: the instructions are there by contract; what is read is said where it is read.
    unsafe {
        // Twice the values of e2m1, plus 12.
        let table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        let low = _mm512_set1_epi8(15);
        // Groups as a square of four by four, transposed: the order of `group_sums`.
        let turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let mut acc = [_mm512_setzero_ps(); R];
        #[allow(clippy::needless_range_loop)] // of each row of `x`, and the place of weights
        for s in 0..strips {
            let (g, n) = (s * GROUPS, (groups - s * GROUPS).min(GROUPS));
            let p = packed.as_ptr().wrapping_add(g * GROUP_BYTES);
            let mut sums = [[_mm512_setzero_si512(); 4]; R];
            for four in 0..4 {
                // the bytes of four groups, none behind the row's last
                let p = p.wrapping_add(four * TOGETHER);
                let bytes = load(p, (n * GROUP_BYTES).saturating_sub(four * TOGETHER));
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(AHEAD).cast());
                let evens = _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, low));
                let odds = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low));
                for r in 0..R {
                    let codes = &x[r][s].codes;
                    let (even, odd) = (codes_of(&codes[2 * four]), codes_of(&codes[2 * four + 1]));
                    sums[r][four] = if VNNI {
                        let evens = _mm512_dpbusd_epi32(_mm512_setzero_si512(), evens, even);
                        _mm512_dpbusd_epi32(evens, odds, odd)
                    } else {
                        let (a, b) = (_mm512_maddubs_epi16(evens, even), _mm512_maddubs_epi16(odds, odd));
                        _mm512_madd_epi16(_mm512_add_epi16(a, b), _mm512_set1_epi16(1))
                    };
                }
            }
            // the scales of these `n` groups
            let own = widen_scales(scales.as_ptr().wrapping_add(g), n);
            for r in 0..R {
                let strip = &x[r][s];
                let factor = _mm512_permutexvar_ps(turned, _mm512_mul_ps(own, _mm512_load_ps(strip.scales.as_ptr())));
                let start = _mm512_permutexvar_epi32(turned, _mm512_load_si512(strip.corrections[0].as_ptr().cast()));
                let sums = _mm512_cvtepi32_ps(_mm512_add_epi32(group_sums(sums[r]), start));
                acc[r] = _mm512_fmadd_ps(sums, factor, acc[r]);
            }
        }
        // Even groups and then odd ones below 8, and those above in the same order.
        let apart = _mm512_setr_epi32(0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15);
        let mut sums = [_mm256_setzero_ps(); R];
        for r in 0..R {
            sums[r] = halves(_mm512_permutexvar_ps(apart, acc[r]));
        }
        reduce(sums)
    }
}

/// The sums of sixteen groups, of which each of `fours` has four, with four integers each: groups 0, 4, 8, 12, then 1, 5, 9,
/// 13, and so on.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
unsafe fn group_sums(fours: [__m512i; 4]) -> __m512i {
    // SAFETY: by contract.
    unsafe {
        let fold = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (low, high) = (fold(fours[0], fours[1]), fold(fours[2], fours[3]));
        _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high))
    }
}

/// A row of int8, without its scale.
///
/// # Safety
/// As for [`mx_row`].
#[inline(always)]
unsafe fn int8_row<const VNNI: bool, const R: usize>(w: &[u8], x: [&[Strip]; R]) -> [f32; R] {
    assert!(x.iter().all(|x| x.len() * GROUPS * MX_GROUP >= w.len()));
    // SAFETY: the instructions are there by contract; what is read is said where it is read.
    unsafe {
        // Each of two groups has eight lanes.
        let spread = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let mut acc = [_mm512_setzero_ps(); R];
        for c in (0..w.len()).step_by(TOGETHER) {
            // 64 columns, none behind the row's last
            let p = w.as_ptr().wrapping_add(c);
            let w = load(p, w.len() - c);
            _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(AHEAD).cast());
            let (strip, at) = (c / TOGETHER / 8, c / TOGETHER % 8);
            for r in 0..R {
                let strip = &x[r][strip];
                let xs = codes_of(&strip.codes[at]);
                let sums = if VNNI {
                    let start = _mm512_load_si512(strip.corrections[at].as_ptr().cast());
                    _mm512_dpbusd_epi32(start, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), xs)
                } else {
                    let signed = _mm512_mask_sub_epi8(xs, _mm512_movepi8_mask(w), _mm512_setzero_si512(), xs);
                    let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed);
                    _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))
                };
                // two of sixteen scales
                let scales = _mm_castsi128_ps(_mm_loadl_epi64(strip.scales.as_ptr().add(2 * at).cast()));
                let scales = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(scales));
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scales, acc[r]);
            }
        }
        let mut sums = [_mm256_setzero_ps(); R];
        for r in 0..R {
            sums[r] = halves(acc[r]);
        }
        reduce(sums)
    }
}

/// At most 64 bytes; those behind them are zeros.
///
/// # Safety
/// `p` points to `len` readable bytes, or to 64 of more; the processor has AVX-512 BW.
#[inline(always)]
unsafe fn load(p: *const u8, len: usize) -> __m512i {
    // SAFETY: 64 bytes are readable, or those of the mask; neither load needs alignment.
    unsafe {
        match len {
            TOGETHER.. => _mm512_loadu_si512(p.cast()),
            _ => _mm512_maskz_loadu_epi8((1 << len) - 1, p.cast()),
        }
    }
}

/// Codes of activations.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
unsafe fn codes_of(codes: &[i8; 64]) -> __m512i {
    // SAFETY: 64 bytes are there; the load needs no alignment.
    unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) }
}

/// The numbers that `n` scale bytes stand for, at most sixteen, as [`super::scalar::e8m0`] has them.
///
/// # Safety
/// `p` points to `n` readable bytes, at least one; the processor has AVX-512 F, BW and VL.
#[inline(always)]
unsafe fn widen_scales(p: *const u8, n: usize) -> __m512 {
    // SAFETY: only the bytes of the mask are read.
    unsafe {
        let bytes = match n {
            GROUPS => _mm_loadu_si128(p.cast()),
            _ => _mm_maskz_loadu_epi8((1 << n) - 1, p.cast()),
        };
        let codes = _mm512_cvtepu8_epi32(bytes);
        // 2^-127 is a subnormal, and code 255 is no number: both have this bit more than the exponent.
        let special = _mm512_cmpeq_epi32_mask(codes, _mm512_setzero_si512())
            | _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255));
        let values = _mm512_slli_epi32::<23>(codes);
        _mm512_castsi512_ps(_mm512_mask_or_epi32(values, special, values, _mm512_set1_epi32(0x0040_0000)))
    }
}
