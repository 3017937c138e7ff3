//! Requests as the API writes them to what is to be generated. What would change the reply and cannot be honoured is refused by name;
//! what asks for nothing (`n: 1`, an empty list of tools) is let through.

use super::error::ApiError;
use super::fields::{Fields, wrong_type};
use crate::decode::sampler::SamplerOptions;
use crate::model::chat::{ChatOptions, ChatTemplate, Effort, Message, Role};
use serde_json::Value;

/// Stop strings of a request.
const MAX_STOPS: usize = 4;
/// Bytes of one.
const MAX_STOP_BYTES: usize = 1024;
/// The API's own number of tokens for a completion that does not say.
const COMPLETION_TOKENS: usize = 16;
/// Hottest temperature of the API.
const MAX_TEMPERATURE: f64 = 2.0;

/// What a request may leave out.
#[derive(Clone, Copy, Debug)]
pub struct Defaults<'a> {
    /// The one model.
    pub model: &'a str,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// The seed for requests without one; `None` = another one for each.
    pub seed: Option<u64>,
    /// Most tokens of a reply in a chat.
    pub max_new: usize,
}

/// What is fed.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text, tokenised as it is.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// A conversation.
    Chat(Vec<Message>, ChatOptions),
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// What is fed.
    pub prompt: Prompt,
    /// Most tokens to generate.
    pub max_new: usize,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Send the text as it grows.
    pub stream: bool,
    /// End the stream with the numbers of tokens.
    pub include_usage: bool,
}

fn is_false(value: &Value) -> bool {
    value == &Value::Bool(false)
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_u64() == Some(1)
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(serde_json::Map::is_empty)
}

fn is_string(value: &Value) -> bool {
    value.is_string()
}

fn never(_: &Value) -> bool {
    false
}

impl Ask {
    /// A request for `/v1/chat/completions`.
    pub fn chat(body: &[u8], defaults: &Defaults<'_>, template: &ChatTemplate) -> Result<Self, ApiError> {
        let mut f = Fields::of_body(body)?;
        check_model(&mut f, defaults.model)?;
        let messages = messages(&mut f, template)?;
        let options = chat_options(&mut f, template)?;
        f.neutral("logprobs", is_false, "probabilities of tokens are not given out")?;
        f.neutral("top_logprobs", is_zero, "probabilities of tokens are not given out")?;
        for field in ["tools", "functions"] {
            f.neutral(field, is_empty, "this server calls no tools")?;
        }
        for field in ["tool_choice", "function_call"] {
            f.neutral(field, |v| v == "none", "this server calls no tools")?;
        }
        f.neutral("response_format", |v| v == &serde_json::json!({"type": "text"}), "only text is generated")?;
        f.neutral("modalities", |v| v == &serde_json::json!(["text"]), "only text is generated")?;
        let given = (f.whole("max_tokens", 1, u64::MAX)?, f.whole("max_completion_tokens", 1, u64::MAX)?);
        let max_new = match given {
            (Some(a), Some(b)) if a != b => {
                let said = "`max_tokens` and `max_completion_tokens` differ; give one of them";
                return Err(ApiError::param("max_completion_tokens", "invalid_value", said));
            }
            (a, b) => a.or(b).map_or(defaults.max_new, |n| usize::try_from(n).unwrap_or(usize::MAX)),
        };
        Self::of_both(f, defaults, Prompt::Chat(messages, options), max_new)
    }

    /// A request for `/v1/completions`.
    pub fn completion(body: &[u8], defaults: &Defaults<'_>) -> Result<Self, ApiError> {
        let mut f = Fields::of_body(body)?;
        check_model(&mut f, defaults.model)?;
        let prompt = prompt(&mut f)?;
        f.neutral("logprobs", never, "probabilities of tokens are not given out")?;
        f.neutral("echo", is_false, "the prompt is not repeated")?;
        f.neutral("best_of", is_one, "one text is generated for each request")?;
        f.neutral("suffix", |v| v == "", "text is only generated behind a prompt")?;
        let max_new = f.whole("max_tokens", 1, u64::MAX)?;
        let max_new = max_new.map_or(COMPLETION_TOKENS, |n| usize::try_from(n).unwrap_or(usize::MAX));
        Self::of_both(f, defaults, prompt, max_new)
    }

