//! While the sampler runs it allocates nothing, also when a source goes away and when its buffer is full. Alone in its
//! file, because the allocator counts for the whole process, except its main thread, where the test harness keeps its
//! books.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod allocations;

use allocations::{ALLOCATIONS, ARMED};
use argodrive::clock::Clock;
use argodrive::sys::blockstat::CounterFile;
use argodrive::trace::monitor::{MIN_INTERVAL_NS, Sampler, Source};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn sampling_allocates_nothing() {
    // On a thread of its own: with one test thread the harness runs tests on the main thread.
    std::thread::spawn(sample).join().unwrap();
}

fn sample() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let stat = |at: usize| dirs[at].path().join("stat");
    let sources = [0, 1].map(|at| {
        std::fs::write(stat(at), "1 2 3 4 5 6 7 8 9 10 11\n").unwrap();
        Source { name: at.to_string(), file: CounterFile::device(dirs[at].path()).unwrap() }
    });
    let gone = std::fs::File::options().write(true).open(stat(0)).unwrap();
    // room for four ticks: it is full and thinned again and again
    let sampler = Sampler::with_room(Clock::start(), MIN_INTERVAL_NS, sources.into(), 4).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    ARMED.store(true, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(30));
    gone.write_all_at(b"x", 0).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    ARMED.store(false, Ordering::SeqCst);
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), 0);
    let figures = sampler.finish().figures;
    assert!(figures.ticks > 1 && figures.thinned > 0, "{figures:?}");
    assert_eq!(figures.lost, ["0: invalid data"]);
}
