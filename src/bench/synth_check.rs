//! Routers made to order, asked and seen: from heat to what `synth` is told, and from decoding random tokens back to how
//! close the choices come.

use crate::clock::Clock;
use crate::decode::observe::{Observer, Route};
use crate::decode::{DecodeError, Decoder, GuessSource, Logits, Session, SessionOptions};
use crate::ids::LayerId;
use crate::layout::heat::Heat;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::ModelConfig;
use crate::model::safetensors::CheckpointError;
use crate::source::Phase;
use crate::stats::SplitMix64;
use crate::store::import::ImportError;
use crate::store::memory::{InMemory, trunk_of_checkpoint};
use crate::store::synth_routing::{LayerTarget, Routing, shares};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Rows of one pass of a check.
const PIECE_ROWS: usize = 64;
/// Special tokens at the end of a synthetic vocabulary; a check draws none of them.
const SPECIALS: usize = 256;
/// Seed of the tokens of a check, apart from those that the bias was set by.
const SEED: u64 = 0x6368_6563_6b00;

/// A check that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its bytes.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The decoder.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The experts are too large to be held.
    #[error(
        "{needs} bytes of experts have to be in memory, {has} are free; import the checkpoint and count with `argodrive heat`"
    )]
    Memory {
        /// Bytes of all experts.
        needs: u64,
        /// Bytes of memory available.
        has: u64,
    },
}

/// What routers are to do so that `heat` comes out.
///
/// # Errors
/// Heat of another geometry.
pub fn routing_of(heat: &Heat, config: &ModelConfig) -> Result<Routing, String> {
    let moe = config.moe.as_ref().ok_or("the model has no routed experts")?;
    let layers: Vec<LayerId> = config.moe_layers().map(|l| LayerId(l as u16)).collect();
    let any = Heat { model_id: None, ..heat.clone() };
    any.fits("", &layers, moe.experts as u32).map_err(|e| format!("{e} (--experts and --layers say what is made)"))?;
    let mut routing = Routing::default();
    for layer in layers {
        let parts: Vec<_> = heat.domains.iter().filter_map(|d| d.layers.get(&layer)).filter(|l| l.rows > 0).collect();
        let mut weights = vec![0.0; moe.experts];
        for part in &parts {
            weights.iter_mut().zip(&part.counts).for_each(|(w, &c)| *w += c as f64);
        }
        if weights.iter().sum::<f64>() <= 0.0 {
            weights.fill(1.0);
        }
        // an expert that was never seen must still be one that could be
        let least = weights.iter().sum::<f64>() * 1e-6;
        weights.iter_mut().for_each(|w| *w += least);
        let rows = parts.iter().flat_map(|p| &p.sets).filter(|set| !set.is_empty()).cloned().collect();
        routing.layers.insert(layer.index(), LayerTarget { shares: shares(&weights, moe.top_k), rows });
    }
    Ok(routing)
}

/// One layer, asked and seen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerCheck {
    /// The layer.
    pub layer: u16,
    /// Half the sum of differences between asked and seen shares of all choices: 0 = the same, 1 = nothing in common.
    pub total_variation: f64,
    /// What that would be for this many tokens if the chances were exactly those asked for.
    pub by_chance: f64,
    /// Correlation of the ranks of asked and seen shares.
    pub rank_correlation: f64,
    /// Correlation over all pairs of experts of how much more often than by chance they were asked for, and chosen,
    /// together; `None` where only shares were asked for.
    pub together: Option<f64>,
}

/// How close routers come.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoutingCheck {
    /// Random tokens decoded.
    pub tokens: usize,
    /// By layer.
    pub layers: Vec<LayerCheck>,
}

impl RoutingCheck {
    /// Mean over layers.
    pub fn mean(&self, of: impl Fn(&LayerCheck) -> f64) -> f64 {
        self.layers.iter().map(of).sum::<f64>() / self.layers.len().max(1) as f64
    }

    /// Mean over layers that have rows; `None` where none has.
    pub fn together(&self) -> Option<f64> {
        let known: Vec<f64> = self.layers.iter().filter_map(|l| l.together).collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    }
}

/// Rows by layer.
#[derive(Default)]
struct Seen(BTreeMap<u16, Vec<Vec<u16>>>);

impl Observer for Seen {
    fn route(&mut self, route: &Route<'_>) {
        self.0.entry(route.layer.0).or_default().push(route.experts.iter().map(|e| e.0).collect());
    }
}

