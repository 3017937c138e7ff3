//! How often a comparison of an arm with itself is called an effect, and how often a real effect is: campaigns as `ab` runs
//! them (the A/A floor, then balanced pairs), simulated with drift and heavy tails. Rates are counted, nothing is timed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::stats::compare::{FALSE_VERDICTS, Outcome, Rule, floor_of};
use argodrive::stats::{SplitMix64, balanced_order};

/// Campaigns per scenario, cut into parts with the seeds 1, 2, ... so that no seed can be picked.
const CAMPAIGNS: u64 = 10_000;
const PARTS: u64 = 5;
/// Fewer than a real campaign takes, so that 10,000 of them are quick; the intervals only get less steady.
const RESAMPLES: usize = 200;
/// Pairs of the floor, as `ab` measures by default.
const FLOOR_PAIRS: usize = 8;

/// What disturbs runs.
#[derive(Clone, Copy)]
struct Weather {
    name: &'static str,
    /// Standard deviation of one run, and of a run in a bad moment, which is one in ten.
    sigma: f64,
    bad_sigma: f64,
    /// Change from run to run that never ends, and the step of a walk on top of it.
    drift: f64,
    walk: f64,
}

const QUIET: Weather = Weather { name: "quiet", sigma: 0.01, bad_sigma: 0.01, drift: 0.0, walk: 0.0 };
const DRIFTING: Weather = Weather { name: "drifting", sigma: 0.01, bad_sigma: 0.01, drift: 0.004, walk: 0.004 };
const ROUGH: Weather = Weather { name: "rough", sigma: 0.01, bad_sigma: 0.1, drift: 0.004, walk: 0.004 };
/// Outliers only ever make a run slower.
const STALLING: Weather = Weather { name: "stalling", sigma: 0.01, bad_sigma: -0.1, drift: 0.002, walk: 0.002 };

/// Nearly normal, variance 1.
fn bell(rng: &mut SplitMix64) -> f64 {
    (0..12).map(|_| rng.next_u64() as f64 / 2f64.powi(64) - 0.5).sum()
}

struct Machine {
    rng: SplitMix64,
    weather: Weather,
    level: f64,
}

impl Machine {
    /// Speed of a run of an arm whose logarithm of speed is `arm`.
    fn run(&mut self, arm: f64) -> f64 {
        self.level += self.weather.drift + self.weather.walk * bell(&mut self.rng);
        let bad = self.rng.below(10) == 0;
        let noise = match (bad, self.weather.bad_sigma) {
            (true, s) if s < 0.0 => s * bell(&mut self.rng).abs(),
            (true, s) => s * bell(&mut self.rng),
            (false, _) => self.weather.sigma * bell(&mut self.rng),
        };
        (self.level + arm + noise).exp() * 20.0
    }

    fn pairs(&mut self, count: usize, effect: f64) -> Vec<(f64, f64)> {
        let mut arms = [Vec::new(), Vec::new()];
        for arm in balanced_order(2, count, 0) {
            arms[arm].push(self.run(if arm == 1 { effect } else { 0.0 }));
        }
        let [control, candidate] = arms;
        control.into_iter().zip(candidate).collect()
    }
}

/// Share of campaigns that are called better or worse, without the floor (an interval alone) and with it.
fn called(weather: Weather, pairs: usize, stop: bool, effect: f64) -> (f64, f64) {
    let (mut alone, mut whole) = (0, 0);
    for part in 1..=PARTS {
        let mut machine = Machine { rng: SplitMix64::new(part), weather, level: 0.0 };
        for campaign in 0..CAMPAIGNS / PARTS {
            machine.level = 0.0;
            let rule = Rule { pairs, stop, candidates: 1, resamples: RESAMPLES, seed: campaign };
            let itself = machine.pairs(FLOOR_PAIRS, 0.0);
            let floor = floor_of(&rule.floor(&itself).unwrap());
            let measured = machine.pairs(pairs, effect);
            let speaks = |floor| {
                let outcome = rule.decide(&measured, floor, true).unwrap().outcome;
                usize::from(matches!(outcome, Outcome::Better | Outcome::Worse))
            };
            // What the interval alone does not call, no floor makes it call.
            if speaks(0.0) > 0 {
                alone += 1;
                whole += speaks(floor);
            }
        }
    }
    (alone as f64 / CAMPAIGNS as f64, whole as f64 / CAMPAIGNS as f64)
}

#[test]
fn ten_thousand_null_campaigns_are_called_an_effect_in_at_most_one_of_twenty() {
    let mut spoke = 0.0;
    for weather in [QUIET, DRIFTING, ROUGH, STALLING] {
        for (pairs, stop) in [(6, false), (12, true)] {
            let (alone, whole) = called(weather, pairs, stop, 0.0);
            println!(
                "null {:9} {pairs:2} pairs, stop {stop:5}: interval alone {alone:.4}, with the floor {whole:.4}",
                weather.name
            );
            assert!(whole <= FALSE_VERDICTS, "{}, {pairs} pairs: {whole}", weather.name);
            // Three standard deviations of the count at exactly 5 %.
            assert!(alone <= FALSE_VERDICTS + 0.0066, "{}, {pairs} pairs, no floor: {alone}", weather.name);
            spoke += alone;
        }
    }
    assert!(spoke > 0.0, "an interval that never speaks is no interval");
}

#[test]
fn a_true_effect_of_three_per_cent_is_found_far_more_often_than_by_chance() {
    for (weather, at_least) in [(QUIET, 0.8), (DRIFTING, 0.3), (ROUGH, 0.01)] {
        for (pairs, stop) in [(8, false), (12, true)] {
            let (alone, whole) = called(weather, pairs, stop, 0.03);
            println!(
                "3 % in {:9} {pairs:2} pairs, stop {stop:5}: interval alone {alone:.4}, with the floor {whole:.4}",
                weather.name
            );
            assert!(whole >= at_least, "{}, {pairs} pairs: found in {whole}", weather.name);
        }
    }
}
