//! `windows.csv`: what drives and devices delivered, window by window. The rows as data, the arithmetic that cuts
//! readings and reads into windows, and the writer. Knows no clock, no thread and no live device.
//!
//! Windows begin and end at whole multiples of their length on the run's clock; the first and the last may be shorter and
//! are flagged. A window holds what happened from its beginning (included) to its end (not included). The first row of a
//! name holds nothing: it only says where the first window begins, so the rows of a name sum to what was counted.

use super::events::{ReadEvent, ReadResult};
use super::log::{Column, TraceError};
use super::stream::Growing;
use crate::ids::DriveId;
use crate::sys::blockstat::{Counted, growth};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Display};
use std::io::Write;
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
    ("inflight_bytes", "bytes handed to the drive and not there yet at the end of the window"),
    ("device_bytes", "bytes that the device read; empty = not a device's row"),
    ("device_reads", "read operations of the device; empty = not known"),
    ("device_io_ms", "time that its reads took, summed over reads; empty = not known"),
    ("partial", "1 = shorter than the others"),
];
/// Peaks are taken over this long, because kernel counters move in lumps.
pub const PEAK_MS: f64 = 100.0;
/// Nanoseconds of a millisecond.
const MS_NS: u64 = 1_000_000;

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

/// What a trace's header says about its windows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowsHeader {
    /// Length of a window.
    pub interval_ns: u64,
    /// Columns of `windows.csv`, in order.
    pub columns: Vec<Column>,
    /// Devices that were sampled.
    pub devices: Vec<WatchedDevice>,
    /// How well the sampler kept its times, and what it cost.
    pub sampler: SamplerFigures,
}

/// A sampled device and the drives on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchedDevice {
    /// Kernel name.
    pub name: String,
    /// Drives of the run whose bytes it moves; several when they share it.
    pub drives: Vec<DriveId>,
    /// It holds the files of loop devices that are drives: it sees their bytes a second time.
    pub backing: bool,
}

/// What the sampler did and what it cost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerFigures {
    /// Time between two ticks.
    pub interval_ns: u64,
    /// From its first to its last reading.
    pub wall_ns: u64,
    /// Ticks at which counters were read.
    pub ticks: u64,
    /// Ticks that it slept through; their windows are interpolated.
    pub missed_ticks: u64,
    /// Times that every second tick was dropped because the buffer was full.
    pub thinned: u32,
    /// CPU time of its thread; `None` = the system does not tell.
    pub cpu_ns: Option<u64>,
    /// How late it woke, median; missed ticks count with the time by which they were late.
    pub deadline_error_p50_ns: u64,
    /// The same, 99th percentile.
    pub deadline_error_p99_ns: u64,
    /// The same, largest.
    pub deadline_error_max_ns: u64,
    /// Devices whose counters could no longer be read, and why.
    pub lost: Vec<String>,
}

impl SamplerFigures {
    /// CPU time as a share of one core.
    pub fn cpu_share(&self) -> Option<f64> {
        let cpu_ns = self.cpu_ns.filter(|_| self.wall_ns > 0)?;
        Some(cpu_ns as f64 / self.wall_ns as f64)
    }
}

/// Counters at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// When they were read.
    pub t_ns: u64,
    /// What they said.
    pub counted: Counted,
}

/// What a device did in one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceWindow {
    /// Beginning.
    pub from_ns: u64,
    /// End.
    pub to_ns: u64,
    /// Bytes that it read.
    pub bytes: u64,
    /// Its reads.
    pub reads: u64,
    /// Time that they took, summed.
    pub io_ns: u64,
    /// Reads and writes under way at the reading that closed the window.
    pub in_flight: u32,
    /// Shorter than the others.
    pub partial: bool,
}

/// What a drive delivered to the reader in one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriveWindow {
    /// Bytes of reads that were complete.
    pub bytes: u64,
    /// Their number.
    pub reads: u64,
    /// Bytes handed to the drive and not there at the end.
    pub inflight_bytes: u64,
}

/// Cuts the readings of one device into windows. Counters are read when the sampler wakes, never exactly at a window's
/// edge, so what they were at the edge is interpolated; no count is lost or doubled by that.
#[derive(Clone, Debug)]
pub struct Cutter {
    interval_ns: u64,
    unit_bytes: u64,
    edge_ns: u64,
    at_edge: Totals,
    last: Reading,
    totals: Totals,
    went_back: u64,
}

/// Counts since the first reading.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    units: u64,
    reads: u64,
    io_ns: u64,
}

