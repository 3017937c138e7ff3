//! One signal for many sources: whoever waits learns that *something* happened since it last looked, and looks.
//!
//! A counter under a mutex, so that no wake-up is missed: the waiter notes the count before it looks, and sleeps only
//! while the count has not moved.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Counts events and lets threads wait for the next.
#[derive(Debug, Default)]
pub struct Signal {
    state: Mutex<State>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct State {
    epoch: u64,
    waiters: u32,
}

impl Signal {
    /// How many events there have been. Note it **before** looking for work.
    pub fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    /// Something happened.
    pub fn raise(&self) {
        let mut state = self.lock();
        state.epoch += 1;
        let wake = state.waiters > 0;
        drop(state);
        if wake {
            self.moved.notify_all();
        }
    }

    /// Waits until there has been an event after `seen`, or `deadline`. Returns whether there has been one.
    pub fn wait(&self, seen: u64, deadline: Instant) -> bool {
        let mut state = self.lock();
        state.waiters += 1;
        while state.epoch == seen {
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) else { break };
            state = self.moved.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.waiters -= 1;
        state.epoch != seen
    }

    /// Waits until there have been `events` events in all, or `deadline`. Returns whether there have.
    pub fn wait_for(&self, events: u64, deadline: Instant) -> bool {
        loop {
            let seen = self.epoch();
            if seen >= events {
                return true;
            }
            if !self.wait(seen, deadline) {
                return false;
            }
        }
    }

    /// A panic elsewhere cannot leave the counter half-changed, so a poisoned lock is used on.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn an_event_before_the_wait_is_not_missed() {
        let signal = Signal::default();
        let seen = signal.epoch();
        signal.raise();
        assert!(signal.wait(seen, Instant::now() + Duration::from_secs(60)));
        assert!(!signal.wait(signal.epoch(), Instant::now() + Duration::from_millis(1)), "nothing new");
    }

    #[test]
    fn every_event_of_many_threads_is_seen() {
        let signal = Arc::new(Signal::default());
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
}
