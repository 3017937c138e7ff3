//! `argodrive synth` with routers made to order: what real decode then chooses; and options that cannot be.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::bench::synth_check::{check, routing_of};
use argodrive::layout::heat::Heat;
use argodrive::model::checkpoint::Checkpoint;
use argodrive::store::synth::{SynthOptions, synth, synth_routed};
use argodrive::store::synth_routing::Routing;
use assert_cmd::Command;
use prepared::{argodrive, folder, has, json_of, outcome, refused};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// 3 layers with 32 experts, 4 of them for a token.
fn small() -> SynthOptions {
    SynthOptions { layers: 4, experts: 32, top_k: 4, latent: 64, width: 64, vocab: 1024, ..SynthOptions::small() }
}

fn synth_command(to: &Path, more: &[&str]) -> Command {
    let mut command = argodrive(["synth", "--experts", "32", "--latent", "64", "--width", "64", "--vocab", "1024"]);
    command.arg("--as-checkpoint").arg(to).args(more);
    command
}

#[test]
fn a_skew_comes_out_of_real_decode() {
    let dir = folder();
    let to = dir.path().join("skewed");
    let report = json_of(&mut synth_command(&to, &["--skew", "1.2", "--check", "1500", "--json"]));
    let layers = report["check"]["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 3);
    for l in layers {
        let of = |key: &str| l[key].as_f64().unwrap();
        assert!(of("total_variation") < of("by_chance") + 0.03, "{l}");
        assert!(of("rank_correlation") > 0.95, "{l}");
        assert!(l["together"].is_null(), "only shares were asked for");
    }
    // a random router does nothing of the kind, by the same measure
    let plain = dir.path().join("plain");
    synth(&plain, &small(), &mut |_| {}).unwrap();
    let asked = Routing::zipf(&small().config().unwrap(), 1.2, 1);
    let random = check(&plain, &asked, 500, &mut |_| {}).unwrap();
    assert!(random.mean(|l| l.total_variation) > 0.25 && random.mean(|l| l.rank_correlation) < 0.5, "{random:?}");
    // ...and the hottest expert is not the same one in every layer
    let hottest = |layer: usize| {
        let shares = &asked.layers[&layer].shares;
        (0..32).max_by(|&a, &b| shares[a].total_cmp(&shares[b])).unwrap()
    };
    assert!(hottest(1) != hottest(2) || hottest(2) != hottest(3));

    // the same options give the same bytes, and the checkpoint is as valid as any
    let again = dir.path().join("again");
    synth_command(&again, &["--skew", "1.2"]).assert().success();
    for entry in fs::read_dir(&to).unwrap().map(|e| e.unwrap().file_name()) {
        assert!(fs::read(to.join(&entry)).unwrap() == fs::read(again.join(&entry)).unwrap(), "{entry:?}");
    }
    assert_eq!(Checkpoint::open(&to).unwrap().experts(), 32);
}

/// Heat of 3 layers: experts are asked for in teams of four (0-3, 4-7, ...), the first team four times as often as the
/// second, and so on down to the last.
fn teams() -> Value {
    let mut sets: Vec<Vec<u16>> = Vec::new();
    for team in 0..8u16 {
        let times = 64 / (1 + usize::from(team));
        sets.extend(vec![(4 * team..4 * team + 4).collect(); times]);
    }
    let mut counts = vec![0u64; 32];
    sets.iter().flatten().for_each(|&e| counts[usize::from(e)] += 1);
    let layer = serde_json::json!({"rows": sets.len(), "counts": counts, "sets": sets});
    serde_json::json!({"version": 1, "model_id": null, "experts": 32, "sources": [],
        "domains": [{"label": "all", "layers": {"1": layer, "2": layer, "3": layer}}]})
}

#[test]
fn heat_and_what_was_asked_for_together_come_out_of_real_decode() {
    let dir = folder();
    let path = dir.path().join("heat.json");
    fs::write(&path, teams().to_string()).unwrap();
    let to = dir.path().join("teams");
    let report = json_of(&mut synth_command(&to, &["--heat", path.to_str().unwrap(), "--check", "1500", "--json"]));
    for l in report["check"]["layers"].as_array().unwrap() {
        let of = |key: &str| l[key].as_f64().unwrap();
        assert!(of("total_variation") < of("by_chance") + 0.03, "{l}");
        assert!(of("rank_correlation") > 0.9 && of("together") > 0.6, "{l}");
    }
    // shares alone do not bring teams together
    let heat = Heat::parse(&teams().to_string()).unwrap();
    let config = small().config().unwrap();
    let asked = routing_of(&heat, &config).unwrap();
    let mut alone = asked.clone();
    alone.layers.values_mut().for_each(|l| l.rows.clear());
    let to = dir.path().join("alone");
    synth_routed(&to, &small(), Some(&alone), &mut |_| {}).unwrap();
    let checked = check(&to, &asked, 800, &mut |_| {}).unwrap();
    assert!(checked.together().unwrap() < 0.4, "{checked:?}");

    let (code, table, stderr) =
        outcome(&mut synth_command(&dir.path().join("table"), &["--heat", path.to_str().unwrap(), "--check", "200"]));
    assert_eq!(code, 0, "{stderr}");
    has(&table, &["apart", "by chance", "mean", "Routes follow from"]);
    // the first line begins with the folder's path, however long that is
    table.lines().skip(1).for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
    let routes = dir.path().join("routes.csv");
    let mut text = String::from("step,phase,pos,layer,expert,weight,kept\n");
    for pos in 0..40 {
        for layer in 1..4 {
            (0..4).for_each(|e| text += &format!("{pos},decode,{pos},{layer},{},0.25,1\n", e + 4 * (pos % 2)));
        }
    }
    fs::write(&routes, text).unwrap();
    let to = dir.path().join("routed");
    let report = json_of(&mut synth_command(&to, &["--routes", routes.to_str().unwrap(), "--check", "500", "--json"]));
    let first = &report["check"]["layers"][0];
    assert!(first["total_variation"].as_f64().unwrap() < 0.05 && first["together"].as_f64().unwrap() > 0.8, "{first}");
}

#[test]
fn options_that_cannot_be_name_the_flag_and_leave_nothing_behind() {
    let dir = folder();
    let to = dir.path().join("no");
    let heat = dir.path().join("heat.json");
    fs::write(&heat, teams().to_string()).unwrap();
    let heat = heat.to_str().unwrap();
    let k3 = ["--preset", "k3-experts"];
    let cases: [(&[&str], &[&str]); 12] = [
        (&["--experts", "0"], &["--experts"]),
        (&["--top-k", "0"], &["--top-k"]),
        (&["--top-k", "33", "--experts", "32"], &["--top-k", "--experts"]),
        (&["--heads", "0"], &["--heads"]),
        (&["--layers", "4096", "--experts", "65535"], &["--experts", "262144"]),
        (&["--vocab", "511"], &["--vocab"]),
        (&["--hidden", "0"], &["--hidden"]),
        (
            &["--layers", "4096", "--experts", "64", "--latent", "32768", "--width", "65536"],
            &["not enough free space", "--experts"],
        ),
        (
            &[
                "--layers",
                "4096",
                "--experts",
                "1",
                "--top-k",
                "1",
                "--shared",
                "1024",
                "--width",
                "16777216",
                "--latent",
                "32",
                "--hidden",
                "65536",
            ],
            &["64 bits", "--layers"],
        ),
        (&["--check", "5"], &["--check", "--skew"]),
        (&["--heat", heat, "--experts", "31"], &["--heat", "32 experts"]),
        (&["--skew", "1", "--hidden", "8", "--heads", "1", "--head-dim", "8"], &["--hidden 16"]),
    ];
    for (options, words) in cases {
        let mut command = argodrive(["synth", "--as-checkpoint"]);
        refused(command.arg(&to).args(options), words);
        assert!(!to.exists(), "{options:?}");
    }
    let mut command = argodrive(["synth", "--as-checkpoint"]);
    refused(
        command.arg(&to).args(k3).args(["--layers", "93", "--experts", "896"]),
        &["not enough free space", "--layers"],
    );
    for bad in ["-1", "9", "x"] {
        let (code, _, stderr) = outcome(&mut synth_command(&to, &[&format!("--skew={bad}")]));
        assert_eq!(code, 2);
        has(&stderr, &["--skew"]);
    }
}
