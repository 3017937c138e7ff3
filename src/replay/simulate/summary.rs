//! Simulated runs in figures, and a recorded one in the same. Pure arithmetic.
//!
//! **tok/s** is tokens / (passes that extend the text, from opening to opening, + the recorded time before the first and
//! after the last barrier): `decode_tok_s` of a run, as far as a trace knows it. Quantiles are the smallest value that at
//! least the share lies at or below, for what was measured and for what was simulated alike.

use super::interval::{Figures, Waits, figures, mean_of_passes};
use super::{Run, Setup, Simulated};
use crate::replay::verdict::{Verdict, WaitSums};
use crate::replay::workload::Workload;
use crate::source::Phase;
use crate::stats::Interval;
use crate::trace::events::{BarrierRecord, Cause};
use crate::trace::stream::PHASES;
use serde::{Serialize, Serializer};

/// A figure with its interval of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sure(pub Interval);

impl Serialize for Sure {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let Interval { estimate, low, high } = self.0;
        [estimate, low, high].serialize(s)
    }
}

/// Barriers of one phase, or all: from opening to last arrival.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseFigures {
    /// Which.
    pub phase: &'static str,
    /// How many.
    pub barriers: usize,
    /// Median, with the ends of its interval.
    pub p50_ns: Sure,
    /// Mean.
    pub mean_ns: Sure,
    /// 95th percentile.
    pub p95_ns: Sure,
    /// Mean bound with the homes of the plan; `None` where drives are too many, or for a recorded run.
    pub bound_layout_ns: Option<f64>,
    /// Mean bound as if every expert were on every drive.
    pub bound_drives_ns: Option<f64>,
}

/// One drive.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DriveFigures {
    /// Its name.
    pub name: String,
    /// Reads.
    pub reads: f64,
    /// Bytes, alignment included.
    pub bytes: f64,
    /// Share of the run in which its server was occupied.
    pub busy_share: f64,
    /// Share of the barriers that waited for a drive whose last read was its.
    pub lands_last_share: f64,
}

/// What a layout will do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Tokens / s of decoding; `None` where nothing was decoded.
    pub tok_s: Option<Sure>,
    /// By phase; all barriers last.
    pub phases: Vec<PhaseFigures>,
    /// By drive of the plan.
    pub drives: Vec<DriveFigures>,
    /// Bytes read in all, alignment included.
    pub read_bytes: f64,
    /// Payload bytes that barriers got from drives.
    pub payload_bytes: f64,
    /// Experts that the cache had, as a share of those demanded.
    pub hit_share: f64,
    /// Reads of guesses that were useful, late, and for nothing.
    pub prefetch: [f64; 3],
    /// Reads from copies other than the first, as a share of all.
    pub replica_share: f64,
    /// Where the time of decoding goes.
    pub verdict: Option<Verdict>,
    /// Nanoseconds of each pass that extends the text, mean over the simulations.
    #[serde(skip)]
    pub passes: Vec<f64>,
}

/// A recorded run in the same figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Tokens / s of decoding.
    pub tok_s: Option<Sure>,
    /// By phase; all barriers last.
    pub phases: Vec<PhaseFigures>,
    /// Bytes by drive, alignment included.
    pub drive_bytes: Vec<(String, u64)>,
}

/// Passes that extend the text: their times, if barrier `i` takes `span(i)` from its opening to its close.
fn passes(work: &Workload, span: impl Fn(usize) -> u64) -> Vec<f64> {
    let mut out: Vec<f64> = Vec::new();
    let (mut step, mut gap_ns) = (None, 0);
    for (at, demand) in work.barriers.iter().enumerate().filter(|(_, b)| b.step.phase != Phase::Prefill) {
        // the gap before the first barrier is prefill's
        out.last_mut().into_iter().for_each(|last| *last += gap_ns as f64);
        if step != Some(demand.step.step) {
            step = Some(demand.step.step);
            out.push(0.0);
        }
        out.last_mut().into_iter().for_each(|last| *last += span(at) as f64);
        gap_ns = demand.gap_ns;
    }
    out
}

fn tok_s(work: &Workload, by_run: &[Vec<f64>], seed: u64) -> Option<Sure> {
    let mean = mean_of_passes(by_run, seed)?;
    let count = by_run.first().map_or(0, Vec::len) as f64;
    let rate = |ns: f64| work.tokens as f64 * 1e9 / (ns * count + work.edge_ns as f64).max(1.0);
    Some(Sure(Interval { estimate: rate(mean.estimate), low: rate(mean.high), high: rate(mean.low) }))
}

type Bound = fn(&Simulated) -> Option<u64>;

fn phase_rows(
    work: &Workload,
    waits: &[Vec<u64>],
    seed: u64,
    bound: impl Fn(&dyn Fn(usize) -> bool, Bound) -> Option<f64>,
) -> Vec<PhaseFigures> {
    let row = |name, phase: Option<Phase>| {
        let is = |at: usize| phase.is_none_or(|p| work.barriers[at].step.phase == p);
        let own: Vec<usize> = (0..work.barriers.len()).filter(|&at| is(at)).collect();
        let mut pass = (None, 0u32);
        let numbers: Vec<u32> = own
            .iter()
            .map(|&at| {
                let step = Some(work.barriers[at].step.step);
                if pass.0.is_some() && pass.0 != step {
                    pass.1 += 1;
                }
                pass.0 = step;
                pass.1
            })
            .collect();
        let of_run = |run: &Vec<u64>| Waits::new(own.iter().zip(&numbers).map(|(&at, &n)| (run[at], n)));
        let by_run: Vec<Waits> = waits.iter().map(of_run).collect();
        let Figures { mean_ns, p50_ns, p95_ns } = figures(&by_run, seed)?;
        Some(PhaseFigures {
            phase: name,
            barriers: own.len(),
            p50_ns: Sure(p50_ns),
            mean_ns: Sure(mean_ns),
            p95_ns: Sure(p95_ns),
            bound_layout_ns: bound(&is, |b| b.bound_layout_ns),
            bound_drives_ns: bound(&is, |b| b.bound_drives_ns),
        })
    };
    let named = PHASES.iter().filter_map(|(name, phase)| row(*name, Some(*phase)));
    named.chain(row("all", None)).collect()
}

