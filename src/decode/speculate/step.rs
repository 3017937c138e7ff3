//! One step of a text with proposals: choose how many, have them made, check them in one pass, keep what is right, and leave
//! every state as if the wrong ones had never been fed.

use super::adaptive::{Adaptive, DepthPolicy, PassSeen};
use super::counters::SpeculateCounters;
use super::options::{AcceptRule, SpeculateOptions};
use super::{Drafter, DrafterKind, MAX_DEPTH, Proposals, SpeculateError};
use crate::decode::generate::{GenerateError, Growing, again};
use crate::decode::observe::Observer;
use crate::decode::sampler::{Sampler, SamplerError};
use crate::decode::session::{Logits, Session};
use crate::knob::{self, Knob};
use crate::source::{ExpertSource, Phase};

/// Speculates on one text after the other.
pub struct Speculator {
    drafter: Box<dyn Drafter>,
    depth: usize,
    policy: DepthPolicy,
    accept: AcceptRule,
    adaptive: Adaptive,
    proposals: Proposals,
    rows: Vec<u32>,
    counters: SpeculateCounters,
}

impl Speculator {
    /// Speculates with `drafter` as `options` say.
    pub fn new(options: &SpeculateOptions, drafter: Box<dyn Drafter>) -> Self {
        let depth = options.draft_depth.clamp(1, MAX_DEPTH);
        Self {
            drafter,
            depth,
            policy: options.draft_policy,
            accept: options.draft_accept,
            adaptive: Adaptive::new(depth),
            proposals: Proposals::default(),
            rows: Vec::with_capacity(depth + 1),
            counters: SpeculateCounters::default(),
        }
    }

    /// What it did so far.
    pub fn counters(&self) -> &SpeculateCounters {
        &self.counters
    }

    /// Most rows of a pass.
    pub(in crate::decode) fn rows(&self) -> usize {
        self.depth + 1
    }

    /// A text begins with `prompt`; at most `max_new` tokens will be added.
    pub(in crate::decode) fn begin(
        &mut self,
        session: &mut Session,
        prompt: &[u32],
        max_new: usize,
    ) -> Result<(), SpeculateError> {
        let start_ns = session.clock().now_ns();
        session.reserve_verify(self.depth + 1);
        let longest = prompt.len().saturating_add(max_new).min(session.max_context());
        self.drafter.begin(prompt, longest)?;
        self.counters.draft_ns += session.clock().now_ns() - start_ns;
        Ok(())
    }

    /// The text is one token longer by something else than a step.
    pub(in crate::decode) fn extend(&mut self, token: u32) {
        self.drafter.extend(token);
    }

    /// Proposals that the next pass should check.
    fn choose(&mut self) -> usize {
        let most = if knob::skipped(Knob::DraftDepth) { self.depth / 2 } else { self.depth };
        let adaptive = self.policy == DepthPolicy::Adaptive && !knob::skipped(Knob::DraftPolicy);
        if adaptive || knob::forced(Knob::DraftPolicy) {
            let depth = self.adaptive.depth().min(most);
            self.counters.chosen_adaptive[depth] += 1;
            return depth;
        }
        self.counters.chosen_fixed[most] += 1;
        most
    }

    /// Adds at least one token to `text`, whose last one has not been fed; says whether the text goes on.
    pub(in crate::decode) fn step(
        &mut self,
        session: &mut Session,
        source: &mut dyn ExpertSource,
        sampler: &mut Sampler,
        text: &mut Growing<'_>,
        observer: &mut Option<&mut dyn Observer>,
    ) -> Result<bool, GenerateError> {
        let (clock, position) = (session.clock(), session.position());
        // A pass gives one token more than it checks, and feeds one row more.
        let room = text.left().min(session.max_context().saturating_sub(position)).saturating_sub(1);
        let depth = self.choose().min(room);
        let start_ns = clock.now_ns();
        self.proposals.clear();
        if depth > 0 {
            self.drafter.propose(depth, &mut self.proposals)?;
        }
        let draft_ns = clock.now_ns() - start_ns;
        let proposed = self.proposals.tokens().len();
        self.count_made(proposed, depth);
        self.rows.clear();
        self.rows.push(text.last());
        self.rows.extend_from_slice(self.proposals.tokens());

        let start_ns = clock.now_ns();
        let logits = match proposed {
            0 => session.forward(&self.rows, Phase::Decode, source, Logits::Last, again(observer))?,
            _ => session.verify(&self.rows, source, again(observer))?,
        };
        let mut pass_ns = clock.now_ns() - start_ns;
        let (mut fed, mut accepted, mut goes_on) = (0, 0, true);
        for (row, logits) in logits.chunks_exact(logits.len() / self.rows.len()).enumerate() {
            let token = judge(&self.proposals, row, self.accept, sampler, logits, position, &mut self.counters)?;
            let right = self.proposals.tokens().get(row) == Some(&token);
            fed += 1;
            accepted += usize::from(right);
            self.drafter.extend(token);
            goes_on = text.take(token);
            if !goes_on || !right {
                break;
            }
        }
        if proposed > 0 {
            let start_ns = clock.now_ns();
            session.keep(fed, again(observer))?;
            pass_ns += clock.now_ns() - start_ns;
            self.counters.replayed_rows += fed as u64;
        }
        let seen = PassSeen { proposed, accepted, pass_ns, draft_ns };
        self.counters.caches = self.drafter.caches();
        self.counters.note(&seen, fed as u64, &session.counters().last);
        self.adaptive.saw(seen);
        Ok(goes_on)
    }

    fn count_made(&mut self, proposed: usize, depth: usize) {
        match self.drafter.kind() {
            DrafterKind::Off => {}
            DrafterKind::Ngram => self.counters.by_ngram += proposed as u64,
            DrafterKind::Model => self.counters.by_model += proposed as u64,
        }
        self.counters.cut += u64::from(proposed > 0 && proposed == depth);
    }
}

/// The token that comes after row `row`, which proposal `row` guessed at, if there is one.
fn judge(
    proposals: &Proposals,
    row: usize,
    accept: AcceptRule,
    sampler: &mut Sampler,
    logits: &[f32],
    position: usize,
    counters: &mut SpeculateCounters,
) -> Result<u32, SamplerError> {
    let position = (position + row + 1) as u64;
    let Some(&proposal) = proposals.tokens().get(row) else { return sampler.sample(logits, position) };
    let standard = accept == AcceptRule::Standard && !knob::skipped(Knob::DraftAccept);
    if !(standard || knob::forced(Knob::DraftAccept)) {
        counters.judged_exact += 1;
        return sampler.sample(logits, position);
    }
    counters.judged_standard += 1;
    match proposals.distribution(row) {
        Some(q) => sampler.accept(logits, position, proposal, q),
        // For a certain proposal this is the standard rule too: see `sampler::accept`.
        None => sampler.sample(logits, position),
    }
}
