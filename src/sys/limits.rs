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
