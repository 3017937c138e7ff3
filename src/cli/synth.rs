//! `argodrive synth`: a random checkpoint in the released layout.

use super::heat::{read_heat, read_text};
use super::verdict::wrapped;
use super::{ByteBar, Steps, WIDTH, print, status};
use crate::bench::synth_check::{LayerCheck, RoutingCheck, check, routing_of};
use crate::layout::heat::{DEFAULT_DOMAIN, Heat, Part};
use crate::layout::routes::{RouteOptions, import};
use crate::report::table::{Align, Table};
use crate::report::units::bytes;
use crate::store::synth::{Shards, SynthOptions, synth_routed};
use crate::store::synth_routing::Routing;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `synth`. A flag that is given wins over the preset.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// New or empty folder that becomes a checkpoint in the released layout
    #[arg(long, value_name = "DIR")]
    pub as_checkpoint: PathBuf,
    /// Where the sizes that are not given come from
    #[arg(long, value_enum, default_value_t = Preset::Small)]
    pub preset: Preset,
    /// Decoder layers, the first one dense
    #[arg(long)]
    pub layers: Option<u64>,
    /// Width of the residual stream
    #[arg(long)]
    pub hidden: Option<u64>,
    /// Attention heads
    #[arg(long)]
    pub heads: Option<u64>,
    /// Width of a head
    #[arg(long)]
    pub head_dim: Option<u64>,
    /// Routed experts per layer
    #[arg(long)]
    pub experts: Option<u64>,
    /// Experts per token
    #[arg(long)]
    pub top_k: Option<u64>,
    /// Shared experts
    #[arg(long)]
    pub shared: Option<u64>,
    /// Width in which routed experts live, a multiple of 32
    #[arg(long)]
    pub latent: Option<u64>,
    /// Inner width of an expert, a multiple of 32
    #[arg(long)]
    pub width: Option<u64>,
    /// Vocabulary, its 256 special tokens included
    #[arg(long)]
    pub vocab: Option<u64>,
    /// Number of safetensors files, or per-layer
    #[arg(long, value_parser = parse_shards)]
    pub shards: Option<Shards>,
    /// Seed of every value
    #[arg(long)]
    pub seed: Option<u64>,
    /// Make routers whose choices fall with the rank as 1 / rank^S
    #[arg(long, value_name = "S", value_parser = parse_skew, conflicts_with_all = ["heat", "routes"])]
    pub skew: Option<f64>,
    /// Make routers that choose as often, and as much together, as this heat says (`argodrive heat`)
    #[arg(long, value_name = "FILE", conflicts_with = "routes")]
    pub heat: Option<PathBuf>,
    /// The same from a route file, in any format that `argodrive heat` reads
    #[arg(long, value_name = "FILE")]
    pub routes: Option<PathBuf>,
    /// Decode this many random tokens afterwards, every expert in memory, and print asked against seen
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub check: Option<u32>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Sizes to begin with.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Preset {
    /// A few megabytes
    Small,
    /// About 4 GiB of experts as large as K3's, everything else small
    K3Experts,
    /// 2.8 GB of experts, of which a token asks for 50 MB: K3's shape in small
    K3Shaped,
}

