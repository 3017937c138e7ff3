//! Evidence for where a model's trunk is, and for the CPUs that threads run on.

use super::affinity::Affinity;
use super::evidence::{Case, Judged, Verdict};
use crate::store::trunk::TrunkResidency;
use crate::sys::affinity::CpuSet;

/// Where the bytes were, by what was done with them: mapped, read into memory, locked there as the kernel says, or read anew
/// in every pass.
pub(super) fn residency(case: &Case<'_>, asked: TrunkResidency) -> Judged {
    let Some(seen) = &case.seen.trunk else {
        return (asked.to_string(), Verdict::Unverified, "no model was run".into());
    };
    let (facts, blocks) = (&seen.facts, seen.blocks.unwrap_or_default());
    let payload = facts.payload_bytes;
    let mut text = Vec::new();
    let mut say = |what: &str, n: u64| {
        if n > 0 {
            text.push(format!("{n} bytes {what}"));
        }
    };
    say("mapped", facts.mapped_bytes);
    say("loaded", facts.loaded_bytes);
    say("locked", facts.locked_bytes);
    say("streamed", blocks.bytes);
    if let Some(kernel) = seen.kernel_locked_bytes.filter(|_| facts.locked_bytes > 0) {
        text.push(format!("the kernel says that {kernel} are locked"));
    }
    if blocks.blocks > 0 {
        let ahead = format!("{} of {} blocks on their way while the one before was used", blocks.ahead, blocks.blocks);
        text.push(format!("{} a pass, {ahead}", seen.pass_bytes));
    }
    let (in_memory, locked, streamed) = (facts.loaded_bytes >= payload, facts.locked_bytes, blocks.bytes);
    let right = match asked {
        TrunkResidency::Mapped => facts.mapped_bytes >= payload && facts.loaded_bytes == 0 && streamed == 0,
        TrunkResidency::Loaded => in_memory && facts.mapped_bytes == 0 && locked == 0 && streamed == 0,
        TrunkResidency::Locked => in_memory && locked >= payload && streamed == 0,
        TrunkResidency::Streamed => streamed > 0 && blocks.blocks == seen.asked_blocks && streamed >= seen.asked_bytes,
    };
    let verdict = match (right, asked, seen.kernel_locked_bytes) {
        (false, ..) => Verdict::Contradicted,
        (true, TrunkResidency::Locked, None) => Verdict::Unverified,
        (true, TrunkResidency::Locked, Some(kernel)) if kernel < locked => Verdict::Contradicted,
        (true, ..) => Verdict::Proved,
    };
    (asked.to_string(), verdict, text.join(", "))
}

/// The kernel says of every thread that it may run where it was asked to, and nowhere else; off, wherever the process may.
pub(super) fn affinity(case: &Case<'_>, asked: &Affinity) -> Judged {
    let Some(seen) = &case.seen.affinity else {
        return (asked.to_string(), Verdict::Unverified, "the system does not say where threads run".into());
    };
    let wanted = |set: &Option<CpuSet>| set.clone().unwrap_or_else(|| seen.allowed.clone());
    let (compute, readers) = (wanted(&asked.compute), wanted(&asked.readers));
    let in_place = seen.compute.iter().all(|s| *s == compute) && seen.readers.iter().all(|s| *s == readers);
    let places = |sets: &[CpuSet]| {
        let mut distinct: Vec<String> = Vec::new();
        sets.iter().map(CpuSet::to_string).for_each(|s| {
            if !distinct.contains(&s) {
                distinct.push(s)
            }
        });
        if distinct.is_empty() { String::new() } else { format!(" on CPU {}", distinct.join(" and ")) }
    };
    let said = format!(
        "{} compute threads{}, {} reader threads{}; allowed are {}",
        seen.compute.len(),
        places(&seen.compute),
        seen.readers.len(),
        places(&seen.readers),
        seen.allowed
    );
    // what is asked to be where it would be anyway proves nothing
    let nobody = asked.readers.is_some() && seen.readers.is_empty();
    let missing = seen.compute.is_empty() || seen.compute.len() < case.seen.thread_chunks.len();
    let verdict = match (in_place, nobody || missing) {
        (false, _) => Verdict::Contradicted,
        (true, true) => Verdict::Unverified,
        (true, false) => Verdict::Proved,
    };
    (asked.to_string(), verdict, said)
}
