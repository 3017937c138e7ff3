//! What must not change a result: how a prompt is cut, how many rows share a pass, in which order experts arrive and
//! how few fit the buffer. And what must stop a pass: damaged weights, faulty sources, impossible arguments.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use argodrive::clock::Clock;
use argodrive::decode::{DecodeError, Decoder, GuessSource, KernelIsa, Logits, Session, SessionOptions};
use argodrive::ids::{ExpertId, ExpertKey, LayerId};
use argodrive::model::tensors::{DType, trunk_tensors};
use argodrive::source::{ExpertSource, Lease, Phase, SourceError, StepInfo};
use argodrive::store::trunk::Trunk;
use common::{Checkpoint, Order, TestSource, assert_close, load};
use std::sync::{Arc, OnceLock};

struct Model {
    checkpoint: Checkpoint,
    decoder: Arc<Decoder>,
}

fn mini() -> &'static Model {
    static CELL: OnceLock<Model> = OnceLock::new();
    CELL.get_or_init(|| {
        let checkpoint = load("models/argo-mini");
        let decoder = Decoder::load(checkpoint.config.clone(), checkpoint.trunk.clone()).unwrap();
        Model { checkpoint, decoder }
    })
}

fn session_of(decoder: &Arc<Decoder>) -> Session {
    Session::new(
        decoder.clone(),
        SessionOptions { max_context: 64, max_rows: 48, clock: Clock::start(), guess: GuessSource::None },
    )
    .unwrap()
}

fn session() -> Session {
    session_of(&mini().decoder)
}

fn source() -> TestSource {
    TestSource::new(&mini().checkpoint.experts)
}

fn prompt() -> Vec<u32> {
    (0..40u32).map(|i| 7 + i * i * 31 % 4000).collect()
}

/// All rows' logits of the prompt fed in pieces of these sizes.
fn in_pieces(decoder: &Arc<Decoder>, sizes: &[usize], source: &mut dyn ExpertSource) -> Vec<f32> {
    let (mut s, mut all, prompt) = (session_of(decoder), Vec::new(), prompt());
    let mut rest = prompt.as_slice();
    for &size in sizes {
        let (piece, after) = rest.split_at(size);
        all.extend_from_slice(s.forward(piece, Phase::Prefill, source, Logits::All, None).unwrap());
        rest = after;
    }
    assert!(rest.is_empty());
    all
}

#[test]
fn a_prompt_whole_in_pieces_or_token_by_token_gives_the_same_logits() {
    let m = &mini().checkpoint;
    for isa in KernelIsa::ALL.into_iter().filter(|i| i.is_available()) {
        let decoder = Decoder::load_with(m.config.clone(), m.trunk.clone(), isa).unwrap();
        let whole = in_pieces(&decoder, &[40], &mut source());
        for sizes in [&[1; 40][..], &[16, 16, 8], &[39, 1], &[1, 2, 37]] {
            let got = in_pieces(&decoder, sizes, &mut source());
            assert_close(&format!("{isa} {sizes:?}"), &got, &whole, 1e-4);
            // Stronger than asked for, as long as every kernel works row by row.
            assert!(got == whole, "{isa}: pieces of {sizes:?} changed bits");
        }
    }
}

#[test]
fn threads_do_not_change_a_bit_and_take_part() {
    let m = &mini().checkpoint;
    for isa in KernelIsa::ALL.into_iter().filter(|i| i.is_available()) {
        let decoder = Decoder::load_with(m.config.clone(), m.trunk.clone(), isa).unwrap();
        let alone = in_pieces(&decoder, &[31, 1, 1, 7], &mut source());
        for threads in [2, 5] {
            decoder.use_threads(threads);
            assert!(
                in_pieces(&decoder, &[31, 1, 1, 7], &mut source()) == alone,
                "{isa}: {threads} threads changed bits"
            );
            assert_eq!(decoder.thread_chunks().len(), threads);
            let parts = decoder.thread_chunks();
            assert!(parts[1..].iter().sum::<u64>() > 0, "only the caller computed: {parts:?}");
        }
    }
}

#[test]
fn rows_checked_together_have_the_bits_of_rows_decoded_alone() {
    let tokens = prompt();
    let (mut s, mut source) = (session(), source());
    s.forward(&tokens[..20], Phase::Prefill, &mut source, Logits::None, None).unwrap();
    let mut alone = Vec::new();
    for t in &tokens[20..27] {
        alone.extend_from_slice(s.forward(&[*t], Phase::Decode, &mut source, Logits::Last, None).unwrap());
    }
    s.reset();
    s.forward(&tokens[..20], Phase::Prefill, &mut source, Logits::None, None).unwrap();
    let together = s.forward(&tokens[20..27], Phase::Verify, &mut source, Logits::All, None).unwrap();
    assert!(together == alone);
}

