//! `argodrive import`: a checkpoint becomes a store.

use super::verdict::wrapped;
use super::{ByteBar, Steps, plan as plan_command, print, print_json, remark, stage, status};
use crate::bench::trunk_error;
use crate::drive::spec::DriveSpec;
use crate::layout::plan::Plan;
use crate::model::arriving::Awaited;
use crate::report::units::bytes;
use crate::stage::placed::{Event, Follow, PlacedOptions, import_placed};
use crate::store::import::{ImportOptions, import};
use crate::store::manifest::StoreManifest;
use crate::store::trunk_format::TrunkFormat;
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Arguments of `import`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json and the safetensors files
    pub checkpoint: PathBuf,
    /// Folder of the store; a new one, or one whose import was interrupted
    #[arg(long, value_name = "DIR")]
    pub store: PathBuf,
    /// Format that the trunk is kept in: bf16, the checkpoint's own bytes, or int8, large matrices as rows of signed bytes with one
    /// scale each (half the memory, not weight-exact; what it does to the logits is measured)
    #[arg(long, value_name = "FORMAT", default_value_t = TrunkFormat::Bf16)]
    pub trunk: TrunkFormat,
    /// Most bytes written between two entries of the journal, i.e. lost by a kill (K, M, G and Ki, Mi, Gi are understood)
    #[arg(long, value_name = "SIZE", default_value = "64Mi", value_parser = parse_size)]
    pub batch: u64,
    /// Put experts straight onto the drives of this plan (`argodrive plan --checkpoint`); the plan is bound to the model at the end
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Where the plan's drives are now, if not where it says
    #[arg(long, value_name = "FILE", requires = "plan")]
    pub drives: Option<PathBuf>,
    /// Wait for shards that are still being downloaded
    #[arg(long, requires = "plan")]
    pub follow: bool,
    /// Longest wait in which nothing arrives
    #[arg(long, value_name = "TIME", requires = "follow", default_value = "1h", value_parser = humantime::parse_duration)]
    pub follow_timeout: Duration,
    /// Delete each shard, vision tensors in it included, when all that was taken from it is on the drives and read back
    #[arg(long, requires = "plan")]
    pub drop_shards: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Pause between two looks for arriving shards.
const POLL: Duration = Duration::from_secs(1);
/// Pause between two remarks about what is waited for.
const REMARK_PAUSE: Duration = Duration::from_secs(30);

