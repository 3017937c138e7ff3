//! Snapshots of a text as files: a container (magic, version, header, payload, digest of all that is before it) and the folder that
//! holds the newest ones. What header and payload mean is the decoder's (`decode::snapshot`); here they are bytes.
//!
//! A name says when and of which text: `0000000012-1a2b3c4d.snapshot`. Numbers go on for as long as the folder holds any, so
//! that the newest is known without a clock; the second part is the same for every snapshot of a text.

use crate::sys::durable::{sync_folder, write_atomic};
use crate::sys::lock::{Held, try_lock};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Version of snapshots that this program writes, and the newest that it reads.
pub const SNAPSHOT_VERSION: u32 = 1;
/// Snapshots of a text that are kept.
pub const KEPT: usize = 2;
/// How the name of a snapshot ends.
const ENDING: &str = ".snapshot";
const MAGIC: [u8; 8] = *b"ARGOSNAP";
/// Magic, version (u32), bytes of the header (u32) and of the payload (u64), little-endian.
const PREAMBLE_BYTES: usize = 24;
const DIGEST_BYTES: usize = 16;
/// Largest header that is read.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Bytes that are read at once for the digest.
const CHUNK_BYTES: usize = 1 << 20;

/// A snapshot could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file or folder.
    #[error("snapshot {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file was cut, or bytes in it changed.
    #[error("snapshot {}: damaged: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// It was written by a newer program.
    #[error("snapshot {}: format version {seen}, this program reads up to {SNAPSHOT_VERSION}; go on with the argodrive that wrote it", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        seen: u32,
    },
    /// The folder has none.
    #[error("--resume {}: no snapshot is there; decode with --snapshot-every writes them", folder.display())]
    None {
        /// The folder.
        folder: PathBuf,
    },
    /// All that the folder has of its newest text are damaged.
    #[error("--resume {}: every snapshot of the newest text is damaged, so it must be decoded from its prompt again: {reasons}", folder.display())]
    AllDamaged {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with each.
        reasons: String,
    },
    /// Another run writes there.
    #[error("--snapshot-dir {}: another run writes its snapshots there ({held}); give this one a folder of its own", folder.display())]
    Busy {
        /// The folder.
        folder: PathBuf,
        /// Who.
        held: Held,
    },
    /// It belongs to another run than the one that is asked for.
    #[error("--resume {}: {reason}", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What differs, and what to do.
        reason: String,
    },
}

impl SnapshotError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_path_buf(), source }
    }

    fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), reason: reason.into() }
    }
}

/// Bytes of a file with a header and a payload of these sizes.
pub fn file_bytes(header: u64, payload: u64) -> u64 {
    header.saturating_add(payload).saturating_add((PREAMBLE_BYTES + DIGEST_BYTES) as u64)
}

/// Begins a file: what stands before its payload of `payload_bytes`, which the caller appends.
pub fn begin(out: &mut Vec<u8>, header: &[u8], payload_bytes: u64) {
    out.clear();
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&SNAPSHOT_VERSION.to_le_bytes());
    out.extend_from_slice(&(header.len() as u32).to_le_bytes());
    out.extend_from_slice(&payload_bytes.to_le_bytes());
    out.extend_from_slice(header);
}

/// Ends a file with the digest of its bytes.
fn seal(out: &mut Vec<u8>) {
    let digest = xxhash_rust::xxh3::xxh3_128(out);
    out.extend_from_slice(&digest.to_le_bytes());
}

/// A snapshot whose bytes are those that were written.
#[derive(Debug)]
pub struct SnapshotFile {
    path: PathBuf,
    file: File,
    header: Vec<u8>,
    payload_at: u64,
    payload_bytes: u64,
}

