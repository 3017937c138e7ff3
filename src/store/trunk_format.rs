//! The formats that a store may keep its trunk in, what they do to a tensor, and how they are called wherever a run or a
//! store is described. Knows one tensor at a time; no file.

use crate::model::tensors::{DType, TensorSpec};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Largest code: symmetric, so that -128 does not occur.
const MAX_CODE: f32 = 127.0;

/// Format of a store's trunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum TrunkFormat {
    /// The checkpoint's own bytes.
    #[default]
    Bf16,
    /// Large matrices as signed bytes with one scale a row, everything else as it is. Not the released weights.
    Int8,
}

impl TrunkFormat {
    /// All of them.
    pub const ALL: [TrunkFormat; 2] = [TrunkFormat::Bf16, TrunkFormat::Int8];

    /// The name in manifests, records and flags.
    pub fn name(self) -> &'static str {
        match self {
            TrunkFormat::Bf16 => "bf16",
            TrunkFormat::Int8 => "int8",
        }
    }

    /// What must be said beside every figure of a model in this format; `None` for the released weights.
    pub fn label(self) -> Option<&'static str> {
        match self {
            TrunkFormat::Bf16 => None,
            TrunkFormat::Int8 => Some("trunk int8 (not weight-exact)"),
        }
    }

    /// The label in front of which `lead` stands, or nothing.
    pub fn label_after(self, lead: &str) -> String {
        self.label().map_or_else(String::new, |label| format!("{lead}{label}"))
    }

    /// How a tensor is stored.
    pub fn dtype_of(self, spec: &TensorSpec) -> DType {
        match self {
            TrunkFormat::Int8 if spec.is_large_matrix() => DType::Int8Rows,
            _ => spec.dtype,
        }
    }

    /// A tensor as it is stored.
    pub fn stored(self, spec: &TensorSpec) -> TensorSpec {
        TensorSpec { dtype: self.dtype_of(spec), ..spec.clone() }
    }

    /// Whether it is the released weights; what manifests and journals then leave out.
    pub fn is_exact(&self) -> bool {
        *self == TrunkFormat::Bf16
    }
}

impl fmt::Display for TrunkFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TrunkFormat {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let known = TrunkFormat::ALL.into_iter().find(|f| f.name() == s);
        known.ok_or_else(|| {
            format!("trunk format `{}` is unknown; this program reads bf16 and int8", s.escape_default())
        })
    }
}

impl From<TrunkFormat> for String {
    fn from(f: TrunkFormat) -> Self {
        f.name().into()
    }
}

impl TryFrom<String> for TrunkFormat {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

/// How far the logits of a trunk that is not exact are from those of the checkpoint's own, over the rows of one short text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrunkError {
    /// Rows that were compared: tokens of the text.
    pub rows: u64,
    /// Rows in which the most likely token is the same.
    pub same_argmax: u64,
    /// Largest difference of two logits.
    pub largest_difference: f32,
    /// Largest magnitude of an exact logit.
    pub largest_exact: f32,
}

impl TrunkError {
    /// Largest difference as a share of the largest exact logit.
    pub fn relative(&self) -> f32 {
        if self.largest_difference == 0.0 { 0.0 } else { self.largest_difference / self.largest_exact }
    }

    /// Whether these figures can be of a comparison.
    pub fn is_plausible(&self) -> bool {
        let figures = [self.largest_difference, self.largest_exact];
        self.rows > 0 && self.same_argmax <= self.rows && figures.iter().all(|v| v.is_finite() && *v >= 0.0)
    }
}

impl fmt::Display for TrunkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "logits of {} tokens differ by {:.3} at most, {:.2} % of the largest; the most likely token is the same in {} of {}",
            self.rows,
            self.largest_difference,
            100.0 * self.relative(),
            self.same_argmax,
            self.rows
        )
    }
}

