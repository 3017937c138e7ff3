//! A loaded model: where each trunk tensor lies, with small vectors widened and folded. Large matrices stay in the
//! trunk as they are stored. Immutable and shared by sessions; holds no expert.

use super::error::DecodeError;
use super::kernels::{KernelIsa, Kernels, Matrix};
use crate::ids::Extent;
use crate::model::config::{AttnKind, FfnKind, ModelConfig};
use crate::model::tensors::{DType, TensorSpec, trunk_tensors};
use crate::store::trunk::{Trunk, byte_len};
use std::collections::HashMap;
use std::sync::Arc;

/// A bfloat16 matrix in the trunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mat {
    at: Extent,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// `down(situ(gate x, up x))`
pub(super) struct Mlp {
    pub(super) gate: Mat,
    pub(super) up: Mat,
    pub(super) down: Mat,
}

/// A KDA layer's attention.
pub(super) struct Kda {
    /// Projections of q, k and v.
    pub(super) qkv: [Mat; 3],
    /// Convolution taps of q, k and v, `[tap][channel]`.
    pub(super) taps: [Vec<f32>; 3],
    pub(super) out: Mat,
    pub(super) f_a: Mat,
    pub(super) f_b: Mat,
    pub(super) beta: Mat,
    pub(super) gate: Gate,
    /// `exp(A_log)` per head.
    pub(super) decay_rate: Vec<f32>,
    pub(super) dt_bias: Vec<f32>,
    pub(super) norm: Vec<f32>,
}

/// The output gate's projection: one matrix or two factors.
pub(super) enum Gate {
    Full(Mat),
    Factors(Mat, Mat),
}

/// An MLA layer's attention.
pub(super) struct Mla {
    pub(super) q_a: Mat,
    pub(super) q_a_norm: Vec<f32>,
    pub(super) q_b: Mat,
    pub(super) kv_a: Mat,
    pub(super) kv_a_norm: Vec<f32>,
    pub(super) kv_b: Mat,
    pub(super) gate: Mat,
    pub(super) out: Mat,
}

/// A mixture layer's feed-forward part, without its routed experts.
pub(super) struct Moe {
    pub(super) router: Mat,
    pub(super) bias: Vec<f32>,
    pub(super) down: Mat,
    pub(super) up: Mat,
    pub(super) norm: Option<Vec<f32>>,
    pub(super) shared: Option<Mlp>,
}

pub(super) enum Attn {
    Kda(Kda),
    Mla(Mla),
}

pub(super) enum Ffn {
    Dense(Mlp),
    Moe(Moe),
}

/// One decoder layer.
pub(super) struct Layer {
    pub(super) attn_norm: Vec<f32>,
    pub(super) ffn_norm: Vec<f32>,
    /// Norm times projection of the attention's residual mix.
    pub(super) attn_res: Vec<f32>,
    /// Norm times projection of the feed-forward part's residual mix.
    pub(super) ffn_res: Vec<f32>,
    pub(super) attn: Attn,
    pub(super) ffn: Ffn,
}

/// A model ready to decode.
pub struct Decoder {
    pub(super) config: ModelConfig,
    pub(super) kernels: Kernels,
    pub(super) embed: Mat,
    pub(super) layers: Vec<Layer>,
    /// Norm times projection of the last residual mix.
    pub(super) out_res: Vec<f32>,
    pub(super) norm: Vec<f32>,
    pub(super) head: Mat,
    trunk: Arc<Trunk>,
}

impl Decoder {
    /// Looks up and checks every tensor; uses the fastest kernels that this processor runs.
    pub fn load(config: ModelConfig, trunk: Arc<Trunk>) -> Result<Arc<Self>, DecodeError> {
        Self::load_with(config, trunk, KernelIsa::detect())
    }

