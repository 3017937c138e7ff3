//! Arms: whole run configurations under names, in which settings they differ, and what each must prove. Everything that can
//! be wrong with them is found here, before anything is measured.

use super::CampaignError;
use crate::bench::config::{Asked, OF_DRAFTS, OF_PREFETCH, READING, RunConfig};
use crate::bench::environment;
use crate::bench::inputs::{self, digest, drives_digest};
use crate::bench::planning::{plan_and_mounts, read_plan};
use crate::decode::speculate::{DepthPolicy, DrafterKind};
use crate::drive::spec::DriveSpec;
use crate::knob::Knob;
use crate::layout::plan::Plan;
use crate::open::Model;
use crate::reader::{DispatchPolicy, PrefetchPool};
use crate::store::manifest::StoreManifest;
use crate::store::trunk::TrunkResidency;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Most arms of one campaign.
pub const MAX_ARMS: usize = 12;
/// Settings that decide which tokens come out: arms that differ in one cannot be compared.
const TOKENS: [&str; 7] =
    ["max_new", "special", "sampler.temperature", "sampler.top_p", "sampler.top_k", "sampler.seed", "model"];

/// One arm.
#[derive(Clone, Debug)]
pub struct Arm {
    /// Its name; the first arm is the control.
    pub name: String,
    /// Its configuration.
    pub asked: Asked,
    /// Settings that must be proved whether or not the arms differ in them.
    pub fired: BTreeSet<Knob>,
}

/// A setting in which arms differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Difference {
    /// The setting, as in a run configuration.
    pub setting: String,
    /// Its value in each arm, in the order of arms.
    pub values: Vec<String>,
}

/// An arm that can be run.
pub struct ReadyArm {
    /// Its name.
    pub name: String,
    /// Its configuration.
    pub asked: Asked,
    /// What must be proved for a run of it to count.
    pub under_test: BTreeSet<Knob>,
    /// Its model; arms share one where they can.
    pub model: Rc<Model>,
    /// Its plan and drives; `None` for experts in memory.
    pub streamed: Option<(Plan, Vec<DriveSpec>)>,
    /// Digests of what goes into it: a run whose inputs are no longer these is measured again.
    pub inputs: BTreeMap<String, String>,
}

/// The values of a configuration by dotted name.
pub fn by_name(config: &RunConfig) -> Result<BTreeMap<String, String>, serde_json::Error> {
    fn walk(prefix: &str, value: &Value, out: &mut BTreeMap<String, String>) {
        match value {
            Value::Object(inner) => {
                for (key, value) in inner {
                    let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    walk(&name, value, out);
                }
            }
            Value::String(text) => drop(out.insert(prefix.into(), text.clone())),
            Value::Null => drop(out.insert(prefix.into(), "none".into())),
            other => drop(out.insert(prefix.into(), other.to_string())),
        }
    }
    let mut out = BTreeMap::new();
    walk("", &serde_json::to_value(config)?, &mut out);
    Ok(out)
}

/// The settings of a configuration by dotted name: display, and what tells two of them apart.
fn settings(config: &RunConfig) -> Result<BTreeMap<String, (String, String)>, CampaignError> {
    let flat = by_name(config).map_err(|e| CampaignError::Option(e.to_string()))?;
    let mut out: BTreeMap<_, _> = flat.into_iter().map(|(name, value)| (name, (value.clone(), value))).collect();
    for input in ["store", "prompt", "prompt_file", "prompts", "under_test"] {
        out.remove(input); // prompts belong to the campaign; the store counts by its model
    }
    if let Some(trace) = out.get_mut("trace") {
        let on = if config.trace.is_some() { "on" } else { "off" };
        *trace = (on.into(), on.into());
    }
    let model = StoreManifest::open(&config.store).map_err(crate::open::OpenError::from)?.model_id;
    out.insert("model".into(), (model.clone(), model));
    if let Some(path) = &config.plan {
        let plan = read_plan(path)?;
        let hash = plan.hash()?;
        let says = format!("{} over {} drives ({})", plan.planner, plan.drives.len(), &hash[..8.min(hash.len())]);
        out.insert("plan".into(), (says, hash));
    }
    // Files count by what is in them.
    let files = [
        ("drives", &config.drives),
        ("reader.prefetch_table", &config.reader.prefetch_table),
        ("reader.cache_heat", &config.reader.cache_heat),
    ];
    for (name, path) in files {
        if let Some(path) = path {
            out.insert(name.into(), (path.display().to_string(), file_digest(path)?));
        }
    }
    Ok(out)
}

fn file_digest(path: &Path) -> Result<String, CampaignError> {
    inputs::file_digest(path).map_err(|e| CampaignError::Option(format!("{}: {e}", path.display())))
}

