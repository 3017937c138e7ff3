//! Traces of other programs, turned into trace folders of our own format. One file per format; what a format does not
//! say and had to be assumed is written into `trace.json`, never guessed in silence.

pub mod blkparse;
pub mod fio;
pub mod per_read;
mod per_read_row;
pub mod sampler;

use super::ReplayError;
use super::attribution::Attributor;
use super::join::Joiner;
use crate::ids::DriveId;
use crate::trace::events::{BarrierRecord, ReadEvent, ReadResult};
use crate::trace::log::{
    BARRIER_COLUMNS, BARRIERS_FILE, Imported, READ_COLUMNS, READS_FILE, TRACE_FILE, TraceDrive, TraceError,
    TraceHeader, write_header,
};
use crate::trace::stream::{self, RowWriter, Skipped};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Layer and expert of a read whose log knows neither.
pub const UNKNOWN_ID: u16 = u16::MAX;
/// Most drives of an imported trace (ids are bytes, masks hold 64).
pub const MAX_DRIVES: usize = 64;

/// What an import did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// The format.
    pub format: String,
    /// Reads written.
    pub reads: u64,
    /// Barriers written.
    pub barriers: u64,
    /// Windows written.
    pub windows: u64,
    /// Names of the drives.
    pub drives: Vec<String>,
    /// What was assumed.
    pub assumptions: Vec<String>,
    /// Rows with faults that were left out.
    pub skipped_rows: u64,
    /// The first few faults.
    pub skipped_first: Vec<String>,
}

/// Drives in the order in which their codes show up.
#[derive(Clone, Debug, Default)]
pub struct DriveCodes {
    names: Vec<String>,
}

impl DriveCodes {
    /// The drive of `code`, a new one if need be; `None` when there are too many.
    pub fn id(&mut self, code: &[u8]) -> Option<DriveId> {
        let known = self.names.iter().position(|n| n.as_bytes() == code);
        let at = match known {
            Some(at) => at,
            None if self.names.len() < MAX_DRIVES => {
                self.names.push(String::from_utf8_lossy(code).into_owned());
                self.names.len() - 1
            }
            None => return None,
        };
        Some(DriveId(at as u8))
    }

    fn trace_drives(&self) -> Vec<TraceDrive> {
        let drive = |(id, name): (usize, &String)| TraceDrive {
            id: DriveId(id as u8),
            name: name.clone(),
            path: PathBuf::new(),
            emulated: false,
            device_number: 0,
        };
        self.names.iter().enumerate().map(drive).collect()
    }
}

/// Makes `folder`; one that holds a trace already is refused.
fn begin(folder: &Path) -> Result<(), ReplayError> {
    if folder.join(TRACE_FILE).exists() {
        return Err(ReplayError::Input(format!("{}: holds a trace already; give another --out", folder.display())));
    }
    std::fs::create_dir_all(folder)
        .map_err(|source| TraceError::Io { path: folder.to_path_buf(), source })
        .map_err(ReplayError::Trace)
}

fn read_writer(folder: &Path) -> Result<RowWriter<ReadEvent>, TraceError> {
    RowWriter::create(&folder.join(READS_FILE), &READ_COLUMNS)
}

/// A barrier that an import knows the beginning of.
#[derive(Clone, Copy, Debug)]
struct Begun {
    barrier: u64,
    step: u64,
    layer: crate::ids::LayerId,
    open_ns: u64,
}

/// Writes `barriers.csv` from what the reads in `folder` show, and then `trace.json`.
fn finish(
    folder: &Path,
    format: &str,
    files: &[PathBuf],
    codes: &DriveCodes,
    begun: &[Begun],
    mut assumptions: Vec<String>,
    (reads, skipped): (u64, Skipped),
) -> Result<ImportReport, ReplayError> {
    let drives = codes.trace_drives();
    let records: Vec<BarrierRecord> = begun.iter().map(skeleton).collect();
    let mut joiner = Joiner::new(stream::reads(folder, drives.len(), false)?, records.into_iter(), false);
    let mut attributor = Attributor::new(drives.len());
    let mut out = RowWriter::create(&folder.join(BARRIERS_FILE), &BARRIER_COLUMNS)?;
    let (mut barriers, mut needed) = (0, Vec::new());
    while let Some(mut record) = joiner.next_barrier(&mut needed, &mut |_| {})? {
        fill(&mut record, &needed, &mut attributor);
        out.push(&record)?;
        barriers += 1;
    }
    out.finish()?;
    if skipped.rows > 0 {
        assumptions.push(format!("{} rows with faults were left out", skipped.rows));
    }
    let imported = Imported { format: format.to_owned(), files: files.to_vec(), assumptions: assumptions.clone() };
    let header = TraceHeader { imported: Some(imported), ..TraceHeader::new(drives) };
    write_header(folder, &header)?;
    Ok(ImportReport {
        format: format.to_owned(),
        reads,
        barriers,
        windows: 0,
        drives: codes.names.clone(),
        assumptions,
        skipped_rows: skipped.rows,
        skipped_first: skipped.first,
    })
}

fn skeleton(begun: &Begun) -> BarrierRecord {
    BarrierRecord {
        barrier: begun.barrier,
        step: begun.step,
        phase: crate::source::Phase::Decode,
        pos: begun.step,
        rows: 0,
        layer: begun.layer,
        width: 0,
        hits: 0,
        prefetch_hits: 0,
        bytes: 0,
        open_ns: begun.open_ns,
        first_ns: begun.open_ns,
        last_ns: begun.open_ns,
        close_ns: begun.open_ns,
        stall_ns: 0,
        straggler: None,
        gap_drive_ns: 0,
        gap_read_ns: 0,
        bound_layout_ns: None,
        bound_drives_ns: None,
        cause: crate::trace::events::Cause::None,
    }
}

/// What the reads of a barrier say about it. Compute is taken to wait from open to the last arrival.
fn fill(record: &mut BarrierRecord, reads: &[ReadEvent], attributor: &mut Attributor) {
    let seen = attributor.attribute(record, reads);
    // (expert, came after open) of each arrival, so that an expert with any late part sorts and counts as late
    let mut experts: Vec<(u16, bool)> =
        attributor.arrivals().map(|i| (reads[i].expert.0, reads[i].completed_ns <= record.open_ns)).collect();
    experts.sort_unstable();
    experts.dedup_by_key(|e| e.0);
    record.width = experts.len() as u32;
    record.prefetch_hits = experts.iter().filter(|e| e.1).count() as u32;
    let ok = reads.iter().filter(|r| r.result == ReadResult::Ok);
    record.bytes = ok.fold(0u64, |sum, r| sum.saturating_add(r.bytes));
    record.last_ns = record.open_ns + seen.wait.total_ns;
    record.first_ns = seen.first_ns;
    record.close_ns = record.last_ns;
    record.stall_ns = seen.wait.total_ns;
    record.straggler = seen.last.map(|l| l.drive);
    record.gap_drive_ns = seen.gap_drive_ns.unwrap_or(0);
    record.gap_read_ns = seen.gap_read_ns.unwrap_or(0);
    record.cause = seen.cause;
}
