//! The tour that a newcomer takes, on four folders: checkpoint extent -> plan -> staged replica -> router picks ->
//! barrier -> dispatch -> engine -> read event -> barrier record -> expert -> logits -> run record. At each stop what one
//! layer says is compared with what its neighbours say, down to the bytes of the checkpoint.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;
mod prepared;

use argodrive::bench::config::Asked;
use argodrive::bench::evidence::objections;
use argodrive::bench::record::token_hash;
use argodrive::bench::run::{RunSpec, run};
use argodrive::clock::Clock;
use argodrive::decode::observe::{Observer, Route};
use argodrive::decode::{Logits, Session};
use argodrive::drive::spec::DriveSpec;
use argodrive::ids::{DriveId, ExpertId, LayerId};
use argodrive::knob::Knob;
use argodrive::layout::plan::{Plan, PlanDrive};
use argodrive::layout::planner;
use argodrive::layout::policy::Policy;
use argodrive::open::Model;
use argodrive::reader::{DispatchPolicy, ReaderCounters, ReaderOptions};
use argodrive::source::{ExpertSource, Phase};
use argodrive::stage::{StageOptions, stage};
use argodrive::store::manifest::{Digest, DriveManifest, drive_folder};
use argodrive::trace::events::{BarrierRecord, Outcome, Purpose, ReadEvent, ReadResult};
use prepared::{Drives, mini_store, tiny_store};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Plans `model` onto `drives` and makes it true.
fn staged(model: &Model, drives: &[DriveSpec], policy: &Policy) -> Plan {
    let named: Vec<PlanDrive> =
        drives.iter().map(|d| PlanDrive { name: d.name.clone(), path: d.path.clone() }).collect();
    let plan = planner::plan(&model.catalog(), &named, policy, 0, BTreeMap::new()).unwrap();
    let paths: Vec<PathBuf> = drives.iter().map(|d| d.path.clone()).collect();
    stage(&plan, &model.folder, &paths, StageOptions::default(), &mut |_| {}).unwrap();
    plan
}

/// Remembers which experts each pass routed to, by step and layer.
#[derive(Default)]
struct Picks {
    step: u64,
    experts: BTreeMap<(u64, LayerId), BTreeSet<ExpertId>>,
    /// By layer, the experts of each row in order of choice.
    rows: BTreeMap<LayerId, Vec<Vec<u16>>>,
}

impl Observer for Picks {
    fn route(&mut self, route: &Route<'_>) {
        self.experts.entry((self.step, route.layer)).or_default().extend(route.experts);
        self.rows.entry(route.layer).or_default().push(route.experts.iter().map(|e| e.0).collect());
    }
}

/// Greedy decoding of `count` tokens; returns them and the logits of every pass.
fn decode(
    session: &mut Session,
    source: &mut dyn ExpertSource,
    prompt: &[u32],
    count: usize,
    picks: &mut Picks,
) -> (Vec<u32>, Vec<Vec<f32>>) {
    let (mut ids, mut logits) = (Vec::new(), Vec::new());
    let mut feed = prompt.to_vec();
    for step in 0..count {
        let phase = if step == 0 { Phase::Prefill } else { Phase::Decode };
        picks.step = step as u64;
        logits.push(session.forward(&feed, phase, source, Logits::Last, Some(picks)).unwrap().to_vec());
        ids.push(common::argmax(logits.last().unwrap()));
        feed = vec![*ids.last().unwrap()];
    }
    (ids, logits)
}

fn session(model: &Model, clock: Clock) -> Session {
    model.session(128, 64, argodrive::reader::PrefetchPolicy::None, clock).unwrap()
}

