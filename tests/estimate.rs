//! `argodrive estimate`: figures worked out by hand from the released geometry, and what it says when it cannot know.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::decode::Activations;
use argodrive::decode::memory::{SessionBytes, thread_bytes};
use argodrive::model::config::ModelConfig;
use assert_cmd::Command;
use prepared::{argodrive, folder, has, json_of, outcome, refused, repo};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const K3: &str = "tests/fixtures/k3/config.json";

fn drives(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("drives.toml");
    fs::write(&path, text).unwrap();
    path
}

/// Two drives of which one is twice as fast, without fixed costs.
const TWO: &str = "[[drive]]\nname = \"fast\"\npath = \"fast\"\nemulate = { rate = \"2GB/s\" }\n\
                   [[drive]]\nname = \"slow\"\npath = \"slow\"\nemulate = { rate = \"1GB/s\" }\n";

fn ask(config: &Path, drives: &Path, more: &[&str]) -> Command {
    let mut command = argodrive(["estimate"]);
    command.arg(config).arg("--drives").arg(drives).args(["--ram", "128GB"]).args(more);
    command
}

fn near(seen: &Value, want: f64, share: f64) {
    let seen = seen.as_f64().unwrap();
    assert!((seen / want - 1.0).abs() < share, "{seen} is not about {want}");
}

#[test]
fn the_released_geometry_gives_the_published_figures() {
    let dir = folder();
    let two = drives(dir.path(), TWO);
    let more = [
        "--threads",
        "4",
        "--context",
        "8k,128k,1M",
        "--tokens",
        "512,8k,4600",
        "--hit-rate",
        "50%",
        "--copy-rate",
        "1GB/s",
        "--json",
    ];
    let e = json_of(&mut ask(&repo(K3), &two, &more));
    let model = &e["model"];
    for (key, want) in [
        ("expert_count", 82_432u64),
        ("expert_bytes", 17_547_264),
        ("bank_bytes", 1_446_456_066_048),
        ("token_bytes", 25_829_572_608),
        // 69 KDA, 24 MLA layers, 92 MoE parts, 93 pairs of norms, the dense layer, embedding and head, the last norms
        (
            "trunk_bf16_bytes",
            69 * 887_800_832
                + 24 * 464_392_192
                + 92 * 379_857_408
                + 93 * 86_016
                + 3 * 33_792 * 7_168 * 2
                + 2 * 163_840 * 7_168 * 2
                + 3 * 7_168 * 2,
        ),
        ("slot_bytes", 17_547_264),
    ] {
        assert_eq!(model[key], want, "{key}");
    }
    assert_eq!(model["checkpoint_bytes"], 1_446_456_066_048u64 + model["trunk_bf16_bytes"].as_u64().unwrap());
    let int8 = model["trunk_int8_bytes"].as_u64().unwrap() as f64 / model["trunk_bf16_bytes"].as_u64().unwrap() as f64;
    assert!((0.5..0.52).contains(&int8), "{int8}: half, scales and what stays beside it");
    let memory = e["memory"].as_array().unwrap();
    let session = |i: usize, key: &str| memory[i]["session"][key].as_u64().unwrap();
    // what the check before a run counts too: a row of the widest input for each thread
    let k3 = ModelConfig::parse(&fs::read_to_string(repo(K3)).unwrap()).unwrap();
    let threads = thread_bytes(&k3, 4, Activations::F32);
    assert!(threads >= 4 * 7168 * 4 && thread_bytes(&k3, 8, Activations::F32) == 2 * threads, "{threads}");
    assert!(memory.iter().all(|m| m["thread_bytes"] == threads));
    for (i, tokens) in [(0, 8192u64), (1, 131_072), (2, 1_048_576)] {
        assert_eq!(session(i, "kda_state_bytes"), 434_110_464);
        assert_eq!(session(i, "conv_history_bytes"), 69 * 442_368);
        assert_eq!(session(i, "latent_cache_bytes"), 55_296 * tokens);
        assert_eq!(memory[i]["slab_bytes"], 16 * 17_547_264u64);
        let taken = model["trunk_bf16_bytes"].as_u64().unwrap()
            + 434_110_464
            + 69 * 442_368
            + 55_296 * tokens
            + session(i, "working_bytes")
            + threads
            + 16 * 17_547_264
            + 8_000_000_000;
        assert_eq!(memory[i]["left_bf16_bytes"].as_i64().unwrap(), 128_000_000_000 - taken as i64);
        let kept = (128_000_000_000 - taken as i64).max(0) / 17_547_264;
        assert_eq!(memory[i]["cached_bf16"].as_i64().unwrap(), kept);
    }
    assert!(memory[0]["cached_bf16"].as_u64().unwrap() > 100 && memory[2]["cached_bf16"] == 0, "1M does not fit");

    // 25.83 GB over 3 GB/s, nothing else; a full mirror reaches the bound
    assert_eq!((&e["policy"], &e["rates"], &e["emulated"]), (&"full-mirror".into(), &"emulated".into(), &true.into()));
    let cold = &e["speeds"][0];
    assert_eq!((&cold["cache"], &cold["hit_rate"]), (&"cold".into(), &0.0.into()));
    near(&cold["low_tok_s"], 3e9 / 25_829_572_608.0, 1e-4);
    near(&cold["high_tok_s"], 3e9 / 25_829_572_608.0, 1e-4);
    let half = e["speeds"].as_array().unwrap().last().unwrap();
    near(&half["hit_rate"], 0.5, 0.01);
    near(&half["high_tok_s"], 2.0 * 3e9 / 25_829_572_608.0, 0.02);
    let cached = &e["speeds"][1];
    near(&cached["hit_rate"], memory[0]["cached_bf16"].as_f64().unwrap() / 82_432.0, 0.2);

    // an expert is needed by none of n tokens with chance (1 - 16/896)^n
    let bytes = |n: i32| 1_446_456_066_048.0 * (1.0 - (1.0f64 - 16.0 / 896.0).powi(n));
    let prompts = e["prompts"].as_array().unwrap();
    let passes = [
        (512, 1, bytes(512), bytes(512)),
        (8192, 2, 2.0 * bytes(4096), bytes(8192)),
        (4600, 2, bytes(4096) + bytes(504), bytes(4600)),
    ];
    for (seen, (tokens, pieces, by_pieces, once)) in prompts.iter().zip(passes) {
        assert_eq!((&seen["tokens"], &seen["pieces"]), (&tokens.into(), &pieces.into()));
        near(&seen["pieces_bytes"], by_pieces, 1e-6);
        near(&seen["once_bytes"], once, 1e-6);
        near(&seen["pieces_ns"], by_pieces / 3.0, 1e-4);
        near(&seen["once_ns"], once / 3.0, 1e-4);
    }
    near(&e["copies"][0]["import_ns"], model["checkpoint_bytes"].as_f64().unwrap(), 1e-9);
    near(&e["copies"][0]["stage_ns"], 2.0 * 1_446_456_066_048.0, 1e-9);
}

