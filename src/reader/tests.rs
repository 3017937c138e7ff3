//! The reader over small pack folders with known contents, on a real file system.

use super::engines::EngineSpec;
use super::options::ReaderError;
use super::*;
use crate::clock::Clock;
use crate::drive::spec::{DriveSpec, Emulation};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::io::{Capabilities, Completion, EngineCounters, IoEngine, ReadOutcome, ReadRequest, Signal};
use crate::layout::plan::{LayerHomes, PLAN_VERSION, Plan, PlanDrive, Shape};
use crate::source::{Barrier, ExpertSource, Lease, Phase, SourceError, StepInfo};
use crate::store::manifest::{DRIVE_FILE, Digest, DriveExpert, DriveManifest, drive_folder, pack_name};
use crate::trace::events::{Outcome, ReadResult};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub(super) const MODEL: &str = "00112233445566778899aabbccddeeff";
pub(super) const PAYLOAD: u64 = 5000;
const EXPERTS: u16 = 8;
pub(super) const LAYERS: [LayerId; 2] = [LayerId(1), LayerId(4)];

pub(super) fn payload(layer: LayerId, expert: u16) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(u64::from(layer.0) * 1000 + u64::from(expert));
    (0..PAYLOAD).map(|_| random.u8(..)).collect()
}

/// A plan of `drives` in `root`, each staged with exactly what the plan gives it. `homes(e)` places expert e.
pub(super) fn stage(root: &Path, drives: u8, homes: impl Fn(u16) -> Vec<u8>) -> Plan {
    let row = LayerHomes((0..EXPERTS).map(|e| homes(e).into_iter().map(DriveId).collect()).collect());
    let plan = Plan {
        version: PLAN_VERSION,
        model_id: MODEL.into(),
        store: "/store".into(),
        inputs: std::collections::BTreeMap::new(),
        planner: "test".into(),
        seed: 0,
        expert_bytes: PAYLOAD,
        drives: (0..drives).map(|d| PlanDrive { name: format!("d{d}"), path: root.join(format!("d{d}")) }).collect(),
        shape: Shape::Whole,
        predicted: None,
        layers: LAYERS.iter().map(|&l| (l, row.clone())).collect(),
    };
    for (id, drive) in plan.drives.iter().enumerate() {
        let folder = drive_folder(&drive.path, MODEL);
        std::fs::create_dir_all(&folder).unwrap();
        let mut manifest = DriveManifest::empty(MODEL, PAYLOAD);
        for (layer, expert) in plan.on_drive(DriveId(id as u8)) {
            let bytes = payload(layer, expert.0);
            let row = manifest.layers.entry(layer).or_default();
            let entry = DriveExpert { expert, slot: row.len() as u32, digest: Digest::of(&bytes) };
            row.push(entry);
            let (name, extent) = manifest.locate(layer, &entry);
            let file =
                std::fs::File::options().create(true).truncate(false).write(true).open(folder.join(name)).unwrap();
            file.write_all_at(&bytes, extent.offset).unwrap();
        }
        std::fs::write(folder.join(DRIVE_FILE), serde_json::to_vec(&manifest).unwrap()).unwrap();
    }
    plan
}

pub(super) fn folder() -> tempfile::TempDir {
    // Under target/, never on a memory file system, so that direct reads are real.
    // Builds may go to another target folder; this one is on the repository's disk.
    let target = concat!(env!("CARGO_MANIFEST_DIR"), "/target");
    std::fs::create_dir_all(target).unwrap();
    tempfile::tempdir_in(target).unwrap()
}

pub(super) fn options() -> ReaderOptions {
    ReaderOptions {
        buffer_bytes: 1 << 20,
        verify_digests: true,
        trace_reads: 1000,
        trace_barriers: 100,
        ..ReaderOptions::default()
    }
}

pub(super) fn open(plan: &Plan, options: &ReaderOptions) -> Result<ExpertReader, ReaderError> {
    ExpertReader::open(plan, &mounts_of(plan, None).unwrap(), options, Clock::start())
}

