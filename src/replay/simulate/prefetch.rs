//! Reading ahead in virtual time, by the rules of `reader::prefetch`: guesses are read whole by a pool of their own, on drives
//! that demand leaves alone; what no drive has begun gives way when a barrier opens. The guesses themselves, who is guessed,
//! and how many are let through, are the reader's own code.

use super::devices::{AHEAD, DEMAND};
use super::reader::{For, Job, Simulation};
use crate::ids::{ExpertId, LayerId};
use crate::layout::plan::Plan;
use crate::reader::ahead::{Guesses, Now, State};
use crate::reader::dispatch::Shape;
use crate::reader::predict::Predictor;
use crate::reader::{PrefetchPool, ReaderOptions};
use crate::replay::workload::Demand;
use crate::source::{Guess, Phase};

/// In flight, as far as prefetch is concerned, on a drive that demand is using.
const BUSY_BYTES: u64 = 1 << 50;

/// A guess that is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landed {
    completed_ns: u64,
    bytes: u64,
}

/// The guesses, and the reads of each drive's second pool that no barrier has demanded.
pub(super) struct Ahead {
    guesses: Guesses<Landed>,
    out: Vec<u32>,
    /// Room for a prediction.
    said: Vec<Guess>,
}

impl Ahead {
    pub fn new(plan: &Plan, options: &ReaderOptions, quota: u32, own: Option<Predictor>) -> Self {
        let guesses = Guesses::new(plan, options.prefetch_depth.saturating_add(1), quota, own);
        Self { guesses, out: vec![0; plan.drives.len()], said: Vec::new() }
    }
}