/// Decodes `tokens` random tokens with the checkpoint in `folder`, experts in memory, and compares its routes with `asked`.
pub fn check(
    folder: &Path,
    asked: &Routing,
    tokens: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<RoutingCheck, CheckError> {
    let source = Checkpoint::open(folder)?;
    let needs = source.moe_layers().len() as u64 * u64::from(source.experts()) * source.expert_bytes();
    if let Some(has) = super::guards::available_bytes().filter(|has| needs > *has) {
        return Err(CheckError::Memory { needs, has });
    }
    let mut memory = InMemory::from_checkpoint(&source)?;
    let config = source.config().clone();
    let (longest, vocab) = (config.max_position_embeddings, config.vocab_size.saturating_sub(SPECIALS).max(1));
    let decoder = Decoder::load(config, Arc::new(trunk_of_checkpoint(&source)?))?;
    let options = SessionOptions {
        max_context: longest.min(tokens.max(1)),
        max_rows: PIECE_ROWS.min(longest),
        clock: Clock::start(),
        guess: GuessSource::None,
    };
    let mut session = Session::new(decoder, options)?;
    let mut rng = SplitMix64::new(SEED);
    let mut seen = Seen::default();
    let mut left = tokens;
    while left > 0 {
        let room = session.max_context() - session.position();
        let rows = left.min(PIECE_ROWS).min(room);
        if rows == 0 {
            session.reset();
            continue;
        }
        let piece: Vec<u32> = (0..rows).map(|_| rng.below(vocab) as u32).collect();
        session.forward(&piece, Phase::Prefill, &mut memory, Logits::None, Some(&mut seen))?;
        left -= rows;
        progress(tokens - left);
    }
    let layers = asked.layers.iter().filter_map(|(&layer, target)| {
        let rows = seen.0.get(&(layer as u16))?;
        Some(compare(layer as u16, target, rows))
    });
    Ok(RoutingCheck { tokens, layers: layers.collect() })
}

fn compare(layer: u16, target: &LayerTarget, rows: &[Vec<u16>]) -> LayerCheck {
    let seen = rates(rows, target.shares.len());
    let (n, chosen) = (rows.len().max(1) as f64, target.shares.iter().sum::<f64>().max(1.0));
    let apart: f64 = target.shares.iter().zip(&seen).map(|(a, b)| (a - b).abs()).sum();
    // the mean distance of a share of n draws from its chance, by the normal approximation
    let chance = |p: &f64| (2.0 * p * (1.0 - p) / (std::f64::consts::PI * n)).sqrt();
    LayerCheck {
        layer,
        total_variation: 0.5 * apart / chosen,
        by_chance: 0.5 * target.shares.iter().map(chance).sum::<f64>() / chosen,
        rank_correlation: correlation(&ranks(&target.shares), &ranks(&seen)),
        together: (!target.rows.is_empty())
            .then(|| correlation(&excess(&target.rows, target.shares.len()), &excess(rows, target.shares.len()))),
    }
}

/// How often each expert is in a row.
fn rates(rows: &[Vec<u16>], experts: usize) -> Vec<f64> {
    let mut rates = vec![0.0; experts];
    let each = 1.0 / rows.len().max(1) as f64;
    rows.iter().flatten().for_each(|&e| rates[usize::from(e)] += each);
    rates
}

/// For every pair how much more often than by chance both are in a row.
fn excess(rows: &[Vec<u16>], experts: usize) -> Vec<f64> {
    let (rates, each) = (rates(rows, experts), 1.0 / rows.len().max(1) as f64);
    let at = |i: usize, j: usize| j * (j - 1) / 2 + i;
    let mut pairs = vec![0.0; experts * experts.saturating_sub(1) / 2];
    for row in rows {
        for (k, &a) in row.iter().enumerate() {
            for &b in &row[..k] {
                let (i, j) = (usize::from(a.min(b)), usize::from(a.max(b)));
                pairs[at(i, j)] += each;
            }
        }
    }
    for j in 1..experts {
        for i in 0..j {
            pairs[at(i, j)] -= rates[i] * rates[j];
        }
    }
    pairs
}

/// Ranks, equal values sharing theirs.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut out = vec![0.0; values.len()];
    let mut from = 0;
    while from < order.len() {
        let same = order[from..].iter().take_while(|&&i| values[i] == values[order[from]]).count();
        for &i in &order[from..from + same] {
            out[i] = from as f64 + (same - 1) as f64 / 2.0;
        }
        from += same;
    }
    out
}

/// Pearson's; 0 where one side does not vary.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len().max(1) as f64;
    let (ma, mb) = (mean(a), mean(b));
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (x, y) in a.iter().zip(b) {
        ab += (x - ma) * (y - mb);
        aa += (x - ma) * (x - ma);
        bb += (y - mb) * (y - mb);
    }
    if aa > 0.0 && bb > 0.0 { ab / (aa * bb).sqrt() } else { 0.0 }
}
