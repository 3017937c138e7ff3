//! The file of the KV tier: blocks of latent rows, written when they leave memory and read back into two buffers by turns, the
//! next while the last is used. Knows blocks of one size at their places in a file; what is in them is the decoder's. Reads are
//! counted, and traced where a trace is kept; the file has no name from the moment it is open, so nothing of it outlives the run.

use super::block_reads::{BlockReads, Pending, Wording, open_one, read_bytes, too_coarse};
use super::options::{ReaderError, ReaderOptions};
use crate::clock::Clock;
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::io::paced::PacedDrive;
use crate::io::{Completion, EngineKind, ReadOutcome, Slot};
use crate::source::{BlockCounters, BlockSource, BlockStore, SourceError};
use crate::sys::cache::drop_pages;
use crate::sys::direct::{DioAlignment, open_direct_for_writing};
use crate::sys::space::free_bytes;
use crate::trace::events::{Outcome, Purpose, ReadEvent, ReadResult};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const WORDING: Wording = Wording {
    of: "the latent cache",
    cut_short: "something has cut it; leave it alone",
    failed: "no drive has another copy of it: run again with --kv-dir on another drive, from the last snapshot if there is one",
};

/// Where blocks go.
pub struct KvSpec<'a> {
    /// The folder, on any drive.
    pub folder: &'a Path,
    /// Bytes of a block: a multiple of 4096.
    pub block_bytes: u64,
    /// Bytes that the run needs there at most.
    pub needed_bytes: u64,
    /// The drive's pace, if it is emulated; experts on it are served by the same.
    pub pace: Option<Arc<PacedDrive>>,
    /// Number of the drive in a trace, and how many reads are kept for it; 0 = no trace.
    pub traced: (DriveId, usize),
}

/// What the tier's file did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvFileCounters {
    /// Blocks written.
    pub written_blocks: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Reads of blocks for attention.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Bytes of them that were read for nothing.
    pub unused_bytes: u64,
    /// Blocks whose reads began before the turn of the layer that asks for them, and those of them that it then asked for.
    pub ahead_blocks: u64,
    /// See `ahead_blocks`.
    pub ahead_used: u64,
    /// Bytes read for snapshots, apart from the others.
    pub copied_bytes: u64,
    /// Reads and writes went past the page cache.
    pub direct: bool,
    /// The pace is emulated.
    pub emulated: bool,
    /// Reads that a trace had no room for.
    pub lost_reads: u64,
}

#[derive(Default)]
struct Shared {
    counters: KvFileCounters,
    reads: Vec<ReadEvent>,
    room: usize,
}

/// What remains of the file when its owner is gone.
#[derive(Clone)]
pub struct KvHandle {
    shared: Arc<Mutex<Shared>>,
    folder: PathBuf,
}

impl KvHandle {
    /// Where the file is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it did.
    pub fn counters(&self) -> KvFileCounters {
        lock(&self.shared).counters
    }

