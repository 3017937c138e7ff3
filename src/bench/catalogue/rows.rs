//! From one record to its rows. Takes text and a path, opens nothing, so that records inside a bundle are read by the same lines.

use super::{Kind, Machine, Row, Verdict};
use crate::bench::campaign::CampaignError;
use crate::bench::campaign::arms::by_name;
use crate::bench::campaign::evaluate::Effect;
use crate::bench::campaign::file::{CAMPAIGN_FILE, CampaignFile, State, parse_versioned};
use crate::bench::ladder::{LADDER_VERSION, LadderRecord};
use crate::bench::record::{RECORD_VERSION, RecordError, RunRecord};
use crate::drive::profile::{PROFILE_VERSION, Profile};
use crate::trace::log::{TRACE_FILE, TRACE_VERSION, TraceHeader};
use std::collections::BTreeMap;
use std::path::Path;

/// A run.
pub const RUN_FILE: &str = "record.json";
/// A ladder.
pub const LADDER_FILE: &str = "ladder.json";
/// A profile.
pub const PROFILE_FILE: &str = "profile.json";
/// A profile with a tripped guard.
pub const REJECTED_PROFILE_FILE: &str = "profile.rejected.json";
/// Names of files that hold records.
pub const RECORD_FILES: [&str; 6] =
    [RUN_FILE, LADDER_FILE, CAMPAIGN_FILE, PROFILE_FILE, REJECTED_PROFILE_FILE, TRACE_FILE];
/// Folders of a measured folder that hold its runs.
const RUN_FOLDERS: [&str; 3] = ["arms", "rejected", ASIDE];
/// The one with runs whose inputs had changed.
const ASIDE: &str = "stale";

/// The rows of the record in `text`, the contents of `path`; `Err` names the path.
pub fn rows_of(path: &Path, text: &str) -> Result<Vec<Row>, RecordError> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    match name {
        RUN_FILE => Ok(vec![run(path, &parse_versioned(text, path, RECORD_VERSION)?)]),
        LADDER_FILE => Ok(ladder(path, &parse_versioned(text, path, LADDER_VERSION)?)),
        CAMPAIGN_FILE => match CampaignFile::parse(text, path.to_path_buf()) {
            Ok(file) => Ok(campaign(path, &file)),
            Err(CampaignError::Record(e)) => Err(e),
            Err(other) => Err(RecordError::Format { path: path.to_path_buf(), reason: other.to_string() }),
        },
        PROFILE_FILE | REJECTED_PROFILE_FILE => {
            let profile: Profile = parse_versioned(text, path, PROFILE_VERSION)?;
            if name == PROFILE_FILE {
                profile.check().map_err(|reason| RecordError::Format { path: path.to_path_buf(), reason })?;
            }
            Ok(vec![ceiling(path, &profile, name == REJECTED_PROFILE_FILE)])
        }
        TRACE_FILE => Ok(vec![trace(path, &parse_versioned(text, path, TRACE_VERSION)?)]),
        other => Err(RecordError::Format { path: path.to_path_buf(), reason: format!("`{other}` is no record") }),
    }
}

