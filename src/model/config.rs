//! The released `config.json`, read strictly: a missing key, an unknown activation or a layer in no list is an
//! error that names the key. There are no defaults, because the released class's defaults are not the released
//! model's values (k3-architecture.md section 1). Knows nothing of tensors or files beyond the JSON text.

use serde_json::{Map, Value};

/// Largest dimension accepted, so that later products cannot overflow. K3's largest is its vocabulary, 163,840.
const MAX_DIM: u64 = 1 << 24;
/// Most layers accepted (K3 has 93).
const MAX_LAYERS: u64 = 4096;

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// The text is not a JSON object.
    #[error("config.json is not a JSON object: {0}")]
    Json(String),
    /// A key that the architecture needs is absent.
    #[error("config.json: key `{0}` is missing; it is needed and has no default")]
    Missing(String),
    /// A key's value has the wrong type or is out of range.
    #[error("config.json: key `{key}` is {seen}; expected {expected}")]
    Value {
        /// Dotted path of the key.
        key: String,
        /// What stands there.
        seen: String,
        /// What would be accepted.
        expected: String,
    },
    /// The layer lists do not name each layer exactly once.
    #[error("config.json: {0}")]
    Layers(String),
}

/// Attention of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttnKind {
    /// Linear attention with a recurrent state (section 2.2).
    Kda,
    /// Latent full attention (section 2.3).
    Mla,
}

/// Feed-forward part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FfnKind {
    /// One dense MLP.
    Dense,
    /// Routed experts in a latent space plus shared experts (section 2.4).
    Moe,
}

/// One decoder layer's two halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// Attention.
    pub attn: AttnKind,
    /// Feed-forward.
    pub ffn: FfnKind,
}

/// KDA geometry.
#[derive(Clone, Debug, PartialEq)]
pub struct KdaConfig {
    /// Heads.
    pub heads: usize,
    /// Key width = value width of a head.
    pub head_dim: usize,
    /// Taps of the short convolution.
    pub conv_kernel: usize,
    /// The output gate is one full matrix (`g_proj`) rather than two factors.
    pub full_rank_gate: bool,
    /// Lower bound of the log decay; `None` (JSON null) means the older softplus gate.
    pub gate_lower_bound: Option<f32>,
}

/// MLA geometry.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaConfig {
    /// Heads.
    pub heads: usize,
    /// Rank of the query factorisation.
    pub q_lora_rank: usize,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Query/key width that comes from the latent.
    pub qk_nope_head_dim: usize,
    /// Query/key width shared by all heads (not rotated in this family).
    pub qk_rope_head_dim: usize,
    /// Value width.
    pub v_head_dim: usize,
}

/// Routed experts' geometry and routing rule.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts per layer.
    pub experts: usize,
    /// Experts chosen per token.
    pub top_k: usize,
    /// Shared experts (one fused MLP of `shared_experts * width`).
    pub shared_experts: usize,
    /// Inner width of one expert.
    pub width: usize,
    /// Width of the latent space in which routed experts live.
    pub latent: usize,
    /// RMSNorm on the routed sum.
    pub latent_norm: bool,
    /// Divide the chosen scores by their sum.
    pub renormalize: bool,
    /// Factor after renormalising.
    pub scaling: f32,
}

/// A checked model configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of dense MLPs.
    pub intermediate_size: usize,
    /// Kinds of the layers, 0-based.
    pub layers: Vec<LayerKind>,
    /// Epsilon of every norm but the two MLA latent norms.
    pub rms_norm_eps: f32,
    /// SiTU's beta.
    pub situ_beta: f32,
    /// SiTU's beta of the linear branch; `None` passes it through.
    pub situ_linear_beta: Option<f32>,
    /// Layers per attention-residual block.
    pub attn_res_block_size: usize,
    /// KDA geometry.
    pub kda: KdaConfig,
    /// MLA geometry.
    pub mla: MlaConfig,
    /// Experts; `None` for a dense model (`num_experts` null).
    pub moe: Option<MoeConfig>,
    /// Beginning-of-text token.
    pub bos_token_id: u32,
    /// End-of-text token.
    pub eos_token_id: u32,
    /// Longest text the model was made for.
    pub max_position_embeddings: usize,
}

impl MoeConfig {
    /// Bytes of the six planes of one expert, in slot order (w1, w2, w3, each packed then scale).
    pub fn plane_bytes(&self) -> [u64; 6] {
        let (packed, scale) = ((self.width * self.latent / 2) as u64, (self.width * self.latent / 32) as u64);
        [packed, scale, packed, scale, packed, scale]
    }

