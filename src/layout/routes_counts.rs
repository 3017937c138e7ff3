//! Files of other programs that hold counts and no rows, as heat: hot lists, usage files, co-activation tables.

use super::heat::{Domain, HEAT_VERSION, Heat, LayerHeat, MAX_PAIRS, Source};
use super::routes::{RouteError, RouteFormat, RouteOptions, at, experts_of, shifted, whole};
use crate::ids::LayerId;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Layers of counts, before the number of experts is known.
#[derive(Default)]
struct Counted {
    layers: BTreeMap<LayerId, LayerHeat>,
    experts: Option<u32>,
    top_k: Option<u32>,
}

pub(super) fn import(
    text: &str,
    format: RouteFormat,
    source: Source,
    options: &RouteOptions,
) -> Result<Heat, RouteError> {
    let mut counted = match format {
        RouteFormat::Coactivation => coactivation(text, options)?,
        RouteFormat::UsageJson => usage(text, options)?,
        _ => hot_list(text, options)?,
    };
    let highest = counted.layers.values().map(|l| l.counts.len() as u32).max();
    let Some(highest) = highest else { return Err(whole("no counts in it")) };
    let experts = experts_of(counted.experts, options)?.unwrap_or(highest);
    if highest > experts {
        return Err(whole(format!("it names expert {} of a layer with {experts}; check --experts", highest - 1)));
    }
    let top_k = counted.top_k.or(options.top_k).filter(|&k| k > 0 && k <= experts);
    for (layer, heat) in &mut counted.layers {
        heat.counts.resize(experts as usize, 0);
        if heat.rows == 0 {
            let Some(k) = top_k else {
                return Err(whole(
                    "this format does not say how many experts a token asks for; give --per-token (at least 1, at most the \
                     experts of a layer)",
                ));
            };
            let sum = heat.counts.iter().try_fold(0u64, |s, &c| s.checked_add(c));
            let sum = sum.ok_or_else(|| whole(format!("layer {}: the counts together exceed 64 bits", layer.0)))?;
            heat.rows = sum.div_ceil(u64::from(k)).max(1);
        }
    }
    let heat = Heat {
        version: HEAT_VERSION,
        model_id: options.model_id.clone(),
        experts,
        sources: vec![source],
        domains: vec![Domain { label: options.label.clone(), layers: counted.layers }],
    };
    heat.check().map_err(|e| whole(e.to_string()))?;
    Ok(heat)
}

/// Puts a count in its place; a second one for the same expert is an error.
fn put(counts: &mut Vec<u64>, expert: u64, count: u64) -> Result<(), String> {
    if expert >= u64::from(u16::MAX) {
        return Err(format!("expert {expert} is beyond {}", u16::MAX - 1));
    }
    let expert = expert as usize;
    if counts.len() <= expert {
        counts.resize(expert + 1, 0);
    }
    if counts[expert] != 0 {
        return Err(format!("expert {expert} stands twice"));
    }
    counts[expert] = count;
    Ok(())
}

fn hot_list(text: &str, options: &RouteOptions) -> Result<Counted, RouteError> {
    let mut out = Counted::default();
    for (index, text) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#')) {
        let line = index + 1;
        let number = |word: Option<&str>, what: &str| {
            let word = word.unwrap_or("");
            word.parse::<u64>().map_err(|_| at(line, format!("{what} is `{word}`, expected a whole number")))
        };
        let mut words = text.split_whitespace();
        let layer = shifted(number(words.next(), "layer")?, options.layer_base).map_err(|r| at(line, r))?;
        let stated = number(words.next(), "the number of experts")?;
        let mut heat = LayerHeat::default();
        let mut seen = 0;
        for word in words {
            let (id, count) = word.split_once(':').ok_or_else(|| at(line, format!("`{word}` is not `id:count`")))?;
            put(&mut heat.counts, number(Some(id), "expert")?, number(Some(count), "count")?)
                .map_err(|r| at(line, r))?;
            seen += 1;
        }
        if seen != stated {
            return Err(at(line, format!("it says {stated} experts and lists {seen}")));
        }
        if out.layers.insert(layer, heat).is_some() {
            return Err(at(line, format!("layer {} stands twice", layer.0)));
        }
    }
    Ok(out)
}

fn usage(text: &str, options: &RouteOptions) -> Result<Counted, RouteError> {
    /// Keys in file order, so that one that stands twice is seen.
    struct Entries(Vec<(String, u64)>);
    impl<'de> Deserialize<'de> for Entries {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Visitor;
            impl<'de> serde::de::Visitor<'de> for Visitor {
                type Value = Entries;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("an object of counts by file name")
                }
                fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                    let mut out = Vec::new();
                    while let Some(entry) = map.next_entry()? {
                        out.push(entry);
                    }
                    Ok(Entries(out))
                }
            }
            deserializer.deserialize_map(Visitor)
        }
    }
    let Entries(entries) = serde_json::from_str(text).map_err(|e| at(e.line(), e.to_string()))?;
    let mut out = Counted::default();
    for (name, count) in entries {
        let parsed = name.strip_prefix('L').and_then(|n| n.strip_suffix(".bin")).and_then(|n| n.split_once("-E"));
        let parsed = parsed.and_then(|(l, e)| Some((l.parse::<u64>().ok()?, e.parse::<u64>().ok()?)));
        let (layer, expert) = parsed.ok_or_else(|| whole(format!("`{name}` is not `L<layer>-E<expert>.bin`")))?;
        let layer = shifted(layer, options.layer_base).map_err(|r| whole(format!("`{name}`: {r}")))?;
        let heat = out.layers.entry(layer).or_default();
        put(&mut heat.counts, expert, count).map_err(|r| whole(format!("`{name}`: {r}")))?;
    }
    Ok(out)
}

