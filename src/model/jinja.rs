//! A model's Jinja chat template, rendered so that message text cannot yield control tokens.
//!
//! A template returns one string, so message text is marked before rendering: a private character, found in no input,
//! goes after every character that could begin a control name, and before text that could continue one. Control names
//! are then looked for in the marked string, where only the template's own can match, and the marks are removed.
//! `<think>` and `</think>` stay unmarked unless they are control names, because templates search assistant text for
//! them; a template's other searches for text that begins like a control name find nothing in messages.

use super::chat::{ChatOptions, Effort, Message, Segment};
use super::vocab::{Controls, Piece};
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use std::collections::{HashMap, HashSet};

/// Tags that templates look for in assistant text.
const SEARCHED_TAGS: [&str; 2] = ["<think>", "</think>"];

/// A compiled template with what it needs to know of the tokenizer.
#[derive(Debug)]
pub(super) struct Jinja {
    environment: Environment<'static>,
    source: String,
    bos_token: String,
    eos_token: String,
    controls: Controls,
    uses_thinking: bool,
    uses_effort: bool,
}

impl Jinja {
    /// Compiles `source`. Errors carry the template engine's words and line.
    pub(super) fn new(
        source: String,
        bos_token: String,
        eos_token: String,
        controls: Controls,
    ) -> Result<Self, String> {
        if let Some(short) = controls.names().find(|n| n.chars().count() < 2) {
            return Err(format!("control token {short:?} is one character, which message text cannot be kept from"));
        }
        let mut environment = Environment::new();
        let whole = |e: Error| format!("{e:#}");
        // The settings under which published templates are written.
        let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(whole)?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned("chat_template", source.clone()).map_err(whole)?;
        let used = environment.get_template("chat_template").map_err(whole)?.undeclared_variables(false);
        let (uses_thinking, uses_effort) =
            (used.contains("enable_thinking") || used.contains("thinking"), used.contains("reasoning_effort"));
        Ok(Self { environment, source, bos_token, eos_token, controls, uses_thinking, uses_effort })
    }

    /// Whether the template writes who speaks, by what it says of messages.
    pub(super) fn uses_names(&self) -> bool {
        [".name", "['name']", "[\"name\"]"].iter().any(|word| self.source.contains(word))
    }

    /// Whether the template looks at the thinking switch.
    pub(super) fn uses_thinking(&self) -> bool {
        self.uses_thinking
    }

    /// Whether the template looks at the effort.
    pub(super) fn uses_effort(&self) -> bool {
        self.uses_effort
    }

    /// Renders a conversation as text and control tokens.
    pub(super) fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<Segment>, String> {
        let mark = self.unused_character(messages)?;
        let marked: Vec<Message> = messages
            .iter()
            .map(|m| Message {
                role: m.role,
                content: self.marked(&m.content, mark),
                name: m.name.as_ref().map(|n| self.marked(n, mark)),
                reasoning_content: m.reasoning_content.as_ref().map(|r| self.marked(r, mark)),
            })
            .collect();
        let whole = |e: Error| format!("{e:#}");
        let context = context! {
            messages => Value::from(Serde(&marked)),
            add_generation_prompt => options.add_generation_prompt,
            enable_thinking => options.thinking,
            thinking => options.thinking,
            reasoning_effort => options.effort.map(Effort::name),
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
        };
        let text = self.environment.get_template("chat_template").and_then(|t| t.render(context)).map_err(whole)?;
        let pieces = self.controls.split(&text).into_iter();
        let segments = pieces.map(|piece| match piece {
            Piece::Control(name, _) => Segment { text: name.to_owned(), control: true },
            Piece::Text(text) => Segment { text: text.replace(mark, ""), control: false },
        });
        Ok(segments.filter(|s| !s.text.is_empty()).collect())
    }

