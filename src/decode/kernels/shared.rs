//! What threads share beside single products: work on parts of buffers that need nothing of each other. Which thread has
//! which part changes no bit. Knows nothing of layers.

use super::out::Out;
use super::{CHUNK_PRODUCTS, KdaInputs, Kernels, with_room};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements of a function that are worth another thread's attention.
pub(super) const CHUNK_ELEMENTS: usize = 4096;

thread_local! {
    /// This thread works on a part: products within are its own business.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
    /// A thread's values between two steps of a part, [`OWN_VALUES`] of them.
    static OWN: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Values that a thread has for itself while it works on a part of [`Kernels::by_parts_with`]: half of a small second-level cache.
pub const OWN_VALUES: usize = 64 * 1024;

/// Calls `work` with those of the calling thread; what is in them is not said.
pub(super) fn with_own<T>(work: impl FnOnce(&mut [f32]) -> T) -> T {
    let mut own = OWN.take();
    if own.is_empty() {
        own = vec![0.0; OWN_VALUES];
    }
    let done = work(&mut own);
    OWN.set(own);
    done
}

/// Whether the calling thread works on a part of something shared.
pub(super) fn within() -> bool {
    WITHIN.get()
}

/// A part is being worked on, until this goes out of scope.
struct Within(bool);

impl Within {
    fn enter() -> Self {
        Within(WITHIN.replace(true))
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        WITHIN.set(self.0);
    }
}

/// A buffer in parts of equal length; the last one may be shorter.
struct Parts<'a, T = f32> {
    start: *mut T,
    len: usize,
    part: usize,
    values: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Parts` is a mutable borrow of values that other threads may have; `get` is what may give them to several, and its
// contract keeps them apart.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    fn new(values: &'a mut [T], part: usize) -> Self {
        assert!(part > 0, "parts of nothing");
        Self { start: values.as_mut_ptr(), len: values.len(), part, values: PhantomData }
    }

    /// Part `i`.
    ///
    /// # Safety
    /// While the result lives, nobody else has part `i`.
    #[allow(clippy::mut_from_ref)]
    unsafe fn get(&self, i: usize) -> &mut [T] {
        let first = i.saturating_mul(self.part);
        assert!(first < self.len, "a part beyond the last");
        // SAFETY: by contract nobody else has the part.
        unsafe { self.slice(first, self.part.min(self.len - first)) }
    }

    /// Values `first..first + count`, wherever parts begin.
    ///
    /// # Safety
    /// While the result lives, nobody else has any of them.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, first: usize, count: usize) -> &mut [T] {
        assert!(first <= self.len && count <= self.len - first, "values beyond the last");
        // SAFETY: they lie within the borrowed values, and by contract nobody else has them.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), count) }
    }
}

/// The inputs of [`Kernels::kda_rows`], row after row; heads lie beside each other within a row.
#[derive(Clone, Copy, Debug)]
pub struct KdaRows<'a> {
    /// `exp(g)` per key channel, `[rows, heads * dim]` as the next three.
    pub decay: &'a [f32],
    /// Normalised and scaled queries.
    pub q: &'a [f32],
    /// Normalised keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Write strengths, `[rows, heads]`.
    pub beta: &'a [f32],
}

impl Kernels {
    /// Calls `work(i, parts)` once for every part of `buffers[0].0`, with the `i`-th part of each buffer; `.1` is the length
    /// of a buffer's parts, of which the last may be shorter. Threads take `grain` parts at a time; all of it is the
    /// caller's if that leaves no two portions. Products within `work` are not divided further.
    pub fn by_parts<const N: usize>(
        &self,
        grain: usize,
        buffers: [(&mut [f32], usize); N],
        work: &(dyn Fn(usize, [&mut [f32]; N]) + Sync),
    ) {
        let count = buffers.first().map_or(0, |(values, part)| values.len().div_ceil(*part));
        let mut nothing = vec![(); count]; // takes no memory
        self.by_parts_of(grain, (&mut nothing, 1), buffers, &|i, _, parts| work(i, parts));
    }

    /// [`Kernels::by_parts`] with a buffer of other values, which says how many parts there are.
    #[allow(clippy::type_complexity)] // a closure's arguments: which part, and the parts
    pub fn by_parts_of<T: Send, const N: usize>(
        &self,
        grain: usize,
        (values, part): (&mut [T], usize),
        buffers: [(&mut [f32], usize); N],
        work: &(dyn Fn(usize, &mut [T], [&mut [f32]; N]) + Sync),
    ) {
        let count = values.len().div_ceil(part);
        let values = Parts::new(values, part);
        let buffers = buffers.map(|(values, part)| Parts::new(values, part));
        let portion = |portion: usize, grain: usize| {
            let within = Within::enter();
            for i in portion * grain..count.min((portion + 1) * grain) {
                // SAFETY: each part belongs to one portion, which is worked on once.
                let own = unsafe { values.get(i) };
                // SAFETY: as above.
                work(i, own, buffers.each_ref().map(|b| unsafe { b.get(i) }));
            }
            drop(within);
        };
        let pool = self.pool();
        if pool.threads() == 1 || count <= grain || within() {
            portion(0, count);
        } else {
            pool.run(count.div_ceil(grain), &|i| portion(i, grain));
        }
    }

    /// [`Kernels::by_parts`], one part at a time, where `work` has [`OWN_VALUES`] of the thread's own besides.
    #[allow(clippy::type_complexity)] // a closure's arguments, as above
    pub fn by_parts_with<const N: usize>(
        &self,
        buffers: [(&mut [f32], usize); N],
        work: &(dyn Fn(usize, [&mut [f32]; N], &mut [f32]) + Sync),
    ) {
        self.by_parts(1, buffers, &|i, parts| with_own(|own| work(i, parts, own)));
    }

    /// Calls `work(i, rows, parts)` once for each of `spans`, with the rows of `out` that its range names, which are `width` long,
    /// and with the `i`-th part of each buffer of `room`, `.1` values long. The ranges ascend and do not overlap. Threads take
    /// one span after another; products within `work` are not divided further.
    #[allow(clippy::type_complexity)] // a closure's arguments, named in the comment above
    pub fn by_spans<const N: usize>(
        &self,
        spans: &[(usize, Range<usize>)],
        (out, width): (&mut [f32], usize),
        room: [(&mut [f32], usize); N],
        work: &(dyn Fn(usize, &mut [f32], [&mut [f32]; N]) + Sync),
    ) {
        let mut before = 0;
        for (_, span) in spans {
            assert!(before <= span.start && span.start <= span.end, "spans overlap");
            before = span.end;
        }
        assert!(before.checked_mul(width).is_some_and(|end| end <= out.len()), "spans beyond the last row");
        let cells = Parts::new(out, 1);
        let room = room.map(|(values, part)| Parts::new(values, part));
        let one = |i: usize| {
            let within = Within::enter();
            let (_, span) = &spans[i];
            // SAFETY: spans lie within `out` and apart (asserted above), and each is worked on once.
            let rows = unsafe { cells.slice(span.start * width, span.len() * width) };
            // SAFETY: each part belongs to one span.
            work(i, rows, room.each_ref().map(|b| unsafe { b.get(i) }));
            drop(within);
        };
        let pool = self.pool();
        if pool.threads() == 1 || spans.len() < 2 || within() {
            (0..spans.len()).for_each(one);
        } else {
            pool.run(spans.len(), &one);
        }
    }

    /// `f` over the values of `x`, shared by threads where there are many.
    pub(super) fn elements(&self, x: &mut [f32], f: &(dyn Fn(&mut [f32]) + Sync)) {
        if x.len() < 2 * CHUNK_ELEMENTS {
            f(x);
        } else {
            self.by_parts(1, [(x, CHUNK_ELEMENTS)], &|_, [x]| f(x));
        }
    }

    /// [`Kernels::kda_step`] for every row of every head, in the order of the rows: `state` is `[heads, dim, dim]`, `out`
    /// `[rows, heads * dim]`. Heads need nothing of each other, so threads share them.
    pub fn kda_rows(&self, state: &mut [f32], dim: usize, i: &KdaRows<'_>, out: &mut [f32]) {
        let heads = state.len() / (dim * dim).max(1);
        let width = heads * dim;
        let rows = out.len() / width.max(1);
        assert!(state.len() == heads * dim * dim && out.len() == rows * width, "heads or rows are not whole");
        assert!([i.decay, i.q, i.k, i.v].iter().all(|v| v.len() == out.len()) && i.beta.len() == rows * heads);
        if rows == 0 || heads == 0 {
            return;
        }
        let out = Out::new(out, width, rows, width);
        let grain = if rows * state.len() < 2 * CHUNK_PRODUCTS { heads } else { 1 };
        self.by_parts(grain, [(state, dim * dim)], &|head, [state]| {
            // SAFETY: each head has columns of its own, and is one part.
            let mut out = unsafe { out.columns(head * dim, dim) };
            with_room(dim, |o| {
                for row in 0..rows {
                    let at = row * width + head * dim..row * width + (head + 1) * dim;
                    let inputs = KdaInputs {
                        decay: &i.decay[at.clone()],
                        q: &i.q[at.clone()],
                        k: &i.k[at.clone()],
                        v: &i.v[at],
                        beta: i.beta[row * heads + head],
                    };
                    self.kda_step(state, &inputs, o);
                    out.put(row, 0, o);
                }
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{all, bf16_bytes, bytes, noise};
    use super::super::{KernelIsa, Matrix, Rows, WIDE_ROWS};
    use super::*;

    #[test]
    fn products_of_one_input_are_shared_together_and_spans_once_each() {
        let (rows, cols) = ([40, 7, 72], 96);
        let (bf16, packed) = (bf16_bytes(80, 72 * cols), bytes(81, 72 * cols / 2));
        let (scales, x) = (vec![124u8; 72 * cols / 32], noise(82, 13 * cols));
        for isa in KernelIsa::ALL {
            for (threads, n) in [(1, 1), (3, 1), (3, 13)] {
                let Some(k) = Kernels::new(isa) else { continue };
                let x = Rows::packed(&x[..n * cols], n);
                let matrices = [
                    Matrix::bf16(&bf16, rows[0], cols),
                    Matrix::bf16(&bf16[cols..], rows[1], cols),
                    Matrix::mxfp4(&packed, &scales, rows[2], cols),
                ];
                let alone = matrices.map(|m| {
                    let mut y = vec![0.0; n * m.rows()];
                    k.matmul(m, x, &mut y, m.rows(), &mut vec![0.0; WIDE_ROWS * cols]);
                    y
                });
                k.use_threads(threads);
                let before: u64 = k.pool().taken().iter().sum();
                let mut together = rows.map(|rows| vec![0.0; n * rows]);
                let [a, b, c] = &mut together;
                let products =
                    [(matrices[0], &mut a[..], rows[0]), (matrices[1], b, rows[1]), (matrices[2], c, rows[2])];
                k.matmuls(x, products, &mut []);
                assert!(together == alone, "{isa}: {n} rows on {threads} threads");
                let taken = k.pool().taken().iter().sum::<u64>() - before;
                assert_eq!(taken > 1, n == 13, "chunks are worth a thread's attention: {taken}");
            }
        }

        let k = Kernels::new(KernelIsa::detect()).unwrap();
        k.use_threads(3);
        let (mut out, mut room) = (vec![0.0; 10 * 2], vec![0.0; 4 * 5]);
        let spans = [(7, 1..3), (8, 3..3), (9, 5..9)];
        k.by_spans(&spans, (&mut out, 2), [(&mut room, 5)], &|i, out, [room]| {
            assert_eq!(out.len(), 2 * spans[i].1.len());
            out.iter_mut().for_each(|v| *v += spans[i].0 as f32);
            room[0] += 1.0;
        });
        let want = [0.0, 7.0, 7.0, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0, 0.0].map(|v| [v, v]).concat();
        assert_eq!(out, want);
        assert_eq!(room.chunks(5).map(|r| r[0]).collect::<Vec<_>>(), [1.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn sums_that_share_rows_have_the_bits_of_sums_alone() {
        for (count, width, sums) in [(1, 32, 3), (17, 64, 7), (9, 40, 4), (5, 96, 2)] {
            let (rows, weights) = (noise(90, count * (width + 3)), noise(91, sums * count));
            let rows = Rows { data: &rows, stride: width + 3, count };
            for k in all() {
                let (mut all, mut alone) = (vec![0.0; sums * width], vec![0.0; sums * width]);
                let mut halves = Vec::new();
                // in one call, or in two
                for cut in [0, count / 2] {
                    all.fill(0.0);
                    let part = |first: usize, count: usize| {
                        let of = Rows { data: &weights[first..], stride: rows.count, count: sums };
                        (of, rows.part(first, count))
                    };
                    for (of, rows) in [part(0, cut), part(cut, count - cut)] {
                        k.combine_onto(of, rows, &mut all);
                    }
                    halves.push(all.clone());
                }
                for (weights, out) in weights.chunks_exact(count).zip(alone.chunks_exact_mut(width)) {
                    k.combine(weights, rows, out);
                }
                assert!(halves.iter().all(|h| *h == alone), "{}: {sums} sums of {count} rows", k.isa());
            }
        }
    }
}
