//! The rate limit of a copy. Pure: the time is an argument, so that it can be simulated.

/// Says how long to wait before the next bytes. No credit is saved up while the copy waits for something else, so no
/// stretch of it is faster than the limit by more than one piece.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    bytes_per_s: Option<u64>,
    /// When the bytes let through so far will have had their time.
    due_ns: u64,
}

impl Pace {
    /// At most `bytes_per_s`; `None` = as fast as it goes.
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s, due_ns: 0 }
    }

    /// How long to wait at `now_ns` before `bytes` more may go.
    pub fn wait_ns(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let Some(rate) = self.bytes_per_s else { return 0 };
        let begins = self.due_ns.max(now_ns);
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        self.due_ns = begins.saturating_add(u64::try_from(takes).unwrap_or(u64::MAX));
        begins - now_ns
    }

    /// How long to wait at `now_ns` until all that was let through has had its time.
    pub fn rest_ns(&self, now_ns: u64) -> u64 {
        if self.bytes_per_s.is_none() { 0 } else { self.due_ns.saturating_sub(now_ns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_holds_on_simulated_time_whatever_a_piece_takes() {
        // 100 pieces of 1 MB at 50 MB/s: 20 ms each. Copying one takes 3 ms, one in ten takes 70 ms.
        let mut pace = Pace::new(Some(50_000_000));
        let (mut now, mut waited, mut begun) = (0u64, 0u64, Vec::new());
        for i in 0..100u64 {
            let wait = pace.wait_ns(now, 1_000_000);
            waited += wait;
            now += wait;
            begun.push(now);
            now += if i % 10 == 9 { 70_000_000 } else { 3_000_000 };
        }
        now += pace.rest_ns(now);
        assert!(begun.windows(2).all(|w| w[1] - w[0] >= 20_000_000), "no burst after a slow piece");
        assert_eq!(now, 10 * (9 * 20_000_000 + 70_000_000), "the slow ones are not made up for");
        assert_eq!(waited, 90 * 17_000_000);
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        let mut pace = Pace::new(None);
        assert_eq!((pace.wait_ns(5, u64::MAX), pace.rest_ns(5)), (0, 0));
        let mut slow = Pace::new(Some(1));
        slow.wait_ns(0, u64::MAX);
        assert_eq!(slow.wait_ns(0, 1), u64::MAX, "no overflow");
    }
}
