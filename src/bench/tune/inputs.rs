//! Everything that a tune reads, opened and checked before anything is written or measured.

use super::promote::{put, text_of};
use super::settings::Tunable;
use super::{TuneError, TuneSpec};
use crate::bench::campaign::arms::MAX_ARMS;
use crate::bench::campaign::order::Protocol;
use crate::bench::campaign::prompts::{Prompt, check_apart, load};
use crate::bench::config::{Asked, read_profile};
use crate::bench::guards::device_key;
use crate::bench::model_options::ModelOptions;
use crate::bench::planning::{PlanningError, drive_set, read_plan};
use crate::bench::profile::folder_of;
use crate::bench::prompt_set::is_set;
use crate::clock::Clock;
use crate::drive::device::identity_of;
use crate::drive::profile::Profile;
use crate::drive::spec::{self, DriveSpec};
use crate::knob::Knob;
use crate::layout::heat::Heat;
use crate::layout::plan::{Plan, PlanDrive, Shape};
use crate::layout::planner::{PlanRequest, plan_with};
use crate::layout::policy::{Policy, PolicyFile};
use crate::open::Model;
use crate::reader::{PrefetchPolicy, mounts_of};
use crate::stage::{StageOptions, stage};
use crate::stats::{DEFAULT_RESAMPLES, MIN_PAIRS};
use crate::sys::space::{device_number, free_bytes, may_write};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Tokens of a run unless profile or flag say otherwise.
const DEFAULT_TOKENS: usize = 64;
/// Fewest tokens of a run: simulated passes are compared in pairs.
const LEAST_TOKENS: usize = MIN_PAIRS + 2;
/// Largest policy or heat file that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// What was opened.
pub struct Inputs {
    /// The drives.
    pub specs: Vec<DriveSpec>,
    /// The model.
    pub model: Model,
    /// Evaluation prompts.
    pub prompts: Vec<Prompt>,
    /// Tokens of the first of them: the workload.
    pub tokens: Vec<u32>,
    /// Prompts for heat, with their tokens.
    pub heat_prompts: Vec<(Prompt, Vec<u32>)>,
    /// Heat that was given.
    pub heat: Option<Heat>,
    /// Policies that were given.
    pub policies: Vec<(String, PolicyFile)>,
    /// Settings of the current profile, with absolute paths.
    pub table: toml::Table,
    /// The current profile's file; `None` if it does not exist.
    pub profile_text: Option<String>,
    /// There is no profile: what is here was made from defaults.
    pub from_defaults: bool,
    /// Plan of the current profile.
    pub plan: Plan,
    /// The ceiling that was given.
    pub ceiling: Option<Profile>,
}

fn no<T>(why: impl Into<String>) -> Result<T, TuneError> {
    Err(TuneError::Option(why.into()))
}

fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_path_buf())
}

fn read_text(flag: &str, path: &Path) -> Result<String, TuneError> {
    let fault = |e: std::io::Error| TuneError::Option(format!("{flag} {}: {e}", path.display()));
    let bytes = std::fs::metadata(path).map_err(fault)?.len();
    if bytes > MAX_FILE_BYTES {
        return no(format!("{flag} {}: {bytes} bytes; at most {MAX_FILE_BYTES} are read", path.display()));
    }
    std::fs::read_to_string(path).map_err(fault)
}

/// Drives as a plan holds them.
pub(super) fn plan_drives(specs: &[DriveSpec]) -> Vec<PlanDrive> {
    specs.iter().map(|s| PlanDrive { name: s.name.clone(), path: absolute(&s.path) }).collect()
}

/// What drives are, for a plan's inputs.
pub(super) fn device_inputs(specs: &[DriveSpec]) -> BTreeMap<String, String> {
    specs.iter().map(|s| (device_key(&s.name), identity_of(&s.path))).collect()
}

