//! What a simulation runs: the barriers of a trace with the experts that they demand and the compute around them, and what
//! the trace says of its drives. Reads a trace folder; simulates nothing.
//!
//! **Compute.** A barrier of `n` experts leaves `close - open - stall` of compute inside. It is cut into what is done before
//! the first expert is taken (`before`: the decision, shared experts) and what each expert takes (`each`), such that
//! taking the experts when they really arrived ends when the barrier really closed: with arrivals in order,
//! `each = min over k of (close - arrival_k) / (n - k + 1)`, at most all of it by `n`. What is then missing to the close is
//! how late compute woke up (`wake`). From the close to the next opening is the `gap`.
//!
//! **Residuals.** How much later a read ended than the model of its drive says, in barriers that the drive entered idle;
//! reads handed over at once count from the barrier's first hand-over, so that late hand-overs are in it. What lies within
//! [`OWN_MADS`] median deviations of the drive's median is the drive's own; the rest disturbed the machine at that moment. Where the model is
//! of another drive than the trace was read from, they say nothing, which `over_model` tells.

use super::ReplayError;
use super::join::Joiner;
use super::schedule::{Counts, ROUTES_FILE, Routes, demanded};
use super::simulate::devices::{Device, Episode, Episodes, PLACES, place_of};
use super::verdict::FixedCost;
use crate::ids::{ExpertId, LayerId};
use crate::source::{Phase, StepInfo};
use crate::trace::events::{BarrierRecord, Outcome, Purpose, ReadEvent, ReadResult};
use crate::trace::log::{TraceHeader, TraceRate};
use crate::trace::routes::routes;
use crate::trace::stream::{self, Skipped};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;

/// Median absolute deviations around the median that are a drive's own.
pub const OWN_MADS: f64 = 4.0;
/// Drives of a trace; which of them served an expert is kept as bits.
const MAX_DRIVES: usize = u64::BITS as usize;
/// Residuals kept for each drive and place.
const MAX_RESIDUALS: usize = 20_000;

/// One barrier of a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// Its number in the trace.
    pub barrier: u64,
    /// The pass.
    pub step: StepInfo,
    /// The layer.
    pub layer: LayerId,
    /// Where its experts stand in [`Workload::experts`].
    pub experts: Range<usize>,
    /// From the opening to the first hand-over to a drive.
    pub handover_ns: u64,
    /// Compute before the first expert is taken.
    pub before_ns: u64,
    /// Compute for each expert.
    pub each_ns: f64,
    /// How late compute goes on after a wait.
    pub wake_ns: u64,
    /// From its close to the next opening; 0 for the last.
    pub gap_ns: u64,
    /// As recorded: from open to the last arrival, and to the close.
    pub wait_ns: u64,
    /// As recorded.
    pub span_ns: u64,
}

/// The barriers of a trace, and what else a simulation needs of it.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    /// In the order in which they opened.
    pub barriers: Vec<Demand>,
    /// Experts of all barriers, ascending within each.
    pub experts: Vec<ExpertId>,
    /// Names of the trace's drives.
    pub drives: Vec<String>,
    /// Bytes that each of them delivered, alignment included.
    pub drive_bytes: Vec<u64>,
    /// Payload bytes that the recorded run read.
    pub recorded_bytes: u64,
    /// Bytes of a whole read, alignment included, where any was whole.
    pub read_bytes: Option<u64>,
    /// Tokens that came of the passes that extend the text.
    pub tokens: u64,
    /// Time of decoding that lies before its first barrier and after its last.
    pub edge_ns: u64,
    /// Fixed cost and rate of each drive, fitted to its part of every barrier.
    pub fitted: Vec<Option<(u64, f64)>>,
    /// Which drives served an expert, as bits.
    pub served: HashMap<(LayerId, ExpertId), u64>,
    /// Some drive's pace was emulated.
    pub emulated: bool,
    /// The model, where the trace names it.
    pub model_id: Option<String>,
    /// What the trace does not say, and what was taken instead.
    pub assumptions: Vec<String>,
    /// Rows with faults that were left out.
    pub skipped: Skipped,
}