impl SnapshotFile {
    /// Opens `path` and checks its digest. Takes memory for a header, never for what the file says of its payload.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        let io = || SnapshotError::io(path);
        let mut file = File::open(path).map_err(io())?;
        let bytes = file.metadata().map_err(io())?.len();
        let least = (PREAMBLE_BYTES + DIGEST_BYTES) as u64;
        let Some(left) = bytes.checked_sub(least) else {
            return Err(SnapshotError::damaged(path, format!("{bytes} bytes; a snapshot has at least {least}")));
        };
        let mut digest = [0; DIGEST_BYTES];
        // Every version ends with the digest: a flipped version is damage, not a newer program.
        if hash(&mut file, bytes - DIGEST_BYTES as u64, &mut digest).map_err(io())? != u128::from_le_bytes(digest) {
            return Err(SnapshotError::damaged(path, "its bytes are not those that were written"));
        }
        file.seek(SeekFrom::Start(0)).map_err(io())?;
        let mut preamble = [0; PREAMBLE_BYTES];
        file.read_exact(&mut preamble).map_err(io())?;
        let (magic, sizes) = preamble.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(SnapshotError::damaged(path, "it does not begin as a snapshot does"));
        }
        let number = |at: usize, len: usize| sizes[at..at + len].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        let (version, header_bytes, payload_bytes) = (number(0, 4) as u32, number(4, 4), number(8, 8));
        if version > SNAPSHOT_VERSION {
            return Err(SnapshotError::Version { path: path.to_path_buf(), seen: version });
        }
        if version == 0 || header_bytes > MAX_HEADER_BYTES || header_bytes.checked_add(payload_bytes) != Some(left) {
            let reason = format!("header of {header_bytes} and payload of {payload_bytes} bytes, of {left}");
            return Err(SnapshotError::damaged(path, reason));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(io())?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            header,
            payload_at: PREAMBLE_BYTES as u64 + header_bytes,
            payload_bytes,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its header.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Bytes of its payload.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Its payload, from the start. The file stays open: whatever becomes of its name, these are the bytes that were checked.
    pub fn payload(&mut self) -> Result<impl Read + '_, SnapshotError> {
        self.file.seek(SeekFrom::Start(self.payload_at)).map_err(SnapshotError::io(&self.path))?;
        Ok((&self.file).take(self.payload_bytes))
    }
}

/// Digest of the next `bytes` of `file`; what comes behind them fills `tail`.
fn hash(file: &mut File, bytes: u64, tail: &mut [u8]) -> io::Result<u128> {
    let mut chunk = vec![0; CHUNK_BYTES.min(bytes as usize)];
    let (mut left, mut hash) = (bytes, Xxh3::new());
    while left > 0 {
        let now = &mut chunk[..CHUNK_BYTES.min(left as usize)];
        file.read_exact(now)?;
        hash.update(now);
        left -= now.len() as u64;
    }
    file.read_exact(tail)?;
    Ok(hash.digest128())
}

/// A snapshot by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Larger is newer.
    pub number: u64,
    /// Which text, the same for all of its snapshots.
    pub text: String,
    /// The file.
    pub path: PathBuf,
}

fn named(path: PathBuf) -> Option<Named> {
    let name = path.file_name()?.to_str()?.strip_suffix(ENDING)?;
    let (number, text) = name.split_once('-')?;
    let number = number.bytes().all(|b| b.is_ascii_digit()).then(|| number.parse().ok())??;
    Some(Named { number, text: text.to_string(), path })
}

/// The snapshots in `folder`, the newest first; none where there is no folder.
pub fn list(folder: &Path) -> Result<Vec<Named>, SnapshotError> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(SnapshotError::io(folder))?,
    };
    let mut all: Vec<Named> = entries.into_iter().filter_map(|e| named(e.path())).collect();
    all.sort_by(|a, b| b.number.cmp(&a.number).then_with(|| a.text.cmp(&b.text)));
    Ok(all)
}

/// A sound snapshot, and those newer than it that are not.
#[derive(Debug)]
pub struct Found {
    /// The file.
    pub file: SnapshotFile,
    /// What is wrong with newer ones of the same text.
    pub passed_over: Vec<String>,
}

/// The file `at`, or the newest sound snapshot of the newest text in the folder `at`.
pub fn find(at: &Path) -> Result<Found, SnapshotError> {
    if at.is_file() {
        return Ok(Found { file: SnapshotFile::open(at)?, passed_over: Vec::new() });
    }
    let all = list(at)?;
    let Some(newest) = all.first() else { return Err(SnapshotError::None { folder: at.to_path_buf() }) };
    let mut passed_over = Vec::new();
    for one in all.iter().filter(|n| n.text == newest.text) {
        match SnapshotFile::open(&one.path) {
            Ok(file) => return Ok(Found { file, passed_over }),
            // an unreadable sector, or another run that has just removed it, is no reason to lose the one before
            Err(e @ (SnapshotError::Damaged { .. } | SnapshotError::Io { .. })) => passed_over.push(e.to_string()),
            Err(e) => return Err(e),
        }
    }
    Err(SnapshotError::AllDamaged { folder: at.to_path_buf(), reasons: passed_over.join("; ") })
}

