//! Locks on files and folders that end with their owner, and who holds one.

use std::fs::{File, TryLockError};
use std::io::{self, Read as _};
use std::path::Path;

/// Bytes of a command line that are read, and characters that are shown.
const COMMAND_BYTES: u64 = 4096;
const COMMAND_CHARS: usize = 100;

/// A lock that somebody else holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Process that holds it, where the system tells.
    pub pid: Option<u32>,
    /// What it was called with, where the system tells.
    pub command: Option<String>,
}

impl Held {
    /// Who has locked `file`.
    pub fn by(file: &File) -> Self {
        let pid = holder(file);
        Self { pid, command: pid.and_then(command_of) }
    }
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.pid, &self.command) {
            (Some(pid), Some(command)) => write!(f, "pid {pid}, `{command}`"),
            (Some(pid), None) => write!(f, "pid {pid}"),
            (None, _) => f.write_str("its pid is not known here"),
        }
    }
}

/// Locks `path` for as long as the file that comes back is open, alone or `shared` with others that share it. `Err(held)`
/// inside = somebody else has it. File systems that cannot lock count as free.
pub fn try_lock(path: &Path, shared: bool) -> io::Result<Result<File, Held>> {
    let file = File::open(path)?;
    let locked = if shared { file.try_lock_shared() } else { file.try_lock() };
    Ok(match locked {
        Err(TryLockError::WouldBlock) => Err(Held::by(&file)),
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

/// The words that a process was called with, without the folder of its program.
fn command_of(pid: u32) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(format!("/proc/{pid}/cmdline")).ok()?.take(COMMAND_BYTES).read_to_end(&mut bytes).ok()?;
    in_words(&bytes)
}

/// One line of the words that lie in `bytes`, each with a zero behind it.
fn in_words(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_end_matches('\0');
    let (program, rest) = text.split_once('\0').unwrap_or((text, ""));
    let program = program.rsplit('/').next().filter(|name| !name.is_empty())?;
    let line = if rest.is_empty() { program.to_string() } else { format!("{program} {rest}") };
    let plain = line.chars().map(|c| if c.is_control() || c == '`' { ' ' } else { c });
    let mut shown: String = plain.clone().take(COMMAND_CHARS).collect();
    if plain.count() > COMMAND_CHARS {
        shown.push_str("...");
    }
    Some(shown)
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
            let program = std::env::args().next().unwrap();
            let program = program.rsplit('/').next().unwrap();
            assert!(seen.to_string().starts_with(&format!("pid {}, `{program}", std::process::id())), "{seen}");
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
        assert_eq!(Held { pid: None, command: None }.to_string(), "its pid is not known here");
    }

    #[test]
    fn a_command_is_one_short_line() {
        let words = |text: &str| in_words(text.as_bytes());
        assert_eq!(words("/usr/bin/argodrive\0stage\0plan `a`\n.json\0").unwrap(), "argodrive stage plan  a  .json");
        assert_eq!((words("argodrive\0").unwrap(), words(""), words("/bin/\0x")), ("argodrive".into(), None, None));
        let long = words(&format!("a\0{}", "ß".repeat(500))).unwrap();
        assert_eq!((long.chars().count(), long.ends_with("ß...")), (103, true));
    }
}
