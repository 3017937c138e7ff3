//! Routers of a synthetic model that choose experts as often, and as much together, as is asked for.
//!
//! **How.** Every token's embedding carries, beside noise, a code of its class (one of at most 64, by a hash) and a constant.
//! The mix before each router is made to lean on that constant, so that nearly all of what a router sees is the embedding
//! (k3-architecture.md section 2.1: the embedding is the first banked vector), and a route follows from the token alone.
//! A router's matrix holds a pattern for each class, a row of the experts that were asked for together, and noise beyond
//! the code; the correction bias, which only selects, is then set so that over random tokens each expert is chosen as
//! often as asked. Pure numbers: what they were counted from is not known here.

use super::synth_values::{Code, Values, Words};
use crate::model::config::ModelConfig;
use crate::model::tensors::{DType, TensorSpec, trunk_tensors};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Most classes of tokens.
const MAX_CLASSES: usize = 64;
/// Narrowest residual stream that a code fits in.
const MIN_HIDDEN: usize = 16;
/// Score of a pattern's experts before the sigmoid, and spread of the noise.
const PATTERN: f32 = 2.0;
const NOISE: f32 = 0.5;
/// Score of the embedding in the mix, for one of the constant's share.
const LEAN: f32 = 2.0;
/// Tokens that the bias is set by, and how often it is moved.
const TOKENS: usize = 2048;
const ROUNDS: usize = 400;
/// First and last step of the bias.
const STEPS: (f64, f64) = (0.08, 0.002);

/// What one layer's router is asked to do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerTarget {
    /// Chance of each expert to be among the chosen ones; they add up to the number chosen.
    pub shares: Vec<f64>,
    /// Experts that were asked for together; empty = only the shares are known.
    pub rows: Vec<Vec<u16>>,
}

/// What the routers of a model are asked to do, by layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routing {
    /// By layer; a layer that is missing keeps a random router.
    pub layers: BTreeMap<usize, LayerTarget>,
}

impl Routing {
    /// Shares that fall with the rank as `1 / rank^skew`, the order of the experts drawn anew for every layer.
    pub fn zipf(config: &ModelConfig, skew: f64, seed: u64) -> Self {
        let Some(moe) = &config.moe else { return Self::default() };
        let one = |layer: usize| {
            let mut order: Vec<usize> = (0..moe.experts).collect();
            let mut words = Words::of(seed, &format!("skew of layer {layer}"));
            for i in (1..order.len()).rev() {
                order.swap(i, (words.next_word() % (i as u64 + 1)) as usize);
            }
            let mut weights = vec![0.0; moe.experts];
            order.iter().enumerate().for_each(|(rank, &e)| weights[e] = ((rank + 1) as f64).powf(-skew));
            (layer, LayerTarget { shares: shares(&weights, moe.top_k), rows: Vec::new() })
        };
        Self { layers: config.moe_layers().map(one).collect() }
    }
}

/// Chances proportional to `weights` that add up to `chosen`; none is above 1.
pub fn shares(weights: &[f64], chosen: usize) -> Vec<f64> {
    let mut out = vec![0.0; weights.len()];
    let mut full = vec![false; weights.len()];
    loop {
        let left = chosen as f64 - full.iter().filter(|f| **f).count() as f64;
        let sum: f64 = weights.iter().zip(&full).filter(|(_, f)| !**f).map(|(w, _)| w).sum();
        let mut again = false;
        for (e, share) in out.iter_mut().enumerate() {
            *share = if full[e] { 1.0 } else { weights[e] / sum.max(f64::MIN_POSITIVE) * left };
            if *share > 1.0 {
                (full[e], again) = (true, true);
            }
        }
        if !again {
            return out;
        }
    }
}

/// Tensors of a model whose routers were made to order.
pub(super) struct Routed {
    code: Code,
    given: HashMap<String, Arc<[u8]>>,
}