/// The figures of `runs`, simulations of `work` on `setup` with different seeds; the first one has the bounds.
pub fn predict(work: &Workload, setup: &Setup<'_>, runs: &[Run], seed: u64) -> Option<Prediction> {
    let first = runs.first()?;
    let waits: Vec<Vec<u64>> = runs.iter().map(|r| r.barriers.iter().map(Simulated::wait_ns).collect()).collect();
    let bound = |is: &dyn Fn(usize) -> bool, of: Bound| {
        let all = first.barriers.iter().enumerate().filter(|(at, _)| is(*at));
        let all: Option<Vec<f64>> = all.map(|(_, b)| of(b).map(|ns| ns as f64)).collect();
        all.and_then(|all| crate::stats::mean(&all).ok())
    };
    let by_run: Vec<Vec<f64>> =
        runs.iter().map(|r| passes(work, |at| r.barriers[at].close_ns - r.barriers[at].open_ns)).collect();
    let over_runs = |of: &dyn Fn(&Run) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
    let share = |part: f64, whole: f64| if whole == 0.0 { 0.0 } else { part / whole };
    let drive = |(at, device): (usize, &super::devices::Device)| DriveFigures {
        name: device.name.clone(),
        reads: over_runs(&|r| r.drives[at].reads as f64),
        bytes: over_runs(&|r| r.drives[at].bytes as f64),
        busy_share: over_runs(&|r| {
            let span = r.barriers.last().map_or(0, |b| b.close_ns);
            share(r.drives[at].busy_ns as f64, span as f64)
        }),
        lands_last_share: over_runs(&|r| {
            share(r.drives[at].landed_last as f64, r.drives.iter().map(|d| d.landed_last).sum::<u64>() as f64)
        }),
    };
    let drives: Vec<DriveFigures> = setup.devices.iter().enumerate().map(drive).collect();
    let reads: f64 = drives.iter().map(|d| d.reads).sum();
    let count = by_run.first().map_or(0, Vec::len);
    Some(Prediction {
        tok_s: tok_s(work, &by_run, seed),
        phases: phase_rows(work, &waits, seed, bound),
        read_bytes: drives.iter().map(|d| d.bytes).sum(),
        drives,
        payload_bytes: over_runs(&|r| r.barriers.iter().map(|b| b.bytes as f64).sum()),
        hit_share: share(over_runs(&|r| r.barriers.iter().map(|b| f64::from(b.hits)).sum()), work.experts.len() as f64),
        prefetch: [
            over_runs(&|r| r.ahead.useful as f64),
            over_runs(&|r| r.ahead.late as f64),
            over_runs(&|r| r.ahead.wasted as f64),
        ],
        replica_share: share(over_runs(&|r| r.from_replicas as f64), reads),
        verdict: Verdict::of_all(runs.iter().filter_map(|r| verdict(work, setup, r)).collect::<Vec<_>>().iter()),
        passes: (0..count).map(|p| by_run.iter().map(|r| r[p]).sum::<f64>() / by_run.len() as f64).collect(),
    })
}

/// Where the time of decoding goes in one simulated run, by the arithmetic that a measured run is judged by.
fn verdict(work: &Workload, setup: &Setup<'_>, run: &Run) -> Option<Verdict> {
    let mut sums = WaitSums::default();
    for (demand, seen) in work.barriers.iter().zip(&run.barriers) {
        sums.add(&record(demand, seen), seen.straggler, seen.gap_drive_ns, demand.handover_ns);
    }
    let fixed: Vec<Option<u64>> = setup.devices.iter().map(|d| Some(d.bound.fixed_ns)).collect();
    let spanned = sums.spanned_ns();
    if spanned == 0 {
        return None;
    }
    sums.verdict(spanned.saturating_add(work.edge_ns), &fixed)
}

fn record(demand: &crate::replay::workload::Demand, seen: &Simulated) -> BarrierRecord {
    BarrierRecord {
        barrier: demand.barrier,
        step: demand.step.step,
        phase: demand.step.phase,
        pos: demand.step.pos,
        rows: demand.step.rows,
        layer: demand.layer,
        width: demand.experts.len() as u32,
        hits: seen.hits,
        prefetch_hits: seen.prefetch_hits,
        bytes: seen.bytes,
        open_ns: seen.open_ns,
        first_ns: seen.open_ns,
        last_ns: seen.last_ns,
        close_ns: seen.close_ns,
        stall_ns: seen.stall_ns,
        straggler: seen.straggler,
        gap_drive_ns: seen.gap_drive_ns,
        gap_read_ns: 0,
        bound_layout_ns: seen.bound_layout_ns,
        bound_drives_ns: seen.bound_drives_ns,
        cause: Cause::None,
    }
}

/// The figures of a recorded run.
pub fn measure(work: &Workload, seed: u64) -> Measured {
    let waits = [work.barriers.iter().map(|b| b.wait_ns).collect::<Vec<u64>>()];
    let by_run = [passes(work, |at| work.barriers[at].span_ns)];
    Measured {
        tok_s: tok_s(work, &by_run, seed),
        phases: phase_rows(work, &waits, seed, |_, _| None),
        drive_bytes: work.drives.iter().cloned().zip(work.drive_bytes.iter().copied()).collect(),
    }
}
