//! From drives as files describe them to drives as a planner sees them: rates of a profile, room of a file system.

use crate::drive::profile::{Profile, ProfileError};
use crate::drive::spec::DriveSpec;
use crate::layout::drives::{DriveFacts, DriveSet, JointRate};
use crate::layout::plan::PlanError;
use crate::layout::policy::PolicyFile;
use crate::sys::space::free_bytes;
use std::path::Path;

/// The drives cannot be planned for.
#[derive(Debug, thiserror::Error)]
pub enum PlanningError {
    /// The profile is of other drives.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// Drives and policy do not go together.
    #[error(transparent)]
    Plan(#[from] PlanError),
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
        let fits = |free: &u64| *free > 0 && spec.emulate.is_none();
        fact.capacity_bytes =
            free_bytes(&spec.path).ok().filter(fits).map(|free| free.saturating_add(held(&spec.path)));
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

/// Bytes of experts that a drive's folder holds already: they may stay, so they are room too.
fn held(path: &Path) -> u64 {
    let models = std::fs::read_dir(path.join("argodrive")).into_iter().flatten().flatten();
    let files = models.filter_map(|m| std::fs::read_dir(m.path()).ok()).flatten().flatten();
    files.filter_map(|f| f.metadata().ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}
