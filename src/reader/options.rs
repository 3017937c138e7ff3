//! What a reader can be told, and why it could not be built.

use super::cache::CachePolicy;
use super::dispatch::DispatchPolicy;
use super::limit::ALWAYS;
use super::rates::KnownRate;
use crate::drive::fault_rule::{DriveFault, MAX_RULES};
use crate::drive::units;
use crate::io::{EngineKind, IoSetupError, MAX_QUEUE_DEPTH};
use crate::source::guess::MAX_LOOKAHEAD;
use crate::trace::log::TraceCapacity;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Most layers that guesses can look ahead.
pub const MAX_PREFETCH_DEPTH: u32 = MAX_LOOKAHEAD as u32;

/// Who guesses what later layers will need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrefetchPolicy {
    /// Nobody.
    #[default]
    None,
    /// What the layer asked for in the pass before.
    SameAsLast,
    /// The decoder, by the next layers' routers on this layer's state.
    NextRouter,
    /// A table of which experts followed which, learnt from traces.
    Markov,
    /// The decoder, by the routes of drafted tokens.
    Draft,
}

impl PrefetchPolicy {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::None, Self::SameAsLast, Self::NextRouter, Self::Markov, Self::Draft];

    /// Its name in options and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::SameAsLast => "same-as-last",
            Self::NextRouter => "next-router",
            Self::Markov => "markov",
            Self::Draft => "draft",
        }
    }

    /// The guesses come from the decoder, not from the reader.
    pub fn is_told(self) -> bool {
        matches!(self, Self::NextRouter | Self::Draft)
    }
}

/// Where reads of guesses wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrefetchPool {
    /// In a pool of their own, whose reads go on beside those of demand.
    #[default]
    Own,
    /// In demand's: prefetch and demand together have `queue_depth` reads at once on a drive.
    Shared,
}

impl PrefetchPool {
    /// Its name in options and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Shared => "shared",
        }
    }
}

/// Options of an [`super::ExpertReader`]. Every field has an effect that [`super::ReaderCounters`] shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReaderOptions {
    /// How reads are carried out.
    pub engine: EngineKind,
    /// A kernel thread hands reads over (io_uring only); it keeps a core busy while reads keep coming.
    pub sqpoll: bool,
    /// Reads at once for each drive (threads of the engines other than io_uring).
    pub queue_depth: u32,
    /// Bytes of all slots together; a slot holds one expert.
    pub buffer_bytes: u64,
    /// Which copies of an expert are read.
    pub dispatch: DispatchPolicy,
    /// When the last read of a barrier has taken longer than this percentile of its drive's own latencies, it is also
    /// asked of another home: 990 = the 99th. `None` = never.
    pub hedge_after_permille: Option<u16>,
    /// Rates known before the run, for dispatch to begin with; by drive, in any order, none needed.
    pub rates: Vec<KnownRate>,
    /// Read past the page cache.
    pub direct: bool,
    /// Where direct reads are impossible, read through the page cache instead of refusing; counters show it.
    pub allow_buffered: bool,
    /// Check each expert's digest as it arrives; a wrong one counts as a failed read.
    pub verify_digests: bool,
    /// Longest wait without any arrival. Then outstanding reads are given up and other copies tried.
    pub read_timeout_ms: u64,
    /// Who guesses what later layers will need.
    pub prefetch: PrefetchPolicy,
    /// Layers ahead of the one at work that guesses may be for.
    pub prefetch_depth: u32,
    /// Most guesses for one layer; 0 = all that are made.
    pub prefetch_experts: u32,
    /// Prefetch reads at once for each drive, beside those of demand.
    pub prefetch_queue_depth: u32,
    /// Whether these reads have a pool of their own, or are some of `queue_depth`.
    pub prefetch_pool: PrefetchPool,
    /// Which copies of guessed experts are read; `None` = by `dispatch`. They are read whole.
    pub prefetch_dispatch: Option<DispatchPolicy>,
    /// Turn prefetch down while it costs more than it brings.
    pub prefetch_governor: bool,
    /// The table of the Markov policy.
    pub prefetch_table: Option<PathBuf>,
    /// Bytes of `buffer_bytes` for experts that stay; 0 = none.
    pub cache_bytes: u64,
    /// Which experts stay.
    pub cache_policy: CachePolicy,
    /// Counts by which the pinned policy chooses (CSV).
    pub cache_heat: Option<PathBuf>,
    /// Whether a drive that has become too slow to be worth waiting for is left alone, until it is as it was.
    pub shed: Shedding,
    /// Most bytes per second that each drive is asked for; 0 = as many as it delivers.
    pub max_read_bytes_per_s: u64,
    /// Part of the time in which drives are asked for reads, in thousandths; 1000 = always.
    pub duty_permille: u16,
    /// Faults that reads meet on purpose, besides those of the drives file.
    pub faults: Vec<DriveFault>,
    /// What `argodrive stage` takes for the run's plan, for messages. Set by whoever knows the files.
    #[serde(skip)]
    pub stage_arguments: Option<String>,
    /// Slots that prefetch and cache never take: the widest barrier of a pass that extends the text. 0 = the widest layer.
    /// Set by whoever knows the model.
    #[serde(skip)]
    pub demand_reserve: u32,
    /// Reads that the trace can hold; 0 keeps none, which is what an untraced run does. Sized by whoever starts a run.
    #[serde(skip)]
    pub trace_reads: usize,
    /// Barriers that can be held; 0 keeps none. A run's verdict needs them whether it is traced or not.
    #[serde(skip)]
    pub trace_barriers: usize,
}

