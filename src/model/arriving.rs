//! A checkpoint whose files may still be on their way: shards count from the moment at which they are whole (a header, and
//! as many bytes behind it as it speaks of). What has arrived can be read as from any other checkpoint.

use super::checkpoint::{Checkpoint, Shard, Table, open_config, read_stop_ids, stat_shard};
use super::safetensors::{CheckpointError, read_header};
use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

/// Ending of the file that a download program keeps beside one that it has reserved at full size.
const CONTROL_SUFFIX: &str = ".aria2";

/// A shard that is not whole yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Its file name.
    pub name: String,
    /// Bytes that are there; `None` = no such file.
    pub seen_bytes: Option<u64>,
    /// Bytes that its header speaks of, once that can be read.
    pub expected_bytes: Option<u64>,
}

/// A checkpoint in the making.
pub struct Arriving {
    checkpoint: Checkpoint,
    table: Table,
    taken: Vec<bool>,
    awaited: Vec<Awaited>,
}

impl Arriving {
    /// Reads `config.json` and the index (or notes that there is but one file); no shard has to be there.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let (config_path, config_bytes, config) = open_config(folder)?;
        let stop_ids = read_stop_ids(folder, &config)?;
        let mut table = Table::new(&config, &config_path)?;
        let names = super::shards::names(folder, &mut table)?;
        let (trunk, planes, skipped_vision) = table.known();
        let shards: Vec<Shard> = names.into_iter().map(|name| Shard { name, bytes: 0, modified_ns: 0 }).collect();
        let taken = vec![false; shards.len()];
        let (folder, moe_layers) = (folder.to_path_buf(), table.moe_layers().to_vec());
        let checkpoint =
            Checkpoint { folder, config, config_bytes, stop_ids, shards, trunk, moe_layers, planes, skipped_vision };
        Ok(Self { checkpoint, table, taken, awaited: Vec::new() })
    }

    /// What has arrived; places of the rest are not known.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Looks at every shard that was not whole at the last look, but for those that `gone` names; returns the numbers of
    /// those that are now.
    ///
    /// # Errors
    /// A shard that is whole and wrong, or cannot be read.
    pub fn look(&mut self, gone: &dyn Fn(&str) -> bool) -> Result<Vec<u32>, CheckpointError> {
        let mut fresh = Vec::new();
        self.awaited.clear();
        for index in 0..self.taken.len() {
            let name = self.checkpoint.shards[index].name.clone();
            if self.taken[index] || gone(&name) {
                continue;
            }
            match self.take(index, &name)? {
                None => fresh.push(index as u32),
                Some(awaited) => self.awaited.push(awaited),
            }
        }
        if !fresh.is_empty() {
            let known = self.table.known();
            (self.checkpoint.trunk, self.checkpoint.planes, self.checkpoint.skipped_vision) = known;
        }
        Ok(fresh)
    }

    /// Takes a shard if it is whole; otherwise says how much of it is there.
    fn take(&mut self, index: usize, name: &str) -> Result<Option<Awaited>, CheckpointError> {
        let awaited = |seen_bytes, expected_bytes| Ok(Some(Awaited { name: name.into(), seen_bytes, expected_bytes }));
        let path = self.checkpoint.folder.join(name);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return awaited(None, None),
            Err(source) => return Err(CheckpointError::Io { path, source }),
        };
        let io = |source| CheckpointError::Io { path: path.clone(), source };
        let shard = stat_shard(&self.checkpoint.folder, name).map_err(io)?;
        if self.checkpoint.folder.join(format!("{name}{CONTROL_SUFFIX}")).exists() {
            return awaited(Some(shard.bytes), None);
        }
        let tensors = match read_header(&file, &path) {
            Ok(tensors) => tensors,
            Err(CheckpointError::Truncated { expected, .. }) => {
                return awaited(Some(shard.bytes), (expected > 8).then_some(expected));
            }
            Err(e) => return Err(e),
        };
        // It may have grown while it was read: then it will be taken at the next look.
        if stat_shard(&self.checkpoint.folder, name).map_err(io)? != shard {
            return awaited(Some(shard.bytes), None);
        }
        for tensor in tensors {
            self.table.take(index as u32, &path, &self.checkpoint.shards, tensor)?;
        }
        self.checkpoint.shards[index] = shard;
        self.taken[index] = true;
        Ok(None)
    }

    /// Shards that were not whole at the last look.
    pub fn awaited(&self) -> &[Awaited] {
        &self.awaited
    }

    /// Some of the tensors that no shard was seen to hold, by name without prefix (of an expert one name for its planes).
    pub fn unseen(&self, most: usize) -> Vec<String> {
        self.table.unseen(most)
    }
}
