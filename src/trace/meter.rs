//! What a live view shows of one device: sums, the rate of the last second, the peak over a rolling 100 ms and the last
//! ten seconds. Fed with windows; holds a fixed number of them.

use super::windows::{DeviceWindow, PEAK_MS};
use std::collections::VecDeque;

/// How much of the past is kept.
pub const HISTORY_NS: u64 = 10_000_000_000;
/// The rate of now is taken over so long.
const NOW_NS: u64 = 1_000_000_000;

/// Sums over some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Length of the windows.
    pub span_ns: u64,
    /// Bytes.
    pub bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Time that they took, summed.
    pub io_ns: u64,
    /// Windows.
    pub windows: u64,
    /// Windows without a byte.
    pub idle_windows: u64,
    /// Largest mean over 100 ms (over one window where windows are longer).
    pub peak_bytes_per_s: f64,
}

impl Sums {
    /// Bytes over time.
    pub fn bytes_per_s(&self) -> f64 {
        if self.span_ns == 0 { 0.0 } else { self.bytes as f64 * 1e9 / self.span_ns as f64 }
    }

    /// Mean time of a read; `None` without reads.
    pub fn mean_read_ns(&self) -> Option<u64> {
        self.io_ns.checked_div(self.reads)
    }

    fn add(&mut self, window: &DeviceWindow, peak: Option<f64>) {
        self.span_ns += window.to_ns - window.from_ns;
        self.bytes = self.bytes.saturating_add(window.bytes);
        self.reads = self.reads.saturating_add(window.reads);
        self.io_ns = self.io_ns.saturating_add(window.io_ns);
        self.windows += 1;
        self.idle_windows += u64::from(window.bytes == 0);
        self.peak_bytes_per_s = self.peak_bytes_per_s.max(peak.unwrap_or_default());
    }
}

/// One device's meter.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    history: VecDeque<DeviceWindow>,
    rolling: VecDeque<DeviceWindow>,
    rolling_bytes: u128,
    total: Sums,
    since: Sums,
    in_flight: u32,
}

impl Meter {
    /// Takes the next window.
    pub fn push(&mut self, window: DeviceWindow) {
        self.rolling.push_back(window);
        self.rolling_bytes += u128::from(window.bytes);
        while let Some(oldest) = self.rolling.front().copied().filter(|_| self.rolling.len() > 1) {
            // what is left without the oldest window must still be as long as a peak
            if ms(window.to_ns - oldest.to_ns) < PEAK_MS {
                break;
            }
            self.rolling_bytes -= u128::from(oldest.bytes);
            self.rolling.pop_front();
        }
        let spanned = ms(window.to_ns - self.rolling.front().map_or(window.from_ns, |w| w.from_ns));
        // fewer windows than a peak needs would make a peak of the first lump
        let peak = (spanned >= PEAK_MS).then(|| self.rolling_bytes as f64 * 1e3 / spanned);
        self.total.add(&window, peak);
        self.since.add(&window, peak);
        self.in_flight = window.in_flight;
        self.history.push_back(window);
        while self.history.front().is_some_and(|w| window.to_ns - w.to_ns >= HISTORY_NS) {
            self.history.pop_front();
        }
    }

    /// Everything so far.
    pub fn total(&self) -> &Sums {
        &self.total
    }

    /// Everything since the last call.
    pub fn take_since(&mut self) -> Sums {
        std::mem::take(&mut self.since)
    }

    /// Everything since [`Meter::take_since`], left where it is.
    pub fn since(&self) -> &Sums {
        &self.since
    }

    /// Reads and writes under way at the last window.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Rate over the last second (or over what there is).
    pub fn now_bytes_per_s(&self) -> f64 {
        let Some(end) = self.history.back().map(|w| w.to_ns) else { return 0.0 };
        let recent = self.history.iter().rev().take_while(|w| end - w.from_ns <= NOW_NS || w.to_ns == end);
        let (bytes, from) = recent.fold((0u128, end), |(bytes, _), w| (bytes + u128::from(w.bytes), w.from_ns));
        if end == from { 0.0 } else { bytes as f64 * 1e9 / (end - from) as f64 }
    }

