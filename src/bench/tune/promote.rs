//! Whether a candidate has earned its place, and writing it down. The decision is pure: from what a campaign measured and
//! what its records proved, nothing else.

use super::state::Finalist;
use super::{TuneError, plan_beside};
use crate::bench::campaign::evaluate::Results;
use crate::bench::campaign::file::CampaignFile;
use crate::bench::environment;
use crate::bench::evidence::{Evidence, Verdict};
use crate::bench::planning::read_plan;
use crate::bench::profile::{ProfileFileError, TUNED_VERSION, Tuned, render, replace};
use crate::bench::record::utc_now;
use crate::bench::trouble::FAULTS_LABEL;
use crate::layout::plan::Plan;
use crate::stats::MIN_PAIRS;
use crate::stats::compare::Outcome;
use crate::sys::durable::write_atomic;
use std::path::{Path, PathBuf};

/// What a campaign earns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// The arm to promote.
    pub promoted: Option<usize>,
    /// Why, arm by arm.
    pub reasons: Vec<String>,
    /// An arm was rejected.
    pub rejected: bool,
}

/// Settings under test that some counted run of an arm did not prove, and anything contradicted, by name.
fn unproved(file: &CampaignFile, seen: &[Option<&[Evidence]>], arm: usize) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let steps = file.steps();
    let own = steps.iter().zip(seen).filter(|(s, _)| s.arm == arm).filter_map(|(_, e)| *e);
    let mut counted = 0;
    for evidence in own {
        counted += 1;
        let proved =
            |name: &String| evidence.iter().any(|e| e.name == *name && e.under_test && e.verdict == Verdict::Proved);
        let open = file.arms[arm].under_test.iter().filter(|n| !proved(n));
        let denied = evidence.iter().filter(|e| e.verdict == Verdict::Contradicted).map(|e| &e.name);
        for name in open.chain(denied) {
            if !out.contains(name) {
                out.push(name.clone());
            }
        }
    }
    if counted == 0 || file.arms[arm].under_test.is_empty() {
        out.push("anything".into());
    }
    out
}

/// The best candidate whose verdict is *better* and whose evidence, and the control's, is whole. `seen` is what the records
/// of `file.steps()` say of their settings.
pub fn decide(file: &CampaignFile, results: &Results, seen: &[Option<&[Evidence]>]) -> Decision {
    let mut out = Decision::default();
    let control = unproved(file, seen, 0);
    let mut best: Option<(f64, usize)> = None;
    for (at, comparison) in results.comparisons.iter().enumerate() {
        let (arm, name) = (at + 1, &comparison.arm);
        let mut why = |text: String| out.reasons.push(format!("{name}: {text}"));
        if let Some(reason) = [0, arm].iter().find_map(|a| results.arms[*a].rejected.as_ref()) {
            why(format!("rejected: {reason}"));
            out.rejected = true;
            continue;
        }
        why(comparison.says.clone());
        if comparison.outcome != Outcome::Better {
            continue;
        }
        let open: Vec<String> = control.iter().cloned().chain(unproved(file, seen, arm)).collect();
        if !open.is_empty() {
            why(format!("not promoted: {} was not proved in every run that counts", open.join(", ")));
            continue;
        }
        let effect = comparison.effect.filter(|e| e.low.is_some_and(|low| low > 1.0));
        let Some(effect) = effect.filter(|_| comparison.pairs.len() >= MIN_PAIRS) else {
            why(format!("not promoted: {} pairs do not bound the effect above 1", comparison.pairs.len()));
            continue;
        };
        if best.is_none_or(|(ratio, _)| effect.ratio > ratio) {
            best = Some((effect.ratio, arm));
        }
    }
    out.promoted = best.map(|(_, arm)| arm);
    out
}

/// Puts a path into a profile.
pub(super) fn put(table: &mut toml::Table, key: &str, path: &Path) {
    table.insert(key.into(), toml::Value::String(path.to_string_lossy().into_owned()));
}

/// The text of a profile; `None` if there is none.
pub fn text_of(profile: &Path) -> Result<Option<String>, TuneError> {
    match std::fs::read_to_string(profile) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ProfileFileError::Io { path: profile.to_path_buf(), source }.into()),
    }
}

/// Writes a plan, folders included.
pub(super) fn write_plan(path: &Path, plan: &Plan) -> Result<(), TuneError> {
    let io = |source| TuneError::Option(format!("plan {}: {source}", path.display()));
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(io)?;
    }
    write_atomic(path, plan.to_json()?.as_bytes()).map_err(io)
}

