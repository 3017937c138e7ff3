//! One planted trace for each cause, and what else a barrier's attribution must not get wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod traces;

use argodrive::ids::DriveId;
use argodrive::replay::attribution::Attributor;
use argodrive::replay::join::LAG_BARRIERS;
use argodrive::trace::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use proptest::prelude::*;
use traces::{barrier, read, report, write};

/// Writes the reads as barrier 0, open from 1000 to 3000, and gives the cause that the report finds.
fn cause(reads: &[ReadEvent]) -> String {
    cause_of(barrier(0, 1000, 3000), reads)
}

fn cause_of(record: BarrierRecord, reads: &[ReadEvent]) -> String {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[record], reads);
    let (summary, rows) = report(dir.path(), false).unwrap();
    assert_eq!(summary.causes.len(), 1);
    assert_eq!(summary.causes[0].cause, rows[0].cause);
    rows[0].cause.to_owned()
}

fn with(mut read: ReadEvent, change: impl FnOnce(&mut ReadEvent)) -> ReadEvent {
    change(&mut read);
    read
}

#[test]
fn queued_late() {
    let late = |queued| cause(&[read(1, 0, 10, 1000, 2000), read(2, 1, 10, queued, 3000)]);
    assert_eq!(late(2100), "queued_late");
    assert_eq!(late(1900), "device_slow", "in the first half of the wait");
}

#[test]
fn device_slow() {
    assert_eq!(cause(&[read(1, 0, 10, 1000, 2000), read(2, 1, 10, 1000, 3000)]), "device_slow");
}

#[test]
fn big_share() {
    let reads = [read(1, 0, 10, 1000, 2000), read(2, 1, 10, 1000, 2000), read(3, 1, 10, 1000, 3000)];
    assert_eq!(cause(&reads), "big_share");
    assert_eq!(cause(&reads[1..]), "big_share", "one drive alone");
}

#[test]
fn hedged() {
    // drive 1 was slow, drive 2 was asked as well and came first; drive 1's read was cancelled
    let loser = with(read(2, 1, 10, 1000, 3000), |r| (r.result, r.outcome) = (ReadResult::Cancelled, Outcome::Wasted));
    let reads = [read(1, 0, 10, 1000, 2000), read(2, 2, 10, 2500, 2900), loser];
    assert_eq!(cause(&reads), "hedged");
    // both came: the loser's bytes were for nothing, and its end decides nothing
    let loser = with(read(2, 1, 10, 1000, 3500), |r| r.outcome = Outcome::Wasted);
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[barrier(0, 1000, 2900)], &[reads[0], reads[1], loser]);
    let (_, rows) = report(dir.path(), false).unwrap();
    assert_eq!((rows[0].cause, rows[0].last.as_deref(), rows[0].wait_ns), ("hedged", Some("c"), 1900));
    // a repeat after an error is no hedge
    let broken = with(read(2, 1, 10, 1000, 2400), |r| (r.result, r.outcome) = (ReadResult::Error, Outcome::Wasted));
    assert_eq!(cause(&[reads[0], reads[1], broken]), "queued_late");
}

#[test]
fn evicted() {
    // a prefetch had brought expert 2, but it was gone when the barrier opened
    let gone = with(read(2, 1, 10, 100, 800), |r| (r.purpose, r.outcome) = (Purpose::Prefetch, Outcome::Wasted));
    let reads = [gone, read(1, 0, 10, 1000, 2000), read(2, 1, 10, 1000, 3000)];
    assert_eq!(cause(&reads), "evicted");
    // a cache leaves no read behind; only the reader can know
    let told = BarrierRecord { cause: Cause::Evicted, ..barrier(0, 1000, 3000) };
    assert_eq!(cause_of(told, &reads[1..]), "evicted");
}

#[test]
fn prefetch_late() {
    let late = with(read(2, 1, 10, 500, 3000), |r| (r.purpose, r.outcome) = (Purpose::Prefetch, Outcome::Late));
    assert_eq!(cause(&[read(1, 0, 10, 1000, 2000), late]), "prefetch_late");
    let in_time = with(late, |r| (r.completed_ns, r.outcome) = (1000, Outcome::Useful));
    assert_eq!(cause(&[read(1, 0, 10, 1000, 2000), in_time]), "big_share", "it made nobody wait");
}

#[test]
fn tie() {
    // 2 % of a wait of 2000 is 40
    let two = |end| cause(&[read(1, 0, 10, 1000, end), read(2, 1, 20, 1000, 3000)]);
    assert_eq!((two(2960).as_str(), two(2959).as_str()), ("tie", "big_share"));
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[barrier(0, 1000, 3000)], &[read(1, 0, 10, 1000, 3000), read(2, 1, 20, 1000, 3000)]);
    let (summary, _) = report(dir.path(), false).unwrap();
    assert_eq!(summary.drives.iter().map(|d| (d.landed_last, d.tied)).collect::<Vec<_>>(), [(0, 1), (0, 1)]);
    assert_eq!(summary.all.landed_last, [0, 0, 0]);
}

