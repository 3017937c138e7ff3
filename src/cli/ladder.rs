//! `argodrive ladder`: real decode on 1, 2, ... N drives.

use super::heat::read_heat;
use super::run_args::{ModelArgs, PromptArgs, ReaderArgs, SamplerArgs, check_context, interrupt_flag, warn_shared};
use super::{ByteBar, REJECTED, WIDTH, plan as plan_command, print, print_json, remark, verdict};
use crate::bench::against::{self, OtherLadder, PUBLISHED_NAME};
use crate::bench::config::Asked;
use crate::bench::ladder::{LadderEvent, LadderRecord, LadderSpec, check_options, climb};
use crate::bench::record;
use crate::drive::spec::{self, DriveSpec};
use crate::open::Model;
use crate::report::Figure;
use crate::report::html;
use crate::report::ladder::{LadderFigure, RungPoint};
use crate::report::scaling::{MAX_OTHERS, ScalingFigure, ScalingLine};
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// The page in a ladder's folder.
const PAGE_FILE: &str = "report.html";
/// The figure of `--against`, without its ending.
const AGAINST_STEM: &str = "ladder-against";
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
    #[arg(long, value_name = "FILE")]
    policy: PathBuf,
    /// What is hot, for policies that place by it (`argodrive heat`)
    #[arg(long, value_name = "FILE")]
    heat: Option<PathBuf>,
    /// What the drives do (`argodrive ceiling`)
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Order in which rungs add drives, by name; without it: emulated drives by rate, others as listed
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    order: Vec<String>,
    /// Counted runs per rung; an even number cancels drift
    #[arg(long, value_name = "N", default_value_t = 4)]
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
    reader: ReaderArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut asked = Asked::default();
    asked.config.store.clone_from(&args.store);
    asked.config.max_new = DEFAULT_TOKENS;
    args.prompt.apply(&mut asked);
    args.sampler.apply(&mut asked);
    args.model.apply(&mut asked);
    args.reader.apply(&mut asked);
    asked.check()?;
    check_options(args.repetitions, asked.config.max_new)?;
    let others = args.against.as_deref().map(against::load).transpose()?;
    let drives = in_order(spec::load(&args.drives)?, &args.order)?;
    warn_shared(&drives)?;
    let (policy, mut inputs) = plan_command::read_policy(&args.policy)?;
    let heat = args.heat.as_ref().map(|p| read_heat(p).context("--heat")).transpose()?;
    if let Some(heat) = &heat {
        inputs.insert("heat".into(), heat.hash()?);
    }
    let profile = plan_command::read_profile(args.profile.as_deref(), &mut inputs)?;
    let model = Model::load(&args.store, asked.config.model.isa()?)?;
    if !model.has_experts() {
        bail!("{}: a dense model reads no experts; there is no ladder to climb", args.store.display());
    }
    let prompt = model.encode_prompt(&asked.config.prompt_text()?, asked.config.special)?;
    check_context(&model, &asked, prompt.len())?;
    let folder = record::new_folder(&args.out, "ladder")?;
    let interrupted = interrupt_flag()?;
    let spec = LadderSpec {
        drives: &drives,
        policy: &policy,
        heat: heat.as_ref(),
        profile: profile.as_ref(),
        inputs: &inputs,
        asked: &asked,
        prompt: &prompt,
        repetitions: args.repetitions,
        folder: &folder,
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

/// The drives in the order in which rungs add them.
fn in_order(mut drives: Vec<DriveSpec>, order: &[String]) -> Result<Vec<DriveSpec>> {
    if order.is_empty() {
        if drives.iter().all(|d| d.emulate.is_some()) {
            drives.sort_by_key(|d| std::cmp::Reverse(d.emulate.map_or(0, |e| e.rate_bytes_per_s)));
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
    let ladder = climb(model, spec, interrupted, &mut |event| match event {
        LadderEvent::Staging { progress, .. } => bar.show(progress),
        LadderEvent::RunStarts { index, total, drives, warm_up } => {
            bar.finish();
            let what = if warm_up { ", warm-up" } else { "" };
            super::status(&format!("run {} of {total}: {drives} drives{what}", index + 1));
        }
        LadderEvent::RunEnded(record) => {
            // A warm-up does not count anyway.
            let counts = !record.arm.ends_with("-warmup");
            if let Some(reason) = record.rejected.first().filter(|_| counts) {
                super::status("");
                remark(&format!("{} rejected and repeated: {reason}", record.arm));
            }
        }
    })?;
    super::status("");
    let drawn = if ladder.rungs.is_empty() { None } else { Some(figure(&ladder, name)) };
    let svg = drawn.map(|drawn| {
        drawn.write(&spec.folder.join("ladder")).context("the ladder's figure")?;
        drawn.svg().context("the ladder's figure")
    });
    // a ladder that does not count says on its page why
    let page = html::ladder::page(name, &ladder, svg.transpose()?, environment_of_any(spec.folder));
    let path = spec.folder.join(PAGE_FILE);
    write_atomic(&path, page.render().as_bytes()).with_context(|| path.display().to_string())?;
    Ok(ladder)
}

/// The environment of the first record that is there.
pub(super) fn environment_of_any(folder: &Path) -> Vec<(String, String)> {
    let mut arms: Vec<_> = std::fs::read_dir(folder.join("arms")).into_iter().flatten().flatten().collect();
    arms.sort_by_key(std::fs::DirEntry::path);
    let found = arms.iter().find_map(|arm| html::trace::environment_of(&arm.path().join("record.json")));
    found.unwrap_or_default()
}

/// The ladder as a figure.
fn figure(ladder: &LadderRecord, name: &str) -> LadderFigure {
    let first = ladder.rungs.first().map_or(0.0, |r| r.rates.decode_tok_s);
    let point = |r: &crate::bench::ladder::Rung| RungPoint {
        label: r.drives.last().cloned().unwrap_or_default(),
        drives: r.drives.len() as u32,
        tok_s_median: r.rates.decode_tok_s,
        tok_s_low: r.decode_tok_s_range.0,
        tok_s_high: r.decode_tok_s_range.1,
        io_wait_share: r.io_wait_share.clamp(0.0, 1.0),
        ideal_tok_s: Some(first * r.drives.len() as f64),
    };
    let runs = ladder.rungs.iter().map(|r| r.runs).max().unwrap_or(0);
    LadderFigure {
        title: "Decode speed by number of drives".into(),
        subtitle: format!("{name}, {} layout", ladder.policy),
        emulated: ladder.emulated,
        rungs: ladder.rungs.iter().map(point).collect(),
        note: format!(
            "Medians of {runs} interleaved runs per rung; decode tok/s = (generated - 1) / (last - first token time). Tokens identical on every rung."
        ),
    }
}

/// The table, and where everything is.
pub(super) fn show(ladder: &LadderRecord, folder: &Path) -> Result<()> {
    let mut table = Table::new([
        ("drives", Align::Right),
        ("decode tok/s", Align::Right),
        ("min-max", Align::Right),
        ("gain", Align::Right),
        ("of top", Align::Right),
        ("I/O wait", Align::Right),
        ("barrier", Align::Right),
        ("first token", Align::Right),
    ]);
    for r in &ladder.rungs {
        table.row([
            r.drives.len().to_string(),
            units::tokens_per_s(r.rates.decode_tok_s),
            format!("{}-{}", units::tokens_per_s(r.decode_tok_s_range.0), units::tokens_per_s(r.decode_tok_s_range.1)),
            format!("{:.2}x", r.gain),
            units::percent(r.share_of_top),
            units::percent(r.io_wait_share),
            units::duration(r.barrier_mean_ns),
            units::duration((r.rates.ttft_s * 1e9) as u64),
        ]);
    }
    print(table.render(WIDTH).trim_end())?;
    for r in &ladder.rungs {
        if let Some(v) = &r.verdict {
            let names: Vec<&str> = r.drives.iter().map(String::as_str).collect();
            let waits = units::percent(v.share(v.stall_ns()));
            let count = if names.len() == 1 { "1 drive".to_owned() } else { format!("{} drives", names.len()) };
            print(&format!("{count}: {}, {waits} of the time waiting", verdict::label(v, &names)))?;
        }
    }
    let label = if ladder.emulated { "EMULATED drives: these are not speeds of this machine's hardware. " } else { "" };
    let tokens = if ladder.rejected.is_empty() { "; tokens identical on every rung" } else { "" };
    print(&format!("{label}Layout {}{tokens}.", ladder.policy))?;
    for reason in &ladder.rejected {
        print(&format!("REJECTED: {reason}"))?;
    }
    print(&format!("record  {}", folder.join("ladder.json").display()))?;
    if !ladder.rungs.is_empty() {
        let [svg, png] = ["ladder.svg", "ladder.png"].map(|file| folder.join(file).display().to_string());
        print(&format!("figure  {svg}\n        {png}"))?;
    }
    print(&format!("report  {}", folder.join(PAGE_FILE).display()))
}

/// The shape of this ladder beside others'.
fn scaling(ladder: &LadderRecord, others: &[OtherLadder], name: &str) -> ScalingFigure {
    let line = |other: &OtherLadder| ScalingLine {
        name: other.name.clone(),
        points: other.rungs.iter().filter_map(|r| Some((r.0, other.gain(r.0)?))).collect(),
    };
    let own = ladder.rungs.iter().map(|r| (r.drives.len() as u32, r.gain)).collect();
    let left_out = others.len().saturating_sub(MAX_OTHERS);
    let more = if left_out > 0 { format!(" {left_out} more ladders are in the table only.") } else { String::new() };
    ScalingFigure {
        title: "The shape of this ladder beside others".into(),
        subtitle: format!("{name}, {} layout", ladder.policy),
        emulated: ladder.emulated,
        own: ScalingLine { name: format!("this ladder ({name})"), points: own },
        others: others.iter().take(MAX_OTHERS).map(line).collect(),
        note: format!("Other machines, models and drives: only shapes can be compared. Dashed: linear.{more}"),
    }
}

fn show_against(ladder: &LadderRecord, others: &[OtherLadder], folder: &Path) -> Result<()> {
    let most = ladder.rungs.iter().map(|r| r.drives.len() as u32).max().unwrap_or(1);
    let widest = others.iter().flat_map(|o| &o.rungs).map(|r| r.0).max().unwrap_or(1).max(most).min(4);
    let heads: Vec<String> = (1..=widest).map(|n| n.to_string()).collect();
    let mut columns = vec![("gain over its first rung, by number of drives", Align::Left)];
    columns.extend(heads.iter().map(|h| (h.as_str(), Align::Right)));
    let mut table = Table::new(columns);
    let cells = |gain: &dyn Fn(u32) -> Option<f64>| {
        (1..=widest).map(|n| gain(n).map_or("-".to_owned(), |g| format!("{g:.2}x"))).collect::<Vec<_>>()
    };
    let own = |n: u32| ladder.rungs.iter().find(|r| r.drives.len() as u32 == n).map(|r| r.gain);
    let label = if ladder.emulated { "this ladder (EMULATED)" } else { "this ladder" };
    table.row(std::iter::once(label.to_owned()).chain(cells(&own)));
    for other in others {
        let name = if other.emulated { format!("{} (EMULATED)", other.name) } else { other.name.clone() };
        table.row(std::iter::once(name).chain(cells(&|n| other.gain(n))));
    }
    print(table.render(WIDTH).trim_end())?;
    print("Other machines, models and drives: only the shape can be compared.")?;
    print(&format!("figure  {}", folder.join(AGAINST_STEM).with_extension("svg").display()))
}
