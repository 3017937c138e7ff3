//! Names, dtypes and shapes of every text tensor of the released layout (k3-architecture.md section 3), derived
//! from a [`ModelConfig`]. Pure: the importer checks files against it, `synth` writes files from it, the decoder
//! asks for tensors by these names. Names carry no `language_model.` prefix; the importer strips it.

use super::config::{AttnKind, FfnKind, ModelConfig};
use serde::{Deserialize, Serialize};

/// The prefix that the released checkpoint puts before every text tensor.
pub const TEXT_PREFIX: &str = "language_model.";
/// Prefixes of tensors that text decoding does not need (k3-architecture.md section 1).
pub const VISION_PREFIXES: [&str; 2] = ["vision_tower.", "mm_projector."];
/// Plane suffixes of an expert in the order in which they lie in a slot: w1, w2, w3, each packed then scale.
pub const EXPERT_PLANES: [&str; 6] = [
    "w1.weight_packed",
    "w1.weight_scale",
    "w2.weight_packed",
    "w2.weight_scale",
    "w3.weight_packed",
    "w3.weight_scale",
];

/// Storage types that occur in the released layout, and the one that a store may turn matrices into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DType {
    /// bfloat16
    BF16,
    /// IEEE single precision
    F32,
    /// bytes (MXFP4 planes)
    U8,
    /// Rows of signed bytes, and behind all of them one f32 of scale a row: weight `[r][c]` is `scale[r] * code[r][c]`. Only
    /// stores have it.
    #[serde(rename = "I8_ROWS")]
    Int8Rows,
}

impl DType {
    /// Bytes per element; scales of rows are extra.
    pub fn size(self) -> u64 {
        match self {
            DType::BF16 => 2,
            DType::F32 => 4,
            DType::U8 | DType::Int8Rows => 1,
        }
    }

    /// The name as safetensors, or a store's manifest, writes it.
    pub fn name(self) -> &'static str {
        match self {
            DType::BF16 => "BF16",
            DType::F32 => "F32",
            DType::U8 => "U8",
            DType::Int8Rows => "I8_ROWS",
        }
    }
}

/// One tensor that a model of this configuration has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name without the text prefix, e.g. `model.layers.3.self_attn.o_proj.weight`.
    pub name: String,
    /// Its storage type.
    pub dtype: DType,
    /// Its shape, outermost first.
    pub shape: Vec<u64>,
    /// `A_log` is padded beyond the heads in the release: its first dimension may be larger than `shape` says.
    pub may_be_longer: bool,
}

impl TensorSpec {
    /// The shape in which the release stores it: padded to the width of a head where it may be longer.
    pub fn as_stored(mut self, cfg: &ModelConfig) -> Self {
        if self.may_be_longer {
            self.shape[0] = self.shape[0].max(cfg.kda.head_dim as u64);
        }
        self
    }

    /// A large matrix that activations are multiplied with: projections, MLPs, embedding and head. Routers decide which
    /// experts are read and are none; nor are norms, biases, taps and one-row projections.
    pub fn is_large_matrix(&self) -> bool {
        let matrix = self.dtype == DType::BF16 && self.shape.len() == 2 && self.shape.iter().all(|d| *d > 1);
        matrix && !self.is_router()
    }

    /// The weights by which a layer chooses its experts.
    pub fn is_router(&self) -> bool {
        self.name.ends_with(".block_sparse_moe.gate.weight")
    }

    /// Whether `shape` is acceptable for this tensor.
    pub fn accepts(&self, shape: &[u64]) -> bool {
        if self.may_be_longer {
            shape.len() == self.shape.len() && shape.iter().zip(&self.shape).all(|(got, want)| got >= want)
        } else {
            shape == self.shape
        }
    }
}

/// A borrowed tensor: bytes as stored, little endian.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Storage type.
    pub dtype: DType,
    /// Shape, outermost first.
    pub shape: &'a [u64],
    /// `product(shape) * dtype.size()` bytes, and the scales of [`DType::Int8Rows`].
    pub bytes: &'a [u8],
}

