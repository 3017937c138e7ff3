//! A long run in one process: texts one after the other from three drives that misbehave by turns, until so many tokens are there.
//! Memory and open files must not grow, tokens must be those of the same text without faults, every record's counters must agree.
//!
//!     cargo bench --bench soak [-- --tokens 20000]
//!
//! Prints the row of results/reliability.md; ends with 1 if something grew, differed or did not agree. The three drives are folders below
//! target/ on one real disk, not emulated.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use argodrive::bench::config::Asked;
use argodrive::bench::record::RunRecord;
use argodrive::bench::run::{RunSpec, run};
use argodrive::drive::fault_rule::DriveFault;
use argodrive::drive::spec::DriveSpec;
use argodrive::layout::plan::{Plan, PlanDrive};
use argodrive::layout::planner;
use argodrive::layout::policy::Policy;
use argodrive::open::Model;
use argodrive::stage::{StageOptions, stage};
use argodrive::store::import::{ImportOptions, import};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Tokens of a text.
const TEXT: usize = 400;
/// Texts before memory is looked at: what is made once is there then.
const WARM_UP: usize = 8;
/// Growth of resident memory that counts as none.
const LEEWAY_KB: u64 = 4096;

/// What happens during a text; none for every fourth.
const FAULTS: [&str; 7] = [
    "",
    "coral: eio 1% seed=1; amber: short 0.5% seed=2",
    "blue: vanish @200..260",
    "amber: flip 0.5% seed=3",
    "",
    "coral: slow 3x @100..900; blue: eio @400",
    "amber: stall 30ms 0.2% seed=4; coral: vanish @1000..",
];

fn status_kb(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn drives(model: &Model, folder: &Path) -> (Plan, Vec<DriveSpec>) {
    let mounts: Vec<DriveSpec> =
        ["amber", "blue", "coral"].iter().map(|name| DriveSpec::new(*name, folder.join(name))).collect();
    let named: Vec<PlanDrive> =
        mounts.iter().map(|m| PlanDrive { name: m.name.clone(), path: m.path.clone() }).collect();
    let plan = planner::plan(&model.catalog(), &named, &Policy::FullMirror {}, 0, BTreeMap::new()).unwrap();
    let paths: Vec<PathBuf> = mounts.iter().map(|m| m.path.clone()).collect();
    paths.iter().for_each(|p| std::fs::create_dir_all(p).unwrap());
    stage(&plan, &model.folder, &paths, StageOptions::default(), &mut |_| {}).unwrap();
    (plan, mounts)
}

fn one(model: &Model, drives: &(Plan, Vec<DriveSpec>), prompt: &[u32], faults: &str, seed: u64) -> RunRecord {
    let mut asked = Asked::default();
    asked.config.max_new = TEXT;
    asked.config.sampler.temperature = 0.7;
    asked.config.sampler.seed = seed;
    asked.config.reader.verify_digests = true;
    asked.config.reader.faults = DriveFault::parse_all(faults).unwrap();
    let (under_test, prompts) = (BTreeSet::new(), [prompt.to_vec()]);
    let spec = RunSpec {
        arm: "soak",
        asked: &asked,
        under_test: &under_test,
        streamed: Some((&drives.0, drives.1.as_slice())),
        prompts: &prompts,
        control: None,
    };
    run(model, &spec, &mut |_| ControlFlow::Continue(())).unwrap().record
}

fn main() -> ExitCode {
    let wanted: u64 = std::env::args().skip_while(|a| a != "--tokens").nth(1).map_or(20_000, |n| n.parse().unwrap());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("target/soak");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let store = folder.join("store");
    import(&root.join("models/argo-mini"), &store, &ImportOptions::default(), &mut |_| {}).unwrap();
    let model = Model::load(&store, None).unwrap();
    let drives = drives(&model, &folder);
    let prompts = ["Once upon a time", "The lighthouse keeper", "A fox and a crow", "Sort the numbers 3, 1, 2"]
        .map(|p| model.encode_prompt(p, false).unwrap());
    let (mut tokens, mut texts, mut failed, mut moved) = (0u64, 0usize, 0u64, 0u64);
    let (mut differ, mut disagree) = (0, Vec::new());
    let (mut memory, mut files) = (Vec::new(), Vec::new());
    while tokens < wanted {
        let (prompt, seed) = (&prompts[texts % prompts.len()], texts as u64 / 2);
        // each text twice in a row: without faults, then with them
        let plain = one(&model, &drives, prompt, "", seed);
        let faulty = one(&model, &drives, prompt, FAULTS[texts % FAULTS.len()], seed);
        differ += usize::from(plain.token_hash != faulty.token_hash);
        for record in [&plain, &faulty] {
            tokens += record.generated_tokens as u64;
            // what depends on how busy the machine is says nothing about counters
            let contradicted = record.rejected.iter().filter(|r| r.contains("contradicted")).cloned();
            disagree.extend(contradicted.map(|r| format!("text {texts}: {r}")));
        }
        let trouble = faulty.trouble.unwrap_or_default();
        (failed, moved) = (failed + trouble.reads_failed, moved + trouble.reads_moved);
        texts += 1;
        memory.push(status_kb("VmRSS:"));
        files.push(open_files());
    }
    let later = &memory[WARM_UP.min(memory.len() - 1)..];
    let (first, last) = (later[0], *later.last().unwrap());
    let most = *later.iter().max().unwrap();
    let (files_first, files_most) = (files[0], *files.iter().max().unwrap());
    println!(
        "| tokens | texts, each without and with faults | reads that failed | moved | texts with other tokens | records that do not agree | resident after {WARM_UP} texts, at most, at the end, kB | open files after the first text, at most |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---|---|");
    println!(
        "| {tokens} | {texts} | {failed} | {moved} | {differ} | {} | {first}, {most}, {last} | {files_first}, {files_most} |",
        disagree.len()
    );
    disagree.iter().for_each(|d| println!("{d}"));
    drop(model);
    let _ = std::fs::remove_dir_all(&folder);
    let flat = most <= first + LEEWAY_KB && files_most <= files_first;
    ExitCode::from(u8::from(!flat || differ > 0 || !disagree.is_empty()))
}