impl Inputs {
    /// Opens and checks everything that `spec` names.
    pub fn check(spec: &TuneSpec) -> Result<Self, TuneError> {
        check_numbers(spec)?;
        let specs = spec::load(&spec.drives)?;
        if let Some(missing) = specs.iter().find(|s| !s.path.is_dir()) {
            return no(format!(
                "drive `{}`: {} is no folder; mount it, or correct its path in {}",
                missing.name,
                missing.path.display(),
                spec.drives.display()
            ));
        }
        if let Some(faulty) = specs.iter().find(|s| !s.faults.is_empty()) {
            return no(format!(
                "drive `{}` has `faults` in {}: nothing is tuned on drives that fail on purpose; take them out",
                faulty.name,
                spec.drives.display()
            ));
        }
        let prompts = load(&spec.prompts)?;
        if prompts.is_empty() {
            return no("no evaluation prompt: give --prompt-file");
        }
        let again = |(at, p): &(usize, &Prompt)| prompts[..*at].iter().any(|before| before.name == p.name);
        if let Some((_, twice)) = prompts.iter().enumerate().find(again) {
            return no(format!("two prompts are called `{}`; rename one of the files", twice.name));
        }
        let heat_prompts = load(&spec.heat_prompts)?;
        if let Some(set) = prompts.iter().chain(&heat_prompts).find(|p| p.file.as_deref().is_some_and(is_set)) {
            return no(format!("prompt `{}` is a set of prompts; tuning goes by one text: give a .txt file", set.name));
        }
        let heat = match &spec.heat {
            None => None,
            Some(path) => {
                let fault = |e: &dyn std::fmt::Display| TuneError::Option(format!("--heat {}: {e}", path.display()));
                Some(Heat::parse(&read_text("--heat", path)?).map_err(|e| fault(&e))?)
            }
        };
        let heats: Vec<(PathBuf, Heat)> = spec.heat.iter().cloned().zip(heat.clone()).collect();
        check_apart(&prompts, &heat_prompts, &heats)?;
        let policies = spec.policies.iter().map(|p| policy(p, &specs)).collect::<Result<Vec<_>, _>>()?;
        let ceiling = spec.ceiling.as_ref().map(|p| Profile::load(p)).transpose()?;
        if let Some(ceiling) = &ceiling {
            ceiling.models_of(&specs)?;
        }
        if !may_write(folder_of(&spec.profile)) || spec.profile.is_dir() {
            return no(format!(
                "--profile {}: it must be a file in a folder that can be written",
                spec.profile.display()
            ));
        }
        let profile_text = text_of(&spec.profile)?;
        let of_model = match profile_text {
            Some(_) => Asked::of_table(profile(spec, &specs)?).map_err(TuneError::Option)?.config.model,
            None => ModelOptions::default(),
        };
        let model = Model::load_as(&spec.store, of_model.isa()?, of_model.trunk)?;
        if !model.has_experts() {
            return no(format!(
                "{}: this model is dense, it reads no experts; there is nothing to tune",
                spec.store.display()
            ));
        }
        if let Some(heat) = &heat {
            let catalog = model.catalog();
            heat.fits(&catalog.model_id, &catalog.layers, catalog.experts)
                .map_err(|e| TuneError::Option(format!("--heat: {e}")))?;
        }
        let (table, plan, from_defaults) = match &profile_text {
            Some(_) => (profile(spec, &specs)?, None, false),
            None => (defaults(spec), Some(round_robin(&model, &specs, spec)?), true),
        };
        let plan = match plan {
            Some(plan) => plan,
            None => current_plan(&table, &specs, &model, spec)?,
        };
        let mut out = Self {
            specs,
            model,
            prompts,
            tokens: Vec::new(),
            heat_prompts: Vec::new(),
            heat,
            policies,
            table,
            profile_text,
            from_defaults,
            plan,
            ceiling,
        };
        out.encode(spec, heat_prompts)?;
        out.check_staged(spec)?;
        Ok(out)
    }

