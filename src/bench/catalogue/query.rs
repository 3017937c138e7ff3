//! Which rows somebody asked for, and in which order. Pure.

use super::{Kind, Row, Verdict};
use crate::bench::campaign::arms::by_name;
use crate::bench::config::{RunConfig, nearest};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Something of a row that rows can be picked and grouped by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// A column.
    Column(Column),
    /// A setting by its dotted name.
    Setting(String),
}

/// A column that is no setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// What the row is.
    Kind,
    /// The experiment.
    Experiment,
    /// The arm or rung.
    Name,
    /// The model's id.
    Model,
    /// How many drives.
    Drives,
    /// Emulated or real.
    Pace,
    /// The verdict.
    Verdict,
    /// The bundle's label.
    Origin,
    /// argodrive's version and revision.
    Code,
    /// Kernel release.
    Kernel,
    /// CPU model.
    Cpu,
    /// Hash of the plan.
    PlanHash,
    /// The day.
    Day,
}

const COLUMNS: [(&str, Column); 13] = [
    ("kind", Column::Kind),
    ("experiment", Column::Experiment),
    ("name", Column::Name),
    ("model", Column::Model),
    ("drive_count", Column::Drives),
    ("emulated", Column::Pace),
    ("verdict", Column::Verdict),
    ("origin", Column::Origin),
    ("code", Column::Code),
    ("kernel", Column::Kernel),
    ("cpu", Column::Cpu),
    ("plan_hash", Column::PlanHash),
    ("day", Column::Day),
];

impl Key {
    /// The key called `name`: a column, a setting by its dotted name, or by its last part alone.
    pub fn named(name: &str) -> Result<Self, String> {
        if let Some((_, column)) = COLUMNS.iter().find(|(n, _)| *n == name) {
            return Ok(Self::Column(*column));
        }
        let settings = setting_names();
        let last = |setting: &str| setting.rsplit('.').next() == Some(name);
        let mut found = settings.iter().filter(|s| **s == name || last(s));
        if let Some(first) = found.next() {
            return Ok(Self::Setting(first.clone()));
        }
        let last_parts = settings.iter().filter_map(|s| s.rsplit('.').next());
        let known: Vec<&str> = COLUMNS.iter().map(|c| c.0).chain(last_parts).collect();
        let hint = nearest(name, &known).map(|n| format!("; did you mean `{n}`?"));
        let columns = COLUMNS.map(|c| c.0).join(", ");
        Err(format!(
            "there is no `{name}`{}",
            hint.unwrap_or_else(|| format!("; give a setting of a run configuration, or one of {columns}"))
        ))
    }

    /// What a row has there; empty = not known.
    pub fn of(&self, row: &Row) -> String {
        let column = match self {
            Self::Setting(name) => return row.settings.get(name).cloned().unwrap_or_default(),
            Self::Column(column) => column,
        };
        match column {
            Column::Kind => row.kind.name().into(),
            Column::Experiment => row.experiment.clone(),
            Column::Name => row.name.clone(),
            Column::Model => row.model.clone(),
            Column::Drives if row.drives.is_empty() => String::new(),
            Column::Drives => row.drives.len().to_string(),
            Column::Pace => if row.emulated { "emulated" } else { "real" }.into(),
            Column::Verdict => row.verdict.name().into(),
            Column::Origin => row.origin.clone().unwrap_or_else(|| "here".into()),
            Column::Code => row.machine.argodrive.clone(),
            Column::Kernel => row.machine.kernel.clone(),
            Column::Cpu => row.machine.cpu.clone(),
            Column::PlanHash => row.plan.clone(),
            Column::Day => row.when.chars().take(10).collect(),
        }
    }

    /// As in headings.
    pub fn title(&self) -> &str {
        match self {
            Self::Setting(name) => name.rsplit('.').next().unwrap_or(name),
            Self::Column(column) => COLUMNS.iter().find(|c| c.1 == *column).map_or("", |c| c.0),
        }
    }
}

fn setting_names() -> Vec<String> {
    by_name(&RunConfig::default()).map(BTreeMap::into_keys).into_iter().flatten().collect()
}

/// `key=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    key: Key,
    value: String,
}

