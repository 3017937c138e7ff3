//! A trace read again, as a measured run: cold drives, guards, evidence for every setting of the reader, and the recorded
//! barrier times beside the new ones.

use super::config::Asked;
use super::evidence::{Evidence, judge, objections};
use super::guards::{Guard, GuardVerdict, RunFacts, Watch};
use super::record::DriveRecord;
use super::run_figures::drive_records;
use super::seen::{ResidencySample, Seen};
use super::trouble::TroubleRecord;
use crate::clock::Clock;
use crate::drive::spec::DriveSpec;
use crate::knob::Knob;
use crate::layout::plan::{Plan, PlanError};
use crate::reader::{ExpertReader, KnownRate};
use crate::replay::measured;
use crate::replay::reissue::{self, Gaps, ReissueError};
use crate::replay::schedule::Schedule;
use crate::source::Phase;
use crate::stats;
use crate::trace::events::BarrierRecord;
use crate::trace::log::{self, Reissued, TraceBuffer, TraceError, TraceHeader, TraceRate};
use crate::trace::stream::PHASES;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Settings that have nothing to act on here: nothing is decoded, and the trace is not a choice.
const WITHOUT_EFFECT: [Knob; 25] = [
    Knob::Resident,
    Knob::Kernels,
    Knob::Activations,
    Knob::Threads,
    Knob::Trunk,
    Knob::Affinity,
    Knob::Parallel,
    Knob::PrefillRows,
    Knob::Speculate,
    Knob::DraftDepth,
    Knob::DraftPolicy,
    Knob::DraftAccept,
    Knob::DraftWindow,
    Knob::MaxContext,
    Knob::KvRam,
    Knob::MaxNew,
    Knob::Temperature,
    Knob::TopP,
    Knob::TopK,
    Knob::Seed,
    Knob::Special,
    Knob::Trace,
    Knob::Reference,
    Knob::SnapshotEvery,
    Knob::Resume,
];

/// What to read again.
pub struct ReissueSpec<'a> {
    /// The recorded trace.
    pub from: &'a Path,
    /// Its barriers.
    pub schedule: &'a Schedule,
    /// The plan to read them under.
    pub plan: &'a Plan,
    /// Where its drives are.
    pub mounts: &'a [DriveSpec],
    /// The reader's options, and which of them somebody gave.
    pub asked: &'a Asked,
    /// What lies between barriers.
    pub gaps: Gaps,
    /// What is known of the drives, for the bounds; empty = what the reader was given or learns.
    pub rates: &'a [KnownRate],
    /// Folder that gets the new trace.
    pub out: Option<&'a Path>,
}

/// It failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The reads.
    #[error(transparent)]
    Reissue(#[from] ReissueError),
    /// The plan could not be hashed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The trace could not be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// From open to the last arrival, over some barriers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Arithmetic mean.
    pub mean_ns: f64,
    /// Median.
    pub p50_ns: f64,
    /// 95th percentile.
    pub p95_ns: f64,
}

/// Barriers of one phase, or all.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseRow {
    /// Which.
    pub phase: &'static str,
    /// How many.
    pub barriers: usize,
    /// As recorded.
    pub recorded: Times,
    /// As read again.
    pub reissued: Times,
    /// Mean read again / mean recorded.
    pub ratio: Option<f64>,
    /// Mean bound with the homes of the plan; `None` where rates are unknown or the drives are too many.
    pub bound_layout_ns: Option<f64>,
    /// Mean bound as if every expert were on every drive.
    pub bound_drives_ns: Option<f64>,
    /// Mean read again / mean layout bound: what the reader left.
    pub over_layout: Option<f64>,
    /// Mean layout bound / mean drive bound: what the plan left.
    pub layout_over_drives: Option<f64>,
}

