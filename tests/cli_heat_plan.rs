//! Heat, plan and judgement as a user runs them: what a decode asked for becomes a plan, the plan is staged and read, and
//! nothing that is not this model's heat gets in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::spec::Emulation;
use assert_cmd::Command;
use prepared::{Drives, argodrive, folder, has, ids, json_of, mini_store, outcome, policy, refused, tiny_store};
use std::fs;
use std::path::{Path, PathBuf};

fn heat(store: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = argodrive(["heat", "--prompt", "one two three four five", "--max-new", "6", "--store"]);
    command.arg(store).arg("--out").arg(out).args(more);
    command
}

fn routes(files: &[&Path], out: &Path, more: &[&str]) -> Command {
    let mut command = argodrive(["heat", "--routes"]);
    command.args(files).arg("--out").arg(out).args(more);
    command
}

fn plan(store: &Path, drives: &Drives, policy_file: &Path, out: &Path) -> Command {
    let mut command = argodrive(["plan", "--store"]);
    command.arg(store).arg("--drives").arg(&drives.toml).arg("--policy").arg(policy_file).arg("--out").arg(out);
    command
}

fn public(name: &str) -> Option<PathBuf> {
    ["../shared/data", "../../shared/data"]
        .iter()
        .map(|p| Path::new(env!("CARGO_MANIFEST_DIR")).join(p).join(name))
        .find(|p| p.is_file())
}

