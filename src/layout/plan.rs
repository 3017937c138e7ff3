//! The plan: what **may be read** from where. `drive.json` says what is there; a run needs plan within drive.json.
//! This file is the data and its JSON codec; policies make plans, `stage` makes them true.

use crate::ids::{DriveId, ExpertId, LayerId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Version of plan files that this program writes.
pub const PLAN_VERSION: u32 = 1;
/// Most drives in one plan (`bound_layout` is exact up to 8; ids are bytes).
pub const MAX_DRIVES: usize = 64;

/// What is wrong with a plan or a policy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlanError {
    /// The text is not a plan.
    #[error("not a valid plan: {0}")]
    Syntax(String),
    /// A newer program wrote it.
    #[error("plan version {0}, this program reads up to {PLAN_VERSION}; use a newer argodrive")]
    Version(u32),
    /// The plan contradicts itself.
    #[error("{0}")]
    Inconsistent(String),
}

/// How an expert's bytes lie over its homes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind", deny_unknown_fields)]
pub enum Shape {
    /// Every home holds the whole expert.
    Whole,
    /// The homes hold `unit_bytes` blocks in turn (RAID-0).
    Stripe {
        /// Bytes per block.
        unit_bytes: u64,
    },
}

/// A drive as a plan knows it. The id is stable; `path` is where it was when the plan was made and is not hashed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanDrive {
    /// The name from drives.toml.
    pub name: String,
    /// Where the drive was mounted when the plan was made; `--drives` overrides it.
    pub path: PathBuf,
}

/// A placement of every expert of one layer: `homes[e]` lists drives, the first is the primary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerHomes(pub Vec<Vec<DriveId>>);

/// A layout plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Format version.
    pub version: u32,
    /// The model it places.
    pub model_id: String,
    /// The policy that made it.
    pub planner: String,
    /// Seed of that policy.
    pub seed: u64,
    /// Payload bytes of one expert.
    pub expert_bytes: u64,
    /// The drives, in id order.
    pub drives: Vec<PlanDrive>,
    /// How experts lie over their homes.
    pub shape: Shape,
    /// Homes by layer.
    pub layers: BTreeMap<LayerId, LayerHomes>,
}

impl Plan {
    /// Homes of one expert, the primary first; `None` when the plan does not know it.
    pub fn homes(&self, layer: LayerId, expert: ExpertId) -> Option<&[DriveId]> {
        self.layers.get(&layer)?.0.get(expert.index()).map(Vec::as_slice)
    }

    /// Every (layer, expert) placed on `drive`, ascending.
    pub fn on_drive(&self, drive: DriveId) -> impl Iterator<Item = (LayerId, ExpertId)> + '_ {
        self.layers.iter().flat_map(move |(&layer, homes)| {
            homes
                .0
                .iter()
                .enumerate()
                .filter(move |(_, h)| h.contains(&drive))
                .map(move |(e, _)| (layer, ExpertId(e as u16)))
        })
    }
}
