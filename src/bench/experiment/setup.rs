//! `[setup]`: a store, drives and plans below one folder, made as a user would make them, so that an experiment runs from
//! a fresh clone.

use super::{CampaignError, WORK_FOLDER, beside, no, read_text};
use crate::bench::config::{nearest, with_nearest};
use crate::bench::guards::device_key;
use crate::bench::inputs::digest;
use crate::bench::planning::drive_set;
use crate::drive::device::identity_of;
use crate::drive::spec::{self, DriveSpec};
use crate::layout::heat::Heat;
use crate::layout::plan::PlanDrive;
use crate::layout::planner::{self, PlanRequest};
use crate::layout::policy::PolicyFile;
use crate::open::Model;
use crate::stage::{self, StageOptions};
use crate::store::import::{ImportOptions, Progress, import};
use crate::sys::direct::is_memory_file_system;
use crate::sys::durable::write_atomic;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawSetup {
    folder: Option<PathBuf>,
    checkpoint: Option<PathBuf>,
    #[serde(default)]
    drive: Vec<toml::Table>,
    #[serde(default)]
    plan: Vec<RawPlan>,
}

/// A policy: its file, or what would be in it.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum RawPolicy {
    File(PathBuf),
    Here(toml::Table),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPlan {
    name: String,
    policy: RawPolicy,
    drives: Option<Vec<String>>,
    heat: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRungs {
    policy: RawPolicy,
    heat: Option<PathBuf>,
    drives: Option<Vec<String>>,
}

/// A plan that [setup] makes.
pub(super) struct SetupPlan {
    pub(super) name: String,
    policy: PolicyFile,
    policy_digest: String,
    drives: Vec<DriveSpec>,
    pub(super) heat: Option<Heat>,
}

/// What has to be there before arms can run.
pub(super) struct Setup {
    folder: PathBuf,
    pub(super) checkpoint: Option<PathBuf>,
    drives: Vec<DriveSpec>,
    pub(super) plans: Vec<SetupPlan>,
}

/// What a caller may show while [setup] works.
pub enum SetupEvent {
    /// The checkpoint is being imported.
    Importing(Progress),
    /// Experts are being copied to drives.
    Staging(Progress),
}

impl Setup {
    pub(super) fn store(&self) -> PathBuf {
        self.folder.join("store")
    }

    pub(super) fn drives_file(&self) -> PathBuf {
        self.folder.join("drives.toml")
    }

    pub(super) fn plan_file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.plan.json"))
    }

    /// Where the drive of this name is, if there is one.
    pub(super) fn drive_folder(&self, name: &Path) -> Option<PathBuf> {
        self.drives.iter().find(|d| Path::new(&d.name) == name).map(|d| d.path.clone())
    }

    /// Some of its drives, in the order asked for.
    pub(super) fn some_drives(&self, names: Option<&[String]>, of: &str) -> Result<Vec<DriveSpec>, CampaignError> {
        let Some(names) = names else { return Ok(self.drives.clone()) };
        let known: Vec<&str> = self.drives.iter().map(|d| d.name.as_str()).collect();
        let find = |name: &String| {
            let hint = nearest(name, &known).map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
            let drive = self.drives.iter().find(|d| d.name == *name).cloned();
            drive.ok_or_else(|| CampaignError::Option(format!("{of}: [setup] has no drive `{name}`{hint}")))
        };
        names.iter().map(find).collect()
    }

    pub(super) fn add_plan(&mut self, raw: RawPlan, base: &Path) -> Result<(), CampaignError> {
        let of = format!("plan `{}`", raw.name);
        if raw.name.is_empty() || !raw.name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c)) {
            return no(format!("[setup] {of}: use letters, digits, `-` and `_`"));
        }
        if self.plans.iter().any(|p| p.name == raw.name) {
            return no(format!("[setup] has two plans called `{}`", raw.name));
        }
        let fault = |path: &Path, e: &dyn std::fmt::Display| CampaignError::Option(format!("{}: {e}", path.display()));
        let (from, text) = match &raw.policy {
            RawPolicy::File(file) => {
                let path = beside(base, file);
                let text = read_text(&path)?;
                (path, text)
            }
            RawPolicy::Here(table) => (PathBuf::from(format!("[setup] {of}")), table.to_string()),
        };
        let policy = PolicyFile::parse(&text).map_err(|e| fault(&from, &e))?;
        let heat = match &raw.heat {
            Some(heat) => {
                let path = beside(base, heat);
                Some(Heat::parse(&read_text(&path)?).map_err(|e| fault(&path, &e))?)
            }
            None => None,
        };
        let drives = self.some_drives(raw.drives.as_deref(), &of)?;
        if drives.is_empty() {
            return no(format!("[setup] {of}: there is no drive to plan for; give [[setup.drive]]"));
        }
        let policy_digest = digest(text.as_bytes());
        self.plans.push(SetupPlan { name: raw.name, policy, policy_digest, drives, heat });
        Ok(())
    }

    /// Imports, plans and stages what is not there yet; `store` is what the arms read their model from.
    pub(super) fn make(&self, store: &Path, on_event: &mut dyn FnMut(SetupEvent)) -> Result<(), CampaignError> {
        let at = |path: &Path| {
            let path = path.display().to_string();
            move |e: &dyn std::fmt::Display| CampaignError::Option(format!("[setup] {path}: {e}"))
        };
        std::fs::create_dir_all(&self.folder).map_err(|e| at(&self.folder)(&e))?;
        if is_memory_file_system(&self.folder).map_err(|e| at(&self.folder)(&e))? {
            return no(format!(
                "[setup] {} is in a memory file system: reads from it are no reads from a drive; give `folder` on a disk",
                self.folder.display()
            ));
        }
        if let Some(checkpoint) = &self.checkpoint {
            import(checkpoint, &self.store(), &ImportOptions::default(), &mut |p| on_event(SetupEvent::Importing(p)))
                .map_err(|e| at(checkpoint)(&e))?;
        }
        if self.drives.is_empty() {
            return Ok(());
        }
        for drive in &self.drives {
            std::fs::create_dir_all(&drive.path).map_err(|e| at(&drive.path)(&e))?;
        }
        // Paths in the file are relative to it.
        let inside = |d: &DriveSpec| DriveSpec {
            path: d.path.strip_prefix(&self.folder).unwrap_or(&d.path).to_path_buf(),
            ..d.clone()
        };
        let drives: Vec<DriveSpec> = self.drives.iter().map(inside).collect();
        write_atomic(&self.drives_file(), spec::render(&drives).as_bytes()).map_err(|e| at(&self.drives_file())(&e))?;
        let model = Model::load(store, None)?;
        let catalog = model.catalog();
        for plan in &self.plans {
            let path = self.plan_file(&plan.name);
            let drives = plan.drives.iter().map(|d| PlanDrive {
                name: d.name.clone(),
                path: d.path.canonicalize().unwrap_or_else(|_| d.path.clone()),
            });
            let drives: Vec<PlanDrive> = drives.collect();
            let set = drive_set(&plan.drives, None, &plan.policy)?;
            let mut inputs = BTreeMap::from([("policy".to_string(), plan.policy_digest.clone())]);
            if let Some(heat) = &plan.heat {
                inputs.insert("heat".into(), heat.hash().map_err(|e| at(&path)(&e))?);
            }
            inputs.extend(plan.drives.iter().map(|d| (device_key(&d.name), identity_of(&d.path))));
            let request = PlanRequest {
                catalog: &catalog,
                drives: &drives,
                policy: &plan.policy,
                heat: plan.heat.as_ref(),
                set: &set,
                inputs,
            };
            let made = planner::plan_with(request)?.plan;
            write_atomic(&path, made.to_json()?.as_bytes()).map_err(|e| at(&path)(&e))?;
            let mounts: Vec<PathBuf> = plan.drives.iter().map(|d| d.path.clone()).collect();
            let show = &mut |p| on_event(SetupEvent::Staging(p));
            stage::stage(&made, store, &mounts, StageOptions::default(), show).map_err(|e| at(&path)(&e))?;
        }
        Ok(())
    }
}