    /// Tokens of all prompts, and whether they fit.
    fn encode(&mut self, spec: &TuneSpec, heat_prompts: Vec<Prompt>) -> Result<(), TuneError> {
        let mut asked = Asked::of_table(self.table.clone()).map_err(TuneError::Option)?;
        self.complete(&mut asked, spec);
        let named = |e: &dyn std::fmt::Display| TuneError::Option(format!("--profile {}: {e}", spec.profile.display()));
        asked.check().map_err(|e| named(&e))?;
        if asked.config.max_new < LEAST_TOKENS {
            let have = asked.config.max_new;
            return no(format!(
                "max_new is {have}: give --max-new {LEAST_TOKENS} or more, so that passes can be compared"
            ));
        }
        let longest = self.model.decoder.config().max_position_embeddings;
        let room = match asked.config.model.max_context {
            0 => longest,
            context => context.min(longest),
        };
        let encode = |prompt: &Prompt| {
            let tokens = self.model.encode_prompt(&prompt.read()?, asked.config.special)?;
            match tokens.len() {
                n if (1..=room).contains(&n) => Ok(tokens),
                n => no(format!("prompt `{}` has {n} tokens; 1 to {room} fit", prompt.name)),
            }
        };
        let mut all = self.prompts.iter().map(encode).collect::<Result<Vec<_>, TuneError>>()?;
        let heat = heat_prompts.into_iter().map(|p| Ok((encode(&p)?, p))).collect::<Result<Vec<_>, TuneError>>()?;
        self.heat_prompts = heat.into_iter().map(|(tokens, p)| (p, tokens)).collect();
        self.tokens = all.swap_remove(0);
        Ok(())
    }

    /// What a run of a profile also needs: store, number of tokens, prompt.
    pub(super) fn complete(&self, asked: &mut Asked, spec: &TuneSpec) {
        let config = &mut asked.config;
        config.store = absolute(&spec.store);
        config.max_new = match spec.max_new {
            Some(tokens) => tokens,
            None if asked.given.contains(&Knob::MaxNew) => config.max_new,
            None => DEFAULT_TOKENS,
        };
        if let Some(first) = self.prompts.first() {
            first.put(config);
        }
    }

    /// The current plan is on the drives; one made from defaults would fit.
    fn check_staged(&self, spec: &TuneSpec) -> Result<(), TuneError> {
        if self.from_defaults {
            return self.check_room(std::slice::from_ref(&self.plan), spec.margin_bytes).map_err(|why| {
                TuneError::Option(format!("there is no profile, and the one to begin with does not fit: {why}"))
            });
        }
        let missing = self.missing_bytes(&self.plan, spec.margin_bytes).map_err(TuneError::Option)?;
        let bytes: u64 = missing.iter().sum();
        if bytes > 0 {
            return no(format!(
                "--profile {}: {bytes} bytes of its plan are not on the drives; stage it first (`argodrive stage`)",
                spec.profile.display()
            ));
        }
        // Opens what the first run would open.
        let asked = Asked::of_table(self.table.clone()).map_err(TuneError::Option)?;
        let mounts = mounts_of(&self.plan, Some(&self.specs)).map_err(PlanningError::from)?;
        self.model.reader(&self.plan, &mounts, &asked.config.reader, Clock::start())?;
        Ok(())
    }

    /// Folders of a plan's drives.
    pub(super) fn mounts_of(&self, plan: &Plan) -> Result<Vec<PathBuf>, TuneError> {
        let mounts = mounts_of(plan, Some(&self.specs)).map_err(PlanningError::from)?;
        Ok(mounts.into_iter().map(|m| m.path).collect())
    }

    /// Folders of the current plan's drives, one made from defaults.
    pub(super) fn mount_paths(&self) -> Vec<PathBuf> {
        self.mounts_of(&self.plan).unwrap_or_else(|_| self.plan.drives.iter().map(|d| d.path.clone()).collect())
    }

