//! `experiment.json`: what a campaign is (arms, prompts, order, what is expected) and what came of it. Written before the
//! first run, so that an interrupted campaign can go on, and after the last.

use super::CampaignError;
use super::arms::{self, Arm, Difference};
use super::evaluate::Results;
use super::order::{Protocol, Step};
use super::prompts::Prompt;
use crate::bench::config::{Asked, RunConfig, nearest};
use crate::bench::record::{RECORD_VERSION, RecordError, RunRecord, write_json};
use crate::knob::Knob;
use crate::stats::compare::{Outcome, Rule};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of `experiment.json` that this program writes.
pub const CAMPAIGN_VERSION: u32 = 1;
/// Its name.
pub const CAMPAIGN_FILE: &str = "experiment.json";
/// Largest JSON file of a results folder that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// How far a campaign is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Begun; if no process works on it, it was killed.
    Running,
    /// Stopped by the user, or for want of space.
    Interrupted,
    /// Every run that was planned is there, or the stop rule ended it.
    Complete,
    /// An arm was rejected.
    Rejected,
}

/// One arm as it was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmFile {
    /// Its name.
    pub name: String,
    /// Settings that somebody gave.
    pub given: Vec<String>,
    /// Settings that must fire whether or not arms differ in them.
    pub fired: Vec<String>,
    /// Everything that its runs must prove.
    pub under_test: Vec<String>,
    /// Digests of what goes into it.
    pub inputs: BTreeMap<String, String>,
    /// The configuration; paths are relative to the folder in which the campaign was started.
    pub config: RunConfig,
}

/// What must come out; a miss is exit code 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Expect {
    /// Verdict by arm.
    pub verdict: BTreeMap<String, Outcome>,
    /// Smallest lower end of the interval of speed, as a multiple of the control's, by arm.
    pub ratio_at_least: BTreeMap<String, f64>,
    /// By arm: settings that cannot fire in it, so that it must be given up for their sake.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub refused: BTreeMap<String, Vec<String>>,
}

/// A campaign on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CampaignFile {
    /// Format version.
    pub version: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// What it is to find out.
    pub hypothesis: Option<String>,
    /// The file that describes it, if there is one.
    pub source: Option<PathBuf>,
    /// When it was begun, UTC.
    pub started: String,
    /// How far it is.
    pub state: State,
    /// How many runs, and in which order.
    pub protocol: Protocol,
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// The arms; the first is the control.
    pub arms: Vec<ArmFile>,
    /// In what they differ; none = the control against itself.
    pub differences: Vec<Difference>,
    /// What must come out.
    pub expect: Expect,
    /// Arms that were given up, and why.
    pub rejected: BTreeMap<String, String>,
    /// What came of it; `None` until it has ended.
    pub results: Option<Results>,
}

impl CampaignFile {
    /// Judging pairs as this campaign does.
    pub fn rule(&self) -> Rule {
        let Protocol { pairs, stop, seed, resamples, .. } = self.protocol;
        let compared = self.arms.len().saturating_sub(1 + self.expect.refused.len());
        Rule { pairs, stop, candidates: compared.max(1), resamples, seed }
    }

    /// No arm was given up but those that had to be.
    pub fn arms_as_expected(&self) -> bool {
        self.rejected.keys().all(|arm| self.expect.refused.contains_key(arm))
    }

    /// All runs that count, in order.
    pub fn steps(&self) -> Vec<Step> {
        self.protocol.steps(self.arms.len(), self.prompts.len())
    }

    /// The arms as they were asked for.
    pub fn to_arms(&self) -> Vec<Arm> {
        let named = |names: &[String]| names.iter().filter_map(|n| Knob::named(n)).collect();
        let arm = |a: &ArmFile| Arm {
            name: a.name.clone(),
            asked: Asked { config: a.config.clone(), given: named(&a.given), repeats: None },
            fired: named(&a.fired),
        };
        self.arms.iter().map(arm).collect()
    }

    /// Whether runs of `other` stand at the same places as runs of this.
    pub fn same_order(&self, other: &Self) -> bool {
        let names = |f: &Self| f.arms.iter().map(|a| a.name.clone()).collect::<Vec<_>>();
        self.protocol == other.protocol && self.prompts.len() == other.prompts.len() && names(self) == names(other)
    }

    /// Reads and checks the file in `folder`: names of arms become folders, and numbers of rows memory.
    pub fn load(folder: &Path) -> Result<Self, CampaignError> {
        let path = folder.join(CAMPAIGN_FILE);
        Self::parse(&read_text(&path)?, path)
    }

