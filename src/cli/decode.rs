//! `argodrive decode`: text to stdout, rates and drives to stderr, or everything as one JSON object. With `--assert` the
//! run is recorded, and it must have done what was asked.

use super::decode_set::{self, SetText};
use super::draft_args::{self, DraftArgs};
use super::fault_args;
use super::kv_args::{self, KvArgs};
use super::run_args::{ModelArgs, PromptArgs, ReaderArgs, SamplerArgs, interrupt_flag, plan_and_mounts, start_over};
use super::snapshot_args::{self, SnapshotArgs};
use super::{REJECTED, Tokens, WIDTH, evidence, print_json, remark, verdict};
use crate::bench::activations::{self, ActivationsRecord};
use crate::bench::fits;
use crate::bench::prompt_set;
use crate::bench::record::{self, RunRecord, TrunkRecord};
use crate::bench::run::{RunResult, RunSpec, run_texts};
use crate::bench::snapshots;
use crate::decode::generate::StopReason;
use crate::knob::Knob;
use crate::model::text_stream::TextStream;
use crate::open::{Model, Resumable};
use crate::report::table::{Align, Table};
use crate::report::units;
use anyhow::{Context, Result};
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Generate text with experts streaming from the drives of a plan
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// The plan; without one the store itself is the one drive
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Where the plan's drives are now, and which of them are emulated
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptArgs,
    /// A set of prompts, all of which are read and extended: a .jsonl file with {"prompt": "..."} or a text in quotes on
    /// each line, or a folder of .txt files
    #[arg(long, value_name = "FILE|DIR", conflicts_with_all = ["prompt", "prompt_file"])]
    prompts: Option<PathBuf>,
    /// Texts of --prompts that share passes, so that an expert is read once for all of them; when one ends, the next prompt
    /// takes its place [default: 1]
    #[arg(long, value_name = "N")]
    parallel: Option<usize>,
    /// Hold every expert in memory instead of streaming
    #[arg(long)]
    resident: bool,
    /// Run once more with every expert in memory: the tokens must be the same, and its time is what compute alone takes
    #[arg(long)]
    reference: bool,
    /// Write every read, barrier and route to this folder, and what the drives' devices moved in windows of 10 ms
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,
    /// Do not sample the drives' devices beside the trace (windows.csv)
    #[arg(long)]
    no_monitor: bool,
    /// A TOML file with settings, or a record to run again; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Begin with these settings (`argodrive tune` writes them); --config and flags override them
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Record the run, print what every setting did, exit 1 unless each given one is proved
    #[arg(long)]
    assert: bool,
    /// Folder that gets the record of --assert
    #[arg(long, value_name = "DIR", default_value = "results", requires = "assert")]
    out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampler: SamplerArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    snapshot: SnapshotArgs,
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    reader: ReaderArgs,
}

