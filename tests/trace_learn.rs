//! `argodrive trace learn` on traces of the earlier format, which have no routes, and on bad input. The trace in
//! `fixtures/traces/version-1` is a toy made by hand.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::replay::ReplayError;
use argodrive::replay::learn::{LearnOptions, Learnt, learn};
use argodrive::trace::log;
use assert_cmd::Command;
use predicates::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/traces/version-1")
}

fn options() -> LearnOptions {
    LearnOptions { depth: 1, successors: 4, lenient: false, model_id: Some("toy".into()) }
}

fn learnt(folders: &[PathBuf], change: impl FnOnce(&mut LearnOptions)) -> Result<Learnt, ReplayError> {
    let mut options = options();
    change(&mut options);
    learn(folders, &options)
}

#[test]
fn a_trace_of_version_1_is_still_read_and_learnt_from() {
    let header = log::read_header(&fixture()).unwrap();
    assert_eq!((header.version, header.model_id, header.routes.len()), (1, None, 0));
    assert_eq!(log::read_barriers(&fixture()).unwrap().len(), 6);
    let Learnt { table, tokens, incomplete, from_reads, .. } = learnt(&[fixture()], |_| {}).unwrap();
    // the last pass found an expert resident: its reads do not tell all, and it is left out
    assert_eq!((tokens, incomplete, from_reads), (2, 1, vec![fixture()]));
    let dir = tempfile::tempdir().unwrap();
    argodrive::reader::predict::table_file::write(&dir.path().join("t"), &table).unwrap();
    let text = fs::read_to_string(dir.path().join("t")).unwrap();
    let rows: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(rows, ["1,1,3,2,7:2 8:1", "1,1,5,1,7:1 8:1", "2,1,7,1,3:1", "2,1,8,1,3:1"]);
}

#[test]
fn what_cannot_be_learnt_from_is_said() {
    let fails = |folders: &[PathBuf], change: fn(&mut LearnOptions), word: &str| {
        let message = learnt(folders, change).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    };
    fails(&[fixture()], |o| o.model_id = None, "name its --store");
    fails(&[fixture()], |o| o.depth = 0, "1 to 8");
    fails(&[fixture()], |o| o.successors = 0, "1 to 512");
    fails(&[], |_| {}, "no trace");
    fails(&["/nowhere".into()], |_| {}, "trace.json");
    // another model, and a cut file
    let dir = tempfile::tempdir().unwrap();
    for name in ["trace.json", "reads.csv", "barriers.csv"] {
        fs::copy(fixture().join(name), dir.path().join(name)).unwrap();
    }
    let json = fs::read_to_string(fixture().join("trace.json")).unwrap();
    fs::write(dir.path().join("trace.json"), json.replacen("\"clock\"", "\"model_id\": \"other\", \"clock\"", 1))
        .unwrap();
    fails(&[dir.path().into()], |_| {}, "is a trace of model other");
    fails(&[fixture(), dir.path().into()], |o| o.model_id = None, "name its --store");
    fs::write(dir.path().join("trace.json"), json).unwrap();
    let reads = fs::read_to_string(fixture().join("reads.csv")).unwrap();
    fs::write(dir.path().join("reads.csv"), reads.replacen(",demand,", ",wish,", 1)).unwrap();
    fails(&[dir.path().into()], |_| {}, "reads.csv:2: column 10");
    let skipping = learnt(&[dir.path().into()], |o| o.lenient = true).unwrap();
    assert_eq!((skipping.skipped.rows, skipping.tokens), (1, 1), "the pass with the hole is left out too");
}

#[test]
fn the_command_says_what_it_learnt_and_leaves_nothing_behind_when_it_fails() {
    let dir = tempfile::tempdir().unwrap();
    let command = |trace: &Path| {
        let mut command = Command::cargo_bin("argodrive").unwrap();
        command.args(["trace", "learn", "--out"]).arg(dir.path().join("t")).arg(trace);
        command
    };
    command(&fixture()).assert().code(2).stderr(predicate::str::contains("--store"));
    command(&dir.path().join("no")).assert().code(2).stderr(predicate::str::contains("trace.json"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