    /// Reads and checks the text of the file `path`.
    pub fn parse(text: &str, path: PathBuf) -> Result<Self, CampaignError> {
        let file: Self = parse_versioned(text, &path, CAMPAIGN_VERSION)?;
        let sound = file.protocol.check(file.prompts.len()).and_then(|()| arms::check(&file.to_arms()));
        sound.map_err(|e| RecordError::Format { path, reason: e.to_string() })?;
        Ok(file)
    }

    /// Writes the file into `folder`.
    pub fn save(&self, folder: &Path) -> Result<(), RecordError> {
        write_json(&folder.join(CAMPAIGN_FILE), self)
    }

    /// The record of a step, if it was measured.
    pub fn record_path(&self, folder: &Path, step: &Step) -> PathBuf {
        folder.join("arms").join(step.folder(&self.arms[step.arm].name)).join("record.json")
    }

    /// The records of all steps that were measured.
    pub fn runs(&self, folder: &Path) -> Result<Vec<Option<RunRecord>>, CampaignError> {
        let read = |step: &Step| {
            let path = self.record_path(folder, step);
            if path.exists() { read_versioned(&path, RECORD_VERSION).map(Some) } else { Ok(None) }
        };
        self.steps().iter().map(read).collect()
    }
}

/// Reads a JSON file that begins with a version; one of a newer program is refused.
pub fn read_versioned<T: DeserializeOwned>(path: &Path, newest: u32) -> Result<T, CampaignError> {
    Ok(parse_versioned(&read_text(path)?, path, newest)?)
}

/// The text of a JSON file of a results folder.
pub fn read_text(path: &Path) -> Result<String, RecordError> {
    let fault = |reason: String| RecordError::Format { path: path.to_path_buf(), reason };
    let io = |source| RecordError::Io { path: path.to_path_buf(), source };
    let bytes = std::fs::metadata(path).map_err(io)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(fault(format!("{bytes} bytes; at most {MAX_FILE_BYTES} are read")));
    }
    std::fs::read_to_string(path).map_err(io)
}

/// What a JSON text that begins with a version holds; `path` is for the error.
pub fn parse_versioned<T: DeserializeOwned>(text: &str, path: &Path, newest: u32) -> Result<T, RecordError> {
    #[derive(Deserialize)]
    struct Head {
        version: u32,
    }
    let fault = |e: serde_json::Error| RecordError::Format { path: path.to_path_buf(), reason: e.to_string() };
    let Head { version } = serde_json::from_str(text).map_err(fault)?;
    if version > newest || version == 0 {
        return Err(RecordError::Version { path: path.to_path_buf(), version, newest });
    }
    serde_json::from_str(text).map_err(fault)
}

/// The arm called `name`, or an error that suggests one.
pub fn find_arm(names: &[&str], name: &str, where_: &str) -> Result<usize, CampaignError> {
    names.iter().position(|n| *n == name).ok_or_else(|| {
        let hint = nearest(name, names)
            .map_or_else(|| format!("; there are {}", names.join(", ")), |n| format!("; did you mean `{n}`?"));
        CampaignError::Option(format!("{where_}: there is no arm `{name}`{hint}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_file_that_no_campaign_writes_is_refused_by_name() {
        let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples/aa");
        let good: Value = serde_json::from_str(&std::fs::read_to_string(sample.join(CAMPAIGN_FILE)).unwrap()).unwrap();
        assert_eq!(CampaignFile::load(&sample).unwrap().arms.len(), 2);
        let dir = tempfile::tempdir().unwrap();
        let says = |place: &str, value: Value| {
            let mut bad = good.clone();
            *bad.pointer_mut(place).unwrap() = value;
            std::fs::write(dir.path().join(CAMPAIGN_FILE), bad.to_string()).unwrap();
            CampaignFile::load(dir.path()).unwrap_err().to_string()
        };
        for (place, value, word) in [
            ("/protocol/pairs", json!(1u64 << 60), "at most 1000"),
            ("/protocol/floor_pairs", json!(0), "floor-pairs is 0"),
            ("/arms/1/name", json!("../../elsewhere"), "a name has 1 to 40"),
            ("/arms", json!([]), "0 arms"),
            ("/version", json!(9), "use the one that wrote it"),
        ] {
            let message = says(place, value);
            assert!(message.contains(word) && message.contains(CAMPAIGN_FILE), "{place}: {message}");
        }
    }
}
