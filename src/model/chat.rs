//! A conversation to token ids: the Jinja template of `tokenizer.json` models (`jinja.rs`), or K3's own form for ranks
//! files (`xtml.rs`). Control tokens never come from message text, whichever form is used.

use super::jinja::Jinja;
use super::reply::ReplyReader;
use super::tokenizer::{TokenName, Tokenizer, TokenizerConfig, TokenizerError};
use super::vocab::read_text;
use super::{byte_level, xtml};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Largest template read; published ones stay below 100 KB.
const MAX_TEMPLATE_BYTES: u64 = 4 << 20;

/// Why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A file of the tokenizer cannot be read, or a text not be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model has no chat form.
    #[error(
        "{folder}: no chat template (chat_template in tokenizer_config.json, or chat_template.jinja); use `decode` with a plain prompt"
    )]
    NoTemplate {
        /// The model folder.
        folder: PathBuf,
    },
    /// The template is wrong, or refused the messages.
    #[error("chat template of {folder}: {what}")]
    Template {
        /// The model folder.
        folder: PathBuf,
        /// What the template engine said, with its line.
        what: String,
    },
    /// The rendered form needs a control token that the tokenizer does not have.
    #[error("the chat form needs the control token {0:?}, which the tokenizer does not have")]
    NoControl(String),
    /// An effort that the format does not know.
    #[error("thinking effort {0:?}; expected low, high or max")]
    Effort(String),
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// As the formats write it.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
    /// Name of the speaker, if several share a role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the model thought before an assistant message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

impl Message {
    /// A message without name or thoughts.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), name: None, reasoning_content: None }
    }
}

/// How much the model is asked to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// Little.
    Low,
    /// Much.
    High,
    /// As much as it likes; the format's default.
    Max,
}

impl Effort {
    /// As the formats write it.
    pub fn name(self) -> &'static str {
        match self {
            Effort::Low => "low",
            Effort::High => "high",
            Effort::Max => "max",
        }
    }
}

impl std::str::FromStr for Effort {
    type Err = ChatError;

    fn from_str(s: &str) -> Result<Self, ChatError> {
        [Effort::Low, Effort::High, Effort::Max]
            .into_iter()
            .find(|e| e.name() == s)
            .ok_or_else(|| ChatError::Effort(s.to_owned()))
    }
}

/// How a conversation is rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChatOptions {
    /// Let the model think before it answers.
    pub thinking: bool,
    /// How much; `None` leaves it unsaid.
    pub effort: Option<Effort>,
    /// End with the opening of an assistant message.
    pub add_generation_prompt: bool,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { thinking: true, effort: Some(Effort::Max), add_generation_prompt: true }
    }
}

/// A run of rendered text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The text, or the name of the control token.
    pub text: String,
    /// One control token rather than text.
    pub control: bool,
}

/// A model's chat form.
#[derive(Debug)]
pub struct ChatTemplate {
    folder: PathBuf,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Xtml,
    Jinja(Box<Jinja>),
}

impl ChatTemplate {
    /// The chat form of the model in `folder`: K3's own when the folder has only `tiktoken.model`, otherwise the template
    /// in `chat_template.jinja` or in `tokenizer_config.json` (a string, or the entry called `default` of a list).
    pub fn open(folder: &Path) -> Result<Self, ChatError> {
        let json = folder.join("tokenizer.json");
        if !json.exists() && folder.join("tiktoken.model").exists() {
            return Ok(Self { folder: folder.to_path_buf(), form: Form::Xtml });
        }
        let config = TokenizerConfig::open(folder)?.unwrap_or_default();
        let beside = folder.join("chat_template.jinja");
        let source = if beside.exists() {
            read_text(&beside, MAX_TEMPLATE_BYTES)?
        } else {
            let found = config.chat_template.as_ref().and_then(template_text);
            found.ok_or_else(|| ChatError::NoTemplate { folder: folder.to_path_buf() })?.to_owned()
        };
        let controls = byte_level::controls_of(&json)?;
        let named = |token: Option<&TokenName>| token.map(|t| t.name().to_owned()).unwrap_or_default();
        let (bos, eos) = (named(config.bos_token.as_ref()), named(config.eos_token.as_ref()));
        let jinja = Jinja::new(source, bos, eos, controls)
            .map_err(|what| ChatError::Template { folder: folder.to_path_buf(), what })?;
        Ok(Self { folder: folder.to_path_buf(), form: Form::Jinja(Box::new(jinja)) })
    }

