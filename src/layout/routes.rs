//! Route files of this program and of others, as heat: which experts a router chose, token by token, or counted. The
//! text is given and not trusted; errors name its line. `routes_counts` reads the formats that only hold counts.

use super::heat::{Heat, Part, Source};
use super::heat_build::HeatBuilder;
use super::routes_counts;
use crate::ids::{ExpertId, LayerId};
use serde::Deserialize;
use std::collections::BTreeMap;

/// A route file's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteFormat {
    /// `routes.csv` of a trace: `step,phase,pos,layer,expert,weight,kept`.
    Routes,
    /// One JSON object a line with `tok` and `layers`, a list of ids for each layer.
    WarpJsonl,
    /// `# route_trace v1`, then `turn,phase,step,layer,slot,expert,...`.
    RouteTrace,
    /// One JSON object with `heat` and `pairs` for each layer.
    Coactivation,
    /// `layer n id:count id:count ...` lines.
    HotList,
    /// One JSON object of `"L<layer>-E<expert>.bin": count`.
    UsageJson,
}

impl RouteFormat {
    /// All of them with their names on the command line.
    pub const ALL: [(RouteFormat, &'static str); 6] = [
        (RouteFormat::Routes, "routes"),
        (RouteFormat::WarpJsonl, "warp-jsonl"),
        (RouteFormat::RouteTrace, "route-trace"),
        (RouteFormat::Coactivation, "coactivation"),
        (RouteFormat::HotList, "hot-list"),
        (RouteFormat::UsageJson, "usage-json"),
    ];

    /// The format of a text, by how it begins.
    pub fn detect(text: &str) -> Option<Self> {
        let text = text.trim_start_matches('\u{feff}').trim_start();
        let first = text.lines().next().unwrap_or("");
        // Where everything is on one line, the first keys decide.
        let head: String = text.chars().take(4096).collect();
        if first.starts_with("step,phase,pos,layer,expert") {
            Some(RouteFormat::Routes)
        } else if first.starts_with("# route_trace") || first.starts_with("turn,phase,step,layer") {
            Some(RouteFormat::RouteTrace)
        } else if first.starts_with('{') && head.contains("\"tok\"") && head.contains("\"layers\"") {
            Some(RouteFormat::WarpJsonl)
        } else if first.starts_with('{') && head.contains("\"n_expert_per_layer\"") {
            Some(RouteFormat::Coactivation)
        } else if text.starts_with('{') && head.contains("\"L") && head.contains("-E") {
            Some(RouteFormat::UsageJson)
        } else if first.split_whitespace().nth(2).is_some_and(|w| w.contains(':')) {
            Some(RouteFormat::HotList)
        } else {
            None
        }
    }
}

/// What a caller knows about a route file.
#[derive(Clone, Debug)]
pub struct RouteOptions {
    /// The format; `None` = look.
    pub format: Option<RouteFormat>,
    /// Experts of a layer, where the file does not say or must agree.
    pub experts: Option<u32>,
    /// Experts per token, for files that only hold counts.
    pub top_k: Option<u32>,
    /// Added to the file's layer numbers.
    pub layer_base: u16,
    /// Which steps count.
    pub part: Part,
    /// Count rows of rejected drafts too.
    pub rejected: bool,
    /// Label of the domain.
    pub label: String,
    /// The model, if known.
    pub model_id: Option<String>,
}

/// Why a route file is no use.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{}{reason}", line.map(|l| format!("line {l}: ")).unwrap_or_default())]
pub struct RouteError {
    /// The line, from 1, where there is one.
    pub line: Option<usize>,
    /// What is wrong with it, and what to do.
    pub reason: String,
}

pub(super) fn at(line: usize, reason: impl Into<String>) -> RouteError {
    RouteError { line: Some(line), reason: reason.into() }
}

pub(super) fn whole(reason: impl Into<String>) -> RouteError {
    RouteError { line: None, reason: reason.into() }
}

/// One token in one layer, and the line that said so.
struct Row {
    layer: LayerId,
    ids: Vec<ExpertId>,
    line: usize,
}

/// Rows by token, in order.
#[derive(Default)]
struct Steps {
    steps: Vec<Vec<Row>>,
    experts: Option<u32>,
}

/// Reads `text`, called `name`, as heat.
pub fn import(text: &str, name: &str, options: &RouteOptions) -> Result<Heat, RouteError> {
    let format = options.format.or_else(|| RouteFormat::detect(text)).ok_or_else(|| {
        let names: Vec<&str> = RouteFormat::ALL.iter().map(|(_, n)| *n).collect();
        let empty = if text.trim().is_empty() { "the file is empty" } else { "no known format" };
        whole(format!("{empty}; known formats are {}", names.join(", ")))
    })?;
    let digest = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()));
    let source = Source { name: name.to_string(), digest, part: options.part };
    let steps = match format {
        RouteFormat::Routes => our_routes(text, options)?,
        RouteFormat::WarpJsonl => warp(text)?,
        RouteFormat::RouteTrace => route_trace(text)?,
        RouteFormat::Coactivation | RouteFormat::HotList | RouteFormat::UsageJson => {
            if options.part != Part::Whole {
                return Err(whole(
                    "this format only holds counts, which cannot be split into halves; leave --split out",
                ));
            }
            return routes_counts::import(text, format, source, options);
        }
    };
    heat_of(steps, source, options)
}

