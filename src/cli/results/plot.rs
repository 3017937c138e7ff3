//! `argodrive results plot`: verdicts, figure and page of a campaign or a ladder again, from its files alone.

use super::super::campaign::draw;
use super::super::{ladder, print, print_json};
use crate::bench::campaign::evaluate::evaluate;
use crate::bench::campaign::file::{CAMPAIGN_FILE, CampaignFile};
use crate::bench::ladder::{LADDER_FILE, LadderRecord};
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Judge and draw an `ab`, `experiment` or `ladder` folder again, from its records alone
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder with experiment.json or ladder.json
    folder: PathBuf,
    /// Where to write the figure (SVG and PNG) and the page; default: into the folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.folder.join(LADDER_FILE).exists() {
        return plot_ladder(&args);
    }
    if !args.folder.join(CAMPAIGN_FILE).exists() {
        let folder = args.folder.display();
        bail!(
            "{folder}: neither {CAMPAIGN_FILE} nor {LADDER_FILE} is in it; give the folder of one ladder, `ab` or experiment"
        );
    }
    let file = CampaignFile::load(&args.folder)?;
    let runs = file.runs(&args.folder)?;
    // A committed sample keeps what its records said, not the records.
    let results = match (&file.results, runs.iter().flatten().count()) {
        (Some(results), 0) => results.clone(),
        _ => evaluate(&file, &runs)?,
    };
    let out = args.out.as_ref().unwrap_or(&args.folder);
    std::fs::create_dir_all(out)?;
    let files = draw(&args.folder, out, &file, &results)?;
    if args.json {
        print_json(&serde_json::json!({"files": files, "results": results}))?;
        return Ok(ExitCode::SUCCESS);
    }
    for c in &results.comparisons {
        print(&super::super::verdict::wrapped(&format!("{}: {}", c.arm, c.says)))?;
    }
    for file in files {
        print(&file.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn plot_ladder(args: &Args) -> Result<ExitCode> {
    let record = LadderRecord::load(&args.folder).map_err(anyhow::Error::msg)?;
    let out = args.out.as_ref().unwrap_or(&args.folder);
    std::fs::create_dir_all(out)?;
    let files = ladder::draw(&record, record.model.as_ref().unwrap_or(&record.model_id), &args.folder, out)?;
    if args.json {
        print_json(&serde_json::json!({"files": files, "results": record}))?;
        return Ok(ExitCode::SUCCESS);
    }
    for file in files {
        print(&file.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}
