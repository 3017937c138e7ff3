//! The text that `blkparse` prints: one event of the block layer per line,
//! `dev cpu seq seconds pid action rwbs sector + sectors [process]`. A read is queued at Q, handed over at D and
//! complete at C, matched by device and first sector.

use super::{DriveCodes, ImportReport, UNKNOWN_ID, begin, finish, read_writer};
use crate::ids::{ExpertId, LayerId};
use crate::replay::ReplayError;
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};
use crate::trace::rows::{Lines, parse_scaled, parse_whole, shown};
use crate::trace::stream::Skipped;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Bytes of a sector, whatever the device's own size.
const SECTOR_BYTES: u64 = 512;
/// Reads under way at once; a trace without completions must not fill the memory.
const MAX_OPEN: usize = 1 << 20;
/// Names of the fields, for errors.
const FIELDS: [&str; 10] = ["device", "cpu", "sequence", "seconds", "pid", "action", "rwbs", "sector", "+", "sectors"];

#[derive(Clone, Copy)]
struct Event {
    t_ns: u64,
    action: u8,
    sector: u64,
    sectors: u64,
    failed: bool,
}

#[derive(Clone, Copy, Default)]
struct Pending {
    queued_ns: Option<u64>,
    submitted_ns: Option<u64>,
    sectors: u64,
}

/// Turns the text at `path` into a trace folder `out`.
pub fn import(path: &Path, out: &Path, lenient: bool) -> Result<ImportReport, ReplayError> {
    begin(out)?;
    let mut lines = Lines::open(path)?;
    let (mut codes, mut skipped) = (DriveCodes::default(), Skipped::default());
    let mut open: HashMap<(u8, u64), Pending> = HashMap::new();
    let mut writer = read_writer(out)?;
    let (mut reads, mut no_queue, mut unmatched, mut events) = (0u64, 0u64, 0u64, 0u64);
    loop {
        let parsed = match lines.next_line() {
            Ok(None) => break,
            Ok(Some(line)) => {
                // the summary at the end begins with a line such as `CPU0 (8,0):`
                if line.starts_with(b"CPU") || line.starts_with(b"Total (") {
                    break;
                }
                parse(line).map_err(|(field, reason)| lines.error(field, name(field), reason))
            }
            Err(e) => Err(e),
        };
        let Some(Some((device, event))) = skipped.pass(parsed, lenient)? else { continue };
        events += 1;
        let Some(drive) = codes.id(device.as_bytes()) else {
            let fault = lines.error(1, "device", format!("more than {} devices", super::MAX_DRIVES));
            skipped.pass::<()>(Err(fault), lenient)?;
            continue;
        };
        let key = (drive.0, event.sector);
        match event.action {
            b'Q' | b'D' => {
                if open.len() >= MAX_OPEN && !open.contains_key(&key) {
                    let reason = format!("{MAX_OPEN} reads are under way: are the completions (C) missing?");
                    return Err(lines.error(0, "", reason).into());
                }
                let pending = open.entry(key).or_default();
                if event.action == b'Q' {
                    *pending = Pending { queued_ns: Some(event.t_ns), ..Pending::default() };
                } else {
                    (pending.submitted_ns, pending.sectors) = (Some(event.t_ns), event.sectors);
                }
            }
            _ => {
                let Some(pending) = open.remove(&key) else {
                    unmatched += 1;
                    continue;
                };
                let Some(submitted_ns) = pending.submitted_ns else {
                    unmatched += 1;
                    continue;
                };
                let queued_ns = pending.queued_ns.unwrap_or(submitted_ns).min(submitted_ns);
                no_queue += u64::from(pending.queued_ns.is_none());
                let short = event.sectors < pending.sectors;
                let bytes = event.sectors.checked_mul(SECTOR_BYTES).zip(event.sector.checked_mul(SECTOR_BYTES));
                let Some((bytes, offset)) = bytes.filter(|_| event.t_ns >= submitted_ns) else {
                    let reason = "ends before its hand-over, or lies beyond 64 bits of bytes";
                    skipped.pass::<()>(Err(lines.error(0, "", reason.into())), lenient)?;
                    continue;
                };
                reads += 1;
                writer.push(&ReadEvent {
                    step: 0,
                    layer: LayerId(UNKNOWN_ID),
                    expert: ExpertId(UNKNOWN_ID),
                    drive,
                    replica: 0,
                    part: 0,
                    parts: 1,
                    offset,
                    bytes,
                    purpose: Purpose::Demand,
                    issued_in: 0,
                    barrier: None,
                    queued_ns,
                    submitted_ns,
                    completed_ns: event.t_ns,
                    result: match (event.failed, short) {
                        (true, _) => ReadResult::Error,
                        (false, true) => ReadResult::Short,
                        (false, false) => ReadResult::Ok,
                    },
                    outcome: Outcome::Demand,
                })?;
            }
        }
    }
    if events == 0 {
        return Err(lines.error(0, "", "no read event of blkparse's default format in it".into()).into());
    }
    writer.finish()?;
    let mut said = vec![
        "a read is queued at Q, handed over at D and complete at C; other actions were left out".to_owned(),
        "there are no barriers, layers or experts (65535) in it; every read stands as a demand read".into(),
        "requests are the block layer's: one read of a program may be several, or part of one".into(),
    ];
    for (count, text) in [
        (no_queue, "reads have no Q of their first sector (merged, or queued before the trace): queued = handed over"),
        (unmatched, "completions have no hand-over in the trace and were left out"),
        (open.len() as u64, "reads were not complete when the trace ended and were left out"),
    ] {
        if count > 0 {
            said.push(format!("{count} {text}"));
        }
    }
    finish(out, "blkparse", &[PathBuf::from(path)], &codes, &[], said, (reads, skipped))
}