fn heat_of(steps: Steps, source: Source, options: &RouteOptions) -> Result<Heat, RouteError> {
    let highest = steps.steps.iter().flatten().flat_map(|r| &r.ids).map(|id| u32::from(id.0)).max();
    let Some(highest) = highest else { return Err(whole("no routes in it")) };
    let experts = experts_of(steps.experts, options)?.unwrap_or(highest + 1);
    let half = steps.steps.len() / 2;
    if options.part != Part::Whole && half == 0 {
        return Err(whole(format!("{} step cannot be split into halves", steps.steps.len())));
    }
    let mut builder = HeatBuilder::new(experts).map_err(|e| whole(e.to_string()))?;
    for (index, step) in steps.steps.iter().enumerate() {
        let counted = match options.part {
            Part::Whole => true,
            Part::FirstHalf => index < half,
            Part::SecondHalf => index >= half,
        };
        for row in step {
            let layer = shifted(u64::from(row.layer.0), options.layer_base).map_err(|r| at(row.line, r))?;
            builder.row(layer, &row.ids, counted).map_err(|e| at(row.line, e.to_string()))?;
        }
    }
    builder.finish(options.model_id.clone(), vec![source], &options.label).map_err(|e| whole(e.to_string()))
}

/// Experts of a layer as file and caller say.
pub(super) fn experts_of(file: Option<u32>, options: &RouteOptions) -> Result<Option<u32>, RouteError> {
    match (file, options.experts) {
        (Some(a), Some(b)) if a != b => Err(whole(format!(
            "it is of a model with {a} experts in a layer, {b} were expected; use routes of this model"
        ))),
        (a, b) => Ok(a.or(b)),
    }
}

/// A layer number of a file, as a layer of the model.
pub(super) fn shifted(layer: u64, base: u16) -> Result<LayerId, String> {
    let sum = layer.checked_add(u64::from(base)).and_then(|l| u16::try_from(l).ok());
    sum.map(LayerId).ok_or_else(|| format!("layer {layer} is beyond {}", u16::MAX))
}

/// Fields of comma-separated lines below a header, with comment lines left out.
struct Fields<'a> {
    line: usize,
    fields: Vec<&'a str>,
}

impl Fields<'_> {
    fn number(&self, index: usize, name: &str) -> Result<u64, RouteError> {
        let text = self.fields.get(index).copied().unwrap_or("").trim();
        text.parse().map_err(|_| at(self.line, format!("{name} is `{text}`, expected a whole number")))
    }

    fn expert(&self, index: usize) -> Result<ExpertId, RouteError> {
        let id = self.number(index, "expert")?;
        u16::try_from(id).map(ExpertId).map_err(|_| at(self.line, format!("expert {id} is beyond {}", u16::MAX)))
    }

    fn layer(&self, index: usize) -> Result<LayerId, RouteError> {
        let layer = self.number(index, "layer")?;
        u16::try_from(layer).map(LayerId).map_err(|_| at(self.line, format!("layer {layer} is beyond {}", u16::MAX)))
    }
}

