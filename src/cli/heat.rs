//! `argodrive heat`: which experts are asked for, how often and which together; from decoding a prompt, from route files of
//! this program and others, or by merging what was counted before.

use super::run_args::{
    ModelArgs, PromptArgs, ReaderArgs, SamplerArgs, check_context, interrupt_flag, plan_and_mounts, start,
};
use super::{Tokens, WIDTH, print, print_json, remark};
use crate::bench::activations;
use crate::bench::affinity::Placed;
use crate::bench::config::Asked;
use crate::bench::kv;
use crate::bench::run::use_threads;
use crate::clock::Clock;
use crate::decode::generate::{Request, generate_observed};
use crate::decode::observe::{Observer, Route};
use crate::decode::sampler::Sampler;
use crate::files::{self, Kind};
use crate::ids::{ExpertId, LayerId};
use crate::layout::heat::{DEFAULT_DOMAIN, Heat, Part, Source};
use crate::layout::heat_build::{HeatBuilder, merge};
use crate::layout::routes::{RouteFormat, RouteOptions, import};
use crate::open::Model;
use crate::reader::PrefetchPolicy;
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::store::manifest::StoreManifest;
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Largest route or heat file that is read.
const MAX_FILE_BYTES: u64 = 4 << 30;

/// Count which experts are asked for, and which together
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store: what is decoded, or whose model the routes must be of
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Route files (formats of this program and others, see --format)
    #[arg(long, value_name = "FILE", num_args = 1..)]
    routes: Vec<PathBuf>,
    /// Heat files to merge, the oldest first
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "routes")]
    merge: Vec<PathBuf>,
    /// Weight of each file before the last, per file: 0.5 halves with every newer one
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    decay: f64,
    /// Label of what is counted: `code`, `german`, ... Merged heat keeps labels apart
    #[arg(long, value_name = "LABEL", default_value = DEFAULT_DOMAIN)]
    domain: String,
    /// Count only half of each source's steps, to judge a plan on the other
    #[arg(long, value_enum)]
    split: Option<Half>,
    /// Format of the route files [default: by their first lines]
    #[arg(long, value_parser = parse_format, value_name = "FORMAT")]
    format: Option<RouteFormat>,
    /// Experts of a layer, where a route file does not say (--store knows)
    #[arg(long, value_name = "N")]
    experts: Option<u32>,
    /// Experts per token, for files that hold counts only
    #[arg(long, value_name = "N")]
    per_token: Option<u32>,
    /// Added to the layer numbers of route files that count MoE layers from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    layer_base: u16,
    /// Count the rows of rejected drafts too
    #[arg(long)]
    with_rejected: bool,
    /// Where the heat is written
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The plan to decode with; without one experts come from the store itself
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Where the plan's drives are now
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// Decode with every expert in memory instead of streaming
    #[arg(long)]
    resident: bool,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    sampler: SamplerArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    reader: ReaderArgs,
}

/// Halves by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Half {
    /// The first half of the steps
    FirstHalf,
    /// The rest; its cache starts as the first half left it
    SecondHalf,
}

fn parse_format(text: &str) -> Result<RouteFormat, String> {
    let known = RouteFormat::ALL.iter().find(|(_, name)| *name == text).map(|(format, _)| *format);
    let names = || RouteFormat::ALL.map(|(_, name)| name).join(", ");
    known.ok_or_else(|| format!("known formats are {}", names()))
}

/// Reads a heat file.
pub(super) fn read_heat(path: &Path) -> Result<Heat> {
    let text = read_text(path)?;
    Heat::parse(&text).map_err(|e| match files::instead(&text, Kind::Heat) {
        Some(other) => anyhow::anyhow!("{}: {other}", path.display()),
        None => anyhow::Error::new(e).context(path.display().to_string()),
    })
}

pub(super) fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::metadata(path).with_context(|| path.display().to_string())?.len();
    if bytes > MAX_FILE_BYTES {
        bail!("{}: {bytes} bytes; at most {MAX_FILE_BYTES} are read, split the file and merge", path.display());
    }
    files::read_text(path).with_context(|| path.display().to_string())
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.decay != 1.0 && args.merge.is_empty() && args.routes.len() < 2 {
        bail!("--decay weighs files against each other; give several with --merge or --routes");
    }
    let heat = if !args.merge.is_empty() {
        from_heat(&args)?
    } else if !args.routes.is_empty() {
        from_routes(&args)?
    } else {
        from_decode(&args)?
    };
    write_atomic(&args.out, heat.to_json()?.as_bytes()).with_context(|| format!("--out {}", args.out.display()))?;
    show(&args, &heat)
}

