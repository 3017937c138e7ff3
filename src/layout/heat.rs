//! Heat: how often experts are asked for, and which of a layer are asked for **together**. Data, its JSON and its checks;
//! `heat_build` makes it from rows of (layer, ids), `training` turns it into barriers to plan for. Opens no file.
//!
//! Counts say what is hot. Co-activation is kept as what it is in the end used for: barriers. Each layer keeps a bounded
//! random sample of its rows (all of them while they fit), and of every id in it the *age*: how many other
//! experts of the model were asked for since this one last was. An LRU cache of N experts misses exactly the
//! ids whose age is N or more, so one file serves every cache size. Sources that only know pairs keep those.

use super::plan::PlanError;
use crate::ids::LayerId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of heat files that this program writes.
pub const HEAT_VERSION: u32 = 1;
/// Ids that the sampled rows of one layer hold at most, in each domain.
pub const MAX_SAMPLED_IDS: usize = 8192;
/// Pairs that one layer keeps at most, in each domain.
pub const MAX_PAIRS: usize = 4096;
/// Label of rows that nobody gave one.
pub const DEFAULT_DOMAIN: &str = "all";

/// Which rows of a source a heat was made from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// All of them.
    #[default]
    Whole,
    /// The first half of its steps.
    FirstHalf,
    /// The rest.
    SecondHalf,
}

impl Part {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Part::Whole => "whole",
            Part::FirstHalf => "first-half",
            Part::SecondHalf => "second-half",
        }
    }

    /// Whether two parts of one source have rows in common.
    pub fn overlaps(self, other: Part) -> bool {
        self == other || self == Part::Whole || other == Part::Whole
    }
}

/// Where rows came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// File name, or what was decoded.
    pub name: String,
    /// Hash of its bytes.
    pub digest: String,
    /// Which of its rows.
    pub part: Part,
}

/// One layer's heat in one domain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerHeat {
    /// Rows (one token in one layer) that were counted.
    pub rows: u64,
    /// How often each expert was asked for.
    pub counts: Vec<u64>,
    /// Sampled rows: the experts of one token.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sets: Vec<Vec<u16>>,
    /// For each id of `sets` how many other experts were asked for since it last was; null = never before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ages: Vec<Vec<Option<u32>>>,
    /// Weight of each sampled row, where it is not the same for all (merged and decayed heat).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<f32>,
    /// `(i, j, rows with both)`, from sources that have no rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pairs: Vec<(u16, u16, u64)>,
}

impl LayerHeat {
    /// Weight of a sampled row.
    pub fn weight(&self, set: usize) -> f64 {
        self.weights.get(set).copied().map_or(1.0, f64::from)
    }

    /// Experts that a row asks for, on average.
    pub fn mean_width(&self) -> f64 {
        if self.rows == 0 { 0.0 } else { self.counts.iter().map(|&c| c as f64).sum::<f64>() / self.rows as f64 }
    }
}

/// Rows of one kind of text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Domain {
    /// Its label.
    pub label: String,
    /// Its layers.
    pub layers: BTreeMap<LayerId, LayerHeat>,
}

/// A heat file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heat {
    /// Format version.
    pub version: u32,
    /// The model it was counted on; `None` when the source did not say.
    pub model_id: Option<String>,
    /// Experts of a layer.
    pub experts: u32,
    /// What it was made from.
    pub sources: Vec<Source>,
    /// Rows by kind of text.
    pub domains: Vec<Domain>,
}

