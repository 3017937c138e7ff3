//! Between opening and closing a barrier nothing allocates, on any thread. Alone in its file, because the allocator
//! counts for the whole process, except its main thread, where the test harness keeps its books.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod allocations;

use allocations::{ALLOCATIONS, ARMED};
use argodrive::clock::Clock;
use argodrive::drive::spec::Emulation;
use argodrive::ids::{DriveId, ExpertId, LayerId};
use argodrive::io::EngineKind;
use argodrive::layout::plan::{LayerHomes, PLAN_VERSION, Plan, PlanDrive, Shape};
use argodrive::reader::{CachePolicy, DispatchPolicy, ExpertReader, PrefetchPolicy, ReaderOptions, mounts_of};
use argodrive::source::{Barrier, ExpertSource, Guess, Phase, StepInfo};
use argodrive::store::manifest::{DRIVE_FILE, Digest, DriveExpert, DriveManifest, drive_folder, pack_name};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

/// Enough for the hedging to know the drives' latencies.
const BARRIERS: u64 = 40;

#[test]
fn barriers_allocate_nothing() {
    // On a thread of its own: with one test thread the harness runs tests on the main thread.
    for (engine, sqpoll) in [
        (EngineKind::Psync, false),
        (EngineKind::Mmap, false),
        (EngineKind::Buffered, false),
        (EngineKind::Uring, false),
        (EngineKind::Uring, true),
    ] {
        for ahead in [None, Some(PrefetchPolicy::SameAsLast), Some(PrefetchPolicy::NextRouter)] {
            ALLOCATIONS.store(0, Ordering::SeqCst);
            std::thread::spawn(move || run_barriers(engine, sqpoll, ahead)).join().unwrap();
        }
    }
}

const EXPERTS: u16 = 12;

/// Barriers with everything that demand can do; with `ahead` beside a cache, a governor and guesses that are often wrong.
fn run_barriers(engine: EngineKind, sqpoll: bool, ahead: Option<PrefetchPolicy>) {
    const MODEL: &str = "00112233445566778899aabbccddeeff";
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layer = LayerId(0);
    let homes = LayerHomes(vec![vec![DriveId(0), DriveId(1)]; usize::from(EXPERTS)]);
    let drive = |name: &str| PlanDrive { name: name.into(), path: dir.path().join(name) };
    let plan = Plan {
        version: PLAN_VERSION,
        model_id: MODEL.into(),
        store: "/store".into(),
        inputs: std::collections::BTreeMap::new(),
        planner: "test".into(),
        seed: 0,
        expert_bytes: 6000,
        drives: vec![drive("real"), drive("emulated")],
        shape: Shape::Whole,
        predicted: None,
        layers: [(layer, homes)].into(),
    };
    for drive in &plan.drives {
        let folder = drive_folder(&drive.path, MODEL);
        std::fs::create_dir_all(&folder).unwrap();
        let mut manifest = DriveManifest::empty(MODEL, 6000);
        let file = std::fs::File::create(folder.join(pack_name(layer))).unwrap();
        for e in 0..EXPERTS {
            let bytes = vec![e as u8; 6000];
            file.write_all_at(&bytes, u64::from(e) * manifest.slot_bytes).unwrap();
            let entry = DriveExpert { expert: ExpertId(e), slot: u32::from(e), digest: Digest::of(&bytes) };
            manifest.layers.entry(layer).or_default().push(entry);
        }
        std::fs::write(folder.join(DRIVE_FILE), serde_json::to_vec(&manifest).unwrap()).unwrap();
    }
    let options = ReaderOptions {
        engine,
        sqpoll,
        direct: engine.can_be_direct(),
        buffer_bytes: if ahead.is_some() { 14 * 8192 } else { 5 * 8192 },
        prefetch: ahead.unwrap_or_default(),
        prefetch_queue_depth: 2,
        cache_bytes: if ahead.is_some() { 3 * 8192 } else { 0 },
        cache_policy: if ahead.is_some() { CachePolicy::LfuDecay } else { CachePolicy::Lru },
        demand_reserve: 5,
        verify_digests: true,
        trace_reads: 50_000,
        trace_barriers: 25 * BARRIERS as usize,
        dispatch: DispatchPolicy::Split,
        // Almost always, so that hedged reads are under the eye of the allocator too.
        hedge_after_permille: Some(1),
        ..ReaderOptions::default()
    };
    let mut mounts = mounts_of(&plan, None).unwrap();
    let pace = Emulation {
        rate_bytes_per_s: 50_000_000,
        latency_ns: 100_000,
        per_read_ns: 1000,
        jitter: 0.1,
        seed: 1,
        ..Emulation::default()
    };
    mounts.iter_mut().for_each(|mount| mount.emulate = Some(pace)); // alike, so that both serve and experts are cut
    let mut reader = ExpertReader::open(&plan, &mounts, &options, Clock::start()).unwrap();
    let handle = reader.handle();
    let (mut sum, mut asked) = (0u64, 0);
    let guesses: Vec<Guess> = (0..5).map(|e| Guess { expert: ExpertId(e), score: 1.0 }).collect();
    // Whether a last read is late enough to be hedged is a matter of time, so there may be more barriers until one was.
    let mut at = 0;
    while at < BARRIERS || (ahead.is_none() && at < 25 * BARRIERS && handle.counters().hedges_issued == 0) {
        let step = StepInfo { step: at, phase: Phase::Decode, pos: at, rows: 1 };
        let (first, count) = if ahead.is_some() { (at as u16 / 4, 7) } else { (0, EXPERTS) };
        let experts: Vec<ExpertId> = (first..first + count).map(|e| ExpertId(e % EXPERTS)).collect();
        asked += experts.iter().map(|e| u64::from(e.0)).sum::<u64>();
        ARMED.store(true, Ordering::SeqCst);
        if ahead == Some(PrefetchPolicy::NextRouter) {
            reader.hint(&step, layer, &guesses[..3]);
            reader.hint(&step, layer, &guesses);
            if at % 5 == 4 {
                reader.retract(&step, layer);
            }
        }
        let mut barrier = Barrier::open(&mut reader, &step, layer, &experts).unwrap();
        while let Some(lease) = barrier.next_arrival().unwrap() {
            sum += u64::from(lease.bytes()[0]);
        }
        drop(barrier);
        ARMED.store(false, Ordering::SeqCst);
        at += 1;
    }
    assert_eq!(sum, asked);
    let seen = handle.counters();
    if ahead.is_some() {
        let issued: u64 = seen.drives.iter().map(|d| d.prefetch.issued.reads).sum();
        let (p, c) = (&seen.prefetch, &seen.cache);
        assert!(issued > 0 && p.losers > 0, "guesses were read and wrong: {p:?}");
        assert!(c.hits > 0 && c.evictions > 0, "experts stayed and went: {c:?}");
    } else {
        assert!(seen.waves > at && seen.drives.iter().all(|d| d.reads > 0), "waves and both drives took part");
        assert!(seen.experts_split > 0 && seen.part_sum_errors == 0, "experts came in parts");
        assert!(seen.hedges_issued > 0, "reads were hedged");
    }
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), 0, "{engine}, sqpoll {sqpoll}, {ahead:?}");
    ARMED.store(true, Ordering::SeqCst);
    drop(std::hint::black_box(Box::new(1)));
    ARMED.store(false, Ordering::SeqCst);
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), 1, "the counter counts");
}
