//! KDA, the linear attention layers (k3-architecture.md section 2.2), token by token: short convolution, decay gate,
//! delta-rule update of the state, gated norm.

use super::kernels::{KdaInputs, Rows};
use super::scratch::{KdaScratch, KdaState};
use super::weights::{Decoder, Gate, Kda};

/// Added to the sum of squares before a query or key is normalised.
const L2_EPS: f32 = 1e-6;

/// Runs `x` (`[rows, hidden]`, normed) through the layer, advancing `state`; `out` receives `[rows, hidden]`.
pub(super) fn forward(
    dec: &Decoder,
    w: &Kda,
    state: &mut KdaState,
    x: Rows<'_>,
    s: &mut KdaScratch,
    wide: &mut [f32],
    out: &mut [f32],
) {
    let (k, cfg, rows) = (&dec.kernels, &dec.config.kda, x.count);
    let (d, p) = (cfg.head_dim, cfg.heads * cfg.head_dim);
    for i in 0..3 {
        let history = state.conv[i].len();
        let u = &mut s.u[i][..history + rows * p];
        u[..history].copy_from_slice(&state.conv[i]);
        k.matmul(dec.matrix(w.qkv[i]), x, &mut u[history..], p, wide);
        let y = &mut s.qkv[i][..rows * p];
        convolve(u, &w.taps[i], p, y);
        k.silu(y);
        state.conv[i].copy_from_slice(&u[rows * p..]);
    }

    let inner = &mut s.inner[..rows * d];
    k.matmul(dec.matrix(w.f_a), x, inner, d, wide);
    let decay = &mut s.decay[..rows * p];
    k.matmul(dec.matrix(w.f_b), Rows::packed(inner, rows), decay, p, wide);
    log_decay(dec, w, decay);
    k.exp(decay);

    let beta = &mut s.beta[..rows * cfg.heads];
    k.matmul(dec.matrix(w.beta), x, beta, cfg.heads, wide);
    k.sigmoid(beta);

    let gate = &mut s.gate[..rows * p];
    match &w.gate {
        Gate::Full(m) => k.matmul(dec.matrix(*m), x, gate, p, wide),
        Gate::Factors(a, b) => {
            k.matmul(dec.matrix(*a), x, inner, d, wide);
            k.matmul(dec.matrix(*b), Rows::packed(inner, rows), gate, p, wide);
        }
    }
    k.sigmoid(gate);

    let query_scale = 1.0 / (d as f32).sqrt();
    let [q, key, v] = &mut s.qkv;
    let o = &mut s.o[..rows * p];
    for row in 0..rows {
        for head in 0..cfg.heads {
            let at = row * p + head * d..row * p + (head + 1) * d;
            let (q, key, o) = (&mut q[at.clone()], &mut key[at.clone()], &mut o[at.clone()]);
            scale(q, query_scale / (k.dot(q, q) + L2_EPS).sqrt());
            scale(key, 1.0 / (k.dot(key, key) + L2_EPS).sqrt());
            let inputs = KdaInputs {
                decay: &decay[at.clone()],
                q,
                k: key,
                v: &v[at.clone()],
                beta: beta[row * cfg.heads + head],
            };
            k.kda_step(&mut state.s[head * d * d..(head + 1) * d * d], &inputs, o);
            let inv = k.rms_scale(o, dec.config.rms_norm_eps);
            for ((o, norm), gate) in o.iter_mut().zip(&w.norm).zip(&gate[at]) {
                *o = norm * (*o * inv) * gate;
            }
        }
    }
    k.matmul(dec.matrix(w.out), Rows::packed(o, rows), out, dec.config.hidden_size, wide);
}

/// Turns the gate projection into the log decay, in place (section 2.2, both variants).
fn log_decay(dec: &Decoder, w: &Kda, z: &mut [f32]) {
    let d = dec.config.kda.head_dim;
    for row in z.chunks_exact_mut(w.dt_bias.len()) {
        for (z, bias) in row.iter_mut().zip(&w.dt_bias) {
            *z += bias;
        }
    }
    let heads = |z: &mut [f32], f: &dyn Fn(&mut [f32], f32)| {
        for row in z.chunks_exact_mut(w.dt_bias.len()) {
            row.chunks_exact_mut(d).zip(&w.decay_rate).for_each(|(head, &rate)| f(head, rate));
        }
    };
    match dec.config.kda.gate_lower_bound {
        Some(bound) => {
            heads(z, &scale);
            dec.kernels.sigmoid(z);
            scale(z, bound);
        }
        None => heads(z, &|head, rate| head.iter_mut().for_each(|z| *z = -rate * softplus(*z))),
    }
}

fn softplus(z: f32) -> f32 {
    // Beyond 20 the correction is below half a unit in the last place.
    if z > 20.0 { z } else { z.exp().ln_1p() }
}

fn scale(x: &mut [f32], by: f32) {
    for x in x {
        *x *= by;
    }
}

/// Depthwise causal convolution: output row `t` takes input rows `t..t + taps`, the last tap being the newest.
fn convolve(u: &[f32], taps: &[f32], p: usize, y: &mut [f32]) {
    for (t, y) in y.chunks_exact_mut(p).enumerate() {
        y.fill(0.0);
        for (j, tap) in taps.chunks_exact(p).enumerate() {
            for ((y, w), u) in y.iter_mut().zip(tap).zip(&u[(t + j) * p..]) {
                *y += w * u;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tap_belongs_to_the_newest_input() {
        // two channels, two taps, one row of history
        let u = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
        let taps = [0.5, 1.0, 100.0, 0.0];
        let mut y = [0.0; 4];
        convolve(&u, &taps, 2, &mut y);
        assert_eq!(y, [0.5 + 200.0, 10.0, 1.0 + 300.0, 20.0]);
    }

    #[test]
    fn softplus_is_smooth_where_its_form_changes() {
        assert!((softplus(20.0) - softplus(20.001)).abs() < 0.002);
        assert!((softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-7);
        assert!(softplus(-50.0) > 0.0 && softplus(-50.0) < 1e-20);
    }
}