    /// Bytes of one expert.
    pub fn expert_bytes(&self) -> u64 {
        self.plane_bytes().iter().sum()
    }
}

impl ModelConfig {
    /// Reads a released `config.json`.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let root: Value = serde_json::from_str(text).map_err(|e| ConfigError::Json(e.to_string()))?;
        let root = root.as_object().ok_or_else(|| ConfigError::Json("the top level is something else".into()))?;
        let text = Section::new("", root).object("text_config")?;
        let top = Section::new("", root);
        let lin = text.object("linear_attn_config")?;
        text.one_of("hidden_act", &["situ"])?;
        text.must_be("mla_use_nope", true)?;
        text.must_be("mla_use_output_gate", true)?;
        if text.bool("tie_word_embeddings")? {
            return Err(text.bad("tie_word_embeddings", "true", "false (a separate lm_head)"));
        }
        let mtp = text.uint("num_nextn_predict_layers", 0, MAX_LAYERS)?;
        if mtp != 0 {
            return Err(text.bad("num_nextn_predict_layers", &mtp.to_string(), "0 (no prediction layers)"));
        }
        let count = text.uint("num_hidden_layers", 1, MAX_LAYERS)? as usize;
        let moe = match text.get("num_experts")? {
            Value::Null => None,
            _ => Some(moe_config(&text)?),
        };
        let first_dense = text.uint("first_k_dense_replace", 0, MAX_LAYERS)? as usize;
        let freq = text.uint("moe_layer_freq", 1, MAX_LAYERS)? as usize;
        let attn = layer_lists(&lin, count)?;
        let layers = attn
            .into_iter()
            .enumerate()
            .map(|(index, attn)| LayerKind {
                attn,
                ffn: if moe.is_some() && index >= first_dense && index % freq == 0 {
                    FfnKind::Moe
                } else {
                    FfnKind::Dense
                },
            })
            .collect();
        Ok(Self {
            vocab_size: text.dim("vocab_size")?,
            hidden_size: text.dim("hidden_size")?,
            intermediate_size: text.dim("intermediate_size")?,
            layers,
            rms_norm_eps: text.positive("rms_norm_eps")?,
            situ_beta: text.positive("activation_situ_beta")?,
            situ_linear_beta: text.positive_or_null("activation_situ_linear_beta")?,
            attn_res_block_size: text.dim("attn_res_block_size")?,
            kda: KdaConfig {
                heads: lin.dim("num_heads")?,
                head_dim: lin.dim("head_dim")?,
                conv_kernel: lin.uint("short_conv_kernel_size", 2, 64)? as usize,
                full_rank_gate: lin.bool("use_full_rank_gate")?,
                gate_lower_bound: gate_lower_bound(&lin)?,
            },
            mla: MlaConfig {
                heads: text.dim("num_attention_heads")?,
                q_lora_rank: text.dim("q_lora_rank")?,
                kv_lora_rank: text.dim("kv_lora_rank")?,
                qk_nope_head_dim: text.dim("qk_nope_head_dim")?,
                qk_rope_head_dim: text.dim("qk_rope_head_dim")?,
                v_head_dim: text.dim("v_head_dim")?,
            },
            moe,
            bos_token_id: top.uint("bos_token_id", 0, MAX_DIM)? as u32,
            eos_token_id: top.uint("eos_token_id", 0, MAX_DIM)? as u32,
            max_position_embeddings: text.dim("max_position_embeddings")?,
        })
    }

    /// Layers that hold routed experts.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> + '_ {
        self.layers.iter().enumerate().filter(|(_, l)| l.ffn == FfnKind::Moe).map(|(i, _)| i)
    }
}

fn moe_config(text: &Section<'_>) -> Result<MoeConfig, ConfigError> {
    text.one_of("topk_method", &["noaux_tc"])?;
    text.one_of("moe_router_activation_func", &["sigmoid"])?;
    for key in ["num_expert_group", "topk_group"] {
        let groups = text.uint(key, 0, MAX_DIM)?;
        if groups != 1 {
            return Err(text.bad(key, &groups.to_string(), "1 (group-limited routing is not built)"));
        }
    }
    quantization(&text.object("quantization_config")?)?;
    let moe = MoeConfig {
        experts: text.uint("num_experts", 1, u64::from(u16::MAX))? as usize,
        top_k: text.uint("num_experts_per_token", 1, u64::from(u16::MAX))? as usize,
        shared_experts: text.uint("num_shared_experts", 0, 1024)? as usize,
        width: text.dim("moe_intermediate_size")?,
        latent: text.dim("routed_expert_hidden_size")?,
        latent_norm: text.bool("latent_moe_use_norm")?,
        renormalize: text.bool("moe_renormalize")?,
        scaling: text.positive("routed_scaling_factor")?,
    };
    if moe.top_k > moe.experts {
        return Err(text.bad("num_experts_per_token", &moe.top_k.to_string(), "at most num_experts"));
    }
    for (key, value) in [("moe_intermediate_size", moe.width), ("routed_expert_hidden_size", moe.latent)] {
        if value % 32 != 0 {
            return Err(text.bad(key, &value.to_string(), "a multiple of 32 (one MXFP4 scale per 32 columns)"));
        }
    }
    if moe.expert_bytes() > u64::from(u32::MAX) {
        return Err(text.bad("moe_intermediate_size", &moe.width.to_string(), "experts below 4 GiB"));
    }
    Ok(moe)
}

