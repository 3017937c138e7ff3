//! Mechanisms that lie must be found out. For every setting there is: a run that asks for it, in which the code does not do
//! it; and, where the setting has an off, a run that does not ask, in which the code does it all the same. Each must be
//! rejected by the setting's name, and each must be accepted when nothing lies.
//!
//! The switches that it throws exist in builds with debug assertions only. The list is `Knob::ALL`, so a setting without a case does
//! not compile.
#![cfg(debug_assertions)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::bench::config::{Asked, RunConfig};
use argodrive::bench::evidence::{Evidence, Verdict, objections};
use argodrive::bench::prompt_set;
use argodrive::bench::run::{RunSpec, run};
use argodrive::decode::speculate::{AcceptRule, DepthPolicy, DrafterKind};
use argodrive::decode::{Activations, KernelIsa};
use argodrive::drive::emulated_link::{EmulatedLink, LinkName};
use argodrive::drive::fault_rule::DriveFault;
use argodrive::drive::spec::{DriveSpec, Emulation};
use argodrive::io::EngineKind;
use argodrive::knob::{self, Knob};
use argodrive::layout::plan::{Plan, PlanDrive};
use argodrive::layout::planner;
use argodrive::layout::policy::Policy;
use argodrive::open::Model;
use argodrive::reader::{CachePolicy, DispatchPolicy, KnownRate, PrefetchPolicy, PrefetchPool, Shedding};
use argodrive::stage::{StageOptions, stage};
use argodrive::store::import::{ImportOptions, import};
use argodrive::store::trunk::TrunkResidency;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// One way to run.
struct Setup {
    asked: Asked,
    policy: Policy,
    emulate: [Option<Emulation>; 2],
    prompt: &'static str,
}

/// A setup that asks for the knob, and one that leaves it off where there is an off.
struct Case {
    on: Setup,
    off: Option<Setup>,
}

const PROMPT: &str = "The router names the experts, and the block comes back when the device has time.";

fn setup(change: impl FnOnce(&mut RunConfig)) -> Setup {
    let mut asked = Asked::default();
    asked.config.max_new = 4;
    change(&mut asked.config);
    Setup { asked, policy: Policy::FullMirror {}, emulate: [None, None], prompt: PROMPT }
}

fn plain() -> Setup {
    setup(|_| {})
}

fn sampled(change: impl FnOnce(&mut RunConfig)) -> Setup {
    setup(|c| {
        c.sampler.temperature = 1.0;
        change(c);
    })
}

/// Slow enough that a busy machine keeps it.
fn slow(latency_ms: u64) -> Emulation {
    let latency_ns = latency_ms * 1_000_000;
    Emulation { rate_bytes_per_s: 5_000_000, latency_ns, per_read_ns: 0, jitter: 0.0, seed: 1, ..Emulation::default() }
}

/// Guesses on drives that demand keeps busy, so that they come late; long enough for something to be done about it.
fn guessing(change: impl FnOnce(&mut RunConfig)) -> Setup {
    let emulate = [Some(slow(1)), Some(slow(1))];
    let asked = setup(|c| {
        c.max_new = 12;
        c.reader.prefetch = PrefetchPolicy::SameAsLast;
        change(c);
    });
    Setup { emulate, ..asked }
}

/// Long enough for a text of random weights to repeat itself.
const DRAFTED_TOKENS: usize = 96;

/// Begins such a text.
const REPEATED: &str = "the the the the the the";

/// Proposals from such a text.
fn drafting(change: impl FnOnce(&mut RunConfig)) -> Setup {
    let drafts = setup(|c| {
        c.max_new = DRAFTED_TOKENS;
        c.draft.speculate = DrafterKind::Ngram;
        change(c);
    });
    Setup { prompt: REPEATED, ..drafts }
}

/// A cache that is full, too small for everything, and large enough to be hit.
fn cached(policy: CachePolicy) -> Setup {
    setup(|c| {
        c.max_new = 8;
        c.reader.cache_bytes = 80 * 16_384;
        c.reader.cache_policy = policy;
    })
}

