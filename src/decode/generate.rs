//! Prompt in, tokens out: feeds a prompt in pieces, then extends the text one token at a time, and keeps the times
//! from which rates are made (measuring.md section 1). Prints nothing; knows no tokenizer.

use super::error::DecodeError;
use super::observe::Observer;
use super::sampler::{Sampler, SamplerError};
use super::session::{Logits, Session};
use super::snapshot::{Snapshots, TextState};
use super::speculate::{SpeculateError, Speculator};
use crate::clock::Clock;
use crate::knob::{self, Knob};
use crate::source::{ExpertSource, Phase};
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;

/// Rows of a prompt that are fed in one pass unless told otherwise. A pass goes through a layer with all of its rows and
/// asks for each expert once, so a prompt of more rows reads experts again; memory of a pass grows with its rows.
pub const DEFAULT_PIECE_ROWS: usize = 4096;

/// Generation failed.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// A pass failed.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Logits could not be sampled from.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// Proposals could not be made.
    #[error(transparent)]
    Speculate(#[from] SpeculateError),
    /// The text could not be kept.
    #[error("{0}")]
    Snapshot(String),
    /// A text is to go on that the session does not hold.
    #[error(
        "{generated} tokens were generated after {prompt} of prompt, and the session holds {position} of them; restore the snapshot first"
    )]
    Resume {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens generated.
        generated: usize,
        /// Tokens that the session was fed.
        position: usize,
    },
    /// The session does not hold the part of the prompt that is said to have been fed, or there is nothing to go on from.
    #[error(
        "{fed} of {prompt} prompt tokens are said to have been fed, and the session holds {position}; reset it first"
    )]
    Fed {
        /// Tokens said to have been fed.
        fed: usize,
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the session was fed.
        position: usize,
    },
    /// There is nothing to start from.
    #[error("the prompt is empty; give at least one token of text")]
    EmptyPrompt,
}

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The prompt, at least one token.
    pub prompt: &'a [u32],
    /// Most tokens to generate.
    pub max_new: usize,
    /// Tokens that end the text (they are part of the output).
    pub stop: &'a [u32],
    /// Prompt rows per pass.
    pub piece_rows: usize,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// A stop token was generated.
    StopToken,
    /// `max_new` tokens were generated.
    MaxNew,
    /// The session's context is full.
    ContextFull,
    /// The caller asked to end.
    Interrupted,
}

/// What was generated, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Generated ids, the stop id included, and those before that the text was resumed with.
    pub token_ids: Vec<u32>,
    /// Of these, the ones that it was resumed with.
    pub resumed: usize,
    /// Why it ended.
    pub stopped: StopReason,
    /// Texts that got a token; 1 but for a batch. The first token of each comes from a prompt pass.
    pub texts: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// From start to the end of the last prompt pass; for a batch, what prompt passes took.
    pub prefill_ns: u64,
    /// From start to the first generated token; of a text that was resumed, to the start of its first pass.
    pub first_token_ns: u64,
    /// From start to the last generated token.
    pub last_token_ns: u64,
    /// What prompt passes of later texts took between these two.
    pub between_ns: u64,
    /// Experts that prompt passes asked for, summed over layers and passes.
    pub prefill_experts: u64,
    /// Of these, the distinct ones: no (layer, expert) counts twice.
    pub prefill_distinct: u64,
    /// Time that prompt passes waited for experts.
    pub prefill_stall_ns: u64,
    /// Time that decode passes waited for experts.
    pub decode_stall_ns: u64,
    /// Time of decoding in which it waited for latent rows to leave memory or to come back.
    pub decode_kv_stall_ns: u64,
    /// Barriers of the decode passes.
    pub decode_barriers: u64,
}

/// Rates as measuring.md section 1 defines them. Denominators are part of the definition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Seconds from request to first generated token.
    pub ttft_s: f64,
    /// Prompt tokens / prefill wall time.
    pub prefill_tok_s: f64,
    /// (generated - 1) / (last token time - first token time); 0 with fewer than two tokens. Of a batch: (generated - texts) /
    /// wall time of its decode passes.
    pub decode_tok_s: f64,
    /// Generated / whole wall time.
    pub inclusive_tok_s: f64,
}

impl Generation {
    /// The rates of this generation.
    pub fn rates(&self) -> Rates {
        let per_s = |count: usize, ns: u64| if ns == 0 { 0.0 } else { count as f64 * 1e9 / ns as f64 };
        let new = self.token_ids.len() - self.resumed;
        // tokens that prompt passes gave; a resumed text has had none
        let first = if self.resumed > 0 { 0 } else { self.texts.max(1) };
        Rates {
            ttft_s: self.first_token_ns as f64 / 1e9,
            prefill_tok_s: per_s(self.prompt_tokens, self.prefill_ns),
            decode_tok_s: per_s(new.saturating_sub(first), self.decode_ns()),
            inclusive_tok_s: per_s(new, self.last_token_ns),
        }
    }

