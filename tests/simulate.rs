//! `argodrive simulate` with the real binary: what it predicts from a trace, what it compares, what one more drive would bring,
//! and what it refuses. Asserts identities and simulated time, never a speed of this machine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::spec::Emulation;
use argodrive::ids::{DriveId, ExpertId};
use argodrive::io::paced::PaceModel;
use argodrive::layout::plan::Plan;
use argodrive::source::Phase;
use argodrive::trace::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use argodrive::trace::log::{self, TraceBuffer, TraceCapacity, TraceDrive, TraceHeader};
use assert_cmd::Command;
use prepared::{Drives, argodrive, has, json_of, outcome, refused, tiny_store};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A trace of the tiny model decoding from one drive, as `decode --trace` writes it, and that drive's plan.
fn recorded() -> &'static (Drives, PathBuf, PathBuf) {
    static CELL: OnceLock<(Drives, PathBuf, PathBuf)> = OnceLock::new();
    CELL.get_or_init(|| {
        let drives = Drives::new(1, None);
        let plan = drives.staged(tiny_store(), "single");
        let trace = drives.dir.path().join("trace");
        let mut decode = argodrive(["decode", "--max-new", "9", "--prompt", "abc", "--store"]);
        decode.arg(tiny_store()).arg("--plan").arg(&plan).arg("--trace").arg(&trace).assert().success();
        (drives, plan, trace)
    })
}

/// Rates of drives that do not exist, in a file.
fn rates(dir: &Path, names: &[&str], rate: &str, fixed: &str) -> PathBuf {
    let path = dir.join(format!("rates-{}.toml", rate.replace('/', "-")));
    let row = |n: &&str| format!("[[drive]]\nname = \"{n}\"\nrate = \"{rate}\"\nfixed = \"{fixed}\"\n");
    fs::write(&path, names.iter().map(row).collect::<String>()).unwrap();
    path
}

fn simulate(trace: &Path, plan: &Path, more: &[&str]) -> Command {
    let mut command = argodrive(["simulate"]);
    command.arg(trace).arg("--plan").arg(plan).args(more);
    command
}

fn number(value: &Value, path: &str) -> f64 {
    value.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} is not in {value}"))
}