fn quantization(q: &Section<'_>) -> Result<(), ConfigError> {
    q.one_of("format", &["mxfp4-pack-quantized"])?;
    let groups = q.object("config_groups")?;
    let group = groups.object("group_0")?;
    let w = group.object("weights")?;
    for (key, want) in [("group_size", 32), ("num_bits", 4)] {
        let seen = w.uint(key, 0, MAX_DIM)?;
        if seen != want {
            return Err(w.bad(key, &seen.to_string(), &want.to_string()));
        }
    }
    w.one_of("type", &["float"])?;
    w.must_be("symmetric", true)?;
    w.one_of("scale_dtype", &["torch.uint8", "uint8"])
}

fn gate_lower_bound(lin: &Section<'_>) -> Result<Option<f32>, ConfigError> {
    match lin.get("gate_lower_bound")? {
        Value::Null => Ok(None),
        v => match v.as_f64() {
            Some(x) if (-80.0..0.0).contains(&x) => Ok(Some(x as f32)),
            _ => Err(lin.bad("gate_lower_bound", &v.to_string(), "a number in [-80, 0) or null")),
        },
    }
}

/// The two 1-based layer lists must name every layer exactly once.
fn layer_lists(lin: &Section<'_>, count: usize) -> Result<Vec<AttnKind>, ConfigError> {
    let mut kinds: Vec<Option<AttnKind>> = vec![None; count];
    for (key, kind) in [("kda_layers", AttnKind::Kda), ("full_attn_layers", AttnKind::Mla)] {
        let value = lin.get(key)?;
        let list = value.as_array().ok_or_else(|| lin.bad(key, &value.to_string(), "a list of layers"))?;
        for entry in list {
            let layer = entry
                .as_u64()
                .filter(|l| (1..=count as u64).contains(l))
                .ok_or_else(|| lin.bad(key, &entry.to_string(), &format!("layers from 1 to {count} (1-based)")))?;
            let slot = &mut kinds[layer as usize - 1];
            if slot.is_some() {
                return Err(ConfigError::Layers(format!(
                    "layer {layer} (1-based) stands twice in linear_attn_config.kda_layers / full_attn_layers"
                )));
            }
            *slot = Some(kind);
        }
    }
    kinds
        .into_iter()
        .enumerate()
        .map(|(index, kind)| {
            kind.ok_or_else(|| {
                ConfigError::Layers(format!(
                    "layer {} (1-based) is in neither linear_attn_config.kda_layers nor full_attn_layers",
                    index + 1
                ))
            })
        })
        .collect()
}

