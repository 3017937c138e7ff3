//! One timeline over a loaded model: feed tokens, receive logits. Owns the recurrent and cached state, the working
//! memory and the time account; experts come from the source that the caller passes in.

use super::error::DecodeError;
use super::guess::{GuessSource, Guesser, GuessesMade};
use super::kernels::Rows;
use super::moe::{self, Pass};
use super::observe::{Observer, Point};
use super::scratch::{Scratch, State, blocks};
use super::weights::{Attn, Decoder, Ffn};
use super::{attn_res, kda, mla};
use crate::clock::Clock;
use crate::ids::LayerId;
use crate::source::guess::GuessCountsByDepth;
use crate::source::{ExpertSource, Phase, StepInfo};
use std::sync::Arc;

/// How a session is set up.
#[derive(Clone, Copy, Debug)]
pub struct SessionOptions {
    /// Most tokens of text, prompt included.
    pub max_context: usize,
    /// Most rows of one pass; longer prompts are fed in pieces. Working memory grows to the largest pass seen.
    pub max_rows: usize,
    /// The run's clock, for the time account.
    pub clock: Clock,
    /// How to guess for a source that wants guesses.
    pub guess: GuessSource,
}

/// Which rows' logits a pass returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: a piece of a prompt that is not its last.
    None,
    /// The last row's.
    Last,
    /// Every row's.
    All,
}

/// What a pass did and where its time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassStats {
    /// Rows fed.
    pub rows: u64,
    /// Barriers opened.
    pub barriers: u64,
    /// Distinct experts awaited, summed over barriers.
    pub experts: u64,
    /// Rows that experts were applied to, summed over experts.
    pub expert_rows: u64,
    /// Of the experts awaited in passes over a prompt, those that no pass since [`Session::begin_prompt`] had awaited
    /// in that layer.
    pub prompt_distinct: u64,
    /// Time outside the source.
    pub compute_ns: u64,
    /// Time in which the pass had nothing to do but wait in the source.
    pub stall_ns: u64,
}

/// The account of a session since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionCounters {
    /// Completed passes.
    pub passes: u64,
    /// Most rows of one pass.
    pub widest_rows: u64,
    /// Sums over them.
    pub total: PassStats,
    /// The last one alone.
    pub last: PassStats,
    /// How good the guesses were, by how many layers ahead they were made.
    pub guesses: GuessCountsByDepth,
    /// Who made them.
    pub guesses_made: GuessesMade,
}

/// A KDA layer's memory, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct KdaView<'a> {
    /// `[heads, key, value]`
    pub state: &'a [f32],
    /// Last inputs of the q, k and v convolutions, `[kernel - 1, heads * dim]`, oldest first.
    pub conv: [&'a [f32]; 3],
}

/// One mutable timeline.
pub struct Session {
    decoder: Arc<Decoder>,
    options: SessionOptions,
    states: Vec<State>,
    scratch: Scratch,
    guesser: Guesser,
    /// By layer and expert: whether a pass over this prompt has asked for it.
    prompt_seen: Vec<bool>,
    logits: Vec<f32>,
    position: usize,
    step: u64,
    usable: bool,
    counters: SessionCounters,
}

impl Session {
    /// An empty timeline.
    pub fn new(decoder: Arc<Decoder>, options: SessionOptions) -> Result<Self, DecodeError> {
        let longest = decoder.config.max_position_embeddings;
        let check = |option, seen: usize, max: usize| match (1..=max).contains(&seen) {
            true => Ok(()),
            false => Err(DecodeError::Option { option, seen: seen as u64, expected: format!("1 to {max}") }),
        };
        check("max_context", options.max_context, longest)?;
        check("max_rows", options.max_rows, longest)?;
        let states = State::empty(&decoder.config, options.max_context);
        let guesser = Guesser::new(options.guess, &decoder.config, options.max_context);
        let config = &decoder.config;
        let prompt_seen = vec![false; config.layers.len() * config.moe.as_ref().map_or(0, |m| m.experts)];
        Ok(Self {
            prompt_seen,
            decoder,
            options,
            states,
            scratch: Scratch::default(),
            guesser,
            logits: Vec::new(),
            position: 0,
            step: 0,
            usable: true,
            counters: SessionCounters::default(),
        })
    }

    /// The model.
    pub fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    /// Tokens fed so far: the position of the next one.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Most tokens that it holds.
    pub fn max_context(&self) -> usize {
        self.options.max_context
    }

    /// The run's clock.
    pub fn clock(&self) -> Clock {
        self.options.clock
    }

    /// The time account.
    pub fn counters(&self) -> &SessionCounters {
        &self.counters
    }

    /// The passes that follow read another prompt: what is distinct in it is counted anew.
    pub fn begin_prompt(&mut self) {
        self.prompt_seen.fill(false);
    }

    /// Forgets the text. Counters and the step number go on.
    pub fn reset(&mut self) {
        self.states.iter_mut().for_each(State::reset);
        self.guesser.reset();
        self.position = 0;
        self.usable = true;
    }

