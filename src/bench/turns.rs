//! A loaded model with all that a run has, kept for one text after another: the turns of a conversation, the requests of a
//! server. A text that begins with what is still held is read from there on only. A recurrent state is of one position, so there are
//! two such places for each text that is kept: where it ended, and where its prompt did. One text is at work; the others stand aside
//! with their states. Knows no terminal and no network.

use super::activations::use_activations;
use super::affinity::Placed;
use super::config::{ConfigError, RunConfig};
use super::run::{give_threads, use_threads};
use super::{fits, kv};
use crate::clock::Clock;
use crate::decode::generate::{Beside, GenerateError, Generation, HeldPrompt, Request, generate_with};
use crate::decode::sampler::Sampler;
use crate::decode::{DecodeError, Session, Speculator, Timeline};
use crate::drive::spec::DriveSpec;
use crate::ids::{ExpertId, LayerId};
use crate::layout::plan::Plan;
use crate::open::{DraftModel, Model, NoExperts, OpenError};
use crate::reader::{PrefetchPolicy, ReaderHandle};
use crate::source::{ExpertSource, Guess, Lease, Phase, SourceError, StepInfo};
use crate::sys::limits::own_memory;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

/// Turns could not be begun.
#[derive(Debug, thiserror::Error)]
pub enum TurnsError {
    /// The model, its drives or its draft model.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Working memory of a text.
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

/// A session and its source, for one text after another.
pub struct Turns<'m> {
    model: &'m Model,
    config: &'m RunConfig,
    source: Box<dyn ExpertSource>,
    session: Session,
    speculator: Option<Speculator>,
    handle: Option<ReaderHandle>,
    clock: Clock,
    held: Held,
    aside: Vec<Aside>,
    /// Most texts that are kept, the one at work included.
    most: usize,
    /// Counts texts.
    turn: u64,
    evicted: u64,
    /// Memory of the process before anything was taken.
    before: Option<u64>,
    // dropped after what its threads belong to
    placed: Placed<'m>,
}

/// What is known of a text that is kept.
#[derive(Default)]
struct Held {
    /// Tokens that it was fed; empty = none that can be relied on.
    fed: Vec<u32>,
    /// The beginning of these that it can go back to.
    marked: usize,
    /// Logits behind that beginning.
    logits: Vec<f32>,
    /// The turn that it was at work last.
    used: u64,
    /// Tells its blocks from those of the others.
    lane: usize,
}

/// A text that stands aside.
struct Aside {
    timeline: Timeline,
    held: Held,
}

/// The texts that are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptTexts {
    /// Their number.
    pub texts: usize,
    /// Their memory.
    pub bytes: u64,
    /// Those that were given up for others so far.
    pub evicted: u64,
}

/// What a turn gave.
#[derive(Debug)]
pub struct Turn {
    /// Tokens and times.
    pub generation: Generation,
    /// Tokens of the prompt that were not read, because the session held them.
    pub reused: usize,
}

/// A text of one turn.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// The prompt, at least one token.
    pub prompt: &'a [u32],
    /// Most tokens to generate.
    pub max_new: usize,
}

/// The draft model of `config`, if it names one.
pub fn draft_of(model: &Model, config: &RunConfig) -> Result<Option<DraftModel>, TurnsError> {
    Ok(model.draft(&config.draft, config.model.isa()?)?)
}

/// Whether a prompt of so many tokens fits the session and memory. A text that reaches its end while it is generated stops there.
///
/// # Errors
/// A sentence that says what would fit.
pub fn check_prompt(model: &Model, config: &RunConfig, prompt: usize) -> Result<(), String> {
    let longest = model.decoder.config().max_position_embeddings;
    let room = longest_prompt(model, config);
    if room <= longest && prompt > room {
        return Err(match room == longest {
            true => format!("the prompt has {prompt} tokens, the model was made for {longest}; shorten the prompt"),
            false => format!(
                "the prompt has {prompt} tokens, --max-context is {room}; shorten the prompt or raise --max-context \
                 (to {longest} at most)"
            ),
        });
    }
    Ok(())
}

