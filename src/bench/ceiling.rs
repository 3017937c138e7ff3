//! The ceiling of drives: each alone, each shared uplink, all together; a sweep over depths, barriers, and, if asked for,
//! rate over a long time. Ends in a profile with its guards. Prints nothing; never adds rates of drives that were measured
//! at different times.

use super::ceiling_files::{FilesError, Source, prepare, residency_sample};
use super::ceiling_fit::{self, Estimate, FitError, Series, deal, estimate, joint_rate};
use super::ceiling_load::{Load, LoadDrive, LoadError, Share};
use super::ceiling_sustain::sustained;
use super::environment;
use super::evidence_reader::{MAX_OVERRUN_SHARE, MAX_PACE_ERROR};
use super::guards::{Guard, GuardVerdict, ReadFacts, Watch};
use super::record::utc_now;
use super::seen::ResidencySample;
use crate::clock::Clock;
use crate::drive::device::identity_of;
use crate::drive::profile::{BarrierShape, DriveModel, Joint, Method, PROFILE_VERSION, Profile, Proof, Sustained};
use crate::drive::spec::DriveSpec;
use crate::io::paced::PacedDrive;
use crate::io::paced_link::paced_drives;
use crate::io::{EngineKind, IoSetupError, MAX_QUEUE_DEPTH};
use std::time::Duration;

/// Most windows of a sustained measurement.
const MAX_WINDOWS: u64 = 2400;
/// Shortest window of one.
const LEAST_WINDOW: Duration = Duration::from_millis(100);
/// The second size of a sweep is this part of the block.
const SMALLER: u64 = 4;
/// Most reads in a barrier.
const MAX_WIDTH: u32 = 4096;

/// Why a ceiling could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum CeilingError {
    /// Something asked for cannot be.
    #[error("{0}")]
    Option(String),
    /// Test files.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// Reading.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The numbers explain nothing.
    #[error("drive `{drive}`: {source}")]
    Fit {
        /// The drive.
        drive: String,
        /// Why.
        source: FitError,
    },
    /// The pace of an emulated drive.
    #[error(transparent)]
    Pace(#[from] IoSetupError),
}

/// Drives that share something on the way to memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedLink {
    /// What they share.
    pub name: String,
    /// Indices of the drives.
    pub members: Vec<usize>,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct CeilingSpec<'a> {
    /// The drives.
    pub drives: &'a [DriveSpec],
    /// Hashed serial numbers behind each.
    pub serials: Vec<Vec<String>>,
    /// Shared uplinks with two drives or more.
    pub links: Vec<SharedLink>,
    /// Bytes of a read, the size of one expert.
    pub bytes: u64,
    /// Reads in a barrier.
    pub width: u32,
    /// Depths of the sweep.
    pub depths: Vec<u32>,
    /// Time for each point.
    pub time: Duration,
    /// How reads are carried out.
    pub engine: EngineKind,
    /// Past the page cache.
    pub direct: bool,
    /// Which files.
    pub source: Source,
    /// How long to read at the end, all drives together.
    pub sustain: Option<Duration>,
}

/// Where a measurement is.
#[derive(Clone, Debug, PartialEq)]
pub enum Stage {
    /// Bytes of test files written, and of all.
    Writing(u64, u64),
    /// A point begins: what, and which of how many.
    Point(String, usize, usize),
    /// Sustained reading, so far and in all.
    Sustaining(Duration, Duration),
}

/// Rates over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Curves {
    /// Length of a window.
    pub window_s: f64,
    /// Bytes by window, for each drive.
    pub drives: Vec<Vec<u64>>,
    /// What they delivered together, as one series.
    pub together: Option<Sustained>,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Ceiling {
    /// The profile; unsound if `rejected` is not empty.
    pub profile: Profile,
    /// Why it does not count.
    pub rejected: Vec<String>,
    /// Rates over time, if they were asked for.
    pub curves: Option<Curves>,
    /// Reads in all.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
}

