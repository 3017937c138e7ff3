//! A trace on a layout that does not exist yet: its barriers in virtual time, over drives that are known by measurement.
//! Pure: no clock, no files; the same arguments give the same nanoseconds.
//!
//! Nothing of the reader is written a second time where it can be called: dispatch and splitting, what it believes of its
//! drives, slots, the cache, guesses and their governor are its own code. What is simulated is what lies around: the
//! drives (`devices`), and the order in which reads are handed over, end and are computed on (`reader`).
//!
//! **What is not simulated**: failed reads and hedges, drafts (their routes are taken as recorded), guesses that
//! the decoder makes from weights, heat that slows a drive down. Compute takes as long as recorded.

pub mod devices;
pub mod interval;
mod prefetch;
mod reader;
pub mod summary;
#[cfg(test)]
mod tests;

use super::ReplayError;
use super::workload::Workload;
use crate::bound::{DriveRate, MAX_SUBSET_DRIVES, bound_drives_ns, bound_layout_ns};
use crate::ids::DriveId;
use crate::io::Slab;
use crate::layout::plan::{Plan, Shape};
use crate::reader::budget::{Quotas, quotas};
use crate::reader::cache::Heat;
use crate::reader::predict::Predictor;
use crate::reader::predict::table::Table;
use crate::reader::{PrefetchPolicy, ReaderOptions};
use devices::{Device, Episodes, Uplink};
use reader::Simulation;
use std::sync::Arc;

/// Parts begin on multiples of this, unless a drive's alignment is larger.
const LEAST_BLOCK_BYTES: u32 = 4096;

/// What to simulate besides the barriers.
#[derive(Clone, Debug)]
pub struct Setup<'a> {
    /// The layout.
    pub plan: &'a Plan,
    /// Its drives, in its order.
    pub devices: Vec<Device>,
    /// What they share.
    pub uplinks: Vec<Uplink>,
    /// How late reads of recorded barriers were, by drive of the plan.
    pub episodes: Arc<Episodes>,
    /// How experts are read.
    pub options: ReaderOptions,
    /// Reads are rounded up to this, and parts begin on multiples of it.
    pub alignment_bytes: u32,
    /// The table of the Markov policy.
    pub table: Option<Table>,
    /// What the pinned cache keeps by.
    pub heat: Vec<Heat>,
}

/// A simulated barrier. Times are nanoseconds of the virtual clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Simulated {
    /// It opened.
    pub open_ns: u64,
    /// Its last expert was there; the opening, if nothing had to be read.
    pub last_ns: u64,
    /// Compute let go of it.
    pub close_ns: u64,
    /// Compute had nothing to do.
    pub stall_ns: u64,
    /// Payload bytes read for it.
    pub bytes: u64,
    /// Drive of its last read.
    pub straggler: Option<DriveId>,
    /// How long after the next-to-last drive that one ended.
    pub gap_drive_ns: u64,
    /// Experts that were in memory, and that a prefetch had brought.
    pub hits: u32,
    /// See `hits`.
    pub prefetch_hits: u32,
    /// Bound with the homes of the plan; `None` beyond [`MAX_SUBSET_DRIVES`] drives, or where bounds were not asked for.
    pub bound_layout_ns: Option<u64>,
    /// Bound as if every expert were on every drive.
    pub bound_drives_ns: Option<u64>,
}

impl Simulated {
    /// From the opening to the last arrival.
    pub fn wait_ns(&self) -> u64 {
        self.last_ns - self.open_ns
    }
}

/// One drive over a whole simulated run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriveSums {
    /// Reads.
    pub reads: u64,
    /// Bytes, alignment included.
    pub bytes: u64,
    /// Time in which its server was occupied.
    pub busy_ns: u64,
    /// Barriers whose last read was its.
    pub landed_last: u64,
}

/// Prefetch over a whole simulated run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AheadSums {
    /// Reads of guesses that were there in time.
    pub useful: u64,
    /// That a barrier had to wait for.
    pub late: u64,
    /// That came for nothing.
    pub wasted: u64,
}

/// A simulated run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// One for each barrier of the workload.
    pub barriers: Vec<Simulated>,
    /// By drive of the plan.
    pub drives: Vec<DriveSums>,
    /// Reads of guesses.
    pub ahead: AheadSums,
    /// Experts delivered from a copy other than the first.
    pub from_replicas: u64,
}

