//! The ladder: the same prompt decoded on the first 1, 2, ... N drives (and, if asked for, on each drive alone and on those of
//! each shared uplink), each rung planned again for its drives or keeping its part of one plan.
//!
//! **Protocol.** Every rung is planned and staged before the first measurement. One run per rung is a warm-up and does not
//! count; that of the rung with the most drives comes first and is traced. Then rungs run in balanced order (1 2 3 4 4 3 2 1).
//! Beside each decode the barriers of the traced run are read back to back, without compute: after it in one row of the
//! order, before it in the mirrored one. A rung's figures are medians over its runs. What is rejected (an emulated pace that was not
//! kept) is kept aside with its reason and repeated, at most [`MAX_RETRIES`] runs and as many readings in all. The
//! tokens of every run must be the same, or the whole ladder is rejected; a rung without a raw reading that counts has
//! none, and the ladder stands.

mod raw;
pub mod record;
pub mod rungs;
mod summary;
pub mod value;

use super::config::Asked;
use super::planning::PlanningError;
use super::record::{RecordError, RunRecord, write_json};
use super::reissue::{self, ReissueRecord};
use super::run::{RunError, RunSpec, run};
use crate::drive::profile::Profile;
use crate::drive::spec::DriveSpec;
use crate::knob::Knob;
use crate::layout::plan::PlanError;
use crate::open::Model;
use crate::stage::StageError;
use crate::stats::{self, StatsError};
use crate::store::import::Progress;
use raw::Barriers;
pub use record::{LADDER_FILE, LADDER_VERSION, LadderRecord, Rung, RungKind};
pub use rungs::{Layout, RungSet};
use rungs::{Planned, plan, stage};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Rejected runs that are repeated before the ladder gives up, and rejected readings before they are given up.
pub const MAX_RETRIES: usize = 12;
/// Most rungs of a ladder.
pub const MAX_RUNGS: usize = 64;
/// Most counted runs of a ladder, all rungs together.
pub const MAX_RUNS: usize = 1024;
/// Tokens of a warm-up run at most: it touches every drive, and that of the top rung shows what is routed where.
const WARM_UP_TOKENS: usize = 8;
/// Times that the traced warm-up is begun before a rejected one is taken.
const TRACE_TRIES: usize = 3;
/// Folder of the traced warm-up, in the ladder's.
const TRACE_FOLDER: &str = "trace";
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
    /// A raw reading failed.
    #[error("raw reading: {0}")]
    Read(#[from] reissue::RunError),
    /// The record could not be written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Statistics of nothing.
    #[error(transparent)]
    Stats(#[from] StatsError),
    /// The ladder's options.
    #[error("{0}")]
    Option(String),
    /// Every rung was skipped.
    #[error("no rung can be measured: {0}")]
    NoRung(String),
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
    /// The sets of them to measure (`rungs::sets`).
    pub sets: &'a [RungSet],
    /// Where the experts of each rung lie.
    pub layout: Layout<'a>,
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
    /// The words of the command that climbs it, the program's name left out.
    pub command: &'a [String],
}

/// What a caller may show while the ladder runs.
pub enum LadderEvent<'a> {
    /// Rungs are planned; nothing is staged or measured yet.
    Planned {
        /// The drives of each rung.
        rungs: Vec<Vec<String>>,
        /// Rungs that do not fit.
        skipped: usize,
        /// Counted runs in all, and as many raw readings.
        runs: usize,
    },
    /// A rung is being staged.
    Staging {
        /// Drives of the rung.
        drives: usize,
        /// How far its copy is.
        progress: Progress,
    },
    /// A run or a reading starts.
    Starts {
        /// Which, from 0.
        index: usize,
        /// All of them together.
        total: usize,
        /// Drives of its rung.
        drives: usize,
        /// What it is.
        work: Work,
    },
    /// A run ended.
    RunEnded(&'a RunRecord),
    /// A raw reading ended.
    ReadingEnded {
        /// What its rung is called.
        arm: &'a str,
        /// What it gave.
        record: &'a ReissueRecord,
    },
}

/// What is done with a rung in its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A short run that does not count.
    WarmUp,
    /// A run that counts.
    Decode,
    /// The barriers, without compute.
    Read,
}

