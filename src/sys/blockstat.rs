//! The kernel's own counters of what was read: of a block device (`stat` of its folder in sysfs) and of a process
//! (`/proc/<pid>/io`). Files are opened once and read again with `pread`; reading allocates nothing. Knows nothing of
//! drives, windows or time.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Sectors in the kernel's counters have this size whatever the device says (Documentation/block/stat).
pub const SECTOR_BYTES: u64 = 512;
/// Numbers of a `stat` line since Linux 2.6; later kernels add more behind them.
const MIN_NUMBERS: usize = 11;
/// Longer than any of these files.
const BUFFER_BYTES: usize = 1024;
/// Counters that are 32 bits wide start again behind this.
const WRAP: u64 = 1 << 32;

/// Counters at one moment; all but `in_flight` only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// What was read, in units of [`CounterFile::unit_bytes`].
    pub units: u64,
    /// Reads that have ended.
    pub reads: u64,
    /// Time that they took, summed over reads, in milliseconds.
    pub read_ms: u64,
    /// Reads and writes that are under way.
    pub in_flight: u32,
}

/// Whose counters a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// A block device's.
    Device,
    /// A process's: what it had the storage fetch. Neither reads nor times are known.
    Process,
}

/// An open file of counters.
#[derive(Debug)]
pub struct CounterFile {
    file: File,
    counts: Counts,
}

impl CounterFile {
    /// The counters of the block device whose folder in sysfs is `folder`.
    pub fn device(folder: &Path) -> io::Result<Self> {
        Ok(Self { file: File::open(folder.join("stat"))?, counts: Counts::Device })
    }

    /// The counters of a process; `proc` is where the process file system is, `/proc`.
    pub fn process(proc: &Path, pid: u32) -> io::Result<Self> {
        Ok(Self { file: File::open(proc.join(pid.to_string()).join("io"))?, counts: Counts::Process })
    }

    /// Whose counters they are.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes of one of [`Counted::units`].
    pub fn unit_bytes(&self) -> u64 {
        match self.counts {
            Counts::Device => SECTOR_BYTES,
            Counts::Process => 1,
        }
    }

    /// The counters now. `InvalidData` when the file is not what it should be; otherwise what the kernel says, e.g.
    /// that the device or the process is gone.
    pub fn read(&self) -> io::Result<Counted> {
        let mut buffer = [0u8; BUFFER_BYTES];
        let len = self.file.read_at(&mut buffer, 0)?;
        let text = buffer.get(..len).unwrap_or_default();
        let parsed = match self.counts {
            Counts::Device => parse_stat(text),
            Counts::Process => parse_io(text),
        };
        parsed.ok_or_else(|| io::Error::from(ErrorKind::InvalidData))
    }
}

/// Parses a device's `stat`; `None` when it is no such line.
pub fn parse_stat(text: &[u8]) -> Option<Counted> {
    let mut numbers = [0u64; MIN_NUMBERS];
    let mut seen = 0;
    for word in text.split(u8::is_ascii_whitespace).filter(|w| !w.is_empty()) {
        let number = parse_number(word)?;
        if let Some(place) = numbers.get_mut(seen) {
            *place = number;
        }
        seen += 1;
    }
    let [reads, _, units, read_ms, _, _, _, _, in_flight, ..] = numbers;
    let in_flight = u32::try_from(in_flight).unwrap_or(u32::MAX);
    (seen >= MIN_NUMBERS).then_some(Counted { units, reads, read_ms, in_flight })
}

/// Parses a process's `io`; `None` when it has no `read_bytes`.
pub fn parse_io(text: &[u8]) -> Option<Counted> {
    let line = text.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(b"read_bytes:"))?;
    Some(Counted { units: parse_number(line.trim_ascii())?, ..Counted::default() })
}

fn parse_number(word: &[u8]) -> Option<u64> {
    if word.is_empty() {
        return None;
    }
    word.iter().try_fold(0u64, |value, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// How far a counter has come from `before` to `now`. A smaller number is a counter of 32 bits that started again, as
/// long as it has come less than half way round since; otherwise the counter went back, and nothing can be said (`None`).
pub fn growth(before: u64, now: u64) -> Option<u64> {
    match now.checked_sub(before) {
        Some(more) => Some(more),
        None => (before < WRAP).then(|| now + WRAP - before).filter(|more| *more < WRAP / 2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &[u8] =
        b" 9592432    56954 1781934729 28144681  1287492   263841 566079880  2767693        3  1728452 \
        31227905   695269       99 539361208   298790   116200    16740\n";

    #[test]
    fn a_stat_line_has_at_least_eleven_numbers() {
        let seen = parse_stat(STAT).unwrap();
        assert_eq!(seen, Counted { units: 1_781_934_729, reads: 9_592_432, read_ms: 28_144_681, in_flight: 3 });
        assert_eq!(parse_stat(b"1 2 3 4 5 6 7 8 9 10 11").unwrap().units, 3, "old kernels stop here");
        let bad: [&[u8]; 7] = [
            b"",
            b"\n",
            b"1 2 3 4 5 6 7 8 9 10",
            b"1 2 x 4 5 6 7 8 9 10 11",
            b"1 2 -3 4 5 6 7 8 9 10 11",
            b"1 2 3 4 5 6 7 8 9 10 11 y",
            b"1 2 18446744073709551616 4 5 6 7 8 9 10 11",
        ];
        for text in bad {
            assert_eq!(parse_stat(text), None, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn a_process_counts_bytes_that_the_storage_fetched() {
        let text = b"rchar: 6976\nwchar: 0\nsyscr: 10\nsyscw: 0\nread_bytes: 4096\nwrite_bytes: 7\n";
        assert_eq!(parse_io(text), Some(Counted { units: 4096, ..Counted::default() }));
        for bad in [&b"rchar: 1\n"[..], b"read_bytes: \n", b"read_bytes: x\n", b""] {
            assert_eq!(parse_io(bad), None);
        }
    }

    #[test]
    fn counters_of_32_bits_start_again_and_others_may_not_go_back() {
        assert_eq!(growth(5, 12), Some(7));
        assert_eq!(growth(5, 5), Some(0));
        assert_eq!(growth(u64::from(u32::MAX) - 1, 8), Some(10));
        assert_eq!(growth(WRAP + 5, WRAP + 3), None, "64 bits never start again");
        assert_eq!(growth(1000, 999), None, "one step back is no lap of 4 billion");
        assert_eq!(growth(WRAP - 1, WRAP), Some(1), "a counter of 64 bits goes on");
    }

    #[test]
    fn files_are_read_again_from_their_beginning() {
        let dir = tempfile::tempdir().unwrap();
        let stat = dir.path().join("stat");
        std::fs::write(&stat, STAT).unwrap();
        let file = CounterFile::device(dir.path()).unwrap();
        assert_eq!((file.unit_bytes(), file.read().unwrap().in_flight), (512, 3));
        std::fs::write(&stat, "1 2 3 4 5 6 7 8 9 10 11\n").unwrap();
        assert_eq!(file.read().unwrap(), Counted { units: 3, reads: 1, read_ms: 4, in_flight: 9 });
        std::fs::write(&stat, "not a counter").unwrap();
        assert_eq!(file.read().unwrap_err().kind(), ErrorKind::InvalidData);
        assert!(CounterFile::device(&dir.path().join("gone")).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_counters() {
        let own = CounterFile::process(Path::new("/proc"), std::process::id()).unwrap();
        assert_eq!((own.counts(), own.unit_bytes()), (Counts::Process, 1));
        own.read().unwrap();
    }
}
