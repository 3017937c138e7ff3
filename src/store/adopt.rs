//! A folder with one file per expert (`L<layer>-E<expert>.bin`) becomes a drive folder where it lies: every file's size is
//! checked and its digest taken, `drive.json` is written beside them, and no expert file is moved or changed. The trunk
//! comes from a checkpoint, which need not hold the experts any more.

use super::copy::{manifests, nan_scale, plane_name, stream_trunk};
use super::identity;
use super::import::{
    ImportError, Layout, Progress, SPARE_BYTES, publish_store, refuse_foreign_files, refuse_same_folder,
};
use super::journal::{Item, JOURNAL_FILE, Journal};
use super::manifest::{
    Container, DRIVE_FILE, Digest, DriveManifest, STORE_FILE, StoreManifest, TRUNK_FILE, drive_folder,
};
use super::target::Target;
use super::trunk_format::TrunkFormat;
use crate::ids::{ExpertId, LayerId};
use crate::model::arriving::Arriving;
use crate::model::checkpoint::Checkpoint;
use crate::sys::{cache, durable, space};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Version of the journal's lines.
const VERSION: u32 = 2;
/// Files that an error lists.
const LISTED: usize = 8;
/// Bytes of a trunk tensor that are in memory at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// What was adopted.
#[derive(Clone, Debug)]
pub struct AdoptReport {
    /// The store's manifest.
    pub manifest: StoreManifest,
    /// The folder, with its real path.
    pub folder: PathBuf,
    /// Experts whose digest was taken in this run.
    pub digested: u64,
    /// Experts whose digest an earlier run had taken.
    pub reused: u64,
    /// Files of experts that the model does not have; they are left alone.
    pub strangers: u64,
    /// The link by which the folder is found as a drive of its own; `None` where it could not be made.
    pub drive: Result<PathBuf, String>,
    /// Side files copied into the store.
    pub side_files: Vec<String>,
}

/// Which adoption a journal is of.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    version: u32,
    adopt: PathBuf,
    config: Digest,
    table: Digest,
    #[serde(default, skip_serializing_if = "TrunkFormat::is_exact")]
    trunk: TrunkFormat,
}

/// What a journal says was done: digests, of experts with the age of the file.
#[derive(Default)]
struct Done {
    trunk: HashMap<u32, Digest>,
    experts: HashMap<u32, (i64, Digest)>,
}

impl Done {
    fn accept(&mut self, line: &str) -> bool {
        let mut words = line.split(' ');
        let (Some(kind), Some(number)) = (words.next(), words.next().and_then(|n| n.parse().ok())) else {
            return false;
        };
        let mut digest = || Digest::try_from(words.next_back()?.to_string()).ok();
        let Some(digest) = digest() else { return false };
        match (kind, words.next().map(str::parse)) {
            ("trunk", None) => self.trunk.insert(number, digest).is_none(),
            ("file", Some(Ok(modified))) => self.experts.insert(number, (modified, digest)).is_none(),
            _ => false,
        }
    }
}

