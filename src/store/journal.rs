//! The journal of an import: what has reached the disk, line by line. A line is written only after the data it names
//! has been synced, and carries a check value, so that a torn tail is recognised and cut off. Its first line says which
//! checkpoint the import is of. Knows nothing of how data is copied.

use super::import::ImportError;
use super::manifest::Digest;
use super::trunk_format::TrunkFormat;
use crate::model::checkpoint::{Checkpoint, Shard};
use crate::sys::lock::Held;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// File name of the journal inside a store that is being made.
pub const JOURNAL_FILE: &str = "import.journal";
/// Version of the journal's lines. An unfinished import of another version has to be started again.
const VERSION: u32 = 1;
/// Longest journal accepted (K3's has about 5 MB).
const MAX_JOURNAL_BYTES: u64 = 256 << 20;

/// A part of a store that is either done or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Item {
    /// The n-th trunk tensor of the manifest.
    Trunk(u32),
    /// The n-th expert, counted over all MoE layers in order.
    Expert(u32),
}

/// Which checkpoint an import is of.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    version: u32,
    config: Digest,
    table: Digest,
    shards: Vec<(String, u64, i64)>,
    /// What the trunk is turned into.
    #[serde(default, skip_serializing_if = "TrunkFormat::is_exact")]
    trunk: TrunkFormat,
}

impl Header {
    fn of(checkpoint: &Checkpoint, trunk: TrunkFormat) -> Self {
        let row = |s: &Shard| (s.name.clone(), s.bytes, s.modified_ns);
        Self {
            version: VERSION,
            config: Digest::of(checkpoint.config_bytes()),
            table: super::identity::table_digest(checkpoint),
            shards: checkpoint.shards().iter().map(row).collect(),
            trunk,
        }
    }

    /// How `self` (in the journal) differs from `now`; `None` when it does not.
    fn difference(&self, now: &Header) -> Option<String> {
        if self.version != now.version {
            return Some(format!("its journal has version {}, this program writes {}", self.version, now.version));
        }
        if self.config != now.config {
            return Some("config.json is another".into());
        }
        if self.table != now.table {
            return Some("the tensors are others".into());
        }
        if self.trunk != now.trunk {
            return Some(format!("its trunk becomes {}, not {}", self.trunk, now.trunk));
        }
        if self.shards.len() != now.shards.len() {
            return Some(format!("it had {} shards, now there are {}", self.shards.len(), now.shards.len()));
        }
        let changed = self.shards.iter().zip(&now.shards).find(|(a, b)| a != b)?;
        Some(format!("shard {} has another name, size or modification time", changed.1.0))
    }
}

/// An open journal, locked against a second import into the same store.
pub struct Journal {
    file: File,
    path: PathBuf,
    pending: String,
    fresh: bool,
}

impl Journal {
    /// Opens or begins the journal of an import of `checkpoint` into `store`; returns what was done before.
    pub fn open(
        store: &Path,
        checkpoint: &Checkpoint,
        trunk: TrunkFormat,
    ) -> Result<(Self, Vec<(Item, Digest)>), ImportError> {
        let now = Header::of(checkpoint, trunk);
        let text = serde_json::to_string(&now).map_err(|e| ImportError::io(&store.join(JOURNAL_FILE), e.into()))?;
        let differs = |text: &str| match serde_json::from_str::<Header>(text) {
            Ok(then) => then.difference(&now),
            Err(_) => Some("it was begun by another command or another version of this program".into()),
        };
        let mut items = Vec::new();
        let mut accept = |line: &str| parse_item(line).map(|item| items.push(item)).is_some();
        let journal = Self::begin(store, &text, &differs, &mut accept)?;
        Ok((journal, items))
    }