    /// What both kinds of requests have.
    fn of_both(mut f: Fields, defaults: &Defaults<'_>, prompt: Prompt, max_new: usize) -> Result<Self, ApiError> {
        f.neutral("n", is_one, "one text is generated for each request")?;
        for field in ["presence_penalty", "frequency_penalty"] {
            f.neutral(field, is_zero, "tokens are not penalised")?;
        }
        f.neutral("logit_bias", is_empty, "logits are taken as they are")?;
        f.neutral("store", is_false, "nothing is stored")?;
        f.neutral("service_tier", |v| v == "auto" || v == "default", "there is one tier")?;
        // who asks, and notes of theirs: they change nothing in a reply
        for field in ["user", "safety_identifier", "prompt_cache_key"] {
            f.neutral(field, is_string, "it must be a string")?;
        }
        f.neutral("metadata", Value::is_object, "it must be an object")?;
        let mut sampler = defaults.sampler;
        let heat = f.number("temperature", "0 to 2", |t| (0.0..=MAX_TEMPERATURE).contains(&t))?;
        sampler.temperature = heat.map_or(sampler.temperature, |t| t as f32);
        let top_p = f.number("top_p", "above 0 and at most 1", |p| p as f32 > 0.0 && p <= 1.0)?;
        sampler.top_p = top_p.map_or(sampler.top_p, |p| p as f32);
        if let Some(k) = f.whole("top_k", 0, u64::from(u32::MAX))? {
            sampler.top_k = k as u32;
        }
        sampler.seed = seed(&mut f)?.or(defaults.seed).unwrap_or_else(|| fastrand::u64(..));
        let stop = stop(&mut f)?;
        let stream = f.boolean("stream")?.unwrap_or(false);
        let include_usage = stream_options(&mut f, stream)?;
        f.finish()?;
        Ok(Self { prompt, max_new, sampler, stop, stream, include_usage })
    }
}

fn check_model(f: &mut Fields, have: &str) -> Result<(), ApiError> {
    match f.string("model")? {
        Some(asked) if asked == have => Ok(()),
        Some(asked) => Err(ApiError::no_model(&asked, have)),
        None => Err(ApiError::param("model", "missing_required_parameter", "you must provide `model`")),
    }
}

/// Any whole number of 64 bits; a negative one stands for its bits.
fn seed(f: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = f.take("seed") else { return Ok(None) };
    match value.as_u64().or(value.as_i64().map(|n| n as u64)) {
        Some(seed) => Ok(Some(seed)),
        None => Err(wrong_type("seed", "an integer of 64 bits", &value)),
    }
}

fn stop(f: &mut Fields) -> Result<Vec<String>, ApiError> {
    let list = match f.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(one) => vec![one],
    };
    if list.len() > MAX_STOPS {
        let said = format!("`stop` has {} strings; at most {MAX_STOPS} are looked for", list.len());
        return Err(ApiError::param("stop", "invalid_value", said));
    }
    let text = |value: Value| match value {
        Value::String(text) if (1..=MAX_STOP_BYTES).contains(&text.len()) => Ok(text),
        Value::String(text) => {
            let said = format!("a string of `stop` has {} bytes; it must have 1 to {MAX_STOP_BYTES}", text.len());
            Err(ApiError::param("stop", "invalid_value", said))
        }
        other => Err(wrong_type("stop", "a string or an array of strings", &other)),
    };
    list.into_iter().map(text).collect()
}

fn stream_options(f: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(value) = f.take("stream_options") else { return Ok(false) };
    if !stream {
        let said = "`stream_options` is only allowed when `stream` is true";
        return Err(ApiError::param("stream_options", "invalid_value", said));
    }
    let mut options = Fields::of(value, "stream_options".into())?;
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    options.finish()?;
    Ok(include_usage)
}

/// A string, one string or one list of tokens in an array, or tokens.
fn prompt(f: &mut Fields) -> Result<Prompt, ApiError> {
    let expected = "a string, an array with one string, or an array of token ids";
    let Some(value) = f.take("prompt") else {
        return Err(ApiError::param("prompt", "missing_required_parameter", "you must provide `prompt`"));
    };
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) if list.first().is_some_and(Value::is_number) => tokens(list).map(Prompt::Tokens),
        Value::Array(mut list) => match (list.len(), list.pop()) {
            (1, Some(Value::String(text))) => Ok(Prompt::Text(text)),
            (1, Some(Value::Array(list))) => tokens(list).map(Prompt::Tokens),
            (2.., Some(Value::String(_) | Value::Array(_))) => {
                Err(ApiError::unsupported("prompt", "`prompt` has several texts; send one request for each"))
            }
            (_, other) => Err(wrong_type("prompt", expected, &other.unwrap_or(Value::Array(Vec::new())))),
        },
        other => Err(wrong_type("prompt", expected, &other)),
    }
}

