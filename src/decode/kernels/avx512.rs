//! The products and the sums over a cache for x86-64 with AVX-512 (foundation, byte/word and vector length). Functions have a file
//! of their own; the rest is done by the code for AVX2, which such a processor has too.
//!
//! Every dot product but those of MXFP4 is one sixteen-lane accumulator over ascending groups of sixteen columns, whose
//! halves are added and reduced as AVX2 does, then the last columns one by one. An MXFP4 product is, group after group, `sum` plus
//! even columns, then plus odd ones, weights times their scale. Tiles only decide how many products are in flight.
//!
//! Rows of activations that come together share weights which were widened once: beside 24 multiplications there are ten loads then,
//! and nothing else that would take a multiplier's place.

use super::avx2::{self, LINE, reduce};
use super::avx2_mxfp4::{SCALES, widen_scales};
use super::matrix::panel_rows;
use super::mxfp4::{GROUP_BYTES, Meeting, Weights, evens_first, meet};
use super::out::Out;
use super::{Data, MX_GROUP, Matrix, ROW_TILE, Rows, WIDE_ROWS, scalar};
use std::arch::x86_64::*;

/// Lanes of a register.
const LANES: usize = 16;
/// Activation rows of a tile: with four weight rows they take 24 of 32 registers.
const TALL_X: usize = 6;
/// Activation rows that share the unpacking of MXFP4 weights.
const MX_X: usize = 8;

/// See [`super::Kernels::matmul`].
///
/// # Safety
/// The processor has AVX-512 F, BW and VL, AVX2 and FMA; `x` and `out` have the product's shape (checked by the caller).
/// For MXFP4, `wide` has room for a row of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub unsafe fn matmul(m: Matrix<'_>, x: Rows<'_>, out: &mut Out<'_>, wide: &mut [f32]) {
    match m.data {
        Data::F32(data) => all_rows(m, F32(data.as_ptr()), x, out, wide),
        Data::Bf16(bytes) => all_rows(m, Bf16(bytes.as_ptr()), x, out, wide),
        Data::Int8 { codes, .. } => all_rows(m, Int8(codes.as_ptr()), x, out, wide),
        Data::Mxfp4 { packed, scales } => {
            let products = |m: Meeting<'_>, out: &mut Out<'_>| match m.count {
                1 => mx_one_row(&m, out),
                2 => mx_rows::<2>(&m, out),
                3 => mx_rows::<3>(&m, out),
                4 => mx_rows::<4>(&m, out),
                5 => mx_rows::<5>(&m, out),
                6 => mx_rows::<6>(&m, out),
                7 => mx_rows::<7>(&m, out),
                _ => mx_rows::<MX_X>(&m, out),
            };
            meet(Weights::new(packed, scales, m.cols), x, out, wide, MX_X, evens_first, &products);
        }
    }
}

/// Stored weights that become numbers on the way to a register. Methods are inlined into functions that have the
/// instructions.
trait Stored: Copy {
    /// Rows of so few bytes that a prefetcher hardly begins before they end are fetched ahead.
    const SHORT: bool = false;
    /// They are numbers as they lie.
    const IS_F32: bool = false;

    /// The weights from `at` on, which need not exist.
    fn after(self, at: usize) -> Self;

    /// Where weight `at` lies, which need not exist.
    fn place(self, at: usize) -> *const i8;

    /// Weights `at..at + 16`.
    ///
    /// # Safety
    /// They exist, and the processor has AVX-512 F.
    unsafe fn load(self, at: usize) -> __m512;
}

#[derive(Clone, Copy)]
struct F32(*const f32);
#[derive(Clone, Copy)]
struct Bf16(*const u8);
#[derive(Clone, Copy)]
struct Int8(*const u8);

impl Stored for F32 {
    const IS_F32: bool = true;

    #[inline(always)]
    fn after(self, at: usize) -> Self {
        Self(self.0.wrapping_add(at))
    }

    #[inline(always)]
    fn place(self, at: usize) -> *const i8 {
        self.0.wrapping_add(at).cast()
    }

    #[inline(always)]
    unsafe fn load(self, at: usize) -> __m512 {
        // SAFETY: sixteen values are readable by contract; the load needs no alignment.
        unsafe { _mm512_loadu_ps(self.0.add(at)) }
    }
}

impl Stored for Bf16 {
    #[inline(always)]
    fn after(self, at: usize) -> Self {
        Self(self.0.wrapping_add(2 * at))
    }

    #[inline(always)]
    fn place(self, at: usize) -> *const i8 {
        self.0.wrapping_add(2 * at).cast()
    }