impl Condition {
    /// Parses `key=value`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or_else(|| format!("`{text}` is no key=value"))?;
        Ok(Self { key: Key::named(key.trim())?, value: value.trim().to_string() })
    }

    /// Whether a row has the value; a path also by its last part, a hash by its beginning.
    fn holds(&self, row: &Row) -> bool {
        let have = self.key.of(row);
        let hash = matches!(self.key, Key::Column(Column::Model | Column::PlanHash));
        have == self.value
            || (hash && self.value.len() >= 4 && have.starts_with(&self.value))
            || (!self.value.is_empty() && Path::new(&have).file_name().is_some_and(|n| n == self.value.as_str()))
    }
}

/// How rows are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Newest first.
    #[default]
    Date,
    /// Largest effect first; rows without one last.
    Effect,
    /// Fastest first.
    TokS,
}

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// Kinds; empty = all.
    pub kinds: Vec<Kind>,
    /// Beginning of the model's id.
    pub model: Option<String>,
    /// Verdicts; empty = all.
    pub verdicts: Vec<Verdict>,
    /// Begun at this time or later, as RFC 3339 in UTC.
    pub since: Option<String>,
    /// All of these.
    pub conditions: Vec<Condition>,
    /// Emulated, or real.
    pub emulated: Option<bool>,
    /// Runs of ladders and campaigns too.
    pub inside: bool,
    /// The order.
    pub order: Order,
    /// The best or worst by effect, and how many.
    pub ranked: Option<(Rank, usize)>,
}

/// Which end of the effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rank {
    /// The largest first.
    Best,
    /// The smallest first.
    Worst,
}

/// What was picked.
pub struct Picked<'a> {
    /// The rows, in order.
    pub rows: Vec<&'a Row>,
    /// Runs inside of what was picked that are not shown.
    pub inside: usize,
    /// Of these, rejected ones.
    pub inside_rejected: usize,
    /// Rows that `since` left out because they have no date.
    pub undated: usize,
}

impl Query {
    fn holds(&self, row: &Row) -> bool {
        (self.kinds.is_empty() || self.kinds.contains(&row.kind))
            && (self.verdicts.is_empty() || self.verdicts.contains(&row.verdict))
            && self.model.as_ref().is_none_or(|m| row.model.starts_with(m.as_str()))
            && self.emulated.is_none_or(|e| e == row.emulated)
            && self.conditions.iter().all(|c| c.holds(row))
    }

    /// Picks from `rows`.
    pub fn pick<'a>(&self, rows: &'a [Row]) -> Picked<'a> {
        let mut out = Picked { rows: Vec::new(), inside: 0, inside_rejected: 0, undated: 0 };
        for row in rows.iter().filter(|r| self.holds(r)) {
            match &self.since {
                Some(_) if row.when.is_empty() => out.undated += 1,
                Some(since) if row.when < *since => {}
                _ if row.inside && !self.inside => {
                    out.inside += 1;
                    out.inside_rejected += usize::from(row.verdict == Verdict::Rejected);
                }
                _ => out.rows.push(row),
            }
        }
        let ratio = |r: &&Row| r.effect.map_or(f64::NEG_INFINITY, |e| e.ratio);
        let descending = |a: f64, b: f64| b.total_cmp(&a);
        match self.order {
            // rows of one file keep their order
            Order::Date => out.rows.sort_by(|a, b| b.when.cmp(&a.when)),
            Order::Effect => out.rows.sort_by(|a, b| descending(ratio(a), ratio(b))),
            Order::TokS => {
                let speed = |r: &&Row| r.tok_s.unwrap_or(f64::NEG_INFINITY);
                out.rows.sort_by(|a, b| descending(speed(a), speed(b)));
            }
        }
        if let Some((rank, most)) = self.ranked {
            // only pairs have an effect with an interval; other kinds are ranked where they are asked for
            let kind = |r: &&Row| r.kind == Kind::Comparison || self.kinds.contains(&r.kind);
            out.rows.retain(|r| r.effect.is_some() && r.verdict.counts() && kind(r) && !r.has_faults());
            out.rows.sort_by(|a, b| descending(ratio(a), ratio(b)));
            if rank == Rank::Worst {
                out.rows.reverse();
            }
            out.rows.truncate(most);
        }
        out
    }
}

