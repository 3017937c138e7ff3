//! `argodrive results [DIR]`: the catalogue over all records, picked, ordered, grouped, and written as a table, Markdown, CSV,
//! JSON or Parquet.

use super::super::{REJECTED, WIDTH, print, print_json, remark};
use super::table;
use crate::bench::catalogue::group::group;
use crate::bench::catalogue::query::{Condition, Key, Order, Query, Rank, parse_since};
use crate::bench::catalogue::stale::{Judgement, State, can_be_judged, inputs_named, judge};
use crate::bench::catalogue::today::Today;
use crate::bench::catalogue::walk::Catalogue;
use crate::bench::catalogue::{Kind, Row, Verdict, export};
use crate::bench::config::nearest;
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Subcommands, for whoever mistypes one and is taken to name a folder.
const COMMANDS: [&str; 6] = ["list", "compare", "bundle", "import", "plot", "parquet"];
/// Faults that are named one by one.
const MAX_FAULTS: usize = 20;

/// List everything that was measured
#[derive(Debug, clap::Args)]
#[group(skip)]
pub struct Args {
    /// The results folder, or one record
    #[arg(default_value = "results", value_name = "DIR")]
    dir: PathBuf,
    /// Only these kinds: run, rung, comparison, ceiling, trace
    #[arg(long, value_name = "KIND,...", value_delimiter = ',', value_parser = parse_kind)]
    kind: Vec<Kind>,
    /// Only models whose id begins so
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// Only these verdicts: better, worse, within-noise, not-storage-bound, too-few, unfinished, measured, rejected, put-aside
    #[arg(long, value_name = "VERDICT,...", value_delimiter = ',', value_parser = parse_verdict)]
    verdict: Vec<Verdict>,
    /// Only what did not help (worse, within noise, not storage-bound, rejected), each with its words
    #[arg(long, conflicts_with = "verdict")]
    negative: bool,
    /// Only what was begun since a date (2026-11-29), a time or a span before now (7d)
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    since: Option<String>,
    /// Only where a setting or column has this value (`queue_depth=4`, `drive_count=2`); all of several
    #[arg(long = "where", value_name = "KEY=VALUE", value_parser = Condition::parse)]
    conditions: Vec<Condition>,
    /// Only emulated drives
    #[arg(long, conflicts_with = "real")]
    emulated: bool,
    /// Only real drives
    #[arg(long)]
    real: bool,
    /// Runs of ladders and campaigns too, which their rows stand for otherwise
    #[arg(long)]
    runs: bool,
    /// date (newest first), effect (largest first) or tok_s (fastest first)
    #[arg(long, value_name = "BY", default_value = "date", value_parser = parse_order)]
    sort: Order,
    /// The N largest effects
    #[arg(long, value_name = "N", conflicts_with_all = ["worst", "sort"])]
    best: Option<usize>,
    /// The N smallest effects
    #[arg(long, value_name = "N", conflicts_with = "sort")]
    worst: Option<usize>,
    /// Count, median and range by settings or columns
    #[arg(long, value_name = "KEY,...", value_delimiter = ',', value_parser = Key::named, conflicts_with_all = ["stale", "best", "worst", "sort"])]
    group_by: Vec<Key>,
    /// Only what was measured with other inputs than today's (all inputs, or those after `=`), and the command that measures
    /// again; what a record does not hold is unknown
    #[arg(long, value_name = "INPUT,...", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    stale: Option<String>,
    /// table, markdown, csv, json or parquet; default: by the name of --out, else table
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Write to this file, whole or not at all
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Exit 1 if a record had to be left out, or with --stale if one is stale
    #[arg(long)]
    strict: bool,
    /// Leave out records of other versions too, instead of stopping
    #[arg(long)]
    lenient: bool,
}

/// A form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Table,
    Markdown,
    Csv,
    Json,
    Parquet,
}

const FORMATS: [(&str, &str, Format); 5] = [
    ("table", "txt", Format::Table),
    ("markdown", "md", Format::Markdown),
    ("csv", "csv", Format::Csv),
    ("json", "json", Format::Json),
    ("parquet", "parquet", Format::Parquet),
];

