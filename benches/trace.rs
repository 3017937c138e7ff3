//! What tracing costs: nanoseconds for one read event and one barrier record put into the buffers of a run. Trace cost
//! (results/samples/trace-cost.md) = events x this / decode time.
#![allow(missing_docs)]

use argodrive::ids::{DriveId, ExpertId, LayerId};
use argodrive::source::Phase;
use argodrive::trace::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use argodrive::trace::log::{TraceBuffer, TraceCapacity};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

/// Events of one measured batch: about two generated tokens of a model with 92 layers and 16 experts a layer.
const EVENTS: usize = 4096;

fn event(at: u64) -> ReadEvent {
    ReadEvent {
        step: at / 64,
        layer: LayerId((at % 60) as u16),
        expert: ExpertId((at % 256) as u16),
        drive: DriveId((at % 4) as u8),
        replica: 0,
        part: 0,
        parts: 1,
        offset: at * 16_384,
        bytes: 16_384,
        purpose: Purpose::Demand,
        issued_in: at / 16,
        barrier: Some(at / 16),
        queued_ns: at * 100,
        submitted_ns: at * 100 + 10,
        completed_ns: at * 100 + 50,
        result: ReadResult::Ok,
        outcome: Outcome::Demand,
    }
}

fn push(c: &mut Criterion) {
    let empty = || TraceBuffer::with_capacity(TraceCapacity { reads: EVENTS, barriers: EVENTS });
    let mut group = c.benchmark_group("trace");
    group.throughput(Throughput::Elements(EVENTS as u64));
    let events: Vec<ReadEvent> = (0..EVENTS as u64).map(event).collect();
    group.bench_function("push_read", |b| {
        b.iter_batched_ref(
            empty,
            |buffer| events.iter().for_each(|e| buffer.push_read(*black_box(e))),
            BatchSize::LargeInput,
        );
    });
    let record = BarrierRecord {
        barrier: 7,
        step: 1,
        phase: Phase::Decode,
        pos: 40,
        rows: 1,
        layer: LayerId(3),
        width: 8,
        hits: 0,
        prefetch_hits: 0,
        bytes: 131_072,
        open_ns: 1000,
        first_ns: 2000,
        last_ns: 3000,
        close_ns: 4000,
        stall_ns: 2000,
        straggler: Some(DriveId(1)),
        gap_drive_ns: 300,
        gap_read_ns: 100,
        bound_layout_ns: None,
        bound_drives_ns: None,
        cause: Cause::BigShare,
    };
    group.bench_function("push_barrier", |b| {
        b.iter_batched_ref(
            empty,
            |buffer| (0..EVENTS).for_each(|_| buffer.push_barrier(*black_box(&record))),
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

criterion_group!(benches, push);
criterion_main!(benches);
