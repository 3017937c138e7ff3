//! How many bytes of trace files have been read, of those that were opened: one count for the process, so that a program can
//! show how far it is without every parser carrying a callback. Knows nothing of rows, and nothing depends on it.

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};

static OPENED: AtomicU64 = AtomicU64::new(0);
static READ: AtomicU64 = AtomicU64::new(0);

/// Bytes read, and bytes of all files that were opened so far. Both only grow.
pub fn so_far() -> (u64, u64) {
    (READ.load(Ordering::Relaxed), OPENED.load(Ordering::Relaxed))
}

/// Counts bytes that will be read in another way than by [`Counted`].
pub fn opened(bytes: u64) {
    OPENED.fetch_add(bytes, Ordering::Relaxed);
}

/// Counts bytes that were read in another way than by [`Counted`].
pub fn read(bytes: u64) {
    READ.fetch_add(bytes, Ordering::Relaxed);
}

/// A file whose reads are counted.
pub struct Counted(File);

impl Counted {
    /// Counts the length of `file` as opened. A file of unknown length counts as it is read.
    pub fn new(file: File) -> Self {
        opened(file.metadata().map_or(0, |m| m.len()));
        Self(file)
    }
}

impl Read for Counted {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.0.read(out)?;
        read(len as u64);
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows");
        std::fs::write(&path, [7; 1000]).unwrap();
        let before = so_far();
        let mut out = Vec::new();
        Counted::new(File::open(&path).unwrap()).read_to_end(&mut out).unwrap();
        // other tests of this process read traces meanwhile
        let after = so_far();
        assert!(out.len() == 1000 && after.0 >= before.0 + 1000 && after.1 >= before.1 + 1000);
    }
}
