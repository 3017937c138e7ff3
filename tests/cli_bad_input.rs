//! What the real binary refuses, with which words and which exit code: 2 for usage, input and environment; never a panic,
//! never half a result.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::cli::Cli;
use argodrive::sys::direct::is_memory_file_system;
use assert_cmd::Command;
use clap::CommandFactory;
use prepared::{Drives, argodrive, dense_store, has, ids, json_of, outcome, policy, refused, tiny_store};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;

fn staged() -> &'static (Drives, PathBuf) {
    static CELL: OnceLock<(Drives, PathBuf)> = OnceLock::new();
    CELL.get_or_init(|| {
        let drives = Drives::new(2, None);
        let plan = drives.staged(tiny_store(), "full-mirror");
        (drives, plan)
    })
}

fn decode(args: &[&str]) -> Command {
    let mut command = argodrive(["decode", "--store"]);
    command.arg(tiny_store()).args(args);
    command
}

fn ladder(store: &Path, drives: &Path, args: &[&str]) -> Command {
    let mut command = argodrive(["ladder", "--prompt", "abc", "--max-new", "2", "--store"]);
    command.arg(store).arg("--drives").arg(drives).arg("--policy").arg(policy("full-mirror")).args(args);
    command
}

/// Refused by the argument parser: it explains over several lines, and no command has begun.
fn misused(command: &mut Command, words: &[&str]) {
    let (code, stdout, stderr) = outcome(command);
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    assert!(stderr.starts_with("error: "), "{stderr}");
    has(&stderr, words);
}

#[test]
fn stores_that_are_none_or_not_finished() {
    let dir = prepared::folder();
    let missing = dir.path().join("none");
    for command in ["decode", "chat", "ladder"] {
        let mut run = argodrive([command, "--store"]);
        run.arg(&missing);
        match command {
            "chat" => run.args(["--message", "x"]),
            "decode" => run.args(["--prompt", "x"]),
            _ => {
                run.args(["--prompt", "x", "--drives"]).arg(&staged().0.toml).arg("--policy").arg(policy("full-mirror"))
            }
        };
        refused(&mut run, &["none/store.json", "not a store", "argodrive import"]);
    }
    refused(argodrive(["verify"]).arg(dir.path()), &["neither a plan nor a store"]);
    // as a killed import leaves it
    let half = dir.path().join("half");
    argodrive(["import"])
        .arg(prepared::repo("tests/fixtures/oracle/tiny"))
        .arg("--store")
        .arg(&half)
        .assert()
        .success();
    fs::remove_file(half.join("store.json")).unwrap();
    fs::write(half.join("import.journal"), "").unwrap();
    let mut run = argodrive(["decode", "--prompt", "x", "--store"]);
    refused(run.arg(&half), &["half/store.json", "argodrive import"]);
    refused(argodrive(["import", "--store"]).arg(&missing).arg(dir.path()), &["config.json"]);
    misused(
        argodrive(["import", "x", "--store", "y", "--trunk", "int3"]).current_dir(dir.path()),
        &["int3", "bf16", "int8"],
    );
    assert!(!dir.path().join("y").exists() && !missing.exists());
}

