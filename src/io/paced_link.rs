//! A link that several emulated drives share: their bytes cross it one after the other, at its own rate.
//!
//! A read begins to cross when its drive has turned to it and seeked, and crosses while the drive delivers: a link that is as
//! fast as its drives together delays nothing. The drive is busy until the last byte is across, as one without a buffer of its
//! own would be. Reads that were submitted first cross first; the time that they leave free goes to those after them, so that
//! the link never idles while bytes wait, and never carries more than its rate.

use super::IoSetupError;
use super::paced::PacedDrive;
use crate::drive::emulated_link::{EmulatedLink, LinkName};
use crate::drive::spec::Emulation;
use crate::knob::{self, Knob};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Room for busy times apart from each other; there is at most one for each read in flight.
const SPANS: usize = 1 << 12;

/// The one link behind several emulated drives of a run.
pub struct PacedLink {
    link: EmulatedLink,
    busy: Mutex<Busy>,
}

/// When the link carries bytes, as far as that is not over.
struct Busy {
    /// (from, until) in nanoseconds, in the order of time; they do not overlap.
    spans: VecDeque<(u64, u64)>,
    /// What lies before is over, and forgotten.
    over_ns: u64,
}

/// How a read crossed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossing {
    /// Its last byte is across.
    pub done_ns: u64,
    /// Bytes of other drives were in its way.
    pub behind_others: bool,
}

impl PacedLink {
    /// An idle link.
    pub fn new(link: EmulatedLink) -> Self {
        Self { link, busy: Mutex::new(Busy { spans: VecDeque::with_capacity(SPANS), over_ns: 0 }) }
    }

    /// Its name.
    pub fn name(&self) -> LinkName {
        self.link.name
    }

    /// Carries `bytes` of a read that was submitted at `submit_ns` and whose drive has them from `from_ns` on.
    pub fn carry(&self, submit_ns: u64, from_ns: u64, bytes: u64) -> Crossing {
        let need = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(self.link.rate_bytes_per_s.max(1)));
        let need = u64::try_from(need).unwrap_or(u64::MAX);
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.forget(submit_ns);
        // Two drives read their clocks before they come here, so the later one may come first.
        let from_ns = from_ns.max(busy.over_ns);
        let done_ns = busy.take(from_ns, need);
        Crossing { done_ns, behind_others: done_ns > from_ns.saturating_add(need) }
    }
}

impl Busy {
    /// No read that is still to come begins before `now_ns`.
    fn forget(&mut self, now_ns: u64) {
        self.over_ns = self.over_ns.max(now_ns);
        while self.spans.front().is_some_and(|s| s.1 <= self.over_ns) {
            self.spans.pop_front();
        }
    }

    /// Makes the first `need` free nanoseconds from `from_ns` on busy; returns when they end.
    fn take(&mut self, from_ns: u64, need: u64) -> u64 {
        let first = self.spans.partition_point(|s| s.1 < from_ns);
        let (mut at, mut left, mut next) = (from_ns, need, first);
        while let Some(&(begin, end)) = self.spans.get(next) {
            let gap = begin.saturating_sub(at);
            if gap >= left {
                break;
            }
            left -= gap;
            at = at.max(end);
            next += 1;
        }
        let done = at.saturating_add(left);
        // All that was passed is busy now, without a gap from here to the end.
        let begin = self.spans.get(first).filter(|_| next > first).map_or(from_ns, |s| s.0.min(from_ns));
        self.spans.drain(first..next);
        self.spans.insert(first, (begin, done));
        done
    }
}

/// The emulated drives of a run, in order, and the links that some of them share; `None` where a drive is real.
pub fn paced_drives(drives: &[(&str, Option<Emulation>)]) -> Result<Vec<Option<Arc<PacedDrive>>>, IoSetupError> {
    let mut links: Vec<Arc<PacedLink>> = Vec::new();
    let mut out = Vec::with_capacity(drives.len());
    for (name, emulation) in drives {
        let Some(emulation) = emulation else {
            out.push(None);
            continue;
        };
        let link = link_of(emulation)?.map(|link| match links.iter().find(|l| l.name() == link.name) {
            Some(known) => Arc::clone(known),
            None => {
                links.push(Arc::new(PacedLink::new(link)));
                Arc::clone(&links[links.len() - 1])
            }
        });
        out.push(Some(PacedDrive::on(name, *emulation, link)?));
    }
    Ok(out)
}