#[test]
fn one_copy_each_is_slower_than_the_bound_and_memory_bandwidth_bounds_it() {
    let dir = folder();
    let two = drives(dir.path(), TWO);
    let policy = prepared::policy("round-robin");
    let more = ["--policy", policy.to_str().unwrap(), "--json"];
    let e = json_of(&mut ask(&repo(K3), &two, &more));
    // half of the experts on each: over many draws the slow drive has to deliver at least half of the bytes
    let (low, high) = (e["speeds"][0]["low_tok_s"].as_f64().unwrap(), e["speeds"][0]["high_tok_s"].as_f64().unwrap());
    assert!(low < 2e9 / 25_829_572_608.0 && low > 1.4e9 / 25_829_572_608.0, "{low}");
    assert!((high / (3e9 / 25_829_572_608.0) - 1.0).abs() < 1e-4, "{high}");
    assert_eq!((&e["drives"][0]["experts"], &e["drives"][1]["bytes"]), (&41_216.into(), &723_228_033_024u64.into()));
    // a prompt that wants everything: the slow drive's half
    near(&e["prompts"][0]["once_ns"], 723_228_033_024.0, 1e-3);
    let bound = json_of(&mut ask(&repo(K3), &two, &[&more[..], &["--memory-bandwidth", "1GB/s"]].concat()));
    let touched = bound["model"]["trunk_token_bytes"].as_f64().unwrap()
        + 25_829_572_608.0
        + 55_296.0 * 8192.0
        + 2.0 * 434_110_464.0;
    near(&bound["speeds"][0]["high_tok_s"], 1e9 / touched, 1e-9);
    near(&bound["speeds"][0]["low_tok_s"], 1.0 / (1.0 / low + touched / 1e9), 1e-9);
}

