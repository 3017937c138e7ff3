//! Free space of the file system that holds a folder, and which file system that is.

use std::io;
use std::path::Path;

/// Bytes that an unprivileged writer may still allocate on the file system of `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Whether this process may make and delete files in `folder`.
pub fn may_write(folder: &Path) -> bool {
    use rustix::fs::Access;
    rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// A number that is the same for all files of one file system.
pub fn device_number(path: &Path) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata(path)?.dev())
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_folder_has_free_space_and_a_missing_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(super::free_bytes(dir.path()).unwrap() > 0);
        assert!(super::free_bytes(&dir.path().join("no")).is_err());
        let device = super::device_number(dir.path()).unwrap();
        std::fs::write(dir.path().join("a"), "a").unwrap();
        assert_eq!(super::device_number(&dir.path().join("a")).unwrap(), device);
    }
}
