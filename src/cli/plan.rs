//! `argodrive plan`: which expert may be read from which drive, and what barriers that gives.

use super::heat::read_heat;
use super::run_args::device_inputs;
use super::verdict::wrapped;
use super::{Reading, WIDTH, print, print_json, remark};
use crate::bench::config::with_nearest;
use crate::bench::inputs::digest;
use crate::bench::planning::drive_set;
use crate::drive::profile::Profile;
use crate::drive::spec::{self, DriveSpec};
use crate::files::{self, Kind};
use crate::ids::{DriveId, LayerId};
use crate::layout::drives::DriveSet;
use crate::layout::heat::Heat;
use crate::layout::plan::{Plan, PlanDrive, PlanError};
use crate::layout::planner::{self, Catalog, PlanRequest, Planned};
use crate::layout::policy::PolicyFile;
use crate::layout::predict::Cost;
use crate::model::checkpoint::{CONFIG_FILE, parse_config, read_bounded};
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::store::identity;
use crate::store::manifest::StoreManifest;
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Largest config.json that is read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Layers that are listed as slowest.
const SLOWEST: usize = 5;

/// Plan which expert lies on which drive
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store whose experts are placed
    #[arg(long, value_name = "DIR", required_unless_present = "checkpoint", conflicts_with = "checkpoint")]
    store: Option<PathBuf>,
    /// Instead of a store: a checkpoint that is still to be imported, of which config.json is enough
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// The drives, as `[[drive]]` tables
    #[arg(long, value_name = "FILE")]
    drives: PathBuf,
    /// The layout policy, e.g. layouts/full-mirror.toml
    #[arg(long, value_name = "FILE")]
    policy: PathBuf,
    /// What is hot (`argodrive heat`)
    #[arg(long, value_name = "FILE")]
    heat: Option<PathBuf>,
    /// Use only these domains of the heat
    #[arg(long, value_name = "LABEL", requires = "heat")]
    domain: Vec<String>,
    /// What the drives do (`argodrive ceiling`)
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Judge the plan on heat that it was not made from
    #[arg(long, value_name = "FILE")]
    judge: Option<PathBuf>,
    /// Seed of the policy [default: the policy's, or 0]
    #[arg(long)]
    seed: Option<u64>,
    /// Where the plan is written
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// What there is to place in the store `folder`.
pub(super) fn catalog(folder: &Path) -> Result<Catalog> {
    let manifest = StoreManifest::open(folder)?;
    let store = folder.canonicalize().with_context(|| format!("{}", folder.display()))?;
    Ok(Catalog {
        model_id: manifest.model_id,
        store,
        layers: manifest.moe_layers,
        experts: manifest.experts,
        expert_bytes: manifest.expert_bytes,
    })
}

/// What there will be to place when the checkpoint in `folder` is imported.
fn catalog_of_checkpoint(folder: &Path) -> Result<Catalog> {
    let path = if folder.is_dir() { folder.join(CONFIG_FILE) } else { folder.to_path_buf() };
    let bytes = read_bounded(&path, MAX_CONFIG_BYTES)?;
    let config = parse_config(&path, &bytes)?;
    let (experts, expert_bytes) = config.moe.as_ref().map_or((0, 0), |m| (m.experts as u32, m.expert_bytes()));
    Ok(Catalog {
        model_id: identity::geometry_id(&bytes, &config),
        store: PathBuf::new(),
        layers: config.moe_layers().map(|l| LayerId(l as u16)).collect(),
        experts,
        expert_bytes,
    })
}

/// Drives as a plan holds them, with absolute paths: a plan is used from other folders too.
pub(super) fn plan_drives(specs: &[DriveSpec]) -> Vec<PlanDrive> {
    let absolute =
        |path: &PathBuf| path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.clone());
    specs.iter().map(|s| PlanDrive { name: s.name.clone(), path: absolute(&s.path) }).collect()
}

/// Reads a policy file; its hash goes into the plan.
pub(super) fn read_policy(path: &Path) -> Result<(PolicyFile, BTreeMap<String, String>)> {
    let no_file = || format!("--policy {} (a TOML file, such as layouts/full-mirror.toml)", path.display());
    let text = files::read_text(path).with_context(no_file)?;
    let bad = |e: PlanError| {
        let what = files::instead(&text, Kind::Policy).unwrap_or_else(|| with_nearest(&e.to_string()));
        anyhow::anyhow!("--policy {}: {what}", path.display())
    };
    let policy = PolicyFile::parse(&text).map_err(bad)?;
    Ok((policy, BTreeMap::from([("policy".to_string(), digest(text.as_bytes()))])))
}

/// Reads and checks a plan file.
pub(super) fn read_plan(path: &Path) -> Result<Plan> {
    let text = files::read_text(path)
        .with_context(|| format!("plan {} (a file that `argodrive plan --out` writes)", path.display()))?;
    if let Some(other) = Plan::parse(&text).err().and_then(|_| files::instead(&text, Kind::Plan)) {
        bail!("plan {}: not a valid plan: {other}", path.display());
    }
    if !text.trim_start().starts_with('{') {
        bail!("plan {}: not a valid plan: it is no JSON object as `argodrive plan --out` writes", path.display());
    }
    Plan::parse(&text).with_context(|| format!("plan {}", path.display()))
}

