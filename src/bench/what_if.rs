//! What one more drive would bring: the layout planned again over the drives and a new one, both simulated on the same trace
//! with the same seeds.

use super::planning::room_bytes;
use super::simulate::{Loaded, SimulateError, SimulateSpec, runs, setup};
use super::simulate_drives::{DriveRow, Drives, NewDrive};
use crate::ids::ExpertId;
use crate::layout::drives::{DriveFacts, DriveSet, JointRate};
use crate::layout::heat::{Heat, Part, Source};
use crate::layout::heat_build::HeatBuilder;
use crate::layout::plan::{MAX_DRIVES, Plan, PlanDrive};
use crate::layout::planner::{Catalog, PlanRequest, plan_with};
use crate::layout::policy::{Budget, Policy, PolicyFile};
use crate::layout::routes::{RouteFormat, RouteOptions, import};
use crate::replay::schedule::ROUTES_FILE;
use crate::replay::simulate::summary::{Prediction, Sure, predict};
use crate::replay::verdict::Bound;
use crate::replay::workload::Workload;
use crate::source::Phase;
use crate::stats::{DEFAULT_RESAMPLES, Interval, MIN_PAIRS, paired_log_ratio};
use serde::Serialize;
use std::collections::BTreeMap;

/// Largest routes file that heat is made from.
const MAX_ROUTES_BYTES: u64 = 4 << 30;

/// What a gain means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The whole interval is above 1.
    Better,
    /// The whole interval is below 1.
    Worse,
    /// The interval has 1 in it.
    WithinNoise,
    /// Waiting is a small part of the time: no drive brings anything.
    NotStorageBound,
    /// Too few passes to say.
    TooFew,
}

/// A layout over the drives so far, and what it gives.
#[derive(Clone, Debug, Serialize)]
pub struct Added {
    /// Names of the drives that were added, all so far.
    pub added: Vec<String>,
    /// Hash of the plan.
    pub plan_hash: String,
    /// Copies beyond the first of every expert.
    pub replicas: usize,
    /// The new drive.
    pub drive: Option<DriveRow>,
    /// What the layout gives.
    pub simulated: Prediction,
    /// Times as fast as without any added drive: passes that extend the text, in pairs.
    pub gain: Option<Sure>,
    /// What that means.
    pub verdict: Verdict,
}

/// Without added drives first, then with one more each.
#[derive(Clone, Debug, Serialize)]
pub struct WhatIf {
    /// The policy that planned all of them.
    pub policy: &'static str,
    /// The layouts.
    pub steps: Vec<Added>,
    /// What had to be assumed.
    pub assumptions: Vec<String>,
}

/// The policy that a plan was made by, as far as the plan says.
pub fn policy_of(plan: &Plan, assumptions: &mut Vec<String>) -> Result<PolicyFile, SimulateError> {
    let policy = match plan.planner.as_str() {
        "single" => Policy::Single { drive: None },
        "round-robin" => Policy::RoundRobin {},
        "hash" => Policy::Hash {},
        "lpt" => Policy::Lpt {},
        "full-mirror" => Policy::FullMirror {},
        "barrier" => {
            let bank: usize = plan.layers.values().map(|l| l.0.len()).sum();
            let permille = (plan.replica_count() * 1000).div_ceil(bank.max(1)) as u32;
            assumptions
                .push(format!("the policy has copies of {:.1} % of the bank, as the plan", f64::from(permille) / 10.0));
            Policy::Barrier { extra: Budget::Permille(permille), effort: Default::default() }
        }
        other => {
            return Err(SimulateError::Input(format!(
                "--add-drive plans again, and the plan does not hold all of its policy `{other}`: give the policy file \
                 with --policy"
            )));
        }
    };
    let mut file = PolicyFile { seed: plan.seed, ..PolicyFile::from(policy) };
    file.reads = plan.predicted.map_or(file.reads, |p| p.reads);
    Ok(file)
}

