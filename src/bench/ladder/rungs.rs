//! Which sets of drives a ladder measures, and the plan of each: planned again for its drives, or its part of one plan that is
//! kept. A rung whose drives have no room for it is left out with what it needs and what there is; that is no error.

use super::record::{RungKind, Skipped};
use super::{LadderError, LadderEvent, LadderSpec};
use crate::bench::guards::device_key;
use crate::bench::planning::{PlanningError, drive_set};
use crate::bench::record::RecordError;
use crate::drive::device::identity_of;
use crate::drive::spec::{self, DriveSpec};
use crate::layout::heat::Heat;
use crate::layout::plan::{Plan, PlanDrive, PlanError};
use crate::layout::planner::{self, PlanRequest};
use crate::layout::policy::{Policy, PolicyFile};
use crate::open::Model;
use crate::stage::{self, StageError, StageOptions};
use crate::sys::durable::write_atomic;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Where the experts of a rung lie.
#[derive(Clone, Copy)]
pub enum Layout<'a> {
    /// Planned again for the drives of every rung.
    Planned {
        /// The policy.
        policy: &'a PolicyFile,
        /// What is hot, for policies that place by it.
        heat: Option<&'a Heat>,
    },
    /// One plan, of which every rung keeps the homes on its drives.
    Fixed(&'a Plan),
}

impl Layout<'_> {
    /// Name of the policy.
    pub fn policy_name(&self) -> &str {
        match self {
            Self::Planned { policy, .. } => policy.policy.name(),
            Self::Fixed(plan) => &plan.planner,
        }
    }
}

/// A set of drives to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RungSet {
    /// What makes it a rung.
    pub kind: RungKind,
    /// What its drives share, if that is why.
    pub uplink: Option<String>,
    /// Which drives, ascending.
    pub members: Vec<usize>,
}

/// The rungs of these kinds over so many drives, each set of drives once. `uplinks` are what some of them share.
pub fn sets(drives: usize, kinds: &BTreeSet<RungKind>, uplinks: &[(String, Vec<usize>)]) -> Vec<RungSet> {
    let mut out: Vec<RungSet> = Vec::new();
    let mut push = |kind, uplink: Option<&String>, mut members: Vec<usize>| {
        members.sort_unstable();
        members.dedup();
        if kinds.contains(&kind) && !members.is_empty() && out.iter().all(|s| s.members != members) {
            out.push(RungSet { kind, uplink: uplink.cloned(), members });
        }
    };
    (1..=drives).for_each(|count| push(RungKind::Ladder, None, (0..count).collect()));
    push(RungKind::All, None, (0..drives).collect());
    (0..drives).for_each(|drive| push(RungKind::Solo, None, vec![drive]));
    uplinks.iter().for_each(|(name, members)| push(RungKind::Uplink, Some(name), members.clone()));
    out
}

/// One rung before it is measured.
pub(super) struct Planned {
    pub(super) kind: RungKind,
    pub(super) uplink: Option<String>,
    /// What its runs are called.
    pub(super) arm: String,
    pub(super) plan: Plan,
    /// In the order of the plan.
    pub(super) mounts: Vec<DriveSpec>,
    /// Where the plan is kept beside the records, so that a run can be repeated.
    pub(super) path: PathBuf,
}

impl Planned {
    pub(super) fn names(&self) -> Vec<String> {
        self.mounts.iter().map(|d| d.name.clone()).collect()
    }
}

fn arm_of(set: &RungSet, nth: usize) -> String {
    match set.kind {
        RungKind::Ladder | RungKind::All => format!("rung{}", set.members.len()),
        RungKind::Solo => format!("solo{}", set.members.first().map_or(0, |d| d + 1)),
        RungKind::Uplink => format!("uplink{nth}"),
    }
}

/// Why a set has no plan.
enum Without {
    Fits(String, Option<(u64, u64)>),
    Fails(LadderError),
}

impl From<PlanError> for Without {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Room { reason, needs_bytes, has_bytes } => Self::Fits(reason, Some((needs_bytes, has_bytes))),
            other => Self::Fails(other.into()),
        }
    }
}

