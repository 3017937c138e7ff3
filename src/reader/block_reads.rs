//! Blocks of one file read into a few buffers, each by several reads at once, in an engine of their own. Knows offsets; what a
//! block holds, and which is read next, is decided by those who have one: the streamed trunk and the KV tier.
//!
//! Everything is allocated when it is made; a block allocates nothing unless its reads fail.

use super::engines::{EngineSpec, make_engine};
use super::options::{ReaderError, ReaderOptions};
use crate::clock::Clock;
use crate::io::paced::PacedDrive;
use crate::io::{Completion, IoEngine, ReadOutcome, ReadRequest, Signal, Slab, Slot};
use crate::source::SourceError;
use crate::sys::direct::{DioAlignment, open_direct};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Smaller reads are not worth a place in the queue.
const LEAST_READ_BYTES: u64 = 256 * 1024;
/// Reads are cut at multiples of this.
pub(super) const CUT: u64 = 4096;
/// Buffers: one block is used while the next is read.
const BUFFERS: u32 = 2;

/// What the blocks are of, for messages.
#[derive(Clone, Copy)]
pub(super) struct Wording {
    /// Who has them.
    pub(super) of: &'static str,
    /// What to do about a file that ends early.
    pub(super) cut_short: &'static str,
    /// What to do about a drive that fails; FOLDER stands for the file's folder.
    pub(super) failed: &'static str,
}

/// Reads blocks of a file.
pub(super) struct BlockReads {
    path: PathBuf,
    wording: Wording,
    engine: Box<dyn IoEngine>,
    slab: Slab,
    /// Blocks begun so far, in the upper half of tags: what comes of one that was given up counts for no other.
    begun: u64,
    batch: Vec<ReadRequest>,
    done: Vec<Completion>,
    timeout: Duration,
}

/// A block on its way.
pub(super) struct Pending {
    begun: u64,
    left: usize,
    failed: Option<(usize, ReadOutcome)>,
    /// When it was decided to read it.
    pub(super) queued_ns: u64,
}

/// Bytes of a read: a block of `largest` bytes has one for each place in the queue, because an engine that hands reads on only when
/// it is called then has them all at once.
pub(super) fn read_bytes(largest: u64, queue_depth: u32) -> u64 {
    let most = largest.div_ceil(u64::from(queue_depth)).max(LEAST_READ_BYTES).next_multiple_of(CUT);
    most.min(u64::from(u32::MAX) / CUT * CUT)
}

impl BlockReads {
    /// Starts an engine on `file`, as `options` say for experts; a block has up to `requests` reads and `largest` bytes.
    pub(super) fn start(
        (path, file): (&Path, File),
        wording: Wording,
        (largest, requests): (u64, usize),
        pace: Option<Arc<PacedDrive>>,
        options: &ReaderOptions,
        clock: Clock,
    ) -> Result<Self, ReaderError> {
        let slab = Slab::new(BUFFERS, largest.max(1), Arc::new(Signal::default()))?;
        let spec = EngineSpec {
            files: vec![file],
            slab: &slab,
            depth: options.queue_depth,
            requests: requests as u32,
            pace,
            faults: None, // those of drives are for experts
            signal: Arc::new(Signal::default()),
        };
        let engine = make_engine(options, clock, spec)?;
        Ok(Self {
            path: path.to_path_buf(),
            wording,
            engine,
            slab,
            begun: 0,
            batch: Vec::with_capacity(requests),
            done: Vec::with_capacity(requests),
            timeout: Duration::from_millis(options.read_timeout_ms),
        })
    }

    /// A free buffer.
    pub(super) fn buffer(&self) -> Option<Slot> {
        self.slab.take()
    }

    /// Whether the pace is emulated.
    pub(super) fn is_emulated(&self) -> bool {
        self.engine.capabilities().emulated
    }

    /// The kernel's numbers of the threads that read.
    pub(super) fn threads(&self) -> Vec<u32> {
        self.engine.counters().threads()
    }

    /// From now on `engine` reads, and is waited for so long.
    #[cfg(test)]
    pub(super) fn swap_engine(&mut self, engine: Box<dyn IoEngine>, timeout: Duration) {
        (self.engine, self.timeout) = (engine, timeout);
    }

