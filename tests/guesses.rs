//! Guesses about the layers ahead: no bit of the result depends on them, each says something true about a layer that is
//! still to come, and every way of guessing beats chance on a real model, by the same figures each time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use argodrive::clock::Clock;
use argodrive::decode::observe::Route;
use argodrive::decode::{Decoder, GuessSource, Logits, Observer, Session, SessionOptions};
use argodrive::ids::{ExpertId, LayerId};
use argodrive::model::tokenizer::Tokenizer;
use argodrive::reader::predict::Predictor;
use argodrive::reader::predict::table::{Table, TableBuilder};
use argodrive::source::guess::GuessCounts;
use argodrive::source::{ExpertSource, Guess, Lease, Phase, SourceError, StepInfo};
use common::{Checkpoint, TestSource, argmax, load, repo};
use std::sync::{Arc, OnceLock};

/// A source in memory that wants guesses and keeps them; with a predictor it also guesses itself, as a reader does.
struct Curious {
    inner: TestSource,
    lookahead: u32,
    hints: Vec<(StepInfo, LayerId, Vec<Guess>)>,
    retracted: Vec<(u64, LayerId)>,
    /// Barriers opened when each hint came.
    opened: Vec<usize>,
    own: Option<Predictor>,
}

impl Curious {
    fn new(checkpoint: &Checkpoint, lookahead: u32, own: Option<Predictor>) -> Self {
        let inner = TestSource::new(&checkpoint.experts);
        Self { inner, lookahead, hints: Vec::new(), retracted: Vec::new(), opened: Vec::new(), own }
    }
}

impl ExpertSource for Curious {
    fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
        self.inner.open_barrier(step, layer, experts)?;
        if let Some(own) = &mut self.own {
            own.observe(step, layer, experts);
            for ahead in 1..=self.lookahead {
                let _ = own.guess(ahead, 6);
            }
        }
        Ok(())
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        self.inner.next_arrival()
    }

    fn close_barrier(&mut self) {
        self.inner.close_barrier();
    }

    fn lookahead(&self) -> u32 {
        self.lookahead
    }

    fn hint(&mut self, step: &StepInfo, layer: LayerId, guesses: &[Guess]) {
        self.hints.push((*step, layer, guesses.to_vec()));
        self.opened.push(self.inner.barriers.len());
    }

    fn retract(&mut self, step: &StepInfo, layer: LayerId) {
        self.retracted.push((step.step, layer));
    }
}

struct Model {
    checkpoint: Checkpoint,
    decoder: Arc<Decoder>,
}

fn model(folder: &str) -> Model {
    let checkpoint = load(folder);
    let decoder = Decoder::load(checkpoint.config.clone(), checkpoint.trunk.clone()).unwrap();
    Model { checkpoint, decoder }
}

fn mini() -> &'static Model {
    static CELL: OnceLock<Model> = OnceLock::new();
    CELL.get_or_init(|| model("models/argo-mini"))
}

fn tiny() -> &'static Model {
    static CELL: OnceLock<Model> = OnceLock::new();
    CELL.get_or_init(|| model("tests/fixtures/oracle/tiny"))
}

/// Every token's experts: by position, then layer.
#[derive(Default)]
struct Routes(Vec<Vec<Vec<ExpertId>>>);

impl Observer for Routes {
    fn route(&mut self, r: &Route<'_>) {
        let position = r.position as usize;
        if self.0.len() <= position {
            self.0.resize(position + 1, Vec::new());
        }
        self.0[position].push(r.experts.to_vec());
    }
}