fn from_heat(args: &Args) -> Result<Heat> {
    if args.split.is_some() {
        bail!("--split counts half of route files or of a decode; heat files are counted already");
    }
    let heats = args.merge.iter().map(|p| read_heat(p)).collect::<Result<Vec<_>>>()?;
    let merged = merge(&heats, args.decay).context("--merge")?;
    if let Some(store) = &args.store {
        let manifest = StoreManifest::open(store)?;
        merged.fits(&manifest.model_id, &manifest.moe_layers, manifest.experts)?;
    }
    Ok(merged)
}

fn part(args: &Args) -> Part {
    match args.split {
        None => Part::Whole,
        Some(Half::FirstHalf) => Part::FirstHalf,
        Some(Half::SecondHalf) => Part::SecondHalf,
    }
}

fn from_routes(args: &Args) -> Result<Heat> {
    let manifest = args.store.as_ref().map(|s| StoreManifest::open(s)).transpose()?;
    let mut options = RouteOptions {
        format: args.format,
        experts: manifest.as_ref().map(|m| m.experts).or(args.experts),
        top_k: args.per_token,
        layer_base: args.layer_base,
        part: part(args),
        rejected: args.with_rejected,
        label: args.domain.clone(),
        model_id: manifest.as_ref().map(|m| m.model_id.clone()),
    };
    let mut heats: Vec<Heat> = Vec::new();
    for path in &args.routes {
        let text = read_text(path)?;
        let heat = import(&text, &path.display().to_string(), &options).with_context(|| path.display().to_string())?;
        if let Some(m) = &manifest {
            heat.fits(&m.model_id, &m.moe_layers, m.experts).with_context(|| path.display().to_string())?;
        }
        // Later files are of the same model as the first.
        options.experts = options.experts.or((heats.is_empty() && args.routes.len() > 1).then_some(heat.experts));
        heats.push(heat);
    }
    let heat = if heats.len() == 1 { heats.remove(0) } else { merge(&heats, args.decay).context("--routes")? };
    if manifest.is_none() && args.experts.is_none() {
        remark(&format!(
            "{} experts in a layer, as far as the routes say; give --store or --experts if the model has more",
            heat.experts
        ));
    }
    Ok(heat)
}

/// Collects the routes of every pass, by position.
#[derive(Default)]
struct Routes(BTreeMap<u64, Vec<(LayerId, Vec<ExpertId>)>>);

impl Observer for Routes {
    fn route(&mut self, route: &Route<'_>) {
        self.0.entry(route.position).or_default().push((route.layer, route.experts.to_vec()));
    }
}

fn asked(args: &Args) -> Result<Asked> {
    let mut asked = start(None)?;
    let c = &mut asked.config;
    match &args.store {
        Some(store) => c.store.clone_from(store),
        None => bail!("nothing to count: give --store and a prompt to decode, --routes, or --merge"),
    }
    c.plan.clone_from(&args.plan);
    c.drives.clone_from(&args.drives);
    c.resident = args.resident;
    args.prompt.apply(&mut asked);
    args.sampler.apply(&mut asked);
    args.model.apply(&mut asked);
    args.reader.apply(&mut asked);
    asked.check()?;
    Ok(asked)
}

