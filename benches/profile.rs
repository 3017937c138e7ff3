//! Where a token's and a prompt's time goes, by part of a layer and by number of threads: an observer and a source with clocks
//! around a session, nothing in the library. argo-mini in memory, or a store in memory or read from its drive.
//!
//!     cargo bench --bench profile [-- --store DIR [--streamed]] [--threads 1,2] [--prompt 512] [--tokens 64] [--rounds 9]
//!
//! Prints Markdown. How to make a store of K3's shape is said in `benches/streamed.rs`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../tests/common/mod.rs"]
mod common;

use argodrive::clock::Clock;
use argodrive::decode::observe::Point;
use argodrive::decode::{Decoder, GuessSource, Logits, Observer, Session, SessionOptions};
use argodrive::ids::{ExpertId, LayerId};
use argodrive::model::config::{AttnKind, FfnKind, ModelConfig};
use argodrive::open::Model;
use argodrive::reader::ReaderOptions;
use argodrive::source::{ExpertSource, Lease, Phase, SourceError, StepInfo};
use argodrive::stats;
use common::{TestSource, argmax, load};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What a pass consists of, in the order in which it comes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Mixes,
    Kda,
    Mla,
    Dense,
    Router,
    Shared,
    Waiting,
    Experts,
    Raise,
    Head,
}

const PARTS: [(Part, &str); 10] = [
    (Part::Mixes, "embedding, residual mixes, norms"),
    (Part::Kda, "KDA layers: projections, convolutions, recurrence"),
    (Part::Mla, "MLA layers: projections, attention"),
    (Part::Dense, "dense layer"),
    (Part::Router, "router, grouping of rows"),
    (Part::Shared, "shared experts, way into the latent space"),
    (Part::Waiting, "in the source: handing experts over, waiting for them"),
    (Part::Experts, "routed experts"),
    (Part::Raise, "sums of experts, way out of the latent space"),
    (Part::Head, "head"),
];

/// Adds time up by part; observer and source tell it where the pass is.
struct Account {
    since: Instant,
    at: Part,
    ns: [u64; PARTS.len()],
}

type Shared = Arc<Mutex<Account>>;

fn turn(account: &Shared, to: Part) {
    let mut account = account.lock().unwrap();
    let now = Instant::now();
    let spent = now.duration_since(account.since).as_nanos() as u64;
    let at = account.at as usize;
    account.ns[at] += spent;
    (account.since, account.at) = (now, to);
}

struct Points<'a> {
    account: Shared,
    config: &'a ModelConfig,
}

impl Observer for Points<'_> {
    fn values(&mut self, layer: LayerId, point: Point, _: &[f32]) {
        let kind = &self.config.layers[layer.index()];
        let to = match (point, kind.attn, kind.ffn) {
            (Point::AttnIn, AttnKind::Kda, _) => Part::Kda,
            (Point::AttnIn, AttnKind::Mla, _) => Part::Mla,
            (Point::FfnIn, _, FfnKind::Dense) => Part::Dense,
            (Point::FfnIn, _, FfnKind::Moe) => Part::Router,
            (Point::Out, ..) if layer.index() + 1 == self.config.layers.len() => Part::Head,
            _ => Part::Mixes,
        };
        turn(&self.account, to);
    }
}

/// Passes everything on; time inside is waiting.
struct Timed<'a> {
    inner: &'a mut dyn ExpertSource,
    account: Shared,
}

impl ExpertSource for Timed<'_> {
    fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        turn(&self.account, Part::Waiting);
        let opened = self.inner.open_barrier(step, layer, experts);
        turn(&self.account, Part::Shared);
        opened
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        turn(&self.account, Part::Waiting);
        let arrival = self.inner.next_arrival();
        turn(&self.account, Part::Experts);
        arrival
    }

    fn at_hand(&self) -> usize {
        self.inner.at_hand()
    }

    fn close_barrier(&mut self) {
        turn(&self.account, Part::Waiting);
        self.inner.close_barrier();
        turn(&self.account, Part::Raise);
    }
}

struct Options {
    store: Option<String>,
    streamed: bool,
    threads: Vec<usize>,
    prompt: usize,
    tokens: usize,
    rounds: usize,
}

fn options() -> Options {
    let args: Vec<String> = std::env::args().collect();
    let get = |flag: &str| args.iter().position(|a| a == flag).and_then(|i| args.get(i + 1).cloned());
    let number = |flag: &str, else_: usize| get(flag).map_or(else_, |v| v.parse().expect("a number"));
    let threads = get("--threads").unwrap_or_else(|| "1,2".into());
    Options {
        store: get("--store"),
        streamed: args.iter().any(|a| a == "--streamed"),
        threads: threads.split(',').map(|n| n.parse().expect("numbers with commas")).collect(),
        prompt: number("--prompt", 512),
        tokens: number("--tokens", 64),
        rounds: number("--rounds", 9),
    }
}

