//! `argodrive serve` with the real binary: replies as the API writes them, refusals by name, prefixes that are not read again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;
mod served;

use prepared::{argodrive, json_of, mini_store};
use serde_json::{Value, json};
use served::{Server, text_of, user};
use std::sync::OnceLock;

const STORY: &str = "Once upon a time there was a little";

static SERVER: OnceLock<Server> = OnceLock::new();

/// A server that streams from the store; shared, so each test leaves it as it was.
fn server() -> &'static Server {
    SERVER.get_or_init(|| {
        // SAFETY: the function is one that may be called when the process ends.
        assert_eq!(unsafe { libc::atexit(end_server) }, 0);
        Server::start(mini_store(), &["--max-body", "16KiB", "--cache-bytes", "4MiB"])
    })
}

/// What is shared is never dropped, so the server is ended with the tests.
extern "C" fn end_server() {
    if let Some(server) = SERVER.get() {
        server.kill();
    }
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    let s = server();
    let chat = "/v1/chat/completions";
    let with = |more: Value| {
        let mut body = json!({"model": "model", "messages": [user("hi")], "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    for (more, param, code) in [
        (json!({"model": "other"}), "model", "model_not_found"),
        (json!({"model": null}), "model", "missing_required_parameter"),
        (json!({"model": 3}), "model", "invalid_type"),
        (json!({"n": 2}), "n", "unsupported_parameter"),
        (json!({"tools": tools}), "tools", "unsupported_parameter"),
        (json!({"tool_choice": "auto"}), "tool_choice", "unsupported_parameter"),
        (json!({"logprobs": true}), "logprobs", "unsupported_parameter"),
        (json!({"response_format": {"type": "json_object"}}), "response_format", "unsupported_parameter"),
        (json!({"presence_penalty": 0.5}), "presence_penalty", "unsupported_parameter"),
        (json!({"logit_bias": {"5": 1}}), "logit_bias", "unsupported_parameter"),
        (json!({"reasoning_effort": "low"}), "reasoning_effort", "unsupported_parameter"),
        (json!({"min_p": 0.1}), "min_p", "unknown_parameter"),
        (json!({"temperature": "hot"}), "temperature", "invalid_type"),
        (json!({"temperature": 2.5}), "temperature", "invalid_value"),
        (json!({"top_p": 0}), "top_p", "invalid_value"),
        (json!({"seed": 1.5}), "seed", "invalid_type"),
        (json!({"stop": 5}), "stop", "invalid_type"),
        (json!({"stop": ["a", ""]}), "stop", "invalid_value"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop", "invalid_value"),
        (json!({"max_tokens": 0}), "max_tokens", "invalid_value"),
        (json!({"max_tokens": -1}), "max_tokens", "invalid_value"),
        (json!({"max_tokens": 5, "max_completion_tokens": 6}), "max_completion_tokens", "invalid_value"),
        (json!({"stream": "yes"}), "stream", "invalid_type"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options", "invalid_value"),
        (json!({"stream": true, "stream_options": {"x": 1}}), "stream_options.x", "unknown_parameter"),
        (json!({"messages": []}), "messages", "invalid_value"),
        (json!({"messages": "hi"}), "messages", "invalid_type"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role", "invalid_value"),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role", "missing_required_parameter"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content", "missing_required_parameter"),
        (
            json!({"messages": [{"role": "user", "content": "x", "name": "bo"}]}),
            "messages[0].name",
            "unsupported_parameter",
        ),
        (json!({"messages": [{"role": "user", "content": "x", "to": "y"}]}), "messages[0].to", "unknown_parameter"),
        (json!({"messages": image}), "messages[0].content[0]", "unsupported_parameter"),
    ] {
        let reply = s.post(chat, &with(more.clone()));
        let error = &reply.json()["error"];
        let status = if code == "model_not_found" { 404 } else { 400 };
        assert_eq!(
            (reply.status, error["param"].as_str(), error["code"].as_str()),
            (status, Some(param), Some(code)),
            "{more} {error}"
        );
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{error}");
    }
    let completion = |more: Value| {
        let mut body = json!({"model": "model", "prompt": "hi", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        s.post("/v1/completions", &body)
    };
    for (more, param, code) in [
        (json!({"prompt": ["a", "b"]}), "prompt", "unsupported_parameter"),
        (json!({"prompt": {}}), "prompt", "invalid_type"),
        (json!({"prompt": [1, "a"]}), "prompt", "invalid_type"),
        (json!({"prompt": [70_000]}), "prompt", "invalid_value"),
        (json!({"echo": true}), "echo", "unsupported_parameter"),
        (json!({"best_of": 2}), "best_of", "unsupported_parameter"),
        (json!({"suffix": "end"}), "suffix", "unsupported_parameter"),
        (json!({"logprobs": 0}), "logprobs", "unsupported_parameter"),
        (json!({"prompt": vec![7; 4097]}), "prompt", "context_length_exceeded"),
    ] {
        let reply = completion(more.clone());
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, error["param"].as_str(), error["code"].as_str()),
            (400, Some(param), Some(code)),
            "{error}"
        );
        if code == "context_length_exceeded" {
            assert!(error["message"].as_str().unwrap().ends_with("4097 tokens; the longest prompt that fits has 4096"));
        }
    }
    // what asks for nothing is let through
    let nothing = json!({
        "n": 1, "tools": [], "tool_choice": "none", "logprobs": false, "logit_bias": {}, "frequency_penalty": 0,
        "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "top_p": 1, "seed": -5, "stop": null,
        "stream_options": null,
    });
    assert_eq!(s.post(chat, &with(nothing)).status, 200);
}

#[test]
fn requests_that_are_none_get_the_apis_error_too() {
    let s = server();
    let json_type = "Content-Type: application/json";
    let post = |headers: &[&str], body: &[u8]| s.request("POST", "/v1/chat/completions", headers, body);
    for (reply, status, code) in [
        (post(&[json_type], b"{\"model\":"), 400, Value::Null),
        (post(&[json_type], b"[]"), 400, Value::Null),
        (post(&[json_type], &[0xff; 40]), 400, Value::Null),
        (post(&[json_type], &vec![b'['; 10_000]), 400, Value::Null),
        (post(&[json_type], &vec![b' '; 40_000]), 413, "request_too_large".into()),
        (post(&["Content-Type: text/plain"], b"{}"), 415, "unsupported_media_type".into()),
        (s.get("/v1/chat/completions"), 405, "method_not_allowed".into()),
        (s.get("/v1/nothing"), 404, "unknown_url".into()),
        (s.get("/v1/models/other"), 404, "model_not_found".into()),
        (s.request("GET", "/v1/models", &["Host: somebody.example"], b""), 403, "host_not_allowed".into()),
    ] {
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["code"]), (status, &code), "{error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    assert_eq!(s.get("/v1/models").json()["data"][0]["id"], "model");
    assert_eq!(s.get("/v1/models/model").json()["object"], "model");
    assert_eq!(s.get("/health").json()["status"], "ok");
    assert!(s.metric("argodrive_http_requests_total{route=\"/v1/chat/completions\",code=\"413\"}") >= 1.0);
}

#[test]
fn texts_are_those_of_decode_and_streams_say_the_same() {
    let s = server();
    let mut decode = argodrive(["decode", "--json", "--resident", "--max-new", "40", "--prompt", STORY, "--store"]);
    let want = json_of(decode.arg(mini_store()));
    let body = json!({"model": "model", "prompt": STORY, "max_tokens": 40, "temperature": 0});
    let whole = s.complete(body.clone());
    assert_eq!(text_of(&whole), want["text"].as_str().unwrap());
    assert_eq!(
        (&whole["object"], &whole["choices"][0]["finish_reason"]),
        (&json!("text_completion"), &json!("length"))
    );
    let prompt_tokens = want["prompt_token_ids"].as_array().unwrap().len();
    assert_eq!(whole["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(
        (&whole["usage"]["completion_tokens"], &whole["usage"]["total_tokens"]),
        (&json!(40), &json!(40 + prompt_tokens))
    );
    let tokens = json!({"model": "model", "prompt": want["prompt_token_ids"], "max_tokens": 40, "temperature": 0});
    assert_eq!(text_of(&s.complete(tokens)), text_of(&whole));

    let mut streamed = body;
    (streamed["stream"], streamed["stream_options"]) = (true.into(), json!({"include_usage": true}));
    let reply = s.post("/v1/completions", &streamed);
    let mut events = reply.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let mut events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let usage = events.pop().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(40)));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert!(events.iter().all(|e| e["usage"].is_null() && e["id"] == events[0]["id"]));
    assert!(events.len() > 2, "it came in pieces: {}", events.len());
    let text: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, text_of(&whole));

    // a chat in the model's own form, which ends by itself
    let mut chat = json!({"model": "model", "messages": [user("What is 17 + 25?")], "temperature": 0});
    let whole = s.post("/v1/chat/completions", &chat).json();
    assert_eq!(text_of(&whole), "17 + 25 = 45");
    assert_eq!((&whole["object"], &whole["choices"][0]["finish_reason"]), (&json!("chat.completion"), &json!("stop")));
    chat["stream"] = true.into();
    let mut events = s.post("/v1/chat/completions", &chat).events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!((&events[0]["object"], events[0].get("usage")), (&json!("chat.completion.chunk"), None));
    let text: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "17 + 25 = 45");
    assert_eq!(events.last().unwrap()["choices"][0]["delta"], json!({}));
}

#[test]
fn stop_strings_end_before_themselves_and_seeds_repeat() {
    let s = server();
    let text = text_of(&s.complete(json!({"prompt": STORY, "max_tokens": 40, "temperature": 0})));
    // a piece from the middle of one word to the middle of another, which no token is
    let words: Vec<&str> = text.split(' ').collect();
    let piece = format!("{} {}", &words[4][1..], &words[5][..2]);
    let at = text.find(&piece).unwrap();
    for stop in [json!(piece), json!(["never in there", piece])] {
        let reply = s.complete(json!({"prompt": STORY, "max_tokens": 40, "temperature": 0, "stop": stop}));
        assert_eq!((text_of(&reply).as_str(), &reply["choices"][0]["finish_reason"]), (&text[..at], &json!("stop")));
        assert!(reply["usage"]["completion_tokens"].as_u64().unwrap() < 40);
    }
    let almost = format!("{piece}#");
    let reply = s.complete(json!({"prompt": STORY, "max_tokens": 40, "temperature": 0, "stop": almost}));
    assert_eq!(text_of(&reply), text, "what only begins like a stop string is text");

    let drawn =
        |seed: u64| text_of(&s.complete(json!({"prompt": STORY, "max_tokens": 24, "temperature": 1.2, "seed": seed})));
    assert_eq!(drawn(7), drawn(7));
    assert_ne!(drawn(7), drawn(8));
    let free = || text_of(&s.complete(json!({"prompt": STORY, "max_tokens": 24, "temperature": 1.2})));
    assert_ne!(free(), free(), "without a seed each request has its own");
    let narrow = |field: &str, value: Value| {
        text_of(&s.complete(json!({"prompt": STORY, "max_tokens": 40, "temperature": 1.2, "seed": 7, field: value})))
    };
    assert_eq!(
        [narrow("top_k", 1.into()), narrow("top_p", 1e-6.into())],
        [text.clone(), text],
        "one candidate is left"
    );
}

#[test]
fn a_growing_chat_is_read_on_from_where_it_stood_and_says_the_same() {
    // servers of their own: what a session holds is what the request before left
    let grown = Server::start(mini_store(), &[]);
    let turn = |s: &Server, messages: &[Value]| {
        s.chat(json!({"messages": messages, "max_tokens": 16, "temperature": 0.9, "seed": 3}))
    };
    let usage = |reply: &Value, field: &str| reply["usage"][field].as_u64().unwrap();
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let mut messages = vec![user("Tell me a short story about a fox.")];
    let first = turn(&grown, &messages);
    assert_eq!(cached(&first), 0);
    messages.extend([json!({"role": "assistant", "content": text_of(&first)}), user("And now one about a bear.")]);
    let second = turn(&grown, &messages);
    let (prompt, completion) = (usage(&first, "prompt_tokens"), usage(&first, "completion_tokens"));
    // all but the last token was fed; the text may also come back as other tokens than it was generated in
    assert!([prompt, prompt + completion - 1].contains(&cached(&second)), "{second}");
    let again = turn(&grown, &messages);
    assert_eq!(cached(&again), usage(&again, "prompt_tokens"), "the same prompt again is not read at all");
    let other = turn(&grown, &[user("What is 17 + 25?")]);
    assert_eq!(cached(&other), 0);
    let passes =
        |s: &Server| s.metric("argodrive_prompt_tokens_total") - s.metric("argodrive_prompt_tokens_cached_total");
    assert_eq!(
        passes(&grown) as u64,
        prompt + usage(&second, "prompt_tokens") - cached(&second) + usage(&other, "prompt_tokens")
    );

    let fresh = Server::start(mini_store(), &[]);
    let alone = turn(&fresh, &messages);
    assert_eq!(cached(&alone), 0);
    for reused in [&second, &again] {
        assert_eq!(reused["choices"], alone["choices"], "a text does not depend on what was read before");
    }
    // a text that a completion continues word for word
    let half = fresh.complete(json!({"prompt": STORY, "max_tokens": 10, "temperature": 0}));
    let rest = json!({"prompt": format!("{STORY}{}", text_of(&half)), "max_tokens": 10, "temperature": 0});
    let (went_on, whole) = (fresh.complete(rest.clone()), grown.complete(rest));
    assert!(cached(&went_on) > 0 && cached(&whole) == 0, "{went_on} {whole}");
    assert_eq!(text_of(&went_on), text_of(&whole));
}

#[test]
fn chats_that_take_turns_keep_their_places_while_there_is_room() {
    let turn = |s: &Server, messages: &[Value]| {
        let reply = s.chat(json!({"messages": messages, "max_tokens": 12, "temperature": 0.9, "seed": 3}));
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (text_of(&reply), cached)
    };
    let more = |chat: &mut Vec<Value>, said: &str| {
        chat.extend([json!({"role": "assistant", "content": said}), user("And then?")]);
    };
    let talk = |s: &Server| {
        let mut chats = ["Tell me a short story about a fox.", "What is 17 + 25?"].map(|text| vec![user(text)]);
        let (mut texts, mut cached) = (Vec::new(), Vec::new());
        for at in [0, 1, 0, 1, 1, 0] {
            let (text, held) = turn(s, &chats[at]);
            more(&mut chats[at], &text);
            texts.push(text);
            cached.push(held);
        }
        (texts, cached, chats)
    };
    let (two, one) =
        (Server::start(mini_store(), &["--sessions", "2"]), Server::start(mini_store(), &["--sessions", "1"]));
    let ((texts, cached, chats), (alone, pushed_out, _)) = (talk(&two), talk(&one));
    assert_eq!(texts, alone, "a text does not depend on what was kept");
    assert!(cached[..2] == [0, 0] && cached[2..].iter().all(|c| *c > 0), "{cached:?}");
    assert!(pushed_out[..4] == [0; 4] && pushed_out[4] > 0 && pushed_out[5] == 0, "{pushed_out:?}");
    let seen =
        |s: &Server| ["kept", "limit", "evicted_total"].map(|what| s.metric(&format!("argodrive_sessions_{what}")));
    assert_eq!((seen(&two), seen(&one)), ([2.0, 2.0, 0.0], [1.0, 1.0, 4.0]));
    assert!(two.metric("argodrive_sessions_bytes") > one.metric("argodrive_sessions_bytes"));
    // texts whose older rows are on a drive, each in blocks of its own, and whose rows are taken back
    let spilled = ["--sessions", "2", "--kv-ram", "100KB", "--speculate", "ngram"];
    let spilled = Server::start(mini_store(), &spilled);
    let (alike, held, _) = talk(&spilled);
    assert_eq!((alike, held, seen(&spilled)), (texts, cached, seen(&two)));
    // a third one takes the place of the one that was silent for longest
    assert_eq!(turn(&two, &[user("Name a colour.")]).1, 0);
    assert!(turn(&two, &chats[0]).1 > 0);
    assert_eq!(turn(&two, &chats[1]).1, 0);
    assert_eq!(seen(&two), [2.0, 2.0, 2.0]);
}

#[test]
fn metrics_are_those_of_the_reader() {
    let s = Server::start(mini_store(), &["--cache-bytes", "4MiB"]);
    s.complete(json!({"prompt": STORY, "max_tokens": 6, "temperature": 0}));
    let page = s.get("/metrics");
    assert_eq!(page.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    // 11 layers with experts, one pass over the prompt and five behind it
    assert_eq!(s.metric("argodrive_barriers_total"), 66.0);
    assert_eq!(s.metric("argodrive_barrier_stall_seconds_count"), 66.0);
    assert_eq!(s.metric("argodrive_barrier_seconds_bucket{le=\"+Inf\"}"), 66.0);
    assert_eq!(s.metric("argodrive_barriers_uncounted_total"), 0.0);
    let drive = |name: &str| s.metric(&format!("argodrive_drive_{name}{{drive=\"store\",emulated=\"false\"}}"));
    let reads = drive("reads_total");
    assert!(reads >= 66.0 && drive("read_bytes_total") >= reads * 4096.0);
    assert_eq!(drive("read_latency_seconds_count"), reads);
    assert!(drive("read_latency_seconds_sum") > 0.0);
    assert_eq!(drive("degraded"), 0.0);
    let (hits, misses) =
        (s.metric("argodrive_expert_cache_hits_total"), s.metric("argodrive_expert_cache_misses_total"));
    assert!(hits > 0.0 && misses > 0.0, "{hits} {misses}");
    assert_eq!(s.metric("argodrive_completion_tokens_total"), 6.0);
    assert_eq!(s.metric("argodrive_time_to_first_token_seconds_count"), 1.0);
    assert_eq!(s.metric("argodrive_http_requests_total{route=\"/v1/completions\",code=\"200\"}"), 1.0);
    assert_eq!((s.metric("argodrive_queue_waiting"), s.metric("argodrive_queue_capacity")), (0.0, 8.0));
    // what the page is fed with
    assert!(s.get("/api/live?since=0").json()["fine"].is_null(), "only for whoever asks");
    let fine = &s.get("/api/live?since=0&fine=1").json()["fine"];
    assert_eq!((&fine["step_ms"], &fine["lost"]), (&json!(10), &json!(0)));
    let drives = fine["bytes"].as_array().unwrap();
    assert!(drives.len() == 1 && (1..=600).contains(&drives[0].as_array().unwrap().len()), "{fine}");
}