    /// The reads that were kept for a trace, in the order in which they ended.
    pub fn take_reads(&self) -> Vec<ReadEvent> {
        let mut reads = std::mem::take(&mut lock(&self.shared).reads);
        reads.sort_by_key(|r| r.completed_ns);
        reads
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps blocks in a file.
pub struct KvFile {
    /// For messages: the name it had.
    path: PathBuf,
    /// Written to, as it is read: past the page cache or through it.
    out: File,
    /// Read from through the page cache, for copies.
    plain: File,
    engine: BlockReads,
    block_bytes: u64,
    read_bytes: u64,
    current: Option<(usize, Slot)>,
    pending: Option<(usize, Pending)>,
    /// What is on its way began before its layer's turn.
    early: bool,
    /// Pass and layer that blocks are for.
    of: (u64, LayerId),
    drive: DriveId,
    clock: Clock,
    blocks: BlockCounters,
    shared: Arc<Mutex<Shared>>,
}

impl KvFile {
    /// Makes a file in the folder and starts an engine for it, as `options` say for experts.
    pub fn open(spec: &KvSpec<'_>, options: &ReaderOptions, clock: Clock) -> Result<(Self, KvHandle), ReaderError> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        options.check()?;
        let mut options = options.clone();
        if options.engine == EngineKind::Mmap {
            options.engine = EngineKind::Buffered; // a map does not grow with its file
        }
        let name = format!("argodrive-kv-{}-{}.tmp", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let path = spec.folder.join(name);
        let fault = |reason: String| ReaderError::Drive { drive: "kv".into(), path: path.clone(), reason };
        let hint = "give a folder on a drive with room with --kv-dir";
        if let Ok(free) = free_bytes(spec.folder)
            && free < spec.needed_bytes
        {
            let needed = spec.needed_bytes;
            return Err(fault(format!(
                "rows beyond --kv-ram take up to {needed} bytes, {free} are free there; {hint}"
            )));
        }
        let made = File::options().read(true).write(true).create_new(true).open(&path);
        let plain = made.map_err(|e| fault(format!("{e}; {hint}")))?;
        let opened = open_both(&path, &options);
        // from now on it lives as long as it is open
        let removed = fs::remove_file(&path);
        let ((file, out), alignment) = opened.map_err(|e| fault(e.to_string()))?;
        removed.map_err(|e| fault(e.to_string()))?;
        let direct = alignment.is_some();
        if let Some(step) = too_coarse(alignment) {
            return Err(fault(format!("direct reads there need multiples of {step} bytes, blocks have 4096; {hint}")));
        }
        let read_bytes = read_bytes(spec.block_bytes, options.queue_depth);
        let requests = spec.block_bytes.div_ceil(read_bytes).max(1) as usize;
        let size = (spec.block_bytes, requests);
        let engine = BlockReads::start((&path, file), WORDING, size, spec.pace.clone(), &options, clock)?;
        let (drive, room) = spec.traced;
        let counters = KvFileCounters { direct, emulated: engine.is_emulated(), ..KvFileCounters::default() };
        let shared = Arc::new(Mutex::new(Shared { counters, reads: Vec::with_capacity(room), room }));
        let handle = KvHandle { shared: Arc::clone(&shared), folder: spec.folder.to_path_buf() };
        let file = Self {
            path,
            out,
            plain,
            engine,
            block_bytes: spec.block_bytes,
            read_bytes,
            current: None,
            pending: None,
            early: false,
            of: (0, LayerId(0)),
            drive,
            clock,
            blocks: BlockCounters::default(),
            shared,
        };
        Ok((file, handle))
    }

    fn begin(&mut self, block: usize) -> Result<(), SourceError> {
        let (count, read_at) = (self.reads(), self.places(block));
        self.pending = Some((block, self.engine.begin((0..count).map(read_at), self.clock.now_ns())?));
        self.blocks.reads += count as u64;
        lock(&self.shared).counters.reads += count as u64;
        Ok(())
    }

    /// Reads of a block.
    fn reads(&self) -> usize {
        self.block_bytes.div_ceil(self.read_bytes) as usize
    }

    /// Offset and bytes of each read of a block.
    fn places(&self, block: usize) -> impl Fn(usize) -> (u64, u32) + use<> {
        let (block_bytes, read_bytes) = (self.block_bytes, self.read_bytes);
        move |index| {
            let at = index as u64 * read_bytes;
            (block as u64 * block_bytes + at, read_bytes.min(block_bytes.saturating_sub(at)) as u32)
        }
    }

    /// Waits for a block; `used` says whether anybody wants it.
    fn finish(&mut self, (block, pending): (usize, Pending), used: bool) -> Result<Slot, SourceError> {
        let (parts, read_at) = (self.reads(), self.places(block));
        let queued_ns = pending.queued_ns;
        let ((step, layer), drive, shared) = (self.of, self.drive, &self.shared);
        let event = |index: usize, c: &Completion| {
            let (offset, bytes) = read_at(index);
            let result = match c.outcome {
                ReadOutcome::Done { .. } => ReadResult::Ok,
                ReadOutcome::Short { .. } => ReadResult::Short,
                ReadOutcome::Failed { .. } => ReadResult::Error,
                ReadOutcome::Cancelled => ReadResult::Cancelled,
            };
            let mut shared = lock(shared);
            if shared.reads.len() >= shared.room {
                shared.counters.lost_reads += u64::from(shared.room > 0);
                return;
            }
            shared.reads.push(ReadEvent {
                step,
                layer,
                expert: ExpertId(0),
                drive,
                replica: 0,
                part: u8::try_from(index).unwrap_or(u8::MAX),
                parts: u8::try_from(parts).unwrap_or(u8::MAX),
                offset,
                bytes: u64::from(bytes),
                purpose: Purpose::Kv,
                issued_in: 0,
                barrier: None,
                queued_ns,
                submitted_ns: c.submitted_ns.max(queued_ns),
                completed_ns: c.completed_ns.max(queued_ns),
                result,
                outcome: if used { Outcome::Demand } else { Outcome::Wasted },
            });
        };
        let early = std::mem::take(&mut self.early);
        let slot = self.engine.finish(pending, &read_at, event)?;
        self.blocks.bytes += self.block_bytes;
        let mut shared = lock(&self.shared);
        shared.counters.read_bytes += self.block_bytes;
        shared.counters.ahead_used += u64::from(early && used);
        if !used {
            self.blocks.unused_bytes += self.block_bytes;
            shared.counters.unused_bytes += self.block_bytes;
        }
        Ok(slot)
    }

    /// No block is at hand or on its way.
    fn forget(&mut self) {
        self.current = None;
        if let Some(pending) = self.pending.take() {
            // a read that failed here was wanted by nobody
            let _ = self.finish(pending, false);
        }
    }

    fn why(&self, what: &str, offset: u64, e: &io::Error) -> SourceError {
        let hint = match e.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                "; make room there, or give --kv-dir on another drive; with --snapshot-every, --resume goes on from the last snapshot"
            }
            _ => "",
        };
        SourceError::Read(format!("{}: {what} at offset {offset} of {}: {e}{hint}", self.path.display(), WORDING.of))
    }
}

/// The file for reading and for writing, and how direct reads must be aligned, if they are direct.
type Both = ((File, File), Option<DioAlignment>);

fn open_both(path: &Path, options: &ReaderOptions) -> io::Result<Both> {
    let (file, alignment) = open_one(path, options)?;
    let out = match alignment {
        Some(_) => open_direct_for_writing(path)?.file,
        None => File::options().write(true).open(path)?,
    };
    Ok(((file, out), alignment))
}

impl BlockSource for KvFile {
    fn block(&mut self, block: usize, next: Option<usize>) -> Result<&[u8], SourceError> {
        if self.current.as_ref().is_none_or(|(at_hand, _)| *at_hand != block) {
            let on_its_way = self.pending.take();
            if let Some((begun, pending)) = on_its_way {
                let wanted = begun == block;
                let slot = self.finish((begun, pending), wanted)?;
                if wanted {
                    self.current = Some((block, slot)); // the buffer before it is free again
                    self.blocks.ahead += 1;
                }
            }
            if self.current.as_ref().is_none_or(|(at_hand, _)| *at_hand != block) {
                self.current = None;
                self.begin(block)?;
                if let Some(pending) = self.pending.take() {
                    self.current = Some((block, self.finish(pending, true)?));
                }
            }
        }
        self.blocks.blocks += 1;
        if let Some(next) = next.filter(|next| *next != block && self.pending.is_none()) {
            self.begin(next)?;
        }
        Ok(self.current.as_ref().map_or(&[], |(_, slot)| slot.bytes()))
    }

