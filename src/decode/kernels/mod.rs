//! The arithmetic under the decoder: weight matrices times rows of activations, weighted sums of rows, the KDA state
//! update and the element-wise functions. One instruction set is chosen when the decoder is loaded.
//!
//! Contract of every kernel: what happens to one row of activations is a fixed sequence of operations that does not
//! depend on how many rows share the call, nor on how output rows are grouped. A pool of threads may therefore split
//! output rows (or activation rows) in any way without changing a bit. Knows nothing of layers, sessions or files.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_math;
mod out;
pub mod pool;
pub mod scalar;
#[cfg(test)]
mod tests;

use crate::knob::{self, Knob};
use out::Out;
use pool::Pool;
use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Weight rows that are widened together; `wide` buffers hold this many rows.
pub const WIDE_ROWS: usize = 4;
/// Columns that share one MXFP4 scale.
pub const MX_GROUP: usize = 32;
/// Activations that one pass over a matrix keeps hot (bytes; half of a small second-level cache).
const HOT_BYTES: usize = 256 * 1024;

/// Multiplications that are worth another thread's attention.
const CHUNK_PRODUCTS: usize = 32 * 1024;
/// Chunks of a product for each thread, so that one which is late can leave its share to others.
const CHUNKS_PER_THREAD: usize = 4;
/// Output rows that kernels work on together: chunks are whole multiples.
const ROW_TILE: usize = 8;

/// An instruction set that the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelIsa {
    /// Portable Rust, the reference.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
}

impl KernelIsa {
    /// The fastest one that this processor runs.
    pub fn detect() -> Self {
        if KernelIsa::Avx2.is_available() { KernelIsa::Avx2 } else { KernelIsa::Scalar }
    }

    /// Whether this processor runs it.
    pub fn is_available(self) -> bool {
        match self {
            KernelIsa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            KernelIsa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(not(target_arch = "x86_64"))]
            KernelIsa::Avx2 => false,
        }
    }

    /// Every instruction set that kernels are written for.
    pub const ALL: [KernelIsa; 2] = [KernelIsa::Scalar, KernelIsa::Avx2];

    /// The name that records carry.
    pub fn name(self) -> &'static str {
        match self {
            KernelIsa::Scalar => "scalar",
            KernelIsa::Avx2 => "avx2",
        }
    }
}

impl fmt::Display for KernelIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KernelIsa {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "scalar" => Ok(KernelIsa::Scalar),
            "avx2" => Ok(KernelIsa::Avx2),
            _ => Err(format!("`{s}` is not a kernel instruction set; use scalar or avx2")),
        }
    }
}

/// A weight matrix `[rows, cols]`, row after row, in one of the three forms that occur.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    rows: usize,
    cols: usize,
    data: Data<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Data<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u8]),
    Mxfp4 { packed: &'a [u8], scales: &'a [u8] },
}

impl<'a> Matrix<'a> {
    /// Single precision; `data` holds at least `rows * cols` values.
    pub fn f32(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: Data::F32(&data[..rows * cols]) }
    }

    /// bfloat16, little endian, any alignment; `bytes` holds at least `rows * cols * 2`.
    pub fn bf16(bytes: &'a [u8], rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: Data::Bf16(&bytes[..rows * cols * 2]) }
    }

    /// MXFP4: two e2m1 codes a byte, low nibble first, and one e8m0 scale per 32 columns. `cols` is a multiple of 32.
    pub fn mxfp4(packed: &'a [u8], scales: &'a [u8], rows: usize, cols: usize) -> Self {
        assert!(cols.is_multiple_of(MX_GROUP), "MXFP4 rows are whole groups of {MX_GROUP}");
        let (packed, scales) = (&packed[..rows * cols / 2], &scales[..rows * cols / MX_GROUP]);
        Self { rows, cols, data: Data::Mxfp4 { packed, scales } }
    }

    /// Rows `first..first + count`.
    pub fn part(&self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.rows, "rows beyond the last");
        let (from, to) = (first * self.cols, (first + count) * self.cols);
        let data = match self.data {
            Data::F32(data) => Data::F32(&data[from..to]),
            Data::Bf16(bytes) => Data::Bf16(&bytes[from * 2..to * 2]),
            Data::Mxfp4 { packed, scales } => {
                Data::Mxfp4 { packed: &packed[from / 2..to / 2], scales: &scales[from / MX_GROUP..to / MX_GROUP] }
            }
        };
        Self { rows: count, cols: self.cols, data }
    }

    /// Output width.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input width.
    pub fn cols(&self) -> usize {
        self.cols
    }
}

/// Rows of activations: row `i` starts at `data[i * stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The values.
    pub data: &'a [f32],
    /// Distance of two rows.
    pub stride: usize,
    /// How many rows.
    pub count: usize,
}

