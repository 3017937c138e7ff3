//! The module that the slab and its signal stand in, with the real files below it.

pub use argodrive::io::IoSetupError;
pub use buffer::{Kept, Slab, Slot};
pub use signal::Signal;

#[path = "../../src/io/buffer.rs"]
pub mod buffer;
#[path = "../../src/io/signal.rs"]
pub mod signal;
#[cfg(target_os = "linux")]
#[path = "../../src/io/watch.rs"]
mod watch;