    /// As [`Decoder::load`], with the kernels of `isa`.
    pub fn load_with(config: ModelConfig, trunk: Arc<Trunk>, isa: KernelIsa) -> Result<Arc<Self>, DecodeError> {
        let kernels = Kernels::new(isa).ok_or(DecodeError::Isa(isa))?;
        let specs = trunk_tensors(&config).into_iter().map(|s| (s.name.clone(), s)).collect();
        let loader = Loader { trunk: &trunk, specs };
        for spec in loader.specs.values() {
            loader.extent(&spec.name)?;
        }
        let layers = (0..config.layers.len()).map(|i| layer(&loader, &config, i)).collect::<Result<_, _>>()?;
        let embed = loader.mat("model.embed_tokens.weight")?;
        let out_res = loader.folded("model.output_attn_res_norm.weight", "model.output_attn_res_proj.weight")?;
        let norm = loader.vector("model.norm.weight")?;
        let head = loader.mat("lm_head.weight")?;
        Ok(Arc::new(Self { config, kernels, embed, layers, out_res, norm, head, trunk }))
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The instruction set of the kernels in use.
    pub fn kernel_calls(&self, isa: KernelIsa) -> u64 {
        self.kernels.calls(isa)
    }

    /// From now on products are shared by `threads` threads, the caller's own included. They change no bit.
    pub fn use_threads(&self, threads: usize) {
        self.kernels.use_threads(threads);
    }

    /// Parts of products that each thread in use has computed so far, the caller's own first.
    pub fn thread_chunks(&self) -> Vec<u64> {
        self.kernels.pool().taken()
    }

    /// The instruction set of the kernels.
    pub fn isa(&self) -> KernelIsa {
        self.kernels.isa()
    }

    /// A matrix, to compute with.
    pub(super) fn matrix(&self, m: Mat) -> Matrix<'_> {
        Matrix::bf16(self.trunk.bytes(m.at), m.rows, m.cols)
    }

    /// The stored bytes of rows `first..first + count` of a matrix.
    pub(super) fn row_bytes(&self, m: Mat, first: usize, count: usize) -> &[u8] {
        &self.trunk.bytes(m.at)[first * m.cols * 2..(first + count) * m.cols * 2]
    }

    /// Rows `first..first + count` of a matrix, to compute with.
    pub(super) fn matrix_rows(&self, m: Mat, first: usize, count: usize) -> Matrix<'_> {
        Matrix::bf16(self.row_bytes(m, first, count), count, m.cols)
    }
}

fn layer(l: &Loader<'_>, cfg: &ModelConfig, index: usize) -> Result<Layer, DecodeError> {
    let p = format!("model.layers.{index}.");
    let kind = cfg.layers[index];
    let attn = match kind.attn {
        AttnKind::Kda => Attn::Kda(kda(l, cfg, &format!("{p}self_attn."))?),
        AttnKind::Mla => Attn::Mla(mla(l, &format!("{p}self_attn."))?),
    };
    let ffn = match (kind.ffn, &cfg.moe) {
        (FfnKind::Moe, Some(moe)) => {
            let m = format!("{p}block_sparse_moe.");
            Ffn::Moe(Moe {
                router: l.mat(&format!("{m}gate.weight"))?,
                bias: l.finite_vector(&format!("{m}gate.e_score_correction_bias"))?,
                down: l.mat(&format!("{m}routed_expert_down_proj.weight"))?,
                up: l.mat(&format!("{m}routed_expert_up_proj.weight"))?,
                norm: match moe.latent_norm {
                    true => Some(l.vector(&format!("{m}routed_expert_norm.weight"))?),
                    false => None,
                },
                shared: match moe.shared_experts {
                    0 => None,
                    _ => Some(l.mlp(&format!("{m}shared_experts."))?),
                },
            })
        }
        _ => Ffn::Dense(l.mlp(&format!("{p}mlp."))?),
    };
    Ok(Layer {
        attn_norm: l.vector(&format!("{p}input_layernorm.weight"))?,
        ffn_norm: l.vector(&format!("{p}post_attention_layernorm.weight"))?,
        attn_res: l
            .folded(&format!("{p}self_attention_res_norm.weight"), &format!("{p}self_attention_res_proj.weight"))?,
        ffn_res: l.folded(&format!("{p}mlp_res_norm.weight"), &format!("{p}mlp_res_proj.weight"))?,
        attn,
        ffn,
    })
}

fn kda(l: &Loader<'_>, cfg: &ModelConfig, a: &str) -> Result<Kda, DecodeError> {
    let name = |part: &str| format!("{a}{part}.weight");
    // The release pads A_log beyond the heads; only the first `heads` entries mean anything.
    let decay_rate = l.vector(&format!("{a}A_log"))?.iter().take(cfg.kda.heads).map(|v| v.exp()).collect();
    let taps = |part: &str| -> Result<Vec<f32>, DecodeError> {
        let stored = l.vector(&name(part))?;
        let kernel = cfg.kda.conv_kernel;
        let channels = stored.len() / kernel;
        Ok((0..stored.len()).map(|i| stored[(i % channels) * kernel + i / channels]).collect())
    };
    Ok(Kda {
        qkv: [l.mat(&name("q_proj"))?, l.mat(&name("k_proj"))?, l.mat(&name("v_proj"))?],
        taps: [taps("q_conv1d")?, taps("k_conv1d")?, taps("v_conv1d")?],
        out: l.mat(&name("o_proj"))?,
        f_a: l.mat(&name("f_a_proj"))?,
        f_b: l.mat(&name("f_b_proj"))?,
        beta: l.mat(&name("b_proj"))?,
        gate: match cfg.kda.full_rank_gate {
            true => Gate::Full(l.mat(&name("g_proj"))?),
            false => Gate::Factors(l.mat(&name("g_a_proj"))?, l.mat(&name("g_b_proj"))?),
        },
        decay_rate,
        dt_bias: l.vector(&format!("{a}dt_bias"))?,
        norm: l.vector(&name("o_norm"))?,
    })
}