/// Writes the checkpoint and prints what it is.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut options = match args.preset {
        Preset::Small => SynthOptions::small(),
        Preset::K3Experts => SynthOptions::k3_experts(),
        Preset::K3Shaped => SynthOptions::k3_shaped(),
    };
    let given = [
        (&mut options.layers, args.layers),
        (&mut options.hidden, args.hidden),
        (&mut options.heads, args.heads),
        (&mut options.head_dim, args.head_dim),
        (&mut options.experts, args.experts),
        (&mut options.top_k, args.top_k),
        (&mut options.shared, args.shared),
        (&mut options.latent, args.latent),
        (&mut options.width, args.width),
        (&mut options.vocab, args.vocab),
        (&mut options.seed, args.seed),
    ];
    for (option, value) in given {
        *option = value.unwrap_or(*option);
    }
    options.shards = args.shards.unwrap_or(options.shards);
    let routing = routing(&args, &options)?;
    if args.check.is_some() && routing.is_none() {
        bail!("--check compares with what was asked for; give --skew, --heat or --routes");
    }
    let bar = ByteBar::new("synth");
    let report = synth_routed(&args.as_checkpoint, &options, routing.as_ref(), &mut |at| bar.show(at));
    bar.finish();
    let report = report?;
    let checked = match (args.check, &routing) {
        (Some(tokens), Some(asked)) => {
            let mut steps = Steps::default();
            let mut show = |done: usize| steps.show(done, tokens as usize, "decoding random tokens");
            let checked = check(&args.as_checkpoint, asked, tokens as usize, &mut show);
            status("");
            Some(checked.context("--check")?)
        }
        _ => None,
    };
    if args.json {
        let object = serde_json::json!({
            "checkpoint": args.as_checkpoint, "seed": options.seed, "shards": report.shards, "tensors": report.tensors,
            "tensor_bytes": report.tensor_bytes, "experts": report.experts, "expert_bytes": report.expert_bytes,
            "check": checked,
        });
        print(&object.to_string())?;
    } else {
        print(&wrapped(&format!(
            "{}: {} in {} tensors and {} files; {} experts of {}; random weights, seed {}",
            args.as_checkpoint.display(),
            bytes(report.tensor_bytes),
            report.tensors,
            report.shards,
            report.experts,
            bytes(report.expert_bytes),
            options.seed
        )))?;
        if let Some(checked) = &checked {
            show(checked)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What the routers are asked to do.
fn routing(args: &Args, options: &SynthOptions) -> Result<Option<Routing>> {
    let config = options.config()?;
    let seed = options.seed;
    let of = |heat: &Heat| routing_of(heat, &config).map_err(anyhow::Error::msg);
    Ok(match (args.skew, &args.heat, &args.routes) {
        (Some(skew), ..) => Some(Routing::zipf(&config, skew, seed)),
        (None, Some(path), _) => Some(of(&read_heat(path).context("--heat")?).context("--heat")?),
        (None, None, Some(path)) => {
            let moe = config.moe.as_ref();
            let known = RouteOptions {
                format: None,
                experts: moe.map(|m| m.experts as u32),
                top_k: moe.map(|m| m.top_k as u32),
                layer_base: 0,
                part: Part::Whole,
                rejected: false,
                label: DEFAULT_DOMAIN.into(),
                model_id: None,
            };
            let text = read_text(path).context("--routes")?;
            let name = path.display().to_string();
            let heat = import(&text, &name, &known).with_context(|| format!("--routes {name}"))?;
            Some(of(&heat).with_context(|| format!("--routes {name}"))?)
        }
        (None, None, None) => None,
    })
}

/// Asked and seen, layer by layer.
fn show(checked: &RoutingCheck) -> Result<()> {
    let mut table = Table::new(["layer", "apart", "by chance", "ranks", "together"].map(|t| (t, Align::Right)));
    let together = |t: Option<f64>| t.map_or("-".into(), |t| format!("{t:.3}"));
    for l in &checked.layers {
        let (apart, chance) = (format!("{:.4}", l.total_variation), format!("{:.4}", l.by_chance));
        table.row([l.layer.to_string(), apart, chance, format!("{:.3}", l.rank_correlation), together(l.together)]);
    }
    let mean = |of: &dyn Fn(&LayerCheck) -> f64| checked.mean(of);
    table.row([
        "mean".into(),
        format!("{:.4}", mean(&|l| l.total_variation)),
        format!("{:.4}", mean(&|l| l.by_chance)),
        format!("{:.3}", mean(&|l| l.rank_correlation)),
        together(checked.together()),
    ]);
    print(table.render(WIDTH).trim_end())?;
    print(&format!(
        "{} random tokens decoded; apart: total variation between shares asked and seen\n(by chance: what exact chances \
         would give); ranks, together: correlations of\nranks, and of pairs beyond chance. Routes follow from each token \
         alone: a text\nwhose tokens are not random has another heat",
        checked.tokens
    ))
}

fn parse_skew(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|s| (0.0..=8.0).contains(s));
    value.ok_or_else(|| format!("`{text}` is no exponent from 0 (even) to 8"))
}

fn parse_shards(text: &str) -> Result<Shards, String> {
    if text == "per-layer" {
        return Ok(Shards::PerLayer);
    }
    text.parse().map(Shards::Count).map_err(|_| "must be a number or per-layer".to_string())
}
