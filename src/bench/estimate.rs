//! What a model would do on drives, before a weight is fetched: where its experts would lie, what a token and a prompt
//! would take, how long copying lasts. Calculated by the planner, by its predictions and by the bounds; nothing is read
//! but the drives' free space.

use super::estimate_bytes::{MemoryAsked, MemoryFit, ModelBytes};
use super::estimate_prompt::{PromptTime, prompt};
use super::planning::{PlanningError, drive_set};
use crate::bound::BoundError;
use crate::drive::profile::Profile;
use crate::drive::spec::DriveSpec;
use crate::ids::DriveId;
use crate::layout::drives::DriveSet;
use crate::layout::heat::{Domain, HEAT_VERSION, Heat, LayerHeat};
use crate::layout::plan::{Plan, PlanDrive, PlanError, Shape};
use crate::layout::planner::{self, Catalog, PlanRequest};
use crate::layout::policy::{DriveLimit, Policy, PolicyFile};
use crate::layout::predict::Cost;
use crate::layout::training::{CacheModel, CachePolicy, MAX_WIDTH, Training};
use crate::model::config::ModelConfig;
use crate::stage::DEFAULT_MARGIN_BYTES;
use crate::stats::SplitMix64;
use crate::store::manifest::DriveManifest;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Seed of everything that is drawn: the same question has the same answer.
const SEED: u64 = 0x6573_7469_6d61_7465;
/// The model of a plan that no weights were seen for.
const UNKNOWN_MODEL: &str = "estimate";

/// There is no estimate.
#[derive(Debug, thiserror::Error)]
pub enum EstimateError {
    /// Rates, profile or policy do not fit the drives.
    #[error(transparent)]
    Planning(#[from] PlanningError),
    /// The plan cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A bound cannot be computed.
    #[error(transparent)]
    Bound(#[from] BoundError),
    /// The question contradicts itself.
    #[error("{0}")]
    Question(String),
}

/// The question.
pub struct Question<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// The drives.
    pub specs: &'a [DriveSpec],
    /// What was measured of them.
    pub profile: Option<&'a Profile>,
    /// Rates stated for them, bytes per second, in their order.
    pub rates: &'a [u64],
    /// The layout; `None` = full mirror where every drive has room for it, else one copy each by rate.
    pub policy: Option<PolicyFile>,
    /// What is hot; `None` = every expert as often as any other.
    pub heat: Option<&'a Heat>,
    /// Memory.
    pub memory: MemoryAsked,
    /// Context lengths.
    pub contexts: &'a [usize],
    /// Prompt lengths.
    pub prompts: &'a [usize],
    /// Shares of needed experts that a cache is said to have, 0 to 1.
    pub hit_rates: &'a [f64],
    /// Bytes per second that memory delivers to compute.
    pub memory_bandwidth: Option<u64>,
    /// Bytes per second of copying.
    pub copy_rates: &'a [u64],
}

/// Where the rates came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RateSource {
    /// A profile that `ceiling` measured.
    Profile,
    /// The command line or the policy.
    Stated,
    /// What the drives pretend to be.
    Emulated,
    /// None.
    Unknown,
}

/// One drive's part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DrivePart {
    /// Name.
    pub name: String,
    /// Its pace is emulated.
    pub emulated: bool,
    /// Bytes per second with the other drives at work.
    pub rate_bytes_per_s: Option<f64>,
    /// Cost before the first byte.
    pub fixed_ns: Option<u64>,
    /// Experts that lie there.
    pub experts: u64,
    /// Bytes that they take, padding of slots included.
    pub bytes: u64,
    /// Bytes that there is room for, where that is known.
    pub room_bytes: Option<u64>,
    /// Whether they fit.
    pub fits: Option<bool>,
}

/// Generating, under one assumption about what is in memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// What was assumed.
    pub cache: String,
    /// Share of needed experts found in memory.
    pub hit_rate: f64,
    /// Expert bytes read for a token.
    pub bytes_per_token: f64,
    /// Every barrier as the layout gives it, compute (where a memory bandwidth is stated) after it.
    pub low_tok_s: f64,
    /// Every barrier as if each expert were on every drive, compute hidden behind it.
    pub high_tok_s: f64,
}

/// Copying at one rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CopyTime {
    /// Bytes per second.
    pub rate_bytes_per_s: u64,
    /// Checkpoint to store.
    pub import_ns: u64,
    /// Store to drives.
    pub stage_ns: u64,
}

