//! Who gets how many slots of the one budget, worked out before the run: a reserve that only demand takes, then the cache,
//! then prefetch. What does not fit is an error that says which number to change.

use super::open::OpenedDrive;
use super::options::{PrefetchPolicy, ReaderError, ReaderOptions};
use crate::io::{Signal, Slab};
use crate::knob::{self, Knob};
use crate::layout::plan::{Plan, Shape};
use crate::sys::limits::page_bytes;
use std::sync::Arc;

/// Slots of the cache when a test makes an absent cache lie.
const LYING_SLOTS: u64 = 4;

/// The slab, and who may take how many of its slots.
pub(super) struct Budget {
    pub(super) slab: Slab,
    /// Experts that may stay.
    pub(super) cache: u32,
    /// Slots that prefetch may hold.
    pub(super) ahead: u32,
}

/// What this reader cannot do, found before the run.
pub(super) fn check_plan(plan: &Plan, options: &ReaderOptions) -> Result<(), ReaderError> {
    if let (Shape::Stripe { .. }, true) = (plan.shape, prefetches(options)) {
        return Err(ReaderError::Option(
            "--prefetch reads experts whole from one drive, and the plan stripes them; use --prefetch none, or a plan with \
             whole experts"
                .into(),
        ));
    }
    for (layer, homes) in &plan.layers {
        for (expert, homes) in homes.0.iter().enumerate() {
            let distinct = homes.iter().fold(0u64, |mask, d| mask | 1u64.checked_shl(u32::from(d.0)).unwrap_or(0));
            let known = homes.iter().all(|d| d.index() < plan.drives.len());
            if homes.is_empty() || !known || distinct.count_ones() as usize != homes.len() {
                let reason = format!("{layer}-E{expert} has no home, a home twice, or one beyond the plan's drives");
                return Err(ReaderError::Plan(reason));
            }
        }
    }
    Ok(())
}

/// Bytes of one read: the payload rounded up to the alignment of the drive's files.
pub(super) fn read_bytes(plan: &Plan, opened: &OpenedDrive) -> Result<u32, ReaderError> {
    let align = opened.alignment.map_or(1, |a| u64::from(a.offset_bytes));
    let bytes = plan.expert_bytes.checked_next_multiple_of(align).and_then(|b| u32::try_from(b).ok());
    bytes.filter(|&b| b > 0).ok_or_else(|| {
        ReaderError::Plan(format!("experts of {} bytes are not within 1 byte to 4 GiB", plan.expert_bytes))
    })
}

/// Bytes of a slot.
fn slot_bytes(plan: &Plan, drives: &[OpenedDrive]) -> Result<u64, ReaderError> {
    let mut largest = 0;
    for drive in drives {
        let memory_align = drive.alignment.map_or(1, |a| u64::from(a.memory_bytes));
        if memory_align > page_bytes() {
            let (name, page) = (&drive.name, page_bytes());
            return Err(ReaderError::Option(format!(
                "drive `{name}` wants buffers aligned to {memory_align} bytes, slots are aligned to {page}"
            )));
        }
        largest = largest.max(u64::from(read_bytes(plan, drive)?));
    }
    Ok(Slab::slot_size(largest).unwrap_or(u64::MAX))
}

/// How many slots there are, and who may take how many of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotas {
    /// All slots.
    pub slots: u32,
    /// Experts that may stay.
    pub cache: u32,
    /// Slots that prefetch may hold.
    pub ahead: u32,
}

