//! What every plan must obey, and small cases worked out by hand.

use super::super::heat::{DEFAULT_DOMAIN, Part, Source};
use super::super::heat_build::HeatBuilder;
use super::super::level::Reads;
use super::*;
use crate::ids::ExpertId;
use crate::stats::SplitMix64;
use proptest::prelude::*;

const MB: u64 = 1_000_000;

fn drives(n: usize) -> Vec<PlanDrive> {
    (0..n).map(|i| PlanDrive { name: format!("d{i}"), path: format!("/mnt/d{i}").into() }).collect()
}

fn catalog(layers: u16, experts: u32) -> Catalog {
    Catalog {
        model_id: "m".into(),
        store: "/s".into(),
        layers: (1..=layers).map(LayerId).collect(),
        experts,
        expert_bytes: MB,
    }
}

fn heat_of(experts: u32, rows: &[(u16, Vec<u16>)]) -> Heat {
    let mut builder = HeatBuilder::new(experts).unwrap();
    for (layer, row) in rows {
        let ids: Vec<ExpertId> = row.iter().map(|&e| ExpertId(e)).collect();
        builder.row(LayerId(*layer), &ids, true).unwrap();
    }
    let source = Source { name: "rows".into(), digest: "d".into(), part: Part::Whole };
    builder.finish(None, vec![source], DEFAULT_DOMAIN).unwrap()
}

/// Skewed rows for every layer.
fn skewed(layers: u16, experts: u16, width: usize, rows: usize, seed: u64) -> Heat {
    let mut rng = SplitMix64::new(seed);
    let mut all = Vec::new();
    for _ in 0..rows {
        for layer in 1..=layers {
            let mut row: Vec<u16> = Vec::new();
            while row.len() < width {
                let id = (rng.below(experts as usize) * rng.below(experts as usize) / experts as usize) as u16;
                if !row.contains(&id) {
                    row.push(id);
                }
            }
            all.push((layer, row));
        }
    }
    heat_of(u32::from(experts), &all)
}

fn policy(text: &str) -> PolicyFile {
    PolicyFile::parse(text).unwrap()
}

fn planned(catalog: &Catalog, set: &DriveSet, policy: &PolicyFile, heat: &Heat) -> Result<Planned, PlanError> {
    let drives = drives(set.drives.len());
    plan_with(PlanRequest { catalog, drives: &drives, policy, heat: Some(heat), set, inputs: BTreeMap::new() })
}

fn message(result: Result<Planned, PlanError>) -> String {
    result.err().unwrap().to_string()
}

const EVERY: [&str; 7] = [
    "policy = \"single\"",
    "policy = \"round-robin\"",
    "policy = \"hash\"",
    "policy = \"lpt\"",
    "policy = \"stripe\"",
    "policy = \"full-mirror\"",
    "policy = \"barrier\"\neffort = \"quick\"",
];

#[test]
fn k3_on_four_drives_stays_under_four_mebibytes() {
    let full = plan(&catalog(92, 896), &drives(4), &Policy::FullMirror {}, 0, BTreeMap::new()).unwrap();
    assert!(full.to_json().unwrap().len() < 4 << 20);
    assert_eq!(full.replica_count(), 92 * 896 * 3);
}

#[test]
fn what_cannot_be_placed_is_refused() {
    let no = |catalog: &Catalog| plan(catalog, &drives(2), &Policy::RoundRobin {}, 0, BTreeMap::new()).unwrap_err();
    assert!(no(&catalog(0, 4)).to_string().contains("nothing to place"));
    assert!(no(&catalog(2, 0)).to_string().contains("nothing to place"));
    assert!(no(&Catalog { expert_bytes: 0, ..catalog(1, 4) }).to_string().contains("0 bytes"));
    assert!(no(&Catalog { expert_bytes: u64::MAX, ..catalog(1, 4) }).to_string().contains("64 bits"));
    assert!(no(&catalog(1, 70_000)).to_string().contains("65535"));
    let mut nested = drives(2);
    nested[1].path = "/mnt/d0/inner".into();
    let inside = plan(&catalog(1, 4), &nested, &Policy::RoundRobin {}, 0, BTreeMap::new()).unwrap_err().to_string();
    assert!(inside.contains("`d1`") && inside.contains("inside drive `d0`"), "{inside}");
    assert!(plan(&catalog(1, 4), &drives(0), &Policy::RoundRobin {}, 0, BTreeMap::new()).is_err());
    let lpt = plan(&catalog(1, 4), &drives(2), &Policy::Lpt {}, 0, BTreeMap::new()).unwrap_err().to_string();
    assert!(lpt.contains("--heat"), "{lpt}");
}

