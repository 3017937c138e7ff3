//! `tokenizer.json` of byte-level BPE models, through the `tokenizers` crate. The file is checked and reduced to its
//! ordinary words before the crate sees it: no added tokens, no truncation, no padding, no post-processing. What would
//! make tokens inexact (dropout, word affixes, parts that delete text) is refused. Ordinary text only.

use super::vocab::{Controls, TokenTable, TokenizerError, read_text};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;
use std::str::FromStr;

/// Largest `tokenizer.json` read; published ones stay below 40 MB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The crate's encoder, which knows no control tokens.
#[derive(Debug)]
pub(super) struct ByteLevel {
    words: tokenizers::Tokenizer,
    /// The file has no normalizer, so the tokens' bytes are the text's bytes.
    exact: bool,
}

/// One entry of `added_tokens`.
#[derive(Debug, Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

/// The control names of a `tokenizer.json`, read alone.
pub(super) fn controls_of(file: &Path) -> Result<Controls, TokenizerError> {
    #[derive(Deserialize)]
    struct OnlyAdded {
        #[serde(default)]
        added_tokens: Vec<AddedToken>,
    }
    let text = read_text(file, MAX_FILE_BYTES)?;
    let only: OnlyAdded = serde_json::from_str(&text).map_err(|e| TokenizerError::content(file, e.to_string()))?;
    controls(only.added_tokens).map_err(|e| TokenizerError::content(file, e))
}

fn controls(added: Vec<AddedToken>) -> Result<Controls, String> {
    if let Some(t) = added.iter().find(|t| t.single_word || t.lstrip || t.rstrip) {
        return Err(format!("added token {:?}: single_word, lstrip and rstrip are not supported", t.content));
    }
    Controls::new(added.into_iter().map(|t| (t.content, t.id)))
}

impl ByteLevel {
    /// Reads a `tokenizer.json`.
    pub(super) fn open(file: &Path) -> Result<(Self, Controls, TokenTable), TokenizerError> {
        let text = read_text(file, MAX_FILE_BYTES)?;
        Self::parse(&text).map_err(|e| TokenizerError::content(file, e))
    }

    fn parse(text: &str) -> Result<(Self, Controls, TokenTable), String> {
        let mut root: Map<String, Value> = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let added = match root.insert("added_tokens".into(), Value::Array(Vec::new())) {
            None | Some(Value::Null) => Vec::new(),
            Some(list) => serde_json::from_value(list).map_err(|e| format!("added_tokens: {e}"))?,
        };
        let controls = controls(added)?;
        for key in ["truncation", "padding", "post_processor", "decoder"] {
            root.insert(key.into(), Value::Null);
        }
        let exact = root.get("normalizer").is_none_or(Value::is_null);
        if !exact {
            check_parts(&root["normalizer"], "normalizer", &["NFC", "NFD", "NFKC", "NFKD"])?;
        }
        let splits = root.get("pre_tokenizer").unwrap_or(&Value::Null);
        if !check_parts(splits, "pre_tokenizer", &["Split", "ByteLevel", "Digits"])? {
            return Err("pre_tokenizer has no ByteLevel part; only byte-level BPE is supported".into());
        }
        let table = take_controls_from_words(&mut root, &controls)?;
        let text = serde_json::to_string(&root).map_err(|e| e.to_string())?;
        let words = tokenizers::Tokenizer::from_str(&text).map_err(|e| e.to_string())?;
        Ok((Self { words, exact }, controls, table))
    }