/// Runs the import and prints what was done.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(plan) = &args.plan {
        return run_placed(&args, plan);
    }
    let bar = ByteBar::new("import");
    let options = ImportOptions { batch_bytes: args.batch, trunk: args.trunk };
    let report = import(&args.checkpoint, &args.store, &options, &mut |at| bar.show(at));
    bar.finish();
    let mut report = report?;
    measure_trunk(&args.checkpoint, &args.store, &mut report.manifest, None)?;
    let m = &report.manifest;
    let experts = m.moe_layers.len() as u64 * u64::from(m.experts);
    if args.json {
        let object = serde_json::json!({
            "store": args.store, "model_id": m.model_id, "name": m.name, "was_complete": report.was_complete,
            "moe_layers": m.moe_layers.len(), "experts": experts, "expert_bytes": m.expert_bytes,
            "experts_written": report.experts_written, "experts_reused": report.experts_reused,
            "trunk_tensors": m.trunk.len(), "trunk_written": report.trunk_written, "trunk_reused": report.trunk_reused,
            "bytes_written": report.bytes_written, "vision_skipped": report.vision_skipped,
            "side_files": report.side_files, "trunk_format": m.trunk_format, "trunk_label": m.trunk_format.label(),
            "trunk_error": m.trunk_error,
        });
        print(&object.to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    if report.was_complete {
        print(&format!("{}: already complete and equal to this checkpoint; nothing written", args.store.display()))?;
    } else {
        let reused = report.experts_reused + report.trunk_reused;
        let rest = if reused > 0 { format!(", {reused} parts were there already") } else { String::new() };
        print(&format!("{}: {} written{rest}", args.store.display(), bytes(report.bytes_written)))?;
        if !report.side_files.iter().any(|f| f == "tokenizer.json" || f == "tiktoken.model") {
            remark(
                "the checkpoint has neither tokenizer.json nor tiktoken.model; text cannot be encoded for this store",
            );
        }
    }
    let vision = match report.vision_skipped {
        0 => String::new(),
        n => format!(", {n} vision tensors left out"),
    };
    print(&wrapped(&format!(
        "model {} ({}): {} trunk tensors, {experts} experts of {}{vision}",
        m.model_id,
        m.name,
        m.trunk.len(),
        bytes(m.expert_bytes)
    )))?;
    trunk_lines(m).iter().try_for_each(|line| print(line))?;
    Ok(ExitCode::SUCCESS)
}

/// What must be said of a store whose trunk is not the checkpoint's own; nothing of others.
pub(super) fn trunk_lines(manifest: &StoreManifest) -> Vec<String> {
    let Some(label) = manifest.trunk_format.label() else { return Vec::new() };
    let error = match &manifest.trunk_error {
        Some(error) => wrapped(&format!("{label}: against the checkpoint's own trunk {error}")),
        None => format!("{label}: what it does to the logits was not measured"),
    };
    vec![error]
}

/// Measures what a trunk that is not exact does to the logits, unless that is known, and keeps the figures in the store.
pub(super) fn measure_trunk(
    checkpoint: &Path,
    store: &Path,
    manifest: &mut StoreManifest,
    streamed: Option<(&Plan, &[DriveSpec])>,
) -> anyhow::Result<()> {
    if manifest.trunk_format.is_exact() || manifest.trunk_error.is_some() {
        return Ok(());
    }
    status("decoding a few tokens with both trunks, to see what int8 does to logits");
    let mut steps = Steps::default();
    let mut show = |done, all| steps.show(done, all, &format!("what int8 does to logits: layer {done} of {all}"));
    let measured = trunk_error::measure(checkpoint, store, streamed, &mut show);
    status("");
    manifest.trunk_error = Some(measured.context(
        "the store is complete, but what its int8 trunk does to the logits could not be measured; run the same command again",
    )?);
    Ok(manifest.save(store)?)
}

/// Says what is waited for when that changes, and now and then.
#[derive(Default)]
struct Waiting {
    said: Option<(Instant, Vec<String>)>,
}

impl Waiting {
    fn say(&mut self, awaited: &[Awaited]) {
        let names: Vec<String> = awaited.iter().map(|a| a.name.clone()).collect();
        let new = self.said.as_ref().is_none_or(|(at, said)| *said != names || at.elapsed() >= REMARK_PAUSE);
        if !new {
            return;
        }
        let first = awaited.first().map_or(String::new(), |a| match (a.seen_bytes, a.expected_bytes) {
            (None, _) => format!("{}, not there yet", a.name),
            (Some(seen), None) => format!("{}, {} so far", a.name, bytes(seen)),
            (Some(seen), Some(all)) => format!("{}, {} of {}", a.name, bytes(seen), bytes(all)),
        });
        let more = if names.len() > 1 { format!(", and {} more", names.len() - 1) } else { String::new() };
        remark(&format!("waiting for {first}{more}"));
        self.said = Some((Instant::now(), names));
    }
}

/// An import onto the drives of a plan.
fn run_placed(args: &Args, plan_file: &Path) -> anyhow::Result<ExitCode> {
    let plan = plan_command::read_plan(plan_file)?;
    let mounts = stage::mounts(&plan, args.drives.as_deref())?;
    let options = PlacedOptions {
        batch_bytes: args.batch,
        follow: args.follow.then_some(Follow { poll: POLL, timeout: args.follow_timeout }),
        drop_shards: args.drop_shards,
        trunk: args.trunk,
    };
    if args.drop_shards && !args.trunk.is_exact() {
        bail!(
            "--trunk {} compares its logits with those of the checkpoint's own trunk, which --drop-shards deletes; leave one of \
             them out",
            args.trunk
        );
    }
    let bar = ByteBar::new("import");
    let mut waiting = Waiting::default();
    let report =
        import_placed(&args.checkpoint, &args.store, plan_file, &plan, &mounts, &options, &mut |event| match event {
            Event::Progress(at) => bar.show(at),
            Event::Waiting(awaited) => waiting.say(awaited),
            Event::Dropped(name) => remark(&format!("{name}: safe on the drives and read back; deleted")),
        });
    bar.finish();
    let mut report = report?;
    let specs: Vec<DriveSpec> = report
        .plan
        .drives
        .iter()
        .zip(&mounts)
        .map(|(d, path)| DriveSpec { name: d.name.clone(), path: path.clone(), emulate: None, faults: Vec::new() })
        .collect();
    measure_trunk(&args.checkpoint, &args.store, &mut report.manifest, Some((&report.plan, &specs)))?;
    let m = &report.manifest;
    if args.json {
        return print_json(&serde_json::json!({
            "store": args.store, "model_id": m.model_id, "name": m.name, "was_complete": report.was_complete,
            "plan": plan_file, "plan_hash": report.plan.hash()?, "moe_layers": m.moe_layers.len(),
            "experts": m.moe_layers.len() as u64 * u64::from(m.experts), "expert_bytes": m.expert_bytes,
            "experts_written": report.experts_written, "experts_reused": report.experts_reused,
            "bytes_written": report.bytes_written, "dropped": report.dropped, "trunk_tensors": m.trunk.len(),
            "side_files": report.side_files, "trunk_format": m.trunk_format, "trunk_label": m.trunk_format.label(),
            "trunk_error": m.trunk_error,
        }))
        .map(|()| ExitCode::SUCCESS);
    }
    if report.was_complete {
        print(&format!("{}: already complete, and of this plan; nothing written", args.store.display()))?;
        trunk_lines(m).iter().try_for_each(|line| print(line))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!(
        "model {} ({}): {} trunk tensors in {}, {} experts of {} on {} drives, {} written",
        m.model_id,
        m.name,
        m.trunk.len(),
        args.store.display(),
        report.experts_written + report.experts_reused,
        bytes(m.expert_bytes),
        report.plan.drives.len(),
        bytes(report.bytes_written)
    ))?;
    trunk_lines(m).iter().try_for_each(|line| print(line))?;
    let (store, plan) = (args.store.display(), plan_file.display());
    print(&format!(
        "the plan is bound to the model now\nnext: argodrive decode --store {store} --plan {plan} --prompt ..."
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "K" | "KB" | "kB" => 1000,
        "M" | "MB" => 1_000_000,
        "G" | "GB" => 1_000_000_000,
        "Ki" | "KiB" => 1 << 10,
        "Mi" | "MiB" => 1 << 20,
        "Gi" | "GiB" => 1 << 30,
        unit => return Err(format!("`{unit}` is no unit; use K, M, G, Ki, Mi or Gi")),
    };
    let count: u64 = digits.parse().map_err(|_| format!("`{text}` is no size"))?;
    let bytes = count.checked_mul(factor).ok_or_else(|| format!("`{text}` is too large"))?;
    if bytes == 0 { Err("must be larger than zero".into()) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("64Mi"), Ok(64 << 20));
        assert_eq!(parse_size("5"), Ok(5));
        assert_eq!(parse_size("3MB"), Ok(3_000_000));
        for bad in ["", "x", "1X", "-1", "0", "99999999999999999999", "20000000000G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
