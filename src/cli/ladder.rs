//! `argodrive ladder`: real decode on 1, 2, ... N drives, and on drives alone and uplinks if asked.

use super::draft_args::DraftArgs;
use super::heat::read_heat;
pub(super) use super::ladder_tables::show;
use super::ladder_tables::{scaling, show_against};
use super::run_args::{ModelArgs, PromptArgs, ReaderArgs, SamplerArgs, check_context, interrupt_flag, warn_shared};
use super::{ByteBar, REJECTED, Steps, plan as plan_command, print_json, remark};
use crate::bench::against::{self, PUBLISHED_NAME};
use crate::bench::ceiling_links::emulated_links;
use crate::bench::config::Asked;
use crate::bench::ladder::{
    LadderEvent, LadderRecord, LadderSpec, Layout, Rung, RungKind, Work, check_options, climb, rungs,
};
use crate::bench::record;
use crate::drive::facts::{Tables, shared};
use crate::drive::profile::Profile;
use crate::drive::spec::{self, DriveSpec};
use crate::layout::plan::Plan;
use crate::open::Model;
use crate::report::Figure;
use crate::report::html;
use crate::report::ladder::{IoPoint, LadderFigure, MAX_RUNGS, RungPoint};
use crate::stats::MIN_PAIRS;
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// The page in a ladder's folder.
pub(super) const PAGE_FILE: &str = "report.html";
/// The figure of `--against`, without its ending.
pub(super) const AGAINST_STEM: &str = "ladder-against";
/// Tokens of a run unless told otherwise.
const DEFAULT_TOKENS: usize = 64;

/// Measure real decode on 1, 2, ... N drives
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store
    #[arg(long, value_name = "DIR")]
    store: PathBuf,
    /// The drives, as `[[drive]]` tables
    #[arg(long, value_name = "FILE")]
    drives: PathBuf,
    /// The layout policy, planned again for every rung
    #[arg(long, value_name = "FILE", required_unless_present = "fixed_plan", conflicts_with = "fixed_plan")]
    policy: Option<PathBuf>,
    /// Instead of a policy: one plan, of which each rung keeps the homes on its drives; a rung on which an expert has none
    /// is skipped
    #[arg(long, value_name = "FILE")]
    fixed_plan: Option<PathBuf>,
    /// What is hot, for policies that place by it (`argodrive heat`)
    #[arg(long, value_name = "FILE", conflicts_with = "fixed_plan")]
    heat: Option<PathBuf>,
    /// What the drives do (`argodrive ceiling`)
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Sets of drives to measure, each set once
    #[arg(long, value_name = "KIND,...", value_delimiter = ',', value_enum, default_value = "ladder")]
    rungs: Vec<RungsOf>,
    /// Order in which rungs add drives, by name; without it the fastest first, as far as --profile or emulation says
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    order: Vec<String>,
    /// Counted runs per rung, and as many raw readings; an even number cancels drift, fewer than 6 allow no verdict
    #[arg(long, value_name = "N", default_value_t = MIN_PAIRS)]
    repetitions: usize,
    /// Folder that gets the records
    #[arg(long, value_name = "DIR", default_value = "results")]
    out: PathBuf,
    /// Lay other ladders beside this one, by their shape: a ladder.json, a CSV file, or nothing for the published ones
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = PUBLISHED_NAME)]
    against: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampler: SamplerArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    reader: ReaderArgs,
}

/// `--rungs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RungsOf {
    /// The first 1, 2, ... N drives
    Ladder,
    /// Each drive alone
    Solo,
    /// The drives of each shared uplink together
    Uplinks,
    /// All drives together
    All,
}

