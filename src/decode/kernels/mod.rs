//! The arithmetic under the decoder: weight matrices times rows of activations, weighted sums of rows, the KDA state
//! update and the element-wise functions. One instruction set is chosen when the decoder is loaded.
//!
//! Contract of every kernel: what happens to one row of activations is a fixed sequence of operations that does not
//! depend on how many rows share the call, nor on how output rows are grouped. A pool of threads may therefore split
//! output rows (or activation rows) in any way without changing a bit. Knows nothing of layers, sessions or files.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_int8;
#[cfg(target_arch = "x86_64")]
mod avx2_math;
#[cfg(target_arch = "x86_64")]
mod avx2_mxfp4;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_int8;
#[cfg(target_arch = "x86_64")]
mod avx512_math;
mod int8;
#[cfg(test)]
mod int8_tests;
mod isa;
mod matrix;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod mxfp4;
#[cfg(target_arch = "aarch64")]
mod neon;
mod out;
pub mod pool;
#[cfg(test)]
mod pool_tests;
pub mod scalar;
mod shared;
#[cfg(test)]
mod tests;

use crate::knob::{self, Knob};
pub use activations::{ActivationCounts, Activations, WeightForm};
pub use isa::KernelIsa;
use matrix::{Data, fits, row_scale};
pub use matrix::{Matrix, Rows, SCALE_BYTES};
use out::Out;
use pool::{MAX_THREADS, Pool};
pub use shared::{KdaRows, OWN_VALUES};
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Weight rows that are widened together; `wide` buffers hold this many rows.
pub const WIDE_ROWS: usize = 4;
/// Columns that share one MXFP4 scale.
pub const MX_GROUP: usize = 32;
/// Activations that one pass over a matrix keeps hot (bytes; half of a small second-level cache).
const HOT_BYTES: usize = 256 * 1024;

/// Widened weights that rows of activations pass by (bytes; half of a small first-level cache).
const PANEL_BYTES: usize = 16 * 1024;

/// Values of a cache line.
const LINE: usize = 16;

/// Multiplications that are worth another thread's attention.
const CHUNK_PRODUCTS: usize = 32 * 1024;
/// Chunks of a product for each thread, so that one which is late can leave its share to others.
const CHUNKS_PER_THREAD: usize = 4;
/// Output rows that kernels work on together: chunks are whole multiples.
const ROW_TILE: usize = 8;
/// Most activation rows of a product that a worker begins, within a part of something shared: [`Kernels::make_room`] gives it room
/// for so many.
pub const PART_ROWS: usize = 8;

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
    forms: activations::FormCalls,
    int8_activations: AtomicBool,
    pool: RwLock<Arc<Pool>>,
    /// Columns that each thread of the pool has working space for.
    room: AtomicUsize,
}

