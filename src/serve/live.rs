//! What drives and barriers do while a server runs, looked at every 100 ms: histograms for metrics, the last minute for a page, and the
//! last seconds from each read.
//! Numbers are those of the reader that does the work; nothing is estimated.

use super::fine::{Fine, FineShown};
use super::histogram::{Buckets, WAIT_BUCKETS_NS};
use crate::clock::Clock;
use crate::reader::{DriveNow, ReaderCounters, ReaderHandle};
use crate::trace::events::{BarrierRecord, ReadEvent};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time between two looks.
pub const TICK: Duration = Duration::from_millis(100);
/// Barriers that the reader keeps between two looks; more in 100 ms would be lost, and counted.
pub const BARRIERS_BETWEEN: usize = 8192;
/// The same for reads.
pub const READS_BETWEEN: usize = 8192;
/// Windows and barriers that are kept to be shown.
const WINDOWS: usize = 600;
const BARRIERS: usize = 200;

/// A drive's name and whether its pace is emulated.
#[derive(Clone, Debug, Serialize)]
pub struct DriveName {
    /// Its name.
    pub name: String,
    /// Its pace is emulated.
    pub emulated: bool,
}

/// What happened between two looks.
#[derive(Clone, Debug, Serialize)]
pub struct Window {
    /// Counts looks from 1.
    pub seq: u64,
    /// When it ended, in milliseconds of the run's clock.
    pub t_ms: u64,
    /// How long it was, in milliseconds.
    pub span_ms: f64,
    /// By drive, bytes read.
    pub bytes: Vec<u64>,
    /// By drive, reads that ended.
    pub reads: Vec<u64>,
    /// By drive, barriers whose last expert came from it.
    pub last: Vec<u64>,
    /// Barriers closed.
    pub barriers: u64,
    /// Time in which compute waited in them, in milliseconds.
    pub stall_ms: f64,
    /// Tokens generated.
    pub tokens: u64,
}

/// One barrier, to be shown.
#[derive(Clone, Debug, Serialize)]
pub struct BarrierSeen {
    /// Counts barriers from 0.
    pub barrier: u64,
    /// The layer.
    pub layer: u16,
    /// Rows of the pass.
    pub rows: u32,
    /// Distinct experts, and those that were in memory.
    pub width: u32,
    /// See `width`.
    pub hits: u32,
    /// Bytes read.
    pub bytes: u64,
    /// From open to last arrival, in milliseconds.
    pub open_ms: f64,
    /// Time in which compute waited, in milliseconds.
    pub stall_ms: f64,
    /// Number of the drive whose read was last.
    pub straggler: Option<u8>,
}

/// Barriers since the start.
#[derive(Clone, Debug)]
pub struct BarrierFigures {
    /// Waits of compute.
    pub stall: Buckets,
    /// From open to last arrival.
    pub open: Buckets,
    /// Barriers that were not kept: the histograms lack them.
    pub lost: u64,
}

struct State {
    figures: BarrierFigures,
    windows: VecDeque<Window>,
    barriers: VecDeque<BarrierSeen>,
    /// Drives at the last look, and now.
    before: Vec<DriveNow>,
    now: Vec<DriveNow>,
    tokens_before: u64,
    at_ns: u64,
    seq: u64,
    /// Since the last window.
    since: Since,
    fine: Fine,
    /// Reads on their way from the reader, and those that did not fit so far.
    reads: Vec<ReadEvent>,
    lost_reads: u64,
}

#[derive(Clone, Debug, Default)]
struct Since {
    barriers: u64,
    stall_ns: u64,
    last: Vec<u64>,
}