impl Workload {
    /// Reads the trace in `folder`.
    pub fn load(folder: &Path, header: &TraceHeader, lenient: bool) -> Result<Self, ReplayError> {
        let drives = header.drives.len();
        if drives > MAX_DRIVES {
            let text = format!("{}: {drives} drives; a simulation takes at most {MAX_DRIVES}", folder.display());
            return Err(ReplayError::Input(text));
        }
        let mut out = Self {
            drives: header.drives.iter().map(|d| d.name.clone()).collect(),
            drive_bytes: vec![0; drives],
            emulated: header.drives.iter().any(|d| d.emulated),
            model_id: header.model_id.clone(),
            ..Self::default()
        };
        let routed = Routes::open(folder, lenient, &mut out.skipped)?;
        let (mut counts, mut set, mut arrivals) = (Counts::default(), Vec::new(), Vec::new());
        let mut fits = vec![FixedCost::default(); drives];
        let (mut last_close_ns, mut bounds) = (0, None);
        let mut skipped = Skipped::default();
        each_barrier(folder, drives, lenient, &mut skipped, |record, reads| {
            demanded(folder, record, reads, routed.as_ref(), &mut set, &mut counts)?;
            if let Some(before) = out.barriers.last_mut() {
                counts.overlaps += u64::from(record.open_ns < last_close_ns);
                before.gap_ns = record.open_ns.saturating_sub(last_close_ns);
            }
            last_close_ns = last_close_ns.max(record.close_ns);
            if record.phase != Phase::Prefill {
                let (first, _) = *bounds.get_or_insert((record.open_ns, 0));
                bounds = Some((first, record.close_ns));
            }
            let from = out.experts.len();
            out.experts.extend(set.iter().map(|e| ExpertId(*e)));
            out.note(record, reads, &mut fits);
            arrive(record, reads, &set, &mut arrivals);
            let demand = demand(record, reads, &arrivals, from..out.experts.len());
            out.barriers.push(demand);
            Ok(())
        })?;
        out.skipped.merge(&skipped);
        if out.experts.is_empty() {
            let text = "holds no barrier with experts that are known; there is nothing to simulate";
            return Err(ReplayError::Input(format!("{}: {text}", folder.display())));
        }
        out.fitted = fits.iter().map(FixedCost::fitted).collect();
        if let (Some((first, last)), Some(wall_ns)) = (bounds, header.decode_wall_ns) {
            out.edge_ns = wall_ns.saturating_sub(last.saturating_sub(first));
        }
        out.assumptions = counts.said(header, routed.is_some());
        if header.decode_wall_ns.is_none() && bounds.is_some() {
            out.assumptions.push(
                "the trace does not say how long decoding took: it counts from its first barrier to its last".into(),
            );
        }
        out.tokens = out.count_tokens(folder, header, lenient)?;
        if out.skipped.rows > 0 {
            out.assumptions.push(format!("{} rows with faults were left out", out.skipped.rows));
        }
        Ok(out)
    }

    fn note(&mut self, record: &BarrierRecord, reads: &[ReadEvent], fits: &mut [FixedCost]) {
        self.recorded_bytes = self.recorded_bytes.saturating_add(record.bytes);
        for read in reads.iter().filter(|r| r.result == ReadResult::Ok) {
            let sum = &mut self.drive_bytes[read.drive.index()];
            *sum = sum.saturating_add(read.bytes);
            if read.parts == 1 {
                self.read_bytes = Some(self.read_bytes.unwrap_or(0).max(read.bytes));
            }
            *self.served.entry((read.layer, read.expert)).or_default() |= 1u64 << read.drive.0;
        }
        for (drive, fit) in fits.iter_mut().enumerate() {
            let own = || reads.iter().filter(|r| r.drive.index() == drive && r.result == ReadResult::Ok);
            let inside = own().all(|r| r.submitted_ns >= record.open_ns);
            let (first, last) = (own().map(|r| r.submitted_ns).min(), own().map(|r| r.completed_ns).max());
            if let (Some(first), Some(last), true) = (first, last, inside) {
                fit.add(own().fold(0, |sum, r| sum.saturating_add(r.bytes)), last.saturating_sub(first));
            }
        }
    }

