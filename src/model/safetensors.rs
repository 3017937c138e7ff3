//! The header of a safetensors file, read with bounds before every allocation: length, offsets, overlaps, holes,
//! shapes. Knows nothing of models; it answers "which tensor lies where in this file" and refuses files for which
//! that has no single answer. Written on serde_json because the usual crate wants the whole file in memory.

use crate::ids::Extent;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Longest header accepted, the bound that the format's own library uses.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most tensors in one file (a K3 shard has 5,404).
const MAX_TENSORS: usize = 1 << 20;
/// Most dimensions of a tensor.
const MAX_DIMS: usize = 8;
/// Longest tensor name.
const MAX_NAME_BYTES: usize = 512;
/// How a git-LFS pointer begins.
const LFS_MAGIC: &[u8] = b"version https://git-lfs";

/// What is wrong with a checkpoint. Every message names the file, and the tensor where there is one.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The folder has not what a checkpoint has.
    #[error("{}: {reason}", folder.display())]
    NotACheckpoint {
        /// The folder.
        folder: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// `config.json` is not one of this family.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What the configuration reader said.
        reason: String,
    },
    /// A placeholder lies where the data should be.
    #[error(
        "{}: this is a git-LFS pointer, not the data; fetch it with `git lfs pull` in the checkpoint's folder, or with `hf download`",
        path.display()
    )]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// The file ends before its tensors do.
    #[error("{}: truncated: expected {expected} bytes, the file has {actual}; fetch it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that its header speaks of.
        expected: u64,
        /// Bytes that it has.
        actual: u64,
    },
    /// The header is not one.
    #[error("{}: not a valid safetensors file: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// One tensor is not as it should be.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's full name.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// The shard index is not one, or names what does not exist.
    #[error("{}: {reason}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl CheckpointError {
    pub(super) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        |source| CheckpointError::Io { path: path.to_path_buf(), source }
    }

    pub(super) fn header(path: &Path, reason: impl Into<String>) -> Self {
        CheckpointError::Header { path: path.to_path_buf(), reason: reason.into() }
    }

    pub(super) fn tensor(path: &Path, tensor: &str, reason: impl Into<String>) -> Self {
        CheckpointError::Tensor { path: path.to_path_buf(), tensor: tensor.into(), reason: reason.into() }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Its name as written.
    pub name: String,
    /// Its storage type as written, e.g. `BF16`.
    pub dtype: String,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// Where its bytes lie, counted from the start of the file.
    pub extent: Extent,
}

/// Whether `bytes` (the start of a file) belong to a git-LFS pointer.
pub fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(LFS_MAGIC)
}

/// Reads and checks the header of `file`; tensors come in the order of their bytes.
pub fn read_header(file: &File, path: &Path) -> Result<Vec<HeaderTensor>, CheckpointError> {
    let file_bytes = file.metadata().map_err(CheckpointError::io(path))?.len();
    let mut start = [0u8; 64];
    let seen = start.len().min(file_bytes as usize);
    file.read_exact_at(&mut start[..seen], 0).map_err(CheckpointError::io(path))?;
    if is_lfs_pointer(&start[..seen]) {
        return Err(CheckpointError::LfsPointer { path: path.to_path_buf() });
    }
    if seen < 8 {
        return Err(CheckpointError::Truncated { path: path.to_path_buf(), expected: 8, actual: file_bytes });
    }
    let mut length = [0u8; 8];
    length.copy_from_slice(&start[..8]);
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES {
        let reason = format!("its header claims {header_bytes} bytes, at most {MAX_HEADER_BYTES} are accepted");
        return Err(CheckpointError::header(path, reason));
    }
    if header_bytes > file_bytes - 8 {
        let expected = header_bytes + 8;
        return Err(CheckpointError::Truncated { path: path.to_path_buf(), expected, actual: file_bytes });
    }
    let mut json = vec![0u8; header_bytes as usize];
    file.read_exact_at(&mut json, 8).map_err(CheckpointError::io(path))?;
    parse_header(&json, file_bytes, path)
}

