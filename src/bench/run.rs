//! One measured run: a configuration, a prompt, drives; out come text, rates, what each drive did, and whether every
//! setting fired. A run that does not count comes back with its reasons in `rejected`; the caller decides what to do.

use super::config::{Asked, ConfigError, RunConfig};
use super::environment;
use super::evidence::{judge, objections};
use super::guards::{GuardVerdict, RunFacts, Watch};
use super::inputs;
use super::record::{DriveRecord, MountRecord, PrefillRecord, RECORD_VERSION, RunRecord, token_hash, utc_now};
use super::reference;
use super::route_tap::RouteTap;
use super::sampled::{RunMonitor, RunWindows};
use super::seen::{ResidencySample, Seen, Traced, kernel_calls};
use crate::clock::Clock;
use crate::decode::Observer;
use crate::decode::generate::{GenerateError, Generation, Request, StopReason, generate, generate_observed};
use crate::decode::sampler::{Sampler, SamplerError};
use crate::decode::session::Session;
use crate::drive::device::identity_of;
use crate::drive::spec::DriveSpec;
use crate::knob::{self, Knob};
use crate::layout::plan::{Plan, PlanError};
use crate::model::config::ModelConfig;
use crate::open::{Model, NoExperts, OpenError};
use crate::reader::{Delivered, DriveCounters, PrefetchPolicy, ReaderCounters, ReaderHandle, ReaderOptions};
use crate::replay::verdict::Verdict;
use crate::replay::{ReplayError, measured};
use crate::trace::log::{self, TraceBuffer, TraceError, TraceHeader, TraceRate};
use crate::trace::monitor::MonitorError;
use crate::trace::routes;
use crate::trace::windows::WINDOWS_FILE;
use base64::Engine as _;
use hdrhistogram::serialization::{Serializer, V2Serializer};
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
    /// The prompt's tokens.
    pub prompt: &'a [u32],
    /// Hash of the tokens that a control run gave, if there is one.
    pub control: Option<&'a str>,
}

/// What a run gave.
pub struct RunResult {
    /// The record.
    pub record: RunRecord,
    /// Tokens and times.
    pub generation: Generation,
    /// The reader's counters at the end; `None` when nothing streamed.
    pub counters: Option<ReaderCounters>,
}

/// Runs `spec` on `model`. `on_token` sees every token as it is chosen and may end the text.
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
    let config = &spec.asked.config;
    if config.reference {
        reference::check(model)?;
    }
    let started = utc_now();
    let clock = Clock::start();
    let mut seen = Seen { prompt_control_tokens: control_tokens(model, spec.prompt), ..Seen::default() };
    let sample = spec.streamed.and_then(|(plan, mounts)| ResidencySample::open(plan, mounts));
    let before = sample.as_ref().and_then(ResidencySample::measure);
    let watch = Watch::start(spec.streamed.map_or(&[], |(_, mounts)| mounts));
    use_threads(model, config);
    let (calls, chunks) = (kernel_calls(&model.decoder), model.decoder.thread_chunks());
    let mut sampler = Sampler::new(config.sampler)?;
    let mut session =
        model.session(config.model.max_context, config.model.prefill_rows, config.reader.prefetch, clock)?;
    let mut tap = None;
    let monitor = start_monitor(spec, clock)?;
    let (generation, handle) = decode(model, spec, &mut session, &mut sampler, (&mut seen, &mut tap), on_token)?;
    let windows = monitor.map(RunMonitor::finish);
    seen.sampled = windows.as_ref().map(RunWindows::unwritten);
    let counters = handle.as_ref().map(ReaderHandle::counters);
    let after = sample.as_ref().and_then(ResidencySample::measure);
    seen.residency = before.zip(after);
    seen.sampler = sampler.counters();
    seen.widest_rows = session.counters().widest_rows;
    seen.guesses = session.counters().guesses;
    seen.guesses_made = session.counters().guesses_made;
    seen.context_used = session.position() as u64;
    // The model is shared between runs; only this run's products count.
    seen.kernel_calls =
        kernel_calls(&model.decoder).into_iter().zip(calls).map(|((i, a), (_, b))| (i, a - b)).collect();
    seen.thread_chunks = model.decoder.thread_chunks().iter().zip(&chunks).map(|(a, b)| a - b).collect();
    let mut trace = handle.as_ref().and_then(ReaderHandle::take_trace);
    let rates = counters.as_ref().map(|c| measured::rates(c, &config.reader.rates, trace.as_ref())).unwrap_or_default();
    let mut rejected = Vec::new();
    if let (Some(handle), Some(trace)) = (&handle, &mut trace) {
        let written =
            Written { tap: tap.as_ref(), rates: &rates, decode_ns: generation.decode_ns(), windows: windows.as_ref() };
        write_trace(model, spec, handle, trace, &written, (&mut seen, &mut rejected))?;
    }
    let verdict = verdict(&generation, handle.as_ref(), trace.as_ref(), &rates);
    let hash = token_hash(&generation.token_ids);
    // What was read for nothing came from the drives too.
    let read_bytes = counters.iter().flat_map(|c| &c.drives).map(|d| d.read_bytes + d.prefetch.wasted.bytes).sum();
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
    drop(session); // the reference arm has one of its own
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
        config_digest: model.manifest.config_digest.to_string(),
        plan_hash,
        started,
        rates: generation.rates(),
        prompt_tokens: generation.prompt_tokens,
        generated_tokens: generation.token_ids.len(),
        token_hash: hash,
        io_wait_share: generation.io_wait_share(),
        barrier_mean_ns: barrier_mean_ns(&generation, trace.as_ref()),
        prefill: seen.prefill_delivered.map(|d| prefill_record(&generation, d, model.manifest.expert_bytes)),
        verdict,
        reference: seen.reference.clone(),
        drives: counters.map(drive_records).unwrap_or_default(),
        emulated: counters.is_some_and(|c| c.drives.iter().any(|d| d.capabilities.emulated)),
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
    Ok(RunResult { record, generation, counters: seen.reader })
}

