//! The ladder: the same prompt decoded on the first 1, 2, ... N drives, each rung planned again for its drives.
//!
//! Protocol: every rung is planned and staged before the first measurement; one run per rung is a warm-up and does not
//! count; then rungs run in balanced order (1 2 3 4 4 3 2 1), and a rung's figures are medians over its runs. A run
//! that is rejected (an emulated pace that was not kept) is kept aside with its reason and repeated, at most
//! [`MAX_RETRIES`] times in all. The tokens of every run must be the same, or the whole ladder is rejected.

use super::config::Asked;
use super::guards::device_key;
use super::planning::{PlanningError, drive_set};
use super::record::{RecordError, RunRecord, write_json};
use super::run::{RunError, RunSpec, run};
use crate::decode::generate::Rates;
use crate::drive::device::identity_of;
use crate::drive::profile::Profile;
use crate::drive::spec::{self, DriveSpec};
use crate::knob::Knob;
use crate::layout::heat::Heat;
use crate::layout::plan::{Plan, PlanDrive, PlanError};
use crate::layout::planner::{self, PlanRequest};
use crate::layout::policy::PolicyFile;
use crate::open::Model;
use crate::replay::verdict::Verdict;
use crate::stage::{self, StageError, StageOptions};
use crate::stats::{self, StatsError};
use crate::store::import::Progress;
use crate::sys::durable::write_atomic;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Rejected runs that are repeated before the ladder gives up.
pub const MAX_RETRIES: usize = 12;
/// Tokens of a warm-up run at most: it only touches every drive once.
const WARM_UP_TOKENS: usize = 8;
/// Seed of the order in which rungs are measured.
const ORDER_SEED: u64 = 0;

/// A ladder failed.
#[derive(Debug, thiserror::Error)]
pub enum LadderError {
    /// A rung could not be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A rung's drives could not be planned for.
    #[error(transparent)]
    Planning(#[from] PlanningError),
    /// A rung could not be staged.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// A run failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The record could not be written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Statistics of nothing.
    #[error(transparent)]
    Stats(#[from] StatsError),
    /// The ladder's options.
    #[error("{0}")]
    Option(String),
    /// The user stopped it.
    #[error("interrupted; {kept} finished runs are in {}", folder.display())]
    Interrupted {
        /// Runs that were finished.
        kept: usize,
        /// Where they are.
        folder: PathBuf,
    },
}

/// What to climb.
pub struct LadderSpec<'a> {
    /// The drives, in the order in which rungs add them.
    pub drives: &'a [DriveSpec],
    /// The layout policy of every rung.
    pub policy: &'a PolicyFile,
    /// What is hot, for policies that place by it.
    pub heat: Option<&'a Heat>,
    /// What the drives do, if it was measured.
    pub profile: Option<&'a Profile>,
    /// Hashes that go into the plans.
    pub inputs: &'a BTreeMap<String, String>,
    /// The configuration of every run; its plan and drives are set by the rung.
    pub asked: &'a Asked,
    /// The prompt's tokens.
    pub prompt: &'a [u32],
    /// Counted runs per rung.
    pub repetitions: usize,
    /// Folder of this ladder's records.
    pub folder: &'a Path,
}

/// What a caller may show while the ladder runs.
pub enum LadderEvent<'a> {
    /// A rung is being staged.
    Staging {
        /// Drives of the rung.
        drives: usize,
        /// How far its copy is.
        progress: Progress,
    },
    /// A run starts.
    RunStarts {
        /// Which, from 0.
        index: usize,
        /// Runs in all.
        total: usize,
        /// Drives of its rung.
        drives: usize,
        /// It does not count.
        warm_up: bool,
    },
    /// A run ended.
    RunEnded(&'a RunRecord),
}

/// One rung's figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rung {
    /// Drives in use, by name.
    pub drives: Vec<String>,
    /// Hash of the rung's plan.
    pub plan: String,
    /// Median of each rate over the rung's runs.
    pub rates: Rates,
    /// Slowest and fastest run, decode tokens per second.
    pub decode_tok_s_range: (f64, f64),
    /// Median decode rate as a share of the top rung's.
    pub share_of_top: f64,
    /// Median decode rate as a multiple of the first rung's.
    pub gain: f64,
    /// Median share of decode time in which compute waited for experts.
    pub io_wait_share: f64,
    /// Median over runs of the mean barrier, nanoseconds.
    pub barrier_mean_ns: u64,
    /// Runs that count.
    pub runs: usize,
    /// Where the time of decoding went, all runs that count together; its `drive` counts `drives` from 0.
    #[serde(default)]
    pub verdict: Option<Verdict>,
}

/// A climbed ladder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LadderRecord {
    /// Format version.
    pub version: u32,
    /// The model.
    pub model_id: String,
    /// The policy of every rung.
    pub policy: String,
    /// Some drive's pace was emulated: no figure is a speed of the hardware.
    pub emulated: bool,
    /// The rungs, fewest drives first.
    pub rungs: Vec<Rung>,
    /// Hash of the tokens that every run generated.
    pub token_hash: String,
    /// Order in which rungs were measured (index into `rungs`), warm-ups left out.
    pub order: Vec<usize>,
    /// Why the ladder does not count, if it does not.
    pub rejected: Vec<String>,
}

