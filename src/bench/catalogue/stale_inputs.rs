//! Input by input: what a record holds against what is there today. One function for each kind of record.

use super::stale::{Change, Judgement, Unknown};
use super::today::{Now, Today, drives_of};
use crate::bench::campaign::file::{ArmFile, CampaignFile};
use crate::bench::experiment::Experiment;
use crate::bench::inputs::{CACHE_HEAT, DRAFT_MODEL, DRIVES, PROMPT, PROMPTS, TABLE};
use crate::bench::ladder::LadderRecord;
use crate::bench::record::RunRecord;
use crate::bench::run_figures::emulated_as;
use crate::drive::profile::Profile;
use crate::drive::spec;
use crate::layout::plan::Plan;
use std::path::{Path, PathBuf};

/// Names of inputs, as in tables and flags.
pub const INPUTS: [&str; 15] = [
    "code",
    "model",
    "plan",
    "drives",
    "drive-map",
    "kernel",
    "cpu",
    "prompt",
    "predictor",
    "cache-heat",
    "draft-model",
    "experiment",
    "policy",
    "heat",
    "profile",
];

/// Compares, one input after the other; `who` says whose they are where a record has several.
pub(super) struct Compared<'a> {
    pub today: &'a mut Today,
    pub out: &'a mut Judgement,
    pub who: String,
}

