//! Text to token ids and back, for `tokenizer.json` (through the `tokenizers` crate) and `tiktoken.model`. Control
//! tokens are cut out here, before either encoder sees the text, so both encoders only ever know ordinary text.
//! Knows nothing of chat forms.

use super::byte_level;
use super::tiktoken::Ranks;
use super::vocab::{Controls, MAX_TOKEN_ID, Piece, TokenTable, read_text};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

pub use super::vocab::TokenizerError;

/// Largest `tokenizer_config.json` read. K3's has 3,478 bytes; some hold long chat templates.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Longest text encoded in one call: 4 million tokens at 16 bytes each, beyond any context.
const MAX_TEXT_BYTES: usize = 64 << 20;
/// Names of control tokens that an error lists.
const NAMES_IN_ERRORS: usize = 8;
/// Ids that a ranks file's vocabulary keeps for control tokens, named or not.
const RESERVED_IDS: u32 = 256;

/// The encoder behind a tokenizer.
#[derive(Debug)]
enum Encoder {
    ByteLevel(Box<byte_level::ByteLevel>),
    Ranks(Ranks),
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    controls: Controls,
    table: TokenTable,
    bos: Option<(String, u32)>,
    eos: Option<(String, u32)>,
    add_bos: bool,
}

/// What is read of `tokenizer_config.json`. Other keys belong to other programs.
#[derive(Debug, Default, Deserialize)]
pub(super) struct TokenizerConfig {
    #[serde(default)]
    pub(super) add_bos_token: Option<bool>,
    #[serde(default)]
    pub(super) bos_token: Option<TokenName>,
    #[serde(default)]
    pub(super) eos_token: Option<TokenName>,
    #[serde(default)]
    pub(super) chat_template: Option<serde_json::Value>,
    #[serde(default)]
    added_tokens_decoder: BTreeMap<String, AddedName>,
}

/// A special token is written as its name or as an object that holds it.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TokenName {
    Name(String),
    Object { content: String },
}

#[derive(Debug, Deserialize)]
struct AddedName {
    content: String,
}

impl TokenName {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Name(name) => name,
            Self::Object { content } => content,
        }
    }
}

impl TokenizerConfig {
    /// Reads `folder/tokenizer_config.json`; `None` when there is none.
    pub(super) fn open(folder: &Path) -> Result<Option<Self>, TokenizerError> {
        let file = folder.join("tokenizer_config.json");
        if !file.exists() {
            return Ok(None);
        }
        let text = read_text(&file, MAX_CONFIG_BYTES)?;
        serde_json::from_str(&text).map(Some).map_err(|e| TokenizerError::content(&file, e.to_string()))
    }
}

impl Tokenizer {
    /// Opens `folder/tokenizer.json`, or `folder/tiktoken.model` when there is no such file, with
    /// `folder/tokenizer_config.json` beside it (needed for the latter, because it names the control tokens).
    pub fn open(folder: &Path) -> Result<Self, TokenizerError> {
        let config_file = folder.join("tokenizer_config.json");
        let config = TokenizerConfig::open(folder)?;
        let (json, ranks) = (folder.join("tokenizer.json"), folder.join("tiktoken.model"));
        let (encoder, controls, table, file) = if json.exists() {
            let (encoder, controls, table) = byte_level::ByteLevel::open(&json)?;
            (Encoder::ByteLevel(Box::new(encoder)), controls, table, json)
        } else if ranks.exists() {
            let config = config.as_ref().ok_or_else(|| {
                TokenizerError::content(&config_file, "is missing; it names the control tokens of tiktoken.model")
            })?;
            let encoder = Ranks::open(&ranks)?;
            let wrong = |what: String| TokenizerError::content(&config_file, what);
            let controls = reserved_controls(encoder.len(), config).map_err(wrong)?;
            let words = encoder.tokens().map(|(id, bytes)| (id, bytes.to_vec(), false));
            let named = controls.entries().map(|(name, id)| (id, name.as_bytes().to_vec(), true));
            let table = TokenTable::new(words.chain(named)).map_err(|e| TokenizerError::content(&ranks, e))?;
            (Encoder::Ranks(encoder), controls, table, ranks)
        } else {
            return Err(TokenizerError::NoFile { folder: folder.to_path_buf() });
        };
        let config = config.unwrap_or_default();
        let known = |key: &str, token: &Option<TokenName>| match token {
            None => Ok(None),
            Some(token) => match controls.id(token.name()) {
                Some(id) => Ok(Some((token.name().to_owned(), id))),
                None => {
                    let what = format!("{key} {:?} is not a control token of {}", token.name(), file.display());
                    Err(TokenizerError::content(&config_file, what))
                }
            },
        };
        let (bos, eos) = (known("bos_token", &config.bos_token)?, known("eos_token", &config.eos_token)?);
        let add_bos = config.add_bos_token.unwrap_or(false);
        if add_bos && bos.is_none() {
            return Err(TokenizerError::content(&config_file, "add_bos_token is true but bos_token is missing"));
        }
        Ok(Self { encoder, controls, table, bos, eos, add_bos })
    }

