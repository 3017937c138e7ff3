//! The kernels for x86-64 with AVX2 and FMA.
//!
//! MXFP4 has a file of its own. Every other dot product is one eight-lane accumulator over ascending groups of eight columns, reduced as
//! `((0+1)+(2+3)) + ((4+5)+(6+7))`, then the last columns one by one. Tiles only decide how many such products are in
//! flight at once, so a result does not depend on its tile.

use super::mxfp4::Weights;
use super::out::Out;
use super::{Data, KdaInputs, Matrix, ROW_TILE, Rows, WIDE_ROWS, avx2_mxfp4, row_scale, scalar};
use std::arch::x86_64::*;

pub use super::avx2_math::{exp, sigmoid, silu, situ, softmax};

/// Bytes that memory delivers together.
pub(super) const LINE: usize = 64;

/// See [`super::Kernels::matmul`].
///
/// # Safety
/// The processor has AVX2 and FMA; `x` and `out` have the product's shape (checked by the caller). For MXFP4, `wide`
/// has room for a row of activations.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn matmul(m: Matrix<'_>, x: Rows<'_>, out: &mut Out<'_>, wide: &mut [f32]) {
    if let Data::Mxfp4 { packed, scales } = m.data {
        return avx2_mxfp4::matmul(Weights::new(packed, scales, m.cols), x, out, wide);
    }
    let mut o = 0;
    let one_by_one = x.count == 1 || wide.len() < WIDE_ROWS * m.cols;
    if let Data::F32(data) = m.data {
        while o < m.rows {
            let n = WIDE_ROWS.min(m.rows - o);
            rows_f32(&data[o * m.cols..], [1.0; WIDE_ROWS], n, m.cols, x, out, o);
            o += n;
        }
    } else if one_by_one {
        for r in 0..x.count {
            let x = &x.data[r * x.stride..][..m.cols];
            let mut o = 0;
            while o + ROW_TILE <= m.rows {
                out.put(r, o, &fused::<ROW_TILE>(m, o, x));
                o += ROW_TILE;
            }
            while o < m.rows {
                out.put(r, o, &fused::<1>(m, o, x));
                o += 1;
            }
        }
    } else {
        while o < m.rows {
            let n = WIDE_ROWS.min(m.rows - o);
            for i in 0..n {
                widen(m, o + i, &mut wide[i * m.cols..(i + 1) * m.cols]);
            }
            let scales = std::array::from_fn(|i| if i < n { scalar::scale_of(m, o + i).unwrap_or(1.0) } else { 1.0 });
            rows_f32(wide, scales, n, m.cols, x, out, o);
            o += n;
        }
    }
}

/// `n` (at most four) rows of single-precision weights, each with a scale, against all rows of `x`; results go to
/// columns `at..`.
#[target_feature(enable = "avx2,fma")]
fn rows_f32(w: &[f32], scales: [f32; 4], n: usize, cols: usize, x: Rows<'_>, out: &mut Out<'_>, at: usize) {
    // A factor of one changes no bit.
    let scaled = |sums: [f32; 4]| -> [f32; 4] { std::array::from_fn(|i| scales[i] * sums[i]) };
    if n == WIDE_ROWS {
        let mut r = 0;
        while r + 3 <= x.count {
            let sums = tile_f32::<4, 3>(w, cols, &x.data[r * x.stride..], x.stride);
            sums.iter().enumerate().for_each(|(i, sums)| out.put(r + i, at, &scaled(*sums)));
            r += 3;
        }
        while r < x.count {
            let [sums] = tile_f32::<4, 1>(w, cols, &x.data[r * x.stride..], x.stride);
            out.put(r, at, &scaled(sums));
            r += 1;
        }
    } else {
        for i in 0..n {
            for r in 0..x.count {
                let [[sum]] = tile_f32::<1, 1>(&w[i * cols..], cols, &x.data[r * x.stride..], x.stride);
                out.put(r, at + i, &[scales[i] * sum]);
            }
        }
    }
}

