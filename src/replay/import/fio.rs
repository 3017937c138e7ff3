//! fio's per-I/O logs (`--write_lat_log`, `--write_bw_log` with `--log_avg_msec=0`):
//! `time_ms, value, direction, block size, offset[, priority]`. Which value it is says the file's name (`_clat`, `_lat`,
//! `_bw`, `_slat`). Each file is one drive, called after the file. There are no barriers in them.

use super::{DriveCodes, ImportReport, UNKNOWN_ID, begin, finish, read_writer};
use crate::ids::{ExpertId, LayerId};
use crate::replay::ReplayError;
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};
use crate::trace::log::TraceError;
use crate::trace::rows::{Lines, Rows};
use crate::trace::stream::Skipped;
use std::path::{Path, PathBuf};

const MS_NS: u64 = 1_000_000;

/// What the second column is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FioValue {
    /// Hand-over to completion, in nanoseconds.
    Clat,
    /// Issue to completion, in nanoseconds.
    Lat,
    /// KiB per second of this I/O.
    Bw,
}

impl FioValue {
    /// From the file's name.
    pub fn of_name(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_string_lossy();
        [("_clat.", Self::Clat), ("_lat.", Self::Lat), ("_bw.", Self::Bw)]
            .into_iter()
            .find(|(mark, _)| name.contains(mark))
            .map(|(_, value)| value)
    }
}

struct Entry {
    end_ms: u64,
    dur_ns: u64,
    direction: u8,
    bytes: u64,
    offset: u64,
}

/// One log, row by row.
struct Log {
    rows: Rows,
    value: FioValue,
    first: Option<Vec<u8>>,
    clock_ms: u64,
}

/// Turns the logs at `paths` into a trace folder `out`.
pub fn import(
    paths: &[PathBuf],
    out: &Path,
    value: Option<FioValue>,
    lenient: bool,
) -> Result<ImportReport, ReplayError> {
    let values = paths.iter().map(|path| match value.or_else(|| FioValue::of_name(path)) {
        Some(value) => Ok(value),
        None => Err(ReplayError::Input(format!(
            "{}: the name does not say what the values are (_clat, _lat or _bw; a _slat log has no completions); give \
             --fio-value",
            path.display()
        ))),
    });
    let values = values.collect::<Result<Vec<_>, _>>()?;
    begin(out)?;
    // times are whole milliseconds since the start of the job, so a first read may seem to begin before it
    let mut shift_ns = 0;
    for (path, value) in paths.iter().zip(&values) {
        let mut skipped = Skipped::default();
        each(path, *value, lenient, &mut skipped, |entry| {
            shift_ns = shift_ns.max(entry.dur_ns.saturating_sub(end_ns(&entry).unwrap_or(u64::MAX)));
            Ok(())
        })?;
    }
    let (mut codes, mut skipped) = (DriveCodes::default(), Skipped::default());
    let (mut reads, mut writes, mut beyond) = (0u64, 0u64, 0u64);
    let mut writer = read_writer(out)?;
    for (path, value) in paths.iter().zip(&values) {
        let name = path.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let drive = codes.id(name.as_bytes());
        let drive = drive.ok_or_else(|| ReplayError::Input(format!("more than {} logs", super::MAX_DRIVES)))?;
        each(path, *value, lenient, &mut skipped, |entry| {
            if entry.direction != 0 {
                writes += 1;
                return Ok(());
            }
            let end_ns = end_ns(&entry).and_then(|end| end.checked_add(shift_ns));
            let Some(end_ns) = end_ns else {
                beyond += 1;
                return Ok(());
            };
            let from_ns = end_ns - entry.dur_ns;
            reads += 1;
            writer.push(&ReadEvent {
                step: 0,
                layer: LayerId(UNKNOWN_ID),
                expert: ExpertId(UNKNOWN_ID),
                drive,
                replica: 0,
                part: 0,
                parts: 1,
                offset: entry.offset,
                bytes: entry.bytes,
                purpose: Purpose::Demand,
                issued_in: 0,
                barrier: None,
                queued_ns: from_ns,
                submitted_ns: from_ns,
                completed_ns: end_ns,
                result: ReadResult::Ok,
                outcome: Outcome::Demand,
            })
        })?;
    }
    writer.finish()?;
    let mut said = vec![
        "fio writes when an I/O was complete, in whole milliseconds: the end of that millisecond is taken".to_owned(),
        "there are no barriers, layers or experts (65535) in it; every read stands as a demand read".into(),
        "queueing and hand-over are one moment, so all of a read's time counts as service".into(),
    ];
    if values.contains(&FioValue::Bw) {
        said.push("bw logs: a read took block size / rate".into());
    }
    if shift_ns > 0 {
        said.push(format!("all times are {shift_ns} ns later than in the logs, so that no read begins before 0"));
    }
    if writes > 0 {
        said.push(format!("{writes} writes and trims were left out"));
    }
    if beyond > 0 {
        said.push(format!("{beyond} reads end beyond 64 bits of nanoseconds and were left out"));
    }
    finish(out, "fio", paths, &codes, &[], said, (reads, skipped))
}