fn case(knob: Knob, folder: &Path) -> Case {
    let on_off = |on: Setup, off: Setup| Case { on, off: Some(off) };
    let only = |on: Setup| Case { on, off: None };
    match knob {
        // A plan has no off: without one the store is the plan.
        Knob::Layout => only(plain()),
        // A drive that is no home of an expert is not even opened for it, so no code could read it there.
        Knob::Replicas => only(plain()),
        Knob::Dispatch => on_off(
            setup(|c| c.reader.dispatch = DispatchPolicy::LeastInflight),
            setup(|c| c.reader.dispatch = DispatchPolicy::FirstHit),
        ),
        Knob::Split => {
            // Unequal drives: whole experts never divide evenly.
            let rate = |rate_bytes_per_s| Some(Emulation { rate_bytes_per_s, ..slow(1) });
            let emulate = [rate(2_000_000), rate(3_100_000)];
            on_off(
                Setup { emulate, ..setup(|c| c.reader.dispatch = DispatchPolicy::Split) },
                Setup { emulate, ..setup(|c| c.reader.dispatch = DispatchPolicy::ExpectedCompletion) },
            )
        }
        Knob::Rates => {
            let known = |drive: &str, bytes_per_s| KnownRate { drive: drive.into(), bytes_per_s, fixed_ns: 100_000 };
            let rates = vec![known("a", 50_000_000), known("b", 20_000_000), known("elsewhere", 1)];
            on_off(setup(|c| c.reader.rates = rates), plain())
        }
        Knob::Hedge => {
            let emulate = [Some(slow(1)), Some(slow(1))];
            let hedged = |after| {
                setup(|c| {
                    c.max_new = 12;
                    c.reader.dispatch = DispatchPolicy::LeastInflight;
                    c.reader.hedge_after_permille = after;
                })
            };
            on_off(Setup { emulate, ..hedged(Some(1)) }, Setup { emulate, ..hedged(None) })
        }
        Knob::Engine => {
            on_off(setup(|c| c.reader.engine = EngineKind::Uring), setup(|c| c.reader.engine = EngineKind::Psync))
        }
        Knob::Sqpoll => {
            let ring = |sqpoll| {
                setup(|c| {
                    c.reader.engine = EngineKind::Uring;
                    c.reader.sqpoll = sqpoll;
                })
            };
            on_off(ring(true), ring(false))
        }
        // Limits have no off either; they are exceeded instead.
        Knob::QueueDepth => only(setup(|c| c.reader.queue_depth = 1)),
        Knob::BufferBytes => only(setup(|c| c.reader.buffer_bytes = 40_000)),
        Knob::Direct => on_off(setup(|c| c.reader.direct = true), setup(|c| c.reader.direct = false)),
        Knob::VerifyDigests => on_off(setup(|c| c.reader.verify_digests = true), plain()),
        Knob::ReadTimeout => only(Setup {
            emulate: [Some(slow(400)), Some(slow(1))],
            ..setup(|c| {
                c.max_new = 1;
                c.reader.read_timeout_ms = 100;
                c.reader.dispatch = DispatchPolicy::FirstHit;
            })
        }),
        Knob::Faults => on_off(setup(|c| c.reader.faults = DriveFault::parse_all("a: eio @3").unwrap()), plain()),
        Knob::MaxReadRate => on_off(setup(|c| c.reader.max_read_bytes_per_s = 2_000_000), plain()),
        Knob::Duty => on_off(setup(|c| c.reader.duty_permille = 20), plain()),
        Knob::Shed => {
            // One of two drives sinks to a fiftieth, and the policy does not look at rates.
            let sinking = |shed| {
                setup(|c| {
                    c.max_new = 24;
                    c.reader.dispatch = DispatchPolicy::RoundRobin;
                    c.reader.faults = DriveFault::parse_all("b: slow 100KB/s @150..").unwrap();
                    c.reader.shed = shed;
                })
            };
            let emulate = [Some(slow(1)), Some(slow(1))];
            on_off(
                Setup { emulate, ..sinking(Shedding::On) },
                Setup { emulate, ..setup(|c| c.reader.shed = Shedding::Off) },
            )
        }
        Knob::Prefetch => on_off(setup(|c| c.reader.prefetch = PrefetchPolicy::SameAsLast), plain()),
        Knob::PrefetchDepth => only(setup(|c| {
            (c.reader.prefetch, c.reader.prefetch_depth) = (PrefetchPolicy::SameAsLast, 2);
        })),
        Knob::PrefetchExperts => on_off(
            setup(|c| (c.reader.prefetch, c.reader.prefetch_experts) = (PrefetchPolicy::SameAsLast, 2)),
            setup(|c| c.reader.prefetch = PrefetchPolicy::SameAsLast),
        ),
        Knob::PrefetchQueueDepth => only(guessing(|c| c.reader.prefetch_queue_depth = 1)),
        Knob::PrefetchPool => on_off(guessing(|c| c.reader.prefetch_pool = PrefetchPool::Shared), guessing(|_| {})),
        Knob::PrefetchDispatch => {
            on_off(guessing(|c| c.reader.prefetch_dispatch = Some(DispatchPolicy::FirstHit)), guessing(|_| {}))
        }
        Knob::PrefetchGovernor => on_off(guessing(|_| {}), guessing(|c| c.reader.prefetch_governor = false)),
        Knob::CacheBytes => on_off(cached(CachePolicy::Lru), plain()),
        Knob::CachePolicy => on_off(cached(CachePolicy::LfuDecay), cached(CachePolicy::Lru)),
        Knob::Pace => on_off(Setup { emulate: [Some(slow(20)), Some(slow(20))], ..plain() }, plain()),
        Knob::Link => {
            let name = LinkName::new("hub").unwrap();
            let link = Some(EmulatedLink { name, rate_bytes_per_s: 5_000_000 });
            let shared = Some(Emulation { link, ..slow(20) });
            let alone = Some(slow(20));
            on_off(Setup { emulate: [shared; 2], ..plain() }, Setup { emulate: [alone; 2], ..plain() })
        }
        Knob::Resident => on_off(setup(|c| c.resident = true), plain()),
        Knob::Kernels => only(setup(|c| c.model.kernels = "avx2".into())),
        Knob::Activations => on_off(setup(|c| c.model.activations = Activations::Int8), plain()),
        // One thread can only be forced to be two; two take turns on products that are large enough.
        Knob::Threads => {
            Case { on: setup(|c| (c.model.threads, c.max_new) = (2, 12)), off: Some(setup(|c| c.model.threads = 1)) }
        }
        Knob::Parallel => {
            let lanes = |n| {
                setup(|c| {
                    c.prompts = Some(folder.join("set.jsonl"));
                    c.model.parallel = n;
                })
            };
            on_off(lanes(2), lanes(1))
        }
        Knob::Trunk => on_off(setup(|c| c.model.trunk = TrunkResidency::Streamed), plain()),
        // Without a choice every thread may run wherever the process may: the lie needs a machine with two CPUs.
        Knob::Affinity => on_off(setup(|c| c.model.affinity = "compute=0,readers=1".parse().unwrap()), plain()),
        Knob::PrefillRows => only(setup(|c| c.model.prefill_rows = 4)),
        Knob::Speculate => on_off(drafting(|_| {}), drafting(|c| c.draft.speculate = DrafterKind::Off)),
        Knob::DraftDepth => only(drafting(|c| c.draft.draft_depth = 4)),
        Knob::DraftPolicy => on_off(drafting(|c| c.draft.draft_policy = DepthPolicy::Adaptive), drafting(|_| {})),
        Knob::DraftAccept => {
            // Proposals of a model, for those of a text are certain: by either rule the same are kept.
            let drawn = |rule| {
                drafting(|c| {
                    c.max_new = 16;
                    c.sampler.temperature = 0.7;
                    c.draft.speculate = DrafterKind::Model;
                    c.draft.draft_model = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("models/argo-mini-draft"));
                    c.draft.draft_accept = rule;
                })
            };
            on_off(drawn(AcceptRule::Standard), drawn(AcceptRule::ExactMatch))
        }
        Knob::DraftWindow => {
            let windowed = |window| {
                drafting(|c| {
                    c.max_new = 24;
                    c.draft.speculate = DrafterKind::Model;
                    c.draft.draft_model = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("models/argo-mini-draft"));
                    c.draft.draft_window = window;
                })
            };
            on_off(windowed(8), windowed(0))
        }
        Knob::KvRam => {
            let held = |bytes| {
                setup(|c| {
                    c.max_new = 40;
                    c.kv.kv_ram_bytes = bytes;
                })
            };
            on_off(held(20_000), held(0))
        }
        Knob::MaxContext => only(setup(|c| {
            c.model.max_context = 40;
            c.max_new = 60;
        })),
        Knob::MaxNew => only(plain()),
        Knob::Temperature => on_off(sampled(|_| {}), plain()),
        Knob::TopP => on_off(sampled(|c| c.sampler.top_p = 0.5), sampled(|_| {})),
        Knob::TopK => on_off(sampled(|c| c.sampler.top_k = 3), sampled(|_| {})),
        Knob::Seed => only(sampled(|c| c.sampler.seed = 5)),
        Knob::Special => {
            let prompt = "<|open|>message<|sep|> and then";
            on_off(Setup { prompt, ..setup(|c| c.special = true) }, Setup { prompt, ..plain() })
        }
        Knob::Trace => on_off(setup(|c| c.trace = Some(folder.join("trace"))), plain()),
        Knob::Reference => on_off(setup(|c| c.reference = true), plain()),
        Knob::Monitor => {
            let traced = |monitor| {
                setup(|c| {
                    c.trace = Some(folder.join("windows"));
                    c.monitor = monitor;
                })
            };
            on_off(traced(true), traced(false))
        }
        Knob::SnapshotEvery => {
            let kept = setup(|c| {
                c.max_new = 12;
                c.snapshot.snapshot_every = 4;
                c.snapshot.snapshot_dir = Some(folder.join("snapshots"));
            });
            on_off(kept, plain())
        }
        // Without a snapshot there is no state that any code could go on from.
        Knob::Resume => only(setup(|c| {
            c.max_new = 12;
            c.snapshot.resume = Some(folder.join("resume"));
        })),
    }
}

