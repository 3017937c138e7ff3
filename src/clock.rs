//! The one clock: monotonic nanoseconds since the start of a run.
//!
//! Every time stamp in traces, pacing and rates comes from here, so that they can be compared with each other.

use std::time::{Duration, Instant};

/// A run's clock. Copies share the same origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// A clock whose zero is now.
    pub fn start() -> Self {
        Self { origin: Instant::now() }
    }

    /// Nanoseconds since the clock's start (584 years fit).
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The instant that lies `ns` nanoseconds after the clock's start.
    pub fn instant_at(&self, ns: u64) -> Instant {
        self.origin + Duration::from_nanos(ns)
    }
}
