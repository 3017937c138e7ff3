//! Tuning: what the drives can do, what a text asks of them, which layouts and reader settings would serve it faster by
//! simulation, and whether the few best really do, measured against the current profile. Prints nothing.
//!
//! **Nothing is promoted but by measurement**: the verdict must be *better* in a campaign (A/A floor, balanced order, at
//! least six pairs), and every setting under test proved in every counted run (`promote`). The simulator only chooses
//! what is worth the time.
//!
//! Every part (ceiling, trace, heat, ranking, campaign) is kept in the tune's folder under a digest of what went into it
//! (`state`), so that a tune that was killed or ran out of time goes on with the parts whose inputs are the same.

pub mod budget;
mod contest;
pub mod inputs;
mod layouts;
mod parts;
pub mod promote;
pub mod rank;
pub mod settings;
pub mod state;

use super::campaign::file::{CampaignFile, State};
use super::campaign::{self, CampaignError, lock};
use super::ceiling::{CeilingError, Stage};
use super::ceiling_files::FilesError;
use super::ceiling_load::LoadError;
use super::config::{Asked, ConfigError};
use super::inputs::digest;
use super::planning::PlanningError;
use super::profile::{ProfileFileError, folder_of};
use super::record::{RecordError, RunRecord, new_folder};
use super::run::RunError;
use super::simulate::SimulateError;
use crate::drive::profile::ProfileError;
use crate::drive::spec::SpecError;
use crate::layout::plan::PlanError;
use crate::open::OpenError;
use crate::replay::verdict::Bound;
use crate::stage::{self, StageError, StageOptions};
use crate::store::import::Progress;
use inputs::Inputs;
use settings::Tunable;
use state::{TuneFile, TuneResult};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Name of the experiment, and so of its folder of results.
pub const EXPERIMENT: &str = "tune";
/// The sentence of a tune that changes nothing.
pub const KEPT: &str = "no candidate is better than the current profile: kept";

/// What is asked for.
#[derive(Clone, Debug)]
pub struct TuneSpec {
    /// The store.
    pub store: PathBuf,
    /// The drives file.
    pub drives: PathBuf,
    /// Evaluation prompts: files and folders.
    pub prompts: Vec<PathBuf>,
    /// Prompts that heat is counted on.
    pub heat_prompts: Vec<PathBuf>,
    /// Heat that was counted before.
    pub heat: Option<PathBuf>,
    /// The run profile.
    pub profile: PathBuf,
    /// What `ceiling` measured before.
    pub ceiling: Option<PathBuf>,
    /// Policies besides the usual ones.
    pub policies: Vec<PathBuf>,
    /// What may be changed; empty = everything.
    pub only: Vec<Tunable>,
    /// Most tokens of a run; `None` = the profile's.
    pub max_new: Option<usize>,
    /// For everything, from the start of this call.
    pub budget: Duration,
    /// Most candidates that are measured.
    pub finalists: usize,
    /// Pairs of each; `None` = eight, or as many as the budget holds.
    pub pairs: Option<usize>,
    /// Time of each point of the ceiling.
    pub point_time: Duration,
    /// Seed of simulations, plans and order.
    pub seed: u64,
    /// Simulations of each candidate.
    pub repeats: u32,
    /// Bytes that staging leaves free.
    pub margin_bytes: u64,
    /// Folder of results.
    pub out: PathBuf,
    /// Stop after the ranking.
    pub dry_run: bool,
    /// Begin anew even if an unfinished tune is there.
    pub fresh: bool,
}

