//! What a reader does about drives that cannot be relied on: counts what failed, leaves a degraded drive alone, asks it now and
//! then whether it is back, and says what is lost with it. The part of [`ExpertReader`] that carries out what `health` decides.

use super::dispatch::DispatchPolicy;
use super::expert_reader::ExpertReader;
use super::faults::Failure;
use super::health::{DriveEvent, Failed, Happened, MAX_EVENTS, Now, Trouble};
use super::jobs::{Job, Part};
use super::limit::Waiting;
use super::pace_watch::{Change, PaceWatch};
use super::tally::Opened;
use crate::ids::{DriveId, ExpertId};
use crate::io::{ReadOutcome, ReadRequest, Slot};
use crate::knob::{self, Knob};
use crate::layout::plan::MAX_DRIVES;
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};
use std::fmt::Write as _;

/// Missing experts that a message lists.
const LISTED: usize = 8;
/// Part of what the other drives deliver together below which a slowed drive is not worth its risk.
const LEAST_SHARE: f64 = 0.1;
/// Times as far as the others' that a drive's pace has fallen before it is left alone: what slows all of them is no drive's fault.
const FAR_FROM_OTHERS: f64 = 2.0;

impl ExpertReader {
    /// Here and now, for events; between barriers, the one that has closed.
    pub(super) fn now(&self) -> Now {
        let (step, barrier) =
            self.open.map_or((self.last_step, self.barriers.saturating_sub(1)), |o| (o.step.step, o.barrier));
        Now { step, barrier, ns: self.clock.now_ns() }
    }

    /// A read of `event` has failed with `failure`: the drive may be degraded for it.
    pub(super) fn blame(&mut self, event: &ReadEvent, failure: Failure) {
        if failure.is_our_bug() {
            return;
        }
        let how = match failure {
            Failure::Os { errno } => Failed::of_errno(errno),
            Failure::Short { .. } | Failure::Digest => Failed::Otherwise,
        };
        self.blame_for(event, how);
    }

    /// The same for a read that was given up because nothing came.
    pub(super) fn blame_for(&mut self, event: &ReadEvent, how: Failed) {
        let now = self.now();
        let waited_ns = now.ns.saturating_sub(event.queued_ns);
        if event.purpose == Purpose::Demand {
            self.failing_ns = self.failing_ns.max(waited_ns);
        }
        if let Some((why, after_ns)) = self.health[event.drive.index()].failed(how, event.queued_ns, now) {
            self.happened(event.drive, Happened::Degraded(why), after_ns, now);
        }
    }

    /// Notes an event, and which drives demand leaves alone from now on.
    pub(super) fn happened(&mut self, drive: DriveId, happened: Happened, after_ns: u64, now: Now) {
        let mask = |of: fn(Trouble) -> bool| {
            let such = self.health.iter().enumerate().filter(|(_, h)| h.trouble().is_some_and(of));
            such.fold(0, |mask, (d, _)| mask | 1 << d)
        };
        let worse = [mask(|t| t != Trouble::Slow), mask(|t| matches!(t, Trouble::Gone | Trouble::Silent))];
        (self.avoid, self.worse) = (mask(|_| true), worse);
        let mut ledger = self.handle.lock();
        let counters = &mut ledger.counters;
        counters.drives[drive.index()].left_alone = self.avoid >> drive.0 & 1 == 1;
        match happened {
            Happened::Degraded(Trouble::Slow) => counters.drives[drive.index()].shed += 1,
            Happened::Degraded(_) => counters.drives[drive.index()].degraded += 1,
            Happened::Restored => counters.drives[drive.index()].restored += 1,
            Happened::Throttled { .. } => counters.drives[drive.index()].throttled += 1,
            Happened::Recovered => {}
        }
        if counters.drive_events.len() < MAX_EVENTS {
            let Now { step, barrier, ns: at_ns } = now;
            counters.drive_events.push(DriveEvent { drive, happened, step, barrier, at_ns, after_ns });
        } else {
            counters.drive_events_lost += 1;
        }
    }

