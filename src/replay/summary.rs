//! The aggregate of a whole trace, added up barrier by barrier: tables by drive, layer, width, phase and cause, the
//! largest gaps, and the verdict. Memory grows with drives and layers, never with the length of the trace.

use super::ReplayError;
use super::attribution::{Attribution, Attributor};
use super::groups::{BarrierRow, BarrierSums, DriveRow, ReadSums};
use super::join::{BarrierSource, Joiner};
use super::rates::{BarrierBounds, Bounds, HomesFrom};
use super::verdict::{FixedCost, Verdict, WaitSums};
use crate::trace::events::{BarrierRecord, Cause, Purpose, ReadEvent, ReadResult};
use crate::trace::log::TraceDrive;
use crate::trace::stream::{CAUSES, PHASES, PURPOSES, Skipped, word_of};
use serde::Serialize;
use std::collections::BTreeMap;

/// Upper ends of the width classes (distinct experts of a barrier), and their names.
pub const WIDTHS: [(u32, &str); 4] = [(16, "<=16"), (48, "17-48"), (96, "49-96"), (u32::MAX, ">96")];

/// One barrier as the report shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GapRow {
    /// The barrier.
    pub barrier: u64,
    /// Forward pass.
    pub step: u64,
    /// Prefill, decode or verify.
    pub phase: &'static str,
    /// The layer.
    pub layer: u16,
    /// Distinct experts.
    pub width: u32,
    /// Drive that landed last; `None` = nothing was waited for.
    pub last: Option<String>,
    /// What the last read was for.
    pub purpose: Option<&'static str>,
    /// Why it was last.
    pub cause: &'static str,
    /// From open to the last arrival.
    pub wait_ns: u64,
    /// Part of the wait before the deciding read was queued.
    pub before_ns: u64,
    /// Part between its queueing and its hand-over.
    pub queue_ns: u64,
    /// Part at the drive.
    pub service_ns: u64,
    /// Behind the next-to-last drive; `None` = one drive alone.
    pub gap_drive_ns: Option<u64>,
    /// Behind the next-to-last read; `None` = one read.
    pub gap_read_ns: Option<u64>,
    /// Bound with the homes given.
    pub bound_layout_ns: Option<u64>,
    /// Bound as if everything were everywhere.
    pub bound_drives_ns: Option<u64>,
}

/// Barriers of one cause.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CauseRow {
    /// The cause.
    pub cause: &'static str,
    /// Its barriers.
    pub barriers: u64,
    /// Their waits together.
    pub wait_ns: u64,
    /// Their gaps behind the next-to-last drive together.
    pub gap_drive_ns: u64,
}

/// What a drive's behaviour in the trace looks like: fixed + bytes / rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FittedRow {
    /// The drive.
    pub drive: String,
    /// Fixed cost before the first byte.
    pub fixed_ns: u64,
    /// Bytes per second under the load of the trace.
    pub bytes_per_s: f64,
}

/// A whole trace in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// By drive and purpose.
    pub drives: Vec<DriveRow>,
    /// All barriers.
    pub all: BarrierRow,
    /// By layer.
    pub layers: Vec<BarrierRow>,
    /// By width.
    pub widths: Vec<BarrierRow>,
    /// By phase.
    pub phases: Vec<BarrierRow>,
    /// By cause.
    pub causes: Vec<CauseRow>,
    /// The largest gaps behind the next-to-last drive, largest first.
    pub top_gaps: Vec<GapRow>,
    /// Where the time of decoding went.
    pub verdict: Option<Verdict>,
    /// Fixed costs and rates fitted to the trace, where it shows them.
    pub fitted: Vec<FittedRow>,
    /// Whose homes the layout bounds use, if there are bounds.
    pub homes_from: Option<HomesFrom>,
    /// From the first queueing to the last completion of any read.
    pub span_ns: u64,
    /// Barriers whose record names another straggler, or another cause, than their reads show.
    pub disagreements: u64,
    /// Rows left out by `--lenient`.
    pub skipped_rows: u64,
    /// The first few faults of those.
    pub skipped_first: Vec<String>,
}

/// Adds a trace up.
pub struct Summarizer<'a> {
    drives: &'a [TraceDrive],
    bounds: Option<Bounds>,
    /// Fixed costs that are known without bounds, by drive.
    fixed_ns: Vec<Option<u64>>,
    top: usize,
    attributor: Attributor,
    reads: BTreeMap<(usize, usize), ReadSums>,
    all: BarrierSums,
    layers: BTreeMap<u16, BarrierSums>,
    widths: [BarrierSums; 4],
    phases: [BarrierSums; 3],
    causes: [CauseRow; 8],
    top_gaps: Vec<GapRow>,
    waits: WaitSums,
    fits: Vec<FixedCost>,
    span: Option<(u64, u64)>,
    disagreements: u64,
}

