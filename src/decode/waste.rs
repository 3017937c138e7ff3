//! Keeps the reads that a prompt causes near those that it needs. A pass over a prompt asks each layer for many experts
//! once, so a wrong guess is bytes for nothing and a right one only moves a read: guesses about such a pass are let through
//! only as long as what they are expected to waste stays below a fiftieth of what the prompt asks for. How likely a guess is
//! right is learned by how strongly it was made. It is a bound on what is expected, not on what chance can do. Knows counts only; allocates only when it is made.

use crate::ids::ExpertId;
use crate::source::Guess;

/// What may be read for nothing, as a share of what passes over the prompt have asked for.
const MAX_WASTE: f64 = 0.02;
/// Share of what may still be wasted that one layer may risk: chance must not spend all of it at once.
const RISK: f64 = 0.5;
/// Strengths that are told apart: rows that speak for an expert, the last one standing for more.
const STRENGTHS: usize = 16;
/// Guesses of a strength that weigh on the next prompt at most.
const MEMORY: f64 = 50.0;
/// Guesses, and the right ones among them, that a strength is taken to have seen before any: one in two, and more where
/// several rows agree.
const WEAK_PRIOR: (f64, f64) = (2.0, 1.0);
const STRONG_PRIOR: (f64, f64) = (4.0, 3.0);

/// Guesses of one strength that their layer has answered.
#[derive(Clone, Copy, Debug, Default)]
struct Judged {
    said: f64,
    right: f64,
}

/// The account of a prompt.
#[derive(Default)]
pub(super) struct WasteBound {
    experts: usize,
    /// Experts that passes over the prompt have asked for.
    asked: u64,
    /// Experts guessed that their layer did not ask for.
    wasted: u64,
    judged: [Judged; STRENGTHS],
    /// By layer and expert: 0, or one more than the strength with which it was guessed.
    told: Vec<u8>,
    /// By layer: wrong guesses to be expected of those told.
    at_risk: Vec<f64>,
}

impl WasteBound {
    /// For `layers` layers of `experts` experts.
    pub(super) fn new(layers: usize, experts: usize) -> Self {
        Self { experts, told: vec![0; layers * experts], at_risk: vec![0.0; layers], ..Self::default() }
    }

    /// Another prompt begins; how likely guesses are right stays known.
    pub(super) fn begin_prompt(&mut self) {
        (self.asked, self.wasted) = (0, 0);
        // another text may route otherwise: what was learned long ago must not outweigh what it shows
        for judged in &mut self.judged {
            let keep = MEMORY / judged.said.max(MEMORY);
            (judged.said, judged.right) = (judged.said * keep, judged.right * keep);
        }
        self.told.fill(0);
        self.at_risk.fill(0.0);
    }

    /// Cuts `guesses` about layer number `at`, the likeliest first, down to those that may be told, and keeps them.
    pub(super) fn limit(&mut self, at: usize, guesses: &mut Vec<Guess>) {
        let told = &mut self.told[at * self.experts..(at + 1) * self.experts];
        told.fill(0);
        self.at_risk[at] = 0.0;
        let room = self.asked as f64 * MAX_WASTE - self.wasted as f64 - self.at_risk.iter().sum::<f64>();
        let mut kept = 0;
        for guess in guesses.iter() {
            let strength = strength(guess.score);
            let risk = 1.0 - self.judged[strength].likelihood(strength);
            if self.at_risk[at] + risk > room * RISK {
                break;
            }
            self.at_risk[at] += risk;
            told[guess.expert.index()] = 1 + strength as u8;
            kept += 1;
        }
        guesses.truncate(kept);
    }

    /// Layer number `at` asks for `distinct`.
    pub(super) fn asked(&mut self, at: usize, distinct: &[ExpertId]) {
        self.asked += distinct.len() as u64;
        self.at_risk[at] = 0.0;
        let told = &mut self.told[at * self.experts..(at + 1) * self.experts];
        for expert in distinct {
            if let Some(strength) = std::mem::take(&mut told[expert.index()]).checked_sub(1) {
                let judged = &mut self.judged[usize::from(strength)];
                judged.said += 1.0;
                judged.right += 1.0;
            }
        }
        for told in told {
            if let Some(strength) = std::mem::take(told).checked_sub(1) {
                self.judged[usize::from(strength)].said += 1.0;
                self.wasted += 1;
            }
        }
    }
}

impl Judged {
    /// How likely another guess of this strength is right.
    fn likelihood(&self, strength: usize) -> f64 {
        let (said, right) = if strength > 1 { STRONG_PRIOR } else { WEAK_PRIOR };
        (self.right + right) / (self.said + said)
    }
}

/// Rows that speak for an expert with this score.
fn strength(score: f32) -> usize {
    // A cast from a float ends at 0 and at the largest integer.
    (score as usize).min(STRENGTHS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guesses(scores: &[f32]) -> Vec<Guess> {
        scores.iter().enumerate().map(|(i, &score)| Guess { expert: ExpertId(i as u16), score }).collect()
    }

    #[test]
    fn nothing_is_risked_before_anything_was_asked_for() {
        let mut bound = WasteBound::new(2, 64);
        let mut said = guesses(&[9.0, 8.0]);
        bound.limit(1, &mut said);
        assert!(said.is_empty());
    }

    #[test]
    fn waste_stays_below_a_fiftieth_at_any_steady_share_of_wrong_guesses() {
        for wrong_in_ten in 0..=10 {
            let (layers, experts) = (8, 64);
            let mut bound = WasteBound::new(layers, experts);
            let mut rng = fastrand::Rng::with_seed(wrong_in_ten);
            let (mut asked, mut wasted, mut told) = (0, 0, 0);
            for _pass in 0..20 {
                for at in 0..layers {
                    let mut said = guesses(&[3.5; 40]);
                    bound.limit(at, &mut said);
                    told += said.len();
                    let wrong: Vec<bool> = (0..40).map(|_| rng.u64(0..10) < wrong_in_ten).collect();
                    let distinct: Vec<ExpertId> =
                        (0..64).filter(|&i| i >= 40 || !wrong[i as usize]).map(ExpertId).collect();
                    wasted += said.iter().filter(|g| wrong[g.expert.index()]).count();
                    asked += distinct.len();
                    bound.asked(at, &distinct);
                }
            }
            assert!(wasted as f64 <= 0.02 * asked as f64, "{wrong_in_ten}: {wasted} of {asked}");
            match wrong_in_ten {
                0 => assert!(told > 4000, "right guesses are let through: {told}"),
                10 => assert!(told < 200, "wrong ones are not: {told}"),
                _ => {}
            }
        }
    }

    #[test]
    fn a_prompt_starts_with_an_empty_account_and_what_was_learned() {
        let mut bound = WasteBound::new(1, 64);
        let all: Vec<ExpertId> = (0..64).map(ExpertId).collect();
        for _ in 0..50 {
            bound.limit(0, &mut guesses(&[5.0; 40]));
            bound.asked(0, &all);
        }
        bound.begin_prompt();
        let mut said = guesses(&[5.0; 40]);
        bound.limit(0, &mut said);
        assert!(said.is_empty(), "nothing was asked for yet");
        bound.asked(0, &all);
        let mut said = guesses(&[5.0; 40]);
        bound.limit(0, &mut said);
        assert!(said.len() > 30, "little risk: {}", said.len());
    }
}
