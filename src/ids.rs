//! Identities and offsets as newtypes, with checked arithmetic.
//!
//! Everything above uses these instead of bare integers, so that a layer is never passed for an expert and an
//! offset never for a length. Knows nothing of files, drives or models.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A decoder layer, 0-based (the released `config.json` counts from 1; `model::config` converts).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(pub u16);

/// A routed expert inside one layer, 0-based.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExpertId(pub u16);

/// One routed expert of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExpertKey {
    /// The layer it belongs to.
    pub layer: LayerId,
    /// Its index inside the layer.
    pub expert: ExpertId,
}

/// A drive of a plan or a run: the index into that plan's drive list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DriveId(pub u8);

/// A contiguous byte range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl LayerId {
    /// As an index into per-layer arrays.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl ExpertId {
    /// As an index into per-expert arrays.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl DriveId {
    /// As an index into per-drive arrays.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl ExpertKey {
    /// Shorthand for tests and loops over raw indices.
    pub fn new(layer: u16, expert: u16) -> Self {
        Self { layer: LayerId(layer), expert: ExpertId(expert) }
    }
}

impl Extent {
    /// One past the last byte, or `None` when the range does not fit in 64 bits.
    pub fn end(self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// The smallest extent with both ends on multiples of `align` that covers this one.
    /// `None` when it would overflow. `align` must be a power of two.
    pub fn align_out(self, align: u64) -> Option<Self> {
        debug_assert!(align.is_power_of_two());
        let start = self.offset & !(align - 1);
        let end = self.end()?.checked_add(align - 1)? & !(align - 1);
        Some(Self { offset: start, len: end - start })
    }

    /// Whether two extents share at least one byte.
    pub fn overlaps(self, other: Self) -> bool {
        let ends = (self.end(), other.end());
        match ends {
            (Some(a), Some(b)) => self.offset < b && other.offset < a && self.len > 0 && other.len > 0,
            _ => true,
        }
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "L{}", self.0)
    }
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "E{}", self.0)
    }
}

impl fmt::Display for ExpertKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "L{}-E{}", self.layer.0, self.expert.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn align_out_covers_and_does_not_overflow() {
        let e = Extent { offset: 5, len: 10 };
        assert_eq!(e.align_out(8), Some(Extent { offset: 0, len: 16 }));
        assert_eq!(Extent { offset: 16, len: 16 }.align_out(16), Some(Extent { offset: 16, len: 16 }));
        assert_eq!(Extent { offset: u64::MAX - 1, len: 1 }.align_out(4096), None);
        assert_eq!(Extent { offset: u64::MAX, len: 2 }.end(), None);
    }

    #[test]
    fn overlap_is_about_shared_bytes() {
        let a = Extent { offset: 0, len: 10 };
        assert!(a.overlaps(Extent { offset: 9, len: 1 }));
        assert!(!a.overlaps(Extent { offset: 10, len: 1 }));
        assert!(!a.overlaps(Extent { offset: 3, len: 0 }));
        assert!(a.overlaps(Extent { offset: u64::MAX, len: 9 }), "an impossible extent counts as overlapping");
    }
}
