//! MLA, the latent full-attention layers without positions (k3-architecture.md section 2.3), in absorbed form: keys
//! and values are never expanded, the cache holds one latent row per token.

use super::attend::{Heads, SHARED_PRODUCTS};
use super::error::DecodeError;
use super::kernels::{PART_ROWS, Rows};
use super::kv::KvTier;
use super::scratch::{GRAIN_ROWS, MlaScratch};
use super::timeline::{Lane, parts};
use super::weights::{Mla, View};
use crate::clock::Clock;
use crate::ids::LayerId;

/// Epsilon of the two latent norms; a constant of the released code, not `rms_norm_eps`.
const LATENT_EPS: f32 = 1e-6;

/// The attention of an MLA layer is done, and `layer` is the next one of this pass: what the first of its rows, `rows` in a block,
/// look back at may come from now on.
pub(super) fn look_ahead(
    (layer, heads): (LayerId, usize),
    (lanes, kv): (&mut [Lane<'_>], &mut KvTier),
    rows: usize,
) -> Result<(), DecodeError> {
    let Some(part) = parts(lanes, 0, rows).next() else { return Ok(()) };
    let (cache, kept) = part.timeline.mla(layer)?;
    kv.soon(cache, (layer, heads), part.position, part.count, kept)
}

/// Runs a block of rows `x` (`[rows, hidden]`, normed; row `first` of pass `step` on) through `layer`, appending to the lanes'
/// caches. Matrices see all rows at once, the attention of a row only its own lane's cache.
#[allow(clippy::too_many_arguments)]
pub(super) fn forward(
    dec: View<'_>,
    w: &Mla,
    (step, layer, clock): (u64, LayerId, Clock),
    (lanes, kv): (&mut [Lane<'_>], &mut KvTier),
    first: usize,
    x: Rows<'_>,
    s: &mut MlaScratch,
    wide: &mut [f32],
    out: &mut [f32],
) -> Result<(), DecodeError> {
    let (k, m, rows) = (&dec.kernels, &dec.config.mla, x.count);
    let (rank, dn, dr, dv) = (m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim);
    let (cached, dq, heads) = (rank + dr, dn + dr, m.heads);

    let (qa, new) = (&mut s.qa[..rows * m.q_lora_rank], &mut s.new[..rows * cached]);
    let width = heads * dv;
    let gate = &mut s.gate[..rows * width];
    let first_ones = [
        (dec.matrix(w.q_a), &mut *qa, m.q_lora_rank),
        (dec.matrix(w.kv_a), &mut *new, cached),
        (dec.matrix(w.gate), &mut *gate, width),
    ];
    k.matmuls(x, first_ones, wide);
    k.by_parts(GRAIN_ROWS, [(&mut *qa, m.q_lora_rank), (&mut *new, cached)], &|_, [qa, new]| {
        k.rms_norm_in_place(qa, &w.q_a_norm, LATENT_EPS);
        k.rms_norm_in_place(&mut new[..rank], &w.kv_a_norm, LATENT_EPS);
    });
    let q = &mut s.q[..rows * heads * dq];
    k.matmul(dec.matrix(w.q_b), Rows::packed(qa, rows), q, heads * dq, wide);

    let heads_of = Heads::new(dec, w);
    for part in parts(lanes, first, rows) {
        let (cache, kept) = part.timeline.mla(layer)?;
        let mut done = 0;
        while done < part.count {
            let (row, position) = (part.first + done, part.position + done);
            let group = kv.group(heads, position, part.count - done);
            let group = kv.make_room(cache, (layer, clock), position, group, kept)?;
            kv.note(cache.put(position, &new[row * cached..(row + group) * cached]));
            let q = &q[row * heads * dq..(row + group) * heads * dq];
            let latent = &mut s.latent[row * heads * rank..(row + group) * heads * rank];
            let together = heads_of.together(cache, position, group);
            if cache.spilled().0 > 0 {
                heads_of.attend_spilled(cache, position, q, kv.reading(step, layer, clock), latent)?;
                kv.saw(position + group);
            } else if together > 0 {
                kv.saw(position + group);
                heads_of.attend_together(cache, position, together, q, latent);
            } else {
                let each = q.chunks_exact(heads * dq).zip(latent.chunks_exact_mut(heads * rank));
                for ((q, latent), position) in each.zip(position..) {
                    let seen = cache.seen(position);
                    kv.saw(seen.len());
                    let (query, scores) = (&mut s.query[..heads * cached], &mut s.scores[..heads * seen.len()]);
                    heads_of.attend(cache, seen, q, query, scores, latent);
                }
            }
            done += group;
        }
    }

    // Values of a head and their gates: threads share heads of one row, or rows.
    let (o, latent) = (&mut s.o[..rows * width], &s.latent[..rows * heads * rank]);
    let values = |head: usize, first: usize, count: usize, o: &mut [f32]| {
        let wv = dec.matrix_rows(w.kv_b, head * (dn + dv) + dn, dv);
        let latent = Rows { data: &latent[(first * heads + head) * rank..], stride: heads * rank, count };
        k.matmul(wv, latent, o, width, &mut []);
    };
    let gated = |o: &mut [f32], gate: &mut [f32]| {
        k.sigmoid(gate);
        o.iter_mut().zip(gate.iter()).for_each(|(o, gate)| *o *= gate);
    };
    if rows == 1 {
        let grain = SHARED_PRODUCTS.div_ceil(dv * rank);
        k.by_parts(grain, [(&mut *o, dv), (gate, dv)], &|head, [o, gate]| {
            values(head, 0, 1, o);
            gated(o, gate);
        });
    } else {
        let some = PART_ROWS.min(rows.div_ceil(k.pool().threads()));
        k.by_parts(1, [(&mut *o, some * width), (gate, some * width)], &|share, [o, gate]| {
            (0..heads).for_each(|head| values(head, share * some, o.len() / width, &mut o[head * dv..]));
            gated(o, gate);
        });
    }
    k.matmul(dec.matrix(w.out), Rows::packed(o, rows), out, dec.config.hidden_size, wide);
    Ok(())
}