#[test]
fn arrival_order_and_waves_do_not_change_a_bit() {
    let ascending = in_pieces(&mini().decoder, &[24, 15, 1], &mut source());
    let mut orders = vec![Order::Descending];
    orders.extend((0..3).map(|seed| Order::Shuffled(fastrand::Rng::with_seed(seed))));
    for order in orders {
        // A buffer of one slot: the next expert comes only after the lease on the last one was dropped.
        let mut source = source();
        (source.order, source.slots) = (order, 1);
        assert!(in_pieces(&mini().decoder, &[24, 15, 1], &mut source) == ascending);
    }
}

#[test]
fn one_barrier_per_layer_and_pass_asks_for_the_union() {
    let (mut s, mut source) = (session(), source());
    s.forward(&prompt()[..12], Phase::Prefill, &mut source, Logits::Last, None).unwrap();
    s.forward(&[99], Phase::Decode, &mut source, Logits::Last, None).unwrap();
    let layers: Vec<u16> = source.barriers.iter().map(|(_, layer, _)| layer.0).collect();
    assert_eq!(layers, (1..12).chain(1..12).collect::<Vec<u16>>());
    let (first, second) = source.barriers.split_at(11);
    assert!(first.iter().all(|(step, ..)| *step == StepInfo { step: 0, phase: Phase::Prefill, pos: 0, rows: 12 }));
    assert!(second.iter().all(|(step, ..)| *step == StepInfo { step: 1, phase: Phase::Decode, pos: 12, rows: 1 }));
    assert!(second.iter().all(|(.., experts)| experts.len() == 6));
    let counters = *s.counters();
    assert_eq!((counters.passes, counters.total.rows, counters.total.barriers), (2, 13, 22));
    assert_eq!(counters.total.expert_rows, 13 * 11 * 6);
    assert_eq!(counters.total.experts, source.barriers.iter().map(|b| b.2.len() as u64).sum::<u64>());
    assert_eq!((counters.last.rows, counters.last.experts), (1, 66));
    assert!(counters.last.compute_ns > 0);
}

#[test]
fn waiting_is_told_from_computing() {
    struct Slow(TestSource);
    impl ExpertSource for Slow {
        fn open_barrier(&mut self, s: &StepInfo, l: LayerId, e: &[ExpertId]) -> Result<(), SourceError> {
            self.0.open_barrier(s, l, e)
        }
        fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
            std::thread::sleep(std::time::Duration::from_micros(200));
            self.0.next_arrival()
        }
        fn close_barrier(&mut self) {
            self.0.close_barrier();
        }
    }
    let mut s = session();
    s.forward(&[5], Phase::Decode, &mut Slow(source()), Logits::Last, None).unwrap();
    // Eleven barriers of six arrivals and one end each; a sleep is never shorter than asked for.
    assert!(s.counters().last.stall_ns >= 11 * 7 * 200_000);
}

#[test]
fn logits_only_for_the_rows_asked_for() {
    let (mut s, mut source, tokens) = (session(), source(), prompt());
    let all = s.forward(&tokens[..5], Phase::Prefill, &mut source, Logits::All, None).unwrap().to_vec();
    s.reset();
    assert_eq!(s.position(), 0);
    let last = s.forward(&tokens[..5], Phase::Prefill, &mut source, Logits::Last, None).unwrap();
    assert!(last == &all[4 * 4096..]);
    assert!(s.forward(&tokens[5..6], Phase::Prefill, &mut source, Logits::None, None).unwrap().is_empty());
    assert_eq!(s.position(), 6);
}

#[test]
fn impossible_arguments_leave_the_session_as_it_was() {
    let (mut s, mut source, tokens) = (session(), source(), prompt());
    let mut feed =
        |s: &mut Session, t: &[u32]| s.forward(t, Phase::Prefill, &mut source, Logits::Last, None).map(<[f32]>::to_vec);
    assert!(matches!(feed(&mut s, &[]), Err(DecodeError::Rows { rows: 0, max: 48 })));
    assert!(matches!(feed(&mut s, &[1; 49]), Err(DecodeError::Rows { rows: 49, .. })));
    assert!(matches!(feed(&mut s, &[4096]), Err(DecodeError::Token { token: 4096, vocab: 4096 })));
    feed(&mut s, &tokens).unwrap();
    assert!(matches!(feed(&mut s, &tokens), Err(DecodeError::ContextFull { needed: 80, max: 64 })));
    assert_eq!(s.position(), 40);
    feed(&mut s, &[3]).unwrap();
    let options = SessionOptions { max_context: 4097, max_rows: 1, clock: Clock::start(), guess: GuessSource::None };
    let error = Session::new(mini().decoder.clone(), options).err().unwrap();
    assert!(error.to_string().contains("max_context is 4097"), "{error}");
}