impl<'a> Summarizer<'a> {
    /// For a trace over `drives`, with bounds if there are rates, keeping the `top` largest gaps.
    pub fn new(drives: &'a [TraceDrive], bounds: Option<Bounds>, top: usize) -> Self {
        Self {
            drives,
            bounds,
            fixed_ns: Vec::new(),
            top,
            attributor: Attributor::new(drives.len()),
            reads: BTreeMap::new(),
            all: BarrierSums::default(),
            layers: BTreeMap::new(),
            widths: Default::default(),
            phases: Default::default(),
            causes: CAUSES.map(|(cause, _)| CauseRow { cause, ..CauseRow::default() }),
            top_gaps: Vec::with_capacity(top.saturating_add(1).min(10_000)),
            waits: WaitSums::default(),
            fits: vec![FixedCost::default(); drives.len()],
            span: None,
            disagreements: 0,
        }
    }

    /// Takes the fixed costs of drives, by id, where the run that wrote the trace knew them: they go before fitted ones.
    #[must_use]
    pub fn with_fixed(self, fixed_ns: Vec<Option<u64>>) -> Self {
        Self { fixed_ns, ..self }
    }

    /// Counts a read, whether a barrier needed it or not.
    pub fn read(&mut self, read: &ReadEvent) {
        let purpose = PURPOSES.iter().position(|(_, p)| *p == read.purpose).unwrap_or(0);
        self.reads.entry((read.drive.index(), purpose)).or_default().read(read);
        if read.result == ReadResult::Ok {
            let (from, to) = self.span.unwrap_or((u64::MAX, 0));
            self.span = Some((from.min(read.queued_ns), to.max(read.completed_ns)));
        }
    }

    /// Adds a barrier and its reads; gives the row that the report shows of it.
    pub fn barrier(&mut self, record: &BarrierRecord, reads: &[ReadEvent]) -> Result<GapRow, ReplayError> {
        for read in reads {
            self.read(read);
        }
        let seen = self.attributor.attribute(record, reads);
        let computed = match &mut self.bounds {
            Some(bounds) => Some(bounds.of(record, reads)?),
            None => {
                record.bound_drives_ns.map(|drives_ns| BarrierBounds { layout_ns: record.bound_layout_ns, drives_ns })
            }
        };
        self.add(record, &seen, computed);
        let row = self.row(record, &seen, computed);
        if seen.gap_drive_ns.is_some_and(|gap| gap > 0) {
            let key = |r: &GapRow| std::cmp::Reverse(r.gap_drive_ns);
            let at = self.top_gaps.partition_point(|r| key(r) <= key(&row));
            if at < self.top {
                self.top_gaps.insert(at, row.clone());
                self.top_gaps.truncate(self.top);
            }
        }
        Ok(row)
    }

    fn add(&mut self, record: &BarrierRecord, seen: &Attribution, bounds: Option<BarrierBounds>) {
        self.all.add(record, seen, bounds);
        self.layers.entry(record.layer.0).or_default().add(record, seen, bounds);
        let width = WIDTHS.iter().position(|(top, _)| record.width <= *top).unwrap_or(WIDTHS.len() - 1);
        self.widths[width].add(record, seen, bounds);
        let phase = PHASES.iter().position(|(_, p)| *p == record.phase).unwrap_or(0);
        self.phases[phase].add(record, seen, bounds);
        if let Some(cause) = self.causes.iter_mut().find(|c| c.cause == word_of(&CAUSES, seen.cause)) {
            cause.barriers += 1;
            cause.wait_ns = cause.wait_ns.saturating_add(seen.wait.total_ns);
            cause.gap_drive_ns = cause.gap_drive_ns.saturating_add(seen.gap_drive_ns.unwrap_or(0));
        }
        let shares = self.attributor.shares();
        for (fit, share) in self.fits.iter_mut().zip(shares).filter(|(_, s)| s.reads > 0 && s.all_issued_inside) {
            fit.add(share.bytes, share.last_ns.saturating_sub(share.first_submit_ns));
        }
        let handover_ns =
            seen.last.map_or(0, |l| shares[l.drive.index()].first_submit_ns.saturating_sub(record.open_ns));
        self.waits.add(record, seen.last.map(|l| l.drive), seen.gap_drive_ns.unwrap_or(0), handover_ns);
        self.disagreements += u64::from(record.cause != seen.cause || record.straggler != seen.last.map(|l| l.drive));
        let Some(last) = seen.last else { return };
        if seen.cause == Cause::Tie {
            let wait_ns = seen.wait.total_ns;
            let near = wait_ns / crate::trace::cause::TIE_DIVISOR;
            let end_ns = record.open_ns + wait_ns;
            for (drive, _) in shares.iter().enumerate().filter(|(_, s)| s.reads > 0 && end_ns - s.last_ns <= near) {
                // a tie is the drive's, not a purpose's; it stands in the row of demand reads
                self.reads.entry((drive, 0)).or_default().tied();
            }
        } else {
            let purpose = PURPOSES.iter().position(|(_, p)| *p == last.purpose).unwrap_or(0);
            self.reads.entry((last.drive.index(), purpose)).or_default().last(seen.gap_drive_ns);
        }
    }

