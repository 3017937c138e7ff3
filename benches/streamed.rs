//! How near decoding from a drive comes to its own bounds, on one real store: without prefetch, decoding should take no
//! longer than decoding with every expert in memory plus reading the experts at the rate that fio gives for reads of an
//! expert's size; with prefetch less. And a token should take the sum over layers of trunk compute plus the larger of
//! reading and computing the experts. Everything is taken in the same round, cold (past the page cache), without a cache.
//!
//!     argodrive synth --preset k3-shaped --as-checkpoint DIR/checkpoint
//!     argodrive import DIR/checkpoint --store DIR/store
//!     cargo bench --bench streamed -- --store DIR/store [--tokens 48] [--rounds 5] [--threads N] [--engine io-uring]
//!         [--queue-depth 8] [--prefill 16,512]
//!
//! Prints Markdown. Needs `fio`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use argodrive::clock::Clock;
use argodrive::decode::{Logits, Session};
use argodrive::ids::{ExpertId, LayerId};
use argodrive::io::EngineKind;
use argodrive::open::Model;
use argodrive::reader::{PrefetchPolicy, ReaderOptions};
use argodrive::source::{ExpertSource, Guess, Lease, Phase, SourceError, StepInfo};
use argodrive::stats;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Tokens of the prompt before decoding is timed.
const PROMPT: usize = 16;
/// Guesses for one layer: as many as it will ask for, and one for each two of them again.
const GUESSES: u32 = 12;

/// One barrier as the decoder lived it.
#[derive(Clone, Default)]
struct Seen {
    layer: u16,
    experts: Vec<ExpertId>,
    /// Between the barrier before (or the start of the pass) and this one.
    before_ns: u64,
    /// While it was open, outside the source: experts, and what needs none of them.
    computed_ns: u64,
}

/// Passes everything on and keeps the times.
struct Timed<'a> {
    inner: &'a mut dyn ExpertSource,
    since: Instant,
    seen: Vec<Seen>,
}

impl<'a> Timed<'a> {
    fn new(inner: &'a mut dyn ExpertSource) -> Self {
        Self { inner, since: Instant::now(), seen: Vec::new() }
    }

    fn lap(&mut self) -> u64 {
        let spent = self.since.elapsed().as_nanos() as u64;
        self.since = Instant::now();
        spent
    }
}

impl ExpertSource for Timed<'_> {
    fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        let before_ns = self.lap();
        self.seen.push(Seen { layer: layer.0, experts: experts.to_vec(), before_ns, computed_ns: 0 });
        let opened = self.inner.open_barrier(step, layer, experts);
        self.lap();
        opened
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        let computed = self.lap();
        self.seen.last_mut().unwrap().computed_ns += computed;
        let arrival = self.inner.next_arrival();
        self.lap();
        arrival
    }

    fn at_hand(&self) -> usize {
        self.inner.at_hand()
    }

    fn close_barrier(&mut self) {
        self.inner.close_barrier();
        self.lap();
    }

    fn lookahead(&self) -> u32 {
        self.inner.lookahead()
    }

    fn hint(&mut self, step: &StepInfo, layer: LayerId, guesses: &[Guess]) {
        self.inner.hint(step, layer, guesses);
    }

    fn retract(&mut self, step: &StepInfo, layer: LayerId) {
        self.inner.retract(step, layer);
    }
}

struct Options {
    store: PathBuf,
    tokens: usize,
    rounds: usize,
    threads: usize,
    prefill: Vec<usize>,
    reader: ReaderOptions,
}

fn options() -> Option<Options> {
    let args: Vec<String> = std::env::args().collect();
    let get = |flag: &str| args.iter().position(|a| a == flag).and_then(|i| args.get(i + 1).cloned());
    let number = |flag: &str, else_: usize| get(flag).map_or(else_, |v| v.parse().expect("a number"));
    let engine = match get("--engine").as_deref() {
        Some("psync") => EngineKind::Psync,
        Some("io-uring") | None => EngineKind::Uring,
        Some(other) => panic!("--engine {other}: psync or io-uring"),
    };
    let queue_depth = number("--queue-depth", 8) as u32;
    let reader = ReaderOptions { engine, queue_depth, prefetch_queue_depth: queue_depth, ..ReaderOptions::default() };
    Some(Options {
        store: get("--store")?.into(),
        tokens: number("--tokens", 48),
        rounds: number("--rounds", 5),
        threads: number("--threads", 2),
        prefill: get("--prefill").unwrap_or("16,512".into()).split(',').map(|v| v.parse().unwrap()).collect(),
        reader,
    })
}

fn prompt(model: &Model, tokens: usize) -> Vec<u32> {
    let vocab = model.decoder.config().vocab_size as u32;
    (0..tokens as u32).map(|i| 7 + i * 131 % (vocab - 300)).collect()
}

