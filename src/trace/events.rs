//! Read events and barrier records: plain data, filled on the hot path, written out after the run. Field names and
//! their order are the columns of `reads.csv` and `barriers.csv`.

use crate::ids::{DriveId, ExpertId, LayerId};
use crate::source::Phase;
use serde::{Deserialize, Serialize};

/// What a read was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// An open barrier waits for it.
    Demand,
    /// A guess about a later barrier.
    Prefetch,
    /// Spilled attention cache.
    Kv,
    /// Streamed trunk.
    Trunk,
}

/// How a read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadResult {
    /// All bytes arrived.
    Ok,
    /// Fewer bytes than asked.
    Short,
    /// The kernel or the device refused.
    Error,
    /// Given up before its bytes were needed.
    Cancelled,
    /// Its bounded wait ran out.
    Timeout,
}

/// What a read was worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Demanded and used.
    Demand,
    /// A prefetch that was used in time.
    Useful,
    /// A prefetch that the barrier had to wait for.
    Late,
    /// A prefetch that nobody used.
    Wasted,
}

/// One read of (a part of) an expert. Times are nanoseconds of the run's clock; latencies follow fio:
/// slat = submitted - queued, clat = completed - submitted, lat = both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadEvent {
    /// Forward pass.
    pub step: u64,
    /// Layer read for.
    pub layer: LayerId,
    /// Expert read for.
    pub expert: ExpertId,
    /// Drive that served it.
    pub drive: DriveId,
    /// Which copy: index into the expert's homes, 0 = primary.
    pub replica: u8,
    /// Which part of the expert, of `parts`.
    pub part: u8,
    /// Parts that the expert was read in.
    pub parts: u8,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes asked for (rounded up to the alignment).
    pub bytes: u64,
    /// What it was for.
    pub purpose: Purpose,
    /// Barrier that was open when it was issued.
    pub issued_in: u64,
    /// Barrier that needed it, if any did.
    pub barrier: Option<u64>,
    /// When the reader decided to read.
    pub queued_ns: u64,
    /// When the engine handed it to the kernel.
    pub submitted_ns: u64,
    /// When its last byte was there.
    pub completed_ns: u64,
    /// How it ended.
    pub result: ReadResult,
    /// What it was worth.
    pub outcome: Outcome,
}

/// Why a barrier's last read was last (DESIGN.md section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// It was handed to the drive late.
    QueuedLate,
    /// The drive took long over it.
    DeviceSlow,
    /// Its drive had the largest share.
    BigShare,
    /// A hedge decided it.
    Hedged,
    /// It had been resident and was evicted.
    Evicted,
    /// It was a prefetch that came late.
    PrefetchLate,
    /// Two drives ended together.
    Tie,
    /// Nothing had to be waited for.
    None,
}

/// One barrier: the wait for all experts of one layer in one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BarrierRecord {
    /// Counts barriers of a run from 0.
    pub barrier: u64,
    /// Forward pass.
    pub step: u64,
    /// What the pass was for.
    pub phase: Phase,
    /// Position of its first row.
    pub pos: u64,
    /// Its rows.
    pub rows: u32,
    /// The layer.
    pub layer: LayerId,
    /// Distinct experts.
    pub width: u32,
    /// Experts that were resident.
    pub hits: u32,
    /// Experts that a prefetch had brought.
    pub prefetch_hits: u32,
    /// Payload bytes read.
    pub bytes: u64,
    /// When it opened.
    pub open_ns: u64,
    /// When its first expert was there.
    pub first_ns: u64,
    /// When its last expert was there.
    pub last_ns: u64,
    /// When compute let go of it.
    pub close_ns: u64,
    /// Time in which compute had nothing to do.
    pub stall_ns: u64,
    /// Drive of the last read.
    pub straggler: Option<DriveId>,
    /// How long after the next-to-last **drive** the last one ended.
    pub gap_drive_ns: u64,
    /// How long after the next-to-last **read** the last one ended.
    pub gap_read_ns: u64,
    /// Bound with this plan's homes (bound.rs), where drive rates are known.
    pub bound_layout_ns: Option<u64>,
    /// Bound as if every expert were on every drive, where drive rates are known.
    pub bound_drives_ns: Option<u64>,
    /// Why the last read was last.
    pub cause: Cause,
}