impl Setup<'_> {
    /// Errors that need no simulation, and the slots that the reader would have.
    pub fn check(&self, work: &Workload) -> Result<Quotas, ReplayError> {
        let input = |text: String| Err(ReplayError::Input(text));
        let plan = self.plan;
        if let (Some(ran), planned) = (&work.model_id, &plan.model_id)
            && ran != planned
        {
            return input(format!("the trace is of model {ran}, the plan of {planned}; give a plan of the same model"));
        }
        if plan.shape != Shape::Whole {
            return input(
                "the plan stripes experts, which the simulator does not know; give one with whole experts".into(),
            );
        }
        for demand in &work.barriers {
            if let Some(e) = work.of(demand).iter().find(|e| plan.homes(demand.layer, **e).is_none()) {
                return input(format!(
                    "barrier {} demands expert {} of layer {}, which the plan does not have; give the plan of a model \
                     with the same layers and experts",
                    demand.barrier, e.0, demand.layer.0
                ));
            }
        }
        if self.devices.len() != plan.drives.len() {
            let (have, want) = (self.devices.len(), plan.drives.len());
            return input(format!("{have} drives are described, the plan has {want}"));
        }
        for device in &self.devices {
            let fine = |r: f64| r.is_finite() && r > 0.0;
            if !(fine(device.bytes_per_s) && fine(device.bound.bytes_per_s)) {
                let rate = device.bytes_per_s;
                return input(format!("drive `{}`: {rate} bytes/s is no rate; it must be above 0", device.name));
            }
        }
        let fine = |u: &Uplink| u.bytes_per_s.is_finite() && u.bytes_per_s > 0.0;
        if self.uplinks.iter().any(|u| !fine(u) || u.members.iter().any(|&d| d >= self.devices.len())) {
            return input("a shared uplink has no rate, or a member that is not there".into());
        }
        let refuse = |what: &str, why: &str| input(format!("{what} cannot be simulated: {why}"));
        match self.options.prefetch {
            PrefetchPolicy::NextRouter => {
                return refuse("prefetch `next-router`", "its guesses come from weights, which no trace holds");
            }
            PrefetchPolicy::Draft => {
                return refuse("prefetch `draft`", "its guesses come from the routes of drafted tokens");
            }
            PrefetchPolicy::None | PrefetchPolicy::SameAsLast | PrefetchPolicy::Markov => {}
        }
        if self.options.hedge_after_permille.is_some() {
            return refuse("hedging", "it acts on reads that are slow for reasons a trace does not show");
        }
        let option = |e: crate::reader::ReaderError| ReplayError::Input(e.to_string());
        self.options.check().map_err(option)?;
        let slot = Slab::slot_size(self.read_bytes()).unwrap_or(u64::MAX);
        quotas(plan, slot, &self.reader_options(work)).map_err(option)
    }

    /// With what only the model knows: how many slots a pass that extends the text needs at once.
    fn reader_options(&self, work: &Workload) -> ReaderOptions {
        ReaderOptions { demand_reserve: work.widest_step() as u32, ..self.options.clone() }
    }

    /// Bytes of a whole read.
    fn read_bytes(&self) -> u64 {
        self.plan.expert_bytes.next_multiple_of(u64::from(self.alignment_bytes.max(1)))
    }

    fn block_bytes(&self) -> u32 {
        self.alignment_bytes.max(LEAST_BLOCK_BYTES)
    }

    /// What makes the reader's own guesses.
    fn predictor(&self) -> Result<Option<Predictor>, ReplayError> {
        let layers: Vec<_> = self.plan.layers.keys().copied().collect();
        let widest = self.plan.layers.values().map(|l| l.0.len()).max().unwrap_or(0);
        let own = match (self.options.prefetch, &self.table) {
            (PrefetchPolicy::SameAsLast, _) => Some(Predictor::same_as_last(&layers, widest)),
            (PrefetchPolicy::Markov, Some(table)) => {
                Some(Predictor::markov(table.clone(), &self.plan.model_id, &layers, widest)?)
            }
            _ => None,
        };
        let depth = self.options.prefetch_depth;
        if let Some(reach) = own.as_ref().map(Predictor::reach).filter(|r| *r < depth) {
            return Err(ReplayError::Input(format!(
                "prefetch depth {depth}: the table looks {reach} layers ahead; lower --prefetch-depth"
            )));
        }
        Ok(own)
    }
}

/// Runs `work` on `setup`. With `with_bounds` each barrier gets its bounds, for the experts that had to be read.
pub fn run(work: &Workload, setup: &Setup<'_>, seed: u64, with_bounds: bool) -> Result<Run, ReplayError> {
    let quotas = setup.check(work)?;
    let bounds = with_bounds.then(|| Bounds::new(&setup.devices));
    Simulation::new(work, setup, quotas, setup.predictor()?, seed).run(bounds)
}

/// The two bounds of each barrier.
struct Bounds {
    rates: Vec<DriveRate>,
    items: Vec<(u64, u64)>,
}

impl Bounds {
    fn new(devices: &[Device]) -> Self {
        Self { rates: devices.iter().map(|d| d.bound).collect(), items: Vec::new() }
    }

    /// Of experts of `bytes` each with these homes.
    fn of(
        &mut self,
        barrier: u64,
        bytes: u64,
        masks: impl Iterator<Item = u64>,
    ) -> Result<[Option<u64>; 2], ReplayError> {
        let fail = |source| ReplayError::Bound { barrier, source };
        self.items.clear();
        self.items.extend(masks.map(|mask| (bytes, mask)));
        let all = bytes * self.items.len() as u64;
        let layout = match self.rates.len() > MAX_SUBSET_DRIVES {
            true => None,
            false => Some(bound_layout_ns(&self.items, &self.rates).map_err(fail)?),
        };
        Ok([layout, Some(bound_drives_ns(all, &self.rates).map_err(fail)?)])
    }
}
