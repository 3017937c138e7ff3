//! Drives for a simulation: from the profile that `ceiling` measured, or from what a trace shows of them. An `emulate` table
//! is never looked at.
//!
//! **Shared uplinks.** A profile has each drive's rate alone and with all others at work, and of every group that shares an
//! uplink what its members delivered together. Where that is clearly less than the members alone would deliver, the
//! drives get their rates alone and the group a joint one; otherwise each drive simply has the rate that it had with all
//! others at work. What a group delivers counts transfers only: fixed costs of single reads are not the uplink's.

use super::ceiling_fit::joint_rate;
use crate::bound::DriveRate;
use crate::drive::profile::{DriveModel, Profile, ProfileError};
use crate::drive::spec::DriveSpec;
use crate::drive::units::{parse_bytes, parse_duration_ns, parse_rate};
use crate::replay::ReplayError;
use crate::replay::rates::{NamedRate, parse_profile};
use crate::replay::simulate::devices::{Device, Episode, Episodes, Noise, Uplink};
use crate::replay::workload::{Workload, residuals};
use crate::trace::log::TraceHeader;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// Together this much slower than alone is an uplink, not noise.
const CLEARLY: f64 = 0.97;
/// Fewer residuals of a drive are no distribution.
const MIN_RESIDUALS: usize = 20;
/// A trace whose reads take so much longer or shorter than the model says is of another drive, or of another state of it.
const FITS: std::ops::RangeInclusive<f64> = 0.8..=1.25;
/// Largest profile that is read.
const MAX_PROFILE_BYTES: u64 = 16 << 20;

/// What is known of drives before a simulation.
#[derive(Clone, Debug)]
pub enum Known {
    /// `ceiling` measured it.
    Profile(Box<Profile>),
    /// A person wrote rates down.
    Rates(Vec<NamedRate>),
    /// Nothing: the trace must show it.
    Trace,
}

impl Known {
    /// Reads a profile: the JSON of `ceiling`, or TOML with rates.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let io = |source| ProfileError::Io { path: path.into(), source };
        let format = |reason| ProfileError::Format { path: path.into(), reason };
        let bytes = std::fs::metadata(path).map_err(io)?.len();
        if bytes > MAX_PROFILE_BYTES {
            return Err(format(format!("{bytes} bytes are no profile")));
        }
        let text = std::fs::read_to_string(path).map_err(io)?;
        if text.trim_start().starts_with('{') {
            return Profile::parse(&text).map(|p| Self::Profile(Box::new(p))).map_err(format);
        }
        parse_profile(&text).map(Self::Rates).map_err(format)
    }

    /// Where rates come from, in words.
    pub fn words(&self) -> &'static str {
        match self {
            Self::Profile(_) => "profile measured by `ceiling`",
            Self::Rates(_) => "rates given by hand",
            Self::Trace => "fit to the trace",
        }
    }
}

/// A drive of a simulation, in words and numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DriveRow {
    /// Its name.
    pub name: String,
    /// Bytes per second while transferring.
    pub bytes_per_s: f64,
    /// Occupies it for every read.
    pub fixed_ns: u64,
    /// Added to every read, overlapping.
    pub latency_ns: u64,
    /// What varies: by residuals of the `trace`, by the distribution of the `profile`, or `none`.
    pub noise: &'static str,
    /// Residuals of the trace that are drawn from.
    pub residuals: usize,
    /// Its pace was emulated when it was measured.
    pub emulated: bool,
    /// It does not exist: somebody asked what it would bring.
    pub hypothetical: bool,
}

/// The drives of a simulation.
#[derive(Clone, Debug)]
pub struct Drives {
    /// For the simulation, in the order of the plan.
    pub devices: Vec<Device>,
    /// What they share.
    pub uplinks: Vec<Uplink>,
    /// How late reads of the trace were, by drive of the plan.
    pub episodes: Arc<Episodes>,
    /// Alignment of reads; `None` = not known.
    pub alignment_bytes: Option<u32>,
    /// In words.
    pub rows: Vec<DriveRow>,
    /// What does not fit.
    pub remarks: Vec<String>,
}

