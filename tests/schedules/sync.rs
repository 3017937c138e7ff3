//! `crate::sync` of the files under test: the same names, from a model checker that runs one thread at a time and chooses at each
//! step whose turn it is.

pub use shuttle::hint::spin_loop;
pub use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, atomic};
pub use shuttle::thread::{Builder as ThreadBuilder, JoinHandle, yield_now};
pub use std::sync::OnceLock;

/// Few enough that a spinning thread does not fill the schedule.
pub const LOOKS: u32 = 2;

use shuttle::rand::Rng;
use std::time::Duration;

/// A clock on which a moment, or a millisecond, has passed at each look: longer than a worker stays awake, and shorter than
/// anybody waits for others.
#[derive(Clone, Copy)]
pub struct Instant;

impl Instant {
    pub fn now() -> Self {
        Self
    }

    pub fn elapsed(&self) -> Duration {
        Duration::from_millis(u64::from(shuttle::rand::thread_rng().gen_bool(0.5)))
    }
}
