//! The feed-forward parts (k3-architecture.md section 2.4): dense MLPs, and routed experts in the latent space. One
//! barrier per layer and pass asks for the union of all rows' experts. Experts are computed as they arrive, their
//! outputs kept apart, and summed afterwards in ascending expert id, so that no bit depends on the arrival order.

use super::error::DecodeError;
use super::guess::Guesser;
use super::kernels::{Matrix, Rows};
use super::observe::{Observer, Route};
use super::scratch::{GRAIN_ROWS, LOT_EXPERTS, LOT_PARTS, MlpScratch, MoeScratch, PART_ROWS, blocks};
use super::session::PassStats;
use super::timeline::Place;
use super::weights::{Mat, Mlp, Moe, View};
use crate::clock::Clock;
use crate::ids::{ExpertId, ExpertKey, LayerId};
use crate::model::config::MoeConfig;
use crate::source::{Barrier, ExpertSource, Lease, Phase, StepInfo};
use std::ops::Range;

/// Keeps a row's renormalisation away from a division by zero.
const SUM_EPS: f32 = 1e-20;
/// Weights of a matrix up to which a thread takes rows through a whole expert; larger ones are shared product by product,
/// so that their bytes come from memory once.
const WHOLE_WEIGHTS: usize = 256 * 1024;

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
    mlp_beside(dec, w, x, None, s, wide, out);
}

/// [`mlp`], and beside it the product of `x` with another matrix, if there is one.
fn mlp_beside(
    dec: View<'_>,
    w: &Mlp,
    x: Rows<'_>,
    mut beside: Option<(Mat, &mut [f32])>,
    s: &mut MlpScratch,
    wide: &mut [f32],
    out: &mut [f32],
) {
    let (k, width, h) = (&dec.kernels, w.gate.rows, dec.config.hidden_size);
    for (first, count) in blocks(x.count) {
        let (x, out) = (x.part(first, count), &mut out[first * h..(first + count) * h]);
        let (gate, up) = (&mut s.gate[..count * width], &mut s.up[..count * width]);
        let both = [(dec.matrix(w.gate), &mut *gate, width), (dec.matrix(w.up), &mut *up, width)];
        match &mut beside {
            Some((m, y)) => {
                let [gate, up] = both;
                let y = &mut y[first * m.rows..(first + count) * m.rows];
                k.matmuls(x, [gate, up, (dec.matrix(*m), y, m.rows)], wide);
            }
            None => k.matmuls(x, both, wide),
        }
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

    let failed = |source| DecodeError::Source { layer, source };
    let opened_ns = pass.clock.now_ns();
    let mut barrier = Barrier::open(&mut *pass.source, &pass.step, layer, &s.distinct).map_err(failed)?;
    let mut stall_ns = pass.clock.now_ns() - opened_ns;
    // While this layer's experts are on their way, those of the layers behind it are guessed, if the source
    // wants to know.
    pass.guesser.look_ahead(&dec, &pass.step, layer, mix, &mut barrier, wide);
    // What the routed experts are given, and the shared ones, need no drive: they are computed while the routed ones are
    // on their way.
    let z = &mut s.z[..rows * moe.latent];
    match &w.shared {
        Some(shared_w) => mlp_beside(dec, shared_w, x, Some((w.down, z)), shared, wide, out),
        None => {
            k.matmul(dec.matrix(w.down), x, z, moe.latent, wide);
            out.fill(0.0);
        }
    }
    let mut missing = s.distinct.len();
    let mut lot = Lot::default();
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
        let (seen, expected) = (lease.bytes().len(), moe.expert_bytes() as usize);
        if seen != expected {
            return Err(DecodeError::ExpertBytes { expert: key, seen, expected });
        }
        s.done[expert.index()] = true;
        missing -= 1;
        if lot.push(lease, &*s, moe, k.pool().threads()) || barrier.at_hand() == 0 {
            run_lot(dec, moe, &mut lot, s, wide);
        }
    }
    run_lot(dec, moe, &mut lot, s, wide);
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
        let chosen = first * moe.top_k..(first + count) * moe.top_k;
        let (ids, weights) = (&mut s.ids[chosen.clone()], &mut s.weights[chosen]);
        let by_row = [(&mut *weights, moe.top_k), (scores, moe.experts)];
        dec.kernels.by_parts_of(GRAIN_ROWS, (&mut *ids, moe.top_k), by_row, &|_, ids, [weights, scores]| {
            dec.kernels.sigmoid(scores);
            choose(scores, &w.bias, weights, ids);
            for (weight, id) in weights.iter_mut().zip(ids.iter()) {
                *weight = scores[id.index()];
            }
            let divisor = if moe.renormalize { weights.iter().sum::<f32>() + SUM_EPS } else { 1.0 };
            for weight in weights.iter_mut() {
                *weight = *weight / divisor * moe.scaling;
            }
        });
        if let Some(observer) = pass.observer.as_deref_mut() {
            let each = ids.chunks_exact(moe.top_k).zip(weights.chunks_exact(moe.top_k));
            for ((experts, weights), row) in each.zip(first..) {
                let Place { text, position, .. } = pass.places[row];
                observer.route(&Route { step: pass.step, layer, row, text, position, experts, weights });
            }
        }
    }
    Ok(())
}

