//! Every layout policy on every public routing trace: planned on the first half, judged on the second; and what planning
//! the largest model costs. Prints results/samples/planner.md. The traces are read in place, from the folder given
//! as argument or from `shared/data/routing-public` beside the crate.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use argodrive::ids::{ExpertId, LayerId};
use argodrive::layout::drives::DriveSet;
use argodrive::layout::heat::{Heat, Part};
use argodrive::layout::heat_build::HeatBuilder;
use argodrive::layout::level::Reads;
use argodrive::layout::plan::{Plan, PlanDrive};
use argodrive::layout::planner::{Catalog, PlanRequest, judge, plan_with};
use argodrive::layout::policy::PolicyFile;
use argodrive::layout::routes::{RouteOptions, import};
use argodrive::stats::SplitMix64;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

const RATES: [f64; 4] = [13.6e9, 7.1e9, 7.1e9, 5.7e9];
const EXPERT_BYTES: u64 = 17_547_264;

struct Trace {
    name: &'static str,
    first: Heat,
    second: Heat,
}

fn folder() -> PathBuf {
    let given = std::env::args().skip(1).find(|a| !a.starts_with('-')).map(PathBuf::from);
    let beside = ["../shared/data/routing-public", "../../shared/data/routing-public"];
    let mut places = beside.iter().map(|p| Path::new(env!("CARGO_MANIFEST_DIR")).join(p));
    given.or_else(|| places.find(|p| p.is_dir())).expect("give the folder of the public routing data as argument")
}

fn heat(file: &Path, part: Part, experts: u32) -> Heat {
    let options = RouteOptions {
        format: None,
        experts: Some(experts),
        top_k: None,
        layer_base: 0,
        part,
        rejected: false,
        label: "all".into(),
        model_id: None,
    };
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    import(&text, &file.file_name().unwrap().to_string_lossy(), &options).unwrap()
}

fn trace(name: &'static str, folder: &Path, file: &str, experts: u32) -> Trace {
    let path = folder.join(file);
    Trace { name, first: heat(&path, Part::FirstHalf, experts), second: heat(&path, Part::SecondHalf, experts) }
}

fn catalog(heat: &Heat) -> Catalog {
    Catalog {
        model_id: "m".into(),
        store: "/store".into(),
        layers: heat.layers(),
        experts: heat.experts,
        expert_bytes: EXPERT_BYTES,
    }
}

fn drives(n: usize) -> Vec<PlanDrive> {
    (0..n).map(|i| PlanDrive { name: format!("d{}", i + 1), path: format!("/d{}", i + 1).into() }).collect()
}

fn planned(policy: &PolicyFile, heat: &Heat, rates: &[f64]) -> Plan {
    let (catalog, drives, set) = (catalog(heat), drives(rates.len()), DriveSet::of_rates(rates));
    let inputs = BTreeMap::new();
    let request = PlanRequest { catalog: &catalog, drives: &drives, policy, heat: Some(heat), set: &set, inputs };
    plan_with(request).unwrap().plan
}

/// Mean barrier on `second` over the mean of `bound_drives`, planned on `first` for reads of the same kind.
fn held_out(text: &str, reads: Reads, first: &Heat, second: &Heat, rates: &[f64]) -> f64 {
    let policy = PolicyFile { reads, ..PolicyFile::parse(text).unwrap() };
    judge(&planned(&policy, first, rates), &policy, &DriveSet::of_rates(rates), second).unwrap().ratio()
}

fn policies() -> Vec<(String, String)> {
    let mut list: Vec<(String, String)> = ["single", "round-robin", "hash", "lpt", "stripe"]
        .iter()
        .map(|p| (p.to_string(), format!("policy = \"{p}\"")))
        .collect();
    let band = |drive: &str, what: &str| format!("[[band]]\ndrive = \"{drive}\"\n{what}\n");
    let hot = ["d2", "d3", "d4"].map(|d| band(d, "reads = \"@\"")).concat();
    for share in ["30%", "60%"] {
        let text = format!("policy = \"hot-replica\"\n{}{}", band("d1", "experts = \"all\""), hot.replace('@', share));
        list.push((format!("hot-replica, all on d1, {share} of reads on each other"), text));
    }
    for extra in ["0%", "5%", "10%", "25%", "50%"] {
        list.push((format!("**barrier**, {extra} extra"), format!("policy = \"barrier\"\nextra = \"{extra}\"")));
    }
    list.push(("full-mirror (300% extra)".into(), "policy = \"full-mirror\"".into()));
    list
}

