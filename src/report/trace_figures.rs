//! The figures of a trace folder: what each drive delivered and held over time, the waterfall of one step, who landed
//! last by layer and how far behind, latencies. Reads the folder twice and holds windows, layers, histograms and one
//! step, never the trace.

use super::ReportError;
use super::distribution::{Durations, GapFigure, LatencyFigure};
use super::lands_last::{LandsLastFigure, LayerCounts};
use super::plot::Figure;
use super::queue_depth::{DepthSeries, QueueDepthFigure};
use super::timeline::{DriveSeries, MAX_DRIVES, TimelineFigure};
use super::units;
use super::waterfall::{MAX_BARRIERS, MAX_READS, WaterfallFigure};
use crate::replay::ReplayError;
use crate::replay::attribution::Attributor;
use crate::replay::join::Joiner;
use crate::replay::windows::{self, Scope, WINDOWS_FILE};
use crate::source::Phase;
use crate::trace::events::{BarrierRecord, Cause, ReadEvent, ReadResult};
use crate::trace::log::{TraceHeader, read_header};
use crate::trace::stream::{self, PHASES, Wanted, word_of};
use hdrhistogram::Histogram;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Length of a window of the timeline.
const WINDOW_NS: u64 = 10_000_000;
/// Longest trace that the timeline can show: about eleven hours.
const MAX_WINDOWS: u64 = 4_000_000;
/// Bars of a waterfall that can still be told apart.
const LEGIBLE_READS: usize = 160;

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum TraceFigureError {
    /// The trace.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A figure.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// The trace has nothing of the kind.
    #[error("{0}")]
    Nothing(String),
}

impl From<crate::trace::log::TraceError> for TraceFigureError {
    fn from(e: crate::trace::log::TraceError) -> Self {
        Self::Replay(e.into())
    }
}

/// Under the timeline of reads.
const READS_NOTE: &str = "Bytes of a read count in the window in which it was complete.";

/// Bytes by window of 10 ms.
type Bins = BTreeMap<u64, u64>;

/// A figure and the name of its files.
pub struct Named {
    /// `timeline-10ms` and so on.
    pub stem: String,
    /// The figure.
    pub figure: Box<dyn Figure>,
}

/// What the first pass keeps.
#[derive(Default)]
struct Seen {
    /// Per drive.
    drives: Vec<DriveSeen>,
    first_window: u64,
    windows: u64,
    layers: BTreeMap<u16, Vec<u64>>,
    ties: u64,
    /// Phase and wait of each step.
    steps: BTreeMap<u64, (Phase, u64)>,
    barriers: u64,
}

#[derive(Default)]
struct DriveSeen {
    /// Bytes by the window in which they were complete.
    bytes: BTreeMap<u64, u64>,
    /// Time that reads spent at the drive, by window: at the ends of reads, and what changes where whole windows begin
    /// and end.
    busy_ns: BTreeMap<u64, u64>,
    whole: BTreeMap<u64, i64>,
    latency: Option<Histogram<u64>>,
    gaps: Option<Histogram<u64>>,
}

/// Draws all figures of the trace in `folder` into `out`; the waterfall shows `step`, or the decode step that waited
/// longest. Gives the files.
pub fn draw(folder: &Path, out: &Path, step: Option<u64>, lenient: bool) -> Result<Vec<PathBuf>, TraceFigureError> {
    let mut files = Vec::new();
    for named in figures(folder, step, lenient)? {
        files.extend(named.figure.write(&out.join(&named.stem))?);
    }
    Ok(files)
}

