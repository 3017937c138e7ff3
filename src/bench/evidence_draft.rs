//! Evidence for the settings of speculative decoding: one judge for each.

use super::evidence::{Case, Judged, Verdict, limit};
use crate::decode::speculate::{AcceptRule, DepthPolicy, DrafterKind, SpeculateCounters};

/// What drafting counted; nothing where no speculator was made.
fn counted(case: &Case<'_>) -> SpeculateCounters {
    case.seen.speculation.clone().unwrap_or_default()
}

/// On: proposals by this drafter, and by no other, were checked in passes of several rows. Off: there was none.
pub(super) fn speculate(case: &Case<'_>, asked: DrafterKind) -> Judged {
    let c = counted(case);
    let (wanted, others) = match asked {
        DrafterKind::Off => (0, c.made()),
        DrafterKind::Ngram => (c.by_ngram, c.by_model),
        DrafterKind::Model => (c.by_model, c.by_ngram),
    };
    let (accepted, passes) = (c.accepted.iter().sum::<u64>(), c.verify_passes());
    let verdict = match (asked, wanted, others, passes) {
        (DrafterKind::Off, _, 0, 0) => Verdict::Proved,
        (DrafterKind::Off, ..) => Verdict::Contradicted,
        (_, _, 1.., _) => Verdict::Contradicted,
        (_, 1.., 0, 1..) => Verdict::Proved,
        _ => Verdict::Unverified,
    };
    let seen = format!(
        "{} proposals by ngram, {} by model; {passes} passes checked them and accepted {accepted}",
        c.by_ngram, c.by_model
    );
    (asked.name().into(), verdict, seen)
}

/// A pass checked so many, of which there might have been more; none checked more.
pub(super) fn depth(case: &Case<'_>, asked: usize, on: bool) -> Judged {
    let c = counted(case);
    let deepest = c.deepest();
    let mut seen = format!("at most {deepest} proposals in a pass, {} passes had all that were asked for", c.cut);
    if !on {
        return (asked.to_string(), Verdict::Unverified, "nothing is proposed".into());
    }
    let verdict = limit(deepest == asked, c.cut > 0, deepest > asked);
    if verdict == Verdict::Unverified {
        seen.push_str(": not binding");
    }
    (asked.to_string(), verdict, seen)
}

/// Fixed: every pass was asked for the same number. Adaptive: the policy chose, and chose more than one number.
pub(super) fn policy(case: &Case<'_>, asked: DepthPolicy, on: bool) -> Judged {
    let c = counted(case);
    if !on {
        return (asked.name().into(), Verdict::Unverified, "nothing is proposed".into());
    }
    let (fixed, adaptive): (u64, u64) = (c.chosen_fixed.iter().sum(), c.chosen_adaptive.iter().sum());
    let different = c.chosen_adaptive.iter().filter(|n| **n > 0).count();
    let verdict = match (asked, fixed, adaptive) {
        (_, 0, 0) => Verdict::Unverified,
        (DepthPolicy::Fixed, _, 0) => Verdict::Proved,
        (DepthPolicy::Adaptive, 0, _) if different > 1 => Verdict::Proved,
        (DepthPolicy::Adaptive, 0, _) => Verdict::Unverified,
        _ => Verdict::Contradicted,
    };
    let depths: Vec<String> =
        (0..).zip(&c.chosen_adaptive).filter(|(_, n)| **n > 0).map(|(d, n)| format!("{d} x{n}")).collect();
    let seen = match depths.is_empty() {
        true => format!("{fixed} choices fixed, none adaptive"),
        false => format!("{fixed} choices fixed, {adaptive} adaptive: depth {}", depths.join(", ")),
    };
    (asked.name().into(), verdict, seen)
}

/// Proposals were judged by this rule and by no other. Greedy decoding keeps the same by either rule.
pub(super) fn accept(case: &Case<'_>, asked: AcceptRule, temperature: f32, on: bool) -> Judged {
    let c = counted(case);
    if !on || temperature == 0.0 {
        let why = if on { "greedy: both rules keep the same" } else { "nothing is proposed" };
        return (asked.name().into(), Verdict::Unverified, why.into());
    }
    let (own, other) = match asked {
        AcceptRule::Standard => (c.judged_standard, c.judged_exact),
        AcceptRule::ExactMatch => (c.judged_exact, c.judged_standard),
    };
    let verdict = match (own, other) {
        // proposals that were certain, not drawn: by either rule they are kept if they are what is drawn
        (1.., 0) if asked == AcceptRule::Standard && case.seen.sampler.ratio_tests == 0 => Verdict::Unverified,
        (1.., 0) => Verdict::Proved,
        (_, 1..) => Verdict::Contradicted,
        (0, 0) => Verdict::Unverified,
    };
    let seen = format!(
        "{} proposals judged by the standard rule ({} against the distribution they were drawn from), {} by exact match",
        c.judged_standard, case.seen.sampler.ratio_tests, c.judged_exact
    );
    (asked.name().into(), verdict, seen)
}