/// Whether slow drives are left alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shedding {
    /// Where dispatch goes by rates anyway. A policy that does not is taken at its word: who asks for the first home gets it.
    #[default]
    Auto,
    /// Whatever dispatch does.
    On,
    /// Never.
    Off,
}

impl Shedding {
    /// Whether it is done with this policy.
    pub fn acts(self, dispatch: DispatchPolicy) -> bool {
        match self {
            Self::Auto => matches!(dispatch, DispatchPolicy::Split | DispatchPolicy::ExpectedCompletion),
            Self::On => true,
            Self::Off => false,
        }
    }
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            engine: EngineKind::Psync,
            sqpoll: false,
            queue_depth: 4,
            buffer_bytes: 256 << 20,
            dispatch: DispatchPolicy::Split,
            hedge_after_permille: None,
            rates: Vec::new(),
            direct: true,
            allow_buffered: false,
            verify_digests: false,
            read_timeout_ms: 30_000,
            prefetch: PrefetchPolicy::None,
            prefetch_depth: 1,
            prefetch_experts: 0,
            prefetch_queue_depth: 4,
            prefetch_pool: PrefetchPool::Own,
            prefetch_dispatch: None,
            prefetch_governor: true,
            prefetch_table: None,
            cache_bytes: 0,
            cache_policy: CachePolicy::Lru,
            cache_heat: None,
            shed: Shedding::Auto,
            max_read_bytes_per_s: 0,
            duty_permille: ALWAYS,
            faults: Vec::new(),
            stage_arguments: None,
            demand_reserve: 0,
            trace_reads: 0,
            trace_barriers: 0,
        }
    }
}

impl ReaderOptions {
    /// Longest wait without any arrival.
    pub fn read_timeout(&self) -> Duration {
        Duration::from_millis(self.read_timeout_ms)
    }

    /// Capacity of the trace; `None` = off.
    pub fn trace_capacity(&self) -> Option<TraceCapacity> {
        let capacity = TraceCapacity { reads: self.trace_reads, barriers: self.trace_barriers };
        (capacity != TraceCapacity::default()).then_some(capacity)
    }

