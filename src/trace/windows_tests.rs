//! Tests of the arithmetic of windows: nothing is lost or doubled, and edges are where they should be.

use super::events::{Outcome, Purpose, ReadEvent, ReadResult};
use super::windows::*;
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::sys::blockstat::Counted;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

fn reading(t_ns: u64, units: u64, reads: u64, read_ms: u64) -> Reading {
    Reading { t_ns, counted: Counted { units, reads, read_ms, in_flight: 1 } }
}

fn cut(interval_ns: u64, readings: &[Reading]) -> (Vec<DeviceWindow>, u64) {
    let mut cutter = Cutter::new(interval_ns, 512, readings[0]);
    let mut out = Vec::new();
    readings[1..].iter().for_each(|r| cutter.push(*r, &mut |w| out.push(w)));
    let went_back = cutter.went_back();
    out.extend(cutter.finish());
    (out, went_back)
}

#[test]
fn counters_are_interpolated_to_the_edges_of_windows() {
    // read at 3, 13 (due at 10) and 21 ms (due at 20); 100 sectors from the first to the second, 80 to the third
    let (windows, _) =
        cut(10 * MS, &[reading(3 * MS, 50, 0, 0), reading(13 * MS, 150, 10, 20), reading(21 * MS, 230, 18, 36)]);
    let seen: Vec<_> =
        windows.iter().map(|w| (w.from_ns / MS, w.to_ns / MS, w.bytes / 512, w.reads, w.partial)).collect();
    assert_eq!(seen, [(3, 10, 70, 7, true), (10, 20, 100, 10, false), (20, 21, 10, 1, true)]);
    assert_eq!(windows.iter().map(|w| w.io_ns).sum::<u64>(), 36 * MS);
}

#[test]
fn a_missed_tick_leaves_windows_that_share_what_came_in_meanwhile() {
    let (windows, _) = cut(10 * MS, &[reading(0, 0, 0, 0), reading(10 * MS, 10, 0, 0), reading(50 * MS, 410, 0, 0)]);
    assert_eq!(windows.iter().map(|w| w.bytes / 512).collect::<Vec<_>>(), [10, 100, 100, 100, 100]);
    assert!(windows.iter().all(|w| !w.partial), "the last one ended with a reading exactly at its edge");
}

#[test]
fn counters_of_32_bits_go_round_and_going_back_is_counted() {
    let top = u64::from(u32::MAX);
    let (windows, back) = cut(10 * MS, &[reading(0, top, top, top), reading(10 * MS, 4, 0, 1)]);
    assert_eq!((windows[0].bytes, windows[0].reads, windows[0].io_ns, back), (5 * 512, 1, 2 * MS, 0));
    let (windows, back) =
        cut(10 * MS, &[reading(0, 90, 9, 9), reading(10 * MS, 80, 10, 9), reading(20 * MS, 85, 10, 9)]);
    assert_eq!(windows.iter().map(|w| w.bytes / 512).collect::<Vec<_>>(), [0, 5]);
    assert_eq!((windows[0].reads, back), (1, 1));
    assert_eq!(cut(10 * MS, &[reading(7, 1, 1, 1)]).0, [], "one reading makes no window");
}

fn read(drive: u8, bytes: u64, submitted_ns: u64, completed_ns: u64, result: ReadResult) -> ReadEvent {
    ReadEvent {
        step: 0,
        layer: LayerId(0),
        expert: ExpertId(0),
        drive: DriveId(drive),
        replica: 0,
        part: 0,
        parts: 1,
        offset: 0,
        bytes,
        purpose: Purpose::Demand,
        issued_in: 0,
        barrier: None,
        queued_ns: submitted_ns,
        submitted_ns,
        completed_ns,
        result,
        outcome: Outcome::Demand,
    }
}

