//! What went wrong with drives in a run, on purpose or not, and what the reader did about it: data of a record, from the reader's
//! counters.

use crate::reader::{DriveCounters, DriveEvent, Happened, ReaderCounters};
use serde::{Deserialize, Serialize};

/// How what must be said beside every figure of a run with faults on purpose begins.
pub const FAULTS_LABEL: &str = "INJECTED FAULTS: reads failed on purpose, no figure is a normal result";

/// A fault that reads met on purpose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InjectedRecord {
    /// The drive.
    pub drive: String,
    /// The fault, as in drives.toml.
    pub fault: String,
    /// Reads that met it.
    pub reads: u64,
}

/// Something that happened to a drive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventRecord {
    /// The drive.
    pub drive: String,
    /// What.
    pub happened: Happened,
    /// In which pass, from 0.
    pub step: u64,
    /// In which barrier, from 0.
    pub barrier: u64,
    /// Nanoseconds of the run's clock.
    pub at_ns: u64,
    /// For how long it had been so: since the first read that failed was asked for, since it was degraded, or since it slowed.
    pub after_ns: u64,
}

/// Trouble with drives.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TroubleRecord {
    /// Faults on purpose; empty = none was asked for.
    pub injected: Vec<InjectedRecord>,
    /// Reads that failed, came short or with wrong bytes, or did not come within the read timeout.
    pub reads_failed: u64,
    /// Reads repeated on another drive for it.
    pub reads_moved: u64,
    /// Experts read elsewhere because a drive was degraded.
    pub experts_steered: u64,
    /// Barriers that closed while one was.
    pub barriers_degraded: u64,
    /// By barrier the longest time from asking for a read to its failure, summed: what failures have cost at most.
    pub failing_wait_ns: u64,
    /// Reads that asked degraded drives whether they are back.
    pub probes: u64,
    /// Bytes of these.
    pub probe_bytes: u64,
    /// What happened to drives, in order.
    pub events: Vec<EventRecord>,
    /// Events beyond those that are kept.
    pub events_lost: u64,
}

impl TroubleRecord {
    /// Of a run; `None` if there was none, and none was asked for.
    pub fn of(counters: &ReaderCounters) -> Option<Self> {
        let sum = |value: fn(&DriveCounters) -> u64| counters.drives.iter().map(value).sum();
        let name = |e: &DriveEvent| counters.drives.get(e.drive.index()).map_or_else(String::new, |d| d.name.clone());
        let event = |e: &DriveEvent| EventRecord {
            drive: name(e),
            happened: e.happened,
            step: e.step,
            barrier: e.barrier,
            at_ns: e.at_ns,
            after_ns: e.after_ns,
        };
        let injected = counters.drives.iter().flat_map(|d| {
            let rules = d.faults.iter().flat_map(|f| &f.injected);
            rules.map(|(rule, reads)| InjectedRecord { drive: d.name.clone(), fault: rule.to_string(), reads: *reads })
        });
        let record = Self {
            injected: injected.collect(),
            reads_failed: sum(|d| d.errors + d.timeouts),
            reads_moved: counters.failovers,
            experts_steered: counters.steered,
            barriers_degraded: counters.barriers_degraded,
            failing_wait_ns: counters.failing_wait_ns,
            probes: sum(|d| d.probes.reads),
            probe_bytes: sum(|d| d.probes.bytes),
            events: counters.drive_events.iter().map(event).collect(),
            events_lost: counters.drive_events_lost,
        };
        (record != Self::default()).then_some(record)
    }

    /// Reads failed on purpose, or were to.
    pub fn is_injected(&self) -> bool {
        !self.injected.is_empty()
    }
}
