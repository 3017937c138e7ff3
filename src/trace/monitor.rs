//! The sampler: a thread of its own that reads the kernel's counters at absolute deadlines (every 10 ms unless told
//! otherwise) into a buffer of a fixed size. It measures itself: how late it woke, which ticks it slept through, what CPU
//! time it used. Knows devices and processes by their counters only; what windows are, knows `windows`.
//!
//! While it runs nothing is allocated or formatted. Counters only grow, so a full buffer loses no byte: every second tick
//! is dropped (and counted), and windows are then interpolated over longer times.

use super::windows::{Reading, SamplerFigures};
use crate::clock::Clock;
use crate::sys::blockstat::{Counted, CounterFile, Counts};
use crate::sys::timer;
use hdrhistogram::Histogram;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Time between two ticks unless somebody asks for another.
pub const DEFAULT_INTERVAL_NS: u64 = 10_000_000;
/// Shortest time between two ticks; a wake-up takes a good part of it.
pub const MIN_INTERVAL_NS: u64 = 1_000_000;
/// Longest: counters of 32 bits must not go round between two ticks.
pub const MAX_INTERVAL_NS: u64 = 60_000_000_000;
/// The thread sleeps at most so long at once, so that it can be ended.
const NAP_NS: u64 = 100_000_000;
/// Memory for readings: two hours of eight devices.
const MAX_BUFFER_BYTES: usize = 256 << 20;
/// Ticks that a buffer holds at most: two hours at 10 ms.
const MAX_TICKS: usize = 720_000;
/// Errors beyond a minute count as one.
const MAX_ERROR_NS: u64 = 60_000_000_000;

/// Why nothing can be sampled.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// The counters of something cannot be read.
    #[error("{name}: its counters cannot be read: {source}")]
    Counters {
        /// The device or process.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// The time between ticks.
    #[error("the monitor's interval is {0} ns; give 1ms to 60s")]
    Interval(u64),
    /// The thread or its memory.
    #[error("the monitor's {what}: {reason}")]
    Start {
        /// What is missing.
        what: &'static str,
        /// Why.
        reason: String,
    },
}

/// Something to sample.
#[derive(Debug)]
pub struct Source {
    /// Its name in windows and tables.
    pub name: String,
    /// Its counters.
    pub file: CounterFile,
}

impl Source {
    /// Bytes of a unit of its counters.
    pub fn unit_bytes(&self) -> u64 {
        self.file.unit_bytes()
    }

    /// Whether it counts reads and their time.
    pub fn knows_reads(&self) -> bool {
        self.file.counts() == Counts::Device
    }
}

/// What the sampler has gathered.
#[derive(Debug)]
pub struct Sampled {
    /// Readings, tick by tick and within one source by source; the first tick was read before the thread began.
    pub readings: Vec<Reading>,
    /// The sources.
    pub sources: Vec<Source>,
    /// What it did and what it cost.
    pub figures: SamplerFigures,
}

impl Sampled {
    /// The readings of source `index`, in order.
    pub fn of(&self, index: usize) -> impl Iterator<Item = Reading> + '_ {
        self.readings.iter().skip(index).step_by(self.sources.len().max(1)).copied()
    }
}

/// A running sampler. It ends when it is finished or dropped.
pub struct Sampler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Vec<Source>>>,
}

struct Shared {
    clock: Clock,
    interval_ns: u64,
    stop: AtomicBool,
    ledger: Mutex<Ledger>,
}

/// What the thread writes and others read; locked for a copy of a few readings.
struct Ledger {
    readings: Vec<Reading>,
    width: usize,
    /// Only every so many ticks are kept.
    every: u64,
    ticks: u64,
    missed: u64,
    thinned: u32,
    errors: Histogram<u64>,
    worst_ns: u64,
    cpu_ns: Option<u64>,
    started_ns: u64,
    last_ns: u64,
    /// The last counters of each source.
    last: Vec<Counted>,
    /// What the kernel said when the counters of a source could no longer be read, and its number.
    lost: Vec<Option<(io::ErrorKind, Option<i32>)>>,
}

