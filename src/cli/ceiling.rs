//! `argodrive ceiling`: what drives can deliver, alone and together, at once and for long; writes the profile.

use super::run_args::{Engine, interrupt_flag};
use super::{ByteBar, REJECTED, Steps, WIDTH, plan as plan_command, print, print_json, remark, status};
use crate::bench::ceiling::{Ceiling, CeilingSpec, Curves, Stage, measure};
use crate::bench::ceiling_files::Source;
use crate::bench::ceiling_links::{links, serials};
use crate::bench::record;
use crate::drive::facts::{Tables, one_device};
use crate::drive::profile::{DriveModel, Joint, Profile, Sustained};
use crate::drive::spec;
use crate::drive::units::{parse_bytes, parse_duration_ns, parse_rate};
use crate::io::EngineKind;
use crate::report::Figure;
use crate::report::sustain::{SustainFigure, SustainRow};
use crate::report::table::{Align, Table};
use crate::report::units;
use crate::store::import::Progress;
use crate::store::manifest::StoreManifest;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Blocks in a test file unless told otherwise.
const FILE_BLOCKS: u64 = 512;
/// Smallest and largest test file unless told otherwise.
const FILE_BYTES: (u64, u64) = (16 << 20, 4 << 30);

/// Measure what drives deliver, alone and together, and write the profile that plans and simulations use
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The drives, as `[[drive]]` tables
    #[arg(long, value_name = "FILE")]
    drives: PathBuf,
    /// Bytes of a read: the size of one expert
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_bytes)]
    bytes: u64,
    /// Reads in a barrier
    #[arg(long, value_name = "N", default_value_t = 8)]
    width: u32,
    /// Reads in flight, point by point; 1 must be among them
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4,8,16,32")]
    depths: Vec<u32>,
    /// Time for each point; slow drives take longer until enough reads have ended
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration_ns)]
    duration: u64,
    /// How reads are carried out [default: psync]
    #[arg(long, value_enum)]
    engine: Option<Engine>,
    /// Read through the page cache instead of past it; then nothing is proved cold
    #[arg(long)]
    buffered: bool,
    /// Bytes of the test file on each drive [default: 512 reads, 16MiB to 4GiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with_all = ["plan", "store"])]
    file_size: Option<u64>,
    /// Keep the test files, and use those that are there: settled files read as they will later
    #[arg(long, conflicts_with_all = ["plan", "store"])]
    keep: bool,
    /// Read what is staged of this plan instead of writing test files
    #[arg(long, value_name = "FILE", conflicts_with = "store")]
    plan: Option<PathBuf>,
    /// Read what is staged of this store's model instead of writing test files
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// At the end read from all drives for so long, and find out whether they throttle, e.g. 40m
    #[arg(long, value_name = "TIME", value_parser = parse_duration_ns)]
    sustain: Option<u64>,
    /// What all drives must deliver together (with --sustain: also behind the knee); exit code 1 below
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    target: Option<u64>,
    /// The profile [default: results/ceiling/<time>/profile.json]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let drives = spec::load(&args.drives)?;
    let facts = Tables::system().drives(&drives).with_context(|| args.drives.display().to_string())?;
    for one in one_device(&facts) {
        let names: Vec<&str> = one.drives.iter().map(|&i| drives[i].name.as_str()).collect();
        remark(&format!(
            "drives {} are folders on one device ({}): they are one drive, and its speed counts once",
            names.join(", "),
            one.device
        ));
    }
    let spec = CeilingSpec {
        drives: &drives,
        serials: facts.iter().map(serials).collect(),
        links: links(&facts, &drives),
        bytes: args.bytes,
        width: args.width,
        depths: args.depths.clone(),
        time: Duration::from_nanos(args.duration),
        engine: args.engine.map(EngineKind::from).unwrap_or_default(),
        direct: !args.buffered,
        source: source(&args)?,
        sustain: args.sustain.map(Duration::from_nanos),
    };
    let out = Out::new(args.out.as_deref())?;
    let interrupted = interrupt_flag()?;
    let bar = ByteBar::new("writing test files");
    let mut steps = Steps::default();
    let measured = measure(&spec, &|| interrupted.load(Ordering::SeqCst), &mut |stage| match stage {
        Stage::Writing(done_bytes, total_bytes) => bar.show(Progress { done_bytes, total_bytes }),
        Stage::Point(what, at, of) => {
            bar.finish();
            steps.show(at.saturating_sub(1), of, &format!("{at} of {of}: {what}"));
        }
        Stage::Sustaining(done, all) => {
            let time = |d: Duration| units::duration(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
            status(&format!("all drives together: {} of {}", time(done), time(all)));
        }
    });
    bar.finish();
    steps.finish();
    let measured = match measured {
        Ok(measured) => measured,
        Err(e) => {
            out.forget();
            return Err(e.into());
        }
    };
    let path = out.write(&measured)?;
    let figure = draw(&measured, &out)?;
    let reached = args.target.map(|t| reached(&measured, t as f64));
    if args.json {
        print_json(&as_json(&measured, &args, &path, figure.as_deref(), reached))?;
    } else {
        show(&measured, &args, &path, figure.as_deref(), reached)?;
    }
    let fine = measured.rejected.is_empty() && reached != Some(false);
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::from(REJECTED) })
}