/// All figures of the trace in `folder`, not drawn yet.
pub fn figures(folder: &Path, step: Option<u64>, lenient: bool) -> Result<Vec<Named>, TraceFigureError> {
    let header = read_header(folder)?;
    let has_reads = stream::has_reads(folder) || !stream::has_windows(folder);
    let mut seen = if has_reads { first_pass(folder, &header, lenient)? } else { Seen::default() };
    let sampled = sampled(folder, &header, &mut seen, has_reads, lenient)?;
    let emulated = header.drives.iter().any(|d| d.emulated);
    let subtitle = match &header.imported {
        Some(imported) => format!("imported from {}", imported.format),
        None => folder.file_name().map(|n| format!("trace {}", n.to_string_lossy())).unwrap_or_default(),
    };
    let names: Vec<String> = header.drives.iter().map(|d| d.name.clone()).collect();
    let mut all = over_time(&seen, &names, &sampled, &subtitle, emulated);
    if seen.barriers == 0 {
        return if step.is_some() { Err(no_step(step)) } else { Ok(all) };
    }
    let layers = seen.layers.into_iter().map(|(layer, last)| LayerCounts { layer, last });
    let lands_last = LandsLastFigure {
        title: "Who landed last".into(),
        subtitle: subtitle.clone(),
        emulated,
        drives: names.clone(),
        layers: layers.collect(),
        note: format!(
            "{} of {} barriers were ties of two drives or more and count for none.",
            seen.ties, seen.barriers
        ),
    };
    all.push(Named { stem: "lands-last".into(), figure: Box::new(lands_last) });
    let gaps: Vec<Durations> = durations(&names, seen.drives.iter().map(|d| &d.gaps));
    if gaps.iter().any(|g| !g.histogram.is_empty()) {
        let gaps = GapFigure {
            title: "How far the last drive was behind the next-to-last".into(),
            subtitle: subtitle.clone(),
            emulated,
            drives: gaps,
            note: "Barriers in which one drive alone delivered have no gap; ties have one.".into(),
        };
        all.push(Named { stem: "gaps".into(), figure: Box::new(gaps) });
    }
    let chosen = match step {
        Some(step) => seen.steps.get_key_value(&step),
        None => {
            let decode = seen.steps.iter().filter(|(_, s)| s.0 != Phase::Prefill);
            decode.max_by_key(|(step, s)| (s.1, std::cmp::Reverse(**step))).or_else(|| seen.steps.iter().next())
        }
    };
    let (&number, &(phase, wait_ns)) = chosen.ok_or_else(|| no_step(step))?;
    let waterfall = one_step(folder, &header, number, lenient)?;
    let which = if step.is_some() { "" } else { ", the longest wait of all" };
    let mut figure = WaterfallFigure::from_events(&names, &waterfall.records, &waterfall.reads);
    figure.title = "One step, barrier by barrier".into();
    let waited = units::duration(wait_ns);
    figure.subtitle = format!("{} step {number} waited {waited}{which} · {subtitle}", word_of(&PHASES, phase));
    figure.emulated = emulated;
    figure.note = waterfall.note;
    all.push(Named { stem: format!("waterfall-step-{number}"), figure: Box::new(figure) });
    Ok(all)
}

fn no_step(step: Option<u64>) -> TraceFigureError {
    let step = step.map_or_else(String::new, |s| format!(" {s}"));
    TraceFigureError::Nothing(format!("the trace has no step{step} to draw"))
}

/// What was sampled beside the run: a row for each device; in a trace without reads, also each drive's own count, and then
/// everything that was sampled is the time to draw.
fn sampled(
    folder: &Path,
    header: &TraceHeader,
    seen: &mut Seen,
    has_reads: bool,
    lenient: bool,
) -> Result<Vec<(String, Bins)>, TraceFigureError> {
    if !stream::has_windows(folder) {
        return Ok(Vec::new());
    }
    let bins = |scope| windows::binned(folder, scope, WINDOW_NS, MAX_WINDOWS, lenient);
    let mut rows: Vec<(String, Bins)> = Vec::new();
    if !has_reads {
        rows.extend(bins(Scope::Drive)?);
    }
    let shown = |name: String| match windows::drives_of_device(header, &name) {
        Some(drives) => format!("{name} (device of {drives})"),
        None => format!("{name} (device)"),
    };
    rows.extend(bins(Scope::Device)?.into_iter().map(|(name, bins)| (shown(name), bins)));
    if !has_reads {
        let first = rows.iter().filter_map(|r| r.1.keys().next()).min().copied().unwrap_or(0);
        let last = rows.iter().filter_map(|r| r.1.keys().next_back()).max().copied().unwrap_or(first);
        (seen.first_window, seen.windows) = (first, last - first + 1);
        if seen.windows > MAX_WINDOWS {
            let windows = seen.windows;
            let text = format!("{WINDOWS_FILE} spans {windows} windows of 10 ms; at most {MAX_WINDOWS} can be drawn");
            return Err(TraceFigureError::Nothing(text));
        }
    }
    rows.truncate(MAX_DRIVES.saturating_sub(seen.drives.len()));
    Ok(rows)
}

