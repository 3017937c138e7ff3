//! The trunk: every tensor that is not a routed expert's, by name. Mapped from a store's `trunk.bin` or a checkpoint's
//! shards, or held in memory of its own. Knows bytes; what is multiplied with them is the decoder's.

use super::manifest::{ManifestError, StoreManifest, TRUNK_ALIGN, TRUNK_FILE};
use super::trunk_memory::{TrunkMemory, load};
use crate::ids::Extent;
use crate::knob::{self, Knob};
use crate::model::checkpoint::Checkpoint;
use crate::model::tensors::{DType, TensorView};
use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::path::Path;
use std::str::FromStr;

/// Where a trunk is while a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrunkResidency {
    /// Mapped from its file: the system reads pages as they are touched and may let go of them.
    #[default]
    Mapped,
    /// Read into memory of the program's own before the run; the system may swap it.
    Loaded,
    /// The same, and locked: it stays in memory whatever happens.
    Locked,
    /// Large matrices are read anew in every pass, layer by layer, while the layer before computes.
    Streamed,
}

impl TrunkResidency {
    /// All of them.
    pub const ALL: [TrunkResidency; 4] =
        [TrunkResidency::Mapped, TrunkResidency::Loaded, TrunkResidency::Locked, TrunkResidency::Streamed];

    /// The name in configurations, flags and records.
    pub fn name(self) -> &'static str {
        match self {
            TrunkResidency::Mapped => "mapped",
            TrunkResidency::Loaded => "loaded",
            TrunkResidency::Locked => "locked",
            TrunkResidency::Streamed => "streamed",
        }
    }
}

impl fmt::Display for TrunkResidency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TrunkResidency {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let known = TrunkResidency::ALL.into_iter().find(|r| r.name() == s);
        known.ok_or_else(|| format!("`{s}` is no place for a trunk; use mapped, loaded, locked or streamed"))
    }
}

/// What was done with a trunk's bytes, counted by the code that did it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrunkFacts {
    /// Bytes of all tensors.
    pub payload_bytes: u64,
    /// Bytes that lie in a mapping of a file.
    pub mapped_bytes: u64,
    /// Bytes that were read into memory of the program's own.
    pub loaded_bytes: u64,
    /// Bytes that the kernel was asked to lock, and did not refuse to.
    pub locked_bytes: u64,
}

/// All trunk tensors of a model.
pub struct Trunk {
    parts: Vec<Bytes>,
    table: HashMap<String, Entry>,
    streamed: bool,
}

enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
    Memory(TrunkMemory),
}

impl Bytes {
    fn all(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(vec) => vec,
            Bytes::Memory(memory) => memory.bytes(),
        }
    }
}

struct Entry {
    dtype: DType,
    shape: Vec<u64>,
    at: TrunkAt,
}

/// Where a tensor lies: a handle that needs no look-up by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrunkAt {
    part: u32,
    /// Bytes of that part: of `trunk.bin` for a store.
    pub extent: Extent,
}

impl Trunk {
    /// Maps the trunk of the store in `folder`; checks that every tensor lies inside the file.
    pub fn open(folder: &Path, manifest: &StoreManifest) -> Result<Self, ManifestError> {
        Self::open_as(folder, manifest, TrunkResidency::Mapped)
    }

    /// As [`Trunk::open`], with the bytes where `residency` says.
    ///
    /// # Errors
    /// Also memory that cannot be had, or not be locked; the message names the limit.
    pub fn open_as(folder: &Path, manifest: &StoreManifest, residency: TrunkResidency) -> Result<Self, ManifestError> {
        let path = folder.join(TRUNK_FILE);
        let io = |source| ManifestError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        let map = crate::sys::map::map_readonly(&file).map_err(io)?;
        let mut table = HashMap::with_capacity(manifest.trunk.len());
        for tensor in &manifest.trunk {
            let len = byte_len(&tensor.shape, tensor.dtype);
            let extent = len.map(|len| Extent { offset: tensor.offset, len });
            match extent {
                Some(extent) if extent.end().is_some_and(|end| end <= map.len() as u64) => {
                    let at = TrunkAt { part: 0, extent };
                    let entry = Entry { dtype: tensor.dtype, shape: tensor.shape.clone(), at };
                    table.insert(tensor.name.clone(), entry);
                }
                _ => {
                    return Err(ManifestError::Inconsistent {
                        path,
                        reason: format!(
                            "tensor {} lies outside the file of {} bytes; import the checkpoint again",
                            tensor.name,
                            map.len()
                        ),
                    });
                }
            }
        }
        let residency = match residency {
            _ if knob::skipped(Knob::Trunk) => TrunkResidency::Mapped,
            TrunkResidency::Mapped if knob::forced(Knob::Trunk) => TrunkResidency::Loaded,
            asked => asked,
        };
        let bytes = match residency {
            TrunkResidency::Mapped | TrunkResidency::Streamed => Bytes::Mapped(map),
            TrunkResidency::Loaded | TrunkResidency::Locked => {
                let lock = residency == TrunkResidency::Locked;
                Bytes::Memory(load(&path, &file, map.len(), lock)?)
            }
        };
        Ok(Self { parts: vec![bytes], table, streamed: residency == TrunkResidency::Streamed })
    }