fn source(args: &Args) -> Result<Source> {
    let packs = |model_id| Ok(Source::Packs { model_id });
    if let Some(path) = &args.plan {
        return packs(plan_command::read_plan(path)?.model_id);
    }
    if let Some(folder) = &args.store {
        return packs(StoreManifest::open(folder)?.model_id);
    }
    let least =
        args.bytes.saturating_mul(2 * u64::from(args.width.max(args.depths.iter().copied().max().unwrap_or(1))));
    let usual = args.bytes.saturating_mul(FILE_BLOCKS).clamp(FILE_BYTES.0, FILE_BYTES.1).max(least);
    let bytes = args.file_size.unwrap_or(usual);
    if bytes < least {
        bail!(
            "--file-size {bytes}: {least} bytes are needed, twice what is read at once; raise it, or lower --bytes, \
             --width or --depths"
        );
    }
    // whole pages, so that direct reads reach the end
    Ok(Source::Written { bytes: bytes.next_multiple_of(4096), keep: args.keep })
}

/// Where results go.
struct Out {
    profile: PathBuf,
    folder: Option<PathBuf>,
}

impl Out {
    /// A bad path fails before anything is measured.
    fn new(out: Option<&Path>) -> Result<Self> {
        let Some(path) = out else {
            let folder = record::new_folder(Path::new("results"), "ceiling")?;
            return Ok(Self { profile: folder.join("profile.json"), folder: Some(folder) });
        };
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if !parent.is_dir() || path.is_dir() {
            bail!("--out {}: it must be a file in a folder that is there", path.display());
        }
        try_folder(parent).with_context(|| format!("--out {}", path.display()))?;
        Ok(Self { profile: path.to_path_buf(), folder: None })
    }

    /// Nothing was measured: leaves no empty folder.
    fn forget(&self) {
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir(folder);
        }
    }

    fn sibling(&self, ending: &str) -> PathBuf {
        let stem = self.profile.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        self.profile.with_file_name(format!("{stem}{ending}"))
    }

    /// Writes the profile, or, under another name, the one that does not count.
    fn write(&self, measured: &Ceiling) -> Result<PathBuf> {
        if measured.rejected.is_empty() {
            measured.profile.save(&self.profile)?;
            return Ok(self.profile.clone());
        }
        let path = self.sibling(".rejected.json");
        record::write_json(&path, &measured.profile)?;
        Ok(path)
    }
}

