//! Arguments that several commands share: where experts come from, how tokens are chosen, what the prompt is.

use crate::decode::KernelIsa;
use crate::decode::generate::DEFAULT_PIECE_ROWS;
use crate::decode::sampler::SamplerOptions;
use crate::drive::spec::{self, DriveSpec};
use crate::drive::units::parse_bytes;
use crate::layout::plan::Plan;
use crate::open::Model;
use crate::reader::{DispatchPolicy, ReaderOptions, mounts_of};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// How experts are read.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Reading")]
pub struct ReaderArgs {
    /// Reads at once on each drive
    #[arg(long, value_name = "N", default_value_t = ReaderOptions::default().queue_depth)]
    queue_depth: u32,
    /// Memory for experts in flight, e.g. 256MiB; a wider barrier comes in waves
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_bytes)]
    buffer_bytes: u64,
    /// Which copy of an expert is read
    #[arg(long, value_enum, default_value_t = Dispatch::LeastInflight)]
    dispatch: Dispatch,
    /// Read through the page cache instead of past it
    #[arg(long)]
    buffered: bool,
    /// Where direct reads are impossible, read through the page cache instead of refusing
    #[arg(long)]
    allow_fallback: bool,
    /// Check each expert's digest as it arrives
    #[arg(long)]
    verify_reads: bool,
    /// Give up outstanding reads when nothing arrived for so long, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = ReaderOptions::default().read_timeout_ms)]
    read_timeout: u64,
}

/// Dispatch policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Dispatch {
    /// The primary copy
    FirstHit,
    /// The copies in turn
    RoundRobin,
    /// The drive with the fewest bytes in flight
    LeastInflight,
}

impl ReaderArgs {
    /// The reader's options.
    pub fn options(&self) -> ReaderOptions {
        ReaderOptions {
            queue_depth: self.queue_depth,
            buffer_bytes: self.buffer_bytes,
            dispatch: match self.dispatch {
                Dispatch::FirstHit => DispatchPolicy::FirstHit,
                Dispatch::RoundRobin => DispatchPolicy::RoundRobin,
                Dispatch::LeastInflight => DispatchPolicy::LeastInflight,
            },
            direct: !self.buffered,
            allow_buffered: self.allow_fallback,
            verify_digests: self.verify_reads,
            read_timeout_ms: self.read_timeout,
            ..ReaderOptions::default()
        }
    }
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplerArgs {
    /// 0 takes the most likely token; higher is more varied
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Keep the fewest most likely tokens that reach this probability together
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Keep this many most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: u32,
    /// Seed of the random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl SamplerArgs {
    /// The sampler's options; a flag that could do nothing is refused.
    pub fn options(&self) -> Result<SamplerOptions> {
        let plain =
            SamplerOptions { temperature: self.temperature, top_p: self.top_p, top_k: self.top_k, seed: self.seed };
        if self.temperature == 0.0 && (self.top_p != 1.0 || self.top_k != 0 || self.seed != 0) {
            bail!(
                "--top-p, --top-k and --seed do nothing at --temperature 0 (the most likely token); give a temperature above 0"
            );
        }
        plain.validate()?;
        Ok(plain)
    }
}

/// What is fed.
#[derive(Clone, Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct PromptSource {
    /// The prompt
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file with the prompt (UTF-8)
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
}

impl PromptSource {
    /// The prompt's text.
    pub fn text(&self) -> Result<String> {
        match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(path)) => {
                let bytes = std::fs::read(path).with_context(|| format!("--prompt-file {}", path.display()))?;
                String::from_utf8(bytes).map_err(|e| {
                    anyhow::anyhow!(
                        "--prompt-file {}: not UTF-8 (byte {})",
                        path.display(),
                        e.utf8_error().valid_up_to()
                    )
                })
            }
            (None, None) => bail!("give --prompt or --prompt-file"),
        }
    }
}

/// How the model is run.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Compute kernels, if not the best that the CPU has
    #[arg(long, value_enum)]
    kernels: Option<KernelIsaArg>,
    /// Prompt rows fed in one pass; bounds memory
    #[arg(long, value_name = "ROWS", default_value_t = DEFAULT_PIECE_ROWS)]
    pub prefill_rows: usize,
    /// Most tokens of text, prompt included; 0 is what the model was made for
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub max_context: usize,
}

/// Kernel sets by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KernelIsaArg {
    /// Plain Rust: the reference
    Scalar,
    /// AVX2 and FMA
    Avx2,
}

impl ModelArgs {
    /// The kernels asked for.
    pub fn isa(&self) -> Option<KernelIsa> {
        self.kernels.map(|k| match k {
            KernelIsaArg::Scalar => KernelIsa::Scalar,
            KernelIsaArg::Avx2 => KernelIsa::Avx2,
        })
    }
}

/// Plan and mounts of a run: those of the files, or the store as its one drive.
pub fn plan_and_mounts(
    model: &Model,
    plan: Option<&PathBuf>,
    drives: Option<&PathBuf>,
) -> Result<(Plan, Vec<DriveSpec>)> {
    match plan {
        Some(path) => {
            let plan = super::plan::read_plan(path)?;
            let specs = drives.map(|p| spec::load(p)).transpose()?;
            let mounts = mounts_of(&plan, specs.as_deref())?;
            warn_shared(&mounts)?;
            Ok((plan, mounts))
        }
        None if drives.is_some() => bail!("--drives goes with --plan; make one with `argodrive plan`"),
        None => Ok(model.store_plan()?),
    }
}

/// Two folders on one device are one drive: says so, for a measurement of them would mislead.
pub fn warn_shared(mounts: &[DriveSpec]) -> Result<()> {
    for (a, b) in spec::shared_devices(mounts)? {
        super::remark(&format!(
            "drives `{}` and `{}` are folders on one device: they are one drive, and its speed counts once",
            mounts[a].name, mounts[b].name
        ));
    }
    Ok(())
}

/// The first Ctrl-C asks the current work to end in order, the second ends the process.
pub fn interrupt_flag() -> Result<&'static AtomicBool> {
    static ASKED: AtomicBool = AtomicBool::new(false);
    ctrlc::set_handler(|| {
        if ASKED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(&ASKED)
}
