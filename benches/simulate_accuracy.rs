//! How far off simulations are: five layouts on four emulated drives, each measured by decoding, each predicted from the
//! trace of two of them and the profile that `ceiling` measured; which of each pair is faster; and one real disk. Runs the
//! real binary and prints results/samples/simulate.md. Measured runs are kept in a folder (the argument, else
//! `target/simulate-accuracy`) and used again; delete it to measure again.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Slow enough for a busy machine to keep, unequal enough for layouts to matter.
const DRIVES: &str = r#"[[drive]]
name = "amber"
path = "amber"
emulate = { rate = "3MB/s", latency = "4ms", per_read = "300us", jitter = 0.05, seed = 1 }

[[drive]]
name = "blue"
path = "blue"
emulate = { rate = "2500kB/s", latency = "3ms", per_read = "0us", jitter = 0.0, seed = 2 }

[[drive]]
name = "coral"
path = "coral"
emulate = { rate = "2MB/s", latency = "2500us", per_read = "500us", jitter = 0.1, seed = 3 }

[[drive]]
name = "denim"
path = "denim"
emulate = { rate = "2MB/s", latency = "3ms", per_read = "100us", jitter = 0.0, seed = 4 }
"#;
const NAMES: [&str; 4] = ["amber", "blue", "coral", "denim"];
/// Copies of the hottest experts on top of a whole base: what `layouts/hot-replica.toml` does, with these names.
const HOT: &str = r#"policy = "hot-replica"
[[band]]
drive = "amber"
experts = "all"
[[band]]
drive = "blue"
reads = "70%"
[[band]]
drive = "coral"
reads = "60%"
[[band]]
drive = "denim"
reads = "50%"
"#;
const POLICIES: [&str; 6] = ["single", "round-robin", "lpt", "hot-replica", "barrier", "full-mirror"];
/// Traces that every layout is predicted from.
const BASES: [&str; 2] = ["round-robin", "full-mirror"];
const REPEATS: usize = 3;
const PROMPT: &str = "Once upon a time there was a small boat that";
const HEAT_PROMPT: &str = "The old man walked down to the harbour and looked at the sky. It was";
/// Runs of one layout until one is not rejected.
const TRIES: usize = 6;

struct Lab {
    dir: PathBuf,
    store: PathBuf,
}

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_argodrive")).args(args).output().unwrap()
}

fn must(args: &[&str]) -> String {
    let out = run(args);
    assert!(out.status.success(), "{args:?}\n{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn s(path: &Path) -> &str {
    path.to_str().unwrap()
}

impl Lab {
    fn open() -> Self {
        let given = std::env::args().skip(1).find(|a| !a.starts_with('-')).map(PathBuf::from);
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let dir = given.unwrap_or_else(|| root.join("target/simulate-accuracy"));
        fs::create_dir_all(&dir).unwrap();
        let dir = dir.canonicalize().unwrap();
        let lab = Self { store: dir.join("store"), dir };
        if !lab.store.join("store.json").exists() {
            must(&["import", s(&root.join("models/argo-mini")), "--store", s(&lab.store)]);
        }
        for name in NAMES {
            fs::create_dir_all(lab.at(name)).unwrap();
        }
        fs::write(lab.at("drives.toml"), DRIVES.replace("path = \"", &format!("path = \"{}/", s(&lab.dir)))).unwrap();
        fs::write(lab.at("hot-replica.toml"), HOT).unwrap();
        if !lab.at("heat.json").exists() {
            let (store, out) = (s(&lab.store), lab.at("heat.json"));
            must(&[
                "heat",
                "--store",
                store,
                "--resident",
                "--prompt",
                HEAT_PROMPT,
                "--max-new",
                "200",
                "--out",
                s(&out),
            ]);
        }
        lab
    }

    fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.join(name)
    }

    /// The profile of drives, measured until its guards hold.
    fn profile(&self, name: &str, drives: &Path, bytes: &str) -> PathBuf {
        let out = self.at(format!("{name}.profile.json"));
        for _ in 0..TRIES {
            if out.exists() {
                break;
            }
            let args = ["ceiling", "--drives", s(drives), "--bytes", bytes, "--duration", "1s", "--depths", "1,4,8"];
            run(&[&args[..], &["--width", "6", "--out", s(&out)]].concat());
        }
        assert!(out.exists(), "{name}: this machine is too busy for a profile");
        out
    }

    fn plan(&self, policy: &str) -> PathBuf {
        let out = self.at(format!("{policy}.plan.json"));
        if !out.exists() {
            let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("layouts").join(format!("{policy}.toml"));
            let file = if policy == "hot-replica" { self.at("hot-replica.toml") } else { shipped };
            let (store, drives, heat) = (s(&self.store), self.at("drives.toml"), self.at("heat.json"));
            let profile = self.at("emulated.profile.json");
            let args = ["plan", "--store", store, "--drives", s(&drives), "--policy", s(&file), "--heat", s(&heat)];
            must(&[&args[..], &["--profile", s(&profile), "--out", s(&out)]].concat());
            must(&["stage", s(&out)]);
        }
        out
    }

    /// Decodes until a run counts; the folder of its trace.
    fn decode(&self, name: &str, plan: Option<&Path>, tokens: &str) -> PathBuf {
        let trace = self.at(format!("traces/{name}"));
        for _ in 0..TRIES {
            if trace.join("trace.json").exists() {
                break;
            }
            let (store, drives) = (s(&self.store), self.at("drives.toml"));
            let mut args = vec!["decode", "--store", store, "--prompt", PROMPT, "--max-new", tokens];
            args.extend(["--trace", s(&trace), "--json"]);
            let given = plan.map(s);
            if let Some(plan) = given {
                args.extend(["--plan", plan, "--drives", s(&drives)]);
            }
            let out = run(&args);
            if !out.status.success() {
                let _ = fs::remove_dir_all(&trace);
            }
        }
        assert!(trace.join("trace.json").exists(), "{name}: this machine is too busy");
        trace
    }

    fn simulate(&self, base: &Path, plan: &Path, profile: Option<&Path>, compare: &Path) -> Value {
        let mut args = vec!["simulate", s(base), "--plan", s(plan), "--compare", s(compare), "--json"];
        if let Some(profile) = profile {
            args.extend(["--profile", s(profile)]);
        }
        serde_json::from_str(&must(&args)).unwrap()
    }
}

