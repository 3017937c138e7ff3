//! Reading ahead and keeping experts change which bytes are read when, never a token: a real decoder over every engine,
//! dispatch policy and setting of prefetch and cache, on plain and emulated drives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;
mod traces;

use argodrive::bench::config::Asked;
use argodrive::bench::evidence::{Verdict, objections};
use argodrive::bench::run::{RunResult, RunSpec, run};
use argodrive::drive::spec::{DriveSpec, Emulation, RateSchedule};
use argodrive::io::EngineKind;
use argodrive::layout::plan::{Plan, PlanDrive};
use argodrive::layout::planner;
use argodrive::layout::policy::Policy;
use argodrive::open::Model;
use argodrive::reader::{CachePolicy, DispatchPolicy, PrefetchPolicy, PrefetchPool, ReaderOptions};
use argodrive::stage::{StageOptions, stage};
use argodrive::trace::stream;
use prepared::{Drives, tiny_store};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Of the tiny checkpoint's experts.
const SLOT: u64 = 12_288;

struct Rig {
    model: Model,
    drives: Drives,
    plan: Plan,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
}

fn rig() -> Rig {
    let model = Model::load(tiny_store(), None).unwrap();
    let drives = Drives::new(2, None);
    let named: Vec<PlanDrive> =
        drives.specs.iter().map(|d| PlanDrive { name: d.name.clone(), path: d.path.clone() }).collect();
    let plan = planner::plan(&model.catalog(), &named, &Policy::FullMirror {}, 0, BTreeMap::new()).unwrap();
    let paths: Vec<PathBuf> = drives.specs.iter().map(|d| d.path.clone()).collect();
    stage(&plan, &model.folder, &paths, StageOptions::default(), &mut |_| {}).unwrap();
    let text = std::fs::read(prepared::repo("tests/fixtures/oracle/tiny/golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let (prompt, greedy) = (prepared::ids(&golden["prompt_ids"]), prepared::ids(&golden["greedy_ids"]));
    Rig { model, drives, plan, prompt, greedy }
}

fn decode(rig: &Rig, emulate: Option<Emulation>, options: &ReaderOptions) -> RunResult {
    let mounts: Vec<DriveSpec> = rig.drives.specs.iter().map(|s| DriveSpec { emulate, ..s.clone() }).collect();
    let mut asked = Asked::default();
    asked.config.max_new = rig.greedy.len();
    asked.config.reader = options.clone();
    asked.config.reader.direct &= options.engine.can_be_direct();
    let spec = RunSpec {
        arm: "test",
        asked: &asked,
        under_test: &BTreeSet::new(),
        streamed: Some((&rig.plan, &mounts)),
        prompts: std::slice::from_ref(&rig.prompt),
        control: None,
    };
    run(&rig.model, &spec, &mut |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn tokens_do_not_depend_on_what_is_read_ahead_or_kept() {
    let rig = rig();
    let pace = Emulation {
        rate_bytes_per_s: 100_000_000,
        latency_ns: 50_000,
        per_read_ns: 0,
        jitter: 0.1,
        seed: 1,
        schedule: RateSchedule::NONE,
        link: None,
    };
    let base = ReaderOptions::default();
    let ahead = |prefetch_depth| ReaderOptions { prefetch: PrefetchPolicy::SameAsLast, prefetch_depth, ..base.clone() };
    let keep = |slots: u64, cache_policy, more: ReaderOptions| ReaderOptions {
        cache_bytes: slots * SLOT,
        cache_policy,
        ..more
    };
    // Six experts are kept for demand; the smallest budget that goes has one slot more for guesses.
    let tiny = ReaderOptions { buffer_bytes: 7 * SLOT, ..ahead(3) };
    let settings = [
        ahead(1),
        ReaderOptions { prefetch_experts: 2, prefetch_queue_depth: 1, ..ahead(8) },
        tiny,
        ReaderOptions { prefetch_pool: PrefetchPool::Shared, queue_depth: 2, ..ahead(2) },
        ReaderOptions { prefetch_dispatch: Some(DispatchPolicy::FirstHit), ..ahead(1) },
        keep(60, CachePolicy::Lru, base.clone()),
        keep(40, CachePolicy::LfuDecay, ahead(2)),
        ReaderOptions { buffer_bytes: 12 * SLOT, ..keep(4, CachePolicy::Lru, ahead(1)) },
    ];
    let mut engines = vec![EngineKind::Psync, EngineKind::Mmap, EngineKind::Buffered];
    if cfg!(target_os = "linux") {
        engines.push(EngineKind::Uring);
    }
    for (at, setting) in settings.iter().enumerate() {
        for (turn, &engine) in engines.iter().enumerate() {
            // Every engine with split reads, every dispatch policy with the first engine.
            let policies = if turn == 0 { &DispatchPolicy::ALL[..] } else { &[DispatchPolicy::Split] };
            for &dispatch in policies {
                // Every other setting is emulated for one engine, and plain for the next.
                let emulate = (at + turn + dispatch as usize).is_multiple_of(2);
                let options = ReaderOptions { engine, dispatch, ..setting.clone() };
                let result = decode(&rig, emulate.then_some(pace), &options);
                let what = format!("{engine} {} {setting:?}", dispatch.name());
                assert_eq!(result.generation.token_ids, rig.greedy, "{what}");
                let seen = result.counters.unwrap();
                let issued: u64 = seen.drives.iter().map(|d| d.prefetch.issued.reads).sum();
                assert_eq!(issued > 0, setting.prefetch != PrefetchPolicy::None, "{what}");
                assert_eq!(seen.cache.slots > 0, setting.cache_bytes > 0, "{what}");
                let judged = ["prefetch", "prefetch_depth", "prefetch_experts", "prefetch_pool", "prefetch_dispatch"];
                for name in judged.into_iter().chain(["cache_bytes", "cache_policy"]) {
                    let line = result.record.settings.iter().find(|s| s.name == name).unwrap();
                    assert_ne!(line.verdict, Verdict::Contradicted, "{what}: {line:?}");
                }
            }
        }
    }
}

#[test]
fn a_trace_with_guesses_and_a_cache_is_whole_and_can_be_reported_on() {
    let rig = rig();
    let dir = prepared::folder();
    let mounts = rig.drives.specs.clone();
    let mut asked = Asked::default();
    asked.config.max_new = rig.greedy.len();
    asked.config.trace = Some(dir.path().join("trace"));
    asked.config.reader.prefetch = PrefetchPolicy::SameAsLast;
    asked.config.reader.prefetch_depth = 2;
    asked.config.reader.cache_bytes = 8 * SLOT;
    let spec = RunSpec {
        arm: "test",
        asked: &asked,
        under_test: &BTreeSet::new(),
        streamed: Some((&rig.plan, &mounts)),
        prompts: std::slice::from_ref(&rig.prompt),
        control: None,
    };
    let result = run(&rig.model, &spec, &mut |_| ControlFlow::Continue(())).unwrap();
    let holes: Vec<_> = objections(&result.record.settings).into_iter().filter(|o| o.contains("trace")).collect();
    assert!(holes.is_empty(), "{holes:?}");
    let folder = dir.path().join("trace");
    // Reading the trace finds what the reader itself had said: same last drive, same cause, for every barrier.
    let (summary, rows) = traces::report(&folder, false).unwrap();
    let mut records = stream::barriers(&folder, mounts.len(), false).unwrap();
    let mut causes = BTreeSet::new();
    for row in &rows {
        let record = records.next_value().unwrap().unwrap();
        let last = record.straggler.map(|d| mounts[d.index()].name.clone());
        assert_eq!((row.barrier, row.last.clone()), (record.barrier, last));
        assert_eq!(row.cause, serde_json::to_value(record.cause).unwrap().as_str().unwrap(), "{record:?}");
        causes.insert(row.cause);
    }
    assert!(records.next_value().unwrap().is_none() && summary.all.barriers as usize == rows.len());
    assert!(causes.contains("none") || causes.contains("prefetch_late") || causes.contains("evicted"), "{causes:?}");
    let prefetched = result.record.drives.iter().map(|d| d.prefetch_useful_bytes + d.prefetch_late_bytes).sum::<u64>();
    assert!(prefetched > 0);
}
