//! Which files a checkpoint consists of: its one file, or what its index names. The index is outside data: names that
//! leave the folder are refused, and it is read entry by entry because K3's has half a million.

use super::checkpoint::{Cell, INDEX_FILE, SINGLE_FILE, Shard, Slot, Table, stat_shard};
use super::safetensors::{CheckpointError, is_lfs_pointer};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Component, Path};

/// Largest index accepted (K3's has about 60 MB).
const MAX_INDEX_BYTES: u64 = 512 << 20;
/// Most shards (K3 has 96).
const MAX_SHARDS: usize = 4096;

/// The files of the checkpoint in `folder`; what the index says of each tensor is entered in `table`.
pub(super) fn find(folder: &Path, table: &mut Table) -> Result<Vec<Shard>, CheckpointError> {
    let index_path = folder.join(INDEX_FILE);
    let bad = |reason: String| CheckpointError::Index { path: index_path.clone(), reason };
    let indexed = index_path.exists();
    let stat = |name: String| {
        stat_shard(folder, &name).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound if indexed => {
                bad(format!("names shard {name}, which is not in the folder; fetch it"))
            }
            std::io::ErrorKind::NotFound => CheckpointError::NotACheckpoint {
                folder: folder.to_path_buf(),
                reason: format!("neither {SINGLE_FILE} nor {INDEX_FILE} is here"),
            },
            _ => CheckpointError::io(&folder.join(&name))(e),
        })
    };
    names(folder, table)?.into_iter().map(stat).collect()
}

/// The names of the files that the checkpoint in `folder` has or, by its index, will have.
pub(super) fn names(folder: &Path, table: &mut Table) -> Result<Vec<String>, CheckpointError> {
    let index_path = folder.join(INDEX_FILE);
    match index_path.exists() {
        true => from_index(&index_path, table),
        false => Ok(vec![SINGLE_FILE.to_string()]),
    }
}

fn from_index(path: &Path, table: &mut Table) -> Result<Vec<String>, CheckpointError> {
    let bad = |reason: String| CheckpointError::Index { path: path.to_path_buf(), reason };
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    let bytes = file.metadata().map_err(CheckpointError::io(path))?.len();
    if bytes > MAX_INDEX_BYTES {
        return Err(bad(format!("{bytes} bytes; at most {MAX_INDEX_BYTES} are accepted")));
    }
    let mut listing = Listing { table, names: Vec::new(), ids: HashMap::new(), text: Vec::new(), vision: Vec::new() };
    let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 16, file));
    Root(&mut listing).deserialize(&mut json).and_then(|()| json.end()).map_err(|e| {
        // a pointer is the likeliest reason for a file that is not JSON
        let mut start = Vec::new();
        let _ = File::open(path).and_then(|file| file.take(64).read_to_end(&mut start));
        if is_lfs_pointer(&start) {
            CheckpointError::LfsPointer { path: path.to_path_buf() }
        } else {
            bad(format!("not a valid index: {e}"))
        }
    })?;
    let Listing { names, text, vision, .. } = listing;
    table.indexed = true;
    let mut shards = Vec::new();
    let mut renumbered = vec![super::checkpoint::NO_SHARD; names.len()];
    for (old, name) in names.iter().enumerate() {
        if text[old] == 0 {
            // a shard of vision tensors only is not needed and may well not have been fetched
            table.skip_vision(vision[old]);
            continue;
        }
        renumbered[old] = shards.len() as u32;
        shards.push(name.clone());
    }
    table.renumber(&renumbered);
    Ok(shards)
}

/// What has been read of an index so far.
struct Listing<'a> {
    table: &'a mut Table,
    names: Vec<String>,
    ids: HashMap<String, usize>,
    text: Vec<u64>,
    vision: Vec<u64>,
}

impl Listing<'_> {
    fn add(&mut self, tensor: &str, shard: &str) -> Result<(), String> {
        let id = match self.ids.get(shard) {
            Some(&id) => id,
            None => {
                let mut parts = Path::new(shard).components();
                let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(n)), None) if n == shard);
                if !plain {
                    return Err(format!("tensor {tensor}: shard name `{shard}` leads out of the folder"));
                }
                if self.names.len() == MAX_SHARDS {
                    return Err(format!("more than {MAX_SHARDS} shards"));
                }
                self.names.push(shard.to_string());
                self.ids.insert(shard.to_string(), self.names.len() - 1);
                self.text.push(0);
                self.vision.push(0);
                self.names.len() - 1
            }
        };
        let slot = self
            .table
            .resolve(tensor)
            .ok_or_else(|| format!("names tensor {tensor}, which this model's configuration does not have"))?;
        if let Slot::Vision = slot {
            self.vision[id] += 1;
            return Ok(());
        }
        self.text[id] += 1;
        if let Some(cell) = self.table.cell(&slot) {
            if cell.shard != super::checkpoint::NO_SHARD {
                return Err(format!("names tensor {tensor} twice"));
            }
            cell.shard = id as u32;
        }
        Ok(())
    }
}

struct Root<'a, 'b>(&'a mut Listing<'b>);

impl<'de> DeserializeSeed<'de> for Root<'_, '_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Root<'_, '_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a `weight_map`")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "weight_map" && !seen {
                map.next_value_seed(Weights(&mut *self.0))?;
                seen = true;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if seen { Ok(()) } else { Err(serde::de::Error::missing_field("weight_map")) }
    }
}

struct Weights<'a, 'b>(&'a mut Listing<'b>);

impl<'de> DeserializeSeed<'de> for Weights<'_, '_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Weights<'_, '_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to shard names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
            self.0.add(&tensor, &shard).map_err(serde::de::Error::custom)?;
        }
        Ok(())
    }
}

impl Table {
    /// Replaces shard numbers after shards without text tensors have been dropped.
    fn renumber(&mut self, new: &[u32]) {
        let change = |cell: &mut Cell| {
            if let Some(&id) = new.get(cell.shard as usize) {
                cell.shard = id;
            }
        };
        self.cells_mut().for_each(change);
    }
}