    #[inline(always)]
    unsafe fn load(self, at: usize) -> __m512 {
        // SAFETY: 32 bytes are readable by contract; the load needs no alignment.
        unsafe {
            let half = _mm256_loadu_si256(self.0.add(2 * at).cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
    }
}

impl Stored for Int8 {
    const SHORT: bool = true;

    #[inline(always)]
    fn after(self, at: usize) -> Self {
        Self(self.0.wrapping_add(at))
    }

    #[inline(always)]
    fn place(self, at: usize) -> *const i8 {
        self.0.wrapping_add(at).cast()
    }

    #[inline(always)]
    unsafe fn load(self, at: usize) -> __m512 {
        // SAFETY: 16 bytes are readable by contract; the load needs no alignment.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(self.0.add(at).cast()))) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn all_rows<W: Stored>(m: Matrix<'_>, w: W, x: Rows<'_>, out: &mut Out<'_>, wide: &mut [f32]) {
    let (mut o, room) = (0, if W::IS_F32 { usize::MAX } else { wide.len() / m.cols.max(1) });
    if x.count > 1 && room >= WIDE_ROWS {
        let most = panel_rows(m.cols).min(room) / WIDE_ROWS * WIDE_ROWS;
        while o + WIDE_ROWS <= m.rows {
            let n = most.min((m.rows - o) / WIDE_ROWS * WIDE_ROWS);
            if W::IS_F32 {
                panel(m, (m.part(o, n), w.after(o * m.cols)), o, x, out);
            } else {
                let wide = &mut wide[..n * m.cols];
                widen(m, w, o, wide);
                panel(m, (Matrix::f32(wide, n, m.cols), F32(wide.as_ptr())), o, x, out);
            }
            o += n;
        }
    }
    for r in 0..x.count {
        let mut o = o;
        while o + ROW_TILE <= m.rows {
            put::<ROW_TILE, 1>(m, o, r, tile(m, w, o, x, r), out);
            o += ROW_TILE;
        }
        (o..m.rows).for_each(|o| put::<1, 1>(m, o, r, tile(m, w, o, x, r), out));
    }
}

/// Rows `at..` of `m`, a multiple of four which lie in the matrix `w.0`, against all rows of `x`. These pass by one after another,
/// and the weights stay in the nearest cache.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn panel<W: Stored>(m: Matrix<'_>, w: (Matrix<'_>, W), at: usize, x: Rows<'_>, out: &mut Out<'_>) {
    let mut r = 0;
    while r < x.count {
        match x.count - r {
            1 => panel_tiles::<W, 1>(m, w, at, x, r, out),
            2 => panel_tiles::<W, 2>(m, w, at, x, r, out),
            3 => panel_tiles::<W, 3>(m, w, at, x, r, out),
            4 => panel_tiles::<W, 4>(m, w, at, x, r, out),
            5 => panel_tiles::<W, 5>(m, w, at, x, r, out),
            _ => panel_tiles::<W, TALL_X>(m, w, at, x, r, out),
        }
        r += TALL_X;
    }
}

/// [`panel`] for rows `r..r + R` of `x`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn panel_tiles<W: Stored, const R: usize>(
    m: Matrix<'_>,
    (panel, w): (Matrix<'_>, W),
    at: usize,
    x: Rows<'_>,
    r: usize,
    out: &mut Out<'_>,
) {
    for o in (0..panel.rows).step_by(WIDE_ROWS) {
        put::<WIDE_ROWS, R>(m, at + o, r, tile(panel, w, o, x, r), out);
    }
}

/// Widens rows of `m` from row `first` on, without their scales, until `out` is full.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn widen<W: Stored>(m: Matrix<'_>, w: W, first: usize, out: &mut [f32]) {
    let (start, count) = (first * m.cols, out.len());
    assert!(start + count <= m.rows * m.cols);
    let whole = count / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        // SAFETY: at + 16 <= count, so the matrix has the weights (asserted above; its constructor checked its bytes), and `out`
        // the places.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(at), w.load(start + at)) };
    }
    for (at, out) in out.iter_mut().enumerate().skip(whole) {
        *out = scalar::weight(m, first, at);
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn tile<W: Stored, const O: usize, const R: usize>(
    m: Matrix<'_>,
    w: W,
    o: usize,
    x: Rows<'_>,
    r: usize,
) -> [[f32; O]; R] {
    let (cols, x) = (m.cols, x.part(r, R));
    assert!(o + O <= m.rows && x.fits(cols));
    let mut acc = [[_mm512_setzero_ps(); R]; O];
    let whole = cols / LANES * LANES;
    let mut c = 0;
    while c < whole {
        if W::SHORT && R == 1 && c % LINE == 0 {
            for i in 0..O {
                _mm_prefetch::<_MM_HINT_T0>(w.place((o + O + i) * cols + c));
            }
        }
        let mut xs = [_mm512_setzero_ps(); R];
        for (r, v) in xs.iter_mut().enumerate() {
            // SAFETY: c + 16 <= cols, and x has R rows of cols values (asserted above).
            *v = unsafe { _mm512_loadu_ps(x.data.as_ptr().add(r * x.stride + c)) };
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: c + 16 <= cols, and the matrix has rows o..o + O (asserted above; its constructor checked its bytes).
            let wv = unsafe { w.load((o + i) * cols + c) };
            for (acc, &xv) in acc.iter_mut().zip(&xs) {
                *acc = _mm512_fmadd_ps(wv, xv, *acc);
            }
        }
        c += LANES;
    }
    let mut all = sums_of(acc);
    if whole < cols {
        for (r, all) in all.iter_mut().enumerate() {
            for (i, sum) in all.iter_mut().enumerate() {
                for c in whole..cols {
                    *sum = scalar::weight(m, o + i, c).mul_add(x.data[r * x.stride + c], *sum);
                }
            }
        }
    }
    all
}

/// Sums the lanes of each accumulator: halves first, then as [`reduce`] does.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn sums_of<const O: usize, const R: usize>(acc: [[__m512; R]; O]) -> [[f32; O]; R] {
    let mut all = [[0.0; O]; R];
    let mut r = 0;
    if O == 4 {
        // Two activation rows beside each other, the first in the lower half.
        while r + 2 <= R {
            let both = |o: usize| {
                let (first, second) = (acc[o][r], acc[o][r + 1]);
                let lower = _mm512_shuffle_f32x4::<0b01_00_01_00>(first, second);
                _mm512_add_ps(lower, _mm512_shuffle_f32x4::<0b11_10_11_10>(first, second))
            };
            // Sums of neighbours: of the first argument in the lower half of a lane of four, of the second in the upper.
            let pairs = |a: __m512, b: __m512| {
                _mm512_add_ps(_mm512_shuffle_ps::<0b10_00_10_00>(a, b), _mm512_shuffle_ps::<0b11_01_11_01>(a, b))
            };
            let fours = pairs(pairs(both(0), both(1)), pairs(both(2), both(3)));
            let crossed = _mm512_add_ps(fours, _mm512_shuffle_f32x4::<0b10_11_00_01>(fours, fours));
            for (i, all) in all[r..r + 2].iter_mut().enumerate() {
                let four = if i == 0 { _mm512_castps512_ps128(crossed) } else { _mm512_extractf32x4_ps::<2>(crossed) };
                // SAFETY: `all` has four values.
                unsafe { _mm_storeu_ps(all.as_mut_ptr(), four) };
            }
            r += 2;
        }
    }
    while r < R {
        let mut sums = [_mm256_setzero_ps(); O];
        for (sum, acc) in sums.iter_mut().zip(&acc) {
            *sum = halves(acc[r]);
        }
        all[r] = reduce(sums);
        r += 1;
    }
    all
}

/// The sums of lanes that are eight apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub(super) fn halves(v: __m512) -> __m256 {
    let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v));
    _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(upper))
}

