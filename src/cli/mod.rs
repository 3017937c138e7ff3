//! The command line: one file per subcommand, each a clap struct and a `run` that calls the library and prints. A new
//! subcommand is a file, a `pub mod` line, a variant of [`Command`] and its arm in `dispatch`. Nothing is computed here.

pub mod ab;
pub mod adopt;
mod campaign;
pub mod ceiling;
pub mod chat;
mod completions;
pub mod decode;
mod decode_set;
pub mod demo;
pub mod draft_args;
mod drives;
pub mod estimate;
mod evidence;
mod examples;
pub mod experiment;
mod fault_args;
pub mod heat;
pub mod import;
mod kv_args;
pub mod ladder;
mod ladder_tables;
pub mod monitor;
pub mod plan;
pub mod progress;
pub mod prune;
pub mod results;
mod run_args;
pub mod serve;
pub mod simulate;
mod simulate_tables;
mod snapshot_args;
pub mod stage;
pub mod synth;
pub mod testbed;
pub mod trace;
pub mod tune;
mod turn_args;
mod verdict;
pub mod verify;

use clap::error::ErrorKind as Usage;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
pub use progress::{ByteBar, Reading, Steps, Tokens, status};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code for a rejected run or a missed target.
pub const REJECTED: u8 = 1;
/// Exit code for usage, input or environment.
pub const FAILED: u8 = 2;

/// Version and source revision; `-dirty` when the sources were not that revision's.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("ARGODRIVE_REVISION"), ")");

/// Plan, stream and measure mixture-of-experts experts across several SSDs.
#[derive(Debug, Parser)]
#[command(name = "argodrive", version = VERSION, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// See it work: a small real model, four emulated drives, a story and a ladder
    Demo(demo::Args),
    /// Show the devices behind drives, their links, what they share, and what changed
    Drives(drives::Args),
    /// Measure what drives deliver, alone and together, and write their profile
    Ceiling(ceiling::Args),
    /// Make drives that can be broken, on loop devices (needs root)
    Testbed(testbed::Args),
    /// Say what a model would take and do on drives, from its config.json alone
    Estimate(estimate::Args),
    /// Turn a checkpoint into a store (goes on where an interrupted import stopped)
    Import(import::Args),
    /// Use an existing folder with one file per expert, in place
    Adopt(adopt::Args),
    /// Write a random but valid checkpoint of any size
    Synth(synth::Args),
    /// Count which experts are asked for, and which together
    Heat(heat::Args),
    /// Plan which expert lies on which drive
    Plan(plan::Args),
    /// Copy to each drive what a plan places there and it does not hold yet
    Stage(stage::Args),
    /// Free on the drives of some plans whatever none of the plans needs
    Prune(prune::Args),
    /// Read back every expert of a plan or a store and compare digests
    Verify(verify::Args),
    /// Generate text with experts streaming from the drives of a plan
    Decode(decode::Args),
    /// Talk to a model
    Chat(chat::Args),
    /// Serve a model to OpenAI clients over HTTP
    Serve(serve::Args),
    /// Measure real decode on 1, 2, ... N drives
    Ladder(ladder::Args),
    /// Compare two configurations: the control against itself first, then both in balanced order
    Ab(ab::Args),
    /// Find a better layout and better reader settings: simulated, then measured, then written to a profile
    Tune(tune::Args),
    /// Run, resume and repeat experiments that are written down in a file
    Experiment(experiment::Args),
    /// Watch devices or a process: rate, peak, reads under way
    Monitor(monitor::Args),
    /// Say who landed last and why, from a trace; read and write traces of other programs
    Trace(trace::Args),
    /// Predict what a trace would have been on another layout, or with one more drive
    Simulate(simulate::Args),
    /// List, group and compare everything that was measured; find stale verdicts; share records
    Results(results::Args),
    /// Print a script that completes this command line in a shell
    Completions(completions::Args),
    /// Print the manual page, or write the pages of all commands
    Man(completions::ManArgs),
}

/// The whole command line, with examples below the help of each command.
pub fn command() -> clap::Command {
    examples::with_examples(Cli::command())
}

fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::run(args),
        Command::Drives(args) => drives::run(args),
        Command::Ceiling(args) => ceiling::run(args),
        Command::Testbed(args) => testbed::run(args),
        Command::Estimate(args) => estimate::run(args),
        Command::Import(args) => import::run(args),
        Command::Adopt(args) => adopt::run(args),
        Command::Synth(args) => synth::run(args),
        Command::Heat(args) => heat::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Stage(args) => stage::run(args),
        Command::Prune(args) => prune::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Decode(args) => decode::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Ladder(args) => ladder::run(args),
        Command::Ab(args) => ab::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Experiment(args) => experiment::run(args),
        Command::Monitor(args) => monitor::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Simulate(args) => simulate::run(args),
        Command::Results(args) => results::run(args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => completions::man(&args),
    }
}

/// Parses the process's arguments, runs the command, prints an error once. Exit codes: 0 done, 1 run rejected or target
/// missed, 2 usage, input or environment.
pub fn main() -> ExitCode {
    let parsed = command().try_get_matches().and_then(|m| Cli::from_arg_matches(&m));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(e) => {
            // nowhere to complain to if this fails
            let _ = e.print();
            let words: Vec<PathBuf> = std::env::args_os().skip(1).take(2).map(PathBuf::from).collect();
            if let (Usage::InvalidSubcommand, [first, file]) = (e.kind(), words.as_slice())
                && first.as_os_str() == "experiment"
                && file.exists()
            {
                remark(&format!("to run the experiment of a file: argodrive experiment run {}", file.display()));
            }
            return u8::try_from(e.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
    };
    match dispatch(cli.command) {
        Ok(code) => code,
        Err(error) => {
            // a reader that has gone away (`| head`) is not an error
            let broken = |e: &std::io::Error| e.kind() == ErrorKind::BrokenPipe;
            if error.downcast_ref::<std::io::Error>().is_some_and(broken) {
                return ExitCode::SUCCESS;
            }
            let _ = writeln!(std::io::stderr(), "argodrive: error: {}", describe(&error));
            ExitCode::from(FAILED)
        }
    }
}

/// The chain of an error in one line, without causes that an outer message has spelled out already.
fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// Prints `text` and a line end on standard output.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Prints a remark for people on standard error.
pub fn remark(text: &str) {
    status("");
    // nowhere to complain to if this fails
    let _ = writeln!(std::io::stderr(), "argodrive: {text}");
}

/// Prints a JSON value and a line end on standard output.
pub fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

/// Columns that tables are laid out for.
pub const WIDTH: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn a_cause_is_printed_once() {
        let inner = std::io::Error::other("no such thing");
        let error = anyhow::Error::new(inner).context("a.json: no such thing").context("opening the store");
        assert_eq!(describe(&error), "opening the store: a.json: no such thing");
    }
}