impl From<RungsOf> for RungKind {
    fn from(rungs: RungsOf) -> Self {
        match rungs {
            RungsOf::Ladder => Self::Ladder,
            RungsOf::Solo => Self::Solo,
            RungsOf::Uplinks => Self::Uplink,
            RungsOf::All => Self::All,
        }
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut asked = Asked::default();
    asked.config.store.clone_from(&args.store);
    asked.config.max_new = DEFAULT_TOKENS;
    args.prompt.apply(&mut asked);
    args.sampler.apply(&mut asked);
    args.model.apply(&mut asked);
    args.draft.apply(&mut asked);
    args.reader.apply(&mut asked);
    asked.check()?;
    let others = args.against.as_deref().map(against::load).transpose()?;
    let policy = args.policy.as_ref().map(|p| plan_command::read_policy(p)).transpose()?;
    let fixed = args.fixed_plan.as_ref().map(|p| plan_command::read_plan(p).context("--fixed-plan")).transpose()?;
    let (policy, mut inputs) = policy.map_or((None, Default::default()), |(policy, inputs)| (Some(policy), inputs));
    let heat = args.heat.as_ref().map(|p| read_heat(p).context("--heat")).transpose()?;
    if let Some(heat) = &heat {
        inputs.insert("heat".into(), heat.hash()?);
    }
    let profile = plan_command::read_profile(args.profile.as_deref(), &mut inputs)?;
    let drives = in_order(spec::load(&args.drives)?, &args.order, profile.as_ref())?;
    if let Some(fault) = asked.config.reader.faults.iter().find(|f| drives.iter().all(|d| d.name != f.drive)) {
        bail!("--faults `{fault}`: {} names no drive `{}`", args.drives.display(), fault.drive);
    }
    let kinds: BTreeSet<RungKind> = args.rungs.iter().map(|&r| r.into()).collect();
    let uplinks = uplinks(&drives, kinds.contains(&RungKind::Uplink))?;
    let sets = rungs::sets(drives.len(), &kinds, &uplinks);
    check_options(args.repetitions, asked.config.max_new, sets.len())?;
    warn_shared(&drives)?;
    say_uplinks(&drives, &uplinks, &kinds);
    let model = Model::load_as(&args.store, asked.config.model.isa()?, asked.config.model.trunk)?;
    if !model.has_experts() {
        bail!("{}: a dense model reads no experts; there is no ladder to climb", args.store.display());
    }
    let prompt = model.encode_prompt(&asked.config.prompt_text()?, asked.config.special)?;
    check_context(&model, &asked, prompt.len())?;
    let folder = record::new_folder(&args.out, "ladder")?;
    let interrupted = interrupt_flag()?;
    let spec = LadderSpec {
        drives: &drives,
        sets: &sets,
        layout: layout(policy.as_ref(), heat.as_ref(), fixed.as_ref())?,
        profile: profile.as_ref(),
        inputs: &inputs,
        asked: &asked,
        prompt: &prompt,
        repetitions: args.repetitions,
        folder: &folder,
        command: &command_words(),
    };
    let ladder = climb_and_draw(&model, &spec, &|| interrupted.load(Ordering::SeqCst), &model.manifest.name)?;
    let others = others.filter(|_| !ladder.rungs.is_empty());
    if let Some(others) = &others {
        scaling(&ladder, others, &model.manifest.name).write(&folder.join(AGAINST_STEM)).context("--against")?;
    }
    if args.json {
        let mut value = serde_json::to_value(&ladder)?;
        if let Some(object) = value.as_object_mut() {
            object.insert("folder".into(), folder.display().to_string().into());
            if let Some(others) = &others {
                object.insert("against".into(), serde_json::to_value(others)?);
            }
        }
        print_json(&value)?;
    } else {
        show(&ladder, &folder)?;
        others.map_or(Ok(()), |others| show_against(&ladder, &others, &folder))?;
    }
    Ok(if ladder.rejected.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REJECTED) })
}

fn layout<'a>(
    policy: Option<&'a crate::layout::policy::PolicyFile>,
    heat: Option<&'a crate::layout::heat::Heat>,
    fixed: Option<&'a Plan>,
) -> Result<Layout<'a>> {
    match (policy, fixed) {
        (Some(policy), _) => Ok(Layout::Planned { policy, heat }),
        (None, Some(plan)) => Ok(Layout::Fixed(plan)),
        (None, None) => bail!("nothing says where experts lie: give --policy or --fixed-plan"),
    }
}

/// What drives share on the way to memory. What cannot be looked at shares nothing, unless it was `asked` for.
fn uplinks(drives: &[DriveSpec], asked: bool) -> Result<Vec<(String, Vec<usize>)>> {
    let facts = match Tables::system().drives(drives) {
        Err(e) if asked => return Err(e).context("--rungs uplinks"),
        other => other.unwrap_or_default(),
    };
    let real = shared(&facts).into_iter().map(|(station, members)| (station.name, members));
    Ok(real.chain(emulated_links(drives).into_iter().map(|link| (link.name, link.members))).collect())
}