fn name(field: usize) -> &'static str {
    field.checked_sub(1).and_then(|i| FIELDS.get(i)).copied().unwrap_or("")
}

/// The event of a line; `None` for lines that are no Q, D or C of a read. Errors name the field, from 1.
fn parse(line: &[u8]) -> Result<Option<(String, Event)>, (usize, String)> {
    let fields: Vec<&[u8]> = line.split(u8::is_ascii_whitespace).filter(|f| !f.is_empty()).collect();
    if fields.is_empty() {
        return Ok(None);
    }
    if fields.len() < 6 {
        return Err((0, format!("has {} fields, an event has at least 6", fields.len())));
    }
    let bad = |i: usize, wanted: &str| (i + 1, format!("`{}` is not {wanted}", shown(fields[i])));
    let (major, minor) = match fields[0].iter().position(|b| *b == b',') {
        Some(at) => (&fields[0][..at], &fields[0][at + 1..]),
        None => return Err(bad(0, "a device such as 8,0")),
    };
    if parse_whole(major).is_none() || parse_whole(minor).is_none() {
        return Err(bad(0, "a device such as 8,0"));
    }
    for i in [1, 2, 4] {
        parse_whole(fields[i]).ok_or_else(|| bad(i, "a whole number of at least 0"))?;
    }
    let t_ns = parse_scaled(fields[3], 9).ok_or_else(|| bad(3, "a time in seconds of at least 0"))?;
    if !fields[5].iter().all(u8::is_ascii_alphabetic) {
        return Err(bad(5, "an action"));
    }
    let action = match fields[5] {
        [action @ (b'Q' | b'D' | b'C')] => *action,
        _ => return Ok(None),
    };
    let Some(rwbs) = fields.get(6) else { return Err((0, "an event without its kind (rwbs)".into())) };
    // R is a read; D in front is a discard, N is no data, and a flush has no sectors
    if !rwbs.contains(&b'R') || rwbs.contains(&b'D') {
        return Ok(None);
    }
    if fields.len() < 10 || fields[8] != b"+" {
        return Err((0, "a read without `sector + sectors`".into()));
    }
    let sector = parse_whole(fields[7]).ok_or_else(|| bad(7, "a sector"))?;
    let sectors = parse_whole(fields[9]).ok_or_else(|| bad(9, "a number of sectors"))?;
    // a completion ends in its error code: [0] is none
    let failed = action == b'C' && fields.get(10).is_some_and(|code| *code != b"[0]");
    let device = String::from_utf8_lossy(fields[0]).into_owned();
    Ok(Some((device, Event { t_ns, action, sector, sectors, failed })))
}
