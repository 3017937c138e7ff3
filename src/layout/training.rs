//! What a plan is made for: barriers as they will probably be, drawn from heat. Rows of the heat stand for barriers;
//! what a cache of the stated size would hold is taken out of them first, so that a plan serves the **misses**. A drawn
//! barrier is a row in which some experts are replaced by ones drawn from smoothed counts: rows of one text
//! repeat themselves, and a plan that fits them exactly is worth less on the next text. Pure and seeded.

use super::heat::{Heat, LayerHeat};
use super::plan::PlanError;
use super::worked;
use crate::ids::LayerId;
use crate::stats::SplitMix64;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Chance that an expert of a row is replaced. Chosen on the first half of the public Kimi-Linear trace alone, over three
/// splits inside it: 0.45 to 0.75 differ by less than the noise between seeds, 0.3 and 0.9 are worse.
pub const REPLACE: f64 = 0.6;
/// Counts added to every expert. Chosen in the same way: 1 to 4 differ little, below 1 is worse, and with 2 the predicted
/// barrier is what the rows that were kept back took (within 1 %).
pub const SMOOTHING: f64 = 2.0;
/// Most experts of one row.
pub const MAX_WIDTH: usize = 255;
/// Rows made up for a layer whose heat has counts only.
const MADE_ROWS: usize = 2048;

/// What a cache keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// The most recently used experts of the model.
    #[default]
    Lru,
    /// The most often used ones; in its steady state the same as pinned.
    Lfu,
    /// The hottest ones, chosen before the run.
    Pinned,
}

/// A cache in memory, as a planner sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheModel {
    /// Experts that it holds; 0 = no cache.
    pub experts: usize,
    /// Which.
    pub policy: CachePolicy,
}

/// Barriers as flat lists of expert ids.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    starts: Vec<u32>,
    ids: Vec<u16>,
}

