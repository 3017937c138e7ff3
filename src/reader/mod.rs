//! Experts from drives: [`ExpertReader`] turns a barrier (the experts that a layer needs now) into reads, chooses a
//! copy for each, hands experts over as they arrive, falls back to another copy when a read fails, and counts and
//! traces what really happened. Knows plans and drive folders; knows nothing of what experts are used for.

pub(crate) mod ahead;
mod assemble;
mod balance;
mod block_reads;
pub mod budget;
pub mod cache;
pub mod counters;
mod degrade;
pub mod dispatch;
mod engines;
mod expert_reader;
mod faults;
mod flow;
pub mod governor;
pub mod health;
pub mod heat_file;
mod hedge;
mod issue;
mod jobs;
pub mod kv_file;
pub mod limit;
mod live;
mod open;
pub mod options;
mod pace_watch;
pub mod predict;
mod prefetch;
pub mod rates;
mod resident;
mod split;
mod stripes;
mod supply;
mod tally;
pub mod trunk_stream;

pub use cache::CachePolicy;
pub use counters::{
    CacheCounters, Delivered, DriveCounters, DrivePrefetch, PrefetchCounters, ReadSum, ReaderCounters, ReaderHandle,
};
pub use dispatch::DispatchPolicy;
pub use expert_reader::ExpertReader;
pub use health::{DriveEvent, Happened, Trouble};
pub use limit::LimitCounters;
pub use live::DriveNow;
pub use open::{OpenedDrive, mounts_of, open_drive};
pub use options::{PrefetchPolicy, PrefetchPool, ReaderError, ReaderOptions, Shedding};
pub use rates::KnownRate;

#[cfg(test)]
mod ahead_tests;
#[cfg(test)]
mod cache_tests;
#[cfg(test)]
mod degrade_tests;
#[cfg(test)]
mod lost_tests;
#[cfg(test)]
mod script_tests;
#[cfg(test)]
mod split_tests;
#[cfg(test)]
mod tests;
