//! Rows by what they have in common: counts, medians and ranges. Pure. Figures of emulated and of real drives never enter one
//! median.

use super::query::Key;
use super::{Row, Verdict};
use crate::stats;
use serde::Serialize;

/// Rows that agree in all keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Their values, in the order of the keys; empty = not known.
    pub key: Vec<String>,
    /// Of emulated drives.
    pub emulated: bool,
    /// What is not exact about the trunk; `None` = it is exact.
    pub trunk: Option<String>,
    /// All rows.
    pub rows: usize,
    /// Rows that do not count; no figure is made from them.
    pub rejected: usize,
    /// Faster than their control.
    pub better: usize,
    /// Slower.
    pub worse: usize,
    /// No difference.
    pub no_difference: usize,
    /// Median decode tokens per second.
    pub median_tok_s: Option<f64>,
    /// Smallest and largest.
    pub tok_s_range: Option<(f64, f64)>,
    /// Median effect, as a ratio.
    pub median_effect: Option<f64>,
    /// Smallest and largest.
    pub effect_range: Option<(f64, f64)>,
}

fn range(values: &[f64]) -> Option<(f64, f64)> {
    let all = || values.iter().copied();
    all().reduce(f64::min).zip(all().reduce(f64::max))
}

/// What rows of a group have in common: values of the keys, emulated drives or real ones, and what is not exact about the trunk.
type Likes = (Vec<String>, bool, Option<String>);

/// Groups `rows` by `keys`, in the order of their values.
pub fn group(rows: &[&Row], keys: &[Key]) -> Vec<Group> {
    let mut by: std::collections::BTreeMap<Likes, Vec<&Row>> = Default::default();
    for row in rows {
        by.entry((keys.iter().map(|k| k.of(row)).collect(), row.emulated, row.trunk.clone())).or_default().push(row);
    }
    let one = |((key, emulated, trunk), rows): (Likes, Vec<&Row>)| {
        let sound: Vec<&&Row> = rows.iter().filter(|r| r.verdict.counts()).collect();
        let speeds: Vec<f64> = sound.iter().filter_map(|r| r.tok_s).collect();
        let effects: Vec<f64> = sound.iter().filter_map(|r| r.effect).map(|e| e.ratio).collect();
        let count = |wanted: &[Verdict]| rows.iter().filter(|r| wanted.contains(&r.verdict)).count();
        Group {
            key,
            emulated,
            trunk,
            rows: rows.len(),
            rejected: rows.len() - sound.len(),
            better: count(&[Verdict::Better]),
            worse: count(&[Verdict::Worse]),
            no_difference: count(&[Verdict::WithinNoise, Verdict::NotStorageBound]),
            median_tok_s: stats::median(&speeds).ok(),
            tok_s_range: range(&speeds),
            median_effect: stats::median(&effects).ok(),
            effect_range: range(&effects),
        }
    };
    by.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::super::walk::Catalogue;
    use super::*;
    use std::path::Path;

    #[test]
    fn rejected_rows_are_counted_and_emulated_ones_stay_apart() {
        let all = Catalogue::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples"));
        let mut rows: Vec<Row> = all.rows.into_iter().filter(|r| r.experiment == "demo-ladder").collect();
        rows[0].tok_s = Some(1.0);
        rows[1].tok_s = Some(3.0);
        rows[2].emulated = false;
        rows[2].tok_s = Some(100.0);
        rows[3].verdict = Verdict::Rejected;
        let groups = group(&rows.iter().collect::<Vec<_>>(), &[Key::named("experiment").unwrap()]);
        assert_eq!(groups.len(), 2);
        let (real, emulated) = (&groups[0], &groups[1]);
        assert_eq!((emulated.rows, emulated.rejected, emulated.median_tok_s), (3, 1, Some(2.0)));
        assert_eq!(emulated.tok_s_range, Some((1.0, 3.0)));
        assert_eq!((real.emulated, real.median_tok_s), (false, Some(100.0)));
    }
}
