//! What the reader did, counted where it happened: the evidence of measuring.md section 3. A [`ReaderHandle`] reads
//! the counters and takes the trace while something else owns the reader.

use super::dispatch::DispatchPolicy;
use super::health::{DriveEvent, MAX_EVENTS};
use super::limit::LimitCounters;
use super::options::ReaderError;
use super::rates::SeenRate;
use crate::io::faults::{FaultSnapshot, FaultyDrive};
use crate::io::paced::{PaceSnapshot, PacedDrive};
use crate::io::{Capabilities, EngineCounters, EngineSnapshot, Slab};
use crate::source::guess::GuessCountsByDepth;
use crate::sys::direct::DioAlignment;
use crate::trace::log::{TraceBuffer, TraceDrive};
use hdrhistogram::Histogram;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Longest latency that the histograms tell apart.
const MAX_LATENCY_NS: u64 = 3_600_000_000_000;

/// Reads and the bytes that they asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadSum {
    /// Reads.
    pub reads: u64,
    /// Bytes asked for.
    pub bytes: u64,
}

impl ReadSum {
    pub(super) fn add(&mut self, bytes: u64) {
        self.reads += 1;
        self.bytes += bytes;
    }
}

/// What became of the prefetch reads of one drive: `issued` is the sum of the others once all have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrivePrefetch {
    /// Handed to whichever engine prefetch has; a read that was withdrawn and handed over again counts twice.
    pub issued: ReadSum,
    /// Of these, taken back before they had been started, because demand came.
    pub withdrawn: ReadSum,
    /// There when they were demanded.
    pub useful: ReadSum,
    /// Demanded while they were on their way.
    pub late: ReadSum,
    /// For nothing: guessed wrong, taken back, or failed.
    pub wasted: ReadSum,
    /// Of these, failed.
    pub failed: u64,
}

/// What prefetch did, all drives together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefetchCounters {
    /// Guesses let through that the decoder made.
    pub told: u64,
    /// Guesses let through that repeat what the layer asked for in the pass before.
    pub same_as_last: u64,
    /// Guesses let through from a learnt table.
    pub markov: u64,
    /// Guesses let through that needed no read: cached, or guessed before.
    pub known: u64,
    /// Guesses not let through: more than `prefetch_experts` for a layer.
    pub over_experts: u64,
    /// Guesses not let through: beyond `prefetch_depth`, or for a layer that had passed.
    pub out_of_reach: u64,
    /// Guesses not let through: as many were alive as there is room for.
    pub no_room: u64,
    /// Guesses not let through by the governor.
    pub guesses_dropped: u64,
    /// Times that the governor let fewer through than before.
    pub governor_cuts: u64,
    /// Times that the governor tried again after letting nothing through.
    pub governor_probes: u64,
    /// Most layers that a guess let through looked ahead.
    pub deepest: u32,
    /// Most guesses let through for one layer.
    pub most_experts: u32,
    /// Guesses that were demanded before their read had been started.
    pub overtaken: u64,
    /// Guesses whose read had to wait because its drives had demand outstanding.
    pub held_back: u64,
    /// Demand reads put on a drive that was busy with prefetch.
    pub demand_behind: u64,
    /// Reads that went into a pool of prefetch's own, and into demand's.
    pub in_own_pool: u64,
    /// See `in_own_pool`.
    pub in_demands_pool: u64,
    /// Reads by the policy that chose the copy, in the order of [`DispatchPolicy::ALL`].
    pub decisions_by_policy: [u64; DispatchPolicy::ALL.len()],
    /// Of these, reads of an expert with two or more homes.
    pub decisions_with_choice: u64,
    /// Of these, reads of another copy than the primary.
    pub decisions_not_primary: u64,
    /// Guesses that were not demanded.
    pub losers: u64,
    /// Guesses taken back by whoever made them.
    pub retracted: u64,
    /// Most slots that prefetch held.
    pub most_slots: u32,
    /// Slots that it may hold.
    pub quota: u32,
    /// How good the reader's own guesses were, by layers ahead.
    pub own_by_depth: GuessCountsByDepth,
}

