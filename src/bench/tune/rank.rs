//! Candidates simulated on the trace of the current profile and put in order. Deterministic: the same trace, plans, profile
//! of drives and seed give the same order.
//!
//! First every layout with every dispatch policy that has a choice on it; then, on the best few layouts, queue depths, caches
//! and guessers one at a time, and the best of each together. Candidates whose times lie within 1 % of each other count
//! as equal: then fewer changes go first, and fewer bytes to copy.

use super::layouts::Layout;
use super::settings::{CacheRoom, Change, Tunable, changes, combined, dispatches, variants};
use crate::bench::simulate::{Loaded, SimulateError, runs, setup};
use crate::bench::what_if::gain;
use crate::reader::ReaderOptions;
use crate::replay::simulate::summary::{Prediction, Sure, predict};
use crate::replay::workload::Workload;
use crate::stats::Interval;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::ControlFlow;

/// Smallest predicted gain that is worth a measurement: simulations of other layouts were up to 3.9 % of tok/s off on a
/// disk in use, and 0.2 % on a quiet one (results/samples/simulate.md).
pub const RESOLUTION: f64 = 0.03;
/// Log-ratio within which candidates count as equally fast.
const EQUAL: f64 = 0.01;
/// Layouts on which settings besides dispatch are tried.
const REFINED: usize = 3;

/// A candidate and what the simulator says of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankLine {
    /// Layout and what differs besides.
    pub name: String,
    /// The layout.
    pub layout: String,
    /// Policy of its plan.
    pub planner: String,
    /// Hash of the plan.
    pub plan_hash: String,
    /// Copies beyond the first of every expert.
    pub replicas: usize,
    /// Settings that differ from the current profile; another plan is one of them.
    pub changes: Vec<Change>,
    /// Decode rate with its interval of 95 %.
    pub tok_s: Option<[f64; 3]>,
    /// Times as fast as the current profile, simulated too, passes in pairs; `None` with too few of them.
    pub gain: Option<[f64; 3]>,
    /// Experts that the cache would have, as a share of those demanded.
    pub hit_share: f64,
    /// Reads of copies other than the first, as a share of all.
    pub replica_share: f64,
    /// Payload bytes that staging would copy.
    pub copy_bytes: u64,
}

impl RankLine {
    /// In steps of 1 %; what cannot be compared counts as no gain.
    fn steps(&self) -> i64 {
        self.gain.map_or(0, |[gain, ..]| (gain.max(1e-9).ln() / EQUAL).floor() as i64)
    }

    /// Whether the simulator can tell that it is faster.
    pub fn is_faster(&self) -> bool {
        self.gain.is_some_and(|[gain, low, _]| gain >= 1.0 + RESOLUTION && low > 1.0)
    }

    /// A cache without a hit could never be proved.
    fn provable(&self) -> bool {
        self.hit_share > 0.0 || self.changes.iter().all(|c| c.setting != "reader.cache_bytes")
    }
}

/// Something that was not tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Skipped {
    /// What.
    pub name: String,
    /// Why.
    pub why: String,
}

/// A candidate with what it is.
#[derive(Clone, Debug)]
pub(super) struct Scored {
    /// Its place among the layouts.
    pub(super) layout: usize,
    /// Its reader.
    pub(super) options: ReaderOptions,
    /// What the simulator says.
    pub(super) line: RankLine,
}

/// What candidates are simulated on.
pub(super) struct Field<'a> {
    /// The current layout first.
    pub(super) layouts: &'a [Layout],
    /// Drives of the current plan.
    pub(super) current: &'a Loaded,
    /// Drives of all other plans.
    pub(super) full: &'a Loaded,
    /// The current reader.
    pub(super) options: &'a ReaderOptions,
    /// What may be changed.
    pub(super) tunable: &'a [Tunable],
    /// First seed.
    pub(super) seed: u64,
    /// Simulations of each candidate.
    pub(super) repeats: u32,
}

/// All candidates in order, what could not be simulated, and the current profile's own prediction.
pub(super) struct Ranked {
    pub(super) all: Vec<Scored>,
    pub(super) skipped: Vec<Skipped>,
    pub(super) base: Prediction,
}

