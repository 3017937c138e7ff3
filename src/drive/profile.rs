//! The profile of drives that `ceiling` measured and that planner, simulator and reader calculate with: a versioned JSON
//! file, read back strictly. Data and checks only: nothing here measures, and emulated drives appear as what was
//! measured of them, never as what their emulation says.
//!
//! **The model.** A drive serves reads one after the other: each occupies it for `fixed_ns + bytes / rate` and its bytes
//! arrive `latency_ns` after that; latencies of reads in flight overlap. So one read alone takes all three, and the
//! fixed cost of a bound is `latency_ns + fixed_ns`.

use super::device::identity_of;
use super::spec::DriveSpec;
use crate::bound::DriveRate;
use crate::files::{self, Kind};
use crate::sys::durable::write_atomic;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Version of profiles that this program writes.
pub const PROFILE_VERSION: u32 = 1;
/// Largest profile that is read.
const MAX_PROFILE_BYTES: u64 = 16 << 20;

/// What is wrong with a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file could not be read or written.
    #[error("profile {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no profile, or its numbers cannot be.
    #[error("profile {}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// It is sound, but not of these drives.
    #[error("the profile does not fit: {0}; measure these drives with `argodrive ceiling`")]
    Mismatch(String),
}

/// One point of a sweep: reads of one size at one depth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Bytes of a read.
    pub bytes: u64,
    /// Reads in flight.
    pub depth: u32,
    /// Reads that count.
    pub reads: u64,
    /// Bytes delivered per second, median over pieces of the time.
    pub bytes_per_s: f64,
    /// Median completion latency.
    pub p50_ns: u64,
    /// Its 99th percentile.
    pub p99_ns: u64,
}

/// Barriers of `width` reads of the block, everything waited for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BarrierShape {
    /// Reads in each.
    pub width: u32,
    /// Barriers measured.
    pub steps: u64,
    /// Median from first submission to last arrival.
    pub p50_ns: u64,
    /// Its 99th percentile.
    pub p99_ns: u64,
    /// Bytes of a barrier by its median time.
    pub bytes_per_s: f64,
}

/// A point of a distribution function.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantile {
    /// Share of reads, 0 to 1.
    pub q: f64,
    /// That end within this time.
    pub ns: u64,
}

/// What one drive does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveModel {
    /// Name in drives.toml.
    pub name: String,
    /// Its folder when it was measured.
    pub path: PathBuf,
    /// Block devices under it, by name and sectors; empty when unknown.
    pub device: String,
    /// Hashed serial numbers of these devices, where they have any.
    pub serials: Vec<String>,
    /// Its pace was emulated: nothing here is a speed of the hardware.
    pub emulated: bool,
    /// Direct reads are aligned to this; 0 = they went through the page cache.
    pub alignment_bytes: u32,
    /// Bytes per second while transferring, with all drives of the profile at work.
    pub rate_bytes_per_s: f64,
    /// The same with this drive alone at work.
    pub solo_rate_bytes_per_s: f64,
    /// Occupies the drive for every read, on top of its bytes.
    pub fixed_ns: u64,
    /// Added to every read; overlaps other reads.
    pub latency_ns: u64,
    /// 99th percentile of one read of the block at a time.
    pub p99_ns: u64,
    /// Completion latency of one read of the block at a time, as a distribution to draw from; `q` rises from 0 to 1.
    pub service: Vec<Quantile>,
    /// Depth from which on more reads in flight deliver hardly more.
    pub depth: u32,
    /// The sweep.
    pub points: Vec<Point>,
    /// Barriers on this drive alone.
    pub barrier: BarrierShape,
    /// What long reading showed, if it was measured.
    pub sustained: Option<Sustained>,
}

/// Drives measured at the same time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Joint {
    /// What they share, or `all drives`.
    pub name: String,
    /// Their names.
    pub members: Vec<String>,
    /// What they delivered together: measured at the same time, not a sum of solo rates.
    pub bytes_per_s: f64,
    /// What each of them delivered meanwhile, in the order of `members`.
    pub member_bytes_per_s: Vec<f64>,
    /// Barriers over all of them, reads dealt by these rates.
    pub barrier: BarrierShape,
}

/// A drive under load for long.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sustained {
    /// How long.
    pub seconds: f64,
    /// Bytes per second before the knee; over the whole time if there is none.
    pub burst_bytes_per_s: f64,
    /// When the rate fell; `None` = it did not.
    pub knee_s: Option<f64>,
    /// Bytes per second after the knee.
    pub plateau_bytes_per_s: f64,
    /// How to load it without reaching the knee.
    pub duty: Option<DutyCycle>,
}

/// Bursts and pauses under which a drive keeps its burst rate, if it regains at rest what it can sustain.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DutyCycle {
    /// Longest burst.
    pub on_s: f64,
    /// Pause after it.
    pub off_s: f64,
    /// Share of time at burst rate.
    pub share: f64,
}

