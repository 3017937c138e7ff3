//! The KV tier: latent caches whose resident part is bounded. The oldest rows of a text go away in blocks of a fixed number of rows,
//! and attention takes them back block by block. Sizes, counters and who keeps the blocks; opens no file.

use super::error::DecodeError;
use super::latent::Latent;
use super::scratch::mla_values;
use crate::clock::Clock;
use crate::ids::LayerId;
use crate::model::config::{AttnKind, ModelConfig};
use crate::source::{BlockCounters, BlockStore};

/// Bytes that blocks begin at multiples of, on the drive and in the two buffers for those that come back.
pub const KV_ALIGN: u64 = 4096;
/// Rows of a block: the largest of these that leaves a ring of several.
const BLOCK_ROWS: [usize; 5] = [256, 128, 64, 32, 16];
/// Blocks that a ring should have, where memory allows.
const RING_BLOCKS: usize = 4;
/// Buffers for blocks that come back: one is used while the other is filled.
const BUFFERS: u64 = 2;
/// Most rows that go through the blocks together.
const GROUP_ROWS: usize = 64;
/// Scores of such rows that are held at once, unless one row has more.
const GROUP_SCORES: usize = 4 << 20;

/// Which rows of a text's latent caches stay in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheShape {
    /// All.
    #[default]
    Whole,
    /// The newest; the others are kept by a [`BlockStore`].
    Spilled(KvPlan),
    /// The last `rows`, and room for `ahead` rows that may be taken back; nothing looks at others.
    Window {
        /// Rows that a row looks at, its own included.
        rows: usize,
        /// Rows that may be taken back.
        ahead: usize,
    },
}

/// How latent caches of a model are cut so that no more than some bytes of them are resident.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvPlan {
    /// Rows of a block.
    pub block_rows: usize,
    /// Rows of a layer and text that are resident at most: whole blocks.
    pub ring_rows: usize,
    /// Blocks of a text in one layer at most.
    pub text_blocks: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Bytes that a block takes where it is kept.
    pub stored_bytes: u64,
    /// MLA layers of all lanes.
    pub caches: usize,
    /// Scores of the rows that go through blocks together.
    group_scores: usize,
    /// Values of their queries.
    group_query: usize,
}

/// `--kv-ram` is too small.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--kv-ram {asked}: {texts} and {layers} MLA layers need at least {least} bytes of it, a block of {rows} rows for each and two \
     buffers; give --kv-ram {least} or more, or leave it out"
)]
pub struct KvTooSmall {
    /// Bytes asked for.
    pub asked: u64,
    /// The least that works.
    pub least: u64,
    layers: usize,
    texts: String,
    rows: usize,
}

impl KvPlan {
    /// For `lanes` texts of at most `max_context` tokens, whose passes have up to `trial_rows` rows that may be taken back.
    /// `None` where `ram_bytes` hold whole caches.
    pub fn of(
        cfg: &ModelConfig,
        lanes: usize,
        max_context: usize,
        trial_rows: usize,
        ram_bytes: u64,
    ) -> Result<Option<Self>, KvTooSmall> {
        let layers = cfg.layers.iter().filter(|l| l.attn == AttnKind::Mla).count();
        let (row_bytes, lanes) = (4 * mla_values(cfg), lanes.max(1));
        let caches = layers.saturating_mul(lanes);
        let rows_bytes = |rows: usize| {
            [rows as u64, row_bytes as u64].into_iter().fold(caches as u64, |all, n| all.saturating_mul(n))
        };
        if rows_bytes(max_context) <= ram_bytes {
            return Ok(None);
        }
        let stored = |rows: usize| (rows as u64).saturating_mul(row_bytes as u64).next_multiple_of(KV_ALIGN);
        // rows that cannot leave: a block that is not full, and those that may be taken back
        let blocks_needed = |rows: usize| (rows - 1 + trial_rows.max(1)).div_ceil(rows);
        let blocks = |rows: usize| {
            let left = ram_bytes.saturating_sub(BUFFERS * stored(rows));
            usize::try_from(left / rows_bytes(rows).max(1)).unwrap_or(usize::MAX)
        };
        let with = |least: usize| BLOCK_ROWS.into_iter().find(|&r| blocks(r) >= blocks_needed(r).max(least));
        let Some(block_rows) = with(RING_BLOCKS).or_else(|| with(1)) else {
            let least = |&rows: &usize| BUFFERS * stored(rows) + rows_bytes(rows * blocks_needed(rows));
            let (least, rows) = BLOCK_ROWS.iter().map(|r| (least(r), *r)).min().unwrap_or_default();
            let texts = if lanes == 1 { "a text".into() } else { format!("{lanes} texts") };
            return Err(KvTooSmall { asked: ram_bytes, least, layers, texts, rows });
        };
        let ring_rows = blocks(block_rows).min(max_context.div_ceil(block_rows)) * block_rows;
        let heads = cfg.mla.heads;
        let row_scores = heads.saturating_mul(max_context);
        Ok(Some(Self {
            block_rows,
            ring_rows,
            text_blocks: max_context.div_ceil(block_rows),
            row_bytes,
            stored_bytes: stored(block_rows),
            caches,
            group_scores: row_scores.max(GROUP_SCORES.min(row_scores.saturating_mul(GROUP_ROWS))),
            group_query: GROUP_ROWS.min(ring_rows) * heads * mla_values(cfg),
        }))
    }

