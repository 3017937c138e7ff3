//! Copies one drive's missing experts, layer by layer, each layer made durable and verified before it is published.

use super::{DigestFault, StageError, Work};
use crate::ids::{ExpertId, LayerId};
use crate::store::manifest::{Digest, DriveExpert, DriveManifest};
use crate::sys::durable::sync_folder;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Fills `work`'s drive from the store's own drive folder. `tick` is told payload bytes as they are written.
pub(super) fn fill_drive(
    work: &mut Work,
    source_folder: &Path,
    source: &DriveManifest,
    tick: &mut dyn FnMut(u64),
) -> Result<(), StageError> {
    let created = std::fs::create_dir_all(&work.folder);
    created.map_err(|source| StageError::Io { drive: work.name.clone(), path: work.folder.clone(), source })?;
    let missing = std::mem::take(&mut work.missing);
    for (layer, experts) in missing {
        let added = copy_layer(work, layer, &experts, source_folder, source, tick)?;
        publish(work, layer, added)?;
    }
    Ok(())
}

/// Writes `experts` of `layer` into free slots of the pack; returns their entries once they are durable and read back.
fn copy_layer(
    work: &Work,
    layer: LayerId,
    experts: &[ExpertId],
    source_folder: &Path,
    source: &DriveManifest,
    tick: &mut dyn FnMut(u64),
) -> Result<Vec<DriveExpert>, StageError> {
    let used: HashSet<u32> = work.manifest.layers.get(&layer).into_iter().flatten().map(|e| e.slot).collect();
    let mut free = (0u32..).filter(|slot| !used.contains(slot));
    let pack = work.folder.join(crate::store::manifest::pack_name(layer));
    let fault = |path: &Path| {
        let (drive, path) = (work.name.clone(), path.to_path_buf());
        move |source| StageError::Io { drive, path, source }
    };
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&pack).map_err(fault(&pack))?;
    let mut buffer = vec![0u8; source.expert_bytes as usize];
    let mut added = Vec::with_capacity(experts.len());
    let mut end_bytes = file.metadata().map_err(fault(&pack))?.len();
    let mut opened: Option<(String, File)> = None;
    for &expert in experts {
        let Some(original) = source.find(layer, expert) else {
            return Err(StageError::Mismatch(format!("the store lost L{}-E{} while staging", layer.0, expert.0)));
        };
        let (name, extent) = source.locate(layer, original);
        let from = source_folder.join(&name);
        if opened.as_ref().is_none_or(|(open, _)| *open != name) {
            opened = Some((name, File::open(&from).map_err(fault(&from))?));
        }
        if let Some((_, reader)) = &opened {
            reader.read_exact_at(&mut buffer, extent.offset).map_err(fault(&from))?;
        }
        let advice = "that is the store's own copy: import the checkpoint again into a new store";
        compare(work, &from, extent.offset, layer, original, &buffer, advice)?;
        let Some(slot) = free.next() else {
            return Err(StageError::Mismatch(format!("{}: no free slot", pack.display())));
        };
        let entry = DriveExpert { expert, slot, digest: original.digest };
        let (_, extent) = work.manifest.locate(layer, &entry);
        file.write_all_at(&buffer, extent.offset).map_err(fault(&pack))?;
        end_bytes = end_bytes.max(extent.offset + work.manifest.slot_bytes);
        added.push(entry);
        tick(source.expert_bytes);
    }
    if let Some((_, reader)) = &opened {
        // The store may be a drive of the next run: what was read here must not make it warm.
        crate::sys::cache::drop_file(reader).map_err(fault(source_folder))?;
    }
    // Reads ask for the payload rounded up to the alignment: the last slot must exist as a whole.
    file.set_len(end_bytes).map_err(fault(&pack))?;
    file.sync_all().map_err(fault(&pack))?;
    // What lies in the page cache proves nothing about the drive.
    crate::sys::cache::drop_file(&file).map_err(fault(&pack))?;
    for entry in &added {
        let (_, extent) = work.manifest.locate(layer, entry);
        file.read_exact_at(&mut buffer, extent.offset).map_err(fault(&pack))?;
        compare(
            work,
            &pack,
            extent.offset,
            layer,
            entry,
            &buffer,
            "the drive did not keep what was written; check it",
        )?;
    }
    crate::sys::cache::drop_file(&file).map_err(fault(&pack))?;
    Ok(added)
}

fn compare(
    work: &Work,
    path: &Path,
    offset: u64,
    layer: LayerId,
    entry: &DriveExpert,
    bytes: &[u8],
    advice: &'static str,
) -> Result<(), StageError> {
    let seen = Digest::of(bytes);
    if seen == entry.digest {
        return Ok(());
    }
    Err(StageError::Digest(Box::new(DigestFault {
        drive: work.name.clone(),
        path: path.to_path_buf(),
        offset,
        layer,
        expert: entry.expert,
        seen,
        expected: entry.digest,
        advice,
    })))
}

/// Names the new experts in `drive.json`.
fn publish(work: &mut Work, layer: LayerId, added: Vec<DriveExpert>) -> Result<(), StageError> {
    let row = work.manifest.layers.entry(layer).or_default();
    row.extend(added);
    row.sort_by_key(|e| e.expert);
    sync_folder(&work.folder).map_err(|source| StageError::Io {
        drive: work.name.clone(),
        path: work.folder.clone(),
        source,
    })?;
    work.manifest.save(&work.folder)?;
    Ok(())
}