impl Compared<'_> {
    /// `then` is empty where the record does not say.
    fn one(&mut self, input: &'static str, then: &str, now: Now) {
        self.out.asked.insert(input);
        match now {
            _ if is_unknown(then) => self.unknown(input, "the record does not hold it"),
            Err(why) => self.unknown(input, &why),
            Ok(now) if is_unknown(&now) => self.unknown(input, "not known today"),
            Ok(now) if now != then => {
                let change = Change { input, who: self.who.clone(), then: then.to_string(), now };
                if !self.out.changed.contains(&change) {
                    self.out.changed.push(change);
                }
            }
            Ok(_) => {}
        }
    }

    pub fn unknown(&mut self, input: &'static str, why: &str) {
        self.out.asked.insert(input);
        let unknown = Unknown { input, why: why.to_string() };
        if !self.out.unknown.contains(&unknown) {
            self.out.unknown.push(unknown);
        }
    }

    /// Program, kernel and CPU of a run.
    fn machine(&mut self, record: &RunRecord) {
        let (then, now) = (&record.environment, self.today.environment.clone());
        self.one("code", &then.argodrive, Ok(now.argodrive));
        self.one("kernel", &then.kernel, Ok(now.kernel));
        self.one("cpu", &then.cpu, Ok(now.cpu));
    }

    /// The devices under the drives of a run. An emulated drive's pace is its own, whatever lies under it.
    pub fn map(&mut self, record: &RunRecord) {
        for mount in record.mounts.iter().filter(|m| m.emulate.is_none()) {
            let now = self.today.device(&mount.path);
            self.one("drive-map", &mount.device, now);
        }
    }

    /// What a run's own configuration names.
    pub fn run(&mut self, record: &RunRecord) {
        self.machine(record);
        self.map(record);
        let config = &record.config;
        let model = self.today.model(&config.store);
        self.one("model", &record.model_id, model);
        if let Some(plan) = &config.plan {
            let now = self.today.plan(plan);
            self.one("plan", &record.plan_hash, now);
            self.run_drives(record, plan);
        }
        if let Some(file) = &config.prompt_file {
            let now = self.today.file(file);
            self.one("prompt", record.inputs.get(PROMPT).map_or("", String::as_str), now);
        }
        if let Some(set) = &config.prompts {
            let now = config.set_digest().ok_or_else(|| format!("{}: cannot be read", set.display()));
            self.one("prompt", record.inputs.get(PROMPTS).map_or("", String::as_str), now);
        }
        self.tables(record.config.reader.prefetch_table.as_deref(), "predictor", record.inputs.get(TABLE));
        self.tables(record.config.reader.cache_heat.as_deref(), "cache-heat", record.inputs.get(CACHE_HEAT));
        self.draft(record.config.draft.draft_model.as_deref(), record.inputs.get(DRAFT_MODEL));
    }

    fn draft(&mut self, folder: Option<&Path>, then: Option<&String>) {
        if let Some(folder) = folder {
            let now = self.today.draft(folder);
            self.one("draft-model", then.map_or("", String::as_str), now);
        }
    }

    fn tables(&mut self, path: Option<&Path>, input: &'static str, then: Option<&String>) {
        if let Some(path) = path {
            let now = self.today.file(path);
            self.one(input, then.map_or("", String::as_str), now);
        }
    }

    fn run_drives(&mut self, record: &RunRecord, plan: &Path) {
        let drives = record.config.drives.as_deref();
        if let Some(then) = record.inputs.get(DRIVES) {
            let now = self.today.drives(plan, drives);
            return self.one("drives", then, now);
        }
        // an older record: names, places and emulation, without later rates
        let shown = |name: &str, path: &Path, emulate: Option<&String>| {
            format!("{name} at {} ({})", path.display(), emulate.map_or("real", String::as_str))
        };
        let then: Vec<String> = record.mounts.iter().map(|m| shown(&m.name, &m.path, m.emulate.as_ref())).collect();
        let now = drives_of(plan, drives).map(|specs| {
            specs.iter().map(|s| shown(&s.name, &s.path, emulated_as(s).as_ref())).collect::<Vec<_>>().join(", ")
        });
        let emulated = record.mounts.iter().any(|m| m.emulate.is_some());
        match now {
            Ok(now) if now == then.join(", ") && emulated => {
                self.unknown("drives", "the record does not say whether emulated rates change in time");
            }
            now => self.one("drives", &then.join(", "), now),
        }
    }

    /// An arm of a campaign.
    pub fn arm(&mut self, arm: &ArmFile) {
        let then = |name: &str| arm.inputs.get(name).cloned().unwrap_or_default();
        let config = &arm.config;
        let program = self.today.environment.argodrive.clone();
        self.one("code", &then("argodrive"), Ok(program));
        let model = self.today.model(&config.store);
        self.one("model", &then("model"), model);
        if let Some(plan) = &config.plan {
            let now = self.today.plan(plan);
            self.one("plan", &then("plan"), now);
            let now = self.today.drives(plan, config.drives.as_deref());
            self.one("drives", &then(DRIVES), now);
        }
        self.tables(config.reader.prefetch_table.as_deref(), "predictor", arm.inputs.get(TABLE));
        self.tables(config.reader.cache_heat.as_deref(), "cache-heat", arm.inputs.get(CACHE_HEAT));
        self.draft(config.draft.draft_model.as_deref(), arm.inputs.get(DRAFT_MODEL));
    }

    /// What a campaign has besides its arms: prompts, the machine of its first run, and the file that describes it.
    pub fn campaign(&mut self, file: &CampaignFile, first_run: Option<&RunRecord>) {
        for prompt in &file.prompts {
            if let (None, Some(path)) = (&prompt.text, &prompt.file) {
                let now = self.today.file(path);
                self.one("prompt", &prompt.digest, now);
            }
        }
        match first_run {
            Some(run) => {
                self.one("kernel", &run.environment.kernel, Ok(self.today.environment.kernel.clone()));
                self.one("cpu", &run.environment.cpu, Ok(self.today.environment.cpu.clone()));
            }
            None => {
                ["kernel", "cpu"].into_iter().for_each(|input| self.unknown(input, "no run of the campaign is kept"))
            }
        }
        if let Some(source) = &file.source {
            self.experiment(file, source);
        }
    }

    /// Whether the file of an experiment still describes the same arms.
    fn experiment(&mut self, file: &CampaignFile, source: &Path) {
        self.out.asked.insert("experiment");
        let design = match Experiment::load(source) {
            Ok(experiment) => experiment.design,
            Err(e) => return self.unknown("experiment", &e.to_string()),
        };
        let plain = |name: &str, config: &crate::bench::config::RunConfig| {
            let mut config = config.clone();
            (config.prompt, config.prompt_file, config.prompts) = (None, None, None); // prompts are inputs of their own
            format!("{name} {}", serde_json::to_string(&config).unwrap_or_default())
        };
        let then: Vec<String> = file.arms.iter().map(|a| plain(&a.name, &a.config)).collect();
        let now: Vec<String> = design.arms.iter().map(|a| plain(&a.name, &a.asked.config)).collect();
        if then != now {
            let differs =
                |(a, b): (&String, &String)| if a == b { None } else { a.split(' ').next().map(String::from) };
            let names: Vec<String> = then.iter().zip(&now).filter_map(differs).collect();
            let now = format!("{} describes other arms ({} then, {} now)", source.display(), then.len(), now.len());
            let now = if names.is_empty() {
                now
            } else {
                format!("{} has changed in {}", source.display(), names.join(", "))
            };
            self.out.changed.push(Change { input: "experiment", who: String::new(), then: "as measured".into(), now });
        }
    }

    /// A rung: its runs hold the machine and the configuration, its command the rest.
    pub fn rung(&mut self, ladder: &LadderRecord, folder: &Path, name: &str, run: Option<&RunRecord>) {
        match run {
            Some(run) => {
                self.machine(run);
                self.map(run);
                let model = self.today.model(&run.config.store);
                self.one("model", &ladder.model_id, model);
                if let Some(file) = &run.config.prompt_file {
                    let now = self.today.file(file);
                    self.one("prompt", run.inputs.get(PROMPT).map_or("", String::as_str), now);
                }
                self.tables(run.config.reader.prefetch_table.as_deref(), "predictor", run.inputs.get(TABLE));
                self.tables(run.config.reader.cache_heat.as_deref(), "cache-heat", run.inputs.get(CACHE_HEAT));
            }
            None => ["code", "kernel", "cpu", "drive-map", "model", "prompt"]
                .into_iter()
                .for_each(|input| self.unknown(input, "no run of this rung is kept")),
        }
        if ladder.command.first().map(String::as_str) != Some("ladder") {
            for input in ["drives", "policy"] {
                self.unknown(input, "the record does not hold the command that climbed it");
            }
            return;
        }
        let value = |flag: &str| value_of(&ladder.command, flag).map(PathBuf::from);
        let drives = folder.join("drives.toml");
        match value("--drives") {
            Some(path) => self.same_drives(&drives, &path, value_of(&ladder.command, "--order")),
            None => self.unknown("drives", "the command names none"),
        }
        let plan_path = folder.join(format!("{name}.plan.json"));
        let plan: Option<Plan> = crate::bench::planning::read_plan(&plan_path).ok();
        let then = |name: &str| plan.as_ref().and_then(|p| p.inputs.get(name)).cloned().unwrap_or_default();
        if let Some(path) = value("--fixed-plan") {
            let now = self.today.plan(&path);
            self.one("plan", ladder.fixed_plan.as_deref().unwrap_or(""), now);
            if value("--profile").is_some() {
                self.unknown("profile", "a part of a fixed plan does not hold its digest");
            }
            return;
        }
        for (input, flag) in [("policy", "--policy"), ("profile", "--profile")] {
            if let Some(path) = value(flag) {
                let now = self.today.file(&path);
                self.one(input, &then(input), now);
            }
        }
        if let Some(path) = value("--heat") {
            let now = self.today.heat(&path);
            self.one("heat", &then("heat"), now);
        }
    }

    /// The drives of a ladder; those that its `--order` names, in that order.
    fn same_drives(&mut self, then: &Path, now: &Path, order: Option<&str>) {
        let sorted = |path: &Path| {
            let mut drives = spec::load(path).map_err(|e| e.to_string())?;
            for drive in &mut drives {
                drive.path = drive.path.canonicalize().unwrap_or_else(|_| drive.path.clone());
            }
            let place = |name: &str| order.and_then(|o| o.split(',').position(|n| n == name));
            drives.retain(|d| order.is_none() || place(&d.name).is_some());
            drives.sort_by(|a, b| (place(&a.name), &a.name).cmp(&(place(&b.name), &b.name)));
            Ok::<_, String>(crate::bench::inputs::drives_digest(&drives))
        };
        match sorted(then) {
            Ok(then) => self.one("drives", &then, sorted(now)),
            Err(why) => self.unknown("drives", &why),
        }
    }

    /// A profile.
    pub fn ceiling(&mut self, profile: &Profile) {
        let now = self.today.environment.clone();
        self.one("code", &profile.method.argodrive, Ok(now.argodrive));
        self.one("kernel", &profile.method.kernel, Ok(now.kernel));
        for drive in &profile.drives {
            if drive.emulated {
                continue;
            }
            self.who = drive.name.clone();
            // kernel names change at every start; serial numbers do not
            if drive.serials.is_empty() {
                let now = self.today.device(&drive.path);
                self.one("drive-map", &drive.device, now);
            } else {
                let now = self.today.serials(&drive.path);
                self.one("drive-map", &drive.serials.join("+"), now);
            }
        }
        self.who.clear();
        if profile.emulated {
            self.unknown("drives", "a profile does not say what emulated drives pretended to be");
        }
    }
}

/// What a program without revision, or a machine that tells nothing, leaves in a record.
fn is_unknown(value: &str) -> bool {
    value.is_empty() || value == "unknown" || value.ends_with("(unknown)")
}

/// What follows `flag` in a command, as `--flag value` or `--flag=value`.
pub(super) fn value_of<'a>(command: &'a [String], flag: &str) -> Option<&'a str> {
    let joined = |word: &'a String| word.strip_prefix(flag)?.strip_prefix('=');
    let at = command.iter().position(|w| w == flag || joined(w).is_some())?;
    joined(&command[at]).or_else(|| command.get(at + 1).map(String::as_str))
}