    /// Bytes of latent rows that are resident at most, with the buffers for blocks that come back.
    pub fn resident_bytes(&self) -> u64 {
        let rows = (self.ring_rows as u64).saturating_mul(self.row_bytes as u64).saturating_mul(self.caches as u64);
        rows.saturating_add(self.buffer_bytes())
    }

    /// Bytes of working memory that rows take which go through blocks together.
    pub fn working_bytes(&self) -> u64 {
        4 * (self.group_scores as u64).saturating_add(self.group_query as u64)
    }

    /// Blocks that all texts together have at most.
    pub fn blocks(&self) -> usize {
        self.caches.saturating_mul(self.text_blocks)
    }

    /// Bytes that texts of `tokens` tokens take at most where blocks are kept.
    pub fn spilled_bytes(&self, tokens: usize) -> u64 {
        let blocks = tokens / self.block_rows;
        (blocks as u64).saturating_mul(self.caches as u64).saturating_mul(self.stored_bytes)
    }

    /// Blocks that attention asks for at most while a text grows from `from` to `to` tokens, one row a pass.
    pub fn asked_blocks(&self, from: usize, to: usize) -> u64 {
        let spilled = |rows: usize| (rows / self.block_rows) as u64;
        let rows = to.saturating_sub(from) as u64;
        rows.saturating_mul(2 * spilled(to)).saturating_mul(self.caches as u64)
    }

    fn buffer_bytes(&self) -> u64 {
        BUFFERS * self.stored_bytes
    }
}

/// What latent caches took, and what became of rows that there was no room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCounters {
    /// Most bytes of latent rows that were resident, buffers for blocks that come back included.
    pub peak_bytes: u64,
    /// Rows that went away in blocks.
    pub spilled_rows: u64,
    /// Blocks that attention asked for.
    pub asked_blocks: u64,
    /// Time in which it waited for them.
    pub wait_ns: u64,
    /// Time in which it waited for blocks to be written.
    pub write_ns: u64,
    /// Rows that were dropped, because nothing looks back so far.
    pub dropped_rows: u64,
    /// Most rows that a row looked at.
    pub widest_seen: u64,
}

impl KvCounters {
    /// Time in which passes waited.
    pub fn stall_ns(&self) -> u64 {
        self.wait_ns + self.write_ns
    }
}

/// Blocks of latent rows while passes run: who keeps them, and working memory to go through them.
#[derive(Default)]
pub struct KvTier {
    store: Option<Box<dyn BlockStore>>,
    plan: Option<KvPlan>,
    row_bytes: u64,
    /// Queries in the space of the cache, `[rows, heads, kv_lora + rope]`.
    query: Vec<f32>,
    /// `[rows, heads, context]`
    scores: Vec<f32>,
    counters: KvCounters,
}

impl KvTier {
    /// For caches of this shape.
    pub(super) fn new(cfg: &ModelConfig, shape: CacheShape) -> Self {
        let plan = if let CacheShape::Spilled(plan) = shape { Some(plan) } else { None };
        let counters = KvCounters { peak_bytes: plan.map_or(0, |p| p.buffer_bytes()), ..KvCounters::default() };
        let values = |of: fn(&KvPlan) -> usize| vec![0.0; plan.as_ref().map_or(0, of)];
        let (query, scores) = (values(|p| p.group_query), values(|p| p.group_scores));
        Self { store: None, plan, row_bytes: 4 * mla_values(cfg) as u64, query, scores, counters }
    }

    /// How caches are cut; `None` where they are whole.
    pub fn plan(&self) -> Option<&KvPlan> {
        self.plan.as_ref()
    }

    /// Keeps blocks in `store`, which has room for [`KvPlan::blocks`].
    pub fn keep_in(&mut self, store: Box<dyn BlockStore>) {
        self.store = Some(store);
    }

    /// What was counted.
    pub fn counters(&self) -> KvCounters {
        self.counters
    }

    /// The kernel's numbers of the threads that read.
    pub fn threads(&self) -> Vec<u32> {
        self.store.as_ref().map(|s| s.threads()).unwrap_or_default()
    }

    /// Waits for blocks that are on their way: nothing else follows.
    pub fn settle(&mut self) {
        if let Some(store) = &mut self.store {
            store.settle();
        }
    }

    /// What was read; `None` where nothing keeps blocks.
    pub fn blocks(&self) -> Option<BlockCounters> {
        self.store.as_ref().map(|s| s.counters())
    }

