//! Striped experts from the plan to the tokens: each drive holds, delivers and answers for its own blocks; and plans over more
//! drives than bounds are exact for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::bound::DriveRate;
use argodrive::clock::Clock;
use argodrive::drive::spec::{self, DriveSpec};
use argodrive::ids::{DriveId, LayerId};
use argodrive::layout::plan::{Plan, PlanDrive};
use argodrive::layout::planner;
use argodrive::layout::policy::Policy;
use argodrive::open::Model;
use argodrive::reader::{DispatchPolicy, ReaderCounters, ReaderOptions};
use argodrive::replay::rates::{Bounds, Homes, NamedRate};
use argodrive::source::{ExpertSource, Phase};
use argodrive::stage::{StageOptions, stage};
use argodrive::store::manifest::DriveManifest;
use argodrive::trace::events::{BarrierRecord, ReadEvent, ReadResult};
use argodrive::trace::log::{read_barriers, read_header, read_reads};
use prepared::{Drives, argodrive, has, json_of, outcome, refused, tiny_store};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const EXPERT_BYTES: u64 = 9792;

/// Any number of drives in one folder.
fn many(count: usize) -> Drives {
    let mut drives = Drives::new(1, None);
    let spec = |i: usize| DriveSpec {
        name: format!("d{i}"),
        path: drives.dir.path().join(format!("d{i}")),
        emulate: None,
        faults: Vec::new(),
    };
    drives.specs = (0..count).map(spec).collect();
    drives.specs.iter().for_each(|d| fs::create_dir(&d.path).unwrap());
    fs::write(&drives.toml, spec::render(&drives.specs)).unwrap();
    drives
}

fn plan_of(model: &Model, specs: &[DriveSpec], policy: &Policy) -> Plan {
    let named: Vec<PlanDrive> =
        specs.iter().map(|d| PlanDrive { name: d.name.clone(), path: d.path.clone() }).collect();
    planner::plan(&model.catalog(), &named, policy, 0, BTreeMap::new()).unwrap()
}

fn staged(model: &Model, specs: &[DriveSpec], policy: &Policy) -> Plan {
    let plan = plan_of(model, specs, policy);
    let paths: Vec<PathBuf> = specs.iter().map(|d| d.path.clone()).collect();
    stage(&plan, &model.folder, &paths, StageOptions::default(), &mut |_| {}).unwrap();
    plan
}

