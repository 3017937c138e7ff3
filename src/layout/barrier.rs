//! The barrier planner: homes that make the mean over barriers of the slowest drive's time small.
//!
//! Start: one copy of every expert, dealt by expected misses to the drive that would be done first. Then copies one at a
//! time, always the one that takes most time off all barriers, until the budget is spent or none helps. Then
//! local search, each layer on its own (barriers of two layers never meet) against barriers that are drawn afresh in every
//! round, so that no draw can be learnt by heart; between rounds layers trade copies. The work is counted in
//! moves, never in seconds: same inputs, same plan.
//!
//! **A slow drive never hurts.** A drive with less than a fifth of the others' mean speed only gets copies that were
//! left over when the rest had been planned without it; a home more never makes a barrier later, so no barrier
//! can be slower than without the drive. It is used in full only where the others are too small.

use super::drives::DriveSet;
use super::level::{LevelTable, Reads};
use super::plan::PlanError;
use super::search::{self, Layer};
use super::training::{LayerTraining, Training};
use super::worked;
use crate::stats::SplitMix64;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A drive this many times slower than the mean of the others is left out of the search.
pub const SLOW_FACTOR: f64 = 5.0;

/// How much is searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effort {
    /// A first look.
    Quick,
    /// Within a few per cent of thorough; K3 on four drives in seconds.
    #[default]
    Normal,
    /// Minutes for the largest models.
    Thorough,
}

impl Effort {
    /// Barriers drawn for each layer, moves for each expert in a round, rounds. Where the work is the same, many barriers
    /// and few moves are worth more on unseen text than the reverse.
    fn work(self) -> (usize, usize, usize) {
        match self {
            Effort::Quick => (2000, 2, 2),
            Effort::Normal => (6000, 2, 3),
            Effort::Thorough => (16000, 10, 6),
        }
    }
}

/// What is planned.
pub struct Problem<'a> {
    /// The barriers.
    pub training: &'a Training,
    /// The drives.
    pub set: &'a DriveSet,
    /// How experts are read.
    pub reads: Reads,
    /// Bytes of one expert.
    pub expert_bytes: u64,
    /// Copies beyond the first, over all layers.
    pub extra_copies: usize,
    /// How much is searched.
    pub effort: Effort,
    /// Seed.
    pub seed: u64,
}

/// Homes of every expert of every layer, as bit masks over the drives.
pub type Masks = Vec<Vec<u8>>;

/// Searches homes.
pub fn solve(problem: &Problem<'_>) -> Result<Masks, PlanError> {
    let layers = &problem.training.layers;
    let experts: usize = layers.iter().map(|l| l.expected.len()).sum();
    let slots: Vec<usize> =
        (0..problem.set.drives.len()).map(|d| problem.set.slots(d, problem.expert_bytes).min(experts)).collect();
    let Some(slow) = slow_drive(problem.set, problem.expert_bytes, &slots, experts) else {
        return search_all(problem, slots);
    };
    let rest = problem.set.without(slow);
    let mut masks = solve(&Problem { set: &rest, ..*problem })?;
    let low = (1u8 << slow) - 1;
    masks.iter_mut().flatten().for_each(|m| *m = (*m & low) | (*m & !low) << 1);
    let copies: usize = masks.iter().flatten().map(|m| m.count_ones() as usize - 1).sum();
    let mut room = vec![0; slots.len()];
    room[slow] = slots[slow];
    let table = LevelTable::new(problem.set, problem.reads, problem.expert_bytes, problem.training.widest)?;
    let mut states = start_states(problem, &table, masks, 0);
    add_copies(&mut states, &mut room, problem.extra_copies.saturating_sub(copies));
    Ok(states.into_iter().map(|s| s.homes().to_vec()).collect())
}

/// The slowest drive, if it is so slow that it could only hurt and the others have room for everything.
fn slow_drive(set: &DriveSet, expert_bytes: u64, slots: &[usize], experts: usize) -> Option<usize> {
    let speed: Vec<f64> = set.drives.iter().map(|d| 1.0 / d.alone_ns(expert_bytes)).collect();
    let slow = (0..speed.len()).min_by(|&a, &b| speed[a].total_cmp(&speed[b]).then(b.cmp(&a)))?;
    let others = speed.len().checked_sub(1).filter(|&n| n > 0)?;
    let mean = (speed.iter().sum::<f64>() - speed[slow]) / others as f64;
    let room = slots.iter().enumerate().filter(|(d, _)| *d != slow).fold(0usize, |sum, (_, s)| sum.saturating_add(*s));
    (speed[slow] * SLOW_FACTOR < mean && room >= experts).then_some(slow)
}