#[test]
fn a_decode_becomes_heat_then_a_plan_then_the_same_tokens() {
    let drives = Drives::new(3, None);
    let at = |name: &str| drives.dir.path().join(name);
    let (streamed, resident) = (at("streamed.json"), at("resident.json"));
    let seen = json_of(&mut heat(mini_store(), &streamed, &["--json"]));
    heat(mini_store(), &resident, &["--resident"]).assert().success();
    assert_eq!(fs::read(&streamed).unwrap(), fs::read(&resident).unwrap(), "routes do not depend on where experts lie");
    assert_eq!(seen["domains"][0]["domain"], "all");
    assert!(seen["rows"].as_u64().unwrap() > 0);
    let out = at("barrier.plan.json");
    let mut command = plan(mini_store(), &drives, &policy("barrier"), &out);
    let made = json_of(command.arg("--heat").arg(&streamed).arg("--json"));
    assert_eq!((made["planner"].as_str(), made["rates_known"].as_bool()), (Some("barrier"), Some(false)));
    let ns = |key: &str| made["predicted"][key].as_u64().unwrap();
    assert!(ns("bound_drives_ns") <= ns("bound_layout_ns") && ns("bound_layout_ns") <= ns("barrier_ns"));
    assert!(made["gap"].as_f64().unwrap() >= 0.0);
    let bank: u64 = made["copies"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
    let replicas = made["replicas"].as_u64().unwrap();
    assert!(replicas > 0 && replicas <= bank / 4, "{replicas} of {bank}");
    argodrive(["stage"]).arg(&out).assert().success();
    let decode = |more: &[&str]| {
        let mut command = argodrive(["decode", "--prompt", "one two three", "--max-new", "5", "--json", "--store"]);
        ids(&json_of(command.arg(mini_store()).args(more))["token_ids"])
    };
    assert_eq!(decode(&["--plan", out.to_str().unwrap()]), decode(&["--resident"]));
}

#[test]
fn a_plan_says_that_emulation_is_no_part_of_it() {
    for emulated in [false, true] {
        let drives =
            Drives::new(1, emulated.then(|| Emulation { rate_bytes_per_s: 50_000_000, ..Emulation::default() }));
        let (code, _, said) =
            outcome(&mut plan(tiny_store(), &drives, &policy("round-robin"), &drives.dir.path().join("p.json")));
        assert_eq!((code, said.contains("emulation and faults is no part of a plan")), (0, emulated), "{said}");
    }
}

#[test]
fn plans_are_judged_on_what_they_were_not_made_from() {
    let drives = Drives::new(2, None);
    let at = |name: &str| drives.dir.path().join(name);
    let (first, second, whole) = (at("first.json"), at("second.json"), at("whole.json"));
    heat(mini_store(), &first, &["--split", "first-half"]).assert().success();
    heat(mini_store(), &second, &["--split", "second-half"]).assert().success();
    heat(mini_store(), &whole, &[]).assert().success();
    let judged = |judge: &Path| {
        let mut command = plan(mini_store(), &drives, &policy("barrier"), &at("p.json"));
        command.arg("--heat").arg(&first).arg("--judge").arg(judge).arg("--json");
        command
    };
    let ratio = json_of(&mut judged(&second))["held_out"]["ratio"].as_f64().unwrap();
    assert!((1.0..3.0).contains(&ratio), "{ratio}");
    refused(&mut judged(&first), &["--judge", "first-half"]);
    refused(&mut judged(&whole), &["--judge", "whole"]);
    let merge = |files: [&Path; 2], out: &Path| {
        let mut command = argodrive(["heat", "--merge"]);
        command.args(files).arg("--out").arg(out).args(["--decay", "0.5"]);
        command
    };
    merge([&first, &second], &at("m.json")).assert().success();
    refused(&mut merge([&first, &whole], &at("m.json")), &["twice"]);
}

#[test]
fn heat_of_another_model_and_drives_of_other_names_are_refused() {
    let drives = Drives::new(2, None);
    let at = |name: &str| drives.dir.path().join(name);
    heat(mini_store(), &at("mini.json"), &[]).assert().success();
    let mut command = plan(tiny_store(), &drives, &policy("barrier"), &at("p.json"));
    refused(command.arg("--heat").arg(at("mini.json")), &["model", "count it on this store"]);
    refused(&mut plan(tiny_store(), &drives, &policy("lpt"), &at("p.json")), &["lpt", "--heat"]);
    let mut command = plan(mini_store(), &drives, &policy("hot-replica"), &at("p.json"));
    refused(command.arg("--heat").arg(at("mini.json")), &["drive `d1`", "amber, blue"]);
    let mut command = plan(mini_store(), &drives, &policy("barrier"), &at("p.json"));
    refused(command.arg("--heat").arg(at("mini.json")).args(["--domain", "code"]), &["no domain `code`"]);
    assert!(!at("p.json").exists(), "nothing is written");
    let nan = at("nan.toml");
    for (rate, words) in [("0B/s", ["`amber`", "above 0"]), ("fast", ["`amber`", "rate"])] {
        let both = |n: &str| format!("[[drive]]\nname = \"{n}\"\nrate = \"{rate}\"\n");
        fs::write(&nan, format!("policy = \"round-robin\"\n{}{}", both("amber"), both("blue"))).unwrap();
        refused(&mut plan(mini_store(), &drives, &nan, &at("p.json")), &words);
    }
}

#[test]
fn route_files_are_refused_with_file_and_line() {
    let dir = folder();
    let file = dir.path().join("routes.csv");
    let out = dir.path().join("heat.json");
    let says = |text: &str, more: &[&str], words: &[&str]| {
        fs::write(&file, text).unwrap();
        let message = refused(&mut routes(&[&file], &out, more), words);
        has(&message, &["routes.csv"]);
        assert!(!out.exists());
    };
    says("", &[], &["empty"]);
    says("hello\n", &[], &["warp-jsonl"]);
    says("step,phase,pos,layer,expert,weight,kept\n0,decode,0,1,x,1,1\n", &[], &["line 2", "`x`"]);
    says("{\"tok\": 0, \"layers\": [[0, 9]]}\n", &["--experts", "8"], &["line 1", "expert 9"]);
    says("0 1 5:7\n", &[], &["--per-token"]);
    let store = mini_store().to_str().unwrap().to_owned();
    says(
        "{\"tok\": 0, \"layers\": [[0, 1]]}\n",
        &["--store", &store, "--layer-base", "500"],
        &["layer 500", "--layer-base"],
    );
    refused(&mut argodrive(["heat", "--out", "x.json"]), &["--store", "--routes", "--merge"]);
}

#[test]
fn the_public_files_become_heat() {
    let dir = folder();
    let cases: [(&str, &[&str], u64); 7] = [
        ("routing-public/warp-kimi-linear-48b.trace.jsonl", &["--experts", "256"], 26 * 300),
        ("routing-public/bmoe-qwen3-30b-a3b.route.csv", &[], 44_766 / 6),
        ("routing-public/bmoe-gemma4-26b-a4b.route.csv", &[], 28_260 / 6),
        ("routing-public/mbolt-qwen3-30b-a3b.coactivation.json", &[], 48 * 75_773),
        ("routing-public/mbolt-qwen3-next-80b-a3b.coactivation.json", &[], 48 * 24_963),
        (
            "argodrive-public/usage/v41-flash-q4-hotlist-layers-00-11.txt",
            &["--experts", "384", "--per-token", "6"],
            12 * 9_728,
        ),
        (
            "argodrive-public/usage/k3-expert-usage-2026-09-03.partial-L1-L5.json",
            &["--experts", "896", "--per-token", "16"],
            0,
        ),
    ];
    for (name, more, rows) in cases {
        let Some(file) = public(name) else {
            assert!(std::env::var("CI").is_err(), "{name} is not beside the crate");
            continue;
        };
        let out = dir.path().join("heat.json");
        let seen = json_of(routes(&[&file], &out, more).arg("--json"));
        let counted = seen["rows"].as_u64().unwrap();
        assert!(if rows == 0 { counted > 0 } else { counted == rows }, "{name}: {counted} rows");
        assert!(fs::metadata(&out).unwrap().len() < 16 << 20, "{name}: heat stays small");
    }
}