/// One JSON object and the dotted path that leads to it.
struct Section<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Section<'a> {
    fn new(path: &str, map: &'a Map<String, Value>) -> Self {
        Self { path: path.to_string(), map }
    }

    fn key(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    fn bad(&self, key: &str, seen: &str, expected: &str) -> ConfigError {
        ConfigError::Value { key: self.key(key), seen: seen.into(), expected: expected.into() }
    }

    fn get(&self, key: &str) -> Result<&'a Value, ConfigError> {
        self.map.get(key).ok_or_else(|| ConfigError::Missing(self.key(key)))
    }

    fn object(&self, key: &str) -> Result<Section<'a>, ConfigError> {
        let value = self.get(key)?;
        let map = value.as_object().ok_or_else(|| self.bad(key, &value.to_string(), "an object"))?;
        Ok(Section { path: self.key(key), map })
    }

    fn uint(&self, key: &str, min: u64, max: u64) -> Result<u64, ConfigError> {
        let value = self.get(key)?;
        value
            .as_u64()
            .filter(|v| (min..=max).contains(v))
            .ok_or_else(|| self.bad(key, &value.to_string(), &format!("an integer from {min} to {max}")))
    }

    fn dim(&self, key: &str) -> Result<usize, ConfigError> {
        self.uint(key, 1, MAX_DIM).map(|v| v as usize)
    }

    fn bool(&self, key: &str) -> Result<bool, ConfigError> {
        let value = self.get(key)?;
        value.as_bool().ok_or_else(|| self.bad(key, &value.to_string(), "true or false"))
    }

    fn must_be(&self, key: &str, want: bool) -> Result<(), ConfigError> {
        if self.bool(key)? == want { Ok(()) } else { Err(self.bad(key, &(!want).to_string(), &want.to_string())) }
    }

    fn positive(&self, key: &str) -> Result<f32, ConfigError> {
        let value = self.get(key)?;
        value
            .as_f64()
            .map(|v| v as f32)
            .filter(|v| v.is_finite() && *v > 0.0)
            .ok_or_else(|| self.bad(key, &value.to_string(), "a positive number"))
    }

    fn positive_or_null(&self, key: &str) -> Result<Option<f32>, ConfigError> {
        if self.get(key)?.is_null() { Ok(None) } else { self.positive(key).map(Some) }
    }

    fn one_of(&self, key: &str, known: &[&str]) -> Result<(), ConfigError> {
        let value = self.get(key)?;
        match value.as_str() {
            Some(s) if known.contains(&s) => Ok(()),
            _ => Err(self.bad(key, &value.to_string(), &format!("one of {known:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argo_mini() -> Value {
        serde_json::from_str(include_str!("../../models/argo-mini/config.json")).unwrap()
    }

    fn parse(v: &Value) -> Result<ModelConfig, ConfigError> {
        ModelConfig::parse(&v.to_string())
    }

    #[test]
    fn reads_argo_mini() {
        let c = parse(&argo_mini()).unwrap();
        assert_eq!(c.layers.len(), 12);
        assert_eq!(c.layers[3].attn, AttnKind::Mla);
        assert_eq!(c.layers[0].ffn, FfnKind::Dense);
        assert_eq!(c.moe_layers().count(), 11);
        assert_eq!(c.moe.unwrap().expert_bytes(), 26_112);
    }

    #[test]
    fn reads_a_dense_model() {
        let c = ModelConfig::parse(include_str!("../../models/argo-mini-draft/config.json")).unwrap();
        assert!(c.moe.is_none());
        assert!(c.layers.iter().all(|l| l.ffn == FfnKind::Dense));
    }

    #[test]
    fn every_missing_key_is_named() {
        let full = argo_mini();
        let keys: Vec<String> = full["text_config"].as_object().unwrap().keys().cloned().collect();
        let unused = [
            "architectures",
            "model_type",
            "dtype",
            "use_cache",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "num_key_value_heads",
            "use_grouped_topk",
        ];
        for key in keys.iter().filter(|k| !unused.contains(&k.as_str())) {
            let mut v = full.clone();
            v["text_config"].as_object_mut().unwrap().remove(key);
            match parse(&v) {
                Err(ConfigError::Missing(k)) => assert_eq!(k, format!("text_config.{key}")),
                other => panic!("{key} removed gave {other:?}"),
            }
        }
    }

    #[test]
    fn unknown_activation_is_refused_by_name() {
        let mut v = argo_mini();
        v["text_config"]["hidden_act"] = "swish9".into();
        let e = parse(&v).unwrap_err().to_string();
        assert!(e.contains("text_config.hidden_act") && e.contains("swish9"), "{e}");
    }

    #[test]
    fn a_layer_in_no_list_or_in_both_is_refused() {
        let mut v = argo_mini();
        v["text_config"]["linear_attn_config"]["full_attn_layers"] = serde_json::json!([4, 12]);
        assert!(parse(&v).unwrap_err().to_string().contains("layer 8 (1-based) is in neither"));
        v["text_config"]["linear_attn_config"]["full_attn_layers"] = serde_json::json!([4, 8, 9, 12]);
        assert!(parse(&v).unwrap_err().to_string().contains("layer 9 (1-based) stands twice"));
        v["text_config"]["linear_attn_config"]["full_attn_layers"] = serde_json::json!([4, 8, 13]);
        assert!(parse(&v).unwrap_err().to_string().contains("full_attn_layers"));
    }

    #[test]
    fn absurd_sizes_are_refused_before_anything_is_allocated() {
        for (key, value) in [("hidden_size", u64::MAX), ("num_hidden_layers", 1 << 40), ("vocab_size", 0)] {
            let mut v = argo_mini();
            v["text_config"][key] = value.into();
            assert!(parse(&v).unwrap_err().to_string().contains(key));
        }
    }
}
