//! The two public per-read formats: `t_us,barrier,layer,expert,src,dur_ns[,prio[,target_barrier,part,offset,len]]` and
//! `t_us,dur_ns,barrier,source,prio,bytes,layer,expert`. Their two public readers disagree on what `t_us` is and on
//! which barrier a prefetch belongs to; both readings can be asked for.
//!
//! The file is read three times: where barriers begin; which experts were split; the reads themselves. Memory grows
//! with barriers and split experts, not with reads.

use super::per_read_row::{Raw, RawRead, RawRows};
use super::{Begun, DriveCodes, ImportReport, begin, finish, read_writer};
use crate::ids::{ExpertId, LayerId};
use crate::replay::ReplayError;
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};
use crate::trace::log::TraceError;
use crate::trace::stream::Skipped;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// What the column `t_us` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeIs {
    /// When the read was issued.
    Issue,
    /// When it was complete.
    Completion,
}

/// Which barrier a prefetch belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchBarrier {
    /// The one that needs it: `target_barrier`, else the next one of its layer.
    Target,
    /// The one in which it was issued.
    Issued,
}

/// How to read a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerReadOptions {
    /// What `t_us` is.
    pub time: TimeIs,
    /// Where prefetches belong.
    pub prefetch: PrefetchBarrier,
    /// Bytes of a read whose row has no length.
    pub default_bytes: Option<u64>,
    /// Leave out rows with faults.
    pub lenient: bool,
}

impl Default for PerReadOptions {
    fn default() -> Self {
        let (time, prefetch) = (TimeIs::Completion, PrefetchBarrier::Target);
        Self { time, prefetch, default_bytes: None, lenient: false }
    }
}

/// Barriers of a file, ascending.
#[derive(Default)]
struct Begins {
    list: Vec<Begun>,
    at: HashMap<u64, usize>,
    by_layer: HashMap<u16, Vec<usize>>,
    without_marker: u64,
    late_markers: u64,
}

struct Importer<'a> {
    path: &'a Path,
    options: PerReadOptions,
    codes: DriveCodes,
    skipped: Skipped,
    /// Lines that the first pass found fault with; the others pass over them.
    faulty: BTreeSet<u64>,
}

/// More lines with faults than this, and it is no file of this format.
const MAX_FAULTY: usize = 1 << 20;

/// Turns the file at `path` into a trace folder `out`.
pub fn import(path: &Path, out: &Path, options: PerReadOptions) -> Result<ImportReport, ReplayError> {
    begin(out)?;
    let mut importer =
        Importer { path, options, codes: DriveCodes::default(), skipped: Skipped::default(), faulty: BTreeSet::new() };
    let begins = importer.begins()?;
    let mut parts = Parts::new(RawRows::open(path)?.layout.part.is_some());
    importer.each(|raw, _| {
        let target = options.belongs_to(&raw, &begins);
        parts.add(&raw, target);
        Ok(())
    })?;
    let mut writer = read_writer(out)?;
    let (mut reads, mut orphans, mut unknown_bytes) = (0u64, 0u64, 0u64);
    let layout = importer.each(|raw, fault| {
        let (from_ns, to_ns) = options.times(&raw).ok_or_else(|| fault(TIMES.into()))?;
        let target = options.belongs_to(&raw, &begins);
        let needs = target.and_then(|b| begins.at.get(&b)).map(|i| begins.list[*i]);
        let issuer = begins.at.get(&raw.barrier).map(|i| begins.list[*i]);
        let (part, parts) = parts.of(&raw, target);
        let outcome = match (raw.purpose, needs) {
            (Purpose::Demand, _) => Outcome::Demand,
            (_, None) => Outcome::Wasted,
            (_, Some(begun)) if to_ns > begun.open_ns => Outcome::Late,
            _ => Outcome::Useful,
        };
        orphans += u64::from(needs.is_none());
        unknown_bytes += u64::from(raw.len.is_none());
        let event = ReadEvent {
            step: issuer.or(needs).map_or(0, |b| b.step),
            layer: LayerId(raw.layer),
            expert: ExpertId(raw.expert),
            drive: raw.drive,
            replica: 0,
            part,
            parts,
            offset: raw.offset,
            bytes: raw.len.or(options.default_bytes).unwrap_or(0),
            purpose: raw.purpose,
            issued_in: raw.barrier,
            barrier: needs.map(|b| b.barrier),
            queued_ns: from_ns,
            submitted_ns: from_ns,
            completed_ns: to_ns,
            result: ReadResult::Ok,
            outcome,
        };
        reads += 1;
        writer.push(&event)
    })?;
    writer.finish()?;
    let mut said = options.assumptions();
    let mut counted = |count: u64, text: &str| {
        if count > 0 {
            said.push(format!("{count} {text}"));
        }
    };
    counted(begins.without_marker, "barriers have no marker row: each opens with its first demand read");
    counted(
        begins.late_markers,
        "barriers have a demand read that began over 1 us before the marker: they open with it",
    );
    counted(orphans, "prefetches belong to no barrier of the file: nobody waited for them");
    match options.default_bytes {
        Some(bytes) => {
            counted(unknown_bytes, &format!("reads have no length: taken as {bytes} bytes (--expert-bytes)"))
        }
        None => counted(unknown_bytes, "reads have no length: 0 bytes are written, so rates and bounds are unknown"),
    }
    if options.prefetch == PrefetchBarrier::Target && layout.target.is_none() {
        said.push("no column `target_barrier`: a prefetch belongs to the next barrier of its layer".into());
    }
    let Importer { codes, skipped, .. } = importer;
    finish(out, "per-read", &[path.to_path_buf()], &codes, &begins.list, said, (reads, skipped))
}