/// The one of `known` called `text`, or an error that suggests one.
fn choose<T: Copy>(text: &str, known: &[(&str, T)]) -> Result<T, String> {
    let names: Vec<&str> = known.iter().map(|k| k.0).collect();
    known.iter().find(|k| k.0 == text).map(|k| k.1).ok_or_else(|| {
        let hint = nearest(text, &names).map(|n| format!("did you mean `{n}`?"));
        hint.unwrap_or_else(|| format!("there are {}", names.join(", ")))
    })
}

fn parse_kind(text: &str) -> Result<Kind, String> {
    choose(text, &Kind::ALL.map(|k| (k.name(), k)))
}

fn parse_verdict(text: &str) -> Result<Verdict, String> {
    choose(text, &Verdict::ALL.map(|v| (v.name(), v)))
}

fn parse_order(text: &str) -> Result<Order, String> {
    choose(text, &[("date", Order::Date), ("effect", Order::Effect), ("tok_s", Order::TokS)])
}

fn parse_format(text: &str) -> Result<Format, String> {
    choose(text, &FORMATS.map(|f| (f.0, f.2)))
}

impl Args {
    fn query(&self) -> Query {
        let negative = Verdict::ALL.into_iter().filter(|v| self.negative && v.is_negative());
        let only = [(self.emulated, true), (self.real, false)];
        let ranked = [(self.best, Rank::Best), (self.worst, Rank::Worst)];
        Query {
            kinds: self.kind.clone(),
            model: self.model.clone(),
            verdicts: self.verdict.iter().copied().chain(negative).collect(),
            since: self.since.clone(),
            conditions: self.conditions.clone(),
            emulated: only.into_iter().find(|o| o.0).map(|o| o.1),
            // whoever asks for runs by kind wants those of ladders too
            inside: self.runs || self.kind.iter().any(|k| matches!(k, Kind::Run | Kind::Trace)),
            order: self.sort,
            ranked: ranked.into_iter().find_map(|(n, rank)| Some((rank, n?))),
        }
    }

    fn format(&self) -> Result<Format> {
        if self.json {
            return Ok(Format::Json);
        }
        let ending = self.out.as_ref().and_then(|p| p.extension()).and_then(|e| e.to_str());
        let by_name = FORMATS.iter().find(|f| Some(f.1) == ending).map(|f| f.2);
        let format = self.format.or(by_name).unwrap_or(Format::Table);
        if format == Format::Parquet && self.out.is_none() {
            bail!("--format parquet: give --out FILE, a terminal cannot show it");
        }
        if format == Format::Parquet && !self.group_by.is_empty() {
            bail!("--format parquet: --group-by writes table, markdown, csv or json");
        }
        Ok(format)
    }
}

