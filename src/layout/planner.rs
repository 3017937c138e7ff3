//! Makes plans from policies. Pure and deterministic: the same catalogue, drives, heat, policy and seed give the same plan.

use super::barrier::{self, Masks, Problem};
use super::drives::DriveSet;
use super::heat::Heat;
use super::plan::{LayerHomes, PLAN_VERSION, Plan, PlanDrive, PlanError, Shape};
use super::policy::{Budget, Policy, PolicyFile};
use super::predict::{self, Cost, Layout};
use super::simple;
use super::training::{CacheModel, Training};
use crate::bound::MAX_SUBSET_DRIVES;
use crate::ids::{DriveId, LayerId};
use crate::store::stripe::UNIT_ALIGN;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What there is to place.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// The model.
    pub model_id: String,
    /// Where its store lies.
    pub store: PathBuf,
    /// Layers with experts.
    pub layers: Vec<LayerId>,
    /// Experts in each of them.
    pub experts: u32,
    /// Payload bytes of one expert.
    pub expert_bytes: u64,
}

impl Catalog {
    /// Bytes of all experts once; `None` beyond 64 bits.
    pub fn bank_bytes(&self) -> Option<u64> {
        let experts = u64::from(self.experts).checked_mul(self.layers.len() as u64)?;
        experts.checked_mul(self.expert_bytes)
    }

    fn check(&self) -> Result<(), PlanError> {
        let bad = |reason: &str| Err(PlanError::Inconsistent(reason.into()));
        if self.layers.is_empty() || self.experts == 0 {
            return bad("the model has no routed experts; there is nothing to place");
        }
        if self.experts > u32::from(u16::MAX) {
            return bad("more than 65535 experts in a layer; this version counts them in 16 bits");
        }
        if self.expert_bytes == 0 {
            return bad("the model's experts have 0 bytes; import or synth the store again");
        }
        if self.bank_bytes().is_none() {
            return bad("the bytes of all experts exceed 64 bits; check the store's geometry");
        }
        Ok(())
    }
}

/// Everything that a plan is made from.
pub struct PlanRequest<'a> {
    /// What is placed.
    pub catalog: &'a Catalog,
    /// The drives.
    pub drives: &'a [PlanDrive],
    /// The policy.
    pub policy: &'a PolicyFile,
    /// What is hot, if known.
    pub heat: Option<&'a Heat>,
    /// What the drives can do; what the policy says of them must be in it already (`DriveSet::assemble`).
    pub set: &'a DriveSet,
    /// Hashes of what the plan is made from.
    pub inputs: BTreeMap<String, String>,
}

/// A plan and what is expected of it.
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Expected barriers by layer, where heat was given and the drives are few enough.
    pub cost: Option<Cost>,
    /// Layers of which the heat said nothing.
    pub unknown: Vec<LayerId>,
}

/// Plans `catalog` over `drives` by `policy`, with equal drives and no heat.
pub fn plan(
    catalog: &Catalog,
    drives: &[PlanDrive],
    policy: &Policy,
    seed: u64,
    inputs: BTreeMap<String, String>,
) -> Result<Plan, PlanError> {
    let policy = PolicyFile { seed, ..PolicyFile::from(policy.clone()) };
    let set = DriveSet::equal(drives.len());
    Ok(plan_with(PlanRequest { catalog, drives, policy: &policy, heat: None, set: &set, inputs })?.plan)
}