/// A date (`2026-11-29`), a time (`2026-11-29T20:20:06Z`) or a span before now (`7d`, `12h`) as RFC 3339.
pub fn parse_since(text: &str) -> Result<String, String> {
    let shown = |t: SystemTime| humantime::format_rfc3339_seconds(t).to_string();
    let day = format!("{text}T00:00:00Z");
    if let Ok(at) = humantime::parse_rfc3339_weak(text).or_else(|_| humantime::parse_rfc3339(&day)) {
        return Ok(shown(at));
    }
    let span: Duration = humantime::parse_duration(text).map_err(|_| {
        format!("`{text}` is neither a date (2026-11-29), a time (2026-11-29T20:20:06Z) nor a span (7d)")
    })?;
    let at = SystemTime::now().checked_sub(span).filter(|at| *at >= SystemTime::UNIX_EPOCH);
    at.map(shown).ok_or_else(|| format!("`{text}` is before 1970, and so before every record"))
}

#[cfg(test)]
mod tests {
    use super::super::walk::Catalogue;
    use super::*;

    fn rows() -> Vec<Row> {
        Catalogue::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples")).rows
    }

    fn names(query: &Query, rows: &[Row]) -> Vec<String> {
        query.pick(rows).rows.iter().map(|r| r.title()).collect()
    }

    #[test]
    fn settings_columns_and_verdicts_pick_rows() {
        let rows = rows();
        let with = |text: &str| Query { conditions: vec![Condition::parse(text).unwrap()], ..Query::default() };
        let split = names(&with("dispatch=split"), &rows);
        assert!(split.contains(&"split: parts vs whole".to_string()));
        assert_eq!(split, names(&with("reader.dispatch=split"), &rows));
        assert!(names(&with("experiment=split"), &rows).contains(&"split: parts vs whole".to_string()));
        assert_eq!(names(&with("drive_count=4"), &rows), ["demo-ladder: rung4"]);
        let by_plan = names(&with("plan=mirror.plan.json"), &rows);
        assert!(by_plan.contains(&"mirror: mirror vs one-home".to_string()), "a path by its last part: {by_plan:?}");
        assert!(by_plan.len() < rows.len());
        assert!(names(&with("queue_depth=9999"), &rows).is_empty());
        let better = Query { verdicts: vec![Verdict::Better], ..Query::default() };
        assert!(names(&better, &rows).iter().all(|t| !t.starts_with("aa")));
        assert!(names(&Query { emulated: Some(false), ..Query::default() }, &rows).is_empty());
    }

    #[test]
    fn a_typo_suggests_the_key() {
        let e = Condition::parse("queue_dpth=4").unwrap_err();
        assert!(e.contains("did you mean `queue_depth`?"), "{e}");
        assert!(Condition::parse("verdct=better").unwrap_err().contains("`verdict`"));
        assert!(Condition::parse("zzzzzzzzzzzzzzzzz=1").unwrap_err().contains("one of kind"));
        assert!(Condition::parse("queue_depth").unwrap_err().contains("key=value"));
    }

    #[test]
    fn best_and_worst_rank_pairs_and_other_kinds_only_when_asked() {
        let rows = rows();
        let best = Query { ranked: Some((Rank::Best, 2)), ..Query::default() };
        let worst = Query { ranked: Some((Rank::Worst, 99)), ..Query::default() };
        let effect = |q: &Query| q.pick(&rows).rows.iter().map(|r| r.effect.unwrap().ratio).collect::<Vec<_>>();
        assert_eq!(effect(&best).len(), 2);
        assert!(effect(&best).windows(2).all(|w| w[0] >= w[1]));
        assert!(effect(&worst).windows(2).all(|w| w[0] <= w[1]));
        assert!(worst.pick(&rows).rows.iter().all(|r| r.kind == Kind::Comparison));
        let rungs = Query { kinds: vec![Kind::Rung], ..worst };
        assert_eq!(rungs.pick(&rows).rows.len(), 3, "the first rung has no effect");
    }

    #[test]
    fn since_takes_dates_times_and_spans() {
        assert_eq!(parse_since("2026-11-29").unwrap(), "2026-11-29T00:00:00Z");
        assert_eq!(parse_since("2026-11-29T20:20:06Z").unwrap(), "2026-11-29T20:20:06Z");
        assert!(parse_since("7d").unwrap().as_str() > "2000");
        assert!(parse_since("soon").unwrap_err().contains("soon"));
        assert!(parse_since("100y").unwrap_err().contains("before 1970"));
        let mut rows = rows();
        rows[0].when.clear();
        let picked = Query { since: Some("2020-01-01T00:00:00Z".into()), ..Query::default() };
        assert!(picked.pick(&rows).undated >= 1);
    }
}
