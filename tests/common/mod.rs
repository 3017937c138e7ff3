//! Checkpoints in memory for decoder tests: read with the `safetensors` crate, independently of the importer, and
//! an expert source over their bytes whose arrival order and buffer size the test chooses.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::ids::{ExpertId, LayerId};
use argodrive::model::config::ModelConfig;
use argodrive::model::tensors::{DType, TEXT_PREFIX, expert_tensors};
use argodrive::source::{ExpertSource, Lease, LeaseOwner, SourceError, StepInfo};
use argodrive::store::trunk::Trunk;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A checkpoint in memory.
pub struct Checkpoint {
    pub config: ModelConfig,
    pub trunk: Arc<Trunk>,
    pub experts: Arc<Experts>,
}

/// All experts' bytes in slot order (w1, w2, w3, each packed then scale); slot = layer * experts + expert.
pub struct Experts {
    per_layer: usize,
    slots: Vec<Option<Vec<u8>>>,
}

/// What one source lends out.
struct Loans {
    experts: Arc<Experts>,
    on_loan: AtomicUsize,
}

impl LeaseOwner for Loans {
    fn bytes(&self, slot: u32, len: usize) -> &[u8] {
        &self.experts.slots[slot as usize].as_ref().unwrap()[..len]
    }

    fn release(&self, _slot: u32) {
        self.on_loan.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Experts {
    pub fn get(&self, layer: usize, expert: usize) -> &[u8] {
        self.slots[layer * self.per_layer + expert].as_ref().unwrap()
    }

    /// The same experts with one of them replaced.
    pub fn with(&self, layer: usize, expert: usize, bytes: Vec<u8>) -> Arc<Self> {
        let mut slots = self.slots.clone();
        slots[layer * self.per_layer + expert] = Some(bytes);
        Arc::new(Self { per_layer: self.per_layer, slots })
    }
}

/// Reads the single-file checkpoint in `folder` of the repository.
pub fn load(folder: &str) -> Checkpoint {
    let folder = repo(folder);
    let config = ModelConfig::parse(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
    let file = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let names: Vec<String> = tensors
        .names()
        .into_iter()
        .filter(|n| n.starts_with(TEXT_PREFIX) && !n.contains(".experts."))
        .map(str::to_string)
        .collect();
    let trunk = Trunk::from_tensors(names.iter().map(|full| {
        let t = tensors.tensor(full).unwrap();
        let dtype = match t.dtype() {
            safetensors::Dtype::BF16 => DType::BF16,
            safetensors::Dtype::F32 => DType::F32,
            other => panic!("{full} is {other:?}"),
        };
        let shape = t.shape().iter().map(|&d| d as u64).collect();
        (full[TEXT_PREFIX.len()..].to_string(), dtype, shape, t.data())
    }));
    let per_layer = config.moe.as_ref().map_or(0, |m| m.experts);
    let mut slots = vec![None; config.layers.len() * per_layer];
    for layer in config.moe_layers() {
        for expert in 0..per_layer {
            let planes = expert_tensors(&config, layer, expert).unwrap();
            let planes = planes.map(|p| tensors.tensor(&format!("{TEXT_PREFIX}{}", p.name)).unwrap().data());
            slots[layer * per_layer + expert] = Some(planes.concat());
        }
    }
    let experts = Arc::new(Experts { per_layer, slots });
    Checkpoint { config, trunk: Arc::new(trunk), experts }
}

/// The order in which experts arrive.
pub enum Order {
    Ascending,
    Descending,
    Shuffled(fastrand::Rng),
}

/// An expert source over a checkpoint in memory. With a buffer of `slots`, an expert is handed out only while fewer
/// than that many leases are held; a caller that holds on to its leases gets a timeout.
pub struct TestSource {
    loans: Arc<Loans>,
    pub order: Order,
    pub slots: usize,
    pub barriers: Vec<(StepInfo, LayerId, Vec<ExpertId>)>,
    open: Option<LayerId>,
    waiting: Vec<ExpertId>,
}

impl TestSource {
    pub fn new(experts: &Arc<Experts>) -> Self {
        let loans = Arc::new(Loans { experts: Arc::clone(experts), on_loan: AtomicUsize::new(0) });
        let (order, slots) = (Order::Ascending, usize::MAX);
        Self { loans, order, slots, barriers: Vec::new(), open: None, waiting: Vec::new() }
    }

    /// One more lease on an expert, whatever is waiting.
    pub fn lend(&self, layer: LayerId, expert: ExpertId) -> Lease {
        self.loans.on_loan.fetch_add(1, Ordering::Relaxed);
        let slot = layer.index() * self.loans.experts.per_layer + expert.index();
        let len = self.loans.experts.slots[slot].as_ref().unwrap().len() as u32;
        let owner: Arc<dyn LeaseOwner> = self.loans.clone();
        Lease::new(expert, owner, slot as u32, 0, len)
    }
}

impl ExpertSource for TestSource {
    fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        assert!(self.open.is_none(), "one barrier at a time");
        assert!(experts.windows(2).all(|w| w[0] < w[1]), "experts are distinct and ascending");
        self.open = Some(layer);
        self.barriers.push((*step, layer, experts.to_vec()));
        self.waiting.clear();
        self.waiting.extend_from_slice(experts);
        match &mut self.order {
            // taken from the end
            Order::Ascending => self.waiting.reverse(),
            Order::Descending => {}
            Order::Shuffled(rng) => rng.shuffle(&mut self.waiting),
        }
        Ok(())
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        let layer = self.open.expect("a barrier is open");
        let Some(expert) = self.waiting.pop() else { return Ok(None) };
        if self.loans.on_loan.load(Ordering::Relaxed) >= self.slots {
            return Err(SourceError::Timeout(format!("all {} slots are on loan", self.slots)));
        }
        Ok(Some(self.lend(layer, expert)))
    }

    fn at_hand(&self) -> usize {
        self.waiting.len().min(self.slots.saturating_sub(self.loans.on_loan.load(Ordering::Relaxed)))
    }

    fn close_barrier(&mut self) {
        assert!(self.open.take().is_some(), "a barrier was open");
        self.waiting.clear();
    }
}

/// A source for models without experts: any use fails.
pub struct NoExperts;

impl ExpertSource for NoExperts {
    fn open_barrier(&mut self, _: &StepInfo, layer: LayerId, _: &[ExpertId]) -> Result<(), SourceError> {
        Err(SourceError::Unknown(format!("a dense model asked for experts of {layer}")))
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        Err(SourceError::Unknown("no barrier is open".into()))
    }

    fn close_barrier(&mut self) {}
}

pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &v) in logits.iter().enumerate() {
        if v > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Panics unless `got` is within `tolerance` of the largest value of `want`, everywhere.
pub fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let worst = got
        .iter()
        .zip(want)
        .map(|(a, b)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() })
        .fold(0.0f32, f32::max);
    assert!(worst <= tolerance * largest, "{what}: off by {worst:e}, allowed {tolerance:e} of {largest}");
}
