//! Which drives can be relied on: counts what becomes of a drive's reads and says when demand should leave it alone, and when it
//! may come back. Pure: outcomes, times and numbers of barriers go in.
//!
//! A drive that says it is gone, or is silent for the whole read timeout, is *degraded* at once: waiting for it again would cost
//! every barrier the same. One that fails otherwise is when its last [`IN_A_ROW`] reads failed, or [`OF_RECENT`] of the last 32: a
//! single bad block must not cost a drive. A degraded drive serves only what no other drive holds, and *probes*: now and then a
//! read beside those of demand, of bytes that demand gets elsewhere, so that no barrier waits for it. [`BACK_AFTER`] good probes in a
//! row, and the drive is as it was.

use crate::ids::DriveId;
use serde::{Deserialize, Serialize};

/// Failures in a row that degrade a drive.
const IN_A_ROW: u32 = 3;
/// Failures among its last 32 reads that degrade it.
const OF_RECENT: u32 = 8;
/// Good probes in a row after which a drive serves demand again.
pub const BACK_AFTER: u32 = 3;
/// Barriers before the first probe, after a good one, and at most between two.
const FIRST_PROBE: u64 = 16;
const NEXT_PROBE: u64 = 4;
const LAST_PROBE: u64 = 1024;
/// Events of a run that are kept; later ones are only counted.
pub const MAX_EVENTS: usize = 256;

/// What is wrong with a drive, or was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trouble {
    /// The system says that it is not there: ENODEV, ENXIO, ESTALE or EREMOTEIO.
    Gone,
    /// Nothing came from it for the whole read timeout.
    Silent,
    /// Several reads failed, came short or with wrong bytes.
    Failing,
    /// It delivers far less than it did, and less than it is worth waiting for.
    Slow,
}

impl Trouble {
    /// In words.
    pub fn says(self) -> &'static str {
        match self {
            Self::Gone => "is gone",
            Self::Silent => "does not answer",
            Self::Failing => "keeps failing",
            Self::Slow => "is too slow to wait for",
        }
    }
}

/// How one read failed, as far as a drive's health is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// The drive is not there.
    Gone,
    /// No answer.
    Silent,
    /// Anything else that another copy can make good.
    Otherwise,
}

impl Failed {
    /// By the number of the error.
    pub fn of_errno(errno: i32) -> Self {
        match errno {
            libc::ENODEV | libc::ENXIO | libc::ESTALE | libc::EREMOTEIO => Self::Gone,
            libc::ETIMEDOUT => Self::Silent,
            _ => Self::Otherwise,
        }
    }
}

/// What happened to a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Happened {
    /// Demand leaves it alone from now on.
    Degraded(Trouble),
    /// Demand uses it again.
    Restored,
    /// It delivers far less than it did; in hundredths, how many times as long an expert takes.
    Throttled {
        /// 250 = two and a half times as long.
        hundredths: u32,
    },
    /// It is as fast as before, or nearly.
    Recovered,
}

/// When something happened to a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveEvent {
    /// The drive.
    pub drive: DriveId,
    /// What.
    pub happened: Happened,
    /// In which pass.
    pub step: u64,
    /// In which barrier.
    pub barrier: u64,
    /// When, on the run's clock.
    pub at_ns: u64,
    /// For how long it had been so: since the first read that failed was asked for, since it was degraded, or since it slowed.
    pub after_ns: u64,
}

/// Where a barrier is in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// The pass.
    pub step: u64,
    /// The barrier.
    pub barrier: u64,
    /// The time.
    pub ns: u64,
}

/// One drive.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Bit 0 = the last read that ended, 1 = it failed.
    recent: u32,
    ended: u32,
    /// When the first failure since the last good read was asked for.
    first_ns: Option<u64>,
    down: Option<Down>,
}

#[derive(Clone, Copy, Debug)]
struct Down {
    why: Trouble,
    since_ns: u64,
    next_probe: u64,
    /// Barriers until the probe after a bad one.
    wait: u64,
    good: u32,
    /// It was too slow before it failed altogether.
    was_slow: bool,
}

impl Health {
    /// A read of demand has brought what it should.
    pub fn good(&mut self) {
        (self.recent, self.ended) = (self.recent << 1, self.ended.saturating_add(1));
        self.first_ns = None;
    }

    /// A read asked for at `asked_ns` has failed. Says why the drive is degraded, if it is now and was not before, and for how
    /// long it has failed.
    pub fn failed(&mut self, how: Failed, asked_ns: u64, now: Now) -> Option<(Trouble, u64)> {
        (self.recent, self.ended) = (self.recent << 1 | 1, self.ended.saturating_add(1));
        let first = *self.first_ns.get_or_insert(asked_ns);
        let in_a_row = self.ended >= IN_A_ROW && self.recent.trailing_ones() >= IN_A_ROW;
        let why = match how {
            Failed::Gone => Trouble::Gone,
            Failed::Silent => Trouble::Silent,
            Failed::Otherwise if in_a_row || self.recent.count_ones() >= OF_RECENT => Trouble::Failing,
            Failed::Otherwise => return None,
        };
        self.degrade(why, now).then(|| (why, now.ns.saturating_sub(first)))
    }

