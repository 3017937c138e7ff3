//! A checkpoint folder in the released layout: `config.json` and one `model.safetensors`, or shards with an index.
//! Opening reads headers only and checks that every tensor of the configuration is there exactly once with the right
//! type and shape. Reads bytes on request; knows nothing of stores and writes nothing.

use super::config::ModelConfig;
pub use super::safetensors::CheckpointError;
use super::safetensors::{HeaderTensor, is_lfs_pointer, read_header};
use super::tensors::{EXPERT_PLANES, TEXT_PREFIX, TensorSpec, VISION_PREFIXES, expert_tensors, trunk_tensors};
use crate::ids::{ExpertId, Extent, LayerId};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Name of a checkpoint's configuration.
pub const CONFIG_FILE: &str = "config.json";
/// Name of the file with the stop tokens.
pub const GENERATION_FILE: &str = "generation_config.json";
/// Name of a checkpoint's only shard when it has but one.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the index of a checkpoint in shards.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Largest configuration file accepted.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Most routed experts in all layers together (K3 has 82,432): bounds the table before it is allocated.
const MAX_EXPERTS: u64 = 1 << 20;
/// Shards kept open at a time.
const OPEN_SHARDS: usize = 8;

/// One safetensors file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// File name inside the checkpoint's folder.
    pub name: String,
    /// Size in bytes (of the target, when the file is a link).
    pub bytes: u64,
    /// Modification time in ns since 1970 (of the target).
    pub modified_ns: i64,
}

/// Where a tensor's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index into [`Checkpoint::shards`].
    pub shard: u32,
    /// Bytes of that file.
    pub extent: Extent,
}

impl Place {
    /// Whether a shard that holds the tensor has been seen (always, in a checkpoint that is complete).
    pub fn is_known(&self) -> bool {
        self.shard != NO_SHARD
    }
}

/// A trunk tensor with the shape that the file gives it, and its place.
#[derive(Clone, Debug)]
pub struct TrunkSource {
    /// Name without prefix, type, shape as stored.
    pub spec: TensorSpec,
    /// Where it is.
    pub place: Place,
}

/// A checkpoint whose headers have been read and checked.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) folder: PathBuf,
    pub(super) config: ModelConfig,
    pub(super) config_bytes: Vec<u8>,
    pub(super) stop_ids: Vec<u32>,
    pub(super) shards: Vec<Shard>,
    pub(super) trunk: Vec<TrunkSource>,
    pub(super) moe_layers: Vec<LayerId>,
    pub(super) planes: Vec<[Place; 6]>,
    pub(super) skipped_vision: u64,
}

impl Checkpoint {
    /// Opens and checks the checkpoint in `folder`.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let (config_path, config_bytes, config) = open_config(folder)?;
        let stop_ids = read_stop_ids(folder, &config)?;
        let mut table = Table::new(&config, &config_path)?;
        let shards = super::shards::find(folder, &mut table)?;
        for (index, shard) in shards.iter().enumerate() {
            let path = folder.join(&shard.name);
            let file = File::open(&path).map_err(CheckpointError::io(&path))?;
            for tensor in read_header(&file, &path)? {
                table.take(index as u32, &path, &shards, tensor)?;
            }
        }
        table.check_complete(folder, &shards)?;
        let trunk = table
            .trunk
            .into_iter()
            .zip(table.trunk_places)
            .map(|(spec, cell)| TrunkSource { spec, place: cell.place() })
            .collect();
        let planes = table.planes.iter().map(|cells| cells.map(Cell::place)).collect();
        let skipped_vision = table.vision;
        let moe_layers = table.moe_layers;
        let folder = folder.to_path_buf();
        Ok(Self { folder, config, config_bytes, stop_ids, shards, trunk, moe_layers, planes, skipped_vision })
    }

    /// The folder it was opened from.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// `config.json`, byte for byte.
    pub fn config_bytes(&self) -> &[u8] {
        &self.config_bytes
    }

    /// Tokens that end a text: `generation_config.json`'s, else the configuration's one.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Its files, in index order. Shards that hold vision tensors only are not among them.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Every trunk tensor, in the order of [`trunk_tensors`].
    pub fn trunk(&self) -> &[TrunkSource] {
        &self.trunk
    }

    /// Layers that hold routed experts, ascending.
    pub fn moe_layers(&self) -> &[LayerId] {
        &self.moe_layers
    }

    /// Routed experts per MoE layer.
    pub fn experts(&self) -> u32 {
        self.config.moe.as_ref().map_or(0, |m| m.experts as u32)
    }

    /// Bytes of one expert's six planes (0 for a dense model).
    pub fn expert_bytes(&self) -> u64 {
        self.config.moe.as_ref().map_or(0, |m| m.expert_bytes())
    }

    /// Places of an expert's six planes in slot order; `None` when the model has no such expert.
    pub fn planes(&self, layer: LayerId, expert: ExpertId) -> Option<&[Place; 6]> {
        let row = self.moe_layers.binary_search(&layer).ok()?;
        if u32::from(expert.0) >= self.experts() {
            return None;
        }
        self.planes.get(row * self.experts() as usize + expert.index())
    }

    /// Vision tensors that were left out.
    pub fn skipped_vision(&self) -> u64 {
        self.skipped_vision
    }

    /// Full path of a shard.
    pub fn shard_path(&self, shard: u32) -> PathBuf {
        self.folder.join(self.shards.get(shard as usize).map_or("", |s| s.name.as_str()))
    }

    /// A reader of tensor bytes.
    pub fn reader(&self) -> TensorReader<'_> {
        TensorReader { checkpoint: self, open: Vec::with_capacity(OPEN_SHARDS) }
    }
}

