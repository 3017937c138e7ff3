//! From a checkpoint to a store: copies the trunk and every expert in bounded memory, one thread, plain positional
//! reads. A kill at any moment loses at most the batch that was not yet in the journal, and nothing looks finished
//! until `store.json`, which is written last.

use super::copy::{manifests, read_ahead, read_expert, stream_trunk};
pub use super::import_error::ImportError;
use super::journal::{Item, JOURNAL_FILE, Journal};
use super::manifest::{Digest, DriveManifest, STORE_FILE, StoreManifest, TRUNK_FILE, drive_folder, pack_name};
use super::target::Target;
use super::trunk_format::TrunkFormat;
use super::{confirm, identity, trunk};
use crate::ids::{ExpertId, LayerId};
use crate::model::checkpoint::{CONFIG_FILE, Checkpoint, GENERATION_FILE, TrunkSource, read_bounded};
use crate::model::tensors::trunk_tensors;
use crate::sys::{durable, space};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Folder under `argodrive/` that holds packs until the model's id is known.
const UNNAMED: &str = "importing";
/// Files beside the weights that a store keeps when the checkpoint has them.
const SIDE_FILES: [&str; 5] =
    [GENERATION_FILE, "tokenizer.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja"];
/// Largest side file accepted.
const MAX_SIDE_BYTES: u64 = 128 << 20;
/// Bytes of a trunk tensor that are in memory at a time.
const CHUNK_BYTES: usize = 4 << 20;
/// Free space wanted beyond the data itself, for manifests, journal and side files.
pub(crate) const SPARE_BYTES: u64 = 16 << 20;

/// How to import.
#[derive(Clone, Copy, Debug)]
pub struct ImportOptions {
    /// Bytes written between two entries of the journal: what a kill can lose at most (one trunk tensor if that is
    /// larger).
    pub batch_bytes: u64,
    /// What the trunk is turned into.
    pub trunk: TrunkFormat,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self { batch_bytes: 64 << 20, trunk: TrunkFormat::Bf16 }
    }
}

/// How far an import is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes copied, checked, or found done.
    pub done_bytes: u64,
    /// Bytes altogether.
    pub total_bytes: u64,
}

/// What an import did.
#[derive(Clone, Debug)]
pub struct ImportReport {
    /// The store's manifest.
    pub manifest: StoreManifest,
    /// The store was complete before: everything was compared and nothing written.
    pub was_complete: bool,
    /// Experts copied in this run.
    pub experts_written: u64,
    /// Experts that an earlier run had copied.
    pub experts_reused: u64,
    /// Trunk tensors copied in this run.
    pub trunk_written: u64,
    /// Trunk tensors that an earlier run had copied.
    pub trunk_reused: u64,
    /// Bytes of trunk and experts written in this run.
    pub bytes_written: u64,
    /// Vision tensors left out.
    pub vision_skipped: u64,
    /// Side files copied.
    pub side_files: Vec<String>,
}