#[test]
fn a_damaged_expert_stops_the_pass_by_name_and_position() {
    let m = &mini().checkpoint;
    let mut good = source();
    session().forward(&[5], Phase::Decode, &mut good, Logits::Last, None).unwrap();
    let (_, layer, experts) = &good.barriers[3];
    let mut bytes = m.experts.get(layer.index(), experts[0].index()).to_vec();
    // The largest scale everywhere in w2: the expert's output overflows.
    bytes[8704 + 8192..2 * 8704].fill(254);
    let mut bad = TestSource::new(&m.experts.with(layer.index(), experts[0].index(), bytes));
    let mut s = session();
    let error = s.forward(&[5], Phase::Decode, &mut bad, Logits::Last, None).unwrap_err();
    let key = ExpertKey { layer: *layer, expert: experts[0] };
    assert!(matches!(error, DecodeError::DamagedExpert { expert, position: 0 } if expert == key), "{error}");
    assert!(matches!(s.forward(&[5], Phase::Decode, &mut good, Logits::Last, None), Err(DecodeError::Unusable)));
    s.reset();
    s.forward(&[5], Phase::Decode, &mut good, Logits::Last, None).unwrap();
}

/// A source that misbehaves in one way.
struct Faulty {
    inner: TestSource,
    fault: Fault,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Twice,
    EndsEarly,
    Fails,
}

impl ExpertSource for Faulty {
    fn open_barrier(&mut self, s: &StepInfo, l: LayerId, e: &[ExpertId]) -> Result<(), SourceError> {
        self.inner.open_barrier(s, l, e)
    }

    fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
        match self.fault {
            Fault::Fails => Err(SourceError::Read("drive nvme1: input/output error".into())),
            Fault::EndsEarly => Ok(None),
            Fault::Twice => {
                let (.., layer, experts) = self.inner.barriers.last().unwrap();
                Ok(Some(self.inner.lend(*layer, experts[0])))
            }
        }
    }

    fn close_barrier(&mut self) {
        self.inner.close_barrier();
    }
}

#[test]
fn a_faulty_source_is_an_error_and_the_barrier_is_closed() {
    for fault in [Fault::Twice, Fault::EndsEarly, Fault::Fails] {
        let mut faulty = Faulty { inner: source(), fault };
        let mut s = session();
        let error = s.forward(&[5], Phase::Decode, &mut faulty, Logits::Last, None).unwrap_err();
        match fault {
            Fault::Twice => assert!(matches!(error, DecodeError::UnexpectedExpert(_)), "{error}"),
            Fault::EndsEarly => assert!(matches!(error, DecodeError::ExpertsMissing { .. }), "{error}"),
            Fault::Fails => assert_eq!(error.to_string(), "layer L1: drive nvme1: input/output error"),
        }
        // A barrier left open would make this panic.
        faulty
            .inner
            .open_barrier(&StepInfo { step: 0, phase: Phase::Decode, pos: 0, rows: 1 }, LayerId(1), &[])
            .unwrap();
    }
}

#[test]
fn a_missing_or_misshapen_tensor_is_named() {
    let m = &mini().checkpoint;
    let load_without = |change: &dyn Fn(&str, &mut DType, &mut Vec<u64>) -> bool| {
        let specs: Vec<_> = trunk_tensors(&m.config)
            .into_iter()
            .filter_map(|s| {
                let view = m.trunk.get(&s.name).unwrap();
                let (mut dtype, mut shape) = (view.dtype, view.shape.to_vec());
                change(&s.name, &mut dtype, &mut shape).then_some((s.name, dtype, shape, view.bytes))
            })
            .collect();
        Decoder::load(m.config.clone(), Arc::new(Trunk::from_tensors(specs))).err().unwrap().to_string()
    };
    let name = "model.layers.3.self_attn.o_proj.weight";
    let error = load_without(&|n, _, _| n != name);
    assert!(error.contains(name) && error.contains("not in the trunk"), "{error}");
    let error = load_without(&|n, _, shape| {
        if n == name {
            shape.reverse();
        }
        true
    });
    assert!(error.contains(name) && error.contains("[192, 256]") && error.contains("[256, 192]"), "{error}");
    let error = load_without(&|n, dtype, _| {
        if n == name {
            *dtype = DType::F32;
        }
        true
    });
    assert!(error.contains(name) && error.contains("F32"), "{error}");
}
