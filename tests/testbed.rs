//! A test bed of real loop devices: drives that fail with real errors and come back. Needs root and loop devices, and says so
//! where it has neither.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod prepared;

use assert_cmd::Command;
use prepared::{argodrive, has, ids, json_of, outcome, policy, refused, tiny_store};
use std::path::Path;

/// Takes the bed down however the test ends.
struct Bed<'a>(&'a Path);

impl Drop for Bed<'_> {
    fn drop(&mut self) {
        let _ = outcome(argodrive(["testbed", "down"]).current_dir(self.0));
    }
}

#[test]
fn a_drive_that_is_pulled_out_loses_no_token_and_comes_back() {
    let folder = prepared::folder();
    let folder = folder.path();
    let here = |mut command: Command| {
        command.current_dir(folder);
        command
    };
    let bed = Bed(folder);
    let (code, _, said) = outcome(&mut here(argodrive(["testbed", "up", "--drives", "2", "--size", "32MB"])));
    if code != 0 {
        assert!(said.contains("need root") || said.contains("no loop devices"), "{said}");
        assert!(!folder.join("argodrive-testbed/testbed.json").exists(), "nothing stays behind");
        eprintln!("SKIPPED: {said}");
        return;
    }
    refused(&mut here(argodrive(["testbed", "up"])), &["testbed down"]);
    refused(&mut here(argodrive(["testbed", "unplug", "bed9"])), &["bed9", "bed1, bed2"]);

    let drives = "argodrive-testbed/drives.toml";
    let mut plan = here(argodrive(["plan", "--drives", drives, "--out", "p.json", "--store"]));
    assert_eq!(outcome(plan.arg(tiny_store()).arg("--policy").arg(policy("full-mirror"))).0, 0);
    json_of(&mut here(argodrive(["stage", "p.json", "--margin", "1MB", "--json"])));
    let decode = || {
        let mut decode =
            here(argodrive(["decode", "--plan", "p.json", "--prompt", "ab", "--max-new", "6", "--json", "--store"]));
        json_of(decode.arg(tiny_store()))
    };
    let plugged = decode();
    let state = json_of(&mut here(argodrive(["testbed", "unplug", "bed2", "--json"])));
    assert_eq!(state["drives"][1]["unplugged"], true);
    let without = decode();
    json_of(&mut here(argodrive(["testbed", "plug", "bed2", "--json"])));
    let again = decode();
    assert_eq!(ids(&without["token_ids"]), ids(&plugged["token_ids"]), "the other copies hold the same bytes");
    assert_eq!(ids(&again["token_ids"]), ids(&plugged["token_ids"]));
    let bytes = |run: &serde_json::Value, drive: usize| run["drives"][drive]["bytes"].as_u64().unwrap();
    assert!(bytes(&plugged, 1) > 0 && bytes(&again, 1) > 0);
    assert!(bytes(&without, 1) == 0 && bytes(&without, 0) > bytes(&plugged, 0), "{}", without["drives"]);
    let layout = without["settings"].as_array().unwrap().iter().find(|s| s["name"] == "layout").unwrap();
    assert_eq!(layout["verdict"], "proved", "{layout}");
    has(layout["seen"].as_str().unwrap(), &["bed2 was lost at its first read"]);
    drop(bed);
    assert!(!folder.join("argodrive-testbed").exists(), "nothing stays behind");
}
