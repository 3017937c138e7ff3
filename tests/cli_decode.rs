//! The main job with the real binary: import -> plan -> stage -> verify -> decode and chat; what scripts may rely on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::store::manifest::StoreManifest;
use argodrive::trace::log::{read_barriers, read_header, read_reads};
use assert_cmd::Command;
use prepared::{Drives, argodrive, has, ids, json_of, mini_store, outcome, repo};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// argo-mini mirrored on three drives.
fn staged() -> &'static (Drives, PathBuf) {
    static CELL: OnceLock<(Drives, PathBuf)> = OnceLock::new();
    CELL.get_or_init(|| {
        let drives = Drives::new(3, None);
        let plan = drives.staged(mini_store(), "full-mirror");
        (drives, plan)
    })
}

fn decode(args: &[&str]) -> Command {
    let mut command = argodrive(["decode", "--store"]);
    command.arg(mini_store()).args(args);
    command
}

fn streamed(args: &[&str]) -> Command {
    let mut command = decode(args);
    command.arg("--plan").arg(&staged().1);
    command
}

fn golden(model: &str, index: usize) -> Value {
    let text = fs::read(repo("tests/fixtures/oracle").join(format!("{model}.golden.json"))).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["prompts"][index].clone()
}

fn sum(drives: &Value, key: &str) -> u64 {
    drives.as_array().unwrap().iter().map(|d| d[key].as_u64().unwrap()).sum()
}

#[test]
fn the_tour_of_the_readme_with_the_binary_alone() {
    let dir = prepared::folder();
    let at = |name: &str| dir.path().join(name);
    let import = json_of(
        argodrive(["import", "--json", "--trunk", "bf16", "--store"]).arg(at("store")).arg(repo("models/argo-mini")),
    );
    assert_eq!((import["experts"].as_u64(), import["moe_layers"].as_u64()), (Some(11 * 96), Some(11)));
    assert_eq!(import["model_id"].as_str().unwrap(), StoreManifest::open(&at("store")).unwrap().model_id);
    fs::write(at("drives.toml"), "[[drive]]\nname = \"a\"\npath = \"a\"\n[[drive]]\nname = \"b\"\npath = \"b\"\n")
        .unwrap();
    ["a", "b"].iter().for_each(|name| fs::create_dir(at(name)).unwrap());
    // from the folder itself and with relative paths, as people work
    let command = |words: &[&str]| {
        let mut command = argodrive([]);
        command.current_dir(dir.path()).args(words);
        command
    };
    let policy = prepared::policy("round-robin");
    let (code, text, _) = outcome(
        command(&["plan", "--store", "store", "--drives", "drives.toml", "--out", "plan.json", "--policy"]).arg(policy),
    );
    assert_eq!(code, 0);
    has(&text, &["round-robin: 1056 experts", "next: argodrive stage plan.json"]);
    let (code, text, _) = outcome(&mut command(&["stage", "plan.json"]));
    assert_eq!(code, 0);
    has(&text, &["copied", "528", "13.8 MB"]);
    // the plan and its paths hold from elsewhere too
    let verified = json_of(argodrive(["verify", "--json"]).arg(at("plan.json")));
    assert_eq!((verified["sound"].as_bool(), verified["drives"][1]["checked"].as_u64()), (Some(true), Some(528)));
    argodrive(["verify"]).arg(at("store")).assert().success();
    let want = golden("argo-mini", 1);
    let prompt = want["prompt"].as_str().unwrap();
    let words = ["decode", "--store", "store", "--plan", "plan.json", "--max-new", "12", "--prompt", prompt];
    let (code, text, notes) = outcome(&mut command(&words));
    assert_eq!(code, 0, "{notes}");
    assert!(want["text"].as_str().unwrap().starts_with(text.trim_end_matches('\n')) && text.len() > 20, "{text}");
    has(&notes, &["12 tokens (--max-new) after 9 of prompt", "tok/s", "landed last"]);
}

#[test]
fn the_json_of_decode_has_the_documented_shape_and_the_golden_tokens() {
    let want = golden("argo-mini", 0);
    let run = json_of(&mut streamed(&["--json", "--max-new", "16", "--prompt", want["prompt"].as_str().unwrap()]));
    assert_eq!(ids(&run["prompt_token_ids"]), ids(&want["ids"]));
    assert_eq!(ids(&run["token_ids"]), ids(&want["greedy"])[..16]);
    assert!(want["text"].as_str().unwrap().starts_with(run["text"].as_str().unwrap()));
    for rate in ["ttft_s", "prefill_tok_s", "decode_tok_s", "inclusive_tok_s"] {
        assert!(run["rates"][rate].as_f64().unwrap() > 0.0, "{rate}");
    }
    assert!(run["rates"]["inclusive_tok_s"].as_f64() < run["rates"]["decode_tok_s"].as_f64());
    let names: Vec<&str> = run["drives"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["amber", "blue", "coral"]);
    // experts may come in parts, so reads are at least as many as experts
    assert_eq!(sum(&run["drives"], "bytes") % 26_112, 0);
    assert!(sum(&run["drives"], "bytes") <= sum(&run["drives"], "reads") * 26_112);
    assert_eq!(sum(&run["drives"], "landed_last"), 16 * 11, "one straggler for each barrier");
    assert_eq!(run["emulated"].as_bool(), Some(false));
}

