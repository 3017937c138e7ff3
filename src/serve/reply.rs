//! Replies as the API writes them: one object, or a stream of chunks. Knows no connection.

use super::mailbox::{Ended, News};
use serde_json::{Value, json};

/// Which endpoint a reply is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

/// What every part of a reply says of it.
#[derive(Clone, Debug)]
pub struct Head {
    /// Which endpoint.
    pub kind: Kind,
    /// Its id.
    pub id: String,
    /// When, in seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// What decides the text beside the request: model and kernels.
    pub fingerprint: String,
}

fn usage(ended: &Ended) -> Value {
    json!({
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.completion_tokens,
        "total_tokens": ended.prompt_tokens + ended.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": ended.cached_tokens},
    })
}

impl Head {
    fn object(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        })
    }

    /// The whole reply.
    pub fn whole(&self, text: News, ended: &Ended) -> Value {
        let mut value = match self.kind {
            Kind::Chat => {
                let mut message = json!({"role": "assistant", "content": text.answer, "refusal": null});
                if !text.thoughts.is_empty() {
                    message["reasoning_content"] = text.thoughts.into();
                }
                let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": ended.reason});
                self.object("chat.completion", json!([choice]))
            }
            Kind::Completion => {
                let choice = json!({"index": 0, "text": text.answer, "logprobs": null, "finish_reason": ended.reason});
                self.object("text_completion", json!([choice]))
            }
        };
        value["usage"] = usage(ended);
        value
    }

    /// The first chunk; a completion has none of its own.
    pub fn first(&self, include_usage: bool) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (self.kind == Kind::Chat).then(|| self.chunk(delta, Value::Null, include_usage))
    }

    /// The chunks of more text.
    pub fn more(&self, thoughts: &str, answer: &str, include_usage: bool) -> Vec<Value> {
        let mut out = Vec::new();
        match self.kind {
            Kind::Chat => {
                for (field, text) in [("reasoning_content", thoughts), ("content", answer)] {
                    if !text.is_empty() {
                        out.push(self.chunk(json!({field: text}), Value::Null, include_usage));
                    }
                }
            }
            Kind::Completion if answer.is_empty() => {}
            Kind::Completion => out.push(self.chunk(answer.into(), Value::Null, include_usage)),
        }
        out
    }

    /// The chunks of the end.
    pub fn last(&self, ended: &Ended, include_usage: bool) -> Vec<Value> {
        let nothing = if self.kind == Kind::Chat { json!({}) } else { "".into() };
        let mut out = vec![self.chunk(nothing, ended.reason.into(), include_usage)];
        if include_usage {
            let mut value = self.object(self.chunk_object(), json!([]));
            value["usage"] = usage(ended);
            out.push(value);
        }
        out
    }

    fn chunk_object(&self) -> &'static str {
        if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn chunk(&self, content: Value, reason: Value, include_usage: bool) -> Value {
        let field = if self.kind == Kind::Chat { "delta" } else { "text" };
        let choice = json!({"index": 0, field: content, "logprobs": null, "finish_reason": reason});
        let mut value = self.object(self.chunk_object(), json!([choice]));
        if include_usage {
            value["usage"] = Value::Null;
        }
        value
    }
}
