//! Arguments that several commands share: where experts come from, how tokens are chosen, what the prompt is. Each flag
//! that is given overrides the configuration file and counts as asked for.

use super::fault_args::FaultArgs;
use crate::bench::affinity::Affinity;
use crate::bench::config::{Asked, ConfigError};
use crate::bench::fits;
use crate::bench::guards::device_key;
use crate::bench::planning;
use crate::bench::turns;
use crate::decode::Activations;
use crate::drive::device::identity_of;
use crate::drive::profile::Profile;
use crate::drive::spec::{self, DriveSpec};
use crate::drive::units::parse_bytes;
use crate::io::EngineKind;
use crate::knob::Knob;
use crate::layout::plan::Plan;
use crate::open::Model;
use crate::reader::{CachePolicy, DispatchPolicy, KnownRate, PrefetchPolicy, PrefetchPool};
use crate::store::trunk::TrunkResidency;
use anyhow::{Context, Result};
use clap::ValueEnum;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Puts a flag's value into its place and notes that it was given.
pub(super) fn set<T>(asked: &mut BTreeSet<Knob>, knob: Knob, place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
        asked.insert(knob);
    }
}

/// A switch that can only be turned on by its flag.
fn turn(asked: &mut BTreeSet<Knob>, knob: Knob, place: &mut bool, flag: bool, to: bool) {
    set(asked, knob, place, flag.then_some(to));
}

/// How experts are read.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Reading")]
pub struct ReaderArgs {
    /// How reads are carried out; mmap and buffered go with --buffered [default: psync]
    #[arg(long, value_enum)]
    engine: Option<Engine>,
    /// io-uring: let a kernel thread hand reads over (it keeps a core busy)
    #[arg(long)]
    sqpoll: bool,
    /// Read through the page cache instead of past it
    #[arg(long)]
    buffered: bool,
    /// Where direct reads are impossible, read through the page cache instead of refusing
    #[arg(long)]
    allow_fallback: bool,
    /// Check each expert's digest as it arrives
    #[arg(long)]
    verify_reads: bool,
    #[command(flatten)]
    faults: FaultArgs,
    #[command(flatten)]
    order: OrderArgs,
}

/// What is read when, from where, and what stays: the settings that act on simulated drives too.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Reading")]
pub struct OrderArgs {
    /// Reads at once on each drive [default: 4]
    #[arg(long, value_name = "N")]
    queue_depth: Option<u32>,
    /// Memory for experts in flight; a wider barrier comes in waves [default: 256MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    buffer_bytes: Option<u64>,
    /// Which copy of an expert is read [default: split]
    #[arg(long, value_enum)]
    dispatch: Option<Dispatch>,
    /// What `ceiling` measured of the drives, for the first choices of `split` and `expected-completion` (later ones go by
    /// this run's own reads) [default: off]
    #[arg(long, value_name = "PROFILE", value_parser = KnownRates::load)]
    rates_from: Option<KnownRates>,
    /// Who guesses what later layers will need, to read it ahead [default: none]
    #[arg(long, value_enum)]
    prefetch: Option<Prefetch>,
    /// Layers ahead that guesses may be for [default: 1]
    #[arg(long, value_name = "LAYERS")]
    prefetch_depth: Option<u32>,
    /// Most guesses for one layer; 0 = all that are made [default: 0]
    #[arg(long, value_name = "N")]
    prefetch_experts: Option<u32>,
    /// Prefetch reads at once on each drive, beside those of demand [default: 4]
    #[arg(long, value_name = "N")]
    prefetch_queue_depth: Option<u32>,
    /// Whether these reads have a pool of their own, or are some of --queue-depth [default: own]
    #[arg(long, value_enum)]
    prefetch_pool: Option<Pool>,
    /// Which copies of guessed experts are read [default: as --dispatch]
    #[arg(long, value_enum)]
    prefetch_dispatch: Option<Dispatch>,
    /// Turn prefetch down while it costs more than it brings [default: on]
    #[arg(long, value_enum, value_name = "ON|OFF")]
    prefetch_governor: Option<OnOff>,
    /// The table by which `markov` guesses
    #[arg(long, value_name = "FILE")]
    prefetch_table: Option<PathBuf>,
    /// Part of --buffer-bytes for experts that stay in memory; 0 = none [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    cache_bytes: Option<u64>,
    /// Which experts stay [default: lru]
    #[arg(long, value_enum)]
    cache_policy: Option<Cache>,
    /// Counts by which `pinned` chooses (CSV: layer,expert,count)
    #[arg(long, value_name = "FILE")]
    cache_heat: Option<PathBuf>,
}

