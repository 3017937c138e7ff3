//! What an import onto drives has done, as its journal tells it: digests, shards as they were taken, shards deleted.

use super::placed::PlacedError;
use crate::layout::plan::Plan;
use crate::model::checkpoint::Checkpoint;
use crate::model::tensors::TensorSpec;
use crate::store::import::ImportError;
use crate::store::journal::{JOURNAL_FILE, Journal};
use crate::store::manifest::Digest;
use crate::store::trunk::byte_len;
use crate::store::trunk_format::TrunkFormat;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Version of the journal's lines.
const VERSION: u32 = 2;

/// Which import a journal is of. Where drives are mounted does not matter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    version: u32,
    geometry: String,
    /// The plan as it was before it was bound to the model.
    placement: String,
    config: Digest,
    /// Tells the unfinished packs of this import from those of another of the same geometry.
    nonce: String,
    #[serde(default, skip_serializing_if = "TrunkFormat::is_exact")]
    trunk: TrunkFormat,
}

impl Header {
    pub(super) fn new(
        source: &Checkpoint,
        geometry: &str,
        plan: &Plan,
        trunk: TrunkFormat,
    ) -> Result<Self, PlacedError> {
        let bare = Plan { model_id: geometry.into(), store: PathBuf::new(), ..plan.clone() };
        let config = Digest::of(source.config_bytes());
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let seed = format!("{} {}", std::process::id(), since.as_nanos());
        let nonce = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(seed.as_bytes()));
        Ok(Self { version: VERSION, geometry: geometry.into(), placement: bare.hash()?, config, nonce, trunk })
    }

    /// Opens or begins the journal in `store`; returns what was done before, and the name of the folders that unfinished
    /// packs lie in.
    pub(super) fn open_journal(&self, store: &Path) -> Result<(Journal, Done, String), PlacedError> {
        let text = serde_json::to_string(self).map_err(|e| ImportError::io(&store.join(JOURNAL_FILE), e.into()))?;
        let nonce = std::cell::RefCell::new(self.nonce.clone());
        let differs = |text: &str| match serde_json::from_str::<Header>(text) {
            Ok(then) if then == (Header { nonce: then.nonce.clone(), ..self.clone() }) => {
                *nonce.borrow_mut() = then.nonce;
                None
            }
            Ok(then) if then.config != self.config => Some("config.json is another".into()),
            Ok(then) if then.placement != self.placement => Some("the plan is another".into()),
            Ok(then) if then.trunk != self.trunk => {
                Some(format!("its trunk becomes {}, not {}", then.trunk, self.trunk))
            }
            Ok(_) => Some("another version of this program began it".into()),
            Err(_) => Some("it was begun by another command".into()),
        };
        let mut done = Done::default();
        let journal = Journal::begin(store, &text, &differs, &mut |line| done.accept(line).is_some())?;
        let folder = format!("{}-{}", self.geometry, nonce.borrow());
        Ok((journal, done, folder))
    }
}

/// A shard as it was when something was taken from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) bytes: u64,
    pub(super) modified_ns: i64,
}

impl Kept {
    pub(super) fn line(&self, name: &str) -> String {
        format!("shard {} {} {}", self.bytes, self.modified_ns, quoted(name))
    }

    /// Whether the file is there and still the same.
    pub(super) fn is_still(&self, path: &Path) -> std::io::Result<bool> {
        match std::fs::metadata(path) {
            Ok(meta) => {
                let modified_ns = meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec());
                Ok(*self == Kept { bytes: meta.len(), modified_ns })
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }
}

pub(super) fn dropped_line(name: &str) -> String {
    format!("dropped {}", quoted(name))
}

fn quoted(name: &str) -> String {
    serde_json::Value::from(name).to_string()
}

/// A trunk tensor that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TrunkDone {
    pub(super) digest: Digest,
    /// As the shard had it: padded or not.
    pub(super) shape: Vec<u64>,
    pub(super) len: u64,
}

/// Everything that a journal says.
#[derive(Clone, Debug, Default)]
pub(super) struct Done {
    pub(super) trunk: HashMap<u32, TrunkDone>,
    pub(super) experts: HashMap<u32, Digest>,
    pub(super) shards: HashMap<String, Kept>,
    pub(super) dropped: HashSet<String>,
}

impl Done {
    /// Notes a trunk tensor, as it is stored, here and in the journal.
    pub(super) fn note_trunk(&mut self, journal: &mut Journal, n: u32, digest: Digest, spec: &TensorSpec) {
        let len = byte_len(&spec.shape, spec.dtype).unwrap_or(0);
        let dims: Vec<String> = spec.shape.iter().map(u64::to_string).collect();
        journal.note_line(&format!("trunk {n} {} {len} {digest}", dims.join("x")));
        self.trunk.insert(n, TrunkDone { digest, shape: spec.shape.clone(), len });
    }

    /// Takes a line; `None` if it is none.
    fn accept(&mut self, line: &str) -> Option<()> {
        let (kind, rest) = line.split_once(' ')?;
        let digest = |text: &str| Digest::try_from(text.to_string()).ok();
        match kind {
            "trunk" => {
                let words: Vec<&str> = rest.split(' ').collect();
                let [n, dims, len, hash] = words.as_slice() else { return None };
                let shape = dims.split('x').map(|d| d.parse().ok()).collect::<Option<Vec<u64>>>()?;
                self.trunk.insert(n.parse().ok()?, TrunkDone { digest: digest(hash)?, shape, len: len.parse().ok()? });
            }
            "expert" => {
                let (n, hash) = rest.split_once(' ')?;
                self.experts.insert(n.parse().ok()?, digest(hash)?);
            }
            "shard" => {
                let mut words = rest.splitn(3, ' ');
                let kept = Kept { bytes: words.next()?.parse().ok()?, modified_ns: words.next()?.parse().ok()? };
                self.shards.insert(serde_json::from_str(words.next()?).ok()?, kept);
            }
            "dropped" => {
                self.dropped.insert(serde_json::from_str(rest).ok()?);
            }
            _ => return None,
        }
        Some(())
    }
}
