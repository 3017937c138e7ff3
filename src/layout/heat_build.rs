//! Makes heat from rows of (layer, ids), in the order in which a model asked for them; merges and decays heat. Pure: the
//! rows are given, the choice of sampled rows is seeded by a constant.

use super::heat::{Domain, HEAT_VERSION, Heat, LayerHeat, MAX_PAIRS, MAX_SAMPLED_IDS, Source};
use super::plan::PlanError;
use crate::ids::{ExpertId, LayerId};
use crate::stats::SplitMix64;
use std::collections::{BTreeMap, HashMap};

/// Seed of the choice of sampled rows.
const SAMPLE_SEED: u64 = 0x4845_4154;

/// Counts rows.
pub struct HeatBuilder {
    experts: u32,
    layers: BTreeMap<LayerId, Counting>,
    ages: Ages,
    rng: SplitMix64,
}

#[derive(Default)]
struct Counting {
    heat: LayerHeat,
    sampled_ids: usize,
    widest: usize,
}

impl HeatBuilder {
    /// For a model with `experts` experts in a layer.
    pub fn new(experts: u32) -> Result<Self, PlanError> {
        if experts == 0 || experts > u32::from(u16::MAX) {
            let reason = format!("{experts} experts in a layer; expected 1 to {}", u16::MAX);
            return Err(PlanError::Inconsistent(reason));
        }
        Ok(Self { experts, layers: BTreeMap::new(), ages: Ages::default(), rng: SplitMix64::new(SAMPLE_SEED) })
    }

    /// One token in one layer. With `counted` unset the row only ages the others: a held-out part starts with the
    /// cache that the part before it left.
    pub fn row(&mut self, layer: LayerId, ids: &[ExpertId], counted: bool) -> Result<(), PlanError> {
        let bad = |reason: String| Err(PlanError::Inconsistent(reason));
        if ids.is_empty() {
            return bad(format!("layer {}: a row without experts", layer.0));
        }
        for (index, id) in ids.iter().enumerate() {
            if u32::from(id.0) >= self.experts {
                return bad(format!("layer {}: expert {} of a model with {} in a layer", layer.0, id.0, self.experts));
            }
            if ids[..index].contains(id) {
                return bad(format!("layer {}: expert {} stands twice in a row", layer.0, id.0));
            }
        }
        let ages = self.ages.of_row(layer, ids);
        if !counted {
            return Ok(());
        }
        let experts = self.experts as usize;
        let own = self.layers.entry(layer).or_default();
        own.heat.counts.resize(experts, 0);
        own.heat.rows += 1;
        for id in ids {
            own.heat.counts[id.index()] += 1;
        }
        let set = ids.iter().map(|id| id.0).collect();
        own.widest = own.widest.max(ids.len());
        if own.sampled_ids + ids.len() <= MAX_SAMPLED_IDS {
            own.sampled_ids += ids.len();
            own.heat.sets.push(set);
            own.heat.ages.push(ages);
        } else {
            // Every row seen so far stays with the same chance.
            let place = self.rng.below(usize::try_from(own.heat.rows).unwrap_or(usize::MAX));
            if let Some(old) = own.heat.sets.get_mut(place) {
                *old = set;
                own.heat.ages[place] = ages;
            }
        }
        Ok(())
    }

    /// What was counted, under `label`.
    pub fn finish(self, model_id: Option<String>, sources: Vec<Source>, label: &str) -> Result<Heat, PlanError> {
        let layers = self.layers.into_iter().map(|(layer, c)| (layer, c.heat)).collect();
        let heat = Heat {
            version: HEAT_VERSION,
            model_id,
            experts: self.experts,
            sources,
            domains: vec![Domain { label: label.to_string(), layers }],
        };
        heat.check()?;
        Ok(heat)
    }
}

/// Ages by the classic method: each expert's last use is a mark on a line of time, and an age is the number of marks
/// after it, kept by a Fenwick tree that is rebuilt over the marks alone when its line is full.
#[derive(Default)]
struct Ages {
    last: HashMap<(LayerId, ExpertId), usize>,
    tree: Vec<u32>,
    now: usize,
}

