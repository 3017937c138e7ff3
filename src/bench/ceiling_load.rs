//! The load of a ceiling: a constant number of reads in flight, barriers, or both over several drives at once, through the
//! engines that decoding uses. One thread drives all engines. Knows files and places in them, not what lies there.

use super::ceiling_files::TestFiles;
use super::ceiling_fit::Series;
use crate::clock::Clock;
use crate::io::buffered::BufferedEngine;
use crate::io::mmap::MmapEngine;
use crate::io::paced::{PacedDrive, PacedEngine};
use crate::io::psync::PsyncEngine;
use crate::io::{Completion, EngineKind, IoEngine, IoSetupError, ReadOutcome, ReadRequest, Signal, Slab, Slot};
use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest sleep between two looks at whether somebody asked to stop.
const LOOK: Duration = Duration::from_millis(100);
/// Longest wait for any read.
const SILENCE: Duration = Duration::from_secs(60);
/// A slow drive is measured until this many reads beyond twice its depth have ended...
const WANTED_READS: usize = 24;
/// ... but at most this many times as long as asked.
const MAX_STRETCH: u64 = 4;
/// Reads of a series that are kept; a longer one ends early.
const MAX_READS: usize = 2_000_000;

/// Why reading failed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Engines or buffers.
    #[error(transparent)]
    Setup(#[from] IoSetupError),
    /// A read.
    #[error("drive `{drive}`: a read of {bytes} bytes at {offset} {what}")]
    Read {
        /// The drive.
        drive: String,
        /// Its size.
        bytes: u64,
        /// Where.
        offset: u64,
        /// How it ended.
        what: String,
    },
    /// A file could not be opened once more.
    #[error("drive `{drive}`: {source}")]
    Files {
        /// The drive.
        drive: String,
        /// Why.
        source: std::io::Error,
    },
    /// There are fewer places to read from than reads in flight.
    #[error(
        "drive `{drive}`: {places} places of {bytes} bytes are too few for {reads} reads at once; raise --file-size"
    )]
    Small {
        /// The drive.
        drive: String,
        /// Places.
        places: usize,
        /// Size of each.
        bytes: u64,
        /// Reads in flight.
        reads: u32,
    },
    /// Ctrl-C.
    #[error("interrupted; nothing was left behind")]
    Interrupted,
}

/// A drive under load.
pub struct LoadDrive {
    name: String,
    files: TestFiles,
    /// Its pace, if it is emulated.
    pub pace: Option<Arc<PacedDrive>>,
    places: HashMap<u64, Places>,
}

/// Where reads of one size go next.
struct Places {
    all: Vec<(u32, u64)>,
    next: usize,
}

/// One drive's part of a load: which, how many in flight, and how many reads a barrier has on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Index of the drive.
    pub drive: usize,
    /// Reads in flight.
    pub depth: u32,
    /// Reads in a barrier.
    pub count: u32,
}

/// Drives and how they are read.
pub struct Load<'a> {
    drives: Vec<LoadDrive>,
    engine: EngineKind,
    clock: Clock,
    stop: &'a dyn Fn() -> bool,
    /// Bytes that were read in all.
    pub read_bytes: u64,
    /// Reads in all, and those that the engine's own code counted.
    pub reads: u64,
    /// See `reads`.
    pub reads_by_engine: u64,
}

struct Lane {
    drive: usize,
    depth: u32,
    count: u32,
    engine: Box<dyn IoEngine>,
    batch: Vec<ReadRequest>,
    idle: Vec<Slot>,
    in_flight: u32,
    offsets: HashMap<u64, u64>,
}

impl LoadDrive {
    /// A drive called `name` with these files.
    pub fn new(name: &str, files: TestFiles, pace: Option<Arc<PacedDrive>>) -> Self {
        Self { name: name.to_string(), files, pace, places: HashMap::new() }
    }

