//! Drives in virtual time: each a queue, one server and a latency, some of them behind a shared uplink. Reads go in with
//! the time at which they are asked for, and come out in the order in which they end. Pure; knows no experts.
//!
//! **One drive.** As `drive::profile` has it: a read occupies the server for `fixed + bytes / rate` and is there `latency`
//! later. Of each pool at most `depth` reads are with the drive; the rest wait in the reader's own queue.
//!
//! **A shared uplink.** While drives behind one uplink transfer, the sum of their rates is at most the uplink's; where it
//! would be more, all are slowed by the same factor. Fixed costs and latencies do not use the uplink.
//!
//! **What varies** is measured, never assumed ([`Noise`]), and drawn by recorded barriers ([`Episodes`]): of each drive what is
//! its own, and of all of them the disturbances of the machine. Those hit all reads that should end at that moment, so
//! a layout whose drives end together waits for one of them, not for the worst of several. Single residuals stand in where
//! such a barrier says nothing of a drive.

use crate::bound::DriveRate;
use crate::drive::profile::Quantile;
use crate::stats::SplitMix64;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

/// How far reads are off the model of their drive.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Noise {
    /// Not at all.
    #[default]
    None,
    /// A read takes so many times as long: a distribution of mean 1, as quantiles (in thousandths of a thousandth).
    Factor(Vec<Quantile>),
    /// A read ends so many nanoseconds later than the model says, by its place in the drive's busy period (see
    /// [`place_of`]). Does not occupy the drive.
    Late(Vec<Vec<i64>>),
}

/// How late the reads of one recorded barrier were.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Episode {
    /// By drive and place in its busy period: as far as the drive itself varies.
    pub own: Vec<Vec<i64>>,
    /// What came on top of that, by the time from the opening at which a read should have ended; ascending.
    pub common: Vec<(u64, i64)>,
}

impl Episode {
    /// What the machine added to a read that should end `at_ns` after the opening: as to the recorded read next to it.
    fn common_at(&self, at_ns: u64) -> i64 {
        let after = self.common.partition_point(|c| c.0 < at_ns);
        let near = [after.checked_sub(1), Some(after)].into_iter().flatten().filter_map(|at| self.common.get(at));
        near.min_by_key(|c| c.0.abs_diff(at_ns)).map_or(0, |c| c.1)
    }
}

/// Recorded barriers to draw from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Episodes {
    /// Barriers of prompts.
    pub prefill: Vec<Episode>,
    /// Barriers of passes that extend the text.
    pub extend: Vec<Episode>,
}

/// Classes of places in a busy period.
pub const PLACES: usize = 7;

/// The class of the `nth` read of a busy period, from 0: the first four have one each, then 4 to 7, 8 to 15, and the rest.
pub fn place_of(nth: u32) -> usize {
    match nth {
        0..=3 => nth as usize,
        4..=7 => 4,
        8..=15 => 5,
        _ => 6,
    }
}

/// Thousandths of a thousandth: what factors are counted in.
const MILLION: f64 = 1e6;

impl Noise {
    /// The distribution of a profile's reads one at a time, as a factor. `None` where it has no spread.
    pub fn of_service(service: &[Quantile]) -> Self {
        let mean: f64 = service.windows(2).map(|w| (w[1].q - w[0].q) * (w[0].ns as f64 + w[1].ns as f64) / 2.0).sum();
        let spread = service.first().zip(service.last()).is_some_and(|(a, b)| a.ns < b.ns);
        if !(spread && mean > 0.0) {
            return Self::None;
        }
        let scaled = |p: &Quantile| Quantile { q: p.q, ns: (p.ns as f64 / mean * MILLION).round() as u64 };
        Self::Factor(service.iter().map(scaled).collect())
    }

    /// Factor of a read's time and nanoseconds added to its end.
    fn draw(&self, nth: u32, rng: &mut SplitMix64) -> (f64, i64) {
        match self {
            Self::None => (1.0, 0),
            Self::Factor(quantiles) => {
                let u = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
                let at = quantiles.partition_point(|p| p.q < u).clamp(1, quantiles.len().max(2) - 1);
                let (Some(low), Some(high)) = (quantiles.get(at - 1), quantiles.get(at)) else { return (1.0, 0) };
                let share = if high.q > low.q { (u - low.q) / (high.q - low.q) } else { 0.0 };
                ((low.ns as f64 + (high.ns as f64 - low.ns as f64) * share) / MILLION, 0)
            }
            Self::Late(places) => {
                // a place that was never seen is like the nearest one before it
                let known = places.iter().take(place_of(nth) + 1).rev().find(|p| !p.is_empty());
                let known = known.or_else(|| places.iter().find(|p| !p.is_empty()));
                (1.0, known.map_or(0, |p| p[rng.below(p.len())]))
            }
        }
    }
}

