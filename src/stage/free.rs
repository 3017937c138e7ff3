//! Giving the space of slots that nothing is in back to the file system: whole packs, their ends, and holes inside them. Runs
//! only after the manifest without the slots is durable, so a stop at any moment leaves at most space that the next
//! run frees. Touches no file but the packs that it is told of.

use crate::store::manifest::DriveManifest;
use crate::store::piece::PackId;
use crate::sys::hole::{allocated_bytes, punch};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// A failure, and the file.
pub(super) type Fault = (PathBuf, io::Error);

/// Bytes that freeing the unused slots of `packs` would give back.
pub(super) fn unused_bytes(folder: &Path, manifest: &DriveManifest, packs: &BTreeSet<PackId>) -> Result<u64, Fault> {
    // What is in use takes whole blocks of the file system, not whole slots.
    let block = |metadata: &Metadata| std::os::unix::fs::MetadataExt::blksize(metadata).max(1);
    let mut used: BTreeMap<PackId, Vec<u64>> = BTreeMap::new();
    for piece in manifest.pieces() {
        used.entry(piece.key.pack()).or_default().push(piece.key.bytes(manifest.expert_bytes));
    }
    let mut sum = 0u64;
    for pack in packs {
        let path = folder.join(pack.name());
        if let Some(metadata) = pack_file(&path)? {
            let own: Vec<u64> =
                used.get(pack).into_iter().flatten().map(|b| b.next_multiple_of(block(&metadata))).collect();
            let rest = allocated_bytes(&metadata).saturating_sub(own.iter().sum());
            // Less than the smallest piece is what the file system keeps about the file itself.
            let least = own.iter().copied().min().unwrap_or(1).max(1);
            sum += rest - rest % least;
        }
    }
    Ok(sum)
}

/// Frees the slots of `packs` that `manifest` does not use; returns the bytes that the file system got back.
pub(super) fn free_unused(folder: &Path, manifest: &DriveManifest, packs: &BTreeSet<PackId>) -> Result<u64, Fault> {
    let mut freed = 0u64;
    for pack in packs {
        let path = folder.join(pack.name());
        let fault = |e| (path.clone(), e);
        let Some(before) = pack_file(&path)? else { continue };
        let mut used: Vec<u64> = manifest.used_slots(pack).into_iter().map(u64::from).collect();
        used.sort_unstable();
        let Some(&last) = used.last() else {
            std::fs::remove_file(&path).map_err(fault)?;
            freed += allocated_bytes(&before);
            continue;
        };
        let file = File::options().read(true).write(true).open(&path).map_err(fault)?;
        let slot_bytes = manifest.slot_bytes_of(pack);
        let end = (last + 1) * slot_bytes;
        if before.len() > end {
            file.set_len(end).map_err(fault)?;
        }
        let mut next = 0;
        for slot in used {
            match punch(&file, next * slot_bytes, (slot - next) * slot_bytes) {
                // the pack keeps its length there, and later stagings use the slots
                Err(e) if e.kind() == ErrorKind::Unsupported => break,
                other => other.map_err(fault)?,
            }
            next = slot + 1;
        }
        // so that the freed space is there when this says so
        file.sync_all().map_err(fault)?;
        freed += allocated_bytes(&before).saturating_sub(allocated_bytes(&file.metadata().map_err(fault)?));
    }
    crate::sys::durable::sync_folder(folder).map_err(|e| (folder.to_path_buf(), e))?;
    Ok(freed)
}

/// The pack's file; `None` when there is none, or it is a link or a folder, which is nobody's pack.
fn pack_file(path: &Path) -> Result<Option<Metadata>, Fault> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata).filter(Metadata::is_file)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err((path.to_path_buf(), e)),
    }
}
