//! CPUs that a thread may run on: which ones, and choosing some of them. Linux only; elsewhere it is refused.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::str::FromStr;

/// Highest CPU number that a set can name.
const MAX_CPU: u32 = 1023;

/// Some CPUs, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct CpuSet(Vec<u32>);

impl CpuSet {
    /// These CPUs, in any order.
    pub fn new(mut cpus: Vec<u32>) -> Self {
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }

    /// Their numbers, ascending.
    pub fn cpus(&self) -> &[u32] {
        &self.0
    }

    /// Those that are not in `other`.
    pub fn without(&self, other: &CpuSet) -> CpuSet {
        Self(self.0.iter().copied().filter(|c| other.0.binary_search(c).is_err()).collect())
    }
}

impl fmt::Display for CpuSet {
    /// As the kernel writes lists: `0-3,8`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut from = 0;
        while from < self.0.len() {
            let run =
                (from..self.0.len()).take_while(|&i| self.0[i] as usize == self.0[from] as usize + i - from).count();
            let (first, last) = (self.0[from], self.0[from + run - 1]);
            let comma = if from > 0 { "," } else { "" };
            if run > 1 {
                write!(f, "{comma}{first}-{last}")?
            } else {
                write!(f, "{comma}{first}")?
            }
            from += run;
        }
        Ok(())
    }
}

impl FromStr for CpuSet {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let wanted = || format!("`{}` is no list of CPUs such as 0-3,8", s.escape_default());
        let number = |t: &str| t.trim().parse::<u32>().ok().filter(|n| *n <= MAX_CPU).ok_or_else(wanted);
        let mut cpus = Vec::new();
        for part in s.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wanted());
            }
            cpus.extend(first..=last);
        }
        Ok(Self::new(cpus))
    }
}

impl From<CpuSet> for String {
    fn from(set: CpuSet) -> Self {
        set.to_string()
    }
}

impl TryFrom<String> for CpuSet {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

/// The CPUs that a thread may run on, as the kernel says; 0 is the calling thread.
#[cfg(target_os = "linux")]
pub fn of_thread(id: u32) -> io::Result<CpuSet> {
    let pid = i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw);
    let set = rustix::thread::sched_getaffinity(pid)?;
    Ok(CpuSet::new((0..=MAX_CPU).filter(|&cpu| set.is_set(cpu as usize)).collect()))
}

/// Lets the calling thread, and those that it starts from now on, run on these CPUs alone.
#[cfg(target_os = "linux")]
pub fn choose(cpus: &CpuSet) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    cpus.0.iter().for_each(|&cpu| set.set(cpu as usize));
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// The kernel's number of the calling thread.
#[cfg(target_os = "linux")]
pub fn own_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// CPUs that are in use by the system; `None` where it does not say.
pub fn online() -> Option<CpuSet> {
    std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?.trim().parse().ok()
}

#[cfg(not(target_os = "linux"))]
fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "this system does not let a program choose CPUs; use affinity off")
}

/// Refused: only Linux tells.
#[cfg(not(target_os = "linux"))]
pub fn of_thread(_id: u32) -> io::Result<CpuSet> {
    Err(refused())
}

/// Refused: only Linux lets a thread choose.
#[cfg(not(target_os = "linux"))]
pub fn choose(_cpus: &CpuSet) -> io::Result<()> {
    Err(refused())
}

/// Threads have no number here.
#[cfg(not(target_os = "linux"))]
pub fn own_id() -> u32 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_read_back_as_they_are_written() {
        for (text, cpus, written) in
            [("0-3,8", vec![0, 1, 2, 3, 8], "0-3,8"), ("2,1, 0", vec![0, 1, 2], "0-2"), ("5", vec![5], "5")]
        {
            let set: CpuSet = text.parse().unwrap();
            assert_eq!((set.cpus(), set.to_string().as_str()), (cpus.as_slice(), written));
        }
        for bad in ["", "a", "3-1", "1-", "0,,1", "-1", "1024"] {
            assert!(bad.parse::<CpuSet>().unwrap_err().contains("0-3,8"), "{bad}");
        }
        let (all, some): (CpuSet, CpuSet) = ("0-4".parse().unwrap(), "1,3".parse().unwrap());
        assert_eq!(all.without(&some).to_string(), "0,2,4");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_runs_where_it_chose_and_its_children_too() {
        std::thread::spawn(|| {
            let before = of_thread(0).unwrap();
            let one = CpuSet::new(vec![before.cpus()[0]]);
            choose(&one).unwrap();
            assert_eq!(of_thread(own_id()).unwrap(), one);
            let child = std::thread::spawn(|| of_thread(0).unwrap()).join().unwrap();
            assert_eq!(child, one);
            choose(&before).unwrap();
            assert_eq!(of_thread(0).unwrap(), before);
        })
        .join()
        .unwrap();
    }
}
