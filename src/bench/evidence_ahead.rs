//! Evidence for the settings of prefetch and of the expert cache.

use super::evidence::{Case, Judged, Verdict, limit, on_off};
use crate::decode::guess::GuessesMade;
use crate::reader::{
    CachePolicy, DispatchPolicy, DrivePrefetch, PrefetchCounters, PrefetchPolicy, PrefetchPool, ReadSum, ReaderCounters,
};
use crate::source::guess::GuessCounts;

const NOT_BINDING: &str = ": not binding";

fn unseen(asked: impl Into<String>) -> Judged {
    (asked.into(), Verdict::Unverified, "nothing streamed".into())
}

fn sum(c: &ReaderCounters, pick: impl Fn(&DrivePrefetch) -> ReadSum) -> ReadSum {
    c.drives
        .iter()
        .map(|d| pick(&d.prefetch))
        .fold(ReadSum::default(), |a, b| ReadSum { reads: a.reads + b.reads, bytes: a.bytes + b.bytes })
}

fn guesses(p: &PrefetchCounters) -> u64 {
    p.told + p.same_as_last + p.markov
}

/// Guesses of whoever was asked for, and of anybody else. Those of the decoder reach the reader by one door, so the
/// decoder's own counts say which of its two guessers made them.
fn by_whom(asked: PrefetchPolicy, p: &PrefetchCounters, made: GuessesMade) -> (u64, u64) {
    let (own, not_asked_for) = match asked {
        PrefetchPolicy::None => (0, made.router + made.draft),
        PrefetchPolicy::SameAsLast => (p.same_as_last, made.router + made.draft),
        PrefetchPolicy::Markov => (p.markov, made.router + made.draft),
        PrefetchPolicy::NextRouter => (if made.router > 0 { p.told } else { 0 }, made.draft),
        PrefetchPolicy::Draft => (if made.draft > 0 { p.told } else { 0 }, made.router),
    };
    (own, guesses(p) - own + not_asked_for)
}

/// Guesses came from whoever was asked for, became reads, and each read is accounted for. Off: there was nothing.
pub(super) fn prefetch(case: &Case<'_>, asked: PrefetchPolicy) -> Judged {
    let name = asked.name().to_string();
    let Some(c) = &case.seen.reader else { return unseen(name) };
    let p = &c.prefetch;
    let [issued, withdrawn, useful, late, wasted] =
        [sum(c, |d| d.issued), sum(c, |d| d.withdrawn), sum(c, |d| d.useful), sum(c, |d| d.late), sum(c, |d| d.wasted)];
    let (of_asked, others) = by_whom(asked, p, case.seen.guesses_made);
    let mut seen = format!(
        "{of_asked} guesses, {} reads: {} B useful, {} late, {} wasted; {} withdrawn, {} held back for demand",
        issued.reads, useful.bytes, late.bytes, wasted.bytes, withdrawn.reads, p.held_back
    );
    let by_depth = if asked.is_told() { &case.seen.guesses } else { &p.own_by_depth };
    let quality = by_depth.iter().fold(GuessCounts::default(), |sum, c| sum.plus(*c));
    if quality.guessed > 0 {
        seen.push_str(&format!("; {:.0} % of guessed experts were asked for", quality.hit_rate() * 100.0));
    }
    let ended = withdrawn.bytes + useful.bytes + late.bytes + wasted.bytes;
    let verdict = match asked {
        _ if issued.bytes != ended => {
            seen = format!("{seen}; {} B were issued, and {ended} ended", issued.bytes);
            Verdict::Contradicted
        }
        _ if others > 0 => {
            seen = format!("{seen}; {others} guesses by somebody else");
            Verdict::Contradicted
        }
        PrefetchPolicy::None if issued.reads > 0 => Verdict::Contradicted,
        PrefetchPolicy::None => Verdict::Proved,
        _ if of_asked == 0 || issued.reads == withdrawn.reads => Verdict::Unverified,
        _ => Verdict::Proved,
    };
    (name, verdict, seen)
}

/// The deepest look-ahead is the setting.
pub(super) fn depth(case: &Case<'_>, asked: u32, policy: PrefetchPolicy) -> Judged {
    let text = format!("{asked} layers");
    let Some(c) = &case.seen.reader else { return unseen(text) };
    if policy == PrefetchPolicy::None && guesses(&c.prefetch) == 0 {
        return (text, Verdict::Unverified, "no prefetch".into());
    }
    let deepest = c.prefetch.deepest;
    let verdict = match deepest.cmp(&asked) {
        std::cmp::Ordering::Greater => Verdict::Contradicted,
        std::cmp::Ordering::Equal => Verdict::Proved,
        std::cmp::Ordering::Less => Verdict::Unverified,
    };
    (text, verdict, format!("deepest look-ahead {deepest}"))
}

