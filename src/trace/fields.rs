//! From the fields of a row, whatever file they stand in, to a read event, a barrier record, a window or a route: the
//! words of the format and what it promises of every row (`queued <= submitted <= completed`, barriers ascending).

use super::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use super::log::TraceError;
use super::routes::RouteRow;
use super::rows::Row;
use super::windows::{Scope, Window};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::source::Phase;
use std::collections::BTreeMap;

/// The words of `purpose`.
pub const PURPOSES: [(&str, Purpose); 4] =
    [("demand", Purpose::Demand), ("prefetch", Purpose::Prefetch), ("kv", Purpose::Kv), ("trunk", Purpose::Trunk)];
/// The words of `result`.
pub const RESULTS: [(&str, ReadResult); 5] = [
    ("ok", ReadResult::Ok),
    ("short", ReadResult::Short),
    ("error", ReadResult::Error),
    ("cancelled", ReadResult::Cancelled),
    ("timeout", ReadResult::Timeout),
];
/// The words of `outcome`.
pub const OUTCOMES: [(&str, Outcome); 4] =
    [("demand", Outcome::Demand), ("useful", Outcome::Useful), ("late", Outcome::Late), ("wasted", Outcome::Wasted)];
/// The words of `phase`.
pub const PHASES: [(&str, Phase); 3] =
    [("prefill", Phase::Prefill), ("decode", Phase::Decode), ("verify", Phase::Verify)];
/// The words of `cause`.
pub const CAUSES: [(&str, Cause); 8] = [
    ("queued_late", Cause::QueuedLate),
    ("device_slow", Cause::DeviceSlow),
    ("big_share", Cause::BigShare),
    ("hedged", Cause::Hedged),
    ("evicted", Cause::Evicted),
    ("prefetch_late", Cause::PrefetchLate),
    ("tie", Cause::Tie),
    ("none", Cause::None),
];

/// The words of `scope`.
pub const SCOPES: [(&str, Scope); 2] = [("drive", Scope::Drive), ("device", Scope::Device)];