impl Routed {
    /// Makes the routers of `routing` for a model of `config` with this seed.
    pub(super) fn build(config: &ModelConfig, seed: u64, routing: &Routing) -> Result<Self, String> {
        let Some(moe) = &config.moe else { return Err("the model has no routed experts".into()) };
        let hidden = config.hidden_size;
        if hidden < MIN_HIDDEN {
            return Err(format!(
                "a residual stream of {hidden} is too narrow for a code; use --hidden {MIN_HIDDEN} or more"
            ));
        }
        let code = Code { hidden, classes: (hidden / 2 - 1).min(MAX_CLASSES), seed };
        let specs: HashMap<String, TensorSpec> =
            trunk_tensors(config).into_iter().map(|s| (s.name.clone(), s)).collect();
        let values = |name: &str| -> Result<Vec<f32>, String> {
            let spec = specs.get(name).ok_or_else(|| format!("the model has no tensor {name}"))?;
            Ok(read(Values::of(seed, config, spec), spec))
        };
        let embed = specs.get("model.embed_tokens.weight").ok_or("the model has no embedding")?;
        let mut words = Words::of(seed, "tokens that the bias is set by");
        let ordinary = (config.vocab_size as u64).saturating_sub(super::synth_config::SPECIALS).max(1);
        let tokens: Vec<u64> = (0..TOKENS).map(|_| words.next_word() % ordinary).collect();
        let rows: Vec<Vec<f32>> = tokens.iter().map(|&t| embedding(code, seed, config, embed, t)).collect();
        let mut given = HashMap::new();
        for (&layer, target) in &routing.layers {
            if target.shares.len() != moe.experts {
                return Err(format!("layer {layer}: {} shares for {} experts", target.shares.len(), moe.experts));
            }
            let p = format!("model.layers.{layer}.");
            let norm = values(&format!("{p}post_attention_layernorm.weight"))?;
            let mut rng = Words::of(seed, &format!("router of layer {layer}"));
            let patterns = patterns(target, moe.top_k, code.classes, &mut rng);
            let gate = gate(code, moe.experts, &norm, &patterns, &mut rng);
            let scores: Vec<Vec<f32>> = rows.iter().map(|row| scores(row, &norm, &gate, config.rms_norm_eps)).collect();
            let bias = bias(&scores, &target.shares, moe.top_k);
            let mut lean = vec![0.0f32; hidden];
            lean[code.constant()] = LEAN;
            let bf16 =
                |values: &[f32]| -> Arc<[u8]> { values.iter().flat_map(|v| v.to_le_bytes()[2..].to_vec()).collect() };
            given.insert(format!("{p}block_sparse_moe.gate.weight"), bf16(&gate));
            let f32s = bias.iter().flat_map(|v| v.to_le_bytes()).collect();
            given.insert(format!("{p}block_sparse_moe.gate.e_score_correction_bias"), f32s);
            given.insert(format!("{p}mlp_res_proj.weight"), bf16(&lean));
        }
        Ok(Self { code, given })
    }

    /// The values of a tensor that is not random; `None` for all others.
    pub(super) fn values(&self, seed: u64, config: &ModelConfig, spec: &TensorSpec) -> Option<Values> {
        if spec.name.ends_with("embed_tokens.weight") {
            return Some(Values::coded(seed, config, spec, self.code));
        }
        self.given.get(&spec.name).map(|bytes| Values::given(Arc::clone(bytes), spec))
    }
}

/// A whole small tensor as numbers.
fn read(mut values: Values, spec: &TensorSpec) -> Vec<f32> {
    let (count, size) = (spec.shape.iter().product::<u64>() as usize, spec.dtype.size() as usize);
    let mut bytes = vec![0u8; count * size];
    values.fill(&mut bytes);
    bytes.chunks_exact(size).map(|chunk| number(chunk, spec.dtype)).collect()
}

fn number(chunk: &[u8], dtype: DType) -> f32 {
    let mut word = [0u8; 4];
    let size = dtype.size() as usize;
    word[4 - size..].copy_from_slice(&chunk[..size]);
    f32::from_le_bytes(word)
}

/// One row of the embedding.
fn embedding(code: Code, seed: u64, config: &ModelConfig, spec: &TensorSpec, token: u64) -> Vec<f32> {
    let mut bytes = vec![0u8; code.hidden * 2];
    Values::coded(seed, config, spec, code).starting_at(token).fill(&mut bytes);
    bytes.chunks_exact(2).map(|chunk| number(chunk, DType::BF16)).collect()
}

