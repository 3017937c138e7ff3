//! What `ab`, `experiment`, `tune` and `results plot` share: progress while arms are measured, the figure and the page, the table.

use super::ladder::environment_of_any;
use super::verdict::wrapped;
use super::{REJECTED, Steps, WIDTH, print, print_json, remark};
use crate::bench::campaign::arms::ReadyArm;
use crate::bench::campaign::evaluate::{Results, change};
use crate::bench::campaign::file::CampaignFile;
use crate::bench::campaign::order::Part;
use crate::bench::campaign::{Event, Measured, measure};
use crate::report::html::campaign::{figure, page};
use crate::report::table::{Align, Table};
use crate::report::{Figure, units};
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// The figure, without its ending.
const FIGURE: &str = "paired";
/// The page.
const PAGE_FILE: &str = "report.html";

/// Measures into `folder`, draws, prints.
pub(super) fn run_and_show(
    folder: &Path,
    mut file: CampaignFile,
    arms: &[ReadyArm],
    as_json: bool,
) -> Result<ExitCode> {
    let interrupted = super::run_args::interrupt_flag()?;
    for mounts in arms.iter().filter_map(|a| a.streamed.as_ref().map(|s| &s.1)) {
        super::run_args::warn_shared(mounts)?;
    }
    let mut steps = Steps::default();
    let mut show = |event: Event<'_>| show_event(event, &mut steps);
    let measured = measure(folder, &mut file, arms, &|| interrupted.load(Ordering::SeqCst), &mut show);
    steps.finish();
    let measured = measured?;
    draw(folder, folder, &file, &measured.results)?;
    if as_json {
        print_json(&json(folder, &file, &measured)?)?;
    } else {
        show_results(folder, &file, &measured.results)?;
        if measured.reused > 0 || measured.stale > 0 {
            let Measured { measured, reused, stale, .. } = measured;
            let stale = if stale > 0 {
                format!(", {stale} put aside because their inputs have changed")
            } else {
                String::new()
            };
            print(&format!("runs    {measured} measured now, {reused} were there already{stale}"))?;
        }
    }
    let sound = file.arms_as_expected() && measured.results.missed.is_empty();
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::from(REJECTED) })
}

/// Progress of a campaign.
pub(super) fn show_event(event: Event<'_>, steps: &mut Steps) {
    match event {
        Event::WarmUp(arm) => super::status(&format!("warm-up: {arm}")),
        Event::Starts { step, total, arm } => {
            let part = if step.part == Part::Floor { "A/A floor" } else { "pairs" };
            let what = format!("run {} of {total}: {arm} ({part}, row {})", step.index + 1, step.row + 1);
            steps.show(step.index, total, &what);
        }
        Event::Rejected(record) => {
            super::status("");
            remark(&format!("{}: a run does not count: {}", record.arm, record.rejected.join("; ")));
        }
    }
}

fn json(folder: &Path, file: &CampaignFile, measured: &Measured) -> Result<serde_json::Value> {
    let mut value = serde_json::to_value(&measured.results)?;
    let more = [
        ("experiment", file.experiment.clone().into()),
        ("folder", folder.display().to_string().into()),
        ("state", serde_json::to_value(file.state)?),
        ("differences", serde_json::to_value(&file.differences)?),
        ("identical", file.differences.is_empty().into()),
        ("rejected", serde_json::to_value(&file.rejected)?),
        ("runs_measured", measured.measured.into()),
        ("runs_reused", measured.reused.into()),
        ("runs_stale", measured.stale.into()),
    ];
    if let Some(object) = value.as_object_mut() {
        object.extend(more.into_iter().map(|(k, v)| (k.to_string(), v)));
    }
    Ok(value)
}

/// Writes figure and page of the campaign in `folder` into `out`; gives the files.
pub(super) fn draw(folder: &Path, out: &Path, file: &CampaignFile, results: &Results) -> Result<Vec<PathBuf>> {
    let drawn = figure(file, results);
    let mut files = Vec::new();
    let svg = match &drawn {
        Some(drawn) => {
            files.extend(drawn.write(&out.join(FIGURE)).context("the figure of pairs")?);
            Some(drawn.svg().context("the figure of pairs")?)
        }
        None => None,
    };
    let path = out.join(PAGE_FILE);
    let page = page(file, results, svg, environment_of_any(folder));
    write_atomic(&path, page.render().as_bytes()).with_context(|| path.display().to_string())?;
    files.push(path);
    Ok(files)
}

/// The tables, and where everything is.
pub(super) fn show_results(folder: &Path, file: &CampaignFile, results: &Results) -> Result<()> {
    if file.differences.is_empty() {
        print("The arms are identical configurations: this is an A/A run, any effect is chance.\n")?;
    } else {
        let mut columns = vec![("differs".to_owned(), Align::Left)];
        columns.extend(file.arms.iter().map(|a| (a.name.clone(), Align::Left)));
        let mut table = Table::new(columns);
        for d in &file.differences {
            table.row(std::iter::once(&d.setting).chain(&d.values).cloned());
        }
        print(&table.render(WIDTH))?;
    }
    let mut table = Table::new([
        ("arm", Align::Left),
        ("runs", Align::Right),
        ("decode tok/s", Align::Right),
        ("min-max", Align::Right),
        ("I/O wait", Align::Right),
        ("change", Align::Right),
        ("verdict", Align::Left),
    ]);
    let dash = || "-".to_owned();
    for (index, arm) in results.arms.iter().enumerate() {
        let rate = units::tokens_per_s;
        let comparison = index.checked_sub(1).and_then(|i| results.comparisons.get(i));
        let verdict = match (comparison, &arm.rejected) {
            (_, Some(_)) if file.expect.refused.contains_key(&arm.name) => "refused, as expected".into(),
            (_, Some(_)) => "REJECTED".into(),
            (None, None) => "control".into(),
            (Some(c), None) => c.outcome.words().to_owned(),
        };
        table.row([
            arm.name.clone(),
            arm.runs.to_string(),
            arm.decode_tok_s.map_or_else(dash, rate),
            arm.range.map_or_else(dash, |(low, high)| format!("{}-{}", rate(low), rate(high))),
            arm.io_wait_share.map_or_else(dash, units::percent),
            comparison.and_then(|c| c.effect).map_or_else(dash, |e| change(e.ratio.ln())),
            verdict,
        ]);
    }
    print(&table.render(WIDTH))?;
    for c in &results.comparisons {
        print(&wrapped(&format!("{}: {}", c.arm, c.says)))?;
    }
    for (arm, why) in file.rejected.iter().filter(|(arm, _)| !file.expect.refused.contains_key(*arm)) {
        print(&wrapped(&format!("REJECTED: arm {arm}: {why}")))?;
    }
    for missed in &results.missed {
        print(&wrapped(&format!("MISSED: {missed}")))?;
    }
    if results.emulated {
        print("EMULATED drives: these are not speeds of this machine's hardware.")?;
    }
    if let Some(label) = &results.trunk {
        print(label)?;
    }
    print(&format!("record  {}", folder.join("experiment.json").display()))?;
    let [svg, png] = ["svg", "png"].map(|e| folder.join(format!("{FIGURE}.{e}")));
    if svg.exists() {
        print(&format!("figure  {}\n        {}", svg.display(), png.display()))?;
    }
    print(&format!("report  {}", folder.join(PAGE_FILE).display()))
}