/// What reading a trace again gave.
#[derive(Clone, Debug, Serialize)]
pub struct ReissueRecord {
    /// The recorded trace.
    pub from: PathBuf,
    /// The new one, if it was kept.
    pub out: Option<PathBuf>,
    /// Hash of the plan.
    pub plan_hash: String,
    /// Some drive's pace was emulated: no figure is a speed of the hardware.
    pub emulated: bool,
    /// What went wrong with drives, on purpose or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<TroubleRecord>,
    /// What lay between barriers.
    pub gaps: Gaps,
    /// Sum of the gaps that were waited for, as recorded.
    pub gaps_ns: u64,
    /// How late they ended: median and 99th percentile.
    pub gaps_late_ns: Option<(f64, f64)>,
    /// Barriers read.
    pub barriers: usize,
    /// Experts read.
    pub experts: usize,
    /// Payload bytes of the recorded run.
    pub recorded_bytes: u64,
    /// Payload bytes now.
    pub reissued_bytes: u64,
    /// By phase; all barriers last.
    pub phases: Vec<PhaseRow>,
    /// By drive.
    pub drives: Vec<DriveRecord>,
    /// What the drives could do, which the bounds come from.
    pub rates: Vec<TraceRate>,
    /// What had to be assumed.
    pub assumptions: Vec<String>,
    /// Every setting of the reader: asked, seen, verdict.
    pub settings: Vec<Evidence>,
    /// Every guard.
    pub guards: Vec<Guard>,
    /// Why it does not count, if it does not.
    pub rejected: Vec<String>,
}

/// Reads the barriers of `spec` again. `keep_going` is asked between barriers.
pub fn run(spec: &ReissueSpec<'_>, keep_going: &dyn Fn() -> bool) -> Result<ReissueRecord, RunError> {
    let (schedule, plan, mounts) = (spec.schedule, spec.plan, spec.mounts);
    schedule.check(plan).map_err(ReissueError::from)?;
    let plan_hash = plan.hash()?;
    let sample = ResidencySample::open(plan, mounts);
    let before = sample.as_ref().and_then(ResidencySample::measure);
    let watch = Watch::start(mounts);
    let mut options = spec.asked.config.reader.clone();
    let room = reissue::room(schedule, mounts.len());
    (options.trace_reads, options.trace_barriers) = (room.reads, room.barriers);
    let clock = Clock::start();
    let mut reader = ExpertReader::open(plan, mounts, &options, clock).map_err(ReissueError::from)?;
    let handle = reader.handle();
    let gaps = reissue::run(schedule, &mut reader, spec.gaps, keep_going)?;
    let counters = handle.counters();
    drop(reader);
    let residency = before.zip(sample.as_ref().and_then(ResidencySample::measure));
    let mut guards = watch.finish(&RunFacts {
        streamed: Some((plan, mounts)),
        read_bytes: counters.drives.iter().map(|d| d.read_bytes).sum(),
        direct: counters.drives.iter().all(|d| d.direct.is_some()),
        residency,
        sample: sample.as_ref(),
        tokens: ("", None),
    });
    guards.retain(|g| g.name != super::guards::TOKEN_IDENTITY); // there are no tokens
    let mut trace = handle.take_trace().unwrap_or_default();
    let known = if spec.rates.is_empty() { &options.rates } else { spec.rates };
    let rates = measured::rates(&counters, known, Some(&trace));
    measured::fill_bounds(&mut trace, plan, handle.drives(), &rates).map_err(ReissueError::from)?;

    let (drives, emulated) = (drive_records(&counters), counters.drives.iter().any(|d| d.capabilities.emulated));
    let reissued_bytes = counters.payload_bytes();
    let trouble = TroubleRecord::of(&counters);
    let faults = trouble_faults(trouble.as_ref());
    let seen = Seen { reader: Some(counters), residency, ..Seen::default() };
    let mut under_test: BTreeSet<Knob> = spec.asked.given.clone();
    under_test.insert(Knob::Layout);
    if mounts.iter().any(|m| m.emulate.is_some()) {
        under_test.insert(Knob::Pace);
    }
    let mut settings = judge(&spec.asked.config, Some((plan, mounts)), &seen, &under_test);
    settings.retain(|e| !WITHOUT_EFFECT.iter().any(|k| k.name() == e.name));
    let mut rejected = objections(&settings);
    let tripped = guards.iter().filter(|g| g.verdict == GuardVerdict::Tripped);
    rejected.extend(tripped.map(|g| format!("{}: {}", g.name, g.seen)));
    let complete = trace.check_complete();
    rejected.extend(complete.as_ref().err().map(ToString::to_string));
    if trace.barriers().len() != schedule.barriers.len() {
        let (seen, wanted) = (trace.barriers().len(), schedule.barriers.len());
        rejected.push(format!("{seen} barriers were read, the trace has {wanted}"));
    }

    let mut assumptions = schedule.assumptions.clone();
    if spec.gaps == Gaps::Recorded {
        assumptions.push(
            "a gap is the time from the last arrival of a barrier to the opening of the next; it is slept, nothing is computed"
                .into(),
        );
    }
    if let (Some(folder), Ok(())) = (spec.out, &complete) {
        let reissued = Reissued {
            from: spec.from.to_path_buf(),
            plan_hash: plan_hash.clone(),
            gaps: spec.gaps.name().into(),
            assumptions: assumptions.clone(),
            rejected: rejected.clone(),
        };
        let header = TraceHeader {
            rates: rates.clone(),
            reissued: Some(reissued),
            faults,
            ..TraceHeader::new(handle.drives().to_vec())
        };
        log::write(folder, &header, &trace)?;
    }
    Ok(ReissueRecord {
        from: spec.from.to_path_buf(),
        out: spec.out.filter(|_| complete.is_ok()).map(Path::to_path_buf),
        plan_hash,
        emulated,
        trouble,
        gaps: spec.gaps,
        gaps_ns: gaps.recorded_ns,
        gaps_late_ns: stats::quantiles(&gaps.late_ns, &[0.5, 0.99]).ok().map(|q| (q[0], q[1])),
        barriers: trace.barriers().len(),
        experts: schedule.experts.len(),
        recorded_bytes: schedule.recorded_bytes,
        reissued_bytes,
        phases: phases(schedule, &trace),
        drives,
        rates,
        assumptions,
        settings,
        guards,
        rejected,
    })
}

