//! Which experts stay in memory: the policies of the expert cache as pure bookkeeping of keys and places. What lies at a
//! place is somebody else's (`resident`).
//!
//! - `lru`: the expert whose last use is longest ago goes.
//! - `lfu-decay`: every use counts 1, and every forward pass leaves 31/32 of each count (half of it after 22 passes); the
//!   lowest count goes, of equal ones the one used longest ago. A newcomer whose count is lower than that of every
//!   expert that could go is not taken in.
//! - `pinned`: the hottest experts of a heat file, as many as there are places; others are never taken in, and none goes.

use crate::ids::{ExpertId, LayerId};
use serde::{Deserialize, Serialize};

/// A way of choosing who stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// The most recently used.
    #[default]
    Lru,
    /// The most often used, old uses counting less.
    LfuDecay,
    /// The hottest of a heat file.
    Pinned,
}

impl CachePolicy {
    /// All of them; the place in this list is the place in counters.
    pub const ALL: [Self; 3] = [Self::Lru, Self::LfuDecay, Self::Pinned];

    /// Its name in options and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::LfuDecay => "lfu-decay",
            Self::Pinned => "pinned",
        }
    }
}

/// How often an expert was used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heat {
    /// Its layer.
    pub layer: LayerId,
    /// The expert.
    pub expert: ExpertId,
    /// Uses.
    pub count: u64,
}

/// What a forward pass leaves of a count.
const KEEP: f64 = 31.0 / 32.0;
/// No place.
const NOWHERE: u32 = u32::MAX;

/// What becomes of an expert that wants to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It gets a place that was free.
    Free(u32),
    /// It gets the place of an expert that goes.
    Evict {
        /// The place.
        place: u32,
        /// `lru` would have let another one go.
        not_lru: bool,
    },
    /// It does not stay: the policy prefers those that are there.
    Refused,
    /// It does not stay: everything there is in use.
    Busy,
}

/// Who is where, and who goes next. Everything is allocated when it is made.
#[derive(Debug)]
pub struct Cache {
    policy: CachePolicy,
    places: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// By layer, then expert.
    experts: Vec<Vec<Known>>,
    passes: u64,
    uses: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    layer: LayerId,
    expert: ExpertId,
    /// Number of its last use.
    used: u64,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    place: u32,
    count: f64,
    /// The pass in which `count` was right.
    pass: u64,
    pinned: bool,
}

impl Cache {
    /// `places` places for experts of `layers[layer]` experts each. `heat` is what `pinned` pins by.
    pub fn new(policy: CachePolicy, places: u32, layers: &[usize], heat: &[Heat]) -> Self {
        let blank = Known { place: NOWHERE, count: 0.0, pass: 0, pinned: false };
        let mut experts: Vec<Vec<Known>> = layers.iter().map(|&n| vec![blank; n]).collect();
        let mut hottest: Vec<&Heat> = heat.iter().filter(|h| h.count > 0).collect();
        hottest.sort_unstable_by_key(|h| (std::cmp::Reverse(h.count), h.layer, h.expert));
        for heat in hottest.into_iter().take(places as usize) {
            if let Some(known) = experts.get_mut(heat.layer.index()).and_then(|l| l.get_mut(heat.expert.index())) {
                known.pinned = true;
            }
        }
        Self {
            policy,
            places: vec![None; places as usize],
            free: (0..places).rev().collect(),
            experts,
            passes: 0,
            uses: 0,
        }
    }

    /// The policy.
    pub fn policy(&self) -> CachePolicy {
        self.policy
    }

    /// Experts that are there.
    pub fn len(&self) -> u32 {
        (self.places.len() - self.free.len()) as u32
    }

    /// Nobody is there.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A forward pass begins.
    pub fn pass(&mut self) {
        self.passes += 1;
    }

    /// Where an expert is.
    pub fn find(&self, layer: LayerId, expert: ExpertId) -> Option<u32> {
        let place = self.experts.get(layer.index())?.get(expert.index())?.place;
        (place != NOWHERE).then_some(place)
    }