    fn next_place(&mut self, bytes: u64) -> (u32, u64) {
        let files = &self.files;
        let seed = bytes ^ self.name.len() as u64;
        let places = self.places.entry(bytes).or_insert_with(|| Places { all: files.places(bytes, seed), next: 0 });
        let at = places.next % places.all.len().max(1);
        places.next += 1;
        places.all.get(at).copied().unwrap_or((0, 0))
    }
}

impl<'a> Load<'a> {
    /// A load on `drives`; `stop` is asked between reads.
    pub fn new(drives: Vec<LoadDrive>, engine: EngineKind, clock: Clock, stop: &'a dyn Fn() -> bool) -> Self {
        Self { drives, engine, clock, stop, read_bytes: 0, reads: 0, reads_by_engine: 0 }
    }

    /// The drives.
    pub fn drives(&self) -> &[LoadDrive] {
        &self.drives
    }

    /// Keeps each share's depth in flight with reads of `bytes` for `time`; returns the reads of each that ended within
    /// the time in which all were at work.
    pub fn steady(&mut self, shares: &[Share], bytes: u64, time: Duration) -> Result<Vec<Series>, LoadError> {
        let mut series: Vec<Series> =
            shares.iter().map(|s| Series { bytes, depth: s.depth, reads: Vec::new() }).collect();
        let wanted: Vec<usize> = shares.iter().map(|s| 2 * s.depth as usize + WANTED_READS).collect();
        let start = self.clock.now_ns();
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let longest = start.saturating_add(time_ns.saturating_mul(MAX_STRETCH));
        let mut counts = vec![0usize; shares.len()];
        let mut end = u64::MAX;
        self.stream(shares, bytes, &mut |lane, completion, now| {
            counts[lane] += 1;
            let full = counts[lane] >= MAX_READS;
            let enough = now >= start.saturating_add(time_ns) && counts.iter().zip(&wanted).all(|(c, w)| c >= w);
            if end == u64::MAX && (full || enough || now >= longest) {
                end = now;
            }
            if completion.completed_ns <= end {
                series[lane].reads.push((completion.submitted_ns, completion.completed_ns));
            }
            end == u64::MAX
        })?;
        Ok(series)
    }

