//! Locks on files and folders that end with their owner, and who holds one.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

/// A lock that somebody else holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Process that holds it, where the system tells.
    pub pid: Option<u32>,
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "pid {pid}"),
            None => f.write_str("its pid is not known here"),
        }
    }
}

/// Locks `path` for as long as the file that comes back is open, alone or `shared` with others that share it. `Err(held)`
/// inside = somebody else has it. File systems that cannot lock count as free.
pub fn try_lock(path: &Path, shared: bool) -> io::Result<Result<File, Held>> {
    let file = File::open(path)?;
    let locked = if shared { file.try_lock_shared() } else { file.try_lock() };
    Ok(match locked {
        Err(TryLockError::WouldBlock) => Err(Held { pid: holder(&file) }),
        // Some network file systems cannot lock a folder; working alone there is as safe as before.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    })
}

/// The process that has locked `file`.
fn holder(file: &File) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    let inode = file.metadata().ok()?.ino();
    find_holder(&std::fs::read_to_string("/proc/locks").ok()?, inode)
}

/// The first process in the text of `/proc/locks` with a lock of this kind on a file with this number. Devices are not
/// compared: some file systems give files another device there than to `stat`.
fn find_holder(text: &str, inode: u64) -> Option<u32> {
    let of_line = |line: &str| {
        // 1: FLOCK  ADVISORY  WRITE 21457 fe:00:5750801 0 EOF; a waiting one has `->` before the kind.
        let mut words = line.split_ascii_whitespace().skip(1);
        let (kind, _, _, pid, place) = (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?);
        let number: u64 = place.rsplit(':').next()?.parse().ok()?;
        (kind == "FLOCK" && number == inode).then(|| pid.parse().ok())?.filter(|pid| *pid > 0)
    };
    text.lines().find_map(of_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_named_and_a_lock_ends_with_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let held = try_lock(dir.path(), false).unwrap().unwrap();
        let seen = try_lock(dir.path(), true).unwrap().unwrap_err();
        if cfg!(target_os = "linux") {
            assert_eq!(seen.pid, Some(std::process::id()));
        }
        drop(held);
        let shared = try_lock(dir.path(), true).unwrap().unwrap();
        assert!(try_lock(dir.path(), true).unwrap().is_ok() && try_lock(dir.path(), false).unwrap().is_err());
        drop(shared);
        assert!(try_lock(&dir.path().join("no"), false).is_err());
    }

    #[test]
    fn only_locks_of_this_kind_on_this_file_count() {
        let text = "1: POSIX  ADVISORY  WRITE 11 fe:00:5 0 EOF\n2: FLOCK  ADVISORY  WRITE 12 fe:00:55 0 EOF\n\
                    3: -> FLOCK  ADVISORY  WRITE 13 fe:00:5 0 EOF\nx\n4: FLOCK  ADVISORY  READ 14 fe:00:5 0 EOF\n";
        assert_eq!(find_holder(text, 5), Some(14));
        assert_eq!(find_holder(text, 6), None);
        assert_eq!(Held { pid: None }.to_string(), "its pid is not known here");
    }
}
