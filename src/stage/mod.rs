//! Makes a plan true: copies the experts that a plan places on a drive and the drive does not yet hold. Knows
//! manifests and plans; knows nothing of readers or decoding.
//!
//! Order of writes, so that a stop at any moment loses nothing: experts go into slots that no manifest names, the
//! pack is fsynced, the new bytes are read back past the page cache and their digests compared, and only then the new
//! `drive.json` replaces the old one. That happens pack by pack, so a later run continues where this one ended.
//! Freeing (`prune`, `rollback`) goes the other way: first the manifest without the slots, then their space.
//!
//! One process at a time writes to a drive: two would give the same free slot to different experts. Adding disturbs no run
//! that reads the drive, because slots that a durable manifest names are not written; freeing waits for such runs.

mod compare;
mod copy;
mod free;
mod journal;
mod lock;
mod pace;
pub mod placed;
mod placed_copy;
mod placed_state;
pub mod prune;
pub mod rollback;

use crate::layout::plan::{Plan, PlanError};
use crate::store::import::Progress;
use crate::store::manifest::{Digest, DriveManifest, ManifestError, StoreManifest, drive_folder};
use crate::store::piece::{PackId, PieceKey};
use crate::sys::lock::Held;
use compare::plan_work;
use lock::lock_mounts;
use pace::Pace;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Space that staging leaves free on a drive unless told otherwise.
pub const DEFAULT_MARGIN_BYTES: u64 = 256 << 20;

/// What can go wrong while staging.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// A manifest is unreadable or does not fit.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The plan is no good.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A file could not be read or written.
    #[error("drive {drive}: {}: {source}", path.display())]
    Io {
        /// Drive name.
        drive: String,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What was read is not what the manifest says.
    #[error("{0}")]
    Digest(Box<DigestFault>),
    /// Not enough room.
    #[error("drive {drive} ({}): needs {need_bytes} bytes and {margin_bytes} spare, has {free_bytes} free; free some space, lower --margin, or plan with fewer copies", path.display())]
    Space {
        /// Drive name.
        drive: String,
        /// Its folder.
        path: PathBuf,
        /// Bytes to write.
        need_bytes: u64,
        /// Bytes to leave free.
        margin_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// Another process writes to the drive.
    #[error("drive {drive} ({}): another `argodrive stage`, `prune` or `import --plan` ({held}) is writing to it; wait for it to end, or stop it: what it has copied is kept", path.display())]
    Busy {
        /// Drive name.
        drive: String,
        /// Its folder.
        path: PathBuf,
        /// Who it is.
        held: Held,
    },
    /// A run reads what would be freed.
    #[error("drive {drive} ({}): a run or `argodrive verify` ({held}) is reading from it, and what it reads must stay; wait for it to end, or stop it", path.display())]
    InUse {
        /// Drive name.
        drive: String,
        /// Its folder of the model.
        path: PathBuf,
        /// Who it is.
        held: Held,
    },
    /// The plan and the store or drive do not belong together.
    #[error("{0}")]
    Mismatch(String),
}

/// An expert whose bytes are not those of its digest.
#[derive(Debug)]
pub struct DigestFault {
    /// Drive name.
    pub drive: String,
    /// The file.
    pub path: PathBuf,
    /// First byte of the expert.
    pub offset: u64,
    /// The expert, or its part.
    pub key: PieceKey,
    /// Digest of the bytes.
    pub seen: Digest,
    /// Digest in the manifest.
    pub expected: Digest,
    /// What to do.
    pub advice: &'static str,
}

impl std::fmt::Display for DigestFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { drive, path, offset, key, seen, expected, advice } = self;
        write!(
            f,
            "drive {drive}: {} at offset {offset}: {key} has digest {seen}, its manifest says {expected}; {advice}",
            path.display()
        )
    }
}

/// How to stage.
#[derive(Clone, Copy, Debug)]
pub struct StageOptions {
    /// Only say what would be copied.
    pub dry_run: bool,
    /// Bytes that stay free on every drive.
    pub margin_bytes: u64,
    /// Read back what is there already, and copy again what is wrong.
    pub repair: bool,
    /// Payload bytes per second that are copied at most, all drives together; `None` = no limit.
    pub rate_bytes_per_s: Option<u64>,
}