/// Tuning failed.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// What was asked for cannot be.
    #[error("{0}")]
    Option(String),
    /// Drives file.
    #[error(transparent)]
    Drives(#[from] SpecError),
    /// A configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A profile of drives.
    #[error("--ceiling: {0}")]
    Ceiling(#[from] ProfileError),
    /// Measuring drives.
    #[error(transparent)]
    Measuring(#[from] CeilingError),
    /// A plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Plans and drives.
    #[error(transparent)]
    Planning(#[from] PlanningError),
    /// A store.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Staging.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// A run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A simulation.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
    /// A campaign.
    #[error(transparent)]
    Campaign(#[from] CampaignError),
    /// A record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The run profile.
    #[error(transparent)]
    Profile(#[from] ProfileFileError),
    /// Stopped by the user.
    #[error("interrupted; what is finished is in {}: the same command goes on from there", .0.display())]
    Interrupted(PathBuf),
}

/// What a caller may show meanwhile.
pub enum Event<'a> {
    /// An unfinished tune is gone on with.
    GoesOn(&'a Path),
    /// A part is there already.
    Reused(&'static str),
    /// The ceiling.
    Ceiling(Stage),
    /// A traced run begins: of what.
    Tracing(&'a str),
    /// A traced run does not count.
    Rejected(&'a RunRecord),
    /// Candidates are being simulated: how many so far.
    Simulating(usize),
    /// A layout is being copied.
    Staging(&'a str, Progress),
    /// The campaign is about to begin: arms, pairs, seconds that it will take at least.
    Fits(usize, usize, f64),
    /// The campaign.
    Campaign(campaign::Event<'a>),
}

/// What was done.
pub struct Tuning {
    /// The tune's folder.
    pub folder: PathBuf,
    /// Everything that is known.
    pub file: TuneFile,
    /// The campaign, and its folder, if there was one.
    pub campaign: Option<(PathBuf, CampaignFile)>,
}

/// When to stop.
pub(crate) struct Limits<'a> {
    interrupted: &'a dyn Fn() -> bool,
    deadline: Instant,
}

impl Limits<'_> {
    fn over(&self) -> bool {
        (self.interrupted)() || self.out_of_time()
    }

    fn out_of_time(&self) -> bool {
        Instant::now() >= self.deadline
    }
}

/// One tune at work.
struct Session<'a> {
    spec: &'a TuneSpec,
    inputs: &'a Inputs,
    folder: &'a Path,
    file: TuneFile,
    limits: Limits<'a>,
    campaign: Option<(PathBuf, CampaignFile)>,
}

/// Tunes. `inputs` was made of `spec`, and nothing has been written yet.
pub fn tune(
    spec: &TuneSpec,
    inputs: &Inputs,
    interrupted: &dyn Fn() -> bool,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<Tuning, TuneError> {
    let deadline = Instant::now() + spec.budget;
    let new = TuneFile::new(spec, inputs)?;
    let unfinished = if spec.fresh { None } else { TuneFile::unfinished(&spec.out.join(EXPERIMENT), &new)? };
    let (folder, file) = match unfinished {
        Some((folder, then)) => {
            on_event(Event::GoesOn(&folder));
            (folder, TuneFile { prompts: new.prompts, current: new.current, ..then })
        }
        None => (new_folder(&spec.out, EXPERIMENT)?, new),
    };
    let _lock = lock(&folder)?;
    let limits = Limits { interrupted, deadline };
    let mut session = Session { spec, inputs, folder: &folder, file, limits, campaign: None };
    session.file.state = State::Running;
    session.file.result = None;
    session.file.save(&folder)?;
    let ended = session.all(on_event);
    let Session { mut file, campaign, limits, .. } = session;
    let result = match ended {
        Ok(result) => result,
        // Not an error of anything: what was asked for in minutes was given.
        Err(e) if stopped(&e) && !(limits.interrupted)() => TuneResult::out_of_time(&file, spec.budget),
        Err(e) => {
            file.state = State::Interrupted;
            // If this fails too, the file still says "running", and going on does the same.
            let _ = file.save(&folder);
            return Err(if (limits.interrupted)() { TuneError::Interrupted(folder) } else { e });
        }
    };
    file.state = match (&result.rejected, result.unfinished) {
        (true, _) => State::Rejected,
        (false, true) => State::Interrupted,
        (false, false) => State::Complete,
    };
    file.result = Some(result);
    file.save(&folder)?;
    Ok(Tuning { folder, file, campaign })
}

impl Session<'_> {
    fn all(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<TuneResult, TuneError> {
        let (spec, inputs) = (self.spec, self.inputs);
        let current = self.start(on_event)?;
        let ceiling = match self.ceiling(on_event)? {
            Ok(ceiling) => ceiling,
            Err(reasons) => return Ok(TuneResult::rejected("the ceiling was not measured soundly: kept", reasons)),
        };
        if let Err(reasons) = self.trace(&current, on_event)? {
            let says = "no run of the current profile counted, so nothing can be compared with it: kept";
            return Ok(TuneResult::rejected(says, reasons));
        }
        if self.file.trace.iter().flat_map(|t| &t.verdict).any(|v| v.bound == Bound::NotStorage) {
            let why = "the current profile waits for drives less than a tenth of its time, so no layout and no reader \
                       setting could show; more drives would not help either";
            return Ok(TuneResult::kept("not storage-bound: kept", vec![why.into()]));
        }
        let heat = self.heat(&current, on_event)?;
        self.ranking(&current, &ceiling, heat.as_ref(), on_event)?;
        let finalists = self.file.ranking.as_ref().map(|r| r.finalists.clone()).unwrap_or_default();
        let mut others = self.file.ranking.iter().flat_map(|r| &r.candidates).filter(|c| !c.changes.is_empty());
        if finalists.is_empty() && others.clone().next().is_some() && others.all(|c| c.gain.is_none()) {
            let why = "the traced text has too few decoded tokens to compare anything; give a prompt whose text goes on, or \
                       more --max-new";
            return Ok(TuneResult::rejected("no candidate could be compared: kept", vec![why.into()]));
        }
        if finalists.is_empty() {
            let least = 100.0 * rank::RESOLUTION;
            let why =
                format!("none is predicted to gain {least:.0} % or more, which is what a simulation can tell apart");
            let mut result = TuneResult::kept(KEPT, vec![why]);
            result.unfinished = spec.dry_run;
            return Ok(result);
        }
        if spec.dry_run {
            let mut result = TuneResult::kept("dry run: nothing was staged or measured", Vec::new());
            result.unfinished = true;
            return Ok(result);
        }
        if promote::text_of(&spec.profile)? != inputs.profile_text {
            return Err(changed(&spec.profile));
        }
        let (finalists, mut reasons) = self.fitting(finalists)?;
        let Some((finalists, pairs)) = self.within_budget(finalists, &mut reasons, on_event)? else {
            let mut result = TuneResult::kept("too few pairs fit into the budget to say anything: kept", reasons);
            result.unfinished = true;
            return Ok(result);
        };
        for finalist in &finalists {
            self.go_on()?;
            self.stage(finalist, on_event)?;
        }
        self.go_on()?;
        self.measure(&current, &finalists, pairs, on_event)?;
        self.conclude(&finalists, reasons)
    }

    /// The profile to begin with, as an arm's configuration. One made from defaults is staged.
    fn start(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Asked, TuneError> {
        let inputs = self.inputs;
        let mut table = inputs.table.clone();
        if inputs.from_defaults {
            let path = self.write_plan("current", &inputs.plan)?;
            promote::put(&mut table, "plan", &path);
            let options = StageOptions { margin_bytes: self.spec.margin_bytes, ..StageOptions::default() };
            let store = &inputs.plan.store;
            let mut show = |at| on_event(Event::Staging("the profile to begin with", at));
            stage::stage(&inputs.plan, store, &inputs.mount_paths(), options, &mut show)?;
        }
        let mut asked = Asked::of_table(table).map_err(TuneError::Option)?;
        inputs.complete(&mut asked, self.spec);
        Ok(asked)
    }

    fn write_plan(&self, name: &str, plan: &crate::layout::plan::Plan) -> Result<PathBuf, TuneError> {
        let folder = std::path::absolute(self.folder).unwrap_or_else(|_| self.folder.to_path_buf());
        let path = folder.join("plans").join(format!("{name}.json"));
        promote::write_plan(&path, plan)?;
        Ok(path)
    }
}

/// Whether an error only says that something was asked to stop.
fn stopped(e: &TuneError) -> bool {
    match e {
        TuneError::Interrupted(_) => true,
        TuneError::Campaign(CampaignError::Kept { why, .. }) => why == campaign::INTERRUPTED,
        TuneError::Measuring(CeilingError::Files(FilesError::Interrupted)) => true,
        TuneError::Measuring(CeilingError::Load(LoadError::Interrupted)) => true,
        _ => false,
    }
}

fn changed(profile: &Path) -> TuneError {
    TuneError::Option(format!(
        "--profile {}: somebody changed it meanwhile, so what was measured is not it; run the same command again",
        profile.display()
    ))
}

/// Where the profile's own plans lie: beside it, so that results can be deleted.
pub(crate) fn plan_beside(profile: &Path, plan_hash: &str) -> PathBuf {
    let stem = profile.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let folder = folder_of(profile);
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
    folder.join(format!("{stem}-{}.plan.json", &plan_hash[..8.min(plan_hash.len())]))
}

/// A digest of texts that cannot be told from each other when joined otherwise.
pub(crate) fn digest_of(parts: &[&str]) -> String {
    let mut text = String::new();
    for part in parts {
        text.push_str(&format!("{}:{part}\n", part.len()));
    }
    digest(text.as_bytes())
}
