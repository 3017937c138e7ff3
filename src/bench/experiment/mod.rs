//! An experiment in a file: a question, arms on top of a base, what must fire and what must come out, and how to set up
//! what it needs (a store, drives, plans). The file is checked as a whole before anything is made or measured.
//!
//! ```toml
//! [experiment]
//! hypothesis = "split reads on mirrors beat one home each"
//! prompts = ["../models/prompts/evaluation"]     # files, and folders of .txt files
//! heat_prompts = ["../models/prompts/heat"]      # must not overlap
//! pairs = 8                                      # and floor_pairs, stop, seed, name
//!
//! [setup]                                        # optional: makes store, drives and plans below `folder`
//! checkpoint = "../models/argo-mini"
//! drive = [{ name = "amber", emulate = { rate = "8MB/s", latency = "1ms" } }, { name = "blue" }]
//! plan = [{ name = "mirror", policy = "../layouts/full-mirror.toml" }]    # or the policy itself: { policy = "full-mirror" }
//!
//! [base]                                         # a run configuration, as for `decode --config`
//! max_new = 12
//!
//! [[arm]]                                        # the first is the control; or [rungs] instead of arms
//! name = "mirror"
//! plan = "mirror"                                # a plan of [setup], or a file
//! reader = { dispatch = "split" }
//! # kv = { kv_ram_bytes = 40000, kv_dir = "amber" }    # a drive of [setup], or a folder
//!
//! [assert]
//! fired = { mirror = ["split", "replicas"] }     # by arm, or `all`
//! verdict = { mirror = "better" }                # and ratio_at_least; refused = { arm = ["split"] } where it cannot fire
//! ```
//!
//! Paths in the file are relative to it.

mod setup;