    /// Drives that demand leaves alone, as [`super::dispatch::Dispatcher::avoid`] takes them.
    pub(super) fn left_alone(&self) -> [u64; 3] {
        [self.avoid, self.worse[0], self.worse[1]]
    }

    /// Experts of those about to be decided on that have a home on a degraded drive and another elsewhere.
    pub(super) fn steered(&self, opened: &Opened, from: usize, count: usize) -> u64 {
        if self.avoid == 0 {
            return 0;
        }
        let steered = |expert: ExpertId| {
            let homes = self.plan.homes(opened.layer, expert).unwrap_or(&[]);
            let avoided = homes.iter().filter(|d| self.avoid >> d.0 & 1 == 1).count();
            avoided > 0 && avoided < homes.len()
        };
        self.wants[from..][..count].iter().filter(|w| steered(w.expert)).count() as u64
    }

    /// Asks degraded drives whether they are back, if it is time and demand is all on its way: one read each, of an expert that
    /// this barrier gets elsewhere, so that the barrier does not wait for it. A slow drive is asked when it has nothing else to do:
    /// what its read takes is to say how fast it is.
    pub(super) fn probe(&mut self, opened: &Opened) {
        if self.avoid == 0 || self.fresh < self.wants.len() || !self.retry.is_empty() || self.is_striped() {
            return;
        }
        let mut asked = false;
        for drive in 0..self.lanes.len() {
            if self.probing[drive] || !self.health[drive].probe_due(opened.barrier) || self.slab.free_slots() < 2 {
                continue;
            }
            let lane = &self.lanes[drive];
            let busy = lane.demand_out > 0 || lane.ahead.as_ref().is_some_and(|a| a.out > 0);
            if busy && self.health[drive].trouble() == Some(Trouble::Slow) {
                continue;
            }
            // What is demanded comes from a drive that is less bad, so that nothing waits for this one.
            let masks = self.left_alone();
            let trouble = |d: &DriveId| masks.iter().filter(|mask| **mask >> d.0 & 1 == 1).count();
            let own = trouble(&DriveId(drive as u8));
            let better = |d: &DriveId| trouble(d) < own;
            let elsewhere = |e: ExpertId| self.plan.homes(opened.layer, e).is_some_and(|h| h.iter().any(better));
            let here = |e: &ExpertId| lane.opened.locate(opened.layer, *e).is_some() && elsewhere(*e);
            let Some(expert) = self.wants.iter().map(|w| w.expert).find(here) else { continue };
            let Some(slot) = self.slab.take() else { continue };
            asked |= self.place_probe(opened, drive, expert, slot);
        }
        if asked {
            self.submit();
        }
    }

    fn place_probe(&mut self, opened: &Opened, drive: usize, expert: ExpertId, slot: Slot) -> bool {
        let whole: Part = self.whole();
        let lane = &mut self.lanes[drive];
        let Some(located) = lane.opened.locate(opened.layer, expert) else { return false };
        let Some(tag) = self.free_jobs.pop() else { return false };
        let bytes = lane.read_bytes;
        let queued_ns = self.clock.now_ns();
        let event = ReadEvent {
            step: opened.step.step,
            layer: opened.layer,
            expert,
            drive: DriveId(drive as u8),
            replica: 0,
            part: 0,
            parts: 1,
            offset: located.offset,
            bytes: u64::from(bytes),
            purpose: Purpose::Demand,
            issued_in: opened.barrier,
            barrier: None,
            queued_ns,
            submitted_ns: 0,
            completed_ns: 0,
            result: ReadResult::Ok,
            outcome: Outcome::Wasted,
        };
        self.jobs[tag as usize] = Some(Job {
            tag,
            want: 0,
            ahead: None,
            withdrawn: false,
            part: whole,
            tried: 0,
            event,
            digest: located.digest,
            gave_up: None,
            rival: None,
            hedge: false,
            probe: true,
            waiting: Waiting::default(),
        });
        self.in_flight.add(drive, u64::from(bytes));
        self.rates[drive].queued(queued_ns);
        self.probing[drive] = true;
        let (offset, file) = (located.offset, located.file);
        lane.batch.push(ReadRequest { tag: u64::from(tag), file, offset, len: bytes, need: whole.len, slot });
        let mut ledger = self.handle.lock();
        ledger.counters.drives[drive].probes.add(u64::from(bytes));
        true
    }