/// The answer.
#[derive(Clone, Debug, Serialize)]
pub struct Estimate {
    /// The model's bytes.
    pub model: ModelBytes,
    /// Memory by context length.
    pub memory: Vec<MemoryFit>,
    /// The layout that was assumed; `None` for a dense model.
    pub policy: Option<String>,
    /// Where rates came from.
    pub rates: RateSource,
    /// Any drive's pace is emulated.
    pub emulated: bool,
    /// The drives.
    pub drives: Vec<DrivePart>,
    /// Why there are no speeds and prompt times, if there are none.
    pub no_speed: Option<String>,
    /// Generating.
    pub speeds: Vec<Speed>,
    /// Prompts.
    pub prompts: Vec<PromptTime>,
    /// Bytes that staging copies.
    pub stage_bytes: u64,
    /// Copying.
    pub copies: Vec<CopyTime>,
}

/// Answers `q`.
pub fn estimate(q: &Question<'_>) -> Result<Estimate, EstimateError> {
    let model = ModelBytes::of(q.config).map_err(EstimateError::Question)?;
    let fit = |&context: &usize| MemoryFit::of(q.config, &model, &q.memory, context);
    let memory = q.contexts.iter().map(fit).collect::<Result<_, _>>();
    let mut out = Estimate {
        memory: memory.map_err(|e| EstimateError::Question(e.to_string()))?,
        policy: None,
        rates: RateSource::Unknown,
        emulated: q.specs.iter().any(|s| s.emulate.is_some()),
        drives: Vec::new(),
        no_speed: None,
        speeds: Vec::new(),
        prompts: Vec::new(),
        stage_bytes: 0,
        copies: Vec::new(),
        model,
    };
    if out.model.expert_count == 0 {
        out.no_speed = Some("a dense model: nothing streams from drives".into());
    } else {
        placed(q, &mut out)?;
    }
    let at = |bytes: u64, rate: u64| (bytes as f64 / rate.max(1) as f64 * 1e9).round() as u64;
    let copy = |&rate: &u64| CopyTime {
        rate_bytes_per_s: rate,
        import_ns: at(out.model.checkpoint_bytes, rate),
        stage_ns: at(out.stage_bytes, rate),
    };
    out.copies = q.copy_rates.iter().map(copy).collect();
    Ok(out)
}

/// Everything that needs a layout.
fn placed(q: &Question<'_>, out: &mut Estimate) -> Result<(), EstimateError> {
    let even;
    let heat = match q.heat {
        Some(heat) => heat,
        None => {
            even = even_heat(&out.model);
            &even
        }
    };
    let (policy, source) = with_rates(q, q.policy.clone().unwrap_or_else(|| PolicyFile::from(Policy::FullMirror {})))?;
    let mut set = drive_set(q.specs, q.profile, &policy)?;
    let (mut plan, mut policy) = make_plan(q, &out.model, policy, heat, &set)?;
    if q.policy.is_none() && parts(q, &plan, &set, &policy).iter().any(|p| p.fits == Some(false)) {
        (policy, _) = with_rates(q, PolicyFile::from(Policy::Hash {}))?;
        set = drive_set(q.specs, q.profile, &policy)?;
        (plan, policy) = make_plan(q, &out.model, policy, heat, &set)?;
    }
    out.drives = parts(q, &plan, &set, &policy);
    out.stage_bytes = out.drives.iter().map(|d| d.bytes).fold(0, u64::saturating_add);
    out.policy = Some(plan.planner.clone());
    out.rates = if set.known { source } else { RateSource::Unknown };
    out.no_speed = no_speed(&set, &out.model);
    if out.no_speed.is_none() {
        out.speeds = speeds(q, out, &plan, &policy, &set, heat)?;
        for &tokens in q.prompts {
            out.prompts.push(prompt(q, &out.model, &plan, &set, heat, tokens)?);
        }
    }
    Ok(())
}