pub(super) fn step() -> StepInfo {
    StepInfo { step: 3, phase: Phase::Decode, pos: 17, rows: 1 }
}

pub(super) fn all() -> Vec<ExpertId> {
    (0..EXPERTS).map(ExpertId).collect()
}

/// Takes a whole barrier, checks every byte, and returns the experts in arrival order.
pub(super) fn take_all(
    reader: &mut ExpertReader,
    layer: LayerId,
    experts: &[ExpertId],
) -> Result<Vec<ExpertId>, SourceError> {
    let mut barrier = Barrier::open(reader, &step(), layer, experts)?;
    let mut order = Vec::new();
    while let Some(lease) = barrier.next_arrival()? {
        assert_eq!(lease.bytes(), payload(layer, lease.expert().0));
        order.push(lease.expert());
    }
    let mut sorted = order.clone();
    sorted.sort_unstable();
    let mut asked = experts.to_vec();
    asked.sort_unstable();
    assert_eq!(sorted, asked);
    Ok(order)
}

#[test]
fn every_expert_arrives_once_and_every_read_is_counted_and_traced() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| vec![(e % 2) as u8]);
    let mut reader = open(&plan, &options()).unwrap();
    let handle = reader.handle();
    let order = take_all(&mut reader, LAYERS[0], &all()).unwrap();
    take_all(&mut reader, LAYERS[1], &[ExpertId(5)]).unwrap();
    let seen = handle.counters();
    assert_eq!((seen.barriers, seen.waves, seen.slot_waits, seen.decisions), (2, 2, 0, 9));
    assert_eq!((seen.decisions_with_choice, seen.decisions_not_primary, seen.failovers), (0, 0, 0));
    assert_eq!((seen.drives[0].reads, seen.drives[1].reads), (4, 5));
    assert_eq!(seen.payload_bytes(), 9 * PAYLOAD);
    for drive in &seen.drives {
        let align = u64::from(drive.direct.expect("direct").offset_bytes);
        assert_eq!(drive.read_bytes, drive.reads * PAYLOAD.next_multiple_of(align), "never the slot padding");
        assert_eq!((drive.clat_ns.len(), drive.digests_checked), (drive.reads, drive.reads));
        assert_eq!(drive.engine.completed, drive.reads);
        assert_eq!((drive.errors, drive.non_primary_reads), (0, 0));
    }
    assert_eq!(seen.drives.iter().map(|d| d.landed_last).sum::<u64>(), 2);
    assert_eq!(handle.free_slots(), seen.slots);

    let trace = handle.take_trace().unwrap();
    trace.check_complete().unwrap();
    assert_eq!((trace.reads().len(), trace.barriers().len()), (9, 2));
    let record = trace.barriers()[0];
    assert_eq!((record.barrier, record.step, record.pos, record.layer), (0, 3, 17, LAYERS[0]));
    assert_eq!((record.width, record.bytes, record.hits), (8, 8 * PAYLOAD, 0));
    assert!(
        record.open_ns <= record.first_ns && record.first_ns <= record.last_ns && record.last_ns <= record.close_ns
    );
    assert!(record.gap_read_ns <= record.last_ns - record.first_ns);
    assert!(record.stall_ns <= record.close_ns - record.open_ns);
    let last = trace.reads()[..8].iter().max_by_key(|r| r.completed_ns).unwrap();
    assert_eq!((record.straggler, record.last_ns), (Some(last.drive), last.completed_ns));
    for read in &trace.reads()[..8] {
        assert!(record.open_ns <= read.queued_ns && read.queued_ns <= read.submitted_ns);
        assert!(read.submitted_ns <= read.completed_ns);
        assert_eq!((read.result, read.outcome, read.barrier), (ReadResult::Ok, Outcome::Demand, Some(0)));
        assert_eq!(u16::from(read.drive.0), read.expert.0 % 2);
    }
    assert_eq!(order.len(), 8);
    assert!(handle.take_trace().unwrap().reads().is_empty(), "the taken trace is replaced by an empty one");
}

