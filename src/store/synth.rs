//! A random but valid checkpoint in the released layout, of any size: for trying drives and imports without the real
//! weights. Streams in bounded memory; the same options give the same bytes. `config.json` is written last, so that a
//! folder left by a killed run is not taken for a checkpoint.

use super::import::Progress;
use super::synth_config;
use super::synth_routing::{Routed, Routing};
use super::synth_values::Values;
use super::trunk::byte_len;
use crate::model::checkpoint::{CONFIG_FILE, GENERATION_FILE, INDEX_FILE, SINGLE_FILE};
use crate::model::config::{ConfigError, ModelConfig};
use crate::model::tensors::{TEXT_PREFIX, TensorSpec, expert_tensors, trunk_tensors};
use crate::sys::{cache, durable, space};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Bytes generated at a time; a multiple of 8.
const CHUNK_BYTES: usize = 4 << 20;
/// Most shards.
const MAX_SHARDS: u64 = 4096;

/// Most routed experts in all layers together (K3 has 82,432): the list of tensors is held in memory.
const MAX_EXPERTS: u64 = 1 << 18;

/// Why no checkpoint was written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// An option cannot be.
    #[error("{flag}: {reason}")]
    Option {
        /// The flag to change.
        flag: &'static str,
        /// Why.
        reason: String,
    },
    /// The options together make no valid configuration.
    #[error("these options make no valid model: {0}")]
    Config(#[from] ConfigError),
    /// The folder is not empty.
    #[error("{}: not empty; give a new folder", path.display())]
    NotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// There is not enough room.
    #[error("{}: not enough free space: needs {needs} bytes, has {has}; ask for fewer --layers or --experts, or another folder", path.display())]
    NoSpace {
        /// The folder.
        path: PathBuf,
        /// Bytes to be written.
        needs: u64,
        /// Bytes free.
        has: u64,
    },
    /// A file could not be written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// How a synthetic checkpoint is cut into files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shards {
    /// One per layer and one for the rest, as the release has it.
    PerLayer,
    /// This many, about equally large; 1 is `model.safetensors` without an index.
    Count(u64),
}

/// Geometry and seed of a synthetic checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SynthOptions {
    /// Decoder layers; the first is dense.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Attention heads, KDA and MLA.
    pub heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Routed experts per layer.
    pub experts: u64,
    /// Experts per token.
    pub top_k: u64,
    /// Shared experts.
    pub shared: u64,
    /// Width in which routed experts live.
    pub latent: u64,
    /// Inner width of an expert.
    pub width: u64,
    /// Vocabulary, 256 special tokens included.
    pub vocab: u64,
    /// How it is cut into files.
    pub shards: Shards,
    /// Seed of every value.
    pub seed: u64,
}

impl SynthOptions {
    /// A model of a few megabytes whose planes are whole pages.
    pub fn small() -> Self {
        Self {
            layers: 4,
            hidden: 128,
            heads: 4,
            head_dim: 32,
            experts: 16,
            top_k: 4,
            shared: 1,
            latent: 256,
            width: 512,
            vocab: 512,
            shards: Shards::PerLayer,
            seed: 1,
        }
    }

    /// Experts as large as K3's (17,547,264 bytes each), about 4 GiB of them, and everything else small.
    pub fn k3_experts() -> Self {
        Self { layers: 3, experts: 123, latent: 3584, width: 3072, ..Self::small() }
    }

    /// K3's shape in small: 2.8 GB of experts, of which a token asks for 50 MB.
    pub fn k3_shaped() -> Self {
        Self {
            layers: 16,
            hidden: 1024,
            heads: 8,
            head_dim: 128,
            experts: 448,
            top_k: 8,
            latent: 512,
            width: 512,
            vocab: 4096,
            ..Self::small()
        }
    }