/// Lines of a table whose header starts with `header`; every line must have as many fields as the header.
fn table<'a>(text: &'a str, header: &str) -> Result<Vec<Fields<'a>>, RouteError> {
    let mut lines =
        text.lines().enumerate().map(|(i, l)| (i + 1, l)).filter(|(_, l)| !l.starts_with('#') && !l.trim().is_empty());
    let Some((line, first)) = lines.next() else { return Err(whole("the file is empty")) };
    let names: Vec<&str> = first.trim_start_matches('\u{feff}').split(',').map(str::trim).collect();
    if !names.iter().zip(header.split(',')).all(|(a, b)| *a == b) || names.len() < header.split(',').count() {
        return Err(at(line, format!("the header is `{first}`, expected `{header}`")));
    }
    lines
        .map(|(line, text)| {
            let fields: Vec<&str> = text.split(',').collect();
            if fields.len() != names.len() {
                return Err(at(line, format!("{} fields, the header has {}", fields.len(), names.len())));
            }
            Ok(Fields { line, fields })
        })
        .collect()
}

/// Groups single routes by token and layer; tokens in ascending order of their key.
struct Grouped<K: Ord>(BTreeMap<K, BTreeMap<LayerId, Row>>);

impl<K: Ord> Grouped<K> {
    fn add(&mut self, key: K, layer: LayerId, id: ExpertId, line: usize) {
        let rows = self.0.entry(key).or_default();
        rows.entry(layer).or_insert_with(|| Row { layer, ids: Vec::new(), line }).ids.push(id);
    }

    fn steps(self) -> Vec<Vec<Row>> {
        self.0.into_values().map(|rows| rows.into_values().collect()).collect()
    }
}

fn our_routes(text: &str, options: &RouteOptions) -> Result<Steps, RouteError> {
    let mut grouped = Grouped(BTreeMap::new());
    for f in table(text, "step,phase,pos,layer,expert,weight,kept")? {
        let kept = match f.fields[6].trim() {
            "0" => false,
            "1" => true,
            other => return Err(at(f.line, format!("kept is `{other}`, expected 0 or 1"))),
        };
        if kept || options.rejected {
            grouped.add((f.number(0, "step")?, f.number(2, "pos")?), f.layer(3)?, f.expert(4)?, f.line);
        }
    }
    Ok(Steps { steps: grouped.steps(), experts: None })
}

fn route_trace(text: &str) -> Result<Steps, RouteError> {
    let mut experts = None;
    for (index, line) in text.lines().enumerate().take_while(|(_, l)| l.starts_with('#')) {
        for (key, value) in line.split_whitespace().filter_map(|w| w.split_once('=')) {
            if key == "n_expert" {
                experts = Some(value.parse().map_err(|_| at(index + 1, format!("n_expert is `{value}`")))?);
            }
        }
    }
    let mut grouped = Grouped(BTreeMap::new());
    for f in table(text, "turn,phase,step,layer,slot,expert")? {
        let key = (f.number(0, "turn")?, f.number(1, "phase")?, f.number(2, "step")?);
        grouped.add(key, f.layer(3)?, f.expert(5)?, f.line);
    }
    Ok(Steps { steps: grouped.steps(), experts })
}