/// Says what is shared and not measured by itself, or that nothing is.
fn say_uplinks(drives: &[DriveSpec], uplinks: &[(String, Vec<usize>)], kinds: &BTreeSet<RungKind>) {
    if kinds.contains(&RungKind::Uplink) {
        if uplinks.is_empty() {
            remark(
                "no two of these drives share an uplink that is known (emulated ones share the `link` that they name)",
            );
        }
        return;
    }
    for (name, members) in uplinks.iter().filter(|(_, members)| members.len() < drives.len()) {
        let names: Vec<&str> = members.iter().map(|&d| drives[d].name.as_str()).collect();
        remark(&format!("{} share {name}; --rungs ladder,uplinks measures them together too", names.join(", ")));
    }
}

/// The words of this command, the program's name left out.
pub(super) fn command_words() -> Vec<String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect()
}

/// The drives in the order in which rungs add them.
fn in_order(mut drives: Vec<DriveSpec>, order: &[String], profile: Option<&Profile>) -> Result<Vec<DriveSpec>> {
    // They are written down in the ladder's own folder, where a relative path would mean another place.
    for drive in &mut drives {
        drive.path = std::path::absolute(&drive.path).with_context(|| drive.path.display().to_string())?;
    }
    if order.is_empty() {
        let measured = |d: &DriveSpec| profile.and_then(|p| p.drive(&d.name)).map(|m| m.solo_rate_bytes_per_s as u64);
        let paced = |d: &DriveSpec| d.emulate.map(|e| e.rate_bytes_per_s);
        if drives.iter().all(|d| measured(d).is_some()) {
            drives.sort_by_key(|d| std::cmp::Reverse(measured(d)));
        } else if drives.iter().all(|d| d.emulate.is_some()) {
            drives.sort_by_key(|d| std::cmp::Reverse(paced(d)));
        }
        return Ok(drives);
    }
    let mut out: Vec<DriveSpec> = Vec::with_capacity(order.len());
    for name in order {
        if out.iter().any(|d| d.name == *name) {
            bail!("--order names drive `{name}` twice");
        }
        match drives.iter().find(|d| d.name == *name) {
            Some(drive) => out.push(drive.clone()),
            None => {
                let known: Vec<&str> = drives.iter().map(|d| d.name.as_str()).collect();
                bail!("--order: there is no drive `{name}`; there are {}", known.join(", "));
            }
        }
    }
    Ok(out)
}

/// Climbs with progress on stderr, and writes the figure beside the records.
pub(super) fn climb_and_draw(
    model: &Model,
    spec: &LadderSpec<'_>,
    interrupted: &dyn Fn() -> bool,
    name: &str,
) -> Result<LadderRecord> {
    let bar = ByteBar::new("staging");
    let mut steps = Steps::default();
    let ladder = climb(model, spec, interrupted, &mut |event| match event {
        LadderEvent::Staging { progress, .. } => bar.show(progress),
        LadderEvent::Planned { rungs, skipped, runs } => {
            let sets: Vec<String> = rungs.iter().map(|names| names.join(" + ")).collect();
            let left = if skipped == 0 { String::new() } else { format!("; {skipped} skipped") };
            let (count, sets) = (rungs.len(), sets.join("; "));
            let what = if count == 1 { "rung" } else { "rungs" };
            remark(&format!("{count} {what} ({sets}){left}: {runs} runs, {runs} raw readings, {count} short warm-ups"));
        }
        LadderEvent::Starts { index, total, drives, work } => {
            bar.finish();
            let what = match work {
                Work::WarmUp => "warm-up on",
                Work::Decode => "decode on",
                Work::Read => "raw reading of",
            };
            steps.show(index, total, &format!("{} of {total}: {what} {drives} drives", index + 1));
        }
        LadderEvent::RunEnded(record) => {
            // A warm-up does not count anyway.
            let counts = !record.arm.ends_with("-warmup");
            say_rejected(&record.arm, record.rejected.first().filter(|_| counts));
        }
        LadderEvent::ReadingEnded { arm, record } => say_rejected(arm, record.rejected.first()),
    });
    steps.finish();
    let ladder = ladder?;
    draw(&ladder, name, spec.folder, spec.folder)?;
    Ok(ladder)
}

