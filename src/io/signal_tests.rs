//! The signal on real threads and descriptors. `tests/schedules` tries raising and waiting in many orders.

use super::Signal;
#[cfg(target_os = "linux")]
use super::signal::Watching;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

#[test]
fn an_event_before_the_wait_is_not_missed() {
    let signal = Signal::default();
    let seen = signal.epoch();
    signal.raise();
    assert!(signal.wait(seen, Instant::now() + Duration::from_secs(60)));
    assert!(!signal.wait(signal.epoch(), Instant::now() + Duration::from_millis(1)), "nothing new");
}

fn every_event_is_seen(signal: Arc<Signal>) {
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let signal = Arc::clone(&signal);
            std::thread::spawn(move || (0..500).for_each(|_| signal.raise()))
        })
        .collect();
    let mut seen = 0;
    while seen < 2000 {
        assert!(signal.wait(seen, Instant::now() + Duration::from_secs(60)), "stuck at {seen}");
        seen = signal.epoch();
    }
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(signal.epoch(), 2000);
}

#[test]
fn every_event_of_many_threads_is_seen() {
    every_event_is_seen(Arc::default());
}

#[cfg(target_os = "linux")]
#[test]
fn watched_descriptors_and_threads_both_wake_the_waiter() {
    use std::io::{Read, Write};
    let (mut ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let signal = Arc::new(Signal::default());
    signal.watch(&ours, Watching::UntilRead).unwrap();
    assert!(!signal.wait(0, Instant::now() + Duration::from_millis(2)), "nothing to read yet");
    theirs.write_all(b"x").unwrap();
    let far = Instant::now() + Duration::from_secs(60);
    assert!(signal.wait(signal.epoch(), far));
    assert!(signal.wait(signal.epoch(), far), "unread, it still counts");
    ours.read_exact(&mut [0]).unwrap();
    let seen = signal.epoch();
    let waiter = std::thread::spawn({
        let signal = Arc::clone(&signal);
        move || signal.wait(seen, far)
    });
    while signal.waiters() == 0 {
        std::thread::yield_now();
    }
    signal.raise();
    assert!(waiter.join().unwrap());
    assert!(!signal.wait(signal.epoch(), Instant::now() + Duration::from_millis(2)), "the call was answered");

    let rings = Signal::default();
    rings.watch(&ours, Watching::Rings).unwrap();
    for _ in 0..2 {
        theirs.write_all(b"x").unwrap();
        assert!(rings.wait(rings.epoch(), far), "one event for each ring of the bell");
        assert!(!rings.wait(rings.epoch(), Instant::now() + Duration::from_millis(2)), "and no more, unread");
    }
    ours.read_exact(&mut [0, 0]).unwrap();

    let many = Arc::new(Signal::default());
    many.watch(&ours, Watching::UntilRead).unwrap();
    // Events of descriptors that are not readable never count, so the numbers are those of the threads.
    every_event_is_seen(many);
}
