//! Which part of a file lies in the page cache: the evidence that a run was cold. `cachestat(2)` where the kernel has
//! it (6.5), `mincore(2)` otherwise. Reading residency never changes it.

use crate::ids::Extent;
use std::fs::File;
use std::io;

/// How residency was found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResidencyMethod {
    /// `cachestat(2)`.
    Cachestat,
    /// `mincore(2)` over a temporary mapping. Some kernels answer "all resident" for files that the caller may not
    /// write; it therefore never reports a warm file as cold.
    Mincore,
}

/// Residency of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residency {
    /// Bytes in the page cache, whole pages.
    pub resident_bytes: u64,
    /// Bytes that were asked about, rounded out to whole pages.
    pub asked_bytes: u64,
    /// How it was found out.
    pub method: ResidencyMethod,
}

/// Page-cache residency of `extent` of `file`. An extent that overflows or is empty is an `InvalidInput` error.
pub fn residency(file: &File, extent: Extent) -> io::Result<Residency> {
    let page = crate::sys::limits::page_bytes();
    let pages = extent
        .align_out(page)
        .filter(|e| e.len > 0)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "empty or overflowing extent"))?;
    #[cfg(target_os = "linux")]
    match cachestat_pages(file, pages) {
        Ok(count) => {
            return Ok(Residency {
                resident_bytes: count.saturating_mul(page),
                asked_bytes: pages.len,
                method: ResidencyMethod::Cachestat,
            });
        }
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EOPNOTSUPP)) => {}
        Err(e) => return Err(e),
    }
    mincore_pages(file, pages, page)
}

/// Number of the system call, the same on every architecture that takes new calls from the common table.
#[cfg(target_os = "linux")]
const SYS_CACHESTAT: libc::c_long = 451;

#[cfg(target_os = "linux")]
#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

#[cfg(target_os = "linux")]
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    nr_cache: u64,
    nr_dirty: u64,
    nr_writeback: u64,
    nr_evicted: u64,
    nr_recently_evicted: u64,
}

#[cfg(target_os = "linux")]
fn cachestat_pages(file: &File, pages: Extent) -> io::Result<u64> {
    use std::os::fd::AsRawFd;
    let range = CachestatRange { off: pages.offset, len: pages.len };
    let mut stat = Cachestat::default();
    // SAFETY: both pointers are to live structs with the layout of the kernel's `cachestat_range` and `cachestat`
    // (include/uapi/linux/mman.h); the descriptor is open for as long as `file` is borrowed; flags must be 0.
    let rc = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0u32) };
    if rc == 0 { Ok(stat.nr_cache) } else { Err(io::Error::last_os_error()) }
}

fn mincore_pages(file: &File, pages: Extent, page: u64) -> io::Result<Residency> {
    let end = pages.offset + pages.len;
    let file_end = file.metadata()?.len().div_ceil(page).saturating_mul(page);
    let len = end.min(file_end).saturating_sub(pages.offset);
    let mut resident = 0u64;
    if len > 0 {
        let too_big = |_| io::Error::new(io::ErrorKind::InvalidInput, "extent does not fit in memory");
        let bytes = usize::try_from(len).map_err(too_big)?;
        // SAFETY: a read-only map that is never dereferenced; only its pages' residency is asked for.
        let map = unsafe { memmap2::MmapOptions::new().offset(pages.offset).len(bytes).map(file)? };
        let mut flags = vec![0u8; bytes.div_ceil(page as usize)];
        // SAFETY: the range is exactly the live map, and `flags` has one byte for each of its pages.
        let rc = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), flags.as_mut_ptr().cast()) };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        resident = flags.iter().filter(|&&f| f & 1 == 1).count() as u64;
    }
    Ok(Residency { resident_bytes: resident * page, asked_bytes: pages.len, method: ResidencyMethod::Mincore })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn warm_file() -> (tempfile::TempDir, File) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        File::create(&path).unwrap().write_all(&vec![7u8; 64 * 1024]).unwrap();
        let file = File::open(&path).unwrap();
        (dir, file)
    }

    #[test]
    fn freshly_written_bytes_are_resident_by_both_methods() {
        let (_dir, file) = warm_file();
        let extent = Extent { offset: 5000, len: 10_000 };
        let seen = residency(&file, extent).unwrap();
        assert_eq!(seen.asked_bytes, 12_288, "rounded out to pages");
        assert_eq!(seen.resident_bytes, seen.asked_bytes);
        let page = crate::sys::limits::page_bytes();
        let other = mincore_pages(&file, extent.align_out(page).unwrap(), page).unwrap();
        assert_eq!(other.resident_bytes, seen.resident_bytes);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn dropped_pages_are_seen_as_gone() {
        let (_dir, file) = warm_file();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        assert_eq!(residency(&file, Extent { offset: 0, len: 65_536 }).unwrap().resident_bytes, 0);
    }

    #[test]
    fn beyond_the_end_nothing_is_resident_and_empty_extents_are_refused() {
        let (_dir, file) = warm_file();
        assert_eq!(residency(&file, Extent { offset: 1 << 30, len: 4096 }).unwrap().resident_bytes, 0);
        assert!(residency(&file, Extent { offset: 0, len: 0 }).is_err());
        assert!(residency(&file, Extent { offset: u64::MAX, len: 2 }).is_err());
    }
}