fn every_policy(traces: &[Trace]) {
    println!("| policy | {} |", traces.iter().map(|t| t.name).collect::<Vec<_>>().join(" | "));
    println!("|---|{}", "---|".repeat(traces.len()));
    for (name, text) in policies() {
        let cells = traces.iter().map(|t| {
            let of = |reads| held_out(&text, reads, &t.first, &t.second, &RATES);
            if text.contains("stripe") {
                format!("{:.3} / -", of(Reads::Split))
            } else {
                format!("{:.3} / {:.3}", of(Reads::Split), of(Reads::Whole))
            }
        });
        println!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
}

fn other_drives(kimi: &Trace) {
    println!("| drives | hash | lpt | barrier 0% | 10% | 25% | 50% |\n|---|---|---|---|---|---|---|");
    let sets: [(&str, &[f64]); 5] = [
        ("2 equal", &[7e9, 7e9]),
        ("4 equal", &[7e9, 7e9, 7e9, 7e9]),
        ("5.0/4.9", &[5e9, 4.9e9]),
        ("5.0/4.9/0.5", &[5e9, 4.9e9, 0.5e9]),
        ("6 unequal: 13.6/7.1/7.1/5.7/3.5/3.5", &[13.6e9, 7.1e9, 7.1e9, 5.7e9, 3.5e9, 3.5e9]),
    ];
    for (name, rates) in sets {
        let of = |text: &str| format!("{:.3}", held_out(text, Reads::Split, &kimi.first, &kimi.second, rates));
        let barrier = |extra: &str| of(&format!("policy = \"barrier\"\nextra = \"{extra}\""));
        let cells = [
            of("policy = \"hash\""),
            of("policy = \"lpt\""),
            barrier("0%"),
            barrier("10%"),
            barrier("25%"),
            barrier("50%"),
        ];
        println!("| {name} | {} |", cells.join(" | "));
    }
}

fn seeds(kimi: &Trace) {
    for reads in [Reads::Split, Reads::Whole] {
        let ratios: Vec<f64> = (0..5)
            .map(|seed| {
                let text = format!("policy = \"barrier\"\nextra = \"25%\"\nseed = {seed}");
                held_out(&text, reads, &kimi.first, &kimi.second, &RATES)
            })
            .collect();
        let text: Vec<String> = ratios.iter().map(|r| format!("{r:.3}")).collect();
        println!("- {reads:?} reads, seeds 0 to 4: {}", text.join(", "));
    }
}

fn efforts(kimi: &Trace) {
    for effort in ["quick", "normal", "thorough"] {
        let text = format!("policy = \"barrier\"\nextra = \"25%\"\neffort = \"{effort}\"");
        let of = |reads| held_out(&text, reads, &kimi.first, &kimi.second, &RATES);
        println!("- effort {effort}: {:.3} split, {:.3} whole", of(Reads::Split), of(Reads::Whole));
    }
}

fn cached(kimi: &Trace) {
    println!(
        "| cache | hash | barrier 25%, cache not told | barrier 25%, cache told | told, 50% |\n|---|---|---|---|---|"
    );
    let bank = u64::from(kimi.first.experts) * kimi.first.layers().len() as u64;
    for percent in [5, 15] {
        let cache = format!("cache = \"{}B\"\n", bank * percent / 100 * EXPERT_BYTES);
        let told = |text: &str, planner_knows: bool| {
            let judged = PolicyFile::parse(&format!("{text}\n{cache}")).unwrap();
            let planned_for = if planner_knows { judged.clone() } else { PolicyFile::parse(text).unwrap() };
            let plan = planned(&planned_for, &kimi.first, &RATES);
            judge(&plan, &judged, &DriveSet::of_rates(&RATES), &kimi.second).unwrap().ratio()
        };
        let barrier = |extra: &str| format!("policy = \"barrier\"\nextra = \"{extra}\"");
        println!(
            "| LRU, {percent} % of the bank | {:.3} | {:.3} | {:.3} | {:.3} |",
            told("policy = \"hash\"", true),
            told(&barrier("25%"), false),
            told(&barrier("25%"), true),
            told(&barrier("50%"), true)
        );
    }
}

/// Heat of K3's shape: 92 layers, 896 experts, 16 a token, skewed, with groups that are asked for together.
fn k3_heat() -> Heat {
    let mut builder = HeatBuilder::new(896).unwrap();
    let mut rng = SplitMix64::new(7);
    for _ in 0..600 {
        for layer in 1..93u16 {
            let mut ids: Vec<ExpertId> = Vec::with_capacity(16);
            let group = rng.below(28) as u16;
            while ids.len() < 16 {
                let hot = (rng.below(30) * rng.below(31)) as u16;
                let id = if rng.below(3) == 0 { group * 32 + rng.below(32) as u16 } else { hot };
                let id = ExpertId((id.wrapping_mul(5).wrapping_add(layer * 37)) % 896);
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
            builder.row(LayerId(layer), &ids, true).unwrap();
        }
    }
    builder.finish(None, Vec::new(), "all").unwrap()
}

fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with(key)).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Processor seconds of this process.
fn cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(f64::NAN);
    (ticks(11) + ticks(12)) / 100.0
}

