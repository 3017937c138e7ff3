//! Experts that stay in memory: the cache's bookkeeping joined with the slots that it is about. A slot moves in without a
//! copy, is lent any number of times, and goes only while nobody has it on loan.

use super::cache::{Cache, CachePolicy, Heat, Place};
use super::counters::CacheCounters;
use crate::ids::{ExpertId, LayerId};
use crate::io::{Kept, Slot};
use crate::knob::{self, Knob};
use crate::layout::plan::Plan;
use crate::source::{Lease, LeaseOwner};
use std::sync::Arc;

/// The cache of a reader.
pub(super) struct Resident {
    cache: Cache,
    /// What lies at each place.
    kept: Vec<Option<Kept>>,
    /// By layer, then expert: was here and had to go.
    evicted: Vec<Vec<bool>>,
    last_step: Option<u64>,
}

impl Resident {
    /// `places` places, for experts of `plan`.
    pub fn new(policy: CachePolicy, places: u32, plan: &Plan, heat: &[Heat]) -> Self {
        let lied = match policy {
            CachePolicy::Lru if knob::forced(Knob::CachePolicy) => CachePolicy::LfuDecay,
            asked if asked != CachePolicy::Lru && knob::skipped(Knob::CachePolicy) => CachePolicy::Lru,
            asked => asked,
        };
        let layers = plan.layers.keys().map(|l| l.index() + 1).max().unwrap_or(0);
        let experts = |layer: usize| plan.layers.get(&LayerId(layer as u16)).map_or(0, |l| l.0.len());
        let shape: Vec<usize> = (0..layers).map(experts).collect();
        Self {
            cache: Cache::new(lied, places, &shape, heat),
            kept: (0..places).map(|_| None).collect(),
            evicted: shape.iter().map(|&n| vec![false; n]).collect(),
            last_step: None,
        }
    }

    /// A barrier of pass `step` opens.
    pub fn begin(&mut self, step: u64) {
        if self.last_step.replace(step) != Some(step) {
            self.cache.pass();
        }
    }

    /// Whether an expert is here.
    pub fn holds(&self, layer: LayerId, expert: ExpertId) -> bool {
        self.cache.find(layer, expert).is_some()
    }

    /// Whether an expert was here and had to go.
    pub fn had(&self, layer: LayerId, expert: ExpertId) -> bool {
        self.evicted[layer.index()][expert.index()]
    }

    /// An expert is demanded: a loan of its `bytes` bytes, if it is here.
    pub fn demand(&mut self, layer: LayerId, expert: ExpertId, bytes: u32) -> Option<Lease> {
        let place = self.cache.demand(layer, expert)?;
        let (owner, slot) = self.kept[place as usize].as_ref()?.lend();
        Some(Lease::new(expert, owner, slot, 0, bytes))
    }

    /// An expert that was read is about to be handed over from `slot`: it moves in if the policy wants it. Returns the
    /// loan to hand over.
    pub fn admit(
        &mut self,
        layer: LayerId,
        expert: ExpertId,
        slot: Slot,
        seen: &mut CacheCounters,
    ) -> (Arc<dyn LeaseOwner>, u32) {
        let kept = &self.kept;
        let idle = |place: u32| kept[place as usize].as_ref().is_some_and(|k| k.loans() == 0);
        let chosen = self.cache.place_for(layer, expert, idle);
        let policy = self.cache.policy() as usize;
        let place = match chosen {
            Place::Free(place) => place,
            Place::Evict { place, not_lru } => {
                seen.choices_by_policy[policy] += 1;
                seen.choices_not_lru += u64::from(not_lru);
                if !self.evict(place) {
                    return slot.lend();
                }
                seen.evictions += 1;
                place
            }
            Place::Refused => {
                seen.refused += 1;
                seen.choices_by_policy[policy] += 1;
                seen.choices_not_lru += 1;
                return slot.lend();
            }
            Place::Busy => {
                seen.busy += 1;
                return slot.lend();
            }
        };
        match slot.keep() {
            Ok(kept) => {
                let loan = kept.lend();
                self.cache.insert(place, layer, expert);
                self.kept[place as usize] = Some(kept);
                self.evicted[layer.index()][expert.index()] = false;
                seen.insertions += 1;
                seen.most_slots = seen.most_slots.max(self.cache.len());
                loan
            }
            Err(slot) => slot.lend(), // a part of it is still out; it cannot be: `join` has widened it
        }
    }

    /// Lets whoever is at `place` go.
    fn evict(&mut self, place: u32) -> bool {
        let Some(kept) = self.kept[place as usize].take() else { return false };
        match kept.reclaim() {
            Ok(slot) => {
                drop(slot);
                if let Some((layer, expert)) = self.cache.remove(place) {
                    self.evicted[layer.index()][expert.index()] = true;
                }
                true
            }
            Err(kept) => {
                self.kept[place as usize] = Some(kept);
                false
            }
        }
    }
}
