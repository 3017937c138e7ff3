//! `argodrive trace`: what a trace says, and the ways in and out for traces of other programs. One file per subcommand.

mod export;
mod import;
mod learn;
mod reissue;
mod replay;
mod report;
mod tables;

pub use report::write_page_of;

use anyhow::Result;
use clap::Subcommand;
use std::process::ExitCode;

/// Say who landed last and why, from a trace; read and write traces of other programs
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Who landed last in each barrier, why, and what bounds decoding
    Report(report::Args),
    /// Turn another program's log into a trace folder
    Import(import::Args),
    /// Read the barriers of a trace again, under another plan or on other drives
    Reissue(reissue::Args),
    /// Write a trace for another program: Perfetto, or HDR interval logs
    Export(export::Args),
    /// Learn which experts follow which, for prefetching by table
    Learn(learn::Args),
    /// Draw what a trace recorded: drives over time, one step's waterfall, who landed last
    Replay(replay::Args),
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    match args.command {
        Command::Report(args) => report::run(args),
        Command::Import(args) => import::run(args),
        Command::Reissue(args) => reissue::run(args),
        Command::Export(args) => export::run(args),
        Command::Learn(args) => learn::run(args),
        Command::Replay(args) => replay::run(args),
    }
}
