//! How much a drive may be asked for: bytes per second, and a share of the time. Pure: the clock is an argument.
//!
//! A read may go to the drive when the bytes of those before it have been paid for at the rate, so that any span of `t` seconds sees
//! at most `rate * t` bytes and one read more. A duty cycle lets reads go only in the first part of every [`PERIOD_NS`]. What went
//! is metered apart from what was allowed.

/// Length of a duty cycle.
pub const PERIOD_NS: u64 = 100_000_000;
/// Windows in which bytes are metered, in nanoseconds.
pub const WINDOWS_NS: [u64; 2] = [10_000_000, 1_000_000_000];
/// A duty cycle that is always on, in thousandths.
pub const ALWAYS: u16 = 1000;

/// What kept a read waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// The rate.
    Rate,
    /// The duty cycle.
    Duty,
}

/// What one read has waited, kept with whatever asks for it: a guess that is taken back and asked again is still the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    since_ns: Option<u64>,
    /// It has been counted for the rate, and for the duty cycle.
    counted: [bool; 2],
}

/// What was handed to one drive under a limit, and what waited for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitCounters {
    /// Reads handed over.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the largest.
    pub largest_bytes: u64,
    /// Most bytes in any window of [`WINDOWS_NS`] (windows lie at whole multiples of their length).
    pub most_bytes: [u64; 2],
    /// Reads that had to wait for the rate, and for the duty cycle.
    pub rate_waits: u64,
    /// See `rate_waits`.
    pub duty_waits: u64,
    /// Time that they waited.
    pub wait_ns: u64,
    /// Reads handed over in the part of a cycle in which none should be.
    pub off_duty: u64,
}

impl LimitCounters {
    /// Most bytes that a window may see at `bytes_per_s`.
    pub fn allowed(&self, bytes_per_s: u64, window: usize) -> u64 {
        let share = u128::from(bytes_per_s) * u128::from(WINDOWS_NS[window]) / 1_000_000_000;
        u64::try_from(share).unwrap_or(u64::MAX).saturating_add(self.largest_bytes)
    }
}

/// The limit of one drive.
#[derive(Clone, Debug)]
pub struct ReadLimit {
    bytes_per_s: u64,
    duty_permille: u16,
    /// What is metered for, whether it is carried out or not.
    meant_duty: u16,
    paid_ns: u64,
    windows: [(u64, u64); 2],
    seen: LimitCounters,
}

impl ReadLimit {
    /// A limit of `bytes_per_s` (0 = none) in `duty_permille` of the time, metered against `meant_duty`.
    pub fn new(bytes_per_s: u64, duty_permille: u16, meant_duty: u16) -> Self {
        Self {
            bytes_per_s,
            duty_permille,
            meant_duty,
            paid_ns: 0,
            windows: [(0, 0); 2],
            seen: LimitCounters::default(),
        }
    }

    /// What was seen until now.
    pub fn counters(&self) -> LimitCounters {
        self.seen
    }

    /// When a read may go that would go at `now_ns`, and what it waits for; `None` = at once.
    pub fn wait(&self, now_ns: u64) -> Option<(u64, Waits)> {
        if self.bytes_per_s > 0 && self.paid_ns > now_ns {
            return Some((self.paid_ns, Waits::Rate));
        }
        let off = is_off(now_ns, self.duty_permille);
        off.then(|| ((now_ns / PERIOD_NS + 1) * PERIOD_NS, Waits::Duty))
    }

    /// A read that has `waiting` behind it cannot go at `now_ns`. Counted once for each reason.
    pub fn refused(&mut self, waiting: &mut Waiting, now_ns: u64, why: Waits) {
        waiting.since_ns.get_or_insert(now_ns);
        if !std::mem::replace(&mut waiting.counted[why as usize], true) {
            match why {
                Waits::Rate => self.seen.rate_waits += 1,
                Waits::Duty => self.seen.duty_waits += 1,
            }
        }
    }

