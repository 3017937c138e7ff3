//! Did every setting fire? Pairs each knob with what the code that carries it out counted (measuring.md section 3) and
//! gives a verdict. The configuration is taken apart exhaustively here, so a knob without evidence does not compile.

use super::config::{ModelOptions, RunConfig};
use super::kv::KvOptions;
use super::seen::Seen;
use super::snapshots::SnapshotOptions;
use super::{
    evidence_ahead as ahead, evidence_decode as decode, evidence_draft as draft, evidence_faults as faulty,
    evidence_kv, evidence_reader as reader, evidence_snapshot as snapshot, evidence_trunk,
};
use crate::decode::SpeculateOptions;
use crate::decode::sampler::SamplerOptions;
use crate::drive::spec::DriveSpec;
use crate::knob::Knob;
use crate::layout::plan::Plan;
use crate::reader::ReaderOptions;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What the evidence says about a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It did what was asked; off did nothing.
    Proved,
    /// Something else happened.
    Contradicted,
    /// Nothing seen decides it, e.g. a limit that was never reached.
    Unverified,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// The setting.
    pub name: String,
    /// What was asked for.
    pub asked: String,
    /// What was seen.
    pub seen: String,
    /// The verdict.
    pub verdict: Verdict,
    /// Whether the run only counts if this is proved.
    pub under_test: bool,
}

/// A judgement: what was asked, the verdict, what was seen.
pub(super) type Judged = (String, Verdict, String);

/// What the judges look at.
pub(super) struct Case<'a> {
    /// The plan and where its drives are; `None` when nothing was to stream.
    pub streamed: Option<(&'a Plan, &'a [DriveSpec])>,
    /// The facts.
    pub seen: &'a Seen,
}

/// Judges every knob of a run.
pub fn judge(
    config: &RunConfig,
    streamed: Option<(&Plan, &[DriveSpec])>,
    seen: &Seen,
    under_test: &BTreeSet<Knob>,
) -> Vec<Evidence> {
    let case = &Case { streamed, seen };
    // Taken apart without `..`: a new knob must be given its evidence below before this compiles.
    let RunConfig {
        store: _,  // input, identified in the record by model id
        plan: _,   // judged as the layout
        drives: _, // judged as the layout
        resident,
        trace,
        reference,
        monitor,
        prompt: _,      // input, recorded
        prompt_file: _, // input, recorded
        prompts: _,     // input, recorded
        special,
        max_new,
        under_test: _, // decides what must be proved; nothing to prove itself
        sampler: SamplerOptions { temperature, top_p, top_k, seed },
        model: ModelOptions { kernels, activations, threads, trunk, affinity, parallel, prefill_rows, max_context },
        draft:
            SpeculateOptions {
                speculate,
                draft_model: _, // input, identified in the record by its own id
                draft_depth,
                draft_policy,
                draft_accept,
                draft_window,
            },
        snapshot:
            SnapshotOptions {
                snapshot_every,
                snapshot_dir: _, // where its files go, in the record
                resume,
            },
        kv: KvOptions {
            kv_ram_bytes,
            kv_dir: _, // where its file is, in the record
        },
        reader:
            ReaderOptions {
                engine,
                sqpoll,
                queue_depth,
                buffer_bytes,
                dispatch,
                hedge_after_permille,
                rates,
                direct,
                allow_buffered: _, // lets a run go on; the fallback itself contradicts `direct`
                verify_digests,
                read_timeout_ms,
                prefetch,
                prefetch_depth,
                prefetch_experts,
                prefetch_queue_depth,
                prefetch_pool,
                prefetch_dispatch,
                prefetch_governor,
                prefetch_table: _, // input of the policy
                cache_bytes,
                cache_policy,
                cache_heat: _, // input of the policy
                shed,
                max_read_bytes_per_s,
                duty_permille,
                faults,
                stage_arguments: _, // words of a message
                demand_reserve: _,  // set by the run from the model
                trace_reads: _,     // sized by the run for `trace`
                trace_barriers: _,  // sized by the run for `trace`
            },
    } = config;
    let drafting = config.draft.is_on();
    let one = |&knob: &Knob| {
        let (asked, verdict, seen) = match knob {
            Knob::Layout => reader::layout(case),
            Knob::Replicas => reader::replicas(case),
            Knob::Dispatch => reader::dispatch(case, *dispatch),
            Knob::Split => reader::split(case, *dispatch),
            Knob::Hedge => reader::hedge(case, *hedge_after_permille),
            Knob::Engine => reader::engine(case, *engine),
            Knob::Sqpoll => reader::sqpoll(case, *sqpoll),
            Knob::Rates => reader::rates(case, rates),
            Knob::QueueDepth => reader::queue_depth(case, *queue_depth),
            Knob::BufferBytes => reader::buffer_bytes(case, *buffer_bytes),
            Knob::Direct => reader::direct(case, *direct),
            Knob::VerifyDigests => reader::verify_digests(case, *verify_digests),
            Knob::ReadTimeout => reader::read_timeout(case, *read_timeout_ms),
            Knob::Faults => faulty::faults(case, faults),
            Knob::Shed => faulty::shed(case, shed.acts(*dispatch)),
            Knob::MaxReadRate => faulty::max_read_rate(case, *max_read_bytes_per_s),
            Knob::Duty => faulty::duty(case, *duty_permille),
            Knob::Prefetch => ahead::prefetch(case, *prefetch),
            Knob::PrefetchDepth => ahead::depth(case, *prefetch_depth, *prefetch),
            Knob::PrefetchExperts => ahead::experts(case, *prefetch_experts),
            Knob::PrefetchQueueDepth => ahead::queue_depth(case, *prefetch_queue_depth),
            Knob::PrefetchPool => ahead::pool(case, *prefetch_pool, *prefetch),
            Knob::PrefetchDispatch => ahead::dispatch(case, *prefetch_dispatch, *dispatch, *prefetch),
            Knob::PrefetchGovernor => ahead::governor(case, *prefetch_governor),
            Knob::CacheBytes => ahead::cache_bytes(case, *cache_bytes),
            Knob::CachePolicy => ahead::cache_policy(case, *cache_policy),
            Knob::Pace => reader::pace(case),
            Knob::Link => reader::link(case),
            Knob::Resident => decode::resident(case, *resident),
            Knob::Kernels => decode::kernels(case, kernels),
            Knob::Activations => decode::activations(case, *activations),
            Knob::Threads => decode::threads(case, *threads, affinity),
            Knob::Trunk => evidence_trunk::residency(case, *trunk),
            Knob::Affinity => evidence_trunk::affinity(case, affinity),
            Knob::Parallel => decode::parallel(case, *parallel),
            Knob::PrefillRows => decode::prefill_rows(case, *prefill_rows),
            Knob::Speculate => draft::speculate(case, *speculate),
            Knob::DraftDepth => draft::depth(case, *draft_depth, drafting),
            Knob::DraftPolicy => draft::policy(case, *draft_policy, drafting),
            Knob::DraftAccept => draft::accept(case, *draft_accept, *temperature, drafting),
            Knob::DraftWindow => evidence_kv::window(case, *draft_window),
            Knob::MaxContext => decode::max_context(case, *max_context),
            Knob::KvRam => evidence_kv::ram(case, *kv_ram_bytes),
            Knob::MaxNew => decode::max_new(case, *max_new),
            Knob::Temperature => decode::temperature(case, *temperature),
            Knob::TopP => decode::top_p(case, *top_p),
            Knob::TopK => decode::top_k(case, *top_k),
            Knob::Seed => decode::seed(case, *seed),
            Knob::Special => decode::special(case, *special),
            Knob::Trace => decode::trace(case, trace.is_some()),
            Knob::Reference => decode::reference(case, *reference),
            Knob::Monitor => decode::monitor(case, trace.is_some() && *monitor),
            Knob::SnapshotEvery => snapshot::every(case, *snapshot_every, config.draft.rows()),
            Knob::Resume => snapshot::resume(case, resume.is_some()),
        };
        Evidence { name: knob.name().into(), asked, seen, verdict, under_test: under_test.contains(&knob) }
    };
    Knob::ALL.iter().map(one).collect()
}

