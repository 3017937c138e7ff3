//! What a model takes, from its configuration alone: bytes of the trunk and of the experts, and how they fit into memory.
//! Every size comes from the code that stores, loads or allocates it; no weight is needed.

use crate::decode::kv::KvTooSmall;
use crate::decode::memory::{SessionBytes, thread_bytes};
use crate::decode::{Activations, KvPlan};
use crate::ids::LayerId;
use crate::io::Slab;
use crate::model::config::ModelConfig;
use crate::model::tensors::{DType, TensorSpec, trunk_tensors};
use crate::store::trunk::{byte_len, place};
use crate::store::trunk_format::TrunkFormat;
use serde::Serialize;

/// Largest alignment of direct reads that slots are sized for, where no drive can be asked.
const READ_ALIGN: u64 = 4096;

/// A model's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelBytes {
    /// Layers with routed experts.
    pub moe_layers: Vec<LayerId>,
    /// Experts in each of them.
    pub experts: u32,
    /// Experts of one token in each of them.
    pub top_k: u32,
    /// Payload of one expert.
    pub expert_bytes: u64,
    /// All experts of all layers.
    pub expert_count: u64,
    /// Their payload.
    pub bank_bytes: u64,
    /// Expert bytes that one token needs with nothing kept.
    pub token_bytes: u64,
    /// Tensors of the trunk.
    pub trunk_tensors: u64,
    /// The trunk as the checkpoint has it.
    pub trunk_bf16_bytes: u64,
    /// The trunk with one byte for each weight of a BF16 matrix and an f32 scale for each of its rows; routers, norms and
    /// vectors as they are.
    pub trunk_int8_bytes: u64,
    /// `trunk.bin`: the BF16 trunk with every tensor on a page of its own.
    pub trunk_file_bytes: u64,
    /// The same of an int8 trunk.
    pub trunk_int8_file_bytes: u64,
    /// Trunk bytes that one token needs: all of it but the other rows of the embedding.
    pub trunk_token_bytes: u64,
    /// Checkpoint bytes that an import reads: trunk and experts.
    pub checkpoint_bytes: u64,
    /// A slot of the reader: an expert rounded up to what direct reads and pages ask for.
    pub slot_bytes: u64,
}

fn beyond() -> String {
    "the model's bytes exceed 64 bits; look at the widths and layer counts in its config.json".into()
}

/// Bytes of a trunk tensor as row-wise int8.
fn int8_bytes(spec: &TensorSpec, bytes: u64) -> Option<u64> {
    match TrunkFormat::Int8.dtype_of(spec) {
        DType::Int8Rows => byte_len(&spec.shape, DType::Int8Rows),
        _ => Some(bytes),
    }
}

impl ModelBytes {
    /// The bytes of a model of this configuration.
    pub fn of(config: &ModelConfig) -> Result<Self, String> {
        let specs: Vec<TensorSpec> = trunk_tensors(config).into_iter().map(|s| s.as_stored(config)).collect();
        let each = specs.iter().map(|s| byte_len(&s.shape, s.dtype)).collect::<Option<Vec<u64>>>();
        let each = each.ok_or_else(beyond)?;
        let sum = |of: &dyn Fn(usize) -> Option<u64>| {
            (0..specs.len()).try_fold(0u64, |sum, i| sum.checked_add(of(i)?)).ok_or_else(beyond)
        };
        let trunk_bf16_bytes = sum(&|i| Some(each[i]))?;
        let int8 = specs.iter().zip(&each).map(|(s, b)| int8_bytes(s, *b)).collect::<Option<Vec<u64>>>();
        let int8 = int8.ok_or_else(beyond)?;
        let trunk_int8_bytes = sum(&|i| Some(int8[i]))?;
        let (_, trunk_file_bytes) = place(each.iter().copied()).ok_or_else(beyond)?;
        let (_, trunk_int8_file_bytes) = place(int8.iter().copied()).ok_or_else(beyond)?;
        let embedding: u64 =
            specs.iter().zip(&each).filter(|(s, _)| s.name.contains("embed_tokens")).map(|(_, b)| b).sum();
        let row = embedding / config.vocab_size.max(1) as u64;
        let moe_layers: Vec<LayerId> = config.moe_layers().map(|l| LayerId(l as u16)).collect();
        let (experts, top_k, expert_bytes) =
            config.moe.as_ref().map_or((0, 0, 0), |m| (m.experts as u32, m.top_k as u32, m.expert_bytes()));
        let expert_count = moe_layers.len() as u64 * u64::from(experts);
        let times = |n: u64| n.checked_mul(expert_bytes).ok_or_else(beyond);
        let bank_bytes = times(expert_count)?;
        let slot_bytes =
            expert_bytes.checked_next_multiple_of(READ_ALIGN).and_then(Slab::slot_size).ok_or_else(beyond)?;
        Ok(Self {
            token_bytes: times(moe_layers.len() as u64 * u64::from(top_k))?,
            moe_layers,
            experts,
            top_k,
            expert_bytes,
            expert_count,
            bank_bytes,
            trunk_tensors: specs.len() as u64,
            trunk_bf16_bytes,
            trunk_int8_bytes,
            trunk_file_bytes,
            trunk_int8_file_bytes,
            trunk_token_bytes: trunk_bf16_bytes - embedding + row,
            checkpoint_bytes: trunk_bf16_bytes.checked_add(bank_bytes).ok_or_else(beyond)?,
            slot_bytes,
        })
    }
}

