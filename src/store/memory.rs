//! Every expert in memory: the reference source that runs are compared with, and the fastest one for models that fit.
//! Hands experts over in the order asked, without waiting and without allocating.

use super::copy::read_expert;
use super::import::ImportError;
use super::manifest::{Digest, DriveManifest, ManifestError, StoreManifest, drive_folder};
use super::trunk::Trunk;
use crate::ids::{ExpertId, ExpertKey, LayerId};
use crate::model::checkpoint::Checkpoint;
use crate::source::{ExpertSource, Lease, LeaseOwner, SourceError, StepInfo};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// All experts, back to back; a lease's slot counts them.
struct Experts {
    bytes: Vec<u8>,
    expert_bytes: usize,
}

impl LeaseOwner for Experts {
    fn bytes(&self, slot: u32, len: usize) -> &[u8] {
        let start = slot as usize * self.expert_bytes;
        &self.bytes[start..start + len]
    }

    // nothing is ever evicted, so there is nothing to give back
    fn release(&self, _slot: u32) {}
}

/// An [`ExpertSource`] that holds every expert in memory.
pub struct InMemory {
    experts: Arc<Experts>,
    /// Slot of expert 0 .. n of each layer; `u32::MAX` where there is none.
    slots: BTreeMap<LayerId, Vec<u32>>,
    queue: Vec<(ExpertId, u32)>,
    next: usize,
    leases: u64,
}

/// Marks an expert that is not there.
const ABSENT: u32 = u32::MAX;

impl InMemory {
    /// Loads all experts of the store in `folder` and checks each against its digest.
    pub fn load(folder: &Path, manifest: &StoreManifest) -> Result<Self, ManifestError> {
        let folder = drive_folder(folder, &manifest.model_id);
        let drive = DriveManifest::open(&folder)?;
        let inconsistent =
            |path: &Path, reason: String| ManifestError::Inconsistent { path: path.to_path_buf(), reason };
        if drive.model_id != manifest.model_id || drive.expert_bytes != manifest.expert_bytes {
            return Err(inconsistent(&folder, "drive.json is of another model than store.json".into()));
        }
        let keys = drive.layers.iter().flat_map(|(&layer, row)| row.iter().map(move |e| (layer, e.expert)));
        let mut memory = Self::with_room(drive.expert_bytes, keys).map_err(|reason| inconsistent(&folder, reason))?;
        let mut slot = 0;
        for (&layer, row) in &drive.layers {
            let mut open: Option<(String, File)> = None;
            for entry in row {
                let (name, extent) = drive.locate(layer, entry);
                let path = folder.join(&name);
                let io = |source| ManifestError::Io { path: path.clone(), source };
                let (_, file) = match open.take() {
                    Some(same) if same.0 == name => open.insert(same),
                    _ => open.insert((name, File::open(&path).map_err(io)?)),
                };
                let bytes = memory.slot_mut(slot);
                file.read_exact_at(bytes, extent.offset).map_err(io)?;
                let seen = Digest::of(bytes);
                if seen != entry.digest {
                    let reason = format!(
                        "expert {layer}-{}, slot {}, offset {}: digest {seen}, expected {}; import the checkpoint again",
                        entry.expert, entry.slot, extent.offset, entry.digest
                    );
                    return Err(inconsistent(&path, reason));
                }
                slot += 1;
            }
        }
        Ok(memory.finish())
    }

    /// Loads all experts of a checkpoint without making a store.
    pub fn from_checkpoint(source: &Checkpoint) -> Result<Self, ImportError> {
        let experts = source.experts() as u16;
        let keys = source.moe_layers().iter().flat_map(|&l| (0..experts).map(move |e| (l, ExpertId(e))));
        let too_large = |reason| ImportError::Target { path: source.folder().to_path_buf(), reason };
        let mut memory = Self::with_room(source.expert_bytes(), keys.clone()).map_err(too_large)?;
        let mut reader = source.reader();
        for (slot, (layer, expert)) in keys.enumerate() {
            read_expert(source, &mut reader, layer, expert, memory.slot_mut(slot))?;
        }
        Ok(memory.finish())
    }