/// Writes the profile that was made from defaults, so that there is something to go back to.
pub(super) fn write_start(profile: &Path, table: &toml::Table, plan: &Plan) -> Result<(), TuneError> {
    let path = plan_beside(profile, &plan.hash()?);
    write_plan(&path, plan)?;
    let mut table = table.clone();
    put(&mut table, "plan", &path);
    replace(profile, &render(&table, None).map_err(TuneError::Option)?)?;
    Ok(())
}

/// What a promotion wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// Where the former profile is kept.
    pub former: Option<PathBuf>,
    /// The plan of the new one.
    pub plan: PathBuf,
    /// Times the speed of the former.
    pub ratio: f64,
}

/// Makes the settings of `arm` the profile; its plan is put beside the profile.
pub(super) fn promote(
    profile: &Path,
    finalist: &Finalist,
    file: &CampaignFile,
    results: &Results,
    arm: usize,
    record: &Path,
) -> Result<Written, TuneError> {
    if let Some(label) = results.trunk.as_ref().filter(|label| label.starts_with(FAULTS_LABEL)) {
        return Err(TuneError::Option(format!("{label}; nothing is promoted")));
    }
    let plan = read_plan(&finalist.plan_file)?;
    let comparison = &results.comparisons[arm - 1];
    let Some(effect) = comparison.effect else {
        return Err(TuneError::Option(format!("{}: no effect was measured; nothing is promoted", comparison.arm)));
    };
    let tuned = Tuned {
        version: TUNED_VERSION,
        made: utc_now(),
        argodrive: environment::version(),
        record: record.to_path_buf(),
        arm: finalist.arm.clone(),
        ratio: effect.ratio,
        ratio_low: effect.low.unwrap_or(0.0),
        ratio_high: effect.high.unwrap_or(f64::MAX),
        level: comparison.level,
        pairs: comparison.pairs.len(),
        noise_ratio: results.floor.log_ratio.unwrap_or(0.0).exp(),
        predicted_ratio: finalist.gain,
        emulated: results.emulated,
        model_id: plan.model_id.clone(),
        plan_hash: plan.hash()?,
        changed: finalist.changes.iter().map(|c| c.setting.clone()).collect(),
        proved: file.arms[arm].under_test.clone(),
    };
    let beside = plan_beside(profile, &tuned.plan_hash);
    write_plan(&beside, &plan)?;
    let mut table = finalist.profile.clone();
    put(&mut table, "plan", &beside);
    let former = replace(profile, &render(&table, Some(&tuned)).map_err(TuneError::Option)?)?;
    Ok(Written { former, plan: beside, ratio: effect.ratio })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::campaign::file::CampaignFile;
    use crate::bench::profile::{history, roll_back, take_tuned};
    use crate::ids::LayerId;
    use crate::layout::plan::PlanDrive;
    use crate::layout::planner::{Catalog, plan};
    use crate::layout::policy::Policy;
    use std::collections::BTreeMap;

    /// A campaign that was measured, with what it came to.
    fn sample(name: &str) -> (CampaignFile, Results) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples").join(name);
        let file = CampaignFile::load(&folder).unwrap();
        let results = file.results.clone().unwrap();
        (file, results)
    }

    /// Records in which everything under test is proved.
    fn all_proved(file: &CampaignFile) -> Vec<Vec<Evidence>> {
        let evidence = |name: &String| Evidence {
            name: name.clone(),
            asked: "x".into(),
            seen: "x".into(),
            verdict: Verdict::Proved,
            under_test: true,
        };
        file.steps().iter().map(|s| file.arms[s.arm].under_test.iter().map(evidence).collect()).collect()
    }

    fn judged(file: &CampaignFile, results: &Results, records: &[Vec<Evidence>]) -> Decision {
        let seen: Vec<Option<&[Evidence]>> = records.iter().map(|r| Some(r.as_slice())).collect();
        decide(file, results, &seen)
    }

    #[test]
    fn only_better_with_whole_evidence_is_promoted() {
        let (file, results) = sample("mirror");
        let sound = all_proved(&file);
        assert_eq!(judged(&file, &results, &sound).promoted, Some(1));
        // one setting of one run, of either arm, is enough
        for arm in [0, 1] {
            for verdict in [Verdict::Unverified, Verdict::Contradicted] {
                let mut records = sound.clone();
                let at = file.steps().iter().rposition(|s| s.arm == arm).unwrap();
                records[at][0].verdict = verdict;
                let decision = judged(&file, &results, &records);
                assert_eq!(decision.promoted, None);
                assert!(decision.reasons.iter().any(|r| r.contains("layout was not proved")), "{:?}", decision.reasons);
                assert!(!decision.rejected);
            }
        }
        let mut missing = sound.clone();
        missing.last_mut().unwrap().retain(|e| e.name != "replicas");
        let last = file.steps().last().unwrap().arm;
        assert_eq!(judged(&file, &results, &missing).promoted, Some(1).filter(|_| last == 0));
        assert_eq!(decide(&file, &results, &vec![None; sound.len()]).promoted, None, "no record, no proof");
    }

    #[test]
    fn every_other_verdict_keeps_the_profile() {
        let (file, results) = sample("aa");
        let records = all_proved(&file);
        let decision = judged(&file, &results, &records);
        assert_eq!((decision.promoted, decision.rejected), (None, false));
        assert!(decision.reasons[0].contains("within noise"), "{:?}", decision.reasons);
        let (file, good) = sample("mirror");
        let records = all_proved(&file);
        for outcome in [Outcome::Worse, Outcome::WithinNoise, Outcome::NotStorageBound, Outcome::TooFew] {
            let mut results = good.clone();
            results.comparisons[0].outcome = outcome;
            assert_eq!(judged(&file, &results, &records).promoted, None, "{}", outcome.name());
        }
        let mut few = good.clone();
        few.comparisons[0].pairs.truncate(MIN_PAIRS - 1);
        assert_eq!(judged(&file, &few, &records).promoted, None);
        let mut open = good.clone();
        open.comparisons[0].effect.as_mut().unwrap().low = None;
        assert_eq!(judged(&file, &open, &records).promoted, None);
        for arm in [0, 1] {
            let mut results = good.clone();
            results.arms[arm].rejected = Some("tokens differ".into());
            let decision = judged(&file, &results, &records);
            assert_eq!((decision.promoted, decision.rejected), (None, true));
        }
    }

    #[test]
    fn a_promoted_profile_says_why_and_can_be_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let (file, results) = sample("mirror");
        let catalog = Catalog {
            model_id: "m".into(),
            store: "/s".into(),
            layers: vec![LayerId(1)],
            experts: 4,
            expert_bytes: 4096,
        };
        let drives = ["a", "b"].map(|n| PlanDrive { name: n.into(), path: format!("/{n}").into() });
        let mirror = plan(&catalog, &drives, &Policy::FullMirror {}, 0, BTreeMap::new()).unwrap();
        let plan_file = dir.path().join("results/plans/mirror.json");
        write_plan(&plan_file, &mirror).unwrap();
        let profile = dir.path().join("profile.toml");
        let former = "plan = \"old.json\"\nmax_new = 9\n";
        std::fs::write(&profile, former).unwrap();
        let settings: toml::Table = toml::from_str("max_new = 9\n[reader]\ndispatch = \"split\"\n").unwrap();
        let finalist = Finalist {
            arm: "mirror".into(),
            plan_file,
            plan_hash: mirror.hash().unwrap(),
            gain: 1.2,
            copy_bytes: 0,
            changes: Vec::new(),
            fired: Vec::new(),
            profile: settings,
        };
        let written = promote(&profile, &finalist, &file, &results, 1, Path::new("record.json")).unwrap();
        std::fs::remove_dir_all(dir.path().join("results")).unwrap();
        let mut table: toml::Table = toml::from_str(&std::fs::read_to_string(&profile).unwrap()).unwrap();
        let tuned = take_tuned(&mut table).unwrap().unwrap();
        let effect = results.comparisons[0].effect.unwrap();
        assert_eq!((tuned.ratio, Some(tuned.ratio_low), tuned.pairs), (effect.ratio, effect.low, 8));
        assert!(tuned.emulated && tuned.proved == file.arms[1].under_test);
        let plan = table["plan"].as_str().unwrap();
        assert_eq!(read_plan(Path::new(plan)).unwrap(), mirror, "the plan lies beside the profile, not in results");
        assert_eq!(table["max_new"].as_integer(), Some(9));
        assert_eq!(written.former, Some(history(&profile)[0].1.clone()));
        roll_back(&profile, &|_| Ok(())).unwrap();
        assert_eq!(std::fs::read_to_string(&profile).unwrap(), former);
    }
}