/// Heat from the routes of the trace, or from what its barriers of one row asked for.
fn heat_of(spec: &SimulateSpec<'_>, work: &Workload, experts: u32) -> Result<Heat, SimulateError> {
    let path = spec.trace.join(ROUTES_FILE);
    let fail = |e: String| SimulateError::Input(format!("{}: {e}", path.display()));
    let model_id = Some(spec.plan.model_id.clone());
    if path.exists() {
        let bytes = std::fs::metadata(&path).map_err(|e| fail(e.to_string()))?.len();
        if bytes > MAX_ROUTES_BYTES {
            return Err(fail(format!("{bytes} bytes are too many to count; give --heat")));
        }
        let text = std::fs::read_to_string(&path).map_err(|e| fail(e.to_string()))?;
        let options = RouteOptions {
            format: Some(RouteFormat::Routes),
            experts: Some(experts),
            top_k: None,
            layer_base: 0,
            part: Part::Whole,
            rejected: false,
            label: "trace".into(),
            model_id,
        };
        return import(&text, &path.display().to_string(), &options).map_err(|e| fail(e.to_string()));
    }
    let mut builder = HeatBuilder::new(experts)?;
    for demand in work.barriers.iter().filter(|b| b.step.phase != Phase::Prefill || b.step.rows == 1) {
        let ids: &[ExpertId] = work.of(demand);
        if !ids.is_empty() {
            builder.row(demand.layer, ids, true)?;
        }
    }
    let source = Source { name: spec.trace.display().to_string(), digest: "trace".into(), part: Part::Whole };
    Ok(builder.finish(model_id, vec![source], "trace")?)
}

/// Simulates the layout without and with the drives `new`, one more at a time. `policy` is a policy file, if somebody
/// gave one; `heat` what is hot, else it is counted in the trace.
pub fn what_if(
    spec: &SimulateSpec<'_>,
    loaded: &Loaded,
    new: &[NewDrive],
    policy: Option<PolicyFile>,
    heat: Option<Heat>,
) -> Result<WhatIf, SimulateError> {
    let plan = spec.plan;
    let mut assumptions = Vec::new();
    let policy = match policy {
        Some(policy) => policy,
        None => policy_of(plan, &mut assumptions)?,
    };
    let experts = plan.layers.values().map(|l| l.0.len()).max().unwrap_or(0) as u32;
    let needs_heat = policy.policy.needs_heat();
    let heat = match heat {
        None if needs_heat => {
            assumptions.push("heat was counted in the simulated trace itself: a plan for other text gains less".into());
            Some(heat_of(spec, &loaded.work, experts)?)
        }
        given => given,
    };
    assumptions.push("a drive that was added does exactly what was said of it, without any spread".into());
    if plan.drives.len() + new.len() > MAX_DRIVES {
        return Err(SimulateError::Input(format!("a plan has at most {MAX_DRIVES} drives")));
    }
    let catalog = Catalog {
        model_id: plan.model_id.clone(),
        store: plan.store.clone(),
        layers: plan.layers.keys().copied().collect(),
        experts,
        expert_bytes: plan.expert_bytes,
    };
    let mut drives = loaded.drives.clone();
    let (mut placed, mut room) = (plan.drives.clone(), vec![None; plan.drives.len()]);
    for (room, mount) in room.iter_mut().zip(spec.mounts.unwrap_or(&[])) {
        *room = room_bytes(mount);
    }
    let (mut steps, mut first): (Vec<Added>, Option<Vec<f64>>) = (Vec::new(), None);
    for count in 0..=new.len() {
        let mut row = None;
        if let Some(added) = count.checked_sub(1).map(|at| &new[at]) {
            row = Some(add(added, &mut drives, &mut placed)?);
            room.push(added.capacity_bytes);
        }
        let set = drive_set(&drives, &room, &policy)?;
        let request = PlanRequest {
            catalog: &catalog,
            drives: &placed,
            policy: &policy,
            heat: heat.as_ref(),
            set: &set,
            inputs: BTreeMap::new(),
        };
        let planned = plan_with(request)?.plan;
        let setup = setup(&planned, &drives, loaded.alignment_bytes, spec.options)?;
        let all = runs(&loaded.work, &setup, spec.seed, spec.repeats)?;
        let simulated = predict(&loaded.work, &setup, &all, spec.seed)
            .ok_or_else(|| SimulateError::Input("there is nothing to simulate".into()))?;
        let base = first.get_or_insert_with(|| simulated.passes.clone());
        let gain = gain(base, &simulated.passes, spec.seed);
        let bound = steps.first().map_or(simulated.verdict.as_ref(), |s| s.simulated.verdict.as_ref());
        let verdict = match gain {
            _ if bound.is_some_and(|v| v.bound == Bound::NotStorage) => Verdict::NotStorageBound,
            None => Verdict::TooFew,
            Some(Sure(g)) if g.low > 1.0 => Verdict::Better,
            Some(Sure(g)) if g.high < 1.0 => Verdict::Worse,
            Some(_) => Verdict::WithinNoise,
        };
        steps.push(Added {
            added: placed[plan.drives.len()..].iter().map(|d| d.name.clone()).collect(),
            plan_hash: planned.hash()?,
            replicas: planned.replica_count(),
            drive: row,
            simulated,
            gain,
            verdict,
        });
    }
    Ok(WhatIf { policy: policy.policy.name(), steps, assumptions })
}

