//! Verdicts that may have outlived what they were about: for each row, which inputs are other than they were, which cannot be
//! told, and the command that measures again. An input that a record does not hold is unknown, never unchanged.

use super::rows::{RUN_FILE, levels_to_measured};
use super::stale_inputs::{Compared, INPUTS};
use super::today::Today;
use super::walk::is_measured;
use super::{Kind, Row, Verdict};
use crate::bench::campaign::file::{CampaignFile, read_versioned};
use crate::bench::config::nearest;
use crate::bench::ladder::{LADDER_VERSION, LadderRecord};
use crate::bench::record::{RECORD_VERSION, RunRecord};
use crate::drive::profile::{PROFILE_VERSION, Profile};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// How a row's inputs are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// One at least has changed.
    Stale,
    /// None is known to have changed, and one at least cannot be told.
    #[default]
    Unknown,
    /// All are what they were.
    Fresh,
}

impl State {
    /// As in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stale => "stale",
            Self::Unknown => "unknown",
            Self::Fresh => "fresh",
        }
    }
}

/// An input that is another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Which.
    pub input: &'static str,
    /// Whose; empty where there is only one.
    pub who: String,
    /// As recorded.
    pub then: String,
    /// As found today.
    pub now: String,
}

/// An input that cannot be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unknown {
    /// Which.
    pub input: &'static str,
    /// Why.
    pub why: String,
}

/// What was found out about one row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Judgement {
    /// The verdict on its inputs.
    pub state: State,
    /// Inputs that have changed.
    pub changed: Vec<Change>,
    /// Inputs that cannot be told.
    pub unknown: Vec<Unknown>,
    /// Inputs that were looked at.
    pub asked: BTreeSet<&'static str>,
    /// The command that measures again.
    pub again: String,
    /// What that command cannot know; empty = nothing.
    pub note: String,
}

impl Judgement {
    /// Names of inputs that have changed, each once.
    pub fn changed_names(&self) -> Vec<&'static str> {
        INPUTS.into_iter().filter(|n| self.changed.iter().any(|c| c.input == *n)).collect()
    }

    /// Names of inputs that cannot be told, each once.
    pub fn unknown_names(&self) -> Vec<&'static str> {
        INPUTS.into_iter().filter(|n| self.unknown.iter().any(|u| u.input == *n)).collect()
    }
}

/// Checks names of inputs; none = all.
pub fn inputs_named<'a>(names: impl Iterator<Item = &'a str>) -> Result<BTreeSet<&'static str>, String> {
    let find = |name: &str| {
        INPUTS.into_iter().find(|i| *i == name).ok_or_else(|| {
            let hint = nearest(name, &INPUTS).map(|n| format!("; did you mean `{n}`?"));
            let hint = hint.unwrap_or_else(|| format!("; there are {}", INPUTS.join(", ")));
            format!("--stale: there is no input `{name}`{hint}")
        })
    };
    names.map(find).collect()
}

/// Rows whose inputs can be asked about: verdicts and measurements, not traces.
pub fn can_be_judged(row: &Row) -> bool {
    row.kind != Kind::Trace
}

/// Judges one row by its record, which is read again. `only` = these inputs; empty = all.
pub fn judge(row: &Row, today: &mut Today, only: &BTreeSet<&'static str>) -> Judgement {
    let mut out = Judgement::default();
    let path = &row.path;
    let read = match row.kind {
        Kind::Run => run(path, row, today, &mut out),
        Kind::Comparison => comparison(path, row, today, &mut out),
        Kind::Rung => rung(path, row, today, &mut out),
        Kind::Ceiling => ceiling(path, today, &mut out),
        Kind::Trace => Ok(()),
    };
    if let Err(why) = read {
        out.unknown.push(Unknown { input: "code", why });
    }
    if row.origin.is_some() {
        out.note = "it was measured on another machine: what is there today is this one's".into();
    }
    if !only.is_empty() {
        out.changed.retain(|c| only.contains(c.input));
        out.unknown.retain(|u| only.contains(u.input));
        out.asked.retain(|a| only.contains(a));
    }
    out.state = match (out.changed.is_empty(), out.unknown.is_empty() && !out.asked.is_empty()) {
        (false, _) => State::Stale,
        (true, false) => State::Unknown,
        (true, true) => State::Fresh,
    };
    out
}

fn run(path: &Path, row: &Row, today: &mut Today, out: &mut Judgement) -> Result<(), String> {
    let record: RunRecord = read_versioned(path, RECORD_VERSION).map_err(|e| e.to_string())?;
    Compared { today, out, who: String::new() }.run(&record);
    out.again = format!("argodrive experiment rerun {}", quoted(&path.display().to_string()));
    let folder = path.ancestors().nth(levels_to_measured(path)).unwrap_or(Path::new("."));
    if row.inside && is_measured(folder) {
        out.note = format!("it is one run of {}, whose verdict needs all of them", folder.display());
    }
    Ok(())
}

