//! A streamed trunk: its blocks are read from the store's drive into two buffers by turns, the next while the last is used.
//! Knows offsets in one file; which weights a block holds is the decoder's. Its reads are apart from those of experts, in an
//! engine of their own, and are counted apart.
//!
//! Everything is allocated when it is made; a block allocates nothing unless its reads fail.

use super::block_reads::{BlockReads, Pending, Wording, open_one, read_bytes, too_coarse};
use super::options::{ReaderError, ReaderOptions};
use crate::clock::Clock;
use crate::ids::Extent;
use crate::io::Slot;
use crate::io::paced::PacedDrive;
use crate::source::{BlockCounters, BlockSource, SourceError};
use std::path::Path;
use std::sync::Arc;

const WORDING: Wording = Wording {
    of: "the trunk",
    cut_short: "import the checkpoint again",
    failed: "no drive has another copy of it: when the store's drive is well again, `argodrive verify FOLDER` says what is lost, \
             and importing again brings it back",
};

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
    engine: BlockReads,
    /// By block, then read: offset and bytes.
    reads: Vec<Vec<(u64, u32)>>,
    /// The block that is used.
    current: Option<(usize, Slot)>,
    pending: Option<(usize, Pending)>,
    counters: BlockCounters,
}

impl TrunkStream {
    /// Opens the file and starts an engine, as `options` say for experts: with as many reads at once, past the page cache where
    /// that is asked for.
    pub fn open(trunk: &TrunkFile<'_>, options: &ReaderOptions, clock: Clock) -> Result<Self, ReaderError> {
        options.check()?;
        let fault = |reason: String| ReaderError::Drive { drive: "trunk".into(), path: trunk.path.into(), reason };
        let (file, alignment) = open_one(trunk.path, options).map_err(|e| fault(e.to_string()))?;
        if let Some(step) = too_coarse(alignment) {
            return Err(fault(format!(
                "direct reads there need multiples of {step} bytes, a trunk's blocks have 4096"
            )));
        }
        let largest = trunk.parts.iter().map(|parts| parts.iter().map(|p| p.len).sum::<u64>()).max().unwrap_or(0);
        let most = read_bytes(largest, options.queue_depth);
        let cut = |parts: &Vec<Extent>| {
            let cut_one = |p: &Extent| {
                let (offset, len) = (p.offset, p.len);
                (0..len).step_by(most as usize).map(move |at| (offset + at, most.min(len - at) as u32))
            };
            parts.iter().flat_map(cut_one).collect::<Vec<_>>()
        };
        let reads: Vec<Vec<(u64, u32)>> = trunk.parts.iter().map(cut).collect();
        let requests = reads.iter().map(Vec::len).max().unwrap_or(1).max(1);
        let file = (trunk.path, file);
        let engine = BlockReads::start(file, WORDING, (largest, requests), trunk.pace.clone(), options, clock)?;
        Ok(Self { engine, reads, current: None, pending: None, counters: BlockCounters::default() })
    }

    /// Begins to read a block into a free buffer.
    fn begin(&mut self, block: usize) -> Result<(), SourceError> {
        let reads = self.reads.get(block).map_or(&[][..], Vec::as_slice);
        if reads.is_empty() {
            return Err(SourceError::Unknown(format!("the trunk has no block {block}")));
        }
        self.pending = Some((block, self.engine.begin(reads.iter().copied(), 0)?));
        self.counters.reads += reads.len() as u64;
        Ok(())
    }

    /// Waits for the block that is on its way.
    fn finish(&mut self, (block, pending): (usize, Pending)) -> Result<Slot, SourceError> {
        let reads = &self.reads[block];
        let whole = self.engine.finish(pending, |index| reads.get(index).copied().unwrap_or_default(), |_, _| {})?;
        self.counters.bytes += reads.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        Ok(whole)
    }
}

impl BlockSource for TrunkStream {
    fn block(&mut self, block: usize, next: Option<usize>) -> Result<&[u8], SourceError> {
        if let Some(pending) = self.pending.take() {
            let (begun, had) = (pending.0, self.counters.bytes);
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
        self.engine.threads()
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
    fn a_drive_that_fails_or_hangs_is_named_with_what_to_do() {
        use crate::reader::tests::BadEngine;
        use std::time::Duration;
        let dir = tempfile::tempdir().unwrap();
        let parts = [vec![Extent { offset: 4096, len: 8192 }]];
        let failing = |errno: i32| {
            let mut s = stream(1, &parts, &[7; 12_288], &dir);
            s.engine.swap_engine(Box::new(BadEngine::new(errno, Arc::default())), Duration::from_millis(20));
            s.block(0, None).unwrap_err().to_string()
        };
        let store = dir.path().display().to_string();
        let gone = failing(libc::ENODEV);
        for part in ["trunk.bin", "8192 bytes at offset 4096", "no drive has another copy", "argodrive verify", &store]
        {
            assert!(gone.contains(part), "no `{part}` in: {gone}");
        }
        let hangs = failing(0);
        for part in ["trunk.bin", "at offset 4096", "20ms", "--read-timeout"] {
            assert!(hangs.contains(part), "no `{part}` in: {hangs}");
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
