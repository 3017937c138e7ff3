//! Puts the source revision into the binary, so that records can say which code made them: the commit, with `-dirty` behind it
//! when what goes into the binary is not what was committed. A package says the commit it was made from.

use std::path::Path;
use std::process::Command;

/// Everything that ends up in the binary.
const SOURCES: [&str; 7] = ["src", "assets", "models/argo-mini", "layouts", "build.rs", "Cargo.toml", "Cargo.lock"];

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(out.stdout).ok()?.trim().to_string())
}

/// The commit of the work tree that holds this very file; a package unpacked inside another repository is not part of that.
fn of_repository() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let mut status = vec!["status", "--porcelain", "--"];
    status.extend(SOURCES);
    let dirty = git(&status).is_some_and(|changes| !changes.is_empty());
    // its last line moves with every commit and checkout; without a log, HEAD and what it points to
    let moves = ["logs/HEAD", "HEAD"].iter().filter_map(|name| git(&["rev-parse", "--git-path", name]));
    for path in moves.filter(|path| Path::new(path).exists()) {
        println!("cargo:rerun-if-changed={path}");
    }
    if let Some(branch) = git(&["symbolic-ref", "-q", "HEAD"])
        && let Some(path) = git(&["rev-parse", "--git-path", &branch])
        && Path::new(&path).exists()
    {
        println!("cargo:rerun-if-changed={path}");
    }
    Some(if dirty { format!("{commit}-dirty") } else { commit })
}

/// What `cargo package` noted: `{"git": {"sha1": "...", "dirty": true}, ...}`.
fn of_package() -> Option<String> {
    let note = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let (_, rest) = note.split_once("\"sha1\"")?;
    let commit = rest.split('"').nth(1)?.get(..12)?;
    let dirty =
        note.split_once("\"dirty\"").is_some_and(|(_, rest)| rest.trim_start_matches([':', ' ']).starts_with("true"));
    Some(if dirty { format!("{commit}-dirty") } else { commit.to_string() })
}

fn main() {
    let revision = of_package().or_else(of_repository).unwrap_or_else(|| "unknown".into());
    println!("cargo:rustc-env=ARGODRIVE_REVISION={revision}");
    for path in SOURCES.iter().filter(|path| Path::new(path).exists()) {
        println!("cargo:rerun-if-changed={path}");
    }
}