/// What the cache did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Slots that it may hold.
    pub slots: u32,
    /// Most that it held.
    pub most_slots: u32,
    /// Demanded experts that were there, and that were not.
    pub hits: u64,
    /// See `hits`.
    pub misses: u64,
    /// Experts that moved in.
    pub insertions: u64,
    /// Experts that went for another.
    pub evictions: u64,
    /// Experts that the policy did not let in, although it was full or they were not meant to be.
    pub refused: u64,
    /// Experts that found everything in use.
    pub busy: u64,
    /// Choices of who goes or stays out, by the policy that chose, in the order of [`super::CachePolicy::ALL`].
    pub choices_by_policy: [u64; super::CachePolicy::ALL.len()],
    /// Of these, those that `lru` would have made otherwise.
    pub choices_not_lru: u64,
}

/// What one drive did.
#[derive(Clone, Debug)]
pub struct DriveCounters {
    /// Its name.
    pub name: String,
    /// Reads that delivered an expert, or a part of one.
    pub reads: u64,
    /// Payload bytes of these reads.
    pub payload_bytes: u64,
    /// Bytes that the striped experts which were delivered have here, by the plan.
    pub stripe_bytes: u64,
    /// Bytes asked for by these reads (payload rounded up to the alignment).
    pub read_bytes: u64,
    /// Of these reads, those of a copy that is not the primary.
    pub non_primary_reads: u64,
    /// Barriers whose last expert came from here.
    pub landed_last: u64,
    /// Reads that failed: refused, short or with a wrong digest.
    pub errors: u64,
    /// Of these, with a wrong digest.
    pub digest_errors: u64,
    /// Digests checked.
    pub digests_checked: u64,
    /// Reads given up because nothing arrived for the whole read timeout.
    pub timeouts: u64,
    /// Demanded reads that it did not deliver and that were asked for again, elsewhere where there is a choice.
    pub moved: u64,
    /// Times that demand was told to leave it alone because it is gone, silent or failing.
    pub degraded: u64,
    /// Times that it was because the drive had become too slow to be worth waiting for.
    pub shed: u64,
    /// Times that there was reason to, whether it was done or not.
    pub shed_due: u64,
    /// Times that demand was let back to it.
    pub restored: u64,
    /// Demand leaves it alone now.
    pub left_alone: bool,
    /// Times that it was found to deliver far less than it had.
    pub throttled: u64,
    /// Reads that asked it whether it is back, and those that came as they should.
    pub probes: ReadSum,
    /// See `probes`.
    pub good_probes: ReadSum,
    /// What was handed to it under a limit.
    pub limit: LimitCounters,
    /// Faults that its reads met on purpose; `None` = it is not to meet any.
    pub faults: Option<FaultSnapshot>,
    /// Reads given up when their barrier closed.
    pub cancelled: u64,
    /// completed - submitted, in nanoseconds, of the reads that delivered an expert.
    pub clat_ns: Histogram<u64>,
    /// completed - queued, of the same reads: what hedging compares with.
    pub lat_ns: Histogram<u64>,
    /// What this run's reads taught about its rate.
    pub rate: SeenRate,
    /// The demand engine's own counters.
    pub engine: EngineSnapshot,
    /// What became of its prefetch reads.
    pub prefetch: DrivePrefetch,
    /// The prefetch engine's own counters; `None` = there is none of its own.
    pub prefetch_engine: Option<EngineSnapshot>,
    /// What the engine is.
    pub capabilities: Capabilities,
    /// Alignment of direct reads; `None` = read through the page cache.
    pub direct: Option<DioAlignment>,
    /// How well an emulated pace was kept; `None` = not emulated.
    pub pace: Option<PaceSnapshot>,
}

