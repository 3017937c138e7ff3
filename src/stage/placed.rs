//! From a checkpoint straight onto the drives of a plan, without a copy in between, while shards may still be arriving and,
//! if that is asked for, each shard is deleted behind the import. The store keeps the trunk and `store.json`; experts lie
//! where the plan says and nowhere else.
//!
//! **Order of writes.** Bytes go into `argodrive/<geometry>-<nonce>` on each drive, are fsynced, and only then named in the journal
//! (with their digests). A shard is deleted only after everything that was taken from it is in the journal and has been
//! read back past the page cache from every drive, and after the journal says that it will be gone. The model's id is known
//! when the last digest is: then come the drives' manifests, the folders' final names, the plan with the id in it,
//! and `store.json` at the end. A kill between any two of these loses nothing, and the same command goes on.

use super::placed_state::{Done, Header, Kept};
use super::{StageError, lock::lock_mounts};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::layout::plan::{Plan, PlanError, Shape};
use crate::model::arriving::{Arriving, Awaited};
use crate::model::checkpoint::{CONFIG_FILE, Checkpoint, INDEX_FILE, SINGLE_FILE};
use crate::model::safetensors::CheckpointError;
use crate::store::copy::manifests;
use crate::store::identity;
use crate::store::import::{ImportError, Layout, Progress, SPARE_BYTES, refuse_foreign_files, refuse_same_folder};
use crate::store::journal::{Item, JOURNAL_FILE, Journal};
use crate::store::manifest::{
    Digest, DriveManifest, ManifestError, STORE_FILE, StoreManifest, TRUNK_FILE, drive_folder, pack_name,
};
use crate::store::target::Target;
use crate::store::trunk_format::TrunkFormat;
use crate::sys::space;
use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Experts that an error lists.
const LISTED: usize = 5;

