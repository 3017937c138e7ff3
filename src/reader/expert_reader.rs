//! The reader itself: one barrier at a time, reads issued as far as slots allow, experts handed over in the order in
//! which they arrived.
//!
//! Everything is allocated when the reader is built; between opening and closing a barrier nothing allocates, logs or
//! formats unless a read failed. Every read in flight owns a slot or a part of one, and a job, whose number is its tag. A
//! read given up keeps both until the engine returns it.

use super::counters::{DriveCounters, Ledger, LiveDrive, ReaderCounters, ReaderHandle};
use super::dispatch::{Dispatcher, DriveLoad};
use super::engines::make_engine;
use super::open::{OpenedDrive, open_drive};
use super::options::{ReaderError, ReaderOptions};
use super::rates::{InFlight, RateEstimator};
use super::tally::{Opened, Tally};
use crate::clock::Clock;
use crate::drive::spec::{DriveSpec, Emulation};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::io::paced::PacedDrive;
use crate::io::{Completion, IoEngine, IoSetupError, ReadRequest, Signal, Slab, Slot};
use crate::knob::{self, Knob};
use crate::layout::plan::{MAX_DRIVES, Plan, Shape};
use crate::source::{ExpertSource, Lease, SourceError, StepInfo};
use crate::store::manifest::Digest;
use crate::sys::limits::page_bytes;
use crate::trace::events::{ReadEvent, ReadResult};
use crate::trace::log::{TraceBuffer, TraceCapacity, TraceDrive};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Parts begin on multiples of this even where drives would allow less.
const LEAST_BLOCK_BYTES: u32 = 4096;

/// Reads experts from the drives of a plan.
pub struct ExpertReader {
    pub(super) lanes: Vec<Lane>,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) rates: Vec<RateEstimator>,
    /// Parts of experts begin on multiples of this.
    pub(super) block_bytes: u32,
    pub(super) plan: Plan,
    pub(super) slab: Slab,
    pub(super) signal: Arc<Signal>,
    pub(super) clock: Clock,
    pub(super) options: ReaderOptions,
    pub(super) dispatcher: Dispatcher,
    pub(super) loads: Vec<DriveLoad>,
    pub(super) handle: ReaderHandle,
    /// Reads in flight, by tag.
    pub(super) jobs: Vec<Option<Job>>,
    pub(super) free_jobs: Vec<u32>,
    /// Jobs that have not been given up.
    pub(super) live_jobs: usize,
    /// Parts that wait for the rest of their expert: `lanes.len()` places for each want.
    pub(super) parked: Vec<Option<Slot>>,
    /// Slots of the reads that are about to be issued.
    pub(super) taken: Vec<Slot>,
    pub(super) wants: Vec<Want>,
    /// The first want that has never been issued.
    pub(super) fresh: usize,
    /// Reads to be repeated on another home.
    pub(super) retry: Vec<Retry>,
    pub(super) ready: VecDeque<Ready>,
    /// Wants handed over.
    pub(super) delivered: usize,
    pub(super) finished: Vec<Completion>,
    pub(super) tally: Tally,
    pub(super) open: Option<Opened>,
    pub(super) barriers: u64,
    /// The open barrier has had an expert from two drives.
    pub(super) split_seen: bool,
    /// By drive: how long its reads may take before one is hedged; `None` = too few to tell.
    pub(super) hedge_after_ns: Vec<Option<u64>>,
    /// By expert: the last of `asks` that named it.
    pub(super) asked_in: Vec<u64>,
    pub(super) asks: u64,
    /// By layer, then expert: delivered from a copy that is not the primary.
    pub(super) seen_non_primary: Vec<Vec<bool>>,
}

/// A drive, its engine, and the reads about to be handed to it.
pub(super) struct Lane {
    pub(super) opened: OpenedDrive,
    pub(super) engine: Box<dyn IoEngine>,
    pub(super) batch: Vec<ReadRequest>,
    /// Payload rounded up to the alignment.
    pub(super) read_bytes: u32,
}