    fn row(&self, record: &BarrierRecord, seen: &Attribution, bounds: Option<BarrierBounds>) -> GapRow {
        GapRow {
            barrier: record.barrier,
            step: record.step,
            phase: word_of(&PHASES, record.phase),
            layer: record.layer.0,
            width: record.width,
            last: seen.last.and_then(|l| self.drives.get(l.drive.index())).map(|d| d.name.clone()),
            purpose: seen.last.map(|l| word_of(&PURPOSES, l.purpose)),
            cause: word_of(&CAUSES, seen.cause),
            wait_ns: seen.wait.total_ns,
            before_ns: seen.wait.before_ns,
            queue_ns: seen.wait.queue_ns,
            service_ns: seen.wait.service_ns,
            gap_drive_ns: seen.gap_drive_ns,
            gap_read_ns: seen.gap_read_ns,
            bound_layout_ns: bounds.and_then(|b| b.layout_ns),
            bound_drives_ns: bounds.map(|b| b.drives_ns),
        }
    }

    /// The tables. Decoding took `wall_ns`, or what the trace spans.
    pub fn finish(self, wall_ns: Option<u64>, skipped: &Skipped) -> Summary {
        let drives = self.drives;
        let name = |d: usize| drives.get(d).map_or_else(|| format!("drive {d}"), |d| d.name.clone());
        let waited = self.all.waited();
        let fitted = self.fits.iter().enumerate().filter_map(|(d, fit)| {
            fit.fitted().map(|(fixed_ns, bytes_per_s)| FittedRow { drive: name(d), fixed_ns, bytes_per_s })
        });
        let fixed_ns = match &self.bounds {
            Some(bounds) => bounds.fixed_ns(),
            None => {
                let known = |d: usize| self.fixed_ns.get(d).copied().flatten();
                let fits = self.fits.iter().enumerate();
                fits.map(|(d, fit)| known(d).or_else(|| fit.fitted().map(|f| f.0))).collect()
            }
        };
        let wall_ns = wall_ns.unwrap_or_else(|| self.waits.spanned_ns());
        let rows = |sums: &[BarrierSums], names: &[&str]| {
            let rows = sums.iter().zip(names).map(|(s, n)| s.row(*n, drives.len()));
            rows.filter(|r| r.barriers > 0).collect::<Vec<_>>()
        };
        Summary {
            drives: self
                .reads
                .iter()
                .map(|(&(d, p), sums)| {
                    let emulated = drives.get(d).is_some_and(|d| d.emulated);
                    let purpose = PURPOSES.get(p).map_or(Purpose::Demand, |p| p.1);
                    sums.row(&name(d), emulated, purpose, waited)
                })
                .collect(),
            all: self.all.row("all", drives.len()),
            layers: self.layers.iter().map(|(layer, s)| s.row(format!("L{layer}"), drives.len())).collect(),
            widths: rows(&self.widths, &WIDTHS.map(|w| w.1)),
            phases: rows(&self.phases, &PHASES.map(|p| p.0)),
            causes: self.causes.into_iter().filter(|c| c.barriers > 0).collect(),
            top_gaps: self.top_gaps,
            verdict: self.waits.verdict(wall_ns, &fixed_ns),
            fitted: fitted.collect(),
            homes_from: self.bounds.as_ref().map(Bounds::homes_from),
            span_ns: self.span.map_or(0, |(from, to)| to - from),
            disagreements: self.disagreements,
            skipped_rows: skipped.rows,
            skipped_first: skipped.first.clone(),
        }
    }
}

/// Adds up everything that `joiner` gives; `each` sees the row of every barrier.
pub fn summarize<B: BarrierSource>(
    mut joiner: Joiner<B>,
    mut summarizer: Summarizer<'_>,
    wall_ns: Option<u64>,
    each: &mut dyn FnMut(&GapRow) -> Result<(), ReplayError>,
) -> Result<Summary, ReplayError> {
    let mut reads = Vec::new();
    while let Some(record) = joiner.next_barrier(&mut reads, &mut |read| summarizer.read(read))? {
        each(&summarizer.barrier(&record, &reads)?)?;
    }
    Ok(summarizer.finish(wall_ns, &joiner.skipped()))
}