/// Whether a file can be made in `folder`.
fn try_folder(folder: &Path) -> std::io::Result<()> {
    let path = folder.join(format!(".argodrive-{}.tmp", std::process::id()));
    std::fs::File::create(&path)?;
    std::fs::remove_file(&path)
}

fn reached(measured: &Ceiling, target: f64) -> bool {
    let plateau = measured.curves.as_ref().and_then(|c| c.together).map(|t| t.plateau_bytes_per_s);
    measured.profile.together.bytes_per_s >= target && plateau.is_none_or(|p| p >= target)
}

fn draw(measured: &Ceiling, out: &Out) -> Result<Option<PathBuf>> {
    let Some(curves) = &measured.curves else { return Ok(None) };
    let profile = &measured.profile;
    let row = |(model, bytes): (&DriveModel, &Vec<u64>)| SustainRow {
        name: model.name.clone(),
        window_bytes: bytes.clone(),
        burst_bytes_per_s: model.sustained.map_or(0.0, |s| s.burst_bytes_per_s),
        knee: model.sustained.and_then(|s| s.knee_s.map(|k| (k, s.plateau_bytes_per_s))),
    };
    let seconds = curves.window_s * curves.drives.first().map_or(0, Vec::len) as f64;
    let figure = SustainFigure {
        title: "Rate of each drive under lasting load".into(),
        subtitle: format!(
            "all drives at once for {}, reads of {}",
            units::duration((seconds * 1e9) as u64),
            units::bytes(profile.method.block_bytes)
        ),
        emulated: profile.emulated,
        window_s: curves.window_s,
        rows: profile.drives.iter().zip(&curves.drives).map(row).take(crate::report::sustain::MAX_ROWS).collect(),
        note: "A knee is where two levels explain the curve best and the second is lower by 8 % or more.".into(),
    };
    let [svg, _] = figure.write(&out.sibling("-sustain")).context("the figure of sustained rates")?;
    Ok(Some(svg))
}

fn as_json(
    measured: &Ceiling,
    args: &Args,
    path: &Path,
    figure: Option<&Path>,
    reached: Option<bool>,
) -> serde_json::Value {
    let curve = |c: &Curves| json!({"window_s": c.window_s, "drives": c.drives, "together": c.together});
    json!({
        "profile": measured.profile,
        "file": path,
        "figure": figure,
        "reads": measured.reads,
        "read_bytes": measured.read_bytes,
        "rejected": measured.rejected,
        "sustained": measured.curves.as_ref().map(curve),
        "target_bytes_per_s": args.target,
        "target_reached": reached,
    })
}

fn show(measured: &Ceiling, args: &Args, path: &Path, figure: Option<&Path>, reached: Option<bool>) -> Result<()> {
    let profile = &measured.profile;
    print(drive_table(profile).render(WIDTH).trim_end())?;
    print("")?;
    print(point_table(profile).render(WIDTH).trim_end())?;
    print("")?;
    print(joint_table(profile).render(WIDTH).trim_end())?;
    let label =
        if profile.emulated { "EMULATED drives: these are not speeds of this machine's hardware. " } else { "" };
    let m = &profile.method;
    print(&format!(
        "{label}Reads of {} by {}, {}; rates are measured at the same time, never added up.",
        units::bytes(m.block_bytes),
        m.engine,
        if m.direct { "past the page cache" } else { "through the page cache" },
    ))?;
    if m.virtualised == Some(true) {
        print("Virtual machine: cold means cold for this kernel; the host may have a cache.")?;
    }
    if measured.curves.is_some() {
        show_sustained(measured)?;
    }
    print("")?;
    let mut guards = Table::new([("guard", Align::Left), ("seen", Align::Left), ("verdict", Align::Left)]);
    for g in &profile.guards {
        let verdict = if g.verdict == "tripped" { "TRIPPED" } else { &g.verdict };
        guards.row([g.name.as_str(), &g.seen, verdict]);
    }
    print(guards.render(WIDTH).trim_end())?;
    for reason in &measured.rejected {
        print(&format!("REJECTED: {reason}"))?;
    }
    if let (Some(target), Some(reached)) = (args.target, reached) {
        let verdict = if reached { "reached" } else { "MISSED" };
        print(&format!("target  {} {verdict}", units::rate(target as f64)))?;
    }
    print(&format!("profile {}", path.display()))?;
    if let Some(figure) = figure {
        print(&format!("figure  {}", figure.display()))?;
    }
    Ok(())
}

