//! Working memory of a pass and the state that a timeline carries. Buffers grow before a pass to what its rows need
//! and are reused; nothing is allocated while a pass runs. What must outlive a step of a layer is kept for every row of
//! the pass; what a step needs for itself only for [`BLOCK_ROWS`] of them, so that a whole prompt can be one pass.

pub(super) use super::kernels::PART_ROWS;
use super::kernels::WIDE_ROWS;
use super::kernels::pool::MAX_THREADS;
use super::kv::CacheShape;
use super::latent::Latent;
use crate::ids::ExpertId;
use crate::model::config::{AttnKind, ModelConfig};
use std::ops::Range;

/// Rows that a step of a layer works on at a time. A row's bits do not depend on it.
pub(super) const BLOCK_ROWS: usize = 256;

/// Rows that are worth another thread's attention in steps that do little with a row.
pub(super) const GRAIN_ROWS: usize = 16;

/// Most experts that are taken together.
pub(super) const LOT_EXPERTS: usize = 16;

/// Parts of experts' rows for each thread up to which experts at hand are taken together: few, so that drives are looked
/// after in between.
pub(super) const LOT_PARTS: usize = 4;

/// First row and length of each block of `rows` rows.
pub(super) fn blocks(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(BLOCK_ROWS).map(move |first| (first, BLOCK_ROWS.min(rows - first)))
}

/// What one layer remembers between passes.
pub(super) enum State {
    Kda(KdaState),
    /// Normalised latent and shared key part per token.
    Mla(Latent),
}

/// The recurrent state of a KDA layer.
pub(super) struct KdaState {
    /// `[heads, key, value]`
    pub(super) s: Vec<f32>,
    /// The last inputs of the q, k and v convolutions, `[kernel - 1, heads * dim]`, oldest first.
    pub(super) conv: [Vec<f32>; 3],
}

/// Numbers in a KDA layer's recurrent state.
pub(super) fn kda_values(cfg: &ModelConfig) -> usize {
    cfg.kda.heads * cfg.kda.head_dim * cfg.kda.head_dim
}

/// Numbers in the history of one of a KDA layer's three convolutions.
pub(super) fn history_values(cfg: &ModelConfig) -> usize {
    (cfg.kda.conv_kernel - 1) * cfg.kda.heads * cfg.kda.head_dim
}

/// Numbers that an MLA layer keeps of one token.
pub(super) fn mla_values(cfg: &ModelConfig) -> usize {
    cfg.mla.kv_lora_rank + cfg.mla.qk_rope_head_dim
}

impl State {
    /// Empty states of all layers of a text in lane `lane`.
    pub(super) fn empty(cfg: &ModelConfig, max_context: usize, shape: CacheShape, lane: usize) -> Vec<State> {
        let history = || vec![0.0; history_values(cfg)];
        let caches = cfg.layers.iter().filter(|l| l.attn == AttnKind::Mla).count();
        let mut index = lane * caches;
        let mut state = |kind: AttnKind| match kind {
            AttnKind::Kda => {
                State::Kda(KdaState { s: vec![0.0; kda_values(cfg)], conv: [history(), history(), history()] })
            }
            AttnKind::Mla => {
                index += 1;
                State::Mla(Latent::new(mla_values(cfg), max_context, shape, index - 1))
            }
        };
        cfg.layers.iter().map(|l| state(l.attn)).collect()
    }

    /// Forgets everything.
    pub(super) fn reset(&mut self) {
        match self {
            State::Kda(kda) => {
                kda.s.fill(0.0);
                kda.conv.iter_mut().for_each(|c| c.fill(0.0));
            }
            State::Mla(cache) => cache.reset(),
        }
    }
}

/// Columns of the widest matrix that a pass multiplies with.
pub(super) fn widest(cfg: &ModelConfig) -> usize {
    let (kda, m) = (&cfg.kda, &cfg.mla);
    let all = [
        cfg.hidden_size,
        kda.heads * kda.head_dim,
        kda.head_dim,
        m.q_lora_rank,
        mla_values(cfg),
        m.heads * m.v_head_dim,
        cfg.intermediate_size,
    ];
    let moe = cfg.moe.iter().flat_map(|e| [e.shared_experts * e.width, e.width, e.latent]);
    all.into_iter().chain(moe).max().unwrap_or(0)
}

/// Working memory of the KDA layers.
#[derive(Default)]
pub(super) struct KdaScratch {
    /// History and new inputs of one convolution of one lane.
    pub(super) u: Vec<f32>,
    pub(super) qkv: [Vec<f32>; 3],
    pub(super) inner: Vec<f32>,
    pub(super) decay: Vec<f32>,
    pub(super) beta: Vec<f32>,
    pub(super) gate: Vec<f32>,
    pub(super) o: Vec<f32>,
}

