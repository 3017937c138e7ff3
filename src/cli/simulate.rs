//! `argodrive simulate`: a trace on a layout that does not exist yet, and what one more drive would bring.

use super::plan::{read_plan, read_policy};
use super::run_args::{OrderArgs, start};
use super::simulate_tables::render;
use super::{Reading, heat, print, print_json, remark};
use crate::bench::config::idle_prefetch;
use crate::bench::simulate::{SimulateSpec, load, simulate};
use crate::bench::simulate_drives::{Known, NewDrive};
use crate::bench::what_if::what_if;
use crate::drive::spec;
use crate::knob::Knob;
use crate::reader::mounts_of;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Predict what a trace would have been on another layout, or with one more drive
///
/// Drives are what was measured of them: --profile (`argodrive ceiling`), else what the trace shows. An `emulate` table is
/// never looked at. Guesses of the decoder (next-router, draft) and hedges cannot be simulated and are refused.
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
    reader: OrderArgs,
}

/// Settings of a run that drives in virtual time do not have.
const WITHOUT_PART: [Knob; 5] = [Knob::Engine, Knob::Sqpoll, Knob::Direct, Knob::VerifyDigests, Knob::ReadTimeout];

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut asked = start(args.config.as_ref())?;
    if let Some(knob) = WITHOUT_PART.iter().find(|k| asked.given.contains(k)) {
        remark(&format!("--config: {} has no part in a simulation; drives are as they were measured", knob.name()));
    }
    if asked.config.draft.is_on() {
        bail!(
            "--config: speculate = \"{}\": a simulation repeats the passes of the trace; to see proposals in it, record the \
             trace with them",
            asked.config.draft.speculate.name()
        );
    }
    args.reader.apply(&mut asked);
    let options = asked.config.reader;
    options.check()?;
    if let Some((knob, why)) = idle_prefetch(&options, &asked.given) {
        bail!("--{} does nothing {why}, or leave it out", knob.name().replace('_', "-"));
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
    let reading = Reading::start("simulating");
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
    drop(reading);
    if args.json {
        let mut value = serde_json::to_value(&record)?;
        value["what_if"] = serde_json::to_value(&more)?;
        print_json(&value)?;
    } else {
        print(render(&record, more.as_ref()).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}
