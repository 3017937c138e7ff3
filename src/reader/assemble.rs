//! Putting a reader together: drives, slots, engines, and everything that it needs while it runs, allocated here.

use super::ahead::Ahead;
use super::budget::{check_plan, make_budget, prefetches, read_bytes};
use super::counters::{DriveCounters, Ledger, LiveDrive, ReaderCounters, ReaderHandle};
use super::dispatch::Dispatcher;
use super::engines::{EngineSpec, make_engine};
use super::expert_reader::ExpertReader;
use super::governor::Governor;
use super::health::Health;
use super::heat_file;
use super::jobs::{AheadLane, Lane};
use super::limit::{ALWAYS, ReadLimit};
use super::open::{OpenedDrive, open_drive};
use super::options::{PrefetchPolicy, PrefetchPool, ReaderError, ReaderOptions};
use super::pace_watch::PaceWatch;
use super::predict::{Predictor, table_file};
use super::rates::{InFlight, KnownRate, RateEstimator};
use super::resident::Resident;
use super::tally::Tally;
use crate::clock::Clock;
use crate::drive::spec::{DriveSpec, Emulation, RateSchedule};
use crate::ids::{DriveId, LayerId};
use crate::io::paced::PacedDrive;
use crate::io::paced_link::paced_drives;
use crate::io::{IoEngine, IoSetupError, Signal};
use crate::knob::{self, Knob};
use crate::layout::plan::{MAX_DRIVES, Plan};
use crate::trace::log::{TraceBuffer, TraceCapacity, TraceDrive};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Parts begin on multiples of this even where drives would allow less.
const LEAST_BLOCK_BYTES: u32 = 4096;

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
        check_faults(mounts, options)?;
        let drives = mounts.iter().enumerate().map(|(id, mount)| open_drive(plan, DriveId(id as u8), mount, options));
        let drives = drives.collect::<Result<Vec<_>, _>>()?;
        let pace = |mount: &DriveSpec| match mount.emulate.filter(|_| !knob::skipped(Knob::Pace)) {
            None if knob::forced(Knob::Pace) => Some(LYING_PACE),
            asked => asked,
        };
        let asked: Vec<(&str, Option<Emulation>)> = mounts.iter().map(|m| (m.name.as_str(), pace(m))).collect();
        let paces = paced_drives(&asked)?;
        Self::assemble(plan, drives, paces, options, clock, |spec| make_engine(options, clock, spec))
    }

    /// As [`ExpertReader::open`], over drives that are open and with engines from `make_engine`: for each drive that of
    /// demand, then, where there is prefetch, the other.
    pub(super) fn assemble(
        plan: &Plan,
        drives: Vec<OpenedDrive>,
        paces: Vec<Option<Arc<PacedDrive>>>,
        options: &ReaderOptions,
        clock: Clock,
        make_engine: impl Fn(EngineSpec<'_>) -> Result<Box<dyn IoEngine>, IoSetupError>,
    ) -> Result<Self, ReaderError> {
        options.check()?;
        check_plan(plan, options)?;
        check_rate(plan, options)?;
        let signal = Arc::new(Signal::default());
        let budget = make_budget(plan, &drives, options, &signal)?;
        let slab = budget.slab;
        let slots = slab.slots();
        let widest = plan.layers.values().map(|l| l.0.len()).max().unwrap_or(0);

        let places = places(plan, drives.len());
        let requests = slots.saturating_mul(places as u32);
        let jobs = requests.saturating_add(budget.ahead);
        let shared = (options.prefetch_pool == PrefetchPool::Shared && !knob::skipped(Knob::PrefetchPool))
            || knob::forced(Knob::PrefetchPool);
        let own_pool = prefetches(options) && !shared;
        let more = |depth: u32, knob| if knob::skipped(knob) { depth + 2 } else { depth };
        let depth = more(options.queue_depth, Knob::QueueDepth);
        let ahead_depth = more(options.prefetch_queue_depth, Knob::PrefetchQueueDepth);
        let mut lanes = Vec::with_capacity(drives.len());
        let (mut counted, mut live, mut traced) = (Vec::new(), Vec::new(), Vec::new());
        for (id, (mut opened, pace)) in drives.into_iter().zip(paces).enumerate() {
            let read_bytes = read_bytes(plan, &opened)?;
            let files = std::mem::take(&mut opened.files);
            let again = own_pool.then(|| files.iter().map(std::fs::File::try_clone).collect());
            let again: Option<Vec<_>> = again
                .transpose()
                .map_err(|e: std::io::Error| ReaderError::Option(format!("drive `{}`: {e}", opened.name)))?;
            let spec = |files, depth, requests| {
                let (slab, pace, faults, signal) = (&slab, pace.clone(), opened.faults.clone(), Arc::clone(&signal));
                EngineSpec { files, slab, depth, requests, pace, faults, signal }
            };
            let engine = make_engine(spec(files, depth, if shared { jobs } else { requests }))?;
            let ahead = again.map(|files| make_engine(spec(files, ahead_depth, budget.ahead.max(1)))).transpose()?;
            let ahead = prefetches(options).then(|| {
                let (engine, batch) = (ahead, Vec::with_capacity(budget.ahead as usize));
                AheadLane { engine, batch, out: 0 }
            });
            counted.push(DriveCounters::new(&opened.name, engine.capabilities(), opened.alignment)?);
            let prefetch_engine = ahead.as_ref().and_then(|a| a.engine.as_ref()).map(|e| e.counters());
            let faults = opened.faults.clone();
            live.push(LiveDrive { engine: engine.counters(), prefetch_engine, pace, faults });
            traced.push(TraceDrive {
                id: DriveId(id as u8),
                name: opened.name.clone(),
                path: opened.folder.clone(),
                emulated: opened.emulated,
                device_number: opened.device_number,
            });
            let batch = Vec::with_capacity(requests as usize);
            let (limit, passing) = (read_limit(options), Vec::with_capacity(1));
            lanes.push(Lane { opened, engine, batch, limit, passing, read_bytes, demand_out: 0, ahead });
        }
        let heat = options.cache_heat.as_ref().map(|path| heat_file::load(path, plan)).transpose()?.unwrap_or_default();
        let resident = (budget.cache > 0).then(|| Resident::new(options.cache_policy, budget.cache, plan, &heat));
        let governed = (options.prefetch_governor && !knob::skipped(Knob::PrefetchGovernor))
            || knob::forced(Knob::PrefetchGovernor);
        let reach = options.prefetch_depth.saturating_add(1);
        let own = own_guesses(plan, options)?;
        let ahead = prefetches(options).then(|| Box::new(Ahead::new(plan, reach, budget.ahead, own)));
        let mut counters = ReaderCounters::new(counted, options.dispatch, &slab);
        (counters.cache.slots, counters.prefetch.quota) = (budget.cache, budget.ahead);
        let known = |lane: &Lane| {
            let known = options.rates.iter().find(|r| r.drive == lane.opened.name && !knob::skipped(Knob::Rates));
            let lie = knob::forced(Knob::Rates).then(|| KnownRate {
                drive: lane.opened.name.clone(),
                bytes_per_s: 1_000_000_000,
                fixed_ns: 0,
            });
            RateEstimator::new(known.or(lie.as_ref()), options.queue_depth)
        };
        let rates: Vec<RateEstimator> = lanes.iter().map(known).collect();
        counters.drives_with_given_rate = rates.iter().filter(|r| r.trusts_given()).count() as u32;
        let ledger = Ledger { counters, trace: trace_capacity(options).map(TraceBuffer::with_capacity) };
        let handle = ReaderHandle {
            ledger: Arc::new(Mutex::new(ledger)),
            live: live.into(),
            drives: traced.into(),
            slab: slab.clone(),
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
            rates,
            block_bytes,
            dispatcher: Dispatcher::new(widest, lanes.len()),
            loads: Vec::with_capacity(lanes.len()),
            parked: (0..widest * places).map(|_| None).collect(),
            places,
            hedge_after_ns: vec![None; lanes.len()],
            health: vec![Health::default(); lanes.len()],
            pace: known_paces(&lanes, plan, options),
            probing: vec![false; lanes.len()],
            shed_asked: vec![false; lanes.len()],
            can_shed: can_shed(plan),
            avoid: 0,
            worse: [0; 2],
            failing_ns: 0,
            limit_wake_ns: None,
            last_step: 0,
            tally: Tally::new(lanes.len()),
            lanes,
            plan: plan.clone(),
            slab,
            signal,
            clock,
            options: options.clone(),
            handle,
            jobs: (0..jobs).map(|_| None).collect(),
            free_jobs: (0..jobs).rev().collect(),
            live_jobs: 0,
            moves: 0,
            taken: Vec::with_capacity(slots as usize),
            wants: Vec::with_capacity(widest),
            fresh: 0,
            retry: Vec::with_capacity(requests as usize),
            ready: VecDeque::with_capacity(widest.max(slots as usize)),
            delivered: 0,
            finished: Vec::with_capacity(jobs as usize),
            ahead,
            resident,
            governor: Governor::new(governed),
            widest,
            missing: Vec::with_capacity(widest),
            open: None,
            barriers: 0,
            split_seen: false,
            asked_in: vec![0; widest],
            asks: 0,
            seen_non_primary,
        })
    }
}