#[derive(Clone, Copy)]
pub(super) struct Want {
    pub(super) expert: ExpertId,
    /// Bit i: home i was silent for the whole read timeout.
    pub(super) silent: u64,
    /// Parts that it is read in, and those that have arrived.
    pub(super) parts: u8,
    pub(super) arrived: u8,
    /// Payload bytes of the parts that have arrived.
    pub(super) bytes: u64,
    /// Bit d: drive d has delivered a part.
    pub(super) drives: u64,
    /// When the latest part that has arrived was there.
    pub(super) completed_ns: u64,
}

impl Want {
    pub(super) fn new(expert: ExpertId) -> Self {
        Self { expert, silent: 0, parts: 1, arrived: 0, bytes: 0, drives: 0, completed_ns: 0 }
    }

    /// Nothing of it has arrived, and it will come in one piece.
    pub(super) fn restart(&mut self) {
        *self = Self { silent: self.silent, ..Self::new(self.expert) };
    }
}

/// Which bytes of an expert a read is for.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) part: u8,
    pub(super) parts: u8,
    pub(super) from: u32,
    /// Payload bytes.
    pub(super) len: u32,
}

pub(super) struct Job {
    pub(super) want: u32,
    pub(super) part: Part,
    /// Bit i: home i of the part has been tried, this one included.
    pub(super) tried: u64,
    /// The read as it will be traced.
    pub(super) event: ReadEvent,
    pub(super) digest: Digest,
    /// Why it was given up, if it was.
    pub(super) gave_up: Option<ReadResult>,
    /// The job that reads the same bytes from another home.
    pub(super) rival: Option<u32>,
    /// It is the second of the two.
    pub(super) hedge: bool,
}

/// A read that must be repeated on a home not yet tried.
pub(super) struct Retry {
    pub(super) want: u32,
    pub(super) part: Part,
    pub(super) tried: u64,
    /// Where its bytes go; `None` = a new slot.
    pub(super) slot: Option<Slot>,
}

pub(super) struct Ready {
    pub(super) want: u32,
    pub(super) slot: Slot,
    pub(super) completed_ns: u64,
}

impl ExpertReader {
    /// Opens every drive of `plan` at `mounts` (in id order; see [`super::mounts_of`]) and starts its engines.
    pub fn open(plan: &Plan, mounts: &[DriveSpec], options: &ReaderOptions, clock: Clock) -> Result<Self, ReaderError> {
        options.check()?;
        let count = plan.drives.len();
        if count == 0 || count > MAX_DRIVES || mounts.len() != count {
            let seen = mounts.len();
            return Err(ReaderError::Plan(format!(
                "the plan has {count} drives (1 to {MAX_DRIVES}), {seen} are mounted"
            )));
        }
        let drives = mounts.iter().enumerate().map(|(id, mount)| open_drive(plan, DriveId(id as u8), mount, options));
        let drives = drives.collect::<Result<Vec<_>, _>>()?;
        let mut paces = Vec::with_capacity(count);
        for mount in mounts {
            let mut emulation = mount.emulate.filter(|_| !knob::skipped(Knob::Pace));
            if knob::forced(Knob::Pace) && emulation.is_none() {
                emulation = Some(LYING_PACE);
            }
            paces.push(emulation.map(|e| PacedDrive::new(&mount.name, e)).transpose()?);
        }
        Self::assemble(plan, drives, paces, options, clock, |files, slab, requests, pace, signal| {
            make_engine(options, clock, files, slab, requests, pace, signal)
        })
    }

