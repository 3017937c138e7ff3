//! A loaded model: where each trunk tensor lies, with small vectors widened and folded. Large matrices stay in the
//! trunk as they are stored, or come block by block where it is streamed. Immutable and shared by sessions; holds no expert.

use super::blocks::{Blocks, lay_out};
use super::error::DecodeError;
use super::kernels::{ActivationCounts, Activations, KernelIsa, Kernels, Matrix, SCALE_BYTES};
use crate::model::config::{AttnKind, FfnKind, ModelConfig};
use crate::model::tensors::{DType, TensorSpec, trunk_tensors};
use crate::store::trunk::{Trunk, TrunkAt, TrunkFacts, byte_len};
use std::collections::HashMap;
use std::sync::Arc;

/// A matrix in the trunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mat {
    pub(super) at: TrunkAt,
    /// `BF16` or `Int8Rows`.
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// First byte in the block of its layer, where the trunk is streamed.
    pub(super) in_block: Option<usize>,
}

impl Mat {
    /// Rows `first..first + count` of the matrix that `bytes` holds.
    fn of<'a>(&self, bytes: &'a [u8], first: usize, count: usize) -> Matrix<'a> {
        let row = self.cols * self.dtype.size() as usize;
        let weights = &bytes[first * row..(first + count) * row];
        match self.dtype {
            DType::Int8Rows => self.int8(weights, bytes, first, count),
            _ => Matrix::bf16(weights, count, self.cols),
        }
    }

    /// Rows with these codes; their scales lie in `whole`, behind the codes of all rows.
    fn int8<'a>(&self, codes: &'a [u8], whole: &'a [u8], first: usize, count: usize) -> Matrix<'a> {
        let scales = &whole[self.rows * self.cols..];
        Matrix::int8_rows(codes, &scales[first * SCALE_BYTES..(first + count) * SCALE_BYTES], count, self.cols)
    }
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
    Kda(Box<Kda>),
    Mla(Box<Mla>),
}

pub(super) enum Ffn {
    Dense(Mlp),
    Moe(Box<Moe>),
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
    /// How the trunk comes, where it is streamed.
    blocks: Option<Blocks>,
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
            loader.tensor(&spec.name)?;
        }
        let mut layers: Vec<Layer> =
            (0..config.layers.len()).map(|i| layer(&loader, &config, i)).collect::<Result<_, _>>()?;
        let embed = loader.mat("model.embed_tokens.weight")?;
        let out_res = loader.folded("model.output_attn_res_norm.weight", "model.output_attn_res_proj.weight")?;
        let norm = loader.vector("model.norm.weight")?;
        let head = loader.mat("lm_head.weight")?;
        let blocks = trunk.is_streamed().then(|| lay_out(&mut layers, &head));
        Ok(Arc::new(Self { config, kernels, embed, layers, out_res, norm, head, trunk, blocks }))
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

    /// From now on products of MXFP4 and int8 weights see their activations so; all others see single precision.
    pub fn use_activations(&self, activations: Activations) {
        self.kernels.use_activations(activations);
    }

    /// Products so far, by the form of the weights and by what activations were.
    pub fn activation_counts(&self) -> ActivationCounts {
        self.kernels.activation_counts()
    }

    /// Calls `work` once on each thread in use, with a number of its own; the caller's own included. Waits for whoever has the
    /// threads. `false` if some were left out, because they were not free or did not come by within a second.
    pub fn on_each_thread(&self, work: &(dyn Fn(usize) + Sync)) -> bool {
        self.kernels.pool().muster(work)
    }

    /// Parts of products and of other shared work that each thread in use has computed so far, the caller's own first.
    pub fn thread_chunks(&self) -> Vec<u64> {
        self.kernels.pool().taken()
    }

    /// The instruction set of the kernels.
    pub fn isa(&self) -> KernelIsa {
        self.kernels.isa()
    }

    /// The blocks in which a streamed trunk comes; `None` where it is in memory or mapped.
    pub fn blocks(&self) -> Option<&Blocks> {
        self.blocks.as_ref()
    }

    /// What was done with the trunk's bytes.
    pub fn trunk_facts(&self) -> TrunkFacts {
        self.trunk.facts()
    }

    /// Matrices of the trunk by how they are stored: bfloat16, and int8 by rows.
    pub fn matrix_counts(&self) -> (u64, u64) {
        let mut counts = (0, 0);
        let all = self.layers.iter().flat_map(Layer::matrices).chain([&self.embed, &self.head]);
        all.for_each(|m| if m.dtype == DType::Int8Rows { counts.1 += 1 } else { counts.0 += 1 });
        counts
    }

    /// The model with what is in memory or mapped alone.
    pub(super) fn resident(&self) -> View<'_> {
        View { decoder: self, block: None }
    }

    /// The model with a block of its trunk at hand, where it is streamed.
    pub(super) fn with<'a>(&'a self, block: Option<&'a [u8]>) -> View<'a> {
        View { decoder: self, block }
    }
}

/// A model, and that block of its trunk which is at hand.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    decoder: &'a Decoder,
    block: Option<&'a [u8]>,
}

impl std::ops::Deref for View<'_> {
    type Target = Decoder;

    fn deref(&self) -> &Decoder {
        self.decoder
    }
}