/// What is asked of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryAsked {
    /// Memory of the machine.
    pub ram_bytes: u64,
    /// Of it for everything that is not this program.
    pub reserve_bytes: u64,
    /// Rows of the widest pass.
    pub max_rows: usize,
    /// Drives: each needs a slot of its own.
    pub drives: u32,
    /// Threads that compute: each has working space of its own.
    pub threads: usize,
    /// Bytes of the latent cache that are resident at most; 0 = all of it.
    pub kv_ram_bytes: u64,
}

/// Memory for one context length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryFit {
    /// Tokens of text.
    pub context: usize,
    /// States, cache and working memory of the session.
    pub session: SessionBytes,
    /// Working space of the threads that compute.
    pub thread_bytes: u64,
    /// Slots that the widest barrier of a generated token needs.
    pub barrier_slots: u32,
    /// Their bytes: the slab without a cache.
    pub slab_bytes: u64,
    /// What is left with a BF16 trunk; negative = this much is missing.
    pub left_bf16_bytes: i64,
    /// Experts that it keeps.
    pub cached_bf16: u64,
    /// What is left with an int8 trunk.
    pub left_int8_bytes: i64,
    /// Experts that it keeps.
    pub cached_int8: u64,
}

impl MemoryFit {
    /// How `config` fits into memory with a text of at most `context` tokens.
    pub fn of(
        config: &ModelConfig,
        bytes: &ModelBytes,
        asked: &MemoryAsked,
        context: usize,
    ) -> Result<Self, KvTooSmall> {
        let plan = match asked.kv_ram_bytes {
            0 => None,
            bytes => KvPlan::of(config, 1, context, 0, bytes)?,
        };
        let session = SessionBytes::of(config, context, asked.max_rows.min(context)).with_kv(plan.as_ref());
        // The same functions that the check before a run asks.
        let thread_bytes = thread_bytes(config, asked.threads, Activations::F32);
        let barrier_slots = bytes.top_k.max(asked.drives).max(1);
        let slab_bytes = match bytes.expert_count {
            0 => 0,
            _ => u64::from(barrier_slots).saturating_mul(bytes.slot_bytes),
        };
        let left = |trunk: u64| {
            let taken = [trunk, session.total_bytes(), thread_bytes, slab_bytes, asked.reserve_bytes];
            let taken = taken.into_iter().fold(0u64, u64::saturating_add);
            i64::try_from(i128::from(asked.ram_bytes) - i128::from(taken)).unwrap_or(i64::MIN)
        };
        let kept = |left: i64| {
            let slots = u64::try_from(left).unwrap_or(0).checked_div(bytes.slot_bytes).unwrap_or(0);
            slots.min(bytes.expert_count)
        };
        let (left_bf16_bytes, left_int8_bytes) = (left(bytes.trunk_bf16_bytes), left(bytes.trunk_int8_bytes));
        Ok(Self {
            context,
            session,
            thread_bytes,
            barrier_slots,
            slab_bytes,
            left_bf16_bytes,
            cached_bf16: kept(left_bf16_bytes),
            left_int8_bytes,
            cached_int8: kept(left_int8_bytes),
        })
    }
}
