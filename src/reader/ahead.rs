//! The guesses that are alive: which expert, for which layer of which pass, and how far its read has come. Bookkeeping
//! only; `prefetch` acts on it, and so does a simulation, for which what has landed is something else (`L`).

use super::limit::Waiting;
use super::predict::Predictor;
use crate::ids::{ExpertId, LayerId};
use crate::io::Slot;
use crate::layout::plan::Plan;
use crate::store::manifest::Digest;
use crate::trace::events::ReadEvent;

/// No guess.
const NONE: u32 = u32::MAX;

/// A guess that has not been used, taken back or proved wrong.
pub(crate) struct Forecast<L> {
    /// The last pass that it is for.
    pub step: u64,
    pub layer: LayerId,
    pub expert: ExpertId,
    /// Its place among the guesses for the layer: the likeliest first.
    pub rank: u32,
    pub state: State<L>,
    /// Its read has had to wait for demand before.
    pub held: bool,
    /// What its read has waited for a drive's limit.
    pub waiting: Waiting,
    /// Named by the list that is being taken in.
    named: bool,
}

/// How far the read of a guess is.
pub(crate) enum State<L> {
    /// Not asked of a drive.
    Waiting,
    /// With an engine, as this job.
    Reading { tag: u32 },
    /// There.
    Landed(L),
}

/// A prefetch that is there.
pub(super) struct Landed {
    pub slot: Slot,
    /// The read, its outcome not yet known.
    pub event: ReadEvent,
    pub digest: Digest,
}

/// Where the reader is: the barrier that was opened last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Now {
    pub step: u64,
    pub layer: LayerId,
}

/// The guesses of a reader.
pub(super) type Ahead = Guesses<Landed>;

/// The guesses that are alive, and what limits them. Everything is allocated when it is made.
pub(crate) struct Guesses<L> {
    forecasts: Vec<Option<Forecast<L>>>,
    free: Vec<u32>,
    /// Those that are alive, in the order in which they will be needed.
    live: Vec<u32>,
    /// By layer, then expert: its forecast.
    at: Vec<Vec<u32>>,
    /// The plan's layers in order, and by layer its place among them.
    pub layers: Vec<LayerId>,
    order: Vec<Option<u32>>,
    pub now: Option<Now>,
    /// Slots that prefetch may hold, and those that it holds.
    pub quota: u32,
    pub held_slots: u32,
    /// Makes the reader's own guesses, if they are not the decoder's to make.
    pub own: Option<Predictor>,
    /// Room for a set of forecasts that are decided on together, or that end together.
    pub batch: Vec<u32>,
}

impl<L> Guesses<L> {
    /// For guesses about `plan`, at most `depth` layers ahead, with at most `quota` slots.
    pub fn new(plan: &Plan, depth: u32, quota: u32, own: Option<Predictor>) -> Self {
        let layers: Vec<LayerId> = plan.layers.keys().copied().collect();
        let count = layers.last().map_or(0, |l| l.index() + 1);
        let mut order = vec![None; count];
        layers.iter().enumerate().for_each(|(at, layer)| order[layer.index()] = Some(at as u32));
        let mut at = vec![Vec::new(); count];
        let mut experts = 0;
        for (layer, homes) in &plan.layers {
            at[layer.index()] = vec![NONE; homes.0.len()];
            experts += homes.0.len();
        }
        let widest = at.iter().map(Vec::len).max().unwrap_or(0);
        let room = widest.saturating_mul(depth as usize + 1).min(experts);
        Self {
            forecasts: (0..room).map(|_| None).collect(),
            free: (0..room as u32).rev().collect(),
            live: Vec::with_capacity(room),
            own,
            at,
            layers,
            order,
            now: None,
            quota,
            held_slots: 0,
            batch: Vec::with_capacity(room),
        }
    }

    /// A layer's place among the plan's.
    pub fn order(&self, layer: LayerId) -> Option<u32> {
        *self.order.get(layer.index())?
    }

