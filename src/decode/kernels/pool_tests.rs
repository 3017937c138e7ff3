//! The pool on real threads. `tests/schedules` tries its hand-over in many orders.

use super::pool::{AWAKE, Pool};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

#[test]
fn every_chunk_is_computed_once_whoever_takes_it() {
    let pool = Pool::new(3);
    assert_eq!(pool.threads(), 3);
    let cells: Vec<AtomicU64> = (0..97).map(|_| AtomicU64::new(0)).collect();
    for round in 1..=2000u64 {
        let chunks = 1 + round as usize % cells.len();
        pool.run(chunks, &|chunk| {
            cells[chunk].fetch_add(1, Relaxed);
        });
        let seen: u64 = cells.iter().map(|c| c.swap(0, Relaxed)).sum();
        assert_eq!(seen as usize, chunks, "round {round}");
        if round % 500 == 0 {
            std::thread::sleep(2 * AWAKE); // the workers fall asleep and must be woken
        }
    }
    let all: u64 = (1..=2000u64).map(|round| 1 + round % 97).sum();
    assert_eq!(pool.taken().iter().sum::<u64>(), all);
}

#[test]
fn workers_take_part() {
    let pool = Pool::new(2);
    let both = Barrier::new(2);
    // Two chunks that wait for each other end only on two threads.
    pool.run(2, &|_| {
        both.wait();
    });
    assert_eq!(pool.taken(), [1, 1]);
}

#[test]
fn a_second_caller_computes_alone() {
    let pool = Pool::new(2);
    let inner = AtomicU64::new(0);
    pool.run(4, &|_| {
        pool.run(3, &|_| {
            inner.fetch_add(1, Relaxed);
        });
    });
    assert_eq!(inner.load(Relaxed), 12);
}

#[test]
fn a_panic_reaches_the_caller_in_its_words_and_the_pool_works_on() {
    let pool = Pool::new(2);
    let caller = std::thread::current().id();
    for on_caller in [false, true, false] {
        let both = Barrier::new(2);
        let told = catch_unwind(AssertUnwindSafe(|| {
            pool.run(2, &|_| {
                both.wait(); // each thread has one chunk
                let here = std::thread::current().id() == caller;
                assert!(here != on_caller, "a chunk of the caller's own: {here}");
            });
        }));
        let words = told.unwrap_err();
        assert!(words.downcast_ref::<String>().unwrap().contains(&format!("own: {on_caller}")));
        // Both threads are there again.
        let both = Barrier::new(2);
        pool.run(2, &|_| {
            both.wait();
        });
    }
}

#[test]
fn a_muster_reaches_each_thread_once_also_while_another_caller_has_the_workers() {
    let pool = Pool::new(3);
    let (busy, free) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|s| {
        s.spawn(|| {
            let told = AtomicBool::new(false);
            pool.run(3, &|_| {
                if !told.swap(true, SeqCst) {
                    busy.wait();
                }
                while !free.load(SeqCst) {
                    std::thread::yield_now();
                }
            });
        });
        busy.wait();
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            free.store(true, SeqCst);
        });
        let seen = Mutex::new(Vec::new());
        let all = pool.muster(&|number| seen.lock().unwrap().push((std::thread::current().id(), number)));
        let seen = seen.into_inner().unwrap();
        let of = |f: fn(&(std::thread::ThreadId, usize)) -> String| {
            seen.iter().map(f).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!((all, seen.len(), of(|s| format!("{:?}", s.0)), of(|s| s.1.to_string())), (true, 3, 3, 3));
        assert_eq!(pool.taken().iter().sum::<u64>(), 3, "only what was computed is counted");
    });
}
