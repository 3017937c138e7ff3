//! The reader in virtual time: one barrier after the other, reads handed over as slots and drives allow, experts taken in
//! the order in which they arrive. What is decided is decided by the reader's own code; here is only when.

use super::devices::{DEMAND, Devices, Ended};
use super::prefetch::Ahead;
use super::{AheadSums, Bounds, DriveSums, Run, Setup, Simulated};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::reader::ReaderOptions;
use crate::reader::budget::Quotas;
use crate::reader::cache::{Cache, Place};
use crate::reader::dispatch::{Dispatcher, DriveLoad, Shape};
use crate::reader::governor::Governor;
use crate::reader::predict::Predictor;
use crate::reader::rates::{InFlight, RateEstimator, fill_loads};
use crate::replay::ReplayError;
use crate::replay::workload::{Demand, Workload};
use crate::source::Phase;
use std::collections::VecDeque;

/// What a read is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum For {
    /// The want of this number.
    Demand(u32),
    /// The guess of this number.
    Guess(u32),
    /// Nobody: it was given up, and holds its slot until it ends.
    Nobody,
}

/// A read on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub what: For,
    pub drive: usize,
    /// Bytes asked for, and payload among them.
    pub bytes: u64,
    pub payload: u64,
    /// It was begun as a guess.
    pub guessed: bool,
}

/// An expert that the open barrier waits for.
struct Want {
    expert: ExpertId,
    parts: u8,
    arrived: u8,
    /// Where it is, if the cache had it.
    place: Option<u32>,
}

/// Bytes and ends of the open barrier, by drive.
#[derive(Clone, Copy, Default)]
struct Share {
    reads: u64,
    last_ns: u64,
}

pub(super) struct Simulation<'a> {
    pub work: &'a Workload,
    pub setup: &'a Setup<'a>,
    pub devices: Devices,
    pub rates: Vec<RateEstimator>,
    pub in_flight: InFlight,
    pub loads: Vec<DriveLoad>,
    pub dispatcher: Dispatcher,
    pub jobs: Vec<Option<Job>>,
    pub free_jobs: Vec<u32>,
    pub free_slots: u32,
    /// By drive: demanded reads that have not ended.
    pub demand_out: Vec<u32>,
    pub governor: Governor,
    pub ahead: Option<Box<Ahead>>,
    pub cache: Option<Cache>,
    /// By place of the cache: loans of whoever is there.
    loans: Vec<u32>,
    last_step: Option<u64>,
    wants: Vec<Want>,
    /// The first want that has not been asked of a drive.
    fresh: usize,
    /// (arrival, want), earliest first.
    ready: VecDeque<(u64, u32)>,
    shares: Vec<Share>,
    /// What had to be read of the open barrier.
    missing: Vec<ExpertId>,
    pub sums: AheadSums,
    from_replicas: u64,
    pub open: Simulated,
    pub out: Run,
}

/// What the reader would begin with for a drive of this name.
fn estimator(drive: &str, options: &ReaderOptions) -> RateEstimator {
    RateEstimator::new(options.rates.iter().find(|r| r.drive == drive), options.queue_depth)
}

impl<'a> Simulation<'a> {
    pub fn new(
        work: &'a Workload,
        setup: &'a Setup<'a>,
        quotas: Quotas,
        predictor: Option<Predictor>,
        seed: u64,
    ) -> Self {
        let (plan, options) = (setup.plan, &setup.options);
        let drives = setup.devices.len();
        let widest = plan.layers.values().map(|l| l.0.len()).max().unwrap_or(0);
        let layers = plan.layers.keys().map(|l| l.index() + 1).max().unwrap_or(0);
        let experts = |layer: usize| plan.layers.get(&LayerId(layer as u16)).map_or(0, |l| l.0.len());
        let shape: Vec<usize> = (0..layers).map(experts).collect();
        let depths = [options.queue_depth, options.prefetch_queue_depth];
        let cache = (quotas.cache > 0).then(|| Cache::new(options.cache_policy, quotas.cache, &shape, &setup.heat));
        let ahead = (quotas.ahead > 0).then(|| Box::new(Ahead::new(plan, options, quotas.ahead, predictor)));
        Self {
            devices: Devices::new(&setup.devices, &setup.uplinks, &setup.episodes, depths, seed),
            rates: setup.devices.iter().map(|d| estimator(&d.name, options)).collect(),
            in_flight: InFlight::new(drives),
            loads: Vec::with_capacity(drives),
            dispatcher: Dispatcher::new(widest, drives),
            jobs: Vec::new(),
            free_jobs: Vec::new(),
            free_slots: quotas.slots,
            demand_out: vec![0; drives],
            governor: Governor::new(options.prefetch_governor),
            ahead,
            cache,
            loans: vec![0; quotas.cache as usize],
            last_step: None,
            wants: Vec::with_capacity(widest),
            fresh: 0,
            ready: VecDeque::new(),
            shares: vec![Share::default(); drives],
            missing: Vec::new(),
            sums: AheadSums::default(),
            from_replicas: 0,
            open: Simulated::default(),
            out: Run { drives: vec![DriveSums::default(); drives], ..Run::default() },
            work,
            setup,
        }
    }

