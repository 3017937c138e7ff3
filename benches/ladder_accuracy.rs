//! How far the I/O gain of each rung is off its simulation: the ladder of the real binary on three emulated drives, every rung
//! read and simulated, with the profile that `ceiling` measured and with nothing but the trace. Prints a table, and fails when a
//! rung is more than 10 % off. Measured ladders are kept in a folder (the argument, else `target/ladder-accuracy`) and
//! used again; delete it to measure again.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Slow enough for a busy machine to keep, and unequal.
const DRIVES: [(&str, &str); 3] = [
    ("amber", r#"rate = "3MB/s", latency = "4ms", per_read = "300us", jitter = 0.05, seed = 1"#),
    ("blue", r#"rate = "2500kB/s", latency = "3ms", per_read = "0us", jitter = 0.0, seed = 2"#),
    ("coral", r#"rate = "2MB/s", latency = "2500us", per_read = "500us", jitter = 0.1, seed = 3"#),
];
const POLICIES: [&str; 2] = ["full-mirror", "round-robin"];
const MOST_OFF: f64 = 0.10;
/// Times that something is measured until it counts.
const TRIES: usize = 4;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_argodrive")).args(args).output().unwrap()
}

fn s(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The ladder of `policy`, measured until it counts.
fn ladder(dir: &Path, policy: &str, profile: Option<&Path>) -> Value {
    let kept = dir.join(format!("{policy}{}.json", if profile.is_some() { "-profile" } else { "" }));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("layouts/{policy}.toml"));
    let (store, drives, out) = (dir.join("store"), dir.join("drives.toml"), dir.join("results"));
    let mut args = vec!["ladder", "--store", s(&store), "--drives", s(&drives), "--policy", s(&file), "--out", s(&out)];
    args.extend(["--prompt", "Once upon a time there was a small boat that", "--max-new", "12", "--json"]);
    args.extend(["--rungs", "ladder,solo"]);
    if let Some(profile) = profile {
        args.extend(["--profile", s(profile)]);
    }
    for _ in 0..TRIES {
        if kept.exists() {
            break;
        }
        let out = run(&args);
        if out.status.success() {
            fs::write(&kept, out.stdout).unwrap();
        } else {
            eprint!("{}", String::from_utf8_lossy(&out.stderr));
        }
    }
    serde_json::from_slice(&fs::read(&kept).expect("this machine is too busy for a ladder")).unwrap()
}

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let given = std::env::args().skip(1).find(|a| !a.starts_with('-')).map(PathBuf::from);
    let dir = given.unwrap_or_else(|| root.join("target/ladder-accuracy"));
    fs::create_dir_all(&dir).unwrap();
    let dir = dir.canonicalize().unwrap();
    let (store, drives) = (dir.join("store"), dir.join("drives.toml"));
    if !store.join("store.json").exists() {
        assert!(run(&["import", s(&root.join("models/argo-mini")), "--store", s(&store)]).status.success());
    }
    let mut text = String::new();
    for (name, pace) in DRIVES {
        fs::create_dir_all(dir.join(name)).unwrap();
        text += &format!("[[drive]]\nname = \"{name}\"\npath = \"{name}\"\nemulate = {{ {pace} }}\n");
    }
    fs::write(&drives, text).unwrap();
    let profile = dir.join("profile.json");
    for _ in 0..TRIES {
        if profile.exists() {
            break;
        }
        let args = ["ceiling", "--drives", s(&drives), "--bytes", "26112", "--duration", "1s", "--depths", "1,4,8"];
        run(&[&args[..], &["--width", "6", "--out", s(&profile)]].concat());
    }
    let mut worst = 0.0f64;
    println!("EMULATED drives; I/O gain over the first rung, as read and as simulated\n");
    println!("| layout | drives of the simulation | rung | read | simulated | off |\n|---|---|---|---|---|---|");
    for policy in POLICIES {
        for known in [Some(profile.as_path()).filter(|p| p.exists()), None] {
            let record = ladder(&dir, policy, known);
            for rung in record["rungs"].as_array().unwrap() {
                let names: Vec<&str> = rung["drives"].as_array().unwrap().iter().map(|d| d.as_str().unwrap()).collect();
                let number = |path: &str| rung.pointer(path).and_then(Value::as_f64).unwrap_or(f64::NAN);
                let off = number("/simulated/off");
                assert!(off.is_finite(), "{names:?} was not read and simulated: {}", record["remarks"]);
                worst = worst.max(off.abs());
                println!(
                    "| {policy} | {} | {} | {:.2}x | {:.2}x | {:+.1} % |",
                    record["simulated_from"].as_str().unwrap(),
                    names.join(" + "),
                    number("/raw/io_gain"),
                    number("/simulated/io_gain"),
                    off * 100.0
                );
            }
        }
    }
    println!("\nWorst: {:.1} %.", worst * 100.0);
    assert!(worst <= MOST_OFF, "a rung is more than 10 % off its simulation");
}