    /// Begins to read a block of these offsets and bytes into a free buffer.
    pub(super) fn begin(
        &mut self,
        reads: impl ExactSizeIterator<Item = (u64, u32)>,
        queued_ns: u64,
    ) -> Result<Pending, SourceError> {
        let left = reads.len();
        let mut rest = self.slab.take();
        if rest.is_none() || left == 0 {
            return Err(SourceError::Unknown(format!("no buffer is free for a block of {}", self.wording.of)));
        }
        self.begun += 1;
        for (index, (offset, len)) in reads.enumerate() {
            let Some(mut slot) = rest.take() else { break };
            rest = slot.split_off(len as usize);
            let tag = self.begun << 32 | index as u64;
            self.batch.push(ReadRequest { tag, file: 0, offset, len, need: len, slot });
        }
        drop(rest); // what the block does not fill
        self.engine.submit(&mut self.batch);
        Ok(Pending { begun: self.begun, left, failed: None, queued_ns })
    }

    /// Waits for a block. `read_at` says where its reads were; `seen` is told of each that ended.
    pub(super) fn finish(
        &mut self,
        mut pending: Pending,
        read_at: impl Fn(usize) -> (u64, u32),
        mut seen: impl FnMut(usize, &Completion),
    ) -> Result<Slot, SourceError> {
        let mut whole = None;
        let mut deadline = Instant::now() + self.timeout;
        while pending.left > 0 {
            if !self.batch.is_empty() {
                self.engine.submit(&mut self.batch);
            }
            if self.engine.reap(1, deadline, &mut self.done) == 0 {
                return Err(SourceError::Timeout(format!(
                    "{}: {} reads of the block of {} at offset {} were not done in {:?}, and no drive has another copy of it; a \
                     longer --read-timeout waits longer",
                    self.path.display(),
                    pending.left,
                    self.wording.of,
                    read_at(0).0,
                    self.timeout
                )));
            }
            deadline = Instant::now() + self.timeout;
            for completion in self.done.drain(..) {
                if completion.tag >> 32 != pending.begun {
                    continue; // of a block that was given up
                }
                let index = (completion.tag & u64::from(u32::MAX)) as usize;
                seen(index, &completion);
                pending.left -= 1;
                match completion.outcome {
                    ReadOutcome::Done { .. } => {}
                    outcome => pending.failed = Some((index, outcome)),
                }
                if pending.left == 0 {
                    // the only handle that is left of the buffer
                    whole = completion.slot.widen().ok();
                }
            }
        }
        let of = self.wording.of;
        if let Some((index, outcome)) = pending.failed {
            let (offset, len) = read_at(index);
            return Err(SourceError::Read(format!(
                "{}: {len} bytes at offset {offset} of {of}: {}",
                self.path.display(),
                self.why(outcome)
            )));
        }
        whole.ok_or_else(|| SourceError::Unknown(format!("a buffer of {of} is still in use")))
    }

    fn why(&self, outcome: ReadOutcome) -> String {
        match outcome {
            ReadOutcome::Failed { errno } => {
                let folder = self.path.parent().unwrap_or(&self.path).display().to_string();
                let todo = self.wording.failed.replace("FOLDER", &folder);
                format!("{}; {todo}", std::io::Error::from_raw_os_error(errno))
            }
            ReadOutcome::Short { bytes } => format!("the file ends after {bytes} of them; {}", self.wording.cut_short),
            ReadOutcome::Cancelled => "cancelled".into(),
            ReadOutcome::Done { .. } => "done".into(),
        }
    }
}

/// Opens a file past the page cache where that is asked for, else, or where a fallback is allowed, through it.
pub(super) fn open_one(path: &Path, options: &ReaderOptions) -> std::io::Result<(File, Option<DioAlignment>)> {
    if options.direct {
        match open_direct(path) {
            Ok(direct) => return Ok((direct.file, Some(direct.alignment))),
            Err(e) if e.kind() == ErrorKind::Unsupported && options.allow_buffered => {}
            Err(e) if e.kind() == ErrorKind::Unsupported => {
                let hint = "use another file system, or allow reads through the page cache with --allow-fallback";
                return Err(std::io::Error::new(ErrorKind::Unsupported, format!("{e}; {hint}")));
            }
            Err(e) => return Err(e),
        }
    }
    Ok((File::open(path)?, None))
}

/// Bytes that offsets must be multiples of, if blocks cannot have that.
pub(super) fn too_coarse(alignment: Option<DioAlignment>) -> Option<u64> {
    let step = alignment.map_or(1, |a| u64::from(a.offset_bytes.max(a.memory_bytes)));
    (!CUT.is_multiple_of(step)).then_some(step)
}
