//! From runs and readings to the record of a ladder.

use super::raw::{Barriers, Means, Predicted};
use super::record::{LADDER_FILE, LADDER_VERSION, LadderRecord, Raw, Rung, Simulated, Skipped};
use super::rungs::{Layout, Planned};
use super::value::{OneMore, Top, added, advise, interval, off, share};
use super::{LadderError, LadderSpec, Measured};
use crate::bench::activations;
use crate::bench::record::{RunRecord, write_json};
use crate::bench::reissue::ReissueRecord;
use crate::decode::generate::Rates;
use crate::open::Model;
use crate::replay::verdict::{Bound, Verdict};
use crate::stats::{self, StatsError};

/// Makes the record and writes it.
pub(super) fn summarise(
    model: &Model,
    spec: &LadderSpec<'_>,
    rungs: &[Planned],
    skipped: Vec<Skipped>,
    measured: Measured,
    barriers: Option<&Barriers>,
) -> Result<LadderRecord, LadderError> {
    let Measured { runs, readings, order, mut rejected, mut remarks, emulated } = measured;
    let token_hash = runs.iter().flatten().map(|r| r.token_hash.clone()).next().unwrap_or_default();
    let mut out = Vec::with_capacity(rungs.len());
    // Rungs that have a run, by their place in `rungs`.
    let mut places = Vec::with_capacity(rungs.len());
    for (at, (planned, runs)) in rungs.iter().zip(&runs).enumerate() {
        let names = planned.names();
        if let Some(other) = runs.iter().find(|r| r.token_hash != token_hash) {
            rejected.push(format!(
                "tokens differ: the rung of {} generated {}, the first rung {token_hash}; a faster wrong answer is no result",
                names.join(", "),
                other.token_hash
            ));
        }
        if runs.is_empty() {
            if rejected.is_empty() {
                rejected.push(format!("the rung of {} has no accepted run", names.join(", ")));
            }
            continue;
        }
        places.push(at);
        out.push(rung(planned, runs)?);
    }
    let fixed_plan = match spec.layout {
        Layout::Fixed(plan) => Some(plan.hash()?),
        Layout::Planned { .. } => None,
    };
    let asked_of = activations::label(model.manifest.trunk_format, spec.asked.config.model.activations);
    let mut record = LadderRecord {
        version: LADDER_VERSION,
        model: Some(model.manifest.name.clone()),
        model_id: model.manifest.model_id.clone(),
        policy: spec.layout.policy_name().to_string(),
        fixed_plan,
        emulated,
        trunk: runs.iter().flatten().find_map(RunRecord::label).or(asked_of),
        rungs: out,
        skipped,
        token_hash,
        order,
        bounds_from: barriers.map(|b| b.bounds_from().to_string()),
        simulated_from: barriers.map(|b| b.simulated_from().to_string()),
        remarks: Vec::new(),
        advice: None,
        rejected,
        command: spec.command.to_vec(),
    };
    ratios(&mut record);
    steps(&mut record, &places, &runs, spec.repetitions)?;
    if let Some(barriers) = barriers {
        let own: Vec<&Vec<ReissueRecord>> = places.iter().map(|&at| &readings[at]).collect();
        let simulated = places.iter().map(|&at| simulate(barriers, &rungs[at], &mut remarks)).collect::<Vec<_>>();
        io(&mut record, &own, &simulated)?;
    }
    record.remarks = remarks;
    if record.rejected.is_empty() {
        record.advice = advice(&record, spec, rungs, &places, barriers);
    }
    write_json(&spec.folder.join(LADDER_FILE), &record)?;
    Ok(record)
}

fn rung(planned: &Planned, runs: &[RunRecord]) -> Result<Rung, LadderError> {
    let median = |value: &dyn Fn(&RunRecord) -> f64| stats::median(&runs.iter().map(value).collect::<Vec<_>>());
    let speeds: Vec<f64> = runs.iter().map(|r| r.rates.decode_tok_s).collect();
    let fold = |start: f64, pick: fn(f64, f64) -> f64| speeds.iter().copied().fold(start, pick);
    Ok(Rung {
        arm: planned.arm.clone(),
        kind: planned.kind,
        uplink: planned.uplink.clone(),
        drives: planned.names(),
        plan: planned.plan.hash()?,
        rates: Rates {
            ttft_s: median(&|r| r.rates.ttft_s)?,
            prefill_tok_s: median(&|r| r.rates.prefill_tok_s)?,
            decode_tok_s: median(&|r| r.rates.decode_tok_s)?,
            inclusive_tok_s: median(&|r| r.rates.inclusive_tok_s)?,
        },
        decode_tok_s_range: (fold(f64::INFINITY, f64::min), fold(0.0, f64::max)),
        decode_tok_s_interval: interval(&speeds)?,
        share_of_top: 0.0,
        gain: 0.0,
        io_wait_share: median(&|r| r.io_wait_share)?,
        barrier_mean_ns: median(&|r| r.barrier_mean_ns as f64)? as u64,
        runs: runs.len(),
        verdict: Verdict::of_all(runs.iter().filter_map(|r| r.verdict.as_ref())),
        added: None,
        raw: None,
        simulated: None,
    })
}

/// Speeds as a share of the top rung's and as a multiple of the first rung's.
fn ratios(record: &mut LadderRecord) {
    let speed = |at: Option<usize>| at.map_or(0.0, |at| record.rungs[at].rates.decode_tok_s);
    let (first, top) = (speed(record.base()), speed(record.top()));
    for rung in &mut record.rungs {
        rung.share_of_top = if top > 0.0 { rung.rates.decode_tok_s / top } else { 0.0 };
        rung.gain = if first > 0.0 { rung.rates.decode_tok_s / first } else { 0.0 };
    }
}

