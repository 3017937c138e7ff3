//! What may lie on a drive, seen alike: whole experts and parts of striped ones, each with its pack, slot and digest.
//! `drive.json` keeps the two apart (manifest.rs); whoever copies, verifies or frees does not care which it is.

use super::manifest::{Container, Digest, DriveExpert, DriveManifest, StripePart, StripeSet, pack_name};
use super::stripe::Stripe;
use crate::ids::{ExpertId, Extent, LayerId};
use std::collections::HashSet;
use std::fmt;

/// One column of a striped expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartOf {
    /// Bytes of a block.
    pub unit_bytes: u64,
    /// Columns in all.
    pub columns: u8,
    /// Which of them.
    pub column: u8,
}

/// Names what may lie on a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceKey {
    /// The layer.
    pub layer: LayerId,
    /// The expert.
    pub expert: ExpertId,
    /// `None` = the whole expert.
    pub part: Option<PartOf>,
}

/// The file in which pieces lie: one layer's whole experts, or its parts of one geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackId {
    /// The layer.
    pub layer: LayerId,
    /// Block and columns of the parts in it; `None` = whole experts.
    pub stripe: Option<(u64, u8)>,
}

/// Something that lies on a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What it is.
    pub key: PieceKey,
    /// Slot in its pack.
    pub slot: u32,
    /// Digest of its bytes.
    pub digest: Digest,
    /// Digest of the whole expert; the same where it is one.
    pub expert_digest: Digest,
}

impl PieceKey {
    /// The pack that it lies in.
    pub fn pack(&self) -> PackId {
        PackId { layer: self.layer, stripe: self.part.map(|p| (p.unit_bytes, p.columns)) }
    }

    /// Its bytes, in a model with experts of `expert_bytes`.
    pub fn bytes(&self, expert_bytes: u64) -> u64 {
        self.part.map_or(expert_bytes, |p| p.stripe(expert_bytes).column_bytes(p.column))
    }
}

impl fmt::Display for PieceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.layer, self.expert)?;
        match self.part {
            None => Ok(()),
            Some(p) => write!(f, " (column {} of {})", p.column, p.columns),
        }
    }
}

impl PartOf {
    /// The geometry of its expert.
    pub fn stripe(&self, expert_bytes: u64) -> Stripe {
        Stripe { expert_bytes, unit_bytes: self.unit_bytes, columns: self.columns }
    }
}

impl PackId {
    /// Name of the file.
    pub fn name(&self) -> String {
        match self.stripe {
            None => pack_name(self.layer),
            Some((unit_bytes, columns)) => format!("L{}.stripe-{unit_bytes}x{columns}", self.layer.0),
        }
    }
}

impl StripeSet {
    fn key(&self, layer: LayerId, part: &StripePart) -> PieceKey {
        let (unit_bytes, columns) = (self.unit_bytes, self.columns);
        PieceKey { layer, expert: part.expert, part: Some(PartOf { unit_bytes, columns, column: part.column }) }
    }
}

