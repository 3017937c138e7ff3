//! Barriers with the reads that they needed, from two streams in bounded memory.
//!
//! Rows of `reads.csv` stand in the order in which reads ended, so those of one barrier lie close together, but a
//! prefetch stands long before its barrier and a read that timed out long after. A barrier is handed out once a read
//! shows up that was issued [`LAG_BARRIERS`] barriers later; a read that names a barrier handed out before is a fault.

use super::ReplayError;
use crate::trace::events::{BarrierRecord, ReadEvent};
use crate::trace::log::TraceError;
use crate::trace::stream::{Skipped, Stream};
use std::collections::BTreeMap;

/// How many barriers later a read of a barrier may still come.
pub const LAG_BARRIERS: u64 = 1024;
/// Reads held at once: about 400 MB.
const MAX_HELD: usize = 4 << 20;

/// Where barrier records come from.
pub trait BarrierSource {
    /// The next one, in ascending order.
    fn next_barrier(&mut self) -> Result<Option<BarrierRecord>, TraceError>;
    /// Rows left out so far.
    fn skipped(&self) -> Skipped;
}

impl BarrierSource for Stream<BarrierRecord> {
    fn next_barrier(&mut self) -> Result<Option<BarrierRecord>, TraceError> {
        self.next_value()
    }

    fn skipped(&self) -> Skipped {
        Stream::skipped(self).clone()
    }
}

impl BarrierSource for std::vec::IntoIter<BarrierRecord> {
    fn next_barrier(&mut self) -> Result<Option<BarrierRecord>, TraceError> {
        Ok(self.next())
    }

    fn skipped(&self) -> Skipped {
        Skipped::default()
    }
}

/// The join of both streams.
pub struct Joiner<B> {
    reads: Stream<ReadEvent>,
    barriers: B,
    pending: BTreeMap<u64, Vec<ReadEvent>>,
    held: usize,
    spare: Vec<Vec<ReadEvent>>,
    /// Latest `issued_in` seen; `None` once the reads have ended.
    reached: Option<u64>,
    /// Barriers up to this one are handed out.
    handed_out: Option<u64>,
    lenient: bool,
    skipped: Skipped,
}

impl<B: BarrierSource> Joiner<B> {
    /// Joins `reads` to `barriers`.
    pub fn new(reads: Stream<ReadEvent>, barriers: B, lenient: bool) -> Self {
        Self {
            reads,
            barriers,
            pending: BTreeMap::new(),
            held: 0,
            spare: Vec::new(),
            reached: Some(0),
            handed_out: None,
            lenient,
            skipped: Skipped::default(),
        }
    }

    /// The next barrier, its reads put into `out`. Reads that no barrier needed go to `unbound` as they pass by.
    pub fn next_barrier(
        &mut self,
        out: &mut Vec<ReadEvent>,
        unbound: &mut dyn FnMut(&ReadEvent),
    ) -> Result<Option<BarrierRecord>, ReplayError> {
        out.clear();
        let Some(record) = self.barriers.next_barrier()? else {
            while self.pump(unbound)? {}
            self.check_unknown(None)?;
            return Ok(None);
        };
        let enough = record.barrier.saturating_add(LAG_BARRIERS);
        while self.reached.is_some_and(|reached| reached <= enough) && self.pump(unbound)? {}
        self.check_unknown(Some(record.barrier))?;
        if let Some(mut reads) = self.pending.remove(&record.barrier) {
            self.held -= reads.len();
            std::mem::swap(out, &mut reads);
            reads.clear();
            self.spare.push(reads);
        }
        self.handed_out = Some(record.barrier);
        Ok(Some(record))
    }

    /// Rows left out so far, of both files.
    pub fn skipped(&self) -> Skipped {
        let mut all = self.barriers.skipped();
        all.merge(self.reads.skipped());
        all.merge(&self.skipped);
        all
    }

    /// Takes one read; `false` when there is none left.
    fn pump(&mut self, unbound: &mut dyn FnMut(&ReadEvent)) -> Result<bool, ReplayError> {
        let Some(read) = self.reads.next_value()? else {
            self.reached = None;
            return Ok(false);
        };
        self.reached = self.reached.map(|r| r.max(read.issued_in));
        let Some(barrier) = read.barrier else {
            unbound(&read);
            return Ok(true);
        };
        if self.handed_out.is_some_and(|done| barrier <= done) {
            let reason = format!(
                "belongs to barrier {barrier}, which is missing in barriers.csv or ended more than {LAG_BARRIERS} \
                 barriers ago: the trace is not in the order in which it was written"
            );
            let fault = self.reads.fault(reason);
            self.skipped.pass::<()>(Err(fault), self.lenient)?;
            return Ok(true);
        }
        if self.held >= MAX_HELD {
            let reason = format!("{MAX_HELD} reads wait for their barriers: the trace is not sorted by barrier");
            return Err(self.reads.fault(reason).into());
        }
        let spare = &mut self.spare;
        self.pending.entry(barrier).or_insert_with(|| spare.pop().unwrap_or_default()).push(read);
        self.held += 1;
        Ok(true)
    }

    /// Reads that wait for a barrier which the other file does not have.
    fn check_unknown(&mut self, next: Option<u64>) -> Result<(), ReplayError> {
        while let Some(entry) = self.pending.first_entry() {
            if next.is_some_and(|next| *entry.key() >= next) {
                break;
            }
            let (barrier, mut reads) = entry.remove_entry();
            let reason =
                format!("{} reads before this line belong to barrier {barrier}, which barriers.csv lacks", reads.len());
            let fault = self.reads.fault(reason);
            self.held -= reads.len();
            self.skipped.pass::<()>(Err(fault), self.lenient)?;
            self.skipped.rows += reads.len() as u64 - 1;
            reads.clear();
            self.spare.push(reads);
        }
        Ok(())
    }
}
