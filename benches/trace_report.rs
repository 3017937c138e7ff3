//! How long a report over a long trace takes, from CSV and from Parquet: `cargo bench --bench trace_report -- <reads>`. Makes a
//! synthetic trace (no measurement of anything) of that many reads under `target/`, and leaves it there, so that
//! `argodrive trace report` can be timed on it as well. Knows nothing of drives.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use argodrive::ids::{DriveId, ExpertId, LayerId};
use argodrive::replay::join::Joiner;
use argodrive::replay::summary::{Summarizer, Summary, summarize};
use argodrive::source::Phase;
use argodrive::trace::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use argodrive::trace::log::{self, BARRIER_COLUMNS, READ_COLUMNS, TraceDrive, TraceHeader};
use argodrive::trace::parquet::{schema, write};
use argodrive::trace::stream::{RowWriter, Wanted, barriers, wanted_reads};
use std::path::{Path, PathBuf};
use std::time::Instant;

const DRIVES: u8 = 4;
const LAYERS: u64 = 92;
const WIDTH: u64 = 16;

fn main() {
    // cargo passes --bench; without a number this is only a smoke test
    let reads = std::env::args().skip(1).find_map(|a| a.parse::<u64>().ok()).unwrap_or(100_000);
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("trace-bench");
    let (csv, parquet) = (root.join("csv"), root.join("parquet"));
    std::fs::create_dir_all(&csv).unwrap();
    std::fs::create_dir_all(&parquet).unwrap();
    let header = TraceHeader::new((0..DRIVES).map(drive).collect());
    timed("made", || synthetic(&csv, &header, reads));
    timed("turned into Parquet", || {
        for table in [schema::reads(), schema::barriers()] {
            let done = write::convert(&csv, &parquet, &header, &table, false).unwrap();
            println!("{}: {} rows, {} -> {} bytes", table.name, done.rows, done.csv_bytes, done.parquet_bytes);
        }
        log::write_header(&parquet, &header).unwrap();
    });
    let from_csv = timed("reported from CSV", || report(&csv, &header));
    let from_parquet = timed("reported from Parquet", || report(&parquet, &header));
    assert_eq!(from_csv, from_parquet, "both forms say the same");
    println!("{reads} reads in {}; {} of them waited for", root.display(), from_csv.all.waited);
}

fn timed<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let value = run();
    println!("{what} in {:.2} s", begun.elapsed().as_secs_f64());
    value
}

fn report(folder: &Path, header: &TraceHeader) -> Summary {
    let drives = header.drives.len();
    let reads = wanted_reads(folder, drives, false, Wanted::Report).unwrap();
    let joiner = Joiner::new(reads, barriers(folder, drives, false).unwrap(), false);
    summarize(joiner, Summarizer::new(&header.drives, None, 10), None, &mut |_| Ok(())).unwrap()
}

fn drive(id: u8) -> TraceDrive {
    let name = format!("synthetic{id}");
    TraceDrive { id: DriveId(id), path: format!("/none/{name}").into(), name, emulated: true, device_number: 0 }
}

fn synthetic(folder: &Path, header: &TraceHeader, reads: u64) {
    let mut random = fastrand::Rng::with_seed(1);
    let mut read_file = RowWriter::create(&folder.join("reads.csv"), &READ_COLUMNS).unwrap();
    let mut barrier_file = RowWriter::create(&folder.join("barriers.csv"), &BARRIER_COLUMNS).unwrap();
    let mut now_ns = 1_000_000;
    for barrier in 0..reads.div_ceil(WIDTH) {
        let (step, layer) = (barrier / LAYERS, LayerId((barrier % LAYERS) as u16));
        let width = WIDTH.min(reads - barrier * WIDTH);
        let open_ns = now_ns;
        let mut events: Vec<ReadEvent> = (0..width)
            .map(|n| {
                let expert = random.u16(0..896);
                let queued_ns = open_ns + n * 300;
                let submitted_ns = queued_ns + random.u64(200..9000);
                ReadEvent {
                    step,
                    layer,
                    expert: ExpertId(expert),
                    drive: DriveId(random.u8(0..DRIVES)),
                    replica: 0,
                    part: 0,
                    parts: 1,
                    offset: u64::from(expert) * 17_547_264,
                    bytes: 17_547_264,
                    purpose: Purpose::Demand,
                    issued_in: barrier,
                    barrier: Some(barrier),
                    queued_ns,
                    submitted_ns,
                    completed_ns: submitted_ns + random.u64(900_000..4_000_000),
                    result: ReadResult::Ok,
                    outcome: Outcome::Demand,
                }
            })
            .collect();
        events.sort_by_key(|e| e.completed_ns);
        let (first, last) = (events[0], events[events.len() - 1]);
        events.iter().for_each(|e| read_file.push(e).unwrap());
        let record = BarrierRecord {
            barrier,
            step,
            phase: Phase::Decode,
            pos: step,
            rows: 1,
            layer,
            width: width as u32,
            hits: 0,
            prefetch_hits: 0,
            bytes: width * 17_547_264,
            open_ns,
            first_ns: first.completed_ns,
            last_ns: last.completed_ns,
            close_ns: last.completed_ns + 2000,
            stall_ns: last.completed_ns - open_ns,
            straggler: Some(last.drive),
            gap_drive_ns: 0,
            gap_read_ns: 0,
            bound_layout_ns: None,
            bound_drives_ns: None,
            cause: Cause::BigShare,
        };
        barrier_file.push(&record).unwrap();
        now_ns = record.close_ns + 1_000_000;
    }
    read_file.finish().unwrap();
    barrier_file.finish().unwrap();
    log::write_header(folder, header).unwrap();
}