    /// A probe has ended.
    pub(super) fn probed(&mut self, job: &Job, slot: &Slot, outcome: ReadOutcome) {
        let (event, drive) = (&job.event, job.event.drive.index());
        let came = matches!(outcome, ReadOutcome::Done { .. });
        let (in_flight, bytes) = (&self.in_flight, event.bytes);
        in_flight.sub(drive, bytes);
        self.rates[drive].ended(event.completed_ns, bytes, came);
        self.probing[drive] = false;
        let mut good = came && self.check_digest(slot, job.digest) != Some(true);
        if good && self.health[drive].must_be_fast() {
            good = self.pace_is_back(drive, event.completed_ns.saturating_sub(event.queued_ns));
        }
        let now = self.now();
        let restored = self.health[drive].probed(good, now);
        if good {
            self.handle.lock().counters.drives[drive].good_probes.add(event.bytes);
        }
        if let Some(after_ns) = restored {
            self.forget_pace(drive);
            self.happened(event.drive, Happened::Restored, after_ns, now);
        }
    }

    /// Looks for drives that have slowed or recovered, and leaves alone what is not worth waiting for. Between barriers.
    pub(super) fn watch_pace(&mut self) {
        let now = self.now();
        for drive in 0..self.lanes.len() {
            let forced = knob::forced(Knob::Shed) && self.barriers == 8 && drive + 1 == self.lanes.len();
            let (lane, rate) = (&self.lanes[drive], &self.rates[drive]);
            // What waits for a limit, or for somebody to look, takes longer than the drive does.
            if !forced && (lane.limit.is_some() || lane.engine.capabilities().stamps_late) {
                continue;
            }
            if self.health[drive].trouble().is_none() {
                self.pace[drive].learn_lone(rate.lone_ns(u64::from(lane.read_bytes)));
            }
            let change = self.pace[drive].look(&rate.seen(), self.plan.expert_bytes, rate.reads_alone(), now.ns);
            let id = DriveId(drive as u8);
            match change {
                Some(Change::Throttled { factor, since_ns }) => {
                    let hundredths = (factor * 100.0).min(f64::from(u32::MAX)) as u32;
                    self.happened(id, Happened::Throttled { hundredths }, now.ns.saturating_sub(since_ns), now);
                }
                Some(Change::Recovered { since_ns }) => {
                    self.happened(id, Happened::Recovered, now.ns.saturating_sub(since_ns), now);
                    // Demand that only it could serve may be all that it is ever asked.
                    if let Some(after_ns) = self.health[drive].recovered(now) {
                        self.forget_pace(drive);
                        self.happened(id, Happened::Restored, after_ns, now);
                    }
                }
                None => {}
            }
            let throttled = self.pace[drive].is_throttled() && self.health[drive].trouble().is_none();
            let due = throttled && self.can_shed[drive] && self.fell_alone(drive) && !self.worth_it(drive);
            if due || forced {
                let first = !std::mem::replace(&mut self.shed_asked[drive], true);
                self.handle.lock().counters.drives[drive].shed_due += u64::from(first && !forced);
                let asked = (self.options.shed.acts(self.options.dispatch) && !knob::skipped(Knob::Shed)) || forced;
                if asked && self.health[drive].degrade(Trouble::Slow, now) {
                    self.happened(id, Happened::Degraded(Trouble::Slow), 0, now);
                }
            }
        }
    }