/// The word that stands for `value` in one of the tables above.
pub fn word_of<T: Copy + PartialEq>(words: &[(&'static str, T)], value: T) -> &'static str {
    words.iter().find(|(_, v)| *v == value).map_or("?", |(w, _)| w)
}

/// The typed fields of one row.
pub trait Fields {
    /// A whole number of at most `max`.
    fn whole(&self, index: usize, max: u64) -> Result<u64, TraceError>;
    /// Whether the field is empty.
    fn is_empty(&self, index: usize) -> bool;
    /// The value that belongs to one of a few words.
    fn word<T: Copy>(&self, index: usize, words: &[(&str, T)]) -> Result<T, TraceError>;
    /// A decimal number of at least 0 in units of 10^-`digits`.
    fn scaled(&self, index: usize, digits: u32) -> Result<u64, TraceError>;
    /// A decimal number that is finite.
    fn float(&self, index: usize) -> Result<f32, TraceError>;
    /// The field as text.
    fn text(&self, index: usize) -> String;
    /// A fault of the field.
    fn error(&self, index: usize, reason: String) -> TraceError;

    /// A whole number of 64 bits.
    fn u64(&self, index: usize) -> Result<u64, TraceError> {
        self.whole(index, u64::MAX)
    }
    /// A whole number of 32 bits.
    fn u32(&self, index: usize) -> Result<u32, TraceError> {
        self.whole(index, u64::from(u32::MAX)).map(|v| v as u32)
    }
    /// A whole number of 16 bits.
    fn u16(&self, index: usize) -> Result<u16, TraceError> {
        self.whole(index, u64::from(u16::MAX)).map(|v| v as u16)
    }
    /// A whole number of 8 bits.
    fn u8(&self, index: usize) -> Result<u8, TraceError> {
        self.whole(index, u64::from(u8::MAX)).map(|v| v as u8)
    }
    /// A whole number, or nothing.
    fn optional_u64(&self, index: usize) -> Result<Option<u64>, TraceError> {
        if self.is_empty(index) { Ok(None) } else { self.u64(index).map(Some) }
    }
}

impl Fields for Row<'_> {
    fn whole(&self, index: usize, max: u64) -> Result<u64, TraceError> {
        Row::whole(self, index, max)
    }

    fn is_empty(&self, index: usize) -> bool {
        self.bytes(index).is_empty()
    }

    fn word<T: Copy>(&self, index: usize, words: &[(&str, T)]) -> Result<T, TraceError> {
        Row::word(self, index, words)
    }

    fn scaled(&self, index: usize, digits: u32) -> Result<u64, TraceError> {
        Row::scaled(self, index, digits)
    }

    fn float(&self, index: usize) -> Result<f32, TraceError> {
        Row::float(self, index)
    }

    fn text(&self, index: usize) -> String {
        Row::text(self, index)
    }

    fn error(&self, index: usize, reason: String) -> TraceError {
        Row::error(self, index, reason)
    }
}

/// Makes values of the rows of one table, and may remember rows before.
pub trait Parser {
    /// What a row becomes.
    type Value;
    /// The value of `row`.
    fn parse(&mut self, row: &impl Fields) -> Result<Self::Value, TraceError>;
}

/// Rows of `reads`; a drive number beyond `drives` is a fault.
pub struct ReadParser {
    /// Drives of the trace.
    pub drives: usize,
}

impl Parser for ReadParser {
    type Value = ReadEvent;

    fn parse(&mut self, row: &impl Fields) -> Result<ReadEvent, TraceError> {
        parse_read(row, self.drives)
    }
}

/// Rows of `barriers`: each stands behind the one before.
pub struct BarrierParser {
    drives: usize,
    last: Option<(u64, u64)>,
}

impl BarrierParser {
    /// For a trace of `drives` drives.
    pub fn new(drives: usize) -> Self {
        Self { drives, last: None }
    }
}

impl Parser for BarrierParser {
    type Value = BarrierRecord;

    fn parse(&mut self, row: &impl Fields) -> Result<BarrierRecord, TraceError> {
        let record = parse_barrier(row, self.drives)?;
        if let Some((barrier, open_ns)) = self.last {
            if record.barrier <= barrier {
                let reason = format!("barrier {} comes after barrier {barrier}; each may stand once", record.barrier);
                return Err(row.error(0, reason));
            }
            if record.open_ns < open_ns {
                return Err(row.error(10, format!("opens before barrier {barrier}, at {open_ns}: time goes back")));
            }
        }
        self.last = Some((record.barrier, record.open_ns));
        Ok(record)
    }
}

/// Rows of `windows`, each with the end of the one before it of the same name (its own, if it is the first). The windows of
/// a name ascend.
#[derive(Default)]
pub struct WindowParser {
    ends: BTreeMap<(Scope, String), f64>,
}

impl Parser for WindowParser {
    type Value = (Window, f64);

    fn parse(&mut self, row: &impl Fields) -> Result<(Window, f64), TraceError> {
        let window = parse_window(row)?;
        let end = self.ends.entry((window.scope, window.name.clone())).or_insert(f64::NEG_INFINITY);
        if window.t_ms <= *end {
            let reason = format!("`{}` has a window at {end} ms already or later", window.name);
            return Err(row.error(0, reason));
        }
        let before = std::mem::replace(end, window.t_ms);
        let before = if before.is_finite() { before } else { window.t_ms };
        Ok((window, before))
    }
}

/// Rows of `routes`, by pass.
#[derive(Default)]
pub struct RouteParser {
    last: u64,
}

impl Parser for RouteParser {
    type Value = RouteRow;

    fn parse(&mut self, row: &impl Fields) -> Result<RouteRow, TraceError> {
        let route = RouteRow {
            step: row.u64(0)?,
            phase: row.word(1, &PHASES)?,
            pos: row.u64(2)?,
            layer: LayerId(row.u16(3)?),
            expert: ExpertId(row.u16(4)?),
            weight: row.float(5)?,
            kept: row.whole(6, 1)? as u8,
        };
        if route.step < self.last {
            return Err(row.error(0, format!("pass {} comes after pass {}", route.step, self.last)));
        }
        self.last = route.step;
        Ok(route)
    }
}

fn drive(row: &impl Fields, index: usize, drives: usize) -> Result<DriveId, TraceError> {
    let id = row.u8(index)?;
    if usize::from(id) < drives {
        return Ok(DriveId(id));
    }
    Err(row.error(index, format!("drive {id} is not among the {drives} drives of trace.json")))
}

/// A read.
fn parse_read(row: &impl Fields, drives: usize) -> Result<ReadEvent, TraceError> {
    let event = ReadEvent {
        step: row.u64(0)?,
        layer: LayerId(row.u16(1)?),
        expert: ExpertId(row.u16(2)?),
        drive: drive(row, 3, drives)?,
        replica: row.u8(4)?,
        part: row.u8(5)?,
        parts: row.u8(6)?,
        offset: row.u64(7)?,
        bytes: row.u64(8)?,
        purpose: row.word(9, &PURPOSES)?,
        issued_in: row.u64(10)?,
        barrier: row.optional_u64(11)?,
        queued_ns: row.u64(12)?,
        submitted_ns: row.u64(13)?,
        completed_ns: row.u64(14)?,
        result: row.word(15, &RESULTS)?,
        outcome: row.word(16, &OUTCOMES)?,
    };
    if event.part >= event.parts {
        return Err(row.error(5, format!("part {} of {}", event.part, event.parts)));
    }
    // a read that was never handed over has no such times
    if event.result == ReadResult::Ok {
        if event.submitted_ns < event.queued_ns {
            return Err(row.error(13, format!("submitted before it was queued, at {}", event.queued_ns)));
        }
        if event.completed_ns < event.submitted_ns {
            return Err(row.error(14, format!("completed before it was submitted, at {}", event.submitted_ns)));
        }
    }
    Ok(event)
}

/// A barrier, without a look at the one before.
fn parse_barrier(row: &impl Fields, drives: usize) -> Result<BarrierRecord, TraceError> {
    let record = BarrierRecord {
        barrier: row.u64(0)?,
        step: row.u64(1)?,
        phase: row.word(2, &PHASES)?,
        pos: row.u64(3)?,
        rows: row.u32(4)?,
        layer: LayerId(row.u16(5)?),
        width: row.u32(6)?,
        hits: row.u32(7)?,
        prefetch_hits: row.u32(8)?,
        bytes: row.u64(9)?,
        open_ns: row.u64(10)?,
        first_ns: row.u64(11)?,
        last_ns: row.u64(12)?,
        close_ns: row.u64(13)?,
        stall_ns: row.u64(14)?,
        straggler: if row.is_empty(15) { None } else { Some(drive(row, 15, drives)?) },
        gap_drive_ns: row.u64(16)?,
        gap_read_ns: row.u64(17)?,
        bound_layout_ns: row.optional_u64(18)?,
        bound_drives_ns: row.optional_u64(19)?,
        cause: row.word(20, &CAUSES)?,
    };
    if record.last_ns < record.first_ns {
        return Err(row.error(12, format!("the last read ends before the first, at {}", record.first_ns)));
    }
    if record.close_ns < record.open_ns {
        return Err(row.error(13, format!("closes before it opens, at {}", record.open_ns)));
    }
    Ok(record)
}

fn parse_window(row: &impl Fields) -> Result<Window, TraceError> {
    let ms = |index: usize| row.scaled(index, 6).map(|ns| ns as f64 / 1e6);
    let partial = row.u8(9)?;
    if partial > 1 {
        return Err(row.error(9, format!("`{partial}` is neither 0 nor 1")));
    }
    let name = row.text(2);
    if name.is_empty() {
        return Err(row.error(2, "a window needs a name".into()));
    }
    Ok(Window {
        t_ms: ms(0)?,
        scope: row.word(1, &SCOPES)?,
        name,
        reader_bytes: row.optional_u64(3)?,
        reader_reads: row.optional_u64(4)?,
        inflight_bytes: row.optional_u64(5)?,
        device_bytes: row.optional_u64(6)?,
        device_reads: row.optional_u64(7)?,
        device_io_ms: if row.is_empty(8) { None } else { Some(ms(8)?) },
        partial,
    })
}
