//! Tokens of a reply to what a reader sees: thoughts and answer apart. K3's form writes both as elements whose brackets are
//! control tokens (`xtml.rs`); a reply in any other form is all answer. Control tokens are never shown.

use super::text_stream::TextStream;
use super::tokenizer::Tokenizer;
use super::xtml::{CLOSE, OPEN, SEP};

/// What a piece of a reply is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// What the model thought.
    Thoughts,
    /// What it says.
    Answer,
}

/// Where in the form the reply is.
#[derive(Clone, Debug)]
enum At {
    /// In an element; `None` = one that is not shown, or between elements.
    In(Option<Channel>),
    /// In a tag, whose name is being read.
    Tag { opens: bool, name: Vec<u8> },
}

/// Reads one reply, token by token.
#[derive(Clone, Debug)]
pub struct ReplyReader {
    elements: bool,
    at: At,
    thoughts: TextStream,
    answer: TextStream,
}

impl ReplyReader {
    /// A reply that is all answer.
    pub fn plain() -> Self {
        Self { elements: false, ..Self::in_elements(false) }
    }

    /// A reply in K3's form, whose prompt has opened the model's thoughts or its answer.
    pub(super) fn in_elements(thinking: bool) -> Self {
        let first = if thinking { Channel::Thoughts } else { Channel::Answer };
        let (thoughts, answer) = (TextStream::new(), TextStream::new());
        Self { elements: true, at: At::In(Some(first)), thoughts, answer }
    }

    /// Adds a token and returns the text that is now certain; empty while a character is unfinished or nothing is shown.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> (Channel, String) {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        if tokenizer.is_control(id) {
            if self.elements {
                self.control(bytes);
            }
            return (Channel::Answer, String::new());
        }
        match &mut self.at {
            At::In(Some(Channel::Thoughts)) => (Channel::Thoughts, self.thoughts.push(bytes)),
            At::In(Some(Channel::Answer)) => (Channel::Answer, self.answer.push(bytes)),
            At::In(None) => (Channel::Answer, String::new()),
            At::Tag { name, .. } => {
                name.extend_from_slice(bytes);
                (Channel::Answer, String::new())
            }
        }
    }

    fn control(&mut self, name: &[u8]) {
        if name == OPEN.as_bytes() || name == CLOSE.as_bytes() {
            self.at = At::Tag { opens: name == OPEN.as_bytes(), name: Vec::new() };
        } else if let (true, At::Tag { opens, name }) = (name == SEP.as_bytes(), &self.at) {
            // attributes follow the name behind a space
            self.at = At::In(match (opens, name.split(|b| *b == b' ').next()) {
                (true, Some(b"think")) => Some(Channel::Thoughts),
                (true, Some(b"response")) => Some(Channel::Answer),
                _ => None,
            });
        }
    }

    /// Ends the reply: what is left of thoughts and answer, where a character was never finished.
    pub fn finish(&mut self) -> [(Channel, String); 2] {
        [(Channel::Thoughts, self.thoughts.finish()), (Channel::Answer, self.answer.finish())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::chat::{ChatOptions, ChatTemplate, Message, Role};
    use crate::model::test_models::{argo_mini, tiny};

    fn read(mut reader: ReplyReader, tokenizer: &Tokenizer, ids: &[u32]) -> [String; 2] {
        let (mut thoughts, mut answer) = (String::new(), String::new());
        let pieces: Vec<_> = ids.iter().map(|&id| reader.push(tokenizer, id)).collect();
        for (channel, text) in pieces.into_iter().chain(reader.finish()) {
            if channel == Channel::Thoughts { thoughts += &text } else { answer += &text }
        }
        [thoughts, answer]
    }

    #[test]
    fn what_k3s_form_writes_is_read_back() {
        let (form, tokenizer) = (ChatTemplate::open(&tiny()).unwrap(), Tokenizer::open(&tiny()).unwrap());
        for thinking in [true, false] {
            let options = ChatOptions { thinking, ..ChatOptions::default() };
            let user = Message::new(Role::User, "hi");
            let said = Message {
                reasoning_content: Some("let me see 🙂".into()),
                ..Message::new(Role::Assistant, "response: é\n")
            };
            let prompt = form.encode(&tokenizer, std::slice::from_ref(&user), &options).unwrap();
            let closed = ChatOptions { add_generation_prompt: false, ..options };
            let whole = form.encode(&tokenizer, &[user, said], &closed).unwrap();
            assert!(whole.starts_with(&prompt));
            let want = [if thinking { "let me see 🙂" } else { "" }, "response: é\n"];
            assert_eq!(read(form.reply(&options), &tokenizer, &whole[prompt.len()..]), want);
        }
    }

    #[test]
    fn other_forms_are_all_answer() {
        let (form, tokenizer) = (ChatTemplate::open(&argo_mini()).unwrap(), Tokenizer::open(&argo_mini()).unwrap());
        let ids = tokenizer.encode("a fox<|end|>", true).unwrap();
        let reader = form.reply(&ChatOptions::default());
        assert_eq!(read(reader, &tokenizer, &ids), ["", "a fox"]);
    }
}