impl Cutter {
    /// Windows of `interval_ns` from `first` on.
    pub fn new(interval_ns: u64, unit_bytes: u64, first: Reading) -> Self {
        let (at_edge, totals) = (Totals::default(), Totals::default());
        let interval_ns = interval_ns.max(1);
        Self { interval_ns, unit_bytes, edge_ns: first.t_ns, at_edge, last: first, totals, went_back: 0 }
    }

    /// Takes the next reading and hands out the windows that it closes.
    pub fn push(&mut self, next: Reading, out: &mut impl FnMut(DeviceWindow)) {
        if next.t_ns <= self.last.t_ns {
            return;
        }
        let (was, is) = (self.last.counted, next.counted);
        let grown =
            [(was.units, is.units), (was.reads, is.reads), (was.read_ms, is.read_ms)].map(|(a, b)| growth(a, b));
        self.went_back += u64::from(grown.contains(&None));
        let [units, reads, ms] = grown.map(Option::unwrap_or_default);
        let totals = Totals {
            units: self.totals.units.saturating_add(units),
            reads: self.totals.reads.saturating_add(reads),
            io_ns: self.totals.io_ns.saturating_add(ms.saturating_mul(MS_NS)),
        };
        while let Some(edge_ns) = self.next_edge().filter(|edge| *edge <= next.t_ns) {
            let at = |a, b| interpolate((self.last.t_ns, a), (next.t_ns, b), edge_ns);
            let now = Totals {
                units: at(self.totals.units, totals.units),
                reads: at(self.totals.reads, totals.reads),
                io_ns: at(self.totals.io_ns, totals.io_ns),
            };
            out(self.close(edge_ns, now, is.in_flight));
        }
        (self.last, self.totals) = (next, totals);
    }

    /// The last window, which ends with the last reading, unless it would be empty.
    pub fn finish(mut self) -> Option<DeviceWindow> {
        let (to_ns, totals, in_flight) = (self.last.t_ns, self.totals, self.last.counted.in_flight);
        (to_ns > self.edge_ns).then(|| self.close(to_ns, totals, in_flight))
    }

    /// How often a counter went back, which tells nothing and counts as no growth.
    pub fn went_back(&self) -> u64 {
        self.went_back
    }

    fn next_edge(&self) -> Option<u64> {
        (self.edge_ns / self.interval_ns).checked_add(1)?.checked_mul(self.interval_ns)
    }

    fn close(&mut self, to_ns: u64, now: Totals, in_flight: u32) -> DeviceWindow {
        let before = std::mem::replace(&mut self.at_edge, now);
        let from_ns = std::mem::replace(&mut self.edge_ns, to_ns);
        DeviceWindow {
            from_ns,
            to_ns,
            bytes: (now.units - before.units).saturating_mul(self.unit_bytes),
            reads: now.reads - before.reads,
            io_ns: now.io_ns - before.io_ns,
            in_flight,
            partial: to_ns - from_ns < self.interval_ns,
        }
    }
}

/// The value at `at` of something that grows evenly from one point (time, value) to another; cut to a whole number.
/// `from.0 <= at <= to.0` and `from.1 <= to.1`.
pub fn interpolate(from: (u64, u64), to: (u64, u64), at: u64) -> u64 {
    let (span, part) = (to.0.saturating_sub(from.0), at.saturating_sub(from.0));
    let more = to.1.saturating_sub(from.1);
    if span == 0 || part >= span {
        return to.1;
    }
    // a part of `more`, so it fits
    from.1 + (u128::from(more) * u128::from(part) / u128::from(span)) as u64
}

/// The windows of a run by its own counts: what each of `drives` drives delivered in each window from `start_ns` to
/// `end_ns`. A read counts in the window in which it was complete, in the first or last one if that lies outside.
pub fn of_reads(
    reads: &[ReadEvent],
    drives: usize,
    interval_ns: u64,
    (start_ns, end_ns): (u64, u64),
) -> Vec<Vec<DriveWindow>> {
    let interval_ns = interval_ns.max(1);
    let first = start_ns / interval_ns;
    let count = count_windows(interval_ns, start_ns, end_ns);
    let index = |t_ns: u64| ((t_ns / interval_ns).saturating_sub(first) as usize).min(count.saturating_sub(1));
    let mut windows = vec![vec![DriveWindow::default(); count]; drives];
    // bytes that came under way less those that came in, by window
    let mut under_way = vec![vec![0i128; count]; drives];
    for read in reads {
        let drive = read.drive.index();
        let (Some(windows), Some(under_way)) = (windows.get_mut(drive), under_way.get_mut(drive)) else { continue };
        let at = index(read.completed_ns);
        if let Some(window) = windows.get_mut(at).filter(|_| read.result == ReadResult::Ok) {
            window.bytes = window.bytes.saturating_add(read.bytes);
            window.reads += 1;
        }
        // a read that was never handed over has no such time
        if (read.queued_ns..=read.completed_ns).contains(&read.submitted_ns) {
            under_way[index(read.submitted_ns)] += i128::from(read.bytes);
            under_way[at] -= i128::from(read.bytes);
        }
    }
    for (windows, under_way) in windows.iter_mut().zip(&under_way) {
        let mut sum = 0i128;
        for (window, change) in windows.iter_mut().zip(under_way) {
            sum += change;
            window.inflight_bytes = u64::try_from(sum).unwrap_or_default();
        }
    }
    windows
}

