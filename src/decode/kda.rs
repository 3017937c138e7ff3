//! KDA, the linear attention layers (k3-architecture.md section 2.2), token by token: short convolution, decay gate,
//! delta-rule update of the state, gated norm. Rows on trial leave the state as it is; what they were given is held.

use super::error::DecodeError;
use super::kernels::{KdaInputs, KdaRows, Kernels, Rows};
use super::scratch::{GRAIN_ROWS, KdaScratch};
use super::timeline::{Lane, parts};
use super::weights::{Gate, Kda, View};
use crate::ids::LayerId;

/// Added to the sum of squares before a query or key is normalised.
const L2_EPS: f32 = 1e-6;

/// Runs a block of rows `x` (`[rows, hidden]`, normed; row `first` of the pass on) through `layer`, advancing the lanes'
/// states; `out` receives `[rows, hidden]`. Matrices see all rows at once, convolution and recurrence each lane's own.
#[allow(clippy::too_many_arguments)]
pub(super) fn forward(
    dec: View<'_>,
    w: &Kda,
    layer: LayerId,
    lanes: &mut [Lane<'_>],
    first: usize,
    x: Rows<'_>,
    s: &mut KdaScratch,
    wide: &mut [f32],
    out: &mut [f32],
) -> Result<(), DecodeError> {
    let (k, cfg, rows) = (&dec.kernels, &dec.config.kda, x.count);
    let (d, p) = (cfg.head_dim, cfg.heads * cfg.head_dim);
    let (inner, beta) = (&mut s.inner[..rows * d], &mut s.beta[..rows * cfg.heads]);
    let gate = &mut s.gate[..rows * p];
    let [q, key, v] = s.qkv.each_mut().map(|y| &mut y[..rows * p]);
    let [wq, wk, wv] = w.qkv.map(|m| dec.matrix(m));
    let (f_a, w_beta) = (dec.matrix(w.f_a), dec.matrix(w.beta));
    let five = [(wq, q, p), (wk, key, p), (wv, v, p), (f_a, &mut *inner, d), (w_beta, &mut *beta, cfg.heads)];
    match &w.gate {
        Gate::Full(m) => {
            let [q, key, v, f_a, beta] = five;
            k.matmuls(x, [q, key, v, (dec.matrix(*m), &mut *gate, p), f_a, beta], wide);
        }
        Gate::Factors(..) => k.matmuls(x, five, wide),
    }
    for i in 0..3 {
        let y = &mut s.qkv[i][..rows * p];
        for part in parts(lanes, first, rows) {
            let row = part.position - part.timeline.position();
            let (state, held) = part.timeline.kda(layer)?;
            let history = &mut state.conv[i];
            let y = &mut y[part.first * p..(part.first + part.count) * p];
            let advances = held.is_none();
            if let Some((held, _)) = held {
                held.conv[i][row * p..][..y.len()].copy_from_slice(y);
            }
            let u = &mut s.u[..history.len() + y.len()];
            let (old, new) = u.split_at_mut(history.len());
            old.copy_from_slice(history);
            new.copy_from_slice(y);
            convolve(k, u, &w.taps[i], p, y, &|y| k.silu(y));
            if advances {
                history.copy_from_slice(&u[y.len()..]);
            }
        }
    }

    let decay = &mut s.decay[..rows * p];
    k.matmul(dec.matrix(w.f_b), Rows::packed(inner, rows), decay, p, wide);
    k.by_parts(GRAIN_ROWS, [(&mut *decay, p)], &|_, [decay]| {
        log_decay(dec, w, decay);
        k.exp(decay);
    });
    k.sigmoid(beta);

    if let Gate::Factors(a, b) = &w.gate {
        k.matmul(dec.matrix(*a), x, inner, d, wide);
        k.matmul(dec.matrix(*b), Rows::packed(inner, rows), gate, p, wide);
    }

    let query_scale = 1.0 / (d as f32).sqrt();
    let [q, key, v] = &mut s.qkv;
    let (q, key, o) = (&mut q[..rows * p], &mut key[..rows * p], &mut s.o[..rows * p]);
    k.by_parts(cfg.heads * GRAIN_ROWS, [(&mut *q, d), (&mut *key, d)], &|_, [q, key]| {
        scale(q, query_scale / (k.dot(q, q) + L2_EPS).sqrt());
        scale(key, 1.0 / (k.dot(key, key) + L2_EPS).sqrt());
    });
    for part in parts(lanes, first, rows) {
        let row = part.position - part.timeline.position();
        let (state, held) = part.timeline.kda(layer)?;
        let own = part.first * p..(part.first + part.count) * p;
        let heads = part.first * cfg.heads..(part.first + part.count) * cfg.heads;
        let inputs = KdaRows {
            decay: &decay[own.clone()],
            q: &q[own.clone()],
            k: &key[own.clone()],
            v: &v[own.clone()],
            beta: &beta[heads],
        };
        let o = &mut o[own];
        match held {
            None => k.kda_rows(&mut state.s, d, &inputs, o),
            Some((held, head)) => {
                on_trial(k, &state.s, d, &inputs, head, o);
                let kept = [(&mut held.decay, inputs.decay), (&mut held.key, inputs.k), (&mut held.value, inputs.v)];
                for (to, from) in kept {
                    to[row * p..][..from.len()].copy_from_slice(from);
                }
                held.beta[row * cfg.heads..][..inputs.beta.len()].copy_from_slice(inputs.beta);
            }
        }
    }
    k.by_parts(cfg.heads * GRAIN_ROWS, [(&mut *o, d), (gate, d)], &|_, [o, gate]| {
        let inv = k.rms_scale(o, dec.config.rms_norm_eps);
        k.sigmoid(gate);
        for ((o, norm), gate) in o.iter_mut().zip(&w.norm).zip(&*gate) {
            *o = norm * (*o * inv) * gate;
        }
    });
    k.matmul(dec.matrix(w.out), Rows::packed(o, rows), out, dec.config.hidden_size, wide);
    Ok(())
}

/// [`Kernels::kda_rows`] on copies of the heads' states, one after the other in `copy`, so that `state` stays as it is.
fn on_trial(k: &Kernels, state: &[f32], d: usize, i: &KdaRows<'_>, copy: &mut [f32], out: &mut [f32]) {
    let heads = state.len() / (d * d);
    for (head, own) in state.chunks_exact(d * d).enumerate() {
        copy.copy_from_slice(own);
        for (row, beta) in i.beta.iter().skip(head).step_by(heads).enumerate() {
            let at = (row * heads + head) * d..(row * heads + head + 1) * d;
            let (decay, q, key, v) = (&i.decay[at.clone()], &i.q[at.clone()], &i.k[at.clone()], &i.v[at.clone()]);
            k.kda_step(copy, &KdaInputs { decay, q, k: key, v, beta: *beta }, &mut out[at]);
        }
    }
}

/// Turns the gate projection into the log decay, in place (section 2.2, both variants).
fn log_decay(dec: View<'_>, w: &Kda, z: &mut [f32]) {
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

/// Depthwise causal convolution: output row `t` takes input rows `t..t + taps`, the last tap being the newest, and then goes through
/// `activate`.
fn convolve(k: &Kernels, u: &[f32], taps: &[f32], p: usize, y: &mut [f32], activate: &(dyn Fn(&mut [f32]) + Sync)) {
    k.by_parts(GRAIN_ROWS, [(y, p)], &|t, [y]| {
        y.fill(0.0);
        for (j, tap) in taps.chunks_exact(p).enumerate() {
            for ((y, w), u) in y.iter_mut().zip(tap).zip(&u[(t + j) * p..]) {
                *y += w * u;
            }
        }
        activate(y);
    });
}

#[cfg(test)]
mod tests {
    use super::super::kernels::KernelIsa;
    use super::*;

    #[test]
    fn the_last_tap_belongs_to_the_newest_input() {
        // two channels, two taps, one row of history
        let u = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
        let taps = [0.5, 1.0, 100.0, 0.0];
        let mut y = [0.0; 4];
        let kernels = Kernels::new(KernelIsa::Scalar).unwrap();
        convolve(&kernels, &u, &taps, 2, &mut y, &|_| {});
        assert_eq!(y, [0.5 + 200.0, 10.0, 1.0 + 300.0, 20.0]);
    }

    #[test]
    fn softplus_is_smooth_where_its_form_changes() {
        assert!((softplus(20.0) - softplus(20.001)).abs() < 0.002);
        assert!((softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-7);
        assert!(softplus(-50.0) > 0.0 && softplus(-50.0) < 1e-20);
    }
}