/// What a ladder cannot do without; callers ask before they make a folder for it.
pub fn check_options(repetitions: usize, max_new: usize, rungs: usize) -> Result<(), LadderError> {
    let no = |why: String| Err(LadderError::Option(why));
    if repetitions == 0 {
        return no("--repetitions must be at least 1".into());
    }
    if max_new < 2 {
        return no("--max-new must be at least 2: a decode rate needs two tokens".into());
    }
    if rungs == 0 {
        return no("--rungs: there is no such set of drives; no two of them share an uplink that is known".into());
    }
    if rungs > MAX_RUNGS || rungs.saturating_mul(repetitions) > MAX_RUNS {
        return no(format!(
            "{rungs} rungs, {repetitions} runs each: at most {MAX_RUNGS} rungs and {MAX_RUNS} runs are measured; lower \
             --repetitions, or ask for fewer --rungs"
        ));
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
    check_options(spec.repetitions, spec.asked.config.max_new, spec.sets.len())?;
    let (rungs, skipped) = plan(model, spec)?;
    on_event(LadderEvent::Planned {
        rungs: rungs.iter().map(Planned::names).collect(),
        skipped: skipped.len(),
        runs: rungs.len() * spec.repetitions,
    });
    let (rungs, skipped) = stage(model, rungs, skipped, on_event)?;
    let mut climber = Climber::new(model, spec, &rungs, interrupted, on_event);
    let barriers = climber.trace()?;
    climber.measure(barriers.as_ref())?;
    let measured = climber.out;
    summary::summarise(model, spec, &rungs, skipped, measured, barriers.as_ref())
}

/// Runs and readings by rung, and what was rejected.
#[derive(Default)]
struct Measured {
    runs: Vec<Vec<RunRecord>>,
    readings: Vec<Vec<ReissueRecord>>,
    order: Vec<usize>,
    rejected: Vec<String>,
    remarks: Vec<String>,
    emulated: bool,
}

/// A rung's turn.
#[derive(Clone, Copy)]
struct Turn {
    rung: usize,
    work: Work,
}

/// What is to be done after the traced warm-up, in order: the other warm-ups, then the rows of `order`.
fn turns(rungs: usize, traced: usize, order: &[usize], with_readings: bool) -> Vec<Turn> {
    let others = (0..rungs).filter(|r| *r != traced);
    let mut out: Vec<Turn> = others.map(|rung| Turn { rung, work: Work::WarmUp }).collect();
    for (place, &rung) in order.iter().enumerate() {
        // The whole sequence of a row is mirrored in the next, so that drift cancels for readings too.
        let pair =
            if (place / rungs).is_multiple_of(2) { [Work::Decode, Work::Read] } else { [Work::Read, Work::Decode] };
        let pair = pair.into_iter().filter(|w| with_readings || *w != Work::Read);
        out.extend(pair.map(|work| Turn { rung, work }));
    }
    out
}

struct Climber<'a, 'e> {
    model: &'a Model,
    spec: &'a LadderSpec<'a>,
    rungs: &'a [Planned],
    interrupted: &'a dyn Fn() -> bool,
    on_event: &'a mut (dyn FnMut(LadderEvent<'_>) + 'e),
    /// What a ladder is about must be proved on every run; a limit that a rung never reaches must not stop it.
    under_test: BTreeSet<Knob>,
    control: Option<String>,
    /// Runs and readings so far, and how many of them were finished and sound.
    done: usize,
    kept: usize,
    out: Measured,
}