fn number(value: &Value, path: &str) -> f64 {
    value.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} is not in {value}"))
}

/// Figures of decode barriers: tok/s, median, mean, p95.
fn figures(of: &Value) -> [f64; 4] {
    let phases = of["phases"].as_array().unwrap();
    let decode = phases.iter().find(|p| p["phase"] == "decode").unwrap();
    [number(of, "/tok_s/0"), number(decode, "/p50_ns/0"), number(decode, "/mean_ns/0"), number(decode, "/p95_ns/0")]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Medians over repetitions, figure by figure.
fn medians(all: &[[f64; 4]]) -> [f64; 4] {
    std::array::from_fn(|i| median(all.iter().map(|f| f[i]).collect()))
}

fn percent(x: f64) -> String {
    format!("{:+.1} %", x * 100.0)
}

/// One row: the layout, what was measured, and how far off the prediction is.
fn row(out: &mut String, name: &str, measured: [f64; 4], predicted: [f64; 4]) -> [f64; 4] {
    let off: [f64; 4] = std::array::from_fn(|i| predicted[i] / measured[i] - 1.0);
    let ms = |ns: f64| format!("{:.2}", ns / 1e6);
    let _ = writeln!(
        out,
        "| {name} | {:.2} | {} | {} | {} | {} | {} | {} | {} |",
        measured[0],
        percent(off[0]),
        ms(measured[1]),
        percent(off[1]),
        ms(measured[2]),
        percent(off[2]),
        ms(measured[3]),
        percent(off[3])
    );
    off
}

const HEAD: &str = "| layout | tok/s | off | median ms | off | mean ms | off | p95 ms | off |\n|---|---|---|---|---|---|---|---|---|\n";

fn emulated(lab: &Lab, out: &mut String) {
    let bytes = "26112";
    let profile = lab.profile("emulated", &lab.at("drives.toml"), bytes);
    let plans: Vec<PathBuf> = POLICIES.iter().map(|p| lab.plan(p)).collect();
    // in turn, every other time backwards
    let mut traces: Vec<Vec<PathBuf>> = vec![Vec::new(); POLICIES.len()];
    for repeat in 0..REPEATS {
        let mut order: Vec<usize> = (0..POLICIES.len()).collect();
        if repeat % 2 == 1 {
            order.reverse();
        }
        for at in order {
            traces[at].push(lab.decode(&format!("{}-{repeat}", POLICIES[at]), Some(&plans[at]), "32"));
        }
    }
    let mut measured = Vec::new();
    for (plan, own) in plans.iter().zip(&traces) {
        let of = |t: &PathBuf| figures(&lab.simulate(t, plan, Some(&profile), t)["recorded"]);
        measured.push(own.iter().map(of).collect::<Vec<_>>());
    }
    let spread = |all: &[[f64; 4]], i: usize| {
        let values = || all.iter().map(|f| f[i]);
        values().fold(f64::MIN, f64::max) / values().fold(f64::MAX, f64::min) - 1.0
    };
    let floor = measured.iter().map(|m| spread(m, 0)).fold(0.0, f64::max);
    let floor_p50 = measured.iter().map(|m| spread(m, 1)).fold(0.0, f64::max);
    let _ = writeln!(
        out,
        "A/A floor, the largest spread of {REPEATS} runs of one layout: {:.1} % of tok/s, {:.1} % of the median barrier.\n",
        floor * 100.0,
        floor_p50 * 100.0
    );
    let mut worst = [0.0f64; 4];
    for base in BASES {
        let from = POLICIES.iter().position(|p| *p == base).unwrap();
        let _ = writeln!(out, "### Predicted from the trace of `{base}`\n\n{HEAD}", HEAD = HEAD.trim_end());
        let mut predicted = Vec::new();
        for (at, policy) in POLICIES.iter().enumerate() {
            // the trace of one run predicts the others
            let seen: Vec<[f64; 4]> = traces[from]
                .iter()
                .map(|t| figures(&lab.simulate(t, &plans[at], Some(&profile), &traces[at][0])["simulated"]))
                .collect();
            predicted.push(medians(&seen));
            let off = row(out, policy, medians(&measured[at]), predicted[at]);
            worst = std::array::from_fn(|i| worst[i].max(off[i].abs()));
        }
        let (mut pairs, mut right, mut near) = (0, 0, 0);
        for a in 0..POLICIES.len() {
            for b in 0..a {
                let ratio = medians(&measured[a])[0] / medians(&measured[b])[0];
                if ratio.ln().abs() <= floor.ln_1p() {
                    near += 1;
                    continue;
                }
                pairs += 1;
                right += usize::from((ratio > 1.0) == (predicted[a][0] > predicted[b][0]));
            }
        }
        let _ = writeln!(
            out,
            "\nOf {pairs} pairs of layouts that differ by more than the floor, {right} are ranked right; {near} are within it.\n"
        );
    }
    let _ = writeln!(
        out,
        "Worst of all: tok/s {:.1} %, median barrier {:.1} %, mean {:.1} %, p95 {:.1} %.\n",
        worst[0] * 100.0,
        worst[1] * 100.0,
        worst[2] * 100.0,
        worst[3] * 100.0
    );
}

fn real(lab: &Lab, out: &mut String) {
    // the store is the one drive of a run without a plan; this plan says the same
    let drives = lab.at("real.toml");
    fs::write(&drives, format!("[[drive]]\nname = \"store\"\npath = \"{}\"\n", s(&lab.store))).unwrap();
    let plan = lab.at("real.plan.json");
    if !plan.exists() {
        let single = Path::new(env!("CARGO_MANIFEST_DIR")).join("layouts/single.toml");
        must(&["plan", "--store", s(&lab.store), "--drives", s(&drives), "--policy", s(&single), "--out", s(&plan)]);
    }
    let profile = lab.profile("real", &drives, "26112");
    let traces: Vec<PathBuf> = (0..5).map(|n| lab.decode(&format!("real-{n}"), None, "200")).collect();
    let of = |t: &PathBuf| figures(&lab.simulate(t, &plan, None, t)["recorded"]);
    let measured: Vec<[f64; 4]> = traces.iter().map(of).collect();
    out.push_str(HEAD);
    // each trace predicts the one after it
    for (what, profile) in [("profile of ceiling", Some(profile.as_path())), ("fit to the trace", None)] {
        for at in 1..traces.len() {
            let seen = lab.simulate(&traces[at - 1], &plan, profile, &traces[at]);
            row(out, &format!("{what}, run {at} from {}", at - 1), measured[at], figures(&seen["simulated"]));
        }
    }
    for at in 1..traces.len() {
        row(out, &format!("(run {} itself as the prediction of run {at})", at - 1), measured[at], measured[at - 1]);
    }
}

fn main() {
    let lab = Lab::open();
    let mut out = String::new();
    out.push_str("## Six layouts on four EMULATED drives\n\n");
    emulated(&lab, &mut out);
    out.push_str("## One real disk\n\n");
    real(&lab, &mut out);
    print!("{out}");
}
