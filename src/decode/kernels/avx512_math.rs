//! The element-wise functions and the KDA update for x86-64 with AVX-512: what `avx2_math.rs` and `avx2.rs` do with a number, done with
//! sixteen instead of eight at a time, so the bits are the same. Elements that fill no register are left to AVX2.

use super::{KdaInputs, avx2, avx2_math, scalar};
use std::arch::x86_64::*;

/// Lanes of a register.
const LANES: usize = 16;
/// Value channels of the KDA update that are taken together.
const COLUMNS: usize = 4 * LANES;

/// See `avx2_math::exp8`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn exp16(x: __m512) -> __m512 {
    // With a NaN in either operand these return the second one.
    let x = _mm512_min_ps(_mm512_set1_ps(88.7), _mm512_max_ps(_mm512_set1_ps(-87.3), x));
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(
        x,
        _mm512_set1_ps(std::f32::consts::LOG2_E),
    ));
    let high = f32::from_bits(std::f32::consts::LN_2.to_bits() & 0xffff_8000);
    let low = (std::f64::consts::LN_2 - f64::from(high)) as f32;
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(high), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(low), r);
    let mut p = _mm512_set1_ps(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    let n = _mm512_cvtps_epi32(n);
    let half = _mm512_srai_epi32::<1>(n);
    let pow = |n: __m512i| _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127))));
    _mm512_mul_ps(_mm512_mul_ps(p, pow(half)), pow(_mm512_sub_epi32(n, half)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn sigmoid16(x: __m512) -> __m512 {
    let one = _mm512_set1_ps(1.0);
    let minus = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MIN)));
    _mm512_div_ps(one, _mm512_add_ps(one, exp16(minus)))
}

/// See `avx2_math::tanh8`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn tanh16(x: __m512) -> __m512 {
    let set = |v: f32| _mm512_set1_ps(v);
    let sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MIN));
    let a = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX)));
    let z = _mm512_mul_ps(x, x);
    let top = _mm512_fmadd_ps(z, _mm512_fmadd_ps(z, _mm512_add_ps(z, set(378.0)), set(17325.0)), set(135135.0));
    let low =
        _mm512_fmadd_ps(z, _mm512_fmadd_ps(z, _mm512_fmadd_ps(z, set(28.0), set(3150.0)), set(62370.0)), set(135135.0));
    let small = _mm512_div_ps(_mm512_mul_ps(x, top), low);
    let beyond = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, set(1.0));
    if beyond == 0 {
        return small; // the rest would be thrown away
    }
    let e = exp16(_mm512_add_ps(a, a));
    let large = _mm512_sub_ps(set(1.0), _mm512_div_ps(set(2.0), _mm512_add_ps(e, set(1.0))));
    let large = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(large), sign));
    _mm512_mask_blend_ps(beyond, small, large)
}

/// Applies `$f` to groups of sixteen and `$rest` to what is left.
macro_rules! map16 {
    ($x:ident, $f:expr, $rest:expr) => {{
        let f = $f;
        let mut chunks = $x.chunks_exact_mut(LANES);
        for chunk in &mut chunks {
            // SAFETY: the chunk has sixteen values.
            unsafe { _mm512_storeu_ps(chunk.as_mut_ptr(), f(_mm512_loadu_ps(chunk.as_ptr()))) };
        }
        let rest = chunks.into_remainder();
        if !rest.is_empty() {
            // SAFETY: the processor has AVX2 and FMA.
            unsafe { $rest(rest) };
        }
    }};
}

/// See [`super::Kernels::exp`].
///
/// # Safety
/// The processor has AVX-512 F, BW and VL, AVX2 and FMA.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub unsafe fn exp(x: &mut [f32]) {
    map16!(x, |v| exp16(v), avx2_math::exp);
}

/// See [`super::Kernels::softmax`].
///
/// # Safety
/// As [`exp`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub unsafe fn softmax(x: &mut [f32], scale: f32) {
    // SAFETY: the processor has them all.
    scalar::softmax_with(x, scale, |x| unsafe { exp(x) });
}

/// See [`super::Kernels::sigmoid`].
///
/// # Safety
/// As [`exp`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub unsafe fn sigmoid(x: &mut [f32]) {
    map16!(x, |v| sigmoid16(v), avx2_math::sigmoid);
}

/// See [`super::Kernels::silu`].
///
/// # Safety
/// As [`exp`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub unsafe fn silu(x: &mut [f32]) {
    map16!(x, |v| _mm512_mul_ps(v, sigmoid16(v)), avx2_math::silu);
}