/// As many guesses for a layer were let through as allowed, and others were not. No limit: none was held up by it.
pub(super) fn experts(case: &Case<'_>, asked: u32) -> Judged {
    let text = if asked == 0 { "all".to_string() } else { asked.to_string() };
    let Some(c) = &case.seen.reader else { return unseen(text) };
    let (most, over) = (c.prefetch.most_experts, c.prefetch.over_experts);
    let mut seen = format!("at most {most} guesses for a layer, {over} left out");
    let verdict = match asked {
        0 if over > 0 => Verdict::Contradicted,
        0 => Verdict::Proved,
        _ => limit(most >= asked, over > 0, most > asked),
    };
    if verdict == Verdict::Unverified {
        seen.push_str(NOT_BINDING);
    }
    (text, verdict, seen)
}

/// Prefetch reads in flight reached the depth on some drive, reads waited for it, and it was exceeded on none.
pub(super) fn queue_depth(case: &Case<'_>, asked: u32) -> Judged {
    let Some(c) = &case.seen.reader else { return unseen(asked.to_string()) };
    let engines = || c.drives.iter().filter_map(|d| d.prefetch_engine.as_ref());
    if engines().next().is_none() {
        return (asked.to_string(), Verdict::Unverified, "no prefetch, or none in a pool of its own".into());
    }
    let deepest = engines().map(|e| e.max_in_flight).max().unwrap_or(0);
    let waited: u64 = engines().map(|e| e.waited).sum();
    let verdict = limit(deepest >= u64::from(asked), waited > 0, deepest > u64::from(asked));
    let mut seen = format!("at most {deepest} prefetch reads in flight on a drive, {waited} waited");
    if verdict == Verdict::Unverified {
        seen.push_str(NOT_BINDING);
    }
    (asked.to_string(), verdict, seen)
}

/// Every read ahead went through the pool asked for. Without guesses none went through either.
pub(super) fn pool(case: &Case<'_>, asked: PrefetchPool, policy: PrefetchPolicy) -> Judged {
    let name = asked.name().to_string();
    let Some(c) = &case.seen.reader else { return unseen(name) };
    let (own, shared) = (c.prefetch.in_own_pool, c.prefetch.in_demands_pool);
    if policy == PrefetchPolicy::None && own + shared == 0 {
        return (name, Verdict::Unverified, "no prefetch".into());
    }
    let (right, wrong) = if asked == PrefetchPool::Own { (own, shared) } else { (shared, own) };
    let verdict = match (right, wrong) {
        (_, 1..) => Verdict::Contradicted,
        (0, 0) => Verdict::Unverified,
        (1.., 0) => Verdict::Proved,
    };
    let behind = c.prefetch.demand_behind;
    (
        name,
        verdict,
        format!("{own} reads in a pool of their own, {shared} in demand's; {behind} demand reads behind them"),
    )
}

/// The policy's own code chose the copies of guessed experts, had a choice, and chose otherwise than the primary where that
/// is its point. Not given, it is that of demand.
pub(super) fn dispatch(
    case: &Case<'_>,
    asked: Option<DispatchPolicy>,
    of_demand: DispatchPolicy,
    prefetch: PrefetchPolicy,
) -> Judged {
    let name = asked.map_or_else(|| format!("as demand ({})", of_demand.name()), |own| own.name().to_string());
    let Some(c) = &case.seen.reader else { return unseen(name) };
    let (p, asked) = (&c.prefetch, asked.unwrap_or(of_demand));
    let all: u64 = p.decisions_by_policy.iter().sum();
    if prefetch == PrefetchPolicy::None && all == 0 {
        return (name, Verdict::Unverified, "no prefetch".into());
    }
    let others = all - p.decisions_by_policy[asked as usize];
    let (choices, not_primary) = (p.decisions_with_choice, p.decisions_not_primary);
    let seen = format!("{choices} reads ahead with a choice among homes, {not_primary} not of the primary");
    if others > 0 {
        return (name, Verdict::Contradicted, format!("{seen}; {others} were chosen by another policy"));
    }
    let verdict = match (asked, choices, not_primary) {
        (DispatchPolicy::FirstHit, _, 1..) => Verdict::Contradicted,
        (DispatchPolicy::FirstHit, 1.., 0) | (_, 1.., 1..) => Verdict::Proved,
        _ => Verdict::Unverified,
    };
    (name, verdict, seen)
}