/// Turns whole rows of bfloat16 weights (`cols` each, little endian) into codes and scales, appended to `codes` and
/// `scales`: scale = largest magnitude / 127, code = weight / scale, rounded to the nearest, halves to the even one.
///
/// # Errors
/// The first row (counted from 0) that holds a value which is no finite number.
pub fn quantize_rows(rows: &[u8], cols: usize, codes: &mut Vec<u8>, scales: &mut Vec<u8>) -> Result<(), usize> {
    for (index, row) in rows.chunks_exact(2 * cols.max(1)).enumerate() {
        let weights = || row.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16));
        if weights().any(|w| !w.is_finite()) {
            return Err(index);
        }
        let scale = weights().fold(0.0f32, |most, w| most.max(w.abs())) / MAX_CODE;
        scales.extend_from_slice(&scale.to_le_bytes());
        // weights so small that their scale is no number any more are nothing beside any other row
        let code = |w: f32| if scale > 0.0 { (w / scale).round_ties_even().clamp(-MAX_CODE, MAX_CODE) } else { 0.0 };
        codes.extend(weights().map(|w| (code(w) as i8).cast_unsigned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect()
    }

    #[test]
    fn rows_are_scaled_by_their_largest_and_halves_go_to_the_even() {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        // the second row's scale is 2: 1, 3 and 5 are halves
        let rows = [[0.0, 0.0, 0.0, 0.0, 0.0], [254.0, 1.0, 3.0, 5.0, -254.0]];
        quantize_rows(&bf16(&rows.concat()), 5, &mut codes, &mut scales).unwrap();
        assert_eq!(codes.iter().map(|c| c.cast_signed()).collect::<Vec<i8>>(), [0, 0, 0, 0, 0, 127, 0, 2, 2, -127]);
        assert_eq!(scales, [0.0f32.to_le_bytes(), 2.0f32.to_le_bytes()].concat());
        let bad = bf16(&[1.0, 2.0, f32::NAN, 1.0]);
        assert_eq!(quantize_rows(&bad, 2, &mut codes, &mut scales), Err(1));
        assert_eq!(quantize_rows(&bf16(&[f32::INFINITY, 0.0]), 2, &mut codes, &mut scales), Err(0));
    }

    #[test]
    fn codes_are_never_off_by_more_than_half_a_step() {
        let values: Vec<f32> = (0..600).map(|i| ((i * 7919 % 601) as f32 - 300.0) * 1.7e-3).collect();
        let bytes = bf16(&values);
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        quantize_rows(&bytes, 60, &mut codes, &mut scales).unwrap();
        for (at, b) in bytes.chunks_exact(2).enumerate() {
            let w = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            let s = &scales[at / 60 * 4..][..4];
            let scale = f32::from_le_bytes([s[0], s[1], s[2], s[3]]);
            let back = scale * f32::from(codes[at].cast_signed());
            assert!((w - back).abs() <= scale * 0.500_01, "{w} {back} {scale}");
        }
    }

    #[test]
    fn only_large_matrices_change() {
        let spec = |name: &str, shape: &[u64]| TensorSpec {
            name: name.into(),
            dtype: DType::BF16,
            shape: shape.to_vec(),
            may_be_longer: false,
        };
        let of = |s: &TensorSpec| TrunkFormat::Int8.dtype_of(s);
        assert_eq!(of(&spec("model.layers.1.self_attn.q_proj.weight", &[8, 4])), DType::Int8Rows);
        assert_eq!(of(&spec("model.layers.1.mlp.gate_proj.weight", &[8, 4])), DType::Int8Rows);
        for (name, shape) in [
            ("model.layers.1.block_sparse_moe.gate.weight", &[8, 4][..]),
            ("model.layers.1.mlp_res_proj.weight", &[1, 4]),
            ("model.norm.weight", &[4]),
        ] {
            assert_eq!(of(&spec(name, shape)), DType::BF16, "{name}");
        }
        assert_eq!(
            "int3".parse::<TrunkFormat>().unwrap_err().split(';').next(),
            Some("trunk format `int3` is unknown")
        );
    }
}
