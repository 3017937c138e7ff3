//! How much of the work of planning is done, of what is known to come: one count for the process, so that a program can show how
//! far it is without the planner carrying a callback. A step is about as much work as drawing a layer's barriers. Nothing is decided
//! by it.

use std::sync::atomic::{AtomicU64, Ordering};

static EXPECTED: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicU64 = AtomicU64::new(0);

/// Steps done, and steps that were known to come so far. Both only grow.
pub fn so_far() -> (u64, u64) {
    (DONE.load(Ordering::Relaxed), EXPECTED.load(Ordering::Relaxed))
}

/// So many steps will come.
pub(super) fn expect(steps: usize) {
    EXPECTED.fetch_add(steps as u64, Ordering::Relaxed);
}

/// So many are done.
pub(super) fn done(steps: usize) {
    DONE.fetch_add(steps as u64, Ordering::Relaxed);
}