fn say_rejected(arm: &str, reason: Option<&String>) {
    if let Some(reason) = reason {
        super::status("");
        remark(&format!("{arm} rejected and repeated: {reason}"));
    }
}

/// Writes the figure and the page of a ladder into `out`; its records are in `folder`. Returns what was written.
pub(super) fn draw(ladder: &LadderRecord, name: &str, folder: &Path, out: &Path) -> Result<Vec<PathBuf>> {
    let drawn = if ladder.rungs.is_empty() { None } else { Some(figure(ladder, name)) };
    let svg = drawn.map(|drawn| {
        drawn.write(&out.join("ladder")).context("the ladder's figure")?;
        drawn.svg().context("the ladder's figure")
    });
    let svg = svg.transpose()?;
    let drawn: &[&str] = if svg.is_some() { &["ladder.svg", "ladder.png"] } else { &[] };
    // a ladder that does not count says on its page why
    let page = html::ladder::page(name, ladder, svg, environment_of_any(folder));
    let path = out.join(PAGE_FILE);
    write_atomic(&path, page.render().as_bytes()).with_context(|| path.display().to_string())?;
    Ok(drawn.iter().map(|file| out.join(file)).chain([path.clone()]).collect())
}

/// The environment of the first record that is there.
pub(super) fn environment_of_any(folder: &Path) -> Vec<(String, String)> {
    let mut arms: Vec<_> = std::fs::read_dir(folder.join("arms")).into_iter().flatten().flatten().collect();
    arms.sort_by_key(std::fs::DirEntry::path);
    let found = arms.iter().find_map(|arm| html::trace::environment_of(&arm.path().join("record.json")));
    found.unwrap_or_default()
}

/// The ladder as a figure: its rungs by number of drives, or all of them where they are no ladder.
fn figure(ladder: &LadderRecord, name: &str) -> LadderFigure {
    let mut shown: Vec<&Rung> = ladder.ladder().collect();
    if shown.len() < 2 {
        shown = ladder.rungs.iter().filter(|r| !r.of_ladder()).chain(ladder.ladder()).collect();
    }
    let left_out = ladder.rungs.len() - shown.len().min(MAX_RUNGS);
    shown.drain(..shown.len().saturating_sub(MAX_RUNGS));
    // The ladder's first rung may have been skipped: the line is from what is there.
    let base = ladder.base().map(|at| &ladder.rungs[at]);
    let per_drive = base.map_or(0.0, |r| r.rates.decode_tok_s / r.drives.len().max(1) as f64);
    let point = |r: &&Rung| {
        let last = r.added.as_ref().and_then(|a| a.drives.last()).or(r.drives.last());
        let raw = r.raw.as_ref().and_then(|raw| raw.io_gain);
        let simulated = r.simulated.as_ref().and_then(|s| s.io_gain);
        RungPoint {
            label: if r.kind == RungKind::Uplink { r.drives.join(" + ") } else { last.cloned().unwrap_or_default() },
            drives: r.drives.len() as u32,
            tok_s_median: r.rates.decode_tok_s,
            tok_s_low: r.spread().0.min(r.rates.decode_tok_s),
            tok_s_high: r.spread().1.max(r.rates.decode_tok_s),
            io_wait_share: r.io_wait_share.clamp(0.0, 1.0),
            ideal_tok_s: r.of_ladder().then_some(per_drive * r.drives.len() as f64),
            io: raw.map(|gain| IoPoint { gain, simulated }),
        }
    };
    let runs = ladder.rungs.iter().map(|r| r.runs).max().unwrap_or(0);
    let interval = ladder.rungs.iter().all(|r| r.decode_tok_s_interval.is_some());
    let more = match left_out {
        0 => String::new(),
        1 => " One more rung is in the table only.".into(),
        more => format!(" {more} more rungs are in the table only."),
    };
    LadderFigure {
        title: "Decode speed by number of drives".into(),
        subtitle: format!("{name}, {} layout{}", ladder.policy, html::trunk_after(ladder.trunk.as_deref())),
        emulated: ladder.emulated,
        whiskers: if interval { "95 % interval of the median" } else { "slowest and fastest run" }.into(),
        rungs: shown.iter().map(point).collect(),
        note: format!(
            "Medians of {runs} interleaved runs per rung; decode tok/s = (generated - 1) / (last - first token time). Tokens identical on every rung.{more}"
        ),
    }
}
