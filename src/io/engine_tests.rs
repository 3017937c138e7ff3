//! One suite for every engine, paced ones included: what is promised by [`IoEngine`] holds whatever carries the reads
//! out. Files lie on the disk of the build folder, so that direct reads are direct.

use super::buffered::BufferedEngine;
use super::mmap::MmapEngine;
use super::paced::{PacedDrive, PacedEngine};
use super::psync::PsyncEngine;
use super::*;
use crate::clock::Clock;
use crate::drive::spec::Emulation;
use crate::sys::direct::open_direct;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const BLOCK: u32 = 4096;
/// Not a whole number of sectors.
const FILE_BYTES: u64 = 64 * BLOCK as u64 + 1000;

/// A way to build an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    pub(super) kind: EngineKind,
    direct: bool,
    paced: bool,
    sqpoll: bool,
}

const fn variant(kind: EngineKind, direct: bool) -> Variant {
    Variant { kind, direct, paced: false, sqpoll: false }
}

pub(super) fn variants() -> Vec<Variant> {
    let mut all = vec![
        variant(EngineKind::Psync, true),
        variant(EngineKind::Psync, false),
        variant(EngineKind::Mmap, false),
        variant(EngineKind::Buffered, false),
    ];
    #[cfg(target_os = "linux")]
    {
        all.push(variant(EngineKind::Uring, true));
        all.push(variant(EngineKind::Uring, false));
        all.push(Variant { sqpoll: true, ..variant(EngineKind::Uring, true) });
    }
    let paced: Vec<Variant> = all.iter().map(|&v| Variant { paced: true, ..v }).collect();
    all.extend(paced);
    all
}