/// What a simulated drive is.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Its name in the plan.
    pub name: String,
    /// Bytes per second while transferring, if no uplink slows it.
    pub bytes_per_s: f64,
    /// Occupies it for every read, beside the bytes.
    pub fixed_ns: u64,
    /// Added to every read, overlapping others.
    pub latency_ns: u64,
    /// What varies.
    pub noise: Noise,
    /// For bounds: its rate while all drives are at work, and what a read costs before its first byte.
    pub bound: DriveRate,
}

impl Device {
    /// A drive alone on its uplink that does exactly this.
    pub fn exact(name: &str, bytes_per_s: f64, fixed_ns: u64, latency_ns: u64) -> Self {
        let bound = DriveRate { bytes_per_s, fixed_ns: fixed_ns.saturating_add(latency_ns) };
        Self { name: name.into(), bytes_per_s, fixed_ns, latency_ns, noise: Noise::None, bound }
    }
}

/// Drives that share an uplink.
#[derive(Clone, Debug, PartialEq)]
pub struct Uplink {
    /// Their places among the drives.
    pub members: Vec<usize>,
    /// Bytes per second while several of them transfer.
    pub bytes_per_s: f64,
}

/// A read that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub drive: usize,
    pub tag: u32,
    pub submitted_ns: u64,
    pub completed_ns: u64,
}

/// Sums over a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    pub reads: u64,
    pub bytes: u64,
    pub busy_ns: u64,
}

#[derive(Clone, Copy)]
struct Asked {
    tag: u32,
    bytes: u64,
}

#[derive(Default)]
struct Pool {
    depth: u32,
    out: u32,
    waiting: VecDeque<Asked>,
}

/// A read with a drive behind an uplink.
#[derive(Clone, Copy)]
struct Flight {
    tag: u32,
    pool: usize,
    bytes: u64,
    submitted_ns: u64,
    factor: f64,
    late_ns: i64,
}

enum Phase {
    /// Nothing to do.
    Idle,
    /// The fixed cost of a read, until then.
    Fixed { flight: Flight, since_ns: u64, until_ns: u64 },
    /// A transfer with so many bytes to go.
    Moving { flight: Flight, since_ns: u64, left: f64 },
}

struct Lane {
    device: Device,
    pools: [Pool; 2],
    /// No uplink: the server is free from here on.
    free_ns: u64,
    /// Reads handed over that have not ended, and those of this busy period.
    out: u32,
    nth: u32,
    linked: bool,
    queue: VecDeque<Flight>,
    phase: Phase,
    work: Work,
}

/// A read that will end: when, in which order, drive, pool, tag, and when it was handed over.
type End = (u64, u64, usize, usize, u32, u64);

/// A set of drives at work.
pub(super) struct Devices {
    lanes: Vec<Lane>,
    uplinks: Vec<Uplink>,
    any_linked: bool,
    /// Reads that will end, the next one on top.
    ends: BinaryHeap<Reverse<End>>,
    order: u64,
    /// Transfers behind uplinks have been followed up to here.
    seen_ns: u64,
    rng: SplitMix64,
    /// The recorded barrier whose residuals are drawn: of which phase, and which.
    episodes: Arc<Episodes>,
    episode: (bool, usize),
    opened_ns: u64,
}

/// The pool of demand, and that of prefetch.
pub(super) const DEMAND: usize = 0;
pub(super) const AHEAD: usize = 1;

impl Devices {
    pub fn new(devices: &[Device], uplinks: &[Uplink], episodes: &Arc<Episodes>, depths: [u32; 2], seed: u64) -> Self {
        let pool = |depth: u32| Pool { depth: depth.max(1), ..Pool::default() };
        let lane = |(at, device): (usize, &Device)| Lane {
            device: device.clone(),
            pools: depths.map(pool),
            free_ns: 0,
            out: 0,
            nth: 0,
            linked: uplinks.iter().any(|u| u.members.contains(&at)),
            queue: VecDeque::new(),
            phase: Phase::Idle,
            work: Work::default(),
        };
        let lanes: Vec<Lane> = devices.iter().enumerate().map(lane).collect();
        let any_linked = lanes.iter().any(|l| l.linked);
        let (uplinks, rng) = (uplinks.to_vec(), SplitMix64::new(seed));
        let (episodes, episode) = (Arc::clone(episodes), (false, 0));
        let ends = BinaryHeap::new();
        Self { lanes, uplinks, any_linked, ends, order: 0, seen_ns: 0, rng, episodes, episode, opened_ns: 0 }
    }