/// What the reader did, all drives together. `drives` is indexed by drive id.
#[derive(Clone, Debug)]
pub struct ReaderCounters {
    /// By drive.
    pub drives: Vec<DriveCounters>,
    /// Barriers closed.
    pub barriers: u64,
    /// Batches in which barriers' reads were issued: 1 for a barrier that fits the buffer, more for others.
    pub waves: u64,
    /// Reads that had to wait for a slot.
    pub slot_waits: u64,
    /// Slots in all.
    pub slots: u32,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Most slots in use at once.
    pub max_slots_used: u32,
    /// The dispatch policy.
    pub dispatch: DispatchPolicy,
    /// Experts that a home was chosen for.
    pub decisions: u64,
    /// The same, by the policy that chose, in the order of [`DispatchPolicy::ALL`].
    pub decisions_by_policy: [u64; DispatchPolicy::ALL.len()],
    /// Choices among two or more homes.
    pub decisions_with_choice: u64,
    /// First choices that were not the primary alone: where first-hit would have read otherwise.
    pub decisions_not_primary: u64,
    /// Drives that began with a rate that was given.
    pub drives_with_given_rate: u32,
    /// Decisions of a policy that looks at rates, made while one of an expert's homes had none but a given one.
    pub decisions_by_given_rate: u64,
    /// Experts that were delivered in two or more parts.
    pub experts_split: u64,
    /// Parts of these experts.
    pub parts: u64,
    /// Payload bytes of these parts.
    pub part_bytes: u64,
    /// Of these experts, those whose parts' bytes did not sum to the expert: 0, or the reader is wrong.
    pub part_sum_errors: u64,
    /// Barriers with at least one expert that came from two or more drives.
    pub barriers_split: u64,
    /// Split experts with a wrong digest: whichever drive's part was bad, all of it was read again, whole.
    pub split_digest_errors: u64,
    /// Striped experts that were delivered.
    pub experts_striped: u64,
    /// Reads of these experts' blocks.
    pub stripe_reads: u64,
    /// Last reads also asked of another home.
    pub hedges_issued: u64,
    /// Of these, those that came first.
    pub hedges_won: u64,
    /// Of these, those cancelled because the first home was faster after all.
    pub hedges_cancelled: u64,
    /// Reads repeated on another home.
    pub failovers: u64,
    /// Experts read elsewhere because one of their homes is on a degraded drive.
    pub steered: u64,
    /// Barriers that closed while a drive was degraded.
    pub barriers_degraded: u64,
    /// By barrier the longest time from asking for a read to its failure, summed: failures made barriers later by no more.
    pub failing_wait_ns: u64,
    /// What happened to drives, in order.
    pub drive_events: Vec<DriveEvent>,
    /// Events beyond those that are kept.
    pub drive_events_lost: u64,
    /// Different experts delivered from a copy that is not the primary.
    pub experts_from_non_primary: u64,
    /// Time that callers spent waiting for an arrival.
    pub stall_ns: u64,
    /// What prefetch did.
    pub prefetch: PrefetchCounters,
    /// What the cache did.
    pub cache: CacheCounters,
}

/// Counters and trace, shared between the reader and its handles.
pub(super) struct Ledger {
    pub counters: ReaderCounters,
    pub trace: Option<TraceBuffer>,
}

/// What a drive's live sources are, for snapshots.
pub(super) struct LiveDrive {
    pub engine: Arc<EngineCounters>,
    pub prefetch_engine: Option<Arc<EngineCounters>>,
    pub pace: Option<Arc<PacedDrive>>,
    pub faults: Option<Arc<FaultyDrive>>,
}

/// Reads a reader's counters from anywhere, also after the reader has gone.
#[derive(Clone)]
pub struct ReaderHandle {
    pub(super) ledger: Arc<Mutex<Ledger>>,
    pub(super) live: Arc<[LiveDrive]>,
    pub(super) drives: Arc<[TraceDrive]>,
    pub(super) slab: Slab,
}

impl DriveCounters {
    pub(super) fn new(
        name: &str,
        capabilities: Capabilities,
        direct: Option<DioAlignment>,
    ) -> Result<Self, ReaderError> {
        let histogram = || {
            Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3)
                .map_err(|e| ReaderError::Option(format!("latency histogram: {e}")))
        };
        Ok(Self {
            name: name.to_string(),
            reads: 0,
            payload_bytes: 0,
            stripe_bytes: 0,
            read_bytes: 0,
            non_primary_reads: 0,
            landed_last: 0,
            errors: 0,
            digest_errors: 0,
            digests_checked: 0,
            timeouts: 0,
            moved: 0,
            degraded: 0,
            shed: 0,
            shed_due: 0,
            restored: 0,
            left_alone: false,
            throttled: 0,
            probes: ReadSum::default(),
            good_probes: ReadSum::default(),
            limit: LimitCounters::default(),
            faults: None,
            cancelled: 0,
            clat_ns: histogram()?,
            lat_ns: histogram()?,
            rate: SeenRate::default(),
            engine: EngineSnapshot::default(),
            prefetch: DrivePrefetch::default(),
            prefetch_engine: None,
            capabilities,
            direct,
            pace: None,
        })
    }
}

