//! `argodrive tune`: a better layout and better reader settings, found by simulation, measured against the current profile,
//! and written to `profile.toml` only if they have earned it.

use super::campaign::{draw, show_event, show_results};
use super::run_args::interrupt_flag;
use super::verdict::wrapped;
use super::{ByteBar, REJECTED, Steps, WIDTH, print, print_json, remark, status};
use crate::bench::ceiling::Stage;
use crate::bench::config::Asked;
use crate::bench::profile::roll_back;
use crate::bench::tune::inputs::Inputs;
use crate::bench::tune::rank::RankLine;
use crate::bench::tune::settings::Tunable;
use crate::bench::tune::state::{Ranking, TuneFile};
use crate::bench::tune::{Event, TuneSpec, Tuning, tune};
use crate::drive::units::{parse_bytes, parse_duration_ns};
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::stage::DEFAULT_MARGIN_BYTES;
use crate::store::import::Progress;
use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Candidates that are listed.
const LISTED: usize = 12;

/// Find a better layout and better reader settings: simulated, then measured, then written to a profile
///
/// Measures what the drives do, decodes once with the current profile, simulates candidates on that trace, measures the best
/// few against the current profile, and promotes one only if it is better beyond noise and every setting of it was proved.
/// The same command goes on with a tune that was killed or ran out of time.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store
    #[arg(long, value_name = "DIR", required_unless_present = "rollback")]
    store: Option<PathBuf>,
    /// The drives, as `[[drive]]` tables
    #[arg(long, value_name = "FILE", required_unless_present = "rollback")]
    drives: Option<PathBuf>,
    /// Prompts to tune for: files, and folders of .txt files
    #[arg(long, value_name = "PATH", num_args = 1.., required_unless_present = "rollback")]
    prompt_file: Vec<PathBuf>,
    /// Prompts that heat is counted on, for layouts that place by it; refused if they overlap the others
    #[arg(long, value_name = "PATH", num_args = 1..)]
    heat_prompt_file: Vec<PathBuf>,
    /// What is hot, counted before (`argodrive heat`)
    #[arg(long, value_name = "FILE")]
    heat: Option<PathBuf>,
    /// The run profile that is to get better; if it does not exist, one copy of every expert on the drives in turn
    #[arg(long, value_name = "FILE", default_value = "profile.toml")]
    profile: PathBuf,
    /// What `argodrive ceiling` measured of the drives before [default: measured now]
    #[arg(long, value_name = "FILE")]
    ceiling: Option<PathBuf>,
    /// Layout policies to try besides the usual ones
    #[arg(long, value_name = "FILE", num_args = 1..)]
    policy: Vec<PathBuf>,
    /// Change only these
    #[arg(long, value_enum, value_name = "WHAT,...", value_delimiter = ',')]
    only: Vec<Only>,
    /// Minutes that this call may take
    #[arg(long, value_name = "N", default_value_t = 30.0)]
    minutes: f64,
    /// Most candidates that are measured
    #[arg(long, value_name = "N", default_value_t = 2)]
    finalists: usize,
    /// Pairs of runs of each; fewer than 6 say nothing [default: 8, fewer if --minutes hold no more]
    #[arg(long, value_name = "N")]
    pairs: Option<usize>,
    /// Most tokens to generate [default: the profile's, or 64]
    #[arg(long, value_name = "N")]
    max_new: Option<usize>,
    /// Time for each point of the ceiling
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration_ns)]
    point_time: u64,
    /// Bytes to leave free on every file system when staging [default: 256MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    margin: Option<u64>,
    /// Seed of plans, simulations and the order of runs
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Simulations of each candidate
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Folder that gets the records
    #[arg(long, value_name = "DIR", default_value = "results")]
    out: PathBuf,
    /// Begin anew even if an unfinished tune is there
    #[arg(long)]
    fresh: bool,
    /// Simulate and rank only: no candidate is staged or measured, the profile stays
    #[arg(long)]
    dry_run: bool,
    /// Make the version of the profile before the latest promotion the profile again
    #[arg(long, conflicts_with_all = [
        "dry_run", "fresh", "store", "drives", "prompt_file", "heat_prompt_file", "heat", "ceiling", "policy", "only",
        "minutes", "finalists", "pairs", "max_new", "point_time", "margin", "seed", "repeats", "out",
    ])]
    rollback: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What may be changed, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Only {
    /// Which drives hold which expert
    Layout,
    /// Which copy of an expert is read
    Dispatch,
    /// Reads at once on each drive
    QueueDepth,
    /// Experts that stay in memory, within the profile's buffer-bytes
    Cache,
    /// Who guesses what later layers will need
    Prefetch,
}