#[test]
fn budgets_that_do_not_fit_say_what_does() {
    let heat = skewed(2, 10, 3, 20, 1);
    let mut set = DriveSet::of_rates(&[2e9, 1e9]);
    set.drives.iter_mut().for_each(|d| d.capacity_bytes = Some(12 * MB));
    let barrier = |extra: &str| policy(&format!("policy = \"barrier\"\neffort = \"quick\"\nextra = \"{extra}\""));
    assert!(planned(&catalog(2, 10), &set, &barrier("20%"), &heat).is_ok());
    assert!(message(planned(&catalog(2, 10), &set, &barrier("25%"), &heat)).contains("room for 4"));
    assert!(message(planned(&catalog(2, 10), &set, &barrier("9GB"), &heat)).contains("lower `extra`"));
    let full = message(planned(&catalog(2, 10), &set, &policy("policy = \"full-mirror\""), &heat));
    assert!(full.contains("`d0`") && full.contains("may hold 12000000"), "{full}");
    set.drives[1].capacity_bytes = Some(7 * MB);
    assert!(message(planned(&catalog(2, 10), &set, &barrier("0%"), &heat)).contains("add a drive"));
    let band = |what: &str| policy(&format!("policy = \"hot-replica\"\n[[band]]\ndrive = \"d0\"\n{what}\n"));
    let plain = DriveSet::equal(2);
    assert!(message(planned(&catalog(2, 10), &plain, &band("experts = 5"), &heat)).contains("15 of 20 experts"));
    assert!(message(planned(&catalog(2, 10), &plain, &band("experts = 21"), &heat)).contains("the model has 20"));
    let other = policy("policy = \"hot-replica\"\n[[band]]\ndrive = \"x\"\nexperts = \"all\"\n");
    assert!(message(planned(&catalog(2, 10), &plain, &other, &heat)).contains("the drives are d0, d1"));
    assert!(message(planned(&catalog(2, 11), &plain, &barrier("0%"), &heat)).contains("11"));
    let mut named = heat;
    named.model_id = Some("other".into());
    assert!(message(planned(&catalog(2, 10), &plain, &barrier("0%"), &named)).contains("other"));
}

#[test]
fn bands_hold_the_hottest_up_to_their_limit() {
    let rows: Vec<(u16, Vec<u16>)> = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2].iter().map(|&e| (1, vec![e])).collect();
    let heat = heat_of(4, &rows);
    let text = "policy = \"hot-replica\"\n[[band]]\ndrive = \"d1\"\nreads = \"60%\"\n[[band]]\ndrive = \"d0\"\nexperts = \"all\"\n\
                [[band]]\ndrive = \"d2\"\nbytes = \"1MB\"\n";
    let plan = planned(&catalog(1, 4), &DriveSet::equal(3), &policy(text), &heat).unwrap().plan;
    let homes: Vec<Vec<u8>> = plan.layers[&LayerId(1)].0.iter().map(|h| h.iter().map(|d| d.0).collect()).collect();
    assert_eq!(homes, [vec![1, 0, 2], vec![1, 0], vec![0], vec![0]]);
}

/// Experts 0 and 1 are as hot as 2 and 3, and only fire together: two drives must not hold a pair. By counts alone
/// any two of the four look alike.
#[test]
fn what_fires_together_is_kept_apart() {
    let rows: Vec<(u16, Vec<u16>)> =
        (0..40).flat_map(|_| [(1, vec![0, 1]), (1, vec![2, 3])]).chain([(1, vec![0, 1])]).collect();
    let heat = heat_of(4, &rows);
    let set = DriveSet::of_rates(&[1e9, 1e9]);
    let cost = |text: &str| {
        let policy = policy(text);
        let plan = planned(&catalog(1, 4), &set, &policy, &heat).unwrap().plan;
        judge(&plan, &policy, &set, &heat).unwrap().barrier_ns()
    };
    // 0 goes to the first drive, 1 to the second; 2 and 3 then go where is less, one each.
    let barrier = cost("policy = \"barrier\"\nextra = \"0%\"");
    assert!((barrier - 1e6).abs() < 1.0, "one expert a drive, 1 ms: {barrier}");
    // Counts 41, 41, 40, 40, dealt longest first, part the pairs by luck; a heat that interleaves them does not.
    let crossed: Vec<(u16, Vec<u16>)> = rows
        .iter()
        .map(|(l, r)| (*l, r.iter().map(|&e| [0, 2, 1, 3][usize::from(e)]).collect()))
        .chain([(1, vec![2, 0]), (1, vec![1]), (1, vec![1])])
        .collect();
    let heat = heat_of(4, &crossed);
    let both = |text: &str| {
        let policy = policy(text);
        let plan = planned(&catalog(1, 4), &set, &policy, &heat).unwrap().plan;
        judge(&plan, &policy, &set, &heat).unwrap().ratio()
    };
    let (lpt, barrier) = (both("policy = \"lpt\""), both("policy = \"barrier\"\nextra = \"0%\""));
    assert!(barrier <= lpt && barrier < 1.03, "{barrier} against {lpt}");
}

