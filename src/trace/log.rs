//! The trace on its way to disk: buffers of a fixed size that the reader fills, and the CSV files they become.
//!
//! A buffer never grows during a run: what does not fit is counted, and a trace with a count above 0 cannot be
//! written, because a trace with holes attributes the wrong read. Runs write CSV, with a `trace.json` that says what
//! every column means; nothing here knows plans or models.

pub use super::error::TraceError;
pub use super::header::{
    BARRIER_COLUMNS, Column, Imported, READ_COLUMNS, RateFrom, Reissued, TRACE_VERSION, TraceDrive, TraceHeader,
    TraceRate,
};

use super::events::{BarrierRecord, ReadEvent};
use crate::sys::durable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::path::Path;

/// File names inside a trace folder.
pub const TRACE_FILE: &str = "trace.json";
/// One row for each read.
pub const READS_FILE: &str = "reads.csv";
/// One row for each barrier.
pub const BARRIERS_FILE: &str = "barriers.csv";
/// Largest `trace.json` that is read.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// Events of a run, in memory of a fixed size.
#[derive(Debug, Default)]
pub struct TraceBuffer {
    reads: Vec<ReadEvent>,
    barriers: Vec<BarrierRecord>,
    capacity: TraceCapacity,
    lost_reads: u64,
    lost_barriers: u64,
}

/// How much a [`TraceBuffer`] holds. With 0 of a kind, that kind is not kept, and so none of it is lost.
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
        if self.reads.len() < self.capacity.reads {
            self.reads.push(event);
        } else {
            self.lost_reads += u64::from(self.capacity.reads > 0);
        }
    }

    /// Keeps a barrier, or counts it as lost.
    pub fn push_barrier(&mut self, record: BarrierRecord) {
        if self.barriers.len() < self.capacity.barriers {
            self.barriers.push(record);
        } else {
            self.lost_barriers += u64::from(self.capacity.barriers > 0);
        }
    }

    /// Adds reads that were kept elsewhere and that no barrier waits for; the order is that in which reads ended.
    pub fn add_reads(&mut self, mut reads: Vec<ReadEvent>) {
        for read in &mut reads {
            // barriers open one after the other
            let before = self.barriers.partition_point(|b| b.open_ns <= read.queued_ns);
            read.issued_in = before.checked_sub(1).and_then(|at| self.barriers.get(at)).map_or(0, |b| b.barrier);
        }
        self.capacity.reads += reads.len();
        self.reads.append(&mut reads);
        self.reads.sort_by_key(|r| r.completed_ns);
    }

    /// The barriers, for what can only be known once a run is over.
    pub fn barriers_mut(&mut self) -> &mut [BarrierRecord] {
        &mut self.barriers
    }

    /// Shows the barriers and forgets them, so that there is room for as many again. Allocates nothing.
    pub fn drain_barriers(&mut self, see: &mut dyn FnMut(&BarrierRecord)) {
        self.barriers.iter().for_each(see);
        self.barriers.clear();
    }

    /// Gives the reads and takes `empty` in their place, so that there is room for as many again. Where `empty` has as much
    /// capacity, nothing is copied and nothing allocated.
    pub fn exchange_reads(&mut self, empty: &mut Vec<ReadEvent>) {
        empty.clear();
        empty.reserve(self.capacity.reads);
        std::mem::swap(&mut self.reads, empty);
    }

    /// Reads that did not fit.
    pub fn lost_reads(&self) -> u64 {
        self.lost_reads
    }

    /// Barriers that did not fit.
    pub fn lost_barriers(&self) -> u64 {
        self.lost_barriers
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
    let len = match std::fs::metadata(&path) {
        Ok(m) => m.len(),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Err(syntax(format!("{e}; a trace is a folder that `decode --trace <folder>` writes")));
        }
        Err(e) => return Err(io(e)),
    };
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
    let mut csv = csv::Reader::from_reader(io::BufReader::new(super::passed::Counted::new(file)));
    let header = csv.headers().map_err(|e| syntax(e.to_string()))?;
    if !header.iter().eq(columns.iter().map(|(name, _)| *name)) {
        return Err(syntax("the columns are not those of a trace".into()));
    }
    csv.deserialize().collect::<Result<Vec<T>, _>>().map_err(|e| syntax(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::events::{Cause, Outcome, Purpose, ReadResult};
    use super::*;
    use crate::ids::{DriveId, ExpertId, LayerId};
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
        // whoever takes the reads makes room for as many again, in the vector that it brings
        let mut taken = Vec::with_capacity(2);
        let place = taken.as_ptr();
        buffer.exchange_reads(&mut taken);
        assert_eq!((taken.len(), buffer.reads().len(), buffer.reads.as_ptr()), (2, 0, place));
        buffer.push_read(read(7));
        assert_eq!((buffer.reads().len(), buffer.lost_reads()), (1, 5));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn newer_versions_other_columns_and_broken_rows_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &TraceHeader::new(drives()), &filled()).unwrap();
        let json = std::fs::read_to_string(dir.path().join(TRACE_FILE)).unwrap();
        std::fs::write(dir.path().join(TRACE_FILE), json.replacen("\"version\": 2", "\"version\": 3, \"x\": 1", 1))
            .unwrap();
        assert!(matches!(read_header(dir.path()), Err(TraceError::Version { seen: 3, .. })));
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
