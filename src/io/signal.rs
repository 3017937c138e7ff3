//! One signal for many sources: whoever waits learns that *something* happened since it last looked, and looks.
//!
//! A counter under a mutex, so that no wake-up is missed: the waiter notes the count before it looks, and sleeps only
//! while the count has not moved. Threads raise the signal. Sources without a thread, such as the ring of an io_uring,
//! are descriptors that the signal watches: the waiter then sleeps in the kernel on all of them at once (one `epoll`),
//! and no thread stands between a drive's interrupt and the waiter.

use crate::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

#[cfg(target_os = "linux")]
use super::watch::Watch;

/// Without watched descriptors nothing sleeps in the kernel on them.
#[cfg(not(target_os = "linux"))]
#[derive(Debug)]
enum Watch {}

/// What counts as an event at a watched descriptor.
#[cfg(target_os = "linux")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watching {
    /// That it is readable: until it has been read empty, waits return at once.
    UntilRead,
    /// That it became readable, or more so: one event each, which need not be read.
    Rings,
}

/// Counts events and lets threads wait for the next.
#[derive(Debug, Default)]
pub struct Signal {
    state: Mutex<State>,
    moved: Condvar,
    watch: OnceLock<Watch>,
}

#[derive(Debug, Default)]
struct State {
    epoch: u64,
    waiters: u32,
    /// Waiters on watched descriptors have been called by [`Signal::raise`], and the call still stands.
    called: bool,
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
        #[cfg(target_os = "linux")]
        if wake
            && !state.called
            && let Some(watch) = self.watch.get()
        {
            watch.call();
            state.called = true;
        }
        drop(state);
        if wake {
            self.moved.notify_all();
        }
    }

    /// Waits until there has been an event after `seen`, or `deadline`. Returns whether there has been one (or, with
    /// watched descriptors, whether the sleep was interrupted).
    pub fn wait(&self, seen: u64, deadline: Instant) -> bool {
        let mut state = self.lock();
        state.waiters += 1;
        while state.epoch == seen {
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) else { break };
            #[cfg(target_os = "linux")]
            if let Some(watch) = self.watch.get() {
                drop(state);
                let happened = watch.sleep(left);
                state = self.lock();
                if happened && state.epoch == seen {
                    state.epoch += 1;
                    // The descriptor woke one thread; the event is for all.
                    if state.waiters > 1 && !state.called {
                        watch.call();
                        state.called = true;
                    }
                }
                continue;
            }
            state = self.moved.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.waiters -= 1;
        #[cfg(target_os = "linux")]
        if state.waiters == 0
            && std::mem::take(&mut state.called)
            && let Some(watch) = self.watch.get()
        {
            watch.answer();
        }
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

    /// Counts what happens at `source` as events. Call it before anything waits; the watch ends when the descriptor is
    /// closed.
    #[cfg(target_os = "linux")]
    pub(super) fn watch(&self, source: impl std::os::fd::AsFd, watching: Watching) -> std::io::Result<()> {
        let watch = match self.watch.get() {
            Some(watch) => watch,
            None => {
                let made = Watch::new()?;
                self.watch.get_or_init(|| made)
            }
        };
        watch.add(source.as_fd(), watching)
    }

    /// Threads that wait now.
    #[cfg(test)]
    pub(super) fn waiters(&self) -> u32 {
        self.lock().waiters
    }

    /// A panic elsewhere cannot leave the counter half-changed, so a poisoned lock is used on.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
