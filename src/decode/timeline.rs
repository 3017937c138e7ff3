//! What belongs to one text: the memory of every layer, the position, and whether a pass failed half-way. A pass runs
//! over lanes, each a timeline with its consecutive rows. Rows that check proposals are fed on trial: only those that are kept
//! become text. Knows no weights, no source and no other text.

use super::error::DecodeError;
use super::held::{Held, HeldLayer, Mark};
use super::kernels::Kernels;
use super::kv::{CacheShape, KvTier};
use super::latent::Latent;
use super::scratch::{BLOCK_ROWS, KdaState, State, mla_values};
use super::session::KdaView;
use crate::clock::Clock;
use crate::ids::LayerId;
use crate::model::config::ModelConfig;
use crate::source::StepInfo;

/// One text's state.
pub struct Timeline {
    states: Vec<State>,
    /// Numbers that an MLA layer keeps of one token.
    cached: usize,
    max_context: usize,
    position: usize,
    usable: bool,
    /// Which text of a batch it holds: its place among the prompts.
    text: usize,
    held: Held,
    /// Whether the rows of the pass at work are on trial.
    on_trial: bool,
    /// A pass whose rows wait for a word on how many are kept.
    waiting: Option<StepInfo>,
    mark: Option<Mark>,
}

/// A KDA layer's state, and for rows on trial the place where they are held and a head's working state.
pub(super) type Recurrence<'a> = (&'a mut KdaState, Option<(&'a mut HeldLayer, &'a mut [f32])>);

impl Timeline {
    /// An empty text of at most `max_context` tokens, which the model must allow.
    pub fn new(cfg: &ModelConfig, max_context: usize) -> Result<Self, DecodeError> {
        Self::in_lane(cfg, max_context, CacheShape::Whole, 0)
    }

    /// The same, in lane `lane`, with latent caches of this shape.
    pub(super) fn in_lane(
        cfg: &ModelConfig,
        max_context: usize,
        shape: CacheShape,
        lane: usize,
    ) -> Result<Self, DecodeError> {
        check_option("max_context", max_context, cfg.max_position_embeddings)?;
        let states = State::empty(cfg, max_context, shape, lane);
        Ok(Self {
            states,
            cached: mla_values(cfg),
            max_context,
            position: 0,
            usable: true,
            text: 0,
            held: Held::default(),
            on_trial: false,
            waiting: None,
            mark: None,
        })
    }

    /// Tokens fed so far: the position of the next one.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Memory that it takes: states, the copies of a mark, and as many rows of caches as were ever filled.
    pub fn held_bytes(&self) -> u64 {
        let values = |kda: &KdaState| kda.s.len() + kda.conv.iter().map(Vec::len).sum::<usize>();
        let copies = if self.mark.is_some() { 2 } else { 1 };
        let of = |state: &State| match state {
            State::Kda(kda) => copies * values(kda),
            State::Mla(cache) => cache.most_rows() * self.cached,
        };
        self.states.iter().map(of).sum::<usize>() as u64 * size_of::<f32>() as u64
    }

    /// Changes places with another text. What rows on trial are held in stays: it is needed by one text at a time.
    pub(super) fn exchange(&mut self, other: &mut Self) {
        std::mem::swap(self, other);
        std::mem::swap(&mut self.held, &mut other.held);
    }

    /// Most tokens that it holds.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// Forgets the text; the next one is at place `text` among the prompts of a batch.
    pub(super) fn begin_text(&mut self, text: usize) {
        self.reset();
        self.text = text;
    }

    /// Which text of a batch it holds.
    pub(super) fn text(&self) -> usize {
        self.text
    }

    /// Forgets the text.
    pub fn reset(&mut self) {
        self.states.iter_mut().for_each(State::reset);
        self.position = 0;
        self.usable = true;
        (self.on_trial, self.waiting, self.mark) = (false, None, None);
    }

