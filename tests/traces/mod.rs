//! Small traces made by hand, for the tests of everything that reads a trace.
#![allow(dead_code)]

use argodrive::ids::{DriveId, ExpertId, LayerId};
use argodrive::replay::ReplayError;
use argodrive::replay::join::Joiner;
use argodrive::replay::summary::{GapRow, Summarizer, Summary, summarize};
use argodrive::source::Phase;
use argodrive::trace::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use argodrive::trace::log::{self, TraceBuffer, TraceCapacity, TraceDrive, TraceHeader};
use argodrive::trace::stream;
use std::path::Path;

/// A demand read of `expert` for barrier 0 by `drive`, queued and submitted at `from`.
pub fn read(expert: u16, drive: u8, bytes: u64, from: u64, to: u64) -> ReadEvent {
    ReadEvent {
        step: 0,
        layer: LayerId(3),
        expert: ExpertId(expert),
        drive: DriveId(drive),
        replica: 0,
        part: 0,
        parts: 1,
        offset: 4096 * u64::from(expert),
        bytes,
        purpose: Purpose::Demand,
        issued_in: 0,
        barrier: Some(0),
        queued_ns: from,
        submitted_ns: from,
        completed_ns: to,
        result: ReadResult::Ok,
        outcome: Outcome::Demand,
    }
}

/// Barrier `barrier`, open from `open_ns`, closed at `close_ns`; whatever its reads say is left out.
pub fn barrier(barrier: u64, open_ns: u64, close_ns: u64) -> BarrierRecord {
    BarrierRecord {
        barrier,
        step: barrier / 4,
        phase: Phase::Decode,
        pos: 9,
        rows: 1,
        layer: LayerId(3),
        width: 2,
        hits: 0,
        prefetch_hits: 0,
        bytes: 20,
        open_ns,
        first_ns: open_ns,
        last_ns: close_ns,
        close_ns,
        stall_ns: close_ns - open_ns,
        straggler: None,
        gap_drive_ns: 0,
        gap_read_ns: 0,
        bound_layout_ns: None,
        bound_drives_ns: None,
        cause: Cause::None,
    }
}

/// Drives `a`, `b`, ...
pub fn drives(count: u8) -> Vec<TraceDrive> {
    let drive = |id: u8| TraceDrive {
        id: DriveId(id),
        name: char::from(b'a' + id).to_string(),
        path: "/mnt".into(),
        emulated: false,
        device_number: u64::from(id),
    };
    (0..count).map(drive).collect()
}

/// Writes a trace over three drives.
pub fn write(folder: &Path, barriers: &[BarrierRecord], reads: &[ReadEvent]) {
    let capacity = TraceCapacity { reads: reads.len(), barriers: barriers.len() };
    let mut buffer = TraceBuffer::with_capacity(capacity);
    reads.iter().for_each(|r| buffer.push_read(*r));
    barriers.iter().for_each(|b| buffer.push_barrier(*b));
    log::write(folder, &TraceHeader::new(drives(3)), &buffer).unwrap();
}

/// The report of a folder and the row of every barrier.
pub fn report(folder: &Path, lenient: bool) -> Result<(Summary, Vec<GapRow>), ReplayError> {
    let header = log::read_header(folder)?;
    let count = header.drives.len();
    let joiner =
        Joiner::new(stream::reads(folder, count, lenient)?, stream::barriers(folder, count, lenient)?, lenient);
    let mut rows = Vec::new();
    let summary = summarize(joiner, Summarizer::new(&header.drives, None, 10), None, &mut |row| {
        rows.push(row.clone());
        Ok(())
    })?;
    Ok((summary, rows))
}
