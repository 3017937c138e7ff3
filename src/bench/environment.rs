//! The machine that a run happened on, as far as the operating system tells. What cannot be read is recorded as
//! unknown, never guessed.

use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// Facts about the host that results depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// argodrive's version and source revision.
    pub argodrive: String,
    /// Build profile: numbers of a debug build are not comparable with others.
    pub build: String,
    /// Operating system and kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu: String,
    /// Logical CPUs this process may use.
    pub cpus: usize,
    /// Physical memory in bytes, 0 when unknown.
    pub memory_bytes: u64,
    /// Whether the CPU says that it runs under a hypervisor; a cold read is then cold for this kernel only.
    pub virtualised: Option<bool>,
}

/// `0.1.0 (revision)`.
pub fn version() -> String {
    format!("{} ({})", env!("CARGO_PKG_VERSION"), env!("ARGODRIVE_REVISION"))
}

/// The source revision alone.
pub fn revision() -> &'static str {
    env!("ARGODRIVE_REVISION")
}

/// Reads the host's facts.
pub fn read() -> Environment {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let uname = rustix::system::uname();
    let part = |c: &std::ffi::CStr| c.to_string_lossy().into_owned();
    Environment {
        argodrive: version(),
        build: if cfg!(debug_assertions) { "debug" } else { "release" }.into(),
        kernel: format!("{} {}", part(uname.sysname()), part(uname.release())),
        cpu: field(&cpuinfo, "model name").unwrap_or("unknown").to_string(),
        cpus: std::thread::available_parallelism().map_or(0, usize::from),
        memory_bytes: memory_bytes(&fs::read_to_string("/proc/meminfo").unwrap_or_default()),
        virtualised: field(&cpuinfo, "flags").map(|f| f.split(' ').any(|w| w == "hypervisor")),
    }
}

/// Name of the file system type that holds `path`, from the mount table; the longest mount point that fits wins.
pub fn file_system(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let (_, mount, kind) = (words.next()?, words.next()?, words.next()?);
            path.starts_with(mount).then(|| (mount.len(), kind.to_string()))
        })
        // The later of two equal mount points hides the earlier.
        .max_by_key(|(len, _)| *len)
        .map(|(_, kind)| kind)
}

fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find(|l| l.starts_with(key))?.split_once(':').map(|(_, v)| v.trim())
}

fn memory_bytes(meminfo: &str) -> u64 {
    let kib = field(meminfo, "MemTotal").and_then(|v| v.split(' ').next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_linux_writes() {
        assert_eq!(memory_bytes("MemTotal:       24600000 kB\nMemFree: 1 kB"), 24_600_000 * 1024);
        assert_eq!(memory_bytes("garbage"), 0);
        assert_eq!(field("model name\t: X 9\n", "model name"), Some("X 9"));
        let here = read();
        assert!(here.cpus > 0 && here.kernel.contains(' '));
    }
}
