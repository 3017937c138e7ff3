//! A streamed trunk: its blocks are read from the store's drive into two buffers by turns, the next while the last is used.
//! Knows offsets in one file; which weights a block holds is the decoder's. Its reads are apart from those of experts, in an
//! engine of their own, and are counted apart.
//!
//! Everything is allocated when it is made; a block allocates nothing unless its reads fail.

use super::engines::{EngineSpec, make_engine};
use super::options::{ReaderError, ReaderOptions};
use crate::clock::Clock;
use crate::ids::Extent;
use crate::io::paced::PacedDrive;
use crate::io::{Completion, IoEngine, ReadOutcome, ReadRequest, Signal, Slab, Slot};
use crate::source::{BlockCounters, BlockSource, SourceError};
use crate::sys::direct::{DioAlignment, open_direct};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Smaller reads are not worth a place in the queue.
const LEAST_READ_BYTES: u64 = 256 * 1024;
/// Reads are cut at multiples of this.
const CUT: u64 = 4096;

/// Where the blocks are.
pub struct TrunkFile<'a> {
    /// The file.
    pub path: &'a Path,
    /// By block: the parts of the file that it is made of. Offsets and lengths are multiples of 4096.
    pub parts: &'a [Vec<Extent>],
    /// The drive's pace, if it is emulated; experts on it are served by the same.
    pub pace: Option<Arc<PacedDrive>>,
}

/// Reads the blocks of a trunk.
pub struct TrunkStream {
    path: PathBuf,
    engine: Box<dyn IoEngine>,
    slab: Slab,
    /// By block, then read: offset and bytes.
    reads: Vec<Vec<(u64, u32)>>,
    /// The block that is used.
    current: Option<(usize, Slot)>,
    pending: Option<Pending>,
    /// Blocks begun so far, in the upper half of tags: what comes of one that was given up counts for no other.
    begun: u64,
    batch: Vec<ReadRequest>,
    done: Vec<Completion>,
    timeout: Duration,
    counters: BlockCounters,
}

/// A block on its way.
struct Pending {
    block: usize,
    begun: u64,
    left: usize,
    /// All of its bytes, when no read is left.
    whole: Option<Slot>,
    failed: Option<(u64, ReadOutcome)>,
}

impl TrunkStream {
    /// Opens the file and starts an engine, as `options` say for experts: with as many reads at once, past the page cache where
    /// that is asked for.
    pub fn open(trunk: &TrunkFile<'_>, options: &ReaderOptions, clock: Clock) -> Result<Self, ReaderError> {
        options.check()?;
        let fault = |reason: String| ReaderError::Drive { drive: "trunk".into(), path: trunk.path.into(), reason };
        let (file, alignment) = open_one(trunk.path, options).map_err(|e| fault(e.to_string()))?;
        let step = alignment.map_or(1, |a| u64::from(a.offset_bytes.max(a.memory_bytes)));
        if !CUT.is_multiple_of(step) {
            return Err(fault(format!(
                "direct reads there need multiples of {step} bytes, a trunk's blocks have {CUT}"
            )));
        }
        let largest = trunk.parts.iter().map(|parts| parts.iter().map(|p| p.len).sum::<u64>()).max().unwrap_or(0);
        // One read for each place in the queue: an engine that hands reads on only when it is called has them all at once.
        let most = largest.div_ceil(u64::from(options.queue_depth)).max(LEAST_READ_BYTES).next_multiple_of(CUT);
        let most = most.min(u64::from(u32::MAX) / CUT * CUT);
        let cut = |parts: &Vec<Extent>| {
            let cut_one = |p: &Extent| {
                let (offset, len) = (p.offset, p.len);
                (0..len).step_by(most as usize).map(move |at| (offset + at, most.min(len - at) as u32))
            };
            parts.iter().flat_map(cut_one).collect::<Vec<_>>()
        };
        let reads: Vec<Vec<(u64, u32)>> = trunk.parts.iter().map(cut).collect();
        let requests = reads.iter().map(Vec::len).max().unwrap_or(1).max(1);
        let signal = Arc::new(Signal::default());
        let slab = Slab::new(2, largest.max(1), Arc::new(Signal::default()))?;
        let spec = EngineSpec {
            files: vec![file],
            slab: &slab,
            depth: options.queue_depth,
            requests: requests as u32,
            pace: trunk.pace.clone(),
            faults: None, // those of drives are for experts
            signal,
        };
        let engine = make_engine(options, clock, spec)?;
        Ok(Self {
            path: trunk.path.to_path_buf(),
            engine,
            slab,
            reads,
            current: None,
            pending: None,
            begun: 0,
            batch: Vec::with_capacity(requests),
            done: Vec::with_capacity(requests),
            timeout: Duration::from_millis(options.read_timeout_ms),
            counters: BlockCounters::default(),
        })
    }

