//! `ladder.json`: what a climbed ladder was and gave. Data only. Files of version 1 (rungs with medians, nothing beside them)
//! stay readable.

use super::super::campaign::evaluate::Effect;
use super::value::MAX_OFF;
use crate::decode::generate::Rates;
use crate::replay::verdict::Verdict;
use crate::stats::compare::Outcome;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the files that this program writes.
pub const LADDER_VERSION: u32 = 2;
/// The record in a ladder's folder.
pub const LADDER_FILE: &str = "ladder.json";
/// Largest record that is read.
pub const MAX_BYTES: u64 = 16 << 20;

/// What makes a set of drives a rung.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RungKind {
    /// The first so many drives.
    #[default]
    Ladder,
    /// All of them.
    All,
    /// One drive alone.
    Solo,
    /// The drives of one shared uplink.
    Uplink,
}

/// What the drives brought that a rung has and the one below has not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Added {
    /// Those drives.
    pub drives: Vec<String>,
    /// Pairs of runs in the same row of the order.
    pub pairs: usize,
    /// Decode speed over that of the rung below; `None` without a pair.
    pub effect: Option<Effect>,
    /// Level of its interval: the rungs share 5 %.
    pub level: f64,
    /// What that means.
    pub outcome: Outcome,
}

/// The barriers of the prompt read back to back, without compute. Medians over the readings that count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Raw {
    /// Readings that count.
    pub readings: usize,
    /// Barriers of each.
    pub barriers: usize,
    /// Mean time from open to last arrival.
    pub barrier_mean_ns: u64,
    /// That of the fastest and of the slowest reading.
    pub barrier_range_ns: (u64, u64),
    /// Barriers for each second from open to last arrival.
    pub barriers_per_s: f64,
    /// Expert bytes for each such second.
    pub bytes_per_s: f64,
    /// How many times as fast as on the rung that gains are counted from; `None` where that one has no reading.
    pub io_gain: Option<f64>,
    /// Mean bound with the homes of the plan; `None` where rates are not known or the drives are too many.
    pub bound_layout_ns: Option<u64>,
    /// Mean bound as if every expert were on every drive.
    pub bound_drives_ns: Option<u64>,
    /// `bound_layout` / measured: what the reader makes of the layout.
    pub reader_efficiency: Option<f64>,
    /// `bound_drives / bound_layout`: what the layout makes of the drives.
    pub plan_efficiency: Option<f64>,
}

/// The same barriers, simulated on the rung's plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Simulated {
    /// Mean time from open to last arrival.
    pub barrier_mean_ns: u64,
    /// How many times as fast as the rung that gains are counted from, simulated too.
    pub io_gain: Option<f64>,
    /// (simulated gain / gain of the raw reading) - 1.
    pub off: Option<f64>,
    /// Decode tokens per second of the traced text.
    pub decode_tok_s: Option<f64>,
}

/// One rung's figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rung {
    /// The name of its runs and plan; empty in version 1, where they count rungs from 1.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub arm: String,
    /// What makes it one.
    #[serde(default)]
    pub kind: RungKind,
    /// What its drives share, if that is why they are together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// Drives in use, by name, in the order of the plan.
    pub drives: Vec<String>,
    /// Hash of the rung's plan.
    pub plan: String,
    /// Median of each rate over the rung's runs.
    pub rates: Rates,
    /// Slowest and fastest run, decode tokens per second.
    pub decode_tok_s_range: (f64, f64),
    /// Bootstrap interval (95 %) of the median decode rate; `None` with fewer than six runs.
    #[serde(default)]
    pub decode_tok_s_interval: Option<(f64, f64)>,
    /// Median decode rate as a share of that with the most drives.
    pub share_of_top: f64,
    /// Median decode rate as a multiple of the ladder's first rung's.
    pub gain: f64,
    /// Median share of decode time in which compute waited for experts.
    pub io_wait_share: f64,
    /// Median over runs of the mean barrier, nanoseconds.
    pub barrier_mean_ns: u64,
    /// Runs that count.
    pub runs: usize,
    /// Where the time of decoding went, all runs that count together; its `drive` counts `drives` from 0.
    #[serde(default)]
    pub verdict: Option<Verdict>,
    /// What it brought over the rung below; `None` on the first, and beside the ladder.
    #[serde(default)]
    pub added: Option<Added>,
    /// The raw reading of its barriers.
    #[serde(default)]
    pub raw: Option<Raw>,
    /// Their simulation.
    #[serde(default)]
    pub simulated: Option<Simulated>,
}

impl Rung {
    /// The first so many drives, or all of them.
    pub fn of_ladder(&self) -> bool {
        matches!(self.kind, RungKind::Ladder | RungKind::All)
    }

    /// What it is called in a table: how many drives, or which.
    pub fn label(&self) -> String {
        match self.kind {
            RungKind::Ladder | RungKind::All => self.drives.len().to_string(),
            RungKind::Solo => format!("{} alone", self.drives.join(", ")),
            RungKind::Uplink => self.drives.join(" + "),
        }
    }