fn coactivation(text: &str, options: &RouteOptions) -> Result<Counted, RouteError> {
    #[derive(Deserialize)]
    struct File {
        n_expert_per_layer: u32,
        k: u32,
        n_decode_tokens: u64,
        layers: Vec<Layer>,
    }
    #[derive(Deserialize)]
    struct Layer {
        layer: u64,
        heat: Vec<u64>,
        #[serde(default)]
        pairs: Vec<(u16, u16, u64, f64)>,
    }
    let file: File = serde_json::from_str(text).map_err(|e| at(e.line(), e.to_string()))?;
    let mut out = Counted { experts: Some(file.n_expert_per_layer), top_k: Some(file.k), ..Counted::default() };
    for layer in file.layers {
        let id = shifted(layer.layer, options.layer_base).map_err(whole)?;
        if layer.heat.len() != file.n_expert_per_layer as usize {
            let (has, said) = (layer.heat.len(), file.n_expert_per_layer);
            return Err(whole(format!("layer {}: {has} counts for {said} experts", layer.layer)));
        }
        let mut pairs: Vec<_> = layer.pairs.into_iter().map(|(i, j, n, _)| (i.min(j), i.max(j), n)).collect();
        pairs.sort_by_key(|&(i, j, n)| (std::cmp::Reverse(n), i, j));
        pairs.truncate(MAX_PAIRS);
        pairs.sort_unstable();
        let heat = LayerHeat { rows: file.n_decode_tokens, counts: layer.heat, pairs, ..LayerHeat::default() };
        if out.layers.insert(id, heat).is_some() {
            return Err(whole(format!("layer {} stands twice", layer.layer)));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::routes::import;
    use super::super::routes::tests::options;
    use super::*;

    #[test]
    fn counts_are_found_in_every_format() {
        let two = RouteOptions { top_k: Some(2), experts: Some(8), ..options() };
        let heat = import("0 3 5:7 1:2 2:1\n1 1 3:4\n", "h", &two).unwrap();
        let layer = &heat.domains[0].layers[&LayerId(0)];
        assert_eq!((layer.counts.clone(), layer.rows), (vec![0, 2, 1, 0, 0, 7, 0, 0], 5));
        let heat = import("{\"L1-E3.bin\": 30, \"L2-E1.bin\": 4}", "u", &two).unwrap();
        assert_eq!(heat.domains[0].layers[&LayerId(1)].counts[3], 30);
        let text = "{\"n_expert_per_layer\": 3, \"k\": 2, \"n_decode_tokens\": 9, \
                     \"layers\": [{\"layer\": 4, \"heat\": [9, 5, 4], \"pairs\": [[2, 0, 4, 1.5]]}]}";
        let heat = import(text, "c", &options()).unwrap();
        let layer = &heat.domains[0].layers[&LayerId(4)];
        assert_eq!((layer.rows, layer.pairs.clone()), (9, vec![(0, 2, 4)]));
    }

    #[test]
    fn bad_counts_are_named() {
        let two = RouteOptions { top_k: Some(2), experts: Some(8), ..options() };
        let says = |text: &str, options: &RouteOptions| import(text, "x", options).unwrap_err().to_string();
        assert!(says("0 1 5:7\n", &options()).contains("--per-token"));
        assert!(says("0 2 5:7\n", &two).contains("line 1: it says 2 experts and lists 1"));
        assert!(says("0 2 5:7 5:6\n", &two).contains("line 1: expert 5 stands twice"));
        assert!(says("0 1 5:7\n0 1 5:7\n", &two).contains("line 2: layer 0 stands twice"));
        assert!(says("0 1 5:99999999999999999999\n", &two).contains("line 1: count"));
        assert!(says("0 1 9:1\n", &two).contains("--experts"));
        assert!(says(&format!("0 2 1:{0} 2:{0}\n", u64::MAX), &two).contains("64 bits"));
        assert!(says("{\"L1-E3.bin\": 3, \"L1-E3.bin\": 3}", &two).contains("twice"));
        assert!(says("{\"L1-E3.bin\": 3, \"L1-E.bin\": 3}", &two).contains("L<layer>-E<expert>.bin"));
        let half = RouteOptions { part: super::super::heat::Part::FirstHalf, ..two };
        assert!(says("0 1 5:7\n", &half).contains("--split"));
    }
}
