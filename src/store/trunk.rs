//! The trunk: every tensor that is not a routed expert's, by name. Mapped from a store's `trunk.bin`, or held in
//! memory (tests, synthetic models).

use super::manifest::{ManifestError, StoreManifest, TRUNK_ALIGN, TRUNK_FILE};
use crate::ids::Extent;
use crate::model::tensors::{DType, TensorView};
use memmap2::Mmap;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

/// All trunk tensors of a model.
pub struct Trunk {
    bytes: Bytes,
    table: HashMap<String, Entry>,
}

enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

struct Entry {
    dtype: DType,
    shape: Vec<u64>,
    extent: Extent,
}

impl Trunk {
    /// Maps the trunk of the store in `folder`; checks that every tensor lies inside the file.
    pub fn open(folder: &Path, manifest: &StoreManifest) -> Result<Self, ManifestError> {
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
                    table.insert(
                        tensor.name.clone(),
                        Entry { dtype: tensor.dtype, shape: tensor.shape.clone(), extent },
                    );
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
        Ok(Self { bytes: Bytes::Mapped(map), table })
    }

    /// A trunk in memory from (name, dtype, shape, bytes).
    pub fn from_tensors<'a>(tensors: impl IntoIterator<Item = (String, DType, Vec<u64>, &'a [u8])>) -> Self {
        let mut bytes = Vec::new();
        let mut table = HashMap::new();
        for (name, dtype, shape, data) in tensors {
            bytes.resize(bytes.len().next_multiple_of(16), 0);
            let extent = Extent { offset: bytes.len() as u64, len: data.len() as u64 };
            bytes.extend_from_slice(data);
            table.insert(name, Entry { dtype, shape, extent });
        }
        Self { bytes: Bytes::Owned(bytes), table }
    }

    /// One tensor, if the model has it.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let entry = self.table.get(name)?;
        let all: &[u8] = match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(vec) => vec,
        };
        let (start, len) = (entry.extent.offset as usize, entry.extent.len as usize);
        Some(TensorView { dtype: entry.dtype, shape: &entry.shape, bytes: all.get(start..start + len)? })
    }

    /// Where a tensor lies, for [`Trunk::bytes`]: a handle that needs no look-up by name later.
    pub fn extent(&self, name: &str) -> Option<Extent> {
        self.table.get(name).map(|entry| entry.extent)
    }

    /// The bytes of an extent that [`Trunk::extent`] of this trunk gave; empty for any other that lies outside.
    pub fn bytes(&self, extent: Extent) -> &[u8] {
        let all: &[u8] = match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(vec) => vec,
        };
        let end = extent.end().unwrap_or(u64::MAX);
        all.get(extent.offset as usize..end as usize).unwrap_or(&[])
    }

    /// Bytes of all tensors together.
    pub fn payload_bytes(&self) -> u64 {
        self.table.values().map(|e| e.extent.len).sum()
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

/// Bytes of a tensor, or `None` when they do not fit in 64 bits.
pub fn byte_len(shape: &[u64], dtype: DType) -> Option<u64> {
    shape.iter().try_fold(dtype.size(), |product, &dim| product.checked_mul(dim))
}