/// Every tensor that is not a routed expert's, in layer order.
pub fn trunk_tensors(cfg: &ModelConfig) -> Vec<TensorSpec> {
    let mut out = Vec::new();
    let h = cfg.hidden_size as u64;
    let vocab = cfg.vocab_size as u64;
    let mut add = |name: String, dtype: DType, shape: &[u64]| {
        out.push(TensorSpec { may_be_longer: name.ends_with(".A_log"), name, dtype, shape: shape.to_vec() });
    };
    use DType::{BF16, F32};
    add("model.embed_tokens.weight".into(), BF16, &[vocab, h]);
    for (index, layer) in cfg.layers.iter().enumerate() {
        let p = format!("model.layers.{index}.");
        for norm in ["input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"] {
            add(format!("{p}{norm}.weight"), BF16, &[h]);
        }
        for proj in ["self_attention_res_proj", "mlp_res_proj"] {
            add(format!("{p}{proj}.weight"), BF16, &[1, h]);
        }
        let a = format!("{p}self_attn.");
        match layer.attn {
            AttnKind::Kda => {
                let (nh, d, w) = (cfg.kda.heads as u64, cfg.kda.head_dim as u64, cfg.kda.conv_kernel as u64);
                let width = nh * d;
                for c in ["q", "k", "v"] {
                    add(format!("{a}{c}_proj.weight"), BF16, &[width, h]);
                    add(format!("{a}{c}_conv1d.weight"), F32, &[width, 1, w]);
                }
                add(format!("{a}o_proj.weight"), BF16, &[h, width]);
                add(format!("{a}f_a_proj.weight"), BF16, &[d, h]);
                add(format!("{a}f_b_proj.weight"), BF16, &[width, d]);
                add(format!("{a}b_proj.weight"), BF16, &[nh, h]);
                if cfg.kda.full_rank_gate {
                    add(format!("{a}g_proj.weight"), BF16, &[width, h]);
                } else {
                    add(format!("{a}g_a_proj.weight"), BF16, &[d, h]);
                    add(format!("{a}g_b_proj.weight"), BF16, &[width, d]);
                }
                add(format!("{a}A_log"), F32, &[nh]);
                add(format!("{a}dt_bias"), F32, &[width]);
                add(format!("{a}o_norm.weight"), F32, &[d]);
            }
            AttnKind::Mla => {
                let m = &cfg.mla;
                let (nh, qr, kr) = (m.heads as u64, m.q_lora_rank as u64, m.kv_lora_rank as u64);
                let (dn, dr, dv) = (m.qk_nope_head_dim as u64, m.qk_rope_head_dim as u64, m.v_head_dim as u64);
                add(format!("{a}q_a_proj.weight"), BF16, &[qr, h]);
                add(format!("{a}q_a_layernorm.weight"), BF16, &[qr]);
                add(format!("{a}q_b_proj.weight"), BF16, &[nh * (dn + dr), qr]);
                add(format!("{a}kv_a_proj_with_mqa.weight"), BF16, &[kr + dr, h]);
                add(format!("{a}kv_a_layernorm.weight"), BF16, &[kr]);
                add(format!("{a}kv_b_proj.weight"), BF16, &[nh * (dn + dv), kr]);
                add(format!("{a}g_proj.weight"), BF16, &[nh * dv, h]);
                add(format!("{a}o_proj.weight"), BF16, &[h, nh * dv]);
            }
        }
        match (&layer.ffn, &cfg.moe) {
            (FfnKind::Moe, Some(moe)) => {
                let m = format!("{p}block_sparse_moe.");
                let (lat, shared) = (moe.latent as u64, (moe.width * moe.shared_experts) as u64);
                add(format!("{m}gate.weight"), BF16, &[moe.experts as u64, h]);
                add(format!("{m}gate.e_score_correction_bias"), F32, &[moe.experts as u64]);
                add(format!("{m}routed_expert_down_proj.weight"), BF16, &[lat, h]);
                add(format!("{m}routed_expert_up_proj.weight"), BF16, &[h, lat]);
                if moe.latent_norm {
                    add(format!("{m}routed_expert_norm.weight"), BF16, &[lat]);
                }
                if moe.shared_experts > 0 {
                    add(format!("{m}shared_experts.gate_proj.weight"), BF16, &[shared, h]);
                    add(format!("{m}shared_experts.up_proj.weight"), BF16, &[shared, h]);
                    add(format!("{m}shared_experts.down_proj.weight"), BF16, &[h, shared]);
                }
            }
            _ => {
                let i = cfg.intermediate_size as u64;
                add(format!("{p}mlp.gate_proj.weight"), BF16, &[i, h]);
                add(format!("{p}mlp.up_proj.weight"), BF16, &[i, h]);
                add(format!("{p}mlp.down_proj.weight"), BF16, &[h, i]);
            }
        }
    }
    add("model.norm.weight".into(), BF16, &[h]);
    add("model.output_attn_res_norm.weight".into(), BF16, &[h]);
    add("model.output_attn_res_proj.weight".into(), BF16, &[1, h]);
    add("lm_head.weight".into(), BF16, &[vocab, h]);
    out
}

/// The six planes of one expert, in slot order, named without the text prefix.
pub fn expert_tensors(cfg: &ModelConfig, layer: usize, expert: usize) -> Option<[TensorSpec; 6]> {
    let moe = cfg.moe.as_ref()?;
    let (w, l) = (moe.width as u64, moe.latent as u64);
    let shapes = [[w, l / 2], [w, l / 32], [l, w / 2], [l, w / 32], [w, l / 2], [w, l / 32]];
    Some(std::array::from_fn(|plane| TensorSpec {
        name: format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{}", EXPERT_PLANES[plane]),
        dtype: DType::U8,
        shape: shapes[plane].to_vec(),
        may_be_longer: false,
    }))
}
