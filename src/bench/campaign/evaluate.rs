//! What the records of a campaign say: the floor, a verdict for each candidate, and figures of each arm. From
//! `experiment.json` and the records alone, so that it can be repeated at any time; measures nothing.

use super::CampaignError;
use super::file::CampaignFile;
use super::order::{Part, Step};
use crate::bench::record::RunRecord;
use crate::replay::verdict::{Bound, Verdict};
use crate::stats::compare::{Outcome, floor_of};
use crate::stats::{self, MIN_PAIRS, PairedRatio};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Two runs of a row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// Its row.
    pub row: usize,
    /// Name of the prompt.
    pub prompt: String,
    /// Decode tokens per second of the control.
    pub control_tok_s: f64,
    /// And of the candidate.
    pub candidate_tok_s: f64,
    /// `ln(candidate / control)`.
    pub log_ratio: f64,
    /// The control ran first.
    pub control_first: bool,
    /// Seconds between the starts of the two runs; `None` when a start cannot be read.
    pub apart_s: Option<f64>,
}

/// A mean effect as a factor, with its interval; an end that pairs do not bound is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Effect {
    /// Candidate / control.
    pub ratio: f64,
    /// Lower end.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
}

impl Effect {
    /// Of pairs.
    pub fn of(paired: &PairedRatio) -> Self {
        let ratio = paired.ratio();
        let bounded = |v: f64| (v.is_finite() && v > 0.0).then_some(v);
        Self { ratio: ratio.estimate, low: bounded(ratio.low), high: bounded(ratio.high) }
    }
}

/// The control against itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Floor {
    /// Its pairs, in the order in which they were measured.
    pub pairs: Vec<Pair>,
    /// What they say; `None` without a pair.
    pub effect: Option<Effect>,
    /// Log-ratios up to this, either way, are within noise; `None` with fewer than six pairs.
    pub log_ratio: Option<f64>,
}

/// One candidate against the control.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Comparison {
    /// The candidate.
    pub arm: String,
    /// The verdict.
    pub outcome: Outcome,
    /// Its pairs, in the order in which they were measured.
    pub pairs: Vec<Pair>,
    /// The effect at the look that decided.
    pub effect: Option<Effect>,
    /// Level of its interval.
    pub level: f64,
    /// Looks that were taken at the pairs, and that the rule allows.
    pub looks: (usize, usize),
    /// In words.
    pub says: String,
}

/// Figures of one arm, over its runs that count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmLine {
    /// Its name.
    pub name: String,
    /// Runs that count, floor included.
    pub runs: usize,
    /// Median decode tokens per second; `None` without a run.
    pub decode_tok_s: Option<f64>,
    /// Slowest and fastest run.
    pub range: Option<(f64, f64)>,
    /// Median seconds to the first token.
    pub ttft_s: Option<f64>,
    /// Median share of decode time in which compute waited.
    pub io_wait_share: Option<f64>,
    /// Where the time went, all runs together.
    pub verdict: Option<Verdict>,
    /// Hash of its plan.
    pub plan: String,
    /// Why it was given up, if it was.
    pub rejected: Option<String>,
}

/// What came of a campaign.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// Some drive's pace was emulated: no figure is a speed of the hardware.
    pub emulated: bool,
    /// What must be said of a trunk that is not the released one, or of faults on purpose, in any of the arms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trunk: Option<String>,
    /// The control against itself.
    pub floor: Floor,
    /// The candidates against the control.
    pub comparisons: Vec<Comparison>,
    /// The arms.
    pub arms: Vec<ArmLine>,
    /// Hash of the tokens by prompt; the same in every arm.
    pub tokens: BTreeMap<String, String>,
    /// What was expected and did not come out.
    pub missed: Vec<String>,
}