/// Slots of `slot_bytes` for `plan`: as many as the budget holds and anything could use, at least one for each drive.
pub fn quotas(plan: &Plan, slot_bytes: u64, options: &ReaderOptions) -> Result<Quotas, ReaderError> {
    let widest = plan.layers.values().map(|l| l.0.len() as u64).max().unwrap_or(1).max(1);
    let experts = plan.layers.values().map(|l| l.0.len() as u64).sum::<u64>();
    let least = plan.drives.len() as u64;
    let buffer_bytes = match knob::skipped(Knob::BufferBytes) {
        true => options.buffer_bytes.saturating_mul(2),
        false => options.buffer_bytes,
    };
    let fits = buffer_bytes / slot_bytes.max(1);
    if fits < least {
        let needed = slot_bytes.saturating_mul(least);
        return Err(ReaderError::Option(format!(
            "--buffer-bytes {} holds {fits} experts of {slot_bytes} bytes; it needs one for each of {least} drives: at \
             least {needed}",
            options.buffer_bytes,
        )));
    }
    let reserve = match options.demand_reserve {
        0 => widest,
        experts => widest.min(u64::from(experts)),
    };
    let reserve = reserve.max(least);
    let cache = cache_slots(options, slot_bytes, reserve, fits)?.min(experts);
    // Given-up reads keep their slots for a while, so demand never uses more than experts of the widest layer twice over.
    let most = widest.saturating_mul(2).max(least) + cache;
    let ahead = match prefetches(options) {
        false => 0,
        true => ahead_slots(options, slot_bytes, widest, reserve + cache, fits)?,
    };
    let slots = u32::try_from(fits.min(most + ahead)).unwrap_or(u32::MAX);
    let quota = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Ok(Quotas { slots, cache: quota(cache), ahead: quota(ahead) })
}

/// The slab, cut as [`quotas`] say.
pub(super) fn make_budget(
    plan: &Plan,
    drives: &[OpenedDrive],
    options: &ReaderOptions,
    signal: &Arc<Signal>,
) -> Result<Budget, ReaderError> {
    let slot_bytes = slot_bytes(plan, drives)?;
    let Quotas { slots, cache, ahead } = quotas(plan, slot_bytes, options)?;
    Ok(Budget { slab: Slab::new(slots, slot_bytes, Arc::clone(signal))?, cache, ahead })
}

/// Whether this reader has a second pool.
pub(super) fn prefetches(options: &ReaderOptions) -> bool {
    options.prefetch != PrefetchPolicy::None || knob::forced(Knob::Prefetch)
}

fn cache_slots(options: &ReaderOptions, slot_bytes: u64, reserve: u64, fits: u64) -> Result<u64, ReaderError> {
    let asked = options.cache_bytes;
    if asked == 0 {
        return Ok(if knob::forced(Knob::CacheBytes) { LYING_SLOTS.min(fits.saturating_sub(reserve)) } else { 0 });
    }
    let slots = asked / slot_bytes;
    if slots == 0 {
        return Err(ReaderError::Option(format!(
            "--cache-bytes {asked} holds no expert: a slot has {slot_bytes} bytes; give at least that, or 0 for no cache"
        )));
    }
    if reserve + slots > fits {
        let (buffer, left) = (options.buffer_bytes, fits.saturating_sub(reserve) * slot_bytes);
        let needed = (reserve + slots) * slot_bytes;
        return Err(ReaderError::Option(format!(
            "--cache-bytes {asked} is part of --buffer-bytes {buffer}, of which {reserve} slots of {slot_bytes} bytes are \
             kept for demand: give --cache-bytes {left} or less, or --buffer-bytes {needed} or more"
        )));
    }
    let slots = if knob::skipped(Knob::CacheBytes) { slots + 1 } else { slots };
    Ok(slots)
}

fn ahead_slots(
    options: &ReaderOptions,
    slot_bytes: u64,
    widest: u64,
    taken: u64,
    fits: u64,
) -> Result<u64, ReaderError> {
    if fits <= taken {
        let (buffer, needed) = (options.buffer_bytes, (taken + 1) * slot_bytes);
        return Err(ReaderError::Option(format!(
            "--buffer-bytes {buffer} holds {fits} slots of {slot_bytes} bytes, and {taken} are kept for demand and cache: \
             nothing is left for --prefetch {}; give at least {needed}, or --prefetch none",
            options.prefetch.name()
        )));
    }
    let each = match options.prefetch_experts {
        0 => widest,
        most => widest.min(u64::from(most)),
    };
    // One layer more than are looked ahead: the reads of one may still be on their way while the next is guessed.
    let useful = each.saturating_mul(u64::from(options.prefetch_depth) + 1);
    Ok(useful.min(fits - taken))
}