/// Simulates everything. `go_on` is told after every candidate how many there are, and may end it (`None`).
pub(super) fn rank(
    field: &Field<'_>,
    go_on: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Option<Ranked>, SimulateError> {
    let base = field.simulate(0, field.options)?;
    let mut out = Ranked { all: Vec::new(), skipped: Vec::new(), base };
    for (at, layout) in field.layouts.iter().enumerate() {
        let chooses = layout.plan.replica_count() > 0 && field.tunable.contains(&Tunable::Dispatch);
        let tried = if chooses { dispatches(field.options) } else { vec![field.options.clone()] };
        for options in tried {
            field.add(&mut out, at, options)?;
            if go_on(out.all.len()).is_break() {
                return Ok(None);
            }
        }
    }
    for start in best_layouts(&out.all) {
        let mut improved: Vec<(Tunable, ReaderOptions)> = Vec::new();
        for what in [Tunable::QueueDepth, Tunable::Cache, Tunable::Prefetch] {
            if !field.tunable.contains(&what) {
                continue;
            }
            let from = out.all.len();
            for options in variants(&start.options, what, field.room(&start)) {
                field.add(&mut out, start.layout, options)?;
                if go_on(out.all.len()).is_break() {
                    return Ok(None);
                }
            }
            let best = out.all[from..].iter().filter(|s| s.line.provable()).min_by_key(|s| key(s));
            if let Some(best) = best.filter(|b| b.line.steps() > start.line.steps()) {
                improved.push((what, best.options.clone()));
            }
        }
        if improved.len() > 1 {
            let with = |base: ReaderOptions, (what, new): &(Tunable, ReaderOptions)| combined(&base, new, *what);
            let together = improved.iter().fold(start.options.clone(), with);
            field.add(&mut out, start.layout, together)?;
        }
    }
    out.all.sort_by(|a, b| key(a).cmp(&key(b)).then_with(|| a.line.name.cmp(&b.line.name)));
    Ok(Some(out))
}

/// Faster first, then fewer changes, then fewer bytes.
fn key(s: &Scored) -> (i64, usize, u64) {
    (-s.line.steps(), s.line.changes.len(), s.line.copy_bytes)
}

/// The best candidate of each of the best layouts.
fn best_layouts(all: &[Scored]) -> Vec<Scored> {
    let mut sorted: Vec<&Scored> = all.iter().collect();
    sorted.sort_by_key(|s| key(s));
    let mut out: Vec<Scored> = Vec::new();
    for s in sorted {
        if out.len() < REFINED && out.iter().all(|o| o.layout != s.layout) {
            out.push(s.clone());
        }
    }
    out
}

/// Those that are worth measuring, at most `most`: the fastest first, each with another plan or with other settings changed
/// than those before it, so that one that cannot be proved does not take all others with it.
pub(super) fn finalists(all: &[Scored], most: usize) -> Vec<&Scored> {
    let what = |s: &Scored| {
        let names: BTreeSet<String> = s.line.changes.iter().map(|c| c.setting.clone()).collect();
        (s.layout, names)
    };
    let mut out: Vec<&Scored> = Vec::new();
    for s in all.iter().filter(|s| s.line.is_faster() && s.line.provable()) {
        if out.len() < most && out.iter().all(|o| what(o) != what(s)) {
            out.push(s);
        }
    }
    out
}

impl Field<'_> {
    fn loaded(&self, layout: usize) -> &Loaded {
        if self.layouts[layout].current { self.current } else { self.full }
    }

    fn work(&self) -> &Workload {
        &self.current.work
    }

    fn simulate(&self, layout: usize, options: &ReaderOptions) -> Result<Prediction, SimulateError> {
        let loaded = self.loaded(layout);
        let setup = setup(&self.layouts[layout].plan, &loaded.drives, loaded.alignment_bytes, options)?;
        let all = runs(self.work(), &setup, self.seed, self.repeats)?;
        let nothing = || SimulateError::Input("the trace has no barrier; there is nothing to simulate".into());
        predict(self.work(), &setup, &all, self.seed).ok_or_else(nothing)
    }

    /// Simulates a candidate, unless it is there already; one that cannot be simulated is left out.
    fn add(&self, out: &mut Ranked, layout: usize, options: ReaderOptions) -> Result<(), SimulateError> {
        if out.all.iter().any(|s| s.layout == layout && s.options == options) {
            return Ok(());
        }
        let here = &self.layouts[layout];
        let mut changes = changes(self.options, &options);
        let name = name(&here.name, &changes);
        let simulated = match self.simulate(layout, &options) {
            Ok(simulated) => simulated,
            Err(e) => {
                out.skipped.push(Skipped { name, why: e.to_string() });
                return Ok(());
            }
        };
        let plan = &here.plan;
        if !here.current {
            let from = self.layouts[0].plan.planner.clone();
            changes.insert(0, Change { setting: "plan".into(), from, to: here.name.clone() });
        }
        let three = |Sure(Interval { estimate, low, high }): Sure| [estimate, low, high];
        let line = RankLine {
            name,
            layout: here.name.clone(),
            planner: plan.planner.clone(),
            plan_hash: plan.hash()?,
            replicas: plan.replica_count(),
            changes,
            tok_s: simulated.tok_s.map(three),
            gain: gain(&out.base.passes, &simulated.passes, self.seed).map(three),
            hit_share: simulated.hit_share,
            replica_share: simulated.replica_share,
            copy_bytes: here.copy_bytes,
        };
        out.all.push(Scored { layout, options, line });
        Ok(())
    }

    fn room(&self, of: &Scored) -> CacheRoom {
        let plan = &self.layouts[of.layout].plan;
        let experts: usize = plan.layers.values().map(|l| l.0.len()).sum();
        let work = self.work();
        let asked: BTreeSet<_> =
            work.barriers.iter().flat_map(|b| work.of(b).iter().map(move |e| (b.layer, *e))).collect();
        CacheRoom {
            expert_bytes: plan.expert_bytes,
            bank_bytes: plan.expert_bytes.saturating_mul(experts as u64),
            asked_bytes: plan.expert_bytes.saturating_mul(asked.len() as u64),
        }
    }
}