impl Ages {
    /// Ages of a row's experts before the row, then the row becomes their last use.
    fn of_row(&mut self, layer: LayerId, ids: &[ExpertId]) -> Vec<Option<u32>> {
        let ages = ids.iter().map(|&id| self.last.get(&(layer, id)).map(|&at| self.marks_after(at))).collect();
        for &id in ids {
            if self.now == self.tree.len() {
                self.make_room();
            }
            if let Some(at) = self.last.insert((layer, id), self.now) {
                self.add(at, u32::MAX);
            }
            self.add(self.now, 1);
            self.now += 1;
        }
        ages
    }

    fn make_room(&mut self) {
        let mut order: Vec<_> = self.last.iter().map(|(&key, &at)| (at, key)).collect();
        order.sort_unstable();
        self.tree = vec![0; (order.len() * 4).max(64)];
        self.now = order.len();
        for (at, (_, key)) in order.into_iter().enumerate() {
            self.last.insert(key, at);
            self.add(at, 1);
        }
    }

    /// Adds modulo 2^32, so that adding `u32::MAX` takes one away.
    fn add(&mut self, at: usize, amount: u32) {
        let mut i = at;
        while i < self.tree.len() {
            self.tree[i] = self.tree[i].wrapping_add(amount);
            i |= i + 1;
        }
    }

    fn marks_after(&self, at: usize) -> u32 {
        let mut sum = 0u32;
        let mut i = at as isize;
        while i >= 0 {
            sum = sum.wrapping_add(self.tree[i as usize]);
            i = (i & (i + 1)) - 1;
        }
        self.last.len() as u32 - sum
    }
}

/// Merges heats in order of age, oldest first; the counts and rows of the k-th from the end weigh `decay`^k.
pub fn merge(heats: &[Heat], decay: f64) -> Result<Heat, PlanError> {
    let bad = |reason: String| Err(PlanError::Inconsistent(reason));
    let Some(first) = heats.first() else { return bad("nothing to merge; name at least one heat file".into()) };
    if !(decay > 0.0 && decay <= 1.0) {
        return bad(format!("a decay of {decay}; give a number above 0, at most 1"));
    }
    let mut out =
        Heat { version: HEAT_VERSION, model_id: None, experts: first.experts, sources: vec![], domains: vec![] };
    for (index, heat) in heats.iter().enumerate() {
        if heat.experts != out.experts {
            return bad(format!(
                "heat {} is of a model with {} experts in a layer, the first has {}; merge heat of one model",
                index + 1,
                heat.experts,
                out.experts
            ));
        }
        match (&out.model_id, &heat.model_id) {
            (Some(a), Some(b)) if a != b => {
                return bad(format!(
                    "heat {} was counted on model {b}, one before it on {a}; merge heat of one model",
                    index + 1
                ));
            }
            (None, Some(b)) => out.model_id = Some(b.clone()),
            _ => {}
        }
        for source in &heat.sources {
            let again = |s: &Source| s.digest == source.digest && s.part.overlaps(source.part);
            if out.sources.iter().any(again) {
                return bad(format!(
                    "heat {}: `{}` is in an earlier one too; it would count twice",
                    index + 1,
                    source.name
                ));
            }
        }
        out.sources.extend(heat.sources.iter().cloned());
        let factor = decay.powi((heats.len() - 1 - index) as i32);
        for domain in &heat.domains {
            let at = out.domains.iter().position(|d| d.label == domain.label).unwrap_or_else(|| {
                out.domains.push(Domain { label: domain.label.clone(), ..Domain::default() });
                out.domains.len() - 1
            });
            for (&layer, new) in &domain.layers {
                let sum = out.domains[at].layers.entry(layer).or_default();
                add_layer(sum, new, factor)
                    .map_err(|r| PlanError::Inconsistent(format!("heat {}, layer {}: {r}", index + 1, layer.0)))?;
            }
        }
    }
    for layer in out.domains.iter_mut().flat_map(|d| d.layers.values_mut()) {
        thin(layer);
    }
    out.check()?;
    Ok(out)
}

