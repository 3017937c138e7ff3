//! One timeline over a loaded model: feed tokens, receive logits; and what a pass says of itself. Experts come from the
//! source that the caller passes in.

use super::error::DecodeError;
use super::guess::{GuessSource, GuessesMade};
use super::kv::{CacheShape, KvTier};
use super::observe::Observer;
use super::runner::Runner;
use super::streamed::TrunkBlocks;
use super::timeline::{Lane, Timeline};
use super::weights::Decoder;
use crate::clock::Clock;
use crate::ids::LayerId;
use crate::source::guess::GuessCountsByDepth;
use crate::source::{ExpertSource, Phase};
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
    /// The last row's, of each lane.
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
    /// Time in which it waited for a block of a streamed trunk.
    pub trunk_stall_ns: u64,
    /// Time in which it waited for latent rows to leave memory or to come back.
    pub kv_stall_ns: u64,
}

impl PassStats {
    /// Adds another pass, or a sum of some.
    pub fn add(&mut self, pass: &PassStats) {
        self.rows += pass.rows;
        self.barriers += pass.barriers;
        self.experts += pass.experts;
        self.expert_rows += pass.expert_rows;
        self.prompt_distinct += pass.prompt_distinct;
        self.compute_ns += pass.compute_ns;
        self.stall_ns += pass.stall_ns;
        self.trunk_stall_ns += pass.trunk_stall_ns;
        self.kv_stall_ns += pass.kv_stall_ns;
    }
}

/// The account of a session since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionCounters {
    /// Completed passes.
    pub passes: u64,
    /// Passes over prompts.
    pub prefill_passes: u64,
    /// Most rows of one pass over prompts.
    pub widest_rows: u64,
    /// Most lanes of one decode pass.
    pub widest_lanes: u64,
    /// Decode passes that more than one lane shared.
    pub shared_passes: u64,
    /// Sums over them.
    pub total: PassStats,
    /// The last one alone.
    pub last: PassStats,
    /// How good the guesses were, by how many layers ahead they were made.
    pub guesses: GuessCountsByDepth,
    /// Who made them.
    pub guesses_made: GuessesMade,
    /// Blocks of a streamed trunk that its passes asked for.
    pub trunk_blocks: u64,
    /// Bytes of these blocks.
    pub trunk_bytes: u64,
}

/// A KDA layer's memory, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct KdaView<'a> {
    /// `[heads, key, value]`
    pub state: &'a [f32],
    /// Last inputs of the q, k and v convolutions, `[kernel - 1, heads * dim]`, oldest first.
    pub conv: [&'a [f32]; 3],
}

/// One text and what runs it.
pub struct Session {
    runner: Runner,
    timeline: Timeline,
    shape: CacheShape,
}

impl Session {
    /// An empty timeline.
    pub fn new(decoder: Arc<Decoder>, options: SessionOptions) -> Result<Self, DecodeError> {
        Self::shaped(decoder, options, CacheShape::Whole)
    }

    /// The same with latent caches of this shape.
    pub fn shaped(decoder: Arc<Decoder>, options: SessionOptions, shape: CacheShape) -> Result<Self, DecodeError> {
        let timeline = Timeline::in_lane(&decoder.config, options.max_context, shape, 0)?;
        Ok(Self { runner: Runner::new(decoder, options, shape)?, timeline, shape })
    }

    /// An empty text that can take this one's place. `lane` tells blocks of latent caches apart that are not in memory: every text of a
    /// session has another one, and this one has 0.
    pub fn another_text(&self, lane: usize) -> Result<Timeline, DecodeError> {
        Timeline::in_lane(self.decoder().config(), self.max_context(), self.shape, lane)
    }

    /// Goes on with another text, and gives the one that was at work. For models without guesses from the text.
    pub fn exchange(&mut self, text: &mut Timeline) {
        self.timeline.exchange(text);
        self.runner.forget_text();
    }

    /// Memory that the text takes.
    pub fn text_bytes(&self) -> u64 {
        self.timeline.held_bytes()
    }

    /// The model.
    pub fn decoder(&self) -> &Arc<Decoder> {
        self.runner.decoder()
    }

    /// Tokens fed so far: the position of the next one.
    pub fn position(&self) -> usize {
        self.timeline.position()
    }

