//! The feed-forward parts (k3-architecture.md section 2.4): dense MLPs, and routed experts in the latent space. One
//! barrier per layer and pass asks for the union of all rows' experts. Experts are computed as they arrive, their
//! outputs kept apart, and summed afterwards in ascending expert id, so that no bit depends on the arrival order.

use super::error::DecodeError;
use super::guess::Guesser;
use super::kernels::{Matrix, Rows, WIDE_ROWS};
use super::observe::{Observer, Route};
use super::scratch::{GRAIN_ROWS, MlpScratch, MoeScratch, PART_ROWS, blocks};
use super::session::PassStats;
use super::timeline::Place;
use super::weights::{Mlp, Moe, View};
use crate::clock::Clock;
use crate::ids::{ExpertId, ExpertKey, LayerId};
use crate::model::config::MoeConfig;
use crate::source::{Barrier, ExpertSource, Phase, StepInfo};

/// Keeps a row's renormalisation away from a division by zero.
const SUM_EPS: f32 = 1e-20;
/// Rows of an expert from which on threads share rows rather than products.
const SHARED_ROWS: usize = 16;

/// What a pass shares between its layers.
pub(super) struct Pass<'a, 'o> {
    pub(super) step: StepInfo,
    pub(super) source: &'a mut dyn ExpertSource,
    pub(super) observer: Option<&'a mut (dyn Observer + 'o)>,
    pub(super) clock: Clock,
    pub(super) stats: PassStats,
    pub(super) guesser: &'a mut Guesser,
    /// By row of the pass.
    pub(super) places: &'a [Place],
    /// By layer and expert: whether a pass over these prompts has asked for it.
    pub(super) prompt_seen: &'a mut [bool],
}

/// `out = down(situ(gate x, up x))`.
pub(super) fn mlp(dec: View<'_>, w: &Mlp, x: Rows<'_>, s: &mut MlpScratch, wide: &mut [f32], out: &mut [f32]) {
    let (k, width, h) = (&dec.kernels, w.gate.rows, dec.config.hidden_size);
    for (first, count) in blocks(x.count) {
        let (x, out) = (x.part(first, count), &mut out[first * h..(first + count) * h]);
        let (gate, up) = (&mut s.gate[..count * width], &mut s.up[..count * width]);
        k.matmul(dec.matrix(w.gate), x, gate, width, wide);
        k.matmul(dec.matrix(w.up), x, up, width, wide);
        k.situ(gate, up, dec.config.situ_beta, dec.config.situ_linear_beta);
        k.matmul(dec.matrix(w.down), Rows::packed(gate, count), out, h, wide);
    }
}

/// Routed and shared experts of one layer: `x` is `mix` after the layer's norm.
#[allow(clippy::too_many_arguments)]
pub(super) fn forward(
    dec: View<'_>,
    layer: LayerId,
    moe: &MoeConfig,
    w: &Moe,
    pass: &mut Pass<'_, '_>,
    mix: &[f32],
    x: Rows<'_>,
    s: &mut MoeScratch,
    shared: &mut MlpScratch,
    wide: &mut [f32],
    out: &mut [f32],
) -> Result<(), DecodeError> {
    let (k, rows) = (&dec.kernels, x.count);
    route(dec, layer, moe, w, pass, x, s, wide)?;
    let slots = group(moe, rows, s);
    pass.guesser.asked(&pass.step, layer, &s.ids[..slots], &s.distinct);
    let z = &mut s.z[..rows * moe.latent];
    k.matmul(dec.matrix(w.down), x, z, moe.latent, wide);

    let failed = |source| DecodeError::Source { layer, source };
    let opened_ns = pass.clock.now_ns();
    let mut barrier = Barrier::open(&mut *pass.source, &pass.step, layer, &s.distinct).map_err(failed)?;
    let mut stall_ns = pass.clock.now_ns() - opened_ns;
    // While this layer's experts are on their way, those of the layers behind it are guessed, if the source
    // wants to know.
    pass.guesser.look_ahead(&dec, &pass.step, layer, mix, &mut barrier, wide);
    // The shared experts need no drive: they are computed while the routed ones are on their way.
    match &w.shared {
        Some(w) => mlp(dec, w, x, shared, wide, out),
        None => out.fill(0.0),
    }
    let mut missing = s.distinct.len();
    loop {
        let asked_ns = pass.clock.now_ns();
        let arrival = barrier.next_arrival().map_err(failed)?;
        stall_ns += pass.clock.now_ns() - asked_ns;
        let Some(lease) = arrival else { break };
        let expert = lease.expert();
        let key = ExpertKey { layer, expert };
        let awaited = s.distinct.binary_search(&expert).is_ok() && !s.done[expert.index()];
        if !awaited {
            return Err(DecodeError::UnexpectedExpert(key));
        }
        let (bytes, expected) = (lease.bytes(), moe.expert_bytes() as usize);
        if bytes.len() != expected {
            return Err(DecodeError::ExpertBytes { expert: key, seen: bytes.len(), expected });
        }
        run_expert(dec, moe, bytes, expert, s, wide);
        s.done[expert.index()] = true;
        missing -= 1;
    }
    drop(barrier);
    if let Some(&expert) = s.distinct.iter().find(|e| missing > 0 && !s.done[e.index()]) {
        return Err(DecodeError::ExpertsMissing { layer, expert });
    }
    pass.stats.stall_ns += stall_ns;
    pass.stats.barriers += 1;
    pass.stats.experts += s.distinct.len() as u64;
    pass.stats.expert_rows += slots as u64;
    if pass.step.phase == Phase::Prefill {
        let seen = &mut pass.prompt_seen[layer.index() * moe.experts..][..moe.experts];
        for expert in &s.distinct {
            pass.stats.prompt_distinct += u64::from(!std::mem::replace(&mut seen[expert.index()], true));
        }
    }

    add_routed(dec, moe, w, rows, s, wide, out);
    Ok(())
}

