//! A trace simulated on another layout: trace, plan and what is known of the drives become simulations with several seeds,
//! and those a record; beside a measured trace of the same text if there is one. Measures nothing itself.

use super::simulate_drives::{DriveRow, Drives, DrivesError, Known, drives};
use crate::drive::spec::DriveSpec;
use crate::ids::{ExpertId, LayerId};
use crate::layout::plan::{Plan, PlanError};
use crate::reader::predict::table_file;
use crate::reader::{CachePolicy, PrefetchPolicy, ReaderError, ReaderOptions, heat_file};
use crate::replay::ReplayError;
use crate::replay::simulate::summary::{Measured, PhaseFigures, Prediction, measure, predict};
use crate::replay::simulate::{Run, Setup, run as run_once};
use crate::replay::workload::Workload;
use crate::trace::log::{self, TraceError, TraceHeader};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Reads are aligned to this where neither profile nor trace says.
const USUAL_ALIGNMENT: u32 = 4096;
/// Alignments that a whole read of a trace can show.
const ALIGNMENTS: [u32; 5] = [1, 512, 4096, 16_384, 65_536];

/// What to simulate.
pub struct SimulateSpec<'a> {
    /// The recorded trace.
    pub trace: &'a Path,
    /// The layout.
    pub plan: &'a Plan,
    /// What is known of drives.
    pub known: &'a Known,
    /// The profile file, for the record.
    pub profile: Option<&'a Path>,
    /// Where the plan's drives are now, if somebody said.
    pub mounts: Option<&'a [DriveSpec]>,
    /// How experts are read.
    pub options: &'a ReaderOptions,
    /// First seed.
    pub seed: u64,
    /// Simulations, each with a seed of its own.
    pub repeats: u32,
    /// Leave out rows with faults.
    pub lenient: bool,
}

/// It failed.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The trace, the plan or the drives.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The drives.
    #[error(transparent)]
    Drives(#[from] DrivesError),
    /// A file that the reader's options name.
    #[error(transparent)]
    Reader(#[from] ReaderError),
    /// A layout with one more drive.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Something does not fit.
    #[error("{0}")]
    Input(String),
}

/// Predicted against measured: (predicted / measured) - 1.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseError {
    /// Which barriers.
    pub phase: &'static str,
    /// Of the median.
    pub p50: f64,
    /// Of the mean.
    pub mean: f64,
    /// Of the 95th percentile.
    pub p95: f64,
}

/// A measured run of the simulated layout, and how far off the simulation is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The measured trace.
    pub trace: PathBuf,
    /// Its drives were emulated.
    pub emulated: bool,
    /// Its figures.
    pub measured: Measured,
    /// By phase; all barriers last.
    pub errors: Vec<PhaseError>,
    /// Of tok/s.
    pub tok_s_error: Option<f64>,
    /// Of the bytes of each drive; `None` where the measured run read nothing from it.
    pub drive_bytes_errors: Vec<(String, Option<f64>)>,
}

/// What a simulation gave.
#[derive(Clone, Debug, Serialize)]
pub struct SimulationRecord {
    /// The recorded trace.
    pub trace: PathBuf,
    /// The plan simulated.
    pub plan_hash: String,
    /// Policy that made the plan.
    pub planner: String,
    /// Rates were measured on emulated drives: no figure is a speed of hardware.
    pub emulated: bool,
    /// Where rates come from.
    pub rates_from: &'static str,
    /// The profile, if there is one.
    pub profile: Option<PathBuf>,
    /// First seed, and simulations.
    pub seed: u64,
    /// See `seed`.
    pub repeats: u32,
    /// Barriers.
    pub barriers: usize,
    /// The drives.
    pub drives: Vec<DriveRow>,
    /// Groups of drives behind a shared uplink, with their joint bytes per second.
    pub uplinks: Vec<(Vec<String>, f64)>,
    /// The trace as recorded.
    pub recorded: Measured,
    /// The layout as simulated. Intervals hold 95 % of draws.
    pub simulated: Prediction,
    /// A measured run of the layout.
    pub compare: Option<Comparison>,
    /// What had to be assumed.
    pub assumptions: Vec<String>,
}