    /// Token ids of a prompt: BOS first when `tokenizer_config.json` says `add_bos_token`, also when the text itself
    /// begins with it. Control tokens written in the text count as such only when `special` is true; then what is
    /// written like one (`<|name|>`) and is none is an error.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        if special {
            let pieces = self.controls.split(text);
            let unknown = pieces.iter().find_map(|piece| match piece {
                Piece::Text(text) => like_a_control(text),
                Piece::Control(..) => None,
            });
            if let Some(name) = unknown {
                return Err(TokenizerError::UnknownControl {
                    name: name.into(),
                    known: some_of(self.controls.names()),
                });
            }
        }
        let mut ids: Vec<u32> = self.bos.iter().filter(|_| self.add_bos).map(|bos| bos.1).collect();
        self.encode_into(text, special, &mut ids)?;
        Ok(ids)
    }

    /// [`Tokenizer::encode`] without BOS.
    pub fn encode_raw(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.encode_into(text, special, &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of `text` to `ids`.
    pub(super) fn encode_into(&self, text: &str, special: bool, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.len() > MAX_TEXT_BYTES {
            let what = format!("{} bytes in one text; at most {MAX_TEXT_BYTES}", text.len());
            return Err(TokenizerError::Text(what));
        }
        if !special {
            return self.encode_words(text, ids);
        }
        for piece in self.controls.split(text) {
            match piece {
                Piece::Text(text) => self.encode_words(text, ids)?,
                Piece::Control(_, id) => ids.push(id),
            }
        }
        Ok(())
    }

    fn encode_words(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match &self.encoder {
            Encoder::ByteLevel(encoder) => encoder.encode(text, &self.table, ids),
            Encoder::Ranks(encoder) => encoder.encode(text, ids),
        }
    }

    /// The bytes of one token, which may end inside a character; a control token's are its name. `None` for an id
    /// without a token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.table.bytes_of(id)
    }

    /// The text of `ids` as bytes, control tokens by name; ids without a token add nothing.
    pub fn decode_bytes(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().filter_map(|&id| self.token_bytes(id)).flatten().copied().collect()
    }

    /// [`Tokenizer::decode_bytes`] without control tokens: what a reader of a chat sees.
    pub fn decode_visible_bytes(&self, ids: &[u32]) -> Vec<u8> {
        let visible = ids.iter().filter(|&&id| !self.is_control(id));
        visible.filter_map(|&id| self.token_bytes(id)).flatten().copied().collect()
    }

    /// Whether `id` is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.table.is_control(id)
    }

    /// The id of a control token by name, e.g. `<|end|>`.
    pub fn id_of(&self, special: &str) -> Option<u32> {
        self.controls.id(special)
    }

    /// Beginning of text, when the tokenizer has one.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos.as_ref().map(|t| t.1)
    }

    /// End of text, when the tokenizer has one. A model may stop at others too (`generation_config.json`).
    pub fn eos_id(&self) -> Option<u32> {
        self.eos.as_ref().map(|t| t.1)
    }

    /// Whether [`Tokenizer::encode`] prepends BOS.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// The smallest id that stands for other bytes, or is a control token in one of the two only; `None` if there is none.
    pub fn first_difference(&self, other: &Self) -> Option<u32> {
        let ids = 0..self.vocab_size().max(other.vocab_size()) as u32;
        let what = |t: &Self, id| (t.token_bytes(id).map(<[u8]>::to_vec), t.is_control(id));
        ids.into_iter().find(|&id| what(self, id) != what(other, id))
    }

    /// One more than the largest id. The model's own vocabulary may be larger.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }
}