/// Most tokens of a prompt that the context of `config` has room for.
pub fn longest_prompt(model: &Model, config: &RunConfig) -> usize {
    match config.model.max_context {
        0 => model.decoder.config().max_position_embeddings,
        context => context,
    }
}

impl<'m> Turns<'m> {
    /// Puts everything together: threads, source, session, proposals, blocks of a streamed trunk. `streamed` is the plan and where
    /// its drives are; `None` = experts in memory, if the model has any. Up to `most` texts are kept to be gone on with.
    pub fn open(
        model: &'m Model,
        config: &'m RunConfig,
        draft: Option<&DraftModel>,
        streamed: Option<&(Plan, Vec<DriveSpec>)>,
        most: usize,
    ) -> Result<Self, TurnsError> {
        let before = own_memory();
        use_threads(model, config);
        use_activations(model, config)?;
        let placed = Placed::compute(&model.decoder, &config.model.affinity)?;
        // its threads inherit the CPUs of compute
        if let Some(draft) = draft {
            give_threads(&draft.decoder, config);
        }
        let clock = Clock::start();
        let mut handle = None;
        let source: Box<dyn ExpertSource> = match streamed {
            Some((plan, mounts)) => {
                let reader = placed.reading(|| model.reader(plan, mounts, &config.reader, clock))?;
                handle = Some(reader.handle());
                Box::new(reader)
            }
            None if model.has_experts() => Box::new(model.resident()?),
            None => Box::new(NoExperts),
        };
        let rows = config.model.prefill_rows;
        let (context, guesses) = (config.model.max_context, (config.reader.prefetch, clock));
        // who guesses from the text follows one
        let most = if can_rewind(config) { most.max(1) } else { 1 };
        let mut session = model.session_of_texts(most, (context, rows), guesses, kv::limit_of(config))?;
        let reader = handle.as_ref().zip(streamed).map(|(handle, (_, mounts))| (handle, mounts.as_slice()));
        let pace = reader.and_then(|(handle, mounts)| handle.pace(model.own_drive(mounts)?));
        // how long a conversation becomes is not known: a drive that fills up says so
        placed.reading(|| kv::open(model, config, session.kv_mut(), (config.max_new, clock, false), reader))?;
        let speculator = model.speculator(&config.draft, draft, &config.sampler, rows, &session)?;
        placed.reading(|| model.stream_trunk(session.trunk_mut(), &config.reader, clock, pace))?;
        Ok(Self {
            model,
            config,
            source,
            session,
            speculator,
            handle,
            clock,
            held: Held::default(),
            aside: Vec::new(),
            most,
            turn: 0,
            evicted: 0,
            before,
            placed,
        })
    }

    /// The clock of all times that the reader gives.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The texts that are kept now.
    pub fn kept(&self) -> KeptTexts {
        let aside = || self.aside.iter().filter(|a| a.held.is_kept());
        let (at_work, bytes) = match self.held.is_kept() {
            true => (1, self.session.text_bytes()),
            false => (0, 0),
        };
        KeptTexts {
            texts: at_work + aside().count(),
            bytes: bytes + aside().map(|a| a.timeline.held_bytes()).sum::<u64>(),
            evicted: self.evicted,
        }
    }

    /// Where to look at what the reader does; `None` when nothing streams.
    pub fn handle(&self) -> Option<ReaderHandle> {
        self.handle.clone()
    }

    /// Starts something that neither computes nor reads: its threads may run wherever those that read may.
    pub fn beside<T>(&self, make: impl FnOnce() -> T) -> T {
        self.placed.reading(make)
    }

