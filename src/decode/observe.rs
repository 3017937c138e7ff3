//! What a pass lets others see: routes and per-layer values. An absent observer costs one branch per layer.

use crate::ids::{ExpertId, LayerId};
use crate::source::StepInfo;

/// Where in a layer a value is taken (k3-architecture.md section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// What attention is given: the stream or mix, after the layer's norm.
    AttnIn,
    /// The attention's output.
    AttnOut,
    /// What the feed-forward part is given: the mix, after its norm.
    FfnIn,
    /// The feed-forward part's output.
    FfnOut,
    /// The stream after the layer.
    Out,
}

/// The experts chosen for one row in one layer.
#[derive(Clone, Copy, Debug)]
pub struct Route<'a> {
    /// The pass.
    pub step: StepInfo,
    /// The layer.
    pub layer: LayerId,
    /// Row of the pass, from 0.
    pub row: usize,
    /// The text that the row belongs to: its place among the prompts of a batch, else 0.
    pub text: usize,
    /// Position of the row in that text.
    pub position: u64,
    /// The experts in order of choice (best biased score first).
    pub experts: &'a [ExpertId],
    /// Their weights, in the same order.
    pub weights: &'a [f32],
}

/// Sees what a pass does. Calls come in layer order; none comes while a barrier is open.
pub trait Observer {
    /// One row was routed.
    fn route(&mut self, route: &Route<'_>) {
        let _ = route;
    }

    /// Of the rows of pass `step`, which checked proposals, the first `rows` are kept.
    fn kept(&mut self, step: &StepInfo, rows: usize) {
        let _ = (step, rows);
    }

    /// The values of all rows of the pass at one point of a layer, `[rows, hidden]`.
    fn values(&mut self, layer: LayerId, point: Point, values: &[f32]) {
        let _ = (layer, point, values);
    }
}
