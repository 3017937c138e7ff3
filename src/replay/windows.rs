//! `windows.csv`: what drives and devices delivered, window by window, and the totals of such a file. Windows are added
//! up by name; what no drive of the trace claims stays unattributed.

use crate::trace::log::{TraceDrive, TraceError};
use crate::trace::rows::{Row, Rows};
use crate::trace::stream::Skipped;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

/// File name inside a trace folder.
pub const WINDOWS_FILE: &str = "windows.csv";
/// Columns of `windows.csv` and their meaning.
pub const WINDOW_COLUMNS: [(&str, &str); 10] = [
    ("t_ms", "end of the window; it begins where the one before it of the same name ended"),
    ("scope", "drive (counters of the reader) or device (counters of the kernel)"),
    ("name", "name of the drive, or of the device"),
    ("reader_bytes", "bytes that the reader got; empty = not a reader's row"),
    ("reader_reads", "reads that the reader got"),
    ("inflight_bytes", "bytes asked for and not there yet"),
    ("device_bytes", "bytes that the device read; empty = not a device's row"),
    ("device_reads", "read operations of the device"),
    ("device_io_ms", "time that its reads took, summed over reads"),
    ("partial", "1 = shorter than the others"),
];
/// Peaks are taken over this long, because kernel counters move in lumps.
pub const PEAK_MS: f64 = 100.0;

/// One window of one drive or device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Window {
    /// End of the window.
    pub t_ms: f64,
    /// `drive` or `device`.
    pub scope: Scope,
    /// Its name.
    pub name: String,
    /// Bytes that the reader got.
    pub reader_bytes: Option<u64>,
    /// Reads that the reader got.
    pub reader_reads: Option<u64>,
    /// Bytes under way.
    pub inflight_bytes: Option<u64>,
    /// Bytes that the device read.
    pub device_bytes: Option<u64>,
    /// Its read operations.
    pub device_reads: Option<u64>,
    /// Time of its reads, summed over reads.
    pub device_io_ms: Option<f64>,
    /// 1 = shorter than the others.
    pub partial: u8,
}

/// Whose counters a row holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// A drive of the run.
    Drive,
    /// A block device.
    Device,
}

/// Totals of one drive or device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WindowRow {
    /// The device, or the drive for reader rows.
    pub name: String,
    /// Whose counters.
    pub scope: Scope,
    /// The drive that it belongs to; `None` = unattributed.
    pub drive: Option<String>,
    /// Windows.
    pub windows: u64,
    /// Length of all of them.
    pub span_ms: f64,
    /// Bytes.
    pub bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Bytes / span.
    pub mean_bytes_per_s: f64,
    /// Largest mean over 100 ms (or over one window, where windows are longer).
    pub peak_bytes_per_s: f64,
    /// Windows without a byte.
    pub idle_windows: u64,
    /// Mean time of a read, where the device tells.
    pub mean_read_ms: Option<f64>,
}

#[derive(Default)]
struct Sums {
    rows: u64,
    first_ms: f64,
    last_ms: f64,
    bytes: u64,
    reads: u64,
    io_ms: Option<f64>,
    idle: u64,
    /// (length, bytes) of the windows that the peak is taken over.
    recent: VecDeque<(f64, u64)>,
    peak: f64,
}

/// All windows of `folder`, added up by name in the order of names, and what a lenient reading left out. The first row
/// of a name only says where its first window begins.
pub fn summarize(folder: &Path, drives: &[TraceDrive], lenient: bool) -> Result<(Vec<WindowRow>, Skipped), TraceError> {
    let mut rows = Rows::open(&folder.join(WINDOWS_FILE), &WINDOW_COLUMNS.map(|c| c.0))?;
    let mut sums: BTreeMap<(Scope, String), Sums> = BTreeMap::new();
    let mut skipped = Skipped::default();
    loop {
        let added = match rows.next_row() {
            Ok(None) => break,
            Ok(Some(row)) => parse(&row).and_then(|window| {
                let entry = sums.entry((window.scope, window.name.clone())).or_default();
                if entry.rows > 0 && window.t_ms <= entry.last_ms {
                    let reason = format!("`{}` has a window at {} ms already or later", window.name, entry.last_ms);
                    return Err(row.error(0, reason));
                }
                entry.add(&window);
                Ok(())
            }),
            Err(e) => Err(e),
        };
        skipped.pass(added, lenient)?;
    }
    Ok((sums.into_iter().map(|((scope, name), s)| s.row(scope, name, drives)).collect(), skipped))
}

fn parse(row: &Row<'_>) -> Result<Window, TraceError> {
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
        scope: row.word(1, &[("drive", Scope::Drive), ("device", Scope::Device)])?,
        name,
        reader_bytes: row.optional_u64(3)?,
        reader_reads: row.optional_u64(4)?,
        inflight_bytes: row.optional_u64(5)?,
        device_bytes: row.optional_u64(6)?,
        device_reads: row.optional_u64(7)?,
        device_io_ms: if row.bytes(8).is_empty() { None } else { Some(ms(8)?) },
        partial,
    })
}

impl Sums {
    fn add(&mut self, window: &Window) {
        self.rows += 1;
        if self.rows == 1 {
            (self.first_ms, self.last_ms) = (window.t_ms, window.t_ms);
            return;
        }
        let length_ms = window.t_ms - self.last_ms;
        self.last_ms = window.t_ms;
        let (bytes, reads) = match window.scope {
            Scope::Drive => (window.reader_bytes, window.reader_reads),
            Scope::Device => (window.device_bytes, window.device_reads),
        };
        let bytes = bytes.unwrap_or(0);
        self.bytes = self.bytes.saturating_add(bytes);
        self.reads = self.reads.saturating_add(reads.unwrap_or(0));
        self.idle += u64::from(bytes == 0);
        if let Some(io_ms) = window.device_io_ms {
            *self.io_ms.get_or_insert(0.0) += io_ms;
        }
        self.recent.push_back((length_ms, bytes));
        let length = |recent: &VecDeque<(f64, u64)>| recent.iter().map(|r| r.0).sum::<f64>();
        while self.recent.len() > 1 && length(&self.recent) - self.recent[0].0 >= PEAK_MS {
            self.recent.pop_front();
        }
        let spanned = length(&self.recent);
        // fewer windows than a peak needs would make a peak of the first lump
        if spanned >= PEAK_MS {
            let bytes: u128 = self.recent.iter().map(|r| u128::from(r.1)).sum();
            self.peak = self.peak.max(bytes as f64 * 1e3 / spanned);
        }
    }

    fn row(self, scope: Scope, name: String, drives: &[TraceDrive]) -> WindowRow {
        let span_ms = self.last_ms - self.first_ms;
        let drive = drives.iter().find(|d| match scope {
            Scope::Drive => d.name == name,
            Scope::Device => d.path.as_os_str() == name.as_str(),
        });
        WindowRow {
            scope,
            drive: drive.map(|d| d.name.clone()),
            windows: self.rows - 1,
            span_ms,
            bytes: self.bytes,
            reads: self.reads,
            mean_bytes_per_s: if span_ms > 0.0 { self.bytes as f64 * 1e3 / span_ms } else { 0.0 },
            peak_bytes_per_s: self.peak,
            idle_windows: self.idle,
            mean_read_ms: self.io_ms.filter(|_| self.reads > 0).map(|ms| ms / self.reads as f64),
            name,
        }
    }
}