/// A condition under which the numbers would mean nothing, and what was seen of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proof {
    /// What was looked at.
    pub name: String,
    /// What was seen, with the limit.
    pub seen: String,
    /// `held` or `unverified`; a profile with a tripped guard is not written.
    pub verdict: String,
}

/// How a profile was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Method {
    /// UTC.
    pub made: String,
    /// Program and revision.
    pub argodrive: String,
    /// Operating system and kernel.
    pub kernel: String,
    /// Whether the machine is virtual: cold then means cold for this kernel.
    pub virtualised: Option<bool>,
    /// Engine that carried reads out.
    pub engine: String,
    /// Reads went past the page cache.
    pub direct: bool,
    /// Bytes of the block, the size of one expert.
    pub block_bytes: u64,
    /// Reads in a barrier.
    pub width: u32,
    /// Age of the youngest file that was read; fresh files may read faster.
    pub file_age_s: Option<u64>,
}

/// A profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Format version.
    pub version: u32,
    /// How it was measured.
    pub method: Method,
    /// Whether any drive's pace was emulated.
    pub emulated: bool,
    /// The drives, in the order of drives.toml.
    pub drives: Vec<DriveModel>,
    /// Drives that share an uplink, measured together.
    pub groups: Vec<Joint>,
    /// All drives, measured together.
    pub together: Joint,
    /// What was seen of cold start, foreign reads, pace and so on.
    pub guards: Vec<Proof>,
}

impl DriveModel {
    /// For bounds: the joint rate, and what a read costs before its first byte.
    pub fn bound_rate(&self) -> DriveRate {
        DriveRate { bytes_per_s: self.rate_bytes_per_s, fixed_ns: self.fixed_ns.saturating_add(self.latency_ns) }
    }

    /// The `q`-quantile of one read of the block at a time, interpolated.
    pub fn service_ns(&self, q: f64) -> f64 {
        let at = self.service.partition_point(|p| p.q < q);
        let (Some(low), Some(high)) = (self.service.get(at.saturating_sub(1)), self.service.get(at)) else {
            return self.service.last().map_or(0.0, |p| p.ns as f64);
        };
        let share = if high.q > low.q { ((q - low.q) / (high.q - low.q)).clamp(0.0, 1.0) } else { 1.0 };
        low.ns as f64 + (high.ns as f64 - low.ns as f64) * share
    }
}

impl Profile {
    /// The drive called `name`.
    pub fn drive(&self, name: &str) -> Option<&DriveModel> {
        self.drives.iter().find(|d| d.name == name)
    }

    /// The drives called `names`, in that order.
    pub fn models<'a>(&'a self, names: &[&str]) -> Result<Vec<&'a DriveModel>, ProfileError> {
        let missing = |name: &str| {
            let have: Vec<&str> = self.drives.iter().map(|d| d.name.as_str()).collect();
            ProfileError::Mismatch(format!("it has no drive `{name}` (it has {})", have.join(", ")))
        };
        names.iter().map(|name| self.drive(name).ok_or_else(|| missing(name))).collect()
    }

    /// The drives of `specs`, in that order, if they are the ones that were measured.
    pub fn models_of<'a>(&'a self, specs: &[DriveSpec]) -> Result<Vec<&'a DriveModel>, ProfileError> {
        let models = self.models(&specs.iter().map(|s| s.name.as_str()).collect::<Vec<_>>())?;
        for (spec, model) in specs.iter().zip(&models) {
            let name = &spec.name;
            if spec.emulate.is_some() != model.emulated {
                let word = |emulated| if emulated { "emulated" } else { "real" };
                let (then, now) = (word(model.emulated), word(spec.emulate.is_some()));
                return Err(ProfileError::Mismatch(format!(
                    "drive `{name}` was {then} when it was measured, is {now}"
                )));
            }
            let now = identity_of(&spec.path);
            if !now.is_empty() && !model.device.is_empty() && now != model.device {
                let then = &model.device;
                return Err(ProfileError::Mismatch(format!(
                    "drive `{name}` was {then} when it was measured, is {now}"
                )));
            }
        }
        Ok(models)
    }

    /// Reads and checks a profile.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let io = |source| ProfileError::Io { path: path.into(), source };
        let bytes = std::fs::metadata(path).map_err(io)?.len();
        if bytes > MAX_PROFILE_BYTES {
            let reason = format!("{bytes} bytes are no profile");
            return Err(ProfileError::Format { path: path.into(), reason });
        }
        let text = files::read_text(path).map_err(io)?;
        Self::parse(&text).map_err(|reason| {
            let reason = files::instead(&text, Kind::Profile).unwrap_or(reason);
            ProfileError::Format { path: path.into(), reason }
        })
    }

    /// Parses and checks the text of a profile.
    pub fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let not = |e: serde_json::Error| format!("not a profile of `argodrive ceiling`: {e}");
        let Versioned { version } = serde_json::from_str(text).map_err(not)?;
        if version > PROFILE_VERSION {
            return Err(format!(
                "version {version}, this program reads up to {PROFILE_VERSION}; use a newer argodrive"
            ));
        }
        let profile: Self = serde_json::from_str(text).map_err(not)?;
        profile.check()?;
        Ok(profile)
    }

    /// Checks and writes a profile, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), ProfileError> {
        let format = |reason| ProfileError::Format { path: path.into(), reason };
        self.check().map_err(format)?;
        let text = serde_json::to_string_pretty(self).map_err(|e| format(e.to_string()))?;
        write_atomic(path, (text + "\n").as_bytes()).map_err(|source| ProfileError::Io { path: path.into(), source })
    }

    /// Whether its numbers can be calculated with.
    pub fn check(&self) -> Result<(), String> {
        if self.version != PROFILE_VERSION {
            return Err(format!("version {} is none", self.version));
        }
        if self.drives.is_empty() || self.method.block_bytes == 0 {
            return Err("no drives, or blocks of no bytes; measure again".into());
        }
        let mut names = BTreeSet::new();
        for drive in &self.drives {
            if drive.name.is_empty() || !names.insert(drive.name.as_str()) {
                return Err(format!("drive `{}` is there twice, or has no name", drive.name));
            }
            drive.check().map_err(|e| format!("drive `{}`: {e}", drive.name))?;
        }
        if self.emulated != self.drives.iter().any(|d| d.emulated) {
            return Err("`emulated` contradicts the drives".into());
        }
        for joint in self.groups.iter().chain([&self.together]) {
            joint.check(&names).map_err(|e| format!("group `{}`: {e}", joint.name))?;
        }
        if self.together.members.len() != self.drives.len() {
            return Err("`together` does not have all drives".into());
        }
        match self.guards.iter().find(|g| !["held", "unverified"].contains(&g.verdict.as_str())) {
            Some(g) => Err(format!("guard {} is {}: {}; measure again", g.name, g.verdict, g.seen)),
            None => Ok(()),
        }
    }
}