impl<'a> Rows<'a> {
    /// `count` rows of width `data.len() / count`, one after another.
    pub fn packed(data: &'a [f32], count: usize) -> Self {
        Self { data, stride: data.len() / count.max(1), count }
    }

    /// Rows `first..first + count` of these.
    pub fn part(&self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.count, "rows beyond the last");
        Self { data: &self.data[(first * self.stride).min(self.data.len())..], stride: self.stride, count }
    }

    fn fits(&self, width: usize) -> bool {
        fits(self.data.len(), self.stride, self.count, width)
    }
}

fn fits(len: usize, stride: usize, count: usize, width: usize) -> bool {
    count == 0 || (count - 1).checked_mul(stride).and_then(|n| n.checked_add(width)).is_some_and(|n| n <= len)
}

/// One head's inputs to [`Kernels::kda_step`], all of the head's width.
#[derive(Clone, Copy, Debug)]
pub struct KdaInputs<'a> {
    /// `exp(g)` per key channel.
    pub decay: &'a [f32],
    /// Normalised and scaled query.
    pub q: &'a [f32],
    /// Normalised key.
    pub k: &'a [f32],
    /// Value.
    pub v: &'a [f32],
    /// Write strength.
    pub beta: f32,
}

/// The kernels of one instruction set, and the threads that they may use.
#[derive(Debug)]
pub struct Kernels {
    isa: KernelIsa,
    calls: KernelCalls,
    pool: RwLock<Arc<Pool>>,
}

