//! Prompts of a run: one text, or a set of texts that share its passes. A set is a JSON-lines file (each line
//! `{"prompt": "..."}`, perhaps with a `name`, or a text in quotes) or a folder of `.txt` files, each one prompt. Faults name
//! the line or file.

use super::config::{ConfigError, RunConfig};
use crate::bench::inputs::digest;
use crate::decode::batch::MAX_LANES;
use crate::open::{Model, OpenError};
use crate::reader::PrefetchPolicy;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Ending of a file that is a set.
pub const SET_ENDING: &str = "jsonl";
/// Largest set that is read.
const MAX_SET_BYTES: u64 = 256 << 20;
/// Most prompts of a set.
const MAX_PROMPTS: usize = 1 << 16;

/// One text of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedText {
    /// What faults and tables call it: its name, file or line.
    pub name: String,
    /// The text.
    pub text: String,
}

/// Prompts as a model reads them, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// What each is called.
    pub names: Vec<String>,
    /// Its tokens, at least one.
    pub tokens: Vec<Vec<u32>>,
}

/// Prompts cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The configuration or a file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tokenizer.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A prompt is empty or does not fit.
    #[error("{0}")]
    Prompt(String),
}

/// Whether a file is a set by its name.
pub fn is_set(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == SET_ENDING)
}

/// The texts of a JSON-lines file's content. Faults begin with the line.
pub fn parse(bytes: &[u8]) -> Result<Vec<NamedText>, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Object {
        prompt: String,
        name: Option<String>,
    }
    let mut out = Vec::new();
    let body = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
    for (line, bytes) in (1..).zip(body.split(|b| *b == b'\n')) {
        let fault = |why: String| format!("line {line}: {why}");
        let text =
            std::str::from_utf8(bytes).map_err(|e| fault(format!("not UTF-8 (byte {})", e.valid_up_to())))?.trim();
        if text.is_empty() {
            continue;
        }
        let wanted = "expected {\"prompt\": \"...\"} or a text in quotes";
        let prompt = match text.as_bytes()[0] {
            b'"' => serde_json::from_str(text).map(|prompt| Object { prompt, name: None }),
            b'{' => serde_json::from_str::<Object>(text),
            _ => return Err(fault(wanted.into())),
        };
        let prompt = prompt.map_err(|e| fault(format!("{e}; {wanted}")))?;
        if prompt.prompt.trim().is_empty() {
            return Err(fault("the prompt is empty; give it some text, or take the line out".into()));
        }
        let name = prompt.name.unwrap_or_else(|| format!("line {line}"));
        out.push(NamedText { name, text: prompt.prompt });
        if out.len() > MAX_PROMPTS {
            return Err(fault(format!("more than {MAX_PROMPTS} prompts; cut the set into several")));
        }
    }
    if out.is_empty() { Err("holds no prompt".into()) } else { Ok(out) }
}

/// The texts of a set.
pub fn load(path: &Path) -> Result<Vec<NamedText>, ConfigError> {
    let fault = |path: &Path, why: String| ConfigError::Contradiction(format!("--prompts {}: {why}", path.display()));
    let read = |path: &Path| {
        let bytes = std::fs::metadata(path).map_err(|e| fault(path, e.to_string()))?.len();
        if bytes > MAX_SET_BYTES {
            return Err(fault(path, format!("{bytes} bytes; at most {MAX_SET_BYTES} are read")));
        }
        std::fs::read(path).map_err(|e| fault(path, e.to_string()))
    };
    if !path.is_dir() {
        if !is_set(path) {
            let why =
                "a set is a .jsonl file or a folder of .txt files; a file with one prompt goes with --prompt-file";
            return Err(fault(path, why.into()));
        }
        return parse(&read(path)?).map_err(|why| fault(path, why));
    }
    let entries = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut files: Vec<PathBuf> =
        entries.map_err(|e| fault(path, e.to_string()))?.into_iter().map(|e| e.path()).collect();
    files.retain(|p| p.extension().is_some_and(|e| e == "txt"));
    files.sort();
    if files.is_empty() {
        return Err(fault(path, "the folder has no .txt file; each holds one prompt".into()));
    }
    let one = |file: &PathBuf| {
        let text = String::from_utf8(read(file)?)
            .map_err(|e| fault(file, format!("not UTF-8 (byte {})", e.utf8_error().valid_up_to())))?;
        match text.trim().is_empty() {
            true => Err(fault(file, "the prompt is empty; give it some text, or take the file away".into())),
            false => Ok(NamedText {
                name: file.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default(),
                text,
            }),
        }
    };
    files.iter().map(one).collect()
}