fn warp(text: &str) -> Result<Steps, RouteError> {
    #[derive(Deserialize)]
    struct Token {
        layers: Vec<Vec<u16>>,
    }
    let mut steps: Vec<Vec<Row>> = Vec::new();
    for (index, text) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let line = index + 1;
        let token: Token = serde_json::from_str(text).map_err(|e| at(line, e.to_string()))?;
        if let Some(first) = steps.first().filter(|s| s.len() != token.layers.len()) {
            return Err(at(line, format!("{} layers, the first token has {}", token.layers.len(), first.len())));
        }
        let row = |(layer, ids): (usize, Vec<u16>)| {
            let layer = u16::try_from(layer).map_err(|_| at(line, format!("layer {layer} is beyond {}", u16::MAX)))?;
            Ok(Row { layer: LayerId(layer), ids: ids.into_iter().map(ExpertId).collect(), line })
        };
        steps.push(token.layers.into_iter().enumerate().map(row).collect::<Result<_, RouteError>>()?);
    }
    Ok(Steps { steps, experts: None })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn options() -> RouteOptions {
        RouteOptions {
            format: None,
            experts: None,
            top_k: None,
            layer_base: 0,
            part: Part::Whole,
            rejected: false,
            label: "all".into(),
            model_id: None,
        }
    }

    const OURS: &str = "step,phase,pos,layer,expert,weight,kept\n\
        0,prefill,0,1,3,0.5,1\n0,prefill,1,1,4,0.5,1\n0,prefill,0,1,0,0.5,1\n1,verify,2,1,7,0.5,0\n1,verify,2,1,2,0.5,1\n";
    const WARP: &str = "{\"tok\": 0, \"layers\": [[0, 2], [1, 3]]}\n{\"tok\": 1, \"layers\": [[0, 3], [1, 2]]}\n";
    const TRACE: &str = "# route_trace v1\n# model=x n_layer=2 n_expert=9 n_expert_used=1\n\
        turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n0,0,0,1,0,8,0.2,0,10\n0,1,0,1,0,7,0.2,0,10\n";

    fn layer(heat: &Heat, layer: u16) -> &super::super::heat::LayerHeat {
        &heat.domains[0].layers[&LayerId(layer)]
    }

    #[test]
    fn rows_are_found_in_every_format() {
        let heat = import(OURS, "r", &options()).unwrap();
        assert_eq!(layer(&heat, 1).sets, [vec![3, 0], vec![4], vec![2]]);
        assert_eq!(heat.experts, 5);
        let all = import(OURS, "r", &RouteOptions { rejected: true, ..options() }).unwrap();
        assert_eq!(layer(&all, 1).counts[7], 1);
        let heat = import(WARP, "w", &RouteOptions { layer_base: 1, ..options() }).unwrap();
        assert_eq!(layer(&heat, 2).counts, [0, 2, 1, 1]);
        let heat = import(TRACE, "t", &options()).unwrap();
        assert_eq!((heat.experts, layer(&heat, 1).rows), (9, 2));
    }

    #[test]
    fn halves_share_nothing_and_the_second_starts_warm() {
        let part = |part| import(WARP, "w", &RouteOptions { part, ..options() }).unwrap();
        let (first, second) = (part(Part::FirstHalf), part(Part::SecondHalf));
        assert_eq!(
            (layer(&first, 0).counts.clone(), layer(&second, 0).counts.clone()),
            (vec![1, 0, 1, 0], vec![1, 0, 0, 1])
        );
        assert_eq!(layer(&second, 0).ages, [[Some(3), None]], "2, 1 and 3 of both layers came in between");
    }

    #[test]
    fn errors_name_the_line() {
        let says = |text: &str, options: &RouteOptions| import(text, "x", options).unwrap_err().to_string();
        for (from, to, expected) in [
            ("0,prefill,1,1,4", "0,prefill,1,1,four", "line 3: expert is `four`"),
            ("0,prefill,1,1,4,0.5,1", "0,prefill,1,1,4", "line 3: 5 fields"),
            ("0.5,0\n", "0.5,maybe\n", "line 5: kept"),
            ("1,1,4", "1,1,70000", "line 3: expert 70000"),
            ("1,1,4", "1,1,99999999999999999999", "line 3: expert"),
            ("pos,layer", "position,layer", "line 1: the header"),
            ("0,prefill,0,1,0", "0,prefill,0,1,3", "line 2: layer 1: expert 3 stands twice"),
        ] {
            let text = OURS.replace(from, to);
            let message = says(&text, &RouteOptions { format: Some(RouteFormat::Routes), ..options() });
            assert!(message.starts_with(expected), "{message}");
        }
        assert!(says(WARP, &RouteOptions { experts: Some(3), ..options() }).contains("line 1: layer 1: expert 3"));
        assert!(says(TRACE, &RouteOptions { experts: Some(3), ..options() }).contains("9 experts"));
        assert!(says(&WARP.replace("[0, 3], ", ""), &options()).contains("line 2: 1 layers"));
        assert!(says(&WARP.replace("[0, 3]", "[0, -3]"), &options()).contains("line 2"));
        assert!(says("", &options()).contains("empty"));
        assert!(says("hello", &options()).contains("warp-jsonl"));
        assert!(says(OURS.lines().next().unwrap(), &options()).contains("no routes"));
        let one = WARP.lines().next().unwrap();
        assert!(says(one, &RouteOptions { part: Part::FirstHalf, ..options() }).contains("halves"));
        let far = RouteOptions { layer_base: u16::MAX, ..options() };
        assert!(says(WARP, &far).contains("beyond"));
    }
}