/// The looker.
pub struct Live {
    handle: Option<ReaderHandle>,
    drives: Vec<DriveName>,
    clock: Clock,
    state: Mutex<State>,
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

impl Live {
    /// Looks at what `handle` says, whose times are of `clock`; `None` = nothing streams.
    pub fn new(handle: Option<ReaderHandle>, clock: Clock) -> Self {
        let named = |d: &crate::trace::log::TraceDrive| DriveName { name: d.name.clone(), emulated: d.emulated };
        let drives: Vec<DriveName> = handle.iter().flat_map(|h| h.drives().iter().map(named)).collect();
        let buckets = || Buckets::new(&WAIT_BUCKETS_NS);
        let state = State {
            figures: BarrierFigures { stall: buckets(), open: buckets(), lost: 0 },
            windows: VecDeque::with_capacity(WINDOWS),
            barriers: VecDeque::with_capacity(BARRIERS),
            before: vec![DriveNow::default(); drives.len()],
            now: Vec::new(),
            tokens_before: 0,
            at_ns: 0,
            seq: 0,
            since: Since { last: vec![0; drives.len()], ..Since::default() },
            fine: Fine::new(drives.len()),
            reads: Vec::with_capacity(if handle.is_some() { READS_BETWEEN } else { 0 }),
            lost_reads: 0,
        };
        Self { handle, drives, clock, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The drives, by number.
    pub fn drives(&self) -> &[DriveName] {
        &self.drives
    }

    /// The reader's counters now; `None` when nothing streams.
    pub fn counters(&self) -> Option<ReaderCounters> {
        self.handle.as_ref().map(ReaderHandle::counters)
    }

    /// Takes in the barriers that have closed.
    fn take_barriers(&self, state: &mut State) {
        let Some(handle) = &self.handle else { return };
        let State { figures, barriers, since, .. } = state;
        figures.lost = handle.drain_barriers(&mut |b: &BarrierRecord| {
            let open_ns = b.last_ns.saturating_sub(b.open_ns);
            figures.stall.add(b.stall_ns);
            figures.open.add(open_ns);
            since.barriers += 1;
            since.stall_ns += b.stall_ns;
            if let Some(last) = b.straggler.and_then(|d| since.last.get_mut(d.index())) {
                *last += 1;
            }
            if barriers.len() == BARRIERS {
                barriers.pop_front();
            }
            barriers.push_back(BarrierSeen {
                barrier: b.barrier,
                layer: b.layer.0,
                rows: b.rows,
                width: b.width,
                hits: b.hits,
                bytes: b.bytes,
                open_ms: ms(open_ns),
                stall_ms: ms(b.stall_ns),
                straggler: b.straggler.map(|d| d.0),
            });
        });
    }

    /// Takes in the reads that have ended. The reader is held up for two vectors to change places, whatever is in them.
    fn take_reads(&self, state: &mut State, now_ns: u64) {
        let State { fine, reads, lost_reads, .. } = state;
        if let Some(handle) = &self.handle {
            *lost_reads = handle.take_reads(reads);
        }
        reads.iter().for_each(|read| fine.add(read));
        reads.clear();
        fine.advance(now_ns);
    }

    /// Ends a window; `tokens` have been generated so far.
    pub fn tick(&self, tokens: u64) {
        let mut state = self.lock();
        let now_ns = self.clock.now_ns();
        self.take_barriers(&mut state);
        self.take_reads(&mut state, now_ns);
        let State { windows, before, now, tokens_before, at_ns, seq, since, .. } = &mut *state;
        if let Some(handle) = &self.handle {
            handle.drives_now(now);
        }
        let by_drive = |value: fn(&DriveNow) -> u64| -> Vec<u64> {
            now.iter().zip(before.iter()).map(|(n, b)| value(n).saturating_sub(value(b))).collect()
        };
        *seq += 1;
        let fresh = Since { last: vec![0; since.last.len()], ..Since::default() };
        let Since { barriers, stall_ns, last } = std::mem::replace(since, fresh);
        let window = Window {
            seq: *seq,
            t_ms: now_ns / 1_000_000,
            span_ms: ms(now_ns - *at_ns),
            bytes: by_drive(|d| d.bytes),
            reads: by_drive(|d| d.reads),
            last,
            barriers,
            stall_ms: ms(stall_ns),
            tokens: tokens.saturating_sub(*tokens_before),
        };
        if windows.len() == WINDOWS {
            windows.pop_front();
        }
        windows.push_back(window);
        before.clone_from(now);
        (*tokens_before, *at_ns) = (tokens, now_ns);
    }

    /// Barriers since the start.
    pub fn barriers(&self) -> BarrierFigures {
        let mut state = self.lock();
        self.take_barriers(&mut state);
        state.figures.clone()
    }

    /// Drives that demand leaves alone now.
    pub fn degraded(&self) -> Vec<&str> {
        let mut now = Vec::new();
        if let Some(handle) = &self.handle {
            handle.drives_now(&mut now);
        }
        self.drives.iter().zip(&now).filter(|(_, d)| d.degraded).map(|(d, _)| d.name.as_str()).collect()
    }

    /// Windows of 10 ms.
    pub fn fine(&self) -> FineShown {
        let state = self.lock();
        state.fine.shown(state.lost_reads)
    }

    /// Windows after number `since`, and the latest barriers.
    pub fn shown(&self, since: u64) -> (Vec<Window>, Vec<BarrierSeen>) {
        let state = self.lock();
        let windows = state.windows.iter().filter(|w| w.seq > since).cloned().collect();
        (windows, state.barriers.iter().cloned().collect())
    }
}
