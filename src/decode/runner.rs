//! Passes over a loaded model: several texts, each with its rows, go through the layers together. Every matrix is read
//! once and each (layer, expert) is awaited once per pass, however many lanes share it. Owns the working memory and the time
//! account; what a text remembers lies in its `Timeline`.

use super::attn_res;
use super::error::DecodeError;
use super::guess::{GuessSource, Guesser};
use super::kernels::Rows;
use super::kv::{CacheShape, KvTier};
use super::moe::{self, Pass};
use super::observe::{Observer, Point};
use super::scratch::{GRAIN_ROWS, Scratch, blocks};
use super::session::{Logits, PassStats, SessionCounters, SessionOptions};
use super::streamed::{Streamed, TrunkBlocks};
use super::timeline::{Lane, Place, Timeline, check_option};
use super::weights::{Attn, Decoder, Ffn};
use super::{kda, mla};
use crate::ids::{ExpertKey, LayerId};
use crate::source::{ExpertSource, Phase, StepInfo};
use std::sync::Arc;

/// Runs passes, one at a time.
pub(super) struct Runner {
    decoder: Arc<Decoder>,
    options: SessionOptions,
    scratch: Scratch,
    guesser: Guesser,
    /// Where blocks of a streamed trunk come from.
    trunk: TrunkBlocks,
    /// Where latent rows go that do not stay in memory.
    kv: KvTier,
    /// By layer and expert: whether a pass over these prompts has asked for it.
    prompt_seen: Vec<bool>,
    /// By row of the pass.
    places: Vec<Place>,
    logits: Vec<f32>,
    step: u64,
    counters: SessionCounters,
}

impl Runner {
    /// For texts of at most `options.max_context` tokens, with latent caches of this shape.
    pub(super) fn new(decoder: Arc<Decoder>, options: SessionOptions, shape: CacheShape) -> Result<Self, DecodeError> {
        let config = &decoder.config;
        let kv = KvTier::new(config, shape);
        check_option("max_rows", options.max_rows, config.max_position_embeddings)?;
        let guesser = Guesser::new(options.guess, config, options.max_context);
        let prompt_seen = vec![false; config.layers.len() * config.moe.as_ref().map_or(0, |m| m.experts)];
        Ok(Self {
            decoder,
            options,
            scratch: Scratch::default(),
            guesser,
            trunk: TrunkBlocks::default(),
            kv,
            prompt_seen,
            places: Vec::new(),
            logits: Vec::new(),
            step: 0,
            counters: SessionCounters::default(),
        })
    }

    pub(super) fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    pub(super) fn options(&self) -> &SessionOptions {
        &self.options
    }

    pub(super) fn trunk(&self) -> &TrunkBlocks {
        &self.trunk
    }

    pub(super) fn trunk_mut(&mut self) -> &mut TrunkBlocks {
        &mut self.trunk
    }

    pub(super) fn kv(&self) -> &KvTier {
        &self.kv
    }

    pub(super) fn kv_mut(&mut self) -> &mut KvTier {
        &mut self.kv
    }

    pub(super) fn counters(&self) -> &SessionCounters {
        &self.counters
    }

    /// The passes that follow read other prompts: what is distinct in them is counted anew.
    pub(super) fn begin_prompt(&mut self) {
        self.prompt_seen.fill(false);
        self.guesser.begin_prompt();
    }

    /// The text that guesses were made from is over.
    pub(super) fn forget_text(&mut self) {
        self.guesser.reset();
    }

