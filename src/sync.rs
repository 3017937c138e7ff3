//! What threads share: the atomics, locks and threads of the few files whose hand-overs are tried in many orders. Nothing but names
//! of `std`: `tests/schedules` compiles the same files with a model checker's in their place. Knows nothing of what is shared.

pub use std::hint::spin_loop;
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, atomic};
pub use std::thread::{Builder as ThreadBuilder, JoinHandle, yield_now};
pub use std::time::Instant;

/// Looks of a spinning thread between two looks at the clock.
pub const LOOKS: u32 = 128;
