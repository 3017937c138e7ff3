//! The barriers of a trace as real reads again, through the reader, under another layout or on other drives. Needs a plan
//! and staged drives; no model, for the bytes are dropped as they come.
//!
//! Between barriers there is the recorded compute gap, or nothing. The gap is the time from the last arrival of a barrier
//! to the opening of the next: what the drives saw. It is slept until an absolute time, so a late wake-up is not added up.

use super::ReplayError;
use super::schedule::Schedule;
use crate::clock::Clock;
use crate::ids::LayerId;
use crate::reader::{ExpertReader, ReaderError};
use crate::source::{Barrier, SourceError};
use crate::sys::timer::{sleep_until, use_smallest_timer_slack};
use crate::trace::log::TraceCapacity;
use serde::{Deserialize, Serialize};

/// What lies between barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gaps {
    /// As long as recorded.
    Recorded,
    /// As fast as possible.
    None,
}

impl Gaps {
    /// `recorded` or `none`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Recorded => "recorded",
            Self::None => "none",
        }
    }
}

/// The reads could not be issued again.
#[derive(Debug, thiserror::Error)]
pub enum ReissueError {
    /// The trace, or the plan for it.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The drives.
    #[error(transparent)]
    Reader(#[from] ReaderError),
    /// A barrier failed.
    #[error("barrier {barrier} of the trace, {layer}: {source}")]
    Source {
        /// Its number in the recorded trace.
        barrier: u64,
        /// Its layer.
        layer: LayerId,
        /// Why.
        source: SourceError,
    },
    /// Somebody stopped it.
    #[error("interrupted after {done} of {all} barriers; nothing was written")]
    Interrupted {
        /// Barriers read.
        done: usize,
        /// Barriers in all.
        all: usize,
    },
}

/// What happened between barriers.
#[derive(Clone, Debug, Default)]
pub struct GapsSeen {
    /// Gaps that were waited for.
    pub waited: u64,
    /// Their sum, as recorded.
    pub recorded_ns: u64,
    /// How late each ended, in nanoseconds.
    pub late_ns: Vec<f64>,
}

/// Room for the trace of `schedule` over `drives`: one read for each expert, a cut for each neighbouring pair of drives in
/// each barrier, a quarter more for repeated reads.
pub fn room(schedule: &Schedule, drives: usize) -> TraceCapacity {
    let (barriers, experts) = (schedule.barriers.len(), schedule.experts.len());
    TraceCapacity { reads: experts + experts / 4 + barriers * drives + 1024, barriers: barriers + 64 }
}

/// Issues every barrier of `schedule` on `reader`, in order. `keep_going` is asked between barriers.
pub fn run(
    schedule: &Schedule,
    reader: &mut ExpertReader,
    gaps: Gaps,
    keep_going: &dyn Fn() -> bool,
) -> Result<GapsSeen, ReissueError> {
    // without it a sleep may end 50 us late, which is said in the result
    let _ = use_smallest_timer_slack();
    let all = schedule.barriers.len();
    let mut seen = GapsSeen { late_ns: Vec::with_capacity(all), ..GapsSeen::default() };
    let clock = Clock::start();
    let mut due_ns = None;
    for (done, demand) in schedule.barriers.iter().enumerate() {
        if !keep_going() {
            return Err(ReissueError::Interrupted { done, all });
        }
        if let Some(due_ns) = due_ns {
            sleep_until(clock.instant_at(due_ns));
            seen.late_ns.push(clock.now_ns().saturating_sub(due_ns) as f64);
        }
        let experts = &schedule.experts[demand.experts.clone()];
        let fail = |source| ReissueError::Source { barrier: demand.barrier, layer: demand.layer, source };
        let mut barrier = Barrier::open(reader, &demand.step, demand.layer, experts).map_err(fail)?;
        while barrier.next_arrival().map_err(fail)?.is_some() {}
        drop(barrier);
        if gaps == Gaps::Recorded && demand.gap_ns > 0 {
            due_ns = Some(clock.now_ns().saturating_add(demand.gap_ns));
            seen.waited += 1;
            seen.recorded_ns = seen.recorded_ns.saturating_add(demand.gap_ns);
        } else {
            due_ns = None;
        }
    }
    Ok(seen)
}