/// Feeds `prompt` in two pieces and then the likeliest token, `new` times; all logits of the last rows, as bits.
fn run(
    model: &Model,
    guess: GuessSource,
    source: &mut Curious,
    prompt: &[u32],
    new: usize,
) -> (Vec<u32>, Session, Routes) {
    let options = SessionOptions { max_context: 256, max_rows: 64, clock: Clock::start(), guess };
    let mut session = Session::new(model.decoder.clone(), options).unwrap();
    let (mut bits, mut routes) = (Vec::new(), Routes::default());
    let (first, last) = prompt.split_at(prompt.len() / 2);
    session.forward(first, Phase::Prefill, source, Logits::None, Some(&mut routes)).unwrap();
    let mut next = None;
    for _ in 0..=new {
        let (tokens, phase) =
            next.as_ref().map_or((last, Phase::Prefill), |t| (std::slice::from_ref(t), Phase::Decode));
        let logits = session.forward(tokens, phase, source, Logits::Last, Some(&mut routes)).unwrap();
        bits.extend(logits.iter().map(|v| v.to_bits()));
        next = Some(argmax(logits));
    }
    (bits, session, routes)
}

#[test]
fn guessing_changes_no_bit_and_a_source_that_is_not_curious_is_told_nothing() {
    let prompt: Vec<u32> = (0..24).map(|i| (i * 37) % 500).chain((0..8).map(|i| (i * 37) % 500)).collect();
    let mut plain = Curious::new(&tiny().checkpoint, 0, None);
    let (expected, ..) = run(tiny(), GuessSource::None, &mut plain, &prompt, 12);
    for guess in [GuessSource::None, GuessSource::Router, GuessSource::Draft] {
        for lookahead in [0, 1, 2, 3, 50] {
            let mut source = Curious::new(&tiny().checkpoint, lookahead, None);
            let (bits, session, _) = run(tiny(), guess, &mut source, &prompt, 12);
            assert!(bits == expected, "{guess:?}, {lookahead} ahead");
            let all = sum(&session.counters().guesses);
            let told = guess != GuessSource::None && lookahead > 0;
            assert_eq!(told, !source.hints.is_empty(), "{guess:?}, {lookahead} ahead");
            assert_eq!(all.hints, source.hints.len() as u64, "{guess:?}, {lookahead} ahead");
            assert_eq!(source.inner.barriers, plain.inner.barriers);
        }
    }
}

fn sum(counts: &[GuessCounts]) -> GuessCounts {
    counts.iter().fold(GuessCounts::default(), |a, b| a.plus(*b))
}

#[test]
fn hints_are_about_layers_to_come_and_the_likeliest_stand_first() {
    let prompt: Vec<u32> = (5..25).chain(5..15).collect();
    let layers: Vec<LayerId> = tiny().checkpoint.config.moe_layers().map(|l| LayerId(l as u16)).collect();
    for guess in [GuessSource::Router, GuessSource::Draft] {
        let mut source = Curious::new(&tiny().checkpoint, 2, None);
        run(tiny(), guess, &mut source, &prompt, 16);
        for ((step, layer, guesses), &opened) in source.hints.iter().zip(&source.opened) {
            let at = layers.binary_search(layer).expect("a layer with experts");
            // barriers are numbered by pass and layer
            let target = step.step as usize * layers.len() + at;
            let distance = target + 1 - opened;
            assert!((1..=2).contains(&distance), "{guess:?}: barrier {target} guessed with {opened} open");
            assert!(guesses.windows(2).all(|w| (w[1].score, w[0].expert) < (w[0].score, w[1].expert)), "{guesses:?}");
            let (seen, ..) = &source.inner.barriers[target.min(source.inner.barriers.len() - 1)];
            if seen.step == step.step && step.phase == Phase::Decode {
                assert_eq!((seen.phase, seen.pos, seen.rows), (Phase::Decode, step.pos, 1));
            }
            if step.rows == 1 {
                assert!(guesses.len() <= 6);
            }
        }
        // in the middle of a pass, about the pass behind it
        let beyond = source
            .hints
            .iter()
            .zip(&source.opened)
            .any(|((s, ..), &n)| n % layers.len() != 0 && source.inner.barriers[n - 1].0.step + 1 == s.step);
        assert_eq!(beyond, guess == GuessSource::Draft, "only a drafter looks beyond the pass");
        assert_eq!(source.retracted.is_empty(), guess == GuessSource::Router, "some proposal was wrong");
        let retracted = source.retracted.iter().all(|(_, layer)| layers[..2].contains(layer));
        assert!(retracted, "what is taken back is about the first layers");
    }
}