/// Engines by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Engine {
    /// Threads with positional reads
    Psync,
    /// One io_uring per drive
    IoUring,
    /// Threads that copy from mapped files
    Mmap,
    /// Threads with positional reads through the page cache
    Buffered,
}

impl From<Engine> for EngineKind {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::Psync => Self::Psync,
            Engine::IoUring => Self::Uring,
            Engine::Mmap => Self::Mmap,
            Engine::Buffered => Self::Buffered,
        }
    }
}

/// Dispatch policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Dispatch {
    /// The primary copy
    FirstHit,
    /// The drives in turn
    RoundRobin,
    /// The drive with the fewest bytes in flight
    LeastInflight,
    /// Whole reads, predicted to end as early as possible
    ExpectedCompletion,
    /// The same, with experts read in parts from several drives
    Split,
}

impl From<Dispatch> for DispatchPolicy {
    fn from(dispatch: Dispatch) -> Self {
        match dispatch {
            Dispatch::FirstHit => Self::FirstHit,
            Dispatch::RoundRobin => Self::RoundRobin,
            Dispatch::LeastInflight => Self::LeastInflight,
            Dispatch::ExpectedCompletion => Self::ExpectedCompletion,
            Dispatch::Split => Self::Split,
        }
    }
}

/// Guessers by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Prefetch {
    /// Nobody: nothing is read ahead
    None,
    /// A layer will ask for what it asked for in the pass before
    SameAsLast,
    /// The next layers' routers on this layer's state
    NextRouter,
    /// A table of which experts followed which, learnt from traces
    Markov,
    /// The routes of drafted tokens
    Draft,
}

impl From<Prefetch> for PrefetchPolicy {
    fn from(prefetch: Prefetch) -> Self {
        match prefetch {
            Prefetch::None => Self::None,
            Prefetch::SameAsLast => Self::SameAsLast,
            Prefetch::NextRouter => Self::NextRouter,
            Prefetch::Markov => Self::Markov,
            Prefetch::Draft => Self::Draft,
        }
    }
}

/// Cache policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Cache {
    /// The most recently used
    Lru,
    /// The most often used, old uses counting less
    LfuDecay,
    /// The hottest of --cache-heat
    Pinned,
}

impl From<Cache> for CachePolicy {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::Lru => Self::Lru,
            Cache::LfuDecay => Self::LfuDecay,
            Cache::Pinned => Self::Pinned,
        }
    }
}

/// Pools of prefetch by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Pool {
    /// Beside demand
    Own,
    /// In one queue with demand
    Shared,
}

impl From<Pool> for PrefetchPool {
    fn from(pool: Pool) -> Self {
        match pool {
            Pool::Own => Self::Own,
            Pool::Shared => Self::Shared,
        }
    }
}

/// A switch whose default is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OnOff {
    /// Yes
    On,
    /// No
    Off,
}

impl OrderArgs {
    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (r, given) = (&mut asked.config.reader, &mut asked.given);
        set(given, Knob::QueueDepth, &mut r.queue_depth, self.queue_depth);
        set(given, Knob::BufferBytes, &mut r.buffer_bytes, self.buffer_bytes);
        set(given, Knob::Dispatch, &mut r.dispatch, self.dispatch.map(DispatchPolicy::from));
        if self.dispatch == Some(Dispatch::Split) {
            given.insert(Knob::Split);
        }
        set(given, Knob::Rates, &mut r.rates, self.rates_from.clone().map(|k| k.0));
        set(given, Knob::Prefetch, &mut r.prefetch, self.prefetch.map(PrefetchPolicy::from));
        set(given, Knob::PrefetchDepth, &mut r.prefetch_depth, self.prefetch_depth);
        set(given, Knob::PrefetchExperts, &mut r.prefetch_experts, self.prefetch_experts);
        set(given, Knob::PrefetchQueueDepth, &mut r.prefetch_queue_depth, self.prefetch_queue_depth);
        set(given, Knob::PrefetchPool, &mut r.prefetch_pool, self.prefetch_pool.map(PrefetchPool::from));
        let chosen = self.prefetch_dispatch.map(|d| Some(DispatchPolicy::from(d)));
        set(given, Knob::PrefetchDispatch, &mut r.prefetch_dispatch, chosen);
        let governor = self.prefetch_governor.map(|g| g == OnOff::On);
        set(given, Knob::PrefetchGovernor, &mut r.prefetch_governor, governor);
        set(given, Knob::CacheBytes, &mut r.cache_bytes, self.cache_bytes);
        set(given, Knob::CachePolicy, &mut r.cache_policy, self.cache_policy.map(CachePolicy::from));
        // Files that a policy needs; what comes of them is judged with the policy.
        r.prefetch_table = self.prefetch_table.clone().or(r.prefetch_table.take());
        r.cache_heat = self.cache_heat.clone().or(r.cache_heat.take());
    }
}