/// One rung before it is measured.
struct Planned {
    plan: Plan,
    mounts: Vec<DriveSpec>,
    /// Where the plan is kept beside the records, so that a run can be repeated.
    path: PathBuf,
}

/// What a ladder cannot do without; callers ask before they make a folder for it.
pub fn check_options(repetitions: usize, max_new: usize) -> Result<(), LadderError> {
    if repetitions == 0 {
        return Err(LadderError::Option("--repetitions must be at least 1".into()));
    }
    if max_new < 2 {
        return Err(LadderError::Option("--max-new must be at least 2: a decode rate needs two tokens".into()));
    }
    Ok(())
}

/// Climbs. Returns the record; a rejected ladder has its reasons in it.
pub fn climb(
    model: &Model,
    spec: &LadderSpec<'_>,
    interrupted: &dyn Fn() -> bool,
    on_event: &mut dyn FnMut(LadderEvent<'_>),
) -> Result<LadderRecord, LadderError> {
    check_options(spec.repetitions, spec.asked.config.max_new)?;
    let rungs = plan_and_stage(model, spec, on_event)?;
    let measured = measure(model, spec, &rungs, interrupted, on_event)?;
    summarise(model, spec, &rungs, measured)
}

fn plan_and_stage(
    model: &Model,
    spec: &LadderSpec<'_>,
    on_event: &mut dyn FnMut(LadderEvent<'_>),
) -> Result<Vec<Planned>, LadderError> {
    let catalog = model.catalog();
    let kept = |path: &Path, source| RecordError::Io { path: path.to_path_buf(), source };
    let drives_path = spec.folder.join("drives.toml");
    write_atomic(&drives_path, spec::render(spec.drives).as_bytes()).map_err(|e| kept(&drives_path, e))?;
    let mut rungs = Vec::with_capacity(spec.drives.len());
    for count in 1..=spec.drives.len() {
        let mounts = &spec.drives[..count];
        let drives: Vec<PlanDrive> =
            mounts.iter().map(|d| PlanDrive { name: d.name.clone(), path: d.path.clone() }).collect();
        let mut inputs = spec.inputs.clone();
        inputs.extend(mounts.iter().map(|d| (device_key(&d.name), identity_of(&d.path))));
        let set = drive_set(mounts, spec.profile, spec.policy)?;
        let (policy, heat) = (spec.policy, spec.heat);
        let request = PlanRequest { catalog: &catalog, drives: &drives, policy, heat, set: &set, inputs };
        let plan = planner::plan_with(request)?.plan;
        let path = spec.folder.join(format!("rung{count}.plan.json"));
        write_atomic(&path, plan.to_json()?.as_bytes()).map_err(|e| kept(&path, e))?;
        let paths: Vec<PathBuf> = mounts.iter().map(|d| d.path.clone()).collect();
        let show = &mut |progress| on_event(LadderEvent::Staging { drives: count, progress });
        stage::stage(&plan, &model.folder, &paths, StageOptions::default(), show)?;
        rungs.push(Planned { plan, mounts: mounts.to_vec(), path });
    }
    Ok(rungs)
}

/// Runs by rung, and the runs that were rejected.
struct Measured {
    by_rung: Vec<Vec<RunRecord>>,
    order: Vec<usize>,
    rejected: Vec<String>,
    emulated: bool,
}

fn measure(
    model: &Model,
    spec: &LadderSpec<'_>,
    rungs: &[Planned],
    interrupted: &dyn Fn() -> bool,
    on_event: &mut dyn FnMut(LadderEvent<'_>),
) -> Result<Measured, LadderError> {
    let order = stats::balanced_order(rungs.len(), spec.repetitions, ORDER_SEED);
    let mut queue: Vec<(usize, bool)> = (0..rungs.len()).map(|rung| (rung, true)).collect();
    queue.extend(order.iter().map(|&rung| (rung, false)));
    let mut out = Measured { by_rung: vec![Vec::new(); rungs.len()], order, rejected: Vec::new(), emulated: false };
    // What a ladder is about must be proved on every run; a limit that a rung never reaches must not stop it.
    let under_test = BTreeSet::from([Knob::Layout, Knob::Pace]);
    let mut control: Option<String> = None;
    let (mut next, mut retries, mut kept) = (0, 0, 0);
    while let Some(&(rung, warm_up)) = queue.get(next) {
        let planned = &rungs[rung];
        on_event(LadderEvent::RunStarts { index: next, total: queue.len(), drives: planned.mounts.len(), warm_up });
        let arm = format!("rung{}{}", rung + 1, if warm_up { "-warmup" } else { "" });
        let asked = rung_config(spec, planned, warm_up);
        let result = run(
            model,
            &RunSpec {
                arm: &arm,
                asked: &asked,
                under_test: &under_test,
                streamed: Some((&planned.plan, &planned.mounts)),
                prompt: spec.prompt,
                control: control.as_deref().filter(|_| !warm_up),
            },
            &mut |_| if interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) },
        )?;
        if interrupted() {
            return Err(LadderError::Interrupted { kept, folder: spec.folder.to_path_buf() });
        }
        let record = result.record;
        out.emulated |= record.emulated;
        on_event(LadderEvent::RunEnded(&record));
        let sound = record.rejected.is_empty();
        let kind = if sound { "arms" } else { "rejected" };
        let path = spec.folder.join(kind).join(format!("{next:02}-{arm}")).join("record.json");
        write_json(&path, &record)?;
        next += 1;
        if sound {
            kept += 1;
            if !warm_up {
                control.get_or_insert_with(|| record.token_hash.clone());
                out.by_rung[rung].push(record);
            }
        } else if warm_up {
            // It would not have counted anyway.
        } else if retries < MAX_RETRIES {
            retries += 1;
            // Again at once: its neighbours in the order stay its neighbours.
            queue.insert(next, (rung, false));
        } else {
            let why = record.rejected.join("; ");
            out.rejected
                .push(format!("{MAX_RETRIES} rejected runs were repeated, and {arm} was rejected once more: {why}"));
            break;
        }
    }
    Ok(out)
}

/// The configuration of one run: the ladder's, with the rung's plan.
fn rung_config(spec: &LadderSpec<'_>, planned: &Planned, warm_up: bool) -> Asked {
    let mut asked = spec.asked.clone();
    asked.repeats = None;
    asked.config.plan = Some(planned.path.clone());
    asked.config.drives = Some(spec.folder.join("drives.toml"));
    if warm_up {
        asked.config.max_new = asked.config.max_new.min(WARM_UP_TOKENS);
    }
    asked
}

fn summarise(
    model: &Model,
    spec: &LadderSpec<'_>,
    rungs: &[Planned],
    measured: Measured,
) -> Result<LadderRecord, LadderError> {
    let Measured { by_rung, order, mut rejected, emulated } = measured;
    let token_hash = by_rung.iter().flatten().map(|r| r.token_hash.clone()).next().unwrap_or_default();
    let mut out = Vec::with_capacity(rungs.len());
    for (planned, runs) in rungs.iter().zip(&by_rung) {
        let names: Vec<String> = planned.mounts.iter().map(|d| d.name.clone()).collect();
        if let Some(other) = runs.iter().find(|r| r.token_hash != token_hash) {
            rejected.push(format!(
                "tokens differ: the rung with {} drives generated {}, the first rung {token_hash}; a faster wrong answer is no result",
                names.len(),
                other.token_hash
            ));
        }
        if runs.is_empty() {
            if rejected.is_empty() {
                rejected.push(format!("the rung with {} drives has no accepted run", names.len()));
            }
            continue;
        }
        let median = |value: &dyn Fn(&RunRecord) -> f64| stats::median(&runs.iter().map(value).collect::<Vec<_>>());
        let speeds: Vec<f64> = runs.iter().map(|r| r.rates.decode_tok_s).collect();
        let fold = |start: f64, pick: fn(f64, f64) -> f64| speeds.iter().copied().fold(start, pick);
        out.push(Rung {
            drives: names,
            plan: planned.plan.hash()?,
            rates: Rates {
                ttft_s: median(&|r| r.rates.ttft_s)?,
                prefill_tok_s: median(&|r| r.rates.prefill_tok_s)?,
                decode_tok_s: median(&|r| r.rates.decode_tok_s)?,
                inclusive_tok_s: median(&|r| r.rates.inclusive_tok_s)?,
            },
            decode_tok_s_range: (fold(f64::INFINITY, f64::min), fold(0.0, f64::max)),
            share_of_top: 0.0,
            gain: 0.0,
            io_wait_share: median(&|r| r.io_wait_share)?,
            barrier_mean_ns: median(&|r| r.barrier_mean_ns as f64)? as u64,
            runs: runs.len(),
            verdict: Verdict::of_all(runs.iter().filter_map(|r| r.verdict.as_ref())),
        });
    }
    let first = out.first().map_or(0.0, |r| r.rates.decode_tok_s);
    let top = out.last().map_or(0.0, |r| r.rates.decode_tok_s);
    for rung in &mut out {
        rung.share_of_top = if top > 0.0 { rung.rates.decode_tok_s / top } else { 0.0 };
        rung.gain = if first > 0.0 { rung.rates.decode_tok_s / first } else { 0.0 };
    }
    let record = LadderRecord {
        version: super::record::RECORD_VERSION,
        model_id: model.manifest.model_id.clone(),
        policy: spec.policy.policy.name().to_string(),
        emulated,
        rungs: out,
        token_hash,
        order,
        rejected,
    };
    write_json(&spec.folder.join("ladder.json"), &record)?;
    Ok(record)
}