/// The link asked for, unless a test makes it lie.
fn link_of(emulation: &Emulation) -> Result<Option<EmulatedLink>, IoSetupError> {
    if knob::forced(Knob::Link) && emulation.link.is_none() {
        let name = LinkName::new("lie").map_err(IoSetupError::Option)?;
        return Ok(Some(EmulatedLink { name, rate_bytes_per_s: emulation.rate_bytes_per_s }));
    }
    Ok(emulation.link.filter(|_| !knob::skipped(Knob::Link)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn link(rate_bytes_per_s: u64) -> PacedLink {
        PacedLink::new(EmulatedLink { name: LinkName::new("hub").unwrap(), rate_bytes_per_s })
    }

    #[test]
    fn bytes_cross_one_after_the_other_and_gaps_are_used() {
        let hub = link(1_000_000_000); // a byte a nanosecond
        let crossed = |c: Crossing| (c.done_ns, c.behind_others);
        assert_eq!(crossed(hub.carry(0, 0, 100)), (100, false), "idle: as fast as it can");
        assert_eq!(crossed(hub.carry(0, 0, 100)), (200, true), "behind the first");
        assert_eq!(crossed(hub.carry(0, 500, 100)), (600, false), "its drive has nothing before");
        assert_eq!(crossed(hub.carry(0, 150, 100)), (300, true), "between the second and the third");
        assert_eq!(crossed(hub.carry(0, 250, 250)), (650, true), "around the third");
        assert_eq!(crossed(hub.carry(700, 700, 10)), (710, false), "what is over is forgotten");
        assert_eq!(crossed(hub.carry(690, 690, 10)), (720, true), "and is not given away again");
    }

    #[test]
    fn a_gap_that_just_fits_is_used() {
        let hub = link(1_000_000_000);
        hub.carry(0, 0, 100);
        hub.carry(0, 300, 100);
        let between = hub.carry(0, 100, 200);
        assert_eq!((between.done_ns, between.behind_others), (300, false));
        // A link as fast as its two drives: what one queues leaves room for what the other queues after it.
        let hub = link(2_000_000_000);
        let each = |_: u32| (1..=4u64).map(|n| hub.carry(0, (n - 1) * 1000, 1000).done_ns).collect::<Vec<_>>();
        let (one, other) = (each(0), each(1));
        assert_eq!(one, [500, 1500, 2500, 3500]);
        assert_eq!(other, [1000, 2000, 3000, 4000]);
    }

    #[test]
    fn drives_share_a_link_by_its_name() {
        let name = |n: &str| LinkName::new(n).unwrap();
        let on = |n: &str| {
            let link = Some(EmulatedLink { name: name(n), rate_bytes_per_s: 5 });
            Some(Emulation { rate_bytes_per_s: 5, link, ..Emulation::default() })
        };
        let alone = Some(Emulation { rate_bytes_per_s: 5, ..Emulation::default() });
        let drives = [("a", on("hub")), ("b", on("other")), ("c", on("hub")), ("d", alone), ("e", None)];
        let made = paced_drives(&drives).unwrap();
        let of = |i: usize| made[i].as_ref().and_then(|d| d.link()).map(Arc::as_ptr);
        assert!(of(0).is_some() && of(0) == of(2) && of(0) != of(1));
        assert_eq!((of(3), made[4].is_none()), (None, true));
    }

    proptest! {
        #[test]
        fn it_never_carries_more_than_its_rate_and_never_idles(
            rate in 1_000u64..10_000_000_000,
            reads in prop::collection::vec((1u64..1 << 20, 0u64..500_000, 0u64..2_000_000), 1..60),
        ) {
            let hub = link(rate);
            let (mut now, mut bytes, mut last, mut first) = (0, 0u128, 0, u64::MAX);
            let mut froms = Vec::new();
            for (len, gap, ahead) in reads {
                now += gap;
                let from = now + ahead;
                let done = hub.carry(now, from, len).done_ns;
                prop_assert!(u128::from(done - from) * u128::from(rate) >= u128::from(len) * 1_000_000_000);
                bytes += u128::from(len);
                (first, last) = (first.min(from), last.max(done));
                froms.push(from);
            }
            prop_assert!(u128::from(last - first) * u128::from(rate) >= bytes * 1_000_000_000);
            // From the latest beginning on there is no gap: all that is left would fit before it or right after it.
            let latest = froms.iter().max().copied().unwrap_or(0);
            let all = (bytes * 1_000_000_000).div_ceil(u128::from(rate)) + froms.len() as u128;
            prop_assert!(u128::from(last) <= u128::from(latest) + all);
        }
    }
}