/// Prompt ids, greedy ids and the routes of the prompt's rows, from an independent implementation.
fn golden() -> (Vec<u32>, Vec<u32>, serde_json::Value) {
    let text = std::fs::read(prepared::repo("tests/fixtures/oracle/argo-mini.golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let first = &golden["prompts"][0];
    (prepared::ids(&first["ids"]), prepared::ids(&first["greedy"]), first["routes"].clone())
}

#[test]
fn from_the_checkpoints_extents_to_the_run_record() {
    const TOKENS: usize = 6;
    let checkpoint = common::load("models/argo-mini");
    let model = Model::load(mini_store(), None).unwrap();
    let drives = Drives::new(4, None);
    let plan = staged(&model, &drives.specs, &Policy::RoundRobin {});

    // Plan and replicas: every expert once, with the checkpoint's own bytes.
    let manifests: Vec<DriveManifest> =
        drives.specs.iter().map(|d| DriveManifest::open(&drive_folder(&d.path, &plan.model_id)).unwrap()).collect();
    let mut placed = 0;
    let mut bytes = vec![0u8; plan.expert_bytes as usize];
    for (id, manifest) in manifests.iter().enumerate() {
        for (layer, expert) in plan.on_drive(DriveId(id as u8)) {
            let entry = manifest.find(layer, expert).unwrap();
            let (name, extent) = manifest.locate(layer, entry);
            let path = drive_folder(&drives.specs[id].path, &plan.model_id).join(name);
            std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, extent.offset).unwrap();
            assert!(bytes == checkpoint.experts.get(layer.index(), expert.index()), "{layer}-{expert}");
            assert_eq!(entry.digest, Digest::of(&bytes));
            placed += 1;
        }
    }
    let moe = checkpoint.config.moe.as_ref().unwrap();
    assert_eq!(placed, checkpoint.config.moe_layers().count() * moe.experts);

    // Decoding from memory and from the drives: the same picks, the same bits, the tokens of another implementation.
    let (prompt, greedy, routes) = golden();
    let clock = Clock::start();
    let mut from_memory = Picks::default();
    let reference =
        decode(&mut session(&model, clock), &mut model.resident().unwrap(), &prompt, TOKENS, &mut from_memory);
    assert_eq!(reference.0, greedy[..TOKENS]);
    let options = ReaderOptions { trace_reads: 4000, trace_barriers: 400, ..ReaderOptions::default() };
    let mut reader = model.reader(&plan, &drives.specs, &options, clock).unwrap();
    let mut picks = Picks::default();
    let streamed = decode(&mut session(&model, clock), &mut reader, &prompt, TOKENS, &mut picks);
    assert!(streamed == reference, "tokens or logits differ");
    assert_eq!(picks.experts, from_memory.experts);
    for layer in routes.as_array().unwrap() {
        let rows = &picks.rows[&LayerId(layer["layer"].as_u64().unwrap() as u16)];
        let want: Vec<Vec<u16>> = serde_json::from_value(layer["ids"].clone()).unwrap();
        assert_eq!(rows[..prompt.len()], want);
    }

    // The trace: what was picked is what was read, from where drive.json has it.
    let handle = reader.handle();
    let counters = handle.counters();
    let trace = handle.take_trace().unwrap();
    trace.check_complete().unwrap();
    check_trace(&plan, &manifests, &picks, &counters, trace.reads(), trace.barriers());

    // The record of a measured run over the same drives.
    let mut asked = Asked::default();
    asked.config.max_new = TOKENS;
    asked.config.model.prefill_rows = 64;
    let spec = RunSpec {
        arm: "tour",
        asked: &asked,
        under_test: &BTreeSet::from([Knob::Layout]),
        streamed: Some((&plan, &drives.specs)),
        prompts: std::slice::from_ref(&prompt),
        control: Some(&token_hash(&reference.0)),
    };
    let result = run(&model, &spec, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    let record = &result.record;
    assert_eq!(result.generation.token_ids, reference.0);
    assert_eq!((record.token_hash.clone(), record.generated_tokens), (token_hash(&reference.0), TOKENS));
    assert_eq!((&record.plan_hash, &record.model_id), (&plan.hash().unwrap(), &plan.model_id));
    // Other tests read the same disk beside this one, so guards about it are not asked.
    assert_eq!(objections(&record.settings), Vec::<String>::new());
    assert!(!record.emulated);
    for (seen, before) in record.drives.iter().zip(&counters.drives) {
        assert_eq!((&seen.name, seen.reads, seen.payload_bytes), (&before.name, before.reads, before.payload_bytes));
        assert_eq!(seen.read_bytes, before.read_bytes);
    }
    let passes = TOKENS as u64 * plan.layers.len() as u64;
    assert_eq!(record.drives.iter().map(|d| d.landed_last).sum::<u64>(), passes, "each barrier has one straggler");
}

fn check_trace(
    plan: &Plan,
    manifests: &[DriveManifest],
    picks: &Picks,
    counters: &ReaderCounters,
    reads: &[ReadEvent],
    barriers: &[BarrierRecord],
) {
    assert_eq!(barriers.len(), picks.experts.len(), "one barrier for each pass and layer");
    assert_eq!(counters.barriers, barriers.len() as u64);
    for (number, (barrier, (&(step, layer), experts))) in barriers.iter().zip(&picks.experts).enumerate() {
        assert_eq!((barrier.barrier, barrier.step, barrier.layer), (number as u64, step, layer));
        let own: Vec<&ReadEvent> = reads.iter().filter(|r| r.barrier == Some(barrier.barrier)).collect();
        assert_eq!(own.iter().map(|r| r.expert).collect::<BTreeSet<_>>(), *experts, "what was picked was read");
        assert_eq!((own.len(), barrier.width as usize), (experts.len(), experts.len()), "each once");
        assert_eq!(barrier.bytes, experts.len() as u64 * plan.expert_bytes);
        assert_eq!((barrier.hits, barrier.prefetch_hits), (0, 0));
        assert!(barrier.open_ns <= barrier.first_ns && barrier.first_ns <= barrier.last_ns);
        assert!(barrier.last_ns <= barrier.close_ns && barrier.stall_ns <= barrier.close_ns - barrier.open_ns);
        let done = |r: &&&ReadEvent| r.completed_ns;
        let (first, last) = (own.iter().min_by_key(done).unwrap(), own.iter().max_by_key(done).unwrap());
        assert_eq!((barrier.first_ns, barrier.last_ns), (first.completed_ns, last.completed_ns));
        let at_last = own.iter().filter(|r| r.completed_ns == barrier.last_ns);
        assert!(at_last.map(|r| Some(r.drive)).any(|d| d == barrier.straggler));
    }
    assert_eq!(reads.len() as u64, counters.drives.iter().map(|d| d.reads).sum::<u64>());
    for r in reads {
        let manifest = &manifests[r.drive.index()];
        let entry = manifest.find(r.layer, r.expert).unwrap();
        assert_eq!(r.offset, manifest.locate(r.layer, entry).1.offset, "where drive.json has it");
        assert_eq!(plan.homes(r.layer, r.expert).unwrap()[usize::from(r.replica)], r.drive);
        let align = counters.drives[r.drive.index()].direct.map_or(1, |d| u64::from(d.offset_bytes));
        assert_eq!(r.bytes, plan.expert_bytes.next_multiple_of(align));
        assert_eq!((r.part, r.parts, r.purpose), (0, 1, Purpose::Demand));
        assert_eq!((r.result, r.outcome), (ReadResult::Ok, Outcome::Demand));
        let barrier = &barriers[r.barrier.unwrap() as usize];
        assert!(barrier.open_ns <= r.queued_ns && r.queued_ns <= r.submitted_ns && r.submitted_ns <= r.completed_ns);
    }
    for (id, drive) in counters.drives.iter().enumerate() {
        let own = reads.iter().filter(|r| r.drive.index() == id);
        assert_eq!(own.clone().map(|r| r.bytes).sum::<u64>(), drive.read_bytes);
        assert_eq!(own.count() as u64 * plan.expert_bytes, drive.payload_bytes);
        let last = barriers.iter().filter(|b| b.straggler == Some(DriveId(id as u8))).count();
        assert_eq!(last as u64, drive.landed_last);
        assert!(drive.reads > 0, "every drive took part");
    }
}

/// A prompt longer than any block of working memory, over a buffer of a few slots: one pass reads every (layer, expert) that
/// it routes to once, in the order of the files; cut into passes it gives the same bits and reads experts again.
#[test]
fn a_prompt_in_one_pass_reads_each_expert_once() {
    let model = Model::load(tiny_store(), None).unwrap();
    let drives = Drives::new(2, None);
    let plan = staged(&model, &drives.specs, &Policy::RoundRobin {});
    let vocab = model.decoder.config().vocab_size as u32;
    let text = (0..).map(|i: u32| (i * i % 8191 * 31 + i / 7) % vocab).filter(|&id| !model.tokenizer.is_control(id));
    let prompt: Vec<u32> = text.take(600).collect();
    let run_with = |rows: usize, trace: Option<PathBuf>| {
        let mut asked = Asked::default();
        (asked.config.max_new, asked.config.model.prefill_rows, asked.config.trace) = (4, rows, trace);
        asked.config.reader.buffer_bytes = 5 * plan.expert_bytes.next_multiple_of(4096) + 4096;
        (asked.config.monitor, asked.config.reader.queue_depth) = (false, 1);
        let spec = RunSpec {
            arm: "prompt",
            asked: &asked,
            under_test: &BTreeSet::new(),
            streamed: Some((&plan, &drives.specs)),
            prompts: std::slice::from_ref(&prompt),
            control: None,
        };
        run(&model, &spec, &mut |_| std::ops::ControlFlow::Continue(())).unwrap()
    };
    let trace = drives.dir.path().join("trace");
    let whole = run_with(600, Some(trace.clone()));
    let prefill = whole.record.prefill.unwrap();
    assert_eq!(objections(&whole.record.settings), Vec::<String>::new());
    assert_eq!((prefill.experts, prefill.amplification), (prefill.distinct, Some(1.0)));
    assert_eq!((prefill.payload_bytes, prefill.wasted_bytes), (prefill.distinct * plan.expert_bytes, 0));
    let mut reads: BTreeMap<(LayerId, ExpertId), usize> = BTreeMap::new();
    let mut last: BTreeMap<(LayerId, DriveId), u64> = BTreeMap::new();
    let mut rows = argodrive::trace::log::read_reads(&trace).unwrap();
    rows.sort_by_key(|r| r.submitted_ns);
    for r in rows.iter().filter(|r| r.step == 0) {
        *reads.entry((r.layer, r.expert)).or_default() += 1;
        let before = last.insert((r.layer, r.drive), r.offset);
        assert!(before.is_none_or(|b| b < r.offset), "reads of a drive go up its file");
    }
    assert!(reads.values().all(|&n| n == 1) && reads.len() as u64 == prefill.distinct);

    let cut = run_with(150, None);
    let pieces = cut.record.prefill.unwrap();
    assert_eq!(cut.generation.token_ids, whole.generation.token_ids);
    assert_eq!(pieces.distinct, prefill.distinct);
    assert_eq!(pieces.payload_bytes, pieces.experts * plan.expert_bytes);
    assert!(pieces.amplification.unwrap() > 2.0, "{pieces:?}");
}

/// Layouts, drive counts and dispatch policies in full; depths 1 and 8 meet the large and the small buffer in turn.
#[test]
fn tokens_and_logits_do_not_depend_on_drives_layout_dispatch_depth_or_buffer() {
    let model = Model::load(tiny_store(), None).unwrap();
    let text = std::fs::read(prepared::repo("tests/fixtures/oracle/tiny/golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let (prompt, greedy) = (prepared::ids(&golden["prompt_ids"]), prepared::ids(&golden["greedy_ids"]));
    let clock = Clock::start();
    let count = greedy.len();
    let mut memory = model.resident().unwrap();
    let reference = decode(&mut session(&model, clock), &mut memory, &prompt, count, &mut Picks::default());
    assert_eq!(reference.0, greedy);
    let (mut runs, mut deviated) = (0, 0);
    for policy in [Policy::RoundRobin {}, Policy::FullMirror {}] {
        for drives in 1..=4 {
            let place = Drives::new(drives, None);
            let plan = staged(&model, &place.specs, &policy);
            for dispatch in [DispatchPolicy::FirstHit, DispatchPolicy::RoundRobin, DispatchPolicy::LeastInflight] {
                // the small buffer holds three experts: a barrier of a prompt comes in waves
                let (wide, small) = if drives % 2 == 0 { (1, 8) } else { (8, 1) };
                for (queue_depth, buffer_bytes) in [(wide, 1 << 20), (small, 3 * 16384)] {
                    let options = ReaderOptions { dispatch, queue_depth, buffer_bytes, ..ReaderOptions::default() };
                    let mut reader = model.reader(&plan, &place.specs, &options, clock).unwrap();
                    let got = decode(&mut session(&model, clock), &mut reader, &prompt, count, &mut Picks::default());
                    let what = format!("{} {drives} {dispatch:?} {queue_depth} {buffer_bytes}", policy.name());
                    assert!(got == reference, "{what}");
                    let seen = reader.handle().counters();
                    assert_eq!(seen.waves > seen.barriers, buffer_bytes < 1 << 20, "{what}: {}", seen.waves);
                    assert!(seen.drives.iter().all(|d| d.reads > 0) || dispatch == DispatchPolicy::LeastInflight);
                    let replicas = seen.drives.iter().map(|d| d.non_primary_reads).sum::<u64>();
                    let may = policy == Policy::FullMirror {} && dispatch != DispatchPolicy::FirstHit && drives > 1;
                    assert!(may || replicas == 0, "{what}: {replicas} replica reads");
                    deviated += u64::from(replicas > 0);
                    runs += 1;
                }
            }
        }
    }
    assert_eq!(runs, 2 * 4 * 3 * 2);
    assert_eq!(deviated, 3 * 2 * 2, "a mirror with a policy that chooses does read replicas");
}

/// The bytes on the drive are the ones that are computed with: nothing else stands in for them.
#[test]
fn a_damaged_replica_changes_the_logits_and_is_named_when_digests_are_checked() {
    let model = Model::load(tiny_store(), None).unwrap();
    let place = Drives::new(2, None);
    let plan = staged(&model, &place.specs, &Policy::RoundRobin {});
    let clock = Clock::start();
    let prompt = [70, 287, 94, 138];
    let mut picks = Picks::default();
    let sound = decode(&mut session(&model, clock), &mut model.resident().unwrap(), &prompt, 1, &mut picks);
    let (&(_, layer), experts) = picks.experts.first_key_value().unwrap();
    let &expert = experts.first().unwrap();
    let home = plan.homes(layer, expert).unwrap()[0];
    let folder = place.model_folder(home.index());
    let manifest = DriveManifest::open(&folder).unwrap();
    let (name, extent) = manifest.locate(layer, manifest.find(layer, expert).unwrap());
    // a few packed weights of the first plane
    (0..64).for_each(|i| prepared::damage(&folder.join(&name), extent.offset + i));

    let mut reader = model.reader(&plan, &place.specs, &ReaderOptions::default(), clock).unwrap();
    let other = decode(&mut session(&model, clock), &mut reader, &prompt, 1, &mut Picks::default());
    assert!(other.1 != sound.1, "the decoder did not use the drive's bytes");

    let options = ReaderOptions { verify_digests: true, ..ReaderOptions::default() };
    let mut reader = model.reader(&plan, &place.specs, &options, clock).unwrap();
    let mut session = session(&model, clock);
    let error = session.forward(&prompt, Phase::Prefill, &mut reader, Logits::Last, None).unwrap_err().to_string();
    let at = format!("offset {}", extent.offset);
    prepared::has(&error, &[&place.specs[home.index()].name, &name, &at, "digest", "stage --repair"]);
}

#[test]
fn two_readers_of_one_plan_do_not_disturb_each_other() {
    let place = Drives::new(2, None);
    let model = Model::load(tiny_store(), None).unwrap();
    let plan = staged(&model, &place.specs, &Policy::FullMirror {});
    let clock = Clock::start();
    let prompt = [70, 287, 94, 138];
    let reference =
        decode(&mut session(&model, clock), &mut model.resident().unwrap(), &prompt, 8, &mut Picks::default());
    std::thread::scope(|scope| {
        let one = || {
            let mut reader = model.reader(&plan, &place.specs, &ReaderOptions::default(), clock).unwrap();
            decode(&mut session(&model, clock), &mut reader, &prompt, 8, &mut Picks::default())
        };
        let (a, b) = (scope.spawn(one), scope.spawn(one));
        assert!(a.join().unwrap() == reference && b.join().unwrap() == reference);
    });
}
