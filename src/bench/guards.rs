//! Guards: conditions under which a run's numbers mean nothing, each with proof that it looked (measuring.md section 4). A
//! guard that could not look says so; it never counts as held.

use super::seen::{Residency, ResidencySample};
use crate::drive::device::{BlockDevice, devices_of, identity_of};
use crate::drive::spec::DriveSpec;
use crate::layout::plan::Plan;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;

/// Largest share of sampled extents in the page cache that still counts as cold.
pub const MAX_RESIDENT_SHARE: f64 = 0.01;
/// Swap may grow by this much.
const MAX_SWAP_GROWTH_BYTES: u64 = 1 << 20;
/// Others may read this much from the same devices: a share of our own reads, and this many bytes at least.
const MAX_FOREIGN_SHARE: f64 = 0.10;
/// See [`MAX_FOREIGN_SHARE`].
const FOREIGN_FLOOR_BYTES: u64 = 16 << 20;
/// Share of CPU time that a hypervisor may take away.
const MAX_STEAL_SHARE: f64 = 0.25;
/// Ticks of CPU time below which the share says nothing: the kernel counts in ticks, and a run of a few hundredths of a second has
/// ten of them.
const MIN_STEAL_TICKS: u64 = 50;
/// Files younger than this may read faster than they will later.
const SETTLED_S: u64 = 600;
/// Name of the guard that compares tokens.
pub(super) const TOKEN_IDENTITY: &str = "token identity";
/// Name of the guard that compares what devices moved with what was read.
pub(super) const DEVICE_BYTES: &str = "device bytes";
/// Memory that should be free when a run starts.
const MIN_FREE_SHARE: f64 = 0.05;

/// How a guard ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuardVerdict {
    /// It looked, and the condition held.
    Held,
    /// It looked, and the condition did not hold: the run does not count.
    Tripped,
    /// It could not look, or what it saw decides nothing.
    Unverified,
}

/// One guard of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guard {
    /// Its name.
    pub name: String,
    /// What it saw, with the limit.
    pub seen: String,
    /// How it ended.
    pub verdict: GuardVerdict,
}

fn guard(name: &str, verdict: GuardVerdict, seen: impl Into<String>) -> Guard {
    Guard { name: name.into(), seen: seen.into(), verdict }
}

/// Counters of the machine at one moment; what cannot be read is `None`.
struct Machine {
    swap_used_bytes: Option<u64>,
    cpu_ticks: Option<(u64, u64)>,
    device_bytes: Option<u64>,
}

/// The machine before a run.
pub struct Watch {
    devices: Vec<BlockDevice>,
    all_mapped: bool,
    before: Machine,
    memory: Option<(u64, u64)>,
}

/// What the guards are told about the run itself.
pub struct RunFacts<'a> {
    /// The plan and its mounts, if anything streamed.
    pub streamed: Option<(&'a Plan, &'a [DriveSpec])>,
    /// Bytes that the reader asked of the drives.
    pub read_bytes: u64,
    /// Reads went past the page cache, as far as the reader opened files so.
    pub direct: bool,
    /// Residency before and after.
    pub residency: Option<(Residency, Residency)>,
    /// The sample it was taken from.
    pub sample: Option<&'a ResidencySample>,
    /// Hash of the tokens, and of the control's, if there is one.
    pub tokens: (&'a str, Option<&'a str>),
}

/// What the guards are told about plain reads.
pub struct ReadFacts {
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Reads went past the page cache, as far as files were opened so.
    pub direct: bool,
    /// Residency before and after.
    pub residency: Option<(Residency, Residency)>,
    /// Age of the youngest file.
    pub youngest_file_s: Option<u64>,
}