/// Plans every rung; the plans are kept in the ladder's folder.
pub(super) fn plan(model: &Model, spec: &LadderSpec<'_>) -> Result<(Vec<Planned>, Vec<Skipped>), LadderError> {
    let kept = |path: &Path, source| RecordError::Io { path: path.to_path_buf(), source };
    let drives_path = spec.folder.join("drives.toml");
    write_atomic(&drives_path, spec::render(spec.drives).as_bytes()).map_err(|e| kept(&drives_path, e))?;
    check_names(model, spec)?;
    let (mut rungs, mut skipped, mut uplinks) = (Vec::new(), Vec::new(), 0);
    for set in spec.sets {
        uplinks += usize::from(set.kind == RungKind::Uplink);
        let mounts: Vec<DriveSpec> = set.members.iter().map(|&d| spec.drives[d].clone()).collect();
        let planned = match spec.layout {
            Layout::Planned { policy, heat } => planned_again(model, spec, &mounts, policy, heat).map(|p| (p, mounts)),
            Layout::Fixed(plan) => part_of(plan, mounts),
        };
        match planned {
            Ok((plan, mounts)) => {
                let arm = arm_of(set, uplinks);
                let path = spec.folder.join(format!("{arm}.plan.json"));
                write_atomic(&path, plan.to_json()?.as_bytes()).map_err(|e| kept(&path, e))?;
                rungs.push(Planned { kind: set.kind, uplink: set.uplink.clone(), arm, plan, mounts, path });
            }
            Err(Without::Fits(reason, room)) => {
                let drives = set.members.iter().map(|&d| spec.drives[d].name.clone()).collect();
                skipped.push(left_out(set.kind, drives, reason, room));
            }
            Err(Without::Fails(error)) => return Err(error),
        }
    }
    some_left(rungs, skipped)
}

