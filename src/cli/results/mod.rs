//! `argodrive results`: the catalogue over everything that was measured, and what to do with records. One file per subcommand.

mod bundle;
mod compare;
mod import;
mod list;
mod parquet;
mod plot;
mod table;

use anyhow::Result;
use clap::Subcommand;
use std::process::ExitCode;

/// List, group and compare everything that was measured; find stale verdicts; share records
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    list: list::Args,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List everything that was measured (what `results` does without a word)
    List(list::Args),
    /// Lay two records or folders beside each other: settings and inputs that differ, rates
    Compare(compare::Args),
    /// Pack records, figures and hashed serial numbers into one file to share
    Bundle(bundle::Args),
    /// Take another machine's bundle in, and lay its shapes beside one's own
    Import(import::Args),
    /// Turn the CSV files of a trace into Parquet, which `trace` reads as well
    Parquet(parquet::Args),
    /// Judge and draw an `ab` or `experiment` folder again, from its records alone
    Plot(plot::Args),
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    match args.command {
        None => list::run(&args.list),
        Some(Command::List(args)) => list::run(&args),
        Some(Command::Compare(args)) => compare::run(&args),
        Some(Command::Bundle(args)) => bundle::run(&args),
        Some(Command::Import(args)) => import::run(&args),
        Some(Command::Parquet(args)) => parquet::run(args),
        Some(Command::Plot(args)) => plot::run(args),
    }
}