impl Watch {
    /// Reads the machine's counters.
    pub fn start(mounts: &[DriveSpec]) -> Self {
        let found: Vec<Vec<BlockDevice>> = mounts.iter().map(|m| devices_of(&m.path)).collect();
        let all_mapped = !found.is_empty() && found.iter().all(|d| !d.is_empty());
        let devices: Vec<BlockDevice> = found.into_iter().flatten().collect::<BTreeSet<_>>().into_iter().collect();
        let before = Machine::read(&devices);
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let memory = kib(&meminfo, "MemAvailable:").zip(kib(&meminfo, "MemTotal:"));
        Self { devices, all_mapped, before, memory }
    }

    /// Judges the guards of plain reads: nothing of a plan, nothing of tokens. `all_emulated` = the pace of every drive is
    /// its own, so that what others read of the disk behind decides nothing.
    pub fn finish_reads(self, reads: &ReadFacts, all_emulated: bool) -> Vec<Guard> {
        let after = Machine::read(&self.devices);
        let mut out = vec![
            cold_reads(reads),
            swap(self.before.swap_used_bytes, after.swap_used_bytes),
            steal(self.before.cpu_ticks, after.cpu_ticks),
            memory(self.memory),
        ];
        let facts = RunFacts {
            streamed: None,
            read_bytes: reads.read_bytes,
            direct: reads.direct,
            residency: reads.residency,
            sample: None,
            tokens: ("", None),
        };
        let moved = self.before.device_bytes.zip(after.device_bytes).map(|(b, a)| a.wrapping_sub(b));
        let [covered, foreign] = device_bytes(&facts, moved.filter(|_| self.all_mapped), &self.devices);
        let foreign = by_pace(foreign, all_emulated);
        out.extend([covered, foreign, age_guard(reads.youngest_file_s)]);
        out
    }

    /// Judges all guards after the run.
    pub fn finish(self, facts: &RunFacts<'_>) -> Vec<Guard> {
        let after = Machine::read(&self.devices);
        let mut out = vec![
            cold(facts),
            swap(self.before.swap_used_bytes, after.swap_used_bytes),
            steal(self.before.cpu_ticks, after.cpu_ticks),
            memory(self.memory),
        ];
        if facts.streamed.is_some() {
            let moved = self.before.device_bytes.zip(after.device_bytes).map(|(b, a)| a.wrapping_sub(b));
            let [covered, foreign] = device_bytes(facts, moved.filter(|_| self.all_mapped), &self.devices);
            let all_emulated = facts.streamed.is_some_and(|(_, mounts)| mounts.iter().all(|m| m.emulate.is_some()));
            out.extend([covered, by_pace(foreign, all_emulated)]);
            out.push(file_age(facts));
            out.push(drive_map(facts));
        }
        out.push(token_identity(facts));
        out
    }
}

impl Machine {
    fn read(devices: &[BlockDevice]) -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let swap = kib(&meminfo, "SwapTotal:").zip(kib(&meminfo, "SwapFree:"));
        let each: Option<Vec<u64>> = devices.iter().map(BlockDevice::read_bytes).collect();
        Self {
            swap_used_bytes: swap.map(|(total, free)| total.saturating_sub(free)),
            cpu_ticks: cpu_ticks(&fs::read_to_string("/proc/stat").unwrap_or_default()),
            device_bytes: each.map(|v| v.iter().sum()),
        }
    }
}

fn cold(facts: &RunFacts<'_>) -> Guard {
    let name = "cold start";
    match facts.residency {
        _ if facts.streamed.is_none() => guard(name, GuardVerdict::Unverified, "nothing streamed"),
        None => guard(name, GuardVerdict::Unverified, "this kernel does not tell what is in the page cache"),
        Some((before, _)) => {
            let seen = format!(
                "{:.1} % of {} sampled bytes in the page cache before the run (limit {:.0} %)",
                before.share() * 100.0,
                before.asked_bytes,
                MAX_RESIDENT_SHARE * 100.0
            );
            let cold = before.share() <= MAX_RESIDENT_SHARE;
            guard(name, if cold { GuardVerdict::Held } else { GuardVerdict::Tripped }, seen)
        }
    }
}

