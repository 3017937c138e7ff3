//! Guesses of the reader's own: which experts a later layer will ask for, from what layers asked for before. The reader
//! tells a [`Predictor`] what each barrier asks for, and may then ask about the layers behind it. Knows no drive, no
//! file (but for [`table_file`]) and no clock; allocates only when it is made.

mod same;
pub mod table;
pub mod table_file;

use crate::ids::{ExpertId, LayerId};
use crate::source::guess::{GuessCountsByDepth, GuessTally, MAX_LOOKAHEAD, rank};
use crate::source::{Guess, StepInfo};
use same::SameAsLast;
use table::{Table, TableError};

/// What was guessed about one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction<'a> {
    /// The pass, as [`StepInfo::step`] counts.
    pub step: u64,
    /// The layer.
    pub layer: LayerId,
    /// Experts, the likeliest first.
    pub guesses: &'a [Guess],
}

/// Guesses experts from what was asked for before, and keeps count of how good it was.
#[derive(Debug)]
pub struct Predictor {
    layers: Vec<LayerId>,
    rule: Rule,
    /// Pass and layer number of what was observed last.
    now: Option<(u64, usize)>,
    /// What was asked for there.
    picks: Vec<ExpertId>,
    /// By expert.
    scores: Vec<f32>,
    guesses: Vec<Guess>,
    tally: GuessTally,
}

#[derive(Debug)]
enum Rule {
    Same(SameAsLast),
    Markov(Box<Table>),
}

impl Predictor {
    /// Guesses that a layer asks for what it asked for in the pass before. `layers` are those with experts, ascending,
    /// of `experts` each.
    pub fn same_as_last(layers: &[LayerId], experts: usize) -> Self {
        Self::new(layers, experts, Rule::Same(SameAsLast::new(layers.len(), experts)))
    }

    /// Guesses by `table`, which must have been learnt from the model `model_id` with the same layers.
    pub fn markov(table: Table, model_id: &str, layers: &[LayerId], experts: usize) -> Result<Self, TableError> {
        table.check_fits(model_id, layers, experts)?;
        Ok(Self::new(layers, experts, Rule::Markov(Box::new(table))))
    }

    fn new(layers: &[LayerId], experts: usize, rule: Rule) -> Self {
        Self {
            layers: layers.to_vec(),
            rule,
            now: None,
            picks: Vec::with_capacity(experts),
            scores: vec![0.0; experts],
            guesses: Vec::with_capacity(experts),
            tally: GuessTally::new(layers.len(), experts, MAX_LOOKAHEAD),
        }
    }

    /// Farthest layer ahead that it can say anything about.
    pub fn reach(&self) -> u32 {
        match &self.rule {
            Rule::Same(_) => MAX_LOOKAHEAD as u32,
            Rule::Markov(table) => table.depth() as u32,
        }
    }

    /// A barrier opens: `ids` (distinct, any order) of `layer` are asked for. Layers that it was not made for are left out.
    pub fn observe(&mut self, step: &StepInfo, layer: LayerId, ids: &[ExpertId]) {
        let Ok(at) = self.layers.binary_search(&layer) else { return };
        self.tally.asked(step.step, at, ids);
        self.now = Some((step.step, at));
        self.picks.clear();
        self.picks.extend(ids.iter().filter(|e| e.index() < self.scores.len()).take(self.scores.len()));
        if let Rule::Same(rule) = &mut self.rule {
            rule.observe(step.step, at, &self.picks);
        }
    }

    /// At most `most` experts of the layer that comes `ahead` layers (of those with experts) after the one observed
    /// last; behind the last layer comes the first one of the next pass. `None` = nothing can be said.
    pub fn guess(&mut self, ahead: u32, most: usize) -> Option<Prediction<'_>> {
        let (step, at) = self.now?;
        let (count, ahead) = (self.layers.len(), ahead as usize);
        if !(1..=self.reach() as usize).contains(&ahead) {
            return None;
        }
        let (target, step) = ((at + ahead) % count, step + ((at + ahead) / count) as u64);
        self.guesses.clear();
        match &self.rule {
            Rule::Same(rule) => rule.guess(target, &mut self.guesses),
            Rule::Markov(table) => {
                table.score(at, ahead, &self.picks, &mut self.scores);
                for (expert, score) in self.scores.iter_mut().enumerate().filter(|(_, s)| **s > 0.0) {
                    self.guesses.push(Guess { expert: ExpertId(expert as u16), score: std::mem::take(score) });
                }
            }
        }
        rank(&mut self.guesses);
        self.guesses.truncate(most);
        if self.guesses.is_empty() {
            return None;
        }
        self.tally.said(step, target, ahead, &self.guesses);
        Some(Prediction { step, layer: self.layers[target], guesses: &self.guesses })
    }

    /// How good its guesses were, by distance.
    pub fn counts(&self) -> &GuessCountsByDepth {
        self.tally.counts()
    }
}

