//! What inputs are today, each looked up once: the program, the kernel, plans, stores, drives, files. What cannot be found
//! says why, and is never taken for unchanged.

use crate::bench::environment::{self, Environment};
use crate::bench::inputs::{drives_digest, file_digest};
use crate::bench::planning::read_plan;
use crate::drive::device::identity_of;
use crate::drive::facts::Tables;
use crate::drive::spec::{self, DriveSpec};
use crate::layout::heat::Heat;
use crate::layout::plan::Plan;
use crate::open::draft_identity;
use crate::reader::mounts_of;
use crate::store::manifest::StoreManifest;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A value of today, or why there is none.
pub type Now = Result<String, String>;

/// Largest heat file that is read.
const MAX_HEAT_BYTES: u64 = 1 << 30;

/// Today's inputs.
pub struct Today {
    /// The machine and this program.
    pub environment: Environment,
    known: BTreeMap<(&'static str, PathBuf), Now>,
}

impl Default for Today {
    fn default() -> Self {
        Self::at(environment::read())
    }
}

impl Today {
    /// With a machine and program as given.
    pub fn at(environment: Environment) -> Self {
        Self { environment, known: BTreeMap::new() }
    }

    fn once(&mut self, what: &'static str, path: &Path, look: impl FnOnce(&Path) -> Now) -> Now {
        self.known.entry((what, path.to_path_buf())).or_insert_with(|| look(path)).clone()
    }

    /// The id of the model in a store.
    pub fn model(&mut self, store: &Path) -> Now {
        self.once("model", store, |p| StoreManifest::open(p).map(|m| m.model_id).map_err(|e| e.to_string()))
    }

    /// Who the draft model in a store or checkpoint is.
    pub fn draft(&mut self, folder: &Path) -> Now {
        self.once("draft", folder, |p| draft_identity(p).map_err(|e| e.to_string()))
    }

    /// The hash of a plan.
    pub fn plan(&mut self, path: &Path) -> Now {
        self.once("plan", path, |p| plan_of(p)?.hash().map_err(|e| e.to_string()))
    }

    /// The hash of a file.
    pub fn file(&mut self, path: &Path) -> Now {
        self.once("file", path, |p| file_digest(p).map_err(|e| format!("{}: {e}", p.display())))
    }

    /// The hash of a heat file.
    pub fn heat(&mut self, path: &Path) -> Now {
        self.once("heat", path, |p| {
            let fault = |e: &dyn std::fmt::Display| format!("{}: {e}", p.display());
            if std::fs::metadata(p).map_err(|e| fault(&e))?.len() > MAX_HEAT_BYTES {
                return Err(fault(&"too large"));
            }
            let text = std::fs::read_to_string(p).map_err(|e| fault(&e))?;
            Heat::parse(&text).and_then(|h| h.hash()).map_err(|e| fault(&e))
        })
    }

    /// The device under a folder, by name and sectors.
    pub fn device(&mut self, folder: &Path) -> Now {
        self.once("device", folder, |p| {
            if !p.is_dir() {
                return Err(format!("{} is not there", p.display()));
            }
            let now = identity_of(p);
            if now.is_empty() { Err(format!("the device under {} is not known", p.display())) } else { Ok(now) }
        })
    }

    /// Hashed serial numbers of the devices under a folder, joined by `+`.
    pub fn serials(&mut self, folder: &Path) -> Now {
        self.once("serials", folder, |p| {
            let facts = Tables::system().facts("", p, false).map_err(|e| e.to_string())?;
            let all: Vec<String> = facts.devices.iter().filter_map(|d| d.serial_hash.clone()).collect();
            if all.is_empty() {
                Err(format!("{}: its devices tell no serial number", p.display()))
            } else {
                Ok(all.join("+"))
            }
        })
    }

    /// The hash of the drives that a configuration's plan is read from.
    pub fn drives(&mut self, plan: &Path, drives: Option<&Path>) -> Now {
        drives_digest_of(plan, drives)
    }
}

fn plan_of(path: &Path) -> Result<Plan, String> {
    read_plan(path).map_err(|e| e.to_string())
}

fn drives_digest_of(plan: &Path, drives: Option<&Path>) -> Now {
    drives_of(plan, drives).map(|d| drives_digest(&d))
}

/// The drives that a configuration's plan is read from.
pub fn drives_of(plan: &Path, drives: Option<&Path>) -> Result<Vec<DriveSpec>, String> {
    let specs = drives.map(spec::load).transpose().map_err(|e| e.to_string())?;
    mounts_of(&plan_of(plan)?, specs.as_deref()).map_err(|e| e.to_string())
}
