//! Evidence for the settings of the reader: layout, replicas, dispatch, depths, buffers, direct I/O, pace.

use super::evidence::{Case, Judged, Verdict, limit, on_off, switch};
use super::guards::MAX_RESIDENT_SHARE;
use crate::drive::emulated_link::EmulatedLink;
use crate::ids::DriveId;
use crate::io::EngineKind;
use crate::io::paced::LinkUse;
use crate::layout::plan::Shape;
use crate::reader::{DispatchPolicy, DriveCounters, KnownRate, ReaderCounters};

/// A run whose emulated reads overran their deadline more often than this share is rejected (measuring.md section 7).
pub const MAX_OVERRUN_SHARE: f64 = 0.01;
/// Largest median error of an emulated pace against its model (measuring.md section 3).
pub const MAX_PACE_ERROR: f64 = 0.03;
/// Share of a read-through-the-cache run's extents that must be in the page cache afterwards.
const MIN_CACHED_SHARE: f64 = 0.01;

const NOTHING_STREAMED: &str = "nothing streamed";

fn unseen(asked: impl Into<String>) -> Judged {
    (asked.into(), Verdict::Unverified, NOTHING_STREAMED.into())
}

fn names(counters: &ReaderCounters, pick: impl Fn(usize) -> bool) -> Vec<&str> {
    counters.drives.iter().enumerate().filter(|(i, _)| pick(*i)).map(|(_, d)| d.name.as_str()).collect()
}

/// Every drive of the plan served reads, and none that the plan does not place experts on. A drive that was asked and lost before it gave
/// anything was part of the layout too: its reads are on record as failed and moved, with the event that ended it. One whose reads
/// failed without that leaves it open.
pub(super) fn layout(case: &Case<'_>) -> Judged {
    let Some((plan, _)) = case.streamed else { return unseen("no plan") };
    let asked = format!("{} over {} drives", plan.planner, plan.drives.len());
    let Some(counters) = &case.seen.reader else {
        return (asked, Verdict::Contradicted, "no drive was read".into());
    };
    let holds = |i: usize| plan.pieces_on(DriveId(i as u8)).next().is_some();
    let read = |i: usize| counters.drives.get(i).is_some_and(|d| d.reads > 0);
    let idle: Vec<&DriveCounters> =
        counters.drives.iter().enumerate().filter(|(i, _)| holds(*i) && !read(*i)).map(|(_, d)| d).collect();
    let astray = names(counters, |i| !holds(i) && read(i));
    if counters.drives.iter().all(|d| d.reads == 0) {
        return (asked, Verdict::Contradicted, "no drive served a read".into());
    }
    if !astray.is_empty() {
        return (asked, Verdict::Contradicted, format!("{} served reads without holding experts", astray.join(", ")));
    }
    let (lost, idle): (Vec<&DriveCounters>, Vec<&DriveCounters>) =
        idle.into_iter().partition(|d| d.errors + d.timeouts > 0);
    if !idle.is_empty() {
        let idle: Vec<&str> = idle.iter().map(|d| d.name.as_str()).collect();
        return (asked, Verdict::Contradicted, format!("{} served no read", idle.join(", ")));
    }
    if let Some(d) = lost.iter().find(|d| d.degraded == 0 || d.moved == 0) {
        let seen = format!("{}: none of its reads came, {} failed, {} moved", d.name, d.errors + d.timeouts, d.moved);
        return (asked, Verdict::Unverified, format!("{seen}, and it was not left alone (see `trouble`)"));
    }
    if let Shape::Stripe { .. } = plan.shape {
        return striped_layout(asked, counters);
    }
    let shares: Vec<String> = counters.drives.iter().map(|d| format!("{} {}", d.name, d.reads)).collect();
    let mut seen = format!("reads: {}", shares.join(", "));
    for d in lost {
        let failed = d.errors + d.timeouts;
        seen.push_str(&format!("; {} was lost at its first read, {failed} failed and {} moved", d.name, d.moved));
    }
    (asked, Verdict::Proved, seen)
}

