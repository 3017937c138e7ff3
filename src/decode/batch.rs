//! Several texts at once over one model. Every text has a lane while it is read and extended; a decode pass extends all
//! lanes by one token and asks each layer once for the experts of all of them. When a text ends, the next prompt takes its
//! lane: prompts that begin at the same moment are read together, in passes of their own. Prints nothing; knows no
//! tokenizer.

use super::error::DecodeError;
use super::generate::{GenerateError, Generation, StopReason, again};
use super::guess::GuessSource;
use super::kv::{CacheShape, KvTier};
use super::observe::Observer;
use super::runner::Runner;
use super::sampler::{Sampler, SamplerCounters, SamplerOptions};
use super::session::{Logits, PassStats, SessionCounters, SessionOptions};
use super::streamed::TrunkBlocks;
use super::timeline::{Lane, Timeline, check_option};
use super::weights::Decoder;
use crate::clock::Clock;
use crate::knob::{self, Knob};
use crate::source::{ExpertSource, Phase};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Most lanes of a batch.
pub const MAX_LANES: usize = 1024;

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct BatchRequest<'a> {
    /// The prompts, each at least one token, in the order in which lanes take them.
    pub prompts: &'a [Vec<u32>],
    /// Most tokens to generate for each.
    pub max_new: usize,
    /// Tokens that end a text (they are part of the output).
    pub stop: &'a [u32],
    /// Prompt rows per pass, over all lanes.
    pub piece_rows: usize,
    /// How tokens are chosen; the text at place `i` draws from the seed `seed + i`.
    pub sampler: SamplerOptions,
}

/// What came of one prompt. Times count from the start of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Generated ids, the stop id included.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub stopped: StopReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that its lane held at the end.
    pub context_used: usize,
    /// When a lane took it.
    pub began_ns: u64,
    /// Its first generated token.
    pub first_token_ns: u64,
    /// Its last generated token.
    pub last_token_ns: u64,
    /// What its sampler did.
    pub sampler: SamplerCounters,
}

impl Sequence {
    /// Seconds from the moment a lane took it to its first token.
    pub fn ttft_s(&self) -> f64 {
        self.first_token_ns.saturating_sub(self.began_ns) as f64 / 1e9
    }

    /// (generated - 1) / (last token time - first token time); 0 with fewer than two tokens.
    pub fn tok_s(&self) -> f64 {
        let ns = self.last_token_ns - self.first_token_ns;
        if ns == 0 { 0.0 } else { self.token_ids.len().saturating_sub(1) as f64 * 1e9 / ns as f64 }
    }
}

/// What a batch gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchGeneration {
    /// All texts as one: ids in the order of the prompts, sums, and the first and last token of any text.
    pub total: Generation,
    /// By prompt.
    pub sequences: Vec<Sequence>,
    /// Sums over the decode passes.
    pub decode: PassStats,
}

/// The seed of the text at place `index`.
pub fn seed_of(seed: u64, index: usize) -> u64 {
    seed.wrapping_add(index as u64)
}

/// Lanes over one model.
pub struct Batch {
    runner: Runner,
    timelines: Vec<Timeline>,
}

/// A text that has a lane.
struct Seat {
    /// Its place among the prompts.
    sequence: usize,
    sampler: Sampler,
    /// Tokens of its prompt that were fed.
    fed: usize,
    /// The token to feed next, once the prompt is read.
    next: u32,
}

/// What a run of a batch keeps beside the lanes.
struct Progress<'a> {
    request: BatchRequest<'a>,
    clock: Clock,
    out: Vec<Sequence>,
    prompts: PassStats,
    prefill_ns: u64,
    decode: PassStats,
    decode_ns: u64,
    interrupted: bool,
}

impl Batch {
    /// `lanes` empty lanes (at most `options.max_rows`), each for `options.max_context` tokens.
    pub fn new(decoder: Arc<Decoder>, options: SessionOptions, lanes: usize) -> Result<Self, DecodeError> {
        Self::shaped(decoder, options, lanes, CacheShape::Whole)
    }

