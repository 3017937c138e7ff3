//! The choice of engine changes how experts are read, never what is decoded: argo-mini from two drives, with every
//! engine, gives the bits of the run from memory. And what stands in an engine's way is said before the run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod checkpoints;

use argodrive::bench::config::Asked;
use argodrive::bench::run::{RunResult, RunSpec, run};
use argodrive::clock::Clock;
use argodrive::decode::{Logits, Session};
use argodrive::drive::spec::{DriveSpec, Emulation};
use argodrive::io::EngineKind;
use argodrive::layout::plan::{Plan, PlanDrive};
use argodrive::layout::planner;
use argodrive::layout::policy::Policy;
use argodrive::open::Model;
use argodrive::reader::{DriveCounters, ReaderOptions};
use argodrive::source::{ExpertSource, Phase};
use argodrive::stage::{StageOptions, stage};
use checkpoints::{argodrive, import_ok, repo};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PROMPT: &[u32] = &[7, 38, 131, 286, 503, 782, 1123, 1526];

struct Rig {
    model: Model,
    plan: Plan,
    mounts: Vec<DriveSpec>,
    dir: PathBuf,
}

fn rig() -> &'static Rig {
    static CELL: OnceLock<Rig> = OnceLock::new();
    CELL.get_or_init(|| {
        // One place, emptied first: what a static holds is never dropped.
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("engines");
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let store = dir.join("store");
        import_ok(&repo("models/argo-mini"), &store);
        let model = Model::load(&store, None).unwrap();
        let drives = ["a", "b"].map(|name| PlanDrive { name: name.into(), path: dir.join(name) });
        drives.iter().for_each(|d| std::fs::create_dir(&d.path).unwrap());
        let plan = planner::plan(&model.catalog(), &drives, &Policy::FullMirror {}, 0, Default::default()).unwrap();
        let paths = drives.each_ref().map(|d| d.path.clone());
        stage(&plan, &store, &paths, StageOptions::default(), &mut |_| {}).unwrap();
        let mounts =
            drives.map(|d| DriveSpec { name: d.name, path: d.path, emulate: None, faults: Vec::new() }).to_vec();
        std::fs::write(dir.join("plan.json"), plan.to_json().unwrap()).unwrap();
        Rig { model, plan, mounts, dir }
    })
}

fn options(engine: EngineKind, sqpoll: bool) -> ReaderOptions {
    ReaderOptions { engine, sqpoll, direct: engine.can_be_direct(), queue_depth: 4, ..ReaderOptions::default() }
}

fn engines() -> Vec<ReaderOptions> {
    let mut all =
        vec![options(EngineKind::Psync, false), options(EngineKind::Mmap, false), options(EngineKind::Buffered, false)];
    if cfg!(target_os = "linux") {
        all.push(options(EngineKind::Uring, false));
        all.push(options(EngineKind::Uring, true));
        all.push(ReaderOptions { direct: false, ..options(EngineKind::Uring, false) });
    }
    all
}

