//! Between the opening and the closing of a barrier a warmed-up session allocates nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use argodrive::clock::Clock;
use argodrive::decode::batch::{Batch, BatchRequest};
use argodrive::decode::generate::{Beside, Request, generate_with};
use argodrive::decode::memory::thread_bytes;
use argodrive::decode::sampler::{Sampler, SamplerOptions};
use argodrive::decode::speculate::{Drafter, DrafterKind, ModelDrafter, NgramDrafter};
use argodrive::decode::{Activations, Decoder, GuessSource, Logits, WeightForm};
use argodrive::decode::{Session, SessionOptions, SpeculateOptions, Speculator};
use argodrive::ids::{ExpertId, LayerId};
use argodrive::source::{ExpertSource, Guess, Lease, Phase, SourceError, StepInfo};
use common::{TestSource, load};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Mutex;

thread_local! {
    /// Allocations, and their bytes.
    static ALLOCATIONS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// The system's allocator with counts per thread.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counts live in a thread-local cell that needs no
// allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set((n.get().0 + 1, n.get().1 + layout.size() as u64)));
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: `p` came from `alloc` above, hence from the system's allocator, with this layout.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counts what happens outside its own calls while a barrier is open.
struct Watch {
    inner: TestSource,
    left_at: u64,
    outside: u64,
    calls: u64,
    hints: u64,
}

fn count() -> u64 {
    ALLOCATIONS.with(Cell::get).0
}

impl ExpertSource for Watch {
    fn open_barrier(&mut self, s: &StepInfo, l: LayerId, e: &[ExpertId]) -> Result<(), SourceError> {
        self.inner.open_barrier(s, l, e)?;
        self.left_at = count();
        Ok(())
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        self.outside += count() - self.left_at;
        self.calls += 1;
        let lease = self.inner.next_arrival();
        self.left_at = count();
        lease
    }

    fn at_hand(&self) -> usize {
        self.inner.at_hand()
    }

    fn lookahead(&self) -> u32 {
        2
    }

    fn hint(&mut self, _: &StepInfo, _: LayerId, guesses: &[Guess]) {
        self.hints += guesses.len() as u64;
    }

    fn close_barrier(&mut self) {
        self.outside += count() - self.left_at;
        self.inner.close_barrier();
    }
}

#[test]
fn nothing_is_allocated_while_a_barrier_is_open() {
    let checkpoint = load("models/argo-mini");
    let decoder = Decoder::load(checkpoint.config, checkpoint.trunk).unwrap();
    let guesses = [GuessSource::None, GuessSource::Router, GuessSource::Draft];
    let all = Activations::ALL.into_iter().flat_map(|activations| guesses.map(|guess| (activations, guess)));
    for (activations, guess) in all {
        decoder.use_activations(activations);
        let options = SessionOptions { max_context: 64, max_rows: 16, clock: Clock::start(), guess };
        let mut s = Session::new(decoder.clone(), options).unwrap();
        let inner = TestSource::new(&checkpoint.experts);
        let mut source = Watch { inner, left_at: 0, outside: 0, calls: 0, hints: 0 };
        let prompt: Vec<u32> = (5..21).collect();
        // Working memory is sized before the first layer, so not even the first pass allocates inside a barrier.
        s.forward(&prompt, Phase::Prefill, &mut source, Logits::Last, None).unwrap();
        assert!(count() > 0, "the count works");
        for token in [30, 31, 32, 33, 30, 31] {
            s.forward(&[token], Phase::Decode, &mut source, Logits::Last, None).unwrap();
        }
        assert_eq!(source.outside, 0, "{activations}, {guess:?}");
        let int8 = decoder.activation_counts().of(WeightForm::Mxfp4, Activations::Int8);
        assert_eq!(int8 > 0, activations == Activations::Int8);
        assert!(source.calls > 4 * 11 * 7);
        assert_eq!(source.hints > 0, guess != GuessSource::None);

        // A whole warmed-up pass allocates nothing of its own either: what is counted is the source's record.
        source.inner.barriers.reserve(64);
        let before = count();
        s.forward(&[40], Phase::Decode, &mut source, Logits::Last, None).unwrap();
        assert_eq!(
            count() - before,
            11,
            "{activations}, {guess:?}: one list of experts per barrier, kept by the test's source"
        );
    }
}

#[test]
fn threads_have_their_working_space_before_the_first_layer() {
    let checkpoint = load("models/argo-mini");
    let decoder = Decoder::load(checkpoint.config, checkpoint.trunk).unwrap();
    decoder.use_threads(2);
    let caller = std::thread::current().id();
    let of_worker = || {
        let seen = Mutex::new(None);
        let all = decoder.on_each_thread(&|_| {
            if std::thread::current().id() != caller {
                *seen.lock().unwrap() = Some(ALLOCATIONS.with(Cell::get));
            }
        });
        assert!(all, "the worker did not come by within a second");
        seen.into_inner().unwrap().unwrap()
    };
    of_worker(); // what a thread allocates when it is first asked who it is
    let (mut before, before_bytes) = of_worker();
    let options = SessionOptions { max_context: 96, max_rows: 32, clock: Clock::start(), guess: GuessSource::Router };
    let mut s = Session::new(decoder.clone(), options).unwrap();
    let inner = TestSource::new(&checkpoint.experts);
    let mut source = Watch { inner, left_at: 0, outside: 0, calls: 0, hints: 0 };
    // A place for products and one for attention; int8 activations need another beside those that are there by then.
    for (activations, places) in [(Activations::F32, 2), (Activations::Int8, 1)] {
        decoder.use_activations(activations);
        // A wide pass, narrow ones, and one whose experts have rows for several parts.
        for (rows, phase) in [(2, Phase::Prefill), (1, Phase::Decode), (32, Phase::Prefill), (1, Phase::Decode)] {
            let tokens: Vec<u32> = (0..rows).map(|i| 5 + i % 3).collect();
            s.forward(&tokens, phase, &mut source, Logits::Last, None).unwrap();
        }
        assert_eq!(source.outside, 0, "{activations}");
        let (after, bytes) = of_worker();
        assert_eq!(after - before, places, "{activations}: the worker's own space, once");
        let [two, one] = [2, 1].map(|threads| thread_bytes(decoder.config(), threads, activations));
        assert_eq!(bytes - before_bytes, two - one, "{activations}: as much as is asked for before a run");
        before = after;
    }
}

#[test]
fn steps_with_proposals_allocate_nothing_once_they_are_warm() {
    let (checkpoint, draft) = (load("models/argo-mini"), load("models/argo-mini-draft"));
    let decoder = Decoder::load(checkpoint.config, checkpoint.trunk).unwrap();
    let draft = Decoder::load(draft.config, draft.trunk).unwrap();
    let session = |decoder: &std::sync::Arc<Decoder>| {
        let options =
            SessionOptions { max_context: 256, max_rows: 64, clock: Clock::start(), guess: GuessSource::None };
        Session::new(decoder.clone(), options).unwrap()
    };
    // A text that repeats itself, so that both drafters have something to propose.
    let prompt: Vec<u32> = (0..48u32).map(|i| 300 + i % 6).collect();
    let drafters: [Box<dyn Drafter>; 2] =
        [Box::new(NgramDrafter::new()), Box::new(ModelDrafter::new(session(&draft), None, 64))];
    for drafter in drafters {
        let kind = drafter.kind();
        let mut by = Speculator::new(&SpeculateOptions { speculate: kind, ..SpeculateOptions::default() }, drafter);
        let mut s = session(&decoder);
        let inner = TestSource::new(&checkpoint.experts);
        let mut source = Watch { inner, left_at: 0, outside: 0, calls: 0, hints: 0 };
        source.inner.barriers.reserve(11 * 128);
        let mut sampler = Sampler::new(SamplerOptions::default()).unwrap();
        let request = Request { prompt: &prompt, max_new: 60, stop: &[], piece_rows: 64 };
        let mut at = Vec::with_capacity(64);
        let mut see = |_| {
            at.push(count());
            ControlFlow::Continue(())
        };
        let beside = Beside { speculator: Some(&mut by), ..Beside::default() };
        generate_with(&mut s, &mut source, &mut sampler, request, &mut see, beside).unwrap();
        assert_eq!(source.outside, 0, "{kind:?}");
        let passes = source.inner.barriers.len() / 11;
        assert!(kind != DrafterKind::Model || by.counters().verify_passes() > 10);
        // From the thirtieth token on, what is counted is one list of experts per barrier, kept by the test's source.
        let late = at[59] - at[30];
        assert!(late.is_multiple_of(11) && late / 11 <= passes as u64, "{kind:?}: {late} in {passes} passes");
    }
}

#[test]
fn nothing_is_allocated_while_texts_share_a_barrier() {
    let checkpoint = load("models/argo-mini");
    let decoder = Decoder::load(checkpoint.config, checkpoint.trunk).unwrap();
    let router_int8 = (GuessSource::Router, Activations::Int8);
    for (guess, activations) in
        [(GuessSource::None, Activations::F32), (GuessSource::Router, Activations::F32), router_int8]
    {
        decoder.use_activations(activations);
        let options = SessionOptions { max_context: 64, max_rows: 16, clock: Clock::start(), guess };
        let mut batch = Batch::new(decoder.clone(), options, 3).unwrap();
        let inner = TestSource::new(&checkpoint.experts);
        let mut source = Watch { inner, left_at: 0, outside: 0, calls: 0, hints: 0 };
        let prompts: Vec<Vec<u32>> = vec![(5..25).collect(), vec![7], vec![8, 9], vec![30, 31, 32], vec![40]];
        let sampler = SamplerOptions::default();
        let request = BatchRequest { prompts: &prompts, max_new: 4, stop: &[], piece_rows: 16, sampler };
        batch.generate(&mut source, request, &mut |_, _| ControlFlow::Continue(()), None).unwrap();
        assert_eq!(batch.counters().widest_lanes, 3);
        assert_eq!(source.outside, 0, "{activations}, {guess:?}");
        assert_eq!(source.hints > 0, guess == GuessSource::Router);
    }
}