impl Simulation<'_> {
    fn with_ahead<R>(&mut self, act: impl FnOnce(&mut Self, &mut Ahead) -> R) -> Option<R> {
        let mut ahead = self.ahead.take()?;
        let result = act(self, &mut ahead);
        self.ahead = Some(ahead);
        Some(result)
    }

    /// Takes back what no drive has begun, on one drive or on all.
    pub(super) fn withdraw_queued(&mut self, drive: Option<usize>) {
        self.with_ahead(|sim, ahead| {
            for at in 0..ahead.guesses.live().len() {
                let id = ahead.guesses.live()[at];
                let Some(State::Reading { tag }) = ahead.guesses.get(id).map(|f| &f.state) else { continue };
                let tag = *tag;
                let of = sim.jobs[tag as usize].map(|j| j.drive);
                if (drive.is_none() || drive == of) && sim.withdraw(ahead, tag) {
                    let forecast = ahead.guesses.get_mut(id);
                    forecast.into_iter().for_each(|f| f.state = State::Waiting);
                }
            }
        });
    }

    /// Takes one read back, if its drive has not begun it. Its slot is free again.
    fn withdraw(&mut self, ahead: &mut Ahead, tag: u32) -> bool {
        let Some(job) = self.jobs[tag as usize] else { return false };
        let pool = self.ahead_pool();
        if !self.devices.withdraw(job.drive, pool, tag) {
            return false;
        }
        self.jobs[tag as usize] = None;
        self.free_jobs.push(tag);
        ahead.out[job.drive] -= 1;
        ahead.guesses.held_slots -= 1;
        self.free_slots += 1;
        self.in_flight.sub(job.drive, job.bytes);
        self.rates[job.drive].taken_back();
        true
    }

    /// A barrier asks for `expert`: takes a guess of it that is there, or on its way.
    pub(super) fn take_guess(&mut self, layer: LayerId, expert: ExpertId) -> bool {
        let taken = self.with_ahead(|sim, ahead| {
            let Some(forecast) = ahead.guesses.find(layer, expert).and_then(|id| ahead.guesses.remove(id)) else {
                return false;
            };
            match forecast.state {
                State::Waiting => false,
                State::Reading { tag } => {
                    let want = sim.want_guessed(expert, None);
                    let Some(job) = sim.jobs[tag as usize].as_mut() else { return false };
                    job.what = For::Demand(want);
                    ahead.out[job.drive] -= 1;
                    sim.demand_out[job.drive] += 1;
                    ahead.guesses.held_slots -= 1;
                    true
                }
                State::Landed(landed) => {
                    ahead.guesses.held_slots -= 1;
                    sim.want_guessed(expert, Some(landed.completed_ns));
                    sim.sums.useful += 1;
                    sim.governor.useful(landed.bytes);
                    sim.open.bytes += sim.setup.plan.expert_bytes;
                    true
                }
            }
        });
        taken.unwrap_or(false)
    }

    /// An adopted read has ended.
    pub(super) fn late(&mut self, job: &Job) {
        self.sums.late += 1;
        self.governor.lost(job.bytes);
    }

    /// Guesses whose barrier has opened without them end.
    pub(super) fn end_due(&mut self, demand: &Demand) {
        self.with_ahead(|sim, ahead| {
            let now = Now { step: demand.step.step, layer: demand.layer };
            // a pass before the last one belongs to another text
            let back = ahead.guesses.now.is_some_and(|was| now.step < was.step);
            ahead.guesses.due(if back { Now { step: u64::MAX, ..now } } else { now });
            sim.end_batch(ahead);
            ahead.guesses.now = Some(now);
        });
    }

    fn end_batch(&mut self, ahead: &mut Ahead) {
        while let Some(id) = ahead.guesses.batch.pop() {
            match ahead.guesses.remove(id).map(|f| f.state) {
                None | Some(State::Waiting) => {}
                Some(State::Landed(landed)) => {
                    ahead.guesses.held_slots -= 1;
                    self.free_slots += 1;
                    self.sums.wasted += 1;
                    self.governor.lost(landed.bytes);
                }
                Some(State::Reading { tag }) => {
                    if !self.withdraw(ahead, tag)
                        && let Some(job) = self.jobs[tag as usize].as_mut()
                    {
                        job.what = For::Nobody;
                    }
                }
            }
        }
    }

    /// A read that was given up has ended.
    pub(super) fn given_up_ended(&mut self, job: &Job) {
        self.free_slots += 1;
        self.sums.wasted += 1;
        self.governor.lost(job.bytes);
        self.with_ahead(|_, ahead| {
            ahead.out[job.drive] -= 1;
            ahead.guesses.held_slots -= 1;
        });
    }

    /// The read of a guess has ended by itself.
    pub(super) fn landed(&mut self, id: u32, job: &Job, completed_ns: u64) {
        self.with_ahead(|_, ahead| {
            ahead.out[job.drive] -= 1;
            if let Some(forecast) = ahead.guesses.get_mut(id) {
                forecast.state = State::Landed(Landed { completed_ns, bytes: job.bytes });
            }
        });
    }

    /// A demanded read is put behind prefetch on its drive.
    pub(super) fn behind(&mut self, drive: usize) {
        if self.ahead.as_ref().is_some_and(|a| a.out[drive] > 0) {
            self.governor.behind();
        }
    }

    /// What the reader guesses by what it has seen.
    pub(super) fn guess(&mut self, demand: &Demand) {
        let work = self.work;
        self.with_ahead(|sim, ahead| {
            if demand.step.phase == Phase::Prefill {
                return;
            }
            let Some(mut own) = ahead.guesses.own.take() else { return };
            let options = &sim.setup.options;
            let experts = work.of(demand);
            own.observe(&demand.step, demand.layer, experts);
            let most = experts.len().max(options.prefetch_experts as usize);
            let mut said = std::mem::take(&mut ahead.said);
            said.clear();
            let target = own.guess(options.prefetch_depth, most).map(|p| {
                said.extend_from_slice(p.guesses);
                (p.step, p.layer)
            });
            if let Some((step, layer)) = target {
                sim.take_in(ahead, step, layer, &said);
            }
            ahead.said = said;
            ahead.guesses.own = Some(own);
        });
    }

    fn take_in(&mut self, ahead: &mut Ahead, step: u64, layer: LayerId, guesses: &[Guess]) {
        let options = &self.setup.options;
        let within = ahead.guesses.distance(step, layer).is_some_and(|d| d <= options.prefetch_depth);
        if !within {
            return;
        }
        let most = if options.prefetch_experts == 0 { u32::MAX } else { options.prefetch_experts };
        let through = self.governor.let_through((guesses.len() as u32).min(most));
        for (rank, guess) in guesses.iter().take(through as usize).enumerate() {
            let held = self.cache.as_ref().is_some_and(|c| c.find(layer, guess.expert).is_some());
            if ahead.guesses.knows(layer, guess.expert) && !held {
                ahead.guesses.name(step, layer, guess.expert, rank as u32);
            }
        }
        ahead.guesses.named(step, layer);
        self.end_batch(ahead);
    }

    /// Hands reads of guesses to the drives that demand leaves alone.
    pub(super) fn issue_ahead(&mut self, now_ns: u64) {
        let short = self.is_short();
        self.with_ahead(|sim, ahead| {
            let guesses = &mut ahead.guesses;
            let room = (guesses.quota - guesses.held_slots.min(guesses.quota)).min(sim.free_slots) as usize;
            if short || room == 0 {
                return;
            }
            let plan = sim.setup.plan;
            let mut chosen = std::mem::take(&mut guesses.batch);
            chosen.clear();
            for &id in guesses.live() {
                let Some(f) = guesses.get(id).filter(|f| matches!(f.state, State::Waiting)) else { continue };
                let homes = plan.homes(f.layer, f.expert).unwrap_or(&[]);
                if chosen.len() < room && homes.iter().any(|d| sim.demand_out[d.index()] == 0) {
                    chosen.push(id);
                }
            }
            if !chosen.is_empty() {
                sim.issue_chosen(ahead, &chosen, now_ns);
            }
            ahead.guesses.batch = chosen;
        });
    }

    fn issue_chosen(&mut self, ahead: &mut Ahead, chosen: &[u32], now_ns: u64) {
        let plan = self.setup.plan;
        crate::reader::rates::fill_loads(&self.rates, &self.in_flight, &mut self.loads);
        for (load, out) in self.loads.iter_mut().zip(&self.demand_out) {
            load.in_flight_bytes += if *out > 0 { BUSY_BYTES } else { 0 };
        }
        let shape = Shape { bytes: plan.expert_bytes as u32, block_bytes: self.setup.block_bytes() };
        let mut dispatcher = std::mem::take(&mut self.dispatcher);
        let guesses = &ahead.guesses;
        let homes = |ask: usize| guesses.get(chosen[ask]).and_then(|f| plan.homes(f.layer, f.expert)).unwrap_or(&[]);
        let options = &self.setup.options;
        let policy = options.prefetch_dispatch.unwrap_or(options.dispatch);
        let pool = self.ahead_pool();
        let (bytes, payload) = (self.setup.read_bytes(), plan.expert_bytes);
        for piece in dispatcher.decide(policy, false, chosen.len(), homes, shape, &self.loads) {
            let drive = piece.drive.index();
            if self.demand_out[drive] > 0 || self.free_slots == 0 {
                continue;
            }
            let id = chosen[piece.ask as usize];
            self.free_slots -= 1;
            let what = For::Guess(id);
            let tag = self.ask(Job { what, drive, bytes, payload, guessed: true }, pool, now_ns);
            ahead.out[drive] += 1;
            ahead.guesses.held_slots += 1;
            if let Some(forecast) = ahead.guesses.get_mut(id) {
                forecast.state = State::Reading { tag };
            }
        }
        self.dispatcher = dispatcher;
    }

    /// The pool that guesses are read by.
    fn ahead_pool(&self) -> usize {
        match self.setup.options.prefetch_pool {
            PrefetchPool::Own => AHEAD,
            PrefetchPool::Shared => DEMAND,
        }
    }

    /// The run is over: what nobody has demanded was for nothing.
    pub(super) fn end_ahead(&mut self) {
        self.withdraw_queued(None);
        self.with_ahead(|sim, ahead| {
            ahead.guesses.due(Now { step: u64::MAX, layer: LayerId(u16::MAX) });
            sim.end_batch(ahead);
        });
        self.collect(u64::MAX);
    }
}