/// Every drive delivered as many bytes as its columns of the experts that were delivered have.
fn striped_layout(asked: String, counters: &ReaderCounters) -> Judged {
    // What was given up or failed may have delivered parts of experts that never became whole.
    let lost: u64 = counters.drives.iter().map(|d| d.errors + d.cancelled + d.timeouts).sum();
    let wrong = |d: &DriveCounters| d.payload_bytes < d.stripe_bytes || (d.payload_bytes > d.stripe_bytes && lost == 0);
    let rows = counters.drives.iter().map(|d| format!("{} {} of {}", d.name, d.payload_bytes, d.stripe_bytes));
    let seen = format!(
        "{} striped experts in {} reads; bytes read of bytes striped there: {}",
        counters.experts_striped,
        counters.stripe_reads,
        rows.collect::<Vec<_>>().join(", ")
    );
    let sound = counters.experts_striped > 0 && !counters.drives.iter().any(wrong);
    (asked, if sound { Verdict::Proved } else { Verdict::Contradicted }, seen)
}

/// Copies beyond the primary were read, of more than one expert.
pub(super) fn replicas(case: &Case<'_>) -> Judged {
    let Some((plan, _)) = case.streamed else { return unseen("off") };
    let copies = plan.replica_count();
    let asked = if copies == 0 { "off (one home each)".to_string() } else { format!("{copies} replicas") };
    let Some(counters) = &case.seen.reader else { return unseen(asked) };
    let reads: u64 = counters.drives.iter().map(|d| d.non_primary_reads).sum();
    let experts = counters.experts_from_non_primary;
    let seen = format!("{reads} reads of replicas, {experts} different experts");
    let verdict = match (copies, experts) {
        (0, 0) => Verdict::Proved,
        (0, _) => Verdict::Contradicted,
        (_, 2..) => Verdict::Proved,
        (_, _) => Verdict::Unverified,
    };
    let seen = match verdict {
        Verdict::Unverified => format!("{seen}: the extra copies were never needed"),
        _ => seen,
    };
    (asked, verdict, seen)
}

/// The policy's own code chose, had a choice, and chose otherwise than the primary where that is its point.
pub(super) fn dispatch(case: &Case<'_>, asked: DispatchPolicy) -> Judged {
    let name = asked.name().to_string();
    let Some(counters) = &case.seen.reader else { return unseen(name) };
    let c = counters;
    if c.experts_striped > 0 {
        let seen = "every expert is striped, so each drive had to deliver its own blocks and nothing was chosen";
        return (name, Verdict::Unverified, seen.into());
    }
    if c.decisions_with_choice == 0 {
        let seen = "the plan gives every expert one home, so there was nothing to choose between; a plan with replicas \
                    (layouts/full-mirror.toml) would give it a choice";
        return (name, Verdict::Unverified, seen.into());
    }
    let seen =
        format!("{} choices among several homes, {} not the primary", c.decisions_with_choice, c.decisions_not_primary);
    let by_policy = DispatchPolicy::ALL.iter().zip(c.decisions_by_policy);
    let by_other: u64 = by_policy.filter(|(policy, _)| **policy != asked).map(|(_, count)| count).sum();
    if by_other > 0 {
        return (name, Verdict::Contradicted, format!("{seen}; {by_other} were made by another policy"));
    }
    let verdict = match (asked, c.decisions_not_primary) {
        (DispatchPolicy::FirstHit, 0) => Verdict::Proved,
        (DispatchPolicy::FirstHit, _) => Verdict::Contradicted,
        (_, 0) => Verdict::Unverified,
        (_, _) => Verdict::Proved,
    };
    (name, verdict, seen)
}

/// Asked for: experts came in parts from two drives or more, and the parts summed to the expert. Otherwise none did.
pub(super) fn split(case: &Case<'_>, dispatch: DispatchPolicy) -> Judged {
    let asked = dispatch == DispatchPolicy::Split;
    let Some(c) = &case.seen.reader else { return unseen(on_off(asked)) };
    let mut seen = format!("{} experts in {} parts, {} barriers", c.experts_split, c.parts, c.barriers_split);
    let verdict = match (asked, c.experts_split) {
        _ if c.part_sum_errors > 0 => {
            seen = format!("{seen}; {} experts whose parts do not sum to the expert", c.part_sum_errors);
            Verdict::Contradicted
        }
        (true, 0) => {
            seen.push_str(": no cut was worth it, or there was one home each");
            Verdict::Unverified
        }
        (true, _) if c.barriers_split == 0 && c.failovers > 0 => {
            seen.push_str(": reads moved, so that parts came from one drive in the end");
            Verdict::Unverified
        }
        (true, _) if c.barriers_split == 0 => Verdict::Contradicted,
        (true, _) | (false, 0) => Verdict::Proved,
        (false, _) => Verdict::Contradicted,
    };
    (on_off(asked), verdict, seen)
}

