//! Guesses that only the decoder can make, for a source that wants them: which experts the layers ahead will ask for, told
//! while the open barrier's experts are on their way. Nothing computed here flows back into the pass: a guess changes
//! which bytes are read early, never a result. Allocates only before a pass.

use super::draft::Drafter;
use super::kernels::Rows;
use super::moe::choose;
use super::waste::WasteBound;
use super::weights::{Decoder, Ffn};
use crate::ids::{ExpertId, LayerId};
use crate::model::config::ModelConfig;
use crate::source::guess::{GuessCountsByDepth, GuessTally, MAX_LOOKAHEAD, rank};
use crate::source::{Barrier, ExpertSource, Guess, Phase, StepInfo};

/// Where the decoder takes its guesses from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuessSource {
    /// It makes none.
    #[default]
    None,
    /// The routers of the layers ahead, applied to the mix that feeds the current layer's feed-forward part.
    Router,
    /// The experts that a token went to when it was last read: those of this pass's tokens for the layers ahead, and
    /// those of the token that the text so far suggests for the first layers of the next pass.
    Draft,
}

/// Guesses made, counted by the code that makes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuessesMade {
    /// By routers of layers ahead.
    pub router: u64,
    /// From what tokens went to before.
    pub draft: u64,
}

/// Makes guesses, tells the source, and counts what came of them.
#[derive(Default)]
pub(super) struct Guesser {
    from: GuessSource,
    /// Layers with experts, ascending.
    layers: Vec<LayerId>,
    experts: usize,
    top_k: usize,
    /// Layers ahead that the source wants to hear about in this pass; 0 = no guesses.
    depth: usize,
    tally: GuessTally,
    made: GuessesMade,
    drafter: Drafter,
    /// Holds guesses about passes over a prompt back.
    waste: WasteBound,
    /// Rows that the working memory below has room for.
    rows: usize,
    normed: Vec<f32>,
    /// `[rows, experts]`
    scores: Vec<f32>,
    /// One row's best biased scores and their experts: those that it would choose, and the best of the others.
    best: Vec<f32>,
    chosen: Vec<ExpertId>,
    /// By expert: what speaks for it, over all rows.
    sums: Vec<f32>,
    guesses: Vec<Guess>,
}

impl Guesser {
    /// For a session of at most `max_context` tokens.
    pub(super) fn new(from: GuessSource, cfg: &ModelConfig, max_context: usize) -> Self {
        let (experts, top_k) = cfg.moe.as_ref().map_or((0, 0), |m| (m.experts, m.top_k));
        let layers: Vec<LayerId> = cfg.moe_layers().map(|l| LayerId(l as u16)).collect();
        let from = if layers.is_empty() { GuessSource::None } else { from };
        let on = from != GuessSource::None;
        let drafter = match from {
            GuessSource::Draft => Drafter::new(cfg.vocab_size, layers.len(), top_k, max_context),
            _ => Drafter::default(),
        };
        Self {
            from,
            experts,
            top_k,
            depth: 0,
            tally: if on { GuessTally::new(layers.len(), experts, MAX_LOOKAHEAD) } else { GuessTally::default() },
            made: GuessesMade::default(),
            waste: if on { WasteBound::new(layers.len(), experts) } else { WasteBound::default() },
            layers,
            drafter,
            rows: 0,
            normed: Vec::new(),
            scores: Vec::new(),
            best: vec![0.0; if on { top_k + 1 } else { 0 }],
            chosen: vec![ExpertId(0); if on { top_k + 1 } else { 0 }],
            sums: vec![0.0; if on { experts } else { 0 }],
            guesses: Vec::with_capacity(if on { experts } else { 0 }),
        }
    }

    /// How good the guesses were.
    pub(super) fn counts(&self) -> &GuessCountsByDepth {
        self.tally.counts()
    }

    /// Who made them.
    pub(super) fn made(&self) -> GuessesMade {
        self.made
    }

    /// The text is forgotten.
    pub(super) fn reset(&mut self) {
        self.drafter.forget_text();
    }

    /// The passes that follow read another prompt.
    pub(super) fn begin_prompt(&mut self) {
        self.waste.begin_prompt();
    }

    /// A pass over `tokens` begins; `continues` = its last row's logits will choose the token behind them.
    pub(super) fn begin(&mut self, source: &mut dyn ExpertSource, step: &StepInfo, tokens: &[u32], continues: bool) {
        self.depth = match self.from {
            GuessSource::None => 0,
            _ => (source.lookahead() as usize).min(MAX_LOOKAHEAD).min(self.layers.len()),
        };
        if self.from != GuessSource::Draft {
            return;
        }
        let foretold = self.drafter.begin(step.step, tokens, continues);
        for at in 0..self.depth {
            if foretold == Some(true) {
                break; // what was said in the pass before stands
            }
            if foretold == Some(false) {
                self.tally.retracted(step.step, at);
            }
            self.remember(at, false);
            if step.phase == Phase::Prefill {
                self.waste.limit(at, &mut self.guesses);
            }
            // what is said now takes the place of what was said before, and keeps what both name
            if foretold == Some(false) && self.guesses.is_empty() {
                source.retract(step, self.layers[at]);
            }
            if !self.guesses.is_empty() {
                source.hint(step, self.layers[at], &self.guesses);
                self.tally.said(step.step, at, at + 1, &self.guesses);
            }
        }
    }

