//! Layouts that candidates try: the usual policies and those that were given, planned over all drives with what is known of
//! them, as far as they fit. Copies nothing.

use super::inputs::{Inputs, device_inputs, plan_drives};
use super::rank::Skipped;
use super::settings::Tunable;
use super::{TuneError, TuneSpec};
use crate::bench::inputs::digest;
use crate::bench::planning::drive_set;
use crate::drive::profile::Profile;
use crate::ids::DriveId;
use crate::layout::heat::Heat;
use crate::layout::plan::{Plan, Shape};
use crate::layout::planner::{PlanRequest, plan_with};
use crate::layout::policy::{Budget, Policy, PolicyFile};

/// Copies that the barrier planner may make, in thousandths of the bank.
const BUDGETS: [u32; 4] = [100, 250, 500, 1000];
/// Name of the layout that there is.
pub(super) const CURRENT: &str = "current";

/// A layout.
pub(super) struct Layout {
    /// What it is called.
    pub(super) name: String,
    /// Homes.
    pub(super) plan: Plan,
    /// It is the current profile's.
    pub(super) current: bool,
    /// Payload bytes that staging it would copy.
    pub(super) copy_bytes: u64,
}

/// The usual policies by name.
fn usual(seed: u64) -> Vec<(String, PolicyFile)> {
    let plain = [
        ("round-robin", Policy::RoundRobin {}),
        ("weighted-hash", Policy::Hash {}),
        ("lpt", Policy::Lpt {}),
        ("full-mirror", Policy::FullMirror {}),
        ("stripe", Policy::Stripe { unit_bytes: None }),
    ];
    let barrier = |permille: u32| {
        let policy = Policy::Barrier { extra: Budget::Permille(permille), effort: Default::default() };
        (format!("barrier-{}", permille / 10), policy)
    };
    let all = plain.map(|(name, policy)| (name.to_string(), policy)).into_iter().chain(BUDGETS.map(barrier));
    all.map(|(name, policy)| (name, PolicyFile { seed, ..PolicyFile::from(policy) })).collect()
}

/// The current layout first, then all others that there are, and why some are not.
pub(super) fn layouts(
    spec: &TuneSpec,
    inputs: &Inputs,
    ceiling: &Profile,
    heat: Option<&Heat>,
) -> Result<(Vec<Layout>, Vec<Skipped>), TuneError> {
    let current = Layout { name: CURRENT.into(), plan: inputs.plan.clone(), current: true, copy_bytes: 0 };
    let (mut out, mut skipped) = (vec![current], Vec::new());
    if !spec.only.is_empty() && !spec.only.contains(&Tunable::Layout) {
        return Ok((out, skipped));
    }
    let (catalog, drives) = (inputs.model.catalog(), plan_drives(&inputs.specs));
    let mut shared = device_inputs(&inputs.specs);
    if let Some(heat) = heat {
        shared.insert("heat".into(), heat.hash()?);
    }
    for (name, policy) in usual(spec.seed).into_iter().chain(inputs.policies.iter().cloned()) {
        let mut skip = |why: String| skipped.push(Skipped { name: name.clone(), why });
        if policy.policy.needs_heat() && heat.is_none() {
            skip("places by heat: give --heat or --heat-prompt-file".into());
            continue;
        }
        let mut own = shared.clone();
        own.insert("policy".into(), digest(format!("{policy:?}").as_bytes()));
        let planned = drive_set(&inputs.specs, Some(ceiling), &policy).map_err(TuneError::from).and_then(|set| {
            let (catalog, drives, policy) = (&catalog, &drives[..], &policy);
            Ok(plan_with(PlanRequest { catalog, drives, policy, heat, set: &set, inputs: own })?.plan)
        });
        let plan = match planned {
            Ok(plan) => plan,
            Err(e) => {
                skip(e.to_string());
                continue;
            }
        };
        if plan.shape != Shape::Whole {
            skip("stripes cannot be simulated".into());
            continue;
        }
        let empty = (0..plan.drives.len()).find(|d| plan.bytes_on(DriveId(*d as u8)) == 0);
        if let Some(empty) = empty {
            skip(format!("places nothing on drive `{}`; plan it over fewer drives", plan.drives[empty].name));
            continue;
        }
        let twin = out.iter().find(|l| l.plan.layers == plan.layers && l.plan.drives == plan.drives);
        if let Some(twin) = twin {
            skip(format!("gives every expert the homes that `{}` gives it", twin.name));
            continue;
        }
        match inputs.check_room(std::slice::from_ref(&plan), spec.margin_bytes) {
            Ok(()) => {
                let copy_bytes = inputs.missing_bytes(&plan, spec.margin_bytes).map_or(0, |b| b.iter().sum());
                out.push(Layout { name, plan, current: false, copy_bytes });
            }
            Err(why) => skip(why),
        }
    }
    Ok((out, skipped))
}
