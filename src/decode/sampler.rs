//! The choice of the next token from its logits: greedy, or a seeded draw after top-k and top-p. Knows nothing of
//! models or text. The generator is written out here (xoshiro256**, seeded by SplitMix64, both public formulas by
//! Blackman and Vigna), so that a recorded seed means the same tokens whatever a crate's next version does.

mod accept;

use crate::knob::{self, Knob};
use crate::stats::SplitMix64;
pub use accept::Probable;
use serde::{Deserialize, Serialize};

/// Hottest temperature accepted; beyond it every token is about equally likely.
const MAX_TEMPERATURE: f32 = 100.0;

/// Why no token can be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// A flag is out of range.
    #[error("--{flag} is {value}; expected {expected}")]
    Option {
        /// The flag's name without dashes.
        flag: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        expected: &'static str,
    },
    /// A logit is NaN or plus infinity: the forward pass went wrong before.
    #[error("the logit of token {token} is {value} at position {position} of the text; nothing was sampled")]
    Logit {
        /// Token id of the first such logit.
        token: usize,
        /// What it is.
        value: f32,
        /// Position of the token that was to be chosen.
        position: u64,
    },
    /// No token has a logit above minus infinity.
    #[error("no token is possible at position {position} of the text ({logits} logits, all minus infinity)")]
    NoToken {
        /// Position of the token that was to be chosen.
        position: u64,
        /// Logits given.
        logits: usize,
    },
    /// A saved state cannot come from this generator.
    #[error("the saved sampler state is all zeros, which the generator never reaches; the snapshot is damaged")]
    State,
}

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplerOptions {
    /// Logits are divided by it; 0 takes the largest logit and draws nothing.
    pub temperature: f32,
    /// Keep the fewest most likely tokens whose probability reaches this share; 1 keeps all.
    pub top_p: f32,
    /// Keep this many most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Start of the generator.
    pub seed: u64,
}

impl Default for SamplerOptions {
    /// Greedy.
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }
}

impl SamplerOptions {
    /// Checks the ranges; the message names the flag.
    pub fn validate(&self) -> Result<(), SamplerError> {
        if !(0.0..=MAX_TEMPERATURE).contains(&self.temperature) {
            let expected = "a number from 0 (greedy) to 100";
            return Err(SamplerError::Option { flag: "temperature", value: self.temperature.to_string(), expected });
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            let expected = "a number above 0 and at most 1 (1 keeps every token)";
            return Err(SamplerError::Option { flag: "top-p", value: self.top_p.to_string(), expected });
        }
        Ok(())
    }
}

/// Where a generator stands. Saved in session snapshots; four words and the number of draws made so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerState {
    /// xoshiro256** state words.
    pub words: [u64; 4],
    /// Draws since the seed: one for each token chosen at a temperature above 0, and one more for a sampled proposal that
    /// was replaced.
    pub draws: u64,
}

impl SamplerState {
    /// The state that `seed` stands for: four SplitMix64 outputs.
    pub fn seeded(seed: u64) -> Self {
        let mut mix = SplitMix64::new(seed);
        Self { words: std::array::from_fn(|_| mix.next_u64()), draws: 0 }
    }

    /// The state after `draws` more of them.
    pub fn after(mut self, draws: u64) -> Self {
        (0..draws).for_each(|_| _ = self.next_u64());
        self
    }

    /// The next 64 bits.
    fn next_u64(&mut self) -> u64 {
        let w = &mut self.words;
        let out = w[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = w[1] << 17;
        w[2] ^= w[0];
        w[3] ^= w[1];
        w[1] ^= w[2];
        w[0] ^= w[3];
        w[2] ^= shifted;
        w[3] = w[3].rotate_left(45);
        self.draws += 1;
        out
    }

    /// A number in [0, 1) with 53 random bits.
    fn next_unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// What a sampler did: the evidence for its options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerCounters {
    /// Tokens chosen.
    pub tokens: u64,
    /// Of these, by a draw.
    pub drawn: u64,
    /// Draws that gave another token than the most likely one.
    pub not_greedy: u64,
    /// Of the drawn ones, those that weighed a proposal against the distribution that it was drawn from.
    #[serde(default)]
    pub ratio_tests: u64,
    /// Times top-k removed a candidate.
    pub cut_by_top_k: u64,
    /// Times top-p removed a candidate.
    pub cut_by_top_p: u64,
    /// State of the generator at the first draw.
    pub first_words: [u64; 4],
}

impl SamplerCounters {
    /// Counts of two samplers together; the state is that of the first one that drew.
    pub fn plus(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            drawn: self.drawn + other.drawn,
            not_greedy: self.not_greedy + other.not_greedy,
            ratio_tests: self.ratio_tests + other.ratio_tests,
            cut_by_top_k: self.cut_by_top_k + other.cut_by_top_k,
            cut_by_top_p: self.cut_by_top_p + other.cut_by_top_p,
            first_words: if self.drawn > 0 { self.first_words } else { other.first_words },
        }
    }
}