fn session(model: &Model, rows: usize, tokens: usize, prefetch: PrefetchPolicy) -> Session {
    model.session(rows + tokens + 1, rows, prefetch, Clock::start()).unwrap()
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
    best as u32
}

/// What one decode gave: wall time of its passes, its tokens, and its barriers.
struct Decoded {
    wall_s: f64,
    tokens: Vec<u32>,
    seen: Vec<Seen>,
    /// From the last barrier of each pass to the end of it.
    tail_ns: u64,
}

fn decode(model: &Model, o: &Options, source: &mut dyn ExpertSource, prefetch: PrefetchPolicy) -> Decoded {
    let mut session = session(model, PROMPT, o.tokens, prefetch);
    let first = session.forward(&prompt(model, PROMPT), Phase::Prefill, source, Logits::Last, None).unwrap();
    let mut token = argmax(first);
    let mut timed = Timed::new(source);
    let (mut tokens, mut tail_ns) = (vec![token], 0);
    let start = Instant::now();
    for _ in 0..o.tokens {
        timed.lap();
        token = argmax(session.forward(&[token], Phase::Decode, &mut timed, Logits::Last, None).unwrap());
        tail_ns += timed.lap();
        tokens.push(token);
    }
    Decoded { wall_s: start.elapsed().as_secs_f64(), tokens, seen: timed.seen, tail_ns }
}

fn prefill(model: &Model, rows: usize, source: &mut dyn ExpertSource, prefetch: PrefetchPolicy) -> (f64, Vec<Seen>) {
    let mut session = session(model, rows, 0, prefetch);
    let tokens = prompt(model, rows);
    let mut timed = Timed::new(source);
    let start = Instant::now();
    session.forward(&tokens, Phase::Prefill, &mut timed, Logits::Last, None).unwrap();
    (start.elapsed().as_secs_f64(), timed.seen)
}

/// The same barriers without any computing: nanoseconds of each.
fn barriers_alone(source: &mut dyn ExpertSource, seen: &[Seen], phase: Phase) -> Vec<u64> {
    let mut times = Vec::new();
    for (at, barrier) in seen.iter().enumerate() {
        let step = StepInfo { step: at as u64, phase, pos: at as u64, rows: 1 };
        let start = Instant::now();
        source.open_barrier(&step, LayerId(barrier.layer), &barrier.experts).unwrap();
        while source.next_arrival().unwrap().is_some() {}
        source.close_barrier();
        times.push(start.elapsed().as_nanos() as u64);
    }
    times
}

/// fio's rate for random reads of `block` bytes in the store's expert files, bytes per second.
fn fio(files: &[PathBuf], block: u64, depth: u32, seed: u64) -> f64 {
    let names: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
    let mut command = Command::new("fio");
    command.args(["--name=a", "--rw=randread", "--direct=1", "--ioengine=io_uring", "--norandommap=1", "--readonly"]);
    command.args(["--output-format=json", "--allow_file_create=0", "--time_based=1", "--runtime=3"]);
    command.arg(format!("--filename={}", names.join(":"))).arg(format!("--bs={block}"));
    command.arg(format!("--iodepth={depth}")).arg(format!("--randseed={seed}"));
    let out = command.output().expect("fio is not installed");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    json["jobs"][0]["read"]["bw_bytes"].as_f64().unwrap()
}

fn expert_files(store: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in std::fs::read_dir(store.join("argodrive")).unwrap().flatten() {
        let experts = std::fs::read_dir(folder.path()).unwrap().flatten().map(|e| e.path());
        files.extend(experts.filter(|p| p.extension().is_some_and(|e| e == "experts")));
    }
    files.sort();
    files
}

fn column(rows: &[Vec<f64>], at: usize) -> f64 {
    stats::median(&rows.iter().map(|r| r[at]).collect::<Vec<_>>()).unwrap()
}