/// On: the plan's drives that a rate was given for began with it, and choices were made by it before they had taught their
/// own. Off: none began so.
pub(super) fn rates(case: &Case<'_>, asked: &[KnownRate]) -> Judged {
    let Some((plan, _)) = case.streamed else { return unseen(on_off(!asked.is_empty())) };
    let named = plan.drives.iter().filter(|d| asked.iter().any(|r| r.drive == d.name)).count();
    let text = match asked.len() {
        0 => "off".to_string(),
        n => format!("{n} drives known"),
    };
    let Some(c) = &case.seen.reader else { return unseen(text) };
    let (began, chosen) = (c.drives_with_given_rate as usize, c.decisions_by_given_rate);
    let mut seen = format!("{began} drives began with a given rate, {chosen} choices by it");
    let verdict = match (began == named, asked.is_empty(), chosen) {
        (false, _, _) => Verdict::Contradicted,
        (true, true, _) => Verdict::Proved,
        (true, false, 0) => {
            seen.push_str(match named {
                0 => ": the plan has none of these drives",
                _ => ": nothing to choose between, or a policy that does not look at rates",
            });
            Verdict::Unverified
        }
        (true, false, _) => Verdict::Proved,
    };
    (text, verdict, seen)
}

/// On: last reads were asked of a second home. Off: none was.
pub(super) fn hedge(case: &Case<'_>, asked: Option<u16>) -> Judged {
    let text = asked.map_or("off".to_string(), |p| format!("after p{}", f64::from(p) / 10.0));
    let Some(c) = &case.seen.reader else { return unseen(text) };
    let seen = format!("{} issued, {} won, {} cancelled", c.hedges_issued, c.hedges_won, c.hedges_cancelled);
    let verdict = match (asked.is_some(), c.hedges_issued) {
        (true, 0) => Verdict::Unverified,
        (true, _) | (false, 0) => Verdict::Proved,
        (false, _) => Verdict::Contradicted,
    };
    (text, verdict, seen)
}

/// The engine's own code finished every read, and no other engine's did.
pub(super) fn engine(case: &Case<'_>, asked: EngineKind) -> Judged {
    let name = asked.to_string();
    let Some(counters) = &case.seen.reader else { return unseen(name) };
    let engines = || counters.drives.iter().flat_map(|d| std::iter::once(&d.engine).chain(&d.prefetch_engine));
    let reads = |kind| engines().map(|e| e.work.reads_of(kind)).sum::<u64>();
    let done: Vec<(EngineKind, u64)> =
        EngineKind::ALL.iter().map(|&kind| (kind, reads(kind))).filter(|(_, n)| *n > 0).collect();
    let seen: Vec<String> = done.iter().map(|(kind, n)| format!("{kind} {n}")).collect();
    let verdict = match done.as_slice() {
        [] => Verdict::Unverified,
        [(kind, _)] if *kind == asked => Verdict::Proved,
        _ => Verdict::Contradicted,
    };
    (name, verdict, format!("reads finished by: {}", seen.join(", ")))
}

/// On: every drive's ring has the kernel's submission thread. Off: none has.
pub(super) fn sqpoll(case: &Case<'_>, asked: bool) -> Judged {
    let Some(counters) = &case.seen.reader else { return unseen(on_off(asked)) };
    let threads = counters.drives.iter().filter(|d| d.engine.work.sq_thread != 0).count();
    let verdict = if asked { switch(true, threads == counters.drives.len()) } else { switch(false, threads > 0) };
    (on_off(asked), verdict, format!("{threads} of {} rings have a submission thread", counters.drives.len()))
}

/// Reads in flight reached the depth on some drive, reads waited for it, and it was exceeded on none.
pub(super) fn queue_depth(case: &Case<'_>, asked: u32) -> Judged {
    let Some(counters) = &case.seen.reader else { return unseen(asked.to_string()) };
    let deepest = counters.drives.iter().map(|d| d.engine.max_in_flight).max().unwrap_or(0);
    let waited: u64 = counters.drives.iter().map(|d| d.engine.waited).sum();
    let asked_depth = u64::from(asked);
    let verdict = limit(deepest >= asked_depth, waited > 0, deepest > asked_depth);
    let mut seen = format!("at most {deepest} in flight on a drive, {waited} reads waited");
    if verdict == Verdict::Unverified {
        seen.push_str(": not binding");
    }
    (asked.to_string(), verdict, seen)
}