/// The experts with the largest biased scores and these scores, best first; equal ones by lower index. Returns how many there are:
/// as many as `ids` and `best` have places for, or all.
pub(super) fn choose(scores: &[f32], bias: &[f32], best: &mut [f32], ids: &mut [ExpertId]) -> usize {
    let wanted = ids.len().min(best.len());
    let mut found = 0;
    for (expert, (score, bias)) in scores.iter().zip(bias).enumerate() {
        let score = score + bias;
        if found < wanted {
            found += 1;
        } else if wanted == 0 || score <= best[wanted - 1] {
            continue; // as nearly all of them
        }
        let mut at = found - 1;
        while at > 0 && score > best[at - 1] {
            (best[at], ids[at]) = (best[at - 1], ids[at - 1]);
            at -= 1;
        }
        (best[at], ids[at]) = (score, ExpertId(expert as u16));
    }
    found
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

/// Experts that were at hand together and wait to be computed.
#[derive(Default)]
struct Lot {
    leases: [Option<Lease>; LOT_EXPERTS],
    count: usize,
    /// Parts that their rows come in.
    parts: usize,
}

impl Lot {
    /// Adds an expert; `true` when the lot is full.
    fn push(&mut self, lease: Lease, s: &MoeScratch, moe: &MoeConfig, threads: usize) -> bool {
        let rows = slots_of(s, lease.expert()).len();
        self.leases[self.count] = Some(lease);
        self.count += 1;
        self.parts += rows.div_ceil(PART_ROWS);
        self.count == LOT_EXPERTS || self.parts >= LOT_PARTS * threads || !by_rows(moe)
    }
}

/// Whether a thread takes rows through a whole expert.
fn by_rows(moe: &MoeConfig) -> bool {
    moe.width * moe.latent <= WHOLE_WEIGHTS
}

/// The slots of the rows that chose `expert`.
fn slots_of(s: &MoeScratch, expert: ExpertId) -> Range<usize> {
    s.first[expert.index()]..s.first[expert.index() + 1]
}

/// Runs the rows that chose the experts of `lot` through them into their slots, and gives the leases back. Threads share the
/// rows where there are several parts of them, else the products.
fn run_lot(dec: View<'_>, moe: &MoeConfig, lot: &mut Lot, s: &mut MoeScratch, wide: &mut [f32]) {
    let leases = &mut lot.leases[..lot.count];
    if by_rows(moe) && lot.parts > 1 {
        // Slots ascend with the experts, and spans have to.
        leases.sort_unstable_by_key(|lease| lease.as_ref().map(Lease::expert));
        s.spans.clear();
        for (at, lease) in leases.iter().enumerate() {
            let slots = lease.as_ref().map_or(0..0, |lease| slots_of(s, lease.expert()));
            let parts = slots.len().div_ceil(PART_ROWS).max(1);
            let each = slots.len().div_ceil(parts).max(1);
            let starts = slots.clone().step_by(each);
            s.spans.extend(starts.map(|first| (at, first..slots.end.min(first + each))));
        }
        run_spans(dec, moe, leases, s);
    } else {
        leases.iter().flatten().for_each(|lease| run_expert(dec, moe, lease, s, wide));
    }
    leases.fill_with(|| None);
    (lot.count, lot.parts) = (0, 0);
}

/// Each span of slots through the expert of its lease, shared by threads.
fn run_spans(dec: View<'_>, moe: &MoeConfig, leases: &[Option<Lease>], s: &mut MoeScratch) {
    let (k, width, latent) = (&dec.kernels, moe.width, moe.latent);
    let MoeScratch { spans, slot_out, slot_row, z, gathered, gate, up, part_rows, .. } = s;
    let together = gathered.len() / (*part_rows * latent);
    for spans in spans.chunks(together) {
        let room = [
            (&mut gathered[..], *part_rows * latent),
            (&mut gate[..], *part_rows * width),
            (&mut up[..], *part_rows * width),
        ];
        k.by_spans(spans, (&mut *slot_out, latent), room, &|i, out, [x, gate, up]| {
            let (at, slots) = &spans[i];
            if let Some(lease) = &leases[*at] {
                let rows = slots.len();
                let (x, gate, up) = (&mut x[..rows * latent], &mut gate[..rows * width], &mut up[..rows * width]);
                gather(z, &slot_row[slots.clone()], x);
                ffn(dec, moe, lease.bytes(), x, gate, up, out, &mut []);
            }
        });
    }
}

/// All rows that chose an expert through it, block by block; threads share products.
fn run_expert(dec: View<'_>, moe: &MoeConfig, lease: &Lease, s: &mut MoeScratch, wide: &mut [f32]) {
    let (width, latent) = (moe.width, moe.latent);
    let slots = slots_of(s, lease.expert());
    for (first, rows) in blocks(slots.len()).map(|(first, rows)| (slots.start + first, rows)) {
        let x = &mut s.gathered[..rows * latent];
        gather(&s.z, &s.slot_row[first..first + rows], x);
        let (gate, up) = (&mut s.gate[..rows * width], &mut s.up[..rows * width]);
        let out = &mut s.slot_out[first * latent..(first + rows) * latent];
        ffn(dec, moe, lease.bytes(), x, gate, up, out, wide);
    }
}

/// Copies the rows of `z` that slots belong to.
fn gather(z: &[f32], slot_row: &[usize], x: &mut [f32]) {
    let latent = x.len() / slot_row.len().max(1);
    for (to, &row) in x.chunks_exact_mut(latent).zip(slot_row) {
        to.copy_from_slice(&z[row * latent..(row + 1) * latent]);
    }
}

/// Rows `x` through the six planes of an expert.
#[allow(clippy::too_many_arguments)]
fn ffn(
    dec: View<'_>,
    moe: &MoeConfig,
    bytes: &[u8],
    x: &[f32],
    gate: &mut [f32],
    up: &mut [f32],
    out: &mut [f32],
    wide: &mut [f32],
) {
    let (k, width, latent) = (&dec.kernels, moe.width, moe.latent);
    let mut rest = bytes;
    let [w1p, w1s, w2p, w2s, w3p, w3s] = moe.plane_bytes().map(|len| {
        let (plane, after) = rest.split_at(len as usize);
        rest = after;
        plane
    });
    let (w1, w3) = (Matrix::mxfp4(w1p, w1s, width, latent), Matrix::mxfp4(w3p, w3s, width, latent));
    let rows = x.len() / latent;
    k.matmuls(Rows::packed(x, rows), [(w1, &mut *gate, width), (w3, &mut *up, width)], wide);
    k.situ(gate, up, dec.config.situ_beta, dec.config.situ_linear_beta);
    k.matmul(Matrix::mxfp4(w2p, w2s, latent, width), Rows::packed(gate, rows), out, latent, wide);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index_and_the_bias_selects() {
        let (mut ids, mut best) = ([ExpertId(9); 3], [0.0; 3]);
        let (scores, bias) = ([0.5, 0.25, 0.5, 0.1, 0.2], [0.0, 0.25, 0.0, 0.9, 0.2]);
        assert_eq!(choose(&scores, &bias, &mut best, &mut ids), 3);
        assert_eq!((ids, best), ([ExpertId(3), ExpertId(0), ExpertId(1)], [1.0, 0.5, 0.5]));
        let (mut ids, mut best) = ([ExpertId(9); 7], [0.0; 7]);
        assert_eq!(choose(&scores, &bias, &mut best, &mut ids), 5, "there are no more");
        assert_eq!(ids[..5], [3, 0, 1, 2, 4].map(ExpertId));
        assert_eq!(choose(&scores, &bias, &mut [], &mut []), 0);
    }
}