fn main() {
    let Some(o) = options() else {
        println!("give --store DIR (how to make one is said in benches/streamed.rs); nothing was measured");
        return;
    };
    let model = Model::load(&o.store, None).unwrap();
    model.decoder.use_threads(o.threads);
    let expert_bytes = model.manifest.expert_bytes;
    let files = expert_files(&o.store);
    let (plan, drives) = model.store_plan().unwrap();
    let mut memory = model.resident().unwrap();
    let guessing =
        ReaderOptions { prefetch: PrefetchPolicy::NextRouter, prefetch_experts: GUESSES, ..o.reader.clone() };
    let open = |options: &ReaderOptions| model.reader(&plan, &drives, options, Clock::start()).unwrap();
    println!(
        "{} kernels, {} threads, {} layers, {} bytes an expert; {:?}, {} reads at once; {} tokens, medians of {} rounds\n",
        model.decoder.isa(),
        o.threads,
        model.decoder.config().layers.len(),
        expert_bytes,
        o.reader.engine,
        o.reader.queue_depth,
        o.tokens,
        o.rounds
    );
    let per = |s: f64| o.tokens as f64 / s;
    let mut rows = Vec::new();
    for round in 0..o.rounds {
        let resident = decode(&model, &o, &mut memory, PrefetchPolicy::None);
        let rate = fio(&files, expert_bytes, o.reader.queue_depth, round as u64);
        let plain = decode(&model, &o, &mut open(&o.reader), PrefetchPolicy::None);
        let ahead = decode(&model, &o, &mut open(&guessing), PrefetchPolicy::NextRouter);
        let alone = barriers_alone(&mut open(&o.reader), &resident.seen, Phase::Decode);
        assert_eq!(resident.tokens, plain.tokens);
        assert_eq!(resident.tokens, ahead.tokens);
        let bytes = resident.seen.iter().map(|s| s.experts.len() as u64 * expert_bytes).sum::<u64>() as f64;
        let sum = resident.wall_s + bytes / rate;
        let layers: u64 =
            resident.seen.iter().zip(&alone).map(|(s, &alone)| s.before_ns + alone.max(s.computed_ns)).sum();
        let layered = (layers + resident.tail_ns) as f64 / 1e9;
        let read_s = alone.iter().sum::<u64>() as f64 / 1e9;
        rows.push(vec![
            per(resident.wall_s),
            rate / 1e6,
            bytes / o.tokens as f64 / 1e6,
            per(bytes / rate),
            per(plain.wall_s),
            plain.wall_s / sum,
            per(ahead.wall_s),
            ahead.wall_s / sum,
            plain.wall_s / layered,
            ahead.wall_s / layered,
            bytes / read_s / rate,
        ]);
    }
    println!("| | |\n|---|---|");
    let lines = [
        "all in memory, tok/s",
        "fio at the expert's size, MB/s",
        "MB of experts a token",
        "tok/s that fio's rate allows",
        "streamed, tok/s",
        "streamed / (all in memory + bytes at fio's rate), wanted 1.10 at most",
        "with prefetch, tok/s",
        "with prefetch / the same sum, wanted below 1.00",
        "streamed / sum over layers of trunk + max(barrier, experts), wanted 0.90 to 1.10",
        "with prefetch / the same sum over layers",
        "rate of the barriers alone / fio's rate",
    ];
    for (at, line) in lines.iter().enumerate() {
        println!("| {line} | {:.2} |", column(&rows, at));
    }
    // A prompt asks for most of a layer, so as many guesses as there are experts may be told.
    let all = model.decoder.config().moe.as_ref().map_or(0, |m| m.experts as u32);
    let ahead = ReaderOptions { prefetch: PrefetchPolicy::NextRouter, prefetch_experts: all, ..o.reader.clone() };
    println!(
        "\nPrompts; the bound is max(reading their experts alone, prefill in memory), 1.15 of it at most are wanted.\n"
    );
    println!(
        "| prompt | prefetch | distinct experts | amplification | prefill, tok/s | / bound |\n|---|---|---|---|---|---|"
    );
    let ways = [("none", &o.reader, PrefetchPolicy::None), ("next-router", &ahead, PrefetchPolicy::NextRouter)];
    for &tokens in &o.prefill {
        let mut rows = [Vec::new(), Vec::new()];
        for _ in 0..o.rounds {
            let (resident_s, seen) = prefill(&model, tokens, &mut memory, PrefetchPolicy::None);
            let alone_ns: u64 = barriers_alone(&mut open(&o.reader), &seen, Phase::Prefill).iter().sum();
            let bound = resident_s.max(alone_ns as f64 / 1e9);
            let distinct = seen.iter().map(|s| s.experts.len()).sum::<usize>() as f64;
            for ((_, options, policy), rows) in ways.iter().zip(&mut rows) {
                let mut reader = open(options);
                let handle = reader.handle();
                let (streamed_s, _) = prefill(&model, tokens, &mut reader, *policy);
                let read: u64 = handle.counters().drives.iter().map(|d| d.read_bytes).sum();
                let amplification = read as f64 / (distinct * expert_bytes as f64);
                rows.push(vec![distinct, amplification, tokens as f64 / streamed_s, streamed_s / bound]);
            }
        }
        for ((name, ..), rows) in ways.iter().zip(&rows) {
            let of = |at: usize| column(rows, at);
            println!("| {tokens} | {name} | {:.0} | {:.3} | {:.1} | {:.2} |", of(0), of(1), of(2), of(3));
        }
    }
}
