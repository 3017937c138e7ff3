//! Which copy of an expert is read: a pure choice from its homes and what each drive still has to deliver.

use crate::ids::DriveId;
use serde::{Deserialize, Serialize};

/// A way of choosing among an expert's homes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DispatchPolicy {
    /// The primary copy.
    FirstHit,
    /// The copies in turn.
    RoundRobin,
    /// The drive with the fewest bytes in flight; ties go to the smaller drive id.
    LeastInflight,
}

impl DispatchPolicy {
    /// Its name in options and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstHit => "first-hit",
            Self::RoundRobin => "round-robin",
            Self::LeastInflight => "least-inflight",
        }
    }
}

/// Makes choices by one policy.
#[derive(Clone, Debug)]
pub struct Chooser {
    policy: DispatchPolicy,
    turn: usize,
}

impl Chooser {
    /// A chooser that has not chosen yet.
    pub fn new(policy: DispatchPolicy) -> Self {
        Self { policy, turn: 0 }
    }

    /// Its policy.
    pub fn policy(&self) -> DispatchPolicy {
        self.policy
    }

    /// Index into `homes` of the copy to read, among those whose bit in `tried` is 0 (bit i = home i; at most 64
    /// homes). `in_flight_bytes` is indexed by drive. `None` when all have been tried.
    pub fn choose(&mut self, homes: &[DriveId], tried: u64, in_flight_bytes: &[u64]) -> Option<usize> {
        let open = |i: &usize| tried & (1u64 << i) == 0;
        match self.policy {
            DispatchPolicy::FirstHit => (0..homes.len()).find(open),
            DispatchPolicy::RoundRobin => {
                let turn = self.turn;
                self.turn = turn.wrapping_add(1);
                (0..homes.len()).map(|k| (turn + k) % homes.len()).find(open)
            }
            DispatchPolicy::LeastInflight => (0..homes.len())
                .filter(open)
                .min_by_key(|&i| (in_flight_bytes.get(homes[i].index()).copied().unwrap_or(u64::MAX), homes[i])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOMES: [DriveId; 3] = [DriveId(2), DriveId(0), DriveId(1)];

    #[test]
    fn each_policy_chooses_by_its_own_rule() {
        let mut first = Chooser::new(DispatchPolicy::FirstHit);
        assert_eq!(first.choose(&HOMES, 0, &[0, 0, 99]), Some(0));
        assert_eq!(first.choose(&HOMES, 0b001, &[0, 0, 0]), Some(1));
        let mut turns = Chooser::new(DispatchPolicy::RoundRobin);
        let seen: Vec<_> = (0..4).map(|_| turns.choose(&HOMES, 0, &[0; 3]).unwrap()).collect();
        assert_eq!(seen, [0, 1, 2, 0]);
        assert_eq!(turns.choose(&HOMES, 0b010, &[0; 3]), Some(2), "home 1 has been tried");
        let mut least = Chooser::new(DispatchPolicy::LeastInflight);
        assert_eq!(least.choose(&HOMES, 0, &[5, 4, 3]), Some(0));
        assert_eq!(least.choose(&HOMES, 0, &[5, 4, 6]), Some(2));
        assert_eq!(least.choose(&HOMES, 0, &[4, 4, 4]), Some(1), "ties go to drive 0");
        assert_eq!(least.choose(&HOMES, 0b010, &[4, 4, 4]), Some(2));
    }

    #[test]
    fn nothing_is_left_when_all_homes_were_tried() {
        for policy in [DispatchPolicy::FirstHit, DispatchPolicy::RoundRobin, DispatchPolicy::LeastInflight] {
            assert_eq!(Chooser::new(policy).choose(&HOMES, 0b111, &[0; 3]), None);
            assert_eq!(Chooser::new(policy).choose(&[], 0, &[]), None);
        }
    }
}
