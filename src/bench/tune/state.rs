//! `tune.json`: how far a tune is, what each part was made from, and what came of it. Written after every part, so that a
//! tune that was killed goes on.

use super::inputs::Inputs;
use super::promote::Written;
use super::rank::{RankLine, Skipped};
use super::settings::Change;
use super::{TuneError, TuneSpec, digest_of};
use crate::bench::campaign::file::{State, read_versioned};
use crate::bench::campaign::prompts::Prompt;
use crate::bench::environment;
use crate::bench::record::{RecordError, utc_now, write_json};
use crate::drive::device::identity_of;
use crate::drive::spec::render;
use crate::replay::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Version of `tune.json` that this program writes.
pub const TUNE_VERSION: u32 = 1;
/// Its name.
pub const TUNE_FILE: &str = "tune.json";

/// The profile that candidates are compared with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Current {
    /// There was none: one copy of every expert dealt to the drives in turn, and default settings.
    pub from_defaults: bool,
    /// Policy of its plan.
    pub planner: String,
    /// Hash of its plan.
    pub plan_hash: String,
}

/// What `ceiling` measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CeilingPart {
    /// Digest of what it depends on.
    pub inputs: String,
    /// The profile of drives.
    pub file: PathBuf,
    /// It was measured before, and given.
    pub given: bool,
}

/// The traced run of the current profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracePart {
    /// Digest of what it depends on.
    pub inputs: String,
    /// The trace.
    pub folder: PathBuf,
    /// Wall time of the run, its setting up included.
    pub wall_s: f64,
    /// Its decode rate.
    pub decode_tok_s: f64,
    /// Where its time went; its `drive` counts `drives` from 0.
    pub verdict: Option<Verdict>,
    /// Names of its drives.
    pub drives: Vec<String>,
    /// Settings that the run did not prove.
    pub unproved: Vec<String>,
}

/// Heat that was counted for this tune.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeatPart {
    /// Digest of what it depends on.
    pub inputs: String,
    /// The heat file.
    pub file: PathBuf,
}

/// A candidate that is worth measuring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finalist {
    /// Its arm.
    pub arm: String,
    /// Its plan.
    pub plan_file: PathBuf,
    /// Hash of the plan.
    pub plan_hash: String,
    /// Predicted ratio of decode rates.
    pub gain: f64,
    /// Payload bytes that staging copies.
    pub copy_bytes: u64,
    /// In what it differs from the current profile.
    pub changes: Vec<Change>,
    /// Settings that must fire whether or not arms differ in them.
    pub fired: Vec<String>,
    /// The whole profile that would be promoted.
    pub profile: toml::Table,
}

/// What the simulator says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ranking {
    /// Digest of what it depends on.
    pub inputs: String,
    /// Simulations of each candidate, and the first seed.
    pub repeats: u32,
    /// See `repeats`.
    pub seed: u64,
    /// Decode rate of the traced run.
    pub recorded_tok_s: Option<f64>,
    /// The same run simulated, over it, minus 1: how far off the simulator is where it can be checked.
    pub simulator_error: Option<f64>,
    /// All candidates, the best first; the current profile is among them.
    pub candidates: Vec<RankLine>,
    /// What was not tried, and why.
    pub skipped: Vec<Skipped>,
    /// What had to be assumed.
    pub assumptions: Vec<String>,
    /// Those that are worth measuring.
    pub finalists: Vec<Finalist>,
}

/// What came of a tune.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuneResult {
    /// In one sentence.
    pub says: String,
    /// The arm whose settings are the profile now.
    pub promoted: Option<String>,
    /// Where the former profile is kept.
    pub former: Option<PathBuf>,
    /// The plan of the new profile.
    pub plan: Option<PathBuf>,
    /// Why, candidate by candidate.
    pub reasons: Vec<String>,
    /// Something was rejected.
    pub rejected: bool,
    /// There is more to do: the same command goes on.
    pub unfinished: bool,
}

impl TuneResult {
    pub(super) fn kept(says: &str, reasons: Vec<String>) -> Self {
        Self { says: says.into(), reasons, ..Self::default() }
    }

    pub(super) fn rejected(says: &str, reasons: Vec<String>) -> Self {
        Self { rejected: true, ..Self::kept(says, reasons) }
    }

    pub(super) fn out_of_time(file: &TuneFile, budget: Duration) -> Self {
        let done: Vec<&str> = [
            ("ceiling", file.ceiling.is_some()),
            ("trace", file.trace.is_some()),
            ("ranking", file.ranking.is_some()),
            ("part of the campaign", file.campaign.is_some()),
        ]
        .iter()
        .filter(|(_, there)| *there)
        .map(|(name, _)| *name)
        .collect();
        let done = if done.is_empty() { "nothing".to_string() } else { done.join(", ") };
        let minutes = budget.as_secs_f64() / 60.0;
        let why = format!(
            "the budget of {minutes:.1} minutes is used up; kept for the next call: {done}. The same command goes on from there"
        );
        let says = "too few runs fit into the budget to say anything: kept";
        Self { unfinished: true, ..Self::kept(says, vec![why]) }
    }