#[test]
fn every_source_of_experts_gives_the_same_tokens() {
    let want = ids(&golden("argo-mini", 2)["greedy"]);
    let prompt = golden("argo-mini", 2)["prompt"].as_str().unwrap().to_string();
    let args = ["--json", "--max-new", "10", "--prompt", &prompt];
    let resident = json_of(decode(&args).arg("--resident"));
    assert!(resident["drives"].as_array().unwrap().is_empty());
    let own = json_of(&mut decode(&args));
    assert_eq!((own["drives"][0]["name"].as_str(), sum(&own["drives"], "replica_reads")), (Some("store"), 0));
    let mut all = vec![resident, own];
    for dispatch in ["first-hit", "round-robin", "least-inflight"] {
        // three experts of buffer: a prompt's barriers come in waves
        let extra = ["--dispatch", dispatch, "--queue-depth", "2", "--buffer-bytes", "96KiB", "--verify-reads"];
        all.push(json_of(streamed(&args).args(extra)));
        let replicas = sum(&all.last().unwrap()["drives"], "replica_reads");
        assert_eq!(replicas > 0, dispatch != "first-hit", "{dispatch}: {replicas}");
    }
    all.push(json_of(streamed(&args).args(["--buffered", "--prefill-rows", "3"])));
    assert!(all.iter().all(|run| ids(&run["token_ids"]) == want[..10]), "{all:?}");
}

#[test]
fn special_tokens_are_seen_only_when_asked_for() {
    let want = golden("argo-mini", 4);
    let args = ["--json", "--max-new", "20", "--prompt", want["prompt"].as_str().unwrap()];
    let special = json_of(streamed(&args).arg("--special"));
    assert_eq!(ids(&special["prompt_token_ids"]), ids(&want["ids"]));
    assert_eq!(ids(&special["token_ids"]), ids(&want["greedy"]), "the stop id included");
    assert_eq!((special["text"].as_str(), special["stopped"].as_str()), (want["text"].as_str(), Some("stop_token")));
    let plain = json_of(&mut streamed(&args));
    assert!(ids(&plain["prompt_token_ids"]).len() > ids(&want["ids"]).len(), "`<|user|>` is plain text here");

    let said = want["text"].as_str().unwrap().trim_end_matches("<|end|>");
    let mut chat = argodrive(["chat", "--message", "What is 17 + 25?", "--store"]);
    let (code, text, notes) = outcome(chat.arg(mini_store()).arg("--plan").arg(&staged().1));
    assert_eq!((code, text.as_str()), (0, format!("{said}\n").as_str()), "{notes}");
    let mut chat = argodrive(["chat", "--resident", "--max-new", "4", "--store"]);
    let (code, text, notes) = outcome(chat.arg(mini_store()).write_stdin("What is 17 + 25?\n\nAgain?\n"));
    assert_eq!((code, text.lines().count()), (0, 2), "one answer for each line: {text}");
    assert!(said.starts_with(text.lines().next().unwrap()), "{text}");
    assert_eq!(notes.matches("--max-new").count(), 2, "{notes}");
}

#[test]
fn a_prompt_file_is_used_as_it_is_and_sampling_is_reproducible() {
    let dir = prepared::folder();
    let file = dir.path().join("prompt.txt");
    fs::write(&file, "Once upon a time\n").unwrap();
    let run = |args: &[&str]| {
        let mut command = streamed(&["--json", "--max-new", "12"]);
        json_of(command.arg("--prompt-file").arg(&file).args(args))
    };
    let greedy = run(&[]);
    let typed = json_of(&mut streamed(&["--json", "--max-new", "12", "--prompt", "Once upon a time\n"]));
    assert_eq!(greedy["token_ids"], typed["token_ids"]);
    let short = json_of(&mut streamed(&["--json", "--max-new", "1", "--prompt", "Once upon a time"]));
    assert_ne!(greedy["prompt_token_ids"], short["prompt_token_ids"], "the line end is part of the prompt");
    let seed =
        |seed| run(&["--temperature", "1.1", "--top-p", "0.95", "--top-k", "200", "--seed", seed])["token_ids"].clone();
    let seven = seed("7");
    assert_eq!(seven, seed("7"));
    assert_ne!(seven, seed("8"));
    assert_ne!(seven, greedy["token_ids"]);
}

