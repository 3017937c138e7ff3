//! A prefetch table from traces: walks the tokens of each trace in order and counts which experts follow which. Takes
//! `routes.csv` where a trace has it; older traces say which experts a pass of one row read, and what was not read from a
//! drive is missing there, so passes with such gaps are left out. One pass is in memory at a time.

use super::ReplayError;
use super::join::Joiner;
use crate::ids::{ExpertId, LayerId};
use crate::reader::predict::table::{MAX_SUCCESSORS, Table, TableBuilder};
use crate::trace::events::ReadResult;
use crate::trace::log::{TraceHeader, read_header};
use crate::trace::routes::routes;
use crate::trace::stream::{self, Skipped};
use std::path::{Path, PathBuf};

/// Most choices of one pass.
const MAX_PASS_CHOICES: usize = 16 << 20;

/// How to learn.
#[derive(Clone, Debug)]
pub struct LearnOptions {
    /// Layers ahead.
    pub depth: usize,
    /// Followers kept for each expert.
    pub successors: usize,
    /// Leave out rows with faults.
    pub lenient: bool,
    /// The model, for traces that do not name theirs; others must agree.
    pub model_id: Option<String>,
}

/// What was learnt.
#[derive(Clone, Debug)]
pub struct Learnt {
    /// The table.
    pub table: Table,
    /// Tokens counted.
    pub tokens: u64,
    /// Tokens left out because a layer of theirs is missing.
    pub incomplete: u64,
    /// Traces without `routes.csv`, whose reads stood in.
    pub from_reads: Vec<PathBuf>,
    /// Rows left out.
    pub skipped: Skipped,
}

/// Learns a table from the trace folders.
pub fn learn(folders: &[PathBuf], options: &LearnOptions) -> Result<Learnt, ReplayError> {
    if !(1..=MAX_SUCCESSORS).contains(&options.successors) {
        return Err(ReplayError::Input(format!(
            "{} successors are not within 1 to {MAX_SUCCESSORS}",
            options.successors
        )));
    }
    let mut model: Option<(String, &Path)> = None;
    let mut walk = Walk::new(options.depth);
    let (mut from_reads, mut skipped) = (Vec::new(), Skipped::default());
    for folder in folders {
        let header = read_header(folder)?;
        let id = model_of(folder, &header, options)?;
        match &model {
            Some((other, first)) if *other != id => {
                return Err(ReplayError::Input(format!(
                    "{} is a trace of model {id}, {} one of {other}; a table is about one model",
                    folder.display(),
                    first.display()
                )));
            }
            _ => model = Some((id, folder)),
        }
        walk.begin_trace();
        match routes(folder, &header, options.lenient)? {
            Some(mut rows) => {
                while let Some(r) = rows.next_value()? {
                    if r.kept == 1 && !walk.push(r.step, r.pos, r.layer, r.expert)? {
                        return Err(rows.fault(format!("a pass with over {MAX_PASS_CHOICES} choices")).into());
                    }
                }
                skipped.merge(rows.skipped());
            }
            None => {
                skipped.merge(&walk_reads(folder, &header, options.lenient, &mut walk)?);
                from_reads.push(folder.clone());
            }
        }
        walk.end_pass()?;
    }
    let Some((model_id, _)) = model else {
        return Err(ReplayError::Input("no trace is given".into()));
    };
    let (tokens, incomplete) = (walk.tokens, walk.incomplete);
    let builder = walk.builder.filter(|_| tokens > 0).ok_or_else(|| {
        ReplayError::Input("the traces hold no token with all of its layers: there is nothing to learn from".into())
    })?;
    let table = builder.finish(&model_id, options.successors);
    Ok(Learnt { table, tokens, incomplete, from_reads, skipped })
}

fn model_of(folder: &Path, header: &TraceHeader, options: &LearnOptions) -> Result<String, ReplayError> {
    match (&header.model_id, &options.model_id) {
        (Some(seen), Some(expected)) if seen != expected => Err(ReplayError::Input(format!(
            "{} is a trace of model {seen}, the store holds {expected}",
            folder.display()
        ))),
        (Some(id), _) | (None, Some(id)) => Ok(id.clone()),
        (None, None) => {
            Err(ReplayError::Input(format!("{} does not say which model was run; name its --store", folder.display())))
        }
    }
}

/// Passes of one row, from what their barriers read.
fn walk_reads(folder: &Path, header: &TraceHeader, lenient: bool, walk: &mut Walk) -> Result<Skipped, ReplayError> {
    let count = header.drives.len();
    let (reads, barriers) = (stream::reads(folder, count, lenient)?, stream::barriers(folder, count, lenient)?);
    let mut joiner = Joiner::new(reads, barriers, lenient);
    let (mut reads, mut ids) = (Vec::new(), Vec::new());
    while let Some(b) = joiner.next_barrier(&mut reads, &mut |_| {})? {
        ids.clear();
        ids.extend(reads.iter().filter(|r| r.result == ReadResult::Ok && r.layer == b.layer).map(|r| r.expert));
        ids.sort_unstable();
        ids.dedup();
        if b.rows == 1 && ids.len() == b.width as usize {
            for &expert in &ids {
                walk.push(b.step, b.pos, b.layer, expert)?;
            }
        }
    }
    Ok(joiner.skipped())
}