/// Faults of the run are for drives of the plan.
fn check_faults(mounts: &[DriveSpec], options: &ReaderOptions) -> Result<(), ReaderError> {
    let known = |name: &str| mounts.iter().any(|m| m.name == name);
    match options.faults.iter().find(|f| !known(&f.drive)) {
        None => Ok(()),
        Some(fault) => {
            let names: Vec<&str> = mounts.iter().map(|m| m.name.as_str()).collect();
            let (drive, names) = (&fault.drive, names.join(", "));
            Err(ReaderError::Option(format!("--faults `{fault}`: the plan has no drive `{drive}`; it has {names}")))
        }
    }
}

/// A limit below which a single expert takes longer than silence may last is a mistake, and would be waited for without a word.
fn check_rate(plan: &Plan, options: &ReaderOptions) -> Result<(), ReaderError> {
    let (rate, timeout_ms, bytes) = (options.max_read_bytes_per_s, options.read_timeout_ms, plan.expert_bytes);
    let least = (u128::from(bytes) * 1000).div_ceil(u128::from(timeout_ms.max(1)));
    if rate == 0 || u128::from(rate) >= least {
        return Ok(());
    }
    Err(ReaderError::Option(format!(
        "--max-read-rate {rate} B/s: one expert of {bytes} bytes takes longer than --read-timeout {timeout_ms} ms; give at \
         least {least} B/s, or a longer timeout"
    )))
}

