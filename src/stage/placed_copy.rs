//! The writing part of an import onto drives: what has arrived goes to the trunk and into packs, becomes durable, is named
//! in the journal; and shards whose every part is safe are read back and deleted.

use super::placed::{Event, PlacedError, PlacedReport, Work};
use crate::ids::LayerId;
use crate::layout::plan::Plan;
use crate::model::checkpoint::Checkpoint;
use crate::store::copy::{read_expert, stream_trunk};
use crate::store::identity;
use crate::store::import::{ImportError, publish_store};
use crate::store::journal::Item;
use crate::store::manifest::{DRIVE_FILE, Digest, DriveExpert, DriveManifest, TRUNK_FILE, drive_folder, pack_name};
use crate::store::target::Target;
use crate::store::trunk::byte_len;
use crate::sys::{cache, durable};
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a trunk tensor that are in memory at a time.
const CHUNK_BYTES: usize = 4 << 20;
/// Packs that are open at a time.
const OPEN_PACKS: usize = 64;

impl Work<'_> {
    /// Copies everything that is known and not done.
    pub(super) fn take_known(
        &mut self,
        source: &Checkpoint,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), PlacedError> {
        let mut reader = source.reader();
        let mut buffer = vec![0u8; CHUNK_BYTES.max(self.layout.expert_bytes as usize)];
        for (index, tensor) in source.trunk().iter().enumerate() {
            let n = index as u32;
            if !tensor.place.is_known() || self.done.trunk.contains_key(&n) {
                continue;
            }
            let format = self.layout.trunk;
            let stored = format.stored(&tensor.spec);
            let len = byte_len(&stored.shape, stored.dtype).unwrap_or(u64::MAX);
            let from = self.layout.trunk_offsets[index];
            let until = self.layout.trunk_offsets.get(index + 1).copied().unwrap_or(self.layout.trunk_file_bytes);
            if len > until - from {
                return Err(PlacedError::Refused(format!(
                    "tensor {} is stored longer than a head is wide; import it without --plan",
                    tensor.spec.name
                )));
            }
            let target = match &mut self.trunk {
                Some(target) => target,
                None => self.trunk.insert(Target::open(&self.store.join(TRUNK_FILE), self.layout.trunk_file_bytes)?),
            };
            let at = &mut self.at;
            let digest =
                stream_trunk(source, &mut reader, tensor, format, &mut buffer[..CHUNK_BYTES], &mut |skip, bytes| {
                    target.write(from + skip, bytes)?;
                    at.done_bytes += bytes.len() as u64;
                    events(Event::Progress(*at));
                    Ok(())
                })?;
            self.written.1 += len;
            self.done.note_trunk(&mut self.journal, n, digest, &stored);
            self.commit_if_full()?;
        }
        let expert_bytes = self.layout.expert_bytes as usize;
        for n in 0..self.layout.expert_count as u32 {
            if self.done.experts.contains_key(&n) {
                continue;
            }
            let Some((layer, expert)) = self.key(source, n) else { continue };
            if !source.planes(layer, expert).is_some_and(|planes| planes.iter().all(|p| p.is_known())) {
                continue;
            }
            let bytes = &mut buffer[..expert_bytes];
            read_expert(source, &mut reader, layer, expert, bytes)?;
            for (drive, slot) in self.homes(layer, expert) {
                let offset = u64::from(slot) * self.slot_bytes();
                self.pack(drive, layer)?.write(offset, bytes)?;
                self.written.1 += expert_bytes as u64;
            }
            let digest = Digest::of(bytes);
            self.journal.note(Item::Expert(n), digest);
            self.done.experts.insert(n, digest);
            self.written.0 += 1;
            self.at.done_bytes += expert_bytes as u64;
            events(Event::Progress(self.at));
            self.commit_if_full()?;
        }
        Ok(())
    }

    /// The open pack of a layer on a drive.
    fn pack(&mut self, drive: usize, layer: LayerId) -> Result<&mut Target, PlacedError> {
        if self.packs.len() >= OPEN_PACKS && !self.packs.contains_key(&(drive, layer)) {
            self.commit()?;
        }
        let len = self.pack_bytes(drive, layer);
        let folder = &self.folders[drive];
        match self.packs.entry((drive, layer)) {
            Entry::Occupied(open) => Ok(open.into_mut()),
            Entry::Vacant(free) => {
                make_folder(folder)?;
                Ok(free.insert(Target::open(&folder.join(pack_name(layer)), len)?))
            }
        }
    }

    fn commit_if_full(&mut self) -> Result<(), PlacedError> {
        let dirty: u64 = self.packs.values().chain(&self.trunk).map(Target::dirty_bytes).sum();
        if dirty >= self.options.batch_bytes { self.commit() } else { Ok(()) }
    }

    /// Makes everything written durable, then the journal; lets go of pages and closes the packs.
    pub(super) fn commit(&mut self) -> Result<(), PlacedError> {
        self.packs.values_mut().chain(&mut self.trunk).try_for_each(Target::sync)?;
        self.journal.commit()?;
        self.packs.values_mut().chain(&mut self.trunk).for_each(Target::let_go);
        self.packs.clear();
        Ok(())
    }

    /// Deletes the shards of which everything is done, after reading it back.
    pub(super) fn drop_done(
        &mut self,
        source: &Checkpoint,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), PlacedError> {
        for (index, shard) in source.shards().iter().enumerate() {
            let path = source.shard_path(index as u32);
            let Some(kept) = self.done.shards.get(&shard.name) else { continue };
            let there = kept.is_still(&path).map_err(|e| ImportError::io(&path, e))?;
            if !self.done.dropped.contains(&shard.name) {
                if !there || !self.is_safe(source, index as u32)? {
                    continue;
                }
                self.done.dropped.insert(shard.name.clone());
                self.journal.note_line(&super::placed_state::dropped_line(&shard.name));
                self.journal.commit()?;
            }
            if there {
                std::fs::remove_file(&path).map_err(|e| ImportError::io(&path, e))?;
                let folder = source.folder();
                durable::sync_folder(folder).map_err(|e| ImportError::io(folder, e))?;
                self.dropped.push(shard.name.clone());
                events(Event::Dropped(&shard.name));
            }
        }
        Ok(())
    }

    /// Whether everything in a shard is done; then it is read back past the page cache, and an error if it is not as the
    /// journal says.
    fn is_safe(&self, source: &Checkpoint, shard: u32) -> Result<bool, PlacedError> {
        let mut trunk = Vec::new();
        for (index, tensor) in source.trunk().iter().enumerate() {
            if tensor.place.shard == shard {
                match self.done.trunk.get(&(index as u32)) {
                    Some(done) => trunk.push((self.layout.trunk_offsets[index], done.len, done.digest)),
                    None => return Ok(false),
                }
            }
        }
        let mut experts = Vec::new();
        for n in 0..self.layout.expert_count as u32 {
            let Some((layer, expert)) = self.key(source, n) else { continue };
            if source.planes(layer, expert).is_some_and(|planes| planes.iter().any(|p| p.shard == shard)) {
                match self.done.experts.get(&n) {
                    Some(digest) => experts.push((layer, expert, *digest)),
                    None => return Ok(false),
                }
            }
        }
        let mut back = ReadBack { open: None, buffer: Vec::new() };
        let path = self.store.join(TRUNK_FILE);
        for (offset, len, digest) in trunk {
            back.check(&path, offset, len, digest)?;
        }
        for (layer, expert, digest) in experts {
            for (drive, slot) in self.homes(layer, expert) {
                let path = self.folders[drive].join(pack_name(layer));
                back.check(&path, u64::from(slot) * self.slot_bytes(), self.layout.expert_bytes, digest)?;
            }
        }
        Ok(true)
    }

    /// Everything is on the drives: manifests, names, the plan, the store.
    pub(super) fn finish(self, source: &Checkpoint, plan_file: &Path) -> Result<PlacedReport, PlacedError> {
        for (name, kept) in self.done.shards.iter().filter(|(name, _)| !self.done.dropped.contains(*name)) {
            let path = source.folder().join(name);
            if !kept.is_still(&path).map_err(|e| ImportError::io(&path, e))? {
                let reason = "changed while it was being imported; remove the store's folder and import again".into();
                return Err(ImportError::Target { path, reason }.into());
            }
        }
        let (manifest, all) = self.identify(source);
        if !identity::is_provisional(&self.plan.model_id) && self.plan.model_id != manifest.model_id {
            return Err(PlacedError::Refused(format!(
                "the plan is for model {}, the checkpoint holds {}; make one with `argodrive plan --checkpoint`",
                self.plan.model_id, manifest.model_id
            )));
        }
        for (drive, packs) in self.slots.iter().enumerate() {
            let mut own = DriveManifest::empty(&manifest.model_id, self.layout.expert_bytes);
            for (&layer, experts) in packs {
                let entries = experts.iter().enumerate().filter_map(|(slot, &expert)| {
                    let digest = all.find(layer, expert)?.digest;
                    Some(DriveExpert { expert, slot: slot as u32, digest })
                });
                own.layers.insert(layer, entries.collect());
            }
            let (now, named) = (&self.folders[drive], drive_folder(&self.mounts[drive], &manifest.model_id));
            make_folder(now)?;
            own.save(now)?;
            if *now != named {
                rename(now, &named)?;
            }
        }
        let own = drive_folder(self.store, &manifest.model_id);
        if !own.join(DRIVE_FILE).exists() {
            // the store holds no expert, and says so; its folder may be there from a run that was killed here
            make_folder(&own)?;
            DriveManifest::empty(&manifest.model_id, self.layout.expert_bytes).save(&own)?;
        }
        let store = self.store.canonicalize().map_err(|e| ImportError::io(self.store, e))?;
        let plan = Plan { model_id: manifest.model_id.clone(), store, ..self.plan.clone() };
        durable::write_atomic(plan_file, plan.to_json()?.as_bytes()).map_err(|e| ImportError::io(plan_file, e))?;
        let side_files = publish_store(source, self.store, &manifest)?;
        self.journal.remove()?;
        Ok(PlacedReport {
            manifest,
            plan,
            was_complete: false,
            experts_written: self.written.0,
            experts_reused: self.reused,
            bytes_written: self.written.1,
            dropped: self.dropped,
            side_files,
        })
    }
}

