//! Faults on purpose, from outside: the same tokens come out, everything says that it is no normal result, and what is lost is
//! named with what brings it back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use prepared::{Drives, argodrive, has, ids, json_of, outcome, refused, tiny_store};
use serde_json::Value;
use std::fs;
use std::path::Path;

fn decode(drives: &Drives, plan: &Path) -> assert_cmd::Command {
    let mut command = argodrive(["decode", "--prompt", "The block comes back", "--max-new", "6", "--json"]);
    command.arg("--store").arg(tiny_store()).arg("--plan").arg(plan).arg("--drives").arg(&drives.toml);
    command
}

fn setting<'a>(run: &'a Value, name: &str) -> &'a Value {
    run["settings"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap()
}

/// Runs a command whose record counts, or would if nobody else had read from the same disk.
fn accepted(command: &mut assert_cmd::Command) -> Value {
    let (code, said, notes) = outcome(command);
    let run: Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {notes}"));
    let others = |reason: &Value| reason.as_str().unwrap().starts_with("foreign reads: ");
    let reasons = run["rejected"].as_array().unwrap();
    assert!(reasons.iter().all(others) && code == i32::from(!reasons.is_empty()), "{code}, {reasons:?}");
    run
}

#[test]
fn whatever_a_drive_does_the_tokens_are_the_same_and_the_run_is_marked() {
    let drives = Drives::new(3, None);
    let plan = drives.staged(tiny_store(), "full-mirror");
    let plain = json_of(&mut decode(&drives, &plan));
    assert_eq!(
        (&plain["injected_faults"], setting(&plain, "faults")["verdict"].as_str()),
        (&false.into(), Some("proved"))
    );
    assert_eq!(setting(&plain, "faults")["asked"], "off");
    let cases: [(&str, &str, &[&str]); 4] = [
        ("blue: eio 20% seed=3", "blue eio", &[]),
        ("blue: short @4..8; amber: flip @3..5", "blue short 4", &["--verify-reads"]),
        // by turns, so that coral has ten reads however the others do
        ("coral: stall @9..; blue: slow 3x", "coral stall", &["--read-timeout", "1500", "--dispatch", "round-robin"]),
        ("blue: vanish @10..", "blue vanish", &[]),
    ];
    for (faults, met, more) in cases {
        let out = drives.dir.path().join("results");
        let _ = fs::remove_dir_all(&out);
        let mut command = decode(&drives, &plan);
        command.args(["--faults", faults, "--assert", "--out"]).arg(&out).args(more);
        let run = accepted(&mut command);
        assert_eq!(ids(&run["token_ids"]), ids(&plain["token_ids"]), "{faults}");
        assert_eq!(run["injected_faults"], true);
        let line = setting(&run, "faults");
        assert_eq!((line["verdict"].as_str(), line["under_test"].as_bool()), (Some("proved"), Some(true)), "{line}");
        has(line["seen"].as_str().unwrap(), &[met]);
        let moved = run["trouble"]["reads_moved"].as_u64().unwrap();
        assert!(
            moved >= 1 && run["trouble"]["reads_failed"].as_u64().unwrap() >= moved,
            "{faults}: {}",
            run["trouble"]
        );
        let mut list = argodrive(["results", "list", "--runs"]);
        let (_, table, _) = outcome(list.arg(&out));
        has(&table, &["INJECTED FAULTS"]);
    }
    // A drive that is lost at its first read was asked: what it failed at moved, and that is what the layout did.
    for faults in ["blue: vanish", "blue: eio"] {
        let mut gone = decode(&drives, &plan);
        let run = accepted(gone.args(["--faults", faults, "--assert", "--out"]).arg(drives.dir.path().join("results")));
        let (layout, trouble) = (setting(&run, "layout"), &run["trouble"]);
        assert_eq!((layout["verdict"].as_str(), layout["under_test"].as_bool()), (Some("proved"), Some(true)), "{run}");
        let lost = format!("blue was lost at its first read, {} failed and", trouble["reads_failed"]);
        has(layout["seen"].as_str().unwrap(), &["blue 0", &lost, &format!(" {} moved", trouble["reads_moved"])]);
        assert!(trouble["reads_moved"].as_u64() > Some(0), "{trouble}");
        assert_eq!(ids(&run["token_ids"]), ids(&plain["token_ids"]));
    }
    // One that nobody asked has nothing to show.
    let mut last: Value = serde_json::from_str(&fs::read_to_string(&plan).unwrap()).unwrap();
    last.as_object_mut().unwrap().remove("check");
    for layer in last["layers"].as_object_mut().unwrap().values_mut() {
        layer.as_array_mut().unwrap().iter_mut().for_each(|homes| *homes = serde_json::json!([0, 2, 1]));
    }
    let unasked = drives.dir.path().join("unasked.json");
    fs::write(&unasked, last.to_string()).unwrap();
    let (code, said, _) = outcome(decode(&drives, &unasked).args(["--dispatch", "first-hit", "--assert"]));
    let run: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, setting(&run, "layout")["verdict"].as_str()), (1, Some("contradicted")), "{run}");
    has(setting(&run, "layout")["seen"].as_str().unwrap(), &["blue, coral served no read"]);
    let (code, _, said) = outcome(decode_text(&drives, &plan).args(["--faults", "blue: vanish @10.."]));
    assert_eq!(code, 0, "{said}");
    has(&said, &["(INJECTED FAULTS)", "not a normal result", "blue: vanish @10..", "left alone: it is gone"]);
}