#[cfg(test)]
mod tests {
    use super::table::TableBuilder;
    use super::*;
    use crate::source::Phase;

    fn ids(list: &[u16]) -> Vec<ExpertId> {
        list.iter().copied().map(ExpertId).collect()
    }

    fn step(step: u64) -> StepInfo {
        StepInfo { step, phase: Phase::Decode, pos: step, rows: 1 }
    }

    /// Pass, layer, and experts with their scores.
    type Said = (u64, u16, Vec<(u16, f32)>);

    fn said(p: Option<Prediction<'_>>) -> Option<Said> {
        p.map(|p| (p.step, p.layer.0, p.guesses.iter().map(|g| (g.expert.0, g.score)).collect()))
    }

    const LAYERS: [LayerId; 3] = [LayerId(1), LayerId(2), LayerId(5)];

    #[test]
    fn the_pass_before_is_guessed_again_the_longest_streak_first() {
        let mut p = Predictor::same_as_last(&LAYERS, 8);
        p.observe(&step(0), LayerId(1), &ids(&[3, 4]));
        assert_eq!(said(p.guess(1, 9)), None, "layer 2 has never asked");
        assert_eq!(said(p.guess(3, 9)), Some((1, 1, vec![(3, 1.0), (4, 1.0)])), "the same layer, one pass later");
        p.observe(&step(0), LayerId(2), &ids(&[0, 7]));
        p.observe(&step(0), LayerId(5), &ids(&[1]));
        assert_eq!(said(p.guess(1, 9)), Some((1, 1, vec![(3, 1.0), (4, 1.0)])));
        p.observe(&step(1), LayerId(1), &ids(&[4, 6]));
        assert_eq!(said(p.guess(1, 9)), Some((1, 2, vec![(0, 1.0), (7, 1.0)])));
        assert_eq!(said(p.guess(2, 9)), Some((1, 5, vec![(1, 1.0)])));
        p.observe(&step(1), LayerId(2), &ids(&[7, 2]));
        p.observe(&step(1), LayerId(5), &ids(&[1]));
        assert_eq!(said(p.guess(1, 1)), Some((2, 1, vec![(4, 2.0)])), "bounded, and 4 was asked for twice running");
        assert_eq!(said(p.guess(2, 9)), Some((2, 2, vec![(7, 2.0), (2, 1.0)])));
        assert_eq!(said(p.guess(0, 9)), None);
        let one = p.counts()[0];
        assert_eq!((one.hints, one.guessed, one.hits, one.asked), (3, 4, 2, 4), "3, 4 for 4, 6; then 0, 7 for 7, 2");
    }

    #[test]
    fn a_table_worked_by_hand() {
        let mut builder = TableBuilder::new(&LAYERS, 2).unwrap();
        // layer 1 -> layer 2: 3 leads to 0 twice and to 1 once; 4 leads to 1 once
        builder.add(0, 1, &ids(&[3]), &ids(&[0, 1])).unwrap();
        builder.add(0, 1, &ids(&[3, 4]), &ids(&[0])).unwrap();
        builder.add(0, 1, &ids(&[4]), &ids(&[1])).unwrap();
        // layer 1 -> layer 5, and layer 5 -> layer 1 of the next pass
        builder.add(0, 2, &ids(&[3]), &ids(&[6])).unwrap();
        builder.add(2, 1, &ids(&[6]), &ids(&[3])).unwrap();
        let table = builder.finish("m", 8);
        let mut p = Predictor::markov(table.clone(), "m", &LAYERS, 8).unwrap();
        p.observe(&step(9), LayerId(1), &ids(&[4, 3]));
        // 3 was seen twice: 0 follows with 2/2, 1 with 1/2; 4 twice: 0 with 1/2, 1 with 1/2
        assert_eq!(said(p.guess(1, 9)), Some((9, 2, vec![(0, 1.5), (1, 1.0)])));
        assert_eq!(said(p.guess(1, 9)), Some((9, 2, vec![(0, 1.5), (1, 1.0)])), "scores start from nothing");
        assert_eq!(said(p.guess(2, 9)), Some((9, 5, vec![(6, 1.0)])));
        assert_eq!(said(p.guess(3, 9)), None, "beyond the table");
        p.observe(&step(9), LayerId(2), &ids(&[0]));
        assert_eq!(said(p.guess(1, 9)), None, "nothing was learnt there");
        p.observe(&step(9), LayerId(5), &ids(&[6]));
        assert_eq!(said(p.guess(1, 9)), Some((10, 1, vec![(3, 1.0)])));
        for (model, layers, experts) in [("n", &LAYERS[..], 8), ("m", &LAYERS[..2], 8), ("m", &LAYERS[..], 6)] {
            assert!(Predictor::markov(table.clone(), model, layers, experts).is_err());
        }
    }
}
