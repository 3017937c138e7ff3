//! Where the bytes of a barrier come from: a pure choice for a whole set of experts at once, from their homes, what
//! each drive can do, and what it still has to deliver. Knows no clock, no file and no engine.
//!
//! `balance` assigns whole experts, `split` cuts some of them; this file has the names, the simple policies and the
//! pieces that all of them produce.

use super::balance::Balance;
use super::split::Splitter;
use crate::ids::DriveId;
use serde::{Deserialize, Serialize};

/// A way of choosing among the homes of the experts that a barrier needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DispatchPolicy {
    /// The primary copy.
    FirstHit,
    /// The drives in turn: of those that hold the expert, the one whose turn is longest ago.
    RoundRobin,
    /// The drive with the fewest bytes in flight; ties go to the smaller drive id.
    LeastInflight,
    /// Whole reads, so that the last of them is predicted to end as early as possible.
    ExpectedCompletion,
    /// As above, but an expert may be read in parts from several homes at once.
    Split,
}

impl DispatchPolicy {
    /// All of them; the place in this list is the place in counters.
    pub const ALL: [Self; 5] =
        [Self::FirstHit, Self::RoundRobin, Self::LeastInflight, Self::ExpectedCompletion, Self::Split];

    /// Its name in options and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstHit => "first-hit",
            Self::RoundRobin => "round-robin",
            Self::LeastInflight => "least-inflight",
            Self::ExpectedCompletion => "expected-completion",
            Self::Split => "split",
        }
    }
}

/// What a drive can do and has to do, as a decision sees it: `b` more bytes are predicted to be there after
/// `fixed_ns + (in_flight_bytes + b) * ns_per_byte`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriveLoad {
    /// Time per byte once it delivers, while its neighbours deliver too.
    pub ns_per_byte: f64,
    /// Cost before the first byte of a busy period.
    pub fixed_ns: f64,
    /// What one more read costs a drive that is busy, at most: the price of a cut.
    pub read_ns: f64,
    /// Bytes asked of it, by any pool, that have not arrived.
    pub in_flight_bytes: u64,
}

impl DriveLoad {
    /// When a read that is asked for now would begin to deliver.
    pub fn start_ns(&self) -> f64 {
        self.fixed_ns + self.in_flight_bytes as f64 * self.ns_per_byte
    }
}

/// One read that a decision asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which expert of the set.
    pub ask: u32,
    /// Which of its homes.
    pub home: u8,
    /// The drive of that home.
    pub drive: DriveId,
    /// Which part of the expert, of `parts`. Parts of an expert follow each other, in ascending order.
    pub part: u8,
    /// Parts that the expert is read in.
    pub parts: u8,
    /// First payload byte of the part, a multiple of the block size.
    pub from: u32,
    /// Payload bytes of the part: whole blocks, except that the last part ends with the payload.
    pub len: u32,
}

/// The size of what is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Payload bytes of every expert.
    pub bytes: u32,
    /// Parts begin on multiples of this many bytes.
    pub block_bytes: u32,
}

/// Makes decisions. Everything it needs is allocated when it is made.
#[derive(Debug, Default)]
pub struct Dispatcher {
    turns: Turns,
    /// Bit d = drive d only serves what no other drive holds; see [`Dispatcher::avoid`].
    avoid: [u64; 3],
    /// By expert of the set: bit d = drive d is a home.
    masks: Vec<u64>,
    loads: Vec<DriveLoad>,
    balance: Balance,
    splitter: Splitter,
    pieces: Vec<Piece>,
}

impl Dispatcher {
    /// For sets of at most `asks` experts over at most `drives` drives (at most 64).
    pub fn new(asks: usize, drives: usize) -> Self {
        Self {
            turns: Turns { now: 0, last: vec![0; drives] },
            avoid: [0; 3],
            masks: Vec::with_capacity(asks),
            loads: Vec::with_capacity(drives),
            balance: Balance::new(asks, drives),
            splitter: Splitter::new(asks, drives),
            pieces: Vec::with_capacity(asks * drives),
        }
    }