impl Heat {
    /// Reads a heat file's text and checks that it does not contradict itself.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let syntax = |e: serde_json::Error| PlanError::Inconsistent(format!("not a valid heat profile: {e}"));
        let Version { version } = serde_json::from_str(text).map_err(syntax)?;
        if version > HEAT_VERSION {
            return Err(PlanError::Inconsistent(format!(
                "heat version {version}, this program reads up to {HEAT_VERSION}; use a newer argodrive"
            )));
        }
        let heat: Heat = serde_json::from_str(text).map_err(syntax)?;
        heat.check()?;
        Ok(heat)
    }

    /// The heat as one line of JSON.
    pub fn to_json(&self) -> Result<String, PlanError> {
        serde_json::to_string(self).map(|s| s + "\n").map_err(|e| PlanError::Syntax(e.to_string()))
    }

    /// Hash of its content.
    pub fn hash(&self) -> Result<String, PlanError> {
        Ok(format!("{:032x}", xxhash_rust::xxh3::xxh3_128(self.to_json()?.as_bytes())))
    }

    /// Layers that any domain has.
    pub fn layers(&self) -> Vec<LayerId> {
        let mut layers: Vec<LayerId> = self.domains.iter().flat_map(|d| d.layers.keys().copied()).collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// Rows in all.
    pub fn rows(&self) -> u64 {
        self.domains.iter().flat_map(|d| d.layers.values()).fold(0, |sum, l| sum.saturating_add(l.rows))
    }

    /// Only the domains with these labels.
    pub fn only(&self, labels: &[String]) -> Result<Heat, PlanError> {
        let known: Vec<&str> = self.domains.iter().map(|d| d.label.as_str()).collect();
        if let Some(unknown) = labels.iter().find(|l| !known.contains(&l.as_str())) {
            return Err(PlanError::Inconsistent(format!(
                "the heat has no domain `{unknown}`; it has {}",
                known.join(", ")
            )));
        }
        let domains = self.domains.iter().filter(|d| labels.contains(&d.label)).cloned().collect();
        Ok(Heat { domains, ..self.clone() })
    }

    /// Whether the heat can be of a model with these layers and experts; `model_id` is compared when both have one.
    pub fn fits(&self, model_id: &str, layers: &[LayerId], experts: u32) -> Result<(), PlanError> {
        let bad = |reason: String| Err(PlanError::Inconsistent(reason));
        if let Some(own) = self.model_id.as_ref().filter(|own| *own != model_id) {
            return bad(format!(
                "the heat was counted on model {own}, the store holds {model_id}; count it on this store"
            ));
        }
        if self.experts != experts {
            return bad(format!(
                "the heat is of a model with {} experts in a layer, this one has {experts}; count it on this model",
                self.experts
            ));
        }
        if let Some(extra) = self.layers().iter().find(|l| !layers.contains(l)) {
            return bad(format!(
                "the heat has layer {}, which is no layer with experts in this model (those are {}); if the trace counts \
                 layers differently, use `argodrive heat --layer-base`",
                extra.0,
                span(layers)
            ));
        }
        Ok(())
    }

    /// Nothing contradicts itself.
    pub fn check(&self) -> Result<(), PlanError> {
        let bad = |reason: String| Err(PlanError::Inconsistent(format!("heat: {reason}")));
        if self.experts == 0 || self.experts > u32::from(u16::MAX) {
            return bad(format!("{} experts in a layer; expected 1 to {}", self.experts, u16::MAX));
        }
        for (index, domain) in self.domains.iter().enumerate() {
            if self.domains[..index].iter().any(|d| d.label == domain.label) {
                return bad(format!("domain `{}` stands twice", domain.label));
            }
            for (layer, heat) in &domain.layers {
                if let Err(reason) = check_layer(heat, self.experts) {
                    return bad(format!("domain `{}`, layer {}: {reason}", domain.label, layer.0));
                }
            }
        }
        if self.rows() == 0 {
            return bad("it holds no rows; count some first".into());
        }
        Ok(())
    }
}

fn check_layer(heat: &LayerHeat, experts: u32) -> Result<(), String> {
    let known = |id: u16| u32::from(id) < experts;
    if heat.counts.len() != experts as usize {
        return Err(format!("{} counts for {experts} experts", heat.counts.len()));
    }
    if heat.counts.iter().try_fold(0u64, |sum, &c| sum.checked_add(c)).is_none() {
        return Err("the counts together exceed 64 bits; decay or count again".into());
    }
    if !heat.ages.is_empty() && heat.ages.len() != heat.sets.len() {
        return Err(format!("{} rows and {} lists of ages", heat.sets.len(), heat.ages.len()));
    }
    if !heat.weights.is_empty() && heat.weights.len() != heat.sets.len() {
        return Err(format!("{} rows and {} weights", heat.sets.len(), heat.weights.len()));
    }
    if let Some(weight) = heat.weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
        return Err(format!("a row has weight {weight}"));
    }
    for (index, set) in heat.sets.iter().enumerate() {
        if let Some(id) = set.iter().find(|id| !known(**id)) {
            return Err(format!("row {index} names expert {id}, the layer has {experts}"));
        }
        if set.iter().enumerate().any(|(i, id)| set[..i].contains(id)) {
            return Err(format!("row {index} names an expert twice"));
        }
        if heat.ages.get(index).is_some_and(|ages| ages.len() != set.len()) {
            return Err(format!("row {index} has {} experts and another number of ages", set.len()));
        }
    }
    match heat.pairs.iter().find(|(i, j, _)| i == j || !known(*i) || !known(*j)) {
        Some((i, j, _)) => Err(format!("pair ({i}, {j}) is no pair of {experts} experts")),
        None => Ok(()),
    }
}

