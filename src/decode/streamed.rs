//! The blocks of a streamed trunk while passes run: who has them, and what passes waited for. Knows no file and no engine.

use super::error::DecodeError;
use super::weights::Decoder;
use crate::clock::Clock;
use crate::source::{BlockCounters, BlockSource};

/// Where the blocks of a streamed trunk come from; empty where the trunk is not streamed.
#[derive(Default)]
pub struct TrunkBlocks(Option<Box<dyn BlockSource>>);

impl TrunkBlocks {
    /// Takes blocks from `source`, which has them in the order of [`super::blocks::Blocks::parts`].
    pub fn take_from(&mut self, source: Box<dyn BlockSource>) {
        self.0 = Some(source);
    }

    /// Waits for blocks that are on their way: nothing else follows.
    pub fn settle(&mut self) {
        if let Some(blocks) = &mut self.0 {
            blocks.settle();
        }
    }

    /// What was read; `None` where nothing is streamed.
    pub fn counters(&self) -> Option<BlockCounters> {
        self.0.as_ref().map(|b| b.counters())
    }

    /// The kernel's numbers of the threads that read.
    pub fn threads(&self) -> Vec<u32> {
        self.0.as_ref().map(|b| b.threads()).unwrap_or_default()
    }

    /// For one pass; `with_head` = it will ask for the head.
    pub(super) fn during_pass(&mut self, with_head: bool, clock: Clock) -> Streamed<'_> {
        Streamed { source: self.0.as_deref_mut(), with_head, clock, stall_ns: 0, blocks: 0, bytes: 0 }
    }
}

/// The blocks of a streamed trunk during a pass.
pub(super) struct Streamed<'a> {
    source: Option<&'a mut (dyn BlockSource + 'static)>,
    with_head: bool,
    clock: Clock,
    pub(super) stall_ns: u64,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
}

impl Streamed<'_> {
    /// Block number `block`, while the one behind it is on its way; `None` where nothing is streamed.
    pub(super) fn block(&mut self, dec: &Decoder, block: usize) -> Result<Option<&[u8]>, DecodeError> {
        let Some(blocks) = dec.blocks() else { return Ok(None) };
        let source = self.source.as_mut().ok_or(DecodeError::NoBlocks)?;
        let asked_ns = self.clock.now_ns();
        let bytes = source.block(block, Some(blocks.next(block, self.with_head)));
        self.stall_ns += self.clock.now_ns() - asked_ns;
        self.blocks += 1;
        self.bytes += blocks.parts().get(block).map_or(0, |parts| parts.iter().map(|p| p.len).sum::<u64>());
        let what = || match dec.layers.len() {
            layers if block < layers => format!("weights of layer {block}"),
            layers => format!("piece {} of the head's weights", block - layers),
        };
        bytes.map(Some).map_err(|source| DecodeError::Stream { what: what(), source })
    }
}