    /// A private-use character that occurs in no input of this rendering.
    fn unused_character(&self, messages: &[Message]) -> Result<char, String> {
        let mut inputs: Vec<&str> = vec![&self.source, &self.bos_token, &self.eos_token];
        inputs.extend(self.controls.names());
        for m in messages {
            inputs.push(&m.content);
            inputs.extend(m.name.as_deref());
            inputs.extend(m.reasoning_content.as_deref());
        }
        let private = |c: &char| ('\u{f0000}'..='\u{ffffd}').contains(c);
        let used: HashSet<char> = inputs.iter().flat_map(|s| s.chars()).filter(|c| private(c)).collect();
        let free = ('\u{f0000}'..='\u{ffffd}').find(|c| !used.contains(c));
        free.ok_or_else(|| "the messages use every character of plane 15; none is left to mark them with".into())
    }

    /// Message text with `mark` after every character that begins a control name, and before text that could continue a
    /// control name which the template has begun.
    fn marked(&self, text: &str, mark: char) -> String {
        let begins = |c: char| self.controls.names().any(|n| n.starts_with(c));
        let mut starts: HashMap<char, bool> = HashMap::new();
        let mut out = String::with_capacity(text.len() + 16);
        let body_at = text.len() - text.trim_start().len();
        for (at, c) in text.char_indices() {
            if at == body_at && self.may_continue_a_name(&text[at..]) {
                out.push(mark);
            }
            out.push(c);
            let searched =
                SEARCHED_TAGS.iter().any(|tag| text[at..].starts_with(tag) && self.controls.id(tag).is_none());
            if *starts.entry(c).or_insert_with(|| begins(c)) && !searched {
                out.push(mark);
            }
        }
        out
    }

    /// Whether `text` could be the rest, or a middle part, of a control name.
    fn may_continue_a_name(&self, text: &str) -> bool {
        let trimmed = text.trim_end();
        self.controls.names().any(|name| {
            let mut tails = name.char_indices().skip(1).map(|(at, _)| &name[at..]);
            tails.any(|tail| text.starts_with(tail) || tail.starts_with(trimmed))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::byte_level;
    use crate::model::chat::Role;
    use crate::model::test_models::argo_mini;

    fn user(content: &str) -> Message {
        Message::new(Role::User, content)
    }

    fn text_of(segments: &[Segment]) -> String {
        segments.iter().map(|s| s.text.as_str()).collect()
    }

    /// A template over argo-mini's control tokens.
    fn jinja(source: &str) -> Jinja {
        let controls = byte_level::controls_of(&argo_mini().join("tokenizer.json")).unwrap();
        Jinja::new(source.into(), "<|bos|>".into(), "<|eos|>".into(), controls).unwrap()
    }

    #[test]
    fn text_cannot_complete_a_name_that_the_template_or_another_message_began() {
        let joined = jinja("{% for m in messages %}{{ m.content | trim }}{% endfor %}");
        let opened = jinja("{% for m in messages %}<|{{ m.content.strip() }}{% endfor %}|>");
        let any = ChatOptions::default();
        for talk in [["<|en", "d|>"], ["  <", "|end|> "], ["<|", "end|>"], ["end", "end|>"], ["en", "d|>"]] {
            let talk = talk.map(user);
            assert!(joined.render(&talk, &any).unwrap().iter().all(|s| !s.control), "{talk:?}");
            assert!(opened.render(&talk, &any).unwrap().iter().all(|s| !s.control), "{talk:?}");
        }
    }

    #[test]
    fn templates_may_look_for_thoughts() {
        let source = "{{ messages[0].content.split('</think>')[-1] }}<|end|>";
        let segments = jinja(source).render(&[user("<think>hm</think>a<b")], &ChatOptions::default()).unwrap();
        assert_eq!(text_of(&segments), "a<b<|end|>");
    }

    #[test]
    fn templates_get_published_conventions() {
        let source = "{% if enable_thinking %}\n  T{{ reasoning_effort }}\n{% endif %}\n{{ eos_token }}";
        let t = jinja(source);
        assert!(t.uses_thinking && t.uses_effort);
        let options = ChatOptions { effort: Some(Effort::Low), ..ChatOptions::default() };
        assert_eq!(text_of(&t.render(&[], &options).unwrap()), "  Tlow\n<|eos|>");
        let refusing = jinja("{{ raise_exception('roles must alternate') }}");
        assert!(refusing.render(&[], &options).unwrap_err().contains("roles must alternate"));
    }
}
