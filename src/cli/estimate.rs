//! `argodrive estimate`: memory, speed, prompts and copying of a model on drives, before a weight is fetched.

use super::heat::read_heat;
use super::plan::{read_policy, read_profile};
use super::verdict::wrapped;
use super::{Reading, WIDTH, print, print_json};
use crate::bench::estimate::{Estimate, Question, RateSource, estimate};
use crate::bench::estimate_bytes::MemoryAsked;
use crate::bench::model_options::ModelOptions;
use crate::decode::generate::DEFAULT_PIECE_ROWS;
use crate::decode::kernels::pool::MAX_THREADS;
use crate::drive::spec;
use crate::drive::units::{parse_bytes, parse_rate};
use crate::files::{self, Kind};
use crate::model::checkpoint::{CONFIG_FILE, parse_config, read_bounded};
use crate::report::table::{Align, Table};
use crate::report::units;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// Largest config.json that is read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Share of memory that is left to everything else, unless told.
const RESERVE_PART: u64 = 16;

/// Say what a model would take and do on drives, from its config.json alone
#[derive(Debug, clap::Args)]
pub struct Args {
    /// config.json of the model, or the folder that holds it
    config: PathBuf,
    /// The drives, as `[[drive]]` tables
    #[arg(long, value_name = "FILE")]
    drives: PathBuf,
    /// Memory of the machine
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    ram: u64,
    /// Memory left to the system and other programs [default: a sixteenth of --ram]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    reserve: Option<u64>,
    /// Threads that compute there [default: as many as this machine has CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_THREADS as i64))]
    threads: Option<u16>,
    /// What the drives do (`argodrive ceiling`)
    #[arg(long, value_name = "FILE", conflicts_with = "rates")]
    profile: Option<PathBuf>,
    /// Rates of the drives, in their order, measured while all of them are at work
    #[arg(long, value_name = "RATE", value_delimiter = ',', value_parser = parse_rate)]
    rates: Vec<u64>,
    /// Context lengths [default: 8k, or what the model was made for if that is less]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = parse_tokens)]
    context: Vec<usize>,
    /// Bytes of the latent cache that are resident at most, the rest on a drive [default: all of it]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "0", hide_default_value = true)]
    kv_ram: u64,
    /// Lengths of prompts [default: 1k, or what the model was made for if that is less]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = parse_tokens)]
    tokens: Vec<usize>,
    /// The layout policy [default: full-mirror where it fits on every drive, else one copy each by rate]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// What is hot (`argodrive heat`) [default: every expert as often as any other]
    #[arg(long, value_name = "FILE")]
    heat: Option<PathBuf>,
    /// Shares of experts found in memory to calculate with, e.g. 40%,60%
    #[arg(long, value_name = "SHARE", value_delimiter = ',', value_parser = parse_share)]
    hit_rate: Vec<f64>,
    /// Rate at which memory feeds compute; without it compute takes no time
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    memory_bandwidth: Option<u64>,
    /// Rates of copying, for import and stage
    #[arg(long, value_name = "RATE", value_delimiter = ',', value_parser = parse_rate, default_value = "200MB/s,1GB/s")]
    copy_rate: Vec<u64>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// `8k`, `1M`, `500`: tokens, in powers of 1024.
fn parse_tokens(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: usize = match &text[digits.len()..] {
        "" => 1,
        "k" | "K" | "Ki" => 1 << 10,
        "M" | "Mi" => 1 << 20,
        unit => return Err(format!("`{unit}` is no unit; use k (1024) or M (1048576)")),
    };
    let count: usize = digits.parse().map_err(|_| format!("`{text}` is no number of tokens such as 8k or 1M"))?;
    match count.checked_mul(factor) {
        Some(tokens) if tokens > 0 => Ok(tokens),
        _ => Err(format!("`{text}` is not within 1 token to what can be counted")),
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    let value = match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().map(|p| p / 100.0),
        None => text.trim().parse(),
    };
    let wrong = || format!("`{text}` is not a share such as 40% or 0.4, from 0 to 1");
    value.ok().filter(|v| (0.0..=1.0).contains(v)).ok_or_else(wrong)
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let path = if args.config.is_dir() { args.config.join(CONFIG_FILE) } else { args.config.clone() };
    if !path.exists() {
        bail!("{}: no such file; give a model's config.json, or the folder that holds it", path.display());
    }
    let bytes = read_bounded(&path, MAX_CONFIG_BYTES)?;
    let config = parse_config(&path, &bytes).map_err(|e| {
        match files::instead(&String::from_utf8_lossy(&bytes), Kind::Model) {
            Some(other) => anyhow::anyhow!("{}: {other}", path.display()),
            None => e.into(),
        }
    })?;
    let longest = config.max_position_embeddings;
    for (flag, list) in [("--context", &args.context), ("--tokens", &args.tokens)] {
        if let Some(tokens) = list.iter().find(|t| **t > longest) {
            bail!("{flag} {tokens}: the model was made for at most {longest} tokens (max_position_embeddings)");
        }
    }
    let or_usual = |list: &[usize], usual: usize| match list {
        [] => vec![usual.min(longest)],
        given => given.to_vec(),
    };
    let (contexts, prompts) = (or_usual(&args.context, 8 << 10), or_usual(&args.tokens, 1 << 10));
    let specs = spec::load(&args.drives)?;
    let policy = args.policy.as_ref().map(|p| read_policy(p)).transpose()?.map(|(policy, _)| policy);
    let profile = read_profile(args.profile.as_deref(), &mut BTreeMap::new())?;
    let heat = args.heat.as_ref().map(|p| read_heat(p).context("--heat")).transpose()?;
    let reserve_bytes = args.reserve.unwrap_or(args.ram / RESERVE_PART);
    let question = Question {
        config: &config,
        specs: &specs,
        profile: profile.as_ref(),
        rates: &args.rates,
        policy,
        heat: heat.as_ref(),
        memory: MemoryAsked {
            ram_bytes: args.ram,
            reserve_bytes,
            max_rows: DEFAULT_PIECE_ROWS,
            drives: specs.len() as u32,
            threads: ModelOptions { threads: args.threads.map_or(0, usize::from), ..ModelOptions::default() }
                .compute_threads(),
            kv_ram_bytes: args.kv_ram,
        },
        contexts: &contexts,
        prompts: &prompts,
        hit_rates: &args.hit_rate,
        memory_bandwidth: args.memory_bandwidth,
        copy_rates: &args.copy_rate,
    };
    let working = Reading::planning("estimating");
    let answer = estimate(&question);
    drop(working);
    let answer = answer?;
    if args.json {
        let mut object = serde_json::to_value(&answer)?;
        object["config"] = serde_json::json!(path);
        object["asked"] = serde_json::to_value(question.memory)?;
        object["memory_bandwidth"] = serde_json::json!(args.memory_bandwidth);
        print_json(&object)?;
        return Ok(ExitCode::SUCCESS);
    }
    show(&args, &question, &answer)?;
    Ok(ExitCode::SUCCESS)
}

fn show(args: &Args, q: &Question<'_>, e: &Estimate) -> Result<()> {
    let m = &e.model;
    print(&format!(
        "{} experts of {} bytes in {} layers ({}), {} of {} a token",
        m.expert_count,
        m.expert_bytes,
        m.moe_layers.len(),
        units::bytes(m.bank_bytes),
        m.top_k,
        m.experts
    ))?;
    print(&format!(
        "trunk: {} tensors, {} bf16 (int8 {}, not weight-exact)\n{} of experts a token",
        m.trunk_tensors,
        units::bytes(m.trunk_bf16_bytes),
        units::bytes(m.trunk_int8_bytes),
        units::bytes(m.token_bytes)
    ))?;
    print(&format!(
        "\nmemory: {}, {} of it for others",
        units::bytes(q.memory.ram_bytes),
        units::bytes(q.memory.reserve_bytes)
    ))?;
    print(memory_table(e).render(WIDTH).trim_end())?;
    let prompts_widest = u64::from(m.experts).saturating_mul(m.slot_bytes);
    print(&format!(
        "`left` is without {} of working space for {} threads that compute",
        units::bytes(e.memory.first().map_or(0, |m| m.thread_bytes)),
        q.memory.threads
    ))?;
    if m.expert_count > 0 {
        print(&wrapped(&format!(
            "beside it a slab of {} for one barrier of a token; a prompt's widest barrier would be {}, and comes in waves; `keeps` counts experts",
            units::bytes(e.memory.first().map_or(0, |m| m.slab_bytes)),
            units::bytes(prompts_widest)
        )))?;
    }
    if !e.drives.is_empty() {
        let policy = e.policy.as_deref().unwrap_or("-");
        print(&format!("\ndrives: layout {policy}, rates {}", rates_word(e.rates)))?;
        print(drives_table(e).render(WIDTH).trim_end())?;
    }
    match &e.no_speed {
        Some(reason) => print(&format!("\nno rates of tokens: {reason}"))?,
        None => {
            let pace = if e.emulated { ", emulated: no speed of this hardware" } else { "" };
            print(&format!("\ntokens per second{pace}"))?;
            print(speed_table(e).render(WIDTH).trim_end())?;
            print(&assumptions(args.memory_bandwidth))?;
            print(&format!("\nfirst token of a prompt, nothing in memory, at least (compute excluded){pace}"))?;
            print(prompt_table(e).render(WIDTH).trim_end())?;
        }
    }
    print("\ncopying")?;
    print(copy_table(e).render(WIDTH).trim_end())?;
    print(&format!(
        "the store takes {} for the trunk (int8 {})\nand {} for experts, unless they go straight to drives",
        units::bytes(m.trunk_file_bytes),
        units::bytes(m.trunk_int8_file_bytes),
        units::bytes(m.bank_bytes)
    ))
}

fn rates_word(source: RateSource) -> &'static str {
    match source {
        RateSource::Profile => "measured",
        RateSource::Stated => "as stated",
        RateSource::Emulated => "emulated",
        RateSource::Unknown => "not known",
    }
}