/// Imports the checkpoint in `checkpoint` into the store folder `store`, going on where an earlier run stopped.
pub fn import(
    checkpoint: &Path,
    store: &Path,
    options: &ImportOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ImportReport, ImportError> {
    let source = Checkpoint::open(checkpoint)?;
    std::fs::create_dir_all(store).map_err(|e| ImportError::io(store, e))?;
    refuse_same_folder(checkpoint, store)?;
    if store.join(STORE_FILE).exists() {
        return confirm::complete_store(&source, store, options.trunk, progress);
    }
    refuse_foreign_files(store)?;
    let (journal, done) = Journal::open(store, &source, options.trunk)?;
    let layout = Layout::of(&source, options.trunk);
    let mut import = Import {
        done: HashMap::new(),
        reused: (0, 0),
        written: (0, 0),
        bytes_written: 0,
        at: Progress { done_bytes: 0, total_bytes: layout.total_bytes() },
        packs: drive_folder(store, UNNAMED),
        source: &source,
        store,
        options,
        layout,
        journal,
        progress,
    };
    import.resume(done);
    let needs = import.at.total_bytes - import.at.done_bytes + SPARE_BYTES;
    let has = space::free_bytes(store).map_err(|e| ImportError::io(store, e))?;
    if needs > has {
        let fresh = import.journal.is_fresh();
        if fresh {
            import.journal.remove()?;
            let _ = std::fs::remove_dir(store);
        }
        return Err(ImportError::NoSpace { store: store.to_path_buf(), needs, has });
    }
    import.copy_trunk()?;
    import.copy_experts()?;
    import.finish()
}

/// Where everything goes; follows from the checkpoint's table alone.
pub(crate) struct Layout {
    pub(crate) trunk: TrunkFormat,
    /// Bytes of each trunk tensor as it is stored.
    pub(crate) trunk_bytes: Vec<u64>,
    pub(crate) trunk_offsets: Vec<u64>,
    pub(crate) trunk_file_bytes: u64,
    trunk_payload: u64,
    pub(crate) expert_bytes: u64,
    slot_bytes: u64,
    pub(crate) experts: u32,
    pub(crate) expert_count: u64,
}

impl Layout {
    pub(crate) fn of(source: &Checkpoint, format: TrunkFormat) -> Self {
        // shard sizes bound every sum: each tensor was checked to lie inside its file, and no format makes it larger than
        // twice that
        let stored = |tensor: &TrunkSource| match format.dtype_of(&tensor.spec) {
            same if same == tensor.spec.dtype => tensor.place.extent.len,
            other => trunk::byte_len(&tensor.spec.shape, other).unwrap_or(0),
        };
        let trunk_bytes: Vec<u64> = source.trunk().iter().map(stored).collect();
        let (trunk_offsets, trunk_file_bytes) = trunk::place(trunk_bytes.iter().copied()).unwrap_or_default();
        let expert_bytes = source.expert_bytes();
        Self {
            trunk: format,
            trunk_payload: trunk_bytes.iter().sum(),
            trunk_bytes,
            trunk_offsets,
            trunk_file_bytes,
            expert_bytes,
            slot_bytes: DriveManifest::empty("", expert_bytes).slot_bytes,
            experts: source.experts(),
            expert_count: source.moe_layers().len() as u64 * u64::from(source.experts()),
        }
    }

    /// The same from the configuration alone, with room for every tensor as the release stores it; `None` beyond 64 bits.
    pub(crate) fn of_config(source: &Checkpoint, format: TrunkFormat) -> Option<Self> {
        let config = source.config();
        let stored = |s: crate::model::tensors::TensorSpec| {
            let s = format.stored(&s.as_stored(config));
            trunk::byte_len(&s.shape, s.dtype)
        };
        let bytes: Vec<u64> = trunk_tensors(config).into_iter().map(stored).collect::<Option<_>>()?;
        let (trunk_offsets, trunk_file_bytes) = trunk::place(bytes.iter().copied())?;
        let trunk_payload = bytes.iter().try_fold(0u64, |sum, b| sum.checked_add(*b))?;
        Some(Self { trunk_bytes: bytes, trunk_offsets, trunk_file_bytes, trunk_payload, ..Self::of(source, format) })
    }

    fn pack_bytes(&self) -> u64 {
        self.slot_bytes * u64::from(self.experts)
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        self.trunk_payload + self.expert_bytes * self.expert_count
    }
}

/// An import under way.
struct Import<'a> {
    source: &'a Checkpoint,
    store: &'a Path,
    options: &'a ImportOptions,
    layout: Layout,
    journal: Journal,
    done: HashMap<Item, Digest>,
    packs: PathBuf,
    reused: (u64, u64),
    written: (u64, u64),
    bytes_written: u64,
    at: Progress,
    progress: &'a mut dyn FnMut(Progress),
}