    /// Begins to read a block into a free buffer.
    fn begin(&mut self, block: usize) -> Result<(), SourceError> {
        let reads = self.reads.get(block).map_or(&[][..], Vec::as_slice);
        let mut rest = self.slab.take();
        if rest.is_none() || reads.is_empty() {
            return Err(SourceError::Unknown(format!("the trunk has no block {block}, or no buffer is free for it")));
        }
        self.begun += 1;
        for (index, &(offset, len)) in reads.iter().enumerate() {
            let Some(mut slot) = rest.take() else { break };
            rest = slot.split_off(len as usize);
            let tag = self.begun << 32 | index as u64;
            self.batch.push(ReadRequest { tag, file: 0, offset, len, need: len, slot });
        }
        self.counters.reads += reads.len() as u64;
        self.pending = Some(Pending { block, begun: self.begun, left: reads.len(), whole: None, failed: None });
        drop(rest); // what the block does not fill
        self.engine.submit(&mut self.batch);
        Ok(())
    }

    /// Waits for the block that is on its way.
    fn finish(&mut self, mut pending: Pending) -> Result<Slot, SourceError> {
        let mut deadline = Instant::now() + self.timeout;
        while pending.left > 0 {
            if !self.batch.is_empty() {
                self.engine.submit(&mut self.batch);
            }
            if self.engine.reap(1, deadline, &mut self.done) == 0 {
                return Err(SourceError::Timeout(format!(
                    "{}: {} reads of a block of the trunk were not done in {:?}",
                    self.path.display(),
                    pending.left,
                    self.timeout
                )));
            }
            deadline = Instant::now() + self.timeout;
            for completion in self.done.drain(..) {
                if completion.tag >> 32 != pending.begun {
                    continue; // of a block that was given up
                }
                pending.left -= 1;
                match completion.outcome {
                    ReadOutcome::Done { .. } => {}
                    outcome => pending.failed = Some((completion.tag, outcome)),
                }
                if pending.left == 0 {
                    // the only handle that is left of the buffer
                    pending.whole = completion.slot.widen().ok();
                }
            }
        }
        let reads = &self.reads[pending.block];
        if let Some((tag, outcome)) = pending.failed {
            let (offset, len) = reads.get((tag & u64::from(u32::MAX)) as usize).copied().unwrap_or_default();
            return Err(SourceError::Read(format!(
                "{}: {len} bytes at offset {offset} of the trunk: {}",
                self.path.display(),
                why(outcome)
            )));
        }
        self.counters.bytes += reads.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        pending.whole.ok_or_else(|| SourceError::Unknown("a buffer of the trunk is still in use".into()))
    }
}

fn why(outcome: ReadOutcome) -> String {
    match outcome {
        ReadOutcome::Failed { errno } => std::io::Error::from_raw_os_error(errno).to_string(),
        ReadOutcome::Short { bytes } => format!("the file ends after {bytes} of them; import the checkpoint again"),
        ReadOutcome::Cancelled => "cancelled".into(),
        ReadOutcome::Done { .. } => "done".into(),
    }
}

impl BlockSource for TrunkStream {
    fn block(&mut self, block: usize, next: Option<usize>) -> Result<&[u8], SourceError> {
        if let Some(pending) = self.pending.take() {
            let (begun, had) = (pending.block, self.counters.bytes);
            let whole = self.finish(pending)?;
            if begun == block {
                self.current = Some((block, whole)); // the buffer before it is free again
                self.counters.ahead += 1;
            } else {
                // a pass ended early, or another began than was said
                self.counters.unused_bytes += self.counters.bytes - had;
                self.counters.bytes = had;
            }
        }
        if self.current.as_ref().is_none_or(|(at_hand, _)| *at_hand != block) {
            self.current = None;
            self.begin(block)?;
            if let Some(pending) = self.pending.take() {
                self.current = Some((block, self.finish(pending)?));
            }
        }
        self.counters.blocks += 1;
        if let Some(next) = next.filter(|next| *next != block) {
            self.begin(next)?;
        }
        Ok(self.current.as_ref().map_or(&[], |(_, slot)| slot.bytes()))
    }