impl CeilingSpec<'_> {
    fn check(&self) -> Result<(), CeilingError> {
        let no = |what: String| Err(CeilingError::Option(what));
        if self.drives.is_empty() {
            return no("no drives".into());
        }
        if self.bytes < 2 * SMALLER * 512 || u32::try_from(self.bytes).is_err() {
            return no(format!("--bytes {} is not within 4 KiB and 4 GiB", self.bytes));
        }
        if !(1..=MAX_WIDTH).contains(&self.width) {
            return no(format!("--width {} is not within 1 to {MAX_WIDTH}", self.width));
        }
        if let Some(bad) = self.depths.iter().find(|d| !(1..=MAX_QUEUE_DEPTH).contains(*d)) {
            return no(format!("--depths: {bad} is not within 1 to {MAX_QUEUE_DEPTH}"));
        }
        if !self.depths.contains(&1) || self.depths.len() < 2 {
            return no("--depths: a sweep needs depth 1, for the latency, and a deeper one, for the rate".into());
        }
        if self.time.is_zero() || self.sustain.is_some_and(|s| s < LEAST_WINDOW * 20) {
            return no("--duration must be above 0, and --sustain at least 2s".into());
        }
        if self.direct && !self.engine.can_be_direct() {
            let engine = self.engine;
            return no(format!("engine {engine} reads through the page cache: add --buffered, or use --engine psync"));
        }
        Ok(())
    }

    fn places(&self) -> usize {
        let each = self.depths.len() + 3;
        self.drives.len() * each + 2 * self.links.len() + if self.drives.len() > 1 { 2 } else { 0 }
    }
}

/// Measures. `stop` is asked all the time; `progress` sees where it is.
pub fn measure(
    spec: &CeilingSpec<'_>,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(Stage),
) -> Result<Ceiling, CeilingError> {
    spec.check()?;
    let clock = Clock::start();
    let mut wrote = |done, all| progress(Stage::Writing(done, all));
    let files = prepare(spec.drives, &spec.source, spec.engine, spec.direct, stop, &mut wrote)?;
    let sample = residency_sample(&files).ok();
    let alignments: Vec<Option<u32>> = files.iter().map(|f| f.alignment).collect();
    let widest = alignments.iter().flatten().copied().max().unwrap_or(1);
    let block = spec.bytes.next_multiple_of(u64::from(widest));
    let small = (block / SMALLER).next_multiple_of(u64::from(widest));
    if small >= block {
        let text = format!("--bytes {} must be more than the {widest} bytes to which reads are aligned", spec.bytes);
        return Err(CeilingError::Option(text));
    }
    let mut drives = Vec::with_capacity(spec.drives.len());
    let asked: Vec<_> = spec.drives.iter().map(|d| (d.name.as_str(), d.emulate)).collect();
    for ((drive, pace), files) in spec.drives.iter().zip(paced_drives(&asked)?).zip(files) {
        drives.push(LoadDrive::new(&drive.name, files, pace));
    }
    let before = sample.as_ref().and_then(ResidencySample::measure);
    let watch = Watch::start(spec.drives);
    let mut run = Run { spec, load: Load::new(drives, spec.engine, clock, stop), progress, block, small, at: 0 };
    let (mut models, estimates) = run.alone(&alignments)?;
    let mut groups = Vec::new();
    for link in &spec.links {
        groups.push(run.joint(&link.name, &link.members, &estimates, &models)?.0);
    }
    let all: Vec<usize> = (0..models.len()).collect();
    let together = if let [only] = &models[..] {
        let rate = only.points.iter().filter(|p| p.bytes == block).map(|p| p.bytes_per_s).fold(0.0, f64::max);
        let members = vec![only.name.clone()];
        let (name, barrier) = ("all drives".into(), only.barrier);
        Joint { name, members, bytes_per_s: rate, member_bytes_per_s: vec![rate], barrier }
    } else {
        let (joint, ns_per_read) = run.joint("all drives", &all, &estimates, &models)?;
        for ((model, found), ns) in models.iter_mut().zip(&estimates).zip(ns_per_read) {
            model.rate_bytes_per_s = joint_rate(block, ns, found.fixed_ns, found.rate_bytes_per_s);
        }
        joint
    };
    let curves = run.sustain(&mut models)?;
    let Run { load, .. } = run;
    let after = sample.as_ref().and_then(ResidencySample::measure);
    let emulated = spec.drives.iter().all(|d| d.emulate.is_some());
    let direct = alignments.iter().all(Option::is_some);
    let facts = ReadFacts {
        read_bytes: load.read_bytes,
        direct,
        residency: before.zip(after),
        youngest_file_s: sample.as_ref().and_then(|s| s.youngest_file_s),
    };
    let mut guards = watch.finish_reads(&facts, emulated);
    guards.push(engine_guard(&load, spec.engine));
    guards.extend(load.drives().iter().zip(spec.drives).filter_map(|(l, d)| pace_guard(&d.name, l.pace.as_deref()?)));
    let tripped = guards.iter().filter(|g| g.verdict == GuardVerdict::Tripped);
    let rejected = tripped.map(|g| format!("{}: {}", g.name, g.seen)).collect();
    let host = environment::read();
    let method = Method {
        made: utc_now(),
        argodrive: host.argodrive,
        kernel: host.kernel,
        virtualised: host.virtualised,
        engine: spec.engine.name().into(),
        direct,
        block_bytes: block,
        width: spec.width,
        file_age_s: facts.youngest_file_s,
    };
    let profile = Profile {
        version: PROFILE_VERSION,
        method,
        emulated: models.iter().any(|m| m.emulated),
        drives: models,
        groups,
        together,
        guards: guards.iter().map(proof).collect(),
    };
    Ok(Ceiling { profile, rejected, curves, reads: load.reads, read_bytes: load.read_bytes })
}

