//! What a tick of the 10 ms sampler costs: by the number of devices that it reads, beside a thread that only wakes and
//! reads nothing. Rounds are interleaved, so that a busy moment of the machine meets all of them alike. Linux only.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use argodrive::clock::Clock;
use argodrive::stats;
use argodrive::sys::blockstat::CounterFile;
use argodrive::trace::monitor::{DEFAULT_INTERVAL_NS, Sampler, Source};
use std::time::Duration;

const ROUNDS: usize = 6;
const ROUND: Duration = Duration::from_secs(2);

fn devices() -> Vec<std::path::PathBuf> {
    let Ok(found) = std::fs::read_dir("/sys/block") else { return Vec::new() };
    let mut found: Vec<_> = found.filter_map(|e| Some(e.ok()?.path())).collect();
    // those that have moved something first: their files are the dearest to read
    found.sort_by_key(|p| {
        let busy = CounterFile::device(p).and_then(|f| f.read()).is_ok_and(|c| c.reads > 0);
        (!busy, p.clone())
    });
    found
}

fn main() {
    let found = devices();
    let widths: Vec<usize> = [0, 1, 2, 4].into_iter().filter(|n| *n <= found.len()).collect();
    let mut seen: Vec<Vec<(f64, f64, f64)>> = vec![Vec::new(); widths.len()];
    for _ in 0..ROUNDS {
        for (slot, &width) in widths.iter().enumerate() {
            let source = |path: &std::path::PathBuf| Source {
                name: path.file_name().unwrap().to_string_lossy().into_owned(),
                file: CounterFile::device(path).unwrap(),
            };
            let sources = found[..width].iter().map(source).collect();
            let sampler = Sampler::start(Clock::start(), DEFAULT_INTERVAL_NS, sources).unwrap();
            std::thread::sleep(ROUND);
            let figures = sampler.finish().figures;
            let per_tick_us = figures.cpu_ns.unwrap_or(0) as f64 / figures.ticks.max(1) as f64 / 1e3;
            let share = figures.cpu_share().unwrap_or(0.0) * 100.0;
            seen[slot].push((per_tick_us, share, figures.deadline_error_p99_ns as f64 / 1e3));
        }
    }
    println!(
        "| devices read in a tick | CPU of a tick | of one core | of it waking up | late at p99 |\n|---|---|---|---|---|"
    );
    let middle = |rows: &[(f64, f64, f64)], of: fn(&(f64, f64, f64)) -> f64| {
        stats::median(&rows.iter().map(of).collect::<Vec<_>>()).unwrap()
    };
    let bare_us = middle(&seen[0], |r| r.0);
    for (width, rows) in widths.iter().zip(&seen) {
        let us = middle(rows, |r| r.0);
        println!(
            "| {width} | {us:.1} us | {:.2} % | {:.0} % | {:.0} us |",
            middle(rows, |r| r.1),
            (bare_us / us * 100.0).min(100.0),
            middle(rows, |r| r.2)
        );
    }
}