    /// From now on drives with their bit in the first of `drives` only serve what no other drive holds. Of these the ones in
    /// the second are worse than the rest, and of those the ones in the third: where all homes are to be avoided, the least
    /// bad of them serve.
    pub fn avoid(&mut self, drives: [u64; 3]) {
        self.avoid = drives;
    }

    /// Decides for `asks` experts of one shape. `homes(i)` are the drives that hold expert i, the primary first, all
    /// of them indices of `loads`. `cut` allows experts to be cut under [`DispatchPolicy::Split`]. The pieces cover
    /// every byte of every expert once; whole experts come first.
    pub fn decide<'h>(
        &mut self,
        policy: DispatchPolicy,
        cut: bool,
        asks: usize,
        homes: impl Fn(usize) -> &'h [DriveId],
        shape: Shape,
        loads: &[DriveLoad],
    ) -> &[Piece] {
        self.pieces.clear();
        let whole = |ask: usize, home: usize, drive: DriveId| Piece {
            ask: ask as u32,
            home: home as u8,
            drive,
            part: 0,
            parts: 1,
            from: 0,
            len: shape.bytes,
        };
        if !matches!(policy, DispatchPolicy::ExpectedCompletion | DispatchPolicy::Split) {
            self.loads.clear();
            self.loads.extend_from_slice(loads);
            for ask in 0..asks {
                let of = homes(ask);
                let avoid = self.avoided(of, 0);
                if let Some(home) = choose_one(policy, &mut self.turns, of, avoid, &self.loads, shape.bytes) {
                    self.loads[of[home].index()].in_flight_bytes += u64::from(shape.bytes);
                    self.pieces.push(whole(ask, home, of[home]));
                }
            }
            return &self.pieces;
        }
        self.masks.clear();
        let avoid = self.avoid;
        let open = |mask: u64| avoid.iter().map(|a| mask & !a).find(|left| *left != 0).unwrap_or(mask);
        self.masks.extend((0..asks).map(|ask| open(homes(ask).iter().fold(0u64, |mask, d| mask | 1 << d.0))));
        let home_of = |ask: usize, drive: usize| homes(ask).iter().position(|d| d.index() == drive);
        self.balance.assign(&self.masks, f64::from(shape.bytes), loads);
        if policy == DispatchPolicy::Split && cut && self.splitter.split(&self.masks, shape, loads, &self.balance) {
            for cell in self.splitter.cells() {
                let Some(home) = home_of(cell.ask as usize, cell.drive as usize) else { continue };
                self.pieces.push(Piece {
                    ask: cell.ask,
                    home: home as u8,
                    drive: DriveId(cell.drive),
                    part: cell.part,
                    parts: cell.parts,
                    from: cell.from,
                    len: cell.bytes,
                });
            }
            return &self.pieces;
        }
        for (ask, &drive) in self.balance.drive_of().iter().enumerate() {
            if let Some(home) = home_of(ask, usize::from(drive)) {
                self.pieces.push(whole(ask, home, DriveId(drive)));
            }
        }
        &self.pieces
    }

    /// The home to read one more piece of `bytes` from, among those whose bit in `tried` is 0 (bit i = home i; at most
    /// 64 homes). `None` when all have been tried.
    pub fn again(
        &mut self,
        policy: DispatchPolicy,
        homes: &[DriveId],
        tried: u64,
        loads: &[DriveLoad],
        bytes: u32,
    ) -> Option<usize> {
        let tried = self.avoided(homes, tried);
        choose_one(policy, &mut self.turns, homes, tried, loads, bytes)
    }

    /// `tried`, and the homes on drives to be avoided: as many of them as leave something.
    fn avoided(&self, homes: &[DriveId], tried: u64) -> u64 {
        let without = |drives: u64| {
            let avoid = homes.iter().enumerate().filter(|(_, d)| drives >> d.0 & 1 == 1);
            avoid.fold(tried, |mask, (home, _)| mask | 1 << home)
        };
        let some = |drives: &&u64| **drives != 0;
        let left = |mask: &u64| (mask.count_ones() as usize) < homes.len();
        self.avoid.iter().filter(some).map(|drives| without(*drives)).find(left).unwrap_or(tried)
    }
}

