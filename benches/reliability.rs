//! What one bad drive costs: each row is a run of argo-mini from three emulated drives of which one misbehaves, beside the same
//! run from three good ones and from the two others alone.
//!
//!     cargo bench --bench reliability [-- --tokens 24 --rounds 3 --row 6]
//!
//! Prints the rows of results/reliability.md. Stores and drives are made below target/, and taken away again.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use argodrive::bench::config::Asked;
use argodrive::bench::record::RunRecord;
use argodrive::bench::run::{RunError, RunSpec, run};
use argodrive::drive::fault_rule::DriveFault;
use argodrive::drive::spec::{DriveSpec, Emulation};
use argodrive::layout::plan::{Plan, PlanDrive};
use argodrive::layout::planner;
use argodrive::layout::policy::Policy;
use argodrive::open::Model;
use argodrive::reader::{DispatchPolicy, Shedding};
use argodrive::stage::{StageOptions, stage};
use argodrive::store::import::{ImportOptions, import};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

const PROMPT: &str = "The router names the experts, and the block comes back when the device has time.";
const NAMES: [&str; 3] = ["amber", "blue", "coral"];
/// Slow enough that a small machine keeps it.
const RATE: u64 = 8_000_000;

/// A bad drive: what is done to `coral`, and how the reader is told to go about it.
struct Row {
    what: &'static str,
    faults: &'static str,
    dispatch: DispatchPolicy,
    more: &'static str,
}

const fn row(what: &'static str, faults: &'static str, dispatch: DispatchPolicy, more: &'static str) -> Row {
    Row { what, faults, dispatch, more }
}

const ROWS: [Row; 10] = [
    row("one bad block", "coral: eio @60", DispatchPolicy::Split, ""),
    row("one read in a hundred fails", "coral: eio 1% seed=1", DispatchPolicy::Split, ""),
    row("every read fails from read 60 on", "coral: eio @60..", DispatchPolicy::Split, ""),
    row("short reads, 2 %", "coral: short 2% seed=2", DispatchPolicy::Split, ""),
    row("wrong bytes, 2 %", "coral: flip 2% seed=3", DispatchPolicy::Split, "--verify-reads"),
    row("the drive vanishes at read 60", "coral: vanish @60..", DispatchPolicy::Split, ""),
    row("it vanishes and is back for the second probe", "coral: vanish @60..68", DispatchPolicy::Split, ""),
    row("it hangs from read 60 on", "coral: stall @60..", DispatchPolicy::Split, "--read-timeout 1000"),
    row("a sixteenth of its rate from read 400 on, by rates", "coral: slow 500KB/s @400..", DispatchPolicy::Split, ""),
    row("the same, drives in turn", "coral: slow 500KB/s @400..", DispatchPolicy::RoundRobin, ""),
];

/// A run, and the time of the second half of its tokens, when what the fault changed has been learnt.
struct Measured {
    record: RunRecord,
    second_half_s: f64,
}

struct Bench {
    model: Model,
    folder: PathBuf,
    tokens: usize,
    rounds: usize,
}

impl Bench {
    fn new(tokens: usize, rounds: usize) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = root.join("target").join("reliability");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let store = folder.join("store");
        import(&root.join("models/argo-mini"), &store, &ImportOptions::default(), &mut |_| {}).unwrap();
        Self { model: Model::load(&store, None).unwrap(), folder, tokens, rounds }
    }

    /// A full mirror over the first `count` drives.
    fn mirror(&self, count: usize) -> (Plan, Vec<DriveSpec>) {
        let emulate =
            |seed| Some(Emulation { rate_bytes_per_s: RATE, latency_ns: 1_000_000, seed, ..Emulation::default() });
        let drive = |(n, name): (usize, &&str)| DriveSpec {
            emulate: emulate(n as u64),
            ..DriveSpec::new(*name, self.folder.join(name))
        };
        let mounts: Vec<DriveSpec> = NAMES[..count].iter().enumerate().map(drive).collect();
        let drives: Vec<PlanDrive> =
            mounts.iter().map(|m| PlanDrive { name: m.name.clone(), path: m.path.clone() }).collect();
        let plan = planner::plan(&self.model.catalog(), &drives, &Policy::FullMirror {}, 0, BTreeMap::new()).unwrap();
        let paths: Vec<PathBuf> = mounts.iter().map(|m| m.path.clone()).collect();
        paths.iter().for_each(|p| std::fs::create_dir_all(p).unwrap());
        stage(&plan, &self.model.folder, &paths, StageOptions::default(), &mut |_| {}).unwrap();
        (plan, mounts)
    }

    /// Runs of one kind; the one with the median decode time. `Err` = the run ended.
    fn measure(&self, (plan, mounts): &(Plan, Vec<DriveSpec>), row: &Row, shed: bool) -> Result<Measured, String> {
        let mut asked = Asked::default();
        asked.config.max_new = self.tokens;
        let reader = &mut asked.config.reader;
        (reader.dispatch, reader.shed) = (row.dispatch, if shed { Shedding::On } else { Shedding::Off });
        reader.verify_digests = row.more.contains("--verify-reads");
        if row.more.contains("--read-timeout") {
            reader.read_timeout_ms = 1000;
        }
        reader.faults = DriveFault::parse_all(row.faults).unwrap();
        let tokens = self.model.encode_prompt(PROMPT, false).unwrap();
        let under_test = BTreeSet::new();
        let streamed = Some((plan, mounts.as_slice()));
        let prompts = [tokens];
        let spec = RunSpec {
            arm: "reliability",
            asked: &asked,
            under_test: &under_test,
            streamed,
            prompts: &prompts,
            control: None,
        };
        let once = |_| {
            let mut at = Vec::new();
            let mut note = |_| {
                at.push(Instant::now());
                ControlFlow::Continue(())
            };
            let record = run(&self.model, &spec, &mut note)?.record;
            let second_half_s = (at[at.len() - 1] - at[at.len() / 2]).as_secs_f64();
            Ok(Measured { record, second_half_s })
        };
        let mut all = (0..self.rounds).map(once).collect::<Result<Vec<_>, RunError>>().map_err(|e| e.to_string())?;
        all.sort_by(|a, b| seconds(&a.record).total_cmp(&seconds(&b.record)));
        Ok(all.swap_remove(all.len() / 2))
    }
}