    /// The same for long: bytes of each share by windows of `window`, for `time`.
    pub fn windows(
        &mut self,
        shares: &[Share],
        bytes: u64,
        time: Duration,
        window: Duration,
        seen: &mut dyn FnMut(Duration),
    ) -> Result<Vec<Vec<u64>>, LoadError> {
        let start = self.clock.now_ns();
        let ns = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX).max(1);
        let (window_ns, time_ns) = (ns(window), ns(time));
        let count = (time_ns / window_ns).max(1) as usize;
        let mut out = vec![vec![0u64; count]; shares.len()];
        let mut shown = 0;
        self.stream(shares, bytes, &mut |lane, completion, now| {
            let at = completion.completed_ns.saturating_sub(start) / window_ns;
            if let Some(place) = out[lane].get_mut(at as usize) {
                *place += bytes;
            }
            let past = now.saturating_sub(start);
            if past / 1_000_000_000 > shown {
                shown = past / 1_000_000_000;
                seen(Duration::from_nanos(past));
            }
            past < time_ns
        })?;
        Ok(out)
    }

    /// Barriers, one after the other for `time`: each share reads its count, and the next begins when all have arrived.
    /// Returns the nanoseconds of each.
    pub fn barriers(&mut self, shares: &[Share], bytes: u64, time: Duration) -> Result<Vec<f64>, LoadError> {
        let (mut lanes, signal) = self.lanes(shares, bytes, true)?;
        let start = Instant::now();
        let mut times = Vec::new();
        let mut done = Vec::new();
        while times.len() < super::ceiling_fit::MIN_READS || start.elapsed() < time {
            let open = self.clock.now_ns();
            let mut last = open;
            for lane in &mut lanes {
                (0..lane.count).for_each(|_| self.queue(lane, bytes));
                hand_over(lane);
            }
            self.wait_all(&mut lanes, &signal, &mut done, bytes, &mut |_, completion| {
                last = last.max(completion.completed_ns);
                false
            })?;
            times.push((last - open) as f64);
        }
        self.count_work(&lanes);
        Ok(times)
    }

    /// Keeps every share busy until `each` says no.
    fn stream(
        &mut self,
        shares: &[Share],
        bytes: u64,
        each: &mut dyn FnMut(usize, &Completion, u64) -> bool,
    ) -> Result<(), LoadError> {
        let (mut lanes, signal) = self.lanes(shares, bytes, false)?;
        for lane in &mut lanes {
            (0..lane.depth).for_each(|_| self.queue(lane, bytes));
            hand_over(lane);
        }
        let clock = self.clock;
        let mut go_on = true;
        let mut done = Vec::new();
        self.wait_all(&mut lanes, &signal, &mut done, bytes, &mut |lane, completion| {
            go_on &= each(lane, completion, clock.now_ns());
            go_on
        })?;
        self.count_work(&lanes);
        Ok(())
    }

    /// Reaps until nothing is in flight; a read is followed by another while `each` says so.
    fn wait_all(
        &mut self,
        lanes: &mut [Lane],
        signal: &Signal,
        done: &mut Vec<Completion>,
        bytes: u64,
        each: &mut dyn FnMut(usize, &Completion) -> bool,
    ) -> Result<(), LoadError> {
        let mut heard = Instant::now();
        while lanes.iter().any(|l| l.in_flight > 0) {
            let seen = signal.epoch();
            let mut any = false;
            for (index, lane) in lanes.iter_mut().enumerate() {
                lane.engine.reap(0, Instant::now(), done);
                for completion in done.drain(..) {
                    any = true;
                    lane.in_flight -= 1;
                    let offset = lane.offsets.remove(&completion.tag).unwrap_or(0);
                    self.check(lane.drive, &completion, bytes, offset)?;
                    let more = each(index, &completion);
                    lane.idle.push(completion.slot);
                    if more {
                        self.queue(lane, bytes);
                    }
                }
                hand_over(lane);
            }
            if (self.stop)() {
                return Err(LoadError::Interrupted);
            }
            if any {
                heard = Instant::now();
                continue;
            }
            if heard.elapsed() > SILENCE {
                let drive = lanes.iter().find(|l| l.in_flight > 0).map_or(0, |l| l.drive);
                let drive = self.drives[drive].name.clone();
                let what = format!("did not end within {} s", SILENCE.as_secs());
                return Err(LoadError::Read { drive, bytes, offset: 0, what });
            }
            signal.wait(seen, Instant::now() + LOOK);
        }
        Ok(())
    }

    fn check(&mut self, drive: usize, completion: &Completion, bytes: u64, offset: u64) -> Result<(), LoadError> {
        let what = match completion.outcome {
            ReadOutcome::Done { bytes } => {
                self.read_bytes += u64::from(bytes);
                self.reads += 1;
                return Ok(());
            }
            ReadOutcome::Short { bytes } => format!("ended after {bytes} bytes: the file became shorter"),
            ReadOutcome::Failed { errno } => format!("failed: {}", std::io::Error::from_raw_os_error(errno)),
            ReadOutcome::Cancelled => "was given up".into(),
        };
        Err(LoadError::Read { drive: self.drives[drive].name.clone(), bytes, offset, what })
    }

    /// Puts the next read of a lane into its batch, if it has a slot.
    fn queue(&mut self, lane: &mut Lane, bytes: u64) {
        let Some(slot) = lane.idle.pop() else { return };
        let (file, offset) = self.drives[lane.drive].next_place(bytes);
        let tag = u64::from(slot.index());
        lane.offsets.insert(tag, offset);
        let len = bytes as u32; // slots are no larger, see `lanes`
        lane.batch.push(ReadRequest { tag, file, offset, len, need: len, slot });
        lane.in_flight += 1;
    }

    fn count_work(&mut self, lanes: &[Lane]) {
        let by = |l: &Lane| l.engine.counters().snapshot().work.reads_of(self.engine);
        self.reads_by_engine += lanes.iter().map(by).sum::<u64>();
    }

    fn lanes(&self, shares: &[Share], bytes: u64, barrier: bool) -> Result<(Vec<Lane>, Arc<Signal>), LoadError> {
        let signal = Arc::new(Signal::default());
        let held = |s: &Share| if barrier { s.count.max(1) } else { s.depth };
        let slots: u32 = shares.iter().map(held).sum();
        if u32::try_from(bytes).is_err() {
            return Err(IoSetupError::Option(format!("reads of {bytes} bytes are larger than 4 GiB")).into());
        }
        let slab = Slab::new(slots, bytes, Arc::default())?;
        let mut lanes = Vec::with_capacity(shares.len());
        for share in shares {
            let drive = &self.drives[share.drive];
            let reads = held(share);
            let places = drive.files.bytes() / bytes.max(1);
            if places < u64::from(reads) {
                let (drive, places) = (drive.name.clone(), places as usize);
                return Err(LoadError::Small { drive, places, bytes, reads });
            }
            let files = drive.files.again().map_err(|source| LoadError::Files { drive: drive.name.clone(), source })?;
            let engine = self.engine_of(drive, files, &slab, share.depth, reads, &signal)?;
            lanes.push(Lane {
                drive: share.drive,
                depth: share.depth,
                count: share.count,
                engine,
                batch: Vec::with_capacity(reads as usize),
                idle: (0..reads).filter_map(|_| slab.take()).collect(),
                in_flight: 0,
                offsets: HashMap::with_capacity(reads as usize),
            });
        }
        Ok((lanes, signal))
    }

    fn engine_of(
        &self,
        drive: &LoadDrive,
        files: Vec<File>,
        slab: &Slab,
        depth: u32,
        requests: u32,
        signal: &Arc<Signal>,
    ) -> Result<Box<dyn IoEngine>, IoSetupError> {
        let (kind, clock) = (self.engine, self.clock);
        let Some(pace) = &drive.pace else {
            return plain(kind, clock, files, slab, depth, requests, false, Arc::clone(signal));
        };
        let paced = PacedEngine::new(Arc::clone(pace), Arc::clone(signal), clock, |kick| {
            plain(kind, clock, files, slab, depth, requests, true, kick)
        })?;
        Ok(Box::new(paced))
    }
}