/// Throughput in windows of 10 ms and of 1 s, queue depth, latencies. `sampled` is what was counted beside the reads.
fn over_time(seen: &Seen, names: &[String], sampled: &[(String, Bins)], subtitle: &str, emulated: bool) -> Vec<Named> {
    let mut all = Vec::new();
    let windows = seen.first_window..seen.first_window + seen.windows;
    let own = names.iter().zip(&seen.drives).map(|(name, drive)| (name, &drive.bytes));
    let rows: Vec<(&String, &Bins)> = own.chain(sampled.iter().map(|(name, bins)| (name, bins))).collect();
    let note = match (seen.drives.is_empty(), sampled.is_empty()) {
        (false, true) => READS_NOTE.into(),
        (false, false) => format!("{READS_NOTE} Devices: the kernel's own counters, other readers included."),
        (true, _) => "The kernel's own counters, whoever read.".into(),
    };
    for (per_point, name, title) in [(1, "10ms", ""), (100, "1s", ", second by second")] {
        // a window that is not over has no rate: of the long ones, only whole ones are shown
        if per_point > 1 && seen.windows < 2 * per_point {
            continue;
        }
        let mut series: Vec<DriveSeries> = rows
            .iter()
            .map(|(name, bins)| {
                let bytes: Vec<u64> = windows.clone().map(|w| bins.get(&w).copied().unwrap_or(0)).collect();
                let whole = bytes.chunks(per_point as usize);
                let sums = whole.map(|w| w.iter().fold(0u64, |sum, b| sum.saturating_add(*b))).collect();
                DriveSeries { name: (*name).clone(), window_bytes: sums, rated_bytes_per_s: None }
            })
            .collect();
        if !seen.windows.is_multiple_of(per_point) {
            series.iter_mut().for_each(|s| s.window_bytes.truncate((seen.windows / per_point) as usize));
        }
        let timeline = TimelineFigure {
            title: format!("What each drive delivered{title}"),
            subtitle: subtitle.into(),
            emulated,
            window_ms: (WINDOW_NS * per_point) as f64 / 1e6,
            drives: series,
            note: note.clone(),
        };
        all.push(Named { stem: format!("timeline-{name}"), figure: Box::new(timeline) });
    }
    if seen.drives.is_empty() {
        return all;
    }
    let depth = QueueDepthFigure {
        title: "How many reads each drive had at once".into(),
        subtitle: subtitle.into(),
        emulated,
        window_ms: WINDOW_NS as f64 / 1e6,
        drives: names.iter().zip(&seen.drives).map(|(n, d)| d.depth(n, windows.clone())).collect(),
        note: "From submitted to completed: what the engine had handed over and not got back.".into(),
    };
    all.push(Named { stem: "queue-depth".into(), figure: Box::new(depth) });
    let drives = durations(names, seen.drives.iter().map(|d| &d.latency));
    if drives.iter().any(|d| !d.histogram.is_empty()) {
        let latency = LatencyFigure {
            title: "How long reads took".into(),
            subtitle: subtitle.into(),
            emulated,
            drives,
            note: "From submitted to completed (clat), reads that succeeded.".into(),
        };
        all.push(Named { stem: "latency".into(), figure: Box::new(latency) });
    }
    all
}

fn durations<'a>(names: &[String], histograms: impl Iterator<Item = &'a Option<Histogram<u64>>>) -> Vec<Durations> {
    let pairs = names.iter().zip(histograms);
    let filled = |h: &Option<Histogram<u64>>| h.clone().or_else(|| Histogram::new(3).ok());
    pairs.filter_map(|(n, h)| Some(Durations { name: n.clone(), histogram: filled(h)? })).collect()
}

fn count(histogram: &mut Option<Histogram<u64>>, ns: u64) {
    if histogram.is_none() {
        *histogram = Histogram::new(3).ok();
    }
    if let Some(histogram) = histogram.as_mut() {
        // it grows as needed; what 64 bits cannot index counts at the top (`saturating_record` alone would not grow)
        if histogram.record(ns).is_err() {
            histogram.saturating_record(ns);
        }
    }
}

impl DriveSeen {
    fn read(&mut self, read: &ReadEvent) {
        let bytes = self.bytes.entry(read.completed_ns / WINDOW_NS).or_default();
        *bytes = bytes.saturating_add(read.bytes);
        count(&mut self.latency, read.completed_ns.saturating_sub(read.submitted_ns));
        let (first, last) = (read.submitted_ns / WINDOW_NS, read.completed_ns / WINDOW_NS);
        let mut add = |window: u64, ns: u64| {
            let busy = self.busy_ns.entry(window).or_default();
            *busy = busy.saturating_add(ns);
        };
        if first >= last {
            add(first, read.completed_ns.saturating_sub(read.submitted_ns));
            return;
        }
        add(first, WINDOW_NS - read.submitted_ns % WINDOW_NS);
        add(last, read.completed_ns % WINDOW_NS);
        *self.whole.entry(first + 1).or_default() += 1;
        *self.whole.entry(last).or_default() -= 1;
    }

    fn depth(&self, name: &str, windows: std::ops::Range<u64>) -> DepthSeries {
        let mut whole: i64 = self.whole.range(..windows.start).map(|w| w.1).sum();
        let busy_ns = windows.map(|window| {
            whole += self.whole.get(&window).copied().unwrap_or(0);
            let ends = self.busy_ns.get(&window).copied().unwrap_or(0);
            ends.saturating_add((whole.max(0) as u64).saturating_mul(WINDOW_NS))
        });
        DepthSeries { name: name.to_owned(), busy_ns: busy_ns.collect() }
    }
}

