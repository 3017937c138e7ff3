//! What `trace.json` says of a trace: its drives, the meaning of its columns, what its drives could do, and where it came
//! from. Data only; knows no files.

use super::windows::WindowsHeader;
use crate::ids::DriveId;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Version of trace folders that this program writes.
pub const TRACE_VERSION: u32 = 2;

/// Name of a drive that holds latent rows and no experts; it stands behind the others.
pub const KV_DRIVE: &str = "kv";

/// A drive as it was mapped in the traced run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceDrive {
    /// Its number in the columns `drive` and `straggler`.
    pub id: DriveId,
    /// Its name.
    pub name: String,
    /// Where it was.
    pub path: PathBuf,
    /// Its pace was emulated: its figures are no speed of hardware.
    pub emulated: bool,
    /// `st_dev` of its folder.
    pub device_number: u64,
}

/// A column and what it means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// Its name in the header.
    pub name: String,
    /// What it holds.
    pub meaning: String,
}

/// `trace.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceHeader {
    /// Version of this folder's format.
    pub version: u32,
    /// What the columns ending in `_ns` count.
    pub clock: String,
    /// Columns of `reads.csv`, in order.
    pub reads: Vec<Column>,
    /// Columns of `barriers.csv`, in order.
    pub barriers: Vec<Column>,
    /// Columns of `routes.csv`, in order; empty = the trace has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Column>,
    /// The model that was run, as its store names it; since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<String>,
    /// The drives of the run.
    pub drives: Vec<TraceDrive>,
    /// Wall time of decoding, from the first to the last generated token, in a run that generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_wall_ns: Option<u64>,
    /// What drives could do in the run: the bounds of `barriers.csv` come from these, where every drive has one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rates: Vec<TraceRate>,
    /// Faults that reads met on purpose; where there are some, it is the trace of no normal run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<String>,
    /// Where it came from, if another program measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imported: Option<Imported>,
    /// What `windows.csv` holds, if the run sampled its devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<WindowsHeader>,
    /// Which trace it repeats, if it repeats one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reissued: Option<Reissued>,
}

/// What a drive could do while all of them worked: bytes by `t` = (t - fixed) x rate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceRate {
    /// Name of the drive.
    pub drive: String,
    /// Bytes per second once delivering.
    pub bytes_per_s: u64,
    /// Fixed cost before the first byte.
    pub fixed_ns: u64,
    /// Who says so.
    pub from: RateFrom,
}

/// Where a rate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RateFrom {
    /// The reader learnt it from its own reads.
    #[serde(rename = "learnt in this run")]
    Learnt,
    /// It was known before the run.
    #[serde(rename = "given")]
    Given,
}

/// A trace whose barriers were read again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reissued {
    /// The recorded trace.
    pub from: PathBuf,
    /// Hash of the plan that it was read again under.
    pub plan_hash: String,
    /// Time between barriers: `recorded` or `none`.
    pub gaps: String,
    /// What the recorded trace does not say, and what was taken instead.
    pub assumptions: Vec<String>,
    /// Why the times do not count, if they do not.
    pub rejected: Vec<String>,
}

/// A trace of another program, and what had to be assumed to read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Imported {
    /// Its format.
    pub format: String,
    /// Its files.
    pub files: Vec<PathBuf>,
    /// What it does not say, and what was taken instead; what was left out.
    pub assumptions: Vec<String>,
}

/// Columns as `trace.json` lists them.
pub(super) fn columns(table: &[(&str, &str)]) -> Vec<Column> {
    table.iter().map(|(n, m)| Column { name: (*n).into(), meaning: (*m).into() }).collect()
}

impl TraceHeader {
    /// What follows the number of its drives: that some are emulated, that reads failed on purpose.
    pub fn mark(&self) -> &'static str {
        match (self.drives.iter().any(|d| d.emulated), self.faults.is_empty()) {
            (false, true) => "",
            (true, true) => " (EMULATED)",
            (false, false) => " (INJECTED FAULTS)",
            (true, false) => " (EMULATED, INJECTED FAULTS)",
        }
    }

    /// The header of a trace over `drives`, with this version's columns.
    pub fn new(drives: Vec<TraceDrive>) -> Self {
        Self {
            version: TRACE_VERSION,
            clock: "monotonic nanoseconds since the start of the run".into(),
            reads: columns(&READ_COLUMNS),
            barriers: columns(&BARRIER_COLUMNS),
            routes: Vec::new(),
            model_id: None,
            drives,
            decode_wall_ns: None,
            rates: Vec::new(),
            faults: Vec::new(),
            imported: None,
            windows: None,
            reissued: None,
        }
    }
}

/// Columns of `reads.csv` and their meaning.
pub const READ_COLUMNS: [(&str, &str); 17] = [
    ("step", "forward pass, from 0"),
    ("layer", "layer read for, from 0"),
    ("expert", "expert read for, from 0; 0 in reads of latent rows (kv)"),
    ("drive", "drive that served it, as in `drives`"),
    ("replica", "which copy: index into the expert's homes, 0 = primary"),
    ("part", "part of the expert, from 0"),
    ("parts", "parts that the expert was read in"),
    ("offset", "first byte in the file"),
    ("bytes", "bytes asked for: the payload rounded up to the direct-I/O alignment"),
    ("purpose", "demand, prefetch, kv or trunk"),
    ("issued_in", "barrier that was open when the read was issued"),
    ("barrier", "barrier that needed it; empty = none"),
    ("queued_ns", "when the reader decided to read"),
    ("submitted_ns", "when the engine handed it to the kernel; slat = submitted - queued"),
    ("completed_ns", "when its last byte was there; clat = completed - submitted"),
    ("result", "ok, short, error (refused, or a wrong digest), cancelled or timeout"),
    ("outcome", "demand, useful, late or wasted (its bytes were never used)"),
];

/// Columns of `barriers.csv` and their meaning.
pub const BARRIER_COLUMNS: [(&str, &str); 21] = [
    ("barrier", "counts barriers of a run from 0"),
    ("step", "forward pass, from 0"),
    ("phase", "prefill, decode or verify"),
    ("pos", "position of the pass's first row"),
    ("rows", "rows of the pass"),
    ("layer", "the layer, from 0"),
    ("width", "distinct experts"),
    ("hits", "experts that were resident"),
    ("prefetch_hits", "experts that a prefetch had brought"),
    ("bytes", "payload bytes read"),
    ("open_ns", "when it opened"),
    ("first_ns", "when its first expert was there"),
    ("last_ns", "when its last expert was there"),
    ("close_ns", "when compute let go of it"),
    ("stall_ns", "time in which compute had nothing to do"),
    ("straggler", "drive of the last read; empty = nothing was read"),
    ("gap_drive_ns", "how long after the next-to-last drive the last one ended; 0 with one drive"),
    ("gap_read_ns", "how long after the next-to-last read the last one ended; 0 with one read"),
    ("bound_layout_ns", "bound with this plan's homes; empty = drive rates unknown"),
    ("bound_drives_ns", "bound as if every expert were on every drive; empty = drive rates unknown"),
    (
        "cause",
        "why the last read was last: queued_late, device_slow, big_share, hedged, evicted, prefetch_late, tie, none",
    ),
];