    /// One for each row of a pass that extends texts; of a checked draft, the rows that were kept.
    fn count_tokens(&mut self, folder: &Path, header: &TraceHeader, lenient: bool) -> Result<u64, ReplayError> {
        let passes = |phase| {
            let of = self.barriers.iter().filter(move |b| b.step.phase == phase);
            of.map(|b| (b.step.step, u64::from(b.step.rows))).collect::<BTreeSet<_>>()
        };
        let decoded = passes(Phase::Decode).iter().map(|(_, rows)| rows).sum::<u64>();
        let verified = passes(Phase::Verify).len() as u64;
        if verified == 0 {
            return Ok(decoded);
        }
        let Some(mut rows) = routes(folder, header, lenient)? else {
            let text =
                format!("{verified} passes check drafts, and no {ROUTES_FILE} says what was kept: one token each");
            self.assumptions.push(text);
            return Ok(decoded + verified);
        };
        let mut kept = BTreeSet::new();
        while let Some(row) = rows.next_value()? {
            if row.phase == Phase::Verify && row.kept == 1 {
                kept.insert((row.step, row.pos));
            }
        }
        Ok(decoded + kept.len() as u64)
    }

    /// Experts of one barrier.
    pub fn of(&self, demand: &Demand) -> &[ExpertId] {
        &self.experts[demand.experts.clone()]
    }

    /// The widest barrier of a pass that extends the text.
    pub fn widest_step(&self) -> usize {
        let of = self.barriers.iter().filter(|b| b.step.phase != Phase::Prefill);
        of.map(|b| b.experts.len()).max().unwrap_or(0)
    }

