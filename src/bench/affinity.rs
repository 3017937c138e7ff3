//! Compute and reading on CPUs of their own: what is asked for, how threads get there, and where the kernel says they are.
//!
//! A thread that is started inherits the CPUs of the one that starts it. The decoding thread therefore stands on the readers'
//! CPUs while engines are made, and on those of compute from then on; the pool's threads, which may be older than the run,
//! choose for themselves.

use super::config::ConfigError;
use crate::decode::Decoder;
use crate::knob::{self, Knob};
use crate::sys::affinity::{self, CpuSet};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

/// Which CPUs threads may run on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Affinity {
    /// Threads that compute, the decoding one included; `None` = wherever the system puts them.
    pub compute: Option<CpuSet>,
    /// Threads that read.
    pub readers: Option<CpuSet>,
}

impl Affinity {
    /// Whether anything is chosen.
    pub fn is_on(&self) -> bool {
        self.compute.is_some() || self.readers.is_some()
    }
}

impl fmt::Display for Affinity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |name: &str, set: &Option<CpuSet>| set.as_ref().map(|set| format!("{name}={set}"));
        let parts: Vec<String> =
            [part("compute", &self.compute), part("readers", &self.readers)].into_iter().flatten().collect();
        f.write_str(if parts.is_empty() { "off" } else { "" })?;
        f.write_str(&parts.join(","))
    }
}

impl FromStr for Affinity {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let wanted = |why: &str| format!("`{}`: {why}; use off, or compute=0-1,readers=2-3", s.escape_default());
        let mut out = Self::default();
        if s == "off" {
            return Ok(out);
        }
        // a list has commas too: what has no `=` goes on with the list before it
        let mut lists: Vec<(String, String)> = Vec::new();
        for word in s.split(',') {
            match (word.split_once('='), lists.last_mut()) {
                (Some((name, cpus)), _) => lists.push((name.trim().into(), cpus.into())),
                (None, Some((_, cpus))) => *cpus = format!("{cpus},{word}"),
                (None, None) => return Err(wanted("neither off nor a choice")),
            }
        }
        for (name, cpus) in lists {
            let place = match name.as_str() {
                "compute" => &mut out.compute,
                "readers" => &mut out.readers,
                _ => return Err(wanted("only compute and readers have CPUs")),
            };
            if place.replace(cpus.parse().map_err(|e: String| wanted(&e))?).is_some() {
                return Err(wanted(&format!("{name} is given twice")));
            }
        }
        Ok(out)
    }
}

impl From<Affinity> for String {
    fn from(a: Affinity) -> Self {
        a.to_string()
    }
}

impl TryFrom<String> for Affinity {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

/// Where threads were, as the kernel said when the run was over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AffinitySeen {
    /// CPUs that the process may use.
    pub allowed: CpuSet,
    /// By thread that computes, the decoding one first.
    pub compute: Vec<CpuSet>,
    /// By thread that reads.
    pub readers: Vec<CpuSet>,
}

/// The threads of a run in their places; when it goes, the threads that stay may run where they could before.
pub struct Placed<'a> {
    decoder: &'a Decoder,
    allowed: Option<CpuSet>,
    asked: Affinity,
}

impl<'a> Placed<'a> {
    /// Puts the calling thread and the decoder's own on the CPUs of compute.
    ///
    /// # Errors
    /// CPUs that do not exist or that this process may not use; a system that lets nobody choose.
    pub fn compute(decoder: &'a Decoder, asked: &Affinity) -> Result<Self, ConfigError> {
        let refused = |e: std::io::Error| ConfigError::Contradiction(format!("affinity {asked}: {e}"));
        let allowed = match affinity::of_thread(0) {
            Ok(allowed) => Some(allowed),
            Err(e) if asked.is_on() => return Err(refused(e)),
            Err(_) => None,
        };
        for (name, set) in [("compute", &asked.compute), ("readers", &asked.readers)] {
            let (Some(set), Some(allowed)) = (set, &allowed) else { continue };
            check(name, set, allowed, affinity::online().as_ref()).map_err(ConfigError::Contradiction)?;
        }
        let mut asked = if knob::skipped(Knob::Affinity) { Affinity::default() } else { asked.clone() };
        if let (true, Some(allowed)) = (knob::forced(Knob::Affinity), &allowed) {
            asked.compute = allowed.cpus().first().map(|&cpu| CpuSet::new(vec![cpu]));
        }
        let placed = Self { decoder, allowed, asked };
        if let Some(set) = &placed.asked.compute {
            placed.put(set).map_err(refused)?;
        }
        Ok(placed)
    }