/// A text that snapshots of another run in a folder are of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherText {
    /// What the names of its snapshots end with.
    pub name: String,
    /// Its snapshots.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A folder that snapshots of one text are written to. No other run writes there meanwhile.
#[derive(Debug)]
pub struct SnapshotFolder {
    path: PathBuf,
    text: String,
    next: u64,
    /// Snapshots of this text that were found damaged: they count for nothing, and go when there is a newer one.
    damaged: Vec<PathBuf>,
    _lock: File,
}

impl SnapshotFolder {
    /// Makes the folder if need be, and clears away what a run left that was killed while it wrote.
    pub fn open(path: &Path, text: &str) -> Result<Self, SnapshotError> {
        let io = || SnapshotError::io(path);
        fs::create_dir_all(path).map_err(io())?;
        if let Some(parent) = path.canonicalize().map_err(io())?.parent() {
            sync_folder(parent).map_err(SnapshotError::io(parent))?;
        }
        let lock = try_lock(path, false).map_err(io())?;
        let lock = lock.map_err(|held| SnapshotError::Busy { folder: path.to_path_buf(), held })?;
        for entry in fs::read_dir(path).and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(io())? {
            // `<name of a snapshot>.<pid>.tmp`
            let name = entry.file_name().to_string_lossy().into_owned();
            let unfinished = name.strip_suffix(".tmp").and_then(|n| n.rsplit_once('.')).map(|(name, _)| name);
            if unfinished.is_some_and(|name| named(PathBuf::from(name)).is_some()) {
                fs::remove_file(entry.path()).map_err(SnapshotError::io(&entry.path()))?;
            }
        }
        let all = list(path)?;
        let next = all.first().map_or(0, |n| n.number.saturating_add(1));
        let own = all.into_iter().filter(|n| n.text == text).map(|n| n.path);
        // not those of a newer program, nor those that cannot be read at the moment
        let is_damaged = |p: &PathBuf| matches!(SnapshotFile::open(p), Err(SnapshotError::Damaged { .. }));
        let damaged = own.filter(is_damaged).collect();
        Ok(Self { path: path.to_path_buf(), text: text.to_string(), next, damaged, _lock: lock })
    }

    /// Bytes of the snapshots of this text that are there.
    pub fn held_bytes(&self) -> u64 {
        let own = list(&self.path).unwrap_or_default();
        let own = own.iter().filter(|n| n.text == self.text).filter_map(|n| fs::metadata(&n.path).ok());
        own.map(|m| m.len()).sum()
    }

    /// Other texts with snapshots there, the newest first. Nothing removes these: whether somebody wants to go on with a text is
    /// in no file.
    pub fn other_texts(&self) -> Vec<OtherText> {
        let mut others: Vec<OtherText> = Vec::new();
        for one in list(&self.path).unwrap_or_default().into_iter().filter(|n| n.text != self.text) {
            let bytes = fs::metadata(&one.path).map_or(0, |m| m.len());
            match others.iter_mut().find(|o| o.name == one.text) {
                Some(other) => (other.files, other.bytes) = (other.files + 1, other.bytes + bytes),
                None => others.push(OtherText { name: one.text, files: 1, bytes }),
            }
        }
        others
    }

    /// Bytes that may be written there.
    pub fn free_bytes(&self) -> Option<u64> {
        crate::sys::space::free_bytes(&self.path).ok()
    }

    /// Seals a snapshot and writes it so that it is there wholly or not at all, then removes the oldest ones of this text.
    pub fn write(&mut self, bytes: &mut Vec<u8>) -> Result<PathBuf, SnapshotError> {
        seal(bytes);
        let path = self.path.join(format!("{:010}-{}{ENDING}", self.next, self.text));
        write_atomic(&path, bytes).map_err(SnapshotError::io(&path))?;
        self.next = self.next.saturating_add(1);
        let own = list(&self.path)?.into_iter().filter(|n| n.text == self.text).map(|n| n.path);
        let sound = own.filter(|p| !self.damaged.contains(p));
        let old: Vec<PathBuf> = sound.skip(KEPT).chain(self.damaged.iter().cloned()).collect();
        for path in &old {
            match fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(SnapshotError::io(path)(e)),
                _ => {}
            }
        }
        self.damaged.clear();
        if !old.is_empty() {
            sync_folder(&self.path).map_err(SnapshotError::io(&self.path))?;
        }
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsealed(header: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        begin(&mut out, header, payload.len() as u64);
        out.extend_from_slice(payload);
        out
    }

