//! Frees what no plan to keep needs: on the drives of those plans, whatever `drive.json` names and none of them wants.
//!
//! **Never the last copy.** An expert stays where it is unless another complete copy remains: whole in the store or on a drive
//! of the plans, or as all columns of one stripe. Remains means: named by a manifest, and its file is long enough.
//!
//! **Order.** The manifest without the slots becomes durable first, then their space is freed. A stop in between leaves
//! space that the next prune frees.
//!
//! **Never touched:** files that are no pack of this model, the store's own folder, and adopted folders of one file per
//! expert, which are somebody else's.

use super::compare::forget_lost;
use super::free::{free_unused, unused_bytes};
use super::lock::{lock_mount, lock_readers_out};
use super::{StageError, check_mounts, journal};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::layout::plan::Plan;
use crate::store::manifest::{Container, DRIVE_FILE, Digest, DriveManifest, drive_folder};
use crate::store::piece::{PackId, Piece, PieceKey};
use crate::store::stripe::Stripe;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// A plan whose pieces stay.
pub struct Keep<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Where its drives are, in plan order.
    pub mounts: &'a [PathBuf],
    /// Its store; copies there count if it can be read.
    pub store: &'a Path,
}

/// What became, or would become, of one drive.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PruneReport {
    /// Drive name.
    pub name: String,
    /// The drive's folder of this model.
    pub folder: PathBuf,
    /// Pieces that stay.
    pub kept: usize,
    /// Of these, such that no plan needs, but that are the last copy.
    pub last_copies: usize,
    /// Pieces taken out.
    pub removed: usize,
    /// Bytes that the file system gets back.
    pub freed_bytes: u64,
    /// Why nothing is done here, if so.
    pub untouched: Option<String>,
}

/// What an expert's copies are compared by.
type Identity = (LayerId, ExpertId, Digest);

struct Folder {
    name: String,
    folder: PathBuf,
    wanted: BTreeSet<PieceKey>,
    hashes: BTreeSet<String>,
    manifest: DriveManifest,
    /// Pieces whose bytes are there as far as lengths tell.
    sound: HashSet<PieceKey>,
    untouched: Option<String>,
    /// Pieces that go.
    extra: BTreeSet<PieceKey>,
    last_copies: usize,
}

impl Folder {
    fn fault(&self, path: PathBuf, source: std::io::Error) -> StageError {
        StageError::Io { drive: self.name.clone(), path, source }
    }

    fn packs(&self) -> BTreeSet<PackId> {
        self.manifest.packs().into_iter().chain(self.wanted.iter().map(PieceKey::pack)).collect()
    }

    fn without_extra(&self) -> DriveManifest {
        let mut manifest = self.manifest.clone();
        manifest.retain(|key| !self.extra.contains(key));
        manifest
    }
}