    /// As [`ExpertReader::open`], over drives that are open and with engines from `make_engine`, which gets a drive's
    /// files, the slab, the most requests it must hold, its pace, and the signal to raise.
    pub(super) fn assemble(
        plan: &Plan,
        drives: Vec<OpenedDrive>,
        paces: Vec<Option<Arc<PacedDrive>>>,
        options: &ReaderOptions,
        clock: Clock,
        make_engine: impl Fn(
            Vec<std::fs::File>,
            &Slab,
            u32,
            Option<Arc<PacedDrive>>,
            Arc<Signal>,
        ) -> Result<Box<dyn IoEngine>, IoSetupError>,
    ) -> Result<Self, ReaderError> {
        options.check()?;
        check_plan(plan)?;
        let signal = Arc::new(Signal::default());
        let slab = make_slab(plan, &drives, options, &signal)?;
        let slots = slab.slots();
        let widest = plan.layers.values().map(|l| l.0.len()).max().unwrap_or(0);

        // An expert has at most one part on each drive.
        let requests = slots.saturating_mul(drives.len() as u32);
        let mut lanes = Vec::with_capacity(drives.len());
        let (mut counted, mut live, mut traced) = (Vec::new(), Vec::new(), Vec::new());
        for (id, (mut opened, pace)) in drives.into_iter().zip(paces).enumerate() {
            let read_bytes = read_bytes(plan, &opened)?;
            let files = std::mem::take(&mut opened.files);
            let engine = make_engine(files, &slab, requests, pace.clone(), Arc::clone(&signal))?;
            counted.push(DriveCounters::new(&opened.name, engine.capabilities(), opened.alignment)?);
            live.push(LiveDrive { engine: engine.counters(), pace });
            traced.push(TraceDrive {
                id: DriveId(id as u8),
                name: opened.name.clone(),
                path: opened.folder.clone(),
                emulated: opened.emulated,
                device_number: opened.device_number,
            });
            lanes.push(Lane { opened, engine, batch: Vec::with_capacity(requests as usize), read_bytes });
        }
        let ledger = Ledger {
            counters: ReaderCounters::new(counted, options.dispatch, &slab),
            trace: trace_capacity(options).map(TraceBuffer::with_capacity),
        };
        let handle = ReaderHandle {
            ledger: Arc::new(Mutex::new(ledger)),
            live: live.into(),
            drives: traced.into(),
            slab: slab.clone(),
        };
        let known = |lane: &Lane| {
            let known = options.rates.iter().find(|r| r.drive == lane.opened.name);
            RateEstimator::new(known, options.queue_depth)
        };
        let alignment = |lane: &Lane| lane.opened.alignment.map_or(1, |a| a.offset_bytes.max(a.memory_bytes));
        let block_bytes = lanes.iter().map(alignment).fold(LEAST_BLOCK_BYTES, u32::max);
        let layers = plan.layers.keys().map(|l| l.index() + 1).max().unwrap_or(0);
        let mut seen_non_primary = vec![Vec::new(); layers];
        for (layer, homes) in &plan.layers {
            seen_non_primary[layer.index()] = vec![false; homes.0.len()];
        }
        Ok(Self {
            in_flight: Arc::new(InFlight::new(lanes.len())),
            rates: lanes.iter().map(known).collect(),
            block_bytes,
            dispatcher: Dispatcher::new(widest, lanes.len()),
            loads: Vec::with_capacity(lanes.len()),
            parked: (0..widest * lanes.len()).map(|_| None).collect(),
            hedge_after_ns: vec![None; lanes.len()],
            tally: Tally::new(lanes.len()),
            lanes,
            plan: plan.clone(),
            slab,
            signal,
            clock,
            options: options.clone(),
            handle,
            jobs: (0..requests).map(|_| None).collect(),
            free_jobs: (0..requests).rev().collect(),
            live_jobs: 0,
            taken: Vec::with_capacity(slots as usize),
            wants: Vec::with_capacity(widest),
            fresh: 0,
            retry: Vec::with_capacity(requests as usize),
            ready: VecDeque::with_capacity(slots as usize),
            delivered: 0,
            finished: Vec::with_capacity(requests as usize),
            open: None,
            barriers: 0,
            split_seen: false,
            asked_in: vec![0; widest],
            asks: 0,
            seen_non_primary,
        })
    }

    /// Counters and trace, for whoever needs them while the reader is in use.
    pub fn handle(&self) -> ReaderHandle {
        self.handle.clone()
    }
}