    /// The last `rows` rows of the pass that is over were proposals that are not kept.
    pub(super) fn take_back(&mut self, rows: usize) {
        if self.from == GuessSource::Draft {
            self.drafter.take_back(rows);
        }
    }

    /// Makes room for a pass of `rows` rows.
    pub(super) fn reserve(&mut self, hidden: usize, rows: usize) {
        if self.from == GuessSource::Router && rows > self.rows {
            self.rows = rows;
            self.normed.resize(rows * hidden, 0.0);
            self.scores.resize(rows * self.experts, 0.0);
        }
    }

    /// `layer` has chosen: `ids` are its choices `[rows, top_k]`, `distinct` the set that it is about to ask for.
    pub(super) fn asked(&mut self, step: &StepInfo, layer: LayerId, ids: &[ExpertId], distinct: &[ExpertId]) {
        if self.from == GuessSource::None {
            return;
        }
        let Ok(at) = self.layers.binary_search(&layer) else { return };
        self.tally.asked(step.step, at, distinct);
        if step.phase == Phase::Prefill {
            self.waste.asked(at, distinct);
        }
        if self.from == GuessSource::Draft {
            self.drafter.keep(at, ids);
        }
    }

    /// The barrier of `layer` is open: tells what comes behind it. `mix` is what its feed-forward part was made from,
    /// `[rows, hidden]` before the norm.
    pub(super) fn look_ahead(
        &mut self,
        dec: &Decoder,
        step: &StepInfo,
        layer: LayerId,
        mix: &[f32],
        barrier: &mut Barrier<'_>,
        wide: &mut [f32],
    ) {
        if self.depth == 0 {
            return;
        }
        let Ok(at) = self.layers.binary_search(&layer) else { return };
        let count = self.layers.len();
        if self.from == GuessSource::Router {
            // Of a prompt only what the next layer needs is sure enough.
            let reach = if step.phase == Phase::Prefill { 1 } else { self.depth };
            for ahead in 1..=reach.min(count - 1 - at) {
                self.ask_router(dec, at + ahead, mix, wide);
                self.tell(step, at + ahead, ahead, barrier);
            }
            return;
        }
        // The layers between were told about before.
        let target = at + self.depth;
        self.remember(target % count, target >= count);
        if target < count {
            self.tell(step, target, self.depth, barrier);
        } else {
            let pos = step.pos + u64::from(step.rows);
            let next = StepInfo { step: step.step + 1, phase: Phase::Decode, pos, rows: 1 };
            self.tell(&next, target - count, self.depth, barrier);
        }
    }

    fn tell(&mut self, step: &StepInfo, at: usize, ahead: usize, barrier: &mut Barrier<'_>) {
        if step.phase == Phase::Prefill {
            self.waste.limit(at, &mut self.guesses);
        }
        if !self.guesses.is_empty() {
            barrier.hint(step, self.layers[at], &self.guesses);
            self.tally.said(step.step, at, ahead, &self.guesses);
        }
    }

    /// What the router of layer number `at` would choose if its feed-forward part were made from `mix`. An expert counts
    /// once for each row that chooses it, plus how far its biased score lies above the best one that was not chosen.
    fn ask_router(&mut self, dec: &Decoder, at: usize, mix: &[f32], wide: &mut [f32]) {
        self.guesses.clear();
        let layer = &dec.layers[self.layers[at].index()];
        let Ffn::Moe(w) = &layer.ffn else { return };
        let (h, k) = (layer.ffn_norm.len(), &dec.kernels);
        let rows = mix.len() / h;
        let (normed, scores) = (&mut self.normed[..rows * h], &mut self.scores[..rows * self.experts]);
        for (x, out) in mix.chunks_exact(h).zip(normed.chunks_exact_mut(h)) {
            k.rms_norm(x, &layer.ffn_norm, dec.config.rms_norm_eps, out);
        }
        k.matmul(dec.resident().matrix(w.router), Rows::packed(normed, rows), scores, self.experts, wide);
        if scores.iter().any(|v| !v.is_finite()) {
            return; // the pass itself will find out, and say where
        }
        k.sigmoid(scores);
        for scores in scores.chunks_exact(self.experts) {
            let found = choose(scores, &w.bias, &mut self.best, &mut self.chosen);
            let best_left = self.best[..found].get(self.top_k).copied().unwrap_or(f32::NEG_INFINITY);
            for id in &self.chosen[..found.min(self.top_k)] {
                let above = scores[id.index()] + w.bias[id.index()] - best_left;
                self.sums[id.index()] += 1.0 + if above.is_finite() { above } else { 0.0 };
            }
        }
        self.collect();
        self.made.router += self.guesses.len() as u64;
    }

    /// What the tokens of this pass, or the one foreseen for the next, went to in layer number `at` when they were last
    /// read.
    fn remember(&mut self, at: usize, next: bool) {
        self.guesses.clear();
        self.drafter.recall(at, next, &mut self.sums);
        self.collect();
        self.made.draft += self.guesses.len() as u64;
    }

    /// Turns sums into guesses, the likeliest first, and the sums back to 0.
    fn collect(&mut self) {
        for (expert, sum) in self.sums.iter_mut().enumerate().filter(|(_, s)| **s > 0.0) {
            self.guesses.push(Guess { expert: ExpertId(expert as u16), score: std::mem::take(sum) });
        }
        rank(&mut self.guesses);
        debug_assert!(self.top_k == 0 || self.guesses.len() <= self.experts);
    }
}
