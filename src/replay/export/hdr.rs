//! Completion latency (clat) of every drive as an HDR interval log, the exchange format of HdrHistogram's tools: one
//! histogram (V2, deflated) per drive and interval, tagged with the drive's name. Values are nanoseconds.

use crate::replay::ReplayError;
use crate::trace::events::{ReadEvent, ReadResult};
use crate::trace::log::TraceDrive;
use crate::trace::stream::{Growing, Stream};
use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};
use std::collections::BTreeMap;
use std::time::Duration;

/// Intervals that stay open behind the latest, because reads are not strictly in the order of their ends.
const OPEN_INTERVALS: u64 = 4;
/// The log gives the largest value of an interval in milliseconds.
const NS_PER_MS: f64 = 1e6;

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Exported {
    /// Successful reads.
    pub reads: u64,
    /// Histograms.
    pub intervals: u64,
}

/// Writes the successful reads of `reads` to `out`, in intervals of `interval_ns` by completion time. A read that comes
/// after its interval was written gets a second entry of the same interval, so that none is lost.
pub fn export(
    reads: &mut Stream<ReadEvent>,
    drives: &[TraceDrive],
    interval_ns: u64,
    out: &mut Growing,
) -> Result<Exported, ReplayError> {
    if interval_ns == 0 {
        return Err(ReplayError::Input("--interval: an interval of 0 holds nothing".into()));
    }
    let tags = tags(drives);
    let fail = |what: String| ReplayError::Input(format!("HDR log: {what}"));
    let mut serializer = V2DeflateSerializer::new();
    let mut builder = IntervalLogWriterBuilder::new();
    builder.add_comment("clat (submitted to completed) of each drive, in nanoseconds; times since the run's start");
    for drive in drives.iter().filter(|d| d.emulated) {
        builder
            .add_comment(&format!("drive {} is emulated: no speed of hardware", drive.name.replace(['\n', '\r'], " ")));
    }
    builder.with_max_value_divisor(NS_PER_MS);
    let mut log = builder.begin_log_with(out, &mut serializer).map_err(|e| fail(e.to_string()))?;
    let mut open: BTreeMap<(u64, usize), Histogram<u64>> = BTreeMap::new();
    let (mut done, mut latest) = (Exported::default(), 0);
    loop {
        let read = reads.next_value()?;
        let keep_from = match &read {
            Some(read) if read.result == ReadResult::Ok => {
                let interval = read.completed_ns / interval_ns;
                let histogram = match open.entry((interval, read.drive.index())) {
                    std::collections::btree_map::Entry::Occupied(e) => e.into_mut(),
                    std::collections::btree_map::Entry::Vacant(e) => {
                        e.insert(Histogram::new(3).map_err(|e| fail(e.to_string()))?)
                    }
                };
                let clat_ns = read.completed_ns - read.submitted_ns;
                histogram.record(clat_ns).map_err(|e| fail(e.to_string()))?;
                done.reads += 1;
                latest = latest.max(interval);
                latest.saturating_sub(OPEN_INTERVALS)
            }
            Some(_) => continue,
            None => u64::MAX,
        };
        while let Some(entry) = open.first_entry().filter(|e| e.key().0 < keep_from) {
            let ((interval, drive), histogram) = entry.remove_entry();
            let start = Duration::from_nanos(interval.saturating_mul(interval_ns));
            let tag = tags.get(drive).and_then(|t| Tag::new(t));
            log.write_histogram(&histogram, start, Duration::from_nanos(interval_ns), tag)
                .map_err(|e| fail(format!("{e:?}")))?;
            done.intervals += 1;
        }
        if read.is_none() {
            return Ok(done);
        }
    }
}

/// Names as the format allows them: no comma, blank or line end; distinct.
fn tags(drives: &[TraceDrive]) -> Vec<String> {
    let clean = |name: &str| name.chars().map(|c| if c == ',' || c.is_whitespace() { '_' } else { c }).collect();
    let mut tags: Vec<String> = Vec::with_capacity(drives.len());
    for drive in drives {
        let name: String = clean(&drive.name);
        tags.push(if tags.contains(&name) { format!("{name}_{}", drive.id.0) } else { name });
    }
    tags
}