/// `R` rows of `x` times `O` rows of `w`.
#[target_feature(enable = "avx2,fma")]
fn tile_f32<const O: usize, const R: usize>(w: &[f32], cols: usize, x: &[f32], x_stride: usize) -> [[f32; O]; R] {
    assert!(w.len() >= O * cols && x.len() >= (R - 1) * x_stride + cols);
    let mut acc = [[_mm256_setzero_ps(); R]; O];
    let whole = cols / 8 * 8;
    let (wp, xp) = (w.as_ptr(), x.as_ptr());
    let mut c = 0;
    while c < whole {
        let mut xs = [_mm256_setzero_ps(); R];
        for (r, v) in xs.iter_mut().enumerate() {
            // SAFETY: c + 8 <= cols, and row r of x has cols values from r * x_stride on (asserted above).
            *v = unsafe { _mm256_loadu_ps(xp.add(r * x_stride + c)) };
        }
        for (o, acc) in acc.iter_mut().enumerate() {
            // SAFETY: c + 8 <= cols, and w has O rows of cols values (asserted above).
            let wv = unsafe { _mm256_loadu_ps(wp.add(o * cols + c)) };
            for (acc, &xv) in acc.iter_mut().zip(&xs) {
                *acc = _mm256_fmadd_ps(wv, xv, *acc);
            }
        }
        c += 8;
    }
    let mut all = [[0.0; O]; R];
    for (r, all) in all.iter_mut().enumerate() {
        let mut sums = [_mm256_setzero_ps(); O];
        for o in 0..O {
            sums[o] = acc[o][r];
        }
        *all = reduce(sums);
        for (o, sum) in all.iter_mut().enumerate() {
            for c in whole..cols {
                *sum = w[o * cols + c].mul_add(x[r * x_stride + c], *sum);
            }
        }
    }
    all
}

/// Sums the lanes of each accumulator.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn reduce<const O: usize>(acc: [__m256; O]) -> [f32; O] {
    let mut out = [0.0; O];
    let zero = _mm256_setzero_ps();
    let mut o = 0;
    while o < O {
        let at = |i: usize| if o + i < O { acc[o + i] } else { zero };
        let pairs = (_mm256_hadd_ps(at(0), at(1)), _mm256_hadd_ps(at(2), at(3)));
        let quads = _mm256_hadd_ps(pairs.0, pairs.1);
        let sums = _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads));
        let mut four = [0.0f32; 4];
        // SAFETY: `four` holds four values.
        unsafe { _mm_storeu_ps(four.as_mut_ptr(), sums) };
        let n = 4.min(O - o);
        out[o..o + n].copy_from_slice(&four[..n]);
        o += 4;
    }
    out
}

/// `O` rows of stored weights from row `first` against one row of activations, widened in registers.
#[target_feature(enable = "avx2,fma")]
fn fused<const O: usize>(m: Matrix<'_>, first: usize, x: &[f32]) -> [f32; O] {
    let cols = m.cols;
    assert!(first + O <= m.rows && x.len() >= cols);
    let mut acc = [_mm256_setzero_ps(); O];
    let whole = cols / 8 * 8;
    match m.data {
        // Single precision needs no widening, and MXFP4 has tiles of its own: neither comes here.
        Data::F32(_) | Data::Mxfp4 { .. } => {}
        Data::Bf16(bytes) => {
            let base = bytes[first * cols * 2..(first + O) * cols * 2].as_ptr();
            let mut c = 0;
            while c < whole {
                // SAFETY: c + 8 <= cols <= x.len().
                let xv = unsafe { _mm256_loadu_ps(x.as_ptr().add(c)) };
                for (o, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: base points to O rows of cols values of two bytes, and c + 8 <= cols.
                    let wv = unsafe { load_bf16(base.add((o * cols + c) * 2)) };
                    *acc = _mm256_fmadd_ps(wv, xv, *acc);
                }
                c += 8;
            }
        }
        Data::Int8 { codes, .. } => {
            let base = codes[first * cols..(first + O) * cols].as_ptr();
            let mut c = 0;
            while c < whole {
                // The rows behind these are fetched now: each is too short for a prefetcher that has to see it begin.
                if c % LINE == 0 {
                    for o in 0..O {
                        _mm_prefetch::<_MM_HINT_T0>(base.wrapping_add((O + o) * cols + c).cast());
                    }
                }
                // SAFETY: c + 8 <= cols <= x.len().
                let xv = unsafe { _mm256_loadu_ps(x.as_ptr().add(c)) };
                for (o, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: base points to O rows of cols bytes, and c + 8 <= cols.
                    let wv = unsafe { load_int8(base.add(o * cols + c)) };
                    *acc = _mm256_fmadd_ps(wv, xv, *acc);
                }
                c += 8;
            }
        }
    }
    let mut out = reduce(acc);
    if let Data::Int8 { codes, scales } = m.data {
        for (o, sum) in out.iter_mut().enumerate() {
            for (c, &x) in x[..cols].iter().enumerate().skip(whole) {
                *sum = scalar::int8(codes[(first + o) * cols + c]).mul_add(x, *sum);
            }
            *sum *= row_scale(scales, first + o);
        }
    }
    if let Data::Bf16(bytes) = m.data {
        for (o, sum) in out.iter_mut().enumerate() {
            for (c, &x) in x[..cols].iter().enumerate().skip(whole) {
                let i = ((first + o) * cols + c) * 2;
                *sum = scalar::bf16(bytes[i], bytes[i + 1]).mul_add(x, *sum);
            }
        }
    }
    out
}