impl From<Only> for Tunable {
    fn from(only: Only) -> Self {
        match only {
            Only::Layout => Self::Layout,
            Only::Dispatch => Self::Dispatch,
            Only::QueueDepth => Self::QueueDepth,
            Only::Cache => Self::Cache,
            Only::Prefetch => Self::Prefetch,
        }
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.rollback {
        return rollback(&args);
    }
    if !(args.minutes > 0.0 && args.minutes < 1e6) {
        anyhow::bail!("--minutes {}: give a number above 0", args.minutes);
    }
    let spec = TuneSpec {
        store: args.store.clone().unwrap_or_default(),
        drives: args.drives.clone().unwrap_or_default(),
        prompts: args.prompt_file.clone(),
        heat_prompts: args.heat_prompt_file.clone(),
        heat: args.heat.clone(),
        profile: args.profile.clone(),
        ceiling: args.ceiling.clone(),
        policies: args.policy.clone(),
        only: args.only.iter().map(|o| Tunable::from(*o)).collect(),
        max_new: args.max_new,
        budget: Duration::from_secs_f64(args.minutes * 60.0),
        finalists: args.finalists,
        pairs: args.pairs,
        point_time: Duration::from_nanos(args.point_time),
        seed: args.seed,
        repeats: args.repeats,
        margin_bytes: args.margin.unwrap_or(DEFAULT_MARGIN_BYTES),
        out: args.out.clone(),
        dry_run: args.dry_run,
        fresh: args.fresh,
    };
    let inputs = Inputs::check(&spec)?;
    super::run_args::warn_shared(&inputs.specs)?;
    if inputs.from_defaults {
        remark(&format!(
            "{} does not exist: beginning with one copy of every expert, dealt to the drives in turn",
            spec.profile.display()
        ));
    }
    let interrupted = interrupt_flag()?;
    let bars = [ByteBar::new("writing test files"), ByteBar::new("staging")];
    let mut steps = Steps::default();
    let tuning =
        tune(&spec, &inputs, &|| interrupted.load(Ordering::SeqCst), &mut |event| show(event, &bars, &mut steps));
    bars.iter().for_each(ByteBar::finish);
    status("");
    let tuning = tuning?;
    if let Some((folder, file)) = &tuning.campaign
        && let Some(results) = &file.results
    {
        draw(folder, folder, file, results)?;
    }
    if args.json {
        let mut value = serde_json::to_value(&tuning.file)?;
        value["folder"] = tuning.folder.display().to_string().into();
        value["results"] = serde_json::to_value(tuning.campaign.as_ref().and_then(|(_, f)| f.results.as_ref()))?;
        print_json(&value)?;
    } else {
        report(&tuning)?;
    }
    let rejected = tuning.file.result.as_ref().is_some_and(|r| r.rejected);
    Ok(if rejected { ExitCode::from(REJECTED) } else { ExitCode::SUCCESS })
}

fn rollback(args: &Args) -> Result<ExitCode> {
    let check = |path: &std::path::Path| crate::bench::config::read_profile(path).map(drop);
    let done = roll_back(&args.profile, &check)?;
    let now = Asked::load_over(&args.profile, None)?;
    if args.json {
        print_json(&serde_json::json!({"profile": args.profile, "from": done.from, "undone": done.undone}))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!("profile {} is what {} was", args.profile.display(), done.from.display()))?;
    if let Some(undone) = &done.undone {
        print(&format!("undone  {}", undone.display()))?;
    }
    if let Some(plan) = now.config.plan.filter(|p| !p.exists()) {
        remark(&format!("its plan {} is gone; the profile cannot be used without it", plan.display()));
    }
    Ok(ExitCode::SUCCESS)
}

fn show(event: Event<'_>, bars: &[ByteBar; 2], steps: &mut Steps) {
    match event {
        Event::GoesOn(folder) => remark(&format!("going on with {}", folder.display())),
        Event::Reused(part) => remark(&format!("{part}: there already, with the same inputs")),
        Event::Ceiling(Stage::Writing(done_bytes, total_bytes)) => bars[0].show(Progress { done_bytes, total_bytes }),
        Event::Ceiling(Stage::Point(what, at, of)) => {
            bars[0].finish();
            steps.show(at.saturating_sub(1), of, &format!("ceiling, {at} of {of}: {what}"));
        }
        Event::Ceiling(Stage::Sustaining(..)) => {}
        Event::Tracing(prompt) => {
            steps.finish();
            status(&format!("decoding `{prompt}` with the current profile, traced"));
        }
        Event::Rejected(record) => {
            status("");
            remark(&format!("a traced run does not count: {}", record.rejected.join("; ")));
        }
        Event::Simulating(count) => status(&format!("{count} candidates simulated")),
        Event::Staging(what, at) => {
            if at.done_bytes == 0 || at.done_bytes == at.total_bytes {
                status(&format!("staging {what}"));
            }
            bars[1].show(at);
        }
        Event::Fits(candidates, pairs, seconds) => {
            bars[1].finish();
            steps.finish();
            remark(&format!(
                "measuring {candidates} candidates, {pairs} pairs of each, at least {}",
                units::duration((seconds * 1e9) as u64)
            ));
        }
        Event::Campaign(event) => show_event(event, steps),
    }
}

fn report(tuning: &Tuning) -> Result<()> {
    let Tuning { folder, file, campaign } = tuning;
    let emulated = if file.emulated { " (EMULATED drives)" } else { "" };
    if let Some(trace) = &file.trace {
        let names: Vec<&str> = trace.drives.iter().map(String::as_str).collect();
        let bound = trace.verdict.as_ref().map_or_else(|| "unknown".into(), |v| super::verdict::label(v, &names));
        print(&wrapped(&format!(
            "current profile: {} over the drives, {} tok/s{emulated}, bound by {bound}",
            file.current.planner,
            units::tokens_per_s(trace.decode_tok_s),
        )))?;
    }
    if let Some(ranking) = &file.ranking {
        show_ranking(ranking, file)?;
    }
    if let Some((folder, campaign)) = campaign
        && let Some(results) = &campaign.results
    {
        print("")?;
        show_results(folder, campaign, results)?;
    }
    let Some(result) = &file.result else { return Ok(()) };
    print("")?;
    // the campaign's own words are above
    let above = campaign.iter().filter_map(|(_, c)| c.results.as_ref()).flat_map(|r| &r.comparisons);
    let above: Vec<String> = above.map(|c| format!("{}: {}", c.arm, c.says)).collect();
    for reason in result.reasons.iter().filter(|r| !above.contains(r)) {
        print(&wrapped(reason))?;
    }
    print(&wrapped(&result.says))?;
    if result.promoted.is_some() {
        print(&format!("profile {}", file.profile.display()))?;
        if let Some(former) = &result.former {
            print(&format!("former  {} (`argodrive tune --rollback` goes back to it)", former.display()))?;
        }
    }
    leftovers(file)?;
    print(&format!("tune    {}", folder.join("tune.json").display()))
}

/// Plans that were staged to be measured and are not used now.
fn leftovers(file: &TuneFile) -> Result<()> {
    let (Some(ranking), Some(_), Some(result)) = (&file.ranking, &file.campaign, &file.result) else { return Ok(()) };
    if result.unfinished {
        return Ok(());
    }
    let winner = ranking.finalists.iter().find(|f| result.promoted.as_ref() == Some(&f.arm));
    let mut done = vec![winner.map_or(&file.current.plan_hash, |f| &f.plan_hash)];
    for f in ranking.finalists.iter().filter(|f| f.copy_bytes > 0) {
        // finalists with other settings may share a plan
        if done.contains(&&f.plan_hash) {
            continue;
        }
        done.push(&f.plan_hash);
        print(&format!(
            "{} of {} are on the drives and not used now; to free them:\n  argodrive stage --rollback {}",
            units::bytes(f.copy_bytes),
            f.arm,
            f.plan_file.display()
        ))?;
    }
    Ok(())
}

fn show_ranking(ranking: &Ranking, file: &TuneFile) -> Result<()> {
    let mut table = Table::new([
        ("simulated", Align::Left),
        ("tok/s", Align::Right),
        ("gain", Align::Right),
        ("95 % within", Align::Right),
        ("to copy", Align::Right),
        ("measured", Align::Left),
    ]);
    let finalist = |line: &RankLine| {
        let same =
            |f: &&crate::bench::tune::state::Finalist| f.plan_hash == line.plan_hash && f.changes == line.changes;
        ranking.finalists.iter().find(same).map_or("", |f| f.arm.as_str())
    };
    let times = |v: f64| format!("{v:.3}");
    let row = |line: &RankLine| {
        [
            line.name.clone(),
            line.tok_s.map_or_else(|| "-".into(), |t| units::tokens_per_s(t[0])),
            line.gain.map_or_else(|| "-".into(), |g| times(g[0])),
            line.gain.map_or_else(|| "-".into(), |g| format!("{} - {}", times(g[1]), times(g[2]))),
            if line.copy_bytes == 0 { "-".into() } else { units::bytes(line.copy_bytes) },
            if line.changes.is_empty() { "as it is".into() } else { finalist(line).to_string() },
        ]
    };
    print("")?;
    for (at, line) in ranking.candidates.iter().enumerate() {
        if at < LISTED || line.changes.is_empty() || !finalist(line).is_empty() {
            table.row(row(line));
        }
    }
    print(table.render(WIDTH).trim_end())?;
    let emulated = if file.emulated { "; EMULATED drives" } else { "" };
    let off = ranking
        .simulator_error
        .map(|e| format!("; the current profile as simulated is {:+.1} % off its traced run", e * 100.0))
        .unwrap_or_default();
    print(&wrapped(&format!(
        "{} candidates in virtual time, {} seeds each{off}{emulated}",
        ranking.candidates.len(),
        ranking.repeats
    )))?;
    for s in &ranking.skipped {
        print(&wrapped(&format!("not tried: {}: {}", s.name, s.why)))?;
    }
    Ok(())
}
