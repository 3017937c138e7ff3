//! A trace as trace-event JSON, which Perfetto and Chrome's trace viewer open: one process per drive with reads as
//! slices, one process with barriers as slices, and an arrow from each read to the barrier that needed it.
//!
//! Slices of one thread must not overlap, so a drive's reads lie in lanes: each goes to the first lane that is free when
//! it is handed over. Everything is written as it passes by; only the lanes' ends are kept.

use crate::replay::ReplayError;
use crate::replay::join::{BarrierSource, Joiner};
use crate::trace::events::{BarrierRecord, ReadEvent, ReadResult};
use crate::trace::log::TraceDrive;
use crate::trace::stream::{CAUSES, Growing, OUTCOMES, PHASES, PURPOSES, RESULTS, word_of};
use serde_json::{Value, json};
use std::io::{self, Write};

/// Lanes of one drive; with more reads under way, slices overlap in the last one.
const MAX_LANES: usize = 1024;
/// Process of the barriers; drive `d` is process `d + 2`.
const BARRIERS_PID: usize = 1;

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Exported {
    /// Reads.
    pub reads: u64,
    /// Barriers.
    pub barriers: u64,
    /// Arrows from a read to a barrier.
    pub arrows: u64,
}

struct Events<'a> {
    out: &'a mut Growing,
    first: bool,
    lanes: Vec<Vec<u64>>,
    done: Exported,
}

/// Writes everything that `joiner` gives to `out`.
pub fn export<B: BarrierSource>(
    joiner: &mut Joiner<B>,
    drives: &[TraceDrive],
    out: &mut Growing,
) -> Result<Exported, ReplayError> {
    let mut events = Events { out, first: true, lanes: vec![Vec::new(); drives.len()], done: Exported::default() };
    let fail = |events: &Events<'_>, e| ReplayError::Trace(events.out.io(e));
    events.begin(drives).map_err(|e| fail(&events, e))?;
    let mut reads = Vec::new();
    loop {
        let mut result = Ok(());
        let record = joiner.next_barrier(&mut reads, &mut |read| {
            if result.is_ok() {
                result = events.read(read).map(|_| ());
            }
        })?;
        result.map_err(|e| fail(&events, e))?;
        let Some(record) = record else { break };
        reads.sort_unstable_by_key(|r| (r.submitted_ns, r.completed_ns));
        events.barrier(&record, &reads).map_err(|e| fail(&events, e))?;
    }
    events.out.write_all(b"\n]}\n").map_err(|e| fail(&events, e))?;
    Ok(events.done)
}

impl Events<'_> {
    fn begin(&mut self, drives: &[TraceDrive]) -> io::Result<()> {
        self.out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        self.name("process_name", BARRIERS_PID, 0, "barriers")?;
        self.name("thread_name", BARRIERS_PID, 0, "barriers")?;
        for (id, drive) in drives.iter().enumerate() {
            let label = if drive.emulated { format!("{} (emulated)", drive.name) } else { drive.name.clone() };
            self.name("process_name", id + 2, 0, &format!("drive {label}"))?;
        }
        Ok(())
    }

    fn event(&mut self, value: &Value) -> io::Result<()> {
        self.out.write_all(if self.first { b"\n" } else { b",\n" })?;
        self.first = false;
        serde_json::to_writer(&mut self.out, value).map_err(io::Error::from)
    }

    fn name(&mut self, kind: &str, pid: usize, tid: usize, name: &str) -> io::Result<()> {
        self.event(&json!({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}))
    }

    /// Writes a read; gives its thread, unless it was never handed over.
    fn read(&mut self, read: &ReadEvent) -> io::Result<Option<(usize, usize)>> {
        if read.submitted_ns == 0 && read.result != ReadResult::Ok {
            return Ok(None);
        }
        let pid = read.drive.index() + 2;
        let end_ns = read.completed_ns.max(read.submitted_ns);
        let Some(lanes) = self.lanes.get_mut(read.drive.index()) else { return Ok(None) };
        let free = lanes.iter().position(|busy_until| *busy_until <= read.submitted_ns);
        let lane = free.unwrap_or(lanes.len()).min(MAX_LANES - 1);
        if lane == lanes.len() {
            lanes.push(end_ns);
            self.name("thread_name", pid, lane, &format!("reads {lane}"))?;
        } else {
            lanes[lane] = lanes[lane].max(end_ns);
        }
        self.done.reads += 1;
        let value = json!({
            "ph": "X", "cat": word_of(&PURPOSES, read.purpose), "pid": pid, "tid": lane,
            "name": format!("L{} E{}", read.layer.0, read.expert.0),
            "ts": micros(read.submitted_ns), "dur": micros(end_ns - read.submitted_ns),
            "args": {
                "step": read.step, "barrier": read.barrier, "issued_in": read.issued_in, "part": read.part,
                "parts": read.parts, "bytes": read.bytes, "offset": read.offset, "replica": read.replica,
                "queued_us": micros(read.submitted_ns.saturating_sub(read.queued_ns)),
                "result": word_of(&RESULTS, read.result), "outcome": word_of(&OUTCOMES, read.outcome),
            },
        });
        self.event(&value)?;
        Ok(Some((pid, lane)))
    }

    fn barrier(&mut self, record: &BarrierRecord, reads: &[ReadEvent]) -> io::Result<()> {
        let end_ns = record.close_ns.max(record.last_ns).max(record.open_ns);
        self.done.barriers += 1;
        let value = json!({
            "ph": "X", "cat": word_of(&PHASES, record.phase), "pid": BARRIERS_PID, "tid": 0,
            "name": format!("L{}", record.layer.0),
            "ts": micros(record.open_ns), "dur": micros(end_ns - record.open_ns),
            "args": {
                "barrier": record.barrier, "step": record.step, "width": record.width, "bytes": record.bytes,
                "cause": word_of(&CAUSES, record.cause), "straggler": record.straggler,
                "stall_us": micros(record.stall_ns), "gap_drive_us": micros(record.gap_drive_ns),
                "gap_read_us": micros(record.gap_read_ns),
            },
        });
        self.event(&value)?;
        for read in reads {
            let Some((pid, lane)) = self.read(read)? else { continue };
            if read.result != ReadResult::Ok || end_ns == record.open_ns || read.completed_ns == read.submitted_ns {
                continue;
            }
            self.done.arrows += 1;
            let id = self.done.arrows;
            // an arrow binds to the slice that encloses its time, and a slice does not enclose its own end
            let from = json!({"ph": "s", "cat": "needs", "name": "needs", "id": id, "pid": pid, "tid": lane,
                "ts": micros(read.completed_ns - 1)});
            self.event(&from)?;
            let at_ns = read.completed_ns.clamp(record.open_ns, end_ns - 1);
            let to = json!({"ph": "f", "bp": "e", "cat": "needs", "name": "needs", "id": id, "pid": BARRIERS_PID,
                "tid": 0, "ts": micros(at_ns)});
            self.event(&to)?;
        }
        Ok(())
    }
}

/// Microseconds, the unit of the format. Exact for traces of up to 104 days.
fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}
