//! Foreign traces in and out: device counters, fio, blkparse, headerless per-read logs; Perfetto and HDR logs read back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod traces;

use argodrive::ids::DriveId;
use argodrive::replay::export::{hdr, perfetto};
use argodrive::replay::import::fio::FioValue;
use argodrive::replay::import::per_read::{PerReadOptions, PrefetchBarrier, TimeIs};
use argodrive::replay::import::{blkparse, fio, per_read, sampler};
use argodrive::replay::join::Joiner;
use argodrive::replay::windows;
use argodrive::trace::events::ReadResult;
use argodrive::trace::log;
use argodrive::trace::stream::{self, Growing};
use hdrhistogram::serialization::Deserializer;
use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};
use std::fs;
use std::path::{Path, PathBuf};
use traces::{barrier, read, write};

/// A file of the public data set beside the repository; absent is a loud skip, and a failure under CI.
fn public(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/argodrive-public").join(name);
    let path = if path.exists() {
        path
    } else {
        // a second checkout lies one folder deeper
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/argodrive-public").join(name)
    };
    if path.exists() {
        return Some(path);
    }
    assert!(std::env::var("CI").is_err(), "{} is missing", path.display());
    eprintln!("SKIPPED: {} is missing", path.display());
    None
}

#[test]
fn the_public_sampler_gives_its_own_differences_by_role() {
    let (Some(csv), Some(map)) =
        (public("sampler/k3-g1-on-0906-decode-200ms.csv"), public("sampler/k3-g1-on-0906.map"))
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let done = sampler::import(&csv, Some(&map), dir.path(), false).unwrap();
    assert_eq!(done.drives.len(), 4);
    let header = log::read_header(dir.path()).unwrap();
    let (rows, _) = windows::summarize(dir.path(), &header.drives, false).unwrap();
    let text = fs::read_to_string(&csv).unwrap();
    for (disk, role) in [("disk0", "internal"), ("disk4", "Yellow"), ("disk8", "Green"), ("disk6", "White")] {
        let of_disk: Vec<Vec<&str>> =
            text.lines().map(|l| l.split(',').collect::<Vec<_>>()).filter(|c| c[1] == disk).collect();
        let number = |row: &[&str], at: usize| row[at].parse::<u64>().unwrap();
        let (first, last) = (of_disk.first().unwrap(), of_disk.last().unwrap());
        let row = rows.iter().find(|r| r.name == disk).unwrap();
        assert_eq!(row.drive.as_deref(), Some(role));
        assert_eq!(row.windows as usize, of_disk.len() - 1);
        assert_eq!(row.bytes, number(last, 2) - number(first, 2));
        assert_eq!(row.reads, number(last, 3) - number(first, 3));
        let span_s = last[0].parse::<f64>().unwrap() - first[0].parse::<f64>().unwrap();
        assert!((row.span_ms / 1e3 - span_s).abs() < 1e-6);
        assert!((row.mean_bytes_per_s / (row.bytes as f64 / span_s) - 1.0).abs() < 1e-6);
        assert!(row.peak_bytes_per_s >= row.mean_bytes_per_s);
        let io_ms = (number(last, 4) - number(first, 4)) as f64 / 1e6;
        assert!((row.mean_read_ms.unwrap() / (io_ms / row.reads as f64) - 1.0).abs() < 1e-6);
    }
}

#[test]
fn without_a_map_every_disk_stays_unattributed() {
    let Some(csv) = public("sampler/k3-g1-on-raw-decode-200ms.nomap.csv") else { return };
    let dir = tempfile::tempdir().unwrap();
    let done = sampler::import(&csv, None, dir.path(), false).unwrap();
    assert!(done.drives.is_empty());
    let unattributed = "unattributed disks: disk0, disk4, disk5, disk8";
    assert!(done.assumptions.iter().any(|a| a == unattributed), "{:?}", done.assumptions);
    let (rows, _) = windows::summarize(dir.path(), &[], false).unwrap();
    assert_eq!(rows.len(), 4);
    assert!(rows.iter().all(|r| r.drive.is_none()));
}

