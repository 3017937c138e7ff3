//! The plan: what **may be read** from where. `drive.json` says what is there; a run needs plan within drive.json.
//! This file is the data and its JSON codec; policies make plans, `stage` makes them true.

use super::level::Reads;
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::store::piece::{PartOf, PieceKey};
use crate::store::seal::{explain, seal, unseal};
use crate::store::stripe::{MAX_UNITS, Stripe, UNIT_ALIGN};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Version of plan files that this program writes.
pub const PLAN_VERSION: u32 = 2;
/// Most drives in one plan (`bound_layout` is exact up to 8; ids are bytes).
pub const MAX_DRIVES: usize = 64;

/// What is wrong with a plan or a policy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlanError {
    /// The text is not a policy.
    #[error("not a valid policy: {0}")]
    Policy(String),
    /// The text is not a plan.
    #[error("not a valid plan: {0}")]
    Syntax(String),
    /// A newer program wrote it.
    #[error("plan version {0}, this program reads up to {PLAN_VERSION}; use a newer argodrive")]
    Version(u32),
    /// The plan contradicts itself.
    #[error("{0}")]
    Inconsistent(String),
    /// The drives have too little room for what the policy places.
    #[error("{reason}")]
    Room {
        /// What does not fit where, and what to do.
        reason: String,
        /// Bytes that it takes.
        needs_bytes: u64,
        /// Bytes that there are.
        has_bytes: u64,
    },
    /// The stated cache holds everything that the heat asks for.
    #[error("with the stated cache no barrier of this heat reads anything; any layout is as good as another")]
    NothingRead,
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

/// What a plan's barriers will take, as its planner saw it: means over barriers, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// How experts are read.
    pub reads: Reads,
    /// A barrier with the plan's homes, read as well as possible.
    pub barrier_ns: u64,
    /// The bound with the plan's homes (`bound_layout`): reads split at will.
    pub bound_layout_ns: u64,
    /// The bound as if every expert were on every drive (`bound_drives`).
    pub bound_drives_ns: u64,
    /// The least that any layout could reach with these reads.
    pub best_layout_ns: u64,
}

/// A layout plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Format version.
    pub version: u32,
    /// The model it places.
    pub model_id: String,
    /// The store whose experts it places, where it was when the plan was made; not hashed, `--store` overrides it.
    pub store: PathBuf,
    /// The policy that made it.
    pub planner: String,
    /// Seed of that policy.
    pub seed: u64,
    /// Hashes of what it was made from (policy, heat), by name.
    pub inputs: BTreeMap<String, String>,
    /// Payload bytes of one expert.
    pub expert_bytes: u64,
    /// The drives, in id order.
    pub drives: Vec<PlanDrive>,
    /// How experts lie over their homes.
    pub shape: Shape,
    /// What its barriers will take; not hashed. Since version 2, and only where heat was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Prediction>,
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

impl Plan {
    /// How an expert with `columns` homes is cut; `None` where it lies whole: everywhere in a plan without stripes, and
    /// on its one home in any.
    pub fn stripe(&self, columns: usize) -> Option<Stripe> {
        match (self.shape, u8::try_from(columns)) {
            (Shape::Stripe { unit_bytes }, Ok(columns @ 2..)) => {
                Some(Stripe { expert_bytes: self.expert_bytes, unit_bytes, columns })
            }
            _ => None,
        }
    }

    /// Copies of an expert with these homes: a striped one is there once, however many drives it lies on.
    pub fn copies(&self, homes: &[DriveId]) -> usize {
        if self.stripe(homes.len()).is_some() { 1 } else { homes.len() }
    }

