//! Whether a drive still does what it did: compares what its reads teach now with the best that they taught before (or what was
//! known before the run). Pure: learnt rates go in, changes come out.
//!
//! A drive is *throttled* when an expert takes at least [`FAR`] times its best for [`SUSTAINED`] busy periods, fewer the further it
//! has sunk, and by more than what a busy machine explains. It has recovered when an expert takes at most [`NEAR`] times its best.

use super::rates::SeenRate;

/// Busy periods before a rate counts.
const SETTLED: u64 = 16;
/// Busy periods in a row that make a drive throttled on which an expert takes [`FAR`] times its best; at twice that half as many,
/// because waiting to be sure costs so much more, and at least [`LEAST`].
const SUSTAINED: f64 = 16.0;
/// See [`SUSTAINED`].
const LEAST: f64 = 4.0;
/// Times its best that an expert takes on a drive that slows, and on one that is well.
const FAR: f64 = 2.0;
/// See [`FAR`].
const NEAR: f64 = 1.5;
/// Less than this above the best is noise, in nanoseconds.
const NOISE_NS: f64 = 500_000.0;

/// A change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// It has slowed.
    Throttled {
        /// How many times its best an expert takes.
        factor: f64,
        /// Since when, on the run's clock.
        since_ns: u64,
    },
    /// It is well again.
    Recovered {
        /// Since when it had been slow.
        since_ns: u64,
    },
}

/// Watches one drive.
#[derive(Clone, Copy, Debug, Default)]
pub struct PaceWatch {
    /// What an expert takes by what was known before the run.
    known_ns: Option<f64>,
    /// Least time that an expert took.
    best_ns: Option<f64>,
    /// Least time of a read that was alone on the drive, while it was well.
    lone_ns: Option<f64>,
    /// How many times its best an expert took at the last look.
    factor: Option<f64>,
    /// It is slow by what was known before the run, not by its own best.
    by_known: bool,
    /// Busy periods at the last look.
    periods: u64,
    /// Busy periods, and the time, at which it was first seen to be slow.
    slow_since: Option<(u64, u64)>,
    throttled: bool,
}

impl PaceWatch {
    /// Of a drive on which an expert takes `known_ns`, if that is known.
    pub fn new(known_ns: Option<f64>) -> Self {
        Self { known_ns, ..Self::default() }
    }

    /// How long an expert of `bytes` takes at a rate.
    pub fn expert_ns(seen: &SeenRate, bytes: u64) -> f64 {
        seen.fixed_ns + bytes as f64 * 1e9 / seen.bytes_per_s
    }

    /// It has slowed and not recovered.
    pub fn is_throttled(&self) -> bool {
        self.throttled
    }

    /// How many times its best an expert takes, as far as that is known.
    pub fn factor(&self) -> Option<f64> {
        self.factor
    }

    /// Whether an expert that took so long alone is as it should be. What reads take that share a drive says little about one
    /// that has it for itself, so that it is compared with others that were alone, where there are any.
    pub fn is_back(&self, took_ns: u64) -> bool {
        let usual = if self.by_known { self.known_ns } else { self.lone_ns.or(self.best_ns) };
        usual.is_none_or(|usual| took_ns as f64 <= NEAR * usual + NOISE_NS)
    }

    /// Takes in the least time that a read has taken alone, while the drive is well.
    pub fn learn_lone(&mut self, lone_ns: Option<f64>) {
        if self.slow_since.is_none() {
            self.lone_ns = lone_ns.or(self.lone_ns);
        }
    }

    /// Begins anew, with the best that there was.
    pub fn forget(&mut self) {
        let Self { known_ns, best_ns, lone_ns, .. } = *self;
        *self = Self { known_ns, best_ns, lone_ns, ..Self::default() };
    }