    /// Makes room in `cache` for rows at `position`, of which `rows` are left, and says how many can come. Rows from `kept` on are
    /// not text yet and stay.
    pub(super) fn make_room(
        &mut self,
        cache: &mut Latent,
        (layer, clock): (LayerId, Clock),
        position: usize,
        rows: usize,
        kept: usize,
    ) -> Result<usize, DecodeError> {
        while let Some(leaving) = cache.leaving(position, rows, kept) {
            let start_ns = clock.now_ns();
            let store = self.store.as_mut().ok_or(DecodeError::NoBlockStore)?;
            let written = store.put(leaving.block, bytemuck::cast_slice(leaving.rows));
            written.map_err(|source| fault(layer, source))?;
            self.counters.write_ns += clock.now_ns() - start_ns;
            self.counters.spilled_rows += cache.block_rows() as u64;
            cache.left();
        }
        match cache.room(position, rows) {
            0 => Err(DecodeError::Config(format!("layer {layer}: no room for a row of the latent cache"))),
            room => Ok(room),
        }
    }

    /// The rows at `position`, of which `rows` are left, are the next to look back, and into `cache`: the block that they begin with
    /// may be on its way while other layers compute. Not where one must leave before, which is then what they begin with.
    pub(super) fn soon(
        &mut self,
        cache: &Latent,
        (layer, heads): (LayerId, usize),
        position: usize,
        rows: usize,
        kept: usize,
    ) -> Result<(), DecodeError> {
        let ((count, base), group) = (cache.spilled(), self.group(heads, position, rows));
        match &mut self.store {
            Some(store) if count > 0 && cache.leaving(position, group, kept).is_none() => {
                store.soon(base + count - 1).map_err(|source| fault(layer, source))
            }
            _ => Ok(()),
        }
    }

    /// Rows that may go through blocks together, of `rows` from `position` on.
    pub(super) fn group(&self, heads: usize, position: usize, rows: usize) -> usize {
        let Some(plan) = &self.plan else { return rows };
        let fit = |group: usize| heads * group * (position + group) <= self.scores.len();
        (1..=rows.min(GROUP_ROWS).min(plan.ring_rows)).rev().find(|group| fit(*group)).unwrap_or(1)
    }

    /// Rows that can be put together when nothing looks at them, of `rows`.
    pub(super) fn some_rows(&self, rows: usize) -> usize {
        self.plan.map_or(rows, |plan| rows.min(plan.block_rows))
    }

    /// Rows were put into a cache.
    pub(super) fn note(&mut self, (grown, dropped): (usize, usize)) {
        self.counters.peak_bytes += grown as u64 * self.row_bytes;
        self.counters.dropped_rows += dropped as u64;
    }

    /// A row looked at so many.
    pub(super) fn saw(&mut self, rows: usize) {
        self.counters.widest_seen = self.counters.widest_seen.max(rows as u64);
    }

    /// What goes through the blocks of `layer` in pass `step`: blocks, queries and scores.
    pub(super) fn reading(&mut self, step: u64, layer: LayerId, clock: Clock) -> (Blocks<'_>, &mut [f32], &mut [f32]) {
        let Self { store, query, scores, counters, .. } = self;
        if let Some(store) = store {
            store.reads_are_for(step, layer);
        }
        (Blocks { store: store.as_deref_mut(), counters, layer, clock }, query, scores)
    }

    /// Adds the rows of block `block` to `out`, which gets `bytes` of them.
    pub(super) fn copy(
        &self,
        layer: LayerId,
        block: usize,
        bytes: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), DecodeError> {
        let store = self.store.as_ref().ok_or(DecodeError::NoBlockStore)?;
        let from = out.len();
        out.resize(from + bytes, 0);
        store.copy(block, &mut out[from..]).map_err(|source| fault(layer, source))
    }
}

/// Blocks of one layer on their way back.
pub(super) struct Blocks<'a> {
    store: Option<&'a mut (dyn BlockStore + 'static)>,
    counters: &'a mut KvCounters,
    layer: LayerId,
    clock: Clock,
}

impl Blocks<'_> {
    /// `values` values of block `block`, while block `next` is on its way.
    pub(super) fn block(&mut self, block: usize, next: Option<usize>, values: usize) -> Result<&[f32], DecodeError> {
        let store = self.store.as_mut().ok_or(DecodeError::NoBlockStore)?;
        let asked_ns = self.clock.now_ns();
        let bytes = store.block(block, next);
        self.counters.wait_ns += self.clock.now_ns() - asked_ns;
        self.counters.asked_blocks += 1;
        let bytes = bytes.map_err(|source| fault(self.layer, source))?;
        Ok(bytemuck::cast_slice(&bytes[..values * size_of::<f32>()]))
    }
}

fn fault(layer: LayerId, source: crate::source::SourceError) -> DecodeError {
    DecodeError::Stream { what: format!("latent cache of layer {layer}"), source }
}