fn golden() -> (Vec<u32>, Vec<u32>) {
    let text = fs::read(prepared::repo("tests/fixtures/oracle/tiny/golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    (prepared::ids(&golden["prompt_ids"]), prepared::ids(&golden["greedy_ids"]))
}

fn greedy(model: &Model, source: &mut dyn ExpertSource, prompt: &[u32], count: usize) -> Vec<u32> {
    use argodrive::decode::Logits;
    let mut session = model.session(128, 64, argodrive::reader::PrefetchPolicy::None, Clock::start()).unwrap();
    let (mut out, mut feed) = (Vec::new(), prompt.to_vec());
    for step in 0..count {
        let phase = if step == 0 { Phase::Prefill } else { Phase::Decode };
        let logits = session.forward(&feed, phase, source, Logits::Last, None).unwrap();
        let best = logits.iter().enumerate().fold(0, |b, (i, v)| if *v > logits[b] { i } else { b }) as u32;
        out.push(best);
        feed = vec![best];
    }
    out
}

/// Bytes that each drive has of the experts that were read, block by block.
fn bytes_by_drive(plan: &Plan, unit: u64, experts: impl Iterator<Item = (LayerId, u16)>) -> Vec<u64> {
    let mut out = vec![0u64; plan.drives.len()];
    for (layer, expert) in experts {
        let homes = plan.homes(layer, argodrive::ids::ExpertId(expert)).unwrap();
        for (number, from) in (0..EXPERT_BYTES).step_by(unit as usize).enumerate() {
            out[homes[number % homes.len()].index()] += unit.min(EXPERT_BYTES - from);
        }
    }
    out
}

fn payload(seen: &ReaderCounters) -> Vec<u64> {
    seen.drives.iter().map(|d| d.payload_bytes).collect()
}

#[test]
fn tokens_are_the_same_on_one_to_four_drives_whatever_the_block_and_bytes_by_drive_are_the_plans() {
    let model = Model::load(tiny_store(), None).unwrap();
    let (prompt, expected) = golden();
    // 9792 bytes: one block for each drive; three blocks, the last one ragged; one block, which is the whole expert
    for (unit_bytes, drives) in
        [(None, 1), (None, 2), (None, 3), (None, 4), (Some(4096), 2), (Some(4096), 4), (Some(12288), 3)]
    {
        let place = many(drives);
        let plan = staged(&model, &place.specs, &Policy::Stripe { unit_bytes });
        let unit = unit_bytes.unwrap_or(EXPERT_BYTES.div_ceil(drives as u64).next_multiple_of(4096));
        for (queue_depth, buffer_bytes, dispatch) in
            [(1, 1 << 20, DispatchPolicy::Split), (8, 4 * 16384, DispatchPolicy::FirstHit)]
        {
            let options = ReaderOptions {
                queue_depth,
                buffer_bytes,
                dispatch,
                verify_digests: true,
                trace_reads: 1 << 16,
                trace_barriers: 1 << 12,
                ..ReaderOptions::default()
            };
            let mut reader = model.reader(&plan, &place.specs, &options, Clock::start()).unwrap();
            let what = format!("unit {unit_bytes:?} on {drives} drives at depth {queue_depth}");
            assert_eq!(greedy(&model, &mut reader, &prompt, expected.len()), expected, "{what}");
            let handle = reader.handle();
            drop(reader);
            let (seen, trace) = (handle.counters(), handle.take_trace().unwrap());
            // every block of an expert is read for a barrier: its first block counts it once
            let read = trace.reads().iter().filter(|r| r.part == 0).map(|r| (r.layer, r.expert.0));
            assert_eq!(payload(&seen), bytes_by_drive(&plan, unit, read.clone()), "{what}");
            assert_eq!(seen.experts_striped, read.count() as u64, "{what}");
            assert_eq!(seen.drives.iter().map(|d| d.stripe_bytes).collect::<Vec<_>>(), payload(&seen), "{what}");
            assert!(seen.drives.iter().all(|d| d.payload_bytes > 0), "{what}: {:?}", payload(&seen));
            assert_eq!((seen.experts_split, seen.decisions_with_choice, seen.failovers), (0, 0, 0));
            assert!(trace.reads().iter().all(|r| (r.replica, r.result) == (0, ReadResult::Ok)));
            let blocks = EXPERT_BYTES.div_ceil(unit);
            assert!(trace.reads().iter().all(|r| u64::from(r.parts) == if drives == 1 { 1 } else { blocks }), "{what}");
            assert_eq!(trace.barriers().iter().map(|b| b.bytes).sum::<u64>(), payload(&seen).iter().sum::<u64>());
        }
    }
}

/// A policy file for blocks of 4 KiB: three to an expert.
fn small_units(drives: &Drives) -> PathBuf {
    let path = drives.dir.path().join("units.toml");
    fs::write(&path, "policy = \"stripe\"\nunit = \"4KiB\"\n").unwrap();
    path
}

fn planned(drives: &Drives, policy: &Path) -> PathBuf {
    let out = drives.dir.path().join("stripe.plan.json");
    let mut command = argodrive(["plan", "--store"]);
    command.arg(tiny_store()).arg("--drives").arg(&drives.toml).arg("--policy").arg(policy);
    command.arg("--out").arg(&out).assert().success();
    out
}

fn decode(plan: &Path, more: &[&str]) -> assert_cmd::Command {
    let mut command = argodrive(["decode", "--max-new", "4", "--prompt", "abc", "--store"]);
    command.arg(tiny_store()).arg("--plan").arg(plan).args(more);
    command
}

fn column(report: &Value, key: &str) -> Vec<u64> {
    report["drives"].as_array().unwrap().iter().map(|d| d[key].as_u64().unwrap()).collect()
}

#[test]
fn staged_parts_are_verified_named_when_wrong_mended_and_proved_when_read() {
    let drives = Drives::new(2, None);
    let plan = planned(&drives, &small_units(&drives));
    let report = json_of(argodrive(["stage", "--json"]).arg(&plan));
    assert_eq!((column(&report, "planned"), column(&report, "copied")), (vec![192, 192], vec![192, 192]));
    // two blocks of three, of which one is ragged, on either drive in turn
    assert_eq!(column(&report, "copied_bytes").iter().sum::<u64>(), 192 * EXPERT_BYTES);
    assert_eq!(json_of(argodrive(["stage", "--json"]).arg(&plan))["drives"][1]["copied"].as_u64(), Some(0));
    let (code, text, _) = outcome(argodrive(["verify"]).arg(&plan));
    assert_eq!(code, 0, "{text}");
    has(&text, &["amber: 192 checked", "0 wrong, 0 missing"]);
    let some = json_of(argodrive(["verify", "--json", "--sample", "5%", "--seed", "3"]).arg(&plan));
    assert_eq!((column(&some, "checked"), column(&some, "there")), (vec![10, 10], vec![192, 192]));
    let (_, text, _) = outcome(argodrive(["verify", "--sample", "48"]).arg(&plan));
    has(&text, &["blue: 48 checked of 192 (25", "seed 0"]);

    let whole =
        json_of(argodrive(["decode", "--json", "--max-new", "4", "--prompt", "abc", "--store"]).arg(tiny_store()));
    let run = json_of(&mut decode(&plan, &["--json", "--verify-reads"]));
    assert_eq!(run["token_ids"], whole["token_ids"]);
    let setting = |name: &str| run["settings"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap().clone();
    assert_eq!(setting("layout")["verdict"], "proved", "{}", setting("layout"));
    assert_eq!(setting("verify_digests")["verdict"], "proved", "{}", setting("verify_digests"));
    assert_eq!(setting("replicas")["verdict"], "proved", "{}", setting("replicas"));
    assert_eq!(setting("dispatch")["verdict"], "unverified", "nothing to choose");
    refused(&mut decode(&plan, &["--prefetch", "same-as-last"]), &["--prefetch none", "stripes"]);

    // one wrong byte in one part
    let folder = drives.model_folder(1);
    let manifest = DriveManifest::open(&folder).unwrap();
    let pieces: Vec<_> = manifest.pieces().filter(|p| p.key.layer == LayerId(1)).collect();
    for piece in &pieces {
        let (name, extent) = manifest.locate_piece(piece);
        prepared::damage(&folder.join(name), extent.offset + 7);
    }
    let (name, extent) = manifest.locate_piece(&pieces[5]);
    let (code, text, _) = outcome(argodrive(["verify"]).arg(&plan));
    assert_eq!(code, 1);
    let at = format!("expert {}, slot {}, offset {}", pieces[5].key, pieces[5].slot, extent.offset);
    has(&text, &["24 wrong", &format!("blue: {}", folder.join(&name).display()), &at, "--repair"]);
    let text = refused(
        &mut decode(&plan, &["--verify-reads"]),
        &["layer 1 is striped", "drive `blue`", &name, "slot ", "--repair"],
    );
    assert!(!text.contains("/amber/"), "only the drive at fault: {text}");
    let mended = json_of(argodrive(["stage", "--repair", "--json"]).arg(&plan));
    assert_eq!((column(&mended, "copied"), column(&mended, "spoiled")), (vec![0, 24], vec![0, 24]));
    json_of(&mut decode(&plan, &["--json", "--verify-reads"]));

    // a file that ends too early, then none at all
    let cut = folder.join(&name);
    fs::File::options().write(true).open(&cut).unwrap().set_len(4096).unwrap();
    let words = ["drive `blue`", &name, "the file ends", "striped", "stage --repair"];
    refused(&mut decode(&plan, &[]), &words);
    fs::remove_file(&cut).unwrap();
    refused(&mut decode(&plan, &[]), &["blue", &name, "argodrive stage"]);
    fs::remove_file(folder.join("drive.json")).unwrap();
    refused(&mut decode(&plan, &[]), &["blue", "drive.json", "argodrive stage"]);
    json_of(argodrive(["stage", "--json"]).arg(&plan));
    assert_eq!(json_of(&mut decode(&plan, &["--json"]))["token_ids"], whole["token_ids"]);
}

#[test]
fn prune_and_rollback_know_parts_and_all_columns_together_are_a_copy() {
    let drives = Drives::new(2, None);
    let store = drives.dir.path().join("store");
    let tiny = prepared::repo("tests/fixtures/oracle/tiny");
    argodrive(["import"]).arg(tiny).arg("--store").arg(&store).assert().success();
    let mirror = drives.staged(&store, "full-mirror");
    let stripe = drives.staged(&store, "stripe");
    let held = |index: usize| {
        let manifest = DriveManifest::open(&drives.model_folder(index)).unwrap();
        (manifest.pieces().filter(|p| p.key.part.is_none()).count(), manifest.pieces().count(), manifest.version)
    };
    assert_eq!([held(0), held(1)], [(192, 384, 2); 2], "one folder serves both plans");
    let done = json_of(argodrive(["stage", "--rollback", "--json"]).arg(&stripe));
    assert_eq!((column(&done, "removed"), held(0)), (vec![192, 192], (192, 192, 1)));
    json_of(argodrive(["stage", "--json"]).arg(&stripe));
    // without the store the stripe is the only other copy, and that is enough
    fs::rename(&store, drives.dir.path().join("elsewhere")).unwrap();
    let keep = |plan: &Path| json_of(argodrive(["prune", "--json", "--keep"]).arg(plan));
    let done = keep(&stripe);
    assert_eq!((column(&done, "removed"), column(&done, "last_copies")), (vec![192, 192], vec![0, 0]));
    assert_eq!([held(0), held(1)], [(0, 192, 2); 2]);
    // and a plan that wants none of it gets the parts spared, all of them
    let done = keep(&mirror);
    assert_eq!((column(&done, "removed"), column(&done, "last_copies")), (vec![0, 0], vec![192, 192]));
}

#[test]
fn traces_of_stripes_have_right_bounds_and_barriers_are_read_again_under_either_layout() {
    let drives = Drives::new(3, None);
    let stripe = planned(&drives, &small_units(&drives));
    json_of(argodrive(["stage", "--json"]).arg(&stripe));
    let mirror = drives.staged(tiny_store(), "full-mirror");
    let trace = drives.dir.path().join("trace");
    decode(&stripe, &["--trace"]).arg(&trace).assert().success();
    let plan = Plan::parse(&fs::read_to_string(&stripe).unwrap()).unwrap();
    let (header, reads, barriers): (_, Vec<ReadEvent>, Vec<BarrierRecord>) =
        (read_header(&trace).unwrap(), read_reads(&trace).unwrap(), read_barriers(&trace).unwrap());
    let rates = [100e6, 50e6, 25e6];
    let named = drives.specs.iter().zip(rates);
    let named: Vec<NamedRate> = named
        .map(|(d, bytes_per_s)| NamedRate { name: d.name.clone(), rate: DriveRate { bytes_per_s, fixed_ns: 1000 } })
        .collect();
    let mut bounds = Bounds::new(&header.drives, &named, Homes::of_plan(&plan, &header.drives).unwrap()).unwrap();
    for barrier in &barriers {
        let own: Vec<ReadEvent> = reads.iter().filter(|r| r.barrier == Some(barrier.barrier)).copied().collect();
        let end = |d: usize| {
            let bytes: u64 = own.iter().filter(|r| r.drive.index() == d).map(|r| r.bytes).sum();
            if bytes == 0 { 0.0 } else { 1000.0 + bytes as f64 / rates[d] * 1e9 }
        };
        let worst = (0..3).map(end).fold(0.0, f64::max);
        let bound = bounds.of(barrier, &own).unwrap();
        assert!((bound.layout_ns.unwrap() as f64 - worst).abs() <= 1.0, "each drive has its own bytes to deliver");
        assert!(bound.drives_ns <= bound.layout_ns.unwrap());
    }
    let sum = |of: &Value| of["reissued_bytes"].as_u64().unwrap();
    let again = |plan: &Path| {
        let (code, text, message) =
            outcome(argodrive(["trace", "reissue", "--gaps", "none", "--json"]).arg(&trace).arg("--plan").arg(plan));
        assert!(code < 2, "{message}");
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let bytes = barriers.iter().map(|b| b.bytes).sum::<u64>();
    for plan in [&stripe, &mirror] {
        let seen = again(plan);
        assert_eq!((seen["barriers"].as_u64().unwrap(), sum(&seen)), (barriers.len() as u64, bytes));
        let layout = seen["settings"].as_array().unwrap().iter().find(|s| s["name"] == "layout").unwrap();
        assert_eq!(layout["verdict"], "proved", "{layout}");
    }
}

#[test]
fn a_block_that_makes_too_many_reads_and_a_plan_of_another_model_are_refused() {
    let drives = Drives::new(2, None);
    let policy = small_units(&drives);
    let plan = planned(&drives, &policy);
    let text = fs::read_to_string(&plan).unwrap();
    let broken = drives.dir.path().join("broken.json");
    let write = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        fs::write(&broken, prepared::unchecked(&text.replacen(from, to, 1))).unwrap();
    };
    write("\"unit_bytes\":4096", "\"unit_bytes\":5000");
    refused(argodrive(["stage"]).arg(&broken), &["broken.json", "5000", "4096"]);
    let id = Plan::parse(&text).unwrap().model_id;
    write(&id, "0123456789abcdef0123456789abcdef");
    refused(argodrive(["stage"]).arg(&broken), &["the plan is for model 0123456789abcdef", &id, "plan again"]);
    refused(argodrive(["stage", "--rollback"]).arg(&broken), &["the plan is for model 0123456789abcdef", "plan again"]);
    refused(argodrive(["prune", "--keep"]).arg(&plan).arg(&broken), &["different models", "one model at a time"]);
    // a drive inside another, given at stage time
    let inner = drives.specs[0].path.join("inner");
    fs::create_dir(&inner).unwrap();
    let mut specs = drives.specs.clone();
    specs[1].path = inner;
    let nested = drives.dir.path().join("nested.toml");
    fs::write(&nested, spec::render(&specs)).unwrap();
    refused(
        argodrive(["stage"]).arg(&plan).arg("--drives").arg(&nested),
        &["drive blue lies inside drive amber", "drives.toml"],
    );
    // two experts in one slot
    json_of(argodrive(["stage", "--json"]).arg(&plan));
    let manifest = drives.model_folder(0).join("drive.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let wrong = text.replacen("\"slot\":1,", "\"slot\":0,", 1);
    fs::write(&manifest, &wrong).unwrap();
    refused(argodrive(["stage"]).arg(&plan), &["drive.json", "damaged, or changed by hand"]);
    fs::write(&manifest, prepared::unchecked(&wrong)).unwrap();
    refused(argodrive(["stage"]).arg(&plan), &["drive.json", "slot 0 is given to two experts"]);
    // a policy that names drives nobody has, or gives one too little room
    let file = drives.dir.path().join("p.toml");
    let plan_again = |policy: &str, words: &[&str]| {
        fs::write(&file, policy).unwrap();
        let mut command = argodrive(["plan", "--out", "/dev/null", "--store"]);
        command.arg(tiny_store()).arg("--drives").arg(&drives.toml).arg("--policy").arg(&file);
        refused(&mut command, words);
    };
    plan_again("policy = \"single\"\non = \"zinc\"", &["drive `zinc`", "amber, blue", "change the policy"]);
    plan_again("policy = \"stripe\"\n[[drive]]\nname = \"zinc\"\nrate = \"1MB/s\"", &["zinc", "amber, blue"]);
    let tight = "policy = \"stripe\"\n[[drive]]\nname = \"blue\"\ncapacity = \"100kB\"";
    plan_again(tight, &["drive `blue`", "it may hold 100000", "free space"]);
}

#[test]
fn more_drives_than_bounds_are_exact_for_still_work_and_barrier_planning_says_why_not() {
    let model = Model::load(tiny_store(), None).unwrap();
    let (prompt, expected) = golden();
    let place = many(9);
    for policy in [Policy::FullMirror {}, Policy::Stripe { unit_bytes: None }] {
        let plan = staged(&model, &place.specs, &policy);
        let options = ReaderOptions { trace_reads: 1 << 16, trace_barriers: 1 << 12, ..ReaderOptions::default() };
        let mut reader = model.reader(&plan, &place.specs, &options, Clock::start()).unwrap();
        assert_eq!(greedy(&model, &mut reader, &prompt, expected.len()), expected, "{}", policy.name());
        let handle = reader.handle();
        drop(reader);
        let (seen, trace) = (handle.counters(), handle.take_trace().unwrap());
        assert!(seen.drives.iter().filter(|d| d.reads > 0).count() > 8, "{}", policy.name());
        let named: Vec<NamedRate> = (place.specs.iter())
            .map(|d| NamedRate { name: d.name.clone(), rate: DriveRate { bytes_per_s: 1e8, fixed_ns: 0 } })
            .collect();
        let mut bounds = Bounds::new(handle.drives(), &named, Homes::of_plan(&plan, handle.drives()).unwrap()).unwrap();
        let first = trace.barriers()[0];
        let own: Vec<ReadEvent> = trace.reads().iter().filter(|r| r.barrier == Some(first.barrier)).copied().collect();
        let bound = bounds.of(&first, &own).unwrap();
        assert_eq!(bound.layout_ns, None, "nobody claims an exact bound");
        assert!(bound.drives_ns > 0);
        assert!(plan.on_drive(DriveId(8)).next().is_some());
    }
    let heat = place.dir.path().join("heat.json");
    let mut count = argodrive(["heat", "--store"]);
    let text = place.dir.path().join("a.txt");
    fs::write(&text, "the sea was calm and the ship was small").unwrap();
    count.arg(tiny_store()).arg("--prompt-file").arg(&text).arg("--out").arg(&heat).assert().success();
    let mut command = argodrive(["plan", "--out", "/dev/null", "--store"]);
    command
        .arg(tiny_store())
        .arg("--drives")
        .arg(&place.toml)
        .arg("--heat")
        .arg(&heat)
        .arg("--policy")
        .arg(prepared::policy("barrier"));
    refused(&mut command, &["9 drives", "exact up to 8", "lpt"]);
}

#[test]
fn staging_beside_a_decode_changes_none_of_its_bytes() {
    let model = Model::load(tiny_store(), None).unwrap();
    let (prompt, expected) = golden();
    let place = many(2);
    let plan = staged(&model, &place.specs, &Policy::RoundRobin {});
    let options = ReaderOptions { verify_digests: true, ..ReaderOptions::default() };
    let mut reader = model.reader(&plan, &place.specs, &options, Clock::start()).unwrap();
    std::thread::scope(|scope| {
        let staging = scope.spawn(|| {
            staged(&model, &place.specs, &Policy::FullMirror {});
            staged(&model, &place.specs, &Policy::Stripe { unit_bytes: Some(4096) });
        });
        let mut rounds = 0;
        while rounds == 0 || !staging.is_finished() {
            assert_eq!(greedy(&model, &mut reader, &prompt, expected.len()), expected);
            rounds += 1;
        }
        staging.join().unwrap();
    });
    assert_eq!(greedy(&model, &mut reader, &prompt, expected.len()), expected, "after it, too");
}
