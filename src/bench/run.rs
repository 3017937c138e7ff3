//! One measured run: a configuration, a prompt, drives; out come text, rates, what each drive did, and whether every
//! setting fired. A run that does not count comes back with its reasons in `rejected`; the caller decides what to do.

use super::activations::{ActivationsRecord, use_activations};
use super::affinity::Placed;
use super::config::{Asked, ConfigError, RunConfig};
use super::environment;
use super::evidence::{judge, objections};
use super::guards::{GuardVerdict, RunFacts, Watch};
use super::inputs;
use super::kv::{self, KvRecord, KvSeen};
use super::record::{RECORD_VERSION, RunRecord, TrunkRecord, utc_now};
use super::reference;
use super::reissue::trouble_faults;
use super::route_tap::RouteTap;
use super::run_figures::{barrier_mean_ns, drive_records, mount_record, prefill_record, verdict};
use super::sampled::{RunMonitor, RunWindows};
use super::seen::{ResidencySample, Seen, Traced, TrunkSeen, kernel_calls};
use super::snapshots::SnapshotRecord;
use super::speculation::SpeculationRecord;
use super::texts::{Generated, Texts};
use super::trouble::TroubleRecord;
use crate::clock::Clock;
use crate::decode::batch::Sequence;
use crate::decode::generate::{GenerateError, Generation, StopReason};
use crate::decode::sampler::SamplerError;
use crate::decode::{Decoder, Observer};
use crate::drive::spec::DriveSpec;
use crate::knob::{self, Knob};
use crate::layout::plan::{Plan, PlanError};
use crate::model::config::ModelConfig;
use crate::open::{Model, NoExperts, OpenError};
use crate::reader::kv_file::KvHandle;
use crate::reader::{PrefetchPolicy, ReaderCounters, ReaderHandle, ReaderOptions};
use crate::replay::{ReplayError, measured};
use crate::trace::log::{self, TraceBuffer, TraceError, TraceHeader, TraceRate};
use crate::trace::monitor::MonitorError;
use crate::trace::routes;
use crate::trace::windows::WINDOWS_FILE;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;

/// A run failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It could not be put together.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The sampler's options.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// Decoding failed.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The plan could not be hashed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The trace could not be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Bounds of its barriers could not be computed.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The drives' devices could not be sampled.
    #[error("{0}; --no-monitor traces without it")]
    Monitor(#[from] MonitorError),
}

/// One run.
#[derive(Clone, Copy)]
pub struct RunSpec<'a> {
    /// What the record calls it.
    pub arm: &'a str,
    /// The configuration, and which of its settings somebody gave.
    pub asked: &'a Asked,
    /// Settings that must be proved for the run to count.
    pub under_test: &'a BTreeSet<Knob>,
    /// The plan and where its drives are; `None` for experts in memory and for dense models.
    pub streamed: Option<(&'a Plan, &'a [DriveSpec])>,
    /// The tokens of the prompt, or of each prompt of the configuration's set.
    pub prompts: &'a [Vec<u32>],
    /// Hash of the tokens that a control run gave, if there is one.
    pub control: Option<&'a str>,
}

/// What a run gave.
pub struct RunResult {
    /// The record.
    pub record: RunRecord,
    /// Tokens and times; of a prompt set, all texts as one.
    pub generation: Generation,
    /// The texts of a prompt set, by prompt; empty without one.
    pub texts: Vec<Sequence>,
    /// The reader's counters at the end; `None` when nothing streamed.
    pub counters: Option<ReaderCounters>,
}

/// Runs `spec` on `model`. `on_token` sees every token (of any text of a set) as it is chosen and may end the run.
pub fn run(
    model: &Model,
    spec: &RunSpec<'_>,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<RunResult, RunError> {
    run_while(model, spec, on_token, &|| true)
}

/// The same; a reference arm ends early once `keep_going` says no.
pub fn run_while(
    model: &Model,
    spec: &RunSpec<'_>,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    keep_going: &dyn Fn() -> bool,
) -> Result<RunResult, RunError> {
    run_texts(model, spec, &mut |_, token| on_token(token), keep_going)
}

