//! One measured run: a prompt, a plan, drives; out come text, rates and what each drive did. A run whose
//! measurement cannot be trusted comes back with its reasons in `rejected`; the caller decides what to do with it.

use super::environment;
use super::record::{DriveRecord, RECORD_VERSION, RunRecord, token_hash, utc_now};
use crate::clock::Clock;
use crate::decode::generate::{GenerateError, Generation, Request, generate};
use crate::decode::sampler::{Sampler, SamplerError, SamplerOptions};
use crate::drive::spec::DriveSpec;
use crate::layout::plan::{Plan, PlanError};
use crate::open::{Model, NoExperts, OpenError};
use crate::reader::{ReaderCounters, ReaderHandle, ReaderOptions};
use crate::trace::log::{self, TraceBuffer, TraceError, TraceHeader};
use std::ops::ControlFlow;
use std::path::Path;

/// A run whose emulated reads overran their deadline more often than this share is rejected (measuring.md section 7).
pub const MAX_OVERRUN_SHARE: f64 = 0.01;
/// Largest median error of an emulated pace against its model (measuring.md section 3).
pub const MAX_PACE_ERROR: f64 = 0.03;

/// A run failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It could not be put together.
    #[error(transparent)]
    Open(#[from] OpenError),
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
}

/// Where experts come from in a run.
#[derive(Clone, Copy, Debug)]
pub enum Experts<'a> {
    /// Streaming from drives.
    Drives {
        /// The plan.
        plan: &'a Plan,
        /// Where its drives are, in id order.
        mounts: &'a [DriveSpec],
        /// The reader's options.
        options: &'a ReaderOptions,
    },
    /// All in memory.
    Resident,
}

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct RunSpec<'a> {
    /// What the record calls it.
    pub arm: &'a str,
    /// Where experts come from.
    pub experts: Experts<'a>,
    /// What to generate.
    pub request: Request<'a>,
    /// How to choose tokens.
    pub sampler: SamplerOptions,
    /// Most tokens of text (0 = what the model was made for).
    pub max_context: usize,
    /// Where to write the trace, if anywhere (`ReaderOptions::trace_reads` must leave room for it).
    pub trace: Option<&'a Path>,
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
    let started = utc_now();
    let clock = Clock::start();
    let mut sampler = Sampler::new(spec.sampler)?;
    let mut session = model.session(spec.max_context, spec.request.piece_rows, clock)?;
    let mut handle = None;
    let generation = match spec.experts {
        Experts::Drives { plan, mounts, options } if model.has_experts() => {
            let mut reader = model.reader(plan, mounts, options, clock)?;
            handle = Some(reader.handle());
            generate(&mut session, &mut reader, &mut sampler, spec.request, on_token)?
        }
        Experts::Resident if model.has_experts() => {
            let mut memory = model.resident()?;
            generate(&mut session, &mut memory, &mut sampler, spec.request, on_token)?
        }
        _ => generate(&mut session, &mut NoExperts, &mut sampler, spec.request, on_token)?,
    };
    let counters = handle.as_ref().map(ReaderHandle::counters);
    let trace = handle.as_ref().and_then(ReaderHandle::take_trace);
    let mut rejected = counters.as_ref().map(pace_faults).unwrap_or_default();
    if let (Some(folder), Some(handle), Some(trace)) = (spec.trace, &handle, &trace) {
        match trace.check_complete() {
            Ok(()) => log::write(folder, &TraceHeader::new(handle.drives().to_vec()), trace)?,
            Err(e) => rejected.push(e.to_string()),
        }
    }
    let record = RunRecord {
        version: RECORD_VERSION,
        arm: spec.arm.to_string(),
        model_id: model.manifest.model_id.clone(),
        plan_hash: match spec.experts {
            Experts::Drives { plan, .. } => plan.hash()?,
            Experts::Resident => String::new(),
        },
        started,
        rates: generation.rates(),
        prompt_tokens: generation.prompt_tokens,
        generated_tokens: generation.token_ids.len(),
        token_hash: token_hash(&generation.token_ids),
        io_wait_share: generation.io_wait_share(),
        barrier_mean_ns: barrier_mean_ns(&generation, trace.as_ref()),
        drives: counters.as_ref().map(drive_records).unwrap_or_default(),
        emulated: counters.as_ref().is_some_and(|c| c.drives.iter().any(|d| d.capabilities.emulated)),
        rejected,
        environment: environment::read(),
    };
    Ok(RunResult { record, generation, counters })
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

/// Why an emulated pace makes the run worthless, if it does.
fn pace_faults(counters: &ReaderCounters) -> Vec<String> {
    let mut out = Vec::new();
    for drive in &counters.drives {
        let Some(pace) = &drive.pace else { continue };
        if pace.overrun_share() > MAX_OVERRUN_SHARE {
            out.push(format!(
                "emulated drive {}: {:.1} % of its reads took longer on the backing disk than the pace allows (limit {:.0} %): \
                 the backing disk is too slow for this pace",
                drive.name,
                pace.overrun_share() * 100.0,
                MAX_OVERRUN_SHARE * 100.0
            ));
        }
        if pace.error_p50() > MAX_PACE_ERROR {
            out.push(format!(
                "emulated drive {}: median error of its pace is {:.1} % (limit {:.0} %): this machine is too busy to emulate it",
                drive.name,
                pace.error_p50() * 100.0,
                MAX_PACE_ERROR * 100.0
            ));
        }
    }
    out
}

fn drive_records(counters: &ReaderCounters) -> Vec<DriveRecord> {
    let record = |d: &crate::reader::DriveCounters| DriveRecord {
        name: d.name.clone(),
        reads: d.reads,
        payload_bytes: d.payload_bytes,
        read_bytes: d.read_bytes,
        landed_last: d.landed_last,
        replica_reads: d.non_primary_reads,
        clat_p50_ns: d.clat_ns.value_at_quantile(0.5),
        clat_p99_ns: d.clat_ns.value_at_quantile(0.99),
        emulated: d.capabilities.emulated,
    };
    counters.drives.iter().map(record).collect()
}
