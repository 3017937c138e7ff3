//! `argodrive synth`: a random checkpoint in the released layout.

use super::{ByteBar, print};
use crate::report::units::bytes;
use crate::store::synth::{Shards, SynthOptions, synth};
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
}

/// Writes the checkpoint and prints what it is.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut options = match args.preset {
        Preset::Small => SynthOptions::small(),
        Preset::K3Experts => SynthOptions::k3_experts(),
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
    let bar = ByteBar::new("synth");
    let report = synth(&args.as_checkpoint, &options, &mut |at| bar.show(at));
    bar.finish();
    let report = report?;
    if args.json {
        let object = serde_json::json!({
            "checkpoint": args.as_checkpoint, "seed": options.seed, "shards": report.shards, "tensors": report.tensors,
            "tensor_bytes": report.tensor_bytes, "experts": report.experts, "expert_bytes": report.expert_bytes,
        });
        print(&object.to_string())?;
    } else {
        print(&format!(
            "{}: {} in {} tensors and {} files; {} experts of {}; random weights, seed {}",
            args.as_checkpoint.display(),
            bytes(report.tensor_bytes),
            report.tensors,
            report.shards,
            report.experts,
            bytes(report.expert_bytes),
            options.seed
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn parse_shards(text: &str) -> Result<Shards, String> {
    if text == "per-layer" {
        return Ok(Shards::PerLayer);
    }
    text.parse().map(Shards::Count).map_err(|_| "must be a number or per-layer".to_string())
}