    /// A read of `bytes` that has `waiting` behind it goes at `now_ns`. Its waiting is over: should it have to go once more, that
    /// is another read.
    pub fn goes(&mut self, waiting: &mut Waiting, bytes: u64, now_ns: u64) {
        if let Some(since_ns) = std::mem::take(waiting).since_ns {
            self.seen.wait_ns += now_ns.saturating_sub(since_ns);
        }
        if self.bytes_per_s > 0 {
            let takes = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(self.bytes_per_s));
            let takes = u64::try_from(takes).unwrap_or(u64::MAX);
            self.paid_ns = self.paid_ns.max(now_ns).saturating_add(takes);
        }
        let seen = &mut self.seen;
        seen.reads += 1;
        seen.bytes += bytes;
        seen.largest_bytes = seen.largest_bytes.max(bytes);
        seen.off_duty += u64::from(is_off(now_ns, self.meant_duty));
        for (window, length) in WINDOWS_NS.iter().enumerate() {
            let (at, sum) = &mut self.windows[window];
            if *at != now_ns / length {
                (*at, *sum) = (now_ns / length, 0);
            }
            *sum += bytes;
            seen.most_bytes[window] = seen.most_bytes[window].max(*sum);
        }
    }
}

fn is_off(now_ns: u64, duty_permille: u16) -> bool {
    now_ns % PERIOD_NS >= PERIOD_NS / 1000 * u64::from(duty_permille.min(ALWAYS))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands over as many reads as the limit lets through in `span_ns`, trying every microsecond.
    fn drive(limit: &mut ReadLimit, read_bytes: u64, span_ns: u64) -> Vec<u64> {
        let (mut went, mut waiting) = (Vec::new(), Waiting::default());
        for now in (0..span_ns).step_by(1000) {
            match limit.wait(now) {
                None => {
                    limit.goes(&mut waiting, read_bytes, now);
                    went.push(now);
                }
                Some((_, why)) => limit.refused(&mut waiting, now, why),
            }
        }
        went
    }

    #[test]
    fn no_window_sees_more_than_the_rate_and_one_read() {
        let mut limit = ReadLimit::new(100_000_000, ALWAYS, ALWAYS);
        let went = drive(&mut limit, 250_000, 3_000_000_000);
        let seen = limit.counters();
        assert_eq!(went.len(), 1200, "2.5 ms each");
        assert_eq!((seen.reads, seen.rate_waits, seen.duty_waits, seen.off_duty), (1200, 1200, 0, 0));
        for window in 0..2 {
            assert!(seen.most_bytes[window] <= seen.allowed(100_000_000, window), "{seen:?}");
        }
        // Any span, not only those of the meter.
        for span in [4usize, 37, 400] {
            let least = went.windows(span + 1).map(|w| w[span] - w[0]).min().unwrap();
            assert!(least >= span as u64 * 2_500_000, "{span} reads within {least} ns");
        }
        let mut idle = ReadLimit::new(100_000_000, ALWAYS, ALWAYS);
        idle.goes(&mut Waiting::default(), 1000, 5_000_000_000);
        assert_eq!(idle.wait(5_000_000_000), Some((5_000_010_000, Waits::Rate)), "time without reads is not saved up");
    }

    #[test]
    fn a_read_that_waits_counts_once_whoever_else_waits() {
        let mut limit = ReadLimit::new(1000, 800, 800);
        let (mut demand, mut guess, mut other) = Default::default();
        for now in 0..10 {
            limit.refused(&mut demand, now, Waits::Rate);
            limit.refused(&mut guess, now, Waits::Rate);
        }
        limit.refused(&mut demand, 10, Waits::Duty);
        limit.refused(&mut other, 10, Waits::Rate); // in front of the guess, which was taken back meanwhile
        limit.refused(&mut demand, 11, Waits::Rate);
        limit.refused(&mut guess, 11, Waits::Rate);
        assert_eq!((limit.counters().rate_waits, limit.counters().duty_waits), (3, 1));
        limit.goes(&mut guess, 1, 20);
        limit.goes(&mut demand, 1, 30);
        assert_eq!(limit.counters().wait_ns, 20 + 30);
        limit.refused(&mut guess, 40, Waits::Rate);
        assert_eq!(limit.counters().rate_waits, 4, "another read of the same");
    }

    #[test]
    fn a_duty_cycle_lets_reads_go_in_its_first_part_only() {
        let mut limit = ReadLimit::new(0, 800, 800);
        let went = drive(&mut limit, 1000, 300_000_000);
        assert!(went.iter().all(|ns| ns % PERIOD_NS < 80_000_000));
        assert_eq!((limit.counters().duty_waits, limit.counters().off_duty), (3, 0));
        assert_eq!(limit.counters().wait_ns, 2 * 20_000_000, "two have gone on");
        let mut lying = ReadLimit::new(0, ALWAYS, 800);
        drive(&mut lying, 1000, 100_000_000);
        assert_eq!(lying.counters().off_duty, 20_000, "the meter knows what was meant");
    }
}