/// The first expert of the last barrier whose output for some row is infinite or no number.
pub(super) fn damaged(s: &MoeScratch) -> Option<ExpertId> {
    let slots = s.first.last().copied().unwrap_or(0);
    let latent = s.slot_out.len() / s.slot_row.len().max(1);
    let bad = s.slot_out[..slots * latent].iter().position(|v| !v.is_finite())? / latent;
    s.distinct.iter().copied().find(|e| (s.first[e.index()]..s.first[e.index() + 1]).contains(&bad))
}

/// Sums each row's expert outputs, raises the sums from the latent space and adds them to `out`.
fn add_routed(
    dec: View<'_>,
    moe: &MoeConfig,
    w: &Moe,
    rows: usize,
    s: &mut MoeScratch,
    wide: &mut [f32],
    out: &mut [f32],
) {
    let (k, h, latent) = (&dec.kernels, dec.config.hidden_size, moe.latent);
    for (first, count) in blocks(rows) {
        let sum = &mut s.sum[..count * latent];
        let (slots, slot_weight, slot_out) = (&s.row_slots, &s.slot_weight, &s.slot_out);
        k.by_parts(GRAIN_ROWS, [(&mut *sum, latent)], &|row, [sum]| {
            sum.fill(0.0);
            // A row's slots are in ascending expert id, so its sum runs in that order.
            let own = (first + row) * moe.top_k;
            for &slot in &slots[own..own + moe.top_k] {
                k.axpy(slot_weight[slot], &slot_out[slot * latent..(slot + 1) * latent], sum);
            }
            if let Some(norm) = &w.norm {
                k.rms_norm_in_place(sum, norm, dec.config.rms_norm_eps);
            }
        });
        let raised = &mut s.raised[..count * h];
        k.matmul(dec.matrix(w.up), Rows::packed(sum, count), raised, h, wide);
        for (out, y) in out[first * h..(first + count) * h].iter_mut().zip(raised.iter()) {
            *out += y;
        }
    }
}

/// Chooses every row's experts: biased scores select, unbiased ones weigh.
#[allow(clippy::too_many_arguments)]
fn route(
    dec: View<'_>,
    layer: LayerId,
    moe: &MoeConfig,
    w: &Moe,
    pass: &mut Pass<'_, '_>,
    x: Rows<'_>,
    s: &mut MoeScratch,
    wide: &mut [f32],
) -> Result<(), DecodeError> {
    for (first, count) in blocks(x.count) {
        let scores = &mut s.scores[..count * moe.experts];
        dec.kernels.matmul(dec.matrix(w.router), x.part(first, count), scores, moe.experts, wide);
        if let Some(at) = scores.iter().position(|v| !v.is_finite()) {
            let position = pass.places[first + at / moe.experts].position;
            return Err(DecodeError::NonFinite { layer: Some(layer), position });
        }
        dec.kernels.sigmoid(scores);
        for (row, scores) in (first..).zip(scores.chunks_exact(moe.experts)) {
            let chosen = row * moe.top_k..(row + 1) * moe.top_k;
            let (ids, weights) = (&mut s.ids[chosen.clone()], &mut s.weights[chosen]);
            choose(scores, &w.bias, &mut s.choice, ids);
            for (weight, id) in weights.iter_mut().zip(ids.iter()) {
                *weight = scores[id.index()];
            }
            let divisor = if moe.renormalize { weights.iter().sum::<f32>() + SUM_EPS } else { 1.0 };
            for weight in weights.iter_mut() {
                *weight = *weight / divisor * moe.scaling;
            }
            if let Some(observer) = pass.observer.as_deref_mut() {
                let Place { text, position, .. } = pass.places[row];
                observer.route(&Route { step: pass.step, layer, row, text, position, experts: ids, weights });
            }
        }
    }
    Ok(())
}

