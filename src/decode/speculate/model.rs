//! Proposals from a small model: it has a timeline of its own, which reads the text, runs ahead of it by the proposals, and
//! is put back to the text before it reads on.

use super::{Drafter, DrafterKind, Proposals};
use crate::decode::kv::KvCounters;
use crate::decode::sampler::{Sampler, greedy};
use crate::decode::session::{Logits, Session};
use crate::decode::speculate::SpeculateError;
use crate::source::{NoExperts, Phase};

/// Drafts with a dense model.
pub struct ModelDrafter {
    session: Session,
    /// Draws proposals; without one the most likely token is proposed.
    sampler: Option<Sampler>,
    /// Most rows that are read at once.
    piece_rows: usize,
    /// The text, and how much of it the session's marked state has read.
    text: Vec<u32>,
    read: usize,
}

impl ModelDrafter {
    /// Drafts with `session`, which belongs to a dense model and reads at most `piece_rows` rows at once; `sampler` draws
    /// the proposals.
    pub fn new(session: Session, sampler: Option<Sampler>, piece_rows: usize) -> Self {
        Self { session, sampler, piece_rows: piece_rows.max(1), text: Vec::new(), read: 0 }
    }

    /// Reads the text up to `end`, and on the way forgets what was proposed.
    fn catch_up(&mut self, end: usize, want: Logits) -> Result<&[f32], SpeculateError> {
        self.session.rewind()?;
        let pieces = self.text[self.read..end].chunks(self.piece_rows);
        let last = pieces.len().saturating_sub(1);
        for (at, piece) in pieces.enumerate() {
            let want = if at == last { want } else { Logits::None };
            self.session.forward(piece, Phase::Prefill, &mut NoExperts, want, None)?;
        }
        self.read = end;
        self.session.mark();
        Ok(self.session.logits())
    }
}

impl Drafter for ModelDrafter {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Model
    }

    fn caches(&self) -> KvCounters {
        self.session.kv().counters()
    }

    fn begin(&mut self, prompt: &[u32], longest: usize) -> Result<(), SpeculateError> {
        self.session.reset();
        self.session.mark();
        self.text.clear();
        self.text.reserve(longest);
        self.text.extend_from_slice(prompt);
        self.read = 0;
        if self.text.len() <= self.session.max_context() {
            self.catch_up(prompt.len(), Logits::None)?;
        }
        Ok(())
    }

    fn extend(&mut self, token: u32) {
        self.text.push(token);
    }

    fn propose(&mut self, depth: usize, out: &mut Proposals) -> Result<(), SpeculateError> {
        // The last proposal is not read.
        let room = (self.session.max_context() + 1).saturating_sub(self.text.len());
        let depth = depth.min(room);
        if depth == 0 || self.text.is_empty() {
            return Ok(());
        }
        self.catch_up(self.text.len(), Logits::Last)?;
        for ahead in 1..=depth {
            let position = (self.text.len() + ahead - 1) as u64;
            let logits = self.session.logits();
            let token = match &mut self.sampler {
                Some(sampler) => sampler.propose(logits, position, out.next_distribution())?,
                None => greedy(logits, position)?,
            };
            out.push(token);
            if ahead < depth {
                self.session.forward(&[token], Phase::Decode, &mut NoExperts, Logits::Last, None)?;
            }
        }
        Ok(())
    }
}