struct Run<'a, 'b> {
    spec: &'a CeilingSpec<'a>,
    load: Load<'a>,
    progress: &'b mut dyn FnMut(Stage),
    block: u64,
    small: u64,
    at: usize,
}

impl Run<'_, '_> {
    fn point(&mut self, what: String) {
        self.at += 1;
        (self.progress)(Stage::Point(what, self.at, self.spec.places()));
    }

    fn fit<T>(&self, drive: usize, result: Result<T, FitError>) -> Result<T, CeilingError> {
        result.map_err(|source| CeilingError::Fit { drive: self.spec.drives[drive].name.clone(), source })
    }

    /// Each drive alone: sweep, fit, barriers.
    fn alone(&mut self, alignments: &[Option<u32>]) -> Result<(Vec<DriveModel>, Vec<Estimate>), CeilingError> {
        let (mut models, mut estimates) = (Vec::new(), Vec::new());
        let deepest = self.spec.depths.iter().copied().max().unwrap_or(1);
        for (index, drive) in self.spec.drives.iter().enumerate() {
            let mut series: Vec<Series> = Vec::new();
            let sweep = self.spec.depths.iter().map(|&d| (self.block, d));
            let points: Vec<(u64, u32)> = sweep.chain([(self.small, 1), (self.small, deepest)]).collect();
            for (bytes, depth) in points {
                self.point(format!("{}: {bytes} bytes, {depth} in flight", drive.name));
                let share = Share { drive: index, depth, count: 0 };
                series.extend(self.load.steady(&[share], bytes, self.spec.time)?);
            }
            let found = self.fit(index, estimate(&series))?;
            self.point(format!("{}: barriers of {} reads", drive.name, self.spec.width));
            let share = Share { drive: index, depth: found.depth, count: self.spec.width };
            let times = self.load.barriers(&[share], self.block, self.spec.time)?;
            let barrier = self.barrier(index, &times)?;
            models.push(DriveModel {
                name: drive.name.clone(),
                path: drive.path.clone(),
                device: identity_of(&drive.path),
                serials: self.spec.serials.get(index).cloned().unwrap_or_default(),
                emulated: drive.emulate.is_some(),
                alignment_bytes: alignments[index].unwrap_or(0),
                rate_bytes_per_s: found.rate_bytes_per_s,
                solo_rate_bytes_per_s: found.rate_bytes_per_s,
                fixed_ns: found.fixed_ns.round() as u64,
                latency_ns: found.latency_ns.round() as u64,
                p99_ns: found.p99_ns,
                service: found.service.clone(),
                depth: found.depth,
                points: found.points.clone(),
                barrier,
                sustained: None,
            });
            estimates.push(found);
        }
        Ok((models, estimates))
    }

