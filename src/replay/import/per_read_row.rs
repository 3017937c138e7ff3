//! One row of the public per-read formats, as text: which column means what, with or without a header line.

use super::DriveCodes;
use crate::ids::DriveId;
use crate::trace::events::Purpose;
use crate::trace::log::TraceError;
use crate::trace::rows::{Lines, Row, Rows, header_of, parse_scaled};
use std::path::Path;

/// Expert number of a row that marks the begin of a barrier.
const MARKER_EXPERT: u16 = 1023;
/// Source of such a row.
const MARKER_SOURCE: &[u8] = b"read";

/// Columns by position, for files without a header line.
const WITHOUT_HEADER: [&str; 5] = [
    "t_us,barrier,layer,expert,src,dur_ns",
    "t_us,barrier,layer,expert,src,dur_ns,prio",
    "t_us,dur_ns,barrier,source,prio,bytes,layer,expert",
    "t_us,barrier,layer,expert,src,dur_ns,prio,offset,len",
    "t_us,barrier,layer,expert,src,dur_ns,prio,target_barrier,part,offset,len",
];

/// Where each column stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    t_us: usize,
    barrier: usize,
    layer: usize,
    expert: usize,
    source: usize,
    dur_ns: usize,
    prio: Option<usize>,
    /// Whether barriers are named to which prefetches belong.
    pub target: Option<usize>,
    /// Whether split reads are numbered.
    pub part: Option<usize>,
    /// Whether offsets are given.
    pub offset: Option<usize>,
    /// Whether lengths are given.
    pub len: Option<usize>,
}

impl Layout {
    fn of(names: &[String]) -> Result<Self, String> {
        let find = |wanted: &[&str]| names.iter().position(|n| wanted.contains(&n.as_str()));
        let need = |wanted: &[&str]| {
            find(wanted).ok_or_else(|| format!("no column `{}`; the header is `{}`", wanted[0], names.join(",")))
        };
        const KNOWN: [&str; 13] = [
            "t_us",
            "barrier",
            "layer",
            "expert",
            "src",
            "source",
            "dur_ns",
            "prio",
            "target_barrier",
            "part",
            "offset",
            "len",
            "bytes",
        ];
        if let Some(unknown) = names.iter().find(|n| !KNOWN.contains(&n.as_str())) {
            let unknown: String = unknown.chars().take(40).flat_map(char::escape_debug).collect();
            return Err(format!("unknown column `{unknown}`; known are {}", KNOWN.join(", ")));
        }
        if let Some(twice) = names.iter().enumerate().find(|(i, n)| names[..*i].contains(n)) {
            return Err(format!("column `{}` stands twice", twice.1));
        }
        Ok(Self {
            t_us: need(&["t_us"])?,
            barrier: need(&["barrier"])?,
            layer: need(&["layer"])?,
            expert: need(&["expert"])?,
            source: need(&["src", "source"])?,
            dur_ns: need(&["dur_ns"])?,
            prio: find(&["prio"]),
            target: find(&["target_barrier"]),
            part: find(&["part"]),
            offset: find(&["offset"]),
            len: find(&["len", "bytes"]),
        })
    }
}

/// A row as the file has it.
#[derive(Clone, Copy, Debug)]
pub struct RawRead {
    /// The time column, in nanoseconds.
    pub t_ns: u64,
    /// Barrier in which it was issued.
    pub barrier: u64,
    /// Layer of the expert.
    pub layer: u16,
    /// The expert.
    pub expert: u16,
    /// The drive.
    pub drive: DriveId,
    /// How long it took.
    pub dur_ns: u64,
    /// Demand or prefetch.
    pub purpose: Purpose,
    /// Barrier that needs it, where the file says.
    pub target: Option<u64>,
    /// Number of its part, or 0.
    pub part: u8,
    /// Offset, or 0.
    pub offset: u64,
    /// Length, where the file says.
    pub len: Option<u64>,
}

/// A row: the begin of a barrier, or a read.
#[derive(Clone, Copy, Debug)]
pub enum Raw {
    /// Barrier, layer, time in nanoseconds.
    Marker(u64, u16, u64),
    /// A read.
    Read(RawRead),
}

/// A file of such rows.
pub struct RawRows {
    rows: Rows,
    /// What its columns mean.
    pub layout: Layout,
    /// The first line, when it was data.
    first: Option<Vec<u8>>,
}

impl RawRows {
    /// Opens `path`; a first line that starts with a number is data.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let mut lines = Lines::open(path)?;
        let mut names = header_of(&mut lines)?;
        let mut first = None;
        if names.first().is_some_and(|n| parse_scaled(n.as_bytes(), 3).is_some()) {
            let known = WITHOUT_HEADER.iter().find(|h| h.split(',').count() == names.len());
            let known = known.ok_or_else(|| {
                lines.error(0, "", format!("no header, and {} columns are no known format", names.len()))
            })?;
            first = Some(names.join(",").into_bytes());
            names = known.split(',').map(str::to_owned).collect();
        }
        let layout = Layout::of(&names).map_err(|reason| lines.error(0, "", reason))?;
        Ok(Self { rows: Rows::new(lines, names), layout, first })
    }

    /// The next row.
    pub fn next_raw(&mut self, codes: &mut DriveCodes) -> Result<Option<Raw>, TraceError> {
        let layout = self.layout;
        if let Some(first) = self.first.take() {
            return parse(&self.rows.first_row(&first)?, &layout, codes).map(Some);
        }
        match self.rows.next_row()? {
            Some(row) => parse(&row, &layout, codes).map(Some),
            None => Ok(None),
        }
    }

    /// The line that was read last.
    pub fn line(&self) -> u64 {
        self.rows.lines().number()
    }

    /// A fault of the row that was read last.
    pub fn fault(&self, reason: String) -> TraceError {
        self.rows.lines().error(0, "", reason)
    }
}

fn parse(row: &Row<'_>, at: &Layout, codes: &mut DriveCodes) -> Result<Raw, TraceError> {
    let (t_ns, barrier) = (row.scaled(at.t_us, 3)?, row.u64(at.barrier)?);
    let (layer, expert, dur_ns) = (row.u16(at.layer)?, row.u16(at.expert)?, row.u64(at.dur_ns)?);
    let source = row.bytes(at.source);
    if source == MARKER_SOURCE {
        if expert != MARKER_EXPERT || dur_ns != 0 {
            let reason =
                format!("a row of source `read` marks a barrier and has expert {MARKER_EXPERT} and duration 0");
            return Err(row.error(at.source, reason));
        }
        return Ok(Raw::Marker(barrier, layer, t_ns));
    }
    if source.is_empty() {
        return Err(row.error(at.source, "no source".into()));
    }
    let purpose = match at.prio {
        Some(prio) => row.word(prio, &[("D", Purpose::Demand), ("P", Purpose::Prefetch)])?,
        None => Purpose::Demand,
    };
    let optional = |column: Option<usize>| column.map(|c| row.u64(c)).transpose();
    let drive = codes.id(source);
    Ok(Raw::Read(RawRead {
        t_ns,
        barrier,
        layer,
        expert,
        drive: drive.ok_or_else(|| row.error(at.source, format!("more than {} drives", super::MAX_DRIVES)))?,
        dur_ns,
        purpose,
        target: at.target.map(|c| row.optional_u64(c)).transpose()?.flatten(),
        part: at.part.map(|c| row.whole(c, 254)).transpose()?.unwrap_or(0) as u8,
        offset: optional(at.offset)?.unwrap_or(0),
        len: optional(at.len)?,
    }))
}