    /// What is known at `now_ns` of a drive for experts of `bytes`. What was known before the run is a pace of several reads at
    /// once, so that it says nothing about a drive whose reads are `alone`.
    pub fn look(&mut self, seen: &SeenRate, bytes: u64, alone: bool, now_ns: u64) -> Option<Change> {
        if seen.periods == self.periods || seen.periods < SETTLED {
            return None;
        }
        self.periods = seen.periods;
        let takes = Self::expert_ns(seen, bytes);
        let own = *self.best_ns.get_or_insert(takes);
        if takes < own {
            self.best_ns = Some(takes);
        }
        let best = self.known_ns.filter(|_| !alone).map_or(own, |known| known.min(own));
        self.factor = Some(takes / best);
        let over = takes - best > NOISE_NS;
        if over && takes >= FAR * best {
            let (periods, since_ns) = *self.slow_since.get_or_insert((seen.periods, now_ns));
            let sustained = (SUSTAINED * FAR * best / takes).ceil().max(LEAST) as u64;
            if !self.throttled && seen.periods >= periods + sustained {
                self.throttled = true;
                self.by_known = takes < FAR * own;
                return Some(Change::Throttled { factor: takes / best, since_ns });
            }
        } else if !over || takes <= NEAR * best {
            let was = self.slow_since.take();
            if std::mem::take(&mut self.throttled) {
                return was.map(|(_, since_ns)| Change::Recovered { since_ns });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1_000_000;

    fn seen(ms: f64, periods: u64) -> SeenRate {
        SeenRate { bytes_per_s: BYTES as f64 * 1e3 / ms, fixed_ns: 0.0, periods }
    }

    #[test]
    fn only_what_lasts_counts_and_once() {
        let mut watch = PaceWatch::new(None);
        let mut at = 0u64;
        let mut look = |ms: f64, times: u64| {
            let changes = (0..times).filter_map(|_| {
                at += 1;
                watch.look(&seen(ms, at), BYTES, true, at * 10)
            });
            changes.collect::<Vec<_>>()
        };
        assert!(look(10.0, 100).is_empty());
        assert!(look(30.0, 10).is_empty(), "a hiccup");
        assert!(look(10.0, 10).is_empty());
        assert!(look(18.0, 100).is_empty(), "not far enough");
        let slowed = look(40.0, 100);
        assert!(
            matches!(slowed[..], [Change::Throttled { factor, since_ns: 2210 }] if (factor - 4.0).abs() < 1e-9),
            "{slowed:?}"
        );
        assert!(look(18.0, 10).is_empty(), "better, and not well");
        assert_eq!(look(12.0, 10), [Change::Recovered { since_ns: 2210 }]);
        assert!(watch.is_back(15_000_000) && !watch.is_back(16_000_000));
        watch.learn_lone(Some(30e6));
        assert!(
            watch.is_back(45_000_000) && !watch.is_back(46_000_000),
            "alone it takes longer than its share of several"
        );
        watch.forget();
        assert!(watch.is_back(45_000_000) && watch.factor().is_none());
    }

    #[test]
    fn the_further_it_sank_the_sooner_it_is_known() {
        for (times, after) in [(2.0, 16), (3.0, 11), (4.0, 8), (8.0, 4), (100.0, 4)] {
            let mut watch = PaceWatch::new(None);
            assert!((1..=20).all(|n| watch.look(&seen(10.0, n), BYTES, true, n).is_none()));
            let slowed = (21..100).find(|n| watch.look(&seen(10.0 * times, *n), BYTES, true, *n).is_some());
            assert_eq!(slowed, Some(21 + after), "{times} times");
        }
    }

    #[test]
    fn small_experts_on_a_busy_machine_and_slow_drives_as_such_are_no_throttling() {
        let mut watch = PaceWatch::new(None);
        let noisy = |n: u64| if n % 200 < 100 { 0.1 } else { 0.5 };
        assert!((1..1000).all(|n| watch.look(&seen(noisy(n), n), BYTES, false, n).is_none()));
        let mut watch = PaceWatch::new(None);
        assert!((1..1000).all(|n| watch.look(&seen(500.0, n), BYTES, false, n).is_none()), "it was never faster");
        let mut watch = PaceWatch::new(Some(10e6));
        let slow = |n: u64| seen(500.0, n);
        assert!(
            (1..1000).all(|n| watch.look(&slow(n), BYTES, true, n).is_none()),
            "what is known is not of lone reads"
        );
        watch.learn_lone(Some(500e6));
        assert!((1000..2000).any(|n| watch.look(&slow(n), BYTES, false, n).is_some()), "it was known to be");
        assert!(!watch.is_back(500_000_000) && watch.is_back(15_000_000), "as it was from its first read is not back");
    }
}
