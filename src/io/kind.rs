//! The engines by name, and what each can be combined with. Knows no file and starts nothing.

use serde::{Deserialize, Serialize};

/// How reads are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    /// Threads, each with one positional read at a time: works everywhere.
    #[default]
    Psync,
    /// One io_uring per drive, without threads (Linux).
    #[serde(rename = "io-uring")]
    Uring,
    /// Threads that copy from mapped files; here to be measured against.
    Mmap,
    /// Positional reads through the page cache; here to be measured against.
    Buffered,
}

impl EngineKind {
    /// All of them; [`EngineKind::index`] is the place in this list.
    pub const ALL: [EngineKind; 4] = [Self::Psync, Self::Uring, Self::Mmap, Self::Buffered];

    /// The name in options, flags and records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Psync => "psync",
            Self::Uring => "io-uring",
            Self::Mmap => "mmap",
            Self::Buffered => "buffered",
        }
    }

    /// The place in [`EngineKind::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether it can read past the page cache; the others are the page cache.
    pub const fn can_be_direct(self) -> bool {
        matches!(self, Self::Psync | Self::Uring)
    }
}

impl std::fmt::Display for EngineKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_configuration_and_places_those_of_the_list() {
        for (at, kind) in EngineKind::ALL.into_iter().enumerate() {
            assert_eq!(kind.index(), at);
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            assert_eq!(serde_json::from_value::<EngineKind>(kind.name().into()).unwrap(), kind);
        }
    }
}