    /// The memory of a KDA layer; `None` for other layers.
    pub fn kda_state(&self, layer: LayerId) -> Option<KdaView<'_>> {
        match self.states.get(layer.index())? {
            State::Kda(s) => Some(KdaView { state: &s.s, conv: [&s.conv[0], &s.conv[1], &s.conv[2]] }),
            State::Mla(_) => None,
        }
    }

    /// The cached rows of an MLA layer, `[position, kv_lora + rope]`; `None` for other layers.
    pub fn mla_rows(&self, layer: LayerId) -> Option<&[f32]> {
        let m = &self.decoder.config.mla;
        match self.states.get(layer.index())? {
            State::Mla(cache) => Some(&cache[..self.position * (m.kv_lora_rank + m.qk_rope_head_dim)]),
            State::Kda(_) => None,
        }
    }

    /// Feeds `tokens` at the current position; returns the logits asked for, `[rows, vocab]`. After an error the
    /// state belongs to no text: the session must be [reset](Session::reset), unless the error was about the
    /// arguments, which are checked before anything is touched.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        phase: Phase,
        source: &mut dyn ExpertSource,
        want: Logits,
        observer: Option<&mut dyn Observer>,
    ) -> Result<&[f32], DecodeError> {
        self.check(tokens)?;
        let decoder = Arc::clone(&self.decoder);
        let (dec, rows) = (&*decoder, tokens.len());
        let start_ns = self.options.clock.now_ns();
        self.scratch.reserve(&dec.config, rows, self.options.max_context);
        self.guesser.reserve(dec.config.hidden_size, rows);
        let step = StepInfo { step: self.step, phase, pos: self.position as u64, rows: rows as u32 };
        let stats = PassStats { rows: rows as u64, ..PassStats::default() };
        self.step += 1;
        self.usable = false;
        let mut guesser = std::mem::take(&mut self.guesser);
        guesser.begin(source, &step, tokens, want != Logits::None);
        let mut prompt_seen = std::mem::take(&mut self.prompt_seen);
        let mut pass = Pass {
            step,
            source,
            observer,
            clock: self.options.clock,
            stats,
            guesser: &mut guesser,
            prompt_seen: &mut prompt_seen,
        };
        let done = self.layers(dec, tokens, &mut pass).map(|()| pass.stats);
        (self.guesser, self.prompt_seen) = (guesser, prompt_seen);
        let mut stats = done?;
        self.output(dec, rows, want)?;
        self.usable = true;
        self.position += rows;
        let spent_ns = self.options.clock.now_ns() - start_ns;
        stats.compute_ns = spent_ns.saturating_sub(stats.stall_ns);
        self.account(stats);
        Ok(&self.logits)
    }

    fn check(&self, tokens: &[u32]) -> Result<(), DecodeError> {
        let (rows, max) = (tokens.len(), self.options.max_rows);
        if !self.usable {
            return Err(DecodeError::Unusable);
        }
        if rows == 0 || rows > max {
            return Err(DecodeError::Rows { rows, max });
        }
        let needed = self.position.saturating_add(rows);
        if needed > self.options.max_context {
            return Err(DecodeError::ContextFull { needed, max: self.options.max_context });
        }
        let vocab = self.decoder.config.vocab_size;
        match tokens.iter().find(|&&t| t as usize >= vocab) {
            Some(&token) => Err(DecodeError::Token { token, vocab }),
            None => Ok(()),
        }
    }

    /// All decoder layers (k3-architecture.md section 2.1).
    fn layers(&mut self, dec: &Decoder, tokens: &[u32], pass: &mut Pass<'_, '_>) -> Result<(), DecodeError> {
        let (k, cfg, rows) = (&dec.kernels, &dec.config, tokens.len());
        let (h, eps) = (cfg.hidden_size, cfg.rms_norm_eps);
        let s = &mut self.scratch;
        let (stream, mix, normed, out) =
            (&mut s.stream[..rows * h], &mut s.mix[..rows * h], &mut s.normed[..rows * h], &mut s.out[..rows * h]);
        for (row, &token) in stream.chunks_exact_mut(h).zip(tokens) {
            k.widen_row(dec.matrix(dec.embed), token as usize, row);
        }
        let mut banked = 0;
        for (index, (w, state)) in dec.layers.iter().zip(&mut self.states).enumerate() {
            let layer = LayerId(index as u16);
            let boundary = index % cfg.attn_res_block_size == 0;
            if banked == 0 {
                mix.copy_from_slice(stream);
            } else {
                attn_res::mix(k, &s.bank[..banked], stream, &w.attn_res, eps, &mut s.mix_weights, mix);
            }
            norm_rows(dec, mix, &w.attn_norm, normed);
            see(pass, layer, Point::AttnIn, normed);
            let x = Rows::packed(normed, rows);
            match (&w.attn, state) {
                (Attn::Kda(w), State::Kda(state)) => {
                    for (first, count) in blocks(rows) {
                        let out = &mut out[first * h..(first + count) * h];
                        kda::forward(dec, w, state, x.part(first, count), &mut s.kda, &mut s.wide, out);
                    }
                }
                (Attn::Mla(w), State::Mla(cache)) => {
                    for (first, count) in blocks(rows) {
                        let (position, out) = (self.position + first, &mut out[first * h..(first + count) * h]);
                        mla::forward(dec, w, cache, position, x.part(first, count), &mut s.mla, &mut s.wide, out);
                    }
                }
                _ => return Err(DecodeError::Config(format!("layer {layer} has the state of another kind"))),
            }
            see(pass, layer, Point::AttnOut, out);
            if boundary {
                // The raw stream is banked, and restarts from the attention's output.
                s.bank[banked][..rows * h].copy_from_slice(stream);
                banked += 1;
                stream.copy_from_slice(out);
            } else {
                add(stream, out);
            }
            attn_res::mix(k, &s.bank[..banked], stream, &w.ffn_res, eps, &mut s.mix_weights, mix);
            norm_rows(dec, mix, &w.ffn_norm, normed);
            see(pass, layer, Point::FfnIn, normed);
            let x = Rows::packed(normed, rows);
            match (&w.ffn, &cfg.moe) {
                (Ffn::Moe(w), Some(moe)) => {
                    moe::forward(dec, layer, moe, w, pass, mix, x, &mut s.moe, &mut s.mlp, &mut s.wide, out)?;
                }
                (Ffn::Dense(w), _) => moe::mlp(dec, w, x, &mut s.mlp, &mut s.wide, out),
                (Ffn::Moe(_), None) => {
                    return Err(DecodeError::Config(format!("layer {layer} lacks an expert geometry")));
                }
            }
            see(pass, layer, Point::FfnOut, out);
            add(stream, out);
            see(pass, layer, Point::Out, stream);
            if let Some(at) = stream.iter().position(|v| !v.is_finite()) {
                let position = pass.step.pos + (at / h) as u64;
                return Err(DecodeError::NonFinite { layer: Some(layer), position });
            }
        }
        Ok(())
    }

    /// The last mix, norm and head, for the rows asked for.
    fn output(&mut self, dec: &Decoder, rows: usize, want: Logits) -> Result<(), DecodeError> {
        let (k, cfg) = (&dec.kernels, &dec.config);
        let (h, vocab) = (cfg.hidden_size, cfg.vocab_size);
        let first = match want {
            Logits::None => rows,
            Logits::Last => rows - 1,
            Logits::All => 0,
        };
        let (s, count) = (&mut self.scratch, rows - first);
        self.logits.resize(count * vocab, 0.0);
        if count == 0 {
            return Ok(());
        }
        let (mix, normed) = (&mut s.mix[..count * h], &mut s.normed[..count * h]);
        for (i, mix) in mix.chunks_exact_mut(h).enumerate() {
            let row = (first + i) * h..(first + i + 1) * h;
            attn_res::mix_row(k, &s.bank, row, &s.stream, &dec.out_res, cfg.rms_norm_eps, &mut s.mix_weights, mix);
        }
        norm_rows(dec, mix, &dec.norm, normed);
        k.matmul(dec.matrix(dec.head), Rows::packed(normed, count), &mut self.logits, vocab, &mut s.wide);
        match self.logits.iter().position(|v| !v.is_finite()) {
            Some(at) => {
                let position = (self.position + first + at / vocab) as u64;
                Err(DecodeError::NonFinite { layer: None, position })
            }
            None => Ok(()),
        }
    }

    fn account(&mut self, pass: PassStats) {
        let t = &mut self.counters.total;
        t.rows += pass.rows;
        t.barriers += pass.barriers;
        t.experts += pass.experts;
        t.expert_rows += pass.expert_rows;
        t.prompt_distinct += pass.prompt_distinct;
        t.compute_ns += pass.compute_ns;
        t.stall_ns += pass.stall_ns;
        self.counters.passes += 1;
        self.counters.widest_rows = self.counters.widest_rows.max(pass.rows);
        self.counters.last = pass;
        self.counters.guesses = *self.guesser.counts();
        self.counters.guesses_made = self.guesser.made();
    }
}

fn norm_rows(dec: &Decoder, x: &[f32], weight: &[f32], out: &mut [f32]) {
    let h = weight.len();
    for (x, out) in x.chunks_exact(h).zip(out.chunks_exact_mut(h)) {
        dec.kernels.rms_norm(x, weight, dec.config.rms_norm_eps, out);
    }
}

fn add(to: &mut [f32], x: &[f32]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to += x;
    }
}

fn see(pass: &mut Pass<'_, '_>, layer: LayerId, point: Point, values: &[f32]) {
    if let Some(observer) = pass.observer.as_deref_mut() {
        observer.values(layer, point, values);
    }
}
