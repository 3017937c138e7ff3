//! Opening files past the page cache, and what alignment the kernel then wants. A flag proves nothing (memory file
//! systems accept `O_DIRECT`), so callers ask [`is_memory_file_system`] and measure residency as well.

use crate::knob::{self, Knob};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

/// Alignment of direct reads of one file, in bytes; both are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DioAlignment {
    /// Of buffer addresses.
    pub memory_bytes: u32,
    /// Of offsets and lengths.
    pub offset_bytes: u32,
    /// The kernel said so; otherwise it is the page-sized guess for kernels without `STATX_DIOALIGN` (before 6.1).
    pub reported: bool,
}

/// A file that is read past the page cache.
#[derive(Debug)]
pub struct DirectFile {
    /// The open file.
    pub file: File,
    /// What its reads must be aligned to.
    pub alignment: DioAlignment,
}

/// Alignment that every known device accepts; used where the kernel reports none.
const SAFE_ALIGN: u32 = 4096;

/// Opens `path` for direct reads. An `Unsupported` error says why the file system cannot.
pub fn open_direct(path: &Path) -> io::Result<DirectFile> {
    if is_memory_file_system(path)? {
        return Err(unsupported("it lies on a memory file system, where direct reads measure memory"));
    }
    open_past_cache(path)
}

fn unsupported(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, format!("no direct reads: {why}"))
}

/// Opens a file that is there for direct writes. An `Unsupported` error says why the file system cannot.
pub fn open_direct_for_writing(path: &Path) -> io::Result<DirectFile> {
    if is_memory_file_system(path)? {
        return Err(unsupported("it lies on a memory file system, where direct writes fill memory"));
    }
    open_as(path, File::options().write(true))
}

fn open_past_cache(path: &Path) -> io::Result<DirectFile> {
    open_as(path, File::options().read(true))
}

#[cfg(target_os = "linux")]
fn open_as(path: &Path, how: &mut OpenOptions) -> io::Result<DirectFile> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = if knob::skipped(Knob::Direct) { 0 } else { libc::O_DIRECT };
    let opened = how.custom_flags(flags).open(path);
    let file = opened.map_err(|e| match e.raw_os_error() {
        Some(libc::EINVAL) => unsupported("the file system refuses O_DIRECT"),
        _ => e,
    })?;
    let alignment = alignment_of(&file)?;
    Ok(DirectFile { file, alignment })
}

/// What `statx` says about direct reads of an open file.
#[cfg(target_os = "linux")]
pub fn alignment_of(file: &File) -> io::Result<DioAlignment> {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let stat = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(DioAlignment { memory_bytes: SAFE_ALIGN, offset_bytes: SAFE_ALIGN, reported: false });
    }
    let (memory_bytes, offset_bytes) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    if offset_bytes == 0 {
        return Err(unsupported("statx reports no direct I/O for this file"));
    }
    if !memory_bytes.is_power_of_two() || !offset_bytes.is_power_of_two() {
        return Err(unsupported(&format!("statx reports alignments {memory_bytes} and {offset_bytes}")));
    }
    Ok(DioAlignment { memory_bytes, offset_bytes, reported: true })
}

#[cfg(target_os = "macos")]
fn open_as(path: &Path, how: &mut OpenOptions) -> io::Result<DirectFile> {
    use std::os::fd::AsRawFd;
    let file = how.open(path)?;
    // SAFETY: F_NOCACHE takes an int and touches no memory of ours; the descriptor is open.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) } == -1 {
        return Err(io::Error::last_os_error());
    }
    let alignment = DioAlignment { memory_bytes: SAFE_ALIGN, offset_bytes: SAFE_ALIGN, reported: false };
    Ok(DirectFile { file, alignment })
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn open_as(_path: &Path, _how: &mut OpenOptions) -> io::Result<DirectFile> {
    Err(unsupported("not implemented for this operating system"))
}

/// Alignment of direct reads in `folder`: of a file that is there, else of one that never gets a name. `None` when there is
/// no file and none can be made, or the kernel does not say.
pub fn probe_alignment(folder: &Path) -> Option<DioAlignment> {
    /// Entries that are looked at for a file.
    const ENTRIES: usize = 256;
    if is_memory_file_system(folder).unwrap_or(true) {
        return None;
    }
    let entries = std::fs::read_dir(folder).ok()?.flatten().take(ENTRIES);
    let mut files = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_file()));
    let file = files.find_map(|e| File::open(e.path()).ok()).or_else(|| nameless(folder))?;
    alignment_of(&file).ok().filter(|a| a.reported)
}

#[cfg(target_os = "linux")]
fn nameless(folder: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).open(folder).ok()
}

#[cfg(not(target_os = "linux"))]
fn nameless(_folder: &Path) -> Option<File> {
    None
}

/// What a system without a call for it says about direct reads: nothing.
#[cfg(not(target_os = "linux"))]
fn alignment_of(_file: &File) -> io::Result<DioAlignment> {
    Ok(DioAlignment { memory_bytes: SAFE_ALIGN, offset_bytes: SAFE_ALIGN, reported: false })
}

/// Whether an open file is read past the page cache **and** needs aligned reads for it (macOS needs none).
pub fn is_direct(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    {
        rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::DIRECT))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

/// Whether `path` lies on a file system whose files are memory (tmpfs, ramfs, hugetlbfs).
pub fn is_memory_file_system(path: &Path) -> io::Result<bool> {
    #[cfg(target_os = "linux")]
    {
        // include/uapi/linux/magic.h
        const TMPFS: u32 = 0x0102_1994;
        const RAMFS: u32 = 0x8584_58f6;
        const HUGETLBFS: u32 = 0x9584_58f6;
        let kind = rustix::fs::statfs(path)?.f_type as u32;
        Ok([TMPFS, RAMFS, HUGETLBFS].contains(&kind))
    }
    #[cfg(not(target_os = "linux"))]
    {
        std::fs::metadata(path).map(|_| false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn alignment_is_a_power_of_two_and_memory_is_recognised() {
        let target = concat!(env!("CARGO_MANIFEST_DIR"), "/target");
        std::fs::create_dir_all(target).unwrap();
        let dir = tempfile::tempdir_in(target).unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, vec![1u8; 8192]).unwrap();
        let direct = open_direct(&path).unwrap();
        assert!(direct.alignment.offset_bytes.is_power_of_two() && direct.alignment.memory_bytes.is_power_of_two());
        assert_eq!(probe_alignment(dir.path()).is_some(), direct.alignment.reported);
        let empty = tempfile::tempdir_in(target).unwrap();
        if let Some(probed) = probe_alignment(empty.path()) {
            assert_eq!(probed, direct.alignment);
        }
        assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0);
        let shm = Path::new("/dev/shm");
        if shm.is_dir() {
            assert!(is_memory_file_system(shm).unwrap());
            let file = tempfile::NamedTempFile::new_in(shm).unwrap();
            let error = open_direct(file.path()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        }
        assert_eq!(open_direct(&dir.path().join("gone")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