    fn counters(&self) -> BlockCounters {
        self.blocks
    }

    fn threads(&self) -> Vec<u32> {
        self.engine.threads()
    }

    fn settle(&mut self) {
        self.forget();
    }
}

impl BlockStore for KvFile {
    fn put(&mut self, block: usize, bytes: &[u8]) -> Result<(), SourceError> {
        self.forget(); // what is at hand may be what this block was
        let whole = self.block_bytes as usize;
        let Some(mut slot) = self.engine.buffer().filter(|_| bytes.len() <= whole) else {
            return Err(SourceError::Unknown(format!("no buffer is free for {} bytes of {}", bytes.len(), WORDING.of)));
        };
        let out = &mut slot.bytes_mut()[..whole];
        out[..bytes.len()].copy_from_slice(bytes);
        out[bytes.len()..].fill(0);
        let offset = block as u64 * self.block_bytes;
        let written = self.out.write_all_at(&slot.bytes()[..whole], offset);
        written.map_err(|e| self.why(&format!("{whole} bytes could not be written"), offset, &e))?;
        let mut shared = lock(&self.shared);
        shared.counters.written_blocks += 1;
        shared.counters.written_bytes += self.block_bytes;
        Ok(())
    }

    fn copy(&self, block: usize, out: &mut [u8]) -> Result<(), SourceError> {
        let offset = block as u64 * self.block_bytes;
        let read = self.plain.read_exact_at(out, offset);
        read.map_err(|e| self.why(&format!("{} bytes could not be read", out.len()), offset, &e))?;
        // what was read for a snapshot is not to fill the memory that the tier saves; a hint that may fail
        let _ = drop_pages(&self.plain, offset, self.block_bytes);
        lock(&self.shared).counters.copied_bytes += out.len() as u64;
        Ok(())
    }

    fn reads_are_for(&mut self, step: u64, layer: LayerId) {
        self.of = (step, layer);
    }

