//! Guesses about experts as plain data, and how good they were: what was said about a layer is kept until that layer
//! asks, and the two are compared. Knows neither who guesses nor what a guess causes.

use super::Guess;
use crate::ids::ExpertId;
use serde::{Deserialize, Serialize};

/// Most layers ahead that anybody guesses.
pub const MAX_LOOKAHEAD: usize = 8;

/// How good guesses were that were made so many layers ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuessCounts {
    /// Times that something was said about a layer.
    pub hints: u64,
    /// Experts guessed for layers that then asked.
    pub guessed: u64,
    /// Those among them that were asked for.
    pub hits: u64,
    /// Experts that those layers asked for.
    pub asked: u64,
    /// Experts guessed and taken back before their layer asked; in none of the figures above.
    pub retracted: u64,
}

impl GuessCounts {
    /// Share of the guessed experts that were asked for; 0 with no guess.
    pub fn hit_rate(&self) -> f64 {
        if self.guessed == 0 { 0.0 } else { self.hits as f64 / self.guessed as f64 }
    }

    /// Share of the experts asked for that had been guessed; 0 with no guess.
    pub fn recall(&self) -> f64 {
        if self.asked == 0 { 0.0 } else { self.hits as f64 / self.asked as f64 }
    }

    /// The sum of two counts.
    pub fn plus(self, other: Self) -> Self {
        Self {
            hints: self.hints + other.hints,
            guessed: self.guessed + other.guessed,
            hits: self.hits + other.hits,
            asked: self.asked + other.asked,
            retracted: self.retracted + other.retracted,
        }
    }
}

/// Counts by how many layers ahead a guess was made: `[0]` = one layer.
pub type GuessCountsByDepth = [GuessCounts; MAX_LOOKAHEAD];

/// What has been said about layers that have not asked yet, and the counts. Allocates only when it is made.
#[derive(Clone, Debug, Default)]
pub struct GuessTally {
    experts: usize,
    depth: usize,
    /// By layer, then distance: the pass that was spoken of, and how many experts were named.
    said: Vec<Option<(u64, usize)>>,
    /// The experts named, `experts` places for each.
    ids: Vec<ExpertId>,
    /// By expert: the last ask that named it.
    asked_in: Vec<u64>,
    asks: u64,
    counts: GuessCountsByDepth,
}

impl GuessTally {
    /// Room for guesses about `layers` layers of `experts` experts, made at most `depth` layers ahead.
    pub fn new(layers: usize, experts: usize, depth: usize) -> Self {
        let depth = depth.min(MAX_LOOKAHEAD);
        Self {
            experts,
            depth,
            said: vec![None; layers * depth],
            ids: vec![ExpertId(0); layers * depth * experts],
            asked_in: vec![0; experts],
            asks: 0,
            counts: Default::default(),
        }
    }

    /// Keeps what was said `ahead` layers before layer number `at` (counted among those with experts) of pass `step`.
    pub fn said(&mut self, step: u64, at: usize, ahead: usize, guesses: &[Guess]) {
        if !(1..=self.depth).contains(&ahead) {
            return;
        }
        let place = at * self.depth + ahead - 1;
        let count = guesses.len().min(self.experts);
        for (id, guess) in self.ids[place * self.experts..].iter_mut().zip(&guesses[..count]) {
            *id = guess.expert;
        }
        self.said[place] = Some((step, count));
        self.counts[ahead - 1].hints += 1;
    }

    /// What was said about layer number `at` of pass `step` has been taken back.
    pub fn retracted(&mut self, step: u64, at: usize) {
        for ahead in 0..self.depth {
            let said = &mut self.said[at * self.depth + ahead];
            if let Some((_, count)) = said.take_if(|(s, _)| *s == step) {
                self.counts[ahead].retracted += count as u64;
            }
        }
    }

    /// Layer number `at` of pass `step` asks for `experts` (distinct): compares.
    pub fn asked(&mut self, step: u64, at: usize, experts: &[ExpertId]) {
        self.asks += 1;
        for expert in experts {
            if let Some(place) = self.asked_in.get_mut(expert.index()) {
                *place = self.asks;
            }
        }
        for ahead in 0..self.depth {
            let place = at * self.depth + ahead;
            let Some((said_of, count)) = self.said[place].take() else { continue };
            if said_of != step {
                continue;
            }
            let ids = &self.ids[place * self.experts..][..count];
            let hits = ids.iter().filter(|id| self.asked_in.get(id.index()) == Some(&self.asks)).count();
            let counts = &mut self.counts[ahead];
            counts.guessed += count as u64;
            counts.hits += hits as u64;
            counts.asked += experts.len() as u64;
        }
    }

    /// The counts so far.
    pub fn counts(&self) -> &GuessCountsByDepth {
        &self.counts
    }
}

/// Puts the likeliest first: by score, equal ones by expert.
pub fn rank(guesses: &mut [Guess]) {
    guesses.sort_unstable_by(|a, b| b.score.total_cmp(&a.score).then(a.expert.cmp(&b.expert)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guesses(ids: &[u16]) -> Vec<Guess> {
        ids.iter().map(|&id| Guess { expert: ExpertId(id), score: 1.0 }).collect()
    }

    #[test]
    fn guesses_are_compared_with_what_their_layer_asks_for() {
        let mut tally = GuessTally::new(2, 8, 2);
        tally.said(5, 1, 2, &guesses(&[0, 1, 2]));
        tally.said(5, 1, 1, &guesses(&[1, 7]));
        tally.asked(5, 0, &[ExpertId(1)]); // nobody spoke of this layer
        tally.asked(5, 1, &[ExpertId(2), ExpertId(1), ExpertId(3)]);
        let near = GuessCounts { hints: 1, guessed: 2, hits: 1, asked: 3, retracted: 0 };
        let far = GuessCounts { hints: 1, guessed: 3, hits: 2, asked: 3, retracted: 0 };
        assert_eq!(tally.counts()[..2], [near, far]);
        tally.asked(6, 1, &[ExpertId(1)]);
        assert_eq!(tally.counts()[..2], [near, far], "compared once");
        assert_eq!((near.hit_rate(), near.recall()), (0.5, 1.0 / 3.0));
    }

    #[test]
    fn what_is_taken_back_or_about_another_pass_is_neither_hit_nor_miss() {
        let mut tally = GuessTally::new(1, 4, 1);
        tally.said(7, 0, 1, &guesses(&[0, 1]));
        tally.retracted(8, 0); // another pass
        tally.retracted(7, 0);
        tally.asked(7, 0, &[ExpertId(0)]);
        tally.said(7, 0, 1, &guesses(&[3]));
        tally.asked(9, 0, &[ExpertId(3)]);
        tally.said(9, 0, 2, &guesses(&[3])); // farther than it keeps
        assert_eq!(tally.counts()[0], GuessCounts { hints: 2, guessed: 0, hits: 0, asked: 0, retracted: 2 });
        assert_eq!(tally.counts()[1], GuessCounts::default());
    }

    #[test]
    fn ranks_by_score_then_expert() {
        let guess = |id, score| Guess { expert: ExpertId(id), score };
        let mut all = [guess(4, 1.0), guess(2, 1.0), guess(9, 3.0)];
        rank(&mut all);
        assert_eq!(all.map(|g| g.expert.0), [9, 2, 4]);
    }
}