/// Working memory of the MLA layers.
#[derive(Default)]
pub(super) struct MlaScratch {
    pub(super) qa: Vec<f32>,
    pub(super) q: Vec<f32>,
    /// What the caches will hold of the block's rows, `[block, kv_lora + rope]`.
    pub(super) new: Vec<f32>,
    /// One row's queries in the space of the cache, `[heads, kv_lora + rope]`.
    pub(super) query: Vec<f32>,
    /// `[heads, context]`
    pub(super) scores: Vec<f32>,
    pub(super) latent: Vec<f32>,
    pub(super) gate: Vec<f32>,
    pub(super) o: Vec<f32>,
}

/// Working memory of dense and shared MLPs.
#[derive(Default)]
pub(super) struct MlpScratch {
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
}

/// Working memory of the routed experts.
#[derive(Default)]
pub(super) struct MoeScratch {
    /// `[block, experts]`
    pub(super) scores: Vec<f32>,
    /// `[rows, top_k]` in order of choice.
    pub(super) ids: Vec<ExpertId>,
    pub(super) weights: Vec<f32>,
    /// First slot of each expert; one more than there are experts.
    pub(super) first: Vec<usize>,
    /// Next free slot of each expert while slots are handed out.
    pub(super) next: Vec<usize>,
    pub(super) done: Vec<bool>,
    /// The distinct experts of the pass, ascending.
    pub(super) distinct: Vec<ExpertId>,
    /// Row and weight of each slot; slots are ordered by expert, then row.
    pub(super) slot_row: Vec<usize>,
    pub(super) slot_weight: Vec<f32>,
    /// Slots of each row, ascending, `[rows, top_k]`; and how many it has so far while they are handed out.
    pub(super) row_slots: Vec<usize>,
    pub(super) row_next: Vec<u16>,
    /// `[slots, latent]`
    pub(super) slot_out: Vec<f32>,
    pub(super) z: Vec<f32>,
    pub(super) gathered: Vec<f32>,
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
    /// Rows of a part of `gathered`, `gate` and `up` when threads share rows.
    pub(super) part_rows: usize,
    /// Which expert of a lot takes which slots.
    pub(super) spans: Vec<(usize, Range<usize>)>,
    pub(super) sum: Vec<f32>,
    pub(super) raised: Vec<f32>,
}

/// All working memory of a pass.
#[derive(Default)]
pub(super) struct Scratch {
    rows: usize,
    pub(super) stream: Vec<f32>,
    pub(super) bank: Vec<Vec<f32>>,
    pub(super) mix: Vec<f32>,
    pub(super) mix_weights: Vec<f32>,
    pub(super) normed: Vec<f32>,
    pub(super) out: Vec<f32>,
    pub(super) wide: Vec<f32>,
    pub(super) kda: KdaScratch,
    pub(super) mla: MlaScratch,
    pub(super) mlp: MlpScratch,
    pub(super) moe: MoeScratch,
}

/// What is done about the size of a buffer.
enum Room<'a> {
    /// It grows to it.
    Make,
    /// Its bytes are added up, and nothing is allocated.
    Count(&'a mut u64),
}

impl Room<'_> {
    fn set<T: Clone + Default>(&mut self, v: &mut Vec<T>, n: usize) {
        self.fill(v, n, T::default());
    }

    fn fill<T: Clone>(&mut self, v: &mut Vec<T>, n: usize, with: T) {
        match self {
            Room::Make => v.resize(n, with),
            Room::Count(bytes) => **bytes = bytes.saturating_add((n as u64).saturating_mul(size_of::<T>() as u64)),
        }
    }

    /// For a buffer that a pass fills with up to `n` values.
    fn hold<T>(&mut self, v: &mut Vec<T>, n: usize) {
        match self {
            Room::Make => v.reserve_exact(n.saturating_sub(v.len())),
            Room::Count(bytes) => **bytes = bytes.saturating_add((n as u64).saturating_mul(size_of::<T>() as u64)),
        }
    }

    /// For a buffer whose memory is to be taken only as it is written: fresh zeroed pages.
    fn fresh(&mut self, v: &mut Vec<f32>, n: usize) {
        match self {
            Room::Make if v.is_empty() => *v = vec![0.0; n],
            Room::Make => {}
            Room::Count(_) => self.set(v, n),
        }
    }
}