/// Eight bfloat16 values.
///
/// # Safety
/// `p` points to 16 readable bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn load_bf16(p: *const u8) -> __m256 {
    // SAFETY: 16 bytes are readable by contract; the load needs no alignment.
    let half = unsafe { _mm_loadu_si128(p.cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
}

/// Eight signed bytes as numbers.
///
/// # Safety
/// `p` points to 8 readable bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn load_int8(p: *const u8) -> __m256 {
    // SAFETY: 8 bytes are readable by contract; the load needs no alignment.
    let codes = unsafe { _mm_loadl_epi64(p.cast()) };
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))
}

/// Widens row `row` of `m`, without the row's scale, into `out`, which has `cols` values.
#[target_feature(enable = "avx2,fma")]
fn widen(m: Matrix<'_>, row: usize, out: &mut [f32]) {
    let (start, cols) = (row * m.cols, m.cols);
    match m.data {
        Data::Bf16(bytes) => {
            let bytes = &bytes[start * 2..(start + cols) * 2];
            for (out, bytes) in out.chunks_exact_mut(8).zip(bytes.chunks_exact(16)) {
                // SAFETY: the chunks hold 16 bytes and eight values.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), load_bf16(bytes.as_ptr())) };
            }
            for c in cols / 8 * 8..cols {
                out[c] = scalar::bf16(bytes[2 * c], bytes[2 * c + 1]);
            }
        }
        Data::Int8 { codes, .. } => {
            let codes = &codes[start..start + cols];
            for (out, codes) in out.chunks_exact_mut(8).zip(codes.chunks_exact(8)) {
                // SAFETY: the chunks hold eight bytes and eight values.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), load_int8(codes.as_ptr())) };
            }
            for c in cols / 8 * 8..cols {
                out[c] = scalar::int8(codes[c]);
            }
        }
        Data::F32(_) | Data::Mxfp4 { .. } => scalar::widen_codes(m, row, out),
    }
}

/// See [`super::Kernels::dot`].
///
/// # Safety
/// The processor has AVX2 and FMA; both are equally long.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
    tile_f32::<1, 1>(a, a.len(), b, 0)[0][0]
}

/// See [`super::Kernels::axpy`].
///
/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    // Compiled for AVX2 and FMA, this loop becomes vector code.
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

/// See [`super::Kernels::combine_onto`]; one sum.
///
/// # Safety
/// The processor has AVX2 and FMA; the rows fit (checked by the caller).
#[target_feature(enable = "avx2,fma")]
pub unsafe fn combine(weights: &[f32], rows: Rows<'_>, out: &mut [f32]) {
    let (n, whole) = (out.len(), out.len() / 32 * 32);
    let mut j = 0;
    while j + 64 <= whole {
        combine_columns::<1, 8>([weights], rows, out, n, j);
        j += 64;
    }
    if j < whole {
        combine_columns::<1, 4>([weights], rows, out, n, j);
    }
    for (i, &w) in weights.iter().enumerate() {
        let row = &rows.data[i * rows.stride..i * rows.stride + n];
        for (o, v) in out[whole..].iter_mut().zip(&row[whole..]) {
            *o = w.mul_add(*v, *o);
        }
    }
}

