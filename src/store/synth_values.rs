//! Values of synthetic tensors: a fast generator keyed by (seed, tensor name), so that a tensor's bytes depend on
//! nothing else, and per kind of tensor a distribution under which activations stay finite. Writes no files.

use crate::model::config::ModelConfig;
use crate::model::tensors::{DType, TensorSpec};
use std::sync::Arc;

/// Mean square of the eight E2M1 magnitudes, 0 to 6.
const E2M1_MEAN_SQUARE: f64 = 8.5625;

/// A sequence of random words (splitmix64: a counter through a fixed mixing function).
pub struct Words {
    state: u64,
}

impl Words {
    /// The sequence of one tensor.
    pub fn of(seed: u64, name: &str) -> Self {
        Self { state: xxhash_rust::xxh3::xxh3_64_with_seed(name.as_bytes(), seed) }
    }

    /// The next word.
    #[inline]
    pub fn next_word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The sequence of one tensor from its n-th word on.
    pub fn from_word(seed: u64, name: &str, n: u64) -> Self {
        let mut words = Self::of(seed, name);
        words.state = words.state.wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        words
    }

    /// About normal with mean 0 and deviation 1: the sum of four uniform 16-bit numbers.
    #[inline]
    pub fn normal(&mut self) -> f32 {
        let w = self.next_word();
        let sum = (w & 0xffff) + ((w >> 16) & 0xffff) + ((w >> 32) & 0xffff) + (w >> 48);
        // four uniform numbers on [0, 65535]: mean 131070, deviation 65536 * sqrt(4 / 12)
        (sum as f32 - 131_070.0) * (1.0 / 37_837.2)
    }
}

/// What the embedding of a model with routers made to order carries beside noise: in its first numbers which class the token
/// is of, then a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Code {
    /// Width of a row.
    pub hidden: usize,
    /// Classes of tokens.
    pub classes: usize,
    /// Seed of the classes.
    pub seed: u64,
}

impl Code {
    /// Place of the constant in a row.
    pub fn constant(&self) -> usize {
        self.classes
    }

    /// Numbers of a row that are noise.
    pub fn noise_width(&self) -> usize {
        self.hidden - self.classes - 1
    }

    /// The constant, and the number that marks the class.
    pub fn height(&self) -> f32 {
        (self.hidden as f32).sqrt()
    }

    /// Expected root mean square of a row.
    pub fn root_mean_square(&self) -> f32 {
        ((self.noise_width() + 2 * self.hidden) as f32 / self.hidden as f32).sqrt()
    }

    /// Class of a token.
    pub fn class(&self, token: u64) -> usize {
        (Words { state: self.seed ^ token.wrapping_mul(0xd6e8_feb8_6659_fd93) }.next_word() % self.classes as u64)
            as usize
    }
}

/// How a tensor's values are drawn.
#[derive(Clone, Debug, PartialEq)]
enum Law {
    /// Normal numbers behind a code.
    Coded(Code),
    /// These bytes.
    Given(Arc<[u8]>),
    /// `mean + deviation * normal`.
    Normal { mean: f32, deviation: f32 },
    /// The same for the first `used` values, then zeros (`A_log` is stored padded).
    Padded { used: u64, mean: f32, deviation: f32 },
    /// Random bytes: two E2M1 codes each.
    Codes,
    /// E8M0 scales `base .. base + 4`.
    Scales { base: u8 },
}

/// A tensor that is being written.
pub struct Values {
    words: Words,
    law: Law,
    dtype: DType,
    at: u64,
    name: String,
    seed: u64,
}

impl Values {
    /// The values of `spec` of a model of `config`, from the first on.
    pub fn of(seed: u64, config: &ModelConfig, spec: &TensorSpec) -> Self {
        Self {
            words: Words::of(seed, &spec.name),
            law: law(config, spec),
            dtype: spec.dtype,
            at: 0,
            name: String::new(),
            seed,
        }
    }

    /// An embedding with a code.
    pub fn coded(seed: u64, config: &ModelConfig, spec: &TensorSpec, code: Code) -> Self {
        Self { law: Law::Coded(code), ..Self::of(seed, config, spec) }.named(seed, spec)
    }

    /// A tensor whose bytes are known.
    pub fn given(bytes: Arc<[u8]>, spec: &TensorSpec) -> Self {
        Self {
            words: Words { state: 0 },
            law: Law::Given(bytes),
            dtype: spec.dtype,
            at: 0,
            name: String::new(),
            seed: 0,
        }
    }

    /// The same values from a row on (of an embedding with a code).
    pub fn starting_at(mut self, row: u64) -> Self {
        if let Law::Coded(code) = self.law {
            self.at = row * code.hidden as u64;
            self.words = Words::from_word(self.seed, &self.name, self.at);
        }
        self
    }