fn span(layers: &[LayerId]) -> String {
    match (layers.first(), layers.last()) {
        (Some(first), Some(last)) if last.0 - first.0 + 1 == layers.len() as u16 => {
            format!("{} to {}", first.0, last.0)
        }
        (Some(first), Some(last)) => format!("{} of {} to {}", layers.len(), first.0, last.0),
        _ => "none".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn small() -> Heat {
        let layer = LayerHeat {
            rows: 2,
            counts: vec![2, 1, 1, 0],
            sets: vec![vec![0, 1], vec![0, 2]],
            ages: vec![vec![None, None], vec![Some(1), None]],
            ..LayerHeat::default()
        };
        Heat {
            version: HEAT_VERSION,
            model_id: None,
            experts: 4,
            sources: vec![Source { name: "a".into(), digest: "d".into(), part: Part::Whole }],
            domains: vec![Domain { label: DEFAULT_DOMAIN.into(), layers: [(LayerId(3), layer)].into() }],
        }
    }

    #[test]
    fn codec_round_trip() {
        let heat = small();
        assert_eq!(Heat::parse(&heat.to_json().unwrap()).unwrap(), heat);
        assert_eq!(heat.rows(), 2);
        let newer = heat.to_json().unwrap().replace("\"version\":1", "\"version\":2");
        assert!(Heat::parse(&newer).unwrap_err().to_string().contains("newer"));
        assert!(Heat::parse("{").is_err());
    }

    #[test]
    fn contradictions_are_named() {
        let broken = |change: &dyn Fn(&mut LayerHeat)| {
            let mut heat = small();
            heat.domains[0].layers.values_mut().for_each(change);
            let message = Heat::parse(&heat.to_json().unwrap()).unwrap_err().to_string();
            assert!(message.contains("layer 3"), "{message}");
            message
        };
        assert!(broken(&|l| l.counts.truncate(3)).contains("3 counts for 4"));
        assert!(broken(&|l| l.counts[0] = u64::MAX).contains("64 bits"));
        assert!(broken(&|l| l.sets[0][0] = 4).contains("expert 4"));
        assert!(broken(&|l| l.sets[0][1] = 0).contains("twice"));
        assert!(broken(&|l| l.ages.truncate(1)).contains("ages"));
        assert!(broken(&|l| l.weights = vec![1.0]).contains("weights"));
        assert!(broken(&|l| l.weights = vec![1.0, -1.0]).contains("weight -1"));
        assert!(broken(&|l| l.pairs = vec![(1, 1, 2)]).contains("pair"));
        let mut empty = small();
        empty.domains.clear();
        assert!(empty.check().unwrap_err().to_string().contains("no rows"));
    }

    #[test]
    fn another_models_heat_is_refused() {
        let mut heat = small();
        let layers: Vec<LayerId> = (1..=5).map(LayerId).collect();
        assert_eq!(heat.fits("m", &layers, 4), Ok(()));
        assert!(heat.fits("m", &layers, 8).unwrap_err().to_string().contains("8"));
        assert!(heat.fits("m", &layers[..1], 4).unwrap_err().to_string().contains("layer 3"));
        heat.model_id = Some("other".into());
        assert!(heat.fits("m", &layers, 4).unwrap_err().to_string().contains("other"));
        assert!(heat.only(&["code".into()]).unwrap_err().to_string().contains("it has all"));
    }
}
