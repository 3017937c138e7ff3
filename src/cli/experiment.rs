//! `argodrive experiment`: questions that are written down in a file, and their answers. `run` goes on with a campaign that
//! was killed; `resume` and `rerun` work on results.

use super::campaign::run_and_show;
use super::verdict::wrapped;
use super::{ByteBar, REJECTED, print, print_json, remark};
use crate::bench::campaign::design::Design;
use crate::bench::campaign::file::{CAMPAIGN_FILE, CampaignFile, State, read_versioned};
use crate::bench::config::Asked;
use crate::bench::experiment::{Experiment, SetupEvent};
use crate::bench::planning::plan_and_mounts;
use crate::bench::prompt_set::encode;
use crate::bench::record::{self, RECORD_VERSION, RunRecord};
use crate::bench::run::{RunSpec, run as run_once};
use crate::knob::Knob;
use crate::open::Model;
use crate::report::units::tokens_per_s;
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Run, resume and repeat experiments that are written down in a file
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the experiment of a file; goes on where a killed or interrupted run of it stopped
    Run(RunArgs),
    /// Go on with the campaign of a results folder
    Resume(FolderArgs),
    /// Repeat a whole campaign, or one run by its record, and compare
    Rerun(RerunArgs),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// The experiment (TOML)
    file: PathBuf,
    /// Folder that gets the records
    #[arg(long, value_name = "DIR", default_value = "results")]
    out: PathBuf,
    /// Begin anew even if an unfinished run is there
    #[arg(long)]
    fresh: bool,
    /// Check the file and say what would be measured; makes and measures nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct FolderArgs {
    /// The folder with experiment.json
    folder: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct RerunArgs {
    /// A folder with experiment.json, or the record.json of one run
    of: PathBuf,
    /// Folder that gets the records
    #[arg(long, value_name = "DIR", default_value = "results")]
    out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    match args.command {
        Command::Run(args) => run_file(&args),
        Command::Resume(args) => resume(&args),
        Command::Rerun(args) => {
            let name = args.of.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            match (args.of.is_dir(), name) {
                (true, _) => rerun_campaign(&args, &args.of),
                (false, CAMPAIGN_FILE) => rerun_campaign(&args, args.of.parent().unwrap_or(Path::new("."))),
                (false, _) => rerun_record(&args),
            }
        }
    }
}

fn run_file(args: &RunArgs) -> Result<ExitCode> {
    let experiment = Experiment::load(&args.file)?;
    let unfinished = unfinished(&args.out.join(&experiment.design.experiment))?;
    if args.dry_run {
        return dry_run(args, &experiment.design);
    }
    let bars = [ByteBar::new("import"), ByteBar::new("staging")];
    experiment.set_up(&mut |event| match event {
        SetupEvent::Importing(at) => bars[0].show(at),
        SetupEvent::Staging(at) => bars[1].show(at),
    })?;
    bars.iter().for_each(ByteBar::finish);
    let (mut file, ready) = experiment.design.prepare()?;
    let folder = match unfinished.filter(|(_, then)| !args.fresh && then.same_order(&file)) {
        Some((folder, then)) => {
            remark(&format!("going on with {}", folder.display()));
            file.started = then.started;
            folder
        }
        None => record::new_folder(&args.out, &file.experiment)?,
    };
    run_and_show(&folder, file, &ready, args.json)
}

/// The newest campaign in `folder`, if it has not ended. Results of a newer program are an error, found before anything is
/// measured.
fn unfinished(folder: &Path) -> Result<Option<(PathBuf, CampaignFile)>> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut found: Vec<(PathBuf, CampaignFile)> = Vec::new();
    for path in entries.filter(|p| p.join(CAMPAIGN_FILE).exists()) {
        let file = CampaignFile::load(&path)?;
        found.push((path, file));
    }
    found.sort_by(|a, b| (&a.1.started, &a.0).cmp(&(&b.1.started, &b.0)));
    Ok(found.pop().filter(|(_, f)| matches!(f.state, State::Running | State::Interrupted)))
}