fn hand_over(lane: &mut Lane) {
    if !lane.batch.is_empty() {
        lane.engine.submit(&mut lane.batch);
    }
}

#[expect(clippy::too_many_arguments, reason = "what an engine is made of")]
fn plain(
    kind: EngineKind,
    clock: Clock,
    files: Vec<File>,
    slab: &Slab,
    depth: u32,
    requests: u32,
    shared: bool,
    signal: Arc<Signal>,
) -> Result<Box<dyn IoEngine>, IoSetupError> {
    let requests = requests.max(depth);
    Ok(match kind {
        EngineKind::Psync => Box::new(PsyncEngine::new(files, depth, requests, signal, clock)?),
        EngineKind::Mmap => Box::new(MmapEngine::new(files, depth, requests, signal, clock)?),
        EngineKind::Buffered => Box::new(BufferedEngine::new(files, depth, requests, signal, clock)?),
        #[cfg(target_os = "linux")]
        EngineKind::Uring => {
            let ring = crate::io::uring::UringOptions { sqpoll: false, shared };
            Box::new(crate::io::uring::UringEngine::new(files, slab, depth, requests, ring, signal, clock)?)
        }
        #[cfg(not(target_os = "linux"))]
        EngineKind::Uring => {
            let _ = (slab, shared);
            let reason = "io_uring is a Linux system call; use --engine psync".into();
            return Err(IoSetupError::Engine { engine: EngineKind::Uring, reason });
        }
    })
}