/// All weight rows against one row of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn mx_one_row(m: &Meeting<'_>, out: &mut Out<'_>) {
    let (mut o, n) = (0, m.weights.rows());
    while o + ROW_TILE <= n {
        let [sums] = sums_of(mx_tile::<ROW_TILE, 1>(m.weights, o, m.x));
        out.put(m.row, m.column + o, &sums);
        o += ROW_TILE;
    }
    while o < n {
        let [sum] = sums_of(mx_tile::<1, 1>(m.weights, o, m.x));
        out.put(m.row, m.column + o, &sum);
        o += 1;
    }
}

/// All weight rows against `R` rows of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn mx_rows<const R: usize>(m: &Meeting<'_>, out: &mut Out<'_>) {
    let (mut o, n) = (0, m.weights.rows());
    while o + 4 <= n {
        // Two by two fit the registers; four sums are reduced as cheaply as two.
        let [a, b] = mx_tile::<2, R>(m.weights, o, m.x);
        let [c, d] = mx_tile::<2, R>(m.weights, o + 2, m.x);
        for (r, sums) in sums_of([a, b, c, d]).iter().enumerate() {
            out.put(m.row + r, m.column + o, sums);
        }
        o += 4;
    }
    while o < n {
        for (r, sum) in sums_of(mx_tile::<1, R>(m.weights, o, m.x)).iter().enumerate() {
            out.put(m.row + r, m.column + o, sum);
        }
        o += 1;
    }
}

