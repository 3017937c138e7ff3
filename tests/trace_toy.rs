//! The hand-made trace: every figure of its report, worked out by hand from its seventeen rows, for both readings that the
//! two public readers give such a file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::ids::DriveId;
use argodrive::replay::import::per_read::{PerReadOptions, PrefetchBarrier, TimeIs, import};
use argodrive::replay::join::Joiner;
use argodrive::replay::rates::{Bounds, Homes, parse_rates};
use argodrive::replay::summary::{GapRow, Summarizer, Summary, summarize};
use argodrive::replay::verdict::Bound;
use argodrive::trace::events::{BarrierRecord, Cause, Outcome, Purpose};
use argodrive::trace::log;
use argodrive::trace::stream;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/traces").join(name)
}

fn report(folder: &Path, rates: Option<&str>) -> (Summary, Vec<GapRow>) {
    let header = log::read_header(folder).unwrap();
    let reads = || stream::reads(folder, header.drives.len(), false).unwrap();
    let barriers = stream::barriers(folder, header.drives.len(), false).unwrap();
    let bounds = rates.map(|text| {
        let homes = Homes::of_reads(&mut reads()).unwrap();
        Bounds::new(&header.drives, &parse_rates(text).unwrap(), homes).unwrap()
    });
    let mut rows = Vec::new();
    let summarizer = Summarizer::new(&header.drives, bounds, 10);
    let joiner = Joiner::new(reads(), barriers, false);
    let summary = summarize(joiner, summarizer, None, &mut |row| {
        rows.push(row.clone());
        Ok(())
    });
    (summary.unwrap(), rows)
}

/// What a row says, short: last, cause, wait, gap to drive, gap to read (microseconds).
fn told(row: &GapRow) -> (Option<&str>, &str, u64, Option<u64>, Option<u64>) {
    let us = |ns: u64| ns / 1000;
    (row.last.as_deref(), row.cause, us(row.wait_ns), row.gap_drive_ns.map(us), row.gap_read_ns.map(us))
}

#[test]
fn completion_times_and_needed_barriers_give_the_figures_worked_out_by_hand() {
    let dir = tempfile::tempdir().unwrap();
    let done = import(&fixture("toy-exact.csv"), dir.path(), PerReadOptions::default()).unwrap();
    assert_eq!((done.reads, done.barriers, done.skipped_rows), (13, 5, 0));
    assert_eq!(done.drives, ["internal", "K3C", "K3A", "K3B"], "in the order of the file");
    let (summary, rows) = report(dir.path(), None);

    // Barrier 0 (layer 1) opens at 1000 us. Ends: internal 3000 and 4000, K3C 3500, K3A 6000.
    //   Last K3A; next drive internal at 4000: gap 2000. Next read 4000: gap 2000. Wait 6000 - 1000.
    //   K3A brought 1 MB, internal 2 MB: it had no larger share, so it was slow.
    assert_eq!(told(&rows[0]), (Some("K3A"), "device_slow", 5000, Some(2000), Some(2000)));
    // Barrier 1 (layer 2) opens at 7000; its prefetch by K3B was complete at 6500 and made nobody wait.
    //   internal 9000, K3C 9100: gap 100 on a wait of 2100 (2 % = 42, so no tie). Both brought 2 MB: slow.
    assert_eq!(told(&rows[1]), (Some("K3C"), "device_slow", 2100, Some(100), Some(100)));
    // Barrier 2 (layer 3) opens at 10000: internal and K3C both end at 12000. A tie.
    assert_eq!((rows[2].cause, rows[2].wait_ns, rows[2].gap_drive_ns), ("tie", 2_000_000, Some(0)));
    // Barrier 3 (layer 4) opens at 13000; K3A's prefetch was complete at 12500. internal alone, 15000: no gap at all.
    assert_eq!(told(&rows[3]), (Some("internal"), "big_share", 2000, None, None));
    // Barrier 4 (layer 5) opens at 20000: internal at 21000 and, in an earlier row, 22000. One drive, two reads.
    assert_eq!(told(&rows[4]), (Some("internal"), "big_share", 2000, None, Some(1000)));

    // Waits 5000 + 2100 + 2000 + 2000 + 2000 = 13100; gaps to the next drive 2000 + 100 + 0; to the next read + 0 + 1000.
    let all = &summary.all;
    assert_eq!((all.barriers, all.waited, all.ties, all.alone), (5, 5, 1, 2));
    assert_eq!((all.wait_ns, all.service_ns, all.queue_ns, all.before_ns), (13_100_000, 13_100_000, 0, 0));
    assert_eq!((all.gap_drive.total_ns, all.gap_read.total_ns), (2_100_000, 3_100_000));
    assert_eq!(all.landed_last, [2, 1, 1, 0], "internal, K3C, K3A, K3B; the tie is nobody's");
    assert_eq!(summary.disagreements, 0);
    assert_eq!(summary.layers.iter().map(|l| l.group.as_str()).collect::<Vec<_>>(), ["L1", "L2", "L3", "L4", "L5"]);
    assert_eq!((summary.widths.len(), summary.widths[0].group.as_str(), summary.widths[0].barriers), (1, "<=16", 5));

    // By drive and purpose: internal 7 reads of 1+1+2+2+2+2+2 MB, K3C 1+2+2, K3A 1 and a prefetch of 2, K3B one of 2.
    let by_drive: Vec<_> = summary
        .drives
        .iter()
        .map(|d| (d.drive.as_str(), d.purpose, d.reads, d.bytes, d.landed_last, d.tied, d.alone, d.gap.total_ns))
        .collect();
    use Purpose::{Demand, Prefetch};
    assert_eq!(
        by_drive,
        [
            ("internal", Demand, 7, 12_000_000, 2, 1, 2, 0),
            ("K3C", Demand, 3, 5_000_000, 1, 1, 0, 100_000),
            ("K3A", Demand, 1, 1_000_000, 1, 0, 0, 2_000_000),
            ("K3A", Prefetch, 1, 2_000_000, 0, 0, 0, 0),
            ("K3B", Prefetch, 1, 2_000_000, 0, 0, 0, 0),
        ]
    );
    assert_eq!(summary.drives[0].landed_last_share, 0.4);
    // internal took 2000 + 2500 + 2000 + 2000 + 2000 + 2000 + 1000 us
    assert_eq!(summary.drives[0].service.total_ns, 13_500_000);

    // The trace spans 1000 to 22000: 21000 us. Compute 21000 - 13100; one drive 2000 + 100; the rest all drives.
    let v = summary.verdict.unwrap();
    assert_eq!((v.wall_ns, v.compute_ns, v.one_drive_ns, v.latency_ns), (21_000_000, 7_900_000, 2_100_000, 0));
    assert_eq!((v.all_drives_ns, v.bound, v.drive), (11_000_000, Bound::AllDrives, Some(DriveId(2))));
    assert!(!v.latency_known && (v.ceiling - 21.0 / 7.9).abs() < 1e-9);
    let gaps: Vec<_> = summary.top_gaps.iter().map(|g| g.barrier).collect();
    assert_eq!(gaps, [0, 1]);
}