#[test]
fn plans_that_are_broken_newer_or_for_another_model() {
    let (drives, plan) = staged();
    let dir = prepared::folder();
    let text = fs::read_to_string(plan).unwrap();
    let broken = |name: &str, content: &str, words: &[&str]| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        let mut all = vec![name];
        all.extend(words);
        refused(decode(&["--prompt", "x", "--plan"]).arg(&path), &all);
        refused(argodrive(["stage"]).arg(&path), &all);
        refused(argodrive(["verify"]).arg(&path), &all);
    };
    broken("cut.json", &text[..text.len() / 2], &["not a valid plan", "column"]);
    broken(
        "newer.json",
        &text.replacen("\"version\":2", "\"version\":9,\"x\":0", 1),
        &["version 9", "newer argodrive"],
    );
    broken("typo.json", &text.replacen("\"seed\"", "\"sede\"", 1), &["sede"]);
    broken("empty.json", "", &["not a valid plan"]);
    broken("escape.json", &text.replacen("\"model_id\":\"", "\"model_id\":\"../", 1), &["model id"]);
    refused(argodrive(["stage"]).arg(dir.path().join("none.json")), &["none.json", "No such file"]);
    let mut other = argodrive(["decode", "--prompt", "x", "--store"]);
    refused(other.arg(prepared::mini_store()).arg("--plan").arg(plan), &["the plan is for model", "plan again"]);
    refused(decode(&["--prompt", "x", "--drives"]).arg(&drives.toml), &["--drives goes with --plan"]);

    // staged nowhere, and a drive that is gone
    let fresh = Drives::new(2, None);
    let unstaged = fresh.plan(tiny_store(), "round-robin");
    refused(decode(&["--prompt", "x", "--plan"]).arg(&unstaged), &["drive `amber`", "drive.json", "argodrive stage"]);
    fs::remove_dir(&fresh.specs[0].path).unwrap();
    refused(decode(&["--prompt", "x", "--plan"]).arg(&unstaged), &["drive `amber`", "not mounted"]);
    refused(argodrive(["verify"]).arg(&unstaged), &["drive amber", "not mounted", "argodrive stage"]);
    refused(&mut ladder(tiny_store(), &fresh.toml, &["--out", "/proc/x"]), &["/proc/x"]);
}

#[test]
fn policies_and_drive_files_with_typing_mistakes() {
    let dir = prepared::folder();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let plan = |drives: &Path, policy: &Path| {
        let mut command = argodrive(["plan", "--store"]);
        command.arg(tiny_store()).arg("--drives").arg(drives).arg("--policy").arg(policy);
        command.arg("--out").arg(dir.path().join("out.json"));
        command
    };
    let good = &staged().0.toml;
    refused(
        &mut plan(good, &file("p.toml", "policy = \"mirror\"\n")),
        &["p.toml", "mirror", "round-robin", "full-mirror"],
    );
    refused(&mut plan(good, &dir.path().join("q.toml")), &["--policy", "q.toml"]);
    let two = "[[drive]]\nname = \"a\"\npath = \"/a\"\n[[drive]]\nname = \"b\"\npath = \"/b\"\n";
    let cases = [
        (two.replacen("name", "nmae", 1), vec!["d.toml", "nmae", "name"]),
        (two.replace("\"b\"", "\"a\""), vec!["two drives are named `a`"]),
        (two.replace("/b", "/a"), vec!["share the path /a"]),
        (format!("{two}emulate = {{ rate = \"fast\" }}\n"), vec!["drive `b`", "emulate.rate", "fast"]),
        (format!("{two}emulate = {{ rate = \"5MB/s\", latncy = \"1ms\" }}\n"), vec!["d.toml", "latncy"]),
        (String::new(), vec!["[[drive]]"]),
        ("[[drive]\n".into(), vec!["d.toml"]),
    ];
    for (text, words) in cases {
        let (code, stdout, stderr) = outcome(&mut plan(&file("d.toml", &text), &policy("full-mirror")));
        assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
        has(&stderr, &words);
        assert!(!dir.path().join("out.json").exists());
    }
    refused(&mut plan(&dir.path().join("none.toml"), &policy("full-mirror")), &["none.toml"]);
    let mut nowhere = argodrive(["plan", "--out", "/proc/no/plan.json", "--store"]);
    nowhere.arg(tiny_store()).arg("--drives").arg(good).arg("--policy").arg(policy("full-mirror"));
    refused(&mut nowhere, &["--out /proc/no/plan.json"]);
}