/// The end of the millisecond.
fn end_ns(entry: &Entry) -> Option<u64> {
    entry.end_ms.checked_add(1)?.checked_mul(MS_NS)
}

fn each(
    path: &Path,
    value: FioValue,
    lenient: bool,
    skipped: &mut Skipped,
    mut f: impl FnMut(Entry) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let mut log = Log::open(path, value)?;
    loop {
        match log.next_entry() {
            Ok(None) => return Ok(()),
            Ok(Some(entry)) => f(entry)?,
            Err(e) => {
                skipped.pass::<()>(Err(e), lenient)?;
            }
        }
    }
}

impl Log {
    fn open(path: &Path, value: FioValue) -> Result<Self, TraceError> {
        let mut lines = Lines::open(path)?;
        let first = lines.next_line()?.map(<[u8]>::to_vec);
        let Some(first) = first else {
            return Err(lines.error(0, "", "the log is empty: was there any I/O of this kind?".into()));
        };
        let columns = first.iter().filter(|b| **b == b',').count() + 1;
        if !(5..=6).contains(&columns) {
            let reason = format!("has {columns} columns; a per-I/O log with --log_offset=1 has 5 or 6");
            return Err(lines.error(0, "", reason));
        }
        let names = ["time_ms", "value", "direction", "block_size", "offset", "priority"];
        let names = names[..columns].iter().map(|n| (*n).to_owned()).collect();
        Ok(Self { rows: Rows::new(lines, names), value, first: Some(first), clock_ms: 0 })
    }

    fn next_entry(&mut self) -> Result<Option<Entry>, TraceError> {
        let row = match self.first.take() {
            Some(first) => self.rows.first_row(&first)?,
            None => match self.rows.next_row()? {
                Some(row) => row,
                None => return Ok(None),
            },
        };
        let (end_ms, number, bytes) = (row.u64(0)?, row.u64(1)?, row.u64(3)?);
        if bytes == 0 {
            let reason = "block size 0: these are averages over windows, no reads; log with --log_avg_msec=0";
            return Err(row.error(3, reason.into()));
        }
        if end_ms < self.clock_ms {
            return Err(row.error(0, format!("time goes back, it was {} ms", self.clock_ms)));
        }
        let dur_ns = match self.value {
            FioValue::Clat | FioValue::Lat => number,
            FioValue::Bw if number == 0 => return Err(row.error(1, "a rate of 0 KiB/s takes for ever".into())),
            FioValue::Bw => {
                let ns = u128::from(bytes) * 1_000_000_000 / (u128::from(number) * 1024);
                u64::try_from(ns).map_err(|_| row.error(1, "takes more than 64 bits of nanoseconds".into()))?
            }
        };
        let entry = Entry { end_ms, dur_ns, direction: row.whole(2, 2)? as u8, bytes, offset: row.u64(4)? };
        self.clock_ms = end_ms;
        Ok(Some(entry))
    }
}