/// What each rung of the ladder brought over the one below it.
fn steps(
    record: &mut LadderRecord,
    places: &[usize],
    runs: &[Vec<RunRecord>],
    repetitions: usize,
) -> Result<(), StatsError> {
    let ladder: Vec<usize> = (0..record.rungs.len()).filter(|&at| record.rungs[at].of_ladder()).collect();
    let count = ladder.len().saturating_sub(1);
    for pair in ladder.windows(2) {
        let (below, above) = (&record.rungs[pair[0]], &record.rungs[pair[1]]);
        let drives: Vec<String> = above.drives.iter().filter(|d| !below.drives.contains(d)).cloned().collect();
        let rates = |at: usize| runs[places[at]].iter().map(|r| r.rates.decode_tok_s);
        // The n-th run of every rung is of the n-th row.
        let pairs: Vec<(f64, f64)> = rates(pair[0]).zip(rates(pair[1])).collect();
        let waits = |r: &Rung| r.verdict.as_ref().is_some_and(|v| v.bound != Bound::NotStorage);
        let found = added(drives, &pairs, repetitions, count, waits(below) || waits(above))?;
        record.rungs[pair[1]].added = Some(found);
    }
    Ok(())
}

fn simulate(barriers: &Barriers, planned: &Planned, remarks: &mut Vec<String>) -> Option<Predicted> {
    match barriers.simulate(planned) {
        Ok(predicted) => Some(predicted),
        Err(why) => {
            let remark = format!("not simulated: {why}");
            if !remarks.contains(&remark) {
                remarks.push(remark);
            }
            None
        }
    }
}

/// Raw readings and simulations of every rung, as gains over the same one.
fn io(
    record: &mut LadderRecord,
    readings: &[&Vec<ReissueRecord>],
    simulated: &[Option<Predicted>],
) -> Result<(), StatsError> {
    let base = record.base();
    let median = |values: Vec<f64>| if values.is_empty() { Ok(None) } else { stats::median(&values).map(Some) };
    let barrier = |at: usize| median(readings[at].iter().filter_map(Means::of).map(|m| m.barrier).collect());
    let read = base.map(barrier).transpose()?.flatten();
    let predicted = base.and_then(|at| simulated[at]).map(|p| p.barrier_mean_ns);
    for (at, rung) in record.rungs.iter_mut().enumerate() {
        let own: Vec<_> = readings[at].iter().filter_map(Means::of).collect();
        if let (Some(mean_ns), Some(first)) = (barrier(at)?, readings[at].first()) {
            let layout = median(own.iter().filter_map(|m| m.bound_layout).collect())?;
            let drives = median(own.iter().filter_map(|m| m.bound_drives).collect())?;
            let (low, high) =
                own.iter().fold((f64::INFINITY, 0.0f64), |(l, h), m| (l.min(m.barrier), h.max(m.barrier)));
            let barriers = first.barriers;
            let bytes = median(readings[at].iter().map(|r| r.reissued_bytes as f64).collect())?.unwrap_or(0.0);
            rung.raw = Some(Raw {
                readings: readings[at].len(),
                barriers,
                barrier_mean_ns: mean_ns.round() as u64,
                barrier_range_ns: (low.round() as u64, high.round() as u64),
                barriers_per_s: share(Some(1e9), Some(mean_ns)).unwrap_or(0.0),
                bytes_per_s: share(Some(bytes * 1e9), Some(mean_ns * barriers as f64)).unwrap_or(0.0),
                io_gain: share(read, Some(mean_ns)),
                bound_layout_ns: layout.map(|ns| ns.round() as u64),
                bound_drives_ns: drives.map(|ns| ns.round() as u64),
                reader_efficiency: share(layout, Some(mean_ns)),
                plan_efficiency: share(drives, layout),
            });
        }
        if let Some(of) = simulated[at] {
            let io_gain = share(predicted, Some(of.barrier_mean_ns));
            rung.simulated = Some(Simulated {
                barrier_mean_ns: of.barrier_mean_ns.round() as u64,
                io_gain,
                off: off(io_gain, rung.raw.as_ref().and_then(|r| r.io_gain)),
                decode_tok_s: of.decode_tok_s,
            });
        }
    }
    Ok(())
}

fn advice(
    record: &LadderRecord,
    spec: &LadderSpec<'_>,
    rungs: &[Planned],
    places: &[usize],
    barriers: Option<&Barriers>,
) -> Option<super::record::Advice> {
    let at = record.top()?;
    let top = &record.rungs[at];
    let facts = Top {
        drives: top.drives.len(),
        runs: top.runs,
        verdict: top.verdict.as_ref(),
        added: top.added.as_ref(),
        emulated: record.emulated,
    };
    Some(advise(&facts, || match (barriers, top.far_off()) {
        (_, Some(off)) => {
            let off = off * 100.0;
            OneMore::Cannot(format!("simulated, the I/O gain of these drives is {off:+.1} % off what was read"))
        }
        (None, _) => OneMore::Cannot("there is no trace".into()),
        (Some(_), None) if top.simulated.as_ref().is_none_or(|s| s.off.is_none()) => {
            OneMore::Cannot("the I/O gain of these drives was not read, or not simulated".into())
        }
        (Some(barriers), None) => {
            // Like the last one, or like the only one.
            let like = top.added.as_ref().and_then(|a| a.drives.last()).or(top.drives.last());
            like.map_or(OneMore::Cannot("there is no drive".into()), |like| {
                barriers.one_more(&rungs[places[at]], like, spec.layout)
            })
        }
    }))
}
