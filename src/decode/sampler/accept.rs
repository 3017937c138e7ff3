//! The acceptance rule of speculative sampling: a token that was drawn from a draft distribution `q` is kept with
//! probability min(1, p / q), where `p` is what the sampler itself would draw from, and is otherwise replaced by a draw
//! from max(0, p - q), normalised. The token so chosen is distributed as `p`, whatever `q` is.
//!
//! A proposal that is certain (`q` is 1 for it) needs no second rule: drawing the token itself and keeping the proposal if
//! the two are equal keeps it with probability `p`, and what replaces it is distributed as `p` without it, which is what the
//! rule above asks for. So `Sampler::sample` is the standard rule for such proposals, and gives the very tokens of a text
//! without proposals.

use super::{Sampler, SamplerError, greedy};

/// A candidate and its probability. Lists are in ascending token id and sum to 1.
pub type Probable = (u32, f64);

impl Sampler {
    /// Whether it draws nothing.
    pub fn is_greedy(&self) -> bool {
        self.options.temperature == 0.0
    }

    /// Draws a proposal as [`Sampler::sample`] would, and says from which distribution.
    pub fn propose(&mut self, logits: &[f32], position: u64, q: &mut Vec<Probable>) -> Result<u32, SamplerError> {
        let best = greedy(logits, position)?;
        let token = self.draw(logits, best);
        let total: f64 = self.kept.iter().map(|c| c.2).sum();
        q.clear();
        q.extend(self.kept.iter().map(|c| (c.0, c.2 / total)));
        self.counters.tokens += 1;
        Ok(token)
    }

    /// Chooses the token for `position` where `proposal` was drawn from `q`. The proposal was kept if it is what comes
    /// back; a replacement is always another token.
    pub fn accept(
        &mut self,
        logits: &[f32],
        position: u64,
        proposal: u32,
        q: &[Probable],
    ) -> Result<u32, SamplerError> {
        let best = greedy(logits, position)?;
        self.begin_draw(logits, best);
        self.counters.tokens += 1;
        self.counters.ratio_tests += 1;
        let total: f64 = self.kept.iter().map(|c| c.2).sum();
        let own = self.kept.binary_search_by_key(&proposal, |c| c.0).map_or(0.0, |at| self.kept[at].2 / total);
        let drafted = q.binary_search_by_key(&proposal, |c| c.0).map_or(0.0, |at| q[at].1);
        let token = match self.state.next_unit() * drafted < own {
            true => proposal,
            false => self.replacement(proposal, q, total, best),
        };
        self.counters.not_greedy += u64::from(token != best);
        Ok(token)
    }

    /// Draws from max(0, p - q). The proposal is not in there: it was refused, so its p is below its q.
    fn replacement(&mut self, proposal: u32, q: &[Probable], total: f64, best: u32) -> u32 {
        let mut drafted = q.iter().peekable();
        for (token, _, weight) in &mut self.kept {
            while drafted.next_if(|c| c.0 < *token).is_some() {}
            let q = drafted.peek().filter(|c| c.0 == *token).map_or(0.0, |c| c.1);
            *weight = if *token == proposal { 0.0 } else { (*weight / total - q).max(0.0) };
        }
        self.pick(best)
    }
}

#[cfg(test)]
mod tests {
    use super::super::SamplerOptions;
    use super::*;
    use crate::stats::SplitMix64;

    fn sampler(options: SamplerOptions) -> Sampler {
        Sampler::new(options).unwrap()
    }

    /// Pearson's statistic of counts against probabilities, and its degrees of freedom.
    fn chi_square(counts: &[u64], p: &[f64]) -> (f64, usize) {
        let n: u64 = counts.iter().sum();
        let cells = counts.iter().zip(p).filter(|(_, p)| **p > 0.0);
        let sum = cells.clone().map(|(c, p)| (*c as f64 - n as f64 * p).powi(2) / (n as f64 * p)).sum();
        (sum, cells.count() - 1)
    }

