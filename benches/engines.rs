//! Engine speed beside fio's, on the same file, with the same block size and depth, past the page cache, interleaved
//! run by run: `cargo bench --bench engines -- --file FILE [--mib 1024] [--repetitions 8] [--only uring]
//! [--block 1024|26]`. FILE is made if it is not
//! there (1 GiB). Prints a Markdown table of ratios to fio in the same round, and CPU seconds per GiB. Needs `fio`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::clock::Clock;
use argodrive::io::buffered::BufferedEngine;
use argodrive::io::mmap::MmapEngine;
use argodrive::io::psync::PsyncEngine;
use argodrive::io::uring::{UringEngine, UringOptions};
use argodrive::io::{IoEngine, ReadOutcome, ReadRequest, Signal, Slab};
use argodrive::sys::cache::drop_pages;
use argodrive::sys::direct::open_direct;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const FILE_BYTES: u64 = 1 << 30;
const GIB: f64 = (1u64 << 30) as f64;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Shape {
    /// `depth` reads in flight all the time.
    Steady,
    /// `depth` reads, wait for all, the next `depth`.
    Barrier,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Runner {
    Fio,
    /// fio with registered buffers and files, as our ring has them.
    FioFixed,
    Uring,
    UringSqpoll,
    Psync,
    Mmap,
    Buffered,
}

impl Runner {
    fn name(self) -> &'static str {
        match self {
            Runner::Fio => "fio io_uring",
            Runner::FioFixed => "fio io_uring, fixedbufs, registerfiles",
            Runner::Uring => "io-uring",
            Runner::UringSqpoll => "io-uring, sqpoll",
            Runner::Psync => "psync",
            Runner::Mmap => "mmap",
            Runner::Buffered => "buffered",
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    block: u64,
    depth: u32,
    shape: Shape,
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Seen {
    bytes_per_s: f64,
    cpu_s_per_gib: f64,
}

fn cpu_s() -> f64 {
    // SAFETY: the pointer is to a live struct, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let s = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    s(usage.ru_utime) + s(usage.ru_stime)
}

fn fio(file: &Path, case: Case, fixed: bool, seed: u64) -> Seen {
    let (depth, n) = (case.depth, case.depth);
    let mut command = Command::new("fio");
    command.args(["--name=a", "--rw=randread", "--direct=1", "--ioengine=io_uring", "--norandommap=1", "--readonly"]);
    command.args(["--output-format=json", "--allow_file_create=0", "--size=1g"]);
    command.arg(format!("--filename={}", file.display())).arg(format!("--bs={}", case.block));
    command.arg(format!("--io_size={}", case.bytes)).arg(format!("--iodepth={depth}"));
    command.arg(format!("--randseed={seed}"));
    if case.shape == Shape::Barrier {
        command.arg(format!("--iodepth_batch_submit={n}")).arg(format!("--iodepth_batch_complete_min={n}"));
        command.arg(format!("--iodepth_batch_complete_max={n}")).arg("--iodepth_low=1");
    }
    if fixed {
        command.args(["--fixedbufs=1", "--registerfiles=1"]);
    }
    let out = command.output().expect("fio is not installed");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let job = &json["jobs"][0];
    let bytes = job["read"]["io_bytes"].as_f64().unwrap();
    let seconds = job["read"]["runtime"].as_f64().unwrap() / 1e3;
    let job_s = job["job_runtime"].as_f64().unwrap() / 1e3;
    let cpu = (job["usr_cpu"].as_f64().unwrap() + job["sys_cpu"].as_f64().unwrap()) / 100.0 * job_s;
    Seen { bytes_per_s: bytes / seconds, cpu_s_per_gib: cpu * GIB / bytes }
}

fn ours(path: &Path, case: Case, runner: Runner, seed: u64) -> Seen {
    let direct = !matches!(runner, Runner::Mmap | Runner::Buffered);
    let file = if direct { open_direct(path).unwrap().file } else { File::open(path).unwrap() };
    if !direct {
        drop_pages(&file, 0, FILE_BYTES).unwrap();
    }
    let (signal, clock, depth) = (Arc::new(Signal::default()), Clock::start(), case.depth);
    // Steady: as many again wait in the engine, which keeps `depth` at the drive, as the reader does with a wide barrier.
    let slots = if case.shape == Shape::Steady { 2 * depth } else { depth };
    let slab = Slab::new(slots, case.block, Arc::clone(&signal)).unwrap();
    let ring = |sqpoll| UringOptions { sqpoll, shared: false };
    let files = vec![file];
    let mut engine: Box<dyn IoEngine> = match runner {
        Runner::Uring => {
            Box::new(UringEngine::new(files, &slab, depth, slab.slots(), ring(false), signal, clock).unwrap())
        }
        Runner::UringSqpoll => {
            Box::new(UringEngine::new(files, &slab, depth, slab.slots(), ring(true), signal, clock).unwrap())
        }
        Runner::Psync => Box::new(PsyncEngine::new(files, depth, slots, signal, clock).unwrap()),
        Runner::Mmap => Box::new(MmapEngine::new(files, depth, slots, signal, clock).unwrap()),
        Runner::Buffered => Box::new(BufferedEngine::new(files, depth, slots, signal, clock).unwrap()),
        Runner::Fio | Runner::FioFixed => unreachable!(),
    };
    let blocks = FILE_BYTES / case.block;
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut batch, mut out) = (Vec::with_capacity(slots as usize), Vec::with_capacity(slots as usize));
    let reads = (case.bytes / case.block) / u64::from(depth) * u64::from(depth);
    let (mut issued, mut ended) = (0, 0);
    let min = if case.shape == Shape::Barrier { depth as usize } else { 1 };
    let len = u32::try_from(case.block).unwrap();
    let (start, cpu) = (Instant::now(), cpu_s());
    let mut said = Duration::from_secs(10);
    while ended < reads {
        while issued < reads
            && let Some(slot) = slab.take()
        {
            let offset = rng.u64(..blocks) * case.block;
            batch.push(ReadRequest { tag: u64::from(slot.index()), file: 0, offset, len, need: len, slot });
            issued += 1;
        }
        engine.submit(&mut batch);
        let left = usize::try_from(reads - ended).unwrap();
        engine.reap(min.min(left), Instant::now() + Duration::from_secs(10), &mut out);
        if start.elapsed() > said {
            eprintln!(
                "{runner:?} {case:?}: {ended} of {reads} reads after {said:?}: {:?}",
                engine.counters().snapshot()
            );
            said *= 2;
        }
        for done in out.drain(..) {
            assert_eq!(done.outcome, ReadOutcome::Done { bytes: len });
            ended += 1;
        }
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_s() - cpu);
    let bytes = (reads * case.block) as f64;
    Seen { bytes_per_s: bytes / seconds, cpu_s_per_gib: cpu * GIB / bytes }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len() % 2 == 1 { values[half] } else { (values[half - 1] + values[half]) / 2.0 }
}

fn make_file(path: &Path) {
    if std::fs::metadata(path).is_ok_and(|m| m.len() == FILE_BYTES) {
        return;
    }
    let mut file = File::create(path).unwrap();
    let mut rng = fastrand::Rng::with_seed(1);
    let mut block = vec![0u8; 1 << 20];
    for _ in 0..FILE_BYTES >> 20 {
        rng.fill(&mut block);
        file.write_all(&block).unwrap();
    }
    file.sync_all().unwrap();
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if !args.iter().any(|a| a == "--bench") {
        return; // `cargo test` only wants to know that it builds
    }
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|at| args.get(at + 1)).cloned();
    let path = PathBuf::from(value("--file").unwrap_or_else(|| "target/engines-bench.data".into()));
    let bytes = value("--mib").map_or(1024, |v| v.parse::<u64>().unwrap()) << 20;
    let repetitions: usize = value("--repetitions").map_or(8, |v| v.parse().unwrap());
    let only = value("--only");
    make_file(&path);
    println!(
        "| block | depth | shape | engine | MiB/s | rate / fio (quartiles) | rate / fio fixed | CPU s/GiB | CPU / fio | CPU / fio fixed |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let kib = value("--block").map(|v| v.parse::<u64>().unwrap() << 10);
    for block in [1u64 << 20, 26 << 10].into_iter().filter(|b| kib.is_none_or(|k| k == *b)) {
        for shape in [Shape::Steady, Shape::Barrier] {
            for depth in [4u32, 16, 32] {
                let case = Case { block, depth, shape, bytes };
                let mut runners =
                    vec![Runner::Fio, Runner::Uring, Runner::FioFixed, Runner::Psync, Runner::UringSqpoll];
                if shape == Shape::Steady {
                    runners.extend([Runner::Mmap, Runner::Buffered]);
                }
                if only.as_deref() == Some("uring") {
                    runners.truncate(3);
                }
                measure(&path, case, &runners, repetitions);
            }
        }
    }
}

fn measure(path: &Path, case: Case, runners: &[Runner], repetitions: usize) {
    let mut seen: Vec<Vec<Seen>> = vec![Vec::new(); runners.len()];
    for round in 0..=repetitions {
        // Shuffled, so that nobody always follows the same neighbour; the first round warms up.
        let mut order: Vec<usize> = (0..runners.len()).collect();
        fastrand::shuffle(&mut order);
        for at in order {
            // Never the same places twice: a disk behind a cache would favour whoever comes second.
            let seed = fastrand::u64(1..1 << 40);
            let one = match runners[at] {
                Runner::Fio => fio(path, case, false, seed),
                Runner::FioFixed => fio(path, case, true, seed),
                runner => ours(path, case, runner, seed),
            };
            if round > 0 {
                seen[at].push(one);
            }
        }
    }
    let ratios = |at: usize, to: usize, of: &dyn Fn(&Seen) -> f64| -> Vec<f64> {
        seen[at].iter().zip(&seen[to]).map(|(a, b)| of(a) / of(b)).collect()
    };
    let fixed = runners.iter().position(|r| *r == Runner::FioFixed).unwrap();
    for (at, runner) in runners.iter().enumerate() {
        let mut rate = ratios(at, 0, &|s| s.bytes_per_s);
        rate.sort_by(f64::total_cmp);
        let (low, high) = (rate[rate.len() / 4], rate[(rate.len() * 3) / 4]);
        let block = if case.block >= 1 << 20 { "1 MiB" } else { "26 KiB" };
        println!(
            "| {block} | {} | {:?} | {} | {:.0} | {:.3} ({low:.2}-{high:.2}) | {:.3} | {:.3} | {:.2} | {:.2} |",
            case.depth,
            case.shape,
            runner.name(),
            median(seen[at].iter().map(|s| s.bytes_per_s).collect()) / f64::from(1 << 20),
            median(rate),
            median(ratios(at, fixed, &|s| s.bytes_per_s)),
            median(seen[at].iter().map(|s| s.cpu_s_per_gib).collect()),
            median(ratios(at, 0, &|s| s.cpu_s_per_gib)),
            median(ratios(at, fixed, &|s| s.cpu_s_per_gib)),
        );
    }
}