/// Weight rows `first..first + O` times `R` rows of activations, even columns of a group first; lanes not yet summed.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn mx_tile<const O: usize, const R: usize>(w: Weights<'_>, first: usize, x: &[f32]) -> [[__m512; R]; O] {
    let (w, groups) = (w.part(first, O), w.groups());
    let (packed, scales) = (w.packed(), w.scales());
    assert!(packed.len() >= O * groups * GROUP_BYTES && x.len() >= R * groups * MX_GROUP);
    let table = _mm512_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0);
    let mut acc = [[_mm512_setzero_ps(); R]; O];
    let mut g = 0;
    while g < groups {
        let n = SCALES.min(groups - g);
        let mut factors = [[0.0f32; SCALES]; O];
        for (o, factors) in factors.iter_mut().enumerate() {
            *factors = widen_scales(&scales[o * groups + g..], n);
        }
        #[allow(clippy::needless_range_loop)] // the index is one of groups, of which `factors` has some
        for i in 0..n {
            for o in 0..O {
                // SAFETY: `packed` has O rows of `groups` groups of 16 bytes (asserted above), and g + i < groups.
                let bytes = unsafe { _mm_loadu_si128(packed.as_ptr().add((o * groups + g + i) * GROUP_BYTES).cast()) };
                // The permutation looks at the four lowest bits of a lane.
                let codes = _mm512_cvtepu8_epi32(bytes);
                // Sixteen numbers times the scale once, instead of every product: a power of two changes no other bit.
                let table = _mm512_mul_ps(table, _mm512_set1_ps(factors[o][i]));
                let even = _mm512_permutexvar_ps(codes, table);
                let odd = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), table);
                for (r, acc) in acc[o].iter_mut().enumerate() {
                    // SAFETY: `x` has R rows of `groups` groups of 32 values (asserted above), and g + i < groups.
                    unsafe {
                        let x = x.as_ptr().add((r * groups + g + i) * MX_GROUP);
                        *acc = _mm512_fmadd_ps(even, _mm512_loadu_ps(x), *acc);
                        *acc = _mm512_fmadd_ps(odd, _mm512_loadu_ps(x.add(LANES)), *acc);
                    }
                }
            }
        }
        g += n;
    }
    acc
}

/// See [`super::Kernels::combine_onto`]: columns in whole registers, three sums at a time that share what they read of the rows.
///
/// # Safety
/// The processor has AVX-512 F, BW and VL, AVX2 and FMA; weights and rows fit (checked by the caller).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub unsafe fn combine_all(weights: Rows<'_>, rows: Rows<'_>, out: &mut [f32]) {
    let n = out.len() / weights.count.max(1);
    let mut i = 0;
    while i + 3 <= weights.count && n.is_multiple_of(4 * LANES) {
        let of = |i: usize| &weights.data[i * weights.stride..][..rows.count];
        for j in (0..n).step_by(4 * LANES) {
            combine_columns([of(i), of(i + 1), of(i + 2)], rows, &mut out[i * n..], n, j);
        }
        i += 3;
    }
    if i < weights.count {
        // SAFETY: the processor has AVX2 and FMA, and what is left fits as all did.
        unsafe { avx2::combine_all(weights.part(i, weights.count - i), rows, &mut out[i * n..]) };
    }
}

/// 64 columns of three sums of the same rows from `j` on, in ascending order of rows, added onto what is there; sums are `n` long.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn combine_columns(weights: [&[f32]; 3], rows: Rows<'_>, out: &mut [f32], n: usize, j: usize) {
    let mut acc = [[_mm512_setzero_ps(); 4]; 3];
    for (r, acc) in acc.iter_mut().enumerate() {
        for (sums, acc) in out[r * n + j..][..4 * LANES].chunks_exact(LANES).zip(acc) {
            // SAFETY: the chunk has sixteen values.
            *acc = unsafe { _mm512_loadu_ps(sums.as_ptr()) };
        }
    }
    for i in 0..weights[0].len() {
        let row = &rows.data[i * rows.stride + j..][..4 * LANES];
        let mut v = [_mm512_setzero_ps(); 4];
        for (q, v) in v.iter_mut().enumerate() {
            // SAFETY: `row` has 64 values.
            *v = unsafe { _mm512_loadu_ps(row.as_ptr().add(q * LANES)) };
        }
        for (acc, weights) in acc.iter_mut().zip(weights) {
            let w = _mm512_set1_ps(weights[i]);
            for (acc, &v) in acc.iter_mut().zip(&v) {
                *acc = _mm512_fmadd_ps(w, v, *acc);
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (out, acc) in out[r * n + j..][..4 * LANES].chunks_exact_mut(LANES).zip(acc) {
            // SAFETY: the chunk has sixteen values.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *acc) };
        }
    }
}