#[test]
fn prompts_and_settings_that_cannot_be() {
    let dir = prepared::folder();
    let file = dir.path().join("prompt");
    fs::write(&file, b"ab\xff").unwrap();
    refused(decode(&["--prompt-file"]).arg(&file), &["--prompt-file", "not UTF-8 (byte 2)"]);
    fs::write(&file, b"").unwrap();
    refused(decode(&["--prompt-file"]).arg(&file), &["the prompt is empty"]);
    refused(&mut decode(&["--prompt", ""]), &["the prompt is empty"]);
    refused(&mut decode(&["--prompt-file", "/nowhere/prompt"]), &["--prompt-file /nowhere/prompt"]);
    refused(&mut decode(&[]), &["no prompt", "--prompt-file"]);
    misused(&mut decode(&["--prompt", "a", "--prompt-file", "b"]), &["cannot be used with"]);
    refused(&mut decode(&["--prompt", "a", "--resident", "--queue-depth", "2"]), &["queue_depth", "resident"]);

    let heat = dir.path().join("heat.csv");
    fs::write(&heat, "layer,expert,count\n1,3,9\n1,99,4\n").unwrap();
    let pinned = ["--prompt", "a", "--cache-bytes", "1MB", "--cache-policy", "pinned"];
    refused(decode(&pinned).arg("--cache-heat").arg(&heat), &["heat.csv: line 3", "expert 99 of layer 1"]);
    refused(&mut decode(&pinned), &["--cache-heat"]);
    refused(&mut decode(&["--prompt", "a", "--cache-policy", "lfu-decay"]), &["--cache-bytes"]);
    refused(&mut decode(&["--prompt", "a", "--cache-bytes", "1GB"]), &["--cache-bytes 1000000000", "--buffer-bytes"]);
    refused(&mut decode(&["--prompt", "a", "--cache-bytes", "100"]), &["--cache-bytes 100", "holds no expert"]);
    refused(&mut decode(&["--prompt", "a", "--prefetch-depth", "2"]), &["prefetch_depth", "--prefetch"]);
    refused(&mut decode(&["--prompt", "a", "--prefetch", "markov"]), &["--prefetch-table"]);
    let tight = ["--prompt", "a", "--prefetch", "same-as-last", "--buffer-bytes", "50KB"];
    refused(&mut decode(&tight), &["--prefetch same-as-last", "--buffer-bytes 50000"]);
    misused(&mut decode(&["--prompt", "a", "--prefetch", "magic"]), &["magic", "same-as-last"]);

    let long = "a long prompt of many words ".repeat(4);
    refused(&mut decode(&["--prompt", &long, "--max-context", "16"]), &["the prompt has", "--max-context is 16"]);
    // a text that reaches the end of its context stops there, and says why
    let full = json_of(&mut decode(&["--prompt", "abc", "--max-context", "9", "--max-new", "99", "--json"]));
    assert_eq!(full["stopped"], "context_full");
    assert_eq!(ids(&full["prompt_token_ids"]).len() + ids(&full["token_ids"]).len(), 10, "the last token is not fed");
    refused(&mut decode(&["--prompt", "abc", "--max-context", "999999"]), &["999999", "1 to 4096"]);
    for flags in [["--top-p", "0.5"], ["--top-k", "4"], ["--seed", "3"]] {
        refused(decode(&["--prompt", "abc"]).args(flags), &[flags[0], "--temperature"]);
    }
    refused(&mut decode(&["--prompt", "abc", "--temperature", "0.5", "--top-p", "1.5"]), &["top", "1.5"]);
    refused(&mut decode(&["--prompt", "abc", "--temperature=-1"]), &["temperature", "-1"]);
    refused(&mut decode(&["--prompt", "abc", "--queue-depth", "0"]), &["queue depth 0"]);
    refused(&mut decode(&["--prompt", "abc", "--buffer-bytes", "1KB"]), &["buffer"]);
    misused(&mut decode(&["--prompt", "abc", "--buffer-bytes", "many"]), &["--buffer-bytes", "many"]);
    misused(&mut decode(&["--prompt", "abc", "--dispatch", "best"]), &["best", "first-hit", "least-inflight"]);
    refused(&mut decode(&["--prompt", "abc", "--trace", "/proc/none/trace"]), &["--trace /proc/none/trace"]);
    refused(&mut decode(&["--prompt", "abc", "--prefill-rows", "0"]), &["--prefill-rows"]);
    let mut silent = argodrive(["chat", "--message", " ", "--store"]);
    refused(silent.arg(tiny_store()), &["--message is empty"]);
    misused(&mut argodrive(["decod"]), &["decod", "decode"]);
}

