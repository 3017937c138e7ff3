//! Profiles survive a round trip, and what cannot be calculated with is refused by name.

use super::*;
use serde_json::{Value, json};

fn model(name: &str, rate: f64) -> DriveModel {
    let barrier = BarrierShape { width: 8, steps: 10, p50_ns: 900, p99_ns: 1000, bytes_per_s: 1e9 };
    let q = |q, ns| Quantile { q, ns };
    DriveModel {
        name: name.into(),
        path: "/mnt".into(),
        device: String::new(),
        serials: vec![],
        emulated: false,
        alignment_bytes: 512,
        rate_bytes_per_s: rate,
        solo_rate_bytes_per_s: rate * 1.1,
        fixed_ns: 10_000,
        latency_ns: 90_000,
        p99_ns: 400_000,
        service: vec![q(0.0, 100), q(0.5, 200), q(1.0, 600)],
        depth: 8,
        points: vec![Point { bytes: 1 << 20, depth: 1, reads: 40, bytes_per_s: 2e9, p50_ns: 5, p99_ns: 6 }],
        barrier,
        sustained: None,
    }
}

fn profile() -> Profile {
    let drives = vec![model("a", 3e9), model("b", 1.5e9)];
    let together = Joint {
        name: "all drives".into(),
        members: vec!["a".into(), "b".into()],
        bytes_per_s: 4e9,
        member_bytes_per_s: vec![2.6e9, 1.4e9],
        barrier: drives[0].barrier,
    };
    let method = Method {
        made: "2026-01-01T00:00:00Z".into(),
        argodrive: "0.1.0".into(),
        kernel: "Linux 6".into(),
        virtualised: Some(true),
        engine: "psync".into(),
        direct: true,
        block_bytes: 1 << 20,
        width: 8,
        file_age_s: Some(4),
    };
    let held = Proof { name: "cold start".into(), seen: "0 bytes".into(), verdict: "held".into() };
    let groups = vec![Joint { name: "usb hub".into(), ..together.clone() }];
    Profile { version: PROFILE_VERSION, method, emulated: false, drives, groups, together, guards: vec![held] }
}

#[test]
fn a_profile_survives_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profile.json");
    let written = profile();
    written.save(&path).unwrap();
    assert_eq!(Profile::load(&path).unwrap(), written);
    let rate = written.drive("b").unwrap().bound_rate();
    assert_eq!(rate, DriveRate { bytes_per_s: 1.5e9, fixed_ns: 100_000 });
    assert!(matches!(Profile::load(&dir.path().join("none")), Err(ProfileError::Io { .. })));
}

#[test]
fn a_distribution_is_interpolated_and_never_left() {
    let drive = model("a", 1e9);
    for (q, ns) in [(0.0, 100.0), (0.25, 150.0), (0.5, 200.0), (0.75, 400.0), (1.0, 600.0), (2.0, 600.0)] {
        assert_eq!(drive.service_ns(q), ns, "{q}");
    }
}

#[test]
fn numbers_that_cannot_be_are_refused_by_name() {
    let base = serde_json::to_value(profile()).unwrap();
    let refuse = |pointer: &str, value: Value, says: &str| {
        let mut bad = base.clone();
        *bad.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
        let message = Profile::parse(&bad.to_string()).unwrap_err();
        assert!(message.contains(says), "{pointer}: {message}");
    };
    refuse("/version", json!(2), "newer argodrive");
    refuse("/version", json!(0), "version 0");
    refuse("/drives/1/rate_bytes_per_s", json!(0), "drive `b`: rate_bytes_per_s is 0");
    refuse("/drives/1/rate_bytes_per_s", json!(-1e9), "rate_bytes_per_s is -1");
    refuse("/drives/1/rate_bytes_per_s", Value::Null, "not a profile");
    refuse("/drives/0/solo_rate_bytes_per_s", json!(0.0), "solo_rate_bytes_per_s");
    refuse("/drives/0/fixed_ns", json!(-5), "not a profile");
    refuse("/drives/1/name", json!("a"), "`a` is there twice");
    refuse("/drives", json!([]), "no drives");
    refuse("/drives/0/service", json!([]), "quantiles must rise");
    refuse("/drives/0/service/1/ns", json!(50), "quantiles must rise");
    refuse("/drives/0/service/2/q", json!(0.9), "quantiles must rise");
    refuse("/drives/0/points/0/reads", json!(0), "cannot be");
    refuse("/drives/0/barrier/p50_ns", json!(0), "barrier");
    refuse("/drives/0/emulated", json!(true), "contradicts");
    refuse("/groups/0/members/1", json!("c"), "group `usb hub`: member `c`");
    refuse("/groups/0/members/1", json!("a"), "twice");
    refuse("/together/member_bytes_per_s", json!([1.0]), "one rate for each");
    refuse("/together/members", json!(["a"]), "one rate");
    refuse("/guards/0/verdict", json!("tripped"), "guard cold start is tripped");
    let typo = base.to_string().replacen("latency_ns", "latncy_ns", 1);
    assert!(Profile::parse(&typo).unwrap_err().contains("latncy_ns"));
    for not in ["", "{}", "[[drive]]", "{\"version\": 1, \"x\": NaN}"] {
        assert!(Profile::parse(not).unwrap_err().contains("not a profile"), "{not}");
    }
    let text = base.to_string().replacen("3000000000.0", "1e999", 1);
    assert!(Profile::parse(&text).is_err(), "infinity");
    let mut unsound = profile();
    unsound.drives[0].rate_bytes_per_s = f64::NAN;
    let dir = tempfile::tempdir().unwrap();
    assert!(unsound.save(&dir.path().join("p")).unwrap_err().to_string().contains("NaN"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing unsound is written");
}

#[test]
fn other_drives_than_the_measured_ones_are_refused() {
    let profile = profile();
    assert_eq!(profile.models(&["b", "a"]).unwrap()[0].name, "b");
    let e = profile.models(&["a", "c"]).unwrap_err().to_string();
    assert!(e.contains("no drive `c` (it has a, b)") && e.contains("argodrive ceiling"), "{e}");
    let dir = tempfile::tempdir().unwrap();
    let spec = |emulate| DriveSpec { name: "a".into(), path: dir.path().into(), emulate, faults: Vec::new() };
    assert_eq!(profile.models_of(&[spec(None)]).unwrap().len(), 1, "an unknown device is not held against it");
    let pace = super::super::spec::parse("[[drive]]\nname = \"a\"\npath = \"/a\"\nemulate = { rate = \"5MB/s\" }")
        .unwrap()[0]
        .emulate;
    let e = profile.models_of(&[spec(pace)]).unwrap_err().to_string();
    assert!(e.contains("was real when it was measured, is emulated"), "{e}");
    let mut moved = profile.clone();
    moved.drives[0].device = "nvme9n1:1".into();
    let seen = identity_of(dir.path());
    assert_eq!(moved.models_of(&[spec(None)]).is_err(), !seen.is_empty());
}