    /// An expert is demanded. Returns where it is.
    pub fn demand(&mut self, layer: LayerId, expert: ExpertId) -> Option<u32> {
        self.uses += 1;
        let passes = self.passes;
        let known = self.experts.get_mut(layer.index())?.get_mut(expert.index())?;
        known.count = known.now(passes) + 1.0;
        known.pass = passes;
        let place = (known.place != NOWHERE).then_some(known.place)?;
        if let Some(entry) = &mut self.places[place as usize] {
            entry.used = self.uses;
        }
        Some(place)
    }

    /// Where an expert that has been read could stay. `idle(place)` says whether whoever is there could go.
    pub fn place_for(&self, layer: LayerId, expert: ExpertId, idle: impl Fn(u32) -> bool) -> Place {
        let known = self.experts.get(layer.index()).and_then(|l| l.get(expert.index()));
        let Some(known) = known.filter(|k| k.place == NOWHERE) else { return Place::Refused };
        if self.policy == CachePolicy::Pinned && !known.pinned {
            return Place::Refused;
        }
        if let Some(&place) = self.free.last() {
            return Place::Free(place);
        }
        let there = || {
            let all = self.places.iter().enumerate().filter_map(|(place, e)| Some((place as u32, e.as_ref()?)));
            all.filter(|(place, _)| idle(*place))
        };
        let Some((oldest, _)) = there().min_by_key(|(_, e)| e.used) else { return Place::Busy };
        match self.policy {
            CachePolicy::Lru => Place::Evict { place: oldest, not_lru: false },
            CachePolicy::Pinned => Place::Refused,
            CachePolicy::LfuDecay => {
                let count = |e: &Entry| self.experts[e.layer.index()][e.expert.index()].now(self.passes);
                let order = |a: &(u32, &Entry), b: &(u32, &Entry)| {
                    count(a.1).total_cmp(&count(b.1)).then(a.1.used.cmp(&b.1.used))
                };
                match there().min_by(order) {
                    Some((place, least)) if known.now(self.passes) >= count(least) => {
                        Place::Evict { place, not_lru: place != oldest }
                    }
                    _ => Place::Refused,
                }
            }
        }
    }

    /// An expert goes to a free place.
    pub fn insert(&mut self, place: u32, layer: LayerId, expert: ExpertId) {
        self.free.retain(|&p| p != place);
        self.places[place as usize] = Some(Entry { layer, expert, used: self.uses });
        self.experts[layer.index()][expert.index()].place = place;
    }

    /// Whoever is at `place` goes.
    pub fn remove(&mut self, place: u32) -> Option<(LayerId, ExpertId)> {
        let entry = self.places[place as usize].take()?;
        self.experts[entry.layer.index()][entry.expert.index()].place = NOWHERE;
        self.free.push(place);
        Some((entry.layer, entry.expert))
    }
}