/// The settings in which arms differ, by name. Arms that would not generate the same text are refused.
pub fn differences(arms: &[Arm]) -> Result<Vec<Difference>, CampaignError> {
    let all = arms.iter().map(|a| settings(&a.asked.config)).collect::<Result<Vec<_>, _>>()?;
    let names: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let mut out = Vec::new();
    for name in names {
        let of =
            |s: &BTreeMap<String, (String, String)>| s.get(name).cloned().unwrap_or(("none".into(), "none".into()));
        let values: Vec<(String, String)> = all.iter().map(of).collect();
        if values.iter().all(|v| v.1 == values[0].1) {
            continue;
        }
        let values: Vec<String> = values.into_iter().map(|v| v.0).collect();
        if TOKENS.contains(&name.as_str()) {
            return Err(CampaignError::Option(format!(
                "the arms differ in `{name}` ({}): they would not generate the same text, and speeds of different texts \
                 cannot be compared; give all arms the same",
                values.join(", ")
            )));
        }
        out.push(Difference { setting: name.clone(), values });
    }
    Ok(out)
}

/// The knobs behind a setting.
fn knobs(setting: &str) -> Vec<Knob> {
    let leaf = setting.rsplit('.').next().unwrap_or(setting);
    match leaf {
        "plan" | "drives" => vec![Knob::Layout],
        "dispatch" => vec![Knob::Dispatch, Knob::Split],
        "prefetch_table" => vec![Knob::Prefetch],
        "cache_heat" => vec![Knob::CachePolicy],
        "draft_model" => vec![Knob::Speculate],
        _ => Knob::named(leaf).into_iter().collect(),
    }
}

/// What runs of `arm` must prove: settings in which arms differ, those of its own `under_test` and of `fired`; layout and
/// pace wherever they apply. What an arm cannot show, because it reads no drive, nothing ahead, or keeps nothing, is left
/// out; so is the choice between copies where there are none, if another arm has some (`choice_elsewhere`).
fn under_test(
    arm: &Arm,
    streamed: Option<&(Plan, Vec<DriveSpec>)>,
    differences: &[Difference],
    choice_elsewhere: bool,
) -> Result<BTreeSet<Knob>, CampaignError> {
    let mut out: BTreeSet<Knob> = differences.iter().flat_map(|d| knobs(&d.setting)).collect();
    if choice_elsewhere && streamed.is_some_and(|(plan, _)| plan.replica_count() == 0) {
        out.retain(|k| !matches!(k, Knob::Dispatch | Knob::Split));
    }
    if !arm.asked.config.under_test.is_empty() {
        out.extend(arm.asked.under_test()?);
    }
    out.extend(&arm.fired);
    match streamed {
        Some((_, mounts)) => {
            out.insert(Knob::Layout);
            if mounts.iter().any(|m| m.emulate.is_some()) {
                out.insert(Knob::Pace);
            }
            if mounts.iter().any(|m| !m.faults.is_empty()) {
                out.insert(Knob::Faults);
            }
        }
        None => {
            out.retain(|k| arm.fired.contains(k) || !(READING.contains(k) || *k == Knob::Layout || *k == Knob::Trace))
        }
    }
    // What prefetch is not there for has nothing to show.
    if arm.asked.config.reader.prefetch == crate::reader::PrefetchPolicy::None {
        out.retain(|k| !OF_PREFETCH.contains(k) || arm.fired.contains(k));
    } else if arm.asked.config.reader.prefetch_pool == PrefetchPool::Shared
        && !arm.fired.contains(&Knob::PrefetchQueueDepth)
    {
        out.remove(&Knob::PrefetchQueueDepth);
    }
    if arm.asked.config.reader.cache_bytes == 0 && !arm.fired.contains(&Knob::CachePolicy) {
        out.remove(&Knob::CachePolicy);
    }
    // Nor has drafting; an adaptive depth need not reach its limit, and greedy decoding knows one rule of acceptance.
    let draft = &arm.asked.config.draft;
    out.retain(|k| {
        let idle = match k {
            Knob::DraftDepth => !draft.is_on() || draft.draft_policy == DepthPolicy::Adaptive,
            Knob::DraftAccept => draft.speculate != DrafterKind::Model || arm.asked.config.sampler.temperature == 0.0,
            _ => !draft.is_on() && OF_DRAFTS.contains(k),
        };
        !idle || arm.fired.contains(k)
    });
    if arm.asked.config.trace.is_none() && !arm.fired.contains(&Knob::Monitor) {
        out.remove(&Knob::Monitor);
    }
    Ok(out)
}

