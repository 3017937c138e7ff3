//! The command line: one file per subcommand, each a clap struct and a `run` that calls the library and prints. A new
//! subcommand is a file, a `pub mod` line, a variant of [`Command`] and its arm in `dispatch`. Nothing is computed here.

pub mod ab;
pub mod adopt;
mod campaign;
pub mod ceiling;
pub mod chat;
pub mod decode;
mod decode_set;
pub mod demo;
pub mod draft_args;
mod drives;
pub mod estimate;
mod evidence;
pub mod experiment;
mod fault_args;
pub mod heat;
pub mod import;
pub mod ladder;
mod ladder_tables;
pub mod monitor;
pub mod plan;
pub mod prune;
pub mod results;
mod run_args;
pub mod simulate;
mod simulate_tables;
mod snapshot_args;
pub mod stage;
pub mod synth;
pub mod testbed;
pub mod trace;
pub mod tune;
mod verdict;
pub mod verify;

use crate::store::import::Progress;
use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

/// Exit code for a rejected run or a missed target.
pub const REJECTED: u8 = 1;
/// Exit code for usage, input or environment.
pub const FAILED: u8 = 2;

/// Plan, stream and measure mixture-of-experts experts across several SSDs.
#[derive(Debug, Parser)]
#[command(name = "argodrive", version, max_term_width = 110)]
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
        Command::Ladder(args) => ladder::run(args),
        Command::Ab(args) => ab::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Experiment(args) => experiment::run(args),
        Command::Monitor(args) => monitor::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Simulate(args) => simulate::run(args),
        Command::Results(args) => results::run(args),
    }
}

/// Parses the process's arguments, runs the command, prints an error once. Exit codes: 0 done, 1 run rejected or target
/// missed, 2 usage, input or environment.
pub fn main() -> ExitCode {
    match dispatch(Cli::parse().command) {
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
    // nowhere to complain to if this fails
    let _ = writeln!(std::io::stderr(), "argodrive: {text}");
}

/// Prints a JSON value and a line end on standard output.
pub fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

/// Replaces the status line on standard error, if that is a terminal; empty text clears it.
pub fn status(text: &str) {
    let mut err = std::io::stderr().lock();
    if err.is_terminal() {
        let _ = write!(err, "\r\x1b[2K{text}").and_then(|()| err.flush());
    }
}

/// Columns that tables are laid out for.
pub const WIDTH: usize = 80;

/// A bar on standard error for byte counts; silent when standard error is no terminal.
pub struct ByteBar(Option<ProgressBar>);

impl ByteBar {
    /// A bar labelled `what`.
    pub fn new(what: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let template = "{prefix} [{bar:30}] {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        Self(Some(bar))
    }

    /// Shows how far the work is.
    pub fn show(&self, at: Progress) {
        if let Some(bar) = &self.0 {
            if bar.length() != Some(at.total_bytes) {
                bar.set_length(at.total_bytes);
                // what was done before this run must not count as this run's rate
                bar.set_position(at.done_bytes);
                bar.reset_eta();
            }
            bar.set_position(at.done_bytes);
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_cause_is_printed_once() {
        let inner = std::io::Error::other("no such thing");
        let error = anyhow::Error::new(inner).context("a.json: no such thing").context("opening the store");
        assert_eq!(describe(&error), "opening the store: a.json: no such thing");
    }
}
