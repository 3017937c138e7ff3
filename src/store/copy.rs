//! Reading a checkpoint's tensors for a store: one expert's six planes into one buffer, trunk tensors in pieces; and the
//! manifests that follow from their digests. Shared by the import and by the comparison with a finished store.

use super::import::{ImportError, Layout};
use super::journal::Item;
use super::manifest::{Digest, DriveExpert, DriveManifest, StoreManifest, TrunkTensor, store_version};
use super::trunk_format::{TrunkFormat, quantize_rows};
use crate::ids::{ExpertId, LayerId};
use crate::model::checkpoint::{Checkpoint, Place, TensorReader, TrunkSource};
use crate::model::tensors::{DType, EXPERT_PLANES, TEXT_PREFIX};
use crate::sys::cache;
use xxhash_rust::xxh3::Xxh3;

/// Columns per scale byte.
const GROUP: u64 = 32;

/// Takes a piece of a tensor: its offset in the tensor, its bytes.
pub(crate) type Sink<'a> = dyn FnMut(u64, &[u8]) -> Result<(), ImportError> + 'a;

/// Reads a tensor piece by piece, hands each to `sink` with its offset in the tensor, and digests them all.
pub(crate) fn stream(
    reader: &mut TensorReader<'_>,
    place: &Place,
    buffer: &mut [u8],
    sink: &mut Sink<'_>,
) -> Result<Digest, ImportError> {
    let mut hash = Xxh3::new();
    let mut skip = 0u64;
    while skip < place.extent.len {
        let len = (place.extent.len - skip).min(buffer.len() as u64) as usize;
        let piece = &mut buffer[..len];
        reader.read(place, skip, piece)?;
        hash.update(piece);
        sink(skip, piece)?;
        skip += len as u64;
    }
    Ok(Digest(hash.digest128()))
}

/// As [`stream`] for a trunk tensor that is kept in `format`: the sink gets, and the digest is of, what is to be stored.
pub(crate) fn stream_trunk(
    source: &Checkpoint,
    reader: &mut TensorReader<'_>,
    tensor: &TrunkSource,
    format: TrunkFormat,
    buffer: &mut [u8],
    sink: &mut Sink<'_>,
) -> Result<Digest, ImportError> {
    let (DType::Int8Rows, &[rows, cols]) = (format.dtype_of(&tensor.spec), tensor.spec.shape.as_slice()) else {
        return stream(reader, &tensor.place, buffer, sink);
    };
    let row_bytes = (cols * DType::BF16.size()) as usize;
    let mut one_row = Vec::new();
    let buffer = match buffer.len() >= row_bytes {
        true => buffer,
        false => {
            one_row.resize(row_bytes, 0);
            &mut one_row
        }
    };
    let at_once = (buffer.len() / row_bytes) as u64;
    let mut hash = Xxh3::new();
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let mut row = 0;
    while row < rows {
        let count = at_once.min(rows - row);
        let piece = &mut buffer[..count as usize * row_bytes];
        reader.read(&tensor.place, row * row_bytes as u64, piece)?;
        codes.clear();
        quantize_rows(piece, cols as usize, &mut codes, &mut scales).map_err(|at| ImportError::NotFinite {
            path: source.shard_path(tensor.place.shard),
            tensor: format!("{TEXT_PREFIX}{}", tensor.spec.name),
            row: row + at as u64,
        })?;
        hash.update(&codes);
        sink(row * cols, &codes)?;
        row += count;
    }
    hash.update(&scales);
    sink(rows * cols, &scales)?;
    Ok(Digest(hash.digest128()))
}

