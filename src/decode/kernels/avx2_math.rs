//! The element-wise functions for x86-64 with AVX2 and FMA. They are our own series rather than the C library's, so
//! that the same instruction set gives the same bits on every system.

use std::arch::x86_64::*;

/// `e^x` to about one unit in the last place: `2^n` times the Taylor series of the rest, `|rest| <= ln(2)/2`.
/// Arguments are cut to [-87.3, 88.7]; NaN stays NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp8(x: __m256) -> __m256 {
    // With a NaN in either operand these return the second one.
    let x = _mm256_min_ps(_mm256_set1_ps(88.7), _mm256_max_ps(_mm256_set1_ps(-87.3), x));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(std::f32::consts::LOG2_E),
    ));
    // ln(2) in two parts: the first has few enough bits for n * high to be exact.
    let high = f32::from_bits(std::f32::consts::LN_2.to_bits() & 0xffff_8000);
    let low = (std::f64::consts::LN_2 - f64::from(high)) as f32;
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(high), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(low), r);
    let mut p = _mm256_set1_ps(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    // n reaches 128, whose power is no f32: two factors.
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let pow = |n: __m256i| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
    _mm256_mul_ps(_mm256_mul_ps(p, pow(half)), pow(_mm256_sub_epi32(n, half)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn sigmoid8(x: __m256) -> __m256 {
    let one = _mm256_set1_ps(1.0);
    let e = exp8(_mm256_xor_ps(x, _mm256_set1_ps(-0.0)));
    _mm256_div_ps(one, _mm256_add_ps(one, e))
}

/// `tanh`: up to 1 by Lambert's continued fraction cut after x^7 (error below 1e-9), beyond by the exponential.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tanh8(x: __m256) -> __m256 {
    let set = |v: f32| _mm256_set1_ps(v);
    let sign = _mm256_and_ps(x, set(-0.0));
    let a = _mm256_andnot_ps(set(-0.0), x);
    let z = _mm256_mul_ps(x, x);
    let top = _mm256_fmadd_ps(z, _mm256_fmadd_ps(z, _mm256_add_ps(z, set(378.0)), set(17325.0)), set(135135.0));
    let low =
        _mm256_fmadd_ps(z, _mm256_fmadd_ps(z, _mm256_fmadd_ps(z, set(28.0), set(3150.0)), set(62370.0)), set(135135.0));
    let small = _mm256_div_ps(_mm256_mul_ps(x, top), low);
    let beyond = _mm256_cmp_ps::<_CMP_GT_OQ>(a, set(1.0));
    if _mm256_movemask_ps(beyond) == 0 {
        return small; // the rest would be thrown away
    }
    let e = exp8(_mm256_add_ps(a, a));
    let large = _mm256_sub_ps(set(1.0), _mm256_div_ps(set(2.0), _mm256_add_ps(e, set(1.0))));
    _mm256_blendv_ps(small, _mm256_or_ps(large, sign), beyond)
}

/// Applies `f` to groups of eight; the last ones go through a padded group, so every element is treated alike.
macro_rules! map8 {
    ($x:ident, $f:expr) => {{
        let f = $f;
        let mut chunks = $x.chunks_exact_mut(8);
        for chunk in &mut chunks {
            // SAFETY: the chunk has eight values.
            unsafe { _mm256_storeu_ps(chunk.as_mut_ptr(), f(_mm256_loadu_ps(chunk.as_ptr()))) };
        }
        let tail = chunks.into_remainder();
        let mut last = [0.0f32; 8];
        last[..tail.len()].copy_from_slice(tail);
        // SAFETY: `last` has eight values.
        unsafe { _mm256_storeu_ps(last.as_mut_ptr(), f(_mm256_loadu_ps(last.as_ptr()))) };
        tail.copy_from_slice(&last[..tail.len()]);
    }};
}

/// See [`super::Kernels::exp`].
///
/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn exp(x: &mut [f32]) {
    map8!(x, |v| exp8(v));
}

/// See [`super::Kernels::softmax`].
///
/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn softmax(x: &mut [f32], scale: f32) {
    // SAFETY: the processor has both.
    super::scalar::softmax_with(x, scale, |x| unsafe { exp(x) });
}

/// See [`super::Kernels::sigmoid`].
///
/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn sigmoid(x: &mut [f32]) {
    map8!(x, |v| sigmoid8(v));
}

/// See [`super::Kernels::silu`].
///
/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn silu(x: &mut [f32]) {
    map8!(x, |v| _mm256_mul_ps(v, sigmoid8(v)));
}

/// See [`super::Kernels::situ`].
///
/// # Safety
/// The processor has AVX2 and FMA; both slices are equally long.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn situ(gate: &mut [f32], up: &[f32], beta: f32, linear: Option<f32>) {
    let one = |g: __m256, u: __m256| {
        let u = match linear {
            Some(l) => _mm256_mul_ps(_mm256_set1_ps(l), tanh8(_mm256_div_ps(u, _mm256_set1_ps(l)))),
            None => u,
        };
        let beta = _mm256_set1_ps(beta);
        let g = _mm256_mul_ps(_mm256_mul_ps(beta, tanh8(_mm256_div_ps(g, beta))), sigmoid8(g));
        _mm256_mul_ps(g, u)
    };
    let whole = gate.len() / 8 * 8;
    for (g, u) in gate.chunks_exact_mut(8).zip(up.chunks_exact(8)) {
        // SAFETY: both chunks have eight values.
        unsafe { _mm256_storeu_ps(g.as_mut_ptr(), one(_mm256_loadu_ps(g.as_ptr()), _mm256_loadu_ps(u.as_ptr()))) };
    }
    let (tail, up) = (&mut gate[whole..], &up[whole..]);
    let (mut g, mut u) = ([0.0f32; 8], [0.0f32; 8]);
    g[..tail.len()].copy_from_slice(tail);
    u[..up.len()].copy_from_slice(up);
    // SAFETY: both arrays have eight values.
    unsafe { _mm256_storeu_ps(g.as_mut_ptr(), one(_mm256_loadu_ps(g.as_ptr()), _mm256_loadu_ps(u.as_ptr()))) };
    tail.copy_from_slice(&g[..tail.len()]);
}