fn search_all(problem: &Problem<'_>, slots: Vec<usize>) -> Result<Masks, PlanError> {
    let table = LevelTable::new(problem.set, problem.reads, problem.expert_bytes, problem.training.widest)?;
    let mut room = slots;
    let masks = one_copy_each(problem, &mut room);
    let (_, moves, rounds) = problem.effort.work();
    // barriers are drawn in every round, copies traded in all but the first; moves are steps of their own
    worked::expect(masks.len() * (rounds * (1 + moves) + (rounds - 1)));
    let mut states = start_states(problem, &table, masks, 0);
    worked::done(states.len());
    add_copies(&mut states, &mut room, problem.extra_copies);
    for round in 0..rounds {
        if round > 0 {
            let training = &problem.training.layers;
            side_by_side(&mut states, |rank, state| {
                redraw(problem, &training[rank], rank, round, &mut **state);
                worked::done(1);
            });
            trade(&mut states, &mut room);
            worked::done(states.len());
        }
        // Each layer may use its part of the room that is left, so that layers need not wait for each other.
        let layers = states.len();
        let share = |rank: usize, r: usize| r * (rank + 1) / layers - r * rank / layers;
        let mut parts: Vec<Vec<usize>> =
            (0..layers).map(|rank| room.iter().map(|&r| share(rank, r)).collect()).collect();
        let mut work: Vec<_> = states.iter_mut().zip(&mut parts).collect();
        side_by_side(&mut work, |rank, (state, part)| {
            let mut rng = SplitMix64::new(mix(problem.seed, rank, round, 1));
            state.improve(moves * state.homes().len(), part, &mut rng);
            worked::done(moves);
        });
        room = (0..room.len()).map(|d| parts.iter().map(|p| p[d]).sum()).collect();
    }
    Ok(states.into_iter().map(|s| s.homes().to_vec()).collect())
}

fn mix(seed: u64, rank: usize, round: usize, what: u64) -> u64 {
    SplitMix64::new(seed ^ (rank as u64) << 40 ^ (round as u64) << 20 ^ what).next_u64()
}

fn redraw(problem: &Problem<'_>, training: &LayerTraining, rank: usize, round: usize, state: &mut dyn Layer) {
    let (barriers, _, _) = problem.effort.work();
    let mut rng = SplitMix64::new(mix(problem.seed, rank, round, 0));
    state.train(&training.draw(barriers, &mut rng), training.mass);
}

fn start_states<'a>(
    problem: &Problem<'_>,
    table: &'a LevelTable,
    masks: Masks,
    round: usize,
) -> Vec<Box<dyn Layer + 'a>> {
    let mut states: Vec<Box<dyn Layer + 'a>> = masks.into_iter().map(|m| search::layer(table, m)).collect();
    let training = &problem.training.layers;
    side_by_side(&mut states, |rank, state| redraw(problem, &training[rank], rank, round, &mut **state));
    states
}

/// Runs `work` on every item, on as many threads as there are processors. Items do not see each other, so the number of
/// threads changes nothing but the time.
fn side_by_side<T: Send>(items: &mut [T], work: impl Fn(usize, &mut T) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len().max(1));
    let each = items.len().div_ceil(threads).max(1);
    let work = &work;
    std::thread::scope(|scope| {
        for (chunk, part) in items.chunks_mut(each).enumerate() {
            scope.spawn(move || part.iter_mut().enumerate().for_each(|(i, item)| work(chunk * each + i, item)));
        }
    });
}

/// One home for every expert: the most expected first, each to the drive that would be done with its share first.
pub(super) fn one_copy_each(problem: &Problem<'_>, room: &mut [usize]) -> Masks {
    let rates: Vec<f64> = problem.set.drives.iter().map(|d| 1.0 / d.alone_ns(problem.expert_bytes)).collect();
    let expected: Vec<&[f64]> = problem.training.layers.iter().map(|l| l.expected.as_slice()).collect();
    deal(&expected, &rates, room).into_iter().map(|l| l.into_iter().map(|d| 1u8 << d).collect()).collect()
}

/// Deals each layer's experts over drives of these rates, longest first, within `room` experts on each drive. A layer takes
/// its even part of a drive's room while the others still need theirs.
pub(super) fn deal(expected: &[&[f64]], rates: &[f64], room: &mut [usize]) -> Vec<Vec<usize>> {
    let layers = expected.len();
    let whole = room.to_vec();
    let part = |rank: usize, d: usize| (whole[d] as u128 * (rank as u128 + 1) / layers as u128) as usize;
    let mut dealt = vec![0usize; rates.len()];
    let layer = |(rank, weights): (usize, &&[f64])| {
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
        let mut load = vec![0.0; rates.len()];
        let mut homes = vec![0; weights.len()];
        for expert in order {
            let done = |d: usize| (load[d] + weights[expert]) / rates[d];
            let free = |d: &usize| room[*d] > 0;
            let best = |a: &usize, b: &usize| done(*a).total_cmp(&done(*b)).then(a.cmp(b));
            let own = (0..rates.len()).filter(free).filter(|&d| dealt[d] < part(rank, d)).min_by(best);
            // `Plan` refuses overfull drives before; there is always one with room.
            let d = own.or_else(|| (0..rates.len()).filter(free).min_by(best)).unwrap_or(0);
            load[d] += weights[expert];
            homes[expert] = d;
            dealt[d] += 1;
            room[d] = room[d].saturating_sub(1);
        }
        homes
    };
    expected.iter().enumerate().map(layer).collect()
}

