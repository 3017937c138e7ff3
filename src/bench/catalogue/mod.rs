//! The catalogue over everything that was measured: one row for each run, rung of a ladder, comparison of a campaign, profile and
//! trace below a results folder. Data only: `rows` turns records into rows, `walk` finds them, `query` picks, `group` counts,
//! `stale` says which inputs have changed, `compare` lays two beside each other, `export` writes them, `bundle` and
//! `unpack` carry them to another machine. Knows nothing of terminals.

pub mod beside;
pub mod bundle;
pub mod compare;
pub mod export;
pub mod group;
pub mod query;
pub mod rows;
pub mod scrub;
pub mod stale;
mod stale_inputs;
mod tar;
pub mod today;
pub mod unpack;
pub mod walk;

use super::campaign::evaluate::Effect;
use super::trouble::FAULTS_LABEL;
use crate::stats::compare::Outcome;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// One run.
    Run,
    /// A rung of a ladder.
    Rung,
    /// A candidate of a campaign against its control.
    Comparison,
    /// A profile that `ceiling` measured.
    Ceiling,
    /// A trace folder.
    Trace,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Run, Self::Rung, Self::Comparison, Self::Ceiling, Self::Trace];

    /// As in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Rung => "rung",
            Self::Comparison => "comparison",
            Self::Ceiling => "ceiling",
            Self::Trace => "trace",
        }
    }
}

/// What a record says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The candidate is faster.
    Better,
    /// It is slower.
    Worse,
    /// No difference that could not be chance.
    WithinNoise,
    /// No difference, and neither arm waits for drives.
    NotStorageBound,
    /// Too few pairs to say.
    TooFew,
    /// A campaign that has not ended.
    Unfinished,
    /// It counts, and was compared with nothing.
    Measured,
    /// It does not count.
    Rejected,
    /// Put aside, because its inputs had changed when its campaign went on.
    PutAside,
}

impl Verdict {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Better,
        Self::Worse,
        Self::WithinNoise,
        Self::NotStorageBound,
        Self::TooFew,
        Self::Unfinished,
        Self::Measured,
        Self::Rejected,
        Self::PutAside,
    ];

    /// As in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Better => Outcome::Better.name(),
            Self::Worse => Outcome::Worse.name(),
            Self::WithinNoise => Outcome::WithinNoise.name(),
            Self::NotStorageBound => Outcome::NotStorageBound.name(),
            Self::TooFew => Outcome::TooFew.name(),
            Self::Unfinished => "unfinished",
            Self::Measured => "measured",
            Self::Rejected => "rejected",
            Self::PutAside => "put-aside",
        }
    }

    /// Whether it says that something did not help.
    pub fn is_negative(self) -> bool {
        matches!(self, Self::Worse | Self::WithinNoise | Self::NotStorageBound | Self::Rejected)
    }

    /// Whether figures under it mean anything.
    pub fn counts(self) -> bool {
        !matches!(self, Self::Rejected | Self::PutAside)
    }
}

impl From<Outcome> for Verdict {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Better => Self::Better,
            Outcome::Worse => Self::Worse,
            Outcome::WithinNoise => Self::WithinNoise,
            Outcome::NotStorageBound => Self::NotStorageBound,
            Outcome::TooFew => Self::TooFew,
        }
    }
}

/// The program and the machine of a record; empty = not in the record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Version and revision of argodrive.
    pub argodrive: String,
    /// Operating system and kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu: String,
}

/// One row of the catalogue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Label of the bundle that it came in; `None` = measured here.
    pub origin: Option<String>,
    /// The file that holds it.
    pub path: PathBuf,
    /// When it was begun, UTC; empty = unknown.
    pub when: String,
    /// What it is.
    pub kind: Kind,
    /// Name of the experiment: the folder that holds folders of this kind.
    pub experiment: String,
    /// The arm, rung, candidate or drives file.
    pub name: String,
    /// What a candidate was compared with.
    pub control: Option<String>,
    /// It is a run of a ladder or campaign that has rows of its own, or its trace.
    pub inside: bool,
    /// The model's id; empty = unknown.
    pub model: String,
    /// Names of the drives; empty = unknown, or experts in memory.
    pub drives: Vec<String>,
    /// A drive's pace was emulated: no figure is a speed of the hardware.
    pub emulated: bool,
    /// What must be said of a trunk that is not the released one, and of faults on purpose.
    pub trunk: Option<String>,
    /// Decode tokens per second; a median where there are several runs.
    pub tok_s: Option<f64>,
    /// Slowest and fastest run.
    pub tok_s_range: Option<(f64, f64)>,
    /// Of a ceiling: what all drives delivered together.
    pub bytes_per_s: Option<f64>,
    /// Candidate over control, with its interval; of a rung: its median over the first rung's, without one.
    pub effect: Option<Effect>,
    /// Runs behind the figures; pairs of a comparison.
    pub runs: usize,
    /// The verdict.
    pub verdict: Verdict,
    /// The verdict in words, or why it does not count.
    pub says: String,
    /// Hash of the plan; empty = unknown or none.
    pub plan: String,
    /// Hash of the generated tokens; empty = unknown.
    pub tokens: String,
    /// Settings by dotted name: of the run, of a rung's first run, of the candidate.
    pub settings: BTreeMap<String, String>,
    /// Digests of what it was measured with, and the kind of build: of a run, of the candidate.
    pub inputs: BTreeMap<String, String>,
    /// Where it ran.
    pub machine: Machine,
}

impl Row {
    /// `experiment: name` or `experiment: name vs control`.
    pub fn title(&self) -> String {
        let against = self.control.as_ref().map(|c| format!(" vs {c}")).unwrap_or_default();
        format!("{}: {}{against}", self.experiment, self.name)
    }

    /// Reads failed on purpose: no normal result.
    pub fn has_faults(&self) -> bool {
        self.trunk.as_ref().is_some_and(|label| label.starts_with(FAULTS_LABEL))
    }

    /// How `title`s of emulated drives and of trunks that are not exact end.
    pub fn emulated_mark(&self) -> String {
        let trunk = self.trunk.as_ref().map(|label| format!(" [{label}]")).unwrap_or_default();
        format!("{}{trunk}", if self.emulated { " (EMULATED)" } else { "" })
    }
}