    /// Whether a drive has slowed much more than the others: what slows them all, a busy machine or a link that they share, is
    /// not cured by leaving one of them alone.
    fn fell_alone(&self, drive: usize) -> bool {
        let Some(factor) = self.pace[drive].factor() else { return false };
        let (mut others, mut count) = ([0.0; MAX_DRIVES], 0);
        for other in (0..self.lanes.len()).filter(|d| *d != drive && self.health[*d].trouble().is_none()) {
            if let Some(factor) = self.pace[other].factor() {
                (others[count], count) = (factor, count + 1);
            }
        }
        let others = &mut others[..count];
        others.sort_unstable_by(f64::total_cmp);
        let median = others.get(count.saturating_sub(1) / 2).copied().unwrap_or(1.0);
        factor >= FAR_FROM_OTHERS * median
    }

    /// Whether a drive that has slowed still brings more than it may cost. A policy that goes by rates gives it a share that
    /// ends with the others', so that only a small share is not worth the error of the estimate; any other policy gives every
    /// drive as much, and waits for the slowest.
    fn worth_it(&self, drive: usize) -> bool {
        let rate = |d: usize| 1e9 / PaceWatch::expert_ns(&self.rates[d].seen(), self.plan.expert_bytes);
        let usable =
            |d: &usize| *d != drive && self.health[*d].trouble().is_none() && self.rates[*d].seen().periods > 0;
        let (count, sum) = (0..self.lanes.len()).filter(usable).fold((0u32, 0.0), |(n, sum), d| (n + 1, sum + rate(d)));
        match self.policy() {
            DispatchPolicy::ExpectedCompletion | DispatchPolicy::Split => rate(drive) >= LEAST_SHARE * sum,
            _ => f64::from(count + 1) * rate(drive) >= sum,
        }
    }

    /// A probe took `took_ns` on a drive that had been too slow.
    fn pace_is_back(&self, drive: usize, took_ns: u64) -> bool {
        self.pace[drive].is_back(took_ns)
    }

    /// A drive is back: what it did while it was slow says nothing about it now.
    fn forget_pace(&mut self, drive: usize) {
        self.pace[drive].forget();
        self.rates[drive].restart();
        self.shed_asked[drive] = false;
    }

    /// What cannot be read without `drive` (and the others that are degraded because they do not deliver), and what brings it
    /// back. A sentence, or nothing if every expert is somewhere else too.
    pub(super) fn lost_with(&self, drive: DriveId) -> String {
        let plan = self.options.stage_arguments.as_deref().unwrap_or("<plan.json>");
        let dead = |d: &DriveId| self.health[d.index()].trouble().is_some_and(|t| t != Trouble::Slow);
        if !dead(&drive) {
            return format!("; run `argodrive stage --repair {plan}`");
        }
        let (mut count, mut first) = (0usize, String::new());
        for (&layer, homes) in &self.plan.layers {
            for (expert, of) in homes.0.iter().enumerate() {
                let striped = self.plan.stripe(of.len()).is_some();
                let lost = if striped { of.iter().any(dead) } else { of.iter().all(dead) };
                if !lost || of.is_empty() {
                    continue;
                }
                if count < LISTED {
                    let _ = write!(first, "{}{layer}-{}", if count > 0 { ", " } else { "" }, ExpertId(expert as u16));
                }
                count += 1;
            }
        }
        if count == 0 {
            return String::new();
        }
        let name = &self.lanes[drive.index()].opened.name;
        let others = self.health.iter().zip(&self.lanes).enumerate();
        let others: Vec<&str> = others
            .filter(|(d, _)| *d != drive.index() && dead(&DriveId(*d as u8)))
            .map(|(_, (_, lane))| lane.opened.name.as_str())
            .collect();
        let also = if others.is_empty() { String::new() } else { format!(" (and `{}`)", others.join("`, `")) };
        let more = if count > LISTED { ", ..." } else { "" };
        format!(
            "; {count} experts of the plan are on no other drive than `{name}`{also}: {first}{more}. Bring the drive back, or put \
             another in its place, and run `argodrive stage --repair {plan}`; a plan with replicas would have gone on without it"
        )
    }
}