    /// Most tokens that it holds.
    pub fn max_context(&self) -> usize {
        self.timeline.max_context()
    }

    /// The run's clock.
    pub fn clock(&self) -> Clock {
        self.runner.options().clock
    }

    /// The time account.
    pub fn counters(&self) -> &SessionCounters {
        self.runner.counters()
    }

    /// The passes that follow read another prompt: what is distinct in it is counted anew.
    pub fn begin_prompt(&mut self) {
        self.runner.begin_prompt();
    }

    /// Forgets the text. Counters and the step number go on.
    pub fn reset(&mut self) {
        self.timeline.reset();
        self.runner.forget_text();
    }

    /// The memory of a KDA layer; `None` for other layers.
    pub fn kda_state(&self, layer: LayerId) -> Option<KdaView<'_>> {
        self.timeline.kda_state(layer)
    }

    /// The cached rows of an MLA layer, `[position, kv_lora + rope]`; `None` for other layers.
    pub fn mla_rows(&self, layer: LayerId) -> Option<&[f32]> {
        self.timeline.mla_rows(layer)
    }

    /// Appends the text's state to a snapshot.
    pub(super) fn write_state(&self, out: &mut Vec<u8>) -> Result<(), DecodeError> {
        self.timeline.write_to(self.runner.kv(), out)
    }

    /// Has it filled from one. Until [`Session::resume_at`] it belongs to no text.
    pub(super) fn read_state<E: From<DecodeError>>(
        &mut self,
        position: usize,
        fill: &mut dyn FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let clock = self.clock();
        self.timeline.read_from(position, (self.runner.kv_mut(), clock), fill)
    }

    /// The state is there: the text has `position` tokens.
    pub(super) fn resume_at(&mut self, position: usize) {
        self.timeline.resume_at(position);
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
        let lane = Lane { timeline: &mut self.timeline, tokens };
        self.runner.forward(&mut [lane], phase, source, want, observer)
    }

    /// Makes room for passes of up to `rows` rows that check proposals.
    pub fn reserve_verify(&mut self, rows: usize) {
        let decoder = self.runner.decoder();
        self.timeline.reserve_trial(decoder.config(), rows);
    }

    /// Feeds `tokens`, the last of the text and proposals for what comes behind it, and returns the logits of every row.
    /// No row is text before [`Session::keep`] says how many are: nothing else can be fed until then. Rows that there is no
    /// [room](Session::reserve_verify) for are refused.
    pub fn verify(
        &mut self,
        tokens: &[u32],
        source: &mut dyn ExpertSource,
        observer: Option<&mut dyn Observer>,
    ) -> Result<&[f32], DecodeError> {
        let lane = Lane { timeline: &mut self.timeline, tokens };
        self.runner.verify(lane, source, observer)
    }

    /// The first `rows` rows (at least one) of the pass before become text, and every state is as if the others had never
    /// been fed.
    pub fn keep(&mut self, rows: usize, observer: Option<&mut dyn Observer>) -> Result<(), DecodeError> {
        self.runner.keep(&mut self.timeline, rows, observer)
    }

    /// Remembers the text as it is, for [`Session::rewind`]. Costs a copy of the recurrent states.
    pub fn mark(&mut self) {
        self.timeline.mark();
    }

    /// Goes back to the text of the last [`Session::mark`]; without one since the last reset it is an error. For models
    /// without guesses from the text: a guesser is not told.
    pub fn rewind(&mut self) -> Result<(), DecodeError> {
        self.timeline.rewind()
    }

    /// The blocks of a streamed trunk.
    pub fn trunk(&self) -> &TrunkBlocks {
        self.runner.trunk()
    }

    /// The same, to give it a source.
    pub fn trunk_mut(&mut self) -> &mut TrunkBlocks {
        self.runner.trunk_mut()
    }

    /// The tier of latent caches.
    pub fn kv(&self) -> &KvTier {
        self.runner.kv()
    }

    /// The same, to give it a place for blocks.
    pub fn kv_mut(&mut self) -> &mut KvTier {
        self.runner.kv_mut()
    }

    /// The logits that the last pass returned.
    pub fn logits(&self) -> &[f32] {
        self.runner.logits()
    }
}