thread_local! {
    /// A worker's place for widened weights; grows once to the widest matrix.
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Matrix products by the code that computed them.
#[derive(Debug, Default)]
struct KernelCalls {
    scalar: AtomicU64,
    avx2: AtomicU64,
}

/// Calls the same function of the module that belongs to the instruction set.
macro_rules! dispatch {
    ($self:ident, $name:ident ( $($arg:expr),* )) => {
        match $self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Kernels` with `Avx2` exists only where `is_available` found AVX2 and FMA.
            KernelIsa::Avx2 => unsafe { avx2::$name($($arg),*) },
            _ => scalar::$name($($arg),*),
        }
    };
}

impl Kernels {
    /// The kernels of `isa`, or `None` where this processor does not run them.
    pub fn new(isa: KernelIsa) -> Option<Self> {
        let pool = || RwLock::new(Arc::new(Pool::new(1)));
        isa.is_available().then(|| Self { isa, calls: KernelCalls::default(), pool: pool() })
    }

    /// From now on products are shared by `threads` threads, the caller's own included. They change no bit.
    pub fn use_threads(&self, threads: usize) {
        if self.pool().threads() != threads {
            *self.pool.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Pool::new(threads));
        }
    }

    /// The threads in use.
    pub fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.pool.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Matrix products that the code of `isa` has computed so far.
    pub fn calls(&self, isa: KernelIsa) -> u64 {
        match isa {
            KernelIsa::Scalar => self.calls.scalar.load(Ordering::Relaxed),
            KernelIsa::Avx2 => self.calls.avx2.load(Ordering::Relaxed),
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> KernelIsa {
        self.isa
    }

    /// `y[r][o] = sum_c m[o][c] * x[r][c]` with exactly widened weights. Row `r` of `y` starts at `y[r * y_stride]`.
    /// `wide` is working space of `WIDE_ROWS * cols` values; when it is shorter, weights are widened again for every
    /// row (same bits, slower).
    pub fn matmul(&self, m: Matrix<'_>, x: Rows<'_>, y: &mut [f32], y_stride: usize, wide: &mut [f32]) {
        assert!(x.fits(m.cols), "activations are shorter than their shape");
        assert!(fits(y.len(), y_stride, x.count, m.rows), "results do not fit");
        let products = (m.cols * x.count).max(1);
        let out = Out::new(y, y_stride, x.count, m.rows);
        let pool = self.pool();
        let rows = CHUNK_PRODUCTS.div_ceil(products).max(m.rows.div_ceil(CHUNKS_PER_THREAD * pool.threads()));
        let rows = rows.next_multiple_of(ROW_TILE);
        if pool.threads() == 1 || m.rows <= rows {
            pool.count_alone();
            self.product(m, x, out, wide);
            return;
        }
        let widens = x.count > 1 && !matches!(m.data, Data::F32(_));
        pool.run(m.rows.div_ceil(rows), &|chunk| {
            let first = chunk * rows;
            let count = rows.min(m.rows - first);
            // SAFETY: chunks have columns of their own, and `pool.run` gives each chunk to one thread.
            let out = unsafe { out.columns(first, count) };
            WIDE.with_borrow_mut(|wide| {
                if widens && wide.len() < WIDE_ROWS * m.cols {
                    wide.resize(WIDE_ROWS * m.cols, 0.0);
                }
                self.product(m.part(first, count), x, out, wide);
            });
        });
    }

    /// A product on the calling thread.
    fn product(&self, m: Matrix<'_>, x: Rows<'_>, mut out: Out<'_>, wide: &mut [f32]) {
        let block = (HOT_BYTES / (4 * m.cols.max(1))).max(1);
        let mut first = 0;
        while first < x.count {
            let count = block.min(x.count - first);
            let part = x.part(first, count);
            let mut out = out.rows(first, count);
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                KernelIsa::Avx2 if !knob::skipped(Knob::Kernels) => {
                    self.calls.avx2.fetch_add(1, Ordering::Relaxed);
                    // SAFETY: a `Kernels` with `Avx2` exists only where `is_available` found AVX2 and FMA.
                    unsafe { avx2::matmul(m, part, &mut out, wide) };
                }
                _ => {
                    self.calls.scalar.fetch_add(1, Ordering::Relaxed);
                    scalar::matmul(m, part, &mut out, wide);
                }
            }
            first += count;
        }
    }

    /// Row `row` of `m`, widened into `out` (at least `cols` values).
    pub fn widen_row(&self, m: Matrix<'_>, row: usize, out: &mut [f32]) {
        scalar::widen_row(m, row, out);
    }

    /// The dot product of two equally long vectors.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        assert!(a.len() == b.len(), "vectors differ in length");
        dispatch!(self, dot(a, b))
    }

    /// `y += a * x`.
    pub fn axpy(&self, a: f32, x: &[f32], y: &mut [f32]) {
        assert!(x.len() == y.len(), "vectors differ in length");
        dispatch!(self, axpy(a, x, y))
    }

    /// `out[j] = sum_i weights[i] * rows[i][j]`, in ascending `i`.
    pub fn combine(&self, weights: &[f32], rows: Rows<'_>, out: &mut [f32]) {
        assert!(weights.len() == rows.count && rows.fits(out.len()), "rows are shorter than their shape");
        dispatch!(self, combine(weights, rows, out))
    }

    /// `out[j] = sum_i weights[i] * m[i][j]` for bfloat16 rows of the width of `out`, in ascending `i`.
    pub fn combine_bf16(&self, weights: &[f32], bytes: &[u8], out: &mut [f32]) {
        assert!(bytes.len() == weights.len() * out.len() * 2, "matrix does not have its shape");
        dispatch!(self, combine_bf16(weights, bytes, out))
    }

    /// One token of one head of the KDA recurrence (k3-architecture.md section 2.2): decays `state` (`[key, value]`),
    /// reads it with the key, writes the correction, reads it with the query into `out`.
    pub fn kda_step(&self, state: &mut [f32], i: &KdaInputs<'_>, out: &mut [f32]) {
        let d = out.len();
        let same = i.decay.len() == d && i.q.len() == d && i.k.len() == d && i.v.len() == d;
        assert!(same && state.len() == d * d, "a head's vectors differ in length");
        dispatch!(self, kda_step(state, i, out))
    }

    /// `x = exp(x)`.
    pub fn exp(&self, x: &mut [f32]) {
        dispatch!(self, exp(x))
    }

    /// `x = 1 / (1 + exp(-x))`.
    pub fn sigmoid(&self, x: &mut [f32]) {
        dispatch!(self, sigmoid(x))
    }

    /// `x = x * sigmoid(x)`.
    pub fn silu(&self, x: &mut [f32]) {
        dispatch!(self, silu(x))
    }

    /// SiTU: `gate = beta * tanh(gate / beta) * sigmoid(gate) * up'` where `up' = linear * tanh(up / linear)`, or
    /// `up` itself without a linear beta.
    pub fn situ(&self, gate: &mut [f32], up: &[f32], beta: f32, linear: Option<f32>) {
        assert!(gate.len() == up.len(), "branches differ in length");
        dispatch!(self, situ(gate, up, beta, linear))
    }

    /// `out = weight * (x / sqrt(mean(x^2) + eps))`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let inv = self.rms_scale(x, eps);
        for ((o, &x), &w) in out.iter_mut().zip(x).zip(weight) {
            *o = w * (x * inv);
        }
    }

    /// [`Kernels::rms_norm`] over `x` itself.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        let inv = self.rms_scale(x, eps);
        for (x, &w) in x.iter_mut().zip(weight) {
            *x = w * (*x * inv);
        }
    }

    /// `1 / sqrt(mean(x^2) + eps)`.
    pub fn rms_scale(&self, x: &[f32], eps: f32) -> f32 {
        1.0 / (self.dot(x, x) / x.len() as f32 + eps).sqrt()
    }

    /// `x = softmax(x * scale)`.
    pub fn softmax(&self, x: &mut [f32], scale: f32) {
        let max = x.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
        for v in x.iter_mut() {
            *v = (*v - max) * scale;
        }
        self.exp(x);
        let sum: f32 = x.iter().sum();
        for v in x.iter_mut() {
            *v /= sum;
        }
    }
}