#[test]
fn sets_larger_than_the_buffer_come_in_waves() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| vec![(e % 2) as u8]);
    let slot = 8192;
    let mut reader = open(&plan, &ReaderOptions { buffer_bytes: 2 * slot + 1, ..options() }).unwrap();
    let handle = reader.handle();
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    let seen = handle.counters();
    assert_eq!((seen.slots, seen.slot_bytes, seen.max_slots_used), (2, slot, 2));
    assert!(seen.waves >= 4, "8 experts through 2 slots: {} waves", seen.waves);
    assert_eq!(seen.slot_waits, 6);
    assert_eq!(handle.free_slots(), 2);
    let message = open(&plan, &ReaderOptions { buffer_bytes: slot, ..options() }).err().unwrap().to_string();
    assert!(message.contains("at least 16384"), "{message}");
}

#[test]
fn a_caller_who_never_drops_gets_an_error_instead_of_a_deadlock() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let mut reader = open(&plan, &ReaderOptions { buffer_bytes: 16_384, read_timeout_ms: 300, ..options() }).unwrap();
    let mut barrier = Barrier::open(&mut reader, &step(), LAYERS[0], &all()).unwrap();
    let held: Vec<Lease> = (0..2).map(|_| barrier.next_arrival().unwrap().unwrap()).collect();
    let error = barrier.next_arrival().unwrap_err();
    assert!(
        matches!(&error, SourceError::Timeout(m) if m.contains("--buffer-bytes") && m.contains("2 slots")),
        "{error}"
    );
    drop(held);
    assert!(barrier.next_arrival().unwrap().is_some(), "and goes on once a lease is dropped");
}

#[test]
fn a_lease_dropped_on_another_thread_wakes_the_reader() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let mut reader = open(&plan, &ReaderOptions { buffer_bytes: 8192, ..options() }).unwrap();
    let mut barrier = Barrier::open(&mut reader, &step(), LAYERS[0], &all()).unwrap();
    let mut count = 0;
    while let Some(lease) = barrier.next_arrival().unwrap() {
        std::thread::spawn(move || drop(lease));
        count += 1;
    }
    assert_eq!(count, 8);
}

#[test]
fn policies_choose_as_named_and_are_counted() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![1, 0]);
    for (policy, reads, not_primary) in [
        (DispatchPolicy::FirstHit, [0, 8], 0),
        (DispatchPolicy::RoundRobin, [4, 4], 4),
        (DispatchPolicy::LeastInflight, [4, 4], 4),
    ] {
        let mut reader = open(&plan, &ReaderOptions { dispatch: policy, ..options() }).unwrap();
        take_all(&mut reader, LAYERS[0], &all()).unwrap();
        let seen = reader.handle().counters();
        assert_eq!([seen.drives[0].reads, seen.drives[1].reads], reads, "{policy:?}");
        assert_eq!((seen.dispatch, seen.decisions, seen.decisions_with_choice), (policy, 8, 8));
        assert_eq!((seen.decisions_not_primary, seen.experts_from_non_primary), (not_primary, not_primary));
        assert_eq!(seen.drives[0].non_primary_reads, not_primary);
    }
}