    /// Whether a text fits. Texts that stand aside are given up for it, the least recently used first, where that helps.
    ///
    /// # Errors
    /// A sentence that says what would fit.
    pub fn check(&mut self, text: Text<'_>) -> Result<(), String> {
        check_prompt(self.model, self.config, text.prompt.len())?;
        let (model, config) = (self.model, RunConfig { max_new: text.max_new, ..self.config.clone() });
        let taken = own_memory().unwrap_or(0).saturating_sub(self.before.unwrap_or(0));
        let fits = |kept| fits::check_turn(model, &config, text.prompt.len(), (taken, kept));
        fits(0)?; // one that does not fit even alone costs nobody their place
        self.turn_to(text.prompt).map_err(|e| e.to_string())?;
        let mut kept: u64 = self.aside.iter().map(|a| a.timeline.held_bytes()).sum();
        let Err(said) = fits(kept) else { return Ok(()) };
        let mut order: Vec<usize> = (0..self.aside.len()).collect();
        order.sort_by_key(|at| self.aside[*at].held.age());
        for (count, at) in order.iter().enumerate() {
            kept = kept.saturating_sub(self.aside[*at].timeline.held_bytes());
            if fits(kept).is_ok() {
                let mut given_up = order[..=count].to_vec();
                given_up.sort_unstable();
                for at in given_up.into_iter().rev() {
                    self.evicted += u64::from(self.aside.remove(at).held.is_kept());
                }
                return Ok(());
            }
        }
        Err(said)
    }

    /// How much of `prompt` the best of the texts that stand aside holds, and where it is.
    fn best_aside(&self, prompt: &[u32]) -> Option<(usize, usize)> {
        let rewinds = can_rewind(self.config);
        let reach = |a: &Aside| a.held.reach(prompt, rewinds).0;
        let best = self.aside.iter().enumerate().map(|(at, a)| (reach(a), a.held.used, at)).max()?;
        Some((best.0, best.2))
    }

    /// Puts to work the text that holds most of `prompt`; where none holds any of it, an empty one, for which the least recently
    /// used one goes if as many are kept as may be.
    fn turn_to(&mut self, prompt: &[u32]) -> Result<(), DecodeError> {
        self.turn += 1;
        let here = self.held.reach(prompt, can_rewind(self.config)).0;
        match self.best_aside(prompt) {
            Some((reach, at)) if reach > here => self.exchange(at),
            _ if here > 0 || !self.held.is_kept() => {}
            _ => {
                let oldest = (0..self.aside.len()).min_by_key(|at| self.aside[*at].held.age());
                let empty = oldest.filter(|at| !self.aside[*at].held.is_kept());
                if empty.is_none() && self.aside.len() + 1 < self.most {
                    let taken =
                        |lane: &usize| self.held.lane == *lane || self.aside.iter().any(|a| a.held.lane == *lane);
                    let lane = (0..self.most).find(|lane| !taken(lane)).unwrap_or(0);
                    let held = Held { lane, ..Held::default() };
                    self.aside.push(Aside { timeline: self.session.another_text(lane)?, held });
                    self.exchange(self.aside.len() - 1);
                } else if let Some(at) = empty.or(oldest) {
                    self.exchange(at);
                }
                self.evicted += u64::from(self.held.is_kept());
                (self.held.marked, self.held.fed) = (0, Vec::new());
            }
        }
        self.held.used = self.turn;
        Ok(())
    }

    /// The text at work changes places with one that stands aside.
    fn exchange(&mut self, at: usize) {
        let Aside { timeline, held } = &mut self.aside[at];
        self.session.exchange(timeline);
        std::mem::swap(&mut self.held, held);
    }

