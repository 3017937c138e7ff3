//! The decoder against reference outputs: logits, routes, per-layer values and states of a random checkpoint with
//! every mechanism of the architecture, and the greedy texts of the two models in `models/`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use argodrive::clock::Clock;
use argodrive::decode::kernels::KernelIsa;
use argodrive::decode::observe::Route;
use argodrive::decode::{Decoder, GuessSource, Logits, Observer, Point, Session, SessionOptions};
use argodrive::ids::LayerId;
use argodrive::source::{ExpertSource, Phase};
use common::{Checkpoint, NoExperts, TestSource, argmax, assert_close, load, repo};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

fn isas() -> Vec<KernelIsa> {
    KernelIsa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}

struct Model {
    checkpoint: Checkpoint,
    decoder: Arc<Decoder>,
}

fn model(cell: &'static OnceLock<Model>, folder: &str) -> &'static Model {
    cell.get_or_init(|| {
        let checkpoint = load(folder);
        let decoder = Decoder::load(checkpoint.config.clone(), checkpoint.trunk.clone()).unwrap();
        Model { checkpoint, decoder }
    })
}

fn mini() -> &'static Model {
    static CELL: OnceLock<Model> = OnceLock::new();
    model(&CELL, "models/argo-mini")
}

fn tiny() -> &'static Model {
    static CELL: OnceLock<Model> = OnceLock::new();
    model(&CELL, "tests/fixtures/oracle/tiny")
}

fn session(decoder: &Arc<Decoder>) -> Session {
    Session::new(
        decoder.clone(),
        SessionOptions { max_context: 512, max_rows: 128, clock: Clock::start(), guess: GuessSource::None },
    )
    .unwrap()
}

fn json(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(repo(path)).unwrap()).unwrap()
}

fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn floats(v: &Value) -> Vec<f32> {
    v.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

/// Keeps everything that a pass shows.
#[derive(Default)]
struct Recorder {
    routes: HashMap<(u16, usize), (Vec<u32>, Vec<f32>)>,
    values: HashMap<(u16, Point), Vec<f32>>,
}

impl Observer for Recorder {
    fn route(&mut self, r: &Route<'_>) {
        let ids = r.experts.iter().map(|e| u32::from(e.0)).collect();
        self.routes.insert((r.layer.0, r.position as usize), (ids, r.weights.to_vec()));
    }

    fn values(&mut self, layer: LayerId, point: Point, values: &[f32]) {
        self.values.insert((layer.0, point), values.to_vec());
    }
}

struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    fn get(&self, name: &str) -> Option<Vec<f32>> {
        let all = SafeTensors::deserialize(&self.bytes).unwrap();
        let t = all.tensor(name).ok()?;
        Some(t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    }

    fn check(&self, name: &str, got: &[f32]) {
        assert_close(name, got, &self.get(name).unwrap(), 1e-4);
    }

    fn check_states(&self, when: &str, session: &Session) {
        for layer in 0..9u16 {
            let name = |part: &str| format!("{when}.layer{layer}.state.{part}");
            match (session.kda_state(LayerId(layer)), session.mla_rows(LayerId(layer))) {
                (Some(kda), None) => {
                    self.check(&name("S"), kda.state);
                    for (part, conv) in ["conv_q", "conv_k", "conv_v"].into_iter().zip(kda.conv) {
                        self.check(&name(part), conv);
                    }
                }
                (None, Some(rows)) => self.check(&name("kv"), rows),
                other => panic!("layer {layer} has {other:?}"),
            }
        }
    }
}

fn check_route(what: &str, got: &(Vec<u32>, Vec<f32>), want_ids: &Value, want_weights: &Value) {
    assert_eq!(got.0, ids(want_ids), "{what}");
    assert_close(what, &got.1, &floats(want_weights), 1e-4);
}

#[test]
fn tiny_matches_the_reference_in_every_value() {
    let golden = Golden { bytes: std::fs::read(repo("tests/fixtures/oracle/tiny/golden.safetensors")).unwrap() };
    let expected = json("tests/fixtures/oracle/tiny/golden.json");
    let (prompt, greedy) = (ids(&expected["prompt_ids"]), ids(&expected["greedy_ids"]));
    let checkpoint = &tiny().checkpoint;
    for isa in isas() {
        let decoder = Decoder::load_with(checkpoint.config.clone(), checkpoint.trunk.clone(), isa).unwrap();
        let (mut s, mut source) = (session(&decoder), TestSource::new(&checkpoint.experts));
        let mut seen = Recorder::default();
        let logits = s.forward(&prompt, Phase::Prefill, &mut source, Logits::All, Some(&mut seen)).unwrap();
        golden.check("prefill.logits", logits);
        let mut next = argmax(&logits[logits.len() - 768..]);
        golden.check_states("prefill", &s);
        for layer in 0..9u16 {
            for (part, point) in [
                ("attn_in", Point::AttnIn),
                ("attn_out", Point::AttnOut),
                ("mlp_in", Point::FfnIn),
                ("mlp_out", Point::FfnOut),
                ("out", Point::Out),
            ] {
                golden.check(&format!("prefill.layer{layer}.{part}"), &seen.values[&(layer, point)]);
            }
            let routes = &expected["routing_prefill"][layer.to_string()];
            for (row, (ids, weights)) in routes["ids"]
                .as_array()
                .into_iter()
                .flatten()
                .zip(routes["weights"].as_array().into_iter().flatten())
                .enumerate()
            {
                check_route(&format!("{isa} layer {layer} row {row}"), &seen.routes[&(layer, row)], ids, weights);
            }
        }
        assert_eq!(seen.routes.len(), 8 * prompt.len());

        let all = golden.get("decode.logits").unwrap();
        for (step, &want) in greedy.iter().enumerate() {
            assert_eq!(next, want, "{isa} greedy token {step}");
            let mut seen = Recorder::default();
            let logits = s.forward(&[next], Phase::Decode, &mut source, Logits::Last, Some(&mut seen)).unwrap();
            assert_close(&format!("decode logits {step}"), logits, &all[step * 768..(step + 1) * 768], 1e-4);
            next = argmax(logits);
            for layer in 0..9u16 {
                golden.check(&format!("decode{step}.layer{layer}.out"), &seen.values[&(layer, Point::Out)]);
                if layer > 0 {
                    let route = &expected["routing_decode"][step][layer.to_string()];
                    let got = &seen.routes[&(layer, prompt.len() + step)];
                    check_route(&format!("{isa} step {step} layer {layer}"), got, &route["ids"], &route["weights"]);
                }
            }
        }
        golden.check_states("end", &s);
        assert_eq!(s.position(), prompt.len() + greedy.len());
    }
}

/// Decodes all prompts of a golden file; compares greedy ids, the prompt's routes and its last logits.
fn check_texts(model: &Model, golden: &str, source: &mut dyn ExpertSource) {
    let golden = json(golden);
    let mut s = session(&model.decoder);
    let prompts = golden["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 6);
    for p in prompts {
        let what = p["prompt"].as_str().unwrap();
        let (prompt, greedy) = (ids(&p["ids"]), ids(&p["greedy"]));
        s.reset();
        let mut seen = Recorder::default();
        let logits = s.forward(&prompt, Phase::Prefill, source, Logits::Last, Some(&mut seen)).unwrap();
        assert_close(what, logits, &floats(&p["last_prompt_logits"]), 1e-3);
        let mut text = vec![argmax(logits)];
        let mut routes = 0;
        for layer in p["routes"].as_array().unwrap() {
            let index = layer["layer"].as_u64().unwrap() as u16;
            for (row, want) in layer["ids"].as_array().unwrap().iter().enumerate() {
                assert_eq!(seen.routes[&(index, row)].0, ids(want), "{what}: layer {index} row {row}");
                routes += 1;
            }
        }
        assert_eq!(routes, seen.routes.len());
        while text.len() < greedy.len() && ![2, 5].contains(text.last().unwrap()) {
            let last = *text.last().unwrap();
            text.push(argmax(s.forward(&[last], Phase::Decode, source, Logits::Last, None).unwrap()));
        }
        assert_eq!(text, greedy, "{what}");
    }
}

#[test]
fn argo_mini_writes_the_reference_texts() {
    let mut source = TestSource::new(&mini().checkpoint.experts);
    check_texts(mini(), "tests/fixtures/oracle/argo-mini.golden.json", &mut source);
    assert!(source.barriers.iter().all(|(step, _, experts)| step.phase == Phase::Prefill || experts.len() == 6));
}

#[test]
fn a_dense_model_writes_the_reference_texts_without_touching_the_source() {
    static CELL: OnceLock<Model> = OnceLock::new();
    let draft = model(&CELL, "models/argo-mini-draft");
    check_texts(draft, "tests/fixtures/oracle/argo-mini-draft.golden.json", &mut NoExperts);
}