/// All slots were in use and reads waited for one; more slots than the budget allows contradict.
pub(super) fn buffer_bytes(case: &Case<'_>, asked: u64) -> Judged {
    let Some(counters) = &case.seen.reader else { return unseen(asked.to_string()) };
    let (slots, used) = (counters.slots, counters.max_slots_used);
    let held = u64::from(slots).saturating_mul(counters.slot_bytes);
    let verdict = limit(used >= slots, counters.slot_waits > 0, held > asked);
    let mut seen = format!("{used} of {slots} slots ({held} bytes) used, {} reads waited", counters.slot_waits);
    if verdict == Verdict::Unverified {
        seen.push_str(": not binding");
    }
    (asked.to_string(), verdict, seen)
}

/// Direct: the files report an alignment and the page cache stayed empty. Off: what was read is in the page cache.
pub(super) fn direct(case: &Case<'_>, asked: bool) -> Judged {
    let asked_text = on_off(asked);
    let Some(counters) = &case.seen.reader else { return unseen(asked_text) };
    let buffered = names(counters, |i| counters.drives[i].direct.is_none());
    if asked && !buffered.is_empty() {
        let seen = format!("{} was read through the page cache: no direct I/O there", buffered.join(", "));
        return (asked_text, Verdict::Contradicted, seen);
    }
    let Some((before, after)) = case.seen.residency else {
        return (asked_text, Verdict::Unverified, "this kernel does not tell what is in the page cache".into());
    };
    let per_cent = |share: f64| format!("{:.1} %", share * 100.0);
    let seen = format!("in the page cache {} before, {} after", per_cent(before.share()), per_cent(after.share()));
    let verdict = match (asked, before.share() <= MAX_RESIDENT_SHARE, after.share()) {
        (true, true, after) if after <= MAX_RESIDENT_SHARE => Verdict::Proved,
        (true, true, _) => Verdict::Contradicted,
        (true, false, _) => Verdict::Unverified,
        (false, _, after) if after >= MIN_CACHED_SHARE && !buffered.is_empty() => Verdict::Proved,
        (false, _, _) => Verdict::Contradicted,
    };
    (asked_text, verdict, seen)
}

/// Every expert that a drive delivered was checked, or none.
pub(super) fn verify_digests(case: &Case<'_>, asked: bool) -> Judged {
    let Some(counters) = &case.seen.reader else { return unseen(on_off(asked)) };
    let checked: u64 = counters.drives.iter().map(|d| d.digests_checked).sum();
    let reads: u64 = counters.drives.iter().map(|d| d.reads).sum();
    // An expert that came in parts is checked once, when it is whole.
    let in_parts = counters.parts + counters.stripe_reads;
    let experts = reads.saturating_sub(in_parts) + counters.experts_split + counters.experts_striped;
    let verdict = match asked {
        true if checked >= experts && experts > 0 => Verdict::Proved,
        true => Verdict::Contradicted,
        false => switch(false, checked > 0),
    };
    (on_off(asked), verdict, format!("{checked} digests checked, {experts} experts delivered"))
}

/// Something waited so long.
pub(super) fn read_timeout(case: &Case<'_>, asked_ms: u64) -> Judged {
    let Some(counters) = &case.seen.reader else { return unseen(format!("{asked_ms} ms")) };
    let timeouts: u64 = counters.drives.iter().map(|d| d.timeouts).sum();
    let verdict = if timeouts > 0 { Verdict::Proved } else { Verdict::Unverified };
    let seen = if timeouts > 0 { format!("{timeouts} reads given up") } else { "never reached: not binding".into() };
    (format!("{asked_ms} ms"), verdict, seen)
}

