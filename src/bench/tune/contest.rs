//! The contest: finalists staged and measured as a campaign against the current profile, and what that earns them.

use super::state::{Finalist, TuneResult};
use super::{EXPERIMENT, Event, KEPT, Session, TuneError, budget, changed, promote};
use crate::bench::campaign::arms::Arm;
use crate::bench::campaign::design::Design;
use crate::bench::campaign::file::{CAMPAIGN_FILE, CampaignFile};
use crate::bench::campaign::measure;
use crate::bench::config::Asked;
use crate::bench::planning::read_plan;
use crate::bench::record::RecordError;
use crate::knob::Knob;
use crate::stage::{self, StageOptions};
use crate::stats::MIN_PAIRS;
use std::collections::BTreeSet;
use std::time::Instant;

/// Finalists to measure, and what was said about the others.
type Chosen = (Vec<Finalist>, Vec<String>);

impl Session<'_> {
    /// Finalists whose copies fit on the drives all at once; the first may drive out later ones.
    pub(super) fn fitting(&self, finalists: Vec<Finalist>) -> Result<Chosen, TuneError> {
        let (mut kept, mut dropped, mut plans) = (Vec::new(), Vec::new(), Vec::new());
        for finalist in finalists {
            let plan = read_plan(&finalist.plan_file)?;
            if plan.hash()? != finalist.plan_hash {
                let path = finalist.plan_file.display();
                return Err(TuneError::Option(format!("{path}: not the plan that was ranked any more; give --fresh")));
            }
            plans.push(plan);
            match self.inputs.check_room(&plans, self.spec.margin_bytes) {
                Ok(()) => kept.push(finalist),
                Err(why) => {
                    plans.pop();
                    dropped.push(format!("{} is not measured: {why}", finalist.arm));
                }
            }
        }
        match kept.is_empty() {
            true => Err(TuneError::Option(format!("no candidate fits on the drives now: {}", dropped.join("; ")))),
            false => Ok((kept, dropped)),
        }
    }

    /// How many finalists and pairs the rest of the budget holds; a campaign that was begun keeps its own.
    pub(super) fn within_budget(
        &self,
        finalists: Vec<Finalist>,
        reasons: &mut Vec<String>,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Option<(Vec<Finalist>, usize)>, TuneError> {
        if let Some(then) = self.begun() {
            let known: Vec<Finalist> =
                finalists.iter().filter(|f| then.arms.iter().any(|a| a.name == f.arm)).cloned().collect();
            let as_asked = self.spec.pairs.is_none_or(|pairs| pairs == then.protocol.pairs);
            if as_asked && known.len() + 1 == then.arms.len() {
                let begun = |f: &&Finalist| !known.iter().any(|k| k.arm == f.arm);
                for left_out in finalists.iter().filter(begun) {
                    reasons.push(format!(
                        "{} is not measured: the campaign that was begun has {} candidates; --fresh begins anew",
                        left_out.arm,
                        known.len()
                    ));
                }
                return Ok(Some((known, then.protocol.pairs)));
            }
        }
        let run_s = self.file.trace.as_ref().map_or(0.0, |t| t.wall_s);
        let left_s = self.limits.deadline.saturating_duration_since(Instant::now()).as_secs_f64();
        let gains: Vec<f64> = finalists.iter().map(|f| f.gain).collect();
        let prompts = self.inputs.prompts.len();
        match budget::fit(left_s, run_s, &gains, prompts, self.spec.pairs) {
            Some(fit) => {
                for dropped in &finalists[fit.candidates..] {
                    reasons.push(format!("{} is not measured: the budget holds {}", dropped.arm, fit.candidates));
                }
                on_event(Event::Fits(fit.candidates, fit.pairs, fit.seconds));
                Ok(Some((finalists[..fit.candidates].to_vec(), fit.pairs)))
            }
            None => {
                let need_s = budget::least_s(run_s, gains[0], prompts, self.spec.pairs);
                let more = (need_s - left_s + self.spec.budget.as_secs_f64()) / 60.0;
                reasons.push(format!(
                    "a run takes {run_s:.1} s and {left_s:.0} s are left; the least that says anything, {} pairs of one \
                     candidate and as many of the profile against itself, takes {need_s:.0} s: give --minutes {}, or \
                     fewer --max-new",
                    MIN_PAIRS.max(self.spec.pairs.unwrap_or(0)),
                    more.ceil()
                ));
                Ok(None)
            }
        }
    }

    pub(super) fn stage(&self, finalist: &Finalist, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), TuneError> {
        let plan = read_plan(&finalist.plan_file)?;
        let mounts = self.inputs.mounts_of(&plan)?;
        let options = StageOptions { margin_bytes: self.spec.margin_bytes, ..StageOptions::default() };
        let mut show = |at| on_event(Event::Staging(&finalist.arm, at));
        stage::stage(&plan, &plan.store, &mounts, options, &mut show)?;
        Ok(())
    }

    /// The campaign that was begun before, if it is of the ranking as it is now.
    fn begun(&self) -> Option<CampaignFile> {
        let folder = self.folder.join(self.file.campaign.as_ref()?);
        folder.join(CAMPAIGN_FILE).exists().then(|| CampaignFile::load(&folder).ok())?
    }

    pub(super) fn measure(
        &mut self,
        current: &Asked,
        finalists: &[Finalist],
        pairs: usize,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), TuneError> {
        let mut arms = vec![Arm { name: "current".into(), asked: current.clone(), fired: BTreeSet::new() }];
        for finalist in finalists {
            let mut asked = Asked::of_table(finalist.profile.clone()).map_err(TuneError::Option)?;
            self.inputs.complete(&mut asked, self.spec);
            let fired = finalist.fired.iter().filter_map(|n| Knob::named(n)).collect();
            arms.push(Arm { name: finalist.arm.clone(), asked, fired });
        }
        let design = Design {
            experiment: EXPERIMENT.into(),
            hypothesis: Some(
                "a candidate that the simulator puts first decodes faster than the current profile".into(),
            ),
            source: Some(self.spec.profile.clone()),
            arms,
            prompts: self.inputs.prompts.clone(),
            pairs: Some(pairs),
            floor_pairs: Some(pairs),
            seed: self.spec.seed,
            ..Design::default()
        };
        let (mut file, ready) = design.prepare()?;
        let same = self.begun().filter(|then| then.same_order(&file));
        let name = match (&self.file.campaign, &same) {
            (Some(name), Some(then)) => {
                file.started.clone_from(&then.started);
                name.clone()
            }
            _ => (1..).map(|n| format!("campaign-{n}")).find(|n| !self.folder.join(n).exists()).unwrap_or_default(),
        };
        let folder = self.folder.join(&name);
        std::fs::create_dir_all(&folder).map_err(|source| RecordError::Io { path: folder.clone(), source })?;
        self.file.campaign = Some(name);
        self.file.save(self.folder)?;
        let limits = &self.limits;
        let measured = measure(&folder, &mut file, &ready, &|| limits.over(), &mut |e| on_event(Event::Campaign(e)));
        self.campaign = Some((folder, file));
        measured?;
        Ok(())
    }

    /// Judges the campaign; writes the profile if a candidate has earned it.
    pub(super) fn conclude(
        &mut self,
        finalists: &[Finalist],
        mut reasons: Vec<String>,
    ) -> Result<TuneResult, TuneError> {
        let Some((folder, file)) = &self.campaign else { return Ok(TuneResult::kept(KEPT, reasons)) };
        let runs = file.runs(folder)?;
        let Some(results) = &file.results else { return Ok(TuneResult::kept(KEPT, reasons)) };
        let seen: Vec<_> = runs.iter().map(|r| r.as_ref().map(|r| r.settings.as_slice())).collect();
        let decision = promote::decide(file, results, &seen);
        reasons.extend(decision.reasons);
        let spec = self.spec;
        if promote::text_of(&spec.profile)? != self.inputs.profile_text {
            return Err(changed(&spec.profile));
        }
        if self.inputs.from_defaults {
            promote::write_start(&spec.profile, &self.inputs.table, &self.inputs.plan)?;
        }
        let Some(winner) = decision.promoted else {
            let mut result = TuneResult::kept(KEPT, reasons);
            result.rejected = decision.rejected;
            return Ok(result);
        };
        let finalist = finalists.iter().find(|f| f.arm == file.arms[winner].name);
        let Some(finalist) = finalist else { return Ok(TuneResult::kept(KEPT, reasons)) };
        let record = folder.join(CAMPAIGN_FILE);
        let record = std::path::absolute(&record).unwrap_or(record);
        let written = promote::promote(&spec.profile, finalist, file, results, winner, &record)?;
        let mut result = TuneResult::promoted(finalist, written, reasons, results.emulated);
        result.rejected = decision.rejected;
        Ok(result)
    }
}