    fn counters(&self) -> BlockCounters {
        self.counters
    }

    fn threads(&self) -> Vec<u32> {
        self.engine.counters().threads()
    }

    fn settle(&mut self) {
        let had = self.counters.bytes;
        // a read that failed here was wanted by nobody
        if let Some(Ok(_)) = self.pending.take().map(|pending| self.finish(pending)) {
            self.counters.unused_bytes += self.counters.bytes - had;
            self.counters.bytes = had;
        }
    }
}

fn open_one(path: &Path, options: &ReaderOptions) -> std::io::Result<(File, Option<DioAlignment>)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(depth: u32, parts: &[Vec<Extent>], bytes: &[u8], dir: &tempfile::TempDir) -> TrunkStream {
        let path = dir.path().join("trunk.bin");
        std::fs::write(&path, bytes).unwrap();
        let options = ReaderOptions { queue_depth: depth, direct: false, ..ReaderOptions::default() };
        TrunkStream::open(&TrunkFile { path: &path, parts, pace: None }, &options, Clock::start()).unwrap()
    }

    #[test]
    fn blocks_come_whole_and_the_next_is_on_its_way() {
        let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i / 4096) as u8 ^ i as u8).collect();
        let at = |offset, len| Extent { offset, len };
        let parts = [vec![at(0, 8192), at(65_536, 1 << 20)], vec![at(8192, 4096)], vec![at(1 << 21, 700 * 1024)]];
        let expect = |block: usize| -> Vec<u8> {
            let part = |p: &Extent| bytes[p.offset as usize..(p.offset + p.len) as usize].to_vec();
            parts[block].iter().flat_map(part).collect()
        };
        let dir = tempfile::tempdir().unwrap();
        for depth in [1, 3] {
            let mut s = stream(depth, &parts, &bytes, &dir);
            for pass in 0..3 {
                for block in 0..3 {
                    let want = expect(block);
                    assert!(s.block(block, Some((block + 1) % 3)).unwrap()[..want.len()] == want, "{pass} {block}");
                }
            }
            let counted = s.counters();
            assert_eq!(
                (counted.blocks, counted.ahead, counted.unused_bytes),
                (9, 8, 0),
                "only the first had to be asked for"
            );
            let pass: u64 = parts.iter().flatten().map(|p| p.len).sum();
            assert_eq!(counted.bytes, 3 * pass, "what is on its way does not count yet");
            // another block than was said: what came is given up
            let want = expect(2);
            assert!(s.block(2, None).unwrap()[..want.len()] == want);
            assert_eq!(s.counters().unused_bytes, parts[0].iter().map(|p| p.len).sum::<u64>());
            assert!(s.block(2, None).unwrap()[..want.len()] == want, "the same again is at hand");
            let unused = s.counters().unused_bytes;
            assert!(s.block(2, Some(1)).unwrap()[..want.len()] == want);
            s.settle();
            assert_eq!(s.counters().unused_bytes, unused + 4096, "what was on its way when it ended");
        }
    }

    #[test]
    fn a_file_that_ends_early_says_where() {
        let dir = tempfile::tempdir().unwrap();
        let parts = [vec![Extent { offset: 0, len: 8192 }], vec![Extent { offset: 8192, len: 8192 }]];
        let mut s = stream(2, &parts, &[7; 12_000], &dir);
        assert_eq!(s.block(0, Some(1)).unwrap()[8191], 7);
        let e = s.block(1, None).unwrap_err().to_string();
        assert!(
            e.contains("trunk.bin") && e.contains("offset 8192") && e.contains("import the checkpoint again"),
            "{e}"
        );
        assert_eq!(s.block(0, None).unwrap()[0], 7, "the stream goes on");
        assert!(s.block(9, None).unwrap_err().to_string().contains("no block 9"));
    }
}