/// Direct reads leave nothing in the page cache: what is there afterwards came from it.
fn cold_reads(reads: &ReadFacts) -> Guard {
    let name = "cold start";
    let Some((before, after)) = reads.residency else {
        return guard(name, GuardVerdict::Unverified, "this kernel does not tell what is in the page cache");
    };
    let seen = format!(
        "{:.1} % of {} sampled bytes in the page cache before, {:.1} % after (limit {:.0} %)",
        before.share() * 100.0,
        before.asked_bytes,
        after.share() * 100.0,
        MAX_RESIDENT_SHARE * 100.0
    );
    let cold = before.share() <= MAX_RESIDENT_SHARE;
    match (cold, reads.direct) {
        (true, true) if after.share() <= MAX_RESIDENT_SHARE => guard(name, GuardVerdict::Held, seen),
        (true, false) => guard(name, GuardVerdict::Unverified, format!("{seen}; later reads may find the first in it")),
        _ => guard(name, GuardVerdict::Tripped, seen),
    }
}

fn swap(before: Option<u64>, after: Option<u64>) -> Guard {
    let name = "swap growth";
    match before.zip(after) {
        None => guard(name, GuardVerdict::Unverified, "swap use cannot be read"),
        Some((before, after)) => {
            let grown = after.saturating_sub(before);
            let verdict = if grown <= MAX_SWAP_GROWTH_BYTES { GuardVerdict::Held } else { GuardVerdict::Tripped };
            guard(name, verdict, format!("swap grew by {grown} bytes (limit {MAX_SWAP_GROWTH_BYTES})"))
        }
    }
}

fn steal(before: Option<(u64, u64)>, after: Option<(u64, u64)>) -> Guard {
    let name = "cpu steal";
    let Some(((all_0, stolen_0), (all_1, stolen_1))) = before.zip(after) else {
        return guard(name, GuardVerdict::Unverified, "CPU times cannot be read");
    };
    let all = all_1.saturating_sub(all_0);
    if all < MIN_STEAL_TICKS {
        return guard(name, GuardVerdict::Unverified, format!("{all} ticks are too few to tell"));
    }
    let share = stolen_1.saturating_sub(stolen_0) as f64 / all as f64;
    let verdict = if share <= MAX_STEAL_SHARE { GuardVerdict::Held } else { GuardVerdict::Tripped };
    let limit = MAX_STEAL_SHARE * 100.0;
    guard(name, verdict, format!("{:.1} % of CPU time taken by the hypervisor (limit {limit:.0} %)", share * 100.0))
}

fn memory(memory: Option<(u64, u64)>) -> Guard {
    let name = "memory headroom";
    match memory {
        None => guard(name, GuardVerdict::Unverified, "free memory cannot be read"),
        Some((free, total)) => {
            let enough = free as f64 >= total as f64 * MIN_FREE_SHARE;
            let verdict = if enough { GuardVerdict::Held } else { GuardVerdict::Tripped };
            let limit = MIN_FREE_SHARE * 100.0;
            guard(name, verdict, format!("{free} of {total} bytes available at the start (limit {limit:.0} %)"))
        }
    }
}