fn add_layer(sum: &mut LayerHeat, new: &LayerHeat, factor: f64) -> Result<(), String> {
    let scaled = |count: u64| if factor == 1.0 { count } else { (count as f64 * factor).round() as u64 };
    let add =
        |a: u64, b: u64| a.checked_add(scaled(b)).ok_or_else(|| "the counts exceed 64 bits; use --decay".to_string());
    sum.counts.resize(new.counts.len(), 0);
    for (a, &b) in sum.counts.iter_mut().zip(&new.counts) {
        *a = add(*a, b)?;
    }
    sum.rows = add(sum.rows, new.rows)?;
    // A sampled row stands for as many rows as its file has for each of its samples.
    let stands_for = |l: &LayerHeat| if l.sets.is_empty() { 0.0 } else { l.rows as f64 / l.sets.len() as f64 };
    if sum.weights.len() != sum.sets.len() {
        sum.weights = vec![1.0; sum.sets.len()];
    }
    let each = stands_for(new) * factor;
    sum.weights.extend(
        (0..new.sets.len()).map(|i| (new.weight(i) * if new.weights.is_empty() { each } else { factor }) as f32),
    );
    let had_ages = sum.ages.len() == sum.sets.len();
    sum.sets.extend(new.sets.iter().cloned());
    if had_ages && new.ages.len() == new.sets.len() {
        sum.ages.extend(new.ages.iter().cloned());
    } else {
        sum.ages.clear();
    }
    let mut pairs: BTreeMap<(u16, u16), u64> = sum.pairs.iter().map(|&(i, j, n)| ((i, j), n)).collect();
    for &(i, j, n) in &new.pairs {
        let slot = pairs.entry((i.min(j), i.max(j))).or_default();
        *slot = add(*slot, n)?;
    }
    sum.pairs = pairs.into_iter().map(|((i, j), n)| (i, j, n)).collect();
    Ok(())
}