/// Reads a results folder; a record of another version stops everything before anything is shown or written.
pub(super) fn read(dir: &Path, lenient: bool) -> Result<Catalogue> {
    if !dir.exists() {
        let word = dir.to_string_lossy();
        let hint = nearest(&word, &COMMANDS).map(|c| format!("; did you mean `argodrive results {c}`?"));
        bail!(
            "{}: no such results folder{}",
            dir.display(),
            hint.unwrap_or_else(|| "; runs are recorded by `decode --assert`, `ladder`, `ab` and `experiment`".into())
        );
    }
    let all = Catalogue::read(dir);
    if let (true, true, Some(fault)) = (dir.is_file(), all.rows.is_empty(), all.faults.first()) {
        bail!("{}; give a results folder, or one record", fault.reason);
    }
    if let (Some(first), false) = (all.other_versions().next(), lenient) {
        let more = all.other_versions().count() - 1;
        let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        bail!("{}{more}; --lenient leaves such records out", first.reason);
    }
    for fault in all.faults.iter().take(MAX_FAULTS) {
        remark(&format!("left out: {}", fault.reason));
    }
    if all.faults.len() > MAX_FAULTS {
        remark(&format!("left out: {} files more", all.faults.len() - MAX_FAULTS));
    }
    Ok(all)
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    let format = args.format()?;
    let named = args.stale.as_deref().unwrap_or_default().split(',').map(str::trim).filter(|n| !n.is_empty());
    let only = inputs_named(named).map_err(anyhow::Error::msg)?;
    let all = read(&args.dir, args.lenient)?;
    let picked = args.query().pick(&all.rows);
    if picked.undated > 0 {
        remark(&format!("--since: {} rows have no date and are left out", picked.undated));
    }
    let mut bad = !all.faults.is_empty();
    if args.stale.is_some() {
        let (rows, judged) = judged(&picked.rows, &only);
        bad |= judged.iter().any(|j| j.state == State::Stale);
        show_stale(args, format, &rows, &judged, all.faults.len())?;
    } else if args.group_by.is_empty() {
        let notes = table::Notes {
            picked: &picked,
            negative: args.negative,
            ranked: args.best.is_some() || args.worst.is_some(),
            dir: &args.dir,
        };
        let rows = &picked.rows;
        let bytes = match format {
            Format::Table => (table::rows(rows).render(WIDTH) + &table::summary(&notes)).into_bytes(),
            Format::Markdown => table::markdown(rows, None).into_bytes(),
            Format::Csv => export::csv(rows, None)?,
            Format::Parquet => export::parquet(rows, None)?,
            Format::Json => json(&serde_json::json!({
                "version": export::EXPORT_VERSION, "rows": export::json(rows, None)?, "inside": picked.inside, "left_out": faults(&all),
            }))?,
        };
        write(args, &bytes)?;
    } else {
        let groups = group(&picked.rows, &args.group_by);
        let titles: Vec<&str> = args.group_by.iter().map(Key::title).collect();
        let bytes = match format {
            Format::Table => table::groups(&groups, &titles).render(WIDTH).into_bytes(),
            Format::Markdown => table::groups_markdown(&groups, &titles).into_bytes(),
            Format::Csv | Format::Parquet => export::groups_csv(&groups, &args.group_by)?,
            Format::Json => json(&serde_json::json!({
                "version": export::EXPORT_VERSION, "keys": titles, "groups": serde_json::to_value(&groups)?, "left_out": faults(&all),
            }))?,
        };
        write(args, &bytes)?;
    }
    Ok(if args.strict && bad { ExitCode::from(REJECTED) } else { ExitCode::SUCCESS })
}

fn faults(all: &Catalogue) -> Vec<serde_json::Value> {
    all.faults.iter().map(|f| serde_json::json!({"path": f.path, "reason": f.reason})).collect()
}

fn json(value: &serde_json::Value) -> Result<Vec<u8>> {
    Ok((serde_json::to_string_pretty(value)? + "\n").into_bytes())
}

/// Judges what can be judged; stale rows first, then unknown ones.
fn judged<'a>(rows: &[&'a Row], only: &BTreeSet<&'static str>) -> (Vec<&'a Row>, Vec<Judgement>) {
    let mut today = Today::default();
    let able = rows.iter().copied().filter(|r| can_be_judged(r));
    let mut all: Vec<(&Row, Judgement)> = able.map(|r| (r, judge(r, &mut today, only))).collect();
    all.sort_by_key(|(_, j)| j.state);
    all.into_iter().unzip()
}

fn show_stale(args: &Args, format: Format, rows: &[&Row], judged: &[Judgement], left_out: usize) -> Result<()> {
    let bytes = match format {
        Format::Table => table::stale(rows, judged).into_bytes(),
        Format::Markdown => table::markdown(rows, Some(judged)).into_bytes(),
        Format::Csv => export::csv(rows, Some(judged))?,
        Format::Parquet => export::parquet(rows, Some(judged))?,
        Format::Json => json(&serde_json::json!({
            "version": export::EXPORT_VERSION, "rows": export::json(rows, Some(judged))?, "left_out": left_out,
        }))?,
    };
    write(args, &bytes)
}

/// To --out, or to standard output.
fn write(args: &Args, bytes: &[u8]) -> Result<()> {
    let Some(out) = &args.out else {
        return print(String::from_utf8_lossy(bytes).trim_end());
    };
    write_atomic(out, bytes).with_context(|| format!("--out {}", out.display()))?;
    if args.json {
        return print_json(&serde_json::json!({"out": out, "bytes": bytes.len()}));
    }
    print(&out.display().to_string())
}