const TIMES: &str = "begins before the trace does, or ends beyond 64 bits of nanoseconds (is --time right?)";

impl PerReadOptions {
    /// Begin and end of a read, or `None` when they do not fit.
    fn times(&self, raw: &RawRead) -> Option<(u64, u64)> {
        match self.time {
            TimeIs::Completion => Some((raw.t_ns.checked_sub(raw.dur_ns)?, raw.t_ns)),
            TimeIs::Issue => Some((raw.t_ns, raw.t_ns.checked_add(raw.dur_ns)?)),
        }
    }

    fn belongs_to(&self, raw: &RawRead, begins: &Begins) -> Option<u64> {
        if raw.purpose == Purpose::Demand || self.prefetch == PrefetchBarrier::Issued {
            return Some(raw.barrier);
        }
        if raw.target.is_some() {
            return raw.target;
        }
        let of_layer = begins.by_layer.get(&raw.layer)?;
        let next = of_layer.partition_point(|i| begins.list[*i].barrier < raw.barrier);
        of_layer.get(next).map(|i| begins.list[*i].barrier)
    }

    fn assumptions(&self) -> Vec<String> {
        vec![
            match self.time {
                TimeIs::Completion => "t_us is when a read was complete: it began dur_ns before (--time completion)",
                TimeIs::Issue => "t_us is when a read was issued: it was complete dur_ns later (--time issue)",
            }
            .into(),
            match self.prefetch {
                PrefetchBarrier::Target => {
                    "a prefetch belongs to the barrier that needs it (--prefetch-barrier target)"
                }
                PrefetchBarrier::Issued => {
                    "a prefetch belongs to the barrier it was issued in (--prefetch-barrier issued)"
                }
            }
            .into(),
            "reads that were complete before their barrier opened made nobody wait".into(),
            "queueing and hand-over are one moment, so all of a read's time counts as service".into(),
            "compute waits from open to the last arrival, and each barrier closes then".into(),
            "all passes are decode passes; a pass begins where the layer does not rise; rows per pass are unknown (0)"
                .into(),
            "which copy served is unknown (replica 0)".into(),
        ]
    }
}

