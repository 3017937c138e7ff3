//! The two gate variants of older checkpoints, checked against the released form: weights are chosen so that both
//! forms describe the same function.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use argodrive::clock::Clock;
use argodrive::decode::{Decoder, GuessSource, Logits, Session, SessionOptions};
use argodrive::model::config::ModelConfig;
use argodrive::model::tensors::{DType, trunk_tensors};
use argodrive::source::Phase;
use argodrive::store::trunk::Trunk;
use common::{Checkpoint, TestSource, assert_close, load};
use std::collections::HashMap;
use std::sync::Arc;

type Tensors = HashMap<String, (DType, Vec<u64>, Vec<u8>)>;

const TINY: &str = "tests/fixtures/oracle/tiny";

fn tensors(c: &Checkpoint) -> Tensors {
    let owned = |name: &str| {
        let view = c.trunk.get(name).unwrap();
        (view.dtype, view.shape.to_vec(), view.bytes.to_vec())
    };
    trunk_tensors(&c.config).into_iter().map(|s| (s.name.clone(), owned(&s.name))).collect()
}

fn logits(c: &Checkpoint, config: &ModelConfig, tensors: &Tensors) -> Vec<f32> {
    let trunk = Trunk::from_tensors(tensors.iter().map(|(n, (d, s, b))| (n.clone(), *d, s.clone(), b.as_slice())));
    let decoder = Decoder::load(config.clone(), Arc::new(trunk)).unwrap();
    let options = SessionOptions { max_context: 64, max_rows: 64, clock: Clock::start(), guess: GuessSource::None };
    let mut session = Session::new(decoder, options).unwrap();
    let prompt: Vec<u32> = (0..24).map(|i| i * 29 % 700).collect();
    let mut source = TestSource::new(&c.experts);
    session.forward(&prompt, Phase::Prefill, &mut source, Logits::All, None).unwrap().to_vec()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn kda_layers(c: &Checkpoint) -> Vec<String> {
    let suffix = ".self_attn.A_log";
    trunk_tensors(&c.config)
        .iter()
        .filter_map(|s| s.name.strip_suffix(suffix))
        .map(|p| format!("{p}.self_attn."))
        .collect()
}

#[test]
fn a_factored_output_gate_equals_the_full_one() {
    let c = load(TINY);
    let unchanged = logits(&c, &c.config, &tensors(&c));
    let (h, d, p) = (c.config.hidden_size, c.config.kda.head_dim, c.config.kda.heads * c.config.kda.head_dim);
    let (mut full, mut factored) = (tensors(&c), tensors(&c));
    for layer in kda_layers(&c) {
        // The first factor picks the first d inputs, so the full matrix is the second one beside zeros.
        let g = full.get_mut(&format!("{layer}g_proj.weight")).unwrap();
        let mut second = Vec::new();
        for row in g.2.chunks_exact_mut(h * 2) {
            second.extend_from_slice(&row[..d * 2]);
            row[d * 2..].fill(0);
        }
        let mut first = vec![0u8; d * h * 2];
        (0..d).for_each(|i| first[(i * h + i) * 2..][..2].copy_from_slice(&0x3f80u16.to_le_bytes()));
        factored.remove(&format!("{layer}g_proj.weight"));
        factored.insert(format!("{layer}g_a_proj.weight"), (DType::BF16, vec![d as u64, h as u64], first));
        factored.insert(format!("{layer}g_b_proj.weight"), (DType::BF16, vec![p as u64, d as u64], second));
    }
    let mut config = c.config.clone();
    let want = logits(&c, &config, &full);
    config.kda.full_rank_gate = false;
    assert_close("factored gate", &logits(&c, &config, &factored), &want, 1e-5);
    assert!(unchanged != want, "the gate matters");
}

#[test]
fn the_softplus_decay_equals_the_bounded_one_where_they_meet() {
    let c = load(TINY);
    let (d, heads) = (c.config.kda.head_dim, c.config.kda.heads);
    let (mut bounded, mut softplus) = (tensors(&c), tensors(&c));
    for layer in kda_layers(&c) {
        let rates = floats(&bounded[&format!("{layer}A_log")].2);
        let bias = floats(&bounded[&format!("{layer}dt_bias")].2);
        assert!(rates.len() > heads, "the fixture pads A_log");
        // Without a projection the decay is a constant per channel: -5 s(r b) = -r softplus(b') gives b'.
        let moved: Vec<f32> = bias
            .iter()
            .enumerate()
            .map(|(channel, &b)| {
                let rate = f64::from(rates[channel / d]).exp();
                let y = 5.0 / (1.0 + (-rate * f64::from(b)).exp()) / rate;
                y.exp_m1().ln() as f32
            })
            .collect();
        for set in [&mut bounded, &mut softplus] {
            set.get_mut(&format!("{layer}f_b_proj.weight")).unwrap().2.fill(0);
        }
        softplus.get_mut(&format!("{layer}dt_bias")).unwrap().2 = bytes(&moved);
    }
    let mut config = c.config.clone();
    let want = logits(&c, &config, &bounded);
    config.kda.gate_lower_bound = None;
    assert_close("softplus decay", &logits(&c, &config, &softplus), &want, 1e-4);
    let unmoved = logits(&c, &config, &bounded);
    assert!(unmoved.iter().zip(&want).any(|(a, b)| (a - b).abs() > 0.01), "the variant matters");
}
