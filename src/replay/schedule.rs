//! What a trace asked for, barrier by barrier, and when: the demanded experts and the time between barriers. What the
//! trace does not say is taken as stated in [`Schedule::assumptions`], never guessed in silence.

use super::ReplayError;
use super::import::UNKNOWN_ID;
use super::join::Joiner;
use crate::ids::{ExpertId, LayerId};
use crate::layout::plan::Plan;
use crate::source::{Phase, StepInfo};
use crate::trace::events::{BarrierRecord, Purpose, ReadEvent, ReadResult};
use crate::trace::log::{TraceError, TraceHeader};
use crate::trace::parquet::schema;
use crate::trace::stream::{self, Skipped};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// Which rows a router picked which experts for; beside the trace where the run wrote it.
pub const ROUTES_FILE: &str = "routes.csv";

/// One barrier to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Its number in the recorded trace.
    pub barrier: u64,
    /// The pass.
    pub step: StepInfo,
    /// The layer.
    pub layer: LayerId,
    /// Where its experts stand in [`Schedule::experts`].
    pub experts: Range<usize>,
    /// From open to the last arrival, as recorded.
    pub wait_ns: u64,
    /// From its last arrival to the opening of the next one, as recorded; 0 for the last.
    pub gap_ns: u64,
    /// Payload bytes that the recorded run read for it.
    pub bytes: u64,
}

/// The barriers of a trace.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// In the order in which they opened.
    pub barriers: Vec<Demand>,
    /// Experts of all barriers, ascending within each.
    pub experts: Vec<ExpertId>,
    /// Payload bytes that the recorded run read for them, as far as its records say.
    pub recorded_bytes: u64,
    /// What the trace does not say, and what was taken instead.
    pub assumptions: Vec<String>,
    /// Rows with faults that were left out.
    pub skipped: Skipped,
}

/// What had to be assumed, counted.
#[derive(Default)]
pub(super) struct Counts {
    hit_experts: u64,
    hit_barriers: u64,
    no_routes: u64,
    prefetched: u64,
    failed: u64,
    pub(super) overlaps: u64,
}

impl Schedule {
    /// Reads the trace in `folder`.
    pub fn load(folder: &Path, header: &TraceHeader, lenient: bool) -> Result<Self, ReplayError> {
        let drives = header.drives.len();
        let mut out = Self::default();
        let routes = Routes::open(folder, lenient, &mut out.skipped)?;
        let (reads, barriers) = (stream::reads(folder, drives, lenient)?, stream::barriers(folder, drives, lenient)?);
        let mut joiner = Joiner::new(reads, barriers, lenient);
        let (mut counts, mut reads, mut set) = (Counts::default(), Vec::new(), Vec::new());
        let mut last_end_ns = 0;
        while let Some(record) = joiner.next_barrier(&mut reads, &mut |_| {})? {
            demanded(folder, &record, &reads, routes.as_ref(), &mut set, &mut counts)?;
            if let Some(before) = out.barriers.last_mut() {
                counts.overlaps += u64::from(record.open_ns < last_end_ns);
                before.gap_ns = record.open_ns.saturating_sub(last_end_ns);
            }
            let wait_ns = record.last_ns.saturating_sub(record.open_ns);
            last_end_ns = record.open_ns + wait_ns;
            let from = out.experts.len();
            out.experts.extend(set.iter().map(|e| ExpertId(*e)));
            out.recorded_bytes = out.recorded_bytes.saturating_add(record.bytes);
            let step = StepInfo { step: record.step, phase: record.phase, pos: record.pos, rows: record.rows };
            let (barrier, layer, experts) = (record.barrier, record.layer, from..out.experts.len());
            let bytes = record.bytes;
            out.barriers.push(Demand { barrier, step, layer, experts, wait_ns, gap_ns: 0, bytes });
        }
        out.skipped.merge(&joiner.skipped());
        if out.experts.is_empty() {
            let text = "holds no barrier with experts that are known; there is nothing to read again";
            return Err(ReplayError::Input(format!("{}: {text}", folder.display())));
        }
        out.assumptions = counts.said(header, routes.is_some());
        if out.skipped.rows > 0 {
            out.assumptions.push(format!("{} rows with faults were left out", out.skipped.rows));
        }
        Ok(out)
    }

    /// Only the barriers of passes that extend the text.
    pub fn extending(self) -> Self {
        let mut out = Self { assumptions: self.assumptions, skipped: self.skipped, ..Self::default() };
        for demand in self.barriers.into_iter().filter(|d| d.step.phase != Phase::Prefill) {
            let from = out.experts.len();
            out.experts.extend_from_slice(&self.experts[demand.experts]);
            out.recorded_bytes = out.recorded_bytes.saturating_add(demand.bytes);
            out.barriers.push(Demand { experts: from..out.experts.len(), ..demand });
        }
        out
    }