/// Positional reads of tensor bytes; keeps a few shards open.
pub struct TensorReader<'a> {
    checkpoint: &'a Checkpoint,
    open: Vec<(u32, File)>,
}

impl TensorReader<'_> {
    /// Fills `buffer` with the bytes of `place` from byte `skip` of the tensor.
    pub fn read(&mut self, place: &Place, skip: u64, buffer: &mut [u8]) -> Result<(), CheckpointError> {
        let path = self.checkpoint.shard_path(place.shard);
        let file = self.file(place.shard)?;
        file.read_exact_at(buffer, place.extent.offset + skip).map_err(CheckpointError::io(&path))
    }

    /// The open file of a shard.
    pub fn file(&mut self, shard: u32) -> Result<&File, CheckpointError> {
        let at = match self.open.iter().position(|(id, _)| *id == shard) {
            Some(at) => at,
            None => {
                let path = self.checkpoint.shard_path(shard);
                let file = File::open(&path).map_err(CheckpointError::io(&path))?;
                if self.open.len() == OPEN_SHARDS {
                    self.open.remove(0);
                }
                self.open.push((shard, file));
                self.open.len() - 1
            }
        };
        Ok(&self.open[at].1)
    }
}

/// Path, bytes and content of the `config.json` in `folder`.
pub(super) fn open_config(folder: &Path) -> Result<(PathBuf, Vec<u8>, ModelConfig), CheckpointError> {
    let path = folder.join(CONFIG_FILE);
    if !path.exists() {
        return Err(CheckpointError::NotACheckpoint {
            folder: folder.to_path_buf(),
            reason: format!("no {CONFIG_FILE} here; give the folder that holds it and the safetensors files"),
        });
    }
    let bytes = read_bounded(&path, MAX_CONFIG_BYTES)?;
    let config = parse_config(&path, &bytes)?;
    Ok((path, bytes, config))
}

/// Parses `config.json`, which must be text.
pub fn parse_config(path: &Path, bytes: &[u8]) -> Result<ModelConfig, CheckpointError> {
    let bad = |reason: String| CheckpointError::Config { path: path.to_path_buf(), reason };
    let text = std::str::from_utf8(bytes).map_err(|e| bad(format!("config.json is not text: {e}")))?;
    ModelConfig::parse(text).map_err(|e| bad(e.to_string()))
}

/// The stop tokens of a checkpoint or store folder: `eos_token_id` of `generation_config.json` (a number or a list)
/// if that file is there, else the configuration's.
pub fn read_stop_ids(folder: &Path, config: &ModelConfig) -> Result<Vec<u32>, CheckpointError> {
    let path = folder.join(GENERATION_FILE);
    if !path.exists() {
        return Ok(vec![config.eos_token_id]);
    }
    let bad = |reason: String| CheckpointError::Config { path: path.clone(), reason };
    let bytes = read_bounded(&path, MAX_CONFIG_BYTES)?;
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
    let eos = match value.get("eos_token_id") {
        None | Some(serde_json::Value::Null) => return Ok(vec![config.eos_token_id]),
        Some(eos) => eos,
    };
    let one = std::slice::from_ref(eos);
    let list = eos.as_array().map_or(one, Vec::as_slice);
    list.iter()
        .map(|id| {
            id.as_u64()
                .filter(|id| *id < config.vocab_size as u64)
                .map(|id| id as u32)
                .ok_or_else(|| bad(format!("eos_token_id {id} is no token of a vocabulary of {}", config.vocab_size)))
        })
        .collect()
}

/// Reads a whole small file; refuses one above `limit` and git-LFS pointers.
pub fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(CheckpointError::io(path))?;
    if bytes.len() as u64 > limit {
        let kind = std::io::ErrorKind::FileTooLarge;
        let source = std::io::Error::new(kind, format!("larger than the {limit} bytes that are accepted"));
        return Err(CheckpointError::Io { path: path.to_path_buf(), source });
    }
    if is_lfs_pointer(&bytes) {
        return Err(CheckpointError::LfsPointer { path: path.to_path_buf() });
    }
    Ok(bytes)
}

