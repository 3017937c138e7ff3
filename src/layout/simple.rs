//! Policies that need no search: homes by turn, by hash, everywhere, and by bands of the hottest experts. Pure.

use super::heat::Heat;
use super::plan::{LayerHomes, PlanDrive, PlanError};
use super::planner::Catalog;
use super::policy::{Band, Holds};
use crate::ids::{DriveId, LayerId};
use crate::stats::SplitMix64;

/// The drive that expert `expert` of the `rank`-th layer starts at: layers turn, so that the remainder of
/// experts / drives does not always fall to the first drives.
fn turn(rank: usize, expert: usize, drives: usize) -> usize {
    (expert + rank) % drives
}

/// One copy each, dealt in turn.
pub(super) fn round_robin(rank: usize, experts: usize, drives: usize) -> LayerHomes {
    LayerHomes((0..experts).map(|e| vec![DriveId(turn(rank, e, drives) as u8)]).collect())
}

/// Every drive for every expert; the first of them turns.
pub(super) fn everywhere(rank: usize, experts: usize, drives: usize) -> LayerHomes {
    let homes = |e| (0..drives).map(|d| DriveId(((turn(rank, e, drives) + d) % drives) as u8)).collect();
    LayerHomes((0..experts).map(homes).collect())
}

/// One copy each by weighted rendezvous hashing: every drive draws a number for the expert, scaled by its rate, and the
/// best draw wins. A drive more takes experts from the others and moves none between them.
pub(super) fn hash(layer: LayerId, experts: usize, rates: &[f64], seed: u64) -> LayerHomes {
    let draw = |expert: usize, drive: usize| {
        let key = seed ^ u64::from(layer.0) << 48 ^ (expert as u64) << 16 ^ drive as u64;
        let bits = SplitMix64::new(SplitMix64::new(key).next_u64()).next_u64();
        let unit = ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        -unit.ln() / rates[drive]
    };
    let best = |e: usize| (0..rates.len()).min_by(|&a, &b| draw(e, a).total_cmp(&draw(e, b))).unwrap_or(0);
    LayerHomes((0..experts).map(|e| vec![DriveId(best(e) as u8)]).collect())
}

/// The drive of a name that a policy uses.
pub(super) fn drive_of(drives: &[PlanDrive], name: &str) -> Result<DriveId, PlanError> {
    let at = drives.iter().position(|d| d.name == name).map(|i| DriveId(i as u8));
    at.ok_or_else(|| unknown_drive(name, drives.iter().map(|d| d.name.as_str())))
}

/// What is said about a name that no drive has.
pub(super) fn unknown_drive<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> PlanError {
    PlanError::Inconsistent(format!(
        "the policy names drive `{name}`; the drives are {}: change the policy, or name the drives as it does",
        known.collect::<Vec<_>>().join(", ")
    ))
}

/// The hottest experts of the model, up to each drive's limit.
pub(super) fn bands(
    catalog: &Catalog,
    drives: &[PlanDrive],
    bands: &[Band],
    heat: &Heat,
) -> Result<Vec<LayerHomes>, PlanError> {
    let experts = catalog.experts as usize;
    let mut order: Vec<(u64, usize, usize)> = Vec::with_capacity(experts * catalog.layers.len());
    for (rank, layer) in catalog.layers.iter().enumerate() {
        let mut counts = vec![0u64; experts];
        for own in heat.domains.iter().filter_map(|d| d.layers.get(layer)) {
            counts.iter_mut().zip(&own.counts).for_each(|(a, &b)| *a = a.saturating_add(b));
        }
        order.extend(counts.into_iter().enumerate().map(|(expert, count)| (count, rank, expert)));
    }
    // Equally hot ones spread over layers, not over the first layers.
    order.sort_by(|a, b| b.0.cmp(&a.0).then((a.2, a.1).cmp(&(b.2, b.1))));
    let total: f64 = order.iter().map(|o| o.0 as f64).sum();
    let mut homes = vec![vec![Vec::new(); experts]; catalog.layers.len()];
    for band in bands {
        let drive = drive_of(drives, &band.drive)?;
        let held = match band.holds {
            Holds::All => order.len(),
            Holds::Experts(n) => usize::try_from(n).unwrap_or(usize::MAX),
            Holds::Bytes(bytes) => usize::try_from(bytes / catalog.expert_bytes).unwrap_or(usize::MAX),
            Holds::ReadsPermille(share) => {
                let wanted = total * f64::from(share) / 1000.0;
                let mut sum = 0.0;
                order
                    .iter()
                    .take_while(|o| {
                        let more = sum < wanted;
                        sum += o.0 as f64;
                        more
                    })
                    .count()
            }
        };
        if held > order.len() && matches!(band.holds, Holds::Experts(_)) {
            return Err(PlanError::Inconsistent(format!(
                "the band of drive `{}` holds {held} experts, the model has {}; lower it or say \"all\"",
                band.drive,
                order.len()
            )));
        }
        for &(_, rank, expert) in order.iter().take(held) {
            homes[rank][expert].push(drive);
        }
    }
    let homeless = homes.iter().flatten().filter(|h| h.is_empty()).count();
    if homeless > 0 {
        let bytes = |experts: usize| (experts as u64).saturating_mul(catalog.expert_bytes);
        let reason = format!(
            "the bands leave {homeless} of {} experts without a home; let one of them hold experts = \"all\"",
            order.len()
        );
        let (needs_bytes, has_bytes) = (bytes(order.len()), bytes(order.len() - homeless));
        return Err(PlanError::Room { reason, needs_bytes, has_bytes });
    }
    Ok(homes.into_iter().map(LayerHomes).collect())
}
