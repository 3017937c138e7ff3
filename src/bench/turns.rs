//! A loaded model with all that a run has, kept for one text after another: the turns of a conversation, the requests of a
//! server. A text that begins with what the session still holds is read from there on only. A recurrent state is of one position,
//! so there are two such places: where the last text ended, and where its prompt did. Knows no terminal and no network.

use super::activations::use_activations;
use super::affinity::Placed;
use super::config::{ConfigError, RunConfig};
use super::run::{give_threads, use_threads};
use super::{fits, kv};
use crate::clock::Clock;
use crate::decode::generate::{Beside, GenerateError, Generation, HeldPrompt, Request, generate_with};
use crate::decode::sampler::Sampler;
use crate::decode::{Session, Speculator};
use crate::drive::spec::DriveSpec;
use crate::ids::{ExpertId, LayerId};
use crate::layout::plan::Plan;
use crate::open::{DraftModel, Model, NoExperts, OpenError};
use crate::reader::{PrefetchPolicy, ReaderHandle};
use crate::source::{ExpertSource, Guess, Lease, Phase, SourceError, StepInfo};
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
}

/// A session and its source, for one text after another.
pub struct Turns<'m> {
    model: &'m Model,
    config: &'m RunConfig,
    source: Box<dyn ExpertSource>,
    session: Session,
    speculator: Option<Speculator>,
    handle: Option<ReaderHandle>,
    held: Held,
    // dropped after what its threads belong to
    placed: Placed<'m>,
}

/// What the session knows of texts before.
#[derive(Default)]
struct Held {
    /// Tokens that it was fed; empty = none that can be relied on.
    fed: Vec<u32>,
    /// The beginning of these that it can go back to.
    marked: usize,
    /// Logits behind that beginning.
    logits: Vec<f32>,
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
    /// its drives are; `None` = experts in memory, if the model has any.
    pub fn open(
        model: &'m Model,
        config: &'m RunConfig,
        draft: Option<&DraftModel>,
        streamed: Option<&(Plan, Vec<DriveSpec>)>,
    ) -> Result<Self, TurnsError> {
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
        let (context, prefetch) = (config.model.max_context, config.reader.prefetch);
        let mut session = model.bounded_session(context, rows, prefetch, clock, kv::limit_of(config))?;
        let reader = handle.as_ref().zip(streamed).map(|(handle, (_, mounts))| (handle, mounts.as_slice()));
        let pace = reader.and_then(|(handle, mounts)| handle.pace(model.own_drive(mounts)?));
        // how long a conversation becomes is not known: a drive that fills up says so
        placed.reading(|| kv::open(model, config, session.kv_mut(), (config.max_new, clock, false), reader))?;
        let speculator = model.speculator(&config.draft, draft, &config.sampler, rows, &session)?;
        placed.reading(|| model.stream_trunk(session.trunk_mut(), &config.reader, clock, pace))?;
        Ok(Self { model, config, source, session, speculator, handle, held: Held::default(), placed })
    }

    /// Where to look at what the reader does; `None` when nothing streams.
    pub fn handle(&self) -> Option<ReaderHandle> {
        self.handle.clone()
    }

    /// Starts something that neither computes nor reads: its threads may run wherever those that read may.
    pub fn beside<T>(&self, make: impl FnOnce() -> T) -> T {
        self.placed.reading(make)
    }

    /// Whether a text fits.
    ///
    /// # Errors
    /// A sentence that says what would fit.
    pub fn check(&self, text: Text<'_>) -> Result<(), String> {
        check_prompt(self.model, self.config, text.prompt.len())?;
        let config = RunConfig { max_new: text.max_new, ..self.config.clone() };
        fits::check_turn(self.model, &config, text.prompt.len())
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

impl Held {
    /// Puts the session to the latest place from which `prompt` goes on; returns how much of it that is.
    fn go_back(&self, session: &mut Session, prompt: &[u32], can_rewind: bool) -> usize {
        let (fed, marked) = (self.fed.len(), self.marked);
        if fed > 0 && session.position() == fed && prompt.len() > fed && prompt.starts_with(&self.fed) {
            return fed;
        }
        let again = can_rewind && marked > 0 && fed >= marked && prompt.starts_with(&self.fed[..marked]);
        if again && (prompt.len() > marked || !self.logits.is_empty()) && session.rewind().is_ok() {
            return marked;
        }
        session.reset();
        0
    }
}
