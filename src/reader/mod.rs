//! Experts from drives: [`ExpertReader`] turns a barrier (the experts that a layer needs now) into reads, chooses a
//! copy for each, hands experts over as they arrive, falls back to another copy when a read fails, and counts and
//! traces what really happened. Knows plans and drive folders; knows nothing of what experts are used for.

mod balance;
pub mod counters;
pub mod dispatch;
mod engines;
mod expert_reader;
mod faults;
mod flow;
mod hedge;
mod issue;
mod open;
pub mod options;
pub mod rates;
mod split;
mod tally;

pub use counters::{DriveCounters, ReaderCounters, ReaderHandle};
pub use dispatch::DispatchPolicy;
pub use expert_reader::ExpertReader;
pub use open::{OpenedDrive, mounts_of, open_drive};
pub use options::{ReaderError, ReaderOptions};
pub use rates::KnownRate;

#[cfg(test)]
mod split_tests;
#[cfg(test)]
mod tests;