impl Known {
    fn now(&self, passes: u64) -> f64 {
        self.count * KEEP.powi(i32::try_from(passes - self.pass).unwrap_or(i32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const L: LayerId = LayerId(0);

    /// Demands experts one after the other, a pass each, and says after each who is there, ascending.
    fn play(policy: CachePolicy, places: u32, heat: &[Heat], demands: &[u16]) -> Vec<Vec<u16>> {
        let mut cache = Cache::new(policy, places, &[8], heat);
        let step = |cache: &mut Cache, expert: u16| {
            cache.pass();
            if cache.demand(L, ExpertId(expert)).is_none() {
                match cache.place_for(L, ExpertId(expert), |_| true) {
                    Place::Free(place) => cache.insert(place, L, ExpertId(expert)),
                    Place::Evict { place, .. } => {
                        cache.remove(place).unwrap();
                        cache.insert(place, L, ExpertId(expert));
                    }
                    Place::Refused | Place::Busy => {}
                }
            }
            (0..8).filter(|&e| cache.find(L, ExpertId(e)).is_some()).collect()
        };
        demands.iter().map(|&e| step(&mut cache, e)).collect()
    }

    #[test]
    fn lru_lets_the_longest_unused_go() {
        // 1 2 3 fill; 1 is used again; 4 replaces 2, the longest unused; 2 replaces 3; 5 replaces 1.
        let seen = play(CachePolicy::Lru, 3, &[], &[1, 2, 3, 1, 4, 2, 5]);
        let want: [&[u16]; 7] = [&[1], &[1, 2], &[1, 2, 3], &[1, 2, 3], &[1, 3, 4], &[1, 2, 4], &[2, 4, 5]];
        assert_eq!(seen, want);
    }

    #[test]
    fn lfu_lets_the_lowest_count_go_and_old_counts_fade() {
        // Counts when 3 comes (pass 5): 1 has (31/32)^4 + (31/32)^3 = 1.79, 2 has (31/32)^1 twice faded = 1.91; 3 has 1: it
        // is lower than both and not taken in.
        assert_eq!(play(CachePolicy::LfuDecay, 2, &[], &[1, 1, 2, 2, 3]).last().unwrap(), &[1, 2]);
        // One use each: 1 (0.94 after two passes) is below 3 (1.0), and goes, for it is lower than 2 (0.97).
        assert_eq!(play(CachePolicy::LfuDecay, 2, &[], &[1, 2, 3]).last().unwrap(), &[2, 3]);
        // Used twice, but 22 passes ago: 1 has 2 x 0.497 = 0.99 < 1 of a newcomer. Passes in between are hits of 2.
        let long: Vec<u16> = [1, 1].into_iter().chain([2; 22]).chain([3]).collect();
        assert_eq!(play(CachePolicy::LfuDecay, 2, &[], &long).last().unwrap(), &[2, 3]);
        let short: Vec<u16> = [1, 1].into_iter().chain([2; 19]).chain([3]).collect();
        assert_eq!(play(CachePolicy::LfuDecay, 2, &[], &short).last().unwrap(), &[1, 2], "19 passes ago: 1.06");
        // Twice in the same pass count the same, and of equal counts the longest unused goes.
        let mut cache = Cache::new(CachePolicy::LfuDecay, 2, &[8], &[]);
        cache.pass();
        for e in [5, 4] {
            cache.demand(L, ExpertId(e));
            let Place::Free(place) = cache.place_for(L, ExpertId(e), |_| true) else { panic!("full") };
            cache.insert(place, L, ExpertId(e));
        }
        cache.demand(L, ExpertId(6));
        let first = cache.find(L, ExpertId(5)).unwrap();
        assert_eq!(cache.place_for(L, ExpertId(6), |_| true), Place::Evict { place: first, not_lru: false });
        let other = cache.find(L, ExpertId(4)).unwrap();
        let busy = |place| place != first;
        assert_eq!(cache.place_for(L, ExpertId(6), busy), Place::Evict { place: other, not_lru: false });
        assert_eq!(cache.place_for(L, ExpertId(6), |_| false), Place::Busy, "what is in use cannot go");
        cache.demand(L, ExpertId(5));
        cache.demand(L, ExpertId(5));
        cache.demand(L, ExpertId(4));
        // 4 was used last, but less often.
        assert_eq!(cache.place_for(L, ExpertId(6), |_| true), Place::Refused, "its count of 1 is below 2 and 3");
        cache.demand(L, ExpertId(6));
        assert_eq!(cache.place_for(L, ExpertId(6), |_| true), Place::Evict { place: other, not_lru: true });
    }

    #[test]
    fn pinned_keeps_the_hottest_and_nobody_else() {
        let heat = |expert, count| Heat { layer: L, expert: ExpertId(expert), count };
        let heats = [heat(1, 5), heat(2, 9), heat(3, 5), heat(4, 0)];
        // Two places: 2, and of 1 and 3 the first.
        let seen = play(CachePolicy::Pinned, 2, &heats, &[3, 2, 5, 1, 3, 6]);
        let want: [&[u16]; 6] = [&[], &[2], &[2], &[1, 2], &[1, 2], &[1, 2]];
        assert_eq!(seen, want);
        assert!(play(CachePolicy::Pinned, 9, &heats, &[4]).last().unwrap().is_empty(), "never used is not hot");
    }
}