    /// Wall time of the decode passes.
    pub fn decode_ns(&self) -> u64 {
        self.last_token_ns - self.first_token_ns - self.between_ns
    }

    /// Share of decode wall time in which compute waited for experts.
    pub fn io_wait_share(&self) -> f64 {
        if self.decode_ns() == 0 { 0.0 } else { self.decode_stall_ns as f64 / self.decode_ns() as f64 }
    }
}

/// A text while tokens are added to it.
pub(super) struct Growing<'a> {
    out: Generation,
    clock: Clock,
    stop: &'a [u32],
    max_new: usize,
    on_token: &'a mut dyn FnMut(u32) -> ControlFlow<()>,
}

impl Growing<'_> {
    /// Adds a token; says whether the text goes on.
    pub(super) fn take(&mut self, token: u32) -> bool {
        let out = &mut self.out;
        out.last_token_ns = self.clock.now_ns();
        if out.token_ids.is_empty() {
            out.first_token_ns = out.last_token_ns;
        }
        out.token_ids.push(token);
        let go_on = (self.on_token)(token);
        if self.stop.contains(&token) {
            out.stopped = StopReason::StopToken;
            return false;
        }
        if go_on.is_break() {
            out.stopped = StopReason::Interrupted;
            return false;
        }
        self.left() > 0
    }

    /// Tokens that may still be added.
    pub(super) fn left(&self) -> usize {
        self.max_new.saturating_sub(self.out.token_ids.len())
    }

    /// The token that was added last.
    pub(super) fn last(&self) -> u32 {
        self.out.token_ids.last().copied().unwrap_or_default()
    }
}

/// Feeds `request.prompt` to `session` and generates. `on_token` sees every token as it is chosen and may end the text.
/// The last token is not fed back, so a caller that continues must feed it.
pub fn generate(
    session: &mut Session,
    source: &mut dyn ExpertSource,
    sampler: &mut Sampler,
    request: Request<'_>,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Generation, GenerateError> {
    generate_with(session, source, sampler, request, on_token, Beside::default())
}

/// As [`generate`]; `observer` sees every pass.
pub fn generate_observed(
    session: &mut Session,
    source: &mut dyn ExpertSource,
    sampler: &mut Sampler,
    request: Request<'_>,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    observer: Option<&mut dyn Observer>,
) -> Result<Generation, GenerateError> {
    generate_with(session, source, sampler, request, on_token, Beside { observer, ..Beside::default() })
}

/// Who takes part in generating beside the session.
#[derive(Default)]
pub struct Beside<'a> {
    /// Sees every pass.
    pub observer: Option<&'a mut dyn Observer>,
    /// Proposes tokens, several of which are then checked in one pass.
    pub speculator: Option<&'a mut Speculator>,
    /// Keeps the text now and then.
    pub snapshots: Option<Snapshots<'a>>,
    /// Tokens that were generated before; the session holds the prompt and all of them but the last. The prompt is not read
    /// again.
    pub resumed: &'a [u32],
    /// The beginning of the prompt that the session holds already; only the rest is read.
    pub held: HeldPrompt<'a>,
    /// Is called with the session once the prompt is read; its last pass's logits are those behind the prompt.
    pub at_prompt_end: Option<&'a mut dyn FnMut(&mut Session)>,
}

/// The beginning of a prompt that a session holds from an earlier text.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeldPrompt<'a> {
    /// Its tokens; 0 = none, the session is read whatever it held before.
    pub tokens: usize,
    /// The logits behind it, needed only if it is the whole prompt.
    pub logits: &'a [f32],
}