impl Args {
    /// What is asked for, and the snapshot that it goes on from.
    fn asked(&self) -> Result<(crate::bench::config::Asked, Option<Resumable>)> {
        let mut asked = start_over(self.profile.as_ref(), self.config.as_ref())?;
        let (c, given) = (&mut asked.config, &mut asked.given);
        if let Some(store) = &self.store {
            c.store.clone_from(store);
        }
        if self.plan.is_some() {
            c.plan.clone_from(&self.plan);
            given.insert(Knob::Layout);
        }
        if self.drives.is_some() {
            c.drives.clone_from(&self.drives);
            given.insert(Knob::Layout);
        }
        if self.resident {
            c.resident = true;
            given.insert(Knob::Resident);
        }
        if self.reference {
            c.reference = true;
            given.insert(Knob::Reference);
        }
        if self.trace.is_some() {
            c.trace.clone_from(&self.trace);
            given.insert(Knob::Trace);
        }
        if self.no_monitor {
            c.monitor = false;
            given.insert(Knob::Monitor);
        }
        if self.prompts.is_some() {
            c.prompts.clone_from(&self.prompts);
            (c.prompt, c.prompt_file) = (None, None);
        } else if self.prompt.is_given() {
            c.prompts = None;
        }
        if let Some(lanes) = self.parallel {
            c.model.parallel = lanes;
            given.insert(Knob::Parallel);
        }
        self.prompt.apply(&mut asked);
        self.sampler.apply(&mut asked);
        self.model.apply(&mut asked);
        self.draft.apply(&mut asked);
        self.reader.apply(&mut asked);
        self.snapshot.apply(&mut asked);
        self.kv.apply(&mut asked);
        let resumed = match asked.config.prompts.is_some() {
            true => None, // a set is refused, whatever there is to go on from
            false => snapshots::find(&mut asked)?,
        };
        asked.check()?;
        Ok((asked, resumed))
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let (mut asked, mut resumed) = args.asked()?;
    for damaged in resumed.iter().flat_map(|r| &r.passed_over) {
        remark(&format!("{damaged}; going on from the one before"));
    }
    let model = Model::load_as(&asked.config.store, asked.config.model.isa()?, asked.config.model.trunk)?;
    activations::check(&model, &asked.config)?;
    let before = resumed.as_mut().map(|r| r.tokens(&model)).transpose()?;
    let prompts = match &before {
        Some(tokens) if asked.config.prompt.is_none() && asked.config.prompt_file.is_none() => {
            prompt_set::Encoded { names: vec!["prompt".into()], tokens: vec![tokens.prompt.clone()] }
        }
        _ => prompt_set::encode(&model, &asked.config)?,
    };
    if let Some(earlier) = prompts.tokens.first().and_then(|p| snapshots::left_behind(&model, &asked.config, p)) {
        remark(&format!(
            "{} is of this very text, which is begun anew; --resume would have gone on with it",
            earlier.display()
        ));
    }
    let lens: Vec<usize> = prompts.tokens.iter().map(Vec::len).collect();
    fits::check_run(&model, &asked.config, &lens).map_err(anyhow::Error::msg)?;
    let streamed = plan_and_mounts(&model, &asked)?;
    if streamed.as_ref().is_some_and(|(_, mounts)| mounts.iter().any(|m| m.emulate.is_some())) {
        asked.given.insert(Knob::Pace);
    }
    if streamed.as_ref().is_some_and(|(_, mounts)| mounts.iter().any(|m| !m.faults.is_empty())) {
        asked.given.insert(Knob::Faults);
    }
    let under_test = asked.under_test()?;
    if let Some(folder) = &asked.config.trace {
        std::fs::create_dir_all(folder).with_context(|| format!("--trace {}", folder.display()))?;
    }
    // The folder is made before anything is measured: a bad path must not cost a run.
    let folder = if args.assert { Some(record::new_folder(&args.out, "decode")?) } else { None };
    let interrupted = interrupt_flag()?;
    let is_set = asked.config.prompts.is_some();
    let mut texts = SetText::new(prompts.names.len());
    let mut text = String::new();
    let mut stream = TextStream::new();
    let mut broken = None;
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
    let spec = RunSpec {
        arm: "decode",
        asked: &asked,
        under_test: &under_test,
        streamed: streamed.as_ref().map(|(plan, mounts)| (plan, mounts.as_slice())),
        prompts: &prompts.tokens,
        control: None,
    };
    let visible = |token| match asked.config.special {
        true => model.tokenizer.decode_bytes(&[token]),
        false => model.tokenizer.decode_visible_bytes(&[token]),
    };
    // What comes out is the whole text, as if it had never been interrupted.
    for token in before.iter().flat_map(|t| &t.generated) {
        let _ = show(&stream.push(&visible(*token)));
    }
    // text that streams onto a terminal is progress enough
    let silent = args.json || is_set || !std::io::stdout().is_terminal();
    let mut progress = Tokens::start(silent, lens.iter().sum(), asked.config.max_new.saturating_mul(lens.len()));
    let mut on_token = |place, token| {
        let bytes = visible(token);
        progress.next();
        let flow = match is_set {
            true => texts.push(place, &bytes),
            false => show(&stream.push(&bytes)),
        };
        if interrupted.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { flow }
    };
    let result = run_texts(&model, &spec, &mut on_token, &|| !interrupted.load(Ordering::SeqCst));
    progress.finish();
    if is_set {
        let (texts, names) = (texts.finish(), &prompts.names);
        if !args.json {
            // What was generated is shown even if the run failed: a night's work must not be lost with its last read.
            decode_set::print(names, &texts)?;
        }
        let (result, kept) = kept(&model, &spec, result?, folder.as_deref(), interrupted)?;
        if args.json {
            let mut value = json(&result);
            decode_set::add(&mut value, names, &texts, &result);
            print_json(&value)?;
        } else {
            decode_set::report(names, &result);
            report(&result);
        }
        return Ok(conclude(&args, &result.record, kept.as_deref()));
    }
    let result = result?;
    let _ = show(&stream.finish());
    if let Some(e) = broken {
        return Err(e.into());
    }
    let (result, kept) = kept(&model, &spec, result, folder.as_deref(), interrupted)?;
    if args.json {
        let mut value = json(&result);
        value["text"] = text.into();
        value["token_ids"] = result.generation.token_ids.clone().into();
        value["prompt_token_ids"] = prompts.tokens.concat().into();
        print_json(&value)?;
    } else {
        let _ = writeln!(std::io::stdout());
        report(&result);
    }
    Ok(conclude(&args, &result.record, kept.as_deref()))
}

/// Writes the record, where there is a folder for it. What is measured beside the run comes after that and is added, so that an
/// interruption then loses nothing.
fn kept(
    model: &Model,
    spec: &RunSpec<'_>,
    mut result: RunResult,
    folder: Option<&Path>,
    interrupted: &AtomicBool,
) -> Result<(RunResult, Option<PathBuf>)> {
    let write = |record: &RunRecord| folder.map(|folder| keep(folder, record)).transpose();
    let mut path = write(&result.record)?;
    if measured(model, spec, &mut result.record, interrupted) {
        path = write(&result.record)?;
    }
    Ok((result, path))
}

/// Adds to the record how far int8 activations move the prompt's logits, and says whether it did. What cannot be measured spoils no
/// run. A run that goes on from a snapshot has not read its prompt, and does not read it for this.
fn measured(model: &Model, spec: &RunSpec<'_>, record: &mut RunRecord, interrupted: &AtomicBool) -> bool {
    let (config, prompt) = (&spec.asked.config, spec.prompts.iter().find(|p| !p.is_empty()));
    let keep_going = || !interrupted.load(Ordering::SeqCst);
    let int8 = record.activations.as_mut().filter(|a| a.label.is_some());
    let (Some(to), Some(prompt), true) = (int8, prompt, keep_going()) else { return false };
    if record.resumed.is_some() {
        remark("int8 activations: how far they move logits is not measured where a run goes on from a snapshot");
        return false;
    }
    match activations::measure(model, config, spec.streamed, prompt, &keep_going) {
        Ok(Some(error)) if error.relative().is_finite() => to.error = Some(error),
        Ok(Some(_)) => remark("int8 activations: logits are no finite numbers, so their distance is unknown"),
        Ok(None) => remark("int8 activations: interrupted before it was known how far they move logits"),
        Err(e) => remark(&format!("int8 activations: how far they move logits could not be measured: {e}")),
    }
    to.error.is_some()
}

/// Writes the record where it belongs. A record that cannot be written is printed, so that no measurement is lost.
fn keep(folder: &Path, record: &RunRecord) -> Result<PathBuf> {
    let kind = if record.rejected.is_empty() { "arms" } else { "rejected" };
    let path = folder.join(kind).join("00-decode").join("record.json");
    if let Err(e) = record::write_json(&path, record) {
        remark("the record could not be written; here it is:");
        let _ = writeln!(std::io::stderr(), "{}", serde_json::to_string(record).unwrap_or_default());
        return Err(e).context("writing the record");
    }
    Ok(path)
}

/// Prints the verdict; exit code 1 only for a recorded run that does not count.
fn conclude(args: &Args, record: &RunRecord, kept: Option<&Path>) -> ExitCode {
    if args.assert && !args.json {
        let _ = write!(std::io::stderr(), "\n{}", evidence::table(record));
    }
    for reason in &record.rejected {
        remark(&format!("{}: {reason}", if args.assert { "rejected" } else { "note" }));
    }
    if let Some(path) = kept {
        remark(&format!("record: {}", path.display()));
    }
    if args.assert && !record.rejected.is_empty() { ExitCode::from(REJECTED) } else { ExitCode::SUCCESS }
}

/// What one prompt and a set have in common.
fn json(result: &RunResult) -> serde_json::Value {
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
    let names: Vec<&str> = record.drives.iter().map(|d| d.name.as_str()).collect();
    let mut value = serde_json::json!({
        "stopped": result.generation.stopped, "rates": record.rates, "io_wait_share": record.io_wait_share,
        "barrier_mean_ns": record.barrier_mean_ns, "plan_hash": record.plan_hash, "emulated": record.emulated,
        "drives": drives, "settings": record.settings, "guards": record.guards, "rejected": record.rejected,
        "reference": record.reference, "prefill": record.prefill, "trunk": record.trunk, "trunk_label": record.trunk_label(),
        "activations": record.activations, "activations_label": record.activations.as_ref().and_then(|a| a.label.as_ref()),
        "speculation": record.speculation, "prefill_passes": record.prefill_passes, "resumed": record.resumed,
        "snapshots": record.snapshots, "kv": record.kv, "injected_faults": record.has_faults(), "trouble": record.trouble,
    });
    value["verdict"] = record.verdict.as_ref().map(|v| verdict::json(v, &names)).into();
    value
}

/// Why a text ended, in words.
pub(super) fn ended(reason: StopReason) -> &'static str {
    match reason {
        StopReason::StopToken => "stop token",
        StopReason::MaxNew => "--max-new",
        StopReason::ContextFull => "context full",
        StopReason::Interrupted => "interrupted",
    }
}

