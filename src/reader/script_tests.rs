//! Prefetch over an engine that follows a script, so that the order of what it is asked can be told exactly.

use super::ahead_tests::{guesses, ids, pass, settle, take, told};
use super::tests::{LAYERS, PAYLOAD, folder, payload, stage};
use super::*;
use crate::clock::Clock;
use crate::ids::DriveId;
use crate::io::{Capabilities, Completion, EngineCounters, IoEngine, ReadOutcome, ReadRequest, Signal};
use crate::layout::plan::Plan;
use crate::source::ExpertSource;
use crate::trace::events::{Cause, Outcome, Purpose, ReadResult};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Where a scripted engine's reads are: waiting, begun, ended.
#[derive(Default)]
struct Script {
    log: Vec<(Pool, &'static str, u64)>,
    /// Reads that each prefetch engine begins by itself.
    begins: usize,
    fails: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pool {
    Demand,
    Prefetch,
}

/// An engine whose prefetch reads begin up to a number and end only when told; demand ends at once.
struct Scripted {
    pool: Pool,
    script: Arc<Mutex<Script>>,
    waiting: Vec<ReadRequest>,
    begun: Vec<(ReadRequest, bool)>,
    done: Vec<Completion>,
    clock: Clock,
    signal: Arc<Signal>,
}

impl Scripted {
    fn complete(&mut self, mut request: ReadRequest, outcome: ReadOutcome) {
        // Packs have slots of 16 KiB in ascending expert order; files are layers in ascending order.
        let layer = LAYERS[request.file as usize];
        let expert = (request.offset / 16_384) as u16;
        if matches!(outcome, ReadOutcome::Done { .. }) {
            request.slot.bytes_mut()[..PAYLOAD as usize].copy_from_slice(&payload(layer, expert));
        }
        let ReadRequest { tag, slot, .. } = request;
        let now = self.clock.now_ns();
        self.done.push(Completion { tag, slot, submitted_ns: now, completed_ns: now, outcome });
        self.signal.raise();
    }

    fn say(&self, what: &'static str, offset: u64) {
        self.script.lock().unwrap().log.push((self.pool, what, offset / 16_384));
    }
}

impl IoEngine for Scripted {
    fn submit(&mut self, batch: &mut Vec<ReadRequest>) -> usize {
        let count = batch.len();
        for request in std::mem::take(batch) {
            self.say("asked", request.offset);
            let begins = self.script.lock().unwrap().begins;
            if self.pool == Pool::Demand {
                self.complete(request, ReadOutcome::Done { bytes: PAYLOAD as u32 });
            } else if self.begun.len() < begins {
                self.say("begun", request.offset);
                self.begun.push((request, false));
            } else {
                self.waiting.push(request);
            }
        }
        count
    }

    fn reap(&mut self, _min: usize, _deadline: Instant, out: &mut Vec<Completion>) -> usize {
        let fails = self.script.lock().unwrap().fails;
        if self.script.lock().unwrap().begins == 0 || fails {
            for (request, cancelled) in std::mem::take(&mut self.begun) {
                let outcome = match cancelled {
                    true => ReadOutcome::Cancelled,
                    false if fails => ReadOutcome::Failed { errno: libc::EIO },
                    false => ReadOutcome::Done { bytes: PAYLOAD as u32 },
                };
                self.complete(request, outcome);
            }
        }
        let count = self.done.len();
        out.append(&mut self.done);
        count
    }

    fn cancel(&mut self, tag: u64) -> bool {
        if let Some((request, cancelled)) = self.begun.iter_mut().find(|b| b.0.tag == tag) {
            *cancelled = true;
            let offset = request.offset;
            self.say("cancelled", offset);
            return true;
        }
        self.withdraw(tag)
    }

    fn withdraw(&mut self, tag: u64) -> bool {
        let Some(at) = self.waiting.iter().position(|r| r.tag == tag) else { return false };
        let request = self.waiting.remove(at);
        self.say("withdrawn", request.offset);
        self.complete(request, ReadOutcome::Cancelled);
        true
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: "scripted", queue_depth: 2, max_requests: 64, emulated: false, stamps_late: false }
    }

    fn counters(&self) -> Arc<EngineCounters> {
        Arc::default()
    }
}

fn scripted(plan: &Plan, options: &ReaderOptions, begins: usize) -> (ExpertReader, Arc<Mutex<Script>>) {
    let mounts = mounts_of(plan, None).unwrap();
    let drives = vec![open_drive(plan, DriveId(0), &mounts[0], options).unwrap()];
    let script = Arc::new(Mutex::new(Script { begins, ..Script::default() }));
    let made = std::cell::Cell::new(0);
    let clock = Clock::start();
    let reader = ExpertReader::assemble(plan, drives, vec![None], options, clock, |spec| {
        let pool = if made.replace(made.get() + 1) == 0 { Pool::Demand } else { Pool::Prefetch };
        let (script, signal) = (Arc::clone(&script), spec.signal);
        let (waiting, begun, done) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Box::new(Scripted { pool, script, waiting, begun, done, clock, signal }))
    });
    (reader.unwrap(), script)
}

fn log(script: &Arc<Mutex<Script>>) -> Vec<(Pool, &'static str, u64)> {
    std::mem::take(&mut script.lock().unwrap().log)
}

