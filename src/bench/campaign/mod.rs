//! A campaign: arms measured against a control, one run at a time, in an order that cancels drift. `ab` and `experiment`
//! are campaigns.
//!
//! Protocol: everything that can be wrong is found first; a short warm-up of every arm does not count; then the control runs
//! against itself (the A/A floor), then all arms in balanced order. Every run is written as soon as it is over, so that a
//! campaign that is stopped, killed or out of space goes on where it was. A run that does not count is kept aside and
//! repeated at once; an arm is given up when its tokens are not the control's, when a setting of it fails in the same way
//! twice or [`MAX_TRIES`] times in a row, or when the machine was too busy for it [`MAX_BUSY_TRIES`] times in a row.

pub mod arms;
pub mod design;
pub mod evaluate;
pub mod file;
pub mod order;
pub mod prompts;

use super::config::ConfigError;
use super::evidence::objections;
use super::fits;
use super::guards::{DEVICE_BYTES, GuardVerdict, TOKEN_IDENTITY};
use super::planning::PlanningError;
use super::prompt_set::encode;
use super::record::{RecordError, RunRecord, write_json};
use super::run::{RunError, RunSpec, run};
use crate::knob::Knob;
use crate::layout::plan::PlanError;
use crate::open::OpenError;
use crate::stats::StatsError;
use crate::sys::lock::Held;
use arms::ReadyArm;
use evaluate::{Results, evaluate};
use file::{CampaignFile, State};
use order::{Part, Step};
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::slice;

/// Runs of one step before its arm is given up because its settings do not fire.
pub const MAX_TRIES: usize = 4;
/// The same when it was only that an emulated pace was not kept or that a guard tripped.
pub const MAX_BUSY_TRIES: usize = 12;
/// Tokens of a warm-up at most: it only touches every drive once.
const WARM_UP_TOKENS: usize = 8;
/// Why a campaign ended that was asked to.
pub(super) const INTERRUPTED: &str = "interrupted";
/// Held while a process measures into a folder.
const LOCK_FILE: &str = "measuring.lock";

