//! The project's own rules as a test: import direction, file size, where `unsafe` may stand, module headers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

/// Modules bottom up: each may use only those before it (ARCHITECTURE.md).
const ORDER: &[&str] = &[
    "sync", "ids", "knob", "clock", "bound", "stats", "sys", "files", "source", "model", "store", "drive", "io",
    "layout", "stage", "trace", "reader", "replay", "decode", "open", "bench", "report", "serve", "cli",
];
const MAX_LINES: usize = 500;
/// Where `unsafe` is allowed.
const UNSAFE: &[&str] = &["src/sys/", "src/io/buffer.rs", "src/io/uring.rs", "src/io/mmap.rs", "src/decode/kernels/"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &Path, out: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            rust_files(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

fn sources(folders: &[&str]) -> Vec<(String, String)> {
    let mut files = Vec::new();
    for folder in folders {
        rust_files(&root().join(folder), &mut files);
    }
    files.sort();
    assert!(!files.is_empty());
    files
        .into_iter()
        .map(|f| (f.strip_prefix(root()).unwrap().to_string_lossy().into_owned(), fs::read_to_string(&f).unwrap()))
        .collect()
}

/// The module of `src/<module>.rs` or `src/<module>/...`.
fn module_of(file: &str) -> &str {
    file.strip_prefix("src/").unwrap().split('/').next().unwrap().trim_end_matches(".rs")
}

/// Modules that a line names through `crate::`, braces included.
fn imports(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    let code: String = text
        .lines()
        .filter(|l| !l.trim_start().starts_with("//"))
        .flat_map(|l| [l.split(" // ").next().unwrap(), "\n"])
        .collect();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        if let Some(list) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut word = String::new();
            for c in list.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' | ' ' | '\n' | ':' if depth == 0 => out.push(std::mem::take(&mut word)),
                    c if depth == 0 => word.push(c),
                    _ => {}
                }
            }
            out.push(word);
        } else {
            out.push(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
    }
    out.retain(|w| ORDER.contains(&w.as_str()));
    out
}

#[test]
fn imports_point_down() {
    let rank = |m: &str| ORDER.iter().position(|o| *o == m);
    let mut checked = 0;
    for (file, text) in sources(&["src"]) {
        if ["src/lib.rs", "src/main.rs"].contains(&file.as_str()) {
            continue;
        }
        let module = module_of(&file);
        let own =
            rank(module).unwrap_or_else(|| panic!("{file}: module `{module}` is not in the order of tests/tidy.rs"));
        for used in imports(&text) {
            checked += 1;
            assert!(rank(&used).unwrap() <= own, "{file} uses crate::{used}, which lies above {module}");
        }
    }
    assert!(checked > 20, "the walk finds imports");
}

#[test]
fn the_import_walk_sees_braces_and_paths() {
    assert_eq!(imports("use crate::{ids::{LayerId, ExpertId}, source};"), ["ids", "source"]);
    assert_eq!(imports("let x = crate::sys::durable::f();\n// crate::cli"), ["sys"]);
}

#[test]
fn files_stay_small_and_say_what_they_are_for() {
    for (file, text) in sources(&["src", "tests", "benches"]) {
        let lines = text.lines().count();
        assert!(lines <= MAX_LINES, "{file} has {lines} lines; the cap is {MAX_LINES}");
        let head = text.lines().find(|l| !l.is_empty() && !l.starts_with("#!")).unwrap_or("");
        assert!(head.starts_with("//!"), "{file} must open with a `//!` paragraph");
        assert!(!file.contains("util"), "{file}: name it after what it does");
    }
}

#[test]
fn unsafe_stands_only_where_it_may() {
    for (file, text) in sources(&["src"]) {
        if UNSAFE.iter().any(|allowed| file.starts_with(allowed)) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap();
            let word = code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == "unsafe");
            assert!(!word, "{file}:{}: unsafe outside {UNSAFE:?}", number + 1);
        }
    }
}

#[test]
fn committed_notebooks_hold_no_outputs() {
    let mut checked = 0;
    for entry in fs::read_dir(root().join("notebooks")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "ipynb") {
            continue;
        }
        let notebook: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        for cell in notebook["cells"].as_array().unwrap().iter().filter(|c| c["cell_type"] == "code") {
            assert_eq!(cell["outputs"], serde_json::json!([]), "{}: strip the outputs", path.display());
            assert!(cell["execution_count"].is_null(), "{}: strip the execution counts", path.display());
        }
        checked += 1;
    }
    assert!(checked >= 3, "the notebooks are in notebooks/");
}
