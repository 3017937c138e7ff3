//! Attention residuals (k3-architecture.md section 2.1): a layer's input is a softmax mix over the banked block
//! starts and the current stream. Scores look at normalised candidates, the mix takes the raw ones.

use super::kernels::Kernels;
use super::scratch::GRAIN_ROWS;
use std::ops::Range;

/// Mixes every row of `stream` into `out`. `bank` holds the banked vectors `[rows, hidden]`, oldest first; `folded`
/// is the norm's weights times the projection; `weights` is working space of `bank.len() + 1` values a row.
pub(super) fn mix(
    k: &Kernels,
    bank: &[Vec<f32>],
    stream: &[f32],
    folded: &[f32],
    eps: f32,
    weights: &mut [f32],
    out: &mut [f32],
) {
    let width = folded.len();
    let (rows, each) = (out.len() / width, bank.len() + 1);
    k.by_parts(GRAIN_ROWS, [(out, width), (&mut weights[..rows * each], each)], &|row, [out, weights]| {
        mix_row(k, bank, row * width..(row + 1) * width, stream, folded, eps, weights, out);
    });
}

/// Mixes the row that lies at `row` of the stream and of every banked block.
#[allow(clippy::too_many_arguments)]
pub(super) fn mix_row(
    k: &Kernels,
    bank: &[Vec<f32>],
    row: Range<usize>,
    stream: &[f32],
    folded: &[f32],
    eps: f32,
    weights: &mut [f32],
    out: &mut [f32],
) {
    let weights = &mut weights[..bank.len() + 1];
    let candidate = |j: usize| &bank.get(j).map_or(stream, Vec::as_slice)[row.clone()];
    for (j, weight) in weights.iter_mut().enumerate() {
        let c = candidate(j);
        *weight = k.dot(c, folded) * k.rms_scale(c, eps);
    }
    k.softmax(weights, 1.0);
    out.fill(0.0);
    for (j, &weight) in weights.iter().enumerate() {
        k.axpy(weight, candidate(j), out);
    }
}