/// Name of the folder `up` levels above the file.
fn folder_name(path: &Path, up: usize) -> String {
    let folder = path.ancestors().nth(up).and_then(Path::file_name);
    folder.map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Levels between a run's record and the folder of what it was measured for.
pub(super) fn levels_to_measured(path: &Path) -> usize {
    if RUN_FOLDERS.contains(&folder_name(path, 2).as_str()) { 3 } else { 1 }
}

/// `20261129T202006Z-<revision>` as a time; empty if the folder is not called so.
fn stamp_of(folder: &str) -> String {
    let digits = |range: std::ops::Range<usize>| {
        folder.get(range).filter(|d| d.bytes().all(|b| b.is_ascii_digit())).unwrap_or_default()
    };
    let [date, time] = [digits(0..8), digits(9..15)];
    if date.is_empty() || time.is_empty() || folder.get(8..9) != Some("T") {
        return String::new();
    }
    let (d, t) = (date, time);
    format!("{}-{}-{}T{}:{}:{}Z", &d[..4], &d[4..6], &d[6..], &t[..2], &t[2..4], &t[4..])
}

/// A row of which nothing but its place is known.
pub(super) fn blank(path: &Path, kind: Kind, up: usize) -> Row {
    let measured = folder_name(path, up);
    let when = stamp_of(&measured);
    // a folder with a stamp lies in the folder of its experiment; another is called as somebody wanted
    let experiment = if when.is_empty() { measured } else { folder_name(path, up + 1) };
    Row {
        origin: None,
        path: path.to_path_buf(),
        when,
        kind,
        experiment,
        name: String::new(),
        control: None,
        inside: false,
        model: String::new(),
        drives: Vec::new(),
        emulated: false,
        trunk: None,
        tok_s: None,
        tok_s_range: None,
        bytes_per_s: None,
        effect: None,
        runs: 0,
        verdict: Verdict::Measured,
        says: String::new(),
        plan: String::new(),
        tokens: String::new(),
        settings: Default::default(),
        inputs: Default::default(),
        machine: Machine::default(),
    }
}

fn with_build(inputs: &BTreeMap<String, String>, build: &str) -> BTreeMap<String, String> {
    let build = (!build.is_empty()).then(|| ("build".to_string(), build.to_string()));
    inputs.iter().map(|(k, v)| (k.clone(), v.clone())).chain(build).collect()
}

fn run(path: &Path, record: &RunRecord) -> Row {
    let rate = Some(record.rates.decode_tok_s).filter(|r| *r > 0.0);
    let aside = folder_name(path, 2) == ASIDE && levels_to_measured(path) == 3;
    let (verdict, says) = match (record.rejected.is_empty(), aside) {
        (false, _) => (Verdict::Rejected, record.rejected.join("; ")),
        (true, true) => (Verdict::PutAside, "its inputs had changed when its campaign went on".into()),
        (true, false) => (Verdict::Measured, String::new()),
    };
    Row {
        when: record.started.clone(),
        name: record.arm.clone(),
        model: record.model_id.clone(),
        drives: record.drives.iter().map(|d| d.name.clone()).collect(),
        emulated: record.emulated,
        trunk: record.label(),
        tok_s: rate,
        tok_s_range: rate.map(|r| (r, r)),
        runs: 1,
        verdict,
        says,
        plan: record.plan_hash.clone(),
        tokens: record.token_hash.clone(),
        settings: by_name(&record.config).unwrap_or_default(),
        inputs: with_build(&record.inputs, &record.environment.build),
        machine: Machine {
            argodrive: record.environment.argodrive.clone(),
            kernel: record.environment.kernel.clone(),
            cpu: record.environment.cpu.clone(),
        },
        ..blank(path, Kind::Run, levels_to_measured(path))
    }
}

fn ladder(path: &Path, record: &LadderRecord) -> Vec<Row> {
    let rejected = record.rejected.join("; ");
    let base = record.base();
    let row = |(index, rung): (usize, &crate::bench::ladder::Rung)| Row {
        name: if rung.arm.is_empty() { format!("rung{}", index + 1) } else { rung.arm.clone() },
        model: record.model_id.clone(),
        drives: rung.drives.clone(),
        emulated: record.emulated,
        trunk: record.trunk.clone(),
        tok_s: Some(rung.rates.decode_tok_s),
        tok_s_range: Some(rung.decode_tok_s_range),
        effect: (Some(index) != base).then_some(Effect { ratio: rung.gain, low: None, high: None }),
        runs: rung.runs,
        verdict: if record.rejected.is_empty() { Verdict::Measured } else { Verdict::Rejected },
        says: if rejected.is_empty() && Some(index) != base {
            "over the ladder's first rung; medians, not pairs".into()
        } else {
            rejected.clone()
        },
        plan: rung.plan.clone(),
        tokens: record.token_hash.clone(),
        ..blank(path, Kind::Rung, 1)
    };
    if record.rungs.is_empty() {
        let verdict = Verdict::Rejected;
        let (emulated, model) = (record.emulated, record.model_id.clone());
        return vec![Row {
            name: "no rung".into(),
            emulated,
            model,
            verdict,
            says: rejected,
            ..blank(path, Kind::Rung, 1)
        }];
    }
    record.rungs.iter().enumerate().map(row).collect()
}

fn campaign(path: &Path, file: &CampaignFile) -> Vec<Row> {
    let Some(control) = file.arms.first() else { return Vec::new() };
    let row = |(index, arm): (usize, &crate::bench::campaign::file::ArmFile)| {
        let results = file.results.as_ref();
        let comparison = results.and_then(|r| r.comparisons.get(index - 1));
        let line = results.and_then(|r| r.arms.get(index));
        let given_up = [control, arm].into_iter().find_map(|a| Some((&a.name, file.rejected.get(&a.name)?)));
        let (verdict, says) = match (given_up, comparison) {
            (Some((name, why)), _) => (Verdict::Rejected, format!("arm {name}: {why}")),
            (None, Some(c)) => (c.outcome.into(), c.says.clone()),
            (None, None) if file.state == State::Complete => (Verdict::TooFew, "no results are kept".into()),
            (None, None) => (Verdict::Unfinished, "not finished; `argodrive experiment resume` goes on".into()),
        };
        let input = |name: &str| arm.inputs.get(name).cloned().unwrap_or_default();
        Row {
            when: file.started.clone(),
            experiment: file.experiment.clone(),
            name: arm.name.clone(),
            control: Some(control.name.clone()),
            model: input("model"),
            emulated: results.is_some_and(|r| r.emulated),
            trunk: results.and_then(|r| r.trunk.clone()),
            tok_s: line.and_then(|l| l.decode_tok_s),
            tok_s_range: line.and_then(|l| l.range),
            effect: comparison.and_then(|c| c.effect),
            runs: comparison.map_or(0, |c| c.pairs.len()),
            verdict,
            says,
            plan: input("plan"),
            tokens: results.map(|r| r.tokens.values().cloned().collect::<Vec<_>>().join("+")).unwrap_or_default(),
            settings: by_name(&arm.config).unwrap_or_default(),
            inputs: arm.inputs.clone(),
            machine: Machine { argodrive: input("argodrive"), ..Machine::default() },
            ..blank(path, Kind::Comparison, 1)
        }
    };
    file.arms.iter().enumerate().skip(1).map(row).collect()
}

fn ceiling(path: &Path, profile: &Profile, rejected: bool) -> Row {
    let bad = profile.guards.iter().filter(|g| g.verdict != "held" && g.verdict != "unverified");
    let says: Vec<String> = bad.map(|g| format!("{}: {}", g.name, g.seen)).collect();
    Row {
        when: profile.method.made.clone(),
        name: format!("{} drives together", profile.together.members.len()),
        drives: profile.drives.iter().map(|d| d.name.clone()).collect(),
        emulated: profile.emulated,
        bytes_per_s: Some(profile.together.bytes_per_s),
        runs: 1,
        verdict: if rejected { Verdict::Rejected } else { Verdict::Measured },
        says: if rejected && says.is_empty() { "a guard tripped".into() } else { says.join("; ") },
        machine: Machine {
            argodrive: profile.method.argodrive.clone(),
            kernel: profile.method.kernel.clone(),
            cpu: String::new(),
        },
        ..blank(path, Kind::Ceiling, 1)
    }
}

fn trace(path: &Path, header: &TraceHeader) -> Row {
    let reissued = header.reissued.as_ref();
    let rejected = reissued.is_some_and(|r| !r.rejected.is_empty());
    let from = header.imported.is_some();
    // that of a ladder lies in <ladder>/trace, those of a campaign in <campaign>/traces/<run>
    let up = match (folder_name(path, 1).as_str(), folder_name(path, 2).as_str()) {
        ("trace", _) => 2,
        (_, "traces") => 3,
        _ => 1,
    };
    Row {
        name: match (reissued, from) {
            (Some(_), _) => "read again".into(),
            (None, true) => "of another program".into(),
            (None, false) => "recorded".into(),
        },
        model: header.model_id.clone().unwrap_or_default(),
        drives: header.drives.iter().map(|d| d.name.clone()).collect(),
        emulated: header.drives.iter().any(|d| d.emulated),
        trunk: (!header.faults.is_empty()).then(|| crate::bench::trouble::FAULTS_LABEL.to_string()),
        runs: 1,
        verdict: if rejected { Verdict::Rejected } else { Verdict::Measured },
        says: reissued.map(|r| r.rejected.join("; ")).unwrap_or_default(),
        ..blank(path, Kind::Trace, up)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn sample(name: &str) -> Vec<Row> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples").join(name);
        rows_of(&path, &std::fs::read_to_string(&path).unwrap()).unwrap()
    }

    #[test]
    fn committed_samples_have_the_rows_that_they_were_committed_for() {
        let aa = &sample("aa/experiment.json")[0];
        assert!(aa.emulated && aa.verdict.is_negative(), "{aa:?}");
        assert_eq!(aa.kind, Kind::Comparison);
        let mirror = &sample("mirror/experiment.json")[0];
        assert_eq!((mirror.verdict, mirror.experiment.as_str()), (Verdict::Better, "mirror"));
        assert!(mirror.effect.unwrap().low.unwrap() > 1.0 && mirror.says.contains("interval"));
        assert_eq!(mirror.settings["reader.queue_depth"], "4");
        let ladder = sample("demo-ladder/ladder.json");
        assert_eq!(ladder.len(), 4);
        assert!(ladder[0].effect.is_none() && ladder[3].effect.unwrap().ratio > 1.0);
        assert_eq!(ladder[0].experiment, "demo-ladder");
    }

    #[test]
    fn folders_tell_time_and_experiment() {
        assert_eq!(stamp_of("20261129T202006Z-d589d7db2a1c"), "2026-11-29T20:20:06Z");
        assert_eq!(stamp_of("20261129"), "");
        assert_eq!(stamp_of("2026112éT202006Z"), "");
        let path = PathBuf::from("results/ladder/20261129T202006Z-abc/ladder.json");
        let row = blank(&path, Kind::Rung, 1);
        assert_eq!((row.experiment.as_str(), row.when.as_str()), ("ladder", "2026-11-29T20:20:06Z"));
        assert_eq!(levels_to_measured(Path::new("r/x/arms/00-a/record.json")), 3);
        assert_eq!(levels_to_measured(Path::new("r/x/record.json")), 1);
    }

    #[test]
    fn another_version_is_told_from_a_damaged_file() {
        let path = Path::new("x/record.json");
        assert!(matches!(rows_of(path, "{\"version\": 7}"), Err(RecordError::Version { version: 7, .. })));
        assert!(matches!(rows_of(path, "{\"version\": 1}"), Err(RecordError::Format { .. })));
        assert!(matches!(rows_of(path, "{"), Err(RecordError::Format { .. })));
        assert!(matches!(rows_of(Path::new("x/trace.json"), "{\"version\": 9}"), Err(RecordError::Version { .. })));
    }
}