    /// Demand is to leave it alone; `false` if it does already for a reason as good.
    pub fn degrade(&mut self, why: Trouble, now: Now) -> bool {
        if let Some(down) = &mut self.down {
            if down.why != Trouble::Slow || why == Trouble::Slow {
                return false;
            }
            (down.why, down.good) = (why, 0);
            return true;
        }
        let next_probe = now.barrier.saturating_add(FIRST_PROBE);
        self.down = Some(Down {
            why,
            since_ns: now.ns,
            next_probe,
            wait: FIRST_PROBE,
            good: 0,
            was_slow: why == Trouble::Slow,
        });
        true
    }

    /// Why demand leaves it alone; `None` = it does not.
    pub fn trouble(&self) -> Option<Trouble> {
        self.down.map(|d| d.why)
    }

    /// Whether it must be as fast as it was before it comes back.
    pub fn must_be_fast(&self) -> bool {
        self.down.is_some_and(|d| d.was_slow)
    }

    /// Demand that only it could serve has found it as fast as it was. `Some` = demand may use the drive again, and how long it
    /// did not.
    pub fn recovered(&mut self, now: Now) -> Option<u64> {
        let down = self.down.filter(|d| d.why == Trouble::Slow)?;
        *self = Self::default();
        Some(now.ns.saturating_sub(down.since_ns))
    }

    /// Whether a probe may be asked of it in this barrier.
    pub fn probe_due(&self, barrier: u64) -> bool {
        self.down.is_some_and(|d| barrier >= d.next_probe)
    }

    /// A probe has ended. `Some` = demand may use the drive again, and how long it did not.
    pub fn probed(&mut self, good: bool, now: Now) -> Option<u64> {
        let down = self.down.as_mut()?;
        if !good {
            down.wait = (down.wait * 2).min(LAST_PROBE);
            (down.good, down.next_probe) = (0, now.barrier.saturating_add(down.wait));
            return None;
        }
        down.good += 1;
        down.wait = FIRST_PROBE;
        down.next_probe = now.barrier.saturating_add(NEXT_PROBE);
        if down.good < BACK_AFTER {
            return None;
        }
        let was = now.ns.saturating_sub(down.since_ns);
        *self = Self::default();
        Some(was)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(barrier: u64) -> Now {
        Now { step: 0, barrier, ns: barrier * 1000 }
    }

    #[test]
    fn what_is_gone_or_silent_goes_at_once_and_a_bad_block_does_not_cost_a_drive() {
        for (how, why) in [(Failed::Gone, Trouble::Gone), (Failed::Silent, Trouble::Silent)] {
            let mut h = Health::default();
            assert_eq!(h.failed(how, 1500, at(2)), Some((why, 500)));
            assert_eq!(h.failed(how, 1500, at(3)), None, "it is degraded already");
        }
        let mut h = Health::default();
        for n in 0..200 {
            // one read in five: at most 7 of any 32
            let now = if n % 5 == 0 { h.failed(Failed::Otherwise, 0, at(n)) } else { None };
            assert_eq!(now, None, "read {n}");
            if n % 5 != 0 {
                h.good();
            }
        }
        assert_eq!(h.trouble(), None);
        let mut h = Health::default();
        assert!(h.degrade(Trouble::Slow, at(5)) && !h.degrade(Trouble::Slow, at(6)));
        assert_eq!(h.failed(Failed::Gone, 6000, at(7)), Some((Trouble::Gone, 1000)), "a slow drive may die");
        assert!(h.must_be_fast() && h.recovered(at(8)).is_none(), "and is still to be as fast as it was");
        let mut h = Health::default();
        h.degrade(Trouble::Slow, at(5));
        assert_eq!((h.recovered(at(8)), h.trouble()), (Some(3000), None));
        assert_eq!([libc::ENODEV, libc::EIO].map(Failed::of_errno), [Failed::Gone, Failed::Otherwise]);
    }

    #[test]
    fn three_in_a_row_or_every_third_degrade_and_the_time_counts_from_the_first() {
        let mut h = Health::default();
        h.good();
        assert_eq!(h.failed(Failed::Otherwise, 100, at(1)), None);
        assert_eq!(h.failed(Failed::Otherwise, 200, at(1)), None);
        assert_eq!(h.failed(Failed::Otherwise, 300, at(1)), Some((Trouble::Failing, 900)));
        let mut h = Health::default();
        let degraded = (0..64).find(|n| {
            let bad = n % 3 == 0;
            if !bad {
                h.good();
            }
            bad && h.failed(Failed::Otherwise, 0, at(*n)).is_some()
        });
        assert_eq!(degraded, Some(21), "the eighth failure");
    }

    #[test]
    fn probes_are_rare_rarer_after_bad_ones_and_three_good_ones_bring_a_drive_back() {
        let mut h = Health::default();
        h.failed(Failed::Gone, 0, at(10));
        let due = |h: &Health| (0..5000).find(|&b| h.probe_due(b));
        assert_eq!(due(&h), Some(26));
        assert_eq!(h.probed(false, at(26)), None);
        assert_eq!(due(&h), Some(26 + 32));
        (0..8).for_each(|_| assert_eq!(h.probed(false, at(100)), None));
        assert_eq!(due(&h), Some(100 + 1024), "and no rarer");
        assert_eq!(h.probed(true, at(200)), None);
        assert_eq!(due(&h), Some(204));
        assert_eq!(h.probed(true, at(204)), None);
        assert_eq!(h.probed(true, at(208)), Some(198_000));
        assert_eq!((h.trouble(), due(&h)), (None, None));
        assert_eq!(h.failed(Failed::Otherwise, 0, at(300)), None, "nothing is held against it");
    }
}