    pub fn run(mut self, mut bounds: Option<Bounds>) -> Result<Run, ReplayError> {
        let mut now_ns = 0;
        self.out.barriers.reserve(self.work.barriers.len());
        for demand in &self.work.barriers {
            self.barrier(demand, now_ns)?;
            if let Some(bounds) = &mut bounds {
                let plan = self.setup.plan;
                let mask =
                    |e: &ExpertId| plan.homes(demand.layer, *e).unwrap_or(&[]).iter().fold(0u64, |m, d| m | 1 << d.0);
                let read = self.missing.iter().map(mask);
                [self.open.bound_layout_ns, self.open.bound_drives_ns] =
                    bounds.of(demand.barrier, plan.expert_bytes, read)?;
            }
            self.out.barriers.push(self.open);
            self.governor.barrier_closed();
            self.rates.iter_mut().for_each(RateEstimator::barrier_closed);
            self.issue_ahead(self.open.close_ns);
            now_ns = self.open.close_ns.saturating_add(demand.gap_ns);
        }
        self.end_ahead();
        for (drive, sums) in self.out.drives.iter_mut().enumerate() {
            let work = self.devices.work(drive);
            (sums.reads, sums.bytes, sums.busy_ns) = (work.reads, work.bytes, work.busy_ns);
        }
        (self.out.ahead, self.out.from_replicas) = (self.sums, self.from_replicas);
        Ok(self.out)
    }

    /// One barrier, opened at `open_ns`; its figures are in `open` afterwards.
    fn barrier(&mut self, demand: &Demand, open_ns: u64) -> Result<(), ReplayError> {
        self.open = Simulated { open_ns, last_ns: open_ns, ..Simulated::default() };
        self.wants.clear();
        self.ready.clear();
        self.missing.clear();
        self.shares.fill(Share::default());
        self.devices.barrier(demand.step.phase == Phase::Prefill, open_ns);
        self.withdraw_queued(None);
        self.collect(open_ns);
        self.supply(demand);
        let missing = std::mem::take(&mut self.missing);
        self.wants.extend(missing.iter().map(|&expert| Want { expert, parts: 1, arrived: 0, place: None }));
        self.missing = missing;
        let handed_ns = open_ns.saturating_add(demand.handover_ns);
        self.collect(handed_ns);
        self.issue(demand.layer, handed_ns);
        self.guess(demand);
        self.issue_ahead(handed_ns);

        let mut now_ns = open_ns.saturating_add(demand.before_ns.max(demand.handover_ns)) as f64;
        let mut waited = false;
        for _ in 0..self.wants.len() {
            loop {
                let at = now_ns.round() as u64;
                self.collect(at);
                self.issue(demand.layer, at);
                self.issue_ahead(at);
                if !self.ready.is_empty() {
                    break;
                }
                let Some(next) = self.devices.next_ns() else {
                    return Err(ReplayError::Input(format!(
                        "barrier {}: its {} experts do not fit the slots that the budget leaves for demand; raise \
                         --buffer-bytes",
                        demand.barrier,
                        self.wants.len()
                    )));
                };
                waited = true;
                let next = next.max(at);
                self.open.stall_ns += next - at;
                now_ns = now_ns.max(next as f64);
            }
            let Some((_, want)) = self.ready.pop_front() else { continue };
            let place = self.deliver(demand.layer, want);
            now_ns += demand.each_ns;
            match place {
                Some(place) => self.loans[place as usize] -= 1,
                None => self.free_slots += 1,
            }
        }
        let wake_ns = if waited { demand.wake_ns } else { 0 };
        self.open.close_ns = (now_ns.round() as u64).saturating_add(wake_ns);
        self.open.stall_ns += wake_ns;
        self.collect(self.open.close_ns);
        let last = self
            .shares
            .iter()
            .enumerate()
            .filter(|(_, s)| s.reads > 0)
            .max_by_key(|(d, s)| (s.last_ns, usize::MAX - d));
        if let Some((drive, share)) = last.map(|(d, s)| (d, *s)) {
            let others = self.shares.iter().enumerate().filter(|(d, s)| s.reads > 0 && *d != drive);
            self.open.gap_drive_ns = others.map(|(_, s)| s.last_ns).max().map_or(0, |s| share.last_ns - s);
            self.open.straggler = Some(DriveId(drive as u8));
            self.out.drives[drive].landed_last += 1;
        }
        Ok(())
    }

    /// What is there already, or on its way; leaves in `missing` what must be read.
    fn supply(&mut self, demand: &Demand) {
        let work = self.work;
        let step = demand.step.step;
        if let Some(cache) = &mut self.cache
            && self.last_step.replace(step) != Some(step)
        {
            cache.pass();
        }
        for &expert in work.of(demand) {
            if let Some(place) = self.cache.as_mut().and_then(|c| c.demand(demand.layer, expert)) {
                self.loans[place as usize] += 1;
                self.ready.push_back((0, self.wants.len() as u32));
                self.wants.push(Want { expert, parts: 1, arrived: 1, place: Some(place) });
                self.open.hits += 1;
            } else if !self.take_guess(demand.layer, expert) {
                self.missing.push(expert);
            }
        }
        self.end_due(demand);
        self.fresh = self.wants.len();
    }

