//! MLA, the latent full-attention layers without positions (k3-architecture.md section 2.3), in absorbed form: keys
//! and values are never expanded, the cache holds one latent row per token.

use super::error::DecodeError;
use super::kernels::{Matrix, Rows};
use super::scratch::MlaScratch;
use super::timeline::{Lane, parts};
use super::weights::{Mla, View};
use crate::ids::LayerId;

/// Epsilon of the two latent norms; a constant of the released code, not `rms_norm_eps`.
const LATENT_EPS: f32 = 1e-6;
/// Multiplications of a row's scores that are worth another thread's attention.
const SHARED_PRODUCTS: usize = 64 * 1024;

/// Runs a block of rows `x` (`[rows, hidden]`, normed; row `first` of the pass on) through `layer`, appending to the lanes'
/// caches. Matrices see all rows at once, the attention of a row only its own lane's cache.
#[allow(clippy::too_many_arguments)]
pub(super) fn forward(
    dec: View<'_>,
    w: &Mla,
    layer: LayerId,
    lanes: &mut [Lane<'_>],
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
    for row in qa.chunks_exact_mut(m.q_lora_rank) {
        k.rms_norm_in_place(row, &w.q_a_norm, LATENT_EPS);
    }
    let q = &mut s.q[..rows * heads * dq];
    k.matmul(dec.matrix(w.q_b), Rows::packed(qa, rows), q, heads * dq, wide);

    for row in new.chunks_exact_mut(cached) {
        k.rms_norm_in_place(&mut row[..rank], &w.kv_a_norm, LATENT_EPS);
    }

    let scale = 1.0 / (dq as f32).sqrt();
    for part in parts(lanes, first, rows) {
        let cache = part.timeline.mla(layer)?;
        cache[part.position * cached..(part.position + part.count) * cached]
            .copy_from_slice(&new[part.first * cached..(part.first + part.count) * cached]);
        let cache = &*cache;
        for (row, seen) in (part.first..part.first + part.count).zip(part.position + 1..) {
            let q = &q[row * heads * dq..(row + 1) * heads * dq];
            let (query, scores) = (&mut s.query[..heads * cached], &mut s.scores[..heads * seen]);
            let latent = &mut s.latent[row * heads * rank..(row + 1) * heads * rank];
            // Each thread has some heads, which go through the cache together.
            let alone = heads * seen * cached < SHARED_PRODUCTS;
            let some = if alone { heads } else { heads.div_ceil(k.pool().threads()) };
            let shares = [(query, some * cached), (scores, some * seen), (latent, some * rank)];
            k.by_parts(1, shares, &|share, [query, scores, latent]| {
                let own = share * some..share * some + query.len() / cached;
                for (head, query) in own.clone().zip(query.chunks_exact_mut(cached)) {
                    let q = &q[head * dq..(head + 1) * dq];
                    let keys = dec.matrix_rows(w.kv_b, head * (dn + dv), dn);
                    k.combine_matrix(&q[..dn], keys, &mut query[..rank]);
                    query[rank..].copy_from_slice(&q[dn..]);
                }
                k.matmul(Matrix::f32(cache, seen, cached), Rows::packed(query, own.len()), scores, seen, &mut []);
                scores.chunks_exact_mut(seen).for_each(|scores| k.softmax(scores, scale));
                k.combine_all(
                    Rows::packed(scores, own.len()),
                    Rows { data: cache, stride: cached, count: seen },
                    latent,
                );
            });
        }
    }

    let o = &mut s.o[..rows * width];
    for head in 0..heads {
        let wv = dec.matrix_rows(w.kv_b, head * (dn + dv) + dn, dv);
        let latent = Rows { data: &s.latent[head * rank..], stride: heads * rank, count: rows };
        k.matmul(wv, latent, &mut o[head * dv..], width, wide);
    }
    k.sigmoid(gate);
    for (o, gate) in o.iter_mut().zip(gate.iter()) {
        *o *= gate;
    }
    k.matmul(dec.matrix(w.out), Rows::packed(o, rows), out, dec.config.hidden_size, wide);
    Ok(())
}