impl Import<'_> {
    /// Believes the journal as far as the files it speaks of are there.
    fn resume(&mut self, journaled: Vec<(Item, Digest)>) {
        let is = |path: &Path, len: u64| std::fs::metadata(path).is_ok_and(|m| m.len() == len);
        self.done = journaled.into_iter().collect();
        let all = self.source.trunk().len() as u64 + self.layout.expert_count;
        if !self.packs.exists() && self.done.len() as u64 == all {
            // killed after the packs had got their final name
            let (store, drive) = self.manifests();
            let named = drive_folder(self.store, &identity::model_id(&store, &drive));
            if named.exists() {
                self.packs = named;
            }
        }
        let trunk = is(&self.store.join(TRUNK_FILE), self.layout.trunk_file_bytes);
        let pack = |l: &LayerId| is(&self.packs.join(pack_name(*l)), self.layout.pack_bytes());
        let packs: Vec<bool> = self.source.moe_layers().iter().map(pack).collect();
        let experts = self.layout.experts.max(1);
        self.done.retain(|item, _| match item {
            Item::Trunk(n) => trunk && (*n as usize) < self.source.trunk().len(),
            Item::Expert(n) => packs.get((n / experts) as usize).copied().unwrap_or(false),
        });
        if packs.contains(&false) {
            self.packs = drive_folder(self.store, UNNAMED);
        }
        for item in self.done.keys() {
            match item {
                Item::Trunk(n) => {
                    self.reused.0 += 1;
                    self.at.done_bytes += self.layout.trunk_bytes[*n as usize];
                }
                Item::Expert(_) => {
                    self.reused.1 += 1;
                    self.at.done_bytes += self.layout.expert_bytes;
                }
            }
        }
        (self.progress)(self.at);
    }

    fn copy_trunk(&mut self) -> Result<(), ImportError> {
        let mut target = Target::open(&self.store.join(TRUNK_FILE), self.layout.trunk_file_bytes)?;
        let source = self.source;
        let mut reader = source.reader();
        let mut buffer = vec![0u8; CHUNK_BYTES];
        let copied = (|| {
            for (index, tensor) in source.trunk().iter().enumerate() {
                let item = Item::Trunk(index as u32);
                if self.done.contains_key(&item) {
                    continue;
                }
                let to = self.layout.trunk_offsets[index];
                let format = self.layout.trunk;
                let digest = stream_trunk(source, &mut reader, tensor, format, &mut buffer, &mut |skip, bytes| {
                    target.write(to + skip, bytes)?;
                    self.at.done_bytes += bytes.len() as u64;
                    (self.progress)(self.at);
                    Ok(())
                })?;
                self.written.0 += 1;
                self.bytes_written += self.layout.trunk_bytes[index];
                self.note(item, digest);
                if target.dirty_bytes() >= self.options.batch_bytes {
                    target.commit(&mut self.journal)?;
                }
            }
            Ok(())
        })();
        settle(copied, &mut target, &mut self.journal)
    }

    fn copy_experts(&mut self) -> Result<(), ImportError> {
        std::fs::create_dir_all(&self.packs).map_err(|e| ImportError::io(&self.packs, e))?;
        let source = self.source;
        let mut reader = source.reader();
        let mut buffer = vec![0u8; self.layout.expert_bytes as usize];
        for (row, &layer) in source.moe_layers().iter().enumerate() {
            let first = row as u32 * self.layout.experts;
            let todo = (0..self.layout.experts).filter(|e| !self.done.contains_key(&Item::Expert(first + e)));
            let todo: Vec<u32> = todo.collect();
            if todo.is_empty() {
                continue;
            }
            let mut target = Target::open(&self.packs.join(pack_name(layer)), self.layout.pack_bytes())?;
            let copied = (|| {
                for (index, &expert) in todo.iter().enumerate() {
                    if let Some(&next) = todo.get(index + 1) {
                        read_ahead(source, &mut reader, layer, ExpertId(next as u16));
                    }
                    read_expert(source, &mut reader, layer, ExpertId(expert as u16), &mut buffer)?;
                    target.write(u64::from(expert) * self.layout.slot_bytes, &buffer)?;
                    self.written.1 += 1;
                    self.bytes_written += self.layout.expert_bytes;
                    self.at.done_bytes += self.layout.expert_bytes;
                    self.note(Item::Expert(first + expert), Digest::of(&buffer));
                    (self.progress)(self.at);
                    if target.dirty_bytes() >= self.options.batch_bytes {
                        target.commit(&mut self.journal)?;
                    }
                }
                Ok(())
            })();
            settle(copied, &mut target, &mut self.journal)?;
        }
        Ok(())
    }

    fn note(&mut self, item: Item, digest: Digest) {
        self.journal.note(item, digest);
        self.done.insert(item, digest);
    }

    /// Both manifests from what is done, still without the model's id.
    fn manifests(&self) -> (StoreManifest, DriveManifest) {
        manifests(self.source, &self.layout, &|item| self.done.get(&item).copied().unwrap_or(Digest(0)))
    }

    fn finish(self) -> Result<ImportReport, ImportError> {
        if let Some(name) = self.source.changed_shard() {
            let path = self.source.folder().join(name);
            let reason = "changed while it was being imported; remove the store's folder and import again".into();
            return Err(ImportError::Target { path, reason });
        }
        let (mut store, mut drive) = self.manifests();
        store.model_id = identity::model_id(&store, &drive);
        drive.model_id.clone_from(&store.model_id);
        let named = drive_folder(self.store, &store.model_id);
        drive.save(&self.packs)?;
        if self.packs != named {
            std::fs::rename(&self.packs, &named).map_err(|e| match e.kind() {
                ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => ImportError::Target {
                    path: named.clone(),
                    reason: "a drive folder of this model is already here; move it away and run again".into(),
                },
                _ => ImportError::io(&named, e),
            })?;
            let parent = self.store.join("argodrive");
            durable::sync_folder(&parent).map_err(|e| ImportError::io(&parent, e))?;
        }
        let side_files = publish_store(self.source, self.store, &store)?;
        self.journal.remove()?;
        Ok(ImportReport {
            manifest: store,
            was_complete: false,
            experts_written: self.written.1,
            experts_reused: self.reused.1,
            trunk_written: self.written.0,
            trunk_reused: self.reused.0,
            bytes_written: self.bytes_written,
            vision_skipped: self.source.skipped_vision(),
            side_files,
        })
    }
}