impl ReaderArgs {
    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (r, given) = (&mut asked.config.reader, &mut asked.given);
        set(given, Knob::Engine, &mut r.engine, self.engine.map(EngineKind::from));
        turn(given, Knob::Sqpoll, &mut r.sqpoll, self.sqpoll, true);
        turn(given, Knob::Direct, &mut r.direct, self.buffered, false);
        turn(given, Knob::VerifyDigests, &mut r.verify_digests, self.verify_reads, true);
        r.allow_buffered |= self.allow_fallback;
        self.faults.apply(asked);
        self.order.apply(asked);
    }
}

/// `--rates-from`: the drives of a profile.
#[derive(Clone, Debug)]
pub struct KnownRates(Vec<KnownRate>);

impl KnownRates {
    fn load(path: &str) -> Result<Self, String> {
        let profile = Profile::load(path.as_ref()).map_err(|e| e.to_string())?;
        Ok(Self(KnownRate::of_profile(&profile)))
    }
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplerArgs {
    /// 0 takes the most likely token; higher is more varied [default: 0]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Keep the fewest most likely tokens that reach this probability together [default: 1]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Keep this many most likely tokens; 0 keeps all [default: 0]
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Seed of the random choice [default: 0]
    #[arg(long)]
    seed: Option<u64>,
}

impl SamplerArgs {
    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (s, given) = (&mut asked.config.sampler, &mut asked.given);
        set(given, Knob::Temperature, &mut s.temperature, self.temperature);
        set(given, Knob::TopP, &mut s.top_p, self.top_p);
        set(given, Knob::TopK, &mut s.top_k, self.top_k);
        set(given, Knob::Seed, &mut s.seed, self.seed);
    }
}

/// What is fed, and how much may come out.
#[derive(Clone, Debug, clap::Args)]
pub struct PromptArgs {
    /// The prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// A file with the prompt (UTF-8)
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Recognise special tokens in the prompt, and show them in the text
    #[arg(long)]
    special: bool,
    /// Most tokens to generate [default: 256, in a ladder 64]
    #[arg(long, value_name = "N")]
    max_new: Option<usize>,
}

impl PromptArgs {
    /// Whether a flag gives a prompt.
    pub fn is_given(&self) -> bool {
        self.prompt.is_some() || self.prompt_file.is_some()
    }

    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (c, given) = (&mut asked.config, &mut asked.given);
        if self.prompt.is_some() || self.prompt_file.is_some() {
            c.prompt.clone_from(&self.prompt);
            c.prompt_file.clone_from(&self.prompt_file);
        }
        turn(given, Knob::Special, &mut c.special, self.special, true);
        set(given, Knob::MaxNew, &mut c.max_new, self.max_new);
    }
}