/// Decode time of a run.
fn seconds(record: &RunRecord) -> f64 {
    record.generated_tokens.saturating_sub(1) as f64 / record.rates.decode_tok_s.max(1e-9)
}

fn cells(bench: &Bench, good: &Measured, two: &Measured, result: &Result<Measured, String>) -> String {
    let measured = match result {
        Ok(measured) => measured,
        Err(e) => return format!("no: {e} | - | - | - | - | - | -"),
    };
    let (record, good_s, two_s) = (&measured.record, seconds(&good.record), seconds(&two.record));
    let same = record.token_hash == good.record.token_hash;
    let trouble = record.trouble.clone().unwrap_or_default();
    let s = seconds(record);
    let events: Vec<String> =
        trouble.events.iter().map(|e| format!("{:?} (barrier {})", e.happened, e.barrier)).collect();
    let events = if events.is_empty() { "none".to_string() } else { events.join(", ") };
    format!(
        "yes | {} | {} of {} | {:+.0} ms, {:+.1} % | {:+.1} % | {:+.1} % | {events}",
        if same { "yes" } else { "NO" },
        trouble.reads_moved,
        trouble.reads_failed,
        (s - good_s) * 1e3,
        (s / good_s - 1.0) * 100.0,
        (s / two_s - 1.0) * 100.0,
        (measured.second_half_s / two.second_half_s - 1.0) * 100.0,
    ) + if record.generated_tokens == bench.tokens { "" } else { " (ended early)" }
}

fn number(name: &str, or: usize) -> usize {
    let mut args = std::env::args().skip_while(|a| a != name).skip(1);
    args.next().map_or(or, |n| n.parse().expect(name))
}

fn main() {
    let bench = Bench::new(number("--tokens", 24), number("--rounds", 3));
    let (three, two) = (bench.mirror(3), bench.mirror(2));
    let good_row = |dispatch| Row { what: "", faults: "", dispatch, more: "" };
    println!(
        "| row | fault (EMULATED drives) | `--faults` | dispatch | survived | tokens identical | reads moved of failed | decoding against three good drives | against the two others alone | its second half | events |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let only = number("--row", 0);
    for (at, row) in ROWS.iter().enumerate().filter(|(at, _)| only == 0 || at + 1 == only) {
        let good = bench.measure(&three, &good_row(row.dispatch), true).unwrap();
        let alone = bench.measure(&two, &good_row(row.dispatch), true).unwrap();
        let slow = row.faults.contains("slow");
        for shed in if slow { &[true, false][..] } else { &[true][..] } {
            let result = bench.measure(&three, row, *shed);
            let off = if *shed { "" } else { ", `--shed off`" };
            let more = if row.more.is_empty() { String::new() } else { format!(" `{}`", row.more) };
            let cells = cells(&bench, &good, &alone, &result);
            println!("| {} | {}{off} | `{}`{more} | {} | {cells} |", at + 1, row.what, row.faults, row.dispatch.name());
        }
    }
    drop(bench.model);
    let _ = std::fs::remove_dir_all(&bench.folder);
}