    /// Reads what the session does not hold of the prompt, and generates. Once `gone` is set nobody wants the text any more: a
    /// prompt is then given up within a layer (`None`), a text that has begun within a token.
    ///
    /// # Errors
    /// Whatever a pass says; the next text is then read as a whole.
    pub fn generate(
        &mut self,
        text: Text<'_>,
        sampler: &mut Sampler,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
        gone: &AtomicBool,
    ) -> Result<Option<Turn>, GenerateError> {
        self.turn_to(text.prompt)?;
        let Self { model, config, source, session, speculator, held, .. } = self;
        let rewinds = can_rewind(config);
        let reused = held.go_back(session, text.prompt, rewinds);
        held.fed.clear(); // until the text has ended well there is nothing to rely on
        let request = Request {
            prompt: text.prompt,
            max_new: text.max_new,
            stop: &model.stop_ids,
            piece_rows: config.model.prefill_rows,
        };
        let behind = if reused == text.prompt.len() { std::mem::take(&mut held.logits) } else { Vec::new() };
        let mut at_prompt_end = |session: &mut Session| {
            if rewinds {
                session.mark();
                let logits = if behind.is_empty() { session.logits() } else { &behind };
                held.logits.clear();
                held.logits.extend_from_slice(logits);
            }
        };
        let mut see = |token| match gone.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => on_token(token),
        };
        let beside = Beside {
            speculator: speculator.as_mut(),
            held: HeldPrompt { tokens: reused, logits: &behind },
            at_prompt_end: Some(&mut at_prompt_end),
            ..Beside::default()
        };
        let mut source = Wanted { source: source.as_mut(), gone };
        let done = generate_with(session, &mut source, sampler, request, &mut see, beside);
        let generation = match done {
            Err(GenerateError::Decode(_)) if gone.load(Ordering::Relaxed) => return Ok(None),
            done => done?,
        };
        held.fed.extend_from_slice(text.prompt);
        held.fed.extend_from_slice(&generation.token_ids);
        held.fed.truncate(session.position()); // the last token was not fed
        held.marked = text.prompt.len();
        Ok(Some(Turn { generation, reused }))
    }
}

/// A source that reads no more of a prompt once nobody wants the text.
struct Wanted<'a> {
    source: &'a mut dyn ExpertSource,
    gone: &'a AtomicBool,
}

impl ExpertSource for Wanted<'_> {
    fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        // later passes are short, and a text that is given up between them can be gone on with
        if step.phase == Phase::Prefill && self.gone.load(Ordering::Relaxed) {
            return Err(SourceError::Timeout("nobody waits for this text any more".into()));
        }
        self.source.open_barrier(step, layer, experts)
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        self.source.next_arrival()
    }

    fn at_hand(&self) -> usize {
        self.source.at_hand()
    }

    fn close_barrier(&mut self) {
        self.source.close_barrier();
    }

    fn lookahead(&self) -> u32 {
        self.source.lookahead()
    }

    fn hint(&mut self, step: &StepInfo, layer: LayerId, guesses: &[Guess]) {
        self.source.hint(step, layer, guesses);
    }

    fn retract(&mut self, step: &StepInfo, layer: LayerId) {
        self.source.retract(step, layer);
    }
}

/// Whether the session can go back to where a prompt ended: who guesses from the text would not be told.
fn can_rewind(config: &RunConfig) -> bool {
    config.reader.prefetch != PrefetchPolicy::Draft
}

/// From where a prompt can be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// From its beginning.
    Begin,
    /// From where a text was marked.
    Mark,
    /// From where it ended.
    End,
}

impl Held {
    /// Whether there is anything to go on from.
    fn is_kept(&self) -> bool {
        !self.fed.is_empty()
    }

    /// The lower, the sooner it is given up.
    fn age(&self) -> (bool, u64) {
        (self.is_kept(), self.used)
    }

    /// How much of `prompt` need not be read, and from where it would go on.
    fn reach(&self, prompt: &[u32], can_rewind: bool) -> (usize, Place) {
        let (fed, marked) = (self.fed.len(), self.marked);
        if fed > 0 && prompt.len() > fed && prompt.starts_with(&self.fed) {
            return (fed, Place::End);
        }
        let again = can_rewind && marked > 0 && fed >= marked && prompt.starts_with(&self.fed[..marked]);
        match again && (prompt.len() > marked || !self.logits.is_empty()) {
            true => (marked, Place::Mark),
            false => (0, Place::Begin),
        }
    }

    /// Puts the session to the latest place from which `prompt` goes on; returns how much of it that is.
    fn go_back(&self, session: &mut Session, prompt: &[u32], can_rewind: bool) -> usize {
        match self.reach(prompt, can_rewind) {
            (fed, Place::End) if session.position() == fed => fed,
            (marked, Place::Mark) if session.rewind().is_ok() => marked,
            _ => {
                session.reset();
                0
            }
        }
    }
}