/// Plans with all that is known.
pub fn plan_with(request: PlanRequest<'_>) -> Result<Planned, PlanError> {
    let PlanRequest { catalog, drives, policy: file, heat, set, inputs } = request;
    catalog.check()?;
    let names: Vec<&str> = drives.iter().map(|d| d.name.as_str()).collect();
    set.check(&names)?;
    check_nesting(drives)?;
    let policy = &file.policy;
    if let Some(heat) = heat {
        heat.fits(&catalog.model_id, &catalog.layers, catalog.experts)?;
    } else if policy.needs_heat() {
        return Err(PlanError::Inconsistent(format!(
            "policy {} places by heat and none is given; count some with `argodrive heat` and pass it with --heat",
            policy.name()
        )));
    }
    let training = heat.map(|h| training(h, catalog, file)).transpose()?;
    let layers = homes(catalog, drives, file, set, training.as_ref(), heat)?;
    let shape = match policy {
        Policy::Stripe { .. } => Shape::Stripe { unit_bytes: stripe_unit(policy, catalog, drives.len()) },
        _ => Shape::Whole,
    };
    let mut plan = Plan {
        version: PLAN_VERSION,
        model_id: catalog.model_id.clone(),
        store: catalog.store.clone(),
        planner: policy.name().to_string(),
        seed: file.seed,
        inputs,
        expert_bytes: catalog.expert_bytes,
        drives: drives.to_vec(),
        shape,
        predicted: None,
        layers: catalog.layers.iter().copied().zip(layers).collect(),
    };
    plan.check()?;
    check_room(&plan, set)?;
    let cost = match &training {
        Some(training) if drives.len() <= MAX_SUBSET_DRIVES => {
            Some(predict::predict(training, &plan, set, file.reads, file.seed)?)
        }
        _ => None,
    };
    plan.predicted = cost.as_ref().map(|c| c.prediction(file.reads));
    Ok(Planned { plan, cost, unknown: training.map(|t| t.unknown).unwrap_or_default() })
}

/// The real rows of `heat` under `plan`: what its barriers take on text that it was not made from.
pub fn judge(plan: &Plan, policy: &PolicyFile, set: &DriveSet, heat: &Heat) -> Result<Cost, PlanError> {
    let layers: Vec<LayerId> = plan.layers.keys().copied().collect();
    let experts = plan.layers.values().map(|l| l.0.len()).max().unwrap_or(0) as u32;
    heat.fits(&plan.model_id, &layers, experts)?;
    let cache = cache_model(policy, plan.expert_bytes);
    let training = Training::new(heat, &layers, experts as usize, cache, policy.seed)?;
    predict::judge(&training, plan, set, policy.reads)
}

fn cache_model(policy: &PolicyFile, expert_bytes: u64) -> CacheModel {
    let experts = usize::try_from(policy.cache_bytes / expert_bytes.max(1)).unwrap_or(usize::MAX);
    CacheModel { experts, policy: policy.cache_policy }
}

fn training(heat: &Heat, catalog: &Catalog, policy: &PolicyFile) -> Result<Training, PlanError> {
    let cache = cache_model(policy, catalog.expert_bytes);
    Training::new(heat, &catalog.layers, catalog.experts as usize, cache, policy.seed)
}