fn tokens(list: Vec<Value>) -> Result<Vec<u32>, ApiError> {
    let token = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong_type("prompt", "an array of token ids", value))
    };
    list.iter().map(token).collect()
}

fn chat_options(f: &mut Fields, template: &ChatTemplate) -> Result<ChatOptions, ApiError> {
    let mut options = ChatOptions::default();
    let Some(effort) = f.string("reasoning_effort")? else { return Ok(options) };
    let name = "reasoning_effort";
    match (effort.as_str(), effort.parse::<Effort>()) {
        ("none", _) if template.uses_thinking() => options.thinking = false,
        (_, Ok(effort)) if template.uses_effort() => options.effort = Some(effort),
        _ if template.uses_effort() => {
            let said = format!("`{name}` is `{effort}`; this model knows none, low, high and max");
            return Err(ApiError::param(name, "invalid_value", said));
        }
        _ => {
            return Err(ApiError::unsupported(
                name,
                format!("`{name}` is not supported: this model's chat form has none"),
            ));
        }
    }
    Ok(options)
}

fn messages(f: &mut Fields, template: &ChatTemplate) -> Result<Vec<Message>, ApiError> {
    let list = match f.take("messages") {
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong_type("messages", "an array", &other)),
        None => return Err(ApiError::param("messages", "missing_required_parameter", "you must provide `messages`")),
    };
    if list.is_empty() {
        return Err(ApiError::param("messages", "invalid_value", "`messages` is empty; give at least one"));
    }
    list.into_iter().enumerate().map(|(at, value)| message(value, at, template)).collect()
}

fn message(value: Value, at: usize, template: &ChatTemplate) -> Result<Message, ApiError> {
    let mut f = Fields::of(value, format!("messages[{at}]"))?;
    let role_name = f.name("role");
    let role = match f.string("role")?.as_deref() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some(other) => {
            let said = format!("`{role_name}` is `{other}`; this server knows system, developer, user and assistant");
            return Err(ApiError::param(role_name, "invalid_value", said));
        }
        None => {
            let said = format!("you must provide `{role_name}`");
            return Err(ApiError::param(role_name, "missing_required_parameter", said));
        }
    };
    let content = content(&mut f)?;
    let name = f.string("name")?;
    if name.is_some() && !template.uses_names() {
        let name = f.name("name");
        return Err(ApiError::unsupported(
            &name,
            format!("`{name}` is not supported: this model's chat form has no names"),
        ));
    }
    let mut reasoning_content = None;
    if role == Role::Assistant {
        reasoning_content = f.string("reasoning_content")?;
        f.neutral("tool_calls", is_empty, "this server calls no tools")?;
        for field in ["function_call", "audio", "refusal"] {
            f.neutral(field, never, "it is not part of this model's chat form")?;
        }
        // a member of replies that clients send back as they came
        f.neutral("annotations", is_empty, "it is not part of this model's chat form")?;
    }
    f.finish()?;
    Ok(Message { role, content, name, reasoning_content })
}

/// A string, or parts that are all text.
fn content(f: &mut Fields) -> Result<String, ApiError> {
    let name = f.name("content");
    let parts = match f.take("content") {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong_type(&name, "a string or an array of parts", &other)),
        None => {
            let said = format!("you must provide `{name}`");
            return Err(ApiError::param(name, "missing_required_parameter", said));
        }
    };
    let mut text = String::new();
    for (at, part) in parts.into_iter().enumerate() {
        let path = format!("{name}[{at}]");
        let mut part = Fields::of(part, path.clone())?;
        if part.string("type")?.as_deref() != Some("text") {
            let said = format!("`{path}` is not supported: only parts of type `text` are read");
            return Err(ApiError::unsupported(path, said));
        }
        text += &part.string("text")?.unwrap_or_default();
        part.finish()?;
    }
    Ok(text)
}