/// How the model is run.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Compute kernels [default: the best that the CPU has]
    #[arg(long, value_enum)]
    kernels: Option<KernelChoice>,
    /// Activations in products of MXFP4 and int8 weights: f32, or int8, which is not exact [default: f32]
    #[arg(long, value_name = "KIND")]
    activations: Option<Activations>,
    /// Threads that compute [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: Option<u16>,
    /// Where the trunk is: mapped, loaded into memory, locked there, or streamed anew in every pass [default: mapped]
    #[arg(long, value_name = "WHERE")]
    trunk: Option<TrunkResidency>,
    /// CPUs of threads that compute and of those that read, as compute=0-1,readers=2-3; off = all of them [default: off]
    #[arg(long, value_name = "CPUS")]
    affinity: Option<Affinity>,
    /// Prompt rows fed in one pass, which reads each expert once; bounds memory [default: 4096]
    #[arg(long, value_name = "ROWS")]
    prefill_rows: Option<usize>,
    /// Most tokens of text, prompt included [default: what the model was made for]
    #[arg(long, value_name = "TOKENS")]
    max_context: Option<usize>,
}

/// Kernel sets by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KernelChoice {
    /// The best that the CPU has
    Auto,
    /// Plain Rust: the reference
    Scalar,
    /// AVX2 and FMA
    Avx2,
    /// AVX-512 F, BW and VL
    Avx512,
    /// NEON
    Neon,
}

impl ModelArgs {
    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (m, given) = (&mut asked.config.model, &mut asked.given);
        // the names of the flag's values are those of the instruction sets
        let kernels = self.kernels.and_then(|k| Some(k.to_possible_value()?.get_name().to_string()));
        set(given, Knob::Kernels, &mut m.kernels, kernels);
        set(given, Knob::Activations, &mut m.activations, self.activations);
        set(given, Knob::Threads, &mut m.threads, self.threads.map(usize::from));
        set(given, Knob::Trunk, &mut m.trunk, self.trunk);
        set(given, Knob::Affinity, &mut m.affinity, self.affinity.clone());
        set(given, Knob::PrefillRows, &mut m.prefill_rows, self.prefill_rows);
        set(given, Knob::MaxContext, &mut m.max_context, self.max_context);
    }
}

/// The configuration file, if one is given, else the defaults.
pub fn start(config: Option<&PathBuf>) -> Result<Asked, ConfigError> {
    config.map_or_else(|| Ok(Asked::default()), |path| Asked::load(path))
}

/// A profile, if one is given, and over it the configuration file, if one is given.
pub fn start_over(profile: Option<&PathBuf>, config: Option<&PathBuf>) -> Result<Asked, ConfigError> {
    profile.map_or_else(|| start(config), |profile| Asked::load_over(profile, config.map(PathBuf::as_path)))
}

/// What drives are, for a plan's inputs, so that a later run can tell whether they still are.
pub fn device_inputs(drives: &[DriveSpec]) -> impl Iterator<Item = (String, String)> + '_ {
    drives.iter().map(|d| (device_key(&d.name), identity_of(&d.path)))
}

/// Plan and mounts of a configuration: those of its files, or the store as the one drive. `None` when nothing streams.
pub fn plan_and_mounts(model: &Model, asked: &Asked) -> Result<Option<(Plan, Vec<DriveSpec>)>> {
    let streamed = planning::plan_and_mounts(model, &asked.config)?;
    if let (Some((_, mounts)), true) = (&streamed, asked.config.plan.is_some()) {
        warn_shared(mounts)?;
    }
    Ok(streamed)
}

/// Whether the prompt fits the session and memory. A text that reaches its end while it is generated stops there.
pub fn check_context(model: &Model, asked: &Asked, prompt: usize) -> Result<()> {
    turns::check_prompt(model, &asked.config, prompt).map_err(anyhow::Error::msg)?;
    fits::check_run(model, &asked.config, &[prompt]).map_err(anyhow::Error::msg)
}

/// Two folders on one device are one drive: says so, for a measurement of them would mislead.
pub fn warn_shared(mounts: &[DriveSpec]) -> Result<()> {
    if mounts.iter().any(|m| !m.path.is_dir()) {
        return Ok(()); // whoever opens it says which, and what to do
    }
    for (a, b) in spec::shared_devices(mounts)? {
        super::remark(&format!(
            "drives `{}` and `{}` are folders on one device: they are one drive, and its speed counts once",
            mounts[a].name, mounts[b].name
        ));
    }
    Ok(())
}

/// The first Ctrl-C asks the current work to end in order, the second ends the process.
pub fn interrupt_flag() -> Result<&'static AtomicBool> {
    static ASKED: AtomicBool = AtomicBool::new(false);
    ctrlc::set_handler(|| {
        if ASKED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(&ASKED)
}
