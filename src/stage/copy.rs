//! Copies what one drive lacks, pack by pack, each made durable and verified before it is published.

use super::journal::{self, Journal};
use super::{DigestFault, PacedCopy, StageError, Work};
use crate::store::manifest::{DRIVE_FILE, Digest, DriveManifest};
use crate::store::piece::{PackId, Piece, PieceKey};
use crate::sys::durable::sync_folder;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Fills `work`'s drive from the store's own drive folder. `tick` is told payload bytes as they are written.
pub(super) fn fill_drive(
    work: &mut Work,
    plan_hash: &str,
    source_folder: &Path,
    source: &DriveManifest,
    pace: &mut PacedCopy,
    tick: &mut dyn FnMut(u64),
) -> Result<(), StageError> {
    let missing = std::mem::take(&mut work.missing);
    let mut journal = open_journal(work, plan_hash, missing.values().flatten().any(|(_, new)| *new))?;
    if !missing.is_empty() {
        std::fs::create_dir_all(&work.folder).map_err(work.fault(&work.folder))?;
    }
    for (pack, keys) in missing {
        if let Some(journal) = &mut journal {
            journal.note(true, keys.iter().filter(|(_, new)| *new).map(|(key, _)| key));
            journal.commit().map_err(work.fault(journal.path()))?;
        }
        let keys: Vec<PieceKey> = keys.into_iter().map(|(key, _)| key).collect();
        let added = copy_pack(work, &pack, &keys, source_folder, source, pace, tick)?;
        publish(work, added)?;
    }
    if !work.folder.join(DRIVE_FILE).exists() {
        // the plan has nothing here, and a run must be able to tell that from a drive that is not mounted
        std::fs::create_dir_all(&work.folder).map_err(work.fault(&work.folder))?;
        publish(work, Vec::new())?;
    }
    Ok(())
}

/// The journal of this plan, with what it found there. None is begun where nothing is added and nothing that another plan's
/// staging added can be taken away.
fn open_journal(work: &Work, plan_hash: &str, adds: bool) -> Result<Option<Journal>, StageError> {
    let others = !adds && !journal::all(&work.folder).map_err(work.fault(&work.folder))?.is_empty();
    if !adds && !others {
        return Ok(None);
    }
    std::fs::create_dir_all(&work.folder).map_err(work.fault(&work.folder))?;
    let path = journal::path_of(&work.folder, plan_hash);
    let mut journal = Journal::open(&work.folder, plan_hash).map_err(work.fault(&path))?;
    journal.note(false, &work.present);
    journal.commit().map_err(work.fault(&path))?;
    Ok(Some(journal))
}

/// Writes `keys` into free slots of `pack`; returns their entries once they are durable and read back.
fn copy_pack(
    work: &Work,
    pack: &PackId,
    keys: &[PieceKey],
    source_folder: &Path,
    source: &DriveManifest,
    pace: &mut PacedCopy,
    tick: &mut dyn FnMut(u64),
) -> Result<Vec<Piece>, StageError> {
    let used = work.manifest.used_slots(pack);
    let mut free = (0u32..).filter(|slot| !used.contains(slot));
    let path = work.folder.join(pack.name());
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let file = opened.map_err(work.fault(&path))?;
    let slot_bytes = work.manifest.slot_bytes_of(pack);
    let (mut expert, mut part) = (vec![0u8; source.expert_bytes as usize], Vec::new());
    let mut added = Vec::with_capacity(keys.len());
    let mut end_bytes = file.metadata().map_err(work.fault(&path))?.len();
    let mut opened: Option<(String, File)> = None;
    for &key in keys {
        let Some(original) = source.find(key.layer, key.expert) else {
            return Err(StageError::Mismatch(format!("the store lost {}-{} while staging", key.layer, key.expert)));
        };
        let (name, extent) = source.locate(key.layer, original);
        let from = source_folder.join(&name);
        if opened.as_ref().is_none_or(|(open, _)| *open != name) {
            opened = Some((name, File::open(&from).map_err(work.fault(&from))?));
        }
        let bytes = key.bytes(source.expert_bytes);
        pace.before(bytes);
        if let Some((_, reader)) = &opened {
            reader.read_exact_at(&mut expert, extent.offset).map_err(work.fault(&from))?;
        }
        let advice = "that is the store's own copy: import the checkpoint again into a new store";
        let whole = PieceKey { part: None, ..key };
        compare(work, &from, extent.offset, whole, original.digest, &expert, advice)?;
        let (payload, digest) = match key.part {
            None => (&expert, original.digest),
            Some(of) => {
                of.stripe(source.expert_bytes).gather(&expert, of.column, &mut part);
                (&part, Digest::of(&part))
            }
        };
        let Some(slot) = free.next() else {
            return Err(StageError::Mismatch(format!("{}: no free slot", path.display())));
        };
        let piece = Piece { key, slot, digest, expert_digest: original.digest };
        let offset = u64::from(slot) * slot_bytes;
        file.write_all_at(payload, offset).map_err(work.fault(&path))?;
        end_bytes = end_bytes.max(offset + slot_bytes);
        added.push(piece);
        tick(bytes);
    }
    if let Some((_, reader)) = &opened {
        // The store may be a drive of the next run: what was read here must not make it warm.
        crate::sys::cache::drop_file(reader).map_err(work.fault(source_folder))?;
    }
    // Reads ask for the payload rounded up to the alignment: the last slot must exist as a whole.
    file.set_len(end_bytes).map_err(work.fault(&path))?;
    file.sync_all().map_err(work.fault(&path))?;
    // What lies in the page cache proves nothing about the drive.
    crate::sys::cache::drop_file(&file).map_err(work.fault(&path))?;
    for piece in &added {
        let (_, extent) = work.manifest.locate_piece(piece);
        part.resize(extent.len as usize, 0);
        file.read_exact_at(&mut part, extent.offset).map_err(work.fault(&path))?;
        let advice = "the drive did not keep what was written; check it";
        compare(work, &path, extent.offset, piece.key, piece.digest, &part, advice)?;
    }
    crate::sys::cache::drop_file(&file).map_err(work.fault(&path))?;
    Ok(added)
}

fn compare(
    work: &Work,
    path: &Path,
    offset: u64,
    key: PieceKey,
    expected: Digest,
    bytes: &[u8],
    advice: &'static str,
) -> Result<(), StageError> {
    let seen = Digest::of(bytes);
    if seen == expected {
        return Ok(());
    }
    let (drive, path) = (work.name.clone(), path.to_path_buf());
    Err(StageError::Digest(Box::new(DigestFault { drive, path, offset, key, seen, expected, advice })))
}

/// Names the new pieces in `drive.json`.
fn publish(work: &mut Work, added: Vec<Piece>) -> Result<(), StageError> {
    added.into_iter().for_each(|piece| work.manifest.insert(piece));
    sync_folder(&work.folder).map_err(work.fault(&work.folder))?;
    work.manifest.save(&work.folder)?;
    Ok(())
}
