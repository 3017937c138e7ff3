//! Faults over a real engine: which reads they fall on, what they do, and that every slot comes back when it should.

use super::super::psync::PsyncEngine;
use super::super::{ReadRequest, Slab};
use super::*;
use std::io::Write;

const BYTES: u32 = 4096;
const READS: u64 = 12;

struct Rig {
    engine: FaultyEngine,
    drive: Arc<FaultyDrive>,
    slab: Slab,
    signal: Arc<Signal>,
}

fn rig(rules: &[&str]) -> Rig {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![0x5a; BYTES as usize * READS as usize]).unwrap();
    let (signal, clock) = (Arc::new(Signal::default()), Clock::start());
    let slab = Slab::new(READS as u32, u64::from(BYTES), Arc::clone(&signal)).unwrap();
    let inner = PsyncEngine::new(vec![file], 2, READS as u32, Arc::clone(&signal), clock).unwrap();
    let drive = FaultyDrive::new("a", rules.iter().map(|r| r.parse().unwrap()).collect());
    let engine = FaultyEngine::new(Arc::clone(&drive), Arc::clone(&signal), clock, Box::new(inner)).unwrap();
    Rig { engine, drive, slab, signal }
}

impl Rig {
    fn submit(&mut self, tags: std::ops::Range<u64>) {
        let request = |tag: u64| ReadRequest {
            tag,
            file: 0,
            offset: tag * u64::from(BYTES),
            len: BYTES,
            need: BYTES,
            slot: self.slab.take().unwrap(),
        };
        let mut batch: Vec<ReadRequest> = tags.map(request).collect();
        let count = batch.len();
        assert_eq!(self.engine.submit(&mut batch), count);
    }

    /// `count` completions, by tag.
    fn reap(&mut self, count: usize) -> Vec<Completion> {
        let mut out = Vec::new();
        self.engine.reap(count, Instant::now() + Duration::from_secs(20), &mut out);
        assert_eq!(out.len(), count);
        out.sort_by_key(|c| c.tag);
        out
    }

    fn injected(&self) -> Vec<u64> {
        self.drive.snapshot().injected.iter().map(|r| r.1).collect()
    }
}

fn changed_bits(completion: &Completion) -> u32 {
    completion.slot.bytes().iter().map(|b| (b ^ 0x5a).count_ones()).sum()
}

#[test]
fn each_kind_falls_on_the_reads_it_names_and_is_counted() {
    let mut rig = rig(&["eio @1..3", "vanish @3", "short @4", "flip @5..7", "stall 30ms @7"]);
    rig.submit(0..READS);
    let ended = rig.reap(READS as usize);
    let done = ReadOutcome::Done { bytes: BYTES };
    let failed = |errno| ReadOutcome::Failed { errno };
    let outcomes: Vec<ReadOutcome> = ended.iter().map(|c| c.outcome).collect();
    assert_eq!(
        outcomes[..5],
        [done, failed(libc::EIO), failed(libc::EIO), failed(libc::ENODEV), ReadOutcome::Short { bytes: 2048 }]
    );
    assert!(outcomes[5..].iter().all(|o| *o == done));
    let bits: Vec<u32> = ended[5..].iter().map(changed_bits).collect();
    assert_eq!(bits, [1, 1, 0, 0, 0, 0, 0], "one bit each");
    let took = |at: usize| ended[at].completed_ns - ended[at].submitted_ns;
    assert!(took(7) >= 25_000_000, "{} ns", took(7));
    assert_eq!(rig.injected(), [2, 1, 1, 2, 1]);
    assert_eq!(rig.drive.snapshot().reads, READS);
    assert_eq!(
        rig.engine.counters().snapshot().completed,
        READS - 3,
        "a read that fails never reaches the engine behind"
    );
    drop(ended);
    assert_eq!(rig.slab.free_slots(), READS as u32);
}

#[test]
fn wrong_bytes_are_the_same_wrong_bytes_each_time() {
    let bytes = || {
        let mut rig = rig(&["flip 50% seed=11"]);
        // One by one, so that the numbers do not depend on threads.
        let all: Vec<Vec<u8>> = (0..READS)
            .map(|tag| {
                rig.submit(tag..tag + 1);
                rig.reap(1)[0].slot.bytes().to_vec()
            })
            .collect();
        (all, rig.injected())
    };
    let (first, second) = (bytes(), bytes());
    assert_eq!(first, second);
    assert!((1..READS).contains(&first.1[0]), "some and not all: {:?}", first.1);
}

#[test]
fn a_slowed_drive_keeps_its_rate_and_a_silent_one_its_slots() {
    let mut rig = rig(&["slow 409600B/s @0..4", "stall @4"]);
    rig.submit(0..5);
    let ended = rig.reap(4);
    let first = ended.iter().map(|c| c.submitted_ns).min().unwrap();
    for (n, completion) in ended.iter().enumerate() {
        assert!(completion.completed_ns - first >= (n as u64 + 1) * 9_900_000, "10 ms for each read");
    }
    assert_eq!(rig.injected(), [4, 1]);
    assert!(rig.engine.cancel(4), "it is outstanding");
    assert!(!rig.engine.withdraw(4));
    let mut out = Vec::new();
    rig.engine.reap(1, Instant::now() + Duration::from_millis(30), &mut out);
    assert!(out.is_empty(), "a hung read does not come back because it was given up");
    drop(ended);
    assert_eq!(rig.slab.free_slots(), READS as u32 - 1);
    let Rig { engine, slab, signal, .. } = rig;
    drop(engine);
    assert_eq!(slab.free_slots(), READS as u32, "with the engine goes what it held");
    drop(signal);
}

#[test]
fn a_read_given_up_while_it_is_only_slow_comes_back_at_once() {
    let mut rig = rig(&["slow 1B/s"]);
    rig.submit(0..1);
    let mut out = Vec::new();
    while rig.engine.flights[0].back.is_none() {
        rig.engine.reap(0, Instant::now(), &mut out);
    }
    assert!(out.is_empty() && rig.engine.cancel(0));
    assert_eq!(rig.reap(1)[0].outcome, ReadOutcome::Cancelled);
    assert_eq!((rig.injected(), rig.drive.snapshot().missed), (vec![0], vec![1]));
}
