//! `argodrive simulate`: a trace on a layout that does not exist yet, and what one more drive would bring.

use super::plan::{read_plan, read_policy};
use super::run_args::{Cache, Dispatch, OnOff, Prefetch, start};
use super::simulate_tables::render;
use super::{heat, print, print_json, remark};
use crate::bench::simulate::{SimulateSpec, load, simulate};
use crate::bench::simulate_drives::{Known, NewDrive};
use crate::bench::what_if::what_if;
use crate::drive::spec;
use crate::drive::units::parse_bytes;
use crate::reader::{ReaderOptions, mounts_of};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Predict what a trace would have been on another layout, or with one more drive
///
/// Drives are what was measured of them: --profile (`argodrive ceiling`), else what the trace shows. An `emulate` table is
/// never looked at.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trace folder
    trace: PathBuf,
    /// The layout to simulate; nothing of it needs to be staged
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// Where the plan's drives are, to check that the profile is of these
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// What the drives do (`argodrive ceiling`, or TOML with rates) [default: as the trace shows]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// A measured trace of this plan and the same text: print how far off the simulation is
    #[arg(long, value_name = "DIR")]
    compare: Option<PathBuf>,
    /// A drive that does not exist, such as rate=7.1GB/s,latency=80us,fixed=0us,name=x,capacity=2TB: plan again with it and
    /// print the gain; may be repeated
    #[arg(long, value_name = "SPEC", value_parser = NewDrive::parse)]
    add_drive: Vec<NewDrive>,
    /// The policy to plan again by [default: the plan's]
    #[arg(long, value_name = "FILE", requires = "add_drive")]
    policy: Option<PathBuf>,
    /// What is hot, for planning again [default: counted in the trace]
    #[arg(long, value_name = "FILE", requires = "add_drive")]
    heat: Option<PathBuf>,
    /// Reader's settings of a run file or record; flags go before them
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// First seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Simulations, each with a seed of its own
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Leave out rows with faults, and say how many
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reader: ReaderArgs,
}

/// What acts in a simulation.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Reading")]
struct ReaderArgs {
    /// Reads at once on each drive [default: 4]
    #[arg(long, value_name = "N")]
    queue_depth: Option<u32>,
    /// Memory for experts in flight; a wider barrier comes in waves [default: 256MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    buffer_bytes: Option<u64>,
    /// Which copy of an expert is read [default: split]
    #[arg(long, value_enum)]
    dispatch: Option<Dispatch>,
    /// Who guesses what later layers will need; next-router and draft cannot be simulated [default: none]
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

impl ReaderArgs {
    fn over(&self, mut r: ReaderOptions) -> ReaderOptions {
        fn set<T, V: Into<T>>(place: &mut T, value: Option<V>) {
            value.into_iter().for_each(|v| *place = v.into());
        }
        set(&mut r.queue_depth, self.queue_depth);
        set(&mut r.buffer_bytes, self.buffer_bytes);
        set(&mut r.dispatch, self.dispatch);
        set(&mut r.prefetch, self.prefetch);
        set(&mut r.prefetch_depth, self.prefetch_depth);
        set(&mut r.prefetch_experts, self.prefetch_experts);
        set(&mut r.prefetch_queue_depth, self.prefetch_queue_depth);
        set(&mut r.prefetch_governor, self.prefetch_governor.map(|g| g == OnOff::On));
        set(&mut r.cache_bytes, self.cache_bytes);
        set(&mut r.cache_policy, self.cache_policy);
        r.prefetch_table = self.prefetch_table.clone().or(r.prefetch_table);
        r.cache_heat = self.cache_heat.clone().or(r.cache_heat);
        r
    }

    /// A flag that belongs to prefetch was given.
    fn tunes_prefetch(&self) -> Option<&'static str> {
        let given = [
            ("--prefetch-depth", self.prefetch_depth.is_some()),
            ("--prefetch-experts", self.prefetch_experts.is_some()),
            ("--prefetch-queue-depth", self.prefetch_queue_depth.is_some()),
            ("--prefetch-governor", self.prefetch_governor.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let asked = start(args.config.as_ref())?;
    let options = args.reader.over(asked.config.reader);
    options.check()?;
    if let (Some(flag), crate::reader::PrefetchPolicy::None) = (args.reader.tunes_prefetch(), options.prefetch) {
        bail!("{flag} does nothing without a guesser: give --prefetch same-as-last or markov");
    }
    let plan = read_plan(&args.plan)?;
    let known = args.profile.as_ref().map(|p| Known::load(p).context("--profile")).transpose()?;
    let known = known.unwrap_or(Known::Trace);
    let specs = args.drives.as_ref().map(|p| spec::load(p)).transpose()?;
    let mounts = specs.as_ref().map(|s| mounts_of(&plan, Some(s))).transpose()?;
    let spec = SimulateSpec {
        trace: &args.trace,
        plan: &plan,
        known: &known,
        profile: args.profile.as_deref(),
        mounts: mounts.as_deref(),
        options: &options,
        seed: args.seed,
        repeats: args.repeats,
        lenient: args.lenient,
    };
    let loaded = load(&spec)?;
    for fault in &loaded.work.skipped.first {
        remark(&format!("left out: {fault}"));
    }
    if mounts.iter().flatten().any(|m| m.emulate.is_some()) {
        remark(&format!("--drives: emulate tables are not looked at; rates come from: {}", known.words()));
    }
    let record = simulate(&spec, &loaded, args.compare.as_deref())?;
    let more = match args.add_drive.is_empty() {
        true => None,
        false => {
            let policy = args.policy.as_ref().map(|p| read_policy(p)).transpose()?.map(|(policy, _)| policy);
            let heat = args.heat.as_ref().map(|p| heat::read_heat(p).context("--heat")).transpose()?;
            Some(what_if(&spec, &loaded, &args.add_drive, policy, heat)?)
        }
    };
    if args.json {
        let mut value = serde_json::to_value(&record)?;
        value["what_if"] = serde_json::to_value(&more)?;
        print_json(&value)?;
    } else {
        print(render(&record, more.as_ref()).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}