    /// Appends the tokens of ordinary text. Text without a normalizer must come out byte for byte, or it is an error:
    /// the crate drops what it has no token for.
    pub(super) fn encode(&self, text: &str, table: &TokenTable, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let encoding = self.words.encode_fast(text, false).map_err(|e| TokenizerError::Text(e.to_string()))?;
        if self.exact {
            let bytes: usize = encoding.get_ids().iter().map(|&id| table.bytes_of(id).map_or(0, <[u8]>::len)).sum();
            if bytes != text.len() {
                let what = format!("{bytes} of {} bytes have tokens; tokenizer.json loses text", text.len());
                return Err(TokenizerError::Text(what));
            }
        }
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}

/// Checks that a pipeline consists of `allowed` parts that keep all text, and says whether `ByteLevel` is among them.
fn check_parts(part: &Value, key: &str, allowed: &[&str]) -> Result<bool, String> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("missing");
    if kind == "Sequence" {
        let list = part.get("pretokenizers").or_else(|| part.get("normalizers")).and_then(Value::as_array);
        let list = list.ok_or_else(|| format!("{key}: a Sequence without its list of parts"))?;
        let mut found = false;
        for part in list {
            found |= check_parts(part, key, allowed)?;
        }
        return Ok(found);
    }
    if !allowed.contains(&kind) {
        return Err(format!("{key} of type {kind}; supported: Sequence, {}", allowed.join(", ")));
    }
    if part.get("behavior").and_then(Value::as_str) == Some("Removed") {
        return Err(format!("{key}: a Split that removes text cannot be decoded exactly"));
    }
    if part.get("add_prefix_space") == Some(&Value::Bool(true)) {
        return Err(format!("{key}: add_prefix_space changes the text and is not supported"));
    }
    Ok(kind == "ByteLevel")
}

/// Checks the model part, takes the control names out of its words and returns the bytes of every token.
fn take_controls_from_words(root: &mut Map<String, Value>, controls: &Controls) -> Result<TokenTable, String> {
    let model = root.get_mut("model").and_then(Value::as_object_mut).ok_or("model is missing")?;
    if model.get("type").and_then(Value::as_str) != Some("BPE") {
        return Err("model.type is not \"BPE\"; only byte-level BPE is supported".into());
    }
    for key in ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"] {
        let off = matches!(model.get(key), None | Some(Value::Null)) || model[key] == "" || model[key] == 0.0;
        if !off {
            return Err(format!("model.{key} is {}; byte-level BPE needs it to be null", model[key]));
        }
    }
    check_merges(model)?;
    let vocab = model.get_mut("vocab").and_then(Value::as_object_mut).ok_or("model.vocab is missing")?;
    for (name, id) in controls.entries() {
        match vocab.remove(name) {
            Some(other) if other.as_u64() != Some(u64::from(id)) => {
                return Err(format!("added token {name:?} has id {id}, but model.vocab says {other}"));
            }
            _ => {}
        }
    }
    let alphabet = byte_alphabet();
    if let Some((c, byte)) = alphabet.iter().find(|(c, _)| !vocab.contains_key(&c.to_string())) {
        return Err(format!("model.vocab has no token {:?} for the single byte {byte:#04x}", c.to_string()));
    }
    let byte_of: std::collections::HashMap<char, u8> = alphabet.into_iter().collect();
    let mut tokens = Vec::with_capacity(vocab.len());
    for (word, id) in vocab.iter() {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| format!("model.vocab: the id of {word:?} is not a token id"))?;
        let bytes: Option<Vec<u8>> = word.chars().map(|c| byte_of.get(&c).copied()).collect();
        let bytes = bytes.filter(|b| !b.is_empty());
        tokens.push((id, bytes.ok_or_else(|| format!("model.vocab: {word:?} is not a byte-level word"))?, false));
    }
    let named = controls.entries().map(|(name, id)| (id, name.as_bytes().to_vec(), true));
    TokenTable::new(tokens.into_iter().chain(named))
}

/// Checks that what is merged makes a word: the crate panics over one that is longer than all of them.
fn check_merges(model: &Map<String, Value>) -> Result<(), String> {
    let (Some(vocab), Some(merges)) = (model.get("vocab"), model.get("merges").and_then(Value::as_array)) else {
        return Ok(());
    };
    for merge in merges {
        // `"a b"`, or `["a", "b"]`
        let pair = match merge {
            Value::String(both) => both.split_once(' '),
            both => both.get(0).and_then(Value::as_str).zip(both.get(1).and_then(Value::as_str)),
        };
        let (a, b) = pair.ok_or_else(|| format!("model.merges: {merge} is no pair of words"))?;
        if vocab.get(format!("{a}{b}")).is_none() {
            return Err(format!("model.merges: {merge} makes no word of model.vocab"));
        }
    }
    Ok(())
}