    /// Layers with experts, ascending.
    pub fn layers(&self) -> Vec<LayerId> {
        self.barriers.iter().map(|b| b.layer).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Rates of all of `names`: those that the run was given, else those fitted to its reads, else those that it learnt.
    pub fn rates(&self, header: &TraceHeader, names: &[String]) -> Result<Vec<TraceRate>, ReplayError> {
        use crate::trace::log::RateFrom;
        let of = |name: &String| {
            let written = header.rates.iter().find(|r| r.drive == *name).cloned();
            let fitted = || {
                let at = self.drives.iter().position(|d| d == name)?;
                let (fixed_ns, rate) = self.fitted[at]?;
                let (drive, from) = (name.clone(), RateFrom::Learnt);
                Some(TraceRate { drive, bytes_per_s: rate.round() as u64, fixed_ns, from })
            };
            let given = written.clone().filter(|r| r.from == RateFrom::Given);
            given.or_else(fitted).or(written).filter(|r| r.bytes_per_s > 0).ok_or_else(|| {
                let known = if self.drives.contains(name) { "shows no rate of it" } else { "did not read from it" };
                ReplayError::Input(format!(
                    "drive `{name}`: the trace {known}; measure it with `argodrive ceiling` and give --profile"
                ))
            })
        };
        names.iter().map(of).collect()
    }
}

/// Calls `f` with every barrier of `folder` and its reads.
fn each_barrier(
    folder: &Path,
    drives: usize,
    lenient: bool,
    skipped: &mut Skipped,
    mut f: impl FnMut(&BarrierRecord, &[ReadEvent]) -> Result<(), ReplayError>,
) -> Result<(), ReplayError> {
    let (reads, barriers) = (stream::reads(folder, drives, lenient)?, stream::barriers(folder, drives, lenient)?);
    let mut joiner = Joiner::new(reads, barriers, lenient);
    let mut reads = Vec::new();
    while let Some(record) = joiner.next_barrier(&mut reads, &mut |_| {})? {
        f(&record, &reads)?;
    }
    skipped.merge(&joiner.skipped());
    Ok(())
}

/// When each expert of `set` was there, in order; what was not read was there at the opening.
fn arrive(record: &BarrierRecord, reads: &[ReadEvent], set: &[u16], out: &mut Vec<u64>) {
    out.clear();
    out.extend(set.iter().map(|&expert| {
        let own = reads.iter().filter(|r| r.expert.0 == expert && delivered(r));
        // the last of its parts; of two reads of one part the first
        let mut parts: BTreeMap<u8, u64> = BTreeMap::new();
        own.for_each(|r| {
            let end = parts.entry(r.part).or_insert(r.completed_ns);
            *end = (*end).min(r.completed_ns);
        });
        parts.into_values().max().unwrap_or(0).clamp(record.open_ns, record.close_ns.max(record.open_ns))
    }));
    out.sort_unstable();
}

fn delivered(read: &ReadEvent) -> bool {
    read.result == ReadResult::Ok && read.outcome != Outcome::Wasted
}

fn demand(record: &BarrierRecord, reads: &[ReadEvent], arrivals: &[u64], experts: Range<usize>) -> Demand {
    let span_ns = record.close_ns.saturating_sub(record.open_ns);
    let compute = span_ns.saturating_sub(record.stall_ns) as f64;
    let n = arrivals.len();
    let after = arrivals.iter().enumerate();
    let each = after.map(|(k, a)| record.close_ns.saturating_sub(*a) as f64 / (n - k) as f64).fold(f64::MAX, f64::min);
    let each_ns = if n == 0 { 0.0 } else { each.min(compute / n as f64) };
    let before_ns = (compute - each_ns * n as f64).max(0.0);
    let mut end = record.open_ns as f64 + before_ns;
    arrivals.iter().for_each(|&a| end = end.max(a as f64) + each_ns);
    let inside = reads.iter().filter(|r| r.submitted_ns >= record.open_ns);
    let first = inside.map(|r| r.submitted_ns).min();
    Demand {
        barrier: record.barrier,
        step: StepInfo { step: record.step, phase: record.phase, pos: record.pos, rows: record.rows },
        layer: record.layer,
        experts,
        handover_ns: first.map_or(0, |f| f - record.open_ns),
        before_ns: before_ns.round() as u64,
        each_ns,
        wake_ns: (record.close_ns as f64 - end).max(0.0).round() as u64,
        gap_ns: 0,
        wait_ns: record.last_ns.saturating_sub(record.open_ns),
        span_ns,
    }
}

/// How late reads were, against the model of their drive.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Residuals {
    /// By drive and place, at most [`MAX_RESIDUALS`] for each.
    pub places: Vec<Vec<Vec<i64>>>,
    /// By barrier, drive and read.
    pub episodes: Episodes,
    /// By drive: how long its share of a barrier took, over what the model says; median, 1 where nothing was seen.
    pub over_model: Vec<f64>,
}

