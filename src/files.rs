//! Text files that people hand in: read with errors in plain words, and told apart, so that a file of another kind is called by its
//! name. Knows the kinds of file of this program by a few words in them, and no format.

use std::io::{self, ErrorKind};
use std::path::Path;

/// Beginning of a text that is looked at.
const LOOKED_AT: usize = 64 << 10;

/// What a file is meant to be, or seems to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `drives.toml`.
    Drives,
    /// A layout policy.
    Policy,
    /// A plan.
    Plan,
    /// What is hot.
    Heat,
    /// What `ceiling` measured.
    Profile,
    /// Settings of a run.
    Settings,
    /// The record of a run.
    Record,
    /// An experiment.
    Experiment,
    /// A store's manifest.
    Store,
    /// A model's config.json.
    Model,
}

impl Kind {
    /// Its name, and where such a file comes from.
    pub fn name(self) -> &'static str {
        match self {
            Self::Drives => "a drives file (TOML with a [[drive]] table for each drive: name and path)",
            Self::Policy => "a layout policy (TOML, such as layouts/full-mirror.toml)",
            Self::Plan => "a plan (`argodrive plan --out` writes it)",
            Self::Heat => "a heat profile (`argodrive heat --out` writes it)",
            Self::Profile => "a profile of drives (`argodrive ceiling` writes it)",
            Self::Settings => "settings of a run (TOML) or the record of one (record.json)",
            Self::Record => "the record of a run",
            Self::Experiment => "an experiment (TOML, such as experiments/mirror.toml)",
            Self::Store => "the manifest of a store; the store is the folder that holds it",
            Self::Model => "a model's config.json",
        }
    }

    /// What a text seems to be; `None` = nothing of this program.
    pub fn of(text: &str) -> Option<Self> {
        let end = (0..=LOOKED_AT.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        let text = &text[..end];
        if text.trim_start().starts_with('{') {
            let has = |keys: &[&str]| keys.iter().all(|key| text.contains(&format!("\"{key}\"")));
            let kinds: [(&[&str], Self); 6] = [
                (&["arm", "rates", "token_hash"], Self::Record),
                (&["planner", "expert_bytes"], Self::Plan),
                (&["trunk_format", "moe_layers"], Self::Store),
                (&["sources", "domains"], Self::Heat),
                (&["method", "together"], Self::Profile),
                (&["architectures"], Self::Model),
            ];
            return kinds.into_iter().find(|(keys, _)| has(keys)).map(|(_, kind)| kind);
        }
        let begins = |word: &str| text.lines().any(|line| line.trim_start().starts_with(word));
        if begins("[experiment]") {
            return Some(Self::Experiment);
        }
        if begins("[[drive]]") && !begins("policy") {
            return Some(Self::Drives);
        }
        begins("policy =").then_some(Self::Policy)
    }
}

/// Reads a text file. What is no file, and what is no text, is said so.
pub fn read_text(path: &Path) -> io::Result<String> {
    std::fs::read_to_string(path).map_err(|e| match e.kind() {
        ErrorKind::IsADirectory => io::Error::new(e.kind(), "this is a folder; give a file"),
        ErrorKind::InvalidData => io::Error::new(e.kind(), "this is no text (not UTF-8)"),
        _ => e,
    })
}

/// Why a text that could not be read as `wanted` is of another kind, in words; `None` where it may be a bad one of that kind.
pub fn instead(text: &str, wanted: Kind) -> Option<String> {
    if text.trim().is_empty() {
        return Some(format!("the file is empty; give {}", wanted.name()));
    }
    let seen = Kind::of(text);
    let same = seen == Some(wanted) || (wanted == Kind::Settings && seen == Some(Kind::Record));
    match seen {
        Some(seen) if !same => Some(format!("this is {}; give {}", seen.name(), wanted.name())),
        Some(_) => None,
        None => {
            let json = text.trim_start().starts_with('{');
            let toml = matches!(wanted, Kind::Drives | Kind::Policy | Kind::Experiment);
            (json && toml).then(|| format!("this is JSON; give {}", wanted.name()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_this_program_are_told_apart() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        for (file, kind) in [
            ("layouts/full-mirror.toml", Kind::Policy),
            ("layouts/barrier.toml", Kind::Policy),
            ("experiments/mirror.toml", Kind::Experiment),
            ("models/argo-mini/config.json", Kind::Model),
        ] {
            let text = read_text(&root.join(file)).unwrap();
            assert_eq!(Kind::of(&text), Some(kind), "{file}");
            assert_eq!(instead(&text, kind), None);
            assert!(instead(&text, Kind::Plan).unwrap().contains("; give a plan (`argodrive plan"));
        }
        assert_eq!(Kind::of("[[drive]]\nname = \"a\"\n"), Some(Kind::Drives));
        assert_eq!(instead("{\"a\": 1}", Kind::Drives).as_deref().map(|s| s.starts_with("this is JSON")), Some(true));
        assert_eq!((instead("{\"a\": 1}", Kind::Plan), Kind::of("hello")), (None, None));
        assert!(instead(" \n", Kind::Heat).unwrap().starts_with("the file is empty"));
        assert!(read_text(root).unwrap_err().to_string().contains("folder"));
    }
}