#[test]
fn fio_logs_become_reads_of_the_right_length() {
    let dir = tempfile::tempdir().unwrap();
    let (clat, bw) = (dir.path().join("a_clat.1.log"), dir.path().join("b_bw.1.log"));
    // the first read began before the job by its log's millisecond: everything shifts by 1.5 - 1 ms
    fs::write(&clat, "0, 1500000, 0, 65536, 196608, 0\n2, 20, 1, 4096, 0, 0\n3, 285737, 0, 65536, 3080192, 0\n")
        .unwrap();
    fs::write(&bw, "5, 64000, 0, 65536, 4096\n").unwrap();
    let out = dir.path().join("out");
    let done = fio::import(&[clat.clone(), bw], &out, None, false).unwrap();
    assert_eq!(
        (done.reads, done.barriers, done.drives.as_slice()),
        (3, 0, &["a_clat.1".to_owned(), "b_bw.1".into()][..])
    );
    let reads = log::read_reads(&out).unwrap();
    let times: Vec<_> = reads.iter().map(|r| (r.submitted_ns, r.completed_ns)).collect();
    // 64 KiB at 64000 KiB/s take 1 ms
    assert_eq!(times, [(0, 1_500_000), (4_214_263, 4_500_000), (5_500_000, 6_500_000)]);
    assert_eq!((reads[0].bytes, reads[0].offset, reads[2].drive), (65_536, 196_608, DriveId(1)));
    assert!(reads.iter().all(|r| r.barrier.is_none()));
    assert!(done.assumptions.iter().any(|a| a.starts_with("1 writes")), "{:?}", done.assumptions);
    let named = dir.path().join("what.log");
    fs::copy(&clat, &named).unwrap();
    let message =
        fio::import(std::slice::from_ref(&named), &dir.path().join("o2"), None, false).unwrap_err().to_string();
    assert!(message.contains("--fio-value"), "{message}");
    assert!(fio::import(&[named], &dir.path().join("o3"), Some(FioValue::Clat), false).is_ok());
    let message = fio::import(&[clat], &out, None, false).unwrap_err().to_string();
    assert!(message.contains("holds a trace already"), "{message}");
}

#[test]
fn the_real_fio_is_understood() {
    let found = std::process::Command::new("fio").arg("--version").output();
    if found.is_err() {
        assert!(std::env::var("CI").is_err(), "fio is missing");
        eprintln!("SKIPPED: fio is missing");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let arguments = [
        "--name=j",
        "--filename=f",
        "--size=2M",
        "--rw=randrw",
        "--rwmixread=80",
        "--bs=64k",
        "--io_size=1M",
        "--write_bw_log=t",
        "--write_lat_log=t",
        "--log_avg_msec=0",
        "--log_offset=1",
        "--output=out.json",
        "--output-format=json",
    ];
    let ran = std::process::Command::new("fio").args(arguments).current_dir(dir.path()).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let json: serde_json::Value = serde_json::from_slice(&fs::read(dir.path().join("out.json")).unwrap()).unwrap();
    let read = &json["jobs"][0]["read"];
    for kind in ["clat", "lat", "bw"] {
        let out = dir.path().join(format!("trace-{kind}"));
        let done = fio::import(&[dir.path().join(format!("t_{kind}.1.log"))], &out, None, false).unwrap();
        assert_eq!(done.reads, read["total_ios"].as_u64().unwrap(), "{kind}");
        let reads = log::read_reads(&out).unwrap();
        assert_eq!(reads.iter().map(|r| r.bytes).sum::<u64>(), read["io_bytes"].as_u64().unwrap());
        if kind != "bw" {
            let longest = reads.iter().map(|r| r.completed_ns - r.submitted_ns).max().unwrap();
            assert_eq!(longest, read[format!("{kind}_ns")]["max"].as_u64().unwrap(), "{kind}");
        }
    }
}

#[test]
fn blkparse_events_are_matched_by_device_and_sector() {
    let text = "\
  8,0    3        1     0.000001000   697  Q   R 2048 + 8 [cat]
  8,0    3        2     0.000001500   697  G   R 2048 + 8 [cat]
  8,16   3        3     0.000002000   697  Q   R 2048 + 16 [cat]
  8,0    3        4     0.000003000   697  D   R 2048 + 8 [cat]
  8,16   3        5     0.000003500   697  D   R 2048 + 16 [cat]
  8,0    3        6     0.000004000   697  D   W 512 + 8 [cat]
  8,0    3        7     0.000004000   697  D  RS 4096 + 8 [cat]
  8,16   1        1     0.000200000     0  C   R 2048 + 8 [0]
  8,0    1        2     0.000500000     0  C   R 2048 + 8 [0]
  8,0    1        3     0.000600000     0  C  RS 4096 + 8 [-5]
  8,0    1        4     0.000700000     0  C   R 9999 + 8 [0]
  8,0    1        5     0.000800000     0  D   R 7777 + 8 [cat]
CPU1 (8,0):
 Reads Queued:           1,        4KiB
";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.txt");
    fs::write(&path, text).unwrap();
    let out = dir.path().join("out");
    let done = blkparse::import(&path, &out, false).unwrap();
    assert_eq!(done.drives, ["8,0", "8,16"]);
    let seen: Vec<_> = log::read_reads(&out)
        .unwrap()
        .iter()
        .map(|r| (r.drive.0, r.offset, r.bytes, r.queued_ns, r.submitted_ns, r.completed_ns, r.result))
        .collect();
    assert_eq!(
        seen,
        [
            (1, 2048 * 512, 8 * 512, 2000, 3500, 200_000, ReadResult::Short),
            (0, 2048 * 512, 8 * 512, 1000, 3000, 500_000, ReadResult::Ok),
            (0, 4096 * 512, 8 * 512, 4000, 4000, 600_000, ReadResult::Error),
        ]
    );
    for wanted in ["1 reads have no Q", "1 completions have no hand-over", "1 reads were not complete"] {
        assert!(done.assumptions.iter().any(|a| a.starts_with(wanted)), "{wanted}: {:?}", done.assumptions);
    }
}