#[test]
fn a_read_counts_where_it_was_complete_and_is_in_flight_before() {
    let span = (5 * MS, 42 * MS);
    let reads = [
        read(0, 100, 6 * MS, 9 * MS, ReadResult::Ok),
        read(0, 7, 8 * MS, 31 * MS, ReadResult::Ok),
        read(0, 50, 12 * MS, 20 * MS, ReadResult::Cancelled),
        read(1, 30, 39 * MS, 40 * MS, ReadResult::Ok),
        ReadEvent { queued_ns: 9, ..read(1, 5, 0, 15 * MS, ReadResult::Timeout) },
    ];
    let windows = of_reads(&reads, 2, 10 * MS, span);
    let seen = |d: usize| windows[d].iter().map(|w| (w.bytes, w.reads, w.inflight_bytes)).collect::<Vec<_>>();
    assert_eq!(seen(0), [(100, 1, 7), (0, 0, 57), (0, 0, 7), (7, 1, 0), (0, 0, 0)]);
    assert_eq!(seen(1), [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 30), (30, 1, 0)], "an end at an edge is behind it");

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(WINDOWS_FILE);
    let mut file = WindowWriter::create(&path).unwrap();
    assert_eq!(file.drives(&["a", "b"], &windows, 10 * MS, span).unwrap(), 10);
    file.begin_device("vda", 5_000_100, true).unwrap();
    let last = DeviceWindow {
        from_ns: 5_000_100,
        to_ns: 10 * MS,
        bytes: 1024,
        reads: 2,
        io_ns: 3 * MS,
        in_flight: 1,
        partial: true,
    };
    file.device("vda", &last, true).unwrap();
    file.device("pid 7", &last, false).unwrap();
    assert!(!path.exists(), "nothing half-made has the name");
    file.finish().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "t_ms,scope,name,reader_bytes,reader_reads,inflight_bytes,device_bytes,device_reads,device_io_ms,partial"
    );
    assert_eq!(lines[1..4], ["5,drive,a,0,0,0,,,,1", "5,drive,b,0,0,0,,,,1", "10,drive,a,100,1,7,,,,1"]);
    assert_eq!(lines[11], "42,drive,a,0,0,0,,,,1");
    assert_eq!(
        lines[13..],
        ["5.0001,device,vda,,,,0,0,0,1", "10,device,vda,,,,1024,2,3,1", "10,device,pid 7,,,,1024,,,1"]
    );
}

#[test]
fn milliseconds_are_exact() {
    for (ns, text) in
        [(0, "0"), (1, "0.000001"), (1_500_000, "1.5"), (MS, "1"), (123_456_789, "123.456789"), (10_010_000, "10.01")]
    {
        assert_eq!(Ms(ns).to_string(), text);
    }
}

proptest! {
    /// Whatever the times, windows are whole, in order, and sum to what was counted.
    #[test]
    fn windows_sum_to_the_counters(
        start in 0u64..50_000_000,
        steps in proptest::collection::vec((1u64..90_000_000, 0u64..5000, 0u64..9, 0u64..20), 1..40),
        interval_ms in 1u64..30,
    ) {
        let mut at = reading(start, 123, 45, 6);
        let mut readings = vec![at];
        for (t, units, reads, ms) in steps {
            at.t_ns += t;
            at.counted.units += units;
            at.counted.reads += reads;
            at.counted.read_ms += ms;
            readings.push(at);
        }
        let (windows, back) = cut(interval_ms * MS, &readings);
        prop_assert_eq!(back, 0);
        prop_assert_eq!(windows.iter().map(|w| w.bytes).sum::<u64>(), (at.counted.units - 123) * 512);
        prop_assert_eq!(windows.iter().map(|w| w.reads).sum::<u64>(), at.counted.reads - 45);
        prop_assert_eq!(windows.iter().map(|w| w.io_ns).sum::<u64>(), (at.counted.read_ms - 6) * MS);
        prop_assert_eq!(windows.first().map(|w| w.from_ns), Some(start));
        prop_assert_eq!(windows.last().map(|w| w.to_ns), Some(at.t_ns));
        let last = windows.len() - 1;
        for (i, pair) in windows.windows(2).enumerate() {
            prop_assert_eq!(pair[0].to_ns, pair[1].from_ns);
            prop_assert!(i + 1 == last || !pair[1].partial);
        }
    }

    #[test]
    fn windows_sum_to_the_reads(
        reads in proptest::collection::vec((0u8..3, 0u64..100_000, 0u64..200_000_000, 0u64..200_000_000), 0..60),
        start in 0u64..100_000_000,
        length in 0u64..150_000_000,
    ) {
        let reads: Vec<_> = reads.into_iter().map(|(d, bytes, a, b)| read(d, bytes, a.min(b), a.max(b), ReadResult::Ok)).collect();
        let windows = of_reads(&reads, 3, 10 * MS, (start, start + length));
        for (drive, windows) in windows.iter().enumerate() {
            let of_drive = || reads.iter().filter(|r| r.drive.index() == drive);
            prop_assert_eq!(windows.iter().map(|w| w.bytes).sum::<u64>(), of_drive().map(|r| r.bytes).sum::<u64>());
            prop_assert_eq!(windows.iter().map(|w| w.reads).sum::<u64>(), of_drive().count() as u64);
            prop_assert_eq!(windows.last().unwrap().inflight_bytes, 0);
        }
    }
}
