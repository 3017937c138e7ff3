//! Which experts follow which: for an expert of one layer, the experts that the same token went to one or more layers
//! later, with counts. Learnt by [`TableBuilder`], looked up by a guesser. Pure; the file form is in `table_file`.

use crate::ids::{ExpertId, LayerId};
use crate::source::guess::MAX_LOOKAHEAD;
use crate::trace::log::TraceError;

/// Experts of a layer that a table may speak of.
pub const MAX_EXPERTS: usize = 4096;
/// Layers that a table may speak of.
pub const MAX_LAYERS: usize = 1024;
/// Successors that a table may keep for one expert.
pub const MAX_SUCCESSORS: usize = 512;
/// Memory that counts may take while a table is learnt.
const MAX_COUNT_BYTES: usize = 2 << 30;

/// Why a table cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// Its file, with the line.
    #[error(transparent)]
    File(#[from] TraceError),
    /// It is about another model.
    #[error(
        "the prefetch table was learnt from model {seen}, this model is {expected}; learn one from traces of this \
         model with `argodrive trace learn`"
    )]
    OtherModel {
        /// Model of the table.
        seen: String,
        /// Model of the run.
        expected: String,
    },
    /// It does not fit the model, or cannot be made.
    #[error("{0}")]
    Shape(String),
}

/// What followed one expert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Followers {
    /// Times that the expert was picked and the later layer was seen.
    pub(super) total: u32,
    /// Experts of the later layer and how often they followed, most often first, equal ones by id.
    pub(super) next: Vec<(ExpertId, u32)>,
}

/// Followers by layer, distance and expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub(super) model_id: String,
    pub(super) layers: Vec<LayerId>,
    pub(super) depth: usize,
    pub(super) experts: usize,
    pub(super) successors: usize,
    /// `[layer][distance - 1][expert]`; shorter lists stand for experts never seen.
    pub(super) followers: Vec<Vec<Vec<Followers>>>,
}

impl Table {
    /// The model that it was learnt from.
    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    /// Farthest distance, in layers with experts.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Layers with experts.
    pub fn layers(&self) -> &[LayerId] {
        &self.layers
    }

    /// One more than the highest expert that it names.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Experts, over layers and distances, of which a follower is known.
    pub fn entries(&self) -> usize {
        self.followers.iter().flatten().flatten().filter(|f| f.total > 0).count()
    }

    /// An error unless it is about the model `model_id`, with these layers and at most so many experts.
    pub fn check_fits(&self, model_id: &str, layers: &[LayerId], experts: usize) -> Result<(), TableError> {
        if self.model_id != model_id {
            return Err(TableError::OtherModel { seen: self.model_id.clone(), expected: model_id.into() });
        }
        if self.layers != layers || self.experts > experts {
            return Err(TableError::Shape(format!(
                "the prefetch table is about {} layers with up to {} experts, the plan has {} layers with {experts}; \
                 learn one from traces of this model with `argodrive trace learn`",
                self.layers.len(),
                self.experts,
                layers.len()
            )));
        }
        Ok(())
    }

    /// Adds to `scores`, for each expert of the layer `ahead` behind layer number `at`, the sum over `picks` of the share
    /// of times that it followed the pick.
    pub(super) fn score(&self, at: usize, ahead: usize, picks: &[ExpertId], scores: &mut [f32]) {
        let Some(by_expert) = self.followers.get(at).and_then(|l| l.get(ahead - 1)) else { return };
        for f in picks.iter().filter_map(|p| by_expert.get(p.index())) {
            for (expert, count) in &f.next {
                scores[expert.index()] += *count as f32 / f.total as f32;
            }
        }
    }
}

/// Counts of one expert's followers.
#[derive(Clone, Default)]
struct Counts {
    total: u32,
    /// By expert of the later layer; grows to the highest one seen.
    next: Vec<u32>,
}

/// Counts what follows what.
pub struct TableBuilder {
    layers: Vec<LayerId>,
    depth: usize,
    counts: Vec<Vec<Vec<Counts>>>,
    bytes: usize,
}

impl TableBuilder {
    /// For `layers` (those with experts, ascending) and distances up to `depth`.
    pub fn new(layers: &[LayerId], depth: usize) -> Result<Self, TableError> {
        let shape = |text: String| Err(TableError::Shape(text));
        if layers.is_empty() || layers.len() > MAX_LAYERS || !layers.is_sorted_by(|a, b| a < b) {
            return shape(format!("a prefetch table has 1 to {MAX_LAYERS} layers in ascending order"));
        }
        if !(1..=MAX_LOOKAHEAD).contains(&depth) {
            return shape(format!("a prefetch table looks 1 to {MAX_LOOKAHEAD} layers ahead, not {depth}"));
        }
        let counts = vec![vec![Vec::new(); depth]; layers.len()];
        Ok(Self { layers: layers.to_vec(), depth, counts, bytes: 0 })
    }

    /// Distances that it counts.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// One token went to `from` in layer number `at` and to `to` in the layer `ahead` behind it.
    pub fn add(&mut self, at: usize, ahead: usize, from: &[ExpertId], to: &[ExpertId]) -> Result<(), TableError> {
        let width = to.iter().map(|e| e.index() + 1).max().unwrap_or(0);
        let highest = from.iter().map(|e| e.index() + 1).max().unwrap_or(0);
        if width.max(highest) > MAX_EXPERTS {
            return Err(TableError::Shape(format!("a prefetch table knows at most {MAX_EXPERTS} experts a layer")));
        }
        let by_expert = &mut self.counts[at][ahead - 1];
        if by_expert.len() < highest {
            by_expert.resize(highest, Counts::default());
        }
        for expert in from {
            let counts = &mut by_expert[expert.index()];
            counts.total = counts.total.saturating_add(1);
            if counts.next.len() < width {
                self.bytes += (width - counts.next.len()) * size_of::<u32>();
                counts.next.resize(width, 0);
            }
            for expert in to {
                let count = &mut counts.next[expert.index()];
                *count = count.saturating_add(1);
            }
        }
        if self.bytes > MAX_COUNT_BYTES {
            return Err(TableError::Shape("the counts of the table need over 2 GiB; use a smaller --depth".into()));
        }
        Ok(())
    }

    /// The table, with at most `successors` followers of each expert.
    pub fn finish(self, model_id: &str, successors: usize) -> Table {
        let mut experts = 0;
        let mut keep = |counts: Counts| {
            let mut next: Vec<(ExpertId, u32)> = counts
                .next
                .iter()
                .enumerate()
                .filter(|(_, n)| **n > 0)
                .map(|(expert, n)| (ExpertId(expert as u16), *n))
                .collect();
            next.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
            next.truncate(successors);
            experts = next.iter().map(|(e, _)| e.index() + 1).fold(experts, usize::max);
            Followers { total: counts.total, next }
        };
        let followers: Vec<Vec<Vec<Followers>>> = self
            .counts
            .into_iter()
            .map(|layer| layer.into_iter().map(|list| list.into_iter().map(&mut keep).collect()).collect())
            .collect();
        let longest = followers.iter().flatten().map(Vec::len).max().unwrap_or(0);
        let experts = experts.max(longest);
        Table { model_id: model_id.into(), layers: self.layers, depth: self.depth, experts, successors, followers }
    }
}