pub(super) fn read_setup(raw: RawSetup, base: &Path, name: &str) -> Result<Setup, CampaignError> {
    let folder = raw.folder.map_or_else(|| Path::new(WORK_FOLDER).join(name), |f| beside(base, &f));
    let checkpoint = raw.checkpoint.map(|c| beside(base, &c));
    if let Some(checkpoint) = checkpoint.as_ref().filter(|c| !c.join("config.json").is_file()) {
        return no(format!("[setup] checkpoint {}: no folder with a config.json", checkpoint.display()));
    }
    let mut setup = Setup { folder, checkpoint, drives: Vec::new(), plans: Vec::new() };
    if !raw.drive.is_empty() {
        let mut list = toml::value::Array::new();
        for mut drive in raw.drive {
            // A drive without a path is a folder of the work folder.
            let path = match (drive.get("path"), drive.get("name")) {
                (Some(path), _) => beside(base, Path::new(path.as_str().unwrap_or_default())),
                (None, Some(name)) => setup.folder.join(name.as_str().unwrap_or_default()),
                (None, None) => PathBuf::new(),
            };
            drive.insert("path".into(), toml::Value::String(path.to_string_lossy().into_owned()));
            list.push(toml::Value::Table(drive));
        }
        let file = toml::Table::from_iter([("drive".to_string(), toml::Value::Array(list))]);
        setup.drives = spec::parse(&file.to_string())
            .map_err(|e| CampaignError::Option(format!("[setup] {}", with_nearest(&e.to_string()))))?;
    }
    for plan in raw.plan {
        setup.add_plan(plan, base)?;
    }
    Ok(setup)
}

/// A plan and an arm for each of the first 1, 2, ... N drives.
pub(super) fn add_rungs(raw: RawRungs, setup: &mut Setup, base: &Path) -> Result<Vec<toml::Table>, CampaignError> {
    let drives = setup.some_drives(raw.drives.as_deref(), "[rungs]")?;
    let mut arms = Vec::with_capacity(drives.len());
    for count in 1..=drives.len() {
        let name = format!("rung{count}");
        let names = drives[..count].iter().map(|d| d.name.clone()).collect();
        let (policy, heat) = (raw.policy.clone(), raw.heat.clone());
        setup.add_plan(RawPlan { name: name.clone(), policy, drives: Some(names), heat }, base)?;
        let text = |s: String| toml::Value::String(s);
        arms.push(toml::Table::from_iter([("name".into(), text(name.clone())), ("plan".into(), text(name))]));
    }
    Ok(arms)
}
