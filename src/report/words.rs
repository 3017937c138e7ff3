//! Sentences that stand in tables and pages alike. Pure.

use super::units::{duration, percent, rate};
use crate::ids::DriveId;
use crate::replay::groups::BarrierRow;
use crate::replay::summary::Summary;
use crate::replay::verdict::{Bound, NOT_BOUND_SHARE, Verdict};
use crate::trace::log::{RateFrom, TraceDrive, TraceHeader};

/// Name of a drive of a trace.
pub fn name(drives: &[TraceDrive], id: DriveId) -> String {
    drives.get(id.index()).map_or_else(|| format!("drive {}", id.0), |d| d.name.clone())
}

/// A name by drive number.
pub fn named(names: &[&str], id: DriveId) -> String {
    names.get(id.index()).map_or_else(|| format!("drive {}", id.0), |n| (*n).to_owned())
}

/// What bounds decoding, in two or three words.
pub fn label(verdict: &Verdict, names: &[&str]) -> String {
    match (verdict.bound, verdict.drive) {
        (Bound::NotStorage, _) => "not storage-bound".into(),
        (Bound::OneDrive, Some(drive)) => format!("one drive (`{}`)", named(names, drive)),
        (Bound::OneDrive, None) => "one drive".into(),
        (Bound::Latency, _) => "latency and queueing".into(),
        (Bound::AllDrives, _) => "all drives together".into(),
    }
}

/// The verdict in a sentence.
pub fn sentence(verdict: &Verdict, names: &[&str]) -> String {
    let waits = percent(verdict.share(verdict.stall_ns()));
    let without = format!("without any wait it would run {:.2} times as fast", verdict.ceiling);
    match (verdict.bound, verdict.drive) {
        (Bound::NotStorage, _) => format!(
            "not storage-bound: decoding waited {waits} of its time (below {:.0} %); {without}",
            NOT_BOUND_SHARE * 100.0
        ),
        (Bound::OneDrive, Some(drive)) => format!(
            "bound by one drive: {waits} of the time was waiting, mostly for the last drive alone, most often `{}` ({}); \
             {without}",
            named(names, drive),
            percent(verdict.share(verdict.drive_ns))
        ),
        (Bound::Latency, _) => {
            format!(
                "bound by latency and queueing: {waits} of the time was waiting, mostly before bytes flow; {without}"
            )
        }
        _ => format!("bound by all drives together: {waits} of the time was waiting for bytes; {without}"),
    }
}

/// The parts of the wall time of decoding, and that time, which `wall` names; in nanoseconds.
pub fn parts<'a>(verdict: &Verdict, wall: &'a str) -> [(&'a str, u64); 5] {
    let latency = match verdict.latency_known {
        true => "storage: latency and queueing",
        false => "storage: queueing (fixed costs unknown)",
    };
    [
        ("compute (nothing was waited for)", verdict.compute_ns),
        ("storage: all drives together", verdict.all_drives_ns),
        ("storage: the last drive alone", verdict.one_drive_ns),
        (latency, verdict.latency_ns),
        (wall, verdict.wall_ns),
    ]
}

/// What the wall time of a trace's verdict is.
pub fn wall(verdict: &Verdict, header: &TraceHeader) -> &'static str {
    match (header.decode_wall_ns == Some(verdict.wall_ns), header.reissued.is_some()) {
        (true, _) => "wall time of decoding, as the run took it",
        (false, true) => "wall time of the barriers read again",
        (false, false) => "wall time, first open to last close",
    }
}

/// What each drive could do, as the run knew it or as the trace shows it; nothing where the bounds come from rates that the
/// reader of the report gave.
pub fn drive_rates(summary: &Summary, header: &TraceHeader) -> Vec<String> {
    if summary.homes_from.is_some() {
        return Vec::new();
    }
    let known = header.rates.iter().map(|known| {
        let from = match known.from {
            RateFrom::Learnt => "learnt in the run",
            RateFrom::Given => "given to the run",
        };
        format!("`{}`: {} after {} ({from})", known.drive, rate(known.bytes_per_s as f64), duration(known.fixed_ns))
    });
    let unknown = summary.fitted.iter().filter(|f| header.rates.iter().all(|r| r.drive != f.drive));
    let fitted = unknown.map(|fit| {
        let (speed, fixed) = (rate(fit.bytes_per_s), duration(fit.fixed_ns));
        format!("`{}` behaved like {speed} after {fixed} (fitted to its part of each barrier)", fit.drive)
    });
    known.chain(fitted).collect()
}

/// What the waits of `all` barriers were made of.
pub fn wait(all: &BarrierRow) -> String {
    format!(
        "wait {} = {} before the last read was queued + {} in the queue + {} at the drive; gap to the next drive {}, to \
         the next read {}",
        duration(all.wait_ns),
        duration(all.before_ns),
        duration(all.queue_ns),
        duration(all.service_ns),
        duration(all.gap_drive.total_ns),
        duration(all.gap_read.total_ns)
    )
}
