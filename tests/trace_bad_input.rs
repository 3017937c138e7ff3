//! Traces that are cut off, damaged or from another time: an error that names file, line and column, or, when asked to
//! be lenient, a count. Nothing panics, whatever the bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod traces;

use argodrive::replay::import::per_read::PerReadOptions;
use argodrive::replay::import::{blkparse, fio, per_read, sampler};
use argodrive::trace::log::{BARRIERS_FILE, READS_FILE, TRACE_FILE};
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use traces::{barrier, read, report, write};

fn good(folder: &Path) {
    let mut second = read(2, 1, 20, 5000, 6000);
    (second.barrier, second.issued_in) = (Some(1), 1);
    write(folder, &[barrier(0, 1000, 3000), barrier(1, 4000, 6000)], &[read(1, 0, 10, 1000, 3000), second]);
}

/// Changes one file of a good trace and gives the error, and what a lenient report leaves out (if it gives one).
fn broken(file: &str, change: impl Fn(&str) -> Vec<u8>) -> (String, Option<u64>) {
    let dir = tempfile::tempdir().unwrap();
    good(dir.path());
    let path = dir.path().join(file);
    let text = fs::read_to_string(&path).unwrap();
    let changed = change(&text);
    assert_ne!(changed, text.as_bytes(), "the change changes something");
    fs::write(&path, changed).unwrap();
    let message = report(dir.path(), false).map(|_| ()).unwrap_err().to_string();
    (message, report(dir.path(), true).ok().map(|(s, _)| s.skipped_rows))
}

#[test]
fn faults_of_rows_name_file_line_and_column_and_can_be_left_out() {
    let replaced = |file: &str, from: &'static str, to: &'static str| {
        broken(file, move |text| {
            assert!(text.contains(from), "{from}");
            text.replacen(from, to, 1).into_bytes()
        })
    };
    // file, what is replaced, by what, where the error must point, rows that leniency leaves out
    let cases = [
        (READS_FILE, ",1000,1000,3000,", ",NaN,1000,3000,", "reads.csv:2: column 13 `queued_ns`: `NaN`", 1),
        (READS_FILE, ",1000,1000,3000,", ",1000,1000,-3000,", "reads.csv:2: column 15 `completed_ns`: `-3000`", 1),
        (READS_FILE, ",10,demand", ",18446744073709551616,demand", "column 9 `bytes`: `18446744073709551616`", 1),
        (READS_FILE, ",1000,1000,3000,", ",1000,1000,900,", "column 15 `completed_ns`: completed before", 1),
        (READS_FILE, ",1000,1000,3000,", ",1000,999,3000,", "column 14 `submitted_ns`: submitted before", 1),
        (READS_FILE, "0,3,1,0,", "0,3,1,7,", "column 4 `drive`: drive 7 is not among the 3", 1),
        (READS_FILE, "0,3,1,0,", "0,3,70000,0,", "column 3 `expert`: `70000`", 1),
        (READS_FILE, ",0,1,4096,", ",1,1,4096,", "column 6 `part`: part 1 of 1", 1),
        (READS_FILE, ",ok,", ",fine,", "column 16 `result`: `fine` is none of ok", 1),
        (READS_FILE, ",demand,1,1,", ",demand,1,8,", "reads.csv:3: 1 reads before this line belong to barrier 8", 1),
        (READS_FILE, "0,3,1,0,0,", "0,3,1,0,", "reads.csv:2: has 16 columns, expected 17", 1),
        (BARRIERS_FILE, "\n1,0,", "\n0,0,", "barriers.csv:3: column 1 `barrier`: barrier 0 comes after barrier 0", 2),
        (BARRIERS_FILE, ",4000,4000,", ",900,4000,", "column 11 `open_ns`: opens before barrier 0", 2),
        (BARRIERS_FILE, ",decode,", ",dreaming,", "barriers.csv:2: column 3 `phase`: `dreaming`", 2),
        (BARRIERS_FILE, ",1000,1000,3000,3000,", ",1000,3001,3000,3000,", "column 13 `last_ns`", 2),
        (BARRIERS_FILE, ",1000,1000,3000,3000,", ",1000,1000,3000,999,", "column 14 `close_ns`: closes before", 2),
    ];
    for (file, from, to, points_at, left_out) in cases {
        let (message, skipped) = replaced(file, from, to);
        assert!(message.contains(points_at), "{from} -> {to}: {message}");
        // a barrier that is left out takes its read with it
        assert_eq!(skipped, Some(left_out), "{from} -> {to}");
    }
}