impl Default for StageOptions {
    fn default() -> Self {
        Self { dry_run: false, margin_bytes: DEFAULT_MARGIN_BYTES, repair: false, rate_bytes_per_s: None }
    }
}

/// What staging did, or would do, on one drive.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DriveReport {
    /// Drive name.
    pub name: String,
    /// The drive's folder of this model.
    pub folder: PathBuf,
    /// Experts, or parts of striped ones, that the plan wants there.
    pub planned: usize,
    /// Of these, there already, whole as far as was looked.
    pub present: usize,
    /// Planned ones that `drive.json` names, but whose bytes are gone, or wrong (told only by a repair).
    pub spoiled: usize,
    /// Copied (or to be copied in a dry run).
    pub copied: usize,
    /// Payload bytes of those.
    pub copied_bytes: u64,
    /// Time that the copy waited for the rate limit.
    pub waited_ns: u64,
}

/// What is missing on one drive.
struct Work {
    name: String,
    folder: PathBuf,
    manifest: DriveManifest,
    planned: usize,
    spoiled: usize,
    /// Planned pieces that are there.
    present: Vec<PieceKey>,
    /// By pack; `true` = not named by `drive.json` before.
    missing: BTreeMap<PackId, Vec<(PieceKey, bool)>>,
}

impl Work {
    fn missing_count(&self) -> usize {
        self.missing.values().map(Vec::len).sum()
    }

    fn missing_bytes(&self) -> u64 {
        let keys = self.missing.values().flatten();
        keys.map(|(key, _)| key.bytes(self.manifest.expert_bytes)).fold(0, u64::saturating_add)
    }

    /// Bytes of slots that the missing pieces take.
    fn slot_bytes(&self) -> u64 {
        let of = |(pack, keys): (&PackId, &Vec<_>)| keys.len() as u64 * self.manifest.slot_bytes_of(pack);
        self.missing.iter().map(of).fold(0, u64::saturating_add)
    }

    fn fault(&self, path: &Path) -> impl FnOnce(std::io::Error) -> StageError + use<> {
        let (drive, path) = (self.name.clone(), path.to_path_buf());
        move |source| StageError::Io { drive, path, source }
    }
}