/// Adds a drive to those of a simulation and of a plan.
fn add(new: &NewDrive, drives: &mut Drives, placed: &mut Vec<PlanDrive>) -> Result<DriveRow, SimulateError> {
    let free = || (1..).map(|n| format!("new{n}")).find(|n| placed.iter().all(|d| d.name != *n));
    let name = new.name.clone().or_else(free).unwrap_or_default();
    if placed.iter().any(|d| d.name == name) {
        return Err(SimulateError::Input(format!("--add-drive: there is a drive `{name}` already; name it otherwise")));
    }
    let device = new.device(&name);
    let row = DriveRow {
        name: name.clone(),
        bytes_per_s: device.bytes_per_s,
        fixed_ns: device.fixed_ns,
        latency_ns: device.latency_ns,
        noise: "none",
        residuals: 0,
        emulated: false,
        hypothetical: true,
    };
    drives.devices.push(device);
    drives.rows.push(row.clone());
    placed.push(PlanDrive { path: format!("/hypothetical/{name}").into(), name });
    Ok(row)
}

/// The drives as a planner sees them.
fn drive_set(drives: &Drives, room: &[Option<u64>], policy: &PolicyFile) -> Result<DriveSet, SimulateError> {
    let names: Vec<&str> = drives.devices.iter().map(|d| d.name.as_str()).collect();
    let fact = |(device, room): (&crate::replay::simulate::devices::Device, &Option<u64>)| DriveFacts {
        rate_bytes_per_s: Some(device.bound.bytes_per_s),
        fixed_ns: Some(device.bound.fixed_ns),
        capacity_bytes: *room,
    };
    let facts: Vec<DriveFacts> = drives.devices.iter().zip(room).map(fact).collect();
    // a planner knows one uplink for each drive
    let mut taken = vec![false; names.len()];
    let mut joints = Vec::new();
    for uplink in &drives.uplinks {
        if uplink.members.iter().all(|&d| !taken[d]) {
            uplink.members.iter().for_each(|&d| taken[d] = true);
            let members = uplink.members.iter().map(|&d| names[d].to_string()).collect();
            joints.push(JointRate { members, rate_bytes_per_s: uplink.bytes_per_s });
        }
    }
    Ok(DriveSet::assemble(&names, &facts, &joints, None, policy)?)
}

/// How many times as fast passes are, in pairs; `None` with too few of them, or too few that differ for a bound.
pub(super) fn gain(base: &[f64], now: &[f64], seed: u64) -> Option<Sure> {
    let pairs: Vec<(f64, f64)> =
        base.iter().copied().zip(now.iter().copied()).filter(|p| p.0 > 0.0 && p.1 > 0.0).collect();
    if pairs.len() < MIN_PAIRS {
        return None;
    }
    let ratio = paired_log_ratio(&pairs, DEFAULT_RESAMPLES, seed).ok()?;
    if !(ratio.log_ratio.low.is_finite() && ratio.log_ratio.high.is_finite()) {
        return None;
    }
    let Interval { estimate, low, high } = ratio.ratio();
    Some(Sure(Interval { estimate: 1.0 / estimate, low: 1.0 / high, high: 1.0 / low }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_has_two_bounds_or_there_is_none() {
        let base = [1.0; 8];
        let Sure(same) = gain(&base, &base, 0).unwrap();
        assert_eq!((same.estimate, same.low, same.high), (1.0, 1.0, 1.0));
        let Sure(half) = gain(&base, &[0.5; 8], 0).unwrap();
        assert_eq!((half.estimate, half.low, half.high), (2.0, 2.0, 2.0));
        let one_differs = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9];
        assert!(gain(&base, &one_differs, 0).is_none(), "most resamples are of one value: nothing bounds them");
        assert!(gain(&base[..2], &base[..2], 0).is_none());
    }
}
