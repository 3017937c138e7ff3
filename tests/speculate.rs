//! Speculative decoding on argo-mini: the tokens are those of plain decoding whatever is proposed, and after every step each
//! state has the bits of a session that was never fed a wrong proposal.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use argodrive::clock::Clock;
use argodrive::decode::generate::{Beside, Generation, Request, StopReason, generate, generate_with};
use argodrive::decode::kv::KvCounters;
use argodrive::decode::observe::Route;
use argodrive::decode::sampler::{Sampler, SamplerOptions};
use argodrive::decode::speculate::{
    AcceptRule, DepthPolicy, Drafter, DrafterKind, ModelDrafter, NgramDrafter, Proposals, SpeculateError,
};
use argodrive::decode::{
    DecodeError, Decoder, GuessSource, Logits, Observer, Session, SessionOptions, SpeculateOptions, Speculator,
};
use argodrive::ids::LayerId;
use argodrive::source::{Phase, StepInfo};
use common::{Checkpoint, TestSource, load, repo};
use serde_json::Value;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

struct Models {
    checkpoint: Checkpoint,
    decoder: Arc<Decoder>,
    draft: Arc<Decoder>,
    /// Prompts and the tokens that the reference gives for them.
    golden: Vec<(Vec<u32>, Vec<u32>)>,
}

fn models() -> &'static Models {
    static CELL: OnceLock<Models> = OnceLock::new();
    CELL.get_or_init(|| {
        let checkpoint = load("models/argo-mini");
        let decoder = Decoder::load(checkpoint.config.clone(), checkpoint.trunk.clone()).unwrap();
        let draft = load("models/argo-mini-draft");
        let draft = Decoder::load(draft.config, draft.trunk).unwrap();
        let text = std::fs::read_to_string(repo("tests/fixtures/oracle/argo-mini.golden.json")).unwrap();
        let golden: Value = serde_json::from_str(&text).unwrap();
        let ids = |v: &Value| serde_json::from_value::<Vec<u32>>(v.clone()).unwrap();
        let prompts = golden["prompts"].as_array().unwrap();
        let golden = prompts.iter().map(|p| (ids(&p["ids"]), ids(&p["greedy"]))).collect();
        Models { checkpoint, decoder, draft, golden }
    })
}

const CONTEXT: usize = 512;

fn session_of(decoder: &Arc<Decoder>, max_context: usize) -> Session {
    let options = SessionOptions { max_context, max_rows: 128, clock: Clock::start(), guess: GuessSource::None };
    Session::new(decoder.clone(), options).unwrap()
}

fn session() -> Session {
    session_of(&models().decoder, CONTEXT)
}

fn source() -> TestSource {
    TestSource::new(&models().checkpoint.experts)
}

fn greedy() -> Sampler {
    Sampler::new(SamplerOptions::default()).unwrap()
}

fn options(speculate: DrafterKind, draft_depth: usize) -> SpeculateOptions {
    SpeculateOptions { speculate, draft_depth, ..SpeculateOptions::default() }
}

fn speculator(options: &SpeculateOptions, draws: Option<Sampler>) -> Speculator {
    let drafter: Box<dyn Drafter> = match options.speculate {
        DrafterKind::Model => Box::new(ModelDrafter::new(session_of(&models().draft, CONTEXT), draws, 64)),
        _ => Box::new(NgramDrafter::new()),
    };
    Speculator::new(options, drafter)
}

fn request<'a>(prompt: &'a [u32], max_new: usize, stop: &'a [u32]) -> Request<'a> {
    Request { prompt, max_new, stop, piece_rows: 64 }
}

fn go_on(_: u32) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Generates with proposals into a session that is made empty first.
fn speculate(s: &mut Session, by: &mut Speculator, sampler: &mut Sampler, request: Request<'_>) -> Generation {
    s.reset();
    let beside = Beside { speculator: Some(by), ..Beside::default() };
    generate_with(s, &mut source(), sampler, request, &mut go_on, beside).unwrap()
}

fn assert_same_state(a: &Session, b: &Session, what: &str) {
    assert_eq!(a.position(), b.position(), "{what}");
    for layer in (0..12).map(LayerId) {
        match (a.kda_state(layer), b.kda_state(layer)) {
            (Some(a), Some(b)) => assert!(a.state == b.state && a.conv == b.conv, "{what}: layer {layer}"),
            _ => assert!(a.mla_rows(layer).unwrap() == b.mla_rows(layer).unwrap(), "{what}: layer {layer}"),
        }
    }
}