/// Keeps a layer within its bounds: rows at even distances, the most frequent pairs.
fn thin(layer: &mut LayerHeat) {
    let ids: usize = layer.sets.iter().map(Vec::len).sum();
    if ids > MAX_SAMPLED_IDS {
        let total = layer.sets.len();
        let keep = (total * MAX_SAMPLED_IDS / ids).max(1);
        let chosen: Vec<usize> = (0..keep).map(|k| k * total / keep).collect();
        layer.sets = chosen.iter().map(|&i| layer.sets[i].clone()).collect();
        if !layer.ages.is_empty() {
            layer.ages = chosen.iter().map(|&i| layer.ages[i].clone()).collect();
        }
        if !layer.weights.is_empty() {
            let scale = total as f32 / keep as f32;
            layer.weights = chosen.iter().map(|&i| layer.weights[i] * scale).collect();
        }
    }
    if layer.pairs.len() > MAX_PAIRS {
        layer.pairs.sort_by_key(|&(i, j, n)| (std::cmp::Reverse(n), i, j));
        layer.pairs.truncate(MAX_PAIRS);
        layer.pairs.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::super::heat::{DEFAULT_DOMAIN, Part};
    use super::*;
    use proptest::prelude::*;

    fn ids(list: &[u16]) -> Vec<ExpertId> {
        list.iter().map(|&e| ExpertId(e)).collect()
    }

    fn source(digest: &str) -> Source {
        Source { name: format!("{digest}.csv"), digest: digest.into(), part: Part::Whole }
    }

    fn heat(rows: &[&[u16]], digest: &str) -> Heat {
        let mut b = HeatBuilder::new(8).unwrap();
        for row in rows {
            b.row(LayerId(1), &ids(row), true).unwrap();
        }
        b.finish(None, vec![source(digest)], DEFAULT_DOMAIN).unwrap()
    }

    #[test]
    fn rows_are_counted_sampled_and_aged() {
        let h = heat(&[&[0, 1], &[2, 3], &[0, 2], &[0, 7]], "a");
        let layer = &h.domains[0].layers[&LayerId(1)];
        assert_eq!(layer.counts, [3, 1, 2, 1, 0, 0, 0, 1]);
        assert_eq!(layer.sets.len(), 4);
        // 0 was last used before 1, 2 and 3; 2 before 3 alone; then 0 before 2 alone.
        assert_eq!(layer.ages[2], [Some(3), Some(1)]);
        assert_eq!(layer.ages[3], [Some(1), None]);
    }

    #[test]
    fn a_row_that_is_not_counted_still_warms_the_cache() {
        let mut b = HeatBuilder::new(8).unwrap();
        b.row(LayerId(0), &ids(&[1]), false).unwrap();
        b.row(LayerId(0), &ids(&[1]), true).unwrap();
        let h = b.finish(None, vec![source("a")], "x").unwrap();
        assert_eq!(h.domains[0].layers[&LayerId(0)].ages, [[Some(0)]]);
        assert_eq!(h.rows(), 1);
    }

    #[test]
    fn bad_rows_are_named() {
        assert!(HeatBuilder::new(0).is_err());
        let mut b = HeatBuilder::new(8).unwrap();
        let mut says = |list: &[u16]| b.row(LayerId(4), &ids(list), true).unwrap_err().to_string();
        assert!(says(&[1, 8]).contains("layer 4: expert 8"));
        assert!(says(&[1, 1]).contains("twice"));
        assert!(says(&[]).contains("without"));
        assert!(b.finish(None, vec![], "x").unwrap_err().to_string().contains("no rows"));
    }

    #[test]
    fn the_sample_is_bounded_and_the_counts_are_not() {
        let mut b = HeatBuilder::new(64).unwrap();
        for i in 0..5000u16 {
            b.row(LayerId(0), &ids(&[i % 60, i % 60 + 1, i % 60 + 2, i % 60 + 3]), true).unwrap();
        }
        let h = b.finish(None, vec![source("a")], "x").unwrap();
        let layer = &h.domains[0].layers[&LayerId(0)];
        assert_eq!((layer.rows, layer.sets.len()), (5000, MAX_SAMPLED_IDS / 4));
        assert_eq!(layer.counts.iter().sum::<u64>(), 20_000);
    }

    #[test]
    fn merging_adds_and_decay_forgets() {
        let (a, b) = (heat(&[&[0, 1], &[0, 1]], "a"), heat(&[&[0, 2]], "b"));
        let m = merge(&[a.clone(), b.clone()], 0.5).unwrap();
        let layer = &m.domains[0].layers[&LayerId(1)];
        assert_eq!(layer.counts[..3], [2, 1, 1]);
        assert_eq!((layer.rows, layer.weights.clone()), (2, vec![0.5, 0.5, 1.0]));
        assert_eq!(m.sources.len(), 2);
        assert!(merge(&[a.clone(), a.clone()], 1.0).unwrap_err().to_string().contains("twice"));
        assert!(merge(&[a.clone(), b.clone()], 0.0).unwrap_err().to_string().contains("decay"));
        assert!(merge(&[], 1.0).is_err());
        let mut huge = b.clone();
        let layer = huge.domains[0].layers.get_mut(&LayerId(1)).unwrap();
        layer.counts[0] = u64::MAX - 1;
        assert!(merge(&[a.clone(), huge], 1.0).unwrap_err().to_string().contains("64 bits"));
        let mut other = b;
        other.model_id = Some("x".into());
        let mut first = a;
        first.model_id = Some("y".into());
        assert!(merge(&[first, other], 1.0).unwrap_err().to_string().contains("model x"));
    }

    proptest! {
        #[test]
        fn ages_are_what_an_lru_list_says(rows in prop::collection::vec((0u16..3, 0u16..6), 1..400)) {
            let mut ages = Ages::default();
            let mut list: Vec<(u16, u16)> = Vec::new();
            for (layer, id) in rows {
                let expected = list.iter().position(|k| *k == (layer, id));
                let got = ages.of_row(LayerId(layer), &[ExpertId(id)]);
                prop_assert_eq!(got[0], expected.map(|p| p as u32));
                if let Some(p) = expected { list.remove(p); }
                list.insert(0, (layer, id));
            }
        }
    }
}