/// The 256 control tokens after `base` ranks: the named ones, and `<|reserved_token_{id}|>` for the others.
fn reserved_controls(base: u32, config: &TokenizerConfig) -> Result<Controls, String> {
    let mut names: BTreeMap<u32, String> = BTreeMap::new();
    let end = base.checked_add(RESERVED_IDS).filter(|&end| end <= MAX_TOKEN_ID + 1).ok_or("too many ranks")?;
    for (key, token) in &config.added_tokens_decoder {
        let id = key.parse().map_err(|_| format!("added_tokens_decoder: key {key:?} is not a token id"))?;
        if !(base..end).contains(&id) {
            return Err(format!("added_tokens_decoder: id {id} is outside {base}..{end}, the ids after the ranks"));
        }
        names.insert(id, token.content.clone());
    }
    Controls::new((base..end).map(|id| (names.remove(&id).unwrap_or_else(|| format!("<|reserved_token_{id}|>")), id)))
}

/// The first thing in `text` that is written like a control token.
fn like_a_control(text: &str) -> Option<&str> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    text.match_indices("<|").find_map(|(at, _)| {
        let end = at + 2 + text[at + 2..].find(|c| !inner(c))?;
        (end > at + 2 && text[end..].starts_with("|>")).then(|| &text[at..end + 2])
    })
}

