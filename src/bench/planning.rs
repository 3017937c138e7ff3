//! From drives as files describe them to drives as a planner sees them: rates of a profile, room of a file system.

use super::config::RunConfig;
use crate::drive::profile::{Profile, ProfileError};
use crate::drive::spec::{self, DriveSpec, SpecError};
use crate::files::{self, Kind};
use crate::layout::drives::{DriveFacts, DriveSet, JointRate};
use crate::layout::plan::{Plan, PlanError};
use crate::layout::policy::PolicyFile;
use crate::open::{Model, OpenError};
use crate::reader::{ReaderError, mounts_of};
use crate::sys::space::free_bytes;
use std::path::{Path, PathBuf};

/// The drives cannot be planned for.
#[derive(Debug, thiserror::Error)]
pub enum PlanningError {
    /// The profile is of other drives.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// Drives and policy do not go together.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A plan file.
    #[error("plan {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The drives file.
    #[error(transparent)]
    Drives(#[from] SpecError),
    /// Plan and drives file do not belong together.
    #[error(transparent)]
    Mounts(#[from] ReaderError),
    /// Store and plan do not belong together.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A flag that could do nothing.
    #[error("{0}: this model is dense, it reads no experts; leave the flag out")]
    Dense(&'static str),
}

/// Reads and checks a plan file.
pub fn read_plan(path: &Path) -> Result<Plan, PlanningError> {
    let fault = |reason: String| PlanningError::File { path: path.to_path_buf(), reason };
    let text = files::read_text(path).map_err(|e| fault(format!("{e}; give {}", Kind::Plan.name())))?;
    let other = |e: PlanError| match files::instead(&text, Kind::Plan) {
        Some(other) => fault(format!("not a valid plan: {other}")),
        None => fault(e.to_string()),
    };
    Plan::parse(&text).map_err(other)
}

/// Plan and mounts of a configuration: those of its files, or the store as the one drive. `None` when nothing streams.
pub fn plan_and_mounts(model: &Model, config: &RunConfig) -> Result<Option<(Plan, Vec<DriveSpec>)>, PlanningError> {
    if !model.has_experts() {
        let idle = [
            ("--plan", config.plan.is_some()),
            ("--drives", config.drives.is_some()),
            ("--trace", config.trace.is_some()),
        ];
        return match idle.iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(PlanningError::Dense(flag)),
            None => Ok(None),
        };
    }
    if config.resident {
        return Ok(None);
    }
    let Some(path) = &config.plan else { return Ok(Some(model.store_plan()?)) };
    let plan = read_plan(path)?;
    let specs = config.drives.as_ref().map(|p| spec::load(p)).transpose()?;
    let mounts = mounts_of(&plan, specs.as_deref())?;
    Ok(Some((plan, mounts)))
}

/// What is known of the drives: the policy's word, then the profile; room is what a drive's file system has free (emulated
/// drives share one, and are not limited).
pub fn drive_set(
    specs: &[DriveSpec],
    profile: Option<&Profile>,
    policy: &PolicyFile,
) -> Result<DriveSet, PlanningError> {
    let names: Vec<&str> = specs.iter().map(|s| s.name.as_str()).collect();
    let mut facts = vec![DriveFacts::default(); specs.len()];
    for (fact, spec) in facts.iter_mut().zip(specs) {
        fact.capacity_bytes = room_bytes(spec);
    }
    let (mut joints, mut together) = (Vec::new(), None);
    if let Some(profile) = profile {
        for (fact, model) in facts.iter_mut().zip(profile.models_of(specs)?) {
            let rate = model.bound_rate();
            fact.rate_bytes_per_s = Some(rate.bytes_per_s);
            fact.fixed_ns = Some(rate.fixed_ns);
        }
        joints = profile
            .groups
            .iter()
            .map(|g| JointRate { members: g.members.clone(), rate_bytes_per_s: g.bytes_per_s })
            .collect();
        // A plan over fewer drives than were measured is not held to what all of them did.
        together = (profile.drives.len() == specs.len()).then_some(profile.together.bytes_per_s);
    }
    Ok(DriveSet::assemble(&names, &facts, &joints, together, policy)?)
}

/// Room for experts on a drive; `None` = not limited, or not known.
pub fn room_bytes(spec: &DriveSpec) -> Option<u64> {
    let fits = |free: &u64| *free > 0 && spec.emulate.is_none();
    free_bytes(&spec.path).ok().filter(fits).map(|free| free.saturating_add(held(&spec.path)))
}

/// Bytes of experts that a drive's folder holds already: they may stay, so they are room too.
fn held(path: &Path) -> u64 {
    let models = std::fs::read_dir(path.join("argodrive")).into_iter().flatten().flatten();
    let files = models.filter_map(|m| std::fs::read_dir(m.path()).ok()).flatten().flatten();
    files.filter_map(|f| f.metadata().ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}
