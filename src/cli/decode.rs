//! `argodrive decode`: text to stdout, rates and drives to stderr, or everything as one JSON object.

use super::run_args::{ModelArgs, PromptSource, ReaderArgs, SamplerArgs, interrupt_flag, plan_and_mounts};
use super::{REJECTED, WIDTH, print_json, remark};
use crate::bench::run::{Experts, RunResult, RunSpec, run as run_once};
use crate::decode::generate::{Request, StopReason};
use crate::model::config::ModelConfig;
use crate::model::text_stream::TextStream;
use crate::open::Model;
use crate::reader::ReaderOptions;
use crate::report::table::{Align, Table};
use crate::report::units;
use anyhow::{Result, bail};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Generate text with experts streaming from the drives of a plan
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store
    #[arg(long)]
    store: PathBuf,
    /// The plan; without one the store itself is the one drive
    #[arg(long)]
    plan: Option<PathBuf>,
    /// Where the plan's drives are now, and which of them are emulated
    #[arg(long)]
    drives: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptSource,
    /// Recognise special tokens in the prompt, and show them in the text
    #[arg(long)]
    special: bool,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_new: usize,
    /// Hold every expert in memory instead of streaming
    #[arg(long, conflicts_with_all = ["plan", "drives", "trace"])]
    resident: bool,
    /// Write every read and barrier to this folder
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,
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

/// Reads and barriers that a run can cause at most, a quarter more for repeated reads.
pub(super) fn trace_room(
    options: &mut ReaderOptions,
    config: &ModelConfig,
    prompt: usize,
    max_new: usize,
    rows: usize,
) {
    let (layers, moe) = (config.moe_layers().count(), config.moe.as_ref());
    let (experts, top_k) = moe.map_or((0, 0), |m| (m.experts, m.top_k));
    let passes = prompt.div_ceil(rows.max(1));
    let prompt_reads = passes * layers * experts.min(rows.saturating_mul(top_k));
    let reads = prompt_reads + max_new * layers * top_k;
    options.trace_reads = reads + reads / 4 + 1024;
    options.trace_barriers = (passes + max_new) * layers + 64;
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let sampler = args.sampler.options()?;
    let model = Model::load(&args.store, args.model.isa())?;
    let prompt = model.tokenizer.encode(&args.prompt.text()?, args.special)?;
    if prompt.is_empty() {
        bail!("the prompt is empty; give at least one token of text");
    }
    let mut options = args.reader.options();
    if args.trace.is_some() {
        if !model.has_experts() {
            bail!("--trace: this model is dense, it reads no experts");
        }
        trace_room(&mut options, model.decoder.config(), prompt.len(), args.max_new, args.model.prefill_rows);
    }
    let streamed = if args.resident || !model.has_experts() {
        if args.plan.is_some() {
            bail!("--plan: this model is dense, it reads no experts");
        }
        None
    } else {
        Some(plan_and_mounts(&model, args.plan.as_ref(), args.drives.as_ref())?)
    };
    let experts = match &streamed {
        Some((plan, mounts)) => Experts::Drives { plan, mounts, options: &options },
        None => Experts::Resident,
    };
    let interrupted = interrupt_flag()?;
    let mut text = String::new();
    let mut stream = TextStream::new();
    let mut broken = None;
    let spec = RunSpec {
        arm: "decode",
        experts,
        request: Request {
            prompt: &prompt,
            max_new: args.max_new,
            stop: &model.stop_ids,
            piece_rows: args.model.prefill_rows,
        },
        sampler,
        max_context: args.model.max_context,
        trace: args.trace.as_deref(),
    };
    let mut show = |piece: &str| {
        text.push_str(piece);
        if args.json || piece.is_empty() {
            return ControlFlow::Continue(());
        }
        let mut out = std::io::stdout().lock();
        match out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                broken = Some(e);
                ControlFlow::Break(())
            }
        }
    };
    let result = run_once(&model, &spec, &mut |token| {
        let bytes = if args.special {
            model.tokenizer.decode_bytes(&[token])
        } else {
            model.tokenizer.decode_visible_bytes(&[token])
        };
        let flow = show(&stream.push(&bytes));
        if interrupted.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { flow }
    })?;
    let _ = show(&stream.finish());
    if let Some(e) = broken {
        return Err(e.into());
    }
    if args.json {
        print_json(&json(&result, &prompt, &text))?;
    } else {
        let _ = writeln!(std::io::stdout());
        report(&result);
    }
    for reason in &result.record.rejected {
        remark(&format!("rejected: {reason}"));
    }
    Ok(if result.record.rejected.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REJECTED) })
}

fn json(result: &RunResult, prompt: &[u32], text: &str) -> serde_json::Value {
    let record = &result.record;
    let drives: Vec<_> = record
        .drives
        .iter()
        .map(|d| {
            serde_json::json!({"name": d.name, "reads": d.reads, "bytes": d.payload_bytes, "read_bytes": d.read_bytes,
                "landed_last": d.landed_last, "replica_reads": d.replica_reads, "clat_p50_ns": d.clat_p50_ns,
                "clat_p99_ns": d.clat_p99_ns, "emulated": d.emulated})
        })
        .collect();
    serde_json::json!({
        "text": text, "token_ids": result.generation.token_ids, "prompt_token_ids": prompt,
        "stopped": result.generation.stopped, "rates": record.rates, "io_wait_share": record.io_wait_share,
        "barrier_mean_ns": record.barrier_mean_ns, "plan_hash": record.plan_hash, "emulated": record.emulated,
        "drives": drives, "rejected": record.rejected,
    })
}

/// Rates and drives for people, on stderr so that stdout holds the text alone.
fn report(result: &RunResult) {
    let (record, generation) = (&result.record, &result.generation);
    let rates = &record.rates;
    let mut out = std::io::stderr().lock();
    let ended = match generation.stopped {
        StopReason::StopToken => "stop token",
        StopReason::MaxNew => "--max-new",
        StopReason::Interrupted => "interrupted",
    };
    let _ = writeln!(
        out,
        "\n{} tokens ({ended}) after {} of prompt; first token {}\ndecode {} tok/s   prefill {} tok/s   inclusive {} tok/s",
        record.generated_tokens,
        record.prompt_tokens,
        units::duration(generation.first_token_ns),
        units::tokens_per_s(rates.decode_tok_s),
        units::tokens_per_s(rates.prefill_tok_s),
        units::tokens_per_s(rates.inclusive_tok_s),
    );
    if record.drives.is_empty() {
        let _ = writeln!(out, "experts in memory: no drive was read");
        return;
    }
    let _ = writeln!(
        out,
        "decode waited for experts {} of the time; mean barrier {}{}",
        units::percent(record.io_wait_share),
        units::duration(record.barrier_mean_ns),
        if record.emulated { " (emulated drives)" } else { "" }
    );
    let mut table = Table::new([
        ("drive", Align::Left),
        ("reads", Align::Right),
        ("bytes", Align::Right),
        ("replica", Align::Right),
        ("landed last", Align::Right),
        ("clat p50", Align::Right),
        ("p99", Align::Right),
    ]);
    for d in &record.drives {
        let name = if d.emulated { format!("{} (emulated)", d.name) } else { d.name.clone() };
        table.row([
            name,
            d.reads.to_string(),
            units::bytes(d.payload_bytes),
            d.replica_reads.to_string(),
            d.landed_last.to_string(),
            units::duration(d.clat_p50_ns),
            units::duration(d.clat_p99_ns),
        ]);
    }
    let _ = write!(out, "{}", table.render(WIDTH));
}