/// Why a run does not count: settings under test that are not proved, and anything contradicted.
pub fn objections(evidence: &[Evidence]) -> Vec<String> {
    evidence
        .iter()
        .filter_map(|e| match e.verdict {
            Verdict::Contradicted => Some(format!("{}: contradicted: asked {}, {}", e.name, e.asked, e.seen)),
            Verdict::Unverified if e.under_test => {
                Some(format!("{}: unverified: asked {}, {}", e.name, e.asked, e.seen))
            }
            _ => None,
        })
        .collect()
}

/// Verdict on a limit: proved when it was reached and something waited for it, contradicted when it was exceeded.
pub(super) fn limit(reached: bool, waited: bool, exceeded: bool) -> Verdict {
    match (exceeded, reached && waited) {
        (true, _) => Verdict::Contradicted,
        (false, true) => Verdict::Proved,
        (false, false) => Verdict::Unverified,
    }
}

/// Verdict on a switch: on must have fired, off must not.
pub(super) fn switch(on: bool, fired: bool) -> Verdict {
    if on == fired { Verdict::Proved } else { Verdict::Contradicted }
}

/// `on` or `off`.
pub(super) fn on_off(on: bool) -> String {
    if on { "on".into() } else { "off".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_any_facts_nothing_about_reading_is_proved() {
        let evidence = judge(&RunConfig::default(), None, &Seen::default(), &BTreeSet::new());
        assert_eq!(evidence.len(), Knob::ALL.len());
        for name in ["layout", "dispatch", "queue_depth", "direct", "pace"] {
            let e = evidence.iter().find(|e| e.name == name).unwrap();
            assert_eq!(e.verdict, Verdict::Unverified, "{name}");
        }
    }

    #[test]
    fn only_settings_under_test_must_be_proved_but_nothing_may_be_contradicted() {
        let line = |verdict, under_test| Evidence {
            name: "x".into(),
            asked: "1".into(),
            seen: "2".into(),
            verdict,
            under_test,
        };
        assert!(objections(&[line(Verdict::Unverified, false), line(Verdict::Proved, true)]).is_empty());
        assert_eq!(objections(&[line(Verdict::Unverified, true)]).len(), 1);
        assert_eq!(objections(&[line(Verdict::Contradicted, false)]).len(), 1);
    }

    #[test]
    fn a_limit_is_proved_only_when_it_bound() {
        assert_eq!(limit(true, true, false), Verdict::Proved);
        assert_eq!(limit(true, false, false), Verdict::Unverified);
        assert_eq!(limit(false, true, false), Verdict::Unverified);
        assert_eq!(limit(true, true, true), Verdict::Contradicted);
    }
}