/// Chooses tokens. Cloning it clones the generator, so that a rejected continuation can be taken back.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    state: SamplerState,
    counters: SamplerCounters,
    /// Candidates of the current call, kept to avoid an allocation per token: (token id, logit, weight).
    kept: Vec<(u32, f32, f64)>,
}

impl Sampler {
    /// A sampler at the start of its seed.
    pub fn new(options: SamplerOptions) -> Result<Self, SamplerError> {
        options.validate()?;
        let seed = if knob::skipped(Knob::Seed) { options.seed ^ 1 } else { options.seed };
        let counters = SamplerCounters::default();
        Ok(Self { options, state: SamplerState::seeded(seed), counters, kept: Vec::new() })
    }

    /// The options it was made with.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// What it did so far.
    pub fn counters(&self) -> SamplerCounters {
        self.counters
    }

    /// Where the generator stands.
    pub fn state(&self) -> SamplerState {
        self.state
    }

    /// Continues from a saved state.
    pub fn restore(&mut self, state: SamplerState) -> Result<(), SamplerError> {
        if state.words == [0; 4] {
            return Err(SamplerError::State);
        }
        self.state = state;
        Ok(())
    }

    /// Goes on where another sampler of the same options stood after what `counters` say.
    pub fn resume(&mut self, state: SamplerState, counters: SamplerCounters) -> Result<(), SamplerError> {
        self.restore(state)?;
        self.counters = counters;
        Ok(())
    }

    /// Chooses the token for `position` of the text from one logit per token. Ties of the greedy choice, and of the
    /// borders of top-k and top-p, go to the lowest id. Logits of minus infinity are never chosen.
    pub fn sample(&mut self, logits: &[f32], position: u64) -> Result<u32, SamplerError> {
        let best = greedy(logits, position)?;
        self.counters.tokens += 1;
        let greedy_asked = self.options.temperature == 0.0 && !knob::forced(Knob::Temperature);
        if greedy_asked || knob::skipped(Knob::Temperature) {
            return Ok(best);
        }
        let token = self.draw(logits, best);
        self.counters.not_greedy += u64::from(token != best);
        Ok(token)
    }

    /// Draws from the candidates that top-k and top-p leave.
    fn draw(&mut self, logits: &[f32], best: u32) -> u32 {
        self.begin_draw(logits, best);
        self.pick(best)
    }

    /// Weighs the candidates that top-k and top-p leave, for a draw that is counted.
    fn begin_draw(&mut self, logits: &[f32], best: u32) {
        self.weigh(logits, best);
        self.keep_most_likely(logits.len());
        if self.counters.drawn == 0 {
            self.counters.first_words = self.state.words;
        }
        self.counters.drawn += 1;
    }

