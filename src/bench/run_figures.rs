//! Figures of a run as its record has them: what each drive did, what a prompt read, where the time of decoding went. Measures
//! nothing.

use super::environment;
use super::record::{DriveRecord, MountRecord, PrefillRecord};
use crate::decode::generate::Generation;
use crate::drive::device::identity_of;
use crate::drive::spec::DriveSpec;
use crate::reader::{Delivered, DriveCounters, ReaderCounters, ReaderHandle};
use crate::replay::measured;
use crate::replay::verdict::Verdict;
use crate::trace::log::{TraceBuffer, TraceRate};
use base64::Engine as _;
use hdrhistogram::serialization::{Serializer, V2Serializer};

/// Where the time of decoding went.
pub(super) fn verdict(
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

pub(super) fn prefill_record(generation: &Generation, delivered: Delivered, expert_bytes: u64) -> PrefillRecord {
    let (experts, distinct) = (generation.prefill_experts, generation.prefill_distinct);
    let Delivered { payload_bytes, wasted_bytes } = delivered;
    let needed = distinct.saturating_mul(expert_bytes);
    let amplification = (needed > 0).then(|| (payload_bytes + wasted_bytes) as f64 / needed as f64);
    PrefillRecord { experts, distinct, payload_bytes, wasted_bytes, amplification }
}

/// Mean time from open to last arrival of the decode barriers where a trace tells, else the mean stall.
pub(super) fn barrier_mean_ns(generation: &Generation, trace: Option<&TraceBuffer>) -> u64 {
    let decode = trace.into_iter().flat_map(TraceBuffer::barriers).filter(|b| b.phase != crate::source::Phase::Prefill);
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

pub(super) fn mount_record(mount: &DriveSpec) -> MountRecord {
    MountRecord {
        name: mount.name.clone(),
        path: mount.path.clone(),
        device: identity_of(&mount.path),
        file_system: environment::file_system(&mount.path),
        emulate: emulated_as(mount),
        faults: mount.faults.iter().map(ToString::to_string).collect(),
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
