//! Evidence for snapshots: one judge for writing them, one for going on from one.

use super::evidence::{Case, Judged, Verdict, switch};
use crate::decode::generate::StopReason;

/// On: as many were made durable as the text's length asks for, and no more of it is behind the last one than may be lost. Off: none.
/// With proposals a pass adds up to `rows` tokens, so that they come somewhat more often.
pub(super) fn every(case: &Case<'_>, asked: usize, rows: usize) -> Judged {
    let c = case.seen.snapshots.clone().unwrap_or_default();
    if asked == 0 {
        return ("off".into(), switch(false, c.written > 0), format!("{} snapshots written", c.written));
    }
    let Some(text) = case.seen.texts.first() else {
        return (asked.to_string(), Verdict::Unverified, "nothing was generated".into());
    };
    let generated = text.generated as u64;
    let new = generated.saturating_sub(text.resumed as u64);
    let last = u64::from(text.stopped == StopReason::Interrupted && new > 0);
    let (least, most) = (asked as u64, (asked + 1).saturating_sub(rows.max(1)).max(1) as u64);
    let (low, high) = (new.saturating_sub(1) / least + last, new.saturating_sub(1) / most + last);
    let expected = if low == high { low.to_string() } else { format!("{low} to {high}") };
    let seen = format!(
        "{} snapshots written of {expected} expected, {} bytes; the last has {} of {generated} tokens",
        c.written, c.bytes, c.last_tokens
    );
    let behind = generated.saturating_sub(c.last_tokens);
    let verdict = match c.written {
        0 if low == 0 => Verdict::Unverified,
        n if !(low..=high).contains(&n) || behind > asked as u64 => Verdict::Contradicted,
        _ => Verdict::Proved,
    };
    (asked.to_string(), verdict, seen)
}

/// On: the states of a text were read and no pass read its prompt. Off: nothing was read.
pub(super) fn resume(case: &Case<'_>, asked: bool) -> Judged {
    let passes = case.seen.prefill_passes;
    let (verdict, seen) = match &case.seen.resumed {
        Some(r) => {
            let seen = format!("{} tokens and states at position {} from a snapshot", r.tokens, r.position);
            (switch(asked, r.position > 0 && r.tokens > 0 && passes == 0), seen)
        }
        None => (switch(asked, false), "no snapshot read".into()),
    };
    (
        if asked { "from a snapshot".into() } else { "off".into() },
        verdict,
        format!("{seen}; {passes} passes over a prompt"),
    )
}