fn mla(l: &Loader<'_>, a: &str) -> Result<Mla, DecodeError> {
    let name = |part: &str| format!("{a}{part}.weight");
    Ok(Mla {
        q_a: l.mat(&name("q_a_proj"))?,
        q_a_norm: l.vector(&name("q_a_layernorm"))?,
        q_b: l.mat(&name("q_b_proj"))?,
        kv_a: l.mat(&name("kv_a_proj_with_mqa"))?,
        kv_a_norm: l.vector(&name("kv_a_layernorm"))?,
        kv_b: l.mat(&name("kv_b_proj"))?,
        gate: l.mat(&name("g_proj"))?,
        out: l.mat(&name("o_proj"))?,
    })
}

/// Finds tensors and checks them against what the configuration asks for.
struct Loader<'a> {
    trunk: &'a Trunk,
    specs: HashMap<String, TensorSpec>,
}

impl Loader<'_> {
    fn extent(&self, name: &str) -> Result<(&TensorSpec, Extent), DecodeError> {
        let missing = || DecodeError::MissingTensor(name.to_string());
        let spec = self.specs.get(name).ok_or_else(missing)?;
        let view = self.trunk.get(name).ok_or_else(missing)?;
        let extent = self.trunk.extent(name).ok_or_else(missing)?;
        let fits = byte_len(view.shape, view.dtype) == Some(view.bytes.len() as u64);
        if view.dtype != spec.dtype || !spec.accepts(view.shape) || !fits {
            return Err(DecodeError::Tensor {
                name: name.to_string(),
                seen: format!("{} {:?} of {} bytes", view.dtype.name(), view.shape, view.bytes.len()),
                expected: format!("{} {:?}", spec.dtype.name(), spec.shape),
            });
        }
        Ok((spec, extent))
    }

    fn mat(&self, name: &str) -> Result<Mat, DecodeError> {
        let (spec, at) = self.extent(name)?;
        match (spec.dtype, spec.shape.as_slice()) {
            (DType::BF16, &[rows, cols]) => Ok(Mat { at, rows: rows as usize, cols: cols as usize }),
            _ => Err(DecodeError::MissingTensor(format!("{name} (as a bfloat16 matrix)"))),
        }
    }

    /// All values of a small tensor, widened.
    fn vector(&self, name: &str) -> Result<Vec<f32>, DecodeError> {
        let (spec, at) = self.extent(name)?;
        let bytes = self.trunk.bytes(at);
        Ok(match spec.dtype {
            DType::BF16 => bytes.chunks_exact(2).map(|b| super::kernels::scalar::bf16(b[0], b[1])).collect(),
            DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            DType::U8 => bytes.iter().map(|&b| f32::from(b)).collect(),
        })
    }

    /// As [`Loader::vector`], for values that a comparison depends on.
    fn finite_vector(&self, name: &str) -> Result<Vec<f32>, DecodeError> {
        let values = self.vector(name)?;
        match values.iter().find(|v| !v.is_finite()) {
            None => Ok(values),
            Some(v) => Err(DecodeError::Tensor {
                name: name.to_string(),
                seen: format!("a tensor with the value {v}"),
                expected: "finite values".into(),
            }),
        }
    }

    /// The product of a norm's weights and a one-row projection: together one vector.
    fn folded(&self, norm: &str, proj: &str) -> Result<Vec<f32>, DecodeError> {
        Ok(self.vector(norm)?.iter().zip(self.vector(proj)?).map(|(a, b)| a * b).collect())
    }

    fn mlp(&self, prefix: &str) -> Result<Mlp, DecodeError> {
        let mat = |part: &str| self.mat(&format!("{prefix}{part}_proj.weight"));
        Ok(Mlp { gate: mat("gate")?, up: mat("up")?, down: mat("down")? })
    }
}