/// Reads a profile, if one is given; its hash goes into the plan.
pub(super) fn read_profile(path: Option<&Path>, inputs: &mut BTreeMap<String, String>) -> Result<Option<Profile>> {
    let Some(path) = path else { return Ok(None) };
    let profile = Profile::load(path).context("--profile")?;
    let bytes = std::fs::read(path).with_context(|| format!("--profile {}", path.display()))?;
    inputs.insert("profile".into(), digest(&bytes));
    Ok(Some(profile))
}

/// Refuses to judge a plan on rows that it was made from.
fn check_apart(heat: &Heat, judged: &Heat) -> Result<()> {
    for a in &heat.sources {
        if let Some(b) = judged.sources.iter().find(|b| b.digest == a.digest && b.part.overlaps(a.part)) {
            bail!(
                "--judge: {} ({}) is what the plan is made from ({}); judge on other text, or count halves with `argodrive \
                 heat --split`",
                b.name,
                b.part.name(),
                a.part.name()
            );
        }
    }
    Ok(())
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let working = Reading::planning("planning");
    let specs = spec::load(&args.drives)?;
    let (mut policy, mut inputs) = read_policy(&args.policy)?;
    policy.seed = args.seed.unwrap_or(policy.seed);
    let mut heat = args.heat.as_ref().map(|p| read_heat(p).context("--heat")).transpose()?;
    if !args.domain.is_empty() {
        heat = heat.map(|h| h.only(&args.domain)).transpose()?;
    }
    if let Some(heat) = &heat {
        inputs.insert("heat".into(), heat.hash()?);
    }
    let profile = read_profile(args.profile.as_deref(), &mut inputs)?;
    inputs.extend(device_inputs(&specs));
    let set = drive_set(&specs, profile.as_ref(), &policy)?;
    let catalog = match (&args.store, &args.checkpoint) {
        (Some(store), _) => catalog(store)?,
        (None, Some(checkpoint)) => catalog_of_checkpoint(checkpoint)?,
        (None, None) => bail!("nothing to place: give --store or --checkpoint"),
    };
    let drives = plan_drives(&specs);
    let mut judged = args.judge.as_ref().map(|p| read_heat(p).context("--judge")).transpose()?;
    if args.checkpoint.is_some() {
        // Of a model that is still to come only the geometry can be compared.
        heat.iter_mut().chain(&mut judged).for_each(|h| h.model_id = None);
    }
    if let (Some(heat), Some(judged)) = (&heat, &judged) {
        check_apart(heat, judged)?;
    }
    let request =
        PlanRequest { catalog: &catalog, drives: &drives, policy: &policy, heat: heat.as_ref(), set: &set, inputs };
    let planned = planner::plan_with(request)?;
    let held_out = judged.as_ref().map(|h| planner::judge(&planned.plan, &policy, &set, h)).transpose()?;
    drop(working);
    write_atomic(&args.out, planned.plan.to_json()?.as_bytes())
        .with_context(|| format!("--out {}", args.out.display()))?;
    if specs.iter().any(|d| d.emulate.is_some() || !d.faults.is_empty()) {
        // A plan knows folders only: without this a run would quietly have drives as they are.
        let drives = args.drives.display();
        remark(&format!(
            "what {drives} says of emulation and faults is no part of a plan: runs want --drives {drives} too"
        ));
    }
    if args.json {
        print_json(&json(&args, &planned, held_out.as_ref(), &set)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    show(&args, &planned, held_out.as_ref(), &set, heat.as_ref())?;
    Ok(ExitCode::SUCCESS)
}

fn json(args: &Args, planned: &Planned, held_out: Option<&Cost>, set: &DriveSet) -> Result<serde_json::Value> {
    let plan = &planned.plan;
    let drives: Vec<_> = summary(plan)
        .iter()
        .zip(&set.drives)
        .map(|(r, d)| {
            serde_json::json!({"name": r.name, "experts": r.experts, "primaries": r.primaries, "bytes": r.bytes,
                "rate_bytes_per_s": set.known.then_some(d.rate_bytes_per_s), "capacity_bytes": d.capacity_bytes})
        })
        .collect();
    let slowest = planned.cost.iter().flat_map(|c| c.slowest(SLOWEST)).map(|l| {
        serde_json::json!({"layer": l.layer, "barrier_ns": l.barrier_ns, "bound_drives_ns": l.bound_drives_ns,
            "width": l.width})
    });
    Ok(serde_json::json!({
        "plan": args.out, "hash": plan.hash()?, "planner": plan.planner, "seed": plan.seed,
        "replicas": plan.replica_count(), "copies": copies(plan), "drives": drives, "rates_known": set.known,
        "predicted": plan.predicted, "gap": planned.cost.as_ref().map(|c| c.ratio() - 1.0),
        "slowest_layers": slowest.collect::<Vec<_>>(),
        "held_out": held_out.map(|c| serde_json::json!({"barrier_ns": c.barrier_ns(),
            "bound_drives_ns": c.bound_drives_ns(), "ratio": c.ratio()})),
    }))
}

fn show(args: &Args, planned: &Planned, held_out: Option<&Cost>, set: &DriveSet, heat: Option<&Heat>) -> Result<()> {
    let plan = &planned.plan;
    let mut table = Table::new([
        ("drive", Align::Left),
        ("experts", Align::Right),
        ("primary", Align::Right),
        ("bytes", Align::Right),
        ("reads it can serve", Align::Right),
    ]);
    for (index, r) in summary(plan).into_iter().enumerate() {
        let reads = heat.map_or("-".into(), |h| units::percent(reads_held(plan, h, DriveId(index as u8))));
        table.row([r.name, r.experts.to_string(), r.primaries.to_string(), units::bytes(r.bytes), reads]);
    }
    print(table.render(WIDTH).trim_end())?;
    let copies = copies(plan);
    let listed: Vec<String> =
        copies.iter().enumerate().filter(|(_, n)| **n > 0).map(|(i, n)| format!("{n} x {}", i + 1)).collect();
    print(&wrapped(&format!(
        "{}: {} experts of {}, {} replicas beyond the first copy; plan {}",
        plan.planner,
        copies.iter().sum::<usize>(),
        units::bytes(plan.expert_bytes),
        plan.replica_count(),
        &plan.hash()?[..12]
    )))?;
    print(&format!("experts by copies: {}", listed.join(", ")))?;
    if let (Some(p), Some(cost)) = (&plan.predicted, &planned.cost) {
        let time = |ns: u64| {
            if set.known {
                units::duration(ns)
            } else {
                format!("{:.3} (relative)", ns as f64 / p.bound_drives_ns.max(1) as f64)
            }
        };
        print(&format!(
            "\npredicted barrier {}, bound_layout {}, bound_drives {} ({:?} reads)",
            time(p.barrier_ns),
            time(p.bound_layout_ns),
            time(p.bound_drives_ns),
            p.reads
        ))?;
        print(&format!(
            "gap: {:.3} x bound_drives; no layout with these reads is below {:.3}",
            cost.ratio(),
            p.best_layout_ns as f64 / p.bound_drives_ns.max(1) as f64
        ))?;
        let slow: Vec<String> = cost
            .slowest(SLOWEST)
            .iter()
            .map(|l| format!("{} ({:.2} x)", l.layer, l.barrier_ns / l.bound_drives_ns.max(1.0)))
            .collect();
        print(&format!("slowest layers: {}", slow.join(", ")))?;
    }
    if let Some(cost) = held_out {
        print(&format!("held out: mean barrier {:.3} x bound_drives on {} layers", cost.ratio(), cost.layers.len()))?;
    }
    if !set.known {
        remark(
            "no rates are known, so all drives count as equally fast; measure them with `argodrive ceiling`, give --profile",
        );
    }
    if !planned.unknown.is_empty() {
        remark(&format!("the heat says nothing of {} layers; they count as evenly used", planned.unknown.len()));
    }
    match &args.checkpoint {
        None => print(&format!("next: argodrive stage {}", args.out.display())),
        Some(from) => {
            let (from, out) = (from.display(), args.out.display());
            print(&format!("next: argodrive import {from} --store <dir> --plan {out}"))
        }
    }
}

struct Row {
    name: String,
    experts: usize,
    primaries: usize,
    bytes: u64,
}

/// Bytes and experts by drive. A striped expert counts on every drive, its bytes once.
fn summary(plan: &Plan) -> Vec<Row> {
    let row = |(index, drive): (usize, &PlanDrive)| {
        let id = DriveId(index as u8);
        let experts = plan.on_drive(id).count();
        let primaries = plan.layers.values().flat_map(|l| &l.0).filter(|homes| homes.first() == Some(&id)).count();
        Row { name: drive.name.clone(), experts, primaries, bytes: plan.bytes_on(id) }
    };
    plan.drives.iter().enumerate().map(row).collect()
}

/// Experts with one copy, two copies, ...
fn copies(plan: &Plan) -> Vec<usize> {
    let mut counts = vec![0; plan.drives.len()];
    for homes in plan.layers.values().flat_map(|l| &l.0) {
        counts[plan.copies(homes) - 1] += 1;
    }
    counts
}

/// Share of recorded reads whose expert is on a drive.
fn reads_held(plan: &Plan, heat: &Heat, drive: DriveId) -> f64 {
    let (mut held, mut total) = (0.0, 0.0);
    for (layer, counts) in heat.domains.iter().flat_map(|d| &d.layers) {
        for (homes, &count) in plan.layers.get(layer).iter().flat_map(|l| &l.0).zip(&counts.counts) {
            total += count as f64;
            held += if homes.contains(&drive) { count as f64 } else { 0.0 };
        }
    }
    if total == 0.0 { 0.0 } else { held / total }
}