/// A change of one expert's homes that is worth `ns`.
struct Offer {
    ns: f64,
    layer: usize,
    expert: usize,
    homes: u8,
}

impl Ord for Offer {
    fn cmp(&self, other: &Self) -> Ordering {
        let places = (other.layer, other.expert, other.homes).cmp(&(self.layer, self.expert, self.homes));
        self.ns.total_cmp(&other.ns).then(places)
    }
}

impl PartialOrd for Offer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Offer {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Offer {}

/// The copy that takes most off an expert's barriers; `None` when none does.
fn best_copy(state: &dyn Layer, layer: usize, expert: usize, room: &[usize]) -> Option<Offer> {
    let old = state.homes()[expert];
    let offers = room.iter().enumerate().filter(|&(d, &r)| r > 0 && old >> d & 1 == 0).map(|(d, _)| {
        let homes = old | 1 << d;
        Offer { ns: -state.change_ns(expert, homes), layer, expert, homes }
    });
    offers.max().filter(|o| o.ns > 0.0)
}

fn copy_offers(states: &mut [Box<dyn Layer + '_>], room: &[usize]) -> BinaryHeap<Offer> {
    let mut work: Vec<_> = states.iter_mut().map(|s| (s, Vec::new())).collect();
    side_by_side(&mut work, |rank, (state, offers)| {
        *offers = (0..state.homes().len()).filter_map(|e| best_copy(&***state, rank, e, room)).collect();
    });
    work.into_iter().flat_map(|(_, offers)| offers).collect()
}

/// The best offer that still holds: offers only age, so one that is renewed and still on top is the best.
fn take_best(offers: &mut BinaryHeap<Offer>, renew: impl Fn(&Offer) -> Option<Offer>) -> Option<Offer> {
    while let Some(offer) = offers.pop() {
        if let Some(now) = renew(&offer) {
            if offers.peek().is_none_or(|next| now.ns >= next.ns) {
                return Some(now);
            }
            offers.push(now);
        }
    }
    None
}

/// Adds up to `copies` copies, the one that helps most first.
fn add_copies(states: &mut [Box<dyn Layer + '_>], room: &mut [usize], copies: usize) {
    if copies == 0 {
        return;
    }
    let mut offers = copy_offers(states, room);
    for _ in 0..copies {
        let best = take_best(&mut offers, |o| best_copy(&*states[o.layer], o.layer, o.expert, room));
        let Some(Offer { layer, expert, homes, .. }) = best else { return };
        let added = (states[layer].homes()[expert] ^ homes).trailing_zeros() as usize;
        states[layer].set(expert, homes);
        room[added] -= 1;
        offers.extend(best_copy(&*states[layer], layer, expert, room));
    }
}

/// The copy that an expert misses least, worth minus what its loss costs.
fn cheapest_loss(state: &dyn Layer, layer: usize, expert: usize) -> Option<Offer> {
    let old = state.homes()[expert];
    let drop = |d: u32| {
        let homes = old & !(1 << d);
        Offer { ns: -state.change_ns(expert, homes), layer, expert, homes }
    };
    (0..8).filter(|d| old.count_ones() > 1 && old >> d & 1 == 1).map(drop).max()
}

/// Moves copies from where they are missed least to where they help most, over all layers, while that gains.
fn trade(states: &mut [Box<dyn Layer + '_>], room: &mut [usize]) {
    let mut gains = copy_offers(states, room);
    let mut work: Vec<_> = states.iter_mut().map(|s| (s, Vec::new())).collect();
    side_by_side(&mut work, |rank, (state, offers)| {
        *offers = (0..state.homes().len()).filter_map(|e| cheapest_loss(&***state, rank, e)).collect::<Vec<Offer>>();
    });
    let mut losses: BinaryHeap<Offer> = work.into_iter().flat_map(|(_, offers)| offers).collect();
    for _ in 0..losses.len() {
        let loss = take_best(&mut losses, |o| cheapest_loss(&*states[o.layer], o.layer, o.expert));
        let Some(loss) = loss else { return };
        let gain = take_best(&mut gains, |o| best_copy(&*states[o.layer], o.layer, o.expert, room));
        let Some(gain) = gain.filter(|g| g.ns + loss.ns > 0.0) else { return };
        if (gain.layer, gain.expert) == (loss.layer, loss.expert) {
            continue;
        }
        for change in [&loss, &gain] {
            let old = states[change.layer].homes()[change.expert];
            let d = (old ^ change.homes).trailing_zeros() as usize;
            room[d] = if change.homes > old { room[d] - 1 } else { room[d] + 1 };
            states[change.layer].set(change.expert, change.homes);
        }
        losses.extend(cheapest_loss(&*states[loss.layer], loss.layer, loss.expert));
        gains.extend(best_copy(&*states[gain.layer], gain.layer, gain.expert, room));
    }
}
