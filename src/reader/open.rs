//! Opening a drive folder for reading: `drive.json`, every file, and where each expert of the plan lies. Checks that
//! the plan lies within what is on the drive; reads no expert.

use super::options::{ReaderError, ReaderOptions};
use crate::drive::fault_rule::{FaultKind, FaultRule, When};
use crate::drive::spec::{DriveSpec, device_number};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::io::faults::FaultyDrive;
use crate::knob::{self, Knob};
use crate::layout::plan::{Plan, Shape};
use crate::store::manifest::{DRIVE_FILE, Digest, DriveManifest, ManifestError, drive_folder};
use crate::sys::direct::{DioAlignment, open_direct};
use crate::sys::limits::raise_open_files;
use crate::sys::lock::try_lock;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Descriptors that the rest of the program needs.
const SPARE_FILES: u64 = 256;
/// Missing experts that an error lists.
const LISTED: usize = 8;

/// Where an expert lies on a drive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Located {
    pub file: u32,
    pub slot: u32,
    /// First byte: of the expert, or of this drive's part of a striped one.
    pub offset: u64,
    /// Digest of the whole expert.
    pub digest: Digest,
    /// Digest of what lies here.
    pub own_digest: Digest,
}

/// A drive folder, opened for the experts that a plan lets it serve.
#[derive(Debug)]
pub struct OpenedDrive {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    pub(super) files: Vec<File>,
    pub(super) names: Vec<String>,
    /// By layer, then expert; `None` where the plan does not use this drive.
    pub(super) table: Vec<Vec<Option<Located>>>,
    pub(super) alignment: Option<DioAlignment>,
    pub(super) device_number: u64,
    pub(super) emulated: bool,
    /// What its reads meet on purpose.
    pub(super) faults: Option<Arc<FaultyDrive>>,
    /// Shared with other runs; whoever frees what is on the drive waits for its end.
    pub(super) reading: Option<File>,
}

impl OpenedDrive {
    /// The folder with `drive.json`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Strictest alignment of its files; `None` = they are read through the page cache.
    pub fn alignment(&self) -> Option<DioAlignment> {
        self.alignment
    }

    pub(super) fn locate(&self, layer: LayerId, expert: ExpertId) -> Option<Located> {
        *self.table.get(layer.index())?.get(expert.index())?
    }

    fn error(&self, path: impl Into<PathBuf>, reason: impl ToString) -> ReaderError {
        ReaderError::Drive { drive: self.name.clone(), path: path.into(), reason: reason.to_string() }
    }
}

/// The mounts of a plan's drives in id order: those of `specs` with the same name, else the paths in the plan,
/// unpaced. With `specs` given, a plan drive that is not among them is an error.
pub fn mounts_of(plan: &Plan, specs: Option<&[DriveSpec]>) -> Result<Vec<DriveSpec>, ReaderError> {
    let find = |drive: &crate::layout::plan::PlanDrive| match specs {
        None => Ok(DriveSpec { name: drive.name.clone(), path: drive.path.clone(), emulate: None, faults: Vec::new() }),
        Some(specs) => specs.iter().find(|s| s.name == drive.name).cloned().ok_or_else(|| {
            ReaderError::Plan(format!("the plan needs drive `{}`, which the drives file does not name", drive.name))
        }),
    };
    plan.drives.iter().map(find).collect()
}

