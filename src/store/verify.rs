//! Reading back what manifests say is on a drive: every expert and trunk tensor against its digest. Reports every fault
//! with the file, slot and offset instead of stopping at the first; writes nothing.

use super::import::Progress;
use super::manifest::{Digest, DriveManifest, ManifestError, StoreManifest, TRUNK_FILE};
use super::piece::{Piece, PieceKey};
use super::trunk::byte_len;
use crate::stats::SplitMix64;
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
    /// An expert of a drive folder, or its part of one.
    Expert {
        /// Which.
        key: PieceKey,
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
            FaultAt::Expert { key, slot } => write!(f, "expert {key}, slot {slot}")?,
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

/// How much is looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sample {
    /// Everything.
    All,
    /// This share, rounded up; 0 to 1.
    Share(f64),
    /// So many, or all where there are fewer.
    Count(u64),
}

impl Sample {
    /// Parses `5%` or `100`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wanted = || format!("`{text}` is neither a share such as `5%` nor a number above 0");
        match text.trim().strip_suffix('%') {
            Some(percent) => match percent.trim().parse::<f64>() {
                Ok(p) if p > 0.0 && p <= 100.0 => Ok(Self::Share(p / 100.0)),
                _ => Err(wanted()),
            },
            None => text.trim().parse().ok().filter(|n| *n > 0).map(Self::Count).ok_or_else(wanted),
        }
    }

    /// Takes the sample from `all`, in their order; the same seed takes the same.
    pub fn of<T>(self, all: Vec<T>, seed: u64) -> Vec<T> {
        let total = all.len();
        let count = match self {
            Self::All => total,
            Self::Share(share) => (total as f64 * share).ceil() as usize,
            Self::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        };
        if count >= total {
            return all;
        }
        let mut rng = SplitMix64::new(seed);
        let mut places: Vec<usize> = (0..total).collect();
        for at in 0..count {
            places.swap(at, at + rng.below(total - at));
        }
        let mut taken = vec![false; total];
        places[..count].iter().for_each(|&p| taken[p] = true);
        all.into_iter().zip(taken).filter_map(|(item, taken)| taken.then_some(item)).collect()
    }
}

/// Reads everything that `manifest` says is in the drive folder `folder` and compares digests.
pub fn verify_drive(
    folder: &Path,
    manifest: &DriveManifest,
    progress: &mut dyn FnMut(Progress),
) -> Result<VerifyReport, ManifestError> {
    verify_pieces(folder, manifest, manifest.pieces().collect(), progress)
}

/// As [`verify_drive`], for some pieces of the manifest.
pub fn verify_pieces(
    folder: &Path,
    manifest: &DriveManifest,
    pieces: Vec<Piece>,
    progress: &mut dyn FnMut(Progress),
) -> Result<VerifyReport, ManifestError> {
    let mut report = VerifyReport::default();
    let total_bytes = pieces.iter().map(|p| p.key.bytes(manifest.expert_bytes)).fold(0, u64::saturating_add);
    let mut at = Progress { done_bytes: 0, total_bytes };
    let mut buffer = Vec::new();
    let mut open: Option<(PathBuf, Result<File, String>)> = None;
    for piece in pieces {
        let (name, extent) = manifest.locate_piece(&piece);
        let path = folder.join(name);
        let (_, file) = match open.take() {
            Some(same) if same.0 == path => open.insert(same),
            _ => open.insert((path.clone(), open_cold(&path).map_err(|e| e.to_string()))),
        };
        buffer.resize(extent.len as usize, 0);
        let seen = match file {
            Ok(file) => match file.read_exact_at(&mut buffer, extent.offset) {
                Ok(()) => Ok(Digest::of(&buffer)),
                Err(e) => Err(e.to_string()),
            },
            Err(reason) => Err(reason.clone()),
        };
        report.checked += 1;
        report.bytes += if seen.is_ok() { extent.len } else { 0 };
        if seen.as_ref() != Ok(&piece.digest) {
            let what = FaultAt::Expert { key: piece.key, slot: piece.slot };
            report.faults.push(Fault { path, what, offset: extent.offset, expected: piece.digest, seen });
        }
        at.done_bytes += extent.len;
        progress(at);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_as_large_as_it_says_and_the_same_for_a_seed() {
        let all = || (0..1000).collect::<Vec<u32>>();
        assert_eq!(Sample::parse("5%"), Ok(Sample::Share(0.05)));
        assert_eq!(Sample::parse(" 100 "), Ok(Sample::Count(100)));
        for bad in ["", "0", "0%", "101%", "-1%", "5 percent", "1.5"] {
            assert!(Sample::parse(bad).unwrap_err().contains("5%"), "{bad}");
        }
        let five = Sample::Share(0.0501).of(all(), 7);
        assert_eq!(five.len(), 51, "rounded up");
        assert!(five.windows(2).all(|w| w[0] < w[1]));
        assert_eq!(five, Sample::Share(0.0501).of(all(), 7));
        assert_ne!(five, Sample::Share(0.0501).of(all(), 8));
        assert_eq!((Sample::Count(2000).of(all(), 0).len(), Sample::All.of(all(), 0).len()), (1000, 1000));
        let mut seen = vec![0u32; 1000];
        (0..400).for_each(|seed| Sample::Count(100).of(all(), seed).iter().for_each(|&i| seen[i as usize] += 1));
        assert!(seen.iter().all(|&n| (10..90).contains(&n)), "everything has its chance, about 40 times");
    }
}