/// Gives the model's kernels the threads of a run; they stay until another run asks for others.
pub fn use_threads(model: &Model, config: &RunConfig) {
    let threads = match config.model.compute_threads() {
        _ if knob::skipped(Knob::Threads) => 1,
        threads => threads + usize::from(knob::forced(Knob::Threads)),
    };
    model.decoder.use_threads(threads);
}

/// Builds the source of experts that is asked for and generates; the handle is there when a reader was built.
fn decode(
    model: &Model,
    spec: &RunSpec<'_>,
    session: &mut Session,
    sampler: &mut Sampler,
    (seen, tap): (&mut Seen, &mut Option<RouteTap>),
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<(Generation, Option<ReaderHandle>), RunError> {
    let config = &spec.asked.config;
    let request = Request {
        prompt: spec.prompt,
        max_new: config.max_new,
        stop: &model.stop_ids,
        piece_rows: config.model.prefill_rows,
    };
    if !model.has_experts() {
        return Ok((generate(session, &mut NoExperts, sampler, request, on_token)?, None));
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
            let traced = config.trace.is_some() && !knob::skipped(Knob::Trace);
            trace_room(&mut options, model.decoder.config(), &request, mounts.len(), traced);
            if traced {
                *tap = Some(RouteTap::for_run(model.decoder.config(), &request));
            }
            let mut reader = model.reader(plan, mounts, &options, session.clock())?;
            let handle = reader.handle();
            let observer = tap.as_mut().map(|t| t as &mut dyn Observer);
            let mut at_first = None;
            let mut see = |token| {
                at_first.get_or_insert_with(|| handle.delivered());
                on_token(token)
            };
            let generation = generate_observed(session, &mut reader, sampler, request, &mut see, observer)?;
            seen.prefill_delivered = Some(at_first.unwrap_or_else(|| handle.delivered()));
            Ok((generation, Some(handle)))
        }
        None => {
            let mut memory = model.resident()?;
            let generation = generate(session, &mut memory, sampler, request, on_token)?;
            seen.resident_leases = memory.leases();
            Ok((generation, None))
        }
    }
}

/// Barriers of an untraced run that are kept for its verdict at most: some 45 MB, taken page by page as they fill.
const MAX_UNTRACED_BARRIERS: usize = 1 << 18;