#[test]
fn both_bounds_are_the_water_levels_worked_out_by_hand() {
    let dir = tempfile::tempdir().unwrap();
    import(&fixture("toy-exact.csv"), dir.path(), PerReadOptions::default()).unwrap();
    let (summary, rows) = report(dir.path(), Some("internal=2GB/s,K3A=1GB/s,K3B=1GB/s,K3C=1GB/s:500us"));
    // Barrier 0: 4 MB. All drives: without K3C 4 MB / 4 GB/s = 1000 us; K3C joins at 500: 4 T + (T - 500 us) = 4 MB -> 900.
    //   Layout: expert 5 (2 MB) lies on internal and K3C, expert 9 (2 MB) on internal and K3A. {internal, K3C}: 2 MB on
    //   2 GB/s alone = 1000, with K3C (2 T + T - 500 = 2000) 833; {internal, K3A}: 2 MB / 3 GB/s = 667; all three of
    //   internal, K3A, K3C: 3 T + T - 500 = 4000 -> 1125 us, the largest.
    assert_eq!((rows[0].bound_drives_ns, rows[0].bound_layout_ns), (Some(900_000), Some(1_125_000)));
    // Barrier 3: expert 6 of 2 MB on internal alone: 1000 us; everywhere: 4 T + T - 500 = 2000 -> 500 us.
    assert_eq!((rows[3].bound_drives_ns, rows[3].bound_layout_ns), (Some(500_000), Some(1_000_000)));
    assert!(rows.iter().all(|r| r.bound_layout_ns >= r.bound_drives_ns));
    let sums = rows.iter().fold((0, 0), |s, r| (s.0 + r.bound_layout_ns.unwrap(), s.1 + r.bound_drives_ns.unwrap()));
    assert_eq!((summary.all.bound_layout_ns.unwrap(), summary.all.bound_drives_ns.unwrap()), sums);
    // the fixed cost of 500 us counts for the one barrier that K3C decided; the others have none
    let v = summary.verdict.unwrap();
    assert!(v.latency_known);
    assert_eq!(v.latency_ns, 500_000);
}