/// On: every drive's reads crossed its link, and on each link some were delayed by those of another drive. Off: none did.
pub(super) fn link(case: &Case<'_>) -> Judged {
    let Some((_, mounts)) = case.streamed else { return unseen("off") };
    let asked: Vec<Option<EmulatedLink>> = mounts.iter().map(|m| m.emulate.and_then(|e| e.link)).collect();
    let mut links: Vec<EmulatedLink> = Vec::new();
    for link in asked.iter().flatten() {
        if !links.contains(link) {
            links.push(*link);
        }
    }
    let drives_on = |link: &EmulatedLink| asked.iter().flatten().filter(|l| *l == link).count();
    let text: Vec<String> = links.iter().map(|l| format!("{} ({} drives)", l.name.as_str(), drives_on(l))).collect();
    let text = if text.is_empty() { "off".to_string() } else { text.join(", ") };
    let Some(c) = &case.seen.reader else { return unseen(text) };
    let uses: Vec<Option<LinkUse>> = c.drives.iter().map(|d| d.pace.as_ref().and_then(|p| p.link)).collect();
    let wrong = |(i, asked): (usize, &Option<EmulatedLink>)| {
        let seen = uses.get(i).copied().flatten();
        (seen.map(|u| u.name) != asked.map(|l| l.name)).then(|| mounts[i].name.as_str())
    };
    let astray: Vec<&str> = asked.iter().enumerate().filter_map(wrong).collect();
    if !astray.is_empty() {
        return (text, Verdict::Contradicted, format!("not on the link asked for: {}", astray.join(", ")));
    }
    if links.is_empty() {
        return (text, Verdict::Proved, "no drive shared a link".into());
    }
    let sums = |link: &EmulatedLink| {
        let on = uses.iter().flatten().filter(|u| u.name == link.name);
        on.fold((0, 0), |(all, behind), u| (all + u.crossed, behind + u.behind_others))
    };
    let lines: Vec<String> = links
        .iter()
        .map(|l| (l, sums(l)))
        .map(|(l, (all, behind))| {
            format!("{}: {all} reads crossed, {behind} delayed by another drive's", l.name.as_str())
        })
        .collect();
    let mut seen = lines.join("; ");
    let bound = links.iter().all(|l| sums(l).1 > 0);
    if !bound {
        seen.push_str(": not binding");
    }
    (text, if bound { Verdict::Proved } else { Verdict::Unverified }, seen)
}

/// Emulated drives kept their pace; real ones were not slowed.
pub(super) fn pace(case: &Case<'_>) -> Judged {
    let Some((_, mounts)) = case.streamed else { return unseen("off") };
    let emulated = mounts.iter().filter(|m| m.emulate.is_some()).count();
    let asked = match emulated {
        0 => "off".to_string(),
        n => format!("{n} drives emulated"),
    };
    let Some(counters) = &case.seen.reader else { return unseen(asked) };
    let mut faults = Vec::new();
    let (mut late, mut off, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    for (mount, drive) in mounts.iter().zip(&counters.drives) {
        match (&mount.emulate, &drive.pace) {
            (None, None) => {}
            (None, Some(_)) => faults.push(format!("{} was paced although it is real", drive.name)),
            (Some(_), None) => faults.push(format!("{} was not paced", drive.name)),
            (Some(_), Some(p)) if p.reads == 0 => {}
            (Some(_), Some(p)) => {
                let (over, error) = (p.overrun_share(), p.error_p50());
                let line = |share: f64| format!("{} {:.1} %", drive.name, share * 100.0);
                match (over > MAX_OVERRUN_SHARE, error > MAX_PACE_ERROR) {
                    (true, _) => late.push(line(over)),
                    (_, true) => off.push(line(error)),
                    _ => kept.push(format!("{} {:.2} %/{:.2} %", drive.name, error * 100.0, over * 100.0)),
                }
            }
        }
    }
    if !late.is_empty() {
        let (list, limit) = (late.join(", "), MAX_OVERRUN_SHARE * 100.0);
        faults.push(format!(
            "reads that outlasted their deadline on the backing disk: {list} (limit {limit:.0} %); it is too slow, or \
             this machine too busy, for this pace"
        ));
    }
    if !off.is_empty() {
        let (list, limit) = (off.join(", "), MAX_PACE_ERROR * 100.0);
        faults.push(format!("median error of the pace: {list} (limit {limit:.0} %); this machine is too busy"));
    }
    if !faults.is_empty() {
        return (asked, Verdict::Contradicted, faults.join("; "));
    }
    match emulated {
        0 => (asked, Verdict::Proved, "no read was paced".into()),
        _ if kept.is_empty() => (asked, Verdict::Unverified, "no emulated drive was read".into()),
        _ => (asked, Verdict::Proved, format!("median error/overruns: {}", kept.join(", "))),
    }
}