/// On: it let fewer guesses through at least once. Off: it never did.
pub(super) fn governor(case: &Case<'_>, asked: bool) -> Judged {
    let Some(c) = &case.seen.reader else { return unseen(on_off(asked)) };
    let p = &c.prefetch;
    let mut seen = format!(
        "{} cuts, {} guesses dropped, {} probes; {} demand reads behind prefetch",
        p.governor_cuts, p.guesses_dropped, p.governor_probes, p.demand_behind
    );
    let verdict = match (asked, p.governor_cuts + p.guesses_dropped) {
        (true, 0) => {
            seen.push_str(": nothing to cut");
            Verdict::Unverified
        }
        (true, _) | (false, 0) => Verdict::Proved,
        (false, _) => Verdict::Contradicted,
    };
    (on_off(asked), verdict, seen)
}

/// The cache had hits, was full, and something went or stayed out for it; it never held more. Off: it held nothing.
pub(super) fn cache_bytes(case: &Case<'_>, asked: u64) -> Judged {
    let text = if asked == 0 { "off".to_string() } else { asked.to_string() };
    let Some(c) = &case.seen.reader else { return unseen(text) };
    let k = &c.cache;
    let held = u64::from(k.most_slots) * c.slot_bytes;
    let mut seen = format!(
        "{} hits, {} misses, {} moved in, {} went, {} refused, at most {held} B",
        k.hits, k.misses, k.insertions, k.evictions, k.refused
    );
    let verdict = match asked {
        0 if k.hits + k.insertions > 0 => Verdict::Contradicted,
        0 => Verdict::Proved,
        _ if held > asked => Verdict::Contradicted,
        _ if k.hits == 0 => Verdict::Unverified,
        _ => limit(k.most_slots == k.slots, k.evictions + k.refused + k.busy > 0, false),
    };
    if verdict == Verdict::Unverified {
        seen.push_str(if k.hits == 0 { ": of no use" } else { NOT_BINDING });
    }
    (text, verdict, seen)
}

/// The policy's own code chose who goes or stays out, and, unless it is `lru`, at least once otherwise than `lru`.
pub(super) fn cache_policy(case: &Case<'_>, asked: CachePolicy) -> Judged {
    let name = asked.name().to_string();
    let Some(c) = &case.seen.reader else { return unseen(name) };
    let k = &c.cache;
    if k.slots == 0 {
        return (name, Verdict::Unverified, "no cache".into());
    }
    let choices = k.choices_by_policy[asked as usize];
    let others = k.choices_by_policy.iter().sum::<u64>() - choices;
    let mut seen = format!("{choices} choices, {} otherwise than lru, {} experts went", k.choices_not_lru, k.evictions);
    if others > 0 {
        return (name, Verdict::Contradicted, format!("{seen}; {others} choices by another policy"));
    }
    let verdict = match (asked, choices, k.choices_not_lru) {
        (CachePolicy::Pinned, _, _) if k.evictions > 0 => Verdict::Contradicted,
        (CachePolicy::Lru, _, 1..) => Verdict::Contradicted,
        (CachePolicy::Lru, 1.., 0) | (_, 1.., 1..) => Verdict::Proved,
        _ => Verdict::Unverified,
    };
    if verdict == Verdict::Unverified {
        seen.push_str(": any policy would have done the same");
    }
    (name, verdict, seen)
}

#[cfg(test)]
mod tests {
    use super::super::seen::Seen;
    use super::*;

    #[test]
    fn without_a_reader_nothing_is_proved() {
        let seen = Seen::default();
        let case = &Case { streamed: None, seen: &seen };
        for judged in [
            prefetch(case, PrefetchPolicy::None),
            depth(case, 1, PrefetchPolicy::None),
            experts(case, 0),
            queue_depth(case, 4),
            pool(case, PrefetchPool::Own, PrefetchPolicy::None),
            dispatch(case, None, DispatchPolicy::Split, PrefetchPolicy::None),
            governor(case, false),
            cache_bytes(case, 0),
            cache_policy(case, CachePolicy::Lru),
        ] {
            assert_eq!(judged.1, Verdict::Unverified);
        }
    }

    #[test]
    fn a_router_does_not_pass_for_a_drafter() {
        use PrefetchPolicy::{Draft, Markov, NextRouter, None, SameAsLast};
        let told = PrefetchCounters { told: 5, ..PrefetchCounters::default() };
        let made = |router, draft| GuessesMade { router, draft };
        assert_eq!(by_whom(NextRouter, &told, made(7, 0)), (5, 0));
        assert_eq!(by_whom(NextRouter, &told, made(0, 7)), (0, 12));
        assert_eq!(by_whom(Draft, &told, made(0, 7)), (5, 0));
        assert_eq!(by_whom(Draft, &told, made(7, 0)), (0, 12));
        assert_eq!(by_whom(None, &PrefetchCounters::default(), made(0, 1)), (0, 1));
        let own = PrefetchCounters { same_as_last: 4, ..PrefetchCounters::default() };
        assert_eq!(by_whom(SameAsLast, &own, made(0, 0)), (4, 0));
        assert_eq!(by_whom(Markov, &own, made(0, 0)), (0, 4));
    }
}