    /// Errors that need no drive.
    pub fn check(&self) -> Result<(), ReaderError> {
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth) {
            let seen = self.queue_depth;
            return Err(ReaderError::Option(format!("queue depth {seen} is not within 1 to {MAX_QUEUE_DEPTH}")));
        }
        let engine = self.engine;
        if self.sqpoll && engine != EngineKind::Uring {
            return Err(ReaderError::Option(format!(
                "a submission thread belongs to io_uring, not to {engine}: leave --sqpoll away, or add --engine io-uring"
            )));
        }
        if self.direct && !engine.can_be_direct() {
            return Err(ReaderError::Option(format!(
                "engine {engine} reads through the page cache, and direct reads go past it: add --buffered, or use \
                 --engine psync or io-uring"
            )));
        }
        if !(1..=3_600_000).contains(&self.read_timeout_ms) {
            let seen = self.read_timeout_ms;
            return Err(ReaderError::Option(format!("read timeout {seen} ms is not within 1 ms to 1 hour")));
        }
        if self.hedge_after_permille.is_some_and(|p| !(1..1000).contains(&p)) {
            return Err(ReaderError::Option("hedging needs a percentile above 0 and below 100".into()));
        }
        self.check_ahead()?;
        if !(10..=ALWAYS).contains(&self.duty_permille) {
            let seen = f64::from(self.duty_permille) / 1000.0;
            return Err(ReaderError::Option(format!("--duty {seen} is not within 0.01 to 1")));
        }
        let rules = |drive: &str| self.faults.iter().filter(|f| f.drive == drive).count();
        if let Some(fault) = self.faults.iter().find(|f| rules(&f.drive) > MAX_RULES) {
            let (drive, count) = (&fault.drive, rules(&fault.drive));
            return Err(ReaderError::Option(format!(
                "--faults: {count} faults for drive `{drive}`, at most {MAX_RULES}"
            )));
        }
        for (index, rate) in self.rates.iter().enumerate() {
            let name = &rate.drive;
            if rate.bytes_per_s == 0 {
                return Err(ReaderError::Option(format!("the known rate of drive `{name}` is 0 bytes/s")));
            }
            if self.rates[..index].iter().any(|r| r.drive == *name) {
                return Err(ReaderError::Option(format!("the rate of drive `{name}` is given twice")));
            }
        }
        Ok(())
    }

    /// Prefetch and cache: ranges, and what does nothing without something else.
    fn check_ahead(&self) -> Result<(), ReaderError> {
        let no = |what: String| Err(ReaderError::Option(what));
        if !(1..=MAX_PREFETCH_DEPTH).contains(&self.prefetch_depth) {
            return no(format!(
                "prefetch depth {} is not within 1 to {MAX_PREFETCH_DEPTH} layers",
                self.prefetch_depth
            ));
        }
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.prefetch_queue_depth) {
            let seen = self.prefetch_queue_depth;
            return no(format!("prefetch queue depth {seen} is not within 1 to {MAX_QUEUE_DEPTH}"));
        }
        if self.prefetch_dispatch == Some(DispatchPolicy::Split) {
            return no("prefetch dispatch `split`: guesses are read whole, so that it would do what expected-completion does; \
                       give that"
                .into());
        }
        match (self.prefetch, &self.prefetch_table) {
            (PrefetchPolicy::Markov, None) => {
                return no("prefetch `markov` guesses by a table: give --prefetch-table".into());
            }
            (policy, Some(path)) if policy != PrefetchPolicy::Markov => {
                let (path, policy) = (path.display(), policy.name());
                return no(format!(
                    "--prefetch-table {path} does nothing with --prefetch {policy}; it belongs to markov"
                ));
            }
            _ => {}
        }
        match (self.cache_policy, &self.cache_heat) {
            (CachePolicy::Pinned, None) => no("a pinned cache needs to know what is hot: give --cache-heat".into()),
            (CachePolicy::Lru | CachePolicy::LfuDecay, Some(path)) => {
                let (path, policy) = (path.display(), self.cache_policy.name());
                no(format!("--cache-heat {path} does nothing with --cache-policy {policy}; it belongs to pinned"))
            }
            (policy, _) if self.cache_bytes == 0 && policy != CachePolicy::Lru => {
                no(format!("--cache-policy {} does nothing without a cache: give --cache-bytes", policy.name()))
            }
            _ => Ok(()),
        }
    }

    /// `--hedge-after`: a percentile, or `off`.
    pub fn parse_hedge_after(text: &str) -> Result<Option<u16>, String> {
        if text == "off" {
            return Ok(None);
        }
        let number = text.trim_start_matches('p').parse::<f64>().ok().map(|p| p * 10.0);
        match number.filter(|p| (1.0..1000.0).contains(p) && p.fract() == 0.0) {
            Some(permille) => Ok(Some(permille as u16)),
            None => Err("must be `off` or a percentile from 0.1 to 99.9 with one decimal at most, e.g. 99".into()),
        }
    }

    /// `--duty`: a share of the time.
    pub fn parse_duty(text: &str) -> Result<u16, String> {
        let share = text.parse::<f64>().ok().map(|s| s * f64::from(ALWAYS));
        match share.filter(|s| (10.0..=f64::from(ALWAYS)).contains(s)) {
            Some(permille) => Ok(permille.round() as u16),
            None => Err("must be a share of the time from 0.01 to 1, e.g. 0.8".into()),
        }
    }

    /// `--buffer-bytes` and such, as people write them.
    pub fn parse_buffer_bytes(text: &str) -> Result<u64, String> {
        units::parse_bytes(text)
    }
}