    fn barrier(&self, drive: usize, times: &[f64]) -> Result<BarrierShape, CeilingError> {
        self.fit(drive, ceiling_fit::barrier(self.spec.width, self.block, times))
    }

    /// Several drives at the same time; also the time per read of each meanwhile.
    fn joint(
        &mut self,
        name: &str,
        members: &[usize],
        estimates: &[Estimate],
        models: &[DriveModel],
    ) -> Result<(Joint, Vec<f64>), CeilingError> {
        self.point(format!("{name}: {} drives at once", members.len()));
        let share = |count: u32, &drive: &usize| Share { drive, depth: estimates[drive].depth, count };
        let shares: Vec<Share> = members.iter().map(|d| share(0, d)).collect();
        let series = self.load.steady(&shares, self.block, self.spec.time)?;
        let mut ns_per_read = Vec::with_capacity(members.len());
        for (&drive, series) in members.iter().zip(&series) {
            ns_per_read.push(self.fit(drive, series.ns_per_read())?);
        }
        self.point(format!("{name}: barriers of {} reads", self.spec.width));
        let counts = deal(self.spec.width, &ns_per_read);
        let shares: Vec<Share> = members.iter().zip(counts).map(|(d, n)| share(n, d)).filter(|s| s.count > 0).collect();
        let times = self.load.barriers(&shares, self.block, self.spec.time)?;
        let barrier = self.barrier(members[0], &times)?;
        let member_bytes_per_s = ns_per_read.iter().map(|ns| self.block as f64 * 1e9 / ns).collect();
        let joint = Joint {
            name: name.into(),
            members: members.iter().map(|&d| models[d].name.clone()).collect(),
            bytes_per_s: at_once(&series),
            member_bytes_per_s,
            barrier,
        };
        Ok((joint, ns_per_read))
    }

    /// All drives together for long.
    fn sustain(&mut self, models: &mut [DriveModel]) -> Result<Option<Curves>, CeilingError> {
        let Some(time) = self.spec.sustain else { return Ok(None) };
        let window = LEAST_WINDOW.max(time / u32::try_from(MAX_WINDOWS).unwrap_or(u32::MAX));
        let shares: Vec<Share> =
            models.iter().enumerate().map(|(drive, m)| Share { drive, depth: m.depth, count: 0 }).collect();
        let progress = &mut *self.progress;
        progress(Stage::Sustaining(Duration::ZERO, time));
        let mut seen = |so_far| progress(Stage::Sustaining(so_far, time));
        let drives = self.load.windows(&shares, self.block, time, window, &mut seen)?;
        let window_s = window.as_secs_f64();
        for (model, curve) in models.iter_mut().zip(&drives) {
            model.sustained = sustained(window_s, curve);
        }
        let count = drives.iter().map(Vec::len).max().unwrap_or(0);
        let sum = |i: usize| drives.iter().filter_map(|d| d.get(i)).sum::<u64>();
        let together = sustained(window_s, &(0..count).map(sum).collect::<Vec<u64>>());
        // rest helps the drive that throttles, not all of them
        let together = together.map(|t| Sustained { duty: None, ..t });
        Ok(Some(Curves { window_s, drives, together }))
    }
}

/// Bytes per second of several series in the time in which all of them were at work.
fn at_once(series: &[Series]) -> f64 {
    let ends = |s: &Series| {
        let mut ends: Vec<u64> = s.reads.iter().map(|r| r.1).collect();
        ends.sort_unstable();
        ends
    };
    let ends: Vec<Vec<u64>> = series.iter().map(ends).collect();
    let ramp = |(s, e): (&Series, &Vec<u64>)| e.get((s.depth as usize).min(e.len() / 4)).copied();
    let from = series.iter().zip(&ends).filter_map(ramp).max().unwrap_or(0);
    let to = ends.iter().filter_map(|e| e.last().copied()).min().unwrap_or(0);
    if to <= from {
        return 0.0;
    }
    // a read that ends in the window brought part of its bytes before it, and the one at its end part of its own within
    let within =
        |(s, e): (&Series, &Vec<u64>)| e.iter().filter(|&&t| t > from && t <= to).count() as f64 * s.bytes as f64;
    series.iter().zip(&ends).map(within).sum::<f64>() * 1e9 / (to - from) as f64
}