    /// The same with latent caches of this shape.
    pub fn shaped(
        decoder: Arc<Decoder>,
        options: SessionOptions,
        lanes: usize,
        shape: CacheShape,
    ) -> Result<Self, DecodeError> {
        let lanes = match lanes {
            _ if knob::skipped(Knob::Parallel) => 1,
            lanes => lanes + usize::from(knob::forced(Knob::Parallel)),
        };
        check_option("lanes", lanes, options.max_rows.min(MAX_LANES))?;
        if lanes > 1 && options.guess == GuessSource::Draft {
            let expected = "1 with guesses from the text (draft)".into();
            return Err(DecodeError::Option { option: "lanes", seen: lanes as u64, expected });
        }
        let timeline = |lane| Timeline::in_lane(&decoder.config, options.max_context, shape, lane);
        let timelines = (0..lanes).map(timeline).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { runner: Runner::new(Arc::clone(&decoder), options, shape)?, timelines })
    }

    /// The run's clock.
    pub fn clock(&self) -> Clock {
        self.runner.options().clock
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

    /// The time account.
    pub fn counters(&self) -> &SessionCounters {
        self.runner.counters()
    }

    /// Reads every prompt of `request` and extends it. `on_token` sees every token with the place of its prompt as it is
    /// chosen, and may end all texts. A text that fills its lane ends alone; an error ends the batch.
    pub fn generate(
        &mut self,
        source: &mut dyn ExpertSource,
        request: BatchRequest<'_>,
        on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<BatchGeneration, GenerateError> {
        let max = self.runner.options().max_context;
        if request.prompts.is_empty() || request.prompts.iter().any(Vec::is_empty) {
            return Err(GenerateError::EmptyPrompt);
        }
        if let Some(longest) = request.prompts.iter().map(Vec::len).find(|len| *len > max) {
            return Err(DecodeError::ContextFull { needed: longest, max }.into());
        }
        let mut progress = Progress::new(request);
        let mut seats: Vec<Option<Seat>> = self.timelines.iter().map(|_| None).collect();
        let mut waiting = 0..request.prompts.len();
        while !progress.interrupted {
            if self.fill(&mut seats, &mut waiting, &mut progress)? {
                self.read_prompts(&mut seats, source, &mut progress, on_token, &mut observer)?;
            } else if seats.iter().any(Option::is_some) {
                self.extend(&mut seats, source, &mut progress, on_token, &mut observer)?;
            } else {
                break;
            }
        }
        Ok(progress.finish())
    }

    /// Gives free lanes to the prompts that wait; whether any was given.
    fn fill(
        &mut self,
        seats: &mut [Option<Seat>],
        waiting: &mut std::ops::Range<usize>,
        progress: &mut Progress<'_>,
    ) -> Result<bool, GenerateError> {
        let mut any = false;
        for (seat, timeline) in seats.iter_mut().zip(&mut self.timelines).filter(|(seat, _)| seat.is_none()) {
            let Some(sequence) = waiting.next() else { break };
            let options = progress.request.sampler;
            let sampler = Sampler::new(SamplerOptions { seed: seed_of(options.seed, sequence), ..options })?;
            timeline.begin_text(sequence);
            progress.out[sequence].began_ns = progress.clock.now_ns();
            *seat = Some(Seat { sequence, sampler, fed: 0, next: 0 });
            any = true;
        }
        Ok(any)
    }

    /// Reads the prompts of all lanes that have not read theirs, in as few passes as their rows allow.
    fn read_prompts(
        &mut self,
        seats: &mut [Option<Seat>],
        source: &mut dyn ExpertSource,
        progress: &mut Progress<'_>,
        on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
        observer: &mut Option<&mut dyn Observer>,
    ) -> Result<(), GenerateError> {
        self.runner.begin_prompt();
        self.runner.forget_text();
        let prompts = progress.request.prompts;
        let halved = if knob::skipped(Knob::PrefillRows) { 2 } else { 1 };
        let piece_rows = (progress.request.piece_rows / halved).max(1);
        while !progress.interrupted {
            let (mut lanes, mut pieces, mut room, mut ends) = (Vec::new(), Vec::new(), piece_rows, false);
            for (at, (seat, timeline)) in seats.iter().zip(&mut self.timelines).enumerate() {
                let Some(seat) = seat else { continue };
                let rest = &prompts[seat.sequence][seat.fed..];
                let count = rest.len().min(room);
                if count > 0 {
                    room -= count;
                    ends |= count == rest.len();
                    lanes.push(Lane { timeline, tokens: &rest[..count] });
                    pieces.push((at, count));
                }
            }
            if pieces.is_empty() {
                break;
            }
            let start_ns = progress.clock.now_ns();
            let want = if ends { Logits::Last } else { Logits::None };
            self.runner.forward(&mut lanes, Phase::Prefill, source, want, again(observer))?;
            progress.prefill_ns += progress.clock.now_ns() - start_ns;
            progress.prompts.add(&self.runner.counters().last);
            for (row, (at, count)) in pieces.into_iter().enumerate() {
                let Some(seat) = &mut seats[at] else { continue };
                seat.fed += count;
                if seat.fed == prompts[seat.sequence].len() {
                    let goes_on = progress.choose(seat, self.runner.logits_row(row), &self.timelines[at], on_token)?;
                    seats[at].take_if(|_| !goes_on);
                }
            }
        }
        Ok(())
    }

    /// One decode pass: every lane is extended by a token.
    fn extend(
        &mut self,
        seats: &mut [Option<Seat>],
        source: &mut dyn ExpertSource,
        progress: &mut Progress<'_>,
        on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
        observer: &mut Option<&mut dyn Observer>,
    ) -> Result<(), GenerateError> {
        let start_ns = progress.clock.now_ns();
        let taken =
            seats.iter().zip(&mut self.timelines).filter_map(|(seat, timeline)| Some((seat.as_ref()?, timeline)));
        let mut lanes: Vec<Lane<'_>> =
            taken.map(|(seat, timeline)| Lane { timeline, tokens: std::slice::from_ref(&seat.next) }).collect();
        self.runner.forward(&mut lanes, Phase::Decode, source, Logits::Last, again(observer))?;
        progress.decode.add(&self.runner.counters().last);
        let mut row = 0;
        for (place, timeline) in seats.iter_mut().zip(&self.timelines) {
            let Some(seat) = place else { continue };
            let goes_on = progress.choose(seat, self.runner.logits_row(row), timeline, on_token)?;
            place.take_if(|_| !goes_on);
            row += 1;
        }
        progress.decode_ns += progress.clock.now_ns() - start_ns;
        Ok(())
    }
}

impl<'a> Progress<'a> {
    fn new(request: BatchRequest<'a>) -> Self {
        let waits = |prompt: &Vec<u32>| Sequence {
            token_ids: Vec::with_capacity(request.max_new.min(1 << 16)),
            stopped: StopReason::Interrupted,
            prompt_tokens: prompt.len(),
            context_used: 0,
            began_ns: 0,
            first_token_ns: 0,
            last_token_ns: 0,
            sampler: SamplerCounters::default(),
        };
        Self {
            request,
            clock: Clock::start(),
            out: request.prompts.iter().map(waits).collect(),
            prompts: PassStats::default(),
            prefill_ns: 0,
            decode: PassStats::default(),
            decode_ns: 0,
            interrupted: false,
        }
    }

    /// Chooses the token behind a lane's text; whether the text goes on.
    fn choose(
        &mut self,
        seat: &mut Seat,
        logits: &[f32],
        timeline: &Timeline,
        on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<bool, GenerateError> {
        let max_new = self.request.max_new + if knob::skipped(Knob::MaxNew) { 4 } else { 0 };
        let out = &mut self.out[seat.sequence];
        out.context_used = timeline.position();
        if max_new == 0 {
            out.stopped = StopReason::MaxNew;
            return Ok(false);
        }
        let token = seat.sampler.sample(logits, timeline.position() as u64)?;
        out.sampler = seat.sampler.counters();
        out.last_token_ns = self.clock.now_ns();
        if out.token_ids.is_empty() {
            out.first_token_ns = out.last_token_ns;
        }
        out.token_ids.push(token);
        seat.next = token;
        let go_on = on_token(seat.sequence, token);
        self.interrupted |= go_on.is_break();
        let ended = if self.request.stop.contains(&token) {
            StopReason::StopToken
        } else if go_on.is_break() {
            StopReason::Interrupted
        } else if out.token_ids.len() >= max_new {
            StopReason::MaxNew
        } else if timeline.position() >= timeline.max_context() {
            StopReason::ContextFull
        } else {
            return Ok(true);
        };
        out.stopped = ended;
        Ok(false)
    }

    fn finish(self) -> BatchGeneration {
        let spoke = || self.out.iter().filter(|s| !s.token_ids.is_empty());
        let first_token_ns = spoke().map(|s| s.first_token_ns).min().unwrap_or(self.prefill_ns);
        let last_token_ns = spoke().map(|s| s.last_token_ns).max().unwrap_or(first_token_ns);
        let reasons = |reason| self.out.iter().any(|s| s.stopped == reason);
        let order = [StopReason::Interrupted, StopReason::ContextFull, StopReason::MaxNew];
        let total = Generation {
            resumed: 0,
            token_ids: self.out.iter().flat_map(|s| s.token_ids.iter().copied()).collect(),
            stopped: order.into_iter().find(|r| reasons(*r)).unwrap_or(StopReason::StopToken),
            texts: spoke().count(),
            prompt_tokens: self.out.iter().map(|s| s.prompt_tokens).sum(),
            prefill_ns: self.prefill_ns,
            first_token_ns,
            last_token_ns,
            between_ns: (last_token_ns - first_token_ns).saturating_sub(self.decode_ns),
            prefill_experts: self.prompts.experts,
            prefill_distinct: self.prompts.prompt_distinct,
            prefill_stall_ns: self.prompts.stall_ns,
            decode_stall_ns: self.decode.stall_ns,
            decode_kv_stall_ns: self.decode.kv_stall_ns,
            decode_barriers: self.decode.barriers,
        };
        BatchGeneration { total, sequences: self.out, decode: self.decode }
    }
}