/// Why a reader could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    /// An option is out of range or does not fit the others.
    #[error("{0}")]
    Option(String),
    /// A file or folder of a drive could not be opened.
    #[error("drive `{drive}`: {}: {reason}", path.display())]
    Drive {
        /// The drive's name.
        drive: String,
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The table that guesses are made by.
    #[error("--prefetch-table: {0}")]
    Table(#[from] super::predict::table::TableError),
    /// The plan names what this reader cannot do.
    #[error("{0}")]
    Plan(String),
    /// Buffers or threads could not be had.
    #[error(transparent)]
    Io(#[from] IoSetupError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_name_both_sides() {
        let refused = |options: ReaderOptions| options.check().unwrap_err().to_string();
        for engine in [EngineKind::Mmap, EngineKind::Buffered] {
            let message = refused(ReaderOptions { engine, ..ReaderOptions::default() });
            assert!(message.contains(engine.name()) && message.contains("direct"), "{message}");
            ReaderOptions { engine, direct: false, ..ReaderOptions::default() }.check().unwrap();
        }
        let message = refused(ReaderOptions { sqpoll: true, ..ReaderOptions::default() });
        assert!(message.contains("--sqpoll") && message.contains("psync"), "{message}");
        ReaderOptions { engine: EngineKind::Uring, sqpoll: true, ..ReaderOptions::default() }.check().unwrap();
    }

    #[test]
    fn settings_of_prefetch_and_cache_that_would_do_nothing_are_refused() {
        let refused = |change: fn(&mut ReaderOptions)| {
            let mut options = ReaderOptions::default();
            change(&mut options);
            options.check().unwrap_err().to_string()
        };
        assert!(refused(|o| o.prefetch_depth = 0).contains("depth 0"));
        assert!(refused(|o| o.prefetch_queue_depth = 0).contains("queue depth 0"));
        assert!(refused(|o| o.prefetch_dispatch = Some(DispatchPolicy::Split)).contains("expected-completion"));
        assert!(refused(|o| o.prefetch = PrefetchPolicy::Markov).contains("--prefetch-table"));
        assert!(refused(|o| o.prefetch_table = Some("t".into())).contains("markov"));
        assert!(refused(|o| (o.cache_policy, o.cache_bytes) = (CachePolicy::Pinned, 9)).contains("--cache-heat"));
        assert!(refused(|o| (o.cache_heat, o.cache_bytes) = (Some("h".into()), 9)).contains("pinned"));
        assert!(refused(|o| o.cache_policy = CachePolicy::LfuDecay).contains("--cache-bytes"));
    }
}
