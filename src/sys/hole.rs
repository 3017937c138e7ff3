//! Giving space inside a file back to its file system, and how much a file takes.

use std::fs::{File, Metadata};
use std::io;

/// Frees the blocks of a range; the file keeps its length and reads zeros there. `Unsupported` where the file system
/// cannot do it: then nothing has changed. Blocks that lie in the range only in part stay.
#[cfg(target_os = "linux")]
pub fn punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    if len == 0 {
        return Ok(());
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, offset, len).map_err(|e| match e {
        rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS => io::ErrorKind::Unsupported.into(),
        other => other.into(),
    })
}

/// Frees the blocks of a range (not available here).
#[cfg(not(target_os = "linux"))]
pub fn punch(_file: &File, _offset: u64, _len: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Bytes that a file takes on its file system: less than its length where it has holes.
pub fn allocated_bytes(metadata: &Metadata) -> u64 {
    use std::os::unix::fs::MetadataExt;
    // st_blocks counts 512 bytes whatever the file system's blocks are
    metadata.blocks().saturating_mul(512)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_hole_reads_zeros_and_takes_no_space() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all_at(&vec![7u8; 1 << 20], 0).unwrap();
        file.sync_all().unwrap();
        let before = allocated_bytes(&file.metadata().unwrap());
        match punch(&file, 1 << 18, 1 << 19) {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => return,
            other => other.unwrap(),
        }
        punch(&file, 0, 0).unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!((metadata.len(), before - allocated_bytes(&metadata)), (1 << 20, 1 << 19));
        let mut byte = [9u8; 2];
        file.read_exact_at(&mut byte, (1 << 18) - 1).unwrap();
        assert_eq!(byte, [7, 0]);
    }
}
