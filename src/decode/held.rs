//! Taking rows back. A pass that checks proposals leaves the recurrent states as they were and holds what the recurrence and
//! the convolutions were given for each row; the rows that are kept are then replayed through the same operations, so that the
//! state has the bits of a text into which nothing else was ever fed. No expert and no matrix is needed for that.
//!
//! Holding inputs instead of a state for each row is a matter of size: for K3 a state is 434 MB, the inputs of a row are 20 MB.
//! A cache of latent rows needs none of this: it is cut by the position.

use super::kernels::{KdaInputs, Kernels};
use super::scratch::{KdaState, State, kda_values};
use crate::ids::LayerId;
use crate::model::config::{AttnKind, ModelConfig};

/// What a pass that checks proposals holds of its rows.
#[derive(Default)]
pub(super) struct Held {
    /// Rows that there is room for.
    rows: usize,
    heads: usize,
    head_dim: usize,
    /// By layer; those without a recurrence are empty.
    layers: Vec<HeldLayer>,
    /// A head's state while its rows are checked, `[key, value]`.
    head: Vec<f32>,
    /// A head's output while rows are replayed, of which nothing is used.
    out: Vec<f32>,
}

/// A layer's part.
#[derive(Default)]
pub(super) struct HeldLayer {
    /// What the three convolutions were given, `[rows, heads * dim]`.
    pub(super) conv: [Vec<f32>; 3],
    /// What the recurrence was given, `[rows, heads * dim]`: decay, normalised key, value.
    pub(super) decay: Vec<f32>,
    pub(super) key: Vec<f32>,
    pub(super) value: Vec<f32>,
    /// Write strength, `[rows, heads]`.
    pub(super) beta: Vec<f32>,
}

/// Numbers held of one row in one layer with a recurrence.
fn row_values(cfg: &ModelConfig) -> usize {
    6 * cfg.kda.heads * cfg.kda.head_dim + cfg.kda.heads
}

impl Held {
    /// Bytes that [`Held::reserve`] takes.
    pub(super) fn bytes(cfg: &ModelConfig, rows: usize) -> u64 {
        if rows == 0 {
            return 0;
        }
        let layers = cfg.layers.iter().filter(|l| l.attn == AttnKind::Kda).count() as u64;
        let values = (rows as u64).saturating_mul(row_values(cfg) as u64).saturating_mul(layers);
        let d = cfg.kda.head_dim as u64;
        values.saturating_add(d * d + d).saturating_mul(4)
    }

    /// Makes room for passes of up to `rows` rows.
    pub(super) fn reserve(&mut self, cfg: &ModelConfig, rows: usize) {
        if rows <= self.rows {
            return;
        }
        let (heads, d) = (cfg.kda.heads, cfg.kda.head_dim);
        (self.rows, self.heads, self.head_dim) = (rows, heads, d);
        self.layers.resize_with(cfg.layers.len(), HeldLayer::default);
        for (layer, kind) in self.layers.iter_mut().zip(&cfg.layers) {
            if kind.attn == AttnKind::Kda {
                let HeldLayer { conv, decay, key, value, beta } = layer;
                for v in conv.iter_mut().chain([decay, key, value]) {
                    v.resize(rows * heads * d, 0.0);
                }
                beta.resize(rows * heads, 0.0);
            }
        }
        self.head.resize(kda_values(cfg) / heads.max(1), 0.0);
        self.out.resize(d, 0.0);
    }

    /// Rows that there is room for.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// A layer's part, and a head's state to work on.
    pub(super) fn layer(&mut self, layer: LayerId) -> Option<(&mut HeldLayer, &mut [f32])> {
        Some((self.layers.get_mut(layer.index())?, &mut self.head))
    }

    /// Advances `states` by the first `rows` rows that are held.
    pub(super) fn replay(&mut self, kernels: &Kernels, states: &mut [State], rows: usize) {
        let (heads, d) = (self.heads, self.head_dim);
        let p = heads * d;
        for (state, held) in states.iter_mut().zip(&self.layers) {
            let State::Kda(state) = state else { continue };
            for (history, given) in state.conv.iter_mut().zip(&held.conv) {
                shift(history, &given[..rows * p]);
            }
            for (head, state) in state.s.chunks_exact_mut(d * d).enumerate() {
                for row in 0..rows {
                    let at = row * p + head * d..row * p + (head + 1) * d;
                    let key = &held.key[at.clone()];
                    // The query only reads the state: whatever stands for it changes nothing.
                    let inputs = KdaInputs {
                        decay: &held.decay[at.clone()],
                        q: key,
                        k: key,
                        v: &held.value[at],
                        beta: held.beta[row * heads + head],
                    };
                    kernels.kda_step(state, &inputs, &mut self.out);
                }
            }
        }
    }
}

/// Appends `given` to `history`, whose oldest values make room.
fn shift(history: &mut [f32], given: &[f32]) {
    let len = history.len();
    if given.len() >= len {
        history.copy_from_slice(&given[given.len() - len..]);
        return;
    }
    history.copy_within(given.len().., 0);
    history[len - given.len()..].copy_from_slice(given);
}

/// A copy of a timeline's recurrent states, to put it back to.
#[derive(Default)]
pub(super) struct Mark {
    position: usize,
    kda: Vec<KdaState>,
}

impl Mark {
    /// Takes a copy; memory is taken the first time.
    pub(super) fn take(&mut self, states: &[State], position: usize) {
        let own = states.iter().filter_map(|s| if let State::Kda(kda) = s { Some(kda) } else { None });
        if self.kda.is_empty() {
            self.kda = own.map(|kda| KdaState { s: kda.s.clone(), conv: kda.conv.clone() }).collect();
        } else {
            self.kda.iter_mut().zip(own).for_each(|(to, from)| copy(to, from));
        }
        self.position = position;
    }

    /// Where the text ended.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Puts `states` back; returns the position.
    pub(super) fn restore(&self, states: &mut [State]) -> usize {
        let own = states.iter_mut().filter_map(|s| if let State::Kda(kda) = s { Some(kda) } else { None });
        own.zip(&self.kda).for_each(|(to, from)| copy(to, from));
        self.position
    }
}

fn copy(to: &mut KdaState, from: &KdaState) {
    to.s.copy_from_slice(&from.s);
    to.conv.iter_mut().zip(&from.conv).for_each(|(to, from)| to.copy_from_slice(from));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_keeps_the_newest_inputs() {
        let mut history = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        shift(&mut history, &[7.0, 8.0]);
        assert_eq!(history, [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        shift(&mut history, &[]);
        assert_eq!(history, [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        shift(&mut history, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0]);
        assert_eq!(history, [3.0, 4.0, 5.0, 6.0, 7.0, 9.0]);
    }
}