impl Scratch {
    /// Makes room for passes of up to `rows` rows.
    pub(super) fn reserve(&mut self, cfg: &ModelConfig, rows: usize, max_context: usize) {
        if rows <= self.rows {
            return;
        }
        self.rows = rows;
        self.size(cfg, rows, max_context, &mut Room::Make);
    }

    /// Columns of the widest matrix that a pass multiplies with.
    pub(super) fn widest(&self) -> usize {
        self.wide.len() / WIDE_ROWS
    }

    /// Bytes that [`Scratch::reserve`] takes for passes of `rows` rows.
    pub(super) fn bytes(cfg: &ModelConfig, rows: usize, max_context: usize) -> u64 {
        let mut bytes = 0;
        Scratch::default().size(cfg, rows, max_context, &mut Room::Count(&mut bytes));
        bytes
    }

    fn size(&mut self, cfg: &ModelConfig, rows: usize, max_context: usize, room: &mut Room<'_>) {
        let h = cfg.hidden_size;
        for v in [&mut self.stream, &mut self.mix, &mut self.normed, &mut self.out] {
            room.set(v, rows * h);
        }
        self.bank.resize_with(cfg.layers.len().div_ceil(cfg.attn_res_block_size), Vec::new);
        self.bank.iter_mut().for_each(|b| room.set(b, rows * h));
        let blocks = self.bank.len();
        room.set(&mut self.mix_weights, rows * (blocks + 1));
        let block = rows.min(BLOCK_ROWS);
        let (nh, d) = (cfg.kda.heads, cfg.kda.head_dim);
        let p = nh * d;
        room.set(&mut self.kda.u, (block + cfg.kda.conv_kernel - 1) * p);
        for i in 0..3 {
            room.set(&mut self.kda.qkv[i], block * p);
        }
        room.set(&mut self.kda.inner, block * d);
        room.set(&mut self.kda.beta, block * nh);
        for v in [&mut self.kda.decay, &mut self.kda.gate, &mut self.kda.o] {
            room.set(v, block * p);
        }
        let m = &cfg.mla;
        let cached = mla_values(cfg);
        room.set(&mut self.mla.qa, block * m.q_lora_rank);
        room.set(&mut self.mla.q, block * m.heads * (m.qk_nope_head_dim + m.qk_rope_head_dim));
        room.set(&mut self.mla.new, block * cached);
        room.set(&mut self.mla.query, m.heads * cached);
        room.fresh(&mut self.mla.scores, m.heads * max_context);
        room.set(&mut self.mla.latent, block * m.heads * m.kv_lora_rank);
        room.set(&mut self.mla.gate, block * m.heads * m.v_head_dim);
        room.set(&mut self.mla.o, block * m.heads * m.v_head_dim);
        let shared = cfg.moe.as_ref().map_or(0, |e| e.shared_experts * e.width);
        room.set(&mut self.mlp.gate, block * cfg.intermediate_size.max(shared));
        room.set(&mut self.mlp.up, block * cfg.intermediate_size.max(shared));
        if let Some(e) = &cfg.moe {
            let (s, slots) = (&mut self.moe, rows * e.top_k);
            room.set(&mut s.scores, block * e.experts);
            room.fill(&mut s.ids, slots, ExpertId(0));
            room.set(&mut s.weights, slots);
            room.set(&mut s.first, e.experts + 1);
            room.set(&mut s.next, e.experts);
            room.set(&mut s.done, e.experts);
            room.hold(&mut s.distinct, e.experts);
            room.set(&mut s.slot_row, slots);
            room.set(&mut s.slot_weight, slots);
            room.set(&mut s.row_slots, slots);
            room.set(&mut s.row_next, rows);
            room.set(&mut s.slot_out, slots * e.latent);
            s.part_rows = block.min(PART_ROWS);
            // A block of one expert's rows, or a part for each expert that is taken together.
            let expert_rows = block.next_multiple_of(s.part_rows).max(LOT_EXPERTS * s.part_rows);
            room.set(&mut s.gate, expert_rows * e.width);
            room.set(&mut s.up, expert_rows * e.width);
            room.set(&mut s.gathered, expert_rows * e.latent);
            room.set(&mut s.z, rows * e.latent);
            room.set(&mut s.sum, block * e.latent);
            room.set(&mut s.raised, block * h);
            room.hold(&mut s.spans, LOT_PARTS * MAX_THREADS + LOT_EXPERTS + rows.div_ceil(PART_ROWS));
        }
        room.set(&mut self.wide, WIDE_ROWS * widest(cfg));
    }
}