/// The policy with rates for drives of which it gives none: stated ones, else emulated ones; a profile needs none of it.
fn with_rates(q: &Question<'_>, mut policy: PolicyFile) -> Result<(PolicyFile, RateSource), EstimateError> {
    if !q.rates.is_empty() && q.rates.len() != q.specs.len() {
        let (rates, drives) = (q.rates.len(), q.specs.len());
        return Err(EstimateError::Question(format!("--rates: {rates} rates for {drives} drives; give one for each")));
    }
    if q.profile.is_some() {
        return Ok((policy, RateSource::Profile));
    }
    let mut source = if q.rates.is_empty() { RateSource::Emulated } else { RateSource::Stated };
    for (index, spec) in q.specs.iter().enumerate() {
        let pace = spec.emulate.as_ref();
        let stated = q.rates.get(index).copied();
        let Some(rate) = stated.or(pace.map(|e| e.rate_bytes_per_s)) else { continue };
        let fixed = pace.filter(|_| stated.is_none()).map(|e| e.latency_ns.saturating_add(e.per_read_ns));
        match policy.drives.iter_mut().find(|d| d.name == spec.name) {
            Some(own) if own.rate_bytes_per_s.is_some() => source = RateSource::Stated,
            Some(own) => (own.rate_bytes_per_s, own.fixed_ns) = (Some(rate), own.fixed_ns.or(fixed)),
            None => policy.drives.push(DriveLimit {
                name: spec.name.clone(),
                rate_bytes_per_s: Some(rate),
                fixed_ns: fixed,
                capacity_bytes: None,
            }),
        }
    }
    if q.specs.iter().all(|s| s.emulate.is_none()) {
        source = RateSource::Stated;
    }
    let rated = |s: &DriveSpec| policy.drives.iter().any(|d| d.name == s.name && d.rate_bytes_per_s.is_some());
    if !q.specs.iter().all(rated) {
        // Some of them are not enough: what needs none of them is still an answer.
        policy.drives.iter_mut().for_each(|d| d.rate_bytes_per_s = None);
    }
    Ok((policy, source))
}

fn make_plan(
    q: &Question<'_>,
    model: &ModelBytes,
    policy: PolicyFile,
    heat: &Heat,
    set: &DriveSet,
) -> Result<(Plan, PolicyFile), EstimateError> {
    let catalog = Catalog {
        model_id: UNKNOWN_MODEL.into(),
        store: PathBuf::new(),
        layers: model.moe_layers.clone(),
        experts: model.experts,
        expert_bytes: model.expert_bytes,
    };
    let drives: Vec<PlanDrive> =
        q.specs.iter().map(|s| PlanDrive { name: s.name.clone(), path: s.path.clone() }).collect();
    let heat = Heat { model_id: None, ..heat.clone() };
    let plan = |set: &DriveSet| {
        let (catalog, drives, policy, heat) = (&catalog, &drives, &policy, Some(&heat));
        planner::plan_with(PlanRequest { catalog, drives, policy, heat, set, inputs: BTreeMap::new() })
    };
    // What does not fit is still an answer, so a plan that fails for want of room is made without limits of room.
    let planned = plan(set).or_else(|_| {
        let mut roomy = set.clone();
        roomy.drives.iter_mut().for_each(|d| d.capacity_bytes = None);
        plan(&roomy)
    })?;
    Ok((planned.plan, policy))
}

/// Bytes by drive.
fn parts(q: &Question<'_>, plan: &Plan, set: &DriveSet, policy: &PolicyFile) -> Vec<DrivePart> {
    let slot_bytes = DriveManifest::empty("", plan.expert_bytes).slot_bytes;
    let shares = if plan.shape == Shape::Whole { 1 } else { plan.drives.len() as u64 };
    let one = |(index, (spec, drive)): (usize, (&DriveSpec, &crate::layout::drives::DriveModel))| {
        let experts = plan.on_drive(DriveId(index as u8)).count() as u64;
        let bytes = experts.saturating_mul(slot_bytes).div_ceil(shares);
        let stated = policy.drives.iter().any(|d| d.name == spec.name && d.capacity_bytes.is_some());
        let margin = if stated { 0 } else { DEFAULT_MARGIN_BYTES };
        DrivePart {
            name: spec.name.clone(),
            emulated: spec.emulate.is_some(),
            rate_bytes_per_s: set.known.then_some(drive.rate_bytes_per_s),
            fixed_ns: set.known.then_some(drive.fixed_ns),
            experts,
            bytes,
            room_bytes: drive.capacity_bytes,
            fits: drive.capacity_bytes.map(|room| bytes.saturating_add(margin) <= room),
        }
    };
    q.specs.iter().zip(&set.drives).enumerate().map(one).collect()
}

fn no_speed(set: &DriveSet, model: &ModelBytes) -> Option<String> {
    if !set.known {
        return Some(
            "the rates of the drives are not known, not of all of them: measure them with `argodrive ceiling` and give \
             --profile, or state --rates"
                .into(),
        );
    }
    let (drives, most) = (set.drives.len(), crate::bound::MAX_SUBSET_DRIVES);
    if drives > most {
        return Some(format!("{drives} drives: barrier times are exact up to {most}"));
    }
    (model.top_k as usize > MAX_WIDTH).then(|| format!("more than {MAX_WIDTH} experts per token"))
}