#[test]
fn dense_models_decode_without_drives_and_refuse_what_needs_them() {
    let text = fs::read(prepared::repo("tests/fixtures/oracle/argo-mini-draft.golden.json")).unwrap();
    let golden = serde_json::from_slice::<serde_json::Value>(&text).unwrap()["prompts"][0].clone();
    let dense = |args: &[&str]| {
        let mut command = argodrive(["decode", "--max-new", "8", "--json", "--prompt"]);
        command.arg(golden["prompt"].as_str().unwrap()).arg("--store").arg(dense_store()).args(args);
        command
    };
    let run = json_of(&mut dense(&[]));
    assert_eq!(ids(&run["token_ids"]), ids(&golden["greedy"])[..8]);
    assert!(run["drives"].as_array().unwrap().is_empty());
    argodrive(["verify"]).arg(dense_store()).assert().success();
    let (drives, plan) = staged();
    refused(dense(&["--plan"]).arg(plan), &["--plan", "dense"]);
    refused(dense(&["--drives"]).arg(&drives.toml), &["--drives goes with --plan"]);
    refused(&mut dense(&["--trace", "x"]), &["--trace", "dense"]);
    let mut chat = argodrive(["chat", "--message", "hi", "--store"]);
    refused(chat.arg(dense_store()).arg("--plan").arg(plan), &["--plan", "dense"]);
    refused(&mut ladder(dense_store(), &drives.toml, &[]), &["dense", "no ladder"]);
    let mut plan = argodrive(["plan", "--out", "/proc/none.json", "--store"]);
    plan.arg(dense_store()).arg("--drives").arg(&drives.toml).arg("--policy").arg(policy("full-mirror"));
    refused(&mut plan, &["no routed experts"]);
}

#[test]
fn ladders_that_cannot_be_climbed_leave_nothing() {
    let (drives, _) = staged();
    let dir = prepared::folder();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let (toml, file) = (&drives.toml, file.to_str().unwrap());
    let store = tiny_store();
    refused(&mut ladder(store, toml, &["--order", "blue,red", "--out", file]), &["--order", "`red`", "amber, blue"]);
    refused(&mut ladder(store, toml, &["--order", "blue,blue", "--out", file]), &["`blue` twice"]);
    refused(&mut ladder(store, toml, &["--out", file]), &["results", "file"]);
    refused(&mut ladder(store, toml, &["--out", "/proc/none"]), &["results", "/proc/none"]);
    let out = dir.path().join("out");
    let out = out.to_str().unwrap();
    refused(&mut ladder(store, toml, &["--repetitions", "0", "--out", out]), &["--repetitions"]);
    let mut single = argodrive(["ladder", "--prompt", "abc", "--max-new", "1", "--out", out, "--store"]);
    single.arg(store).arg("--drives").arg(toml).arg("--policy").arg(policy("full-mirror"));
    refused(&mut single, &["--max-new must be at least 2"]);
    refused(&mut ladder(store, toml, &["--max-context", "2", "--out", out]), &["--max-context is 2"]);
    let mut empty = argodrive(["ladder", "--prompt", "", "--out", out, "--store"]);
    empty.arg(store).arg("--drives").arg(toml).arg("--policy").arg(policy("full-mirror"));
    refused(&mut empty, &["the prompt is empty"]);
    assert!(!Path::new(out).exists(), "no results folder of a ladder that never began");
}