    /// An error that names the first barrier whose expert `plan` does not have.
    pub fn check(&self, plan: &Plan) -> Result<(), ReplayError> {
        for demand in &self.barriers {
            for &expert in &self.experts[demand.experts.clone()] {
                if plan.homes(demand.layer, expert).is_none() {
                    return Err(ReplayError::Input(format!(
                        "barrier {} demands expert {} of layer {}, which the plan does not have; give the plan of a \
                         model with the same layers and experts",
                        demand.barrier, expert.0, demand.layer.0
                    )));
                }
            }
        }
        Ok(())
    }
}

/// Puts the experts that `record` demanded into `set`, ascending.
pub(super) fn demanded(
    folder: &Path,
    record: &BarrierRecord,
    reads: &[ReadEvent],
    routes: Option<&Routes>,
    set: &mut Vec<u16>,
    counts: &mut Counts,
) -> Result<(), ReplayError> {
    let fail = |text: String| ReplayError::Input(format!("{}: barrier {}: {text}", folder.display(), record.barrier));
    if record.layer.0 == UNKNOWN_ID || reads.iter().any(|r| r.expert.0 == UNKNOWN_ID) {
        return Err(fail(
            "the log that this trace was imported from knows no layers and experts, so they cannot be read again"
                .into(),
        ));
    }
    if let Some(other) = reads.iter().find(|r| r.layer != record.layer) {
        let (layer, own) = (other.layer.0, record.layer.0);
        return Err(fail(format!("is of layer {own}, and a read for it is of layer {layer}")));
    }
    set.clear();
    set.extend(reads.iter().map(|r| r.expert.0));
    set.sort_unstable();
    set.dedup();
    let read = set.len();
    if let Some(routed) = routes.and_then(|r| r.of(record)) {
        if let Some(odd) = set.iter().find(|e| routed.binary_search(e).is_err()) {
            return Err(fail(format!("expert {odd} was read for it, but {ROUTES_FILE} has nobody asking for it")));
        }
        set.clear();
        set.extend_from_slice(routed);
    } else {
        counts.no_routes += 1;
    }
    let hits = (record.width as usize).max(set.len()) - read;
    counts.hit_experts += hits as u64;
    counts.hit_barriers += u64::from(hits > 0);
    counts.prefetched += reads.iter().filter(|r| r.purpose == Purpose::Prefetch).count() as u64;
    counts.failed += reads.iter().filter(|r| r.result != ReadResult::Ok).count() as u64;
    Ok(())
}

impl Counts {
    pub(super) fn said(&self, header: &TraceHeader, routed: bool) -> Vec<String> {
        let mut out = Vec::new();
        if let Some(imported) = &header.imported {
            out.push(format!("the recorded trace was imported from {}, with assumptions of its own", imported.format));
        }
        out.push(match (routed, self.no_routes) {
            (true, 0) => format!("a barrier demands the experts that {ROUTES_FILE} names for its pass and layer"),
            (true, n) => {
                format!("{n} barriers are not in {ROUTES_FILE}: they demand the experts that were read for them")
            }
            (false, _) => format!("no {ROUTES_FILE}: a barrier demands the experts that were read for it"),
        });
        let mut counted = |count: u64, text: String| {
            if count > 0 {
                out.push(format!("{count} {text}"));
            }
        };
        let of = format!("demanded experts of {} barriers were in memory when they were recorded", self.hit_barriers);
        let then = if routed { "here they are read" } else { "the trace does not say which: they are left out" };
        counted(self.hit_experts, format!("{of}; {then}"));
        counted(self.prefetched, "reads were prefetches: here each is asked for when its barrier opens".into());
        counted(self.failed, "reads had failed or were given up: their experts are read all the same".into());
        counted(self.overlaps, "barriers opened before the last arrival of the one before: no gap there".into());
        out
    }
}

/// The experts of each (pass, layer), ascending.
pub(super) struct Routes(HashMap<(u64, u16), Vec<u16>>);

impl Routes {
    /// Those of `folder`; `None` when it has no such file. Rejected rows of a draft count: they were demanded too.
    pub(super) fn open(folder: &Path, lenient: bool, skipped: &mut Skipped) -> Result<Option<Self>, TraceError> {
        if !stream::has(folder, &schema::routes()) {
            return Ok(None);
        }
        let mut rows = stream::routes(folder, lenient)?;
        let mut sets: HashMap<(u64, u16), Vec<u16>> = HashMap::new();
        while let Some(route) = rows.next_value()? {
            sets.entry((route.step, route.layer.0)).or_default().push(route.expert.0);
        }
        skipped.merge(rows.skipped());
        for set in sets.values_mut() {
            set.sort_unstable();
            set.dedup();
        }
        Ok(Some(Self(sets)))
    }

    fn of(&self, record: &BarrierRecord) -> Option<&[u16]> {
        self.0.get(&(record.step, record.layer.0)).map(Vec::as_slice)
    }
}