/// Residuals of the trace's reads against `devices` (of its drives; `None` where a drive is not simulated).
pub fn residuals(
    folder: &Path,
    header: &TraceHeader,
    devices: &[Option<Device>],
    lenient: bool,
) -> Result<Residuals, ReplayError> {
    let mut out = Residuals { places: vec![vec![Vec::new(); PLACES]; devices.len()], ..Residuals::default() };
    let mut ratios: Vec<Vec<f64>> = vec![Vec::new(); devices.len()];
    // of each episode, when reads should have ended: by drive, in the order of `own`
    let mut due: [Vec<Vec<Vec<u64>>>; 2] = Default::default();
    let mut own: Vec<ReadEvent> = Vec::new();
    each_barrier(folder, header.drives.len(), lenient, &mut Skipped::default(), |record, reads| {
        let inside = |r: &&ReadEvent| r.submitted_ns >= record.open_ns;
        let Some(first_ns) = reads.iter().filter(inside).map(|r| r.submitted_ns).min() else { return Ok(()) };
        let mut episode = Episode { own: vec![Vec::new(); devices.len()], common: Vec::new() };
        let mut ends = vec![Vec::new(); devices.len()];
        for (drive, device) in devices.iter().enumerate() {
            let Some(device) = device else { continue };
            let of_drive = || reads.iter().filter(|r| r.drive.index() == drive);
            // a drive that prefetch uses too was perhaps not idle
            if !of_drive().all(|r| r.purpose == Purpose::Demand && inside(&r) && r.result == ReadResult::Ok) {
                continue;
            }
            own.clear();
            own.extend(of_drive().copied());
            own.sort_unstable_by_key(|r| (r.submitted_ns, r.completed_ns));
            let first_end = own.iter().map(|r| r.completed_ns).min().unwrap_or(0);
            let mut free_ns = first_ns;
            for (nth, read) in own.iter().enumerate() {
                let at = if read.submitted_ns >= first_end { read.submitted_ns } else { first_ns };
                let occupied = device.fixed_ns as f64 + read.bytes as f64 * 1e9 / device.bound.bytes_per_s;
                free_ns = free_ns.max(at).saturating_add(occupied.round() as u64);
                let due_ns = free_ns.saturating_add(device.latency_ns);
                let late = read.completed_ns as i64 - due_ns as i64;
                episode.own[drive].push(late);
                ends[drive].push(due_ns.saturating_sub(record.open_ns));
                let place = &mut out.places[drive][place_of(nth as u32)];
                if place.len() < MAX_RESIDUALS {
                    place.push(late);
                }
            }
            let model_ns = free_ns.saturating_add(device.latency_ns).saturating_sub(first_ns);
            let seen_ns = own.iter().map(|r| r.completed_ns).max().unwrap_or(0).saturating_sub(first_ns);
            if model_ns > 0 && !own.is_empty() && ratios[drive].len() < MAX_RESIDUALS {
                ratios[drive].push(seen_ns as f64 / model_ns as f64);
            }
        }
        let (list, due) = match record.phase {
            Phase::Prefill => (&mut out.episodes.prefill, &mut due[0]),
            _ => (&mut out.episodes.extend, &mut due[1]),
        };
        if list.len() < MAX_RESIDUALS && episode.own.iter().any(|e| !e.is_empty()) {
            list.push(episode);
            due.push(ends);
        }
        Ok(())
    })?;
    let own: Vec<(i64, i64)> = out.places.iter().map(|places| own_range(places)).collect();
    for (list, due) in [&mut out.episodes.prefill, &mut out.episodes.extend].into_iter().zip(due) {
        list.iter_mut().zip(due).for_each(|(episode, due)| part(episode, &due, &own));
    }
    for (places, &(low, high)) in out.places.iter_mut().zip(&own) {
        places.iter_mut().flatten().for_each(|late| *late = (*late).clamp(low, high));
    }
    out.over_model = ratios.iter().map(|r| crate::stats::median(r).unwrap_or(1.0)).collect();
    Ok(out)
}

/// Between which lateness is a drive's own.
fn own_range(places: &[Vec<i64>]) -> (i64, i64) {
    let all: Vec<f64> = places.iter().flatten().map(|&late| late as f64).collect();
    let (Ok(median), Ok(mad)) = (crate::stats::median(&all), crate::stats::mad(&all)) else { return (0, 0) };
    ((median - OWN_MADS * mad).round() as i64, (median + OWN_MADS * mad).round() as i64)
}

/// Parts what is a drive's own from what came on top; reads should have ended `due` after the opening.
fn part(episode: &mut Episode, due: &[Vec<u64>], own: &[(i64, i64)]) {
    for ((list, due), &(low, high)) in episode.own.iter_mut().zip(due).zip(own) {
        for (late, &due_ns) in list.iter_mut().zip(due) {
            let mine = (*late).clamp(low, high);
            episode.common.push((due_ns.saturating_add_signed(mine), *late - mine));
            *late = mine;
        }
    }
    episode.common.sort_unstable();
}
