//! An import of 4 GiB with experts as large as K3's, in 512 MiB of address space, killed fifty times on the way: it ends
//! with the same model as an import that nobody disturbed, and does no finished work twice.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![cfg(target_os = "linux")]

use argodrive::store::manifest::{DriveManifest, StoreManifest, drive_folder};
use argodrive::store::synth::{SynthOptions, synth};
use argodrive::store::verify::{verify_drive, verify_trunk};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const KILLS: u64 = 50;
const EXPERT_BYTES: u64 = 17_547_264;
const EXPERTS: u64 = 246;

/// The importer in a child with 512 MiB of address space.
fn spawn(checkpoint: &Path, store: &Path) -> Child {
    Command::new("sh")
        .args(["-c", r#"ulimit -v 524288; exec "$0" import "$1" --store "$2" --batch 32Mi --json"#])
        .arg(env!("CARGO_BIN_EXE_argodrive"))
        .args([checkpoint, store])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Items that the journal names (its first line is the header).
fn journaled(store: &Path) -> u64 {
    std::fs::read(store.join("import.journal"))
        .map_or(0, |bytes| (bytes.iter().filter(|b| **b == b'\n').count() as u64).saturating_sub(1))
}

fn report(out: &Output) -> Value {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn fifty_kills_in_half_a_gibibyte_of_address_space() {
    // not under /tmp, which may be in memory
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (checkpoint, store) = (dir.path().join("checkpoint"), dir.path().join("store"));
    let made = synth(&checkpoint, &SynthOptions::k3_experts(), &mut |_| {}).unwrap();
    assert_eq!((made.expert_bytes, made.experts), (EXPERT_BYTES, EXPERTS));
    assert!(made.tensor_bytes > 4 << 30);

    let mut random = fastrand::Rng::with_seed(20);
    let (mut kills, mut seen) = (0, 0);
    while kills < KILLS {
        let mut child = spawn(&checkpoint, &store);
        // most kills wait for the journal to reach the next fiftieth of the items (324 with the trunk); every fifth comes
        // at once, in the start-up of the process
        let target = 40 + (kills + 1) * 270 / KILLS;
        let deadline = Instant::now() + Duration::from_secs(60);
        while kills % 5 != 0 && journaled(&store) < target && Instant::now() < deadline {
            assert!(child.try_wait().unwrap().is_none(), "ended before it was killed");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random.u64(0..30_000)));
        assert!(child.try_wait().unwrap().is_none(), "ended before it was killed");
        child.kill().unwrap();
        child.wait_with_output().unwrap();
        kills += 1;
        assert!(StoreManifest::open(&store).is_err(), "a killed import must not look finished");
        let now = journaled(&store);
        assert!(now >= seen, "what was done must not be forgotten");
        seen = now;
    }
    let (before, child) = (journaled(&store), spawn(&checkpoint, &store));
    let last = report(&child.wait_with_output().unwrap());
    let count = |key: &str| last[key].as_u64().unwrap();
    assert_eq!(count("experts_written") + count("experts_reused"), EXPERTS);
    assert_eq!(count("experts_reused") + count("trunk_reused"), before, "nothing in the journal is copied again");
    assert!(count("experts_reused") > EXPERTS / 2 && count("experts_written") > 0);

    let manifest = StoreManifest::open(&store).unwrap();
    let folder = drive_folder(&store, &manifest.model_id);
    let drive = DriveManifest::open(&folder).unwrap();
    let experts = verify_drive(&folder, &drive, &mut |_| {}).unwrap();
    assert_eq!((experts.checked, experts.faults.len()), (EXPERTS, 0), "{:?}", experts.faults.first());
    assert_eq!(verify_trunk(&store, &manifest, &mut |_| {}).unwrap().faults.len(), 0);

    // undisturbed: again with the limit, so that it is shown to hold over a whole run
    std::fs::remove_dir_all(&store).unwrap();
    let whole = report(&spawn(&checkpoint, &store).wait_with_output().unwrap());
    assert_eq!(whole["experts_written"].as_u64(), Some(EXPERTS));
    assert_eq!(whole["model_id"].as_str(), Some(manifest.model_id.as_str()));
}