fn positive(what: &str, value: f64) -> Result<(), String> {
    match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => Err(format!("{what} is {value}; expected a finite number above 0")),
    }
}

impl DriveModel {
    fn check(&self) -> Result<(), String> {
        positive("rate_bytes_per_s", self.rate_bytes_per_s)?;
        positive("solo_rate_bytes_per_s", self.solo_rate_bytes_per_s)?;
        if self.depth == 0 || self.points.is_empty() {
            return Err("no depth, or no points of a sweep".into());
        }
        for p in &self.points {
            positive("points: bytes_per_s", p.bytes_per_s)?;
            if p.bytes == 0 || p.depth == 0 || p.reads == 0 || p.p99_ns < p.p50_ns {
                return Err(format!("points: {p:?} cannot be"));
            }
        }
        let rising = self.service.windows(2).all(|w| w[0].q < w[1].q && w[0].ns <= w[1].ns);
        let ends = self.service.first().map(|p| p.q).zip(self.service.last().map(|p| p.q));
        if !rising || ends != Some((0.0, 1.0)) || self.p99_ns == 0 {
            return Err("service: quantiles must rise from 0 to 1 with times that do not fall".into());
        }
        if let Some(s) = &self.sustained {
            positive("sustained: seconds", s.seconds)?;
            positive("sustained: burst_bytes_per_s", s.burst_bytes_per_s)?;
            positive("sustained: plateau_bytes_per_s", s.plateau_bytes_per_s)?;
            if s.knee_s.is_some_and(|k| !(0.0..=s.seconds).contains(&k)) {
                return Err("sustained: knee_s lies outside the measurement".into());
            }
            if let Some(d) = &s.duty {
                positive("sustained: duty: on_s", d.on_s)?;
                positive("sustained: duty: off_s", d.off_s)?;
                positive("sustained: duty: share", d.share)?;
            }
        }
        self.barrier.check()
    }
}

impl BarrierShape {
    fn check(&self) -> Result<(), String> {
        positive("barrier: bytes_per_s", self.bytes_per_s)?;
        match self.width > 0 && self.steps > 0 && self.p50_ns > 0 && self.p50_ns <= self.p99_ns {
            true => Ok(()),
            false => Err(format!("barrier: {self:?} cannot be")),
        }
    }
}

impl Joint {
    fn check(&self, names: &BTreeSet<&str>) -> Result<(), String> {
        let distinct: BTreeSet<&str> = self.members.iter().map(String::as_str).collect();
        if let Some(unknown) = distinct.iter().find(|m| !names.contains(*m)) {
            return Err(format!("member `{unknown}` is not a drive of the profile"));
        }
        if distinct.is_empty() || distinct.len() != self.members.len() {
            return Err("no members, or one is there twice".into());
        }
        if self.member_bytes_per_s.len() != self.members.len() {
            return Err("it needs one rate for each member".into());
        }
        positive("bytes_per_s", self.bytes_per_s)?;
        self.member_bytes_per_s.iter().try_for_each(|&r| positive("member_bytes_per_s", r))?;
        self.barrier.check()
    }
}

#[cfg(test)]
#[path = "profile_tests.rs"]
mod tests;