struct Bench {
    model: Model,
    folder: PathBuf,
}

impl Bench {
    fn new() -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("mutation");
        let _ = std::fs::remove_dir_all(&folder);
        let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/oracle/tiny");
        let store = folder.join("store");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("set.jsonl"), "\"The drive\"\n\"an expert\"\n\"and a router\"\n").unwrap();
        import(&checkpoint, &store, &ImportOptions::default(), &mut |_| {}).unwrap();
        Self { model: Model::load(&store, None).unwrap(), folder }
    }

    fn plan(&self, setup: &Setup) -> (Plan, Vec<DriveSpec>) {
        let mounts: Vec<DriveSpec> = ["a", "b"]
            .into_iter()
            .zip(setup.emulate)
            .map(|(name, emulate)| DriveSpec {
                name: name.into(),
                path: self.folder.join(name),
                emulate,
                faults: Vec::new(),
            })
            .collect();
        let drives: Vec<PlanDrive> =
            mounts.iter().map(|m| PlanDrive { name: m.name.clone(), path: m.path.clone() }).collect();
        let plan = planner::plan(&self.model.catalog(), &drives, &setup.policy, 0, BTreeMap::new()).unwrap();
        let paths: Vec<PathBuf> = mounts.iter().map(|m| m.path.clone()).collect();
        paths.iter().for_each(|p| std::fs::create_dir_all(p).unwrap());
        stage(&plan, &self.model.folder, &paths, StageOptions::default(), &mut |_| {}).unwrap();
        (plan, mounts)
    }

    /// The evidence of one run with `knob` under test.
    fn evidence(&self, knob: Knob, setup: &Setup) -> Vec<Evidence> {
        let (plan, mounts) = self.plan(setup);
        let streamed = (!setup.asked.config.resident).then_some((&plan, mounts.as_slice()));
        let mut config = setup.asked.config.clone();
        config.prompt = config.prompts.is_none().then(|| setup.prompt.to_string());
        let prompts = prompt_set::encode(&self.model, &config).unwrap().tokens;
        if let Some(at) = &setup.asked.config.snapshot.resume {
            let writer = self::setup(|c| {
                c.max_new = 12;
                c.snapshot.snapshot_every = 4;
                c.snapshot.snapshot_dir = Some(at.clone());
            });
            self.evidence(Knob::SnapshotEvery, &writer);
        }
        let spec = RunSpec {
            arm: "mutation",
            asked: &setup.asked,
            under_test: &BTreeSet::from([knob]),
            streamed,
            prompts: &prompts,
            control: None,
        };
        // where the trunk is, is settled when a model is loaded
        let fresh = (knob == Knob::Trunk)
            .then(|| Model::load_as(&self.model.folder, None, setup.asked.config.model.trunk).unwrap());
        run(fresh.as_ref().unwrap_or(&self.model), &spec, &mut |_| ControlFlow::Continue(())).unwrap().record.settings
    }
}