#[test]
fn none() {
    assert_eq!(cause(&[]), "none");
    assert_eq!(cause(&[read(1, 0, 10, 200, 1000)]), "none", "there when it opened");
}

#[test]
fn the_wait_is_split_at_the_deciding_read_and_sums() {
    let dir = tempfile::tempdir().unwrap();
    let last = with(read(2, 1, 10, 1200, 3000), |r| r.submitted_ns = 1700);
    let under_way = with(read(3, 1, 10, 400, 5000), |r| (r.barrier, r.submitted_ns) = (Some(1), 600));
    let reads = [read(1, 0, 10, 1000, 2000), last, under_way];
    write(dir.path(), &[barrier(0, 1000, 3000), barrier(1, 4000, 5000)], &reads);
    let (summary, rows) = report(dir.path(), false).unwrap();
    assert_eq!((rows[0].before_ns, rows[0].queue_ns, rows[0].service_ns), (200, 500, 1300));
    assert_eq!((rows[1].before_ns, rows[1].queue_ns, rows[1].service_ns), (0, 0, 1000), "only what lies after open");
    assert_eq!((summary.all.wait_ns, summary.all.before_ns, summary.all.queue_ns), (3000, 200, 500));
    assert_eq!(summary.disagreements, 2, "the records name nobody");
}

#[test]
fn a_prefetch_far_ahead_and_a_read_far_behind_find_their_barrier() {
    let dir = tempfile::tempdir().unwrap();
    let count = 3 * LAG_BARRIERS;
    let barriers: Vec<_> = (0..count).map(|b| barrier(b, b * 1000, b * 1000 + 500)).collect();
    let mut reads: Vec<_> = (0..count)
        .map(|b| with(read(1, 0, 10, b * 1000, b * 1000 + 400), |r| (r.issued_in, r.barrier) = (b, Some(b))))
        .collect();
    let ahead = with(read(2, 1, 10, 0, 50), |r| {
        (r.purpose, r.barrier, r.outcome) = (Purpose::Prefetch, Some(count - 1), Outcome::Useful)
    });
    reads.insert(1, ahead);
    let behind = with(read(3, 2, 10, 100, 450), |r| r.barrier = Some(0));
    reads.insert(LAG_BARRIERS as usize, behind);
    write(dir.path(), &barriers, &reads);
    let (summary, rows) = report(dir.path(), false).unwrap();
    assert_eq!((rows.len() as u64, summary.drives.iter().map(|d| d.reads).sum::<u64>()), (count, count + 2));
    assert_eq!((rows[0].last.as_deref(), rows[0].gap_drive_ns), (Some("c"), Some(50)));
    // one that comes too late for its barrier is a fault with its line, and can be left out
    reads.push(behind);
    write(dir.path(), &barriers, &reads);
    let message = report(dir.path(), false).unwrap_err().to_string();
    assert!(message.contains(&format!("reads.csv:{}: ", count + 4)) && message.contains("barrier 0"), "{message}");
    let (summary, _) = report(dir.path(), true).unwrap();
    assert_eq!((summary.skipped_rows, summary.all.barriers), (1, count));
}

proptest! {
    /// Against a plain reading of the definitions, on reads of whole experts that all deliver.
    #[test]
    fn gaps_follow_their_definitions(
        ends in proptest::collection::vec((0u8..4, 500u64..3000), 0..20), turn in 0usize..20,
    ) {
        let mut reads: Vec<_> = ends.iter().enumerate().map(|(i, (d, end))| read(i as u16, *d, 10, 100, *end)).collect();
        let record = barrier(0, 1000, 3000);
        let seen = Attributor::new(4).attribute(&record, &reads);
        let mut after: Vec<(u64, u8)> = ends.iter().filter(|e| e.1 > 1000).map(|e| (e.1, e.0)).collect();
        after.sort_unstable();
        prop_assert_eq!(seen.last.is_some(), !after.is_empty());
        let Some(&(last_ns, _)) = after.last() else { return Ok(()) };
        prop_assert_eq!(seen.wait.total_ns, last_ns - 1000);
        prop_assert_eq!(seen.gap_read_ns, after.len().checked_sub(2).map(|i| last_ns - after[i].0));
        let drive = seen.last.unwrap().drive;
        prop_assert!(after.contains(&(last_ns, drive.0)));
        let other = after.iter().filter(|(_, d)| DriveId(*d) != drive).map(|(end, _)| *end).max();
        prop_assert_eq!(seen.gap_drive_ns, other.map(|end| last_ns - end));
        prop_assert_eq!(seen.wait.before_ns + seen.wait.queue_ns + seen.wait.service_ns, seen.wait.total_ns);
        // the order of rows changes nothing but which of several equal last reads is named
        if !reads.is_empty() {
            let turn = turn % reads.len();
            reads.rotate_left(turn);
        }
        let turned = Attributor::new(4).attribute(&record, &reads);
        prop_assert_eq!((turned.wait, turned.gap_read_ns, turned.gap_drive_ns), (seen.wait, seen.gap_read_ns, seen.gap_drive_ns));
    }
}
