//! A trace folder read and written row by row, for traces that do not fit in memory, from CSV or from Parquet. What the
//! format promises of every row is checked (`fields`); knows nothing of what a trace says as a whole.

use super::events::{BarrierRecord, ReadEvent};
use super::fields::{BarrierParser, Fields, Parser, ReadParser, RouteParser, WindowParser};
pub use super::fields::{CAUSES, OUTCOMES, PHASES, PURPOSES, RESULTS, word_of};
use super::log::TraceError;
use super::parquet::read::ParquetRows;
use super::parquet::{csv_of, path_of, schema};
use super::routes::RouteRow;
use super::rows::{Row, Rows};
use super::windows::Window;

use crate::sys::durable::sync_folder;
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Faults whose text is kept when a lenient reader skips them.
const KEPT_FAULTS: usize = 3;

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

/// Where rows come from: a CSV file or a Parquet file.
pub trait Source {
    /// One row, as long as the next is not asked for.
    type Row<'a>: Fields
    where
        Self: 'a;

    /// The next row, or `None` at the end. After a fault of a row it goes on behind that row.
    fn next(&mut self) -> Result<Option<Self::Row<'_>>, TraceError>;
    /// A fault of the row that was read last.
    fn fault(&self, reason: String) -> TraceError;
}

impl Source for Rows {
    type Row<'a> = Row<'a>;

    fn next(&mut self) -> Result<Option<Row<'_>>, TraceError> {
        self.next_row()
    }

    fn fault(&self, reason: String) -> TraceError {
        self.lines().error(0, "", reason)
    }
}

/// Gives values one by one; what a [`Stream`] holds.
trait Values<T> {
    fn next(&mut self) -> Result<Option<T>, TraceError>;
    fn fault(&self, reason: String) -> TraceError;
}

/// Rows, and what makes a value of each.
struct Parsed<S, P> {
    source: S,
    parser: P,
}

impl<S: Source, P: Parser> Values<P::Value> for Parsed<S, P> {
    fn next(&mut self) -> Result<Option<P::Value>, TraceError> {
        self.source.next()?.map(|row| self.parser.parse(&row)).transpose()
    }

    fn fault(&self, reason: String) -> TraceError {
        self.source.fault(reason)
    }
}

/// A streaming reader of one file of a trace.
pub struct Stream<T> {
    values: Box<dyn Values<T>>,
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
        self.values.fault(reason)
    }

    /// The next value; a lenient stream goes on behind rows with faults.
    pub fn next_value(&mut self) -> Result<Option<T>, TraceError> {
        loop {
            match self.values.next() {
                Ok(None) => return Ok(None),
                Ok(Some(value)) => return Ok(Some(value)),
                Err(fault) => self.skipped.pass(Err::<T, _>(fault), self.lenient)?,
            };
        }
    }
}

/// Which columns of reads are wanted; a CSV file gives all, whatever is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Every column.
    All,
    /// Those of [`schema::READS_FOR_REPORT`]; the others are 0.
    Report,
}

/// Whether `folder` has `table` in either form.
pub fn has(folder: &Path, table: &schema::TableSpec) -> bool {
    csv_of(folder, table).exists() || path_of(folder, table).exists()
}

/// Whether `folder` has reads in either form.
pub fn has_reads(folder: &Path) -> bool {
    has(folder, &schema::reads())
}

/// Whether `folder` has windows in either form.
pub fn has_windows(folder: &Path) -> bool {
    has(folder, &schema::windows())
}

/// The reads of the trace in `folder`, from `reads.csv`, or from `reads.parquet` where there is no CSV. With `drives`
/// drives in the trace, a larger drive number is a fault.
pub fn reads(folder: &Path, drives: usize, lenient: bool) -> Result<Stream<ReadEvent>, TraceError> {
    wanted_reads(folder, drives, lenient, Wanted::All)
}

/// [`reads`] with the columns of a choice.
pub fn wanted_reads(
    folder: &Path,
    drives: usize,
    lenient: bool,
    wanted: Wanted,
) -> Result<Stream<ReadEvent>, TraceError> {
    let table = schema::reads();
    let all: Vec<usize> = (0..table.columns.len()).collect();
    let columns = if wanted == Wanted::Report { &schema::READS_FOR_REPORT[..] } else { &all };
    either(folder, &table, columns, ReadParser { drives }, lenient)
}

/// The barriers of the trace in `folder`, from either form. They must ascend, and time must not go back from one to the
/// next.
pub fn barriers(folder: &Path, drives: usize, lenient: bool) -> Result<Stream<BarrierRecord>, TraceError> {
    whole(folder, &schema::barriers(), BarrierParser::new(drives), lenient)
}

/// The windows in `folder`, from either form, each with the end of the one before it of the same name (its own, if it is
/// the first).
pub fn windows(folder: &Path, lenient: bool) -> Result<Stream<(Window, f64)>, TraceError> {
    whole(folder, &schema::windows(), WindowParser::default(), lenient)
}

/// The routes in `folder`, from either form. Passes must ascend.
pub fn routes(folder: &Path, lenient: bool) -> Result<Stream<RouteRow>, TraceError> {
    whole(folder, &schema::routes(), RouteParser::default(), lenient)
}

fn whole<P: Parser + 'static>(
    folder: &Path,
    table: &schema::TableSpec,
    parser: P,
    lenient: bool,
) -> Result<Stream<P::Value>, TraceError> {
    let columns: Vec<usize> = (0..table.columns.len()).collect();
    either(folder, table, &columns, parser, lenient)
}

/// The rows of `table` from its CSV, or from its Parquet where there is no CSV.
fn either<P: Parser + 'static>(
    folder: &Path,
    table: &schema::TableSpec,
    columns: &[usize],
    parser: P,
    lenient: bool,
) -> Result<Stream<P::Value>, TraceError> {
    let csv = csv_of(folder, table);
    let values: Box<dyn Values<P::Value>> = if csv.exists() || !path_of(folder, table).exists() {
        let names: Vec<&str> = table.columns.iter().map(|c| c.name).collect();
        Box::new(Parsed { source: Rows::open(&csv, &names)?, parser })
    } else {
        Box::new(Parsed { source: ParquetRows::open(folder, table, columns)?, parser })
    };
    Ok(Stream { values, lenient, skipped: Skipped::default() })
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

    /// Where it grows.
    pub fn temporary(&self) -> &Path {
        &self.temporary
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
    use super::super::events::Cause;
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
