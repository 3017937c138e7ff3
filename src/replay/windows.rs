//! `windows.csv` (or its Parquet form) read again: the totals of such a file, and devices over time for figures. Windows are added up by name;
//! what no drive of the trace claims stays unattributed.

use crate::trace::log::{TraceDrive, TraceError, TraceHeader};
use crate::trace::stream::{self, Skipped};
use crate::trace::windows::interpolate;
pub use crate::trace::windows::{PEAK_MS, Scope, WINDOW_COLUMNS, WINDOWS_FILE, Window};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

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
    let mut sums: BTreeMap<(Scope, String), Sums> = BTreeMap::new();
    let skipped = for_each(folder, lenient, &mut |window, _| {
        sums.entry((window.scope, window.name.clone())).or_default().add(window);
        Ok(())
    })?;
    Ok((sums.into_iter().map(|((scope, name), s)| s.row(scope, name, drives)).collect(), skipped))
}

/// Names the drives of sampled devices, as the trace's header knows them.
pub fn attribute(rows: &mut [WindowRow], header: &TraceHeader) {
    for row in rows.iter_mut().filter(|r| r.scope == Scope::Device) {
        if let Some(names) = drives_of_device(header, &row.name) {
            row.drive = Some(names);
        }
    }
}

/// The drives whose bytes the device `name` moves, as `header` knows them; `None` = it says of none.
pub fn drives_of_device(header: &TraceHeader, name: &str) -> Option<String> {
    let device = header.windows.iter().flat_map(|w| &w.devices).find(|d| d.name == name);
    let Some(device) = device else { return owner(&header.drives, Scope::Device, name) };
    let on_it = header.drives.iter().filter(|d| device.drives.contains(&d.id)).map(|d| d.name.as_str());
    let names = on_it.collect::<Vec<_>>().join(", ");
    let said = if device.backing { format!("under {names}") } else { names.clone() };
    (!names.is_empty()).then_some(said)
}

/// The drive that a row of this name is of, by the name alone.
fn owner(drives: &[TraceDrive], scope: Scope, name: &str) -> Option<String> {
    let is = |d: &&TraceDrive| match scope {
        Scope::Drive => d.name == name,
        Scope::Device => d.path.as_os_str() == name,
    };
    drives.iter().find(is).map(|d| d.name.clone())
}

/// Hands each window of `folder` to `each` with the end of the one before it of the same name (its own, if it is the
/// first).
fn for_each(
    folder: &Path,
    lenient: bool,
    each: &mut dyn FnMut(&Window, f64) -> Result<(), TraceError>,
) -> Result<Skipped, TraceError> {
    let mut windows = stream::windows(folder, lenient)?;
    while let Some((window, from_ms)) = windows.next_value()? {
        each(&window, from_ms)?;
    }
    Ok(windows.skipped().clone())
}

/// Bytes of each name of `scope` by windows of `bin_ns` (the first begins at time 0), at most `max_bins` of them. What
/// was sampled at other times is spread evenly over its own time. Windows that are shorter than the others are left out:
/// they would show as dips.
pub fn binned(
    folder: &Path,
    scope: Scope,
    bin_ns: u64,
    max_bins: u64,
    lenient: bool,
) -> Result<BTreeMap<String, BTreeMap<u64, u64>>, TraceError> {
    let mut out: BTreeMap<String, BTreeMap<u64, u64>> = BTreeMap::new();
    for_each(folder, lenient, &mut |window, from_ms| {
        if window.scope != scope {
            return Ok(());
        }
        let bins = out.entry(window.name.clone()).or_default();
        let bytes = match scope {
            Scope::Drive => window.reader_bytes,
            Scope::Device => window.device_bytes,
        };
        let bytes = bytes.filter(|b| *b > 0 && window.partial == 0).unwrap_or(0);
        let ns = |ms: f64| (ms * 1e6).round() as u64;
        let (from, to) = (ns(from_ms), ns(window.t_ms));
        if bytes == 0 || to <= from {
            return Ok(());
        }
        if (to - from) / bin_ns >= max_bins {
            let reason =
                format!("`{}` has a window of {} s, too long to draw", window.name, (to - from) / 1_000_000_000);
            return Err(TraceError::Syntax { path: folder.join(WINDOWS_FILE), reason });
        }
        let (mut done, mut at) = (0, from);
        while at < to {
            let edge = to.min((at / bin_ns + 1) * bin_ns);
            let so_far = interpolate((from, 0), (to, bytes), edge);
            let bin = bins.entry(at / bin_ns).or_default();
            *bin = bin.saturating_add(so_far - done);
            (done, at) = (so_far, edge);
        }
        Ok(())
    })?;
    Ok(out)
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
        WindowRow {
            scope,
            drive: owner(drives, scope, &name),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::DriveId;
    use crate::trace::windows::{SamplerFigures, WatchedDevice, WindowsHeader, columns};

    fn folder(rows: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let text = format!("{}\n{}\n", WINDOW_COLUMNS.map(|c| c.0).join(","), rows.join("\n"));
        std::fs::write(dir.path().join(WINDOWS_FILE), text).unwrap();
        dir
    }

    #[test]
    fn bins_keep_the_bytes_and_leave_short_windows_out() {
        let dir = folder(&[
            "3,device,vda,,,,0,0,0,1",
            "10,device,vda,,,,999,1,1,1",
            "20,device,vda,,,,100,1,1,0",
            "45,device,vda,,,,1000,1,1,0",
            "20,drive,a,7,1,0,,,,0",
        ]);
        let binned = binned(dir.path(), Scope::Device, 10_000_000, 1000, false).unwrap();
        assert_eq!(binned.len(), 1);
        let seen: Vec<_> = binned["vda"].iter().map(|(k, v)| (*k, *v)).collect();
        assert_eq!(seen, [(1, 100), (2, 400), (3, 400), (4, 200)]);
        let message = super::binned(dir.path(), Scope::Device, 10_000_000, 2, false).unwrap_err().to_string();
        assert!(message.contains("vda"), "{message}");
    }

    #[test]
    fn a_device_belongs_to_the_drives_of_the_header() {
        let dir = folder(&["0,device,vda,,,,0,0,0,1", "10,device,vda,,,,5,1,1,0", "0,device,sdz,,,,0,0,0,1"]);
        let drive = |id: u8, name: &str| TraceDrive {
            id: DriveId(id),
            name: name.into(),
            path: "/x".into(),
            emulated: true,
            device_number: 1,
        };
        let mut header = TraceHeader::new(vec![drive(0, "amber"), drive(1, "blue")]);
        let (mut rows, _) = summarize(dir.path(), &header.drives, false).unwrap();
        let device = WatchedDevice { name: "vda".into(), drives: vec![DriveId(0), DriveId(1)], backing: false };
        header.windows = Some(WindowsHeader {
            interval_ns: 10_000_000,
            columns: columns(),
            devices: vec![device],
            sampler: SamplerFigures::default(),
        });
        attribute(&mut rows, &header);
        assert_eq!((rows[0].name.as_str(), rows[0].drive.as_deref()), ("sdz", None));
        assert_eq!((rows[1].name.as_str(), rows[1].drive.as_deref()), ("vda", Some("amber, blue")));
    }
}