    /// Mean rates of the last ten seconds in `cells` parts, oldest first; `None` where nothing was watched yet.
    pub fn spark(&self, cells: usize) -> Vec<Option<f64>> {
        let Some(end) = self.history.back().map(|w| w.to_ns) else { return vec![None; cells] };
        let mut sums: Vec<Option<(u128, u64)>> = vec![None; cells];
        let cell_ns = (HISTORY_NS / cells.max(1) as u64).max(1);
        for window in &self.history {
            // a window counts where it ends; windows are shorter than cells, or else cells repeat them
            let age = (end - window.to_ns) / cell_ns;
            let Some(at) = usize::try_from(age).ok().and_then(|age| cells.checked_sub(age + 1)) else { continue };
            let (bytes, span) = sums[at].unwrap_or((0u128, 0u64));
            sums[at] = Some((bytes + u128::from(window.bytes), span + (window.to_ns - window.from_ns)));
        }
        let mut rates: Vec<Option<f64>> =
            sums.into_iter().map(|s| s.map(|(bytes, span)| bytes as f64 * 1e9 / span.max(1) as f64)).collect();
        // with windows longer than cells, the cells before an end belong to the window that ends there
        for at in (1..rates.len()).rev() {
            let age_ns = (cells - at) as u64 * cell_ns;
            let watched = self.history.front().is_some_and(|w| end - w.from_ns > age_ns);
            if rates[at - 1].is_none() && watched {
                rates[at - 1] = rates[at];
            }
        }
        rates
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn window(at: u64, length_ms: u64, bytes: u64) -> DeviceWindow {
        let from_ns = at * length_ms * MS;
        let to_ns = from_ns + length_ms * MS;
        DeviceWindow { from_ns, to_ns, bytes, reads: bytes / 1000, io_ns: bytes, in_flight: at as u32, partial: false }
    }

    #[test]
    fn a_lump_is_spread_over_a_hundred_milliseconds() {
        let mut meter = Meter::default();
        for at in 0..200 {
            meter.push(window(at, 10, if at == 50 { 1_000_000 } else { 0 }));
        }
        let total = meter.total();
        assert_eq!((total.bytes, total.windows, total.idle_windows), (1_000_000, 200, 199));
        assert_eq!(total.peak_bytes_per_s, 1e7, "1 MB in 100 ms, not in 10");
        assert_eq!(total.bytes_per_s(), 5e5);
        assert_eq!(total.mean_read_ns(), Some(1000));
        assert_eq!(meter.now_bytes_per_s(), 0.0);
        assert_eq!(meter.in_flight(), 199);
        assert_eq!(meter.take_since().bytes, 1_000_000);
        assert_eq!((meter.since().bytes, meter.take_since().windows), (0, 0));
    }

    #[test]
    fn a_peak_needs_its_whole_time_and_long_windows_are_peaks_themselves() {
        let mut meter = Meter::default();
        (0..9).for_each(|at| meter.push(window(at, 10, 500)));
        assert_eq!(meter.total().peak_bytes_per_s, 0.0);
        meter.push(window(9, 10, 500));
        assert_eq!(meter.total().peak_bytes_per_s, 5e4);
        let mut slow = Meter::default();
        slow.push(window(0, 2000, 8_000_000));
        slow.push(window(1, 2000, 2_000_000));
        assert_eq!((slow.total().peak_bytes_per_s, slow.now_bytes_per_s()), (4e6, 1e6));
    }

    #[test]
    fn the_past_is_ten_seconds_and_no_more() {
        let mut meter = Meter::default();
        assert_eq!(meter.spark(4), [None; 4]);
        for at in 0..3000 {
            meter.push(window(at, 10, at));
        }
        assert!(meter.history.len() <= 1000, "{}", meter.history.len());
        let spark = meter.spark(10);
        assert!(spark.iter().all(Option::is_some) && spark.is_sorted(), "{spark:?}");
        assert_eq!(spark[9], Some((2900..3000).sum::<u64>() as f64), "bytes of the last second");
        let mut young = Meter::default();
        (0..100).for_each(|at| young.push(window(at, 10, 7)));
        let spark = young.spark(10);
        assert_eq!((spark[8], spark[9]), (None, Some(700.0)));
        let mut coarse = Meter::default();
        (0..2).for_each(|at| coarse.push(window(at, 2000, 2_000_000)));
        let known: Vec<bool> = coarse.spark(10).iter().map(Option::is_some).collect();
        assert_eq!(known, [false, false, false, false, false, false, true, true, true, true]);
    }
}