/// Windows between two times, at least one.
fn count_windows(interval_ns: u64, start_ns: u64, end_ns: u64) -> usize {
    let end = end_ns.max(start_ns + 1).div_ceil(interval_ns);
    (end - start_ns / interval_ns).max(1) as usize
}

/// Writes `windows.csv`, row by row, under a temporary name until it is finished.
pub struct WindowWriter {
    file: Growing,
}

impl WindowWriter {
    /// Begins the file.
    pub fn create(path: &Path) -> Result<Self, TraceError> {
        let mut writer = Self { file: Growing::create(path)? };
        writer.line(format_args!("{}", WINDOW_COLUMNS.map(|c| c.0).join(",")))?;
        Ok(writer)
    }

    /// The row that says where the first window of a device begins.
    pub fn begin_device(&mut self, name: &str, t_ns: u64, knows_reads: bool) -> Result<(), TraceError> {
        let nothing = DeviceWindow { to_ns: t_ns, partial: true, ..DeviceWindow::default() };
        self.device(name, &nothing, knows_reads)
    }

    /// A window of a device; `knows_reads`: whether it counts reads and their time.
    pub fn device(&mut self, name: &str, window: &DeviceWindow, knows_reads: bool) -> Result<(), TraceError> {
        let (t, bytes, partial) = (Ms(window.to_ns), window.bytes, u8::from(window.partial));
        if knows_reads {
            let (reads, io) = (window.reads, Ms(window.io_ns));
            self.line(format_args!("{t},device,{name},,,,{bytes},{reads},{io},{partial}"))
        } else {
            self.line(format_args!("{t},device,{name},,,,{bytes},,,{partial}"))
        }
    }

    /// A window of a drive that ends at `t_ns`.
    pub fn drive(&mut self, name: &str, t_ns: u64, window: &DriveWindow, partial: bool) -> Result<(), TraceError> {
        let DriveWindow { bytes, reads, inflight_bytes } = window;
        let (t, partial) = (Ms(t_ns), u8::from(partial));
        self.line(format_args!("{t},drive,{name},{bytes},{reads},{inflight_bytes},,,,{partial}"))
    }

    /// All windows of drives (as [`of_reads`] gives them), window by window. The number of rows that are windows.
    pub fn drives(
        &mut self,
        names: &[&str],
        windows: &[Vec<DriveWindow>],
        interval_ns: u64,
        (start_ns, end_ns): (u64, u64),
    ) -> Result<u64, TraceError> {
        for name in names {
            self.drive(name, start_ns, &DriveWindow::default(), true)?;
        }
        let (first, mut rows) = (start_ns / interval_ns, 0);
        for at in 0..windows.first().map_or(0, Vec::len) {
            let from_ns = start_ns.max((first + at as u64) * interval_ns);
            let to_ns = ((first + at as u64 + 1) * interval_ns).min(end_ns.max(start_ns + 1));
            for (name, windows) in names.iter().zip(windows) {
                self.drive(name, to_ns, &windows[at], to_ns - from_ns < interval_ns)?;
                rows += 1;
            }
        }
        Ok(rows)
    }

    /// Makes the file whole and durable.
    pub fn finish(self) -> Result<(), TraceError> {
        self.file.finish()
    }

    fn line(&mut self, line: fmt::Arguments<'_>) -> Result<(), TraceError> {
        writeln!(self.file, "{line}").map_err(|e| self.file.io(e))
    }
}

/// Nanoseconds as milliseconds, exactly and with no more digits than that takes.
pub struct Ms(pub u64);

impl Display for Ms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, mut rest, mut digits) = (self.0 / MS_NS, self.0 % MS_NS, 6);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        while rest.is_multiple_of(10) {
            rest /= 10;
            digits -= 1;
        }
        write!(f, "{whole}.{rest:0digits$}")
    }
}

/// The columns as a trace's header has them.
pub fn columns() -> Vec<Column> {
    WINDOW_COLUMNS.iter().map(|(name, meaning)| Column { name: (*name).into(), meaning: (*meaning).into() }).collect()
}