    fn named(mut self, seed: u64, spec: &TensorSpec) -> Self {
        (self.seed, self.name) = (seed, spec.name.clone());
        self
    }

    /// Fills `out` with the next bytes. Its length must be a multiple of 8, except for the last piece.
    pub fn fill(&mut self, out: &mut [u8]) {
        match self.law.clone() {
            Law::Coded(code) => {
                for chunk in out.chunks_exact_mut(self.dtype.size() as usize) {
                    let noise = self.words.normal();
                    let (row, column) = (self.at / code.hidden as u64, (self.at % code.hidden as u64) as usize);
                    let value = match column {
                        c if c > code.constant() => noise,
                        c if c == code.constant() || c == code.class(row) => code.height(),
                        _ => 0.0,
                    };
                    let size = chunk.len();
                    chunk.copy_from_slice(&value.to_le_bytes()[4 - size..]);
                    self.at += 1;
                }
            }
            Law::Given(bytes) => {
                let from = self.at as usize;
                out.copy_from_slice(&bytes[from..from + out.len()]);
                self.at += out.len() as u64;
            }
            Law::Codes => {
                let mut chunks = out.chunks_exact_mut(8);
                for chunk in &mut chunks {
                    chunk.copy_from_slice(&self.words.next_word().to_le_bytes());
                }
                let rest = chunks.into_remainder();
                if rest.is_empty() {
                    return;
                }
                let word = self.words.next_word().to_le_bytes();
                rest.iter_mut().zip(word).for_each(|(out, byte)| *out = byte);
            }
            Law::Scales { base } => {
                for chunk in out.chunks_mut(8) {
                    let word = self.words.next_word().to_le_bytes();
                    chunk.iter_mut().zip(word).for_each(|(out, byte)| *out = base + (byte & 3));
                }
            }
            Law::Normal { mean, deviation } => self.floats(out, u64::MAX, mean, deviation),
            Law::Padded { used, mean, deviation } => self.floats(out, used, mean, deviation),
        }
    }

    fn floats(&mut self, out: &mut [u8], used: u64, mean: f32, deviation: f32) {
        let size = self.dtype.size() as usize;
        for chunk in out.chunks_exact_mut(size) {
            let value = if self.at < used { mean + deviation * self.words.normal() } else { 0.0 };
            // the upper half of an f32 is the same number in bf16, cut off
            chunk.copy_from_slice(&value.to_le_bytes()[4 - size..]);
            self.at += 1;
        }
    }
}

fn law(config: &ModelConfig, spec: &TensorSpec) -> Law {
    let name = spec.name.as_str();
    let inputs = spec.shape.last().copied().unwrap_or(1);
    if spec.dtype == DType::U8 {
        if name.ends_with("packed") {
            return Law::Codes;
        }
        // a row of `columns` codes gets a squared norm of about one; the four scales lie around that
        let columns = inputs as f64 * 32.0;
        let exponent = (-0.5 * (columns * E2M1_MEAN_SQUARE).log2()).round() as i32;
        return Law::Scales { base: (127 + exponent - 2).clamp(1, 250) as u8 };
    }
    let normal = |mean, deviation| Law::Normal { mean, deviation };
    if name.ends_with("norm.weight") {
        normal(1.0, 0.05)
    } else if name.ends_with("A_log") {
        Law::Padded { used: config.kda.heads as u64, mean: 0.0, deviation: 0.5 }
    } else if name.ends_with("dt_bias") {
        normal(-1.0, 0.5)
    } else if name.ends_with("e_score_correction_bias") {
        normal(0.0, 0.02)
    } else if name.ends_with("embed_tokens.weight") {
        normal(0.0, 1.0)
    } else {
        // every Linear, the short convolutions included: outputs about as large as inputs
        normal(0.0, 1.0 / (inputs as f32).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_into_the_same_tensor() {
        let text =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/models/argo-mini/config.json")).unwrap();
        let config = ModelConfig::parse(&text).unwrap();
        let mut specs = crate::model::tensors::trunk_tensors(&config);
        specs.extend(crate::model::tensors::expert_tensors(&config, 1, 0).unwrap());
        for spec in specs.iter().filter(|s| s.shape.iter().product::<u64>() >= 64) {
            let mut whole = [0u8; 128];
            Values::of(3, &config, spec).fill(&mut whole);
            let (mut values, mut pieces) = (Values::of(3, &config, spec), [0u8; 128]);
            pieces.chunks_mut(40).for_each(|piece| values.fill(piece));
            assert_eq!(whole, pieces, "{}", spec.name);
            let mut other = [0u8; 128];
            Values::of(4, &config, spec).fill(&mut other);
            assert_ne!(whole, other, "{}", spec.name);
        }
    }

    #[test]
    fn normal_has_mean_zero_and_deviation_one() {
        let mut words = Words::of(1, "x");
        let draws: Vec<f64> = (0..100_000).map(|_| f64::from(words.normal())).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }
}