/// A campaign failed.
#[derive(Debug, thiserror::Error)]
pub enum CampaignError {
    /// What was asked for cannot be measured.
    #[error("{0}")]
    Option(String),
    /// A configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Plans and drives.
    #[error(transparent)]
    Planning(#[from] PlanningError),
    /// A store.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A run failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A record could not be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Statistics.
    #[error(transparent)]
    Stats(#[from] StatsError),
    /// It ended early, and what was finished is there.
    #[error("{why}; {kept} finished runs are in {}: `argodrive experiment resume {}` goes on", folder.display(), folder.display())]
    Kept {
        /// Why it ended.
        why: String,
        /// Runs that are kept.
        kept: usize,
        /// Where.
        folder: PathBuf,
    },
}

/// What a caller may show meanwhile.
pub enum Event<'a> {
    /// An arm warms up.
    WarmUp(&'a str),
    /// A run starts.
    Starts {
        /// Which.
        step: &'a Step,
        /// Runs in all.
        total: usize,
        /// Its arm.
        arm: &'a str,
    },
    /// A run does not count.
    Rejected(&'a RunRecord),
}

/// What was done.
pub struct Measured {
    /// What came of it.
    pub results: Results,
    /// Runs of this session that count.
    pub measured: usize,
    /// Runs that were there already.
    pub reused: usize,
    /// Runs whose inputs have changed since, and that were put aside.
    pub stale: usize,
}

/// One session of a campaign.
struct Session<'a> {
    folder: &'a Path,
    file: &'a mut CampaignFile,
    arms: &'a [ReadyArm],
    /// Tokens of each prompt, or of those of each set.
    prompts: Vec<Vec<Vec<u32>>>,
    interrupted: &'a dyn Fn() -> bool,
    runs: Vec<Option<RunRecord>>,
    measured: usize,
}

/// How a step ended.
enum End {
    Counted,
    GivenUp(String),
}

/// Measures what is missing in `folder`. `file` is what is to be measured; if the folder holds it already, its runs are
/// kept as long as their inputs are the same.
pub fn measure(
    folder: &Path,
    file: &mut CampaignFile,
    arms: &[ReadyArm],
    interrupted: &dyn Fn() -> bool,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<Measured, CampaignError> {
    let _lock = lock(folder)?;
    let prompts = encode_prompts(file, arms)?;
    let stale = put_stale_aside(folder, file)?;
    file.state = State::Running;
    file.results = None;
    file.rejected.clear();
    file.save(folder)?;
    let runs = file.runs(folder)?;
    let reused = runs.iter().flatten().count();
    let mut session = Session { folder, file, arms, prompts, interrupted, runs, measured: 0 };
    let ended = session.all(on_event);
    let Session { runs, measured, .. } = session;
    let kept = runs.iter().flatten().count();
    if let Err(e) = ended {
        file.state = State::Interrupted;
        // If this fails too, the file still says "running", and resuming does the same.
        let _ = file.save(folder);
        return Err(match e {
            CampaignError::Record(e) => CampaignError::Kept { why: e.to_string(), kept, folder: folder.to_path_buf() },
            other => other,
        });
    }
    // From the files, as anybody could: text keeps a number up to its last digit, and figures are drawn from the text.
    let results = evaluate(file, &file.runs(folder)?)?;
    let rejected = results.arms.iter().filter_map(|a| Some((a.name.clone(), a.rejected.clone()?)));
    file.rejected.extend(rejected);
    file.state = if file.arms_as_expected() { State::Complete } else { State::Rejected };
    file.results = Some(results.clone());
    file.save(folder).map_err(|e| CampaignError::Kept { why: e.to_string(), kept, folder: folder.to_path_buf() })?;
    Ok(Measured { results, measured, reused, stale })
}

/// The tokens of every prompt or set, which must fit every arm.
fn encode_prompts(file: &CampaignFile, arms: &[ReadyArm]) -> Result<Vec<Vec<Vec<u32>>>, CampaignError> {
    let mut prompts = Vec::with_capacity(file.prompts.len());
    for prompt in &file.prompts {
        let mut tokens = Vec::new();
        for arm in arms {
            let mut config = arm.asked.config.clone();
            prompt.put(&mut config);
            let named =
                |why: String| CampaignError::Option(format!("arm `{}`: prompt `{}`: {why}", arm.name, prompt.name));
            // what goes with one prompt may not go with a set
            config.check().map_err(|e| named(e.to_string()))?;
            let encoded = encode(&arm.model, &config).map_err(|e| named(e.to_string()))?.tokens;
            let lens: Vec<usize> = encoded.iter().map(Vec::len).collect();
            fits::check_run(&arm.model, &config, &lens).map_err(named)?;
            tokens = encoded;
        }
        prompts.push(tokens);
    }
    Ok(prompts)
}

/// Refuses a second process in the same folder.
pub(super) fn lock(folder: &Path) -> Result<File, CampaignError> {
    let path = folder.join(LOCK_FILE);
    let io = |source| RecordError::Io { path: path.clone(), source };
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(io)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(CampaignError::Option(format!(
            "{}: another argodrive ({}) is measuring into this folder; wait for it to end, or stop it: what it has measured is kept",
            folder.display(),
            Held::by(&file)
        ))),
        Err(TryLockError::Error(source)) => Err(io(source).into()),
    }
}

/// Moves runs whose arm or prompt is no longer what it was to `stale/`, as far as `folder` holds a campaign already.
fn put_stale_aside(folder: &Path, now: &CampaignFile) -> Result<usize, CampaignError> {
    if !folder.join(file::CAMPAIGN_FILE).exists() {
        return Ok(0);
    }
    let then = CampaignFile::load(folder)?;
    if !then.same_order(now) {
        return Err(CampaignError::Option(format!(
            "{}: holds a campaign with other arms, prompts or pairs; start a new one",
            folder.display()
        )));
    }
    let mut moved = 0;
    for step in now.steps() {
        let (arm, prompt) = (step.arm, step.prompt);
        let same =
            then.arms[arm].inputs == now.arms[arm].inputs && then.prompts[prompt].digest == now.prompts[prompt].digest;
        let name = step.folder(&now.arms[arm].name);
        let from = folder.join("arms").join(&name);
        if same || !from.exists() {
            continue;
        }
        let stale = folder.join("stale");
        let io = |path: &Path, source| RecordError::Io { path: path.to_path_buf(), source };
        std::fs::create_dir_all(&stale).map_err(|e| io(&stale, e))?;
        let to = (0..).map(|n| stale.join(format!("{name}-{n}"))).find(|to| !to.exists()).unwrap_or(stale);
        std::fs::rename(&from, &to).map_err(|e| io(&from, e))?;
        moved += 1;
    }
    Ok(moved)
}

impl Session<'_> {
    /// Warm-ups, then every step that is missing.
    fn all(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), CampaignError> {
        let steps = self.file.steps();
        for (index, arm) in self.arms.iter().enumerate() {
            let missing = steps.iter().any(|s| s.arm == index && self.runs[s.index].is_none());
            if missing {
                on_event(Event::WarmUp(&arm.name));
                self.run_once(arm, 0, None, true, None)?;
            }
        }
        let mut given_up: BTreeMap<usize, String> = BTreeMap::new();
        for step in &steps {
            if given_up.contains_key(&0) || given_up.len() + 1 >= self.arms.len() && !given_up.is_empty() {
                break;
            }
            if step.part == Part::Arms && step.place == 0 && step.row.is_multiple_of(2) && self.decided()? {
                break;
            }
            if given_up.contains_key(&step.arm) || self.runs[step.index].is_some() {
                continue;
            }
            let arm = &self.arms[step.arm];
            on_event(Event::Starts { step, total: steps.len(), arm: &arm.name });
            if let End::GivenUp(why) = self.one(step, on_event)? {
                self.file.rejected.insert(arm.name.clone(), why.clone());
                given_up.insert(step.arm, why);
            }
        }
        Ok(())
    }

    /// Whether the stop rule has ended every comparison.
    fn decided(&self) -> Result<bool, CampaignError> {
        if !self.file.protocol.stop {
            return Ok(false);
        }
        let so_far = evaluate(self.file, &self.runs)?;
        let Some(floor) = so_far.floor.log_ratio else { return Ok(false) };
        let rule = self.file.rule();
        for comparison in &so_far.comparisons {
            let pairs: Vec<_> = comparison.pairs.iter().map(|p| (p.control_tok_s, p.candidate_tok_s)).collect();
            if rule.is_open(&pairs, floor)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// One step, repeated until it counts or its arm is given up.
    fn one(&mut self, step: &Step, on_event: &mut dyn FnMut(Event<'_>)) -> Result<End, CampaignError> {
        let name = step.folder(&self.arms[step.arm].name);
        let mut last: Vec<String> = Vec::new();
        for tried in 1..=MAX_BUSY_TRIES {
            let control = self.control(step.prompt);
            let record = self.run_once(&self.arms[step.arm], step.prompt, control.as_deref(), false, Some(&name))?;
            if record.rejected.is_empty() {
                let path = self.file.record_path(self.folder, step);
                write_json(&path, &record)?;
                self.runs[step.index] = Some(record);
                self.measured += 1;
                return Ok(End::Counted);
            }
            on_event(Event::Rejected(&record));
            let aside = self.folder.join("rejected");
            let free = (1..).map(|n| aside.join(format!("{name}-try{n}"))).find(|p| !p.exists()).unwrap_or(aside);
            write_json(&free.join("record.json"), &record)?;
            let tokens = record.guards.iter().any(|g| g.name == TOKEN_IDENTITY && g.verdict == GuardVerdict::Tripped);
            let busy = record
                .settings
                .iter()
                .all(|e| e.name == Knob::Pace.name() || objections(slice::from_ref(e)).is_empty());
            let most = if busy { MAX_BUSY_TRIES } else { MAX_TRIES };
            if tokens || tried >= most || (!busy && record.rejected == last) {
                let why = record.rejected.join("; ");
                return Ok(End::GivenUp(if tokens { why } else { format!("{tried} runs in a row: {why}") }));
            }
            last = record.rejected;
        }
        Ok(End::GivenUp("no run counted".into()))
    }

    /// The tokens that the control gave for a prompt.
    fn control(&self, prompt: usize) -> Option<String> {
        let steps = self.file.steps();
        let first = steps.iter().find(|s| s.arm == 0 && s.prompt == prompt && self.runs[s.index].is_some())?;
        self.runs[first.index].as_ref().map(|r| r.token_hash.clone())
    }

    /// One run.
    fn run_once(
        &self,
        arm: &ReadyArm,
        prompt: usize,
        control: Option<&str>,
        warm_up: bool,
        folder: Option<&str>,
    ) -> Result<RunRecord, CampaignError> {
        let mut asked = arm.asked.clone();
        let config = &mut asked.config;
        self.file.prompts[prompt].put(config);
        if warm_up {
            config.max_new = config.max_new.min(WARM_UP_TOKENS);
            config.trace = None;
        }
        // every run has a trace of its own
        config.trace = config.trace.take().zip(folder).map(|(_, name)| self.folder.join("traces").join(name));
        if let Some(trace) = &config.trace {
            let io = |source| RecordError::Io { path: trace.clone(), source };
            std::fs::create_dir_all(trace).map_err(io)?;
        }
        let spec = RunSpec {
            arm: &arm.name,
            asked: &asked,
            under_test: &arm.under_test,
            streamed: arm.streamed.as_ref().map(|(plan, mounts)| (plan, mounts.as_slice())),
            prompts: &self.prompts[prompt],
            control,
        };
        let stop = || (self.interrupted)();
        let mut go_on = |_| if stop() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let result = run(&arm.model, &spec, &mut go_on)?;
        if stop() {
            let kept = self.runs.iter().flatten().count();
            return Err(CampaignError::Kept { why: INTERRUPTED.into(), kept, folder: self.folder.to_path_buf() });
        }
        let mut record = result.record;
        record.rejected.extend(not_cold(&record));
        Ok(record)
    }
}

/// The device-byte gate: reads through the page cache count only if the devices moved what was read.
fn not_cold(record: &RunRecord) -> Option<String> {
    let guard = record.guards.iter().find(|g| g.name == DEVICE_BYTES)?;
    let cached = !record.drives.is_empty() && !record.config.reader.direct;
    (cached && guard.verdict != GuardVerdict::Held).then(|| format!("not cold: {}", guard.seen))
}