thread_local! {
    /// A thread's place for widened weights and ordered activations; [`Kernels::make_room`] makes it large enough.
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Values of that place for matrices of up to `cols` columns.
fn wide_len(cols: usize) -> usize {
    (HOT_BYTES / size_of::<f32>()).max(WIDE_ROWS.saturating_mul(cols))
}

/// Bytes that [`Kernels::make_room`] takes for matrices of up to `cols` columns on `threads` threads, the caller's own included.
pub fn room_bytes(cols: usize, threads: usize, activations: Activations) -> u64 {
    let threads = threads.clamp(1, MAX_THREADS);
    let values = (wide_len(cols) as u64).saturating_add((LINE + OWN_VALUES) as u64);
    let wide = values.saturating_mul(size_of::<f32>() as u64);
    let int8 = match activations {
        Activations::F32 => 0,
        Activations::Int8 => int8::room_bytes(cols, int8::MOST_ROWS + PART_ROWS * (threads - 1)),
    };
    wide.saturating_mul(threads as u64).saturating_add(int8)
}

/// Calls `work` with `len` values of the calling thread's own, the first at the start of a cache line: loads that cross lines
/// take twice as long.
fn with_room<T>(len: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    WIDE.with_borrow_mut(|wide| {
        if wide.len() < len + LINE {
            wide.resize(len + LINE, 0.0);
        }
        let start = wide.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        work(&mut wide[start..start + len])
    })
}

/// Matrix products by the code that computed them.
#[derive(Debug, Default)]
struct KernelCalls([AtomicU64; KernelIsa::ALL.len()]);

impl KernelCalls {
    fn count(&self, isa: KernelIsa) {
        self.0[isa as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Calls the same function of the module that does what is no product for the instruction set.
macro_rules! dispatch {
    ($self:ident, $name:ident ( $($arg:expr),* )) => {
        match $self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Kernels` with `Avx2` or `Avx512` exists only where `is_available` found AVX2 and FMA.
            KernelIsa::Avx2 | KernelIsa::Avx512 => unsafe { avx2::$name($($arg),*) },
            _ => scalar::$name($($arg),*),
        }
    };
}

/// As [`dispatch`] for functions of which AVX-512 has its own.
macro_rules! dispatch512 {
    ($self:ident, $name:ident ( $($arg:expr),* )) => {
        match $self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Kernels` with `Avx512` exists only where `is_available` found all that it needs.
            KernelIsa::Avx512 => unsafe { avx512_math::$name($($arg),*) },
            _ => dispatch!($self, $name($($arg),*)),
        }
    };
}

impl Kernels {
    /// The kernels of `isa`, or `None` where this processor does not run them.
    pub fn new(isa: KernelIsa) -> Option<Self> {
        let pool = || RwLock::new(Arc::new(Pool::new(1)));
        isa.is_available().then(|| Self {
            isa,
            calls: KernelCalls::default(),
            forms: activations::FormCalls::default(),
            int8_activations: AtomicBool::new(false),
            pool: pool(),
            room: AtomicUsize::new(0),
        })
    }

    /// From now on products are shared by `threads` threads, the caller's own included. They change no bit.
    pub fn use_threads(&self, threads: usize) {
        if self.pool().threads() != threads {
            *self.pool.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Pool::new(threads));
            let room = self.room.swap(0, Ordering::Relaxed);
            self.make_room(room);
        }
    }

    /// Gives every thread in use, the caller's own included, its working space for matrices of up to `cols` columns, so
    /// that nothing is allocated later. Calls with no more than before cost nothing but a look at the caller's own.
    pub fn make_room(&self, cols: usize) {
        let quantizing = self.quantizing();
        let make = |rows: usize| {
            with_room(wide_len(cols), |_| {});
            shared::with_own(|_| {});
            if quantizing {
                int8::make_room(cols, rows);
            }
        };
        if cols > 0 {
            make(int8::MOST_ROWS);
        }
        if cols > self.room.load(Ordering::Relaxed) && self.pool().muster(&|_| make(PART_ROWS)) {
            self.room.store(cols, Ordering::Relaxed);
        }
    }

    /// From now on products see their activations so, where the form of the weights allows.
    pub fn use_activations(&self, activations: Activations) {
        let int8 = activations == Activations::Int8;
        if !self.int8_activations.swap(int8, Ordering::Relaxed) && int8 {
            self.room.store(0, Ordering::Relaxed); // threads have no place for such activations yet
        }
    }

    /// What activations are in products of weights that take int8 ones.
    pub fn activations(&self) -> Activations {
        if self.int8_activations.load(Ordering::Relaxed) { Activations::Int8 } else { Activations::F32 }
    }

    /// Products so far, by the form of the weights and by what activations were.
    pub fn activation_counts(&self) -> ActivationCounts {
        self.forms.counted()
    }

    /// The threads in use.
    pub fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.pool.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Matrix products that the code of `isa` has computed so far.
    pub fn calls(&self, isa: KernelIsa) -> u64 {
        self.calls.0[isa as usize].load(Ordering::Relaxed)
    }

    /// The instruction set in use.
    pub fn isa(&self) -> KernelIsa {
        self.isa
    }

    /// `y[r][o] = sum_c m[o][c] * x[r][c]`. Codes are widened exactly; a row's scale is applied to its sum. Row `r` of `y` starts at `y[r * y_stride]`.
    /// `wide` is working space of `WIDE_ROWS * cols` values for one row of activations; it may be shorter (same bits). Several rows share
    /// widened weights, for which each thread has space of its own.
    pub fn matmul(&self, m: Matrix<'_>, x: Rows<'_>, y: &mut [f32], y_stride: usize, wide: &mut [f32]) {
        self.matmuls(x, [(m, y, y_stride)], wide);
    }

    /// [`Kernels::matmul`] of several matrices of one width with the same activations, shared by threads as one piece of work.
    pub fn matmuls<const N: usize>(
        &self,
        x: Rows<'_>,
        products: [(Matrix<'_>, &mut [f32], usize); N],
        wide: &mut [f32],
    ) {
        let cols = products.first().map_or(0, |(m, ..)| m.cols);
        assert!(x.fits(cols), "activations are shorter than their shape");
        let products = products.map(|(m, y, y_stride)| {
            assert!(m.cols == cols, "matrices differ in width");
            assert!(fits(y.len(), y_stride, x.count, m.rows), "results do not fit");
            (m, Out::new(y, y_stride, x.count, m.rows))
        });
        if !products.iter().any(|(m, _)| self.quantizes(m)) {
            return self.share_f32(x, products, wide);
        }
        for (m, out) in products {
            if self.quantizes(&m) {
                self.matmul_int8(m, x, out);
            } else {
                self.share_f32(x, [(m, out)], wide);
            }
        }
    }

    /// Products of exact activations that threads share as one piece of work.
    fn share_f32<const N: usize>(&self, x: Rows<'_>, products: [(Matrix<'_>, Out<'_>); N], wide: &mut [f32]) {
        let cols = products.first().map_or(0, |(m, _)| m.cols);
        let all_rows: usize = products.iter().map(|(m, _)| m.rows).sum();
        let each = (cols * x.count).max(1);
        let pool = self.pool();
        let rows = CHUNK_PRODUCTS.div_ceil(each).max(all_rows.div_ceil(CHUNKS_PER_THREAD * pool.threads()));
        let rows = rows.next_multiple_of(ROW_TILE);
        if pool.threads() == 1 || all_rows <= rows || shared::within() {
            if !shared::within() {
                pool.count_alone();
            }
            for (m, out) in products {
                match m.room(x.count) {
                    // On cache lines of its own, as the caller's is not: a load of a whole register would cross two.
                    room if m.is_ordered() || room > 0 => with_room(room, |wide| self.product(m, x, out, wide)),
                    _ => self.product(m, x, out, wide),
                }
            }
            return;
        }
        let chunks = products.iter().map(|(m, _)| m.rows.div_ceil(rows)).sum();
        pool.run(chunks, &|mut chunk| {
            for (m, out) in &products {
                let own = m.rows.div_ceil(rows);
                if chunk < own {
                    let first = chunk * rows;
                    let count = rows.min(m.rows - first);
                    // SAFETY: chunks have columns of their own, and `pool.run` gives each chunk to one thread.
                    let out = unsafe { out.columns(first, count) };
                    return with_room(m.room(x.count), |wide| self.product(m.part(first, count), x, out, wide));
                }
                chunk -= own;
            }
        });
    }

    /// A product on the calling thread.
    fn product(&self, m: Matrix<'_>, x: Rows<'_>, mut out: Out<'_>, wide: &mut [f32]) {
        self.forms.count(m.form(), Activations::F32);
        let block = matrix::hot_rows(m.cols);
        let mut first = 0;
        while first < x.count {
            let count = block.min(x.count - first);
            let part = x.part(first, count);
            let mut out = out.rows(first, count);
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                KernelIsa::Avx2 if !knob::skipped(Knob::Kernels) => {
                    self.calls.count(KernelIsa::Avx2);
                    // SAFETY: a `Kernels` with `Avx2` exists only where `is_available` found AVX2 and FMA.
                    unsafe { avx2::matmul(m, part, &mut out, wide) };
                }
                #[cfg(target_arch = "x86_64")]
                KernelIsa::Avx512 if !knob::skipped(Knob::Kernels) => {
                    self.calls.count(KernelIsa::Avx512);
                    // SAFETY: a `Kernels` with `Avx512` exists only where `is_available` found all that it needs.
                    unsafe { avx512::matmul(m, part, &mut out, wide) };
                }
                #[cfg(target_arch = "aarch64")]
                KernelIsa::Neon if !knob::skipped(Knob::Kernels) => {
                    self.calls.count(KernelIsa::Neon);
                    // SAFETY: a `Kernels` with `Neon` exists only where `is_available` found it.
                    unsafe { neon::matmul(m, part, &mut out, wide) };
                }
                _ => {
                    self.calls.count(KernelIsa::Scalar);
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
        out.fill(0.0);
        dispatch!(self, combine(weights, rows, out))
    }

    /// [`Kernels::combine`] of the same rows for every row of `weights`, as long as there are `rows`, added onto the sums that follow one
    /// another in `out`. Rows that come in several calls give the bits of all of them in one.
    pub fn combine_onto(&self, weights: Rows<'_>, rows: Rows<'_>, out: &mut [f32]) {
        let width = out.len() / weights.count.max(1);
        assert!(
            weights.fits(rows.count) && rows.fits(width) && out.len() == weights.count * width,
            "rows are too short"
        );
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Kernels` with `Avx2` exists only where `is_available` found AVX2 and FMA.
            KernelIsa::Avx2 => unsafe { avx2::combine_all(weights, rows, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Kernels` with `Avx512` exists only where `is_available` found all that it needs.
            KernelIsa::Avx512 => unsafe { avx512::combine_all(weights, rows, out) },
            _ => {
                for (i, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
                    scalar::combine(&weights.part(i, 1).data[..rows.count], rows, out);
                }
            }
        }
    }

    /// `out[j] = sum_i weights[i] * m[i][j]`, in ascending `i`. Row scales are multiplied with `weights` first.
    pub fn combine_matrix(&self, weights: &[f32], m: Matrix<'_>, out: &mut [f32]) {
        assert!(weights.len() == m.rows && out.len() == m.cols, "matrix does not have the shape of its sum");
        dispatch!(self, combine_matrix(weights, m, out))
    }

    /// One token of one head of the KDA recurrence (k3-architecture.md section 2.2): decays `state` (`[key, value]`),
    /// reads it with the key, writes the correction, reads it with the query into `out`.
    pub fn kda_step(&self, state: &mut [f32], i: &KdaInputs<'_>, out: &mut [f32]) {
        let d = out.len();
        let same = i.decay.len() == d && i.q.len() == d && i.k.len() == d && i.v.len() == d;
        assert!(same && state.len() == d * d, "a head's vectors differ in length");
        dispatch512!(self, kda_step(state, i, out))
    }

    /// `x = exp(x)`.
    pub fn exp(&self, x: &mut [f32]) {
        self.elements(x, &|x| dispatch512!(self, exp(x)));
    }

    /// `x = 1 / (1 + exp(-x))`.
    pub fn sigmoid(&self, x: &mut [f32]) {
        self.elements(x, &|x| dispatch512!(self, sigmoid(x)));
    }

    /// `x = x * sigmoid(x)`.
    pub fn silu(&self, x: &mut [f32]) {
        self.elements(x, &|x| dispatch512!(self, silu(x)));
    }

    /// SiTU: `gate = beta * tanh(gate / beta) * sigmoid(gate) * up'` where `up' = linear * tanh(up / linear)`, or
    /// `up` itself without a linear beta.
    pub fn situ(&self, gate: &mut [f32], up: &[f32], beta: f32, linear: Option<f32>) {
        assert!(gate.len() == up.len(), "branches differ in length");
        if gate.len() < 2 * shared::CHUNK_ELEMENTS {
            return dispatch512!(self, situ(gate, up, beta, linear));
        }
        self.by_parts(1, [(gate, shared::CHUNK_ELEMENTS)], &|i, [gate]| {
            let up = &up[i * shared::CHUNK_ELEMENTS..][..gate.len()];
            dispatch512!(self, situ(gate, up, beta, linear))
        });
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
        dispatch512!(self, softmax(x, scale));
    }
}
