//! Same as last: a layer asks for what it asked for in the pass before. Among those the ones come first that it has
//! asked for in the most passes running.

use crate::ids::ExpertId;
use crate::source::Guess;

/// What every layer asked for last.
#[derive(Debug)]
pub(super) struct SameAsLast {
    experts: usize,
    /// By layer: the pass in which it asked last.
    last: Vec<Option<u64>>,
    /// By layer, then expert: the pass in which it was asked for last, and in how many passes running.
    used: Vec<Option<(u64, u32)>>,
}

impl SameAsLast {
    pub(super) fn new(layers: usize, experts: usize) -> Self {
        Self { experts, last: vec![None; layers], used: vec![None; layers * experts] }
    }

    /// Layer number `at` asks for `ids`, all below the number of experts.
    pub(super) fn observe(&mut self, step: u64, at: usize, ids: &[ExpertId]) {
        let before = self.last[at].replace(step);
        for id in ids {
            let used = &mut self.used[at * self.experts + id.index()];
            let streak = match *used {
                Some((pass, streak)) if Some(pass) == before => streak.saturating_add(1),
                _ => 1,
            };
            *used = Some((step, streak));
        }
    }

    /// Adds what layer number `at` asked for last, scored by streak.
    pub(super) fn guess(&self, at: usize, out: &mut Vec<Guess>) {
        let Some(last) = self.last[at] else { return };
        for (expert, used) in self.used[at * self.experts..][..self.experts].iter().enumerate() {
            if let Some((_, streak)) = used.filter(|(pass, _)| *pass == last) {
                out.push(Guess { expert: ExpertId(expert as u16), score: streak as f32 });
            }
        }
    }
}