/// Homes by layer, as a policy wants them.
fn homes(
    catalog: &Catalog,
    drives: &[PlanDrive],
    file: &PolicyFile,
    set: &DriveSet,
    training: Option<&Training>,
    heat: Option<&Heat>,
) -> Result<Vec<LayerHomes>, PlanError> {
    let (count, experts) = (drives.len(), catalog.experts as usize);
    let ranks = 0..catalog.layers.len();
    let no_heat = || PlanError::Inconsistent(format!("policy {} needs --heat", file.policy.name()));
    Ok(match &file.policy {
        Policy::Single { drive } => {
            let home = match drive {
                Some(name) => simple::drive_of(drives, name)?,
                None => DriveId(0),
            };
            ranks.map(|_| LayerHomes(vec![vec![home]; experts])).collect()
        }
        Policy::RoundRobin {} => ranks.map(|rank| simple::round_robin(rank, experts, count)).collect(),
        Policy::FullMirror {} => ranks.map(|rank| simple::everywhere(rank, experts, count)).collect(),
        Policy::Stripe { .. } => {
            // No more columns than there are blocks.
            let units = catalog.expert_bytes.div_ceil(stripe_unit(&file.policy, catalog, count));
            let columns = usize::try_from(units).unwrap_or(usize::MAX).min(count);
            let mut layers: Vec<LayerHomes> = ranks.map(|rank| simple::everywhere(rank, experts, count)).collect();
            layers.iter_mut().flat_map(|l| &mut l.0).for_each(|homes| homes.truncate(columns));
            layers
        }
        Policy::Hash {} => {
            let rates: Vec<f64> = set.drives.iter().map(|d| d.rate_bytes_per_s).collect();
            catalog.layers.iter().map(|&layer| simple::hash(layer, experts, &rates, file.seed)).collect()
        }
        Policy::Lpt {} => {
            let training = training.ok_or_else(no_heat)?;
            let mut room = room(catalog, set)?;
            let rates: Vec<f64> = set.drives.iter().map(|d| 1.0 / d.alone_ns(catalog.expert_bytes)).collect();
            let expected: Vec<&[f64]> = training.layers.iter().map(|l| l.expected.as_slice()).collect();
            let dealt = barrier::deal(&expected, &rates, &mut room);
            dealt
                .into_iter()
                .map(|layer| LayerHomes(layer.into_iter().map(|d| vec![DriveId(d as u8)]).collect()))
                .collect()
        }
        Policy::HotReplica { bands } => simple::bands(catalog, drives, bands, heat.ok_or_else(no_heat)?)?,
        Policy::Barrier { extra, effort } => {
            let training = training.ok_or_else(no_heat)?;
            let masks = barrier::solve(&Problem {
                training,
                set,
                reads: file.reads,
                expert_bytes: catalog.expert_bytes,
                extra_copies: extra_copies(catalog, set, *extra)?,
                effort: *effort,
                seed: file.seed,
            })?;
            primaries(&masks, training, set, catalog.expert_bytes)
        }
    })
}

/// Bytes of a stripe's block: the policy's, or one block for each drive.
fn stripe_unit(policy: &Policy, catalog: &Catalog, drives: usize) -> u64 {
    match policy {
        Policy::Stripe { unit_bytes: Some(unit) } => *unit,
        _ => catalog.expert_bytes.div_ceil(drives.max(1) as u64).next_multiple_of(UNIT_ALIGN),
    }
}

/// Experts that each drive may hold; an error when they are too few for the bank.
fn room(catalog: &Catalog, set: &DriveSet) -> Result<Vec<usize>, PlanError> {
    let bank = catalog.experts as usize * catalog.layers.len();
    let room: Vec<usize> = (0..set.drives.len()).map(|d| set.slots(d, catalog.expert_bytes).min(bank)).collect();
    let total = room.iter().fold(0usize, |sum, r| sum.saturating_add(*r));
    if total < bank {
        let bytes = |experts: usize| (experts as u64).saturating_mul(catalog.expert_bytes);
        let reason = format!(
            "the drives have room for {total} experts of {} bytes, the model has {bank}; add a drive or free {} bytes",
            catalog.expert_bytes,
            bytes(bank - total)
        );
        return Err(PlanError::Room { reason, needs_bytes: bytes(bank), has_bytes: bytes(total) });
    }
    Ok(room)
}

fn extra_copies(catalog: &Catalog, set: &DriveSet, extra: Budget) -> Result<usize, PlanError> {
    let room = room(catalog, set)?;
    let bank = catalog.experts as usize * catalog.layers.len();
    let copies = match extra {
        Budget::Permille(p) => bank as u64 * u64::from(p) / 1000,
        Budget::Bytes(bytes) => bytes / catalog.expert_bytes,
    };
    // More than a copy on every drive is never made: one drive has no use for a budget.
    let copies = usize::try_from(copies).unwrap_or(usize::MAX).min(bank * (set.drives.len() - 1));
    let most = room.iter().fold(0usize, |sum, r| sum.saturating_add(*r)) - bank;
    if copies > most {
        let bytes = |copies: usize| ((bank + copies) as u64).saturating_mul(catalog.expert_bytes);
        let reason = format!(
            "extra: {copies} copies of {} bytes are asked for, beyond the first copy the {} drives have room for {most}; \
             lower `extra`, or give drives more room",
            catalog.expert_bytes,
            set.drives.len()
        );
        return Err(PlanError::Room { reason, needs_bytes: bytes(copies), has_bytes: bytes(most) });
    }
    Ok(copies)
}