#[test]
fn a_bad_copy_is_replaced_by_another_and_without_one_the_error_says_where() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| if e == 7 { vec![0] } else { vec![0, 1] });
    let options = ReaderOptions { dispatch: DispatchPolicy::FirstHit, ..options() };
    let mut reader = open(&plan, &options).unwrap();
    let pack = |layer| drive_folder(&plan.drives[0].path, MODEL).join(pack_name(layer));
    // Layer 1: one byte of expert 2 differs. Layer 4: the file ends inside expert 6.
    let file = std::fs::File::options().write(true).open(pack(LAYERS[0])).unwrap();
    file.write_all_at(&[payload(LAYERS[0], 2)[9] ^ 1], 2 * 16_384 + 9).unwrap();
    file.sync_all().unwrap();
    std::fs::File::options().write(true).open(pack(LAYERS[1])).unwrap().set_len(6 * 16_384 + 1000).unwrap();

    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    take_all(&mut reader, LAYERS[1], &all()[..7]).unwrap();
    let seen = reader.handle().counters();
    assert_eq!((seen.failovers, seen.drives[0].errors, seen.drives[0].digest_errors), (2, 2, 1));
    assert_eq!((seen.drives[1].reads, seen.experts_from_non_primary), (2, 2));
    let trace = reader.handle().take_trace().unwrap();
    let results: Vec<_> = trace.reads().iter().map(|r| r.result).filter(|&r| r != ReadResult::Ok).collect();
    assert_eq!(results, [ReadResult::Error, ReadResult::Short]);

    let error = take_all(&mut reader, LAYERS[1], &[ExpertId(7)]).unwrap_err().to_string();
    for part in ["expert 7", "layer 4", "`d0`", "L4.experts", "offset 114688", "0 of 5000", "argodrive stage"] {
        assert!(error.contains(part), "no `{part}` in: {error}");
    }
    assert_eq!(reader.handle().free_slots(), seen.slots, "a failed barrier gives every slot back");
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
}

#[test]
fn what_was_not_taken_is_given_up_and_its_slots_come_back() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let pace = Emulation {
        rate_bytes_per_s: 2_000_000,
        latency_ns: 0,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 0,
        ..Emulation::default()
    };
    let mut mounts = mounts_of(&plan, None).unwrap();
    mounts[0].emulate = Some(pace);
    let options = ReaderOptions { queue_depth: 2, ..options() };
    let mut reader = ExpertReader::open(&plan, &mounts, &options, Clock::start()).unwrap();
    let handle = reader.handle();
    let mut barrier = Barrier::open(&mut reader, &step(), LAYERS[0], &all()).unwrap();
    drop(barrier.next_arrival().unwrap().unwrap());
    drop(barrier);
    take_all(&mut reader, LAYERS[1], &all()).unwrap();
    let seen = handle.counters();
    assert_eq!(seen.drives[0].reads + seen.drives[0].cancelled, 16);
    assert!(seen.drives[0].cancelled >= 4, "{} cancelled", seen.drives[0].cancelled);
    assert_eq!(handle.free_slots(), seen.slots);
    let trace = handle.take_trace().unwrap();
    for read in trace.reads().iter().filter(|r| r.result == ReadResult::Cancelled) {
        assert_eq!((read.barrier, read.outcome), (Some(0), Outcome::Wasted));
    }
    let pace = seen.drives[0].pace.as_ref().unwrap();
    assert!(seen.drives[0].capabilities.emulated && pace.reads >= 9);
    assert_eq!(seen.drives[0].engine.max_in_flight, 2);
    // The second barrier's 8 reads took at least 8 x bytes / rate.
    let record = trace.barriers()[1];
    let read_bytes = seen.drives[0].read_bytes / seen.drives[0].reads;
    assert!(record.last_ns - record.open_ns >= 7 * read_bytes * 500);
}

#[test]
fn a_trace_that_is_too_small_rejects_the_run() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let mut reader = open(&plan, &ReaderOptions { trace_reads: 3, trace_barriers: 1, ..options() }).unwrap();
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    let message = reader.handle().take_trace().unwrap().check_complete().unwrap_err().to_string();
    assert!(message.contains("5 reads and 0 barriers"), "{message}");
    let untraced = open(&plan, &ReaderOptions { trace_reads: 0, trace_barriers: 0, ..options() }).unwrap();
    assert!(untraced.handle().take_trace().is_none());
}