/// Stages `plan` from the store in `store`. `mounts` overrides the plan's drive paths, in plan order.
pub fn stage(
    plan: &Plan,
    store: &Path,
    mounts: &[PathBuf],
    options: StageOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<DriveReport>, StageError> {
    check_store(plan, store)?;
    if options.rate_bytes_per_s == Some(0) {
        return Err(StageError::Mismatch("a rate limit of 0 would never end; leave --rate out for no limit".into()));
    }
    let plan_hash = plan.hash()?;
    let source_folder = drive_folder(store, &plan.model_id);
    let source = DriveManifest::open(&source_folder)?;
    check_mounts(plan, mounts)?;
    // Held until everything is published.
    let _locks = if options.dry_run { Vec::new() } else { lock_mounts(plan, mounts)? };
    let work = plan_work(plan, mounts, &source, options.repair)?;
    check_space(&work, options.margin_bytes)?;
    let total_bytes = work.iter().map(Work::missing_bytes).sum();
    let mut done_bytes = 0;
    let mut reports = Vec::with_capacity(work.len());
    let mut pace = PacedCopy::new(options.rate_bytes_per_s);
    for mut item in work {
        let copied = item.missing_count();
        let mut report = DriveReport {
            name: item.name.clone(),
            folder: item.folder.clone(),
            planned: item.planned,
            present: item.planned - copied,
            spoiled: item.spoiled,
            copied,
            copied_bytes: item.missing_bytes(),
            waited_ns: 0,
        };
        if !options.dry_run {
            let waited_before = pace.waited_ns;
            let tick = &mut |bytes| {
                done_bytes += bytes;
                progress(Progress { done_bytes, total_bytes });
            };
            copy::fill_drive(&mut item, &plan_hash, &source_folder, &source, &mut pace, tick)?;
            report.waited_ns = pace.waited_ns - waited_before;
        }
        reports.push(report);
    }
    if let Some(last) = reports.iter_mut().rfind(|r| r.copied > 0 && !options.dry_run) {
        last.waited_ns += pace.finish();
    }
    Ok(reports)
}

/// The rate limit on the real clock.
struct PacedCopy {
    pace: Pace,
    begun: Instant,
    waited_ns: u64,
}

impl PacedCopy {
    fn new(bytes_per_s: Option<u64>) -> Self {
        Self { pace: Pace::new(bytes_per_s), begun: Instant::now(), waited_ns: 0 }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Waits until `bytes` may be copied.
    fn before(&mut self, bytes: u64) {
        let wait = self.pace.wait_ns(self.now_ns(), bytes);
        self.sleep(wait);
    }

    /// Waits out the time of the last bytes; returns how long.
    fn finish(&mut self) -> u64 {
        let wait = self.pace.rest_ns(self.now_ns());
        self.sleep(wait);
        wait
    }

    fn sleep(&mut self, wait_ns: u64) {
        if wait_ns > 0 {
            std::thread::sleep(Duration::from_nanos(wait_ns));
            self.waited_ns += wait_ns;
        }
    }
}

/// The store is there and holds the plan's model.
fn check_store(plan: &Plan, store: &Path) -> Result<(), StageError> {
    let manifest = StoreManifest::open(store)?;
    if manifest.model_id == plan.model_id {
        return Ok(());
    }
    Err(StageError::Mismatch(format!(
        "the plan is for model {}, the store {} holds {}; plan again with this store, or name the right one with --store",
        plan.model_id,
        store.display(),
        manifest.model_id
    )))
}

/// Every mount is a folder of its own, and none lies inside another.
fn check_mounts(plan: &Plan, mounts: &[PathBuf]) -> Result<(), StageError> {
    if mounts.len() != plan.drives.len() {
        let (drives, paths) = (plan.drives.len(), mounts.len());
        return Err(StageError::Mismatch(format!("the plan has {drives} drives, {paths} paths were given")));
    }
    let mut seen: Vec<(PathBuf, &str)> = Vec::new();
    for (drive, mount) in plan.drives.iter().zip(mounts) {
        let name = drive.name.as_str();
        let folder = mount.canonicalize().ok().filter(|m| m.is_dir()).ok_or_else(|| {
            StageError::Mismatch(format!(
                "drive {name} ({}) is not a folder; mount it, or correct its path in drives.toml",
                mount.display()
            ))
        })?;
        for (other, owner) in &seen {
            let advice = "correct one of the paths in drives.toml";
            if *other == folder {
                let at = mount.display();
                return Err(StageError::Mismatch(format!(
                    "drives {owner} and {name} are the same folder ({at}); {advice}"
                )));
            }
            if let Some((inner, outer)) = match (folder.starts_with(other), other.starts_with(&folder)) {
                (true, _) => Some((name, *owner)),
                (_, true) => Some((*owner, name)),
                _ => None,
            } {
                let (a, b) = (folder.display(), other.display());
                return Err(StageError::Mismatch(format!(
                    "drive {inner} lies inside drive {outer} ({a}, {b}); one drive would count the other's bytes: {advice}"
                )));
            }
        }
        seen.push((folder, name));
    }
    Ok(())
}

/// Every file system has room for what its drives will get, and the margin.
fn check_space(work: &[Work], margin_bytes: u64) -> Result<(), StageError> {
    // Drives on one file system share its space.
    let mut groups: BTreeMap<u64, (Vec<&str>, &Work, u64)> = BTreeMap::new();
    for item in work.iter().filter(|w| w.missing_count() > 0) {
        let mount = existing(&item.folder);
        let device = crate::sys::space::device_number(mount).map_err(item.fault(mount))?;
        let group = groups.entry(device).or_insert((Vec::new(), item, 0));
        group.0.push(&item.name);
        group.2 = group.2.saturating_add(item.slot_bytes());
    }
    for (names, item, need_bytes) in groups.into_values() {
        let mount = existing(&item.folder);
        let free_bytes = crate::sys::space::free_bytes(mount).map_err(item.fault(mount))?;
        if free_bytes < need_bytes.saturating_add(margin_bytes) {
            let (drive, path) = (names.join(", "), mount.to_path_buf());
            return Err(StageError::Space { drive, path, need_bytes, margin_bytes, free_bytes });
        }
    }
    Ok(())
}

/// The nearest folder that is there.
fn existing(folder: &Path) -> &Path {
    folder.ancestors().find(|p| p.is_dir()).unwrap_or(folder)
}