/// Adopts the folder `experts` of the model in `checkpoint` into the store folder `store`, going on where an earlier run
/// stopped. The trunk is kept in the format `trunk`; `batch_bytes` are read between two entries of the journal.
pub fn adopt(
    experts: &Path,
    checkpoint: &Path,
    store: &Path,
    trunk: TrunkFormat,
    batch_bytes: u64,
    progress: &mut dyn FnMut(Progress),
) -> Result<AdoptReport, ImportError> {
    let target = |path: &Path, reason: String| ImportError::Target { path: path.to_path_buf(), reason };
    let mut arriving = Arriving::open(checkpoint)?;
    arriving.look(&|_| false)?;
    let source = arriving.checkpoint();
    if let Some(tensor) = source.trunk().iter().find(|t| !t.place.is_known()) {
        let reason =
            format!("tensor {} is in no shard that is here; the trunk comes from the checkpoint", tensor.spec.name);
        return Err(target(checkpoint, reason));
    }
    if source.moe_layers().is_empty() {
        return Err(target(checkpoint, "a dense model has no experts to adopt; use `argodrive import`".into()));
    }
    let folder = experts.canonicalize().map_err(|e| ImportError::io(experts, e))?;
    let layout = Layout::of(source, trunk);
    let ages = check_files(&folder, source, &layout)?;
    let strangers = strangers(&folder, &ages, source).map_err(|e| ImportError::io(&folder, e))?;
    std::fs::create_dir_all(store).map_err(|e| ImportError::io(store, e))?;
    refuse_same_folder(checkpoint, store)?;
    refuse_same_folder(&folder, store)?;
    if store.join(STORE_FILE).exists() {
        refuse_another(store, source, trunk)?;
    } else {
        refuse_foreign_files(store)?;
    }
    let header = Header {
        version: VERSION,
        adopt: folder.clone(),
        config: Digest::of(source.config_bytes()),
        table: identity::table_digest(source),
        trunk,
    };
    let (mut journal, done) = open_journal(store, &header)?;
    let total_bytes = layout.total_bytes();
    let mut work =
        Work { source, folder: &folder, store, layout, done, at: Progress { done_bytes: 0, total_bytes }, progress };
    work.resume(&ages);
    work.copy_trunk(&mut journal, batch_bytes)?;
    let reused = work.done.experts.len() as u64;
    let digested = work.digest_experts(&mut journal, &ages, batch_bytes)?;
    let Work { done, layout, .. } = work;
    let digest = |item: Item| match item {
        Item::Trunk(n) => done.trunk.get(&n).copied().unwrap_or(Digest(0)),
        Item::Expert(n) => done.experts.get(&n).map_or(Digest(0), |e| e.1),
    };
    let (mut manifest, mut drive) = manifests(source, &layout, &digest);
    drive.container = Container::Files;
    drive.layers.values_mut().flatten().for_each(|entry| entry.slot = 0);
    manifest.model_id = identity::model_id(&manifest, &drive);
    drive.model_id.clone_from(&manifest.model_id);
    if store.join(STORE_FILE).exists() {
        let there = StoreManifest::open(store)?;
        if there.model_id != manifest.model_id {
            let reason = "its experts or its trunk are others".into();
            return Err(ImportError::OtherModel { store: store.to_path_buf(), reason });
        }
        manifest.trunk_error = there.trunk_error;
    }
    publish_drive(&folder, &drive)?;
    let own = link(&drive_folder(store, &manifest.model_id), &folder)?;
    let parent = folder.parent().unwrap_or(Path::new("/"));
    let drive = match store.canonicalize().is_ok_and(|s| s == parent) {
        true => Ok(own),
        false => link(&drive_folder(parent, &manifest.model_id), &folder).map_err(|e| e.to_string()),
    };
    let side_files = publish_store(source, store, &manifest)?;
    journal.remove()?;
    Ok(AdoptReport { manifest, folder, digested, reused, strangers, drive, side_files })
}

/// A finished store is adopted again only as what it is: its trunk would be written over before its id could be compared.
fn refuse_another(store: &Path, source: &Checkpoint, trunk: TrunkFormat) -> Result<(), ImportError> {
    let there = StoreManifest::open(store)?;
    let reason = if there.trunk_format != trunk {
        format!("its trunk is {}; --trunk {} adopts that again", there.trunk_format, there.trunk_format)
    } else if there.config_digest != Digest::of(source.config_bytes()) {
        "its config.json is another".into()
    } else {
        return Ok(());
    };
    Err(ImportError::OtherModel { store: store.to_path_buf(), reason })
}

fn open_journal(store: &Path, header: &Header) -> Result<(Journal, Done), ImportError> {
    let text = serde_json::to_string(header).map_err(|e| ImportError::io(&store.join(JOURNAL_FILE), e.into()))?;
    let differs = |text: &str| match serde_json::from_str::<Header>(text) {
        Ok(then) if then == *header => None,
        Ok(then) if then.adopt != header.adopt => Some(format!("it adopts {}", then.adopt.display())),
        Ok(then) if then.trunk != header.trunk => {
            Some(format!("its trunk becomes {}, not {}", then.trunk, header.trunk))
        }
        Ok(_) => Some("the checkpoint or the program is another".into()),
        Err(_) => Some("it was begun by another command".into()),
    };
    let mut done = Done::default();
    let journal = Journal::begin(store, &text, &differs, &mut |line| done.accept(line))?;
    Ok((journal, done))
}