fn dry_run(args: &RunArgs, design: &Design) -> Result<ExitCode> {
    let protocol = design.protocol();
    let runs = protocol.steps(design.arms.len(), design.prompts.len()).len();
    let arms: Vec<&str> = design.arms.iter().map(|a| a.name.as_str()).collect();
    let prompts: Vec<&str> = design.prompts.iter().map(|p| p.name.as_str()).collect();
    if args.json {
        print_json(&serde_json::json!({
            "experiment": design.experiment, "arms": arms, "prompts": prompts, "runs": runs, "protocol": protocol,
        }))?;
    } else {
        let hypothesis = design.hypothesis.as_deref().unwrap_or_default();
        print(&wrapped(&format!("{}: {hypothesis}", design.experiment)))?;
        print(&wrapped(&format!("arms     {} (the first is the control)", arms.join(", "))))?;
        print(&wrapped(&format!("prompts  {}", prompts.join(", "))))?;
        let (floor, pairs) = (protocol.floor_pairs, protocol.pairs);
        print(&wrapped(&format!(
            "runs     {runs}: {floor} pairs of the control against itself, {pairs} of each candidate; and a warm-up of each arm"
        )))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn resume(args: &FolderArgs) -> Result<ExitCode> {
    let then = CampaignFile::load(&args.folder)?;
    let mut design = Design::of(&then);
    design.refresh_prompts()?;
    let (mut file, ready) = design.prepare()?;
    file.started = then.started;
    run_and_show(&args.folder, file, &ready, args.json)
}

fn rerun_campaign(args: &RerunArgs, folder: &Path) -> Result<ExitCode> {
    let then = CampaignFile::load(folder)?;
    let mut design = Design::of(&then);
    design.refresh_prompts()?;
    let (file, ready) = design.prepare()?;
    for (a, b) in then.arms.iter().zip(&file.arms) {
        let changed: Vec<&str> =
            a.inputs.iter().filter(|(k, v)| b.inputs.get(*k) != Some(v)).map(|(k, _)| k.as_str()).collect();
        if !changed.is_empty() {
            remark(&format!("arm {}: other than then: {}", a.name, changed.join(", ")));
        }
    }
    let new = record::new_folder(&args.out, &file.experiment)?;
    let code = run_and_show(&new, file, &ready, args.json)?;
    if !args.json
        && let (Some(then), Some(now)) = (then.results, CampaignFile::load(&new)?.results)
    {
        for (a, b) in then.comparisons.iter().zip(&now.comparisons) {
            print(&format!("then    {}: {}\nnow     {}", a.arm, a.outcome.words(), b.outcome.words()))?;
        }
    }
    Ok(code)
}

fn rerun_record(args: &RerunArgs) -> Result<ExitCode> {
    let then: RunRecord = read_versioned(&args.of, RECORD_VERSION)?;
    let asked = Asked::load(&args.of)?;
    asked.check().with_context(|| args.of.display().to_string())?;
    let model = Model::load_as(&asked.config.store, asked.config.model.isa()?, asked.config.model.trunk)?;
    let prompts = encode(&model, &asked.config).with_context(|| args.of.display().to_string())?.tokens;
    let streamed = plan_and_mounts(&model, &asked.config)?;
    let under_test = then.settings.iter().filter(|s| s.under_test).filter_map(|s| Knob::named(&s.name)).collect();
    let folder = record::new_folder(&args.out, "rerun")?;
    let mut asked = asked;
    if asked.config.trace.is_some() {
        let trace = folder.join("trace");
        std::fs::create_dir_all(&trace).with_context(|| trace.display().to_string())?;
        asked.config.trace = Some(trace);
    }
    let interrupted = super::run_args::interrupt_flag()?;
    let spec = RunSpec {
        arm: &then.arm,
        asked: &asked,
        under_test: &under_test,
        streamed: streamed.as_ref().map(|(plan, mounts)| (plan, mounts.as_slice())),
        prompts: &prompts,
        control: None,
    };
    let now = run_once(&model, &spec, &mut |_| {
        if interrupted.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?
    .record;
    if interrupted.load(Ordering::SeqCst) {
        bail!("interrupted; nothing was written");
    }
    let kind = if now.rejected.is_empty() { "arms" } else { "rejected" };
    let path = folder.join(kind).join(format!("00-{}", now.arm)).join("record.json");
    record::write_json(&path, &now)?;
    let (a, b) = (then.rates.decode_tok_s, now.rates.decode_tok_s);
    let ratio = (a > 0.0).then(|| b / a);
    if args.json {
        print_json(&serde_json::json!({
            "record": path, "then_tok_s": a, "now_tok_s": b, "ratio": ratio, "rejected": now.rejected,
            "same_tokens": then.token_hash == now.token_hash, "same_plan": then.plan_hash == now.plan_hash,
        }))?;
    } else {
        let emulated = if now.emulated { " (EMULATED drives)" } else { "" };
        let trunk = now.label().map(|label| format!("; {label}")).unwrap_or_default();
        let times = ratio.map_or_else(String::new, |r| format!(", {r:.3} times as fast"));
        print(&format!(
            "{}: {} tok/s then, {} now{times}{emulated}{trunk}",
            now.arm,
            tokens_per_s(a),
            tokens_per_s(b)
        ))?;
        for reason in &now.rejected {
            print(&wrapped(&format!("REJECTED: {reason}")))?;
        }
        print("one run each: no verdict, see `argodrive ab` for one")?;
        print(&format!("record  {}", path.display()))?;
    }
    Ok(if now.rejected.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REJECTED) })
}