fn proof(guard: &Guard) -> Proof {
    let verdict = match guard.verdict {
        GuardVerdict::Held => "held",
        GuardVerdict::Tripped => "tripped",
        GuardVerdict::Unverified => "unverified",
    };
    Proof { name: guard.name.clone(), seen: guard.seen.clone(), verdict: verdict.into() }
}

/// Every read was carried out by the engine that was asked for.
fn engine_guard(load: &Load<'_>, engine: EngineKind) -> Guard {
    let verdict = if load.reads_by_engine == load.reads { GuardVerdict::Held } else { GuardVerdict::Tripped };
    let seen = format!("{} of {} reads finished by {engine}", load.reads_by_engine, load.reads);
    Guard { name: "engine".into(), seen, verdict }
}

/// An emulated drive kept its pace.
fn pace_guard(name: &str, pace: &PacedDrive) -> Option<Guard> {
    let p = pace.snapshot();
    let (error, over) = (p.error_p50(), p.overrun_share());
    let kept = error <= MAX_PACE_ERROR && over <= MAX_OVERRUN_SHARE;
    let seen = format!(
        "median error {:.2} % (limit {:.0} %), {:.2} % of {} reads outlasted their deadline (limit {:.0} %){}",
        error * 100.0,
        MAX_PACE_ERROR * 100.0,
        over * 100.0,
        p.reads,
        MAX_OVERRUN_SHARE * 100.0,
        if kept { "" } else { "; the disk behind is too slow, or this machine too busy, for this pace" }
    );
    let verdict = if kept { GuardVerdict::Held } else { GuardVerdict::Tripped };
    Some(Guard { name: format!("pace of {name}"), seen, verdict })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(depth: u32, gap: u64, from: u64, count: u64) -> Series {
        Series { bytes: 1000, depth, reads: (0..count).map(|i| (from + i * gap, from + (i + 1) * gap)).collect() }
    }

    #[test]
    fn joint_rates_count_only_the_time_in_which_all_work() {
        // a reads 1000 bytes each 10 ns; b the same each 20 ns, and begins later
        let (a, b) = (series(1, 10, 0, 200), series(1, 20, 1000, 50));
        let rate = at_once(&[a, b]);
        assert!((rate / 150e9 - 1.0).abs() < 0.02, "{rate}");
        assert_eq!(at_once(&[series(1, 10, 0, 5), series(1, 10, 10_000, 5)]), 0.0, "never at once");
    }

    #[test]
    fn what_cannot_be_measured_is_refused_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let drives = [DriveSpec { name: "a".into(), path: dir.path().into(), emulate: None, faults: Vec::new() }];
        let good = CeilingSpec {
            drives: &drives,
            serials: vec![],
            links: vec![],
            bytes: 1 << 20,
            width: 8,
            depths: vec![1, 8],
            time: Duration::from_secs(1),
            engine: EngineKind::Psync,
            direct: true,
            source: Source::Written { bytes: 1 << 30, keep: false },
            sustain: None,
        };
        assert!(good.check().is_ok());
        let refuse = |change: &dyn Fn(&mut CeilingSpec<'_>), says: &str| {
            let mut bad = good.clone();
            change(&mut bad);
            let message = measure(&bad, &|| false, &mut |_| {}).unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        };
        refuse(&|s| s.bytes = 0, "--bytes 0");
        refuse(&|s| s.bytes = 5 << 32, "--bytes");
        refuse(&|s| s.width = 0, "--width 0");
        refuse(&|s| s.depths = vec![1, 0], "--depths: 0");
        refuse(&|s| s.depths = vec![1, 1000], "--depths: 1000");
        refuse(&|s| s.depths = vec![2, 4], "needs depth 1");
        refuse(&|s| s.time = Duration::ZERO, "--duration");
        refuse(&|s| s.sustain = Some(Duration::from_millis(5)), "--sustain");
        refuse(&|s| s.engine = EngineKind::Mmap, "--buffered");
        refuse(&|s| s.drives = &[], "no drives");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