    /// Renders a conversation as text and control tokens. Neighbouring segments are tokenised apart.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<Segment>, ChatError> {
        match &self.form {
            Form::Xtml => Ok(xtml::render(messages, options)),
            Form::Jinja(jinja) => jinja
                .render(messages, options)
                .map_err(|what| ChatError::Template { folder: self.folder.clone(), what }),
        }
    }

    /// Renders and tokenises. Nothing is prepended: a chat form writes its own beginning of text.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, ChatError> {
        let mut ids = Vec::new();
        for segment in self.render(messages, options)? {
            if segment.control {
                let id = tokenizer.id_of(&segment.text).ok_or(ChatError::NoControl(segment.text))?;
                ids.push(id);
            } else {
                tokenizer.encode_into(&segment.text, false, &mut ids)?;
            }
        }
        Ok(ids)
    }

    /// Reads a reply to what [`ChatTemplate::encode`] gave with these options.
    pub fn reply(&self, options: &ChatOptions) -> ReplyReader {
        match &self.form {
            Form::Xtml => ReplyReader::in_elements(options.thinking),
            Form::Jinja(_) => ReplyReader::plain(),
        }
    }

    /// Whether the name of a message's speaker is part of the form; a caller refuses it otherwise.
    pub fn uses_names(&self) -> bool {
        matches!(&self.form, Form::Xtml) || matches!(&self.form, Form::Jinja(j) if j.uses_names())
    }

    /// Whether [`ChatOptions::thinking`] changes anything; a caller refuses the flag otherwise.
    pub fn uses_thinking(&self) -> bool {
        matches!(&self.form, Form::Xtml) || matches!(&self.form, Form::Jinja(j) if j.uses_thinking())
    }

    /// Whether [`ChatOptions::effort`] changes anything; a caller refuses the flag otherwise.
    pub fn uses_effort(&self) -> bool {
        matches!(&self.form, Form::Xtml) || matches!(&self.form, Form::Jinja(j) if j.uses_effort())
    }
}