impl ReaderCounters {
    pub(super) fn new(drives: Vec<DriveCounters>, dispatch: DispatchPolicy, slab: &Slab) -> Self {
        Self {
            drives,
            barriers: 0,
            waves: 0,
            slot_waits: 0,
            slots: slab.slots(),
            slot_bytes: slab.slot_bytes(),
            max_slots_used: 0,
            dispatch,
            decisions: 0,
            decisions_by_policy: [0; DispatchPolicy::ALL.len()],
            decisions_with_choice: 0,
            decisions_not_primary: 0,
            drives_with_given_rate: 0,
            decisions_by_given_rate: 0,
            experts_split: 0,
            parts: 0,
            part_bytes: 0,
            part_sum_errors: 0,
            barriers_split: 0,
            split_digest_errors: 0,
            experts_striped: 0,
            stripe_reads: 0,
            hedges_issued: 0,
            hedges_won: 0,
            hedges_cancelled: 0,
            failovers: 0,
            steered: 0,
            barriers_degraded: 0,
            failing_wait_ns: 0,
            drive_events: Vec::with_capacity(MAX_EVENTS),
            drive_events_lost: 0,
            experts_from_non_primary: 0,
            stall_ns: 0,
            prefetch: PrefetchCounters::default(),
            cache: CacheCounters::default(),
        }
    }

    /// Payload bytes of all drives.
    pub fn payload_bytes(&self) -> u64 {
        self.drives.iter().map(|d| d.payload_bytes).sum()
    }
}

/// Bytes that came from drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Expert bytes that were asked for.
    pub payload_bytes: u64,
    /// Bytes of prefetch reads for nothing.
    pub wasted_bytes: u64,
}

impl ReaderHandle {
    /// The kernel's numbers of all threads that read, while the reader is there.
    pub fn threads(&self) -> Vec<u32> {
        self.live
            .iter()
            .flat_map(|l| [Some(&l.engine), l.prefetch_engine.as_ref()])
            .flatten()
            .flat_map(|e| e.threads())
            .collect()
    }

    /// The pace of drive number `drive`, if it is emulated.
    pub fn pace(&self, drive: usize) -> Option<Arc<PacedDrive>> {
        self.live.get(drive)?.pace.clone()
    }

    /// The counters now.
    pub fn counters(&self) -> ReaderCounters {
        let mut counters = self.lock().counters.clone();
        for (drive, live) in counters.drives.iter_mut().zip(self.live.iter()) {
            drive.engine = live.engine.snapshot();
            drive.prefetch_engine = live.prefetch_engine.as_ref().map(|e| e.snapshot());
            drive.pace = live.pace.as_ref().map(|p| p.snapshot());
            drive.faults = live.faults.as_ref().map(|f| f.snapshot());
        }
        counters
    }

    /// Bytes from all drives so far: payload that was delivered, and prefetch reads that were for nothing. Allocates nothing.
    pub fn delivered(&self) -> Delivered {
        let ledger = self.lock();
        let sum = |value: fn(&DriveCounters) -> u64| ledger.counters.drives.iter().map(value).sum();
        Delivered { payload_bytes: sum(|d| d.payload_bytes), wasted_bytes: sum(|d| d.prefetch.wasted.bytes) }
    }

    /// The trace so far, leaving an empty one of the same capacity; `None` when neither reads nor barriers are kept.
    /// Not to be called while a barrier is open: it allocates.
    pub fn take_trace(&self) -> Option<TraceBuffer> {
        let mut ledger = self.lock();
        let capacity = ledger.trace.as_ref()?.capacity();
        ledger.trace.replace(TraceBuffer::with_capacity(capacity))
    }

    /// The drives of this run, for `trace.json`.
    pub fn drives(&self) -> &[TraceDrive] {
        &self.drives
    }

    /// Slots that are free now; all of them but the cached ones once every lease is dropped and every read has ended.
    pub fn free_slots(&self) -> u32 {
        self.slab.free_slots()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