    /// Simulated and read I/O gain are further apart than [`MAX_OFF`].
    pub fn far_off(&self) -> Option<f64> {
        self.simulated.as_ref().and_then(|s| s.off).filter(|off| off.abs() > MAX_OFF)
    }

    /// Whiskers of its decode rate: the interval, or with too few runs the slowest and the fastest.
    pub fn spread(&self) -> (f64, f64) {
        self.decode_tok_s_interval.unwrap_or(self.decode_tok_s_range)
    }
}

/// A rung that could not be measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Skipped {
    /// What would have made it one.
    pub kind: RungKind,
    /// Its drives.
    pub drives: Vec<String>,
    /// Why.
    pub reason: String,
    /// Bytes that it takes, where room is the reason.
    pub needs_bytes: Option<u64>,
    /// Bytes that there are.
    pub has_bytes: Option<u64>,
}

/// Whether one more drive pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Buy {
    /// Too few runs.
    TooFew,
    /// No.
    DoNotBuy,
    /// It would bring something.
    OneMore,
    /// The last one paid; what the next one would bring is not known.
    Unknown,
}

/// What the ladder says to somebody who thinks of one more drive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Advice {
    /// In a word.
    pub buy: Buy,
    /// In a sentence.
    pub says: String,
    /// Decode speed with one more drive over that of the top rung, simulated.
    pub one_more: Option<Effect>,
}

/// A climbed ladder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LadderRecord {
    /// Format version.
    pub version: u32,
    /// The model's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The model.
    pub model_id: String,
    /// The policy of every rung.
    pub policy: String,
    /// Hash of the one plan that every rung keeps its part of; `None` = planned again for each.
    #[serde(default)]
    pub fixed_plan: Option<String>,
    /// Some drive's pace was emulated: no figure is a speed of the hardware.
    pub emulated: bool,
    /// What must be said of a trunk that is not the released one, and of faults on purpose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trunk: Option<String>,
    /// The rungs: the ladder with the fewest drives first, then drives alone, then shared uplinks.
    pub rungs: Vec<Rung>,
    /// Rungs that could not be measured.
    #[serde(default)]
    pub skipped: Vec<Skipped>,
    /// Hash of the tokens that every run generated.
    pub token_hash: String,
    /// Order in which rungs were measured (index into `rungs`), warm-ups left out.
    pub order: Vec<usize>,
    /// Where the rates come from that bounds follow from.
    #[serde(default)]
    pub bounds_from: Option<String>,
    /// Where the drives of the simulation come from.
    #[serde(default)]
    pub simulated_from: Option<String>,
    /// What else there is to know.
    #[serde(default)]
    pub remarks: Vec<String>,
    /// Whether one more drive pays; `None` of a ladder that does not count.
    #[serde(default)]
    pub advice: Option<Advice>,
    /// Why the ladder does not count, if it does not.
    pub rejected: Vec<String>,
    /// The words of the command that climbed it; older programs did not keep them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
}

impl LadderRecord {
    /// Reads a record; the error says what is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let no = |e: serde_json::Error| format!("no ladder.json of this program: {e}");
        let Head { version } = serde_json::from_str(text).map_err(no)?;
        if version == 0 {
            return Err("version 0 was never written".into());
        }
        if version > LADDER_VERSION {
            return Err(format!("version {version} was written by a newer argodrive; use that one"));
        }
        serde_json::from_str(text).map_err(no)
    }

    /// The record in the folder of a ladder.
    pub fn load(folder: &Path) -> Result<Self, String> {
        let path = folder.join(LADDER_FILE);
        let fault = |e: String| format!("{}: {e}", path.display());
        let bytes = std::fs::metadata(&path).map_err(|e| fault(e.to_string()))?.len();
        if bytes > MAX_BYTES {
            return Err(fault(format!("{bytes} bytes; a ladder has at most {MAX_BYTES}")));
        }
        let text = std::fs::read_to_string(&path).map_err(|e| fault(e.to_string()))?;
        Self::parse(&text).map_err(fault)
    }

    /// The rungs of the first so many drives, fewest first.
    pub fn ladder(&self) -> impl Iterator<Item = &Rung> {
        self.rungs.iter().filter(|r| r.of_ladder())
    }

    /// The rung that gains are counted from: the ladder's first, or else the first with the fewest drives.
    pub fn base(&self) -> Option<usize> {
        let first = self.rungs.iter().position(|r| r.kind == RungKind::Ladder);
        first.or_else(|| (0..self.rungs.len()).min_by_key(|&at| self.rungs[at].drives.len()))
    }

    /// The first of the rungs with the most drives.
    pub fn top(&self) -> Option<usize> {
        (0..self.rungs.len()).max_by_key(|&at| (self.rungs[at].drives.len(), std::cmp::Reverse(at)))
    }
}
