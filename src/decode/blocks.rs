//! The blocks in which a streamed trunk comes: one for each layer, then the head in pieces no larger than the largest layer, so
//! that two buffers hold whatever is at work. Offsets only; reads nothing.
//!
//! Embedding, routers, norms and whatever else is small stay mapped: of the embedding a pass touches one row for each token,
//! and a router may be asked by the layers before its own.

use super::weights::{Layer, Mat};
use crate::ids::Extent;
use crate::store::manifest::TRUNK_ALIGN;

/// Bytes between two matrices that are read rather than skipped.
const MAX_GAP_BYTES: u64 = 64 * 1024;

/// A trunk in blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// By block: the parts of `trunk.bin` that it is made of, one behind the other. Offsets and lengths are multiples of
    /// [`TRUNK_ALIGN`].
    parts: Vec<Vec<Extent>>,
    layers: usize,
    /// Rows of the head in each of its pieces but the last.
    piece_rows: usize,
    head_rows: usize,
    head_at: u64,
    head_row_bytes: u64,
}

/// A piece of the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadPiece {
    /// Its block.
    pub(super) block: usize,
    /// Bytes of the block before its first row.
    pub(super) skip: usize,
    /// Its first row.
    pub(super) first: usize,
    /// Its rows.
    pub(super) count: usize,
}

impl Blocks {
    /// The parts of `trunk.bin` that each block is made of.
    pub fn parts(&self) -> &[Vec<Extent>] {
        &self.parts
    }

    /// Bytes of the largest block.
    pub fn largest_bytes(&self) -> u64 {
        self.parts.iter().map(|parts| bytes(parts)).max().unwrap_or(0)
    }

    /// Bytes that a pass reads; the head is not asked for where no logits are wanted.
    pub fn pass_bytes(&self, with_head: bool) -> u64 {
        let blocks = if with_head { self.parts.len() } else { self.layers };
        self.parts[..blocks].iter().map(|parts| bytes(parts)).sum()
    }

    /// Blocks that a pass asks for.
    pub fn pass_blocks(&self, with_head: bool) -> u64 {
        (if with_head { self.parts.len() } else { self.layers }) as u64
    }

    /// The block behind `block` in a pass, or the first one of the next pass.
    pub(super) fn next(&self, block: usize, with_head: bool) -> usize {
        let blocks = if with_head { self.parts.len() } else { self.layers };
        if block + 1 < blocks { block + 1 } else { 0 }
    }

    /// The head's pieces in order.
    pub(super) fn head_pieces(&self) -> impl Iterator<Item = HeadPiece> + '_ {
        (self.layers..self.parts.len()).map(|block| {
            let first = (block - self.layers) * self.piece_rows;
            let at = self.head_at + first as u64 * self.head_row_bytes;
            let skip = (at - self.parts[block][0].offset) as usize;
            HeadPiece { block, skip, first, count: self.piece_rows.min(self.head_rows - first) }
        })
    }
}

fn bytes(parts: &[Extent]) -> u64 {
    parts.iter().map(|p| p.len).sum()
}

/// From the first page of some bytes to their last.
fn pages(offset: u64, len: u64) -> Extent {
    let from = offset / TRUNK_ALIGN * TRUNK_ALIGN;
    Extent { offset: from, len: (offset + len).next_multiple_of(TRUNK_ALIGN) - from }
}

/// Lays the matrices of `layers` out in blocks, and tells each where in its block it is.
pub(super) fn lay_out(layers: &mut [Layer], head: &Mat) -> Blocks {
    let mut parts: Vec<Vec<Extent>> = layers.iter_mut().map(|layer| gather(layer.matrices_mut())).collect();
    let layers = parts.len();
    let largest = parts.iter().map(|parts| bytes(parts)).max().unwrap_or(0);
    let head_row_bytes = (head.cols as u64 * head.dtype.size()).max(1);
    let piece_rows = (largest / head_row_bytes).clamp(1, head.rows.max(1) as u64);
    let head_at = head.at.extent.offset;
    for first in (0..head.rows as u64).step_by(piece_rows as usize) {
        let count = piece_rows.min(head.rows as u64 - first);
        parts.push(vec![pages(head_at + first * head_row_bytes, count * head_row_bytes)]);
    }
    Blocks { parts, layers, piece_rows: piece_rows as usize, head_rows: head.rows, head_at, head_row_bytes }
}

/// Neighbours become one part; a store of this program keeps a layer's tensors together, so that there is one.
fn gather(mut matrices: Vec<&mut Mat>) -> Vec<Extent> {
    matrices.sort_by_key(|m| m.at.extent.offset);
    let mut parts: Vec<Extent> = Vec::new();
    let mut before = 0;
    for m in matrices {
        let own = pages(m.at.extent.offset, m.at.extent.len);
        match parts.last_mut() {
            Some(last) if own.offset <= last.offset + last.len + MAX_GAP_BYTES => {
                last.len = last.len.max(own.offset + own.len - last.offset);
            }
            _ => {
                before += parts.last().map_or(0, |last| last.len);
                parts.push(own);
            }
        }
        let part = parts.last().copied().unwrap_or(own);
        m.in_block = Some((before + m.at.extent.offset - part.offset) as usize);
    }
    parts
}