/// Counts are equal, so LPT deals by number: 0, 2 to one drive and 1, 3 to the other. But 0 and 2 always fire together.
#[test]
fn barrier_beats_lpt_where_only_co_activation_tells() {
    let rows: Vec<(u16, Vec<u16>)> = (0..50).flat_map(|_| [(1, vec![0, 2]), (1, vec![1, 3])]).collect();
    let heat = heat_of(4, &rows);
    let set = DriveSet::of_rates(&[1e9, 1e9]);
    let ratio = |text: &str| {
        let policy = policy(text);
        let plan = planned(&catalog(1, 4), &set, &policy, &heat).unwrap().plan;
        judge(&plan, &policy, &set, &heat).unwrap().ratio()
    };
    assert!((ratio("policy = \"lpt\"") - 2.0).abs() < 1e-3, "both of a pair on one drive");
    assert!((ratio("policy = \"barrier\"\nextra = \"0%\"") - 1.0).abs() < 1e-3);
}

/// Every row asks for 0 and two others, on two equal drives: the one extra copy belongs to 0, which then evens out every
/// barrier. Behind a cache that holds 0 a copy of it would be worth nothing.
#[test]
fn copies_go_to_what_is_read_and_not_to_what_is_hot() {
    let rows: Vec<(u16, Vec<u16>)> = (0..60).map(|i| (1, vec![0, 1 + i % 3, 4 + i / 3 % 4])).collect();
    let heat = heat_of(8, &rows);
    let set = DriveSet::of_rates(&[1e9, 1e9]);
    let copied = |cache: &str| {
        let text = format!("policy = \"barrier\"\nextra = \"1MB\"\n{cache}");
        let plan = planned(&catalog(1, 8), &set, &policy(&text), &heat).unwrap().plan;
        plan.layers[&LayerId(1)].0.iter().position(|h| h.len() == 2)
    };
    assert_eq!(copied(""), Some(0));
    for kept in ["lfu", "pinned", "lru"] {
        let bytes = if kept == "lru" { "3MB" } else { "1MB" };
        let at = copied(&format!("cache = \"{bytes}\"\ncache-policy = \"{kept}\""));
        assert!(at.is_none_or(|e| e > 0), "{kept}: 0 is in memory, yet {at:?} has the copy");
    }
    let all = policy("policy = \"barrier\"\ncache = \"9MB\"\ncache-policy = \"pinned\"");
    assert!(message(planned(&catalog(1, 8), &set, &all, &heat)).contains("no barrier of this heat reads anything"));
}

#[test]
fn a_shared_uplink_is_seen() {
    // Drives 0 and 1 share what one of them can do; 2 is as fast alone. Two experts that always fire together must not
    // both lie behind the uplink.
    let rows: Vec<(u16, Vec<u16>)> = (0..50).map(|_| (1, vec![0, 1])).collect();
    let heat = heat_of(2, &rows);
    let mut set = DriveSet::of_rates(&[1e9, 1e9, 0.9e9]);
    set.uplinks = vec![1e9];
    set.drives[0].uplink = Some(0);
    set.drives[1].uplink = Some(0);
    let policy = policy("policy = \"barrier\"\nextra = \"0%\"");
    let plan = planned(&catalog(1, 2), &set, &policy, &heat).unwrap().plan;
    let homes = &plan.layers[&LayerId(1)].0;
    assert!(homes.iter().any(|h| h[0] == DriveId(2)) && homes.iter().any(|h| h[0] != DriveId(2)), "{homes:?}");
}