fn plan_of(path: &Path) -> Plan {
    Plan::parse(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A trace of drives that do exactly what their pace says, worked out in virtual time: one pass a barrier, whole reads of
/// all `sets` handed over at once, each from the first home. 1 ms of compute for each expert, 2 ms between barriers.
fn paced_trace(folder: &Path, plan: &Plan, paces: &[Emulation], sets: &[Vec<u16>]) {
    let layer = *plan.layers.keys().next().unwrap();
    let models: Vec<PaceModel> =
        plan.drives.iter().zip(paces).map(|(d, pace)| PaceModel::new(&d.name, *pace)).collect();
    let mut buffer = TraceBuffer::with_capacity(TraceCapacity { reads: 9999, barriers: 999 });
    let bytes = plan.expert_bytes.next_multiple_of(512);
    let (mut now, mut first_open, mut last_close) = (1_000_000, None, 0);
    for (at, set) in sets.iter().enumerate() {
        let step = at as u64;
        let open_ns = now;
        first_open.get_or_insert(open_ns);
        let mut free = vec![0; paces.len()];
        let mut ends = Vec::new();
        for &expert in set {
            let drive = plan.homes(layer, ExpertId(expert)).unwrap()[0];
            let service = models[drive.index()].serve(free[drive.index()], open_ns, bytes, 1.0);
            free[drive.index()] = service.free_ns;
            ends.push((service.done_ns, drive));
            buffer.push_read(ReadEvent {
                step,
                layer,
                expert: ExpertId(expert),
                drive,
                replica: 0,
                part: 0,
                parts: 1,
                offset: 0,
                bytes,
                purpose: Purpose::Demand,
                issued_in: step,
                barrier: Some(step),
                queued_ns: open_ns,
                submitted_ns: open_ns,
                completed_ns: service.done_ns,
                result: ReadResult::Ok,
                outcome: Outcome::Demand,
            });
        }
        ends.sort_unstable();
        let (mut close, mut compute) = (open_ns, 0);
        for (end, _) in &ends {
            close = close.max(*end) + 1_000_000;
            compute += 1_000_000;
        }
        let &(last_ns, straggler) = ends.last().unwrap();
        buffer.push_barrier(BarrierRecord {
            barrier: step,
            step,
            phase: Phase::Decode,
            pos: step,
            rows: 1,
            layer,
            width: set.len() as u32,
            hits: 0,
            prefetch_hits: 0,
            bytes: plan.expert_bytes * set.len() as u64,
            open_ns,
            first_ns: ends[0].0,
            last_ns,
            close_ns: close,
            stall_ns: close - open_ns - compute,
            straggler: Some(straggler),
            gap_drive_ns: 0,
            gap_read_ns: 0,
            bound_layout_ns: None,
            bound_drives_ns: None,
            cause: Cause::None,
        });
        last_close = close;
        now = close + 2_000_000;
    }
    let drive = |(id, d): (usize, &argodrive::layout::plan::PlanDrive)| TraceDrive {
        id: DriveId(id as u8),
        name: d.name.clone(),
        path: d.path.clone(),
        emulated: true,
        device_number: 1,
    };
    let mut header = TraceHeader::new(plan.drives.iter().enumerate().map(drive).collect());
    header.model_id = Some(plan.model_id.clone());
    header.decode_wall_ns = Some(last_close - first_open.unwrap());
    log::write(folder, &header, &buffer).unwrap();
}

fn paces() -> [Emulation; 2] {
    let pace = |rate, latency_ns, per_read_ns| Emulation {
        rate_bytes_per_s: rate,
        latency_ns,
        per_read_ns,
        ..Emulation::default()
    };
    [pace(8_000_000, 300_000, 0), pace(5_000_000, 1_500_000, 0)]
}

/// Sets of every size from 1 to 4, over and over.
fn sets(count: usize) -> Vec<Vec<u16>> {
    (0..count)
        .map(|i| (0..1 + (i % 4) as u16).map(|e| (e * 3 + i as u16) % 8).collect::<std::collections::BTreeSet<_>>())
        .map(|s| s.into_iter().collect())
        .collect()
}

#[test]
fn a_decoded_trace_is_predicted_on_drives_that_do_not_exist() {
    let (_, plan, trace) = recorded();
    let dir = prepared::folder();
    let given = rates(dir.path(), &["amber"], "1MB/s", "2ms");
    let command = || {
        let mut command = simulate(trace, plan, &["--json", "--repeats", "3", "--seed", "5", "--profile"]);
        command.arg(&given);
        command
    };
    let seen = json_of(&mut command());
    assert_eq!(seen, json_of(&mut command()), "the same seed, the same figures");
    assert_eq!((&seen["rates_from"], &seen["emulated"]), (&json!("rates given by hand"), &json!(false)));
    let barriers = log::read_barriers(trace).unwrap();
    let decode = seen["simulated"]["phases"].as_array().unwrap().iter().find(|p| p["phase"] == "decode").unwrap();
    let decoded = barriers.iter().filter(|b| b.phase == Phase::Decode).count();
    assert_eq!((&decode["barriers"], decoded > 0), (&json!(decoded), true));
    // one drive: everything is read, each barrier by fixed + bytes / rate at least
    let payload: u64 = barriers.iter().map(|b| b.bytes).sum();
    assert_eq!(number(&seen, "/simulated/payload_bytes") as u64, payload);
    let read: u64 = log::read_reads(trace).unwrap().iter().map(|r| r.bytes).sum();
    assert_eq!(number(&seen, "/simulated/read_bytes") as u64, read);
    let mean = number(decode, "/mean_ns/0");
    assert!(mean >= number(decode, "/bound_layout_ns") - 1e6 && mean > 2e6, "{decode}");
    assert!(number(&seen, "/simulated/drives/0/lands_last_share") == 1.0);
    let low = number(&seen, "/simulated/tok_s/1");
    assert!(low <= number(&seen, "/simulated/tok_s/0") && low > 0.0);
    // faster drives, faster text
    let fast = rates(dir.path(), &["amber"], "100MB/s", "2ms");
    let faster = json_of(simulate(trace, plan, &["--json", "--profile"]).arg(&fast));
    assert!(number(&faster, "/simulated/tok_s/0") > number(&seen, "/simulated/tok_s/0"));
    // for people
    let (code, text, _) = outcome(simulate(trace, plan, &["--profile"]).arg(&given));
    assert_eq!(code, 0);
    has(&text, &["rates given by hand", "assumed:", "barriers of", "tok/s", "amber", "layout", "recorded"]);
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
}

#[test]
fn paced_drives_in_virtual_time_are_predicted_to_the_microsecond() {
    let drives = Drives::new(2, None);
    let path = drives.plan(tiny_store(), "round-robin");
    let plan = plan_of(&path);
    let trace = drives.dir.path().join("paced");
    paced_trace(&trace, &plan, &paces(), &sets(80));
    // nothing but the trace: rate and fixed cost are fitted to it
    let more = ["--dispatch", "first-hit", "--queue-depth", "16", "--json", "--compare"];
    let seen = json_of(simulate(&trace, &path, &more).arg(&trace));
    assert_eq!((&seen["rates_from"], &seen["emulated"]), (&json!("fit to the trace"), &json!(true)));
    for (drive, pace) in seen["drives"].as_array().unwrap().iter().zip(paces()) {
        let off = number(drive, "/bytes_per_s") / pace.rate_bytes_per_s as f64 - 1.0;
        assert!(off.abs() < 0.03 && drive["noise"] == "trace" && drive["emulated"] == true, "{drive}");
        assert!((number(drive, "/latency_ns") - pace.latency_ns as f64).abs() < 150_000.0, "{drive}");
    }
    let compare = &seen["compare"];
    for error in compare["errors"].as_array().unwrap() {
        for figure in ["/p50", "/mean", "/p95"] {
            assert!(number(error, figure).abs() < 0.02, "{error}");
        }
    }
    assert!(number(compare, "/tok_s_error").abs() < 0.01, "{compare}");
    for bytes in compare["drive_bytes_errors"].as_array().unwrap() {
        assert_eq!(bytes[1], json!(0.0));
    }
    let (_, text, _) = outcome(simulate(&trace, &path, &["--dispatch", "first-hit", "--compare"]).arg(&trace));
    has(&text, &["EMULATED", "against the measured trace", "bytes of amber", "off"]);
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");

    // the profile says what the emulation does, to the nanosecond: so does the simulation
    let by_hand = drives.dir.path().join("exact.toml");
    let row = |n: &str, p: Emulation| {
        format!("[[drive]]\nname = \"{n}\"\nrate = \"{}B/s\"\nfixed = \"{}ns\"\n", p.rate_bytes_per_s, p.latency_ns)
    };
    fs::write(&by_hand, row("amber", paces()[0]) + &row("blue", paces()[1])).unwrap();
    let seen = json_of(simulate(&trace, &path, &more).arg(&trace).arg("--profile").arg(&by_hand));
    for error in seen["compare"]["errors"].as_array().unwrap() {
        assert!(number(error, "/mean").abs() < 1e-6 && number(error, "/p50").abs() < 1e-6, "{error}");
    }
    assert!(number(&seen, "/compare/tok_s_error").abs() < 1e-6);

    // a trace read under another plan, and one of another text
    let mirror = drives.plan(tiny_store(), "full-mirror");
    let single = drives.plan(tiny_store(), "single");
    let mirrored = json_of(simulate(&trace, &mirror, &["--json"]).arg("--profile").arg(&by_hand));
    assert!(number(&mirrored, "/simulated/tok_s/0") >= number(&seen, "/simulated/tok_s/0"));
    refused(simulate(&trace, &single, &["--compare"]).arg(&trace), &["drive `blue`", "another plan"]);
    let other = drives.dir.path().join("other");
    paced_trace(&other, &plan, &paces(), &sets(79));
    refused(simulate(&trace, &path, &["--compare"]).arg(&other), &["79 barriers", "another text"]);
    let mut changed = sets(80);
    changed[3] = vec![0, 1, 3, 5];
    paced_trace(&drives.dir.path().join("changed"), &plan, &paces(), &changed);
    refused(
        simulate(&trace, &path, &["--compare"]).arg(drives.dir.path().join("changed")),
        &["barrier 3", "another text"],
    );
}

#[test]
fn one_more_drive_helps_where_drives_are_waited_for_and_nowhere_else() {
    let drives = Drives::new(2, None);
    let path = drives.plan(tiny_store(), "full-mirror");
    let plan = plan_of(&path);
    let trace = drives.dir.path().join("paced");
    paced_trace(&trace, &plan, &paces(), &sets(60));
    let add = ["--add-drive", "rate=8MB/s,latency=300us,name=third", "--add-drive", "rate=8MB/s"];
    let seen = json_of(&mut simulate(&trace, &path, &[&add[..], &["--json"]].concat()));
    let steps = seen["what_if"]["steps"].as_array().unwrap();
    assert_eq!(seen["what_if"]["policy"], "full-mirror");
    let added: Vec<&Value> = steps.iter().map(|s| &s["added"]).collect();
    assert_eq!(added, [&json!([]), &json!(["third"]), &json!(["third", "new1"])]);
    assert_eq!(steps[1]["verdict"], "better");
    assert!(number(&steps[1], "/gain/1") > 1.0 && number(&steps[2], "/gain/0") >= number(&steps[1], "/gain/0") * 0.99);
    assert_eq!(steps[1]["drive"]["hypothetical"], true);
    let (_, text, _) = outcome(&mut simulate(&trace, &path, &add));
    has(&text, &["one more drive, planned again by full-mirror", "third + new1", "would make decoding"]);
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");

    // a policy that needs heat counts it in the trace, one that the plan does not hold must be given
    let lpt = drives.dir.path().join("lpt.plan.json");
    let mut made = plan.clone();
    made.planner = "barrier".into();
    fs::write(&lpt, made.to_json().unwrap()).unwrap();
    let seen = json_of(&mut simulate(&trace, &lpt, &["--add-drive", "rate=8MB/s", "--json"]));
    has(&seen["what_if"]["assumptions"].to_string(), &["counted in the simulated trace", "100.0 %"]);
    made.planner = "hot-replica".into();
    fs::write(&lpt, made.to_json().unwrap()).unwrap();
    refused(&mut simulate(&trace, &lpt, &["--add-drive", "rate=8MB/s"]), &["hot-replica", "--policy"]);
    refused(&mut simulate(&trace, &path, &["--add-drive", "rate=8MB/s,capacity=1kB"]), &["new1"]);
    refused(&mut simulate(&trace, &path, &["--add-drive", "rate=8MB/s,name=blue"]), &["drive `blue`"]);

    // drives that are hardly waited for
    let fast = rates(drives.dir.path(), &["amber", "blue"], "20GB/s", "1us");
    let seen = json_of(simulate(&trace, &path, &["--add-drive", "rate=20GB/s", "--json", "--profile"]).arg(&fast));
    assert_eq!(seen["what_if"]["steps"][1]["verdict"], "not_storage_bound");
    let (_, text, _) = outcome(simulate(&trace, &path, &["--add-drive", "rate=20GB/s", "--profile"]).arg(&fast));
    has(&text.split_whitespace().collect::<Vec<_>>().join(" "), &["would bring nothing", "not storage-bound"]);
}

#[test]
fn readers_settings_act_or_are_refused() {
    let drives = Drives::new(2, None);
    let path = drives.plan(tiny_store(), "round-robin");
    let plan = plan_of(&path);
    let trace = drives.dir.path().join("paced");
    let same: Vec<Vec<u16>> = vec![vec![0, 1, 2, 3]; 40];
    paced_trace(&trace, &plan, &paces(), &same);
    let exact = rates(drives.dir.path(), &["amber", "blue"], "5MB/s", "500us");
    let with = |more: &[&str]| json_of(simulate(&trace, &path, more).arg("--json").arg("--profile").arg(&exact));
    let plain = with(&[]);
    // the cache of four experts has all of them after the first barrier
    let cached = with(&["--cache-bytes", "64KiB"]);
    assert!((number(&cached, "/simulated/hit_share") - 39.0 / 40.0).abs() < 1e-9, "{}", cached["simulated"]);
    assert!(number(&cached, "/simulated/read_bytes") < number(&plain, "/simulated/read_bytes") / 30.0);
    assert_eq!(number(&plain, "/simulated/hit_share"), 0.0);
    // a guesser that is always right, with 2 ms between barriers; the trace has one of eight layers
    let ahead = with(&["--prefetch", "same-as-last", "--prefetch-depth", "8"]);
    let [useful, late] = [0, 1].map(|i| number(&ahead, &format!("/simulated/prefetch/{i}")));
    assert!(useful + late > 100.0, "{}", ahead["simulated"]);
    assert!(number(&ahead, "/simulated/tok_s/0") > number(&plain, "/simulated/tok_s/0"));
    for guesser in ["next-router", "draft"] {
        let mut command = simulate(&trace, &path, &["--prefetch", guesser, "--profile"]);
        refused(command.arg(&exact), &[guesser, "cannot be simulated"]);
    }
    refused(&mut simulate(&trace, &path, &["--prefetch", "markov"]), &["--prefetch-table"]);
    refused(&mut simulate(&trace, &path, &["--prefetch-depth", "2"]), &["--prefetch-depth", "does nothing"]);
    refused(&mut simulate(&trace, &path, &["--cache-policy", "lfu-decay"]), &["--cache-bytes"]);
    refused(simulate(&trace, &path, &["--buffer-bytes", "1", "--profile"]).arg(&exact), &["--buffer-bytes"]);
    let run = drives.dir.path().join("run.toml");
    fs::write(&run, "[reader]\nhedge_after_permille = 990\n").unwrap();
    let mut command = simulate(&trace, &path, &["--profile"]);
    refused(command.arg(&exact).arg("--config").arg(&run), &["hedging cannot be simulated"]);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let (_, plan, trace) = recorded();
    let dir = prepared::folder();
    let at = |name: &str| dir.path().join(name);
    refused(&mut simulate(&at("nowhere"), plan, &[]), &["nowhere/trace.json"]);
    refused(&mut simulate(trace, &at("no.json"), &[]), &["no.json"]);
    // another model
    let mut other = plan_of(plan);
    other.model_id = "0123456789abcdef0123456789abcdef".into();
    fs::write(at("other.json"), other.to_json().unwrap()).unwrap();
    refused(&mut simulate(trace, &at("other.json"), &[]), &["of model", "same model"]);
    // drives that nobody has measured
    let mut more = plan_of(plan);
    more.drives[0].name = "jade".into();
    fs::write(at("jade.json"), more.to_json().unwrap()).unwrap();
    refused(&mut simulate(trace, &at("jade.json"), &[]), &["`jade`", "--profile"]);
    let known = rates(dir.path(), &["amber"], "1GB/s", "1us");
    refused(simulate(trace, &at("jade.json"), &["--profile"]).arg(&known), &["no drive `jade`", "amber"]);
    // rates that are none
    for (text, word) in [
        ("[[drive]]\nname = \"amber\"\nrate = \"NaN\"\n", "NaN"),
        ("[[drive]]\nname = \"amber\"\nrate = \"0MB/s\"\n", "above 0"),
        ("[[drive]]\nname = \"amber\"\nrate = \"1MB/s\"\nemulate = \"x\"\n", "emulate"),
        ("{\"version\": 99}", "version 99"),
        ("{}", "profile"),
    ] {
        fs::write(at("bad"), text).unwrap();
        refused(simulate(trace, plan, &["--profile"]).arg(at("bad")), &["--profile", word]);
    }
    refused(simulate(trace, plan, &["--profile"]).arg(at("gone.json")), &["gone.json"]);
    // a drives file says where drives are, never how fast
    let emulated = "[[drive]]\nname = \"amber\"\npath = \".\"\nemulate = { rate = \"1MB/s\", latency = \"9ms\" }\n";
    fs::write(at("drives.toml"), emulated).unwrap();
    let mut command = simulate(trace, plan, &["--json", "--profile"]);
    let (code, with, notes) = outcome(command.arg(&known).arg("--drives").arg(at("drives.toml")));
    assert_eq!(code, 0, "{notes}");
    has(&notes, &["emulate tables are not looked at", "rates given by hand"]);
    let without = json_of(simulate(trace, plan, &["--json", "--profile"]).arg(&known));
    assert_eq!(serde_json::from_str::<Value>(&with).unwrap(), without);
    fs::write(at("drives.toml"), "[[drive]]\nname = \"x\"\npath = \".\"\n").unwrap();
    refused(simulate(trace, plan, &["--drives"]).arg(at("drives.toml")), &["drive `amber`"]);
    for spec in ["rate=fast", "latency=1ms", "rate=0B/s", "rate=1GB/s,colour=red"] {
        let (code, _, message) = outcome(&mut simulate(trace, plan, &["--add-drive", spec]));
        assert_eq!(code, 2, "{message}");
        has(&message, &["--add-drive"]);
    }
    // a row with a fault: line and column, or left out and said
    let broken = at("broken");
    fs::create_dir(&broken).unwrap();
    for name in ["trace.json", "reads.csv", "barriers.csv", "routes.csv"] {
        fs::copy(trace.join(name), broken.join(name)).unwrap();
    }
    let text = fs::read_to_string(broken.join("reads.csv")).unwrap().replacen(",ok,", ",maybe,", 1);
    fs::write(broken.join("reads.csv"), text).unwrap();
    refused(&mut simulate(&broken, plan, &[]), &["reads.csv:2: column 16 `result`"]);
    let seen = json_of(simulate(&broken, plan, &["--lenient", "--json", "--profile"]).arg(&known));
    has(&seen["assumptions"].to_string(), &["1 rows with faults were left out"]);
}
