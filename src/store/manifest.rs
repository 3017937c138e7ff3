//! The two manifests: `store.json` (what the model is; version 1, or 2 where the trunk is not the checkpoint's own bytes) and `drive.json` (what **is** on a drive; version 1, or 2
//! where there are parts of striped experts). Codec and checks only; nothing here opens an expert.

use super::trunk_format::{TrunkError, TrunkFormat};
use crate::ids::{ExpertId, Extent, LayerId};
use crate::model::tensors::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version that this program writes for both manifests where nothing newer is in them.
pub const FORMAT_VERSION: u32 = 1;
/// Version of a `store.json` whose trunk is not the checkpoint's own bytes; the newest that this program reads.
pub const STORE_VERSION: u32 = 2;
/// Version of a `drive.json` with parts of striped experts; the newest that this program reads.
pub const DRIVE_VERSION: u32 = 2;
/// Slots of a pack start on multiples of this (K3's experts are 1071 * 16384 bytes).
pub const SLOT_ALIGN: u64 = 16 * 1024;
/// Trunk tensors start on multiples of this, so that any of them can be read directly.
pub const TRUNK_ALIGN: u64 = 4096;
/// File names inside a store.
pub const STORE_FILE: &str = "store.json";
/// The trunk's data file inside a store.
pub const TRUNK_FILE: &str = "trunk.bin";
/// File name of the manifest in a drive folder.
pub const DRIVE_FILE: &str = "drive.json";

/// What is wrong with a manifest or a store.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not valid JSON of this shape.
    #[error("{}: not a valid manifest: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The file was written by a newer program.
    #[error("{}: format version {seen}, this program reads up to {newest}; use a newer argodrive", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        seen: u32,
        /// The newest that this program reads.
        newest: u32,
    },
    /// The content contradicts itself or its surroundings.
    #[error("{}: {reason}", path.display())]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// What does not fit, and what to do.
        reason: String,
    },
}

/// A 128-bit XXH3 digest, written as 32 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub u128);

impl From<Digest> for String {
    fn from(d: Digest) -> Self {
        format!("{:032x}", d.0)
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        if s.len() != 32 || !s.is_ascii() {
            return Err(format!("digest `{s}` is not 32 hex digits"));
        }
        u128::from_str_radix(&s, 16).map(Digest).map_err(|_| format!("digest `{s}` is not hexadecimal"))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Digest {
    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Digest(xxhash_rust::xxh3::xxh3_128(bytes))
    }
}

/// One trunk tensor in `trunk.bin`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrunkTensor {
    /// Name without the text prefix.
    pub name: String,
    /// Storage type.
    pub dtype: DType,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// First byte in `trunk.bin`, a multiple of [`TRUNK_ALIGN`].
    pub offset: u64,
    /// Digest of its bytes.
    pub digest: Digest,
}

/// `store.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreManifest {
    /// Format version of this file.
    pub version: u32,
    /// Hash of config, tensor table and all trunk and expert digests: a fine-tune is another model.
    pub model_id: String,
    /// The checkpoint's folder name, for people.
    pub name: String,
    /// Format of the trunk: `bf16` keeps the checkpoint's bytes.
    pub trunk_format: TrunkFormat,
    /// What a format that does not keep them does to the logits; `None` until it was measured. Since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trunk_error: Option<TrunkError>,
    /// Digest of `config.json` as imported.
    pub config_digest: Digest,
    /// Layers that hold experts.
    pub moe_layers: Vec<LayerId>,
    /// Experts in each of them.
    pub experts: u32,
    /// Payload bytes of one expert (0 for a dense model).
    pub expert_bytes: u64,
    /// The trunk's tensors.
    pub trunk: Vec<TrunkTensor>,
}

/// The oldest version of a `store.json` that can say that its trunk is in `format`.
pub fn store_version(format: TrunkFormat) -> u32 {
    if format.is_exact() { FORMAT_VERSION } else { STORE_VERSION }
}

/// How experts lie in a drive folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Container {
    /// `L<layer>.experts`, slots of `slot_bytes`.
    Pack,
    /// `L<layer>-E<expert>.bin`, one file per expert, no header.
    Files,
}

/// One expert on a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveExpert {
    /// Which expert of the layer.
    pub expert: ExpertId,
    /// Slot in the layer's pack (0 for `files`).
    pub slot: u32,
    /// Digest of its payload.
    pub digest: Digest,
}

/// One column of a striped expert on a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StripePart {
    /// Which expert of the layer.
    pub expert: ExpertId,
    /// Which column of it.
    pub column: u8,
    /// Slot in the pack of these parts.
    pub slot: u32,
    /// Digest of the part.
    pub digest: Digest,
    /// Digest of the whole expert.
    pub expert_digest: Digest,
}

/// Parts of experts striped in one way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StripeSet {
    /// Bytes of a block.
    pub unit_bytes: u64,
    /// Drives over which each expert lies.
    pub columns: u8,
    /// Parts by layer, ascending by expert and column.
    pub layers: BTreeMap<LayerId, Vec<StripePart>>,
}

/// `drive.json`: what is on a drive. Layers are keyed by their number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveManifest {
    /// Format version of this file.
    pub version: u32,
    /// The model whose experts these are.
    pub model_id: String,
    /// How experts lie in the folder.
    pub container: Container,
    /// Payload bytes of one expert.
    pub expert_bytes: u64,
    /// Distance of two slots in a pack.
    pub slot_bytes: u64,
    /// Experts by layer, ascending by expert.
    pub layers: BTreeMap<LayerId, Vec<DriveExpert>>,
    /// Parts of striped experts, ascending by block and columns. Since version 2.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stripes: Vec<StripeSet>,
}

impl DriveManifest {
    /// An empty pack folder's manifest.
    pub fn empty(model_id: &str, expert_bytes: u64) -> Self {
        Self {
            version: FORMAT_VERSION,
            model_id: model_id.to_string(),
            container: Container::Pack,
            expert_bytes,
            slot_bytes: expert_bytes.div_ceil(SLOT_ALIGN) * SLOT_ALIGN,
            layers: BTreeMap::new(),
            stripes: Vec::new(),
        }
    }

    /// The oldest version that can say what is there.
    pub fn least_version(&self) -> u32 {
        if self.stripes.is_empty() { FORMAT_VERSION } else { DRIVE_VERSION }
    }

    /// The entry of one expert, if it is on the drive.
    pub fn find(&self, layer: LayerId, expert: ExpertId) -> Option<&DriveExpert> {
        let row = self.layers.get(&layer)?;
        row.binary_search_by_key(&expert, |e| e.expert).ok().map(|i| &row[i])
    }

    /// File name (relative to the folder) and payload extent of an entry of `layer`.
    pub fn locate(&self, layer: LayerId, entry: &DriveExpert) -> (String, Extent) {
        match self.container {
            Container::Pack => {
                (pack_name(layer), Extent { offset: u64::from(entry.slot) * self.slot_bytes, len: self.expert_bytes })
            }
            Container::Files => {
                (format!("L{}-E{}.bin", layer.0, entry.expert.0), Extent { offset: 0, len: self.expert_bytes })
            }
        }
    }
}

/// Name of a layer's pack file.
pub fn pack_name(layer: LayerId) -> String {
    format!("L{}.experts", layer.0)
}

/// The folder of a model on a drive: `<mount>/argodrive/<model-id>`.
pub fn drive_folder(mount: &Path, model_id: &str) -> PathBuf {
    mount.join("argodrive").join(model_id)
}
