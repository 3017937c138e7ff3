//! `argodrive plan`: which expert may be read from which drive.

use super::run_args::device_inputs;
use super::{WIDTH, print, print_json};
use crate::drive::spec;
use crate::ids::DriveId;
use crate::layout::plan::{Plan, PlanDrive};
use crate::layout::planner::{self, Catalog};
use crate::layout::policy::Policy;
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::store::manifest::StoreManifest;
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Plan which expert lies on which drive
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store whose experts are placed
    #[arg(long, value_name = "DIR")]
    store: PathBuf,
    /// The drives, as `[[drive]]` tables
    #[arg(long, value_name = "FILE")]
    drives: PathBuf,
    /// The layout policy, e.g. layouts/full-mirror.toml
    #[arg(long, value_name = "FILE")]
    policy: PathBuf,
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

/// Drives as a plan holds them, with absolute paths: a plan is used from other folders too.
pub(super) fn plan_drives(specs: &[spec::DriveSpec]) -> Vec<PlanDrive> {
    let absolute =
        |path: &PathBuf| path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.clone());
    specs.iter().map(|s| PlanDrive { name: s.name.clone(), path: absolute(&s.path) }).collect()
}

/// Reads a policy file; its hash goes into the plan.
pub(super) fn read_policy(path: &Path) -> Result<(Policy, BTreeMap<String, String>)> {
    let text = std::fs::read_to_string(path).with_context(|| format!("--policy {}", path.display()))?;
    let policy = Policy::parse(&text).with_context(|| format!("--policy {}", path.display()))?;
    let hash = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()));
    Ok((policy, BTreeMap::from([("policy".to_string(), hash)])))
}

/// Reads and checks a plan file.
pub(super) fn read_plan(path: &Path) -> Result<Plan> {
    let text = std::fs::read_to_string(path).with_context(|| format!("plan {}", path.display()))?;
    Plan::parse(&text).with_context(|| format!("plan {}", path.display()))
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let specs = spec::load(&args.drives)?;
    let (policy, mut inputs) = read_policy(&args.policy)?;
    inputs.extend(device_inputs(&specs));
    let plan = planner::plan(&catalog(&args.store)?, &plan_drives(&specs), &policy, 0, inputs)?;
    write_atomic(&args.out, plan.to_json()?.as_bytes()).with_context(|| format!("--out {}", args.out.display()))?;
    let rows = summary(&plan);
    if args.json {
        let drives: Vec<_> = rows
            .iter()
            .map(|r| serde_json::json!({"name": r.name, "experts": r.experts, "primaries": r.primaries, "bytes": r.bytes}))
            .collect();
        print_json(&serde_json::json!({
            "plan": args.out, "hash": plan.hash()?, "planner": plan.planner, "replicas": plan.replica_count(), "drives": drives,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new([
        ("drive", Align::Left),
        ("experts", Align::Right),
        ("primary", Align::Right),
        ("bytes", Align::Right),
    ]);
    for r in rows {
        table.row([r.name, r.experts.to_string(), r.primaries.to_string(), units::bytes(r.bytes)]);
    }
    print(table.render(WIDTH).trim_end())?;
    print(&format!(
        "{}: {} experts of {} each, {} replicas beyond the first copy; plan {}",
        plan.planner,
        plan.layers.values().map(|l| l.0.len()).sum::<usize>(),
        units::bytes(plan.expert_bytes),
        plan.replica_count(),
        &plan.hash()?[..12]
    ))?;
    print(&format!("next: argodrive stage {}", args.out.display()))?;
    Ok(ExitCode::SUCCESS)
}

struct Row {
    name: String,
    experts: usize,
    primaries: usize,
    bytes: u64,
}

fn summary(plan: &Plan) -> Vec<Row> {
    let row = |(index, drive): (usize, &PlanDrive)| {
        let id = DriveId(index as u8);
        let experts = plan.on_drive(id).count();
        let primaries = plan.layers.values().flat_map(|l| &l.0).filter(|homes| homes.first() == Some(&id)).count();
        Row { name: drive.name.clone(), experts, primaries, bytes: experts as u64 * plan.expert_bytes }
    };
    plan.drives.iter().enumerate().map(row).collect()
}