fn from_decode(args: &Args) -> Result<Heat> {
    let asked = asked(args)?;
    let config = &asked.config;
    let model = Model::load_as(&config.store, config.model.isa()?, config.model.trunk)?;
    if let Some(label) = activations::label(model.manifest.trunk_format, config.model.activations) {
        remark(&label);
    }
    if !model.has_experts() {
        bail!("{}: this model is dense, it has no experts to count", config.store.display());
    }
    let text = config.prompt_text()?;
    let prompt = model.encode_prompt(&text, config.special)?;
    if prompt.is_empty() {
        bail!("the prompt is empty; give at least one token of text");
    }
    check_context(&model, &asked, prompt.len())?;
    use_threads(&model, config);
    activations::use_activations(&model, config)?;
    let placed = Placed::compute(&model.decoder, &config.model.affinity)?;
    let clock = Clock::start();
    let (context, rows) = (config.model.max_context, config.model.prefill_rows);
    let mut session = model.bounded_session(context, rows, PrefetchPolicy::None, clock, kv::limit_of(config))?;
    kv::open(&model, config, session.kv_mut(), (prompt.len() + config.max_new, clock, false), None)?;
    let mut sampler = Sampler::new(config.sampler)?;
    let request = Request {
        prompt: &prompt,
        max_new: config.max_new,
        stop: &model.stop_ids,
        piece_rows: config.model.prefill_rows,
    };
    let interrupted = interrupt_flag()?;
    let mut progress = Tokens::start(true, prompt.len(), config.max_new);
    let mut go_on = |_| {
        progress.next();
        if interrupted.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let mut routes = Routes::default();
    let observer: Option<&mut dyn Observer> = Some(&mut routes);
    let generation = if config.resident {
        let mut memory = model.resident()?;
        placed.reading(|| model.stream_trunk(session.trunk_mut(), &config.reader, clock, None))?;
        generate_observed(&mut session, &mut memory, &mut sampler, request, &mut go_on, observer)?
    } else {
        let (plan, mounts) = match plan_and_mounts(&model, &asked)? {
            Some(streamed) => streamed,
            None => model.store_plan()?,
        };
        let mut reader = placed.reading(|| model.reader(&plan, &mounts, &config.reader, clock))?;
        let pace = model.own_drive(&mounts).and_then(|drive| reader.handle().pace(drive));
        placed.reading(|| model.stream_trunk(session.trunk_mut(), &config.reader, clock, pace))?;
        generate_observed(&mut session, &mut reader, &mut sampler, request, &mut go_on, observer)?
    };
    progress.finish();
    if interrupted.load(Ordering::SeqCst) {
        bail!("interrupted; nothing was written");
    }
    let source = Source {
        name: format!("decode of {} prompt and {} new tokens", prompt.len(), generation.token_ids.len()),
        digest: format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes())),
        part: part(args),
    };
    count(&model, &routes, source, args)
}

/// Positions in order; half of them if that is asked for.
fn count(model: &Model, routes: &Routes, source: Source, args: &Args) -> Result<Heat> {
    let mut builder = HeatBuilder::new(model.manifest.experts)?;
    let half = routes.0.len() / 2;
    if args.split.is_some() && half == 0 {
        bail!("--split: one token cannot be split into halves; decode more with --max-new");
    }
    for (index, rows) in routes.0.values().enumerate() {
        let counted = match args.split {
            None => true,
            Some(Half::FirstHalf) => index < half,
            Some(Half::SecondHalf) => index >= half,
        };
        for (layer, ids) in rows {
            builder.row(*layer, ids, counted)?;
        }
    }
    Ok(builder.finish(Some(model.manifest.model_id.clone()), vec![source], &args.domain)?)
}

/// How concentrated the counts are.
fn show(args: &Args, heat: &Heat) -> Result<ExitCode> {
    let share = |counts: &[u64], part: f64| {
        let mut sorted: Vec<u64> = counts.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let take = ((counts.len() as f64 * part).round() as usize).max(1);
        let total: f64 = sorted.iter().map(|&c| c as f64).sum();
        if total == 0.0 { 0.0 } else { sorted[..take].iter().map(|&c| c as f64).sum::<f64>() / total }
    };
    let mut table = Table::new([
        ("domain", Align::Left),
        ("layers", Align::Right),
        ("tokens", Align::Right),
        ("hottest 10 %", Align::Right),
        ("25 %", Align::Right),
        ("50 %", Align::Right),
        ("never", Align::Right),
    ]);
    let mut domains = Vec::new();
    for domain in &heat.domains {
        let layers: Vec<_> = domain.layers.values().collect();
        let mean =
            |of: &dyn Fn(&[u64]) -> f64| layers.iter().map(|l| of(&l.counts)).sum::<f64>() / layers.len().max(1) as f64;
        let shares = [0.1, 0.25, 0.5].map(|p| mean(&|c| share(c, p)));
        let never = mean(&|c| c.iter().filter(|n| **n == 0).count() as f64 / c.len() as f64);
        let tokens = layers.iter().map(|l| l.rows).max().unwrap_or(0);
        let mut row = vec![domain.label.clone(), layers.len().to_string(), tokens.to_string()];
        row.extend(shares.iter().map(|&s| units::percent(s)));
        row.push(units::percent(never));
        table.row(row);
        domains.push(serde_json::json!({"domain": domain.label, "layers": layers.len(), "tokens": tokens,
            "top10": shares[0], "top25": shares[1], "top50": shares[2], "never": never}));
    }
    if args.json {
        print_json(&serde_json::json!({"heat": args.out, "hash": heat.hash()?, "model_id": heat.model_id,
            "experts": heat.experts, "rows": heat.rows(), "domains": domains}))?;
    } else {
        print(table.render(WIDTH).trim_end())?;
        print(&format!("shares of reads, means over layers; {} rows in {}", heat.rows(), args.out.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