fn first_pass(folder: &Path, header: &TraceHeader, lenient: bool) -> Result<Seen, TraceFigureError> {
    let count_drives = header.drives.len();
    let mut drives: Vec<DriveSeen> = (0..count_drives).map(|_| DriveSeen::default()).collect();
    let (mut layers, mut steps) = (BTreeMap::new(), BTreeMap::new());
    let (mut ties, mut counted) = (0, 0);
    let barriers = stream::barriers(folder, count_drives, lenient)?;
    let reads_of_trace = stream::wanted_reads(folder, count_drives, lenient, Wanted::Report)?;
    let mut joiner = Joiner::new(reads_of_trace, barriers, lenient);
    let mut attributor = Attributor::new(count_drives);
    let mut reads = Vec::new();
    loop {
        let mut add = |read: &ReadEvent| {
            if let Some(drive) = drives.get_mut(read.drive.index()).filter(|_| read.result == ReadResult::Ok) {
                drive.read(read);
            }
        };
        let Some(record) = joiner.next_barrier(&mut reads, &mut add)? else { break };
        reads.iter().for_each(&mut add);
        let found = attributor.attribute(&record, &reads);
        counted += 1;
        ties += u64::from(found.cause == Cause::Tie);
        let step = steps.entry(record.step).or_insert((record.phase, 0u64));
        step.1 = step.1.saturating_add(found.wait.total_ns);
        let layer = layers.entry(record.layer.0).or_insert_with(|| vec![0; count_drives]);
        if let Some(last) = found.last {
            layer[last.drive.index()] += u64::from(found.cause != Cause::Tie);
            if let Some(gap_ns) = found.gap_drive_ns {
                count(&mut drives[last.drive.index()].gaps, gap_ns);
            }
        }
    }
    // windows count from the first one with a byte, because a log may carry the clock of a machine long up
    let first_window = drives.iter().filter_map(|d| d.bytes.keys().next()).min().copied().unwrap_or(0);
    let last = drives.iter().filter_map(|d| d.bytes.keys().next_back()).max().copied().unwrap_or(0);
    let windows = last - first_window + 1;
    if windows > MAX_WINDOWS {
        let reason = format!("the reads span {windows} windows of 10 ms; at most {MAX_WINDOWS} can be drawn");
        return Err(TraceFigureError::Nothing(reason));
    }
    Ok(Seen { drives, first_window, windows, layers, ties, steps, barriers: counted })
}

struct OneStep {
    records: Vec<BarrierRecord>,
    reads: Vec<ReadEvent>,
    note: String,
}

/// The barriers of a step with their reads; of a step that is too large, the run of barriers that waited longest.
fn one_step(folder: &Path, header: &TraceHeader, step: u64, lenient: bool) -> Result<OneStep, TraceFigureError> {
    let drives = header.drives.len();
    let barriers = stream::barriers(folder, drives, lenient)?;
    let mut joiner = Joiner::new(stream::reads(folder, drives, lenient)?, barriers, lenient);
    let mut groups: Vec<(BarrierRecord, Vec<ReadEvent>)> = Vec::new();
    let mut reads = Vec::new();
    while let Some(record) = joiner.next_barrier(&mut reads, &mut |_| {})? {
        if record.step == step {
            groups.push((record, std::mem::take(&mut reads)));
        } else if !groups.is_empty() {
            break;
        }
    }
    let all = groups.len();
    let shown = longest_run(&groups);
    let note = if shown.len() < all {
        format!("{} of the step's {all} barriers: the run of barriers that waited longest.", shown.len())
    } else {
        String::new()
    };
    let (records, reads): (Vec<_>, Vec<_>) = groups.drain(shown).unzip();
    Ok(OneStep { records, reads: reads.into_iter().flatten().collect(), note })
}

/// The consecutive barriers that fit in a picture and waited longest together; at least one.
fn longest_run(groups: &[(BarrierRecord, Vec<ReadEvent>)]) -> std::ops::Range<usize> {
    let reads = |run: &[(BarrierRecord, Vec<ReadEvent>)]| run.iter().map(|g| g.1.len()).sum::<usize>();
    let wait = |run: &[(BarrierRecord, Vec<ReadEvent>)]| {
        run.iter().map(|g| u128::from(g.0.last_ns.saturating_sub(g.0.open_ns))).sum::<u128>()
    };
    let fits = |run: &[(BarrierRecord, Vec<ReadEvent>)]| {
        run.len() <= MAX_BARRIERS && reads(run) <= LEGIBLE_READS.min(MAX_READS)
    };
    if fits(groups) {
        return 0..groups.len();
    }
    let (mut from, mut best) = (0, 0..1);
    for to in 1..=groups.len() {
        while to - from > 1 && !fits(&groups[from..to]) {
            from += 1;
        }
        if wait(&groups[from..to]) > wait(&groups[best.clone()]) {
            best = from..to;
        }
    }
    best
}