fn file_name(layer: LayerId, expert: ExpertId) -> String {
    format!("L{}-E{}.bin", layer.0, expert.0)
}

/// Every expert of the model in order.
fn experts_of(source: &Checkpoint) -> impl Iterator<Item = (LayerId, ExpertId)> + '_ {
    let experts = source.experts();
    source.moe_layers().iter().flat_map(move |&layer| (0..experts).map(move |e| (layer, ExpertId(e as u16))))
}

/// Modification times of all expert files, each of which must be there with the right size.
fn check_files(folder: &Path, source: &Checkpoint, layout: &Layout) -> Result<Vec<i64>, ImportError> {
    let (mut ages, mut missing, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    for (layer, expert) in experts_of(source) {
        let name = file_name(layer, expert);
        match std::fs::metadata(folder.join(&name)) {
            Ok(meta) if meta.is_file() && meta.len() == layout.expert_bytes => {
                ages.push(meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec()));
            }
            Ok(meta) => wrong.push(format!("{name} ({} bytes)", meta.len())),
            Err(e) if e.kind() == ErrorKind::NotFound => missing.push(name),
            Err(e) => return Err(ImportError::io(&folder.join(name), e)),
        }
    }
    let list = |names: &[String]| {
        let more = if names.len() > LISTED { ", ..." } else { "" };
        format!("{}{more}", names.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", "))
    };
    let reason = match (missing.len(), wrong.len()) {
        (0, 0) => return Ok(ages),
        (0, n) => format!("{n} expert files have not the {} bytes of an expert: {}", layout.expert_bytes, list(&wrong)),
        (n, _) => format!("{n} of {} expert files are missing: {}", layout.expert_count, list(&missing)),
    };
    Err(ImportError::Target { path: folder.to_path_buf(), reason })
}

/// Files that look like experts and are none of this model's.
fn strangers(folder: &Path, ages: &[i64], source: &Checkpoint) -> std::io::Result<u64> {
    let like = |name: &str| {
        let numbers = name.strip_prefix('L').and_then(|n| n.strip_suffix(".bin")).and_then(|n| n.split_once("-E"));
        numbers.is_some_and(|(l, e)| l.parse::<u16>().is_ok() && e.parse::<u16>().is_ok())
    };
    let mut count = 0u64;
    for entry in std::fs::read_dir(folder)? {
        count += u64::from(like(&entry?.file_name().to_string_lossy()));
    }
    debug_assert_eq!(ages.len(), experts_of(source).count());
    Ok(count.saturating_sub(ages.len() as u64))
}

/// An adoption under way.
struct Work<'a> {
    source: &'a Checkpoint,
    folder: &'a Path,
    store: &'a Path,
    layout: Layout,
    done: Done,
    at: Progress,
    progress: &'a mut dyn FnMut(Progress),
}

