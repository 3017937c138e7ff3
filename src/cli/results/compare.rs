//! `argodrive results compare`: two records or folders beside each other.

use super::super::verdict::wrapped;
use super::super::{WIDTH, print, print_json};
use crate::bench::catalogue::Row;
use crate::bench::catalogue::compare::{Difference, Pair, SideBySide, compare};
use crate::report::table::{Align, Table};
use crate::report::units::{rate, tokens_per_s};
use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;

/// Lay two records or folders beside each other: settings and inputs that differ, rates
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A record, or a folder with records
    a: PathBuf,
    /// Another one
    b: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    let both = compare(&args.a, &args.b).map_err(anyhow::Error::msg)?;
    if args.json {
        print_json(&serde_json::to_value(&both)?)?;
    } else {
        print(show(&both, args).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn show(both: &SideBySide, args: &Args) -> String {
    let mut out = format!("A  {}\nB  {}\n\n", args.a.display(), args.b.display());
    let right = |title: &str| (title.to_string(), Align::Right);
    let left = |title: &str| (title.to_string(), Align::Left);
    let mut table =
        Table::new([left("what"), right("A"), right("B"), right("B / A"), left("verdict A"), left("verdict B")]);
    let speed = |row: &Row| row.tok_s.map(tokens_per_s).or(row.bytes_per_s.map(rate)).unwrap_or_else(|| "-".into());
    let said = |row: &Row| {
        let times = row.effect.map(|e| format!(" {:.2}x", e.ratio)).unwrap_or_default();
        format!("{}{times}{}", row.verdict.name(), row.emulated_mark())
    };
    for pair in &both.pairs {
        let ratio = pair.ratio().map_or_else(|| "-".into(), |r| format!("{r:.3}"));
        table.row([title(pair), speed(&pair.a), speed(&pair.b), ratio, said(&pair.a), said(&pair.b)]);
    }
    out.push_str(&table.render(WIDTH));
    let mut shown: Vec<(&Vec<Difference>, &Vec<Difference>)> = Vec::new();
    for pair in &both.pairs {
        // rungs of one ladder mostly differ in the same things
        if shown.iter().any(|(s, i)| **s == pair.settings && **i == pair.inputs) {
            continue;
        }
        shown.push((&pair.settings, &pair.inputs));
        let mut table = Table::new([left("differs"), left("A"), left("B")]);
        for d in pair.inputs.iter().chain(&pair.settings) {
            table.row([d.name.clone(), d.a.clone(), d.b.clone()]);
        }
        if table.is_empty() {
            out.push_str(&format!("\n{}: no setting and no input that the records hold differs\n", title(pair)));
        } else {
            out.push_str(&format!("\n{}\n{}", title(pair), table.render(WIDTH)));
        }
    }
    out.push('\n');
    let only = [("A", &both.only_a), ("B", &both.only_b)];
    let only = only.into_iter().filter(|o| !o.1.is_empty());
    let lines = only.map(|(side, titles)| format!("only in {side}: {}", titles.join(", ")));
    for line in both.warnings.iter().cloned().chain(lines).chain([both.no_winner.clone()]) {
        let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        out.push_str(&wrapped(&line));
        out.push('\n');
    }
    out
}

fn title(pair: &Pair) -> String {
    let (a, b) = (pair.a.title(), pair.b.title());
    let title = if a == b { a } else { format!("{a} | {b}") };
    title.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
