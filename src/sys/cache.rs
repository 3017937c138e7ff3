//! Advice to the page cache about ranges of a file: fetch, write back, drop. Advice never changes what a file
//! holds, so on systems without a call these functions do nothing.

use std::fs::File;
use std::io;

/// Drops clean cached pages of a range, so that a large copy does not push everything else out of memory. Pages
/// that are not yet written stay; sync first.
#[cfg(target_os = "linux")]
pub fn drop_pages(file: &File, offset: u64, len: u64) -> io::Result<()> {
    advise(file, offset, len, rustix::fs::Advice::DontNeed)
}

/// Drops every clean cached page of a file (a length of 0 would drop nothing).
pub fn drop_file(file: &File) -> io::Result<()> {
    drop_pages(file, 0, file.metadata()?.len())
}

/// Asks the kernel to read a range ahead.
#[cfg(target_os = "linux")]
pub fn will_need(file: &File, offset: u64, len: u64) -> io::Result<()> {
    advise(file, offset, len, rustix::fs::Advice::WillNeed)
}

#[cfg(target_os = "linux")]
fn advise(file: &File, offset: u64, len: u64, advice: rustix::fs::Advice) -> io::Result<()> {
    // a length of zero would mean "to the end of the file"
    match std::num::NonZeroU64::new(len) {
        Some(len) => Ok(rustix::fs::fadvise(file, offset, Some(len), advice)?),
        None => Ok(()),
    }
}

/// Starts writing a range's dirty pages to the device without waiting, so that a later sync has less to do.
/// Promises nothing about durability.
#[cfg(target_os = "linux")]
pub fn start_writeback(file: &File, offset: u64, len: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let range = i64::try_from(offset).ok().zip(i64::try_from(len).ok());
    let (offset, len) = range.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the descriptor is open for the duration of the call (borrowed from `file`); the call takes no pointers.
    let rc = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Drops clean cached pages of a range (not available here: does nothing).
#[cfg(not(target_os = "linux"))]
pub fn drop_pages(_file: &File, _offset: u64, _len: u64) -> io::Result<()> {
    Ok(())
}

/// Asks the kernel to read a range ahead (not available here: does nothing).
#[cfg(not(target_os = "linux"))]
pub fn will_need(_file: &File, _offset: u64, _len: u64) -> io::Result<()> {
    Ok(())
}

/// Starts writing a range back (not available here: does nothing).
#[cfg(not(target_os = "linux"))]
pub fn start_writeback(_file: &File, _offset: u64, _len: u64) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_leaves_the_bytes_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, vec![7u8; 100_000]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        start_writeback(&file, 0, 100_000).unwrap();
        file.sync_data().unwrap();
        drop_pages(&file, 0, 100_000).unwrap();
        will_need(&file, 4096, 8192).unwrap();
        drop_pages(&file, 0, 0).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), vec![7u8; 100_000]);
    }

    #[test]
    fn a_dropped_file_is_no_longer_resident() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::io::Write::write_all(&mut file, &vec![7; 1 << 20]).unwrap();
        file.sync_all().unwrap();
        let all = crate::ids::Extent { offset: 0, len: 1 << 20 };
        let before = crate::sys::cachestat::residency(&file, all).unwrap().resident_bytes;
        drop_file(&file).unwrap();
        let after = crate::sys::cachestat::residency(&file, all).unwrap().resident_bytes;
        assert!(after * 10 < before.max(1), "{before} bytes resident before, {after} after");
    }
}