    /// The memory of a KDA layer; `None` for other layers.
    pub fn kda_state(&self, layer: LayerId) -> Option<KdaView<'_>> {
        match self.states.get(layer.index())? {
            State::Kda(s) => Some(KdaView { state: &s.s, conv: [&s.conv[0], &s.conv[1], &s.conv[2]] }),
            State::Mla(_) => None,
        }
    }

    /// The cached rows of an MLA layer, `[position, kv_lora + rope]`; `None` for other layers, and where not all are in memory.
    pub fn mla_rows(&self, layer: LayerId) -> Option<&[f32]> {
        match self.states.get(layer.index())? {
            State::Mla(cache) if cache.first() == 0 => Some(cache.pieces(0..self.position)[0]),
            State::Mla(_) | State::Kda(_) => None,
        }
    }

    /// Appends everything that the text is remembered by to `out`, layer by layer: a state and its three histories, or rows of a cache;
    /// little-endian. Rows that are not in memory come from `kv`.
    pub(super) fn write_to(&self, kv: &KvTier, out: &mut Vec<u8>) -> Result<(), DecodeError> {
        if !self.usable || self.waiting.is_some() {
            return Err(DecodeError::Unusable);
        }
        for (state, layer) in self.states.iter().zip((0..).map(LayerId)) {
            match state {
                State::Kda(kda) => std::iter::once(&kda.s).chain(&kda.conv).for_each(|values| append(values, out)),
                State::Mla(cache) => {
                    let ((blocks, base), first) = (cache.spilled(), cache.first().min(self.position));
                    for block in base..base + blocks {
                        let from = out.len();
                        kv.copy(layer, block, cache.block_rows() * self.cached * size_of::<f32>(), out)?;
                        if cfg!(target_endian = "big") {
                            out[from..].chunks_exact_mut(4).for_each(<[u8]>::reverse);
                        }
                    }
                    cache.pieces(first..self.position).iter().for_each(|values| append(values, out));
                }
            }
        }
        Ok(())
    }

    /// Has the same filled by `fill` for a text of `position` tokens. Until [`Timeline::resume_at`] it belongs to no text.
    pub(super) fn read_from<E: From<DecodeError>>(
        &mut self,
        position: usize,
        (kv, clock): (&mut KvTier, Clock),
        fill: &mut dyn FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        if position > self.max_context {
            return Err(DecodeError::ContextFull { needed: position, max: self.max_context }.into());
        }
        self.reset();
        self.usable = false;
        for (state, layer) in self.states.iter_mut().zip((0..).map(LayerId)) {
            match state {
                State::Kda(kda) => {
                    let parts = std::iter::once(&mut kda.s).chain(&mut kda.conv);
                    parts.into_iter().try_for_each(|values| fill(values))?;
                }
                State::Mla(cache) => {
                    let mut at = 0;
                    while at < position {
                        let rows = kv.make_room(cache, (layer, clock), at, kv.some_rows(position - at), at)?;
                        let (place, grown) = cache.place(at, rows);
                        at += place.len() / self.cached;
                        fill(place)?;
                        kv.note((grown, 0));
                    }
                }
            }
        }
        Ok(())
    }

    /// Every part is there: the text has `position` tokens.
    pub(super) fn resume_at(&mut self, position: usize) {
        self.position = position;
        self.usable = true;
    }

    /// Whether `rows` more rows can be fed; changes nothing.
    pub(super) fn check(&self, rows: usize) -> Result<(), DecodeError> {
        if !self.usable {
            return Err(DecodeError::Unusable);
        }
        let needed = self.position.saturating_add(rows);
        match needed > self.max_context {
            true => Err(DecodeError::ContextFull { needed, max: self.max_context }),
            false => Ok(()),
        }
    }

    /// A pass begins to change the state: until [`Timeline::advance`] it belongs to no text. With rows on trial the
    /// recurrent states stay as they are.
    pub(super) fn begin(&mut self, on_trial: bool) {
        self.usable = false;
        self.on_trial = on_trial;
    }

    /// Makes room for passes of up to `rows` rows on trial.
    pub(super) fn reserve_trial(&mut self, cfg: &ModelConfig, rows: usize) {
        self.held.reserve(cfg, rows.min(BLOCK_ROWS));
    }

    /// Most rows on trial.
    pub(super) fn trial_rows(&self) -> usize {
        self.held.rows()
    }

    /// The pass `step` over rows on trial is done: nothing else is fed before [`Timeline::keep`].
    pub(super) fn wait(&mut self, step: StepInfo) {
        self.waiting = Some(step);
    }

    /// The first `rows` rows of the pass that waits become text, the others never were. Returns that pass.
    pub(super) fn keep(&mut self, kernels: &Kernels, rows: usize) -> Result<StepInfo, DecodeError> {
        let step = self.waiting.ok_or(DecodeError::Unusable)?;
        let max = step.rows as usize;
        if !(1..=max).contains(&rows) {
            return Err(DecodeError::Rows { rows, max });
        }
        self.held.replay(kernels, &mut self.states, rows);
        self.waiting = None;
        self.advance(rows);
        Ok(step)
    }

    /// Remembers the text as it is.
    pub(super) fn mark(&mut self) {
        self.mark.get_or_insert_default().take(&self.states, self.position);
    }

    /// Goes back to what was marked, whatever was fed or failed since.
    pub(super) fn rewind(&mut self) -> Result<(), DecodeError> {
        let mark = self.mark.as_ref().ok_or(DecodeError::Unusable)?;
        let reached = |state: &State| !matches!(state, State::Mla(cache) if !cache.reaches_back_to(mark.position()));
        if !self.states.iter().all(reached) {
            return Err(DecodeError::Unusable);
        }
        self.position = mark.restore(&mut self.states);
        (self.usable, self.on_trial, self.waiting) = (true, false, None);
        Ok(())
    }

    /// The pass over `rows` rows is done.
    pub(super) fn advance(&mut self, rows: usize) {
        self.position += rows;
        self.usable = true;
    }

    /// The state of KDA layer `layer`.
    pub(super) fn kda(&mut self, layer: LayerId) -> Result<Recurrence<'_>, DecodeError> {
        let held = if self.on_trial { self.held.layer(layer) } else { None };
        match self.states.get_mut(layer.index()) {
            Some(State::Kda(state)) if held.is_some() || !self.on_trial => Ok((state, held)),
            _ => Err(of_another_kind(layer)),
        }
    }

    /// The cache of MLA layer `layer`, and the position from which on rows are not text yet and may be taken back.
    pub(super) fn mla(&mut self, layer: LayerId) -> Result<(&mut Latent, usize), DecodeError> {
        let kept = if self.on_trial { self.position } else { self.max_context };
        match self.states.get_mut(layer.index()) {
            Some(State::Mla(cache)) => Ok((cache, kept)),
            _ => Err(of_another_kind(layer)),
        }
    }
}

