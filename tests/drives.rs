//! `argodrive drives` with the real binary: what it shows of this machine, snapshots, drift, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use prepared::{Drives, argodrive, easy_pace, has, json_of, outcome, refused};
use serde_json::{Value, json};
use std::fs;

#[test]
fn a_folder_is_shown_with_what_lies_behind_it() {
    let dir = prepared::folder();
    let seen = json_of(argodrive(["drives", "--json"]).arg(dir.path()));
    let drive = &seen["drives"][0];
    assert_eq!(drive["path"].as_str(), dir.path().to_str());
    assert!(drive["file_system"].is_string() && drive["free_bytes"].as_u64() > Some(0), "{drive}");
    // either its devices are known, or it says why not
    assert_ne!(drive["devices"].as_array().unwrap().is_empty(), drive["unknown"].is_null(), "{drive}");
    assert_eq!(seen["drift"], Value::Null);
    let (code, text, _) = outcome(argodrive(["drives"]).arg(dir.path()));
    assert_eq!(code, 0);
    assert!(text.lines().filter(|l| !l.contains(": ")).all(|l| l.chars().count() <= 80), "{text}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "looking leaves nothing");
    // without paths: every mount on a block device, or a sentence that there is none
    let (code, text, notes) = outcome(&mut argodrive(["drives"]));
    assert!(code == 0 && text.contains("device") || code == 2 && notes.contains("name the folders"), "{text}{notes}");
}

#[test]
fn two_folders_on_one_device_are_called_one_drive_unless_they_are_emulated() {
    let real = Drives::new(2, None);
    let seen = json_of(argodrive(["drives", "--json", "--drives"]).arg(&real.toml));
    let known = !seen["drives"][0]["devices"].as_array().unwrap().is_empty();
    if known {
        assert_eq!(seen["one_device"][0]["drives"], json!(["amber", "blue"]));
        let (_, text, _) = outcome(argodrive(["drives", "--drives"]).arg(&real.toml));
        has(&text, &["ONE DRIVE: amber, blue are folders on one device"]);
    }
    let paced = Drives::new(2, Some(easy_pace()));
    let seen = json_of(argodrive(["drives", "--json", "--drives"]).arg(&paced.toml));
    assert_eq!((&seen["one_device"], &seen["drives"][0]["emulated"]), (&json!([]), &json!(true)));
    let (_, text, _) = outcome(argodrive(["drives", "--drives"]).arg(&paced.toml));
    has(&text, &["amber (emulated)", "Emulated drives"]);
    assert!(!text.contains("ONE DRIVE"));
}

#[test]
fn drift_against_a_snapshot_is_exit_code_one() {
    let drives = Drives::new(2, Some(easy_pace()));
    let file = drives.dir.path().join("snapshot.json");
    let run = |flag: &str| {
        let mut command = argodrive(["drives", "--drives"]);
        outcome(command.arg(&drives.toml).arg(flag).arg(&file))
    };
    let (code, text, _) = run("--snapshot");
    assert_eq!(code, 0, "the first snapshot has nothing to differ from");
    has(&text, &["snapshot", "snapshot.json"]);
    let (code, text, _) = run("--check");
    assert_eq!((code, text.contains("no drift")), (0, true), "{text}");
    let changed =
        fs::read_to_string(&file).unwrap().replacen("\"ext4\"", "\"xfs\"", 1).replacen("\"blue\"", "\"red\"", 1);
    fs::write(&file, &changed).unwrap();
    let (code, text, _) = run("--check");
    assert_eq!(code, 1);
    has(&text, &["DRIFT: red: drive was there, is gone", "DRIFT: blue: drive was absent, is new"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), changed, "a check writes nothing");
    assert_eq!(run("--snapshot").0, 1, "said once");
    assert_eq!(run("--snapshot").0, 0, "and then it is how things are");
    fs::write(&file, "{\"version\": 9}").unwrap();
    refused(argodrive(["drives", "--drives"]).arg(&drives.toml).arg("--check").arg(&file), &["version 9", "newer"]);
    refused(argodrive(["drives", "--check", "/nowhere/s.json", "--drives"]).arg(&drives.toml), &["/nowhere/s.json"]);
    refused(
        argodrive(["drives", "--snapshot", "/proc/none/s", "--drives"]).arg(&drives.toml),
        &["--snapshot /proc/none/s"],
    );
}

#[test]
fn files_with_drives_in_drives_and_paths_that_are_not_there_are_refused() {
    let dir = prepared::folder();
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    let toml = dir.path().join("drives.toml");
    for (paths, words) in [
        (["a", "a/b"], vec!["drive `second`", "lies in the folder of drive `first`"]),
        (["a", "gone"], vec!["drive `second`", "gone", "mount it"]),
        (["a", "drives.toml"], vec!["drive `second`", "no folder"]),
    ] {
        let table = |name: &str, path: &str| format!("[[drive]]\nname = \"{name}\"\npath = \"{path}\"\n");
        fs::write(&toml, table("first", paths[0]) + &table("second", paths[1])).unwrap();
        for command in ["drives", "ceiling"] {
            let mut all = vec!["drives.toml"];
            all.extend(&words);
            refused(argodrive([command, "--drives"]).arg(&toml).current_dir(dir.path()), &all);
        }
    }
    refused(&mut argodrive(["drives", "/nowhere"]), &["/nowhere"]);
    refused(&mut argodrive(["ceiling", "--drives", "/nowhere.toml"]), &["/nowhere.toml"]);
}