    /// What `drive` must hold, ascending: whole experts, or its column of striped ones where that has any bytes.
    pub fn pieces_on(&self, drive: DriveId) -> impl Iterator<Item = PieceKey> + '_ {
        self.on_drive(drive).filter_map(move |(layer, expert)| {
            let homes = self.homes(layer, expert)?;
            let Some(stripe) = self.stripe(homes.len()) else { return Some(PieceKey { layer, expert, part: None }) };
            let column = homes.iter().position(|&home| home == drive)? as u8;
            let part = PartOf { unit_bytes: stripe.unit_bytes, columns: stripe.columns, column };
            (stripe.column_bytes(column) > 0).then_some(PieceKey { layer, expert, part: Some(part) })
        })
    }

    /// Payload bytes that `drive` must hold.
    pub fn bytes_on(&self, drive: DriveId) -> u64 {
        self.pieces_on(drive).map(|key| key.bytes(self.expert_bytes)).fold(0, u64::saturating_add)
    }

    /// Reads a plan and checks that it does not contradict itself.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_str(text).map_err(|e| PlanError::Syntax(e.to_string()))?;
        if version > PLAN_VERSION {
            return Err(PlanError::Version(version));
        }
        let (text, intact) = unseal(text);
        let plan: Plan = serde_json::from_str(&text).map_err(|e| PlanError::Syntax(explain(&e, &intact)))?;
        plan.check()?;
        intact.map_err(PlanError::Syntax)?;
        Ok(plan)
    }

    /// The plan as one line of JSON (82,432 experts on 4 drives stay under 4 MiB), with a check of it at its end.
    pub fn to_json(&self) -> Result<String, PlanError> {
        self.bare_json().map(|s| seal(s.trim_end()) + "\n")
    }

    fn bare_json(&self) -> Result<String, PlanError> {
        serde_json::to_string(self).map(|s| s + "\n").map_err(|e| PlanError::Syntax(e.to_string()))
    }

    /// Identity of the layout: everything but where the drives were mounted and what is expected of it.
    pub fn hash(&self) -> Result<String, PlanError> {
        let mut bare = self.clone();
        bare.predicted = None;
        bare.store = PathBuf::new();
        for drive in &mut bare.drives {
            drive.path = PathBuf::new();
        }
        Ok(format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bare.bare_json()?.as_bytes())))
    }

    /// The drive of this name.
    pub fn drive_named(&self, name: &str) -> Option<DriveId> {
        self.drives.iter().position(|d| d.name == name).map(|i| DriveId(i as u8))
    }

    /// The plan without the drives whose place `keep` denies, in the order that they have here; the expert that then has no
    /// home, if there is one. A striped expert needs every drive that it lies on.
    pub fn over(&self, keep: &[bool]) -> Result<Self, (LayerId, ExpertId)> {
        let kept = |d: &DriveId| keep.get(d.index()).copied().unwrap_or(false);
        let place = |d: &DriveId| DriveId(keep.iter().take(d.index()).filter(|k| **k).count() as u8);
        let mut plan = self.clone();
        plan.drives = self.drives.iter().zip(keep).filter(|(_, k)| **k).map(|(d, _)| d.clone()).collect();
        for (layer, homes) in &mut plan.layers {
            for (expert, list) in homes.0.iter_mut().enumerate() {
                let cut = self.stripe(list.len()).is_some() && !list.iter().all(kept);
                list.retain(kept);
                list.iter_mut().for_each(|d| *d = place(d));
                if cut || list.is_empty() {
                    return Err((*layer, ExpertId(expert as u16)));
                }
            }
        }
        if plan.drives.len() < self.drives.len() {
            // It was expected of all drives.
            plan.predicted = None;
        }
        Ok(plan)
    }

    /// Copies beyond the first of every expert, over all drives.
    pub fn replica_count(&self) -> usize {
        self.layers.values().flat_map(|l| &l.0).map(|homes| self.copies(homes).saturating_sub(1)).sum()
    }

    /// Every expert has at least one home, homes exist and are distinct.
    pub fn check(&self) -> Result<(), PlanError> {
        let bad = |reason: String| Err(PlanError::Inconsistent(reason));
        if self.drives.is_empty() || self.drives.len() > MAX_DRIVES {
            return bad(format!("a plan needs 1 to {MAX_DRIVES} drives, this one has {}", self.drives.len()));
        }
        for (index, drive) in self.drives.iter().enumerate() {
            if self.drives[..index].iter().any(|d| d.name == drive.name) {
                return bad(format!("drive name `{}` stands twice in the plan", drive.name));
            }
        }
        // The id becomes a folder name on every drive.
        if self.model_id.is_empty() || !self.model_id.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return bad(format!("model id `{}` is not a plain identifier", self.model_id));
        }
        if self.expert_bytes == 0 {
            return bad("the plan's experts have 0 bytes".into());
        }
        if let Shape::Stripe { unit_bytes } = self.shape {
            if unit_bytes == 0 || !unit_bytes.is_multiple_of(UNIT_ALIGN) || unit_bytes > u64::from(u32::MAX) {
                return bad(format!(
                    "a stripe's unit of {unit_bytes} bytes is no multiple of {UNIT_ALIGN} below 4 GiB"
                ));
            }
            let units = self.expert_bytes.div_ceil(unit_bytes);
            if units > MAX_UNITS {
                let least = self.expert_bytes.div_ceil(MAX_UNITS).next_multiple_of(UNIT_ALIGN);
                return bad(format!(
                    "units of {unit_bytes} bytes cut an expert of {} bytes into {units} reads, at most {MAX_UNITS}; give the \
                     policy a `unit` of at least {least}",
                    self.expert_bytes
                ));
            }
        }
        for (layer, homes) in &self.layers {
            if homes.0.is_empty() || homes.0.len() > usize::from(u16::MAX) {
                return bad(format!("layer {} has {} experts", layer.0, homes.0.len()));
            }
            for (expert, list) in homes.0.iter().enumerate() {
                if list.is_empty() {
                    return bad(format!("expert L{}-E{expert} has no home", layer.0));
                }
                for (i, home) in list.iter().enumerate() {
                    if home.index() >= self.drives.len() {
                        return bad(format!(
                            "expert L{}-E{expert} is placed on drive {}, which the plan does not have",
                            layer.0, home.0
                        ));
                    }
                    if list[..i].contains(home) {
                        return bad(format!("expert L{}-E{expert} names drive {} twice", layer.0, home.0));
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            version: PLAN_VERSION,
            model_id: "m".into(),
            store: "/store".into(),
            planner: "full-mirror".into(),
            seed: 0,
            inputs: BTreeMap::new(),
            expert_bytes: 64,
            drives: ["a", "b"].map(|n| PlanDrive { name: n.into(), path: n.into() }).to_vec(),
            shape: Shape::Whole,
            predicted: None,
            layers: [(LayerId(1), LayerHomes(vec![vec![DriveId(0)], vec![DriveId(1), DriveId(0)]]))].into(),
        }
    }

    #[test]
    fn codec_round_trip_and_hash_ignores_paths() {
        let p = plan();
        let back = Plan::parse(&p.to_json().unwrap()).unwrap();
        assert_eq!(p, back);
        let mut moved = p.clone();
        moved.drives[0].path = "/elsewhere".into();
        assert_eq!(p.hash(), moved.hash());
        moved.layers.get_mut(&LayerId(1)).unwrap().0[0] = vec![DriveId(1)];
        assert_ne!(p.hash(), moved.hash());
        assert_eq!(p.on_drive(DriveId(0)).count(), 2);
        assert_eq!(p.replica_count(), 1);
    }

    #[test]
    fn a_plan_over_fewer_drives_keeps_homes_or_names_who_lost_them() {
        let p = plan();
        assert_eq!(p.over(&[true, true]).unwrap().hash(), p.hash());
        let first = p.over(&[true, false]).unwrap();
        assert_eq!((first.drives.len(), first.layers[&LayerId(1)].0.clone()), (1, vec![vec![DriveId(0)]; 2]));
        first.check().unwrap();
        assert_eq!(p.over(&[false, true]).unwrap_err(), (LayerId(1), ExpertId(0)));
        let mut both = p.clone();
        both.layers.get_mut(&LayerId(1)).unwrap().0[0] = vec![DriveId(1)];
        let second = both.over(&[false, true]).unwrap();
        assert_eq!(second.layers[&LayerId(1)].0, vec![vec![DriveId(0)]; 2], "ids are those of the new list");
        let mut cut = p.clone();
        cut.shape = Shape::Stripe { unit_bytes: UNIT_ALIGN };
        assert_eq!(cut.over(&[true, false]).unwrap_err(), (LayerId(1), ExpertId(1)), "half of a stripe is no expert");
    }

    #[test]
    fn plans_of_version_1_are_read_and_keep_their_hash() {
        let text = r#"{"version":1,"model_id":"m","store":"/s","planner":"round-robin","seed":0,"inputs":{},
            "expert_bytes":64,"drives":[{"name":"a","path":"/a"}],"shape":{"kind":"whole"},"layers":{"1":[[0],[0]]}}"#;
        let plan = Plan::parse(text).unwrap();
        assert_eq!((plan.version, plan.predicted), (1, None));
        let mut judged = plan.clone();
        judged.predicted = Some(Prediction {
            reads: Reads::Split,
            barrier_ns: 3,
            bound_layout_ns: 3,
            bound_drives_ns: 2,
            best_layout_ns: 2,
        });
        assert_eq!(judged.hash(), plan.hash());
        assert_eq!(Plan::parse(&judged.to_json().unwrap()).unwrap(), judged);
    }

    #[test]
    fn a_striped_expert_lies_on_its_drives_once() {
        let mut p = plan();
        (p.shape, p.expert_bytes) = (Shape::Stripe { unit_bytes: 4096 }, 9792);
        let keys = |p: &Plan, d| p.pieces_on(DriveId(d)).map(|k| k.to_string()).collect::<Vec<_>>();
        assert_eq!(keys(&p, 0), ["L1-E0", "L1-E1 (column 1 of 2)"], "one home: whole");
        assert_eq!(keys(&p, 1), ["L1-E1 (column 0 of 2)"]);
        assert_eq!((p.bytes_on(DriveId(0)), p.bytes_on(DriveId(1)), p.replica_count()), (9792 + 4096, 5696, 0));
        p.shape = Shape::Stripe { unit_bytes: 16384 };
        assert_eq!(keys(&p, 0), ["L1-E0"], "a column without bytes is nowhere");
        p.expert_bytes = 9_000_000;
        p.shape = Shape::Stripe { unit_bytes: 4096 };
        let text = Plan::parse(&p.to_json().unwrap()).unwrap_err().to_string();
        assert!(text.contains("2198 reads, at most 255") && text.contains("at least 36864"), "{text}");
        p.shape = Shape::Stripe { unit_bytes: 5000 };
        assert!(Plan::parse(&p.to_json().unwrap()).unwrap_err().to_string().contains("5000"));
    }

    #[test]
    fn contradictions_are_named() {
        let broken = |change: &dyn Fn(&mut Plan)| {
            let mut p = plan();
            change(&mut p);
            Plan::parse(&p.to_json().unwrap()).unwrap_err().to_string()
        };
        assert!(broken(&|p| p.version = 9).contains("version 9"));
        assert!(broken(&|p| p.drives[1].name = "a".into()).contains("`a` stands twice"));
        let set = |homes: Vec<DriveId>| {
            move |p: &mut Plan| {
                if let Some(l) = p.layers.get_mut(&LayerId(1)) {
                    l.0[1] = homes.clone();
                }
            }
        };
        assert!(broken(&set(vec![])).contains("L1-E1 has no home"));
        assert!(broken(&set(vec![DriveId(7)])).contains("drive 7"));
        assert!(broken(&set(vec![DriveId(1), DriveId(1)])).contains("twice"));
        assert!(Plan::parse("{}").is_err());
        let with_typo = plan().to_json().unwrap().replace("\"seed\"", "\"sede\"");
        assert!(Plan::parse(&with_typo).unwrap_err().to_string().contains("sede"));
    }
}