#[test]
fn memory_file_systems_are_no_drives() {
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() || !is_memory_file_system(shm).unwrap() {
        assert!(std::env::var_os("CI").is_none(), "/dev/shm is no memory file system");
        eprintln!("SKIPPED: /dev/shm is no memory file system");
        return;
    }
    let memory = tempfile::tempdir_in(shm).unwrap();
    let dir = prepared::folder();
    let (toml, plan) = (dir.path().join("drives.toml"), dir.path().join("plan.json"));
    fs::write(&toml, format!("[[drive]]\nname = \"ram\"\npath = \"{}\"\n", memory.path().display())).unwrap();
    let mut command = argodrive(["plan", "--store"]);
    command.arg(tiny_store()).arg("--drives").arg(&toml).arg("--policy").arg(policy("round-robin"));
    command.arg("--out").arg(&plan).assert().success();
    argodrive(["stage"]).arg(&plan).assert().success();
    let run = || {
        let mut command = decode(&["--prompt", "abc", "--max-new", "4", "--json"]);
        command.arg("--plan").arg(&plan);
        command
    };
    refused(&mut run(), &["drive `ram`", "memory file system", "--allow-fallback"]);
    let resident = json_of(decode(&["--prompt", "abc", "--max-new", "4", "--json"]).arg("--resident"));
    assert_eq!(json_of(run().arg("--allow-fallback"))["token_ids"], resident["token_ids"]);
    assert_eq!(json_of(run().arg("--buffered"))["token_ids"], resident["token_ids"]);
}

#[test]
fn help_fits_and_mentions_every_argument() {
    let cli = Cli::command();
    let (code, overview, _) = outcome(&mut argodrive(["--help"]));
    assert_eq!(code, 0);
    for command in cli.get_subcommands() {
        let name = command.get_name();
        has(&overview, &[name]);
        let (code, text, _) = outcome(&mut argodrive([name, "--help"]));
        assert_eq!(code, 0);
        let wide = text.lines().chain(overview.lines()).find(|l| l.chars().count() > 120);
        assert!(wide.is_none(), "{name}: {wide:?}");
        assert!(command.get_about().is_some(), "{name}");
        for arg in command.get_arguments().filter(|a| !a.is_hide_set()) {
            let value = || arg.get_value_names().and_then(|n| n.first()).map_or("", |n| n.as_str()).to_owned();
            let shown = arg.get_long().map_or_else(value, |l| format!("--{l}"));
            has(&text, &[&shown]);
            assert!(arg.get_help().is_some(), "{name} {shown} has no help text");
        }
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let (_, plan) = staged();
    let (store, plan) = (tiny_store().to_str().unwrap(), plan.to_str().unwrap());
    let cases: [&[&str]; 9] = [
        &["decode", "--store", store, "--plan", plan, "--prompt", "abc", "--max-new", "2000"],
        &["decode", "--store", store, "--plan", plan, "--prompt", "abc", "--max-new", "4", "--json"],
        &["chat", "--store", store, "--message", "abc", "--max-new", "2000"],
        &["stage", plan],
        &["stage", plan, "--json"],
        &["verify", plan],
        &["verify", store, "--json"],
        &["--help"],
        &["decode", "--help"],
    ];
    for args in cases {
        // the first reads one byte as `head -c 1` does, the others' reader is gone from the start
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_argodrive"))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = child.stdout.take().unwrap();
        if args.contains(&"2000") {
            stdout.read_exact(&mut [0u8]).unwrap();
        }
        drop(stdout);
        let out = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(0), "{args:?}: {stderr}");
        assert!(!stderr.contains("error") && !stderr.contains("panicked"), "{args:?}: {stderr}");
    }
}