impl ExpertSource for ExpertReader {
    fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        if self.open.is_some() {
            return Err(SourceError::Unknown(format!("{layer}: the barrier before it is still open")));
        }
        self.check_asked(layer, experts)?;
        let (barrier, width) = (self.barriers, experts.len() as u32);
        self.barriers += 1;
        self.open = Some(Opened { barrier, step: *step, layer, width, open_ns: self.clock.now_ns() });
        self.wants.extend(experts.iter().map(|&expert| Want::new(expert)));
        let issued = self.collect().and_then(|()| self.issue());
        self.handle.lock().counters.slot_waits += (self.wants.len() - self.fresh) as u64;
        if issued.is_err() {
            self.close_barrier();
        }
        issued
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        let Some(opened) = self.open else {
            return Err(SourceError::Unknown("no barrier is open".into()));
        };
        if self.delivered == self.wants.len() {
            return Ok(None);
        }
        let mut blocked_since = None;
        let arrival = self.wait_for_arrival(&opened, &mut blocked_since);
        if let Some(since) = blocked_since {
            let blocked_ns = self.clock.now_ns().saturating_sub(since);
            self.tally.stall_ns += blocked_ns;
            self.handle.lock().counters.stall_ns += blocked_ns;
        }
        let Ready { want, slot, .. } = arrival?;
        self.delivered += 1;
        let (owner, index) = slot.lend();
        let expert = self.wants[want as usize].expert;
        Ok(Some(Lease::new(expert, owner, index, 0, self.plan.expert_bytes as u32)))
    }

    fn close_barrier(&mut self) {
        let Some(opened) = self.open.take() else { return };
        self.abandon();
        // Everything in flight was given up above, so nothing that comes back now can fail.
        let _ = self.collect();
        let close_ns = self.clock.now_ns();
        let record = self.tally.record(&opened, close_ns);
        {
            let mut ledger = self.handle.lock();
            let Ledger { counters, trace } = &mut *ledger;
            counters.barriers += 1;
            counters.barriers_split += u64::from(self.split_seen);
            for (drive, rate) in counters.drives.iter_mut().zip(&mut self.rates) {
                rate.barrier_closed();
                drive.rate = rate.seen();
            }
            if let Some(drive) = record.straggler {
                counters.drives[drive.index()].landed_last += 1;
            }
            if let Some(trace) = trace {
                trace.push_barrier(record);
            }
        }
        self.learn_latencies();
        self.ready.clear();
        self.parked.iter_mut().take(self.wants.len() * self.lanes.len()).for_each(|p| *p = None);
        self.wants.clear();
        self.retry.clear();
        self.tally.reset();
        (self.fresh, self.delivered, self.split_seen) = (0, 0, false);
    }
}

impl ExpertReader {
    /// Every expert is in the plan, and asked for once.
    fn check_asked(&mut self, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        self.asks += 1;
        for &expert in experts {
            if self.plan.homes(layer, expert).is_none() {
                return Err(SourceError::Unknown(format!("{layer}-{expert} is not in the plan")));
            }
            if self.asked_in[expert.index()] == self.asks {
                return Err(SourceError::Unknown(format!("{layer}-{expert} is asked for twice in one barrier")));
            }
            self.asked_in[expert.index()] = self.asks;
        }
        Ok(())
    }

    /// Waits for the next arrival; notes in `blocked_since` when it first had to.
    fn wait_for_arrival(&mut self, opened: &Opened, blocked_since: &mut Option<u64>) -> Result<Ready, SourceError> {
        let timeout = match knob::skipped(Knob::ReadTimeout) {
            true => Duration::from_secs(3600),
            false => self.options.read_timeout(),
        };
        let mut deadline = None;
        loop {
            let seen = self.signal.epoch();
            self.collect()?;
            self.issue()?;
            if let Some(ready) = self.ready.pop_front() {
                return Ok(ready);
            }
            blocked_since.get_or_insert_with(|| self.clock.now_ns());
            let until = *deadline.get_or_insert_with(|| Instant::now() + timeout);
            let hedge_at = self.hedge(opened).map(|ns| self.clock.instant_at(ns));
            let wake = hedge_at.map_or(until, |at| at.min(until));
            if !self.signal.wait(seen, wake) && Instant::now() >= until {
                self.time_out(opened)?;
                deadline = None;
            }
        }
    }
}