/// argo-mini, in a store of its own.
fn mini(folder: &Path) -> Model {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/argo-mini");
    let store = folder.join("mini");
    if !store.exists() {
        import(&checkpoint, &store, &ImportOptions::default(), &mut |_| {}).unwrap();
    }
    Model::load(&store, None).unwrap()
}

fn names(evidence: &[Evidence], knob: Knob) -> bool {
    objections(evidence).iter().any(|o| o.starts_with(&format!("{}:", knob.name())))
}

fn line(evidence: &[Evidence], knob: Knob) -> &Evidence {
    evidence.iter().find(|e| e.name == knob.name()).unwrap()
}

#[test]
fn every_lie_is_found_out_by_name() {
    let mut bench = Bench::new();
    let mut survived = Vec::new();
    for &knob in Knob::ALL {
        if knob == Knob::Kernels && !KernelIsa::Avx2.is_available() {
            assert!(std::env::var_os("CI").is_none(), "this machine lacks AVX2: the kernels' mutation cannot run");
            eprintln!("SKIPPED: kernels (no AVX2 here)");
            continue;
        }
        let case = case(knob, &bench.folder);
        let isa = case.on.asked.config.model.isa().unwrap();
        bench.model = match knob {
            // the draft model speaks the tokens of argo-mini
            Knob::DraftAccept | Knob::DraftWindow => mini(&bench.folder),
            _ => Model::load(&bench.folder.join("store"), isa).unwrap(),
        };
        for (what, setup, lie) in
            [("on", Some(&case.on), knob::skip as fn(Knob)), ("off", case.off.as_ref(), knob::force as fn(Knob))]
        {
            let Some(setup) = setup else { continue };
            // A machine that is busy elsewhere may miss an emulated pace; it gets a few chances to keep it.
            let mut honest = bench.evidence(knob, setup);
            for _ in 0..4 {
                if line(&honest, knob).verdict != Verdict::Proved {
                    honest = bench.evidence(knob, setup);
                }
            }
            let seen = line(&honest, knob);
            assert_eq!(seen.verdict, Verdict::Proved, "{} {what}, nothing lies: {seen:?}", knob.name());
            lie(knob);
            let lied = bench.evidence(knob, setup);
            knob::tell_the_truth();
            if names(&lied, knob) {
                let e = line(&lied, knob);
                println!("{:16} {what:3} found out: {:?}: {}", knob.name(), e.verdict, e.seen);
            } else {
                survived.push(format!("{} {what}: {:?}", knob.name(), line(&lied, knob)));
            }
        }
    }
    assert!(survived.is_empty(), "lies that nobody noticed:\n{}", survived.join("\n"));
}
