//! Makes plans from policies. Pure and deterministic: the same catalogue, drives, policy and seed give the same plan.

use super::plan::{LayerHomes, PLAN_VERSION, Plan, PlanDrive, PlanError, Shape};
use super::policy::Policy;
use crate::ids::{DriveId, LayerId};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What there is to place.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// The model.
    pub model_id: String,
    /// Where its store lies.
    pub store: PathBuf,
    /// Layers with experts.
    pub layers: Vec<LayerId>,
    /// Experts in each of them.
    pub experts: u32,
    /// Payload bytes of one expert.
    pub expert_bytes: u64,
}

/// A way of choosing homes.
pub trait Planner {
    /// The name that the plan carries.
    fn name(&self) -> &'static str;

    /// Homes of each expert of one layer, the primary first; `rank` is the layer's index among the layers with experts.
    fn place(&self, rank: usize, experts: usize, drives: usize) -> LayerHomes;
}

/// One copy each, dealt in turn.
struct RoundRobin;

/// A copy everywhere.
struct FullMirror;

/// The drive that expert `expert` of the `rank`-th layer starts at: layers turn, so that the remainder of
/// experts / drives does not always fall to the first drives.
fn turn(rank: usize, expert: usize, drives: usize) -> usize {
    (expert + rank) % drives
}

impl Planner for RoundRobin {
    fn name(&self) -> &'static str {
        "round-robin"
    }

    fn place(&self, rank: usize, experts: usize, drives: usize) -> LayerHomes {
        LayerHomes((0..experts).map(|e| vec![DriveId(turn(rank, e, drives) as u8)]).collect())
    }
}

impl Planner for FullMirror {
    fn name(&self) -> &'static str {
        "full-mirror"
    }

    fn place(&self, rank: usize, experts: usize, drives: usize) -> LayerHomes {
        let homes = |e| (0..drives).map(|d| DriveId(((turn(rank, e, drives) + d) % drives) as u8)).collect();
        LayerHomes((0..experts).map(homes).collect())
    }
}

/// The planner of a policy.
pub fn planner(policy: &Policy) -> Box<dyn Planner> {
    match policy {
        Policy::RoundRobin {} => Box::new(RoundRobin),
        Policy::FullMirror {} => Box::new(FullMirror),
    }
}

/// Plans `catalog` over `drives` by `policy`. `inputs` are hashes of what the plan was made from.
pub fn plan(
    catalog: &Catalog,
    drives: &[PlanDrive],
    policy: &Policy,
    seed: u64,
    inputs: BTreeMap<String, String>,
) -> Result<Plan, PlanError> {
    if catalog.layers.is_empty() {
        return Err(PlanError::Inconsistent("the model has no routed experts; there is nothing to place".into()));
    }
    let planner = planner(policy);
    let plan = Plan {
        version: PLAN_VERSION,
        model_id: catalog.model_id.clone(),
        store: catalog.store.clone(),
        planner: planner.name().to_string(),
        seed,
        inputs,
        expert_bytes: catalog.expert_bytes,
        drives: drives.to_vec(),
        shape: Shape::Whole,
        layers: catalog
            .layers
            .iter()
            .enumerate()
            .map(|(rank, &layer)| (layer, planner.place(rank, catalog.experts as usize, drives.len().max(1))))
            .collect(),
    };
    plan.check()?;
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drives(n: usize) -> Vec<PlanDrive> {
        (0..n).map(|i| PlanDrive { name: format!("d{i}"), path: format!("/d{i}").into() }).collect()
    }

    fn catalog(layers: u16, experts: u32) -> Catalog {
        Catalog {
            model_id: "m".into(),
            store: "/s".into(),
            layers: (1..=layers).map(LayerId).collect(),
            experts,
            expert_bytes: 26_112,
        }
    }

    #[test]
    fn k3_on_four_drives_stays_under_four_mebibytes() {
        let plan = plan(&catalog(92, 896), &drives(4), &Policy::FullMirror {}, 0, BTreeMap::new()).unwrap();
        assert!(plan.to_json().unwrap().len() < 4 << 20);
        assert_eq!(plan.replica_count(), 92 * 896 * 3);
    }

    #[test]
    fn a_dense_model_has_nothing_to_place() {
        assert!(plan(&catalog(0, 0), &drives(2), &Policy::RoundRobin {}, 0, BTreeMap::new()).is_err());
    }

    proptest! {
        #[test]
        fn round_robin_balances_every_layer(layers in 1u16..5, experts in 1u32..100, n in 1usize..9) {
            let p = plan(&catalog(layers, experts), &drives(n), &Policy::RoundRobin {}, 0, BTreeMap::new()).unwrap();
            for homes in p.layers.values() {
                let mut count = vec![0usize; n];
                for h in &homes.0 {
                    prop_assert_eq!(h.len(), 1);
                    count[h[0].index()] += 1;
                }
                prop_assert!(count.iter().max().unwrap() - count.iter().min().unwrap() <= 1);
            }
        }

        #[test]
        fn full_mirror_puts_everything_everywhere(experts in 1u32..50, n in 1usize..9) {
            let p = plan(&catalog(2, experts), &drives(n), &Policy::FullMirror {}, 0, BTreeMap::new()).unwrap();
            for d in 0..n {
                prop_assert_eq!(p.on_drive(DriveId(d as u8)).count(), 2 * experts as usize);
            }
        }
    }
}