fn comparison(path: &Path, row: &Row, today: &mut Today, out: &mut Judgement) -> Result<(), String> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let file = CampaignFile::load(folder).map_err(|e| e.to_string())?;
    let first = first_run(folder, |_| true);
    for arm in file.arms.iter().filter(|a| a.name == row.name || Some(&a.name) == row.control.as_ref()) {
        let mut compared = Compared { today, out, who: arm.name.clone() };
        compared.arm(arm);
        // the arms may use different drives
        if let Some(run) = first_run(folder, |record| record.arm == arm.name) {
            compared.map(&run);
        } else {
            compared.unknown("drive-map", "no run of the arm is kept");
        }
    }
    Compared { today, out, who: String::new() }.campaign(&file, first.as_ref());
    merge_arms(out);
    out.again = match &file.source {
        _ if row.verdict == Verdict::Unfinished => format!("argodrive experiment resume {}", quoted(&shown(folder))),
        Some(source) if source.is_file() => format!("argodrive experiment run {}", quoted(&shown(source))),
        _ => format!("argodrive experiment rerun {}", quoted(&shown(folder))),
    };
    Ok(())
}

fn rung(path: &Path, row: &Row, today: &mut Today, out: &mut Judgement) -> Result<(), String> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let ladder: LadderRecord = read_versioned(path, LADDER_VERSION).map_err(|e| e.to_string())?;
    let first = first_run(folder, |record| record.arm == row.name);
    Compared { today, out, who: String::new() }.rung(&ladder, folder, &row.name, first.as_ref());
    // whatever else a record says is no command that climbs it
    if ladder.command.first().is_some_and(|word| word == "ladder" || word == "demo") {
        let words: Vec<String> = ladder.command.iter().map(|w| quoted(w)).collect();
        out.again = format!("argodrive {}", words.join(" "));
        return Ok(());
    }
    let config = first.as_ref().map(|r| &r.config);
    let store = config.map_or_else(|| "STORE".into(), |c| quoted(&shown(&c.store)));
    let prompt = match config.map(|c| (&c.prompt_file, &c.prompt)) {
        Some((Some(file), _)) => format!("--prompt-file {}", quoted(&shown(file))),
        Some((None, Some(text))) => format!("--prompt {}", quoted(text)),
        _ => "--prompt-file PROMPT".into(),
    };
    let tokens = config.map(|c| format!(" --max-new {}", c.max_new)).unwrap_or_default();
    let drives = folder.join("drives.toml");
    let drives = if drives.is_file() { quoted(&shown(&drives)) } else { "DRIVES".into() };
    out.again = format!(
        "argodrive ladder --store {store} --drives {drives} --policy layouts/{}.toml {prompt}{tokens}",
        ladder.policy
    );
    out.note =
        "the record is older than its command: words in capitals, heat and settings of the reader are not in it".into();
    Ok(())
}

fn ceiling(path: &Path, today: &mut Today, out: &mut Judgement) -> Result<(), String> {
    let profile: Profile = read_versioned(path, PROFILE_VERSION).map_err(|e| e.to_string())?;
    Compared { today, out, who: String::new() }.ceiling(&profile);
    out.again = "argodrive ceiling --drives DRIVES".into();
    let at: Vec<String> = profile.drives.iter().map(|d| format!("{} = {}", d.name, d.path.display())).collect();
    out.note = format!("DRIVES: the file with {}", at.join(", "));
    Ok(())
}

/// The same change in both arms is one change.
fn merge_arms(out: &mut Judgement) {
    let mut merged: Vec<Change> = Vec::new();
    for change in std::mem::take(&mut out.changed) {
        let same = |c: &&mut Change| (c.input, &c.then, &c.now) == (change.input, &change.then, &change.now);
        match merged.iter_mut().find(same) {
            Some(first) => first.who = [first.who.as_str(), change.who.as_str()].join(", "),
            None => merged.push(change),
        }
    }
    out.changed = merged;
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// The first run of a measured folder that counts and fits.
fn first_run(folder: &Path, fits: impl Fn(&RunRecord) -> bool) -> Option<RunRecord> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder.join("arms")).ok()?.flatten().map(|e| e.path().join(RUN_FILE)).collect();
    paths.sort();
    paths.iter().filter_map(|p| read_versioned(p, RECORD_VERSION).ok()).find(fits)
}

/// A word as a shell reads it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_string()
    } else {
        let escaped = |c: char| match c {
            '\n' => "\\n".to_string(),
            '\t' => "\\t".to_string(),
            '\\' | '\'' => format!("\\{c}"),
            c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
            c => c.to_string(),
        };
        match word.chars().any(char::is_control) {
            true => format!("$'{}'", word.chars().map(escaped).collect::<String>()),
            false => format!("'{}'", word.replace('\'', "'\\''")),
        }
    }
}
