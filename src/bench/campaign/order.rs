//! In which order runs are measured: the A/A floor, then rows of all arms in balanced order. Pure.

use super::CampaignError;
use crate::stats::balanced_order;
use serde::{Deserialize, Serialize};

/// Pairs that are measured unless told otherwise.
pub const DEFAULT_PAIRS: usize = 8;
/// Most pairs of one kind.
const MAX_PAIRS: usize = 1000;

/// How many runs, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// Rows in which every arm runs once.
    pub pairs: usize,
    /// Rows in which the control runs twice.
    pub floor_pairs: usize,
    /// Look while measuring, and stop at an effect.
    pub stop: bool,
    /// Seed of the order and of the bootstrap.
    pub seed: u64,
    /// Bootstrap resamples.
    pub resamples: usize,
}

/// A part of a campaign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The control against itself.
    Floor,
    /// The arms against each other.
    Arms,
}

/// One run that is to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Place in the whole order, from 0.
    pub index: usize,
    /// Which part it belongs to.
    pub part: Part,
    /// Row in that part.
    pub row: usize,
    /// Place in that row.
    pub place: usize,
    /// Which arm runs.
    pub arm: usize,
    /// In the floor: 0 or 1, the two roles of the control. Else the arm.
    pub role: usize,
    /// Which prompt.
    pub prompt: usize,
}

/// Fewest rows that give every prompt a row and its mirror image, and are at least `wanted`.
pub fn rows_for(prompts: usize, wanted: usize) -> usize {
    let cycle = 2 * prompts.max(1);
    wanted.max(1).div_ceil(cycle) * cycle
}

impl Protocol {
    /// Refuses what is not balanced over orders and prompts.
    pub fn check(&self, prompts: usize) -> Result<(), CampaignError> {
        for (name, rows) in [("pairs", self.pairs), ("floor-pairs", self.floor_pairs)] {
            if rows == 0 || rows > MAX_PAIRS || rows != rows_for(prompts, rows) {
                let fits = rows_for(prompts, rows.clamp(1, MAX_PAIRS));
                return Err(CampaignError::Option(format!(
                    "{name} is {rows}: every prompt ({prompts}) needs a row and its mirror image equally often, so it \
                     must be a multiple of {}, e.g. {fits}, and at most {MAX_PAIRS}",
                    2 * prompts
                )));
            }
        }
        Ok(())
    }

    /// All runs that count, in order.
    pub fn steps(&self, arms: usize, prompts: usize) -> Vec<Step> {
        let mut out = Vec::new();
        for (part, wide, rows) in [(Part::Floor, 2, self.floor_pairs), (Part::Arms, arms, self.pairs)] {
            for (at, role) in balanced_order(wide, rows, self.seed).into_iter().enumerate() {
                let row = at / wide;
                let arm = if part == Part::Floor { 0 } else { role };
                let prompt = (row / 2) % prompts.max(1);
                out.push(Step { index: out.len(), part, row, place: at % wide, arm, role, prompt });
            }
        }
        out
    }
}

impl Step {
    /// The folder of its record, below `arms/` or `rejected/`.
    pub fn folder(&self, arm: &str) -> String {
        let (index, row) = (self.index, self.row);
        match self.part {
            Part::Floor => format!("{index:02}-{arm}-floor{row}{}", if self.role == 0 { 'a' } else { 'b' }),
            Part::Arms => format!("{index:02}-{arm}-{row}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_comes_first_and_prompts_see_both_orders() {
        let p = Protocol { pairs: 4, floor_pairs: 4, stop: false, seed: 0, resamples: 100 };
        p.check(2).unwrap();
        let steps = p.steps(2, 2);
        assert_eq!(steps.len(), 16);
        assert!(steps[..8].iter().all(|s| s.part == Part::Floor && s.arm == 0));
        let arms: Vec<usize> = steps[8..].iter().map(|s| s.arm).collect();
        assert_eq!(arms, [0, 1, 1, 0, 1, 0, 0, 1], "ABBA BAAB");
        let prompts: Vec<usize> = steps[8..].iter().map(|s| s.prompt).collect();
        assert_eq!(prompts, [0, 0, 0, 0, 1, 1, 1, 1]);
        let folders: std::collections::BTreeSet<String> = steps.iter().map(|s| s.folder("x")).collect();
        assert_eq!(folders.len(), 16);
        assert_eq!(steps[1].folder("a"), "01-a-floor0b");
    }

    #[test]
    fn rows_fit_prompts() {
        assert_eq!((rows_for(1, 8), rows_for(3, 8), rows_for(5, 1)), (8, 12, 10));
        let p = Protocol { pairs: 8, floor_pairs: 7, stop: false, seed: 0, resamples: 100 };
        let e = p.check(1).unwrap_err().to_string();
        assert!(e.contains("floor-pairs is 7") && e.contains("e.g. 8"), "{e}");
        assert!(p.check(3).unwrap_err().to_string().contains("multiple of 6"));
    }
}