/// Every expert as often as any other.
fn even_heat(model: &ModelBytes) -> Heat {
    let layer = LayerHeat {
        rows: u64::from(model.experts),
        counts: vec![u64::from(model.top_k); model.experts as usize],
        ..LayerHeat::default()
    };
    let layers = model.moe_layers.iter().map(|&l| (l, layer.clone())).collect();
    Heat {
        version: HEAT_VERSION,
        model_id: None,
        experts: model.experts,
        sources: Vec::new(),
        domains: vec![Domain { label: "even".into(), layers }],
    }
}

fn speeds(
    q: &Question<'_>,
    out: &Estimate,
    plan: &Plan,
    policy: &PolicyFile,
    set: &DriveSet,
    heat: &Heat,
) -> Result<Vec<Speed>, EstimateError> {
    let heat = &Heat { model_id: None, ..heat.clone() };
    let kept = PolicyFile { cache_bytes: 0, cache_policy: CachePolicy::Lru, ..policy.clone() };
    let judge = |heat: &Heat, cached: u64| {
        let policy = PolicyFile { cache_bytes: cached.saturating_mul(plan.expert_bytes), ..kept.clone() };
        match planner::judge(plan, &policy, set, heat) {
            Ok(cost) => Ok(Some(cost)),
            Err(PlanError::NothingRead) => Ok(None),
            Err(e) => Err(e),
        }
    };
    let model = &out.model;
    let session = out.memory.first().map_or(0, |m| m.session.latent_cache_bytes + 2 * m.session.kda_state_bytes);
    let touched = model.trunk_token_bytes as f64 + model.token_bytes as f64 + session as f64;
    let compute_ns = q.memory_bandwidth.map_or(0.0, |rate| touched / rate as f64 * 1e9);
    let speed = |cache: String, cost: Option<&Cost>| {
        let sum = |of: &dyn Fn(&crate::layout::predict::LayerCost) -> f64| {
            cost.map_or(0.0, |c| c.layers.iter().map(|l| of(l) * l.mass).sum::<f64>())
        };
        let bytes_per_token = sum(&|l| l.width) * plan.expert_bytes as f64;
        let tok_s = |ns: f64| if ns > 0.0 { 1e9 / ns } else { f64::INFINITY };
        Speed {
            cache,
            hit_rate: (1.0 - bytes_per_token / model.token_bytes.max(1) as f64).clamp(0.0, 1.0),
            bytes_per_token,
            low_tok_s: tok_s(sum(&|l| l.barrier_ns) + compute_ns),
            high_tok_s: tok_s(sum(&|l| l.bound_drives_ns).max(compute_ns)),
        }
    };
    let mut speeds = vec![speed("cold".into(), judge(heat, 0)?.as_ref())];
    for fit in &out.memory {
        let word = if q.heat.is_some() { "LRU, heat" } else { "LRU, even use" };
        match fit.cached_bf16 {
            0 => {}
            n if n >= model.expert_count => speeds.push(speed(format!("all in memory ({} ctx)", fit.context), None)),
            n => speeds.push(speed(format!("{word}, {n} experts ({} ctx)", fit.context), judge(heat, n)?.as_ref())),
        }
    }
    for &rate in q.hit_rates {
        let label = format!("stated, {:.0} %", rate * 100.0);
        match thinned(heat, model, rate)? {
            Some(thin) => speeds.push(speed(label, judge(&thin, 0)?.as_ref())),
            None => speeds.push(speed(label, None)),
        }
    }
    Ok(speeds)
}

/// The barriers of `heat` with each expert found in memory with chance `hit`; `None` when all are.
fn thinned(heat: &Heat, model: &ModelBytes, hit: f64) -> Result<Option<Heat>, EstimateError> {
    let none = CacheModel { experts: 0, policy: CachePolicy::Lru };
    let training = Training::new(heat, &model.moe_layers, model.experts as usize, none, SEED)?;
    let mut rng = SplitMix64::new(SEED);
    let mut miss = || (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 >= hit;
    let mut thin = even_heat(model);
    let mut left = false;
    for (own, (_, layer)) in training.layers.iter().zip(&mut thin.domains[0].layers) {
        layer.counts.fill(0);
        layer.sets = own.rows.iter().map(|row| row.iter().copied().filter(|_| miss()).collect()).collect();
        layer.weights = own.row_weights().iter().map(|w| *w as f32).collect();
        layer.rows = layer.sets.len() as u64;
        for &id in layer.sets.iter().flatten() {
            layer.counts[usize::from(id)] += 1;
            left = true;
        }
    }
    Ok(left.then_some(thin))
}
