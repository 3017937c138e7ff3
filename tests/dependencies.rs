//! Licences and sources of everything that Cargo.lock names, against deny.toml, and the lock file of the fuzzers, without any tool beyond cargo.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Whether an SPDX expression (or one with the older `/`) can be met with these licences alone.
fn met(expression: &str, allowed: &[&str]) -> bool {
    let text = expression.trim().replace('/', " OR ");
    for (word, all) in [(" OR ", false), (" AND ", true)] {
        let parts = at_top(&text, word);
        if parts.len() > 1 {
            let mut each = parts.iter().map(|part| met(part, allowed));
            return if all { each.all(|ok| ok) } else { each.any(|ok| ok) };
        }
    }
    match text.trim().strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        Some(inner) => met(inner, allowed),
        None => allowed.contains(&text.trim()),
    }
}

/// `text` cut at `word`, where that is in no parentheses.
fn at_top<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let (mut parts, mut from, mut depth) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ' ' if depth == 0 && at >= from && text[at..].starts_with(word) => {
                parts.push(&text[from..at]);
                from = at + word.len();
            }
            _ => {}
        }
    }
    parts.push(&text[from..]);
    parts
}

#[test]
fn expressions_are_read_as_they_are_meant() {
    let allowed = ["MIT", "Zlib"];
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("MIT AND GPL-3.0", false),
        ("(GPL-3.0 OR MIT) AND Zlib", true),
        ("(GPL-3.0 OR MIT) AND GPL-2.0", false),
    ] {
        assert_eq!(met(expression, &allowed), expected, "{expression}");
    }
}

#[test]
fn every_dependency_has_an_allowed_licence_and_comes_from_the_registry() {
    let root = env!("CARGO_MANIFEST_DIR");
    let deny: toml::Table = toml::from_str(&std::fs::read_to_string(format!("{root}/deny.toml")).unwrap()).unwrap();
    let allowed: Vec<&str> =
        deny["licenses"]["allow"].as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
    let denied: Vec<&str> =
        deny["bans"]["deny"].as_array().unwrap().iter().map(|v| v["crate"].as_str().unwrap()).collect();
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        .current_dir(root)
        .output()
        .unwrap();
    // other platforms' crates are in the lock file, and need not have been fetched
    let text = match out.status.success() {
        true => out.stdout,
        false => {
            let fetched = Command::new(env!("CARGO"))
                .args(["metadata", "--format-version", "1", "--locked"])
                .current_dir(root)
                .output()
                .unwrap();
            assert!(fetched.status.success(), "{}", String::from_utf8_lossy(&fetched.stderr));
            fetched.stdout
        }
    };
    let metadata: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100);
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let licence = package["license"].as_str().unwrap_or("none given");
        assert!(met(licence, &allowed), "{name}: {licence} is not allowed by deny.toml");
        assert!(!denied.contains(&name), "{name} is banned by deny.toml");
        let source = package["source"].as_str();
        assert!(name == "argodrive" || source.is_some_and(|s| s.starts_with("registry+")), "{name}: {source:?}");
    }
}

/// The packages of a lock file: names and versions, and what the one called argodrive depends on.
fn locked(path: &str) -> (BTreeMap<String, BTreeSet<String>>, BTreeSet<String>) {
    let lock: toml::Table = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let (mut versions, mut direct) = (BTreeMap::<String, BTreeSet<String>>::new(), BTreeSet::new());
    for package in lock["package"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        versions.entry(name.into()).or_default().insert(package["version"].as_str().unwrap().into());
        if name == "argodrive" {
            let dependencies = package["dependencies"].as_array().unwrap();
            // `name`, or `name version` where there are several
            let names = dependencies.iter().map(|d| d.as_str().unwrap().split(' ').next().unwrap().to_owned());
            direct.extend(names);
        }
    }
    (versions, direct)
}

/// `fuzz/run.sh` builds with `--locked`, and its lock file is not the one that cargo keeps up here.
#[test]
fn the_fuzzers_lock_file_has_the_same_dependencies() {
    let root = env!("CARGO_MANIFEST_DIR");
    let manifest: toml::Table =
        toml::from_str(&std::fs::read_to_string(format!("{root}/Cargo.toml")).unwrap()).unwrap();
    let mut wanted: BTreeSet<&String> = manifest["dependencies"].as_table().unwrap().keys().collect();
    for target in manifest["target"].as_table().unwrap().values() {
        wanted.extend(target["dependencies"].as_table().unwrap().keys());
    }
    let (ours, _) = locked(&format!("{root}/Cargo.lock"));
    let (fuzz, direct) = locked(&format!("{root}/fuzz/Cargo.lock"));
    let update = "run `cargo metadata` in fuzz/ and commit its Cargo.lock";
    assert_eq!(direct.iter().collect::<BTreeSet<_>>(), wanted, "{update}");
    for (name, versions) in &fuzz {
        if let Some(here) = ours.get(name) {
            assert!(versions.is_subset(here), "{name}: {versions:?} in fuzz/, {here:?} here; {update}");
        }
    }
}