/// A row of experts for each class.
fn patterns(target: &LayerTarget, chosen: usize, classes: usize, rng: &mut Words) -> Vec<Vec<u16>> {
    let draw = |rng: &mut Words| {
        let mut left = target.shares.clone();
        let mut row = Vec::with_capacity(chosen);
        while row.len() < chosen {
            let sum: f64 = left.iter().sum();
            if sum <= 0.0 {
                break;
            }
            let mut at = (rng.next_word() >> 11) as f64 / (1u64 << 53) as f64 * sum;
            let pick = left.iter().position(|w| {
                at -= w;
                at < 0.0
            });
            let pick = pick.unwrap_or_else(|| left.iter().rposition(|w| *w > 0.0).unwrap_or(0));
            left[pick] = 0.0;
            row.push(pick as u16);
        }
        row
    };
    let one = |_| match target.rows.len() as u64 {
        0 => draw(rng),
        n => target.rows[(rng.next_word() % n) as usize].clone(),
    };
    (0..classes).map(one).collect()
}

/// The router's matrix, `[experts, hidden]`, as bf16 keeps it.
fn gate(code: Code, experts: usize, norm: &[f32], patterns: &[Vec<u16>], rng: &mut Words) -> Vec<f32> {
    // what a router sees of a code: its height over the root mean square of a row
    let rms = code.root_mean_square();
    let noise = NOISE * rms / (code.noise_width() as f32).sqrt();
    let mut out = vec![0.0f32; experts * code.hidden];
    for (expert, row) in out.chunks_exact_mut(code.hidden).enumerate() {
        for (class, pattern) in patterns.iter().enumerate() {
            if pattern.contains(&(expert as u16)) {
                row[class] = PATTERN * rms / (code.height() * norm[class]);
            }
        }
        row[code.constant() + 1..].iter_mut().for_each(|v| *v = noise * rng.normal());
        row.iter_mut().for_each(|v| *v = f32::from_bits(v.to_bits() & 0xffff_0000));
    }
    out
}

/// Unbiased scores of a token whose embedding is all that the router sees.
fn scores(row: &[f32], norm: &[f32], gate: &[f32], eps: f32) -> Vec<f32> {
    let mean = row.iter().map(|v| v * v).sum::<f32>() / row.len() as f32;
    let x: Vec<f32> = row.iter().zip(norm).map(|(v, w)| v / (mean + eps).sqrt() * w).collect();
    let logit = |g: &[f32]| g.iter().zip(&x).map(|(g, x)| g * x).sum::<f32>();
    gate.chunks_exact(row.len()).map(|g| 1.0 / (1.0 + (-logit(g)).exp())).collect()
}

/// The bias under which each expert is chosen for its share of the tokens: moved against the logarithm of what is wrong,
/// in steps that become smaller.
fn bias(scores: &[Vec<f32>], shares: &[f64], chosen: usize) -> Vec<f32> {
    let floor = 0.5 / scores.len() as f64;
    let mut bias = vec![0.0f64; shares.len()];
    let mut order: Vec<usize> = (0..shares.len()).collect();
    let mut counts = vec![0u32; shares.len()];
    for round in 0..ROUNDS {
        counts.fill(0);
        for row in scores {
            let at = |e: usize| f64::from(row[e]) + bias[e];
            if chosen < order.len() {
                order.select_nth_unstable_by(chosen, |&a, &b| at(b).total_cmp(&at(a)).then(a.cmp(&b)));
            }
            order[..chosen].iter().for_each(|&e| counts[e] += 1);
        }
        let part = round as f64 / (ROUNDS - 1) as f64;
        let step = STEPS.0 * (STEPS.1 / STEPS.0).powf(part);
        for (e, b) in bias.iter_mut().enumerate() {
            let seen = f64::from(counts[e]) / scores.len() as f64;
            *b += step * ((shares[e] + floor) / (seen + floor)).ln();
        }
    }
    let mean = bias.iter().sum::<f64>() / bias.len().max(1) as f64;
    bias.iter().map(|b| (b - mean) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_capped_and_add_up() {
        let even = shares(&[1.0; 8], 2);
        assert!(even.iter().all(|s| (s - 0.25).abs() < 1e-12));
        let steep = shares(&[100.0, 1.0, 1.0, 1.0], 2);
        assert_eq!(steep[0], 1.0);
        assert!((steep.iter().sum::<f64>() - 2.0).abs() < 1e-12 && (steep[1] - 1.0 / 3.0).abs() < 1e-12);
    }
}