/// What is unusual about the trunk: that it is not exact, and what was read of it.
fn say_trunk(out: &mut impl Write, trunk: &TrunkRecord) {
    if let Some(label) = &trunk.label {
        let error = trunk.error.map_or_else(String::new, |e| format!(": {e}"));
        let _ = writeln!(out, "{}", verdict::wrapped(&format!("{label}{error}")));
    }
    if trunk.streamed_bytes > 0 {
        let _ = writeln!(
            out,
            "trunk streamed: {} in {} reads, {} a pass; passes waited {} for it",
            units::bytes(trunk.streamed_bytes),
            trunk.streamed_reads,
            units::bytes(trunk.pass_bytes),
            units::duration(trunk.trunk_stall_ns)
        );
    }
}

/// That int8 activations are not exact, and by how much.
fn say_activations(out: &mut impl Write, activations: &ActivationsRecord) {
    if let Some(label) = &activations.label {
        let error = activations.error.map_or_else(String::new, |e| format!(": {e}"));
        let _ = writeln!(out, "{}", verdict::wrapped(&format!("{label}{error}")));
    }
}

/// Rates and drives for people, on stderr so that stdout holds the text alone.
fn report(result: &RunResult) {
    let (record, generation) = (&result.record, &result.generation);
    let rates = &record.rates;
    let mut out = std::io::stderr().lock();
    let emulated = match (record.emulated, record.has_faults()) {
        (true, true) => "   (EMULATED drives, INJECTED FAULTS)",
        (true, false) => "   (EMULATED drives)",
        (false, true) => "   (INJECTED FAULTS)",
        (false, false) => "",
    };
    let (decode, prefill) = (units::tokens_per_s(rates.decode_tok_s), units::tokens_per_s(rates.prefill_tok_s));
    let inclusive = units::tokens_per_s(rates.inclusive_tok_s);
    if generation.resumed > 0 {
        let _ = writeln!(
            out,
            "\n{} tokens ({}), {} of them new, after {} of prompt",
            record.generated_tokens,
            ended(generation.stopped),
            record.generated_tokens - generation.resumed,
            record.prompt_tokens
        );
    } else if record.set.is_none() {
        let _ = writeln!(
            out,
            "\n{} tokens ({}) after {} of prompt; first token {}",
            record.generated_tokens,
            ended(generation.stopped),
            record.prompt_tokens,
            units::duration(generation.first_token_ns),
        );
    }
    let _ = writeln!(out, "decode {decode} tok/s   prefill {prefill} tok/s   inclusive {inclusive} tok/s{emulated}");
    if let Some(trouble) = &record.trouble {
        let _ = write!(out, "{}", fault_args::table(trouble, WIDTH));
    }
    if let Some(trunk) = &record.trunk {
        say_trunk(&mut out, trunk);
    }
    if let Some(activations) = &record.activations {
        say_activations(&mut out, activations);
    }
    if let Some(kv) = &record.kv {
        kv_args::say(&mut out, kv);
    }
    snapshot_args::say(&mut out, result);
    if let Some(speculation) = &record.speculation {
        let _ = write!(out, "{}", draft_args::table(speculation, WIDTH));
    }
    if record.drives.is_empty() {
        if record.trunk.as_ref().is_none_or(|t| t.streamed_bytes == 0) {
            let _ = writeln!(out, "not storage-bound: no drive was read");
        }
        return;
    }
    if let Some((prefill, factor)) = record.prefill.as_ref().and_then(|p| Some((p, p.amplification?))) {
        let read = units::bytes(prefill.payload_bytes + prefill.wasted_bytes);
        let _ =
            writeln!(out, "the prompt needed {} experts and read {read}, {factor:.2}x their bytes", prefill.distinct);
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
    let _ = writeln!(out, "{}", table.render(WIDTH));
    let names: Vec<&str> = record.drives.iter().map(|d| d.name.as_str()).collect();
    match &record.verdict {
        Some(v) => {
            let text = verdict::sentence(v, &names);
            let _ = writeln!(out, "{}{}", verdict::table(v, "wall time of decoding"), verdict::wrapped(&text));
        }
        None => {
            let _ = writeln!(out, "no verdict: one token was generated, and so no decoding pass was run");
        }
    }
    if let Some(reference) = &record.reference {
        let _ = writeln!(out, "{}", verdict::wrapped(&verdict::reference(reference, record.verdict.as_ref())));
    }
}