fn signed(bytes: i64) -> String {
    match bytes {
        0.. => units::bytes(bytes.unsigned_abs()),
        _ => format!("-{}", units::bytes(bytes.unsigned_abs())),
    }
}

fn memory_table(e: &Estimate) -> Table {
    let titles = ["context", "cache", "states", "working", "bf16 left", "keeps", "int8 left", "keeps"];
    let mut table = Table::new(titles.map(|t| (t, Align::Right)));
    for fit in &e.memory {
        let s = &fit.session;
        table.row([
            fit.context.to_string(),
            units::bytes(s.latent_cache_bytes),
            units::bytes(s.kda_state_bytes.saturating_add(s.conv_history_bytes)),
            units::bytes(s.working_bytes),
            signed(fit.left_bf16_bytes),
            fit.cached_bf16.to_string(),
            signed(fit.left_int8_bytes),
            fit.cached_int8.to_string(),
        ]);
    }
    table
}

fn drives_table(e: &Estimate) -> Table {
    let mut table = Table::new([
        ("drive", Align::Left),
        ("rate", Align::Right),
        ("fixed", Align::Right),
        ("experts", Align::Right),
        ("bytes", Align::Right),
        ("room", Align::Right),
        ("fits", Align::Left),
    ]);
    for d in &e.drives {
        let name = if d.emulated { format!("{} (emulated)", d.name) } else { d.name.clone() };
        let fits = match d.fits {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "?",
        };
        table.row([
            name,
            d.rate_bytes_per_s.map_or("?".into(), units::rate),
            d.fixed_ns.map_or("?".into(), units::duration),
            d.experts.to_string(),
            units::bytes(d.bytes),
            d.room_bytes.map_or("?".into(), units::bytes),
            fits.into(),
        ]);
    }
    table
}

