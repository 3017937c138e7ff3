//! Free space of the file system that holds a folder.

use std::io;
use std::path::Path;

/// Bytes that an unprivileged writer may still allocate on the file system of `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_folder_has_free_space_and_a_missing_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(super::free_bytes(dir.path()).unwrap() > 0);
        assert!(super::free_bytes(&dir.path().join("no")).is_err());
    }
}
