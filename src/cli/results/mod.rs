//! `argodrive results`: what to do with what runs have left behind. One file per subcommand.

mod parquet;
mod plot;

use anyhow::Result;
use clap::Subcommand;
use std::process::ExitCode;

/// Turn what runs have recorded into other forms
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Turn the CSV files of a trace into Parquet, which `trace` reads as well
    Parquet(parquet::Args),
    /// Judge and draw an `ab` or `experiment` folder again, from its records alone
    Plot(plot::Args),
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    match args.command {
        Command::Parquet(args) => parquet::run(args),
        Command::Plot(args) => plot::run(args),
    }
}