fn drive_table(profile: &Profile) -> Table {
    let mut table = Table::new([
        ("drive", Align::Left),
        ("rate", Align::Right),
        ("alone", Align::Right),
        ("fixed", Align::Right),
        ("latency", Align::Right),
        ("depth", Align::Right),
        ("barrier", Align::Right),
    ]);
    for d in &profile.drives {
        table.row([
            if d.emulated { format!("{} (emulated)", d.name) } else { d.name.clone() },
            units::rate(d.rate_bytes_per_s),
            units::rate(d.solo_rate_bytes_per_s),
            units::duration(d.fixed_ns),
            units::duration(d.latency_ns),
            d.depth.to_string(),
            units::duration(d.barrier.p50_ns),
        ]);
    }
    table
}

fn point_table(profile: &Profile) -> Table {
    let mut table = Table::new([
        ("drive", Align::Left),
        ("read", Align::Right),
        ("depth", Align::Right),
        ("delivered", Align::Right),
        ("median", Align::Right),
        ("p99", Align::Right),
        ("reads", Align::Right),
    ]);
    for d in &profile.drives {
        for p in &d.points {
            table.row([
                d.name.clone(),
                units::bytes(p.bytes),
                p.depth.to_string(),
                units::rate(p.bytes_per_s),
                units::duration(p.p50_ns),
                units::duration(p.p99_ns),
                p.reads.to_string(),
            ]);
        }
    }
    table
}

fn joint_table(profile: &Profile) -> Table {
    let mut table = Table::new([
        ("together", Align::Left),
        ("drives", Align::Left),
        ("delivered", Align::Right),
        ("barrier", Align::Right),
        ("p99", Align::Right),
    ]);
    let row = |j: &Joint| {
        [
            j.name.clone(),
            j.members.join(", "),
            units::rate(j.bytes_per_s),
            units::duration(j.barrier.p50_ns),
            units::duration(j.barrier.p99_ns),
        ]
    };
    for joint in profile.groups.iter().chain([&profile.together]) {
        table.row(row(joint));
    }
    table
}

fn show_sustained(measured: &Ceiling) -> Result<()> {
    let together = measured.curves.as_ref().and_then(|c| c.together);
    let drives = measured.profile.drives.iter().map(|d| (d.name.as_str(), d.sustained));
    for (name, seen) in drives.chain([("all drives", together)]) {
        let Some(s) = seen else {
            print(&format!("sustained: {name}: nothing can be said"))?;
            continue;
        };
        print(&format!("sustained: {name}: {}", sustained_in_words(&s)))?;
    }
    Ok(())
}

fn sustained_in_words(s: &Sustained) -> String {
    let time = |seconds: f64| units::duration((seconds * 1e9) as u64);
    let Some(knee) = s.knee_s else {
        return format!("{}, no throttling in {}", units::rate(s.burst_bytes_per_s), time(s.seconds));
    };
    let fell = format!(
        "THROTTLES: {} until {}, then {}",
        units::rate(s.burst_bytes_per_s),
        time(knee),
        units::rate(s.plateau_bytes_per_s)
    );
    match s.duty {
        None => fell,
        Some(d) => format!(
            "{fell}; bursts of {} with {} of rest would avoid it ({} of the time, if rest restores what it sustains)",
            time(d.on_s),
            time(d.off_s),
            units::percent_short(d.share)
        ),
    }
}