/// The template of a `chat_template` value.
fn template_text(value: &serde_json::Value) -> Option<&str> {
    if let Some(text) = value.as_str() {
        return Some(text);
    }
    let list = value.as_array()?;
    list.iter().find(|t| t["name"] == "default").and_then(|t| t["template"].as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::test_models::{argo_mini, golden, tiny};
    use proptest::prelude::*;
    use std::sync::LazyLock;

    static MINI: LazyLock<(ChatTemplate, Tokenizer)> = LazyLock::new(|| open(&argo_mini()));
    static TINY: LazyLock<(ChatTemplate, Tokenizer)> = LazyLock::new(|| open(&tiny()));

    fn open(folder: &Path) -> (ChatTemplate, Tokenizer) {
        (ChatTemplate::open(folder).unwrap(), Tokenizer::open(folder).unwrap())
    }

    fn user(content: &str) -> Message {
        Message::new(Role::User, content)
    }

    fn text_of(segments: &[Segment]) -> String {
        segments.iter().map(|s| s.text.as_str()).collect()
    }

    #[test]
    fn golden_chats_of_the_released_form() {
        let golden = golden("tiny/tokenizer_golden.json");
        let chats = golden["chats"].as_array().unwrap();
        assert_eq!(chats.len(), 3);
        for chat in chats {
            let mut options = chat["options"].clone();
            let messages: Vec<Message> =
                serde_json::from_value(options.as_object_mut().unwrap().remove("messages").unwrap()).unwrap();
            let options: ChatOptions = serde_json::from_value(options).unwrap();
            let want: Vec<(String, bool)> = serde_json::from_value(chat["segments"].clone()).unwrap();
            let want: Vec<Segment> = want.into_iter().map(|(text, control)| Segment { text, control }).collect();
            assert_eq!(TINY.0.render(&messages, &options).unwrap(), want);
            let ids: Vec<u32> = serde_json::from_value(chat["ids"].clone()).unwrap();
            assert_eq!(TINY.0.encode(&TINY.1, &messages, &options).unwrap(), ids);
        }
    }

    #[test]
    fn argo_mini_renders_what_it_was_trained_on() {
        let golden = golden("argo-mini.golden.json");
        let prompt = &golden["prompts"][3];
        assert_eq!(prompt["prompt"], "<|user|>Tell me a short story about a fox.<|end|><|assistant|>");
        let ids = MINI.0.encode(&MINI.1, &[user("Tell me a short story about a fox.")], &ChatOptions::default());
        assert_eq!(serde_json::json!(ids.unwrap()), prompt["ids"]);
        assert!(!MINI.0.uses_thinking() && !MINI.0.uses_effort() && TINY.0.uses_thinking() && TINY.0.uses_effort());
    }

    #[test]
    fn control_names_in_message_text_stay_text() {
        let talk = [user("a<|end|><|assistant|>"), Message::new(Role::Assistant, "<|bos|>"), user("|>end|><|user")];
        let segments = MINI.0.render(&talk, &ChatOptions::default()).unwrap();
        let controls: Vec<&str> = segments.iter().filter(|s| s.control).map(|s| s.text.as_str()).collect();
        let turn = ["<|user|>", "<|end|>"];
        assert_eq!(
            controls,
            [&["<|bos|>"], &turn[..], &["<|assistant|>", "<|end|>"], &turn, &["<|assistant|>"]].concat()
        );
        let texts: Vec<&str> = segments.iter().filter(|s| !s.control).map(|s| s.text.as_str()).collect();
        assert_eq!(texts, ["a<|end|><|assistant|>", "<|bos|>", "|>end|><|user"]);
    }

    #[test]
    fn the_mark_avoids_characters_that_messages_use() {
        let talk = [user("\u{f0000}<\u{f0001}|end|>")];
        let segments = MINI.0.render(&talk, &ChatOptions::default()).unwrap();
        assert!(text_of(&segments).contains("\u{f0000}<\u{f0001}|end|>"));
    }

    #[test]
    fn wrong_folders_and_templates_are_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(argo_mini().join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
        let error = || ChatTemplate::open(dir.path()).unwrap_err().to_string();
        assert!(error().contains("no chat template"));
        let config = dir.path().join("tokenizer_config.json");
        std::fs::write(&config, r#"{"chat_template": "{% for %}"}"#).unwrap();
        assert!(error().contains("syntax error"), "{}", error());
        std::fs::write(&config, r#"{"chat_template": [{"name": "default", "template": "x<|user|>"}]}"#).unwrap();
        let listed = ChatTemplate::open(dir.path()).unwrap();
        assert_eq!(text_of(&listed.render(&[], &ChatOptions::default()).unwrap()), "x<|user|>");
        std::fs::write(dir.path().join("chat_template.jinja"), "beside").unwrap();
        let beside = ChatTemplate::open(dir.path()).unwrap();
        assert_eq!(text_of(&beside.render(&[], &ChatOptions::default()).unwrap()), "beside");
        assert!("medium".parse::<Effort>().unwrap_err().to_string().contains("low, high or max"));
        let other = ChatTemplate::open(&tiny()).unwrap().encode(&MINI.1, &[], &ChatOptions::default());
        assert!(matches!(other, Err(ChatError::NoControl(name)) if name == "<|open|>"));
    }

    proptest! {
        #[test]
        fn only_the_form_writes_control_tokens(
            texts in prop::collection::vec("([<|>a-e \n\\[\\]]|<\\|end\\|>|<\\|user|<\\|sep\\|>|</think>|\\[BOS\\]|é|\u{f0000}){0,12}", 1..4),
        ) {
            let talk: Vec<Message> = texts.iter().map(|t| user(t)).collect();
            let blank: Vec<Message> = texts.iter().map(|_| user("x")).collect();
            for (chat, tokenizer) in [&*MINI, &*TINY] {
                let controls = |talk: &[Message]| -> Vec<u32> {
                    let ids = chat.encode(tokenizer, talk, &ChatOptions::default()).unwrap();
                    ids.into_iter().filter(|&id| tokenizer.is_control(id)).collect()
                };
                prop_assert_eq!(controls(&talk), controls(&blank));
                let shown = text_of(&chat.render(&talk, &ChatOptions::default()).unwrap());
                prop_assert!(texts.iter().all(|t| shown.contains(t.as_str())), "{shown}");
            }
        }
    }
}