/// The 256 characters that stand for bytes in byte-level vocabularies (GPT-2's table): printable Latin-1 bytes are
/// themselves, the others follow from U+0100 in order.
fn byte_alphabet() -> Vec<(char, u8)> {
    let mut next = 0x100u32;
    (0..=u8::MAX)
        .map(|byte| {
            let c = match byte {
                0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
                _ => {
                    next += 1;
                    // U+0100..U+0143 are all characters.
                    char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
                }
            };
            (c, byte)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::test_models::argo_mini;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    static MINI: LazyLock<Value> = LazyLock::new(|| {
        serde_json::from_str(&std::fs::read_to_string(argo_mini().join("tokenizer.json")).unwrap()).unwrap()
    });

    fn error_with(change: impl FnOnce(&mut Value)) -> String {
        let mut v = MINI.clone();
        change(&mut v);
        ByteLevel::parse(&v.to_string()).expect_err("must be refused")
    }

    #[test]
    fn what_would_make_tokens_inexact_is_refused_by_name() {
        assert!(error_with(|v| v["model"]["type"] = "Unigram".into()).contains("model.type"));
        assert!(error_with(|v| v["model"]["dropout"] = 0.1.into()).contains("model.dropout is 0.1"));
        assert!(error_with(|v| v["model"]["unk_token"] = "<unk>".into()).contains("model.unk_token"));
        assert!(error_with(|v| v["normalizer"] = serde_json::json!({"type": "Lowercase"})).contains("Lowercase"));
        assert!(error_with(|v| v["pre_tokenizer"] = Value::Null).contains("pre_tokenizer of type missing"));
        assert!(
            error_with(|v| v["pre_tokenizer"]["pretokenizers"][1] =
                serde_json::json!({"type": "Digits", "individual_digits": true}))
            .contains("no ByteLevel")
        );
        assert!(
            error_with(|v| v["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed".into()).contains("removes")
        );
        assert!(
            error_with(|v| v["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true.into())
                .contains("add_prefix")
        );
        assert!(error_with(|v| v["added_tokens"][3]["id"] = 9.into()).contains("\"<|user|>\" has id 9"));
        assert!(error_with(|v| v["added_tokens"][3]["rstrip"] = true.into()).contains("rstrip"));
        assert!(error_with(|v| v["added_tokens"][3] = 5.into()).contains("added_tokens"));
        assert!(error_with(|v| v["model"]["vocab"]["the"] = 7.into()).contains("used twice"));
        assert!(error_with(|v| v["model"]["vocab"]["the"] = (-7).into()).contains("\"the\" is not a token id"));
        assert!(error_with(|v| v["model"]["vocab"]["x y"] = 5000.into()).contains("not a byte-level word"));
        assert!(error_with(|v| v["model"]["vocab"]["xyzzy"] = (1u32 << 30).into()).contains("more than"));
        let e = error_with(|v| drop(v["model"]["vocab"].as_object_mut().unwrap().remove("!")));
        assert!(e.contains("single byte 0x21"), "{e}");
    }

    #[test]
    fn merges_that_build_a_control_name_are_refused() {
        error_with(|v| v["model"]["merges"].as_array_mut().unwrap().push(serde_json::json!(["<|", "end|>"])));
    }

    #[test]
    fn truncation_and_padding_of_the_file_do_not_act() {
        let mut v = MINI.clone();
        v["truncation"] =
            serde_json::json!({"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
        let (encoder, _, table) = ByteLevel::parse(&v.to_string()).unwrap();
        let mut ids = Vec::new();
        encoder.encode("a long enough text", &table, &mut ids).unwrap();
        assert!(ids.len() > 2);
    }

    #[test]
    fn the_alphabet_has_every_byte_once() {
        let chars: std::collections::BTreeSet<char> = byte_alphabet().into_iter().map(|a| a.0).collect();
        assert_eq!(chars.len(), 256);
        assert!(byte_alphabet().contains(&('Ġ', b' ')) && byte_alphabet().contains(&('Ċ', b'\n')));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn damaged_files_are_errors_and_never_panics(
            at in any::<prop::sample::Index>(), len in 0usize..40, with in "[\\[\\]{}\",:0-9a-z]{0,8}", head in any::<bool>(),
        ) {
            // The head of the file holds everything but words and merges.
            let text = MINI.to_string();
            let range = if head { 2000.min(text.len()) } else { text.len() };
            let mut bytes = text.into_bytes();
            let start = at.index(range);
            bytes.splice(start..(start + len).min(range), with.bytes());
            let text = String::from_utf8_lossy(&bytes);
            if let Ok((encoder, _, table)) = ByteLevel::parse(&text) {
                let _ = encoder.encode("The router 读 12<|end|>", &table, &mut Vec::new());
            }
        }
    }
}