    fn sealed(header: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut out = unsealed(header, payload);
        seal(&mut out);
        assert_eq!(out.len() as u64, file_bytes(header.len() as u64, payload.len() as u64));
        out
    }

    #[test]
    fn any_flipped_or_missing_byte_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let good = sealed(b"head", b"payload");
        fs::write(&path, &good).unwrap();
        let mut file = SnapshotFile::open(&path).unwrap();
        let mut back = Vec::new();
        file.payload().unwrap().read_to_end(&mut back).unwrap();
        assert_eq!((file.header(), back.as_slice()), (&b"head"[..], &b"payload"[..]));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            fs::write(&path, &bad).unwrap();
            assert!(matches!(SnapshotFile::open(&path), Err(SnapshotError::Damaged { .. })), "byte {at}");
            fs::write(&path, &good[..at]).unwrap();
            assert!(matches!(SnapshotFile::open(&path), Err(SnapshotError::Damaged { .. })), "cut at {at}");
        }
        // sizes that lie, under a digest that is right, take no memory
        for (at, lie) in [(12, [0xff; 4].to_vec()), (16, [0xff; 8].to_vec()), (16, 6u64.to_le_bytes().to_vec())] {
            let mut bad = good[..good.len() - DIGEST_BYTES].to_vec();
            bad[at..at + lie.len()].copy_from_slice(&lie);
            seal(&mut bad);
            fs::write(&path, &bad).unwrap();
            let e = SnapshotFile::open(&path).unwrap_err().to_string();
            assert!(e.contains("damaged: header of"), "{e}");
        }
        let mut newer = good[..good.len() - DIGEST_BYTES].to_vec();
        newer[8] = 2;
        seal(&mut newer);
        fs::write(&path, &newer).unwrap();
        let e = SnapshotFile::open(&path).unwrap_err().to_string();
        assert!(e.contains("version 2") && e.contains("argodrive that wrote it"), "{e}");
    }

    #[test]
    fn the_newest_two_of_a_text_stay_and_a_damaged_one_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        assert!(matches!(find(&folder), Err(SnapshotError::None { .. })));
        let mut other = SnapshotFolder::open(&folder, "other").unwrap();
        assert!(matches!(SnapshotFolder::open(&folder, "text"), Err(SnapshotError::Busy { .. })));
        other.write(&mut unsealed(b"o", b"")).unwrap();
        drop(other);
        fs::write(folder.join("0000000009-text.snapshot.123.tmp"), "half").unwrap();
        fs::write(folder.join("mine.tmp"), "not ours").unwrap();
        let mut own = SnapshotFolder::open(&folder, "text").unwrap();
        let written: Vec<PathBuf> = (0..3u8).map(|n| own.write(&mut unsealed(b"h", &[n])).unwrap()).collect();
        let numbers: Vec<u64> = list(&folder).unwrap().iter().map(|n| n.number).collect();
        assert_eq!(numbers, [3, 2, 0], "two of this text, and the one of the other");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 4, "the half one is gone");
        assert_eq!(own.held_bytes(), 2 * file_bytes(1, 1));
        let other = OtherText { name: "other".into(), files: 1, bytes: file_bytes(1, 0) };
        assert_eq!(own.other_texts(), [other], "it is told, and stays");
        assert_eq!(find(&folder).unwrap().file.path(), written[2]);
        fs::write(&written[2], "cut").unwrap();
        let found = find(&folder).unwrap();
        assert_eq!((found.file.path(), found.passed_over.len()), (written[1].as_path(), 1));
        assert!(found.passed_over[0].contains("0000000003-text"));
        fs::write(&written[1], "cut").unwrap();
        let e = find(&folder).unwrap_err().to_string();
        assert!(e.contains("must be decoded from its prompt again"), "{e}");
        assert!(matches!(find(&written[1]), Err(SnapshotError::Damaged { .. })), "a file itself has no other");
    }
}