/// Pace of a real drive when a test makes pacing lie.
const LYING_PACE: Emulation =
    Emulation { rate_bytes_per_s: 50_000_000, latency_ns: 500_000, per_read_ns: 0, jitter: 0.0, seed: 0 };

fn trace_capacity(options: &ReaderOptions) -> Option<TraceCapacity> {
    let lie = knob::forced(Knob::Trace).then_some(TraceCapacity { reads: 1 << 16, barriers: 1 << 16 });
    options.trace_capacity().or(lie)
}

/// What this reader cannot do, found before the run.
fn check_plan(plan: &Plan) -> Result<(), ReaderError> {
    if let Shape::Stripe { .. } = plan.shape {
        return Err(ReaderError::Plan("this reader reads whole experts; make the plan with `shape = whole`".into()));
    }
    for (layer, homes) in &plan.layers {
        for (expert, homes) in homes.0.iter().enumerate() {
            let distinct = homes.iter().fold(0u64, |mask, d| mask | 1u64.checked_shl(u32::from(d.0)).unwrap_or(0));
            let known = homes.iter().all(|d| d.index() < plan.drives.len());
            if homes.is_empty() || !known || distinct.count_ones() as usize != homes.len() {
                let reason = format!("{layer}-E{expert} has no home, a home twice, or one beyond the plan's drives");
                return Err(ReaderError::Plan(reason));
            }
        }
    }
    Ok(())
}

/// Bytes of one read: the payload rounded up to the alignment of the drive's files.
fn read_bytes(plan: &Plan, opened: &OpenedDrive) -> Result<u32, ReaderError> {
    let align = opened.alignment.map_or(1, |a| u64::from(a.offset_bytes));
    let bytes = plan.expert_bytes.checked_next_multiple_of(align).and_then(|b| u32::try_from(b).ok());
    bytes.filter(|&b| b > 0).ok_or_else(|| {
        ReaderError::Plan(format!("experts of {} bytes are not within 1 byte to 4 GiB", plan.expert_bytes))
    })
}

/// The slab: as many slots as the budget holds, at least one for each drive.
fn make_slab(
    plan: &Plan,
    drives: &[OpenedDrive],
    options: &ReaderOptions,
    signal: &Arc<Signal>,
) -> Result<Slab, ReaderError> {
    let mut largest = 0;
    for drive in drives {
        let memory_align = drive.alignment.map_or(1, |a| u64::from(a.memory_bytes));
        if memory_align > page_bytes() {
            let (name, page) = (&drive.name, page_bytes());
            return Err(ReaderError::Option(format!(
                "drive `{name}` wants buffers aligned to {memory_align} bytes, slots are aligned to {page}"
            )));
        }
        largest = largest.max(u64::from(read_bytes(plan, drive)?));
    }
    let slot_bytes = Slab::slot_size(largest).unwrap_or(u64::MAX);
    // More slots than experts of the widest layer, twice over, would never be used (given-up reads keep theirs).
    let widest = plan.layers.values().map(|l| l.0.len() as u64).max().unwrap_or(1).max(1);
    let buffer_bytes = match knob::skipped(Knob::BufferBytes) {
        true => options.buffer_bytes.saturating_mul(2),
        false => options.buffer_bytes,
    };
    let slots = (buffer_bytes / slot_bytes).min(widest.saturating_mul(2).max(drives.len() as u64));
    if slots < drives.len() as u64 {
        let needed = slot_bytes.saturating_mul(drives.len() as u64);
        return Err(ReaderError::Option(format!(
            "--buffer-bytes {} holds {slots} experts of {slot_bytes} bytes; it needs one for each of {} drives: at least \
             {needed}",
            options.buffer_bytes,
            drives.len()
        )));
    }
    let slots = u32::try_from(slots).unwrap_or(u32::MAX);
    Ok(Slab::new(slots, slot_bytes, Arc::clone(signal))?)
}