/// Names, number and configurations of arms, as far as they can be judged without opening a store.
pub fn check(arms: &[Arm]) -> Result<(), CampaignError> {
    let no = |what: String| Err(CampaignError::Option(what));
    if !(2..=MAX_ARMS).contains(&arms.len()) {
        return no(format!("{} arms; a comparison has 2 to {MAX_ARMS}", arms.len()));
    }
    for (index, arm) in arms.iter().enumerate() {
        let name = &arm.name;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > 40 || name.starts_with('.') || !name.chars().all(plain) {
            return no(format!(
                "arm `{name}`: a name has 1 to 40 letters, digits, `-`, `_` or `.`, and no leading `.`"
            ));
        }
        if arms[..index].iter().any(|a| a.name == *name) {
            return no(format!("two arms are called `{name}`"));
        }
        if arm.asked.config.reference {
            return no(format!(
                "arm `{name}`: `reference` runs every prompt once more; make an arm with `resident = true` instead"
            ));
        }
        if arm.asked.config.max_new < 2 {
            return no(format!("arm `{name}`: max_new must be at least 2: a decode rate needs two tokens"));
        }
        arm.asked.check().map_err(|e| CampaignError::Option(format!("arm `{name}`: {e}")))?;
    }
    Ok(())
}

/// Kernels and place of the trunk: what a model is loaded with.
type ModelKey = (String, TrunkResidency);

/// Opens models, plans and drives of all arms, and says what each must prove.
pub fn make_ready(arms: &[Arm], differences: &[Difference]) -> Result<Vec<ReadyArm>, CampaignError> {
    let mut models: Vec<(PathBuf, ModelKey, Rc<Model>)> = Vec::new();
    let mut out = Vec::with_capacity(arms.len());
    let copies = |arm: &Arm| match &arm.asked.config.plan {
        Some(path) => Ok(read_plan(path)?.replica_count() > 0),
        None => Ok::<bool, CampaignError>(false),
    };
    let choice_elsewhere = arms.iter().map(copies).collect::<Result<Vec<_>, _>>()?.contains(&true);
    for arm in arms {
        let config = &arm.asked.config;
        let named = |e: &dyn std::fmt::Display| CampaignError::Option(format!("arm `{}`: {e}", arm.name));
        let store = config.store.canonicalize().unwrap_or_else(|_| config.store.clone());
        let key = (config.model.kernels.clone(), config.model.trunk);
        let same = models.iter().find(|(path, other, _)| *path == store && *other == key);
        let model = match same {
            Some((_, _, model)) => Rc::clone(model),
            None => {
                let loaded = Model::load_as(&config.store, config.model.isa()?, config.model.trunk);
                let model = Rc::new(loaded.map_err(|e| named(&e))?);
                models.push((store, key, Rc::clone(&model)));
                model
            }
        };
        let streamed = plan_and_mounts(&model, config).map_err(|e| named(&e))?;
        if let Some(mount) = streamed.iter().flat_map(|(_, m)| m).find(|m| !m.path.is_dir()) {
            let why = format!("drive `{}`: {} is no folder; mount or stage it first", mount.name, mount.path.display());
            return Err(named(&why));
        }
        let under_test = under_test(arm, streamed.as_ref(), differences, choice_elsewhere)?;
        let inputs = inputs_of(arm, &model, streamed.as_ref())?;
        let asked = Asked { repeats: None, ..arm.asked.clone() };
        out.push(ReadyArm { name: arm.name.clone(), asked, under_test, model, streamed, inputs });
    }
    Ok(out)
}

/// Digests of everything that decides what a run of `arm` does, its prompt apart.
fn inputs_of(
    arm: &Arm,
    model: &Model,
    streamed: Option<&(Plan, Vec<DriveSpec>)>,
) -> Result<BTreeMap<String, String>, CampaignError> {
    let asked = settings(&arm.asked.config)?;
    let text: Vec<String> = asked.iter().map(|(name, (_, identity))| format!("{name}={identity}")).collect();
    let mut out = BTreeMap::from([
        ("settings".to_string(), digest(text.join("\n").as_bytes())),
        ("model".into(), model.manifest.model_id.clone()),
        ("argodrive".into(), environment::version()),
    ]);
    if let Some((plan, mounts)) = streamed {
        out.insert("plan".into(), plan.hash()?);
        out.insert("drives".into(), drives_digest(mounts));
    }
    out.extend(inputs::of_tables(&arm.asked.config));
    Ok(out)
}

/// Whether an arm can be said to set `knob`: in its file, or because its plan, drives or dispatch imply it.
pub fn sets(arm: &Arm, knob: Knob) -> bool {
    let config = &arm.asked.config;
    let streams = !config.resident && config.plan.is_some();
    arm.asked.given.contains(&knob)
        || match knob {
            Knob::Layout | Knob::Replicas => streams,
            Knob::Pace | Knob::Link | Knob::Faults => streams && config.drives.is_some(),
            Knob::Split => arm.asked.given.contains(&Knob::Dispatch) && config.reader.dispatch == DispatchPolicy::Split,
            _ => false,
        }
}