impl<'a> View<'a> {
    /// A matrix, to compute with.
    pub(super) fn matrix(&self, m: Mat) -> Matrix<'a> {
        self.matrix_rows(m, 0, m.rows)
    }

    /// Rows `first..first + count` of a matrix, to compute with.
    pub(super) fn matrix_rows(&self, m: Mat, first: usize, count: usize) -> Matrix<'a> {
        let bytes = match (self.block, m.in_block) {
            (Some(block), Some(at)) => &block[at..],
            _ => self.decoder.trunk.bytes(m.at),
        };
        m.of(bytes, first, count)
    }

    /// Rows `first..first + count` of the head, whose weights begin at byte `skip` of the block.
    pub(super) fn head_rows(&self, skip: usize, first: usize, count: usize) -> Matrix<'a> {
        let m = &self.decoder.head;
        let weights = &self.block.unwrap_or(&[])[skip..];
        match m.dtype {
            // scales are few: they are read where they are mapped
            DType::Int8Rows => m.int8(&weights[..count * m.cols], self.decoder.trunk.bytes(m.at), first, count),
            _ => Matrix::bf16(weights, count, m.cols),
        }
    }
}

impl Layer {
    /// Every matrix but the router, which layers before this one may ask too.
    pub(super) fn matrices_mut(&mut self) -> Vec<&mut Mat> {
        let mut all: Vec<&mut Mat> = Vec::new();
        match &mut self.attn {
            Attn::Kda(w) => {
                all.extend(w.qkv.iter_mut());
                all.extend([&mut w.out, &mut w.f_a, &mut w.f_b, &mut w.beta]);
                match &mut w.gate {
                    Gate::Full(m) => all.push(m),
                    Gate::Factors(a, b) => all.extend([a, b]),
                }
            }
            Attn::Mla(w) => {
                all.extend([&mut w.q_a, &mut w.q_b, &mut w.kv_a, &mut w.kv_b, &mut w.gate, &mut w.out]);
            }
        }
        match &mut self.ffn {
            Ffn::Dense(w) => all.extend([&mut w.gate, &mut w.up, &mut w.down]),
            Ffn::Moe(w) => {
                if let Some(w) = &mut w.shared {
                    all.extend([&mut w.gate, &mut w.up, &mut w.down]);
                }
                all.extend([&mut w.down, &mut w.up]);
            }
        }
        all
    }

    /// The same, to look at.
    fn matrices(&self) -> Vec<&Mat> {
        let mut all: Vec<&Mat> = Vec::new();
        match &self.attn {
            Attn::Kda(w) => {
                all.extend(&w.qkv);
                all.extend([&w.out, &w.f_a, &w.f_b, &w.beta]);
                match &w.gate {
                    Gate::Full(m) => all.push(m),
                    Gate::Factors(a, b) => all.extend([a, b]),
                }
            }
            Attn::Mla(w) => all.extend([&w.q_a, &w.q_b, &w.kv_a, &w.kv_b, &w.gate, &w.out]),
        }
        match &self.ffn {
            Ffn::Dense(w) => all.extend([&w.gate, &w.up, &w.down]),
            Ffn::Moe(w) => {
                w.shared.iter().for_each(|w| all.extend([&w.gate, &w.up, &w.down]));
                all.extend([&w.down, &w.up]);
            }
        }
        all
    }
}

fn layer(l: &Loader<'_>, cfg: &ModelConfig, index: usize) -> Result<Layer, DecodeError> {
    let p = format!("model.layers.{index}.");
    let kind = cfg.layers[index];
    let attn = match kind.attn {
        AttnKind::Kda => Attn::Kda(Box::new(kda(l, cfg, &format!("{p}self_attn."))?)),
        AttnKind::Mla => Attn::Mla(Box::new(mla(l, &format!("{p}self_attn."))?)),
    };
    let ffn = match (kind.ffn, &cfg.moe) {
        (FfnKind::Moe, Some(moe)) => {
            let m = format!("{p}block_sparse_moe.");
            Ffn::Moe(Box::new(Moe {
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
            }))
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
    fn tensor(&self, name: &str) -> Result<(&TensorSpec, TrunkAt, DType), DecodeError> {
        let missing = || DecodeError::MissingTensor(name.to_string());
        let spec = self.specs.get(name).ok_or_else(missing)?;
        let view = self.trunk.get(name).ok_or_else(missing)?;
        let at = self.trunk.at(name).ok_or_else(missing)?;
        let fits = byte_len(view.shape, view.dtype) == Some(view.bytes.len() as u64);
        let turned = view.dtype == DType::Int8Rows && spec.is_large_matrix();
        if (view.dtype != spec.dtype && !turned) || !spec.accepts(view.shape) || !fits {
            return Err(DecodeError::Tensor {
                name: name.to_string(),
                seen: format!("{} {:?} of {} bytes", view.dtype.name(), view.shape, view.bytes.len()),
                expected: format!("{} {:?}", spec.dtype.name(), spec.shape),
            });
        }
        Ok((spec, at, view.dtype))
    }

    fn mat(&self, name: &str) -> Result<Mat, DecodeError> {
        let (spec, at, dtype) = self.tensor(name)?;
        match (dtype, spec.shape.as_slice()) {
            (DType::BF16 | DType::Int8Rows, &[rows, cols]) => {
                Ok(Mat { at, dtype, rows: rows as usize, cols: cols as usize, in_block: None })
            }
            _ => Err(DecodeError::MissingTensor(format!("{name} (as a matrix)"))),
        }
    }

    /// All values of a small tensor, widened.
    fn vector(&self, name: &str) -> Result<Vec<f32>, DecodeError> {
        let (_, at, dtype) = self.tensor(name)?;
        let bytes = self.trunk.bytes(at);
        Ok(match dtype {
            DType::BF16 => bytes.chunks_exact(2).map(|b| super::kernels::scalar::bf16(b[0], b[1])).collect(),
            DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            DType::U8 => bytes.iter().map(|&b| f32::from(b)).collect(),
            DType::Int8Rows => return Err(DecodeError::MissingTensor(format!("{name} (as a vector)"))),
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