#[test]
fn issue_times_shift_every_end_by_the_duration() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        PerReadOptions { time: TimeIs::Issue, prefetch: PrefetchBarrier::Issued, ..PerReadOptions::default() };
    let done = import(&fixture("toy-exact.csv"), dir.path(), options).unwrap();
    assert!(done.assumptions.iter().any(|a| a.contains("--time issue")), "{:?}", done.assumptions);
    assert!(done.assumptions.iter().any(|a| a.contains("--prefetch-barrier issued")));
    let (_, rows) = report(dir.path(), None);
    // Barrier 0 now ends with K3A at 6000 + 5000 = 11000. Its prefetch (K3B, 6500 + 3000 = 9500) belongs to it, and is the
    // next-to-last drive: gap 1500. Wait 11000 - 1000.
    assert_eq!(told(&rows[0]), (Some("K3A"), "device_slow", 10_000, Some(1500), Some(1500)));
    // Barrier 2: internal and K3C at 14000; its prefetch K3A at 12500 + 2200 = 14700: gap 700, a late prefetch.
    assert_eq!(told(&rows[2]), (Some("K3A"), "prefetch_late", 4700, Some(700), Some(700)));
    assert_eq!(rows[2].purpose, Some("prefetch"));
}

#[test]
fn what_was_assumed_is_written_into_the_trace() {
    let dir = tempfile::tempdir().unwrap();
    let done = import(&fixture("toy-exact.csv"), dir.path(), PerReadOptions::default()).unwrap();
    let imported = log::read_header(dir.path()).unwrap().imported.unwrap();
    assert_eq!(imported.assumptions, done.assumptions);
    assert_eq!(imported.format, "per-read");
    for wanted in ["--time completion", "--prefetch-barrier target", "compute waits", "replica 0"] {
        assert!(imported.assumptions.iter().any(|a| a.contains(wanted)), "{wanted}");
    }
    let barriers: Vec<BarrierRecord> = log::read_barriers(dir.path()).unwrap();
    assert_eq!(barriers.iter().map(|b| b.width).collect::<Vec<_>>(), [2, 3, 2, 2, 2]);
    assert_eq!(barriers.iter().map(|b| b.prefetch_hits).collect::<Vec<_>>(), [0, 1, 0, 1, 0]);
    assert_eq!((barriers[3].cause, barriers[3].straggler), (Cause::BigShare, Some(DriveId(0))));
    let reads = log::read_reads(dir.path()).unwrap();
    let prefetch: Vec<_> = reads.iter().filter(|r| r.purpose == Purpose::Prefetch).collect();
    assert_eq!(prefetch.iter().map(|r| (r.issued_in, r.barrier)).collect::<Vec<_>>(), [(0, Some(1)), (2, Some(3))]);
    assert!(prefetch.iter().all(|r| r.outcome == Outcome::Useful));
    let split: Vec<_> = reads.iter().filter(|r| r.barrier == Some(0)).map(|r| (r.expert.0, r.part, r.parts)).collect();
    assert_eq!(split, [(5, 0, 2), (5, 1, 2), (9, 0, 2), (9, 1, 2)]);
}

#[test]
fn both_synthetic_formats_give_barriers_that_agree_with_a_plain_count() {
    for (name, barriers, prefetches) in [("synthetic-A-split.csv", 276, 3512), ("synthetic-B-plain.csv", 93, 1168)] {
        let dir = tempfile::tempdir().unwrap();
        let done = import(&fixture(name), dir.path(), PerReadOptions::default()).unwrap();
        assert_eq!(done.barriers, barriers, "{name}");
        let (summary, rows) = report(dir.path(), None);
        let seen: u64 = summary.drives.iter().filter(|d| d.purpose == Purpose::Prefetch).map(|d| d.reads).sum();
        assert_eq!(seen, prefetches, "{name}");
        assert_eq!(rows.len() as u64, barriers);
        assert_eq!(summary.disagreements, 0);

        // the last end of each barrier, straight from the text: demand by column 2, prefetch by target or next layer
        let text = std::fs::read_to_string(fixture(name)).unwrap();
        let lines: Vec<Vec<&str>> = text.lines().skip(1).map(|l| l.split(',').collect()).collect();
        let layer_of: std::collections::BTreeMap<u64, u64> =
            lines.iter().filter(|c| c[4] == "read").map(|c| (c[1].parse().unwrap(), c[2].parse().unwrap())).collect();
        let mut ends = vec![0u64; barriers as usize];
        for c in lines.iter().filter(|c| c[4] != "read") {
            let (issued, layer): (u64, u64) = (c[1].parse().unwrap(), c[2].parse().unwrap());
            let needed = match (c[6], c.len()) {
                ("D", _) => Some(issued),
                (_, 11) => Some(c[7].parse().unwrap()),
                _ => layer_of.range(issued..).find(|(_, l)| **l == layer).map(|(b, _)| *b),
            };
            if let Some(end) = needed.and_then(|b| ends.get_mut(b as usize)) {
                *end = (*end).max(c[0].parse::<u64>().unwrap() * 1000);
            }
        }
        let records = log::read_barriers(dir.path()).unwrap();
        for (record, row) in records.iter().zip(&rows) {
            assert_eq!(record.open_ns + row.wait_ns, ends[record.barrier as usize], "{name} {}", record.barrier);
        }
    }
}