/// It cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum DrivesError {
    /// The profile does not fit.
    #[error("--profile: {0}")]
    Profile(#[from] ProfileError),
    /// The trace does not show it.
    #[error(transparent)]
    Replay(#[from] ReplayError),
}

/// The drives called `names`; `mounts` are where they are now, if somebody said.
pub fn drives(
    names: &[String],
    known: &Known,
    mounts: Option<&[DriveSpec]>,
    trace: &Path,
    header: &TraceHeader,
    work: &Workload,
    lenient: bool,
) -> Result<Drives, DrivesError> {
    let emulated = |name: &String| header.drives.iter().any(|d| d.name == *name && d.emulated);
    let row = |d: &Device, emulated| DriveRow {
        name: d.name.clone(),
        bytes_per_s: d.bytes_per_s,
        fixed_ns: d.fixed_ns,
        latency_ns: d.latency_ns,
        noise: "none",
        residuals: 0,
        emulated,
        hypothetical: false,
    };
    let mut out = match known {
        Known::Profile(profile) => {
            let models = match mounts {
                Some(mounts) => profile.models_of(mounts)?,
                None => profile.models(&names.iter().map(String::as_str).collect::<Vec<_>>())?,
            };
            let (devices, uplinks) = of_profile(profile, &models);
            let rows = devices.iter().zip(&models).map(|(d, m)| row(d, m.emulated)).collect();
            let alignment = models.iter().map(|m| m.alignment_bytes.max(1)).max();
            Drives { devices, uplinks, episodes: Arc::default(), alignment_bytes: alignment, rows, remarks: Vec::new() }
        }
        Known::Rates(rates) => {
            let of = |name: &String| {
                let found = rates.iter().find(|r| r.name == *name).ok_or_else(|| {
                    let have: Vec<&str> = rates.iter().map(|r| r.name.as_str()).collect();
                    ProfileError::Mismatch(format!("it has no drive `{name}` (it has {})", have.join(", ")))
                })?;
                Ok(Device::exact(name, found.rate.bytes_per_s, 0, found.rate.fixed_ns))
            };
            plain(names.iter().map(of).collect::<Result<_, ProfileError>>()?, names, &row, &emulated)
        }
        Known::Trace => {
            let rates = work.rates(header, names)?;
            let of = |r: &crate::trace::log::TraceRate| Device::exact(&r.drive, r.bytes_per_s as f64, 0, r.fixed_ns);
            plain(rates.iter().map(of).collect(), names, &row, &emulated)
        }
    };
    let in_trace = |t: &crate::trace::log::TraceDrive| out.devices.iter().find(|d| d.name == t.name).cloned();
    let of_trace: Vec<Option<Device>> = header.drives.iter().map(in_trace).collect();
    let seen = residuals(trace, header, &of_trace, lenient)?;
    let mut places = Vec::new();
    for (device, row) in out.devices.iter_mut().zip(&mut out.rows) {
        let at = header.drives.iter().position(|t| t.name == device.name);
        let count = at.map_or(0, |at| seen.places[at].iter().map(Vec::len).sum());
        // what was fitted to the trace is of its drives, however badly it fits
        let own = matches!(known, Known::Trace);
        let fits = |at: &usize| count >= MIN_RESIDUALS && (own || FITS.contains(&seen.over_model[*at]));
        if let Some(at) = at.filter(|at| count >= MIN_RESIDUALS && !fits(at)) {
            out.remarks.push(format!(
                "drive `{}` took {:.2} times as long in the trace as its rate says: what varies is not taken from there",
                device.name, seen.over_model[at]
            ));
        }
        let at = at.filter(fits);
        places.push(at);
        if let Some(at) = at {
            device.noise = Noise::Late(seen.places[at].clone());
            (row.noise, row.residuals) = ("trace", count);
        } else if device.noise != Noise::None {
            row.noise = "profile";
        }
    }
    let of_plan = |e: &Episode| Episode {
        own: places.iter().map(|at| at.map_or_else(Vec::new, |at| e.own[at].clone())).collect(),
        common: e.common.clone(),
    };
    let Episodes { prefill, extend } = &seen.episodes;
    let (prefill, extend) = (prefill.iter().map(of_plan).collect(), extend.iter().map(of_plan).collect());
    out.episodes = Arc::new(Episodes { prefill, extend });
    Ok(out)
}

fn plain(
    devices: Vec<Device>,
    names: &[String],
    row: &dyn Fn(&Device, bool) -> DriveRow,
    emulated: &dyn Fn(&String) -> bool,
) -> Drives {
    let rows = devices.iter().zip(names).map(|(d, name)| row(d, emulated(name))).collect();
    Drives { devices, uplinks: Vec::new(), episodes: Arc::default(), alignment_bytes: None, rows, remarks: Vec::new() }
}

/// Drives and uplinks as a profile has them.
fn of_profile(profile: &Profile, models: &[&DriveModel]) -> (Vec<Device>, Vec<Uplink>) {
    let place = |name: &String| models.iter().position(|m| m.name == *name);
    let solo = |name: &String| profile.drive(name).map_or(0.0, |d| d.solo_rate_bytes_per_s);
    let mut uplinks = Vec::new();
    let mut push = |members: &[String], bytes_per_s: f64, alone: f64| {
        let own: Vec<usize> = members.iter().filter_map(place).collect();
        if bytes_per_s < CLEARLY * alone && own.len() > 1 {
            uplinks.push(Uplink { members: own, bytes_per_s });
        }
    };
    let mut expected: f64 = profile.drives.iter().map(|d| d.solo_rate_bytes_per_s).sum();
    for group in &profile.groups {
        let block = profile.method.block_bytes;
        let transfer = |(name, rate): (&String, &f64)| {
            let fixed_ns = profile.drive(name).map_or(0, |d| d.fixed_ns) as f64;
            joint_rate(block, block as f64 * 1e9 / rate, fixed_ns, solo(name))
        };
        let together: f64 = group.members.iter().zip(&group.member_bytes_per_s).map(transfer).sum();
        let alone: f64 = group.members.iter().map(solo).sum();
        expected -= (alone - together).max(0.0);
        push(&group.members, together, alone);
    }
    let all: f64 = profile.drives.iter().map(|d| d.rate_bytes_per_s).sum();
    push(&profile.together.members, all, expected);
    let device = |(at, model): (usize, &&DriveModel)| {
        let linked = uplinks.iter().any(|u: &Uplink| u.members.contains(&at));
        // what slowed it then is perhaps not part of this plan
        let slowed = model.rate_bytes_per_s < CLEARLY * model.solo_rate_bytes_per_s;
        let alone = linked || (slowed && models.len() < profile.drives.len());
        Device {
            name: model.name.clone(),
            bytes_per_s: if alone { model.solo_rate_bytes_per_s } else { model.rate_bytes_per_s },
            fixed_ns: model.fixed_ns,
            latency_ns: model.latency_ns,
            noise: Noise::of_service(&model.service),
            bound: model.bound_rate(),
        }
    };
    (models.iter().enumerate().map(device).collect(), uplinks)
}

/// A drive that does not exist.
#[derive(Clone, Debug, PartialEq)]
pub struct NewDrive {
    /// Its name.
    pub name: Option<String>,
    /// What it would do.
    pub rate: DriveRate,
    /// Occupies it for every read.
    pub fixed_ns: u64,
    /// Added to every read, overlapping.
    pub latency_ns: u64,
    /// Bytes of experts that it would hold; `None` = not limited.
    pub capacity_bytes: Option<u64>,
}

impl NewDrive {
    /// Parses `rate=7.1GB/s,latency=80us,fixed=10us,name=usb4,capacity=2TB`; only the rate is needed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wanted = "such as rate=7.1GB/s,latency=80us,fixed=0us,name=usb4,capacity=2TB";
        let (mut rate, mut name, mut capacity_bytes, mut fixed_ns, mut latency_ns) = (None, None, None, None, None);
        for item in text.split(',') {
            let Some((key, value)) = item.split_once('=').map(|(k, v)| (k.trim(), v.trim())) else {
                return Err(format!("`{item}` is not `key=value`, {wanted}"));
            };
            let twice = match key {
                "rate" => rate.replace(parse_rate(value)?).is_some(),
                "latency" => latency_ns.replace(parse_duration_ns(value)?).is_some(),
                "fixed" => fixed_ns.replace(parse_duration_ns(value)?).is_some(),
                "capacity" => capacity_bytes.replace(parse_bytes(value)?).is_some(),
                "name" if value.is_empty() => return Err("a name must not be empty".into()),
                "name" => name.replace(value.to_string()).is_some(),
                _ => return Err(format!("`{key}` is not known; a new drive is {wanted}")),
            };
            if twice {
                return Err(format!("`{key}` is given twice"));
            }
        }
        let bytes_per_s = rate.filter(|r| *r > 0).ok_or(format!("a new drive needs a rate above 0, {wanted}"))? as f64;
        let (fixed_ns, latency_ns) = (fixed_ns.unwrap_or(0), latency_ns.unwrap_or(0));
        let rate = DriveRate { bytes_per_s, fixed_ns: fixed_ns.saturating_add(latency_ns) };
        Ok(Self { name, rate, fixed_ns, latency_ns, capacity_bytes })
    }

    /// For a simulation, as `name`.
    pub fn device(&self, name: &str) -> Device {
        Device::exact(name, self.rate.bytes_per_s, self.fixed_ns, self.latency_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::profile::Joint;

    #[test]
    fn a_new_drive_is_what_its_words_say() {
        let d = NewDrive::parse("rate=7.1GB/s, latency=80us,name=x,capacity=2TB").unwrap();
        assert_eq!((d.rate.bytes_per_s, d.rate.fixed_ns, d.fixed_ns, d.latency_ns), (7.1e9, 80_000, 0, 80_000));
        assert_eq!((d.name.as_deref(), d.capacity_bytes), (Some("x"), Some(2_000_000_000_000)));
        for bad in ["", "rate", "rate=0B/s", "latency=5us", "rate=NaN", "rate=inf", "rate=-1GB/s", "rate=1GB/s,x=1"] {
            assert!(NewDrive::parse(bad).is_err(), "{bad}");
        }
        assert!(NewDrive::parse("rate=1GB/s,rate=2GB/s").unwrap_err().contains("twice"));
    }

    /// A profile of drives with these rates alone and together, one group of the first two.
    fn profile(solo: [f64; 3], joint: [f64; 3], group: [f64; 2]) -> Profile {
        use crate::drive::profile::{BarrierShape, Method, PROFILE_VERSION, Point, Quantile};
        let barrier = BarrierShape { width: 4, steps: 9, p50_ns: 5, p99_ns: 6, bytes_per_s: 1.0 };
        let names: Vec<String> = ["a", "b", "c"].map(String::from).to_vec();
        let drive = |at: usize| DriveModel {
            name: names[at].clone(),
            path: "/x".into(),
            device: String::new(),
            serials: vec![],
            emulated: false,
            alignment_bytes: 512,
            rate_bytes_per_s: joint[at],
            solo_rate_bytes_per_s: solo[at],
            fixed_ns: 1000,
            latency_ns: 500,
            p99_ns: 9,
            service: vec![Quantile { q: 0.0, ns: 5 }, Quantile { q: 1.0, ns: 5 }],
            depth: 4,
            points: vec![Point { bytes: 1, depth: 1, reads: 1, bytes_per_s: 1.0, p50_ns: 1, p99_ns: 1 }],
            barrier,
            sustained: None,
        };
        let made = |name: &str, members: &[String], rates: &[f64]| Joint {
            name: name.into(),
            members: members.to_vec(),
            bytes_per_s: rates.iter().sum(),
            member_bytes_per_s: rates.to_vec(),
            barrier,
        };
        Profile {
            version: PROFILE_VERSION,
            method: Method {
                made: String::new(),
                argodrive: String::new(),
                kernel: String::new(),
                virtualised: None,
                engine: String::new(),
                direct: true,
                block_bytes: 1_000_000,
                width: 4,
                file_age_s: None,
            },
            emulated: false,
            drives: (0..3).map(drive).collect(),
            groups: vec![made("hub", &names[..2], &group)],
            together: made("all drives", &names, &joint),
            guards: vec![],
        }
    }

    #[test]
    fn only_what_is_clearly_slower_together_is_an_uplink() {
        // reads of 1 MB that cost 1 us and are transferred at 1 GB/s come at 0.999 GB/s
        let fixed = |transfer: f64| 1e6 / (1e6 / transfer + 1e-6);
        let free = profile([1e9; 3], [0.99e9; 3], [fixed(1e9); 2]);
        let (devices, uplinks) = of_profile(&free, &free.models(&["c", "a"]).unwrap());
        assert!(uplinks.is_empty(), "{uplinks:?}");
        assert_eq!((devices[1].name.as_str(), devices[1].bytes_per_s), ("a", 0.99e9));
        let hub = profile([1e9; 3], [0.5e9, 0.5e9, 1e9], [fixed(0.5e9); 2]);
        let (devices, uplinks) = of_profile(&hub, &hub.models(&["a", "b", "c"]).unwrap());
        assert_eq!((uplinks.len(), &uplinks[0].members), (1, &vec![0, 1]));
        assert!((uplinks[0].bytes_per_s / 1e9 - 1.0).abs() < 1e-6, "{uplinks:?}");
        assert_eq!((devices[0].bytes_per_s, devices[2].bytes_per_s, devices[0].bound.bytes_per_s), (1e9, 1e9, 0.5e9));
        let (devices, uplinks) = of_profile(&hub, &hub.models(&["a", "c"]).unwrap());
        assert!(uplinks.is_empty() && devices[0].bytes_per_s == 1e9, "one member alone shares nothing");
        let all = profile([1e9; 3], [0.5e9; 3], [fixed(1e9); 2]);
        let (_, uplinks) = of_profile(&all, &all.models(&["a", "b", "c"]).unwrap());
        assert_eq!((uplinks.len(), uplinks[0].bytes_per_s), (1, 1.5e9));
    }
}