use super::campaign::CampaignError;
use super::campaign::arms::{Arm, sets};
use super::campaign::design::Design;
use super::campaign::file::{Expect, find_arm};
use super::campaign::prompts::{Prompt, check_apart, load};
use super::config::{Asked, RunConfig, collect_given, nearest, with_nearest};
use crate::files::{self, Kind};
use crate::knob::Knob;
use crate::layout::heat::Heat;
use crate::stats::compare::Outcome;
use serde::Deserialize;
pub use setup::SetupEvent;
use setup::{RawRungs, RawSetup, Setup, add_rungs, read_setup};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// Largest experiment, policy or heat file that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Where [setup] works unless told otherwise, relative to where the program is started.
const WORK_FOLDER: &str = "argodrive-work";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    experiment: RawExperiment,
    setup: Option<RawSetup>,
    #[serde(default)]
    base: toml::Table,
    #[serde(default)]
    arm: Vec<toml::Table>,
    rungs: Option<RawRungs>,
    #[serde(default)]
    assert: RawAssert,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawExperiment {
    hypothesis: String,
    name: Option<String>,
    pairs: Option<usize>,
    floor_pairs: Option<usize>,
    #[serde(default)]
    stop: bool,
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    prompts: Vec<PathBuf>,
    #[serde(default)]
    heat_prompts: Vec<PathBuf>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawAssert {
    fired: BTreeMap<String, Vec<String>>,
    verdict: BTreeMap<String, String>,
    ratio_at_least: BTreeMap<String, f64>,
    refused: BTreeMap<String, Vec<String>>,
}

/// An experiment that was read and checked; nothing is made yet.
pub struct Experiment {
    /// What is to be compared.
    pub design: Design,
    setup: Option<Setup>,
}

fn no<T>(why: impl Into<String>) -> Result<T, CampaignError> {
    Err(CampaignError::Option(why.into()))
}

fn read_text(path: &Path) -> Result<String, CampaignError> {
    let fault = |e: std::io::Error| CampaignError::Option(format!("{}: {e}", path.display()));
    let bytes = std::fs::metadata(path).map_err(fault)?.len();
    if bytes > MAX_FILE_BYTES {
        return no(format!("{}: {bytes} bytes; at most {MAX_FILE_BYTES} are read", path.display()));
    }
    files::read_text(path).map_err(fault)
}

/// `path` as seen from `base`, without steps back that can be taken out.
fn beside(base: &Path, path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in base.join(path).components() {
        let back = part == Component::ParentDir && matches!(out.components().next_back(), Some(Component::Normal(_)));
        if back {
            out.pop();
        } else if part != Component::CurDir {
            out.push(part);
        }
    }
    if out.as_os_str().is_empty() { PathBuf::from(".") } else { out }
}

/// Puts the values of `over` into `under`, table by table.
pub(super) fn merge(under: &mut toml::Table, over: &toml::Table) {
    for (key, value) in over {
        match (under.get_mut(key), value) {
            (Some(toml::Value::Table(below)), toml::Value::Table(above)) => merge(below, above),
            _ => drop(under.insert(key.clone(), value.clone())),
        }
    }
}

impl Experiment {
    /// Reads and checks the file at `path`.
    pub fn load(path: &Path) -> Result<Self, CampaignError> {
        let text = read_text(path)?;
        let named = |e: CampaignError| CampaignError::Option(format!("{}: {e}", path.display()));
        Self::parse(&text, path).map_err(named)
    }

    fn parse(text: &str, path: &Path) -> Result<Self, CampaignError> {
        let raw: Raw = toml::from_str(text).map_err(|e| {
            let other = files::instead(text, Kind::Experiment);
            CampaignError::Option(other.unwrap_or_else(|| with_nearest(&e.to_string())))
        })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let RawExperiment { hypothesis, name, pairs, floor_pairs, stop, seed, prompts, heat_prompts } = raw.experiment;
        let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let name = name.unwrap_or(stem);
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(plain) {
            return no(format!("[experiment] name is `{name}`; use 1 to 64 letters, digits, `-`, `_` or `.`"));
        }
        if hypothesis.trim().is_empty() {
            return no("[experiment] hypothesis is empty; say what it is to find out");
        }
        let mut setup = raw.setup.map(|s| read_setup(s, folder, &name)).transpose()?;
        let mut tables = raw.arm;
        if let Some(rungs) = raw.rungs {
            if !tables.is_empty() {
                return no("[rungs] and [[arm]] are both there; a ladder makes its own arms");
            }
            let Some(setup) = &mut setup else { return no("[rungs] needs [setup] with drives") };
            tables = add_rungs(rungs, setup, folder)?;
        }
        if tables.is_empty() {
            return no("no [[arm]]: give at least two, the control first, or [rungs]");
        }
        let mut arms = Vec::with_capacity(tables.len());
        for table in tables {
            arms.push(read_arm(table, &raw.base, setup.as_ref(), folder)?);
        }
        let files = |paths: &[PathBuf]| load(&paths.iter().map(|p| beside(folder, p)).collect::<Vec<_>>());
        let mut prompts = files(&prompts)?;
        prompts.extend(own_prompt(&raw.base, &arms, !prompts.is_empty())?);
        let heats = setup.iter().flat_map(|s| &s.plans);
        let heats: Vec<(PathBuf, Heat)> =
            heats.filter_map(|p| Some((PathBuf::from(format!("of plan `{}`", p.name)), p.heat.clone()?))).collect();
        check_apart(&prompts, &files(&heat_prompts)?, &heats)?;
        let expect = read_assert(raw.assert, &mut arms)?;
        let (hypothesis, source) = (Some(hypothesis), Some(path.to_path_buf()));
        let mut design =
            Design { experiment: name, hypothesis, source, arms, prompts, pairs, floor_pairs, stop, seed, expect };
        design.check()?;
        Ok(Self { design, setup })
    }

    /// Makes what the arms need: imports, plans and stages what is not there yet.
    pub fn set_up(&self, on_event: &mut dyn FnMut(SetupEvent)) -> Result<(), CampaignError> {
        let store = self.design.arms.first().map(|a| a.asked.config.store.clone()).unwrap_or_default();
        self.setup.as_ref().map_or(Ok(()), |setup| setup.make(&store, on_event))
    }
}

fn read_arm(
    mut table: toml::Table,
    base: &toml::Table,
    setup: Option<&Setup>,
    folder: &Path,
) -> Result<Arm, CampaignError> {
    let name = match table.remove("name") {
        Some(toml::Value::String(name)) => name,
        Some(other) => return no(format!("[[arm]] name is {other}; expected a text")),
        None => return no("an [[arm]] has no name"),
    };
    let fault = |e: &dyn std::fmt::Display| CampaignError::Option(format!("arm `{name}`: {e}"));
    for key in ["prompt", "prompt_file", "prompts"] {
        if table.contains_key(key) {
            return Err(fault(&format!("{key}: all arms get the same prompts; move it to [experiment] or [base]")));
        }
    }
    let mut whole = base.clone();
    merge(&mut whole, &table);
    let mut given = BTreeSet::new();
    collect_given(&whole, &mut given);
    let mut config: RunConfig =
        toml::Value::Table(whole).try_into().map_err(|e: toml::de::Error| fault(&with_nearest(&e.to_string())))?;
    let kv_drive = setup.zip(config.kv.kv_dir.as_deref()).and_then(|(setup, dir)| setup.drive_folder(dir));
    let reader = &mut config.reader;
    for path in [
        &mut config.drives,
        &mut config.trace,
        &mut config.prompt_file,
        &mut config.prompts,
        &mut reader.prefetch_table,
        &mut reader.cache_heat,
        &mut config.draft.draft_model,
        &mut config.snapshot.snapshot_dir,
        &mut config.kv.kv_dir,
        &mut config.snapshot.resume,
    ] {
        *path = path.take().map(|p| beside(folder, &p));
    }
    config.kv.kv_dir = kv_drive.or(config.kv.kv_dir.take());
    if config.store.as_os_str().is_empty() {
        config.store = setup.filter(|s| s.checkpoint.is_some()).map(Setup::store).unwrap_or_default();
    } else if setup.is_some_and(|s| s.checkpoint.is_some()) {
        return Err(fault(&"store is given, and [setup] makes one from `checkpoint`; leave one of them out"));
    } else {
        config.store = beside(folder, &config.store);
    }
    if let Some(plan) = config.plan.take() {
        let planned = setup.into_iter().flat_map(|s| &s.plans).find(|p| Path::new(&p.name) == plan);
        config.plan = match (setup, planned) {
            (Some(setup), Some(planned)) => {
                config.drives.get_or_insert_with(|| setup.drives_file());
                Some(setup.plan_file(&planned.name))
            }
            _ => Some(find_plan(&plan, setup, folder).map_err(|e| fault(&e))?),
        };
    }
    Ok(Arm { name, asked: Asked { config, given, repeats: None }, fired: BTreeSet::new() })
}

/// A plan file; what looks like a name must be one of [setup].
fn find_plan(plan: &Path, setup: Option<&Setup>, folder: &Path) -> Result<PathBuf, CampaignError> {
    let path = beside(folder, plan);
    if path.exists() {
        return Ok(path);
    }
    let known: Vec<&str> = setup.into_iter().flat_map(|s| &s.plans).map(|p| p.name.as_str()).collect();
    let name = plan.to_string_lossy();
    let hint = nearest(&name, &known).map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
    no(format!("plan `{name}` is neither a plan of [setup] nor a file{hint}"))
}

/// The prompt of [base], which goes with no list of prompts.
fn own_prompt(base: &toml::Table, arms: &[Arm], listed: bool) -> Result<Option<Prompt>, CampaignError> {
    let given = ["prompt", "prompt_file", "prompts"].iter().any(|key| base.contains_key(*key));
    match (given, listed) {
        (true, true) => no("[experiment] prompts and a prompt in [base] are both given; one is enough"),
        (false, true) => Ok(None),
        (false, false) => {
            let arm = arms.first().map(|a| a.name.as_str()).unwrap_or_default();
            no(format!("arm `{arm}` has no prompt: give [experiment] prompts, or prompt or prompt_file in [base]"))
        }
        (true, false) => {
            let config = &arms[0].asked.config;
            if config.prompts.is_some() {
                return no("[base] prompts: the set belongs to [experiment], as `prompts = [\"set.jsonl\"]`");
            }
            match (&config.prompt, &config.prompt_file) {
                (Some(text), None) if !text.is_empty() => Ok(Some(Prompt::inline(text))),
                (None, Some(file)) => Ok(load(std::slice::from_ref(file))?.into_iter().next()),
                _ => no("[base]: give either prompt, with some text, or prompt_file"),
            }
        }
    }
}

/// What must fire goes to its arms; what must come out is returned.
fn read_assert(raw: RawAssert, arms: &mut [Arm]) -> Result<Expect, CampaignError> {
    let names: Vec<String> = arms.iter().map(|a| a.name.clone()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // Where a setting is expected to be refused, it has to be asked for and looked at like one that must fire.
    for (who, knobs) in raw.fired.iter().chain(&raw.refused) {
        let targets =
            if who == "all" { 0..arms.len() } else { find_arm(&names, who, "[assert] fired").map(|i| i..i + 1)? };
        for name in knobs {
            let Some(knob) = Knob::named(name) else {
                let known: Vec<&str> = Knob::ALL.iter().map(|k| k.name()).collect();
                let hint = nearest(name, &known).map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
                return no(format!("[assert] fired: `{name}` is no setting{hint}"));
            };
            if !arms[targets.clone()].iter().any(|a| sets(a, knob)) {
                return no(format!(
                    "[assert] fired: {who} must have `{name}` fire, but no such arm sets it; set it there or in [base]"
                ));
            }
            arms[targets.clone()].iter_mut().for_each(|a| a.fired.extend([knob]));
        }
    }
    let mut verdict = BTreeMap::new();
    for (arm, word) in raw.verdict {
        let known = Outcome::ALL.map(Outcome::name);
        let Some(outcome) = Outcome::ALL.into_iter().find(|o| o.name() == word) else {
            let hint = nearest(&word, &known).map(|n| format!("did you mean `{n}`?"));
            let hint = hint.unwrap_or_else(|| format!("there are {}", known.join(", ")));
            return no(format!("[assert] verdict: {arm} = `{word}` is no verdict; {hint}"));
        };
        verdict.insert(arm, outcome);
    }
    Ok(Expect { verdict, ratio_at_least: raw.ratio_at_least, refused: raw.refused })
}