/// Judges what is there. `runs` are the records of `file.steps()`.
pub fn evaluate(file: &CampaignFile, runs: &[Option<RunRecord>]) -> Result<Results, CampaignError> {
    let steps = file.steps();
    let mut rejected = file.rejected.clone();
    let tokens = token_gate(file, &steps, runs, &mut rejected);
    let arms = arms(file, &steps, runs, &rejected)?;
    let rule = file.rule();
    let itself = pairs(file, &steps, runs, Part::Floor, 1);
    let floor = if itself.is_empty() { None } else { Some(rule.floor(&values(&itself))?) };
    let log_ratio = floor.as_ref().filter(|f| f.pairs >= MIN_PAIRS).map(floor_of);
    let waits = |arm: usize| arms[arm].verdict.as_ref().is_some_and(|v| v.bound != Bound::NotStorage);
    let mut comparisons = Vec::new();
    for (arm, line) in arms.iter().enumerate().skip(1) {
        let all = pairs(file, &steps, runs, Part::Arms, arm);
        let mut decision = rule.decide(&values(&all), log_ratio.unwrap_or(f64::INFINITY), waits(0) || waits(arm))?;
        if log_ratio.is_none() || line.rejected.is_some() || arms[0].rejected.is_some() {
            decision.outcome = Outcome::TooFew;
        }
        let mut comparison = Comparison {
            arm: line.name.clone(),
            outcome: decision.outcome,
            effect: decision.effect.as_ref().map(Effect::of),
            level: decision.level,
            looks: (decision.looks, rule.looks().len()),
            pairs: all,
            says: String::new(),
        };
        comparison.says = says(file, &comparison, log_ratio, line, &arms[0]);
        comparisons.push(comparison);
    }
    let floor = Floor { pairs: itself, effect: floor.as_ref().map(Effect::of), log_ratio };
    let missed = missed(file, &comparisons, &rejected);
    let emulated = runs.iter().flatten().any(|r| r.emulated);
    // Whatever is said of one arm must be said of all: they are compared.
    let faulty = runs.iter().flatten().find(|r| r.has_faults()).and_then(RunRecord::label);
    let trunk = faulty.or_else(|| runs.iter().flatten().find_map(RunRecord::label));
    Ok(Results { emulated, trunk, floor, comparisons, arms, tokens, missed })
}

/// Tokens of the control by prompt; an arm with others is rejected.
fn token_gate(
    file: &CampaignFile,
    steps: &[Step],
    runs: &[Option<RunRecord>],
    rejected: &mut BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut tokens = BTreeMap::new();
    for arms in [0..1, 1..file.arms.len()] {
        for (step, run) in steps.iter().zip(runs).filter(|(s, _)| arms.contains(&s.arm)) {
            let Some(run) = run else { continue };
            let prompt = &file.prompts[step.prompt].name;
            let hash = tokens.entry(prompt.clone()).or_insert_with(|| run.token_hash.clone());
            if *hash != run.token_hash {
                let why = format!(
                    "tokens differ on prompt `{prompt}`: {} instead of {hash}; a faster wrong answer is no result",
                    run.token_hash
                );
                rejected.entry(file.arms[step.arm].name.clone()).or_insert(why);
            }
        }
    }
    tokens
}

/// Pairs of the control and the role `other` in the rows of `part` in which both were measured.
fn pairs(file: &CampaignFile, steps: &[Step], runs: &[Option<RunRecord>], part: Part, other: usize) -> Vec<Pair> {
    let mut rows: BTreeMap<usize, [Option<(&Step, &RunRecord)>; 2]> = BTreeMap::new();
    for (step, run) in steps.iter().zip(runs).filter(|(s, _)| s.part == part) {
        let side = if step.role == 0 {
            0
        } else if step.role == other {
            1
        } else {
            continue;
        };
        rows.entry(step.row).or_default()[side] = run.as_ref().map(|r| (step, r));
    }
    let seconds = |run: &RunRecord| {
        let at = humantime::parse_rfc3339(&run.started).ok()?;
        at.duration_since(std::time::SystemTime::UNIX_EPOCH).ok().map(|d| d.as_secs_f64())
    };
    let pair = |(row, sides): (usize, [Option<(&Step, &RunRecord)>; 2])| {
        let [Some((at, control)), Some((then, candidate))] = sides else { return None };
        let (a, b) = (control.rates.decode_tok_s, candidate.rates.decode_tok_s);
        if !(a > 0.0 && b > 0.0 && a.is_finite() && b.is_finite()) {
            return None; // a text that ended after one token has no decode rate
        }
        Some(Pair {
            row,
            prompt: file.prompts[at.prompt].name.clone(),
            control_tok_s: a,
            candidate_tok_s: b,
            log_ratio: b.ln() - a.ln(),
            control_first: at.place < then.place,
            apart_s: seconds(control).zip(seconds(candidate)).map(|(a, b)| (a - b).abs()),
        })
    };
    rows.into_iter().filter_map(pair).collect()
}

fn values(pairs: &[Pair]) -> Vec<(f64, f64)> {
    pairs.iter().map(|p| (p.control_tok_s, p.candidate_tok_s)).collect()
}