impl<'a, 'e> Climber<'a, 'e> {
    fn new(
        model: &'a Model,
        spec: &'a LadderSpec<'a>,
        rungs: &'a [Planned],
        interrupted: &'a dyn Fn() -> bool,
        on_event: &'a mut (dyn FnMut(LadderEvent<'_>) + 'e),
    ) -> Self {
        let out = Measured {
            runs: vec![Vec::new(); rungs.len()],
            readings: rungs.iter().map(|_| Vec::new()).collect(),
            order: stats::balanced_order(rungs.len(), spec.repetitions, ORDER_SEED),
            ..Measured::default()
        };
        let under_test = BTreeSet::from([Knob::Layout, Knob::Pace]);
        Self { model, spec, rungs, interrupted, on_event, under_test, control: None, done: 0, kept: 0, out }
    }

    /// The rung with the most drives.
    fn top(&self) -> usize {
        (0..self.rungs.len()).max_by_key(|&r| (self.rungs[r].mounts.len(), std::cmp::Reverse(r))).unwrap_or(0)
    }

    fn stopped(&self) -> LadderError {
        LadderError::Interrupted { kept: self.kept, folder: self.spec.folder.to_path_buf() }
    }

    /// The warm-up of the top rung, traced: the barriers of all others come from there.
    fn trace(&mut self) -> Result<Option<Barriers>, LadderError> {
        let (top, folder) = (self.top(), self.spec.folder.join(TRACE_FOLDER));
        let total = self.turns(true).len() + 1;
        for attempt in 1..=TRACE_TRIES {
            let record = self.decode(top, true, Some(&folder), total + attempt - 1)?;
            let Some(why) = record.rejected.first() else { break };
            if attempt == TRACE_TRIES {
                let remark = format!("the traced run, which barriers and simulations come from, was rejected: {why}");
                self.out.remarks.push(remark);
            }
        }
        match Barriers::load(&folder, self.spec) {
            Ok(barriers) => Ok(Some(barriers)),
            Err(why) => {
                self.out.remarks.push(format!("no raw readings and no simulations: {why}"));
                Ok(None)
            }
        }
    }

    fn turns(&self, with_readings: bool) -> Vec<Turn> {
        turns(self.rungs.len(), self.top(), &self.out.order, with_readings)
    }

    fn measure(&mut self, barriers: Option<&Barriers>) -> Result<(), LadderError> {
        let mut queue = self.turns(barriers.is_some());
        let before = self.done;
        let (mut next, mut run_retries, mut read_retries) = (0, 0, 0);
        while let Some(&turn) = queue.get(next) {
            let Turn { rung, work } = turn;
            let total = queue.len() + before;
            next += 1;
            let (why, retries) = match (work, barriers) {
                (Work::Read, Some(barriers)) => (self.read(rung, barriers, total)?, &mut read_retries),
                (Work::Read, None) => continue,
                (Work::WarmUp, _) => {
                    // Rejected or not, it would not have counted.
                    self.decode(rung, true, None, total)?;
                    continue;
                }
                (Work::Decode, _) => {
                    let record = self.decode(rung, false, None, total)?;
                    let why = (!record.rejected.is_empty()).then(|| record.rejected.join("; "));
                    if why.is_none() {
                        self.control.get_or_insert_with(|| record.token_hash.clone());
                        self.out.runs[rung].push(record);
                    }
                    (why, &mut run_retries)
                }
            };
            let Some(why) = why else { continue };
            let arm = &self.rungs[rung].arm;
            if *retries < MAX_RETRIES {
                *retries += 1;
                // Again at once: its neighbours in the order stay its neighbours.
                queue.insert(next, turn);
            } else if work == Work::Decode {
                let text =
                    format!("{MAX_RETRIES} rejected runs were repeated, and {arm} was rejected once more: {why}");
                self.out.rejected.push(text);
                break;
            } else {
                let missing = format!("{MAX_RETRIES} rejected readings were repeated; some of {arm} are missing");
                if !self.out.remarks.iter().any(|r| r.starts_with(&missing)) {
                    self.out.remarks.push(format!("{missing}: {why}"));
                }
            }
        }
        Ok(())
    }

    /// One run on a rung; its record is written, under `rejected` if it is.
    fn decode(
        &mut self,
        rung: usize,
        warm_up: bool,
        trace: Option<&Path>,
        total: usize,
    ) -> Result<RunRecord, LadderError> {
        let planned = &self.rungs[rung];
        let work = if warm_up { Work::WarmUp } else { Work::Decode };
        (self.on_event)(LadderEvent::Starts { index: self.done, total, drives: planned.mounts.len(), work });
        let arm = format!("{}{}", planned.arm, if warm_up { "-warmup" } else { "" });
        let asked = rung_config(self.spec, planned, warm_up, trace);
        let interrupted = self.interrupted;
        let spec = RunSpec {
            arm: &arm,
            asked: &asked,
            under_test: &self.under_test,
            streamed: Some((&planned.plan, &planned.mounts)),
            prompts: &[self.spec.prompt.to_vec()],
            control: self.control.as_deref().filter(|_| !warm_up),
        };
        let result = run(self.model, &spec, &mut |_| {
            if interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        if interrupted() {
            return Err(self.stopped());
        }
        let record = result.record;
        self.out.emulated |= record.emulated;
        (self.on_event)(LadderEvent::RunEnded(&record));
        let kind = if record.rejected.is_empty() { "arms" } else { "rejected" };
        self.write(kind, &format!("{arm}/record.json"), record.rejected.is_empty(), &record)?;
        Ok(record)
    }

    /// One raw reading on a rung; why it does not count, if it does not.
    fn read(&mut self, rung: usize, barriers: &Barriers, total: usize) -> Result<Option<String>, LadderError> {
        let planned = &self.rungs[rung];
        let (drives, work) = (planned.mounts.len(), Work::Read);
        (self.on_event)(LadderEvent::Starts { index: self.done, total, drives, work });
        let interrupted = self.interrupted;
        let Some(record) = barriers.read(planned, self.spec.profile, &|| !interrupted())? else {
            return Err(self.stopped());
        };
        self.out.emulated |= record.emulated;
        let arm = format!("{}-raw", planned.arm);
        (self.on_event)(LadderEvent::ReadingEnded { arm: &arm, record: &record });
        let sound = record.rejected.is_empty();
        self.write(if sound { "raw" } else { "rejected" }, &format!("{arm}/reading.json"), sound, &record)?;
        if sound {
            self.out.readings[rung].push(record);
            return Ok(None);
        }
        Ok(Some(record.rejected.join("; ")))
    }

    fn write<T: serde::Serialize>(
        &mut self,
        kind: &str,
        file: &str,
        sound: bool,
        record: &T,
    ) -> Result<(), LadderError> {
        write_json(&self.spec.folder.join(kind).join(format!("{:02}-{file}", self.done)), record)?;
        self.done += 1;
        self.kept += usize::from(sound);
        Ok(())
    }
}

/// The configuration of one run: the ladder's, with the rung's plan.
fn rung_config(spec: &LadderSpec<'_>, planned: &Planned, warm_up: bool, trace: Option<&Path>) -> Asked {
    let mut asked = spec.asked.clone();
    asked.repeats = None;
    asked.config.plan = Some(planned.path.clone());
    asked.config.drives = Some(spec.folder.join("drives.toml"));
    // A fault waits for the rung that has its drive.
    asked.config.reader.faults.retain(|f| planned.names().contains(&f.drive));
    asked.config.trace = trace.map(Path::to_path_buf);
    // Only what the reader itself saw is wanted of that trace.
    asked.config.monitor &= trace.is_none();
    if warm_up {
        asked.config.max_new = asked.config.max_new.min(WARM_UP_TOKENS);
    }
    asked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_mirror_each_other_readings_and_all() {
        let order = stats::balanced_order(3, 2, ORDER_SEED);
        let all = turns(3, 2, &order, true);
        let warm: Vec<usize> = all.iter().filter(|t| t.work == Work::WarmUp).map(|t| t.rung).collect();
        assert_eq!(warm, [0, 1], "the traced rung has had its warm-up");
        let rows: Vec<(usize, Work)> =
            all.iter().filter(|t| t.work != Work::WarmUp).map(|t| (t.rung, t.work)).collect();
        let mirrored: Vec<_> = rows.iter().rev().copied().collect();
        assert_eq!((rows.len(), &rows), (12, &mirrored));
        assert_eq!(rows[..2], [(0, Work::Decode), (0, Work::Read)]);
        assert_eq!(turns(3, 2, &order, false).len(), 2 + 6);
    }

    #[test]
    fn what_cannot_be_climbed_is_said_before_anything_is_made() {
        let says = |repetitions, tokens, rungs| check_options(repetitions, tokens, rungs).unwrap_err().to_string();
        assert!(check_options(6, 64, 4).is_ok());
        assert!(says(0, 64, 4).contains("--repetitions"));
        assert!(says(6, 1, 4).contains("--max-new"));
        assert!(says(6, 64, 0).contains("share an uplink"));
        assert!(says(6, 64, MAX_RUNGS + 1).contains("fewer --rungs"));
        assert!(says(MAX_RUNS, 64, 2).contains("lower --repetitions"));
    }
}
