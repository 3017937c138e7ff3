//! Routes on their way into a trace: sees every pass of a traced run and keeps what its routers chose. Writes nothing.

use crate::decode::observe::Route;
use crate::decode::{Observer, SpeculateOptions};
use crate::model::config::ModelConfig;
use crate::source::StepInfo;
use crate::trace::routes::{RouteBuffer, RouteRow};

/// The buffer that a run's routes go to.
pub(super) struct RouteTap {
    pub(super) routes: RouteBuffer,
    /// Positions by which the texts of a set lie apart, so that a pass and a position are one row.
    apart: u64,
}

impl RouteTap {
    /// Room for every choice that these prompts and `max_new` tokens behind each can cause.
    pub(super) fn for_run(
        config: &ModelConfig,
        prompts: &[Vec<u32>],
        max_new: usize,
        draft: &SpeculateOptions,
    ) -> Self {
        let top_k = config.moe.as_ref().map_or(0, |m| m.top_k);
        let behind = max_new.saturating_mul(draft.rows().max(1));
        let rows = prompts.iter().fold(0usize, |sum, p| sum.saturating_add(p.len()).saturating_add(behind));
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        Self {
            routes: RouteBuffer::with_capacity(rows.saturating_mul(config.moe_layers().count() * top_k)),
            // one more than any text has, so that none seems to go on in the next
            apart: (longest as u64).saturating_add(max_new as u64).saturating_add(1),
        }
    }
}

impl Observer for RouteTap {
    fn route(&mut self, route: &Route<'_>) {
        let pos = (route.text as u64).saturating_mul(self.apart).saturating_add(route.position);
        for (&expert, &weight) in route.experts.iter().zip(route.weights) {
            let (step, phase, layer) = (route.step.step, route.step.phase, route.layer);
            self.routes.push(RouteRow { step, phase, pos, layer, expert, weight, kept: 1 });
        }
    }

    fn kept(&mut self, step: &StepInfo, rows: usize) {
        self.routes.reject(step.step, step.pos + rows as u64);
    }
}