/// The same; `on_token` is told also which text of a set the token extends: its place, from 0.
pub fn run_texts(
    model: &Model,
    spec: &RunSpec<'_>,
    on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    keep_going: &dyn Fn() -> bool,
) -> Result<RunResult, RunError> {
    let config = &spec.asked.config;
    if config.reference {
        reference::check(model)?;
    }
    use_activations(model, config)?;
    let draft = model.draft(&config.draft, config.model.isa()?)?;
    let started = utc_now();
    let clock = Clock::start();
    let control = spec.prompts.iter().map(|p| control_tokens(model, p)).sum();
    let mut seen = Seen { prompt_control_tokens: control, ..Seen::default() };
    let sample = spec.streamed.and_then(|(plan, mounts)| ResidencySample::open(plan, mounts));
    let before = sample.as_ref().and_then(ResidencySample::measure);
    let watch = Watch::start(spec.streamed.map_or(&[], |(_, mounts)| mounts));
    use_threads(model, config);
    let placed = Placed::compute(&model.decoder, &config.model.affinity)?;
    // its threads inherit the CPUs of compute
    if let Some(draft) = &draft {
        give_threads(&draft.decoder, config);
    }
    let (calls, chunks) = (kernel_calls(&model.decoder), model.decoder.thread_chunks());
    let forms = model.decoder.activation_counts();
    let mut texts = Texts::new(model, config, spec.prompts, config.reader.prefetch, clock)?;
    texts.speculate(model, config, draft.as_ref())?;
    texts.keep(model, config, spec.prompts)?;
    let (mut tap, mut kv) = (None, None);
    let monitor = start_monitor(spec, clock)?;
    let (generated, handle) = decode(model, spec, (&mut texts, &placed), (&mut seen, &mut tap, &mut kv), on_token)?;
    let generation = &generated.generation;
    let windows = monitor.map(RunMonitor::finish);
    seen.sampled = windows.as_ref().map(RunWindows::unwritten);
    let counters = handle.as_ref().map(ReaderHandle::counters);
    let after = sample.as_ref().and_then(ResidencySample::measure);
    seen.residency = before.zip(after);
    texts.tell(&generated, &mut seen);
    let set = texts.record(&generated);
    texts.settle();
    seen.kv = KvSeen { passes: texts.kv().counters(), file: kv.as_ref().map(KvHandle::counters) };
    let trunk = TrunkSeen::of(&model.decoder, texts.trunk(), texts.counters());
    seen.trunk = Some(trunk);
    // The model is shared between runs; only this run's products count.
    seen.kernel_calls =
        kernel_calls(&model.decoder).into_iter().zip(calls).map(|((i, a), (_, b))| (i, a - b)).collect();
    seen.activations = model.decoder.activation_counts().since(&forms);
    seen.thread_chunks = seen.thread_chunks.iter().zip(&chunks).map(|(a, b)| a - b).collect();
    let mut trace = handle.as_ref().and_then(ReaderHandle::take_trace);
    let rates = counters.as_ref().map(|c| measured::rates(c, &config.reader.rates, trace.as_ref())).unwrap_or_default();
    let mut rejected = Vec::new();
    if let (Some(handle), Some(trace)) = (&handle, &mut trace) {
        let (decode_ns, windows) = (generation.decode_ns(), windows.as_ref());
        let written = Written { tap: tap.as_ref(), kv: kv.as_ref(), rates: &rates, decode_ns, windows };
        write_trace(model, spec, handle, trace, &written, (&mut seen, &mut rejected))?;
    }
    // without a reader all would count as compute, waits for a streamed trunk or latent rows too
    let verdict = verdict(generation, handle.as_ref(), trace.as_ref(), &rates)
        .filter(|_| handle.is_some() || (trunk.blocks.is_none() && kv.is_none()));
    let hash = generated.token_hash();
    // What was read for nothing came from the drives too.
    let read_bytes: u64 = counters
        .iter()
        .flat_map(|c| &c.drives)
        .map(|d| d.read_bytes + d.prefetch.wasted.bytes + d.good_probes.bytes)
        .sum();
    let read_bytes = read_bytes + trunk_bytes_of(model, spec, &trunk) + kv::bytes_of(spec, kv.as_ref());
    let guards = watch.finish(&RunFacts {
        streamed: spec.streamed.filter(|_| counters.is_some()),
        read_bytes,
        direct: counters.as_ref().is_some_and(|c| c.drives.iter().all(|d| d.direct.is_some())),
        residency: seen.residency,
        sample: sample.as_ref(),
        tokens: (&hash, spec.control.or(spec.asked.repeats.as_ref().map(|r| r.token_hash.as_str()))),
    });
    let plan_hash = spec.streamed.map(|(plan, _)| plan.hash()).transpose()?.unwrap_or_default();
    if let Some(then) = spec.asked.repeats.as_ref().filter(|r| r.plan_hash != plan_hash) {
        rejected.push(format!("the plan is {plan_hash}, the record that this repeats had {}", then.plan_hash));
    }
    seen.reader = counters;
    seen.generation = Some(generation.clone());
    let texts_plan = texts.kv().plan().copied();
    drop(texts); // the reference arm has one of its own
    let asked = (config.reference && !knob::skipped(Knob::Reference)) || knob::forced(Knob::Reference);
    if asked && generation.stopped != StopReason::Interrupted {
        // Last of all: it fills the page cache and computes with the same kernels.
        seen.reference = reference::run(model, spec, &hash, keep_going)?;
        seen.reference_interrupted = seen.reference.is_none();
    }
    let settings = judge(config, spec.streamed, &seen, spec.under_test);
    rejected.extend(objections(&settings));
    let tripped = guards.iter().filter(|g| g.verdict == GuardVerdict::Tripped);
    rejected.extend(tripped.map(|g| format!("{}: {}", g.name, g.seen)));
    let counters = seen.reader.as_ref();
    let record = RunRecord {
        version: RECORD_VERSION,
        arm: spec.arm.to_string(),
        model_id: model.manifest.model_id.clone(),
        trunk: Some(TrunkRecord::of(&model.manifest, &trunk)),
        activations: Some(ActivationsRecord::of(config, &seen)),
        config_digest: model.manifest.config_digest.to_string(),
        plan_hash,
        started,
        rates: generation.rates(),
        prompt_tokens: generation.prompt_tokens,
        prefill_passes: Some(seen.prefill_passes),
        resumed: seen.resumed.clone(),
        snapshots: seen
            .snapshots
            .as_ref()
            .map(|c| SnapshotRecord::of(config.snapshot.folder(&model.folder), c, generation.decode_ns())),
        kv: KvRecord::of_run(config, &seen.kv, (texts_plan, kv.as_ref()), generation),
        generated_tokens: generation.token_ids.len(),
        token_hash: hash,
        io_wait_share: generation.io_wait_share(),
        barrier_mean_ns: barrier_mean_ns(generation, trace.as_ref()),
        prefill: seen.prefill_delivered.map(|d| prefill_record(generation, d, model.manifest.expert_bytes)),
        speculation: seen.speculation.as_ref().map(|c| {
            let id = draft.as_ref().map_or("", |d| d.identity.as_str());
            SpeculationRecord::of(config.draft.speculate.name(), id, c)
        }),
        set,
        verdict,
        reference: seen.reference.clone(),
        drives: counters.map(drive_records).unwrap_or_default(),
        emulated: counters.is_some_and(|c| c.drives.iter().any(|d| d.capabilities.emulated)),
        trouble: counters.and_then(TroubleRecord::of),
        settings,
        guards,
        rejected,
        given: spec.asked.given.iter().map(|k| k.name().to_string()).collect(),
        config: config.clone(),
        inputs: inputs::of_run(config, spec.streamed.map(|(_, mounts)| mounts)),
        mounts: spec.streamed.map(|(_, mounts)| mounts.iter().map(mount_record).collect()).unwrap_or_default(),
        sampler: windows.map(|w| w.figures().clone()),
        environment: environment::read(),
    };
    let texts = generated.set.map(|s| s.sequences).unwrap_or_default();
    Ok(RunResult { record, generation: generated.generation, texts, counters: seen.reader })
}

