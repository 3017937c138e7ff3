//! How products see their activations: as single-precision numbers, or as int8; and a count of which products did what, by
//! the form of their weights. Computes nothing.

use super::matrix::{Data, Matrix};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// What activations are in matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Activations {
    /// Single precision.
    #[default]
    F32,
    /// Signed bytes with a scale for every 32 columns, where the weights are MXFP4 or int8 rows. Not exact.
    Int8,
}

impl Activations {
    /// All of them.
    pub const ALL: [Activations; 2] = [Activations::F32, Activations::Int8];

    /// The name in configurations and records.
    pub fn name(self) -> &'static str {
        match self {
            Activations::F32 => "f32",
            Activations::Int8 => "int8",
        }
    }

    /// What must be said beside every figure of a run with them; `None` for the exact ones.
    pub fn label(self) -> Option<&'static str> {
        match self {
            Activations::F32 => None,
            Activations::Int8 => Some("activations int8 (not exact)"),
        }
    }
}

impl fmt::Display for Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Activations {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let known = Activations::ALL.into_iter().find(|a| a.name() == s);
        known.ok_or_else(|| format!("`{}` is no kind of activations; use f32 or int8", s.escape_default()))
    }
}

impl From<Activations> for String {
    fn from(a: Activations) -> Self {
        a.name().into()
    }
}

impl TryFrom<String> for Activations {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

/// A form of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightForm {
    /// Single precision: the attention's cache.
    F32,
    /// bfloat16.
    Bf16,
    /// int8 by rows.
    Int8Rows,
    /// MXFP4.
    Mxfp4,
}

impl WeightForm {
    /// All of them.
    pub const ALL: [WeightForm; 4] = [WeightForm::F32, WeightForm::Bf16, WeightForm::Int8Rows, WeightForm::Mxfp4];

    /// The name in tables and records.
    pub fn name(self) -> &'static str {
        match self {
            WeightForm::F32 => "f32",
            WeightForm::Bf16 => "bf16",
            WeightForm::Int8Rows => "int8 rows",
            WeightForm::Mxfp4 => "MXFP4",
        }
    }

    /// Whether products with such weights can have int8 activations.
    pub fn takes_int8(self) -> bool {
        matches!(self, WeightForm::Int8Rows | WeightForm::Mxfp4)
    }
}

impl Matrix<'_> {
    /// How the weights are stored.
    pub fn form(&self) -> WeightForm {
        match self.data {
            Data::F32(_) => WeightForm::F32,
            Data::Bf16(_) => WeightForm::Bf16,
            Data::Int8 { .. } => WeightForm::Int8Rows,
            Data::Mxfp4 { .. } => WeightForm::Mxfp4,
        }
    }
}

/// Products (a thread's part of one counts) by the form of the weights and by what activations were.
#[derive(Debug, Default)]
pub(super) struct FormCalls([[AtomicU64; Activations::ALL.len()]; WeightForm::ALL.len()]);

impl FormCalls {
    pub(super) fn count(&self, form: WeightForm, activations: Activations) {
        self.0[form as usize][activations as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn counted(&self) -> ActivationCounts {
        let of = |form: WeightForm| self.0[form as usize].each_ref().map(|n| n.load(Ordering::Relaxed));
        ActivationCounts(WeightForm::ALL.map(of))
    }
}

/// Products by the form of the weights and by what activations were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivationCounts([[u64; Activations::ALL.len()]; WeightForm::ALL.len()]);

impl ActivationCounts {
    /// Products with weights of `form` whose activations were `activations`.
    pub fn of(&self, form: WeightForm, activations: Activations) -> u64 {
        self.0[form as usize][activations as usize]
    }

    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut out = *self;
        for (all, before) in out.0.iter_mut().flatten().zip(earlier.0.iter().flatten()) {
            *all -= before;
        }
        out
    }
}
