//! The trace on its way to disk: buffers of a fixed size that the reader fills, and the CSV files they become.
//!
//! A buffer never grows during a run: what does not fit is counted, and a trace with a count above 0 cannot be
//! written, because a trace with holes attributes the wrong read. Runs write CSV, with a `trace.json` that says what
//! every column means; nothing here knows plans or models.

use super::events::{BarrierRecord, ReadEvent};
use crate::ids::DriveId;
use crate::sys::durable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Version of trace folders that this program writes.
pub const TRACE_VERSION: u32 = 1;
/// File names inside a trace folder.
pub const TRACE_FILE: &str = "trace.json";
/// One row for each read.
pub const READS_FILE: &str = "reads.csv";
/// One row for each barrier.
pub const BARRIERS_FILE: &str = "barriers.csv";
/// Largest `trace.json` that is read.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// What is wrong with a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not what its name says.
    #[error("{}: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What and where.
        reason: String,
    },
    /// A row of a file is wrong.
    #[error("{}:{line}: {}{reason}", path.display(), column_of(*column, name))]
    Row {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Column, from 1; 0 = the whole line.
        column: usize,
        /// Name of the column, where it has one.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A newer program wrote it.
    #[error("{}: trace version {seen}, this program reads up to {TRACE_VERSION}; use a newer argodrive", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        seen: u32,
    },
    /// The buffers were too small for the run.
    #[error(
        "the trace lost {reads} reads and {barriers} barriers: its buffers hold {read_capacity} and \
         {barrier_capacity}; make them larger, or trace fewer tokens"
    )]
    Overflow {
        /// Reads that did not fit.
        reads: u64,
        /// Barriers that did not fit.
        barriers: u64,
        /// Reads that fit.
        read_capacity: usize,
        /// Barriers that fit.
        barrier_capacity: usize,
    },
}

fn column_of(column: usize, name: &str) -> String {
    match (column, name) {
        (0, _) => String::new(),
        (column, "") => format!("column {column}: "),
        (column, name) => format!("column {column} `{name}`: "),
    }
}

/// Events of a run, in memory of a fixed size.
#[derive(Debug, Default)]
pub struct TraceBuffer {
    reads: Vec<ReadEvent>,
    barriers: Vec<BarrierRecord>,
    capacity: TraceCapacity,
    lost_reads: u64,
    lost_barriers: u64,
}

/// How much a [`TraceBuffer`] holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceCapacity {
    /// Reads.
    pub reads: usize,
    /// Barriers.
    pub barriers: usize,
}

impl TraceBuffer {
    /// An empty buffer; its memory is taken now.
    pub fn with_capacity(capacity: TraceCapacity) -> Self {
        let (reads, barriers) = (Vec::with_capacity(capacity.reads), Vec::with_capacity(capacity.barriers));
        Self { reads, barriers, capacity, lost_reads: 0, lost_barriers: 0 }
    }

    /// Keeps a read, or counts it as lost.
    pub fn push_read(&mut self, event: ReadEvent) {
        if self.reads.len() < self.capacity.reads { self.reads.push(event) } else { self.lost_reads += 1 }
    }

    /// Keeps a barrier, or counts it as lost.
    pub fn push_barrier(&mut self, record: BarrierRecord) {
        if self.barriers.len() < self.capacity.barriers { self.barriers.push(record) } else { self.lost_barriers += 1 }
    }

    /// The reads, in the order in which they ended.
    pub fn reads(&self) -> &[ReadEvent] {
        &self.reads
    }

    /// The barriers, in the order in which they closed.
    pub fn barriers(&self) -> &[BarrierRecord] {
        &self.barriers
    }

    /// How much it holds.
    pub fn capacity(&self) -> TraceCapacity {
        self.capacity
    }

    /// An error when anything was lost: such a run is rejected.
    pub fn check_complete(&self) -> Result<(), TraceError> {
        if self.lost_reads == 0 && self.lost_barriers == 0 {
            return Ok(());
        }
        Err(TraceError::Overflow {
            reads: self.lost_reads,
            barriers: self.lost_barriers,
            read_capacity: self.capacity.reads,
            barrier_capacity: self.capacity.barriers,
        })
    }
}

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
    /// The drives of the run.
    pub drives: Vec<TraceDrive>,
    /// Where it came from, if another program measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imported: Option<Imported>,
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

impl TraceHeader {
    /// The header of a trace over `drives`, with this version's columns.
    pub fn new(drives: Vec<TraceDrive>) -> Self {
        let columns = |table: &[(&str, &str)]| {
            table.iter().map(|(n, m)| Column { name: (*n).into(), meaning: (*m).into() }).collect()
        };
        Self {
            version: TRACE_VERSION,
            clock: "monotonic nanoseconds since the start of the run".into(),
            reads: columns(&READ_COLUMNS),
            barriers: columns(&BARRIER_COLUMNS),
            drives,
            imported: None,
        }
    }
}