impl RunConfig {
    /// Whether `parallel` is in range and has what it needs.
    pub(super) fn check_lanes(&self) -> Result<(), ConfigError> {
        let why = match self.model.parallel {
            0 => "--parallel must be at least 1",
            1 => return Ok(()),
            n if n > MAX_LANES => "--parallel: at most 1024",
            _ if self.prompts.is_none() => {
                "--parallel lets several texts share passes, and there is one prompt; give a set with --prompts"
            }
            _ if self.reader.prefetch == PrefetchPolicy::Draft => {
                "prefetch draft guesses from one text, and --parallel runs several; next-router guesses for all of them"
            }
            _ => return Ok(()),
        };
        Err(ConfigError::Contradiction(why.into()))
    }

    /// The texts of the run: those of its set, or its one prompt. Refuses more lanes than there are texts: no pass could be
    /// that wide.
    pub fn texts(&self) -> Result<Vec<NamedText>, ConfigError> {
        let texts = match &self.prompts {
            Some(path) => load(path)?,
            None => vec![NamedText { name: "prompt".into(), text: self.prompt_text()? }],
        };
        let (lanes, count) = (self.model.parallel, texts.len());
        if lanes > count {
            return Err(ConfigError::Contradiction(format!(
                "--parallel {lanes}: there are {count} prompts, so no pass could be shared by more; give --parallel {count} or \
                 more prompts"
            )));
        }
        Ok(texts)
    }

    /// Digest of the texts of the set, if the run has one.
    pub fn set_digest(&self) -> Option<String> {
        let texts = load(self.prompts.as_deref()?).ok()?;
        let digests: Vec<String> = texts.iter().map(|t| digest(t.text.as_bytes())).collect();
        Some(digest(digests.join("\n").as_bytes()))
    }
}

/// The prompts of a run as tokens, each of which fits the context.
pub fn encode(model: &Model, config: &RunConfig) -> Result<Encoded, PromptError> {
    let longest = model.decoder.config().max_position_embeddings;
    let room = match config.model.max_context {
        0 => longest,
        context => context.min(longest),
    };
    let whose = |name: &str| match &config.prompts {
        Some(path) => format!("--prompts {}: {name}: the prompt", path.display()),
        None => "the prompt".into(),
    };
    let mut out = Encoded::default();
    for NamedText { name, text } in config.texts()? {
        let tokens = model.encode_prompt(&text, config.special)?;
        if tokens.is_empty() {
            return Err(PromptError::Prompt(format!("{} is empty; give at least one token of text", whose(&name))));
        }
        if tokens.len() > room {
            let (whose, len) = (whose(&name), tokens.len());
            return Err(PromptError::Prompt(match room == longest {
                true => format!("{whose} has {len} tokens, the model was made for {longest}; shorten the prompt"),
                false => format!(
                    "{whose} has {len} tokens, --max-context is {room}; shorten the prompt or raise --max-context (to \
                     {longest} at most)"
                ),
            }));
        }
        out.names.push(name);
        out.tokens.push(tokens);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_objects_or_quoted_texts_and_faults_name_them() {
        let text = "\u{feff}{\"prompt\": \"one\"}\r\n\n\"two\\n\"\n{\"name\": \"third\", \"prompt\": \"3\"}";
        let named = |name: &str, text: &str| NamedText { name: name.into(), text: text.into() };
        assert_eq!(
            parse(text.as_bytes()).unwrap(),
            [named("line 1", "one"), named("line 3", "two\n"), named("third", "3")]
        );
        for (bytes, expected) in [
            (&b"\"a\"\nplain text\n"[..], "line 2: expected {\"prompt\""),
            (b"{\"prompt\": \"a\"}\n{\"promt\": \"b\"}", "line 2: unknown field `promt`"),
            (b"{\"prompt\": \"a\", \"max_new\": 3}", "line 1: unknown field `max_new`"),
            (b"{\"name\": \"a\"}", "line 1: missing field `prompt`"),
            (b"\"a\"\n\n\" \\n\"", "line 3: the prompt is empty"),
            (b"\"a\"\n\"b\xff\"", "line 2: not UTF-8 (byte 2)"),
            (b"\"a\n", "line 1: EOF"),
            (b"\n \n", "holds no prompt"),
        ] {
            let why = parse(bytes).unwrap_err();
            assert!(why.starts_with(expected), "{why}");
        }
    }

    #[test]
    fn a_file_of_another_kind_is_refused_and_a_folder_gives_its_texts() {
        let dir = tempfile::tempdir().unwrap();
        let says = |name: &str| load(&dir.path().join(name)).unwrap_err().to_string();
        std::fs::write(dir.path().join("b.txt"), "two").unwrap();
        assert!(says("b.txt").contains("--prompt-file"));
        assert!(says("missing.jsonl").contains("missing.jsonl"));
        std::fs::write(dir.path().join("a.txt"), "one").unwrap();
        let names: Vec<String> = load(dir.path()).unwrap().into_iter().map(|t| t.name).collect();
        assert_eq!(names, ["a", "b"]);
        std::fs::write(dir.path().join("c.txt"), " ").unwrap();
        let why = load(dir.path()).unwrap_err().to_string();
        assert!(why.contains("c.txt") && why.contains("is empty"), "{why}");
    }
}
