//! Drives in virtual time: cases worked by hand.

use super::*;

/// Ends of reads that are all asked for at time 0, as (drive, tag, completed).
fn play(devices: &[Device], uplinks: &[Uplink], depth: u32, reads: &[(usize, u64)]) -> Vec<(usize, u32, u64)> {
    let mut all = Devices::new(devices, uplinks, &Arc::default(), [depth, 1], 0);
    for (tag, &(drive, bytes)) in reads.iter().enumerate() {
        all.submit(drive, DEMAND, tag as u32, bytes, 0);
    }
    let mut out = Vec::new();
    while let Some(at) = all.next_ns() {
        out.extend(std::iter::from_fn(|| all.next_end(at)).map(|e| (e.drive, e.tag, e.completed_ns)));
    }
    out
}

#[test]
fn one_server_and_a_latency_that_overlaps() {
    // 1 byte a nanosecond, 10 for each read, 100 latency
    let drive = Device::exact("a", 1e9, 10, 100);
    assert_eq!(play(std::slice::from_ref(&drive), &[], 4, &[(0, 50), (0, 30)]), [(0, 0, 160), (0, 1, 200)]);
    // one at a time: the second begins when the first has ended
    assert_eq!(play(std::slice::from_ref(&drive), &[], 1, &[(0, 50), (0, 30)]), [(0, 0, 160), (0, 1, 300)]);
    let twice = Device::exact("b", 0.5e9, 0, 0);
    assert_eq!(play(&[drive, twice], &[], 4, &[(0, 50), (1, 50)]), [(1, 1, 100), (0, 0, 160)]);
}

#[test]
fn a_shared_uplink_slows_all_that_transfer_and_nobody_else() {
    let drives = [Device::exact("a", 1e9, 0, 5), Device::exact("b", 1e9, 20, 0)];
    let together = Uplink { members: vec![0, 1], bytes_per_s: 1e9 };
    // a moves 20 bytes alone by 20 ns; then both at half their rate: a's other 40 take 80 ns, b has 40 of 100; b goes on alone
    let seen = play(&drives, std::slice::from_ref(&together), 4, &[(0, 60), (1, 100)]);
    assert_eq!(seen, [(0, 0, 105), (1, 1, 160)]);
    let wide = Uplink { bytes_per_s: 2e9, ..together };
    assert_eq!(play(&drives, &[wide], 4, &[(0, 60), (1, 100)]), [(0, 0, 65), (1, 1, 120)]);
}

#[test]
fn a_read_that_no_drive_has_begun_can_be_taken_back() {
    let mut all = Devices::new(&[Device::exact("a", 1e9, 0, 0)], &[], &Arc::default(), [1, 1], 0);
    (0..3).for_each(|tag| all.submit(0, AHEAD, tag, 10, 0));
    assert!(!all.withdraw(0, AHEAD, 0) && all.withdraw(0, AHEAD, 1) && !all.withdraw(0, AHEAD, 1));
    let ends: Vec<_> = std::iter::from_fn(|| all.next_end(u64::MAX)).map(|e| (e.tag, e.completed_ns)).collect();
    assert_eq!(ends, [(0, 10), (2, 20)]);
    assert_eq!(all.work(0), Work { reads: 2, bytes: 20, busy_ns: 20 });
}

#[test]
fn noise_is_drawn_from_what_was_measured() {
    let q = |q: f64, ns: u64| Quantile { q, ns };
    assert_eq!(Noise::of_service(&[q(0.0, 7), q(1.0, 7)]), Noise::None);
    let noise = Noise::of_service(&[q(0.0, 100), q(1.0, 300)]);
    assert_eq!(noise, Noise::Factor(vec![q(0.0, 500_000), q(1.0, 1_500_000)]));
    let mut rng = SplitMix64::new(3);
    let drawn: Vec<f64> = (0..4000).map(|_| noise.draw(0, &mut rng).0).collect();
    let mean = drawn.iter().sum::<f64>() / 4000.0;
    assert!((mean - 1.0).abs() < 0.02 && drawn.iter().all(|f| (0.5..=1.5).contains(f)), "{mean}");
    let late = Noise::Late(vec![vec![5], vec![], vec![-3]]);
    let places: Vec<i64> = [0, 1, 2, 9, 99].into_iter().map(|nth| late.draw(nth, &mut rng).1).collect();
    assert_eq!(places, [5, 5, -3, -3, -3]);
    assert_eq!(Noise::Late(vec![vec![], vec![4]]).draw(0, &mut rng), (1.0, 4));
}

#[test]
fn drives_are_late_together_as_they_were() {
    let device = |name| Device { noise: Noise::Late(vec![vec![7]]), ..Device::exact(name, 1e9, 0, 0) };
    let episode = |a: &[i64], b: &[i64], common: &[(u64, i64)]| Episode {
        own: vec![a.to_vec(), b.to_vec()],
        common: common.to_vec(),
    };
    // both late by themselves; disturbed at 1 us, but not at 2; one that says nothing of b
    let extend = vec![
        episode(&[100], &[100, 300], &[]),
        episode(&[0], &[0, 0], &[(990, 400), (2100, 0)]),
        episode(&[50], &[], &[]),
    ];
    let episodes = Arc::new(Episodes { prefill: vec![], extend });
    let mut all = Devices::new(&[device("a"), device("b")], &[], &episodes, [4, 1], 1);
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..60u64 {
        all.barrier(false, round * 100_000);
        (0..3).for_each(|tag| all.submit(usize::from(tag > 0), DEMAND, tag, 1000, round * 100_000));
        let ends: Vec<u64> = std::iter::from_fn(|| all.next_end(u64::MAX)).map(|e| e.completed_ns % 100_000).collect();
        seen.insert(ends);
    }
    let want = [vec![1007, 1050, 2007], vec![1100, 1100, 2300], vec![1400, 1400, 2000]];
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), want);
}