fn arms(
    file: &CampaignFile,
    steps: &[Step],
    runs: &[Option<RunRecord>],
    rejected: &BTreeMap<String, String>,
) -> Result<Vec<ArmLine>, CampaignError> {
    let line = |(index, arm): (usize, &super::file::ArmFile)| {
        let own: Vec<&RunRecord> =
            steps.iter().zip(runs).filter(|(s, _)| s.arm == index).filter_map(|(_, r)| r.as_ref()).collect();
        let median = |value: &dyn Fn(&RunRecord) -> f64| {
            let all: Vec<f64> = own.iter().map(|r| value(r)).collect();
            if all.is_empty() { Ok(None) } else { stats::median(&all).map(Some) }
        };
        let speeds = || own.iter().map(|r| r.rates.decode_tok_s);
        Ok(ArmLine {
            name: arm.name.clone(),
            runs: own.len(),
            decode_tok_s: median(&|r| r.rates.decode_tok_s)?,
            range: speeds().reduce(f64::min).zip(speeds().reduce(f64::max)),
            ttft_s: median(&|r| r.rates.ttft_s)?,
            io_wait_share: median(&|r| r.io_wait_share)?,
            verdict: Verdict::of_all(own.iter().filter_map(|r| r.verdict.as_ref())),
            plan: own.first().map(|r| r.plan_hash.clone()).unwrap_or_default(),
            rejected: rejected.get(&arm.name).cloned(),
        })
    };
    file.arms.iter().enumerate().map(line).collect()
}

/// A log-ratio as a change in per cent, with its sign.
pub fn change(log_ratio: f64) -> String {
    format!("{:+.1} %", (log_ratio.exp() - 1.0) * 100.0)
}

/// The verdict in words.
fn says(file: &CampaignFile, c: &Comparison, floor: Option<f64>, arm: &ArmLine, control: &ArmLine) -> String {
    let name = &control.name;
    let (n, planned) = (c.pairs.len(), file.protocol.pairs);
    if let Some(why) = control.rejected.as_ref().or(arm.rejected.as_ref()) {
        let which = if control.rejected.is_some() { name } else { &arm.name };
        return format!("no verdict: {which} was rejected: {why}");
    }
    let effect = c.effect.map_or_else(String::new, |e| {
        let end = |v: Option<f64>| v.map_or_else(|| "unbounded".into(), |v| format!("{v:.3}"));
        let level = format!("{:.4}", c.level * 100.0);
        let level = level.trim_end_matches('0').trim_end_matches('.');
        format!(
            "{:.3} times the speed of {name}, {level} % interval {} to {}, {n} pairs",
            e.ratio,
            end(e.low),
            end(e.high)
        )
    });
    let against = floor.map_or_else(String::new, |f| format!("; {name} against itself: up to {}", change(f)));
    match c.outcome {
        Outcome::Better | Outcome::Worse | Outcome::WithinNoise => format!("{}: {effect}{against}", c.outcome.words()),
        Outcome::NotStorageBound => format!(
            "{}: neither arm waits for drives a tenth of its time, so a setting of storage could not show ({effect}{against})",
            c.outcome.words()
        ),
        Outcome::TooFew if floor.is_none() => {
            format!(
                "{}: the A/A floor has {} pairs, {MIN_PAIRS} at least are needed",
                c.outcome.words(),
                file.protocol.floor_pairs
            )
        }
        Outcome::TooFew if n < planned => format!("{}: {n} of {planned} planned pairs are there", c.outcome.words()),
        Outcome::TooFew => format!("{}: {n} pairs, {MIN_PAIRS} at least are needed", c.outcome.words()),
    }
}

/// What was expected and is not so.
fn missed(file: &CampaignFile, comparisons: &[Comparison], rejected: &BTreeMap<String, String>) -> Vec<String> {
    let mut out = Vec::new();
    for (arm, settings) in &file.expect.refused {
        for setting in settings {
            match rejected.get(arm) {
                None => {
                    out.push(format!("{arm}: expected to be refused, because `{setting}` cannot fire; it was measured"))
                }
                Some(why) if !format!(" {why}").contains(&format!(" {setting}: unverified")) => {
                    out.push(format!("{arm}: expected to be refused because `{setting}` cannot fire, not for: {why}"));
                }
                Some(_) => {}
            }
        }
    }
    for c in comparisons {
        if let Some(want) = file.expect.verdict.get(&c.arm).filter(|w| **w != c.outcome) {
            out.push(format!("{}: expected {}, it is {}", c.arm, want.words(), c.outcome.words()));
        }
        if let Some(want) = file.expect.ratio_at_least.get(&c.arm) {
            let low = c.effect.and_then(|e| e.low);
            if low.is_none_or(|low| low < *want) {
                let low = low.map_or_else(|| "unbounded".into(), |l| format!("{l:.3}"));
                out.push(format!(
                    "{}: expected at least {want} times the control, the interval begins at {low}",
                    c.arm
                ));
            }
        }
    }
    out
}