/// Two guards from the devices' own counters: did they move what we read, and did others read beside us?
fn device_bytes(facts: &RunFacts<'_>, moved: Option<u64>, devices: &[BlockDevice]) -> [Guard; 2] {
    let names = [DEVICE_BYTES, "foreign reads"];
    let Some(moved) = moved else {
        return names.map(|n| guard(n, GuardVerdict::Unverified, "the drives' block devices could not be found"));
    };
    let list = devices.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
    let asked = facts.read_bytes;
    let covered = moved >= asked;
    let seen = format!("{list} moved {moved} bytes, {asked} were read");
    let first = match (covered, facts.direct) {
        (true, _) => guard(names[0], GuardVerdict::Held, seen),
        (false, true) => guard(names[0], GuardVerdict::Tripped, format!("{seen}: the rest came from a cache")),
        (false, false) => guard(names[0], GuardVerdict::Unverified, format!("{seen}, through the page cache")),
    };
    let foreign = moved.saturating_sub(asked);
    let limit = FOREIGN_FLOOR_BYTES.max((asked as f64 * MAX_FOREIGN_SHARE) as u64);
    let quiet = foreign <= limit;
    let verdict = if quiet { GuardVerdict::Held } else { GuardVerdict::Tripped };
    [first, guard(names[1], verdict, format!("others read {foreign} bytes from {list} (limit {limit})"))]
}

/// What others read of the disk behind emulated drives decides nothing: their pace is their own, and is judged.
fn by_pace(mut foreign: Guard, all_emulated: bool) -> Guard {
    if all_emulated && foreign.verdict == GuardVerdict::Tripped {
        foreign.verdict = GuardVerdict::Unverified;
        foreign.seen.push_str("; emulated drives are judged by their pace instead");
    }
    foreign
}

fn file_age(facts: &RunFacts<'_>) -> Guard {
    age_guard(facts.sample.and_then(|s| s.youngest_file_s))
}

fn age_guard(youngest_s: Option<u64>) -> Guard {
    let name = "file age";
    match youngest_s {
        None => guard(name, GuardVerdict::Unverified, "file times cannot be read"),
        Some(age) if age >= SETTLED_S => guard(name, GuardVerdict::Held, format!("youngest file written {age} s ago")),
        Some(age) => guard(
            name,
            GuardVerdict::Unverified,
            format!("youngest file written {age} s ago; fresh files may read faster than settled ones ({SETTLED_S} s)"),
        ),
    }
}

/// Key under which a plan holds what its drive `name` was when the plan was made.
pub fn device_key(name: &str) -> String {
    format!("device:{name}")
}

fn drive_map(facts: &RunFacts<'_>) -> Guard {
    let name = "drive map";
    let Some((plan, mounts)) = facts.streamed else { return guard(name, GuardVerdict::Unverified, "nothing streamed") };
    let mut unknown = Vec::new();
    for mount in mounts {
        let now = identity_of(&mount.path);
        match plan.inputs.get(&device_key(&mount.name)) {
            Some(then) if !then.is_empty() && !now.is_empty() => {
                if *then != now {
                    let seen = format!("drive {} was {then} when the plan was made and is {now} now", mount.name);
                    return guard(name, GuardVerdict::Tripped, seen);
                }
            }
            _ => unknown.push(mount.name.as_str()),
        }
    }
    match unknown.is_empty() {
        true => guard(name, GuardVerdict::Held, "every drive is the device that the plan was made for"),
        false => guard(name, GuardVerdict::Unverified, format!("not in the plan or not known: {}", unknown.join(", "))),
    }
}

fn token_identity(facts: &RunFacts<'_>) -> Guard {
    let name = TOKEN_IDENTITY;
    match facts.tokens {
        (_, None) => guard(name, GuardVerdict::Unverified, "no control to compare with"),
        (seen, Some(control)) if seen == control => guard(name, GuardVerdict::Held, format!("tokens {seen}")),
        (seen, Some(control)) => {
            guard(name, GuardVerdict::Tripped, format!("tokens {seen}, the control gave {control}"))
        }
    }
}

/// Memory that can be had now, where the system tells.
pub(super) fn available_bytes() -> Option<u64> {
    crate::sys::limits::available_memory()
}