    /// Opens or begins a journal whose first line is `header`. `differs` says how the header that is there differs from it,
    /// if it does; `accept` is given every other line, and from the first that it refuses on nothing is believed.
    pub fn begin(
        store: &Path,
        header: &str,
        differs: &dyn Fn(&str) -> Option<String>,
        accept: &mut dyn FnMut(&str) -> bool,
    ) -> Result<Self, ImportError> {
        let path = store.join(JOURNAL_FILE);
        let io = |source| ImportError::io(&path, source);
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ImportError::Busy { store: store.to_path_buf(), held: Held::by(&file) });
            }
            Err(TryLockError::Error(e)) => return Err(io(e)),
        }
        if file.metadata().map_err(io)?.len() > MAX_JOURNAL_BYTES {
            return Err(io(std::io::ErrorKind::FileTooLarge.into()));
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        let mut lines = bytes.split_inclusive(|b| *b == b'\n');
        let first = lines.next().and_then(|line| checked_line(line).map(|text| (text, line.len())));
        let fresh = first.is_none();
        let mut valid = 0;
        if let Some((text, len)) = first {
            if let Some(reason) = differs(text) {
                return Err(ImportError::OtherCheckpoint { store: store.to_path_buf(), reason });
            }
            valid = len;
            for line in lines {
                match checked_line(line) {
                    Some(text) if accept(text) => valid += line.len(),
                    _ => break,
                }
            }
        }
        file.set_len(valid as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(io)?;
        let mut journal = Self { file, path, pending: String::new(), fresh };
        if fresh {
            journal.note_line(header);
            journal.commit()?;
            crate::sys::durable::sync_folder(store).map_err(|e| ImportError::io(store, e))?;
        }
        Ok(journal)
    }

    /// Remembers a line of another kind than [`Item`]s.
    pub fn note_line(&mut self, text: &str) {
        push_line(&mut self.pending, text);
    }

    /// Whether this import begins here (nothing was done before).
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Remembers that `item` has been written; it counts from the next [`Journal::commit`] on.
    pub fn note(&mut self, item: Item, digest: Digest) {
        let line = match item {
            Item::Trunk(n) => format!("trunk {n} {digest}"),
            Item::Expert(n) => format!("expert {n} {digest}"),
        };
        push_line(&mut self.pending, &line);
    }

    /// Writes and syncs what was noted. The data itself must have been synced before.
    pub fn commit(&mut self) -> Result<(), ImportError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let written = self.file.write_all(self.pending.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|e| ImportError::io(&self.path, e))?;
        self.pending.clear();
        Ok(())
    }

    /// Removes the journal: the import is finished, or never began.
    pub fn remove(self) -> Result<(), ImportError> {
        std::fs::remove_file(&self.path).map_err(|e| ImportError::io(&self.path, e))
    }
}

/// Adds a line with its check value.
pub(crate) fn push_line(out: &mut String, text: &str) {
    out.push_str(text);
    out.push_str(&format!(" {:016x}\n", xxhash_rust::xxh3::xxh3_64(text.as_bytes())));
}

/// The text of a line whose check value is right.
pub(crate) fn checked_line(line: &[u8]) -> Option<&str> {
    let (text, check) = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?.rsplit_once(' ')?;
    let check = u64::from_str_radix(check, 16).ok()?;
    (check == xxhash_rust::xxh3::xxh3_64(text.as_bytes())).then_some(text)
}

fn parse_item(text: &str) -> Option<(Item, Digest)> {
    let mut words = text.split(' ');
    let (kind, number, digest) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
    let item = match kind {
        "trunk" => Item::Trunk(number),
        "expert" => Item::Expert(number),
        _ => return None,
    };
    Some((item, Digest::try_from(digest.to_string()).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn mini() -> Checkpoint {
        Checkpoint::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/argo-mini-draft")).unwrap()
    }

    #[test]
    fn a_torn_tail_loses_only_what_follows_the_tear() {
        let dir = tempfile::tempdir().unwrap();
        let source = mini();
        let (mut journal, done) = Journal::open(dir.path(), &source, TrunkFormat::Bf16).unwrap();
        assert!(journal.is_fresh() && done.is_empty());
        for n in 0..4 {
            journal.note(Item::Expert(n), Digest(u128::from(n)));
        }
        journal.note(Item::Trunk(9), Digest(7));
        journal.commit().unwrap();
        drop(journal);
        let path = dir.path().join(JOURNAL_FILE);
        let whole = std::fs::read(&path).unwrap();
        let header = whole.iter().position(|b| *b == b'\n').unwrap() + 1;
        let line = (whole.len() - header) / 5;
        for cut in header..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (_, done) = Journal::open(dir.path(), &source, TrunkFormat::Bf16).unwrap();
            let lines = whole[header..cut].iter().filter(|b| **b == b'\n').count();
            assert_eq!(done.len(), lines);
            assert!(lines >= (cut - header) / (line + 2));
        }
        let mut flipped = whole.clone();
        flipped[header + line + 9] ^= 1;
        std::fs::write(&path, &flipped).unwrap();
        let (_, done) = Journal::open(dir.path(), &source, TrunkFormat::Bf16).unwrap();
        assert_eq!(done, [(Item::Expert(0), Digest(0))], "nothing after a damaged line is believed");
    }

    #[test]
    fn a_second_import_into_the_same_store_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let source = mini();
        let held = Journal::open(dir.path(), &source, TrunkFormat::Bf16).unwrap();
        assert!(matches!(Journal::open(dir.path(), &source, TrunkFormat::Bf16), Err(ImportError::Busy { .. })));
        drop(held);
        let other = Journal::open(dir.path(), &source, TrunkFormat::Int8).err().unwrap().to_string();
        assert!(other.contains("its trunk becomes bf16, not int8"), "{other}");
        assert!(!Journal::open(dir.path(), &source, TrunkFormat::Bf16).unwrap().0.is_fresh());
    }
}
