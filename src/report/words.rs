//! Sentences that stand in tables and pages alike. Pure.

use super::units::percent;
use crate::ids::DriveId;
use crate::replay::verdict::{Bound, NOT_BOUND_SHARE, Verdict};
use crate::trace::log::TraceDrive;

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
