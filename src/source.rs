//! The decoder's only view of storage: ask for a layer's experts, take them in arrival order.
//!
//! Nothing here knows what a drive, a file or a plan is. `InMemory` (store) and `ExpertReader` (reader) implement
//! [`ExpertSource`]; the decoder holds a `&mut dyn ExpertSource` and never learns which.

use crate::ids::{ExpertId, LayerId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

pub mod guess;

/// What a forward pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Rows of a prompt.
    Prefill,
    /// One row that extends the text.
    Decode,
    /// Proposed rows being checked.
    Verify,
}

/// One forward pass, as storage sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepInfo {
    /// Counts forward passes of a session from 0.
    pub step: u64,
    /// What the pass is for.
    pub phase: Phase,
    /// Position of the pass's first row in the text.
    pub pos: u64,
    /// Rows in the pass.
    pub rows: u32,
}

/// One expert that a layer will probably need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guess {
    /// The expert.
    pub expert: ExpertId,
    /// How likely, on a scale of the guesser's own: only the order counts.
    pub score: f32,
}

/// Why experts could not be delivered. The message names expert, drive, file and offset where they are known.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A read failed and no other copy could replace it.
    #[error("{0}")]
    Read(String),
    /// The caller asked for something the source does not hold.
    #[error("{0}")]
    Unknown(String),
    /// A bounded wait ran out.
    #[error("{0}")]
    Timeout(String),
}

/// Whatever owns the bytes behind a [`Lease`]. `release` is called exactly once for each lease.
pub trait LeaseOwner: Send + Sync {
    /// The bytes of slot `slot`, `len` of them.
    fn bytes(&self, slot: u32, len: usize) -> &[u8];
    /// The lease on `slot` has ended; the slot may be used again.
    fn release(&self, slot: u32);
}

/// One expert's bytes (the six planes of k3-architecture section 3: w1, w2, w3, each packed then scale), on loan.
/// Dropping it gives the slot back.
pub struct Lease {
    expert: ExpertId,
    slot: u32,
    start: u32,
    len: u32,
    owner: Arc<dyn LeaseOwner>,
}

impl Lease {
    /// A lease on `len` bytes from byte `start` of `slot` of `owner`, which hold `expert`.
    pub fn new(expert: ExpertId, owner: Arc<dyn LeaseOwner>, slot: u32, start: u32, len: u32) -> Self {
        Self { expert, slot, start, len, owner }
    }

    /// The expert that these bytes belong to.
    pub fn expert(&self) -> ExpertId {
        self.expert
    }

    /// The expert's bytes.
    pub fn bytes(&self) -> &[u8] {
        let end = self.start as usize + self.len as usize;
        &self.owner.bytes(self.slot, end)[self.start as usize..]
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.owner.release(self.slot);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({}, {} bytes)", self.expert, self.len)
    }
}

/// What a [`BlockSource`] has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounters {
    /// Blocks handed out.
    pub blocks: u64,
    /// Of these, those whose reads had begun before they were asked for.
    pub ahead: u64,
    /// Reads that they took.
    pub reads: u64,
    /// Bytes that were read for them, alignment included.
    pub bytes: u64,
    /// Bytes of blocks that were read and never asked for.
    pub unused_bytes: u64,
}

/// Where blocks of weights come from that do not stay in memory. Two are held at a time.
pub trait BlockSource: Send {
    /// The bytes of block number `block`, whose place is given up by the next call. While they are used, block `next` is on
    /// its way. Waits where that was not said in the call before.
    fn block(&mut self, block: usize, next: Option<usize>) -> Result<&[u8], SourceError>;

    /// What was read.
    fn counters(&self) -> BlockCounters;

    /// The kernel's numbers of the threads that read.
    fn threads(&self) -> Vec<u32>;

    /// Waits for what is on its way and gives it up, so that everything read is counted.
    fn settle(&mut self);
}