impl DriveManifest {
    /// Everything that is on the drive: whole experts by layer, then parts.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let whole = self.layers.iter().flat_map(|(&layer, row)| {
            row.iter().map(move |e| Piece {
                key: PieceKey { layer, expert: e.expert, part: None },
                slot: e.slot,
                digest: e.digest,
                expert_digest: e.digest,
            })
        });
        let parts = self.stripes.iter().flat_map(|set| {
            set.layers.iter().flat_map(move |(&layer, row)| {
                row.iter().map(move |p| Piece {
                    key: set.key(layer, p),
                    slot: p.slot,
                    digest: p.digest,
                    expert_digest: p.expert_digest,
                })
            })
        });
        whole.chain(parts)
    }

    /// One piece, if it is on the drive.
    pub fn find_piece(&self, key: &PieceKey) -> Option<Piece> {
        let Some(part) = key.part else {
            let e = self.find(key.layer, key.expert)?;
            return Some(Piece { key: *key, slot: e.slot, digest: e.digest, expert_digest: e.digest });
        };
        let set = self.stripes.iter().find(|s| (s.unit_bytes, s.columns) == (part.unit_bytes, part.columns))?;
        let row = set.layers.get(&key.layer)?;
        let at = row.binary_search_by_key(&(key.expert, part.column), |p| (p.expert, p.column)).ok()?;
        let p = row[at];
        Some(Piece { key: *key, slot: p.slot, digest: p.digest, expert_digest: p.expert_digest })
    }

    /// Distance of two slots in `pack`.
    pub fn slot_bytes_of(&self, pack: &PackId) -> u64 {
        match pack.stripe {
            None => self.slot_bytes,
            Some((unit_bytes, columns)) => Stripe { expert_bytes: self.expert_bytes, unit_bytes, columns }.slot_bytes(),
        }
    }

    /// File name (relative to the folder) and extent of a piece.
    pub fn locate_piece(&self, piece: &Piece) -> (String, Extent) {
        let Piece { key, slot, digest, .. } = *piece;
        if key.part.is_none() {
            return self.locate(key.layer, &DriveExpert { expert: key.expert, slot, digest });
        }
        let pack = key.pack();
        let offset = u64::from(slot) * self.slot_bytes_of(&pack);
        (pack.name(), Extent { offset, len: key.bytes(self.expert_bytes) })
    }

    /// Slots of `pack` that something is in.
    pub fn used_slots(&self, pack: &PackId) -> HashSet<u32> {
        match pack.stripe {
            None => self.layers.get(&pack.layer).into_iter().flatten().map(|e| e.slot).collect(),
            Some(of) => {
                let set = self.stripes.iter().find(|s| (s.unit_bytes, s.columns) == of);
                set.and_then(|s| s.layers.get(&pack.layer)).into_iter().flatten().map(|p| p.slot).collect()
            }
        }
    }

    /// The packs in which something is (no pack where experts are files of their own).
    pub fn packs(&self) -> Vec<PackId> {
        if self.container == Container::Files {
            return Vec::new();
        }
        let whole = self.layers.keys().map(|&layer| PackId { layer, stripe: None });
        let parts = self
            .stripes
            .iter()
            .flat_map(|s| s.layers.keys().map(|&layer| PackId { layer, stripe: Some((s.unit_bytes, s.columns)) }));
        whole.chain(parts).collect()
    }

    /// Adds a piece, or puts it in the place of the one of the same name.
    pub fn insert(&mut self, piece: Piece) {
        self.remove(&piece.key);
        let Piece { key, slot, digest, expert_digest } = piece;
        match key.part {
            None => {
                let row = self.layers.entry(key.layer).or_default();
                let at = row.partition_point(|e| e.expert < key.expert);
                row.insert(at, DriveExpert { expert: key.expert, slot, digest });
            }
            Some(part) => {
                let of = (part.unit_bytes, part.columns);
                let at = match self.stripes.iter().position(|s| (s.unit_bytes, s.columns) == of) {
                    Some(at) => at,
                    None => {
                        let at = self.stripes.partition_point(|s| (s.unit_bytes, s.columns) < of);
                        let set = StripeSet { unit_bytes: of.0, columns: of.1, layers: Default::default() };
                        self.stripes.insert(at, set);
                        at
                    }
                };
                let row = self.stripes[at].layers.entry(key.layer).or_default();
                let at = row.partition_point(|p| (p.expert, p.column) < (key.expert, part.column));
                let entry = StripePart { expert: key.expert, column: part.column, slot, digest, expert_digest };
                row.insert(at, entry);
            }
        }
        self.version = self.least_version();
    }

    /// Takes one piece out, and its layer and geometry if it was the last. Whether it was there.
    pub fn remove(&mut self, key: &PieceKey) -> bool {
        let found = match key.part {
            None => {
                let Some(row) = self.layers.get_mut(&key.layer) else { return false };
                let before = row.len();
                row.retain(|e| e.expert != key.expert);
                before > row.len()
            }
            Some(part) => {
                let set =
                    self.stripes.iter_mut().find(|s| (s.unit_bytes, s.columns) == (part.unit_bytes, part.columns));
                let Some(row) = set.and_then(|s| s.layers.get_mut(&key.layer)) else { return false };
                let before = row.len();
                row.retain(|p| (p.expert, p.column) != (key.expert, part.column));
                before > row.len()
            }
        };
        self.layers.retain(|_, row| !row.is_empty());
        self.stripes.iter_mut().for_each(|s| s.layers.retain(|_, row| !row.is_empty()));
        self.stripes.retain(|s| !s.layers.is_empty());
        self.version = self.least_version();
        found
    }

    /// Takes out every piece that `keep` does not want.
    pub fn retain(&mut self, mut keep: impl FnMut(&PieceKey) -> bool) {
        for (&layer, row) in &mut self.layers {
            row.retain(|e| keep(&PieceKey { layer, expert: e.expert, part: None }));
        }
        for set in &mut self.stripes {
            let (unit_bytes, columns) = (set.unit_bytes, set.columns);
            for (&layer, row) in &mut set.layers {
                row.retain(|p| {
                    let part = Some(PartOf { unit_bytes, columns, column: p.column });
                    keep(&PieceKey { layer, expert: p.expert, part })
                });
            }
            set.layers.retain(|_, row| !row.is_empty());
        }
        self.layers.retain(|_, row| !row.is_empty());
        self.stripes.retain(|s| !s.layers.is_empty());
        self.version = self.least_version();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    fn key(expert: u16, column: Option<u8>) -> PieceKey {
        let part = column.map(|column| PartOf { unit_bytes: 4096, columns: 2, column });
        PieceKey { layer: LayerId(3), expert: ExpertId(expert), part }
    }

    #[test]
    fn pieces_go_in_and_out_and_the_version_follows_what_is_there() {
        let mut drive = DriveManifest::empty(ID, 9792);
        let piece = |key, slot| Piece { key, slot, digest: Digest(1), expert_digest: Digest(1) };
        for (at, k) in
            [key(4, None), key(4, Some(1)), key(2, Some(0)), key(2, Some(1)), key(0, None)].iter().enumerate()
        {
            drive.insert(piece(*k, at as u32));
        }
        assert_eq!(drive.version, 2);
        assert_eq!(drive.pieces().count(), 5);
        assert_eq!(drive.find_piece(&key(2, Some(1))).unwrap().slot, 3);
        let (name, extent) = drive.locate_piece(&drive.find_piece(&key(4, Some(1))).unwrap());
        assert_eq!((name.as_str(), extent.offset, extent.len), ("L3.stripe-4096x2", 16384, 4096));
        assert_eq!(drive.used_slots(&key(2, Some(0)).pack()), [1, 2, 3].into());
        let dir = tempfile::tempdir().unwrap();
        drive.save(dir.path()).unwrap();
        assert_eq!(DriveManifest::open(dir.path()).unwrap(), drive);
        assert!(drive.remove(&key(2, Some(1))) && !drive.remove(&key(2, Some(1))));
        drive.retain(|k| k.part.is_none());
        assert_eq!(
            (drive.version, drive.stripes.len(), drive.packs().len()),
            (1, 0, 1),
            "an older program can read it again"
        );
        assert_eq!(key(2, Some(1)).to_string(), "L3-E2 (column 1 of 2)");
    }
}
