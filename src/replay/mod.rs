//! From traces to answers: who landed last in each barrier and why, where the time of a token went, and the way in and
//! out for the traces of other programs.
//!
//! Everything streams: memory is bounded by the barriers that are open at once, not by the length of a trace. Knows
//! traces and plans, and in `measured` and `reissue` the reader; knows no decoder, and prints nothing.

pub mod attribution;
pub mod export;
pub mod groups;
pub mod import;
pub mod join;
pub mod learn;
pub mod measured;
pub mod rates;
pub mod reissue;
pub mod schedule;
pub mod simulate;
pub mod summary;
pub mod verdict;
pub mod windows;
pub mod workload;

use crate::bound::BoundError;
use crate::reader::predict::table::TableError;
use crate::trace::log::TraceError;

/// Why a trace gives no answer.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace itself.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A prefetch table could not be made.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Rates, a plan or a map that does not fit the trace.
    #[error("{0}")]
    Input(String),
    /// A bound cannot be computed.
    #[error("barrier {barrier}: {source}")]
    Bound {
        /// The barrier.
        barrier: u64,
        /// Why.
        source: BoundError,
    },
}