#[test]
fn the_trace_agrees_with_the_drive_table() {
    let dir = prepared::folder();
    let folder = dir.path().join("deep/trace");
    let mut command = streamed(&["--json", "--max-new", "5", "--prompt", "In the beginning"]);
    let run = json_of(command.arg("--trace").arg(&folder));
    let (reads, barriers) = (read_reads(&folder).unwrap(), read_barriers(&folder).unwrap());
    let header = read_header(&folder).unwrap();
    assert_eq!(barriers.len(), 5 * 11);
    let bytes: u64 = barriers.iter().map(|b| b.bytes).sum();
    assert_eq!(bytes, sum(&run["drives"], "bytes"));
    for drive in &header.drives {
        let row = &run["drives"][drive.id.index()];
        assert_eq!(
            (row["name"].as_str(), row["emulated"].as_bool()),
            (Some(drive.name.as_str()), Some(drive.emulated))
        );
        let own: Vec<_> = reads.iter().filter(|r| r.drive == drive.id).collect();
        assert_eq!(own.len() as u64, row["reads"].as_u64().unwrap());
        assert_eq!(own.iter().map(|r| r.bytes).sum::<u64>(), row["read_bytes"].as_u64().unwrap());
        let last = barriers.iter().filter(|b| b.straggler == Some(drive.id)).count();
        assert_eq!(last as u64, row["landed_last"].as_u64().unwrap());
    }
    assert_eq!(header.drives.len(), 3);

    // every row went to six experts in each layer, and their union is what a barrier asked for
    let mut routes = argodrive::trace::routes::routes(&folder, &header, false).unwrap().unwrap();
    let (mut chosen, mut count) = (BTreeMap::<_, BTreeSet<_>>::new(), 0);
    while let Some(r) = routes.next_value().unwrap() {
        assert!(r.kept == 1 && r.weight > 0.0);
        chosen.entry((r.step, r.layer)).or_default().insert(r.expert);
        count += 1;
    }
    let rows: u32 = barriers.iter().map(|b| b.rows).sum();
    assert_eq!((count, chosen.len()), (rows as usize * 6, barriers.len()));
    for b in &barriers {
        assert_eq!(chosen[&(b.step, b.layer)].len(), b.width as usize);
    }
    let model = StoreManifest::open(mini_store()).unwrap().model_id;
    assert_eq!(header.model_id.as_deref(), Some(model.as_str()));

    let table = dir.path().join("table");
    let learnt = json_of(argodrive(["trace", "learn", "--json", "--out"]).arg(&table).arg(&folder));
    let positions = rows as u64 / 11;
    assert_eq!((learnt["tokens"].as_u64(), learnt["layers"].as_u64()), (Some(positions), Some(11)));
    let table = argodrive::reader::predict::table_file::read(&table).unwrap();
    assert_eq!((table.model_id(), table.depth()), (model.as_str(), 2));
    let mut other = argodrive(["trace", "learn", "--out"]);
    other.arg(dir.path().join("no")).arg(&folder).arg("--store").arg(prepared::tiny_store());
    other.assert().code(2).stderr(predicates::str::contains("is a trace of model"));
    assert!(!dir.path().join("no").exists());
}

#[test]
fn drives_that_moved_are_found_by_name() {
    let place = Drives::new(2, None);
    let store = prepared::tiny_store();
    let plan = place.staged(store, "round-robin");
    let moved: Vec<PathBuf> = place.specs.iter().map(|s| s.path.with_extension("moved")).collect();
    let mut text = String::new();
    for (spec, path) in place.specs.iter().zip(&moved).rev() {
        fs::rename(&spec.path, path).unwrap();
        text += &format!("[[drive]]\nname = \"{}\"\npath = \"{}\"\n", spec.name, path.display());
    }
    fs::write(&place.toml, text).unwrap();
    let command = |words: &[&str]| {
        let mut command = argodrive([]);
        command.args(words).arg("--drives").arg(&place.toml);
        command
    };
    let run = |plan: &Path| {
        let mut decode = command(&["decode", "--json", "--prompt", "abc", "--max-new", "3"]);
        json_of(decode.arg("--store").arg(store).arg("--plan").arg(plan))
    };
    assert_eq!(run(&plan)["drives"][0]["name"].as_str(), Some("amber"), "in the plan's order");
    command(&["verify"]).arg(&plan).assert().success();
    let report = json_of(command(&["stage", "--json"]).arg(&plan));
    assert_eq!(sum(&report["drives"], "copied"), 0);
}