/// The experts with the largest biased scores, best first; equal ones by lower index.
pub(super) fn choose(scores: &[f32], bias: &[f32], choice: &mut [f32], ids: &mut [ExpertId]) {
    for ((c, s), b) in choice.iter_mut().zip(scores).zip(bias) {
        *c = s + b;
    }
    for id in ids {
        let mut best = 0;
        for (expert, &c) in choice.iter().enumerate() {
            if c > choice[best] {
                best = expert;
            }
        }
        choice[best] = f32::NEG_INFINITY;
        *id = ExpertId(best as u16);
    }
}

/// Orders (row, choice) pairs by expert into slots; fills `distinct`. Returns the number of slots.
fn group(moe: &MoeConfig, rows: usize, s: &mut MoeScratch) -> usize {
    let slots = rows * moe.top_k;
    s.first.fill(0);
    for id in &s.ids[..slots] {
        s.first[id.index() + 1] += 1;
    }
    s.distinct.clear();
    for expert in 0..moe.experts {
        if s.first[expert + 1] > 0 {
            s.distinct.push(ExpertId(expert as u16));
        }
        s.first[expert + 1] += s.first[expert];
        s.next[expert] = s.first[expert];
    }
    for (i, id) in s.ids[..slots].iter().enumerate() {
        let slot = &mut s.next[id.index()];
        s.slot_row[*slot] = i / moe.top_k;
        s.slot_weight[*slot] = s.weights[i];
        *slot += 1;
    }
    s.row_next.fill(0);
    for (slot, &row) in s.slot_row[..slots].iter().enumerate() {
        s.row_slots[row * moe.top_k + usize::from(s.row_next[row])] = slot;
        s.row_next[row] += 1;
    }
    s.done.fill(false);
    slots
}

/// Runs all rows that chose `expert` through its six planes into their slots.
fn run_expert(dec: View<'_>, moe: &MoeConfig, bytes: &[u8], expert: ExpertId, s: &mut MoeScratch, wide: &mut [f32]) {
    let k = &dec.kernels;
    let (width, latent) = (moe.width, moe.latent);
    let mut rest = bytes;
    let [w1p, w1s, w2p, w2s, w3p, w3s] = moe.plane_bytes().map(|len| {
        let (plane, after) = rest.split_at(len as usize);
        rest = after;
        plane
    });
    let (start, end) = (s.first[expert.index()], s.first[expert.index() + 1]);
    for (first, rows) in blocks(end - start).map(|(first, rows)| (start + first, rows)) {
        let gathered = &mut s.gathered[..rows * latent];
        for (to, &row) in gathered.chunks_exact_mut(latent).zip(&s.slot_row[first..first + rows]) {
            to.copy_from_slice(&s.z[row * latent..(row + 1) * latent]);
        }
        let (gate, up) = (&mut s.gate[..rows * width], &mut s.up[..rows * width]);
        if rows >= SHARED_ROWS {
            // Rows enough for all threads: each takes its rows through the whole expert.
            let out = &mut s.slot_out[first * latent..(first + rows) * latent];
            let parts = [
                (gathered, PART_ROWS * latent),
                (gate, PART_ROWS * width),
                (up, PART_ROWS * width),
                (out, PART_ROWS * latent),
                (&mut s.ordered, WIDE_ROWS * latent.max(width)),
            ];
            k.by_parts(1, parts, &|_, [x, gate, up, out, wide]| {
                let x = Rows::packed(x, x.len() / latent);
                k.matmul(Matrix::mxfp4(w1p, w1s, width, latent), x, gate, width, wide);
                k.matmul(Matrix::mxfp4(w3p, w3s, width, latent), x, up, width, wide);
                k.situ(gate, up, dec.config.situ_beta, dec.config.situ_linear_beta);
                k.matmul(Matrix::mxfp4(w2p, w2s, latent, width), Rows::packed(gate, x.count), out, latent, wide);
            });
            continue;
        }
        let x = Rows::packed(gathered, rows);
        k.matmul(Matrix::mxfp4(w1p, w1s, width, latent), x, gate, width, wide);
        k.matmul(Matrix::mxfp4(w3p, w3s, width, latent), x, up, width, wide);
        k.situ(gate, up, dec.config.situ_beta, dec.config.situ_linear_beta);
        let out = &mut s.slot_out[first * latent..(first + rows) * latent];
        k.matmul(Matrix::mxfp4(w2p, w2s, latent, width), Rows::packed(gate, rows), out, latent, wide);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index_and_the_bias_selects() {
        let mut ids = [ExpertId(9); 3];
        choose(&[0.5, 0.25, 0.5, 0.1], &[0.0, 0.25, 0.0, 0.9], &mut [0.0; 4], &mut ids);
        assert_eq!(ids, [ExpertId(3), ExpertId(0), ExpertId(1)]);
    }
}
