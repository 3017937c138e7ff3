//! Damaged files of every kind that is read from outside: no parser panics, takes long, or takes memory out of proportion.
//! The parsers and their corpora are those of the fuzz targets (`fuzz/`); this is their short, repeatable form.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../fuzz/src/lib.rs"]
#[allow(dead_code)]
mod parsers;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Memory that a parser may take for one of these small files.
const MOST_BYTES: usize = 256 << 20;
/// Time that it may take, on a busy machine and without optimisation.
const LONGEST: Duration = Duration::from_secs(20);
/// Damaged copies of each file of a corpus.
const COPIES: u64 = 80;

struct Metered;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; the counters allocate nothing.
unsafe impl GlobalAlloc for Metered {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Metered = Metered;

/// What a number, a length or a word in a file is replaced by.
const HOSTILE: &[&str] = &[
    "0",
    "-1",
    "1",
    "65535",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "99999999999999999999999",
    "1e308",
    "-1e308",
    "1e-308",
    "NaN",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "..",
    "/",
    "\u{0}",
    "\u{feff}",
    ",",
    "\n",
    "\"",
    "\\",
    "é",
];

/// A copy with one to three kinds of damage.
fn damaged(seed: &[u8], random: &mut fastrand::Rng) -> Vec<u8> {
    let mut out = seed.to_vec();
    for _ in 0..random.usize(1..=3) {
        if out.is_empty() {
            break;
        }
        let at = random.usize(..out.len());
        match random.u8(..7) {
            0 => out[at] ^= 1 << random.u8(..8),
            1 => out.truncate(at),
            2 => drop(out.drain(at..(at + random.usize(1..40)).min(out.len()))),
            3 => {
                let part = out[at..(at + random.usize(1..200)).min(out.len())].to_vec();
                drop(out.splice(at..at, part.iter().copied().cycle().take(part.len() * random.usize(1..20))));
            }
            4 => out[at] = random.u8(..),
            _ => {
                // a whole number if there is one behind this place
                let digits = |b: &u8| b.is_ascii_digit() || *b == b'.';
                let from = out[at..].iter().position(digits).map_or(at, |n| at + n);
                let len = out[from..].iter().take_while(|b| digits(b)).count().max(1);
                let word = HOSTILE[random.usize(..HOSTILE.len())].bytes();
                drop(out.splice(from..(from + len).min(out.len()), word));
            }
        }
    }
    out
}

#[test]
fn no_parser_panics_hangs_or_takes_memory_out_of_proportion() {
    let mut faults = Vec::new();
    let mut tried = 0;
    for (index, (name, parse)) in parsers::ENTRIES.iter().enumerate() {
        let folder = parsers::corpus().join(name);
        let mut seeds: Vec<_> = fs::read_dir(&folder)
            .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
            .map(|entry| entry.unwrap().path())
            .collect();
        seeds.sort();
        assert!(!seeds.is_empty(), "{}: no file to damage", folder.display());
        let mut random = fastrand::Rng::with_seed(index as u64);
        let mut taken = 0;
        for path in seeds {
            let seed = fs::read(&path).unwrap();
            // long files are slow to parse, and their damage says nothing new
            let copies = if seed.len() > 20_000 { COPIES / 4 } else { COPIES };
            for copy in 0..=copies {
                let bytes = if copy == 0 { seed.clone() } else { damaged(&seed, &mut random) };
                let before = LIVE.load(Ordering::Relaxed);
                PEAK.store(before, Ordering::Relaxed);
                let since = Instant::now();
                let outcome = catch_unwind(AssertUnwindSafe(|| parse(&bytes)));
                let most = PEAK.load(Ordering::Relaxed).saturating_sub(before);
                tried += 1;
                let fault = match outcome {
                    Err(_) => "panics".to_string(),
                    Ok(_) if since.elapsed() > LONGEST => format!("takes {:?}", since.elapsed()),
                    Ok(_) if most > MOST_BYTES => format!("takes {most} bytes of memory"),
                    Ok(whole) => {
                        taken += usize::from(whole && copy == 0);
                        continue;
                    }
                };
                let kept = std::env::temp_dir().join(format!("hostile-{name}-{copy}"));
                fs::write(&kept, &bytes).unwrap();
                faults.push(format!("{name} {fault} with copy {copy} of {}: {}", path.display(), kept.display()));
            }
        }
        assert!(taken > 0, "{}: no file of it is taken whole, so damage does not get far", folder.display());
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(tried > 33 * 20, "only {tried} files were tried");
}
