//! What a prompt would read from drives before its first token: by pieces, as this program feeds it, and with every expert
//! read once. Chances and bounds only.

use super::estimate::{EstimateError, Question};
use super::estimate_bytes::ModelBytes;
use crate::bound::{DriveRate, bound_drives_ns, bound_layout_ns};
use crate::layout::drives::DriveSet;
use crate::layout::heat::{Heat, LayerHeat};
use crate::layout::plan::{Plan, Shape};
use serde::Serialize;

/// Reading a prompt, nothing in memory, compute excluded.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PromptTime {
    /// Tokens.
    pub tokens: usize,
    /// Pieces in which this program feeds it.
    pub pieces: usize,
    /// Expert bytes with each piece reading what it needs.
    pub pieces_bytes: f64,
    /// Least time for that.
    pub pieces_ns: u64,
    /// Expert bytes with every expert read at most once for the whole prompt.
    pub once_bytes: f64,
    /// Least time for that.
    pub once_ns: u64,
}

/// Chance of each expert to be needed by at least one of `tokens` tokens, by layer.
fn needed(heat: &Heat, model: &ModelBytes, tokens: usize) -> Vec<Vec<f64>> {
    let even = f64::from(model.top_k) / f64::from(model.experts.max(1));
    let layer = |layer: &crate::ids::LayerId| {
        let parts: Vec<&LayerHeat> = heat.domains.iter().filter_map(|d| d.layers.get(layer)).collect();
        let rows: f64 = parts.iter().map(|p| p.rows as f64).sum();
        let use_of = |e: usize| match rows > 0.0 {
            true => (parts.iter().map(|p| p.counts[e] as f64).sum::<f64>() / rows).clamp(0.0, 1.0),
            false => even,
        };
        (0..model.experts as usize).map(|e| 1.0 - (1.0 - use_of(e)).powf(tokens as f64)).collect()
    };
    model.moe_layers.iter().map(layer).collect()
}

/// Expert bytes and least time of one pass over `tokens` rows with nothing in memory.
fn pass(plan: &Plan, set: &DriveSet, needed: &[Vec<f64>]) -> Result<(f64, u64), EstimateError> {
    let rates: Vec<DriveRate> =
        set.drives.iter().map(|d| DriveRate { bytes_per_s: d.rate_bytes_per_s, fixed_ns: d.fixed_ns }).collect();
    let (mut bytes, mut ns) = (0.0, 0u64);
    for (homes, chances) in plan.layers.values().zip(needed) {
        let items: Vec<(u64, u64)> = homes
            .0
            .iter()
            .zip(chances)
            .map(|(homes, chance)| {
                let mask = homes.iter().fold(0u64, |mask, d| mask | 1 << d.0);
                ((chance * plan.expert_bytes as f64).round() as u64, mask)
            })
            .collect();
        let layer: u64 = items.iter().map(|i| i.0).sum();
        let bound = match plan.shape {
            Shape::Whole => bound_layout_ns(&items, &rates)?,
            Shape::Stripe { .. } => {
                let share = layer.div_ceil(rates.len().max(1) as u64);
                let each = rates.iter().map(|r| bound_drives_ns(share, std::slice::from_ref(r)));
                each.collect::<Result<Vec<_>, _>>()?.into_iter().max().unwrap_or(0)
            }
        };
        let together = set.together_bytes_per_s.map_or(0.0, |rate| layer as f64 / rate * 1e9) as u64;
        bytes += layer as f64;
        ns = ns.saturating_add(bound.max(together));
    }
    Ok((bytes, ns))
}

/// Times of a prompt of `tokens` tokens.
pub(super) fn prompt(
    q: &Question<'_>,
    model: &ModelBytes,
    plan: &Plan,
    set: &DriveSet,
    heat: &Heat,
    tokens: usize,
) -> Result<PromptTime, EstimateError> {
    let rows = q.memory.max_rows.max(1);
    let (whole, rest) = (tokens / rows, tokens % rows);
    let (once_bytes, once_ns) = pass(plan, set, &needed(heat, model, tokens))?;
    let (mut pieces_bytes, mut pieces_ns) = (0.0, 0u64);
    for (count, rows) in [(whole, rows), (usize::from(rest > 0), rest)] {
        if count > 0 {
            let (bytes, ns) = pass(plan, set, &needed(heat, model, rows))?;
            pieces_bytes += bytes * count as f64;
            pieces_ns = pieces_ns.saturating_add(ns.saturating_mul(count as u64));
        }
    }
    Ok(PromptTime { tokens, pieces: tokens.div_ceil(rows), pieces_bytes, pieces_ns, once_bytes, once_ns })
}
