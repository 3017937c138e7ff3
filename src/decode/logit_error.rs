//! How far logits of approximate arithmetic or of coarser weights lie from exact ones. Compares numbers; knows neither
//! models nor runs.

use crate::store::trunk_format::TrunkError;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Logits of the same rows, computed twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogitError {
    /// Rows compared.
    pub rows: u64,
    /// Of these, rows whose largest logit is the same token's; of equally large logits the first counts.
    pub same_argmax: u64,
    /// Largest absolute difference. NaN if a logit of either side is NaN.
    pub largest_difference: f32,
    /// Largest absolute value of an exact logit.
    pub largest_exact: f32,
}

impl LogitError {
    /// Compares `other` with `exact`, both `[rows, vocab]`.
    ///
    /// # Panics
    /// If the two differ in length, or are no whole rows of `vocab` logits.
    pub fn between(exact: &[f32], other: &[f32], vocab: usize) -> Self {
        assert!(exact.len() == other.len(), "logits of two different shapes");
        assert!(vocab > 0 && exact.len().is_multiple_of(vocab), "logits that are no whole rows");
        let mut seen = Self::default();
        for (exact, other) in exact.chunks_exact(vocab).zip(other.chunks_exact(vocab)) {
            seen.rows += 1;
            seen.same_argmax += u64::from(argmax(exact) == argmax(other));
            for (e, o) in exact.iter().zip(other) {
                seen.largest_difference = larger(seen.largest_difference, (e - o).abs());
                seen.largest_exact = larger(seen.largest_exact, e.abs());
            }
        }
        seen
    }

    /// Both together: of all their rows.
    pub fn and(self, other: Self) -> Self {
        Self {
            rows: self.rows + other.rows,
            same_argmax: self.same_argmax + other.same_argmax,
            largest_difference: larger(self.largest_difference, other.largest_difference),
            largest_exact: larger(self.largest_exact, other.largest_exact),
        }
    }

    /// The largest difference as a share of the largest exact logit; 0 where there is no difference.
    pub fn relative(&self) -> f32 {
        if self.largest_difference == 0.0 { 0.0 } else { self.largest_difference / self.largest_exact }
    }
}

impl From<LogitError> for TrunkError {
    fn from(e: LogitError) -> Self {
        let LogitError { rows, same_argmax, largest_difference, largest_exact } = e;
        TrunkError { rows, same_argmax, largest_difference, largest_exact }
    }
}

impl fmt::Display for LogitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        TrunkError::from(*self).fmt(f)
    }
}

/// The larger one; NaN wins over every number.
fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

/// Index of the first of the largest values.
fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_compared_by_their_largest_logit_and_all_of_them_by_distance() {
        let exact = [1.0, -4.0, 2.0, /**/ 0.0, 0.5, 0.5];
        let other = [1.0, -4.5, 2.25, /**/ 0.0, 0.25, 0.5];
        let seen = LogitError::between(&exact, &other, 3);
        assert_eq!(seen, LogitError { rows: 2, same_argmax: 1, largest_difference: 0.5, largest_exact: 4.0 });
        assert_eq!(seen.relative(), 0.125);
        let parts =
            LogitError::between(&exact[..3], &other[..3], 3).and(LogitError::between(&exact[3..], &other[3..], 3));
        assert_eq!(parts, seen);
    }

    #[test]
    fn equal_logits_have_no_error_and_nan_is_not_lost() {
        assert_eq!(LogitError::between(&[0.0, 0.0], &[0.0, 0.0], 2).relative(), 0.0);
        assert!(LogitError::between(&[1.0, 2.0, 3.0], &[1.0, f32::NAN, 3.5], 3).relative().is_nan());
    }
}
