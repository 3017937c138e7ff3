//! The baseline engine: a pool of threads and positional reads. Works on every kernel and file system.

use super::pool::{PoolEngine, ReadOne};
use super::{EngineKind, IoSetupError, ReadOutcome, ReadRequest, Signal, Work};
use crate::clock::Clock;
use crate::sys::direct::is_direct;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Partial direct reads inside a file end on multiples of this (the largest sector of any drive).
pub(super) const DIRECT_PIECE: u32 = 4096;

/// Positional reads in a pool of threads.
pub type PsyncEngine = PoolEngine<Positional>;

/// Reads by `pread`.
pub struct Positional {
    files: Vec<File>,
    /// See [`piece_of`].
    piece: u32,
}

impl PoolEngine<Positional> {
    /// An engine over `files` with `queue_depth` threads, holding at most `max_requests` reads. `signal` is raised
    /// after each completion.
    pub fn new(
        files: Vec<File>,
        queue_depth: u32,
        max_requests: u32,
        signal: Arc<Signal>,
        clock: Clock,
    ) -> Result<Self, IoSetupError> {
        Self::start(Positional::over(files), queue_depth, max_requests, signal, clock)
    }
}

impl Positional {
    pub(super) fn over(files: Vec<File>) -> Self {
        let piece = piece_of(&files);
        Self { files, piece }
    }

    pub(super) fn read_as(&self, kind: EngineKind, request: &mut ReadRequest, work: &Work) -> ReadOutcome {
        let Some(file) = self.files.get(request.file as usize) else {
            return ReadOutcome::Failed { errno: libc::EBADF };
        };
        let outcome = read_into(request, self.piece, work, |target, position| file.read_at(target, position));
        work.read_by(kind);
        outcome
    }
}

impl ReadOne for Positional {
    const KIND: EngineKind = EngineKind::Psync;

    fn read(&self, request: &mut ReadRequest, work: &Work) -> ReadOutcome {
        self.read_as(Self::KIND, request, work)
    }
}

/// Partial reads that end off multiples of this can only be the end of a file: direct reads end inside a file on whole
/// sectors only (and could not be continued otherwise), others anywhere.
pub(super) fn piece_of(files: &[File]) -> u32 {
    if files.iter().any(is_direct) { DIRECT_PIECE } else { 1 }
}

/// Reads until `need` bytes are there: interrupted calls are repeated, partial ones continued. The end of the file
/// may cut the alignment padding off, not the `need`ed bytes. `read` reads into a buffer at a position.
pub(super) fn read_into(
    request: &mut ReadRequest,
    piece: u32,
    work: &Work,
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> ReadOutcome {
    let ReadRequest { offset, len, need, .. } = *request;
    let Some(target) = request.slot.bytes_mut().get_mut(..len as usize).filter(|_| need <= len) else {
        return ReadOutcome::Failed { errno: libc::EFAULT };
    };
    let mut got = 0u32;
    loop {
        let Some(position) = offset.checked_add(u64::from(got)) else {
            return ReadOutcome::Failed { errno: libc::EINVAL };
        };
        match read(&mut target[got as usize..], position) {
            Ok(0) => break,
            Ok(bytes) => {
                got += bytes as u32; // at most what is left of `len`
                if got >= need || !(bytes as u32).is_multiple_of(piece) {
                    break;
                }
                work.continued();
            }
            // Direct positional reads of block devices are not interruptible; those of network file systems are.
            Err(e) if e.kind() == ErrorKind::Interrupted => work.repeated(),
            Err(e) => return ReadOutcome::Failed { errno: e.raw_os_error().unwrap_or(libc::EIO) },
        }
    }
    if got >= need { ReadOutcome::Done { bytes: got } } else { ReadOutcome::Short { bytes: got } }
}

#[cfg(test)]
mod tests {
    use super::super::Slab;
    use super::*;

    fn request(len: u32, need: u32) -> ReadRequest {
        let slab = Slab::new(1, 8192, Arc::default()).unwrap();
        ReadRequest { tag: 0, file: 0, offset: 100, len, need, slot: slab.take().unwrap() }
    }

    /// The outcome of a read whose calls are answered by `script` in turn, and the positions asked for.
    fn scripted(need: u32, piece: u32, script: &[Result<usize, i32>]) -> (ReadOutcome, Vec<u64>, Work) {
        let (mut positions, work) = (Vec::new(), Work::default());
        let mut turn = script.iter();
        let outcome = read_into(&mut request(8192, need), piece, &work, |target, position| {
            positions.push(position);
            match turn.next().expect("a call beyond the script") {
                Ok(bytes) => {
                    target[..*bytes].fill(7);
                    Ok(*bytes)
                }
                Err(errno) => Err(io::Error::from_raw_os_error(*errno)),
            }
        });
        assert!(turn.next().is_none(), "the whole script was played");
        (outcome, positions, work)
    }

    #[test]
    fn interrupted_reads_are_repeated_and_partial_ones_continued() {
        let script = [Err(libc::EINTR), Ok(4096), Err(libc::EINTR), Err(libc::EINTR), Ok(4096)];
        let (outcome, positions, work) = scripted(8192, DIRECT_PIECE, &script);
        assert_eq!(outcome, ReadOutcome::Done { bytes: 8192 });
        assert_eq!(positions, [100, 100, 4196, 4196, 4196]);
        assert_eq!((work.snapshot().repeated, work.snapshot().continued), (3, 1));
        let (outcome, ..) = scripted(6000, 1, &[Ok(1000), Ok(4999), Ok(1)]);
        assert_eq!(outcome, ReadOutcome::Done { bytes: 6000 }, "through the cache a read may end anywhere");
    }

    #[test]
    fn the_end_of_the_file_and_errors_end_a_read() {
        assert_eq!(scripted(6000, DIRECT_PIECE, &[Ok(4096), Ok(904)]).0, ReadOutcome::Short { bytes: 5000 });
        assert_eq!(scripted(6000, 1, &[Ok(4096), Ok(904), Ok(0)]).0, ReadOutcome::Short { bytes: 5000 });
        assert_eq!(scripted(5000, DIRECT_PIECE, &[Ok(4096), Ok(904)]).0, ReadOutcome::Done { bytes: 5000 });
        assert_eq!(scripted(1, 1, &[Ok(4096),][..]).0, ReadOutcome::Done { bytes: 4096 });
        assert_eq!(scripted(6000, 1, &[Ok(4096), Err(libc::EIO)]).0, ReadOutcome::Failed { errno: libc::EIO });
    }
}
