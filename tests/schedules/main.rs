//! Hand-overs between threads, tried in many orders: the pool that shares products, the slots of the slab and the signal of their
//! return. The real files are compiled here once more, with a model checker's locks, atomics and threads in place of `std`'s
//! (`sync`); it takes every operation on them as a moment at which another thread may go on. It knows one order of all
//! atomic operations: that weaker orderings suffice where they are used is argued in the files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code)]
mod io;
#[allow(dead_code)]
#[path = "../../src/decode/kernels/pool.rs"]
mod pool;
mod sync;

/// What the files under test name of the rest of the crate.
mod source {
    pub use argodrive::source::LeaseOwner;
}
mod sys {
    pub use argodrive::sys::limits;
}

use io::{Kept, Signal, Slab, Slot};
use pool::Pool;
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Runs `body` in `orders` orders; each is repeated by the seed that a failure prints.
fn in_orders(orders: usize, body: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(body.clone(), orders);
    // Few changes of thread, at chosen moments: finds what needs one thread to be put aside for long.
    shuttle::check_pct(body, orders, 3);
}

/// Something that one thread at a time may have, or several may read.
#[derive(Default)]
struct Place(AtomicU32);

const WRITING: u32 = 1 << 16;

impl Place {
    fn write(&self) {
        assert_eq!(self.0.fetch_add(WRITING, SeqCst), 0, "somebody else has it");
        thread::yield_now();
        assert_eq!(self.0.fetch_sub(WRITING, SeqCst), WRITING, "somebody came in");
    }

    fn read(&self) {
        assert!(self.0.fetch_add(1, SeqCst) < WRITING, "somebody writes it");
        thread::yield_now();
        assert!(self.0.fetch_sub(1, SeqCst) < WRITING, "somebody began to write");
    }
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

#[test]
fn every_chunk_is_computed_once_while_its_caller_waits() {
    in_orders(4000, || {
        let pool = Pool::new(3);
        for round in 0..3usize {
            let chunks = 1 + 2 * round; // the first is not shared: workers must not take it for an offer
            let cells: Vec<AtomicU32> = (0..chunks).map(|_| AtomicU32::new(0)).collect();
            // Dead from the moment at which the caller goes on.
            let alive = Arc::new(AtomicUsize::new(round + 1));
            let seen = Arc::clone(&alive);
            pool.run(chunks, &|chunk| {
                assert_eq!(seen.load(SeqCst), round + 1, "a worker came late");
                thread::yield_now();
                cells[chunk].fetch_add(1, SeqCst);
            });
            alive.store(0, SeqCst);
            assert!(cells.iter().all(|c| c.load(SeqCst) == 1), "round {round}");
        }
        assert_eq!(pool.taken().iter().sum::<u64>(), 1 + 3 + 5);
        drop(pool); // all workers end, or the checker finds a deadlock
    });
}

#[test]
fn two_callers_never_share_the_workers_and_a_muster_reaches_each_thread() {
    in_orders(2000, || {
        let pool = Arc::new(Pool::new(2));
        let (other, sum) = (Arc::clone(&pool), Arc::new(AtomicUsize::new(0)));
        let theirs = Arc::clone(&sum);
        let caller = thread::spawn(move || {
            other.run(3, &|chunk| {
                theirs.fetch_add(10 + chunk, SeqCst);
            });
        });
        let mustered: Vec<AtomicU32> = (0..2).map(|_| AtomicU32::new(0)).collect();
        let all = pool.muster(&|thread| {
            mustered[thread].fetch_add(1, SeqCst);
        });
        assert!(all && mustered.iter().all(|m| m.load(SeqCst) == 1));
        caller.join().unwrap();
        assert_eq!(sum.load(SeqCst), 33);
        assert_eq!(pool.taken().iter().sum::<u64>(), 3, "only what was computed is counted");
    });
}

#[test]
fn a_slot_has_one_holder_and_whoever_waits_for_one_gets_it() {
    in_orders(4000, || {
        let signal = Arc::new(Signal::default());
        let slab = Slab::new(1, 64, Arc::clone(&signal)).unwrap();
        let place = Arc::new(Place::default());
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (slab, signal, place) = (slab.clone(), Arc::clone(&signal), Arc::clone(&place));
                thread::spawn(move || {
                    let slot = loop {
                        let seen = signal.epoch();
                        match slab.take() {
                            Some(slot) => break slot,
                            None => signal.wait(seen, far()), // for ever, if a return were missed
                        };
                    };
                    place.write();
                    let (owner, index) = slot.lend();
                    place.read();
                    assert_eq!(owner.bytes(index, 1), [0]);
                    owner.release(index);
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!((slab.free_slots(), signal.epoch()), (1, 3));
    });
}

#[test]
fn parts_of_a_slot_come_together_in_one_hand() {
    in_orders(4000, || {
        let slab = Slab::new(1, 64, Arc::default()).unwrap();
        let place = Arc::new(Place::default());
        let mut first = slab.take().unwrap();
        let mut second = first.split_off(16).unwrap();
        let third = second.split_off(16).unwrap();
        let part = |mut slot: Slot| {
            let place = Arc::clone(&place);
            thread::spawn(move || {
                place.read(); // one of several that have disjoint bytes
                slot.bytes_mut()[0] = 1;
                drop(slot);
            })
        };
        let threads = [part(second), part(third)];
        let mut whole = loop {
            match first.widen() {
                Ok(whole) => break whole,
                Err(still) => first = still,
            }
            thread::yield_now();
        };
        place.write();
        assert_eq!(whole.bytes().len(), slab.slot_bytes() as usize);
        whole.bytes_mut().fill(2);
        let (owner, index) = whole.lend();
        assert_eq!(slab.free_slots(), 0);
        owner.release(index);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(slab.free_slots(), 1, "freed once");
    });
}

#[test]
fn a_kept_slot_is_written_again_only_when_nobody_has_it_on_loan() {
    in_orders(4000, || {
        let slab = Slab::new(1, 64, Arc::default()).unwrap();
        let place = Arc::new(Place::default());
        let mut kept: Kept = slab.take().unwrap().keep().unwrap();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let ((owner, index), place) = (kept.lend(), Arc::clone(&place));
                thread::spawn(move || {
                    place.read();
                    assert_eq!(owner.bytes(index, 1), [0]);
                    owner.release(index);
                })
            })
            .collect();
        let mut slot = loop {
            match kept.reclaim() {
                Ok(slot) => break slot,
                Err(still) => kept = still,
            }
            thread::yield_now();
        };
        place.write();
        slot.bytes_mut()[0] = 1;
        assert_eq!(slab.free_slots(), 0);
        drop(slot);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(slab.free_slots(), 1);
    });
}