#[test]
fn cut_off_files_are_noticed_wherever_they_are_cut() {
    for file in [READS_FILE, BARRIERS_FILE] {
        let dir = tempfile::tempdir().unwrap();
        good(dir.path());
        let whole = fs::read(dir.path().join(file)).unwrap();
        let line_ends: Vec<usize> = (1..=whole.len()).filter(|at| whole[at - 1] == b'\n').collect();
        for cut in 0..whole.len() {
            fs::write(dir.path().join(file), &whole[..cut]).unwrap();
            let result = report(dir.path(), false);
            // rows that are missing as a whole can only be noticed when the other file names them
            if line_ends.contains(&cut) && file == READS_FILE {
                continue;
            }
            let message = result.map(|_| ()).expect_err(&format!("{file} cut at {cut}")).to_string();
            assert!(message.contains(".csv:"), "{message}");
        }
    }
}

#[test]
fn windows_line_ends_and_a_byte_order_mark_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    good(dir.path());
    let expected = report(dir.path(), false).unwrap();
    for file in [READS_FILE, BARRIERS_FILE] {
        let text = fs::read_to_string(dir.path().join(file)).unwrap();
        fs::write(dir.path().join(file), format!("\u{feff}{}", text.replace('\n', "\r\n"))).unwrap();
    }
    assert_eq!(report(dir.path(), false).unwrap(), expected);
}

#[test]
fn empty_files_other_columns_and_newer_versions_are_refused_even_when_lenient() {
    for file in [READS_FILE, BARRIERS_FILE] {
        let (message, lenient) = broken(file, |_| Vec::new());
        assert!(message.contains("empty") && lenient.is_none(), "{message}");
        let (message, lenient) = broken(file, |text| text.replacen("step", "stop", 1).into_bytes());
        assert!(message.contains("not those of a trace") && lenient.is_none(), "{message}");
    }
    let newer = |text: &str| text.replacen("\"version\": 2", "\"version\": 99, \"new\": true", 1).into_bytes();
    let (message, lenient) = broken(TRACE_FILE, newer);
    assert!(message.contains("version 99") && message.contains("use a newer argodrive") && lenient.is_none());
}

const TOY: &str = include_str!("fixtures/traces/toy-exact.csv");
const SAMPLER: &str =
    "t_s,dev,v1,v2,v3\n0.2,disk0,100,10,5000\n0.2,cpu,1,2,3\n0.4,disk0,300,12,9000\n0.6,disk0,300,12,9000\n";
const FIO: &str = "0, 608606, 0, 65536, 196608, 0\n1, 285737, 0, 65536, 3080192, 0\n1, 376573, 1, 65536, 3473408, 0\n";
const BLKPARSE: &str = "  8,0    3        1     0.000001000   697  Q   R 2048 + 8 [cat]\n\
    \x20 8,0    3        2     0.000002000   697  D   R 2048 + 8 [cat]\n\
    \x20 8,0    1        1     0.000500000     0  C   R 2048 + 8 [0]\n\
    CPU0 (8,0):\n Reads Queued:           1,        4KiB\n";

/// Imports `bytes` as one of the formats.
fn import(format: usize, bytes: &[u8], lenient: bool) -> Result<(u64, u64), String> {
    let dir = tempfile::tempdir().unwrap();
    let (path, out) = (dir.path().join("x_clat.1.log"), dir.path().join("out"));
    fs::write(&path, bytes).unwrap();
    let report = match format {
        0 => per_read::import(&path, &out, PerReadOptions { lenient, ..PerReadOptions::default() }),
        1 => sampler::import(&path, None, &out, lenient),
        2 => fio::import(&[PathBuf::from(&path)], &out, None, lenient),
        _ => blkparse::import(&path, &out, lenient),
    };
    let report = report.map_err(|e| e.to_string())?;
    if format != 1 {
        let (summary, _) = traces::report(&out, false).expect("an import that succeeds can be read");
        assert_eq!(summary.drives.iter().map(|d| d.reads + d.failed).sum::<u64>(), report.reads);
    }
    Ok((report.reads + report.windows, report.skipped_rows))
}

const FORMATS: [&str; 4] = [TOY, SAMPLER, FIO, BLKPARSE];