/// As [`generate`], with whoever takes part.
pub fn generate_with(
    session: &mut Session,
    source: &mut dyn ExpertSource,
    sampler: &mut Sampler,
    request: Request<'_>,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    beside: Beside<'_>,
) -> Result<Generation, GenerateError> {
    let Beside { mut observer, mut speculator, mut snapshots, resumed, held, at_prompt_end } = beside;
    let (prompt, generated, position) = (request.prompt.len(), resumed.len(), session.position());
    if prompt == 0 {
        return Err(GenerateError::EmptyPrompt);
    }
    if generated > 0 && position != prompt + generated - 1 {
        return Err(GenerateError::Resume { prompt, generated, position });
    }
    let whole = held.tokens == prompt && !held.logits.is_empty();
    if held.tokens > 0 && (position != held.tokens || !(held.tokens < prompt || whole) || generated > 0) {
        return Err(GenerateError::Fed { fed: held.tokens, prompt, position });
    }
    let clock = Clock::start();
    let before = session.counters().total;
    session.begin_prompt();
    let piece_rows = if knob::skipped(Knob::PrefillRows) { request.piece_rows / 2 } else { request.piece_rows };
    let max_new = request.max_new + if knob::skipped(Knob::MaxNew) { 4 } else { 0 };
    let pieces = request.prompt[held.tokens..].chunks(piece_rows.max(1));
    let last_piece = pieces.len().saturating_sub(1);
    let mut next = None;
    if whole && max_new > 0 {
        next = Some(sampler.sample(held.logits, prompt as u64)?);
    }
    for (index, piece) in pieces.enumerate().filter(|_| generated == 0) {
        let want = if index == last_piece { Logits::Last } else { Logits::None };
        let position = (session.position() + piece.len()) as u64;
        let logits = session.forward(piece, Phase::Prefill, source, want, again(&mut observer))?;
        if index == last_piece && max_new > 0 {
            next = Some(sampler.sample(logits, position)?);
        }
    }
    if let Some(at_prompt_end) = at_prompt_end.filter(|_| generated == 0) {
        at_prompt_end(session);
    }
    if let Some(speculator) = &mut speculator {
        speculator.begin(session, request.prompt, max_new)?;
        resumed.iter().for_each(|id| speculator.extend(*id));
    }
    let start_ns = clock.now_ns();
    let prefill_ns = if generated == 0 { start_ns } else { 0 };
    let after_prompt = session.counters().total;
    let mut token_ids = Vec::with_capacity(request.max_new.min(1 << 20).max(generated));
    token_ids.extend_from_slice(resumed);
    let out = Generation {
        token_ids,
        resumed: generated,
        stopped: StopReason::MaxNew,
        texts: 1,
        prompt_tokens: request.prompt.len(),
        prefill_ns,
        first_token_ns: start_ns,
        last_token_ns: start_ns,
        between_ns: 0,
        prefill_experts: after_prompt.experts - before.experts,
        prefill_distinct: after_prompt.prompt_distinct - before.prompt_distinct,
        prefill_stall_ns: after_prompt.stall_ns - before.stall_ns,
        decode_stall_ns: 0,
        decode_kv_stall_ns: 0,
        decode_barriers: 0,
    };
    let mut text = Growing { out, clock, stop: request.stop, max_new, on_token };
    let mut goes_on = generated > 0 && text.left() > 0;
    let rows = speculator.as_ref().map_or(1, |s| s.rows());
    let mut kept = generated;
    if let Some(first) = next {
        if let Some(speculator) = &mut speculator {
            speculator.extend(first);
        }
        goes_on = text.take(first);
    }
    while goes_on {
        if session.position() >= session.max_context() {
            text.out.stopped = StopReason::ContextFull;
            break;
        }
        let due = snapshots.as_ref().is_some_and(|s| s.is_due(text.out.token_ids.len(), kept, rows));
        if due && !knob::skipped(Knob::SnapshotEvery) {
            kept = keep(&mut snapshots, session, sampler, request.prompt, &text.out)?;
        }
        goes_on = match &mut speculator {
            Some(speculator) => {
                settle(&mut snapshots)?;
                speculator.step(session, source, sampler, &mut text, &mut observer)?
            }
            None => {
                let position = session.position() as u64 + 1;
                let row = [text.last()];
                let logits = session.forward(&row, Phase::Decode, source, Logits::Last, again(&mut observer))?;
                // No token is handed out while more than `every` would be lost with it.
                settle(&mut snapshots)?;
                text.take(sampler.sample(logits, position)?)
            }
        };
    }
    if text.out.stopped == StopReason::Interrupted && text.out.token_ids.len() > kept {
        keep(&mut snapshots, session, sampler, request.prompt, &text.out)?;
    }
    settle(&mut snapshots)?;
    let mut out = text.out;
    let end = session.counters().total;
    out.decode_stall_ns = end.stall_ns - after_prompt.stall_ns;
    out.decode_kv_stall_ns = end.kv_stall_ns - after_prompt.kv_stall_ns;
    out.decode_barriers = end.barriers - after_prompt.barriers;
    Ok(out)
}

/// Hands the text to whoever keeps it; returns how many of its tokens will be safe.
fn keep(
    snapshots: &mut Option<Snapshots<'_>>,
    session: &Session,
    sampler: &Sampler,
    prompt: &[u32],
    out: &Generation,
) -> Result<usize, GenerateError> {
    if let Some(snapshots) = snapshots {
        snapshots.keeper.take(&TextState { session, sampler, prompt, generated: &out.token_ids })?;
    }
    Ok(out.token_ids.len())
}

/// Waits until what was handed over is safe.
fn settle(snapshots: &mut Option<Snapshots<'_>>) -> Result<(), GenerateError> {
    snapshots.as_mut().map_or(Ok(()), |s| s.keeper.settle())
}

/// The same observer, for one more pass.
pub(super) fn again<'a>(observer: &'a mut Option<&mut dyn Observer>) -> Option<&'a mut dyn Observer> {
    match observer {
        Some(observer) => Some(&mut **observer),
        None => None,
    }
}