    /// Payload bytes that staging `plan` would copy, by drive; or why it cannot be staged.
    pub(super) fn missing_bytes(&self, plan: &Plan, margin_bytes: u64) -> Result<Vec<u64>, String> {
        let mounts = self.mounts_of(plan).map_err(|e| e.to_string())?;
        let options = StageOptions { dry_run: true, margin_bytes, ..StageOptions::default() };
        let reports = stage(plan, &absolute(&self.model.folder), &mounts, options, &mut |_| {});
        Ok(reports.map_err(|e| e.to_string())?.iter().map(|r| r.copied_bytes).collect())
    }

    /// Whether all of `plans` together fit beside what is there, with so much to spare.
    pub(super) fn check_room(&self, plans: &[Plan], margin_bytes: u64) -> Result<(), String> {
        let mut needs: BTreeMap<u64, (u64, PathBuf)> = BTreeMap::new();
        for plan in plans {
            let bytes = self.missing_bytes(plan, margin_bytes)?;
            let mounts = self.mounts_of(plan).map_err(|e| e.to_string())?;
            for (mount, bytes) in mounts.into_iter().zip(bytes) {
                let device = device_number(&mount).map_err(|e| format!("{}: {e}", mount.display()))?;
                needs.entry(device).or_insert((0, mount)).0 += bytes;
            }
        }
        for (need, mount) in needs.into_values() {
            let free = free_bytes(&mount).map_err(|e| format!("{}: {e}", mount.display()))?;
            if need > 0 && free < need.saturating_add(margin_bytes) {
                let mount = mount.display();
                return Err(format!("{mount}: needs {need} bytes and {margin_bytes} spare, has {free} free"));
            }
        }
        Ok(())
    }
}

fn check_numbers(spec: &TuneSpec) -> Result<(), TuneError> {
    if !(1..MAX_ARMS).contains(&spec.finalists) {
        return no(format!("--finalists is {}; give 1 to {}", spec.finalists, MAX_ARMS - 1));
    }
    if spec.budget.is_zero() {
        return no("--minutes is 0; give the time that tuning may take");
    }
    if let Some(pairs) = spec.pairs {
        if pairs < MIN_PAIRS {
            return no(format!(
                "--pairs {pairs}: fewer than {MIN_PAIRS} pairs say nothing, so nothing could be promoted"
            ));
        }
        let prompts = load(&spec.prompts)?.len();
        Protocol { pairs, floor_pairs: pairs, stop: false, seed: spec.seed, resamples: DEFAULT_RESAMPLES }
            .check(prompts)?;
    }
    if spec.heat.is_some() && !spec.heat_prompts.is_empty() {
        return no("--heat and --heat-prompt-file are both given; one is enough");
    }
    let mut only = spec.only.clone();
    only.sort_unstable();
    if let Some(twice) = only.windows(2).find(|w| w[0] == w[1]) {
        return no(format!("--only names {} twice", twice[0].name()));
    }
    if !spec.only.is_empty() && !spec.only.contains(&Tunable::Layout) && !spec.policies.is_empty() {
        return no("--policy gives layouts, and --only leaves layouts as they are; leave one of them out");
    }
    let heat = spec.heat.is_some() || !spec.heat_prompts.is_empty();
    if !spec.only.is_empty() && !spec.only.contains(&Tunable::Layout) && heat {
        return no("heat is for layouts, and --only leaves layouts as they are; leave one of them out");
    }
    Ok(())
}

fn policy(path: &Path, specs: &[DriveSpec]) -> Result<(String, PolicyFile), TuneError> {
    let named = |e: &dyn std::fmt::Display| TuneError::Option(format!("--policy {}: {e}", path.display()));
    let policy = PolicyFile::parse(&read_text("--policy", path)?).map_err(|e| named(&e))?;
    drive_set(specs, None, &policy).map_err(|e| named(&e))?;
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    Ok((stem, policy))
}