/// By drive: whether the plan has an expert on it that is elsewhere too, all of it.
fn can_shed(plan: &Plan) -> Vec<bool> {
    let mut can = vec![false; plan.drives.len()];
    let copied = plan.layers.values().flat_map(|l| &l.0).filter(|homes| homes.len() > 1);
    copied.filter(|homes| plan.stripe(homes.len()).is_none()).flatten().for_each(|d| can[d.index()] = true);
    can
}

/// How much each drive may be asked for; `None` = as much as it takes.
fn read_limit(options: &ReaderOptions) -> Option<ReadLimit> {
    let (rate, duty) = (options.max_read_bytes_per_s, options.duty_permille);
    let done_rate = match rate {
        0 if knob::forced(Knob::MaxReadRate) => 2_000_000,
        _ if knob::skipped(Knob::MaxReadRate) => 0,
        rate => rate,
    };
    let done_duty = match duty {
        ALWAYS if knob::forced(Knob::Duty) => ALWAYS / 100,
        _ if knob::skipped(Knob::Duty) => ALWAYS,
        duty => duty,
    };
    let limited = rate > 0 || duty < ALWAYS || done_rate > 0 || done_duty < ALWAYS;
    limited.then(|| ReadLimit::new(done_rate, done_duty, duty))
}

/// What an expert takes on each drive, where that is known before the run.
fn known_paces(lanes: &[Lane], plan: &Plan, options: &ReaderOptions) -> Vec<PaceWatch> {
    let known = |lane: &Lane| {
        if read_limit(options).is_some() {
            return None; // what a drive can do is not what it may
        }
        let rate = options.rates.iter().find(|r| r.drive == lane.opened.name)?;
        Some(rate.fixed_ns as f64 + plan.expert_bytes as f64 * 1e9 / rate.bytes_per_s.max(1) as f64)
    };
    lanes.iter().map(|lane| PaceWatch::new(known(lane))).collect()
}

/// Most parts that an expert is read in: one on each drive, or the blocks of a striped one.
fn places(plan: &Plan, drives: usize) -> usize {
    let units = plan.stripe(drives).map_or(1, |stripe| stripe.units());
    usize::try_from(units).unwrap_or(usize::MAX).max(drives)
}

/// Pace of a real drive when a test makes pacing lie.
const LYING_PACE: Emulation = Emulation {
    rate_bytes_per_s: 50_000_000,
    latency_ns: 500_000,
    per_read_ns: 0,
    jitter: 0.0,
    seed: 0,
    schedule: RateSchedule::NONE,
    link: None,
};

/// What makes the reader's own guesses, where the policy has any.
fn own_guesses(plan: &Plan, options: &ReaderOptions) -> Result<Option<Predictor>, ReaderError> {
    let layers: Vec<LayerId> = plan.layers.keys().copied().collect();
    let widest = plan.layers.values().map(|l| l.0.len()).max().unwrap_or(0);
    let own = match (options.prefetch, &options.prefetch_table) {
        (PrefetchPolicy::Markov, Some(path)) => {
            let own = Predictor::markov(table_file::read(path)?, &plan.model_id, &layers, widest)?;
            if own.reach() < options.prefetch_depth {
                return Err(ReaderError::Option(format!(
                    "prefetch depth {}: the table {} looks {} layers ahead; lower --prefetch-depth, or learn it with a \
                     larger --depth",
                    options.prefetch_depth,
                    path.display(),
                    own.reach()
                )));
            }
            Some(own)
        }
        (PrefetchPolicy::SameAsLast, _) => Some(Predictor::same_as_last(&layers, widest)),
        (PrefetchPolicy::None, _) if knob::forced(Knob::Prefetch) => Some(Predictor::same_as_last(&layers, widest)),
        _ => None,
    };
    Ok(own)
}

fn trace_capacity(options: &ReaderOptions) -> Option<TraceCapacity> {
    if knob::forced(Knob::Trace) {
        return Some(TraceCapacity { reads: 1 << 16, barriers: 1 << 16 });
    }
    options.trace_capacity()
}