/// Nanoseconds by part of one token of a prompt and of one token decoded after it.
fn measure(o: &Options, decoder: &Arc<Decoder>, source: &mut dyn ExpertSource) -> [[f64; PARTS.len()]; 2] {
    let max_context = 2 * o.prompt + o.tokens;
    let options = SessionOptions { max_context, max_rows: o.prompt, clock: Clock::start(), guess: GuessSource::None };
    let mut session = Session::new(decoder.clone(), options).unwrap();
    let account = Arc::new(Mutex::new(Account { since: Instant::now(), at: Part::Mixes, ns: [0; PARTS.len()] }));
    let mut points = Points { account: account.clone(), config: decoder.config() };
    let mut source = Timed { inner: source, account: account.clone() };
    let prompt: Vec<u32> =
        (0..o.prompt as u32).map(|i| 7 + i * 13 % (decoder.config().vocab_size as u32 - 7)).collect();
    let mut pass = |tokens: &[u32], phase| {
        turn(&account, Part::Mixes);
        let logits = session.forward(tokens, phase, &mut source, Logits::Last, Some(&mut points)).unwrap();
        let next = argmax(logits);
        turn(&account, Part::Mixes);
        next
    };
    let lap = || std::mem::replace(&mut account.lock().unwrap().ns, [0; PARTS.len()]);
    // once without being counted: working memory grows to the widest pass
    pass(&prompt, Phase::Prefill);
    lap();
    let mut token = pass(&prompt, Phase::Prefill);
    let prefill = lap().map(|ns| ns as f64 / o.prompt as f64);
    (0..o.tokens).for_each(|_| token = pass(&[token], Phase::Decode));
    [prefill, lap().map(|ns| ns as f64 / o.tokens as f64)]
}

fn main() {
    let o = options();
    let model = o.store.as_ref().map(|store| Model::load(store.as_ref(), None).unwrap());
    let checkpoint = load("models/argo-mini");
    let decoder = match &model {
        Some(model) => model.decoder.clone(),
        None => Decoder::load(checkpoint.config.clone(), checkpoint.trunk.clone()).unwrap(),
    };
    let mut rows = vec![Vec::new(); o.threads.len()];
    // Numbers of threads take turns, so that a machine which gets slower does so for all.
    for _ in 0..o.rounds {
        for (rows, &threads) in rows.iter_mut().zip(&o.threads) {
            decoder.use_threads(threads);
            let mut source: Box<dyn ExpertSource> = match &model {
                None => Box::new(TestSource::new(&checkpoint.experts)),
                Some(model) if !o.streamed => Box::new(model.resident().unwrap()),
                Some(model) => {
                    let (plan, drives) = model.store_plan().unwrap();
                    Box::new(model.reader(&plan, &drives, &ReaderOptions::default(), Clock::start()).unwrap())
                }
            };
            rows.push(measure(&o, &decoder, &mut *source));
        }
    }
    println!("{} kernels, {} layers, medians of {} rounds", decoder.isa(), decoder.config().layers.len(), o.rounds);
    let whats = [format!("a token of a prompt of {}", o.prompt), format!("a decoded token (of {})", o.tokens)];
    for (at, what) in whats.iter().enumerate() {
        let median = |rows: &[[[f64; PARTS.len()]; 2]], part: usize| {
            stats::median(&rows.iter().map(|r| r[at][part]).collect::<Vec<_>>()).unwrap() / 1e3
        };
        let by_threads: Vec<Vec<f64>> =
            rows.iter().map(|rows| (0..PARTS.len()).map(|part| median(rows, part)).collect()).collect();
        let heads: String = o.threads.iter().map(|n| format!(" {n} thread(s), \u{b5}s | share |")).collect();
        println!("\n| {what} |{heads}\n|---|{}", "---|---|".repeat(o.threads.len()));
        for (part, (_, name)) in PARTS.iter().enumerate() {
            let cells: String = by_threads
                .iter()
                .map(|parts| {
                    format!(" {:.1} | {:.1} % |", parts[part], 100.0 * parts[part] / parts.iter().sum::<f64>())
                })
                .collect();
            println!("| {name} |{cells}");
        }
        let sums: String = by_threads.iter().map(|parts| format!(" {:.1} | |", parts.iter().sum::<f64>())).collect();
        println!("| all |{sums}");
    }
}
