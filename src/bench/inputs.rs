//! Digests of the files that decide what a run does, so that somebody who finds its record later can tell whether they are
//! still the same. Reads files, judges nothing.

use super::config::RunConfig;
use crate::drive::spec::{DriveSpec, render};
use crate::open::draft_identity;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Largest file that is read for its digest.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// The drives with their paths and emulation, as drives.toml would have them.
pub const DRIVES: &str = "drives";
/// The text of a prompt file.
pub const PROMPT: &str = "prompt";
/// The texts of a prompt set.
pub const PROMPTS: &str = "prompts";
/// The table of guesses (`prefetch_table`).
pub const TABLE: &str = "prefetch_table";
/// The draft model, by its own id.
pub const DRAFT_MODEL: &str = "draft_model";
/// The counts that a pinned cache chooses by (`cache_heat`).
pub const CACHE_HEAT: &str = "cache_heat";

/// Hash of some bytes, as files name it.
pub fn digest(bytes: &[u8]) -> String {
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bytes))
}

/// Hash of a file.
pub fn file_digest(path: &Path) -> io::Result<String> {
    let bytes = std::fs::metadata(path)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("{bytes} bytes; at most {MAX_FILE_BYTES} are read")));
    }
    Ok(digest(&std::fs::read(path)?))
}

/// Hash of what drives are.
pub fn drives_digest(drives: &[DriveSpec]) -> String {
    digest(render(drives).as_bytes())
}

/// Tables that the reader is given, and the draft model. A file that cannot be read has no digest.
pub fn of_tables(config: &RunConfig) -> BTreeMap<String, String> {
    let files = [(TABLE, &config.reader.prefetch_table), (CACHE_HEAT, &config.reader.cache_heat)];
    let known = |(name, path): (&str, &Option<_>)| Some((name.to_string(), file_digest(path.as_deref()?).ok()?));
    let mut out: BTreeMap<String, String> = files.into_iter().filter_map(known).collect();
    let draft = config.draft.draft_model.as_deref().and_then(|p| draft_identity(p).ok());
    out.extend(draft.map(|d| (DRAFT_MODEL.to_string(), d)));
    out
}

/// Everything that a run's configuration names, and its drives.
pub fn of_run(config: &RunConfig, drives: Option<&[DriveSpec]>) -> BTreeMap<String, String> {
    let mut out = of_tables(config);
    out.extend(drives.map(|d| (DRIVES.to_string(), drives_digest(d))));
    let prompt = config.prompt_file.as_deref().and_then(|p| file_digest(p).ok());
    out.extend(prompt.map(|p| (PROMPT.to_string(), p)));
    out.extend(config.set_digest().map(|d| (PROMPTS.to_string(), d)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_are_there_have_a_digest() {
        let dir = tempfile::tempdir().unwrap();
        let prompt = dir.path().join("p.txt");
        std::fs::write(&prompt, "abc").unwrap();
        let mut config = RunConfig { prompt_file: Some(prompt.clone()), ..RunConfig::default() };
        config.reader.cache_heat = Some(dir.path().join("missing.csv"));
        assert_eq!(of_run(&config, None), BTreeMap::from([(PROMPT.to_string(), digest(b"abc"))]));
        let drive = DriveSpec { name: "a".into(), path: "/a".into(), emulate: None, faults: Vec::new() };
        let with = of_run(&config, Some(std::slice::from_ref(&drive)));
        assert_eq!(with[DRIVES], drives_digest(std::slice::from_ref(&drive)));
        assert_ne!(with[DRIVES], drives_digest(&[DriveSpec { path: "/b".into(), ..drive }]));
    }
}