    fn check(&self) -> Result<(), SynthError> {
        let refuse = |flag, reason: &str| Err(SynthError::Option { flag, reason: reason.into() });
        if self.vocab < 512 || self.vocab > (1 << 23) {
            return refuse("--vocab", "must be from 512 (256 bytes and 256 special tokens) to 8388608");
        }
        if self.hidden == 0 || self.hidden > 1 << 16 || self.head_dim == 0 || self.head_dim > 1 << 12 {
            return refuse("--hidden, --head-dim", "must be from 1 to 65536 and from 1 to 4096");
        }
        if self.layers == 0 || self.layers > 4096 {
            return refuse("--layers", "must be from 1 to 4096");
        }
        if self.experts == 0 {
            return refuse("--experts", "must be at least 1: a model without experts has nothing to place");
        }
        if self.top_k == 0 || self.top_k > self.experts {
            return refuse("--top-k", "must be from 1 to --experts");
        }
        if self.heads == 0 || self.heads > 4096 {
            return refuse("--heads", "must be from 1 to 4096");
        }
        if self.layers.saturating_mul(self.experts) > MAX_EXPERTS {
            return refuse("--layers, --experts", "more than 262144 experts in all layers together");
        }
        if let Shards::Count(n) = self.shards
            && (n == 0 || n > MAX_SHARDS)
        {
            return refuse("--shards", "must be per-layer or from 1 to 4096");
        }
        Ok(())
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynthReport {
    /// Files with tensors.
    pub shards: u64,
    /// Tensors.
    pub tensors: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Routed experts in all layers.
    pub experts: u64,
    /// Bytes of one of them.
    pub expert_bytes: u64,
}

/// Writes a synthetic checkpoint into the new or empty folder `folder`.
pub fn synth(
    folder: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<SynthReport, SynthError> {
    synth_routed(folder, options, None, progress)
}

impl SynthOptions {
    /// The configuration that these options give.
    pub fn config(&self) -> Result<ModelConfig, SynthError> {
        self.check()?;
        Ok(ModelConfig::parse(&synth_config::config(self).to_string())?)
    }
}

/// The same with routers that choose as `routing` asks.
pub fn synth_routed(
    folder: &Path,
    options: &SynthOptions,
    routing: Option<&Routing>,
    progress: &mut dyn FnMut(Progress),
) -> Result<SynthReport, SynthError> {
    let config = options.config()?;
    let config_json = synth_config::config(options);
    let shards = cut(&config, options.shards)?;
    let tensors: u64 = shards.iter().map(|s| s.len() as u64).sum();
    let tensor_bytes: u64 = shards.iter().flatten().map(size).sum();
    let routed = routing.map(|r| Routed::build(&config, options.seed, r)).transpose();
    let routed = routed.map_err(|reason| SynthError::Option { flag: "--skew, --heat, --routes", reason })?;
    let is_new = !folder.exists();
    std::fs::create_dir_all(folder).map_err(|e| io(folder, e))?;
    if std::fs::read_dir(folder).map_err(|e| io(folder, e))?.next().is_some() {
        return Err(SynthError::NotEmpty { path: folder.to_path_buf() });
    }
    let has = space::free_bytes(folder).map_err(|e| io(folder, e))?;
    let needs = tensor_bytes + tensors * 256;
    if needs > has {
        if is_new {
            // it is empty; what does not go away does no harm
            let _ = std::fs::remove_dir(folder);
        }
        return Err(SynthError::NoSpace { path: folder.to_path_buf(), needs, has });
    }
    let mut at = Progress { done_bytes: 0, total_bytes: tensor_bytes };
    let mut buffer = vec![0u8; CHUNK_BYTES];
    let mut weight_map = serde_json::Map::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = shard_name(index, shards.len());
        for spec in shard {
            weight_map.insert(format!("{TEXT_PREFIX}{}", spec.name), name.as_str().into());
        }
        let path = folder.join(&name);
        let values = |spec: &TensorSpec| {
            let made = routed.as_ref().and_then(|r| r.values(options.seed, &config, spec));
            made.unwrap_or_else(|| Values::of(options.seed, &config, spec))
        };
        write_shard(&path, shard, &values, &mut buffer, &mut |bytes| {
            at.done_bytes += bytes;
            progress(at);
        })
        .map_err(|e| io(&path, e))?;
    }
    let save = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        durable::write_atomic(&path, bytes).map_err(|e| io(&path, e))
    };
    if shards.len() > 1 {
        let index = serde_json::json!({"metadata": {"total_size": tensor_bytes}, "weight_map": weight_map});
        save(INDEX_FILE, index.to_string().as_bytes())?;
    }
    save("tiktoken.model", synth_config::tiktoken(options).as_bytes())?;
    save("tokenizer_config.json", format!("{:#}", synth_config::tokenizer_config(options)).as_bytes())?;
    save(GENERATION_FILE, format!("{:#}", synth_config::generation(options)).as_bytes())?;
    save(CONFIG_FILE, format!("{config_json:#}").as_bytes())?;
    let moe = config.moe.as_ref();
    Ok(SynthReport {
        shards: shards.len() as u64,
        tensors,
        tensor_bytes,
        experts: config.moe_layers().count() as u64 * moe.map_or(0, |m| m.experts as u64),
        expert_bytes: moe.map_or(0, |m| m.expert_bytes()),
    })
}

fn io(path: &Path, source: std::io::Error) -> SynthError {
    SynthError::Io { path: path.to_path_buf(), source }
}

fn size(spec: &TensorSpec) -> u64 {
    byte_len(&spec.shape, spec.dtype).unwrap_or(u64::MAX)
}

fn shard_name(index: usize, count: usize) -> String {
    if count == 1 {
        return SINGLE_FILE.into();
    }
    format!("model-{:05}-of-{count:06}.safetensors", index + 1)
}

/// Every tensor, layer by layer, cut into shards.
fn cut(config: &ModelConfig, shards: Shards) -> Result<Vec<Vec<TensorSpec>>, SynthError> {
    let (mut layers, mut rest) = (vec![Vec::new(); config.layers.len()], Vec::new());
    for spec in trunk_tensors(config).into_iter().map(|s| s.as_stored(config)) {
        let layer = spec.name.strip_prefix("model.layers.").and_then(|r| r.split('.').next()?.parse::<usize>().ok());
        layer.and_then(|l| layers.get_mut(l)).unwrap_or(&mut rest).push(spec);
    }
    for layer in config.moe_layers() {
        let experts = config.moe.as_ref().map_or(0, |m| m.experts);
        layers[layer].extend((0..experts).filter_map(|e| expert_tensors(config, layer, e)).flatten());
    }
    layers.push(rest);
    if layers.iter().flatten().try_fold(0u64, |sum, spec| sum.checked_add(size(spec))).is_none() {
        let reason = "the tensors together exceed 64 bits".into();
        return Err(SynthError::Option { flag: "--layers, --hidden, --width", reason });
    }
    let Shards::Count(count) = shards else { return Ok(layers) };
    let all: Vec<TensorSpec> = layers.into_iter().flatten().collect();
    let total: u64 = all.iter().map(size).sum();
    let mut out = vec![Vec::new(); count as usize];
    let mut before = 0u64;
    for spec in all {
        let shard = u128::from(before) * u128::from(count) / u128::from(total.max(1));
        before += size(&spec);
        out[(shard as usize).min(count as usize - 1)].push(spec);
    }
    out.retain(|shard| !shard.is_empty());
    Ok(out)
}

fn write_shard(
    path: &Path,
    specs: &[TensorSpec],
    values: &dyn Fn(&TensorSpec) -> Values,
    buffer: &mut [u8],
    written: &mut dyn FnMut(u64),
) -> std::io::Result<()> {
    let mut file = File::create_new(path)?;
    let mut header = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut offset = 0u64;
    for spec in specs {
        let end = offset + size(spec);
        let entry = serde_json::json!({"dtype": spec.dtype.name(), "shape": spec.shape, "data_offsets": [offset, end]});
        // tensor names need no escaping
        header.push_str(&format!(",\"{TEXT_PREFIX}{}\":{entry}", spec.name));
        offset = end;
    }
    header.push('}');
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut at = 8 + header.len() as u64;
    for spec in specs {
        let mut values = values(spec);
        let mut left = size(spec);
        while left > 0 {
            let piece = left.min(buffer.len() as u64);
            let out = &mut buffer[..piece as usize];
            values.fill(out);
            file.write_all(out)?;
            // advice only
            let _ = cache::start_writeback(&file, at, piece);
            at += piece;
            left -= piece;
            written(piece);
        }
    }
    file.sync_all()
}