/// A trace, and drives to simulate it on: what all simulations of one command share.
pub struct Loaded {
    /// Of the trace.
    pub header: TraceHeader,
    /// Its barriers.
    pub work: Workload,
    /// The drives of the plan.
    pub drives: Drives,
    /// Alignment of reads.
    pub alignment_bytes: u32,
    /// What had to be assumed.
    pub assumptions: Vec<String>,
}

/// Reads the trace of `spec`, and works out its drives.
pub fn load(spec: &SimulateSpec<'_>) -> Result<Loaded, SimulateError> {
    let header = log::read_header(spec.trace)?;
    if let (Some(ran), planned) = (&header.model_id, &spec.plan.model_id)
        && ran != planned
    {
        let text = format!("the trace is of model {ran}, the plan of {planned}; give a plan of the same model");
        return Err(SimulateError::Input(text));
    }
    let work = Workload::load(spec.trace, &header, spec.lenient)?;
    let names: Vec<String> = spec.plan.drives.iter().map(|d| d.name.clone()).collect();
    let drives = drives(&names, spec.known, spec.mounts, spec.trace, &header, &work, spec.lenient)?;
    let mut assumptions = work.assumptions.clone();
    assumptions.extend(drives.remarks.iter().cloned());
    let alignment_bytes = drives.alignment_bytes.or_else(|| {
        let whole = |a: &&u32| spec.plan.expert_bytes.next_multiple_of(u64::from(**a));
        ALIGNMENTS.iter().find(|a| work.read_bytes == Some(whole(a))).copied()
    });
    if alignment_bytes.is_none() {
        assumptions.push(format!("reads are aligned to {USUAL_ALIGNMENT} bytes: neither profile nor trace says"));
    }
    if !header.faults.is_empty() {
        let faults = header.faults.join("; ");
        assumptions.push(format!("INJECTED FAULTS in the recorded run ({faults}); simulated drives have none"));
    }
    assumptions.push("compute takes as long as recorded; failed reads and hedges are not simulated".into());
    let alignment_bytes = alignment_bytes.unwrap_or(USUAL_ALIGNMENT);
    Ok(Loaded { header, work, drives, alignment_bytes, assumptions })
}

/// A setup of `plan` on `drives`.
pub fn setup<'p>(
    plan: &'p Plan,
    drives: &Drives,
    alignment_bytes: u32,
    options: &ReaderOptions,
) -> Result<Setup<'p>, SimulateError> {
    let table = match (options.prefetch, &options.prefetch_table) {
        (PrefetchPolicy::Markov, Some(path)) => Some(table_file::read(path).map_err(ReaderError::from)?),
        _ => None,
    };
    let heat = match (options.cache_policy, &options.cache_heat) {
        (CachePolicy::Pinned, Some(path)) => heat_file::load(path, plan)?,
        _ => Vec::new(),
    };
    let (devices, uplinks, episodes) = (drives.devices.clone(), drives.uplinks.clone(), drives.episodes.clone());
    Ok(Setup { plan, devices, uplinks, episodes, options: options.clone(), alignment_bytes, table, heat })
}

/// Simulates `setup` with `repeats` seeds; bounds with the first.
pub fn runs(work: &Workload, setup: &Setup<'_>, seed: u64, repeats: u32) -> Result<Vec<Run>, SimulateError> {
    let one = |n: u32| run_once(work, setup, seed.wrapping_add(u64::from(n)), n == 0).map_err(SimulateError::from);
    (0..repeats.max(1)).map(one).collect()
}