/// Defaults; where the plan will be is known when the tune has a folder.
fn defaults(spec: &TuneSpec) -> toml::Table {
    let mut table = toml::Table::new();
    put(&mut table, "plan", Path::new("made-from-defaults.json"));
    put(&mut table, "store", &absolute(&spec.store));
    put(&mut table, "drives", &absolute(&spec.drives));
    table
}

/// One copy of every expert, dealt to the drives in turn.
fn round_robin(model: &Model, specs: &[DriveSpec], spec: &TuneSpec) -> Result<Plan, TuneError> {
    let policy = PolicyFile { seed: spec.seed, ..PolicyFile::from(Policy::RoundRobin {}) };
    let set = drive_set(specs, None, &policy)?;
    let (catalog, drives) = (model.catalog(), plan_drives(specs));
    let inputs = device_inputs(specs);
    Ok(plan_with(PlanRequest { catalog: &catalog, drives: &drives, policy: &policy, heat: None, set: &set, inputs })?
        .plan)
}

/// The profile's settings, with absolute paths, if what they ask for can be simulated.
fn profile(spec: &TuneSpec, specs: &[DriveSpec]) -> Result<toml::Table, TuneError> {
    let named = |why: String| TuneError::Option(format!("--profile {}: {why}", spec.profile.display()));
    let mut table = read_profile(&spec.profile).map_err(named)?;
    put(&mut table, "store", &absolute(&spec.store));
    for key in ["plan", "drives"] {
        if let Some(toml::Value::String(path)) = table.get(key) {
            let path = absolute(Path::new(path));
            put(&mut table, key, &path);
        }
    }
    let asked = Asked::of_table(table.clone()).map_err(named)?;
    let Some(plan) = &asked.config.plan else {
        return Err(named(
            "it has no `plan`, so it reads the store itself, which no drive of --drives is; name a plan, or a profile that \
             does not exist, to begin with one copy of every expert on the drives in turn"
                .into(),
        ));
    };
    let reader = &asked.config.reader;
    if reader.prefetch.is_told() || reader.hedge_after_permille.is_some() {
        let what = match reader.prefetch {
            PrefetchPolicy::None | PrefetchPolicy::SameAsLast | PrefetchPolicy::Markov => "hedging".to_string(),
            told => format!("prefetch `{}`", told.name()),
        };
        return Err(named(format!("{what} cannot be simulated, so nothing can be ranked against it; take it out")));
    }
    let plan = read_plan(plan).map_err(|e| named(e.to_string()))?;
    let own = asked.config.drives.as_ref().map(|p| spec::load(p)).transpose()?;
    let fault = |e: crate::reader::ReaderError| named(e.to_string());
    let (now, then) = (mounts_of(&plan, Some(specs)), mounts_of(&plan, own.as_deref()));
    for (now, then) in now.map_err(fault)?.iter().zip(&then.map_err(fault)?) {
        if absolute(&now.path) != absolute(&then.path) || now.emulate != then.emulate {
            return Err(named(format!(
                "it reads drive `{}` at {}{}, and --drives says otherwise; give it the same `drives`",
                then.name,
                then.path.display(),
                if then.emulate.is_some() { " at an emulated pace" } else { " at its own pace" }
            )));
        }
    }
    Ok(table)
}

fn current_plan(table: &toml::Table, specs: &[DriveSpec], model: &Model, spec: &TuneSpec) -> Result<Plan, TuneError> {
    let path = table.get("plan").and_then(toml::Value::as_str).unwrap_or_default();
    let plan = read_plan(Path::new(path))?;
    let named = |why: String| no(format!("--profile {}: plan {path}: {why}", spec.profile.display()));
    if plan.model_id != model.manifest.model_id {
        return named(format!("is of model {}, the store holds {}", plan.model_id, model.manifest.model_id));
    }
    if plan.shape != Shape::Whole {
        return named("stripes experts, which cannot be simulated, so nothing can be ranked against it".into());
    }
    mounts_of(&plan, Some(specs)).map_err(PlanningError::from)?;
    Ok(plan)
}
