//! Reading back what manifests say is on a drive: every expert and trunk tensor against its digest. Reports every fault
//! with the file, slot and offset instead of stopping at the first; writes nothing.

use super::import::Progress;
use super::manifest::{Digest, DriveManifest, ManifestError, StoreManifest, TRUNK_FILE};
use super::trunk::byte_len;
use crate::ids::{ExpertId, LayerId};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Bytes of a trunk tensor that are in memory at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// Something that is not as its manifest says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file.
    pub path: PathBuf,
    /// What should be there: an expert with its slot, or a trunk tensor by name.
    pub what: FaultAt,
    /// First byte in the file.
    pub offset: u64,
    /// The digest that the manifest gives.
    pub expected: Digest,
    /// The digest of what is there, or why it could not be read.
    pub seen: Result<Digest, String>,
}

/// Which part of a store or drive is at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultAt {
    /// An expert of a drive folder.
    Expert {
        /// Its layer.
        layer: LayerId,
        /// Its index.
        expert: ExpertId,
        /// Its slot in the pack.
        slot: u32,
    },
    /// A trunk tensor.
    Trunk(String),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.what {
            FaultAt::Expert { layer, expert, slot } => write!(f, "expert {layer}-{expert}, slot {slot}")?,
            FaultAt::Trunk(name) => write!(f, "tensor {name}")?,
        }
        write!(f, ", offset {}: ", self.offset)?;
        match &self.seen {
            Ok(seen) => write!(f, "digest {seen}, expected {}", self.expected),
            Err(reason) => write!(f, "cannot be read: {reason}"),
        }
    }
}

/// What a verification found.
#[derive(Clone, Debug, Default)]
pub struct VerifyReport {
    /// Experts or tensors read.
    pub checked: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Everything that is wrong.
    pub faults: Vec<Fault>,
}

/// Reads every expert that `manifest` says is in the drive folder `folder` and compares digests.
pub fn verify_drive(
    folder: &Path,
    manifest: &DriveManifest,
    progress: &mut dyn FnMut(Progress),
) -> Result<VerifyReport, ManifestError> {
    let mut report = VerifyReport::default();
    let experts: u64 = manifest.layers.values().map(|row| row.len() as u64).sum();
    let mut at = Progress { done_bytes: 0, total_bytes: experts.saturating_mul(manifest.expert_bytes) };
    let mut buffer = vec![0u8; manifest.expert_bytes as usize];
    let mut open: Option<(PathBuf, Result<File, String>)> = None;
    for (&layer, row) in &manifest.layers {
        for entry in row {
            let (name, extent) = manifest.locate(layer, entry);
            let path = folder.join(name);
            let (_, file) = match open.take() {
                Some(same) if same.0 == path => open.insert(same),
                _ => open.insert((path.clone(), open_cold(&path).map_err(|e| e.to_string()))),
            };
            let seen = match file {
                Ok(file) => match file.read_exact_at(&mut buffer, extent.offset) {
                    Ok(()) => Ok(Digest::of(&buffer)),
                    Err(e) => Err(e.to_string()),
                },
                Err(reason) => Err(reason.clone()),
            };
            report.checked += 1;
            report.bytes += if seen.is_ok() { extent.len } else { 0 };
            if seen.as_ref() != Ok(&entry.digest) {
                let what = FaultAt::Expert { layer, expert: entry.expert, slot: entry.slot };
                report.faults.push(Fault { path, what, offset: extent.offset, expected: entry.digest, seen });
            }
            at.done_bytes += extent.len;
            progress(at);
        }
    }
    Ok(report)
}

/// Reads every trunk tensor of the store in `folder` and compares digests.
pub fn verify_trunk(
    folder: &Path,
    manifest: &StoreManifest,
    progress: &mut dyn FnMut(Progress),
) -> Result<VerifyReport, ManifestError> {
    let path = folder.join(TRUNK_FILE);
    let file = open_cold(&path).map_err(|source| ManifestError::Io { path: path.clone(), source })?;
    let mut report = VerifyReport::default();
    let len_of = |t: &super::manifest::TrunkTensor| byte_len(&t.shape, t.dtype).unwrap_or(0);
    let mut at = Progress { done_bytes: 0, total_bytes: manifest.trunk.iter().map(len_of).sum() };
    let mut buffer = vec![0u8; CHUNK_BYTES];
    for tensor in &manifest.trunk {
        let len = len_of(tensor);
        let seen = digest_range(&file, tensor.offset, len, &mut buffer).map_err(|e| e.to_string());
        report.checked += 1;
        report.bytes += if seen.is_ok() { len } else { 0 };
        if seen.as_ref() != Ok(&tensor.digest) {
            let what = FaultAt::Trunk(tensor.name.clone());
            let (path, offset, expected) = (path.clone(), tensor.offset, tensor.digest);
            report.faults.push(Fault { path, what, offset, expected, seen });
        }
        at.done_bytes += len;
        progress(at);
    }
    Ok(report)
}

/// Opens a file and lets go of what memory holds of it: pages in memory prove nothing about the drive.
fn open_cold(path: &Path) -> std::io::Result<File> {
    let file = File::open(path)?;
    // advice only: where it is refused, the bytes are still compared
    let _ = crate::sys::cache::drop_file(&file);
    Ok(file)
}

fn digest_range(file: &File, offset: u64, len: u64, buffer: &mut [u8]) -> std::io::Result<Digest> {
    let mut hash = Xxh3::new();
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(buffer.len() as u64) as usize;
        file.read_exact_at(&mut buffer[..piece], offset + done)?;
        hash.update(&buffer[..piece]);
        done += piece as u64;
    }
    Ok(Digest(hash.digest128()))
}
