//! Routes on their way into a trace: sees every pass of a traced run and keeps what its routers chose. Writes nothing.

use crate::decode::Observer;
use crate::decode::generate::Request;
use crate::decode::observe::Route;
use crate::model::config::ModelConfig;
use crate::trace::routes::{RouteBuffer, RouteRow};

/// The buffer that a run's routes go to.
pub(super) struct RouteTap(pub(super) RouteBuffer);

impl RouteTap {
    /// Room for every choice that `request` can cause.
    pub(super) fn for_run(config: &ModelConfig, request: &Request<'_>) -> Self {
        let top_k = config.moe.as_ref().map_or(0, |m| m.top_k);
        let rows = request.prompt.len().saturating_add(request.max_new);
        Self(RouteBuffer::with_capacity(rows.saturating_mul(config.moe_layers().count() * top_k)))
    }
}

impl Observer for RouteTap {
    fn route(&mut self, route: &Route<'_>) {
        for (&expert, &weight) in route.experts.iter().zip(route.weights) {
            let (step, phase, pos, layer) = (route.step.step, route.step.phase, route.position, route.layer);
            self.0.push(RouteRow { step, phase, pos, layer, expert, weight, kept: 1 });
        }
    }
}