impl Rows {
    /// How many.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// One of them.
    pub fn get(&self, index: usize) -> &[u16] {
        let end = self.starts.get(index + 1).map_or(self.ids.len(), |&e| e as usize);
        &self.ids[self.starts[index] as usize..end]
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &[u16]> {
        (0..self.len()).map(|i| self.get(i))
    }

    fn push(&mut self, row: &[u16]) {
        self.starts.push(self.ids.len() as u32);
        self.ids.extend_from_slice(row);
    }
}

/// One layer's barriers.
#[derive(Clone, Debug)]
pub struct LayerTraining {
    /// Barriers per token that read anything: 1 without a cache.
    pub mass: f64,
    /// The real ones, after the cache; none is empty.
    pub rows: Rows,
    /// To draw rows by their weights.
    row_draw: Draw,
    /// Smoothed misses of each expert.
    pub expected: Vec<f64>,
    expected_draw: Draw,
}

/// Every layer of a model.
#[derive(Clone, Debug)]
pub struct Training {
    /// In the catalogue's order.
    pub layers: Vec<LayerTraining>,
    /// Experts of the widest barrier.
    pub widest: usize,
    /// Layers of which the heat says nothing; they are taken to be evenly used.
    pub unknown: Vec<LayerId>,
}

impl Training {
    /// From `heat`, for these layers of `experts` experts, behind `cache`.
    pub fn new(
        heat: &Heat,
        layers: &[LayerId],
        experts: usize,
        cache: CacheModel,
        seed: u64,
    ) -> Result<Self, PlanError> {
        let merged: Vec<Option<LayerHeat>> = layers.iter().map(|&l| together(heat, l)).collect::<Result<_, _>>()?;
        let widths: Vec<f64> = merged.iter().flatten().map(LayerHeat::mean_width).filter(|w| *w > 0.0).collect();
        let usual = widths.iter().sum::<f64>() / widths.len().max(1) as f64;
        let even = |width: f64| LayerHeat {
            rows: experts as u64,
            counts: vec![(width.round() as u64).clamp(1, experts as u64); experts],
            ..LayerHeat::default()
        };
        let unknown = layers.iter().zip(&merged).filter(|(_, m)| m.is_none()).map(|(&l, _)| l).collect();
        let merged: Vec<LayerHeat> = merged.into_iter().map(|m| m.unwrap_or_else(|| even(usual))).collect();
        let held = Held::new(&merged, cache);
        worked::expect(merged.len());
        let layers = merged
            .iter()
            .enumerate()
            .map(|(rank, heat)| {
                worked::done(1);
                let mut rng = SplitMix64::new(seed ^ (rank as u64) << 32 ^ 0x726f_7773);
                layer_training(rank, heat, &held, &mut rng)
                    .map_err(|r| PlanError::Inconsistent(format!("layer {}: {r}", layers[rank].0)))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let widest = layers.iter().flat_map(|l| l.rows.iter().map(<[u16]>::len)).max().unwrap_or(0);
        if widest == 0 {
            return Err(PlanError::NothingRead);
        }
        Ok(Self { layers, widest, unknown })
    }
}

impl LayerTraining {
    /// Weights of the rows.
    pub fn row_weights(&self) -> Vec<f64> {
        let before = std::iter::once(0.0).chain(self.row_draw.sums.iter().copied());
        self.row_draw.sums.iter().zip(before).map(|(sum, before)| sum - before).collect()
    }

    /// Draws `count` barriers.
    pub fn draw(&self, count: usize, rng: &mut SplitMix64) -> Rows {
        let mut out = Rows::default();
        if self.rows.is_empty() {
            return out;
        }
        out.ids.reserve(count * self.rows.get(0).len());
        let mut row = Vec::with_capacity(MAX_WIDTH);
        for _ in 0..count {
            let base = self.rows.get(self.row_draw.pick(rng));
            row.clear();
            row.extend(base.iter().copied().filter(|_| unit(rng) >= REPLACE));
            fill(&mut row, base.len(), &self.expected_draw, rng);
            out.push(&row);
        }
        out
    }
}

/// A number of 0 to 1, 1 excluded.
fn unit(rng: &mut SplitMix64) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Indices with the chance that their weights give them.
#[derive(Clone, Debug)]
struct Draw {
    sums: Vec<f64>,
    /// Where the search for each even part of the total starts.
    guide: Vec<u32>,
}

impl Draw {
    fn new(weights: impl Iterator<Item = f64>) -> Self {
        let sums: Vec<f64> = weights
            .scan(0.0, |sum, w| {
                *sum += w;
                Some(*sum)
            })
            .collect();
        let (parts, total) = (sums.len(), sums.last().copied().unwrap_or(0.0));
        let start = |k: usize| sums.partition_point(|&s| s <= total * k as f64 / parts as f64) as u32;
        let guide = (0..parts).map(start).collect();
        Self { sums, guide }
    }

    fn pick(&self, rng: &mut SplitMix64) -> usize {
        let (share, last) = (unit(rng), self.sums.len() - 1);
        let at = share * self.sums[last];
        let mut index = self.guide[(share * self.guide.len() as f64) as usize] as usize;
        // Rounding may put the start one too far.
        while index > 0 && self.sums[index - 1] > at {
            index -= 1;
        }
        while index < last && self.sums[index] <= at {
            index += 1;
        }
        index
    }
}

/// Draws experts that the row lacks until it has `width`.
fn fill(row: &mut Vec<u16>, width: usize, draw: &Draw, rng: &mut SplitMix64) {
    let mut misses = 0;
    while row.len() < width {
        let id = if misses < 64 { draw.pick(rng) } else { rng.below(draw.sums.len()) } as u16;
        if row.contains(&id) {
            misses += 1;
            // So few experts are left that chance does not find them.
            if misses > 4096 {
                return;
            }
        } else {
            row.push(id);
        }
    }
}

/// One layer of all domains; `None` when none has it.
fn together(heat: &Heat, layer: LayerId) -> Result<Option<LayerHeat>, PlanError> {
    let mut parts = heat.domains.iter().filter_map(|d| d.layers.get(&layer)).filter(|l| l.rows > 0);
    let Some(first) = parts.next() else { return Ok(None) };
    let mut sum = first.clone();
    for part in parts {
        let overflow =
            || PlanError::Inconsistent(format!("layer {}: the counts of all domains exceed 64 bits", layer.0));
        if sum.weights.is_empty() {
            sum.weights = vec![per_sample(&sum) as f32; sum.sets.len()];
        }
        let each = per_sample(part);
        sum.weights.extend(
            (0..part.sets.len()).map(|i| (part.weight(i) * if part.weights.is_empty() { each } else { 1.0 }) as f32),
        );
        if sum.ages.len() == sum.sets.len() && part.ages.len() == part.sets.len() {
            sum.ages.extend(part.ages.iter().cloned());
        } else {
            sum.ages.clear();
        }
        sum.sets.extend(part.sets.iter().cloned());
        sum.rows = sum.rows.checked_add(part.rows).ok_or_else(overflow)?;
        for (a, &b) in sum.counts.iter_mut().zip(&part.counts) {
            *a = a.checked_add(b).ok_or_else(overflow)?;
        }
        sum.pairs.extend(part.pairs.iter().copied());
    }
    Ok(Some(sum))
}

/// Rows that one sampled row stands for.
fn per_sample(heat: &LayerHeat) -> f64 {
    if heat.sets.is_empty() { 0.0 } else { heat.rows as f64 / heat.sets.len() as f64 }
}

/// What the cache holds.
struct Held {
    cache: CacheModel,
    /// Chance that each expert is in memory, by layer and expert, for rows whose ages are not known.
    chance: Vec<Vec<f64>>,
}

impl Held {
    fn new(layers: &[LayerHeat], cache: CacheModel) -> Self {
        let chance = match cache {
            CacheModel { experts: 0, .. } => layers.iter().map(|l| vec![0.0; l.counts.len()]).collect(),
            CacheModel { policy: CachePolicy::Lru, .. } => characteristic_time(layers, cache.experts),
            _ => hottest(layers, cache.experts),
        };
        Self { cache, chance }
    }

    fn is_hit(&self, layer: usize, expert: u16, age: Option<Option<u32>>, rng: &mut SplitMix64) -> bool {
        match (self.cache, age) {
            (CacheModel { experts: 0, .. }, _) => false,
            (CacheModel { policy: CachePolicy::Lru, experts }, Some(age)) => {
                age.is_some_and(|a| (a as usize) < experts)
            }
            _ => {
                let chance = self.chance[layer][usize::from(expert)];
                chance > 0.0 && unit(rng) < chance
            }
        }
    }
}

/// Uses per token.
fn use_rate(heat: &LayerHeat, expert: usize) -> f64 {
    heat.counts[expert] as f64 / heat.rows.max(1) as f64
}

/// 1 for the experts that are used most, over all layers.
fn hottest(layers: &[LayerHeat], hold: usize) -> Vec<Vec<f64>> {
    let mut order: Vec<(f64, usize, usize)> = Vec::new();
    for (layer, heat) in layers.iter().enumerate() {
        order.extend((0..heat.counts.len()).map(|e| (use_rate(heat, e), layer, e)));
    }
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut chance: Vec<Vec<f64>> = layers.iter().map(|l| vec![0.0; l.counts.len()]).collect();
    for &(_, layer, expert) in order.iter().take(hold) {
        chance[layer][expert] = 1.0;
    }
    chance
}

/// Chance to be held by an LRU cache when uses are independent: 1 - exp(-rate t), with the time t at which the chances
/// add up to the cache's size (Che, Tung and Wang 2002). For sources that say nothing about order.
fn characteristic_time(layers: &[LayerHeat], hold: usize) -> Vec<Vec<f64>> {
    let chances = |t: f64| -> Vec<Vec<f64>> {
        layers.iter().map(|l| (0..l.counts.len()).map(|e| 1.0 - (-use_rate(l, e) * t).exp()).collect()).collect()
    };
    let held = |t: f64| chances(t).iter().flatten().sum::<f64>();
    let used = layers.iter().flat_map(|l| &l.counts).filter(|c| **c > 0).count();
    if hold >= used {
        return layers.iter().map(|l| l.counts.iter().map(|&c| f64::from(u8::from(c > 0))).collect()).collect();
    }
    let (mut low, mut high) = (0.0, 1.0);
    while held(high) < hold as f64 && high < 1e18 {
        high *= 2.0;
    }
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        if held(middle) < hold as f64 { low = middle } else { high = middle }
    }
    chances(high)
}

fn layer_training(rank: usize, heat: &LayerHeat, held: &Held, rng: &mut SplitMix64) -> Result<LayerTraining, String> {
    let made;
    let (sets, weights): (&[Vec<u16>], Vec<f64>) = if heat.sets.is_empty() {
        made = make_rows(heat, rng);
        (&made, vec![heat.rows as f64 / MADE_ROWS as f64; MADE_ROWS])
    } else {
        let each = if heat.weights.is_empty() { per_sample(heat) } else { 1.0 };
        (&heat.sets, (0..heat.sets.len()).map(|i| heat.weight(i) * each).collect())
    };
    let mut rows = Rows::default();
    let mut kept = Vec::new();
    let mut misses = vec![0.0; heat.counts.len()];
    let mut row = Vec::new();
    let mut total = 0.0;
    for (index, set) in sets.iter().enumerate() {
        if set.len() > MAX_WIDTH {
            return Err(format!("a row asks for {} experts; a token may ask for at most {MAX_WIDTH}", set.len()));
        }
        row.clear();
        for (slot, &id) in set.iter().enumerate() {
            let age = heat.ages.get(index).map(|a| a[slot]);
            if !held.is_hit(rank, id, age, rng) {
                row.push(id);
                misses[usize::from(id)] += weights[index];
            }
        }
        total += weights[index];
        if !row.is_empty() && weights[index] > 0.0 {
            rows.push(&row);
            kept.push(weights[index]);
        }
    }
    // Without a cache the counts of all rows are known, not only those of the sample.
    let exact = held.cache.experts == 0;
    let never_read = |e: usize| held.cache.policy != CachePolicy::Lru && held.chance[rank][e] >= 1.0;
    let expected: Vec<f64> = (0..heat.counts.len())
        .map(|e| match never_read(e) {
            true => 0.0,
            false => SMOOTHING + if exact { heat.counts[e] as f64 } else { misses[e] },
        })
        .collect();
    let mass = if total > 0.0 { kept.iter().sum::<f64>() / total } else { 0.0 };
    Ok(LayerTraining {
        mass,
        rows,
        row_draw: Draw::new(kept.into_iter()),
        expected_draw: Draw::new(expected.iter().copied()),
        expected,
    })
}

/// Rows for a layer that only has counts, and pairs if it has any: an expert joins a row either as the partner of one
/// that is there, as often as their pair was seen, or by its count.
fn make_rows(heat: &LayerHeat, rng: &mut SplitMix64) -> Vec<Vec<u16>> {
    let sums = Draw::new(heat.counts.iter().map(|&c| c as f64 + SMOOTHING * 1e-3));
    let mut partners: BTreeMap<u16, Vec<(u16, f64)>> = BTreeMap::new();
    for &(i, j, n) in &heat.pairs {
        for (a, b) in [(i, j), (j, i)] {
            let together = n as f64 / heat.counts[usize::from(a)].max(1) as f64;
            partners.entry(a).or_default().push((b, together.min(1.0)));
        }
    }
    let width = heat.mean_width().clamp(1.0, MAX_WIDTH.min(heat.counts.len()) as f64);
    let row = |rng: &mut SplitMix64| {
        // The fraction of a mean width is met by some rows being one wider.
        let width = (width.floor() as usize + usize::from(unit(rng) < width.fract())).min(heat.counts.len());
        let mut row: Vec<u16> = Vec::with_capacity(width);
        fill(&mut row, 1, &sums, rng);
        for _ in 0..4 * width {
            if row.len() >= width {
                break;
            }
            let of = row[rng.below(row.len())];
            // Each of an expert's width - 1 partners is this one with the chance that the pair was seen.
            let mut at = unit(rng) * (width - 1) as f64;
            let partner = partners.get(&of).into_iter().flatten().find(|(_, chance)| {
                at -= chance;
                at < 0.0
            });
            match partner {
                Some((id, _)) if !row.contains(id) => row.push(*id),
                Some(_) => {}
                None => {
                    let next = row.len() + 1;
                    fill(&mut row, next, &sums, rng);
                }
            }
        }
        fill(&mut row, width, &sums, rng);
        row
    };
    (0..MADE_ROWS).map(|_| row(rng)).collect()
}

/// Rows of given sets.
#[cfg(test)]
pub(super) fn rows_of(sets: &[Vec<u16>]) -> Rows {
    let mut rows = Rows::default();
    sets.iter().for_each(|s| rows.push(s));
    rows
}
