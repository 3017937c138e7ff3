//! What README and docs promise: their commands parse, their links lead somewhere, the table of settings is that of the program.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::bench::config::RunConfig;
use argodrive::cli::command;
use argodrive::knob::Knob;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every page for people, with its path from the root.
fn pages() -> Vec<(PathBuf, String)> {
    let mut pages: Vec<PathBuf> =
        ["README.md", "results/README.md", "notebooks/README.md", "models/README.md", "experiments/README.md"]
            .iter()
            .map(PathBuf::from)
            .collect();
    for folder in ["docs", "results/samples"] {
        let entries = fs::read_dir(root().join(folder)).unwrap().map(|e| e.unwrap().file_name());
        pages.extend(
            entries.map(|name| Path::new(folder).join(name)).filter(|p| p.extension().is_some_and(|e| e == "md")),
        );
    }
    pages.sort();
    pages.into_iter().map(|p| (p.clone(), fs::read_to_string(root().join(&p)).unwrap())).collect()
}

/// Commands of code blocks, continuation lines joined, with what a shell would add cut off.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block: Option<bool> = None;
    let mut open: Option<String> = None;
    for line in text.lines() {
        if let Some(tag) = line.trim_start().strip_prefix("```") {
            block = block.is_none().then_some(matches!(tag, "" | "sh" | "bash" | "console"));
            open = None;
            continue;
        }
        if block != Some(true) {
            continue;
        }
        let line = line.trim_start().trim_start_matches("$ ");
        let mut whole = match open.take() {
            Some(begun) => format!("{begun} {}", line.trim_start()),
            None if line.starts_with("argodrive ") && !line.starts_with("argodrive 0.") => line.to_string(),
            None => continue,
        };
        if whole.ends_with('\\') {
            whole.pop();
            open = Some(whole.trim_end().to_string());
        } else {
            found.push(whole);
        }
    }
    found
}

/// Words as a shell makes them: quotes, comments, pipes and redirections; `<a b>` stands for one word.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, quote) {
            (c, Some(q)) if c == q => quote = None,
            ('"' | '\'', None) => quote = Some(c),
            ('<', None) if chars.peek().is_some_and(|c| c.is_alphabetic()) => quote = Some('>'),
            ('|' | '>' | '#' | ';' | '&', None) if words.last().unwrap().is_empty() || c != '#' => break,
            (' ', None) => words.push(String::new()),
            (c, _) => words.last_mut().unwrap().push(c),
        }
    }
    words.retain(|w| !w.is_empty() && w != "2");
    words
}

#[test]
fn every_command_on_a_page_is_one() {
    let mut checked = 0;
    for (page, text) in pages() {
        for line in commands(&text) {
            // `[...]` and `...` say that more may follow, as in a synopsis
            if line.contains(" ...") || line.contains('[') {
                continue;
            }
            checked += 1;
            if let Err(e) = command().try_get_matches_from(words(&line)) {
                panic!("{}: {line}\n{e}", page.display());
            }
        }
    }
    assert!(checked > 30, "only {checked} commands were found");
}

#[test]
fn links_between_pages_lead_somewhere() {
    let mut checked = 0;
    for (page, text) in pages() {
        for (at, _) in text.match_indices("](") {
            let target = text[at + 2..].split([')', '#']).next().unwrap();
            if target.is_empty() || target.contains("://") || target.contains(' ') {
                continue;
            }
            checked += 1;
            let path = root().join(page.parent().unwrap()).join(target);
            assert!(path.exists(), "{}: {target} does not exist", page.display());
        }
    }
    assert!(checked > 20, "only {checked} links were found");
}

#[test]
fn the_index_of_docs_names_every_page() {
    let index = fs::read_to_string(root().join("docs/README.md")).unwrap();
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name == "README.md" || index.contains(&format!("]({name})")), "docs/README.md does not name {name}");
    }
}

#[test]
fn the_page_of_settings_is_that_of_the_program() {
    let text = fs::read_to_string(root().join("docs/settings.md")).unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|l| l.starts_with("| `"))
        .map(|l| l.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let decode = command().find_subcommand("decode").unwrap().clone();
    let flags: BTreeSet<String> =
        decode.get_arguments().filter_map(|a| a.get_long()).map(|l| format!("`--{l}`")).collect();
    let config = serde_json::to_value(RunConfig::default()).unwrap();
    assert_eq!(rows.len(), Knob::ALL.len(), "one row for each setting");
    for (row, knob) in rows.iter().zip(Knob::ALL) {
        assert_eq!(row[0], format!("`{}`", knob.name()), "in the order of the program");
        assert_eq!(row[1], knob.about());
        assert!(flags.contains(row[2]), "{}: decode has no {}", knob.name(), row[2]);
        let place = row[3].trim_matches('`');
        if !row[3].contains("drives.toml") && !row[3].contains("`emulate`") {
            let place = place.split(" = ").next().unwrap().replace("[[", "").replace("]]", "");
            let place = place.replace('[', "").replace("] ", ".").replace('.', "/");
            assert!(config.pointer(&format!("/{place}")).is_some(), "{}: no key {place} in {config}", knob.name());
        }
        assert!(row[4].len() > 10, "{}: what proves it?", knob.name());
    }
}