/// Simulates the trace of `spec` on its plan; `compare` is a measured trace of that plan.
pub fn simulate(
    spec: &SimulateSpec<'_>,
    loaded: &Loaded,
    compare: Option<&Path>,
) -> Result<SimulationRecord, SimulateError> {
    let Loaded { work, drives, .. } = loaded;
    let setup = setup(spec.plan, drives, loaded.alignment_bytes, spec.options)?;
    // a wrong trace must not cost a simulation
    let measured = compare.map(|path| load_measured(path, spec, work)).transpose()?;
    let all = runs(work, &setup, spec.seed, spec.repeats)?;
    let simulated = predict(work, &setup, &all, spec.seed)
        .ok_or_else(|| SimulateError::Input("there is nothing to simulate".into()))?;
    let names = |members: &[usize]| members.iter().map(|&d| drives.devices[d].name.clone()).collect();
    Ok(SimulationRecord {
        trace: spec.trace.to_path_buf(),
        plan_hash: spec.plan.hash()?,
        planner: spec.plan.planner.clone(),
        emulated: work.emulated || drives.rows.iter().any(|r| r.emulated),
        rates_from: spec.known.words(),
        profile: spec.profile.map(Path::to_path_buf),
        seed: spec.seed,
        repeats: spec.repeats,
        barriers: work.barriers.len(),
        drives: drives.rows.clone(),
        uplinks: drives.uplinks.iter().map(|u| (names(&u.members), u.bytes_per_s)).collect(),
        recorded: measure(work, spec.seed),
        compare: measured.map(|(path, other)| comparison(path, &other, &simulated, spec.seed)),
        simulated,
        assumptions: loaded.assumptions.clone(),
    })
}

/// The measured trace, if it is of the same text, and was read under the simulated plan.
fn load_measured<'p>(
    path: &'p Path,
    spec: &SimulateSpec<'_>,
    work: &Workload,
) -> Result<(&'p Path, Workload), SimulateError> {
    let input = |text: String| SimulateError::Input(format!("--compare {}: {text}", path.display()));
    let header = log::read_header(path)?;
    let other = Workload::load(path, &header, spec.lenient)?;
    if let (Some(a), Some(b)) = (&work.model_id, &other.model_id)
        && a != b
    {
        return Err(input(format!("is of model {b}, the simulated trace of {a}")));
    }
    if other.barriers.len() != work.barriers.len() {
        let (have, want) = (other.barriers.len(), work.barriers.len());
        return Err(input(format!("has {have} barriers, the simulated trace {want}: it is of another text")));
    }
    for (a, b) in work.barriers.iter().zip(&other.barriers) {
        if (a.step, a.layer) != (b.step, b.layer) || work.of(a) != other.of(b) {
            return Err(input(format!("barrier {} demands other experts: it is of another text", b.barrier)));
        }
    }
    let places: Vec<Option<usize>> =
        other.drives.iter().map(|name| spec.plan.drives.iter().position(|d| d.name == *name)).collect();
    let mut served: Vec<(&(LayerId, ExpertId), &u64)> = other.served.iter().collect();
    served.sort_unstable();
    for ((layer, expert), mask) in served {
        for (at, place) in places.iter().enumerate().filter(|(at, _)| mask >> at & 1 == 1) {
            let homes = spec.plan.homes(*layer, *expert).unwrap_or(&[]);
            if place.is_none_or(|p| homes.iter().all(|h| h.index() != p)) {
                return Err(input(format!(
                    "expert {} of layer {} came from drive `{}`, where the plan has no copy: it was run under another \
                     plan",
                    expert.0, layer.0, other.drives[at]
                )));
            }
        }
    }
    Ok((path, other))
}

fn comparison(path: &Path, other: &Workload, simulated: &Prediction, seed: u64) -> Comparison {
    let measured = measure(other, seed);
    let off = |predicted: f64, seen: f64| if seen > 0.0 { predicted / seen - 1.0 } else { 0.0 };
    let error = |(a, b): (&PhaseFigures, &PhaseFigures)| PhaseError {
        phase: a.phase,
        p50: off(a.p50_ns.0.estimate, b.p50_ns.0.estimate),
        mean: off(a.mean_ns.0.estimate, b.mean_ns.0.estimate),
        p95: off(a.p95_ns.0.estimate, b.p95_ns.0.estimate),
    };
    let bytes = |name: &String| measured.drive_bytes.iter().find(|d| d.0 == *name).map_or(0, |d| d.1);
    let drives = simulated.drives.iter().map(|d| {
        let seen = bytes(&d.name);
        (d.name.clone(), (seen > 0).then(|| off(d.bytes, seen as f64)))
    });
    Comparison {
        trace: path.to_path_buf(),
        emulated: other.emulated,
        errors: simulated.phases.iter().zip(&measured.phases).map(error).collect(),
        tok_s_error: simulated.tok_s.zip(measured.tok_s).map(|(a, b)| off(a.0.estimate, b.0.estimate)),
        drive_bytes_errors: drives.collect(),
        measured,
    }
}