#[test]
fn a_drive_that_does_not_hold_the_plan_is_refused_before_the_run() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |e| vec![(e % 2) as u8]);
    let refused = |plan: &Plan| open(plan, &options()).err().unwrap().to_string();
    let mut more = plan.clone();
    more.layers.get_mut(&LAYERS[1]).unwrap().0[3].push(DriveId(0));
    let message = refused(&more);
    assert!(message.contains("L4-E3") && message.contains("argodrive stage") && message.contains("`d0`"), "{message}");
    let mut other = plan.clone();
    other.expert_bytes += 1;
    assert!(refused(&other).contains("5001"));
    let mut striped = plan.clone();
    striped.shape = Shape::Stripe { unit_bytes: 4096 };
    let ahead = ReaderOptions { prefetch: PrefetchPolicy::SameAsLast, ..options() };
    assert!(open(&striped, &ahead).err().unwrap().to_string().contains("--prefetch none"));
    let mut homeless = plan.clone();
    homeless.layers.get_mut(&LAYERS[1]).unwrap().0[3].clear();
    assert!(refused(&homeless).contains("L4-E3"));
    let specs = [DriveSpec { name: "d0".into(), path: dir.path().into(), emulate: None, faults: Vec::new() }];
    assert!(mounts_of(&plan, Some(&specs)).unwrap_err().to_string().contains("`d1`"));

    let pack = drive_folder(&plan.drives[1].path, MODEL).join(pack_name(LAYERS[0]));
    std::fs::remove_file(pack).unwrap();
    let message = refused(&plan);
    assert!(message.contains("L1.experts") && message.contains("gone"), "{message}");
    std::fs::remove_dir_all(&plan.drives[1].path).unwrap();
    let message = refused(&plan);
    assert!(message.contains("`d1`") && message.contains("not mounted"), "{message}");
}

#[test]
fn direct_reads_of_memory_are_refused_unless_allowed() {
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() || !crate::sys::direct::is_memory_file_system(shm).unwrap() {
        return; // this system has no memory file system there
    }
    let dir = tempfile::tempdir_in(shm).unwrap();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let message = open(&plan, &options()).err().unwrap().to_string();
    assert!(message.contains("memory file system"), "{message}");
    let mut reader = open(&plan, &ReaderOptions { allow_buffered: true, ..options() }).unwrap();
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    let seen = reader.handle().counters();
    assert_eq!(seen.drives[0].direct, None, "the counters show that reads were not direct");
    assert_eq!(seen.drives[0].read_bytes, seen.drives[0].payload_bytes);
}

#[test]
fn wrong_questions_are_answered_with_errors() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let mut reader = open(&plan, &options()).unwrap();
    assert!(reader.next_arrival().is_err(), "no barrier is open");
    let e = ExpertId;
    for asked in [vec![e(0), e(1), e(0)], vec![e(EXPERTS)]] {
        assert!(matches!(reader.open_barrier(&step(), LAYERS[0], &asked), Err(SourceError::Unknown(_))));
    }
    assert!(reader.open_barrier(&step(), LayerId(2), &[e(0)]).is_err());
    take_all(&mut reader, LAYERS[0], &[]).unwrap();
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    reader.open_barrier(&step(), LAYERS[0], &[e(0)]).unwrap();
    assert!(reader.open_barrier(&step(), LAYERS[0], &[e(0)]).is_err(), "one barrier at a time");
}

/// An engine whose reads fail with `errno`, or (0) stay outstanding until they are cancelled.
pub(super) struct BadEngine {
    errno: i32,
    held: Vec<ReadRequest>,
    done: Vec<Completion>,
    signal: Arc<Signal>,
}

impl BadEngine {
    pub(super) fn new(errno: i32, signal: Arc<Signal>) -> Self {
        Self { errno, held: Vec::new(), done: Vec::new(), signal }
    }

    fn finish(&mut self, request: ReadRequest, outcome: ReadOutcome) {
        let ReadRequest { tag, slot, .. } = request;
        self.done.push(Completion { tag, slot, submitted_ns: 0, completed_ns: 0, outcome });
        self.signal.raise();
    }
}