    /// Bytes held.
    pub fn resident_bytes(&self) -> u64 {
        self.experts.bytes.len() as u64
    }

    /// Experts handed out so far.
    pub fn leases(&self) -> u64 {
        self.leases
    }

    /// The bytes of one expert, if it is held.
    pub fn expert(&self, key: ExpertKey) -> Option<&[u8]> {
        let slot = *self.slots.get(&key.layer)?.get(key.expert.index()).filter(|s| **s != ABSENT)?;
        Some(self.experts.bytes(slot, self.experts.expert_bytes))
    }

    fn with_room(expert_bytes: u64, keys: impl Iterator<Item = (LayerId, ExpertId)>) -> Result<Filling, String> {
        let mut slots: BTreeMap<LayerId, Vec<u32>> = BTreeMap::new();
        let mut count = 0u32;
        for (layer, expert) in keys {
            let row = slots.entry(layer).or_default();
            row.resize(row.len().max(expert.index() + 1), ABSENT);
            row[expert.index()] = count;
            count += 1;
        }
        let total = expert_bytes.checked_mul(u64::from(count)).and_then(|t| usize::try_from(t).ok());
        let mut bytes = Vec::new();
        let refused = || format!("{count} experts of {expert_bytes} bytes do not fit in memory");
        bytes.try_reserve_exact(total.ok_or_else(refused)?).map_err(|_| refused())?;
        bytes.resize(total.unwrap_or(0), 0);
        Ok(Filling { bytes, expert_bytes: expert_bytes as usize, slots })
    }
}

/// An [`InMemory`] whose bytes are still being read.
struct Filling {
    bytes: Vec<u8>,
    expert_bytes: usize,
    slots: BTreeMap<LayerId, Vec<u32>>,
}

impl Filling {
    fn slot_mut(&mut self, slot: usize) -> &mut [u8] {
        let start = slot * self.expert_bytes;
        &mut self.bytes[start..start + self.expert_bytes]
    }

    fn finish(self) -> InMemory {
        let widest = self.slots.values().map(Vec::len).max().unwrap_or(0);
        InMemory {
            experts: Arc::new(Experts { bytes: self.bytes, expert_bytes: self.expert_bytes }),
            slots: self.slots,
            queue: Vec::with_capacity(widest),
            next: 0,
            leases: 0,
        }
    }
}

impl ExpertSource for InMemory {
    fn open_barrier(&mut self, _step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        self.close_barrier();
        let row = self.slots.get(&layer);
        for &expert in experts {
            match row.and_then(|row| row.get(expert.index())) {
                Some(&slot) if slot != ABSENT => self.queue.push((expert, slot)),
                _ => {
                    self.queue.clear();
                    return Err(SourceError::Unknown(format!("expert {layer}-{expert} is not in memory")));
                }
            }
        }
        Ok(())
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        let Some(&(expert, slot)) = self.queue.get(self.next) else { return Ok(None) };
        self.next += 1;
        self.leases += 1;
        let owner: Arc<dyn LeaseOwner> = self.experts.clone();
        Ok(Some(Lease::new(expert, owner, slot, 0, self.experts.expert_bytes as u32)))
    }

    fn at_hand(&self) -> usize {
        self.queue.len() - self.next
    }

    fn close_barrier(&mut self) {
        self.queue.clear();
        self.next = 0;
    }
}

/// The trunk of a checkpoint in memory, without making a store.
pub fn trunk_of_checkpoint(source: &Checkpoint) -> Result<Trunk, ImportError> {
    let mut reader = source.reader();
    let mut loaded = Vec::with_capacity(source.trunk().len());
    for tensor in source.trunk() {
        let mut bytes = vec![0u8; tensor.place.extent.len as usize];
        reader.read(&tensor.place, 0, &mut bytes)?;
        loaded.push(bytes);
    }
    let rows = source.trunk().iter().zip(&loaded);
    Ok(Trunk::from_tensors(rows.map(|(t, b)| (t.spec.name.clone(), t.spec.dtype, t.spec.shape.clone(), b.as_slice()))))
}