#[test]
fn demand_overtakes_what_has_not_begun_and_adopts_what_has() {
    use Pool::{Demand, Prefetch};
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let (mut reader, script) = scripted(&plan, &told(2), 2);
    // Expert 0 is demanded later, 1 is not; 2, 3 and 4 only wait; 6 is for the next layer.
    reader.hint(&pass(0), LAYERS[0], &guesses(&[0, 1, 2, 3, 4]));
    reader.hint(&pass(0), LAYERS[1], &guesses(&[6]));
    let asked = |e| (Prefetch, "asked", e);
    let mut want = vec![asked(0), (Prefetch, "begun", 0), asked(1), (Prefetch, "begun", 1)];
    want.extend([2, 3, 4, 6].map(asked));
    assert_eq!(log(&script), want);

    reader.open_barrier(&pass(0), LAYERS[0], &ids(&[0, 2, 5])).unwrap();
    let mut want: Vec<_> = [2, 3, 4, 6].map(|e| (Prefetch, "withdrawn", e)).to_vec();
    // All of it before any demand is asked for; then the loser that had begun.
    want.extend([(Prefetch, "cancelled", 1), (Demand, "asked", 2), (Demand, "asked", 5)]);
    let mut seen = log(&script);
    seen[5..7].sort_unstable_by_key(|l| l.2);
    assert_eq!(seen, want, "and 6 is not asked for while the drive has demand");

    for _ in 0..2 {
        let lease = reader.next_arrival().unwrap().unwrap();
        assert!([2, 5].contains(&lease.expert().0));
    }
    assert!(log(&script).is_empty(), "expert 0 is still on its way, and demanded: the drive is busy");
    script.lock().unwrap().begins = 0; // everything that has begun ends
    let lease = reader.next_arrival().unwrap().unwrap();
    assert_eq!((lease.expert().0, lease.bytes()), (0, payload(LAYERS[0], 0).as_slice()));
    assert_eq!(log(&script), [(Prefetch, "asked", 6)], "the drive is free of demand: what waits is handed over again");
    drop(lease);
    assert!(reader.next_arrival().unwrap().is_none());
    reader.close_barrier();
    let before = reader.handle().counters();
    assert_eq!((before.prefetch.overtaken, before.prefetch.losers, before.prefetch.held_back), (1, 3, 1));
    assert_eq!(before.prefetch.demand_behind, 2, "both demanded reads came behind what had begun");
    let drive = &before.drives[0].prefetch;
    assert_eq!((drive.issued.reads, drive.withdrawn.reads, drive.late.reads, drive.wasted.reads), (7, 4, 1, 1));
    let (seen, reads, barriers) = settle(reader, 0);
    assert_eq!(seen.drives[0].prefetch.withdrawn.reads, 5, "6 was never begun");
    let late = reads.iter().find(|r| r.outcome == Outcome::Late).unwrap();
    assert_eq!((late.expert.0, late.barrier, late.purpose), (0, Some(0), Purpose::Prefetch));
    assert_eq!((barriers[0].cause, barriers[0].prefetch_hits), (Cause::PrefetchLate, 0));
}

#[test]
fn what_is_taken_back_or_fails_costs_nothing_but_bytes() {
    let dir = folder();
    let plan = stage(dir.path(), 1, |_| vec![0]);
    let (mut reader, script) = scripted(&plan, &told(1), 1);
    reader.hint(&pass(0), LAYERS[0], &guesses(&[0, 1, 2]));
    log(&script);
    // The second list replaces the first: 0 has begun and is cancelled, 1 is only withdrawn, 2 stays.
    reader.hint(&pass(0), LAYERS[0], &guesses(&[2, 3]));
    let seen = log(&script);
    assert!(seen.contains(&(Pool::Prefetch, "cancelled", 0)) && seen.contains(&(Pool::Prefetch, "withdrawn", 1)));
    assert!(!seen.contains(&(Pool::Prefetch, "asked", 2)), "it is not read again");
    reader.retract(&pass(0), LAYERS[0]);
    assert_eq!(reader.handle().counters().prefetch.retracted, 4);
    reader.hint(&pass(0), LAYERS[0], &guesses(&[4]));
    script.lock().unwrap().fails = true;
    take(&mut reader, 0, LAYERS[0], &[4]);
    let (seen, reads, _) = settle(reader, 0);
    let drive = &seen.drives[0];
    // Expert 4 waited behind 0 and was withdrawn when the barrier opened.
    assert_eq!((drive.prefetch.wasted.reads, drive.prefetch.failed), (1, 0));
    assert_eq!(reads.iter().filter(|r| r.purpose == Purpose::Demand).count(), 1);

    let (mut reader, script) = scripted(&plan, &told(1), 2);
    reader.hint(&pass(0), LAYERS[0], &guesses(&[4, 5]));
    script.lock().unwrap().fails = true;
    take(&mut reader, 0, LAYERS[0], &[4]);
    let (seen, reads, _) = settle(reader, 0);
    assert_eq!((seen.drives[0].prefetch.failed, seen.drives[0].errors, seen.failovers), (2, 2, 0));
    let read = reads.iter().find(|r| r.purpose == Purpose::Demand).unwrap();
    assert_eq!((read.expert.0, read.result), (4, ReadResult::Ok), "demand reads it as if nobody had guessed");
}
