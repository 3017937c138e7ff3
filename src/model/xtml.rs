//! K3's chat form (k3-architecture.md section 5): tags in angle brackets whose brackets are control tokens, built as
//! segments. Only segments made here are control; message text never is. Tools are not rendered.

use super::chat::{ChatOptions, Effort, Message, Role, Segment};

pub(super) const OPEN: &str = "<|open|>";
pub(super) const CLOSE: &str = "<|close|>";
pub(super) const SEP: &str = "<|sep|>";
const END_OF_MSG: &str = "<|end_of_msg|>";

/// Segments under construction; empty text makes none.
#[derive(Default)]
struct Segments(Vec<Segment>);

impl Segments {
    fn text(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !text.is_empty() {
            self.0.push(Segment { text, control: false });
        }
    }

    fn control(&mut self, name: &str) {
        self.0.push(Segment { text: name.to_owned(), control: true });
    }

    /// `<|open|>name key="value"...<|sep|>`; each attribute is four segments, which are tokenised apart.
    fn open(&mut self, name: &str, attributes: &[(&str, &str)]) {
        self.control(OPEN);
        self.text(name);
        for (key, value) in attributes {
            self.text(format!(" {key}"));
            self.text("=\"");
            self.text(value.replace('&', "&amp;").replace('"', "&quot;"));
            self.text("\"");
        }
        self.control(SEP);
    }

    fn close(&mut self, name: &str) {
        self.control(CLOSE);
        self.text(name);
        self.control(SEP);
    }

    fn element(&mut self, name: &str, text: &str) {
        self.open(name, &[]);
        self.text(text);
        self.close(name);
    }

    fn end_message(&mut self) {
        self.close("message");
        self.control(END_OF_MSG);
    }
}

/// Renders a conversation.
pub(super) fn render(messages: &[Message], options: &ChatOptions) -> Vec<Segment> {
    let mut out = Segments::default();
    if let (true, Some(effort)) = (options.thinking, options.effort) {
        out.open("message", &[("role", Role::System.name()), ("type", "thinking-effort")]);
        out.text(effort_text(effort));
        out.end_message();
    }
    for message in messages {
        let mut attributes = vec![("role", message.role.name())];
        attributes.extend(message.name.as_deref().filter(|n| !n.is_empty()).map(|n| ("name", n)));
        out.open("message", &attributes);
        if message.role == Role::Assistant {
            if options.thinking {
                out.element("think", message.reasoning_content.as_deref().unwrap_or_default());
            }
            out.element("response", &message.content);
        } else {
            out.text(message.content.as_str());
        }
        out.end_message();
    }
    if options.add_generation_prompt {
        out.open("message", &[("role", Role::Assistant.name())]);
        out.open(if options.thinking { "think" } else { "response" }, &[]);
    }
    out.0
}

/// The system text with which the model was trained; a fact of the format, word for word.
fn effort_text(effort: Effort) -> String {
    format!(
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), \
         supported values include `low`, `medium`, `high`, and `max`.\n\
         Now the system is invoked with `thinking_effort={}`.",
        effort.name()
    )
}
