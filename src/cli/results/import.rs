//! `argodrive results import`: another machine's bundle, checked, put below one's own results and laid beside them.

use super::super::verdict::wrapped;
use super::super::{WIDTH, print, print_json};
use super::list;
use super::table::plain;
use crate::bench::catalogue::beside::{Beside, Said, Shape, beside};
use crate::bench::catalogue::unpack::open;
use crate::bench::catalogue::walk::Catalogue;
use crate::report::table::{Align, Table};
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

/// Ladders of each side that are shown.
const MAX_SHAPES: usize = 2;

/// Take another machine's bundle in, and lay its shapes beside one's own
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The bundle
    file: PathBuf,
    /// The results folder that it goes into
    #[arg(long, value_name = "DIR", default_value = "results")]
    into: PathBuf,
    /// What to call the other machine; default: what its bundle says
    #[arg(long, value_name = "NAME")]
    label: Option<String>,
    /// Check and compare; write nothing
    #[arg(long)]
    dry_run: bool,
    /// Leave records of other versions in --into out of the comparison
    #[arg(long)]
    lenient: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    let bundle = open(&args.file)?;
    // records of another version are found before anything is written
    let mine = if args.into.exists() { list::read(&args.into, args.lenient)? } else { Catalogue::default() };
    let label = args.label.as_deref().unwrap_or(&bundle.manifest.label);
    let folder = if args.dry_run {
        None
    } else {
        std::fs::create_dir_all(&args.into).with_context(|| format!("--into {}", args.into.display()))?;
        Some(bundle.place(&args.into, label)?)
    };
    let both = beside(&bundle.rows, &mine.rows);
    let records: BTreeSet<_> = bundle.rows.iter().map(|r| &r.path).collect();
    if args.json {
        print_json(&serde_json::json!({
            "label": label, "folder": folder, "records": records.len(), "devices": bundle.manifest.devices,
            "beside": serde_json::to_value(&both)?,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!("{} records of {label}, made by argodrive {}", records.len(), plain(&bundle.manifest.argodrive)))?;
    if let Some(folder) = &folder {
        print(&folder.display().to_string())?;
    }
    show(&both, label)?;
    Ok(ExitCode::SUCCESS)
}

fn mark(emulated: bool) -> &'static str {
    if emulated { " (EMULATED)" } else { "" }
}

fn show(both: &Beside, label: &str) -> Result<()> {
    let theirs: Vec<(String, &Shape)> =
        both.theirs.iter().take(MAX_SHAPES).map(|s| (format!("{label}: {}", s.name), s)).collect();
    let mine: Vec<(String, &Shape)> =
        both.mine.iter().take(MAX_SHAPES).map(|s| (format!("here: {}", s.name), s)).collect();
    if !theirs.is_empty() {
        let all: Vec<&(String, &Shape)> = theirs.iter().chain(&mine).collect();
        let titles = all.iter().map(|(title, s)| (format!("{title}{}", mark(s.emulated)), Align::Left));
        let mut table = Table::new([("drives".to_string(), Align::Right)].into_iter().chain(titles));
        let rungs: BTreeSet<usize> = all.iter().flat_map(|(_, s)| s.gains.iter().map(|g| g.0)).collect();
        for drives in rungs {
            let gain = |s: &Shape| {
                s.gains.iter().find(|g| g.0 == drives).map_or_else(|| "-".into(), |g| format!("{:.2}x", g.1))
            };
            table.row(std::iter::once(drives.to_string()).chain(all.iter().map(|(_, s)| gain(s))));
        }
        print(&format!("\nLadders, as multiples of each one's first rung:\n{}", table.render(WIDTH).trim_end()))?;
        if mine.is_empty() {
            print("there is no ladder of one's own to lay beside")?;
        } else if all.iter().any(|(_, s)| s.model != all[0].1.model) {
            print("their models differ")?;
        }
    }
    if !both.verdicts.is_empty() {
        let said = |s: &Said| {
            let times = s.effect.map(|e| format!(" {:.2}x", e.ratio)).unwrap_or_default();
            format!("{}{times}{}", s.verdict.name(), mark(s.emulated))
        };
        let mut table = Table::new([("what", Align::Left), (label, Align::Left), ("here", Align::Left)]);
        for v in &both.verdicts {
            let mine = v.mine.as_ref().map_or_else(|| "not measured".into(), said);
            table.row([v.title.clone(), said(&v.theirs), mine]);
        }
        print(&format!("\nVerdicts, each against its own control:\n{}", table.render(WIDTH).trim_end()))?;
    }
    print(&wrapped(
        "Shapes only: another machine's rates are not compared with one's own. `argodrive results` lists both, \
         `--where origin=...` one of them.",
    ))
}