impl Work<'_> {
    /// Believes the journal as far as the files are those that it speaks of.
    fn resume(&mut self, ages: &[i64]) {
        let trunk =
            std::fs::metadata(self.store.join(TRUNK_FILE)).is_ok_and(|m| m.len() == self.layout.trunk_file_bytes);
        let known = self.source.trunk();
        self.done.trunk.retain(|n, _| trunk && (*n as usize) < known.len());
        self.done.experts.retain(|n, (age, _)| ages.get(*n as usize) == Some(age));
        self.at.done_bytes = self.done.trunk.keys().map(|n| self.layout.trunk_bytes[*n as usize]).sum::<u64>()
            + self.done.experts.len() as u64 * self.layout.expert_bytes;
        (self.progress)(self.at);
    }

    fn copy_trunk(&mut self, journal: &mut Journal, batch_bytes: u64) -> Result<(), ImportError> {
        let source = self.source;
        let left: u64 = source
            .trunk()
            .iter()
            .enumerate()
            .filter(|(n, _)| !self.done.trunk.contains_key(&(*n as u32)))
            .map(|(n, _)| self.layout.trunk_bytes[n])
            .sum();
        let has = space::free_bytes(self.store).map_err(|e| ImportError::io(self.store, e))?;
        if left + SPARE_BYTES > has {
            return Err(ImportError::NoSpace { store: self.store.to_path_buf(), needs: left + SPARE_BYTES, has });
        }
        let mut target = Target::open(&self.store.join(TRUNK_FILE), self.layout.trunk_file_bytes)?;
        let mut reader = source.reader();
        let mut buffer = vec![0u8; CHUNK_BYTES];
        for (index, tensor) in source.trunk().iter().enumerate() {
            if self.done.trunk.contains_key(&(index as u32)) {
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
            journal.note(Item::Trunk(index as u32), digest);
            self.done.trunk.insert(index as u32, digest);
            if target.dirty_bytes() >= batch_bytes {
                target.commit(journal)?;
            }
        }
        target.commit(journal)
    }

    /// Reads every expert whose digest is not known; returns how many those were.
    fn digest_experts(&mut self, journal: &mut Journal, ages: &[i64], batch_bytes: u64) -> Result<u64, ImportError> {
        let planes = self.source.config().moe.as_ref().map_or([0; 6], |m| m.plane_bytes());
        let mut buffer = vec![0u8; self.layout.expert_bytes as usize];
        let (mut count, mut since) = (0, 0);
        for (number, ((layer, expert), &age)) in experts_of(self.source).zip(ages).enumerate() {
            let number = number as u32;
            if self.done.experts.contains_key(&number) {
                continue;
            }
            let path = self.folder.join(file_name(layer, expert));
            let io = |e| ImportError::io(&path, e);
            let file = File::open(&path).map_err(io)?;
            file.read_exact_at(&mut buffer, 0).map_err(io)?;
            // advice only: what was read here must not make a run warm
            let _ = cache::drop_file(&file);
            let mut rest = buffer.as_slice();
            for (index, bytes) in planes.into_iter().enumerate() {
                let (plane, tail) = rest.split_at(bytes as usize);
                rest = tail;
                if let Some((row, group)) = nan_scale(self.source, index, plane) {
                    let tensor = plane_name(layer, expert, index);
                    return Err(ImportError::NanScale { path, tensor, row, group });
                }
            }
            let digest = Digest::of(&buffer);
            journal.note_line(&format!("file {number} {age} {digest}"));
            self.done.experts.insert(number, (age, digest));
            (count, since) = (count + 1, since + self.layout.expert_bytes);
            if since >= batch_bytes {
                journal.commit()?;
                since = 0;
            }
            self.at.done_bytes += self.layout.expert_bytes;
            (self.progress)(self.at);
        }
        journal.commit()?;
        Ok(count)
    }
}

/// Writes `drive.json` beside the experts, unless another model's is there.
fn publish_drive(folder: &Path, drive: &DriveManifest) -> Result<(), ImportError> {
    let path = folder.join(DRIVE_FILE);
    if path.exists() {
        let there = DriveManifest::open(folder)?;
        if there.model_id != drive.model_id || there.container != Container::Files {
            let reason = format!(
                "speaks of model {}, these files are of {}; move it away if they were changed on purpose",
                there.model_id, drive.model_id
            );
            return Err(ImportError::Target { path, reason });
        }
    }
    Ok(drive.save(folder)?)
}

/// Makes `at` lead to `folder`, unless it does already.
fn link(at: &Path, folder: &Path) -> Result<PathBuf, ImportError> {
    let io = |e| ImportError::io(at, e);
    if at.canonicalize().is_ok_and(|real| real == *folder) {
        return Ok(at.to_path_buf());
    }
    let parent = at.parent().unwrap_or(at);
    std::fs::create_dir_all(parent).map_err(io)?;
    // Beside the folder the link stays right wherever the drive is mounted.
    let beside = parent.parent().zip(folder.parent()).is_some_and(|(a, b)| a.canonicalize().is_ok_and(|a| a == *b));
    let to = match folder.file_name().filter(|_| beside) {
        Some(name) => Path::new("..").join(name),
        None => folder.to_path_buf(),
    };
    std::os::unix::fs::symlink(to, at).map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists => ImportError::Target {
            path: at.to_path_buf(),
            reason: "a drive folder of this model is already here; move it away and run again".into(),
        },
        _ => ImportError::io(at, e),
    })?;
    durable::sync_folder(parent).map_err(io)?;
    Ok(at.to_path_buf())
}