/// Barriers that a run can cause at most, and, if it is traced, its reads, a quarter more for repeated ones.
fn trace_room(options: &mut ReaderOptions, config: &ModelConfig, request: &Request<'_>, drives: usize, traced: bool) {
    let (layers, moe) = (config.moe_layers().count(), config.moe.as_ref());
    let (experts, top_k) = moe.map_or((0, 0), |m| (m.experts, m.top_k));
    let passes = request.prompt.len().div_ceil(request.piece_rows.max(1));
    let widest = experts.min(request.piece_rows.min(request.prompt.len()).saturating_mul(top_k));
    let reads = (passes * layers).saturating_mul(widest).saturating_add(request.max_new.saturating_mul(layers * top_k));
    // A layer may be guessed anew from each layer that looks ahead to it.
    let guessed = match options.prefetch {
        PrefetchPolicy::None => 0,
        _ => reads.saturating_mul(options.prefetch_depth as usize),
    };
    let reads = reads.saturating_add(guessed);
    options.trace_barriers = passes.saturating_add(request.max_new).saturating_mul(layers).saturating_add(64);
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
    let routes = tap.map_or(0, |t| t.0.rows().len() as u64);
    seen.traced = Some(Traced { reads: trace.reads().len() as u64, barriers: trace.barriers().len() as u64, routes });
    if let Err(e) = trace.check_complete().and_then(|()| tap.map_or(Ok(()), |t| t.0.check_complete())) {
        rejected.push(e.to_string());
        return Ok(());
    }
    let Some(folder) = &spec.asked.config.trace else { return Ok(()) };
    if let Some((plan, _)) = spec.streamed {
        measured::fill_bounds(trace, plan, handle.drives(), written.rates)?;
    }
    let mut header = TraceHeader {
        decode_wall_ns: (written.decode_ns > 0).then_some(written.decode_ns),
        rates: written.rates.to_vec(),
        model_id: Some(model.manifest.model_id.clone()),
        ..TraceHeader::new(handle.drives().to_vec())
    };
    if let Some(tap) = tap {
        header.routes = routes::write(folder, &tap.0)?;
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

/// Where the time of decoding went.
fn verdict(
    generation: &Generation,
    handle: Option<&ReaderHandle>,
    trace: Option<&TraceBuffer>,
    rates: &[TraceRate],
) -> Option<Verdict> {
    match handle.zip(trace) {
        Some((handle, trace)) => measured::verdict(trace, handle.drives(), generation.decode_ns(), rates),
        None => Verdict::all_compute(generation.decode_ns()),
    }
}

fn prefill_record(generation: &Generation, delivered: Delivered, expert_bytes: u64) -> PrefillRecord {
    let (experts, distinct) = (generation.prefill_experts, generation.prefill_distinct);
    let Delivered { payload_bytes, wasted_bytes } = delivered;
    let needed = distinct.saturating_mul(expert_bytes);
    let amplification = (needed > 0).then(|| (payload_bytes + wasted_bytes) as f64 / needed as f64);
    PrefillRecord { experts, distinct, payload_bytes, wasted_bytes, amplification }
}

/// Control tokens of a prompt, a leading beginning-of-text not counted.
fn control_tokens(model: &Model, prompt: &[u32]) -> u64 {
    let own = usize::from(model.tokenizer.adds_bos() && prompt.first() == model.tokenizer.bos_id().as_ref());
    prompt[own..].iter().filter(|&&id| model.tokenizer.is_control(id)).count() as u64
}

/// Mean time from open to last arrival of the decode barriers where a trace tells, else the mean stall.
fn barrier_mean_ns(generation: &Generation, trace: Option<&TraceBuffer>) -> u64 {
    let decode = trace.into_iter().flat_map(TraceBuffer::barriers).filter(|b| b.phase == crate::source::Phase::Decode);
    let (count, sum) = decode.fold((0u64, 0u64), |(n, sum), b| (n + 1, sum + b.last_ns.saturating_sub(b.open_ns)));
    match (count, generation.decode_barriers) {
        (0, 0) => 0,
        (0, barriers) => generation.decode_stall_ns / barriers,
        (count, _) => sum / count,
    }
}

pub(super) fn drive_records(counters: &ReaderCounters) -> Vec<DriveRecord> {
    let record = |d: &DriveCounters| {
        let mut hdr = Vec::new();
        // An empty string says that the histogram could not be written; the quantiles beside it stand.
        let _ = V2Serializer::new().serialize(&d.clat_ns, &mut hdr);
        DriveRecord {
            name: d.name.clone(),
            reads: d.reads,
            payload_bytes: d.payload_bytes,
            read_bytes: d.read_bytes,
            landed_last: d.landed_last,
            replica_reads: d.non_primary_reads,
            prefetch_useful_bytes: d.prefetch.useful.bytes,
            prefetch_late_bytes: d.prefetch.late.bytes,
            prefetch_wasted_bytes: d.prefetch.wasted.bytes,
            clat_p50_ns: d.clat_ns.value_at_quantile(0.5),
            clat_p99_ns: d.clat_ns.value_at_quantile(0.99),
            emulated: d.capabilities.emulated,
            clat_hdr: base64::engine::general_purpose::STANDARD.encode(hdr),
        }
    };
    counters.drives.iter().map(record).collect()
}

fn mount_record(mount: &DriveSpec) -> MountRecord {
    MountRecord {
        name: mount.name.clone(),
        path: mount.path.clone(),
        device: identity_of(&mount.path),
        file_system: environment::file_system(&mount.path),
        emulate: emulated_as(mount),
    }
}

/// What a drive pretends to be, in words; later rates are left out.
pub(super) fn emulated_as(mount: &DriveSpec) -> Option<String> {
    mount.emulate.map(|e| {
        let link =
            e.link.map_or_else(String::new, |l| format!(", link {} {} B/s", l.name.as_str(), l.rate_bytes_per_s));
        format!(
            "rate {} B/s, latency {} ns, per read {} ns, jitter {}, seed {}{link}",
            e.rate_bytes_per_s, e.latency_ns, e.per_read_ns, e.jitter, e.seed
        )
    })
}