pub(super) struct Rig {
    variant: Variant,
    pub(super) engine: Box<dyn IoEngine>,
    pub(super) slab: Slab,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

/// Byte `at` of the test file: no two blocks are alike.
fn byte_at(at: u64) -> u8 {
    ((at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (at % 8 * 8)) as u8
}

pub(super) fn content(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(byte_at).collect()
}

fn folder() -> tempfile::TempDir {
    // Builds may go to another target folder; this one is on the repository's disk.
    let target = concat!(env!("CARGO_MANIFEST_DIR"), "/target");
    std::fs::create_dir_all(target).unwrap();
    tempfile::tempdir_in(target).unwrap()
}

fn open(variant: Variant, path: &Path) -> File {
    if variant.direct { open_direct(path).unwrap().file } else { File::open(path).unwrap() }
}

fn build(
    v: Variant,
    files: Vec<File>,
    slab: &Slab,
    depth: u32,
    signal: &Arc<Signal>,
) -> Result<Box<dyn IoEngine>, IoSetupError> {
    let clock = Clock::start();
    let plain = |signal: Arc<Signal>| -> Result<Box<dyn IoEngine>, IoSetupError> {
        let max = slab.slots();
        Ok(match v.kind {
            EngineKind::Psync => Box::new(PsyncEngine::new(files, depth, max, signal, clock)?),
            EngineKind::Mmap => Box::new(MmapEngine::new(files, depth, max, signal, clock)?),
            EngineKind::Buffered => Box::new(BufferedEngine::new(files, depth, max, signal, clock)?),
            #[cfg(target_os = "linux")]
            EngineKind::Uring => {
                let options = uring::UringOptions { sqpoll: v.sqpoll, shared: v.paced };
                Box::new(uring::UringEngine::new(files, slab, depth, slab.slots(), options, signal, clock)?)
            }
            #[cfg(not(target_os = "linux"))]
            EngineKind::Uring => unreachable!(),
        })
    };
    if !v.paced {
        return plain(Arc::clone(signal));
    }
    let pace = Emulation {
        rate_bytes_per_s: 20_000_000_000,
        latency_ns: 1000,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 0,
        ..Emulation::default()
    };
    let drive = PacedDrive::new("d", pace)?;
    Ok(Box::new(PacedEngine::new(drive, Arc::clone(signal), clock, plain)?))
}

/// An engine over one file of [`FILE_BYTES`], at `depth` with `slots` slots of 4 blocks.
pub(super) fn rig(variant: Variant, depth: u32, slots: u32) -> Rig {
    let dir = folder();
    let path = dir.path().join("data");
    std::fs::write(&path, content(0, FILE_BYTES)).unwrap();
    let signal = Arc::new(Signal::default());
    let slab = Slab::new(slots, u64::from(4 * BLOCK), Arc::clone(&signal)).unwrap();
    let engine = build(variant, vec![open(variant, &path)], &slab, depth, &signal).unwrap();
    assert_eq!(engine.capabilities().name, variant.kind.name());
    assert_eq!(engine.capabilities().emulated, variant.paced);
    Rig { variant, engine, slab, path, _dir: dir }
}

impl Rig {
    pub(super) fn request(&self, tag: u64, offset: u64, len: u32, need: u32) -> ReadRequest {
        ReadRequest { tag, file: 0, offset, len, need, slot: self.slab.take().unwrap() }
    }

    pub(super) fn submit(&mut self, mut batch: Vec<ReadRequest>) {
        let count = batch.len();
        assert_eq!(self.engine.submit(&mut batch), count, "{:?}", self.variant);
    }

    pub(super) fn reap(&mut self, count: usize) -> Vec<Completion> {
        let mut out = Vec::new();
        assert_eq!(self.engine.reap(count, soon(), &mut out), count, "{:?}", self.variant);
        out
    }

    /// Carries out one read and returns how it ended.
    pub(super) fn read(&mut self, offset: u64, len: u32, need: u32) -> Completion {
        let request = self.request(77, offset, len, need);
        self.submit(vec![request]);
        self.reap(1).pop().unwrap()
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn many_random_reads_bring_what_pread_brings_and_are_counted_by_the_engine_that_did_them() {
    for v in variants() {
        let mut rig = rig(v, 3, 8);
        let file = File::open(&rig.path).unwrap();
        let mut rng = fastrand::Rng::with_seed(7);
        let mut expected = std::collections::HashMap::new();
        let (mut tag, mut left) = (0u64, 300usize);
        while left > 0 {
            let mut batch = Vec::new();
            while let Some(slot) = rig.slab.take() {
                let (offset, len) = (rng.u64(..61) * u64::from(BLOCK), rng.u32(1..=4) * BLOCK);
                batch.push(ReadRequest { tag, file: 0, offset, len, need: len, slot });
                expected.insert(tag, (offset, len));
                tag += 1;
            }
            rig.submit(batch);
            let mut out = Vec::new();
            left = left.saturating_sub(rig.engine.reap(1, soon(), &mut out));
            for c in out {
                let (offset, len) = expected.remove(&c.tag).unwrap();
                let mut bytes = vec![0; len as usize];
                file.read_exact_at(&mut bytes, offset).unwrap();
                assert_eq!(c.outcome, ReadOutcome::Done { bytes: len }, "{v:?}");
                assert!(c.slot.bytes()[..len as usize] == bytes[..], "{v:?}: block at {offset}");
                assert!(c.submitted_ns <= c.completed_ns, "{v:?}");
            }
        }
        let rest = rig.reap(expected.len());
        drop(rest);
        let seen = rig.engine.counters().snapshot();
        assert_eq!((seen.submitted, seen.completed, seen.cancelled), (tag, tag, 0), "{v:?}");
        assert!((1..=3).contains(&seen.max_in_flight) && seen.waited > 0, "{v:?}: {seen:?}");
        for kind in EngineKind::ALL {
            assert_eq!(seen.work.reads_of(kind), if kind == v.kind { tag } else { 0 }, "{v:?} {kind}");
        }
        let work = seen.work;
        if v.kind == EngineKind::Uring {
            assert_eq!((work.fixed_buffer_reads, work.fixed_file_reads), (tag, tag), "{v:?}");
            assert_eq!((work.registered_buffers, work.registered_files, work.enter_errors), (1, 1, 0), "{v:?}");
            assert_eq!(work.queued, tag + work.continued + work.repeated, "{v:?}");
            assert!(work.features & 1 << 8 != 0, "waits have timeouts: {v:?}");
            assert_eq!((work.sq_thread != 0, work.setup_flags & 2 != 0), (v.sqpoll, v.sqpoll), "{v:?}: {work:?}");
            let deferred = work.setup_flags & uring_setup::SETUP_DEFERRED;
            assert!(deferred == 0 || (deferred == uring_setup::SETUP_DEFERRED && !v.sqpoll && !v.paced), "{v:?}");
            assert!(v.sqpoll || work.submit_enters < tag, "reads are handed over in batches: {v:?} {work:?}");
        } else {
            assert_eq!((work.queued, work.enters, work.setup_flags, work.sq_thread), (0, 0, 0, 0), "{v:?}");
        }
        assert_eq!(rig.slab.free_slots(), rig.slab.slots(), "{v:?}");
    }
}

#[test]
fn the_end_of_the_file_may_cut_padding_but_not_payload() {
    for v in variants() {
        let mut rig = rig(v, 2, 4);
        let last = 64 * u64::from(BLOCK);
        let done = rig.read(last, BLOCK, 1000);
        assert_eq!(done.outcome, ReadOutcome::Done { bytes: 1000 }, "{v:?}");
        assert!(done.slot.bytes()[..1000] == content(last, 1000)[..], "{v:?}");
        drop(done);
        assert_eq!(rig.read(last, BLOCK, 1001).outcome, ReadOutcome::Short { bytes: 1000 }, "{v:?}");
        let across = rig.read(last - 2 * u64::from(BLOCK), 4 * BLOCK, 2 * BLOCK + 1000);
        assert_eq!(across.outcome, ReadOutcome::Done { bytes: 2 * BLOCK + 1000 }, "{v:?}");
        drop(across);
        let across = rig.read(last - 2 * u64::from(BLOCK), 4 * BLOCK, 4 * BLOCK);
        assert_eq!(across.outcome, ReadOutcome::Short { bytes: 2 * BLOCK + 1000 }, "{v:?}");
        drop(across);
        for beyond in [last + u64::from(BLOCK), 1 << 40] {
            assert_eq!(rig.read(beyond, BLOCK, BLOCK).outcome, ReadOutcome::Short { bytes: 0 }, "{v:?}");
        }
        for impossible in [i64::MAX as u64 / 4096 * 4096 + 4096, u64::MAX / 4096 * 4096] {
            let outcome = rig.read(impossible, BLOCK, BLOCK).outcome;
            assert_eq!(outcome, ReadOutcome::Failed { errno: libc::EINVAL }, "{v:?} at {impossible}");
        }
        assert_eq!(rig.slab.free_slots(), 4, "{v:?}");
    }
}

#[test]
fn offsets_that_direct_reads_refuse_are_errors_and_cached_reads_take_them() {
    for v in variants() {
        let mut rig = rig(v, 1, 2);
        let odd = rig.read(4097, 3 * BLOCK + 17, 3 * BLOCK + 17);
        if v.direct {
            assert_eq!(odd.outcome, ReadOutcome::Failed { errno: libc::EINVAL }, "{v:?}");
        } else {
            assert_eq!(odd.outcome, ReadOutcome::Done { bytes: 3 * BLOCK + 17 }, "{v:?}");
            assert!(odd.slot.bytes()[..12305] == content(4097, 12305)[..], "{v:?}");
        }
    }
}

#[test]
fn requests_that_make_no_sense_complete_with_the_kernels_errors() {
    for v in variants() {
        let mut rig = rig(v, 2, 4);
        let mut unknown = rig.request(1, 0, BLOCK, BLOCK);
        unknown.file = 7;
        let (needy, long) = (rig.request(2, 0, BLOCK, BLOCK + 1), rig.request(3, 0, 5 * BLOCK, BLOCK));
        rig.submit(vec![unknown, needy, long]);
        let out = rig.reap(3);
        let outcome = |tag| out.iter().find(|c| c.tag == tag).unwrap().outcome;
        assert_eq!(outcome(1), ReadOutcome::Failed { errno: libc::EBADF }, "{v:?}");
        assert_eq!(outcome(2), ReadOutcome::Failed { errno: libc::EFAULT }, "{v:?}");
        assert_eq!(outcome(3), ReadOutcome::Failed { errno: libc::EFAULT }, "{v:?}");
    }
}

#[test]
fn a_descriptor_that_cannot_be_read_is_its_own_error() {
    for v in variants().into_iter().filter(|v| v.kind != EngineKind::Mmap && !v.direct) {
        let dir = folder();
        let path = dir.path().join("write-only");
        let file = File::options().create(true).append(true).open(&path).unwrap();
        let signal = Arc::new(Signal::default());
        let slab = Slab::new(1, 4096, Arc::clone(&signal)).unwrap();
        let mut engine = build(v, vec![file], &slab, 1, &signal).unwrap();
        let slot = slab.take().unwrap();
        engine.submit(&mut vec![ReadRequest { tag: 1, file: 0, offset: 0, len: 512, need: 512, slot }]);
        let mut out = Vec::new();
        engine.reap(1, soon(), &mut out);
        assert_eq!(out[0].outcome, ReadOutcome::Failed { errno: libc::EBADF }, "{v:?}");
    }
    let dir = folder();
    let path = dir.path().join("write-only");
    std::fs::write(&path, b"data").unwrap();
    let file = File::options().append(true).open(&path).unwrap();
    let refused = MmapEngine::new(vec![file], 1, 1, Arc::default(), Clock::start()).map(drop).unwrap_err();
    assert!(refused.to_string().contains("file 0 cannot be mapped"), "{refused}");
}

#[test]
fn offsets_beyond_two_and_four_gibibytes_are_read_where_they_are() {
    for v in variants() {
        let mut rig = rig(v, 2, 4);
        let mut file = File::options().write(true).open(&rig.path).unwrap();
        file.set_len((1 << 32) + (1 << 20)).unwrap();
        let places = [(1u64 << 31) - 4096, 1 << 31, (1 << 32) - 4096, 1 << 32, (1 << 32) + 8192];
        for &at in &places {
            file.seek(SeekFrom::Start(at)).unwrap();
            file.write_all(&content(at, 4096)).unwrap();
        }
        file.sync_all().unwrap();
        // Mappings see the length at opening, so open again.
        let signal = Arc::new(Signal::default());
        rig.slab = Slab::new(2, 4096, Arc::clone(&signal)).unwrap();
        rig.engine = build(v, vec![open(v, &rig.path)], &rig.slab, 2, &signal).unwrap();
        for &at in &places {
            let done = rig.read(at, BLOCK, BLOCK);
            assert_eq!(done.outcome, ReadOutcome::Done { bytes: BLOCK }, "{v:?} at {at}");
            assert!(done.slot.bytes() == &content(at, 4096)[..], "{v:?} at {at}");
        }
    }
}

#[test]
fn a_file_cut_off_after_opening_is_short_and_kills_nobody() {
    for v in variants() {
        let mut rig = rig(v, 1, 2);
        assert_eq!(rig.read(20 * 4096, BLOCK, BLOCK).outcome, ReadOutcome::Done { bytes: BLOCK }, "{v:?}");
        File::options().write(true).open(&rig.path).unwrap().set_len(20 * 4096 + 512).unwrap();
        assert_eq!(rig.read(20 * 4096, BLOCK, BLOCK).outcome, ReadOutcome::Short { bytes: 512 }, "{v:?}");
        assert_eq!(rig.read(40 * 4096, BLOCK, BLOCK).outcome, ReadOutcome::Short { bytes: 0 }, "{v:?}");
    }
}

#[test]
fn what_does_not_fit_stays_with_the_caller() {
    for v in variants() {
        let mut rig = rig(v, 1, 2);
        let spare = Slab::new(1, 4096, Arc::default()).unwrap();
        let mut batch = vec![rig.request(0, 0, BLOCK, BLOCK), rig.request(1, 4096, BLOCK, BLOCK)];
        batch.push(ReadRequest { tag: 2, file: 0, offset: 8192, len: BLOCK, need: BLOCK, slot: spare.take().unwrap() });
        assert_eq!(rig.engine.submit(&mut batch), 2, "{v:?}");
        assert_eq!((batch.len(), batch[0].tag), (1, 2), "{v:?}");
        drop(rig.reap(2));
        assert_eq!(rig.engine.submit(&mut batch), 1, "room again: {v:?}");
        let foreign = rig.reap(1).pop().unwrap();
        assert!(foreign.slot.bytes() == &content(8192, 4096)[..], "a slot of another slab is served: {v:?}");
        if v.kind == EngineKind::Uring {
            let work = rig.engine.counters().snapshot().work;
            assert_eq!((work.fixed_buffer_reads, work.fixed_file_reads), (2, 3), "and not counted as registered");
        }
    }
}

#[test]
fn reap_returns_at_its_deadline_and_no_engine_takes_a_depth_of_nothing() {
    for v in variants() {
        let mut rig = rig(v, 1, 1);
        let until = Instant::now() + Duration::from_millis(2);
        assert_eq!(rig.engine.reap(1, until, &mut Vec::new()), 0, "{v:?}");
        assert!(Instant::now() >= until, "{v:?}");
        for depth in [0, MAX_QUEUE_DEPTH + 1] {
            let signal = Arc::new(Signal::default());
            let refused = build(v, vec![open(v, &rig.path)], &rig.slab, depth, &signal).map(drop).unwrap_err();
            assert!(refused.to_string().contains("queue depth"), "{v:?}: {refused}");
        }
    }
}

#[test]
fn one_thread_waits_for_any_of_several_drives() {
    let signal = Arc::new(Signal::default());
    let slab = Slab::new(16, 4096, Arc::clone(&signal)).unwrap();
    let dir = folder();
    let mut engines: Vec<Box<dyn IoEngine>> = Vec::new();
    for (at, v) in variants().into_iter().enumerate() {
        let path = dir.path().join(at.to_string());
        std::fs::write(&path, vec![at as u8; 4096]).unwrap();
        engines.push(build(v, vec![open(v, &path)], &slab, 2, &signal).unwrap());
    }
    for round in 0..50 {
        for (at, engine) in engines.iter_mut().enumerate() {
            let slot = slab.take().unwrap();
            engine.submit(&mut vec![ReadRequest { tag: at as u64, file: 0, offset: 0, len: BLOCK, need: BLOCK, slot }]);
        }
        let (mut left, mut out) = (engines.len(), Vec::new());
        while left > 0 {
            let seen = signal.epoch();
            let now = Instant::now();
            let came: usize = engines.iter_mut().map(|e| e.reap(0, now, &mut out)).sum();
            left -= came;
            if came == 0 {
                assert!(signal.wait(seen, soon()), "round {round}: {left} never came");
            }
        }
        assert!(out.iter().all(|c| c.slot.bytes().iter().all(|&b| u64::from(b) == c.tag)));
    }
}

#[test]
fn engines_of_the_page_cache_refuse_files_that_go_past_it() {
    for kind in [EngineKind::Mmap, EngineKind::Buffered] {
        let v = variant(kind, true);
        let path = rig(variant(EngineKind::Psync, true), 1, 1);
        let signal = Arc::new(Signal::default());
        let refused = build(v, vec![open(v, &path.path)], &path.slab, 1, &signal).map(drop).unwrap_err().to_string();
        assert!(refused.contains(kind.name()) && refused.contains("direct"), "{refused}");
    }
}