    fn soon(&mut self, block: usize) -> Result<(), SourceError> {
        let at_hand = self.current.as_ref().is_some_and(|(at_hand, _)| *at_hand == block);
        if at_hand || self.pending.is_some() {
            return Ok(());
        }
        self.begin(block)?;
        self.early = true;
        lock(&self.shared).counters.ahead_blocks += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::block_reads::CUT;
    use super::*;

    fn open(
        folder: &Path,
        block_bytes: u64,
        room: usize,
        needed_bytes: u64,
    ) -> Result<(KvFile, KvHandle), ReaderError> {
        let options = ReaderOptions { queue_depth: 2, direct: false, ..ReaderOptions::default() };
        let spec = KvSpec { folder, block_bytes, needed_bytes, pace: None, traced: (DriveId(3), room) };
        KvFile::open(&spec, &options, Clock::start())
    }

    fn bytes(seed: usize, len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + seed * 7) as u8).collect()
    }

    #[test]
    fn blocks_come_back_and_every_read_is_counted_and_traced() {
        let dir = tempfile::tempdir().unwrap();
        let size = 700 * 1024;
        let (mut file, handle) = open(dir.path(), size, 100, 0).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "it has no name");
        let payload = size as usize - 100;
        for block in 0..4 {
            file.put(block, &bytes(block, payload)).unwrap();
        }
        file.reads_are_for(9, LayerId(5));
        // backwards for the scores, forwards for the sums: the turn costs no read
        for (block, next) in [(3, 2), (2, 1), (1, 0), (0, 1), (0, 1), (1, 2), (2, 3)] {
            assert!(file.block(block, Some(next)).unwrap()[..payload] == bytes(block, payload), "{block}");
        }
        assert!(file.block(3, None).unwrap()[..payload] == bytes(3, payload));
        file.soon(3).unwrap();
        let counted = handle.counters();
        assert_eq!(counted.ahead_blocks, 0, "it is at hand");
        assert_eq!((counted.read_bytes, counted.unused_bytes, counted.written_blocks), (7 * size, 0, 4));
        file.soon(1).unwrap();
        file.soon(2).unwrap();
        assert!(file.block(1, None).unwrap()[..payload] == bytes(1, payload));
        let counted = handle.counters();
        assert_eq!((counted.ahead_blocks, counted.ahead_used, counted.read_bytes), (1, 1, 8 * size));
        file.soon(2).unwrap();
        file.put(3, &bytes(8, payload)).unwrap();
        let counted = handle.counters();
        assert_eq!(
            (counted.ahead_blocks, counted.ahead_used, counted.unused_bytes),
            (2, 1, size),
            "nobody asked for it"
        );
        assert!(file.block(3, Some(0)).unwrap()[..payload] == bytes(8, payload), "not what was at hand");
        file.settle();
        let mut copy = vec![0; payload];
        file.copy(2, &mut copy).unwrap();
        assert!(copy == bytes(2, payload));
        let (counted, reads) = (handle.counters(), handle.take_reads());
        assert_eq!((counted.unused_bytes, counted.copied_bytes), (2 * size, payload as u64));
        assert_eq!((counted.reads, counted.lost_reads), (reads.len() as u64, 0));
        assert_eq!(reads.iter().map(|r| r.bytes).sum::<u64>(), counted.read_bytes);
        assert!(
            reads.iter().all(|r| (r.step, r.layer, r.drive, r.purpose) == (9, LayerId(5), DriveId(3), Purpose::Kv))
        );
        assert!(reads.iter().all(|r| r.parts == 2 && r.submitted_ns <= r.completed_ns));
        assert_eq!(reads.iter().filter(|r| r.outcome == Outcome::Wasted).count(), 4);
    }

    #[test]
    fn what_is_wrong_names_the_file_and_the_place() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, handle) = open(dir.path(), CUT, 1, 0).unwrap();
        file.put(0, &[7; 4096]).unwrap();
        file.plain.set_len(100).unwrap();
        let e = file.block(0, None).unwrap_err().to_string();
        assert!(e.contains("argodrive-kv-") && e.contains("offset 0") && e.contains("ends after 100"), "{e}");
        let e = file.copy(0, &mut [0; 200]).unwrap_err().to_string();
        assert!(e.contains("argodrive-kv-") && e.contains("200 bytes"), "{e}");
        assert!(file.block(2, None).is_err());
        assert_eq!((handle.counters().lost_reads, handle.take_reads().len()), (1, 1));
        let e = open(dir.path(), CUT, 0, u64::MAX).err().unwrap().to_string();
        assert!(e.contains("--kv-dir") && e.contains("are free"), "{e}");
        let e = open(&dir.path().join("none"), CUT, 0, 0).err().unwrap().to_string();
        assert!(e.contains("--kv-dir") && e.contains("none"), "{e}");
    }
}