const STOP: [u32; 2] = [2, 5];

#[test]
fn greedy_tokens_are_the_reference_texts_whatever_is_proposed() {
    let mut s = session();
    for (kind, depths) in [(DrafterKind::Ngram, 1..=8), (DrafterKind::Model, 1..=8)] {
        let (mut accepted, mut rejected) = (0, 0);
        for depth in depths {
            let mut by = speculator(&options(kind, depth), None);
            // every depth with its own third of the prompts, so that all of them are met by both drafters
            for (prompt, text) in models().golden.iter().skip(depth % 3).step_by(3) {
                let done = speculate(&mut s, &mut by, &mut greedy(), request(prompt, text.len(), &STOP));
                assert_eq!(&done.token_ids, text, "{kind:?} depth {depth}");
                assert_eq!(s.position(), prompt.len() + text.len() - 1);
            }
            let c = by.counters();
            assert_eq!(c.deepest(), depth, "{kind:?}");
            let tokens: u64 = c.widths.iter().map(|w| w.tokens).sum();
            let all: usize = models().golden.iter().skip(depth % 3).step_by(3).map(|(_, t)| t.len() - 1).sum();
            assert_eq!(tokens, all as u64, "every token but the first comes from a step");
            accepted += c.accepted.iter().sum::<u64>();
            rejected += c.made() - c.accepted.iter().sum::<u64>();
            assert_eq!(c.made(), c.proposed.iter().sum::<u64>());
        }
        assert!(accepted > 20 && rejected > 20, "{kind:?}: {accepted} accepted, {rejected} rejected");
    }
}

#[test]
fn after_every_step_the_states_have_the_bits_of_a_plain_session() {
    let (prompt, _) = &models().golden[0];
    let (mut plain, mut s) = (session(), session());
    for kind in [DrafterKind::Ngram, DrafterKind::Model] {
        for end in [1, 2, 3, 5, 8, 13, 21, 34] {
            // The text is broken off in the middle of what a pass accepted, too.
            let until = |end: usize| {
                let mut seen = 0;
                move |_| {
                    seen += 1;
                    if seen < end { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
                }
            };
            let request = request(prompt, 64, &[]);
            plain.reset();
            let want = generate(&mut plain, &mut source(), &mut greedy(), request, &mut until(end)).unwrap();
            s.reset();
            let mut by = speculator(&options(kind, 5), None);
            let beside = Beside { speculator: Some(&mut by), ..Beside::default() };
            let got = generate_with(&mut s, &mut source(), &mut greedy(), request, &mut until(end), beside).unwrap();
            assert_eq!((got.token_ids, got.stopped), (want.token_ids, StopReason::Interrupted));
            assert_same_state(&s, &plain, &format!("{kind:?}, {end} tokens"));
        }
    }
}

/// Proposes what it was told: the reference text with some tokens changed.
struct Scripted {
    text: Vec<u32>,
    at: usize,
    wrong_every: usize,
}

impl Drafter for Scripted {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Ngram
    }
    fn caches(&self) -> KvCounters {
        KvCounters::default()
    }
    fn begin(&mut self, _: &[u32], _: usize) -> Result<(), SpeculateError> {
        self.at = 0;
        Ok(())
    }
    fn extend(&mut self, _: u32) {
        self.at += 1;
    }
    fn propose(&mut self, depth: usize, out: &mut Proposals) -> Result<(), SpeculateError> {
        for at in self.at..self.at + depth {
            let Some(&token) = self.text.get(at) else { break };
            out.push(if at % self.wrong_every == self.wrong_every - 1 { token ^ 1 } else { token });
        }
        Ok(())
    }
}

fn scripted(text: &[u32], wrong_every: usize, depth: usize) -> Speculator {
    let drafter = Scripted { text: text.to_vec(), at: 0, wrong_every };
    Speculator::new(&options(DrafterKind::Ngram, depth), Box::new(drafter))
}