    /// Makes something whose threads read.
    pub fn reading<T>(&self, make: impl FnOnce() -> T) -> T {
        if !self.asked.is_on() {
            return make();
        }
        // Threads inherit: whoever reads without a choice of its own may run wherever the process may, not only where compute
        // does. Both sets were checked; a CPU that has been taken away since shows in the evidence.
        let put = |set: &Option<CpuSet>| {
            if let Some(set) = set.as_ref().or(self.allowed.as_ref()) {
                let _ = affinity::choose(set);
            }
        };
        put(&self.asked.readers);
        let made = make();
        put(&self.asked.compute);
        made
    }

    /// Where threads are now; `readers` are the kernel's numbers of those that read.
    pub fn seen(&self, readers: &[u32]) -> Option<AffinitySeen> {
        let own = Mutex::new(Vec::new());
        self.decoder.on_each_thread(&|_| {
            if let Ok(set) = affinity::of_thread(0) {
                own.lock().unwrap_or_else(PoisonError::into_inner).push((affinity::own_id(), set));
            }
        });
        let mut own = own.into_inner().unwrap_or_else(PoisonError::into_inner);
        // on a machine so busy that not all came in time, one may have come twice
        own.sort_by_key(|(thread, _)| *thread);
        own.dedup_by_key(|(thread, _)| *thread);
        Some(AffinitySeen {
            allowed: self.allowed.clone()?,
            compute: own.into_iter().map(|(_, set)| set).collect(),
            readers: readers.iter().filter_map(|&id| affinity::of_thread(id).ok()).collect(),
        })
    }

    fn put(&self, set: &CpuSet) -> std::io::Result<()> {
        affinity::choose(set)?;
        self.decoder.on_each_thread(&|_| {
            let _ = affinity::choose(set); // shown by the evidence
        });
        Ok(())
    }
}

impl Drop for Placed<'_> {
    fn drop(&mut self) {
        if let (true, Some(allowed)) = (self.asked.is_on(), &self.allowed) {
            let _ = self.put(allowed);
        }
    }
}

/// Whether CPUs exist and may be used.
fn check(name: &str, set: &CpuSet, allowed: &CpuSet, online: Option<&CpuSet>) -> Result<(), String> {
    let missing = online.map(|online| set.without(online)).unwrap_or_default();
    if !missing.cpus().is_empty() {
        return Err(format!("affinity {name}={set}: CPU {missing} does not exist here; allowed are {allowed}"));
    }
    let forbidden = set.without(allowed);
    if !forbidden.cpus().is_empty() {
        return Err(format!("affinity {name}={set}: this process may not use CPU {forbidden}; allowed are {allowed}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_back_as_they_are_written() {
        for (text, written) in [
            ("off", "off"),
            ("compute=0-1,readers=2-3", "compute=0-1,readers=2-3"),
            ("readers=3,5,compute=0", "compute=0,readers=3,5"),
            ("compute=1,0", "compute=0-1"),
        ] {
            let a: Affinity = text.parse().unwrap();
            assert_eq!(a.to_string(), written);
            assert_eq!(written.parse::<Affinity>().unwrap(), a);
        }
        for (bad, why) in [
            ("", "neither"),
            ("0-1", "neither"),
            ("gpu=0", "only compute and readers"),
            ("compute=0,compute=1", "given twice"),
            ("compute=", "no list"),
        ] {
            let e = bad.parse::<Affinity>().unwrap_err();
            assert!(e.contains(why) && e.contains("compute=0-1,readers=2-3"), "{e}");
        }
    }

    #[test]
    fn what_is_not_there_or_not_allowed_is_named_with_what_is() {
        let set = |s: &str| s.parse::<CpuSet>().unwrap();
        assert!(check("compute", &set("0-1"), &set("0-3"), Some(&set("0-7"))).is_ok());
        let e = check("compute", &set("1,9"), &set("0-3"), Some(&set("0-7"))).unwrap_err();
        assert!(e.contains("CPU 9 does not exist") && e.contains("allowed are 0-3"), "{e}");
        let e = check("readers", &set("3-5"), &set("0-3"), None).unwrap_err();
        assert!(e.contains("may not use CPU 4-5") && e.contains("allowed are 0-3"), "{e}");
    }
}