/// Size and age of a shard's target.
pub(super) fn stat_shard(folder: &Path, name: &str) -> std::io::Result<Shard> {
    let meta = std::fs::metadata(folder.join(name))?;
    let modified_ns = meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec());
    Ok(Shard { name: name.to_string(), bytes: meta.len(), modified_ns })
}

impl Checkpoint {
    /// Looks at the shards again; names the first that is not as it was when the checkpoint was opened.
    pub fn changed_shard(&self) -> Option<String> {
        self.shards
            .iter()
            .find(|shard| stat_shard(&self.folder, &shard.name).ok().as_ref() != Some(*shard))
            .map(|shard| shard.name.clone())
    }
}

/// What is known of one expected tensor while headers are read.
#[derive(Clone, Copy)]
pub(super) struct Cell {
    /// Shard that the index names, or [`NO_SHARD`].
    pub(super) shard: u32,
    found: bool,
    extent: Extent,
}

/// The index has not named the tensor (yet).
pub(super) const NO_SHARD: u32 = u32::MAX;

impl Cell {
    const EMPTY: Cell = Cell { shard: NO_SHARD, found: false, extent: Extent { offset: 0, len: 0 } };

    fn place(self) -> Place {
        Place { shard: self.shard, extent: self.extent }
    }

    /// The place, or one in no shard while no header has confirmed it.
    fn place_if_found(self) -> Place {
        if self.found { self.place() } else { Cell::EMPTY.place() }
    }
}

/// Every expected tensor, and what the index and the headers say about it.
pub(super) struct Table {
    trunk: Vec<TensorSpec>,
    trunk_places: Vec<Cell>,
    by_name: HashMap<String, usize>,
    moe_layers: Vec<LayerId>,
    experts: usize,
    plane_specs: Option<[TensorSpec; 6]>,
    planes: Vec<[Cell; 6]>,
    vision: u64,
    /// An index has been read: only what it names counts.
    pub(super) indexed: bool,
}

/// What a tensor name stands for.
pub(super) enum Slot {
    Trunk(usize),
    Plane(usize, usize),
    Vision,
}

impl Table {
    pub(super) fn new(config: &ModelConfig, config_path: &Path) -> Result<Self, CheckpointError> {
        let moe_layers: Vec<LayerId> = config.moe_layers().map(|l| LayerId(l as u16)).collect();
        let experts = config.moe.as_ref().map_or(0, |m| m.experts);
        let total = moe_layers.len() as u64 * experts as u64;
        if total > MAX_EXPERTS {
            let reason = format!("{total} routed experts; at most {MAX_EXPERTS} are supported");
            return Err(CheckpointError::Config { path: config_path.to_path_buf(), reason });
        }
        let trunk = trunk_tensors(config);
        let by_name = trunk.iter().enumerate().map(|(i, spec)| (spec.name.clone(), i)).collect();
        Ok(Self {
            trunk_places: vec![Cell::EMPTY; trunk.len()],
            trunk,
            by_name,
            plane_specs: expert_tensors(config, 0, 0),
            planes: vec![[Cell::EMPTY; 6]; total as usize],
            moe_layers,
            experts,
            vision: 0,
            indexed: false,
        })
    }