/// Columns of `reads.csv` and their meaning.
pub const READ_COLUMNS: [(&str, &str); 17] = [
    ("step", "forward pass, from 0"),
    ("layer", "layer read for, from 0"),
    ("expert", "expert read for, from 0"),
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

/// Writes a trace folder (made if it is missing). An incomplete buffer is refused. `trace.json` is written last, so
/// a folder without it was not finished.
pub fn write(folder: &Path, header: &TraceHeader, buffer: &TraceBuffer) -> Result<(), TraceError> {
    buffer.check_complete()?;
    let fail = |path: &Path| {
        let path = path.to_path_buf();
        move |source| TraceError::Io { path, source }
    };
    std::fs::create_dir_all(folder).map_err(fail(folder))?;
    write_rows(&folder.join(READS_FILE), &READ_COLUMNS, buffer.reads())?;
    write_rows(&folder.join(BARRIERS_FILE), &BARRIER_COLUMNS, buffer.barriers())?;
    write_header(folder, header)
}

/// Writes `trace.json` of a folder; the last thing to be written.
pub fn write_header(folder: &Path, header: &TraceHeader) -> Result<(), TraceError> {
    let path = folder.join(TRACE_FILE);
    let json = serde_json::to_vec_pretty(header)
        .map_err(|e| TraceError::Syntax { path: path.clone(), reason: e.to_string() })?;
    durable::write_atomic(&path, &json).map_err(|source| TraceError::Io { path, source })
}

/// Reads `trace.json` of a folder.
pub fn read_header(folder: &Path) -> Result<TraceHeader, TraceError> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let path = folder.join(TRACE_FILE);
    let io = |source| TraceError::Io { path: path.clone(), source };
    let syntax = |reason: String| TraceError::Syntax { path: path.clone(), reason };
    let len = std::fs::metadata(&path).map_err(io)?.len();
    if len > MAX_JSON_BYTES {
        return Err(syntax(format!("{len} bytes, at most {MAX_JSON_BYTES} are read")));
    }
    let bytes = std::fs::read(&path).map_err(io)?;
    let Version { version } = serde_json::from_slice(&bytes).map_err(|e| syntax(e.to_string()))?;
    if version > TRACE_VERSION {
        return Err(TraceError::Version { path, seen: version });
    }
    serde_json::from_slice(&bytes).map_err(|e| syntax(e.to_string()))
}

/// Reads `reads.csv` of a folder.
pub fn read_reads(folder: &Path) -> Result<Vec<ReadEvent>, TraceError> {
    read_rows(&folder.join(READS_FILE), &READ_COLUMNS)
}

/// Reads `barriers.csv` of a folder.
pub fn read_barriers(folder: &Path) -> Result<Vec<BarrierRecord>, TraceError> {
    read_rows(&folder.join(BARRIERS_FILE), &BARRIER_COLUMNS)
}

fn write_rows<T: Serialize>(path: &Path, columns: &[(&str, &str)], rows: &[T]) -> Result<(), TraceError> {
    let syntax = |reason: String| TraceError::Syntax { path: path.to_path_buf(), reason };
    let mut csv = csv::WriterBuilder::new().has_headers(false).from_writer(Vec::new());
    csv.write_record(columns.iter().map(|(name, _)| name)).map_err(|e| syntax(e.to_string()))?;
    for row in rows {
        csv.serialize(row).map_err(|e| syntax(e.to_string()))?;
    }
    let bytes = csv.into_inner().map_err(|e| syntax(e.to_string()))?;
    durable::write_atomic(path, &bytes).map_err(|source| TraceError::Io { path: path.to_path_buf(), source })
}