/// Makes a drive folder whose name stays.
fn make_folder(folder: &Path) -> Result<(), ImportError> {
    if folder.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(folder).map_err(|e| ImportError::io(folder, e))?;
    let above = folder.ancestors().skip(1).take(2);
    above.into_iter().try_for_each(|f| durable::sync_folder(f).map_err(|e| ImportError::io(f, e)))
}

fn rename(now: &Path, named: &Path) -> Result<(), ImportError> {
    std::fs::rename(now, named).map_err(|e| match e.kind() {
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => ImportError::Target {
            path: named.to_path_buf(),
            reason: "a drive folder of this model is already here; move it away and run again".into(),
        },
        _ => ImportError::io(named, e),
    })?;
    let parent = named.parent().unwrap_or(named);
    durable::sync_folder(parent).map_err(|e| ImportError::io(parent, e))
}

/// Reads what was written, from the drive and not from memory.
struct ReadBack {
    open: Option<(std::path::PathBuf, File)>,
    buffer: Vec<u8>,
}

impl ReadBack {
    fn check(&mut self, path: &Path, offset: u64, len: u64, digest: Digest) -> Result<(), PlacedError> {
        let io = |e| ImportError::io(path, e);
        if self.open.as_ref().is_none_or(|(open, _)| open != path) {
            let file = File::open(path).map_err(io)?;
            // What lies in the page cache proves nothing about the drive. All of it was synced, so all of it can go.
            cache::drop_file(&file).map_err(io)?;
            self.open = Some((path.to_path_buf(), file));
        }
        let Some((_, file)) = &self.open else { return Ok(()) };
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(CHUNK_BYTES as u64);
            self.buffer.resize(piece as usize, 0);
            file.read_exact_at(&mut self.buffer, offset + done).map_err(io)?;
            hash.update(&self.buffer);
            done += piece;
        }
        let _ = cache::drop_pages(file, offset, len);
        let seen = Digest(hash.digest128());
        if seen == digest {
            return Ok(());
        }
        Err(PlacedError::Refused(format!(
            "{} at offset {offset}: digest {seen}, written was {digest}; the drive did not keep what was written. Its shard is \
             kept: check the drive, remove this file and run the same command again",
            path.display()
        )))
    }
}