    /// A guess that is there (since `landed_ns`) or on its way (`None`) becomes a want.
    pub fn want_guessed(&mut self, expert: ExpertId, landed_ns: Option<u64>) -> u32 {
        let want = self.wants.len() as u32;
        self.wants.push(Want { expert, parts: 1, arrived: u8::from(landed_ns.is_some()), place: None });
        if let Some(at) = landed_ns {
            self.ready.push_back((at, want));
            self.open.prefetch_hits += 1;
        }
        want
    }

    /// The experts of the open barrier that have not been asked of a drive yet wait for slots.
    pub fn is_short(&self) -> bool {
        self.fresh < self.wants.len()
    }

    /// Asks drives for as many fresh wants as there are slots.
    fn issue(&mut self, layer: LayerId, now_ns: u64) {
        let count = (self.wants.len() - self.fresh).min(self.free_slots as usize);
        if count == 0 {
            return;
        }
        self.free_slots -= count as u32;
        let plan = self.setup.plan;
        let shape = Shape { bytes: plan.expert_bytes as u32, block_bytes: self.setup.block_bytes() };
        fill_loads(&self.rates, &self.in_flight, &mut self.loads);
        let mut dispatcher = std::mem::take(&mut self.dispatcher);
        let wants = &self.wants[self.fresh..];
        let homes = |ask: usize| plan.homes(layer, wants[ask].expert).unwrap_or(&[]);
        let policy = self.setup.options.dispatch;
        let pieces = dispatcher.decide(policy, true, count, homes, shape, &self.loads);
        for piece in pieces {
            let want = self.fresh as u32 + piece.ask;
            self.wants[want as usize].parts = piece.parts;
            let ends = piece.part + 1 == piece.parts;
            let bytes = if ends { self.setup.read_bytes() - u64::from(piece.from) } else { u64::from(piece.len) };
            let drive = piece.drive.index();
            if self.demand_out[drive] == 0 {
                self.withdraw_queued(Some(drive));
            }
            self.demand_out[drive] += 1;
            self.behind(drive);
            self.from_replicas += u64::from(piece.home != 0);
            let job = Job { what: For::Demand(want), drive, bytes, payload: u64::from(piece.len), guessed: false };
            self.ask(job, DEMAND, now_ns);
        }
        self.dispatcher = dispatcher;
        self.fresh += count;
    }

    /// Asks a drive.
    pub fn ask(&mut self, job: Job, pool: usize, now_ns: u64) -> u32 {
        let tag = self.free_jobs.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            self.jobs.len() as u32 - 1
        });
        self.jobs[tag as usize] = Some(job);
        self.in_flight.add(job.drive, job.bytes);
        self.rates[job.drive].queued(now_ns);
        self.devices.submit(job.drive, pool, tag, job.bytes, now_ns);
        tag
    }

    /// Takes what has ended by `to_ns`.
    pub fn collect(&mut self, to_ns: u64) {
        while let Some(ended) = self.devices.next_end(to_ns) {
            self.settle(ended);
        }
    }

    fn settle(&mut self, ended: Ended) {
        let Some(job) = self.jobs[ended.tag as usize].take() else { return };
        self.free_jobs.push(ended.tag);
        self.in_flight.sub(job.drive, job.bytes);
        self.rates[job.drive].ended(ended.completed_ns, job.bytes, job.what != For::Nobody);
        match job.what {
            For::Nobody => self.given_up_ended(&job),
            For::Guess(id) => self.landed(id, &job, ended.completed_ns),
            For::Demand(want) => {
                self.demand_out[job.drive] -= 1;
                let share = &mut self.shares[job.drive];
                share.reads += 1;
                share.last_ns = share.last_ns.max(ended.completed_ns);
                self.open.last_ns = self.open.last_ns.max(ended.completed_ns);
                self.open.bytes += job.payload;
                if job.guessed {
                    self.late(&job);
                }
                let at = &mut self.wants[want as usize];
                at.arrived += 1;
                if at.arrived == at.parts {
                    self.ready.push_back((ended.completed_ns, want));
                }
            }
        }
    }

    /// An expert is handed to compute; where the cache has it, if it does (its loan ends with the compute).
    fn deliver(&mut self, layer: LayerId, want: u32) -> Option<u32> {
        let Want { expert, place, .. } = self.wants[want as usize];
        if place.is_some() {
            return place;
        }
        let cache = self.cache.as_mut()?;
        let loans = &self.loans;
        match cache.place_for(layer, expert, |place| loans[place as usize] == 0) {
            Place::Refused | Place::Busy => None,
            Place::Free(place) => {
                cache.insert(place, layer, expert);
                self.loans[place as usize] = 1;
                Some(place)
            }
            Place::Evict { place, .. } => {
                cache.remove(place);
                self.free_slots += 1;
                cache.insert(place, layer, expert);
                self.loans[place as usize] = 1;
                Some(place)
            }
        }
    }
}
