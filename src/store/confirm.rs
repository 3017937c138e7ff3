//! An import into a store that is already complete: compares every tensor and expert with the store's digests and writes
//! nothing. Ends at the first difference, because a complete store of another model is never overwritten.

use super::copy::{manifests, read_ahead, read_expert, stream_trunk};
use super::import::{ImportError, ImportReport, Layout, Progress};
use super::journal::{Item, JOURNAL_FILE};
use super::manifest::{Digest, DriveManifest, StoreManifest, drive_folder};
use super::trunk_format::TrunkFormat;
use crate::ids::ExpertId;
use crate::model::checkpoint::Checkpoint;
use std::path::Path;

/// Checks that the complete store in `store` holds exactly `source`, its trunk in `format`.
pub(super) fn complete_store(
    source: &Checkpoint,
    store: &Path,
    format: TrunkFormat,
    progress: &mut dyn FnMut(Progress),
) -> Result<ImportReport, ImportError> {
    let other = |reason: String| ImportError::OtherModel { store: store.to_path_buf(), reason };
    let manifest = StoreManifest::open(store)?;
    let drive = DriveManifest::open(&drive_folder(store, &manifest.model_id))?;
    if manifest.config_digest != Digest::of(source.config_bytes()) {
        return Err(other(format!("{}: its config.json differs", manifest.name)));
    }
    if manifest.trunk_format != format {
        let there = manifest.trunk_format;
        return Err(other(format!(
            "{}: its trunk is {there}, not {format}; --trunk {there} compares it",
            manifest.name
        )));
    }
    let layout = Layout::of(source, format);
    // names, types, shapes and places; digests are taken from the store so that they do not count yet
    let known = |item: Item| match item {
        Item::Trunk(n) => manifest.trunk.get(n as usize).map_or(Digest(0), |t| t.digest),
        Item::Expert(n) => {
            let row = manifest.moe_layers.get((n / layout.experts.max(1)) as usize);
            let expert = ExpertId((n % layout.experts.max(1)) as u16);
            row.and_then(|layer| drive.find(*layer, expert)).map_or(Digest(0), |e| e.digest)
        }
    };
    let (mut expected, _) = manifests(source, &layout, &known);
    expected.model_id.clone_from(&manifest.model_id);
    expected.name.clone_from(&manifest.name);
    expected.trunk_error = manifest.trunk_error;
    if expected != manifest {
        return Err(other(format!("{}: its tensors are others", manifest.name)));
    }
    let mut at = Progress { done_bytes: 0, total_bytes: layout.total_bytes() };
    let mut reader = source.reader();
    let mut buffer = vec![0u8; (4usize << 20).max(layout.expert_bytes as usize)];
    for (index, tensor) in source.trunk().iter().enumerate() {
        let digest = stream_trunk(source, &mut reader, tensor, format, &mut buffer, &mut |_, bytes| {
            at.done_bytes += bytes.len() as u64;
            progress(at);
            Ok(())
        })?;
        if digest != known(Item::Trunk(index as u32)) {
            return Err(other(format!("{}: tensor {} differs", manifest.name, tensor.spec.name)));
        }
    }
    buffer.truncate(layout.expert_bytes as usize);
    let mut ordinal = 0;
    for &layer in source.moe_layers() {
        for expert in (0..layout.experts).map(|e| ExpertId(e as u16)) {
            if u32::from(expert.0) + 1 < layout.experts {
                read_ahead(source, &mut reader, layer, ExpertId(expert.0 + 1));
            }
            read_expert(source, &mut reader, layer, expert, &mut buffer)?;
            if Digest::of(&buffer) != known(Item::Expert(ordinal)) {
                return Err(other(format!("{}: expert {layer}-{expert} differs", manifest.name)));
            }
            ordinal += 1;
            at.done_bytes += layout.expert_bytes;
            progress(at);
        }
    }
    // killed between the last two steps of the import that made it
    let journal = store.join(JOURNAL_FILE);
    if journal.exists() {
        std::fs::remove_file(&journal).map_err(|e| ImportError::io(&journal, e))?;
    }
    Ok(ImportReport {
        experts_written: 0,
        experts_reused: u64::from(ordinal),
        trunk_written: 0,
        trunk_reused: manifest.trunk.len() as u64,
        bytes_written: 0,
        vision_skipped: source.skipped_vision(),
        side_files: Vec::new(),
        was_complete: true,
        manifest,
    })
}