/// Home lists from masks; primaries are chosen so that a reader that only knows them is balanced too.
fn primaries(masks: &Masks, training: &Training, set: &DriveSet, expert_bytes: u64) -> Vec<LayerHomes> {
    let cost: Vec<f64> = set.drives.iter().map(|d| d.alone_ns(expert_bytes)).collect();
    let layer = |(masks, training): (&Vec<u8>, &super::training::LayerTraining)| {
        let mut order: Vec<usize> = (0..masks.len()).collect();
        order.sort_by(|&a, &b| training.expected[b].total_cmp(&training.expected[a]).then(a.cmp(&b)));
        let mut load = vec![0.0; cost.len()];
        let mut homes = vec![Vec::new(); masks.len()];
        for expert in order {
            let own = (0..cost.len()).filter(|d| masks[expert] >> d & 1 == 1);
            let done = |d: &usize| load[*d] + training.expected[expert] * cost[*d];
            let first = own.clone().min_by(|a, b| done(a).total_cmp(&done(b)).then(a.cmp(b))).unwrap_or(0);
            load[first] += training.expected[expert] * cost[first];
            let rest = own.filter(|&d| d != first);
            homes[expert] = std::iter::once(first).chain(rest).map(|d| DriveId(d as u8)).collect();
        }
        LayerHomes(homes)
    };
    masks.iter().zip(&training.layers).map(layer).collect()
}

/// Two drives of a plan must not be one inside the other: their bytes would be counted as one drive's twice.
fn check_nesting(drives: &[PlanDrive]) -> Result<(), PlanError> {
    for (index, a) in drives.iter().enumerate() {
        for b in drives.iter().enumerate().filter(|(i, _)| *i != index).map(|(_, b)| b) {
            if b.path.starts_with(&a.path) && !a.path.as_os_str().is_empty() {
                return Err(PlanError::Inconsistent(format!(
                    "drive `{}` ({}) lies inside drive `{}` ({}); give each drive a folder of its own",
                    b.name,
                    b.path.display(),
                    a.name,
                    a.path.display()
                )));
            }
        }
    }
    Ok(())
}

/// Every drive's bytes stay within what it may hold.
fn check_room(plan: &Plan, set: &DriveSet) -> Result<(), PlanError> {
    for (index, drive) in plan.drives.iter().enumerate() {
        let Some(capacity) = set.drives[index].capacity_bytes else { continue };
        let bytes = plan.bytes_on(DriveId(index as u8));
        if bytes > capacity {
            let reason = format!(
                "drive `{}`: {} places {bytes} bytes there, it may hold {capacity}; lower its band or budget, free space, \
                 or use a policy that keeps within capacities (lpt, barrier)",
                drive.name, plan.planner
            );
            return Err(PlanError::Room { reason, needs_bytes: bytes, has_bytes: capacity });
        }
    }
    Ok(())
}

/// The layout of a plan, as `predict` wants it.
pub(super) fn layout_of(plan: &Plan) -> Layout {
    match plan.shape {
        Shape::Stripe { .. } => Layout::Stripes,
        Shape::Whole => {
            let mask = |homes: &Vec<DriveId>| homes.iter().fold(0u8, |m, d| m | 1 << d.0);
            Layout::Homes(plan.layers.values().map(|l| l.0.iter().map(mask).collect()).collect())
        }
    }
}

#[cfg(test)]
#[path = "planner_tests.rs"]
mod tests;