    /// What `full_name` stands for; `None` for a tensor that this model does not have.
    pub(super) fn resolve(&self, full_name: &str) -> Option<Slot> {
        if VISION_PREFIXES.iter().any(|p| full_name.starts_with(p)) {
            return Some(Slot::Vision);
        }
        let name = full_name.strip_prefix(TEXT_PREFIX)?;
        if let Some(&index) = self.by_name.get(name) {
            return Some(Slot::Trunk(index));
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (expert, plane) = rest.strip_prefix("block_sparse_moe.experts.")?.split_once('.')?;
        let row = self.moe_layers.binary_search(&LayerId(canonical(layer)?)).ok()?;
        let expert = usize::from(canonical(expert)?);
        let plane = EXPERT_PLANES.iter().position(|p| *p == plane)?;
        (expert < self.experts).then_some(Slot::Plane(row * self.experts + expert, plane))
    }

    /// The cell of a text tensor.
    pub(super) fn cell(&mut self, slot: &Slot) -> Option<&mut Cell> {
        match *slot {
            Slot::Trunk(index) => self.trunk_places.get_mut(index),
            Slot::Plane(expert, plane) => self.planes.get_mut(expert)?.get_mut(plane),
            Slot::Vision => None,
        }
    }

    /// Every cell.
    pub(super) fn cells_mut(&mut self) -> impl Iterator<Item = &mut Cell> {
        self.trunk_places.iter_mut().chain(self.planes.iter_mut().flatten())
    }

    /// Trunk and planes as far as headers have confirmed them.
    pub(super) fn known(&self) -> (Vec<TrunkSource>, Vec<[Place; 6]>, u64) {
        let sources = self.trunk.iter().cloned().zip(&self.trunk_places);
        let trunk = sources.map(|(spec, cell)| TrunkSource { spec, place: cell.place_if_found() }).collect();
        (trunk, self.planes.iter().map(|cells| cells.map(Cell::place_if_found)).collect(), self.vision)
    }

    /// Layers with experts, ascending.
    pub(super) fn moe_layers(&self) -> &[LayerId] {
        &self.moe_layers
    }

    /// Names of the tensors of which no header has been seen, at most `most`, without prefix.
    pub(super) fn unseen(&self, most: usize) -> Vec<String> {
        let trunk = self.trunk.iter().zip(&self.trunk_places).filter(|(_, c)| !c.found).map(|(s, _)| s.name.clone());
        let planes = self.planes.iter().enumerate().filter(|(_, cells)| cells.iter().any(|c| !c.found));
        let experts = self.experts.max(1);
        let planes = planes.map(|(i, _)| {
            format!("model.layers.{}.block_sparse_moe.experts.{}", self.moe_layers[i / experts].0, i % experts)
        });
        trunk.chain(planes).take(most).collect()
    }

    /// Counts vision tensors of a shard that need not be opened.
    pub(super) fn skip_vision(&mut self, tensors: u64) {
        self.vision += tensors;
    }

    pub(super) fn take(
        &mut self,
        shard: u32,
        path: &Path,
        shards: &[Shard],
        tensor: HeaderTensor,
    ) -> Result<(), CheckpointError> {
        let bad = |reason: String| Err(CheckpointError::tensor(path, &tensor.name, reason));
        let slot = match self.resolve(&tensor.name) {
            None => return bad("this model's configuration has no such tensor".into()),
            Some(Slot::Vision) => {
                self.vision += 1;
                return Ok(());
            }
            Some(slot) => slot,
        };
        let spec = match slot {
            Slot::Trunk(index) => self.trunk.get(index),
            Slot::Plane(_, plane) => self.plane_specs.as_ref().and_then(|specs| specs.get(plane)),
            Slot::Vision => None,
        };
        if let Some(spec) = spec {
            if tensor.dtype != spec.dtype.name() {
                return bad(format!("its type is {}, expected {}", tensor.dtype, spec.dtype.name()));
            }
            if !spec.accepts(&tensor.shape) {
                return bad(format!("its shape is {:?}, the configuration asks for {:?}", tensor.shape, spec.shape));
            }
        }
        let indexed = self.indexed;
        if let Some(cell) = self.cell(&slot) {
            let other = || shards.get(cell.shard as usize).map_or("no shard", |s| s.name.as_str());
            if cell.found {
                return bad(format!("is also in {}", other()));
            }
            if indexed && cell.shard != shard {
                return bad(format!("{INDEX_FILE} says that it is in {}", other()));
            }
            *cell = Cell { shard, found: true, extent: tensor.extent };
        }
        if let Slot::Trunk(index) = slot {
            self.trunk[index].shape = tensor.shape;
        }
        Ok(())
    }

    fn check_complete(&self, folder: &Path, shards: &[Shard]) -> Result<(), CheckpointError> {
        let missing = |name: String, cell: &Cell| {
            let name = format!("{TEXT_PREFIX}{name}");
            Err(match shards.get(cell.shard as usize) {
                Some(shard) => {
                    let reason = format!("{INDEX_FILE} names it in this shard, which does not hold it");
                    CheckpointError::tensor(&folder.join(&shard.name), &name, reason)
                }
                None => CheckpointError::tensor(folder, &name, "missing: no safetensors file holds it"),
            })
        };
        for (spec, cell) in self.trunk.iter().zip(&self.trunk_places) {
            if !cell.found {
                return missing(spec.name.clone(), cell);
            }
        }
        for (index, cells) in self.planes.iter().enumerate() {
            if let Some(plane) = cells.iter().position(|c| !c.found) {
                let (layer, expert) = (self.moe_layers[index / self.experts], index % self.experts);
                let suffix = EXPERT_PLANES[plane];
                let name = format!("model.layers.{}.block_sparse_moe.experts.{expert}.{suffix}", layer.0);
                return missing(name, &cells[plane]);
            }
        }
        Ok(())
    }
}

/// A decimal number without sign or leading zeros.
fn canonical(text: &str) -> Option<u16> {
    let plain = text == "0" || (!text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit()));
    if plain { text.parse().ok() } else { None }
}
