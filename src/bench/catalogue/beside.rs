//! Another machine's results beside one's own, by shape only: gains over the first rung, verdicts and effects. Rates of different
//! machines are not put into one table.

use super::{Kind, Row, Verdict};
use crate::bench::campaign::evaluate::Effect;
use serde::Serialize;
use std::collections::BTreeMap;

/// The shape of one ladder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shape {
    /// Its experiment and day.
    pub name: String,
    /// Its model's id.
    pub model: String,
    /// A drive was emulated.
    pub emulated: bool,
    /// Drives, and speed as a multiple of the first rung's.
    pub gains: Vec<(usize, f64)>,
}

/// One verdict.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Said {
    /// The verdict.
    pub verdict: Verdict,
    /// The effect.
    pub effect: Option<Effect>,
    /// A drive was emulated.
    pub emulated: bool,
}

impl Said {
    fn of(row: &Row) -> Self {
        Self { verdict: row.verdict, effect: row.effect, emulated: row.emulated }
    }
}

/// What a candidate came out as on both machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdicts {
    /// `experiment: candidate vs control`.
    pub title: String,
    /// There.
    pub theirs: Said,
    /// Here, the newest of that name; `None` = not measured here.
    pub mine: Option<Said>,
}

/// Both.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Beside {
    /// Ladders of the other machine.
    pub theirs: Vec<Shape>,
    /// The newest own ladder of each model and pace.
    pub mine: Vec<Shape>,
    /// Comparisons.
    pub verdicts: Vec<Verdicts>,
}

/// Ladders of `rows` that count, newest first.
fn shapes(rows: &[&Row]) -> Vec<Shape> {
    let mut by_file: BTreeMap<_, Vec<&Row>> = BTreeMap::new();
    // drives alone and shared uplinks are no part of the shape
    let of_ladder = |r: &&&Row| r.kind == Kind::Rung && r.name.starts_with("rung");
    for row in rows.iter().filter(of_ladder).filter(|r| r.verdict.counts() && !r.drives.is_empty()) {
        by_file.entry((&row.when, &row.path)).or_default().push(row);
    }
    let shape = |((when, _), rungs): ((&String, _), Vec<&Row>)| {
        let first = rungs.first()?;
        let day: String = when.chars().take(10).collect();
        let base = first.tok_s.filter(|r| *r > 0.0)?;
        let gain = |r: &&Row| Some((r.drives.len(), r.tok_s? / base));
        let name = if day.is_empty() { first.experiment.clone() } else { format!("{} {day}", first.experiment) };
        Some(Shape {
            name,
            model: first.model.clone(),
            emulated: first.emulated,
            gains: rungs.iter().filter_map(gain).collect(),
        })
    };
    by_file.into_iter().rev().filter_map(shape).collect()
}

/// Lays `theirs` beside `mine`; rows of other bundles among `mine` are not one's own.
pub fn beside(theirs: &[Row], mine: &[Row]) -> Beside {
    let theirs: Vec<&Row> = theirs.iter().filter(|r| !r.inside).collect();
    let mine: Vec<&Row> = mine.iter().filter(|r| !r.inside && r.origin.is_none()).collect();
    let mut own = shapes(&mine);
    let mut seen = std::collections::BTreeSet::new();
    own.retain(|s| seen.insert((s.model.clone(), s.emulated)));
    let verdicts = theirs
        .iter()
        .filter(|r| r.kind == Kind::Comparison)
        .map(|row| {
            let same = |m: &&&Row| m.kind == Kind::Comparison && m.title() == row.title();
            let newest = mine.iter().filter(same).max_by(|a, b| a.when.cmp(&b.when));
            Verdicts { title: row.title(), theirs: Said::of(row), mine: newest.map(|m| Said::of(m)) }
        })
        .collect();
    Beside { theirs: shapes(&theirs), mine: own, verdicts }
}

#[cfg(test)]
mod tests {
    use super::super::walk::Catalogue;
    use super::*;
    use std::path::Path;

    #[test]
    fn gains_and_verdicts_stand_beside_each_other() {
        let rows = Catalogue::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples")).rows;
        let both = beside(&rows, &rows);
        assert_eq!(both.theirs, both.mine);
        assert_eq!(both.theirs[0].gains.len(), 4);
        assert_eq!(both.theirs[0].gains[0], (1, 1.0));
        let comparisons = rows.iter().filter(|r| r.kind == Kind::Comparison).count();
        assert_eq!(both.verdicts.len(), comparisons);
        assert!(both.verdicts.iter().all(|v| v.mine.as_ref() == Some(&v.theirs)));
        let foreign: Vec<Row> = rows.iter().map(|r| Row { origin: Some("x".into()), ..r.clone() }).collect();
        let both = beside(&rows, &foreign);
        assert!(both.mine.is_empty() && both.verdicts.iter().all(|v| v.mine.is_none()));
    }
}