/// Frees what none of `keep` needs on any of their drives; with `dry_run` only says what that would be.
pub fn prune(keep: &[Keep<'_>], dry_run: bool) -> Result<Vec<PruneReport>, StageError> {
    let Some(first) = keep.first() else {
        return Err(StageError::Mismatch("name at least one plan to keep".into()));
    };
    if let Some(other) = keep.iter().find(|k| k.plan.model_id != first.plan.model_id) {
        return Err(StageError::Mismatch(format!(
            "the plans are for different models ({}, {}); prune one model at a time",
            first.plan.model_id, other.plan.model_id
        )));
    }
    for k in keep {
        check_mounts(k.plan, k.mounts)?;
    }
    let stores = stores(keep)?;
    let mut mounts = mounts(keep)?;
    // Held until everything is freed.
    let mut locks = Vec::new();
    for (mount, (name, ..)) in &mounts {
        if !dry_run {
            locks.push(lock_mount(name, mount)?);
        }
    }
    let mut folders = Vec::with_capacity(mounts.len());
    for (mount, (name, wanted, hashes)) in std::mem::take(&mut mounts) {
        let folder = drive_folder(&mount, &first.plan.model_id);
        if !folder.join(DRIVE_FILE).exists() {
            continue;
        }
        let folder = open(name, folder, wanted, hashes, &stores)?;
        if folder.manifest.expert_bytes != first.plan.expert_bytes {
            return Err(StageError::Mismatch(format!(
                "drive {} ({}) holds experts of another size than the plan's; it is not this model's folder",
                folder.name,
                folder.folder.display()
            )));
        }
        if !dry_run && folder.untouched.is_none() {
            locks.push(lock_readers_out(&folder.name, &folder.folder)?);
        }
        folders.push(folder);
    }
    spare_last_copies(&mut folders, stores.values());
    folders.iter().map(|folder| carry_out(folder, dry_run)).collect()
}

/// What the plans want at each mount: name, pieces, and the plans' hashes.
type Wanted = BTreeMap<PathBuf, (String, BTreeSet<PieceKey>, BTreeSet<String>)>;

fn mounts(keep: &[Keep<'_>]) -> Result<Wanted, StageError> {
    let mut out = Wanted::new();
    for Keep { plan, mounts, .. } in keep {
        let hash = plan.hash()?;
        for (index, (drive, mount)) in plan.drives.iter().zip(*mounts).enumerate() {
            let path = mount.canonicalize().map_err(|source| {
                let (drive, path) = (drive.name.clone(), mount.clone());
                StageError::Io { drive, path, source }
            })?;
            let entry = out.entry(path).or_insert_with(|| (drive.name.clone(), BTreeSet::new(), BTreeSet::new()));
            entry.1.extend(plan.pieces_on(DriveId(index as u8)));
            entry.2.insert(hash.clone());
        }
    }
    Ok(out)
}

/// The stores' own drive folders that can be read.
fn stores(keep: &[Keep<'_>]) -> Result<BTreeMap<PathBuf, DriveManifest>, StageError> {
    let mut out = BTreeMap::new();
    for k in keep {
        let Ok(folder) = drive_folder(k.store, &k.plan.model_id).canonicalize() else { continue };
        if !folder.join(DRIVE_FILE).exists() {
            continue;
        }
        let mut manifest = DriveManifest::open(&folder)?;
        forget_lost(&mut manifest, &folder).map_err(|(path, source)| {
            let drive = "of the store".to_string();
            StageError::Io { drive, path, source }
        })?;
        out.insert(folder, manifest);
    }
    Ok(out)
}

fn open(
    name: String,
    folder: PathBuf,
    wanted: BTreeSet<PieceKey>,
    hashes: BTreeSet<String>,
    stores: &BTreeMap<PathBuf, DriveManifest>,
) -> Result<Folder, StageError> {
    let manifest = DriveManifest::open(&folder)?;
    let mut sound = manifest.clone();
    forget_lost(&mut sound, &folder).map_err(|(path, source)| {
        let drive = name.clone();
        StageError::Io { drive, path, source }
    })?;
    let is_store = folder.canonicalize().is_ok_and(|f| stores.contains_key(&f));
    let untouched = match manifest.container {
        _ if is_store => Some("it is the store, from which plans are staged".to_string()),
        Container::Files => Some("its files were adopted, and are not argodrive's to delete".to_string()),
        Container::Pack => None,
    };
    let extra = match untouched {
        Some(_) => BTreeSet::new(),
        None => manifest.pieces().map(|p| p.key).filter(|key| !wanted.contains(key)).collect(),
    };
    let sound = sound.pieces().map(|p| p.key).collect();
    Ok(Folder { name, folder, wanted, hashes, manifest, sound, untouched, extra, last_copies: 0 })
}

/// Takes out of `extra` whatever would be the last of its expert.
fn spare_last_copies<'a>(folders: &mut [Folder], stores: impl Iterator<Item = &'a DriveManifest>) {
    let mut safe: HashSet<Identity> = HashSet::new();
    // Columns that remain, by expert and geometry.
    let mut columns: HashMap<(Identity, u64, u8), HashSet<u8>> = HashMap::new();
    let identity = |p: &Piece| (p.key.layer, p.key.expert, p.expert_digest);
    let mut remains = |p: &Piece, expert_bytes: u64| match p.key.part {
        None => {
            safe.insert(identity(p));
        }
        Some(part) => {
            let have = columns.entry((identity(p), part.unit_bytes, part.columns)).or_default();
            have.insert(part.column);
            let stripe = part.stripe(expert_bytes);
            if have.len() == columns_with_bytes(&stripe) {
                safe.insert(identity(p));
            }
        }
    };
    for store in stores {
        store.pieces().for_each(|p| remains(&p, store.expert_bytes));
    }
    for f in folders.iter() {
        let kept = f.manifest.pieces().filter(|p| f.sound.contains(&p.key) && !f.extra.contains(&p.key));
        kept.for_each(|p| remains(&p, f.manifest.expert_bytes));
    }
    // One whole copy is enough; where there is none, every part of the expert stays.
    for whole in [true, false] {
        for f in folders.iter_mut() {
            let mut spared = Vec::new();
            for p in f.manifest.pieces().filter(|p| p.key.part.is_none() == whole && f.extra.contains(&p.key)) {
                if !safe.contains(&identity(&p)) && (f.sound.contains(&p.key) || !whole) {
                    spared.push(p.key);
                    if whole {
                        safe.insert(identity(&p));
                    }
                }
            }
            f.last_copies += spared.len();
            spared.iter().for_each(|key| {
                f.extra.remove(key);
            });
        }
    }
}

fn columns_with_bytes(stripe: &Stripe) -> usize {
    (0..stripe.columns).filter(|&c| stripe.column_bytes(c) > 0).count()
}

fn carry_out(folder: &Folder, dry_run: bool) -> Result<PruneReport, StageError> {
    let manifest = folder.without_extra();
    let mut report = PruneReport {
        name: folder.name.clone(),
        folder: folder.folder.clone(),
        kept: manifest.pieces().count(),
        last_copies: folder.last_copies,
        removed: folder.extra.len(),
        freed_bytes: 0,
        untouched: folder.untouched.clone(),
    };
    if folder.untouched.is_some() {
        return Ok(report);
    }
    let packs = folder.packs();
    if dry_run {
        let bytes = unused_bytes(&folder.folder, &manifest, &packs);
        report.freed_bytes = bytes.map_err(|(path, e)| folder.fault(path, e))?;
        return Ok(report);
    }
    if !folder.extra.is_empty() {
        manifest.save(&folder.folder)?;
    }
    let freed = free_unused(&folder.folder, &manifest, &packs);
    report.freed_bytes = freed.map_err(|(path, e)| folder.fault(path, e))?;
    // Plans that are not kept are no longer staged here, and need nothing.
    let journals = journal::all(&folder.folder).map_err(|e| folder.fault(folder.folder.clone(), e))?;
    for (path, _) in journals.into_iter().filter(|(_, s)| !folder.hashes.contains(&s.plan_hash)) {
        std::fs::remove_file(&path).map_err(|e| folder.fault(path, e))?;
    }
    Ok(report)
}