/// See [`super::Kernels::situ`].
///
/// # Safety
/// As [`exp`]; both slices are equally long.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub unsafe fn situ(gate: &mut [f32], up: &[f32], beta: f32, linear: Option<f32>) {
    let one = |g: __m512, u: __m512| {
        let u = match linear {
            Some(l) => _mm512_mul_ps(_mm512_set1_ps(l), tanh16(_mm512_div_ps(u, _mm512_set1_ps(l)))),
            None => u,
        };
        let beta = _mm512_set1_ps(beta);
        let g = _mm512_mul_ps(_mm512_mul_ps(beta, tanh16(_mm512_div_ps(g, beta))), sigmoid16(g));
        _mm512_mul_ps(g, u)
    };
    let whole = gate.len() / LANES * LANES;
    for (g, u) in gate.chunks_exact_mut(LANES).zip(up.chunks_exact(LANES)) {
        // SAFETY: both chunks have sixteen values.
        unsafe { _mm512_storeu_ps(g.as_mut_ptr(), one(_mm512_loadu_ps(g.as_ptr()), _mm512_loadu_ps(u.as_ptr()))) };
    }
    if whole < gate.len() {
        // SAFETY: the processor has AVX2 and FMA, and what is left is equally long.
        unsafe { avx2_math::situ(&mut gate[whole..], &up[whole..], beta, linear) };
    }
}

/// See [`super::Kernels::kda_step`].
///
/// # Safety
/// As [`exp`]; all vectors have the width of `out` and the state its square.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub unsafe fn kda_step(state: &mut [f32], i: &KdaInputs<'_>, out: &mut [f32]) {
    let d = out.len();
    if !d.is_multiple_of(COLUMNS) {
        // SAFETY: the processor has AVX2 and FMA; widths are as they should be.
        return unsafe { avx2::kda_step(state, i, out) };
    }
    for j in (0..d).step_by(COLUMNS) {
        kda_columns(state, i, out, j);
    }
}

/// Value channels `j..j + 64`. The decayed state is formed twice rather than stored in between.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn kda_columns(state: &mut [f32], i: &KdaInputs<'_>, out: &mut [f32], j: usize) {
    let d = out.len();
    assert!(j + COLUMNS <= d && state.len() == d * d);
    let (k, decay, q, v) = (&i.k[..d], &i.decay[..d], &i.q[..d], &i.v[j..j + COLUMNS]);
    let base = state.as_mut_ptr();
    let mut read = [_mm512_setzero_ps(); 4];
    for key in 0..d {
        let (kv, dv) = (_mm512_set1_ps(k[key]), _mm512_set1_ps(decay[key]));
        for (n, read) in read.iter_mut().enumerate() {
            // SAFETY: key < d and j + 64 <= d, so the sixteen values lie inside the d * d state.
            let s = unsafe { _mm512_loadu_ps(base.add(key * d + j + LANES * n)) };
            *read = _mm512_fmadd_ps(kv, _mm512_mul_ps(dv, s), *read);
        }
    }
    let beta = _mm512_set1_ps(i.beta);
    let mut delta = [_mm512_setzero_ps(); 4];
    for (n, delta) in delta.iter_mut().enumerate() {
        // SAFETY: `v` has four times sixteen values.
        let v = unsafe { _mm512_loadu_ps(v.as_ptr().add(LANES * n)) };
        *delta = _mm512_mul_ps(beta, _mm512_sub_ps(v, read[n]));
    }
    let mut sum = [_mm512_setzero_ps(); 4];
    for key in 0..d {
        let (kv, dv, qv) = (_mm512_set1_ps(k[key]), _mm512_set1_ps(decay[key]), _mm512_set1_ps(q[key]));
        for n in 0..4 {
            // SAFETY: as above; the same sixteen values are written back.
            unsafe {
                let p = base.add(key * d + j + LANES * n);
                let s = _mm512_fmadd_ps(kv, delta[n], _mm512_mul_ps(dv, _mm512_loadu_ps(p)));
                _mm512_storeu_ps(p, s);
                sum[n] = _mm512_fmadd_ps(qv, s, sum[n]);
            }
        }
    }
    for (out, sum) in out[j..j + COLUMNS].chunks_exact_mut(LANES).zip(sum) {
        // SAFETY: the chunk has sixteen values.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
    }
}