fn read_rows<T: DeserializeOwned>(path: &Path, columns: &[(&str, &str)]) -> Result<Vec<T>, TraceError> {
    let syntax = |reason: String| TraceError::Syntax { path: path.to_path_buf(), reason };
    let file = File::open(path).map_err(|source| TraceError::Io { path: path.to_path_buf(), source })?;
    let mut csv = csv::Reader::from_reader(io::BufReader::new(file));
    let header = csv.headers().map_err(|e| syntax(e.to_string()))?;
    if !header.iter().eq(columns.iter().map(|(name, _)| *name)) {
        return Err(syntax("the columns are not those of trace version 1".into()));
    }
    csv.deserialize().collect::<Result<Vec<T>, _>>().map_err(|e| syntax(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::events::{Cause, Outcome, Purpose, ReadResult};
    use super::*;
    use crate::ids::{ExpertId, LayerId};
    use crate::source::Phase;

    fn read(step: u64) -> ReadEvent {
        ReadEvent {
            step,
            layer: LayerId(3),
            expert: ExpertId(250),
            drive: DriveId(1),
            replica: 1,
            part: 0,
            parts: 1,
            offset: 16_384,
            bytes: 26_624,
            purpose: Purpose::Demand,
            issued_in: 9,
            barrier: (step > 0).then_some(9),
            queued_ns: 10,
            submitted_ns: 20,
            completed_ns: u64::MAX,
            result: ReadResult::Timeout,
            outcome: Outcome::Wasted,
        }
    }

    fn barrier() -> BarrierRecord {
        BarrierRecord {
            barrier: 9,
            step: 1,
            phase: Phase::Verify,
            pos: 40,
            rows: 4,
            layer: LayerId(3),
            width: 8,
            hits: 0,
            prefetch_hits: 0,
            bytes: 80_000,
            open_ns: 1,
            first_ns: 2,
            last_ns: 3,
            close_ns: 4,
            stall_ns: 1,
            straggler: None,
            gap_drive_ns: 0,
            gap_read_ns: 1,
            bound_layout_ns: Some(5),
            bound_drives_ns: None,
            cause: Cause::QueuedLate,
        }
    }

    fn drives() -> Vec<TraceDrive> {
        vec![TraceDrive { id: DriveId(0), name: "a".into(), path: "/a".into(), emulated: true, device_number: 7 }]
    }

    fn filled() -> TraceBuffer {
        let mut buffer = TraceBuffer::with_capacity(TraceCapacity { reads: 2, barriers: 1 });
        buffer.push_read(read(0));
        buffer.push_read(read(1));
        buffer.push_barrier(barrier());
        buffer
    }

    #[test]
    fn a_trace_survives_the_round_trip_and_has_the_documented_header() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("trace");
        let buffer = filled();
        write(&folder, &TraceHeader::new(drives()), &buffer).unwrap();
        assert_eq!(read_reads(&folder).unwrap(), buffer.reads());
        assert_eq!(read_barriers(&folder).unwrap(), buffer.barriers());
        assert_eq!(read_header(&folder).unwrap(), TraceHeader::new(drives()));
        let text = std::fs::read_to_string(folder.join(READS_FILE)).unwrap();
        let mut lines = text.lines();
        assert_eq!(
            lines.next().unwrap(),
            "step,layer,expert,drive,replica,part,parts,offset,bytes,purpose,issued_in,barrier,queued_ns,submitted_ns,\
             completed_ns,result,outcome"
        );
        assert_eq!(
            lines.next().unwrap(),
            "0,3,250,1,1,0,1,16384,26624,demand,9,,10,20,18446744073709551615,timeout,wasted"
        );
        let text = std::fs::read_to_string(folder.join(BARRIERS_FILE)).unwrap();
        let header = text.lines().next().unwrap();
        assert_eq!(
            header,
            "barrier,step,phase,pos,rows,layer,width,hits,prefetch_hits,bytes,open_ns,first_ns,last_ns,close_ns,\
             stall_ns,straggler,gap_drive_ns,gap_read_ns,bound_layout_ns,bound_drives_ns,cause"
        );
        assert!(text.contains(",queued_late"));
    }

    #[test]
    fn an_empty_trace_still_has_its_headers() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &TraceHeader::new(vec![]), &TraceBuffer::default()).unwrap();
        assert!(read_reads(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn overflow_is_counted_and_rejects_the_trace_without_growing() {
        let mut buffer = filled();
        let before = buffer.reads.capacity();
        (0..5).for_each(|step| buffer.push_read(read(step)));
        buffer.push_barrier(barrier());
        assert_eq!((buffer.reads().len(), buffer.reads.capacity()), (2, before));
        let dir = tempfile::tempdir().unwrap();
        let message = write(dir.path(), &TraceHeader::new(drives()), &buffer).unwrap_err().to_string();
        assert!(message.contains("5 reads and 1 barriers"), "{message}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn newer_versions_other_columns_and_broken_rows_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &TraceHeader::new(drives()), &filled()).unwrap();
        let json = std::fs::read_to_string(dir.path().join(TRACE_FILE)).unwrap();
        std::fs::write(dir.path().join(TRACE_FILE), json.replacen("\"version\": 1", "\"version\": 2, \"x\": 1", 1))
            .unwrap();
        assert!(matches!(read_header(dir.path()), Err(TraceError::Version { seen: 2, .. })));
        let csv = std::fs::read_to_string(dir.path().join(READS_FILE)).unwrap();
        for broken in
            [csv.replacen("step", "stop", 1), csv.replacen(",demand,", ",wish,", 1), csv.replacen(",9,", ",-9,", 1)]
        {
            std::fs::write(dir.path().join(READS_FILE), broken).unwrap();
            let message = read_reads(dir.path()).unwrap_err().to_string();
            assert!(message.contains(READS_FILE), "{message}");
        }
    }
}