/// Where blocks of a text's memory go that do not stay in memory, and come from again.
pub trait BlockStore: BlockSource {
    /// Keeps `bytes` as block number `block`, whatever it held before. Comes back when they are written.
    fn put(&mut self, block: usize, bytes: &[u8]) -> Result<(), SourceError>;

    /// The first bytes of block number `block`, as many as `out` has; apart from the blocks that are on their way.
    fn copy(&self, block: usize, out: &mut [u8]) -> Result<(), SourceError>;

    /// Blocks are asked for by `layer` of pass `step` from now on.
    fn reads_are_for(&mut self, step: u64, layer: LayerId);

    /// Nothing needs the block at hand any more, and block number `block` is the next that will be asked for, with no block kept
    /// before: it may be on its way from now on.
    fn soon(&mut self, block: usize) -> Result<(), SourceError>;
}

/// Where experts come from. One barrier is open at a time.
pub trait ExpertSource: Send {
    /// Opens a barrier: `experts` (distinct, any order) of `layer` are now demanded.
    fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError>;

    /// The next expert of the open barrier **in arrival order**; `None` when all have been handed over.
    /// May wait. Leases that are still held keep their slots: a set larger than the buffer budget comes in
    /// waves, so a caller must drop leases to receive the rest.
    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError>;

    /// Experts of the open barrier that [`next_arrival`](Self::next_arrival) gives without waiting, as far as is known without
    /// looking for news.
    fn at_hand(&self) -> usize {
        0
    }

    /// Ends the open barrier; whatever was not taken is given up.
    fn close_barrier(&mut self);

    /// How many layers ahead of the one at work this source wants to be told guesses by [`hint`](Self::hint); 0, the
    /// rule for a source that reads nothing, means that making guesses would be wasted work.
    fn lookahead(&self) -> u32 {
        0
    }

    /// The experts that `layer` of pass `step` will probably ask for, the likeliest first. Replaces what was said about
    /// that layer of that pass before. Never waits, and a wrong guess costs bytes, never a wrong result.
    fn hint(&mut self, _step: &StepInfo, _layer: LayerId, _guesses: &[Guess]) {}

    /// Takes back what was guessed for `layer` of pass `step`: reads for it that nothing else needs are given up.
    fn retract(&mut self, _step: &StepInfo, _layer: LayerId) {}
}

/// An open barrier: the wait for all experts that one layer needs in one pass. Closes on drop.
pub struct Barrier<'a> {
    source: &'a mut dyn ExpertSource,
}

impl<'a> Barrier<'a> {
    /// Opens a barrier on `source`.
    pub fn open(
        source: &'a mut dyn ExpertSource,
        step: &StepInfo,
        layer: LayerId,
        experts: &[ExpertId],
    ) -> Result<Self, SourceError> {
        source.open_barrier(step, layer, experts)?;
        Ok(Self { source })
    }

    /// See [`ExpertSource::hint`]; a guess about a later layer, made while this barrier's experts are on their way.
    pub fn hint(&mut self, step: &StepInfo, layer: LayerId, guesses: &[Guess]) {
        self.source.hint(step, layer, guesses);
    }

    /// See [`ExpertSource::next_arrival`].
    pub fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        self.source.next_arrival()
    }

    /// See [`ExpertSource::at_hand`].
    pub fn at_hand(&self) -> usize {
        self.source.at_hand()
    }
}

impl Drop for Barrier<'_> {
    fn drop(&mut self) {
        self.source.close_barrier();
    }
}

/// The source of a dense model: it has nothing and is asked for nothing.
pub struct NoExperts;

impl ExpertSource for NoExperts {
    fn open_barrier(&mut self, _: &StepInfo, layer: LayerId, _: &[ExpertId]) -> Result<(), SourceError> {
        Err(SourceError::Unknown(format!("layer {} asked for experts of a dense model", layer.0)))
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        Ok(None)
    }

    fn close_barrier(&mut self) {}
}