/// Stages every rung; one whose drives have no space for it is left out.
pub(super) fn stage(
    model: &Model,
    rungs: Vec<Planned>,
    mut skipped: Vec<Skipped>,
    on_event: &mut dyn FnMut(LadderEvent<'_>),
) -> Result<(Vec<Planned>, Vec<Skipped>), LadderError> {
    let mut staged = Vec::with_capacity(rungs.len());
    for rung in rungs {
        let paths: Vec<PathBuf> = rung.mounts.iter().map(|d| d.path.clone()).collect();
        let drives = rung.mounts.len();
        let show = &mut |progress| on_event(LadderEvent::Staging { drives, progress });
        match stage::stage(&rung.plan, &model.folder, &paths, StageOptions::default(), show) {
            Ok(_) => staged.push(rung),
            Err(error @ StageError::Space { need_bytes, margin_bytes, free_bytes, .. }) => {
                let room = Some((need_bytes.saturating_add(margin_bytes), free_bytes));
                skipped.push(left_out(rung.kind, rung.names(), error.to_string(), room));
            }
            Err(other) => return Err(other.into()),
        }
    }
    some_left(staged, skipped)
}

fn left_out(kind: RungKind, drives: Vec<String>, reason: String, room: Option<(u64, u64)>) -> Skipped {
    Skipped { kind, drives, reason, needs_bytes: room.map(|r| r.0), has_bytes: room.map(|r| r.1) }
}

fn some_left(rungs: Vec<Planned>, skipped: Vec<Skipped>) -> Result<(Vec<Planned>, Vec<Skipped>), LadderError> {
    if rungs.is_empty() {
        let why = skipped.iter().map(|s| format!("{}: {}", s.drives.join(", "), s.reason)).collect::<Vec<_>>();
        return Err(LadderError::NoRung(why.join("; ")));
    }
    Ok((rungs, skipped))
}

/// What would be wrong on every rung.
fn check_names(model: &Model, spec: &LadderSpec<'_>) -> Result<(), LadderError> {
    let known = || spec.drives.iter().map(|d| d.name.as_str()).collect::<Vec<_>>();
    match spec.layout {
        Layout::Planned { policy, .. } => match policy.named().iter().find(|n| !known().contains(n)) {
            Some(name) => Err(LadderError::Option(format!(
                "the policy names drive `{name}`; the drives of this ladder are {}: change the policy, or name the drives \
                 as it does",
                known().join(", ")
            ))),
            None => Ok(()),
        },
        Layout::Fixed(plan) => {
            let manifest = &model.manifest;
            if plan.model_id != manifest.model_id {
                return Err(LadderError::Option(format!(
                    "--fixed-plan: the plan is of model {}, the store holds {}; give a plan of this store",
                    plan.model_id, manifest.model_id
                )));
            }
            match known().into_iter().find(|name| plan.drive_named(name).is_none()) {
                Some(name) => Err(LadderError::Option(format!(
                    "--fixed-plan: the plan has no drive `{name}` (it has {}); leave it out with --order",
                    plan.drives.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ")
                ))),
                None => Ok(()),
            }
        }
    }
}

fn planned_again(
    model: &Model,
    spec: &LadderSpec<'_>,
    mounts: &[DriveSpec],
    policy: &PolicyFile,
    heat: Option<&Heat>,
) -> Result<Plan, Without> {
    let names: Vec<&str> = mounts.iter().map(|d| d.name.as_str()).collect();
    if let Policy::Single { drive: Some(drive) } = &policy.policy
        && !names.contains(&drive.as_str())
    {
        return Err(Without::Fits(format!("the policy puts everything on drive `{drive}`, which is not here"), None));
    }
    let policy = policy.over(&names);
    let drives: Vec<PlanDrive> =
        mounts.iter().map(|d| PlanDrive { name: d.name.clone(), path: d.path.clone() }).collect();
    let mut inputs = spec.inputs.clone();
    inputs.extend(mounts.iter().map(|d| (device_key(&d.name), identity_of(&d.path))));
    let set = match drive_set(mounts, spec.profile, &policy) {
        Err(PlanningError::Plan(e)) => return Err(e.into()),
        other => other.map_err(|e| Without::Fails(e.into()))?,
    };
    let catalog = model.catalog();
    let request = PlanRequest { catalog: &catalog, drives: &drives, policy: &policy, heat, set: &set, inputs };
    Ok(planner::plan_with(request)?.plan)
}

/// The homes of `plan` on the drives of `mounts`, which come back in the order of the plan.
fn part_of(plan: &Plan, mounts: Vec<DriveSpec>) -> Result<(Plan, Vec<DriveSpec>), Without> {
    let mount = |drive: &PlanDrive| mounts.iter().find(|m| m.name == drive.name);
    let keep: Vec<bool> = plan.drives.iter().map(|d| mount(d).is_some()).collect();
    let mounts: Vec<DriveSpec> = plan.drives.iter().filter_map(mount).cloned().collect();
    let mut part = plan.over(&keep).map_err(|(layer, expert)| {
        let here = mounts.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", ");
        Without::Fits(format!("expert {layer}-E{} has no home on {here}", expert.0), None)
    })?;
    for (drive, mount) in part.drives.iter_mut().zip(&mounts) {
        drive.path = mount.path.clone();
    }
    // What was known of a drive that is not here says nothing of this part.
    let gone = plan.drives.iter().zip(&keep).filter(|(_, k)| !**k).map(|(d, _)| device_key(&d.name));
    gone.for_each(|key| drop(part.inputs.remove(&key)));
    Ok((part, mounts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(sets: &[RungSet]) -> Vec<(RungKind, Vec<usize>)> {
        sets.iter().map(|s| (s.kind, s.members.clone())).collect()
    }

    #[test]
    fn each_set_of_drives_is_a_rung_once() {
        use RungKind::{All, Ladder, Solo, Uplink};
        let uplinks = [("hub".to_string(), vec![2, 1]), ("root".to_string(), vec![0, 1, 2])];
        let of = |kinds: &[RungKind]| members(&sets(3, &kinds.iter().copied().collect(), &uplinks));
        let ladder = vec![(Ladder, vec![0]), (Ladder, vec![0, 1]), (Ladder, vec![0, 1, 2])];
        assert_eq!(of(&[Ladder]), ladder);
        assert_eq!(of(&[Ladder, All]), ladder, "the last rung has all drives");
        let mut more = ladder.clone();
        more.extend([(Solo, vec![1]), (Solo, vec![2]), (Uplink, vec![1, 2])]);
        assert_eq!(of(&[Ladder, All, Solo, Uplink]), more);
        assert_eq!(of(&[Solo, All]), [(All, vec![0, 1, 2]), (Solo, vec![0]), (Solo, vec![1]), (Solo, vec![2])]);
        assert_eq!(of(&[Uplink]), [(Uplink, vec![1, 2]), (Uplink, vec![0, 1, 2])]);
        assert_eq!(sets(3, &[Uplink].into(), &[]), [], "nothing is shared");
        let named = sets(3, &[Uplink].into(), &uplinks);
        assert_eq!(named[0].uplink.as_deref(), Some("hub"));
    }
}