    /// Feeds every lane's tokens at its position; returns the logits asked for, `[rows, vocab]` in the order of the
    /// lanes. After an error the timelines belong to no text, unless the error was about the arguments, which are checked
    /// before anything is touched.
    pub(super) fn forward(
        &mut self,
        lanes: &mut [Lane<'_>],
        phase: Phase,
        source: &mut dyn ExpertSource,
        want: Logits,
        observer: Option<&mut dyn Observer>,
    ) -> Result<&[f32], DecodeError> {
        let rows = self.check(lanes, self.options.max_rows)?;
        self.pass(lanes, rows, (phase, false), source, want, observer)
    }

    /// Feeds one lane's rows on trial and returns the logits of all of them. [`Runner::keep`] then says how many become text.
    pub(super) fn verify(
        &mut self,
        lane: Lane<'_>,
        source: &mut dyn ExpertSource,
        observer: Option<&mut dyn Observer>,
    ) -> Result<&[f32], DecodeError> {
        let max = lane.timeline.trial_rows();
        let lanes = &mut [lane];
        let rows = self.check(lanes, max)?;
        self.pass(lanes, rows, (Phase::Verify, true), source, Logits::All, observer)
    }

    /// The first `rows` rows that `timeline` was fed on trial become text.
    pub(super) fn keep(
        &mut self,
        timeline: &mut Timeline,
        rows: usize,
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), DecodeError> {
        let step = timeline.keep(&self.decoder.kernels, rows)?;
        self.guesser.take_back(step.rows as usize - rows);
        if let Some(observer) = observer {
            observer.kept(&step, rows);
        }
        Ok(())
    }

    /// Logits of the last pass.
    pub(super) fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// A pass whose arguments are as they should be.
    fn pass(
        &mut self,
        lanes: &mut [Lane<'_>],
        rows: usize,
        (phase, on_trial): (Phase, bool),
        source: &mut dyn ExpertSource,
        want: Logits,
        observer: Option<&mut dyn Observer>,
    ) -> Result<&[f32], DecodeError> {
        let Self { decoder, options, scratch, guesser, trunk, kv, prompt_seen, places, logits, .. } = self;
        let (dec, clock) = (&**decoder, options.clock);
        let start_ns = clock.now_ns();
        scratch.reserve(&dec.config, rows, options.max_context);
        dec.kernels.make_room(scratch.widest());
        guesser.reserve(dec.config.hidden_size, rows);
        places.clear();
        for (lane, l) in lanes.iter_mut().enumerate() {
            let positions = (l.timeline.position() as u64..).take(l.tokens.len());
            let text = l.timeline.text();
            places.extend(positions.map(|position| Place { lane, text, position }));
            l.timeline.begin(on_trial);
        }
        let pos = places.first().map_or(0, |p| p.position);
        let step = StepInfo { step: self.step, phase, pos, rows: rows as u32 };
        self.step += 1;
        // The guesser that keeps a text keeps one: `check` lets it see no second lane.
        guesser.begin(source, &step, lanes.first().map_or(&[], |l| l.tokens), want != Logits::None);
        let stats = PassStats { rows: rows as u64, ..PassStats::default() };
        let mut pass = Pass { step, source, observer, clock, stats, guesser, places, prompt_seen };
        let mut streamed = trunk.during_pass(want != Logits::None, clock);
        let kv_before = kv.counters();
        layers(dec, scratch, (lanes, kv), &mut pass, &mut streamed)?;
        let mut stats = pass.stats;
        output(dec, scratch, places, want, logits, &mut streamed)?;
        stats.trunk_stall_ns = streamed.stall_ns;
        stats.kv_stall_ns = kv.counters().stall_ns() - kv_before.stall_ns();
        self.counters.trunk_blocks += streamed.blocks;
        self.counters.trunk_bytes += streamed.bytes;
        for lane in lanes.iter_mut() {
            if on_trial {
                lane.timeline.wait(step);
            } else {
                lane.timeline.advance(lane.tokens.len());
            }
        }
        let spent_ns = clock.now_ns() - start_ns;
        let waited_ns = stats.stall_ns + stats.trunk_stall_ns + stats.kv_stall_ns;
        stats.compute_ns = spent_ns.saturating_sub(waited_ns);
        self.account(stats, phase, lanes.len() as u64);
        Ok(&self.logits)
    }

    /// One row of the logits that the last pass gave, counted among those asked for.
    pub(super) fn logits_row(&self, row: usize) -> &[f32] {
        let vocab = self.decoder.config.vocab_size;
        &self.logits[row * vocab..(row + 1) * vocab]
    }

    /// Rows of the pass, if it can be run.
    fn check(&self, lanes: &[Lane<'_>], max: usize) -> Result<usize, DecodeError> {
        let rows = lanes.iter().map(|l| l.tokens.len()).sum();
        lanes.iter().try_for_each(|l| l.timeline.check(0))?;
        if rows == 0 || rows > max || lanes.iter().any(|l| l.tokens.is_empty()) {
            return Err(DecodeError::Rows { rows, max });
        }
        lanes.iter().try_for_each(|l| l.timeline.check(l.tokens.len()))?;
        if lanes.len() > 1 && self.options.guess == GuessSource::Draft {
            let (option, expected) = ("lanes of a pass", "1 with guesses from the text (draft)".into());
            return Err(DecodeError::Option { option, seen: lanes.len() as u64, expected });
        }
        let vocab = self.decoder.config.vocab_size;
        match lanes.iter().flat_map(|l| l.tokens).find(|&&t| t as usize >= vocab) {
            Some(&token) => Err(DecodeError::Token { token, vocab }),
            None => Ok(rows),
        }
    }

    fn account(&mut self, pass: PassStats, phase: Phase, lanes: u64) {
        self.counters.total.add(&pass);
        self.counters.passes += 1;
        match phase {
            Phase::Prefill => {
                self.counters.prefill_passes += 1;
                self.counters.widest_rows = self.counters.widest_rows.max(pass.rows);
            }
            Phase::Decode => {
                self.counters.widest_lanes = self.counters.widest_lanes.max(lanes);
                self.counters.shared_passes += u64::from(lanes > 1);
            }
            Phase::Verify => {}
        }
        self.counters.last = pass;
        self.counters.guesses = *self.guesser.counts();
        self.counters.guesses_made = self.guesser.made();
    }
}

/// All decoder layers (k3-architecture.md section 2.1).
fn layers(
    dec: &Decoder,
    s: &mut Scratch,
    (lanes, kv): (&mut [Lane<'_>], &mut KvTier),
    pass: &mut Pass<'_, '_>,
    streamed: &mut Streamed<'_>,
) -> Result<(), DecodeError> {
    let (k, cfg, rows) = (&dec.kernels, &dec.config, pass.places.len());
    let (h, eps) = (cfg.hidden_size, cfg.rms_norm_eps);
    let (stream, mix, normed, out) =
        (&mut s.stream[..rows * h], &mut s.mix[..rows * h], &mut s.normed[..rows * h], &mut s.out[..rows * h]);
    for (row, &token) in stream.chunks_exact_mut(h).zip(lanes.iter().flat_map(|l| l.tokens)) {
        k.widen_row(dec.resident().matrix(dec.embed), token as usize, row);
    }
    let mut banked = 0;
    for (index, w) in dec.layers.iter().enumerate() {
        let layer = LayerId(index as u16);
        let dec = dec.with(streamed.block(dec, index)?);
        let boundary = index % cfg.attn_res_block_size == 0;
        if banked == 0 {
            mix.copy_from_slice(stream);
        } else {
            attn_res::mix(k, &s.bank[..banked], stream, &w.attn_res, eps, &mut s.mix_weights, mix);
        }
        norm_rows(&dec, mix, &w.attn_norm, normed);
        see(pass, layer, Point::AttnIn, normed);
        let x = Rows::packed(normed, rows);
        for (first, count) in blocks(rows) {
            let (x, out) = (x.part(first, count), &mut out[first * h..(first + count) * h]);
            match &w.attn {
                Attn::Kda(w) => kda::forward(dec, w, layer, lanes, first, x, &mut s.kda, &mut s.wide, out)?,
                Attn::Mla(w) => {
                    let at = (pass.step.step, layer, pass.clock);
                    mla::forward(dec, w, at, (lanes, kv), first, x, &mut s.mla, &mut s.wide, out)?;
                }
            }
        }
        let next = dec.layers.iter().enumerate().skip(index + 1).find(|(_, w)| matches!(w.attn, Attn::Mla(_)));
        if let (Attn::Mla(_), Some((next, _)), Some((_, count))) = (&w.attn, next, blocks(rows).next()) {
            mla::look_ahead((LayerId(next as u16), cfg.mla.heads), (lanes, kv), count)?;
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
        norm_rows(&dec, mix, &w.ffn_norm, normed);
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
        if let Some(at) = first_not_finite(stream) {
            let position = pass.places[at / h].position;
            return Err(match moe::damaged(&s.moe) {
                Some(expert) => DecodeError::DamagedExpert { expert: ExpertKey { layer, expert }, position },
                None => DecodeError::NonFinite { layer: Some(layer), position },
            });
        }
    }
    Ok(())
}

/// The last mix, norm and head, for the rows asked for.
fn output(
    dec: &Decoder,
    s: &mut Scratch,
    places: &[Place],
    want: Logits,
    logits: &mut Vec<f32>,
    streamed: &mut Streamed<'_>,
) -> Result<(), DecodeError> {
    let (k, cfg) = (&dec.kernels, &dec.config);
    let (h, vocab) = (cfg.hidden_size, cfg.vocab_size);
    let wanted = |row: &usize| match want {
        Logits::None => false,
        Logits::Last => places.get(row + 1).is_none_or(|next| next.lane != places[*row].lane),
        Logits::All => true,
    };
    let chosen = (0..places.len()).filter(wanted);
    let count = chosen.clone().count();
    logits.resize(count * vocab, 0.0);
    if count == 0 {
        return Ok(());
    }
    let (mix, normed) = (&mut s.mix[..count * h], &mut s.normed[..count * h]);
    for (row, mix) in chosen.clone().zip(mix.chunks_exact_mut(h)) {
        let row = row * h..(row + 1) * h;
        attn_res::mix_row(k, &s.bank, row, &s.stream, &dec.out_res, cfg.rms_norm_eps, &mut s.mix_weights, mix);
    }
    norm_rows(dec, mix, &dec.norm, normed);
    let x = Rows::packed(normed, count);
    match dec.blocks() {
        None => k.matmul(dec.resident().matrix(dec.head), x, logits, vocab, &mut s.wide),
        Some(blocks) => {
            for piece in blocks.head_pieces() {
                let block = streamed.block(dec, piece.block)?;
                let rows = dec.with(block).head_rows(piece.skip, piece.first, piece.count);
                k.matmul(rows, x, &mut logits[piece.first..], vocab, &mut s.wide);
            }
        }
    }
    match first_not_finite(logits) {
        Some(at) => {
            let position = chosen.clone().nth(at / vocab).map_or(0, |row| places[row].position);
            Err(DecodeError::NonFinite { layer: None, position })
        }
        None => Ok(()),
    }
}

fn norm_rows(dec: &Decoder, x: &[f32], weight: &[f32], out: &mut [f32]) {
    let h = weight.len();
    dec.kernels.by_parts(GRAIN_ROWS, [(out, h)], &|row, [out]| {
        dec.kernels.rms_norm(&x[row * h..(row + 1) * h], weight, dec.config.rms_norm_eps, out);
    });
}

/// Index of the first value that is infinite or no number.
fn first_not_finite(values: &[f32]) -> Option<usize> {
    let finite = |block: &[f32]| block.iter().fold(true, |all, v| all & v.is_finite());
    let block = values.chunks(64).position(|block| !finite(block))?;
    values[block * 64..].iter().position(|v| !v.is_finite()).map(|at| block * 64 + at)
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
