//! A trunk in memory of the program's own: read once, whole, past what the system would keep of the file, and locked if that
//! is asked for.

use super::manifest::ManifestError;
use crate::sys::{cache, limits};
use memmap2::{Mmap, MmapMut, MmapOptions};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that are read at a time.
const CHUNK_BYTES: usize = 8 << 20;

/// The bytes, and what was done with them.
pub(super) struct TrunkMemory {
    map: Mmap,
    loaded_bytes: u64,
    locked_bytes: u64,
}

impl TrunkMemory {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub(super) fn loaded_bytes(&self) -> u64 {
        self.loaded_bytes
    }

    pub(super) fn locked_bytes(&self) -> u64 {
        self.locked_bytes
    }
}

/// Reads the `len` bytes of `file`, which lies at `path`.
pub(super) fn load(path: &Path, file: &File, len: usize, lock: bool) -> Result<TrunkMemory, ManifestError> {
    let io = |source| ManifestError::Io { path: path.to_path_buf(), source };
    let inconsistent = |reason| ManifestError::Inconsistent { path: path.to_path_buf(), reason };
    if let Some(has) = limits::available_memory().filter(|has| *has < len as u64) {
        return Err(inconsistent(format!(
            "its {len} bytes do not fit into memory, {has} can be had; use --trunk mapped or streamed"
        )));
    }
    let mut map: MmapMut = MmapOptions::new().len(len.max(1)).map_anon().map_err(|e| {
        inconsistent(format!("its {len} bytes cannot be had as memory ({e}); leave it mapped with --trunk mapped"))
    })?;
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage); // without them everything works, only slower
    if lock {
        // before the bytes are read: a refusal costs nothing then
        map.lock().map_err(|e| {
            let limit = limits::locked_memory().map_or_else(|| "unlimited".into(), |l| format!("{l} bytes"));
            inconsistent(format!(
                "its {len} bytes cannot be locked in memory ({e}): RLIMIT_MEMLOCK is {limit}; raise it (`ulimit -l {}`, or \
                 memlock in limits.conf), or use --trunk loaded",
                len.div_ceil(1024)
            ))
        })?;
    }
    let mut loaded_bytes = 0;
    for (index, chunk) in map.chunks_mut(CHUNK_BYTES).enumerate().take(len.div_ceil(CHUNK_BYTES)) {
        let offset = (index * CHUNK_BYTES) as u64;
        let chunk = &mut chunk[..CHUNK_BYTES.min(len - offset as usize)];
        file.read_exact_at(chunk, offset).map_err(io)?;
        loaded_bytes += chunk.len() as u64;
        // advice only: memory holds the bytes once, not twice
        let _ = cache::drop_pages(file, offset, chunk.len() as u64);
    }
    let map = map.make_read_only().map_err(io)?;
    Ok(TrunkMemory { map, loaded_bytes, locked_bytes: if lock { len as u64 } else { 0 } })
}