/// Opens drive `id` of `plan` at `mount`: reads its `drive.json` and opens every file that the plan uses.
pub fn open_drive(
    plan: &Plan,
    id: DriveId,
    mount: &DriveSpec,
    options: &ReaderOptions,
) -> Result<OpenedDrive, ReaderError> {
    let folder = drive_folder(&mount.path, &plan.model_id);
    let mut opened = OpenedDrive {
        name: mount.name.clone(),
        folder: folder.clone(),
        files: Vec::new(),
        names: Vec::new(),
        table: Vec::new(),
        alignment: None,
        device_number: 0,
        emulated: mount.emulate.is_some(),
        faults: faults_of(mount, options),
        reading: None,
    };
    opened.reading = lock_for_reading(&opened)?;
    let manifest = load_manifest(&opened)?;
    check_manifest(&opened, &manifest, plan)?;
    opened.device_number = device_number(&folder).map_err(|e| opened.error(&folder, e))?;
    fill_table(&mut opened, &manifest, plan, id)?;
    open_files(&mut opened, options)?;
    if let Some(alignment) = opened.alignment {
        check_aligned(&opened, plan, alignment)?;
    }
    Ok(opened)
}

/// The faults that a drive is to meet: those of drives.toml, then those of the run.
fn faults_of(mount: &DriveSpec, options: &ReaderOptions) -> Option<Arc<FaultyDrive>> {
    let own = options.faults.iter().filter(|f| f.drive == mount.name).map(|f| f.rule);
    let mut rules: Vec<FaultRule> = mount.faults.iter().copied().chain(own).collect();
    if knob::skipped(Knob::Faults) {
        rules.clear();
    } else if rules.is_empty() && knob::forced(Knob::Faults) {
        rules.push(FaultRule::new(FaultKind::Stall { for_ns: Some(20_000_000) }, When::Reads { from: 0, to: Some(4) }));
    }
    (!rules.is_empty()).then(|| FaultyDrive::new(&mount.name, rules))
}

/// From here on nothing that `drive.json` names is freed until the run ends.
fn lock_for_reading(drive: &OpenedDrive) -> Result<Option<File>, ReaderError> {
    match try_lock(&drive.folder, true) {
        // what is missing is said better where it is read
        Err(_) => Ok(None),
        Ok(Ok(file)) => Ok(Some(file)),
        Ok(Err(held)) => {
            let reason = format!("`argodrive prune` or a rollback ({held}) is freeing space there; wait for it to end");
            Err(drive.error(&drive.folder, reason))
        }
    }
}

fn load_manifest(drive: &OpenedDrive) -> Result<DriveManifest, ReaderError> {
    DriveManifest::open(&drive.folder).map_err(|e| match e {
        ManifestError::Io { path, source } if source.kind() == io::ErrorKind::NotFound => {
            drive.error(path, "not there: the drive is not mounted, or nothing was staged; run `argodrive stage`")
        }
        ManifestError::Io { path, source } => drive.error(path, source),
        ManifestError::Syntax { path, reason } => drive.error(path, format!("not a valid manifest: {reason}")),
        ManifestError::Inconsistent { path, reason } => drive.error(path, reason),
        ManifestError::Version { path, seen, newest } => {
            drive.error(path, format!("version {seen}, this program reads up to {newest}; use a newer argodrive"))
        }
    })
}

fn check_manifest(drive: &OpenedDrive, manifest: &DriveManifest, plan: &Plan) -> Result<(), ReaderError> {
    let path = drive.folder.join(DRIVE_FILE);
    if manifest.model_id != plan.model_id || manifest.expert_bytes != plan.expert_bytes {
        let reason = format!(
            "holds experts of model {} ({} bytes), the plan is for {} ({} bytes)",
            manifest.model_id, manifest.expert_bytes, plan.model_id, plan.expert_bytes
        );
        return Err(drive.error(path, reason));
    }
    Ok(())
}