#[test]
fn the_gap_scripts_format_is_read_without_markers_and_without_a_header() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gaps.csv");
    // t_us,dur_ns,barrier,source,prio,bytes,layer,expert
    fs::write(&path, "100,50000,0,hot,D,1000,1,5\n100,80000,0,dir_b,D,1000,1,6\n120,90000,0,hot,P,1000,2,7\n200,40000,1,dir_b,D,1000,2,8\n")
        .unwrap();
    let out = dir.path().join("out");
    let options = PerReadOptions { time: TimeIs::Issue, ..PerReadOptions::default() };
    let done = per_read::import(&path, &out, options).unwrap();
    assert_eq!((done.reads, done.barriers, done.drives.as_slice()), (4, 2, &["hot".to_owned(), "dir_b".into()][..]));
    assert!(done.assumptions.iter().any(|a| a.starts_with("2 barriers have no marker")), "{:?}", done.assumptions);
    let barriers = log::read_barriers(&out).unwrap();
    assert_eq!(
        barriers.iter().map(|b| (b.open_ns, b.last_ns, b.gap_drive_ns)).collect::<Vec<_>>(),
        [
            (100_000, 180_000, 30_000),
            // the prefetch for layer 2 ends at 210 us, the demand read at 240 us
            (200_000, 240_000, 30_000)
        ]
    );
    let issued = PerReadOptions { prefetch: PrefetchBarrier::Issued, ..options };
    let out = dir.path().join("issued");
    per_read::import(&path, &out, issued).unwrap();
    let barriers = log::read_barriers(&out).unwrap();
    assert_eq!((barriers[0].last_ns, barriers[0].gap_drive_ns), (210_000, 30_000), "now it decides barrier 0");
}

fn exportable(folder: &Path) -> (u64, u64) {
    let mut reads = vec![read(1, 0, 10, 1000, 3000), read(2, 0, 20, 1500, 2500), read(3, 1, 5, 1000, 2000)];
    let mut wasted = read(9, 2, 7, 5000, 6000);
    (wasted.barrier, wasted.issued_in) = (None, 1);
    let mut failed = read(4, 2, 5, 4000, 4500);
    (failed.barrier, failed.issued_in, failed.result) = (Some(1), 1, ReadResult::Error);
    let mut second = read(4, 1, 5, 4500, 2_000_006_000);
    (second.barrier, second.issued_in) = (Some(1), 1);
    reads.extend([failed, wasted, second]);
    write(folder, &[barrier(0, 1000, 3000), barrier(1, 4000, 2_000_007_000)], &reads);
    (reads.len() as u64, 2)
}