/// What a table is learnt from; the first one is also guessed about.
const HEAT_PROMPTS: [&str; 4] = [
    "<|user|>Tell me a story about a brave fox.<|end|><|assistant|>",
    "A vector is a list that grows: its elements lie side by side in memory, and",
    "It was a bright morning when the captain of the ship came down to the harbour and said",
    "def read_rows(path):\n    \"\"\"Returns the rows of a file.\"\"\"\n",
];
const EVALUATION_PROMPT: &str = "The router names the experts, and the block comes back when the device has time.";

fn tokens(text: &str) -> Vec<u32> {
    Tokenizer::open(&repo("models/argo-mini")).unwrap().encode(text, true).unwrap()
}

const NEW: usize = 64;

/// A table over what the tokens of some texts went to.
fn learn(texts: &[Routes]) -> Table {
    let layers = mini_layers();
    let mut builder = TableBuilder::new(&layers, 2).unwrap();
    for routes in texts {
        for (position, token) in routes.0.iter().enumerate() {
            let next = routes.0.get(position + 1);
            for (at, ahead) in (0..layers.len()).flat_map(|at| [(at, 1), (at, 2)]) {
                let later = match (at + ahead).checked_sub(layers.len()) {
                    None => Some(&token[at + ahead]),
                    Some(target) => next.map(|n| &n[target]),
                };
                if let Some(later) = later {
                    builder.add(at, ahead, &token[at], later).unwrap();
                }
            }
        }
    }
    builder.finish("mini", 96)
}

fn mini_layers() -> Vec<LayerId> {
    mini().checkpoint.config.moe_layers().map(|l| LayerId(l as u16)).collect()
}

/// Counts one and two layers ahead.
fn figures(guess: GuessSource, own: Option<Predictor>, prompt: &[u32]) -> [GuessCounts; 2] {
    let mut source = Curious::new(&mini().checkpoint, 2, own);
    let (_, session, _) = run(mini(), guess, &mut source, prompt, NEW);
    let counts = match &source.own {
        Some(own) => *own.counts(),
        None => session.counters().guesses,
    };
    [counts[0], counts[1]]
}

#[test]
fn every_way_of_guessing_beats_chance_and_repeats_itself() {
    let heat = HEAT_PROMPTS.map(tokens);
    let routes: Vec<Routes> = heat
        .iter()
        .map(|prompt| {
            let mut plain = Curious::new(&mini().checkpoint, 0, None);
            run(mini(), GuessSource::None, &mut plain, prompt, NEW).2
        })
        .collect();
    let (table, layers) = (learn(&routes), mini_layers());
    // six experts drawn blindly from 96 are hit one time in sixteen
    let chance = 6.0 / 96.0;
    println!("{:<12}{:<14}{:>5}{:>9}{:>8}{:>10}", "prompt", "guesser", "ahead", "hit rate", "recall", "guessed");
    for (text, prompt) in [("heat", &heat[0]), ("evaluation", &tokens(EVALUATION_PROMPT))] {
        for name in ["same-as-last", "markov", "next-router", "draft"] {
            let once = || {
                let own = match name {
                    "same-as-last" => Some(Predictor::same_as_last(&layers, 96)),
                    "markov" => Some(Predictor::markov(table.clone(), "mini", &layers, 96).unwrap()),
                    _ => None,
                };
                let guess = match name {
                    "next-router" => GuessSource::Router,
                    "draft" => GuessSource::Draft,
                    _ => GuessSource::None,
                };
                figures(guess, own, prompt)
            };
            let counts = once();
            for (ahead, c) in counts.iter().enumerate() {
                let (rate, recall) = (c.hit_rate() * 100.0, c.recall() * 100.0);
                println!("{text:<12}{name:<14}{:>5}{rate:>8.1}%{recall:>7.1}%{:>10}", ahead + 1, c.guessed);
                assert!(c.hints > 0 && c.hit_rate() > 1.5 * chance, "{text}, {name}, {} ahead: {c:?}", ahead + 1);
                assert!(c.hits <= c.guessed && c.hits <= c.asked);
            }
            assert_eq!(counts, once(), "{text}, {name}");
        }
    }
}
