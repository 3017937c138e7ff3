//! The three figures of a trace folder: what each drive delivered over time, the waterfall of one step, who landed last
//! by layer. Reads the folder twice and holds windows, layers and one step, never the trace.

use super::ReportError;
use super::lands_last::{LandsLastFigure, LayerCounts};
use super::plot::Figure;
use super::timeline::{DriveSeries, TimelineFigure};
use super::units;
use super::waterfall::{MAX_BARRIERS, MAX_READS, WaterfallFigure};
use crate::replay::ReplayError;
use crate::replay::attribution::Attributor;
use crate::replay::join::Joiner;
use crate::source::Phase;
use crate::trace::events::{BarrierRecord, Cause, ReadEvent, ReadResult};
use crate::trace::log::{TraceHeader, read_header};
use crate::trace::stream::{self, PHASES, word_of};
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

/// What the first pass keeps.
struct Seen {
    series: Vec<DriveSeries>,
    layers: BTreeMap<u16, Vec<u64>>,
    ties: u64,
    /// Phase and wait of each step.
    steps: BTreeMap<u64, (Phase, u64)>,
    barriers: u64,
}

/// Draws all figures of the trace in `folder` into `out`; the waterfall shows `step`, or the decode step that waited
/// longest. Gives the files.
pub fn draw(folder: &Path, out: &Path, step: Option<u64>, lenient: bool) -> Result<Vec<PathBuf>, TraceFigureError> {
    let header = read_header(folder)?;
    let seen = first_pass(folder, &header, lenient)?;
    let emulated = header.drives.iter().any(|d| d.emulated);
    let subtitle = match &header.imported {
        Some(imported) => format!("imported from {}", imported.format),
        None => folder.file_name().map(|n| format!("trace {}", n.to_string_lossy())).unwrap_or_default(),
    };
    let mut files = Vec::new();
    let timeline = TimelineFigure {
        title: "What each drive delivered".into(),
        subtitle: subtitle.clone(),
        emulated,
        window_ms: WINDOW_NS as f64 / 1e6,
        drives: seen.series,
        note: "Bytes of a read count in the window in which it was complete.".into(),
    };
    files.extend(timeline.write(&out.join("timeline"))?);
    if seen.barriers == 0 {
        return if step.is_some() { Err(no_step(step)) } else { Ok(files) };
    }
    let names: Vec<String> = header.drives.iter().map(|d| d.name.clone()).collect();
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
    files.extend(lands_last.write(&out.join("lands-last"))?);
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
    files.extend(figure.write(&out.join(format!("waterfall-step-{number}")))?);
    Ok(files)
}

fn no_step(step: Option<u64>) -> TraceFigureError {
    let step = step.map_or_else(String::new, |s| format!(" {s}"));
    TraceFigureError::Nothing(format!("the trace has no step{step} to draw"))
}

fn first_pass(folder: &Path, header: &TraceHeader, lenient: bool) -> Result<Seen, TraceFigureError> {
    let drives = header.drives.len();
    let series = header.drives.iter().map(|d| DriveSeries {
        name: d.name.clone(),
        window_bytes: Vec::new(),
        rated_bytes_per_s: None,
    });
    let mut seen =
        Seen { series: series.collect(), layers: BTreeMap::new(), ties: 0, steps: BTreeMap::new(), barriers: 0 };
    let barriers = stream::barriers(folder, drives, lenient)?;
    let mut joiner = Joiner::new(stream::reads(folder, drives, lenient)?, barriers, lenient);
    let mut attributor = Attributor::new(drives);
    let mut reads = Vec::new();
    // windows count from the first one with a byte, because a log may carry the clock of a machine long up
    let mut buckets: Vec<BTreeMap<u64, u64>> = vec![BTreeMap::new(); drives];
    loop {
        let mut add = |read: &ReadEvent| {
            if read.result == ReadResult::Ok {
                let bytes = buckets[read.drive.index()].entry(read.completed_ns / WINDOW_NS).or_default();
                *bytes = bytes.saturating_add(read.bytes);
            }
        };
        let Some(record) = joiner.next_barrier(&mut reads, &mut add)? else { break };
        reads.iter().for_each(&mut add);
        let found = attributor.attribute(&record, &reads);
        seen.barriers += 1;
        seen.ties += u64::from(found.cause == Cause::Tie);
        let step = seen.steps.entry(record.step).or_insert((record.phase, 0));
        step.1 = step.1.saturating_add(found.wait.total_ns);
        let layer = seen.layers.entry(record.layer.0).or_insert_with(|| vec![0; drives]);
        if let Some(last) = found.last.filter(|_| found.cause != Cause::Tie) {
            layer[last.drive.index()] += 1;
        }
    }
    let first = buckets.iter().filter_map(|b| b.keys().next()).min().copied().unwrap_or(0);
    let last = buckets.iter().filter_map(|b| b.keys().next_back()).max().copied().unwrap_or(0);
    if last - first >= MAX_WINDOWS {
        let windows = last - first;
        return Err(TraceFigureError::Nothing(format!(
            "the reads span {windows} windows of 10 ms; at most {MAX_WINDOWS}"
        )));
    }
    for (series, buckets) in seen.series.iter_mut().zip(&buckets) {
        series.window_bytes = (first..=last).map(|w| buckets.get(&w).copied().unwrap_or(0)).collect();
    }
    Ok(seen)
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
