//! Experts from drives: [`ExpertReader`] turns a barrier (the experts that a layer needs now) into reads, chooses a
//! copy for each, hands experts over as they arrive, falls back to another copy when a read fails, and counts and
//! traces what really happened. Knows plans and drive folders; knows nothing of what experts are used for.

pub mod counters;
pub mod dispatch;
mod expert_reader;
mod flow;
mod open;
pub mod options;
mod tally;

pub use counters::{DriveCounters, ReaderCounters, ReaderHandle};
pub use dispatch::DispatchPolicy;
pub use expert_reader::ExpertReader;
pub use open::{OpenedDrive, mounts_of, open_drive};
pub use options::{ReaderError, ReaderOptions};

#[cfg(test)]
mod tests;
