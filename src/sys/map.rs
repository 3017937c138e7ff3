//! Read-only file mappings.

use memmap2::Mmap;
use std::fs::File;
use std::io;

/// Maps `file` read-only. The caller must own the file's content for the life of the map: store files are never
/// written in place once their manifest names them, and whoever imports a checkpoint does not write its shards meanwhile.
pub fn map_readonly(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only. Undefined behaviour would need another process to truncate or write the file
    // while it is mapped; argodrive replaces store files by rename only, so a mapped inode never changes. A checkpoint's
    // shards are mapped only while it is imported, whose manual asks for the same.
    unsafe { Mmap::map(file) }
}