/// The shortest names, a few of them, as a list in a sentence.
fn some_of<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = names.collect();
    names.sort_by_key(|n| (n.len(), *n));
    let shown = names.len().min(NAMES_IN_ERRORS);
    match names.len() - shown {
        0 => names[..shown].join(", "),
        more => format!("{} and {more} more", names[..shown].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::test_models::{argo_mini, golden, tiny};
    use proptest::prelude::*;
    use std::sync::LazyLock;

    static MINI: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::open(&argo_mini()).unwrap());
    static TINY: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::open(&tiny()).unwrap());

    fn ids(v: &serde_json::Value) -> Vec<u32> {
        serde_json::from_value(v.clone()).unwrap()
    }

    #[test]
    fn what_only_looks_like_a_control_token_is_found() {
        assert_eq!(like_a_control("a <|im_end|> b"), Some("<|im_end|>"));
        assert_eq!(like_a_control("<| <|| <|a b|> <|a <|a|"), None);
        assert_eq!(like_a_control("<|<|x-1|>"), Some("<|x-1|>"));
        let says = MINI.encode("<|user|>hello<|nobody|>", true).unwrap_err().to_string();
        assert!(says.contains("<|nobody|>") && says.contains("<|assistant|>"), "{says}");
        assert!(MINI.encode("<|user|>hello<|nobody|>", false).is_ok());
    }

    #[test]
    fn golden_texts_of_the_ranks_file() {
        let golden = golden("tiny/tokenizer_golden.json");
        let texts = golden["texts"].as_array().unwrap();
        assert_eq!(texts.len(), 21);
        for t in texts {
            let text = t["text"].as_str().unwrap();
            assert_eq!(TINY.encode(text, false).unwrap(), ids(&t["ids"]), "{text:?}");
            assert_eq!(TINY.decode_bytes(&ids(&t["ids"])), text.as_bytes());
        }
    }

    #[test]
    fn golden_prompts_and_texts_of_the_json_file() {
        for file in ["argo-mini.golden.json", "argo-mini-draft.golden.json"] {
            let golden = golden(file);
            let prompts = golden["prompts"].as_array().unwrap();
            assert_eq!(prompts.len(), 6);
            for p in prompts {
                let (prompt, text) = (p["prompt"].as_str().unwrap(), p["text"].as_str().unwrap());
                assert_eq!(MINI.encode(prompt, true).unwrap(), ids(&p["ids"]), "{prompt:?}");
                let out = MINI.decode_bytes(&ids(&p["greedy"]));
                assert_eq!(String::from_utf8_lossy(&out), text, "{prompt:?}");
            }
        }
    }

    #[test]
    fn control_names_in_user_text_are_ordinary_text() {
        for (tokenizer, text) in
            [(&*MINI, "a<|end|>b<|user|><|bos|>"), (&*TINY, "a<|close|>[BOS]<|reserved_token_520|>")]
        {
            let plain = tokenizer.encode_raw(text, false).unwrap();
            assert!(plain.iter().all(|&id| !tokenizer.is_control(id)), "{plain:?}");
            assert_eq!(tokenizer.decode_bytes(&plain), text.as_bytes());
            let special = tokenizer.encode_raw(text, true).unwrap();
            assert!(special.iter().filter(|&&id| tokenizer.is_control(id)).count() >= 3, "{special:?}");
            assert_eq!(tokenizer.decode_bytes(&special), text.as_bytes());
        }
    }

    #[test]
    fn facts_of_both_models() {
        assert_eq!((MINI.bos_id(), MINI.eos_id(), MINI.adds_bos(), MINI.vocab_size()), (Some(1), Some(2), true, 4096));
        assert_eq!(
            (TINY.bos_id(), TINY.eos_id(), TINY.adds_bos(), TINY.vocab_size()),
            (Some(512), Some(514), false, 768)
        );
        assert_eq!((MINI.id_of("<|end|>"), MINI.id_of("the"), TINY.id_of("<|sep|>")), (Some(5), None, Some(517)));
        assert_eq!((MINI.encode("", false).unwrap(), MINI.encode_raw("", true).unwrap()), (vec![1], vec![]));
        assert_eq!(TINY.token_bytes(520), Some(&b"<|reserved_token_520|>"[..]));
        assert_eq!(
            (TINY.token_bytes(768), TINY.decode_bytes(&[97, 768, 514, 98])),
            (None, b"a<|end_of_msg|>b".to_vec())
        );
        assert_eq!(TINY.decode_visible_bytes(&[97, 768, 514, 98]), b"ab");
    }

    #[test]
    fn folders_without_the_right_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = || Tokenizer::open(dir.path()).unwrap_err().to_string();
        assert!(error().contains("neither tokenizer.json nor tiktoken.model"));
        std::fs::copy(tiny().join("tiktoken.model"), dir.path().join("tiktoken.model")).unwrap();
        assert!(error().contains("tokenizer_config.json: is missing"));
        let config = dir.path().join("tokenizer_config.json");
        for (text, message) in [
            ("{", "EOF while parsing"),
            (r#"{"added_tokens_decoder": {"1": {"content": "x"}}}"#, "id 1 is outside 512..768"),
            (r#"{"added_tokens_decoder": {"x": {"content": "x"}}}"#, "key \"x\" is not a token id"),
            (
                r#"{"added_tokens_decoder": {"512": {"content": "x"}, "513": {"content": "x"}}}"#,
                "\"x\" is listed twice",
            ),
            (r#"{"bos_token": "[BOS]"}"#, "bos_token \"[BOS]\" is not a control token"),
            (r#"{"add_bos_token": true}"#, "bos_token is missing"),
        ] {
            std::fs::write(&config, text).unwrap();
            assert!(error().contains(message) && error().contains("tokenizer_config.json"), "{text}: {}", error());
        }
        std::fs::write(&config, r#"{"bos_token": {"content": "<|reserved_token_600|>"}, "add_bos_token": true}"#)
            .unwrap();
        assert_eq!(Tokenizer::open(dir.path()).unwrap().encode("a", false).unwrap(), [600, 97]);
    }

    #[test]
    fn a_huge_text_is_refused_before_work_begins() {
        let e = MINI.encode(&" ".repeat(MAX_TEXT_BYTES + 1), false).unwrap_err().to_string();
        assert!(e.contains("67108865 bytes"), "{e}");
    }

    fn arb_text() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<String>(),
            "([a-z <|>\\[\\]]|<\\|end\\|>|<\\|bos\\|>|<\\|open\\|>|\\[EOS\\]|é|读|🙂|\r\n){0,30}"
        ]
    }

    proptest! {
        #[test]
        fn text_comes_back_byte_for_byte_and_never_holds_control(text in arb_text()) {
            for tokenizer in [&*MINI, &*TINY] {
                let plain = tokenizer.encode_raw(&text, false).unwrap();
                prop_assert!(plain.iter().all(|&id| !tokenizer.is_control(id)));
                prop_assert_eq!(tokenizer.decode_bytes(&plain), text.as_bytes());
                let special = tokenizer.encode_raw(&text, true).unwrap();
                prop_assert_eq!(tokenizer.decode_bytes(&special), text.as_bytes());
            }
        }
    }
}
