//! `routes.csv` of a trace folder: which experts the router chose for every row, in memory of a fixed size during the run
//! and as rows afterwards. A trace may be without it (older ones are, and those of other programs).

use super::header::columns;
use super::log::{Column, TraceError, TraceHeader};
use super::stream::{self, RowWriter, Stream};
use crate::ids::{ExpertId, LayerId};
use crate::source::Phase;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// One row for each expert that a row of a pass was sent to.
pub const ROUTES_FILE: &str = "routes.csv";

/// Columns of `routes.csv` and their meaning.
pub const ROUTE_COLUMNS: [(&str, &str); 7] = [
    ("step", "forward pass, from 0"),
    ("phase", "prefill, decode or verify"),
    ("pos", "position of the row in the text; texts of a prompt set lie behind each other"),
    ("layer", "the layer, from 0"),
    ("expert", "an expert that the row was sent to; rows stand in order of choice, the best first"),
    ("weight", "what its output is multiplied by"),
    ("kept", "1; 0 = the row was a proposal that was not kept"),
];

/// One choice of a router. Field names and their order are the columns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteRow {
    /// Forward pass.
    pub step: u64,
    /// What the pass was for.
    pub phase: Phase,
    /// Position of the row in the text.
    pub pos: u64,
    /// The layer.
    pub layer: LayerId,
    /// The expert.
    pub expert: ExpertId,
    /// Its weight.
    pub weight: f32,
    /// 0 for a proposed row that was not kept.
    pub kept: u8,
}

/// Choices of a run, in memory of a fixed size.
#[derive(Debug, Default)]
pub struct RouteBuffer {
    rows: Vec<RouteRow>,
    capacity: usize,
    lost: u64,
}

impl RouteBuffer {
    /// An empty buffer; its memory is taken now.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { rows: Vec::with_capacity(capacity), capacity, lost: 0 }
    }

    /// Keeps a choice, or counts it as lost.
    pub fn push(&mut self, row: RouteRow) {
        if self.rows.len() < self.capacity { self.rows.push(row) } else { self.lost += 1 }
    }

    /// Of pass `step`, the last one, the rows from position `pos` on were proposals that are not kept.
    pub fn reject(&mut self, step: u64, pos: u64) {
        let of_pass = self.rows.iter_mut().rev().take_while(|r| r.step == step);
        of_pass.filter(|r| r.pos >= pos).for_each(|r| r.kept = 0);
    }

    /// The choices, in the order in which they were made: by pass, layer, row.
    pub fn rows(&self) -> &[RouteRow] {
        &self.rows
    }

    /// An error when anything was lost: such a run is rejected.
    pub fn check_complete(&self) -> Result<(), TraceError> {
        match self.lost {
            0 => Ok(()),
            lost => Err(TraceError::LostRoutes { lost, capacity: self.capacity }),
        }
    }
}

/// Writes `routes.csv` into `folder` (made if it is missing) and returns the columns for `trace.json`. An incomplete buffer
/// is refused.
pub fn write(folder: &Path, buffer: &RouteBuffer) -> Result<Vec<Column>, TraceError> {
    buffer.check_complete()?;
    std::fs::create_dir_all(folder).map_err(|source| TraceError::Io { path: folder.to_path_buf(), source })?;
    let mut out = RowWriter::create(&folder.join(ROUTES_FILE), &ROUTE_COLUMNS)?;
    buffer.rows().iter().try_for_each(|row| out.push(row))?;
    out.finish()?;
    Ok(columns(&ROUTE_COLUMNS))
}