impl IoEngine for BadEngine {
    fn submit(&mut self, batch: &mut Vec<ReadRequest>) -> usize {
        let count = batch.len();
        for request in batch.drain(..) {
            match self.errno {
                0 => self.held.push(request),
                errno => self.finish(request, ReadOutcome::Failed { errno }),
            }
        }
        count
    }

    fn reap(&mut self, _min: usize, _deadline: Instant, out: &mut Vec<Completion>) -> usize {
        let count = self.done.len();
        out.append(&mut self.done);
        count
    }

    fn cancel(&mut self, tag: u64) -> bool {
        let Some(at) = self.held.iter().position(|r| r.tag == tag) else { return false };
        let request = self.held.remove(at);
        self.finish(request, ReadOutcome::Cancelled);
        true
    }

    fn withdraw(&mut self, _tag: u64) -> bool {
        false // all of its reads have begun
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: "bad", queue_depth: 1, max_requests: 64, emulated: false, stamps_late: false }
    }

    fn counters(&self) -> Arc<EngineCounters> {
        Arc::default()
    }
}

/// A reader whose drive 0 is served by a [`BadEngine`], drive 1 (if there is one) by a good one.
fn with_bad_drive(plan: &Plan, errno: i32) -> ExpertReader {
    let dispatch = DispatchPolicy::FirstHit;
    bad_drive_with(plan, errno, ReaderOptions { dispatch, read_timeout_ms: 100, ..options() })
}

pub(super) fn bad_drive_with(plan: &Plan, errno: i32, options: ReaderOptions) -> ExpertReader {
    let mounts = mounts_of(plan, None).unwrap();
    let ids = (0..mounts.len()).map(|d| DriveId(d as u8));
    let drives = ids.zip(&mounts).map(|(id, m)| open_drive(plan, id, m, &options).unwrap()).collect();
    let clock = Clock::start();
    let made = std::cell::Cell::new(0);
    ExpertReader::assemble(plan, drives, vec![None; mounts.len()], &options, clock, |spec| {
        let EngineSpec { files, requests, signal, .. } = spec;
        if made.replace(made.get() + 1) == 0 {
            return Ok(Box::new(BadEngine::new(errno, signal)));
        }
        Ok(Box::new(crate::io::psync::PsyncEngine::new(files, 2, requests, signal, clock)?))
    })
    .unwrap()
}

#[test]
fn device_errors_and_silence_fail_over_but_our_own_bugs_do_not() {
    let dir = folder();
    let plan = stage(dir.path(), 2, |_| vec![0, 1]);
    for errno in [libc::EIO, libc::ENODEV, libc::ENXIO, libc::ESTALE, libc::EREMOTEIO] {
        let mut reader = with_bad_drive(&plan, errno);
        take_all(&mut reader, LAYERS[0], &all()).unwrap();
        let seen = reader.handle().counters();
        assert_eq!((seen.failovers, seen.drives[0].errors, seen.drives[1].reads), (8, 8, 8));
    }
    let mut reader = with_bad_drive(&plan, 0);
    take_all(&mut reader, LAYERS[0], &all()).unwrap();
    let seen = reader.handle().counters();
    assert_eq!((seen.failovers, seen.drives[0].timeouts, seen.drives[1].reads), (8, 8, 8));
    assert_eq!(reader.handle().free_slots(), seen.slots);
    for errno in [libc::EINVAL, libc::EFAULT, libc::EBADF] {
        let mut reader = with_bad_drive(&plan, errno);
        let message = take_all(&mut reader, LAYERS[0], &all()).unwrap_err().to_string();
        assert!(message.contains("bug in argodrive") && message.contains("`d0`"), "{message}");
        assert_eq!(reader.handle().counters().failovers, 0);
    }
}

#[test]
fn a_silent_drive_without_another_copy_is_named() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let error = take_all(&mut with_bad_drive(&plan, 0), LAYERS[0], &[ExpertId(3)]).unwrap_err();
    assert!(matches!(&error, SourceError::Timeout(m) if m.contains("expert 3") && m.contains("`d0`")), "{error}");
}