/// The layout and what differs besides, short.
fn name(layout: &str, changes: &[Change]) -> String {
    let mut out = layout.to_string();
    let mib = |bytes: &str| bytes.parse::<f64>().map_or_else(|_| bytes.into(), |b| format!("{:.1}M", b / 1e6));
    for c in changes {
        let part = match c.setting.as_str() {
            "reader.dispatch" | "reader.cache_policy" => c.to.clone(),
            "reader.queue_depth" => format!("qd{}", c.to),
            "reader.cache_bytes" => format!("cache{}", mib(&c.to)),
            "reader.prefetch" if c.to == "none" => "no-prefetch".into(),
            "reader.prefetch" => c.to.clone(),
            _ => continue,
        };
        out.push_str(" +");
        out.push_str(&part);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(layout: usize, gain: [f64; 3], settings: &[&str]) -> Scored {
        let change = |s: &&str| Change { setting: s.to_string(), from: "a".into(), to: "b".into() };
        let line = RankLine {
            name: format!("{layout}{settings:?}"),
            layout: layout.to_string(),
            planner: String::new(),
            plan_hash: String::new(),
            replicas: 0,
            changes: settings.iter().map(change).collect(),
            tok_s: None,
            gain: Some(gain),
            hit_share: 0.0,
            replica_share: 0.0,
            copy_bytes: 0,
        };
        Scored { layout, options: ReaderOptions::default(), line }
    }

    #[test]
    fn equal_ones_are_put_in_order_by_what_they_cost() {
        let simple = scored(1, [1.205, 1.2, 1.21], &["plan"]);
        let more = scored(1, [1.209, 1.2, 1.21], &["plan", "reader.queue_depth"]);
        let faster = scored(1, [1.30, 1.2, 1.4], &["plan", "reader.queue_depth"]);
        assert!(key(&simple) < key(&more), "less than 1 % is not worth a change");
        assert!(key(&faster) < key(&simple));
    }

    #[test]
    fn finalists_can_be_told_apart_proved_and_are_not_all_the_same() {
        let all = [
            scored(1, [1.5, 1.4, 1.6], &["plan", "reader.cache_bytes"]),
            scored(1, [1.4, 1.3, 1.5], &["plan", "reader.queue_depth"]),
            scored(1, [1.39, 1.3, 1.5], &["plan", "reader.queue_depth"]),
            scored(2, [1.3, 0.99, 1.5], &["plan"]),
            scored(3, [1.02, 1.01, 1.03], &["plan"]),
            scored(4, [1.2, 1.1, 1.3], &["plan"]),
        ];
        let places: Vec<usize> = finalists(&all, 5).iter().map(|s| s.layout).collect();
        assert_eq!(places, [1, 4], "no hits, the same again, not told apart, too little to measure");
        assert_eq!(finalists(&all, 1).len(), 1);
    }
}
