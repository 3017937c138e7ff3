//! Process limits and the page size. Knows nothing of what the files are for.

use std::io;

/// Raises the soft limit of open files to `wanted`, if it is lower. The error names both limits when the hard limit
/// forbids it. Returns the soft limit that now holds.
pub fn raise_open_files(wanted: u64) -> io::Result<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let seen = getrlimit(Resource::Nofile);
    let soft = seen.current.unwrap_or(u64::MAX);
    if soft >= wanted {
        return Ok(soft);
    }
    let hard = seen.maximum.unwrap_or(u64::MAX);
    if hard < wanted {
        return Err(io::Error::other(format!(
            "{wanted} open files are needed, the hard limit is {hard}; raise it (ulimit -Hn {wanted})"
        )));
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: seen.maximum })?;
    Ok(wanted)
}

/// Bytes of a memory page, a power of two.
pub fn page_bytes() -> u64 {
    // SAFETY: sysconf takes a plain number and touches no memory of ours.
    let seen = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(seen).ok().filter(|p| p.is_power_of_two()).unwrap_or(4096)
}

/// Soft limit of locked memory (RLIMIT_MEMLOCK); `None` = unlimited.
pub fn locked_memory() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// Memory that can be had without swapping, as the kernel estimates it; `None` where it does not.
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Memory of this process that no file holds, as the kernel counts it; `None` where it does not.
pub fn own_memory() -> Option<u64> {
    status_bytes("RssAnon:")
}

/// Bytes that this process has locked in memory, as the kernel reports them; `None` where it does not.
pub fn locked_bytes() -> Option<u64> {
    status_bytes("VmLck:")
}

fn status_bytes(key: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib: u64 = status.lines().find_map(|l| l.strip_prefix(key))?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reachable_limit_holds_and_an_impossible_one_names_both_numbers() {
        let soft = raise_open_files(1).unwrap();
        assert!(soft >= 1);
        if let Some(hard) = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum {
            let message = raise_open_files(hard + 1).unwrap_err().to_string();
            assert!(message.contains(&hard.to_string()), "{message}");
        }
    }
}