fn speed_table(e: &Estimate) -> Table {
    let mut table = Table::new([
        ("experts in memory", Align::Left),
        ("hits", Align::Right),
        ("read a token", Align::Right),
        ("low", Align::Right),
        ("high", Align::Right),
    ]);
    for s in &e.speeds {
        table.row([
            s.cache.clone(),
            units::percent(s.hit_rate),
            units::bytes(s.bytes_per_token.round() as u64),
            units::tokens_per_s(s.low_tok_s),
            units::tokens_per_s(s.high_tok_s),
        ]);
    }
    table
}

fn assumptions(memory_bandwidth: Option<u64>) -> String {
    let compute = match memory_bandwidth {
        Some(rate) => format!(
            "compute: every byte of a token's weights and states once at {};\nlow adds it to the drives' time, high hides it behind",
            units::rate(rate as f64)
        ),
        None => "compute takes no time (bound it with --memory-bandwidth)".into(),
    };
    format!(
        "low: each barrier as this layout gives it, parts read from several homes;\nhigh: as if every expert were on every \
         drive; no reading ahead in either;\n{compute}"
    )
}

fn prompt_table(e: &Estimate) -> Table {
    let mut table = Table::new([
        ("tokens", Align::Right),
        ("pieces", Align::Right),
        ("read by pieces", Align::Right),
        ("takes", Align::Right),
        ("each expert once", Align::Right),
        ("takes", Align::Right),
    ]);
    for p in &e.prompts {
        table.row([
            p.tokens.to_string(),
            p.pieces.to_string(),
            units::bytes(p.pieces_bytes.round() as u64),
            units::duration(p.pieces_ns),
            units::bytes(p.once_bytes.round() as u64),
            units::duration(p.once_ns),
        ]);
    }
    table
}

fn copy_table(e: &Estimate) -> Table {
    let mut table = Table::new([
        ("at", Align::Right),
        ("import", Align::Right),
        ("takes", Align::Right),
        ("stage", Align::Right),
        ("takes", Align::Right),
    ]);
    for c in &e.copies {
        table.row([
            units::rate(c.rate_bytes_per_s as f64),
            units::bytes(e.model.checkpoint_bytes),
            units::duration(c.import_ns),
            units::bytes(e.stage_bytes),
            units::duration(c.stage_ns),
        ]);
    }
    table
}