/// Why an import onto drives stopped.
#[derive(Debug, thiserror::Error)]
pub enum PlacedError {
    /// Reading the checkpoint, or writing the store or a drive.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The checkpoint is not as it should be.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The drives are in use, or one of them is not there.
    #[error(transparent)]
    Drives(#[from] StageError),
    /// A manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// It cannot be done, or not in this way.
    #[error("{0}")]
    Refused(String),
}

/// Waiting for a download.
#[derive(Clone, Copy, Debug)]
pub struct Follow {
    /// Pause between two looks.
    pub poll: Duration,
    /// Longest wait in which not one byte arrives.
    pub timeout: Duration,
}

/// How to import.
#[derive(Clone, Copy, Debug)]
pub struct PlacedOptions {
    /// Bytes written between two entries of the journal.
    pub batch_bytes: u64,
    /// Wait for shards that are not there yet.
    pub follow: Option<Follow>,
    /// Delete each shard when everything in it is safe.
    pub drop_shards: bool,
    /// What the trunk is turned into.
    pub trunk: TrunkFormat,
}

/// What is going on.
#[derive(Debug)]
pub enum Event<'a> {
    /// Bytes of the model that are done.
    Progress(Progress),
    /// Nothing to do until one of these is whole.
    Waiting(&'a [Awaited]),
    /// The shard of this name was deleted.
    Dropped(&'a str),
}

/// What was done.
#[derive(Clone, Debug)]
pub struct PlacedReport {
    /// The store's manifest.
    pub manifest: StoreManifest,
    /// The plan, bound to the model.
    pub plan: Plan,
    /// Everything was there before.
    pub was_complete: bool,
    /// Experts taken from the checkpoint in this run.
    pub experts_written: u64,
    /// Experts that an earlier run had taken.
    pub experts_reused: u64,
    /// Bytes written to store and drives in this run.
    pub bytes_written: u64,
    /// Shards deleted in this run.
    pub dropped: Vec<String>,
    /// Side files copied into the store.
    pub side_files: Vec<String>,
}

/// Imports the checkpoint in `checkpoint` into the store folder `store`, its experts onto the drives of the plan in the file
/// `plan_file`, which lie at `mounts`.
pub fn import_placed(
    checkpoint: &Path,
    store: &Path,
    plan_file: &Path,
    plan: &Plan,
    mounts: &[PathBuf],
    options: &PlacedOptions,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<PlacedReport, PlacedError> {
    if plan.shape != Shape::Whole {
        return Err(PlacedError::Refused("the plan stripes experts; an import places whole ones only".into()));
    }
    super::check_mounts(plan, mounts)?;
    if store.join(STORE_FILE).exists() {
        return complete(store, plan, options.trunk);
    }
    let arriving = open_checkpoint(checkpoint, options, events)?;
    std::fs::create_dir_all(store).map_err(|e| ImportError::io(store, e))?;
    refuse_same_folder(checkpoint, store)?;
    refuse_foreign_files(store)?;
    let source = arriving.checkpoint();
    let geometry = check_plan(source, plan)?;
    if options.drop_shards && !space::may_write(checkpoint) {
        let folder = checkpoint.display();
        return Err(PlacedError::Refused(format!(
            "--drop-shards: nothing may be deleted in {folder}; leave the flag out"
        )));
    }
    let layout = Layout::of_config(source, options.trunk)
        .ok_or_else(|| PlacedError::Refused("the trunk exceeds 64 bits".into()))?;
    let _locks = lock_mounts(plan, mounts)?;
    let header = Header::new(source, &geometry, plan, options.trunk)?;
    let (journal, done, unnamed) = header.open_journal(store)?;
    if !identity::is_provisional(&plan.model_id) && journal.is_fresh() {
        journal.remove()?;
        return Err(PlacedError::Refused(format!(
            "the plan is for model {} already; make one for this checkpoint with `argodrive plan --checkpoint {} ...`",
            plan.model_id,
            checkpoint.display()
        )));
    }
    let total_bytes = layout.total_bytes();
    let mut work = Work {
        store,
        plan,
        mounts,
        options,
        unnamed,
        slots: slots(plan),
        folders: Vec::new(),
        trunk: None,
        packs: BTreeMap::new(),
        at: Progress { done_bytes: 0, total_bytes },
        written: (0, 0),
        reused: 0,
        dropped: Vec::new(),
        layout,
        journal,
        done,
    };
    work.resume(source);
    work.check_space(checkpoint)?;
    work.take_all(arriving, plan_file, events)
}

/// A store that is complete needs nothing, if it is of this plan.
fn complete(store: &Path, plan: &Plan, trunk: TrunkFormat) -> Result<PlacedReport, PlacedError> {
    let manifest = StoreManifest::open(store)?;
    if manifest.trunk_format != trunk {
        let (store, is) = (store.display(), manifest.trunk_format);
        let reason = format!("{store}: is complete and its trunk is {is}, not {trunk}; choose another --store");
        return Err(PlacedError::Refused(reason));
    }
    if manifest.model_id != plan.model_id {
        return Err(PlacedError::Refused(format!(
            "{}: already holds model {}; it is not overwritten. Choose another --store, or plan for this one with \
             `argodrive plan --store` and run `argodrive stage`",
            store.display(),
            manifest.model_id
        )));
    }
    let journal = store.join(JOURNAL_FILE);
    if journal.exists() {
        std::fs::remove_file(&journal).map_err(|e| ImportError::io(&journal, e))?;
    }
    Ok(PlacedReport {
        manifest,
        plan: plan.clone(),
        was_complete: true,
        experts_written: 0,
        experts_reused: 0,
        bytes_written: 0,
        dropped: Vec::new(),
        side_files: Vec::new(),
    })
}

/// Opens the checkpoint, waiting for `config.json` and the index if that is asked for.
fn open_checkpoint(
    folder: &Path,
    options: &PlacedOptions,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Arriving, PlacedError> {
    let Some(follow) = options.follow else { return Ok(Arriving::open(folder)?) };
    let began = Instant::now();
    loop {
        let has = |name: &str| folder.join(name).exists();
        let first = if !has(CONFIG_FILE) {
            CONFIG_FILE
        } else if !has(INDEX_FILE) && !has(SINGLE_FILE) {
            INDEX_FILE
        } else {
            match Arriving::open(folder) {
                // an index that is still being written is no index yet
                Err(CheckpointError::Index { .. }) if began.elapsed() < follow.timeout => INDEX_FILE,
                other => return Ok(other?),
            }
        };
        if began.elapsed() >= follow.timeout {
            return Ok(Arriving::open(folder)?);
        }
        events(Event::Waiting(&[Awaited { name: first.into(), seen_bytes: None, expected_bytes: None }]));
        std::thread::sleep(follow.poll);
    }
}

/// The id of the geometry, if the plan is of it.
fn check_plan(source: &Checkpoint, plan: &Plan) -> Result<String, PlacedError> {
    let geometry = identity::geometry_id(source.config_bytes(), source.config());
    let experts = source.experts() as usize;
    let same = plan.expert_bytes == source.expert_bytes()
        && plan.layers.keys().copied().eq(source.moe_layers().iter().copied())
        && plan.layers.values().all(|l| l.0.len() == experts);
    let other = identity::is_provisional(&plan.model_id) && plan.model_id != geometry;
    if !same || other {
        return Err(PlacedError::Refused(format!(
            "the plan is for another model than {}; make one with `argodrive plan --checkpoint {} ...`",
            source.folder().display(),
            source.folder().display()
        )));
    }
    Ok(geometry)
}

/// Experts of each drive's packs, in the order of their slots.
fn slots(plan: &Plan) -> Vec<BTreeMap<LayerId, Vec<ExpertId>>> {
    let on = |drive: u8| {
        let mut packs: BTreeMap<LayerId, Vec<ExpertId>> = BTreeMap::new();
        plan.on_drive(DriveId(drive)).for_each(|(layer, expert)| packs.entry(layer).or_default().push(expert));
        packs
    };
    (0..plan.drives.len() as u8).map(on).collect()
}

/// An import under way.
pub(super) struct Work<'a> {
    pub(super) store: &'a Path,
    pub(super) plan: &'a Plan,
    pub(super) mounts: &'a [PathBuf],
    pub(super) options: &'a PlacedOptions,
    /// Name of the folders of packs until the model's id is known.
    pub(super) unnamed: String,
    pub(super) layout: Layout,
    pub(super) slots: Vec<BTreeMap<LayerId, Vec<ExpertId>>>,
    /// Where each drive's packs lie now.
    pub(super) folders: Vec<PathBuf>,
    pub(super) journal: Journal,
    pub(super) done: Done,
    pub(super) trunk: Option<Target>,
    pub(super) packs: BTreeMap<(usize, LayerId), Target>,
    pub(super) at: Progress,
    /// Experts and bytes.
    pub(super) written: (u64, u64),
    pub(super) reused: u64,
    pub(super) dropped: Vec<String>,
}

impl Work<'_> {
    pub(super) fn slot_bytes(&self) -> u64 {
        DriveManifest::empty("", self.layout.expert_bytes).slot_bytes
    }

    /// An expert by its number in the journal.
    pub(super) fn key(&self, source: &Checkpoint, number: u32) -> Option<(LayerId, ExpertId)> {
        let experts = self.layout.experts.max(1);
        Some((*source.moe_layers().get((number / experts) as usize)?, ExpertId((number % experts) as u16)))
    }

    /// Drive and slot of every copy of an expert.
    pub(super) fn homes(&self, layer: LayerId, expert: ExpertId) -> Vec<(usize, u32)> {
        let homes = self.plan.homes(layer, expert).unwrap_or(&[]);
        let slot = |d: &DriveId| {
            let pack = self.slots[d.index()].get(&layer)?;
            pack.binary_search(&expert).ok().map(|slot| (d.index(), slot as u32))
        };
        homes.iter().filter_map(slot).collect()
    }

    pub(super) fn pack_bytes(&self, drive: usize, layer: LayerId) -> u64 {
        self.slots[drive].get(&layer).map_or(0, |pack| pack.len() as u64 * self.slot_bytes())
    }

    /// The manifest of the store and a list of all experts' digests, with the model's id in both.
    pub(super) fn identify(&self, source: &Checkpoint) -> (StoreManifest, DriveManifest) {
        let digest = |item: Item| match item {
            Item::Trunk(n) => self.done.trunk.get(&n).map_or(Digest(0), |t| t.digest),
            Item::Expert(n) => self.done.experts.get(&n).copied().unwrap_or(Digest(0)),
        };
        let (mut manifest, mut all) = manifests(source, &self.layout, &digest);
        for (n, tensor) in manifest.trunk.iter_mut().enumerate() {
            // the shard that said so may be gone
            if let Some(known) = self.done.trunk.get(&(n as u32)) {
                tensor.shape.clone_from(&known.shape);
            }
        }
        manifest.model_id = identity::model_id(&manifest, &all);
        all.model_id.clone_from(&manifest.model_id);
        (manifest, all)
    }

    fn is_all(&self, source: &Checkpoint) -> bool {
        self.done.trunk.len() == source.trunk().len() && self.done.experts.len() as u64 == self.layout.expert_count
    }

    /// Believes the journal as far as the files that it speaks of are there.
    fn resume(&mut self, source: &Checkpoint) {
        let named = self.is_all(source).then(|| self.identify(source).0.model_id);
        self.folders = self
            .mounts
            .iter()
            .map(|mount| {
                let provisional = drive_folder(mount, &self.unnamed);
                let named = named.as_ref().map(|id| drive_folder(mount, id)).filter(|f| f.exists());
                // killed after this drive's packs had got their final name
                named.filter(|_| !provisional.exists()).unwrap_or(provisional)
            })
            .collect();
        let is = |path: &Path, len: u64| std::fs::metadata(path).is_ok_and(|m| m.len() == len);
        let trunk = is(&self.store.join(TRUNK_FILE), self.layout.trunk_file_bytes);
        let tensors = source.trunk().len();
        self.done.trunk.retain(|n, _| trunk && (*n as usize) < tensors);
        let mut whole: HashMap<(usize, LayerId), bool> = HashMap::new();
        for (drive, packs) in self.slots.iter().enumerate() {
            for &layer in packs.keys() {
                let path = self.folders[drive].join(pack_name(layer));
                whole.insert((drive, layer), is(&path, self.pack_bytes(drive, layer)));
            }
        }
        let kept = |n: &u32| {
            let Some((layer, expert)) = self.key(source, *n) else { return false };
            self.homes(layer, expert).iter().all(|(drive, _)| whole.get(&(*drive, layer)) == Some(&true))
        };
        let lost: Vec<u32> = self.done.experts.keys().filter(|n| !kept(n)).copied().collect();
        for n in lost {
            self.done.experts.remove(&n);
        }
        self.reused = self.done.experts.len() as u64;
        let trunk: u64 = self.done.trunk.values().map(|t| t.len).sum();
        self.at.done_bytes = trunk + self.reused * self.layout.expert_bytes;
    }

    /// Room for what is still to be written, by device. Where shards are deleted from the device that is written to, what it
    /// will have is not known; then the import goes on after somebody made room.
    fn check_space(&self, checkpoint: &Path) -> Result<(), PlacedError> {
        let device = |path: &Path| std::fs::metadata(path).map(|m| m.dev()).map_err(|e| ImportError::io(path, e));
        let mut needs: BTreeMap<u64, (PathBuf, u64, u64)> = BTreeMap::new();
        let trunk: u64 = self.done.trunk.values().map(|t| t.len).sum();
        let own = self.layout.trunk_file_bytes.saturating_sub(trunk) + SPARE_BYTES;
        needs.insert(device(self.store)?, (self.store.to_path_buf(), own, 0));
        for (drive, mount) in self.mounts.iter().enumerate() {
            let experts: u64 = self.slots[drive].values().map(|pack| pack.len() as u64).sum();
            let need = needs.entry(device(mount)?).or_insert((mount.clone(), SPARE_BYTES, 0));
            need.1 = need.1.saturating_add(experts.saturating_mul(self.slot_bytes()));
            // what an earlier run wrote is there already
            need.2 = need.2.saturating_add(held_bytes(&self.folders[drive]));
        }
        let from = device(checkpoint)?;
        for (device, (path, all, held)) in needs {
            let needs = all.saturating_sub(held);
            let has = space::free_bytes(&path).map_err(|e| ImportError::io(&path, e))?;
            if needs > has && !(self.options.drop_shards && device == from) {
                return Err(ImportError::NoSpace { store: path, needs, has }.into());
            }
        }
        Ok(())
    }

    /// Takes what has arrived until all has.
    fn take_all(
        mut self,
        mut arriving: Arriving,
        plan_file: &Path,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<PlacedReport, PlacedError> {
        events(Event::Progress(self.at));
        let (mut last, mut since) = (Vec::new(), Instant::now());
        loop {
            let gone = self.done.dropped.clone();
            let fresh = arriving.look(&|name| gone.contains(name))?;
            for &shard in &fresh {
                self.note_shard(arriving.checkpoint(), shard)?;
            }
            let source = arriving.checkpoint();
            let taken = self.take_known(source, events);
            // what was finished counts, also after a failure; the failure wins
            let committed = self.commit();
            taken.and(committed)?;
            if self.options.drop_shards {
                self.drop_done(source, events)?;
            }
            if self.is_all(source) {
                return self.finish(source, plan_file);
            }
            if arriving.awaited().is_empty() {
                let names = arriving.unseen(LISTED).join(", ");
                let reason = "no shard holds them, or they were lost with a drive after their shard had been deleted";
                return Err(PlacedError::Refused(format!("{}: missing: {names}; {reason}", source.folder().display())));
            }
            let Some(follow) = self.options.follow else {
                return Err(PlacedError::Refused(awaited_words(source, arriving.awaited())));
            };
            if last != arriving.awaited() || !fresh.is_empty() {
                last = arriving.awaited().to_vec();
                since = Instant::now();
            } else if since.elapsed() >= follow.timeout {
                let words = awaited_words(source, arriving.awaited());
                return Err(PlacedError::Refused(format!("{words}; nothing arrived for {:?}", follow.timeout)));
            }
            events(Event::Waiting(arriving.awaited()));
            std::thread::sleep(follow.poll);
        }
    }

    /// A shard is whole: it must be the one that an earlier run took from, and one that may be deleted if it is to be.
    fn note_shard(&mut self, source: &Checkpoint, shard: u32) -> Result<(), PlacedError> {
        let Some(seen) = source.shards().get(shard as usize) else { return Ok(()) };
        let path = source.shard_path(shard);
        if self.options.drop_shards {
            let meta = std::fs::symlink_metadata(&path).map_err(|e| ImportError::io(&path, e))?;
            if !meta.is_file() || meta.nlink() > 1 {
                return Err(PlacedError::Refused(format!(
                    "--drop-shards: {} is a link, and what it leads to is not deleted; leave the flag out",
                    path.display()
                )));
            }
        }
        let kept = Kept { bytes: seen.bytes, modified_ns: seen.modified_ns };
        match self.done.shards.insert(seen.name.clone(), kept) {
            Some(before) if before != kept => Err(ImportError::OtherCheckpoint {
                store: self.store.to_path_buf(),
                reason: format!("shard {} has another size or modification time", seen.name),
            }
            .into()),
            Some(_) => Ok(()),
            None => {
                self.journal.note_line(&kept.line(&seen.name));
                Ok(())
            }
        }
    }
}

/// Bytes of the packs in a folder: they may stay, so they are room too.
fn held_bytes(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    // sparse files hold less than they are long
    files.filter_map(|f| f.metadata().ok()).map(|m| m.blocks() * 512).sum()
}

fn awaited_words(source: &Checkpoint, awaited: &[Awaited]) -> String {
    let one = |a: &Awaited| match (a.seen_bytes, a.expected_bytes) {
        (None, _) => format!("{} (not there)", a.name),
        (Some(seen), None) => format!("{} ({seen} bytes so far)", a.name),
        (Some(seen), Some(all)) => format!("{} ({seen} of {all} bytes)", a.name),
    };
    let list: Vec<String> = awaited.iter().take(LISTED).map(one).collect();
    let more = if awaited.len() > LISTED { ", ..." } else { "" };
    format!(
        "{}: {} shards are not whole: {}{more}; fetch them and run the same command again, or wait for them with --follow",
        source.folder().display(),
        awaited.len(),
        list.join(", ")
    )
}