    /// A barrier opens: what varies is drawn anew.
    pub fn barrier(&mut self, prefill: bool, opened_ns: u64) {
        self.opened_ns = opened_ns;
        let count = if prefill { self.episodes.prefill.len() } else { self.episodes.extend.len() };
        self.episode = (prefill, self.rng.below(count));
    }

    fn drawn(&self) -> Option<&Episode> {
        let (prefill, at) = self.episode;
        if prefill { self.episodes.prefill.get(at) } else { self.episodes.extend.get(at) }
    }

    /// What the episode says of the `nth` read of a drive's busy period.
    fn episode_of(&self, drive: usize, nth: u32) -> Option<i64> {
        let own = self.drawn()?.own.get(drive)?;
        own.get(nth as usize).or(own.last()).copied()
    }

    pub fn work(&self, drive: usize) -> Work {
        self.lanes[drive].work
    }

    /// A read is asked of a pool at `now_ns`, which is not before the last time given.
    pub fn submit(&mut self, drive: usize, pool: usize, tag: u32, bytes: u64, now_ns: u64) {
        self.lanes[drive].pools[pool].waiting.push_back(Asked { tag, bytes });
        self.hand_over(drive, pool, now_ns);
    }

    /// Takes back a read that its drive has not been given.
    pub fn withdraw(&mut self, drive: usize, pool: usize, tag: u32) -> bool {
        let waiting = &mut self.lanes[drive].pools[pool].waiting;
        let at = waiting.iter().position(|a| a.tag == tag);
        at.and_then(|at| waiting.remove(at)).is_some()
    }

    /// When something happens next. A transfer that ends is something, though its read may end later.
    pub fn next_ns(&self) -> Option<u64> {
        let end = self.ends.peek().map(|Reverse(e)| e.0);
        let change = self.next_change().map(|(at, _)| at);
        end.into_iter().chain(change).min()
    }

    /// The next read that ends by `to_ns`.
    pub fn next_end(&mut self, to_ns: u64) -> Option<Ended> {
        loop {
            let end = self.ends.peek().map_or(u64::MAX, |Reverse(e)| e.0);
            match self.next_change() {
                Some((at, drive)) if at <= end.min(to_ns) => self.change(at, drive),
                _ => break,
            }
        }
        let Reverse((completed_ns, _, drive, pool, tag, submitted_ns)) = *self.ends.peek()?;
        if completed_ns > to_ns {
            return None;
        }
        self.ends.pop();
        self.lanes[drive].out -= 1;
        self.lanes[drive].pools[pool].out -= 1;
        self.hand_over(drive, pool, completed_ns);
        Some(Ended { drive, tag, submitted_ns, completed_ns })
    }

    fn hand_over(&mut self, drive: usize, pool: usize, now_ns: u64) {
        self.follow(now_ns);
        while self.lanes[drive].pools[pool].out < self.lanes[drive].pools[pool].depth {
            let lane = &mut self.lanes[drive];
            let Some(Asked { tag, bytes }) = lane.pools[pool].waiting.pop_front() else { return };
            lane.nth = if lane.out == 0 { 0 } else { lane.nth.saturating_add(1) };
            lane.out += 1;
            lane.pools[pool].out += 1;
            let lane = &self.lanes[drive];
            let nth = lane.nth;
            let (factor, late_ns) = match (&lane.device.noise, self.episode_of(drive, nth)) {
                (Noise::Late(_), Some(late_ns)) => (1.0, late_ns),
                (noise, _) => noise.draw(nth, &mut self.rng),
            };
            let lane = &mut self.lanes[drive];
            lane.work.reads += 1;
            lane.work.bytes += bytes;
            let flight = Flight { tag, pool, bytes, submitted_ns: now_ns, factor, late_ns };
            if lane.linked {
                lane.queue.push_back(flight);
                self.start(drive, now_ns);
                continue;
            }
            let transfer = bytes as f64 * 1e9 / lane.device.bytes_per_s;
            let occupied = ((lane.device.fixed_ns as f64 + transfer) * factor).round() as u64;
            lane.free_ns = lane.free_ns.max(now_ns).saturating_add(occupied);
            lane.work.busy_ns += occupied;
            let free_ns = lane.free_ns;
            self.end(drive, flight, free_ns);
        }
    }