#[test]
fn a_slow_drive_is_used_in_full_only_where_the_others_are_full() {
    let heat = skewed(2, 12, 4, 30, 3);
    let mut set = DriveSet::of_rates(&[5e9, 4.9e9, 0.5e9]);
    let policy = policy("policy = \"barrier\"\nextra = \"0%\"\neffort = \"quick\"");
    let on_slow = |set: &DriveSet| {
        let plan = planned(&catalog(2, 12), set, &policy, &heat).unwrap().plan;
        plan.on_drive(DriveId(2)).count()
    };
    assert_eq!(on_slow(&set), 0);
    set.drives[0].capacity_bytes = Some(10 * MB);
    set.drives[1].capacity_bytes = Some(10 * MB);
    assert_eq!(on_slow(&set), 4, "24 experts, 20 fit elsewhere");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_plan_is_whole_within_capacity_and_repeatable(
        n in 1usize..6, experts in 4u16..40, seed: u64, tight: bool, which in 0usize..EVERY.len(),
    ) {
        let heat = skewed(2, experts, 3, 30, seed);
        let catalog = catalog(2, u32::from(experts));
        let mut set = DriveSet::of_rates(&(0..n).map(|d| 1e9 * (1 + d) as f64).collect::<Vec<_>>());
        let policy = policy(&format!("{}\nseed = {}", EVERY[which], seed % 1000));
        let needed = 2 * u64::from(experts) * MB;
        if tight && policy.policy.needs_heat() {
            let each = (2 * u64::from(experts)).div_ceil(n as u64) + u64::from(experts);
            set.drives.iter_mut().for_each(|d| d.capacity_bytes = Some(each * MB));
        }
        let result = planned(&catalog, &set, &policy, &heat);
        let Ok(first) = result else { return Err(TestCaseError::fail(message(result))) };
        first.plan.check().unwrap();
        prop_assert_eq!(&first.plan, &planned(&catalog, &set, &policy, &heat).unwrap().plan);
        for (d, drive) in set.drives.iter().enumerate() {
            let bytes = first.plan.on_drive(DriveId(d as u8)).count() as u64 * MB;
            prop_assert!(drive.capacity_bytes.is_none_or(|c| bytes <= c));
        }
        if which == 6 {
            prop_assert!(first.plan.replica_count() as u64 * MB <= needed / 4);
            let predicted = first.plan.predicted.unwrap();
            prop_assert!(predicted.bound_drives_ns <= predicted.bound_layout_ns + 1);
            prop_assert!(predicted.bound_layout_ns <= predicted.barrier_ns + 1);
        }
    }

    /// The law: with a drive ten times slower than the slowest, no barrier, seen or unseen, takes longer than without it.
    #[test]
    fn a_ten_times_slower_drive_never_makes_a_plan_worse(
        rates in prop::collection::vec(1u32..4, 1..4), seed: u64, extra in 0u32..60, whole: bool, at in 0usize..4,
    ) {
        let heat = skewed(2, 24, 4, 40, seed);
        let reads = if whole { Reads::Whole } else { Reads::Split };
        let text = format!("policy = \"barrier\"\neffort = \"quick\"\nextra = \"{extra}%\"");
        let policy = PolicyFile { reads, ..policy(&text) };
        let fast: Vec<f64> = rates.iter().map(|&r| f64::from(r) * 1e9).collect();
        let slow = fast.iter().copied().fold(f64::INFINITY, f64::min) / 10.0;
        let mut with = fast.clone();
        with.insert(at.min(fast.len()), slow);
        let (without, with) = (DriveSet::of_rates(&fast), DriveSet::of_rates(&with));
        let catalog = catalog(2, 24);
        let before = planned(&catalog, &without, &policy, &heat).unwrap().plan;
        let after = planned(&catalog, &with, &policy, &heat).unwrap().plan;
        let unseen = skewed(2, 24, 5, 200, seed ^ 0x5555);
        for text in [&heat, &unseen] {
            let b = judge(&before, &policy, &without, text).unwrap();
            let a = judge(&after, &policy, &with, text).unwrap();
            for (a, b) in a.layers.iter().zip(&b.layers) {
                prop_assert!(a.barrier_ns <= b.barrier_ns * (1.0 + 1e-5), "{} > {}", a.barrier_ns, b.barrier_ns);
            }
        }
    }

    #[test]
    fn round_robin_balances_every_layer(layers in 1u16..5, experts in 1u32..100, n in 1usize..9) {
        let p = plan(&catalog(layers, experts), &drives(n), &Policy::RoundRobin {}, 0, BTreeMap::new()).unwrap();
        for homes in p.layers.values() {
            let mut count = vec![0usize; n];
            homes.0.iter().for_each(|h| count[h[0].index()] += 1);
            prop_assert!(homes.0.iter().all(|h| h.len() == 1));
            prop_assert!(count.iter().max().unwrap() - count.iter().min().unwrap() <= 1);
        }
    }

    #[test]
    fn a_hash_follows_rates_and_moves_little(seed: u64) {
        let before = simple::hash(LayerId(3), 4000, &[2e9, 1e9], seed);
        let first = before.0.iter().filter(|h| h[0].0 == 0).count() as f64;
        prop_assert!((first / 4000.0 - 2.0 / 3.0).abs() < 0.05, "{}", first);
        let after = simple::hash(LayerId(3), 4000, &[2e9, 1e9, 1e9], seed);
        prop_assert!(before.0.iter().zip(&after.0).all(|(b, a)| a == b || a[0].0 == 2), "only to the new drive");
    }
}
