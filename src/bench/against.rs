//! Ladders of others to lay beside one's own: the published ones that ship with the program, a file of the same columns, or the
//! `ladder.json` of another run. Only shapes are compared (multiples of the first rung): machines and models differ.

use super::ladder::record::{LadderRecord, MAX_BYTES};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Most ladders of one file.
const MAX_LADDERS: usize = 64;
/// Most drives of a ladder.
const MAX_DRIVES: u32 = 64;
/// What ships with the program (see results/reference/README.md for where it comes from).
const PUBLISHED: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/results/reference/published-ladders.csv"));
/// The name that stands for it on the command line.
pub const PUBLISHED_NAME: &str = "published";
const COLUMNS: [&str; 5] = ["model", "workload", "drives", "steady_or_headline_tok_s", "source_date"];

/// Another ladder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OtherLadder {
    /// Model, workload and date, or the file.
    pub name: String,
    /// Some drive of it was emulated.
    pub emulated: bool,
    /// Drives and decode tokens per second, fewest drives first; at least two.
    pub rungs: Vec<(u32, f64)>,
}

impl OtherLadder {
    /// Speed with `drives` drives as a multiple of its first rung's.
    pub fn gain(&self, drives: u32) -> Option<f64> {
        let first = self.rungs.first()?.1;
        self.rungs.iter().find(|r| r.0 == drives).map(|r| r.1 / first)
    }
}

/// Why there is nothing to compare with.
#[derive(Debug, thiserror::Error)]
#[error("--against {}: {reason}", path.display())]
pub struct AgainstError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong, and what to do.
    pub reason: String,
}

/// The ladders of `path`; [`PUBLISHED_NAME`] stands for those that ship with the program.
pub fn load(path: &Path) -> Result<Vec<OtherLadder>, AgainstError> {
    let fail = |reason: String| AgainstError { path: path.to_path_buf(), reason };
    if path.as_os_str() == PUBLISHED_NAME {
        return parse_csv(PUBLISHED).map_err(fail);
    }
    let meta = std::fs::metadata(path).map_err(|e| fail(e.to_string()))?;
    if meta.len() > MAX_BYTES {
        return Err(fail(format!("{} bytes; a ladder has at most {MAX_BYTES}", meta.len())));
    }
    let text = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    if !text.trim_start().starts_with('{') {
        return parse_csv(&text).map_err(fail);
    }
    let record = LadderRecord::parse(&text).map_err(fail)?;
    if let Some(reason) = record.rejected.first() {
        return Err(fail(format!("that ladder was rejected ({reason}); compare with one that counts")));
    }
    let rungs = record.ladder().map(|r| (r.drives.len() as u32, r.rates.decode_tok_s)).collect();
    let name = path.display().to_string();
    finished(vec![OtherLadder { name, emulated: record.emulated, rungs }]).map_err(fail)
}

fn parse_csv(text: &str) -> Result<Vec<OtherLadder>, String> {
    let mut reader = csv::ReaderBuilder::new().flexible(false).from_reader(text.as_bytes());
    let header = reader.headers().map_err(|e| e.to_string())?.clone();
    let mut at = [0usize; COLUMNS.len()];
    for (place, name) in at.iter_mut().zip(COLUMNS) {
        let found = header.iter().position(|c| c.trim() == name);
        *place = found.ok_or_else(|| format!("has no column `{name}`; needed are {}", COLUMNS.join(", ")))?;
    }
    let mut out: Vec<OtherLadder> = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|e| e.to_string())?;
        let line = record.position().map_or(0, csv::Position::line);
        let field = |n: usize| record.get(at[n]).unwrap_or("").trim();
        let drives = field(2).parse::<u32>().ok().filter(|n| (1..=MAX_DRIVES).contains(n));
        let drives = drives.ok_or_else(|| format!("line {line}: drives: `{}` is not 1 to {MAX_DRIVES}", field(2)))?;
        let speed = field(3).parse::<f64>().ok().filter(|s| s.is_finite() && *s > 0.0);
        let speed = speed.ok_or_else(|| format!("line {line}: `{}` is no number of tokens per second", field(3)))?;
        let name = format!("{}, {}, {}", field(0), field(1), field(4));
        match out.iter().position(|l| l.name == name) {
            Some(known) if out[known].rungs.iter().any(|r| r.0 == drives) => {
                return Err(format!("line {line}: `{name}` has a rung with {drives} drives already"));
            }
            Some(known) => out[known].rungs.push((drives, speed)),
            None if out.len() == MAX_LADDERS => return Err(format!("more than {MAX_LADDERS} ladders")),
            None => out.push(OtherLadder { name, emulated: false, rungs: vec![(drives, speed)] }),
        }
    }
    finished(out)
}

/// Sorts rungs, and leaves out what has no second one.
fn finished(mut ladders: Vec<OtherLadder>) -> Result<Vec<OtherLadder>, String> {
    ladders.iter_mut().for_each(|l| l.rungs.sort_by_key(|r| r.0));
    ladders.retain(|l| l.rungs.len() > 1 && l.rungs.iter().all(|r| r.1.is_finite() && r.1 > 0.0));
    if ladders.is_empty() {
        return Err("has no ladder of two rungs or more; there is no shape to compare".into());
    }
    Ok(ladders)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_ladders_are_there_with_their_figures() {
        let all = load(Path::new(PUBLISHED_NAME)).unwrap();
        let k3 = all.iter().find(|l| l.name == "Kimi K3, 17-token public prompt, 2026-09-08").unwrap();
        assert_eq!(k3.rungs, [(1, 0.55), (2, 0.75), (3, 0.89), (4, 0.96)]);
        assert!((k3.gain(4).unwrap() - 0.96 / 0.55).abs() < 1e-12 && k3.gain(5).is_none());
        let glm = all.iter().find(|l| l.name.starts_with("GLM-5.3")).unwrap();
        assert!((glm.gain(4).unwrap() - 3.70 / 2.02).abs() < 1e-12);
        assert_eq!(all.len(), 6, "what has one rung (an engine with one drive) is left out");
    }

    #[test]
    fn files_that_are_no_ladders_say_why() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l.csv");
        let good = "model,workload,drives,steady_or_headline_tok_s,source_date\nm,w,2,3.0,d\nm,w,1,2.0,d\n";
        std::fs::write(&path, good).unwrap();
        assert_eq!(load(&path).unwrap()[0].rungs, [(1, 2.0), (2, 3.0)]);
        for (from, to, word) in [
            ("drives", "disks", "no column `drives`"),
            ("w,1,2.0", "w,0,2.0", "line 3: drives"),
            ("w,1,2.0", "w,1,NaN", "no number of tokens"),
            ("w,1,2.0", "w,2,2.0", "already"),
            ("w,1,2.0", "x,1,2.0", "two rungs"),
            ("w,1,2.0,d", "w,1,2.0", "2 fields"),
            (good, "", "no column"),
            (good, "{\"version\": 99}", "newer argodrive"),
            (good, "{\"version\": 1}", "no ladder.json"),
        ] {
            std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
            let message = load(&path).unwrap_err().to_string();
            let word = if word == "2 fields" { "fields" } else { word };
            assert!(message.contains(word) && message.contains("l.csv"), "{from} -> {to}: {message}");
        }
        assert!(load(Path::new("/nowhere/l.csv")).unwrap_err().to_string().contains("/nowhere/l.csv"));
    }
}