#[test]
fn perfetto_gets_valid_json_whose_slices_never_overlap_and_whose_arrows_have_two_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (reads, barriers) = exportable(dir.path());
    let header = log::read_header(dir.path()).unwrap();
    let path = dir.path().join("out.json");
    let mut joiner = Joiner::new(
        stream::reads(dir.path(), 3, false).unwrap(),
        stream::barriers(dir.path(), 3, false).unwrap(),
        false,
    );
    let mut file = Growing::create(&path).unwrap();
    let done = perfetto::export(&mut joiner, &header.drives, &mut file).unwrap();
    file.finish().unwrap();
    assert_eq!((done.reads, done.barriers, done.arrows), (reads, barriers, 4));
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let of = |kind: &str| events.iter().filter(|e| e["ph"] == kind).collect::<Vec<_>>();
    let number = |e: &serde_json::Value, key: &str| e[key].as_f64().unwrap();
    let slices = of("X");
    assert_eq!(slices.len() as u64, reads + barriers);
    for (i, a) in slices.iter().enumerate() {
        for b in &slices[..i] {
            let same = a["pid"] == b["pid"] && a["tid"] == b["tid"];
            let apart = number(a, "ts") >= number(b, "ts") + number(b, "dur")
                || number(b, "ts") >= number(a, "ts") + number(a, "dur");
            assert!(!same || apart, "{a} and {b}");
        }
    }
    let (starts, ends) = (of("s"), of("f"));
    assert_eq!((starts.len(), ends.len()), (4, 4));
    for flow in starts.iter().chain(&ends) {
        let inside = |s: &&&serde_json::Value| {
            s["pid"] == flow["pid"]
                && s["tid"] == flow["tid"]
                && number(s, "ts") <= number(flow, "ts")
                && number(flow, "ts") < number(s, "ts") + number(s, "dur")
        };
        assert_eq!(slices.iter().filter(inside).count(), 1, "{flow}");
    }
    assert!(starts.iter().all(|s| ends.iter().any(|e| e["id"] == s["id"] && number(e, "ts") >= number(s, "ts"))));
    let names: Vec<&str> = of("M").iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    assert!(names.contains(&"drive a") && names.contains(&"barriers"));
}

#[test]
fn hdr_logs_hold_every_successful_read_of_each_drive_and_interval() {
    let dir = tempfile::tempdir().unwrap();
    exportable(dir.path());
    let header = log::read_header(dir.path()).unwrap();
    let path = dir.path().join("out.hlog");
    let mut file = Growing::create(&path).unwrap();
    let mut reads = stream::reads(dir.path(), 3, false).unwrap();
    let done = hdr::export(&mut reads, &header.drives, 1_000_000_000, &mut file).unwrap();
    file.finish().unwrap();
    assert_eq!((done.reads, done.intervals), (5, 4));
    let bytes = fs::read(&path).unwrap();
    let mut seen = Vec::new();
    for entry in IntervalLogIterator::new(&bytes) {
        let LogEntry::Interval(interval) = entry.unwrap() else { continue };
        let raw = base64::Engine::decode(&base64::prelude::BASE64_STANDARD, interval.encoded_histogram()).unwrap();
        let histogram: hdrhistogram::Histogram<u64> = Deserializer::new().deserialize(&mut raw.as_slice()).unwrap();
        let tag = interval.tag().unwrap().as_str().to_owned();
        seen.push((tag, interval.start_timestamp().as_secs(), histogram.len(), histogram.max()));
    }
    let row = |tag: &str, second, reads, max| (tag.to_owned(), second, reads, max);
    // three significant digits: 2 000 001 500 ns lies in a class that ends a little above
    assert_eq!(seen[..3], [row("a", 0, 2, 2000), row("b", 0, 1, 1000), row("c", 0, 1, 1000)]);
    assert_eq!((seen[3].0.as_str(), seen[3].1, seen[3].2), ("b", 2, 1));
    assert!(seen[3].3.abs_diff(2_000_001_500) < 2_000_000, "{seen:?}");
}
