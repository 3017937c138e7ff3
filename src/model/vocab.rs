//! What both tokenizer files have in common: the bytes of every token, and the control tokens, found in text only
//! when the caller says so. Knows nothing of merges or of the files' formats.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Largest token id accepted (K3 has 163,840), so that a damaged file cannot ask for a huge table.
pub const MAX_TOKEN_ID: u32 = (1 << 21) - 1;
/// Most control tokens accepted. K3 has 256; published vocabularies stay below 2,000.
pub const MAX_CONTROL_TOKENS: usize = 1 << 14;

/// Why a tokenizer cannot be opened or a text not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// No known file is there.
    #[error("{folder}: neither tokenizer.json nor tiktoken.model is there; one of them must lie beside config.json")]
    NoFile {
        /// The folder that was searched.
        folder: PathBuf,
    },
    /// A file cannot be read.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A prompt names a control token that the model does not have.
    #[error(
        "{name} in the prompt is written like a special token and is none of this model's ({known}); correct it, or leave \
         --special out to take it as plain text"
    )]
    UnknownControl {
        /// What was written.
        name: String,
        /// Some of those that there are.
        known: String,
    },
    /// A file is larger than any real one.
    #[error("{file}: larger than {limit_bytes} bytes, which no tokenizer file needs; is it the right file?")]
    TooLarge {
        /// The file.
        file: PathBuf,
        /// The limit.
        limit_bytes: u64,
    },
    /// A file's content is wrong.
    #[error("{file}: {what}")]
    Content {
        /// The file.
        file: PathBuf,
        /// What is wrong, and where.
        what: String,
    },
    /// One line of a ranks file is wrong.
    #[error("{file}, line {line}: {what}")]
    Line {
        /// The file.
        file: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A text cannot be encoded.
    #[error("the text cannot be tokenised: {0}")]
    Text(String),
}

impl TokenizerError {
    /// Wrong content of `file`.
    pub(super) fn content(file: &Path, what: impl Into<String>) -> Self {
        Self::Content { file: file.to_path_buf(), what: what.into() }
    }
}

/// Reads a whole file of at most `limit_bytes`.
pub(super) fn read_bounded(file: &Path, limit_bytes: u64) -> Result<Vec<u8>, TokenizerError> {
    let io = |source| TokenizerError::Io { file: file.to_path_buf(), source };
    let mut bytes = Vec::new();
    File::open(file).map_err(io)?.take(limit_bytes + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit_bytes {
        return Err(TokenizerError::TooLarge { file: file.to_path_buf(), limit_bytes });
    }
    Ok(bytes)
}

/// [`read_bounded`], as UTF-8.
pub(super) fn read_text(file: &Path, limit_bytes: u64) -> Result<String, TokenizerError> {
    String::from_utf8(read_bounded(file, limit_bytes)?)
        .map_err(|e| TokenizerError::content(file, format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

/// A piece of text between or at control tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'t> {
    /// Ordinary text, not empty.
    Text(&'t str),
    /// A control token by name.
    Control(&'t str, u32),
}

/// Control tokens by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Controls {
    ids: HashMap<String, u32>,
    /// Names by first byte, longest first, so that the longest name at a place wins.
    by_first_byte: HashMap<u8, Vec<String>>,
}

impl Controls {
    /// A table of `(name, id)`. The error says which entry is wrong.
    pub(super) fn new(entries: impl IntoIterator<Item = (String, u32)>) -> Result<Self, String> {
        let mut controls = Self::default();
        for (name, id) in entries {
            let Some(&first) = name.as_bytes().first() else {
                return Err(format!("control token {id} has an empty name"));
            };
            if id > MAX_TOKEN_ID {
                return Err(format!("control token {name:?} has id {id}, more than {MAX_TOKEN_ID}"));
            }
            if controls.ids.insert(name.clone(), id).is_some() {
                return Err(format!("control token {name:?} is listed twice"));
            }
            if controls.ids.len() > MAX_CONTROL_TOKENS {
                return Err(format!("more than {MAX_CONTROL_TOKENS} control tokens"));
            }
            controls.by_first_byte.entry(first).or_default().push(name);
        }
        for names in controls.by_first_byte.values_mut() {
            names.sort_by_key(|n| std::cmp::Reverse(n.len()));
        }
        Ok(controls)
    }

    /// The id of a control token.
    pub(super) fn id(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    /// All names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.ids.keys().map(String::as_str)
    }

    /// Names and ids.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, u32)> {
        self.ids.iter().map(|(name, &id)| (name.as_str(), id))
    }

    /// The longest control name that `text` starts with.
    pub(super) fn at_start_of(&self, text: &str) -> Option<&str> {
        let names = self.by_first_byte.get(text.as_bytes().first()?)?;
        names.iter().map(String::as_str).find(|n| text.starts_with(*n))
    }

    /// Cuts `text` at control names: leftmost first, longest at each place.
    pub(super) fn split<'t>(&self, text: &'t str) -> Vec<Piece<'t>> {
        let mut pieces = Vec::new();
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            // A name starts with a whole character, so `at` is on a boundary whenever its byte is a first byte.
            let hit = match text.get(at..) {
                Some(rest) => self.at_start_of(rest).map(|name| &rest[..name.len()]),
                None => None,
            };
            let Some(name) = hit else {
                at += 1;
                continue;
            };
            if start < at {
                pieces.push(Piece::Text(&text[start..at]));
            }
            if let Some(id) = self.id(name) {
                pieces.push(Piece::Control(name, id));
            }
            at += name.len();
            start = at;
        }
        if start < text.len() {
            pieces.push(Piece::Text(&text[start..]));
        }
        pieces
    }
}