    /// The server of `drive` is done with a read at `free_ns`.
    fn end(&mut self, drive: usize, flight: Flight, free_ns: u64) {
        let latency_ns = (self.lanes[drive].device.latency_ns as f64 * flight.factor).round() as u64;
        let due_ns = free_ns.saturating_add(latency_ns).saturating_add_signed(flight.late_ns);
        let common = match (&self.lanes[drive].device.noise, self.drawn()) {
            (Noise::Late(_), Some(episode)) => episode.common_at(due_ns.saturating_sub(self.opened_ns)),
            _ => 0,
        };
        let done = due_ns.saturating_add_signed(common);
        // nothing is there before it was asked for
        let done = done.max(flight.submitted_ns + 1);
        self.order += 1;
        self.ends.push(Reverse((done, self.order, drive, flight.pool, flight.tag, flight.submitted_ns)));
    }

    /// An idle drive behind an uplink turns to its next read.
    fn start(&mut self, drive: usize, now_ns: u64) {
        let lane = &mut self.lanes[drive];
        if matches!(lane.phase, Phase::Idle)
            && let Some(flight) = lane.queue.pop_front()
        {
            let fixed = (lane.device.fixed_ns as f64 * flight.factor).round() as u64;
            lane.phase = Phase::Fixed { flight, since_ns: now_ns, until_ns: now_ns.saturating_add(fixed) };
        }
    }

    /// Bytes per nanosecond of a drive that transfers.
    fn pace(&self, drive: usize) -> f64 {
        let moving = |d: usize| matches!(self.lanes[d].phase, Phase::Moving { .. });
        let mut share = 1.0f64;
        for uplink in self.uplinks.iter().filter(|u| u.members.contains(&drive)) {
            let at_work = uplink.members.iter().filter(|&&d| moving(d));
            let wanted: f64 = at_work.map(|&d| self.lanes[d].device.bytes_per_s).sum();
            share = share.min(uplink.bytes_per_s / wanted.max(uplink.bytes_per_s));
        }
        self.lanes[drive].device.bytes_per_s * share / 1e9
    }

    /// The next end of a fixed cost or a transfer behind an uplink.
    fn next_change(&self) -> Option<(u64, usize)> {
        if !self.any_linked {
            return None;
        }
        let at = |drive: usize| match &self.lanes[drive].phase {
            Phase::Idle => None,
            Phase::Fixed { until_ns, .. } => Some((*until_ns, drive)),
            Phase::Moving { left, flight, .. } => {
                let ns = left.max(0.0) * flight.factor / self.pace(drive);
                Some((self.seen_ns.saturating_add(ns.ceil() as u64), drive))
            }
        };
        (0..self.lanes.len()).filter_map(at).min()
    }

    /// Moves bytes until `to_ns`, within which nothing changes.
    fn follow(&mut self, to_ns: u64) {
        if !self.any_linked || to_ns <= self.seen_ns {
            return;
        }
        let ns = (to_ns - self.seen_ns) as f64;
        let paces: Vec<f64> = (0..self.lanes.len()).map(|d| self.pace(d)).collect();
        for (lane, pace) in self.lanes.iter_mut().zip(paces) {
            if let Phase::Moving { left, flight, .. } = &mut lane.phase {
                *left -= ns * pace / flight.factor;
            }
        }
        self.seen_ns = to_ns;
    }

    /// What happens on `drive` at `at_ns`.
    fn change(&mut self, at_ns: u64, drive: usize) {
        self.follow(at_ns);
        match std::mem::replace(&mut self.lanes[drive].phase, Phase::Idle) {
            Phase::Idle => {}
            Phase::Fixed { flight, since_ns, .. } => {
                self.lanes[drive].phase = Phase::Moving { flight, since_ns, left: flight.bytes as f64 };
            }
            Phase::Moving { flight, since_ns, .. } => {
                self.lanes[drive].work.busy_ns += at_ns - since_ns;
                self.end(drive, flight, at_ns);
                self.start(drive, at_ns);
            }
        }
    }
}

#[cfg(test)]
#[path = "devices_tests.rs"]
mod tests;