/// The tokens of a trace, one after the other.
struct Walk {
    depth: usize,
    builder: Option<TableBuilder>,
    /// Layers with experts, as the first pass shows them.
    layers: Vec<LayerId>,
    step: u64,
    pass: Vec<(u64, LayerId, ExpertId)>,
    /// By layer: what the token before this one, at that position, went to.
    before: (Option<u64>, Vec<Vec<ExpertId>>),
    picks: Vec<Vec<ExpertId>>,
    tokens: u64,
    incomplete: u64,
}

impl Walk {
    fn new(depth: usize) -> Self {
        Self {
            depth,
            builder: None,
            layers: Vec::new(),
            step: 0,
            pass: Vec::new(),
            before: (None, Vec::new()),
            picks: Vec::new(),
            tokens: 0,
            incomplete: 0,
        }
    }

    fn begin_trace(&mut self) {
        self.before.0 = None;
    }

    /// Adds a choice; passes come one after the other. `false` = the pass is too large.
    fn push(&mut self, step: u64, pos: u64, layer: LayerId, expert: ExpertId) -> Result<bool, ReplayError> {
        if step != self.step {
            self.end_pass()?;
            self.step = step;
        }
        if self.pass.len() >= MAX_PASS_CHOICES {
            return Ok(false);
        }
        self.pass.push((pos, layer, expert));
        Ok(true)
    }

    /// Counts the pass that has been gathered.
    fn end_pass(&mut self) -> Result<(), ReplayError> {
        let mut pass = std::mem::take(&mut self.pass);
        pass.sort_unstable();
        pass.dedup();
        if self.builder.is_none() && !pass.is_empty() {
            self.layers = pass.iter().map(|c| c.1).collect();
            self.layers.sort_unstable();
            self.layers.dedup();
            self.builder = Some(TableBuilder::new(&self.layers, self.depth)?);
            self.before.1 = vec![Vec::new(); self.layers.len()];
            self.picks = vec![Vec::new(); self.layers.len()];
        }
        for token in pass.chunk_by(|a, b| a.0 == b.0) {
            self.token(token)?;
        }
        pass.clear();
        self.pass = pass;
        Ok(())
    }

    /// Counts one token: its choices in ascending order of layer.
    fn token(&mut self, choices: &[(u64, LayerId, ExpertId)]) -> Result<(), ReplayError> {
        let Some(builder) = &mut self.builder else { return Ok(()) };
        self.picks.iter_mut().for_each(Vec::clear);
        let mut strange = false;
        for (_, layer, expert) in choices {
            match self.layers.binary_search(layer) {
                Ok(at) => self.picks[at].push(*expert),
                Err(_) => strange = true,
            }
        }
        if strange || self.picks.iter().any(Vec::is_empty) {
            self.incomplete += 1;
            self.before.0 = None;
            return Ok(());
        }
        self.tokens += 1;
        let (pos, count) = (choices[0].0, self.layers.len());
        let follows = pos > 0 && self.before.0 == Some(pos - 1);
        for ahead in 1..=self.depth.min(count) {
            for at in 0..count {
                let target = at + ahead;
                if target < count {
                    builder.add(at, ahead, &self.picks[at], &self.picks[target])?;
                } else if follows {
                    builder.add(at, ahead, &self.before.1[at], &self.picks[target - count])?;
                }
            }
        }
        std::mem::swap(&mut self.before.1, &mut self.picks);
        self.before.0 = Some(pos);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(choices: &[(u64, u64, u16, u16)]) -> (Walk, String) {
        let mut walk = Walk::new(1);
        walk.begin_trace();
        for &(step, pos, layer, expert) in choices {
            assert!(walk.push(step, pos, LayerId(layer), ExpertId(expert)).unwrap());
        }
        walk.end_pass().unwrap();
        let table = walk.builder.take().unwrap().finish("m", 8);
        let dir = tempfile::tempdir().unwrap();
        crate::reader::predict::table_file::write(&dir.path().join("t"), &table).unwrap();
        let text = std::fs::read_to_string(dir.path().join("t")).unwrap();
        (walk, text.lines().skip(2).collect::<Vec<_>>().join("\n"))
    }

    #[test]
    fn rows_of_a_pass_are_tokens_of_their_own_and_follow_each_other() {
        // a pass of two rows, layer by layer as a run writes it, then one row
        let (walk, rows) =
            table(&[(0, 0, 1, 5), (0, 1, 1, 6), (0, 0, 2, 7), (0, 1, 2, 8), (1, 2, 1, 5), (1, 2, 1, 6), (1, 2, 2, 7)]);
        assert_eq!((walk.tokens, walk.incomplete), (3, 0));
        assert_eq!(rows, "1,1,5,2,7:2\n1,1,6,2,7:1 8:1\n2,1,7,1,6:1\n2,1,8,1,5:1 6:1");
    }

    #[test]
    fn a_token_without_all_layers_is_left_out_and_breaks_the_chain() {
        let (walk, rows) =
            table(&[(0, 0, 1, 0), (0, 0, 2, 1), (1, 1, 1, 0), (2, 2, 1, 3), (2, 2, 2, 4), (3, 9, 1, 0), (3, 9, 2, 1)]);
        assert_eq!((walk.tokens, walk.incomplete), (3, 1));
        assert_eq!(rows, "1,1,0,2,1:2\n1,1,3,1,4:1", "nothing leads from one token to the next");
    }
}
