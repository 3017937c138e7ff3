//! Who a model is: a hash over its configuration, the table of its tensors and the digest of every tensor and expert.
//! A fine-tune, or one changed byte anywhere, is another model; how a checkpoint is cut into shards does not matter.

use super::manifest::{Digest, DriveManifest, StoreManifest, TrunkTensor};
use crate::ids::LayerId;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::ModelConfig;
use crate::model::tensors::DType;
use xxhash_rust::xxh3::Xxh3;

/// The geometry that goes into a model id.
struct Geometry<'a> {
    moe_layers: &'a [LayerId],
    experts: u32,
    expert_bytes: u64,
}

/// The model id that `store.json` and `drive.json` together stand for: 32 hex digits.
pub fn model_id(store: &StoreManifest, drive: &DriveManifest) -> String {
    let mut hash = Xxh3::new();
    hash.update(b"argodrive model 1\n");
    hash.update(&store.config_digest.0.to_le_bytes());
    let table = store.trunk.iter().map(|t: &TrunkTensor| (t.name.as_str(), t.dtype, t.shape.as_slice()));
    let geometry = Geometry { moe_layers: &store.moe_layers, experts: store.experts, expert_bytes: store.expert_bytes };
    hash_table(&mut hash, table, &geometry);
    for tensor in &store.trunk {
        hash.update(&tensor.digest.0.to_le_bytes());
    }
    for expert in drive.layers.values().flatten() {
        hash.update(&expert.digest.0.to_le_bytes());
    }
    format!("{:032x}", hash.digest128())
}

/// How the id of a model begins of which only the geometry is known.
const PROVISIONAL: &str = "geometry";

/// The provisional id of a model of which only `config.json` is known: what a plan carries that is made before the weights
/// are there. An import binds such a plan to the id of the model that it finds.
pub fn geometry_id(config_bytes: &[u8], config: &ModelConfig) -> String {
    let moe_layers: Vec<LayerId> = config.moe_layers().map(|l| LayerId(l as u16)).collect();
    let (experts, expert_bytes) = config.moe.as_ref().map_or((0, 0), |m| (m.experts as u32, m.expert_bytes()));
    let mut hash = Xxh3::new();
    hash.update(b"argodrive geometry 1\n");
    hash.update(&Digest::of(config_bytes).0.to_le_bytes());
    hash_table(&mut hash, std::iter::empty(), &Geometry { moe_layers: &moe_layers, experts, expert_bytes });
    format!("{PROVISIONAL}{:032x}", hash.digest128())
}

/// Whether an id is of a geometry and not of a model.
pub fn is_provisional(model_id: &str) -> bool {
    model_id.starts_with(PROVISIONAL)
}

/// Digest of a checkpoint's tensor table alone: names, types, shapes and the experts' geometry.
pub fn table_digest(checkpoint: &Checkpoint) -> Digest {
    let mut hash = Xxh3::new();
    let table = checkpoint.trunk().iter().map(|t| (t.spec.name.as_str(), t.spec.dtype, t.spec.shape.as_slice()));
    let geometry = Geometry {
        moe_layers: checkpoint.moe_layers(),
        experts: checkpoint.experts(),
        expert_bytes: checkpoint.expert_bytes(),
    };
    hash_table(&mut hash, table, &geometry);
    Digest(hash.digest128())
}

fn hash_table<'a>(hash: &mut Xxh3, table: impl Iterator<Item = (&'a str, DType, &'a [u64])>, geometry: &Geometry<'_>) {
    for (name, dtype, shape) in table {
        hash.update(name.as_bytes());
        hash.update(format!(" {} {shape:?}\n", dtype.name()).as_bytes());
    }
    let layers: Vec<u16> = geometry.moe_layers.iter().map(|l| l.0).collect();
    hash.update(format!("experts {layers:?} {} {}\n", geometry.experts, geometry.expert_bytes).as_bytes());
}