/// Faults on purpose, in words.
pub(super) fn trouble_faults(trouble: Option<&TroubleRecord>) -> Vec<String> {
    trouble.into_iter().flat_map(|t| &t.injected).map(|f| format!("{}: {}", f.drive, f.fault)).collect()
}

/// The rows of the comparison. The n-th barrier of the new trace is the n-th of the recorded one.
fn phases(schedule: &Schedule, trace: &TraceBuffer) -> Vec<PhaseRow> {
    let pairs: Vec<(u64, &BarrierRecord)> = schedule.barriers.iter().map(|d| d.wait_ns).zip(trace.barriers()).collect();
    let of = |name, phase: Option<Phase>| {
        let own: Vec<_> = pairs.iter().filter(|(_, b)| phase.is_none_or(|p| b.phase == p)).collect();
        let recorded: Vec<f64> = own.iter().map(|(wait_ns, _)| *wait_ns as f64).collect();
        let reissued: Vec<f64> = own.iter().map(|(_, b)| b.last_ns.saturating_sub(b.open_ns) as f64).collect();
        let mean_of = |bound: &dyn Fn(&BarrierRecord) -> Option<u64>| {
            let all: Option<Vec<f64>> = own.iter().map(|(_, b)| bound(b).map(|ns| ns as f64)).collect();
            all.and_then(|all| stats::mean(&all).ok())
        };
        let (recorded, reissued) = (times(&recorded)?, times(&reissued)?);
        let (layout, drives) = (mean_of(&|b| b.bound_layout_ns), mean_of(&|b| b.bound_drives_ns));
        Some(PhaseRow {
            phase: name,
            barriers: own.len(),
            ratio: over(reissued.mean_ns, Some(recorded.mean_ns)),
            over_layout: over(reissued.mean_ns, layout),
            layout_over_drives: layout.and_then(|l| over(l, drives)),
            recorded,
            reissued,
            bound_layout_ns: layout,
            bound_drives_ns: drives,
        })
    };
    let by_phase = PHASES.iter().filter_map(|(name, phase)| of(name, Some(*phase)));
    by_phase.chain(of("all", None)).collect()
}

/// `None` without barriers.
fn times(ns: &[f64]) -> Option<Times> {
    let q = stats::quantiles(ns, &[0.5, 0.95]).ok()?;
    Some(Times { mean_ns: stats::mean(ns).ok()?, p50_ns: q[0], p95_ns: q[1] })
}

fn over(a: f64, b: Option<f64>) -> Option<f64> {
    b.filter(|b| *b > 0.0).map(|b| a / b)
}