#[test]
fn a_text_ends_exactly_where_a_plain_one_does() {
    let (prompt, text) = &models().golden[1];
    let (mut plain, mut s) = (session(), session());
    let never = usize::MAX;
    let mut check = |by: &mut Speculator, request: Request<'_>, why: StopReason| {
        plain.reset();
        let want = generate(&mut plain, &mut source(), &mut greedy(), request, &mut go_on).unwrap();
        let got = speculate(&mut s, by, &mut greedy(), request);
        assert_eq!((&got.token_ids, got.stopped), (&want.token_ids, want.stopped));
        assert_eq!(got.stopped, why);
        assert_same_state(&s, &plain, "at its end");
    };
    // a stop token at every place inside what one pass accepts
    for at in 1..7 {
        let stop = [text[at]];
        check(&mut scripted(text, never, 6), request(prompt, 64, &stop), StopReason::StopToken);
    }
    for max_new in 1..9 {
        let mut by = scripted(text, never, 4);
        check(&mut by, request(prompt, max_new, &[]), StopReason::MaxNew);
        let passes: u64 = by.counters().widths.iter().map(|w| w.passes).sum();
        assert_eq!(passes, (max_new as u64 - 1).div_ceil(5), "all are right, so a pass gives five");
    }
    let mut by = scripted(text, 3, 4);
    check(&mut by, request(prompt, 20, &[]), StopReason::MaxNew);
    assert!(by.counters().accepted[0] > by.counters().accepted[2]);
}

#[test]
fn a_full_context_ends_the_text_at_the_same_token() {
    let (prompt, text) = &models().golden[1];
    for room in 1..8 {
        let context = prompt.len() + room;
        let (mut plain, mut s) = (session_of(&models().decoder, context), session_of(&models().decoder, context));
        let request = request(prompt, 64, &[]);
        let want = generate(&mut plain, &mut source(), &mut greedy(), request, &mut go_on).unwrap();
        let got = speculate(&mut s, &mut scripted(text, usize::MAX, 4), &mut greedy(), request);
        assert_eq!((got.token_ids, got.stopped), (want.token_ids, StopReason::ContextFull));
        assert_same_state(&s, &plain, "full");
    }
}

#[test]
fn drawn_tokens_are_those_of_the_seed_unless_proposals_are_drawn_too() {
    let (prompt, _) = &models().golden[2];
    let sampling = SamplerOptions { temperature: 0.9, top_p: 0.95, seed: 11, ..SamplerOptions::default() };
    let drawn = || Sampler::new(sampling).unwrap();
    let request = request(prompt, 40, &[]);
    let mut s = session();
    let mut plain_sampler = drawn();
    let plain = generate(&mut s, &mut source(), &mut plain_sampler, request, &mut go_on).unwrap().token_ids;
    for (kind, accept) in [
        (DrafterKind::Ngram, AcceptRule::ExactMatch),
        (DrafterKind::Ngram, AcceptRule::Standard),
        (DrafterKind::Model, AcceptRule::ExactMatch),
    ] {
        let mut by = speculator(&SpeculateOptions { draft_accept: accept, ..options(kind, 4) }, None);
        let mut sampler = drawn();
        assert_eq!(speculate(&mut s, &mut by, &mut sampler, request).token_ids, plain, "{kind:?} {accept:?}");
        assert_eq!(sampler.state(), plain_sampler.state(), "one draw for each token, proposals or not");
    }
    let standard = || {
        let draws = Sampler::new(SamplerOptions { seed: 77, ..sampling }).unwrap();
        let mut by = speculator(&options(DrafterKind::Model, 4), Some(draws));
        let (mut s, mut sampler) = (session(), drawn());
        let text = speculate(&mut s, &mut by, &mut sampler, request).token_ids;
        let c = sampler.counters();
        assert_eq!((c.tokens, c.drawn), (40, 40));
        assert!(c.ratio_tests > 0 && by.counters().judged_exact == 0);
        assert!(by.counters().accepted[0] > 0);
        text
    };
    assert_eq!(standard(), standard(), "a seed repeats");
}

#[test]
fn an_adaptive_depth_changes_no_token() {
    let (prompt, text) = &models().golden[0];
    let mut by =
        speculator(&SpeculateOptions { draft_policy: DepthPolicy::Adaptive, ..options(DrafterKind::Model, 4) }, None);
    let mut s = session();
    let done = speculate(&mut s, &mut by, &mut greedy(), request(prompt, text.len(), &STOP));
    assert_eq!(&done.token_ids, text);
    let c = by.counters();
    assert_eq!(c.chosen_fixed.iter().sum::<u64>(), 0);
    assert!(c.chosen_adaptive[0] >= 3, "it measures plain passes first");
}

