//! Routes of the server: from a request to a place in the queue, and from a mailbox to a reply or a stream.

use super::connections::{Caller, Late};
use super::error::ApiError;
use super::guard::{check_host, check_key};
use super::mailbox::{Mailbox, News};
use super::queue::Job;
use super::reply::{Head, Kind};
use super::request::{Ask, Defaults, Prompt};
use super::{Shared, dashboard, metrics};
use crate::bench::turns::longest_prompt;
use crate::model::reply::ReplyReader;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{ConnectInfo, DefaultBodyLimit, FromRequest, Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A JSON value as a body.
struct Json(Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        ([(header::CONTENT_TYPE, json)], self.0.to_string()).into_response()
    }
}

/// Time without text after which a stream says that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

type App = State<Arc<Shared>>;

/// All routes.
pub fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .route("/metrics", get(metrics_page))
        .route("/health", get(health))
        .route("/", get(|| async { dashboard::page() }))
        .route("/api/live", get(live))
        .route("/api/runs", get(runs))
        .fallback(|request: Request| async move { ApiError::no_route(request.method().as_str(), request.uri().path()) })
        .method_not_allowed_fallback(|request: Request| async move {
            ApiError::method(request.method().as_str(), request.uri().path())
        })
        .layer(DefaultBodyLimit::max(shared.max_body))
        .layer(from_fn_with_state(Arc::clone(&shared), guarded))
        .with_state(shared)
}

/// The route of a path, as metrics call it: a bounded number of them.
fn route_of(path: &str) -> &'static str {
    match path {
        "/v1/models" => "/v1/models",
        "/v1/chat/completions" => "/v1/chat/completions",
        "/v1/completions" => "/v1/completions",
        "/metrics" => "/metrics",
        "/health" => "/health",
        "/" => "/",
        "/api/live" => "/api/live",
        "/api/runs" => "/api/runs",
        path if path.starts_with("/v1/models/") => "/v1/models/{id}",
        _ => "other",
    }
}

/// What every request passes.
async fn guarded(State(shared): App, request: Request, next: Next) -> Response {
    let route = route_of(request.uri().path());
    let serving = request.extensions().get::<ConnectInfo<Caller>>().map(|caller| caller.0.serving());
    // anybody may ask whether the server is up, and may have the page, which has no numbers in it
    let open = route == "/health" || route == "/";
    let host = if shared.loopback { check_host(request.headers()) } else { Ok(()) };
    let allowed = host.and_then(|()| if open { Ok(()) } else { check_key(shared.key.as_deref(), request.headers()) });
    let mut response = match allowed {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    shared.metrics.request(route, response.status().as_u16());
    if shared.connections.limits().keep_alive.is_zero() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    match serving {
        Some(serving) => serving.until_sent(response),
        None => response,
    }
}

async fn health(State(shared): App) -> Response {
    let (waiting, running) = shared.queue.depth();
    let (status, word) = match shared.queue.is_closed() {
        true => (StatusCode::SERVICE_UNAVAILABLE, "shutting down"),
        false => (StatusCode::OK, "ok"),
    };
    let degraded = shared.live.degraded();
    let value = json!({"status": word, "generating": running, "waiting": waiting, "degraded_drives": degraded});
    (status, Json(value)).into_response()
}

async fn metrics_page(State(shared): App) -> Response {
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, text)], metrics::page(&shared)).into_response()
}

async fn live(State(shared): App, request: Request) -> Json {
    let query = request.uri().query();
    Json(dashboard::live(&shared, dashboard::since_of(query), dashboard::wants_fine(query)))
}

async fn runs(State(shared): App) -> Result<Json, ApiError> {
    let read = tokio::task::spawn_blocking(move || dashboard::runs(&shared.results)).await;
    read.map(Json).map_err(|e| ApiError::failed(format!("reading the results failed: {e}")))
}

fn model_object(shared: &Shared) -> Value {
    json!({
        "id": shared.name, "object": "model", "created": shared.created, "owned_by": "argodrive",
        "max_model_len": longest_prompt(&shared.model, &shared.config),
    })
}

async fn models(State(shared): App) -> Json {
    Json(json!({"object": "list", "data": [model_object(&shared)]}))
}

async fn model(State(shared): App, Path(id): Path<String>) -> Result<Json, ApiError> {
    match id == shared.name {
        true => Ok(Json(model_object(&shared))),
        false => Err(ApiError::no_model(&id, &shared.name)),
    }
}

/// The body of a request, JSON by its header.
async fn body_of(shared: &Shared, request: Request) -> Result<Bytes, ApiError> {
    let json = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = json.split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::content_type());
    }
    let limit = shared.connections.limits().request;
    match tokio::time::timeout(limit, Bytes::from_request(request, &())).await {
        Err(_) => {
            shared.connections.note(Late::Body);
            Err(ApiError::late("body"))
        }
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(e)) if e.status() == StatusCode::PAYLOAD_TOO_LARGE => Err(ApiError::body_too_large(shared.max_body)),
        Ok(Err(e)) => Err(ApiError::request(e.body_text())),
    }
}

fn defaults(shared: &Shared) -> Defaults<'_> {
    let config = &shared.config;
    Defaults { model: &shared.name, sampler: config.sampler, seed: shared.seed, max_new: config.max_new }
}

async fn chat(State(shared): App, request: Request) -> Result<Response, ApiError> {
    let asked = Instant::now();
    let body = body_of(&shared, request).await?;
    let Some(template) = &shared.template else {
        let said = "this model has no chat form; use /v1/completions";
        return Err(ApiError::unsupported("messages", said));
    };
    let ask = Ask::chat(&body, &defaults(&shared), template)?;
    answer(shared, ask, Kind::Chat, asked).await
}