/// Fills `buffer` (one expert long) with the six planes of an expert in slot order; refuses scales that are NaN.
pub(crate) fn read_expert(
    source: &Checkpoint,
    reader: &mut TensorReader<'_>,
    layer: LayerId,
    expert: ExpertId,
    buffer: &mut [u8],
) -> Result<(), ImportError> {
    let missing = || ImportError::Target {
        path: source.folder().to_path_buf(),
        reason: format!("has no expert {expert} in layer {layer}"),
    };
    let planes = source.planes(layer, expert).ok_or_else(missing)?;
    let mut rest = buffer;
    for (index, place) in planes.iter().enumerate() {
        let (plane, tail) = rest.split_at_mut_checked(place.extent.len as usize).ok_or_else(missing)?;
        rest = tail;
        reader.read(place, 0, plane)?;
        if let Some((row, group)) = nan_scale(source, index, plane) {
            return Err(ImportError::NanScale {
                path: source.shard_path(place.shard),
                tensor: format!("{TEXT_PREFIX}{}", plane_name(layer, expert, index)),
                row,
                group,
            });
        }
    }
    Ok(())
}

/// Name of an expert's plane, without prefix.
pub(super) fn plane_name(layer: LayerId, expert: ExpertId, plane: usize) -> String {
    format!("model.layers.{}.block_sparse_moe.experts.{}.{}", layer.0, expert.0, EXPERT_PLANES[plane])
}

/// Row and group of the first scale of plane number `index` that is no number; planes of codes have none.
pub(super) fn nan_scale(source: &Checkpoint, index: usize, plane: &[u8]) -> Option<(u64, u64)> {
    // odd planes are scales; E8M0 has no other value that is not a number
    let at = if index % 2 == 1 { plane.iter().position(|scale| *scale == 255)? } else { return None };
    let columns = source
        .config()
        .moe
        .as_ref()
        .map_or(GROUP, |m| (if EXPERT_PLANES[index].starts_with("w2") { m.width } else { m.latent }) as u64);
    let groups = columns / GROUP;
    Some((at as u64 / groups, at as u64 % groups))
}

/// Asks the kernel to fetch an expert's planes while the one before it is being hashed and written.
pub(crate) fn read_ahead(source: &Checkpoint, reader: &mut TensorReader<'_>, layer: LayerId, expert: ExpertId) {
    for place in source.planes(layer, expert).into_iter().flatten() {
        if let Ok(file) = reader.file(place.shard) {
            // advice only
            let _ = cache::will_need(file, place.extent.offset, place.extent.len);
        }
    }
}

/// Both manifests of a store, still without the model's id, from the digests of all items.
pub(crate) fn manifests(
    source: &Checkpoint,
    layout: &Layout,
    digest: &dyn Fn(Item) -> Digest,
) -> (StoreManifest, DriveManifest) {
    let trunk =
        source.trunk().iter().zip(&layout.trunk_offsets).enumerate().map(|(index, (tensor, &offset))| TrunkTensor {
            name: tensor.spec.name.clone(),
            dtype: layout.trunk.dtype_of(&tensor.spec),
            shape: tensor.spec.shape.clone(),
            offset,
            digest: digest(Item::Trunk(index as u32)),
        });
    let store = StoreManifest {
        version: store_version(layout.trunk),
        model_id: String::new(),
        name: folder_name(source),
        trunk_format: layout.trunk,
        trunk_error: None,
        config_digest: Digest::of(source.config_bytes()),
        moe_layers: source.moe_layers().to_vec(),
        experts: layout.experts,
        expert_bytes: layout.expert_bytes,
        trunk: trunk.collect(),
    };
    let mut drive = DriveManifest::empty("", layout.expert_bytes);
    for (row, &layer) in source.moe_layers().iter().enumerate() {
        let first = row as u32 * layout.experts;
        let entry = |e| DriveExpert { expert: ExpertId(e as u16), slot: e, digest: digest(Item::Expert(first + e)) };
        drive.layers.insert(layer, (0..layout.experts).map(entry).collect());
    }
    (store, drive)
}

fn folder_name(source: &Checkpoint) -> String {
    let full = source.folder().canonicalize().unwrap_or_else(|_| source.folder().to_path_buf());
    full.file_name().map_or_else(|| "checkpoint".into(), |n| n.to_string_lossy().into_owned())
}