/// See [`super::Kernels::combine_onto`].
///
/// # Safety
/// The processor has AVX2 and FMA; weights and rows fit (checked by the caller).
#[target_feature(enable = "avx2,fma")]
pub unsafe fn combine_all(weights: Rows<'_>, rows: Rows<'_>, out: &mut [f32]) {
    let n = out.len() / weights.count.max(1);
    let of = |i: usize| &weights.data[i * weights.stride..][..rows.count];
    let mut i = 0;
    // Sums that share what they read of the rows.
    while i + 3 <= weights.count && n.is_multiple_of(32) {
        for j in (0..n).step_by(32) {
            combine_columns::<3, 4>([of(i), of(i + 1), of(i + 2)], rows, &mut out[i * n..], n, j);
        }
        i += 3;
    }
    for i in i..weights.count {
        // SAFETY: the processor has both, and the rows fit.
        unsafe { combine(of(i), rows, &mut out[i * n..(i + 1) * n]) };
    }
}

/// `8 * N` columns of `R` sums of the same rows from `j` on, added onto what is there; sums are `n` long. All weights are
/// equally many.
#[target_feature(enable = "avx2,fma")]
fn combine_columns<const R: usize, const N: usize>(
    weights: [&[f32]; R],
    rows: Rows<'_>,
    out: &mut [f32],
    n: usize,
    j: usize,
) {
    let mut acc = [[_mm256_setzero_ps(); N]; R];
    for (r, acc) in acc.iter_mut().enumerate() {
        for (chunk, acc) in out[r * n + j..r * n + j + 8 * N].chunks_exact(8).zip(acc) {
            // SAFETY: the chunk has eight values.
            *acc = unsafe { _mm256_loadu_ps(chunk.as_ptr()) };
        }
    }
    for i in 0..weights[0].len() {
        let row = &rows.data[i * rows.stride + j..i * rows.stride + j + 8 * N];
        let mut v = [_mm256_setzero_ps(); N];
        for (q, v) in v.iter_mut().enumerate() {
            // SAFETY: `row` has eight times N values.
            *v = unsafe { _mm256_loadu_ps(row.as_ptr().add(8 * q)) };
        }
        for (acc, weights) in acc.iter_mut().zip(weights) {
            let wv = _mm256_set1_ps(weights[i]);
            for (acc, &v) in acc.iter_mut().zip(&v) {
                *acc = _mm256_fmadd_ps(wv, v, *acc);
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (chunk, acc) in out[r * n + j..r * n + j + 8 * N].chunks_exact_mut(8).zip(acc) {
            // SAFETY: the chunk has eight values.
            unsafe { _mm256_storeu_ps(chunk.as_mut_ptr(), *acc) };
        }
    }
}

/// See [`super::Kernels::combine_matrix`].
///
/// # Safety
/// The processor has AVX2 and FMA; `weights` and `out` have the matrix's height and width (checked by the caller).
#[target_feature(enable = "avx2,fma")]
pub unsafe fn combine_matrix(weights: &[f32], m: Matrix<'_>, out: &mut [f32]) {
    let n = m.cols;
    let row_weight = |i: usize| scalar::scale_of(m, i).map_or(weights[i], |scale| weights[i] * scale);
    let mut j = 0;
    if !matches!(m.data, Data::Mxfp4 { .. }) {
        while j + 32 <= n {
            let mut acc = [_mm256_setzero_ps(); 4];
            for i in 0..weights.len() {
                let wv = _mm256_set1_ps(row_weight(i));
                for (q, acc) in acc.iter_mut().enumerate() {
                    let at = i * n + j + 8 * q;
                    // SAFETY: the slices that are taken have eight values.
                    let v = unsafe {
                        match m.data {
                            Data::F32(data) => _mm256_loadu_ps(data[at..at + 8].as_ptr()),
                            Data::Bf16(bytes) => load_bf16(bytes[2 * at..2 * at + 16].as_ptr()),
                            Data::Int8 { codes, .. } => load_int8(codes[at..at + 8].as_ptr()),
                            Data::Mxfp4 { .. } => _mm256_setzero_ps(),
                        }
                    };
                    *acc = _mm256_fmadd_ps(wv, v, *acc);
                }
            }
            for (chunk, acc) in out[j..j + 32].chunks_exact_mut(8).zip(acc) {
                // SAFETY: the chunk has eight values.
                unsafe { _mm256_storeu_ps(chunk.as_mut_ptr(), acc) };
            }
            j += 32;
        }
    }
    out[j..].fill(0.0);
    for (i, &w) in weights.iter().enumerate() {
        scalar::add_row(w, m, i, j, &mut out[j..]);
    }
}

/// See [`super::Kernels::kda_step`].
///
/// # Safety
/// The processor has AVX2 and FMA; all vectors have the width of `out` and the state its square.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn kda_step(state: &mut [f32], i: &KdaInputs<'_>, out: &mut [f32]) {
    let d = out.len();
    let mut j = 0;
    while j + 32 <= d {
        kda_columns::<4>(state, i, out, j);
        j += 32;
    }
    while j + 8 <= d {
        kda_columns::<1>(state, i, out, j);
        j += 8;
    }
    for j in j..d {
        let mut read = 0.0f32;
        for key in 0..d {
            read = i.k[key].mul_add(i.decay[key] * state[key * d + j], read);
        }
        let delta = i.beta * (i.v[j] - read);
        let mut o = 0.0f32;
        for key in 0..d {
            let s = i.k[key].mul_add(delta, i.decay[key] * state[key * d + j]);
            state[key * d + j] = s;
            o = i.q[key].mul_add(s, o);
        }
        out[j] = o;
    }
}

/// `8 * N` value channels from `j` on. The decayed state is formed twice rather than stored in between.
#[target_feature(enable = "avx2,fma")]
fn kda_columns<const N: usize>(state: &mut [f32], i: &KdaInputs<'_>, out: &mut [f32], j: usize) {
    let d = out.len();
    assert!(j + 8 * N <= d && state.len() == d * d);
    let (k, decay, q) = (&i.k[..d], &i.decay[..d], &i.q[..d]);
    let base = state.as_mut_ptr();
    let mut read = [_mm256_setzero_ps(); N];
    for key in 0..d {
        let (kv, dv) = (_mm256_set1_ps(k[key]), _mm256_set1_ps(decay[key]));
        for (n, read) in read.iter_mut().enumerate() {
            // SAFETY: key < d and j + 8 * n + 8 <= d, so the eight values lie inside the d * d state.
            let s = unsafe { _mm256_loadu_ps(base.add(key * d + j + 8 * n)) };
            *read = _mm256_fmadd_ps(kv, _mm256_mul_ps(dv, s), *read);
        }
    }
    let beta = _mm256_set1_ps(i.beta);
    let mut delta = [_mm256_setzero_ps(); N];
    for (n, delta) in delta.iter_mut().enumerate() {
        // SAFETY: the slice has eight values.
        let v = unsafe { _mm256_loadu_ps(i.v[j + 8 * n..j + 8 * n + 8].as_ptr()) };
        *delta = _mm256_mul_ps(beta, _mm256_sub_ps(v, read[n]));
    }
    let mut sum = [_mm256_setzero_ps(); N];
    for key in 0..d {
        let (kv, dv, qv) = (_mm256_set1_ps(k[key]), _mm256_set1_ps(decay[key]), _mm256_set1_ps(q[key]));
        for n in 0..N {
            // SAFETY: as above; the same eight values are written back.
            unsafe {
                let p = base.add(key * d + j + 8 * n);
                let s = _mm256_fmadd_ps(kv, delta[n], _mm256_mul_ps(dv, _mm256_loadu_ps(p)));
                _mm256_storeu_ps(p, s);
                sum[n] = _mm256_fmadd_ps(qv, s, sum[n]);
            }
        }
    }
    for (n, sum) in sum.iter().enumerate() {
        // SAFETY: the slice has eight values.
        unsafe { _mm256_storeu_ps(out[j + 8 * n..j + 8 * n + 8].as_mut_ptr(), *sum) };
    }
}