/// Checks a header's JSON text `json` of a file of `file_bytes` bytes. `path` is for messages only.
pub fn parse_header(json: &[u8], file_bytes: u64, path: &Path) -> Result<Vec<HeaderTensor>, CheckpointError> {
    if json.first() != Some(&b'{') {
        return Err(CheckpointError::header(path, "its header does not begin with `{`"));
    }
    let raw: RawHeader =
        serde_json::from_slice(json).map_err(|e| CheckpointError::header(path, format!("its header: {e}")))?;
    let data_start = 8 + json.len() as u64;
    let data_bytes = file_bytes.saturating_sub(data_start);
    let mut entries = raw.0;
    entries.sort_by_key(|(_, e)| e.data_offsets);
    let mut names = HashSet::with_capacity(entries.len());
    let mut covered = 0u64;
    let mut last = "";
    for (name, entry) in &entries {
        if !names.insert(name.as_str()) {
            return Err(CheckpointError::tensor(path, name, "stands twice in the header"));
        }
        let (begin, end) = entry.data_offsets;
        if begin > end {
            return Err(CheckpointError::tensor(path, name, format!("its offsets [{begin}, {end}] run backwards")));
        }
        let want = element_bits(&entry.dtype).map(|bits| needed_bytes(&entry.shape.0, bits));
        if let Some(want) = want
            && want != Some(end - begin)
        {
            let want = want.map_or("more than 64 bits can count".into(), |w| format!("{w} bytes"));
            let reason = format!(
                "offsets [{begin}, {end}] hold {} bytes, shape {:?} of {} needs {want}",
                end - begin,
                entry.shape.0,
                entry.dtype
            );
            return Err(CheckpointError::tensor(path, name, reason));
        }
        if begin != covered {
            // the tensor that lies beyond the file is the likelier culprit than the one after the gap it left
            let beyond = entries.last().filter(|(_, e)| e.data_offsets.1 > data_bytes);
            let (name, reason) = match beyond {
                Some((name, e)) => {
                    let (begin, end) = e.data_offsets;
                    let reason =
                        format!("offsets [{begin}, {end}] lie outside the file, which has {data_bytes} bytes of data");
                    (name, reason)
                }
                None if begin < covered => {
                    (name, format!("offsets [{begin}, {end}] overlap tensor {last}, which ends at {covered}"))
                }
                None => {
                    let reason =
                        format!("begins at {begin}, but only bytes up to {covered} are accounted for: there is a hole");
                    (name, reason)
                }
            };
            return Err(CheckpointError::tensor(path, name, reason));
        }
        covered = end;
        last = name;
    }
    // `covered` is outside data: near 2^64 it must not wrap into something plausible
    let expected = data_start
        .checked_add(covered)
        .ok_or_else(|| CheckpointError::tensor(path, last, "its end does not fit in 64 bits"))?;
    if expected > file_bytes {
        return Err(CheckpointError::Truncated { path: path.to_path_buf(), expected, actual: file_bytes });
    }
    if expected < file_bytes {
        let reason = format!("{} bytes after the last tensor belong to none", file_bytes - expected);
        return Err(CheckpointError::header(path, reason));
    }
    Ok(entries
        .into_iter()
        .map(|(name, e)| HeaderTensor {
            name,
            dtype: e.dtype,
            shape: e.shape.0,
            extent: Extent { offset: data_start + e.data_offsets.0, len: e.data_offsets.1 - e.data_offsets.0 },
        })
        .collect())
}

/// Bits per element of the types that the format knows; `None` for a type this reader has not heard of (only
/// tensors that are skipped may have one).
fn element_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

fn needed_bytes(shape: &[u64], bits: u64) -> Option<u64> {
    shape.iter().try_fold(bits / 8, |product, &dim| product.checked_mul(dim))
}

struct RawHeader(Vec<(String, RawEntry)>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMS} dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::with_capacity(2);
                while let Some(dim) = seq.next_element::<u64>()? {
                    if dims.len() == MAX_DIMS {
                        return Err(serde::de::Error::custom(format!("a shape has more than {MAX_DIMS} dimensions")));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            // entry by entry and not through a map type, so that a name that stands twice is seen twice
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut out = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if name.len() > MAX_NAME_BYTES || out.len() == MAX_TENSORS {
                        return Err(serde::de::Error::custom(format!(
                            "more than {MAX_TENSORS} tensors, or a name longer than {MAX_NAME_BYTES} bytes"
                        )));
                    }
                    out.push((name, map.next_value::<RawEntry>()?));
                }
                Ok(RawHeader(out))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
