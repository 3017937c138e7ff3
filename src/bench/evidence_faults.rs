//! Evidence for what is done about drives that misbehave, and for their misbehaving on purpose.

use super::evidence::{Case, Judged, Verdict, on_off};
use crate::drive::fault_rule::{DriveFault, FaultRule};
use crate::reader::limit::ALWAYS;
use crate::reader::{DriveCounters, LimitCounters};

fn unseen(asked: impl Into<String>) -> Judged {
    (asked.into(), Verdict::Unverified, "nothing streamed".into())
}

/// On: every fault that was asked for was met by some read, and no drive met another. A fault whose reads were all given up
/// first is unverified. Off: none was met.
pub(super) fn faults(case: &Case<'_>, asked: &[DriveFault]) -> Judged {
    let mounts = case.streamed.map_or(&[][..], |(_, mounts)| mounts);
    let rules = |name: &str| -> Vec<FaultRule> {
        let drives = mounts.iter().filter(|m| m.name == name).flat_map(|m| m.faults.iter().copied());
        drives.chain(asked.iter().filter(|f| f.drive == name).map(|f| f.rule)).collect()
    };
    let count: usize = mounts.iter().map(|m| rules(&m.name).len()).sum();
    let text = if count == 0 { "off".to_string() } else { format!("{count} faults") };
    let Some(counters) = &case.seen.reader else { return unseen(text) };
    let (mut wrong, mut missed, mut met) = (Vec::new(), Vec::new(), Vec::new());
    for drive in &counters.drives {
        let injected = drive.faults.as_ref().map_or(&[][..], |f| f.injected.as_slice());
        let own = rules(&drive.name);
        for (rule, reads) in injected.iter().filter(|(rule, reads)| *reads > 0 && !own.contains(rule)) {
            wrong.push(format!("{} reads of {} met `{rule}`, which nobody asked for", reads, drive.name));
        }
        let alone = own.len() == 1; // else another may have come first
        for rule in own {
            let at = injected.iter().position(|(r, _)| *r == rule);
            let reads = at.map_or(0, |at| injected[at].1);
            let given_up = drive.faults.as_ref().zip(at).and_then(|(f, at)| f.missed.get(at)).is_some_and(|n| *n > 0);
            match (reads, alone && !given_up && rule.must_hit(began(drive))) {
                (0, true) => wrong.push(format!("{}: `{rule}` should have been met, and was not", drive.name)),
                (0, false) => missed.push(format!("{}: `{rule}`", drive.name)),
                (reads, _) => met.push(format!("{} {} {reads}", drive.name, rule.kind.name())),
            }
        }
    }
    let met_text =
        if met.is_empty() { "no read met a fault".to_string() } else { format!("reads: {}", met.join(", ")) };
    match (wrong.is_empty(), missed.is_empty()) {
        (false, _) => (text, Verdict::Contradicted, format!("{met_text}; {}", wrong.join("; "))),
        (true, false) => (text, Verdict::Unverified, format!("{met_text}; not met: {}", missed.join(", "))),
        (true, true) => (text, Verdict::Proved, met_text),
    }
}

/// Reads that the reader itself has seen end on a drive, whatever came of them, and so at most as many as have begun.
fn began(drive: &DriveCounters) -> u64 {
    drive.reads + drive.errors
}

/// On: drives that had become too slow were left alone, and experts read elsewhere. Off: none was.
pub(super) fn shed(case: &Case<'_>, asked: bool) -> Judged {
    let Some(counters) = &case.seen.reader else { return unseen(on_off(asked)) };
    let sum = |value: fn(&DriveCounters) -> u64| counters.drives.iter().map(value).sum::<u64>();
    let (throttled, due, shed) = (sum(|d| d.throttled), sum(|d| d.shed_due), sum(|d| d.shed));
    let seen =
        format!("{throttled} times a drive slowed, {due} times too far to wait for it, {shed} times it was left alone");
    let verdict = match (asked, due, shed) {
        (false, _, 0) => Verdict::Proved,
        (false, _, _) => Verdict::Contradicted,
        (true, 0, 0) => Verdict::Unverified,
        (true, 1.., 1..) if counters.steered == 0 => Verdict::Unverified,
        (true, 1.., 1..) => Verdict::Proved,
        (true, _, _) => Verdict::Contradicted,
    };
    let seen = match verdict {
        Verdict::Unverified if shed > 0 => format!("{seen}, and nothing was read that is elsewhere too"),
        Verdict::Unverified => format!("{seen}: every drive did what it had done"),
        _ => seen,
    };
    (on_off(asked), verdict, seen)
}

fn waits(counters: &crate::reader::ReaderCounters, of: fn(&LimitCounters) -> u64) -> u64 {
    counters.drives.iter().map(|d| of(&d.limit)).sum()
}

/// On: no drive was asked for more in any window, and reads waited for it. Off: none did.
pub(super) fn max_read_rate(case: &Case<'_>, asked: u64) -> Judged {
    let text = if asked == 0 { "off".to_string() } else { format!("{asked} B/s") };
    let Some(counters) = &case.seen.reader else { return unseen(text) };
    let waited = waits(counters, |l| l.rate_waits);
    if asked == 0 {
        let verdict = if waited == 0 { Verdict::Proved } else { Verdict::Contradicted };
        return (text, verdict, format!("{waited} reads waited"));
    }
    let most = |window: usize| counters.drives.iter().map(|d| d.limit.most_bytes[window]).max().unwrap_or(0);
    let within = |l: &LimitCounters| (0..2).all(|w| l.most_bytes[w] <= l.allowed(asked, w));
    let over: Vec<&str> = counters.drives.iter().filter(|d| !within(&d.limit)).map(|d| d.name.as_str()).collect();
    let mut seen =
        format!("at most {} bytes in 10 ms and {} in 1 s on a drive, {waited} reads waited", most(0), most(1));
    let verdict = match (over.is_empty(), waited) {
        (false, _) => Verdict::Contradicted,
        (true, 0) => Verdict::Unverified,
        (true, _) => Verdict::Proved,
    };
    match verdict {
        Verdict::Contradicted => seen.push_str(&format!("; above the limit and one read more: {}", over.join(", "))),
        Verdict::Unverified => seen.push_str(": not binding"),
        Verdict::Proved => {}
    }
    (text, verdict, seen)
}

/// On: no read went in the part of a cycle in which none should, and some waited for it. Off: none waited.
pub(super) fn duty(case: &Case<'_>, asked: u16) -> Judged {
    let text = if asked == ALWAYS { "off".to_string() } else { format!("{:.1} %", f64::from(asked) / 10.0) };
    let Some(counters) = &case.seen.reader else { return unseen(text) };
    let (waited, astray) = (waits(counters, |l| l.duty_waits), waits(counters, |l| l.off_duty));
    let seen = format!("{waited} reads waited for the next cycle, {astray} went outside of theirs");
    let verdict = match (asked == ALWAYS, astray, waited) {
        (_, 1.., _) | (true, _, 1..) => Verdict::Contradicted,
        (true, 0, 0) => Verdict::Proved,
        (false, 0, 0) => Verdict::Unverified,
        (false, 0, _) => Verdict::Proved,
    };
    (text, verdict, seen)
}