/// The last steps of everything that makes a store: side files, `config.json`, and `store.json` at the end. Returns
/// the side files.
pub(crate) fn publish_store(
    source: &Checkpoint,
    store: &Path,
    manifest: &StoreManifest,
) -> Result<Vec<String>, ImportError> {
    let mut side_files = Vec::new();
    for name in SIDE_FILES {
        let from = source.folder().join(name);
        if from.exists() {
            let bytes = read_bounded(&from, MAX_SIDE_BYTES)?;
            let to = store.join(name);
            durable::write_atomic(&to, &bytes).map_err(|e| ImportError::io(&to, e))?;
            side_files.push(name.to_string());
        }
    }
    let to = store.join(CONFIG_FILE);
    durable::write_atomic(&to, source.config_bytes()).map_err(|e| ImportError::io(&to, e))?;
    manifest.save(store)?;
    remove_leftovers(store);
    Ok(side_files)
}

/// Commits what was finished, also after a failure; the failure wins.
fn settle(copied: Result<(), ImportError>, target: &mut Target, journal: &mut Journal) -> Result<(), ImportError> {
    let committed = target.commit(journal);
    copied.and(committed)
}

pub(crate) fn refuse_same_folder(checkpoint: &Path, store: &Path) -> Result<(), ImportError> {
    let real = |p: &Path| p.canonicalize().map_err(|e| ImportError::io(p, e));
    if real(checkpoint)? == real(store)? {
        let reason = "is the checkpoint's own folder; --store must be another one".into();
        return Err(ImportError::Target { path: store.to_path_buf(), reason });
    }
    Ok(())
}

/// A folder that is no store must not hold files that an import would write over.
pub(crate) fn refuse_foreign_files(store: &Path) -> Result<(), ImportError> {
    if store.join(JOURNAL_FILE).exists() {
        return Ok(());
    }
    match [CONFIG_FILE, TRUNK_FILE].iter().chain(&SIDE_FILES).map(|n| store.join(n)).find(|p| p.exists()) {
        Some(path) => {
            let reason = "is in the way: the folder is not a store; choose an empty folder for --store".into();
            Err(ImportError::Target { path, reason })
        }
        None => Ok(()),
    }
}

/// Removes temporary files that killed runs left beside the store's files.
fn remove_leftovers(store: &Path) {
    let ours = [CONFIG_FILE, STORE_FILE].into_iter().chain(SIDE_FILES);
    let prefixes: Vec<String> = ours.map(|name| format!("{name}.")).collect();
    for entry in std::fs::read_dir(store).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".tmp") && prefixes.iter().any(|p| name.starts_with(p)) {
            // a leftover that cannot be removed does no harm
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