#[test]
fn a_pass_awaits_the_union_of_its_rows_once_and_says_which_rows_were_kept() {
    #[derive(Default)]
    struct Kept {
        routes: Vec<(StepInfo, u16, usize)>,
        kept: Vec<(StepInfo, usize)>,
    }
    impl Observer for Kept {
        fn route(&mut self, r: &Route<'_>) {
            self.routes.push((r.step, r.layer.0, r.row));
        }
        fn kept(&mut self, step: &StepInfo, rows: usize) {
            self.kept.push((*step, rows));
        }
    }
    let (prompt, text) = &models().golden[1];
    let (mut s, mut source, mut seen) = (session(), source(), Kept::default());
    let mut by = scripted(text, 4, 3);
    let beside = Beside { observer: Some(&mut seen), speculator: Some(&mut by), ..Beside::default() };
    let request = request(prompt, 24, &[]);
    generate_with(&mut s, &mut source, &mut greedy(), request, &mut go_on, beside).unwrap();
    let passes: Vec<_> = source.barriers.chunks(11).skip(1).collect();
    assert!(passes.iter().all(|p| p.iter().all(|b| b.0 == p[0].0) && p.len() == 11));
    let verify: Vec<_> = passes.iter().filter(|p| p[0].0.phase == Phase::Verify).collect();
    assert_eq!(verify.len(), seen.kept.len());
    let mut position = prompt.len() as u64;
    for (pass, (step, rows)) in verify.iter().zip(&seen.kept) {
        assert_eq!(pass[0].0, *step);
        assert_eq!(step.pos, position);
        assert!(step.rows > 1 && (1..=step.rows as usize).contains(rows), "{step:?}: {rows}");
        assert!(pass.iter().all(|b| (6..=6 * step.rows as usize).contains(&b.2.len())));
        position += *rows as u64;
    }
    let c = by.counters();
    let awaited: usize = verify.iter().flat_map(|p| p.iter()).map(|b| b.2.len()).sum();
    assert_eq!(c.widths[1..].iter().map(|w| w.experts).sum::<u64>(), awaited as u64);
    assert_eq!(c.verify_passes(), verify.len() as u64);
    assert_eq!(c.replayed_rows, seen.kept.iter().map(|k| k.1 as u64).sum::<u64>());
    assert!(seen.routes.iter().any(|(step, _, row)| step.phase == Phase::Verify && *row == 3));
}

#[test]
fn rows_that_wait_for_a_word_block_the_session_and_bad_words_are_refused() {
    let (prompt, _) = &models().golden[1];
    let (mut s, mut source) = (session(), source());
    s.forward(prompt, Phase::Prefill, &mut source, Logits::None, None).unwrap();
    let refused = s.verify(&[7, 8], &mut source, None).unwrap_err();
    assert!(matches!(refused, DecodeError::Rows { rows: 2, max: 0 }), "{refused}");
    s.reserve_verify(3);
    assert!(matches!(s.verify(&[7; 4], &mut source, None), Err(DecodeError::Rows { rows: 4, max: 3 })));
    assert!(matches!(s.keep(1, None), Err(DecodeError::Unusable)), "nothing waits");
    s.verify(&[7, 8, 9], &mut source, None).unwrap();
    assert_eq!(s.position(), prompt.len());
    assert!(matches!(s.forward(&[7], Phase::Decode, &mut source, Logits::Last, None), Err(DecodeError::Unusable)));
    for rows in [0, 4] {
        assert!(matches!(s.keep(rows, None), Err(DecodeError::Rows { .. })));
    }
    s.keep(2, None).unwrap();
    assert_eq!(s.position(), prompt.len() + 2);
    let mut plain = session();
    plain.forward(prompt, Phase::Prefill, &mut source, Logits::None, None).unwrap();
    plain.forward(&[7], Phase::Decode, &mut source, Logits::None, None).unwrap();
    plain.forward(&[8], Phase::Decode, &mut source, Logits::None, None).unwrap();
    assert_same_state(&s, &plain, "two of three rows kept");
    assert!(matches!(plain.rewind(), Err(DecodeError::Unusable)), "there is no mark to go back to");
    plain.mark();
    plain.forward(&[9, 10], Phase::Decode, &mut source, Logits::None, None).unwrap();
    plain.rewind().unwrap();
    assert_same_state(&s, &plain, "put back");
    s.verify(&[1, 2], &mut source, None).unwrap();
    s.reset();
    assert_eq!(s.position(), 0);
    s.forward(&[7], Phase::Decode, &mut source, Logits::Last, None).unwrap();
}