fn generate(streamed: Option<(&Plan, &[DriveSpec])>, options: &ReaderOptions) -> RunResult {
    let mut asked = Asked::default();
    asked.config.max_new = 12;
    asked.config.model.max_context = 64;
    asked.config.reader = options.clone();
    asked.config.resident = streamed.is_none();
    let under_test = &BTreeSet::new();
    let spec = RunSpec { arm: "test", asked: &asked, under_test, streamed, prompts: &[PROMPT.to_vec()], control: None };
    run(&rig().model, &spec, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// All rows' logits of the prompt, as bits.
fn logits(source: &mut dyn ExpertSource) -> Vec<u32> {
    let mut session: Session =
        rig().model.session(64, 16, argodrive::reader::PrefetchPolicy::None, Clock::start()).unwrap();
    let rows = session.forward(PROMPT, Phase::Prefill, source, Logits::All, None).unwrap();
    rows.iter().map(|v| v.to_bits()).collect()
}

fn carried_out_by(drive: &DriveCounters, kind: EngineKind) {
    let engine = drive.engine;
    assert!(engine.completed > 0, "{kind}: drive {} served nothing", drive.name);
    for other in EngineKind::ALL {
        let expected = if other == kind { engine.completed } else { 0 };
        assert_eq!(engine.work.reads_of(other), expected, "{kind}: reads that {other}'s code carried out");
    }
}

#[test]
fn every_engine_gives_the_bits_of_the_run_from_memory() {
    let rig = rig();
    let expected = generate(None, &ReaderOptions::default()).generation.token_ids;
    assert_eq!(expected.len(), 12);
    let expected_logits = logits(&mut rig.model.resident().unwrap());
    let pace = Emulation {
        rate_bytes_per_s: 500_000_000,
        latency_ns: 20_000,
        per_read_ns: 0,
        jitter: 0.1,
        seed: 1,
        ..Emulation::default()
    };
    let paced: Vec<DriveSpec> = rig.mounts.iter().map(|m| DriveSpec { emulate: Some(pace), ..m.clone() }).collect();
    for options in engines() {
        for mounts in [&rig.mounts, &paced] {
            let (plan, options) = (&rig.plan, &options);
            let result = generate(Some((plan, mounts)), options);
            assert_eq!(result.generation.token_ids, expected, "{options:?}");
            let counters = result.counters.unwrap();
            for drive in &counters.drives {
                carried_out_by(drive, options.engine);
                assert_eq!(drive.direct.is_some(), options.direct);
                let work = drive.engine.work;
                if options.engine == EngineKind::Uring {
                    assert_eq!(work.fixed_buffer_reads, drive.engine.completed, "{work:?}");
                    assert_eq!((work.sq_thread != 0, work.setup_flags & 2 != 0), (options.sqpoll, options.sqpoll));
                    assert_eq!(work.enter_errors, 0);
                }
            }
            let mut reader = rig.model.reader(plan, mounts, options, Clock::start()).unwrap();
            assert!(logits(&mut reader) == expected_logits, "{options:?}: logits differ");
        }
    }
}

/// Signals hit every thread of the process all the time; nothing is lost and nothing fails.
#[cfg(target_os = "linux")]
#[test]
fn signals_during_reads_change_nothing() {
    static CAUGHT: AtomicU64 = AtomicU64::new(0);
    extern "C" fn count(_: libc::c_int) {
        CAUGHT.fetch_add(1, Ordering::Relaxed);
    }
    let rig = rig();
    let expected = logits(&mut rig.model.resident().unwrap());
    // SAFETY: the handler only adds to an atomic; no SA_RESTART, so blocking calls do return EINTR.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: neither call touches memory of ours.
            let own = unsafe { libc::gettid() };
            while !stop.load(Ordering::Relaxed) {
                for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
                    let tid: i32 = task.file_name().to_string_lossy().parse().unwrap();
                    if tid != own {
                        // SAFETY: as above; a thread that has gone is an error that nobody minds.
                        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, libc::SIGUSR1) };
                    }
                }
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
        });
        let readings = engines().into_iter().map(|options| {
            let before = CAUGHT.load(Ordering::Relaxed);
            let mut reader = rig.model.reader(&rig.plan, &rig.mounts, &options, Clock::start()).unwrap();
            let same = (0..5).all(|_| logits(&mut reader) == expected);
            (options.engine, same, CAUGHT.load(Ordering::Relaxed) - before, reader.handle().counters())
        });
        let readings: Vec<_> = readings.collect();
        stop.store(true, Ordering::Relaxed);
        for (engine, same, caught, counters) in readings {
            assert!(same && caught > 0, "{engine}: same bits {same}, {caught} signals");
            assert!(counters.drives.iter().all(|d| d.errors + d.timeouts + d.cancelled == 0), "{engine}");
        }
    });
}

/// Runs the binary under `limits` (shell commands), with `flags`; its exit code and what it says.
fn under(limits: &str, flags: &[&str]) -> (i32, String) {
    let rig = rig();
    let script = format!("{limits} && exec \"$0\" \"$@\"");
    let mut command = std::process::Command::new("sh");
    command.arg("-c").arg(script).arg(argodrive().get_program()).arg("decode");
    command.arg("--store").arg(rig.dir.join("store")).arg("--plan").arg(rig.dir.join("plan.json"));
    let out = command.args(["--prompt", "One drive", "--max-new", "2", "--json"]).args(flags).output().unwrap();
    (out.status.code().unwrap(), String::from_utf8_lossy(&out.stderr).into_owned())
}

#[test]
fn few_descriptors_are_raised_or_named() {
    for engine in ["psync", "io-uring"] {
        if engine == "io-uring" && !cfg!(target_os = "linux") {
            continue;
        }
        let (code, said) = under("ulimit -Sn 24", &["--engine", engine]);
        assert_eq!(code, 0, "{engine}: the soft limit is raised: {said}");
        let (code, said) = under("ulimit -n 24", &["--engine", engine]);
        assert_eq!(code, 2, "{engine}: {said}");
        assert!(said.contains("hard limit is 24") && said.contains("ulimit -Hn"), "{said}");
    }
}

#[test]
fn flags_that_contradict_each_other_are_refused_before_the_run() {
    let cases: [(&[&str], &[&str]); 4] = [
        (&["--engine", "mmap"], &["mmap", "direct", "--buffered"]),
        (&["--engine", "buffered"], &["buffered", "direct", "--buffered"]),
        (&["--sqpoll"], &["--sqpoll", "psync", "--engine io-uring"]),
        (&["--engine", "mmap", "--buffered", "--sqpoll"], &["--sqpoll", "mmap"]),
    ];
    for (flags, parts) in cases {
        let (code, said) = under("true", flags);
        assert_eq!(code, 2, "{flags:?}: {said}");
        assert!(parts.iter().all(|p| said.contains(p)), "{flags:?}: {said}");
    }
    let (code, said) = under("true", &["--engine", "mmap", "--buffered"]);
    assert_eq!(code, 0, "{said}");
}