/// A `kB` line of `/proc/meminfo` in bytes.
fn kib(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// All ticks and stolen ticks of the first line of `/proc/stat`.
fn cpu_ticks(stat: &str) -> Option<(u64, u64)> {
    let fields: Vec<u64> = stat.lines().next()?.split_whitespace().skip(1).map_while(|w| w.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal; guest time is already in user time
    let all = fields.iter().take(8).sum();
    Some((all, *fields.get(7)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts<'a>(residency: Option<(Residency, Residency)>) -> RunFacts<'a> {
        RunFacts {
            streamed: None,
            read_bytes: 1 << 30,
            direct: true,
            residency,
            sample: None,
            tokens: ("a", Some("a")),
        }
    }

    #[test]
    fn steal_comes_from_the_eighth_number() {
        let a = cpu_ticks("cpu  10 0 10 80 0 0 0 0 5 5\ncpu0 1").unwrap();
        let b = cpu_ticks("cpu  20 0 20 160 0 0 0 10 9 9\n").unwrap();
        assert_eq!((a, b), ((100, 0), (210, 10)));
        assert_eq!(steal(Some(a), Some((b.0, 40))).verdict, GuardVerdict::Tripped);
        assert_eq!(steal(Some(a), None).verdict, GuardVerdict::Unverified);
        assert_eq!(steal(Some((0, 0)), Some((49, 40))).verdict, GuardVerdict::Unverified, "too short to tell");
        assert_eq!(cpu_ticks(""), None);
    }

    #[test]
    fn swap_growth_trips_and_blindness_is_said() {
        assert_eq!(swap(Some(0), Some(2 << 20)).verdict, GuardVerdict::Tripped);
        assert_eq!(swap(Some(5), Some(5)).verdict, GuardVerdict::Held);
        assert_eq!(swap(None, Some(5)).verdict, GuardVerdict::Unverified);
        assert_eq!(kib("SwapTotal:  8 kB\n", "SwapTotal:"), Some(8192));
    }

    #[test]
    fn plain_reads_are_cold_before_and_after() {
        let some = |resident_bytes| Residency { resident_bytes, asked_bytes: 1000 };
        let reads = |before, after, direct| ReadFacts {
            read_bytes: 0,
            direct,
            residency: Some((some(before), some(after))),
            youngest_file_s: None,
        };
        assert_eq!(cold_reads(&reads(0, 5, true)).verdict, GuardVerdict::Held);
        assert_eq!(cold_reads(&reads(0, 500, true)).verdict, GuardVerdict::Tripped);
        assert_eq!(cold_reads(&reads(500, 0, true)).verdict, GuardVerdict::Tripped);
        assert_eq!(cold_reads(&reads(0, 500, false)).verdict, GuardVerdict::Unverified);
        let blind = ReadFacts { residency: None, ..reads(0, 0, true) };
        assert_eq!(cold_reads(&blind).verdict, GuardVerdict::Unverified);
    }

    #[test]
    fn devices_that_moved_less_than_was_read_were_not_the_source() {
        let [bytes, _] = device_bytes(&facts(None), Some(1 << 20), &[]);
        assert_eq!(bytes.verdict, GuardVerdict::Tripped);
        let [bytes, foreign] = device_bytes(&facts(None), Some(1 << 30), &[]);
        assert_eq!((bytes.verdict, foreign.verdict), (GuardVerdict::Held, GuardVerdict::Held));
        let [_, foreign] = device_bytes(&facts(None), Some(3 << 30), &[]);
        assert_eq!(foreign.verdict, GuardVerdict::Tripped);
        let [bytes, _] = device_bytes(&facts(None), None, &[]);
        assert_eq!(bytes.verdict, GuardVerdict::Unverified);
    }

    #[test]
    fn other_tokens_than_the_control_trip() {
        let mut f = facts(None);
        assert_eq!(token_identity(&f).verdict, GuardVerdict::Held);
        f.tokens = ("b", Some("a"));
        assert_eq!(token_identity(&f).verdict, GuardVerdict::Tripped);
        f.tokens = ("b", None);
        assert_eq!(token_identity(&f).verdict, GuardVerdict::Unverified);
    }
}