/// The bytes of every token.
#[derive(Clone, Debug)]
pub(super) struct TokenTable {
    bytes: Vec<u8>,
    /// Where each id's bytes lie; `None` for ids without a token.
    spans: Vec<Option<(u32, u32)>>,
    control: Vec<bool>,
}

impl TokenTable {
    /// A table of `(id, bytes, is control)`. The error says which id is wrong.
    pub(super) fn new(tokens: impl IntoIterator<Item = (u32, Vec<u8>, bool)>) -> Result<Self, String> {
        let mut table = Self { bytes: Vec::new(), spans: Vec::new(), control: Vec::new() };
        for (id, bytes, control) in tokens {
            if id > MAX_TOKEN_ID {
                return Err(format!("token id {id} is more than {MAX_TOKEN_ID}"));
            }
            let index = id as usize;
            if index >= table.spans.len() {
                table.spans.resize(index + 1, None);
                table.control.resize(index + 1, false);
            }
            let (start, len) = (u32::try_from(table.bytes.len()), u32::try_from(bytes.len()));
            let (Ok(start), Ok(len)) = (start, len) else {
                return Err("the tokens' bytes exceed 4 GiB".into());
            };
            if table.spans[index].replace((start, len)).is_some() {
                return Err(format!("token id {id} is used twice"));
            }
            table.control[index] = control;
            table.bytes.extend_from_slice(&bytes);
        }
        Ok(table)
    }

    /// One more than the largest id.
    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }

    /// A token's bytes; a control token's are its name.
    pub(super) fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        let (start, len) = (*self.spans.get(id as usize)?)?;
        self.bytes.get(start as usize..start as usize + len as usize)
    }

    /// Whether `id` is a control token.
    pub(super) fn is_control(&self, id: u32) -> bool {
        self.control.get(id as usize).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_name_at_the_leftmost_place_wins() {
        let c = Controls::new([("<a>".into(), 1), ("<a>b".into(), 2), ("é".into(), 3)]).unwrap();
        let pieces = c.split("è<a>bc<a>é<a");
        let want = [
            Piece::Text("è"),
            Piece::Control("<a>b", 2),
            Piece::Text("c"),
            Piece::Control("<a>", 1),
            Piece::Control("é", 3),
            Piece::Text("<a"),
        ];
        assert_eq!(pieces, want);
        assert!(c.split("").is_empty());
    }

    #[test]
    fn damaged_tables_are_refused() {
        assert!(Controls::new([(String::new(), 1)]).unwrap_err().contains("empty"));
        assert!(Controls::new([("a".into(), 1), ("a".into(), 2)]).unwrap_err().contains("twice"));
        assert!(Controls::new([("a".into(), u32::MAX)]).unwrap_err().contains("more than"));
        assert!(TokenTable::new([(u32::MAX, vec![], false)]).unwrap_err().contains("more than"));
        assert!(TokenTable::new([(1, vec![1], false), (1, vec![2], false)]).unwrap_err().contains("twice"));
        let t = TokenTable::new([(0, b"x".to_vec(), false), (3, b"<y>".to_vec(), true)]).unwrap();
        assert_eq!((t.len(), t.bytes_of(0), t.bytes_of(1), t.bytes_of(9)), (4, Some(&b"x"[..]), None, None));
        assert!(t.is_control(3) && !t.is_control(0) && !t.is_control(99));
    }

    #[test]
    fn oversized_files_are_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0u8; 11]).unwrap();
        assert!(matches!(read_bounded(file.path(), 10), Err(TokenizerError::TooLarge { limit_bytes: 10, .. })));
        assert_eq!(read_bounded(file.path(), 11).unwrap().len(), 11);
    }
}
