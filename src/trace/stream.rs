//! A trace folder read and written row by row, for traces that do not fit in memory. Checks what the format promises of
//! every row (`queued <= submitted <= completed`, barriers ascending); knows nothing of what a trace says as a whole.

use super::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use super::log::{BARRIER_COLUMNS, BARRIERS_FILE, READ_COLUMNS, READS_FILE, TraceError};
use super::rows::{Row, Rows};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::source::Phase;
use crate::sys::durable::sync_folder;
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Faults whose text is kept when a lenient reader skips them.
const KEPT_FAULTS: usize = 3;

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

/// The word that stands for `value` in one of the tables above.
pub fn word_of<T: Copy + PartialEq>(words: &[(&'static str, T)], value: T) -> &'static str {
    words.iter().find(|(_, v)| *v == value).map_or("?", |(w, _)| w)
}

/// Rows that a lenient reader left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// How many.
    pub rows: u64,
    /// The first few faults.
    pub first: Vec<String>,
}

impl Skipped {
    /// Counts a fault.
    pub fn add(&mut self, fault: &TraceError) {
        self.rows += 1;
        if self.first.len() < KEPT_FAULTS {
            self.first.push(fault.to_string());
        }
    }

    /// Adds the faults of another reader.
    pub fn merge(&mut self, other: &Self) {
        self.rows += other.rows;
        self.first.extend(other.first.iter().take(KEPT_FAULTS.saturating_sub(self.first.len())).cloned());
    }

    /// Passes `result` on, or, when `lenient` and it is a fault of a row, counts it and gives `None`.
    pub fn pass<T>(&mut self, result: Result<T, TraceError>, lenient: bool) -> Result<Option<T>, TraceError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(fault @ TraceError::Row { .. }) if lenient => {
                self.add(&fault);
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}

/// Makes a value of a row, and may remember rows before it.
type Parse<T> = Box<dyn FnMut(&Row<'_>) -> Result<T, TraceError>>;

/// A streaming reader of one CSV file.
pub struct Stream<T> {
    rows: Rows,
    parse: Parse<T>,
    lenient: bool,
    skipped: Skipped,
}

impl<T> Stream<T> {
    /// What was left out so far.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    /// A fault of the row that was read last.
    pub fn fault(&self, reason: String) -> TraceError {
        self.rows.lines().error(0, "", reason)
    }

    /// The next value; a lenient stream goes on behind rows with faults.
    pub fn next_value(&mut self) -> Result<Option<T>, TraceError> {
        loop {
            let value = match self.rows.next_row() {
                Ok(None) => return Ok(None),
                Ok(Some(row)) => (self.parse)(&row),
                Err(e) => Err(e),
            };
            if let Some(value) = self.skipped.pass(value, self.lenient)? {
                return Ok(Some(value));
            }
        }
    }
}

/// The rows of `reads.csv` in `folder`. With `drives` drives in the trace, a larger drive number is a fault.
pub fn reads(folder: &Path, drives: usize, lenient: bool) -> Result<Stream<ReadEvent>, TraceError> {
    let rows = Rows::open(&folder.join(READS_FILE), &READ_COLUMNS.map(|c| c.0))?;
    let parse = Box::new(move |row: &Row<'_>| parse_read(row, drives));
    Ok(Stream { rows, parse, lenient, skipped: Skipped::default() })
}

/// The rows of `barriers.csv` in `folder`. Barriers must ascend, and time must not go back from one to the next.
pub fn barriers(folder: &Path, drives: usize, lenient: bool) -> Result<Stream<BarrierRecord>, TraceError> {
    let rows = Rows::open(&folder.join(BARRIERS_FILE), &BARRIER_COLUMNS.map(|c| c.0))?;
    let mut last: Option<(u64, u64)> = None;
    let parse = Box::new(move |row: &Row<'_>| {
        let record = parse_barrier(row, drives)?;
        if let Some((barrier, open_ns)) = last {
            if record.barrier <= barrier {
                let reason = format!("barrier {} comes after barrier {barrier}; each may stand once", record.barrier);
                return Err(row.error(0, reason));
            }
            if record.open_ns < open_ns {
                return Err(row.error(10, format!("opens before barrier {barrier}, at {open_ns}: time goes back")));
            }
        }
        last = Some((record.barrier, record.open_ns));
        Ok(record)
    });
    Ok(Stream { rows, parse, lenient, skipped: Skipped::default() })
}

fn drive(row: &Row<'_>, index: usize, drives: usize) -> Result<DriveId, TraceError> {
    let id = row.u8(index)?;
    if usize::from(id) < drives {
        return Ok(DriveId(id));
    }
    Err(row.error(index, format!("drive {id} is not among the {drives} drives of trace.json")))
}

fn parse_read(row: &Row<'_>, drives: usize) -> Result<ReadEvent, TraceError> {
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

fn parse_barrier(row: &Row<'_>, drives: usize) -> Result<BarrierRecord, TraceError> {
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
        straggler: if row.bytes(15).is_empty() { None } else { Some(drive(row, 15, drives)?) },
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

/// A file that grows under a temporary name and gets its own when it is whole.
pub struct Growing {
    out: BufWriter<File>,
    temporary: PathBuf,
    path: PathBuf,
    finished: bool,
}

impl Growing {
    /// Begins `path`.
    pub fn create(path: &Path) -> Result<Self, TraceError> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.tmp", std::process::id()));
        let temporary = path.with_file_name(name);
        let file = File::create(&temporary).map_err(|source| TraceError::Io { path: path.to_path_buf(), source })?;
        let out = BufWriter::with_capacity(256 << 10, file);
        Ok(Self { out, temporary, path: path.to_path_buf(), finished: false })
    }

    /// Makes it durable and gives it its name.
    pub fn finish(mut self) -> Result<(), TraceError> {
        let done = self.out.flush().and_then(|()| self.out.get_ref().sync_all());
        let done = done.and_then(|()| fs::rename(&self.temporary, &self.path)).and_then(|()| {
            self.finished = true;
            let folder = self.path.parent().filter(|p| !p.as_os_str().is_empty());
            sync_folder(folder.unwrap_or(Path::new(".")))
        });
        done.map_err(|source| TraceError::Io { path: self.path.clone(), source })
    }

    /// An I/O fault of this file.
    pub fn io(&self, source: io::Error) -> TraceError {
        TraceError::Io { path: self.path.clone(), source }
    }
}

impl Write for Growing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Drop for Growing {
    fn drop(&mut self) {
        if !self.finished {
            // best effort: the error that led here is the one to report
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes one CSV file of a trace, row by row.
pub struct RowWriter<T> {
    csv: csv::Writer<Growing>,
    path: PathBuf,
    rows: std::marker::PhantomData<T>,
}

impl<T: Serialize> RowWriter<T> {
    /// Begins `path` with a header.
    pub fn create(path: &Path, columns: &[(&str, &str)]) -> Result<Self, TraceError> {
        let mut csv = csv::WriterBuilder::new().has_headers(false).from_writer(Growing::create(path)?);
        let header = csv.write_record(columns.iter().map(|(name, _)| name));
        header.map_err(|e| TraceError::Syntax { path: path.to_path_buf(), reason: e.to_string() })?;
        Ok(Self { csv, path: path.to_path_buf(), rows: std::marker::PhantomData })
    }

    /// Adds a row.
    pub fn push(&mut self, row: &T) -> Result<(), TraceError> {
        let fail = |e: csv::Error| TraceError::Syntax { path: self.path.clone(), reason: e.to_string() };
        self.csv.serialize(row).map_err(fail)
    }

    /// Makes the file whole.
    pub fn finish(self) -> Result<(), TraceError> {
        let path = self.path.clone();
        let file = self.csv.into_inner();
        file.map_err(|e| TraceError::Syntax { path, reason: e.to_string() })?.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_those_that_runs_write() {
        fn same<T: Copy + Serialize>(words: &[(&str, T)]) {
            for (word, value) in words {
                assert_eq!(serde_json::to_string(value).unwrap(), format!("\"{word}\""));
            }
        }
        same(&PURPOSES);
        same(&RESULTS);
        same(&OUTCOMES);
        same(&PHASES);
        same(&CAUSES);
        assert_eq!(word_of(&CAUSES, Cause::Tie), "tie");
    }

    #[test]
    fn an_unfinished_file_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.csv");
        Growing::create(&path).unwrap().write_all(b"x").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let mut whole = Growing::create(&path).unwrap();
        whole.write_all(b"x").unwrap();
        whole.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"x");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
