//! Tests of the sampler: counts and identities, never how fast it is.

use super::*;
use crate::trace::windows::{Cutter, DeviceWindow};
use std::fs;
use std::path::Path;
use std::time::Duration;

const MS: u64 = 1_000_000;

fn stat(folder: &Path, sectors: u64) {
    let next = folder.join("next");
    fs::write(&next, format!("{} 0 {sectors} 7 0 0 0 0 2 0 0\n", sectors / 8)).unwrap();
    // in place: the sampler holds the file open, as it does in sysfs
    fs::write(folder.join("stat"), fs::read(&next).unwrap()).unwrap();
}

fn source(folder: &Path, name: &str) -> Source {
    Source { name: name.into(), file: CounterFile::device(folder).unwrap() }
}

fn windows(sampled: &Sampled, index: usize, interval_ns: u64) -> Vec<DeviceWindow> {
    let mut readings = sampled.of(index);
    let mut cutter = Cutter::new(interval_ns, sampled.sources[index].unit_bytes(), readings.next().unwrap());
    let mut out = Vec::new();
    readings.for_each(|r| cutter.push(r, &mut |w| out.push(w)));
    out.extend(cutter.finish());
    out
}

#[test]
fn windows_sum_to_what_the_counters_grew_by() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    stat(dirs[0].path(), 800);
    stat(dirs[1].path(), u64::from(u32::MAX) - 7);
    let sources = vec![source(dirs[0].path(), "a"), source(dirs[1].path(), "b")];
    let sampler = Sampler::start(Clock::start(), MIN_INTERVAL_NS, sources).unwrap();
    // a reading may fall between the two halves of a write, so each file changes once
    stat(dirs[0].path(), 1600);
    stat(dirs[1].path(), 8);
    std::thread::sleep(Duration::from_millis(20));
    let sampled = sampler.finish();
    assert_eq!(sampled.readings.len() % 2, 0);
    let figures = &sampled.figures;
    assert!(figures.ticks > 0 && figures.lost.is_empty(), "{figures:?}");
    assert_eq!(sampled.readings.len() as u64 / 2, figures.ticks + 2, "one reading before, one after");
    assert!(figures.deadline_error_p50_ns <= figures.deadline_error_p99_ns);
    assert!(figures.deadline_error_p99_ns <= figures.deadline_error_max_ns);
    assert!(figures.cpu_ns.is_some_and(|ns| ns > 0 && ns < figures.wall_ns));
    for (index, sectors, reads) in [(0, 800, 100), (1, 16, u32::MAX as u64 + 1)] {
        let windows = windows(&sampled, index, MIN_INTERVAL_NS);
        assert_eq!(windows.iter().map(|w| w.bytes).sum::<u64>(), sectors * 512);
        if index == 0 {
            assert_eq!(windows.iter().map(|w| w.reads).sum::<u64>(), reads);
        }
        assert!(windows.iter().skip(1).all(|w| w.to_ns % MIN_INTERVAL_NS == 0 || w.partial));
        assert!(windows.windows(2).all(|w| w[0].to_ns == w[1].from_ns));
    }
}

#[test]
fn a_source_that_goes_away_is_named_and_the_others_go_on() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    dirs.iter().for_each(|d| stat(d.path(), 80));
    let sources = vec![source(dirs[0].path(), "gone"), source(dirs[1].path(), "here")];
    let sampler = Sampler::start(Clock::start(), MIN_INTERVAL_NS, sources).unwrap();
    fs::write(dirs[0].path().join("stat"), "no counters any more").unwrap();
    stat(dirs[1].path(), 160);
    while !sampler.has_lost(0) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut drained = Vec::new();
    sampler.drain(&mut drained);
    assert!(!sampler.has_lost(1));
    let mut sampled = sampler.finish();
    assert_eq!(sampled.figures.lost, ["gone: invalid data"]);
    drained.append(&mut sampled.readings);
    sampled.readings = drained;
    assert_eq!(windows(&sampled, 0, MIN_INTERVAL_NS).iter().map(|w| w.bytes).sum::<u64>(), 0);
    assert_eq!(windows(&sampled, 1, MIN_INTERVAL_NS).iter().map(|w| w.bytes).sum::<u64>(), 80 * 512);
}

#[test]
fn a_full_buffer_drops_every_second_tick_and_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    stat(dir.path(), 0);
    let sampler = Sampler::with_room(Clock::start(), MIN_INTERVAL_NS, vec![source(dir.path(), "a")], 8).unwrap();
    stat(dir.path(), 4000);
    let room = sampler.shared.lock().readings.capacity();
    while sampler.shared.lock().thinned < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let sampled = sampler.finish();
    assert!(sampled.readings.len() <= room && sampled.readings.capacity() == room, "the buffer never grows");
    assert!(sampled.figures.thinned >= 2);
    assert!(sampled.readings.is_sorted_by_key(|r| r.t_ns));
    assert_eq!(windows(&sampled, 0, MIN_INTERVAL_NS).iter().map(|w| w.bytes).sum::<u64>(), 4000 * 512);
}

fn ledger() -> Ledger {
    Ledger {
        readings: Vec::new(),
        width: 1,
        every: 1,
        ticks: 0,
        missed: 0,
        thinned: 0,
        errors: Histogram::new_with_bounds(1, MAX_ERROR_NS, 3).unwrap(),
        worst_ns: 0,
        cpu_ns: None,
        started_ns: 0,
        last_ns: 0,
        last: vec![Counted::default()],
        lost: vec![None],
    }
}

#[test]
fn ticks_that_were_slept_through_are_missed_and_count_as_late() {
    let mut ledger = ledger();
    ledger.tick(10 * MS + 500, 10 * MS, 10 * MS);
    assert_eq!((ledger.ticks, ledger.missed, ledger.worst_ns), (1, 0, 500));
    // due at 20 ms, awake at 57 ms: the ticks of 30, 40 and 50 ms are gone
    ledger.tick(57 * MS, 20 * MS, 10 * MS);
    assert_eq!((ledger.ticks, ledger.missed, ledger.worst_ns), (2, 3, 37 * MS));
    assert_eq!(ledger.errors.len(), 5);
    let figures = ledger.figures(10 * MS, &["a".into()]);
    assert_eq!((figures.missed_ticks, figures.deadline_error_max_ns), (3, 37 * MS));
    let p50 = figures.deadline_error_p50_ns;
    assert!((16 * MS..=18 * MS).contains(&p50), "17 ms is the third of five: {p50}");
}

#[test]
fn what_cannot_be_sampled_is_refused_before_it_starts() {
    for interval_ns in [0, MIN_INTERVAL_NS - 1, MAX_INTERVAL_NS + 1] {
        let message = Sampler::start(Clock::start(), interval_ns, vec![]).err().unwrap().to_string();
        assert!(message.contains("1ms to 60s"), "{message}");
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("stat"), "nothing").unwrap();
    let message = Sampler::start(Clock::start(), 10 * MS, vec![source(dir.path(), "sdq")]).err().unwrap().to_string();
    assert!(message.contains("sdq") && message.contains("cannot be read"), "{message}");
}