/// Gives the model's kernels the threads of a run; they stay until another run asks for others.
pub fn use_threads(model: &Model, config: &RunConfig) {
    give_threads(&model.decoder, config);
}

/// The same for the kernels of a draft model.
pub fn give_threads(decoder: &Decoder, config: &RunConfig) {
    let threads = match config.model.compute_threads() {
        _ if knob::skipped(Knob::Threads) => 1,
        threads => threads + usize::from(knob::forced(Knob::Threads)),
    };
    decoder.use_threads(threads);
}

/// Builds the source of experts that is asked for and generates; the handle is there when a reader was built.
fn decode(
    model: &Model,
    spec: &RunSpec<'_>,
    (texts, placed): (&mut Texts, &Placed<'_>),
    (seen, tap, kv): (&mut Seen, &mut Option<RouteTap>, &mut Option<KvHandle>),
    on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<(Generated, Option<ReaderHandle>), RunError> {
    let config = &spec.asked.config;
    let what = (model, config, spec.prompts);
    let traced = config.trace.is_some() && !knob::skipped(Knob::Trace);
    // Opens what passes read beside experts, and goes on from a snapshot; gives the threads that read.
    let mut begin = |texts: &mut Texts, reader: Option<(&ReaderHandle, &[DriveSpec])>| -> Result<_, RunError> {
        let pace = reader.and_then(|(handle, mounts)| handle.pace(model.own_drive(mounts)?));
        let mut threads = placed.reading(|| texts.stream_trunk(model, config, pace))?;
        let keep_reads = traced && reader.is_some();
        *kv = placed.reading(|| texts.open_kv(model, config, spec.prompts, keep_reads, reader))?;
        threads.extend(texts.kv().threads());
        texts.resume(model, config, spec.prompts)?;
        Ok(threads)
    };
    if !model.has_experts() {
        let threads = begin(texts, None)?;
        let generated = texts.generate(what, &mut NoExperts, on_token, None)?;
        see_threads(model, placed, &threads, seen);
        return Ok((generated, None));
    }
    let lie = if knob::skipped(Knob::Resident) { Some(model.store_plan()?) } else { None };
    let streamed = match (spec.streamed, &lie) {
        (Some(_), _) if knob::forced(Knob::Resident) => None,
        (None, Some((plan, mounts))) => Some((plan, mounts.as_slice())),
        (streamed, _) => streamed,
    };
    match streamed {
        Some((plan, mounts)) => {
            let mut options = config.reader.clone();
            options.stage_arguments = stage_arguments(config);
            if config.model.parallel > 1 {
                // A pass that extends the texts asks each layer for so many at most; it must not come in waves.
                let top_k = model.decoder.config().moe.as_ref().map_or(0, |m| m.top_k);
                let most = top_k.saturating_mul(config.model.parallel);
                options.demand_reserve = u32::try_from(most).unwrap_or(u32::MAX);
            }
            trace_room(&mut options, model.decoder.config(), spec, mounts.len(), traced);
            if traced {
                *tap = Some(RouteTap::for_run(model.decoder.config(), spec.prompts, config.max_new, &config.draft));
            }
            let mut reader = placed.reading(|| model.reader(plan, mounts, &options, texts.clock()))?;
            let handle = reader.handle();
            let mut threads = begin(texts, Some((&handle, mounts)))?;
            threads.extend(handle.threads());
            let observer = tap.as_mut().map(|t| t as &mut dyn Observer);
            let mut at_first = None;
            let mut see = |text, token| {
                at_first.get_or_insert_with(|| handle.delivered());
                on_token(text, token)
            };
            let generated = texts.generate(what, &mut reader, &mut see, observer)?;
            see_threads(model, placed, &threads, seen);
            // Prompts that are read later, or in several passes, come mixed with what other texts ask for.
            let lens = || spec.prompts.iter().map(Vec::len);
            let at_once =
                spec.prompts.len() <= config.model.parallel && lens().sum::<usize>() <= config.model.prefill_rows;
            if texts.reads_prompt() && (config.prompts.is_none() || at_once) {
                seen.prefill_delivered = Some(at_first.unwrap_or_else(|| handle.delivered()));
            }
            Ok((generated, Some(handle)))
        }
        None => {
            let mut memory = model.resident()?;
            let threads = begin(texts, None)?;
            let generated = texts.generate(what, &mut memory, on_token, None)?;
            see_threads(model, placed, &threads, seen);
            seen.resident_leases = memory.leases();
            Ok((generated, None))
        }
    }
}

/// What `argodrive stage` takes for the plan of a run.
fn stage_arguments(config: &RunConfig) -> Option<String> {
    let plan = config.plan.as_ref()?.display();
    let drives = config.drives.as_ref().map(|d| format!(" --drives {}", d.display()));
    Some(format!("{plan}{}", drives.unwrap_or_default()))
}

/// Bytes of a streamed trunk that came from a device under one of the run's drives.
fn trunk_bytes_of(model: &Model, spec: &RunSpec<'_>, trunk: &TrunkSeen) -> u64 {
    let device = |path: &Path| crate::drive::spec::device_number(path).ok();
    let own = device(&model.folder);
    let mut mounts = spec.streamed.iter().flat_map(|(_, mounts)| *mounts);
    match trunk.blocks {
        Some(blocks) if mounts.any(|m| own.is_some() && device(&m.path) == own) => blocks.bytes + blocks.unused_bytes,
        _ => 0,
    }
}

/// What threads have done and where they are, while all of them are there.
fn see_threads(model: &Model, placed: &Placed<'_>, readers: &[u32], seen: &mut Seen) {
    seen.thread_chunks = model.decoder.thread_chunks();
    seen.affinity = placed.seen(readers);
}

/// Barriers of an untraced run that are kept for its verdict at most: some 45 MB, taken page by page as they fill.
const MAX_UNTRACED_BARRIERS: usize = 1 << 18;

/// Barriers that a run can cause at most, and, if it is traced, its reads, a quarter more for repeated ones.
fn trace_room(options: &mut ReaderOptions, config: &ModelConfig, spec: &RunSpec<'_>, drives: usize, traced: bool) {
    let (run, texts) = (&spec.asked.config, spec.prompts.len());
    let (rows, lanes) = (run.model.prefill_rows.max(1), run.model.parallel.max(1));
    let (layers, moe) = (config.moe_layers().count(), config.moe.as_ref());
    let (experts, top_k) = moe.map_or((0, 0), |m| (m.experts, m.top_k));
    let passes: usize = spec.prompts.iter().map(|p| p.len().div_ceil(rows)).sum();
    let read_together = spec.prompts.iter().map(Vec::len).fold(0, usize::saturating_add);
    let widest = experts.min(rows.min(read_together).saturating_mul(top_k));
    let tokens = texts.saturating_mul(run.max_new);
    // A text that ends gives its lane away at once, so lanes stand empty only while the last texts end.
    let extended = tokens.min((tokens / lanes).saturating_add(run.max_new));
    let step = experts.min(run.draft.rows().max(1).saturating_mul(top_k));
    let reads = (passes * layers).saturating_mul(widest).saturating_add(tokens.saturating_mul(layers * step));
    // A layer may be guessed anew from each layer that looks ahead to it.
    let guessed = match options.prefetch {
        PrefetchPolicy::None => 0,
        _ => reads.saturating_mul(options.prefetch_depth as usize),
    };
    let reads = reads.saturating_add(guessed);
    options.trace_barriers = passes.saturating_add(extended).saturating_mul(layers).saturating_add(64);
    if !traced {
        options.trace_barriers = options.trace_barriers.min(MAX_UNTRACED_BARRIERS);
        return;
    }
    // A barrier cuts at most one expert between any two neighbouring drives.
    options.trace_reads = reads + reads / 4 + options.trace_barriers.saturating_mul(drives) + 1024;
}

/// The sampler, if the run is traced and it is not turned off.
fn start_monitor(spec: &RunSpec<'_>, clock: Clock) -> Result<Option<RunMonitor>, RunError> {
    let Some((_, mounts)) = spec.streamed else { return Ok(None) };
    let config = &spec.asked.config;
    let asked = config.trace.is_some() && config.monitor && !knob::skipped(Knob::Monitor);
    let monitor = (asked || knob::forced(Knob::Monitor)).then(|| RunMonitor::start(clock, mounts));
    Ok(monitor.transpose()?)
}

/// What goes into a trace folder beside the reader's own rows.
struct Written<'a> {
    tap: Option<&'a RouteTap>,
    kv: Option<&'a KvHandle>,
    rates: &'a [TraceRate],
    decode_ns: u64,
    windows: Option<&'a RunWindows>,
}

/// Writes the trace if one was asked for, and counts what it holds. An incomplete one rejects the run.
fn write_trace(
    model: &Model,
    spec: &RunSpec<'_>,
    handle: &ReaderHandle,
    trace: &mut TraceBuffer,
    written: &Written<'_>,
    (seen, rejected): (&mut Seen, &mut Vec<String>),
) -> Result<(), RunError> {
    if trace.capacity().reads == 0 {
        return Ok(()); // barriers alone, for the verdict
    }
    let tap = written.tap;
    let routes = tap.map_or(0, |t| t.routes.rows().len() as u64);
    let (reads, barriers) = (trace.reads().len() as u64, trace.barriers().len() as u64);
    seen.traced = Some(Traced { reads, barriers, routes, kv_reads: 0 });
    if let Err(e) = trace.check_complete().and_then(|()| tap.map_or(Ok(()), |t| t.routes.check_complete())) {
        rejected.push(e.to_string());
        return Ok(());
    }
    let Some(folder) = &spec.asked.config.trace else { return Ok(()) };
    if let Some((plan, _)) = spec.streamed {
        measured::fill_bounds(trace, plan, handle.drives(), written.rates)?;
    }
    let (kv_drive, kv_reads) = kv::add_to_trace(trace, written.kv, handle.drives())?;
    seen.traced = seen.traced.map(|traced| Traced { kv_reads, ..traced });
    let drives = handle.drives().iter().cloned().chain(kv_drive).collect();
    let mut header = TraceHeader {
        decode_wall_ns: (written.decode_ns > 0).then_some(written.decode_ns),
        rates: written.rates.to_vec(),
        model_id: Some(model.manifest.model_id.clone()),
        faults: trouble_faults(TroubleRecord::of(&handle.counters()).as_ref()),
        ..TraceHeader::new(drives)
    };
    if let Some(tap) = tap {
        header.routes = routes::write(folder, &tap.routes)?;
    }
    let io = |path: &Path, source| TraceError::Io { path: path.to_path_buf(), source };
    std::fs::create_dir_all(folder).map_err(|e| io(folder, e))?;
    if let Some(windows) = written.windows {
        let (said, counts) = windows.write(folder, &header.drives, trace.reads())?;
        (header.windows, seen.sampled) = (Some(said), Some(counts));
    } else {
        // windows of an earlier run into this folder would tell of other reads
        let path = folder.join(WINDOWS_FILE);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io(&path, e).into()),
            _ => {}
        }
    }
    Ok(log::write(folder, &header, trace)?)
}

/// Control tokens of a prompt, a leading beginning-of-text not counted.
fn control_tokens(model: &Model, prompt: &[u32]) -> u64 {
    let own = usize::from(model.tokenizer.adds_bos() && prompt.first() == model.tokenizer.bos_id().as_ref());
    prompt[own..].iter().filter(|&&id| model.tokenizer.is_control(id)).count() as u64
}
