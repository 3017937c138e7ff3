//! The small files of a synthetic checkpoint: `config.json` with every key of the release, a byte-level `tiktoken.model`
//! with the release's special tokens, and their companions. Text only.

use super::synth::SynthOptions;
use base64::Engine;
use serde_json::{Value, json};

/// Special tokens after the ranks.
pub const SPECIALS: u64 = 256;
/// Names of the special tokens that have one, by offset; `special` is false for the three of the chat form.
const NAMED: [(u64, &str, bool); 16] = [
    (0, "[BOS]", true),
    (1, "[EOS]", true),
    (2, "<|end_of_msg|>", true),
    (3, "<|open|>", false),
    (4, "<|close|>", false),
    (5, "<|sep|>", false),
    (6, "[start_header_id]", true),
    (7, "[end_header_id]", true),
    (9, "[EOT]", true),
    (18, "<|media_begin|>", true),
    (19, "<|media_content|>", true),
    (20, "<|media_end|>", true),
    (21, "<|media_pad|>", true),
    (65, "<osagent_mode>", true),
    (254, "[UNK]", true),
    (255, "[PAD]", true),
];

/// `config.json`: every fourth layer and the last are full attention, layer 0 is dense.
pub fn config(o: &SynthOptions) -> Value {
    let first_special = o.vocab - SPECIALS;
    let (bos, eos, pad) = (first_special, first_special + 2, first_special + 255);
    let (full, kda): (Vec<u64>, Vec<u64>) = (1..=o.layers).partition(|l| l % 4 == 0 || *l == o.layers);
    let quantization = json!({
        "config_groups": {"group_0": {
            "format": "mxfp4-pack-quantized", "targets": ["Linear"],
            "input_activations": null, "output_activations": null,
            "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group",
                "symmetric": true, "type": "float", "zp_dtype": null}}},
        "format": "mxfp4-pack-quantized", "global_compression_ratio": null, "kv_cache_scheme": null,
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"],
        "quant_method": "compressed-tensors", "quantization_status": "compressed"
    });
    let linear = json!({
        "full_attn_layers": full, "kda_layers": kda, "gate_lower_bound": -5.0, "num_heads": o.heads,
        "head_dim": o.head_dim, "short_conv_kernel_size": 4, "use_full_rank_gate": true
    });
    let mut text = json!({
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5,
        "vocab_size": o.vocab, "hidden_size": o.hidden, "intermediate_size": o.hidden * 3,
        "num_hidden_layers": o.layers, "num_attention_heads": o.heads, "num_key_value_heads": o.heads,
        "q_lora_rank": o.hidden.div_ceil(2), "kv_lora_rank": o.head_dim, "qk_nope_head_dim": o.head_dim,
        "qk_rope_head_dim": o.head_dim.div_ceil(2), "v_head_dim": o.head_dim,
        "mla_use_nope": true, "mla_use_output_gate": true, "attn_res_block_size": o.layers.clamp(1, 4),
        "tie_word_embeddings": false, "use_cache": true, "initializer_range": 0.02, "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad
    });
    let experts = json!({
        "num_experts": o.experts, "num_experts_per_token": o.top_k, "num_shared_experts": o.shared,
        "moe_intermediate_size": o.width, "routed_expert_hidden_size": o.latent, "latent_moe_use_norm": true,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1,
        "use_grouped_topk": true, "topk_method": "noaux_tc",
        "linear_attn_config": linear, "quantization_config": quantization
    });
    if let (Value::Object(text), Value::Object(experts)) = (&mut text, experts) {
        text.extend(experts);
    }
    json!({
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "tie_word_embeddings": false, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad,
        "ignore_index": -100, "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": first_special + 21, "text_config": text
    })
}

/// `generation_config.json`.
pub fn generation(o: &SynthOptions) -> Value {
    json!({"eos_token_id": o.vocab - SPECIALS + 2, "max_length": 4096})
}

/// `tokenizer_config.json`.
pub fn tokenizer_config(o: &SynthOptions) -> Value {
    let first = o.vocab - SPECIALS;
    let entry = |&(offset, content, special): &(u64, &str, bool)| {
        let token = json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false,
            "single_word": false, "special": special});
        ((first + offset).to_string(), token)
    };
    json!({
        "added_tokens_decoder": NAMED.iter().map(entry).collect::<serde_json::Map<_, _>>(),
        "bos_token": "[BOS]", "eos_token": "<|end_of_msg|>", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "model_max_length": 4096, "tokenizer_class": "TikTokenTokenizer"
    })
}

/// `tiktoken.model`: the 256 bytes, then as many pairs and triples of bytes as the vocabulary has room for. Each triple
/// is a pair and a byte, so merging reaches every rank.
pub fn tiktoken(o: &SynthOptions) -> String {
    let mut out = String::new();
    for rank in 0..o.vocab - SPECIALS {
        let bytes = token_bytes(rank);
        let start = bytes.iter().take_while(|b| b.is_none()).count();
        let token: Vec<u8> = bytes[start..].iter().flatten().copied().collect();
        base64::engine::general_purpose::STANDARD.encode_string(token, &mut out);
        out.push_str(&format!(" {rank}\n"));
    }
    out
}

fn token_bytes(rank: u64) -> [Option<u8>; 3] {
    const PAIRS: u64 = 256 + 65_536;
    let byte = |n: u64, shift: u32| Some((n >> shift) as u8);
    match rank {
        0..256 => [None, None, byte(rank, 0)],
        256..PAIRS => [None, byte(rank - 256, 8), byte(rank - 256, 0)],
        _ => [byte(rank - PAIRS, 16), byte(rank - PAIRS, 8), byte(rank - PAIRS, 0)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::ModelConfig;

    #[test]
    fn configurations_are_accepted_and_ranks_are_distinct() {
        let o = SynthOptions { vocab: 512 + 70_000, ..SynthOptions::small() };
        let parsed = ModelConfig::parse(&config(&o).to_string()).unwrap();
        assert_eq!(parsed.vocab_size as u64, o.vocab);
        assert_eq!(u64::from(parsed.eos_token_id), o.vocab - 254);
        let text = tiktoken(&o);
        let tokens: std::collections::HashSet<&str> = text.lines().map(|l| l.split(' ').next().unwrap()).collect();
        assert_eq!(tokens.len() as u64, o.vocab - 256);
        assert_eq!(text.lines().next(), Some("AA== 0"));
    }
}
