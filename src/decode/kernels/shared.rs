//! What threads share beside single products: work on parts of buffers that need nothing of each other. Which thread has
//! which part changes no bit. Knows nothing of layers.

use super::out::Out;
use super::{CHUNK_PRODUCTS, KdaInputs, Kernels, WIDE, grown};
use std::cell::Cell;
use std::marker::PhantomData;

/// Elements of a function that are worth another thread's attention.
pub(super) const CHUNK_ELEMENTS: usize = 4096;

thread_local! {
    /// This thread works on a part: products within are its own business.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
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
struct Parts<'a> {
    start: *mut f32,
    len: usize,
    part: usize,
    values: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Parts` is a mutable borrow of plain numbers; `get` is what may give them to several threads, and its contract
// keeps them apart.
unsafe impl Sync for Parts<'_> {}

impl<'a> Parts<'a> {
    fn new(values: &'a mut [f32], part: usize) -> Self {
        assert!(part > 0, "parts of nothing");
        Self { start: values.as_mut_ptr(), len: values.len(), part, values: PhantomData }
    }

    /// Part `i`.
    ///
    /// # Safety
    /// While the result lives, nobody else has part `i`.
    #[allow(clippy::mut_from_ref)]
    unsafe fn get(&self, i: usize) -> &mut [f32] {
        let first = i.saturating_mul(self.part);
        assert!(first < self.len, "a part beyond the last");
        // SAFETY: the part lies within the borrowed values, and by contract nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), self.part.min(self.len - first)) }
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
        let buffers = buffers.map(|(values, part)| Parts::new(values, part));
        let portion = |portion: usize, grain: usize| {
            let within = Within::enter();
            for i in portion * grain..count.min((portion + 1) * grain) {
                // SAFETY: each part belongs to one portion, which is worked on once.
                work(i, buffers.each_ref().map(|b| unsafe { b.get(i) }));
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
            WIDE.with_borrow_mut(|room| {
                let o = &mut grown(room, dim)[..dim];
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