/// The rows of `routes.csv` (or of its Parquet form) in `folder`; `None` when `header` says that there is none. Passes must
/// ascend.
pub fn routes(folder: &Path, header: &TraceHeader, lenient: bool) -> Result<Option<Stream<RouteRow>>, TraceError> {
    if header.routes.is_empty() { Ok(None) } else { stream::routes(folder, lenient).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::super::log;
    use super::*;

    fn route(step: u64, expert: u16, weight: f32) -> RouteRow {
        RouteRow { step, phase: Phase::Decode, pos: 7, layer: LayerId(1), expert: ExpertId(expert), weight, kept: 1 }
    }

    fn folder(rows: &[RouteRow]) -> (tempfile::TempDir, TraceHeader) {
        let dir = tempfile::tempdir().unwrap();
        let mut buffer = RouteBuffer::with_capacity(rows.len());
        rows.iter().for_each(|r| buffer.push(*r));
        let header = TraceHeader { routes: write(dir.path(), &buffer).unwrap(), ..TraceHeader::new(vec![]) };
        log::write(dir.path(), &header, &log::TraceBuffer::default()).unwrap();
        let header = log::read_header(dir.path()).unwrap();
        (dir, header)
    }

    fn all(folder: &Path, header: &TraceHeader) -> Result<Vec<RouteRow>, TraceError> {
        let mut stream = routes(folder, header, false)?.unwrap();
        let mut out = Vec::new();
        while let Some(row) = stream.next_value()? {
            out.push(row);
        }
        Ok(out)
    }

    #[test]
    fn choices_survive_the_round_trip_to_the_last_bit() {
        let rows = [route(0, 3, 0.1 + 0.2), route(0, 9, 1.0e-9), route(2, 3, f32::MIN_POSITIVE), route(2, 0, 2.5)];
        let (dir, header) = folder(&rows);
        assert_eq!(all(dir.path(), &header).unwrap(), rows);
        let text = std::fs::read_to_string(dir.path().join(ROUTES_FILE)).unwrap();
        assert!(text.starts_with("step,phase,pos,layer,expert,weight,kept\n0,decode,7,1,3,0.3"), "{text}");
        assert_eq!(header.routes.len(), 7);
    }

    #[test]
    fn rejected_rows_of_the_last_pass_are_marked() {
        let at = |step, pos| RouteRow { pos, ..route(step, 1, 1.0) };
        let mut buffer = RouteBuffer::with_capacity(8);
        [at(1, 9), at(2, 7), at(2, 8), at(2, 9), at(2, 7), at(2, 8), at(2, 9)].into_iter().for_each(|r| buffer.push(r));
        buffer.reject(2, 8);
        let kept: Vec<u8> = buffer.rows().iter().map(|r| r.kept).collect();
        assert_eq!(kept, [1, 1, 0, 0, 1, 0, 0]);
    }

    #[test]
    fn a_trace_without_routes_says_so() {
        let dir = tempfile::tempdir().unwrap();
        assert!(routes(dir.path(), &TraceHeader::new(vec![]), false).unwrap().is_none());
    }

    #[test]
    fn a_full_buffer_counts_what_it_lost_and_cannot_be_written() {
        let mut buffer = RouteBuffer::with_capacity(1);
        (0..4).for_each(|i| buffer.push(route(i, 0, 1.0)));
        let dir = tempfile::tempdir().unwrap();
        let message = write(dir.path(), &buffer).unwrap_err().to_string();
        assert!(message.contains("3 routes"), "{message}");
        assert_eq!((buffer.rows().len(), std::fs::read_dir(dir.path()).unwrap().count()), (1, 0));
    }

    #[test]
    fn bad_rows_are_named_by_line_and_column() {
        let (dir, header) = folder(&[route(1, 3, 0.5), route(2, 4, 0.25)]);
        let path = dir.path().join(ROUTES_FILE);
        let good = std::fs::read_to_string(&path).unwrap();
        for (from, to, word) in [
            ("0.25", "NaN", ":3: column 6"),
            ("0.25", "inf", ":3: column 6"),
            ("0.25,1", "0.25,2", ":3: column 7"),
            ("2,decode", "0,decode", ":3: column 1"),
            ("2,decode", "2,dream", ":3: column 2"),
            (",4,", ",70000,", ":3: column 5"),
            ("expert", "export", ":1"),
            (",1\n", "", ":2"),
        ] {
            std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
            let message = all(dir.path(), &header).unwrap_err().to_string();
            assert!(message.contains(ROUTES_FILE) && message.contains(word), "{from} -> {to}: {message}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(routes(dir.path(), &header, false).is_err(), "promised, but gone");
    }
}