    pub(super) fn promoted(finalist: &Finalist, written: Written, reasons: Vec<String>, emulated: bool) -> Self {
        let ratio = written.ratio;
        let emulated = if emulated { " (EMULATED drives)" } else { "" };
        Self {
            says: format!("{} is {ratio:.3} times as fast as the profile before{emulated}: promoted", finalist.arm),
            promoted: Some(finalist.arm.clone()),
            former: written.former,
            plan: Some(written.plan),
            reasons,
            ..Self::default()
        }
    }
}

/// A tune on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuneFile {
    /// Format version.
    pub version: u32,
    /// When it was begun, UTC.
    pub started: String,
    /// Program and revision.
    pub argodrive: String,
    /// How far it is.
    pub state: State,
    /// Digest of model, drives and profile's path: a tune of other ones is another tune.
    pub identity: String,
    /// A drive's pace is emulated: no figure is a speed of the hardware.
    pub emulated: bool,
    /// The model.
    pub model_id: String,
    /// The run profile.
    pub profile: PathBuf,
    /// What it is.
    pub current: Current,
    /// Evaluation prompts.
    pub prompts: Vec<Prompt>,
    /// What `ceiling` measured.
    pub ceiling: Option<CeilingPart>,
    /// The traced run.
    pub trace: Option<TracePart>,
    /// Heat of the heat prompts.
    pub heat: Option<HeatPart>,
    /// The ranking.
    pub ranking: Option<Ranking>,
    /// Folder of the campaign, within the tune's.
    pub campaign: Option<String>,
    /// What came of it; `None` until it has ended.
    pub result: Option<TuneResult>,
}

impl TuneFile {
    /// A tune that has not begun.
    pub(super) fn new(spec: &TuneSpec, inputs: &Inputs) -> Result<Self, TuneError> {
        let profile = std::path::absolute(&spec.profile).unwrap_or_else(|_| spec.profile.clone());
        let model_id = inputs.model.manifest.model_id.clone();
        Ok(Self {
            version: TUNE_VERSION,
            started: utc_now(),
            argodrive: environment::version(),
            state: State::Running,
            identity: digest_of(&[&model_id, &drives_digest(inputs), &profile.to_string_lossy()]),
            emulated: inputs.specs.iter().any(|s| s.emulate.is_some()),
            model_id,
            profile,
            current: Current {
                from_defaults: inputs.from_defaults,
                planner: inputs.plan.planner.clone(),
                plan_hash: inputs.plan.hash()?,
            },
            prompts: inputs.prompts.clone(),
            ceiling: None,
            trace: None,
            heat: None,
            ranking: None,
            campaign: None,
            result: None,
        })
    }

    /// The newest tune in `root` that has not ended and is of the same model, drives and profile as `new`. Files of other versions
    /// are passed over.
    pub(super) fn unfinished(root: &Path, new: &Self) -> Result<Option<(PathBuf, Self)>, TuneError> {
        let entries = std::fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.path());
        let mut found: Vec<(PathBuf, Self)> = Vec::new();
        for folder in entries.filter(|p| p.join(TUNE_FILE).exists()) {
            // one that cannot be read is nothing to go on with
            let Ok(file) = Self::load(&folder) else { continue };
            found.push((folder, file));
        }
        found.retain(|(_, f)| f.identity == new.identity);
        found.sort_by(|a, b| (&a.1.started, &a.0).cmp(&(&b.1.started, &b.0)));
        Ok(found.pop().filter(|(_, f)| matches!(f.state, State::Running | State::Interrupted)))
    }

    /// Reads the file in `folder`; one of a newer program is refused.
    pub fn load(folder: &Path) -> Result<Self, TuneError> {
        Ok(read_versioned(&folder.join(TUNE_FILE), TUNE_VERSION)?)
    }

    /// Writes it into `folder`.
    pub fn save(&self, folder: &Path) -> Result<(), RecordError> {
        write_json(&folder.join(TUNE_FILE), self)
    }
}

/// Digest of the drives as they are described and as they are.
pub(super) fn drives_digest(inputs: &Inputs) -> String {
    let devices: Vec<String> = inputs.specs.iter().map(|s| identity_of(&s.path)).collect();
    digest_of(&[&render(&inputs.specs), &devices.join("\n")])
}
