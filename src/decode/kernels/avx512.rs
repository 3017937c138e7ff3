//! The products for x86-64 with AVX-512 (foundation, byte/word and vector length); everything else is done by the code for
//! AVX2, which such a processor has too.
//!
//! Every dot product but those of MXFP4 is one sixteen-lane accumulator over ascending groups of sixteen columns, whose
//! halves are added and reduced as AVX2 does, then the last columns one by one. An MXFP4 product is, group after group,
//! `sum = scale * (even columns + odd columns) + sum`. Tiles only decide how many products are in flight.

use super::avx2::{LINE, reduce};
use super::avx2_mxfp4::{SCALES, widen_scales};
use super::mxfp4::{GROUP_BYTES, Meeting, Weights, evens_first, meet};
use super::out::Out;
use super::{Data, MX_GROUP, Matrix, ROW_TILE, Rows, scalar};
use std::arch::x86_64::*;

/// Lanes of a register.
const LANES: usize = 16;
/// Activation rows of a tile.
const TALL_X: usize = 4;
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
        Data::F32(data) => all_rows(m, F32(data.as_ptr()), x, out),
        Data::Bf16(bytes) => all_rows(m, Bf16(bytes.as_ptr()), x, out),
        Data::Int8 { codes, .. } => all_rows(m, Int8(codes.as_ptr()), x, out),
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
fn all_rows<W: Stored>(m: Matrix<'_>, w: W, x: Rows<'_>, out: &mut Out<'_>) {
    let mut r = 0;
    if x.count >= TALL_X {
        let mut o = 0;
        while o < m.rows {
            r = 0;
            while r + TALL_X <= x.count {
                if o + 4 <= m.rows {
                    put::<4, TALL_X>(m, o, r, tile(m, w, o, x, r), out);
                } else {
                    (o..m.rows).for_each(|o| put::<1, TALL_X>(m, o, r, tile(m, w, o, x, r), out));
                }
                r += TALL_X;
            }
            o += 4;
        }
    }
    while r < x.count {
        let mut o = 0;
        while o + ROW_TILE <= m.rows {
            put::<ROW_TILE, 1>(m, o, r, tile(m, w, o, x, r), out);
            o += ROW_TILE;
        }
        (o..m.rows).for_each(|o| put::<1, 1>(m, o, r, tile(m, w, o, x, r), out));
        r += 1;
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
    let mut all = [[0.0; O]; R];
    for (r, all) in all.iter_mut().enumerate() {
        let mut sums = [_mm256_setzero_ps(); O];
        for i in 0..O {
            sums[i] = halves(acc[i][r]);
        }
        *all = reduce(sums);
        for (i, sum) in all.iter_mut().enumerate() {
            for c in whole..cols {
                *sum = scalar::weight(m, o + i, c).mul_add(x.data[r * x.stride + c], *sum);
            }
        }
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
        let acc = mx_tile::<ROW_TILE, 1>(m.weights, o, m.x);
        out.put(m.row, m.column + o, &reduce(acc.map(|[acc]| acc)));
        o += ROW_TILE;
    }
    while o < n {
        out.put(m.row, m.column + o, &reduce(mx_tile::<1, 1>(m.weights, o, m.x)[0]));
        o += 1;
    }
}

/// All weight rows against `R` rows of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn mx_rows<const R: usize>(m: &Meeting<'_>, out: &mut Out<'_>) {
    let (mut o, n) = (0, m.weights.rows());
    while o + 4 <= n {
        // Two by two fit the registers; four sums are reduced as cheaply as two.
        let (a, b) = (mx_tile::<2, R>(m.weights, o, m.x), mx_tile::<2, R>(m.weights, o + 2, m.x));
        for r in 0..R {
            out.put(m.row + r, m.column + o, &reduce([a[0][r], a[1][r], b[0][r], b[1][r]]));
        }
        o += 4;
    }
    while o < n {
        let [acc] = mx_tile::<1, R>(m.weights, o, m.x);
        for (r, acc) in acc.into_iter().enumerate() {
            out.put(m.row + r, m.column + o, &reduce([acc]));
        }
        o += 1;
    }
}

/// Weight rows `first..first + O` times `R` rows of activations, even columns of a group first; lanes not yet summed but for
/// those eight apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn mx_tile<const O: usize, const R: usize>(w: Weights<'_>, first: usize, x: &[f32]) -> [[__m256; R]; O] {
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
                let even = _mm512_permutexvar_ps(codes, table);
                let odd = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), table);
                let factor = _mm512_set1_ps(factors[o][i]);
                for (r, acc) in acc[o].iter_mut().enumerate() {
                    // SAFETY: `x` has R rows of `groups` groups of 32 values (asserted above), and g + i < groups.
                    let sum = unsafe {
                        let x = x.as_ptr().add((r * groups + g + i) * MX_GROUP);
                        let sum = _mm512_mul_ps(even, _mm512_loadu_ps(x));
                        _mm512_fmadd_ps(odd, _mm512_loadu_ps(x.add(LANES)), sum)
                    };
                    *acc = _mm512_fmadd_ps(sum, factor, *acc);
                }
            }
        }
        g += n;
    }
    let mut all = [[_mm256_setzero_ps(); R]; O];
    for (all, acc) in all.iter_mut().zip(acc) {
        for (all, acc) in all.iter_mut().zip(acc) {
            *all = halves(acc);
        }
    }
    all
}