impl Sampler {
    /// Reads every source once and starts the thread. Ticks are at whole multiples of `interval_ns` on `clock`.
    pub fn start(clock: Clock, interval_ns: u64, sources: Vec<Source>) -> Result<Self, MonitorError> {
        let width = sources.len();
        let ticks = (MAX_BUFFER_BYTES / size_of::<Reading>() / width.max(1)).min(MAX_TICKS);
        Self::with_room(clock, interval_ns, sources, ticks)
    }

    /// The same with room for `ticks` ticks (at least four).
    pub fn with_room(clock: Clock, interval_ns: u64, sources: Vec<Source>, ticks: usize) -> Result<Self, MonitorError> {
        if !(MIN_INTERVAL_NS..=MAX_INTERVAL_NS).contains(&interval_ns) {
            return Err(MonitorError::Interval(interval_ns));
        }
        let width = sources.len();
        let mut readings: Vec<Reading> = Vec::new();
        let fail = |what, reason: String| MonitorError::Start { what, reason };
        readings.try_reserve_exact(ticks.max(4) * width).map_err(|e| fail("memory", e.to_string()))?;
        let errors = Histogram::new_with_bounds(1, MAX_ERROR_NS, 3).map_err(|e| fail("histogram", e.to_string()))?;
        for source in &sources {
            let counted = source.file.read();
            let counted = counted.map_err(|e| MonitorError::Counters { name: source.name.clone(), source: e })?;
            readings.push(Reading { t_ns: clock.now_ns(), counted });
        }
        let now_ns = clock.now_ns();
        let ledger = Ledger {
            width,
            every: 1,
            ticks: 0,
            missed: 0,
            thinned: 0,
            errors,
            worst_ns: 0,
            cpu_ns: None,
            started_ns: now_ns,
            last_ns: now_ns,
            last: readings_of(&readings),
            readings,
            lost: vec![None; width],
        };
        let stop = AtomicBool::new(false);
        let shared = Arc::new(Shared { clock, interval_ns, stop, ledger: Mutex::new(ledger) });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("monitor".into()).stack_size(128 * 1024);
        let thread = thread.spawn(move || for_thread.watch(sources)).map_err(|e| fail("thread", e.to_string()))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Moves what has been read so far to the end of `out`.
    pub fn drain(&self, out: &mut Vec<Reading>) {
        out.append(&mut self.shared.lock().readings);
    }

    /// Whether the counters of source `index` can no longer be read.
    pub fn has_lost(&self, index: usize) -> bool {
        self.shared.lock().lost.get(index).is_some_and(Option::is_some)
    }

    /// Ends the thread, reads every source once more and hands everything over.
    pub fn finish(mut self) -> Sampled {
        self.shared.stop.store(true, Ordering::Release);
        let sources = self.thread.take().and_then(|t| t.join().ok()).unwrap_or_default();
        let mut ledger = self.shared.lock();
        let mut last = vec![Reading::default(); sources.len()];
        self.shared.read(&sources, &mut last, &mut ledger);
        ledger.keep(&last);
        let names: Vec<String> = sources.iter().map(|s| s.name.clone()).collect();
        let figures = ledger.figures(self.shared.interval_ns, &names);
        Sampled { readings: std::mem::take(&mut ledger.readings), sources, figures }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    fn watch(&self, sources: Vec<Source>) -> Vec<Source> {
        // Without it deadlines are met less exactly, which the figures then show.
        let _ = timer::use_smallest_timer_slack();
        let mut row = vec![Reading::default(); sources.len()];
        let mut tick = self.clock.now_ns() / self.interval_ns + 1;
        loop {
            let deadline_ns = tick.saturating_mul(self.interval_ns);
            let now_ns = loop {
                if self.stop.load(Ordering::Acquire) {
                    self.lock().cpu_ns = timer::thread_cpu_ns();
                    return sources;
                }
                let now_ns = self.clock.now_ns();
                if now_ns >= deadline_ns {
                    break now_ns;
                }
                timer::sleep_until(self.clock.instant_at(deadline_ns.min(now_ns + NAP_NS)));
            };
            let mut ledger = self.lock();
            self.read(&sources, &mut row, &mut ledger);
            ledger.tick(now_ns, deadline_ns, self.interval_ns);
            if ledger.ticks.is_multiple_of(ledger.every) {
                ledger.keep(&row);
            }
            drop(ledger);
            tick = now_ns / self.interval_ns + 1;
        }
    }

    /// Reads every source; the time of a reading is the middle of the call. One that cannot be read any more keeps its
    /// last counters and is named in the figures.
    fn read(&self, sources: &[Source], row: &mut [Reading], ledger: &mut Ledger) {
        let mut before_ns = self.clock.now_ns();
        let Ledger { last, lost, last_ns, .. } = ledger;
        for (((source, reading), last), lost) in sources.iter().zip(row).zip(last).zip(lost) {
            if lost.is_none() {
                match source.file.read() {
                    Ok(counted) => *last = counted,
                    Err(e) => *lost = Some((e.kind(), e.raw_os_error())),
                }
            }
            let after_ns = self.clock.now_ns();
            *reading = Reading { t_ns: before_ns + (after_ns - before_ns) / 2, counted: *last };
            before_ns = after_ns;
        }
        *last_ns = before_ns;
    }
}

impl Ledger {
    /// Counts a tick that was due at `deadline_ns`, and those after it that were slept through.
    fn tick(&mut self, now_ns: u64, deadline_ns: u64, interval_ns: u64) {
        self.ticks += 1;
        let late_ns = now_ns.saturating_sub(deadline_ns);
        self.worst_ns = self.worst_ns.max(late_ns);
        self.errors.saturating_record(late_ns.max(1));
        let missed = late_ns / interval_ns;
        self.missed += missed;
        // a long sleep is one value among many otherwise, however many ticks it cost
        for nth in 1..=missed.min(10_000) {
            self.errors.saturating_record((late_ns - nth * interval_ns).max(1));
        }
    }

    fn keep(&mut self, row: &[Reading]) {
        // `extend` beyond the capacity would allocate
        if self.readings.len() + row.len() > self.readings.capacity() {
            self.thin();
        }
        if self.readings.len() + row.len() <= self.readings.capacity() {
            self.readings.extend_from_slice(row);
        }
    }

    /// Drops every second tick, in place.
    fn thin(&mut self) {
        let (width, ticks) = (self.width.max(1), self.readings.len() / self.width.max(1));
        for (to, from) in (0..ticks).step_by(2).enumerate() {
            self.readings.copy_within(from * width..(from + 1) * width, to * width);
        }
        self.readings.truncate(ticks.div_ceil(2) * width);
        self.every = self.every.saturating_mul(2);
        self.thinned += 1;
    }

    fn figures(&self, interval_ns: u64, names: &[String]) -> SamplerFigures {
        let why = |lost: &Option<(io::ErrorKind, Option<i32>)>| match lost.as_ref()? {
            (_, Some(code)) => Some(io::Error::from_raw_os_error(*code).to_string()),
            (kind, None) => Some(kind.to_string()),
        };
        let lost = names.iter().zip(&self.lost).filter_map(|(name, lost)| Some(format!("{name}: {}", why(lost)?)));
        SamplerFigures {
            interval_ns,
            wall_ns: self.last_ns.saturating_sub(self.started_ns),
            ticks: self.ticks,
            missed_ticks: self.missed,
            thinned: self.thinned,
            cpu_ns: self.cpu_ns,
            deadline_error_p50_ns: self.errors.value_at_quantile(0.5).min(self.worst_ns),
            deadline_error_p99_ns: self.errors.value_at_quantile(0.99).min(self.worst_ns),
            deadline_error_max_ns: self.worst_ns,
            lost: lost.collect(),
        }
    }
}

fn readings_of(row: &[Reading]) -> Vec<Counted> {
    row.iter().map(|r| r.counted).collect()
}

#[cfg(test)]
#[path = "monitor_tests.rs"]
mod tests;