/// Whose turn it is. By drive and not by copy: the first copy lies on one drive after the other, so that copies in turn would be drives
/// by chance, and three experts of six on one of three where two would do.
#[derive(Debug, Default)]
struct Turns {
    now: u64,
    /// By drive, when it last had its turn; 0 = never.
    last: Vec<u64>,
}

impl Turns {
    fn last(&self, drive: DriveId) -> u64 {
        self.last.get(drive.index()).copied().unwrap_or(0)
    }

    fn took(&mut self, drive: DriveId) {
        self.now += 1;
        if let Some(last) = self.last.get_mut(drive.index()) {
            *last = self.now;
        }
    }
}

fn choose_one(
    policy: DispatchPolicy,
    turns: &mut Turns,
    homes: &[DriveId],
    tried: u64,
    loads: &[DriveLoad],
    bytes: u32,
) -> Option<usize> {
    let open = |i: &usize| tried & (1u64 << i) == 0;
    let load = |i: usize| loads.get(homes[i].index()).copied().unwrap_or_default();
    match policy {
        DispatchPolicy::FirstHit => (0..homes.len()).find(open),
        DispatchPolicy::RoundRobin => {
            let home = (0..homes.len()).filter(open).min_by_key(|&i| turns.last(homes[i]))?;
            turns.took(homes[home]);
            Some(home)
        }
        DispatchPolicy::LeastInflight => {
            (0..homes.len()).filter(open).min_by_key(|&i| (load(i).in_flight_bytes, homes[i]))
        }
        DispatchPolicy::ExpectedCompletion | DispatchPolicy::Split => {
            let end = |i: usize| load(i).start_ns() + f64::from(bytes) * load(i).ns_per_byte;
            (0..homes.len()).filter(open).min_by(|&a, &b| end(a).total_cmp(&end(b)).then(homes[a].cmp(&homes[b])))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOMES: [DriveId; 3] = [DriveId(2), DriveId(0), DriveId(1)];

    fn loads(in_flight: [u64; 3]) -> [DriveLoad; 3] {
        in_flight.map(|in_flight_bytes| DriveLoad { ns_per_byte: 1.0, in_flight_bytes, ..DriveLoad::default() })
    }

    fn again(policy: DispatchPolicy, tried: u64, in_flight: [u64; 3]) -> Option<usize> {
        Dispatcher::new(1, 3).again(policy, &HOMES, tried, &loads(in_flight), 10)
    }

    #[test]
    fn each_policy_chooses_by_its_own_rule() {
        use DispatchPolicy::*;
        assert_eq!(again(FirstHit, 0, [0, 0, 99]), Some(0));
        assert_eq!(again(FirstHit, 0b001, [0; 3]), Some(1));
        let mut turns = Dispatcher::new(1, 3);
        let seen: Vec<_> = (0..4).map(|_| turns.again(RoundRobin, &HOMES, 0, &loads([0; 3]), 10).unwrap()).collect();
        assert_eq!(seen, [0, 1, 2, 0]);
        let mut without = || turns.again(RoundRobin, &HOMES, 0b010, &loads([0; 3]), 10).unwrap();
        assert_eq!([without(), without(), without(), without()], [2, 0, 2, 0], "home 1 has been tried");
        assert_eq!(again(RoundRobin, 0b111, [0; 3]), None);
        assert_eq!(again(LeastInflight, 0, [5, 4, 3]), Some(0));
        assert_eq!(again(LeastInflight, 0, [5, 4, 6]), Some(2));
        assert_eq!(again(LeastInflight, 0, [4, 4, 4]), Some(1), "ties go to drive 0");
        assert_eq!(again(LeastInflight, 0b010, [4, 4, 4]), Some(2));
        let mut slow = loads([0; 3]);
        slow[2].ns_per_byte = 3.0;
        slow[0].fixed_ns = 15.0;
        let mut dispatcher = Dispatcher::new(1, 3);
        assert_eq!(dispatcher.again(ExpectedCompletion, &HOMES, 0, &slow, 10), Some(2));
        assert_eq!(dispatcher.again(Split, &HOMES, 0b100, &slow, 10), Some(1), "25 ns on drive 0, 30 on drive 2");
    }

    #[test]
    fn a_drive_to_be_avoided_serves_only_what_no_other_holds() {
        let shape = Shape { bytes: 40_960, block_bytes: 4096 };
        let alone = [DriveId(1)];
        for policy in DispatchPolicy::ALL {
            let mut dispatcher = Dispatcher::new(6, 3);
            dispatcher.avoid([0b010, 0, 0]);
            let homes = |ask: usize| if ask == 4 { &alone[..] } else { &HOMES[..] };
            let pieces = dispatcher.decide(policy, true, 6, homes, shape, &loads([99, 0, 99]));
            assert!(pieces.iter().all(|p| (p.ask == 4) == (p.drive == DriveId(1))), "{}: {pieces:?}", policy.name());
            assert_eq!(pieces.iter().map(|p| p.len).sum::<u32>(), 6 * shape.bytes);
            // Home 2 is drive 1: taken again only when it is all that is left.
            assert_ne!(dispatcher.again(policy, &HOMES, 0, &loads([99, 0, 99]), 10), Some(2), "{}", policy.name());
            assert_eq!(dispatcher.again(policy, &HOMES, 0b011, &loads([99, 0, 99]), 10), Some(2));
            // All of them, drive 1 least, drive 0 most: whatever is in flight where.
            dispatcher.avoid([0b111, 0b101, 0b001]);
            let pieces = dispatcher.decide(policy, true, 2, |_| &HOMES, shape, &loads([0, 99, 0]));
            assert!(pieces.iter().all(|p| p.drive == DriveId(1)), "{}: {pieces:?}", policy.name());
            let of = |home: usize| HOMES[home];
            let next = dispatcher.again(policy, &HOMES, 0b100, &loads([0, 99, 0]), 10).map(of);
            assert_eq!(next, Some(DriveId(2)), "{}", policy.name());
        }
    }

    #[test]
    fn drives_have_their_turn_whoever_holds_the_first_copy() {
        let shape = Shape { bytes: 10, block_bytes: 4096 };
        let mirror: [[DriveId; 3]; 3] = [0, 1, 2].map(|first| [0, 1, 2].map(|d| DriveId((first + d) % 3)));
        let mut mix = crate::stats::SplitMix64::new(3);
        for avoid in [0, 0b100] {
            let mut dispatcher = Dispatcher::new(6, 3);
            dispatcher.avoid([avoid, 0, 0]);
            for _ in 0..50 {
                let first: [u64; 6] = std::array::from_fn(|_| mix.next_u64() % 3);
                let homes = |ask: usize| &mirror[first[ask] as usize][..];
                let pieces = dispatcher.decide(DispatchPolicy::RoundRobin, true, 6, homes, shape, &loads([0; 3]));
                let on = |drive| pieces.iter().filter(|p| p.drive == DriveId(drive)).count();
                assert_eq!([on(0), on(1), on(2)], if avoid == 0 { [2, 2, 2] } else { [3, 3, 0] });
            }
        }
    }

    #[test]
    fn nothing_is_left_when_all_homes_were_tried() {
        for policy in DispatchPolicy::ALL {
            assert_eq!(again(policy, 0b111, [0; 3]), None);
            assert_eq!(Dispatcher::new(1, 3).again(policy, &[], 0, &[], 10), None);
        }
    }

    #[test]
    fn a_set_is_decided_as_one_would_be_one_by_one() {
        let shape = Shape { bytes: 10, block_bytes: 4096 };
        let mut dispatcher = Dispatcher::new(6, 3);
        let mut homes = |policy| -> Vec<u8> {
            let pieces = dispatcher.decide(policy, true, 6, |_| &HOMES, shape, &loads([0, 0, 15]));
            pieces.iter().map(|p| p.drive.0).collect()
        };
        assert_eq!(homes(DispatchPolicy::FirstHit), [2; 6]);
        assert_eq!(homes(DispatchPolicy::RoundRobin), [2, 0, 1, 2, 0, 1]);
        assert_eq!(homes(DispatchPolicy::LeastInflight), [0, 1, 0, 1, 2, 0]);
    }
}