fn decode_text(drives: &Drives, plan: &Path) -> assert_cmd::Command {
    let mut command = argodrive(["decode", "--prompt", "The block comes back", "--max-new", "6"]);
    command.arg("--store").arg(tiny_store()).arg("--plan").arg(plan).arg("--drives").arg(&drives.toml);
    command
}

#[test]
fn what_no_other_drive_holds_ends_the_run_with_what_to_do() {
    let drives = Drives::new(2, None);
    let plan = drives.staged(tiny_store(), "round-robin");
    let text = fs::read_to_string(&drives.toml).unwrap().replacen("\n\n", "\nfaults = [\"vanish @12..\"]\n\n", 1);
    fs::write(&drives.toml, &text).unwrap();
    let (plan_text, toml) = (plan.display().to_string(), drives.toml.display().to_string());
    let command = format!("argodrive stage --repair {plan_text} --drives {toml}");
    let words = [
        "drive `amber`",
        "no other copy is left",
        "experts of the plan are on no other drive than `amber`",
        "L",
        &command,
    ];
    refused(&mut decode(&drives, &plan), &words);
    refused(decode(&drives, &plan).args(["--faults", "denim: eio"]), &["no drive `denim`", "amber, blue"]);
    refused(decode(&drives, &plan).args(["--resident", "--faults", "amber: eio"]), &["resident"]);
    // Parts of striped experts lie on one drive each; one read that fails is enough.
    let plain = Drives::new(2, None);
    let striped = plain.staged(tiny_store(), "stripe");
    json_of(&mut decode(&plain, &striped));
    for (faults, more) in [("blue: vanish @8..", "on no other drive than `blue`"), ("blue: eio @8", "Input/output")] {
        let words = ["drive `blue`", "experts are striped", "argodrive stage --repair", more];
        refused(decode(&plain, &striped).args(["--faults", faults]), &words);
    }
    // Nothing is tuned or promoted on drives that fail on purpose.
    let mut tune = argodrive(["tune", "--prompt-file"]);
    let prompt = drives.dir.path().join("prompt.txt");
    fs::write(&prompt, "abc").unwrap();
    tune.arg(&prompt).arg("--store").arg(tiny_store()).arg("--drives").arg(&drives.toml);
    refused(tune.arg("--profile").arg(drives.dir.path().join("profile.toml")), &["`amber`", "`faults`", "on purpose"]);
    let profile = drives.dir.path().join("faulty.toml");
    fs::write(&profile, format!("plan = {plan:?}\n[reader]\nfaults = [\"amber: eio\"]\n")).unwrap();
    refused(decode(&drives, &plan).arg("--profile").arg(&profile), &["`reader.faults`", "promoted"]);
}
