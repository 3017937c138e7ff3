//! What a layout will cost: mean barrier times and their bounds, by layer, on barriers of a heat. Used to predict a plan
//! (on barriers drawn afresh) and to judge one (on real rows that the plan was not made from). Pure.

use super::drives::DriveSet;
use super::level::{LevelTable, Reads};
use super::plan::{MAX_DRIVES, Plan, PlanError, Prediction};
use super::planner::layout_of;
use super::training::{LayerTraining, Rows, Training};
use super::worked;
use crate::ids::{ExpertId, LayerId};
use crate::stats::SplitMix64;

/// Barriers drawn for each layer.
const DRAWN: usize = 1000;

/// Where experts lie.
pub(super) enum Layout {
    /// Whole, on the drives of a bit mask, by layer and expert.
    Homes(Vec<Vec<u8>>),
    /// In stripes, as the plan says.
    Stripes,
}

/// One layer's mean barrier, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerCost {
    /// The layer.
    pub layer: LayerId,
    /// With the plan's homes, read as well as the kind of reads allows.
    pub barrier_ns: f64,
    /// With the plan's homes and reads split at will.
    pub bound_layout_ns: f64,
    /// If every expert were on every drive and reads split at will.
    pub bound_drives_ns: f64,
    /// If every expert were on every drive, with the kind of reads there is.
    pub best_layout_ns: f64,
    /// Experts read.
    pub width: f64,
    /// Barriers per token that read anything.
    pub mass: f64,
}

/// A layout's cost on a set of barriers.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// By layer, in the plan's order.
    pub layers: Vec<LayerCost>,
}

impl Cost {
    fn mean(&self, of: impl Fn(&LayerCost) -> f64) -> f64 {
        let mass: f64 = self.layers.iter().map(|l| l.mass).sum();
        if mass == 0.0 { 0.0 } else { self.layers.iter().map(|l| of(l) * l.mass).sum::<f64>() / mass }
    }

    /// Mean barrier, nanoseconds.
    pub fn barrier_ns(&self) -> f64 {
        self.mean(|l| l.barrier_ns)
    }

    /// Mean of the bound with every expert on every drive.
    pub fn bound_drives_ns(&self) -> f64 {
        self.mean(|l| l.bound_drives_ns)
    }

    /// Mean barrier over mean `bound_drives`: no layout is below 1.
    pub fn ratio(&self) -> f64 {
        let bound = self.bound_drives_ns();
        if bound == 0.0 { 1.0 } else { self.barrier_ns() / bound }
    }

    /// The prediction that a plan carries.
    pub fn prediction(&self, reads: Reads) -> Prediction {
        Prediction {
            reads,
            barrier_ns: self.barrier_ns().round() as u64,
            bound_layout_ns: self.mean(|l| l.bound_layout_ns).round() as u64,
            bound_drives_ns: self.bound_drives_ns().round() as u64,
            best_layout_ns: self.mean(|l| l.best_layout_ns).round() as u64,
        }
    }

    /// The layers with the slowest barriers, slowest first.
    pub fn slowest(&self, count: usize) -> Vec<LayerCost> {
        let mut layers = self.layers.clone();
        layers.sort_by(|a, b| (b.barrier_ns * b.mass).total_cmp(&(a.barrier_ns * a.mass)).then(a.layer.cmp(&b.layer)));
        layers.truncate(count);
        layers
    }
}

/// Time of the striped experts `row` of a layer: every drive delivers its columns of them.
fn striped_ns(set: &DriveSet, plan: &Plan, layer: LayerId, row: &[u16]) -> f64 {
    let mut bytes = [0u64; MAX_DRIVES];
    for &expert in row {
        let homes = plan.homes(layer, ExpertId(expert)).unwrap_or(&[]);
        let stripe = plan.stripe(homes.len());
        for (column, home) in homes.iter().enumerate() {
            bytes[home.index()] += stripe.map_or(plan.expert_bytes, |s| s.column_bytes(column as u8));
        }
    }
    let share = |d: usize| bytes[d] as f64;
    let busy = set.drives.iter().enumerate().filter(|(d, _)| bytes[*d] > 0);
    let alone = busy.map(|(d, model)| model.fixed_ns as f64 + share(d) / model.rate_bytes_per_s * 1e9);
    let uplinks = set.uplinks.iter().enumerate().map(|(u, rate)| {
        let members = set.drives.iter().enumerate().filter(|(_, m)| m.uplink == Some(u));
        members.map(|(d, _)| share(d)).sum::<f64>() / rate * 1e9
    });
    let total = (0..set.drives.len()).map(share).sum::<f64>();
    let together = set.together_bytes_per_s.map(|r| total / r * 1e9);
    alone.chain(uplinks).chain(together).fold(0.0, f64::max)
}

/// The cost of `plan` on the rows of `training` as they are.
pub fn judge(training: &Training, plan: &Plan, set: &DriveSet, reads: Reads) -> Result<Cost, PlanError> {
    cost(training, plan, set, reads, |_, l| (l.rows.clone(), l.row_weights()))
}

/// The cost of `plan` on barriers drawn from `training` with a seed of their own.
pub fn predict(training: &Training, plan: &Plan, set: &DriveSet, reads: Reads, seed: u64) -> Result<Cost, PlanError> {
    cost(training, plan, set, reads, |rank, l| {
        let mut rng = SplitMix64::new(seed ^ 0x7072_6564_6963_7400 ^ rank as u64);
        let rows = l.draw(DRAWN, &mut rng);
        let weights = vec![1.0; rows.len()];
        (rows, weights)
    })
}

fn cost(
    training: &Training,
    plan: &Plan,
    set: &DriveSet,
    reads: Reads,
    rows: impl Fn(usize, &LayerTraining) -> (Rows, Vec<f64>),
) -> Result<Cost, PlanError> {
    let names: Vec<&str> = plan.drives.iter().map(|d| d.name.as_str()).collect();
    set.check(&names)?;
    let split = LevelTable::new(set, Reads::Split, plan.expert_bytes, training.widest)?;
    let as_read = match reads {
        Reads::Split => split.clone(),
        Reads::Whole => LevelTable::new(set, Reads::Whole, plan.expert_bytes, training.widest)?,
    };
    let layout = layout_of(plan);
    worked::expect(training.layers.len());
    let time = |table: &LevelTable, rank: usize, layer: LayerId, row: &[u16]| match &layout {
        Layout::Homes(masks) => f64::from(table.barrier_ns(row.iter().map(|&e| masks[rank][usize::from(e)]))),
        Layout::Stripes => striped_ns(set, plan, layer, row),
    };
    let one = |(rank, (layer, training)): (usize, (&LayerId, &LayerTraining))| {
        let (rows, weights) = rows(rank, training);
        worked::done(1);
        let sum: f64 = weights.iter().sum();
        let mean = |of: &dyn Fn(&[u16]) -> f64| {
            if sum == 0.0 { 0.0 } else { rows.iter().zip(&weights).map(|(r, w)| of(r) * w).sum::<f64>() / sum }
        };
        LayerCost {
            layer: *layer,
            barrier_ns: mean(&|r| time(&as_read, rank, *layer, r)),
            bound_layout_ns: mean(&|r| time(&split, rank, *layer, r)),
            bound_drives_ns: mean(&|r| f64::from(split.everywhere_ns(r.len()))),
            best_layout_ns: mean(&|r| f64::from(as_read.everywhere_ns(r.len()))),
            width: mean(&|r| r.len() as f64),
            mass: training.mass,
        }
    };
    Ok(Cost { layers: plan.layers.keys().zip(&training.layers).enumerate().map(one).collect() })
}