#[test]
fn foreign_formats_name_the_faulty_field() {
    let fault = |format: usize, from: &str, to: &str| {
        assert!(FORMATS[format].contains(from), "{from}");
        let changed = FORMATS[format].replacen(from, to, 1);
        let message = import(format, changed.as_bytes(), false).expect_err(&format!("{from} -> {to}"));
        let lenient = import(format, changed.as_bytes(), true);
        assert!(lenient.is_err() || lenient.as_ref().is_ok_and(|l| l.1 > 0), "{from} -> {to}: {lenient:?}");
        message
    };
    let cases = [
        (0, "3000,0,1,5", "-3000,0,1,5", ":3: column 1 `t_us`: `-3000`"),
        (0, "3000,0,1,5", "NaN,0,1,5", ":3: column 1 `t_us`: `NaN`"),
        (0, "internal,2000000,D", "internal,2000000,X", ":3: column 7 `prio`: `X` is none of D, P"),
        (0, "internal,2000000", "internal,9000000", ":3: begins before the trace does"),
        (0, "7000,1,2,1023", "7000,0,1,1023", "barrier 0 began already"),
        (0, "10000,2,3,1023", "100,2,3,1023", "time goes back"),
        (0, "3000,0,1,5", "3000,0,2,5", "barrier 0 is of layer 1, not 2"),
        (0, "1023,read,0", "1022,read,0", "marks a barrier"),
        (0, "prio,target", "prio,goal,target", "unknown column `goal`"),
        (0, "t_us,", "t_ms,", "unknown column `t_ms`"),
        (1, "0.4,disk0,300", "0.4,disk0,99", ":4: column 3 `v1`: the counter of `disk0` goes back, it was 100"),
        (1, "0.4,disk0", "0.1,disk0", ":4: column 1 `t_s`: time goes back"),
        (1, "0.4,disk0,300,12,9000\n", "0.4,disk0,300,12\n", ":4: has 4 columns, expected 5"),
        (1, "0.4,disk0", "0.2,disk0", "`disk0` stands twice in one tick"),
        (2, "1, 285737, 0, 65536", "1, 285737, 0, 0", "log with --log_avg_msec=0"),
        (2, "1, 285737, 0", "1, 285737, 3", ":2: column 3 `direction`: `3`"),
        (2, "1, 376573", "0, 376573", "time goes back, it was 1 ms"),
        (3, "0.000002000", "-0.000002000", ":2: column 4 `seconds`: `-0.000002000`"),
        (3, "  D   R 2048", "  D   R 99999999999999999999", ":2: column 8 `sector`"),
        (3, "0.000500000", "0.000000500", ":3: ends before its hand-over"),
    ];
    for (format, from, to, points_at) in cases {
        let message = fault(format, from, to);
        assert!(message.contains(points_at), "{from} -> {to}: {message}");
    }
    for (format, text) in FORMATS.iter().enumerate() {
        assert!(import(format, text.as_bytes(), false).is_ok(), "{format}");
        let message = import(format, text.trim_end().as_bytes(), false);
        // blkparse's summary ends the trace before the cut
        assert!(format == 3 || message.unwrap_err().contains("has no line end"), "{format}");
        assert!(import(format, b"", false).is_err(), "{format}: nothing at all");
        let windows = format!("\u{feff}{}", text.replace('\n', "\r\n"));
        assert_eq!(import(format, windows.as_bytes(), false), import(format, text.as_bytes(), false), "{format}");
    }
}

/// Bytes cut out of, or put into, a text.
fn splice(text: &[u8], at: usize, remove: usize, insert: &[u8]) -> Vec<u8> {
    let at = at % (text.len() + 1);
    let end = (at + remove).min(text.len());
    [&text[..at], insert, &text[end..]].concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn random_splices_of_our_files_never_panic(
        file in 0usize..3, at in any::<usize>(), remove in 0usize..40,
        insert in proptest::collection::vec(any::<u8>(), 0..12), digits in "[0-9,.\n-]{0,12}", text in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        good(dir.path());
        let path = dir.path().join([READS_FILE, BARRIERS_FILE, TRACE_FILE][file]);
        let insert = if text { digits.into_bytes() } else { insert };
        fs::write(&path, splice(&fs::read(&path).unwrap(), at, remove, &insert)).unwrap();
        for lenient in [false, true] {
            if let Ok((summary, rows)) = report(dir.path(), lenient) {
                prop_assert_eq!(summary.all.barriers, rows.len() as u64);
                prop_assert!(lenient || summary.skipped_rows == 0);
            }
        }
    }

    #[test]
    fn random_splices_of_foreign_files_never_panic(
        format in 0usize..4, at in any::<usize>(), remove in 0usize..40,
        insert in proptest::collection::vec(any::<u8>(), 0..12), digits in "[0-9,. \n+-]{0,12}", text in any::<bool>(),
    ) {
        let insert = if text { digits.into_bytes() } else { insert };
        let bytes = splice(FORMATS[format].as_bytes(), at, remove, &insert);
        for lenient in [false, true] {
            // reading back what was imported is checked inside
            let done = import(format, &bytes, lenient);
            prop_assert!(lenient || done.map_or(true, |(_, skipped)| skipped == 0));
        }
    }
}