    /// What `options` draws from, computed apart from the sampler.
    fn target(logits: &[f32], options: &SamplerOptions) -> Vec<f64> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let mut weights: Vec<f64> =
            logits.iter().map(|l| (f64::from(*l) / f64::from(options.temperature)).exp()).collect();
        if options.top_k > 0 {
            order[options.top_k as usize..].iter().for_each(|&i| weights[i] = 0.0);
        }
        let total: f64 = weights.iter().sum();
        let mut reached = 0.0;
        for &i in &order {
            if reached >= f64::from(options.top_p) {
                weights[i] = 0.0;
            }
            reached += weights[i] / total;
        }
        let total: f64 = weights.iter().sum();
        weights.iter().map(|w| w / total).collect()
    }

    #[test]
    fn the_chosen_token_is_distributed_as_without_proposals() {
        let logits = [0.3f32, 1.9, -0.7, 1.2, 0.0, -2.0];
        let drafts = [
            [0.1f32, 0.2, 0.1, 2.5, 0.0, 0.4],   // wrong about the best
            [0.3, 1.9, -0.7, 1.2, 0.0, -2.0],    // the same: nothing is ever refused
            [-9.0, -9.0, -9.0, -9.0, -9.0, 4.0], // nearly certain of the least likely
        ];
        let base = SamplerOptions { temperature: 0.9, ..SamplerOptions::default() };
        // 0.1 % points of chi-square with 1 to 5 degrees of freedom; seeds are fixed, so the test cannot be unlucky.
        let critical = [10.83, 13.82, 16.27, 18.47, 20.52];
        for options in [base, SamplerOptions { top_k: 3, ..base }, SamplerOptions { top_p: 0.8, ..base }] {
            let p = target(&logits, &options);
            for (which, draft) in drafts.iter().enumerate() {
                let (mut counts, mut kept) = ([0u64; 6], 0);
                let mut seeds = SplitMix64::new(41 + which as u64);
                let (runs, mut q) = (30_000, Vec::new());
                for _ in 0..runs {
                    let mut target = sampler(SamplerOptions { seed: seeds.next_u64(), ..options });
                    let mut drafter = sampler(SamplerOptions { seed: seeds.next_u64(), ..options });
                    let proposal = drafter.propose(draft, 0, &mut q).unwrap();
                    let token = target.accept(&logits, 0, proposal, &q).unwrap();
                    counts[token as usize] += 1;
                    kept += u64::from(token == proposal);
                }
                let (x, freedom) = chi_square(&counts, &p);
                assert!(x < critical[freedom - 1], "{options:?} draft {which}: {counts:?} for {p:?}, {x}");
                assert!(counts.iter().zip(&p).all(|(c, p)| *p > 0.0 || *c == 0), "{counts:?}");
                // the rule keeps a proposal with probability sum min(p, q)
                let drafted = target(draft, &options);
                let share: f64 = p.iter().zip(&drafted).map(|(p, q)| p.min(*q)).sum::<f64>().min(1.0);
                let seen = kept as f64 / runs as f64;
                let error = 4.0 * (share * (1.0 - share) / runs as f64).sqrt() + 1e-9;
                assert!((seen - share).abs() <= error, "{options:?} draft {which}: kept {seen}, expected {share}");
            }
        }
    }

    #[test]
    fn a_certain_proposal_needs_no_other_rule_than_drawing_the_token() {
        let logits = [0.3f32, 1.9, -0.7, 1.2];
        let options = SamplerOptions { temperature: 1.0, ..SamplerOptions::default() };
        let p = target(&logits, &options);
        let proposal = 3u32;
        let (mut drawn, mut tested) = ([0u64; 4], [0u64; 4]);
        for seed in 0..30_000 {
            let mut s = sampler(SamplerOptions { seed, ..options });
            drawn[s.sample(&logits, 0).unwrap() as usize] += 1;
            let mut s = sampler(SamplerOptions { seed: !seed, ..options });
            tested[s.accept(&logits, 0, proposal, &[(proposal, 1.0)]).unwrap() as usize] += 1;
        }
        for counts in [drawn, tested] {
            let (x, freedom) = chi_square(&counts, &p);
            assert!(freedom == 3 && x < 16.27, "{counts:?} for {p:?}: {x}");
        }
    }

    #[test]
    fn a_seed_repeats_and_bad_logits_are_named() {
        let options = SamplerOptions { temperature: 1.0, seed: 9, ..SamplerOptions::default() };
        let run = || {
            let (mut s, mut q) = (sampler(options), Vec::new());
            (0..50)
                .map(|p| {
                    let logits = [0.1 * p as f32, 1.0, 0.5];
                    let proposal = s.propose(&[0.5, 0.1, 0.2], p, &mut q).unwrap();
                    s.accept(&logits, p, proposal, &q).unwrap()
                })
                .collect::<Vec<u32>>()
        };
        assert_eq!(run(), run());
        let e = sampler(options).accept(&[f32::NAN], 7, 0, &[(0, 1.0)]).unwrap_err().to_string();
        assert!(e.contains("position 7"), "{e}");
    }
}