#[test]
fn a_drive_with_too_little_room_is_named_and_one_copy_is_tried() {
    let dir = folder();
    fs::create_dir(dir.path().join("here")).unwrap();
    let text = "[[drive]]\nname = \"here\"\npath = \"here\"\n[[drive]]\nname = \"there\"\npath = \"there\"\n";
    let path = drives(dir.path(), text);
    // 1.4 TB do not fit where the tests run; `there` does not exist, so nothing is known of it
    let e = json_of(&mut ask(&repo(K3), &path, &["--rates", "1GB/s,3GB/s", "--json"]));
    assert_eq!((&e["policy"], &e["rates"], &e["emulated"]), (&"hash".into(), &"stated".into(), &false.into()));
    assert_eq!((&e["drives"][0]["fits"], &e["drives"][1]["fits"]), (&false.into(), &Value::Null));
    near(&e["drives"][0]["bytes"], 1_446_456_066_048.0 / 4.0, 0.05);
    let more = ["--rates", "1GB/s,3GB/s", "--context", "8k,128k,1M", "--hit-rate", "0.4"];
    let (_, table, _) = outcome(&mut ask(&repo(K3), &path, &more));
    has(&table, &["NO", "as stated", "82432 experts of 17547264 bytes in 92 layers"]);
    for line in table.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn without_rates_it_says_how_to_get_them_and_gives_the_rest() {
    let dir = folder();
    let unknown = "[[drive]]\nname = \"a\"\npath = \"a\"\n";
    for text in [unknown.to_string(), format!("{unknown}{}", TWO)] {
        let path = drives(dir.path(), &text);
        let (code, table, _) = outcome(&mut ask(&repo(K3), &path, &[]));
        assert_eq!(code, 0);
        has(&table, &["argodrive ceiling", "--rates", "bf16 left", "copying", "1.45 TB"]);
        assert!(!table.contains("tokens per second"), "{table}");
    }
    let table = outcome(&mut ask(&repo(K3), &drives(dir.path(), TWO), &[])).1;
    has(&table, &["fast (emulated)", "emulated: no speed of this hardware"]);
}

#[test]
fn heat_makes_a_cache_worth_more_and_must_be_of_this_geometry() {
    let dir = folder();
    let two = drives(dir.path(), TWO);
    let config = repo("models/argo-mini/config.json");
    // 96 experts in 11 layers, 6 a token: two sets of six in turn, so that any cache of 12 experts a layer holds all
    let layers: serde_json::Map<String, Value> = (1..12)
        .map(|l| {
            let mut counts = vec![0; 96];
            counts[..12].fill(50);
            let (a, b): (Vec<u16>, Vec<u16>) = ((0..6).collect(), (6..12).collect());
            (
                l.to_string(),
                serde_json::json!({"rows": 100, "counts": counts, "sets": [a, b],
                "ages": [vec![60; 6], vec![60; 6]]}),
            )
        })
        .collect();
    let heat = |experts: u32| {
        let path = dir.path().join("heat.json");
        let value = serde_json::json!({"version": 1, "model_id": "another", "experts": experts, "sources": [],
            "domains": [{"label": "all", "layers": layers}]});
        fs::write(&path, value.to_string()).unwrap();
        path
    };
    let path = heat(96);
    // room for about 200 of 1056 experts
    let more = ["--heat", path.to_str().unwrap(), "--json", "--context", "256", "--reserve", "0B"];
    let bytes = json_of(&mut ask(&config, &two, &["--json", "--context", "256", "--tokens", "256", "--reserve", "0B"]));
    let other = 128_000_000_000 - bytes["memory"][0]["left_bf16_bytes"].as_i64().unwrap() + 200 * 28_672;
    let ram = format!("{other}B");
    let ask_with = |more: &[&str]| {
        let mut command = argodrive(["estimate"]);
        command.arg(&config).arg("--drives").arg(&two).args(["--ram", &ram, "--tokens", "256"]).args(more);
        command
    };
    let warm = json_of(&mut ask_with(&more));
    assert_eq!(warm["memory"][0]["cached_bf16"], 200);
    assert_eq!((&warm["speeds"][0]["hit_rate"], &warm["speeds"][1]["hit_rate"]), (&0.0.into(), &1.0.into()));
    let even = json_of(&mut ask_with(&more[2..]));
    near(&even["speeds"][1]["hit_rate"], 200.0 / 1056.0, 0.05);
    let other = heat(95);
    refused(&mut ask_with(&["--heat", other.to_str().unwrap()]), &["heat"]);
}

#[test]
fn session_bytes_are_those_that_a_session_takes() {
    // tiny: 9 layers, three of them MLA; KDA 6 heads of 16, taps 4; latent 40 + 8
    let text = fs::read_to_string(repo("tests/fixtures/oracle/tiny/config.json")).unwrap();
    let bytes = SessionBytes::of(&ModelConfig::parse(&text).unwrap(), 100, 8);
    assert_eq!(bytes.kda_state_bytes, 6 * (6 * 16 * 16) * 4);
    assert_eq!(bytes.conv_history_bytes, 6 * 3 * (3 * 6 * 16) * 4);
    assert_eq!(bytes.latent_cache_bytes, 3 * 100 * 48 * 4);
    assert!(bytes.working_bytes > 8 * 128 * 4 * 8, "{}", bytes.working_bytes);
}

#[test]
fn bad_questions_name_what_to_change() {
    let dir = folder();
    let two = drives(dir.path(), TWO);
    let text = fs::read_to_string(repo(K3)).unwrap();
    let bad = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        let path = dir.path().join("config.json");
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
        path
    };
    let path = bad("\"num_experts\": 896", "\"num_experts\": \"many\"");
    refused(&mut ask(&path, &two, &[]), &["config.json", "text_config.num_experts", "many"]);
    let path = bad("\"hidden_size\": 7168,", "");
    refused(&mut ask(&path, &two, &[]), &["config.json", "text_config.hidden_size", "missing"]);
    let path = bad("\"num_experts_per_token\": 16", "\"num_experts_per_token\": 1600");
    refused(&mut ask(&path, &two, &[]), &["num_experts_per_token"]);
    refused(&mut ask(&dir.path().join("no.json"), &two, &[]), &["no.json"]);
    refused(&mut ask(&repo(K3), &two, &["--context", "2M"]), &["--context 2097152", "1048576"]);
    refused(&mut ask(&repo(K3), &two, &["--rates", "1GB/s"]), &["--rates", "1 rates for 2 drives"]);
    for (flag, value) in [("--context", "0"), ("--tokens", "5x"), ("--hit-rate", "120%"), ("--ram", "much")] {
        let (code, _, stderr) = outcome(&mut ask(&repo(K3), &two, &[flag, value]));
        assert_eq!(code, 2);
        has(&stderr, &[flag]);
    }
    // a dense model streams nothing, and that is said
    let table = outcome(&mut ask(&repo("models/argo-mini-draft"), &two, &["--context", "256", "--tokens", "64"])).1;
    has(&table, &["dense", "copying"]);
}

#[test]
fn a_latent_cache_beyond_memory_takes_what_it_is_held_to() {
    let dir = folder();
    let two = drives(dir.path(), TWO);
    let e = json_of(&mut ask(&repo(K3), &two, &["--context", "8k,128k", "--kv-ram", "1GiB", "--json"]));
    let cache = |at: usize| e["memory"][at]["session"]["latent_cache_bytes"].as_u64().unwrap();
    assert_eq!(cache(0), 24 * 2304 * 8192, "all of it fits");
    assert!((1 << 30) * 9 / 10 < cache(1) && cache(1) <= 1 << 30, "{}", cache(1));
    refused(
        &mut ask(&repo(K3), &two, &["--context", "128k", "--kv-ram", "100KB"]),
        &["--kv-ram 100000:", "--kv-ram 958464 or more"],
    );
}