fn append(values: &[f32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        out.extend_from_slice(bytemuck::cast_slice(values));
    } else {
        values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
    }
}

/// An option of a session or timeline that must lie in 1 to `max`.
pub(super) fn check_option(option: &'static str, seen: usize, max: usize) -> Result<(), DecodeError> {
    match (1..=max).contains(&seen) {
        true => Ok(()),
        false => Err(DecodeError::Option { option, seen: seen as u64, expected: format!("1 to {max}") }),
    }
}

fn of_another_kind(layer: LayerId) -> DecodeError {
    DecodeError::Config(format!("layer {layer} has the state of another kind"))
}

/// A text's share of a pass: its rows are consecutive, in the order of the lanes.
pub(super) struct Lane<'a> {
    pub(super) timeline: &'a mut Timeline,
    /// One row each, from the timeline's position on.
    pub(super) tokens: &'a [u32],
}

/// Where a row of a pass belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) lane: usize,
    /// Which text of a batch the lane holds.
    pub(super) text: usize,
    /// Position in the lane's text.
    pub(super) position: u64,
}

/// What one lane has in a block of rows.
pub(super) struct Part<'a> {
    pub(super) timeline: &'a mut Timeline,
    /// Its first row, counted in the block.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Position of that row in the lane's text.
    pub(super) position: usize,
}

/// The lanes that have rows among the `count` rows from `first` on.
pub(super) fn parts<'s>(lanes: &'s mut [Lane<'_>], first: usize, count: usize) -> impl Iterator<Item = Part<'s>> {
    let mut row = 0;
    lanes.iter_mut().filter_map(move |lane| {
        let own = row..row + lane.tokens.len();
        row = own.end;
        let (start, end) = (own.start.max(first), own.end.min(first + count));
        let position = lane.timeline.position + start.saturating_sub(own.start);
        let timeline = &mut *lane.timeline;
        (start < end).then(|| Part { timeline, first: start - first, count: end - start, position })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(position: usize) -> Timeline {
        Timeline {
            states: Vec::new(),
            cached: 1,
            max_context: 100,
            position,
            usable: true,
            text: 0,
            held: Held::default(),
            on_trial: false,
            waiting: None,
            mark: None,
        }
    }

    #[test]
    fn a_block_sees_each_lanes_rows_and_positions() {
        let (mut a, mut b, mut c) = (at(10), at(0), at(7));
        let mut lanes = [
            Lane { timeline: &mut a, tokens: &[1] },
            Lane { timeline: &mut b, tokens: &[1; 5] },
            Lane { timeline: &mut c, tokens: &[1; 2] },
        ];
        let mut seen = |first, count| -> Vec<(usize, usize, usize)> {
            parts(&mut lanes, first, count).map(|p| (p.first, p.count, p.position)).collect()
        };
        assert_eq!(seen(0, 8), [(0, 1, 10), (1, 5, 0), (6, 2, 7)]);
        assert_eq!(seen(0, 4), [(0, 1, 10), (1, 3, 0)]);
        assert_eq!(seen(4, 4), [(0, 2, 3), (2, 2, 7)]);
        assert_eq!(seen(7, 1), [(0, 1, 8)]);
    }
}