    /// One of the candidates, by their weights; `best` if none has any.
    fn pick(&mut self, best: u32) -> u32 {
        let total: f64 = self.kept.iter().map(|c| c.2).sum();
        let mut left = self.state.next_unit() * total;
        for &(token, _, weight) in &self.kept {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        // Rounding can leave a crumb after the last candidate; it belongs to the last one with any weight.
        self.kept.iter().rev().find(|c| c.2 > 0.0).map_or(best, |c| c.0)
    }

    /// Fills the candidates with unnormalised probabilities, the best one's being 1.
    fn weigh(&mut self, logits: &[f32], best: u32) {
        let top = f64::from(logits[best as usize]);
        // 0 comes here only when a test makes greedy choice lie.
        let temperature = f64::from(if self.options.temperature > 0.0 { self.options.temperature } else { 1.0 });
        self.kept.clear();
        self.kept.extend(logits.iter().zip(0u32..).filter(|(l, _)| **l > f32::NEG_INFINITY).map(|(&logit, token)| {
            let weight = ((f64::from(logit) - top) / temperature).exp();
            (token, logit, weight)
        }));
    }

    /// Applies top-k, then top-p to what is left. Afterwards the candidates are in id order again, so that a filter
    /// that keeps everything draws the same token as no filter.
    fn keep_most_likely(&mut self, vocab: usize) {
        let likelier = |a: &(u32, f32, f64), b: &(u32, f32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let k = if knob::forced(Knob::TopK) { 2 } else { self.options.top_k as usize };
        if k > 0 && k < vocab && k < self.kept.len() && !knob::skipped(Knob::TopK) {
            self.kept.select_nth_unstable_by(k - 1, likelier);
            self.kept.truncate(k);
            self.counters.cut_by_top_k += 1;
        }
        let top_p = if knob::forced(Knob::TopP) { 0.5 } else { self.options.top_p };
        if top_p < 1.0 && !knob::skipped(Knob::TopP) {
            self.kept.sort_unstable_by(likelier);
            let total: f64 = self.kept.iter().map(|c| c.2).sum();
            let wanted = f64::from(top_p) * total;
            let mut reached = 0.0;
            let enough = self.kept.iter().position(|c| {
                reached += c.2;
                reached >= wanted
            });
            let keep = enough.map_or(self.kept.len(), |last| last + 1);
            self.counters.cut_by_top_p += u64::from(keep < self.kept.len());
            self.kept.truncate(keep);
        }
        self.kept.sort_unstable_by_key(|c| c.0);
    }
}

/// The token with the largest logit; ties go to the lowest id.
pub fn greedy(logits: &[f32], position: u64) -> Result<u32, SamplerError> {
    let mut best: Option<(u32, f32)> = None;
    for (token, &value) in (0u32..).zip(logits) {
        if value.is_nan() || value == f32::INFINITY {
            return Err(SamplerError::Logit { token: token as usize, value, position });
        }
        if value > best.map_or(f32::NEG_INFINITY, |b| b.1) {
            best = Some((token, value));
        }
    }
    best.map(|b| b.0).ok_or(SamplerError::NoToken { position, logits: logits.len() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(temperature: f32, top_p: f32, top_k: u32, seed: u64) -> Sampler {
        Sampler::new(SamplerOptions { temperature, top_p, top_k, seed }).unwrap()
    }

    #[test]
    fn generator_matches_the_published_sequence() {
        // First outputs of the reference xoshiro256** for the state 1, 2, 3, 4.
        let mut state = SamplerState { words: [1, 2, 3, 4], draws: 0 };
        let got: Vec<u64> = (0..4).map(|_| state.next_u64()).collect();
        assert_eq!(got, [11520, 0, 1_509_978_240, 1_215_971_899_390_074_240]);
        assert_eq!(state.draws, 4);
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_draws_nothing() {
        let mut s = sampler(0.0, 1.0, 0, 5);
        let before = s.state();
        assert_eq!(s.sample(&[1.0, 3.0, 3.0, f32::NEG_INFINITY], 0), Ok(1));
        assert_eq!(s.sample(&[-0.0, 0.0], 0), Ok(0), "zeros of both signs are equal");
        assert_eq!(s.state(), before);
    }

    #[test]
    fn bad_logits_name_the_position() {
        for temperature in [0.0, 1.0] {
            let mut s = sampler(temperature, 1.0, 0, 0);
            let e = s.sample(&[0.0, f32::NAN, 1.0], 41).unwrap_err().to_string();
            assert!(e.contains("token 1") && e.contains("position 41"), "{e}");
            assert!(matches!(s.sample(&[f32::INFINITY], 7), Err(SamplerError::Logit { position: 7, .. })));
            assert!(matches!(s.sample(&[f32::NEG_INFINITY; 3], 7), Err(SamplerError::NoToken { logits: 3, .. })));
            assert!(matches!(s.sample(&[], 7), Err(SamplerError::NoToken { logits: 0, .. })));
            assert_eq!(s.state().draws, 0);
        }
    }

    #[test]
    fn options_out_of_range_name_their_flag() {
        let ok = SamplerOptions::default();
        for temperature in [-0.1, f32::NAN, f32::INFINITY, 101.0] {
            let e = Sampler::new(SamplerOptions { temperature, ..ok }).unwrap_err().to_string();
            assert!(e.starts_with("--temperature is"), "{e}");
        }
        for top_p in [0.0, -1.0, 1.01, f32::NAN] {
            let e = Sampler::new(SamplerOptions { top_p, ..ok }).unwrap_err().to_string();
            assert!(e.starts_with("--top-p is"), "{e}");
        }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        // Probabilities 0.5, 0.3, 0.2 at temperature 1.
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let mut s = sampler(1.0, 1.0, 0, 7);
        let mut seen = [0u32; 3];
        for position in 0..20_000 {
            seen[s.sample(&logits, position).unwrap() as usize] += 1;
        }
        for (count, p) in seen.iter().zip([0.5, 0.3, 0.2]) {
            let expected = 20_000.0 * p;
            assert!((f64::from(*count) - expected).abs() < 5.0 * (expected * (1.0 - p)).sqrt(), "{seen:?}");
        }
    }

    #[test]
    fn filters_keep_the_most_likely_and_at_least_one() {
        let logits = [0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()];
        let seen = |mut s: Sampler| -> Vec<u32> {
            let mut ids: Vec<u32> = (0..500).map(|p| s.sample(&logits, p).unwrap()).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        assert_eq!(seen(sampler(1.0, 0.75, 0, 1)), [1, 2]);
        assert_eq!(seen(sampler(1.0, 1e-6, 0, 1)), [1]);
        assert_eq!(seen(sampler(1.0, 1.0, 2, 1)), [1, 2]);
        assert_eq!(seen(sampler(1.0, 1.0, 1, 1)), [1]);
        assert_eq!(seen(sampler(1.0, 1.0, 0, 1)), [0, 1, 2]);
        // Equal logits at the border: the lowest ids stay.
        let mut s = sampler(1.0, 1.0, 2, 3);
        assert!((0..200).all(|p| s.sample(&[1.0; 6], p).unwrap() < 2));
    }

    #[test]
    fn saved_states_are_checked() {
        let mut s = sampler(1.0, 1.0, 0, 1);
        assert_eq!(s.restore(SamplerState { words: [0; 4], draws: 0 }), Err(SamplerError::State));
        assert!(serde_json::from_str::<SamplerState>(r#"{"words":[1,2,3,4],"draws":0,"more":1}"#).is_err());
    }

    fn arb_logits() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(prop_oneof![9 => -30f32..30.0, 1 => Just(f32::NEG_INFINITY)], 1..200)
            .prop_filter("one token must be possible", |l| l.iter().any(|v| v.is_finite()))
    }

    proptest! {
        #[test]
        fn a_choice_is_possible_and_inside_the_filters(
            logits in arb_logits(), t in 0f32..5.0, top_p in 0.01f32..=1.0, top_k in 0u32..50, seed: u64,
        ) {
            let mut s = sampler(t, top_p, top_k, seed);
            let chosen = s.sample(&logits, 0).unwrap() as usize;
            prop_assert!(logits[chosen].is_finite());
            let above = logits.iter().filter(|&&l| l > logits[chosen]).count();
            prop_assert!(top_k == 0 || above < top_k as usize);
            prop_assert_eq!(s.state().draws, u64::from(t > 0.0));
        }

        #[test]
        fn a_saved_state_continues_as_if_never_interrupted(logits in arb_logits(), seed: u64, first in 0usize..20) {
            let mut whole = sampler(0.8, 0.95, 40, seed);
            for p in 0..first { whole.sample(&logits, p as u64).unwrap(); }
            let saved = serde_json::to_string(&whole.state()).unwrap();
            let mut resumed = sampler(0.8, 0.95, 40, !seed);
            resumed.restore(serde_json::from_str(&saved).unwrap()).unwrap();
            for p in 0..20 {
                prop_assert_eq!(whole.sample(&logits, p).unwrap(), resumed.sample(&logits, p).unwrap());
            }
        }

        #[test]
        fn a_filter_that_keeps_everything_changes_nothing(logits in arb_logits(), seed: u64) {
            let mut plain = sampler(1.3, 1.0, 0, seed);
            let mut wide = sampler(1.3, 1.0, 1000, seed);
            for p in 0..10 {
                prop_assert_eq!(plain.sample(&logits, p).unwrap(), wide.sample(&logits, p).unwrap());
            }
        }

        #[test]
        fn a_cold_sampler_is_greedy(logits in arb_logits(), seed: u64) {
            let mut cold = sampler(1e-30, 1.0, 0, seed);
            let chosen = cold.sample(&logits, 0).unwrap();
            prop_assert_eq!(logits[chosen as usize], logits[greedy(&logits, 0).unwrap() as usize]);
        }
    }
}