async fn completion(State(shared): App, request: Request) -> Result<Response, ApiError> {
    let asked = Instant::now();
    let body = body_of(&shared, request).await?;
    let ask = Ask::completion(&body, &defaults(&shared))?;
    answer(shared, ask, Kind::Completion, asked).await
}

/// A prompt's tokens, and who reads the reply.
fn encode(shared: &Shared, prompt: Prompt) -> Result<(Vec<u32>, ReplyReader), ApiError> {
    let model = &shared.model;
    let wrong = |param: &str, what: String| ApiError::param(param, "invalid_value", what);
    match prompt {
        Prompt::Text(text) => {
            let tokens = model.encode_prompt(&text, false).map_err(|e| wrong("prompt", e.to_string()))?;
            Ok((tokens, ReplyReader::plain()))
        }
        Prompt::Tokens(tokens) => Ok((tokens, ReplyReader::plain())),
        Prompt::Chat(messages, options) => {
            let Some(template) = &shared.template else { return Err(ApiError::request("no chat form")) };
            let tokens = template.encode(&model.tokenizer, &messages, &options);
            Ok((tokens.map_err(|e| wrong("messages", e.to_string()))?, template.reply(&options)))
        }
    }
}

/// Puts a request into the queue and gives its reply.
async fn answer(shared: Arc<Shared>, ask: Ask, kind: Kind, asked: Instant) -> Result<Response, ApiError> {
    let Ask { prompt, max_new, sampler, stop, stream, include_usage } = ask;
    let param = if kind == Kind::Chat { "messages" } else { "prompt" };
    let of = Arc::clone(&shared);
    let encoded = tokio::task::spawn_blocking(move || encode(&of, prompt)).await;
    let (prompt, reply) = encoded.map_err(|e| ApiError::failed(format!("tokenising failed: {e}")))??;
    let vocab = shared.model.decoder.config().vocab_size;
    let longest = longest_prompt(&shared.model, &shared.config);
    if prompt.is_empty() {
        return Err(ApiError::param(param, "invalid_value", format!("`{param}` has no tokens; give some text")));
    }
    if let Some(token) = prompt.iter().find(|t| **t as usize >= vocab) {
        let said = format!("token {token} is not in the vocabulary of {vocab}");
        return Err(ApiError::param(param, "invalid_value", said));
    }
    if prompt.len() > longest {
        let said = format!("`{param}` has {} tokens; the longest prompt that fits has {longest}", prompt.len());
        return Err(ApiError::too_long(param, said));
    }
    let mailbox = Arc::new(Mailbox::default());
    let mut waiting = Waiting { shared: Arc::clone(&shared), mailbox: Arc::clone(&mailbox), over: false };
    let job = Job { prompt, max_new, sampler, stop, reply, param, mailbox: Arc::clone(&mailbox), asked };
    let head = head(&shared, kind);
    let begun = match shared.queue.push(job) {
        Ok(()) if stream => mailbox.started().await,
        pushed => pushed,
    };
    if let Err(error) = begun {
        waiting.over = true;
        return Err(error);
    }
    if stream {
        return Ok(streamed(head, waiting, include_usage));
    }
    let (text, end) = mailbox.whole().await;
    waiting.over = true;
    Ok(Json(head.whole(text, &end?)).into_response())
}

fn head(shared: &Shared, kind: Kind) -> Head {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let number = shared.replies.fetch_add(1, Ordering::Relaxed);
    Head {
        kind,
        id: format!("{prefix}-{:x}-{number}", since.as_nanos()),
        created: since.as_secs(),
        model: shared.name.clone(),
        fingerprint: shared.fingerprint.clone(),
    }
}

/// A client that waits for its text. When it goes away, this goes with it, and the text is given up.
struct Waiting {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    over: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.over {
            self.mailbox.leave();
            self.shared.metrics.cancelled();
        }
    }
}

/// A stream of events that is being sent.
struct Sending {
    head: Head,
    waiting: Waiting,
    include_usage: bool,
    ready: VecDeque<String>,
}

impl Sending {
    fn take(&mut self, news: News) {
        let News { thoughts, answer, end } = news;
        let usage = self.include_usage;
        let mut say = |values: Vec<Value>| self.ready.extend(values.iter().map(Value::to_string));
        say(self.head.more(&thoughts, &answer, usage));
        match end {
            None => {}
            Some(Ok(ended)) => {
                say(self.head.last(&ended, usage));
                self.ready.push_back("[DONE]".into());
                self.waiting.over = true;
            }
            Some(Err(error)) => {
                say(vec![error.json()]);
                self.waiting.over = true;
            }
        }
    }
}

fn streamed(head: Head, waiting: Waiting, include_usage: bool) -> Response {
    let ready = head.first(include_usage).iter().map(Value::to_string).collect();
    let sending = Sending { head, waiting, include_usage, ready };
    let events = stream::unfold(sending, |mut sending| async move {
        loop {
            if let Some(data) = sending.ready.pop_front() {
                return Some((Ok::<_, Infallible>(Event::default().data(data)), sending));
            }
            if sending.waiting.over {
                return None;
            }
            let news = sending.waiting.mailbox.news().await;
            sending.take(news);
        }
    });
    let alive = KeepAlive::new().interval(KEEP_ALIVE);
    let mut response = Sse::new(events).keep_alive(alive).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