impl Importer<'_> {
    /// Runs over all reads. `f` gets a read and a way to say what is wrong with its row.
    fn each(
        &mut self,
        mut f: impl FnMut(RawRead, &dyn Fn(String) -> TraceError) -> Result<(), TraceError>,
    ) -> Result<super::per_read_row::Layout, ReplayError> {
        let mut rows = RawRows::open(self.path)?;
        loop {
            let next = rows.next_raw(&mut self.codes);
            // the number stays that of the last line at the end
            if !matches!(next, Ok(None)) && self.faulty.contains(&rows.line()) {
                continue;
            }
            let done = match next {
                Ok(None) => return Ok(rows.layout),
                Ok(Some(Raw::Marker(..))) => Ok(()),
                Ok(Some(Raw::Read(raw))) => f(raw, &|reason| rows.fault(reason)),
                Err(e) => Err(e),
            };
            self.skipped.pass(done, self.options.lenient)?;
        }
    }

    /// Where each barrier begins: at its marker, or at its first demand read if that began before, or if there is no
    /// marker.
    fn begins(&mut self) -> Result<Begins, ReplayError> {
        let mut rows = RawRows::open(self.path)?;
        // layer, marker, first demand read
        let mut seen: HashMap<u64, (u16, Option<u64>, Option<u64>)> = HashMap::new();
        loop {
            let raw = match rows.next_raw(&mut self.codes) {
                Ok(None) => break,
                Ok(Some(raw)) => Ok(raw),
                Err(e) => Err(e),
            };
            let noted = raw.and_then(|raw| match raw {
                Raw::Marker(barrier, layer, t_ns) => {
                    let entry = seen.entry(barrier).or_insert((layer, None, None));
                    if let Some(first) = entry.1 {
                        return Err(rows.fault(format!("barrier {barrier} began already, at {first} ns")));
                    }
                    *entry = (layer, Some(t_ns), entry.2);
                    Ok(())
                }
                Raw::Read(raw) if raw.purpose == Purpose::Demand => {
                    let (from_ns, _) = self.options.times(&raw).ok_or_else(|| rows.fault(TIMES.into()))?;
                    let entry = seen.entry(raw.barrier).or_insert((raw.layer, None, None));
                    if entry.0 != raw.layer {
                        let (barrier, layer) = (raw.barrier, entry.0);
                        return Err(rows.fault(format!("barrier {barrier} is of layer {layer}, not {}", raw.layer)));
                    }
                    entry.2 = Some(entry.2.map_or(from_ns, |first| first.min(from_ns)));
                    Ok(())
                }
                Raw::Read(_) => Ok(()),
            });
            if self.skipped.pass(noted, self.options.lenient)?.is_none() {
                self.faulty.insert(rows.line());
                if self.faulty.len() > MAX_FAULTY {
                    let reason = format!("the {MAX_FAULTY}th line with a fault: is it a file of this format?");
                    return Err(ReplayError::Input(rows.fault(reason).to_string()));
                }
            }
        }
        Begins::new(seen, &rows)
    }
}

impl Begins {
    fn new(seen: HashMap<u64, (u16, Option<u64>, Option<u64>)>, rows: &RawRows) -> Result<Self, ReplayError> {
        let mut sorted: Vec<_> = seen.into_iter().collect();
        sorted.sort_unstable_by_key(|(barrier, _)| *barrier);
        let mut out = Self::default();
        for (barrier, (layer, marker, demand)) in sorted {
            let last = out.list.last().copied();
            let open_ns = match (marker, demand) {
                (Some(m), Some(d)) => {
                    out.late_markers += u64::from(m.saturating_sub(d) > 1000);
                    m.min(d)
                }
                (Some(open), None) => open,
                (None, open) => {
                    out.without_marker += 1;
                    open.unwrap_or(0)
                }
            };
            // times are whole microseconds, so that two barriers may seem to overlap by one
            let open_ns = match last {
                Some(last) if last.open_ns > open_ns.saturating_add(1000) => {
                    let reason = format!("barrier {barrier} opens before barrier {}: time goes back", last.barrier);
                    return Err(rows.fault(reason).into());
                }
                Some(last) => open_ns.max(last.open_ns),
                None => open_ns,
            };
            let step = match last {
                Some(last) => last.step + u64::from(layer <= last.layer.0),
                None => 0,
            };
            out.at.insert(barrier, out.list.len());
            out.by_layer.entry(layer).or_default().push(out.list.len());
            out.list.push(Begun { barrier, step, layer: LayerId(layer), open_ns });
        }
        Ok(out)
    }
}

/// Split experts: the distinct parts of an expert in a barrier, by number where the file has numbers, else by offset.
struct Parts {
    numbered: bool,
    keys: HashMap<(u64, u16), (u64, Vec<u64>)>,
}

impl Parts {
    fn new(numbered: bool) -> Self {
        Self { numbered, keys: HashMap::new() }
    }

    fn key(&self, raw: &RawRead) -> u64 {
        if self.numbered { u64::from(raw.part) } else { raw.offset }
    }

    fn add(&mut self, raw: &RawRead, target: Option<u64>) {
        let (Some(target), key) = (target, self.key(raw)) else { return };
        // a numbered file needs no entry for experts that are whole
        if self.numbered && key == 0 {
            return;
        }
        let first = if self.numbered { 0 } else { key };
        let (first, others) = self.keys.entry((target, raw.expert)).or_insert((first, Vec::new()));
        if *first != key && !others.contains(&key) {
            others.push(key);
            others.sort_unstable();
        }
    }

    /// Part and number of parts.
    fn of(&self, raw: &RawRead, target: Option<u64>) -> (u8, u8) {
        let Some((first, others)) = target.and_then(|t| self.keys.get(&(t, raw.expert))) else { return (0, 1) };
        let key = self.key(raw);
        let below = others.iter().chain([first]).filter(|k| **k < key).count();
        (below.min(254) as u8, (others.len() + 1).min(255) as u8)
    }
}