fn largest() {
    let heat = k3_heat();
    let policy = PolicyFile::parse("policy = \"barrier\"\nextra = \"25%\"").unwrap();
    let (start, before) = (Instant::now(), cpu_s());
    let plan = planned(&policy, &heat, &RATES);
    let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_s() - before);
    let ratio = judge(&plan, &policy, &DriveSet::of_rates(&RATES), &heat).unwrap().ratio();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!(
        "- {wall:.1} s wall, {cpu:.1} s of processor time on {} cores (load average {}), peak memory of the process {} MiB",
        std::thread::available_parallelism().map_or(0, usize::from),
        load.split_whitespace().next().unwrap_or("?"),
        status("VmHWM") / 1024
    );
    println!(
        "- plan file {:.2} MiB, {} copies beyond the first; on its own heat {ratio:.3} x bound_drives",
        plan.to_json().unwrap().len() as f64 / f64::from(1 << 20),
        plan.replica_count()
    );
}

fn main() {
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let only = std::env::args().find_map(|a| a.strip_prefix("--only=").map(str::to_owned));
    let wanted = |part: &str| only.as_deref().is_none_or(|o| o == part);
    let folder = folder();
    let kimi = trace("Kimi-Linear (26 x 256, top 8)", &folder, "warp-kimi-linear-48b.trace.jsonl", 256);
    println!(
        "# Layout policies, judged on text they were not made from\n\n\
         Planned on the first half of each trace, judged on the second; four drives of 13.6 / 7.1 / 7.1 / 5.7 GB/s, equal \
         experts, no\nfixed cost, no cache. Figures are mean(barrier) / mean(bound_drives) over all layers, `split reads / \
         whole reads`; each is\nplanned for the reads that it is judged with. Extra = copies beyond the first, in bytes of \
         the bank. They are arithmetic,\nnot measurements of drives. Planner settings were chosen on splits inside the first \
         half of the Kimi-Linear trace.\n\n\
         Data (public, read in place): sqliteai/warp 7f1fbba3 `trace_kimi_300.jsonl` (Apache-2.0), Helldez/BigMoeOnEdge \
         2d4f2b11\n`qwen.route.csv`, `gemma.route.csv` (Apache-2.0), doramirdor/mbolt e7e9dbf7 co-activation tables (MIT).\n\n\
         ```\ncargo bench --bench planner > results/samples/planner.md\n```\n"
    );
    if wanted("table") {
        let qwen = trace("Qwen3-30B (48 x 128, top 6)", &folder, "bmoe-qwen3-30b-a3b.route.csv", 128);
        let gemma = trace("Gemma-4 (30 x 128, top 6)", &folder, "bmoe-gemma4-26b-a4b.route.csv", 128);
        let mbolt = Trace {
            name: "Qwen3-30B, planned on 75,773 other tokens",
            first: heat(&folder.join("mbolt-qwen3-30b-a3b.coactivation.json"), Part::Whole, 128),
            second: qwen.second.clone(),
        };
        let kimi = Trace { name: kimi.name, first: kimi.first.clone(), second: kimi.second.clone() };
        println!("## Every policy, every trace\n");
        every_policy(&[kimi, qwen, gemma, mbolt]);
        println!(
            "\nEight whole experts on these drives cannot be read faster than 2 / 7.1 (3 + 2 + 2 + 1 experts): 1.180 x \
             bound_drives; six\nwhole ones (3 + 1 + 1 + 1) 1.232. `stripe` is RAID-0 with equal blocks, read \
             as such whatever the dispatch.\n"
        );
    }
    if wanted("seeds") {
        println!("## Kimi-Linear, barrier, 25% extra: seeds and effort\n");
        seeds(&kimi);
        efforts(&kimi);
    }
    if wanted("drives") {
        println!("\n## Kimi-Linear on other drives, split reads\n");
        other_drives(&kimi);
    }
    if wanted("cache") {
        println!("\n## Kimi-Linear behind a cache (experts that the model just used are in memory), split reads\n");
        cached(&kimi);
    }
    if wanted("k3") {
        println!("\n## K3's size: 92 x 896 experts of 17,547,264 bytes, 4 drives, effort normal, synthetic heat\n");
        largest();
    }
}