    /// How many layers `layer` of pass `step` is ahead of the barrier that was opened last; `None` if it is not ahead, or
    /// not in the plan.
    pub fn distance(&self, step: u64, layer: LayerId) -> Option<u32> {
        let to = u64::from(self.order(layer)?);
        let Some(now) = self.now else { return u32::try_from(to + 1).ok() };
        let from = u64::from(self.order(now.layer)?);
        let passes = step.checked_sub(now.step)?;
        let layers = passes.checked_mul(self.layers.len() as u64)?.checked_add(to)?.checked_sub(from)?;
        u32::try_from(layers).ok().filter(|&d| d > 0)
    }

    /// Whether an expert of a layer can be guessed at all.
    pub fn knows(&self, layer: LayerId, expert: ExpertId) -> bool {
        self.at.get(layer.index()).is_some_and(|l| expert.index() < l.len())
    }

    /// The forecast about an expert.
    pub fn find(&self, layer: LayerId, expert: ExpertId) -> Option<u32> {
        let id = *self.at.get(layer.index())?.get(expert.index())?;
        (id != NONE).then_some(id)
    }

    /// A forecast that is alive.
    pub fn get(&self, id: u32) -> Option<&Forecast<L>> {
        self.forecasts.get(id as usize)?.as_ref()
    }

    /// A forecast that is alive.
    pub fn get_mut(&mut self, id: u32) -> Option<&mut Forecast<L>> {
        self.forecasts.get_mut(id as usize)?.as_mut()
    }

    /// Those that are alive, in the order in which they will be needed.
    pub fn live(&self) -> &[u32] {
        &self.live
    }

    /// A new guess, or a new reason for an old one. `Some(true)` if it is new, `None` if there is no room.
    pub fn name(&mut self, step: u64, layer: LayerId, expert: ExpertId, rank: u32) -> Option<bool> {
        if let Some(old) = self.find(layer, expert).and_then(|id| self.get_mut(id)) {
            if step >= old.step {
                (old.step, old.rank) = (step, rank);
            }
            old.named = true;
            return Some(false);
        }
        let id = self.free.pop()?;
        let state = State::Waiting;
        let waiting = Waiting::default();
        self.forecasts[id as usize] =
            Some(Forecast { step, layer, expert, rank, state, held: false, waiting, named: true });
        self.at[layer.index()][expert.index()] = id;
        self.live.push(id);
        Some(true)
    }

    /// Ends the taking in of a list for `layer` of pass `step`: leaves in `batch` what an earlier list had named and this one
    /// has not, and puts the rest in order.
    pub fn named(&mut self, step: u64, layer: LayerId) {
        self.batch.clear();
        for &id in &self.live {
            let Some(forecast) = self.forecasts[id as usize].as_mut() else { continue };
            if !std::mem::take(&mut forecast.named) && (forecast.step, forecast.layer) == (step, layer) {
                self.batch.push(id);
            }
        }
        let forecasts = &self.forecasts;
        let key = |id: &u32| forecasts[*id as usize].as_ref().map(|f| (f.step, f.layer, f.rank, f.expert));
        self.live.sort_unstable_by_key(key);
    }

    /// Leaves in `batch` those whose barrier has come.
    pub fn due(&mut self, now: Now) {
        self.batch.clear();
        let forecasts = &self.forecasts;
        let due =
            |id: &&u32| forecasts[**id as usize].as_ref().is_some_and(|f| (f.step, f.layer) <= (now.step, now.layer));
        self.batch.extend(self.live.iter().filter(due));
    }

    /// Ends a forecast.
    pub fn remove(&mut self, id: u32) -> Option<Forecast<L>> {
        let forecast = self.forecasts.get_mut(id as usize)?.take()?;
        self.at[forecast.layer.index()][forecast.expert.index()] = NONE;
        self.live.retain(|&l| l != id);
        self.free.push(id);
        Some(forecast)
    }
}