    /// Maps the trunk of a checkpoint where its shards are.
    pub fn of_checkpoint(source: &Checkpoint) -> Result<Self, ManifestError> {
        let (mut parts, mut table) = (Vec::new(), HashMap::new());
        let mut known: HashMap<u32, u32> = HashMap::new();
        for tensor in source.trunk() {
            let shard = tensor.place.shard;
            let part = match known.get(&shard) {
                Some(part) => *part,
                None => {
                    let path = source.shard_path(shard);
                    let mapped = File::open(&path).and_then(|file| crate::sys::map::map_readonly(&file));
                    parts.push(Bytes::Mapped(mapped.map_err(|source| ManifestError::Io { path, source })?));
                    known.insert(shard, parts.len() as u32 - 1);
                    parts.len() as u32 - 1
                }
            };
            let at = TrunkAt { part, extent: tensor.place.extent };
            let entry = Entry { dtype: tensor.spec.dtype, shape: tensor.spec.shape.clone(), at };
            table.insert(tensor.spec.name.clone(), entry);
        }
        Ok(Self { parts, table, streamed: false })
    }

    /// A trunk in memory from (name, dtype, shape, bytes).
    pub fn from_tensors<'a>(tensors: impl IntoIterator<Item = (String, DType, Vec<u64>, &'a [u8])>) -> Self {
        let mut bytes = Vec::new();
        let mut table = HashMap::new();
        for (name, dtype, shape, data) in tensors {
            bytes.resize(bytes.len().next_multiple_of(16), 0);
            let at = TrunkAt { part: 0, extent: Extent { offset: bytes.len() as u64, len: data.len() as u64 } };
            bytes.extend_from_slice(data);
            table.insert(name, Entry { dtype, shape, at });
        }
        Self { parts: vec![Bytes::Owned(bytes)], table, streamed: false }
    }

    /// One tensor, if the model has it.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let entry = self.table.get(name)?;
        let all = self.parts.get(entry.at.part as usize)?.all();
        let (start, len) = (entry.at.extent.offset as usize, entry.at.extent.len as usize);
        Some(TensorView { dtype: entry.dtype, shape: &entry.shape, bytes: all.get(start..start + len)? })
    }

    /// Where a tensor lies, for [`Trunk::bytes`].
    pub fn at(&self, name: &str) -> Option<TrunkAt> {
        self.table.get(name).map(|entry| entry.at)
    }

    /// The bytes at a place that [`Trunk::at`] of this trunk gave; empty for any other that lies outside.
    pub fn bytes(&self, at: TrunkAt) -> &[u8] {
        let all = self.parts.get(at.part as usize).map_or(&[][..], Bytes::all);
        let end = at.extent.end().unwrap_or(u64::MAX);
        all.get(at.extent.offset as usize..end as usize).unwrap_or(&[])
    }

    /// Whether large matrices are to be read anew in every pass and not to be touched here.
    pub fn is_streamed(&self) -> bool {
        self.streamed
    }

    /// Bytes of all tensors together.
    pub fn payload_bytes(&self) -> u64 {
        self.table.values().map(|e| e.at.extent.len).sum()
    }

    /// What was done with the bytes.
    pub fn facts(&self) -> TrunkFacts {
        let mut facts = TrunkFacts { payload_bytes: self.payload_bytes(), ..TrunkFacts::default() };
        for part in &self.parts {
            match part {
                Bytes::Mapped(map) => facts.mapped_bytes += map.len() as u64,
                Bytes::Owned(vec) => facts.loaded_bytes += vec.len() as u64,
                Bytes::Memory(memory) => {
                    facts.loaded_bytes += memory.loaded_bytes();
                    facts.locked_bytes += memory.locked_bytes();
                }
            }
        }
        facts
    }
}

/// Offsets in `trunk.bin` of tensors that may each take `room` bytes, and the bytes of the file; `None` beyond 64 bits.
pub fn place(room: impl Iterator<Item = u64>) -> Option<(Vec<u64>, u64)> {
    let (mut offsets, mut end) = (Vec::new(), 0u64);
    for bytes in room {
        offsets.push(end);
        end = end.checked_add(bytes)?.checked_next_multiple_of(TRUNK_ALIGN)?;
    }
    Some((offsets, end))
}

/// Bytes of a tensor, or `None` when they do not fit in 64 bits, or the type has no such shape.
pub fn byte_len(shape: &[u64], dtype: DType) -> Option<u64> {
    let elements = shape.iter().try_fold(dtype.size(), |product, &dim| product.checked_mul(dim))?;
    match (dtype, shape) {
        (DType::Int8Rows, &[rows, _]) => rows.checked_mul(DType::F32.size())?.checked_add(elements),
        (DType::Int8Rows, _) => None,
        _ => Some(elements),
    }
}