/// Fills `table` and `names` with what the plan may read from this drive.
fn fill_table(opened: &mut OpenedDrive, manifest: &DriveManifest, plan: &Plan, id: DriveId) -> Result<(), ReaderError> {
    let mut missing = Vec::new();
    let mut missing_count = 0usize;
    let mut numbers: HashMap<String, u32> = HashMap::new();
    for key in plan.pieces_on(id) {
        let (layer, expert) = (key.layer, key.expert);
        let Some(piece) = manifest.find_piece(&key) else {
            missing_count += 1;
            if missing.len() < LISTED {
                missing.push(key.to_string());
            }
            continue;
        };
        let (name, extent) = manifest.locate_piece(&piece);
        let next = numbers.len() as u32;
        let file = *numbers.entry(name).or_insert_with_key(|name| {
            opened.names.push(name.clone());
            next
        });
        if opened.table.len() <= layer.index() {
            opened.table.resize_with(layer.index() + 1, Vec::new);
        }
        let row = &mut opened.table[layer.index()];
        if row.len() <= expert.index() {
            row.resize(expert.index() + 1, None);
        }
        row[expert.index()] = Some(Located {
            file,
            slot: piece.slot,
            offset: extent.offset,
            digest: piece.expert_digest,
            own_digest: piece.digest,
        });
    }
    if missing_count > 0 {
        let more = if missing_count > LISTED { ", ..." } else { "" };
        let list = missing.join(", ");
        let reason =
            format!("{missing_count} experts of the plan are not on the drive ({list}{more}); run `argodrive stage`");
        return Err(opened.error(opened.folder.join(DRIVE_FILE), reason));
    }
    Ok(())
}

fn open_files(opened: &mut OpenedDrive, options: &ReaderOptions) -> Result<(), ReaderError> {
    let folder = opened.folder.clone();
    // The lowest free descriptor is close to the number of files that other drives and the program have open.
    let used = File::open(&folder).map_err(|e| opened.error(&folder, e))?.as_raw_fd();
    let pools = if super::budget::prefetches(options) { 2 } else { 1 };
    let wanted = u64::from(used.unsigned_abs()) + opened.names.len() as u64 * pools + SPARE_FILES;
    raise_open_files(wanted).map_err(|e| opened.error(&folder, e))?;
    for index in 0..opened.names.len() {
        let path = folder.join(&opened.names[index]);
        let (file, alignment) = open_one(&path, options).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                opened.error(&path, "drive.json names it, but it is gone; run `argodrive stage`")
            }
            io::ErrorKind::Unsupported => opened.error(
                &path,
                format!("{e}; use another file system, or allow reads through the page cache with --allow-fallback"),
            ),
            _ => opened.error(&path, e),
        })?;
        opened.files.push(file);
        opened.alignment = match (index, opened.alignment, alignment) {
            (0, _, seen) => seen,
            (_, Some(a), Some(b)) => Some(DioAlignment {
                memory_bytes: a.memory_bytes.max(b.memory_bytes),
                offset_bytes: a.offset_bytes.max(b.offset_bytes),
                reported: a.reported && b.reported,
            }),
            _ => None,
        };
    }
    Ok(())
}

fn open_one(path: &Path, options: &ReaderOptions) -> io::Result<(File, Option<DioAlignment>)> {
    if options.direct || knob::forced(Knob::Direct) {
        match open_direct(path) {
            Ok(direct) => return Ok((direct.file, Some(direct.alignment))),
            Err(e) if e.kind() == io::ErrorKind::Unsupported && options.allow_buffered => {}
            Err(e) => return Err(e),
        }
    }
    Ok((File::open(path)?, None))
}

fn check_aligned(opened: &OpenedDrive, plan: &Plan, alignment: DioAlignment) -> Result<(), ReaderError> {
    let step = u64::from(alignment.offset_bytes);
    if let Shape::Stripe { unit_bytes } = plan.shape
        && unit_bytes % step.max(u64::from(alignment.memory_bytes)) != 0
    {
        let reason =
            format!("stripes of {unit_bytes} bytes; direct reads there need a multiple of {step}: plan another unit");
        return Err(opened.error(&opened.folder, reason));
    }
    let off = opened.table.iter().flatten().flatten().find(|l| l.offset % step != 0);
    match off {
        None => Ok(()),
        Some(l) => {
            let path = opened.folder.join(&opened.names[l.file as usize]);
            Err(opened.error(
                path,
                format!("offset {} is not a multiple of the {step} bytes that direct reads need", l.offset),
            ))
        }
    }
}
