//! MLA, the latent full-attention layers without positions (k3-architecture.md section 2.3), in absorbed form: keys
//! and values are never expanded, the cache holds one latent row per token.

use super::kernels::{Matrix, Rows};
use super::scratch::MlaScratch;
use super::weights::{Decoder, Mla};

/// Epsilon of the two latent norms; a constant of the released code, not `rms_norm_eps`.
const LATENT_EPS: f32 = 1e-6;

/// Runs `x` (`[rows, hidden]`, normed, positions from `position` on) through the layer; appends to `cache`.
#[allow(clippy::too_many_arguments)]
pub(super) fn forward(
    dec: &Decoder,
    w: &Mla,
    cache: &mut [f32],
    position: usize,
    x: Rows<'_>,
    s: &mut MlaScratch,
    wide: &mut [f32],
    out: &mut [f32],
) {
    let (k, m, rows) = (&dec.kernels, &dec.config.mla, x.count);
    let (rank, dn, dr, dv) = (m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim);
    let (cached, dq, heads) = (rank + dr, dn + dr, m.heads);

    let qa = &mut s.qa[..rows * m.q_lora_rank];
    k.matmul(dec.matrix(w.q_a), x, qa, m.q_lora_rank, wide);
    for row in qa.chunks_exact_mut(m.q_lora_rank) {
        k.rms_norm_in_place(row, &w.q_a_norm, LATENT_EPS);
    }
    let q = &mut s.q[..rows * heads * dq];
    k.matmul(dec.matrix(w.q_b), Rows::packed(qa, rows), q, heads * dq, wide);

    let new = &mut cache[position * cached..(position + rows) * cached];
    k.matmul(dec.matrix(w.kv_a), x, new, cached, wide);
    for row in new.chunks_exact_mut(cached) {
        k.rms_norm_in_place(&mut row[..rank], &w.kv_a_norm, LATENT_EPS);
    }

    let scale = 1.0 / (dq as f32).sqrt();
    for row in 0..rows {
        let seen = position + row + 1;
        let q = &q[row * heads * dq..(row + 1) * heads * dq];
        let query = &mut s.query[..heads * cached];
        for (head, (query, q)) in query.chunks_exact_mut(cached).zip(q.chunks_exact(dq)).enumerate() {
            let wk = dec.row_bytes(w.kv_b, head * (dn + dv), dn);
            k.combine_bf16(&q[..dn], wk, &mut query[..rank]);
            query[rank..].copy_from_slice(&q[dn..]);
        }
        let scores = &mut s.scores[..heads * seen];
        k.matmul(Matrix::f32(cache, seen, cached), Rows::packed(query, heads), scores, seen, wide);
        let latent = &mut s.latent[row * heads * rank..(row + 1) * heads * rank];
        for (scores, latent) in scores.chunks_exact_mut(seen).zip(latent.chunks_exact_mut(rank)) {
            k.softmax(scores, scale);
            k.combine(scores, Rows { data: cache, stride: cached, count: seen }, latent);
        }
    }

    let width = heads * dv;
    let o = &mut s.o[..rows * width];
    for head in 0..heads {
        let wv = dec.matrix_rows(w.kv_b, head * (dn + dv) + dn, dv);
        let latent = Rows { data: &s.latent[head * rank..], stride: heads * rank, count: rows };
        k.matmul(wv, latent, &mut o[head * dv..], width, wide);
    }
    let gate = &mut s.gate[..rows * width];
    k.matmul(dec.matrix(w.gate), x, gate, width, wide);
    k.sigmoid(gate);
    for (o, gate) in o.iter_mut().zip(gate.iter()) {
        *o *= gate;
    }
    k.matmul(dec.matrix(w.out), Rows::packed(o, rows), out, dec.config.hidden_size, wide);
}
