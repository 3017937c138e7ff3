//! How a striped expert is cut (RAID-0): blocks of `unit_bytes`, dealt to the columns in turn; a column's blocks lie one after
//! the other in its drive's pack, so that each drive holds one contiguous part. Pure arithmetic and copying in memory.

use super::manifest::{Digest, SLOT_ALIGN};
use xxhash_rust::xxh3::Xxh3;

/// Blocks are multiples of this, so that direct reads can begin at any of them.
pub const UNIT_ALIGN: u64 = 4096;
/// Most blocks that an expert may be cut into: each is one read, and reads count their parts in a byte.
pub const MAX_UNITS: u64 = 255;

/// The geometry of a striped expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    /// Payload bytes of the expert.
    pub expert_bytes: u64,
    /// Bytes of a block; only the expert's last block may be shorter.
    pub unit_bytes: u64,
    /// Drives that hold it.
    pub columns: u8,
}

/// One block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Its column.
    pub column: u8,
    /// First byte within the expert.
    pub from: u64,
    /// First byte within the column's part.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

impl Stripe {
    /// Blocks of the expert.
    pub fn units(&self) -> u64 {
        self.expert_bytes.div_ceil(self.unit_bytes.max(1))
    }

    /// The `number`-th block, counted from 0.
    pub fn unit(&self, number: u64) -> Unit {
        let columns = u64::from(self.columns.max(1));
        let from = number * self.unit_bytes;
        Unit {
            column: (number % columns) as u8,
            from,
            at: number / columns * self.unit_bytes,
            len: self.unit_bytes.min(self.expert_bytes.saturating_sub(from)),
        }
    }

    /// The blocks of one column, in order.
    pub fn column_units(&self, column: u8) -> impl Iterator<Item = Unit> + use<> {
        let stripe = *self;
        let step = usize::from(self.columns.max(1));
        (u64::from(column)..self.units()).step_by(step).map(move |number| stripe.unit(number))
    }

    /// Bytes of one column: 0 where there are fewer blocks than columns.
    pub fn column_bytes(&self, column: u8) -> u64 {
        let (units, columns) = (self.units(), u64::from(self.columns.max(1)));
        let column = u64::from(column);
        if column >= units {
            return 0;
        }
        let own = (units - 1 - column) / columns + 1;
        let missing = if (units - 1) % columns == column { units * self.unit_bytes - self.expert_bytes } else { 0 };
        own * self.unit_bytes - missing
    }

    /// Distance of two parts in a pack: the first column's bytes, which are the most, rounded up to whole slots.
    pub fn slot_bytes(&self) -> u64 {
        (0..2).map(|c| self.column_bytes(c)).max().unwrap_or(0).next_multiple_of(SLOT_ALIGN)
    }

    /// Puts the blocks of `column` one after the other into `part`.
    pub fn gather(&self, expert: &[u8], column: u8, part: &mut Vec<u8>) {
        part.clear();
        for unit in self.column_units(column) {
            part.extend_from_slice(slice(expert, &unit));
        }
    }

    /// The digest of the column's part, from the whole expert.
    pub fn column_digest(&self, expert: &[u8], column: u8) -> Digest {
        let mut hash = Xxh3::new();
        self.column_units(column).for_each(|unit| hash.update(slice(expert, &unit)));
        Digest(hash.digest128())
    }
}

fn slice<'a>(expert: &'a [u8], unit: &Unit) -> &'a [u8] {
    expert.get(unit.from as usize..(unit.from + unit.len) as usize).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_ragged_expert_by_hand() {
        // 3 blocks of 4096 bytes but the last has 1600: columns 0 and 1 get two and one.
        let stripe = Stripe { expert_bytes: 9792, unit_bytes: 4096, columns: 2 };
        assert_eq!((stripe.units(), stripe.column_bytes(0), stripe.column_bytes(1)), (3, 5696, 4096));
        assert_eq!(stripe.unit(2), Unit { column: 0, from: 8192, at: 4096, len: 1600 });
        assert_eq!(stripe.slot_bytes(), 16384);
        let wide = Stripe { columns: 4, ..stripe };
        assert_eq!([0, 1, 2, 3].map(|c| wide.column_bytes(c)), [4096, 4096, 1600, 0]);
    }

    proptest! {
        #[test]
        fn the_columns_hold_every_byte_once(bytes in 1u64..5000, unit in 1u64..700, columns in 1u8..9) {
            let stripe = Stripe { expert_bytes: bytes, unit_bytes: unit, columns };
            let expert: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
            let mut back = vec![0u8; bytes as usize];
            let (mut part, mut sum) = (Vec::new(), 0);
            for column in 0..columns {
                stripe.gather(&expert, column, &mut part);
                prop_assert_eq!(part.len() as u64, stripe.column_bytes(column));
                prop_assert!(part.len() as u64 <= stripe.slot_bytes());
                prop_assert_eq!(stripe.column_digest(&expert, column), Digest::of(&part));
                sum += part.len() as u64;
                for u in stripe.column_units(column) {
                    prop_assert_eq!(u.column, column);
                    let (from, at, len) = (u.from as usize, u.at as usize, u.len as usize);
                    back[from..from + len].copy_from_slice(&part[at..at + len]);
                }
            }
            prop_assert_eq!(sum, bytes);
            prop_assert_eq!(back, expert);
        }
    }
}
